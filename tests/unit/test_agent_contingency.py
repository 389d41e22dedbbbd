"""Contingency: what begins it, what it may do to settings (lower them), and what is given back when it is
over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from racktwin_agent.clock import NS, Instant
from racktwin_agent.contingency import Contingency
from racktwin_agent.devices import GPU_CAP, Key
from racktwin_agent.node import Node
from racktwin_agent.settings import Settings
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.store import MemoryStore
from racktwin_agent.triggers import PsuInput, Watch, read_inputs
from racktwin_agent.wire import Plan

T0 = Instant(1_767_225_600 * NS, 5_000 * NS)
K0, K1 = Key(GPU_CAP, "gpu0"), Key(GPU_CAP, "gpu1")
CAPS = {"gpu0": 450.0, "gpu1": 500.0}


def at(seconds: float, wall_step_s: float = 0.0) -> Instant:
    return Instant(T0.wall_ns + round((seconds + wall_step_s) * NS), T0.boot_ns + round(seconds * NS))


def plan(issued_s: float = 0, lasts_s: float = 3600, epoch: int = 3, hold_s: float = 10, **more: Any) -> Plan:
    issued = T0.wall_ns + round(issued_s * NS)
    triggers = more.get("triggers", ("psu_lost", "broker_gone"))
    return Plan(epoch, issued, issued + round(lasts_s * NS), triggers, hold_s, {"node0": dict(CAPS)})


def armed(**more: Any) -> Contingency:
    contingency = Contingency()
    assert contingency.take(plan(**more), dict(CAPS), T0, 3) is None
    assert contingency.state == "armed"
    return contingency


def test_it_begins_on_a_trigger_of_the_plan_and_ends_after_the_hold() -> None:
    contingency = armed()
    assert contingency.step({}, at(1)) is None
    assert contingency.step({"power_brake": "0x80"}, at(2)) is None
    change = contingency.step({"psu_lost": "no input at psu1"}, at(3))
    assert change is not None
    assert (change.caps, change.began) == (CAPS, "psu_lost")
    assert contingency.state == "active:psu_lost"
    assert contingency.step({"psu_lost": ""}, at(100)) is None
    assert contingency.step({}, at(101)) is None
    assert contingency.step({"broker_gone": ""}, at(105)) is None  # another one, before the hold is over
    assert contingency.step({}, at(106)) is None
    assert contingency.step({}, at(115.9)) is None
    change = contingency.step({}, at(116))
    assert change is not None
    assert (change.caps, contingency.state) == ({}, "armed")


@pytest.mark.parametrize(
    "more,moment,why",
    [
        ({"epoch": 2}, T0, "epoch 2 is older than 3"),
        ({"lasts_s": 0}, T0, "a plan for 0 s"),
        ({"lasts_s": 500 * 86_400}, T0, "a plan for"),
        ({"lasts_s": 100}, at(100), "has expired"),
        ({"issued_s": -1}, T0, "a newer plan is armed"),
    ],
)
def test_plans_that_are_refused(more: dict[str, Any], moment: Instant, why: str) -> None:
    contingency = armed()
    said = contingency.take(plan(**more), dict(CAPS), moment, 3)
    assert said is not None
    assert why in said


def test_a_retained_plan_that_comes_again_prolongs_nothing_and_an_old_one_is_disarmed() -> None:
    contingency = armed(lasts_s=100)
    assert contingency.take(plan(lasts_s=100), dict(CAPS), at(50, -40), 3) is None
    contingency.step({}, at(99))
    assert contingency.state == "armed"
    contingency.step({}, at(100))
    assert contingency.state == "none"
    assert contingency.step({"psu_lost": ""}, at(101)) is None


def test_what_is_in_force_outlasts_its_plan() -> None:
    contingency = armed(lasts_s=100)
    contingency.step({"psu_lost": ""}, at(50))
    contingency.withdraw()
    assert contingency.step({"psu_lost": ""}, at(5000)) is None
    assert contingency.state == "active:psu_lost"
    change = contingency.step({}, at(5001))
    assert change is not None
    assert contingency.state == "none"


def test_a_new_plan_changes_the_caps_that_are_in_force() -> None:
    contingency = armed()
    contingency.step({"psu_lost": ""}, at(1))
    assert contingency.take(plan(issued_s=2), {"gpu0": 300.0}, at(2), 3) is None
    change = contingency.step({"psu_lost": ""}, at(3))
    assert change is not None
    assert (change.caps, change.began) == ({"gpu0": 300.0}, "")


@pytest.mark.parametrize("same_boot,state", [(True, "active:psu_lost"), (False, "armed")])
def test_it_is_remembered_within_a_boot(same_boot: bool, state: str) -> None:
    contingency = armed()
    contingency.step({"psu_lost": ""}, at(1))
    other = Contingency()
    other.restore(json.loads(json.dumps(contingency.dump())), at(2), same_boot)
    assert other.state == state


def test_settings_are_lowered_only_and_given_back() -> None:
    devices = SimulatedDevices(3)
    settings = Settings(devices)
    settings.put(K0, 400)
    assert settings.lower({K0: 450, K1: 500}) == []
    assert [devices.get(Key(GPU_CAP, f"gpu{i}")) for i in range(3)] == [400, 500, 1200]
    assert not settings.put(K1, 900)
    assert settings.put(K0, 300)
    assert [devices.get(k) for k in (K0, K1)] == [300, 500]
    devices.set(K1, 1100)  # by somebody else's hand
    assert settings.enforce() == []
    assert devices.get(K1) == 500
    assert settings.lower({K1: 700}) == []  # a plan with room for more, and without gpu0
    assert [devices.get(k) for k in (K0, K1)] == [300, 700]
    assert settings.release() == []
    assert [devices.get(k) for k in (K0, K1)] == [300, 900]


def test_a_device_that_refuses_is_lowered_later() -> None:
    devices = SimulatedDevices(2)
    settings = Settings(devices)
    devices.refuses = True
    assert len(settings.lower({K0: 450, K1: 500})) == 2
    assert len(settings.enforce()) == 2
    devices.refuses = False
    assert settings.enforce() == []
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "lower", "release", "restart"]),
            st.sampled_from([K0, K1]),
            st.sampled_from([200.0, 450.0, 700.0, 1200.0]),
        ),
        max_size=20,
    )
)
def test_no_setting_is_ever_above_its_ceiling_nor_above_what_is_wanted(moves: list[Any]) -> None:
    devices = SimulatedDevices(2)
    settings, wanted, ceilings = Settings(devices), {K0: 1200.0, K1: 1200.0}, dict[Key, float]()
    for what, key, value in moves:
        if what == "put":
            settings.put(key, value)
            wanted[key] = value
        elif what == "lower":
            ceilings[key] = value
            settings.lower(ceilings)
        elif what == "release":
            ceilings = {}
            settings.release()
        else:
            data = json.loads(json.dumps(settings.dump()))
            settings = Settings(devices)
            settings.restore(data)
        for k in (K0, K1):
            assert devices.get(k) == min(wanted[k], ceilings.get(k, 9999))


def a_node(store: MemoryStore | None = None, devices: SimulatedDevices | None = None) -> Node:
    said: list[str] = []
    node = Node(
        "lab/h/r1/node0",
        devices or SimulatedDevices(2),
        store or MemoryStore(),
        Watch(5, 2, supplies=("psu1",)),
        "boot",
        say=said.append,
        clock=lambda: T0,
    )
    node.resume(T0)
    return node


def test_an_agent_that_is_killed_during_a_contingency_still_knows_what_to_give_back() -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    node.arm(plan(), T0)
    node.watch.inputs({"psu1": False})
    out = node.step(at(1))
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]
    assert {o.topic.split("/")[3] for o in out} >= {"Agent", "Event", "Frame"}
    again = a_node(MemoryStore(), devices)
    again.store = store
    again.resume(at(2))
    assert again.contingency.state == "active:psu_lost"
    again.watch.inputs({"psu1": True})
    again.step(at(3))
    again.step(at(14))
    assert [devices.get(k) for k in (K0, K1)] == [1200, 1200]


def test_a_plan_with_a_cap_that_the_device_cannot_take_is_refused_as_a_whole() -> None:
    node = a_node()
    issued = T0.wall_ns
    odd = Plan(3, issued, issued + 10**12, ("psu_lost",), 1.0, {"node0": {"gpu0": 450.0, "gpu1": 100.0}})
    assert node.arm(odd, T0) == []
    assert node.contingency.state == "none"
    odd = Plan(3, issued, issued + 10**12, ("psu_lost",), 1.0, {"node0": {"gpu9": 450.0}})
    assert node.arm(odd, T0) == []
    assert node.contingency.state == "none"


def test_triggers_and_their_evidence() -> None:
    watch = Watch(broker_gone_s=5, power_brake_s=2)
    assert watch.present(T0) == {}
    watch.connected(False, at(0))
    watch.connected(False, at(3))
    assert watch.present(at(5)) == {}
    assert watch.present(at(5.1)) == {"broker_gone": "for 5 s"}
    watch.connected(True, at(6))
    assert watch.present(at(60)) == {}
    watch.clocks(0x4, at(60))
    watch.clocks(0x88, at(61))
    assert watch.present(at(62.9)) == {}
    assert watch.present(at(63)) == {"power_brake": "clock events 0x88"}
    watch.clocks(0, at(64))
    assert watch.present(at(70)) == {}
    assert watch.inputs({"psu1": True, "psu2": None}) == ["power supply psu2 cannot be read"]
    assert watch.present(at(71)) == {}
    assert watch.inputs({"psu1": False, "psu2": None}) == ["power supply psu1 lost its input"]
    assert watch.present(at(72)) == {"psu_lost": "no input at psu1"}
    assert watch.inputs({"psu1": True, "psu2": None}) == ["power supply psu1 has input"]


def test_a_supply_without_input_that_falls_silent_has_none_until_it_is_read_again() -> None:
    watch = Watch()
    watch.inputs({"psu1": False, "psu2": True})
    assert watch.inputs({"psu1": None, "psu2": None}) == [
        "power supply psu1 cannot be read",
        "power supply psu2 cannot be read",
    ]
    assert watch.present(T0) == {"psu_lost": "no input at psu1"}
    watch.inputs({"psu1": None, "psu2": None})
    assert watch.present(T0) == {"psu_lost": "no input at psu1"}
    watch.inputs({"psu1": True, "psu2": None})
    assert watch.present(T0) == {}


@pytest.mark.parametrize("trigger", ["psu_lost", "broker_gone", "power_brake"])
def test_what_is_in_force_without_a_plan_stays_over_a_restart_until_its_cause_is_seen_gone(
    trigger: str,
) -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    node.arm(plan(triggers=(trigger,)), T0)
    node.watch.inputs({"psu1": trigger != "psu_lost"})
    node.watch.connected(trigger != "broker_gone", T0)
    node.watch.clocks(0x80 if trigger == "power_brake" else 0, T0)
    node.step(at(6))
    node.arm(None, at(7))
    again = a_node(store, devices)
    again.watch.connected(False, at(8))
    again.step(at(8))
    assert again.contingency.state == f"active:{trigger}"
    again.watch.inputs({"psu1": None})
    again.step(at(9))
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]
    again.watch.inputs({"psu1": True})
    again.watch.connected(True, at(10))
    again.watch.clocks(0, at(10))
    again.step(at(10))
    assert [devices.get(k) for k in (K0, K1)] == [1200, 1200]


def test_how_the_input_of_a_power_supply_is_read(tmp_path: Path) -> None:
    file = tmp_path / "in"
    plain, number = PsuInput("a", str(file)), PsuInput("a", str(file), min=100_000)
    for text, says, counts in (
        ("1\n", True, False),
        ("0\n", False, False),
        ("LOST", False, None),
        ("229000\n", True, True),
    ):
        file.write_text(text)
        assert (plain.read(), number.read()) == (says, counts)
    assert PsuInput("a", str(tmp_path / "none")).read() is None
    for code, says in ((0, True), (1, False), (7, None)):
        command = (sys.executable, "-c", f"raise SystemExit({code})")
        assert PsuInput("a", command=command).read() is says
    assert PsuInput("a", command=("/nonexistent/x",)).read() is None
    slow = PsuInput("a", command=(sys.executable, "-c", "import time; time.sleep(60)"), timeout_s=0.2)
    assert slow.read() is None
    assert read_inputs((plain, PsuInput("b", str(tmp_path / "none")))) == {"a": True, "b": None}


class Killed(BaseException):
    """The agent is killed right here."""


def test_an_agent_that_is_killed_while_it_lowers_caps_gives_everything_back_later() -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    node.arm(plan(), T0)
    node.watch.inputs({"psu1": False})
    sound, calls = devices.set, list[Key]()

    def dying(key: Key, value: float) -> None:
        if calls:
            raise Killed
        calls.append(key)
        sound(key, value)

    devices.set = dying  # type: ignore[method-assign]
    with pytest.raises(Killed):
        node.step(at(1))
    assert [devices.get(k) for k in (K0, K1)] == [450, 1200]
    devices.set = sound  # type: ignore[method-assign]
    again = a_node(store, devices)
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]
    again.watch.inputs({"psu1": True})
    again.step(at(3))
    again.step(at(14))
    assert [devices.get(k) for k in (K0, K1)] == [1200, 1200]


def test_after_a_restart_running_leases_are_set_again_where_a_driver_forgot_them() -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    body = {
        "v": 1,
        "control": GPU_CAP,
        "epoch": 3,
        "issued_ns": T0.wall_ns,
        "expires_ns": T0.wall_ns + 30 * NS,
        "names": ["node0/gpu0"],
        "generations": [0],
        "commands": [1],
        "values": [400.0],
        "lapse": [600.0],
    }
    node.take(f"IT/v1/racktwin/Request/{GPU_CAP}/lab/h/r1", json.dumps(body).encode(), T0)
    again = a_node(store, SimulatedDevices(2))
    assert [again.devices.get(k) for k in (K0, K1)] == [400, 1200]
    again.step(at(30))
    assert [again.devices.get(k) for k in (K0, K1)] == [600, 1200]


def test_a_gpu_that_comes_back_under_a_ceiling_gets_its_own_cap_back() -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    node.arm(plan(), T0)
    devices.lost = {0}
    node.watch.inputs({"psu1": False})
    node.step(at(1))
    devices.lost = set()  # reset, with its default cap
    node.step(at(2))
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]
    again = a_node(store, devices)
    again.watch.inputs({"psu1": True})
    again.step(at(3))
    again.step(at(14))
    assert [devices.get(k) for k in (K0, K1)] == [1200, 1200]


def test_a_cap_that_a_device_refuses_when_it_is_given_back_is_given_later() -> None:
    devices, store = SimulatedDevices(2), MemoryStore()
    node = a_node(store, devices)
    node.arm(plan(), T0)
    node.watch.inputs({"psu1": False})
    node.step(at(1))
    node.watch.inputs({"psu1": True})
    node.step(at(2))
    devices.refuses = True  # for a moment, as a driver does under load
    node.step(at(13))
    assert node.contingency.state == "armed"
    assert [devices.get(k) for k in (K0, K1)] == [450, 500]
    again = a_node(store, devices)
    again.step(at(14))
    devices.refuses = False
    again.step(at(15))
    assert [devices.get(k) for k in (K0, K1)] == [1200, 1200]
    devices.set(K0, 700)  # by somebody else's hand
    again.step(at(16))
    assert devices.get(K0) == 700


def test_a_command_takes_the_place_of_a_cap_that_waits_to_be_given_back() -> None:
    devices = SimulatedDevices(2)
    settings = Settings(devices)
    settings.lower({K0: 450})
    devices.refuses = True
    assert len(settings.release()) == 1
    devices.refuses = False
    assert settings.put(K0, 300)
    assert settings.enforce() == []
    assert devices.get(K0) == 300
