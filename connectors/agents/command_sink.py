"""Sinks over MQTT: caps to the agents of nodes as leases, requests to the BMS on points that are ours.

Neither waits for an outcome: agents answer on the Result topics (`it_command.ResultDecoder`), the BMS
echoes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from connectors.agents.command import requests_of
from connectors.dsx import BmsDecoder, Heartbeat
from connectors.orders import summary_of
from twin.catalogue import F64, ActuationError, ConnectorError
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import Ignored, Message

AT_ONCE = 64  # publications that wait for the broker's acknowledgement
AGENT_CONTROLS = ("gpu.power_cap_w", "node.power_cap_w")
# control -> the signal of our point that asks the BMS for it
BMS_REQUESTS = {
    "cdu.supply_temp_target_c": "supply_temp_request_c",
    "rack.liquid_isolation": "liquid_isolation_request_state",
    "rack.electrical_isolation": "electrical_isolation_request_state",
}


class Publish(Protocol):
    """Publishes on a link; with QoS 1 the broker has it when this returns. Raises ConnectorError."""

    def __call__(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> Awaitable[None]: ...


class MqttSink:
    """Power caps, to be carried out and lapsed by the agents of the nodes.

    `lapse` gives the values [n of the table] that devices take when a lease ends, for controls that give
    back what was found; None is the site's safe value.
    """

    enforces_safe = True

    def __init__(
        self,
        site: Site,
        integration: str,
        publish: Publish,
        *,
        name: str = "agents",
        controls: tuple[str, ...] = AGENT_CONTROLS,
        lapse: Callable[[CommandBatch], F64 | None] = lambda batch: None,  # noqa: ARG005
    ) -> None:
        self.name, self.controls = name, controls
        self._site, self._publish, self._integration, self._lapse = site, publish, integration, lapse
        self.sent = 0  # commands, renewals included

    def rebind(self, site: Site) -> None:
        """The site changed: names are its own from now on."""
        self._site = site

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Publish a request for each rack. Raises ActuationError, after all the others were sent."""
        problems: list[str] = []
        messages: list[tuple[str, bytes]] = []
        for batch in commands:
            if batch.control not in self.controls:
                continue
            try:
                messages += requests_of(batch, self._site, self._integration, self._lapse(batch))
                self.sent += len(batch.index)
            except ActuationError as error:
                problems.append(str(error))
        problems += await publish_all(self._publish, messages)
        _raise(self.name, problems)


class BmsSink:
    """Setpoints and isolations, asked of the BMS on the points that its metadata gives to our integration.

    The BMS may refuse, and holds what was asked for until it is asked for something else: nothing lapses by
    itself.
    """

    enforces_safe = False

    def __init__(
        self,
        site: Site,
        decoder: BmsDecoder,
        integration: str,
        publish: Publish,
        *,
        name: str = "bms",
        controls: tuple[str, ...] = tuple(BMS_REQUESTS),
    ) -> None:
        self.name, self.controls = name, controls
        self.pulse = Heartbeat(integration)
        self._site, self._decoder, self._publish = site, decoder, publish

    def rebind(self, site: Site) -> None:
        """The site changed: names are its own from now on."""
        self._site = site

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Publish a request for each entity. Raises ActuationError, after all the others were sent."""
        problems: list[str] = []
        messages: list[tuple[str, bytes]] = []
        for batch in commands:
            if batch.control not in self.controls:
                continue
            table, signal = batch.control.partition(".")[0], BMS_REQUESTS[batch.control]
            for entity, value in zip(batch.index.tolist(), batch.value.tolist(), strict=True):
                try:
                    topic = self._decoder.find_request(table, entity, signal)
                    messages.append(self._decoder.encode_request(topic, value, batch.issued_ns))
                except ActuationError as error:
                    problems.append(f"{self._site.name(table, entity)}: {error}")
        problems += await publish_all(self._publish, messages)
        _raise(self.name, problems)

    def hear(self, message: Message) -> Ignored | None:
        """Take in the status of BMS systems, for the heartbeat. Raises BadMessage."""
        return self.pulse.hear(message)

    async def beat(self, now_ns: int) -> int:
        """Publish the heartbeat if it is due, to be called about once a second; how many points were told.
        Raises ActuationError."""
        messages = self.pulse.due(now_ns)
        _raise(self.name, await publish_all(self._publish, messages, qos=0))
        return len(messages)


async def publish_all(
    publish: Publish, messages: Sequence[tuple[str, bytes]], qos: int = 1, retain: bool = False
) -> list[str]:
    """Publish them, several at a time; what failed."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(topic: str, payload: bytes) -> str | None:
        async with gate:
            try:
                await publish(topic, payload, qos, retain)
            except (ConnectorError, ActuationError) as error:
                return str(error)
        return None

    answers = await asyncio.gather(*(one(topic, payload) for topic, payload in messages))
    return [a for a in answers if a is not None]


def _raise(name: str, problems: list[str]) -> None:
    if problems:
        raise ActuationError(f"{name}: {summary_of(problems)}")
