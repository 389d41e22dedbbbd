"""Nodes and racks by their power: sums, losses, supplies, and readings that come late. May import `twin`."""

from __future__ import annotations

import copy
import functools
from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of, two_racks
from tests.support.estimator_rig import put
from twin.catalogue import NS, Bool
from twin.contracts import Residual
from twin.estimation.nodes import DELAYS_S, NodeEstimator
from twin.estimation.readings import Readings
from twin.telemetry import Inbox, State

NAN = float("nan")


class Racks:
    """Two racks whose nodes lose a little, and whose own meters speak `delay_s` late, every `period_s`."""

    def __init__(
        self, delay_s: int = 2, period_s: int = 2, seed: int = 1, tree: dict[str, Any] | None = None
    ) -> None:
        self.site = site_of(tree or two_racks())
        self.state, self.inbox = State(self.site.sizes), Inbox(self.site.sizes)
        self.estimator = NodeEstimator(self.site)
        self.rng, self.period_s = np.random.default_rng(seed), period_s
        self.n = self.site.sizes["node"]
        design, of = self.site.design, self.site.rack_of_node
        self.other_w = design.node_other_w[of] * self.rng.uniform(0.8, 1.2, self.n)
        self.loss = self.rng.uniform(1.01, 1.04, self.n)
        self.share = self.rng.uniform(0.45, 0.55, self.n)
        self.overhead_w = design.rack_overhead_w * np.resize([0.8, 1.3], self.site.sizes["rack"])
        self.late: deque[Any] = deque(maxlen=delay_s + 1)
        self.second, self.level, self.moves_s = 0, 600.0, 15
        # Fans of a node, and those that a rack shares, by what GPUs and CPUs draw, in a quarter of a minute
        self.fan_pu, self.shared_pu, self.fan_w = 0.0, 0.0, np.zeros(self.n)
        self.busy_pu = np.ones(self.n)
        self.node_w = np.zeros(self.n)
        self.residuals: dict[str, Residual] = {}
        self.factors: dict[str, Any] = {}  # on readings

    def step(
        self, change: dict[str, Any] | None = None, touched: dict[str, Bool] | None = None
    ) -> dict[str, Residual]:
        """A second; `change`: other readings."""
        if self.second % self.moves_s == 0:
            self.level = float(self.rng.uniform(250.0, 1100.0))
        self.second += 1
        level = self.level * self.busy_pu
        gpu_w = level[self.site.node_of_gpu] * self.rng.uniform(0.97, 1.03, self.site.sizes["gpu"])
        cpu_w = 200.0 + 0.2 * level
        inner = gpu_w.reshape(self.n, -1).sum(axis=1) + cpu_w
        rack = self.site.rack_of_node
        mean = (self.site.sum_by_rack("node", inner) / np.bincount(rack))[rack]
        fans = self.fan_pu * inner + self.shared_pu * mean
        self.fan_w += (fans - self.fan_w) * -np.expm1(-1.0 / 15.0)
        self.node_w = self.other_w + self.loss * inner + self.fan_w
        rack_w = self.overhead_w + 1.012 * self.site.sum_by_rack("node", self.node_w)
        self.late.append(rack_w)
        error = 1 + self.rng.normal(0, 0.001, self.n)
        values: dict[str, Any] = {
            "gpu.power_w": gpu_w, "node.cpu_power_w": cpu_w, "node.power_w": self.node_w * error,
            "node.psu1_power_w": self.share * self.node_w,
            "node.psu2_power_w": (1 - self.share) * self.node_w,
        }  # fmt: skip
        if self.second % self.period_s == 0:
            values["rack.power_w"] = self.late[0]
        values |= change or {}
        for key, factor in self.factors.items():
            values[key] = values[key] * factor
        now_ns = self.second * NS
        put(self.inbox, self.site, values, now_ns)
        self.state.apply(self.inbox.take(self.second, now_ns, 1.0))
        self.residuals = self.estimator.update(Readings(self.state), 1.0, touched)
        return self.residuals

    def run(self, seconds: int, change: dict[str, Any] | None = None, **more: Any) -> Racks:
        for _ in range(seconds):
            self.step(change, **more)
        return self

    def value(self, name: str) -> Any:
        return self.estimator.parameters()[name].value


