"""Classes of failures: by code, by evidence, and by the end of the failure; and cases that are no failure."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.failure_watch import SITE, Watch
from twin.catalogue import NS
from twin.contracts import DEGRADED, FAILED, action, is_failure
from twin.health import ReportedFault


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
    watch.look.heard["gpu", gpu] = (ReportedFault(at_ns, at_ns, code, 1, ""),) if code else ()
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
