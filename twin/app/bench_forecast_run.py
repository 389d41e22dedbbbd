"""One measurement of the forecasts, in a process of its own: fits, a row of many series, the loop, a backtest.

Series are made here, seeded: a daily and a weekly season, noise that remembers, and steps. Part of the shell:
this file may look at the clock, what it measures may not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import numpy as np

from models import schedule
from models.blend import Blend
from models.forecaster import Grid
from models.forecasters import DEFAULT_EXPERTS, FORECASTERS
from models.load import GRIDS, Load
from models.panel import Panel
from twin.app.bench_load import START_NS
from twin.app.fitting import LATENCY_S, Fitter
from twin.contracts import FitRequest
from twin.engine import Engine
from twin.events import ModelFitted
from twin.frame import F64, NS
from twin.snapshot import encode

SIGNAL = "rack.power_w"
HORIZONS = (1, 5, 15, 60, 360, 1440)  # of the minute series, in rows
DAY_S, STEP_S = 86_400.0, 60.0
FITTED = tuple(name for name in DEFAULT_EXPERTS if FORECASTERS[name].fitted)
BEAT_S = 0.01  # between two beats of the loop that is watched
STUCK_S = 300.0  # the longest that a fit beside the loop is waited for
Numbers = dict[str, float | int]


class Task(msgspec.Struct, frozen=True):
    """What a process is to measure: `series` at once, `rows` of them (0: as many as the daemon keeps).

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
        self.rounds: list[dict[str, tuple[float, float]]] = [{}]

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


def percentiles(key: str, numbers: np.ndarray | list[float]) -> Numbers:
    """Half, 99 % and the largest."""
    return {f"{key}_p50": float(np.percentile(numbers, 50)), f"{key}_p99": float(np.percentile(numbers, 99)),
            f"{key}_max": float(np.max(numbers))}  # fmt: skip


