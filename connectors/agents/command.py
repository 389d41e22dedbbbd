"""Commands over MQTT: leases on caps and switches for node agents, and the daemon's own points for the BMS.

`IT/v1/{integration}/Request/{control}/{rack path}` carries the leases of one rack as columns, and
`.../Result/{control}/{node path}` an agent's answers. Names are relative to the path of the topic, so that
no sender can name a device outside it. No sink waits for an outcome: agents answer on the Result topics
(`ResultDecoder`), the BMS echoes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from connectors.agents.frame import UNKNOWN_PATH, check_sender
from connectors.allowance import Allowance
from connectors.dsx import BmsDecoder, Heartbeat
from connectors.orders import summary_of
from twin.catalogue import F64, I32, TABLES, ActuationError, BadMessage, ConnectorError, find_control
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import ELSEWHERE, CommandAcked, Ignored, Message, Reading

AGENT = "IT/v1/PUB/Agent/"
TABLES_OF_AGENTS = ("rack", "node", "gpu")
MAX_NAMES = 4096  # in one message; a rack with more gets several
MAX_RESULT, MAX_STATUS = 2 * 2**20, 16 * 2**10
MAX_DETAIL = 500
ANSWER_BURST, ANSWER_PER_S = 2**22, 2**18  # bytes of a node or rack
MAX_EPOCH = 2**53
Publication = tuple[str, bytes]
AT_ONCE = 64  # publications that wait for the broker's acknowledgement
AGENT_CONTROLS = ("gpu.power_cap_w", "gpu.clock_lock_mhz", "node.power_cap_w", "node.power_state")
# control -> the signal of our point that asks the BMS for it
BMS_REQUESTS = {
    "cdu.supply_temp_target_c": "supply_temp_request_c",
    "cdu.diff_pressure_target_pa": "diff_pressure_request_pa",
    "rack.liquid_isolation": "liquid_isolation_request_state",
    "rack.electrical_isolation": "electrical_isolation_request_state",
}


def requests_of(
    batch: CommandBatch, site: Site, integration: str, lapse: F64 | None = None
) -> list[Publication]:
    """Return the (topic, payload) of a batch, one for each rack; renewals likewise.

    `lapse` [n of the table] is what a device takes when its lease ends, NaN where it keeps what it has;
    without it the site's safe value, or for a control that keeps, nothing. Raises ActuationError where it
    is needed.
    """
    control = find_control(batch.control)
    if control is None or control.table not in TABLES_OF_AGENTS:
        raise ActuationError(
            f"{batch.control}: not a control of a rack, node or GPU; no agent can carry it out"
        )
    if lapse is None:
        if control.on_expiry == "restore":
            raise ActuationError(
                f"{batch.control}: a release restores the initial values; expected these values in "
                "the command"
            )
        keeps = control.on_expiry == "keep"
        n = site.sizes[control.table]
        lapse = np.full(n, np.nan) if keeps else site.envelopes[batch.control].safe
    ends = lapse[batch.index]
    if control.on_expiry == "safe" and not batch.final and np.isnan(ends).any():
        at = int(batch.index[int(np.flatnonzero(np.isnan(ends))[0])])
        raise ActuationError(f"{batch.control} of {site.name(control.table, at)}: no safe value to lapse to")
    head: dict[str, Any] = {
        "v": 1,
        "control": batch.control,
        "policy": batch.policy,
        "epoch": batch.epoch,
        "issued_ns": batch.issued_ns,
        "expires_ns": batch.expires_ns,
        "deadline_ns": batch.deadline_ns,
        "renewal": batch.renewal,
        "final": batch.final,
        "on_expiry": control.on_expiry,
        "reason": batch.reason[:MAX_DETAIL],
    }
    names, rack = _relative(site, control.table, batch.index)
    generation, command = batch.generation.tolist(), batch.command.tolist()
    value = batch.value.tolist()
    lapses = [None if x != x else x for x in ends.tolist()]
    out = []
    for first, last in _runs(rack):
        part = slice(first, last)
        path = site.names["rack"][int(rack[first])]
        body = head | {
            "path": path,
            "names": names[part],
            "generations": generation[part],
            "commands": command[part],
            "values": value[part],
            "lapse": lapses[part],
        }
        out.append((f"IT/v1/{integration}/Request/{batch.control}/{path}", msgspec.json.encode(body)))
    return out


@dataclass(frozen=True)
class ContingencyTerms:
    """The sender of contingency caps, their validity, their triggers, and their hold time after a trigger."""

    integration: str
    epoch: int
    issued_ns: int
    expires_ns: int
    triggers: Sequence[str] = ("psu_lost", "power_brake", "broker_gone")
    hold_s: float = 300.0


def contingency_of(site: Site, index: I32, caps_w: F64, terms: ContingencyTerms) -> list[Publication]:
    """The retained (topic, payload) per rack of the caps [len(index)] of GPUs for when the daemon is not
    there.

    A retained message replaces the one before: name all GPUs of a rack at once.
    """
    names, rack = _relative(site, "gpu", index)
    caps = caps_w.tolist()
    if not all(math.isfinite(c) and c >= 0 for c in caps):
        raise ActuationError("contingency caps: expected watts >= 0 for every GPU that is named")
    out = []
    for first, last in _runs(rack, len(rack)):
        path = site.names["rack"][int(rack[first])]
        body = {
            "v": 1,
            "path": path,
            "epoch": terms.epoch,
            "issued_ns": terms.issued_ns,
            "expires_ns": terms.expires_ns,
            "names": names[first:last],
            "caps_w": caps[first:last],
            "triggers": list(terms.triggers),
            "hold_s": terms.hold_s,
        }
        out.append((contingency_topic(terms.integration, path), msgspec.json.encode(body)))
    return out


def contingency_topic(integration: str, rack: str) -> str:
    """Return the topic that holds the contingency caps of a rack; an empty message withdraws them."""
    return f"IT/v1/{integration}/Contingency/{rack}"


def presence_of(
    integration: str, name: str, state: Literal["online", "offline"], role: str, epoch: int, t_ns: int
) -> Publication:
    """Return the retained (topic, payload) of a daemon's presence; `offline` is its last will."""
    body = {"v": 1, "state": state, "role": role, "epoch": epoch, "t_ns": t_ns}
    return f"IT/v1/{integration}/Daemon/{name}", msgspec.json.encode(body)


