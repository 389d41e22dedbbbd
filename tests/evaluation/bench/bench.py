"""The benchmark, `make bench`: what a second of a site costs at 576, 10k and 100k GPUs.

Each size is run, recorded and replayed in processes of its own, on one core and with one thread; then the
daemon is measured live (`bench_live`), the twin against simulated plants (`bench_twin`), what forecasts cost
(`bench_forecast`), health in a storm of faults (`bench_health`), and the control room (`bench_page`). What
comes out is tables, and a flat JSON whose keys carry their units. Goals are judged where their size was
measured.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.evaluation.bench import checkpoint, compare, forecast, health, live, page, power, replacement, twin
from tests.evaluation.bench.load import ASSUMPTIONS, GPUS_PER_RACK
from tests.evaluation.bench.run import LOOP, PARTS, SPARSE_PERIOD_S, TickLoad
from tests.evaluation.harness import Figures, ask_child, load_average, table

SIZES = "576,10000,100000"
SPARSE_TICKS = 120
SPARSE_SHARE = 1.0 / SPARSE_PERIOD_S
RUN = "tests.evaluation.bench.run"
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (
    ("n100k.take_trace_tick_journal_ms_p50", False, 50.0),
    ("n100k.take_trace_tick_journal_ms_p99", False, 100.0),
    ("n100k.slowest_part_ms_p50", False, 25.0),
    ("n100k.decode_stage_take_apply_updates_per_s", True, 2e6),
    ("n100k.replay_x_real_time", True, 20.0),
    ("n100k.replay_sparse_x_real_time", True, 50.0),
    ("n10k.replay_x_real_time", True, 150.0),
    ("n100k.peak_rss_bytes", False, 1.5e9),
    ("n100k.trace_bytes_per_tick_mean", False, 1e6),
    *live.GOALS,
    *twin.GOALS,
    *forecast.GOALS,
    *health.GOALS,
    *checkpoint.GOALS,
    *replacement.GOALS,
    *power.GOALS,
    *page.GOALS,
)
# Parts that are measured apart from the sizes, in this order.
PARTS_APART: dict[str, Callable[[bool, Path, Callable[[str], None]], Figures]] = {
    "twin": twin.measure_twin,
    "forecast": forecast.measure_forecast,
    "health": health.measure_health,
    "checkpoint": checkpoint.measure_checkpoint,
    "replacement": replacement.measure_replacement,
    "power": power.measure_power,
    "page": page.measure_page,
}
# Columns of the table: (title, key, factor); a key ending in `_ms` is shown as p50 / p99 / max.
ROWS: tuple[tuple[str, str, float], ...] = (
    *((f"{part}, ms", f"{part}_ms", 1.0) for part in PARTS),
    ("take + trace + tick + journal, ms", "take_trace_tick_journal_ms", 1.0),
    ("  the same in processor time, ms", "take_trace_tick_journal_cpu_ms", 1.0),
    ("fsync of the journal, ms (apart)", "journal_fsync_ms", 1.0),
    ("fsync of the trace, ms (apart)", "trace_fsync_ms", 1.0),
    ("decode, M updates/s", "decode_updates_per_s", 1e-6),
    ("stage, M updates/s", "stage_updates_per_s", 1e-6),
    ("take, M updates/s", "take_updates_per_s", 1e-6),
    ("tick, M updates/s", "tick_updates_per_s", 1e-6),
    ("decode + stage + take + apply, M updates/s", "decode_stage_take_apply_updates_per_s", 1e-6),
    ("  times a Python dict", "decode_stage_take_apply_per_python_dict", 1.0),
    ("single readings into the Inbox, M updates/s", "single_reading_updates_per_s", 1e-6),
    ("loop / NumPy quantising the same cells", "take_trace_tick_journal_per_numpy_quantise", 1.0),
    ("replay, x real time", "replay_x_real_time", 1.0),
    ("  the same in processor time", "replay_x_real_time_cpu", 1.0),
    ("replay, 10 % of the racks speak, x real time", "replay_sparse_x_real_time", 1.0),
    ("  the same in processor time", "replay_sparse_x_real_time_cpu", 1.0),
    ("trace, MB a tick", "trace_bytes_per_tick_mean", 1e-6),
    ("journal, kB a tick", "journal_bytes_per_tick_p50", 1e-3),
    ("new commands a tick", "commands_per_tick_p50", 1.0),
    ("leases standing", "leases_p50", 1.0),
    ("peak memory, MB", "peak_rss_bytes", 1e-6),
    ("garbage collection, ms a tick", "gc_ms_per_tick", 1.0),
    ("  its longest pause, ms", "gc_pause_ms_max", 1.0),
)


def label_of(gpus: int) -> str:
    """Return the prefix of the keys of a size: n576, n10k."""
    return f"n{gpus // 1000}k" if gpus >= 1000 and gpus % 1000 == 0 else f"n{gpus}"


def measure_size(gpus: int, ticks: int, warmup: int, scratch: Path, say: Callable[[str], None]) -> Figures:
    """Everything about one size; the recordings are thrown away."""
    label, racks = label_of(gpus), max(1, round(gpus / GPUS_PER_RACK))
    out: Figures = {f"{label}.load_average_before": load_average()}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=scratch) as folder:
        say(f"{label}: {racks} racks, {warmup} + {ticks} ticks")
        whole = TickLoad("live", racks, ticks, warmup, f"{folder}/whole")
        found = ask_child(RUN, whole)
        found["slowest_part_ms_p50"] = max(found[f"{part}_ms_p50"] for part in LOOP)
        found["slowest_part_ms_p99"] = max(found[f"{part}_ms_p99"] for part in LOOP)
        out |= {f"{label}.{k}": v for k, v in found.items()}
        say(f"{label}: replay")
        again = msgspec.structs.replace(whole, mode="replay")
        out |= {f"{label}.replay_{k}": v for k, v in ask_child(RUN, again).items()}
        say(f"{label}: the same where a tenth of the racks speaks in each tick")
        sparse = TickLoad(
            "live", racks, min(ticks, SPARSE_TICKS), warmup, f"{folder}/sparse", SPARSE_SHARE, False
        )
        found = ask_child(RUN, sparse)
        out[f"{label}.sparse_trace_bytes_per_tick_mean"] = found["trace_bytes_per_tick_mean"]
        out[f"{label}.sparse_take_trace_tick_journal_ms_p50"] = found["take_trace_tick_journal_ms_p50"]
        again = msgspec.structs.replace(sparse, mode="replay")
        out |= {f"{label}.replay_sparse_{k}": v for k, v in ask_child(RUN, again).items()}
    out[f"{label}.load_average_after"] = load_average()
    return out


def machine() -> Figures:
    """Return the machine and the commit of a measurement."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        command[3:] = ["status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        commit += "+changes" if changed else ""
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {"git_commit": commit, "machine.cpu": model, "machine.cores": os.cpu_count() or 1,
            "machine.system": platform.platform(), "machine.python": platform.python_version(),
            "machine.numpy": np.__version__}  # fmt: skip


