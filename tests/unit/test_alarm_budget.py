"""The stated false-alarm rate holds for synthetic noise on the real boards, and moves every threshold.

Chances are high here, so that thousands of errors come in seconds. May import `twin`.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.support.builders import Twin, site_of, two_racks
from twin.catalogue import NS, TABLES
from twin.contracts import confidence_of
from twin.diagnosis import AlarmBudget, Topology, growth as growth_module, lasting_sigmas
from twin.diagnosis.alarm_budget import (
    CORRELATION,
    CRITICAL,
    CRITICAL_PU,
    SHARES,
    rare_count,
    run_log,
    sum_threshold,
    surprise,
    widening,
)
from twin.diagnosis.cusum import ALLOWANCE, LEAST_CERTAIN, CusumBoard, DeviationTrack
from twin.diagnosis.deviations import Tracks
from twin.diagnosis.devices import DeviceFaults
from twin.diagnosis.growth import EVERY_S, Growth
from twin.diagnosis.sensor_checks import (
    JUMPS_KEPT,
    LEAP_PU,
    SETTLED,
    WATCHED,
    Bank,
    CheckLogs,
    SensorChecks,
    traits_of,
)
from twin.telemetry import State

RATES = (1.0, 0.05, 0.0005, 1e-5, 1e-9)


def noise(rng: np.random.Generator, n: int, readings: int, correlation: float) -> Any:
    """Columns [n] of unit noise, one reading at a time."""
    z = rng.normal(size=n)
    for _ in range(readings):
        z = correlation * z + np.sqrt(1.0 - correlation**2) * rng.normal(size=n)
        yield z.astype(np.float32)


@pytest.mark.parametrize("chance", [2e-3, 2e-4])
@pytest.mark.parametrize("correlation", [0.0, CORRELATION])
def test_sums_of_noise_err_as_often_as_stated(chance: float, correlation: float) -> None:
    n, readings, erred = 20_000, 150, 0
    board = CusumBoard(1, n)
    board.certain[:] = sum_threshold(chance, ALLOWANCE)
    for z in noise(np.random.default_rng(5), n, readings, correlation):
        board.update(z[None].copy(), None, slice(0, n), NS)
        erred += int(np.count_nonzero(board.on))
        board.sums[:, board.on != 0] = 0.0  # each begins again
        board.on[:] = 0
    rate = erred / (n * readings)
    assert rate <= chance
    assert rate >= chance / 4.0 or not correlation, "nor is detection given away"


@pytest.mark.parametrize("steps", [0.55, 0.8, 2.0, 50.0])
def test_gauges_in_steps_stand_still_by_chance_as_often_as_stated(steps: float) -> None:
    """Noise of so many steps of the gauge, about a true value anywhere between two steps."""
    chance, n, readings = 3e-4, 4000, 700
    traits = traits_of("rack", CheckLogs(run_log(chance), 99.0))
    kept = {name: np.repeat(v[:1], n) for name, v in traits.items()}
    kept |= {
        "run_least": np.full(n, 2, np.int32),
        "least_run": np.full(n, 2, np.int32),
        "least": np.full(n, -np.inf, np.float32),
    }
    bank, rng, begun = Bank(1, n, kept, flat=True), np.random.default_rng(6), 0
    true = 1000.0 + rng.uniform(size=n)
    was = np.zeros((1, n), np.bool_)
    for k in range(readings):
        value = np.rint(true + steps * rng.normal(size=n)).astype(np.float32)[None]
        with np.errstate(all="ignore"):
            bank.update(value, None, slice(0, n))
        begun += int(np.count_nonzero(bank.frozen & ~was)) * (k >= 2 * SETTLED)
        was = bank.frozen.copy()
    assert begun / (n * (readings - 2 * SETTLED)) <= 1.3 * chance


@pytest.mark.parametrize("leaps_pu", [0.02, 0.005])
def test_rare_leaps_come_together_by_chance_as_often_as_stated(leaps_pu: float) -> None:
    chance, n, readings, begun = 1e-3, 4000, 400, 0
    traits = traits_of("rack", CheckLogs())
    kept = {name: np.repeat(v[:1], n) for name, v in traits.items()}
    kept["jumps"] = np.full(n, rare_count(run_log(chance), leaps_pu / (1.0 - JUMPS_KEPT)), np.float32)
    bank, rng, was = Bank(1, n, kept, flat=True), np.random.default_rng(7), np.zeros((1, n), np.bool_)
    for k in range(readings):
        value = 50_000.0 + 10.0 * rng.normal(size=n)
        value[rng.random(n) < leaps_pu * (k > SETTLED)] += 30_000.0
        with np.errstate(all="ignore"):
            bank.update(value.astype(np.float32)[None], None, slice(0, n))
        begun += int(np.count_nonzero(bank.jumping & ~was)) * (k > 2 * SETTLED)
        was = bank.jumping.copy()
    rate = begun / (n * (readings - 2 * SETTLED))
    assert chance / 100.0 <= rate <= chance


def test_counters_of_healthy_devices_grow_by_chance_as_often_as_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = dataclasses.replace(growth_module.COUNTED[1], least=1e-6)
    monkeypatch.setattr(growth_module, "COUNTED", (few,))
    monkeypatch.setattr(growth_module, "UNUSUAL", 0.0)
    site, rng, chance = site_of(two_racks()), np.random.default_rng(8), 1e-3
    n, begun, looks = site.sizes["gpu"], 0, 3000
    counters = Growth(site, AlarmBudget(site))
    counters._chance_log = run_log(chance)
    state, was = State(site.sizes), set[int]()
    total = state.tables["gpu"].total[TABLES["gpu"].by_name["ecc_sbe_count"].row]
    per_look = rng.uniform(0.02, 0.5, n)
    counters.usual["gpu.ecc_sbe_count"] = per_look / EVERY_S
    counters.last["gpu.ecc_sbe_count"], counters.recent["gpu.ecc_sbe_count"] = total.copy(), np.zeros(n)
    counters.watched_s = 1e6
    for _ in range(looks):
        state.now_ns += round(EVERY_S * NS)
        total += rng.poisson(per_look)
        now = {c.entity for c in counters.causes(state, [], {})}
        begun += len(now - was)
        was = now
    assert 0 < begun / (n * looks) <= chance


def test_balances_of_noise_last_as_seldom_as_stated() -> None:
    """A minute of noise that is alike over a minute, beyond the bound at each second of it."""
    chance, n, readings = 0.02, 4000, 1500
    bound, since, begun = lasting_sigmas(chance), np.zeros(n, int), 0
    for z in noise(np.random.default_rng(9), n, readings, float(np.exp(-1.0 / 60.0))):
        since = np.where(np.abs(z) > bound, since + 1, 0)
        begun += int(np.count_nonzero(since == 60))
    assert begun / (n * readings / 60.0) <= chance
    assert confidence_of(np.array([lasting_sigmas(1e-6)]), np.ones(1))[0] > 0.9999


def test_what_few_readings_told_of_a_variance_is_widened_by_what_they_leave_open() -> None:
    factor = widening(SETTLED, LEAP_PU)
    assert np.isinf(factor[:5]).all()
    assert (np.diff(factor[5:]) <= 0.0).all()
    assert factor[-1] == 1.0
    exact = np.arange(20, SETTLED + 1) / stats.chi2.ppf(LEAP_PU, np.arange(20, SETTLED + 1))
    assert factor[20:] == pytest.approx(exact / exact[-1], rel=0.1)


def test_noise_of_a_gauge_that_few_readings_told_leaps_no_farther_than_its_bound() -> None:
    n, far = 20_000, 0
    bank, rng = rack_bank(traits_of("rack"), n), np.random.default_rng(2)
    for _ in range(80):
        before = bank.jumps.copy()
        with np.errstate(all="ignore"):
            bank.update((40.0 + 5.0 * rng.normal(size=n)).astype(np.float32)[None], None, slice(0, n))
        far += int(np.count_nonzero(bank.jumps > before))
    assert 0 < far <= LEAP_PU * 80 * n


@pytest.mark.parametrize("mean", [0.05, 1.0, 10.0])
def test_fading_counts_reach_what_they_are_said_to_reach(mean: float) -> None:
    rng, kept = np.random.default_rng(3), np.exp(-0.01)
    count = np.zeros(20_000)
    for _ in range(600):
        count = count * kept + rng.poisson(mean * (1.0 - kept), len(count))
    for log in (1.0, 3.0, 5.0):
        bound = rare_count(log, mean)
        assert surprise(bound, mean) == pytest.approx(log, rel=1e-6)
        assert np.mean(count >= bound) <= np.exp(-log)
    assert surprise(0.9 * mean, mean) == 0.0


def thresholds(rate: float, **more: Any) -> dict[str, float]:
    """All of a site with this rate."""
    twin = Twin(two_racks(false_alarms_per_rack_hour=rate, **more))
    diagnosis = twin.engine.diagnosis
    cells = {"gpu.temp_c": 576, "node.power_w": 108, "rack.flow_lpm/pressure": 2, "cdu.filter/drift": 1}
    out = dict(diagnosis.tracks.budget.certain(cells, ALLOWANCE, LEAST_CERTAIN))  # type: ignore[union-attr]
    for table, logs in diagnosis.watch.logs.items():
        out |= {f"{table} {k}": float(v.max()) for k, v in traits_of(table, logs).items() if k != "least"}
        out |= {f"{table} frozen": logs.frozen, f"{table} spiking": logs.spiking}
    return out | {
        "counters": diagnosis.growth._chance_log,
        "balances": twin.engine.findings._sure_sigmas,
    }


def test_a_lower_rate_never_lowers_a_threshold_and_raises_each_kind() -> None:
    found = [thresholds(rate) for rate in RATES]
    for high, low in pairwise(found):
        assert [name for name in high if low[name] < high[name]] == []
    first, last = found[0], found[-1]
    for name in ("gpu.temp_c", "rack.flow_lpm/pressure", "rack frozen", "rack jumps", "counters", "balances"):
        assert last[name] > first[name]


def test_what_is_read_more_seldom_has_fewer_chances_to_err() -> None:
    often, seldom = thresholds(0.0005), thresholds(0.0005, periods_s={"rack": 60.0, "gpu.temp_c": 30.0})
    for name in ("gpu.temp_c", "rack.flow_lpm/pressure", "rack frozen", "rack jumps"):
        assert seldom[name] < often[name]
    assert seldom["node.power_w"] > often["node.power_w"], "the others have taken more of the rate"


def test_the_chances_of_all_tests_add_up_to_the_stated_rate() -> None:
    site = site_of(two_racks(false_alarms_per_rack_hour=0.002))
    budget = AlarmBudget(site)
    per_h = [3600.0 * 50 * budget.chance(family, 50) for family in SHARES]
    assert sum(per_h) == pytest.approx(0.002 * site.sizes["rack"])
    assert sum(SHARES.values()) == 1.0


def test_alarms_that_may_be_critical_have_a_fifth_of_the_rate() -> None:
    """Also where nothing else is compared, so that all comparisons may be critical."""
    site = site_of(two_racks())
    budget = AlarmBudget(site)
    grave = dict.fromkeys(CRITICAL, 100)
    assert set(grave) >= {"rack.flow_lpm/pressure", "cdu.filter_diff_pressure_pa"}
    (bound,) = set(budget.certain(grave, ALLOWANCE, 0.0).values())
    assert CRITICAL_PU <= 0.2
    chance = CRITICAL_PU * SHARES["comparisons"] * budget.per_h / sum(grave.values()) / 3600.0
    assert bound == pytest.approx(sum_threshold(chance, ALLOWANCE))


def test_a_site_that_states_no_rate_has_thresholds_of_one_in_two_thousand() -> None:
    site = site_of(two_racks())
    assert site.file.false_alarms_per_rack_hour == 1 / 2000
    found = thresholds(0.0005)
    assert found["gpu.temp_c"] == pytest.approx(8.0, abs=0.3)
    assert found["rack jumps"] == pytest.approx(2.5, abs=0.1)
    assert found["balances"] == pytest.approx(4.2, abs=0.1)


def rack_bank(traits: dict[str, Any], n: int, name: str = "supply_temp_c") -> Bank:
    """A gauge of n racks."""
    k = WATCHED["rack"].index(name)
    return Bank(1, n, {name: np.repeat(v[k : k + 1], n) for name, v in traits.items()}, flat=True)


@pytest.mark.parametrize("flow_lpm, frozen", [(5.0, False), (15.0, False), (60.0, True)])
def test_a_flow_that_is_nearly_shut_off_hides_its_noise_in_its_last_digit(
    flow_lpm: float, frozen: bool
) -> None:
    n, rng = 50, np.random.default_rng(4)
    bank = rack_bank(traits_of("rack"), n, "flow_lpm")
    for k in range(600):
        true = 120.0 if k < 300 else flow_lpm
        noise = 0.003 * rng.normal(size=n) * (not frozen or k < 300)
        with np.errstate(all="ignore"):
            bank.update((np.rint(true * (1 + noise) / 0.1) * 0.1).astype(np.float32)[None], None, slice(0, n))
    assert (bank.frozen == frozen).all()


@pytest.mark.parametrize("edge", [0.5, 0.45, 0.0])
def test_a_steady_gauge_in_coarse_steps_is_not_frozen_and_a_fine_one_is(edge: float) -> None:
    """The true value turns at the edge of a step, then rests in the middle of one for hours."""
    n, rng = 50, np.random.default_rng(4)
    coarse, fine = (rack_bank(traits_of("rack"), n) for _ in range(2))
    found_after = 0
    for k in range(2000):
        true = 23.0 + (edge if k < 300 else 0.0) + 0.05 * rng.normal(size=n)
        fine_c = np.rint(true / 0.01) * 0.01 if k < 300 else np.full(n, 23.03)
        with np.errstate(all="ignore"):
            coarse.update(np.rint(true).astype(np.float32)[None], None, slice(0, n))
            fine.update(fine_c.astype(np.float32)[None], None, slice(0, n))
        assert not coarse.frozen.any()
        found_after += not fine.frozen.all()
    assert 300 < found_after < 325


@pytest.mark.parametrize(("moves", "still"), [(3, 0), (9, 27), (20, 13), (300, 12)])
def test_a_gauge_that_was_seldom_read_stands_still_for_longer_before_it_is_frozen(
    moves: int, still: int
) -> None:
    """Few moves of a gauge may be luck. `still`: readings until it counts as frozen; 0: more than 60."""
    bank, rng = rack_bank(traits_of("rack"), 1), np.random.default_rng(4)
    read = [*(23.0 + 0.05 * rng.normal(size=moves)), *[23.0] * 60]
    frozen = []
    for value in read:
        with np.errstate(all="ignore"):
            bank.update(np.array([[value]], np.float32), None, slice(0, 1))
        frozen.append(bool(bank.frozen.any()))
    assert frozen.index(True) - moves == still if still else not any(frozen)


def test_a_racks_power_that_leaps_as_a_node_of_it_does_follows_the_work() -> None:
    site = site_of(two_racks())
    devices, watch = DeviceFaults(Topology(site)), SensorChecks(site.sizes, AlarmBudget(site))
    racks, nodes = watch.meters["rack"], watch.meters["node"]
    k, of_nodes = racks.index("power_w"), nodes.jumps[nodes.index("power_w")]
    racks.jumping[k, 1], racks.jumps[k, 1] = True, 3.0
    track = DeviationTrack(2, "rack")
    track.wild[:] = 3.0  # the comparison with its nodes jumps as well: they are not read at one instant
    tracks = Tracks(site.sizes)
    tracks.tracks["rack.power_w"], racks.anything = track, True

    def told() -> list[int]:
        return [c.entity for c in devices.sensors(watch, tracks, {}, {}, None)]

    assert told() == [1]
    of_nodes[3] = 3.0  # of the other rack
    assert told() == [1]
    of_nodes[20] = 2.0
    assert told() == []


def test_a_memory_that_leaps_as_others_of_its_rack_do_follows_the_work() -> None:
    site = site_of(two_racks())
    devices = DeviceFaults(Topology(site))
    meters = SensorChecks(site.sizes, AlarmBudget(site)).meters["gpu"]
    k = meters.index("hbm_temp_c")
    meters.jumps[k, 5] = 4.0
    assert not devices._with_others(meters, k, 5)
    meters.jumps[k, 6] = 4.0  # that one may be odd as well
    assert not devices._with_others(meters, k, 5)
    meters.jumps[k, 80:140] = 1.0  # in the other rack
    assert not devices._with_others(meters, k, 5)
    meters.jumps[k, 10:30] = 1.0
    assert devices._with_others(meters, k, 5)
