"""Journal records as the plain data that stands on disk, but for columns, which stay arrays."""

from __future__ import annotations

from typing import Any

import msgspec

from twin.contracts import Bound, Decision, JournalRecord, ProposalChange, fields_of


def body_of(record: JournalRecord) -> dict[str, Any]:
    """A record with its kind as a dict."""
    return {"kind": record.kind, **_plain_fields(record)}


def bodies_of(decision: Decision) -> list[dict[str, Any]]:
    """All records of a tick as dicts."""
    return [body_of(record) for record in decision.records]


def _plain_fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: _plain(value) for name, value in fields_of(struct).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, ProposalChange):
        return _plain_fields(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Bound):
        return value.value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
