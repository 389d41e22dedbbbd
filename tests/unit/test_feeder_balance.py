"""Gains of racks' meters are learned from the balance of their feeders: within what is stated of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of
from tests.support.ledger_month import tree
from twin.catalogue import F64, pack, unpack
from twin.ledger.energy_split import RootGroups
from twin.ledger.feeder_balance import MOST_RACKS, FeederBalance
from twin.ledger.rack_meters import GAIN_PU

FULL_J = 1e5 * 3600.0
MONTH_H = 720


class Halls:
    """Two halls whose racks take more and less at different times, with meters that have gains."""

    def __init__(self, seed: int, racks: int = 4, noise_pu: float = 0.001) -> None:
        self.groups = RootGroups(site_of(tree(racks)))
        self.balance, self.noise_pu = FeederBalance(self.groups), noise_pu
        self.rng, n = np.random.default_rng(seed), self.groups.site.sizes
        self.gain = 1.0 + GAIN_PU * self.rng.standard_normal(n["rack"])
        self.root_gain = 1.0 + 0.0012 * self.rng.standard_normal(n["feeder"])
        self.level = self.rng.standard_normal(n["rack"])
        self.all_racks, self.all_roots = np.ones(n["rack"], np.bool_), np.ones(n["feeder"], np.bool_)

    def run(self, hours: int, missing: int = -1) -> None:
        """Hours in which a rack is not read, if one is `missing`."""
        for _ in range(hours):
            self.level = 0.85 * self.level + 0.527 * self.rng.standard_normal(len(self.level))
            true_j = FULL_J * np.clip(0.7 + 0.15 * self.level, 0.1, 1.0)
            hall_j = np.bincount(self.groups.of_rack, true_j)
            root_j = self.root_gain * 0.5 * np.repeat(hall_j, 2)
            metered = true_j * self.gain * (1.0 + self.noise_pu * self.rng.standard_normal(len(true_j)))
            whole = self.all_racks & (np.arange(len(true_j)) != missing)
            filled = metered * np.where(whole, 1.0, 0.995)  # a gap is filled, and a little wrong
            self.balance.observe(filled, whole, root_j, self.all_roots, 3600.0)

    def errors(self) -> tuple[F64, F64]:
        """Relative errors of the racks' energy as it is known now, and what is stated of them, 1 sigma."""
        off_pu, sigma_pu = self.balance.gains()
        return self.gain * (1.0 + off_pu) - 1.0, sigma_pu


def test_a_month_of_balances_nearly_halves_the_errors_of_meters_and_states_it() -> None:
    errors, sigmas = list[float](), list[float]()
    for seed in range(10):
        halls = Halls(seed)
        assert halls.errors()[1] == pytest.approx(np.full(8, GAIN_PU))
        halls.run(MONTH_H)
        error, sigma = halls.errors()
        errors += error.tolist()
        sigmas += sigma.tolist()
    assert np.sqrt(np.mean(np.square(errors))) < 0.6 * GAIN_PU
    assert np.max(np.abs(errors)) < 0.005
    assert max(sigmas) < 0.6 * GAIN_PU
    inside = np.abs(errors) < 1.645 * np.array(sigmas)
    assert 0.80 <= inside.mean() <= 0.99  # racks of one hall share the error of their roots


def test_hours_in_which_something_was_not_read_teach_nothing() -> None:
    halls = Halls(1)
    halls.run(100, missing=0)
    _, sigma = halls.errors()
    assert sigma[:4] == pytest.approx(np.full(4, GAIN_PU))
    assert (sigma[4:] < GAIN_PU).all()


def test_another_meter_begins_anew_and_the_others_stay_known() -> None:
    halls = Halls(2)
    halls.run(MONTH_H)
    halls.balance.forget("rack", 1)
    off_pu, sigma = halls.balance.gains()
    assert (off_pu[1], sigma[1]) == (0.0, pytest.approx(GAIN_PU))
    halls.gain[1] += 0.006
    halls.run(MONTH_H)
    error, sigma = halls.errors()
    assert abs(error[1]) < 3.0 * sigma[1] < 0.006
    halls.balance.forget("feeder", 0)
    halls.run(1)
    assert np.isfinite(halls.balance.gains().off_pu).all()


def test_a_window_that_tells_of_something_else_moves_nothing() -> None:
    halls = Halls(3)
    halls.run(100)
    before = halls.balance.gains().off_pu
    halls.root_gain *= 1.2  # a rack that nobody listed
    halls.run(1)
    assert halls.balance.gains().off_pu == pytest.approx(before)


def test_a_snapshot_holds_what_was_learned_and_large_groups_learn_nothing() -> None:
    halls = Halls(4)
    halls.run(30)
    other = FeederBalance(halls.groups)
    other.restore(unpack(pack(halls.balance.dump())))
    halls.run(0)
    for one in (halls.balance, other):
        one.observe(np.full(8, FULL_J), halls.all_racks, np.full(4, 2.0 * FULL_J), halls.all_roots, 3600.0)
    assert other.gains().off_pu.tolist() == halls.balance.gains().off_pu.tolist()
    large = Halls(5, racks=MOST_RACKS + 1)
    large.run(3)
    assert not large.balance.gains().off_pu.any()


@pytest.mark.parametrize("lie", [0.97, 1.05])
def test_a_root_meter_that_lies_for_a_month_falsifies_no_rack(lie: float) -> None:
    halls = Halls(3)
    halls.run(24)
    halls.root_gain[:2] *= lie  # of the first hall
    for _ in range(12):
        halls.run(MONTH_H // 12)
        off_pu, sigma = halls.balance.gains()
        assert np.abs(off_pu).max() <= 4.0 * GAIN_PU
    assert not off_pu[:4].any()
    assert sigma[:4] == pytest.approx(np.full(4, GAIN_PU))
    assert off_pu[4:].any()


def test_a_counter_read_after_its_window_teaches_nothing_of_the_next() -> None:
    halls = Halls(6)
    halls.run(30)
    before = halls.balance.gains()
    late = halls.all_roots & False
    looks = ((late, 0.998 * FULL_J), (halls.all_roots, 1.002 * FULL_J))  # what was missing comes in the next
    for read, half_j in looks:
        halls.balance.observe(np.full(8, 0.5 * FULL_J), halls.all_racks, np.full(4, half_j), read, 3600.0)
    assert halls.balance.gains().off_pu.tolist() == before.off_pu.tolist()
    halls.run(1)
    assert halls.balance.gains().off_pu.tolist() != before.off_pu.tolist()