def _relative(site: Site, table: str, index: I32) -> tuple[list[str], I32]:
    """Return (names relative to the rack, rack of each)."""
    if table == "rack":
        return [""] * len(index), index
    node = site.node_of_gpu[index] if table == "gpu" else index
    rack = site.rack_of_node[node].astype(np.int32)
    ordinal = (node - site.node_start_of_rack[rack]).tolist()
    if table == "node":
        return [f"node{i}" for i in ordinal], rack
    gpu = (index - site.gpu_start_of_node[node]).tolist()
    return [f"node{i}/gpu{k}" for i, k in zip(ordinal, gpu, strict=True)], rack


def _runs(rack: I32, at_most: int = MAX_NAMES) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each rack's members, which are contiguous, in pieces."""
    starts = [*np.flatnonzero(np.diff(rack, prepend=-1)).tolist(), len(rack)]
    return [
        (at, min(at + at_most, last))
        for first, last in pairwise(starts)
        for at in range(first, last, at_most)
    ]


_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Generation = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Result(msgspec.Struct):
    v: Literal[1]
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MAX_EPOCH)]
    t_ns: _Whole
    names: Annotated[list[_Name], msgspec.Meta(max_length=MAX_NAMES)]
    generations: Annotated[list[_Generation], msgspec.Meta(max_length=MAX_NAMES)]
    commands: Annotated[list[_Whole], msgspec.Meta(max_length=MAX_NAMES)]
    states: Annotated[
        list[Literal["accepted", "in_progress", "done", "failed"]], msgspec.Meta(max_length=MAX_NAMES)
    ]
    details: Annotated[list[str], msgspec.Meta(max_length=MAX_NAMES)]
    sender: str | None = msgspec.field(name="from", default=None)


class _Status(msgspec.Struct):
    state: Literal["online", "offline"]
    t_ns: _Whole
    epoch: _Whole = 0
    version: Annotated[str, msgspec.Meta(max_length=64)] = ""
    contingency: Annotated[str, msgspec.Meta(max_length=200)] = "none"
    sender: str | None = msgspec.field(name="from", default=None)


