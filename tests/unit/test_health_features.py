"""Features of nodes: how GPUs are folded into their node, what is unknown, and who is quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.contract_plugins import START_NS, World, engine_of, site
from twin.catalogue import NS
from twin.contracts import DEGRADED, FailureLog, NodeFeatures
from twin.health import QUIET, TELEMETRY
from twin.health.context import HealthContext
from twin.health.features import (
    DAY_NS,
    NAMES,
    PLACE_HALF_LIFE_D,
    PLACE_SHAPE,
    _Columns as Columns,
    _Fold,
    _past,
    _placed,
    node_features,
    unusual,
)
from twin.health.rules import DeviceRecords
from twin.telemetry import Block, Reading

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def fold_of(sizes: list[int]) -> _Fold:
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    node_of_gpu = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    where: Any = SimpleNamespace(node_of_gpu=node_of_gpu, gpu_start_of_node=start, sizes={"node": len(sizes)})
    return _Fold(where)


@given(SIZES, st.data())
def test_gpus_are_folded_into_their_own_node(sizes: list[int], data: st.DataObject) -> None:
    fold, n_gpu = fold_of(sizes), sum(sizes)
    some = st.one_of(st.just(np.nan), st.floats(-5.0, 5.0, width=32))
    values = data.draw(arrays(np.float32, n_gpu, elements=some))
    counts = data.draw(arrays(np.uint8, n_gpu, elements=st.integers(0, 3)))
    most, least, total, worst = fold.most(values), fold.least(values), fold.sum(counts), fold.worst(counts)
    heard = fold.none(np.isfinite(values))
    at = 0
    for node, size in enumerate(sizes):
        mine, told = values[at : at + size], counts[at : at + size]
        known = mine[np.isfinite(mine)]
        at += size
        assert np.array_equal(most[node], known.max() if len(known) else np.nan, equal_nan=True)
        assert np.array_equal(least[node], known.min() if len(known) else np.nan, equal_nan=True)
        assert total[node] == told.sum()
        assert np.array_equal(worst[node], told.max() if size else np.nan, equal_nan=True)
        assert np.array_equal(heard[node], 0.0 if len(known) else np.nan, equal_nan=True)


def looked(blocks: list[Any], racks: int = 2, step_s: int = 20, **more: Any) -> Any:
    """Features, by name, of a site whose GPUs said this, one block after another; `more`: nodes' readings."""
    where = site(racks)
    engine = engine_of(where, [], [])
    world, n = World(engine), where.sizes["gpu"]
    for tick, (names, rows) in enumerate(blocks):
        now_ns = START_NS + (tick + 1) * step_s * NS
        counters = tuple(name for name in names if name.endswith("_count"))
        gauges = tuple(name for name in names if name not in counters)
        held = {name: np.asarray(row, float) for name, row in zip(names, rows, strict=True)}
        block = Block(
            "gpu", 0, gauges, np.array([held[g] for g in gauges], np.float32).reshape(len(gauges), n),
            counters,
            np.array([held[c] for c in counters], np.int64).reshape(len(counters), n), now_ns,
        )  # fmt: skip
        world.inbox.put_block(block, now_ns)
        for (node, signal), value in more.get("nodes", {}).items():
            world.inbox.put(Reading("node", node, signal, value, now_ns), now_ns)
        engine.tick(world.inbox.take(tick, now_ns, float(step_s)))
    features = engine.health.features()
    return dict(zip(features.names, features.values.T, strict=True)), engine


def test_names_stand_for_one_thing_each() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(QUIET) <= set(NAMES)
    assert set(TELEMETRY) <= set(NAMES)


def test_what_was_never_heard_is_unknown() -> None:
    n = site().sizes["gpu"]
    found, _ = looked([(("power_w",), [np.full(n, 500.0)])])
    for name in (
        "margin_k",
        "ecc_sbe_recent",
        "row_remap_pending",
        "reboots_daily",
        "links_down",
        "psu_unlike_pu",
    ):
        assert np.isnan(found[name]).all(), name
    assert (found["failed_30d"] == 0.0).all()
    assert np.isnan(found["since_failure_d"]).all()


def test_the_worst_gpu_speaks_for_its_node() -> None:
    n = site().sizes["gpu"]
    margin, pending, sbe = np.full(n, 30.0), np.zeros(n), np.zeros(n)
    margin[5], pending[9] = 4.0, 1.0
    after = sbe.copy()
    after[14] = 12.0
    names = ("thermal_margin_k", "row_remap_pending_state", "ecc_sbe_count")
    nodes = {(2, "psu1_power_w"): 900.0, (2, "psu2_power_w"): 300.0}
    found, engine = looked(
        [(names, [margin, pending, sbe]), (names, [margin, pending, after])] * 1, nodes=nodes
    )
    assert found["margin_k"].tolist() == [30.0, 4.0, 30.0, 30.0]
    assert found["row_remap_pending"].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert found["ecc_sbe_recent"][:3].tolist() == [0.0, 0.0, 0.0]
    per_h = engine.health.rates.recent_per_h("gpu.ecc_sbe_count")[14]
    assert found["ecc_sbe_recent"][3] == pytest.approx(np.log1p(per_h), rel=1e-5)
    assert per_h > 12.0
    assert found["psu_unlike_pu"][2] == pytest.approx(0.5)
    assert np.isnan(found["psu_unlike_pu"][[0, 1, 3]]).all()


