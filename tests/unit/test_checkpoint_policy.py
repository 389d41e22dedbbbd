"""checkpoint: intervals by the failure rate of a job's own nodes, few changes, saves ahead of trouble."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.failure_rates import gamma_factors
from policies.checkpoint import (
    ASK_S,
    INTERVAL,
    LEAST_GAIN,
    MOST_AWAITED_S,
    MOST_S,
    SINCE,
    UNHEARD_S,
    Checkpoint,
    rounded,
)
from policies.checkpoint_ahead import DRAIN_PU
from policies.checkpoint_costs import DRAIN_PU as STORAGE_PU
from policies.checkpoint_costs import PRIOR_SOFT, terms_of
from policies.checkpoint_hazard import (
    HALF_D,
    LEAST_OF_LATE,
    MOST_OF_LATE,
    STEADY,
    held_by,
    of_late,
    rate_per_s,
    rates_of,
    spread_of,
)
from policies.checkpoint_plan import Terms, ettr_at, plan
from policies.checkpoint_words import MOST_TOLD, span
from policies.operator import Operator
from tests.ailing import Ailing, ailing, days_ago_ns
from tests.builders import Twin, two_racks
from tests.faults import fleet
from tests.saving import DAY_S, Saving
from twin import events as ev
from twin.app.checkpoint_known import known
from twin.contracts import Fault
from twin.errors import ContractError, StorageError
from twin.frame import NS
from twin.health.levels import DEGRADED, FAILED

EIGHT = tuple(f"r1/node{i}" for i in range(8))
OTHERS = tuple(f"r2/node{i}" for i in range(8))
N_NODE = 36
# Of a job that saves far too often: it is told another interval whatever is best
RESTLESS = {"checkpoint_interval_s": 20.0, "checkpoint_save_s": 60.0, "checkpoint_restart_s": 600.0}


def terms(per_s: float, shape: float = np.inf, nodes: int = 8, block_s: float = 60.0, flush_s: float = 0.0,
          restart_s: float = 600.0, ran_s: float = 10.0) -> Terms:  # fmt: skip
    """Of one job, as the policy should see it."""
    soft = 1.0 / (DAY_S / (PRIOR_SOFT * nodes) + ran_s)
    numbers = (block_s, flush_s, restart_s, np.nan, np.nan, shape, per_s, soft)
    return Terms(*(np.array([x]) for x in numbers))


def chances(least: float = 0.001, **of_node: float) -> np.ndarray:
    """The least of each node but these: `n3` is the fourth node of the first rack."""
    out = np.full(N_NODE, least)
    for name, chance in of_node.items():
        out[int(name[1:])] = chance
    return out


def saved(twin: Saving, job: str = "a", ago_s: float = 1200.0) -> None:
    """The job says that its last save began so long ago; its interval is two hours."""
    twin.told(job, ago_s=ago_s, interval_s=7200.0, save_s=60.0)


def test_without_a_forecast_nothing_is_proposed() -> None:
    twin = Saving({"a": EIGHT})
    twin.wait(300)
    twin.says.day = np.full(N_NODE, np.nan)
    twin.wait(300)
    assert twin.engine.in_force["checkpoint"] == []
    assert twin.engine.suspended == {}


@pytest.mark.parametrize("day", [0.01, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("shape", [0.5, 4.0, 1e5])
def test_the_interval_is_the_optimum_for_the_rate_of_its_nodes(day: float, shape: float) -> None:
    twin = Saving({"a": EIGHT}, told=RESTLESS)
    twin.says.day, twin.says.shape = day, shape
    twin.wait(10)
    rate = -8.0 * np.log1p(-np.float32(min(day, 0.999))) / DAY_S
    if day < 0.999:  # beyond, the band says nothing more
        best = plan(terms(rate, shape)).interval_s
        assert twin.often("a") == pytest.approx(min(best[0], MOST_S), rel=0.02, abs=5.0)
    else:
        assert 60.0 <= twin.often("a") < 2000.0


def test_each_job_has_the_rate_of_exactly_its_nodes() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS, "c": (*EIGHT[:1], "r1/node9")}, told=RESTLESS)
    twin.says.day = np.where(np.arange(N_NODE) < 8, 0.2, 0.01)
    twin.wait(10)
    for job, n_bad, n_good in (("a", 8, 0), ("b", 0, 8), ("c", 1, 1)):
        rate = -(n_bad * np.log1p(-0.2) + n_good * np.log1p(-0.01)) / DAY_S
        best = plan(terms(rate, 4.0, n_bad + n_good)).interval_s[0]
        assert twin.often(job) == pytest.approx(best, rel=0.02), job


def test_what_is_not_sure_of_the_fleet_does_not_average_out() -> None:
    """1 / shape is 2 of the nodes of `a`, of which 0.25 is common to all, as others are that sure."""
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day, twin.says.shape = 0.2, np.where(np.arange(N_NODE) < 8, 0.5, 4.0)
    twin.wait(5)
    view = twin.engine._view(1.0)
    found = rates_of(view, held_by(view, np.array([0, 1], np.int32)))
    assert 1.0 / found.shape == pytest.approx([0.25 + (2.0 - 0.25) / 8.0, 0.25], rel=1e-4)
    assert found.per_s == pytest.approx([-8.0 * np.log1p(-0.2) / DAY_S] * 2, rel=1e-3)


def rates_now(twin: Saving) -> Any:
    """Rates of the first job."""
    view = twin.engine._view(1.0)
    return rates_of(view, held_by(view, np.array([0], np.int32)))


def watched(twin: Saving, days: float, fail_d: tuple[float, ...] = (), **more: Any) -> Ailing:
    """A log of failures since so many days, with failures so many days ago."""
    ill = ailing(twin.engine)
    ill.failures.begin_ns = days_ago_ns(twin.now_ns, days)
    for k, ago_d in enumerate(fail_d):
        ill.failed(20 + k % 16, days_ago_ns(twin.now_ns, ago_d), twin.now_ns, **more)
    return ill


LATELY = tuple(0.05 * k for k in range(1, 21))


@pytest.mark.parametrize(
    ("fail_d", "more"),
    [((), {}), ((0.5,), {}), (LATELY, {}), ((4.0,) * 20, {}), (LATELY * 20, {})],
)
def test_how_often_the_fleet_fails_of_late_moves_all_rates(
    fail_d: tuple[float, ...], more: dict[str, Any]
) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.05
    twin.wait(5)
    watched(twin, 9.0, fail_d)
    per_d = -N_NODE * np.log1p(-np.float32(0.05))
    expected = sum(per_d / 1000 * 0.5 ** (k / 1000 / HALF_D) for k in range(9000))  # day by day
    seen = sum(0.5 ** (ago_d / HALF_D) for ago_d in fail_d)
    times = min(max((STEADY + seen) / (STEADY + expected), LEAST_OF_LATE), MOST_OF_LATE)
    found = rates_now(twin)
    assert found.per_s == pytest.approx(times * per_d * 8 / N_NODE / DAY_S, rel=1e-3)
    assert found.soon_per_s == pytest.approx(found.per_s, rel=1e-3)
    assert found.shape == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("days", [0.0, 1e-4])
def test_on_the_first_day_nothing_is_made_of_no_failures(days: float) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.9
    twin.wait(5)
    before = rates_now(twin).per_s[0]
    ill = watched(twin, days)
    assert rates_now(twin).per_s[0] == pytest.approx(before, rel=2e-3)
    ill.failures.begin_ns = 0  # nobody watches yet
    for _ in range(9):
        ill.failed(3, twin.now_ns)
    assert rates_now(twin).per_s[0] == pytest.approx(before, rel=1e-3)


def test_only_failures_of_nodes_themselves_since_the_watch_began_count_of_late() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.05
    twin.wait(5)
    ill = watched(twin, 2.0, (0.1,) * 3)
    before = rates_now(twin).per_s[0]
    for _ in range(30):
        for kind in ("software", "taken_out"):
            ill.failed(5, twin.now_ns, 0, kind)
        ill.failed(5, days_ago_ns(twin.now_ns, 2.1))
        ill.failed(5, days_ago_ns(twin.now_ns, -0.1))
    assert rates_now(twin).per_s[0] == before


def test_causes_in_common_stay_in_the_rate_and_raise_it_no_further() -> None:
    """A forecast of 36 x 0.1 a day, of which half is shared: it says neither more nor less of late."""
    twin = Saving({"a": EIGHT})
    rate = 0.1
    twin.says.day = -np.expm1(-rate)
    twin.wait(5)
    ill = watched(twin, 10.0, tuple(np.arange(18) / 1.8 + 0.3))
    for _ in range(18):
        ill.failed(5, days_ago_ns(twin.now_ns, 0.3), twin.now_ns, shared=True)
    got = rates_now(twin).per_s[0] * DAY_S / 8
    assert got == pytest.approx(rate, rel=0.06)
    ill.failures.rows = [row for row in ill.failures.rows if row[4]]  # no node fails by itself any more
    none = rates_now(twin).per_s[0] * DAY_S / 8
    assert none > 0.9 * rate, "few of so many failures are of nodes themselves"
    ill.failures.rows = []
    assert rates_now(twin).per_s[0] * DAY_S / 8 < 0.6 * rate


def test_what_a_nodes_own_signs_tell_does_not_move_with_the_fleet() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day, twin.says.hour = 0.2, chances(0.0, n3=0.6)
    twin.wait(5)
    before = rates_now(twin)
    watched(twin, 30.0)
    after = rates_now(twin)
    times = after.per_s / before.per_s
    assert times < 0.5
    lost = before.soon_per_s - after.soon_per_s
    assert lost == pytest.approx((1.0 - times) * before.per_s / 8.0, rel=1e-3)  # one node's share of the day


def test_one_node_that_is_ill_does_not_make_the_others_look_well() -> None:
    found = []
    for day in (0.005, 0.95):
        twin = Saving({"a": EIGHT})
        twin.says.day = chances(0.005, n20=day)
        twin.wait(5)
        watched(twin, 30.0)
        found.append(rates_now(twin).per_s[0])
    assert found[1] > 0.95 * found[0]


def test_unknown_rates_stay_unknown_however_many_fail() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = np.where(np.arange(N_NODE) < 5, np.nan, 0.1)
    twin.wait(5)
    watched(twin, 9.0, LATELY * 5)
    assert np.isnan(rates_now(twin).per_s).all()


def test_the_backtest_knows_of_late_what_the_daemon_does() -> None:
    log = fleet(6, n=N_NODE, days=60.0, rate=0.05)
    facts = known(log, 40.0)
    for at in (0, 7, len(facts.days) - 1):
        day = facts.days[at]
        seen = log.known_at(day)
        up = np.ones(N_NODE, bool)
        up[seen.node[np.isinf(seen.end_d)]] = False
        twin = Saving({"a": EIGHT})
        twin.says.day = np.where(up, -np.expm1(-facts.per_d[at]), np.nan)
        twin.wait(5)
        plain = rates_now(twin).per_s[0]
        ill = watched(twin, day)
        for node, start_d, end_d in zip(seen.node, seen.start_d, seen.end_d, strict=True):
            end_ns = days_ago_ns(twin.now_ns, day - end_d) if np.isfinite(end_d) else 0
            ill.failed(int(node), days_ago_ns(twin.now_ns, day - start_d), end_ns)
        assert rates_now(twin).per_s[0] / plain == pytest.approx(facts.of_late[at], rel=1e-3)
        assert facts.of_late[at] != 1.0


@pytest.mark.parametrize("per_d", [0.0, 0.3, 13.0, 400.0])
def test_a_fleet_that_fails_as_expected_changes_nothing(per_d: float) -> None:
    each = np.full(100, per_d / 100.0)
    for watched_d in (0.0, 0.4, 3.0, 300.0):
        age_d = (np.arange(round(per_d * watched_d)) + 0.5) / max(per_d, 1e-9)
        assert of_late(age_d, each, watched_d) == pytest.approx(1.0, abs=0.1)
    assert of_late(np.zeros(0), each, -1.0) == 1.0  # a clock that went back
    assert LEAST_OF_LATE <= of_late(np.zeros(0), each, 300.0) <= 1.0
    assert 1.0 < of_late(np.zeros(10**4), each, 300.0) <= MOST_OF_LATE
    assert of_late(np.zeros(9), np.zeros(0), 300.0) == 1.0


@pytest.mark.parametrize(("unknown", "speaks"), [(0, True), (3, True), (4, True), (5, False), (8, False)])
def test_a_job_of_which_half_is_unknown_is_left_alone(unknown: int, speaks: bool) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = np.where(np.arange(N_NODE) < unknown, np.nan, 0.1)
    twin.wait(10)
    assert np.isfinite(twin.often("a")) == speaks
    if speaks:
        best = plan(terms(-8.0 * np.log1p(-0.1) / DAY_S, 4.0)).interval_s[0]
        assert twin.often("a") == pytest.approx(best, rel=0.02), "the others stand for them"


@pytest.mark.parametrize("kind", ["unknown", "inference", "batch"])
def test_only_training_is_advised(kind: str) -> None:
    twin = Saving({"a": EIGHT}, kind=kind)
    twin.says.day = 0.5
    saved(twin)
    twin.wait(100)
    assert twin.engine.in_force["checkpoint"] == []


def test_a_job_that_never_spoke_is_left_alone_unless_asked_for() -> None:
    twin = Saving({"a": EIGHT}, told={})
    twin.says.day = 0.5
    twin.wait(100)
    assert twin.engine.in_force["checkpoint"] == []
    twin = Saving({"a": EIGHT}, told={}, policy=Checkpoint(silent_jobs=True))
    twin.says.day = 0.5
    twin.wait(100)
    assert np.isfinite(twin.often("a"))
    assert "by a prior" in twin.why(INTERVAL)[0]
    with pytest.raises(ContractError, match="expected true or false, got 2"):
        Checkpoint(silent_jobs=2)  # type: ignore[arg-type]


def test_measured_costs_count_before_what_was_said() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    twin.told("a", ago_s=30.0, save_s=60.0, block_s=4.0, flush_s=200.0, restart_s=120.0)
    twin.wait(10)
    rate = -8.0 * np.log1p(-0.2) / DAY_S
    soft = 2.0 / (DAY_S / (PRIOR_SOFT * 8) + 10.0)  # one recovery was told
    asked = terms(rate, 4.0, 8, 4.0, 200.0, 120.0)._replace(soft_per_s=np.array([soft]))
    assert twin.often("a") == pytest.approx(plan(asked).interval_s[0], rel=0.02)
    assert "a save stops it for 4 s (measured)" in twin.why(INTERVAL)[0]


def test_a_flush_is_told_from_the_begin_of_its_save_and_counts_from_its_end() -> None:
    """As the client reports: one that stops training for all of it, one that goes on, one as fast as that."""
    for block_s, flush_s, after_s in ((60.0, 60.0, 0.0), (5.0, 65.0, 60.0), (60.0, 50.0, 0.0)):
        twin = Saving({"a": EIGHT})
        twin.says.day = 0.2
        twin.told("a", ago_s=90.0, save_s=flush_s, block_s=block_s, flush_s=flush_s)
        view, slots = twin.engine._view(1.0), np.array([0], np.int32)
        held = held_by(view, slots)
        found, _ = terms_of(view, slots, held, rates_of(view, held))
        assert (found.block_s[0], found.flush_s[0]) == (block_s, after_s)


def test_the_reason_says_what_was_weighed() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    twin.wait(10)
    why = twin.why(INTERVAL)[0]
    assert why.startswith("job a: save every ")
    for piece in ("instead of 2 h", "8 nodes and the job fail every", "60 s (as it said)", "points more"):
        assert piece in why, piece


def test_a_job_whose_own_interval_is_nearly_best_is_not_nagged() -> None:
    best = plan(terms(-8.0 * np.log1p(-0.2) / DAY_S, 4.0)).interval_s[0]
    for factor, told in ((1.0, False), (1.15, False), (0.87, False), (3.0, True), (0.33, True)):
        given = {"checkpoint_interval_s": float(factor * best), "checkpoint_save_s": 60.0,
                 "checkpoint_restart_s": 600.0}  # fmt: skip
        twin = Saving({"a": EIGHT}, told=given)
        twin.says.day = 0.2
        twin.wait(10)
        assert np.isfinite(twin.often("a")) == told, factor


def test_a_rate_that_flickers_changes_nothing() -> None:
    twin = Saving({"a": EIGHT})
    ailing(twin.engine)  # whose log of failures has no begin: only what is forecast counts
    heard = set()
    for k in range(100):
        twin.says.day = 0.2 * (1.0 + 0.1 * (-1) ** k)
        twin.tick(None, dt_s=300.0)
        heard.add(twin.often("a"))
    assert len(heard) == 2, "nothing at first, then one interval"


def test_a_rate_that_rises_is_followed_and_costs_less_than_the_threshold() -> None:
    twin = Saving({"a": EIGHT})
    ailing(twin.engine)  # whose log of failures has no begin: only what is forecast counts
    changes, before = 0, 7200.0
    for day in np.geomspace(0.02, 0.9, 200):
        twin.says.day = day
        twin.tick(None, dt_s=700.0)
        if np.isfinite(twin.often("a")):
            changes += twin.often("a") != before
            before = twin.often("a")
        now = terms(
            -8.0 * np.log1p(-day) / DAY_S, 4.0, ran_s=(twin.now_ns - twin.engine.jobs.started_ns[0]) / NS
        )
        lost = plan(now).ettr - ettr_at(now, before)
        assert lost[0] < 1.5 * LEAST_GAIN
    assert 4 <= changes <= 40


def test_many_jobs_of_one_file_system_leave_it_time() -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    given = {"checkpoint_interval_s": 600.0, "checkpoint_save_s": 120.0, "checkpoint_restart_s": 60.0}
    twin = Saving(nodes, told=given, storage=[{"name": "fs"}], max_jobs=40)
    twin.says.day = 0.9
    twin.wait(10)
    often = np.array([twin.often(job) for job in nodes])
    assert (120.0 / often).sum() <= STORAGE_PU * 1.01
    assert (120.0 / often).sum() >= STORAGE_PU * 0.9, "and does not waste it"
    alone = Saving(nodes, told=given, max_jobs=40)
    alone.says.day = 0.9
    alone.wait(10)
    assert alone.often("j0") < 0.7 * often[0]


@pytest.mark.parametrize("bad", [{"storage.health_state": 2.0}, {"storage.used_pu": 0.99}])
def test_a_file_system_that_is_down_or_full_gets_nothing_more(bad: dict[str, float]) -> None:
    twin = Saving({"a": EIGHT}, storage=[{"name": "fs"}])
    twin.tick(bad)
    twin.says.day, twin.says.hour = 0.5, chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(60, bad)
    assert twin.engine.in_force["checkpoint"] == []
    twin.wait(60, {"storage.health_state": 0.0, "storage.used_pu": 0.5})
    assert twin.engine.in_force["checkpoint"]


def test_what_else_is_written_leaves_less_to_checkpoints() -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    often = []
    for steady in (0.0, 0.9e9):
        more: dict[str, Any] = {"history_s": {"storage.flush_bytes_per_s": 600}, "max_jobs": 40}
        told = {"checkpoint_interval_s": 86_400.0, "checkpoint_save_s": 60.0}
        twin = Saving(nodes, told=told, storage=[{"name": "fs"}], **more)
        for k in range(120):
            twin.tick({"storage.flush_bytes_per_s": 1e9 if k == 0 else steady}, dt_s=5.0)
        twin.says.day = 0.95
        twin.tick({"storage.flush_bytes_per_s": steady}, dt_s=5.0)
        twin.wait(65, {"storage.flush_bytes_per_s": steady})
        often.append(twin.often("j0"))
    assert often[1] > 2.0 * often[0]


def test_a_save_ahead_of_what_is_forecast() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = chances(n3=0.9)
    twin.says.hour = chances(0.0, n3=0.6)
    saved(twin, "a")
    saved(twin, "b")
    twin.wait(10)
    assert np.isnan(twin.since("b"))
    assert 60.0 <= twin.since("a") <= 80.0, "one that is being written counts"
    why = twin.why(SINCE)[0]
    assert "forecast to fail soon" in why
    assert "of work not saved > 60 s for a save, of 8 nodes" in why
    at = twin.lease(SINCE)[0]
    twin.wait(120)
    assert twin.lease(SINCE)[0] == at, "asked once"
    twin.told("a", ago_s=100.0)
    twin.wait(10)
    assert twin.why(SINCE) == []


def test_what_is_at_stake_must_exceed_what_a_save_costs() -> None:
    for ago_s, asked in ((70.0, False), (400.0, False), (2400.0, True)):
        twin = Saving({"a": EIGHT})
        twin.says.day, twin.says.hour = chances(0.0, n3=0.3), chances(n3=0.08)
        saved(twin, ago_s=ago_s)
        twin.tick(None, dt_s=5.0)
        assert bool(twin.why(SINCE)) == asked, ago_s


@pytest.mark.parametrize(
    ("day", "hour", "ago_s", "flush_s", "asked"),
    [
        (0.5, None, 3000.0, 0.0, False),  # no news: the interval was made for that rate
        (0.5, 0.5, 3000.0, 0.0, True),
        (0.01, chances(0.0, n3=0.1), 5000.0, 0.0, True),
        (0.01, chances(0.0, n3=0.1), 7000.0, 0.0, False),  # the next save is near
        (0.01, chances(0.0, n3=0.999), 1200.0, 100.0, True),
        (0.01, chances(0.0, n3=0.999), 1200.0, 3000.0, False),  # too late to be durable in time
    ],
)
def test_a_save_that_changes_nothing_is_not_asked_for(
    day: float, hour: Any, ago_s: float, flush_s: float, asked: bool
) -> None:
    twin = Saving({"a": EIGHT}, authority="advise")
    twin.says.day, twin.says.hour = day, hour
    twin.told("a", ago_s=ago_s, interval_s=7200.0, save_s=60.0, block_s=60.0, flush_s=flush_s)
    twin.wait(5)
    assert bool(twin.why(SINCE)) == asked


def test_an_unanswered_ask_ends_and_is_no_alarm() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day, twin.says.hour = chances(0.0, n3=0.9), chances(n3=0.6)
    saved(twin)
    twin.wait(ASK_S + 120.0, dt_s=20.0)
    asks = twin.engine.memory["checkpoint"]["asked_ns"][0]
    assert twin.why(SINCE) == []
    assert not [key for key in twin.engine.findings.active if SINCE in key]
    twin.wait(3600.0, dt_s=20.0)
    again = twin.engine.memory["checkpoint"]["asked_ns"][0]
    assert again == asks or again - asks >= UNHEARD_S * NS
    assert not [key for key in twin.engine.findings.active if SINCE in key]


@pytest.mark.parametrize(
    ("level", "action", "ago_s", "asked"),
    [
        (FAILED, "reboot_node", 1200.0, True),
        (FAILED, "reboot_node", 70.0, False),
        (DEGRADED, "drain", 2400.0, True),
        (DEGRADED, "watch", 2400.0, False),
    ],
)
@pytest.mark.parametrize("part", ["node", "gpu"])
def test_a_verdict_on_a_node_of_its_own(
    part: str, level: int, action: str, ago_s: float, asked: bool
) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    ill = ailing(twin.engine)
    ill.say(part, 3 if part == "node" else 13, level, "it is ill", action_name=action, since_ns=twin.now_ns)
    saved(twin, ago_s=ago_s)
    twin.wait(10)
    assert bool(twin.why(SINCE)) == asked
    if asked:
        assert "the health of a node of its own is bad" in twin.why(SINCE)[0]


def test_an_old_verdict_counts_no_more() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    ill = ailing(twin.engine)
    ill.say("node", 3, FAILED, "it is ill", action_name="drain", since_ns=twin.now_ns - 7 * 3600 * NS)
    saved(twin)
    twin.wait(10)
    assert twin.why(SINCE) == []


def drain(name: str = "d", level: float = 3.0, node: str = "r1/node3") -> ev.OperatorRequest:
    return ev.OperatorRequest(id=name, author="ada", control="node.service_level", names=(node,), lo=level,
                              hi=level, want=level, reason="repair")  # fmt: skip


def test_a_drain_that_somebody_wants_is_told_to_the_job_once() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = 0.001
    saved(twin)
    twin.tick(None, drain())
    twin.wait(10)
    assert "is to be drained" in twin.why(SINCE)[0]
    assert f"{100 * DRAIN_PU:.0f} % x" in twin.why(SINCE)[0]
    assert np.isnan(twin.since("b"))
    twin.told("a", ago_s=10.0)
    twin.wait(7000.0, dt_s=50.0)
    twin.told("a", ago_s=3000.0)
    twin.wait(1000.0, dt_s=20.0)
    first = twin.engine.memory["checkpoint"]["asked_ns"][0]
    assert twin.now_ns - first > 7000 * NS, "it lasts, and is not asked for again"
    twin.tick(None, ev.RequestWithdrawn(id="w", author="ada", request="d"))
    twin.wait(320)  # the lease on the node ends
    twin.tick(None, drain("d2"))
    twin.wait(10)
    assert twin.why(SINCE), "another one is"


def test_cordoning_is_no_drain_and_draining_by_others_is() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    saved(twin)
    twin.tick(None, drain(level=1.0))
    twin.wait(10)
    assert twin.why(SINCE) == []
    state = np.zeros(N_NODE)
    state[5] = 2.0
    twin.wait(10, {"node.service_level_state": state})
    assert twin.why(SINCE)


@pytest.mark.parametrize(
    ("kind", "table", "entity", "sure", "asked"),
    [
        ("feed_lost", "feeder", 0, 0.9, "ab"),
        ("grid_event", "site", 0, 0.9, "ab"),
        ("pump_trip", "cdu", 0, 0.9, "ab"),
        ("branch_blocked", "rack", 0, 0.9, "a"),
        ("branch_blocked", "rack", 0, 0.4, ""),
        ("pump_worn", "cdu", 0, 0.9, ""),
        ("node_down", "node", 30, 0.9, ""),
    ],
)
def test_trouble_of_power_and_cooling(kind: str, table: str, entity: int, sure: float, asked: str) -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = 0.001
    saved(twin, "a")
    saved(twin, "b")
    fault = Fault(kind, table, entity, "", "critical", sure, twin.now_ns, ("seen",))
    diagnosis = twin.engine.diagnosis
    diagnosis.update = lambda *_: setattr(diagnosis, "faults", (fault,))  # type: ignore[assignment]
    twin.wait(10)
    slots = np.flatnonzero(np.isfinite(twin.lease(SINCE)))
    assert slots.tolist() == [twin.engine.jobs.slot_of[job] for job in asked]
    if asked:
        assert "power or cooling above it is in trouble" in twin.why(SINCE)[0]


def test_a_feeder_over_its_budget() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    saved(twin)
    twin.wait(10, {"feeder.power_w": 200_000.0})
    assert twin.why(SINCE) == []
    twin.wait(10, {"feeder.power_w": 310_000.0})
    assert twin.why(SINCE)


def test_saves_ahead_do_not_all_come_at_once_to_one_file_system() -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    twin = Saving(nodes, storage=[{"name": "fs"}], max_jobs=40)
    twin.says.day, twin.says.hour = 0.001, 0.5
    twin.tick(None, *(ev.CheckpointTold(job=job, began_ns=twin.now_ns - 1200 * NS) for job in nodes))
    twin.wait(5)
    assert len(twin.why(SINCE)) == 10, "ten of 60 s fill ten minutes"


def test_a_job_that_claims_endless_saves_keeps_no_other_from_saving() -> None:
    """Most is at stake by what `liar` says: it would fill the queue of saves for eleven days."""
    twin = Saving({"liar": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}])
    twin.says.day, twin.says.hour = 0.001, 0.5
    year_ns = 365 * 86_400 * NS
    twin.tick(
        None,
        ev.CheckpointTold(
            job="liar", began_ns=twin.now_ns - year_ns, block_s=1.0, flush_s=1e6, interval_s=1e7
        ),
        drain(),
    )
    twin.wait(10)
    assert np.isfinite(twin.since("liar"))
    saved(twin, "b")
    twin.wait(10)
    assert np.isfinite(twin.since("b"))
    kept, slot = twin.engine.memory["checkpoint"], twin.engine.jobs.slot_of["liar"]
    assert kept["until_ns"][slot] - kept["asked_ns"][slot] <= (ASK_S + MOST_AWAITED_S) * NS


def test_advice_commands_nothing() -> None:
    twin = Saving({"a": EIGHT}, authority="advise")
    twin.says.day, twin.says.hour = 0.3, chances(0.0, n3=0.6)
    saved(twin)
    advised: set[str] = set()
    for _ in range(10):
        twin.tick(None, dt_s=5.0)
        advised |= {c.control for c in twin.decision.advice}
        assert not twin.decision.commands
    assert advised == {INTERVAL, SINCE}


def test_what_people_ask_of_a_job_goes_first() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    ask = {"control": INTERVAL, "names": ("lab/job0",), "lo": 300.0, "hi": 400.0}
    twin.tick(None, ev.OperatorRequest(id="q", author="ada", reason="test", **ask))
    twin.wait(10)
    assert twin.often("a") == 400.0


def test_a_restart_from_a_snapshot_decides_the_same() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day, twin.says.hour = chances(0.0, n3=0.9, n20=0.5), chances(0.0, n3=0.6)
    saved(twin, "a")
    saved(twin, "b", 100.0)
    twin.wait(30)
    assert twin.why(SINCE)
    other = twin.restarted(two_racks(), list(twin.engine.policies), [twin.says])
    other.engine.intake.authority = dict(twin.engine.intake.authority)
    report = ev.CheckpointTold(job="a", at_ns=twin.now_ns + NS, began_ns=twin.now_ns, block_s=9.0)
    for k in range(20):
        for each in (twin, other):
            each.tick(None, *((report,) if k == 3 else ()), dt_s=5.0)
        assert other.engine.checksum() == twin.engine.checksum(), k


def test_a_run_from_before_this_policy_goes_on() -> None:
    """Nobody else's leases change hands."""
    before = Twin(two_racks(), [Operator()], act=True)
    ask = {"control": "node.service_level", "names": ("r1/node3",), "lo": 3.0, "hi": 3.0}
    before.tick(
        {"node.service_level_state": 0.0}, ev.OperatorRequest(id="q", author="ada", reason="x", **ask)
    )
    after = before.restarted(two_racks(), [Operator(), Checkpoint()])
    after.tick({"node.service_level_state": 0.0})
    assert after.lease("node.service_level")[3] == 3.0
    assert set(after.engine.memory) == {"operator", "checkpoint"}
    with pytest.raises(StorageError, match="differ in policies: checkpoint, operator"):
        before.restarted(two_racks(), [Checkpoint()])


