"""persistence: the last value, and a band that holds nine in ten. May import `twin` and models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.persistence import Persistence
from tests.support.builders import Twin, eight_nodes, two_racks
from twin.catalogue import NS, ContractError, digest, pack
from twin.contracts import Forecast
from twin.telemetry import ModelFitted

KEY = "rack.power_w"


def forecasting(**more: Any) -> tuple[Twin, Persistence]:
    model = Persistence(**{"horizons_s": (60.0, 300.0)} | more)
    model.period_s = 1.0  # type: ignore[misc]
    return Twin(two_racks(), models=[model]), model


def forecast(twin: Twin, horizon_s: float = 60.0, key: str = KEY) -> Forecast:
    return twin.engine.forecasts[key, horizon_s]


def test_the_mean_is_the_last_good_value() -> None:
    twin, _ = forecasting()
    twin.tick()
    assert np.isnan(forecast(twin).mean).all()
    twin.tick({KEY: [100e3, 50e3]})
    twin.tick({KEY: [101e3, np.nan]})
    for horizon_s in (60.0, 300.0):
        assert forecast(twin, horizon_s).mean.tolist() == [101e3, 50e3]
    assert forecast(twin).model == "persistence@unfitted"


def test_a_band_needs_nine_spans_of_its_horizon() -> None:
    twin, _ = forecasting(horizons_s=(2.0, 4.0))
    for k in range(37):
        twin.tick({KEY: (100e3, 101e3)[k % 2]})
        # steps of 1 kW in a second: 1.645 x 1 kW x sqrt(horizon)
        for horizon_s, first in ((2.0, 18), (4.0, 36)):
            now, half = (100e3, 101e3)[k % 2], 1.6449 * 1e3 * horizon_s**0.5
            f = forecast(twin, horizon_s)
            expected = [now - half, now + half] if k >= first else [np.nan, np.nan]
            assert [f.lo[0], f.hi[0]] == pytest.approx(expected, rel=1e-4, nan_ok=True), (k, horizon_s)


def test_a_band_stays_inside_what_is_physical() -> None:
    twin, _ = forecasting(horizons_s=(2.0, 4.0))
    for k in range(38):
        twin.tick({KEY: (5e3, 1e3)[k % 2]})
    assert forecast(twin, 4.0).lo.tolist() == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_nine_in_ten_of_a_random_walk_fall_into_the_unfitted_band(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = two_racks(racks="r[1-40]")
    model = Persistence(horizons_s=(20.0,))
    model.period_s = 1.0  # type: ignore[misc]
    twin = Twin(tree, models=[model])
    walk = 500e3 + np.cumsum(rng.normal(0, 500, (440, 40)), axis=0)
    inside = []
    for k, row in enumerate(walk):
        twin.tick({KEY: row})
        if k >= 200 and k + 20 < len(walk):
            f = forecast(twin, 20.0)
            inside.append((walk[k + 20] >= f.lo) & (walk[k + 20] <= f.hi))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.025)


def series(values: np.ndarray, step_s: float = 10.0) -> dict[str, np.ndarray]:
    t_ns = (np.arange(len(values)) * step_s * NS).astype(np.int64)
    return {"t_ns": t_ns, KEY: values.astype(np.float32)}


def test_a_fitted_band_is_the_quantiles_of_past_changes() -> None:
    rng = np.random.default_rng(3)
    values = 1e5 + np.cumsum(rng.exponential(300, (700, 2)) - 200, axis=0)
    twin, model = forecasting()
    model.load(model.fit(series(values), 0))
    twin.tick({KEY: 1e5})
    for horizon_s, lag in ((60.0, 6), (300.0, 30)):
        f = forecast(twin, horizon_s)
        for rack in range(2):
            column = values.astype(np.float32)[:, rack].tolist()
            changes = sorted(b - a for a, b in zip(column, column[lag:], strict=False))
            for band, share in ((f.lo, 0.05), (f.hi, 0.95)):
                at = share * (len(changes) - 1)
                below, above = changes[int(at)], changes[int(at) + 1]
                quantile = below + (above - below) * (at - int(at))
                assert band[rack] - 1e5 == pytest.approx(quantile, rel=1e-3, abs=0.1)
    assert forecast(twin).model.startswith("persistence@")
    assert forecast(twin).model != "persistence@unfitted"


def test_gaps_are_left_out_and_too_little_is_not_fitted() -> None:
    _, model = forecasting()
    values = np.arange(300.0)[:, None] * np.array([1.0, 2.0])
    values[::2, 1] = np.nan
    fitted = model.fit(series(values), 0)
    assert fitted[f"{KEY}@60:low"].tolist() == [6.0, 12.0]
    assert model.fit(series(values[:119]), 0) == {}, "fewer than 19 spans side by side"
    values[5:, 1] = np.nan
    assert np.isnan(model.fit(series(values), 0)[f"{KEY}@60:high"][1])
    assert model.fit(series(values[:20]), 0) == {}
    assert model.fit({"t_ns": np.zeros(1, np.int64)}, 0) == {}


@pytest.mark.parametrize(
    "parameters",
    [
        {"gpu.temp_c@60:low": np.zeros(2)},
        {"rack.power_w@60": np.zeros(2)},
        {"rack.power_w@60:mid": np.zeros(2)},
        {"rack.power_w@x:low": np.zeros(2)},
        {"rack.power_w@:low": np.zeros(2)},
        {"rack.power_w@-60:low": np.zeros(2)},
        {"rack.power_w@60:low": np.zeros((2, 2))},
        {"rack.power_w@60:low": np.array(["a", "b"])},
        {"rack.power_w@60:low": [0.0, 0.0]},
        {"": np.zeros(2)},
    ],
)
def test_parameters_that_are_not_its_own_are_refused(parameters: dict[str, Any]) -> None:
    _, model = forecasting()
    before = model.parameters()
    with pytest.raises(ContractError):
        model.load(parameters)
    assert model.parameters() == before


def test_parameters_of_another_site_leave_the_unfitted_band() -> None:
    twin, model = forecasting(horizons_s=(2.0,))
    model.load({f"{KEY}@2:low": np.full(7, -1.0), f"{KEY}@2:high": np.full(7, 1.0)})
    for k in range(20):
        twin.tick({KEY: (101e3, 100e3)[k % 2]})
    assert forecast(twin, 2.0).hi[0] > 101e3


def test_a_site_without_the_signal_is_harmless() -> None:
    twin = Twin(eight_nodes(), models=[Persistence(signals=("cdu.flow_lpm",))])
    twin.run(15)
    assert forecast(twin, 60.0, "cdu.flow_lpm").mean.shape == (0,)
    assert twin.engine.suspended == {}


@pytest.mark.parametrize(
    "tree", [{f"{KEY}@60:low": [1.0]}, {f"{KEY}@60:low": np.zeros((2, 2))}, [1, 2], 5, {"x": {"y": 1}}, None]
)
def test_a_worker_that_delivers_nonsense_is_refused_in_the_tick(tree: Any) -> None:
    twin, model = forecasting()
    twin.engine.intake.pending_fits["f"] = twin.now_ns + 100 * NS
    twin.tick(None, ModelFitted(fit="f", model="persistence", params_hash=digest(tree), params=pack(tree)))
    assert twin.records("event")[0]["refused"]
    assert model.parameters() == {}
    assert twin.engine.intake.pending_fits == {}
    twin.tick(None, ModelFitted(fit="g", model="persistence", params_hash="", params=b"noise"))
    assert "not asked for" in twin.records("event")[0]["refused"]
