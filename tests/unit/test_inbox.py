"""The Inbox by example: peaks and pulses, times, counters, limits, what a decoder may hand over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twin.catalogue import NS, TABLES
from twin.telemetry import Block, Frame, Inbox, JobEnded, Reading, inbox as inbox_module
from twin.telemetry.frame import ABSURD_Q, FIRST_VALID_Q, MAX_ROW_SETS, MISSING_Q, UNTRUSTED_Q

T0 = 1_700_000_000 * NS


def q_of(frame: Frame, table: str, name: str, entity: int = 0) -> int | None:
    """The integer of a gauge's cell in a frame, None where it is not in."""
    row = TABLES[table].by_name[name].row
    for u in frame.updates:
        if u.table == table and row in u.rows:
            at = [entity] if u.entity is None else np.flatnonzero(u.entity == entity).tolist()
            if at:
                return int(u.q[list(u.rows).index(row), at[0]])
    return None


def count_of(frame: Frame, name: str, entity: int = 0) -> tuple[int, int] | None:
    """(raw, gain) of a GPU's counter, None where it is not in."""
    row = TABLES["gpu"].by_name[name].row
    for c in frame.counts:
        if row in c.rows:
            at = [entity] if c.entity is None else np.flatnonzero(c.entity == entity).tolist()
            if at:
                k = list(c.rows).index(row)
                return int(c.raw[k, at[0]]), int(c.gain[k, at[0]])
    return None


def gauges(table: str, start: int, t_ns: int, **columns: list[float]) -> Block:
    values = np.array(list(columns.values()), np.float32)
    return Block(table, start, tuple(columns), values, (), np.empty((0, values.shape[1]), np.int64), t_ns)


def counters(start: int, t_ns: int, **columns: list[int]) -> Block:
    raw = np.array(list(columns.values()), np.int64)
    return Block("gpu", start, (), np.empty((0, raw.shape[1]), np.float32), tuple(columns), raw, t_ns)


