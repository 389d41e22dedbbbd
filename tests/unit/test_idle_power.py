"""Choice of the nodes that sleep and of those that wake, on a small site. May import `twin`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from policies.idle_power import IdlePower
from policies.idle_power.breakers import SAFE_PU, follow_heat
from policies.idle_power.demand import LARGEST, quantile_of
from policies.idle_power.nodes import ASKED, AWAKE, BACK, FOUND, SLEEPING, WOKEN
from policies.idle_power.wake import inrush_w, wake_first
from policies.node_replacement import load_limits
from tests.support.builders import Twin, explained
from tests.support.idle_power_month import played
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, ContractError
from twin.contracts import ASLEEP, READY, WAKING, Forecast
from twin.physics import CONTINUOUS_PU, MAGNETIC_PU, step
from twin.telemetry import events as ev

CONTROL, GPUS = "node.standby", 8
QUICK: dict[str, Any] = {"wake_s": 60.0, "idle_s": 0.0, "awake_s": 0.0, "learn_s": 0.0}


class Demand:
    """A forecast of GPUs in demand, as told; NaN: none."""

    name: ClassVar[str] = "load"
    period_s: ClassVar[float] = 1.0
    fit_every_s: ClassVar[float] = 0.0

    def __init__(self, upper: float) -> None:
        self.upper = upper

    def update(self, view: Any) -> None: ...
    def predict(self, view: Any) -> list[Forecast]:
        mean, lo, hi = (np.full(1, self.upper * x, np.float32) for x in (0.9, 0.8, 1.0))
        return [Forecast("site.gpu_demand_count", 900.0, mean, lo, hi, "load@test")]

    def remap(self, kept: Any) -> None: ...
    def memory(self) -> dict[str, np.ndarray]:
        return {}

    def parameters(self) -> dict[str, np.ndarray]:
        return {}


class Pod:
    """Three racks of four nodes of eight GPUs; `standby` and `jobs` of nodes are set by the test."""

    def __init__(self, upper: float = 8.0, budget_w: float = 200e3, **settings: Any) -> None:
        racks = ["r1", "r2", "r3"]
        tree = {"site": "lab", "max_jobs": 12, "halls": [{
            "name": "h", "racks": [{"name": r, "profile": "hgx-h100", "nodes": 4} for r in racks],
            "feeders": [{"name": s, "side": s.upper(), "budget_w": budget_w, "serves": racks} for s in "ab"],
        }]}  # fmt: skip
        self.model = Demand(upper)
        self.twin = Twin(tree, [IdlePower(**(QUICK | settings))], [self.model], act=True)  # type: ignore[list-item]
        self.standby, self.running, self.pending = np.zeros(12), 8.0, 0.0
        self.obeys, self.more = True, dict[str, Any]()
        self.rng = np.random.default_rng(2)
        self.start_job(0)

    def start_job(self, node: int) -> None:
        name = self.twin.site.name("node", node)
        self.twin.tick({}, ev.JobStarted(id=f"j{node}", job=f"j{node}", nodes=(name,), kind="training"))

    def run(self, seconds: int = 60) -> None:
        for _ in range(seconds // 10):
            up = (self.standby == READY)[np.arange(96) // GPUS]
            counts = {"site.gpu_running_count": self.running, "site.gpu_pending_count": self.pending}
            gpu_w = np.where(up, 100.0 + self.rng.normal(0, 1, 96), np.nan)
            values = {
                "gpu.power_w": gpu_w, "gpu.temp_c": gpu_w / 100.0 + 34.0,
                "node.power_w": np.where(self.standby == ASLEEP, 60.0, 1900.0) + self.rng.normal(0, 1, 12),
                "node.service_level_state": 0.0, "node.standby_state": self.standby,
                "rack.power_w": 8000.0 + self.rng.normal(0, 5, 3),
            }  # fmt: skip
            counts = {k: v for k, v in counts.items() if np.isfinite(v)}
            self.twin.tick(values | counts | self.more, dt_s=10.0)
            for batch in self.twin.commands(CONTROL) if self.obeys else ():
                self.standby[batch.index] = np.where(batch.value == ASLEEP, ASLEEP, WAKING)
            assert self.twin.engine.suspended == {}

    @property
    def memory(self) -> Any:
        return self.twin.engine.memory["idle_power"]

    def asleep(self) -> list[int]:
        return np.flatnonzero(self.standby == ASLEEP).tolist()


def test_who_is_not_needed_sleeps_whole_racks_first_and_who_works_never() -> None:
    """Needed are 24 GPUs beside the 8 that work: three nodes stay up, eight sleep, two racks among them."""
    pod = Pod(upper=32.0)
    pod.run(300)
    assert len(pod.asleep()) == 8
    assert 0 not in pod.asleep()
    assert (np.bincount(np.array(pod.asleep()) // 4, minlength=3) == 4).sum() == 2
    assert explained(pod.twin, "idle_power").figure("sleeping_nodes") == 8


def test_who_sleeps_is_woken_before_the_forecast_rises_and_at_once_where_jobs_wait() -> None:
    pod = Pod(upper=8.0)
    pod.run(300)
    assert len(pod.asleep()) == 11
    pod.model.upper = 40.0
    pod.run(20)
    assert (pod.standby == WAKING).sum() == 4
    pod.model.upper, pod.pending = np.nan, 60.0  # without a forecast, those that wait still count
    pod.run(10)
    assert (pod.standby == WAKING).sum() == 8


@pytest.mark.long
@pytest.mark.parametrize("lost", sampled(["demand", "forecast", "standby", "level"], "demand", "standby"))
def test_what_is_unknown_lays_nobody_down_and_wakes_nobody(lost: str) -> None:
    pod = Pod(upper=48.0)
    pod.run(300)
    before = pod.asleep()
    assert before
    if lost == "demand":
        pod.running = np.nan
    elif lost == "forecast":
        pod.model.upper = np.nan
    else:
        name = "node.standby_state" if lost == "standby" else "node.service_level_state"
        pod.more = {name: np.full(12, np.nan)}
    pod.run(300)
    pod.model.upper = np.nan if lost == "forecast" else 8.0
    pod.run(600)
    assert pod.asleep() == before


def test_a_node_that_others_wake_or_that_gets_a_job_is_left_to_them() -> None:
    pod = Pod(upper=8.0)
    pod.run(300)
    pod.standby[4] = WAKING
    pod.start_job(5)
    pod.run(20)
    assert pod.memory["phase"][[4, 5]].tolist() == [AWAKE, AWAKE]
    pod.standby[[4, 5]] = READY
    pod.run(20)
    assert pod.memory["phase"][6] == SLEEPING


@pytest.mark.long
def test_who_came_back_is_kept_ready_for_a_while() -> None:
    pod = Pod(upper=8.0, awake_s=300.0)
    pod.run(600)
    pod.pending = 8.0
    pod.run(20)
    (node,) = np.flatnonzero(pod.standby == WAKING)
    pod.standby[node], pod.pending = READY, 0.0
    pod.run(280)
    assert (pod.memory["phase"][node], pod.standby[node]) == (BACK, READY)
    pod.run(300)
    assert pod.standby[node] == ASLEEP


@pytest.mark.long
def test_who_would_not_sleep_is_not_asked_again_for_an_hour_and_who_is_found_asleep_may_be_woken() -> None:
    pod = Pod(upper=8.0)
    pod.obeys = False
    pod.run(300)
    assert (pod.memory["phase"] == ASKED).sum() == 11
    pod.run(1800)
    assert (pod.memory["phase"] == AWAKE).all()
    pod.standby[7] = ASLEEP
    pod.run(20)
    assert pod.memory["phase"][7] == FOUND
    pod.pending = 200.0
    pod.run(20)
    assert pod.memory["phase"][7] == WOKEN


def test_starts_wait_for_room_on_the_feeders() -> None:
    """Each start draws 2.4 kW: a feed that carries 24 kW of 27.5 has room for one at a time."""
    pod = Pod(upper=8.0, budget_w=27_500.0)
    pod.run(300)
    pod.pending = 200.0
    pod.run(10)
    assert (pod.standby == WAKING).sum() == 1
    pod.run(30)  # its draw is not read yet
    assert (pod.standby == WAKING).sum() == 1


def trips(pod: Pod, load_w: float, starts: int, theta: float, boot_s: float = 600.0) -> bool:
    """True if a feed's breaker opens when so many nodes start at once, by its time-current curve."""
    rating_w = float(pod.twin.site.budget_w[0]) / CONTINUOUS_PU
    inrush_w = starts * inrush_of(pod)
    if load_w + inrush_w >= MAGNETIC_PU * rating_w:
        return True
    boots_w = load_w + starts * 1.25 * 1900.0
    return bool(step(np.array([theta]), np.array([boots_w / rating_w]), boot_s)[0] >= 1.0)


