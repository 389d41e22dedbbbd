"""The power chain against published curves, hand sums and recursion over trees. May import `twin.physics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.physics import PowerTree, output_of_input_w
from twin.physics.electrical import RollUp, polynomial_loss_w


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def index(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.floats(0, 1e7), st.floats(0, 1e4), st.floats(0, 0.2), st.floats(0, 1e-6))
def test_inputs_and_outputs_are_inverse(out: float, p0: float, p1: float, p2: float) -> None:
    taken = out + polynomial_loss_w(array(out), p0, p1, p2)
    assert output_of_input_w(taken, p0, p1, p2) == pytest.approx(out, rel=1e-9, abs=1e-5)
    assert (taken >= out).all()


# Two trees: A is utility -> UPS -> two busways; B likewise. Racks 0 and 1 hang on both sides, 2 on A alone.
PARENT = index(-1, 0, 1, 1, -1, 4, 5, 5)
RACK, FEEDER = index(0, 0, 1, 1, 2), index(2, 6, 3, 7, 3)


def two_sides() -> PowerTree:
    return PowerTree.of(PARENT, RACK, FEEDER, 4)


def roll_up(tree: PowerTree, racks: np.ndarray, ok: np.ndarray, *losses: Any, weight: Any = 1.0) -> RollUp:
    return tree.carried(racks, tree.feeding(ok, weight), *losses)


def test_meters_agree_without_losses() -> None:
    racks = array(40e3, 48e3, 35e3, 1e3)
    flow = roll_up(two_sides(), racks, np.ones(8, np.bool_))
    # as the busways of the capture do: both sides together are the racks that they serve
    assert flow.output_w[[2, 3, 6, 7]].sum() == pytest.approx(racks[:3].sum())
    assert flow.output_w.tolist() == [79e3, 79e3, 20e3, 59e3, 44e3, 44e3, 20e3, 24e3]
    assert flow.utility_w == pytest.approx(racks.sum())
    assert flow.loss_w == 0
    assert not flow.unpowered.any()


def test_losses_by_hand() -> None:
    # 100 kW through a busway with 1 % and a UPS with 1 kW + 2 %
    tree = PowerTree.of(index(-1, 0), index(0), index(1), 1)
    flow = roll_up(tree, array(100e3), np.ones(2, np.bool_), array(1e3, 0), array(0.02, 0.01))
    assert flow.output_w == pytest.approx([101e3, 100e3])
    assert flow.input_w == pytest.approx([101e3 * 1.02 + 1e3, 101e3])
    assert flow.utility_w == pytest.approx(104_020)
    assert flow.loss_w == pytest.approx(4_020)


def test_a_lost_side_moves_everything_to_the_other() -> None:
    racks, ok = array(40e3, 48e3, 35e3, 0), np.ones(8, np.bool_)
    ok[1] = False  # the UPS of side A: all below it is dark
    flow = roll_up(two_sides(), racks, ok, 100.0)
    assert flow.alive.tolist() == [True, False, False, False, True, True, True, True]
    assert flow.pair_w.tolist() == [0, 40e3, 0, 48e3, 0]
    assert flow.unpowered.tolist() == [False, False, True, False]
    assert flow.output_w[:4].tolist() == [0, 0, 0, 0]
    assert flow.input_w[:4].tolist() == [100, 0, 0, 0]
    assert flow.utility_w == pytest.approx(88e3 + 5 * 100)


def test_uneven_sides() -> None:
    weight = array(0.3, 0.7, 1, 1, 1)
    pair = roll_up(two_sides(), array(10e3, 0, 0, 0), np.ones(8, np.bool_), weight=weight).pair_w
    assert pair == pytest.approx([3e3, 7e3, 0, 0, 0])


def test_the_site_of_the_dps_simulator_is_oversubscribed() -> None:
    # 144 nodes at 5600 W in 8 racks, 2 to a PDU of 450 kW, one switchboard under 750 kW
    tree = PowerTree.of(index(-1, 0, 1, 1, 1, 1), index(*range(8)), np.repeat(index(2, 3, 4, 5), 2), 8)
    flow = roll_up(tree, np.full(8, 18 * 5600.0), np.ones(6, np.bool_))
    assert flow.utility_w == pytest.approx(806_400)
    assert flow.output_w[2:] == pytest.approx(201_600)


def test_the_way_of_power_may_be_kept_until_something_switches() -> None:
    tree, racks, ok = two_sides(), array(40e3, 48e3, 35e3, 1e3), np.ones(8, np.bool_)
    ok[4] = False
    kept = tree.feeding(ok, 2.0)
    for scale in (1.0, 0.5):
        once, again = (
            roll_up(tree, scale * racks, ok, 50.0, 0.01),
            tree.carried(scale * racks, kept, 50.0, 0.01),
        )
        assert once.utility_w == again.utility_w
        assert np.array_equal(once.input_w, again.input_w)
        assert np.array_equal(again.unpowered, kept.unpowered)


def test_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="loop"):
        PowerTree.of(index(1, 2, 0), index(0), index(0), 1)


def test_a_site_without_feeders_draws_straight_from_the_utility() -> None:
    flow = roll_up(PowerTree.of(index(), index(), index(), 3), array(1, 2, 3), np.ones(0, np.bool_))
    assert flow.utility_w == 6
    assert flow.loss_w == 0
    assert not flow.unpowered.any()


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], int]:
    """Parents in any order, pairs of rack and feeder sorted by rack, racks."""
    n, racks = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    order = draw(st.permutations(range(n)))
    parent = [-1] * n
    for place in range(1, n):
        above = draw(st.integers(-1, place - 1))
        parent[order[place]] = -1 if above < 0 else order[above]
    pairs = draw(st.sets(st.tuples(st.integers(0, racks - 1), st.integers(0, n - 1)), max_size=20))
    return parent, sorted(pairs), racks


@settings(max_examples=150)
@given(forests(), st.integers(0, 2**32 - 1))
def test_roll_up_is_the_recursion(forest: tuple[list[int], list[tuple[int, int]], int], seed: int) -> None:
    parent, pairs, n_rack = forest
    chance = np.random.default_rng(seed)
    n = len(parent)
    racks, ok = chance.uniform(0, 1e5, n_rack), chance.random(n) < 0.8
    p0, p1, p2 = chance.uniform(0, 500, n), chance.uniform(0, 0.05, n), chance.uniform(0, 1e-7, n)
    tree = PowerTree.of(index(*parent), index(*[r for r, _ in pairs]), index(*[f for _, f in pairs]), n_rack)
    flow = roll_up(tree, racks, ok, p0, p1, p2)

    def lives(f: int) -> bool:
        return bool(ok[f]) and (parent[f] < 0 or lives(parent[f]))

    living = {r: [f for s, f in pairs if s == r and lives(f)] for r in range(n_rack)}

    def taken(f: int) -> tuple[float, float]:
        load = sum(racks[r] / len(fs) for r, fs in living.items() if f in fs)
        load += sum(taken(c)[1] for c in range(n) if parent[c] == f)
        return load, (load + p0[f] + p1[f] * load + p2[f] * load**2) if lives(f) else 0.0

    assert flow.alive.tolist() == [lives(f) for f in range(n)]
    assert flow.output_w == pytest.approx([taken(f)[0] for f in range(n)])
    assert flow.input_w == pytest.approx([taken(f)[1] for f in range(n)])
    # nothing is made and nothing vanishes
    served = sum(racks[r] for r in range(n_rack) if living[r] or not tree.fed[r])
    assert flow.utility_w == pytest.approx(served + flow.loss_w)
    assert flow.unpowered.tolist() == [bool(tree.fed[r]) and not living[r] for r in range(n_rack)]
