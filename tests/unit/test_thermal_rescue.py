"""thermal_guard beyond caps: GPUs that warm up at their lowest caps, and the orders on nodes that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies.operator import Operator
from policies.thermal_guard import CALM_S, OFF_LEAD_S, STOP_LEAD_S, ThermalGuard
from tests.support.builders import Twin, explained, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS
from twin.telemetry import AuthorityChanged, Held, JobStarted, OperatorRequest

LONG = pytest.mark.long

CAP, POWER, SERVICE, SAVE = (
    "gpu.power_cap_w",
    "node.power_state",
    "node.service_level",
    "job.checkpoint_since_s",
)
# GB200 NVL72: guard at 82, shutdown at 95, of which 2 K are margin
ROOM_TO_C, LOW_W = 93.0, 200.0
COOL = {"gpu.temp_c": 60.0, "gpu.power_w": 1000.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0,
        "rack.supply_temp_c": 32.0, "rack.return_temp_c": 44.0, "node.power_readback_state": 0.0}  # fmt: skip
# The lowest caps have arrived
CAPPED = COOL | {"gpu.power_w": 230.0, "gpu.power_limit_w": LOW_W}
OFF = CAPPED | {"node.power_readback_state": [2.0] + [0.0] * 35}
Read = Callable[[int], dict[str, Any]]


def warming(rate_k_per_s: float, first_c: float, *gpus: int, step_k: float = 0.0) -> Read:
    """At their lowest caps, these GPUs warm up from `first_c`; readings are rounded to `step_k`."""

    def read(second: int) -> dict[str, Any]:
        temps = np.full(144, 60.0)
        temps[list(gpus)] = first_c + rate_k_per_s * second
        return CAPPED | {"gpu.temp_c": np.round(temps / step_k) * step_k if step_k else temps}

    return read


def guarded(*policies: Any, **tree: Any) -> Twin:
    twin = Twin(two_racks(**tree), [ThermalGuard(), *policies], act=True)
    twin.run(3, COOL)
    return twin


def ordered(twin: Twin) -> dict[int, float]:
    lease = twin.lease(POWER)
    return {int(i): float(lease[i]) for i in np.flatnonzero(lease > 0)}


def lived(twin: Twin, read: Read, seconds: int) -> dict[float, int]:
    """The second of the first order of each level on node 0."""
    first: dict[float, int] = {}
    for second in range(seconds):
        twin.tick(read(second))
        if 0 in ordered(twin):
            first.setdefault(ordered(twin)[0], second)
    return first


@pytest.mark.parametrize("step_k", [0.0, 1.0])
def test_a_node_that_warms_at_its_lowest_caps_is_stopped_and_then_switched_off(step_k: float) -> None:
    """0.4 K/s from 83 degC: each order comes before its lead is over, for the node whose GPUs warm up."""
    twin, read = guarded(), warming(0.4, 83.0, 0, 1, step_k=step_k)
    twin.tick(COOL, JobStarted(job="j", nodes=("r2/node0",), kind="training"))  # so that jobs are known
    first: dict[float, int] = {}
    for second in range(30):
        twin.tick(read(second))
        assert set(ordered(twin)) <= {0}
        if 0 in ordered(twin):
            first.setdefault(ordered(twin)[0], second)
            assert twin.lease(SERVICE)[0] == 3.0, "nothing new shall start there"
    left_s = {level: (ROOM_TO_C - 83.0) / 0.4 - second for level, second in first.items()}
    assert list(left_s) == [1.0, 2.0]
    assert 5.0 <= left_s[1.0] <= STOP_LEAD_S
    assert 0.0 <= left_s[2.0] <= OFF_LEAD_S, "with the margin of 2 K still ahead"


NOISE = np.random.default_rng(5)


def flicker(second: int) -> dict[str, Any]:
    temps = np.round(85.0 + NOISE.normal(0.0, 0.4, 144))
    return CAPPED | {"gpu.temp_c": temps}


def step_once(second: int) -> dict[str, Any]:
    return CAPPED | {"gpu.temp_c": 84.0 + (second > 10)}


def cached(second: int) -> dict[str, Any]:
    """Readings that an exporter repeats for 10 s, with new instants."""
    return CAPPED | {"gpu.temp_c": 84.0 + (second // 10) % 2}


def late_power(second: int) -> dict[str, Any]:
    """The cap is read back a second before the power falls, of plates that then cool."""
    temp_c = 84.0 + 2.0 * min(second, 1) - 0.2 * max(second - 1, 0)
    return CAPPED | {"gpu.temp_c": temp_c, "gpu.power_w": 1000.0 if second <= 1 else 230.0}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(warming(0.5, 83.0, 5), id="one GPU alone", marks=LONG),
        pytest.param(lambda s: CAPPED | {"rack.flow_lpm": [0.0, 96.0]}, id="a flow meter alone"),
        pytest.param(warming(-0.1, 90.0, 0, 1, 2), id="hot but cooling"),
        pytest.param(warming(0.0, 88.0, 0, 1, 2), id="hot and steady"),
        pytest.param(lambda s: {k: v for k, v in CAPPED.items() if k != "gpu.temp_c"}, id="silent"),
        pytest.param(lambda s: COOL | {"gpu.temp_c": 40.0 + 3.5 * min(s, 10)}, id="a step of the load"),
        pytest.param(flicker, id="noise in whole kelvins"),
        pytest.param(step_once, id="one step of a kelvin"),
        pytest.param(cached, id="an exporter that repeats itself"),
        pytest.param(late_power, id="a power that falls late"),
        pytest.param(lambda s: CAPPED | {"gpu.temp_c": 84.0 + 7.0 * min(s, 1)}, id="read before the cap"),
        pytest.param(lambda s: CAPPED | {"gpu.temp_c": 113.0 + 0.5 * s}, id="degrees Fahrenheit"),
        pytest.param(
            lambda s: warming(0.4, 83.0, 0, 1)(s) | {"gpu.power_limit_w": 1200.0}, id="a cap not taken"
        ),
    ],
)  # fmt: skip
def test_what_moves_no_switch(read: Read) -> None:
    twin = guarded()
    for second in range(60):
        twin.tick(read(second))
        assert not ordered(twin), second


def test_readings_of_an_episode_before_say_nothing_of_the_next() -> None:
    """A job that ends as its GPUs pass their guard, shortly after an episode: they are idle, and cool."""
    twin = guarded()

    def ticks(base: dict[str, Any], *temps_c: float) -> None:
        for temp_c in temps_c:
            twin.tick(base | {"gpu.temp_c": np.where(np.arange(144) < 2, temp_c, 60.0)})
            assert not ordered(twin)

    ticks(CAPPED, *[84.0] * 10, *[60.0] * 75)
    ticks(COOL, *np.arange(61.6, 82.0, 1.6))
    ticks(COOL | {"gpu.power_w": 120.0}, *np.arange(84.0, 70.0, -2.0))


STARVED = {"rack.flow_lpm": [5.0, 96.0]}


def creeping(rate_k_per_s: float, first_c: float, *gpus: int, step_k: float = 0.0, **more: Any) -> Read:
    """The same after a cooler time at the lowest caps."""
    read = warming(rate_k_per_s, first_c, *gpus, step_k=step_k)
    return lambda second: read(second) | {f"rack.{key}": value for key, value in more.items()}


@pytest.mark.long
@pytest.mark.parametrize("rate_k_per_s", sampled([0.03, 0.06], 0.03))
@pytest.mark.parametrize("step_k", sampled([0.0, 1.0], 1.0))
def test_a_creep_in_a_starved_rack_is_ended_before_the_shutdown(step_k: float, rate_k_per_s: float) -> None:
    """It is too slow for the line through some seconds."""
    read = creeping(rate_k_per_s, 86.0, 0, 1, step_k=step_k, flow_lpm=[5.0, 96.0])
    first = lived(guarded(), read, 300)
    shutdown_s = (95.0 - 86.0) / rate_k_per_s
    assert list(first) == [1.0, 2.0]
    assert first[1.0] < shutdown_s - 45.0, "the longest that a system takes to stop"
    assert first[2.0] < shutdown_s - OFF_LEAD_S
    assert first[1.0] > 0.3 * shutdown_s


@pytest.mark.long
def test_a_creep_counts_without_a_flow_meter_once_several_gpus_have_risen_far() -> None:
    few, several = (0, 1, 2), (0, 1, 2, 3)
    assert lived(guarded(), creeping(0.06, 83.0, *several), 240)
    assert not lived(guarded(), creeping(0.06, 83.0, *few), 200)
    assert not lived(guarded(), creeping(0.06, 87.0, *several), 100), "risen by no more than 6 K"


SWAY = np.random.default_rng(6)


def sway(second: int) -> dict[str, Any]:
    """Hot GPUs of a starved rack that neither warm up nor cool down, as whole kelvins around a border."""
    drift = 0.4 * np.sin(second / 80.0)
    return CAPPED | STARVED | {"gpu.temp_c": np.round(88.5 + drift + SWAY.normal(0.0, 0.3, 144))}


@pytest.mark.long
@pytest.mark.parametrize(
    "read",
    [
        pytest.param(sway, id="steady and hot"),
        pytest.param(lambda s: CAPPED | STARVED | {"gpu.temp_c": 88.0 + (s > 40) + (s > 200)}, id="steps"),
        pytest.param(creeping(0.06, 83.0, 5, flow_lpm=[5.0, 96.0]), id="one GPU alone", marks=LONG),
        pytest.param(creeping(0.06, 60.0, 0, 1, 2, 3, flow_lpm=[5.0, 96.0]), id="cool"),
        pytest.param(
            lambda s: warming(0.06, 83.0, 80, 81)(s) | {"rack.flow_lpm": [5.0, 96.0]},
            id="another rack", marks=LONG,
        ),
        pytest.param(
            lambda s: {
                k: v for k, v in creeping(0.06, 83.0, 0, 1, 2)(s).items() if s < 2 or k != "rack.flow_lpm"
            },
            id="a flow meter that is silent", marks=LONG,
        ),
    ],
)  # fmt: skip
def test_no_creep_and_no_starved_rack_is_no_danger(read: Read) -> None:
    twin = guarded()
    for second in range(240):
        twin.tick(read(second))
        assert not ordered(twin), second


def test_a_sensor_that_creeps_beside_a_warm_neighbour_moves_no_switch() -> None:
    twin, read = guarded(), warming(0.4, 83.0, 0)
    for second in range(40):
        temps = read(second)["gpu.temp_c"]
        temps[8] = 84.0
        twin.tick(CAPPED | {"gpu.temp_c": temps})
        assert not ordered(twin)


def endangered(twin: Twin) -> Twin:
    """Node 0 warms up until it is to be switched off."""
    lived(twin, warming(0.4, 83.0, 0, 1), 25)
    assert ordered(twin) == {0: 2.0}
    return twin


def orders_of(twin: Twin, read: dict[str, Any], seconds: int) -> int:
    """New commands on the power in so many seconds, but for what an operator asks."""
    new = 0
    for _ in range(seconds):
        twin.tick(read)
        new += sum(float(c.value.max()) > 0 for c in twin.commands(POWER))
    return new


@pytest.mark.long
def test_an_order_ends_with_its_danger_and_the_node_stays_as_it_is() -> None:
    twin = endangered(guarded())
    twin.run(round(CALM_S) + 150, OFF | {"gpu.temp_c": 50.0})
    assert not ordered(twin), "the lease has lapsed"
    assert orders_of(twin, COOL, 400) == 0, "people switched it on"
    assert endangered(twin), "new evidence is a new order"


@pytest.mark.parametrize("how", ["advised before", "restarted", "a new term"])
def test_what_was_a_danger_an_hour_ago_strikes_nobody(how: str) -> None:
    policies = [ThermalGuard()]
    twin = Twin(two_racks(), policies, act=how != "advised before")
    twin.run(3, COOL)
    lived(twin, warming(0.4, 83.0, 0, 1), 25)
    for _ in range(60):
        twin.tick(COOL, dt_s=10.0)
    if how == "advised before":
        twin.tick(COOL, AuthorityChanged(author="ann", policy="thermal_guard", authority="act"))
    elif how == "restarted":
        twin = twin.restarted(two_racks(), [ThermalGuard()])
    else:
        twin.engine.arbiter.begin_term(twin.engine.arbiter.epoch + 1, False, twin.now_ns)
    assert orders_of(twin, COOL, 20) == 0
    assert not ordered(twin)


def test_a_request_of_people_brings_a_cool_node_back() -> None:
    twin = endangered(guarded(Operator()))
    twin.run(round(CALM_S) + 5, OFF | {"gpu.temp_c": 50.0})
    ask = OperatorRequest(
        id="on", author="ann", reason="the pump is mended", control=POWER, names=("r1/node0",),
        lo=0.0, hi=0.0, want=0.0, expires_ns=twin.now_ns + 600 * NS,
    )  # fmt: skip
    twin.tick(OFF | {"gpu.temp_c": 50.0}, ask)
    twin.run(2, OFF | {"gpu.temp_c": 50.0})
    assert twin.lease(POWER)[0] == 0.0


def test_a_hold_lets_the_orders_pass() -> None:
    twin = guarded()
    twin.tick(COOL, Held(author="ann"))
    endangered(twin)


def test_a_site_that_does_not_allow_it_is_not_switched_off() -> None:
    twin = guarded(controls={POWER: {"max": 0}})
    twin.tick(COOL, JobStarted(job="j", nodes=("r2/node0",), kind="training"))
    lived(twin, warming(0.4, 83.0, 0, 1), 25)
    assert ordered(twin) == {}
    assert twin.lease(CAP)[0] == LOW_W
    assert np.isnan(twin.lease(SERVICE)).all()


@pytest.mark.parametrize("save_s, saves", [(0.0, True), (10.0, True), (1000.0, False)])
def test_jobs_save_if_they_can_in_the_time_that_is_left(save_s: float, saves: bool) -> None:
    twin = guarded()
    twin.tick(COOL, JobStarted(job="j", nodes=("r1/node0", "r1/node1"), kind="training",
                               checkpoint_save_s=save_s))  # fmt: skip
    asked = False
    for second in range(20):
        twin.tick(warming(0.2, 83.0, 0, 1)(second))
        asked |= bool(np.isfinite(twin.lease(SAVE)).any())
    assert asked is saves


def test_the_explanation_says_how_long_and_what_next() -> None:
    twin, read = guarded(), warming(0.4, 83.0, 0, 1)
    lived(twin, read, 16)
    found = explained(twin, "thermal_guard")
    (row,) = found.table("dangers")
    assert row["node"] == "lab/h/r1/node0"
    true_s = (ROOM_TO_C - 83.0) / 0.4 - 15.0
    assert true_s <= row["left_s"] <= 2.0 * true_s, "by the least rate that the readings allow"  # type: ignore[operator]
    assert (row["action"], row["power"]) == ("stop its system", "on")
    assert found.figure("endangered_nodes") == 1
    elsewhere = explained(twin, "thermal_guard", "r2")
    assert (elsewhere.figure("endangered_nodes"), elsewhere.table("dangers")) == (0, [])
