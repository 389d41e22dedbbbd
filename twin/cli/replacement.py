"""The commands `replacement plan | history | report`: withdrawn nodes, their history, the record of a node.

They ask a running daemon; `history` also reads the folder of a run, for when no daemon answers.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.catalogue import ConfigError, StorageError, clean, number
from twin.cli.arguments import add_command, client_of, write_json
from twin.run import atomic_write

if TYPE_CHECKING:
    from rich.console import Console


MOST_DAYS, DAY_NS = 366.0, 86_400 * 10**9


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin replacement`."""
    what = "nodes that are withdrawn before they fail: what is planned, what came of it"
    parser = commands.add_parser("replacement", help=what, description=what)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    plan = add_command(
        actions, "plan", "which nodes are suspected or on their way out, why, what each waits for"
    )
    plan.add_argument("node", nargs="?", metavar="NODE", help="this one alone, with all that was weighed")
    plan.add_argument("--phase", help="only these; suspect, draining, out, rma, ...; commas between them")
    plan.add_argument("--limit", type=int, default=100, help="lines at most")
    past = add_command(
        actions, "history", "what was decided, predicted and done, and how the predictions did"
    )
    past.add_argument("--node", metavar="NODE", help="of this one alone")
    past.add_argument("--kind", help="only these; gate, outcome, test, repair, ...; commas between them")
    past.add_argument("--days", type=_days, default=7.0, help="how far back; default 7")
    past.add_argument("--limit", type=int, default=200, help="lines at most: the latest of them")
    past.add_argument("--run", type=Path, metavar="FOLDER", help="read a run's journal, without a daemon")
    report = add_command(actions, "report", "the record of a node, to attach to a ticket: markdown, or JSON")
    report.add_argument("node", metavar="NODE")
    report.add_argument("--days", type=_days, default=90.0, help="how far back; default 90")
    report.add_argument("--out", type=Path, metavar="FILE", help="write it there; *.json is JSON")
    report.add_argument("--force", action="store_true", help="overwrite the file")
    parser.set_defaults(refuse=parser.error)
    parser.set_defaults(handler=run_replacement)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 < days <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected days, more than 0, at most {MOST_DAYS:g}")
    return days


def run_replacement(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Ask, and print. Raises ConfigError for what the operator can mend, StorageError, ConnectorError."""
    return {"plan": _plan, "history": _history, "report": _report}[args.action](args, out)


def _plan(args: argparse.Namespace, out: Console) -> int:
    from twin.api import path_of
    from twin.cli.explain import print_answer

    client, page = client_of(args), {"phase": args.phase, "limit": args.limit}
    if args.json:
        tree = client.get("/replacement", node=args.node, **page)
    elif args.node is not None:
        tree = client.get(path_of("explain", "replacement", args.node))
    else:
        tree = client.get("/explain/replacement", topic="nodes", **page)
    print_answer(tree, args.json, out)
    return 0


def _history(args: argparse.Namespace, out: Console) -> int:
    if args.run is not None:
        tree = _of_run(args)
    else:
        tree = client_of(args).get("/replacement/history", node=args.node, kind=args.kind, days=args.days,
                                   limit=args.limit)  # fmt: skip
    if args.json:
        write_json(tree, out)
    else:
        show_history(tree, out)
    return 0


def _of_run(args: argparse.Namespace) -> dict[str, Any]:
    """The same as the daemon would answer, from the files of a run; nodes go by their full path."""
    from twin.report import JournalReader, rows_of, score_of, unmatched

    if args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: expected a whole number from 1 on")
    if not args.run.exists():
        raise StorageError(f"{args.run}: is not there; expected the folder of a run, such as state/run")
    reader = JournalReader(args.run)
    last_ns = reader.last_ns()
    found = reader.read(max(0, last_ns - round(args.days * DAY_NS)))
    every = rows_of(found.entries, lambda _: None, args.node, args.node is not None)
    kinds = [k for k in (args.kind or "").split(",") if k]
    rows = [r for r in every if not kinds or r["kind"] in kinds]
    notes = [
        *found.notes,
        "read from files: of commands to many nodes at once only the first and last are named",
    ]
    notes += unmatched(every, kinds)
    if args.node is not None and not every:
        notes.append(
            f"nothing of {clean(args.node, 120)}: expected a full path, such as site/hall/rack/node3"
        )
    return {"site": None, "now_ns": last_ns, "node": args.node, "runs": None, "days": args.days,
            "since_ns": found.since_ns, "total": len(rows), "rows": rows[-args.limit :], "next": None,
            "score": score_of(every), "notes": notes}  # fmt: skip


def _gpu_h(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} GPU-h"


def show_history(tree: dict[str, Any], out: Console) -> None:
    """Decisions and actions, oldest first; then the score of the predictions."""
    from rich.text import Text

    from twin.report import grid, safe_text, when

    rows = []
    for r in tree["rows"]:
        shown = r["nodes"][:2]
        more = f" and {r['count'] - len(shown):,} more" if shown and r["count"] > len(shown) else ""
        names = ", ".join(shown) + more
        rows.append([when(r["at_ns"]), safe_text(r["kind"].replace("_", " "), "bold"),
                     safe_text(names or (f"{r['count']:,} nodes" if r["count"] else "-"), limit=200),
                     safe_text(r["text"])])  # fmt: skip
    grid(out, ("time (UTC)", "", "node", ""), rows, f"nothing in the last {tree['days']:g} days")
    if (left := tree["total"] - len(tree["rows"])) > 0:
        out.print(Text(f"and {left:,} earlier; --limit, --node and --kind choose", "dim"))
    out.print()
    out.print(safe_text(score_words(tree["score"])), soft_wrap=True)
    for note in tree["notes"]:
        out.print(safe_text(note, "dim"), soft_wrap=True)


def score_words(score: dict[str, Any]) -> str:
    """The score of the predictions, in a sentence."""
    from twin.report import health_texts

    if not score["gates"] and not score["settled"]:
        return "no prediction was made before a step in this time"
    text = f"predictions before a step: {score['gates']:,}, settled: {score['settled']:,}"
    if score["scored"]:
        text += (
            f"; interruptions {health_texts.chance(score['predicted_pu'])} predicted, "
            f"{100 * score['failed_pu']:.0f} % came; "
            f"Brier {number(score['brier'])} (0 is perfect, 0.25 a coin)"
        )
    if score["lost_gpu_h"] is not None:
        text += (
            f"; {_gpu_h(score['predicted_gpu_h'])} predicted, {_gpu_h(score['lost_gpu_h'])} lost, on average"
        )
    return text


def _report(args: argparse.Namespace, out: Console) -> int:
    from twin.api import path_of

    tree = client_of(args).get(path_of("nodes", args.node, "rma"), days=args.days)
    as_json = args.json or (args.out is not None and args.out.suffix == ".json")
    text = json.dumps(tree, ensure_ascii=False, indent=1) + "\n" if as_json else _markdown(tree)
    if args.out is None:
        out.file.write(text)
        return 0
    if args.out.exists() and not args.force:
        raise ConfigError(f"{args.out}: is there already; --force overwrites it")
    atomic_write(args.out, text, sync=False)
    out.print(f"written: {args.out}", markup=False, soft_wrap=True, highlight=False)
    return 0


def _markdown(tree: dict[str, Any]) -> str:
    from twin.report import markdown

    return markdown(tree)
