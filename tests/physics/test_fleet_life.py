"""The timeline of a fleet: what is drawn is what the table says, what is played is what was drawn."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.evaluation.health.failure_classes import (
    BENIGN,
    CLASSES,
    DAY_S,
    FAILURES,
    KINDS,
    LEMON_FACTOR,
    LEMON_PU,
    NODE_DAY_RATE,
    RACK_DAY_RATE,
    REPAIR_S,
    REPAIR_SPREAD,
)
from tests.evaluation.health.failure_draws import SHARES_PU, Failing, draw_failing, draw_shared
from tests.evaluation.health.failure_timeline import draw_timeline
from tests.support.builders import site_of, two_racks
from twin.plant import FailureTable, FailureTimeline, TimelinePlayer
from twin.plant.disturbance import Disturbance, neutral
from twin.plant.truth import Truth
from twin.site import Site

DAYS = 365.0


def fleet(racks: int = 56) -> Site:
    """Racks of nine nodes with four GPUs each, each node with a port."""
    tree = two_racks(racks=f"r[01-{racks:02d}]")
    tree["halls"][0]["racks"][0] |= {"nodes": 9, "gpus_per_node": 4}
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 1}]
    return site_of(tree)


FLEET = fleet()


@cache
def many() -> tuple[list[Failing], int, list[np.ndarray]]:
    """(failures, nodes drawn, lemons of each fleet) of years of several fleets."""
    failing: list[Failing] = []
    lemons = []
    for seed in range(12):
        found, lemon = draw_failing(FLEET, seed, DAYS)
        n = len(lemon)
        failing += [dataclasses.replace(f, node=f.node + seed * n) for f in found]
        lemons.append(lemon)
    return failing, 12 * FLEET.sizes["node"], lemons


def near(found: int, of: int, expected_pu: float, sigmas: float = 4.5) -> bool:
    """Return True if `found` of `of` agree with a share, as a binomial distribution would."""
    return abs(found - of * expected_pu) <= sigmas * np.sqrt(of * expected_pu * (1.0 - expected_pu)) + 1e-9


# The table


def test_all_of_the_table_has_a_source_and_something_to_act_on() -> None:
    well = neutral(FLEET)
    for failure in FAILURES:
        assert failure.source
        assert failure.signs
        assert 0.0 < failure.shows_pu < 1.0
    whats = [s.what for f in FAILURES for s in f.signs] + [b.what for b in BENIGN]
    for what in whats:
        known = what.startswith("xid ") or what in ("psu_lost", "node_reboots", "maintenance")
        assert known or hasattr(well, what) or what.startswith("link_") or what in Truth.__annotations__, what
    assert all(b.source for b in BENIGN)
    assert sum(f.cases for f in FAILURES) == pytest.approx(419 - 54)  # Llama 3, less its software bugs
    assert len(CLASSES) == len(set(CLASSES)) == 9


# The drawn events


def test_nodes_fail_as_often_as_the_source_says() -> None:
    """Per day in service, repeated failures and lemons included."""
    failing, nodes, _ = many()
    out_s = sum(min(f.end_s, DAYS * DAY_S) - f.begin_s for f in failing)
    in_service_days = nodes * DAYS - out_s / DAY_S
    assert len(failing) / in_service_days == pytest.approx(NODE_DAY_RATE, rel=0.05)


def test_classes_have_the_shares_of_the_source() -> None:
    failing, _, lemons = many()
    lemon = np.concatenate(lemons)
    first = [f.kind for f in failing if not lemon[f.node] and not f.again]
    for kind, share_pu in enumerate(SHARES_PU.tolist()):
        assert near(first.count(kind), len(first), share_pu), CLASSES[kind]


@pytest.mark.parametrize("kind", range(len(CLASSES)), ids=CLASSES)
def test_as_many_show_before_and_as_early_as_the_table_says(kind: int) -> None:
    of = FAILURES[kind]
    whole = [f for f in many()[0] if f.kind == kind and not f.again]
    shows = [f for f in whole if np.isfinite(f.precursor_s)]
    assert near(len(shows), len(whole), of.shows_pu)
    late = [f for f in shows if f.begin_s > 100 * DAY_S]  # nothing was cut off by the beginning
    lead = np.log([f.begin_s - f.precursor_s for f in late])
    tolerance = 4.5 * 1.2533 * of.lead_spread / np.sqrt(len(late))
    assert np.median(lead) == pytest.approx(np.log(of.lead_s), abs=tolerance)
    low, high = np.quantile(lead, [0.25, 0.75])
    assert high - low == pytest.approx(2 * 0.6745 * of.lead_spread, abs=2.0 * tolerance)


def test_repairs_are_as_long_as_in_the_public_trace() -> None:
    hours = np.array([f.end_s - f.begin_s for f in many()[0]]) / 3600.0
    assert np.median(hours) == pytest.approx(20.0, rel=0.05)
    # Of a lognormal with such a tail the mean comes out only roughly
    assert hours.mean() == pytest.approx(133.0, rel=0.15)
    assert REPAIR_S * np.exp(REPAIR_SPREAD**2 / 2.0) / 3600.0 == pytest.approx(133.0, rel=0.01)


def test_lemons_are_few_and_fail_ten_times_as_often() -> None:
    failing, nodes, lemons = many()
    lemon = np.concatenate(lemons)
    assert near(int(lemon.sum()), nodes, LEMON_PU)
    share_pu = np.mean([lemon[f.node] for f in failing])
    # 13 % at the source; a lemon is out of service for longer
    assert share_pu == pytest.approx(LEMON_PU * LEMON_FACTOR / (1 + LEMON_PU * (LEMON_FACTOR - 1)), rel=0.35)


def test_a_cause_in_common_takes_all_nodes_of_a_rack_that_are_up() -> None:
    racks, many_days = FLEET.sizes["rack"], 3000.0
    shared = draw_shared(FLEET, 3, many_days, [])
    outages = {(int(FLEET.rack_of_node[f.node]), f.begin_s) for f in shared if KINDS[f.kind] == "rack"}
    assert len(outages) == pytest.approx(RACK_DAY_RATE * many_days * racks, abs=4.5 * np.sqrt(34))
    for rack, begin_s in outages:
        nodes = [f.node for f in shared if f.begin_s == begin_s]
        assert nodes == list(range(9 * rack, 9 * rack + 9))
    first = min(shared, key=lambda f: f.begin_s)
    down = [dataclasses.replace(first, begin_s=0.0)]
    again = draw_shared(FLEET, 3, many_days, down)
    assert first.node not in [f.node for f in again if f.begin_s == first.begin_s]
    assert len(again) < len(shared)


@cache
def drawn(seed: int = 5, days: float = 30.0, strength: float = 1.0) -> FailureTimeline:
    return draw_timeline(FLEET, seed, days, strength)


def test_a_seed_is_a_life() -> None:
    again = draw_timeline(FLEET, 5, 30.0)
    assert again.events == drawn().events
    for name in FailureTable.__dataclass_fields__:
        one, other = getattr(again.failures, name), getattr(drawn().failures, name)
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), name
    assert draw_timeline(FLEET, 6, 30.0).events != again.events


def test_half_the_strength_halves_precursors_and_nothing_else() -> None:
    whole, half, none = (drawn(days=50.0, strength=x) for x in (1.0, 0.5, 0.0))
    for name in ("node", "kind", "device", "begin_s", "end_s", "shows", "precursor_s", "shared"):
        one = getattr(whole.failures, name)
        assert all(np.array_equal(one, getattr(x.failures, name), equal_nan=one.dtype.kind == "f")
                   for x in (half, none))  # fmt: skip
    counted = [Counter[str]() for _ in range(3)]
    for timeline, total in zip((whole, half, none), counted, strict=True):
        for s in timeline.events:
            total[s.field if s.act == "count" else s.act] += s.value if s.act == "count" else 1
    for name in ("gpu_sbe_count", "gpu_nvlink_errors", "gpu_nvlink_replays", "link_error_count"):
        benign = counted[2][name]
        shown = counted[0][name] - benign
        assert shown > 100
        assert counted[1][name] - benign == pytest.approx(0.5 * shown, rel=0.1), name
    factors = [
        [s.value - 1.0 for s in x.events if (s.act, s.field) == ("hold", "gpu_plate_factor")]
        for x in (whole, half)
    ]
    assert factors[0]
    assert factors[1] == pytest.approx([0.5 * x for x in factors[0]])


def test_noise_comes_as_often_as_the_table_says() -> None:
    timeline = drawn(days=120.0, strength=0.0)
    n = FLEET.sizes
    seen = Counter(s.field for s in timeline.events if s.act in ("count", "hold"))
    per_day = {b.what: (b.per_day, b.table) for b in BENIGN}
    for what in ("gpu_sbe_count", "gpu_nvlink_replays", "gpu_pcie_replays", "gpu_silent", "gpu_row_remaps"):
        rate, table = per_day[what]
        # Fewer, as nodes that are down are left out
        assert seen[what] == pytest.approx(rate * n[table] * 120.0, rel=0.25), what
    codes = Counter(int(s.value) for s in timeline.events if s.act == "xid")
    users = sum(codes[c] for c in (13, 31, 43, 45))
    assert users == pytest.approx(0.029 * n["gpu"] * 120.0, rel=0.15)
    assert users > 0.8 * sum(codes.values())


# The played events


def held_at(timeline: FailureTimeline, site: Site, time_s: float) -> Disturbance:
    """Return the targets in force at an instant, from all events before it."""
    d = neutral(site)
    held: dict[tuple[str, object], dict[int, float]] = {}
    for s in timeline.events:
        if s.time_s >= time_s:
            break
        if s.act == "hold":
            held.setdefault((s.field, s.at), {})[s.cause] = s.value
        elif s.act == "free":
            held[s.field, s.at].pop(s.cause)
    for (field, at), causes in held.items():
        if causes:
            values = list(causes.values())
            whole = float(np.prod(values)) if field.endswith("_factor") else max(values)
            getattr(d, field)[at] = whole
    return d


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1.0, 3e5), min_size=1, max_size=12))
def test_a_player_holds_what_its_strokes_say(steps_s: list[float]) -> None:
    timeline = drawn()
    player, d, time_s = TimelinePlayer(FLEET, timeline), neutral(FLEET), 0.0
    grown: Counter[str] = Counter()
    for dt_s in steps_s:
        due = player.due(time_s + dt_s)
        before = copy.deepcopy(d)
        moved = player.apply(d, time_s, dt_s)
        time_s += dt_s
        expected = held_at(timeline, FLEET, time_s)
        for f in dataclasses.fields(d):
            now, then = getattr(d, f.name), getattr(expected, f.name)
            if isinstance(now, np.ndarray):
                assert np.allclose(now, then, rtol=1e-12, equal_nan=True), f.name
                assert moved or np.array_equal(now, getattr(before, f.name), equal_nan=True)
        assert due or not moved
        for name, _, growth in d.counts:
            grown[name] += growth
        d.counts.clear()
        d.reports.clear()
    counted: Counter[str] = Counter()
    for s in timeline.events:
        if s.act == "count" and s.time_s < time_s:
            counted[s.field] += int(s.value)
    assert grown == counted
