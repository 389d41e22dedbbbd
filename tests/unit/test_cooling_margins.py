"""Margins in closed form: resistances, guards, powers and rises of GPUs and racks, and what teaches them."""

from __future__ import annotations

from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.cooling_setpoint import CoolingSetpoint, margins
from policies.cooling_setpoint.groups import groups_of
from policies.cooling_setpoint.margins import (
    DESIGN_S,
    DOUBT_K,
    DOUBT_PU,
    DOUBT_SIGMAS,
    ERROR_S,
    IDLE_PU,
    LATE_S,
    LOOK_PU,
    LOW_PU,
    MEMORY_S,
    MOST_RISE_K,
    PEAK_S,
    REACT_S,
    RESISTANCE_PU,
    SENSOR_K,
    SENSORS_K,
    SMOOTH_S,
    SPREAD_S,
    TOP_AFTER_S,
    TOP_S,
    ceilings,
    learn,
)
from policies.cooling_setpoint.sections import CduSection, section_of
from tests.support.builders import Twin
from tests.unit.test_cooling_obstacles import two_loops
from twin.contracts import Forecast, View
from twin.engine.plugin_checks import fresh_memory
from twin.telemetry import JobStarted

NAN = np.nan
GPUS, IDLE_W, MOST_W, RACK_MOST_W = 32, 200.0, 1200.0, 25_334.0  # of the liquid-cooled racks 1 to 4
DESIGN_K_PER_W, NOMINAL_LPM, SLEW_K_PER_S = 0.34 / 12.0, 12.0 + 7.0 / 9.0, 0.02
EVERY = np.arange(GPUS)


class Look:
    """A view, the fresh memory of the policy, and the section of all CDUs of a site."""

    def __init__(self, readings: dict[str, Any] | None = None, *events: Any) -> None:
        self.twin = Twin(two_loops())
        self.twin.tick({"rack.flow_lpm": NOMINAL_LPM} | (readings or {}), *events)
        self.view: View = self.twin.engine.view()
        self.section: CduSection = section_of(self.twin.site, groups_of(self.twin.site))
        self.memory = fresh_memory(CoolingSetpoint(), self.twin.site)

    def own(self, **columns: Any) -> dict[str, np.ndarray]:
        names = dict.fromkeys(margins.GPU_COLUMNS, 0.0) | columns
        return {name: np.broadcast_to(np.asarray(x, np.float64), (GPUS,)).copy() for name, x in names.items()}


def test_what_is_smoothed_begins_with_the_first_reading_and_keeps_what_is_missing() -> None:
    before, now = np.array([NAN, 10.0, 10.0, NAN]), np.array([4.0, 20.0, NAN, NAN])
    np.testing.assert_allclose(margins._smoothed(before, now, np.float64(0.25)), [4.0, 12.5, 10.0, NAN])


@pytest.mark.parametrize(("seconds", "rise_k"), [(0.0, 50.0), (DESIGN_S, 50.0), (3 * DESIGN_S, 20.0)])
def test_a_resistance_is_learned_around_the_design(seconds: float, rise_k: float) -> None:
    look, power_w = Look(), 1000.0
    own = look.own(s_py=seconds * power_w * rise_k, s_pp=seconds * power_w**2)
    got = margins.resistance_k_per_w(look.section, own)
    design, seen = DESIGN_S * MOST_W**2, seconds * power_w**2
    expected = (design * DESIGN_K_PER_W + seen * rise_k / power_w) / (design + seen)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_plate_is_compared_with_the_median_of_its_rack() -> None:
    look, rng = Look(), np.random.default_rng(5)
    for unknown_pu in (0.0, 0.3, 0.8):
        resistance = np.where(rng.random(GPUS) < unknown_pu, NAN, rng.uniform(0.02, 0.04, GPUS))
        resistance[:8] = NAN if unknown_pu > 0.5 else resistance[:8]
        got = margins._of_rack(look.section, resistance)
        for rack in range(4):
            mine = slice(8 * rack, 8 * rack + 8)
            known = resistance[mine][np.isfinite(resistance[mine])]
            np.testing.assert_allclose(got[mine], np.median(known) if len(known) else NAN)


