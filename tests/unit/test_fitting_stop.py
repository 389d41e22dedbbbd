"""A stop does not wait for a fit, and asking for one does not wait for the rows to be packed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
import pytest

from models.persistence import Persistence
from tests.support.contract_plugins import START_NS, site
from twin.catalogue import NS
from twin.contracts import FitRequest
from twin.engine import Engine
from twin.run import LATENCY_S, Fitter, fitting
from twin.telemetry import FitFailed

DUE_NS = START_NS + round(LATENCY_S * NS)
FIT_S = 60.0


class Lasting(Persistence):
    """A fit that takes long, on rows of its own."""

    def training(self) -> dict[str, np.ndarray]:
        return {"rows": np.zeros(3)}

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        time.sleep(FIT_S)
        return {}


def asked() -> tuple[Fitter, Engine]:
    fitter, engine = Fitter(), Engine(site(), [], [Lasting()], {})
    fitter.submit(engine, FitRequest("persistence@0", "persistence", 0, 60, 60, DUE_NS + 600 * NS), START_NS)
    return fitter, engine


@pytest.mark.slow
def test_closing_ends_the_worker_in_the_middle_of_a_fit() -> None:
    fitter, engine = asked()
    end = time.monotonic() + FIT_S / 2
    while not (fitter._workers and fitter._workers.pool._processes) and time.monotonic() < end:
        time.sleep(0.01)
    assert fitter._workers is not None
    (worker,) = fitter._workers.pool._processes.values()
    time.sleep(2.0)  # it begins its fit
    assert worker.is_alive()
    assert fitter.due(DUE_NS, engine.site.spec_hash, patient=False) == [], "it is being fitted"
    fitter.close()
    end = time.monotonic() + FIT_S / 2
    while worker.is_alive() and time.monotonic() < end:  # a join would race with the pool's own
        time.sleep(0.01)
    assert not worker.is_alive()
    (event,) = fitter.due(DUE_NS, engine.site.spec_hash)
    assert isinstance(event, FitFailed)
    assert not any(thread.name.startswith("fits") and not thread.daemon for thread in _left(FIT_S / 2))


def _left(within_s: float) -> list[threading.Thread]:
    """Threads of fits that are still there after that time, or none."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        left = [thread for thread in threading.enumerate() if thread.name.startswith("fits")]
        if not left:
            break
        time.sleep(0.01)
    return left


def test_asking_returns_while_rows_are_being_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, go_on = threading.Event(), threading.Event()

    def pack(tree: object) -> bytes:
        packing.set()
        assert go_on.wait(10.0)
        raise OSError("no room")

    monkeypatch.setattr(fitting, "pack", pack)
    fitter, engine = asked()
    try:
        assert packing.wait(10.0)
        assert fitter.due(DUE_NS, engine.site.spec_hash, patient=False) == [], "a tick does not wait for it"
        go_on.set()
        (event,) = fitter.due(DUE_NS, engine.site.spec_hash)
        assert isinstance(event, FitFailed)
        assert "no room" in event.why
    finally:
        go_on.set()
        fitter.close()


def test_once_closed_it_takes_no_more() -> None:
    fitter, engine = Fitter(), Engine(site(), [], [Lasting()], {})
    fitter.close()
    fitter.submit(engine, FitRequest("persistence@1", "persistence", 0, 60, 60, DUE_NS), START_NS)
    (event,) = fitter.due(DUE_NS, engine.site.spec_hash)
    assert isinstance(event, FitFailed)
    assert "ended" in event.why
    fitter.close()