def inrush_of(pod: Pod) -> float:
    return float(inrush_w(pod.twin.engine.view(10.0))[0])


@pytest.mark.long
def test_starts_of_one_look_bring_no_breaker_to_its_magnetic_trip() -> None:
    """With no ramp limit eleven starts have room by their draw, and not by their inrush."""
    pod = Pod(upper=8.0, budget_w=65e3, ramp_pu=1.0)
    pod.run(900)
    assert len(pod.asleep()) == 11
    pod.pending = 200.0
    pod.run(10)
    first = int((pod.standby == WAKING).sum())
    assert 1 <= first < 11
    assert trips(pod, 24e3, 11, theta=0.2)
    assert not trips(pod, 24e3, first, theta=0.2)
    pod.run(60)
    assert (pod.standby == WAKING).sum() > first


@pytest.mark.long
def test_a_breaker_that_is_hot_lets_nobody_start_until_it_has_cooled() -> None:
    pod = Pod(upper=8.0, ramp_pu=1.0)
    pod.run(900)
    assert pod.memory["theta"].max() < SAFE_PU
    pod.memory["theta"][0] = 0.95
    pod.pending = 200.0
    pod.run(10)
    assert not (pod.standby == WAKING).any(), "both feeds carry all racks"
    assert any("1 feeders have a breaker" in s.text for s in explained(pod.twin, "idle_power").sentences)
    pod.run(300)
    assert (pod.standby == WAKING).any()
    assert pod.memory["theta"][0] < SAFE_PU


