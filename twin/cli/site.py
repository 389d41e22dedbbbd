"""The commands `site check`, `site discover`, `site split` and `trace info`: files of sites, recordings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from connectors.dsx import discover, to_yaml
from connectors.files import BadRow, discover_ipmi, hosts_of, read_capture
from twin.catalogue import NS, ConfigError, StorageError, clean, counted, number
from twin.cli.arguments import is_name, present, refuse_existing, write_json
from twin.cli.grammar import Verb
from twin.cli.measured_cadence import measured_cadence
from twin.config import load_site, read_yaml, site_faults, spec_of, uncooled, underfed, unguarded
from twin.report import grid, print_error, print_line, safe_text
from twin.run import TraceReader, atomic_write, form_of, journal_exists, verify_journal
from twin.site import Site, build_site, parse_profile, split_site
from twin.telemetry import Message

IT = ("IT/v1/PUB/Frame/", "IT/v1/PUB/Agent/")  # behind them come full names, the site's first
MAX_SITES = 64
NAMELESS = "site"  # the default: nobody said how it is called


def run_check(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Every fault of every file; 0 only if there is none."""
    results: dict[str, Any] = {}
    for path in args.site:
        site, faults = site_faults(path)
        if faults and _is_configuration(path):
            faults = [
                f"{path}: is the configuration of a daemon, not a site; `racktwin daemon check --config "
                f"{path}` checks it, and the site that it names"
            ]
        sizes = (
            {} if site is None else {t: n for t, n in site.sizes.items() if n and t not in ("site", "job")}
        )
        results[str(path)] = {"ok": not faults, "faults": faults, "sizes": sizes}
        if args.format != "json":
            for fault in faults:
                print_error(err, fault)
            if not faults:
                what = ", ".join(counted(t, n) for t, n in sizes.items()) or "an empty site"
                print_line(out, f"{path}: ok ({what})")
            if site is not None and not faults:
                print_line(out, f"note: {_false_alarms(site)}")
            for note in [*_empty_racks(site), *([*uncooled(site), *underfed(site)] if site else [])]:
                print_line(out, f"warning: {note}")
            for note in unguarded(site) if site else ():
                print_line(out, f"note: {note}")
            profiles = zip(site.names["rack"], site.profile_of_rack, strict=True) if site else ()
            bare = [rack for rack, profile in profiles if profile is None]
            if bare:
                text = f"note: {len(bare)} racks have no profile, so nothing guards them (first: {bare[0]}); "
                print_line(out, f"{text}add `profile: NAME` to each")
    if args.format == "json":
        write_json(results, out)
    return 0 if all(r["ok"] for r in results.values()) else 1


def _is_configuration(path: Path) -> bool:
    try:
        tree = read_yaml(path)
    except ConfigError:
        return False
    return isinstance(tree, dict) and "broker" in tree and "halls" not in tree


def _empty_racks(site: Site | None) -> list[str]:
    """Racks whose profile the file overrides to nothing: usually left from before they had one."""
    groups = [g for hall in site.file.halls for g in hall.racks] if site else []
    return [f"rack {g.name} has a profile but 0 GPUs, as `{key}: 0` overrides it; leave that key out to have "
            f"what {g.profile} says"
            for g in groups if g.profile is not None
            for key, n in (("nodes", g.nodes), ("gpus_per_node", g.gpus_per_node)) if n == 0]  # fmt: skip


def _false_alarms(site: Site) -> str:
    rate = site.file.false_alarms_per_rack_hour
    days = 1.0 / (rate * max(1, site.sizes["rack"]) * 24.0)
    return (
        f"false alarms of the diagnosis: at most 1 in {1.0 / rate:,.0f} rack-hours "
        f"(`false_alarms_per_rack_hour`), here 1 in {number(days)} days"
    )