def put_all(inbox: Inbox, name: str, values: list[Any], step_ns: int = NS // 10, now_ns: int = T0) -> int:
    for v in values:
        now_ns += step_ns
        inbox.put(Reading("gpu", 0, name, v, now_ns), now_ns)
    return now_ns


def test_a_swing_of_10_hz_keeps_its_peak_and_its_mean() -> None:
    inbox = Inbox({"gpu": 2})
    swing = [600.0, 1200.0] * 5
    now = T0
    for v in swing:
        now += NS // 10
        inbox.put_block(gauges("gpu", 0, now, power_w=[v, 100.0]), now)
    frame = inbox.take(0, now, 1.0)
    assert q_of(frame, "gpu", "power_w") == 900 * 2
    assert q_of(frame, "gpu", "power_w_max") == 1200 * 2
    assert q_of(frame, "gpu", "power_w_max", 1) == 100 * 2
    inbox.put_block(gauges("gpu", 0, now, power_w=[650.0, 100.0]), now)
    frame = inbox.take(1, now, 1.0)  # the next tick begins anew
    assert (q_of(frame, "gpu", "power_w"), q_of(frame, "gpu", "power_w_max")) == (1300, 1300)


@pytest.mark.parametrize("table", ["rack", "hall", "node", "cdu", "loop"])
@pytest.mark.parametrize("as_block", [True, False])
def test_a_leak_pulse_survives_and_is_urgent(table: str, as_block: bool) -> None:
    inbox = Inbox({table: 3})
    for at, v in ((0, 0.0), (200, 1.0), (400, 0.0)):
        t = T0 + at * 10**6
        if as_block:
            inbox.put_block(gauges(table, 1, t, leak_state=[v]), t)
        else:
            inbox.put(Reading(table, 1, "leak_state", v, t), t)
        assert inbox.urgent == (at >= 200)
    frame = inbox.take(0, T0 + NS, 1.0)
    assert frame.urgent
    assert q_of(frame, table, "leak_state", 1) == 1
    assert not inbox.urgent
    assert not inbox.take(1, T0 + NS, 1.0).urgent


@pytest.mark.parametrize("as_block", [True, False])
def test_a_leak_that_is_too_old_or_absurd_is_not_urgent(as_block: bool) -> None:
    inbox = Inbox({"rack": 1})
    for v, t in ((0.0, T0), (1.0, T0 - 1), (7.0, T0), (1e38, T0)):
        if as_block:
            inbox.put_block(gauges("rack", 0, t, leak_state=[v]), T0)
        else:
            inbox.put(Reading("rack", 0, "leak_state", v, t), T0)
    inbox.put(Reading("rack", 0, "leak_state", 1.0, T0, trusted=False), T0)
    assert not inbox.urgent
    assert q_of(inbox.take(0, T0, 1.0), "rack", "leak_state") == 0


def test_a_mean_of_very_many_readings() -> None:
    inbox = Inbox({"gpu": 1})
    inbox.put(Reading("gpu", 0, "power_w", 0.0, T0), T0)
    for _ in range(65_535):
        inbox.put(Reading("gpu", 0, "power_w", 1000.0, T0), T0)
    inbox.put_block(gauges("gpu", 0, T0, power_w=[1000.0]), T0)
    inbox.put_block(gauges("gpu", 0, T0, power_w=[0.0]), T0)
    assert abs(q_of(inbox.take(0, T0, 1.0), "gpu", "power_w") or 0) in range(1998, 2001)


def test_an_empty_tick_is_an_empty_frame() -> None:
    frame = Inbox({"gpu": 4}).take(7, T0, 0.5)
    assert frame == Frame(7, T0, 0.5)


@pytest.mark.parametrize("as_block", [True, False])
def test_energy_beyond_2_53_loses_no_unit(as_block: bool) -> None:
    inbox = Inbox({"gpu": 1})
    raw = 2**62 + 1
    total = 0
    for tick in range(5):
        now = T0 + tick * NS
        value = raw + 700_001 * tick
        if as_block:
            inbox.put_block(counters(0, now, energy_mj=[value]), now)
        else:
            inbox.put(Reading("gpu", 0, "energy_mj", value, now), now)
        got = count_of(inbox.take(tick, now, 1.0), "energy_mj")
        assert got is not None
        assert got[0] == value
        total += got[1]
    assert total == 700_001 * 4


@pytest.mark.parametrize("as_block", [True, False])
def test_a_counter_that_paused_goes_on_where_it_was(as_block: bool) -> None:
    """Silence is latched as such; the growth meanwhile is judged by the time since the last real one."""
    inbox = Inbox({"gpu": 1})
    seen = []
    for tick, raw in enumerate([10**6, *[-1] * 50, 10**6 + 40 * 10**6]):
        now = T0 + tick * NS
        if as_block:
            inbox.put_block(counters(0, now, energy_mj=[raw]), now)
        else:
            inbox.put(Reading("gpu", 0, "energy_mj", raw if raw >= 0 else None, now), now)
        seen.append(count_of(inbox.take(tick, now, 1.0), "energy_mj"))
    assert seen == [(10**6, 0), *[(-1, 0)] * 50, (41 * 10**6, 40 * 10**6)]
    assert (inbox.counts["counter_jumps"], inbox.counts["missing"]) == (0, 50)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 2.0**63, 1e300, -(10**400), 10**400])
def test_a_count_that_is_none(value: float) -> None:
    inbox = Inbox({"gpu": 1})
    inbox.put(Reading("gpu", 0, "energy_mj", value, T0), T0)
    assert count_of(inbox.take(0, T0, 1.0), "energy_mj") == (-1, 0)
    assert inbox.counts["missing"] == 1


