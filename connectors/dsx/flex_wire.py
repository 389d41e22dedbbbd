"""Wire format of DSX Flex: decodes and encodes CloudEvents in JSON with payloads of load targets. Pure.

Times are ISO 8601 with an offset; power has a unit of its own. A fault of one target is kept with that
target. Facts: dsx-flex.yaml 1.7.0 of the DSX exchange, read and not copied.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec

from twin.catalogue import NS, BadMessage

ISV, AGENT = "//grid/v1/isv/", "//grid/v1/dsx-flex-agent/"
SET, STATUS, BREACH = "grid.loadtarget.set.v1", "grid.powerstate.status.v1", "grid.powerbreach.alert.v1"
SPEC = "1.0.2"
MAX_PAYLOAD = 2**20
MAX_TARGETS, MAX_TAGS = 1_000, 1_000  # of one message; of one target
MAX_W = 1e11
UNITS = {"watt": 1.0, "kilowatt": 1e3, "megawatt": 1e6}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """A CloudEvent: `data` is a JWS, or JSON as it came; `correlation` falls back on the id."""

    id: str
    source: str
    type: str
    time_ns: int
    correlation: str
    traceparent: str
    tracestate: str
    data: str | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEntry:
    """One target of a message: `limit_w` None removes; no `feeds`: all; `fault`: reason of a rejection."""

    number: int
    start_ns: int
    end_ns: int | None
    limit_w: float | None
    feeds: tuple[str, ...]
    best_effort: bool
    fault: str


class _Wire(msgspec.Struct):
    specversion: str
    id: str
    source: str
    type: str
    time: str
    data: msgspec.Raw
    datacontenttype: str = "application/json"
    correlationid: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class _Interval(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None


class _Constraint(msgspec.Struct):
    value: float
    unit: Literal["watt", "kilowatt", "megawatt"]


class _Strategy(msgspec.Struct):
    best_effort: bool = False


class _Target(msgspec.Struct):
    interval: _Interval
    load_constraint: _Constraint | None
    feed_tags: list[str] | None = None
    strategy: _Strategy | None = None


class Data(msgspec.Struct):
    """The payload of a load target's message."""

    targets: list[_Target]


_ENVELOPE, _DATA = msgspec.json.Decoder(_Wire), msgspec.json.Decoder(Data)


def decode_envelope(payload: bytes) -> CloudEvent:
    """Return the attributes of a CloudEvent. Raises BadMessage for one outside this contract."""
    try:
        wire = _ENVELOPE.decode(payload)
        raw = bytes(wire.data)
        data: str | bytes = msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a CloudEvent of DSX Flex: {str(error)[:200]}") from None
    if wire.specversion not in ("1.0", SPEC):  # CloudEvents' own text has 1.0, this contract 1.0.2
        raise BadMessage(f"specversion {wire.specversion[:20]!r}; expected {SPEC}")
    if wire.datacontenttype != "application/json":
        raise BadMessage(f"datacontenttype {wire.datacontenttype[:60]!r}; expected application/json")
    if not _UUID.fullmatch(wire.id):
        raise BadMessage(f"id {wire.id[:60]!r}; expected a UUID, so that a repeated delivery counts once")
    if wire.correlationid is not None and not _UUID.fullmatch(wire.correlationid):
        raise BadMessage(f"correlationid {wire.correlationid[:60]!r}; expected a UUID, or none")
    trace = wire.traceparent or ""
    is_traced = _TRACE.fullmatch(trace) is not None
    return CloudEvent(
        id=wire.id.lower(),
        source=wire.source,
        type=wire.type,
        time_ns=instant_ns(wire.time, "time"),
        correlation=(wire.correlationid or wire.id).lower(),
        traceparent=trace if is_traced else "",
        tracestate=(wire.tracestate or "")[:512] if is_traced else "",
        data=data,
    )


def decode_data(payload: bytes) -> Data:
    """Return the targets of a payload. Raises BadMessage."""
    try:
        data = _DATA.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"data: not a list of load targets: {str(error)[:200]}") from None
    if not 0 < len(data.targets) <= MAX_TARGETS:
        raise BadMessage(f"data: {len(data.targets)} targets; expected 1 to {MAX_TARGETS}")
    return data


