"""Cures: what a restart, a reset and a return to service close, and what stays open all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes
from twin.catalogue import NS
from twin.contracts import ACTIONS
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import Block, EntityReplaced, FaultReported

STEP_S = 30.0
NONE, GPU_RESET, NODE_RESTART = 0, 1, 2  # of gpu.recovery_action_state
OFF, ON = 0, 1
IN_SERVICE, CORDONED, DRAINING, DRAINED, REPLACE = range(5)


class Fleet(Twin):
    """Eight nodes of a GPU each that report every half minute."""

    def __init__(self) -> None:
        super().__init__(eight_nodes())
        self.reboots = np.zeros(8, np.int64)
        self.silent = np.zeros(8, np.bool_)

    def step(self, times: int = 1, *events: FaultReported, **states: Any) -> None:
        """Some half minutes; events come with the first of them."""
        for _ in range(times):
            at_ns = self.now_ns + round(STEP_S * NS)
            for node in np.flatnonzero(~self.silent).tolist():
                raw = self.reboots[node : node + 1].reshape(1, 1)
                none = np.empty((0, 1), np.float32)
                self.inbox.put_block(Block("node", node, (), none, ("reboot_count",), raw, at_ns), at_ns)
            values = {k.replace("__", "."): v for k, v in states.items()}
            self.tick(values, *events, dt_s=STEP_S)
            events = ()

    def open(self, table: str = "gpu") -> list[int]:
        codes: list[int] = self.engine.health.book.open_code(table).tolist()
        return codes


def fault(gpu: int, code: int, **more: Any) -> FaultReported:
    return FaultReported(table="gpu", name=f"r1/node{gpu}/gpu0", code=code, **more)


def of_node(node: int, code: int) -> FaultReported:
    return FaultReported(table="node", name=f"r1/node{node}", code=code)


def test_a_restart_does_what_was_asked_for_up_to_a_restart() -> None:
    pod = Fleet()
    pod.step(3)
    pod.step(6, fault(0, 79), fault(1, 167), fault(2, 95), fault(3, 79), of_node(0, 20034), of_node(3, 20034))
    assert pod.open()[:4] == [79, 167, 95, 79]
    pod.reboots[:3] += 1
    pod.step(2)
    assert pod.open()[:4] == [0, 167, 0, 79], "more than a restart is asked for; the last did not restart"
    assert pod.open("node") == [0, 0, 0, 20034, 0, 0, 0, 0]


def test_a_count_that_was_there_from_the_beginning_is_no_restart() -> None:
    pod = Fleet()
    pod.reboots[:] = 7
    pod.silent[:] = True
    pod.step(1, fault(0, 79))
    pod.step(10)
    pod.silent[:] = False
    pod.step(5)
    assert pod.open()[0] == 79


def test_what_comes_right_after_the_start_stays_open() -> None:
    pod = Fleet()
    pod.step(6)
    pod.step(6, fault(0, 79))
    pod.silent[0] = True
    pod.step(12)
    pod.step(2, fault(0, 143))  # the agent speaks before the counter comes
    pod.silent[0] = False
    pod.reboots[0] += 1
    pod.step(2)
    assert pod.open()[0] == 143, "weaker than what the start has done, but of the new start"
    pod.step(6)
    pod.reboots[0] += 1
    pod.step(2)
    assert pod.open()[0] == 0


def test_a_fault_of_the_new_start_alone_stays_open() -> None:
    pod = Fleet()
    pod.step(6)
    pod.step(1, fault(0, 143))
    pod.reboots[0] += 1
    pod.step(4)
    assert pod.open()[0] == 143


@pytest.mark.parametrize("through, expected", [([OFF, ON], 0), ([ON, ON], 79), ([OFF, OFF], 79)])
def test_power_that_comes_back_is_a_restart(through: list[int], expected: int) -> None:
    pod = Fleet()
    pod.step(2, node__power_on_state=ON)
    pod.step(1, fault(0, 79), node__power_on_state=ON)
    for state in through:
        pod.step(6, node__power_on_state=state)
    assert pod.open()[0] == expected


@pytest.mark.parametrize(
    "code, before, after, expected",
    [
        (95, GPU_RESET, NONE, 0),
        (79, NODE_RESTART, NONE, 0),
        (167, NODE_RESTART, NONE, 167),
        (95, NONE, NONE, 95),
        (95, NODE_RESTART, GPU_RESET, 95),
    ],
)
def test_the_gpu_says_that_nothing_is_to_be_done_any_more(
    code: int, before: int, after: int, expected: int
) -> None:
    pod = Fleet()
    pod.step(2, fault(0, code), gpu__recovery_action_state=before)
    pod.step(2, gpu__recovery_action_state=after)
    assert pod.open()[0] == expected


@pytest.mark.parametrize(
    "through, expected",
    [
        ([DRAINED, IN_SERVICE], 0),
        ([DRAINED, CORDONED, IN_SERVICE], 0),
        ([REPLACE, IN_SERVICE], 0),
        ([CORDONED, IN_SERVICE], 167),
        ([DRAINING, IN_SERVICE], 167),
        ([DRAINED, DRAINED], 167),
        ([IN_SERVICE, IN_SERVICE], 167),
    ],
)
def test_who_returns_a_drained_node_to_service_has_dealt_with_it(through: list[int], expected: int) -> None:
    pod = Fleet()
    pod.step(1, fault(0, 167), node__service_level_state=IN_SERVICE)
    for state in through:
        pod.step(2, node__service_level_state=state)
    assert pod.open()[0] == expected
    assert ACTIONS[pod.engine.health.book.open_action("gpu")[0]] == ("drain" if expected else "none")


def test_another_node_in_the_slot_counts_from_anew() -> None:
    pod = Fleet()
    pod.reboots[:] = 9
    pod.step(4)
    pod.step(1, fault(0, 79), EntityReplaced(table="node", name="r1/node0", serial="b"))  # type: ignore[arg-type]
    pod.reboots[0] = 30
    pod.step(6)
    assert pod.open()[0] == 79, "its GPU is the same, and nobody saw a restart"


def test_a_restart_of_the_daemon_misses_none() -> None:
    pod = Fleet()
    pod.step(3)
    pod.step(6, fault(0, 79), gpu__recovery_action_state=NONE)
    other = Fleet()
    other.engine.restore(decode(encode(pod.engine.dump())))
    other.now_ns, other.number, other.inbox = pod.now_ns, pod.number, pod.inbox
    other.reboots[0] = 1
    other.step(2)
    assert other.open()[0] == 0


def test_a_restart_undoes_the_double_bit_errors_before_it() -> None:
    pod, errors = Fleet(), np.zeros(8, np.int64)

    def step(times: int, **states: Any) -> list[int]:
        for _ in range(times):
            at_ns, none = pod.now_ns + round(STEP_S * NS), np.empty((0, 8), np.float32)
            pod.inbox.put_block(Block("gpu", 0, (), none, ("ecc_dbe_count",), errors[None], at_ns), at_ns)
            pod.step(1, **states)
        held = pod.engine.health.verdicts
        return [i for i in range(8) if any(e.rule == "ecc_dbe" for e in held.evidence("gpu", i))]

    asks = {"gpu__recovery_action_state": np.where(np.arange(8) == 3, GPU_RESET, NONE)}
    assert step(3, **asks) == []
    errors[1:4] = 1
    assert step(6, **asks) == [1, 2, 3]
    pod.reboots[2] += 1
    errors[2] = 0  # what a driver counts begins anew
    asks["gpu__recovery_action_state"] = np.full(8, NONE)  # a reset without a restart
    assert step(20, **asks) == [1]
    data = decode(encode(pod.engine.dump()))
    pod.engine.restore(data)
    assert step(5) == [1]
    errors[2] = 1
    assert step(3) == [1, 2]
