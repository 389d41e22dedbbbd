"""The plan of thermal_guard: seconds at each power from stored heat, early caps, and locked clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from policies.thermal_guard import ThermalGuard
from policies.thermal_guard.plan import CAPACITY_SPREAD, plan_of, rate_at, seconds
from policies.thermal_guard.rescue import LOCK_WAIT_S
from tests.support.builders import Twin, explained, two_racks

CAP, LOCK, POWER = "gpu.power_cap_w", "gpu.clock_lock_mhz", "node.power_state"
# GB200 NVL72: guard at 82, limit 87, shutdown at 95, of which 2 K are margin; 248 J/K
TAU_S, CAPACITY, ROOM_TO_C = 7.0, 7.0 * 1200.0 / 34.0, 93.0
FREE = {"gpu.temp_c": 60.0, "gpu.power_w": 1000.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0,
        "rack.supply_temp_c": 32.0, "rack.return_temp_c": 44.0, "node.power_readback_state": 0.0,
        "gpu.clock_lock_readback_mhz": 2100.0}  # fmt: skip
HIGH_MIN = {"controls": {CAP: {"min": 400}}}  # where a locked clock saves power beyond the lowest cap
MEASURED_S = 10  # until a rise of 0.4 K/s stands out of the noise of readings
Read = Callable[[int], dict[str, Any]]


def guarded(**tree: Any) -> Twin:
    twin = Twin(two_racks(**tree), [ThermalGuard()], act=True)
    twin.run(3, FREE)
    return twin


def temps(value: float, *gpus: int) -> np.ndarray:
    out = np.full(144, 60.0)
    out[list(gpus)] = value
    return out


@pytest.mark.parametrize("conductance", [0.0, 6.0, 29.0])
def test_a_rate_at_another_power_is_that_of_the_law(conductance: float) -> None:
    """C dT/dt = P - G (T - Tc): at one temperature, the coolant's part is the same at every power."""
    temp_c, coolant_c = 80.0, 50.0
    rate = [(p - conductance * (temp_c - coolant_c)) / CAPACITY for p in (1100.0, 200.0)]
    found = rate_at(np.array([rate[0]]), np.array([1100.0]), np.array([200.0]), np.array([CAPACITY]))
    assert found == pytest.approx([rate[1]])


def test_seconds_are_the_room_over_the_rate() -> None:
    room, rate = np.array([10.0, 10.0, 10.0, -1.0, 10.0]), np.array([0.5, 0.0, -1.0, 0.5, np.nan])
    assert seconds(room, rate).tolist() == [20.0, np.inf, np.inf, 0.0, np.inf]


def test_powers_and_heat_come_from_design_and_envelope() -> None:
    gpu = np.arange(4, dtype=np.int32)
    free = plan_of(guarded().engine.view(1.0), gpu)
    assert free.capacity_j_per_k == pytest.approx([CAPACITY] * 4)
    assert (free.low_w[0], free.locked_w[0], free.lock_helps.any()) == (200.0, 200.0, False)
    high = plan_of(guarded(**HIGH_MIN).engine.view(1.0), gpu)
    assert (high.low_w[0], high.locked_w[0]) == (400.0, pytest.approx(200.0 + 1000.0 * (345 / 2100) ** 2))
    assert high.lock_helps.all()
    assert high.lockable.all()
    assert not high.locked.any()


def test_a_rate_at_full_power_never_tells_that_idle_would_not_do() -> None:
    """Without any coolant, the heat capacity is more in doubt than what idle power adds."""
    least_j_per_k = np.array([CAPACITY * (1.0 - CAPACITY_SPREAD)])
    rate = np.array([1200.0 / CAPACITY])  # as fast as it can be
    assert rate_at(rate, np.array([1200.0]), np.array([200.0]), least_j_per_k)[0] < 0.0


def stagnant(*gpus: int) -> Read:
    """From full load, 3.5 K/s without flow; whole kelvins."""
    return lambda second: FREE | {"gpu.temp_c": np.round(temps(60.0 + 3.5 * second, *gpus))}


