"""Mutation score: a seeded sample of small changes to the code, and how many of them its tests notice.

`python -m tests.support.mutants [AREA ..] [--count 60] [--seed 1]` needs mutmut 3.8.1 or later (`pip install
mutmut`; the lock files do not have it) and works in `build/mutants`, a folder per area, made anew each
time. A survivor that a person has read, and found to change nothing or a text alone, stands in
`mutants_judged.tsv`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
JUDGED = Path(__file__).with_name("mutants_judged.tsv")  # function, its changed lines, why it may survive
AGENT = "racktwin_agent"
CODE = ("twin", "policies", "connectors", "models", AGENT)
ALSO = ("docs", "deploy", "README.md", "Makefile")
NOTICED = ("killed", "timeout", "segfault")  # a test that no longer ends has noticed, too
# Area: its files, and the tests that belong to it (tests/unit/test_*.py, tests/property/test_*_props.py)
AREAS = {
    "control": (
        "twin/control/{arbiter,leases,shadow}",
        "arbiter_rules leases shadow_leases leases_given_back arbiter takeover arbiter_props",
    ),
    "envelope": ("twin/site/envelope", "envelope profile"),
    "takeover": ("twin/daemon/{leader,leadership}", "leader leadership target_handover authority_book"),
    "agent": (
        f"{AGENT}/{{leases,contingency}}",
        "agent_leases agent_contingency agent_power agent_overheating",
    ),
    "thermal_guard": ("policies/thermal_guard/*", "thermal_guard thermal_plan thermal_rescue"),
    "power_capping": (  # explain.py and savings.py hold sentences and accounts, not caps
        "policies/power_capping/{allocation,budgets,external_limits,headroom,held_caps,power_cap,power_guard,"
        "rack_fit,release,shares,unreported,unpowered}",
        "power_allocation power_budgets power_cap power_cap_odd power_cap_outside power_coincidence"
        " power_first_start power_fit power_guard power_lost power_nodes power_outside power_shares"
        " power_unpowered power_headroom power_held_caps power_planned power_unreported"
        " power_cap_claims api_power",
    ),
    "leak_guard": ("policies/leak_guard/{detectors,evidence,policy,switches}", "leak_guard"),
    "withdrawal_limits": ("policies/node_replacement/{circuit_breaker,limits}", "replacement_limits"),
    "replacement": (  # costs and sentences are others' matter
        "policies/node_replacement/{ownership,phases,transitions}",
        "replacement_leaving replacement_owner replacement_people replacement_phases replacement_policy"
        " replacement_return",
    ),
    "checkpoint_interval": ("policies/checkpointing/{plan,single_tier}", "checkpoint_plan checkpoint_time"),
    "checkpoint": (
        "policies/checkpointing/{calendar,early_save,policy,stagger}",
        "checkpoint_ahead checkpoint_contention checkpoint_policy checkpoint_stagger checkpoint_storage"
        " checkpoint_traffic",
    ),
    "cooling_setpoint": (
        "policies/cooling_setpoint/{groups,loop_state,margins,obstacles,plan,policy,pressure,sections}",
        "cooling_margins cooling_obstacles cooling_sections cooling_setpoint",
    ),
    "diagnosis": ("twin/diagnosis/{isolation,reconciliation}", "reconciliation diagnosis verdicts"),
}


def prepare(area: str, folder: Path) -> None:
    """A folder in which mutmut finds the code, the tests and its settings.

    The agent is a package of its root: mutmut names a mutant after its file and looks for it by its module.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (*CODE, "tests", *ALSO):
        (folder / name).symlink_to(ROOT / ("deploy/agent" if name == AGENT else ".") / name)
    code, names = AREAS[area]
    head, _, rest = code.partition("{")
    settings = {
        "source_paths": CODE,
        "only_mutate": [f"{head}{name}.py" for name in rest.removesuffix("}").split(",")],
        "also_copy": ALSO,
        "pytest_add_cli_args": ("-p", "no:cacheprovider", "-q", "-m", "not storm and not evaluation"),
        "pytest_add_cli_args_test_selection": [
            f"tests/{'property' if name.endswith('_props') else 'unit'}/test_{name}.py"
            for name in names.split()
        ],
    }
    named = [*settings["only_mutate"], *settings["pytest_add_cli_args_test_selection"]]
    if missing := [name for name in named if not [*folder.glob(name)]]:
        sys.exit(f"{area}: no such file: {', '.join(missing)}; remedy: correct AREAS")
    lines = [f"{key} = {[*values]}\n".replace("'", '"') for key, values in settings.items()]
    lines.append("track_dependencies = false\nuse_git_change_detection = false\n")
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{''.join(lines)}")


def mutmut(folder: Path, *arguments: str) -> str:
    """The output of a command of mutmut; with CI set, hypothesis draws the same examples each time."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CI": "true"}
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def states(folder: Path) -> dict[str, str]:
    """The state of every mutant, by its name."""
    lines = mutmut(folder, "results", "--all", "true").splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if "__mutmut_" in line)


def change(folder: Path, mutant: str) -> tuple[str, str, str]:
    """(function, lines taken out, lines put in) of a mutant; its number changes with the code around it."""
    function = re.sub(r"x_?ǁ?(\w+?)(ǁ\w+)?__mutmut_\d+$", r"\1\2", mutant).replace("ǁ", ".")
    diff = [line for line in mutmut(folder, "show", mutant).splitlines() if re.match(r"[-+](?![-+])", line)]
    out, new = (" ".join(line[1:].strip() for line in diff if line[0] == sign) for sign in "-+")
    return function, out, new


def sample(area: str, count: int, seed: int) -> dict[str, str]:
    """The state of each mutant drawn. The first run names none that exists: it makes them and times tests."""
    folder = WORK / area
    prepare(area, folder)
    made = mutmut(folder, "run", "--max-children", "1", "none")
    names = sorted(states(folder))
    if "nothing matches" not in made or not names:
        sys.exit(f"{area}: expected mutants, got\n{made[-4000:]}")
    drawn = random.Random(f"{area} {seed}").sample(names, min(count, len(names)))
    done = mutmut(folder, "run", "--max-children", "1", *drawn)
    after = states(folder)
    if any(after[name] == "not checked" for name in drawn):
        sys.exit(f"{area}: expected that all mutants run, got\n{done[-4000:]}")
    return {name: after[name] for name in drawn}


def main() -> None:
    """Print each survivor that nobody has judged, then the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants")
    parser.add_argument("areas", nargs="*", default=list(AREAS), help=f"of {', '.join(AREAS)}")
    parser.add_argument("--count", type=int, default=60, help="mutants drawn per area")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if importlib.util.find_spec("mutmut") is None:
        parser.error("expected mutmut; remedy: pip install mutmut")
    judged = {tuple(line.split("\t")[:2]) for line in JUDGED.read_text().splitlines()}
    rows = [
        "| Area | Sampled | Killed | Equivalent or text | Survivors | Score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for area in given.areas:
        drawn = sample(area, given.count, given.seed)
        left = [change(WORK / area, name) for name, state in drawn.items() if state not in NOTICED]
        real = [one for one in left if (one[0], one[2]) not in judged]
        for function, out, new in real:
            print(f"- {out}\n{function}\t{new}\n")
        killed, harmless = len(drawn) - len(left), len(left) - len(real)
        score = killed / max(1, len(drawn) - harmless)
        rows.append(f"| {area} | {len(drawn)} | {killed} | {harmless} | {len(real)} | {score:.0%} |")
        print(rows[-1], "\n", flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
