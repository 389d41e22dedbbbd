"""Life hazard: what is true of a simulated fleet is found again; what is censored does not mislead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.backtest import LookAhead, backtest_lives, lives, score_lives
from models.lives import LifeLog, cut_cells, judge_lemons, trained
from models.lives.cells import shared_episodes
from models.lives.frailty import FRAILTY_SHAPES, StepRows, by_member, choose_terms
from models.lives.gamma_effects import Factor, fit_effects, likeliest_shape
from models.lives.lemons import returns_of
from tests.support.simulated_lives import LifeTruth, simulated_lives
from twin.catalogue import ContractError

TRUTH = LifeTruth()


def cage_ratios(log: LifeLog) -> np.ndarray:
    """Rates by cage over that of the first, as the effects of all steps have them."""
    cells = cut_cells(log, 30.0)
    hazard, _ = trained(cells, len(cells.steps))["position"]
    first = log.places[:, 1]
    rate = hazard.static_rate(np.arange(log.k), np.zeros(log.k, np.int64))
    by_cage = [rate[first[log.place] == cage].mean() for cage in range(3)]
    return np.array(by_cage) / by_cage[0]


def test_ratios_of_cages_are_found_within_their_interval() -> None:
    log = simulated_lives(1, TRUTH)
    count = np.bincount(log.places[log.place[log.stay], 1], minlength=3)
    found = np.log(cage_ratios(log)[1:])
    width = 2.6 * np.sqrt(1.0 / count[1:] + 1.0 / count[0])  # of the logarithm, 99 %
    assert np.all(np.abs(found - np.log([2.0, 4.0])) < width)


def test_removal_does_not_bias() -> None:
    # Half of the fleet is removed alive each year: who counts devices instead of days errs by a third.
    log = simulated_lives(2, replace(TRUTH, removed_per_day=2e-3))
    cells = cut_cells(log, 30.0)
    days = sum(step.days.sum() for step in cells.steps)
    count = sum(step.count.sum() for step in cells.steps)
    assert count / days == pytest.approx(TRUTH.rate * 7.0 / 3.0, rel=2.6 / np.sqrt(count))
    assert days == pytest.approx(TRUTH.columns * 3 * TRUTH.slots * TRUTH.days, rel=1e-9)
    assert np.all(np.abs(np.log(cage_ratios(log)[1:] / [2.0, 4.0])) < 0.35)


def test_a_gap_in_watching_is_no_sign_of_health() -> None:
    log = simulated_lives(3, TRUTH)
    blind = (log.day < 300.0) | (log.day > 600.0)
    # Nobody watched for a year: the faults of that time are not in the log, but their devices were there.
    gapped = replace(
        log, stay=log.stay[blind], day=log.day[blind], kind=log.kind[blind], gaps=np.array([[300.0, 600.0]])
    )
    rates = []
    for one in (log, gapped):
        cells = cut_cells(one, 30.0)
        rates.append(sum(s.count.sum() for s in cells.steps) / sum(s.days.sum() for s in cells.steps))
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_a_factor_that_tells_nothing_is_left_at_one() -> None:
    rng = np.random.default_rng(4)
    level = rng.integers(0, 20, 5000)
    effects = fit_effects(rng.poisson(0.05, 5000).astype(float), np.ones(5000), [Factor("x", level, 20)])
    assert np.all(np.abs(effects.effect[0] - 1.0) < 0.1)
    assert effects.base == pytest.approx(0.05, rel=0.2)


def test_an_unknown_age_is_like_the_one_before() -> None:
    count, days = np.array([10.0, 80.0]), np.array([1000.0, 1000.0])
    effects = fit_effects(count, days, [Factor("age", np.array([0, 1]), 4, ordered=True)])
    assert effects.effect[0][2] == effects.effect[0][3] == effects.effect[0][1] > 1.3


@pytest.mark.parametrize("shape", [0.5, 4.0])
def test_the_shape_of_a_frailty_is_found(shape: float) -> None:
    rng = np.random.default_rng(5)
    expected = np.full(2000, 2.0)
    count = rng.poisson(expected * rng.gamma(shape, 1.0 / shape, 2000)).astype(float)
    assert likeliest_shape(count, expected) == pytest.approx(shape, rel=0.45)


def frail_steps(seed: int, member: np.ndarray, size: int) -> list[StepRows]:
    """Steps in which each member's rate has a factor of its own that stays."""
    rng = np.random.default_rng(seed)
    factor = rng.gamma(0.3, 1.0 / 0.3, size)[member]
    forecast = np.full(len(member), 0.05)
    stay = np.arange(len(member))
    return [
        StepRows(stay, rng.poisson(forecast * factor).astype(float)[:, None], forecast) for _ in range(20)
    ]


