"""The commands about journals: verify (and cut a faulty tail), show; through all segments of a run."""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from twin.catalogue import ConfigError, StorageError, clean, utc
from twin.cli.arguments import instant_ns
from twin.contracts import JOURNAL_KINDS, journal_schema
from twin.report import grid, safe_text, sentence
from twin.run import (
    OPEN,
    Entry,
    JournalVerdict,
    closed_segments,
    cut_journal,
    is_torn,
    journal_exists,
    journal_lines,
    verify_journal,
)


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin journal`."""
    journal = commands.add_parser("journal", help="verify or show the journal of a run")
    actions = journal.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("schema", help="print the JSON Schema of a line")
    verify = actions.add_parser("verify", help="verify the hash chain")
    verify.add_argument("path", type=Path, help="journal.jsonl, or the folder of a run")
    verify.add_argument("--cut", action="store_true", help="cut off a faulty tail (it is kept as .torn)")
    verify.add_argument("--json", action="store_true")
    show = actions.add_parser("show", help="print entries as sentences")
    show.add_argument("path", type=Path, help="journal.jsonl, or the folder of a run")
    show.add_argument("--kind", help="only entries of this kind: event, command, advice, finding, ...")
    show.add_argument("--limit", type=int, default=50, help="at most this many entries (default: 50)")
    show.add_argument("--last", action="store_true", help="the last entries instead of the first")
    show.add_argument("--since", help="entries from this time on, such as 2026-11-21T02:00 (UTC)")
    show.add_argument("--until", help="entries up to this time")
    show.add_argument("--json", action="store_true")
    journal.set_defaults(handler=run_journal)


def _journal(path: Path) -> Path:
    found = path / OPEN if path.is_dir() else path
    if not journal_exists(found):
        raise StorageError(f"{found}: no such journal; expected a journal.jsonl or the folder of a run")
    if found.is_file() and found.stat().st_size == 0 and not closed_segments(found.parent):
        raise StorageError(f"{found}: is empty; expected at least the manifest of a run")
    return found


def run_journal(args: argparse.Namespace, out: Console, err: Console) -> int:
    """`journal verify`, `journal show` and `journal schema`."""
    if args.action == "schema":
        out.print_json(msgspec.json.encode(journal_schema()).decode())
        return 0
    return _verify(args, out, err) if args.action == "verify" else _show(args, out, err)


def _verify(args: argparse.Namespace, out: Console, err: Console) -> int:
    path = _journal(args.path)
    verdict = verify_journal(path)
    if args.cut and verdict.fault and path.name != OPEN and path in closed_segments(path.parent):
        raise StorageError(f"{path}: others follow it; give the folder of the run to cut its journal there")
    kept = cut_journal(path, verdict) if verdict.fault and args.cut else []
    where = path.with_name(verdict.file) if path.name == OPEN else path
    if args.json:
        out.print_json(msgspec.json.encode(_as_json(path, where, verdict, bool(kept))).decode())
    elif verdict.fault is None:
        pieces = f" in {verdict.segments} segments" if verdict.segments > 1 else ""
        out.print(
            f"{path}: {verdict.lines} lines{pieces}, the chain holds, head {verdict.head} (a change of the "
            "very last line shows only in a replay)",
            markup=False,
            soft_wrap=True,
        )
    else:
        err.print(
            f"error {where} line {verdict.line_no}, byte {verdict.position}: {clean(verdict.fault, 500)}; "
            f"the {verdict.lines} lines before are good"
            if not verdict.unexplained
            else f"error {where}: {clean(verdict.fault, 500)}; its {verdict.lines} lines are one chain",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        if kept:
            pieces = ", ".join(map(str, kept))
            err.print(f"cut there; what was behind is in {pieces}", markup=False, soft_wrap=True)
        elif args.cut:
            err.print("not cut: what is missing lies before it", markup=False, soft_wrap=True)
    if not args.json and (gone := verdict.pruned) is not None:
        out.print(
            f"begins at line {verdict.first_seq + 1:,}: segments up to {clean(gone.file, 100)} "
            f"(line {gone.last_seq + 1:,}) were pruned on {utc(gone.now_ns)}; "
            f"recorded in line {gone.seq + 1:,}",
            markup=False,
            soft_wrap=True,
        )
    return 0 if verdict.fault is None or kept else 1


def _as_json(path: Path, where: Path, verdict: JournalVerdict, cut: bool) -> dict[str, Any]:
    gone = verdict.pruned
    return {
        "path": str(path),
        "ok": verdict.fault is None,
        "lines": verdict.lines,
        "head": verdict.head,
        "fault": verdict.fault,
        "line": verdict.line_no,
        "byte": verdict.position,
        "cut": cut,
        "file": str(where),
        "segments": verdict.segments,
        "first_line": verdict.first_seq + 1,
        "pruned": None
        if gone is None
        else {"file": gone.file, "last_line": gone.last_seq + 1, "told_in_line": gone.seq + 1},
    }


def _show(args: argparse.Namespace, out: Console, err: Console) -> int:
    if args.kind and args.kind not in JOURNAL_KINDS:
        raise ConfigError(f"--kind {args.kind}: is unknown; expected one of {', '.join(JOURNAL_KINDS)}")
    path = _journal(args.path)
    since_ns = instant_ns("--since", args.since) if args.since else 0
    until_ns = instant_ns("--until", args.until) if args.until else 2**63
    found: deque[tuple[Entry, bytes]] = deque(maxlen=max(0, args.limit) if args.last else None)
    fault, chosen = None, 0
    for number, line in enumerate(journal_lines(path), start=1):
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if args.last or len(found) < args.limit:  # one behind what is shown hides nothing
                fault = f"{path} line {number}: {error}; run `racktwin journal verify`"
            break
        if (args.kind and entry.kind != args.kind) or not since_ns <= entry.now_ns <= until_ns:
            continue
        chosen += 1
        if args.last or len(found) < args.limit:
            found.append((entry, line))
    if args.json:
        out.file.write("".join(line.decode() + "\n" for _, line in found))
    else:
        rows = [[utc(e.now_ns) if e.now_ns else "-", e.tick, e.kind, _text(e)] for e, _ in found]
        grid(out, ("time (UTC)", "tick", "kind", "what"), rows, "no entries")
    _left_out(args, chosen, len(found), err if args.json else out)
    if fault is None and (args.last or len(found) < args.limit) and is_torn(path):
        fault = f"{path}: the last line is torn; run `racktwin journal verify`"
    if fault is not None:
        raise StorageError(fault)  # after what lies before was shown
    return 0


def _left_out(args: argparse.Namespace, chosen: int, shown: int, console: Console) -> None:
    """Print the number of entries left out, and the option that shows them."""
    if chosen <= shown:
        return
    which, other = ("earlier", "") if args.last else ("later", ", `--last` the last ones")
    console.print(
        f"{chosen - shown:,} {which} {'entry' if chosen - shown == 1 else 'entries'} left out: "
        f"`--limit {chosen}` shows all{other}",
        markup=False,
        soft_wrap=True,
    )


def _text(entry: Entry) -> Text:
    return safe_text(sentence(entry.record), limit=4000)
