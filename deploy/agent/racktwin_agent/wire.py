"""Parser of the messages that an agent receives: requests and contingency plans. Pure.

Any input gives a Request, a Plan or Refused with a reason; nothing is guessed or repaired. Imports nothing
of the agent.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_BYTES = 2**20
MAX_NAMES = 8192
MAX_TEXT = 500
MAX_EPOCH = 2**53
TRIGGERS = ("psu_lost", "power_brake", "broker_gone")
MAX_HOLD_S = 86_400.0


class Refused(Exception):
    """A message that the agent does not execute, with the reason."""


@dataclass(frozen=True, slots=True)
class Order:
    """One line of a request: the value for one device of the node, and the value after the lease."""

    name: str  # relative to the node; "" is the node itself
    generation: int
    command: int
    value: float
    lapse: float | None


@dataclass(frozen=True, slots=True)
class Request:
    """The leases of one control for the devices of one rack, by node name within the rack."""

    control: str
    policy: str
    epoch: int
    issued_ns: int
    expires_ns: int
    renewal: bool
    final: bool
    reason: str
    orders: dict[str, list[Order]]
    deadline_ns: int = 0  # nobody waits any more for what is not begun by then; 0: not said

    @property
    def span_ns(self) -> int:
        """Return the duration of the lease that the sender intended, ns."""
        return self.expires_ns - self.issued_ns


@dataclass(frozen=True, slots=True)
class Plan:
    """Caps for a local trigger, by node name within the rack and then by name within the node."""

    epoch: int
    issued_ns: int
    expires_ns: int
    triggers: tuple[str, ...]
    hold_s: float
    caps: dict[str, dict[str, float]]


def read_request(control: str, rack: str, payload: bytes) -> Request:
    """Return a request from the topic of this control and rack. Raises Refused."""
    body = _object(payload, rack)
    if body.get("control") != control:
        raise Refused(f"speaks of {str(body.get('control'))[:80]!r} on the topic of {control}")
    issued, expires = _whole(body, "issued_ns", 2**62), _whole(body, "expires_ns", 2**62)
    names = _names(body)
    generations, commands = _column(body, "generations", names), _column(body, "commands", names)
    values, lapses = _column(body, "values", names), _column(body, "lapse", names)
    orders: dict[str, list[Order]] = {}
    for i, name in enumerate(names):
        node, _, rest = name.partition("/")
        orders.setdefault(node, []).append(
            Order(
                rest,
                _int(generations[i], "generations", 2**31),
                _int(commands[i], "commands", 2**62),
                _number(values[i], "values"),
                None if lapses[i] is None else _number(lapses[i], "lapse"),
            )
        )
    return Request(
        control,
        _text(body, "policy"),
        _whole(body, "epoch", MAX_EPOCH),
        issued,
        expires,
        _flag(body, "renewal"),
        _flag(body, "final"),
        _text(body, "reason"),
        orders,
        _int(body.get("deadline_ns", 0), "deadline_ns", 2**62),
    )


def read_plan(rack: str, payload: bytes) -> Plan:
    """Return a contingency plan from the topic of this rack. Raises Refused."""
    body = _object(payload, rack)
    names = _names(body)
    caps = _column(body, "caps_w", names)
    triggers = body.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(t in TRIGGERS for t in triggers):
        raise Refused(f"triggers: expected some of {', '.join(TRIGGERS)}")
    hold = _number(body.get("hold_s"), "hold_s")
    if not 0 <= hold <= MAX_HOLD_S:
        raise Refused(f"hold_s {hold:g}: expected 0 to {MAX_HOLD_S:g}")
    by_node: dict[str, dict[str, float]] = {}
    for name, cap in zip(names, caps, strict=True):
        node, _, rest = name.partition("/")
        by_node.setdefault(node, {})[rest] = _number(cap, "caps_w")
    return Plan(
        _whole(body, "epoch", MAX_EPOCH),
        _whole(body, "issued_ns", 2**62),
        _whole(body, "expires_ns", 2**62),
        tuple(dict.fromkeys(triggers)),
        hold,
        by_node,
    )


def _object(payload: bytes, rack: str) -> dict[str, Any]:
    if len(payload) > MAX_BYTES:
        raise Refused(f"{len(payload)} bytes; expected at most {MAX_BYTES}")
    try:
        body = json.loads(payload, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict) or body.get("v") != 1 or isinstance(body.get("v"), bool):
        raise Refused("expected an object with v: 1")
    if (path := body.get("path", rack)) != rack:
        raise Refused(f"speaks of {str(path)[:200]!r} on the topic of {rack}")
    return body


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _names(body: dict[str, Any]) -> list[str]:
    names = body.get("names")
    if not isinstance(names, list) or len(names) > MAX_NAMES:
        raise Refused(f"names: expected a list of at most {MAX_NAMES}")
    for name in names:
        if not isinstance(name, str) or len(name) > 128:
            raise Refused("names: expected short texts")
        if (
            name.startswith("/")
            or name.endswith("/")
            or any(p in ("", ".", "..") for p in name.split("/") if name)
        ):
            raise Refused(f"names: {name[:80]!r} does not lie below the rack")
    if len(set(names)) != len(names):
        raise Refused("names: one comes twice")
    return names


def _column(body: dict[str, Any], key: str, names: list[str]) -> list[Any]:
    column = body.get(key)
    if not isinstance(column, list) or len(column) != len(names):
        raise Refused(f"{key}: expected a list as long as names ({len(names)})")
    return column


def _whole(body: dict[str, Any], key: str, below: int) -> int:
    return _int(body.get(key), key, below)


def _int(value: Any, key: str, below: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise Refused(f"{key}: expected a whole number from 0 to {below}")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e12:
        raise Refused(f"{key}: expected a number")
    if not math.isfinite(value):
        raise Refused(f"{key}: expected a finite number")
    return float(value)


def _flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise Refused(f"{key}: expected true or false")
    return value


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key, "")
    if not isinstance(value, str):
        raise Refused(f"{key}: expected a text")
    return value[:MAX_TEXT]
