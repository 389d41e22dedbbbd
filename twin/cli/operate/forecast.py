"""The command `forecast list`: what a running daemon expects, how sure it is, and why.

Alone, the site's own quantities; with a quantity, its entities. Where there is no forecast, the daemon's
reason is printed.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import ConfigError, clean, did_you_mean, duration
from twin.cli.arguments import live
from twin.cli.grammar import WrongCall
from twin.report import Shown, known_ahead, shown, why

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

SHOWN_ENTITIES = 200
LONG_ROW_S = 900.0  # rows of the horizons beyond an hour, as in `models.load.model`
SHORT_ROW_S, SHORT_HORIZON_S = 60.0, 3600.0


def _ask(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """Ask for the site's forecasts, or for those of a quantity. Raises ConfigError for one without any."""
    if args.quantity is None and args.name is not None:
        raise WrongCall("--name: a quantity is missing: expected one such as rack.power_w")
    tree = client.get("/summary")
    first = {"now_ns": tree["now_ns"], **tree["forecasts"]}
    if args.quantity is None:
        return first
    if args.quantity not in first["quantities"]:
        known = ", ".join(first["quantities"]) or "; ".join(first["notes"]) or "none"
        near = did_you_mean(args.quantity, first["quantities"])
        raise ConfigError(f"no forecasts of {args.quantity}; expected one of: {known}{near}")
    return _of_quantity(client, args.quantity, args.name, first)


def _of_quantity(client: Client, key: str, name: str | None, first: dict[str, Any]) -> dict[str, Any]:
    """A quantity's forecasts, entity by entity, in the form of the summary's rows."""
    answer = client.get("/forecasts", signal=key, names=name, limit=SHOWN_ENTITIES)
    unit, now = _present(client, key, name, first)
    rows, expected = [], False
    for i, entity in enumerate(answer["forecasts"][0]["names"]):
        ahead = []
        for f in answer["forecasts"]:
            mean, low, high = f["mean"][i], f["lo"][i], f["hi"][i]
            sure = None not in (mean, low, high)
            ahead.append({"horizon_s": f["horizon_s"], "mean": mean, "lo": low if sure else None,
                          "hi": high if sure else None,
                          "why": why(f["basis"], _row_s(f["horizon_s"])) if sure else ""})  # fmt: skip
            expected |= mean is not None
        rows.append({"signal": key, "name": entity, "unit": unit, "now": now.get(entity),
                     "ahead": known_ahead(ahead, _row_s)})  # fmt: skip
    is_silent = not expected and all(r["now"] is None for r in rows)
    if not any(r["ahead"] for r in rows):
        rows = []
    return {"now_ns": answer["now_ns"], "rows": rows, "unheard": [key] if is_silent else [],
            "more": answer["next_offset"] is not None,
            "awaited": first.get("awaited", ""), "notes": first["notes"],
            "budgets": first["budgets"] if key == "feeder.power_w" else [],
            "models": sorted({f["model"] for f in answer["forecasts"]})}  # fmt: skip


def _row_s(horizon_s: float) -> float:
    return SHORT_ROW_S if horizon_s <= SHORT_HORIZON_S else LONG_ROW_S


def _present(
    client: Client, key: str, name: str | None, first: dict[str, Any]
) -> tuple[str, dict[str, float | None]]:
    """(unit, what is measured now by entity); a sum that no signal gives is known of the site only."""
    from twin.catalogue import find_quantity, find_signal

    what = find_quantity(key)
    unit = "" if what is None else what.unit
    if key.startswith("site."):
        return unit, {r["name"]: r["now"] for r in first["rows"] if r["signal"] == key}
    if find_signal(key) is None:
        return unit, {}
    table, _, signal = key.partition(".")
    state = client.get(f"/state/{table}", signals=signal, names=name, limit=SHOWN_ENTITIES)
    column = state["signals"].get(signal)
    if column is None:
        return unit, {}
    values = zip(state["names"], column["value"], column["quality"], strict=True)
    return unit, {entity: value if quality == "good" else None for entity, value, quality in values}