def test_the_next_job_of_a_slot_is_a_stranger() -> None:
    twin = Saving({"a": EIGHT}, max_jobs=1)
    twin.says.day, twin.says.hour = 0.3, chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(30)
    assert twin.engine.in_force["checkpoint"]
    twin.tick(None, ev.JobEnded(job="a"), dt_s=5.0)
    assert twin.engine.in_force["checkpoint"] == []
    twin.tick(None, dt_s=700.0)
    twin.tick(None, ev.JobStarted(job="b", nodes=EIGHT, kind="training"), dt_s=5.0)
    twin.wait(30)
    assert twin.engine.jobs.slot_of == {"b": 0}
    assert twin.engine.in_force["checkpoint"] == []
    assert all(
        not column[0] for name, column in twin.engine.memory["checkpoint"].items() if name != "generation"
    )


def test_more_jobs_than_sentences() -> None:
    nodes = {f"j{i}": (f"r{1 + i % 2}/node{i % 18}",) for i in range(MOST_TOLD + 50)}
    twin = Saving(nodes, max_jobs=MOST_TOLD + 60, told=RESTLESS)
    twin.says.day = 0.3
    twin.wait(10)
    why = twin.why(INTERVAL)
    assert len(why) == MOST_TOLD + 1
    assert "50 more jobs" in why[-1]
    assert np.isfinite(twin.lease(INTERVAL)[: len(nodes)]).all()
    assert twin.engine.suspended == {}


