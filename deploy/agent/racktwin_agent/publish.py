"""Publications of an agent: topics and payloads as racktwin reads them, in JSON. Pure.

Frames are lost when nobody listens; events, results and states are not. Imports the agent's devices and
leases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from racktwin_agent import VERSION
from racktwin_agent.devices import Column, Sample
from racktwin_agent.leases import Answer

PUB = "IT/v1/PUB"
CLOCK_SET_NS = 1_704_067_200 * 10**9  # 2024: before it, a clock starts from its default


class Out(NamedTuple):
    """One message to be published."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False


def frame_of(path: str, t_ns: int, gpu: Mapping[str, Column], node: Mapping[str, Column]) -> Out:
    """Return one instant of a node's devices as columns."""
    body: dict[str, Any] = {"t_ns": t_ns, "from": path}
    for kind, columns in (("gpu", gpu), ("node", node)):
        if columns:
            body[kind] = {name: [_plain(v) for v in column] for name, column in columns.items()}
    return Out(f"{PUB}/Frame/{path}", _json(body))


def sample_of(path: str, sample: Sample) -> Out:
    """Return a sample as a frame."""
    return frame_of(path, sample.t_ns, sample.gpu, sample.node)


def result_of(
    path: str, integration: str, control: str, epoch: int, t_ns: int, answers: Sequence[Answer]
) -> Out:
    """Return the answers to the orders of one request."""
    body = {
        "v": 1,
        "from": path,
        "epoch": epoch,
        "t_ns": t_ns,
        "names": [a.name for a in answers],
        "generations": [a.generation for a in answers],
        "commands": [a.command for a in answers],
        "states": [a.state for a in answers],
        "details": [a.detail[:500] for a in answers],
    }
    return Out(f"IT/v1/{integration}/Result/{control}/{path}", _json(body), 1)


def status_of(path: str, state: str, t_ns: int, epoch: int, contingency: str) -> Out:
    """Return the retained state of an agent; `offline` is its last will."""
    body = {
        "state": state,
        "version": VERSION,
        "t_ns": t_ns,
        "epoch": epoch,
        "contingency": contingency,
        "from": path,
    }
    return Out(f"{PUB}/Agent/{path}", _json(body), 1, True)


def fault_of(path: str, event_id: str, table: str, name: str, code: int, detail: str, at_ns: int = 0) -> Out:
    """Return a fault of the node or of one of its devices (`name` within the node, "" for itself), with its
    id.

    `at_ns` is when it happened; a clock that was never set gives none.
    """
    body: dict[str, Any] = {
        "type": "FaultReported",
        "id": event_id[:200],
        "from": path,
        "table": table,
        "name": f"{path}/{name}" if name else path,
        "code": code,
        "detail": detail[:1000],
    }
    if at_ns >= CLOCK_SET_NS:
        body["at_ns"] = at_ns
    return Out(f"{PUB}/Event/{path}", _json(body), 1)


def identity_of(path: str, event_id: str, table: str, name: str, serial: str) -> Out:
    """Return the identity of the node or of one of its devices (`name` within the node, "" for itself)."""
    body: dict[str, Any] = {
        "type": "IdentityTold",
        "id": event_id[:200],
        "from": path,
        "table": table,
        "name": f"{path}/{name}" if name else path,
        "serial": serial,
    }
    return Out(f"{PUB}/Event/{path}", _json(body), 1)


def nvlinks_of(path: str, event_id: str, counts: dict[str, Any]) -> Out:
    """Return the counts of the node's NVLinks."""
    body = {"type": "NvlinksCounted", "id": event_id[:200], "from": path, "name": path, **counts}
    return Out(f"{PUB}/Event/{path}", _json(body), 1)


def _plain(value: float | int | None) -> float | int | None:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return round(value, 4) if isinstance(value, float) else value


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=True).encode("ascii")
