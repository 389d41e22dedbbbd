"""`racktwin health [NAME]`: how well a site, or one part of it, is, why, how sure that is, and what to do.

Alone, whom to look at first; with a name, one part explained in plain words. What is not known is said as
plainly as what is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, duration
from twin.cli.health_part import (
    OF_ITSELF,
    PLURAL,
    TONES,
    judged,
    plain_grid,
    rests_on,
    show_cdu,
    show_part,
    wears,
)
from twin.contracts import LEVELS
from twin.report import health_texts as words

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

SHOWN_ROWS = 20
STANDS_OUT = 3.0  # times the average


def add_arguments(health: argparse.ArgumentParser) -> None:
    """The options of the command."""
    health.add_argument(
        "name", nargs="?", help="a node, GPU, switch, link, CDU or rack, such as hall1/r07/node3"
    )
    health.add_argument("--level", help="with no name: only these; failed, degraded, watch, unknown, healthy")
    health.add_argument("--part", choices=tuple(PLURAL), help="with no name: a line for each of this kind")
    health.add_argument("--limit", type=int, default=SHOWN_ROWS, help="lines at most")


def call(args: argparse.Namespace) -> Callable[[Client], Any]:
    """Return the request to send."""
    from twin.api import path_of

    if args.name is None:
        return lambda c: c.get("/health", part=args.part, level=args.level, limit=args.limit)
    return lambda c: c.get(path_of("health", args.name))


def show(tree: dict[str, Any], out: Console) -> None:
    """One part, a CDU, a place, or the whole site."""
    kind = tree.get("kind")
    if kind == "part":
        show_part(tree, out)
    elif kind == "cdu":
        show_cdu(tree, out)
    else:
        _site(tree, out)


# -- the site, or a place of it


def _site(tree: dict[str, Any], out: Console) -> None:
    head = Text(clean(tree.get("name") or tree["site"]), "bold")
    head.append(f"  {judged(tree)}", "not bold dim")
    out.print(head, soft_wrap=True)
    rows = []
    for part, counts in tree["parts"].items():
        cell = Text()
        for level in reversed(LEVELS):
            if counts.get(level):
                cell.append(f"{counts[level]} {level}  ", TONES[level])
        rows.append([PLURAL.get(part, part), cell if sum(counts.values()) else Text("none", "dim")])
    plain_grid(out, rows)
    out.print()
    _worst(tree, out)
    if tree.get("kind") != "place":
        _expected(tree, out)
        _remarks(tree, out)
        _unknown(tree, out)
    for note in tree["notes"]:
        out.print(Text(clean(note, 400), "dim"))


def _worst(tree: dict[str, Any], out: Console) -> None:
    rows, well = tree["rows"], []
    if tree.get("kind") == "place":  # in a rack, those that are as they should be share a line
        well = [r for r in rows if r["level"] == "healthy" and not r["lemon"] and not _far(r)]
        rows = [r for r in rows if r not in well]
    if not rows:
        nothing = all(not c.get("healthy") for c in tree["parts"].values())
        text = "nobody stands out" + (", but nothing is known to be healthy either" if nothing else "")
        out.print(Text(text, "yellow" if nothing else "green"))
    else:
        _lines(rows, out)
    if well:
        names = ", ".join(r["name"].rpartition("/")[2] for r in well)
        out.print(Text("healthy  ", TONES["healthy"]).append(Text(clean(names, 2000), "dim")))
    left = tree["total"] - len(tree["rows"])
    if left > 0:
        out.print(Text(f"and {left} more; --limit and --level choose", "dim"))
    out.print()


def _far(row: dict[str, Any]) -> bool:
    day = row.get("day") or {}
    return bool(day.get("mean") and day.get("average") and day["mean"] >= STANDS_OUT * day["average"])


def _lines(rows: list[dict[str, Any]], out: Console) -> None:
    from twin.report import grid

    lines = []
    for r in rows:
        what = Text(clean(r["why"] or ("" if r["level"] == "healthy" else r["level"]), 300))
        if r.get("lemon"):
            what.append(f"{'; ' if what else ''}a lemon", "yellow")
        if r["level"] not in OF_ITSELF and r["action"] not in ("none", "watch"):
            what.append(f"\n{r['do']}", "dim")
        day = r.get("day") or {}
        said = Text(words.chance(day.get("mean")) if r["level"] != "failed" else "-")
        if r["level"] != "failed" and _far(r):
            said.append(f"\n{day['said']}", "yellow")
        lines.append([r["name"], Text(r["level"], TONES[r["level"]]), said, what])
    if any(r.get("day") for r in rows):
        grid(out, ("", "", "fails in 24 h", "why"), lines, "")
    else:
        grid(out, ("", "", "why"), [[name, level, why] for name, level, _, why in lines], "")


def _expected(tree: dict[str, Any], out: Console) -> None:
    if not tree["expected"]:
        return
    out.print(Text(f"nodes of {clean(tree['site'])} expected to fail, with 90 % intervals", "bold"))
    rows = []
    for e in tree["expected"]:
        interval = f"{e['lo']:.0f} to {e['hi']:.0f}" if e["lo"] is not None else "none yet"
        rows.append([f"within {duration(e['horizon_s'])}", words.count(e["mean"]), interval])
    plain_grid(out, rows)
    rests_on(tree["expected"], out)


def _remarks(tree: dict[str, Any], out: Console) -> None:
    failed, lemons = tree["failures"], tree["lemons"]
    if failed["total"]:
        since = f" in {duration((tree['now_ns'] - failed['since_ns']) / 1e9)}" if failed["since_ns"] else ""
        kinds = ", ".join(f"{words.CLASS_WORDS.get(k, k)} {n}" for k, n in failed["by_class"].items())
        text = f"node failures{since}: {failed['total']} ({kinds}); {failed['down']} not over"
        out.print(Text(clean(text, 500)))
    if failed["down_together"]:
        names = ", ".join(failed["together"])
        text = f"{failed['down_together']} nodes went down together ({names}): look at what they share"
        out.print(Text(clean(text, 500), "bold red"))
    if tree["lowered"]:
        said = "; ".join(f"{n} {words.HELD_DOWN.get(by, by)}" for by, n in tree["lowered"].items())
        out.print(Text(f"GPUs whose clock is held down: {said}"))
    if lemons["total"]:
        more = lemons["total"] - len(lemons["names"])
        names = ", ".join(lemons["names"]) + (f" and {more} more" if more else "")
        out.print(Text(clean(f"lemons (fail more often than others): {names}", 2000), "yellow"))
    for w in tree["wear"]:
        out.print(Text(clean(wears(w, w["name"]), 400), "yellow"))


def _unknown(tree: dict[str, Any], out: Console) -> None:
    if not tree["unknown"]:
        return
    out.print()
    out.print(Text("unknown, for too little is heard of them", "bold"))
    rows = []
    for u in tree["unknown"]:
        by_source: dict[tuple[str, str], list[str]] = {}
        for m in u["missing"]:
            by_source.setdefault((_silence(m), m["connect"]), []).append(m["what"])
        lines = [f"{', '.join(what)}: {state}; comes from {connect}"
                 for (state, connect), what in by_source.items()]  # fmt: skip
        text = "\n".join(clean(line, 300) for line in lines) or "not judged yet"
        rows.append([Text(f"{u['unknown']} of {u['of']} {PLURAL[u['part']]}", "magenta"), Text(text)])
    plain_grid(out, rows)


def _silence(missing: dict[str, Any]) -> str:
    never, silent, of = missing["never"], missing["silent"], missing["of"]
    said = ["never heard" if never == of else f"never heard of {never} in {of}"] if never else []
    return ", ".join([*said, *([f"silent now: {silent}"] if silent else [])])
