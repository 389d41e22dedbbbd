"""The container files, as far as no engine is needed: names, files, and what each server would read."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.mosquitto import free_port

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"


def services() -> dict[str, Any]:
    """The services of the compose file."""
    tree = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    named = {v.partition(":")[0] for s in tree["services"].values() for v in s.get("volumes", ())}
    assert {n for n in named if not n.startswith(".")} == set(tree["volumes"])
    return dict(tree["services"])


def test_every_file_that_is_mounted_is_there_and_every_service_is_on_loopback() -> None:
    for name, service in services().items():
        assert service["network_mode"] == "host", name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), volume
        assert set(service.get("depends_on", ())) <= set(services())
    assert (ROOT / services()["setup"]["build"]["dockerfile"]).is_file()


def test_the_image_holds_what_the_wheel_is_made_of() -> None:
    lines = (COMPOSE / "Containerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(copied) >= {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)


def test_commands_in_the_files_are_ours() -> None:
    from twin.cli.commands import renamed
    from twin.cli.main import parse

    script = " ".join(services()["setup"]["entrypoint"])
    calls = re.findall(r"racktwin ((?:init|token) [^;|]+)", script)
    assert len(calls) == 2
    for call in calls:
        parse(call.split())
    image = (COMPOSE / "Containerfile").read_text()
    words = json.loads(image.rpartition("CMD ")[2])
    parse(words)
    assert renamed(words) == (words, ""), "a name of today"


def test_mosquitto_takes_its_file(server: Callable[..., Path], tmp_path: Path) -> None:
    text = (COMPOSE / "mosquitto.conf").read_text()
    assert "listener 1883 127.0.0.1" in text
    text = text.replace("1883", str(free_port())).replace("/mosquitto/data/", f"{tmp_path}/")
    (tmp_path / "m.conf").write_text(f"{text}user root\n")
    program = [str(server("mosquitto")), "-c", str(tmp_path / "m.conf")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while "running" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert "Error" not in said
    finally:
        process.kill()
        process.communicate()


def test_a_scraper_takes_the_file_of_prometheus(server: Callable[..., Path], tmp_path: Path) -> None:
    program = server("victoria-metrics")
    text = (COMPOSE / "prometheus.yaml").read_text()
    tree = {"scrape_configs": yaml.safe_load(text)["scrape_configs"]}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(tree))
    answer = subprocess.run(
        [str(program), f"-promscrape.config={tmp_path}/p.yaml", "-promscrape.config.strictParse", "-dryRun"],
        capture_output=True, text=True, check=False, cwd=tmp_path)  # fmt: skip
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("name", ["datasources.yaml", "dashboards.yaml"])
def test_grafana_is_told_its_version_of_the_form(name: str) -> None:
    assert yaml.safe_load((COMPOSE / "grafana" / name).read_text())["apiVersion"] == 1
