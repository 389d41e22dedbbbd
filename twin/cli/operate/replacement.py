"""The commands `device plan | history | report`: withdrawn nodes, their history, the record of a node.

They ask a running daemon; `history` also reads the folder of a run, for when no daemon answers.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from twin.api import path_of
from twin.catalogue import NS, StorageError, clean, number
from twin.cli.arguments import client_of, live, present
from twin.cli.grammar import Verb
from twin.cli.operate.explain import show_answer

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

DAY_S = 86_400.0


def _plan(client: Client, args: argparse.Namespace) -> Any:
    page = {"phase": args.phase, "limit": args.limit}
    if args.format == "json":
        return client.get("/replacement", node=args.node, **page)
    if args.node is not None:
        return client.get(path_of("explain", "replacement", args.node))
    return client.get("/explain/replacement", topic="nodes", **page)


def run_history(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """The history as the daemon reports it, or from the files of a run, for when no daemon answers."""
    if args.run is not None:
        tree = _of_run(args)
    else:
        asked = {"node": args.node, "kind": args.kind, "days": args.back_s / DAY_S, "limit": args.limit}
        tree = client_of(args).get("/replacement/history", **asked)
    return present(args, tree, show_history, out)


def _of_run(args: argparse.Namespace) -> dict[str, Any]:
    """The same as the daemon would answer, from the files of a run; nodes go by their full path."""
    from twin.report import JournalReader, rows_of, score_of, unmatched

    if not args.run.exists():
        raise StorageError(f"{args.run}: is not there; expected the folder of a run, such as state/run")
    reader = JournalReader(args.run)
    last_ns = reader.last_ns()
    found = reader.read(max(0, last_ns - round(args.back_s * NS)))
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
    return {"site": None, "now_ns": last_ns, "node": args.node, "runs": None, "days": args.back_s / DAY_S,
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


def _report(client: Client, args: argparse.Namespace) -> Any:
    return client.get(path_of("nodes", args.node, "rma"), days=args.back_s / DAY_S)


def _markdown(tree: dict[str, Any], out: Console) -> None:
    from twin.report import markdown

    out.file.write(markdown(tree))


BACK = "~--days DAYS>back_s\n--back DURATION"
VERBS = {
    "device plan": live(
        _plan,
        show_answer,
        """
        [NODE]  only this node, with all evidence
        --phase LIST  only these phases, separated by commas: suspect, draining, out, rma, ...
        --limit COUNT=100  maximum number of nodes
        """,
        "",
        "hall1/r07/node3",
        "--phase out,rma",
        watched=True,
    ),
    "device history": Verb(
        run_history,
        f"""
        --node NODE  only this node
        --kind LIST  only these kinds, separated by commas: gate, outcome, test, repair, ...
        {BACK}=7d  time span up to now, at most 366d
        --limit COUNT=200  maximum number of lines; the latest are kept
        --run FOLDER  read the journal of a run instead of asking a daemon
        """,
        ("--back 30d", "--run /var/lib/racktwin/run --node site/hall1/r07/node3"),
        rows="rows",
        live=True,
    ),
    "device report": live(
        _report,
        _markdown,
        f"NODE  path of the node\n{BACK}=90d  time span up to now, at most 366d",
        "hall1/r07/node3 --out INC-4711.md",
        "hall1/r07/node3 --out record.json",
    ),
}
