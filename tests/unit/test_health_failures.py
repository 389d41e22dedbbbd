"""Nodes that fail and come back: when a failure begins and ends, of what class, and what is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import START_NS, Twin, eight_nodes, site_of, two_racks
from tests.support.failure_watch import SITE, SMALL, Watch
from tests.support.health_contexts import Look
from twin.catalogue import NS
from twin.contracts import FAILURE_CLASSES, is_failure
from twin.health import failures as bounds
from twin.health.failures import Failures
from twin.telemetry import EntityReplaced, FaultReported, JobEnded, JobStarted


def test_a_failure_begins_after_a_minute_and_ends_when_well_for_ten():
    watch = Watch()
    watch.run(30)
    watch.look.fail(3)
    watch.run(60)
    assert watch.rows() == []
    watch.run(10)
    assert watch.rows() == [(3, 40.0, None, "other")]
    assert watch.failures.down()[3]
    watch.look.well(3)
    watch.run(600)
    assert watch.rows() == [(3, 40.0, None, "other")]
    watch.run(10)
    assert watch.rows() == [(3, 40.0, 110.0, "other")]
    assert not watch.failures.down().any()


def test_what_lasts_a_moment_is_no_failure():
    watch = Watch()
    for _ in range(5):
        watch.look.fail(3)
        watch.run(50)
        watch.look.well(3)
        watch.run(20)
    assert watch.rows() == []


def test_a_relapse_before_ten_minutes_is_the_same_failure():
    watch = Watch()
    watch.look.fail(3)
    watch.run(100)
    watch.look.well(3)
    watch.run(500)
    watch.look.fail(3)
    watch.run(30)
    watch.look.well(3)
    watch.run(700)
    assert watch.rows() == [(3, 10.0, 640.0, "other")]


def test_what_is_not_known_is_not_well():
    watch = Watch()
    watch.look.fail(3)
    watch.run(100)
    watch.look.unknown(3)
    watch.run(2000)
    assert watch.rows() == [(3, 10.0, None, "other")]
    watch.look.level["gpu"][SITE.gpu_start_of_node[3]] = 0  # one of its GPUs speaks again, and is well
    watch.run(700)
    assert watch.rows()[0][2] == 2110.0


def test_taken_out_after_it_failed_is_a_failure():
    watch = Watch()
    watch.look.fail(2)
    watch.look.put("node.service_level_state", 3.0, 2)
    watch.run(70)
    watch.look.well(2)  # the GPU says nothing any more, and it is out still
    watch.run(900)
    assert [r[2:] for r in watch.rows()] == [(None, "other")]
    assert is_failure(watch.failures.log()).all()


@pytest.mark.parametrize(("bad_s", "rows"), [(120.0, 1), (590.0, 1), (700.0, 2)])
def test_what_is_still_told_of_an_exchanged_gpu_is_no_failure_of_the_new_one(bad_s, rows):
    watch = Watch()
    watch.look.fail(3)
    watch.run(100)
    watch.failures.forget("gpu", int(SITE.gpu_start_of_node[3]))
    watch.run(bad_s)  # the last word of the old one
    watch.look.well(3)
    watch.run(900)
    assert len(watch.rows()) == rows
    assert watch.rows()[0][2] == 100.0
    watch.look.fail(3)  # and much later it is a failure as any other
    watch.run(70)
    assert len(watch.rows()) == rows + 1


def test_what_was_broken_when_the_watch_began_started_before_it():
    watch = Watch(SMALL)
    watch.failures = Failures(SMALL)
    watch.look.fail(3)
    watch.look.unknown(4)
    watch.step()
    watch.run(100)
    watch.look.fail(4)  # heard late, and never well
    watch.run(100)
    watch.look.fail(5)
    watch.run(100)
    log = watch.failures.log()
    assert log.node.tolist() == [3, 4, 5]
    assert (log.start_ns < log.begin_ns).tolist() == [True, True, False]


def test_a_job_of_one_node_that_ends_by_its_node_tells_of_it_at_once():
    watch = Watch()
    for job, nodes in (("a", [8]), ("b", [9, 10, 11])):
        watch.look.jobs.start(JobStarted(job=job, nodes=()), nodes, 0, START_NS)
    watch.look.fail(10)
    watch.run(10)
    watch.look.pass_s(10)
    for job in ("a", "b"):
        watch.failures.take(JobEnded(job=job, reason="node_fail"), watch.look.jobs, watch.look.now_ns)
    watch.failures.take(JobEnded(job="nobody", reason="node_fail"), watch.look.jobs, watch.look.now_ns)
    watch.step()
    # of three nodes it was the one that is unwell, and need not last
    assert watch.rows() == [(10, 10.0, None, "other"), (8, 20.0, None, "other")]
    watch.look.well(10)
    watch.run(1300)
    assert [r[2] is not None for r in watch.rows()] == [True, True]


@pytest.mark.parametrize("reason", ["failed", "completed", "timeout", "cancelled", ""])
def test_other_ends_of_jobs_tell_nothing_of_the_node(reason):
    watch = Watch()
    watch.look.jobs.start(JobStarted(job="a", nodes=()), [8], 0, START_NS)
    watch.failures.take(JobEnded(job="a", reason=reason), watch.look.jobs, watch.look.now_ns)
    watch.run(100)
    assert watch.rows() == []


def test_a_new_gpu_is_a_repair_and_a_new_node_has_no_history():
    watch = Watch()
    watch.look.fail(3, 9)
    watch.run(100)
    watch.look.well(3, 9)
    watch.failures.forget("gpu", int(SITE.gpu_start_of_node[3]))
    assert watch.rows() == [(3, 10.0, 100.0, "other"), (9, 10.0, None, "other")]
    watch.failures.forget("node", 9)
    log = watch.failures.log()
    assert watch.rows()[1] == (9, 10.0, 100.0, "other")
    # the row stays for the fleet, and tells nothing of the node that is there now
    assert log.shared.tolist() == [False, True]
    watch.run(100)
    watch.look.fail(9)  # the new one is dead on arrival: that counts
    watch.run(100)
    assert watch.rows()[2] == (9, 210.0, None, "other")
    assert watch.failures.log().shared.tolist() == [False, True, False]


def test_the_log_is_bounded_and_says_since_when_it_is_whole(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_ROWS", 50)
    watch = Watch(SMALL)
    every = []
    for _ in range(12):
        watch.look.fail(*range(8))
        watch.run(150, 50)
        every += watch.rows()[-8:]
        watch.look.well(*range(8))
        watch.run(1400, 700)
        log = watch.failures.log()
        assert len(log.node) <= 50
        whole = [r for r in every if START_NS + round(r[1] * NS) >= log.begin_ns]
        known = [r for r in watch.rows() if START_NS + round(r[1] * NS) >= log.begin_ns]
        assert [r[:2] for r in known] == [r[:2] for r in whole]
    assert len(every) == 96


def test_a_row_that_was_dropped_while_open_ends_without_harm():
    watch = Watch(SMALL)
    watch.look.fail(0)
    watch.run(100)
    watch.failures._drop(1)
    watch.look.fail(1)
    watch.run(100)
    watch.look.well(0)
    watch.run(700)
    assert watch.rows() == [(1, 110.0, None, "other")]
    assert not watch.failures.down()[0]
    assert watch.failures.begin_ns == START_NS + 10 * NS + 1


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fail", "well", "unknown", "off", "on", "out", "in", "swap", "gpu"]),
                  st.integers(0, 7), st.sampled_from([1.0, 10.0, 59.0, 61.0, 300.0, 700.0, 90_000.0])),
        min_size=1, max_size=40,
    ),
    st.integers(0, 40),
)  # fmt: skip
def test_rows_never_overlap_and_a_restart_changes_nothing(steps, cut):
    watch = Watch(SMALL)
    other: Failures | None = None
    for k, (what, node, seconds) in enumerate(steps):
        if k == cut:
            other = Failures(SMALL)
            other.restore(watch.failures.dump())
        for failures in (watch.failures, other) if other else (watch.failures,):
            if what == "swap":
                failures.forget("node", node)
            elif what == "gpu":
                failures.forget("gpu", node)
        if what in ("fail", "well", "unknown"):
            getattr(watch.look, what)(node)
        elif what in ("off", "on"):
            watch.look.put("node.power_on_state", float(what == "on"), node)
        elif what in ("out", "in"):
            watch.look.put("node.service_level_state", 3.0 * (what == "out"), node)
        watch.look.pass_s(seconds)
        watch.step()
        if other is not None:
            other.update(watch.look, watch.look, watch.look)
    log = watch.failures.log()
    for node in range(8):
        mine = log.node == node
        start, end = log.start_ns[mine], log.end_ns[mine]
        closed = np.where(end == 0, watch.look.now_ns + 1, end)
        assert (closed > start).all()
        assert (start[1:] >= closed[:-1]).all()
        assert (end[:-1] > 0).all()
        assert watch.failures.down()[node] == bool(len(end) and end[-1] == 0)
    if other is not None:
        again = other.log()
        for name in ("node", "start_ns", "end_ns", "kind", "shared", "begin_ns"):
            assert np.array_equal(getattr(log, name), getattr(again, name)), name
        assert other.shocks() == watch.failures.shocks()


def test_in_the_engine_a_gpu_that_falls_off_the_bus_is_a_failure_until_it_is_replaced():
    twin = Twin(two_racks())
    values = {"gpu.power_w": 500.0, "gpu.temp_c": 50.0, "node.power_on_state": 1.0,
              "node.service_level_state": 0.0}  # fmt: skip
    for _ in range(20):
        twin.tick(values, dt_s=10.0)
    assert len(twin.engine.health.log().node) == 0
    name = twin.site.name("gpu", 9)
    twin.tick(values, FaultReported(table="gpu", name=name, code=79), dt_s=10.0)
    log = twin.engine.health.log()
    assert (log.node.tolist(), [FAILURE_CLASSES[k] for k in log.kind]) == ([2], ["off_bus"])
    again = twin.restarted(two_racks(), [])
    for one in (twin, again):
        for _ in range(5):
            one.tick(values, dt_s=10.0)
        one.tick(values, EntityReplaced(table="gpu", name=name, serial="new"), dt_s=10.0)
        for _ in range(5):
            one.tick(values, dt_s=10.0)
        log = one.engine.health.log()
        assert log.node.tolist() == [2]
        assert log.end_ns[0] > log.start_ns[0]
    assert twin.engine.checksum() == again.engine.checksum()


def test_a_changed_site_keeps_the_failures_of_its_nodes():
    watch = Watch(SMALL)
    watch.look.fail(1, 6)
    watch.run(100)
    six = site_of(eight_nodes())
    same = {t: np.arange(n, dtype=np.int32) for t, n in SMALL.sizes.items()}
    same["node"] = np.array([7, 6, 5, 4, 3, 2, -1, 0], np.int32)  # 1 left, its slot is new; 6 is 1 now
    moved = Failures(six)
    moved.adopt(watch.failures, same)
    assert moved.log().node.tolist() == [1]
    assert moved.down().tolist() == [False, True] + 6 * [False]
    look = Look(six)
    look.now_ns = watch.look.now_ns
    for _ in range(75):
        moved.update(look.pass_s(10), look, look)
    assert moved.log().end_ns.tolist() == [START_NS + 110 * NS]
