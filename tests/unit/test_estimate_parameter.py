"""Parameters: three sets that delay, least squares against a rival solver, drift. May import `twin`."""

from __future__ import annotations

import numpy as np
import pytest

from twin.catalogue import NS
from twin.contracts import Residual, confidence_of, confidence_of_many
from twin.estimation import Parameter
from twin.estimation.noise import FAULT_SIGMAS, NOISE_WARMUP, ResidualNoise
from twin.estimation.parameter import (
    LEAST_PART,
    MOVE_S,
    Covariance,
    Delayed,
    Fit,
    Reference,
    for_prior,
    parts_of,
    solve,
)
from twin.telemetry import OWN


def test_what_is_learned_comes_into_use_after_one_to_two_minutes() -> None:
    held = Delayed(np.zeros((1, 2)))
    learned_s, used_s = {}, {}
    for second in range(300):
        held.advance(1.0)
        value = float(held.in_use[0, 0])
        used_s.setdefault(value, second)
        held.learning[0] = second  # after it moved on: as the estimator does
        learned_s[float(second)] = second
    delays = [used_s[v] - learned_s[v] for v in used_s if v > 0]
    assert min(delays) > MOVE_S  # a reading of up to a minute ago is in no expectation
    assert max(delays) <= 2 * MOVE_S


