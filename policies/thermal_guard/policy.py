"""thermal_guard: keeps GPUs inside their thermal limits by power caps, and takes further steps if caps fail.

It only lowers the upper bound of a cap; the slew limit sets the pace of a raise. If a GPU would shut itself
down within seconds even at its lowest cap, jobs save, clocks are locked, and nodes are drained, stopped and
switched off.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from policies.thermal_guard.caps import (
    AFTER,
    CONTROL,
    GPU_KEYS,
    KEYS,
    REASONS,
    RELEASE_S,
    SURGE,
    HeatCaps,
    assess,
)
from policies.thermal_guard.plan import LOCK
from policies.thermal_guard.rescue import OFF, ON, POWER, SAVE, SERVICE, STOP, Rescue, proposals, rescue
from policies.thermal_guard.rise import FAST, SLOW, TEMP, rise
from policies.thermal_guard.surge import POWERS, TEMPS, TIMES, surge
from twin.catalogue import I32, NS, control_value, signal_of
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
    given_away,
    in_scope,
    mask_index,
    scope_of,
    table_of,
)
from twin.telemetry import QUALITY_NAMES

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

DANGER_COLUMNS = (
    TableColumn("node"),
    TableColumn("left_now_s", "s", "left at its power"),
    TableColumn("left_s", "s", "left at the lowest caps"),
    TableColumn("left_locked_s", "s", "left with locked clocks"),
    TableColumn("since_s", "s", "in danger since"),
    TableColumn("action"),
    TableColumn("power", text="power is"),
    TableColumn("lift", text="ends by"),
)
ACTIONS = {
    ON: "lowest caps, locked clocks; its jobs save if they can in that time",
    STOP: "stop its system",
    OFF: "switch it off",
}


class ThermalGuard:
    """Policy that lowers GPU power caps against heat, and takes further steps where caps are not enough."""

    name: ClassVar[str] = "thermal_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL, LOCK, SAVE, SERVICE, POWER)
    rank: ClassVar[int] = 0
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(
        gpu={
            "until_ns": "i8",
            "cap_w": "f8",
            "coolant": "i1",
            "low_ns": "i8",
            "read_ns": "i8",
            "readings": "i1",
            "locked": "i1",
            "least_c": "f8",
            **dict.fromkeys((*FAST, *SLOW), "f8"),
            **dict.fromkeys(TIMES, "i8"),
            **dict.fromkeys((*TEMPS, *POWERS), "f4"),
        },
        node={"danger_ns": "i8", "calm_ns": "i8", "order": "i1"},
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Propose caps for GPUs that are too hot, or were until a minute ago, and orders for nodes."""
        if view.site.sizes["gpu"] == 0:
            return [], memory
        fast, readings = surge(view, memory)
        found, envelope = assess(view, memory, fast.capped), view.envelope(CONTROL)
        if not found.active.any() and not memory["danger_ns"].any():
            ended = {"low_ns": np.zeros_like(memory["low_ns"])}
            return [], given_away({**memory, **readings, **ended, "until_ns": found.until_ns})
        out, capped = [], mask_index(found.active)
        code_of = found.reason[capped]
        for code in np.unique(code_of).tolist():
            index = capped[code_of == code]
            # No wish: a GPU that stands below its cap is left there.
            want, cap_w = np.full(len(index), np.nan), found.cap_w[index]
            out.append(Proposal(CONTROL, index, envelope.low[index], cap_w, want, REASONS[code]))
        kept_w = np.where(found.active, found.cap_w, 0.0)
        warming, fits = rise(view, memory, capped)
        saved = rescue(view, memory, warming, fast)
        after: Memory = {
            "until_ns": found.until_ns,
            "cap_w": kept_w,
            "coolant": found.coolant.astype(np.int8),
            **fits,
            # What follows an episode is read at any power: the next one begins its fits anew
            "low_ns": np.where(found.active, fits["low_ns"], 0),
            **readings,
            **saved.memory,
        }
        return out + proposals(view, saved, found.active), given_away(after)

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The strained GPUs and racks: signal, worst case, limit, cap, and when the cap ends; the nodes in
        danger with the seconds that they have."""
        entity, inside = scope_of(view, request)
        fast = surge(view, memory)[0]
        found = assess(view, memory, fast.capped)
        saved = rescue(view, memory, rise(view, memory, mask_index(found.active))[0], fast)
        capped = in_scope(inside, "gpu", mask_index(found.active))
        gpus = in_scope(inside, "gpu", np.arange(view.site.sizes["gpu"], dtype=np.int32))
        nodes = in_scope(inside, "node", mask_index(saved.danger_ns > 0))
        guarded = [key for key in KEYS if view.limit(key) is not None]
        sentences = [Sentence(f"{len(capped):,} of {len(gpus):,} GPUs need a cap for heat")]
        if len(nodes):
            text = f"nodes with GPUs that warm up even at their lowest caps: {len(nodes):,}"
            sentences.append(Sentence(text, "warning"))
        if missing := [key for key in KEYS if key not in guarded]:
            sentences.append(Sentence(f"no profile of this site limits {', '.join(missing)}", "note"))
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(
                KeyFigure("capped_gpus", len(capped), "count", "GPUs that need a cap because of heat"),
                KeyFigure(
                    "endangered_nodes", len(nodes), "count", "nodes with GPUs that caps do not protect"
                ),
            ),
            tables=(_strains(view, found, capped), _dangers(view, saved, nodes)),
        )


def _dangers(view: View, found: Rescue, nodes: I32) -> DataTable:
    """A row for each node in danger, the shortest time first."""
    rows: list[dict[str, Value]] = []
    power = view.readback(POWER)
    for node in nodes[np.argsort(found.seconds.lowest_s[nodes], kind="stable")][:MAX_ROWS].tolist():
        order = int(found.order[node])
        rows.append(
            {
                "node": view.site.name("node", node),
                "left_now_s": finite(found.seconds.now_s[node], 1),
                "left_s": finite(found.seconds.lowest_s[node], 1),
                "left_locked_s": finite(found.seconds.locked_s[node], 1),
                "since_s": (view.now_ns - int(found.danger_ns[node])) / NS,
                "action": ACTIONS[order],
                "power": "unknown" if np.isnan(power[node]) else control_value(float(power[node]), POWER),
                "lift": "operators: the node stays off until they switch it on"
                if order
                else "GPUs that cool",
            }
        )
    text = "nodes with GPUs that warm up even at their lowest caps"
    return table_of("dangers", DANGER_COLUMNS, rows, text, len(nodes))


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
    """The signal of a reason; "" for the time after, and for what concerns a whole rack."""
    return KEYS[code // 2] if code < AFTER else ""


def _evidence(view: View, found: HeatCaps, code: int, gpu: int) -> dict[str, Value]:
    """The cells of a row on the signal that lowers a cap, and on what ends it."""
    key = _key(code)
    if code == SURGE:
        rack = view.site.rack_of_gpu
        hottest_c = float(np.nanmax(view.value(TEMP)[rack == rack[gpu]]))
        return dict.fromkeys(EVIDENCE) | {
            "signal": TEMP,
            "unit": "degC",
            "value": finite(hottest_c),
            "basis": "rise",
            "lift": f"{RELEASE_S:.0f} s without such a rise",
        }
    if not key:
        left_s = (int(found.until_ns[gpu]) - view.now_ns) / NS
        return dict.fromkeys(EVIDENCE) | {"lift": f"{left_s:.0f} s more inside every guard"}
    at = gpu if key in GPU_KEYS else int(view.site.rack_of_gpu[gpu])
    limit, signal, feared = view.limit(key), signal_of(key), code % 2 == 1
    assert limit is not None
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
        "lift": f"{RELEASE_S:.0f} s inside its guard" + (", reporting again" if feared else ""),
    }
