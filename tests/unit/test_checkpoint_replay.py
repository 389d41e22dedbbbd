"""The replay of failures: accounts of a job's time, jobs on a fleet, what was known when, who is better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.backtest import LookAhead
from models.failure import FaultLog
from policies.checkpointing import LEAST_GAIN, LONG_GAIN, SaveTerms, best_interval, ettr, ettr_at
from tests.evaluation.checkpoint.fleets import DAYS, FLEETS, FROM_D, NODES, PER_NODE_D
from tests.evaluation.checkpoint.suite import prediction, together, weibull, wrong_saves
from tests.support.fault_logs import fleet, log_of, struck
from tests.support.sampled_cases import sampled
from twin.backtest import FIXED, Predictions, SaveCosts, place_jobs, replay, scores, simulate_saves
from twin.backtest.checkpoint_replay import (
    BEST,
    DAY_S,
    GRID_S,
    RULES,
    WINDOW_D,
    constant_rates,
    job_life,
    known_rates,
    live_intervals,
    realised_rate,
)
from twin.backtest.checkpoint_scores import NAMES
from twin.catalogue import F64, ConfigError

COSTS = SaveCosts(60.0, 600.0)


class Seconds:
    """A rival that goes through each second of one rule's life."""

    def __init__(self, costs: SaveCosts) -> None:
        self.save, self.restart, self.flush = (int(s) for s in costs)
        self.done = self.durable = self.at_risk = 0  # work in all, of the durable save, of the flushed one
        self.worked = self.standing = self.flushing = self.restarting = 0

    def begin(self, interval: int) -> None:
        """A save, where one is due."""
        busy = self.standing or self.flushing or self.restarting
        if not busy and self.worked >= max(interval, self.flush):
            self.standing, self.at_risk, self.worked = self.save, self.done, 0

    def second(self, interval: int) -> None:
        if self.restarting:
            self.restarting -= 1
        elif self.standing:
            self.standing -= 1
            if not self.standing:
                self.flushing = self.flush
                self.durable = self.durable if self.flush else self.at_risk
        else:
            if self.flushing:
                self.flushing -= 1
                self.durable = self.durable if self.flushing else self.at_risk
            self.done, self.worked = self.done + 1, self.worked + 1
            self.begin(interval)

    def strike(self) -> None:
        self.done, self.worked, self.standing, self.flushing = self.durable, 0, 0, 0
        self.restarting = self.restart


def second_by_second(edge: list[int], strike: list[bool], interval: list[int], costs: SaveCosts) -> int:
    """Work that counts at the end."""
    life = Seconds(costs)
    for i in range(len(strike)):
        life.begin(interval[i])
        for _ in range(edge[i], edge[i + 1]):
            life.second(interval[i])
        if strike[i]:
            life.strike()
    return life.done


pieces = st.lists(st.tuples(st.integers(1, 120), st.booleans(), st.integers(1, 60)), min_size=1, max_size=25)


@given(pieces, st.integers(1, 9), st.integers(0, 30), st.integers(0, 40))
def test_an_account_is_that_of_every_second(
    parts: list[tuple[int, bool, int]], save: int, restart: int, flush: int
) -> None:
    costs = SaveCosts(float(save), float(restart), float(flush))
    edge = np.cumsum([0, *(length for length, _, _ in parts)])
    strike = np.array([hit for _, hit, _ in parts])
    interval = np.array([[float(s)] for _, _, s in parts])
    course = simulate_saves(edge.astype(float), strike, interval, costs)
    rival = second_by_second(edge.tolist(), strike.tolist(), [s for _, _, s in parts], costs)
    assert course.useful_s.sum() == pytest.approx(rival, abs=1e-6)
    assert course.length_s.sum() == edge[-1]


@pytest.mark.parametrize("flush_s", [0.0, 400.0])
def test_an_account_of_a_long_life_is_the_closed_form(flush_s: float) -> None:
    mttf_s, n = 6480.0, 6000
    gaps_s = np.random.default_rng(1).exponential(mttf_s, n)
    interval_s = np.array([500.0, 842.0, 3600.0])
    costs = SaveCosts(60.0, 600.0, flush_s)
    edge_s = np.append(0.0, np.cumsum(gaps_s))
    course = simulate_saves(edge_s, np.ones(n, bool), np.tile(interval_s, (n, 1)), costs)
    each = course.useful_s - ettr(interval_s, 60.0, 600.0, mttf_s, flush_s) * gaps_s[:, None]
    error = each.std(axis=0) / np.sqrt(n)
    assert (np.abs(each.mean(axis=0)) < 4.0 * error).all()


