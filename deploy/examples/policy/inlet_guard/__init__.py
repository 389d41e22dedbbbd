"""inlet_guard: lowers the power caps of racks whose inlet air is too warm, in proportion to the excess.

An example of a policy outside racktwin's tree, with settings, an explanation and a metric of its own.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.catalogue import F64, ContractError
from twin.contracts import (
    Columns,
    ExplainRequest,
    Explanation,
    FigureMetric,
    KeyFigure,
    Memory,
    Proposal,
    Sentence,
    View,
    finite,
    mask_index,
    table_of,
)
from twin.telemetry import GOOD

CONTROL = "gpu.power_cap_w"
FULL_K = 5.0  # above the limit by which the floor is reached


class InletGuard:
    """Proposes upper bounds on the power caps of GPUs in warm racks."""

    name: ClassVar[str] = "inlet_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 70
    period_s: ClassVar[float] = 5.0
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = None

    def __init__(self, limit_c: float = 27.0, floor_pu: float = 0.6) -> None:
        """`limit_c`: inlet air up to which nothing is capped; `floor_pu`: the lowest cap, of the most."""
        if not 10.0 <= limit_c <= 50.0:
            raise ContractError(f"limit_c: expected 10 to 50 degC, got {limit_c!r}")
        if not 0.1 <= floor_pu <= 1.0:
            raise ContractError(f"floor_pu: expected 0.1 to 1, got {floor_pu!r}")
        self.limit_c, self.floor_pu = float(limit_c), float(floor_pu)

    def _assess(self, view: View) -> tuple[F64, F64]:
        """(inlet air, share of the most that GPUs may draw) of each rack [n_rack]; NaN and 1 if unknown."""
        known = view.quality("rack.inlet_temp_c") == GOOD
        inlet_c = np.where(known, view.value("rack.inlet_temp_c"), np.nan).astype(np.float64)
        excess = np.clip((np.nan_to_num(inlet_c, nan=0.0) - self.limit_c) / FULL_K, 0.0, 1.0)
        return inlet_c, 1.0 - excess * (1.0 - self.floor_pu)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Caps for the GPUs of warm racks."""
        site, envelope = view.site, view.envelope(CONTROL)
        share_pu = self._assess(view)[1][site.rack_of_gpu]
        index = mask_index((share_pu < 1.0) & np.isfinite(envelope.low))
        if not len(index):
            return [], memory
        low_w = envelope.low[index]
        cap_w = np.maximum(low_w, share_pu[index] * envelope.high[index])
        reason = f"inlet air above {self.limit_c:g} degC"
        return [Proposal(CONTROL, index, low_w, cap_w, np.full(len(index), np.nan), reason)], memory

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The warm racks, by the same assessment as the proposals."""
        del memory, request
        inlet_c, share_pu = self._assess(view)
        warm = np.flatnonzero(share_pu < 1.0)
        rows = [
            {"rack": view.site.name("rack", r), "inlet_c": finite(inlet_c[r]), "cap_pu": finite(share_pu[r])}
            for r in warm.tolist()
        ]
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            sentences=(Sentence(f"{len(warm)} of {len(share_pu)} racks are above {self.limit_c:g} degC"),),
            figures=(
                KeyFigure("warm_racks", len(warm), "count", "racks with warm inlet air",
                          FigureMetric("inlet_guard_racks")),
            ),
            tables=(table_of("racks", ("rack", ("inlet_c", "degC"), ("cap_pu", "1")), rows, "warm racks"),),
        )  # fmt: skip
