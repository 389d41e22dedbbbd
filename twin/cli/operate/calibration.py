"""The command `calibration`: the learned parameters of a site or of one entity, and how far they drifted.

Alone, how much is learned, and the largest drifts first; with a name, every parameter of it.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, duration, number
from twin.cli.arguments import live
from twin.report import grid, safe_text, when

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

TONES = {"learned": "", "learning": "yellow", "unknown": "dim"}


def _ask(client: Client, args: argparse.Namespace) -> Any:
    from twin.api import path_of

    if args.entity is not None:
        return client.get(path_of("calibration", args.entity))
    return client.get("/calibration", prefix=args.below, parameter=args.parameter, limit=args.limit)


def show(tree: dict[str, Any], out: Console) -> None:
    """One entity, or the site."""
    if "name" in tree:
        _entity(tree, out)
    else:
        _site(tree, out)


def drift_text(row: dict[str, Any]) -> str:
    """A drift in percent of its reference, or in its unit where zero is no share; a dash where unknown."""
    if row["drift"] is None:
        return "–"
    sign = "+" if row["drift"] > 0 else ""
    if row["drift_pu"] is not None:
        return f"{sign}{number(100 * row['drift_pu'], 2)} %"
    return f"{sign}{_amount(row['drift'], row['unit'])}"


def _rate(row: dict[str, Any]) -> str:
    """The drift of a week, as `drift_text`."""
    if row["per_week"] is None:
        return "–"
    share = row["drift_pu"] is not None and row["reference"]
    return drift_text({
        "drift": row["per_week"], "unit": row["unit"],
        "drift_pu": row["per_week"] / abs(row["reference"]) if share else None,
    })  # fmt: skip


def _amount(value: float | None, unit: str) -> str:
    return number(value, 4) + ("" if unit == "1" or value is None else f" {unit}")


def _value(row: dict[str, Any]) -> str:
    if row["state"] == "unknown":
        return "–"  # what stands there is what was known before
    band = "" if row["band"] is None else f" ± {number(row['band'], 2)}"
    return f"{number(row['value'], 4)}{band}" + ("" if row["unit"] == "1" else f" {row['unit']}")


def _rests_on(row: dict[str, Any]) -> str:
    if row["readings"] is not None:
        return f", {row['readings']:,} readings"
    taught_s = 60.0 * round((row["taught_s"] or 0.0) / 60.0)
    return f", {duration(taught_s)} of readings" if taught_s else ""


def _meaning(row: dict[str, Any]) -> str:
    since = f"; since {when(row['since_ns'])}" if row["since_ns"] else ""
    return f"{row['means']}{since}" if row["means"] else ""


def _entity(tree: dict[str, Any], out: Console) -> None:
    rows = []
    for r in tree["parameters"]:
        tone = "yellow" if r["drifted"] else ""
        state = safe_text(r["state"], TONES[r["state"]]).append(_rests_on(r), "dim")
        rows.append([r["text"], _value(r), number(r["nominal"], 4), safe_text(drift_text(r), tone), _rate(r),
                     state])  # fmt: skip
    heads = ("parameter", "value", "nominal", "drift", "a week", "state")
    out.print(Text(clean(tree["name"]), "bold"))
    grid(out, heads, rows, "no learned parameters", right=range(1, 5), folds=(0, 5))
    for r in tree["parameters"]:
        if r["means"]:
            out.print(safe_text(f"{r['text']} {drift_text(r)}: {_meaning(r)}", "yellow"))
    for line in tree["wear"]:
        out.print(safe_text(line, "yellow"))
    out.print(Text("value: ± half of its 90 % band; drift: change since the value first settled; nominal: "
                   "value of the profile, the design or an ideal device", "dim"))  # fmt: skip


def _site(tree: dict[str, Any], out: Console) -> None:
    rows = [[k["table"], f"{k['of']:,}", f"{k['learned']:,}", f"{k['learning']:,}", f"{k['unknown']:,}",
             Text(f"{k['drifted']:,}", "yellow" if k["drifted"] else "")] for k in tree["kinds"]]  # fmt: skip
    heads = ("kind", "of them", "learned", "learning", "unknown", "drifted")
    grid(out, heads, rows, "no parameters are learned on this site", right=range(1, 6))
    out.print()
    drifts = [[r["name"], r["text"], safe_text(drift_text(r), "yellow"), _rate(r), _meaning(r)]
              for r in tree["drifts"]]  # fmt: skip
    columns = ("drifts, the largest first", "", "drift", "a week", "what it means")
    grid(out, columns, drifts, "no learned parameter has drifted beyond its band", right=(2, 3), folds=(1, 4))
    if tree["total"] > len(drifts):
        more = tree["total"] - len(drifts)
        out.print(Text(f"and {more:,} more; --limit, --below and --parameter choose", "dim"))


VERBS = {
    "calibration": live(
        _ask,
        show,
        """
        [ENTITY]  GPU, node, rack, CDU, loop or feeder, such as hall1/r07; TABLE:NAME if the name is ambiguous
        --below PLACE  without ENTITY: only this hall, rack or node and everything inside it
        --parameter NAME  without ENTITY: only this parameter, such as gpu.resistance
        --limit COUNT=20  without ENTITY: maximum number of drifts
        """,
        "",
        "hall1/r07/node3/gpu1",
        "hall1/cdu1 --format json",
        "--parameter cdu.ua --limit 5",
        rows="parameters",
        watched=True,
    )
}