def test_a_fault_follows_whom_it_follows() -> None:
    # 600 stays of 200 serials and, crosswise, 200 positions: one of the two has a rate of its own.
    serial, position = np.arange(600) % 200, (np.arange(600) * 7 // 3) % 200
    for truth, other in ((serial, position), (position, serial)):
        steps = frail_steps(6, truth, 200)
        right = choose_terms("a", by_member(truth, 200, steps), 30.0)
        wrong = choose_terms("b", by_member(other, 200, steps), 30.0)
        # The other groups the same stays, each of which is as it is: it gains too, but less.
        assert right.gain > 1.5 * wrong.gain > 0.0
        assert right.half_life_d >= 270.0
        assert 0.05 < right.shape < 1.5


def test_merging_the_well_changes_no_choice() -> None:
    member = np.arange(400)
    steps = frail_steps(7, member, 400)
    merged = choose_terms("a", by_member(member, 400, steps), 30.0)
    # Each member twice the size of the group: the second half is never there, and must not count.
    assert choose_terms("a", by_member(member, 800, steps), 30.0).gain == pytest.approx(merged.gain)
    gains = []
    came, forecast = np.zeros(400), np.zeros(400)
    fade = 0.5 ** (30.0 / merged.half_life_d)
    for rows in steps:
        factor = (merged.shape + came) / (merged.shape + forecast)
        gains.append(rows.count[:, 0] @ np.log(factor) - rows.forecast @ (factor - 1.0))
        came, forecast = fade * (came + rows.count[:, 0]), fade * (forecast + rows.forecast)
    assert merged.gain == pytest.approx(sum(gains), rel=0.02)
    assert merged.shape in FRAILTY_SHAPES


def test_the_position_wins_where_it_matters_and_is_not_used_where_it_does_not() -> None:
    for cage, wins in (((1.0, 4.0, 12.0), True), ((1.0, 1.0, 1.0), False)):
        log = simulated_lives(8, replace(TRUTH, cage=cage, rate=4e-4, columns=3))
        result = backtest_lives(log, 540.0)
        told = score_lives(result)
        less = told["against"]["position/blind"]
        assert (less["verdict"] == "better") == wins
        used = told["champion_steps"].get("position", 0) / told["steps"]
        assert used > 0.9 if wins else used < 0.2  # the gate lets chance pass once in twenty
        assert told["methods"]["champion"]["ece"] < 0.02
        assert result.steps_checked == 1


def test_lemons_are_found_at_the_precision_that_is_true() -> None:
    truth = replace(TRUTH, rate=2e-4, cage=(1.0, 1.0, 1.0), lemon_share=0.02, lemon_factor=60.0)
    log = simulated_lives(9, truth)
    hazard, _ = trained(cut_cells(log, 30.0), 15)["position"]
    told = judge_lemons(hazard, 450.0, 1200.0, 0.02)
    assert told.withdrawn <= 24
    assert told.failed_again / told.withdrawn > 0.5  # of devices at random one in fifteen fails again
    assert 0.8 * told.oracle_avoided < told.avoided <= told.oracle_avoided <= told.repeats


def test_decisions_know_the_past_alone() -> None:
    log = simulated_lives(10, replace(TRUTH, rate=2e-3))
    whole, short = returns_of(log, 100.0, 400.0), returns_of(log.known_at(400.0), 100.0, 400.0)
    assert whole.asset.tolist() == short.asset.tolist()
    assert whole.before.tolist() == short.before.tolist()
    assert whole.later.sum() > short.later.sum()
    assert np.all(whole.before >= 1)


def test_a_look_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    log = simulated_lives(11, replace(TRUTH, columns=3))
    mean = float(len(log.day))

    def leaky(self: object, score: np.ndarray) -> np.ndarray:
        return np.full(len(score), len(self.cells.log.day) / mean / 100.0)  # type: ignore[attr-defined]

    monkeypatch.setattr(lives._Walk, "_mapped", leaky)
    with pytest.raises(LookAhead, match="decayed_count"):
        backtest_lives(log, 540.0)


def test_episodes_and_endings() -> None:
    log = LifeLog(
        ("a",), ("slot",), np.zeros((1, 1), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32),
        np.array([0.0, 20.0]), np.array([10.0, np.inf]), np.array([0, 0, 0, 1], np.int32),
        np.array([4.0, 4.5, 10.0, 25.0]), np.zeros(4, np.int32), ("x",), 0.0, 30.0, np.zeros((0, 2)),
    )  # fmt: skip
    assert log.episode.tolist() == [True, False, True, True]
    assert log.repeats.tolist() == [0, 1, 1, 2]
    assert log.ending.tolist() == [1, 2]  # failed, watched
    assert log.known_at(12.0).day.tolist() == [4.0, 4.5, 10.0]
    assert log.known_at(12.0).until_d == 12.0
    faults = log.as_faults()
    assert faults.start_d.tolist() == [4.0, 10.0, 25.0]
    assert faults.end_d.tolist() == [4.0, 20.0, 25.0]
    with pytest.raises(ContractError, match="within its stay"):
        replace(log, day=np.array([4.0, 4.5, 15.0, 25.0]))
    with pytest.raises(ContractError, match="expected asset from 0 to 0"):
        replace(log, asset=np.array([0, 1], np.int32))


def test_a_burst_over_many_devices_is_set_apart() -> None:
    log = simulated_lives(12, replace(TRUTH, columns=4))
    there = np.flatnonzero((log.from_d < 500.0) & (log.to_d > 501.0))[:30]
    day = np.concatenate([log.day, np.full(30, 500.0)])
    order = np.argsort(day, kind="stable")
    burst = replace(
        log,
        stay=np.concatenate([log.stay, there.astype(np.int32)])[order],
        day=day[order],
        kind=np.zeros(len(day), np.int32),
    )
    shared = shared_episodes(burst)
    assert shared.sum() == 30
    assert np.all(burst.day[shared] == 500.0)
    cells = cut_cells(burst, 30.0)
    assert sum(step.count.sum() for step in cells.steps) == pytest.approx(log.episode.sum(), abs=1)
    assert sum(step.y.sum() for step in cells.steps) > log.episode.sum()  # but they came, and are scored
    assert cells.shared_rate(499.0) == 0.0 < cells.shared_rate(900.0)
