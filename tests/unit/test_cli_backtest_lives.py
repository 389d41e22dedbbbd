"""`racktwin backtest lives`: what it prints and what it refuses."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.simulated_lives import LifeTruth, simulated_lives
from twin.catalogue import ConfigError
from twin.cli.backtest.lives import day_of
from twin.cli.main import main as racktwin


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = simulated_lives(20, replace(LifeTruth(), columns=1, slots=8, rate=4e-3, days=240.0))
    lines = ["asset,position,begin,end,class"]
    for i in range(log.k):
        column, cage, slot = log.places[log.place[i]].tolist()
        place = f"column={column} cage={cage} slot={slot}"
        end = "" if np.isinf(log.to_d[i]) else f"{log.to_d[i]:.6f}"
        kind = "board" if log.ending[i] == 1 else ""
        lines.append(f"{log.assets[log.asset[i]]},{place},{log.from_d[i]:.6f},{end},{kind}")
    path = tmp_path_factory.mktemp("lives") / "lives.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_it_scores_and_prints(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["backtest", "lives", "--events", str(events), "--from", "130", "--step", "10d"]
    assert racktwin([*words, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["form"] == "lives"
    assert told["levels"] == ["column", "cage", "slot"]
    assert set(told["methods"]) == {"decayed_count", "age", "blind", "position", "champion"}
    assert told["positives"] == sum(value["faults"] for value in told["positions"][0]["values"])
    assert told["steps"] >= 9
    assert set(told["lemons"]) >= {"withdrawn", "failed_again", "avoided", "repeats", "oracle_avoided"}
    assert told["lookahead_steps_checked"] == 1
    assert racktwin([*words, "--frozen"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "lemons: of" in said
    assert "board: a fault follows the" in said


def test_what_cannot_be_scored_is_refused(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["backtest", "lives", "--events", str(events)]
    for more, told in (
        (["--from", "5"], "expected a day from 120 to"),
        (["--from", "2017-01-01"], "expected a day of the log: it has no dates"),
        (["--withdraw", "2"], "--withdraw 2: expected a share of the fleet"),
    ):
        assert racktwin([*words, "--step", "10d", *more]) == 1
        assert told in " ".join(capsys.readouterr().err.split()), more


def test_dates_and_days() -> None:
    zero = datetime.datetime(2016, 1, 1, tzinfo=datetime.UTC)
    assert day_of("2016-01-31", zero, 0.0) == 30.0
    assert day_of("31.5", zero, 0.0) == 31.5
    assert day_of(None, zero, 7.0) == 7.0
    with pytest.raises(ConfigError, match="expected a date such as 2017-01-01"):
        day_of("soon", zero, 0.0)
