"""Replacement on a terminal: nodes on their way out and back, one node with all that was weighed, history.

Whatever the daemon passes on from outside is made safe. Part of the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.app import health_words as words
from twin.app.cli_live_show import grid, safe, span, when
from twin.app.report_text import clean, number

if TYPE_CHECKING:
    from rich.console import Console

NS = 1_000_000_000
TONES = {"rma": "bold red", "out": "red", "testing": "yellow", "draining": "yellow", "saving": "yellow",
         "cordoned": "yellow", "suspect": "cyan", "probation": "cyan", "in_service": "green"}  # fmt: skip
COURSES = {"watch": "do nothing", "cordon": "leave when its job ends", "at_next": "drain after the next save",
           "save_now": "save now, then drain", "at_once": "drain at once"}  # fmt: skip
# What the scheduler says of the order in which it uses a node
PLACES = {"last": ", and gives it to jobs after all others", "kept": ", and keeps it as a spare"}


def show_plan(tree: dict[str, Any], out: Console) -> None:
    """All nodes that are not simply in service."""
    _head(tree, out)
    rows = []
    for r in tree["nodes"]:
        what = Text(clean(r["waits"] and f"waits {r['waits']}", 300))
        if r["spare"]:
            what.append(f"\nits spare: {clean(r['spare'], 120)}", "dim")
        since = span((tree["now_ns"] - r["entered_ns"]) / NS) if r["entered_ns"] else "-"
        rows.append([r["node"], Text(clean(r["phase"], 20), TONES.get(r["phase"], "")), since,
                     clean(r["cause"], 30), words.chance(r["chance_24h_pu"]), what])  # fmt: skip
    empty = "no node is suspected, and none is on its way out" if tree["runs"] else ""
    if rows or empty:
        grid(out, ("", "phase", "for", "cause", "fails in 24 h", ""), rows, empty)
    if (left := tree["total"] - len(tree["nodes"])) > 0:
        out.print(Text(f"and {left:,} more; --limit and --phase choose", "dim"))


def _head(tree: dict[str, Any], out: Console) -> None:
    head = Text(clean(tree["site"]), "bold")
    if tree["runs"]:
        head.append(
            f"  replacement: {clean(tree['authority'], 20)}", "bold" if tree["authority"] == "act" else ""
        )
        counted = "  ".join(f"{n:,} {p.replace('_', ' ')}" for p, n in tree["phases"].items() if n)
        head.append(f"  {counted}", "not bold dim")
    out.print(head, soft_wrap=True)
    for note in tree["notes"]:
        out.print(safe(note, "dim" if tree["runs"] else "yellow"), soft_wrap=True)
    breaker, pool = tree.get("breaker"), tree.get("pool")
    if breaker and breaker["open"]:
        text = f"not withdrawn, as too many look bad at once: {breaker['nodes']:,} nodes; {breaker['why']}"
        out.print(safe(f"{text}; what returns to service still does", "bold red"), soft_wrap=True)
    if pool:
        out.print(safe(f"spares: {pool['sentence']}", "yellow" if pool["short"] else ""), soft_wrap=True)
    out.print()


def show_node(tree: dict[str, Any], out: Console) -> None:
    """One node, with all that was weighed."""
    _head(tree, out)
    r = tree["nodes"][0]
    head = Text(clean(r["node"], 200), "bold")
    head.append(f"  {clean(r['phase_words'], 100)}", TONES.get(r["phase"], ""))
    out.print(head, soft_wrap=True)
    now_ns = tree["now_ns"]
    rows: list[list[Any]] = []
    if r["entered_ns"]:
        until = f"; looked at anew by {when(r['deadline_ns'])}" if r["deadline_ns"] else ""
        rows.append(["since", f"{span((now_ns - r['entered_ns']) / NS)}{until}"])
    if r["waits"]:
        rows.append(["waits", safe(r["waits"])])
    if r["reason"]:
        rows.append(["why", safe(r["reason"])])
    rows.append(
        ["cause", f"{clean(r['cause'], 40).replace('_', ' ')}; to do: {clean(r['do'], 100) or 'nothing'}"]
    )
    hour, day = (words.chance(pu) if pu is not None else "unknown"
                 for pu in (r["chance_1h_pu"], r["chance_24h_pu"]))  # fmt: skip
    certain = words.sure(r["sure_pu"]) or ("nobody says how sure" if r["weighed"] else "by forecasts alone")
    rows.append(["fails", f"{hour} within 1 h, {day} within 24 h; {certain}"])
    rows.append(["job", clean(r["job"] or "none that we know of", 100)])
    if not r["weighed"]:
        rows.append(["weighed", "nothing, as it is no suspect; racktwin health says how well it is"])
    for name, cost in r["costs_gpu_h"].items() if r["weighed"] else ():
        mark = "  <- chosen" if name == r["course"] and r["phase"] != "in_service" else ""
        rows.append(
            ["weighed" if name == "watch" else "", f"{COURSES.get(name, name)}: {_gpu_h(cost)}{mark}"]
        )
    if r["gate"]:
        g = r["gate"]
        rows.append(["run forward", f"{when(g['at_ns'])}: acting {_gpu_h(g['act_gpu_h'])}, interruption "
                     f"{words.chance(g['act_pu'])}; waiting {_gpu_h(g['wait_gpu_h'])}, "
                     f"{words.chance(g['wait_pu'])}"])  # fmt: skip
    rows.append(["spare", clean(r["spare"] or "none", 120)])
    place = PLACES.get(r.get("placement") or "", "")
    rows.append(["level", f"wanted {r['level']}; the scheduler says {r['read_back'] or 'nothing'}{place}"])
    s = r["service"]
    told = [f"test {s['test']} at {when(s['tested_ns'])}" if s["test"] else "never tested",
            f"repaired {when(s['repaired_ns'])}" if s["repaired_ns"] else "no repair told"]  # fmt: skip
    rows.append(["service", "; ".join(told)])
    rows.append(
        ["before", f"withdrawals that count against it: {r['offences']}; tests failed since: {r['attempts']}"]
    )
    grid(out, ("", ""), rows, "")


def _gpu_h(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} GPU-h"


def show_history(tree: dict[str, Any], out: Console) -> None:
    """What was decided and done, oldest first; then how the predictions did."""
    rows = []
    for r in tree["rows"]:
        shown = r["nodes"][:2]
        more = f" and {r['count'] - len(shown):,} more" if shown and r["count"] > len(shown) else ""
        names = ", ".join(shown) + more
        rows.append([when(r["at_ns"]), safe(r["kind"].replace("_", " "), "bold"),
                     safe(names or (f"{r['count']:,} nodes" if r["count"] else "-"), limit=200),
                     safe(r["text"])])  # fmt: skip
    grid(out, ("time (UTC)", "", "node", ""), rows, f"nothing in the last {tree['days']:g} days")
    if (left := tree["total"] - len(tree["rows"])) > 0:
        out.print(Text(f"and {left:,} earlier; --limit, --node and --kind choose", "dim"))
    out.print()
    out.print(safe(score_words(tree["score"])), soft_wrap=True)
    for note in tree["notes"]:
        out.print(safe(note, "dim"), soft_wrap=True)


def score_words(score: dict[str, Any]) -> str:
    """How predictions did, in a sentence."""
    if not score["gates"] and not score["settled"]:
        return "no prediction was made before a step in this time"
    text = f"predictions before a step: {score['gates']:,}, settled: {score['settled']:,}"
    if score["scored"]:
        text += (
            f"; interruptions {words.chance(score['predicted_pu'])} predicted, "
            f"{100 * score['failed_pu']:.0f} % came; "
            f"Brier {number(score['brier'])} (0 is perfect, 0.25 a coin)"
        )
    if score["lost_gpu_h"] is not None:
        text += (
            f"; {_gpu_h(score['predicted_gpu_h'])} predicted, {_gpu_h(score['lost_gpu_h'])} lost, on average"
        )
    return text
