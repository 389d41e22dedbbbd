"""The command `whatif`: fork the twin's state, run a scenario with policies and without, say what differs.

A snapshot is read, never written to. Everything printed is of a simulated plant and says so.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, clean
from twin.cli.arguments import authority_levels, write_json
from twin.cli.simulate import warn
from twin.config import MAX_SCENARIO_BYTES, load_site, make_policies, read_yaml, uncooled
from twin.engine import Engine
from twin.plant import MAX_CASES, cases_of
from twin.report import PAGE, open_folder
from twin.run import ProgressBar
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
    run_cases,
    summary_of,
    tell,
    when,
    write_page,
)
from twin.site import Site

MAX_HORIZON_S = 366 * 86_400.0
MAX_JOBS = 256


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin whatif`."""
    parser = commands.add_parser(
        "whatif", help="run a scenario from the twin's state, with policies and without"
    )
    parser.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    parser.add_argument(
        "--from", dest="origin", type=Path, metavar="SNAPSHOT",
        help="snapshot to begin from, or the folder of a run (its newest); without: a settled site",
    )  # fmt: skip
    parser.add_argument("--scenario", type=Path, required=True, help="scenario file (YAML)")
    parser.add_argument("--horizon", type=float, metavar="SECONDS", help="how far (default: the scenario's)")
    parser.add_argument(
        "--seeds", metavar="N|A,B,..", help="so many seeds, or these; instead of the scenario's"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes at once (default: one per processor)"
    )
    parser.add_argument(
        "--authority", action="append", default=[], metavar="POLICY=LEVEL",
        help="off, advise, approve or act; without: act for every policy that is not off",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.html into this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(handler=run_whatif)


def run_whatif(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Ask, print the table (or one JSON object), write the report; 1 if a case failed."""
    begun = time.monotonic()
    if args.horizon is not None and not 0 < args.horizon <= MAX_HORIZON_S:
        raise ConfigError(f"--horizon {args.horizon:g}: expected more than 0 and at most {MAX_HORIZON_S:g} s")
    question, site, tree, warnings = _question(args)
    engine = engine_of(question, site)
    cases = [
        Case(i, varied, scenario)
        for i, (varied, scenario) in enumerate(cases_of(_seeded(tree, args.seeds), site, str(args.scenario)))
    ]
    question = replace(question, given=authority_levels(args.authority, [p.name for p in engine.policies]))
    authority = authority_of(engine, cases[0].scenario, question.given)
    processes = _processes(args.jobs, len(cases))
    for case in cases:
        if (dt_s := case.scenario.dt_s) > (args.horizon or math.inf):
            raise ConfigError(f"--horizon {args.horizon:g}: expected at least a step of dt_s ({dt_s:g} s)")
        warnings += case.scenario.remarks(args.horizon or case.scenario.duration_s)
    warnings = list(dict.fromkeys(warnings))
    if args.report is not None:
        open_folder(args.report)
    warn(warnings, err)
    with ProgressBar(err, "what if") as bar:
        results = run_cases(question, cases, processes, bar)
    result = _result(args, question, engine, results, authority) | {
        "warnings": warnings,
        "wall_s": round(time.monotonic() - begun, 3),
    }
    if args.json:
        write_json(result, out)
    else:
        _say(result, out)
    for done in results:
        if done.error:
            err.print(
                f"failed: {_name(done)}: {clean(done.error, 500)}", style="red", markup=False, soft_wrap=True
            )
    if args.report is not None:
        write_page(result, results[0], args.report / PAGE)
        if not args.json:
            out.print(f"report: {args.report / PAGE}", markup=False, soft_wrap=True)
    return 1 if result["failed"] else 0


def _question(args: argparse.Namespace) -> tuple[Question, Site, dict[str, Any], list[str]]:
    """Return the question, its site, the scenario's tree, and warnings."""
    spec, site = load_site(args.site)
    tree, warnings = read_yaml(args.scenario, MAX_SCENARIO_BYTES), uncooled(site)
    given = tree if isinstance(tree, dict) else {}
    question = Question(spec, str(args.site), horizon_s=args.horizon,
                        hold_work="workload" not in given, hold_weather="weather" not in given)  # fmt: skip
    if args.origin is not None:
        raw, path, damaged = newest_snapshot(args.origin)
        if damaged:
            names = ", ".join(p.name for p in damaged[:5])
            warnings.append(f"newer snapshots are damaged ({names}): {path.name} is used, an older one")
        question = replace(question, snapshot=raw, snapshot_name=str(path))
    return question, site, tree, warnings


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
            f"--seeds {seeds}: expected how many (1 to {MAX_CASES}), or seeds such as 3,5,8, each once"
        ) from None
    kept = {k: v for k, v in sweep.items() if k != "count"} if isinstance(sweep, dict) else {}
    return tree | {"sweep": kept | {"seeds": many}}


def _processes(wanted: int | None, cases: int) -> int:
    if wanted is None:
        return min(len(os.sched_getaffinity(0)), 2 * cases)
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
        "failed": sum(bool(r.error) for r in results),
    }


def _say(result: dict[str, Any], out: Console) -> None:
    began = result["from"]
    since = "a settled site" if began is None else f"{began['snapshot']}, {began['time']}"
    levels_ = ", ".join(f"{n} {level}" for n, level in sorted(result["authority"].items())) or "none"
    for line in (f"simulated, from {since}", f"policies of this what-if: {levels_}", armed_words(result)):
        if line:
            out.print(clean(line, 1000), style="dim", markup=False, soft_wrap=True)
    if result["held_workload"]:
        out.print("every GPU keeps what it was doing", style="dim", markup=False)
    tell(result, out)
    first = result["cases"][0]
    for arm in ("policies", "nothing"):
        for fault in first.get(arm, {}).get("faults", [])[:12]:
            delay = "" if fault["delay_s"] is None else f", {figure_text(fault['delay_s'])} s after it began"
            after = f"told after {figure_text(fault['told_s'])} s{delay}"
            line = f"{arm}: {fault['kind']} of {fault['entity']} {after}"
            out.print(clean(line, 300), markup=False, soft_wrap=True)
    if result["not_carried"]:
        text = clean(", ".join(result["not_carried"]), 1000)
        out.print(f"told at the beginning, not carried on: {text}", markup=False, soft_wrap=True)


def _name(result: Result) -> str:
    varied = ", ".join(f"{k} = {v}" for k, v in result.case.varied.items())
    return clean(varied or f"seed {result.case.scenario.seed}", 200)
