"""Comparison of two checkouts: the same benchmark run by both in turns, and the ratio of the medians.

Each checkout runs with its own environment in its own folder, so that nothing of one loads into the other.
The order turns in each round, so that a machine that warms or slows meets both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.evaluation.harness import Figures, short
from twin.catalogue import ConfigError, TwinError

HERE = Path(__file__).resolve().parents[3]
# Where a checkout keeps its benchmark: (file that is there, arguments of Python)
ENTRIES = (
    ("tests/evaluation/__main__.py", ("-m", "tests.evaluation", "bench")),
    ("twin/app/bench.py", ("-m", "twin.app.bench")),  # until 0.9
)
MORE_IS_BETTER = (
    "_per_s",
    "_per_core_s",
    "x_real_time",
    "x_real_time_cpu",
    "_per_aiomqtt",
    "_per_python_dict",
)
LEFT_OUT = ("_p99", "_max", "load_average_before", "load_average_after")


class Compared(NamedTuple):
    """One figure of both checkouts."""

    key: str
    before: float  # medians
    after: float
    spread_pu: float  # the wider of both ranges, over its median
    verdict: str  # "better" or "worse" where no run of one lies within the runs of the other

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before if self.before else float("inf")


def command_of(checkout: Path) -> list[str]:
    """The command that runs a checkout's benchmark with its own environment. Raises ConfigError."""
    python = Path(sys.executable) if checkout == HERE else checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"{checkout}: no .venv/bin/python; remedy: `make bench ARGS=--quick` there once")
    for file, arguments in ENTRIES:
        if (checkout / file).exists():
            return [str(python), *arguments]
    raise ConfigError(f"{checkout}: expected a checkout with {' or '.join(file for file, _ in ENTRIES)}")


def compare(
    other: Path, arguments: Sequence[str], rounds: int, scratch: Path, say: Callable[[str], None]
) -> tuple[list[Compared], dict[str, list[Figures]]]:
    """The figures that both give, and all runs of both. Raises ConfigError; TwinError for a failed run."""
    checkouts = {"before": other.resolve(), "after": HERE}
    commands = {name: command_of(path) for name, path in checkouts.items()}
    runs: dict[str, list[Figures]] = {"before": [], "after": []}
    out = scratch / "bench-run.json"
    for number in range(rounds):
        for name in ("before", "after") if number % 2 == 0 else ("after", "before"):
            say(f"round {number + 1} of {rounds}: {name}, {checkouts[name]}")
            command = [*commands[name], "--out", str(out), *arguments]
            done = subprocess.run(command, cwd=checkouts[name], stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise TwinError(f"{' '.join(command)} in {checkouts[name]}: exit code {done.returncode}")
            runs[name].append(msgspec.json.decode(out.read_bytes(), type=Figures))
            out.unlink()
    return judged(runs["before"], runs["after"]), runs


def judged(before: Sequence[Figures], after: Sequence[Figures]) -> list[Compared]:
    """Every number that all runs of both give and that is not the same in all of them."""
    out = []
    for key, first in before[0].items():
        if not isinstance(first, int | float) or key.endswith(LEFT_OUT):
            continue
        sides = [[run.get(key) for run in runs] for runs in (before, after)]
        numbers = [[float(x) for x in side if isinstance(x, int | float)] for side in sides]
        old, new = numbers
        if len(old) == len(before) and len(new) == len(after) and len({*old, *new}) > 1:
            out.append(_compared(key, old, new))
    return out


def _compared(key: str, old: list[float], new: list[float]) -> Compared:
    medians = statistics.median(old), statistics.median(new)
    spread_pu = max(
        (max(side) - min(side)) / abs(median) if median else 0.0
        for side, median in zip((old, new), medians, strict=True)
    )
    verdict = ""
    if min(len(old), len(new)) > 1 and (max(new) < min(old) or min(new) > max(old)):
        grew = medians[1] > medians[0]
        verdict = "better" if grew == key.endswith(MORE_IS_BETTER) else "worse"
    return Compared(key, *medians, spread_pu, verdict)


def rows_of(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Cells of the table."""
    return [
        (c.key, short(c.before), short(c.after), f"{c.ratio:.3f}", f"{100 * c.spread_pu:.0f} %", c.verdict)
        for c in found
    ]
