"""The terms of power_cap's plan in closed form: what is spared, beside GPUs, left for them, and drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, carried_by, gain_of, pairs_of
from policies.power_capping.budgets import Carried
from policies.power_capping.demand import Wants
from policies.power_capping.nodes import nodes_of
from policies.power_capping.power_cap import (
    DEAF_S,
    MEAN_S,
    OTHER_LEAST_W,
    OTHER_OF_CUT_PU,
    OTHER_OF_GPUS_PU,
    OTHER_PU_PER_S,
    RISK_PU,
    TOGETHER_S,
    _layout,
    _slewed,
)
from tests.support.builders import Twin
from tests.unit.test_power_headroom import FEEDERS, HALF, PLACES, WHOLE, small_twin
from twin.catalogue import NS

CAP = "gpu.power_cap_w"
GPUS, FLOOR_W, MOST_W = 24, 200.0, 1200.0
EVERY = np.arange(GPUS)
SHARES = np.array([*WHOLE.values(), *(HALF[place] for place in FEEDERS)])  # of each place with failover


def places(twin: Twin) -> Carried:
    return carried_by(twin.engine.view(), pairs_of(twin.site, np.zeros(4, np.bool_), True))


def wanting(power_w: Any, peak_w: Any = 0.0, demand_w: Any = 0.0, capped: Any = True) -> Wants:
    columns = (np.broadcast_to(np.asarray(x, np.float64), (GPUS,)).copy()
               for x in (power_w, FLOOR_W, MOST_W, demand_w, peak_w))  # fmt: skip
    return Wants(*columns, np.broadcast_to(np.asarray(capped, np.bool_), (GPUS,)).copy())


def of_places(twin: Twin, of_gpu: Any) -> np.ndarray:
    """Watts of GPUs at each place, with the losses on the way to them."""
    of_rack = np.broadcast_to(of_gpu, (GPUS,)).reshape(3, 8).sum(axis=1) * gain_of(twin.site)
    return np.asarray(SHARES @ of_rack)


@pytest.mark.parametrize(
    ("before_w", "since_s", "power_w", "left_w", "cap_w", "demand_w", "apart_w", "sum_w"),
    [
        # Watts of each GPU: the sum at its most of late, between what all draw now and their peaks
        (500.0, 0.0, 400.0, 1e9, 0.0, 1100.0, 1100.0, 500.0),
        (100.0, 0.0, 400.0, 1e9, 0.0, 1100.0, 1100.0, 400.0),
        (1e4, 0.0, 400.0, 1e9, 0.0, 1100.0, 1100.0, 1000.0),
        (900.0, TOGETHER_S, 100.0, 1e9, 0.0, 1100.0, 1100.0, 900.0 / np.e),
        # Power without demand, and power above peaks by more than the reserve, is not spared
        (500.0, 0.0, 400.0, 1e9, 0.0, 800.0, 800.0, 500.0),
        (500.0, 0.0, 400.0, 1e9, 0.0, 1200.0, 1100.0, 500.0),
        # A cut cannot peak as it did; what draws more than its cap does so
        (900.0, 0.0, 400.0, 1e9, 700.0, 1100.0, 700.0, 700.0),
        (900.0, 0.0, 750.0, 1e9, 700.0, 1100.0, 750.0, 750.0),
        # More was carried than planned: nothing learned is believed
        (500.0, 0.0, 400.0, 399.0, 0.0, 1100.0, 1100.0, 1100.0),
    ],
)
def test_what_is_spared_is_the_peaks_apart_less_their_sum_and_a_risk(
    before_w: float, since_s: float, power_w: float, left_w: float, cap_w: float, demand_w: float,
    apart_w: float, sum_w: float,
) -> None:  # fmt: skip
    twin, capped = small_twin({"gpu.power_w": 300.0}), EVERY % 8 != 3
    carried = places(twin)
    of = of_places(twin, capped)  # a watt of each GPU that can be capped
    n = len(carried.limit_w)
    memory = {"sum_w": np.zeros(GPUS), "cap_w": np.full(GPUS, cap_w),
              "layout": np.full(GPUS, _layout(twin.site, carried))}  # fmt: skip
    memory["sum_w"][:n] = before_w * of
    want = wanting(power_w, 1000.0, demand_w, capped)
    policy = PowerCap(coincidence_pu=0.25)
    spared, kept = policy._spared_w(twin.site, carried, want, left_w * of, memory, since_s)
    most_w = 0.25 * np.where(np.isfinite(carried.limit_w), carried.limit_w, 0.0)
    np.testing.assert_allclose(
        spared, np.clip((apart_w - (1.0 + RISK_PU) * sum_w) * of, 0.0, most_w), atol=1e-6
    )
    np.testing.assert_allclose(kept["sum_w"][:n], sum_w * of)
    assert (kept["sum_w"][n:] == 0.0).all()
    assert (kept["layout"] == memory["layout"]).all()
    memory["layout"] = memory["layout"] + 1
    spared, kept = policy._spared_w(twin.site, carried, want, left_w * of, memory, since_s)
    assert not spared.any(), "other places than were learned of"
    np.testing.assert_allclose(kept["sum_w"][:n], apart_w * of)


def test_a_place_beyond_the_last_gpu_is_given_nothing() -> None:
    twin = small_twin({"gpu.power_w": 300.0})
    carried = places(twin)
    many = carried._replace(
        limit_w=np.concatenate([carried.limit_w, np.full(GPUS, 1e5)]),
        pairs=carried.pairs._replace(
            place=np.append(carried.pairs.place, [GPUS - 1, GPUS]),
            rack=np.append(carried.pairs.rack, [0, 0]),
            share=np.append(carried.pairs.share, [1.0, 1.0]),
        ),
    )  # fmt: skip
    layout = _layout(twin.site, many)
    assert layout not in (0, _layout(twin.site, carried))
    memory = {"sum_w": np.zeros(GPUS), "cap_w": np.zeros(GPUS), "layout": np.full(GPUS, layout)}
    want = wanting(100.0, 1000.0, 1100.0)
    spared, kept = PowerCap()._spared_w(twin.site, many, want, np.full(len(many.limit_w), 1e9), memory, 0.0)
    assert spared[GPUS - 1] > 0.0
    assert spared[GPUS] == 0.0
    assert kept["sum_w"][GPUS - 1] == pytest.approx(8 * 100.0 * gain_of(twin.site)[0])


@pytest.mark.parametrize(
    ("reads_w", "gpu_w", "since_s", "held_w", "expected_w"),
    [
        (12e3, 500.0, 2.0, 0.0, 12e3),  # nothing moved
        (20e3, 500.0, 2.0, 0.0, 12e3 + 2 * OTHER_PU_PER_S * (12e3 + OTHER_LEAST_W)),
        (5e3, 500.0, 2.0, 0.0, 12e3 - 2 * OTHER_PU_PER_S * (12e3 + OTHER_LEAST_W)),
        (12.01e3, 500.0, 2.0, 0.0, 12.01e3),  # within the step
        (20e3, 600.0, 0.0, 0.0, 12e3 + OTHER_OF_GPUS_PU * 8 * 100.0),  # CPUs work while GPUs do
        (5e3, 400.0, 0.0, 0.0, 12e3 - OTHER_OF_GPUS_PU * 8 * 100.0),
        (20e3, 400.0, 0.0, 0.0, 12e3),
        (5e3, 600.0, 0.0, 0.0, 12e3),
        (20e3, 500.0, 0.0, 100.0, 12e3 + OTHER_OF_CUT_PU * 8 * 100.0),  # losses of what was cut
        (5e3, 500.0, 0.0, 100.0, 12e3),
    ],
)
def test_what_is_beside_gpus_moves_with_them_and_else_slowly(
    reads_w: float, gpu_w: float, since_s: float, held_w: float, expected_w: float
) -> None:
    """Racks 1 and 2 had 12 kW beside 500 W of each GPU; of rack 3 nothing is known yet."""
    site = small_twin({}).site
    memory = {"other_w": np.array([12e3, 12e3, 0.0]), "gpus_w": np.array([4e3, 4e3, 0.0]),
              "held_w": np.array([0.0, 8 * held_w, 0.0])}  # fmt: skip
    want = wanting(gpu_w, gpu_w + held_w)
    found, kept = _slewed(site, np.full(3, reads_w), want, np.full(GPUS, gpu_w), memory, since_s)
    assert found[0] == pytest.approx(expected_w)
    assert found[1] == pytest.approx(expected_w if held_w == 0.0 else np.clip(reads_w, 12e3, 12e3))
    assert found[2] == reads_w
    np.testing.assert_allclose(kept["other_w"], found)
    np.testing.assert_allclose(kept["held_w"], 8 * held_w)
    now_w = 8 * gpu_w
    np.testing.assert_allclose(kept["gpus_w"][:2], now_w + (4e3 - now_w) * np.exp(-since_s / MEAN_S))
    assert kept["gpus_w"][2] == now_w
    # A GPU below its cap holds nothing back by it
    _, free = _slewed(site, np.full(3, reads_w), want, np.full(GPUS, gpu_w / 0.94), memory, since_s)
    assert not free["held_w"].any()
    _, uncapped = _slewed(site, np.full(3, reads_w), want, np.full(GPUS, np.nan), memory, since_s)
    assert not uncapped["held_w"].any()


@pytest.mark.parametrize(
    ("capped", "cap_w", "read_back_w", "cut_s", "late_w", "held_w"),
    [
        (True, 0.0, 1200.0, 5.0, 0.0, 700.0),
        (True, 600.0, 600.0, 5.0, 0.0, 600.0),
        (True, 600.0, 604.0, 5.0, 0.0, 600.0),  # settled
        (True, 600.0, 800.0, 5.0, 200.0, 600.0),  # on its way
        (True, 600.0, 800.0, DEAF_S + 2.0, -200.0, 600.0),  # who does not obey by then never will
        (False, 0.0, 1200.0, 5.0, -400.0, 0.0),  # what cannot be capped draws what it does
    ],
)
def test_what_is_left_for_gpus(
    capped: bool, cap_w: float, read_back_w: float, cut_s: float, late_w: float, held_w: float
) -> None:
    """Of each GPU: `late_w` may still be drawn above its cap, or for ever where it is below 0.

    A cut on its way takes from what is left, but no more than what caps or demand leave anyhow.
    """
    for other_w in (2e3, 10e3):
        twin = small_twin({"gpu.power_w": 400.0, "gpu.power_limit_w": read_back_w, "rack.power_w": 9e3})
        view, carried = twin.engine.view(), places(twin)
        memory = {"cap_w": np.full(GPUS, cap_w), "cut_ns": np.full(GPUS, twin.now_ns - round(cut_s * NS))}
        want = wanting(400.0, 400.0, 700.0, capped)
        policy = PowerCap(margin_pu=0.02)
        left_w = policy._left_w(view, carried, want, np.full(3, other_w), memory, nodes_of(twin.site))
        of = of_places(twin, 1.0)
        budget_w = 0.98 * carried.limit_w - SHARES @ np.full(3, other_w) + np.minimum(late_w, 0.0) * of
        expected_w = np.maximum(budget_w - max(late_w, 0.0) * of, np.minimum(budget_w, held_w * of))
        np.testing.assert_allclose(left_w, np.maximum(expected_w, 0.0))


def test_a_place_of_which_nothing_was_heard_has_no_limit_yet() -> None:
    nan = np.nan
    memory = {"cap_w": np.zeros(GPUS), "cut_ns": np.zeros(GPUS, np.int64)}
    for readings, unheard in (
        ({"rack.power_w": [9e3, nan, nan]}, {"lab/h/r2", "lab/h/r3", "lab/h/a2"}),
        ({"gpu.power_w": np.where(EVERY == 20, 400.0, nan)}, {"lab/h/r1", "lab/h/r2", "lab/h/a1"}),
    ):
        twin = small_twin(readings)
        carried = places(twin)
        carried = carried._replace(limit_w=np.minimum(carried.limit_w, 1e6))
        want = wanting(400.0, 400.0, 700.0)
        left_w = PowerCap()._left_w(
            twin.engine.view(), carried, want, np.zeros(3), memory, nodes_of(twin.site)
        )
        infinite = np.isinf(left_w)
        assert {place for place, one in zip(PLACES, infinite, strict=False) if one} == unheard
        assert {place for place, one in zip(FEEDERS, infinite[9:], strict=True) if one} == unheard & {
            *FEEDERS
        }


@pytest.mark.parametrize("metered", [True, False])
def test_targets_are_held_against_what_racks_and_feeders_draw(
    metered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def outside(view: Any, settings: Any, course: Any, load_w: float, drawn_w: Any) -> Any:
        told["load_w"], told["drawn_w"] = load_w, drawn_w
        return None, course

    monkeypatch.setattr("policies.power_capping.power_cap.outside", outside)
    twin = small_twin(
        {"gpu.power_w": 500.0} | ({"feeder.power_w": [20e3, np.nan, 7e3, np.nan]} if metered else {})
    )
    scalars = {"quarter_ns": 0, "quarter_ws": 0.0, "unseen_s": 0.0, "seen_ns": 0, "held_w": -1.0,
               "load_w": 0.0, "shave_pu": 0.0, "dear": 0.0, "dirty": 0.0, "feeders_w": 0.0,
               "n_feeders": 0}  # fmt: skip
    memory = {f"course_{name}": np.array(value) for name, value in scalars.items()}
    other = np.array([1e3, np.nan, 3e3])
    rack_w = np.array([1e3, 0.0, 3e3]) + 8 * 500.0 * gain_of(twin.site)
    carried = places(twin)
    PowerCap()._outside(twin.engine.view(), carried, wanting(500.0), other, memory)
    assert told["load_w"] == pytest.approx(rack_w.sum())
    drawn_w = np.array([HALF[place] for place in FEEDERS]) @ rack_w
    drawn_w = np.where([metered, False, metered, False], [20e3, 0.0, 7e3, 0.0], drawn_w)
    np.testing.assert_allclose(told["drawn_w"], drawn_w)
    for readings, known in (
        ({}, False),
        ({"rack.power_w": [np.nan, 9e3, np.nan]}, True),
        ({"feeder.power_w": 1e4}, False),
    ):
        view = small_twin(readings).engine.view()
        PowerCap()._outside(view, carried, wanting(500.0), other, memory)
        assert np.isfinite(told["load_w"]) == known
