"""Delivery of contingency caps: withdrawn where no policy is armed, also those of a daemon before."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.agents import ResultDecoder
from policies.power_capping import PowerGuard
from tests.support.builders import START_NS, Twin, two_racks
from twin.catalogue import ConnectorError
from twin.daemon import contingency_publisher
from twin.daemon.contingency_publisher import ContingencyPublisher
from twin.telemetry import Message

TOPIC = "IT/v1/ours/Contingency/lab/h/r1"


class Desk:
    """A publisher beside an engine whose policy has an authority, and what it published."""

    def __init__(self, authority: str) -> None:
        twin = Twin(two_racks(), [PowerGuard()], authority={"power_guard": authority})
        twin.tick()
        self.answers = ResultDecoder(twin.site, "ours")
        self.published: list[tuple[str, bytes, bool]] = []
        self.notes: list[Any] = []
        self.stats = SimpleNamespace(ticks=0)
        self.denied = False
        live: Any = SimpleNamespace(engine=twin.engine, stats=self.stats, note=self.notes.append)
        links: Any = SimpleNamespace(
            integration="ours",
            router=SimpleNamespace(answers=self.answers),
            source=SimpleNamespace(publisher=lambda may_act: self.publish),
        )
        leads: Any = SimpleNamespace(term=SimpleNamespace(epoch=3), may_act=lambda: True)
        none: Any = None
        self.publisher = ContingencyPublisher(live, none, none, leads, lambda: links)

    async def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        """As a link does."""
        assert qos == 1
        if self.denied:
            raise ConnectorError("not authorised")
        self.published.append((topic, payload, retain))

    def report(self, node: str, contingency: str) -> None:
        """Its agent says online, with this state of its contingency caps."""
        body = {"v": 1, "state": "online", "t_ns": START_NS, "contingency": contingency}
        topic = f"IT/v1/PUB/Agent/lab/h/{node}"
        self.answers.decode(Message(START_NS, topic, json.dumps(body).encode()))

    def run(self, looks: int) -> None:
        """Let it look so often, while ticks go on."""

        async def scene() -> None:
            task = asyncio.create_task(self.publisher.run())
            for _ in range(20 * looks):
                self.stats.ticks += 1
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(scene())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contingency_publisher, "LOOK_S", 0.01)


def test_caps_that_a_daemon_before_delivered_are_withdrawn_once() -> None:
    desk = Desk("advise")
    desk.run(2)
    assert desk.published == [], "where no agent holds any, nothing is published"
    desk.report("r1/node0", "armed")
    desk.report("r1/node1", "armed")
    desk.report("r2/node0", "none")
    desk.run(4)
    assert desk.published == [(TOPIC, b"", True)]
    assert [note.contingency.withdrawn for note in desk.notes] == [1]


def test_what_the_broker_refuses_is_not_tried_in_each_second() -> None:
    desk = Desk("advise")
    desk.denied = True
    desk.report("r1/node0", "armed")
    desk.run(4)
    assert len(desk.notes) == 1


def test_an_agent_that_holds_none_any_more_is_left_alone() -> None:
    desk = Desk("advise")
    desk.report("r1/node0", "armed")
    desk.report("r1/node0", "none")
    desk.run(2)
    assert desk.published == []
