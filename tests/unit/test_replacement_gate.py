"""The gate: both courses foretold as closed forms and simulation find them, and what came put beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.replacement_costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    NOTICE_S,
    QUEUE_SPARE_S,
    SAVE_NOW,
    SPARE_PU,
    WATCH,
    Prices,
    stakes_of,
)
from policies.replacement_gate import (
    COLUMNS,
    Outcome,
    Terms,
    forward,
    opened,
    score,
    settle,
    terms_of,
    told,
    uses,
)
from policies.replacement_headroom import load_w
from tests.ailing import Ailing, ailing
from tests.builders import Twin, two_racks
from twin import events as ev
from twin.frame import NS
from twin.promises import checked_accounts

HOUR, DAY = 3600.0, 86_400.0


def terms(**given: Any) -> Terms:
    """One idle node that never fails and never leaves, unless told; what is given may be arrays."""
    plain = dict.fromkeys(Terms._fields, 0.0) | {
        "job_gpus": 64.0, "node_gpus": 8.0, "next_s": np.inf, "period_s": HOUR, "repair_s": 20 * HOUR,
        "test_s": 2 * HOUR, "idle_pu": 1.0, "act_in_s": np.inf,
    } | given  # fmt: skip
    columns = (np.atleast_1d(v).astype(float) for v in plain.values())
    return Terms(*(np.array(x) for x in np.broadcast_arrays(*columns)))


def hour_of(day_pu: float) -> float:
    """The chance within an hour at the same rate."""
    return float(-np.expm1(np.log1p(-day_pu) / 24.0))


# ---------------------------------------------------------------- closed forms
@pytest.mark.parametrize("day_pu", [0.0, 0.01, 0.3, 0.95])
def test_a_constant_hazard_without_a_job_is_a_closed_form(day_pu: float) -> None:
    """Out from T on for what is left of the day: 8 GPUs x integral of (24 h - t) r exp(-r t)."""
    for hour_pu in (hour_of(day_pu), np.nan):
        found = forward(terms(hour_pu=hour_pu, day_pu=day_pu, job_gpus=0.0, repair_s=1e9))
        rate = -np.log1p(-day_pu) / 24.0
        hours = 24.0 - (day_pu / rate if rate > 0 else 24.0)
        assert found.wait_pu[0] == pytest.approx(day_pu)
        assert found.wait_gpu_h[0] == pytest.approx(8.0 * hours, rel=2e-4, abs=1e-9)
        assert found.act_gpu_h[0] == pytest.approx(found.wait_gpu_h[0])
        assert found.act_pu[0] == pytest.approx(day_pu)


def test_a_job_that_loses_always_the_same_costs_its_chance() -> None:
    found = forward(terms(day_pu=0.4, hour_pu=hour_of(0.4), usual_s=1800.0, restart_s=600.0, notice_s=300.0,
                          queue_s=900.0, node_gpus=0.0))  # fmt: skip
    assert found.wait_gpu_h[0] == pytest.approx(0.4 * 64.0 * 1.0)


def test_leaving_at_once_costs_what_is_not_saved_and_the_node_its_repair_or_its_test() -> None:
    found = forward(terms(day_pu=0.4, act_in_s=0.0, pays_s=1800.0,
                          sure_pu=0.25))  # fmt: skip
    assert found.act_pu[0] == 0.0
    assert found.act_gpu_h[0] == pytest.approx(64.0 * 0.5 + 8.0 * (0.25 * 20.0 + 0.75 * 2.0))
    spared = forward(terms(day_pu=0.4, act_in_s=0.0, pays_s=1800.0,
                           sure_pu=0.25, idle_pu=0.25))  # fmt: skip
    assert spared.act_gpu_h[0] == pytest.approx(64.0 * 0.5 + 2.0 * (0.25 * 20.0 + 0.75 * 2.0))


def test_nothing_after_the_day_counts() -> None:
    for sure_pu in (0.0, 0.5, 1.0):
        found = forward(terms(act_in_s=10 * HOUR, sure_pu=sure_pu, repair_s=1e9, test_s=20 * HOUR))
        assert found.act_gpu_h[0] == pytest.approx(8.0 * 14.0)


def test_the_first_hour_has_a_hazard_of_its_own() -> None:
    found = forward(terms(hour_pu=0.5, day_pu=0.6, act_in_s=HOUR))
    assert found.act_pu[0] == pytest.approx(0.5)
    assert found.wait_pu[0] == pytest.approx(0.6)
    # An hour's chance greater than the day's is believed
    assert forward(terms(hour_pu=0.5, day_pu=0.2)).wait_pu[0] == pytest.approx(0.5)


def test_leaving_after_the_day_is_staying() -> None:
    for act_in_s in (DAY, 2 * DAY, np.inf):
        found = forward(terms(day_pu=0.3, lost_s=500.0, next_s=100.0, durable_s=50.0, act_in_s=act_in_s,
                              pays_s=900.0, act_use_pu=2.0, wait_use_pu=0.5))  # fmt: skip
        assert found.act_gpu_h == pytest.approx(found.wait_gpu_h)
        assert found.act_pu == pytest.approx(found.wait_pu)
        assert found.act_use_pu[0] == 0.5


def test_the_spare_may_fail_too() -> None:
    given = {"act_in_s": 0.0, "pays_s": 60.0, "usual_s": HOUR, "restart_s": HOUR, "node_gpus": 0.0}
    sure, risky = forward(terms(**given)), forward(terms(**given, spare_day_pu=0.1))
    assert risky.act_pu[0] == pytest.approx(0.1)
    assert risky.act_gpu_h[0] - sure.act_gpu_h[0] == pytest.approx(0.1 * 64.0 * 2.0)


def test_what_nobody_knows_is_not_foretold() -> None:
    found = forward(terms(day_pu=[np.nan, 0.1], hour_pu=[np.nan, np.nan]))
    assert np.isnan([found.wait_pu[0], found.wait_gpu_h[0]]).all()
    assert np.isfinite([found.wait_pu[1], found.wait_gpu_h[1]]).all()


def test_many_nodes_are_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    drawn = {name: rng.uniform(0.0, 1.0, 50) for name in Terms._fields}
    for name in Terms._fields:
        if name.endswith("_s"):
            drawn[name] *= 2 * HOUR
    together = forward(terms(**drawn))
    for i in range(0, 50, 7):
        alone = forward(terms(**{k: v[i] for k, v in drawn.items()}))
        for name in Outcome._fields:
            assert getattr(alone, name)[0] == pytest.approx(getattr(together, name)[i]), name


# ---------------------------------------------------------------- a rival: lives drawn one by one
def lost_at(x: dict[str, float], at_s: np.ndarray) -> np.ndarray:
    """Work that the last durable save before does not hold, save by save."""
    if not np.isfinite(x["next_s"]):
        return np.full(len(at_s), x["usual_s"])
    begins = x["next_s"] + x["period_s"] * np.arange(-1, int(2 * DAY / x["period_s"]))
    begins[0] = -x["lost_s"]
    durable = begins + x["durable_s"]
    durable[0] = -np.inf
    last = np.searchsorted(durable, at_s, side="right") - 1
    return at_s - begins[last]


def drawn_lives(x: dict[str, float], n: int, seed: int) -> tuple[np.ndarray, ...]:
    """(interrupted, GPU-hours) of n days in which the node leaves, and of n others in which it stays."""
    rng = np.random.default_rng(seed)
    hour, day = -np.log1p(-x["hour_pu"]), -np.log1p(-x["day_pu"])
    out = []
    for leaves in (x["act_in_s"], np.inf):
        mark = rng.exponential(size=n)
        fails = np.where(mark < hour, mark / max(hour, 1e-12) * HOUR,
                         HOUR + (mark - hour) / max(day - hour, 1e-12) * (DAY - HOUR))  # fmt: skip
        broken = fails < min(leaves, DAY)
        at = np.where(broken, fails, 0.0)
        stop = x["restart_s"] + x["queue_s"]
        fixing = np.minimum(x["repair_s"], DAY - at)
        cost = x["job_gpus"] * (lost_at(x, at) + x["notice_s"] + stop)
        cost = np.where(broken, cost + x["node_gpus"] * x["idle_pu"] * fixing, 0.0)
        interrupted = broken.copy()
        if leaves < DAY:
            bad = rng.random(n) < x["sure_pu"]
            away = np.minimum(np.where(bad, x["repair_s"], x["test_s"]), DAY - leaves)
            spare = rng.exponential(size=n) < -np.log1p(-x["spare_day_pu"]) * (DAY - leaves) / DAY
            planned = x["job_gpus"] * x["pays_s"] + x["node_gpus"] * x["idle_pu"] * away
            planned = planned + np.where(spare, x["job_gpus"] * (x["usual_s"] + x["notice_s"] + stop), 0.0)
            cost = cost + np.where(broken, 0.0, planned)
            interrupted |= ~broken & spare
        out += [interrupted, cost / HOUR]
    return tuple(out)


@settings(max_examples=25, deadline=None)
@given(
    chances=st.tuples(st.floats(0.0, 0.9), st.floats(0.0, 0.9)),
    times=st.tuples(*[st.floats(0.0, 2.0)] * 8),
    leaves=st.sampled_from([0.0, 1.0, 2.0, 3.0, 30.0]),
    flags=st.tuples(st.floats(0, 1), st.booleans(), st.booleans(), st.floats(0, 0.3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_courses_are_what_drawn_lives_give(
    chances: tuple[float, float], times: tuple[float, ...], leaves: float, flags: Any, seed: int
) -> None:
    x = {"hour_pu": min(chances), "day_pu": max(chances), "sure_pu": flags[0], "job_gpus": 512.0,
         "node_gpus": 8.0, "lost_s": times[0] * HOUR, "next_s": times[1] * HOUR,
         "usual_s": times[2] * HOUR,
         "period_s": (0.3 + times[3]) * HOUR, "durable_s": 0.1 * times[4] * HOUR,
         "restart_s": 0.3 * times[5] * HOUR, "queue_s": 0.3 * times[6] * HOUR, "notice_s": 600.0,
         "test_s": 4 * HOUR, "repair_s": 20.0 * times[7] * HOUR, "idle_pu": 0.25 if flags[1] else 1.0,
         "act_in_s": 0.7 * leaves * HOUR, "pays_s": 900.0 * float(flags[2]),
         "spare_day_pu": flags[3], "wait_use_pu": 0.0, "act_use_pu": 0.0}  # fmt: skip
    if leaves == 2.0:  # just as a planned save becomes durable
        x["act_in_s"] = x["next_s"] + x["durable_s"]
    n = 40_000
    found = forward(terms(**x))
    act_pu, act_h, wait_pu, wait_h = drawn_lives(x, n, seed)
    for mine, drawn in ((found.act_pu, act_pu), (found.wait_pu, wait_pu)):
        assert mine[0] == pytest.approx(drawn.mean(), abs=5.0 * np.sqrt(0.25 / n))
    for mine, drawn in ((found.act_gpu_h, act_h), (found.wait_gpu_h, wait_h)):
        error = drawn.std() / np.sqrt(n)
        assert mine[0] == pytest.approx(drawn.mean(), abs=5.0 * error + 2e-3 * drawn.mean() + 1e-6)


# ---------------------------------------------------------------- the terms
class Pod(Twin):
    """Two racks of 18 nodes of 4 GPUs; a training job on eight of them that says what its saves cost."""

    def __init__(self) -> None:
        super().__init__(two_racks())
        self.ill: Ailing = ailing(self.engine)
        self.memory = {name: np.zeros(36, kind) for name, kind in COLUMNS.items()}
        self.start("a", [f"r1/node{i}" for i in range(8)])
        self.tick(None, ev.CheckpointTold(job="a", at_ns=self.now_ns + NS, interval_s=3600.0, save_s=60.0,
                                          began_ns=self.now_ns + NS - 600 * NS))  # fmt: skip

    def start(self, job: str, nodes: list[str]) -> None:
        self.tick(None, ev.JobStarted(
            id=f"{job}{self.number}", job=job, nodes=tuple(nodes), kind="training", coupling="synchronous",
            checkpoint_interval_s=3600.0, checkpoint_save_s=60.0, checkpoint_restart_s=300.0))  # fmt: skip

    def view(self) -> Any:
        return self.engine._view(1.0)

    def look(self, seconds: float = 0.0, values: Any = None, *events: Any) -> list[dict[str, Any]]:
        """Some time later; what the gate tells of it."""
        if seconds:
            self.tick(values, *events, dt_s=seconds)
        before = self.memory
        self.memory = settle(self.view(), before)
        return checked_accounts(told(self.view(), before, self.memory))

    def open(self, nodes: list[int], course: int, day_pu: float = 0.6) -> list[dict[str, Any]]:
        before, view, at = self.memory, self.view(), np.array(nodes, np.int32)
        k = len(nodes)
        stakes = stakes_of(view, at, np.zeros(k, np.bool_))
        found = forward(terms_of(np.full(k, hour_of(day_pu)), np.full(k, day_pu), np.full(k, 0.8),
                                 np.full(k, course, np.int8), stakes))  # fmt: skip
        self.memory = opened(view, before, at, np.full(k, course, np.int8), found, stakes, np.full(k, 0.8))
        return checked_accounts(told(view, before, self.memory))


def test_the_terms_of_each_course() -> None:
    pod = Pod()
    nodes = np.array([0, 1, 2, 3, 4, 20], np.int32)
    at = stakes_of(pod.view(), nodes, np.array([0, 0, 0, 1, 1, 0], np.bool_))
    course = np.array([WATCH, CORDON, AT_NEXT, SAVE_NOW, AT_ONCE, CORDON], np.int8)
    some = np.full(6, 0.1)
    found = terms_of(some, some, some, course, at, Prices(test_s=7.0, queue_s=11.0), 99.0)
    assert found.act_in_s[0] == np.inf
    assert found.act_in_s[1] == at.left_s[1]
    assert found.act_in_s[2] == pytest.approx(at.next_s[2] + at.durable_s[2])
    assert found.act_in_s[3:].tolist() == [at.durable_s[3], 0.0, 0.0]
    stop_s = 300.0 + np.array([11.0, QUEUE_SPARE_S, QUEUE_SPARE_S])
    unsaved_s = np.array([at.durable_s[2] - at.block_s[2], at.durable_s[3], at.lost_s[4]])
    assert found.pays_s == pytest.approx([0.0, 0.0, *(unsaved_s + stop_s), 0.0])
    assert found.queue_s.tolist() == [11.0] * 3 + [QUEUE_SPARE_S] * 2 + [11.0]
    assert found.idle_pu.tolist() == [1.0] * 3 + [SPARE_PU] * 2 + [1.0]
    assert found.period_s[0] == pytest.approx(3660.0)
    assert (found.notice_s == NOTICE_S).all()
    # Ten minutes after a save, a save now spares most of what to leave at once loses
    outcome = forward(found)
    assert outcome.act_gpu_h[3] < outcome.act_gpu_h[4]


def test_the_use_of_limits_is_that_of_both_places() -> None:
    pod = Pod()
    busy = np.arange(36) < 8
    watts = {
        "node.power_w": np.where(busy, 4000.0, 1000.0),
        "node.power_w_max": np.where(busy, 5000.0, 1500.0),
    }
    pod.tick({"rack.power_w": [60_000.0, 30_000.0], **watts})
    now, then = uses(pod.view(), np.array([0, 1, 2], np.int32), np.array([-1, 20, 10], np.int32))
    most_w = min(pod.site.design.rack_max_w[0], pod.site.limits["rack.power_w"].guard[0])
    total = 90_000.0 / 300_000.0
    assert now == pytest.approx(np.full(3, max(60_000.0 / most_w, total)))
    assert then[0] == now[0]
    # What is worst after is the CDU of both racks, which carries what it did: 4 kW come, and 4 kW go
    idle_w = load_w(pod.view())[1][1]
    assert idle_w == pytest.approx(1000.0)
    assert then[1] == pytest.approx(90_000.0 / (2.0 * pod.site.design.rack_max_w[0]))
    assert then[2] == pytest.approx((64_000.0 - (5000.0 - idle_w)) / most_w)


# ---------------------------------------------------------------- what came
def test_an_account_of_what_is_foretold_before_a_disruptive_step() -> None:
    pod = Pod()
    (account,) = pod.open([3], SAVE_NOW)
    assert account["what"] == "gate"
    assert account["node"] == "lab/h/r1/node3"
    assert account["course"] == "save_now"
    assert account["at_ns"] == pod.now_ns
    assert 0.0 < account["act_pu"] < account["wait_pu"] == pytest.approx(0.6)
    assert account["act_gpu_h"] > 0.0
    assert pod.look(60.0) == []


def test_a_failure_under_the_job_costs_its_work_and_its_restart() -> None:
    pod = Pod()
    pod.open([3], WATCH)
    pod.look(1200.0)
    lost_s = (pod.now_ns - pod.engine.jobs.saved_ns[0]) / NS
    pod.ill.failed(3, pod.now_ns, kind="memory")
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.look(600.0)
    assert pod.memory["gate_failed"][3] == 1
    lost_h = 32 * (lost_s + 300.0) / HOUR
    down_h = 4 * (5.0 + 600.0) / HOUR
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(lost_h + down_h, rel=0.01)
    pod.look(600.0)  # counted once; the node is still down
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(lost_h + down_h + 4 * 600.0 / HOUR, rel=0.01)
    (account,) = pod.look(DAY)
    assert account["what"] == "outcome"
    assert account["failed"] is True
    assert account["wait_pu"] == pytest.approx(0.6)
    assert account["lost_gpu_h"] == pytest.approx(lost_h + 4 * (24.0 - 1200.0 / HOUR), rel=0.02)
    assert account["score_brier"] == pytest.approx(0.4**2)
    assert pod.look(DAY) == []


@pytest.mark.parametrize(("kind", "shared"), [("taken_out", False), ("software", False), ("power", True)])
def test_what_is_no_failure_of_the_node_by_itself_is_not_scored_as_one(kind: str, shared: bool) -> None:
    """Who drained it, what its job did, and what struck its neighbours too, nobody foretold of it."""
    pod = Pod()
    pod.open([3], WATCH)
    pod.look(1200.0)
    pod.ill.failed(3, pod.now_ns, kind=kind, shared=shared)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    (account,) = pod.look(DAY)
    assert account["what"] == "outcome"
    assert account["failed"] is False
    assert account["score_brier"] == pytest.approx(0.6**2)


def test_a_failure_that_is_known_only_later_counts_all_the_same() -> None:
    pod = Pod()
    pod.open([3], WATCH)
    pod.look(1200.0)
    began_ns = pod.now_ns
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    assert pod.memory["gate_came_gpu_h"][3] == 0.0
    pod.look(300.0)
    pod.ill.failed(3, began_ns, kind="memory")
    pod.look(10.0)
    assert pod.memory["gate_failed"][3] == 1
    assert pod.memory["gate_came_gpu_h"][3] > 32 * 1800.0 / HOUR


def test_a_job_that_ends_by_itself_loses_nothing() -> None:
    pod = Pod()
    pod.open([3], CORDON)
    pod.look(1200.0)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.look(DAY)
    assert pod.memory["gate_came_gpu_h"][3] == 0.0
    found = score(pod.memory)
    assert (found.settled, found.failed, found.came_gpu_h) == (1, 0, 0.0)
    # So does one that ends before it is drained
    pod = Pod()
    pod.open([3], AT_NEXT)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    assert pod.memory["gate_came_gpu_h"][3] == 0.0
    # A failure long after the job was gone interrupted nobody
    pod = Pod()
    pod.open([3], CORDON)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.ill.failed(3, pod.now_ns + 7200 * NS, kind="memory")
    pod.look(8000.0)
    assert pod.memory["gate_failed"][3] == 0


def test_a_drain_costs_what_was_not_saved_and_the_node_its_time_out() -> None:
    pod = Pod()
    pod.open([3], AT_ONCE)
    level = np.zeros(36)
    pod.look(10.0)
    lost_s = (pod.now_ns - pod.engine.jobs.saved_ns[0]) / NS
    level[3] = 3.0
    pod.look(5.0, {"node.service_level_state": level}, ev.JobEnded(id="e", job="a"))
    pod.look(3600.0, {"node.service_level_state": level})
    lost_h = 32 * (lost_s + 300.0) / HOUR
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(lost_h + 4 * 3605.0 / HOUR, rel=0.01)
    assert pod.memory["gate_failed"][3] == 0
    level[3] = 0.0
    pod.look(60.0, {"node.service_level_state": level})
    pod.look(DAY, {"node.service_level_state": level})
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(lost_h + 4 * 3605.0 / HOUR, rel=0.01)


def test_a_job_that_is_requeued_in_its_place_was_stopped() -> None:
    pod = Pod()
    pod.open([3], AT_ONCE)
    pod.look(10.0)
    level = np.zeros(36)
    level[3] = 3.0
    pod.tick({"node.service_level_state": level}, dt_s=5.0)
    pod.start("a", [f"r1/node{i}" for i in range(8)])  # the scheduler tells of its start once more
    pod.look()
    assert pod.memory["gate_came_gpu_h"][3] > 32 * 600.0 / HOUR


def test_a_cordoned_node_that_works_on_is_not_idle() -> None:
    pod = Pod()
    pod.open([3], CORDON)
    level = np.zeros(36)
    level[3] = 1.0
    pod.look(3600.0, {"node.service_level_state": level})
    assert pod.memory["gate_came_gpu_h"][3] == 0.0
    pod.look(5.0, {"node.service_level_state": level}, ev.JobEnded(id="e", job="a"))
    pod.look(3600.0, {"node.service_level_state": level})
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("course", "failed"), [(WATCH, 1), (CORDON, 0)])
def test_an_idle_node_that_fails_was_foretold_only_if_it_stayed(course: int, failed: int) -> None:
    pod = Pod()
    pod.open([20], course)
    pod.ill.failed(20, pod.now_ns + 5 * NS)
    pod.look(60.0)
    assert pod.memory["gate_failed"][20] == failed


def test_what_fails_after_it_was_drained_interrupts_nobody() -> None:
    pod = Pod()
    pod.open([3], AT_ONCE)
    level = np.zeros(36)
    level[3] = 3.0
    pod.look(5.0, {"node.service_level_state": level}, ev.JobEnded(id="e", job="a"))
    before = pod.memory["gate_came_gpu_h"][3]
    assert before > 32 * 300.0 / HOUR
    pod.ill.failed(3, pod.now_ns)
    pod.look(60.0, {"node.service_level_state": level})
    assert pod.memory["gate_failed"][3] == 0
    assert pod.memory["gate_came_gpu_h"][3] == pytest.approx(before + 4 * 60.0 / HOUR)


def test_tests_and_repairs_tell_whether_a_node_that_left_was_bad() -> None:
    pod = Pod()
    pod.open([1, 2, 3, 4], AT_ONCE)
    pod.tick(None, dt_s=3600.0)
    now = pod.now_ns
    pod.tick(None,
             ev.NodeTested(id="t1", name="r1/node1", began_ns=now - 60 * NS, ended_ns=now, passed=True),
             ev.NodeTested(id="t2", name="r1/node2", began_ns=now - 60 * NS, ended_ns=now, passed=False),
             ev.NodeRepaired(id="t3", name="r1/node3", author="me"))  # fmt: skip
    pod.look(DAY)
    found = score(pod.memory)
    assert (found.settled, found.tests, found.bad) == (4, 3, 2)
    assert found.sure_brier == pytest.approx((0.64 + 0.04 + 0.04) / 3)


def test_a_prediction_that_another_replaces_is_counted_as_lost() -> None:
    pod = Pod()
    pod.open([3], CORDON)
    pod.look(600.0)
    pod.open([3], AT_ONCE)
    pod.look(DAY + 10.0)
    assert score(pod.memory)[0] == 1
    assert score(pod.memory).lost == 1


def test_what_was_unknown_is_not_scored() -> None:
    pod = Pod()
    (account,) = pod.open([3], AT_ONCE, day_pu=float("nan"))
    assert account["wait_pu"] is None
    pod.look(DAY + 10.0)
    assert score(pod.memory).settled == 0
    assert not (pod.memory["gate_ns"] > 0).any()


def test_the_score_of_a_fair_gate_is_that_of_its_chances() -> None:
    """Of 36 nodes that are said to fail with 0.25, nine do: Brier 3/16, and as many as were said."""
    pod = Pod()
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.start("b", [f"r{1 + i // 18}/node{i % 18}" for i in range(36)])
    pod.open(list(range(36)), WATCH, day_pu=0.25)
    pod.look(60.0)
    for node in range(0, 36, 4):
        pod.ill.failed(node, pod.now_ns)
    pod.look(5.0, None, ev.JobEnded(id="e2", job="b"))
    pod.look(DAY)
    found = score(pod.memory)
    assert (found.settled, found.failed) == (36, 9)
    assert found.said_pu == pytest.approx(9.0, rel=1e-6)
    assert found.brier == pytest.approx(0.1875, rel=1e-6)