@pytest.mark.parametrize(
    ("error_k", "error_k2", "peak_w", "trough_w", "sign"),
    [
        (DOUBT_K + 0.1, 0.0, 1000.0, 1000.0, 1),
        (DOUBT_K - 0.1, 0.0, 1000.0, 1000.0, 0),
        (-DOUBT_K - 0.1, 0.0, 1000.0, 1000.0, -1),
        (-DOUBT_K + 0.1, 0.0, 1000.0, 1000.0, 0),
        (DOUBT_SIGMAS * 2.0 + 0.1, 4.0 / LOOK_PU, 1000.0, 1000.0, 1),  # differences that swing tell less
        (DOUBT_SIGMAS * 2.0 - 0.1, 4.0 / LOOK_PU, 1000.0, 1000.0, 0),
        (3.9, 0.0, 1200.0, 1000.0, 0),  # power was up to 200 W higher of late: 4 K
        (4.1, 0.0, 1200.0, 1000.0, 1),
        (-3.9, 0.0, 1000.0, 800.0, 0),
        (-4.1, 0.0, 1000.0, 800.0, -1),
        (-3.9, 0.0, 1200.0, 1000.0, -1),
        (3.9, 0.0, 1000.0, 800.0, 1),
        (NAN, 0.0, 1000.0, 1000.0, 0),
    ],
)
def test_a_temperature_contradicts_its_power_where_no_power_of_late_explains_it(
    error_k: float, error_k2: float, peak_w: float, trough_w: float, sign: int
) -> None:
    """With 0.02 K/W, at 1000 W."""
    own = Look().own(error_k=error_k, error_k2=error_k2, peak_w=peak_w, trough_w=trough_w, power_w=1000.0)
    assert (margins._contradicts(own, np.full(GPUS, 0.02)) == sign).all()


@pytest.mark.parametrize(
    ("learned", "usual", "rise_k", "error_k", "expected"),
    [
        (0.02, 0.02, 20.0, 0.0, 0.02),
        (0.02, 0.03, 20.0, 0.0, LOW_PU * 0.03),  # no plate is that much better than those beside it
        (NAN, 0.03, 20.0, 0.0, LOW_PU * 0.03),
        (0.02, 0.02, 28.0, 8.0, 0.028),  # clearly warmer: as of now
        (0.02, 0.02, 28.0, 1.0, 0.02),
        (0.02, 0.03, 25.0, 5.0, LOW_PU * 0.03),  # and yet colder than what is feared
    ],
)
def test_a_resistance_is_feared_as_it_was_learned_or_as_it_is_now(
    learned: float, usual: float, rise_k: float, error_k: float, expected: float
) -> None:
    own = Look().own(power_w=1000.0, peak_w=1000.0, trough_w=1000.0, rise_k=rise_k, error_k=error_k)
    got = margins._feared(own, np.full(GPUS, learned), np.full(GPUS, usual))
    np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize(
    ("hbm_k", "margin_k", "expected_c"),
    [
        (NAN, NAN, 82.0),
        (-5.0, NAN, 82.0),
        (5.0, NAN, 82.0),
        (15.0, NAN, 75.0),
        (5.0, 20.0, 75.0),
        (15.0, 30.0, 75.0),
    ],
)
def test_a_gpu_keeps_its_guards_and_those_of_its_memory(
    hbm_k: float, margin_k: float, expected_c: float
) -> None:
    """Guards at 82 degC, 90 degC of the memory, and 5 K of margin, at 60 degC."""
    look = Look({"gpu.temp_c": 60.0, "gpu.thermal_margin_k": margin_k})
    np.testing.assert_allclose(
        margins._guard_c(look.view, look.own(hbm_rise_k=hbm_k), look.section), expected_c
    )


