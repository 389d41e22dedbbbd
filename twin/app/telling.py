"""Telling: what the daemon's log says of decisions and alarms, in one line each; the journal has it whole.

Part of the shell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from twin.app.alarms import AlarmChange
from twin.contracts import Decision
from twin.events import Event, Held, Released, Resumed, TicksSkipped
from twin.site import Site

log = logging.getLogger("racktwin")
LEVELS = {"critical": logging.ERROR, "warning": logging.WARNING}
MAX_TOLD = 8  # commands of a tick that are told apart


def tell_alarms(changes: Iterable[AlarmChange]) -> None:
    """Raised, cleared, acknowledged: what a person would want to find by time."""
    for change in changes:
        alarm = change.alarm
        level = LEVELS.get(alarm.severity, logging.INFO) if change.what != "cleared" else logging.INFO
        log.log(level, "alarm %s: %s [%s]", change.what, alarm.title, alarm.id)


def tell_decision(decision: Decision, events: tuple[Event, ...], site: Site) -> None:
    """New commands and leases that ran out, what people asked, ticks that did not happen."""
    for event in events:
        if isinstance(event, Held | Released | Resumed):
            reason = getattr(event, "reason", "")
            log.warning(
                "%s by %s%s", type(event).__name__.lower(), event.author, f": {reason}" if reason else ""
            )
        elif isinstance(event, TicksSkipped):
            log.warning("%d ticks did not happen: %s", event.count, event.why)
    for batch in [c for c in decision.commands if not c.renewal][:MAX_TOLD]:
        table = batch.control.partition(".")[0]
        first = site.name(table, int(batch.index[0]))
        low, high = float(batch.value.min()), float(batch.value.max())
        value = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        does = "gives back" if batch.final else "commands"
        log.info("%s %s %s for %d %s, first %s, by %s: %s", does, batch.control, value, len(batch.index),
                 table, first, batch.policy or "takeover", batch.reason)  # fmt: skip
    for record in decision.records:
        _tell_record(record)


def _tell_record(record: dict[str, Any]) -> None:
    if record["kind"] == "lapsed":
        log.warning("leases lapsed: %s of %d", record["control"], len(record["index"]))
    elif record["kind"] == "failed":
        log.error("%s of %d: %s", record["control"], len(record["index"]), record["why"])
    elif record["kind"] == "event" and "refused" in record:
        log.warning("%s refused: %s", record["event"].get("type", "event"), record["refused"])
