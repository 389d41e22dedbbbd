"""Known events enter the forecasts: jobs that end at their limits, and outlooks from outside.

Neither is believed before it came true, and both are while it does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from models.load import Load
from models.load.model import HORIZONS_S, SIGNALS
from tests.support.builders import Twin, two_racks
from twin.catalogue import F64, NS
from twin.telemetry import events as ev

MIN, HOUR, DAY = 60.0, 3600.0, 86_400.0
PRICE, CARBON = "site.grid_price_usd_per_kwh", "site.grid_carbon_g_per_kwh"
FEW = "last,ewma5,ewma60,climatology"
IDLE_W, BUSY_W, TRAYS = 1000.0, 5500.0, 18


def trust(model: Load, key: str, horizon_s: float, name: str) -> float:
    """Weight of an expert in the newest forecast of a quantity."""
    for blend in model._blends.values():
        rows = [round(h * blend.grid.step_s) for h in blend.grid.horizons]
        if round(horizon_s) in rows:
            weights = blend.online[rows.index(round(horizon_s))].weights()[model._slices[key]]
            return float(weights[:, blend.names.index(name)].mean())
    raise AssertionError(f"no horizon of {horizon_s} s")


class Pod:
    """Two racks that run one job at a time, some minutes each, with a limit at which it is stopped."""

    KEYS = ("rack.power_w", "cdu.heat_w", "feeder.power_w", "site.power_w", "site.gpu_demand_count")

    def __init__(
        self,
        keys: tuple[str, ...] = KEYS,
        horizons_s: tuple[float, ...] = (15 * MIN,),
        limits_hold: bool = True,
        seed: int = 0,
    ) -> None:
        self.model = Load(keys, horizons_s, experts=FEW)
        self.twin = Twin(two_racks(max_jobs=64), models=[self.model])
        self.rng, self.limits_hold = np.random.default_rng(seed), limits_hold
        self.nodes = tuple(f"lab/h/{r}/node{i}" for r in ("r1", "r2") for i in range(TRAYS))

    def minute(self, busy: bool, *events: ev.Event) -> None:
        work_w = (BUSY_W - IDLE_W) * busy
        node_w = IDLE_W + work_w + self.rng.normal(0, 20, 2 * TRAYS)
        rack_w = node_w.reshape(2, TRAYS).sum(axis=1) + 2000.0
        total_w = rack_w.sum()
        self.twin.tick(
            {
                "node.power_w": node_w,
                "rack.power_w": rack_w,
                "feeder.power_w": total_w / 2,
                "cdu.flow_lpm": 200.0,
                "cdu.supply_temp_c": 30.0,
                "cdu.return_temp_c": 30.0 + 0.85 * total_w / (200.0 / 60_000 * 1012.0 * 3950.0),
                "site.gpu_running_count": 144.0 * busy,
                "site.gpu_pending_count": 0.0,
            },
            *events,
            dt_s=MIN,
        )

    def cycle(self, number: int) -> Iterator[int]:
        """A job of 20 to 39 minutes, and 10 to 16 without; yields minutes to its limit, before its end."""
        lasts = int(self.rng.integers(20, 40))
        limit_s = lasts * MIN if self.limits_hold else float(self.rng.integers(2, 40)) * MIN
        start = ev.JobStarted(id=f"s{number}", job=f"j{number}", nodes=self.nodes, time_limit_s=limit_s)
        for minute in range(lasts):
            self.minute(True, *([start] if minute == 0 else []))
            yield lasts - minute
        self.minute(False, ev.JobEnded(id=f"e{number}", job=f"j{number}"))
        for _ in range(int(self.rng.integers(10, 17))):
            self.minute(False)


def test_before_a_limit_every_level_of_the_site_is_told_of_the_fall() -> None:
    pod = Pod(horizons_s=(5 * MIN, 15 * MIN))
    for left in pod.cycle(0):
        if left == 10:
            break
    view = pod.twin.engine.view(MIN)
    said = pod.model._from_outside(pod.model._blends["fine"], view)["schedule"]
    newest = pod.model._blends["fine"].panel(1).values[-1]
    falls_w = {key: (newest - said[1])[part] for key, part in pod.model._slices.items()}
    work_w = TRAYS * (BUSY_W - IDLE_W)
    assert falls_w["rack.power_w"] == pytest.approx([work_w] * 2, rel=0.02)
    assert falls_w["feeder.power_w"] == pytest.approx([work_w] * 2, rel=0.02)
    assert falls_w["site.power_w"] == pytest.approx([2 * work_w], rel=0.02)
    capture_pu = pod.twin.site.design.capture_pu[0]
    assert falls_w["cdu.heat_w"] == pytest.approx([2 * work_w * capture_pu], rel=0.02)
    assert falls_w["site.gpu_demand_count"] == [144.0]
    # Within five minutes no job ends: the schedule says nothing
    assert np.isnan(said[0][pod.model._slices["rack.power_w"]]).all()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.long
def test_limits_that_hold_teach_the_blend_when_jobs_end() -> None:
    """After twenty endings, a forecast across an end is far better than that all stays as it is."""
    pod = Pod(("site.power_w", "site.gpu_demand_count"))
    errors, naive = dict[str, list[float]](), dict[str, list[float]]()
    trusted, basis = dict[tuple[str, str], float](), ""
    for number in range(20):
        asked: dict[str, tuple[float, float]] = {}
        for left in pod.cycle(number):
            if left == 10:
                for key in pod.model.signals:
                    mean = float(pod.twin.engine.forecasts[key, 15 * MIN].mean[0])
                    asked[key] = (mean, float(pod.model._present[pod.model._slices[key]][0]))
                    for name in ("schedule", "last"):  # which sleeps where no job ends
                        trusted[key, name] = trust(pod.model, key, 15 * MIN, name)
                basis = pod.twin.engine.forecasts["site.power_w", 15 * MIN].basis
        if number >= 14:
            for key, (mean, before) in asked.items():
                now = float(pod.model._present[pod.model._slices[key]][0])
                errors.setdefault(key, []).append(abs(mean - now))
                naive.setdefault(key, []).append(abs(before - now))
    assert pod.twin.engine.suspended == {}
    for key in pod.model.signals:
        assert np.mean(naive[key]) > 100.0
        assert np.mean(errors[key]) < 0.35 * np.mean(naive[key]), (key, errors[key])
        assert trusted[key, "schedule"] > trusted[key, "last"]
    assert "schedule" in basis


@pytest.mark.long
def test_limits_that_mean_nothing_are_not_believed() -> None:
    pod, trusted = Pod(("site.power_w",), limits_hold=False), 1.0
    for number in range(8):
        for left in pod.cycle(number):
            if left == 10:
                trusted = trust(pod.model, "site.power_w", 15 * MIN, "schedule")
    assert trusted < 0.3


def day_ahead(number: int, key: str, start_ns: int, values: F64) -> ev.OutlookTold:
    return ev.OutlookTold(
        id=f"{key}{number}", author="market", quantity=key, start_ns=start_ns, step_s=HOUR,
        values=tuple(float(v) for v in values),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("true", [True, False], ids=["true", "false"])
def test_prices_that_were_told_are_trusted_while_they_come_true(true: bool) -> None:
    """Random hourly prices, told a day ahead; what is told of carbon is always too much."""
    model = Load((PRICE, CARBON), (HOUR, 6 * HOUR), experts="last,ewma5,seasonal_day")
    twin = Twin(two_racks(), models=[model])
    twin.now_ns += -twin.now_ns % round(DAY * NS)
    rng = np.random.default_rng(2)
    hours = 24 * 9
    prices, carbon = rng.uniform(0.02, 0.3, (2, hours + 48))
    begin_ns = twin.now_ns
    worst = 0.0
    for hour in range(hours):
        events = []
        if hour % 24 == 0:
            told = prices[hour : hour + 48] if true else prices[hour : hour + 48] + 0.3
            at_ns = begin_ns + round(hour * HOUR * NS)
            events = [
                day_ahead(hour, PRICE, at_ns, told),
                day_ahead(hour, CARBON, at_ns, 1000.0 * (carbon[hour : hour + 48] + 0.3)),
            ]
        twin.tick({PRICE: prices[hour], CARBON: 1000.0 * carbon[hour]}, *events, dt_s=HOUR)
        if true and hour > 24 * 7 and hour % 24 < 17:
            for horizon_s, rows in ((HOUR, 1), (6 * HOUR, 6)):
                off = twin.engine.forecasts[PRICE, horizon_s].mean[0] - prices[hour + rows]
                worst = max(worst, abs(float(off)))
    assert twin.engine.suspended == {}
    for horizon_s in (HOUR, 6 * HOUR):
        if true:
            assert trust(model, PRICE, horizon_s, "outlook") > 0.6
        else:
            assert trust(model, PRICE, horizon_s, "outlook") < 0.3
        assert trust(model, CARBON, horizon_s, "outlook") < 0.3
    # Prices differ by 0.1 on average: what is said is the price of that very hour.
    assert worst < 0.1


@pytest.mark.long
def test_all_default_quantities_are_forecast_from_what_is_measured() -> None:
    model = Load(experts=FEW)
    twin = Twin(two_racks(), models=[model])
    rng = np.random.default_rng(1)
    for _ in range(110):
        wave = 1.0 + 0.01 * rng.normal()
        twin.tick(
            {
                "rack.power_w": 60e3 * wave,
                "feeder.power_w": 60e3 * wave,
                "cdu.flow_lpm": 200.0,
                "cdu.supply_temp_c": 30.0,
                "cdu.return_temp_c": 38.1 + 0.1 * rng.normal(),
                "site.gpu_running_count": 100.0,
                "site.gpu_pending_count": float(rng.integers(0, 5)),
                "site.requests_per_s": 800.0 * wave,
                PRICE: 0.1 * wave,
                CARBON: 300.0 * wave,
            },
            dt_s=MIN,
        )
    assert twin.engine.suspended == {}
    assert {key for key, _ in twin.engine.forecasts} == set(SIGNALS)
    expected = {
        "rack.power_w": 60e3, "feeder.power_w": 60e3, "site.power_w": 120e3, PRICE: 0.1, CARBON: 300.0,
        "site.requests_per_s": 800.0, "site.gpu_demand_count": 102.0,
        "cdu.heat_w": 200 / 60_000 * 1012.0 * 3950.0 * 8.1,
    }  # fmt: skip
    for key, value in expected.items():
        for horizon_s in HORIZONS_S:
            forecast = twin.engine.forecasts[key, horizon_s]
            assert forecast.mean == pytest.approx(np.full(len(forecast.mean), value), rel=0.04)
            assert forecast.basis
            if horizon_s < 15 * MIN:  # a longer band needs more than these 110 minutes
                assert (forecast.hi > forecast.lo).all()
                assert (forecast.hi - forecast.lo < 0.2 * value).all()
