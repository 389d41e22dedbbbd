"""Demos: a simulated pod live under control of the daemon, and recordings that are replayed.

The live demo has three processes, as on a real site: the daemon (with the embedded broker), the pod, and
this one, which asks the daemon over HTTP as any operator's terminal would. Ctrl-C ends it; then the run is
replayed, as proof.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.text import Text

from connectors.dsx import discover, to_yaml
from connectors.files import read_capture
from twin.api import Client, login_link
from twin.catalogue import ConfigError, ConnectorError, StorageError, quantity
from twin.cli.commands import parser_of
from twin.cli.grammar import Verb
from twin.cli.operate import TONES, bounds
from twin.cli.replay import conclude, run_replay
from twin.cli.traces import trace_root
from twin.config import load_config, load_site, make_engine
from twin.report import Collector, safe_text, text_table, when, write_report
from twin.run import TraceReader, replay_arrivals, replay_frames, summary
from twin.simulation import (
    FAULT_AT_S,
    PERIOD_S,
    SITE,
    PodSource,
    end_child,
    free_port,
    need_agent,
    reached,
    start_child,
    start_daemon,
)
from twin.site import SiteSpec, build_site

LINE_EVERY_S = 5.0  # without a terminal, a line this often
SHOWN_LINES = 8
MARKER = ".racktwin-demo"  # in each folder that a demo made, and its lock: nothing else is ever emptied
OURS = ("state", "demo-pod.yaml", "racktwin.yaml", "daemon.log", "pod.log", "report.html")
CONFIG = """\
# Made by `racktwin demo`. The embedded broker knows no identities: `act` is allowed over it only because the
# site is a simulated pod.
site: demo-pod.yaml
broker: embedded
embedded_port: {broker}
simulated: true
api: {{port: {api}}}
history: {{every_s: 1}}
"""
CAPTURE = Path("dsx-bms-capture") / "dsx_exemplar.csv"


def run_demo(args: argparse.Namespace, out: Console, err: Console) -> int:
    """The live demo, or the recorded one."""
    if args.recorded:
        return run_recorded_demo(args.out, out, err)
    return run_live_demo(args.out, args.for_s, out)


def run_live_demo(folder: Path, seconds: float | None, out: Console) -> int:
    """Until Ctrl-C, or for so many seconds."""
    need_agent()
    with claimed(folder / "live", OURS) as live:
        return _demo(live, seconds, out)


@contextlib.contextmanager
def claimed(folder: Path, ours: tuple[str, ...]) -> Iterator[Path]:
    """The folder, without what a demo before left in it, and nobody else's meanwhile.

    Raises ConfigError for one that no demo made, and for one in which another demo runs.
    """
    marker = folder / MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = not marker.is_file() and any(folder.iterdir())
    except (FileExistsError, NotADirectoryError):
        strange = True
    if strange:
        raise ConfigError(
            f"{folder}: exists, and no demo made it; expected a new or empty folder: give another with "
            "--out, or remove it yourself"
        )
    with marker.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another demo runs in it (process {lock.read(20).strip() or 'unknown'}); end that "
                "one first, or give another folder with --out"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        for name in ours:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield folder


def _demo(folder: Path, seconds: float | None, out: Console) -> int:
    (folder / "demo-pod.yaml").write_text(SITE, encoding="utf-8")
    broker, api = free_port(18830), free_port(8077)
    config = folder / "racktwin.yaml"
    config.write_text(CONFIG.format(broker=broker, api=api), encoding="utf-8")
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.append(start_daemon(config, folder / "daemon.log"))
        client = reached(config, children[0], folder / "daemon.log")
        pod = [sys.executable, "-m", "twin.simulation.demo_fleet", str(broker)]
        children.append(start_child(pod, folder / "pod.log"))
        seen = _watch(client, folder, children, seconds, out)
    finally:
        for child in reversed(children):
            end_child(child)
    return _prove(folder, seen, out)


def _watch(
    client: Client, folder: Path, children: list[subprocess.Popen[bytes]], seconds: float | None, out: Console
) -> int:
    """Show what the daemon says each second, until it is enough; the last tick that it told."""
    begun = time.monotonic()
    stop, seen = {"now": False}, -1
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop.update(now=True)) for number in ends]
    head = f"{login_link(load_config(folder / 'racktwin.yaml'))}  ·  Ctrl-C ends it"
    plain = not out.is_terminal
    if plain:
        out.print(f"the daemon answers at {head}", markup=False, soft_wrap=True)
    try:
        with Screen(console=out, auto_refresh=False, transient=False) if not plain else _NoScreen() as screen:
            shown_s = -LINE_EVERY_S
            while not stop["now"] and (seconds is None or time.monotonic() - begun < seconds):
                for child, name in zip(children, ("daemon", "pod"), strict=False):
                    if child.poll() is not None:
                        raise ConnectorError(f"the {name} ended with {child.returncode}; see {folder}")
                state = client.get("/summary")
                seen = max(seen, state["ticks"]["tick"])
                if not plain:
                    lines = client.get("/decisions", limit=60)
                    screen.update(_page(state, lines, head), refresh=True)
                elif time.monotonic() - begun - shown_s >= LINE_EVERY_S:
                    shown_s = time.monotonic() - begun
                    out.print(_line(state), markup=False, soft_wrap=True)
                time.sleep(1.0)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
    return seen


class _NoScreen:
    """Screen of a demo without a terminal: it draws nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was drawn."""


def _page(state: dict[str, Any], lines: dict[str, Any], head: str) -> Group:
    ticks, counts = state["ticks"], state["alarm_counts"]
    title = Text.assemble(
        ("racktwin ", "bold"), f"{state['site']} (simulated)  tick {ticks['tick']}  "
        f"{1e3 * (ticks['took_s_p50'] or 0):.0f} ms a tick  ", _alarm_words(counts),
    )  # fmt: skip
    heads = ("rack", "power", "flow", "supply", "return", "hottest GPU", "GPUs capped")
    racks = text_table(heads, [_rack(rack) for rack in state["racks"]], right=range(1, len(heads)))
    parts: list[Any] = [title, Text(head, "dim"), Text(), racks, Text()]
    for alarm in state["alarms"][:4]:
        parts.append(safe_text(f"{alarm['severity']}: {alarm['title']}", TONES.get(alarm["severity"], "")))
    for row in state["commanded"][:4]:
        parts.append(
            safe_text(
                f"commanded: {row['control']} {bounds(row['low'], row['high'])} {row['unit']} for "
                f"{row['count']} by {row['policy']}: {'; '.join(row['reasons'])}",
                "cyan",
            )
        )
    if not state["alarms"] and not state["commanded"]:
        second = ticks["tick"] % PERIOD_S
        wait = FAULT_AT_S - second if second < FAULT_AT_S else PERIOD_S - second + FAULT_AT_S
        parts.append(Text(f"all is well; rack r2 will lose its coolant in about {wait:.0f} s", "green"))
    parts.append(Text())
    parts += [
        safe_text(f"{when(line['now_ns'])[6:]}  {line['text']}", "dim", 160)
        for line in _told(lines)[:SHOWN_LINES]
    ]
    return Group(*parts)


def _rack(rack: dict[str, Any]) -> list[Any]:
    return [
        safe_text(rack["name"].partition("/")[2], TONES.get(rack["severity"], "")),
        quantity(rack["power_w"], "W"),
        quantity(rack["flow_lpm"], "l/min"),
        *(quantity(rack[k], "degC") for k in ("supply_temp_c", "return_temp_c", "gpu_temp_c_max")),
        rack["gpus_capped"],
    ]


def _told(lines: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = ("command", "finding", "cleared", "lapsed", "withdrawn")
    return [line for line in lines["decisions"] if line["kind"] in kinds]


def _alarm_words(counts: dict[str, int]) -> tuple[str, str]:
    parts = [f"{n} {name}" for name, n in counts.items() if n]
    tone = "bold red" if counts.get("critical") else "yellow" if parts else "green"
    return (", ".join(parts) or "no alarms", tone)


def _line(state: dict[str, Any]) -> str:
    racks = "; ".join(
        f"{r['name'].rpartition('/')[2]} {quantity(r['power_w'], 'W')} "
        f"{quantity(r['flow_lpm'], 'l/min')} hottest {quantity(r['gpu_temp_c_max'], 'degC')} "
        f"capped {r['gpus_capped']}"
        for r in state["racks"]
    )
    return f"tick {state['ticks']['tick']}: {racks}; {_alarm_words(state['alarm_counts'])[0]}"


def _prove(folder: Path, seen: int, out: Console) -> int:
    """The run made again from its trace: every decision is the same, or Divergence is raised.

    Raises StorageError where the files hold less than the run of which tick `seen` was shown.
    """
    run = folder / "state" / "run"
    reader, collector = TraceReader(run), Collector()
    spec = msgspec.json.decode(reader.first_header().spec, type=SiteSpec)
    engine = make_engine(build_site(spec))
    begun = time.monotonic()
    outcome = replay_frames(engine, reader, run / "journal.jsonl", (collector,))
    faults = list(outcome.damage)
    if engine.state.tick < seen:
        faults.append(f"the trace ends at tick {engine.state.tick}, and tick {seen} was shown live")
    if not outcome.compared_lines:
        faults.append("no line of a journal was compared")
    if faults:
        raise StorageError(f"{run}: the run is not proven: {'; '.join(faults)}")
    result = summary(engine, outcome, None, time.monotonic() - begun)
    page = folder / "report.html"
    write_report(collector, result | {"source": [str(run)], "simulated": True}, page)
    out.print(
        f"\nreplayed from {run}: {outcome.ticks} ticks and {outcome.compared_lines} journal lines are "
        f"byte-identical\nreport: {page}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def run_recorded_demo(folder: Path, out: Console, err: Console) -> int:
    """Both parts, with a report each."""
    folder.mkdir(parents=True, exist_ok=True)
    capture = trace_root(os.environ) / CAPTURE
    if capture.is_file():
        out.rule("A real recording: an NVL72 pod, 99 seconds")
        site = folder / "titan.yaml"
        site.write_text(to_yaml(discover(read_capture(capture), "titan")), encoding="utf-8")
        out.print(
            f"{site}: the site, discovered from the recording's own metadata", markup=False, soft_wrap=True
        )
        run_replay(
            _parse(["--site", str(site), "--trace", str(capture), "--report", str(folder / "real")]), out, err
        )
    else:
        out.print(
            f"No recording at {capture}.\n`.venv/bin/racktwin trace fetch dsx-bms-capture` brings a real "
            "one, or set RACKTWIN_TRACES; without it the demo shows only what racktwin generates itself.",
            markup=False,
            soft_wrap=True,
        )
    out.rule("Simulated by racktwin: a rack loses its coolant")
    _simulated(folder / "simulated", out)
    out.print(
        "\nNext: open the reports; `.venv/bin/racktwin --help`; `.venv/bin/racktwin site discover CAPTURE -o "
        "site.yaml` for your own site.",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _parse(words: list[str]) -> argparse.Namespace:
    """The arguments of a replay."""
    parsed: argparse.Namespace = parser_of("trace", "replay").parse_args(words)
    return parsed


def _simulated(folder: Path, out: Console) -> None:
    with claimed(folder, ("run", "demo-pod.yaml", "simulated-pod.jsonl", "report.html")):
        _play(folder, out)


def _play(folder: Path, out: Console) -> None:
    run = folder / "run"
    path = folder / "demo-pod.yaml"
    path.write_text(SITE, encoding="utf-8")
    spec, site = load_site(path)
    engine, collector = make_engine(site), Collector()
    source = PodSource(site, keep=folder / "simulated-pod.jsonl")
    begun = time.monotonic()
    outcome = replay_arrivals(engine, spec, source, 1.0, run, (collector, source))
    result = summary(engine, outcome, source.messages.summary(), time.monotonic() - begun)
    result |= {"source": [str(source.keep)], "simulated": True}
    conclude(_parse(["--trace", str(source.keep), "--report", str(folder)]), collector, result, out)
    again = make_engine(site)
    compared = replay_frames(again, TraceReader(run), run / "journal.jsonl").compared_lines
    out.print(
        f"replayed from {run}: {compared} journal lines and the final state are byte-identical",
        markup=False,
        soft_wrap=True,
    )


VERBS = {
    "demo": Verb(
        run_demo,
        """
        --out FOLDER=build/demo  for its files
        --for DURATION  stop after this long
        ~--seconds SECONDS>for_s
        --recorded  replay a real and a simulated recording instead, and write reports
        """,
        ("", "--for 2min --out /tmp/demo", "--recorded"),
        answers=False,
    )
}
