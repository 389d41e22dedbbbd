"""thermal_guard: keeps GPUs inside their thermal limits by lowering their power caps, on worst-case margins.

Judges every GPU by how hot it may be by now, not by its last reading: silence drifts hot. Between the guard
and the limit the cap falls in proportion, at the limit to the device's minimum; a rack whose coolant is lost
or too hot pulls all of its GPUs down. It only narrows from above; raising again is left to the slew limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool, find_signal
from twin.contracts import (
    PAGE,
    Columns,
    DataTable,
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
    finite,
    in_scope,
    mask_index,
    scope_of,
    table_of,
)
from twin.site import Envelope
from twin.telemetry import QUALITY_NAMES

CONTROL = "gpu.power_cap_w"
# Signals of a GPU and of its rack that can pull a cap down; a profile's limits say where.
GPU_KEYS = ("gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k")
RACK_KEYS = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm")
KEYS = (*GPU_KEYS, *RACK_KEYS)
# A cap is let go after this long below the guard, so that a temperature at the edge does not toggle it.
RELEASE_S = 60.0
# Two for each key, measured and feared, and one for the time after
REASONS = (
    *(f"{key} {how} beyond its guard" for key in KEYS for how in ("is", "was not heard and may be")),
    f"was beyond a guard less than {RELEASE_S:.0f} s ago",
)


def strain(worst: F64, guard: F64, limit: F64) -> F64:
    """0 at or inside the guard, 1 at or beyond the limit, linear between; 0 where something is unknown.

    Works for either direction: a limit below its guard (flow, margin) strains downwards.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (worst - guard) / (limit - guard)
    share = np.where(worst == limit, 1.0, share)  # also where guard and limit are one
    return np.clip(np.nan_to_num(share, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)


MAX_ROWS = 200
EVIDENCE = ("signal", "unit", "value", "worst", "guard", "limit", "age_s", "quality", "basis")
STRAIN_COLUMNS = (
    TableColumn("entity"),
    TableColumn("reason", detail=True),
    *(TableColumn(name, "s" if name == "age_s" else "") for name in EVIDENCE),
    TableColumn("gpus", "count"),
    TableColumn("cap_low_w", "W", "cap"),
    TableColumn("cap_high_w", "W", "to"),
    TableColumn("lift", text="ends after"),
)


class Pull(NamedTuple):
    """The caps to which one reason lowers some GPUs [k]; `reason` indexes REASONS."""

    reason: int
    gpu: I32
    cap_w: F64


@dataclass(frozen=True, slots=True)
class HeatCaps:
    """The GPUs that are capped now: `cap_w` inf for none, `reason` an index of REASONS, all [n_gpu].

    `until_ns`: the end of the cap if nothing strains the GPU until then; 0 where none is.
    """

    active: Bool
    cap_w: F64
    reason: I64
    until_ns: I64


class ThermalGuard:
    """Proposes upper bounds on GPU power caps."""

    name: ClassVar[str] = "thermal_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 0
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(gpu={"until_ns": "i8", "cap_w": "f8"})
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Caps for the GPUs under strain, and for those that were until a minute ago."""
        if view.site.sizes["gpu"] == 0:
            return [], memory
        found, envelope = assess(view, memory), view.envelope(CONTROL)
        if not found.active.any():
            return [], memory
        proposals, capped = [], mask_index(found.active)
        code_of = found.reason[capped]
        for code in np.unique(code_of).tolist():
            index = capped[code_of == code]
            # No wish: a GPU that stands below its cap is left there.
            want, cap_w = np.full(len(index), np.nan), found.cap_w[index]
            proposals.append(Proposal(CONTROL, index, envelope.low[index], cap_w, want, REASONS[code]))
        kept_w = np.where(found.active, found.cap_w, 0.0)
        return proposals, {"until_ns": found.until_ns, "cap_w": kept_w}

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The strained GPUs and racks: signal, worst case, limit, cap, and when the cap ends."""
        entity, inside = scope_of(view, request)
        found = assess(view, memory)
        capped = in_scope(inside, "gpu", mask_index(found.active))
        gpus = in_scope(inside, "gpu", np.arange(view.site.sizes["gpu"], dtype=np.int32))
        guarded = [key for key in KEYS if view.limit(key) is not None]
        sentences = [Sentence(f"{len(capped):,} of {len(gpus):,} GPUs need a cap for heat")]
        if missing := [key for key in KEYS if key not in guarded]:
            sentences.append(Sentence(f"no profile of this site limits {', '.join(missing)}", "note"))
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(KeyFigure("capped_gpus", len(capped), "count", "GPUs that need a cap for heat"),),
            tables=(_strains(view, found, capped),),
        )


