"""The commands about journals: verify (and cut a faulty tail), show; through all segments of a run."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from twin.anchor import HeadVerifier, JournalProof, SignedHead, parse_head, prove
from twin.catalogue import ConfigError, StorageError, clean, did_you_mean, utc
from twin.cli.arguments import instant_ns, present, refuse_existing
from twin.cli.grammar import CONFIG, Verb
from twin.config import find_config, load_config, load_site
from twin.contracts import JOURNAL_KINDS, journal_schema
from twin.report import grid, print_error, print_line, safe_text, sentence
from twin.run import (
    OPEN,
    Entry,
    JournalVerdict,
    atomic_write,
    closed_segments,
    cut_journal,
    is_torn,
    journal_exists,
    journal_lines,
    verify_journal,
)


def _journal(path: Path) -> Path:
    found = path / OPEN if path.is_dir() else path
    if not journal_exists(found):
        raise StorageError(f"{found}: no such journal; expected a journal.jsonl or the folder of a run")
    if found.is_file() and found.stat().st_size == 0 and not closed_segments(found.parent):
        raise StorageError(f"{found}: is empty; expected at least the manifest of a run")
    return found


def run_schema(_: argparse.Namespace, out: Console, *__: Console) -> int:
    """Print the schema of a line; it is JSON in every format."""
    out.print_json(msgspec.json.encode(journal_schema()).decode())
    return 0


def run_key(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Make a pair of keys, each in a file of its own, over none that is there."""
    from twin.anchor import make_keys

    private, public = args.out, args.out.with_name(args.out.name + ".pub")
    for path, text, mode in zip((private, public), make_keys(), (0o600, 0o644), strict=True):
        refuse_existing(path)
        try:
            atomic_write(path, text, mode)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def show(*_: Any) -> None:
        print_line(out, f"{private}: the private key, for `journal.sign_key_file` of the daemon alone")
        print_line(
            out, f"{public}: the public key, for `racktwin journal verify --key`; keep a copy elsewhere"
        )

    present(args, {"private": str(private), "public": str(public)}, show, out)
    return 0


