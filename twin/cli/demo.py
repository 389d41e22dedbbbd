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
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from connectors.dsx import discover, to_yaml
from connectors.files import read_capture
from twin.api import Client, login_link
from twin.catalogue import START_NS, ConfigError, ConnectorError, StorageError, counted, duration
from twin.cli.commands import parser_of
from twin.cli.grammar import Verb
from twin.cli.replay import conclude, run_replay
from twin.cli.traces import trace_root
from twin.config import load_config, load_site, make_engine
from twin.report import Collector, print_line, write_report
from twin.run import TraceReader, replay_frames, summary
from twin.simulation import (
    FOLDER,
    DemoPast,
    DemoSite,
    Narrator,
    Story,
    StoryStep,
    end_child,
    free_port,
    load_story,
    need_agent,
    reached,
    start_child,
    start_daemon,
    tail,
    with_past,
)
from twin.site import SiteSpec, build_site

LOOK_S = 1.0  # between looks at what the daemon says
SETTLE_S = 20.0  # after the daemon's start, for links and first readings
RECORDED_PAST_S, RECORDED_S = 300.0, 90.0
MARKER = ".racktwin-demo"  # in each folder that a demo made, and its lock: nothing else is ever emptied
OURS = ("state", "demo-pod.yaml", "racktwin.yaml", "daemon.log", "pod.log", "report.html", "slurm")
CONFIG = """\
# Made by `racktwin demo`. The embedded broker knows no identities: `act` is allowed over it only because the
# site is a simulated pod.
site: demo-pod.yaml
broker: embedded
embedded_port: {broker}
simulated: true
api: {{port: {api}}}
history: {{every_s: 1}}
jobs:
  slurm:  # a stand-in: programs of these names in the folder `slurm`, which the pod answers
    command: true
    requeue: true
    period_s: 2
    kinds: {{train: training, serve: inference, batch: batch}}
    node_names:
      "r1n[00-17]": demo-pod/hall1/r1/node[0-17]
      "r2n[00-17]": demo-pod/hall1/r2/node[0-17]
      "r3n[00-17]": demo-pod/hall1/r3/node[0-17]
      "r4n[00-17]": demo-pod/hall1/r4/node[0-17]
burn_in: {{command: [burn-in, "{{host}}"]}}
"""
CAPTURE = Path("dsx-bms-capture") / "dsx_exemplar.csv"


def run_demo(args: argparse.Namespace, out: Console, err: Console) -> int:
    """The live demo, or the recorded one."""
    if args.recorded:
        return run_recorded_demo(args.out, out, err)
    need_agent()
    with claimed(args.out / "live", OURS) as live:
        return _demo(live, args, out)


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
            f"{folder}: exists, and no demo created it; expected a new or empty folder: give another with "
            "--out, or remove it"
        )
    with marker.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another demo runs in it (process {lock.read(20).strip() or 'unknown'}); stop it "
                "first, or give another folder with --out"
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


def _demo(folder: Path, args: argparse.Namespace, out: Console) -> int:
    site_file = folder / "demo-pod.yaml"
    shutil.copyfile(FOLDER / "site.yaml", site_file)
    _, site = load_site(site_file)
    story = load_story(FOLDER / "story.yaml", site).only(args.story)
    broker, config = free_port(), folder / "racktwin.yaml"
    children: list[subprocess.Popen[bytes]] = []
    try:
        pod = start_pod(folder, broker, args.story)
        children.append(pod.process)
        print_line(out, "a simulated pod; first its past is simulated, faster than real time")
        past = pod.answer("past_s")
        print_line(out, f"simulated, with {duration(past['past_s'])} of simulated past, made in "
                        f"{duration(past['took_s'])}")  # fmt: skip
        programs = Path(pod.answer("programs")["programs"])
        # The port of the page is chosen last: another demo may have taken it meanwhile
        config.write_text(CONFIG.format(broker=broker, api=free_port(8077)), encoding="utf-8")
        children.append(start_daemon(config, folder / "daemon.log", programs))
        client = reached(config, children[1], folder / "daemon.log")
        print_line(out, f"the page: {login_link(load_config(config))}  (Ctrl-C ends it)")
        ending = _narrate(LiveDemo(story, client, pod, children, folder), args, out)
    finally:
        for child in reversed(children):
            end_child(child)
    code = _prove(folder, ending.tick, out)
    print_line(out, ending_words(folder, ending))
    return 1 if ending.missing else code


class Pod:
    """The process of the simulated pod; `answer` waits for its lines."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def answer(self, key: str) -> dict[str, Any]:
        """Its next line that has this key. Raises ConnectorError where it ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = msgspec.json.decode(line)
            if key in said:
                return said
        raise ConnectorError(f"the pod ended; the end of {self.log}:\n{tail(self.log)}")

    def begin(self) -> int:
        """Begin the story; the instant of that."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"begin\n")
        self.process.stdin.flush()
        return int(self.answer("begun_ns")["begun_ns"])


def start_pod(folder: Path, port: int, chapter: str | None) -> Pod:
    """The pod of a demo's folder, on the broker at a port of this host."""
    command = [sys.executable, "-m", "twin.simulation.demo_process", str(FOLDER / "story.yaml"),
               str(folder / "demo-pod.yaml"), str(folder), str(port)]  # fmt: skip
    command += [] if chapter is None else [chapter]
    log = folder / "pod.log"
    return Pod(start_child(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE), log)


