"""The part of the benchmark that asks what forecasts cost: fits, rows of 2,000 series, loop, start.

Runs `bench_forecast_run` in processes of its own, with one thread each, and takes its figures over under
`forecast.`; quick ones, of small sizes, under `forecast.quick.`, so that no goal is judged by them.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from tests.evaluation.bench import plan
from tests.evaluation.bench.forecast_run import HORIZONS, ForecastLoad
from tests.evaluation.harness import Figures, ask_child, cell, load_average, part_of, run_python, short
from twin.simulation import HOST

SERIES, TWO_WEEKS = 2000, 20_160
# (key, whether more is better, bound), from the requirements of the project; that a fit leaves the loop as it
# was is read as: 99 of 100 beats are no later by more than a beat, and to ask for one takes 20 ms at most
GOALS: tuple[tuple[str, bool, float], ...] = (
    ("forecast.fit_two_weeks_s", False, 5.0),
    (f"forecast.predict_{SERIES}_series_tick_cpu_ms_p50", False, 50.0),
    ("forecast.loop_lag_added_ms_p99", False, 10.0),
    ("forecast.submit_ms_p50", False, 20.0),
    ("forecast.start.statistics_modules", False, 0.0),
)
TASKS = (
    ForecastLoad("fit", 1, TWO_WEEKS, 3),
    ForecastLoad("predict", SERIES, rounds=100, warmup=120),
    ForecastLoad("loop", SERIES, rounds=100),
    ForecastLoad("backtest", 1, TWO_WEEKS),
)
QUICK = (
    ForecastLoad("fit", 1, 1440),
    ForecastLoad("predict", 12, rounds=9, warmup=110),
    ForecastLoad("loop", 4, rounds=10),
)
STATISTICS = ("sklearn", "statsmodels", "pandas", "scipy", "torch")
# Imports of the daemon's process, the models last but for what runs them.
_START = f"""
import json, sys, time
import twin.contracts.contracts, twin.engine.engine, twin.engine.snapshot
begun, cpu = time.perf_counter(), time.process_time()
import models
out = {{"models_import_s": time.perf_counter() - begun, "models_import_cpu_s": time.process_time() - cpu}}
for make in models.REGISTRY.values():
    make()
