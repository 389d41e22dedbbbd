"""The commands about priors of failure models: export, merge, import, show; priors travel between sites."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from twin.anchor import HeadSigner, HeadVerifier
from twin.catalogue import ConfigError, StorageError, clean, duration, number
from twin.cli.arguments import present, refuse_existing
from twin.cli.grammar import Verb
from twin.federation import (
    PERIOD_D,
    BudgetLedger,
    PriorFile,
    Spending,
    StatisticsFile,
    TrustedKey,
    chosen_spans,
    epsilon_of,
    file_bytes,
    merge_files,
    noise_variance,
    prior_of,
    publish,
    read_file,
    sign_file,
    verified,
)
from twin.report import print_line
from twin.run import atomic_write

DAY_S, DAY_NS = 86_400.0, 86_400 * 10**9
EPSILON, BUDGET = "1", "4"  # of one export; of all in PERIOD_D days. source: estimate
MAX_SITE = 100  # characters of a site's name


def run_export(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Write the noisy statistics of one fleet. The budget is spent first."""
    from models.failure import site_statistics

    epsilon, budget = epsilon_of(args.epsilon, "--epsilon"), epsilon_of(args.budget, "--budget")
    refuse_existing(args.out, args.force)
    signer = HeadSigner.of_pem(_text(args.sign_key, "--sign-key"), f"--sign-key {args.sign_key}")
    site, log, first_day = _of_run(args) if args.run_folder else _of_events(args, err)
    if not site or len(site) > MAX_SITE or not site.isprintable():
        raise ConfigError(f"--site {clean(site, 40)!r}: expected a line of 1 to {MAX_SITE} characters")
    since = math.ceil(log.begin_d) if args.since is None else args.since - first_day
    until = math.floor(log.until_d) if args.until is None else args.until - first_day
    if not math.ceil(log.begin_d) <= since < until <= log.until_d:
        raise ConfigError(
            f"--since, --until: expected whole days from {math.ceil(log.begin_d) + first_day} to "
            f"{math.floor(log.until_d) + first_day}, the first before the last"
        )
    if since != int(since) or until != int(until):
        raise ConfigError("--since, --until: expected whole days")
    where = args.ledger or (args.run_folder / "privacy.jsonl" if args.run_folder else _beside(args.events))
    days = (int(since) + first_day, int(until) + first_day)
    left = BudgetLedger(where).spend(Spending(args.epsilon, *days, time.time_ns()), budget)
    groups = publish(site_statistics(log, since, until), epsilon)
    made = StatisticsFile(
        site=site, since_day=days[0], until_day=days[1], epsilon=args.epsilon, groups=groups
    )
    data = file_bytes(sign_file(made, signer))
    _write(args.out, data)
    tree = _tree(read_file(args.out)) | {
        "file": str(args.out), "bytes": len(data), "ledger": str(where), "budget_left": float(left),
    }  # fmt: skip

    def show(*_: Any) -> None:
        print_line(out, f"{args.out}: {len(data):,} bytes, signed by the key {signer.verifier.name}")
        print_line(
            out,
            f"{where}: epsilon {args.epsilon} spent; {float(left):g} of {float(budget):g} left for "
            f"{PERIOD_D} days",
        )

    present(args, tree, show, out)
    return 0


def _beside(events: Path) -> Path:
    """The budget belongs to the data: its ledger lies there."""
    return events.with_name(f"{events.name}.privacy.jsonl")


