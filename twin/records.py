"""Records: how events, proposals and commands read in the journal. May import contracts and events."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from twin import events as ev
from twin.contracts import CommandBatch, Proposal


def same_proposals(a: list[Proposal], b: list[Proposal]) -> bool:
    """Whether a policy says again what is in force."""
    return len(a) == len(b) and all(
        x.control == y.control
        and x.reason == y.reason
        and np.array_equal(x.index, y.index)
        and np.array_equal(x.lo, y.lo)
        and np.array_equal(x.hi, y.hi)
        and np.array_equal(x.want, y.want, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def brief_event(event: ev.Event) -> dict[str, Any]:
    """An event for the journal; long content is named by its hash, the trace has it whole."""
    body = cast(dict[str, Any], msgspec.to_builtins(event))
    for name in ("spec", "params"):
        if name in body:
            body[name] = f"{len(body[name])} characters, in the trace"
    if len(body.get("names", ())) > 64:
        body["names"] = [*body["names"][:64], f"and {len(body['names']) - 64} more"]
    return body


def command_record(kind: str, c: CommandBatch) -> dict[str, Any]:
    """A batch of commands or of advice for the journal; a renewal is one short line."""
    if c.renewal:
        return {
            "kind": "renewal",
            "control": c.control,
            "count": len(c.index),
            "expires_ns": c.expires_ns,
            "reason": c.reason,
        }
    body: dict[str, Any] = {
        "kind": kind,
        "control": c.control,
        "policy": c.policy,
        "index": c.index,
        "value": c.value,
        "reason": c.reason,
    }
    if kind == "command":
        body |= {
            "epoch": c.epoch,
            "first_command": int(c.command[0]),
            "expires_ns": c.expires_ns,
            "deadline_ns": c.deadline_ns,
        }
        if c.final:
            body["final"] = True
    return body


def proposals_record(policy: str, proposals: list[Proposal]) -> dict[str, Any]:
    """What a policy proposes from now on."""
    columns = [
        {"control": p.control, "index": p.index, "lo": p.lo, "hi": p.hi, "want": p.want, "reason": p.reason}
        for p in proposals
    ]
    return {"kind": "proposals", "policy": policy, "proposals": columns}
