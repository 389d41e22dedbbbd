"""The gate's terms from what is known of a node, and what came put beside what was foretold."""

from __future__ import annotations

import numpy as np
import pytest

from policies.node_replacement import score
from policies.node_replacement.cost_benefit import expected_outcome, terms_of_option
from policies.node_replacement.costs import (
    AT_NEXT,
    AT_ONCE,
    CORDON,
    NOTICE_S,
    QUEUE_SPARE_S,
    SAVE_NOW,
    SPARE_PU,
    WATCH,
    Chances,
    Delays,
    stakes_of,
)
from policies.node_replacement.headroom import load_w
from policies.node_replacement.predictions import limit_use
from tests.support.replacement_gate import DAY, HOUR, Pod
from twin.catalogue import NS
from twin.telemetry import events as ev


def test_the_terms_of_each_course() -> None:
    pod = Pod()
    nodes = np.array([0, 1, 2, 3, 4, 20], np.int32)
    at = stakes_of(pod.view(), nodes, np.array([0, 0, 0, 1, 1, 0], np.bool_))
    course = np.array([WATCH, CORDON, AT_NEXT, SAVE_NOW, AT_ONCE, CORDON], np.int8)
    some = np.full(6, 0.1)
    found = terms_of_option(Chances(some, some, some), course, at, Delays(test_s=7.0, queue_s=11.0), 99.0)
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
    outcome = expected_outcome(found)
    assert outcome.act_gpu_h[3] < outcome.act_gpu_h[4]


def test_the_use_of_limits_is_that_of_both_places() -> None:
    pod = Pod()
    busy = np.arange(36) < 8
    watts = {
        "node.power_w": np.where(busy, 4000.0, 1000.0),
        "node.power_w_max": np.where(busy, 5000.0, 1500.0),
    }
    pod.tick({"rack.power_w": [60_000.0, 30_000.0], **watts})
    now, then = limit_use(pod.view(), np.array([0, 1, 2], np.int32), np.array([-1, 20, 10], np.int32))
    most_w = min(pod.site.design.rack_max_w[0], pod.site.limits["rack.power_w"].guard[0])
    total = 90_000.0 / 300_000.0
    assert now == pytest.approx(np.full(3, max(60_000.0 / most_w, total)))
    assert then[0] == now[0]
    # The fullest place afterwards is the CDU of both racks, which carries what it did: 4 kW come, and 4 kW go
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
    assert pod.memory["prediction_failed"][3] == 1
    lost_h = 32 * (lost_s + 300.0) / HOUR
    down_h = 4 * (5.0 + 600.0) / HOUR
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(lost_h + down_h, rel=0.01)
    pod.look(600.0)  # counted once; the node is still down
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(
        lost_h + down_h + 4 * 600.0 / HOUR, rel=0.01
    )
    (account,) = pod.look(DAY)
    assert account["what"] == "outcome"
    assert account["failed"] is True
    assert account["wait_pu"] == pytest.approx(0.6)
    assert account["lost_gpu_h"] == pytest.approx(lost_h + 4 * (24.0 - 1200.0 / HOUR), rel=0.02)
    assert account["score_brier"] == pytest.approx(0.4**2)
    assert pod.look(DAY) == []


@pytest.mark.parametrize(("kind", "shared"), [("taken_out", False), ("software", False), ("power", True)])
def test_what_is_no_failure_of_the_node_by_itself_is_not_scored_as_one(kind: str, shared: bool) -> None:
    """No forecast covered a drain by people, an error of the job, or a strike on neighbours too."""
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
    assert pod.memory["prediction_actual_gpu_h"][3] == 0.0
    pod.look(300.0)
    pod.ill.failed(3, began_ns, kind="memory")
    pod.look(10.0)
    assert pod.memory["prediction_failed"][3] == 1
    assert pod.memory["prediction_actual_gpu_h"][3] > 32 * 1800.0 / HOUR


