"""Cost of fits to the loop of the daemon: its delay beside a fit, and the time that a request takes.

A loop beats every 10 ms, with a fit in the worker and without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np

from models.load import Load
from tests.evaluation.bench.forecast_run import (
    SIGNAL,
    ForecastLoad,
    Numbers,
    make_blends,
    make_load,
    make_series,
    memory_of,
    percentiles,
    spent,
)
from twin.catalogue import NS, ContractError
from twin.contracts import FitRequest
from twin.engine import Engine
from twin.run import LATENCY_S, Fitter
from twin.telemetry import Event, ModelFitted

BEAT_S = 0.01  # between two beats
STUCK_S = 300.0  # the longest that a fit is waited for
HANDED = 5  # times that rows are handed over to a fit that takes no time
SITE = "bench"  # stands for the hash of a site
_Late = list[float]  # milliseconds


class Unlearning(Load):
    """As the daemon's model, but its fit gives nothing at once: for what handing over costs."""

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        return {}


def measure_loop(task: ForecastLoad) -> Numbers:
    """Measure the delay of a loop's beats beside a fit in the worker, and without one."""
    import uvloop

    return uvloop.run(_loop(task))


async def _loop(task: ForecastLoad) -> Numbers:
    n, load, idle = task.series, make_load(), Unlearning((SIGNAL,))
    memory = memory_of(load, make_blends(load, n, make_series(load, n)), n)
    load.restore(memory)
    idle.restore(memory)
    models, site = {"load": load, "idle": idle}, SimpleNamespace(spec_hash=SITE)
    engine = cast(Engine, SimpleNamespace(models=models, site=site))
    fits, quiet, beside, handing = _Fits(engine), _Late(), _Late(), _Late()
    try:
        await _beats(quiet, task.rounds * 0.1, lambda: False)
        fits.submit("load")
        begun = time.perf_counter()
        await _beats(beside, STUCK_S, fits.ended)
        out: Numbers = {"loop_fit_s": time.perf_counter() - begun, "submit_first_ms": fits.submit_ms.pop()}
        (event,) = fits.events
        if not isinstance(event, ModelFitted):
            raise ContractError(f"the fit beside the loop failed: {event}")
        out |= {"result_ms": fits.result_ms.pop(), "parameters_bytes": len(event.params)}
        for _ in range(HANDED):
            fits.submit("idle")
            await _beats(handing, STUCK_S, fits.ended)
    finally:
        fits.fitter.close()
    out |= percentiles("loop_lag_ms", beside) | percentiles("loop_lag_without_fit_ms", quiet)
    return out | percentiles("submit_ms", fits.submit_ms) | percentiles("handing_over_lag_ms", handing)


class _Fits:
    """Fits as the daemon asks for them, one at a time, with milliseconds of what that costs its loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.fitter = engine, Fitter()
        self.submit_ms: list[float] = []
        self.result_ms: list[float] = []
        self.events: list[Event] = []

    def submit(self, model: str) -> None:
        request = FitRequest(f"{model}@0", model, 0, 60, 60, round(STUCK_S * NS))
        self.events = []
        self.submit_ms.append(1e3 * spent(lambda: self.fitter.submit(self.engine, request, 0))[1])

    def ended(self) -> bool:
        """Return True if there is a result. The loop asks at each beat, as the daemon does at each tick."""
        found, wall, _ = spent(lambda: self.fitter.due(round(LATENCY_S * NS), SITE, patient=False))
        if found:
            self.events = found
            self.result_ms.append(1e3 * wall)
        return bool(found)


async def _beats(late_ms: _Late, longest_s: float, over: Callable[[], bool]) -> None:
    """Sleep to the next beat again and again, and keep how late one wakes."""
    begun = due = time.perf_counter()
    while due - begun < longest_s and not over():
        due += BEAT_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        late_ms.append(max(0.0, 1e3 * (now - due)))  # timers of uvloop are of whole milliseconds
        due = max(due, now - BEAT_S)  # a long pause is one late beat, not a hundred
