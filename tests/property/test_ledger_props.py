"""Each joule and GPU-second of the ledger is in one place, whatever the meters say and what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import site_of
from tests.support.ledger_month import tree
from twin.ledger import BY, TIME_CLASSES, HourRecord, LedgerRow, statement
from twin.ledger.energy_split import LateRoots, Metered, RootGroups, RootMeters, split
from twin.ledger.feeder_balance import FeederBalance
from twin.ledger.gpu_time import SEEN, SeenTime
from twin.ledger.hour_account import HourAccount
from twin.ledger.hour_record import MeteredSum
from twin.ledger.rack_meters import RackMeters

SITE = site_of(tree(3))
GROUPS = RootGroups(SITE)
HOURS_NS = 3600 * 10**9


def metered(rng: np.random.Generator, true_j: np.ndarray, missing: float) -> Metered:
    known = rng.random(len(true_j)) >= missing
    gap = rng.random(len(true_j)) < 0.2
    value = true_j * (1.0 + 0.01 * rng.standard_normal(len(true_j)))
    var = np.where(gap, (0.1 * true_j) ** 2 * rng.choice([-1.0, 1.0], len(true_j)), 0.0)
    return Metered(np.where(known, value, 0.0), var, known)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.3, 1.0]),
       st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
def test_racks_and_losses_make_their_roots_and_nodes_fit_into_racks(
    seed: int, no_racks: float, no_nodes: float, no_feeders: float
) -> None:
    rng = np.random.default_rng(seed)
    node_j = rng.uniform(100.0, 9000.0, SITE.sizes["node"])
    rack_j = np.bincount(SITE.rack_of_node, node_j) * 1.05
    hall_j = np.bincount(SITE.hall_of_rack, rack_j)
    fed_j = np.repeat(hall_j / 2, 2)
    feeder, rack, node = (
        metered(rng, of, missing)
        for of, missing in ((fed_j, no_feeders), (rack_j, no_racks), (node_j, no_nodes))
    )
    late, yes = LateRoots(SITE.sizes), np.ones(4, np.bool_)
    meters = RootMeters(feeder, rng.random(4) < 0.5, yes, late)
    found = split(GROUPS, meters, rack, node, RackMeters(SITE).gain(*FeederBalance(GROUPS).gains()))
    nodes_j = np.bincount(SITE.rack_of_node, found.node.energy_j)
    told = ~found.unmetered[SITE.node_start_of_rack[:-1]]
    assert np.all(nodes_j[told] <= found.rack.energy_j[told] * (1 + 1e-9) + 1e-6)
    for values in (*found.rack[:2], *found.node[:2], found.losses.sigma2):
        assert np.isfinite(values).all()
    assert (found.rack.sigma2 >= 0).all()
    # The energy of the roots' meters is shared out whole: no joule is made or lost beside their own change
    sums = np.bincount(GROUPS.of_rack, found.rack.energy_j) + found.losses.energy_j
    whole = feeder.known.reshape(2, 2).all(axis=1)
    measured = feeder.energy_j.reshape(2, 2).sum(axis=1)
    assert np.abs(sums - measured)[whole] == pytest.approx(0.0, abs=0.5 * float(hall_j.max()))
    if no_feeders == 0.0 and no_racks == 0.0 and not rack.var_j2.any() and not feeder.var_j2.any():
        assert sums == pytest.approx(measured, rel=0.03)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_gpu_time_is_in_one_class_to_the_nanosecond(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hour, n, gpus = HourAccount(SITE.sizes), 12, 4
    rows = np.array([hour.row(("h", "job", "", "", "", f"j{i}")) for i in rng.integers(0, 5, n)], np.int64)
    total_ns = 0
    for _ in range(20):
        seen = rng.multinomial(gpus, np.full(len(SEEN), 1 / len(SEEN)), n)
        span_ns = rng.integers(0, 10**10, n)
        slowed = SeenTime(seen, rng.integers(0, 10**11, n), rng.integers(0, 10**11, n))
        hour.add_time(rows, np.arange(n), span_ns, rng.random(n) < 0.7, slowed)
        hour.slow(rows, slowed)
        for row in range(len(hour.rows)):
            wanted = int(rng.integers(0, 10**12))
            assert 0 <= hour.take_out(row, 5 + int(rng.integers(2)), wanted) <= wanted
        total_ns += gpus * int(span_ns.sum())
        assert int(hour.time_ns.sum()) == total_ns
        assert (hour.time_ns >= 0).all()


ROWS = st.builds(
    LedgerRow,
    st.sampled_from(["h1", "h2"]), st.sampled_from(["job", "idle", "rest", "cooling", "losses"]),
    st.sampled_from(["q1", "q2"]), st.sampled_from(["t1", "t2", ""]), st.just("a"), st.sampled_from("xyz"),
    st.lists(st.integers(0, 10**17), min_size=len(TIME_CLASSES), max_size=len(TIME_CLASSES)).map(tuple),
    st.floats(0, 1e12), st.floats(0, 1e9), st.floats(-1e9, 1e12), st.floats(0, 1e9), st.floats(0, 1e4),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4))
def test_every_division_of_a_statement_makes_the_same_whole(hours: list[list[LedgerRow]]) -> None:
    records = [
        HourRecord(i * HOURS_NS, HOURS_NS, MeteredSum(), {}, {}, tuple(rows)) for i, rows in enumerate(hours)
    ]
    wholes = []
    for by in BY:
        found = statement(records, by, 0, 2**62)
        if by != "rack":
            for name in TIME_CLASSES:
                assert sum(r.gpu_ns[name] for r in found.rows) == found.total.gpu_ns[name]
            assert sum(r.granted_ns for r in found.rows) == found.total.granted_ns
            assert sum(r.energy_kwh for r in found.rows) == pytest.approx(found.total.energy_kwh)
            assert sum(r.cost_usd for r in found.rows) == pytest.approx(found.total.cost_usd)
        wholes.append(found.total)
    assert all(whole.gpu_ns == wholes[0].gpu_ns for whole in wholes)
    seen = [statement(records, "job", 0, 2**62, lambda row, t=t: row.part == "job" and row.tenant == t)
            for t in ("t1", "t2", "")]  # fmt: skip
    assert sum(s.total.granted_ns for s in seen) == wholes[0].granted_ns
    assert all(row.tenant == t for s, t in zip(seen, ("t1", "t2", ""), strict=True) for row in s.rows)
