"""The command `simulation run`: a long run of a simulated site, in memory that does not grow.

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

from twin.catalogue import NS, ConfigError, duration, number
from twin.cli.arguments import LEVELS, REPORT, SITE, authority_levels, present, refuse_existing
from twin.cli.grammar import Verb
from twin.cli.replay import Bar
from twin.config import MAX_SCENARIO_BYTES, load_site, make_engine, make_policies, read_yaml, uncooled
from twin.contracts import Decision
from twin.engine import Engine
from twin.plant import MAX_HOURS, Plant, Scenario, Sensors, scenario_of
from twin.report import PAGE, Collector, grid, open_folder, print_line, render_terminal, write_report
from twin.run import Outcome, Recorder, asked_to_stop, plant_words, summary
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import Frame

ORDINARY = Scenario.ordinary()  # without a scenario file
MAX_FAULTS = 1000  # faults that are remembered


def load_scenario(path: Path | None, site: Site, seed: int | None = None) -> Scenario:
    """The scenario of a file, or an ordinary one; `seed` overrides its own. Raises ConfigError."""
    found = ORDINARY if path is None else scenario_of(read_yaml(path, MAX_SCENARIO_BYTES), site, str(path))
    if found.more_racks is not None:
        raise ConfigError(f"{path}: $.more_racks: only `racktwin simulation whatif` adds racks to a site")
    return found if seed is None else replace(found, seed=seed, weather=replace(found.weather, seed=seed))


def warn(warnings: list[str], err: Console) -> None:
    """Print the warnings of a run, one line each."""
    for text in warnings:
        print_line(err, f"warning: {text}")


class Looker:
    """Counts decisions, notes faults when first reported, and gives the plant the slots of its jobs."""

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
            if fresh and len(self.first_s) < MAX_FAULTS:
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

    def show(result: dict[str, Any], out: Console) -> None:
        render_terminal(collector, result, out)
        _print(out, result)

    present(args, result, show, out)
    if interrupted:
        err.print(f"interrupted after {duration(looker.seconds)} of {duration(seconds)}")
    if args.report is not None:  # last: what was simulated is reported even if this fails
        write_report(collector, result, args.report / PAGE)
        print_line(err, f"report: {args.report / PAGE}")
    return 130 if interrupted else 0


def _prepared(args: argparse.Namespace) -> tuple[Simulation, float, list[str]]:
    """(the simulation at its beginning, seconds to run, what to know of it). Raises ConfigError."""
    refuse_existing(args.out)
    if args.for_s is not None and args.for_s > MAX_HOURS * 3600.0:
        raise ConfigError(f"--for: {duration(args.for_s)}; expected at most {duration(MAX_HOURS * 3600.0)}")
    spec, site = load_site(args.site)
    scenario = load_scenario(args.scenario, site, args.seed)
    seconds = scenario.duration_s if args.for_s is None else args.for_s
    if seconds < scenario.dt_s:
        raise ConfigError(f"--for: {seconds:g} s; expected at least a step of dt_s ({scenario.dt_s:g} s)")
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


def _print(out: Console, result: dict[str, Any]) -> None:
    speed = result["simulated_s"] / max(result["wall_s"], 1e-3)
    out.print(f"simulated: {duration(result['simulated_s'])}, {number(speed)} times real time", markup=False)
    out.print("simulated plant:")
    grid(out, ("", ""), [[Text(label), Text(value)] for label, value in plant_words(result["plant"])])
    faults = sorted((f["after_s"], f["title"]) for f in result["faults_told"].values())
    if not faults:
        out.print("no faults detected")
        return
    rows = [[number(after_s, 6), title] for after_s, title in faults[:40]]
    grid(out, ("after, s", "fault detected"), rows, right=(0,))
    if len(faults) > 40:
        out.print(f"{len(faults) - 40} more in the JSON")


SCENARIO = """
    --scenario FILE  scenario (YAML); default: an hour of normal operation
    --seed SEED  seed of hidden parameters and noise; default: the scenario's
"""
VERBS = {
    "simulation run": Verb(
        run_simulate,
        f"""
        {SITE}
        {SCENARIO}
        --for DURATION  simulated time; default: the scenario's
        ~--hours HOURS>for_s
        {LEVELS}
        --out FOLDER  record the run in this folder: trace, journal, snapshots
        {REPORT}
        """,
        (
            "--site site.yaml --for 2h",
            "--site site.yaml --scenario leak.yaml --authority leak_guard=act --out run",
        ),
    )
}
