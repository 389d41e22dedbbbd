"""Harness: parts of an evaluation in processes of their own, and the tables that show their figures.

A part is a module that reads its task from the command line and writes its figures as JSON. The process pool
for many independent runs is `twin.run.Pool`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from rich.table import Table

T = TypeVar("T")
Figures = dict[str, float | int | str]

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
PERCENTILES = ("p50", "p99", "max")


def run_python(arguments: Sequence[str]) -> bytes:
    """Standard output of a Python process with one thread. Raises CalledProcessError if it fails."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, check=True).stdout


def ask_child(module: str, task: msgspec.Struct, prefix: str = "") -> Figures:
    """The figures that `module` measures of a task, each under `prefix`. Raises as `run_python`."""
    output = run_python(["-m", module, msgspec.json.encode(task).decode()])
    found = msgspec.json.decode(output, type=dict[str, float | int | str])
    return {f"{prefix}{key}": value for key, value in found.items()}


def answer_parent(
    kind: type[T], measured: Callable[[T], Mapping[str, float | int | str]], *, pinned: bool = True
) -> None:
    """Read a task from the command line, write its figures; `pinned`: on one core where the system allows."""
    task = msgspec.json.decode(sys.argv[1], type=kind)
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.stdout.buffer.write(msgspec.json.encode(dict(measured(task))) + b"\n")


def load_average() -> float:
    """Load of the machine in the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def short(value: float | int | str | None, factor: float = 1.0) -> str:
    """Three digits, or all of a large number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    number = value * factor
    return f"{number:,.0f}" if abs(number) >= 100 or number == round(number) else f"{number:.3g}"


def cell(figures: Mapping[str, float | int | str], key: str, factor: float = 1.0) -> str:
    """A figure, or its percentiles side by side; nothing without a key."""
    if not key:
        return ""
    if key in figures:
        return short(figures[key], factor)
    return " / ".join(short(figures.get(f"{key}_{end}"), factor) for end in PERCENTILES)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of titles and figures."""
    out = Table(title=title)
    for i, head in enumerate(heads):
        out.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    return out
