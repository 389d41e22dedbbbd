"""Aggregation of experts: who was right gains weight, and regret stays within the bound of the theory."""

from __future__ import annotations

import numpy as np
import pytest

from models.load.combination import Combination, independent_share, middle_half

AWAKE = np.ones((2, 1), np.bool_)
KNOWN = np.ones(1, np.bool_)


def two(share: float = 1.0, keep: float = 1.0) -> Combination:
    return Combination(1, np.array([0.5, 0.5]), share, keep)


def play(experts: np.ndarray, outcomes: np.ndarray) -> tuple[Combination, np.ndarray]:
    """Absolute loss with the mean of experts [n_time, k]; returns the state and regrets [k] to each."""
    k = experts.shape[1]
    state = Combination(1, np.full(k, 1.0 / k), 1.0, 1.0)
    regret = np.zeros(k)
    for said, actual in zip(experts, outcomes, strict=True):
        mean = float(said @ state.weights(np.ones((k, 1), np.bool_))[:, 0])
        slope = np.sign(mean - actual)
        state.judge((slope * (mean - said))[:, None], KNOWN)
        regret += abs(mean - actual) - np.abs(said - actual)
    return state, regret


def test_weights_begin_as_the_prior() -> None:
    state = Combination(2, np.array([0.5, 0.3, 0.2]), 1.0, 1.0)
    assert state.weights(np.ones((3, 2), np.bool_)) == pytest.approx(np.array([[0.5, 0.3, 0.2]] * 2).T)


def test_the_one_that_is_always_right_gets_all_the_weight() -> None:
    outcomes = np.random.default_rng(1).normal(size=300)
    state, _ = play(np.column_stack([outcomes, outcomes + 1.0]), outcomes)
    assert state.weights(AWAKE)[0, 0] > 0.99


def test_two_that_err_to_either_side_are_both_kept() -> None:
    outcomes = np.random.default_rng(2).normal(size=2000)
    state, regret = play(np.column_stack([outcomes - 1.0, outcomes + 1.0]), outcomes)
    assert state.weights(AWAKE)[:, 0] == pytest.approx([0.5, 0.5], abs=0.1)
    assert regret.max() < -0.9 * 2000


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_units_do_not_matter(scale: float) -> None:
    rng = np.random.default_rng(3)
    outcomes, noise = rng.normal(size=100), rng.normal(size=(100, 2)) * (0.5, 1.0)
    plain, _ = play(outcomes[:, None] + noise, outcomes)
    scaled, _ = play(scale * (outcomes[:, None] + noise), scale * outcomes)
    assert scaled.weights(AWAKE) == pytest.approx(plain.weights(AWAKE), rel=1e-6)


def bound(state: Combination, n_time: int) -> np.ndarray:
    """The form of the theory's bound (Wintenberger 2017, theorem 3): adaptive rates, sums that were seen."""
    log_k = np.log(len(state.regret))
    slack = np.log(1.0 + 0.5 * np.log2(n_time))
    root = np.sqrt(2.0) / (np.sqrt(2.0) - 1.0) * np.sqrt(log_k) + slack / np.sqrt(log_k)
    out: np.ndarray = np.sqrt(state.square[:, 0]) * root + state.peak[:, 0] * (
        2.0 * log_k + 2.0 * slack + 1.0
    )
    return out