def test_the_lowest_int64_is_no_growth() -> None:
    """The difference to it wraps around to a small number."""
    inbox = Inbox({"gpu": 1})
    inbox.put_block(counters(0, T0, energy_mj=[2**63 - 2]), T0)
    inbox.put_block(counters(0, T0, energy_mj=[-(2**63)]), T0)
    assert count_of(inbox.take(0, T0, 1.0), "energy_mj") == (-1, 0)
    inbox.put_block(counters(0, T0 + 1, energy_mj=[2**63 - 1]), T0 + 1)
    assert count_of(inbox.take(1, T0 + 1, 1.0), "energy_mj") == (2**63 - 1, 1)


def test_a_counter_named_twice_counts_once() -> None:
    inbox = Inbox({"gpu": 1})
    for t, raw in ((T0, 5), (T0 + 1, 9)):
        block = Block(
            "gpu", 0, (), np.empty((0, 1), np.float32), ("ecc_dbe_count",) * 2, np.array([[raw]] * 2), t
        )
        inbox.put_block(block, t)
    assert count_of(inbox.take(0, T0 + NS, 1.0), "ecc_dbe_count") == (9, 4)


def test_a_new_device_begins_afresh() -> None:
    inbox = Inbox({"gpu": 2})
    inbox.put_block(counters(0, T0, energy_mj=[50, 60]), T0)
    inbox.put_block(gauges("gpu", 0, T0, temp_c=[50.0, 60.0]), T0)
    inbox.put(Reading("gpu", 0, "energy_mj", None, T0), T0)
    inbox.forget("gpu", 0)
    inbox.forget("gpu", 2)
    inbox.forget("rack", 0)
    frame = inbox.take(0, T0, 1.0)  # what the old device said is not taken for the new one's
    assert (count_of(frame, "energy_mj"), q_of(frame, "gpu", "temp_c")) == (None, None)
    assert count_of(frame, "energy_mj", 1) == (60, 0)
    inbox.put_block(
        counters(0, T0 - NS, energy_mj=[70, 61]), T0
    )  # its clock is behind: not rejected for that
    assert count_of(inbox.take(1, T0, 1.0), "energy_mj") == (70, 0)
    assert inbox.stages["gpu"].n_held == 0


def test_unknown_entities_are_counted_and_unknown_signals_are_a_fault_of_the_decoder() -> None:
    inbox = Inbox({"gpu": 2, "rack": 0})
    for entity in (-1, 2, 10**12):
        inbox.put(Reading("gpu", entity, "temp_c", 1.0, T0), T0)
    inbox.put(Reading("rack", 0, "flow_lpm", 1.0, T0), T0)
    inbox.put_block(gauges("gpu", 1, T0, temp_c=[1.0, 2.0]), T0)
    inbox.put_block(gauges("gpu", -1, T0, temp_c=[1.0]), T0)
    assert inbox.counts["unknown_entity"] == 4 + 2 + 1
    assert inbox.counts["accepted"] == 0
    with pytest.raises(KeyError):
        inbox.put(Reading("gpu", 0, "colour", 1.0, T0), T0)
    with pytest.raises(KeyError):
        inbox.put_block(gauges("gpu", 0, T0, colour=[1.0]), T0)
    inbox.put_block(gauges("gpu", 0, T0, temp_c=[]), T0)
    assert inbox.take(0, T0, 1.0).updates == ()


def test_events_are_bounded_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_EVENTS", 3)
    inbox = Inbox({})
    assert [inbox.put_event(JobEnded(job=str(i))) for i in range(5)] == [True] * 3 + [False] * 2
    assert (inbox.counts["events"], inbox.counts["events_dropped"]) == (3, 2)
    frame = inbox.take(0, T0, 1.0)
    assert [e.job for e in frame.events if isinstance(e, JobEnded)] == ["0", "1", "2"]
    assert inbox.put_event(JobEnded(job="6"))


