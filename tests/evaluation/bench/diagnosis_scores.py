"""Scores of a campaign of faults: shares by kind, detection times, false alarms; a table, and JSON.

From the plain outcomes that `bench_diagnosis` collects.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.table import Table

Row = tuple[bool, bool, float, int]  # right entity, right class, seconds until it was named, told beside


def rows_of(outcomes: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Faults by kind, and all single ones and all of pairs; without those that no sample ever showed."""
    rows: dict[str, list[Row]] = {}
    for o in outcomes:
        if not o["shown"]:
            continue
        for i, script in enumerate(o["scripts"]):
            row = (o["right_entity"][i], o["right_class"][i], o["delay_s"][i], len(o["beside"]))
            rows.setdefault(script["kind"], []).append(row)
            rows.setdefault("all, single" if len(o["scripts"]) == 1 else "all, pairs", []).append(row)
    return {kind: rows[kind] for kind in sorted(rows, key=lambda k: (k.startswith("all"), k))}


def _score(rows: list[Row]) -> dict[str, float | int | None]:
    """Shares and times of some faults; None where none was named."""
    entity, of_class, delay, beside = zip(*rows, strict=True)
    known = [d for d in delay if d == d]
    p50, p90 = (float(np.percentile(known, p)) if known else None for p in (50, 90))
    return {
        "count": len(rows),
        "right_entity_pu": float(np.mean(entity)),
        "right_class_pu": float(np.mean(of_class)),
        "delay_p50_s": p50,
        "delay_p90_s": p90,
        "beside": int(sum(beside)),
    }


def summary_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a campaign. Without NaN: what is not known is None."""
    outcomes = [o for r in results for o in r["outcomes"]]
    scores = {kind: _score(rows) for kind, rows in rows_of(outcomes).items()}
    both = [all(o["right_entity"]) for o in outcomes if len(o["scripts"]) == 2 and o["shown"]]
    single, pair = scores.pop("all, single", None), scores.pop("all, pairs", None)
    hours = float(sum(r["rack_hours"] for r in results))
    false = int(sum(r["false_count"] for r in results))
    return {
        "single_right_entity_pu": single and single["right_entity_pu"],
        "single_right_class_pu": single and single["right_class_pu"],
        "pair_right_entity_pu": pair and pair["right_entity_pu"],
        "pair_right_class_pu": pair and pair["right_class_pu"],
        "both_named_pu": float(np.mean(both)) if both else None,
        "false_per_1000_rack_hours": 1000.0 * false / hours if hours else None,
        "rack_hours": hours,
        "false_count": false,
        "singles": single["count"] if single else 0,
        "pairs": len(both),
        "left_out": sum(not o["shown"] for o in outcomes),
        "by_kind": scores,
    }


def table_of(outcomes: list[dict[str, Any]]) -> Table:
    """Rows by kind of fault."""
    table = Table("kind", "faults", "entity", "class", "told after p50, s", "p90, s", "beside")
    for kind, rows in rows_of(outcomes).items():
        score = _score(rows)
        times = ["-" if score[k] is None else f"{score[k]:.0f}" for k in ("delay_p50_s", "delay_p90_s")]
        shares = [f"{score[k]:.1%}" for k in ("right_entity_pu", "right_class_pu")]
        table.add_row(kind, str(score["count"]), *shares, *times, str(score["beside"]))
    return table


def power_table_of(outcomes: list[dict[str, Any]]) -> Table:
    """Rows by kind, columns by size: how many were found with entity and kind, of those that showed; seconds
    until the entity was named, p50."""
    sizes, shown = sorted({o["share"] for o in outcomes}), [o for o in outcomes if o["shown"]]
    table = Table("kind", *(f"{size:.0%} of the greatest" for size in sizes))
    for kind in sorted({o["scripts"][0]["kind"] for o in outcomes}):
        cells = []
        for size in sizes:
            mine = [o for o in shown if o["scripts"][0]["kind"] == kind and o["share"] == size]
            late = [o["delay_s"][0] for o in mine if o["right_class"][0]]
            cells.append(
                f"{len(late)}/{len(mine)}" + (f", {float(np.nanmedian(late)):.0f} s" if late else "")
            )
        table.add_row(kind, *cells)
    return table


def written(results: list[dict[str, Any]]) -> str:
    """The JSON of a campaign: its figures, and each case. Without NaN."""
    summary = summary_of(results)
    for result in results:
        for outcome in result["outcomes"]:
            outcome["delay_s"] = [d if d == d else None for d in outcome["delay_s"]]
    return json.dumps({"summary": summary, "results": results}, indent=1, allow_nan=False)
