"""Preview tables: advised values of a policy beside the present ones, and the expected power.

One row per control and rack, or per entity of other tables; then one row per feeder with its budget. The
expected power assumes that the advice of all policies is obeyed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, Control, control_value, number, unit_for
from twin.contracts import DataTable, Sentence, TableColumn, Value, View, finite, in_scope, table_of
from twin.control import Arbiter, ShadowLeases
from twin.engine.shadow_power import SparedPower

MAX_ROWS = 200
DEVICES = {"gpu": "GPU", "cdu": "CDU"}  # as people write these tables
COLUMNS = (
    TableColumn("control"),
    TableColumn("where"),
    TableColumn("now"),
    TableColumn("now_low", detail=True),
    TableColumn("now_high", detail=True),
    TableColumn("advised"),
    TableColumn("advised_low", detail=True),
    TableColumn("advised_high", detail=True),
    TableColumn("unit", detail=True),
    TableColumn("power", text="power expected"),
    TableColumn("power_w", "W", detail=True),
    TableColumn("expected_w", "W", detail=True),
    TableColumn("count", "count", "devices"),
)
FEEDER_COLUMNS = (
    TableColumn("feeder"),
    TableColumn("power_w", "W", "load now"),
    TableColumn("expected_w", "W", "expected"),
    TableColumn("budget_w", "W", "budget"),
)
# Reasons why advice differs, or differs for now, from the proposal; by the start of an arbiter's verdict
HELD_BACK = {
    "deferred": "wait, as no more may be changed at once (blast radius)",
    "protected": "stay as they are, as nobody knows what runs there; a person may ask for it",
    "narrowed": "get less than it asks for, by a stronger policy or the envelope of the control",
}
MODES = {
    "held": "the controls are on hold: only what protects would be commanded",
    "released": "the controls are released: nothing would be commanded until `racktwin control resume`",
}


class Adviser(NamedTuple):
    """A policy that advises: its place in the order, name, controls, and the controls that it proposes on."""

    number: int
    name: str
    controls: tuple[str, ...]
    proposes: Collection[str]


def preview_rows(
    view: View,
    arbiter: Arbiter,
    spared: SparedPower | None,
    adviser: Adviser,
    inside: Mapping[str, I32] | None = None,
) -> list[dict[str, Value]]:
    """The advice of one policy by control and place. `inside`: only these entities, by table."""
    rows: list[dict[str, Value]] = []
    for key in adviser.controls:
        shadow = arbiter.shadow.get(key)
        if shadow is None:
            continue
        mine = shadow.apart & shadow.running() & (shadow.owner == adviser.number)
        index = in_scope(inside, shadow.control.table, np.flatnonzero(mine).astype(np.int32))
        rows += _rows(view, shadow, spared, index)
    return rows


def preview_tables(
    view: View,
    arbiter: Arbiter,
    spared: SparedPower | None,
    adviser: Adviser,
    inside: Mapping[str, I32] | None,
) -> tuple[list[Sentence], list[DataTable]]:
    """Return (sentences, tables) of the advice of one policy; no tables without advice."""
    rows = preview_rows(view, arbiter, spared, adviser, inside)
    notes = [Sentence(f"preview: {text}", "note") for text in _held_back(arbiter, adviser)]
    if not rows:
        here = "" if inside is None else " here"
        return [*notes, Sentence(f"preview: {first_words(rows)}{here}", "note")], []
    tables = [table_of("preview", COLUMNS, rows[:MAX_ROWS], "preview: now, and as advised", len(rows))]
    feeders = [] if spared is None else _feeders(view, spared, inside)
    if feeders:
        words = "preview: feeders now, and if the advice of all policies were obeyed"
        tables.append(table_of("preview_feeders", FEEDER_COLUMNS, feeders[:MAX_ROWS], words, len(feeders)))
    words = f"preview: nothing of this is commanded; {first_words(rows)}"
    return [Sentence(words), *notes], tables


def first_words(rows: list[dict[str, Value]]) -> str:
    """Say what would be commanded first: how many devices of each control, and the power expected of them."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row["control"])] = counts.get(str(row["control"]), 0) + int(_number(row["count"]))
    if not counts:
        return "armed now, it would command nothing"
    what = ", ".join(f"{key} of {_devices(key, count)}" for key, count in counts.items())
    text = f"armed now, it would first set {what}"
    now_w, left_w = (sum(_number(row[name]) for row in rows) for name in ("power_w", "expected_w"))
    if now_w - left_w >= 1.0:
        text += f"; the power of what it caps is expected to fall {_from_to(now_w, left_w)}"
    return text


