"""The power chain against its inverse, and trees against recursion. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.physics import PowerTree, output_of_input_w


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def index(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.floats(0, 1e7), st.floats(0, 1e4), st.floats(0, 0.2), st.floats(0, 1e-6))
def test_inputs_and_outputs_are_inverse(out: float, p0: float, p1: float, p2: float) -> None:
    taken = array(out + p0 + p1 * out + p2 * out**2)
    assert output_of_input_w(taken, p0, p1, p2) == pytest.approx(out, rel=1e-9, abs=1e-5)
    assert (taken >= out).all()


# Two trees: A is utility -> UPS -> two busways; B likewise. Racks 0 and 1 hang on both sides, 2 on A alone.
PARENT = index(-1, 0, 1, 1, -1, 4, 5, 5)
RACK, FEEDER = index(0, 0, 1, 1, 2), index(2, 6, 3, 7, 3)


def two_sides() -> PowerTree:
    return PowerTree.of(PARENT, RACK, FEEDER, 4)


def test_a_lost_side_moves_everything_to_the_other() -> None:
    tree, ok = two_sides(), np.ones(8, np.bool_)
    assert tree.shares(tree.alive(ok)).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]
    ok[1] = False  # the UPS of side A: all below it is dark
    assert tree.alive(ok).tolist() == [True, False, False, False, True, True, True, True]
    assert tree.shares(tree.alive(ok)).tolist() == [0, 1, 0, 1, 0]
    assert tree.fed.tolist() == [True, True, True, False]


def test_uneven_sides() -> None:
    share = two_sides().shares(np.ones(8, np.bool_), array(0.3, 0.7, 1, 1, 1))
    assert share == pytest.approx([0.3, 0.7, 0.5, 0.5, 1.0])


def test_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="loop"):
        PowerTree.of(index(1, 2, 0), index(0), index(0), 1)


def test_a_site_without_feeders_is_a_tree() -> None:
    tree = PowerTree.of(index(), index(), index(), 3)
    assert len(tree.alive(np.ones(0, np.bool_))) == len(tree.shares(np.ones(0, np.bool_))) == 0
    assert not tree.fed.any()


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
def test_shares_are_those_of_the_recursion(
    forest: tuple[list[int], list[tuple[int, int]], int], seed: int
) -> None:
    parent, pairs, n_rack = forest
    n = len(parent)
    ok = np.random.default_rng(seed).random(n) < 0.8
    tree = PowerTree.of(index(*parent), index(*[r for r, _ in pairs]), index(*[f for _, f in pairs]), n_rack)

    def lives(f: int) -> bool:
        return bool(ok[f]) and (parent[f] < 0 or lives(parent[f]))

    alive = tree.alive(ok)
    assert alive.tolist() == [lives(f) for f in range(n)]
    living = {r: [f for s, f in pairs if s == r and lives(f)] for r in range(n_rack)}
    expected = [1.0 / len(living[r]) if f in living[r] else 0.0 for r, f in pairs]
    assert tree.shares(alive) == pytest.approx(np.array(expected))