def test_gpus_that_surge_send_their_rack_to_its_lowest_caps_before_any_guard() -> None:
    twin, read = guarded(), stagnant(0, 1)
    for second in range(10):
        twin.tick(read(second))
        if np.isfinite(twin.lease(CAP)).any():
            break
    assert 60.0 + 3.5 * second < 82.0, "before the guard"
    assert twin.lease(CAP)[:72].tolist() == [200.0] * 72, "neighbours leave them their coolant"
    assert np.isnan(twin.lease(CAP)[72:]).all()
    assert not (twin.lease(POWER) > 0).any()
    (strained,) = explained(twin, "thermal_guard").table("strains")
    assert (strained["entity"], strained["gpus"], strained["basis"]) == ("lab/h/r1", 72, "rise")
    (row,) = explained(twin, "thermal_guard").table("dangers")
    room_k = ROOM_TO_C - np.round(60.0 + 3.5 * second)
    rates = [room_k / row[f"left_{at}s"] for at in ("now_", "", "locked_")]  # type: ignore[operator]
    assert rates[0] == pytest.approx(3.5, abs=0.5), "two steps of a kelvin in two seconds"
    assert rates[1] == pytest.approx(rates[0] - 800.0 / CAPACITY, abs=0.1)
    assert rates[2] == rates[1], "where idle GPUs draw as much as the lowest cap allows"
    twin.run(70, FREE)
    assert not explained(twin, "thermal_guard").table("strains")


def step_of_load(tau_s: float, settles_c: float, dice: np.random.Generator) -> Read:
    """From idle to full power, all GPUs; whole kelvins and the noise of sensors."""

    def read(second: int) -> dict[str, Any]:
        temp_c = settles_c + (40.0 - settles_c) * np.exp(-second / tau_s)
        return FREE | {"gpu.temp_c": np.round(temp_c + dice.normal(0.0, 0.3, 144))}

    return read


def step_of_chips(idle_c: float, settles_c: float) -> Read:
    """From idle to full power where a chip warms up faster than its plate."""

    def read(second: int) -> dict[str, Any]:
        rise = 0.4 * (1.0 - np.exp(-second / 1.5)) + 0.6 * (1.0 - np.exp(-second / 7.0))
        temp_c = np.full(144, np.round(idle_c + (settles_c - idle_c) * rise))
        return FREE | {"gpu.temp_c": temp_c, "gpu.power_w": 1150.0 if second else 200.0}

    return read