def run_proof(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Compare a journal with its signed heads; 1 if they contradict it or prove nothing."""
    path = _journal(args.path)
    if path.name != OPEN:
        raise ConfigError(f"{path}: is one file of a journal; --key needs the folder of the run")
    try:
        key = args.key.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--key {args.key}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    verifier = HeadVerifier.of_pem(key, f"--key {args.key}")
    outside = {place: _outside(args, place) for place in dict.fromkeys(args.anchor or ())}
    proof = prove(path.parent, verifier, outside)
    tree = {
        "path": str(path), "ok": proof.is_ok, "key": verifier.name, "proven_lines": proof.lines,
        "proven_at": utc(proof.now_ns) if proof.lines else None, "by": proof.by or None, "lines": proof.end,
        "chain_fault": proof.verdict.fault, "faults": proof.faults, "notes": proof.notes,
    }  # fmt: skip
    present(args, tree, lambda *_: _say_proof(path, proof, out, err), out)
    return 0 if proof.is_ok else 1


def _outside(args: argparse.Namespace, place: str) -> list[SignedHead]:
    """The heads that an anchor outside holds."""
    if place in ("mqtt", "etcd"):
        from twin.daemon import fetch_heads

        loaded = load_config(find_config(args.config))
        _, site = load_site(loaded.site_file)
        return asyncio.run(fetch_heads(loaded, site.file.site, place))
    try:
        lines = Path(place).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"--anchor {clean(place)}: cannot be read: {error.strerror}; expected a file, mqtt or etcd"
        ) from error
    try:
        heads = [parse_head(line) for line in lines if line.strip()]
    except StorageError as error:
        raise StorageError(f"--anchor {clean(place)}: {error}") from error
    if not heads:
        raise StorageError(f"--anchor {clean(place)}: holds no signed head")
    return heads


def _say_proof(path: Path, proof: JournalProof, out: Console, err: Console) -> None:
    verdict = proof.verdict
    if verdict.fault is not None:
        where = path.with_name(verdict.file)
        print_error(err, f"{where} line {verdict.line_no}: {clean(verdict.fault, 500)}")
    for fault in proof.faults:
        print_error(err, fault)
    if proof.lines:
        text = f"{path}: proven up to line {proof.lines:,} at {utc(proof.now_ns)} by the anchor {proof.by}"
        text += f"; {proof.end - proof.lines:,} lines after it are chained but not yet anchored"
        print_line(out, clean(text, 1000))
    else:
        print_line(err, f"{path}: nothing is proven: no signed head fits its {proof.end:,} lines", "red")
    for note in proof.notes:
        print_line(out, clean(note, 500))


def run_verify(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Verify the chain, and cut off a faulty tail if asked to; 1 if it is faulty and stays so."""
    if args.key is not None:
        return run_proof(args, out, err)
    if args.anchor:
        raise ConfigError("--anchor: expected --key too, the public key of the signed heads")
    path = _journal(args.path)
    verdict = verify_journal(path)
    if args.cut and verdict.fault and path.name != OPEN and path in closed_segments(path.parent):
        raise StorageError(f"{path}: later files follow it; give the folder of the run to cut its journal")
    kept = cut_journal(path, verdict) if verdict.fault and args.cut else []
    where = path.with_name(verdict.file) if path.name == OPEN else path
    tree = _as_json(path, where, verdict, bool(kept))
    present(args, tree, lambda *_: _say_verdict(path, where, verdict, out, err), out)
    if args.format != "json" and kept:
        print_line(err, f"cut there; what was behind is in {', '.join(map(str, kept))}")
    elif args.format != "json" and verdict.fault is not None and args.cut:
        print_line(err, "not cut: what is missing lies before it")
    return 0 if verdict.fault is None or kept else 1


def _say_verdict(path: Path, where: Path, verdict: JournalVerdict, out: Console, err: Console) -> None:
    if verdict.fault is None:
        pieces = f" in {verdict.segments} segments" if verdict.segments > 1 else ""
        print_line(
            out,
            f"{path}: {verdict.lines} lines{pieces}, the chain holds, head {verdict.head} (a change of the "
            "very last line shows only in a replay)",
        )
    else:
        fault = clean(verdict.fault, 500)
        text = f"{where} line {verdict.line_no}, byte {verdict.position}: {fault}; the {verdict.lines} "
        text += "lines before are good"
        if verdict.unexplained:
            text = f"{where}: {fault}; its {verdict.lines} lines are one chain"
        print_error(err, text)
    if (gone := verdict.pruned) is not None:
        print_line(
            out,
            f"begins at line {verdict.first_seq + 1:,}: segments up to {clean(gone.file, 100)} "
            f"(line {gone.last_seq + 1:,}) were pruned on {utc(gone.now_ns)}; "
            f"recorded in line {gone.seq + 1:,}",
        )


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


def run_show(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Print entries as sentences, or as the lines that they are."""
    if args.kind and args.kind not in JOURNAL_KINDS:
        near = did_you_mean(args.kind, JOURNAL_KINDS)
        raise ConfigError(f"--kind {args.kind}: is unknown; expected one of {', '.join(JOURNAL_KINDS)}{near}")
    path = _journal(args.path)
    since_ns = instant_ns("--since", args.since, time.time_ns(), -1) if args.since else 0
    until_ns = instant_ns("--until", args.until, time.time_ns(), -1) if args.until else 2**63
    found: deque[tuple[Entry, bytes]] = deque(maxlen=args.limit if args.last else None)
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
    if args.format == "json":
        out.file.write("".join(line.decode() + "\n" for _, line in found))
    else:
        rows = [[utc(e.now_ns) if e.now_ns else "-", e.tick, e.kind, _text(e)] for e, _ in found]
        grid(out, ("time (UTC)", "tick", "kind", "what"), rows, "no entries")
    _left_out(args, chosen, len(found), err if args.format else out)
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
    print_line(
        console,
        f"{chosen - shown:,} {which} {'entry' if chosen - shown == 1 else 'entries'} left out: "
        f"`--limit {chosen}` shows all{other}",
    )


def _text(entry: Entry) -> Text:
    return safe_text(sentence(entry.record), limit=4000)


RUN = "FOLDER>path  folder of a run, or its journal.jsonl"
VERBS = {
    "journal key": Verb(
        run_key,
        "-o --out FILE!  private key to write; the public key goes beside it, with the suffix .pub",
        ("--out /etc/racktwin/secrets/journal.key",),
    ),
    "journal schema": Verb(run_schema, "", ("",)),
    "journal verify": Verb(
        run_verify,
        f"""
        {RUN}
        --cut  cut off a faulty tail, and keep it as .torn
        --key FILE  public key; also verify the signed heads
        --anchor PLACE*  also verify against the head at mqtt, etcd or in a file; repeatable
        {CONFIG}
        """,
        ("/var/lib/racktwin/run", "run/ --cut", "run/ --key journal.key.pub --anchor mqtt"),
    ),
    "journal show": Verb(
        run_show,
        f"""
        {RUN}
        --kind KIND  only entries of this kind: event, command, advice, finding, ...
        --limit COUNT=50  maximum number of entries
        --last  print the last entries instead of the first
        --since TIME  from this time, such as 2026-11-21T02:00 (UTC), 02:00, or 3h for three hours ago
        --until TIME  up to this time
        """,
        ("run/ --kind command --last", "run/ --since 2026-11-21T02:00 --limit 200", "run/ --since 2h"),
    ),
}
