"""Event texts: an event of the journal as one sentence with its author, numbers and reason.

Text from outside is made safe. What an event leaves unsaid (0, no text, no instant) is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from twin.catalogue import (
    NS,
    clean,
    control_value,
    control_words,
    duration,
    find_quantity,
    number,
    quantity,
    table_noun,
    utc,
)
from twin.telemetry import Event, events as ev

SHOWN_NAMES = 3
MAX_TEXT = 400
RESULTS = {True: "passed", False: "failed", None: "ended without a result"}


def event_words(event: Event) -> str:
    """Return an event as a sentence; an author's reason comes at its end."""
    for words in (_of_people, _of_requests, _of_nodes, _of_jobs, _of_power, _of_the_twin):
        if text := words(event):
            break
    else:
        text = type(event).__name__
    reason = clean(getattr(event, "reason", ""), MAX_TEXT)
    return text + (f" ({reason})" if reason else "")


def few(names: Sequence[str], count: int) -> str:
    """Return the first names of `count`, and the number of the others; the last may be the journal's own
    "and 9 more"."""
    shown = [str(n) for n in names[:SHOWN_NAMES]]
    more = max(count, len(names)) - len(shown)
    if more > 0 and (cut := re.fullmatch(r"and (\d+) more", str(names[-1]))):
        more += int(cut[1]) - 1
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def interval(low: Any, high: Any, control: str) -> str:
    """Return an interval in words, without infinite bounds."""
    if low in (None, -math.inf):
        return "any" if high in (None, math.inf) else f"at most {control_value(high, control)}"
    if high in (None, math.inf):
        return f"at least {control_value(low, control)}"
    first, last = control_value(low, control), control_value(high, control)
    return first if first == last else f"{first} to {last}"


def _by(event: Any) -> str:
    return clean(event.author) or "somebody"


def _all(names: Sequence[str]) -> str:
    return few([clean(n) for n in names], len(names))


def _until(at_ns: int) -> str:
    return f" until {utc(at_ns)} UTC" if at_ns > 0 else ""


def _tail(label: str, text: str) -> str:
    return f"{label}{clean(text, MAX_TEXT)}" if text else ""


def _of_people(event: Event) -> str:
    match event:
        case ev.Held():
            return f"{_by(event)} holds the site: only protective commands"
        case ev.Released():
            return f"{_by(event)} releases all commands"
        case ev.Resumed():
            return f"{_by(event)} ends the hold or release"
        case ev.AuthorityChanged():
            return f"{_by(event)} sets the authority of {clean(event.policy)} to {event.authority}"
        case ev.MaintenanceBegun():
            where = f"{table_noun(event.table, len(event.names))} {_all(event.names)}"
            return f"{_by(event)} opens a maintenance window for {where}{_until(event.until_ns)}"
        case ev.MaintenanceEnded():
            return f"{_by(event)} ends the maintenance window {clean(event.window)}"
        case _:
            return ""


def _of_requests(event: Event) -> str:
    match event:
        case ev.OperatorRequest():
            bounds = [interval(event.lo, event.hi, event.control)]
            if event.want is not None and math.isfinite(event.want):
                wanted = control_value(event.want, event.control)
                bounds = [b for b in bounds if b not in ("any", wanted)] + [f"wanted {wanted}"]
            what = f"{control_words(clean(event.control))} {', '.join(bounds)}"
            return f"{_by(event)} requests {what} for {_all(event.names)}{_until(event.expires_ns)}"
        case ev.RequestWithdrawn():
            return f"{_by(event)} withdraws the request {clean(event.request)}"
        case ev.Approved():
            where = _all(event.names) or "everything it proposes"
            what = f"the {control_words(clean(event.control))} of {where}"
            return f"{_by(event)} approves that {clean(event.policy)} sets {what}{_until(event.expires_ns)}"
        case ev.ApprovalWithdrawn():
            return f"{_by(event)} withdraws the approval {clean(event.approval)}"
        case _:
            return ""


def _of_nodes(event: Event) -> str:
    match event:
        case ev.FaultReported():
            times = f", {event.count:,} times" if event.count > 1 else ""
            where = f"{table_noun(event.table)} {clean(event.name)}"
            return f"{where} reports fault {event.code}{times}{_tail(': ', event.detail)}"
        case ev.NvlinksCounted():
            return f"{clean(event.name)} reports counts of its NVLinks"
        case ev.NodeTested():
            result = RESULTS[event.passed]
            took_s = (event.ended_ns - event.began_ns) / NS
            after = f" after {duration(took_s)}" if took_s >= 1 else ""
            lines = [line for line in str(event.detail).splitlines() if line.strip()]
            last = _tail(": ", lines[-1]) if lines else ""
            return f"the test{_tail(' ', event.test)} of {clean(event.name)} {result}{after}{last}"
        case ev.NodeRepaired():
            return f"{_by(event)} reports {clean(event.name)} repaired{_tail(': ', event.note)}"
        case ev.EntityReplaced():
            serial = clean(event.serial) or "unknown"
            return f"{table_noun(event.table)} {clean(event.name)} was replaced: its serial is now {serial}"
        case ev.IdentityTold():
            serial = clean(event.serial) or "unknown"
            return f"{table_noun(event.table)} {clean(event.name)} has the serial {serial}"
        case ev.CommandAcked():
            state = event.state.replace("_", " ")
            what = f"command {clean(event.command)} of {control_words(clean(event.control))}"
            return f"{clean(event.name)}: {what} {state}{_tail(': ', event.detail)}"
        case _:
            return ""