def test_no_save_is_one_that_never_comes_and_a_strike_takes_all() -> None:
    edge_s = np.array([0.0, 5000.0, 9000.0])
    course = simulate_saves(edge_s, np.array([True, False]), np.full((2, 1), np.inf), COSTS)
    assert course.useful_s[:, 0].tolist() == [0.0, 3400.0]
    assert course.saves.sum() == 0


def test_an_alarm_saves_where_that_is_worth_it() -> None:
    edge_s, strike = np.array([0.0, 1000.0, 1100.0, 9000.0]), np.array([False, True, False])
    interval_s = np.full((3, 3), 2000.0)
    alarms = Predictions(np.array([False, True, False]), np.array([False, True, True]), 900.0)
    course = simulate_saves(edge_s, strike, interval_s, COSTS, alarms)
    assert course.useful_s[:2].sum(axis=0).tolist() == [0.0, 1000.0, 1000.0]
    late = simulate_saves(edge_s, strike, interval_s, COSTS, alarms._replace(least_s=1001.0))
    assert late.useful_s[:2].sum(axis=0).tolist() == [0.0, 0.0, 0.0]


def test_a_job_is_struck_by_its_own_nodes_and_moves_to_healthy_ones() -> None:
    log = fleet(3, n=60, days=90.0, rate=0.02)
    job = job_life(log, 20, 30.0, (1, 2))
    assert (job.hold.sum(axis=1) == 20).all()
    strikes = []
    for k, day in enumerate(log.start_d):
        if day > 30.0:
            row = job.hold[np.searchsorted(job.strike_d, day, side="left")]
            if row[log.node[k]]:
                strikes.append(day)
    assert job.strike_d.tolist() == strikes
    assert len(strikes) > 5
    for k, day in enumerate(job.strike_d):
        up = log.up(np.array([day + 1e-9]))[0]
        assert up[job.hold[k + 1]].all()
        # One node left and one came; the rest stay.
        assert (job.hold[k] != job.hold[k + 1]).sum() == 2
    again = job_life(log, 20, 30.0, (1, 2))
    assert np.array_equal(again.hold, job.hold)


def test_a_job_of_the_whole_fleet_takes_what_is_up_and_one_instant_is_one_strike() -> None:
    log = log_of([(0, 5.0, 9.0, 0), (1, 12.0, 30.0, 0), (2, 12.0, 13.0, 0), (3, 20.0, 21.0, 0)], 5, 40.0)
    job = job_life(log, 5, 6.0, (1,))
    assert job.strike_d.tolist() == [12.0, 20.0]
    assert job.hold.sum(axis=1).tolist() == [4, 3, 3]  # fills up at a strike, and not before
    assert [len(place_jobs(log, 6.0, (2, 5, 9), 3)), place_jobs(log, 6.0, (2,), 1)[0].size] == [4, 2]
    with pytest.raises(ConfigError, match="at most 5"):
        place_jobs(log, 6.0, (6,))


def test_what_was_known_adds_up_and_never_looks_ahead() -> None:
    log = fleet(2, n=40, days=90.0, rate=0.02, excite=0.03)
    facts = known_rates(log, 45.0)
    held = np.zeros((len(facts.days), 40), bool)
    held[:, :10] = True
    rate, shape = facts.of(held)
    assert rate == pytest.approx(facts.of_late * facts.per_d[:, :10].sum(axis=1) / DAY_S)
    every, sure = facts.of(np.ones_like(held))
    assert (sure > shape).all()
    assert (sure < facts.fleet_shape).all()
    assert every.mean() * DAY_S * 45.0 == pytest.approx((log.start_d > 45.0).sum(), rel=0.35)
    with pytest.raises(LookAhead, match="rate of failures"):
        known_rates(log, 45.0, look=lambda whole, _: whole)
    assert len(known_rates(log, 45.0).days) == len(np.unique(log.start_d[log.start_d > 45.0])) + 45


def test_a_cause_in_common_strikes_a_job_once() -> None:
    calm = fleet(4, n=200, days=90.0, rate=0.003)
    log = struck(calm, [20.0, 40.0, 60.0], 30)
    facts, before = known_rates(log, 62.0), known_rates(calm, 62.0)
    held = np.ones((1, 200), bool)
    one, other = (f.of(np.repeat(held, len(f.days), axis=0))[0][0] * DAY_S for f in (facts, before))
    assert facts.shock_per_d[0] == pytest.approx(3.0 / 62.0)
    assert one - other == pytest.approx(3.0 / 62.0, rel=0.2)  # 3 more strikes a job, and not 90
    few = held.copy()
    few[0, 1:] = False
    alone = facts.of(np.repeat(few, len(facts.days), axis=0))[0][0] * DAY_S
    alone -= facts.of_late[0] * facts.per_d[0, 0]
    assert alone == pytest.approx(3.0 / 62.0 * facts.shock_nodes[0] / 200.0)


