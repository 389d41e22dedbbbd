"""Nodes that fail and come back: when a failure begins and ends, of what class, and what is none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import START_NS, Twin, eight_nodes, site_of, two_racks
from tests.looks import Look
from twin.events import EntityReplaced, FaultReported, JobEnded, JobStarted
from twin.frame import NS
from twin.health import failures as bounds
from twin.health.failure_words import CLASSES, is_failure
from twin.health.failures import Failures
from twin.health.fault_book import Heard
from twin.health.levels import DEGRADED, FAILED, action

SITE = site_of(two_racks())
SMALL = site_of(eight_nodes())


class Watch:
    """Failures, looked at every ten seconds."""

    def __init__(self, site=SITE) -> None:
        self.look, self.failures = Look(site), Failures(site)
        self.look.put("node.power_on_state", 1.0)
        self.look.put("node.service_level_state", 0.0)
        self.step()

    def step(self) -> None:
        self.failures.update(self.look, self.look, self.look)

    def run(self, seconds: float, every_s: float = 10.0) -> None:
        for _ in range(round(seconds / every_s)):
            self.look.pass_s(every_s)
            self.step()

    def rows(self) -> list[tuple[int, float, float | None, str]]:
        """(node, start s, end s, class) since the begin."""
        log = self.failures.log()
        return [
            (int(n), (a - START_NS) / NS, None if b == 0 else (b - START_NS) / NS, CLASSES[k])
            for n, a, b, k in zip(log.node.tolist(), log.start_ns.tolist(), log.end_ns.tolist(),
                                  log.kind.tolist(), strict=True)
        ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("code", "expected"), [(79, "off_bus"), (48, "memory"), (74, "link"), (119, "other"), (31, "software")]
)
def test_a_grave_code_begins_at_once_and_tells_the_class(code, expected):
    watch = Watch()
    watch.run(30)
    gpu = int(SITE.gpu_start_of_node[5]) + 1
    watch.look.level["gpu"][gpu] = FAILED
    watch.look.open["gpu"][0][gpu], watch.look.open["gpu"][1][gpu] = action("reset_gpu"), code
    watch.run(10)
    assert watch.rows() == [(5, 40.0, None, expected)]
    assert is_failure(watch.failures.log()).tolist() == [expected != "software"]


@pytest.mark.parametrize(("rule", "after_s"), [("gpu:gpu_off_bus", 310.0), ("leak", 70.0)])
def test_a_gpu_that_is_only_not_heard_has_minutes_to_come_back(rule, after_s):
    watch = Watch()
    gpu = int(SITE.gpu_start_of_node[5])
    watch.look.told["gpu_off_bus", "gpu", gpu, ""] = None
    watch.look.level["gpu"][gpu] = FAILED
    watch.look.fail(5)
    watch.look.rules["node", 5] = (SimpleNamespace(rule=rule, level=FAILED),)
    watch.run(after_s - 10)
    assert watch.rows() == []
    watch.run(10)
    assert watch.rows() == [(5, 10.0, None, "off_bus")]


@pytest.mark.parametrize(
    ("told", "rule", "expected"),
    [
        (("gpu_off_bus", "gpu"), "", "off_bus"),
        (("tray_blocked", "node"), "", "thermal"),
        (("leak", "rack"), "", "other"),  # not of the node
        (None, "gpu.row_remap_failed", "memory"),
        (None, "nvlink_errors", "link"),
        (None, "whatever", "other"),
    ],
)
def test_the_class_follows_from_the_evidence(told, rule, expected):
    watch = Watch()
    gpu = int(SITE.gpu_start_of_node[5])
    watch.look.fail(5)
    if told is not None:
        watch.look.told[told[0], told[1], gpu if told[1] == "gpu" else 5, ""] = None
    watch.look.rules["node", 5] = (SimpleNamespace(rule=rule, level=FAILED),)
    watch.run(70)
    assert watch.rows() == [(5, 10.0, None, expected)]


def test_a_node_that_is_off_failed_by_power_but_not_where_people_work():
    watch = Watch()
    watch.look.work["node"] = np.zeros(36, np.bool_)
    watch.look.work["node"][7] = True
    watch.look.put("node.power_on_state", 0.0, 6, 7)
    watch.run(300)
    assert watch.rows() == [(6, 10.0, None, "power")]
    watch.look.work = {}
    watch.run(70)  # they left it off
    assert watch.rows()[1] == (7, 310.0, None, "power")


def test_silence_that_the_diagnosis_tells_becomes_a_class_when_more_is_heard():
    watch = Watch()
    watch.look.told["node_silent", "node", 4, ""] = None
    watch.run(300)
    assert watch.rows() == []  # an agent may be gone for minutes
    watch.run(10)
    assert watch.rows() == [(4, 10.0, None, "silent")]
    gpu = int(SITE.gpu_start_of_node[4])
    watch.look.open["gpu"][0][gpu], watch.look.open["gpu"][1][gpu] = action("reboot_node"), 79
    watch.run(10)
    assert watch.rows() == [(4, 10.0, None, "off_bus")]


@pytest.mark.parametrize(
    ("silent_s", "kind"), [(900.0, "restarted"), (1780.0, "restarted"), (1900.0, "silent")]
)
def test_who_was_silent_and_is_soon_well_by_itself_has_restarted(silent_s: float, kind: str) -> None:
    watch = Watch()
    watch.run(10)
    watch.look.told["node_silent", "node", 4, ""] = None
    watch.look.fail(4)
    watch.run(silent_s)
    del watch.look.told["node_silent", "node", 4, ""]
    watch.look.well(4)
    watch.run(700)
    (only,) = watch.rows()
    assert only[3] == kind
    assert is_failure(watch.failures.log()).tolist() == [kind == "silent"]


@pytest.mark.parametrize(
    ("code", "minute", "kind"),
    [(0, 0, "restarted"), (79, 8, "off_bus"), (79, -20, "restarted"), (31, 8, "restarted")],
)
def test_a_gpu_that_was_merely_not_heard_and_is_soon_well_was_not_off_its_bus(
    code: int, minute: int, kind: str
) -> None:
    watch = Watch()
    watch.run(10)
    gpu = int(SITE.gpu_start_of_node[4])
    begin_ns = watch.look.now_ns
    watch.look.told["gpu_off_bus", "gpu", gpu, ""] = None
    watch.look.fail(4)
    watch.run(400)
    assert watch.rows()[0][3] == "off_bus"
    at_ns = begin_ns + minute * 60 * NS
    watch.look.heard["gpu", gpu] = (Heard(at_ns, at_ns, code, 1, ""),) if code else ()
    assert watch.failures.broken(watch.look)[4] == (kind == "off_bus")
    del watch.look.told["gpu_off_bus", "gpu", gpu, ""]
    watch.look.well(4)
    watch.run(700)
    (only,) = watch.rows()
    assert only[3] == kind


@pytest.mark.parametrize(
    ("level", "suspect_before_s", "expected"),
    [(1.0, None, None), (2.0, None, None), (3.0, None, "taken_out"), (4.0, None, "taken_out"),
     (3.0, 600.0, "taken_out"), (4.0, 600.0, "taken_out")],
)  # fmt: skip
def test_taken_out_is_no_failure_whatever_was_suspected(level, suspect_before_s, expected):
    watch = Watch()
    if suspect_before_s is not None:
        watch.look.fail(2, level=DEGRADED)
        watch.run(10)
        watch.look.well(2)
        watch.run(suspect_before_s, every_s=60.0)
    watch.look.put("node.service_level_state", level, 2)
    watch.run(70)
    assert [r[3] for r in watch.rows()] == ([] if expected is None else [expected])
    if expected is not None:
        assert is_failure(watch.failures.log()).tolist() == [expected != "taken_out"]
        watch.look.quiet.add("node.service_level_state")  # the scheduler falls silent: it is out still
        watch.run(900)
        assert watch.rows()[0][2] is None
        watch.look.quiet.clear()
        watch.look.put("node.service_level_state", 0.0, 2)
        watch.run(700)
        assert watch.rows()[0][2] is not None


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
    assert watch.failures.retired().tolist() == [False, True]
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
    assert (log.node.tolist(), [CLASSES[k] for k in log.kind]) == ([2], ["off_bus"])
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
    moved = watch.failures.remapped(six, same)
    assert moved.log().node.tolist() == [1]
    assert moved.down().tolist() == [False, True] + 6 * [False]
    look = Look(six)
    look.now_ns = watch.look.now_ns
    for _ in range(75):
        moved.update(look.pass_s(10), look, look)
    assert moved.log().end_ns.tolist() == [START_NS + 110 * NS]
