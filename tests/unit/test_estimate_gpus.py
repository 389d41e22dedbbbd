"""GPUs: what power, temperature and clock ought to be, and what is learned of each. May import `twin`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of, two_racks
from tests.support.estimator_rig import put
from twin.catalogue import F64, NS
from twin.contracts import Residual
from twin.estimation.gpu_power import LEAK_PU_PER_K
from twin.estimation.gpu_temp import LEAST_OTHERS, Trays
from twin.estimation.gpus import GpuEstimator
from twin.estimation.readings import Readings
from twin.physics import CLOCK_MIN_PU
from twin.site import Site
from twin.telemetry import Inbox, State

NAN = float("nan")
SUPPLY_C = 30.0


class Fleet:
    """GPUs that obey an exact law with parameters of their own, and an estimator that hears them."""

    def __init__(self, tree: dict[str, Any] | None = None, seed: int = 1, noisy: bool = True) -> None:
        self.site: Site = site_of(tree or two_racks(racks="r1"))
        self.state, self.inbox = State(self.site.sizes), Inbox(self.site.sizes)
        self.estimator = GpuEstimator(self.site)
        self.rng, self.noisy = np.random.default_rng(seed), noisy
        n = self.n = self.site.sizes["gpu"]
        design, of = self.site.design, self.site.rack_of_gpu
        self.idle_w = design.gpu_idle_w[of] * self.rng.uniform(0.92, 1.08, n)
        self.dynamic_w = (design.gpu_max_w - design.gpu_idle_w)[of] * self.rng.uniform(0.92, 1.08, n)
        self.gamma = self.rng.uniform(2.4, 3.0, n)
        self.resistance = design.gpu_resistance_k_per_w[of] * self.rng.uniform(0.85, 1.15, n)
        self.tau_s = design.gpu_tau_s[of] * self.rng.uniform(0.8, 1.2, n)
        self.cap_w = design.gpu_max_w[of].copy()
        self.temp_c = np.full(n, SUPPLY_C)
        self.second, self.level, self.moves_s = 0, np.full(n, 0.5), 20
        self.weights = (0.45, 0.35, 0.25)  # of SMs, tensor cores and memory in dynamic power
        self.mix, self.jitter = (0.8, 0.6), 0.0  # tensor and memory beside the SMs; noise of readings
        self.power_w, self.clock_pu = np.zeros(n), np.ones(n)
        self.heat_pu = 1.0  # clock to which heat has slowed all
        self.supply_c, self.leak_w_per_k = SUPPLY_C, 0.0  # leakage: over that at 60 degC
        self.residuals: dict[str, Residual] = {}

    def step(self, change: dict[str, Any] | None = None, touched: Any = None) -> dict[str, Residual]:
        """A second: the load moves on, the GPUs follow, the estimator looks. `change`: other readings."""
        if self.second % self.moves_s == 0:
            self.level = np.clip(self.rng.uniform(0.1, 1.0) + self.rng.normal(0, 0.1, self.n), 0.0, 1.0)
        sm, tensor, dram = self.level, self.mix[0] * self.level**1.2, self.mix[1] * self.level
        demand = self.dynamic_w * (np.array(self.weights) @ np.stack([sm, tensor, dram]))
        room = np.clip((self.cap_w - self.idle_w) / np.maximum(demand, 1e-9), 0.0, 1.0)
        self.clock_pu = np.minimum(np.maximum(room ** (1.0 / self.gamma), CLOCK_MIN_PU), self.heat_pu)
        leak_w = self.leak_w_per_k * (self.temp_c - 60.0)
        self.power_w = self.idle_w + leak_w + demand * self.clock_pu**self.gamma
        aim = self.supply_c + self.power_w * self.resistance
        self.temp_c = aim + (self.temp_c - aim) * np.exp(-1.0 / self.tau_s)
        self.second += 1
        noise = self.rng.normal(0, 1, (2, self.n)) if self.noisy else np.zeros((2, self.n))
        if self.jitter:
            jitter = self.rng.normal(0, self.jitter, (3, self.n))
            sm, tensor, dram = np.maximum(np.stack([sm, tensor, dram]) + jitter, 0.0)
        values: dict[str, Any] = {
            "gpu.power_w": self.power_w * (1 + 0.005 * noise[0]),
            "gpu.temp_c": np.rint(self.temp_c + 0.3 * noise[1]) if self.noisy else self.temp_c,
            "gpu.sm_active_pu": sm, "gpu.tensor_active_pu": tensor, "gpu.dram_active_pu": dram,
            "gpu.sm_clock_hz": self.clock_pu * 1.98e9, "gpu.power_limit_w": self.cap_w,
            "rack.supply_temp_c": self.supply_c, "rack.flow_lpm": self.site.design.rack_flow_lpm,
        }  # fmt: skip
        values |= change or {}
        now_ns = self.second * NS
        put(self.inbox, self.site, values, now_ns)
        self.state.apply(self.inbox.take(self.second, now_ns, 1.0))
        self.residuals = self.estimator.update(Readings(self.state), 1.0, touched)
        return self.residuals

    def run(self, seconds: int, change: dict[str, Any] | None = None, touched: Any = None) -> Fleet:
        for _ in range(seconds):
            self.step(change, touched)
        return self

    def errors(self, seconds: int) -> tuple[F64, F64]:
        """Of expectations against the truth, [seconds, n]: of power as a share, of temperature in K."""
        power, temp = [], []
        for _ in range(seconds):
            found = self.step()
            power.append(found["gpu.power_w"].expected / self.power_w - 1)
            temp.append(found["gpu.temp_c"].expected - self.temp_c)
        return np.array(power), np.array(temp)

    def value(self, name: str) -> F64:
        return self.estimator.parameters()[name].value


@functools.cache
def _run(seconds: int) -> Fleet:
    return settled(seconds - 100).run(100) if seconds else Fleet()


def settled(seconds: int) -> Fleet:
    """A fleet of its own after so many seconds (hundreds), which all tests share."""
    return copy.deepcopy(_run(seconds))


@pytest.mark.long
def test_expectations_come_close_and_parameters_are_found() -> None:
    fleet = settled(900)
    power, temp = fleet.errors(100)
    assert np.abs(power).mean() < 0.01
    assert np.sqrt((temp**2).mean()) < 0.4
    assert np.abs(fleet.value("gpu.resistance") / fleet.resistance - 1).max() < 0.1
    assert np.abs(fleet.value("gpu.resistance") / fleet.resistance - 1).mean() < 0.02
    assert np.abs(fleet.value("gpu.tau_s") / fleet.tau_s - 1).mean() < 0.07  # the prior's is 0.1
    z = fleet.residuals["gpu.temp_c"].difference / fleet.residuals["gpu.temp_c"].sigma
    assert 0.3 < z.std() < 1.6


def test_before_anything_is_learned_the_design_speaks() -> None:
    fleet = Fleet()
    fleet.idle_w[:] = fleet.estimator.power.idle_w
    found = fleet.step()
    assert np.isnan(found["gpu.temp_c"].expected).all()  # the lag began in the middle of things
    assert (np.abs(found["gpu.power_w"].expected / fleet.power_w - 1) < 0.25).all()
    assert np.isnan(found["gpu.power_w"].confidence_pu).all()  # no noise is known


def test_no_expectation_knows_a_reading_of_its_own_of_the_last_minute() -> None:
    """Two fleets alike until a moment; then other powers and temperatures are read in one of them."""
    one, other = settled(400), settled(400)
    for _ in range(60):
        a = one.step()
        b = other.step({"gpu.power_w": 100.0})
        assert np.array_equal(a["gpu.power_w"].expected, b["gpu.power_w"].expected, equal_nan=True)
    one, other = settled(400), settled(400)
    for _ in range(60):
        a = one.step()
        b = other.step({"gpu.temp_c": 33.0, "gpu.sm_clock_hz": 1.5e9})
        assert np.array_equal(a["gpu.temp_c"].expected, b["gpu.temp_c"].expected, equal_nan=True)
        assert np.array_equal(a["gpu.sm_clock_hz"].expected, b["gpu.sm_clock_hz"].expected, equal_nan=True)


def test_a_cap_is_what_is_expected_and_the_clock_follows() -> None:
    fleet = settled(400)
    fleet.cap_w[:] = 0.6 * 1200.0
    power, _ = fleet.run(300).errors(100)
    assert np.abs(power).mean() < 0.015
    clock = fleet.residuals["gpu.sm_clock_hz"]
    working = np.isfinite(clock.expected)
    assert working.any()
    assert np.abs(clock.difference[working] / clock.measured[working]).max() < 0.06
    assert np.abs(fleet.value("gpu.exponent") - fleet.gamma).mean() < np.abs(2.7 - fleet.gamma).mean()


def test_a_cap_near_idle_leaves_the_clock_at_its_lowest_or_in_doubt() -> None:
    fleet = settled(400)
    fleet.cap_w[:] = fleet.idle_w + 0.02 * fleet.dynamic_w
    fleet.cap_w[::3] = fleet.idle_w[::3]
    lowest_hz, far = CLOCK_MIN_PU * 1.98e9, 0.0
    for _ in range(60):
        found = fleet.step()["gpu.sm_clock_hz"]
        working = np.isfinite(found.expected)
        assert (found.expected[working] >= 0.999 * lowest_hz).all()
        z = found.difference[working] / found.sigma[working]
        far = max(far, float(np.nanmax(np.abs(z), initial=0.0)))
    assert far < 6.0


def test_no_cap_is_met_below_what_the_lowest_clock_draws() -> None:
    fleet = settled(900)
    fleet.level[:] = 0.9
    fleet.cap_w[:] = 0.5 * fleet.idle_w
    found = fleet.run(5).residuals["gpu.power_w"]
    assert (fleet.power_w > fleet.cap_w).all()
    assert found.expected == pytest.approx(fleet.power_w, rel=0.06)
    assert np.abs(found.difference / found.sigma).max() < 4.0


def test_at_the_lowest_clock_nothing_is_learned_of_the_exponent() -> None:
    fleet = settled(900)
    before = fleet.estimator.power.gamma_var.copy()
    fleet.cap_w[:] = fleet.idle_w
    fleet.run(60)
    assert (fleet.clock_pu == CLOCK_MIN_PU).all()
    assert np.array_equal(fleet.estimator.power.gamma_var, before)


def test_a_gap_in_one_signal_under_a_cap_is_not_taken_for_a_free_gpu() -> None:
    """A missing clock teaches no demand, a missing cap stands, without an activity no clock is expected."""
    fleet = settled(900)
    fleet.cap_w[:] = 0.4 * fleet.site.design.gpu_max_w[0]
    fleet.run(10)
    learned = fleet.estimator.power.fit.moment.copy()
    for _ in range(30):
        fleet.level[:] = 0.95
        found = fleet.step({"gpu.sm_clock_hz": NAN})
    assert np.array_equal(fleet.estimator.power.fit.moment, learned)
    found = fleet.step({"gpu.power_limit_w": NAN})
    assert found["gpu.power_w"].expected == pytest.approx(fleet.cap_w, rel=0.01)
    tensor = np.where(np.arange(fleet.n) == 3, NAN, 0.7)
    clock = fleet.step({"gpu.tensor_active_pu": tensor})["gpu.sm_clock_hz"].expected
    assert np.array_equal(np.isnan(clock), np.arange(fleet.n) == 3)


def test_a_cool_gpu_leaks_less_than_where_it_was_learned() -> None:
    fleet = settled(900)
    power = fleet.estimator.power
    usual_c = power.usual_c.in_use[0]
    assert usual_c == pytest.approx(fleet.temp_c, abs=25.0)
    warm = fleet.step({"gpu.temp_c": usual_c})["gpu.power_w"]
    assert power.leak_doubt_w().max() < 0.1
    cool = fleet.step({"gpu.temp_c": usual_c - 40.0})["gpu.power_w"]
    rated_w = fleet.site.design.gpu_max_w[0]
    assert warm.expected - cool.expected == pytest.approx(40.0 * LEAK_PU_PER_K * rated_w, abs=1.0)
    assert power.leak_doubt_w() == pytest.approx(20.0 * LEAK_PU_PER_K * rated_w, rel=0.03)


@pytest.mark.parametrize("leak_pu_per_k", [2e-4, 4e-4])  # of the highest power
def test_idle_gpus_that_cool_down_are_expected_to_leak_less(leak_pu_per_k: float) -> None:
    """The law lies between: it is off by no more than half of what leaks less, and doubts that much."""
    fleet = Fleet(seed=7)
    fleet.supply_c, fleet.moves_s, fleet.level = 55.0, 10**6, np.full(fleet.n, 0.05)
    fleet.leak_w_per_k = leak_pu_per_k * float(fleet.site.design.gpu_max_w[0])
    fleet.second = 1
    fleet.run(900)
    warm_w, warm_c = fleet.power_w, fleet.temp_c
    before_w = fleet.residuals["gpu.power_w"].expected.mean() - warm_w.mean()
    fleet.supply_c = 15.0
    r = fleet.run(200).residuals["gpu.power_w"]
    assert (warm_c - fleet.temp_c).mean() > 35.0
    less_w = (warm_w - fleet.power_w).mean()
    error_w = r.expected.mean() - fleet.power_w.mean() - before_w
    assert abs(error_w) < 0.6 * less_w
    assert (np.abs(error_w) < fleet.estimator.power.leak_doubt_w()).all()


def test_less_power_at_a_clock_that_heat_has_lowered_is_no_surprise() -> None:
    fleet = settled(400)
    fleet.heat_pu = 0.75
    for _ in range(5):
        off = fleet.step()["gpu.power_w"].expected / fleet.power_w - 1
        assert np.abs(off).mean() < 0.05  # a quarter less clock is half of the dynamic power


def test_a_clock_lowered_by_something_else_is_a_residual() -> None:
    fleet = settled(500)
    found = fleet.step({"gpu.sm_clock_hz": 1.0e9})["gpu.sm_clock_hz"]
    at = np.isfinite(found.expected)
    assert (found.confidence_pu[at] > 0.999).all()


def test_dried_paste_at_once_is_a_residual_that_lasts() -> None:
    fleet = settled(900)
    fleet.resistance[5] *= 1.5
    fleet.run(900)
    found = fleet.residuals["gpu.temp_c"]
    assert found.difference[5] > 3.0
    assert found.confidence_pu[5] > 0.999
    assert np.nanmedian(found.confidence_pu) < 0.99
    fleet.level[:] = 0.5
    fleet.second += 1  # the load stands still for once
    excess = []
    for _ in range(18):
        off_k = fleet.temp_c[5] - fleet.residuals["gpu.temp_c"].expected[5]
        excess.append(off_k / (fleet.power_w[5] * fleet.resistance[5] / 3))
        fleet.step()
    assert np.mean(excess[8:]) == pytest.approx(1.0, abs=0.1)  # next to nothing was taken for normal


@pytest.mark.long
def test_paste_that_dries_slowly_is_a_drift_of_its_resistance() -> None:
    fleet = settled(1500)
    reference = fleet.estimator.parameters()["gpu.resistance"].reference.copy()
    assert np.isfinite(reference).all()
    for _ in range(2400):
        fleet.resistance[5] *= 1.15 ** (1 / 2400)
        fleet.step()
    p = fleet.estimator.parameters()["gpu.resistance"]
    assert np.array_equal(p.reference, reference)
    assert p.drift[5] > 0.04  # what is learned lags by most of an hour
    assert p.confidence_pu[5] > 0.95
    others = np.delete(np.arange(fleet.n), 5)
    assert np.abs(p.drift[others]).max() < 0.04
    assert np.nanmax(p.confidence_pu[others]) < 0.95


@pytest.mark.parametrize("k_per_s", [0.25, -0.25])
def test_coolant_that_changes_fast_and_is_read_late_is_no_surprise(k_per_s: float) -> None:
    """As behind a valve that shuts; the rack is read each second one, 2 s late."""
    fleet, supply_c, most = settled(900), [SUPPLY_C] * 4, 0.0
    for second in range(60):
        fleet.supply_c += k_per_s
        supply_c.append(fleet.supply_c)
        found = fleet.step({"rack.supply_temp_c": supply_c[-3 - second % 2]})["gpu.temp_c"]
        most = max(most, float(np.mean(np.abs(found.difference) > 3.0 * found.sigma)))
    assert most < 0.03
    hot = found.expected + 8.0
    found = fleet.step({"rack.supply_temp_c": supply_c[-3], "gpu.temp_c": hot})["gpu.temp_c"]
    assert (found.difference > 3.0 * found.sigma).all(), "a GPU that is much too hot stands out meanwhile"


@pytest.mark.parametrize("share", [0.22, 0.3, 0.38])
def test_a_slow_flow_is_no_surprise(share: float) -> None:
    """Half the flow: the law of the plate raises what is expected, before anything is learned of it.

    How much of a resistance falls with the flow no twin knows: plates differ by two of their spreads.
    """
    fleet = Fleet(noisy=False).run(400)
    flow = 0.5 * fleet.site.design.rack_flow_lpm
    rise = 1 - share + share * 0.5**-0.7
    fleet.resistance, fleet.tau_s = fleet.resistance * rise, fleet.tau_s * rise
    fleet.run(60, {"rack.flow_lpm": flow})
    found = fleet.residuals["gpu.temp_c"]
    away_k = np.abs(found.expected - fleet.temp_c)
    assert (away_k < 3.0 * found.sigma).all()
    assert away_k.max() < (1.5 if share == 0.3 else 3.0)


def test_missing_inputs_are_unknown_and_short_gaps_are_bridged() -> None:
    fleet = settled(300)
    power = fleet.power_w.copy()
    power[7] = NAN
    found = fleet.step({"gpu.power_w": power})
    assert np.isfinite(found["gpu.temp_c"].expected[7])
    assert np.isnan(found["gpu.power_w"].confidence_pu[7])
    for _ in range(20):
        power = fleet.power_w.copy()
        power[7] = NAN
        found = fleet.step({"gpu.power_w": power})
    assert np.isnan(found["gpu.temp_c"].expected[7])
    assert np.isfinite(found["gpu.temp_c"].expected[8])
    fleet.run(60)
    assert abs(fleet.residuals["gpu.temp_c"].expected[7] - fleet.temp_c[7]) < 2.0
    sm = fleet.level.copy()
    sm[2] = NAN
    assert np.isnan(fleet.step({"gpu.sm_active_pu": sm})["gpu.power_w"].expected[2])
    found = fleet.run(10, {"rack.supply_temp_c": NAN}).residuals
    assert np.isnan(found["gpu.temp_c"].expected).all()


def test_where_only_utilisation_is_published_it_is_used() -> None:
    fleet = Fleet()
    for _ in range(600):
        change = dict.fromkeys(("gpu.sm_active_pu", "gpu.tensor_active_pu", "gpu.dram_active_pu"), NAN)
        fleet.step(change | {"gpu.util_pu": fleet.level})
    off = fleet.residuals["gpu.power_w"].expected / fleet.power_w - 1
    assert np.abs(off).mean() < 0.06


def test_nothing_is_learned_of_what_people_work_at() -> None:
    fleet = Fleet()
    touched = np.arange(fleet.n) == 4
    fleet.run(300, touched=touched)
    assert fleet.estimator.temp.fit.taught_s[4] == 0.0 == fleet.estimator.power.fit.taught_s[4]
    assert fleet.estimator.temp.fit.taught_s[5] > 0.0


@pytest.mark.parametrize(
    "tree", [{"site": "x", "halls": [{"name": "h", "racks": [{"name": "r1"}]}]}, eight_nodes()]
)
def test_sites_without_profile_or_coolant_do_no_harm(tree: dict[str, Any]) -> None:
    site = site_of(tree)
    estimator, state = GpuEstimator(site), State(site.sizes)
    state.now_ns = NS
    found = estimator.update(Readings(state), 1.0, None)
    assert all(np.isnan(r.expected).all() for r in found.values())


@pytest.mark.long
def test_air_cooled_gpus_are_known_from_their_inlet() -> None:
    fleet = Fleet(eight_nodes())
    air = {"node.inlet_temp_c": SUPPLY_C}
    fleet.run(900, air)
    assert np.abs(fleet.step(air)["gpu.temp_c"].expected - fleet.temp_c).max() < 2.0


def test_gpus_that_have_idled_so_far_may_draw_what_they_like_once_they_work() -> None:
    """Of the coefficients of power at work nothing was seen, of resistances next to nothing."""
    fleet, far = Fleet(), 0.0
    for second in range(520):
        fleet.second = max(fleet.second, 1 + second)
        fleet.level = np.full(fleet.n, 0.0 if second < 400 else 1.0)
        while fleet.second % 20 == 0:
            fleet.second += 1  # the load stands still
        found = fleet.step()
        for name in ("gpu.power_w", "gpu.temp_c"):
            z = found[name].difference / found[name].sigma
            far = max(far, float(np.nanmax(np.abs(z)))) if second >= 400 else far
    assert far < 5.0
    assert np.nanmax(np.abs(found["gpu.power_w"].sigma)) > 10.0, "and knows that it does not know"


def test_gpus_that_did_one_work_so_far_may_draw_what_they_like_at_another() -> None:
    """One work tells the sum of idle and activities alone. Noise of activities tells nothing, and that GPUs
    differ does not tell how their profile splits the sum, however many they are."""
    fleet = Fleet(two_racks())
    fleet.moves_s, fleet.jitter, fleet.weights = 10**9, 0.005, (0.3, 0.5, 0.3)
    fleet.step()
    fleet.level = 0.285 * (1 + fleet.rng.normal(0, 0.03, fleet.n))
    fleet.run(480)
    for mix, level in (((0.3, 0.8), 0.77), ((0.9, 0.2), 0.73), ((0.0, 0.0), 0.0)):
        other = copy.deepcopy(fleet)
        other.mix, other.level = mix, np.full(other.n, level)
        found = other.run(5).residuals["gpu.power_w"]
        assert (np.abs(found.measured - found.expected) <= 3.0 * found.sigma).all(), mix


@pytest.mark.long
def test_what_all_gpus_of_a_node_in_air_are_off_by_is_their_air() -> None:
    """An inlet that reads 3 K too little makes no heat sink wrong; one GPU that is too warm stands out."""
    site = {"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "hgx-h100", "nodes": 4}]}]}  # fmt: skip
    fleet = Fleet(site).run(700, {"node.inlet_temp_c": SUPPLY_C})
    off_c = np.full(4, SUPPLY_C)
    off_c[1] -= 3.0
    worst = np.zeros(fleet.n)
    for _ in range(200):
        found = fleet.step({"node.inlet_temp_c": off_c})["gpu.temp_c"]
        worst = np.fmax(worst, np.abs(found.difference / found.sigma))
    assert worst.max() < 5.0
    temp = fleet.estimator.temp
    temp.common_k[:] = 2.0
    assert temp.common_doubt() == pytest.approx(0.5)  # each feels it otherwise
    fleet.resistance[9] *= 1.3
    for _ in range(200):
        found = fleet.step({"node.inlet_temp_c": off_c})["gpu.temp_c"]
    z = found.difference / found.sigma
    assert z[9] > 6.0
    assert np.abs(np.delete(z, 9)).max() < 5.0


@pytest.mark.long
def test_what_the_air_of_a_node_does_while_its_gpus_become_known_is_no_drift_of_one() -> None:
    """GPUs at unlike levels become known at unlike times; meanwhile their air is warmer than it reads."""
    site = {"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "hgx-h100", "nodes": 4}]}]}  # fmt: skip
    fleet, worst, known = Fleet(site), 0.0, np.zeros(32, np.bool_)
    levels = fleet.rng.permutation(np.linspace(0.5, 1.0, 32))
    for second in range(2400):
        fleet.moves_s, fleet.level = 10_000, levels * (0.7 + 0.3 * (second // 100 % 2))
        fleet.second += fleet.second == 0
        fleet.step({"node.inlet_temp_c": SUPPLY_C - 10.0 * (second > 1000)})
        if second % 20 == 0:
            found = fleet.estimator.parameters()["gpu.resistance"]
            off = found.drift - fleet.estimator.temp.air_drift()
            worst = max(worst, float(np.nan_to_num(np.abs(off)).max()))
            known |= np.isfinite(off)
    assert known.all()
    assert worst < 0.09  # 10 K make up another share of each one's rise


@pytest.mark.parametrize("away_s", [8, 20, 73])
def test_after_a_time_without_ticks_nothing_is_expected_until_the_lags_have_settled(away_s: int) -> None:
    """The twin is started again with its state, while GPUs follow work that nobody saw."""
    fleet = settled(400)
    fleet.level, fleet.moves_s = np.full(fleet.n, 0.2), 10**6
    fleet.run(100)
    asleep, fleet.estimator = fleet.estimator, copy.deepcopy(fleet.estimator)
    fleet.level = np.full(fleet.n, 0.9)
    fleet.run(away_s)
    fleet.estimator, far = asleep, 0.0
    assert np.isnan(fleet.step()["gpu.temp_c"].expected).all()
    for _ in range(100):
        found = fleet.step()["gpu.temp_c"]
        far = max(far, float(np.nanmax(np.abs(found.difference / found.sigma), initial=0.0)))
    assert np.isfinite(found.expected).all()
    assert far < 5.0


def test_the_median_of_the_others_is_theirs_alone() -> None:
    rng = np.random.default_rng(3)
    site = site_of({"site": "x", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "hgx-h100", "nodes": 2},
        {"name": "r2", "profile": "hgx-h100", "nodes": 1, "gpus_per_node": 3},
        {"name": "r3", "profile": "hgx-h100", "nodes": 1, "gpus_per_node": 5}]}]})  # fmt: skip
    values = rng.normal(size=site.sizes["gpu"])
    values[[2, 10]] = NAN
    gpus, found = Trays(site).others(values, np.arange(site.sizes["node"]))
    assert gpus.tolist() == list(range(site.sizes["gpu"]))
    for gpu, median in zip(gpus.tolist(), found.tolist(), strict=True):
        node = np.flatnonzero(site.node_of_gpu == site.node_of_gpu[gpu])
        others = values[node[node != gpu]]
        others = others[np.isfinite(others)]
        if np.isfinite(values[gpu]):
            assert np.isnan(median) == (len(others) < LEAST_OTHERS)
            assert np.isnan(median) or median == pytest.approx(np.median(others))


def test_a_plate_at_another_flow_than_it_was_learned_at_is_less_sure() -> None:
    fleet = settled(900)
    before = fleet.estimator.temp.doubt().copy()
    doubt = []
    for _ in range(60):
        fleet.step({"rack.flow_lpm": 0.5 * fleet.site.design.rack_flow_lpm})
        rise_k = fleet.estimator.temp.heated * fleet.estimator.temp.resistance
        doubt.append(fleet.estimator.temp.doubt() / rise_k)
    assert (doubt[-1] > before / rise_k + 0.02).all()
    assert (doubt[0] < 0.5 * doubt[-1]).all(), "as fast as the plates follow"


def test_a_snapshot_continues_exactly() -> None:
    fleet = settled(200)
    twin = GpuEstimator(fleet.site)
    twin.restore(copy.deepcopy(fleet.estimator.dump()))
    found = fleet.step()
    mine = twin.update(Readings(fleet.state), 1.0, None)
    for name, residual in found.items():
        assert np.array_equal(residual.expected, mine[name].expected, equal_nan=True), name
        assert np.array_equal(residual.sigma, mine[name].sigma, equal_nan=True), name
    a, b = fleet.estimator.dump(), twin.dump()
    assert np.array_equal(a["power"]["fit"]["normal"], b["power"]["fit"]["normal"])


def test_another_device_is_learned_anew_and_a_changed_site_keeps_the_rest() -> None:
    fleet = settled(300)
    learned = fleet.value("gpu.resistance").copy()
    fleet.estimator.forget("gpu", 3)
    assert fleet.value("gpu.resistance")[3] == fleet.estimator.temp.resistance[3]
    assert np.array_equal(np.delete(fleet.value("gpu.resistance"), 3), np.delete(learned, 3))
    bigger = site_of(two_racks())
    old = np.concatenate([np.arange(fleet.n), np.full(bigger.sizes["gpu"] - fleet.n, -1)]).astype(np.int32)
    n = fleet.site.sizes["node"]
    nodes = np.concatenate([np.arange(n), np.full(bigger.sizes["node"] - n, -1)]).astype(np.int32)
    moved = GpuEstimator(bigger)
    moved.adopt(fleet.estimator, {"gpu": old, "node": nodes})
    assert np.array_equal(
        moved.parameters()["gpu.resistance"].value[: fleet.n], fleet.value("gpu.resistance")
    )
    assert moved.parameters()["gpu.resistance"].value[-1] == moved.temp.resistance[-1]


def test_learning_in_turns_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = settled(900)
    monkeypatch.setattr("twin.estimation.gpus.PART", 10)
    parts = Fleet().run(900)
    assert len(parts.estimator.parts) == 8
    a, b = whole.value("gpu.resistance"), parts.value("gpu.resistance")
    assert np.abs(a / b - 1).max() < 0.06
    power, temp = parts.errors(50)
    assert np.abs(power).mean() < 0.015
    assert np.sqrt((temp**2).mean()) < 0.6


def test_one_clock_sensor_that_reads_high_does_not_move_its_profile() -> None:
    from twin.estimation.gpu_power import GpuPower

    power = GpuPower(site_of(two_racks()))
    clock = np.full(144, 1.9e9)
    clock[7] = 2.6e9
    clock[9] = np.nan
    assert power._highest(clock).tolist() == [1.9e9]
    assert np.isnan(power._highest(np.full(144, np.nan))).all()
