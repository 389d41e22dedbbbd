"""Nodes that sleep: silent on purpose, and judged again when they should be back. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, Wish, two_racks
from twin.catalogue import TABLES
from twin.contracts import ASLEEP, READY, WAKE_S, WAKING
from twin.engine import encode
from twin.telemetry import events as ev

NODES, GPUS, CAP, STANDBY = 36, 144, "gpu.power_cap_w", "node.standby"
RNG = np.random.default_rng(4)


def speaking(standby: Any = None, quiet: Any = ()) -> dict[str, Any]:
    """Readings of a second; these nodes say nothing, and their boards that they are off."""
    mute = np.isin(np.arange(NODES), list(quiet))
    gpu = np.where(mute[np.arange(GPUS) // 4], np.nan, 0.0)
    out = {"gpu.temp_c": 60.0 + RNG.normal(0, 0.3, GPUS) + gpu,
           "gpu.power_w": 900.0 + RNG.normal(0, 3, GPUS) + gpu,
           "gpu.power_limit_w": 1200.0 + gpu,
           "node.power_w": 4500.0 + RNG.normal(0, 3, NODES) + np.where(mute, np.nan, 0.0),
           "node.power_on_state": np.where(mute, 0.0, 1.0)}  # fmt: skip
    return out if standby is None else out | {"node.standby_state": standby}


def levels(level: int, *nodes: int) -> np.ndarray:
    out = np.zeros(NODES)
    out[list(nodes)] = level
    return out


def watched(*policies: Any) -> Twin:
    pod = Twin(two_racks(), policies, act=bool(policies))
    for _ in range(40):
        pod.tick(speaking(levels(READY)))
    return pod


def told(pod: Twin) -> set[tuple[str, int]]:
    return {(f.kind, f.entity) for f in pod.engine.diagnosis.faults if f.table == "node"}


@pytest.mark.long
@pytest.mark.parametrize("level", [ASLEEP, None])
def test_who_sleeps_is_no_alarm_no_fault_and_no_failure_and_who_is_merely_off_is(level: int | None) -> None:
    pod, off = watched(), (2, 3, 20)
    standby = levels(READY if level is None else level, *off)
    for _ in range(240):
        pod.tick(speaking(standby, quiet=off), dt_s=2.0)
    failed = set(pod.engine.health.log().node.tolist())
    alarms = [f.id for f in pod.decision.findings if f.severity != "info"]
    if level is None:
        assert told(pod) == {("node_down", node) for node in off}
        assert failed == set(off)
        assert alarms
    else:
        assert (told(pod), failed, alarms) == (set(), set(), [])


@pytest.mark.long
def test_who_is_woken_and_does_not_come_back_is_told_and_counts_as_failed() -> None:
    pod = watched()
    for _ in range(60):
        pod.tick(speaking(levels(ASLEEP, 2, 3), quiet=(2, 3)))
    waking = levels(WAKING, 2, 3)
    for _ in range(round(WAKE_S / 10.0) - 1):
        pod.tick(speaking(waking, quiet=(2, 3)), dt_s=10.0)
        assert not told(pod)
    for _ in range(30):  # one comes back late, the other never
        pod.tick(speaking(waking, quiet=(2,)), dt_s=10.0)
    assert told(pod) == {("node_down", 2)}
    assert pod.engine.health.log().node.tolist() == [2]
    for _ in range(30):
        pod.tick(speaking(levels(READY)), dt_s=10.0)
    assert told(pod) == set()


def test_a_wet_tray_is_told_though_its_node_sleeps() -> None:
    pod = watched()
    for _ in range(60):
        wet = {"node.leak_state": levels(1, 3), "rack.leak_state": [1.0, 0.0]}
        pod.tick(speaking(levels(ASLEEP, 2, 3), quiet=(2, 3)) | wet)
    assert {(f.kind, f.table) for f in pod.engine.diagnosis.faults if f.kind == "leak"}


@pytest.mark.long
def test_who_is_said_to_sleep_and_goes_on_reporting_is_judged() -> None:
    pod = watched()
    for _ in range(round(WAKE_S / 10.0) + 2):
        pod.tick(speaking(levels(ASLEEP, 2, 3), quiet=(2,)), dt_s=10.0)
    assert pod.engine.windows.standby.off.nonzero()[0].tolist() == [2]


def test_a_scheduler_that_no_longer_knows_excuses_nobody() -> None:
    pod = watched()
    for _ in range(60):
        pod.tick(speaking(levels(ASLEEP, 2), quiet=(2,)))
    unknown = levels(READY)
    unknown[2] = np.nan
    pod.tick(speaking(unknown, quiet=(2,)))
    assert not pod.engine.windows.standby.off.any()


@pytest.mark.long
def test_the_scheduler_falls_silent_and_who_speaks_is_awake() -> None:
    pod = watched()
    for _ in range(60):
        pod.tick(speaking(levels(ASLEEP, 2, 3), quiet=(2, 3)))
    for _ in range(60):  # only node 3 is heard again, and nobody tells of standby
        pod.tick(speaking(quiet=(2,)), dt_s=20.0)
    assert pod.engine.windows.standby.off.nonzero()[0].tolist() == [2]


def test_caps_wait_for_who_sleeps_and_standby_does_not() -> None:
    wish = Wish()
    wish.controls = (CAP, STANDBY)
    pod = watched(wish)
    for _ in range(5):
        pod.tick(speaking(levels(ASLEEP, 0), quiet=(0,)))
    wish.ask(CAP, range(8), 0.0, 800.0, 800.0)
    pod.tick(speaking(levels(ASLEEP, 0), quiet=(0,)))
    (batch,) = pod.commands(CAP)
    assert batch.index.tolist() == [4, 5, 6, 7]
    wish.ask(STANDBY, [0, 1], READY, READY, READY)
    pod.tick(speaking(levels(ASLEEP, 0), quiet=(0,)))
    assert pod.commands(STANDBY)[0].index.tolist() == [0, 1]


def test_people_who_work_there_keep_the_scheduler_from_waking_it() -> None:
    wish = Wish()
    wish.controls = (STANDBY,)
    pod = watched(wish)
    begun = ev.MaintenanceBegun(
        id="m", author="ann", table="rack", names=("r1",), until_ns=pod.now_ns + 10**12
    )
    pod.tick(speaking(levels(ASLEEP, 0), quiet=(0,)), begun)
    wish.ask(STANDBY, [0, 20], READY, READY, READY)
    pod.tick(speaking(levels(ASLEEP, 0), quiet=(0,)))
    assert pod.commands(STANDBY)[0].index.tolist() == [20]


def test_it_survives_a_restart_in_mid_wake() -> None:
    pod = watched()
    for level in (ASLEEP, WAKING):
        for _ in range(10):
            pod.tick(speaking(levels(level, 5), quiet=(5,)))
    other = pod.restarted(two_racks(), ())
    assert encode(other.engine.windows.dump()) == encode(pod.engine.windows.dump())
    assert np.array_equal(other.engine.windows.mask("gpu"), pod.engine.windows.mask("gpu"))  # type: ignore[arg-type]
    values = speaking(levels(WAKING, 5), quiet=(5,))
    for twin in (pod, other):
        twin.tick(values)
    assert other.engine.checksum() == pod.engine.checksum()


def test_the_control_and_its_read_back_have_the_same_states() -> None:
    table = TABLES["node"]
    assert table.control_by_name["standby"].states == table.by_name["standby_state"].states
    assert table.control_by_name["standby"].states.index("asleep") == ASLEEP
