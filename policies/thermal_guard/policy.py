"""thermal_guard: keeps GPUs inside their thermal limits by lowering their power caps, and saves what caps do
not.

It only narrows from above; raising again is left to the slew limit. Where even the lowest caps leave a GPU
seconds until it shuts itself down, jobs save, nodes are drained, stopped and switched off.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from policies.thermal_guard.caps import CONTROL, KEYS, REASONS, assess
from policies.thermal_guard.endurance import endurance
from policies.thermal_guard.explain import dangers_table, strains_table
from policies.thermal_guard.rescue import ON, POWER, SAVE, SERVICE, proposals, rescue
from twin.contracts import (
    PAGE,
    Columns,
    ExplainRequest,
    Explanation,
    KeyFigure,
    Memory,
    Proposal,
    Sentence,
    Topic,
    View,
    in_scope,
    mask_index,
    scope_of,
)
from twin.telemetry import ColumnSpec


class ThermalGuard:
    """Proposes upper bounds on GPU power caps, and what follows where they are not enough."""

    name: ClassVar[str] = "thermal_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL, SAVE, SERVICE, POWER)
    rank: ClassVar[int] = 0
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(
        gpu={
            "until_ns": "i8",
            "cap_w": "f8",
            "trend_c": ColumnSpec("f8", fill=np.nan),
            "trend_ns": "i8",
            "leaves_w": ColumnSpec("f8", fill=np.nan),
            "samples": "i1",
        },
        node={"danger_ns": "i8", "calm_ns": "i8", "order": "i1", "order_ns": "i8", "went_off": "?"},
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Caps for the GPUs under strain, and for those that were until a minute ago; orders for nodes."""
        if view.site.sizes["gpu"] == 0:
            return [], memory
        found, envelope = assess(view, memory), view.envelope(CONTROL)
        if not found.active.any() and not memory["order"].any():
            return [], memory
        out, capped = [], mask_index(found.active)
        code_of = found.reason[capped]
        for code in np.unique(code_of).tolist():
            index = capped[code_of == code]
            # No wish: a GPU that stands below its cap is left there.
            want, cap_w = np.full(len(index), np.nan), found.cap_w[index]
            out.append(Proposal(CONTROL, index, envelope.low[index], cap_w, want, REASONS[code]))
        kept_w = np.where(found.active, found.cap_w, 0.0)
        lasting, trend = endurance(view, memory, capped)
        saved = rescue(view, memory, lasting)
        return out + proposals(view, saved), {
            "until_ns": found.until_ns,
            "cap_w": kept_w,
            **trend,
            **saved.memory,
        }

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The strained GPUs and racks: signal, worst case, limit, cap, and when the cap ends; the nodes in
        danger with the seconds that they have."""
        entity, inside = scope_of(view, request)
        found = assess(view, memory)
        saved = rescue(view, memory, endurance(view, memory, mask_index(found.active))[0])
        capped = in_scope(inside, "gpu", mask_index(found.active))
        gpus = in_scope(inside, "gpu", np.arange(view.site.sizes["gpu"], dtype=np.int32))
        nodes = in_scope(inside, "node", mask_index((saved.danger_ns > 0) | (saved.order > ON)))
        guarded = [key for key in KEYS if view.limit(key) is not None]
        sentences = [Sentence(f"{len(capped):,} of {len(gpus):,} GPUs need a cap for heat")]
        if len(nodes):
            text = f"{len(nodes):,} nodes have GPUs that would overheat even at their lowest caps"
            sentences.append(Sentence(text, "warning"))
        if missing := [key for key in KEYS if key not in guarded]:
            sentences.append(Sentence(f"no profile of this site limits {', '.join(missing)}", "note"))
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(
                KeyFigure("capped_gpus", len(capped), "count", "GPUs that need a cap for heat"),
                KeyFigure("endangered_nodes", len(nodes), "count", "nodes whose GPUs caps do not save"),
            ),
            tables=(strains_table(view, found, capped), dangers_table(view, saved, nodes)),
        )
