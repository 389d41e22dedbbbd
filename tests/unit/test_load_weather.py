"""Weather in forecasts of load: measured until now, told ahead; what is fitted may look at both."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import Load
from models.load.model import KNOWN
from tests.support.builders import START_NS, Twin, two_racks
from twin.catalogue import NS, digest
from twin.telemetry import events as ev

TEMP = "site.outdoor_temp_c"
MIN = 60.0


def weather(model: Load) -> tuple[np.ndarray, np.ndarray]:
    """Outdoor temperature in the rows that are kept, and in those to come."""
    panel = model._blends["fine"].panel()
    column = panel.known[TEMP]
    return column[: panel.n_time], column[panel.n_time :]


def driven(rows: int, told: tuple[float, ...] = ()) -> tuple[Twin, Load]:
    model = Load(("rack.power_w",), (MIN, 5 * MIN), experts="last,linear")
    twin = Twin(two_racks(), models=[model])
    rng = np.random.default_rng(1)
    for i in range(rows):
        outlook = ev.OutlookTold(
            author="met", quantity=TEMP, start_ns=START_NS, step_s=MIN, values=told, id="w"
        )
        events = (outlook,) if told and i == rows - 2 else ()
        readings = {"rack.power_w": 60e3 + rng.normal(0, 100, 2), TEMP: np.array([10.0 + i])}
        twin.tick(readings, *events, dt_s=MIN)
    assert twin.engine.suspended == {}
    return twin, model


def test_what_was_measured_lies_in_the_rows_and_in_what_a_fit_is_given() -> None:
    _, model = driven(12)
    past, ahead = weather(model)
    assert np.isfinite(past).all()
    np.testing.assert_allclose(np.diff(past), 1.0)
    assert np.isnan(ahead).all()
    given = model.training()["fine/known"]
    np.testing.assert_array_equal(given[KNOWN.index(TEMP)], past.astype(np.float32))


def test_an_outlook_is_seen_in_the_rows_that_are_forecast_and_in_no_other() -> None:
    told = tuple(float(k) for k in range(60))
    _, model = driven(12, told)
    _, ahead = weather(model)
    blend = model._blends["fine"]
    for rows in blend.grid.horizons:
        at_ns = (blend.row + rows) * blend.step_ns + blend.step_ns // 2
        assert ahead[rows - 1] == told[(at_ns - START_NS) // (60 * NS)]
    assert np.isfinite(ahead).sum() == len(blend.grid.horizons)


@pytest.mark.long
def test_a_fit_with_weather_is_used_and_survives_a_restart() -> None:
    twin, model = driven(300)
    fitted = model.fit(model.training(), 0)
    assert any(key.endswith("/known") for key in fitted), "nothing learned looks at the weather"
    model.load(fitted)
    twin.tick({"rack.power_w": np.array([6e4, 6e4]), TEMP: np.array([20.0])}, dt_s=MIN)
    other = Load(("rack.power_w",), (MIN, 5 * MIN), experts="last,linear")
    other.load(model.parameters())
    other.restore(model.memory())
    assert digest(other.memory()) == digest(model.memory())
    np.testing.assert_array_equal(weather(other)[0], weather(model)[0])


def test_one_expert_more_costs_neither_rows_nor_weights() -> None:
    _, model = driven(40)
    more = Load(("rack.power_w",), (MIN, 5 * MIN), experts="last,ewma5,linear")
    more.load(model.parameters())
    more.restore(model.memory())
    blend, was = more._blends["fine"], model._blends["fine"]
    np.testing.assert_array_equal(blend.panel().values, was.panel().values)
    for online, before in zip(blend.online, was.online, strict=True):
        np.testing.assert_array_equal(np.delete(online.weights(), 1, axis=1), before.weights())
        np.testing.assert_array_equal(online.weights()[:, 1], 0.0)
        np.testing.assert_array_equal(online.spans, before.spans)
    for one in (blend, was):
        one.append(one.row + 1, np.array([6e4, 5e4]), np.full(len(KNOWN), np.nan))
        assert np.isfinite(one.say({name: np.full((2, 2), np.nan) for name in one.more})[:, :, 1]).all()
    assert (blend.online[0]._heard == was.online[0]._heard).all()


def test_memory_of_two_experts_more_begins_afresh() -> None:
    _, model = driven(12)
    other = Load(("rack.power_w",), (MIN, 5 * MIN), experts="last,ewma5,ewma15,linear")
    other.restore(model.memory())
    assert other.memory() == {}
