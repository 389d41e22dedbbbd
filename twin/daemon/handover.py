"""Handover: the state that a leader passes to its successor, as one short text.

It holds the head of the journal, the authority of each policy with its begin, a hold, and requests of
operators: maintenance windows first, then load targets, then requests of bounds. A count replaces the entries
that do not fit. If there is room, it also lists nodes that returned to service. The reader validates a
handover before it uses it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from twin.daemon.leader import MAX_EPOCH, MAX_HEAD
from twin.run import LEVELS
from twin.telemetry import Event, LoadTargetSet, LoadTargetWithdrawn, MaintenanceBegun, OperatorRequest
from twin.wiring import AUTHOR

log = logging.getLogger(__name__)

MODES = ("normal", "held", "released")
MAX_ASKED_BYTES = 4 << 20
E = TypeVar("E", MaintenanceBegun, OperatorRequest, LoadTargetSet)


@dataclass
class Handover:
    """`decided_ns` is when people last set a policy's authority. `windows`, `requests` and `targets` that are
    None are not known: there was no room for them; `lost` says how many."""

    head: str = ""
    authority: dict[str, str] = field(default_factory=dict)
    decided_ns: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    windows: Sequence[MaintenanceBegun] | None = None
    requests: Sequence[OperatorRequest] | None = None
    lost: int = 0
    targets: Sequence[LoadTargetSet] | None = None
    returned: Mapping[str, int] = field(default_factory=dict)  # nodes back in service, and when

    def text(self) -> str:
        """At most MAX_HEAD characters."""
        body: dict[str, Any] = {
            "head": self.head,
            "authority": self.authority,
            "decided_ns": self.decided_ns,
            "mode": self.mode,
        }
        windows, requests, targets = self.windows or (), self.requests or (), self.targets or ()
        wanted = {} if self.targets is None else {"targets": targets}
        back = {"returned": tuple(self.returned.items())} if self.returned else {}
        for kept, lost in (
            ({"windows": windows, **wanted, "requests": requests, **back}, 0),
            ({"windows": windows, **wanted, "requests": requests}, 0),
            ({"windows": windows, **wanted}, len(requests)),
            ({"windows": windows}, len(requests) + len(targets)),
            ({}, len(windows) + len(requests) + len(targets)),
        ):
            text = json.dumps(body | {"asked": _packed(kept), "lost": lost})
            if len(text) <= MAX_HEAD:
                break
        return text

    def same_but_head(self, other: Handover | None) -> bool:
        """Return True if only the head of the journal differs."""
        return other is not None and (
            dataclasses.replace(self, head="") == dataclasses.replace(other, head="")
        )


def read_handover(text: str) -> Handover:
    """Parse the handover of a leader; an unreadable one counts as empty."""
    tree = _object(text)
    levels, decided = tree.get("authority"), tree.get("decided_ns")
    out = Handover(head=str(tree.get("head", ""))[:64])
    if isinstance(levels, dict):
        out.authority = {p: v for p, v in levels.items() if v in LEVELS}
    if isinstance(decided, dict):
        out.decided_ns = {p: v for p, v in decided.items() if type(v) is int and 0 <= v < 2**63}
    if tree.get("mode") in MODES:
        out.mode = tree["mode"]
    lost = tree.get("lost", 0)
    out.lost = lost if type(lost) is int and 0 <= lost <= MAX_EPOCH else 0
    asked = _object(_unpacked(tree.get("asked")))
    if "windows" in asked:
        out.windows = _events(asked["windows"], MaintenanceBegun)
    if "requests" in asked:
        out.requests = _events(asked["requests"], OperatorRequest)
    if "targets" in asked:
        out.targets = _events(asked["targets"], LoadTargetSet)
    out.returned = _instants(asked.get("returned"))
    return out


def _instants(pairs: Any) -> dict[str, int]:
    """Return the well-formed names and instants."""
    try:
        rows = msgspec.convert(pairs or [], list[tuple[str, int]])
    except msgspec.ValidationError as error:
        log.warning("the returns in the former leader's handover cannot be read: %s", error)
        return {}
    return {name: at_ns for name, at_ns in rows if 0 < at_ns < 2**63}


def _packed(asked: dict[str, Any]) -> str:
    # Not msgspec's JSON: a bound may be infinite.
    text = json.dumps({kind: [msgspec.to_builtins(e) for e in events] for kind, events in asked.items()})
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode("ascii")


def _unpacked(text: Any) -> str:
    if not isinstance(text, str) or not text:
        return ""
    try:
        return zlib.decompressobj().decompress(base64.b85decode(text), MAX_ASKED_BYTES).decode()
    except (ValueError, zlib.error) as error:
        log.warning("the requests in the former leader's handover cannot be read: %s", error)
        return ""


def _object(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _events(trees: Any, kind: type[E]) -> list[E]:
    out: list[E] = []
    for tree in trees if isinstance(trees, list) else []:
        try:
            out.append(msgspec.convert(tree, kind))
        except msgspec.ValidationError as error:
            log.warning("a request in the former leader's handover cannot be read: %s", error)
    return out


def targets_after(left: Sequence[LoadTargetSet] | None, own: Sequence[LoadTargetSet]) -> list[Event]:
    """Events that turn the load targets `own` into those of the former leader, `left`; None: unknown, no
    event.
    """
    if left is None:
        return []
    present, known = {o.target: o for o in own}, {t.target for t in left}
    out: list[Event] = [
        # Without its id: it counts, whatever became of one with this id here
        msgspec.structs.replace(target, id="")
        for target in left
        if target.target not in present or (_by_operators(target) and present[target.target] != target)
    ]
    out += [
        LoadTargetWithdrawn(author="takeover", target=name)
        for name, target in present.items()
        if name not in known and _by_operators(target)
    ]
    return out


def _by_operators(target: LoadTargetSet) -> bool:
    return target.author != AUTHOR and not target.author.startswith("//grid/")
