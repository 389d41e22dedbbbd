"""The storm of faults of the benchmark runs small, yields its keys, and loses nothing on the way."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.evaluation.bench import bench, health
from tests.evaluation.bench.health import CODES, Storm, StormLoad, measured
from tests.evaluation.bench.load import START_NS

MAY_BE_ZERO = ("events_lost", "tick_", "look", "_findings", "_max")


def test_each_report_is_one_message_of_its_own_node(tmp_path: Path) -> None:
    run = Storm(StormLoad(2, 50, 3, 1, str(tmp_path)))
    run.rate = 50
    messages = run.reports(START_NS)
    run.finish()
    assert len(messages) == 50
    assert len({m.payload for m in messages}) == 50
    for message in messages:
        [event] = run.decoder.decode(message)
        node = run.site.entity("node", event.name.rpartition("/")[0])
        assert node is not None
        assert message.topic.endswith(run.site.name("node", node))
        assert event.code in CODES
        assert START_NS - 10**9 <= event.at_ns <= START_NS


@pytest.mark.evaluation
def test_a_small_storm_yields_all_keys_and_loses_nothing(tmp_path: Path) -> None:
    found = measured(StormLoad(1, 40, 12, 2, str(tmp_path)))
    for _, *keys, _ in health.ROWS:
        for key in filter(None, keys):
            if "look_ms" not in key or found[key.replace("look_ms", "looks")]:
                assert key in found or f"{key}_p50" in found, key
    for key, value in found.items():
        assert math.isfinite(value), key
        assert value > 0 or any(part in key for part in MAY_BE_ZERO), (key, value)
    assert (found["gpus"], found["nodes"]) == (72, 18)
    assert found["events_sent"] == 40 * (12 + 2)
    assert found["events_lost"] == 0
    assert found["storm_looks"] >= 1
    told = msgspec.json.decode(msgspec.json.encode(found), type=dict[str, float | int])
    shown: bench.Figures = {f"health.quick.{key}": value for key, value in told.items()}
    console = Console(record=True, width=150)
    bench.show(shown, [], console)
    assert "faults a second of work" in console.export_text()
    assert bench.judge(shown) == [], "small sizes judge no goal"


def test_goals_are_judged_at_their_size() -> None:
    found: bench.Figures = {
        "health.n100k.storm_take_trace_tick_journal_ms_p50": 51.0,
        "health.n100k.events_handled_per_s": 20_000.0,
        "health.n100k.events_lost": 0,
    }
    assert [met for *_, met in bench.judge(found)] == [False, True, True]