class ResultDecoder:
    """Decodes agents' answers and states for one site.

    `integration` is ours: answers to others are ignored. While `epoch` is set, answers of another are
    refused. `armed`: nodes whose agents hold contingency caps, as they reported last.
    """

    def __init__(self, site: Site, integration: str | None = None, epoch: int | None = None) -> None:
        self.site, self.integration, self.epoch = site, integration, epoch
        self.armed: set[str] = set()
        self._allowance = Allowance("answers", ANSWER_BURST, ANSWER_PER_S)
        self._gone_ns: dict[str, int] = {}  # when the last will of an agent came
        self._behind_ns: dict[str, int] = {}  # by how much the clock of its node is behind ours
        self._result, self._status = msgspec.json.Decoder(_Result), msgspec.json.Decoder(_Status)

    def decode(self, message: Message) -> list[CommandAcked | Reading] | Ignored:
        """Return acknowledgements, or the state of an agent. Raises BadMessage for any other message."""
        if message.topic.startswith(AGENT):
            return self._agent(message)
        parts = message.topic[:1024].split("/", 5)
        if len(parts) < 6 or parts[:2] != ["IT", "v1"] or parts[3] != "Result":
            return Ignored(message.topic[:40], "neither a result nor the state of an agent")
        if self.integration is not None and parts[2] != self.integration:
            return Ignored("Result", "an answer to another integration")
        if self.site.is_elsewhere(parts[5]):
            return Ignored("Result", ELSEWHERE)
        return list(self._answers(message, parts[4], parts[5]))

    def _answers(self, message: Message, key: str, path: str) -> list[CommandAcked]:
        if len(message.payload) > MAX_RESULT:
            raise BadMessage(f"{len(message.payload)} bytes of result; expected at most {MAX_RESULT}")
        control = find_control(key)
        if control is None or control.table not in TABLES_OF_AGENTS:
            raise BadMessage(f"a result for {key[:80]!r}, which is not a control of a rack, node or GPU")
        base = self._base(path)
        self._allowance.spend(base, len(message.payload), message.t_ns)
        try:
            result = self._result.decode(message.payload)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"not a result: {str(error)[:200]}") from error
        check_sender(result.sender, path)
        if self.epoch is not None and result.epoch != self.epoch:
            raise BadMessage(f"an answer to epoch {result.epoch}; expected {self.epoch}")
        n = len(result.names)
        columns = (result.generations, result.commands, result.states, result.details)
        if any(len(c) != n for c in columns):
            raise BadMessage(f"columns of unequal length; expected {n} of each")
        if len(set(result.names)) != n:
            raise BadMessage("a name occurs twice; expected one result for each name")
        out = []
        for name, generation, command, state, detail in zip(result.names, *columns, strict=True):
            full = f"{base}/{name}" if name else base
            if self.site.entity(control.table, full) is None:
                raise BadMessage(f"{name!r} is no {control.table} of {base}")
            if len(detail) > MAX_DETAIL:
                raise BadMessage(f"a detail of {len(detail)} characters; expected at most {MAX_DETAIL}")
            out.append(
                CommandAcked(
                    control=key,
                    name=full,
                    generation=generation,
                    command=f"{result.epoch}-{command}",
                    state=state,
                    detail=detail,
                )
            )
        return out

    def _base(self, path: str) -> str:
        for table in ("node", "rack"):
            entity = self.site.entity(table, path) if len(path) <= 512 else None
            if entity is not None:
                return self.site.name(table, entity)
        raise BadMessage(f"a result of {path[:200]!r}, which is not a rack or node of this site")

    def _agent(self, message: Message) -> list[CommandAcked | Reading] | Ignored:
        if len(message.payload) > MAX_STATUS:
            raise BadMessage(f"{len(message.payload)} bytes of agent state; expected at most {MAX_STATUS}")
        path = message.topic[len(AGENT) :]
        node = self.site.entity("node", path) if len(path) <= 512 else None
        if node is None and self.site.is_elsewhere(path):
            return Ignored("Agent", ELSEWHERE)
        if node is None:
            return Ignored("Agent", f"no node {path[:120]!r} in the site file", UNKNOWN_PATH)
        if not message.payload:
            return Ignored("Agent", "the retained state was cleared")
        try:
            status = self._status.decode(message.payload)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"not an agent state: {str(error)[:200]}") from error
        check_sender(status.sender, path)
        signal = TABLES["node"].by_name["agent_state"]
        name, t_ns = self.site.name("node", node), message.t_ns
        if status.state == "offline":
            # A last will bears the time of the connection that it ends; it is news when it arrives.
            self._gone_ns[name] = t_ns
        else:
            (self.armed.add if status.contingency == "armed" else self.armed.discard)(name)
            t_ns = self._online_ns(name, status.t_ns, message.t_ns)
        return [Reading("node", node, "agent_state", float(signal.states.index(status.state)), t_ns)]

    def _online_ns(self, name: str, stated_ns: int, arrived_ns: int) -> int:
        """Return when an agent was online, by our clock. A retained state may be old; one that comes behind
        a last will is newer than that, whatever the clock of its node shows."""
        behind_ns = max(min(self._behind_ns.get(name, 0), arrived_ns - stated_ns), 0)
        if stated_ns + behind_ns <= self._gone_ns.get(name, 0):
            behind_ns = arrived_ns - stated_ns
        self._behind_ns[name] = behind_ns
        return min(stated_ns + behind_ns, arrived_ns)


class Publish(Protocol):
    """Publishes on a link; with QoS 1 the broker has it when this returns. Raises ConnectorError."""

    def __call__(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> Awaitable[None]: ...


class MqttSink:
    """Power caps, clock locks and orders on the power of nodes, to be carried out by their agents, who let
    caps and locks lapse.

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

    async def beat(self, now_ns: int) -> int:
        """Publish the heartbeat if it is due; returns the number of points. Call it about once a second.

        Raises ActuationError.
        """
        messages = self.pulse.due(now_ns)
        _raise(self.name, await publish_all(self._publish, messages, qos=0))
        return len(messages)


async def publish_all(
    publish: Publish, messages: Sequence[tuple[str, bytes]], qos: int = 1, retain: bool = False
) -> list[str]:
    """Publish all, several at a time; returns the failures."""
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
