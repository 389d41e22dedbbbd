"""The gauge of the last XID: new values are faults where no agent tells them, old ones are watched."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.builders import Twin, two_racks
from tests.support.health_site import WELL, on
from twin.contracts import DEGRADED, FAILED, HEALTHY, WATCH
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import EntityReplaced, FaultReported

N = 144


class Pod(Twin):
    def __init__(self) -> None:
        super().__init__(two_racks())

    def show(self, codes: Any, *events: Any, **more: Any) -> None:
        self.tick(WELL | {"gpu.xid_code": codes} | more, *events, dt_s=10.0)

    def level(self, gpu: int) -> int:
        return int(self.engine.health.health("gpu").level[gpu])

    def asks(self, gpu: int) -> int:
        return int(self.engine.health.book.open_code("gpu")[gpu])

    def heard(self) -> int:
        return self.engine.health.book.counts.get("heard", 0)


def test_a_new_value_is_a_fault_and_is_heard_once() -> None:
    pod = Pod()
    pod.show(0.0)
    for _ in range(20):
        pod.show(on(N, 5, 79) + on(N, 9, 63) + on(N, 12, 777))
    assert [pod.asks(g) for g in (5, 12)] == [79, 777]
    assert [pod.level(g) for g in (5, 6, 12)] == [FAILED, HEALTHY, WATCH]
    assert pod.heard() == 3
    pod.show(on(N, 5, 79, 0) * np.nan)  # not read once: nothing new
    pod.show(on(N, 5, 79) + on(N, 9, 94))
    assert pod.heard() == 4
    pod.engine.restore(decode(encode(pod.engine.dump())))
    pod.show(on(N, 5, 79) + on(N, 9, 94))
    assert pod.heard() == 4


def test_what_it_held_before_anybody_watched_is_watched_if_grave() -> None:
    pod = Pod()
    for _ in range(3):
        pod.show(on(N, 5, 79) + on(N, 9, 31))
    assert [pod.level(g) for g in (5, 9)] == [WATCH, HEALTHY]
    assert pod.heard() == 0
    evidence = {e.rule: e.text for e in pod.engine.health.verdicts.evidence("gpu", 5)}
    assert evidence["xid_before"].startswith("its last XID was 79, before racktwin or DCGM started")
    pod.show(on(N, 5, 31))  # another one came: it works
    for _ in range(10):
        pod.show(0.0)
    assert pod.level(5) == WATCH  # the application of late is to be restarted
    pod.show(on(N, 5, 79))
    assert pod.level(5) == FAILED


def test_a_grave_one_that_goes_is_watched_for_a_day() -> None:
    pod = Pod()
    pod.show(0.0)
    for _ in range(10):
        pod.show(on(N, 5, 95))
    assert pod.level(5) == FAILED
    for _ in range(20):
        pod.show(0.0)  # its node, or DCGM alone, was restarted
    assert (pod.asks(5), pod.level(5)) == (0, WATCH)
    pod.engine.restore(decode(encode(pod.engine.dump())))
    pod.tick(WELL, dt_s=80_000.0)
    assert pod.level(5) == WATCH
    pod.tick(WELL, dt_s=7000.0)
    for _ in range(10):
        pod.show(0.0)
    assert pod.level(5) == HEALTHY


def test_what_an_agent_tells_is_not_counted_twice() -> None:
    pod = Pod()
    pod.show(0.0, **{"node.agent_state": on(36, 1, 1)})
    told = FaultReported(table="gpu", name=pod.site.name("gpu", 6), code=94)
    pod.show(0.0, told)
    pod.show(on(N, [5, 6, 40], 94), **{"node.agent_state": on(36, 1, 1)})
    # 40: its agent is online and says nothing; 5 and 6: it is offline, and has told of 6 before
    assert [pod.asks(g) for g in (5, 6, 40)] == [94, 94, 0]
    assert pod.heard() == 2


def test_another_gpu_begins_anew() -> None:
    pod = Pod()
    pod.show(0.0)
    pod.show(on(N, 5, 79))
    assert pod.level(5) == FAILED
    pod.show(0.0, EntityReplaced(table="gpu", name=pod.site.name("gpu", 5), serial="other"))
    for _ in range(10):
        pod.show(0.0)
    assert pod.level(5) < DEGRADED
    assert pod.asks(5) == 0
