"""power_cap on half-filled racks: what is unknown may draw its most, what is off or gone draws nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap
from policies.power_capping.budgets import other_w
from policies.power_capping.demand import wants
from policies.power_capping.unpowered import unpowered_gpus
from policies.power_capping.unreported import LEARNING_S
from tests.support.builders import Twin, two_racks
from twin.telemetry import IdentityTold

NODES, FILLED, GPUS_OF_NODE = 18, 9, 4
DRAWN_W = 1000.0
HALF_W = 90_000.0  # what half a rack may draw fits, what a whole one may does not
CAP = "gpu.power_cap_w"
NODE = "lab/h/r1/node{}"
UNMETERED = {"rack.power_w": np.nan}


def rack(nodes: int = NODES) -> dict[str, Any]:
    tree = two_racks(racks="r1")
    tree["halls"][0]["racks"][0]["nodes"] = nodes
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = HALF_W
    return tree


def heard(*, nodes: int = NODES, gone: int = FILLED, **more: Any) -> dict[str, Any]:
    """Readings of a rack of which all nodes from `gone` on say nothing."""
    speaks = np.where(np.arange(nodes) < gone, 1.0, np.nan)
    gpus = np.repeat(speaks, GPUS_OF_NODE)
    return {
        "gpu.power_w": DRAWN_W * gpus, "gpu.power_limit_w": 1200.0 * gpus,
        "node.power_w": 5000.0 * speaks, "rack.power_w": 60_000.0,
    } | more  # fmt: skip


def off(nodes: int = NODES, gone: int = FILLED) -> np.ndarray:
    """The controllers of the silent nodes say that they are off."""
    return np.where(np.arange(nodes) < gone, 1.0, 0.0)


def capped(twin: Twin) -> np.ndarray:
    return np.flatnonzero(np.isfinite(twin.lease(CAP)))


def looked(tree: dict[str, Any], readings: dict[str, Any], *events: Any) -> Twin:
    twin = Twin(tree, [PowerCap()], act=True)
    twin.tick(readings, *events, dt_s=5.0)
    for _ in range(20):
        twin.tick(readings, dt_s=5.0)
    return twin


def test_slots_that_the_site_file_does_not_fill_draw_nothing() -> None:
    assert not len(capped(looked(rack(FILLED), heard(nodes=FILLED))))


def test_gpus_that_are_there_and_silent_may_draw_their_most_and_the_reason_says_so() -> None:
    twin = looked(rack(), heard() | UNMETERED)
    assert len(capped(twin)) == NODES * GPUS_OF_NODE
    (reason,) = {p.reason for p in twin.engine.in_force["power_cap"]}
    why = "count with their maximum, as no meter above them reports"
    assert f"; 36 of its 72 GPUs have never reported and {why}" in reason


def test_what_a_meter_leaves_for_silent_gpus_is_all_that_they_draw() -> None:
    """The rack reads what the heard half draws and what its nodes draw beside: the heard half is not cut."""
    twin = looked(rack(), heard())
    assert not (capped(twin) < FILLED * GPUS_OF_NODE).any()
    (reason,) = {p.reason for p in twin.engine.in_force["power_cap"]}
    assert reason.startswith("the maximum power of GPUs below lab/h/b is more than its budget")
    assert reason.endswith(
        "; 36 of its 72 GPUs have never reported and count with the power that the meters above them leave"
    )


def test_nodes_that_are_off_draw_nothing() -> None:
    twin = looked(rack(), heard(**{"node.power_on_state": off()}))
    assert not len(capped(twin))
    view = twin.engine.view(1.0)
    want = wants(view, np.zeros(72), 0.0)
    assert want.power_w.sum() == pytest.approx(FILLED * GPUS_OF_NODE * DRAWN_W)
    assert want.demand_w[FILLED * GPUS_OF_NODE :].max() == 0.0
    # All that is on is heard at once with the meter: what is beside it is what is read, not what might be
    assert other_w(view, want.power_w, 1.0)[0] == pytest.approx(60_000 - 36 * DRAWN_W)


@pytest.mark.long
def test_a_node_that_was_off_counts_with_its_most_when_it_is_on_or_no_longer_told_and_stays_mute() -> None:
    readings = heard(**{"node.power_on_state": off()}) | UNMETERED
    twin = looked(rack(), readings)
    on = readings | {"node.power_on_state": 1.0}
    for _ in range(round(LEARNING_S / 5.0)):
        twin.tick(on, dt_s=5.0)
        assert not len(capped(twin))
    twin.tick(on, dt_s=5.0)
    assert len(capped(twin)) == NODES * GPUS_OF_NODE
    twin = looked(rack(), readings)
    for _ in range(100):
        twin.tick(heard() | UNMETERED, dt_s=5.0)
    assert len(capped(twin)) == NODES * GPUS_OF_NODE, "its controller fell silent: nobody knows"


def test_a_controller_is_not_believed_against_what_is_read() -> None:
    """A node that draws is on, and so is one whose GPUs speak."""
    view = looked(rack(), heard(**{"node.power_on_state": 0.0})).engine.view(1.0)
    assert np.flatnonzero(unpowered_gpus(view)).tolist() == list(range(36, 72))
    draws = np.where(np.arange(NODES) < FILLED, 5000.0, 3000.0)
    view = looked(rack(), heard(**{"node.power_on_state": off(), "node.power_w": draws})).engine.view(1.0)
    assert not unpowered_gpus(view).any()


def test_a_slot_whose_board_was_found_elsewhere_draws_nothing_until_it_is_heard() -> None:
    twin = Twin(rack(2), [PowerCap()], act=True)
    both = heard(nodes=2, gone=2)
    gpu = NODE + "/gpu{}"
    twin.tick(both, IdentityTold(table="gpu", name=gpu.format(1, 3), serial="SN-1003"))
    assert not unpowered_gpus(twin.engine.view(1.0)).any()
    moved = IdentityTold(table="gpu", name=gpu.format(1, 2), serial="SN-1003")
    less = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in both.items()}
    less["gpu.power_w"][7] = less["gpu.power_limit_w"][7] = np.nan
    twin.tick(less, moved)
    assert np.flatnonzero(unpowered_gpus(twin.engine.view(1.0))).tolist() == [7]
    other = twin.restarted(rack(2), [PowerCap()])
    assert np.flatnonzero(unpowered_gpus(other.engine.view(1.0))).tolist() == [7]
    twin.tick(both)
    assert not unpowered_gpus(twin.engine.view(1.0)).any()
