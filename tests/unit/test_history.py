"""History: rings hold the last stretch of what was declared, one column per step, NaN where not good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.catalogue import NS, TABLES, ConfigError
from twin.telemetry import Frame, SignalHistory, State, TableUpdate
from twin.telemetry.frame import MISSING_Q
from twin.telemetry.history import Ring

TEMP = TABLES["gpu"].by_name["temp_c"]
T0 = 1_700_000_000 * NS


@given(st.lists(st.integers(0, 4 * NS), max_size=60), st.integers(1, 12))
def test_a_ring_against_a_list(gaps: list[int], length_s: int) -> None:
    ring = Ring(TEMP, 2, float(length_s), 1.0)
    kept: list[tuple[int, float]] = []
    now = T0
    for i, gap in enumerate(gaps):
        now += gap
        ring.push(np.array([i, -i], np.float32), now)
        if not kept or now - kept[-1][0] >= NS - NS // 1000:
            kept.append((now, float(i)))
    t_ns, values = ring.ordered()
    kept = kept[-(max(2, length_s + 1)) :]
    assert t_ns.tolist() == [t for t, _ in kept]
    assert values[:, 0].tolist() == [v for _, v in kept]
    assert values[:, 1].tolist() == [-v for _, v in kept]


def test_a_full_ring_spans_at_least_what_was_asked() -> None:
    for length_s, step_s in ((10.0, 1.0), (10.0, 3.0), (0.5, 1.0), (7.5, 0.5)):
        ring = Ring(TEMP, 1, length_s, step_s)
        for i in range(100):
            ring.push(np.zeros(1, np.float32), T0 + round(i * step_s * NS))
        t_ns, _ = ring.ordered()
        assert t_ns[-1] - t_ns[0] >= length_s * NS


def test_jitter_of_a_tick_loses_no_column() -> None:
    ring = Ring(TEMP, 1, 10.0, 1.0)
    for i in range(5):
        ring.push(np.zeros(1, np.float32), T0 + i * NS - (i % 2) * NS // 2000)
    assert ring.filled == 5


def test_only_good_values_are_kept_and_copies_of_them() -> None:
    state, history = State({"gpu": 3}), SignalHistory({"gpu.temp_c": 60.0}, {"gpu": 3})
    for tick, q in enumerate(([100, 100, 100], [110, MISSING_Q, 111], [120, 121, 122])):
        update = TableUpdate(
            "gpu", np.array([TEMP.row], np.int32), None, np.array([q], np.int32), np.full(3, T0)
        )
        state.apply(Frame(tick, T0 + tick * NS, 1.0, (update,)))
        history.push(state)
    _, values = history.rings["gpu.temp_c"].ordered()
    assert np.array_equal(
        values, np.array([[50, 50, 50], [55, np.nan, 55.5], [60, 60.5, 61]], np.float32), equal_nan=True
    )


def test_a_slow_signal_takes_slower_steps() -> None:
    assert SignalHistory({"rack.flow_lpm": 7200.0}, {"rack": 1}).rings["rack.flow_lpm"].step_s == 100.0
    assert SignalHistory({"rack.flow_lpm": 600.0}, {"rack": 1}).rings["rack.flow_lpm"].step_s == 10.0
    assert SignalHistory({"gpu.temp_c": 600.0}, {"gpu": 1}).rings["gpu.temp_c"].step_s == 1.0
    assert SignalHistory({"gpu.temp_c": 600.0}, {}).rings["gpu.temp_c"].values.shape[1] == 0


@pytest.mark.parametrize("key", ["gpu.colour", "gpu.energy_mj", "temp_c", "", "nothing.temp_c"])
def test_what_cannot_be_kept_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"history_s\."):
        SignalHistory({key: 60.0}, {"gpu": 1})