def adversary(kind: str, n_time: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n_time + k)
    if kind == "alternating":  # follow-the-leader always follows the wrong one
        experts = np.tile(np.arange(k) % 2.0, (n_time, 1))
        return experts, (np.arange(n_time) % 2).astype(float)
    if kind == "turning":  # the best one changes half way
        experts = np.tile(np.linspace(0.0, 1.0, k), (n_time, 1))
        return experts, np.repeat([0.0, 1.0], n_time // 2)
    return rng.random((n_time, k)), rng.integers(0, 2, n_time).astype(float)


@pytest.mark.parametrize("kind", ["alternating", "turning", "random"])
@pytest.mark.parametrize("k", [2, 12])
@pytest.mark.parametrize("n_time", [100, 2000])
def test_regret_is_within_the_bound(kind: str, k: int, n_time: int) -> None:
    state, regret = play(*adversary(kind, n_time, k))
    assert (regret <= bound(state, n_time)).all()


def test_who_sleeps_has_no_weight_and_is_not_judged() -> None:
    state = two()
    for _ in range(20):
        state.judge(np.array([[0.0], [-1.0]]), KNOWN)
    asleep = state.weights(np.array([[True], [False]]))
    assert asleep[:, 0].tolist() == [1.0, 0.0]
    assert state.regret[0, 0] == 0.0
    assert state.weights(np.zeros((2, 1), np.bool_)).tolist() == [[0.0], [0.0]]


def test_a_gap_forgets_nothing() -> None:
    state = two(keep=0.5)
    state.judge(np.array([[1.0], [-1.0]]), KNOWN)
    before = state.regret.copy(), state.square.copy(), state.peak.copy()
    state.judge(np.zeros((2, 1)), ~KNOWN)
    assert all(
        np.array_equal(a, b) for a, b in zip(before, (state.regret, state.square, state.peak), strict=True)
    )


def test_an_outcome_that_all_foresaw_forgets_nothing() -> None:
    """A series that moves once in a thousand rows is not forgotten between two moves."""
    state = Combination(2, np.array([0.5, 0.5]), 1.0, 0.5)
    state.judge(np.array([[1.0, 1.0], [-1.0, -1.0]]), np.ones(2, np.bool_))
    state.judge(np.array([[0.0, 0.0], [0.0, 0.25]]), np.ones(2, np.bool_))
    assert state.regret.tolist() == [[1.0, 0.5], [-1.0, -0.25]]
    assert state.square.tolist() == [[1.0, 0.5], [1.0, 0.5625]]


def test_what_is_forgotten_gives_way() -> None:
    long, short = two(keep=1.0), two(keep=0.9)
    for won in [1.0] * 200 + [-1.0] * 60:
        for state in (long, short):
            state.judge(np.array([[0.5 * won], [-0.5 * won]]), KNOWN)
    assert long.weights(AWAKE)[0, 0] > 0.9
    assert short.weights(AWAKE)[0, 0] < 0.1


@pytest.mark.parametrize("overlap", [1, 2, 5, 16, 31])
def test_overlapping_losses_count_as_few(overlap: int) -> None:
    """The variance of a mean of long sums of `overlap` squared triangular correlations, term by term."""
    inflation = 1.0 + 2.0 * sum((1.0 - j / overlap) ** 2 for j in range(1, overlap))
    assert independent_share(overlap) == pytest.approx(1.0 / inflation)


def test_sixteen_copies_of_a_loss_do_not_outweigh_one_by_much() -> None:
    once, copied = two(), two(share=independent_share(16))
    for won in (0.3, -0.2, 0.5, 0.4):
        once.judge(np.array([[won], [-won]]), KNOWN)
        for _ in range(16):
            copied.judge(np.array([[won], [-won]]), KNOWN)
    lead = once.weights(AWAKE)[0, 0], copied.weights(AWAKE)[0, 0]
    assert 0.5 < lead[0] < lead[1] < lead[0] + 0.15


def test_middle_half_is_the_mean_between_the_quartiles() -> None:
    points = np.array([[4.0], [1.0], [2.0], [3.0]])
    assert middle_half(points, np.full((4, 1), 0.25)) == pytest.approx([2.5])
    assert middle_half(points, np.full((4, 1), 7.0)) == pytest.approx([2.5])  # weights need not sum to 1
    uneven = np.array([[0.1], [0.3], [0.4], [0.2]])  # 1: 0.3, 2: 0.4, 3: 0.2, 4: 0.1
    assert middle_half(points, uneven) == pytest.approx([(1.0 * 0.05 + 2.0 * 0.4 + 3.0 * 0.05) / 0.5])


def test_middle_half_is_what_three_quarters_agree_on() -> None:
    points = np.array([[0.1], [0.1], [1e12], [-1e12]])
    assert middle_half(points, np.array([[0.5], [0.25], [0.125], [0.125]]))[0] == pytest.approx(
        0.1, rel=1e-12
    )


def test_middle_half_skips_who_sleeps() -> None:
    points = np.array([[np.nan, np.nan], [2.0, np.nan]])
    weights = np.array([[0.0, 0.0], [1.0, 0.0]])
    assert middle_half(points, weights)[0] == 2.0
    assert np.isnan(middle_half(points, weights)[1])