def assess(view: View, memory: Memory) -> HeatCaps:
    """The caps of all GPUs now; the memory that follows from it gives the same assessment again.

    While an episode lasts, its lowest cap rests: no pumping around the guard.
    """
    envelope = view.envelope(CONTROL)
    cap_w = np.full(len(envelope.low), np.inf)
    reason = np.full(len(cap_w), len(REASONS) - 1, np.int64)
    for pull in _pulls(view, envelope):
        lower = pull.cap_w < cap_w[pull.gpu]
        cap_w[pull.gpu[lower]], reason[pull.gpu[lower]] = pull.cap_w[lower], pull.reason
    active = np.isfinite(cap_w)
    hot = np.flatnonzero(active)
    resting = np.flatnonzero(memory["until_ns"] > view.now_ns)
    resting = resting[np.isfinite(envelope.low[resting])]
    # The envelope may have moved since, with a changed site.
    resting_w = np.clip(memory["cap_w"][resting], envelope.low[resting], envelope.high[resting])
    cap_w[resting] = np.minimum(cap_w[resting], resting_w)
    active[resting] = True
    until_ns = np.zeros(len(cap_w), np.int64)
    until_ns[resting] = memory["until_ns"][resting]
    until_ns[hot] = view.now_ns + round(RELEASE_S * NS)
    return HeatCaps(active, cap_w, reason, until_ns)


def _pulls(view: View, envelope: Envelope) -> Iterator[Pull]:
    """The caps that each signal asks for, measured before feared.

    A measured value pulls a cap down to the device's minimum. A value that is only feared, because a sensor
    fell silent, pulls it down to the safe value and no lower: silence alone is not heat.
    """
    for number, key in enumerate(KEYS):
        limit = view.limit(key)
        # Nearly all are inside their guard nearly always: only the others are worked out.
        if limit is None or not len(at := view.beyond(key)):
            continue
        guard, top = limit.guard[at], limit.max[at]
        for reason, values in ((2 * number, view.value(key)), (2 * number + 1, view.worst(key))):
            gpu, pull = at, strain(values[at].astype(np.float64), guard, top)
            if key in RACK_KEYS:
                of_rack = np.zeros(len(values))
                of_rack[at] = pull
                gpu = np.arange(len(envelope.low), dtype=np.int32)
                pull = of_rack[view.site.rack_of_gpu]
            gpu, pull = gpu[pull > 0], pull[pull > 0]
            floor_w = envelope.low[gpu] if reason % 2 == 0 else envelope.safe[gpu]
            high_w = envelope.high[gpu]
            # Rounding must not carry the cap out of the envelope.
            yield Pull(reason, gpu, np.clip(high_w - pull * (high_w - floor_w), envelope.low[gpu], high_w))


def _strains(view: View, found: HeatCaps, capped: I32) -> DataTable:
    """A row for each reason and each rack or GPU that it comes from, the lowest caps first."""
    site = view.site
    groups: list[tuple[float, int, str, I32]] = []
    total = 0
    for code in np.unique(found.reason[capped]).tolist():
        mine = capped[found.reason[capped] == code]
        table = "gpu" if _key(code) in GPU_KEYS else "rack"
        source = mine if table == "gpu" else site.rack_of_gpu[mine]
        order = np.lexsort((found.cap_w[mine], source))
        sources, first = np.unique(source[order], return_index=True)
        total += len(sources)
        least_w = found.cap_w[mine[order[first]]]
        for at in np.argsort(least_w, kind="stable")[:MAX_ROWS].tolist():
            of = mine[source == sources[at]]
            groups.append((float(least_w[at]), code, site.name(table, int(sources[at])), of))
    rows: list[dict[str, Value]] = []
    for least_w, code, name, gpus in sorted(groups, key=lambda g: g[:3])[:MAX_ROWS]:
        row: dict[str, Value] = {
            "entity": name,
            "reason": REASONS[code],
            "gpus": len(gpus),
            "cap_low_w": least_w,
            "cap_high_w": float(found.cap_w[gpus].max()),
        }
        rows.append(row | _evidence(view, found, code, int(gpus[0])))
    return table_of("strains", STRAIN_COLUMNS, rows, "causes of the caps", total)


def _key(code: int) -> str:
    """The signal of a reason; "" for the time after."""
    return KEYS[code // 2] if code < len(REASONS) - 1 else ""


def _evidence(view: View, found: HeatCaps, code: int, gpu: int) -> dict[str, Value]:
    """The cells of a row on the signal that lowers a cap, and on what ends it."""
    key = _key(code)
    if not key:
        left_s = (int(found.until_ns[gpu]) - view.now_ns) / NS
        return dict.fromkeys(EVIDENCE) | {"lift": f"{left_s:.0f} s more inside every guard"}
    at = gpu if key in GPU_KEYS else int(view.site.rack_of_gpu[gpu])
    limit, signal, feared = view.limit(key), find_signal(key), code % 2 == 1
    assert limit is not None
    assert signal is not None
    return {
        "signal": key,
        "unit": signal.unit,
        "value": finite(view.value(key)[at]),
        "worst": finite(view.worst(key)[at]),
        "guard": finite(limit.guard[at]),
        "limit": finite(limit.max[at]),
        "age_s": finite(view.age_s(key)[at], 1),
        "quality": QUALITY_NAMES[view.quality(key)[at]],
        "basis": "worst case" if feared else "measured",
        "lift": f"{RELEASE_S:.0f} s inside its guard" + (", heard again" if feared else ""),
    }
