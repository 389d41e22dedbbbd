"""Lemons: signals by day over 28 days, and which nodes fail more than others beyond chance.

What is simulated here draws its incidents by the laws that the tests state; no figure here is one of a fleet.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import nbinom, poisson

from tests.support.builders import START_NS, eight_nodes, site_of
from tests.support.health_contexts import Look
from twin.catalogue import NS
from twin.contracts import FAILURE_CLASSES, FailureLog
from twin.health import SIGNALS, LemonCounts, score
from twin.health.lemons import AGAINS, DAY_NS, DAYS, Lemons, log_clustered
from twin.telemetry import JobEnded, JobStarted, MaintenanceBegun, OperatorRequest

SITE = site_of(eight_nodes())
FLEET = site_of({"site": "lab", "halls": [{"name": "h", "racks": [
    {"name": "r[1-125]", "profile": "air-8gpu", "nodes": 8, "gpus_per_node": 1}]}]})  # fmt: skip
MIDNIGHT_NS = (START_NS // DAY_NS + 1) * DAY_NS


def log_of(rows, begin_ns=1) -> FailureLog:
    """(node, start_ns, end_ns, class, shared) of each failure."""
    rows = sorted(rows, key=lambda r: r[1])
    node, start, end, kind, shared = zip(*rows, strict=True) if rows else ((),) * 5
    return FailureLog(np.array(node, np.int32), np.array(start, np.int64), np.array(end, np.int64),
                      np.array([FAILURE_CLASSES.index(k) for k in kind], np.uint8),
                      np.array(shared, np.bool_), FAILURE_CLASSES, begin_ns)  # fmt: skip


NOTHING = log_of([])


class Stand:
    """Lemons with a clock."""

    def __init__(self, site=SITE, now_ns=MIDNIGHT_NS) -> None:
        self.look, self.lemons = Look(site), Lemons(site)
        self.look.now_ns = now_ns
        self.look.put("node.service_level_state", 0.0)
        self.log = NOTHING
        self.update()

    def update(self, seconds: float = 0.0, **more) -> None:
        self.look.pass_s(seconds)
        self.lemons.update(self.look, self.look, self.log, **more)

    def job(self, nodes, reason: str, name: str = "j") -> None:
        self.look.jobs.start(JobStarted(job=name, nodes=()), list(nodes), 0, self.look.now_ns)
        self.lemons.take(JobEnded(job=name, reason=reason), self.look.jobs, self.look.now_ns)
        self.look.jobs.end(JobEnded(job=name), self.look.now_ns - 10**15)

    def signal(self, name: str) -> np.ndarray:
        return self.lemons.signals()[:, SIGNALS.index(name)]


def window(names, table="node", key="w", until_s=3600.0) -> MaintenanceBegun:
    return MaintenanceBegun(id=key, author="a", table=table, names=tuple(names),
                            until_ns=MIDNIGHT_NS + round(until_s * NS))  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "failed", "ended"),
    [("failed", 1, 1), ("node_fail", 1, 1), ("boot_fail", 1, 1), ("completed", 0, 1), ("timeout", 0, 1),
     ("out_of_memory", 0, 1), ("deadline", 0, 1), ("cancelled", 0, 0), ("preempted", 0, 0),
     ("left the queue", 0, 0), ("ended while nobody watched", 0, 0), ("", 0, 0)],
)  # fmt: skip
def test_how_ends_of_jobs_count(reason, failed, ended):
    stand = Stand()
    assert np.isnan(stand.signal("single_node_failures")).all()  # no job was heard of: unknown
    stand.job([2], reason)
    stand.job([4, 5, 6], reason)
    stand.job([7], "completed")
    assert stand.signal("single_node_failures").tolist() == [0, 0, failed, 0, 0, 0, 0, 0]
    assert stand.signal("multi_node_failures").tolist() == [0, 0, 0, 0, failed, failed, failed, 0]
    assert stand.signal("single_node_failure_pu")[7] == 0.0
    assert stand.signal("single_node_failure_pu")[2] == (
        failed if ended else pytest.approx(np.nan, nan_ok=True)
    )
    assert np.isnan(stand.signal("single_node_failure_pu")[3])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (window(["r1/node3"]), [3]),
        (window(["r1/node3/gpu0", "r1/node5/gpu0"], "gpu"), [3, 5]),
        (window(["r1"], "rack"), []),  # not of a node
        (window(["r1/node3"], until_s=-1.0), []),  # refused: over
        (window([f"r1/node{k}" for k in range(8)]), list(range(8))),
        (window([f"r1/node{k % 8}" for k in range(9)]), []),  # of very many: means no single one
        (window(["r1/stranger"]), []),
    ],
)
def test_tickets_are_windows_that_name_the_node(event, expected):
    stand = Stand()
    stand.lemons.take(event, stand.look.jobs, stand.look.now_ns)
    stand.lemons.take(event, stand.look.jobs, stand.look.now_ns)  # renewed: the same
    assert np.flatnonzero(stand.signal("tickets")).tolist() == expected
    assert stand.signal("tickets").max() <= 1


@pytest.mark.parametrize("how", ["request", "level"])
@pytest.mark.parametrize("why", ["", "suspect", "code", "work"])
def test_excluded_counts_only_where_health_saw_nothing(how, why):
    stand = Stand()
    suspects = np.arange(8) == 3 if why == "suspect" else None
    if why == "code":
        stand.look.open["gpu"][0][3] = 5
    elif why == "work":
        stand.look.work["node"] = np.arange(8) == 3
    stand.look.pass_s(3600)
    if how == "request":
        request = OperatorRequest(author="a", control="node.service_level", names=("r1/node3",), lo=1, hi=4)
        stand.lemons.take(request, stand.look.jobs, stand.look.now_ns)
        stand.update(suspects=suspects)
    stand.look.put("node.service_level_state", 1.0, 3)
    stand.update(60, suspects=suspects)  # what was asked for is not counted again when it is so
    assert stand.signal("excluded").tolist() == [0, 0, 0, float(why == ""), 0, 0, 0, 0]


@pytest.mark.parametrize(("owner", "counts"), [(1.0, 0.0), (2.0, 1.0)])
def test_what_racktwin_itself_takes_out_is_no_judgement_of_people(owner, counts):
    stand = Stand()
    stand.look.put("node.service_level_state", 3.0, 3)
    stand.look.put("node.service_owner_state", owner, 3)
    stand.update(60)
    assert stand.signal("excluded")[3] == counts
    assert stand.lemons.by_day["incidents"].sum() == counts


def test_without_a_source_excluded_is_unknown():
    stand = Stand()
    stand.look.put("node.service_level_state", np.nan)
    stand.lemons = Lemons(SITE)
    stand.update()
    assert np.isnan(stand.signal("excluded")).all()
    assert "excluded: unknown" in stand.lemons.evidence(0)


def test_xids_that_mean_hardware_count_by_their_weight():
    stand = Stand()
    stand.look.classes = ("app", "memory", "firmware", "other")
    faded = stand.look.faded = np.zeros((4, 8), np.float32)
    faded[0, 1], faded[1, 2], faded[2, 3], faded[3, 4] = 5, 2, 2, 7
    stand.update(600)
    faded *= 0.993  # they fade
    stand.update(600)
    assert stand.signal("xids").tolist() == [0, 0, 2, 1, 0, 0, 0, 0]
    faded[1, 2] += 1
    stand.update(600)
    assert stand.signal("xids")[2] == pytest.approx(3.0, abs=0.03)
    assert stand.lemons.by_day["hard"].sum(axis=0).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_what_all_report_at_once_is_nobodys_fault():
    stand = Stand()
    stand.look.classes, stand.look.faded = ("memory",), np.ones((1, 8), np.float32)
    stand.update(600)
    assert stand.signal("xids").tolist() == [1] * 8
    assert not stand.lemons.by_day["hard"].any()


def test_evidence_of_one_incident_counts_once():
    stand = Stand()
    t_ns = stand.look.now_ns
    stand.log = log_of([(3, t_ns + 10 * NS, 0, "memory", False)])
    stand.job([3], "node_fail")
    stand.look.classes, stand.look.faded = ("memory",), np.zeros((1, 8), np.float32)
    stand.look.faded[0, 3] = 1
    stand.update(1300)
    stand.lemons.take(window(["r1/node3"], until_s=9e4), stand.look.jobs, stand.look.now_ns)
    stand.update(60)
    assert stand.lemons.by_day["incidents"][:, 3].sum() == 1
    stand.update(7 * 3600)
    stand.look.faded[0, 3] = 3
    stand.update(600)  # it is down all the while
    assert stand.lemons.by_day["incidents"][:, 3].sum() == 1
    stand.log = log_of([(3, t_ns + 10 * NS, stand.look.now_ns, "memory", False)])
    stand.update(7 * 3600)
    stand.look.faded[0, 3] = 5
    stand.update(600)  # hours later it is another one
    assert stand.lemons.by_day["incidents"][:, 3].sum() == 2
    assert stand.lemons.by_day["hard"][:, 3].sum() == 2


@pytest.mark.parametrize(
    ("kind", "shared", "before_s", "hard", "out"),
    [("memory", False, 0, 1, 1), ("memory", True, 0, 0, 0), ("taken_out", False, 0, 0, 1),
     ("software", False, 0, 0, 1), ("memory", False, 4000, 0, 1)],
)  # fmt: skip
def test_which_failures_count(kind, shared, before_s, hard, out):
    stand = Stand()
    t_ns = stand.look.now_ns
    stand.log = log_of([(3, t_ns + NS - before_s * NS, 0, kind, shared)], t_ns)
    stand.update(1100)
    assert not stand.lemons.by_day["hard"].any()  # not settled yet
    for _ in range(40):
        stand.update(100)
    assert stand.lemons.by_day["hard"][:, 3].sum() == hard
    assert stand.signal("out_of_service")[3] == out


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 60.0, 3600.0, 40_000.0, 86_399.0, 86_400.0, 86_401.0, 5 * 86_400.0,
                             27 * 86_400.0, 28 * 86_400.0, 29 * 86_400.0, 400 * 86_400.0]),
            st.integers(0, 7), st.sampled_from(["single", "multi", "ticket", "none"]),
        ),
        max_size=40,
    ),
    st.integers(0, 86_399),
    st.integers(0, 40),
)  # fmt: skip
def test_buckets_hold_28_days_across_borders_and_gaps_and_restarts(steps, begin_s, cut):
    stand = Stand(now_ns=MIDNIGHT_NS + begin_s * NS)
    said = []
    for k, (seconds, node, what) in enumerate(steps):
        if k == cut:
            again = Lemons(SITE)
            again.restore(stand.lemons.dump())
            stand.lemons = again
        stand.update(seconds)
        day = stand.look.now_ns // DAY_NS
        if what == "ticket":
            until_ns = stand.look.now_ns + NS
            event = window([f"r1/node{node}"], key=f"w{k}")
            event = MaintenanceBegun(
                id=event.id, author="a", table="node", names=event.names, until_ns=until_ns
            )
            stand.lemons.take(event, stand.look.jobs, stand.look.now_ns)
            said.append((day, "tickets", node))
        elif what != "none":
            other = (node + 1) % 8
            stand.job([node] if what == "single" else [node, other], "failed", f"j{k}")
            said.append((day, f"{what}_node_failures", node))
            if what == "multi":
                said.append((day, "multi_node_failures", other))
    today = stand.look.now_ns // DAY_NS
    heard = any(s[1] != "tickets" for s in said)
    for name in ("tickets", "single_node_failures", "multi_node_failures"):
        expected = np.zeros(8)
        for day, what, node in said:
            expected[node] += what == name and today - day < DAYS
        if name == "tickets" or heard:
            assert stand.signal(name).tolist() == expected.tolist(), name


def test_counts_do_not_run_over():
    lemons = Lemons(SITE)
    lemons._to_day(MIDNIGHT_NS)
    for _ in range(300):
        lemons._count("hard", np.array([1], np.int32))
    assert lemons.by_day["hard"][:, 1].sum() == 255


@pytest.mark.parametrize("again", AGAINS)
@pytest.mark.parametrize("mean", [0.1, 1.5])
def test_trains_of_incidents_follow_polya_and_aeppli(again, mean):
    counts = np.arange(60)
    found = np.exp([float(log_clustered(int(k), np.array(np.log(mean)), again)) - mean for k in counts])
    assert found.sum() == pytest.approx(1.0, abs=1e-6)
    assert (found * counts).sum() == pytest.approx(mean / (1 - again), rel=1e-4)
    drawn = sum(poisson.pmf(j, mean) * nbinom.pmf(3 - j, j, 1 - again) for j in (1, 2, 3))
    assert found[3] == pytest.approx(drawn, rel=1e-9)


def test_a_fleet_without_counts_has_no_lemons():
    none = np.zeros(5, np.int64)
    for n in (0, 5):
        found = score(LemonCounts(none[:n], none[:n], np.full(n, 28.0), none[:n], none[:n]))
        assert not found.lemon.any()
        assert (found.innocent_pu == 1.0).all()


def test_one_outstanding_node_is_found_and_two_soft_incidents_are_not_enough():
    n = 400
    counts = np.zeros(n, np.int64)
    counts[:60] = 1
    counts[7] = 12
    days, none = np.full(n, 28.0), np.zeros(n, np.int64)
    found = score(LemonCounts(counts, counts, days, none, none))
    assert np.flatnonzero(found.lemon).tolist() == [7]
    assert found.rate_pu[7] > 5.0
    assert found.innocent_pu[7] < 1e-3
    assert found.innocent_pu[100] > 0.5
    soft = np.minimum(counts, 1)
    assert not score(LemonCounts(counts, soft, days, none, none)).lemon.any()


def test_failed_jobs_of_its_own_raise_the_suspicion():
    n = 500
    rng = np.random.default_rng(1)
    counts = rng.poisson(0.5, n)
    counts[7] = 4
    jobs, days = np.full(n, 200), np.full(n, 28.0)
    usual = rng.binomial(jobs, 0.05)
    usual[7] = 10
    many = usual.copy()
    many[7] = 40
    without = score(LemonCounts(counts, counts, days, jobs, usual)).innocent_pu[7]
    assert score(LemonCounts(counts, counts, days, jobs, many)).innocent_pu[7] < 0.2 * without


def drawn(n: int, times: float, per_day: float, again: float, seed: int, lemons: int = 15) -> tuple:
    """(true lemons, called) of a simulated fleet after 28 days: incidents in trains, jobs without news."""
    rng = np.random.default_rng(seed)
    true = np.arange(n) < lemons
    first = rng.poisson(per_day * 28 * (1 - again) * np.where(true, times, 1.0))
    more = rng.negative_binomial(np.maximum(first, 1), 1 - again) * (first > 0) if again else 0
    counts = first + more
    none = np.zeros(n, np.int64)
    return true, score(LemonCounts(counts, counts, np.full(n, 28.0), none, none)).lemon


@pytest.mark.parametrize("again", [0.0, 0.25])
@pytest.mark.parametrize("per_day", [6.5e-3, 16.5e-3, 36.5e-3])
def test_a_fleet_of_equals_has_hardly_any_lemons(per_day, again):
    called = sum(int(drawn(1000, 1.0, per_day, again, seed)[1].sum()) for seed in range(10))
    assert called <= 6  # of 10,000


# Simulated: incidents (failures, reports of hardware faults, tickets) per node-day, and what is found of 15
# lemons among 1000 nodes. With 6.5 failures per 1000 node-days alone a lemon of ten times the rate has 1.8
# in 28 days and a healthy one 0.18: even a judge who knows rate and share finds 11 % at 85 % precision. The
# goal of 90 % is met from about 36 incidents per 1000 node-days on, at ten times and above.
@pytest.mark.parametrize(
    ("per_day", "times", "recall", "precision"),
    [(36.5e-3, 10.0, 0.90, 0.85), (16.5e-3, 15.0, 0.75, 0.9)],
)
def test_seeded_lemons_are_found_where_counts_allow_it(per_day, times, recall, precision):
    found = [drawn(1000, times, per_day, 0.0, seed) for seed in range(20)]
    right = sum(int((true & called).sum()) for true, called in found)
    assert right / 300 >= recall
    assert right / sum(int(called.sum()) for _, called in found) >= precision


def test_few_are_called_where_counts_cannot_tell():
    found = [drawn(1000, 5.0, 6.5e-3, 0.0, seed) for seed in range(20)]
    assert sum(int(called.sum()) for _, called in found) <= 10


def life(seed: int, times: float) -> tuple[np.ndarray, np.ndarray, Lemons]:
    """28 days of 1000 nodes through all signals: (true lemons, called, the judge); six-hour steps.

    Per node-day and times the node's multiple: 6.5e-3 failures, 20e-3 reports of hardware faults without one,
    10e-3 tickets or exclusions without either. Three jobs of its own a day, of which 3 % fail for reasons of
    the user and 0.3 % times the multiple for the node's.
    """
    rng = np.random.default_rng(seed)
    stand = Stand(FLEET)
    n, step_s = 1000, 6 * 3600
    true = np.arange(n) < 15
    factor = np.where(true, times, 1.0)
    stand.look.classes, stand.look.faded = ("memory",), np.zeros((1, n), np.float32)
    rows: list = []
    t0 = stand.look.now_ns
    for step in range(28 * 4):
        t_ns = stand.look.now_ns
        p = factor / 4
        down = {r[0] for r in rows if r[2] > t_ns}
        for node in np.flatnonzero(rng.random(n) < 6.5e-3 * p).tolist():
            if node not in down:
                end_ns = t_ns + round(rng.lognormal(np.log(72_000), 1.0) * NS)
                rows.append((node, t_ns + NS, end_ns, "memory", False))
        stand.log = log_of(rows, t0)
        stand.look.faded *= np.float32(np.exp(-0.25))
        stand.look.faded[0, rng.random(n) < 20e-3 * p] += 1
        for k, node in enumerate(np.flatnonzero(rng.random(n) < 10e-3 * p).tolist()):
            event = window([FLEET.name("node", node)], key=f"{step}/{k}", until_s=9e9)
            stand.lemons.take(event, stand.look.jobs, t_ns)
        failed = rng.random((n, 1)) < 0.75 * (0.03 + 0.003 * factor)[:, None]
        ran = rng.random(n) < 0.75
        stand.lemons.jobs_heard = True
        stand.lemons._to_day(t_ns)
        stand.lemons._count("runs", np.flatnonzero(ran).astype(np.int32))
        stand.lemons._count("single", np.flatnonzero(ran & failed[:, 0]).astype(np.int32))
        stand.update(step_s)
    return true, stand.lemons.is_lemon(), stand.lemons


# Evidence of one incident is merged and a lemon is often down, so that ten times the rate shows as 6.9
# incidents against 0.94: who asks for five of them finds 83 % at 82 % precision.
@pytest.mark.long
def test_through_all_signals_lemons_are_found_within_28_days():
    found = [life(seed, 10.0) for seed in range(3)]
    right = sum(int((true & called).sum()) for true, called, _ in found)
    assert right / 45 >= 0.65
    assert right / sum(int(called.sum()) for _, called, _ in found) >= 0.85
    lemons = found[0][2]
    said = lemons.evidence(int(np.flatnonzero(lemons.is_lemon())[0]))
    assert "incidents in 28 d" in said[0]


def test_a_new_node_is_no_lemon_and_a_new_gpu_is_no_pardon():
    stand = Stand()
    for _ in range(5):
        stand.job([3], "node_fail")
        stand.update(8 * 3600)
    stand.lemons.lemon[3] = True
    stand.lemons.forget("gpu", 3)
    assert stand.lemons.by_day["hard"][:, 3].sum() == 5
    assert stand.lemons.is_lemon()[3]
    stand.lemons.forget("node", 3)
    assert not stand.lemons.is_lemon()[3]
    assert all(not column[:, 3].any() for column in stand.lemons.by_day.values())
    assert stand.lemons.by_day["runs"].sum() == 0


def test_a_changed_site_keeps_the_signals_of_its_nodes():
    stand = Stand()
    stand.job([3], "failed")
    stand.job([0], "failed", "k")
    stand.update(3600)
    moved = Lemons(SITE)
    moved.adopt(stand.lemons, {"node": np.array([3, -1, 2, 1, 0, 5, 6, 7], np.int32)})
    assert moved.signals()[:, SIGNALS.index("single_node_failures")].tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    moved.update(stand.look.pass_s(10), stand.look, NOTHING)
    assert moved.since_ns.tolist() == [MIDNIGHT_NS, stand.look.now_ns, *[MIDNIGHT_NS] * 6]
