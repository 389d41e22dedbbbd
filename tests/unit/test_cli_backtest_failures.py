"""`racktwin backtest failures`: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fault_logs import fleet
from twin.catalogue import ConfigError
from twin.cli.backtest.failures import horizons_of, shock_words, top_of
from twin.cli.main import main as racktwin

KEYS = ["precision_at_k", "recall_at_k", "lift_at_k", "roc_auc", "pr_auc", "brier", "brier_base_rate", "ece",
        "resolution", "lead_time_h", "fleet", "against_reference", "champion_days"]  # fmt: skip


def main(words: list[str]) -> int:
    return racktwin(["backtest", "failures", *words])


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = fleet(1, n=50, rate=0.008, excite=0.04, days=80.0)
    lines = [
        f"n{node},{start:.4f},{'' if np.isinf(end) else f'{end:.4f}'},{log.classes[kind]}"
        for node, start, end, kind in zip(log.node, log.start_d, log.end_d, log.kind, strict=True)
    ]
    path = tmp_path_factory.mktemp("faults") / "[log].csv"
    path.write_text("\n".join(["node,start,end,class", *lines]) + "\n")
    return path


@pytest.mark.slow
def test_json_is_one_object_with_all_scores(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--events", str(events), "--nodes", "50", "--horizons", "12h,7d", "--top", "3,5", "--from", "45"]
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    told: dict[str, Any] = json.loads(text)
    assert [h["horizon_d"] for h in told["horizons"]] == [0.5, 7.0]
    for h in told["horizons"]:
        assert set(KEYS) <= set(h)
        assert set(h["precision_at_k"]) == {"3", "5"}
        assert set(h["lead_time_h"]["5"]) == {"median", "q25", "q75", "foreseen", "faults"}
    assert told["nodes"] == 50
    assert told["lookahead_days_checked"] == 3
    assert 14 in [c["span_d"] for c in told["fleet"]]
    assert main(words) == 0
    seen = capsys.readouterr()
    assert "[log].csv" in seen.out
    assert "decayed count" in seen.out
    assert "were forecast again" in seen.out
    assert "inside 90 %" in seen.out
    assert "no cause in common" in seen.out
    assert told["shocks"] == {"count": 0, "faults": 0, "window_min": 10.0, "greatest": []}
    assert max(map(len, seen.out.splitlines())) <= 100
    assert "ends with its last event" in seen.err


def test_what_cannot_be_scored_is_refused(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--events", str(events), "--nodes", "50"]
    assert main([*words, "--from", "79"]) == 1
    assert "expected a day after day 0" in capsys.readouterr().err
    assert main([*words, "--from", "nan"]) == 1
    assert main([*words, "--until", "0"]) == 1
    assert main(["--events", "nowhere", "--nodes", "5"]) == 1
    assert main(["--events", str(events), "--nodes", "3", "--top", "2"]) == 1
    assert "expected at least so many" in capsys.readouterr().err


def test_shocks_are_told_in_a_sentence() -> None:
    greatest = [{"day": 60.3, "faults": 15, "nodes": 14}]
    said = shock_words({"count": 2, "faults": 20, "window_min": 10.0, "greatest": greatest})
    assert said.startswith("2 causes in common: 20 faults, more within 10 min than by chance")
    assert "day 60.3 of 14 nodes" in said


def test_horizons_and_tops() -> None:
    assert horizons_of("7d, 12h,1w") == (0.5, 7.0)
    assert top_of("20,10", 40) == (10, 20)
    for text in ("7", "0d", "-1d", "400d", "d", "", "1d,,2d"):
        with pytest.raises(ConfigError, match="horizons"):
            horizons_of(text)
    for text in ("0", "41", "x", "1.5", ""):
        with pytest.raises(ConfigError, match="top"):
            top_of(text, 40)
