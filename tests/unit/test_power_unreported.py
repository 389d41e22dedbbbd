"""GPUs that never reported: what meters leave for them, how it grows, and how long they are waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import carried_by, gain_of, pairs_of
from policies.power_capping.demand import FORGET_S, Wants, wants
from policies.power_capping.nodes import nodes_of
from policies.power_capping.unreported import (
    LEARNING_S,
    UnreportedGpus,
    unreported_gpus,
    waiting_places,
    with_unreported,
)
from tests.support.builders import Twin
from tests.unit.test_power_headroom import FEEDERS, HALF, PLACES, WHOLE, band, small_twin, with_bands
from twin.catalogue import NS

GPUS, FLOOR_W, MOST_W = 24, 200.0, 1200.0
EVERY = np.arange(GPUS)


def wanting(power_w: float, demand_w: float = 700.0, peak_w: float = 600.0) -> Wants:
    columns = (np.full(GPUS, x) for x in (power_w, FLOOR_W, MOST_W, demand_w, peak_w))
    return Wants(*columns, np.ones(GPUS, np.bool_))


def unheard(never: Any, power_w: Any, learning: Any, learning_rack: Any = False) -> UnreportedGpus:
    watts = np.broadcast_to(np.asarray(power_w, np.float64), (GPUS,))
    masks = (np.broadcast_to(np.asarray(x, np.bool_), (n,)) for x, n in
             ((never, GPUS), (learning, GPUS), (learning_rack, 3)))  # fmt: skip
    never_at, learning_at, rack_at = masks
    return UnreportedGpus(never_at, watts, np.zeros(3), learning_at, rack_at, {})


@pytest.mark.parametrize(
    ("power_w", "before_w", "since_s", "growth", "peak_w", "demand_w"),
    [
        (400.0, 0.0, 0.0, 1.0, 400.0, 440.0),
        (400.0, 800.0, 0.0, 1.0, 800.0, 880.0),
        (400.0, 800.0, FORGET_S * np.log(2.0), 1.0, 400.0, 440.0),
        (400.0, 0.0, 0.0, 1.5, 400.0, 660.0),
        (400.0, 0.0, 0.0, 4.0, 400.0, MOST_W),
        (100.0, 0.0, 0.0, 1.5, 100.0, FLOOR_W),
        (1145.0, 0.0, 0.0, 1.0, 1145.0, MOST_W),  # at its cap it may want more
    ],
)
def test_what_a_meter_leaves_is_expected_to_rise_as_the_forecast_does(
    power_w: float, before_w: float, since_s: float, growth: float, peak_w: float, demand_w: float
) -> None:
    """GPUs 0 to 7 are metered, 8 to 15 count with their most, 16 to 19 wait, and the others are heard."""
    twin = with_bands(
        small_twin({"rack.power_w": 10e3, "gpu.power_limit_w": MOST_W}),
        band("rack.power_w", 900.0, np.full(3, growth * 10e3)),
    )
    view, want = twin.engine.view(), wanting(500.0)
    never, metered = EVERY < 20, EVERY < 8
    learning = (EVERY >= 16) & (EVERY < 20)
    found = unheard(never, np.where(metered, power_w, np.nan), learning)
    assert found.metered.tolist() == metered.tolist()
    assert found.waiting.tolist() == learning.tolist()
    assert np.flatnonzero(found.at_most).tolist() == list(range(8, 16))
    got = with_unreported(view, want, found, nodes_of(view.site), np.full(GPUS, before_w), since_s)
    np.testing.assert_allclose(got.power_w, np.select([metered, learning], [power_w, 0.0], 500.0))
    np.testing.assert_allclose(got.peak_w, np.where(metered, peak_w, 600.0))
    np.testing.assert_allclose(got.demand_w, np.where(metered, demand_w, 700.0))
    assert got.capped.tolist() == (~learning).tolist()
    assert (got.floor_w is want.floor_w, got.most_w is want.most_w) == (True, True)


def test_a_peak_is_not_remembered_while_others_are_still_to_come() -> None:
    view = small_twin({"rack.power_w": 10e3}).engine.view()
    for learning, peak_w in ((True, 400.0), (False, 800.0)):
        found = unheard(True, 400.0, learning)
        got = with_unreported(view, wanting(500.0), found, nodes_of(view.site), np.full(GPUS, 800.0), 0.0)
        assert (got.peak_w == peak_w).all()
    nobody = wanting(500.0)
    none = unheard(False, 1.0, True)
    assert with_unreported(view, nobody, none, nodes_of(view.site), np.zeros(GPUS), 0.0) is nobody


@pytest.mark.parametrize(
    ("learning", "left_w", "waits"),
    [
        ([False, False, False], np.inf, []),
        ([True, False, False], np.inf, ["lab/h/r1", "lab/h/a", "lab/h/a1", "lab/h/b", "lab/h/cdu1", "site"]),
        ([False, False, True], np.inf, ["lab/h/r3", "lab/h/a", "lab/h/a2", "lab/h/b", "lab/h/cdu1", "site"]),
        ([True, False, False], 1.0, []),
    ],
)
def test_places_wait_where_a_gpu_below_is_waited_for_and_the_demand_fits(
    learning: list[bool], left_w: float, waits: list[str]
) -> None:
    twin = small_twin({"rack.power_w": 10e3})
    view = twin.engine.view()
    carried = carried_by(view, pairs_of(view.site, np.zeros(4, np.bool_), True))
    found = unheard(True, np.nan, True, learning)
    spare = np.full(len(carried.limit_w), left_w)
    waiting = waiting_places(view.site, carried, wanting(500.0), spare, found)
    assert [place for place, one in zip(PLACES, waiting, strict=False) if one] == waits


def test_a_place_waits_as_long_as_its_demand_is_not_above_what_is_left() -> None:
    view = small_twin({"rack.power_w": 10e3}).engine.view()
    carried = carried_by(view, pairs_of(view.site, np.zeros(4, np.bool_), True))
    want = wanting(500.0)._replace(capped=EVERY % 8 < 6)
    demand_w = 6 * 700.0 * gain_of(view.site)
    need_w = np.array([*WHOLE.values(), *(HALF[place] for place in FEEDERS)]) @ demand_w
    for change, expected in ((1.0 + 1e-9, True), (1.0 - 1e-6, False)):
        waiting = waiting_places(view.site, carried, want, need_w * change, unheard(True, np.nan, True, True))
        assert (waiting == expected).all()


@pytest.mark.parametrize("deepest", [True, False])
@pytest.mark.parametrize("beside_w", [12e3, 12.4e3, 16e3])
def test_meters_tell_what_is_left_for_gpus_that_never_reported(deepest: bool, beside_w: float) -> None:
    """Rack 1 by its own meter, racks 2 and 3 by the feeders below or above; half of the GPUs are heard.

    What is beside them gives way as far as the profile allows: to 12.4 kW.
    """
    nan = np.nan
    heard = np.where(EVERY % 2 == 0, 500.0, nan)
    feeder_w = 23e3, 16.5e3 if deepest else nan
    meters = {"rack.power_w": [18e3, nan, nan], "feeder.power_w": [*feeder_w, nan, nan]}
    twin = small_twin({"gpu.power_w": heard} | meters)
    view, site = twin.engine.view(), twin.site
    carried = carried_by(view, pairs_of(site, np.zeros(4, np.bool_), False))
    want = wants(view, np.zeros(GPUS), 0.0)
    memory = {"unheard_ns": np.zeros(GPUS, np.int64), "unread_ns": np.zeros(3, np.int64)}
    found = unreported_gpus(view, carried, want, np.full(3, beside_w), nodes_of(site), memory)
    gain = float(gain_of(site)[0])
    known_w, most_w = 4 * 500.0 * gain, 4 * MOST_W * gain

    def levels(beside_w: float) -> np.ndarray:
        rest_w = known_w + beside_w
        first_w = min(max(18e3 - rest_w, 0.0), most_w)
        if not deepest:  # the half of a that is left is of both
            others_w = 0.5 * (2 * feeder_w[0] - 3 * rest_w - first_w)
            return np.clip(np.array([first_w, others_w, others_w]) / most_w, 0.0, 1.0)
        second_w = min(max(2 * feeder_w[1] - 2 * rest_w - first_w, 0.0), most_w)
        third_w = 2 * feeder_w[0] - 3 * rest_w - first_w - second_w
        return np.clip(np.array([first_w, second_w, third_w]) / most_w, 0.0, 1.0)

    least, most = levels(beside_w), levels(min(beside_w, 12.4e3))
    level = np.maximum(least, np.minimum(most, 500.0 / MOST_W))
    assert found.never.tolist() == (EVERY % 2 == 1).tolist()
    np.testing.assert_allclose(found.power_w[1::8] / MOST_W, level, rtol=1e-6)
    np.testing.assert_allclose(found.other_w, beside_w - (level - least) * most_w, rtol=1e-6)
    assert np.isnan(found.power_w[0::2]).all()
    assert not found.waiting.any()


def test_what_is_beside_gpus_of_which_nothing_is_known_is_not_planned_with_while_all_are_waited_for() -> None:
    """Rack 1 has a meter; of rack 2 one GPU speaks, of rack 3 none."""
    speaks = np.where(EVERY == 8, 500.0, np.nan)
    view = small_twin({"gpu.power_w": speaks, "rack.power_w": [18e3, np.nan, np.nan]}).engine.view()
    carried = carried_by(view, pairs_of(view.site, np.zeros(4, np.bool_), False))
    memory = {"unheard_ns": np.zeros(GPUS, np.int64), "unread_ns": np.zeros(3, np.int64)}
    want, beside_w = wants(view, np.zeros(GPUS), 0.0), np.full(3, 12.4e3)
    found = unreported_gpus(view, carried, want, beside_w, nodes_of(view.site), memory)
    assert found.other_w.tolist() == [12.4e3, 12.4e3, 0.0]
    assert np.flatnonzero(found.waiting).tolist() == list(range(9, 24))
    assert np.flatnonzero(found.metered).tolist() == list(range(8))
    assert found.learning_rack.all()


def test_the_learning_time_begins_with_the_first_report_of_anything() -> None:
    twin = small_twin({})
    memory: Any = {"unheard_ns": np.zeros(GPUS, np.int64), "unread_ns": np.zeros(3, np.int64)}

    def looked(twin: Twin) -> UnreportedGpus:
        view = twin.engine.view()
        carried = carried_by(view, pairs_of(twin.site, np.zeros(4, np.bool_), False))
        want = wants(view, np.zeros(GPUS), 0.0)
        return unreported_gpus(view, carried, want, np.zeros(3), nodes_of(twin.site), memory)

    found = looked(twin)
    assert found.learning.all()
    assert (found.since["unheard_ns"] == 0).all()
    twin.tick({"feeder.power_w": np.array([9e3, np.nan, np.nan, np.nan])})
    memory = looked(twin).since
    assert (memory["unheard_ns"] == twin.now_ns).all()
    begun_ns = twin.now_ns
    twin.now_ns = begun_ns + round((LEARNING_S - 1.0) * NS) - NS
    twin.tick()
    found = looked(twin)
    assert found.learning.all()
    assert (found.since["unheard_ns"] == begun_ns).all()
    assert found.learning_rack.all()
    assert (found.other_w == 0.0).all() or np.isfinite(found.power_w).all()
    twin.tick()
    found = looked(twin)
    assert not found.learning.any()
    assert not found.learning_rack.any()
    twin.tick({"gpu.power_w": np.where(EVERY < 3, 100.0, np.nan)})
    memory = looked(twin).since
    assert (memory["unheard_ns"][:3] == 0).all()
    assert (memory["unheard_ns"][3:] == begun_ns).all()
