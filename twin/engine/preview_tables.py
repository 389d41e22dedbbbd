"""Preview tables: what a policy's advice would set beside what is set now, and the power expected of it.

A row for each control and rack, or entity elsewhere; then the feeders, against their budgets. The expected
power counts the advice of all policies as obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from twin.catalogue import I32, Control
from twin.contracts import DataTable, Sentence, TableColumn, Value, View, finite, in_scope, table_of
from twin.control import Arbiter, ShadowLeases
from twin.engine.shadow_power import SparedPower

MAX_ROWS = 200
COLUMNS = (
    TableColumn("control"),
    TableColumn("where"),
    TableColumn("count", "count", "entities"),
    TableColumn("now_low", text="now"),
    TableColumn("now_high", text="to"),
    TableColumn("advised_low", text="advised"),
    TableColumn("advised_high", text="to"),
    TableColumn("unit"),
    TableColumn("power_w", "W", "draw now"),
    TableColumn("expected_w", "W", "expected"),
)
FEEDER_COLUMNS = (
    TableColumn("feeder"),
    TableColumn("power_w", "W", "load now"),
    TableColumn("expected_w", "W", "expected"),
    TableColumn("budget_w", "W", "budget"),
)


def preview_tables(
    view: View,
    arbiter: Arbiter,
    spared: SparedPower | None,
    owner: tuple[int, tuple[str, ...]],
    inside: Mapping[str, I32] | None,
) -> tuple[list[Sentence], list[DataTable]]:
    """(sentences, tables) of the advice of one policy: `owner` is its place in the order and its controls.

    `inside`: only these entities, by table. Nothing where nothing is advised.
    """
    rows: list[dict[str, Value]] = []
    number, controls = owner
    for key in controls:
        shadow = arbiter.shadow.get(key)
        if shadow is None:
            continue
        mine = np.flatnonzero(shadow.apart & shadow.running() & (shadow.owner == number)).astype(np.int32)
        mine = in_scope(inside, shadow.control.table, mine)
        rows += _rows(view, shadow, spared, mine)
    if not rows:
        return [], []
    count = sum(int(row["count"]) for row in rows if isinstance(row["count"], int))
    text = (
        f"preview: nothing of this is commanded; {count:,} values are advised, and count as obeyed in advice"
    )
    tables = [table_of("preview", COLUMNS, rows[:MAX_ROWS], "preview: now, and as advised", len(rows))]
    feeders = [] if spared is None else _feeders(view, spared, inside)
    if feeders:
        words = "preview: feeders now, and if all advice were obeyed"
        tables.append(table_of("preview_feeders", FEEDER_COLUMNS, feeders[:MAX_ROWS], words, len(feeders)))
    return [Sentence(text, "note")], tables


def _rows(view: View, shadow: ShadowLeases, spared: SparedPower | None, mine: I32) -> list[dict[str, Value]]:
    """A row for each rack of nodes and GPUs, or for each entity of another table."""
    control, site = shadow.control, view.site
    rack_of = {"gpu": site.rack_of_gpu, "node": site.rack_of_node}.get(control.table)
    place = mine if rack_of is None else rack_of[mine]
    out: list[dict[str, Value]] = []
    for at in np.unique(place)[: MAX_ROWS + 1].tolist():
        of = mine[place == at]
        now, value = view.readback(control.key)[of], shadow.value[of]
        known = now[np.isfinite(now)]
        out.append(
            {
                "control": control.key,
                "where": _name(view, control.table if rack_of is None else "rack", at),
                "count": len(of),
                "now_low": finite(known.min()) if len(known) else None,
                "now_high": finite(known.max()) if len(known) else None,
                "advised_low": finite(value.min()),
                "advised_high": finite(value.max()),
                "unit": control.unit,
                **_power(view, control, spared, of),
            }
        )
    return out


def _name(view: View, table: str, entity: int) -> str:
    return view.jobs.shown(entity) or f"job {entity}" if table == "job" else view.site.name(table, entity)


def _power(view: View, control: Control, spared: SparedPower | None, index: I32) -> dict[str, Value]:
    """The power of capped devices, now and as expected under their caps; None for other controls."""
    if spared is None or not control.key.endswith("power_cap_w") or control.table not in spared.watts:
        return {"power_w": None, "expected_w": None}
    read_w = view.value(f"{control.table}.power_w").astype(np.float64)
    left_w = spared.left_w(control.table, read_w)
    return {"power_w": finite(np.nansum(read_w[index])), "expected_w": finite(np.nansum(left_w[index]))}


def _feeders(view: View, spared: SparedPower, inside: Mapping[str, I32] | None) -> list[dict[str, Value]]:
    """The feeders whose load would be another one."""
    read_w, budget_w = view.value("feeder.power_w").astype(np.float64), view.budget_w()
    left_w = spared.left_w("feeder", read_w)
    at = np.flatnonzero(np.abs(left_w - read_w) >= 1.0).astype(np.int32)
    return [
        {
            "feeder": view.site.name("feeder", i),
            "power_w": finite(read_w[i]),
            "expected_w": finite(left_w[i]),
            "budget_w": finite(budget_w[i]),
        }
        for i in in_scope(inside, "feeder", at).tolist()
    ]
