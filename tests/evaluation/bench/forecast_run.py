"""One measurement of the forecasts, in a process of its own: fits, a row of many series, a backtest.

Series are made here, seeded: a daily and a weekly season, noise that remembers, and steps. Part of the
shell: this file may look at the clock, what it measures may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from models.load import (
    DEFAULT_EXPERTS,
    FORECASTERS,
    GRIDS,
    KNOWN,
    Blend,
    ForecastGrid,
    KeptRows,
    Load,
    SeriesPanel,
    schedule,
    stride,
)
from tests.evaluation.bench.load import START_NS
from tests.evaluation.harness import answer_parent, percentiles
from twin.catalogue import F64, ContractError
from twin.engine import encode

SIGNAL = "rack.power_w"
HORIZONS = (1, 5, 15, 60, 360, 1440)  # of the minute series, in rows
DAY_S, STEP_S = 86_400.0, 60.0
FITTED = tuple(name for name in DEFAULT_EXPERTS if FORECASTERS[name].fitted)
Numbers = dict[str, float | int]
Round = dict[str, tuple[float, float]]  # part -> seconds by the wall, and of processor time


class ForecastLoad(msgspec.Struct, frozen=True):
    """Task of a measuring process: `series` at once, `rows` of them (0: as many as the daemon keeps).

    `rounds` are measured, after `warmup` that are not.
    """

    mode: Literal["fit", "predict", "loop", "backtest"]
    series: int
    rows: int = 0
    rounds: int = 1
    warmup: int = 0


def make_values(rows: int, n: int, step_s: float, seed: int = 1) -> F64:
    """Watts of `n` racks [rows, n]: seasons, an autoregression, and a step some twenty times in all."""
    rng = np.random.default_rng(seed)
    day = 2 * np.pi * np.arange(rows)[:, None] * step_s / DAY_S + rng.uniform(0, 2 * np.pi, n)
    steps = np.where(rng.random((rows, n)) < 20 / rows, rng.normal(0, 600, (rows, n)), 0.0)
    values = 60e3 + 3e3 * np.sin(day) + 1e3 * np.sin(day / 7) + 0.5 * np.cumsum(steps, axis=0)
    keep, noise = 0.95 ** (step_s / 60.0), np.zeros(n)
    shocks = rng.normal(0, 300, (rows, n)) * np.sqrt(1 - keep**2)
    for row in range(rows):
        noise = keep * noise + shocks[row]
        values[row] += noise
    return values


class Clocks:
    """Seconds by the wall and of this thread's processor time, of each part of a round."""

    def __init__(self) -> None:
        self.rounds: list[Round] = [{}]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with clocks before and after; a part entered several times in a round adds up."""

        def run(*given: Any, **named: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*given, **named)
            finally:
                before = self.rounds[-1].get(part, (0.0, 0.0))
                spent = time.perf_counter() - wall, time.thread_time() - cpu
                self.rounds[-1][part] = before[0] + spent[0], before[1] + spent[1]

        return run

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Clocks on this very object's method."""
        vars(owner)[name] = self.timed(part, getattr(owner, name))

    def figures(self, key: str, parts: Mapping[str, tuple[str, ...]]) -> Numbers:
        """Of the sum of some parts over the rounds, in milliseconds, under `<key><name>_ms_p50` and so on."""
        out: Numbers = {}
        for name, some in parts.items():
            sums = np.array([[r.get(part, (0.0, 0.0)) for part in some] for r in self.rounds]).sum(axis=1)
            out |= percentiles(f"{key}{name}_ms", 1e3 * sums[:, 0])
            out[f"{key}{name}_cpu_ms_p50"] = float(np.median(1e3 * sums[:, 1]))
        return out