def test_moving_some_rows_leaves_the_others() -> None:
    held = Delayed(np.zeros((2, 4)))
    held.learning[:] = 1.0
    held.move(slice(1, 3))
    held.move(slice(1, 3))
    assert held.in_use.tolist() == [[0, 1, 1, 0]] * 2
    other = Delayed(np.zeros((2, 4)))
    other.restore(held.dump())
    assert np.array_equal(other.in_use, held.in_use)
    other.reset(2, np.array([7.0, 8.0]))
    assert other.in_use[:, 2].tolist() == [7.0, 8.0] == other.learning[:, 2].tolist()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_solving_agrees_with_a_general_solver(k: int) -> None:
    rng = np.random.default_rng(k)
    m = 20
    x = rng.normal(size=(m, 50, k))
    full = np.einsum("mti,mtj->mij", x, x)
    moment, prior, trust = rng.normal(size=(k, m)), rng.normal(size=(k, m)), rng.uniform(0.1, 2, (k, m))
    upper = np.stack([full[:, i, j] for i in range(k) for j in range(i, k)])
    theta, variance, factor = solve(upper, moment, prior, trust)
    features = rng.normal(size=(k, m))
    covariance = Covariance(np.ones((k, m)))
    for _ in range(2):
        covariance.move(slice(None), factor)
    sigma = covariance.sigma(np.arange(m), list(features))
    for row in range(m):
        matrix = full[row] + np.diag(trust[:, row])
        assert theta[:, row] == pytest.approx(
            np.linalg.solve(matrix, moment[:, row] + trust[:, row] * prior[:, row])
        )
        assert variance[:, row] == pytest.approx(np.diag(np.linalg.inv(matrix)))
        x = features[:, row]
        assert sigma[row] ** 2 == pytest.approx(x @ np.linalg.inv(matrix) @ x, rel=1e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_what_a_row_tells_of_the_mean_of_all_rows_agrees_with_the_marginal_likelihood(k: int) -> None:
    rng, m = np.random.default_rng(k), 20
    x = rng.normal(size=(m, 50, k))
    full, spread = np.einsum("mti,mtj->mij", x, x), rng.uniform(0.05, 5.0, (k, m))
    moment = rng.normal(size=(k, m))
    pairs = [(i, j) for i in range(k) for j in range(i, k)]
    told, of_mean = for_prior(np.stack([full[:, i, j] for i, j in pairs]), moment, spread)
    for row in range(m):
        weight = np.linalg.inv(np.linalg.inv(full[row]) + np.diag(spread[:, row] ** 2))
        assert told[:, row] == pytest.approx([weight[i, j] for i, j in pairs], rel=1e-6, abs=1e-9)
        assert of_mean[:, row] == pytest.approx(weight @ np.linalg.solve(full[row], moment[:, row]), rel=1e-6)


def test_a_prior_is_what_is_known_until_a_fit_has_come_into_use() -> None:
    covariance = Covariance(np.array([[2.0, 1.0], [0.5, 3.0]]))
    x = [np.array([1.0, 1.0]), np.array([4.0, 0.0])]
    both = np.arange(2)
    assert covariance.sigma(both, x) == pytest.approx([np.hypot(2.0, 2.0), 1.0])
    sure = np.zeros((3, 2))
    covariance.move(slice(None), sure)
    assert covariance.sigma(both, x) == pytest.approx([np.hypot(2.0, 2.0), 1.0]), "a minute too early"
    covariance.move(slice(0, 1), sure[:, :1])
    assert covariance.sigma(both, x) == pytest.approx([0.0, 1.0])
    covariance.forget(OWN, 0)
    assert covariance.sigma(both, x) == pytest.approx([np.hypot(2.0, 2.0), 1.0]), "another device"


def test_a_fit_finds_the_line_and_stays_at_its_prior_where_nothing_is_said() -> None:
    rng = np.random.default_rng(4)
    fit = Fit(2, 3, memory_s=1000.0)
    rows, one = slice(0, 3), np.ones(3)
    prior, spread = np.array([[5.0] * 3, [1.0] * 3]), np.array([[2.0] * 3, [0.5] * 3])
    assert fit.solve(rows, prior, spread)[0] == pytest.approx(prior)
    for _ in range(3000):
        x = rng.uniform(0, 100, 3)
        y = 7.0 + 1.3 * x + rng.normal(0, 0.5, 3)
        x[2] = np.nan  # the third never has a reading
        fit.learn(rows, [one, x], y, np.where(np.isnan(x), x, 0.5), np.array([1.0, 1.0, 0.0]), 1.0)
    theta, variance, _ = fit.solve(rows, prior, spread)
    assert theta[:, :2] == pytest.approx(np.array([[7.0] * 2, [1.3] * 2]), rel=0.05)
    assert theta[:, 2] == pytest.approx(prior[:, 2])
    assert variance[:, 2] == pytest.approx(spread[:, 2] ** 2)
    assert (variance[:, 0] < 0.1 * spread[:, 0] ** 2).all()
    assert fit.taught_s.tolist() == [3000.0, 3000.0, 0.0]


def test_what_is_forgotten_is_what_newer_readings_replace() -> None:
    fit = Fit(1, 1, memory_s=100.0)
    rows, one = slice(0, 1), np.ones(1)
    for level, weight in ((1.0, 1.0), (3.0, 1.0), (9.0, 0.0)):
        for _ in range(1000):
            fit.learn(rows, [one], level * one, one, weight * one, 1.0)
    theta, variance, _ = fit.solve(rows, np.zeros((1, 1)), np.full((1, 1), 100.0))
    assert theta[0, 0] == pytest.approx(3.0, abs=0.01)  # no reading, no forgetting
    assert variance[0, 0] <= 100.0**2


def test_the_reference_is_the_first_settled_value_and_stays() -> None:
    held = Reference(1, 2, settled_s=100.0)
    rows = slice(0, 2)
    held.settle(rows, np.array([[1.0, 2.0]]), np.array([50.0, 100.0]), np.array([7, 8]))
    held.settle(rows, np.array([[3.0, 4.0]]), np.array([150.0, 200.0]), np.array([9, 10]))
    assert held.value.tolist() == [[3.0, 2.0]]
    assert held.settled_ns.tolist() == [9, 8]
    p = Parameter("gpu.resistance", "gpu", np.array([3.3, 2.0]), held.value[0], np.ones(2), np.zeros(2))
    assert p.drift == pytest.approx([0.1, 0.0])
    held.forget(OWN, 1)
    assert np.isnan(held.value[0, 1])
    assert held.settled_ns.tolist() == [9, 0]


def test_confidence_of_many_is_the_same() -> None:
    z = np.linspace(-8, 8, 5001)
    sigma = np.full_like(z, 0.3)
    assert confidence_of_many(0.3 * z, sigma) == pytest.approx(confidence_of(0.3 * z, sigma), abs=2e-6)
    assert np.isnan(confidence_of_many(np.array([np.nan, 1.0]), np.array([1.0, np.nan]))).all()


def test_learning_noise_in_parts_is_learning_it_whole() -> None:
    rng = np.random.default_rng(2)
    whole, parts = ResidualNoise(10, np.full(10, 0.1)), ResidualNoise(10, np.full(10, 0.1))
    for second in range(200):
        off = rng.normal(0, 1, 10)
        off[3] += 50.0 if second > 100 else 0.0
        heard = np.full(10, (second + 1) * NS)
        whole.learn(off, heard, 1.0)
        for rows in (slice(0, 4), slice(4, 10)):
            parts.learn(off[rows], heard[rows], 1.0, rows)
    assert np.array_equal(whole.variance, parts.variance)
    assert np.array_equal(whole.off_ns, parts.off_ns)
    assert whole.sigma(slice(2, 5)).tolist() == whole.sigma()[2:5].tolist()
    lasting = whole.lasting(np.full(10, 200 * NS))
    assert lasting.tolist() == [i == 3 for i in range(10)]
    assert whole.sigma()[3] < 2 * FAULT_SIGMAS
    assert whole.count[3] >= NOISE_WARMUP
    whole.forget(OWN, 3)
    assert np.isnan(whole.sigma()[3])


@pytest.mark.parametrize("n", [0, 1, 511, 1024, 9472, 25_002, 100_008])
def test_parts_cover_all_rows_once_in_order(n: int) -> None:
    parts = parts_of(n, 2048)
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(n))
    assert max(p.stop - p.start for p in parts) <= 2048
    assert len(parts) == 1 or min(p.stop - p.start for p in parts) >= LEAST_PART


