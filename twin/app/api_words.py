"""Decisions in words: a journal record of the running daemon as a sentence with its numbers and reason.

A record may hold columns for a hundred thousand devices; here it becomes a count, a range, the first names.
Text that came from outside is made safe. May import the core; pure.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import numpy as np

from twin.app.live import Line
from twin.app.replacement_history import account_words
from twin.app.report_text import clean, utc
from twin.frame import NS
from twin.journal import SHELL_KINDS
from twin.signals import find_control
from twin.site import Site

# Every kind of line that a journal may hold: a filter for any other would find nothing, and say all is well.
KINDS = (
    "command", "advice", "event", "finding", "cleared", "lapsed", "failed", "deferred", "narrowed",
    "kept_back", "protected", "proposals", "renewal", "acks", "faults", "reports", "duplicates", "settling",
    "settled", "site", "mark", "account", "fit_requested", "fit_expired", "grant_expired",
    "load_target_over",
    "request_expired", "approval_expired", "approval_dropped", "maintenance_expired",
    "maintenance_dropped", *SHELL_KINDS,
)  # fmt: skip
INSTANTS = frozenset({"job.checkpoint_since_s"})  # controls whose value is an instant, s since 1970 UTC
SHOWN_NAMES = 2
MAX_TEXT = 400
MAX_ITEMS = 20  # of a mapping within a record, and of its proposals
MAX_LISTED = 65  # of a list; the journal shortens names to 64 and "and 9 more"
MAX_DEPTH = 4


def line_of(
    line: Line, site: Site, about: tuple[str, int, str] | None = None, control: str | None = None
) -> dict[str, Any] | None:
    """A line for an answer; None if not about the entity (table, index, path) or the control asked for."""
    body = line.body
    if control is not None and control not in _controls(line.kind, body):
        return None
    if about is not None and not _concerns(line.kind, body, site, *about):
        return None
    shown = brief(body, site)
    return {"kind": line.kind, "tick": line.tick, "now_ns": line.now_ns,
            "text": clean(words(line.kind, shown), MAX_TEXT), "body": shown}  # fmt: skip


def is_about(line: Line, site: Site, about: tuple[str, int, str]) -> bool:
    """Whether a line concerns an entity (table, index, path)."""
    return _concerns(line.kind, line.body, site, *about)


def _controls(kind: str, body: dict[str, Any]) -> list[str]:
    if kind == "proposals":
        return [p.get("control", "") for p in body.get("proposals", ())]
    event = body.get("event")
    return [event.get("control", "")] if isinstance(event, dict) else [body.get("control", "")]


def _concerns(kind: str, body: dict[str, Any], site: Site, table: str, row: int, path: str) -> bool:
    """Whether a record is about an entity: by index in columns, by path elsewhere."""
    parts = body.get("proposals", ()) if kind == "proposals" else (body,)
    for part in parts:
        if str(part.get("control", "")).partition(".")[0] != table:
            continue
        if path in part.get("names", ()):
            return True
        if table == "job" and part.get("names"):
            continue  # by their own names: a slot may have had another job then
        for name in ("index", "gone"):
            column = part.get(name)
            if isinstance(column, np.ndarray) and row in column:
                return True
    event = body.get("event")
    said = event if isinstance(event, dict) else body
    named = [*said.get("names", ()), *said.get("nodes", ()), *said.get("entities", ()), said.get("name", "")]
    named = [n for n in named if isinstance(n, str) and n]
    if path in named:
        return True
    local = any(path.endswith("/" + n) for n in named)
    return local and any(site.entity(table, n) == row for n in named)


def brief(body: dict[str, Any], site: Site, control: str = "") -> dict[str, Any]:
    """A record without its long columns: how many, the first names, from what to what."""
    key = str(body.get("control", control))
    spec = find_control(key)
    out: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, np.ndarray):
            if name in ("index", "gone") and spec is not None:
                out["count" if name == "index" else "gone_count"] = len(value)
                first = [int(i) for i in value[:SHOWN_NAMES]]
                known = [site.name(spec.table, i) for i in first if i < site.sizes[spec.table]]
                out["names" if name == "index" else "gone_names"] = known
            elif value.dtype.kind in "fiu" and value.size:
                finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
                out[name] = _span(finite)
            else:
                out[name] = int(value.size)
        elif name == "proposals" and isinstance(value, list):
            out[name] = [brief(p, site, key) for p in value[:MAX_ITEMS]]
        else:
            out[name] = _bounded(value)
    return out


def _span(values: np.ndarray) -> Any:
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
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
    if isinstance(value, dict):
        return {clean(k): _bounded(v, depth + 1) for k, v in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_bounded(v, depth + 1) for v in value[:MAX_LISTED]]
    if isinstance(value, np.ndarray):
        return [_bounded(v, depth + 1) for v in value[:MAX_ITEMS].tolist()]
    return clean(str(value), MAX_TEXT)


def words(kind: str, body: dict[str, Any]) -> str:
    """A brief record as a sentence; one that is not as we write it, as it is."""
    try:
        return _words(kind, body)
    except (KeyError, TypeError, AttributeError, ValueError):
        return ", ".join(f"{k} {v}" for k, v in body.items())


def _words(kind: str, body: dict[str, Any]) -> str:
    match kind:
        case "command" | "advice":
            verb = "commands" if kind == "command" else "would command"
            value = f"{body['control']} {_number(body['value'], body['control'])}"
            return f"{body['policy']} {verb} {value} for {_who(body)}: {body['reason']}"
        case "faults":
            return f"{body['count']} more faults {body['code']} of a {body['table']} in this tick"
        case "reports" if "refused" in body:
            return f"{body['count']} more reports of jobs refused in this tick"
        case "reports":
            return f"jobs reported on {body['count']} checkpoints, {body['tier']}"
        case "renewal":
            return f"{body['control']} of {body['count']} renewed: {body['reason']}"
        case "lapsed":
            return f"{body['control']} of {_who(body)} lapsed; becomes {body['becomes']}"
        case "failed" | "deferred" | "narrowed" | "protected":
            by = f"{body['policy']}: " if "policy" in body else ""
            return f"{by}{kind} {body['control']} of {_who(body)}: {body.get('why', '')}"
        case "finding":
            text = f"{body['severity']}: {body['title']}"
            said = [*body["evidence"], *([_few(body["entities"], body["count"])] if body["entities"] else [])]
            return text + (f"; {'; '.join(said)}" if said else "")
        case "cleared":
            if "superseded_by" in body:
                return f"superseded: {body['id']}, by {body['superseded_by'].rpartition('/')[2]}"
            return f"over: {body['id']}"
        case "daemon" if "started" in body:
            begun = "a new run" if body["resumed_at"] < 0 else f"goes on after tick {body['resumed_at']}"
            faults = f"; mended: {'; '.join(map(str, body['faults']))}" if body["faults"] else ""
            return f"the daemon started (racktwin {body['started']}): {begun}{faults}"
        case "leader" if "lost" in body:
            return f"leads no longer (it did with epoch {body['lost']})"
        case "leader" if "epoch" in body:
            after = f", after {body['predecessor']}" if body["predecessor"] else ""
            adopts = "; adopts what it finds commanded" if body["adopt"] else ""
            return f"leads with epoch {body['epoch']}{after}{adopts}"
        case "kept_back":
            return f"kept back {body['control']} of {body['count']} under {body['window']}: {body['why']}"
        case "settling":
            return f"{body['why']} (epoch {body['epoch']})"
        case "event":
            return _event(body["event"]) + (f"; refused: {body['refused']}" if "refused" in body else "")
        case "proposals":
            return f"{body['policy']} proposes: " + (
                "; ".join(map(_proposal, body["proposals"])) or "nothing"
            )
        case "account":
            about = body["account"]
            named = " ".join(str(about[k]) for k in ("what", "node") if k in about)
            return f"{body['policy']}: {named}: {account_words(about)}"
        case "mark":
            return "check of the state"
        case _:
            return ", ".join(_said(k, v) for k, v in body.items())


def _said(name: str, value: Any) -> str:
    """One key of a record that has no sentence of its own."""
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


def _proposal(p: dict[str, Any]) -> str:
    if not p.get("count"):
        return f"{p['control']} of {p.get('gone_count', 0)} let go"
    return f"{p['control']} {_bounds(p['lo'], p['hi'], p['control'])} for {_who(p)}: {p['reason']}"


def _bounds(low: Any, high: Any, control: str) -> str:
    """An interval as people say it; an infinite bound is none."""
    if low in (None, -math.inf):
        return "any" if high in (None, math.inf) else f"at most {_number(high, control)}"
    if high in (None, math.inf):
        return f"at least {_number(low, control)}"
    first, last = _number(low, control), _number(high, control)
    return first if first == last else f"{first} to {last}"


def _event(event: dict[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in ("type", "author", "id", "reason")}
    text = str(event.get("type")) + (f" by {event['author']}" if "author" in event else "")
    if "lo" in rest and "hi" in rest:
        key = str(rest.pop("control", ""))
        rest = {"bounds": f"{key} {_bounds(rest.pop('lo'), rest.pop('hi'), key)}", **rest}
    said = [_said(k, v) for k, v in rest.items()]
    text += f": {', '.join(said)}" if said else ""
    return text + (f" ({event['reason']})" if event.get("reason") else "")


def _who(body: dict[str, Any]) -> str:
    count = body.get("count", 0)
    return _few(body["names"], count) if body.get("names") else str(count)


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
