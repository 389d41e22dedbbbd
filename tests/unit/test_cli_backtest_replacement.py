"""The evaluation `replacement`: suites and replays as it prints them, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.replacement import scores
from tests.evaluation.replacement.scores import ARMS, FleetQuarter


def main(*words: str) -> int:
    return evaluate(["replacement", *words])


def row(task: FleetQuarter) -> dict[str, Any]:
    """An arm's figures in an instant: the oracle loses least, ours a third of the way there."""
    lost = dict(zip(ARMS, (900.0, 800.0, 850.0, 700.0, 600.0, 300.0), strict=True))[task.arm] + task.seed
    known = {"lost_gpu_h": lost, "out_gpu_h": 9.0, "total_gpu_h": lost + 9.0, "interruptions": 5, "moves": 1,
             "false_drains": 0.01, "withdrawals": 3, "spares": 2, "goodput_pu": 0.97,
             "large_failed_pu": 0.045 if task.arm == "replacement" else 0.14}  # fmt: skip
    return known | {"arm": task.arm, "seed": task.seed, "cpu_s": 0.1}


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> list[FleetQuarter]:
    """Suites whose fleets are not lived."""
    lived: list[FleetQuarter] = []

    def live(task: FleetQuarter) -> dict[str, Any]:
        lived.append(task)
        return row(task)

    monkeypatch.setattr(scores, "live_task", live)
    return lived


def log_file(folder: Path) -> Path:
    """Twelve nodes over sixty days; three of them fail every few days."""
    rng = np.random.default_rng(3)
    lines = [
        (float(d), f"n{node}") for node in range(3) for d in np.cumsum(rng.exponential(5.0, 30)) if d < 60.0
    ]
    last: dict[str, float] = {}
    text = "node,start,end,class\n"
    for start, node in sorted(lines):
        if start > last.get(node, 0.0):
            last[node] = start + 0.4
            text += f"{node},{start:.4f},{last[node]:.4f},GPU\n"
    path = folder / "faults.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_suite_compares_all_arms_and_is_labelled(
    quickly: list[FleetQuarter], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--suite", "simulated", "--seeds", "2", "--rate", "6.5,lemons", "--days", "30", "--json") == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    told = json.loads(text)
    assert told["simulated"]
    assert all(part["simulated"] for part in told["fleets"])
    assert [part["scenario"] for part in told["fleets"]] == ["rate_6.5", "lemons"]
    assert {(t.seed, t.days) for t in quickly} == {(100, 30.0), (101, 30.0)}
    assert [arm["arm"] for arm in told["fleets"][0]["arms"]] == list(ARMS)
    ours = next(a for a in told["fleets"][0]["arms"] if a["arm"] == "replacement")
    assert ours["lost_gpu_h_less"]["mean"] == pytest.approx(300.0)
    assert ours["lost_gpu_h_of_oracle"]["pu"] == pytest.approx(0.5)
    assert len(told["goals"]) == 5
    assert all(goal["met"] for goal in told["goals"])


@pytest.mark.evaluation
def test_a_log_is_replayed_hour_by_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--events", str(log_file(tmp_path)), "--nodes", "12", "--from", "44", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["simulated"]
    assert told["from_day"] == 44.0
    assert [rule["rule"] for rule in told["rules"]] == ["reactive", "replacement", "decayed_count"]
    reactive, _, counted = told["rules"]
    assert reactive["withdrawn"] == 0 == reactive["avoided"]
    assert reactive["precision"] is None
    assert counted["withdrawn"] > 0
    assert counted["precision"] > reactive["base_precision"]
    assert counted["faults"] == reactive["faults"] > 0
    assert main("--events", str(log_file(tmp_path)), "--nodes", "12", "--from", "44") == 0
    assert "recorded faults of 12 nodes from day 44" in capsys.readouterr().out


@pytest.mark.evaluation
def test_what_comes_later_changes_no_earlier_decision(tmp_path: Path) -> None:
    """The same log cut short: withdrawals up to the cut are the same."""
    from tests.evaluation.replacement.replay import Replayed
    from tests.evaluation.replacement.rivals import Counted, Ours
    from twin.tables import read_faults

    path = log_file(tmp_path)
    whole, cut = (read_faults(path, 12, until_d=day).log for day in (52.0, 48.0))
    for make in (Counted, Ours):
        late = Replayed(whole, 42.0, make).run().withdrawn
        early = Replayed(cut, 42.0, make).run().withdrawn
        before = [w for w in early if w[1] <= 47.0]
        assert before or make is Ours
        assert [w for w in late if w[1] <= 47.0] == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--suite", "simulated", "--rate", "5"], "expected some of 6.5, 2.34, lemons"),
        (["--suite", "simulated", "--warnings", "all"], "expected some of measured, half, none"),
        (["--suite", "simulated", "--arms", "nobody"], "expected some of reactive"),
        (["--suite", "simulated", "--seeds", "0"], "--seeds 0: expected 1 to 200"),
        (["--suite", "simulated", "--days", "nan"], "--days nan: expected 1 to 366"),
        (["--events", "LOG"], "--nodes is missing"),
        (["--events", "LOG", "--nodes", "12", "--from", "59"], "at least 14 days follow"),
        (["--events", "no-such-file.csv", "--nodes", "12"], "no-such-file.csv"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_expected(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(log_file(tmp_path))
    assert main(*[path if word == "LOG" else word for word in words]) == 1
    assert expected in " ".join(capsys.readouterr().err.split())
