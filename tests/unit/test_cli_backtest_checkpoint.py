"""`racktwin backtest checkpoint`: closed forms, replays and suites as it prints them, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.failure import FaultLog
from policies.checkpointing import ettr, ettr_ahead, ettr_weibull
from tests.evaluation.__main__ import main as evaluate
from tests.support.fault_logs import fleet
from twin.backtest import SaveCosts
from twin.backtest.checkpoint_page import DRAWING, PAGE, IntervalAxis
from twin.catalogue import ConfigError, seconds_of
from twin.cli.backtest import checkpoint as command
from twin.cli.main import main as racktwin

JOB = ["--save", "60s", "--restart", "10m"]
# MTTF, save, restart; Daly's interval in min, best ETTR, ETTR of fixed 30, 60 and 120 min.
# source: domain.md D
TABLE = [
    ("1.8h", "60", "600", 14.0, 0.793, 0.762, 0.667, 0.490),
    ("1.8h", "10", "300", 5.9, 0.903, 0.823, 0.711, 0.519),
    ("7.9h", "60", "600", 30.1, 0.917, 0.917, 0.902, 0.852),
    ("7.9h", "10", "300", 12.5, 0.963, 0.953, 0.925, 0.868),
    ("24h", "60", "600", 53.0, 0.957, 0.951, 0.956, 0.944),
]


def main(*words: str) -> int:
    return racktwin(["backtest", "checkpoint", *words])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(*words, "--json") == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    tree: dict[str, Any] = json.loads(text)
    return tree


@pytest.mark.parametrize("row", TABLE)
def test_the_table_of_reference_values(row: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    mttf, save, restart, daly_min, best, *fixed = row
    tree = told(capsys, "--mttf", mttf, "--save", f"{save}s", "--restart", f"{restart}s")
    assert tree["ettr"] == pytest.approx(best, abs=0.001)
    assert tree["daly_s"] / 60.0 == pytest.approx(daly_min, rel=0.01)
    assert tree["interval_s"] == pytest.approx(tree["daly_s"], rel=0.01)
    assert tree["young_s"] == pytest.approx(np.sqrt(2 * float(save) * (seconds_of(mttf) or 0)))
    for minutes, expected in zip((30, 60, 120), fixed, strict=True):
        one = tree["alternatives"][f"fixed_{minutes}_min"]
        assert one["interval_s"] == 60.0 * minutes
        assert one["ettr"] == pytest.approx(expected, abs=0.001)
        assert one["behind_pp"] == pytest.approx(100 * (tree["ettr"] - one["ettr"]))
    assert set(tree["alternatives"]) == {"fixed_30_min", "fixed_60_min", "fixed_120_min", "young", "daly"}
    assert all(one["behind_pp"] >= 0 for one in tree["alternatives"].values())


def test_the_goal_is_judged_where_it_applies(capsys: pytest.CaptureFixture[str]) -> None:
    [goal] = told(capsys, "--mttf", "1.8h", *JOB)["goals"]
    assert goal["met"]
    assert goal["value_pp"] == pytest.approx(12.6, abs=0.05)
    assert told(capsys, "--mttf", "7.9h", *JOB)["goals"] == []
    assert told(capsys, "--mttf", "1.8h", *JOB, "--recall", "0.7", "--precision", "0.9")["goals"] == []
    assert main("--mttf", "1.8h", *JOB) == 0
    seen = capsys.readouterr().out
    for words in ("MTTF 1 h 48 min, save 1 min, restart 10 min", "79.31 %", "12.60 pp", "goal met"):
        assert words in seen


def test_each_kind_of_terms_has_its_own_sum(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--mttf", "1.8h", *JOB]
    hour = "fixed_60_min"
    weibull = told(capsys, *base, "--weibull", "0.6")["alternatives"][hour]["ettr"]
    assert weibull == pytest.approx(float(ettr_weibull(3600.0, 60.0, 600.0, 6480.0, 0.6)[0]))
    ahead = told(capsys, *base, "--recall", "0.7", "--precision", "0.85")
    expected = float(ettr_ahead(3600.0, 60.0, 600.0, 6480.0, 0.7, 0.85))
    assert ahead["alternatives"][hour]["ettr"] == pytest.approx(expected)
    assert ahead["without_prediction"]["ettr"] == pytest.approx(0.793, abs=0.001)
    assert ahead["without_prediction"]["gain_pp"] > 3.0
    late = told(capsys, *base, "--recall", "0.7", "--precision", "0.85", "--lead", "30s")
    assert late["without_prediction"]["gain_pp"] == pytest.approx(0.0, abs=1e-6)
    assert "too late" in late["notes"][0]
    flush = told(capsys, "--mttf", "1.8h", "--save", "5s", "--restart", "600s", "--flush", "20m")
    assert flush["interval_s"] == 1200.0
    assert flush["ettr"] == pytest.approx(float(ettr(1200.0, 5.0, 600.0, 6480.0, 1200.0)))
    assert "shorter than a flush" in flush["notes"][0]
    local = ["--local-save", "2s", "--local-restart", "30s", "--soft-mttf", "5h"]
    levels = told(capsys, *base, *local)
    assert 60.0 < levels["local_interval_s"] < levels["interval_s"] < 3600.0
    assert main(*base, *local) == 0
    assert "in memory: save 2 s, restart 30 s, MTTF of processes 5 h" in capsys.readouterr().out


def test_all_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mttf", "0", "--save", "inf", "--recall", "2", "--lead", "x", "--weibull", "9"]
    assert main(*words) == 1
    said = capsys.readouterr().err
    for expected in ("--mttf 0: expected", "--save inf: expected a duration", "--restart is missing",
                     "belong together", "--recall 2: expected", "--lead x", "--weibull 9"):  # fmt: skip
        assert expected in said
    assert said.count("error") == 7
    base = ["--mttf", "2h", *JOB]
    assert main(*base, "--local-save", "2s") == 1
    assert "all of --local-save" in capsys.readouterr().err
    assert main(*base, "--weibull", "0.5", "--recall", "0.5", "--precision", "1") == 1
    assert "one of them at a time" in capsys.readouterr().err
    assert main(*base, "--recall", "0.5", "--precision", "1", "--flush", "5s") == 1
    assert main() == 1
    assert "--mttf is missing" in capsys.readouterr().err


def test_options_of_one_kind_are_refused_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--mttf", "2h", *JOB, "--nodes", "4"], ["--mttf", "2h", *JOB, "--mend"]):
        assert main(*words) == 2
        assert "expected" in capsys.readouterr().err
    events = _csv(tmp_path)
    base = ["--events", str(events), *JOB]
    some = ["--nodes", "50"]
    for words, why in (([*some, "--mttf", "2h"], "only for closed forms"), ([], "--nodes is missing"),
                       ([*some, "--from", "59"], "at least 14 days"),
                       ([*some, "--until", "10"], "the log ends on day 10"),
                       ([*some, "--sizes", "8,x"], "--sizes x"),
                       ([*some, "--sizes", "51"], "at most 50"),
                       (["--nodes", "3"], "expected at least so many")):  # fmt: skip
        assert main(*base, *words) == 1
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(*base, *some, "--seed", "-1")
    assert "--seed: '-1': expected a whole number" in capsys.readouterr().err
    assert main("--events", "nowhere", "--nodes", "3", *JOB) == 1
    file = tmp_path / "file"
    file.write_text("")
    assert main("--mttf", "2h", *JOB, "--report", str(file)) == 1
    with pytest.raises(ConfigError, match="expected up to 16"):
        command.sizes_of(",".join("1" * 20))
    assert command.sizes_of("64, 8,8") == (8, 64)


def _csv(folder: Path) -> Path:
    log = fleet(1, n=50, rate=0.02, days=60.0)
    lines = [
        f"n{node},{start:.4f},{'' if np.isinf(end) else f'{end:.4f}'},{log.classes[kind]}"
        for node, start, end, kind in zip(log.node, log.start_d, log.end_d, log.kind, strict=True)
    ]
    path = folder / "[log].csv"
    path.write_text("\n".join(["node,start,end,class", *lines]) + "\n")
    return path


def test_a_curve_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main("--mttf", "1.8h", *JOB, "--report", str(folder)) == 0
    assert str(folder / PAGE) in capsys.readouterr().out.replace("\n", "")
    page, drawing = (folder / PAGE).read_text(), (folder / DRAWING).read_text()
    assert "best: every 14 min 2 s" in page
    assert drawing.count('<line class="level"') == 4, "the best, 30, 60 and 120 min are marked"
    assert "no simulation" in page
    assert "<path" in drawing
    assert drawing.startswith("<svg")
    assert 'xmlns="http://www.w3.org/2000/svg"' in drawing
    assert "nan" not in drawing.lower()


def test_a_restart_beyond_all_failures_is_told_and_no_gain_is_no_negative_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--mttf", "1.8h", "--save", "60s", "--restart", "100h") == 0
    assert "a restart takes longer than failures leave" in capsys.readouterr().out.replace("\n", " ")
    assert main("--mttf", "1.8h", *JOB, "--recall", "0.7", "--precision", "0.85", "--lead", "1s") == 0
    assert "saving ahead adds 0.00 pp" in capsys.readouterr().out.replace("\n", " ")


def test_the_axis_is_logarithmic() -> None:
    axis = IntervalAxis(np.geomspace(60.0, 6000.0, 11))
    places = {label: place for place, label in axis.ticks(20)}
    assert places["10 min"] == pytest.approx(0.5)
    assert places["1 min"] == pytest.approx(0.0)
    assert axis.label(500_000_000) == "every 10 min"


@pytest.mark.slow
def test_a_replay_prints_scores_and_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--events", str(_csv(tmp_path)), "--nodes", "50", *JOB, "--sizes", "10,50"]
    tree = told(capsys, *words, "--report", str(tmp_path))
    assert tree["simulated"] is False
    assert list(tree["sizes"]) == ["10", "50"]
    assert tree["from_day"] == 30.0
    assert len(tree["goals"]) == 2
    for unit in (*tree["sizes"].values(), tree["all"]):
        assert set(unit["ettr"]) == set(tree["rules"])
        assert all(0.5 < share < 1.0 for share in unit["ettr"].values())
    page = (tmp_path / PAGE).read_text()
    assert "jobs are synthetic" in page
    assert "live ahead of" in page
    again = told(capsys, *words)
    assert again["sizes"] == tree["sizes"]
    other = told(capsys, *words, "--seed", "3")
    assert other["sizes"]["10"]["ettr"] != tree["sizes"]["10"]["ettr"]
    assert main(*words) == 0
    seen = capsys.readouterr()
    for expected in ("jobs are synthetic", "oracle job", "best constant", "changes a week", "goal"):
        assert expected in seen.out
    assert "[log].csv" in seen.out


@pytest.mark.long
def test_a_suite_says_that_it_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.evaluation.checkpoint import suite as suites

    def small(seed: int) -> FaultLog:
        return fleet(seed, n=40, days=80.0, rate=0.02)

    monkeypatch.setattr(suites, "FLEETS", {"small": (small, "a few nodes")})
    for name, value in (("SIZES", (10, 40)), ("FROM_D", 50.0), ("SEEDS", (1, 2)), ("STRIKES", 300),
                        ("SHORT_LIVES", 5), ("SHAPES", (0.7, 1.0))):  # fmt: skip
        monkeypatch.setattr(suites, name, value)
    assert evaluate(["checkpoint", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["simulated"]
    assert tree["save_s"] == 60.0
    for part in ("wrong_save", "weibull", "prediction"):
        assert tree[part]["simulated"]
    assert tree["fleets"]["small"]["simulated"]
    assert evaluate(["checkpoint", "--save", "20s", "--restart", "5m"]) == 0
    seen = capsys.readouterr().out
    assert seen.count("simulated") >= 4
    assert "timed" in seen
    assert (
        suites.suite(SaveCosts(60.0, 600.0), 9)["prediction"]
        == suites.suite(SaveCosts(60.0, 600.0), 9)["prediction"]
    )
