"""Fits: slow fits of models in a separate process. The result is an event in a later frame.

The worker is spawned, so that the process of the ticks never imports libraries of statistics. The loop copies
the training data; a thread packs and sends the copy.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import NS, digest, pack, unpack
from twin.contracts import FitRequest, Model
from twin.engine import Engine
from twin.run.parallel import Workers
from twin.telemetry import Event, FitFailed, ModelFitted

# A replay delivers a result this long after its request, whatever the fit really took.
LATENCY_S = 30.0
FIT_TIMEOUT_S = 600.0
NICE = 10  # fits step back behind the ticks


def run_fit(kind: str, settings: dict[str, Any], series: bytes, seed: int) -> bytes:
    """Fit a model of this class on packed series, in the worker; return packed parameters."""
    module, _, name = kind.partition(":")
    cls = getattr(__import__(module, fromlist=[name]), name)
    parameters: dict[str, np.ndarray] = cls(**settings).fit(unpack(series), seed)
    return pack(parameters)


def _declared(engine: Engine, model: Model) -> dict[str, np.ndarray]:
    """The declared history of a model's signals; empty if there is none."""
    series: dict[str, np.ndarray] = {}
    for key in getattr(model, "signals", ()):
        ring = engine.history.rings.get(key)
        if ring is not None:
            t_ns, values = ring.ordered()
            mask = engine.windows.mask(key.partition(".")[0])
            if mask is not None:  # nothing is learned where people work
                values = np.where(mask, np.float32(np.nan), values)
            series["t_ns"], series[key] = t_ns, values
    return series


class _Waiting(NamedTuple):
    due_ns: int
    site_hash: str
    request: FitRequest
    future: Future[bytes] | None
    why: str  # where there is no future


class Fitter:
    """Runs fits one at a time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._workers: Workers | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._closed = threading.Event()
        self._waiting: list[_Waiting] = []

    def submit(self, engine: Engine, request: FitRequest, now_ns: int) -> None:
        """Start a fit on what the model has gathered, or on the history that the engine holds.

        Both give copies, so that they can be packed while ticks go on. Its result is due `LATENCY_S` later.
        """
        model = engine.models[request.model]
        own = getattr(model, "training", None)
        series: dict[str, np.ndarray] = own() if own is not None else _declared(engine, model)
        future, why = None, "no history is declared for its signals"
        if own is not None:
            why = "it has gathered nothing yet"
        if series:
            own_settings = getattr(model, "settings", None)
            settings = (
                own_settings()
                if own_settings is not None
                else {k: getattr(model, k) for k in ("signals", "horizons_s") if hasattr(model, k)}
            )
            kind = f"{type(model).__module__}:{type(model).__qualname__}"
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="fits")
            try:
                future = self._thread.submit(self._through, kind, settings, [series], request.seed)
            except RuntimeError as error:  # no thread can be started
                why = f"no worker: {error}"
        due_ns = now_ns + round(LATENCY_S * NS)
        self._waiting.append(_Waiting(due_ns, engine.site.spec_hash, request, future, why))

    def _through(
        self, kind: str, settings: dict[str, Any], held: list[dict[str, np.ndarray]], seed: int
    ) -> bytes:
        """In the thread: pack, hand over, wait. `held` is emptied, so that the rows live no longer."""
        return self._start(kind, settings, pack(held.pop()), seed).result()

    def _start(self, kind: str, settings: dict[str, Any], series: bytes, seed: int) -> Future[bytes]:
        if self._closed.is_set():
            raise RuntimeError("fits have ended")
        if self._workers is not None:
            try:
                return self._workers.submit(run_fit, kind, settings, series, seed)
            except BrokenProcessPool:
                self._workers.close()  # a worker that was killed takes its pool along
        self._workers = Workers(1, nice=NICE)
        return self._workers.submit(run_fit, kind, settings, series, seed)

    def due(self, now_ns: int, site_hash: str, patient: bool = True) -> list[Event]:
        """Return the due results, and wait for them if necessary, so that a replay does not depend on speed.

        Live is not `patient`: what is not done is asked for again later, until its deadline. What was fitted
        for another site is dropped: its columns are not the present racks.
        """
        out: list[Event] = []
        while self._waiting and self._waiting[0].due_ns <= now_ns:
            future = self._waiting[0].future
            if not patient and future is not None and not future.done():
                if now_ns < self._waiting[0].request.deadline_ns:
                    break
                late = self._waiting.pop(0).request
                future.cancel()
                out.append(FitFailed(id=f"fit:{late.id}", fit=late.id, model=late.model, why="too late"))
                continue
            waiting = self._waiting.pop(0)
            fit, model, why = waiting.request.id, waiting.request.model, waiting.why
            if waiting.site_hash != site_hash:
                why = "the site changed meanwhile"
            elif waiting.future is not None:
                try:
                    params = waiting.future.result(timeout=FIT_TIMEOUT_S)
                    hashed = digest(unpack(params))
                    out.append(
                        ModelFitted(id=f"fit:{fit}", fit=fit, model=model, params_hash=hashed, params=params)
                    )
                    continue
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"[:300]
            out.append(FitFailed(id=f"fit:{fit}", fit=fit, model=model, why=why))
        return out

    def close(self) -> None:
        """End the worker, even during a fit. No more fits are accepted."""
        self._closed.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
            self._workers = None