def test_levels_of_parts_reach_their_node() -> None:
    n = site().sizes["gpu"]
    _, engine = looked([(("power_w",), [np.full(n, 500.0)])])
    health = engine.health
    gpu, psu = health.health("gpu"), health.health("psu")
    gpu.level[6], psu.level[2 * 3 + 1] = DEGRADED, DEGRADED
    now = HealthContext(
        engine.site, engine.state, engine.estimator, engine.diagnosis, engine.jobs, engine.windows, 10.0
    )
    log = health.log()
    records = DeviceRecords(health.book, health.rates, health.lemons, health.wear, health.recurring)
    features = node_features(now, records, health.verdicts, log)
    at = features.names.index
    assert features.values[1, at("gpu_level")] == DEGRADED
    assert features.values[3, at("psu_level")] == DEGRADED
    assert (features.values[[0, 2, 3], at("gpu_level")] < DEGRADED).all()
    assert unusual(features)[[1, 3]].all()


def test_past_failures_fade_and_those_in_common_tell_nothing() -> None:
    now_ns = START_NS + 100 * DAY_NS
    start_ns = now_ns - np.array([30, 7, 5, 1]) * DAY_NS
    end_ns = now_ns - np.array([29, 6, 4, 0]) * DAY_NS
    end_ns[3] = 0
    shared = np.array([False, False, True, False])
    node, kind = np.array([0, 0, 1, 2], np.int32), np.zeros(4, np.uint8)
    log = FailureLog(node, start_ns, end_ns, kind, shared, ("other",), START_NS)
    columns = Columns(NAMES, 4)
    now: Any = SimpleNamespace(now_ns=now_ns, n=lambda table: 4)
    _past(columns, now, log)
    found = dict(zip(NAMES, columns.values, strict=True))
    assert found["failed_30d"] == pytest.approx([0.5 + 0.5 ** (7 / 30), 0.0, 0.5 ** (1 / 30), 0.0])
    assert found["failed_7d"] == pytest.approx([0.5 + 0.5 ** (30 / 7), 0.0, 0.5 ** (1 / 7), 0.0])
    assert found["since_failure_d"] == pytest.approx([7.0, np.nan, 1.0, np.nan], nan_ok=True)
    assert found["since_return_d"] == pytest.approx([6.0, np.nan, np.nan, np.nan], nan_ok=True)


def test_a_site_without_nodes_has_no_features() -> None:
    engine = engine_of(site(0), [], [])
    World(engine).step()
    assert engine.health.features().values.shape == (0, len(NAMES))


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("level", 1.0, False),  # unknown is not unusual: it tells of nobody
        ("level", 3.0, True),
        ("node_gap_pu", 0.5, True),
        ("node_gap_pu", np.nan, False),
        ("ecc_dbe_daily", 0.1, True),
        ("lemon", 1.0, False),
        ("busy_pu", 1.0, False),
        ("temp_z", np.inf, True),
    ],
)
def test_what_is_unusual(name: str, value: float, expected: bool) -> None:
    values = np.zeros((2, len(NAMES)), np.float32)
    values[1, NAMES.index(name)] = value
    assert unusual(NodeFeatures(NAMES, values)).tolist() == [False, expected]


def test_thermal_cycles_are_large_swings_of_the_gpu_that_has_most() -> None:
    n = site().sizes["gpu"]
    steady = np.full(n, 50.0)
    blocks = []
    for swing_k in (0.0, -20.0, 0.0, -10.0, 0.0, np.nan, -20.0, -12.0, -30.0, 0.0):
        temp_c = steady.copy()
        temp_c[5] += swing_k
        blocks.append((("temp_c",), [temp_c]))
    found, engine = looked(blocks)
    thermal = engine.health.thermal
    assert thermal.cycles[5] == pytest.approx(2.0, rel=1e-3), "a fall by 10 K is none, nor a rise by 8"
    assert found["thermal_cycles"] == pytest.approx([0.0, np.log1p(thermal.cycles[5]), 0.0, 0.0])
    assert found["temp_day_c"] == pytest.approx([50.0] * 4, abs=0.1)
    engine.health.forget("gpu", 5)
    assert thermal.cycles[5] == 0.0
    assert np.isnan(thermal.mean_c[5])
    later_ns = int(thermal.since_ns.max()) + DAY_NS
    assert thermal.age_d(later_ns)[5] == 0.0, "another GPU sits there"
    assert thermal.age_d(later_ns)[4] == pytest.approx(1.0)


def test_a_place_is_told_by_the_failures_of_others() -> None:
    where = site(4)
    n = where.sizes["node"]
    where.upward_of_rack = np.array([1, -1, 0, 0], np.int32)
    now_ns = START_NS + 100 * DAY_NS
    node, none = np.array([0, 0, 2], np.int32), np.zeros(3, bool)
    start_ns, ended_ns = np.full(3, now_ns - DAY_NS), np.full(3, now_ns)
    log = FailureLog(node, start_ns, ended_ns, np.zeros(3, np.uint8), none, ("other",), START_NS)
    columns = Columns(NAMES, n)
    now: Any = SimpleNamespace(now_ns=now_ns, site=where)
    _placed(columns, now, log)
    found = dict(zip(NAMES, columns.values, strict=True))
    faded = 0.5 ** (1 / PLACE_HALF_LIFE_D)
    assert found["slot"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    ratio = (PLACE_SHAPE + np.array([0.0, 2.0, 0.0, 1.0]) * faded) / (PLACE_SHAPE + 3.0 / n * faded)
    assert found["rack_failed_ratio"][:4] == pytest.approx(ratio)
    slot = (PLACE_SHAPE + 1.0 * faded) / (PLACE_SHAPE + 3 * 3.0 / n * faded)
    assert found["slot_failed_ratio"][1] == pytest.approx(slot), "of node 2, which is the upper one, too"
    assert found["slot_failed_ratio"][3] > found["slot_failed_ratio"][2]