def test_a_job_that_ends_by_itself_loses_nothing() -> None:
    pod = Pod()
    pod.open([3], CORDON)
    pod.look(1200.0)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.look(DAY)
    assert pod.memory["prediction_actual_gpu_h"][3] == 0.0
    found = score(pod.memory)
    assert (found.settled, found.failed, found.came_gpu_h) == (1, 0, 0.0)
    # So does one that ends before it is drained
    pod = Pod()
    pod.open([3], AT_NEXT)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    assert pod.memory["prediction_actual_gpu_h"][3] == 0.0
    # A failure long after the job was gone interrupted nobody
    pod = Pod()
    pod.open([3], CORDON)
    pod.look(5.0, None, ev.JobEnded(id="e", job="a"))
    pod.ill.failed(3, pod.now_ns + 7200 * NS, kind="memory")
    pod.look(8000.0)
    assert pod.memory["prediction_failed"][3] == 0


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
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(lost_h + 4 * 3605.0 / HOUR, rel=0.01)
    assert pod.memory["prediction_failed"][3] == 0
    level[3] = 0.0
    pod.look(60.0, {"node.service_level_state": level})
    pod.look(DAY, {"node.service_level_state": level})
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(lost_h + 4 * 3605.0 / HOUR, rel=0.01)


def test_a_job_that_is_requeued_in_its_place_was_stopped() -> None:
    pod = Pod()
    pod.open([3], AT_ONCE)
    pod.look(10.0)
    level = np.zeros(36)
    level[3] = 3.0
    pod.tick({"node.service_level_state": level}, dt_s=5.0)
    pod.start("a", [f"r1/node{i}" for i in range(8)])  # the scheduler tells of its start once more
    pod.look()
    assert pod.memory["prediction_actual_gpu_h"][3] > 32 * 600.0 / HOUR


def test_a_cordoned_node_that_works_on_is_not_idle() -> None:
    pod = Pod()
    pod.open([3], CORDON)
    level = np.zeros(36)
    level[3] = 1.0
    pod.look(3600.0, {"node.service_level_state": level})
    assert pod.memory["prediction_actual_gpu_h"][3] == 0.0
    pod.look(5.0, {"node.service_level_state": level}, ev.JobEnded(id="e", job="a"))
    pod.look(3600.0, {"node.service_level_state": level})
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("course", "failed"), [(WATCH, 1), (CORDON, 0)])
def test_an_idle_node_that_fails_was_foretold_only_if_it_stayed(course: int, failed: int) -> None:
    pod = Pod()
    pod.open([20], course)
    pod.ill.failed(20, pod.now_ns + 5 * NS)
    pod.look(60.0)
    assert pod.memory["prediction_failed"][20] == failed


def test_what_fails_after_it_was_drained_interrupts_nobody() -> None:
    pod = Pod()
    pod.open([3], AT_ONCE)
    level = np.zeros(36)
    level[3] = 3.0
    pod.look(5.0, {"node.service_level_state": level}, ev.JobEnded(id="e", job="a"))
    before = pod.memory["prediction_actual_gpu_h"][3]
    assert before > 32 * 300.0 / HOUR
    pod.ill.failed(3, pod.now_ns)
    pod.look(60.0, {"node.service_level_state": level})
    assert pod.memory["prediction_failed"][3] == 0
    assert pod.memory["prediction_actual_gpu_h"][3] == pytest.approx(before + 4 * 60.0 / HOUR)


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
    assert score(pod.memory).settled == 1
    assert score(pod.memory).lost == 1


def test_what_was_unknown_is_not_scored() -> None:
    pod = Pod()
    (account,) = pod.open([3], AT_ONCE, day_pu=float("nan"))
    assert account["wait_pu"] is None
    pod.look(DAY + 10.0)
    assert score(pod.memory).settled == 0
    assert not (pod.memory["prediction_ns"] > 0).any()


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
