"""Results: runs the suites and writes their output into RESULTS.md, with date, commit, machine and command.

Each section of RESULTS.md ends with the output of its last run between two marks. A run replaces what stands
between the marks of its section and leaves the rest, so figures that were taken over by hand stay.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.evaluation.bench.bench import machine
from twin.catalogue import ConfigError, duration

PAGE = Path(__file__).with_name("RESULTS.md")
RECORDINGS = Path(os.environ.get("RACKTWIN_TRACES", "traces"))
COLUMNS = "130"  # of the tables
EVALUATION, PRODUCT = ("-m", "tests.evaluation"), ("-m", "twin")
HELIOS, FAULTS, SWEEPS = "gpu-demand-helios-earth", "gpu-server-faults", "gpu-power-limit-sweeps-zeus"
FAULT_LOG = ("--events", f"{{recordings}}/{FAULTS}/fault_trace_to_day232.json", "--nodes", "400")


@dataclass(frozen=True)
class Suite:
    """One section: the command, and the recordings that it needs."""

    name: str
    command: tuple[str, ...]
    recordings: tuple[str, ...] = ()

    def words(self, recordings: Path) -> list[str]:
        return [word.replace("{recordings}", str(recordings)) for word in self.command]

    def missing(self, recordings: Path) -> list[str]:
        return [name for name in self.recordings if not (recordings / name).is_dir()]


SUITES = (
    Suite(
        "forecasts",
        (*EVALUATION, "forecasts", "{recordings}", "--jobs", "2"),
        (HELIOS, "gpu-server-hourly-biohpc", "llm-requests-azure-conv", "grid-hourly"),
    ),
    Suite("quiet", (*EVALUATION, "quiet", "--draw", "held_back")),
    Suite("cooling", (*EVALUATION, "cooling", "--draw", "held_back")),
    Suite("failures", (*PRODUCT, "backtest", "failures", *FAULT_LOG, "--from", "120"), (FAULTS,)),
    Suite(
        "health",
        (
            *EVALUATION,
            "health",
            "--nodes",
            "756",
            "--gpus-per-node",
            "2",
            "--days",
            "30",
            "--train-days",
            "7",
            "--first-seed",
            "200",
            "--strength",
            "1",
        ),
    ),
    Suite(
        "replacement",
        (
            *EVALUATION,
            "replacement",
            "--suite",
            "simulated",
            "--seeds",
            "20",
            "--first-seed",
            "120",
            "--jobs",
            "2",
        ),
    ),
    Suite("replacement-recorded", (*EVALUATION, "replacement", *FAULT_LOG, "--from", "120"), (FAULTS,)),
    Suite(
        "power-week",
        (
            *EVALUATION,
            "power",
            "--suite",
            "week",
            "--site",
            "b",
            "--seeds",
            "20",
            "--events",
            f"{{recordings}}/{HELIOS}",
            "--jobs",
            "2",
        ),
        (HELIOS,),
    ),
    Suite(
        "power-response",
        (*EVALUATION, "power", "--suite", "response", "--events", f"{{recordings}}/{HELIOS}"),
        (HELIOS,),
    ),
    Suite(
        "power-carbon",
        (*EVALUATION, "power", "--suite", "carbon", "--events", f"{{recordings}}/{HELIOS}"),
        (HELIOS, "grid-hourly"),
    ),
    Suite(
        "power-curves",
        (*PRODUCT, "backtest", "power-curves", "--sweeps", f"{{recordings}}/{SWEEPS}"),
        (SWEEPS,),
    ),
    Suite("checkpoint", (*EVALUATION, "checkpoint")),
    Suite(
        "checkpoint-recorded",
        (*PRODUCT, "backtest", "checkpoint", *FAULT_LOG, "--save", "60s", "--restart", "600s"),
        (FAULTS,),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recordings, the suites to run, the page to write."""
    parser.add_argument(
        "--recordings", type=Path, default=RECORDINGS, metavar="DIR", help="the folder of the recordings"
    )
    names = ", ".join(suite.name for suite in SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {names} (default: all; takes hours)")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page to write")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Run the suites one after another; the page is written after each. 1 if one of them fails."""
    names = {suite.name: suite for suite in SUITES}
    chosen = args.suites or list(names)
    if unknown := [name for name in chosen if name not in names]:
        raise ConfigError(f"suite {', '.join(unknown)}: expected some of {', '.join(names)}")
    failed = 0
    for name in chosen:
        suite = names[name]
        if missing := suite.missing(args.recordings):
            err.print(f"{name}: left out: no {', '.join(missing)} in {args.recordings}", markup=False)
            continue
        err.print(f"{name}: {' '.join(suite.words(Path('.')))}", markup=False)
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, *suite.words(args.recordings)],
            env={**os.environ, "COLUMNS": COLUMNS},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            err.print(f"{name}: ended with {done.returncode}", markup=False)
            failed += 1
            continue
        text = block(suite, done.stdout, time.monotonic() - begun)
        args.page.write_text(placed(args.page.read_text(encoding="utf-8"), name, text), encoding="utf-8")
        out.print(f"{name}: written to {args.page}", markup=False)
    return 1 if failed else 0


def block(suite: Suite, output: str, wall_s: float) -> str:
    """The output of one run with its date, commit, machine and command. Tables of Markdown stay tables."""
    where = machine()
    words = ["python", *suite.words(Path("RECORDINGS"))]
    head = (
        f"Run on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}, commit "
        f"{str(where['git_commit'])[:12]}, {where['machine.cores']} cores of {where['machine.cpu']}, Python "
        f"{where['machine.python']}, NumPy {where['machine.numpy']}, {duration(wall_s)}:"
    )
    body = output.rstrip()
    if not any(line.startswith("| ---") for line in body.splitlines()):
        body = "\n".join(["```text", *(line.rstrip() for line in body.splitlines()), "```"])
    return "\n\n".join([head, f"    {' '.join(words)}", body])


def placed(page: str, name: str, text: str) -> str:
    """The page with this text between the marks of a section. Raises ConfigError without such marks."""
    marks = re.compile(rf"(<!-- run {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    if not marks.search(page):
        raise ConfigError(f"the page has no marks `<!-- run {name} -->` and `<!-- end {name} -->`")
    return marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, count=1)
