"""Measured cadence: how often the messages of a recording come, for the site file that is drafted from it.

A period goes into the file only where a source is regular and slower than the catalogue says: it overrides
what a daemon learns, and what comes irregularly, or on change, is judged better by what is learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from connectors.mqtt import Router
from twin.catalogue import NS, BadMessage
from twin.config import spec_of
from twin.site import build_site
from twin.telemetry import Block, Ignored, Inbox, Message, Reading, State, TableState

TICK_S = 1.0


def measured_cadence(messages: Iterable[Message], tree: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return (`periods_s` for the site file, notes on all that was measured) of messages in order of time."""
    site = build_site(spec_of(tree, None, "the drafted site"), "the drafted site")
    state = _state_after(messages, Router(site), State(site.sizes), Inbox(site.sizes, TICK_S))
    periods_s: dict[str, float] = {}
    kinds: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for table, column in state.tables.items():
        for signal in column.signals:
            if (found := _cadence(column, signal.row)) is not None and signal.base is None:
                usual_s, period_s, irregular = found
                kinds.setdefault((table, irregular), []).append((usual_s, period_s))
                if not irregular and period_s > signal.period_s:
                    periods_s[signal.key] = period_s
    notes = []
    for (table, irregular), measured in sorted(kinds.items()):
        usual, periods = zip(*measured, strict=True)
        every = f"{min(usual):g}" if min(usual) == max(usual) else f"{min(usual):g} to {max(usual):g}"
        how = "irregularly or on change: left to be learned" if irregular else "regularly"
        what = f"measured: {len(measured)} {table} signals come about every {every} s"
        notes.append(f"{what}, nearly always within {max(periods):g} s, {how}")
    return periods_s, notes


def _state_after(messages: Iterable[Message], router: Router, state: State, inbox: Inbox) -> State:
    """The state after all of these messages, in ticks of a second."""
    number, due_ns = 0, 0
    for message in messages:
        while due_ns and message.t_ns > due_ns:
            state.apply(inbox.take(number, due_ns, TICK_S))
            number, due_ns = number + 1, max(due_ns, message.t_ns - 1) // NS * NS + NS
        due_ns = due_ns or message.t_ns // NS * NS + NS
        try:
            items = router.decode(message)
        except BadMessage:
            continue
        for item in () if isinstance(items, Ignored) else items:
            if isinstance(item, Reading):
                inbox.put(item, message.t_ns)
            elif isinstance(item, Block):
                inbox.put_block(item, message.t_ns)
    state.apply(inbox.take(number, due_ns, TICK_S))
    return state


def _cadence(column: TableState, row: int) -> tuple[float, float, bool] | None:
    """Return (usual gap in s, period in s, irregular) of a gauge over all entities; None if not known."""
    known = column.cadence.known(group := int(column.partition.group_of_row[row]))
    known = known & np.isfinite(column.value[row])
    if not known.any():
        return None
    usual_s = float(np.median(column.cadence.usual_s[group, known]))
    period_s = float(np.max(column.cadence.period_s(group)[known]))
    return _rounded(usual_s), _rounded(period_s), bool(column.cadence.irregular(group)[known].any())


def _rounded(seconds: float) -> float:
    """Two digits are enough."""
    return float(f"{seconds:.2g}")