@functools.cache
def _run(seconds: int) -> Racks:
    return settled(seconds - 100).run(100) if seconds else Racks()


def settled(seconds: int) -> Racks:
    """Racks of their own after so many seconds (hundreds), which all tests share."""
    return copy.deepcopy(_run(seconds))


def test_a_node_is_the_sum_of_its_parts_and_its_loss() -> None:
    racks = settled(900)
    off = [racks.step()["node.power_w"].expected / racks.node_w - 1 for _ in range(60)]
    assert np.abs(off).max() < 0.01
    assert racks.value("node.loss_factor") == pytest.approx(racks.loss, abs=0.01)
    assert racks.value("node.other_w") == pytest.approx(racks.other_w, rel=0.1)


def test_a_nodes_meter_that_lies_is_a_residual() -> None:
    racks = settled(600)
    before = racks.value("node.loss_factor").copy()
    lying = np.ones(racks.n)
    lying[4] = 1.1
    racks.factors = {"node.power_w": lying}
    found = racks.run(400).residuals["node.power_w"]
    assert found.confidence_pu[4] > 0.99
    assert racks.value("node.loss_factor")[4] == pytest.approx(before[4], abs=0.003)


def test_a_supply_that_fails_is_seen_on_both() -> None:
    racks = settled(600)
    first, second = np.ones(racks.n), np.ones(racks.n)
    first[3], second[3] = 0.0, 1 / (1 - racks.share[3])
    racks.factors = {"node.psu1_power_w": first, "node.psu2_power_w": second}
    racks.step()
    found = racks.step()
    assert found["node.psu1_power_w"].confidence_pu[3] > 0.99
    assert found["node.psu2_power_w"].confidence_pu[3] > 0.99
    assert np.delete(found["node.psu1_power_w"].confidence_pu, 3).max() < 0.99
    assert racks.value("node.psu1_share") == pytest.approx(racks.share, abs=0.01)


@pytest.mark.parametrize("delay_s", [0, 1, 3])
def test_the_delay_of_a_buildings_readings_is_found(delay_s: int) -> None:
    racks = Racks(delay_s).run(900)
    chosen = racks.estimator.delay.in_use[0].astype(int)
    assert [DELAYS_S[k] for k in chosen] == [delay_s] * 2
    off = [racks.step()["rack.power_w"] for _ in range(100)]
    pu = np.array([r.difference / r.measured for r in off])
    assert np.abs(pu).max() < 0.01
    assert racks.value("rack.overhead") == pytest.approx(racks.overhead_w, rel=0.3)


def test_no_expectation_knows_its_own_readings_of_the_last_minute() -> None:
    one, other = settled(300), settled(300)
    for _ in range(60):
        a, b = one.step(), other.step({"node.power_w": 1000.0, "rack.power_w": 20e3})
        assert np.array_equal(a["node.power_w"].expected, b["node.power_w"].expected)


def test_a_rack_that_reports_seldom_is_compared_with_its_moment() -> None:
    racks = Racks(delay_s=1, period_s=50).run(1000)
    for _ in range(100):
        found = racks.step()["rack.power_w"]
        assert np.abs(found.difference / found.measured).max() < 0.02


def test_missing_parts_make_sums_unknown() -> None:
    racks = settled(200)
    gpus = np.full(racks.site.sizes["gpu"], 500.0)
    gpus[0] = NAN
    found = racks.step({"gpu.power_w": gpus})
    assert np.isnan(found["node.power_w"].expected[0])
    assert np.isfinite(found["node.power_w"].expected[1:]).all()
    found = racks.run(20, {"node.power_w": NAN}).residuals
    assert np.isnan(found["node.psu1_power_w"].expected).all()
    assert np.isnan(found["rack.power_w"].expected).all()


def test_nothing_is_learned_of_what_people_work_at() -> None:
    racks = Racks()
    node, rack = np.arange(racks.n) == 1, np.array([False, True])
    racks.run(100, touched={"node": node, "rack": rack})
    taught = {k: r.fit.taught_s for k, r in racks.estimator.relations.items()}
    assert taught["node.power_w"][1] == 0.0 < taught["node.power_w"][0]
    assert taught["rack.power_w"][1] == 0.0 < taught["rack.power_w"][0]