def test_realised_rates_count_what_comes_and_never_vanish() -> None:
    strikes = np.array([10.0, 11.0, 50.0])
    days = np.array([0.0, 10.0, 80.0])
    found = realised_rate(strikes, days, 0.0, 100.0) * DAY_S
    half = WINDOW_D / 2
    assert found == pytest.approx([2.5 / half, 2.5 / (10.0 + half), 0.5 / WINDOW_D])


def test_a_replay_holds_every_rule_against_the_same_strikes() -> None:
    log = fleet(1, n=60, days=80.0, rate=0.03)
    lives = place_jobs(log, 40.0, (10, 60), 2)
    small, large = replay(log, lives, COSTS)
    assert (small.jobs, large.jobs) == (2, 1)
    assert small.strikes == sum(len(one.strike_d) for one in lives[:2])
    assert large.wall_s.sum() == pytest.approx(40.0 * DAY_S)
    assert large.useful_s.shape == (40, len(NAMES))
    # A fixed rule again, by itself
    edge_s = np.concatenate([[40.0], lives[2].strike_d, [80.0]]) * DAY_S
    hit = np.append(np.ones(len(lives[2].strike_d), bool), False)
    alone = simulate_saves(edge_s, hit, np.full((len(hit), 1), 3600.0), COSTS)
    at = RULES.index("fixed_60_min")
    assert large.useful_s[:, at].sum() == pytest.approx(alone.useful_s.sum())
    ettrs = dict(zip(NAMES, large.ettr(), strict=True))
    assert ettrs[BEST] >= max(ettrs[name] for name in FIXED) - 0.003
    assert large.best_s in GRID_S
    young = constant_rates(log, 40.0)
    assert young.whole_per_s * DAY_S == pytest.approx(0.03, rel=0.2)


def test_scores_name_the_worst_case() -> None:
    log = fleet(1, n=60, days=70.0, rate=0.03)
    found = replay(log, place_jobs(log, 40.0, (10, 60), 2), COSTS)
    told = scores(found, 60.0)
    assert set(told["sizes"]) == {"10", "60"}
    one = told["sizes"]["60"]
    assert one["live_ahead"]["fixed_120_min"]["pp"] == pytest.approx(
        100.0 * (one["ettr"]["live"] - one["ettr"]["fixed_120_min"])
    )
    ahead = one["live_ahead"]["fixed_120_min"]
    assert ahead["low_pp"] <= ahead["pp"] <= ahead["high_pp"]
    oracle = told["goals"][0]
    units = [*told["sizes"].values(), told["all"]]
    worst = min(unit["live_ahead"][name]["pp"] for unit in units for name in ("oracle_job", "oracle_fleet"))
    assert oracle["value_pp"] == worst
    assert oracle["met"] == (worst >= -0.5)
    weights = np.array([10.0, 60.0])
    each = np.array([told["sizes"][size]["ettr"]["live"] for size in ("10", "60")])
    assert told["all"]["ettr"]["live"] == pytest.approx((weights * each).sum() / weights.sum())


def test_jobs_are_told_anew_only_where_that_pays() -> None:
    rng = np.random.default_rng(3)
    days = np.arange(60.0)
    steps = np.cumsum(rng.normal(0.0, 0.15, (3, 60)), axis=1)
    rate, shape = np.exp(steps) / 20_000.0, np.full((3, 60), 50.0)
    found = live_intervals(days, rate, shape, COSTS)
    assert (found.changes < 0.5 * found.planned_changes).all()
    assert (found.changes > 0).all()
    for t in range(60):
        n = np.ones(3)
        terms = SaveTerms(
            60.0 * n, 0.0 * n, 600.0 * n, np.nan * n, np.nan * n, shape[:, t], rate[:, t], 0.0 * n
        )
        lost = ettr_at(terms, found.planned_s[:, t]) - ettr_at(terms, found.interval_s[:, t])
        assert (lost < max(LEAST_GAIN, LONG_GAIN) + 1e-4).all()


@pytest.mark.parametrize("name", FLEETS)
def test_simulated_fleets_fail_as_often_as_they_say(name: str) -> None:
    log: FaultLog = FLEETS[name][0](5)
    again = FLEETS[name][0](5)
    assert np.array_equal(again.start_d, log.start_d)
    per_d = (log.start_d > FROM_D).sum() / (DAYS - FROM_D) / NODES
    most = {"drift": 1.8, "bursts_of_all": 2.2}.get(name, 1.15)
    assert 0.6 * PER_NODE_D < per_d < most * PER_NODE_D
    assert log.up(np.array([DAYS]))[0].mean() > 0.97