@pytest.mark.parametrize("shape", [0.4, 1.0, 4.0, 30.0, 1e4])
def test_the_spread_is_read_back_from_a_band(shape: float) -> None:
    _, high = gamma_factors(np.array([shape]))
    assert spread_of(np.array([2e-6]), 2e-6 * high) == pytest.approx(1.0 / shape, rel=1e-6)


def test_rates_of_chances() -> None:
    assert rate_per_s(np.array([0.0, 0.5, 1.0]), 3600.0) == pytest.approx(
        [0.0, np.log(2) / 3600, np.log(1000) / 3600]
    )
    assert np.isnan(rate_per_s(np.array([np.nan]), 3600.0)).all()
    assert spread_of(np.array([1.0, 0.0, np.nan]), np.array([0.5, 1.0, 1.0])).tolist()[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("interval_s", "least_s", "expected"),
    [(857.3, 0.0, 855.0), (63.0, 0.0, 65.0), (1.0, 0.0, 5.0), (63.0, 71.2, 72.0), (4000.0, 0.0, 4020.0),
     (np.inf, 0.0, MOST_S), (np.nan, 10.0, MOST_S)],
)  # fmt: skip
def test_intervals_are_said_in_round_numbers(interval_s: float, least_s: float, expected: float) -> None:
    assert rounded(np.array([interval_s]), np.array([least_s])).tolist() == [expected]


@pytest.mark.parametrize(
    ("s", "words"), [(4.0, "4 s"), (840.0, "14 min"), (7200.0, "2 h"), (864000.0, "10 days")]
)
def test_times_in_words(s: Any, words: str) -> None:
    assert span(s) == words