def run_discover(args: argparse.Namespace, out: Console, err: Console) -> int:
    """A site file from metadata, with the periods that were measured."""
    if not args.recording.exists():
        raise StorageError(f"{args.recording}: no such file")
    try:
        form = form_of(args.recording, None)
    except ConfigError:
        raise ConfigError(
            f"{args.recording}: not a recording; expected a capture of `racktwin trace record`, a CSV "
            "with the columns offset,topic,payload, or an archive of IPMI recordings"
        ) from None
    if form == "ipmi":
        text = yaml.safe_dump(discover_ipmi(args.recording, args.name), sort_keys=False, allow_unicode=True)
        notes: list[str] = []
    else:
        bad: list[BadRow] = []
        sites: set[str] = set()
        found = discover(_good(read_capture(args.recording), bad, sites), args.name)
        if not found.counts.get("points"):
            raise StorageError(
                f"{args.recording}: no retained metadata of a BMS; "
                "expected messages on BMS/v1/PUB/Metadata/..."
            )
        if args.name == NAMELESS and len(sites) == 1 and is_name(min(sites)):
            found.site["site"] = min(sites)  # or what agents say would be of another site
            found.notes.insert(0, f"the site is called {min(sites)}, as all topics of the IT tree say")
        elif args.name == NAMELESS and sites:
            found.notes.insert(0, f"the IT tree names sites {', '.join(sorted(sites)[:8])}: none was taken")
        elif args.name == NAMELESS and found.called:
            found.site["site"] = found.called
            found.notes.insert(0, f"the site is called {found.called}, as the paths of all its points say")
        periods_s, measured = measured_cadence(_good(read_capture(args.recording), [], set()), found.site)
        found.notes += measured
        found.site |= {"periods_s": periods_s} if periods_s else {}
        text, notes = to_yaml(found), list(found.notes)
        if bad:
            notes.append(
                f"{len(bad)} lines are no messages, the first is line {bad[0].line}: {bad[0].reason}"
            )
    if args.out is None:
        out.file.write(text)
    else:
        refuse_existing(args.out, args.force)
        atomic_write(args.out, text)
    for note in notes:
        print_line(err if args.out is None else out, f"- {clean(note, 2000)}")
    if args.out is not None:
        _, site = load_site(args.out)
        what = ", ".join(counted(t, n) for t, n in site.sizes.items() if n and t not in ("site", "job"))
        print_line(out, f"{args.out}: {what}")
    return 0


def run_split(args: argparse.Namespace, out: Console, _err: Console) -> int:
    """Write the site files of the parts and of their hub; a fault of any ends with none written."""
    spec, site = load_site(args.site)
    profiles = {name: parse_profile(tree, name) for name, tree in spec.profiles.items()}
    divided = split_site(site, profiles, args.parts)
    files = {**divided.parts, "hub": divided.hub}
    paths = {name: args.out / f"{name}.yaml" for name in files}
    built = {
        name: build_site(spec_of(tree, args.site.parent, str(paths[name])), str(paths[name]))
        for name, tree in files.items()
    }
    texts = {
        paths[name]: yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) for name, tree in files.items()
    }
    if args.out.resolve() != args.site.parent.resolve():  # profiles beside a site file are beside each part
        owns = [args.site.parent / "profiles" / f"{name}.yaml" for name in profiles]
        texts |= {args.out / "profiles" / own.name: own.read_text("utf-8") for own in owns if own.is_file()}
    for path in texts:
        refuse_existing(path, args.force)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    for name, part in built.items():
        what = ", ".join(counted(t, part.sizes[t]) for t in ("rack", "node", "gpu", "cdu", "feeder"))
        print_line(out, f"{paths[name]}: {what}")
    stale = sorted(path.name for path in args.out.glob("part-*.yaml") if path not in texts)
    left = [f"{', '.join(stale[:4])} are of an earlier split: no daemon may run with them"] if stale else []
    for note in (*divided.notes, *left):
        print_line(out, f"note: {note}")
    return 0


def _good(rows: Iterable[Message | BadRow], bad: list[BadRow], sites: set[str]) -> Iterator[Message]:
    """The messages; what is none goes to `bad`, and the sites that the IT tree names to `sites`."""
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        if row.topic.startswith(IT) and len(sites) < MAX_SITES:
            sites.add(row.topic.split("/", 5)[4])
        yield row


