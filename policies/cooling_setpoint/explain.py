"""Explanation of `cooling_setpoint`: set points, binding limits, expected and measured savings, per loop."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from policies.cooling_setpoint.groups import CODES, WHY, bounds_c, dew_points_c, groups_of, own_c, standing_c
from policies.cooling_setpoint.loop_state import balance_of
from policies.cooling_setpoint.margins import CONTROL, Ceilings
from policies.cooling_setpoint.obstacles import Obstacle, obstacles_of
from policies.cooling_setpoint.plan import plan_of
from policies.cooling_setpoint.pressure import PRESSURE, is_lowered, unheld
from policies.cooling_setpoint.sections import LoopCdus, good
from twin.catalogue import NS
from twin.contracts import (
    Z90,
    DataTable,
    ExplainRequest,
    Explanation,
    FigureMetric,
    KeyFigure,
    Memory,
    Sentence,
    TableColumn,
    Value,
    View,
    finite,
    in_scope,
    scope_of,
    table_of,
)

MAX_ROWS = 200
NAME = "cooling_setpoint"
COLUMNS = (
    TableColumn("loop"),
    TableColumn("cdus", "count", "CDUs"),
    TableColumn("own_c", "degC", "BMS's own"),
    TableColumn("now_c", "degC", "now"),
    TableColumn("want_c", "degC", "proposed"),
    TableColumn("ceiling_c", "degC", "at most"),
    TableColumn("binds", text="which binds"),
    TableColumn("expected_w", "W", "expected saving"),
    TableColumn("doubt_w", "W", "90 % interval, +-"),
    TableColumn("expected_kwh", "kWh", "expected so far"),
    TableColumn("saved_kwh", "kWh", "saved so far"),
    TableColumn("basis", text="by"),
    TableColumn("own_pa", "Pa", "pressure, BMS's own"),
    TableColumn("want_pa", "Pa", "pressure, proposed"),
    TableColumn("pump_expected_w", "W", "expected saving of pumps"),
    TableColumn("pump_saved_kwh", "kWh", "saved by pumps, by readings"),
    TableColumn("why"),
)
PLAN_COLUMNS = (
    TableColumn("loop"),
    TableColumn("ahead_s", "s", "from now"),
    TableColumn("air_c", "degC", "outdoor air"),
    TableColumn("heat_pu", "pu", "heat over that of now"),
    TableColumn("supply_c", "degC", "set point by then"),
    TableColumn("reached_c", "degC", "coolant that the coolers hold"),
    TableColumn("saving_w", "W", "expected saving"),
)
DOUBT_COLUMNS = (
    TableColumn("gpu"),
    TableColumn("temp_c", "degC"),
    TableColumn("power_w", "W"),
    TableColumn("rise_k", "K", "over its coolant"),
)


def explanation(
    view: View, memory: Memory, request: ExplainRequest, found: Ceilings, probability: float
) -> Explanation:
    """Return the explanation of the site, or of the loops of one entity."""
    entity, inside = scope_of(view, request)
    groups = [g for g in groups_of(view.site) if len(in_scope(inside, "cdu", g.cdus))]
    obstacles = obstacles_of(view, groups, found)
    rows = [_row(view, memory, g, found, o) for g, o in zip(groups, obstacles, strict=True)]
    saved = sum(float(memory["saved_j"][g.loop]) for g in groups if g.loop >= 0) / 3.6e6
    expected = sum(float(memory["expected_j"][g.loop]) for g in groups if g.loop >= 0) / 3.6e6
    sentences = [_sentence(view, memory, g, found, o) for g, o in zip(groups, obstacles, strict=True)]
    sentences += _pressure_sentences(view, memory, groups, obstacles)
    ahead, short = _plans(view, memory, groups, found)
    sentences += short
    if not groups:
        sentences = [Sentence("no CDU of this site cools anything: there is no set point to control", "note")]
    elif len(groups) > 1:
        moved = sum(row["want_c"] is not None for row in rows)
        sentences.insert(0, Sentence(f"supply set points are asked for on {moved} of {len(groups)} loops"))
    if any(row["basis"] == "estimate" for row in rows):
        sentences.append(
            Sentence(
                "no meter of a loop's pumps, fans and chillers (loop.power_w): savings are estimates", "note"
            )
        )
    per_mille = f"a GPU passes its guard with a probability of {probability:g} at most"
    sentences.append(
        Sentence(f"{per_mille}; no meter measures the pumps of CDUs: their savings are estimates", "note")
    )
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        entity=entity,
        sentences=tuple(sentences[:MAX_ROWS]),
        figures=(
            KeyFigure("saved_kwh", saved, "kWh", "saved so far", _metric("saved_kwh")),
            KeyFigure("expected_kwh", expected, "kWh", "expected so far", _metric("expected_kwh")),
            KeyFigure(
                "pump_saved_kwh",
                sum(float(memory["pump_saved_j"][g.loop]) for g in groups if g.loop >= 0) / 3.6e6,
                "kWh",
                "saved by pumps so far",
                _metric("pump_saved_kwh"),
            ),
            KeyFigure(
                "moved_cdus", int(np.isfinite(memory["want_c"]).sum()), "count", "CDUs with a set point"
            ),
        ),
        tables=(
            table_of("loops", COLUMNS, rows[:MAX_ROWS], "loops and their set points", len(rows)),
            table_of("plan", PLAN_COLUMNS, ahead[:MAX_ROWS], "set points of the hours ahead", len(ahead)),
            _doubts(view, memory, groups, found),
        ),
    )


def _metric(name: str) -> FigureMetric:
    return FigureMetric(f"cooling_setpoint_{name}")


def _name(view: View, group: LoopCdus) -> str:
    table, row = ("loop", group.loop) if group.loop >= 0 else ("cdu", int(group.cdus[0]))
    return view.site.name(table, row)


def _binds(view: View, group: LoopCdus, found: Ceilings) -> tuple[float, str]:
    """Return (the warmest supply of a group, name of the GPU or rack that binds it)."""
    known = group.cdus[np.isfinite(found.supply_c[group.cdus])]
    if not len(known):
        return np.nan, ""
    cdu = int(known[np.argmin(found.supply_c[known])])
    table, row = ("gpu", int(found.gpu[cdu])) if found.gpu[cdu] >= 0 else ("rack", int(found.rack[cdu]))
    return float(found.supply_c[cdu]), view.site.name(table, row) if row >= 0 else ""


def _row(
    view: View, memory: Mapping[str, np.ndarray], group: LoopCdus, found: Ceilings, obstacle: Obstacle
) -> dict[str, Value]:
    i, cdus = group.loop, group.cdus
    ceiling_c, binds = _binds(view, group, found)
    wanted = bool(np.isfinite(memory["want_c"][cdus]).any())
    row: dict[str, Value] = dict.fromkeys((c.name for c in COLUMNS), None)
    row |= {
        "loop": _name(view, group),
        "cdus": len(cdus),
        "own_c": finite(np.min(memory["base_c"][cdus]), 2),
        "now_c": finite(np.min(own_c(view)[cdus]), 2),
        "want_c": finite(standing_c(memory, group), 2) if wanted else None,
        "ceiling_c": finite(ceiling_c, 2),
        "binds": binds,
        "basis": "",
        "why": obstacle.text or (WHY[CODES[int(memory["code"][cdus[0]])]] if wanted else _waiting(memory, i)),
    }
    if i >= 0:
        row |= {
            "expected_w": finite(memory["expected_w"][i], 1) if wanted else None,
            "doubt_w": finite(Z90 * memory["doubt_w"][i], 1) if wanted else None,
            "expected_kwh": finite(memory["expected_j"][i] / 3.6e6, 3),
            "saved_kwh": finite(memory["saved_j"][i] / 3.6e6, 3),
            "own_pa": finite(memory["own_pa"][cdus].min(), 0),
            "want_pa": finite(memory["want_pa"][cdus].min(), 0),
            "pump_expected_w": finite(memory["pump_expected_w"][i], 1) if is_lowered(memory, group) else None,
            "pump_saved_kwh": finite(memory["pump_saved_j"][i] / 3.6e6, 3),
            "basis": "meter" if np.isfinite(memory["loop_power_w"][i]) else "estimate",
        }
    return row


def _pressure_sentences(
    view: View, memory: Mapping[str, np.ndarray], groups: list[LoopCdus], obstacles: list[Obstacle]
) -> list[Sentence]:
    """Return the pressures of all loops in words."""
    out, envelope = list[Sentence](), view.envelope(PRESSURE)
    for group, obstacle in zip(groups, obstacles, strict=True):
        if group.loop < 0 or not np.isfinite(envelope.low[group.cdus]).all():
            continue
        name, reason = _name(view, group), obstacle.text or unheld(view, memory, group).text
        if reason and not is_lowered(memory, group):
            out.append(Sentence(f"{name}: keeps the BMS's own pressure, because {reason}", "note"))
        elif is_lowered(memory, group):
            want_pa, own_pa = (float(memory[key][group.cdus].min()) for key in ("want_pa", "own_pa"))
            expected_w = float(memory["pump_expected_w"][group.loop])
            doubt_w = Z90 * float(memory["pump_doubt_w"][group.loop])
            out.append(
                Sentence(
                    f"{name}: {want_pa / 1e3:.0f} kPa in place of {own_pa / 1e3:.0f} kPa should save "
                    f"{expected_w / 1e3:.2f} kW (+-{doubt_w / 1e3:.2f}), GPUs that leak more counted"
                )
            )
    return out


def _waiting(memory: Mapping[str, np.ndarray], loop: int) -> str:
    if loop < 0:
        return "its loop is unknown: only lowered for heat"
    if not memory["decided_ns"][loop] or not memory["watched_s"][loop]:
        return "its loop has not reported yet"
    return f"no move has a certain gain; observed for {float(memory['watched_s'][loop]) / 3600.0:.1f} h"


def _sentence(
    view: View, memory: Mapping[str, np.ndarray], group: LoopCdus, found: Ceilings, obstacle: Obstacle
) -> Sentence:
    """Return a sentence about a loop."""
    name, i = _name(view, group), group.loop
    wanted = np.isfinite(memory["want_c"][group.cdus]).any()
    stands_c, base_c = standing_c(memory, group), float(np.min(memory["base_c"][group.cdus]))
    _, safe_c = bounds_c(view, group, dew_points_c(view))
    if obstacle.kind == "back":
        to = f"at {stands_c:.1f} °C, no warmer than the safe {safe_c:.1f} °C" if wanted else "left as it is"
        return Sentence(f"{name}: {to}, because {obstacle.text}", "warning")
    if obstacle.kind == "hold":
        return Sentence(f"{name}: goes no warmer, because {obstacle.text}", "warning")
    if not wanted:
        return Sentence(f"{name}: keeps the BMS's own set point; {_waiting(memory, i)}")
    ceiling_c, binds = _binds(view, group, found)
    text = f"{name}: {stands_c:.1f} °C in place of {base_c:.1f} °C"
    if i >= 0:
        expected_w, doubt_w = float(memory["expected_w"][i]), Z90 * float(memory["doubt_w"][i])
        text += f" should save {expected_w / 1e3:.2f} kW (+-{doubt_w / 1e3:.2f})"
    if np.isfinite(ceiling_c):
        text += f"; {binds} allows {ceiling_c:.1f} °C"
    if i >= 0 and memory["moved_ns"][i]:
        text += f"; moved {(view.now_ns - int(memory['moved_ns'][i])) / NS / 60.0:.0f} min ago"
    return Sentence(text)


def _plans(
    view: View, memory: Mapping[str, np.ndarray], groups: list[LoopCdus], found: Ceilings
) -> tuple[list[dict[str, Value]], list[Sentence]]:
    """Return (the steps of all loops, a warning for each loop whose coolers reach their limit)."""
    rows, out, envelope, dew_c = (
        list[dict[str, Value]](),
        list[Sentence](),
        view.envelope(CONTROL),
        dew_points_c(view),
    )
    for group in groups:
        balance, base_c = balance_of(view, memory, group), float(np.min(memory["base_c"][group.cdus]))
        ceiling_c = min(_binds(view, group, found)[0], float(envelope.high[group.cdus].min()))
        if balance is None or not np.isfinite(base_c + ceiling_c):
            continue
        name, low_c = _name(view, group), bounds_c(view, group, dew_c)[0]
        steps = plan_of(view, balance, group, (low_c, ceiling_c), base_c)
        keys = ("ahead_s", "air_c", "supply_c", "reached_c", "saving_w", "heat_pu")
        rows += [{"loop": name, **{key: finite(getattr(step, key), 2) for key in keys}} for step in steps]
        for step in [step for step in steps if step.is_short and step.reached_c > ceiling_c][:1]:
            text = (
                f"{name}: in {step.ahead_s / 3600.0:.1f} h, at {step.air_c:.1f} °C outside, its coolers hold "
                f"no less than {step.reached_c:.1f} °C where {ceiling_c:.1f} °C is the most: "
                "its load has to be lower"
            )
            out.append(Sentence(text, "warning"))
    return rows, out


def _doubts(
    view: View, memory: Mapping[str, np.ndarray], groups: list[LoopCdus], found: Ceilings
) -> DataTable:
    """Return a row for each GPU with an unknown or untrusted temperature."""
    gpus = np.unique([g for group in groups for g in group.gpus[found.doubted[group.gpus]].tolist()])
    gpus = gpus.astype(np.int32)
    temp_c, power_w = good(view, "gpu.temp_c"), good(view, "gpu.power_w")
    rows: list[dict[str, Value]] = [
        {
            "gpu": view.site.name("gpu", g),
            "temp_c": finite(temp_c[g], 1),
            "power_w": finite(power_w[g], 1),
            "rise_k": finite(memory["rise_k"][g], 1),
        }
        for g in gpus[:MAX_ROWS].tolist()
    ]
    return table_of(
        "doubted",
        DOUBT_COLUMNS,
        rows,
        "GPUs whose temperature is unknown or contradicts their power",
        len(gpus),
    )