def _of_events(args: argparse.Namespace, err: Console) -> tuple[str, Any, int]:
    """(site, log, number of its day 0)."""
    from twin.tables import read_node_faults

    missing = [f"--{name}" for name in ("events", "site") if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: missing; expected --run, or --events with --site")
    read = read_node_faults(args.events, args.nodes, mend=args.mend, part=args.part)
    for note in read.notes:
        print_line(err, note, "dim")
    return args.site, read.log, 0


def _of_run(args: argparse.Namespace) -> tuple[str, Any, int]:
    """(site, log, number of its day 0) of a daemon's run: failures of whatever cause, by watched days."""
    from models.failure import failure_history
    from twin.config import make_engine
    from twin.run import OPEN, journal_exists, latest_engine, recorded_authority
    from twin.site import build_site

    if args.events is not None:
        raise ConfigError("--events: expected --run or --events, not both")
    folder = args.run_folder
    levels = recorded_authority(folder / OPEN) if journal_exists(folder / OPEN) else {}
    engine = latest_engine(folder, lambda spec: make_engine(build_site(spec), levels))
    view = engine.view()
    history = view.failures()
    # The mark `shared` depends on other nodes: without it, the noise of its own node hides each failure
    log = replace(history, shared=np.zeros(len(history.node), np.bool_))
    past = failure_history(log, engine.site.sizes["node"], engine.state.now_ns)
    if past.now_d < 1.0:
        raise ConfigError(f"{folder}: covers only {duration(past.now_d * DAY_S)}; expected at least one day")
    return args.site or engine.site.file.site, past.own, history.begin_ns // DAY_NS + 1


def run_merge(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Merge verified statistics, one file of each site, into a signed prior."""
    refuse_existing(args.out, args.force)
    signer = HeadSigner.of_pem(_text(args.sign_key, "--sign-key"), f"--sign-key {args.sign_key}")
    trusted = _trusted(args)
    files: list[tuple[str, StatisticsFile]] = []
    for path in args.files:
        file = verified(path, trusted)
        if not isinstance(file, StatisticsFile):
            raise ConfigError(f"{path}: is already merged; expected files of `racktwin models export`")
        files.append((str(path), file))
    chosen, notes = chosen_spans(files)
    for note in notes:
        print_line(err, clean(note, 400), "dim")
    data = file_bytes(sign_file(merge_files(chosen), signer))
    _write(args.out, data)
    tree = _tree(read_file(args.out)) | {"file": str(args.out), "bytes": len(data), "notes": notes}
    present(args, tree, lambda *_: _say(tree, out), out)
    return 0


def run_import(args: argparse.Namespace, out: Console, _: Console) -> int:
    """Verify a file and print the lines of the site file that make a daemon start from it."""
    file = verified(args.path, _trusted(args))
    prior = prior_of(file)
    lines = ["models:", "  failure:", "    settings:", f'      prior: "{prior.text}"']
    tree = _tree(file) | {"prior": prior.text, "site_file": "\n".join(lines)}

    def show(*_: Any) -> None:
        print_line(out, f"{args.path}: the signature of the key {file.key} fits. For the site file:")
        for line in ["", *lines]:
            out.file.write(f"{line}\n")

    present(args, tree, show, out)
    return 0


def run_show(args: argparse.Namespace, out: Console, _: Console) -> int:
    """Print a file in plain words."""
    file = verified(args.path, _trusted(args)) if args.key else read_file(args.path)
    tree = _tree(file) | {"verified": bool(args.key)}
    present(args, tree, lambda *_: _say(tree, out), out)
    return 0


def _say(tree: dict[str, Any], out: Console) -> None:
    lines = [f"{tree['kind']}, signed by the key {tree['key']}"]
    if "verified" in tree:
        lines[0] += ", and the signature fits" if tree["verified"] else ", not checked: give --key"
    for source in tree["sources"]:
        nodes = f", about {source['nodes']:,} nodes" if "nodes" in source else ""
        lines.append(
            f"site {source['site']}: days {source['since_day']} to {source['until_day']}{nodes}; one node "
            f"more or less changes no outcome's probability by more than a factor e^{source['epsilon']}"
        )
    if "noise" in tree:
        noise = ", ".join(f"{name} {number(deviation)}" for name, deviation in tree["noise"].items())
        lines.append(f"noise of each count, standard deviation: {noise}")
    if (prior := tree["expects"]) is None:
        lines.append("through its noise it says nothing by itself: merge it with others")
    else:
        lines += [
            f"expects {number(1000 * prior['rate_per_d'])} failures per 1000 node-days, counted as "
            f"{number(prior['node_days'])} node-days of watching",
            f"rates of nodes: a Gamma of shape {number(prior['shape'])} (below 1: few nodes fail often)",
            f"a failure brings about {number(prior['offspring'])} more, half of them within "
            f"{number(prior['half_life_d'])} days; a repair lasts {duration(prior['repair_d'] * DAY_S)}",
        ]
    for line in lines:
        print_line(out, clean(line, 400))


def _tree(file: StatisticsFile | PriorFile) -> dict[str, Any]:
    """A file as an answer."""
    try:
        prior = prior_of(file)
    except ConfigError:
        prior = None
    expects = prior and {
        "rate_per_d": prior.rate_per_d, "node_days": prior.node_days, "shape": prior.shape,
        "excess_per_d": prior.excess_per_d, "excess_shape": prior.excess_shape, "repair_d": prior.repair_d,
        "offspring": prior.offspring, "half_life_d": prior.half_life_d,
    }  # fmt: skip
    tree: dict[str, Any] = {"kind": file.kind, "version": file.version, "key": file.key, "expects": expects}
    sources = [file] if isinstance(file, StatisticsFile) else file.sources
    tree["sources"] = [
        {
            "site": s.site,
            "since_day": s.since_day,
            "until_day": s.until_day,
            "epsilon": s.epsilon,
            "key": s.key,
        }
        for s in sources
    ]
    if isinstance(file, StatisticsFile):
        epsilon = Fraction(file.epsilon)
        tree["sources"][0]["nodes"] = max(sum(file.groups["counts"]), 0)
        tree["groups"] = file.groups
        tree["noise"] = {name: math.sqrt(noise_variance(name, epsilon)) for name in file.groups}
    return tree


def _trusted(args: argparse.Namespace) -> list[TrustedKey]:
    """The keys that signatures are accepted of. A text with = is SITE=FILE, unless a file has that name."""
    out = []
    for entry in args.key or ():
        site, equals, path = str(entry).partition("=")
        if not equals or Path(entry).exists():
            site, path = "", str(entry)
        elif not site or not path:
            raise ConfigError(f"--key {entry}: expected FILE, or SITE=FILE with the name of the site")
        out.append(TrustedKey(HeadVerifier.of_pem(_text(Path(path), "--key"), f"--key {path}"), site))
    return out


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} {path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _write(path: Path, data: bytes) -> None:
    try:
        atomic_write(path, data)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


SIGN = "--sign-key FILE!  private key for the signature: that of `journal.sign_key_file` or another"
TRUST = "--key FILE*  public key to trust; SITE=FILE trusts it for that site only; repeatable"
VERBS = {
    "models export": Verb(
        run_export,
        f"""
        -o --out FILE!  file to write, at most 10 kB
        --force  overwrite the file of --out
        {SIGN}
        --run FOLDER>run_folder  run of a daemon; its newest snapshot is read
        --events FILE  log of faults instead, as `racktwin backtest failures` reads it
        --nodes COUNT  number of nodes of the log's fleet, with those that never failed
        --part PREFIX=  only nodes whose names begin with this
        --site NAME  public name of the site; default with --run: the site's own name
        --since DAY  first day of the public span; default: all whole days
        --until DAY  day after the last day of the span
        --epsilon E={EPSILON}  privacy budget of this export; a smaller one adds more noise
        --budget E={BUDGET}  privacy budget of all exports of this fleet in {PERIOD_D} days
        --ledger FILE  record of the exports; default: privacy.jsonl in the run, or beside the log
        --mend  accept duplicates and disorder in the log
        """,
        (
            "--run /var/lib/racktwin/run --sign-key journal.key --out mine.json",
            "--events faults.csv --nodes 400 --site north --sign-key north.key --out north.json",
        ),
    ),
    "models merge": Verb(
        run_merge,
        f"""
        FILE+>files  file of `racktwin models export`
        -o --out FILE!  file to write
        --force  overwrite the file of --out
        {SIGN}
        {TRUST}
        """,
        (
            "north.json south.json --key north=north.pub --key south=south.pub --sign-key ours.key"
            " --out prior.json",
        ),
    ),
    "models import": Verb(
        run_import,
        f"""
        FILE>path  file of `racktwin models merge`, or one export
        {TRUST}
        """,
        ("prior.json --key ours.pub",),
    ),
    "models show": Verb(
        run_show,
        f"""
        FILE>path  file of `racktwin models export` or `racktwin models merge`
        {TRUST}
        """,
        ("prior.json", "north.json --key north.pub --format json"),
    ),
}