def spent(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, seconds by the wall, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = call()
    return out, time.perf_counter() - wall, time.process_time() - cpu


def measure_fit(task: Task) -> Numbers:
    """Each fitted expert on a minute series, twice where `rounds` is 2; the quickest time counts."""
    out: Numbers = {}
    _, out["fit_import_s"], _ = spent(import_statistics)
    panel = Panel(START_NS, STEP_S, make_values(task.rows, task.series, STEP_S))
    grid = Grid(STEP_S, tuple(h for h in HORIZONS if h * 4 <= task.rows))
    for name in FITTED:
        each = [spent(lambda n=name: FORECASTERS[n](grid).fit(panel, 0)) for _ in range(task.rounds)]
        out[f"fit.{name}_s"], out[f"fit.{name}_cpu_s"] = min(x[1] for x in each), min(x[2] for x in each)
    out["fit_two_weeks_s"] = sum(out[f"fit.{name}_s"] for name in FITTED)
    out["fit_two_weeks_cpu_s"] = sum(out[f"fit.{name}_cpu_s"] for name in FITTED)
    return out | {"fit.rows": task.rows}


def import_statistics() -> None:
    """What experts import in their fits, so that it is timed apart."""
    import sklearn.ensemble
    import statsmodels.regression.linear_model
    import statsmodels.tsa.exponential_smoothing.ets  # noqa: F401


def make_load(n: int) -> Load:
    """The daemon's model for the power of `n` racks."""
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
        out[name] = blend = Blend(grid, n, kept, experts, schedule.EXPERTS)
        first = START_NS // blend.step_ns
        for row in range(kept):
            blend.append(first + row, series[name][row])
    return out


def memory_of(blends: Mapping[str, Blend], n: int) -> dict[str, np.ndarray]:
    """What `Load.memory` gives with these blends."""
    out = {"dt_s": np.array([STEP_S]), "sizes": np.array([n], np.int64), "present": np.full(n, 60e3)}
    for name, blend in blends.items():
        out |= {f"{name}/{key}": array for key, array in blend.memory().items()}
        out |= {f"{name}/sum": np.zeros(n), f"{name}/count": np.zeros(n)}
        out[f"{name}/open_row"] = np.array([blend.row + 1], np.int64)
    return out


def measure_predict(task: Task) -> Numbers:
    """A row of all series through both grids, with fitted experts, once outcomes are judged."""
    n, load = task.series, make_load(task.series)
    series = make_series(load, n)
    blends = make_blends(load, n, series)
    load.restore(memory_of(blends, n))
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
    judged = rows_judged(blends, task, series, clocks)
    out |= predict_figures(clocks, load, n) | {"outcomes_judged": judged}
    return out | forests_figures(task) | memory_figures(load, memory_of(blends, n))


def rows_judged(
    blends: Mapping[str, Blend], task: Task, series: Mapping[str, F64], clocks: Clocks
) -> int:
    """Let rows come; how many outcomes of the longest horizon were judged before the first that is measured."""
    unknown = {name: np.full((len(b.grid.horizons), b.n), np.nan) for name, b in blends.items()}
    for step in range(task.warmup + task.rounds):
        if step <= task.warmup:
            clocks.rounds = []
        clocks.rounds.append({})
        for name, blend in blends.items():
            row = blend.rows + step
            blend.append(blend.row + 1, series[name][row % len(series[name])])
            blend.say(dict.fromkeys(schedule.EXPERTS, unknown[name]))
    return min(max(0, task.warmup - b.grid.horizons[-1]) for b in blends.values())


def predict_figures(clocks: Clocks, load: Load, n: int) -> Numbers:
    """Per grid and part, and both grids together: as in a minute that ends a quarter of an hour."""
    names, out = tuple(load.grids(STEP_S)), {}
    for grid in names:
        parts = {f"expert.{expert}": (f"{grid}.expert.{expert}",) for expert in load.expert_names}
        parts["experts"] = tuple(f"{grid}.expert.{expert}" for expert in load.expert_names)
        parts |= {"learn": (f"{grid}.learn",), "issue": (f"{grid}.issue",)}
        parts["online"] = (f"{grid}.learn", f"{grid}.issue")
        parts["all"] = (f"{grid}.append", f"{grid}.say")
        out |= clocks.figures(f"{grid}.", parts)
        out[f"{grid}.rest_ms_p50"] = max(
            0.0, out[f"{grid}.all_ms_p50"] - out[f"{grid}.experts_ms_p50"] - out[f"{grid}.online_ms_p50"]
        )
    both = tuple(f"{grid}.{part}" for grid in names for part in ("append", "say"))
    last = tuple(f"{grid}.expert.last" for grid in names)
    out |= clocks.figures("", {f"predict_{n}_series": both, "predict_last_value": last})
    return out


def forests_figures(task: Task) -> Numbers:
    """Forests of the size that boosting grows, summed by ours and by scikit-learn: one horizon's three."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    from models import gradient_boosting as boosting
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
    for _ in range(max(2, task.rounds // 4)):
        clocks.rounds.append({})
        ours(rows)
        theirs()
    del clocks.rounds[:2]
    out = clocks.figures("", {"forests": ("ours",), "sklearn_forests": ("theirs",)})
    return out | {"forests_per_sklearn": out["forests_ms_p50"] / out["sklearn_forests_ms_p50"]}


def memory_figures(load: Load, memory: Mapping[str, np.ndarray]) -> Numbers:
    """What the model holds, and its part of a snapshot."""
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


class Unlearning(Load):
    """As the daemon's model, but its fit gives nothing at once: for what handing over costs."""

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        return {}


def measure_loop(task: Task) -> Numbers:
    """How late a loop's beats are beside a fit in the worker, and without one."""
    import uvloop

    return uvloop.run(_loop(task))


async def _loop(task: Task) -> Numbers:
    n, load = task.series, make_load(task.series)
    memory = memory_of(make_blends(load, n, make_series(load, n)), n)
    idle, quiet = Unlearning((SIGNAL,)), []
    load.restore(memory)
    idle.restore(memory)
    engine = cast(
        Engine, SimpleNamespace(models={"load": load, "idle": idle}, site=SimpleNamespace(spec_hash="bench"))
    )
    fitter, late = Fitter(), cast(list[float], [])
    try:
        out: Numbers = {}
        await _beats(quiet, task.rounds * 0.1, lambda: False)
        first_ms = _submit(fitter, engine, "load")
        began = time.perf_counter()
        await _beats(late, STUCK_S, lambda: not _running(fitter))
        out["loop_fit_s"] = time.perf_counter() - began
        out["submit_first_ms"] = first_ms
        events, took, _ = spent(lambda: fitter.due(2 * round(LATENCY_S * NS), "bench", patient=False))
        assert [type(e) for e in events] == [ModelFitted], events
        out["result_ms"] = 1e3 * took
        out["parameters_bytes"] = len(events[0].params)
        out |= percentiles("loop_lag_ms", late) | percentiles("loop_lag_without_fit_ms", quiet)
        handed: list[float] = []
        submits = []
        for _ in range(5):
            submits.append(_submit(fitter, engine, "idle"))
            await _beats(handed, STUCK_S, lambda: not _running(fitter))
            fitter.due(2 * round(LATENCY_S * NS), "bench")
        return out | percentiles("submit_ms", submits) | percentiles("handing_over_lag_ms", handed)
    finally:
        fitter.close()


def _submit(fitter: Fitter, engine: Engine, model: str) -> float:
    """Milliseconds that asking for a fit takes on the loop."""
    request = FitRequest(f"{model}@0", model, 0, 60, 60, 10**18)
    return 1e3 * spent(lambda: fitter.submit(engine, request, 0))[1]


def _running(fitter: Fitter) -> bool:
    return any(w.future is not None and not w.future.done() for w in fitter._waiting)


async def _beats(late_ms: list[float], longest_s: float, over: Callable[[], bool]) -> None:
    """Sleep to the next beat again and again, and keep how late one wakes."""
    begun = due = time.perf_counter()
    while due - begun < longest_s and not over():
        due += BEAT_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        late_ms.append(1e3 * (now - due))
        due = max(due, now - BEAT_S)  # a long pause is one late beat, not a hundred


def measure_backtest(task: Task) -> Numbers:
    """A backtest of one minute series by all default experts."""
    from models.backtest import backtest

    panel = Panel(START_NS, STEP_S, make_values(task.rows, task.series, STEP_S))
    horizons = tuple(h for h in HORIZONS if h * 8 <= task.rows)
    experts = {name: FORECASTERS[name] for name in DEFAULT_EXPERTS}
    result, wall, cpu = spent(lambda: backtest(panel, horizons, experts, clock=time.perf_counter))
    out: Numbers = {"backtest_s": wall, "backtest_cpu_s": cpu, "backtest_rows": task.rows}
    return out | {"backtest_fit_s": result.fit_s}


MODES: dict[str, Callable[[Task], Numbers]] = {
    "fit": measure_fit, "predict": measure_predict, "loop": measure_loop, "backtest": measure_backtest}  # fmt: skip


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(MODES[given.mode](given)))