def spent(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call a function. Return its result, seconds by the wall, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    return out, time.perf_counter() - wall, time.process_time() - cpu


def measure_fit(task: ForecastLoad) -> Numbers:
    """Each fitted expert on a minute series, the quickest of some rounds."""
    out: Numbers = {}
    _, out["fit_import_s"], _ = spent(import_statistics)
    panel = SeriesPanel(START_NS, STEP_S, make_values(task.rows, task.series, STEP_S))
    grid = ForecastGrid(STEP_S, tuple(h for h in HORIZONS if h * 4 <= task.rows))
    for name in FITTED:
        expert = FORECASTERS[name](grid)
        each = [spent(partial(expert.fit, panel, 0)) for _ in range(task.rounds)]
        if not each[0][0]:
            raise ContractError(f"{name} learned nothing from {task.rows} rows: its time means nothing")
        out[f"fit.{name}_s"], out[f"fit.{name}_cpu_s"] = min(x[1] for x in each), min(x[2] for x in each)
    out["fit_two_weeks_s"] = sum(out[f"fit.{name}_s"] for name in FITTED)
    out["fit_two_weeks_cpu_s"] = sum(out[f"fit.{name}_cpu_s"] for name in FITTED)
    return out | {"fit.rows": task.rows}


def import_statistics() -> None:
    """Import the modules that experts import in their fits, so that the import is timed apart."""
    import sklearn.ensemble  # noqa: F401
    import statsmodels.regression.linear_model
    import statsmodels.tsa.exponential_smoothing.ets  # noqa: F401


def make_load() -> Load:
    """The daemon's model, for the power of racks alone."""
    return Load((SIGNAL,))


def make_series(load: Load, n: int) -> dict[str, F64]:
    """Rows of each of its grids, as many as it keeps and half as many again."""
    kept = {name: rows for name, _, rows, _ in GRIDS}
    return {
        name: make_values(kept[name] * 3 // 2, n, grid.step_s, seed)
        for seed, (name, grid) in enumerate(load.grids(STEP_S).items())
    }


def make_blends(load: Load, n: int, series: Mapping[str, F64]) -> dict[str, Blend]:
    """Its blends, full of rows; nothing was forecast yet."""
    out = {}
    for name, _, kept, _ in GRIDS:
        grid = load.grids(STEP_S)[name]
        experts = [FORECASTERS[expert](grid) for expert in load.expert_names]
        out[name] = blend = Blend(grid, n, KeptRows(kept, load.zone, KNOWN), experts, schedule.EXPERTS)
        first = START_NS // blend.step_ns
        for row in range(kept):
            blend.append(first + row, series[name][row])
    return out


def memory_of(load: Load, blends: Mapping[str, Blend], n: int) -> dict[str, np.ndarray]:
    """Return the memory of a `Load` with these blends."""
    out = {
        "made": load.made(), "dt_s": np.array([STEP_S, 0.0]), "sizes": np.array([n], np.int64),
        "present": np.full(n, 60e3), "due": np.zeros(0, np.int64),
    }  # fmt: skip
    for name, blend in blends.items():
        out |= {f"{name}/{key}": array for key, array in blend.memory().items()}
        out |= {f"{name}/sum": np.zeros(n), f"{name}/count": np.zeros(n)}
        out[f"{name}/open_row"] = np.array([blend.row + 1], np.int64)
    return out


def measure_predict(task: ForecastLoad) -> Numbers:
    """A row of all series through both grids, with fitted experts, once outcomes are judged."""
    n, load = task.series, make_load()
    series = make_series(load, n)
    blends = make_blends(load, n, series)
    load.restore(memory_of(load, blends, n))
    training = load.training()
    fitted, wall, cpu = spent(lambda: load.fit(training, 0))
    out: Numbers = {"fit_many_s": wall, "fit_many_cpu_s": cpu, "fit_many_series": n}
    _, wall, cpu = spent(lambda: load.load(fitted))
    out |= {"load_ms": 1e3 * wall, "load_cpu_ms": 1e3 * cpu}
    clocks = Clocks()
    for name, blend in blends.items():
        for expert in blend.experts:
            prefix = f"{name}/{expert.name}/"
            expert.load({k.removeprefix(prefix): v for k, v in fitted.items() if k.startswith(prefix)})
            clocks.watch(f"{name}.expert.{expert.name}", expert, "predict")
        for online in blend.online:
            clocks.watch(f"{name}.learn", online, "learn")
            clocks.watch(f"{name}.issue", online, "issue")
        clocks.watch(f"{name}.append", blend, "append")
        clocks.watch(f"{name}.say", blend, "say")
    out["outcomes_judged"] = run_rows(blends, task, series, clocks)
    out |= predict_figures(clocks, load, n) | forests_figures(task)
    out["predict_per_sklearn"] = out[f"predict_{n}_series_cpu_ms_p50"] / out["sklearn_forests_cpu_ms_p50"]
    return out | memory_figures(load, memory_of(load, blends, n))


def run_rows(
    blends: Mapping[str, Blend], task: ForecastLoad, series: Mapping[str, F64], clocks: Clocks
) -> int:
    """Let rows come. Return the outcomes at the longest horizon judged before the first measured row."""
    unknown = {name: np.full((len(b.grid.horizons), b.n), np.nan) for name, b in blends.items()}
    for step in range(task.warmup + task.rounds):
        if step <= task.warmup:
            clocks.rounds = []
        clocks.rounds.append({})
        for name, blend in blends.items():
            row = blend.rows + step
            blend.append(blend.row + 1, series[name][row % len(series[name])])
            blend.say(dict.fromkeys(schedule.EXPERTS, unknown[name]))
    longest = [blend.grid.horizons[-1] for blend in blends.values()]
    return min(max(0, task.warmup - horizon) // stride(horizon) for horizon in longest)


def predict_figures(clocks: Clocks, load: Load, n: int) -> Numbers:
    """Per grid and part, and both grids together: as in a minute that ends a quarter of an hour."""
    names = tuple(load.grids(STEP_S))
    out: Numbers = {}
    for grid in names:
        experts = tuple(f"{grid}.expert.{expert}" for expert in load.expert_names)
        online, whole = (f"{grid}.learn", f"{grid}.issue"), (f"{grid}.append", f"{grid}.say")
        parts: dict[str, tuple[str, ...]] = {e.removeprefix(f"{grid}."): (e,) for e in experts}
        parts |= {"experts": experts, "learn": online[:1], "issue": online[1:], "online": online}
        for each in clocks.rounds:
            each[f"{grid}.rest"] = _less(each, whole, (*experts, *online))
        out |= clocks.figures(f"{grid}.", {**parts, "rest": (f"{grid}.rest",), "all": whole})
    both = tuple(f"{grid}.{part}" for grid in names for part in ("append", "say"))
    last = tuple(f"{grid}.expert.last" for grid in names)
    out |= clocks.figures("", {f"predict_{n}_series": both, "predict_last_value": last})
    # The grids speak in different ticks: what one tick pays.
    for figure in ("cpu_ms_p50", "ms_p50"):
        out[f"predict_{n}_series_tick_{figure}"] = max(out[f"{grid}.all_{figure}"] for grid in names)
    return out


def _less(spent: Round, whole: tuple[str, ...], parts: tuple[str, ...]) -> tuple[float, float]:
    """Return the time of `whole` less that of `parts`: seconds by the wall and of processor time."""
    wall, cpu = (
        sum(spent.get(part, (0.0, 0.0))[i] for part in whole)
        - sum(spent.get(part, (0.0, 0.0))[i] for part in parts)
        for i in (0, 1)
    )
    return wall, cpu


def forests_figures(task: ForecastLoad) -> Numbers:
    """Forests of the size that boosting grows, three for each horizon, summed by ours and by scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    from models.load import gradient_boosting as boosting
    from models.trees import pack_trees, unpack_grove

    rng = np.random.default_rng(5)
    x = np.asfortranarray(rng.normal(size=(max(task.series, 500), boosting.MOST_COLUMNS)))
    y = x[:, :8].sum(axis=1) + rng.normal(size=len(x))
    models = []
    for rounds in (boosting.ROUNDS, boosting.EDGE_ROUNDS, boosting.EDGE_ROUNDS):
        model = HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=rounds, max_leaf_nodes=boosting.MOST_LEAVES,
            max_bins=boosting.MOST_BINS, early_stopping=False, random_state=0)  # fmt: skip
        models.append(model.fit(x, y))
    grove, rows = unpack_grove([pack_trees(model) for model in models]), x[: task.series]
    clocks = Clocks()
    ours = clocks.timed("ours", grove.predict)
    theirs = clocks.timed("theirs", lambda: [model.predict(rows) for model in models])
    for step in range(1 + max(3, task.rounds // 5)):
        if step:  # the first is not kept
            clocks.rounds.append({})
        for _ in HORIZONS:
            ours(rows)
            theirs()
    del clocks.rounds[0]
    out = clocks.figures("", {"forests": ("ours",), "sklearn_forests": ("theirs",)})
    return out | {"forests_per_sklearn": out["forests_cpu_ms_p50"] / out["sklearn_forests_cpu_ms_p50"]}


def memory_figures(load: Load, memory: Mapping[str, np.ndarray]) -> Numbers:
    """Measure the memory of the model, and its part of a snapshot."""
    load.restore(memory)
    tree, took, cpu = spent(load.memory)
    held = {"parameters": load.parameters(), "memory": tree}
    raw, encoding, _ = spent(lambda: encode({"models": {load.name: held}}))
    return {
        "memory_bytes": bytes_held(load, set()),
        "snapshot_copy_ms": 1e3 * took,
        "snapshot_copy_cpu_ms": 1e3 * cpu,
        "snapshot_encode_s": encoding,
        "snapshot_bytes": len(raw),
        "snapshot_raw_bytes": sum(array.nbytes for array in tree.values()),
    }


def bytes_held(thing: Any, seen: set[int]) -> int:
    """Bytes of all arrays that can be reached from an object, each once."""
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None else bytes_held(thing.base, seen)
    if isinstance(thing, dict):
        return sum(bytes_held(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(bytes_held(value, seen) for value in thing)
    return bytes_held(vars(thing), seen) if hasattr(thing, "__dict__") else 0


def measure_backtest(task: ForecastLoad) -> Numbers:
    """A backtest of one minute series by all default experts."""
    from models.backtest.load import BacktestTerms, backtest

    panel = SeriesPanel(START_NS, STEP_S, make_values(task.rows, task.series, STEP_S))
    horizons = tuple(h for h in HORIZONS if h * 8 <= task.rows)
    experts = {name: FORECASTERS[name] for name in DEFAULT_EXPERTS}
    terms = BacktestTerms(clock=time.perf_counter)
    result, wall, cpu = spent(lambda: backtest(panel, horizons, experts, terms))
    out: Numbers = {"backtest_s": wall, "backtest_cpu_s": cpu, "backtest_rows": task.rows}
    return out | {"backtest_fit_s": result.fit_s}


def measure(task: ForecastLoad) -> Numbers:
    """Figures of a task."""
    if task.mode == "loop":
        from tests.evaluation.bench.forecast_loop import measure_loop

        return measure_loop(task)
    return {"fit": measure_fit, "predict": measure_predict, "backtest": measure_backtest}[task.mode](task)


if __name__ == "__main__":
    answer_parent(ForecastLoad, measure, pinned=False)