def entries_of(data: Data, now_ns: int) -> list[TargetEntry]:
    """Return the targets of a payload in watts and ns; a rejected target has its `fault`."""
    return [_entry(n, target, now_ns) for n, target in enumerate(data.targets)]


def _entry(number: int, target: _Target, now_ns: int) -> TargetEntry:
    given, tags = target.load_constraint, target.feed_tags or []
    limit_w = None if given is None else given.value * UNITS[given.unit]
    start_ns, end_ns, fault = now_ns, None, ""
    try:
        if target.interval.start_time is not None:
            start_ns = instant_ns(target.interval.start_time, "start_time")
        if target.interval.end_time is not None:
            end_ns = instant_ns(target.interval.end_time, "end_time")
    except BadMessage as error:
        fault = str(error)
    if limit_w is not None and not 0 < limit_w <= MAX_W:
        fault = f"load_constraint of {limit_w:g} W; expected more than 0, at most {MAX_W:g}"
    elif end_ns is not None and end_ns <= start_ns and not fault:
        fault = "ends before it begins" if end_ns > now_ns else "over already"
    elif len(tags) > MAX_TAGS or any(not 0 < len(tag) <= 200 for tag in tags):
        fault = f"feed_tags: expected at most {MAX_TAGS}, of 1 to 200 characters"
    effort = target.strategy.best_effort if target.strategy is not None else False
    return TargetEntry(
        number=number,
        start_ns=start_ns,
        end_ns=end_ns,
        limit_w=limit_w,
        feeds=tuple(tags),
        best_effort=effort,
        fault=fault,
    )


def instant_ns(text: str, what: str) -> int:
    """Return ISO 8601 with an offset as ns since 1970. Raises BadMessage."""
    try:
        instant = datetime.fromisoformat(text) if len(text) <= 40 else None
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None or not 1971 <= instant.year <= 2200:
        raise BadMessage(
            f"{what} {text[:40]!r}; expected ISO 8601 with an offset, such as 2026-11-22T06:00:00Z"
        )
    whole = instant.astimezone(UTC)
    seconds = int(whole.replace(microsecond=0).timestamp())
    return seconds * NS + whole.microsecond * 1000


def text_of(t_ns: int) -> str:
    """Return an instant as ISO 8601 in UTC, to the millisecond."""
    seconds, rest = divmod(t_ns, NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 10**6:03d}Z"


def watts(value_w: float) -> dict[str, Any]:
    """Return a power in the form of the wire."""
    return {"value": round(max(value_w, 0.0), 1) if math.isfinite(value_w) else 0.0, "unit": "watt"}


class EventCause(NamedTuple):
    """The message that an event answers: its correlation id, traceparent and tracestate."""

    correlation: str = ""
    traceparent: str = ""
    tracestate: str = ""


def encode_event(
    kind: str, source: str, subject: str, now_ns: int, data: Any, cause: EventCause | None = None
) -> bytes:
    """Return a CloudEvent. `data` is a JWS or plain."""
    cause = cause or EventCause()
    attributes: dict[str, Any] = {
        "specversion": SPEC,
        "id": str(uuid.uuid4()),
        "source": source,
        "type": kind,
        "time": text_of(now_ns),
        "datacontenttype": "application/json",
        "subject": subject,
        "traceparent": child_of(cause.traceparent),
    }
    if cause.traceparent and cause.tracestate:
        attributes["tracestate"] = cause.tracestate
    if cause.correlation:
        attributes["correlationid"] = cause.correlation
    return msgspec.json.encode(attributes | {"data": data})


def child_of(traceparent: str) -> str:
    """Return a traceparent of the same trace with a new span; a new trace without one."""
    span = uuid.uuid4().hex[:16]
    if _TRACE.fullmatch(traceparent):
        version, trace, _, flags = traceparent.split("-")
        return f"{version}-{trace}-{span}-{flags}"
    return f"00-{uuid.uuid4().hex}-{span}-00"


def plain(tree: Mapping[str, Any]) -> bytes:
    """Return a payload in its signed form: JSON without spaces."""
    return msgspec.json.encode(tree)