def _rows(found: dict[str, object]) -> list[dict[str, float]]:
    assert found["simulated"] is True
    rows = found["rows"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.evaluation
def test_a_wrong_save_time_costs_little_once_it_is_measured() -> None:
    for row in _rows(wrong_saves(COSTS, 1)):
        assert abs(row["never_behind_pp"] - row["never_behind_exact_pp"]) < 0.3
        assert row["corrected_behind_pp"] < 0.35
        assert row["corrected_behind_pp"] <= row["never_behind_pp"] + 0.05


@pytest.mark.evaluation
def test_weibull_lives_agree_with_the_closed_form() -> None:
    for row in _rows(weibull(COSTS, 1)):
        assert abs(row["best_constant"] - row["best_constant_exact"]) < 0.012
        assert -0.05 < row["live_behind_pp"] < 0.5
        assert row["live"] > row["fixed_60_min"] + 0.05


@pytest.mark.evaluation
def test_foretold_failures_are_worth_a_save_in_time_and_not_one_too_early() -> None:
    found = prediction(COSTS, 1)
    gains = {row["rule"]: row for row in _rows(found)}
    assert abs(gains["timed"]["ettr"] - found["timed_exact"]) < 0.01
    assert gains["timed"]["gain_pp"] > 3.0
    assert gains["drained"]["gain_pp"] > 3.0
    assert gains["at_alarm"]["gain_pp"] < 0.5


@pytest.mark.slow
def test_fleets_that_follow_one_another_are_one_longer_watch() -> None:
    logs = [fleet(seed, n=30, days=70.0, rate=0.03) for seed in (1, 2)]
    found = [replay(log, place_jobs(log, 40.0, (10, 30), 1), COSTS) for log in logs]
    small, large = together(found)
    assert (small.jobs, large.jobs) == (2, 2)
    assert len(large.days) == 60
    both: F64 = np.array([one[1].useful_s.sum(axis=0) for one in found]).sum(axis=0)
    assert large.useful_s.sum(axis=0) == pytest.approx(both)


@pytest.mark.long
def test_the_best_interval_of_a_steady_rate_is_found_in_hindsight() -> None:
    rng = np.random.default_rng(7)
    at = np.sort(rng.uniform(0.0, 120.0, 1600))
    faults = [(i % 400, float(day), float(day) + 0.01, 0) for i, day in enumerate(at)]
    log = log_of(faults, 400, 120.0)
    [found] = replay(log, place_jobs(log, 60.0, (400,)), COSTS)
    exact_s = float(best_interval(60.0, 600.0, 120.0 * DAY_S / 1600.0)[0])
    assert found.best_s == pytest.approx(exact_s, rel=0.35)
    assert found.interval_s[0] == pytest.approx(exact_s, rel=0.15)


def test_a_fault_with_which_the_log_ends_takes_nothing() -> None:
    faults = [(0, 5.0, 6.0, 0), (1, 10.0, 11.0, 0), (2, 30.0, 31.0, 0)]
    log = log_of(faults, 3, 30.0)
    [found] = replay(log, place_jobs(log, 15.0, (3,)), COSTS)
    fixed = RULES.index("fixed_120_min")
    saves = np.floor((15.0 * DAY_S + 60.0) / 7260.0)
    assert found.strikes == 0
    assert found.useful_s[:, fixed].sum() == pytest.approx(15.0 * DAY_S - 60.0 * saves)


@pytest.mark.long
@pytest.mark.parametrize(("name", "least_pp"), sampled([("drift", 0.3), ("steady", -0.15)], ("drift", 0.3)))
def test_what_fails_of_late_pays_where_a_rate_drifts_and_costs_little_elsewhere(
    name: str, least_pp: float
) -> None:
    log = FLEETS[name][0](77)
    lives = place_jobs(log, FROM_D, (1024, 2048), 3, 77)
    facts = known_rates(log, FROM_D)
    assert 0.9 < np.average(facts.of_late[:-1], weights=np.diff(facts.days)) < 1.2
    plain = replace(facts, of_late=np.ones_like(facts.of_late))
    after, before = (together([replay(log, lives, COSTS, f)]) for f in (facts, plain))
    told, was = scores(after, 60.0), scores(before, 60.0)
    assert 100.0 * (told["all"]["ettr"]["live"] - was["all"]["ettr"]["live"]) > least_pp
    assert [goal["met"] for goal in told["goals"][:2]] == [True, True]
