"""Random proposals: whatever policies ask, the arbiter's promises hold. May import `twin` and hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import START_NS, eight_nodes, site_of
from twin.catalogue import NS
from twin.contracts import Proposal
from twin.control import Arbiter, Claim

CAP, LEVEL = "gpu.power_cap_w", "node.service_level"
SITE = site_of(eight_nodes(controls={LEVEL: {"blast_radius": 3}}))
LOW, HIGH, SAFE, SLEW, DEADBAND = 200.0, 350.0, 200.0, 50.0, 5.0
NAN = float("nan")
WATTS = st.one_of(st.floats(0, 600), st.sampled_from([LOW, HIGH, -np.inf, np.inf, 204.9, 205.0]))
READ = st.one_of(st.just(NAN), st.floats(100, 400))


@st.composite
def proposals(draw: st.DrawFn, control: str, values: st.SearchStrategy[float]) -> Proposal:
    index = sorted(draw(st.sets(st.integers(0, 7), min_size=1)))
    pairs = [sorted((draw(values), draw(values))) for _ in index]
    want = [draw(st.one_of(st.just(NAN), values)) for _ in index]
    lo, hi = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    return Proposal(control, np.array(index, np.int32), lo, hi, np.array(want), "drawn")


CAPS = st.lists(proposals(CAP, WATTS), max_size=4)
LEVELS = st.lists(proposals(LEVEL, st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0])), max_size=3)
COLUMN = st.lists(READ, min_size=8, max_size=8).map(np.array)


def claims(some: list[Proposal]) -> list[Claim]:
    return [Claim(i, f"p{i}", p, None) for i, p in enumerate(some)]


def naive_interval(some: list[Proposal], entity: int) -> tuple[float, float] | None:
    """The interval left open for an entity, one voice after the other; None if nobody speaks of it."""
    lo, hi, spoken = LOW, HIGH, False
    for p in some:
        if entity in p.index:
            at = int(np.flatnonzero(p.index == entity)[0])
            spoken = True
            plo, phi = float(p.lo[at]), float(p.hi[at])
            if phi < lo:
                hi = lo
            elif plo > hi:
                lo = hi
            else:
                lo, hi = max(lo, plo), min(hi, phi)
    return (lo, hi) if spoken else None


@given(CAPS, COLUMN)
def test_a_settled_value_lies_in_what_the_claims_left_open(
    some: list[Proposal], readback: np.ndarray
) -> None:
    done = Arbiter(SITE).settle(CAP, claims(some), readback)
    for entity in range(8):
        interval = naive_interval(some, entity)
        if interval is None:
            assert np.isnan(done.value[entity])
            continue
        assert interval[0] <= done.value[entity] <= interval[1]
        wishes = [float(p.want[p.index == entity][0]) for p in some if entity in p.index]
        first = next((w for w in wishes if not np.isnan(w)), NAN)
        if np.isnan(first):
            first = readback[entity] if not np.isnan(readback[entity]) else done.value[entity]
        if len(wishes) == 1:
            assert done.value[entity] == np.clip(first, *interval)


@given(proposals(CAP, WATTS), CAPS, COLUMN)
def test_a_weaker_voice_never_leaves_the_strongest_interval(
    strongest: Proposal, weaker: list[Proposal], readback: np.ndarray
) -> None:
    alone = Arbiter(SITE).settle(CAP, claims([strongest]), readback)
    done = Arbiter(SITE).settle(CAP, claims([strongest, *weaker]), readback)
    for entity in strongest.index.tolist():
        assert (
            alone.lo[entity] <= done.lo[entity] <= done.value[entity] <= done.hi[entity] <= alone.hi[entity]
        )


class Device:
    """Eight GPUs under an arbiter, a second per step."""

    def __init__(self, control: str = CAP) -> None:
        self.arbiter, self.control = Arbiter(SITE), control
        self.lease = self.arbiter.leases[control]
        self.now_ns = START_NS

    def step(
        self, some: list[Proposal], readback: np.ndarray, dt_s: float = 1.0
    ) -> tuple[np.ndarray, Any, list[Any]]:
        """(values before, settlement as it was before the limits, commands)"""
        self.now_ns += round(dt_s * NS)
        self.lease.lapse(self.now_ns)
        before = self.lease.value.copy()
        wished = self.arbiter.settle(self.control, claims(some), readback)
        done = self.arbiter.settle(self.control, claims(some), readback)
        self.arbiter.limit(done, readback, dt_s)
        batches = self.arbiter.command(done, readback, np.zeros(8, np.int32), self.now_ns)
        batches += self.arbiter.withdraw(self.control, ~np.isnan(done.value), self.now_ns, dt_s)
        return before, wished, batches


@pytest.mark.long
@given(st.lists(st.tuples(CAPS, COLUMN), min_size=1, max_size=8), st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=70)
def test_caps_step_by_step(steps: list[tuple[list[Proposal], np.ndarray]], dt_s: float) -> None:
    device = Device()
    numbers: list[int] = []
    for some, readback in steps:
        before, wished, batches = device.step(some, readback, dt_s)
        after = device.lease.value
        for batch in batches:
            assert not np.isnan(batch.value).any()
            assert ((batch.value >= LOW) & (batch.value <= HIGH)).all(), (
                "inside the envelope, whatever is asked"
            )
            assert (batch.expires_ns == device.now_ns + 30 * NS) or batch.renewal
            if not batch.renewal:
                numbers += batch.command.tolist()
                assert (
                    not np.isclose(batch.value, before[batch.index], rtol=0, atol=1e-12).any() or batch.final
                )
        for entity in range(8):
            _check_step(entity, before[entity], after[entity], wished, readback[entity], dt_s)
    assert numbers == list(range(1, len(numbers) + 1)), "each new command has the next number"


def _check_step(entity: int, before: float, after: float, wished: Any, readback: float, dt_s: float) -> None:
    goal, lo, hi = wished.value[entity], wished.lo[entity], wished.hi[entity]
    if np.isnan(goal):
        assert np.isnan(after) or not np.isnan(before), "nothing is commanded that nobody asked for"
        return
    stands = before if not np.isnan(before) else readback if not np.isnan(readback) else SAFE
    stands = float(
        np.clip(stands, LOW, HIGH)
    )  # what stands outside the envelope is taken to its edge at once
    if goal < stands:  # protective: at once, unless it is jitter inside the interval
        assert after == goal or (after == before and lo <= before <= hi and before - goal < DEADBAND)
    else:
        assert after <= max(goal, stands)
        assert after <= stands + SLEW * dt_s + 1e-9
        moved = after == goal or after >= stands + SLEW * dt_s - 1e-9
        assert moved or (after == before and goal - before < DEADBAND)


@given(
    st.lists(
        st.tuples(LEVELS, st.lists(st.sampled_from([NAN, 0.0, 1.0, 3.0]), min_size=8, max_size=8)), max_size=8
    )
)
@settings(max_examples=70)
def test_levels_step_by_step(steps: list[tuple[list[Proposal], list[float]]]) -> None:
    device = Device(LEVEL)
    for some, column in steps:
        readback = np.array(column)
        before, wished, _ = device.step(some, readback)
        after = device.lease.value
        ours = np.nan_to_num(before) > 0
        was_out = ours | (np.nan_to_num(readback) > 0)
        newly = (np.nan_to_num(after) > 0) & ~was_out
        assert newly.sum() <= max(0, 3 - int(ours.sum()))
        back = wished.value == 0
        assert (after[back] == 0).all(), "recovery is never held back"
        further = (wished.value > 0) & was_out
        assert np.array_equal(after[further], wished.value[further]), "nor what is out already"


@pytest.mark.long
@given(CAPS, CAPS, COLUMN)
def test_under_a_hold_values_only_go_down(
    first: list[Proposal], second: list[Proposal], readback: np.ndarray
) -> None:
    device = Device()
    device.step(first, readback)
    device.arbiter.mode = "held"
    for _ in range(40):
        before, _, _ = device.step(second, readback)
        after = device.lease.value
        running = ~np.isnan(before)
        assert (after[running] <= before[running]).all(), "and a running lease never lapses"
        fresh = ~running & ~np.isnan(after)
        stands = np.where(np.isnan(readback), np.inf, readback)  # unheard, it may stand anywhere
        assert (after[fresh] < stands[fresh]).all()


@pytest.mark.long
@given(CAPS, COLUMN)
def test_a_settlement_that_stands_gives_no_new_commands(some: list[Proposal], readback: np.ndarray) -> None:
    device = Device()
    for _ in range(8):  # 150 W at 50 W/s
        device.step(some, readback)
    for _ in range(60):
        _, _, batches = device.step(some, readback)
        assert all(b.renewal for b in batches)
    spoken = [e for e in range(8) if naive_interval(some, e)]
    assert np.flatnonzero(device.lease.running()).tolist() == spoken, "and no lease lapses"


@pytest.mark.long
@given(CAPS, COLUMN)
def test_what_is_withdrawn_ends_where_it_was_found(some: list[Proposal], readback: np.ndarray) -> None:
    device = Device()
    device.step(some, readback)
    started = device.lease.running()
    last = np.full(8, NAN)
    for _ in range(60):
        before, _, batches = device.step([], readback)
        for b in batches:
            assert (np.abs(b.value - before[b.index]) <= SLEW + 1e-9).all()
            if b.final:
                last[b.index] = b.value
    assert not device.lease.running().any()
    found = started & ~np.isnan(readback)
    assert np.array_equal(last[found], np.clip(readback, LOW, HIGH)[found])
    assert np.isnan(last[~found]).all(), "where nothing was found, the lease lapsed"