def run_info(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Print the contents of a recording, and its damage."""
    form = form_of(args.path, None)
    info = _run_info(args.path) if form == "native" else _capture_info(args.path, form)

    def show(tree: dict[str, Any], out: Console) -> None:
        grid(out, ("", ""), [[key, safe_text(value, limit=4000)] for key, value in tree.items()])
        for damage in tree.get("damage", ()):
            print_line(err, f"damaged: {args.path}: {clean(damage, 1000)}", "yellow")

    present(args, info, show, out)
    return 1 if info.get("damage") else 0


def _run_info(path: Path) -> dict[str, Any]:
    reader = TraceReader(path)
    ticks, cells, events, first_ns, last_ns, urgent = 0, 0, 0, 0, 0, 0
    for frame in reader:
        ticks += 1
        urgent += frame.urgent
        events += len(frame.events)
        cells += sum(u.q.size for u in frame.updates) + sum(c.raw.size for c in frame.counts)
        first_ns, last_ns = first_ns or frame.now_ns, frame.now_ns
    damage = list(reader.damage)
    left_out = {"left_out": list(reader.left_out)} if reader.left_out else {}
    if not damage and len(reader.headers) < len(reader.segments()):
        damage.append("a segment ends before its header")
    info: dict[str, Any] = {
        "form": "native",
        "segments": len(reader.headers),
        "sites": sorted({h.site_hash for h in reader.headers}),
        "ticks": ticks,
        "urgent_ticks": urgent,
        "values": cells,
        "events": events,
        "span_s": (last_ns - first_ns) / NS,
        "bytes": sum(p.stat().st_size for p in reader.segments()),
    }
    damage += reader.gaps
    journal = path / "journal.jsonl"
    if path.is_dir() and journal_exists(journal):
        verdict = verify_journal(journal)
        info |= {"journal_lines": verdict.lines, "journal_head": verdict.head}
        if verdict.fault:
            damage.append(f"{verdict.file} line {verdict.line_no}, byte {verdict.position}: {verdict.fault}")
    return info | left_out | {"damage": damage}


def _capture_info(path: Path, form: str) -> dict[str, Any]:
    if form == "ipmi":
        return {"form": form, "hosts": len(hosts_of(path)), "bytes": path.stat().st_size}
    total, first_ns, last_ns = 0, 0, 0
    damage: list[str] = []
    kinds: dict[str, int] = {}
    for row in read_capture(path):
        total += 1
        if isinstance(row, BadRow):
            if len(damage) < 20:
                damage.append(f"line {row.line}: {row.reason}")
            continue
        first_ns, last_ns = first_ns or row.t_ns, row.t_ns
        kind = "/".join(row.topic.split("/")[:5])
        if kind in kinds or len(kinds) < 100:
            kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "form": "capture",
        "messages": total,
        "span_s": (last_ns - first_ns) / NS,
        "topics": dict(sorted(kinds.items())),
        "damage": damage,
    }


VERBS = {
    "site check": Verb(
        run_check, "FILE+>site  site file (YAML)", ("site.yaml", "pod1.yaml pod2.yaml --format json")
    ),
    "site discover": Verb(
        run_discover,
        f"""
        FILE>recording  MQTT capture, or archive of IPMI dumps
        -o --out FILE  site file to write; default: standard output
        ~--output FILE>out
        --force  overwrite the file of --out
        --name NAME={NAMELESS}  of the site
        """,
        ("capture.jsonl --out site.yaml", "capture.jsonl --name pod1"),
        answers=False,
    ),
    "site split": Verb(
        run_split,
        """
        FILE>site  site file (YAML) of a site that is too large for one daemon
        --parts COUNT!  number of parts, with about the same number of GPUs each
        -o --out FOLDER!  folder for part-1.yaml, ... and hub.yaml
        --force  overwrite existing files
        """,
        ("site.yaml --parts 2 --out parts",),
        answers=False,
    ),
    "trace info": Verb(
        run_info,
        "FILE>path  folder of a run, or a capture file",
        ("capture.jsonl", "/var/lib/racktwin/run --format json"),
    ),
}
