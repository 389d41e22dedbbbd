"""Journal texts: a record of the running daemon as a sentence with its numbers and reason.

A record may hold columns for a hundred thousand devices; here it becomes a count, a range, the first names.
Text from outside is made safe.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from twin.api.runtime import JournalLine
from twin.catalogue import NS, clean, find_control, utc
from twin.contracts import (
    AccountRecord,
    AdviceRecord,
    Bound,
    ClearedRecord,
    CommandRecord,
    DaemonRecord,
    DeferredRecord,
    EventRecord,
    FailedRecord,
    FaultsRecord,
    FindingRecord,
    JournalRecord,
    KeptBackRecord,
    LapsedRecord,
    LeaderRecord,
    MarkRecord,
    NarrowedRecord,
    OtherRecord,
    ProposalChange,
    ProposalsRecord,
    ProtectedRecord,
    RenewalRecord,
    ReportsRecord,
    SettlingRecord,
    fields_of,
)
from twin.report import account_words
from twin.site import Site
from twin.telemetry import Event

INSTANTS = frozenset({"job.checkpoint_since_s"})  # controls whose value is an instant, s since 1970 UTC
SHOWN_NAMES = 2
MAX_TEXT = 400
MAX_ITEMS = 20  # of a mapping within a record, and of its proposals
MAX_LISTED = 65  # of a list; the journal shortens names to 64 and "and 9 more"
MAX_DEPTH = 4


def line_of(
    line: JournalLine, site: Site, about: tuple[str, int, str] | None = None, control: str | None = None
) -> dict[str, Any] | None:
    """A line for an answer; None if not about the entity (table, index, path) or the control asked for."""
    record = line.record
    if control is not None and control not in _controls(record):
        return None
    if about is not None and not _concerns(record, site, *about):
        return None
    return {
        "kind": record.kind,
        "tick": line.tick,
        "now_ns": line.now_ns,
        "text": clean(sentence(record, site), MAX_TEXT),
        "body": brief(record, site),
    }


def is_about(line: JournalLine, site: Site, about: tuple[str, int, str]) -> bool:
    """Return True if a line concerns an entity (table, index, path)."""
    return _concerns(line.record, site, *about)


def _controls(record: JournalRecord | OtherRecord) -> list[str]:
    if isinstance(record, ProposalsRecord):
        return [p.control for p in record.proposals]
    return [getattr(record.event if isinstance(record, EventRecord) else record, "control", "")]


def _concerns(record: JournalRecord | OtherRecord, site: Site, table: str, row: int, path: str) -> bool:
    """Return True if a record is about an entity: by index in columns, by path elsewhere."""
    for part in record.proposals if isinstance(record, ProposalsRecord) else (record,):
        if getattr(part, "control", "").partition(".")[0] != table:
            continue
        names = getattr(part, "names", ())
        if path in names:
            return True
        if table == "job" and names:
            continue  # by their own names: a slot may have had another job then
        for column in (getattr(part, "index", None), getattr(part, "gone", None)):
            if column is not None and row in column:
                return True
    source = record.event if isinstance(record, EventRecord) else record
    listed = [n for field in ("names", "nodes", "entities") for n in getattr(source, field, ())]
    named = [n for n in (*listed, getattr(source, "name", "")) if isinstance(n, str) and n]
    if path in named:
        return True
    local = any(path.endswith("/" + n) for n in named)
    return local and any(site.entity(table, n) == row for n in named)


def brief(record: msgspec.Struct, site: Site) -> dict[str, Any]:
    """A record without its long columns: how many, the first names, from what to what."""
    spec = find_control(getattr(record, "control", ""))
    out: dict[str, Any] = {}
    for name, value in fields_of(record).items():
        if isinstance(value, Bound):
            value = value.value
        if isinstance(value, np.ndarray):
            if name in ("index", "gone") and spec is not None:
                out["count" if name == "index" else "gone_count"] = len(value)
                out["names" if name == "index" else "gone_names"] = _first_names(value, spec.table, site)
            elif value.dtype.kind in "fiu" and value.size:
                out[name] = _span(value)
            else:
                out[name] = int(value.size)
        elif name == "proposals" and isinstance(record, ProposalsRecord):
            out[name] = [brief(p, site) for p in value[:MAX_ITEMS]]
        else:
            out[name] = _bounded(value)
    return out


def _first_names(index: np.ndarray, table: str, site: Site) -> list[str]:
    first = [int(i) for i in index[:SHOWN_NAMES]]
    return [site.name(table, i) for i in first if i < site.sizes[table]]


def _span(values: np.ndarray) -> Any:
    """A number, {min, max} of several, or None."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    return low if low == high else {"min": low, "max": high}


