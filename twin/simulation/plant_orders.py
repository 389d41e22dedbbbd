"""Requests to the agents of a simulated site, read as agents read them, and the answers that agents give.

The other side of `connectors.agents.command`, which is the daemon's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from connectors.agents import MAX_EPOCH, MAX_NAMES, MAX_RESULT, TABLES_OF_AGENTS
from twin.catalogue import BadMessage, find_control
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import CommandAcked, Message

_Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Column = msgspec.Meta(max_length=MAX_NAMES)


class Publication(NamedTuple):
    """One message to the broker. `kept`: it is not lost while there is none, and goes at QoS 1."""

    topic: str
    payload: bytes
    kept: bool = False


class _Request(msgspec.Struct):
    v: Literal[1]
    control: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=MAX_EPOCH)]
    issued_ns: _Whole
    expires_ns: _Whole
    names: Annotated[list[str], _Column]
    generations: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], _Column]
    commands: Annotated[list[_Whole], _Column]
    values: Annotated[list[float], _Column]
    policy: str = ""
    deadline_ns: _Whole = 0
    renewal: bool = False
    final: bool = False


def read_request(message: Message, site: Site, prefix: str) -> CommandBatch:
    """The leases of a request to agents, topic `{prefix}{control}/{rack path}`. Raises BadMessage."""
    key, _, path = message.topic[len(prefix) :].partition("/")
    control, rack = find_control(key), site.entity("rack", path) if len(path) <= 512 else None
    if control is None or control.table not in TABLES_OF_AGENTS:
        raise BadMessage(f"a request for {key[:80]!r}, which is no control of a rack, node or GPU")
    if rack is None:
        raise BadMessage(f"a request to {path[:200]!r}, which is no rack of this site")
    if len(message.payload) > MAX_RESULT:
        raise BadMessage(f"{len(message.payload)} bytes of request; expected at most {MAX_RESULT}")
    try:
        body = msgspec.json.decode(message.payload, type=_Request)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not a request: {str(error)[:200]}") from None
    n = len(body.names)
    if any(len(c) != n for c in (body.generations, body.commands, body.values)):
        raise BadMessage(f"columns of unequal length; expected {n} of each")
    if body.control != key:
        raise BadMessage(f"speaks of {body.control[:80]!r} on the topic of {key}")
    base, index = site.name("rack", rack), []
    for name in body.names:
        full = f"{base}/{name}" if name else base
        entity = site.entity(control.table, full) if len(full) <= 512 else None
        if entity is None or site.name(control.table, entity) != full:
            raise BadMessage(f"{name[:80]!r} is no {control.table} of {base}")
        index.append(entity)
    if len(set(index)) != n:
        raise BadMessage("a name comes twice; expected one order for each")
    return CommandBatch(
        key, body.policy, body.epoch, np.array(index, np.int32), np.array(body.generations, np.int32),
        np.array(body.commands, np.int64), np.array(body.values), "", body.issued_ns, body.expires_ns,
        body.deadline_ns, body.renewal, body.final,
    )  # fmt: skip


def results_of(acks: Iterable[CommandAcked], integration: str, t_ns: int) -> list[Publication]:
    """Answers of agents: a message per node (or rack), control and epoch."""
    rows_of: dict[tuple[str, str, str], list[tuple[str, CommandAcked]]] = {}
    for ack in acks:
        place, name = ack.name, ""
        if ack.control.startswith("gpu."):
            place, _, name = ack.name.rpartition("/")
        rows_of.setdefault((ack.control, place, ack.command.partition("-")[0]), []).append((name, ack))
    out = []
    for (control, place, epoch), rows in rows_of.items():
        body = {
            "v": 1,
            "epoch": int(epoch),
            "t_ns": t_ns,
            "from": place,
            "names": [name for name, _ in rows],
            "generations": [ack.generation for _, ack in rows],
            "commands": [int(ack.command.partition("-")[2]) for _, ack in rows],
            "states": [ack.state for _, ack in rows],
            "details": [ack.detail for _, ack in rows],
        }
        topic = f"IT/v1/{integration}/Result/{control}/{place}"
        out.append(Publication(topic, msgspec.json.encode(body), True))
    return out