def test_a_site_without_nodes_readings_is_unknown() -> None:
    site = site_of(two_racks())
    estimator, state = NodeEstimator(site), State(site.sizes)
    state.now_ns = NS
    found = estimator.update(Readings(state), 1.0)
    assert all(np.isnan(r.expected).all() for r in found.values())


def test_a_snapshot_continues_exactly_and_a_changed_site_keeps_what_stays() -> None:
    racks = settled(200)
    twin = NodeEstimator(racks.site)
    twin.restore(copy.deepcopy(racks.estimator.dump()))
    found = racks.step()
    mine = twin.update(Readings(racks.state), 1.0)
    for name, residual in found.items():
        assert np.array_equal(residual.expected, mine[name].expected, equal_nan=True), name
        assert np.array_equal(residual.sigma, mine[name].sigma, equal_nan=True), name
    old = {"node": np.arange(racks.n - 1, -1, -1).astype(np.int32), "rack": np.array([1, 0], np.int32)}
    moved = NodeEstimator(racks.site)
    moved.adopt(racks.estimator, old)
    assert np.array_equal(moved.parameters()["node.other_w"].value, racks.value("node.other_w")[::-1])
    racks.estimator.forget("node", 2)
    assert racks.value("node.other_w")[2] == racks.site.design.node_other_w[0]


def test_a_node_in_air_is_expected_between_what_its_profile_says_idle_and_full() -> None:
    site = site_of(eight_nodes())
    design, n = site.design, site.sizes["node"]
    other_w, slope = NodeEstimator(site).relations["node.power_w"].set.in_use
    for gpu_w, cpu_w, loss in (
        (design.gpu_idle_w[0], design.cpu_idle_w[0], 0.0),
        (design.gpu_max_w[0], design.cpu_max_w[0], design.node_loss_pu[0]),
    ):
        inner_w = np.diff(site.gpu_start_of_node) * gpu_w + cpu_w
        assert other_w + slope * inner_w == pytest.approx((1.0 + loss) * inner_w + design.node_other_w[0])
    assert n == 8


def test_fans_that_follow_a_step_late_are_no_surprise() -> None:
    """Learned while the load stood still for minutes: the noise knows nothing of fans on their way."""
    racks = Racks(tree=eight_nodes())
    racks.fan_pu, racks.moves_s, far = 0.05, 240, []
    racks.run(1200)
    for level in (300.0, 1000.0, 300.0, 1000.0):
        for _ in range(120):
            racks.level, racks.second = level, racks.second + (racks.second % racks.moves_s == 0)
            r = racks.step()["node.power_w"]
            far.append(np.abs(r.difference / r.sigma).max())
    assert max(far) < 3.0
    r = racks.step({"node.power_w": racks.node_w * 1.15})["node.power_w"]
    assert (r.difference > 4.0 * r.sigma).all(), "steady again, a meter that is off stands out"


def test_fans_that_speed_up_for_the_work_of_neighbours_are_no_surprise() -> None:
    """Learned while half of the nodes idled; then all of them work."""
    racks = Racks(tree=eight_nodes())
    racks.shared_pu, racks.busy_pu[4:], racks.moves_s, far = 0.08, 0.2, 10_000, []
    racks.run(1200)
    racks.busy_pu[4:] = 1.0
    for _ in range(300):
        r = racks.step()["node.power_w"]
        far.append(np.abs(r.difference / r.sigma)[:4].max())
    assert max(far) < 4.0
    r = racks.step({"node.power_w": racks.node_w * 1.15})["node.power_w"]
    assert (r.difference > 4.0 * r.sigma)[:4].all(), "a meter that is off stands out beside the same fans"


@pytest.mark.parametrize("delay_s", [2, 3])
def test_a_rack_is_not_compared_with_what_its_nodes_drew_before_a_restart(delay_s: int) -> None:
    racks = Racks(delay_s).run(600)
    racks.moves_s, racks.level = 10_000, 1100.0
    racks.run(20)
    racks.second += 60  # nobody looked, and the load is another
    racks.level = 250.0
    racks.late.clear()
    for _ in range(30):
        r = racks.step()["rack.power_w"]
        assert not (np.abs(r.difference) > 4.0 * r.sigma).any()
    assert np.isfinite(r.difference / r.sigma).all()