def judge(found: Figures) -> list[tuple[str, float, str, bool]]:
    """(key, value, bound in words, met) of every goal whose size was measured."""
    out = []
    for key, more, bound in GOALS:
        value = found.get(key)
        if isinstance(value, int | float):
            met = value >= bound if more else value <= bound
            out.append((key, float(value), f"{'>=' if more else '<='} {bound:g}", met))
    return out


def _cell(found: Figures, label: str, key: str, factor: float) -> str:
    ends = ("_p50", "_p99", "_max") if key.endswith("_ms") else ("",)
    numbers = [found.get(f"{label}.{key}{end}") for end in ends]
    return " / ".join(_short(n * factor) if isinstance(n, int | float) else "-" for n in numbers)


def _short(number: float) -> str:
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def show(found: Figures, labels: list[str], out: Console) -> None:
    """The table, the goals and what they rest on."""
    if labels:
        heads = ["", *(f"{found[f'{label}.gpus']:,} GPUs" for label in labels)]
        rows = [
            (title, *(_cell(found, label, key, factor) for label in labels)) for title, key, factor in ROWS
        ]
        out.print(table("racktwin: one second of a site on one core; times as p50 / p99 / max", heads, rows))
    live.show_live(found, out)
    for part in (twin, forecast, health, checkpoint, replacement, power, page):
        part.show(found, out)
    goals = judge(found)
    if goals:
        verdicts = Table(title="Goals")
        for heading in ("", "measured", "goal", ""):
            verdicts.add_column(heading, no_wrap=True)
        for key, value, bound, met in goals:
            measured = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
            verdicts.add_row(key, measured, bound, "met" if met else "MISSED")
        out.print(verdicts)
    note = (
        "Sizes: decoded from one msgpack message per rack; the MQTT client is apart. One thread, one core. "
        "A replay compares every journal line and the final state."
    )
    if labels:
        out.print(f"{ASSUMPTIONS}\n{note}", markup=False, highlight=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, ticks and parts of the benchmark."""
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="where the figures go")
    parser.add_argument("--sizes", help=f"numbers of GPUs, default {SIZES}")
    parser.add_argument("--ticks", type=int, help="ticks after the warm-up, default 600")
    parser.add_argument("--warmup", type=int, help="ticks before, default 20")
    parser.add_argument(
        "--quick", action="store_true", help="two small sizes, few ticks: does it run at all?"
    )
    parser.add_argument(
        "--only",
        choices=("core", "live", *PARTS_APART),
        help="sizes, daemon, plant and diagnosis, forecasts, faults, checkpoints, replacement, power, page",
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="run it there too, in turns, and show the ratios"
    )
    parser.add_argument("--rounds", type=int, default=5, help="with --against: runs of each, default 5")


def _run_against(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Both checkouts in turns; all runs and the medians go to the file."""
    if args.rounds < 1:
        args.refuse(f"--rounds: expected 1 or more, got {args.rounds}")
    arguments = ["--quick"] if args.quick else []
    for name in ("sizes", "ticks", "warmup", "only"):
        value = getattr(args, name)
        arguments += [] if value is None else [f"--{name}", str(value)]
    found, runs = compare.compare(args.against, arguments, args.rounds, args.out.parent.resolve(), err.print)
    tree = runs | {"compared": [c._asdict() | {"ratio": c.ratio} for c in found]}
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=1) + b"\n")
    heads = ("medians", "before", "after", "after / before", "spread", "beyond the spread")
    out = out if out.is_terminal else Console(width=130)
    out.print(
        table(f"{args.against} and this checkout, {args.rounds} runs each", heads, compare.rows_of(found))
    )
    out.print(f"written to {args.out}", markup=False)
    return 0


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Measure, write, show."""
    sizes: str = args.sizes or ("72,576" if args.quick else SIZES)
    ticks: int = (12 if args.quick else 600) if args.ticks is None else args.ticks
    warmup: int = (3 if args.quick else 20) if args.warmup is None else args.warmup
    try:
        gpus = [int(x) for x in sizes.split(",")]
    except ValueError:
        args.refuse(f"--sizes: expected numbers such as {SIZES}, got {sizes!r}")
    if ticks < 1 or warmup < 0 or not all(x >= GPUS_PER_RACK for x in gpus):
        args.refuse(f"expected at least one tick, no negative warm-up, {GPUS_PER_RACK} GPUs or more")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.against is not None:
        return _run_against(args, out, err)
    found = machine()
    scratch, gpus = args.out.parent.resolve(), gpus if args.only in (None, "core") else []
    for size in gpus:
        found |= measure_size(size, ticks, warmup, scratch, err.print)
    if args.only in (None, "live"):
        found |= {"live.load_average_before": load_average()}
        found |= live.measure_live(args.quick, scratch, err.print)
        found |= {"live.load_average_after": load_average()}
    for name, measure in PARTS_APART.items():
        if args.only in (None, name):
            found |= measure(args.quick, scratch, err.print)
    found |= {f"goal.{key}": "met" if met else "missed" for key, _, _, met in judge(found)}
    found |= {"assumptions": ASSUMPTIONS, "threads": "1; pinned to one core where the system allows it"}
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    out = out if out.is_terminal else Console(width=130)
    show(found, [label_of(size) for size in gpus], out)
    out.print(f"written to {args.out}", markup=False)
    return 0
