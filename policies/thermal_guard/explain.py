"""Explanations of the thermal guard: the causes of its caps, and the nodes that heat puts in danger."""

from __future__ import annotations

import numpy as np

from policies.thermal_guard.caps import GPU_KEYS, KEYS, REASONS, RELEASE_S, HeatCaps
from policies.thermal_guard.rescue import LEVELS, Rescue
from twin.catalogue import I32, NS, find_signal
from twin.contracts import DataTable, TableColumn, Value, View, finite, table_of
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
    TableColumn("now_s", "s", "left now"),
    TableColumn("low_s", "s", "left at the lowest caps"),
    TableColumn("since_s", "s", "in danger since"),
    TableColumn("action"),
    TableColumn("lift", text="ends by"),
)


def dangers_table(view: View, found: Rescue, nodes: I32) -> DataTable:
    """A row for each node in danger, the shortest time first."""
    rows: list[dict[str, Value]] = []
    for node in nodes[np.argsort(found.left_s[nodes], kind="stable")][:MAX_ROWS].tolist():
        order, since_ns = int(found.order[node]), int(found.danger_ns[node])
        rows.append(
            {
                "node": view.site.name("node", node),
                "now_s": finite(found.now_s[node], 1),
                "low_s": finite(found.left_s[node], 1),
                "since_s": (view.now_ns - since_ns) / NS if since_ns else None,
                "action": LEVELS[order] if order else "lowest caps; its jobs save if they can in that time",
                "lift": "people: it stays off until they switch it on" if order else "cooler GPUs",
            }
        )
    text = "nodes whose GPUs would shut down even at their lowest caps"
    return table_of("dangers", DANGER_COLUMNS, rows, text, len(nodes))


def strains_table(view: View, found: HeatCaps, capped: I32) -> DataTable:
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
