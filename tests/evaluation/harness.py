"""Harness: parts of an evaluation in processes of their own, and the tables that show their figures.

A part is a module that reads its task from the command line and writes its figures as JSON. The process pool
for many independent runs is `twin.run.Pool`.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from twin.catalogue import F64, ConfigError, clean

if TYPE_CHECKING:  # a measured process loads no more than it has to
    from rich.console import Console
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
    """The figures that `module` measures of a task, each under `prefix`; NaN where there is none. Raises as
    `run_python`."""
    output = run_python(["-m", module, msgspec.json.encode(task).decode()])
    found = msgspec.json.decode(output, type=dict[str, float | int | str | None])  # JSON has no NaN
    return {f"{prefix}{key}": math.nan if value is None else value for key, value in found.items()}


def answer_parent(
    kind: type[T], measured: Callable[[T], Mapping[str, float | int | str]], *, pinned: bool = True
) -> None:
    """Read a task from the command line, write its figures; `pinned`: on one core where the system allows."""
    task = msgspec.json.decode(sys.argv[1], type=kind)
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.stdout.buffer.write(msgspec.json.encode(dict(measured(task))) + b"\n")


def timed_ms(work: Callable[[], object], rounds: int) -> tuple[F64, F64]:
    """(wall, processor) milliseconds of every round; one before them is not counted."""
    wall, cpu = np.empty(rounds), np.empty(rounds)
    work()
    for i in range(rounds):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        work()
        wall[i], cpu[i] = time.perf_counter() - begun, time.process_time() - begun_cpu
    return 1e3 * wall, 1e3 * cpu


def percentiles(key: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The figures `key`_p50, _p99 and _max."""
    middle, high = np.percentile(values, (50, 99)).tolist()
    return {f"{key}_p50": middle, f"{key}_p99": high, f"{key}_max": float(np.max(values))}


def part_of(found: Figures, prefixes: Sequence[str], key: str) -> Figures:
    """The figures under the first prefix that has `key`, without it; none where no prefix does."""
    for prefix in prefixes:
        if f"{prefix}{key}" in found:
            return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
    return {}


def number_in(option: str, value: float, low: float, high: float) -> float:
    """An argument within its bounds. Raises ConfigError."""
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{option} {value:g}: expected {low:g} to {high:g}")
    return value


def chosen(option: str, text: str | None, known: Mapping[str, T], default: Iterable[str]) -> list[T]:
    """The choices that an argument lists, each once. Raises ConfigError for an unknown one."""
    words = list(default) if text is None else [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in known]
    if wrong or not words:
        raise ConfigError(f"{option} {clean(', '.join(wrong), 100)}: expected some of {', '.join(known)}")
    return [known[word] for word in dict.fromkeys(words)]


def print_result(
    result: dict[str, Any], begun: float, args: argparse.Namespace, out: Console,
    show: Callable[[dict[str, Any], Console], None],
) -> int:  # fmt: skip
    """One JSON object with --json, else tables; `begun` is the instant of `time.monotonic` at the begin."""
    from twin.cli import write_json  # a measured process loads no more than it has to

    result["wall_s"] = round(time.monotonic() - begun, 3)
    if args.json:
        write_json(result, out)
    else:
        show(result, out)
    return 0


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
    from rich.table import Table

    out = Table(title=title)
    for i, head in enumerate(heads):
        out.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        out.add_row(*row)
    return out