def _bounded(value: Any, depth: int = 0) -> Any:
    """Plain data of bounded size; text from outside on one line."""
    if isinstance(value, str):
        return clean(value, MAX_TEXT)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {clean(k): _bounded(v, depth + 1) for k, v in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_bounded(v, depth + 1) for v in value[:MAX_LISTED]]
    if isinstance(value, np.ndarray):
        return [_bounded(v, depth + 1) for v in value[:MAX_ITEMS].tolist()]
    return clean(str(value), MAX_TEXT)


def sentence(record: JournalRecord | OtherRecord, site: Site) -> str:
    """A record as a sentence; one without a sentence of its own, field by field."""
    match record:
        case CommandRecord() | AdviceRecord():
            verb = "commands" if isinstance(record, CommandRecord) else "would command"
            value = f"{record.control} {_number(_span(record.value), record.control)}"
            return f"{record.policy} {verb} {value} for {_who(record, site)}: {record.reason}"
        case FaultsRecord():
            return f"{record.count} more faults {record.code} of a {record.table} in this tick"
        case ReportsRecord() if record.refused:
            return f"{record.count} more reports of jobs refused in this tick"
        case ReportsRecord():
            return f"jobs reported on {record.count} checkpoints, {record.tier}"
        case RenewalRecord():
            return f"{record.control} of {record.count} renewed: {record.reason}"
        case LapsedRecord():
            return f"{record.control} of {_who(record, site)} lapsed; becomes {record.becomes}"
        case FailedRecord():
            return f"failed {record.control} of {_who(record, site)}: {record.why}"
        case DeferredRecord() | NarrowedRecord() | ProtectedRecord():
            policy = getattr(record, "policy", "")
            by = f"{policy}: " if policy else ""
            return f"{by}{record.kind} {record.control} of {record.count}: {record.why}"
        case FindingRecord():
            said = list(record.evidence)
            if record.entities:
                said.append(_few(list(record.entities), record.count or 0))
            return f"{record.severity}: {record.title}" + (f"; {'; '.join(said)}" if said else "")
        case ClearedRecord():
            if record.superseded_by:
                return f"superseded: {record.id}, by {record.superseded_by.rpartition('/')[2]}"
            return f"over: {record.id}"
        case DaemonRecord(started=str(), resumed_at=int() as last):
            begun = "a new run" if last < 0 else f"goes on after tick {last}"
            faults = f"; mended: {'; '.join(record.faults)}" if record.faults else ""
            return f"the daemon started (racktwin {record.started}): {begun}{faults}"
        case LeaderRecord(lost=int()):
            return f"leads no longer (it did with epoch {record.lost})"
        case LeaderRecord(epoch=int()):
            after = f", after {record.predecessor}" if record.predecessor else ""
            adopts = "; adopts what it finds commanded" if record.adopt else ""
            return f"leads with epoch {record.epoch}{after}{adopts}"
        case KeptBackRecord():
            return f"kept back {record.control} of {record.count} under {record.window}: {record.why}"
        case SettlingRecord():
            return f"{record.why} (epoch {record.epoch})"
        case EventRecord():
            return _event(record.event) + (f"; refused: {record.refused}" if record.refused else "")
        case ProposalsRecord():
            changes = (_proposal(p, site) for p in record.proposals[:MAX_ITEMS])
            return f"{record.policy} proposes: " + ("; ".join(changes) or "nothing")
        case AccountRecord():
            about = record.account
            named = " ".join(str(about[k]) for k in ("what", "node") if k in about)
            return f"{record.policy}: {named}: {account_words(about)}"
        case MarkRecord():
            return "check of the state"
        case _:
            return ", ".join(_said(k, v) for k, v in brief(record, site).items())