def test_a_load_that_is_unknown_cools_no_breaker() -> None:
    """It may be as much as the breaker holds, so that the heat grows to a trip, also of one never watched."""
    pod = Pod(upper=8.0)
    pod.run(60)
    view = pod.twin.engine.view(10.0)
    limits, memory = load_limits(view), dict(pod.memory)
    limits.now_w[limits.n_rack] = np.nan
    limits.now_w[limits.n_rack + 1] = np.inf
    before = memory["theta"].copy()
    follow_heat(view, memory, limits, view.now_ns - 10 * NS)
    assert (memory["theta"] > before).all()
    assert (memory["theta"] < SAFE_PU).all(), "one look without a meter stops no start"
    follow_heat(view, memory, limits, view.now_ns - 3600 * NS)
    assert (memory["theta"] >= SAFE_PU).all()
    memory["theta"] = np.full(2, np.nan)
    follow_heat(view, memory, limits, 0)
    assert (memory["theta"] == 1.0).all()


@pytest.mark.long
def test_starts_of_nodes_that_failed_lately_share_the_inrush_of_the_look() -> None:
    pod = Pod(upper=8.0, budget_w=65e3, ramp_pu=1.0)
    pod.run(900)
    view, asleep = pod.twin.engine.view(10.0), np.array(pod.asleep(), np.int32)
    memory = {name: column.copy() for name, column in pod.memory.items()}
    limits = load_limits(view)
    first = wake_first(view, memory, limits, asleep, 200.0, 1.0)
    memory["phase"][first], memory["phase_ns"][first] = WOKEN, view.now_ns
    rest = np.setdiff1d(asleep, first).astype(np.int32)
    assert len(first) < len(asleep)
    assert not len(wake_first(view, memory, limits, rest, 200.0, 1.0))


def test_the_reserve_is_the_excess_that_so_few_rises_were_beyond() -> None:
    excess = np.random.default_rng(1).exponential(10.0, 4000)
    kept = np.sort(excess)[::-1][:LARGEST]
    memory = {"rises": np.array([[4000.0, 0.0]]), "excess_gpus": np.full((1, 2, LARGEST), -np.inf)}
    memory["excess_gpus"][0, 0] = kept
    for late_pu in (1e-2, 1e-3, 1e-9):
        assert (excess > quantile_of(memory, late_pu)).mean() <= late_pu
    assert quantile_of(memory, 1e-2) == pytest.approx(np.quantile(excess, 0.99), rel=0.05)


@pytest.mark.long
def test_half_a_day_of_made_up_demand_with_the_whole_engine() -> None:
    """Demand comes and goes: much is saved, nothing comes late, no feed is beyond its budget, no alarm."""
    minutes = np.arange(420)
    demand = np.round(60.0 + 30.0 * np.sin(minutes / 40.0) + 4.0 * (minutes % 7 == 0))
    world = played(demand, 200, nodes=24, whole=True, learn_s=6000.0, late_pu=1e-3)
    score = world.score
    assert score.saved_pu > 0.15
    assert (score.late, score.alarms) == (0, set())
    assert score.worst_pu <= 1.0
    account = {k: float(world.memory[k][0]) for k in ("saved_j", "expected_j")}
    assert account["saved_j"] == pytest.approx(account["expected_j"], rel=0.1)


@pytest.mark.parametrize("settings", [{"late_pu": 0.0}, {"wake_s": 1e4}, {"ramp_pu": "x"}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=f"{next(iter(settings))}: expected a number"):
        IdlePower(**settings)
