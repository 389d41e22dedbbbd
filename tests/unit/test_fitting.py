"""Fits in a worker: due when they are due, an event whatever happens, and never for another site."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

from models.persistence import Persistence
from tests.support.contract_plugins import START_NS, site
from twin.catalogue import NS, digest, pack, unpack
from twin.contracts import FitRequest
from twin.engine import Engine
from twin.run import LATENCY_S, Fitter
from twin.run.fitting import run_fit
from twin.telemetry import FitFailed, ModelFitted

DUE_NS = START_NS + round(LATENCY_S * NS)


class Raising(Persistence):
    """A fit that fails."""

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        raise ValueError("nothing to learn")


class Dying(Persistence):
    """A fit whose process is killed, as by a lack of memory."""

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        os._exit(9)


def engine(model: Persistence, history: bool = True) -> Engine:
    where = site()
    if history:
        where.file.history_s["rack.power_w"] = 120.0
    made = Engine(where, [], [model], {})
    if history:
        ring = made.history.rings["rack.power_w"]
        for k in range(60):
            ring.push(np.full(2, 9e3 + k, np.float32), START_NS + 2 * k * NS)
    return made


def request(number: int = 0) -> FitRequest:
    return FitRequest(f"persistence@{number}", "persistence", 0, 60, 60, START_NS + 600 * NS)


def outcome(fitter: Fitter, made: Engine, number: int = 0, site_hash: str = "") -> ModelFitted | FitFailed:
    fitter.submit(made, request(number), START_NS)
    assert fitter.due(DUE_NS - 1, made.site.spec_hash) == []
    (event,) = fitter.due(DUE_NS, site_hash or made.site.spec_hash)
    assert isinstance(event, ModelFitted | FitFailed)
    assert fitter.due(DUE_NS + NS, made.site.spec_hash) == []
    return event


def test_the_worker_does_what_the_model_does() -> None:
    series = {"t_ns": np.arange(50) * NS, "rack.power_w": np.random.default_rng(1).normal(size=(50, 2))}
    packed = run_fit("models.persistence:Persistence", {"horizons_s": (4.0,)}, pack(series), 3)
    assert digest(unpack(packed)) == digest(Persistence(horizons_s=(4.0,)).fit(series, 3))


@pytest.mark.slow
def test_a_result_comes_when_it_is_due_and_names_its_content() -> None:
    model = Persistence(horizons_s=(4.0,))
    fitter = Fitter()
    try:
        event = outcome(fitter, engine(model))
    finally:
        fitter.close()
    assert isinstance(event, ModelFitted)
    assert event.params_hash == digest(unpack(event.params))
    model.load(unpack(event.params))
    assert model.parameters()


def test_without_history_there_is_nothing_to_fit() -> None:
    event = outcome(Fitter(), engine(Persistence(), history=False))
    assert isinstance(event, FitFailed)
    assert "no history is declared" in event.why


def test_a_fit_for_another_site_is_dropped() -> None:
    event = outcome(Fitter(), engine(Persistence(), history=False), site_hash="another")
    assert isinstance(event, FitFailed)
    assert event.why == "the site changed meanwhile"


@pytest.mark.long
def test_a_failing_fit_and_a_dying_worker_are_events_and_the_next_fit_works() -> None:
    fitter = Fitter()
    try:
        for number, (model, why) in enumerate(
            ((Raising(), "nothing to learn"), (Dying(), "BrokenProcessPool"))
        ):
            event = outcome(fitter, engine(model), number)
            assert isinstance(event, FitFailed)
            assert why in event.why
        assert isinstance(outcome(fitter, engine(Persistence(horizons_s=(4.0,))), 9), ModelFitted)
    finally:
        fitter.close()