def _said(name: str, value: Any) -> str:
    """One field of a record that has no sentence of its own."""
    if isinstance(value, list):
        return f"{name} {_few(value, len(value)) if value else 'none'}"
    if name.endswith("_ns") and isinstance(value, int):
        return f"{name[:-3]} {_instant(value)}"
    return f"{name} {'none' if value in ('', None, {}) else value}"


def _instant(now_ns: int) -> str:
    try:
        text = datetime.fromtimestamp(now_ns / NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "?"
    return text if now_ns > 0 else "never"


def _proposal(p: ProposalChange, site: Site) -> str:
    if p.index is None or not len(p.index) or p.lo is None or p.hi is None:
        return f"{p.control} of {0 if p.gone is None else len(p.gone)} let go"
    return f"{p.control} {_interval(_side(p.lo), _side(p.hi), p.control)} for {_who(p, site)}: {p.reason}"


def _side(bound: Bound) -> Any:
    return _span(bound.value) if isinstance(bound.value, np.ndarray) else bound.value


def _interval(low: Any, high: Any, control: str) -> str:
    """An interval in words; an infinite bound is none."""
    if low in (None, -math.inf):
        return "any" if high in (None, math.inf) else f"at most {_number(high, control)}"
    if high in (None, math.inf):
        return f"at least {_number(low, control)}"
    first, last = _number(low, control), _number(high, control)
    return first if first == last else f"{first} to {last}"


def _event(event: Event) -> str:
    author, reason = getattr(event, "author", ""), getattr(event, "reason", "")
    rest = {k: _bounded(v) for k, v in fields_of(event).items() if k not in ("author", "id", "reason")}
    if "lo" in rest and "hi" in rest:
        key = str(rest.pop("control", ""))
        rest = {"bounds": f"{key} {_interval(rest.pop('lo'), rest.pop('hi'), key)}", **rest}
    said = [_said(k, v) for k, v in rest.items()]
    text = type(event).__name__ + (f" by {author}" if author else "")
    text += f": {', '.join(said)}" if said else ""
    return text + (f" ({reason})" if reason else "")


def _who(record: Any, site: Site) -> str:
    """The first entities of a column, by the record's own names where it has them."""
    table = record.control.partition(".")[0]
    names = list(record.names) or _first_names(record.index, table, site)
    return _few(names, len(record.index)) if names else str(len(record.index))


def _few(names: list[str], count: int) -> str:
    shown = [str(n) for n in names[:SHOWN_NAMES]]
    more = max(count, len(names)) - len(shown)
    if more > 0 and (cut := re.fullmatch(r"and (\d+) more", str(names[-1]))):  # as the journal shortens it
        more += int(cut[1]) - 1
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _number(value: Any, control: str) -> str:
    spec = find_control(control)
    if isinstance(value, dict):
        return f"{_number(value['min'], control)} to {_number(value['max'], control)}"
    if not isinstance(value, int | float):
        return "any" if value is None else str(value)
    if spec is not None and spec.states and 0 <= value < len(spec.states):
        return spec.states[int(value)]
    if control in INSTANTS:
        return f"{utc(round(value) * NS)} UTC"
    unit = f" {spec.unit}" if spec is not None and spec.unit not in ("state", "1") else ""
    return f"{value:g}{unit}"
