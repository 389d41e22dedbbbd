"""Power that is read seldom: plates followed exactly, second by second, beside what two readings tell."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import F64, NS
from twin.estimation.readings import Readings
from twin.estimation.seldom_power import Gaps, PlateHeat, SeldomPower
from twin.telemetry import Block, Inbox, State

TAU_S, GAP_S, N = 7.0, 30, 400
NONE = np.full(N, np.nan)


def lived(power_w: F64) -> tuple[F64, F64]:
    """Lags of first and second order [n] after powers [seconds, n], from rest at the first of them."""
    once, twice = power_w[0].copy(), power_w[0].copy()
    for at in np.repeat(power_w, 20, axis=0):  # twenty steps a second: the second lag has no closed form
        stay = np.exp(-0.05 / TAU_S)
        twice = once + (twice - once) * stay
        once = at + (once - at) * stay
    return once, twice


def bridged(power_w: F64, mean_w: F64) -> tuple[F64, F64, PlateHeat]:
    """The same by the first and the last power and the mean: the old one stands for all but a second."""
    first, last = power_w[0], power_w[-1]
    heat = SeldomPower({"gpu": N}, NONE).heat(
        Gaps(np.arange(N), np.full(N, float(GAP_S)), first, last, mean_w), np.full(N, TAU_S), 1.0
    )
    held = np.concatenate([np.repeat(first[None], GAP_S - 1, axis=0), last[None]])
    once, twice = lived(held)
    return once + heat.once_w, twice + heat.twice_w, heat


def steps(seed: int = 1) -> F64:
    """One step each at an instant that is uniform over the gap [seconds, n]."""
    rng = np.random.default_rng(seed)
    before, after = rng.uniform(150.0, 1000.0, (2, N))
    at = rng.uniform(0.0, GAP_S, N)
    share = np.clip(np.arange(1, GAP_S + 1)[:, None] - at, 0.0, 1.0)
    power_w = before + (after - before) * share
    power_w[-1] = after
    return np.concatenate([before[None], power_w])


def test_a_step_at_an_unknown_instant_is_right_on_average_and_its_doubt_honest() -> None:
    power_w = steps()
    once, _, heat = bridged(power_w, NONE)
    off = (once - lived(power_w[1:])[0]) / heat.sigma_w
    assert abs(off.mean()) < 0.2
    assert 0.7 < off.std() < 1.3


def test_the_energy_in_between_tells_the_instant_of_the_step() -> None:
    power_w = steps(2)
    once, twice, heat = bridged(power_w, power_w[1:].mean(axis=0))
    truth = lived(power_w[1:])
    blind = bridged(power_w, NONE)
    moved = np.abs(power_w[-1] - power_w[0])
    for k, mine in enumerate((once, twice)):
        off, off_blind = mine - truth[k], blind[k] - truth[k]
        assert np.sqrt((off**2).mean()) < 0.3 * np.sqrt((off_blind**2).mean())
    assert (np.abs(once - truth[0]) < 2.0 * heat.sigma_w + 0.02 * moved).all()


@pytest.mark.parametrize("period_s", [6, 10, 15])
def test_a_swing_in_step_with_the_readings_is_covered(period_s: int) -> None:
    """Each reading falls into the same part of a swing: no power that is read tells of it."""
    seconds = np.arange(GAP_S + 1)[:, None]
    power_w = np.where(seconds % period_s == 0, 380.0, 900.0) + np.zeros((1, N))
    once, _, heat = bridged(power_w, power_w[1:].mean(axis=0))
    warm = lived(np.concatenate([power_w[1:]] * 4))[0]
    first = lived(np.repeat(power_w[:1], 2, axis=0))[0]
    assert (np.abs(once - warm) < heat.sigma_w).all()
    assert (np.abs(first - warm) > 0.8 * heat.sigma_w).all()  # what the readings alone would have said


def test_a_counter_that_counts_a_tenth_moves_nothing_beyond_its_doubt() -> None:
    power_w = np.full((GAP_S + 1, N), 800.0)
    once, _, heat = bridged(power_w, np.full(N, 80.0))
    assert (np.abs(once - 800.0) <= heat.sigma_w).all()


def test_swings_are_remembered_for_a_while() -> None:
    seldom = SeldomPower({"gpu": 1}, np.full(1, np.inf))
    one, tau = np.zeros(1, np.int64), np.full(1, TAU_S)
    moved = Gaps(one, np.full(1, 30.0), np.full(1, 200.0), np.full(1, 900.0), np.full(1, np.nan))
    still = moved._replace(before_w=moved.now_w)
    at_once = seldom.heat(moved, tau, 1.0).sigma_w[0]
    later = [float(seldom.heat(still, tau, 1.0).sigma_w[0]) for _ in range(60)]
    assert at_once > later[0] > 0.9 * at_once
    assert later[-1] < 0.1 * at_once


def heard(seconds: list[int], energies_mj: list[int]) -> list[Gaps]:
    """The gaps of a GPU that draws 500 W and counts these energies at these seconds."""
    site = site_of(two_racks(racks="r1"))
    state, inbox, n = State(site.sizes), Inbox(site.sizes), site.sizes["gpu"]
    seldom, before_w, out = SeldomPower(site.sizes, np.full(n, 1000.0)), np.full(n, np.nan), []
    for number, (second, energy) in enumerate(zip(seconds, energies_mj, strict=True)):
        now_ns = (1000 + second) * NS
        power = np.full((1, n), 500.0, np.float32)
        counts = np.full((1, n), energy, np.int64)
        inbox.put_block(Block("gpu", 0, ("power_w",), power, ("energy_mj",), counts, now_ns), now_ns)
        state.apply(inbox.take(number, now_ns, 1.0))
        readings = Readings(state)
        power_w, power_ns = readings.good("gpu", "power_w")
        out.append(seldom.update(readings, power_w, power_ns, before_w)[0])
        before_w = power_w
    return out


def test_only_powers_that_come_seldom_end_a_gap_and_its_energy_counts_once() -> None:
    first, dense, seldom, again = heard([0, 3, 33, 63], [0, 1_500_000, 16_500_000, 34_500_000])
    assert len(first.gpus) == len(dense.gpus) == 0
    assert (seldom.gap_s == 30.0).all()
    assert np.isnan(seldom.mean_w).all()  # nothing was counted from when the gap began
    assert again.mean_w == pytest.approx(600.0)


@pytest.mark.parametrize("energy", [15_500_000, 99_000_000])
def test_an_energy_that_cannot_be_is_none(energy: int) -> None:
    """A counter that stands, or runs faster than the GPU can draw."""
    *_, gaps = heard([0, 31, 61], [0, 15_500_000, energy])
    assert np.isnan(gaps.mean_w).all()