def test_noise_of_parts_is_noise_of_the_whole() -> None:
    """Rows far off, for long, unknown or near, learned whole and in halves; infinite differences are none."""
    rng = np.random.default_rng(4)
    whole, halves = ResidualNoise(40, np.full(40, 0.1)), ResidualNoise(40, np.full(40, 0.1))
    for second in range(1, 120):
        off = rng.normal(0.0, 0.2, 40)
        off[3] = np.nan if second % 2 else off[3]
        off[4] = np.inf
        off[5] += 9.0 if second > 60 else 0.0
        heard_ns = np.full(40, second * NS)
        whole.learn(off, heard_ns, 1.0)
        for rows in (slice(0, 20), slice(20, 40)):
            halves.learn(off[rows], heard_ns[rows], 1.0, rows)
    assert np.array_equal(whole.variance, halves.variance)
    assert np.array_equal(whole.count, halves.count)
    assert np.array_equal(whole.off_ns, halves.off_ns)
    assert whole.count[4] == 0
    assert whole.variance[4] == 0.0
    assert whole.off_ns[5] == 61 * NS
    assert whole.count[5] == 70  # ten seconds of it, then no more
    assert np.flatnonzero(whole.lasting(heard_ns)).tolist() == [5]


def test_confidence_is_found_when_asked_for() -> None:
    measured, sigma = np.array([1.0, 3.0, np.nan, np.inf]), np.ones(4)
    found = Residual("gpu.power_w", np.ones(4), measured, sigma)
    assert found.confidence_pu[:2] == pytest.approx(confidence_of(found.difference, sigma)[:2], abs=2e-6)
    assert np.isnan(found.confidence_pu[2])
    assert found.confidence_pu[3] == 1.0
    assert found.confidence_pu is found.confidence_pu
    stated = np.full(4, 0.5)
    assert Residual("gpu.power_w", np.ones(4), measured, sigma, stated).confidence_pu is stated
