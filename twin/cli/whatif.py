"""The command `simulation whatif`: fork the twin's state, run a scenario with policies and without.

A snapshot is read, never written to. Everything printed is of a simulated plant and says so.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, clean, duration
from twin.cli.arguments import LEVELS, REPORT, SITE, authority_levels, present
from twin.cli.grammar import Verb
from twin.cli.simulate import warn
from twin.config import (
    MAX_SCENARIO_BYTES,
    load_site,
    make_engine,
    make_policies,
    read_yaml,
    spec_of,
    uncooled,
)
from twin.engine import Engine, snapshot
from twin.plant import MAX_CASES, Scenario, cases_of
from twin.report import PAGE, open_folder, print_line
from twin.run import OPEN, ProgressBar, engine_before, journal_exists, on_cluster, recorded_authority
from twin.simulation import (
    Case,
    Question,
    Result,
    armed_words,
    authority_of,
    case_json,
    engine_of,
    figure_text,
    newest_snapshot,
    print_whatif,
    run_cases,
    summary_of,
    when,
    write_page,
)
from twin.site import Site, SiteSpec, build_site, with_racks

MAX_HORIZON_S = 366 * 86_400.0
MAX_JOBS = 256
FEW_STEPS = 200  # of all courses: they end sooner than other processes begin
MORE_RACKS = "more racks change all flows: what the diagnosis then says about plates has little weight"


def run_whatif(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Ask, print the table (or one JSON object), write the report; 1 if a case failed."""
    begun = time.monotonic()
    if args.horizon_s is not None and args.horizon_s > MAX_HORIZON_S:
        raise ConfigError(f"--horizon {duration(args.horizon_s)}: expected at most {duration(MAX_HORIZON_S)}")
    question, site, tree, warnings = _question(args)
    engine = engine_of(question, site)
    cases = [
        Case(i, varied, scenario, _larger_site(question, site, scenario, args.site))
        for i, (varied, scenario) in enumerate(cases_of(_seeded(tree, args.seeds), site, str(args.scenario)))
    ]
    given = authority_levels(args.authority, [p.name for p in engine.policies])
    if args.before is not None:
        given = engine.intake.authority | given
    question = replace(question, given=given)
    authority = authority_of(engine, cases[0].scenario, question.given)
    processes = _processes(args.jobs, cases, args.horizon_s)
    for case in cases:
        if (dt_s := case.scenario.dt_s) > (args.horizon_s or math.inf):
            raise ConfigError(f"--horizon {args.horizon_s:g}: expected at least a step of dt_s ({dt_s:g} s)")
        if case.grown is not None:
            warnings.append(MORE_RACKS)
        warnings += case.scenario.remarks(args.horizon_s or case.scenario.duration_s)
    warnings = list(dict.fromkeys(warnings))
    if args.report is not None:
        open_folder(args.report)
    warn(warnings, err)
    with on_cluster(args.cluster), ProgressBar(err, "what if") as bar:
        results = run_cases(question, cases, processes, bar)
    result = _result(args, question, engine, results, authority) | {
        "warnings": warnings,
        "wall_s": round(time.monotonic() - begun, 3),
    }
    present(args, result, _say, out)
    for done in results:
        if done.error:
            print_line(err, f"failed: {_name(done)}: {clean(done.error, 500)}", "red")
    if args.report is not None:
        write_page(result, results[0], args.report / PAGE)
        print_line(err, f"report: {args.report / PAGE}")
    return 1 if result["failed"] else 0


def _question(args: argparse.Namespace) -> tuple[Question, Site, dict[str, Any], list[str]]:
    """Return the question, its site, the scenario's tree, and warnings."""
    spec, site = load_site(args.site)
    tree, warnings = read_yaml(args.scenario, MAX_SCENARIO_BYTES), uncooled(site)
    given = tree if isinstance(tree, dict) else {}
    question = Question(spec, str(args.site), horizon_s=args.horizon_s,
                        hold_work="workload" not in given, hold_weather="weather" not in given)  # fmt: skip
    if args.before is not None:
        if args.origin is None:
            raise ConfigError(f"--before {args.before}: expected --from with the folder of a run")
        journal = args.origin / OPEN
        then = recorded_authority(journal) if journal_exists(journal) else {}
        engine = engine_before(args.origin, args.before, lambda of: make_engine(build_site(of), then))
        raw = snapshot.encode(engine.dump())
        question = replace(question, snapshot=raw, snapshot_name=f"{args.origin} before tick {args.before}")
    elif args.origin is not None:
        raw, path, damaged = newest_snapshot(args.origin)
        if damaged:
            names = ", ".join(p.name for p in damaged[:5])
            warnings.append(f"newer snapshots are damaged ({names}): {path.name} is used, an older one")
        question = replace(question, snapshot=raw, snapshot_name=str(path))
    return question, site, tree, warnings


def _larger_site(question: Question, site: Site, scenario: Scenario, path: Path) -> SiteSpec | None:
    """The site with the more racks of a scenario; None without. Raises ConfigError where they do not go."""
    more = scenario.more_racks
    if more is None:
        return None
    rack = site.entity("rack", more.beside)
    assert rack is not None
    try:
        tree = with_racks(question.spec.file, site, rack, more.count, more.profile)
    except ValueError as error:
        raise ConfigError(f"$.more_racks: {error}") from None
    spec = spec_of(tree, path.parent, f"{path} with {more.count} more racks")
    build_site(spec, f"{path} with {more.count} more racks")
    return spec