class LiveDemo(NamedTuple):
    """The parts of a demo that runs."""

    story: Story
    client: Client
    pod: Pod
    children: list[subprocess.Popen[bytes]]
    folder: Path


class Ending(NamedTuple):
    """The last tick that was shown, the signs that did not show in time, and True if the story ended."""

    tick: int
    missing: list[str]
    is_over: bool = False


def _narrate(demo: LiveDemo, args: argparse.Namespace, out: Console) -> Ending:
    """Print the story line by line, until it is over, the time is up or Ctrl-C comes."""
    begun, stop = time.monotonic(), {"now": False}
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop.update(now=True)) for number in ends]
    narrator: Narrator | None = None
    of, over = len(demo.story.chapters), False
    try:
        _settle(demo)
        narrator = Narrator(demo.story, demo.client, demo.pod.begin())
        while not stop["now"] and (args.for_s is None or time.monotonic() - begun < args.for_s):
            for child, name in zip(demo.children, ("pod", "daemon"), strict=True):
                if child.poll() is not None:
                    raise ConnectorError(f"the {name} ended with {child.returncode}; see {demo.folder}")
            for line in narrator.poll():
                print_line(out, line_text(line, of))
            if narrator.is_over and not over:
                over = True
                print_line(out, reporting_words(narrator.summary))
                narrator.close()
                if args.for_s is None and not args.stay:
                    break
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
    if narrator is None or not narrator.summary:
        return Ending(-1, [])
    return Ending(narrator.summary["ticks"]["tick"], narrator.missing, over)


def _settle(demo: LiveDemo) -> None:
    """Wait until the daemon has readings of all of the pod and nothing of its start is wrong, at most
    SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        state = demo.client.get("/summary")
        reporting = all(part["heard"] == part["of"] for part in state["heard"].values())
        if reporting and state["jobs"] and not state["alarm_counts"]["critical"]:
            return
        time.sleep(LOOK_S)


def line_text(line: StoryStep, of: int) -> str:
    """A step as the terminal has it."""
    after = "" if line.after_s is None else f"+{line.after_s:.0f} s"
    return f"{line.chapter}/{of} {after:>6}  {line.text}"


def ending_words(folder: Path, ending: Ending) -> str:
    """Sentence on how the demo ended, where its report is, and what to try next."""
    text = "The story is over" if ending.is_over else "The demo was stopped before its story was over"
    if ending.missing:
        count = len(ending.missing)
        text += f"; {count} expected reaction{'s' * (count != 1)} did not show in time"
    return (
        f"{text}. Open {folder / 'report.html'}. Next: `racktwin demo --stay` keeps the pod running after "
        "the story, so that you can query it; `racktwin init site/` connects your own site."
    )


def reporting_words(summary: dict[str, Any]) -> str:
    """Sentence on the readings of the site."""
    parts = [f"{part['heard']} of {counted(table, part['of'])}" for table, part in summary["heard"].items()]
    return f"reporting: {', '.join(parts)}"


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
    out.rule("Simulated by racktwin: a pump fails")
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
    with claimed(folder, ("run", "demo-pod.yaml", "report.html", "state")):
        _play(folder, out)


def _play(folder: Path, out: Console) -> None:
    """A chapter in closed loop, faster than real time."""
    path = folder / "demo-pod.yaml"
    shutil.copyfile(FOLDER / "site.yaml", path)
    spec, site = load_site(path)
    story = with_past(load_story(FOLDER / "story.yaml", site).only("pump"), RECORDED_PAST_S)
    demo, collector, begun = DemoSite(story, spec, site), Collector(), time.monotonic()
    with DemoPast(demo, START_NS, folder) as loop:
        loop.observers = (collector,)
        loop.run(story.past_s)
        demo.begin()
        loop.dt_s = 1.0
        loop.run(RECORDED_S)
    again, run = make_engine(site), folder / "run"
    outcome = replay_frames(again, TraceReader(run), run / "journal.jsonl")
    result = summary(again, outcome, None, time.monotonic() - begun)
    result |= {"source": [str(run)], "simulated": True}
    conclude(_parse(["--trace", str(run), "--report", str(folder)]), collector, result, out)
    print_line(out, f"replayed from {run}: {outcome.compared_lines} journal lines and the final state are "
                    "byte-identical")  # fmt: skip


VERBS = {
    "demo": Verb(
        run_demo,
        """
        --out FOLDER=build/demo  folder for the files of the demo
        --story NAME  play one chapter: power, replacement, checkpoint, feed, pump, forecast, coolant, leak
        --for DURATION  stop after this time
        ~--seconds SECONDS>for_s
        --stay  keep running after the story, until Ctrl-C
        --recorded  replay a real and a simulated recording instead, and write reports
        """,
        ("", "--story pump", "--for 2min --out /tmp/demo", "--recorded"),
        answers=False,
    )
}
