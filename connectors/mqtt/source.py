"""The MQTT source: what a link receives is decoded by topic, staged, and only then acknowledged.

What does not decode is counted under its topic and never stops the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from connectors.jobs import REPORT
from connectors.mqtt.lane import Lane, RefusalCount
from connectors.mqtt.link import LinkSettings, MqttLink, Presence
from connectors.mqtt.routing import Router
from connectors.sparkplug import rebirth
from twin.catalogue import BadMessage, ConnectorError
from twin.contracts import Inlet
from twin.telemetry import Ignored, Message

LOOK_EVERY_S = 1.0
FLOODED = "job reports"  # where those were dropped that one lane does not take
MOST_NAME = 80  # characters of a job's name
REBIRTH_EVERY_S, MAX_NODES = 60.0, 10_000


def subscriptions(integration: str, topics: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Subscriptions of a daemon: the BMS, the IT side, the answers to its requests, and `topics`.

    Each at QoS 1, so that a publisher's own QoS decides: frames come at 0, metadata and events at 1. They
    do not overlap, for a broker may deliver twice what matches two of them.
    """
    own = ("BMS/v1/#", "IT/v1/PUB/#", f"IT/v1/{integration}/Result/#")
    return tuple((topic, 1) for topic in dict.fromkeys((*own, *topics)))


def flood_of(refused: RefusalCount) -> str:
    """One line on a flood: its rate, what was dropped, and the job that sent most."""
    rate, job = refused.number / refused.within_s, refused.topic[len(REPORT) :][:MOST_NAME]
    job = "".join(c if c.isprintable() else "?" for c in job)
    text = f"{rate:,.0f}/s over the limit, {refused.number:,} dropped, "
    return f"{text}{refused.of_topic:,} of them from job {job}; look at its client"


def canary_topic(integration: str, client_id: str) -> str:
    """Topic on which a client publishes to itself, to see whether the broker lets it."""
    level = "".join("_" if c in "+#/" else c for c in client_id)
    return f"IT/v1/{integration}/Canary/{level}"


class MqttSource:
    """Stages what one broker delivers. `link` is also the way out for whoever publishes."""

    name = "mqtt"

    def __init__(
        self,
        settings: LinkSettings,
        router: Router,
        integration: str = "racktwin",
        topics: Sequence[str] = (),
        presence: Presence | None = None,
    ) -> None:
        self.router, self.lane = router, Lane(REPORT)
        self.link = MqttLink(
            settings,
            subscriptions(integration, topics),
            presence,
            canary_topic(integration, settings.client_id),
            self.lane,
        )

    async def run(self, inlet: Inlet) -> None:
        """Hold the link up until cancelled. Raises ConnectorError when it is down."""

        def take(message: Message) -> None:
            try:
                got = self.router.decode(message)
            except BadMessage as error:
                inlet.reject(message.topic[:200], str(error))
                return
            except Exception as error:  # a message must not be able to stop all others
                inlet.reject(message.topic[:200], f"its decoder failed: {type(error).__name__}: {error}")
                return
            if isinstance(got, Ignored):
                inlet.skip(got.what, got.why)
            elif got:
                inlet.stage(got, message.t_ns)

        looking = asyncio.ensure_future(self._look(inlet))
        try:
            await self.link.run(take, inlet.drop)
        finally:
            looking.cancel()

    async def _look(self, inlet: Inlet) -> None:
        """Now and then: faults inside messages, a link's own fault, Sparkplug nodes whose birth we missed."""
        asked: dict[str, float] = {}
        fault = ""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for why, count in self.router.faults():
                inlet.reject("inside a message", f"{why} ({count} times)")
            if (refused := self.lane.told(time.time_ns())) is not None:
                inlet.drop(FLOODED, flood_of(refused), refused.number)
            if self.link.fault and not fault:
                inlet.reject(self.link.where, self.link.fault)
            fault = self.link.fault
            now = time.monotonic()
            for topic in self.router.wanted_births():
                if now - asked.get(topic, -REBIRTH_EVERY_S) >= REBIRTH_EVERY_S and len(asked) < MAX_NODES:
                    asked[topic] = now
                    with contextlib.suppress(ConnectorError):
                        await self.link.publish(topic, rebirth(time.time_ns() // 10**6))
