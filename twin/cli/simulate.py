"""The command `simulate`: a long run of a simulated site under a scenario, in memory that does not grow.

The plant stands in for the site; sensors, twin, policies and report are those of a live run. Nothing here is
a measurement of a real site, and what is written says so.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from twin.catalogue import NS, ConfigError, clean, duration, number
from twin.cli.arguments import authority_levels, write_json
from twin.cli.replay import Bar
from twin.config import MAX_SCENARIO_BYTES, load_site, make_engine, make_policies, read_yaml, uncooled
from twin.contracts import Decision
from twin.engine import Engine
from twin.plant import MAX_HOURS, Plant, Scenario, Sensors, scenario_of
from twin.report import PAGE, Collector, grid, open_folder, render_terminal, write_report
from twin.run import Outcome, Recorder, asked_to_stop, plant_words, summary
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import Frame

ORDINARY = Scenario.ordinary()  # without a scenario file
MAX_TOLD = 1000  # faults that are remembered


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin simulate`."""
    parser = commands.add_parser(
        "simulate", help="run a simulated site under a scenario, for hours or months"
    )
    parser.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    parser.add_argument("--scenario", type=Path, help="scenario file (YAML); without: an ordinary hour")
    parser.add_argument("--hours", type=float, help="simulated hours (default: the scenario's)")
    parser.add_argument(
        "--seed", type=int, help="of the hidden truth and all noise (default: the scenario's)"
    )
    parser.add_argument(
        "--authority", action="append", default=[], metavar="POLICY=LEVEL",
        help="off, advise, approve or act; overrides site and scenario",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="record the run in this folder: trace, journal, snapshots")
    parser.add_argument("--report", type=Path, help="write report.html into this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(handler=run_simulate)


def load_scenario(path: Path | None, site: Site) -> Scenario:
    """The scenario of a file, or an ordinary one. Raises ConfigError with every fault."""
    return ORDINARY if path is None else scenario_of(read_yaml(path, MAX_SCENARIO_BYTES), site, str(path))


def warn(warnings: list[str], err: Console) -> None:
    """Print the warnings of a run, one line each."""
    for text in warnings:
        err.print(f"warning: {clean(text, 1000)}", markup=False, soft_wrap=True)


class Looker:
    """Counts decisions, notes faults when they are first told, tells the plant the slots of its jobs."""

    def __init__(self, plant: Plant, begun_ns: int) -> None:
        self.plant, self.begun_ns = plant, begun_ns
        self.first_s: dict[str, tuple[float, str]] = {}
        self.ticks = self.commands = self.advice = 0
        self.first_ns = self.last_ns = 0

    @property
    def seconds(self) -> float:
        """Simulated so far."""
        return max(0.0, (self.last_ns - self.begun_ns) / NS)

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After a tick."""
        self.ticks += 1
        self.first_ns, self.last_ns = self.first_ns or frame.now_ns, frame.now_ns
        self.commands += sum(len(c.index) for c in decision.commands if not c.renewal)
        self.advice += sum(len(c.index) for c in decision.advice)
        self.plant.job_names = {slot: name for name, slot in engine.jobs.slot_of.items()}
        for finding in decision.findings:
            fresh = finding.id.startswith("fault/") and finding.id not in self.first_s
            if fresh and len(self.first_s) < MAX_TOLD:
                self.first_s[finding.id] = (self.seconds, finding.title)


def run_simulate(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate, print the summary (or one JSON object), write the report. Ctrl-C ends it early, and well."""
    begun = time.monotonic()
    simulation, seconds, warnings = _prepared(args)
    warn(warnings, err)
    plant: Any = simulation.plant
    looker, collector = Looker(plant, simulation.begun_ns), Collector()
    bar = Bar(err, seconds, lambda: looker.seconds, "simulating")
    simulation.observers = (collector, looker, bar)
    recorder = simulation.recorder
    with asked_to_stop(simulation.stop):
        try:
            simulation.run(seconds)
        finally:
            bar.close()
            simulation.close()
    interrupted = simulation.stopped
    outcome = Outcome(ticks=looker.ticks, commands=looker.commands, advice=looker.advice,
                      first_ns=looker.first_ns, last_ns=looker.last_ns,
                      inbox=dict(simulation.inbox.counts))  # fmt: skip
    outcome.journal_head = recorder.chain.head if recorder is not None else ""
    result = summary(simulation.engine, outcome, None, time.monotonic() - begun) | {
        "source": [str(args.scenario or args.site)],
        "simulated": True,
        "seed": plant.seed,
        "simulated_s": looker.seconds,
        "interrupted": interrupted,
        "plant": plant.figures(),
        "faults_told": {k: {"after_s": s, "title": t} for k, (s, t) in looker.first_s.items()},
        "warnings": warnings,
    }
    if args.json:
        write_json(result, out)
    else:
        render_terminal(collector, result, out)
        _tell(out, result)
    if interrupted:
        err.print(f"interrupted after {duration(looker.seconds)} of {duration(seconds)}")
    if args.report is not None:  # last: what was simulated is told even if this fails
        write_report(collector, result, args.report / PAGE)
        if not args.json:
            out.print(f"report: {args.report / PAGE}", markup=False, soft_wrap=True)
    return 130 if interrupted else 0


def _prepared(args: argparse.Namespace) -> tuple[Simulation, float, list[str]]:
    """(the simulation at its beginning, seconds to run, what to know of it). Raises ConfigError."""
    if args.out is not None and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"--out {args.out}: is no empty folder; expected a new one")
    if args.hours is not None and not 0 < args.hours <= MAX_HOURS:
        raise ConfigError(f"--hours {args.hours:g}: expected more than 0 and at most {MAX_HOURS:g}")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: expected 0 to 2^63 - 1")
    spec, site = load_site(args.site)
    scenario = load_scenario(args.scenario, site)
    if args.seed is not None:
        scenario = replace(scenario, seed=args.seed, weather=replace(scenario.weather, seed=args.seed))
    seconds = scenario.duration_s if args.hours is None else args.hours * 3600.0
    if seconds < scenario.dt_s:
        raise ConfigError(f"--hours: {seconds:g} s; expected at least a step of dt_s ({scenario.dt_s:g} s)")
    known = [p.name for p in make_policies(site.file)[0]]
    engine = make_engine(site, scenario.policies | authority_levels(args.authority, known))
    plant = Plant(site, scenario.seed, scenario)
    if args.report is not None:
        open_folder(args.report)
    recorder = None if args.out is None else Recorder(engine, spec, args.out, simulated=True)
    simulation = Simulation(
        engine, plant, Sensors(site, scenario.seed), recorder=recorder, dt_s=scenario.dt_s,
        start_ns=scenario.start_ns,
    )  # fmt: skip
    plant.start_ns = simulation.begun_ns
    return simulation, seconds, uncooled(site) + scenario.remarks(seconds)


def _tell(out: Console, result: dict[str, Any]) -> None:
    speed = result["simulated_s"] / max(result["wall_s"], 1e-3)
    out.print(f"simulated: {duration(result['simulated_s'])}, {number(speed)} times real time", markup=False)
    out.print("what the simulated plant went through:")
    grid(out, ("", ""), [[Text(label), Text(value)] for label, value in plant_words(result["plant"])])
    faults = sorted((f["after_s"], f["title"]) for f in result["faults_told"].values())
    if not faults:
        out.print("no fault was told")
        return
    rows = [[number(after_s, 6), title] for after_s, title in faults[:40]]
    grid(out, ("after, s", "fault told"), rows, right=(0,))
    if len(faults) > 40:
        out.print(f"{len(faults) - 40} more in the JSON")
