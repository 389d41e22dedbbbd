"""Power of a node by its own agent: orders run once, after their answer, and never again by a renewal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from racktwin_agent.clock import NS, Instant
from racktwin_agent.config import ConfigError, load_config
from racktwin_agent.devices import POWER
from racktwin_agent.node import Node
from racktwin_agent.power import COMMANDS, OFF, ON, STOP, Power
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.store import MemoryStore
from racktwin_agent.triggers import Watch

T0 = Instant(1_767_225_600 * NS, 5_000 * NS)
TRUE = {STOP: (sys.executable, "-c", ""), OFF: (sys.executable, "-c", "pass")}


class FullStore(MemoryStore):
    """Cannot keep anything."""

    def save(self, state: dict[str, Any], durable: bool) -> None:
        raise OSError(28, "No space left on device")


def at(seconds: float) -> Instant:
    return Instant(T0.wall_ns + round(seconds * NS), T0.boot_ns + round(seconds * NS))


def a_node(
    commands: dict[int, tuple[str, ...]], store: MemoryStore | None = None, boot: str = "boot"
) -> Node:
    power = Power(commands)
    node = Node("lab/h/r1/node0", SimulatedDevices(2), store or MemoryStore(), Watch(), boot,
                clock=lambda: T0, power=power)  # fmt: skip
    node.resume(T0)
    return node


def order(node: Node, level: float, command: int = 1, seconds: float = 0.0, **more: Any) -> tuple[str, str]:
    """Give an order; (state, words) of the answer."""
    now = at(seconds)
    body = {
        "v": 1, "control": POWER, "epoch": 3, "issued_ns": now.wall_ns, "expires_ns": now.wall_ns + 300 * NS,
        "deadline_ns": T0.wall_ns + 120 * NS, "names": ["node0"], "generations": [0], "commands": [command],
        "values": [level], "lapse": [None],
    }  # fmt: skip
    outs = node.take(f"IT/v1/racktwin/Request/{POWER}/lab/h/r1", json.dumps(body | more).encode(), now)
    (answer,) = [json.loads(out.payload) for out in outs if "/Result/" in out.topic]
    return answer["states"][0], answer["details"][0]


def run(node: Node) -> str:
    """Run the order that waits, to its end."""
    text = node.power.run()
    if node.power._process is not None:
        node.power._process.wait(20)
    return text


def read_back(node: Node) -> Any:
    out = node.report(node.devices.sample(T0.wall_ns), T0)
    return json.loads(out.payload)["node"].get("power_readback_state")


@pytest.mark.parametrize("level", [STOP, OFF])
def test_an_order_is_stored_and_answered_before_it_runs(level: int) -> None:
    store = MemoryStore()
    node = a_node(TRUE, store)
    assert read_back(node) == [ON]
    assert order(node, level) == ("accepted", "")
    assert store.state is not None
    assert store.state["book"]["leases"][0][:2] == [POWER, ""]
    assert node.power.is_due
    assert read_back(node) == [STOP]
    assert TRUE[level][0] in run(node)
    assert not node.power.is_due


def test_what_cannot_be_stored_does_not_run() -> None:
    node = a_node(TRUE, FullStore())
    assert order(node, OFF)[0] == "failed"
    assert not node.power.is_due


def test_an_off_follows_a_shutdown_and_nothing_leads_back() -> None:
    node = a_node(TRUE)
    order(node, STOP)
    run(node)
    assert order(node, OFF, 2) == ("accepted", "")
    assert node.power.is_due
    run(node)
    assert order(node, STOP, 3) == ("failed", "off of this node was ordered: it cannot keep itself on")
    assert order(node, ON, 4)[0] == "failed"
    assert not node.power.is_due


def test_what_is_not_enabled_is_refused_and_not_read_back() -> None:
    node = a_node({})
    for number in range(1, 4):
        state, words = order(node, STOP, number)
        assert (state, "shutdown is not enabled here: see [power]" in words) == ("failed", True)
        assert order(node, STOP, number)[0] == "failed"  # again
    assert not node.power.is_due
    assert read_back(node) is None
    only = a_node({STOP: TRUE[STOP]})
    assert "off is not enabled" in order(only, OFF)[1]
    assert order(only, ON, 2) == ("done", "")  # it is on


@pytest.mark.parametrize("level", [STOP, OFF])
@pytest.mark.parametrize("more", [{}, {"renewal": True}, {"renewal": True, "epoch": 4}])
@pytest.mark.parametrize("boot", ["boot", "another"])
def test_no_order_runs_again_after_a_restart_without_a_new_number(
    level: int, more: dict[str, Any], boot: str
) -> None:
    store = MemoryStore()
    node = a_node(TRUE, store)
    order(node, level)
    run(node)
    again = a_node(TRUE, store, boot)
    assert (again.power.is_due, read_back(again)) == (False, [STOP if boot == "boot" else ON])
    for seconds in (1.0, 200.0):
        assert order(again, level, seconds=seconds, **more)[0] == "done"
        again.step(at(seconds))
    again.step(at(4000))
    assert not again.power.is_due
    if boot == "another":
        assert order(again, level, 2, seconds=60.0, epoch=5)[0] == "accepted"
        assert again.power.is_due


def test_a_renewal_of_what_nobody_remembers_does_not_end_a_node_that_was_switched_on_again() -> None:
    """A node without a disk boots with an empty book; by then the deadline of the command is over."""
    state, words = order(a_node(TRUE), OFF, seconds=150.0, renewal=True)
    assert (state, words) == ("failed", "its deadline is over: nothing is begun any more")
    assert order(a_node(TRUE), OFF, seconds=10.0, renewal=True) == ("accepted", "")  # the first one was lost


def test_orders_that_make_no_sense_are_refused() -> None:
    node = a_node(TRUE)
    assert order(node, 1.5) == ("failed", "1.5 is no state of a node's power")
    assert "outside 0..2" in order(node, 3.0)[1]
    assert "expected no lapse" in order(node, STOP, lapse=[2.0])[1]
    assert "no node.power_state of gpu0" in order(node, STOP, names=["node0/gpu0"])[1]
    assert not node.power.is_due


@pytest.mark.parametrize(
    "command, why",
    [((sys.executable, "-c", "raise SystemExit(3)"), "its program ended with status 3"),
     (("/nonexistent/x",), "/nonexistent/x: No such file or directory")],
)  # fmt: skip
def test_a_program_that_fails_is_told_and_the_node_is_on(command: tuple[str, ...], why: str) -> None:
    node = a_node({STOP: command, OFF: TRUE[OFF]})
    assert order(node, STOP, 7) == ("accepted", "")
    run(node)
    outs = [json.loads(o.payload) for o in node.step(at(1)) if "/Result/" in o.topic]
    assert (outs[0]["commands"], outs[0]["states"], outs[0]["details"]) == ([7], ["failed"], [why])
    assert read_back(node) == [ON]
    assert order(node, STOP, 7, 2.0) == ("failed", why)
    assert not node.power.is_due
    assert order(node, OFF, 8, 3.0) == ("accepted", "")


def test_the_configuration_enables_orders_and_names_their_programs(tmp_path: Path) -> None:
    def power(text: str) -> Any:
        path = tmp_path / "agent.toml"
        path.write_text('node = "lab/h/r1/node0"\ndevices = "simulated"\n[broker]\nhost = "b"\n' + text)
        return load_config(path).power

    assert power("") == power("[power]\n") == {}
    assert power('[power]\nenable = ["shutdown"]') == {STOP: ("systemctl", "poweroff")}
    assert power('[power]\nenable = ["shutdown", "off"]') == COMMANDS
    assert power('[power]\nenable = ["off"]\noff_command = ["x", "1"]') == {OFF: ("x", "1")}
    assert power('[power]\noff_command = ["x", "1"]') == {}
    for wrong in ('enable = ["on"]', "enable = true", "off_command = []", "off_command = [1]", "other = 1"):
        with pytest.raises(ConfigError, match="power"):
            power(f"[power]\n{wrong}")