import twin.daemon.daemon
out["statistics"] = sorted(set({STATISTICS!r}) & set(sys.modules))
json.dump(out, sys.stdout)
"""
# (title, key, factor); a key ending in `_ms` is shown as p50 / p99 / max
ROWS: tuple[tuple[str, str, float], ...] = (
    ("loop's lag beside a fit in the worker, ms", "loop_lag_ms", 1.0),
    ("  without one, ms", "loop_lag_without_fit_ms", 1.0),
    ("  while rows are handed over, ms", "handing_over_lag_ms", 1.0),
    ("to ask for a fit, ms", "submit_ms", 1.0),
    ("memory of the model, MB", "memory_bytes", 1e-6),
    ("its part of a snapshot, MB", "snapshot_bytes", 1e-6),
    ("  copied on the loop in, ms", "snapshot_copy_ms", 1.0),
    ("  packed and compressed beside it in, s", "snapshot_encode_s", 1.0),
    ("fitted parameters taken over in, ms", "load_ms", 1.0),
    ("  the same in processor time, ms", "load_cpu_ms", 1.0),
    ("racktwin daemon check, s", "start_s", 1.0),
    ("  of these in importing models, s", "start.models_import_s", 1.0),
    ("libraries of statistics imported at start", "start.statistics_modules", 1.0),
    ("backtest of two weeks of minutes, s", "backtest_s", 1.0),
    ("  the same in processor time, s", "backtest_cpu_s", 1.0),
)


def measure_forecast(quick: bool, scratch: Path, say: Callable[[str], None]) -> Figures:
    """Figures of all parts. Raises CalledProcessError if one fails."""
    found: Figures = {"load_average_before": load_average()}
    for task in QUICK if quick else TASKS:
        say(f"forecast: {task.mode}, {task.series} series")
        found |= ask_child("tests.evaluation.bench.forecast_run", task)
    say("forecast: start")
    found |= _start(scratch, 1 if quick else 3)
    found["loop_lag_added_ms_p99"] = max(
        0.0, float(found["loop_lag_ms_p99"]) - float(found["loop_lag_without_fit_ms_p99"])
    )
    found["load_average_after"] = load_average()
    prefix = "forecast.quick." if quick else "forecast."
    return {f"{prefix}{key}": value for key, value in found.items()}


def _start(scratch: Path, rounds: int) -> Figures:
    """Measure a start: its imports, and the quickest of several checks of a configuration."""
    imported = msgspec.json.decode(run_python(["-c", _START]))
    statistics = imported.pop("statistics")
    out: Figures = {f"start.{key}": value for key, value in imported.items()}
    out["start.statistics_modules"] = len(statistics)
    out["start.statistics_names"] = ", ".join(statistics) or "none"
    walls, cpus = [], []
    with tempfile.TemporaryDirectory(prefix="bench-forecast-", dir=scratch) as name:
        config = Path(name) / "racktwin.yaml"
        (Path(name) / "site.yaml").write_text(yaml.safe_dump(plan.site_tree(8)), encoding="utf-8")
        settings = {"site": "site.yaml", "broker": {"host": HOST, "client_id": "bench"}, "simulated": True}
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        for _ in range(rounds):
            wall, cpu = time.perf_counter(), _cpu_s()
            run_python(["-m", "twin", "daemon", "check", "--config", str(config)])
            walls.append(time.perf_counter() - wall)
            cpus.append(_cpu_s() - cpu)
    return out | {"start_s": min(walls), "start_cpu_s": min(cpus)}


def _cpu_s() -> float:
    """Of all children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def show(found: Figures, out: Console) -> None:
    """The tables of this part."""
    mine = part_of(found, ("forecast.quick.", "forecast."), "fit_two_weeks_s")
    if not mine:
        return
    rows = short(mine.get("fit.rows"), 1.0)
    fits = Table(
        title=f"Fits: {rows} minutes of one series, horizons of {', '.join(map(str, HORIZONS))} rows"
    )
    for heading in ("", "s", "s of processor time"):
        fits.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    experts = [
        key.split(".")[1][:-2] for key in mine if key.startswith("fit.") and f"{key[:-2]}_cpu_s" in mine
    ]
    for title, key in (
        *((name, f"fit.{name}") for name in experts),
        ("all", "fit_two_weeks"),
        (f"both grids of {mine.get('fit_many_series')} series", "fit_many"),
    ):
        fits.add_row(title, short(mine.get(f"{key}_s"), 1.0), short(mine.get(f"{key}_cpu_s"), 1.0))
    fits.add_row("once in a process: imports", short(mine.get("fit_import_s"), 1.0), "")
    out.print(fits)
    out.print(_row_table(mine))
    rest = Table(title="Around them")
    for heading in ("", "p50 / p99 / max"):
        rest.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for title, key, factor in ROWS:
        if key in mine or f"{key}_p50" in mine:
            rest.add_row(title, cell(mine, key, factor))
    out.print(rest)


def _row_table(mine: Figures) -> Table:
    """Tabulate the cost of a row of all series, by part and grid."""
    n = mine.get("fit_many_series")
    table = Table(title=f"A row of {n} series; ms as p50 / p99 / max, and in processor time")
    for heading in ("", "minutes", "processor", "quarters of an hour", "processor"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    parts = [
        key.removeprefix("fine.").removesuffix("_cpu_ms_p50")
        for key in mine
        if key.startswith("fine.") and key.endswith("_cpu_ms_p50")
    ]
    for part in parts:
        cells = []
        for grid in ("fine", "coarse"):
            cells += [
                cell(mine, f"{grid}.{part}_ms", 1.0),
                short(mine.get(f"{grid}.{part}_cpu_ms_p50"), 1.0),
            ]
        table.add_row(part.removeprefix("expert."), *cells)
    for title, key in (
        ("both grids", f"predict_{n}_series"),
        ("the last value alone", "predict_last_value"),
        ("boosting's forests, all horizons", "forests"),
        ("  scikit-learn's predict of the same", "sklearn_forests"),
    ):
        table.add_row(title, cell(mine, f"{key}_ms", 1.0), short(mine.get(f"{key}_cpu_ms_p50"), 1.0), "", "")
    table.add_row(
        "both grids / scikit-learn's forests", short(mine.get("predict_per_sklearn"), 1.0), "", "", ""
    )
    return table