def test_coolant_is_lowered_at_once_for_several_gpus_beyond_their_guard_and_not_for_one() -> None:
    hot_c = np.full(40, 60.0)
    hot_c[[3, 8, 9, 24]] = [90.0, 85.0, 86.0, 82.0]  # one of rack 1, two of rack 2, one of rack 4 just at it
    look = Look({"gpu.temp_c": hot_c, "rack.supply_temp_c": 32.0})
    got = margins._now_c(look.view, look.section, np.full(GPUS, 82.0))
    expected = np.full(GPUS, np.inf)
    expected[[8, 9]] = [32.0 - 3.0, 32.0 - 4.0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def with_forecast(look: Look, *bands: tuple[str, float, float, float]) -> View:
    for key, horizon_s, mean, hi in bands:
        columns = (np.full(5, x, np.float32) for x in (mean, mean, hi))
        look.twin.engine.forecasts[key, horizon_s] = Forecast(key, horizon_s, *columns, "test")
    return look.twin.engine.view()


@pytest.mark.parametrize(
    ("bands", "growth"),
    [
        ([], NAN),
        ([("rack.power_w", 900.0, 15e3, 15e3)], 1.5),
        ([("rack.power_w", 900.0, 5e3, 5e3)], 1.0),
        ([("rack.power_w", 900.0, 15e3, 17e3)], 1.7),
        ([("rack.power_w", 3601.0, 15e3, 15e3)], NAN),
        ([("rack.power_w", 3600.0, 15e3, 15e3)], 1.5),
        ([("gpu.power_w", 900.0, 15e3, 15e3)], NAN),
        # Load that comes later leaves time to go colder: since the nearer forecast, less what a loop needs
        ([("rack.power_w", 900.0, 11e3, 11e3), ("rack.power_w", 3600.0, 15e3, 15e3)],
         1.5 - SLEW_K_PER_S * (900.0 - REACT_S) / MOST_RISE_K),
        ([("rack.power_w", 100.0, 11e3, 11e3), ("rack.power_w", 900.0, 15e3, 15e3)], 1.5),
        ([("rack.power_w", 900.0, NAN, NAN), ("rack.power_w", 3600.0, 15e3, 15e3)], 1.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_at_work_grows_with_its_racks_forecast_and_an_idle_one_may_take_all(
    bands: list[Any], growth: float, works: bool
) -> None:
    """Racks drew 10 kW at most of late, GPUs 700 W; the quantile is that of the band."""
    look = Look()
    view = with_forecast(look, *bands)
    look.memory["rack_peak_w"][:] = 10e3
    line_w = IDLE_W + IDLE_PU * (MOST_W - IDLE_W)
    own = look.own(peak_w=700.0, power_w=line_w + (1.0 if works else -1.0))
    z = NormalDist().inv_cdf(0.95)
    most_w, grown = margins._most_w(view, look.memory, own, look.section, z, 3600.0)
    np.testing.assert_allclose(grown, np.full(4, growth), rtol=1e-5)
    known = works and np.isfinite(growth)
    np.testing.assert_allclose(most_w, min(700.0 * growth, MOST_W) if known else MOST_W, rtol=1e-5)


def test_a_wider_quantile_needs_more_of_the_band() -> None:
    look = Look()
    view = with_forecast(look, ("rack.power_w", 900.0, 10e3, 12e3))
    look.memory["rack_peak_w"][:] = 10e3
    own = look.own(peak_w=700.0, power_w=700.0)
    z90 = NormalDist().inv_cdf(0.95)
    for z, growth in ((2.0 * z90, 1.4), (0.5 * z90, 1.2)):
        assert margins._most_w(view, look.memory, own, look.section, z, 3600.0)[1] == pytest.approx(growth)


def test_no_gpu_is_expected_to_draw_more_than_any_was_seen_to_after_a_day() -> None:
    look = Look()
    look.memory["top_w"][:], look.memory["top_s"][:] = 900.0, [TOP_AFTER_S, TOP_AFTER_S - 1.0, 1e9, 0.0, 0.0]
    most_w, _ = margins._most_w(look.view, look.memory, look.own(), look.section, 1.0, 3600.0)
    np.testing.assert_allclose(most_w.reshape(4, 8)[:, 0], [900.0, MOST_W, 900.0, MOST_W])


def test_a_gpu_without_a_job_may_get_one_at_any_time() -> None:
    names = tuple(f"lab/h/r1/node{i}" for i in range(2))
    look = Look(None, JobStarted(id="j", job="j", nodes=names, kind="training"))
    view = with_forecast(look, ("rack.power_w", 900.0, 10e3, 10e3))
    look.memory["rack_peak_w"][:] = 10e3
    own = look.own(peak_w=700.0, power_w=700.0)
    most_w, _ = margins._most_w(view, look.memory, own, look.section, 1.0, 3600.0)
    np.testing.assert_allclose(most_w, np.where(EVERY < 8, 700.0, MOST_W), rtol=1e-5)


@pytest.mark.parametrize(
    ("growth", "slower", "rise_k", "flow_pu", "expected_c"),
    [
        (1.0, 1.0, 0.0, 1.0, 62.0 - 10.0),
        (2.0, 1.0, 0.0, 1.0, 62.0 - 20.0),
        (NAN, 1.0, 0.0, 1.0, 62.0 - RACK_MOST_W / 1e3),
        (9.0, 1.0, 0.0, 1.0, 62.0 - RACK_MOST_W / 1e3),
        (2.0, 1.0, 0.0, 0.8, 62.0 - 20.0 / 0.8),
        (2.0, 0.8, 0.0, 1.0, 62.0 - 20.0 / 0.8),
        (1.0, 1.0, 30.0, 1.0, 62.0 - 30.0),  # it rises by more now
        (0.5, 1.0, 0.0, 1.0, 43.0),  # the guard of the supply
    ],
)
def test_a_rack_keeps_its_guards_with_the_rise_that_its_power_makes(
    growth: float, slower: float, rise_k: float, flow_pu: float, expected_c: float
) -> None:
    """A kelvin per kW was learned at nominal flow, and 10 kW were the most of late."""
    look = Look({"rack.flow_lpm": flow_pu * NOMINAL_LPM})
    state = {"rack_peak_w": 10e3, "rack_rise_k": rise_k, "rack_s_k": 5.0, "rack_s_w": 5e3}
    for name, value in state.items():
        look.memory[name][:] = value
    got = margins._rack_c(look.view, look.memory, look.section, np.full(4, growth), slower)
    np.testing.assert_allclose(got, min(expected_c, 43.0), rtol=1e-4)


def test_a_ceiling_is_the_guard_less_the_rise_and_what_is_not_known_of_it() -> None:
    """GPUs of the design at their most, with a probability of 1 in 1000; rack 2 has a hotter plate."""
    look = Look({"rack.flow_lpm": NOMINAL_LPM})
    z = NormalDist().inv_cdf(0.999)
    look.memory["over_k2"][:] = 0.16
    look.memory["s_py"][11], look.memory["s_pp"][11] = 1e12 * 0.034, 1e12
    look.memory["rack_s_k"][:], look.memory["rack_s_w"][:] = 0.5, 1e3
    found = ceilings(look.view, look.memory, look.section, 1e-3, 3600.0)
    supply_k2 = 0.16 + SENSORS_K**2

    def expected_c(resistance: float) -> float:
        noise_k2 = (RESISTANCE_PU * resistance * MOST_W) ** 2 + SENSOR_K**2 + supply_k2
        return 82.0 - resistance * MOST_W - z * float(np.sqrt(noise_k2))

    rack_c = 43.0 - z * float(np.sqrt(supply_k2))
    of_gpu = expected_c(DESIGN_K_PER_W)
    assert of_gpu > rack_c
    np.testing.assert_allclose(found.supply_c, [rack_c, expected_c(0.034), rack_c, rack_c, np.inf], rtol=1e-4)
    assert found.gpu.tolist() == [-1, 11, -1, -1, -1]
    assert found.rack.tolist() == [0, -1, 2, 3, -1]
    assert found.doubted.tolist() == [*[True] * GPUS, *[False] * 8], "nothing was heard of any"


@pytest.mark.parametrize("accused", [False, True])
def test_a_gpu_whose_power_is_doubted_counts_with_the_most_and_no_better_plate_than_usual(
    monkeypatch: pytest.MonkeyPatch, accused: bool
) -> None:
    """All of rack 2 draw 700 W at most; the plate of one seems good, as its power reads too high."""
    look = Look({"rack.flow_lpm": NOMINAL_LPM})
    view = with_forecast(look, ("rack.power_w", 900.0, 10e3, 10e3))
    look.memory["rack_peak_w"][:], look.memory["peak_w"][:], look.memory["power_w"][:] = 10e3, 700.0, 700.0
    rack_2 = slice(8, 16)
    look.memory["s_py"][rack_2], look.memory["s_pp"][rack_2] = 1e12 * 0.04, 1e12
    look.memory["s_py"][11] = 1e12 * 0.02
    fault = SimpleNamespace(table="gpu", signal="power_w", kind="sensor_biased", entity=11)
    monkeypatch.setattr(type(view), "faults", lambda self: [fault] if accused else [])
    found = ceilings(view, look.memory, look.section, 1e-3, 3600.0)
    assert (found.gpu[1] == 11) == accused
    if accused:
        assert 82.0 - 0.04 * MOST_W - 3.0 < found.supply_c[1] < 82.0 - 0.04 * MOST_W


@pytest.mark.parametrize("dt_s", [10.0, 60.0])
def test_readings_teach_each_column_at_its_own_pace(dt_s: float) -> None:
    """From a state of late: 600 W at 20 K, now 900 W at 30 K above coolant of 32 degC."""
    of_gpus = {"gpu.power_w": 900.0, "gpu.temp_c": 62.0, "gpu.hbm_temp_c": 70.0}
    of_racks = {"rack.supply_temp_c": 32.0, "rack.power_w": 9e3, "rack.return_temp_c": 40.0}
    look = Look({"cdu.supply_temp_setpoint_c": 31.0} | of_gpus | of_racks)
    before = {"power_w": 600.0, "rise_k": 20.0, "s_py": 1e6, "s_pp": 5e7, "error_k": 1.0, "error_k2": 2.0,
              "peak_w": 1100.0, "trough_w": 500.0, "hbm_rise_k": 12.0, "top_w": 850.0, "top_s": 100.0,
              "late_c": 33.0, "over_k2": 0.5, "rack_peak_w": 12e3, "rack_w": 8e3, "rack_rise_k": 7.0,
              "rack_s_k": 40.0, "rack_s_w": 6e4}  # fmt: skip
    for name, value in before.items():
        look.memory[name][:] = value
    got = learn(look.view, look.memory, look.section, np.full(4, dt_s))

    def toward(name: str, now: float, span_s: float) -> float:
        return now + (before[name] - now) * float(np.exp(-dt_s / span_s))

    power_w, rise_k = toward("power_w", 900.0, SMOOTH_S), toward("rise_k", 30.0, SMOOTH_S)
    keep, design = float(np.exp(-dt_s / MEMORY_S)), DESIGN_S * MOST_W**2
    resistance = (1e6 + design * DESIGN_K_PER_W) / (5e7 + design)
    off_k = 30.0 - 900.0 * resistance
    error_k = toward("error_k", off_k, ERROR_S)
    late_c = toward("late_c", 31.0, LATE_S)
    rack_w = toward("rack_w", 9e3, SMOOTH_S)
    expected = {
        "power_w": power_w, "rise_k": rise_k, "s_py": keep * 1e6 + dt_s * power_w * rise_k,
        "s_pp": keep * 5e7 + dt_s * power_w**2, "error_k": error_k,
        "error_k2": toward("error_k2", (off_k - error_k) ** 2, ERROR_S),
        "peak_w": toward("peak_w", power_w, PEAK_S), "trough_w": toward("trough_w", power_w, PEAK_S),
        "hbm_rise_k": toward("hbm_rise_k", 8.0, PEAK_S), "top_w": 900.0, "top_s": 100.0 + dt_s,
        "late_c": late_c,
        "over_k2": toward("over_k2", 2.0 * max(32.0 - late_c, 0.0) ** 2, SPREAD_S), "rack_w": rack_w,
        "rack_peak_w": toward("rack_peak_w", rack_w, PEAK_S),
        "rack_rise_k": toward("rack_rise_k", 8.0, SMOOTH_S),
        "rack_s_k": keep * 40.0 + dt_s * 8.0, "rack_s_w": keep * 6e4 + dt_s * 9e3,
    }  # fmt: skip
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        n = GPUS if name in margins.GPU_COLUMNS else 4
        np.testing.assert_allclose(got[name][:n], value, rtol=1e-4, err_msg=name)
        if name not in margins.CDU_COLUMNS:
            assert (got[name][n:] == before[name]).all(), "what is cooled by air learns nothing"


@pytest.mark.long
@pytest.mark.parametrize("lost", margins.SET_POINTS)
def test_a_lost_reading_of_a_set_point_changes_nothing_that_is_remembered(lost: str) -> None:
    """The BMS's own set point is warmer than the final one, which came down from 33 degC."""
    final, own = margins.SET_POINTS
    look = Look({final: 31.0, own: 36.0, "rack.supply_temp_c": 32.5})
    look.memory["late_c"][:], look.memory["over_k2"][:] = 33.0, 0.5
    columns = ("late_c", "over_k2")

    def learned() -> list[float]:
        got = learn(look.twin.engine.view(), look.memory, look.section, np.full(4, 10.0))
        return [float(got[name][0]) for name in columns]

    heard = learned()
    assert heard[0] == pytest.approx(31.0 + 2.0 * np.exp(-10.0 / LATE_S))
    look.twin.tick({lost: NAN})
    assert learned() == heard, "one reading is lost"
    for _ in range(400):
        look.twin.tick({final: NAN, own: NAN, "rack.supply_temp_c": 32.5})
    late_c, over_k2 = learned()
    assert np.isnan(late_c), "a set point that is silent for longer than its cadence allows begins anew"
    assert over_k2 == 0.5, "and teaches nothing"


def test_what_is_not_read_teaches_nothing() -> None:
    look = Look({"gpu.power_w": np.where(np.arange(40) == 0, 500.0, NAN)})
    for name in (
        "power_w",
        "rise_k",
        "s_py",
        "s_pp",
        "error_k",
        "error_k2",
        "peak_w",
        "trough_w",
        "hbm_rise_k",
    ):
        look.memory[name][:] = 7.0
    look.memory["top_w"][:], look.memory["late_c"][:], look.memory["over_k2"][:] = 450.0, 33.0, 0.5
    got = learn(look.view, look.memory, look.section, np.full(4, 100.0))
    keep = np.exp(-100.0 / MEMORY_S)
    for name, value in (("power_w", 7.0), ("rise_k", 7.0), ("s_py", keep * 7.0), ("s_pp", keep * 7.0),
                        ("error_k", 7.0), ("error_k2", 7.0), ("hbm_rise_k", 7.0)):  # fmt: skip
        np.testing.assert_allclose(got[name][:GPUS], value, err_msg=name)
    assert got["peak_w"][0] == 500.0
    assert (got["peak_w"][1:GPUS] == 7.0).all()
    fade = np.exp(-100.0 / TOP_S)
    np.testing.assert_allclose(got["top_w"][:4], [500.0, *[450.0 * fade] * 3])
    assert got["top_s"].tolist() == [100.0, 0.0, 0.0, 0.0, 0.0]
    assert np.isnan(got["late_c"][:4]).all(), "a set point that is not told begins anew"
    assert (got["over_k2"] == 0.5).all()


def test_a_temperature_is_doubted_where_it_is_unknown_or_no_plate_is_that_good() -> None:
    known = np.where(np.arange(40) == 5, NAN, 60.0)
    node_on = np.where(np.arange(9) == 3, 0.0, 1.0)  # node 1 of rack 2 is off
    supply_c = [32.0, 32.0, NAN, 32.0, 32.0]
    look = Look({"gpu.temp_c": known, "gpu.power_w": 500.0, "rack.supply_temp_c": supply_c,
                 "node.power_on_state": node_on})  # fmt: skip
    own = look.own(power_w=500.0, peak_w=500.0, trough_w=500.0)
    usual = np.full(GPUS, 0.03)
    learned = np.where(
        EVERY == 25, 0.99 * DOUBT_PU * 0.03, np.where(EVERY == 26, 1.01 * DOUBT_PU * 0.03, 0.03)
    )
    own["error_k"][[12, 27]] = 9.0
    got = margins._doubted(look.view, own, look.section, (learned, usual))
    assert np.flatnonzero(got).tolist() == [5, *range(16, 24), 25, 27]
