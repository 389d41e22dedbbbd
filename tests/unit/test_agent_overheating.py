"""Overheating that an agent sees by itself: what it lowers, when it ends its node, and what moves nothing.

Temperatures come of the law of the simulated devices: C dT/dt = P - q, C 250 J/K, the shutdown at 95 C.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from racktwin_agent.clock import NS, Instant
from racktwin_agent.contingency import HEAT, HEAT_HOLD_S
from racktwin_agent.devices import HW_THERMAL, Sample
from racktwin_agent.node import Node
from racktwin_agent.overheating import Overheating
from racktwin_agent.power import OFF, ON, STOP, Power
from racktwin_agent.simulated import K_PER_W, SHUTDOWN_C, TAU_S, SimulatedDevices
from racktwin_agent.store import MemoryStore
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Plan

T0 = Instant(1_767_225_600 * NS, 5_000 * NS)
PROGRAMS = {STOP: ("true",), OFF: ("true",)}


class Watched:
    """A node whose agent takes a sample and a step each second. `bend` changes samples as sensors may."""

    def __init__(
        self, guard_c: float = 85.0, programs: Any = None, gpus: int = 4, lockable: bool = False
    ) -> None:
        self.devices, self.seconds = SimulatedDevices(gpus, seed=3), 0
        self.devices.lockable = lockable
        self.heat = Overheating(guard_c)
        watch = Watch(heat=self.heat)
        power = Power(PROGRAMS if programs is None else programs)
        self.node = Node("lab/h/r1/node0", self.devices, MemoryStore(), watch, "boot",
                         clock=lambda: self.at, power=power)  # fmt: skip
        self.told: list[tuple[int, int, str]] = []  # second, code, words of each fault
        self.bend: Callable[[Sample], Sample] = lambda sample: sample

    @property
    def at(self) -> Instant:
        return Instant(T0.wall_ns + self.seconds * NS, T0.boot_ns + self.seconds * NS)

    def run(self, seconds: int, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(seconds):
            self.seconds += 1
            self.node.report(self.bend(self.devices.sample(self.at.wall_ns)), self.at)
            for out in self.node.step(self.at):
                if "/Event/" in out.topic:
                    body = json.loads(out.payload)
                    self.told.append((self.seconds, body["code"], body["detail"]))
            if until():
                return

    @property
    def temp_c(self) -> float:
        return max(self.devices._temp)

    @property
    def caps(self) -> list[float]:
        return list(self.devices._limit)

    @property
    def locks(self) -> list[float]:
        return list(self.devices._lock_mhz)

    @property
    def overheats(self) -> bool:
        return self.node.contingency.trigger == HEAT


def test_gpus_without_flow_are_lowered_before_their_guard_without_plan_or_broker() -> None:
    rack = Watched()
    rack.run(60)
    rack.devices.flow_pu = 0.0
    began = rack.seconds
    rack.run(60, lambda: rack.overheats)
    assert rack.overheats
    assert rack.temp_c < 85.0
    assert rack.seconds - began <= 9
    assert rack.caps == [200.0] * 4
    ((_, code, words),) = rack.told
    assert (code, "K/s warmer" in words, "4 caps" in words) == (1_000_004, True, True)


def test_where_no_shutdown_is_known_the_guard_is_waited_for() -> None:
    rack = Watched()
    rack.bend = lambda sample: replace(sample, shutdown_c=[])
    rack.run(60)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    assert 85.0 <= rack.temp_c < 85.0 + 3 * 4.0


def test_hardware_that_slows_two_gpus_down_lowers_their_caps_and_ends_no_node() -> None:
    for slowed, overheats in (((0, 2), True), ((0,), False)):
        rack = Watched()
        bent(rack, lambda second, slowed=slowed: dict.fromkeys(slowed, 90.0), HW_THERMAL)  # type: ignore[misc]
        rack.run(30)
        assert rack.overheats is overheats
        assert rack.node.power.level == ON
    assert "slowed down for heat" not in "".join(words for *_, words in rack.told)


@pytest.mark.parametrize(
    "k_per_s, gpu_rises, overheats", [(0.8, True, True), (0.8, False, False), (0.1, True, False)]
)
def test_coolant_that_warms_up_as_without_flow_is_a_witness_beside_a_gpu(
    k_per_s: float, gpu_rises: bool, overheats: bool
) -> None:
    heat, ever = Overheating(85.0), False
    for second in range(20):
        temp_c = 80.0 + 1.2 * second if gpu_rises else 70.0
        sample = Sample(
            0, {"temp_c": [temp_c, 70.0]}, {"water_inlet_temp_c": [32.0 + k_per_s * second]}, [110.0, 110.0]
        )
        heat.take(sample, Instant(0, T0.boot_ns + second * NS))
        ever |= bool(heat.evidence)
    assert ever is overheats


def test_clocks_are_locked_where_the_lowest_caps_do_not_do_and_the_node_goes_on() -> None:
    """With a twentieth of the flow, 200 W are too much, and what a GPU draws at its lowest clock is not."""
    rack = Watched(lockable=True)
    rack.run(30)
    rack.devices.flow_pu = 0.05
    rack.run(100, lambda: min(rack.locks) < 1980.0)
    assert (rack.overheats, rack.locks, rack.caps) == (True, [345.0] * 4, [200.0] * 4)
    rack.run(300)
    assert rack.node.power.level == ON
    assert rack.temp_c < SHUTDOWN_C
    rack.devices.flow_pu = 1.0
    rack.run(120, lambda: not rack.overheats)
    assert (rack.locks, rack.caps) == ([1980.0] * 4, [1200.0] * 4)


def test_clocks_that_do_not_do_either_end_the_node() -> None:
    rack = Watched(lockable=True)
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(200, lambda: rack.node.power.level == OFF)
    assert rack.locks == [345.0] * 4
    assert rack.temp_c < SHUTDOWN_C
    assert [code for _, code, _ in rack.told] == [1_000_004, 1_000_005, 1_000_005]


def test_flow_that_comes_back_gives_the_caps_back_after_a_minute() -> None:
    rack = Watched(programs={})
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    rack.devices.flow_pu = 1.0
    rack.run(60, lambda: rack.temp_c < 80.0)
    cool = rack.seconds
    rack.run(100, lambda: not rack.overheats)
    assert rack.seconds - cool == pytest.approx(HEAT_HOLD_S, abs=2)
    assert rack.caps == [1200.0] * 4


@pytest.mark.parametrize("coolant_c", [33.0, 45.0, 58.0, 63.0])
def test_a_load_that_steps_from_idle_to_full_power_moves_nothing(coolant_c: float) -> None:
    """At 63 C of coolant, healthy GPUs settle at 87.6 C, beyond the guard."""
    rack = Watched()
    rack.devices.coolant_c, rack.devices._temp = coolant_c, [coolant_c + 2.5] * 4
    rack.devices.load_pu = 0.0
    rack.run(60)
    rack.devices.load_pu = 1.0
    rack.run(3)
    rate = (rack.temp_c - coolant_c - 2.5) / 3
    assert 2.0 < rate < 4.0
    rack.run(120)
    assert (rack.overheats, rack.told) == (False, [])


def bent(rack: Watched, temps: Callable[[int], dict[int, float | None]], bits: int = 0) -> None:
    """Sensors say what `temps` of the second says."""

    def bend(sample: Sample) -> Sample:
        columns = {name: list(column) for name, column in sample.gpu.items()}
        for gpu, temp_c in temps(rack.seconds).items():
            columns["temp_c"][gpu] = temp_c
            columns["clock_event_bits"][gpu] = bits
        return replace(sample, gpu=columns)

    rack.bend = bend


def test_one_sensor_that_lies_moves_nothing_unless_its_gpu_slows_itself_down() -> None:
    rack = Watched()
    bent(rack, lambda second: {2: 50.0 + 3.0 * second})
    rack.run(25)
    assert (rack.overheats, rack.told) == (False, [])
    rack = Watched()
    bent(rack, lambda second: {2: 50.0 + 3.0 * second}, HW_THERMAL)
    rack.run(25)
    assert rack.overheats
    assert rack.node.power.level == ON  # nor does the hardware of one end the node of the others


def test_what_is_hot_and_does_not_rise_or_cannot_be_read_moves_nothing() -> None:
    for temps in (
        lambda second: {0: 99.0, 1: 99.0},
        lambda second: {0: 99.0 - second % 2, 1: 99.0 - second % 2},
        lambda second: {0: 86.0 + second // 4, 1: 86.0 + second // 4},  # a quarter of a kelvin a second
        lambda second: dict.fromkeys((0, 1), 90.0 + (0.0, 6.0, 3.0)[second % 3]),
        lambda second: dict.fromkeys((0, 1), None if second % 3 == 0 else 99.0),
    ):
        rack = Watched()
        bent(rack, temps)
        rack.run(20)
        assert (rack.overheats, rack.told) == (False, [])


@pytest.mark.parametrize(
    "step_s, rise_k, from_s",
    [(6.0, 10.0, None),  # too far apart to be one rise
     (4.0, 1.5, None),  # too slow
     (4.0, 5.0, 8.0),
     (0.1, 1.0, 1.8)],  # a sensor of whole kelvins says nothing in a tenth of a second
)  # fmt: skip
def test_a_rise_is_one_of_seconds(step_s: float, rise_k: float, from_s: float | None) -> None:
    heat, began = Overheating(85.0), None
    for number in range(25):
        at = Instant(0, T0.boot_ns + round(number * step_s * NS))
        heat.take(Sample(0, {"temp_c": [85.0 + number * rise_k] * 4}), at)
        if heat.evidence and began is None:
            began = number * step_s
    assert began == (None if from_s is None else pytest.approx(from_s, abs=0.3))


def test_less_than_a_sensor_resolves_tells_no_time_to_the_shutdown() -> None:
    heat = Overheating(85.0)
    for second, temp_c in enumerate((90.0, 91.0, 90.0, 91.0, 92.0)):
        at = Instant(0, T0.boot_ns + second * NS)
        heat.take(Sample(0, {"temp_c": [temp_c] * 4}, shutdown_c=[95.0] * 4), at)
        assert heat.left_s() == (2.0 if second == 4 else float("inf"))


def test_the_time_to_the_shutdown_is_that_of_the_law_at_the_lowest_cap() -> None:
    rack = Watched(guard_c=60.0, programs={})
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    assert rack.heat.left_s() == float("inf")  # what rose at full power says nothing of the lowest cap
    rack.run(4)
    rate = 200.0 * K_PER_W / TAU_S
    room_k = SHUTDOWN_C - 2.0 - rack.temp_c
    assert rack.heat.left_s() == pytest.approx(room_k / rate, rel=0.1)


def test_a_node_is_stopped_and_then_switched_off_where_the_lowest_caps_do_not_save_it() -> None:
    rack = Watched(guard_c=60.0)
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(120, lambda: rack.node.power.level == STOP)
    stopped, rate = rack.seconds, 200.0 * K_PER_W / TAU_S
    assert (SHUTDOWN_C - rack.temp_c) / rate > 30.0  # a system has the time to stop
    rack.run(120, lambda: rack.node.power.level == OFF)
    assert rack.temp_c < SHUTDOWN_C
    assert 4.0 < (SHUTDOWN_C - rack.temp_c) / rate < 12.0
    assert [code for _, code, _ in rack.told] == [1_000_004, 1_000_005, 1_000_005]
    assert rack.told[1][0] == stopped
    assert "off: even at their lowest caps" in rack.told[2][2]
    rack.run(10)
    assert len(rack.told) == 3


@pytest.mark.parametrize(
    "programs, levels", [({}, {ON}), ({OFF: ("true",)}, {ON, OFF}), ({STOP: ("true",)}, {ON, STOP})]
)
def test_only_what_is_enabled_is_done(programs: Any, levels: set[int]) -> None:
    rack, seen = Watched(guard_c=60.0, programs=programs), set()
    rack.run(30)
    rack.devices.flow_pu = 0.0
    for _ in range(90):
        rack.run(1)
        seen.add(rack.node.power.level)
    assert seen == levels
    assert rack.overheats


def test_caps_that_save_the_gpus_end_no_node() -> None:
    rack = Watched()
    rack.run(30)
    rack.devices.flow_pu = 0.3  # enough for 200 W
    rack.run(100, lambda: rack.overheats)
    assert rack.overheats
    rack.run(55)
    assert rack.node.power.level == ON
    assert rack.temp_c < 70.0


def test_a_shutdown_temperature_that_nobody_knows_ends_no_node() -> None:
    for known in ([None] * 4, [0.0] * 4, []):
        rack = Watched(guard_c=60.0)
        rack.bend = lambda sample, known=known: replace(sample, shutdown_c=known)  # type: ignore[misc]
        rack.run(30)
        rack.devices.flow_pu = 0.0
        rack.run(90)
        assert rack.overheats
        assert rack.node.power.level == ON


def test_overheating_goes_before_a_plan_and_leaves_it_in_force() -> None:
    rack = Watched(programs={})
    issued = T0.wall_ns
    caps = {f"gpu{i}": 800.0 for i in range(4)}
    rack.node.arm(Plan(3, issued, issued + 3600 * NS, ("psu_lost",), 10.0, {"node0": caps}), rack.at)
    rack.node.watch.inputs({"psu1": False})
    rack.run(30)
    assert rack.caps == [800.0] * 4
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    assert rack.caps == [200.0] * 4
    rack.devices.flow_pu = 1.0
    rack.run(120, lambda: not rack.overheats)
    assert (rack.caps, rack.node.contingency.state) == ([800.0] * 4, "active:psu_lost")
    rack.node.watch.inputs({"psu1": True})
    rack.run(15)
    assert rack.caps == [1200.0] * 4


def test_an_agent_that_restarts_while_gpus_overheat_keeps_their_caps() -> None:
    rack = Watched(programs={})
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    again = Watched(programs={})
    again.seconds, again.devices = rack.seconds, rack.devices
    again.node = Node("lab/h/r1/node0", rack.devices, rack.node.store, again.node.watch, "boot",
                      clock=lambda: again.at)  # fmt: skip
    again.node.resume(again.at)
    assert again.overheats
    again.devices.flow_pu = 1.0
    again.run(round(HEAT_HOLD_S) - 2)
    assert again.caps == [200.0] * 4
    again.run(5)
    assert again.caps == [1200.0] * 4


@pytest.mark.parametrize("gone_s", [1, 20])
def test_gpus_that_cannot_be_read_for_a_while_are_not_taken_to_be_cool(gone_s: int) -> None:
    rack = Watched(programs={})
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    steady = {"temp_c": [86.0] * 4, "clock_event_bits": [0] * 4}
    rack.bend = lambda sample: replace(sample, gpu={**sample.gpu, **steady})
    rack.run(10)
    rack.bend = lambda sample: replace(sample, gpu={"power_w": sample.gpu["power_w"]})
    rack.run(gone_s)
    rack.bend = lambda sample: replace(sample, gpu={**sample.gpu, **steady})
    rack.run(round(HEAT_HOLD_S) + 10)
    assert rack.overheats, "86 C is not 5 K below the guard of 85 C"
    assert rack.caps == [200.0] * 4


def test_a_gpu_that_is_never_read_again_does_not_hold_the_caps_for_ever() -> None:
    rack = Watched(programs={})
    rack.run(30)
    rack.devices.flow_pu = 0.0
    rack.run(60, lambda: rack.overheats)
    rack.devices.flow_pu = 1.0
    rack.devices.lost = {0}
    rack.run(round(2 * HEAT_HOLD_S) + 60)
    assert not rack.overheats
