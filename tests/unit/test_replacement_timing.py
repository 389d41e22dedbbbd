"""Timing of a drain: in a trough of demand that is ahead, and never later than the hazard permits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.node_replacement import HOLD_TEXTS
from policies.node_replacement.costs import Chances, Delays, Stakes
from policies.node_replacement.drain_timing import MOST_WAIT_S, RISK_PU, STEP_S, DemandCurve, drain_timing
from policies.node_replacement.spare_count import DEMAND
from tests.support.drain_timing_weeks import made_up_demand, played
from tests.support.replacement_site import EIGHT, SAVES, Replacing
from twin.catalogue import NS
from twin.contracts import DEGRADED, Decision, ExplainRequest, Explanation, Forecast

HOUR_S, DAY_S = 3600.0, 86_400.0
TROUGH = HOLD_TEXTS[-1]
IDLE, BUSY = 8, 0  # nodes: without a job, and in one of eight nodes


class Troughs(Replacing):
    """A site of 144 GPUs whose demand is told, and forecast: (horizon, GPUs). A node is forecast to fail."""

    def __init__(
        self, now: float, *ahead: tuple[float, float], node: int = IDLE, day_pu: float = 0.5, **settings: Any
    ) -> None:
        self.demand = now
        super().__init__({"a": EIGHT}, told={**SAVES, "time_limit_s": 5 * DAY_S}, **settings)
        self.ahead, self.says.day = ahead, np.where(np.arange(self.n) == node, day_pu, 0.004)
        self.saves()

    def tick(self, values: dict[str, Any] | None = None, *events: Any, **more: Any) -> Decision:
        told = {"site.gpu_running_count": self.demand, "site.gpu_pending_count": 0.0}
        for horizon_s, gpus in getattr(self, "ahead", ()):
            band = [np.array([gpus + x], np.float32) for x in (0.0, -2.0, 2.0)]
            self.engine.forecasts[DEMAND, horizon_s] = Forecast(DEMAND, horizon_s, *band, "m", "b")
        return super().tick({**(values or {}), **told}, *events, **more)

    def hold(self, node: int = IDLE) -> str:
        return HOLD_TEXTS[int(self.memory["hold"][node])]


PEAK = ((0.5 * HOUR_S, 150.0), (HOUR_S, 60.0), (DAY_S, 120.0))


@pytest.mark.parametrize(
    "node, day_pu, ahead", [(IDLE, 0.5, PEAK), (BUSY, 0.9, ((600.0, 150.0), (900.0, 60.0), (DAY_S, 120.0)))]
)
def test_a_suspect_waits_for_a_trough_and_leaves_in_it(
    node: int, day_pu: float, ahead: tuple[tuple[float, float], ...]
) -> None:
    twin = Troughs(150.0, *ahead, node=node, day_pu=day_pu)
    twin.wait(120)
    assert (twin.phase(node), twin.hold(node)) == ("suspect", TROUGH)
    assert not twin.asked()
    leave_ns, latest_ns = (int(twin.memory[name][node]) for name in ("leave_ns", "leave_by_ns"))
    assert twin.now_ns < leave_ns <= latest_ns
    twin.demand, twin.ahead = 60.0, ((HOUR_S, 100.0), (DAY_S, 120.0))
    twin.wait(20)
    assert (node, 1.0) in twin.asked() or (node, 3.0) in twin.asked()
    assert twin.memory["leave_ns"][node] == 0


@pytest.mark.parametrize(
    "change",
    ["no forecast", "unknown demand", "flat", "enough idle", "rises", "urgent"],
)
def test_without_a_trough_in_time_it_leaves_as_ever(change: str) -> None:
    twin = Troughs(150.0, *PEAK)
    match change:
        case "no forecast":
            twin.ahead = ()
        case "unknown demand":
            twin.demand = np.nan
        case "flat":
            twin.ahead = ((HOUR_S, 150.0), (DAY_S, 150.0))
        case "enough idle":
            twin.demand = 100.0
        case "rises":
            twin.ahead = ((HOUR_S, 170.0), (DAY_S, 190.0))
        case _:
            twin.says.hour = np.where(np.arange(twin.n) == IDLE, 0.4, 0.001)
    for key in [key for key in twin.engine.forecasts if key[0] == DEMAND]:
        del twin.engine.forecasts[key]
    twin.wait(120)
    assert twin.phase(IDLE) != "suspect"
    assert TROUGH not in [a.get("why") for a in twin.accounts]


def test_a_broken_node_waits_for_no_trough() -> None:
    twin = Troughs(150.0, *PEAK)
    twin.ill.say("node", IDLE, DEGRADED, "bad", action_name="drain", sure_pu=0.9, since_ns=twin.now_ns)
    twin.wait(120)
    assert twin.phase(IDLE) != "suspect", "a verdict says that it may fail within the hour"


@pytest.mark.long
def test_a_trough_that_never_comes_is_waited_for_no_longer_than_the_hazard_permits() -> None:
    twin = Troughs(150.0, *PEAK)
    twin.wait(70)
    began_ns, latest_ns = int(twin.memory["entered_ns"][IDLE]), int(twin.memory["leave_by_ns"][IDLE])
    assert twin.hold() == TROUGH
    waited_s = 0.0
    while (
        twin.phase(IDLE) == "suspect" and waited_s < DAY_S
    ):  # the forecast promises it an hour ahead, always
        twin.look(dt_s=30.0)
        waited_s = (twin.now_ns - began_ns) / NS
    assert twin.phase(IDLE) != "suspect"
    assert twin.now_ns <= latest_ns
    rate = -np.log1p(-0.5) / DAY_S
    assert -np.expm1(-rate * waited_s) <= RISK_PU


def test_the_wait_is_explained() -> None:
    twin = Troughs(150.0, *PEAK)
    twin.wait(120)
    policy = next(p for p in twin.engine.policies if p.name == "replacement")
    request = ExplainRequest(entity=twin.site.name("node", IDLE))
    found = policy.explain(twin.engine.view(1.0), twin.memory, request)
    assert isinstance(found, Explanation)
    text = " ".join(s.text for s in found.sentences)
    for words in (TROUGH, "in a trough of demand: 150 GPUs are wanted now and", "of 144 in service",
                  "at the latest in", "or it has waited 12 h", "GPU-h after that risk"):  # fmt: skip
        assert words in text, text
    figures = {f.name: f.value for f in found.figures}
    assert figures["leave_ns"] == int(twin.memory["leave_ns"][IDLE])


def stakes(k: int = 1, **more: Any) -> Stakes:
    ones, no = np.ones(k), np.zeros(k, np.bool_)
    made = Stakes(32 * ones, 4 * ones, 600 * ones, np.inf * ones, 1800 * ones, 60 * ones, 60 * ones,
                  600 * ones, 1e5 * ones, ~no, ~no, no)  # fmt: skip
    return replace(made, **{name: np.full(k, value) for name, value in more.items()})


def curve(*gpus: float, there: int = 144, sigma: float = 0.0) -> DemandCurve:
    at_s = STEP_S * np.arange(len(gpus))
    return DemandCurve(at_s, np.array(gpus), np.full(len(gpus), sigma), there)


def test_the_wait_grows_with_what_it_saves_and_shrinks_with_the_hazard() -> None:
    hours = curve(*([150.0] * 12), *([60.0] * 12))  # an hour of peak, an hour of trough
    gains = []
    for day_pu in (0.001, 0.1, 0.5, 0.9):
        chances = Chances(np.array([np.nan]), np.array([day_pu]), np.array([0.5]))
        found = drain_timing(hours, chances, stakes(), np.zeros(1), Delays(), 1e5)
        gains.append(float(found.gain_gpu_h[0]))
        assert found.leave_s[0] <= found.latest_s[0] <= MOST_WAIT_S
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > gains[-1] == 0.0
    spare = drain_timing(
        hours, Chances(*np.full((3, 1), 0.001)), stakes(spare=True), np.zeros(1), Delays(), 1e5
    )
    assert spare.gain_gpu_h[0] < gains[0]


def test_an_unknown_chance_permits_no_wait() -> None:
    chances = Chances(np.array([np.nan]), np.array([np.nan]), np.array([0.5]))
    found = drain_timing(curve(150.0, 60.0, 60.0), chances, stakes(), np.zeros(1), Delays(), 1e5)
    assert not found.later[0]
    assert found.latest_s[0] == 0.0


def test_hours_that_jobs_miss_are_counted_as_by_hand() -> None:
    """Two hours of peak, then an hour of trough; a sure fault that is out for the one hour that follows."""
    peak, trough = [150.0] * 24, [60.0] * 13
    chances = Chances(np.array([0.0]), np.array([1e-12]), np.array([1.0]))
    found = drain_timing(curve(*peak, *trough), chances, stakes(busy=False), np.zeros(1), Delays(), HOUR_S)
    assert found.leave_s[0] == pytest.approx(2 * HOUR_S, abs=STEP_S)
    assert found.gain_gpu_h[0] == pytest.approx(0.9 * 4 * 1.0, rel=0.05)  # WORTH x 4 GPUs x 1 h


@pytest.mark.long
@pytest.mark.parametrize("busy_pu", [0.5, 0.8])
def test_over_weeks_of_demand_less_is_lost_than_by_leaving_at_once(busy_pu: float) -> None:
    demand = made_up_demand(weeks=16, seed=3)
    once, timed = played(demand, 100, seed=4, busy_pu=busy_pu)
    assert once.waited == 0 < timed.waited < timed.suspects
    assert timed.lost_gpu_h < 0.95 * once.lost_gpu_h
    assert timed.worst_risk_pu <= RISK_PU


def test_hardware_that_is_ill_for_long_waits_for_no_trough() -> None:
    """Its verdict raises the chance for six hours only, and is no less true after."""
    twin = Troughs(150.0, *PEAK, day_pu=0.01)
    since_ns = twin.now_ns - round(7 * HOUR_S * NS)
    twin.ill.say("node", IDLE, DEGRADED, "bad", action_name="drain", sure_pu=0.9, since_ns=since_ns)
    twin.wait(120)
    assert twin.phase(IDLE) != "suspect"
    assert TROUGH not in [a.get("why") for a in twin.accounts]


def test_a_chance_that_is_known_for_an_hour_alone_goes_on_after_it() -> None:
    chances = Chances(np.array([0.04]), np.array([0.04]), np.array([0.5]))
    found = drain_timing(curve(*([150.0] * 24), 60.0), chances, stakes(), np.zeros(1), Delays(), 1e5)
    rate = -np.log1p(-0.04) / HOUR_S
    assert found.latest_s[0] == pytest.approx(-np.log1p(-RISK_PU) / rate)


def test_a_storm_of_suspects_is_weighed_by_sizes_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plain = DemandCurve.missed_pu
    monkeypatch.setattr(
        DemandCurve, "missed_pu", lambda self, gpus: (asked.append(len(gpus)), plain(self, gpus))[1]
    )
    day_pu = np.linspace(0.01, 0.9, 500)
    sizes = np.where(np.arange(500) % 2, 4.0, 8.0)
    hours = curve(*([150.0] * 12), *([60.0] * 12), sigma=3.0)
    many = drain_timing(hours, Chances(day_pu * np.nan, day_pu, day_pu),
                        replace(stakes(500), node_gpus=sizes), np.zeros(500), Delays(), 1e4)  # fmt: skip
    assert asked == [2]
    for k in (0, 101, 499):
        one = day_pu[k : k + 1]
        alone = drain_timing(hours, Chances(one * np.nan, one, one),
                             stakes(node_gpus=sizes[k]), np.zeros(1), Delays(), 1e4)  # fmt: skip
        assert (many.leave_s[k], many.gain_gpu_h[k]) == (alone.leave_s[0], alone.gain_gpu_h[0])