def show(tree: dict[str, Any], out: Console) -> None:
    """A table per entity with what each horizon rests on; many entities in one table, a line each."""
    rows = tree["rows"]
    if len(rows) > 1 and len({r["signal"] for r in rows}) == 1:
        _many(rows, tree.get("more", False), out)
    else:
        for row in rows:
            _one(row, out)
    for line in tree["budgets"]:
        out.print(Text(clean(line, 300), "yellow"), soft_wrap=True)
    if tree.get("unheard"):
        out.print(Text(clean(f"no readings of {', '.join(tree['unheard'])}", 600), "dim"), soft_wrap=True)
    for line in filter(None, (tree.get("awaited"), *tree["notes"])):
        out.print(Text(clean(line, 600), "dim"), soft_wrap=True)
    if tree.get("models"):
        out.print(Text(clean(f"model {', '.join(tree['models'])}", 300), "dim"), soft_wrap=True)


def _how(rows: list[dict[str, Any]]) -> Shown:
    parts = [r["now"] for r in rows] + [a[k] for r in rows for a in r["ahead"] for k in ("mean", "lo", "hi")]
    return shown(rows[0]["unit"], max((abs(v) for v in parts if v is not None), default=0.0))


def _said(value: float | None, how: Shown) -> str:
    return "-" if value is None else f"{value * how.factor:,.{how.digits}f}"


def _cell(ahead: dict[str, Any] | None, how: Shown) -> Text:
    if ahead is None:
        return Text("-")
    cell = Text(_said(ahead["mean"], how))
    cell.append(f"\n{_said(ahead['lo'], how)}–{_said(ahead['hi'], how)}", "dim")
    return cell


def _reasons(ahead: dict[str, Any]) -> str:
    return "; ".join(filter(None, (ahead["why"], ahead["note"])))


def _one(row: dict[str, Any], out: Console) -> None:
    from twin.report import grid

    how = _how([row])
    head = Text(clean(row["signal"]), "bold")
    now = "" if row["now"] is None else f"  now {_said(row['now'], how)} {how.unit}"
    head.append(f"  {clean(row['name'])}{now}", "not bold")
    out.print(head, soft_wrap=True)
    lines = []
    for a in row["ahead"]:
        band = f"{_said(a['lo'], how)} to {_said(a['hi'], how)}"
        expected = f"{_said(a['mean'], how)} {how.unit}"
        lines.append([f"in {duration(a['horizon_s'])}", expected, band, _reasons(a)])
    grid(out, ("", "expected", "90 % band", "based on"), lines, "no forecasts")
    out.print()


def _many(rows: list[dict[str, Any]], more: bool, out: Console) -> None:
    from twin.report import grid

    how = _how(rows)
    unit = f", {how.unit}" if how.unit else ""
    out.print(
        Text(f"{clean(rows[0]['signal'])}{unit}: expected, and the 90 % band below", "bold"), soft_wrap=True
    )
    by_row = [{a["horizon_s"]: a for a in r["ahead"]} for r in rows]
    horizons = sorted({h for ahead in by_row for h in ahead})
    lines = [
        [r["name"], _said(r["now"], how), *(_cell(ahead.get(h), how) for h in horizons)]
        for r, ahead in zip(rows, by_row, strict=True)
    ]
    grid(out, ("", "now", *(duration(h) for h in horizons)), lines, "no entities")
    if more:
        out.print(Text(f"the first {len(rows)}; --name shows others", "dim"))
    out.print()
    bases: dict[str, list[str]] = {}
    for a in (a for r in rows for a in r["ahead"] if _reasons(a)):
        spans = bases.setdefault(_reasons(a), [])
        if duration(a["horizon_s"]) not in spans:
            spans.append(duration(a["horizon_s"]))
    grid(out, ("in", "based on, over all of them"), [[", ".join(h), b] for b, h in bases.items()], "")


VERBS = {
    "forecast list": live(
        _ask,
        show,
        """
        [QUANTITY]  quantity, such as site.power_w, rack.power_w or cdu.heat_w
        --name ENTITY  only these entities, separated by commas, such as hall1/r07
        """,
        "",
        "rack.power_w --name hall1/r07",
        "site.power_w --watch 1min",
        rows="rows",
        watched=True,
    )
}