def test_sources_that_invent_sets_of_columns_cost_no_memory() -> None:
    inbox = Inbox({"gpu": 1})
    names = [s.name for s in TABLES["gpu"].gauges if not s.base][:14]
    for bits in range(1, MAX_ROW_SETS + 300):
        chosen = {n: [0.0] for i, n in enumerate(names) if bits >> i & 1}
        inbox.put_block(gauges("gpu", 0, T0, **chosen), T0)
    stage = inbox.stages["gpu"]
    assert len(stage.layouts) <= MAX_ROW_SETS
    assert len(stage.partition._known) <= MAX_ROW_SETS
    assert stage.partition.n_groups <= len(TABLES["gpu"].by_name)


EVERY = [pytest.param(s, id=s.key) for t in TABLES.values() for s in t.gauges]


@pytest.mark.parametrize("signal", EVERY)
def test_every_signal_fits_its_integer(signal: Any) -> None:
    """Bounds come through, what lies outside is named, the smallest step is not lost near zero."""
    inbox = Inbox({signal.table: 7})
    low, high, step = signal.low, signal.high, signal.quantum
    values = [low, high, 0.0 if low <= 0 <= high else low, np.nextafter(np.float32(low), np.float32(-3e38)),
              np.nextafter(np.float32(high), np.float32(3e38)), float("nan"), low + step]  # fmt: skip
    inbox.put_block(gauges(signal.table, 0, T0, **{signal.name: values}), T0)
    frame = inbox.take(0, T0, 1.0)
    got = [q_of(frame, signal.table, signal.name, e) for e in range(7)]
    assert None not in got
    assert min(int(low / step), 0) > FIRST_VALID_Q
    assert max(abs(low), abs(high)) / step < 2**31
    for q, value in zip(got[:3], values[:3], strict=True):
        assert q is not None
        assert abs(q * step - value) <= max(step, abs(value) * 2e-7)
    assert got[3:6] == [ABSURD_Q, ABSURD_Q, MISSING_Q]
    if abs(low) / step < 2**22:
        assert got[6] == got[0] + 1  # type: ignore[operator]
    counts = {k: inbox.counts[k] for k in ("missing", "out_of_range", "untrusted")}
    rows = len(frame.updates[0].rows)  # a companion has the same bounds
    assert counts == {"missing": rows, "out_of_range": 2 * rows, "untrusted": 0}


@pytest.mark.parametrize("value", [1e300, float("inf"), -float("inf"), 10**400, -(10**400)])
def test_beyond_float32_is_absurd_and_warns_nobody(value: float) -> None:
    inbox = Inbox({"rack": 1, "hall": 1})
    inbox.put(Reading("rack", 0, "valve_pu", value, T0), T0)
    inbox.put(Reading("hall", 0, "cold_aisle_rh_pu", 0.5, T0, trusted=False), T0)
    frame = inbox.take(0, T0, 1.0)
    assert q_of(frame, "rack", "valve_pu") == ABSURD_Q
    assert q_of(frame, "hall", "cold_aisle_rh_pu") == UNTRUSTED_Q


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize(
    "flows, urgent",
    [
        ([100.0, 98.0], False),
        ([100.0, 51.0], False),
        ([100.0, 49.0], True),
        ([100.0, 0.0], True),
        ([0.0, 0.0], False),  # a rack that is off
        ([None, 0.0], False),
        ([100.0, None], False),
        ([100.0, -5.0], False),  # absurd
    ],
)
def test_a_loss_of_flow_is_urgent(flows: list[float | None], urgent: bool, as_block: bool) -> None:
    inbox = Inbox({"rack": 2})
    for n, flow in enumerate(flows):
        now_ns = T0 + n * NS
        if as_block:
            inbox.put_block(gauges("rack", 1, now_ns, flow_lpm=[np.nan if flow is None else flow]), now_ns)
        else:
            inbox.put(Reading("rack", 1, "flow_lpm", flow, now_ns), now_ns)
        if n == 0:
            assert not inbox.take(0, now_ns, 1.0).urgent
    assert inbox.urgent == urgent
