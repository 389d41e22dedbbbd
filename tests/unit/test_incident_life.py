"""One incident, one alarm: over a restart from a snapshot, a changed site, a device that fails again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, profile_tree, two_racks
from twin.contracts import ClearedRecord, FindingRecord
from twin.daemon.alarms import AlarmBook
from twin.site import SiteSpec
from twin.telemetry import EntityReplaced, Inbox, SiteChanged

STEP_S = 5
ALIVE = {"gpu.temp_c": 50.0, "gpu.health_state": 0.0, "node.power_w": 4000.0}


class Told:
    """A twin beside its book of alarms, and what the journal and the operator hear of health."""

    def __init__(self, twin: Twin, folder: Path) -> None:
        self.twin, self.book = twin, AlarmBook(folder)
        self.journal: list[tuple[str, str]] = []
        self.heard: list[tuple[str, str]] = []

    def run(self, seconds: int, values: Mapping[str, Any] | None, *events: Any) -> None:
        for _ in range(max(1, seconds // STEP_S)):
            heard = None if values is None else ALIVE | dict(values)
            decision = self.twin.tick(heard, *events, dt_s=STEP_S)
            events = ()
            self.journal += [
                (record.kind, record.id)
                for record in decision.records
                if isinstance(record, FindingRecord | ClearedRecord) and record.id.startswith("health/")
            ]
            for change in self.book.update(decision.findings, decision.now_ns):
                if change.alarm.id.startswith("health/"):
                    self.heard.append((change.what, change.alarm.id))

    def failed(self, gpu: str) -> dict[str, Any]:
        state = np.zeros(self.twin.site.sizes["gpu"])
        state[self.twin.site.entity("gpu", gpu)] = 1.0
        return {"gpu.row_remap_failed_state": state}


@pytest.fixture
def told(tmp_path: Path) -> Told:
    told = Told(Twin(two_racks()), tmp_path)
    told.run(25, told.failed("lab/h/r2/node3/gpu1"))
    assert told.heard == [("raised", "health/lab/h/r2/node3")]
    return told


def test_a_restart_and_a_takeover_from_a_snapshot_begin_no_alarm_again(told: Told, tmp_path: Path) -> None:
    told.book.save()
    back = Told(told.twin.restarted(two_racks(), []), tmp_path)
    back.run(25, back.failed("lab/h/r2/node3/gpu1"))
    assert (back.journal, back.heard) == ([], [])
    back.run(200, {"gpu.row_remap_failed_state": 0.0})
    assert back.heard == [("cleared", "health/lab/h/r2/node3")]


def test_a_node_that_moves_on_a_changed_site_keeps_its_alarm(told: Told) -> None:
    """Another rack before its own: all indices behind it move."""
    spec = SiteSpec(two_racks(racks="r[0-2]"), {"gb200-nvl72": profile_tree("gb200-nvl72")})
    told.journal.clear()
    before = told.twin.site.entity("node", "lab/h/r2/node3")
    told.run(1, None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    told.twin.site = told.twin.engine.site
    told.twin.inbox = Inbox(told.twin.site.sizes)
    assert told.twin.site.entity("node", "lab/h/r2/node3") != before
    told.run(25, told.failed("lab/h/r2/node3/gpu1"))
    assert told.journal == []
    assert told.heard == [("raised", "health/lab/h/r2/node3")]


@pytest.mark.long
def test_a_device_that_recovers_and_fails_again_within_minutes_is_one_incident(told: Told) -> None:
    for _ in range(3):
        told.run(300, {"gpu.row_remap_failed_state": 0.0})
        told.run(25, told.failed("lab/h/r2/node3/gpu1"))
    alarm = "health/lab/h/r2/node3"
    assert told.heard == [("raised", alarm), *[("cleared", alarm), ("again", alarm)] * 3]
    assert told.book.load.raised["critical"] == 1


def test_another_device_in_its_place_that_fails_is_another_matter(told: Told) -> None:
    """The alarm of the node goes on, and says what is known of the new device."""
    gpu = "lab/h/r2/node3/gpu1"
    told.run(1, {"gpu.row_remap_failed_state": 0.0}, EntityReplaced(table="gpu", name=gpu, serial="s2"))
    told.run(200, {"gpu.row_remap_failed_state": 0.0})
    assert told.heard[1:] == [("cleared", "health/lab/h/r2/node3")]


def test_what_eases_from_its_limit_to_its_guard_rings_no_second_time(tmp_path: Path) -> None:
    """The hottest GPU is the last to leave its limit, while many others are still beyond their guard."""
    twin, book, rang = Twin(two_racks()), AlarmBook(tmp_path), list[str]()
    limit = twin.site.limits["gpu.temp_c"]
    guard_c, limit_c = float(limit.guard[0]), float(limit.max[0])
    hot = np.full(twin.site.sizes["gpu"], guard_c - 20.0)
    for many_c, one_c in (
        (guard_c - 20.0, guard_c - 20.0),
        (limit_c + 2.0, limit_c + 5.0),
        (guard_c + 1.0, limit_c + 2.0),
        (guard_c + 1.0, 0.5 * (guard_c + limit_c)),
        (guard_c - 3.0, guard_c - 3.0),
    ):
        hot[:40], hot[100] = many_c, one_c
        for _ in range(10):
            decision = twin.tick(ALIVE | {"gpu.temp_c": hot})
            changes = book.update(decision.findings, decision.now_ns)
            rang += [c.alarm.id for c in changes if c.what == "raised" and c.alarm.id.startswith("beyond/")]
    assert rang == ["beyond/gpu.temp_c/limit"]
