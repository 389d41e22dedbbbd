"""Payload of Sparkplug B: its schema in code, read by `protobuf`, with numbers by their datatypes.

Of the schema only what is read is described; other fields of the wire are passed over. Pure functions of
bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from twin.catalogue import BadMessage

MAX_PAYLOAD = 8 * 2**20
MAX_METRICS = 20_000
_FIELD = descriptor_pb2.FieldDescriptorProto
# Field numbers of Eclipse Sparkplug 3.0, chapter 6.4
_METRIC = (
    ("name", 1, _FIELD.TYPE_STRING), ("alias", 2, _FIELD.TYPE_UINT64), ("timestamp", 3, _FIELD.TYPE_UINT64),
    ("datatype", 4, _FIELD.TYPE_UINT32), ("is_null", 7, _FIELD.TYPE_BOOL),
    ("int_value", 10, _FIELD.TYPE_UINT32), ("long_value", 11, _FIELD.TYPE_UINT64),
    ("float_value", 12, _FIELD.TYPE_FLOAT), ("double_value", 13, _FIELD.TYPE_DOUBLE),
    ("boolean_value", 14, _FIELD.TYPE_BOOL), ("string_value", 15, _FIELD.TYPE_STRING),
)  # fmt: skip
_PAYLOAD = (("timestamp", 1, _FIELD.TYPE_UINT64), ("seq", 3, _FIELD.TYPE_UINT64))
_VALUES = tuple(name for name, number, _ in _METRIC if number >= 10)
# Datatype -> bits of a signed integer: on the wire two's complement in an unsigned field
_SIGNED = {1: 8, 2: 16, 3: 32, 4: 64}
_UNSIGNED = {5: 8, 6: 16, 7: 32, 8: 64}
_KNOWN = frozenset((*_SIGNED, *_UNSIGNED, 9, 10, 11, 12, 13, 14))  # float, double, boolean, text, instant


class Metric(NamedTuple):
    """One metric: by name, alias or both; `datatype` 0 if the payload gives none."""

    name: str
    alias: int | None
    t_ms: int | None
    datatype: int
    raw: float | int | str | bool | None  # as on the wire; None: null, or neither number nor text

    def value(self, datatype: int) -> float | int | str | bool | None:
        """Return the value by its datatype; None for one without a signal."""
        if self.raw is None or datatype not in _KNOWN:
            return None
        if isinstance(self.raw, int) and not isinstance(self.raw, bool) and datatype in _SIGNED:
            bits = _SIGNED[datatype]
            low = self.raw & ((1 << bits) - 1)
            return low - (1 << bits) if low >> (bits - 1) else low
        if isinstance(self.raw, int) and not isinstance(self.raw, bool) and datatype in _UNSIGNED:
            return self.raw & ((1 << _UNSIGNED[datatype]) - 1)
        return self.raw


class Payload(NamedTuple):
    """A payload: `seq` is None where it has none (a death of a node)."""

    t_ms: int | None
    seq: int | None
    metrics: list[Metric]


def _described() -> Any:
    """Return the class of the payload, from a description built here."""
    file = descriptor_pb2.FileDescriptorProto(
        name="racktwin/payload.proto", package="racktwin", syntax="proto2"
    )
    payload = file.message_type.add(name="Payload")
    metric = payload.nested_type.add(name="Metric")
    for message, fields in ((metric, _METRIC), (payload, _PAYLOAD)):
        for name, number, kind in fields:
            message.field.add(name=name, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL)
    payload.field.add(
        name="metrics",
        number=2,
        type=_FIELD.TYPE_MESSAGE,
        label=_FIELD.LABEL_REPEATED,
        type_name=".racktwin.Payload.Metric",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("racktwin.Payload"))


_Wire = _described()


def read_payload(data: bytes) -> Payload:
    """Return the payload of a message. Raises BadMessage."""
    if len(data) > MAX_PAYLOAD:
        raise BadMessage(f"{len(data)} bytes; expected at most {MAX_PAYLOAD}")
    try:
        wire = _Wire.FromString(data)
    except (DecodeError, ValueError, RuntimeError) as error:
        raise BadMessage(f"not a Sparkplug B payload: {str(error)[:100]}") from error
    if len(wire.metrics) > MAX_METRICS:
        raise BadMessage(f"{len(wire.metrics)} metrics; expected at most {MAX_METRICS}")
    metrics = [_metric(m) for m in wire.metrics]
    return Payload(
        wire.timestamp if wire.HasField("timestamp") else None,
        wire.seq if wire.HasField("seq") else None,
        metrics,
    )


def _metric(wire: Any) -> Metric:
    raw = None
    if not wire.is_null:
        # the last of several on the wire is the one that counts; a sender has only one
        raw = next((getattr(wire, name) for name in _VALUES if wire.HasField(name)), None)
    return Metric(
        wire.name,
        wire.alias if wire.HasField("alias") else None,
        wire.timestamp if wire.HasField("timestamp") else None,
        wire.datatype,
        raw,
    )


def rebirth(t_ms: int) -> bytes:
    """Return the payload by which a host requests an edge node's births (Sparkplug 3.0, chapter 6.4.20)."""
    metric = {"name": "Node Control/Rebirth", "timestamp": t_ms, "datatype": 11, "boolean_value": True}
    payload: bytes = _Wire(timestamp=t_ms, metrics=[metric]).SerializeToString()
    return payload
