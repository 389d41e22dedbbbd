"""Journal texts: a record of the journal as one sentence with its numbers and reason.

The interface and `racktwin journal show` use the same sentences. A record may hold columns for a hundred
thousand devices; here they become a count, a range and the first names. Text from outside is made safe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from twin.catalogue import clean, control_value, find_control, utc
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
    StoryRecord,
    UpkeepRecord,
    fields_of,
)
from twin.report.replacement_history import account_words
from twin.site import Site
from twin.telemetry import Event

SHOWN_NAMES = 3
MAX_TEXT = 400
MAX_ITEMS = 20  # of a mapping within a record, and of its proposals
MAX_LISTED = 65  # of a list; the journal shortens names to 64 and "and 9 more"
MAX_DEPTH = 4


def sentence(record: JournalRecord | OtherRecord, site: Site | None = None) -> str:
    """A record as a sentence; one without a sentence of its own, field by field.

    With a site, entities that a record gives by index alone are named.
    """
    match record:
        case CommandRecord() | AdviceRecord():
            value = control_value(_range(record.value), record.control)
            target = f"{record.control} {value} for {_entities(record, site)}"
            if isinstance(record, AdviceRecord):
                return f"{record.policy} would command {target}: {record.reason}"
            end = utc(record.expires_ns, "%H:%M:%S")
            return f"{record.policy} commands {target} until {end} UTC: {record.reason}"
        case FaultsRecord():
            return f"{record.count} more faults {record.code} of a {record.table} in this tick"
        case ReportsRecord() if record.refused:
            return f"{record.count} more reports of jobs refused in this tick"
        case ReportsRecord():
            return f"jobs reported on {record.count} checkpoints, {record.tier}"
        case RenewalRecord():
            return f"{record.control} of {record.count} renewed: {record.reason}"
        case LapsedRecord():
            return f"{record.control} of {_entities(record, site)} lapsed; becomes {record.becomes}"
        case FailedRecord():
            return f"failed {record.control} of {_entities(record, site)}: {record.why}"
        case DeferredRecord() | NarrowedRecord() | ProtectedRecord():
            policy = getattr(record, "policy", "")
            by = f"{policy}: " if policy else ""
            return f"{by}{record.kind} {record.control} of {record.count}: {record.why}"
        case FindingRecord():
            entities = few(record.entities, record.count or 0) if record.entities else ""
            parts = (f"{record.severity}: {record.title}", *record.evidence, entities, record.action)
            return "; ".join(part for part in parts if part)
        case ClearedRecord():
            if record.superseded_by:
                return f"superseded: {record.id}, by {record.superseded_by.rpartition('/')[2]}"
            return f"over: {record.id}"
        case KeptBackRecord():
            return f"kept back {record.control} of {record.count} under {record.window}: {record.why}"
        case EventRecord():
            return _event(record.event) + (f"; refused: {record.refused}" if record.refused else "")
        case ProposalsRecord():
            changes = (_proposal(p, site) for p in record.proposals[:MAX_ITEMS])
            return f"{record.policy} proposes: " + ("; ".join(changes) or "nothing")
        case AccountRecord():
            account = record.account
            named = " ".join(str(account[k]) for k in ("what", "node") if k in account)
            return f"{record.policy}: {named}: {account_words(account)}"
        case _:
            return _of_the_run(record) or ", ".join(_field(k, v) for k, v in brief(record, site).items())


def _of_the_run(record: JournalRecord | OtherRecord) -> str:
    """The sentence of a record on the run itself; empty for any other."""
    match record:
        case StoryRecord():
            return f"story, {record.chapter} of {record.of}, {record.title}: {record.text}"
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
        case SettlingRecord():
            return f"{record.why} (epoch {record.epoch})"
        case MarkRecord():
            return f"check of {len(record.state)} signals"
        case UpkeepRecord(pruned=tuple() as pruned) if pruned:
            return f"pruned {len(pruned)} journal segments up to {pruned[-1].file}"
        case _:
            return ""


def brief(record: msgspec.Struct, site: Site | None = None) -> dict[str, Any]:
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
                out[name] = _range(value)
            else:
                out[name] = int(value.size)
        elif name == "proposals" and isinstance(record, ProposalsRecord):
            out[name] = [brief(p, site) for p in value[:MAX_ITEMS]]
        else:
            out[name] = _bounded(value)
    return out


def few(names: Sequence[str], count: int) -> str:
    """The first names of `count`, and how many more; the last may be the journal's own "and 9 more"."""
    shown = [str(n) for n in names[:SHOWN_NAMES]]
    more = max(count, len(names)) - len(shown)
    if more > 0 and (cut := re.fullmatch(r"and (\d+) more", str(names[-1]))):
        more += int(cut[1]) - 1
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _first_names(index: np.ndarray, table: str, site: Site | None) -> list[str]:
    if site is None:
        return []
    first = [int(i) for i in index[:SHOWN_NAMES]]
    return [site.name(table, i) for i in first if i < site.sizes[table]]


def _range(values: np.ndarray) -> Any:
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


def _field(name: str, value: Any) -> str:
    """One field of a record that has no sentence of its own."""
    if isinstance(value, list):
        return f"{name} {few(value, len(value)) if value else 'none'}"
    if name.endswith("_ns") and isinstance(value, int):
        return f"{name[:-3]} {utc(value) + ' UTC' if value > 0 else 'never'}"
    return f"{name} {'none' if value in ('', None, {}) else value}"


def _proposal(p: ProposalChange, site: Site | None) -> str:
    if p.index is None or not len(p.index) or p.lo is None or p.hi is None:
        return f"{p.control} of {0 if p.gone is None else len(p.gone)} let go"
    interval = _interval(_side(p.lo), _side(p.hi), p.control)
    return f"{p.control} {interval} for {_entities(p, site)}: {p.reason}"


def _side(bound: Bound) -> Any:
    return _range(bound.value) if isinstance(bound.value, np.ndarray) else bound.value


def _interval(low: Any, high: Any, control: str) -> str:
    """An interval in words; an infinite bound is none."""
    if low in (None, -math.inf):
        return "any" if high in (None, math.inf) else f"at most {control_value(high, control)}"
    if high in (None, math.inf):
        return f"at least {control_value(low, control)}"
    first, last = control_value(low, control), control_value(high, control)
    return first if first == last else f"{first} to {last}"


def _event(event: Event) -> str:
    author, reason = getattr(event, "author", ""), getattr(event, "reason", "")
    rest = {k: _bounded(v) for k, v in fields_of(event).items() if k not in ("author", "id", "reason")}
    if "lo" in rest and "hi" in rest:
        key = str(rest.pop("control", ""))
        rest = {"bounds": f"{key} {_interval(rest.pop('lo'), rest.pop('hi'), key)}", **rest}
    fields = ", ".join(_field(k, v) for k, v in rest.items())
    text = type(event).__name__ + (f" by {author}" if author else "")
    return text + (f": {fields}" if fields else "") + (f" ({reason})" if reason else "")


def _entities(record: Any, site: Site | None) -> str:
    """The first entities of a column, by the record's own names where it has them."""
    count = len(record.index)
    names = list(record.names) or _first_names(record.index, record.control.partition(".")[0], site)
    if not names and count and (first := getattr(record, "first_name", "")):
        return first if count == 1 else f"{count} from {first} to {record.last_name}"
    return few(names, count) if names else str(count)