def one_jump(second: int) -> dict[str, Any]:
    """An exporter that repeats itself for 5 s."""
    return FREE | {"gpu.temp_c": 40.0 + 15.0 * min(second // 5, 2)}


@pytest.mark.parametrize(
    "read",
    [
        *(
            pytest.param(step_of_load(tau_s, 80.5, np.random.default_rng(k)), id=f"a step of load {tau_s}")
            for k, tau_s in enumerate((5.0, 7.0, 9.0, 30.0))
        ),
        pytest.param(step_of_chips(40.0, 80.5), id="a step of load that chips feel first"),
        pytest.param(step_of_chips(51.0, 81.0), id="the same in hot water"),
        pytest.param(stagnant(5), id="one GPU alone"),
        pytest.param(lambda s: FREE | {"gpu.temp_c": temps(60 + 25 * (s == 4), 0, 1)}, id="a spike"),
        pytest.param(
            lambda s: FREE | {"gpu.temp_c": temps(60.0 + (s > 3) + 14 * (s > 4), 0, 1)}, id="a step, a jump"
        ),
        pytest.param(one_jump, id="an exporter that repeats itself"),
        pytest.param(lambda s: FREE | {"gpu.temp_c": 110.0 + 3.5 * s}, id="degrees Fahrenheit"),
    ],
)  # fmt: skip
def test_what_is_no_surge(read: Read) -> None:
    """A cap may come of the guard, for that GPU, and never of the rise, for its rack."""
    twin = guarded()
    for second in range(30):
        twin.tick(read(second))
        reasons = {c.reason for c in twin.commands(CAP)}
        assert not any("warm up faster" in reason for reason in reasons), second
        assert not (twin.engine.memory["thermal_guard"]["danger_ns"] > 0).any()


def lived(twin: Twin, rate_k_per_s: float, seconds: int, obeys: bool, saved_k_per_s: float) -> list[float]:
    """At their lowest caps of 400 W, GPUs 0 and 1 warm up, by less from their lock on; the power of node 0 as
    commanded at each second. `obeys`: the agent locks clocks, and reads back that it has."""
    temp_c, out = 83.0, []
    for _ in range(seconds):
        locked = twin.lease(LOCK) == 345.0
        temp_c += rate_k_per_s - (saved_k_per_s if obeys and locked[0] else 0.0)
        mhz = np.where(locked & obeys, 345.0, 2100.0)
        twin.tick(FREE | {"gpu.power_limit_w": 400.0, "gpu.power_w": 400.0, "gpu.temp_c": temps(temp_c, 0, 1),
                          "gpu.clock_lock_readback_mhz": mhz})  # fmt: skip
        out.append(float(np.nan_to_num(twin.lease(POWER)[0])))
    return out


@pytest.mark.long
def test_nothing_is_stopped_where_a_locked_clock_will_do() -> None:
    twin = guarded(**HIGH_MIN)
    assert set(lived(twin, 0.4, 60, True, 0.5)) == {0.0}
    assert twin.lease(LOCK)[:4].tolist() == [345.0] * 4
    assert np.isnan(twin.lease(LOCK)[4:]).all()
    hot = FREE | {"gpu.power_limit_w": 400.0, "gpu.power_w": 230.0, "gpu.clock_lock_readback_mhz": 345.0}
    twin.run(120, hot | {"gpu.temp_c": temps(84.0, 0, 1)})
    assert twin.lease(LOCK)[0] == 345.0, "it would warm up again"
    assert np.isnan(twin.lease(LOCK)[2:4]).all(), "that are cool"
    twin.run(80, hot | {"gpu.temp_c": 60.0})
    assert np.isnan(twin.lease(LOCK)).all()


@pytest.mark.parametrize("obeys", [True, False])
def test_a_lock_that_does_not_do_delays_the_stop_by_no_more_than_its_wait(obeys: bool) -> None:
    orders = lived(guarded(**HIGH_MIN), 0.4, 25, obeys, 0.0)
    lag_s = LOCK_WAIT_S if not obeys else 2.0 + MEASURED_S  # the line begins anew with another power
    assert MEASURED_S < orders.index(1.0) <= MEASURED_S + lag_s
    assert 2.0 in lived(guarded(**HIGH_MIN), 0.4, 30, obeys, 0.0)


def test_nothing_is_locked_where_no_agent_tells_of_locks_and_nothing_is_waited_for() -> None:
    twin = Twin(two_racks(**HIGH_MIN), [ThermalGuard()], act=True)
    silent = {key: value for key, value in FREE.items() if key != "gpu.clock_lock_readback_mhz"}
    twin.run(3, silent)
    first = 0
    for second in range(20):
        read = {
            "gpu.power_limit_w": 400.0,
            "gpu.power_w": 400.0,
            "gpu.temp_c": temps(83.0 + 0.4 * second, 0, 1),
        }
        twin.tick(silent | read)
        first = first or (second if twin.lease(POWER)[0] == 1.0 else 0)
    assert first == MEASURED_S
    assert np.isnan(twin.lease(LOCK)).all()


def test_an_idle_gpu_is_judged_without_its_cap() -> None:
    """It draws no more than the lowest cap allows: the cap would change nothing."""
    twin, orders = guarded(**HIGH_MIN), []
    for second in range(30):
        twin.tick(FREE | {"gpu.power_w": 210.0, "gpu.temp_c": temps(83.0 + 0.4 * second, 0, 1)})
        orders.append(float(np.nan_to_num(twin.lease(POWER)[0])))
    assert 2.0 in orders
