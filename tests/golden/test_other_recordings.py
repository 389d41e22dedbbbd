"""Recordings of other forms through the command: tables and a dump of sensors, counted to the last row."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.conftest import ROOT
from tests.support.sampled_cases import sampled
from twin.cli.main import main

DEPLOY = ROOT / "deploy"
# No count depends on how many experts there are
TWO = "models: {load: {settings: {experts: 'last, seasonal_day', fit_every_s: 0}}}\n"


def replayed(capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["trace", "replay", "--format", "json", *map(str, args)]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    counted = result["messages"]
    assert counted["total"] == counted["decoded"] + counted["ignored"] + counted["bad"] > 0
    ignored = [row["count"] for row in counted["reasons"] if row["outcome"] == "ignored"]
    assert sum(ignored) == counted["ignored"]
    return result


@pytest.mark.long
def test_servers_by_the_hour(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The last five days of each of three servers; the files are long, and sorted from late to early."""
    files = []
    for path in sorted(recording("gpu-server-hourly-biohpc").glob("*.txt")):
        lines = path.read_bytes().splitlines(keepends=True)
        files.append(tmp_path / path.name)
        files[-1].write_bytes(b"".join(lines[:120]))
    mapping, site = DEPLOY / "mappings/biohpc-hourly.yaml", DEPLOY / "sites/biohpc.yaml"
    result = replayed(capsys, "--site", site, "--map", mapping, "--out", tmp_path / "run", "--trace", *files)
    assert len(files) == 3
    assert result["messages"]["decoded"] > 80
    assert result["messages"]["bad"] == 0
    assert result["ticks"] >= result["span_s"] / 3600
    again = replayed_natively(capsys, tmp_path / "run")
    assert again["state_checksum"] == result["state_checksum"]


def replayed_natively(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    assert main(["trace", "replay", "--trace", str(run), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
def test_demand_of_a_cluster(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A week of one of its sixteen files, in ticks of an hour; two experts forecast."""
    path = recording("gpu-demand-helios-earth") / "vc3sl" / "cluster_sequence_vc.csv.xz"
    part, rows = tmp_path / path.name, 7 * 24 * 60
    with lzma.open(path) as file:
        part.write_bytes(lzma.compress(b"".join(file.readlines()[: 1 + rows])))
    mapping, site = DEPLOY / "mappings/helios-gpu-demand.yaml", tmp_path / "site.yaml"
    site.write_text((DEPLOY / "sites/helios-earth.yaml").read_text() + TWO)
    result = replayed(capsys, "--site", site, "--map", mapping, "--tick", "1h", "--trace", part)
    assert result["messages"]["bad"] == 0
    assert result["messages"]["decoded"] > 0.9 * rows
    assert 7 * 24 - 1 <= result["ticks"] <= 7 * 24 + 1


@pytest.mark.long
@pytest.mark.parametrize("what", sampled(["carbon", "price"], "price"))
def test_the_grid(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str
) -> None:
    folder = recording("grid-hourly") / {"carbon": "carbon_intensity", "price": "electricity_prices"}[what]
    path = min((p for p in folder.rglob("*.csv*") if p.is_file()), key=lambda p: (p.stat().st_size, p))
    mapping = DEPLOY / f"mappings/grid-{what}.yaml"
    # Two weeks with two experts; twelve days with all of them
    models, rows = {"carbon": (TWO, 400), "price": ("", 300)}[what]
    site, part = tmp_path / "grid.yaml", tmp_path / f"part{path.suffix}"
    site.write_text("site: grid\nperiods_s: {site: 3600}\n" + models)
    part.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 1 + rows]))
    result = replayed(capsys, "--site", site, "--map", mapping, "--trace", part)
    assert result["messages"]["decoded"] == rows
    assert result["ticks"] == rows - 1


@pytest.mark.slow
def test_a_dump_of_sensors(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = recording("node-ipmi-sdr-harvard") / "2025-05-29.tar.gz"
    site = tmp_path / "site.yaml"
    assert main(["site", "discover", str(archive), "-o", str(site), "--name", "harvard"]) == 0
    assert main(["site", "check", str(site)]) == 0
    result = replayed(capsys, "--site", site, "--trace", archive)
    assert result["site"] == "harvard"
    assert result["messages"]["total"] > 290_000
    assert result["messages"]["decoded"] > 13_000
    assert result["messages"]["bad"] == 0
    assert result["ticks"] > 0
    capsys.readouterr()
    assert main(["trace", "info", str(archive), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hosts"] == len(result["racks"])