def _seeded(tree: Any, seeds: str | None) -> Any:
    """The scenario's tree with the seeds of the call. Raises ConfigError for what is no list of seeds."""
    if seeds is None or not isinstance(tree, dict):
        return tree
    first, sweep = tree.get("seed", 0), tree.get("sweep") or {}
    try:
        many = [int(s) for s in seeds.split(",")]
        if "," not in seeds:
            if not 1 <= many[0] <= MAX_CASES:
                raise ValueError
            many = [int(first) + i for i in range(many[0])]
        if min(many) < 0 or len(set(many)) < len(many):
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(
            f"--seeds {seeds}: expected a number of seeds (1 to {MAX_CASES}), or distinct seeds such as 3,5,8"
        ) from None
    kept = {k: v for k, v in sweep.items() if k != "count"} if isinstance(sweep, dict) else {}
    return tree | {"sweep": kept | {"seeds": many}}


def _processes(wanted: int | None, cases: Sequence[Case], horizon_s: float | None) -> int:
    if wanted is None:
        steps = 2 * sum((horizon_s or c.scenario.duration_s) / c.scenario.dt_s for c in cases)
        return min(len(os.sched_getaffinity(0)), 2 * len(cases)) if steps > FEW_STEPS else 1
    if not 1 <= wanted <= MAX_JOBS:
        raise ConfigError(f"--jobs {wanted}: expected 1 to {MAX_JOBS}")
    return wanted


def _result(
    args: argparse.Namespace,
    question: Question,
    engine: Engine,
    results: list[Result],
    authority: dict[str, str],
) -> dict[str, Any]:
    """All of it as one JSON object; its keys are kept stable."""
    scenario = results[0].case.scenario
    done = next((r.courses["policies"] for r in results if "policies" in r.courses), None)
    origin = None
    if question.snapshot is not None:
        state = engine.state
        origin = {"snapshot": question.snapshot_name, "tick": state.tick, "now_ns": state.now_ns,
                  "time": when(state.now_ns)}  # fmt: skip
    return {
        "site": engine.site.file.site,
        "scenario": scenario.name,
        "simulated": True,
        "from": origin,
        "source": [str(args.scenario)],
        "horizon_s": question.horizon_s or scenario.duration_s,
        "dt_s": scenario.dt_s,
        "authority": authority,
        "site_authority": make_policies(engine.site.file)[1],
        "held_workload": question.snapshot is not None and question.hold_work,
        "not_carried": [] if done is None else done.not_carried,
        "summary": summary_of(results),
        "cases": [case_json(r) for r in results],
        "curves": {arm: course.trail for arm, course in results[0].courses.items()},
        "failed": sum(bool(r.error) for r in results),
    }


def _say(result: dict[str, Any], out: Console) -> None:
    began = result["from"]
    since = "a settled site" if began is None else f"{began['snapshot']}, {began['time']}"
    levels_ = ", ".join(f"{n} {level}" for n, level in sorted(result["authority"].items())) or "none"
    for line in (f"simulated, from {since}", f"policies of this what-if: {levels_}", armed_words(result)):
        if line:
            print_line(out, line, "dim")
    if result["held_workload"]:
        print_line(out, "every GPU keeps what it was doing", "dim")
    print_whatif(result, out)
    first = result["cases"][0]
    for arm in ("policies", "nothing"):
        for fault in first.get(arm, {}).get("faults", [])[:12]:
            delay = "" if fault["delay_s"] is None else f", {figure_text(fault['delay_s'])} s after it began"
            after = f"reported after {figure_text(fault['told_s'])} s{delay}"
            print_line(out, f"{arm}: {fault['kind']} of {fault['entity']} {after}")
    for row in first.get("policies", {}).get("limits", [])[:5]:
        print_line(out, f"limit: {row['text']}")
    if result["not_carried"]:
        text = clean(", ".join(result["not_carried"]), 1000)
        print_line(out, f"reported at the beginning, not carried on: {text}")


def _name(result: Result) -> str:
    varied = ", ".join(f"{k} = {v}" for k, v in result.case.varied.items())
    return clean(varied or f"seed {result.case.scenario.seed}", 200)


VERBS = {
    "simulation whatif": Verb(
        run_whatif,
        f"""
        {SITE}
        --from FILE>origin  initial snapshot, or a run for its newest one; default: a site in steady state
        --before TICK  begin at the state of the run before this tick, with the authority of that time
        --scenario FILE!  scenario (YAML)
        --horizon DURATION  simulated time; default: the scenario's
        --seeds N|A,B,..  number of seeds, or a list of seeds; default: the scenario's
        --jobs COUNT  number of parallel processes; default: one per processor, a single one for few steps
        --cluster ADDRESS  run on the workers of this Dask scheduler, such as tcp://HOST:8786
        {LEVELS}; default: act, but for those that are off
        {REPORT}
        """,
        (
            "--site site.yaml --scenario leak.yaml --horizon 30min",
            "--site site.yaml --from /var/lib/racktwin/run --scenario leak.yaml --seeds 5 --report out/",
        ),
    )
}
