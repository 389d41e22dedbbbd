"""Every registered model keeps what `twin.contracts.contracts` asks of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from models import REGISTRY
from tests.support.contract_plugins import World, engine_of, site
from tests.support.failing_fleet import lived
from twin.catalogue import NS, ContractError, digest, find_quantity, pack, unpack
from twin.contracts import FailureLog, Model, NodeFeatures, View
from twin.engine import Engine, encode
from twin.engine.snapshot import decode
from twin.site import Envelope
from twin.telemetry import MISSING

MODELS = pytest.mark.parametrize("name", sorted(REGISTRY))


def seen(name: str, racks: int = 2, silent: bool = False) -> tuple[Engine, Model, World]:
    model: Model = REGISTRY[name]()
    engine = engine_of(site(racks), [], [model])
    world = World(engine)
    for _ in range(45):
        world.step(silent=silent)
    return engine, model, world


def series(model: Model, seed: int = 1) -> dict[str, np.ndarray]:
    """Return input of a fit: 900 rows of noise, of a model that gathers its own or of declared history."""
    rng = np.random.default_rng(seed)
    if model.name == "failure":
        watched = REGISTRY[model.name]()
        lived(watched, seed=seed)
        return watched.training()  # type: ignore[attr-defined, no-any-return]
    if hasattr(model, "training"):
        out = {}
        for name, step_s, *horizons in (("fine", 60.0, 1.0, 5.0, 15.0, 60.0), ("coarse", 900.0, 24.0, 96.0)):
            out[f"{name}/values"] = (9e3 + rng.normal(0, 50, (900, 2))).astype(np.float32)
            out[f"{name}/grid"] = np.array([step_s, *horizons])
            out[f"{name}/start_ns"] = np.array([0], np.int64)
            out[f"{name}/known"] = np.full((2, 900), np.nan, np.float32)
        return out
    t_ns = np.arange(900, dtype=np.int64) * 10 * NS
    out: dict[str, np.ndarray] = {"t_ns": t_ns}
    for key in getattr(model, "signals", ("rack.power_w",)):
        out[key] = (9e3 + rng.normal(0, 50, (900, 2))).astype(np.float32)
    return out


@MODELS
def test_it_says_what_it_is(name: str) -> None:
    model: Model = REGISTRY[name]()
    assert isinstance(model, Model)
    assert model.name == name
    assert model.period_s > 0
    assert model.fit_every_s >= 0


@MODELS
def test_forecasts_are_bands_inside_the_physical_range(name: str) -> None:
    engine, _, _ = seen(name)
    assert engine.suspended == {}
    assert engine.forecasts, "nothing was forecast: the test shows nothing"
    for (key, horizon_s), forecast in engine.forecasts.items():
        signal = find_quantity(key)
        assert signal is not None
        assert (forecast.signal, forecast.horizon_s) == (key, horizon_s)
        assert horizon_s > 0 or (horizon_s == 0 and name == "power_curve"), "what is so now is measured"
        n = engine.site.sizes[signal.table]
        for band in (forecast.mean, forecast.lo, forecast.hi):
            assert band.shape == (n,)
            assert band.dtype == np.float32
        known = np.isfinite(forecast.lo) & np.isfinite(forecast.hi)
        assert (forecast.lo[known] <= forecast.mean[known]).all()
        assert (forecast.mean[known] <= forecast.hi[known]).all()
        assert (forecast.lo[known] >= signal.low).all()
        assert (forecast.hi[known] <= signal.high).all()
        assert forecast.model.startswith(f"{name}@")


@MODELS
def test_the_same_past_gives_the_same_forecasts(name: str) -> None:
    one, _, _ = seen(name)
    two, _, _ = seen(name)
    assert digest(one.dump()) == digest(two.dump())


@MODELS
@pytest.mark.parametrize("racks, silent", [(2, True), (0, False)], ids=["nothing heard", "empty site"])
def test_knowing_nothing_is_no_trouble(name: str, racks: int, silent: bool) -> None:
    engine, _, _ = seen(name, racks, silent)
    assert engine.suspended == {}
    assert all(np.isnan(f.mean).all() for f in engine.forecasts.values())


@pytest.mark.long
@MODELS
def test_fits_are_deterministic_data(name: str) -> None:
    model: Model = REGISTRY[name]()
    fitted = model.fit(series(model), 3)
    assert bool(fitted) == (model.fit_every_s > 0), "nothing was fitted: the test shows nothing"
    assert digest(fitted) == digest(REGISTRY[name]().fit(series(model), 3))
    assert digest(unpack(pack(fitted))) == digest(fitted)
    model.load(fitted)
    assert digest(model.parameters()) == digest(fitted)


@MODELS
def test_foreign_parameters_are_refused(name: str) -> None:
    model: Model = REGISTRY[name]()
    with pytest.raises(ContractError):
        model.load({"no such parameter": np.zeros(3)})


@pytest.mark.long
@MODELS
@pytest.mark.parametrize("fit", [False, True], ids=["unfitted", "fitted"])
def test_a_snapshot_holds_all_of_it(name: str, fit: bool) -> None:
    engine, model, world = seen(name)
    if fit:
        model.load(model.fit(series(model), 0))
        world.step()
    other = engine_of(site(), [], [REGISTRY[name]()])
    other.restore(decode(encode(engine.dump())))
    assert other.checksum() == engine.checksum()
    for _ in range(15):
        world.step()
        other.tick(world.frame)
    assert other.checksum() == engine.checksum()


@pytest.mark.long
@MODELS
@pytest.mark.parametrize("fit", [False, True], ids=["unfitted", "fitted"])
def test_it_moves_with_the_site(name: str, fit: bool) -> None:
    """Entities keep what was learned of them, new ones begin with nothing; a snapshot holds it."""
    engine, model, _ = seen(name)
    if fit:
        model.load(model.fit(series(model), 0))
    view = _Three(engine)
    kept = {t: np.arange(n, dtype=np.int32) for t, n in view.site.sizes.items()}
    kept["rack"] = np.array([-1, 0, 1], np.int32)
    kept["node"] = np.array([-1, -1, 0, 1, 2, 3], np.int32)
    model.remap(kept)
    fresh: Model = REGISTRY[name]()
    if model.parameters():
        fresh.load(model.parameters())
    fresh.restore(model.memory())
    for each in (model, fresh):
        each.update(view)
    said = model.predict(view)
    bands = [[f.mean, f.lo, f.hi, f.model] for f in said]
    assert digest(bands) == digest([[f.mean, f.lo, f.hi, f.model] for f in fresh.predict(view)])
    of_racks = [f.mean for f in said if f.signal.startswith("rack.")]
    assert said, "nothing was forecast: the test shows nothing"
    assert of_racks or name in ("failure", "power_curve")
    for mean in of_racks:
        assert np.isnan(mean[0])
        assert np.isfinite(mean[1:]).all()


class _Three:
    """A view of a site of three racks, of which the first was never heard, some seconds later."""

    def __init__(self, engine: Engine) -> None:
        world = World(engine_of(site(3), [], []))
        while world.tick < engine.state.tick + 11:
            world.step()
        self._view: View = world.engine.view(1.0)
        self.site, self.jobs = world.engine.site, world.engine.jobs
        self.now_ns, self.dt_s = world.engine.state.now_ns, 1.0
        self.forecasts: Mapping[object, object] = {}

    def value(self, key: str) -> np.ndarray:
        values = self._view.value(key).copy()
        if key.startswith("rack."):
            values[0] = np.nan
        return values

    believed = value

    def quality(self, key: str) -> np.ndarray:
        quality = self._view.quality(key).copy()
        if key.startswith("rack."):
            quality[0] = MISSING
        return quality

    def age_s(self, key: str) -> np.ndarray:
        return self._view.age_s(key)

    def envelope(self, control: str) -> Envelope:
        return self._view.envelope(control)

    def commanded(self, control: str) -> np.ndarray:
        return self._view.commanded(control)

    def readback(self, control: str) -> np.ndarray:
        return self._view.readback(control)

    def outlook(self, quantity: str, at_ns: int) -> np.ndarray:
        return self._view.outlook(quantity, at_ns)

    def maintenance(self, table: str) -> None:
        return None

    def node_features(self) -> NodeFeatures:
        return self._view.node_features()

    def failures(self) -> FailureLog:
        return self._view.failures()


class _Broken(REGISTRY["persistence"]):  # type: ignore[misc, name-defined]
    name = "broken"

    def predict(self, view: View) -> list[object]:
        raise ValueError("boom")


def test_a_bad_model_is_suspended_alone() -> None:
    engine = engine_of(site(), [], [_Broken(), REGISTRY["persistence"]()])
    world = World(engine)
    for _ in range(15):
        world.step()
    assert list(engine.suspended) == ["broken"]
    assert {f.model.partition("@")[0] for f in engine.forecasts.values()} == {"persistence"}
