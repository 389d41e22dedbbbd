"""operator: turns requests of people into proposals, under the same rules as those of other policies.

Every request in force becomes an interval on its control. Requests apply in the order in which they were
made, after protective policies.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.catalogue import NS, TABLES, clean, find_control
from twin.contracts import (
    PAGE,
    Columns,
    ExplainRequest,
    Explanation,
    KeyFigure,
    Memory,
    Proposal,
    Sentence,
    TableColumn,
    Topic,
    Value,
    View,
    control_cell,
    in_scope,
    scope_of,
    table_of,
)
from twin.site import HALL_BUDGET
from twin.telemetry import OperatorRequest

MAX_ROWS = 200
REQUEST_COLUMNS = (
    TableColumn("request"),
    TableColumn("author"),
    TableColumn("control"),
    TableColumn("count", "count", "entities"),
    TableColumn("first"),
    TableColumn("lo", text="at least"),
    TableColumn("hi", text="at most"),
    TableColumn("want", text="wanted"),
    TableColumn("unit"),
    TableColumn("ends_s", "s", "ends in"),
    TableColumn("reason"),
    TableColumn("lift", text="ends by"),
)


class Operator:
    """Turns standing requests into proposals."""

    name: ClassVar[str] = "operator"
    controls: ClassVar[tuple[str, ...]] = tuple(c.key for spec in TABLES.values() for c in spec.controls)
    rank: ClassVar[int] = 10
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = None
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """One proposal per request; a request that names no entity of this site says nothing."""
        return [p for r in view.requests if (p := self._proposal(view, r)) is not None], memory

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The standing requests in order of precedence: author, interval, end."""
        del memory
        entity, inside = scope_of(view, request)
        rows: list[dict[str, Value]] = []
        unknown = 0
        for standing in view.requests:
            proposal, control = self._proposal(view, standing), find_control(standing.control)
            unknown += proposal is None
            if proposal is None or control is None:
                continue
            index = in_scope(inside, control.table, proposal.index)
            if len(index):
                withdraw = f"racktwin control withdraw {clean(standing.id, 120)}"
                rows.append(
                    {
                        "request": clean(standing.id, 120),
                        "author": clean(standing.author, 120),
                        "control": standing.control,
                        "count": len(index),
                        "first": view.site.name(control.table, int(index[0])),
                        "lo": control_cell(standing.lo, control),
                        "hi": control_cell(standing.hi, control),
                        "want": control_cell(np.nan if standing.want is None else standing.want, control),
                        "unit": control.unit,
                        "ends_s": (standing.expires_ns - view.now_ns) / NS if standing.expires_ns else None,
                        "reason": clean(standing.reason, 200),
                        "lift": withdraw,
                    }
                )
        where = f" for {entity}" if entity else ""
        sentences = [Sentence(f"standing requests of operators{where}: {len(rows):,}")]
        if unknown:
            sentences.append(Sentence(f"{unknown} requests name no entity of this site", "note"))
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(KeyFigure("requests", len(rows), "count", "standing requests"),),
            tables=(
                table_of(
                    "requests",
                    REQUEST_COLUMNS,
                    rows[:MAX_ROWS],
                    "standing requests, the oldest first",
                    len(rows),
                ),
            ),
        )

    @staticmethod
    def _proposal(view: View, request: OperatorRequest) -> Proposal | None:
        control = find_control(request.control)
        if control is None:
            return None
        index = view.targets(request)
        if len(index) == 0:
            return None
        k = len(index)
        lo, want = np.full(k, request.lo), np.full(k, np.nan if request.want is None else request.want)
        if request.control == HALL_BUDGET:  # narrowed, never lent: without a split it is the guaranteed share
            lo, want = np.full(k, -np.inf), view.envelope(HALL_BUDGET).low[index]
        why = f"requested by {request.author}" + (f": {request.reason}" if request.reason else "")
        return Proposal(request.control, index, lo, np.full(k, request.hi), want, why)
