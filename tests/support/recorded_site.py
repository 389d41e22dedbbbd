"""A recorded site in a folder of its own, to ask what-if questions of.

The fixture `lab` is that folder; `asked(capsys, "--horizon", "5")` the answer to a question, as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twin.cli.main import main
from twin.config import load_site
from twin.simulation import Question, newest_snapshot

SITE = """\
site: lab
halls:
  - name: h
    racks: [{name: "r[1-2]", profile: gb200-nvl72, nodes: 2}]
    cdus: [{name: cdu1, serves: ["r[1-2]"], loop: fw1}]
    feeders: [{name: a, side: A, serves: ["r[1-2]"]}, {name: b, side: B, serves: ["r[1-2]"]}]
loops: [{name: fw1}]
"""
SCENARIO = """\
name: no flow
duration_s: 60
faults: [{kind: pump_trip, entity: h/cdu1, begin_s: 10, part: both}]
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a site and a recorded run of it."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "site.yaml").write_text(SITE)
    args = [
        "simulation",
        "run",
        "--site",
        str(folder / "site.yaml"),
        "--for",
        "36s",
        "--out",
        str(folder / "run"),
    ]
    assert main([*args, "--json"]) == 0
    return folder


@pytest.fixture
def lab(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "run").symlink_to(recorded / "run")
    return tmp_path


BASE = ["simulation", "whatif", "--site", "site.yaml", "--scenario", "scenario.yaml"]
FROM = [*BASE, "--from", "run"]


def asked(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*FROM, *more, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def question_of(lab: Path, **more: Any) -> Question:
    spec, _ = load_site(lab / "site.yaml")
    raw, path, _ = newest_snapshot(lab / "run")
    return Question(spec, "site.yaml", raw, str(path), **more)