def _of_jobs(event: Event) -> str:
    match event:
        case ev.JobStarted():
            facts = [
                event.kind if event.kind != "unknown" else "",
                f"started {utc(event.started_ns)}" if event.started_ns > 0 else "",
                f"priority {event.priority}" if event.priority else "",
                _tail("tenant ", event.tenant),
                f"at least {quantity(event.floor_w, 'W')}" if event.floor_w else "",
                f"at most {duration(event.time_limit_s)}" if event.time_limit_s else "",
                f"saves every {duration(event.checkpoint_interval_s)}" if event.checkpoint_interval_s else "",
            ]
            more = "".join(f", {fact}" for fact in facts if fact)
            return f"job {clean(event.job)} runs on {_all(event.nodes) or 'no node'}{more}"
        case ev.JobEnded():
            return f"job {clean(event.job)} ended"
        case ev.CheckpointTold():
            where = "in memory" if event.tier == "memory" else "on storage"
            saved = f" of {utc(event.at_ns, '%H:%M:%S')} UTC" if event.at_ns > 0 else ""
            every = f", every {duration(event.interval_s)}" if event.interval_s else ""
            took = f", which took {duration(event.save_s)}" if event.save_s else ""
            return f"job {clean(event.job)} has a checkpoint {where}{saved}{took}{every}"
        case _:
            return ""


def _of_power(event: Event) -> str:
    match event:
        case ev.BudgetGranted():
            budget = f"{clean(event.feeder)} {quantity(event.budget_w, 'W')}"
            return f"{_by(event)} grants {budget}{_until(event.expires_ns)}"
        case ev.LoadTargetSet():
            where = f" below {_all(event.feeders)}" if event.feeders else ""
            since = f" from {utc(event.start_ns)} UTC" if event.start_ns > 0 else ""
            effort = ", as far as it can" if event.best_effort else ""
            limit = f"at most {quantity(event.limit_w, 'W')}{where}{since}{_until(event.end_ns)}"
            return f"{_by(event)} sets the load target {clean(event.target)}: {limit}{effort}"
        case ev.LoadTargetWithdrawn():
            return f"{_by(event)} withdraws the load target {clean(event.target)}"
        case ev.OutlookTold():
            return _outlook(event)
        case _:
            return ""


def _outlook(event: ev.OutlookTold) -> str:
    """Return an outlook with its range; a list that the journal cut gives the number of the others."""
    spec = find_quantity(event.quantity)
    known = [v for v in event.values if isinstance(v, int | float) and math.isfinite(v)]
    cut = re.fullmatch(r"and (\d+) more", str(event.values[-1])) if event.values else None
    count = len(event.values) + (int(cut[1]) - 1 if cut else 0)
    ends = [quantity(v, spec.unit) if spec else number(v) for v in (min(known), max(known))] if known else []
    spread = (" to ".join(dict.fromkeys(ends)) or "unknown") + (" at first" if cut else "")
    of = _tail(" of ", event.name)
    steps = f"{count:,} {'value' if count == 1 else 'values'}"
    grid = f"{steps} every {duration(event.step_s)} from {utc(event.start_ns, '%H:%M:%S')} UTC"
    return f"{_by(event)} expects {clean(event.quantity)}{of} at {spread}: {grid}"


def _of_the_twin(event: Event) -> str:
    match event:
        case ev.PluginRestored():
            return f"{clean(event.plugin)} is active again"
        case ev.EpochChanged():
            adopts = "; it adopts the commands in force" if event.adopt else ""
            return f"this daemon leads from now on (epoch {event.epoch}){adopts}"
        case ev.PollPeriodChanged():
            what = f"{_all(event.signals)} of {_all(event.names) or event.table}"
            return f"{what} arrive every {duration(event.period_s)}"
        case ev.SiteChanged():
            return f"the site file changed (now {clean(event.site_hash, 12)})"
        case ev.ModelFitted():
            return f"the model {clean(event.model)} was fitted again"
        case ev.FitFailed():
            return f"the model {clean(event.model)} could not be fitted: {clean(event.why, MAX_TEXT)}"
        case ev.TicksSkipped():
            ticks = "1 tick was" if event.count == 1 else f"{event.count:,} ticks were"
            return f"{ticks} skipped{_tail(': ', event.why)}"
        case _:
            return ""
