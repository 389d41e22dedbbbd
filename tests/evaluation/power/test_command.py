"""The evaluation `power`: tables, JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.__main__ import main

ROWS = ["time,running_gpu_num", *(f"t,{820 - (i // 60) % 7 * 10}" for i in range(2 * 24 * 60))]


@pytest.fixture
def demand(tmp_path: Path) -> Path:
    path = tmp_path / "demand.csv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    code = main(["power", *more])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_rivals_on_both_sites(capsys: pytest.CaptureFixture[str], demand: Path) -> None:
    few = (
        "--suite",
        "week",
        "--events",
        str(demand),
        "--days",
        "0.05",
        "--seeds",
        "2",
        "--arms",
        "none,static",
    )
    code, out, _ = run(capsys, *few, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["simulated"] is True
    assert [part["site"] for part in told["sites"]] == ["a", "b"]
    assert [part["nodes"] for part in told["sites"]] == [144, 174]
    for part in told["sites"]:
        assert [(r["arm"], r["seed"]) for r in part["rows"]] == [
            ("none", 100), ("none", 101), ("static", 100), ("static", 101)
        ] or len(part["rows"]) == 4  # fmt: skip
        none, static = part["arms"]
        assert none["lost_pu"] == 0.0
        assert static["lost_high_pu"] > 0.0
        assert none["energy_mwh"] > static["energy_mwh"]
    assert told["goals"] == []
    code, out, _ = run(capsys, *few, "--site", "b", "--scale", "0.5")
    assert code == 0
    assert "simulated: site b, 174 nodes in 10 racks, 0.05 days, 2 seeds, demand times 0.5" in out
    assert "0 of 2 runs count" in out


def test_troubles_are_counted_and_judged_by_breakers(
    capsys: pytest.CaptureFixture[str], demand: Path
) -> None:
    few = ("--suite", "week", "--events", str(demand), "--days", "0.05", "--seeds", "1", "--site", "b")
    code, out, _ = run(capsys, *few, "--arms", "none,proportional", "--troubles")
    assert code == 0
    assert "troubles beside the loss of a feed, all seeds: " in out
    assert "1 daemon gone" in out
    plain = json.loads(run(capsys, *few, "--arms", "none", "--json")[1])["sites"][0]
    assert "troubles" not in plain
    assert "troubles" not in plain["rows"][0]


@pytest.mark.parametrize(
    ("more", "says"),
    [(["--arms", "none,nobody"], "--arms nobody: expected some of none, static"),
     (["--days", "0"], "--days 0: expected"), (["--days", "nan"], "--days nan: expected"),
     (["--seeds", "0"], "--seeds 0: expected 1 to 200"), (["--jobs", "65"], "--jobs 65: expected"),
     (["--scale", "0"], "--scale 0: expected"), (["--first-seed", "-1"], "--first-seed -1: expected"),
     (["--days", "3"], "expected fewer --days"),
     (["--suite", "carbon", "--troubles"], "--troubles with --suite carbon: expected --suite week")],
)  # fmt: skip
def test_what_is_wrong_is_refused(
    capsys: pytest.CaptureFixture[str], demand: Path, more: list[str], says: str
) -> None:
    code, out, err = run(capsys, "--suite", "week", "--events", str(demand), *more)
    assert code != 0
    assert out == ""
    assert says in " ".join(err.split())


def part(**changes: Any) -> dict[str, Any]:
    from tests.evaluation.power.scores import FIGURES

    arm: dict[str, Any] = {key: 0.0 for key, _ in FIGURES} | {f"{key}_most": 0.0 for key, _ in FIGURES}
    arm |= {"arm": "racktwin", "runs": 3, "runs_that_count": 2}
    return {"site": "b", "nodes": 174, "racks": 10, "days": 7.0, "seeds": [1, 2, 3], "scale": 1.0,
            "arms": [arm]} | changes  # fmt: skip
