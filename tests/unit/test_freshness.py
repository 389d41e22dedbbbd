"""Freshness: state, estimators, health and history agree on which readings are current."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes, two_racks
from twin.catalogue import NS, find_signal
from twin.estimation.readings import Latest, Readings
from twin.health.context import HealthContext
from twin.health.rules import DeviceRecords, RuleContext
from twin.run.history_sample import Layout, take_sample
from twin.telemetry import GOOD

GPU = {"gpu.power_w": 700.0, "gpu.temp_c": 50.0, "gpu.util_pu": 0.9, "rack.supply_temp_c": 30.0}
RACK = {"rack.power_w": 90e3, "rack.flow_lpm": 80.0, "rack.supply_temp_c": 30.0, "rack.return_temp_c": 46.0}


def good_of(twin: Twin, key: str) -> Any:
    """Return True where the state calls a signal good [n]."""
    signal = find_signal(key)
    assert signal is not None
    column = twin.engine.state.tables[signal.table]
    return column.quality_of(signal, twin.now_ns) == GOOD


def test_where_gpus_report_every_half_minute_the_estimator_uses_what_the_state_calls_good() -> None:
    twin = Twin(two_racks(periods_s={"gpu": 30.0}))
    twin.run(3, GPU)
    twin.tick(dt_s=60.0)
    assert good_of(twin, "gpu.power_w").all()
    measured = twin.engine.estimator.residuals["gpu.temp_c"].measured
    assert np.isfinite(measured).all()
    twin.tick(dt_s=40.0)
    assert not good_of(twin, "gpu.power_w").any()
    assert not np.isfinite(twin.engine.estimator.residuals["gpu.temp_c"].measured).any()


def test_where_racks_report_every_second_the_estimator_does_not_use_readings_of_five_minutes() -> None:
    twin = Twin(two_racks(periods_s={"rack": 1.0}))
    twin.run(3, RACK)
    assert np.isfinite(twin.engine.estimator.residuals["rack.heat"].measured).all()
    twin.tick(dt_s=290.0)
    assert not good_of(twin, "rack.power_w").any()
    assert not np.isfinite(twin.engine.estimator.residuals["rack.heat"].measured).any()


def test_the_period_of_a_signal_counts_before_that_of_its_table() -> None:
    twin = Twin(two_racks(periods_s={"gpu.power_w": 5.0, "gpu": 30.0}))
    twin.run(2, GPU)
    twin.tick(dt_s=20.0)
    assert good_of(twin, "gpu.temp_c").all()
    assert not good_of(twin, "gpu.power_w").any()


@pytest.mark.parametrize("after_s", [0.5, 3.0, 3.001, 29.9, 30.0, 30.1, 299.0, 301.0])
@pytest.mark.parametrize("periods_s", [{}, {"gpu": 10.0, "rack": 1.0}, {"rack.power_w": 0.1, "gpu": 1 / 3}])
def test_everybody_holds_the_same_readings_for_current(periods_s: dict[str, float], after_s: float) -> None:
    twin = Twin(two_racks(periods_s=periods_s))
    twin.tick(GPU | RACK)
    twin.tick({"rack.return_temp_c": [46.0, np.nan]}, dt_s=1e-3)
    twin.tick(dt_s=after_s)
    state, engine = twin.engine.state, twin.engine
    now = HealthContext(
        engine.site, state, engine.estimator, engine.diagnosis, engine.jobs, engine.windows, 1.0
    )
    health = engine.health
    look = RuleContext(now, DeviceRecords(health.book, health.rates, health.lemons, health.wear))
    sample = {t.table: t for t in take_sample(engine, Layout(engine.site), twin.now_ns).tables}
    for key in (*GPU, *RACK):
        signal, good = find_signal(key), good_of(twin, key)
        assert signal is not None
        latest = Latest(signal.table, (signal.name,))
        latest.take(state)
        current = {
            "estimator, by signal": np.isfinite(Readings(state).good(signal.table, signal.name)[0]),
            "estimator, by table": np.isfinite(latest[signal.name]),
            "health": look.now.fresh(key),
            "health, by entity": look.current(key, np.arange(len(good), dtype=np.int32)),
        }
        kept = sample[signal.table]
        current["history"] = np.isfinite(kept.value[kept.gauges.index(signal.name)])
        for who, theirs in current.items():
            assert theirs.tolist() == good.tolist(), (key, who, after_s * NS)


@pytest.mark.long
@pytest.mark.parametrize("period_s", [1, 5, 15])
def test_a_reading_is_late_as_soon_as_its_own_cadence_misses_the_next(period_s: int) -> None:
    """People see its age from then on, although it may still be good."""
    twin, signal = Twin(eight_nodes()), find_signal("gpu.temp_c")
    assert signal is not None
    column = twin.engine.state.tables["gpu"]

    def tick(second: int, stopped: bool) -> np.ndarray:
        first = np.where((np.arange(8) < 4) & stopped, np.nan, 50.0)
        twin.tick({"gpu.temp_c": first} if second % period_s == 0 else {})
        return column.late(signal, twin.now_ns)

    for second in range(40 * period_s):
        assert not tick(second, False).any(), "what comes in time is not late"
    late_s = next(s for s in range(60 * period_s) if tick(s, True)[:4].all())
    assert late_s <= max(3, 1.5 * period_s)
    assert not column.late(signal, twin.now_ns)[4:].any()
    assert column.limits(signal.row).stale_ns.min() >= late_s * NS, "it is not stale yet"


def test_no_other_module_compares_ages_with_periods() -> None:
    root = Path(__file__).resolve().parents[2]
    owner = root / "twin" / "telemetry" / "freshness.py"
    files = [f for top in ("twin", "policies", "models", "connectors") for f in (root / top).rglob("*.py")]
    pattern = re.compile(r"\b(STALE|DRIFT)_PERIODS\b|\bsignal\.period_s \*|\.period_s\[row\] \*")
    assert [f.name for f in files if f != owner and pattern.search(f.read_text("utf-8"))] == []
