"""The live part of the benchmark runs small, yields its keys, and its publisher says what it should."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import live

MAY_BE_ZERO = ("dropped", "skipped", "load_average", "stream.urgent", "late_s")


@pytest.mark.evaluation
def test_a_quick_run_yields_all_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert evaluate(["bench", "--quick", "--only", "live", "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes(), type=dict[str, float | int | str])
    for key, value in found.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), key
            assert value > 0 or (value == 0 and any(part in key for part in MAY_BE_ZERO)), (key, value)
    for gpus in (8, 72):
        for form in ("json", "msgpack"):
            assert {f"wire.gpus{gpus}.{form}.{suffix}" for _, suffix, _ in live.WIRE_ROWS} <= found.keys()
    for _, key, _ in live.LIVE_ROWS:
        assert {f"{key}_{end}" for end in ("p50", "p99", "max")} <= found.keys()
    for case in ("stream", "act"):
        assert {f"live.{case}.{suffix}" for _, suffix, _ in live.DAEMON_ROWS} <= found.keys()
    assert found["live.ordinary_samples"] == 6
    assert found["live.urgent_samples"] == 4
    assert found["live.act.urgent"] >= 1, "a loss of flow does not wait for the next tick"
    assert found["live.stream.dropped"] == 0
    assert found["history.n576.store_per_plain_rows"]
    assert str(found["live.redfish_latency_s"]).startswith("not measured")
    assert {f"goal.{key}" for key, _, _ in live.GOALS} <= found.keys()
    assert list(tmp_path.iterdir()) == [out], "what the daemons wrote is thrown away"
    said = capsys.readouterr().out
    assert str(found["live.broker"]) in said
    assert "not measured" in said