def _from_to(now_w: float, expected_w: float) -> str:
    unit = unit_for("W", max(now_w, expected_w))
    now, then = (f"{number(power_w * unit.factor)} {unit.name}" for power_w in (now_w, expected_w))
    return f"from {now} to {then}"


def _devices(control: str, count: int) -> str:
    table = control.partition(".")[0]
    return f"{count:,} {DEVICES.get(table, table)}{'' if count == 1 else 's'}"


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _held_back(arbiter: Arbiter, adviser: Adviser) -> list[str]:
    """Return the reasons that reduce or block the commands of a policy."""
    out = [MODES[arbiter.mode]] if arbiter.mode in MODES else []
    for verdict, count in sorted(arbiter.advised_verdicts.items()):
        kind, key, *policy = verdict.split("/")
        if key in adviser.proposes and policy in ([], [adviser.name]):
            out.append(f"{key}: {count:,} {HELD_BACK[kind]}")
    return out


def _rows(view: View, shadow: ShadowLeases, spared: SparedPower | None, mine: I32) -> list[dict[str, Value]]:
    """Return one row per rack of nodes and GPUs, or one per entity of another table."""
    control, site = shadow.control, view.site
    rack_of = {"gpu": site.rack_of_gpu, "node": site.rack_of_node}.get(control.table)
    place = mine if rack_of is None else rack_of[mine]
    out: list[dict[str, Value]] = []
    for at in np.unique(place)[: MAX_ROWS + 1].tolist():
        of = mine[place == at]
        now, value = view.readback(control.key)[of], shadow.value[of]
        known = now[np.isfinite(now)]
        alone = rack_of is None or len(of) == 1
        out.append(
            {
                "control": control.key,
                "where": _name(view, control.table, int(of[0])) if alone else site.name("rack", at),
                "count": len(of),
                "now": _words(known, control),
                "now_low": finite(known.min()) if len(known) else None,
                "now_high": finite(known.max()) if len(known) else None,
                "advised": _words(value, control),
                "advised_low": finite(value.min()),
                "advised_high": finite(value.max()),
                "unit": control.unit,
                **_power(view, control, spared, of),
            }
        )
    return out


def _words(values: F64, control: Control) -> str:
    """Values of a control as people read them: states by name, a range, or that nobody reads them."""
    if not len(values):
        return "not read"
    ends = (round(float(values.min()), 1), round(float(values.max()), 1))
    return " to ".join(dict.fromkeys(control_value(end, control.key) for end in ends))


def _name(view: View, table: str, entity: int) -> str:
    return view.jobs.shown(entity) or f"job {entity}" if table == "job" else view.site.name(table, entity)


def _power(view: View, control: Control, spared: SparedPower | None, index: I32) -> dict[str, Value]:
    """The power of capped devices, now and as expected under their caps; None for other controls."""
    if spared is None or not control.key.endswith("power_cap_w") or control.table not in spared.watts:
        return {"power": "", "power_w": None, "expected_w": None}
    read_w = view.believed(f"{control.table}.power_w").astype(np.float64)
    left_w = spared.left_w(control.table, read_w)
    now_w, expected_w = float(np.nansum(read_w[index])), float(np.nansum(left_w[index]))
    return {"power": _from_to(now_w, expected_w), "power_w": finite(now_w), "expected_w": finite(expected_w)}


def _feeders(view: View, spared: SparedPower, inside: Mapping[str, I32] | None) -> list[dict[str, Value]]:
    """Return the feeders whose load would change."""
    read_w, budget_w = view.believed("feeder.power_w").astype(np.float64), view.budget_w()
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
