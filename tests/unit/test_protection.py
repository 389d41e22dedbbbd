"""Dangers while a GPU is hot: cases of the control path, each driven through the engine."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.support.builders import NS, Twin, two_racks
from twin.catalogue import TwinError, find_signal
from twin.contracts import Memory, Proposal, View
from twin.telemetry import events as ev

CAP = "gpu.power_cap_w"
OK = {"gpu.temp_c": 60.0, "gpu.power_limit_w": 1200.0}


def guarded(**site: object) -> Twin:
    return Twin(two_racks(**site), [ThermalGuard(), Operator()], act=True)  # type: ignore[arg-type]


class Breaks(ThermalGuard):
    """Guards well for ten ticks, then raises."""

    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        self.left = 10

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken")
        return super().propose(view, memory)


def test_a_hot_gpu_below_its_cap_is_not_raised_to_it() -> None:
    twin = guarded()
    twin.run(3, {"gpu.temp_c": 60.0, "gpu.power_limit_w": 500.0})
    for _ in range(15):
        twin.tick({"gpu.temp_c": 83.0, "gpu.power_limit_w": 500.0})
        assert twin.lease(CAP)[0] == 500.0


def test_time_that_does_not_advance_stops_the_engine() -> None:
    twin = guarded()
    twin.run(3, OK)
    twin.now_ns -= 3600 * NS
    with pytest.raises(TwinError, match="time must advance"):
        twin.tick(OK)


def test_a_suspended_guard_does_not_give_hot_gpus_their_power_back() -> None:
    twin = Twin(two_racks(), [Breaks()], act=True)
    readback = 1200.0
    for _ in range(120):
        twin.tick({"gpu.temp_c": 87.0, "gpu.power_limit_w": readback})
        lease = twin.lease(CAP)[0]
        assert np.isnan(lease) or lease == 200.0
        readback = readback if np.isnan(lease) else lease
    assert np.isnan(twin.lease(CAP)).all(), "its leases lapsed; the agents fall to the safe value"
    assert "suspended/thermal_guard" in twin.engine.findings.active


@pytest.mark.parametrize(("low", "high"), [(299.8, 1000.7), (200.1, 1199.9), (233.3, 777.7)])
def test_rounding_does_not_suspend_the_guard(low: float, high: float) -> None:
    twin = guarded(controls={CAP: {"min": low, "max": high, "safe": 500.0}})
    twin.run(2, OK)
    twin.tick({"gpu.temp_c": 95.0, "gpu.power_limit_w": 1200.0})
    assert not twin.engine.suspended
    assert twin.lease(CAP) == pytest.approx(low)


def test_a_restored_plug_in_guards_again() -> None:
    guard = Breaks()
    twin = Twin(two_racks(), [guard], act=True)
    twin.run(12, OK)
    assert "thermal_guard" in twin.engine.suspended
    guard.left = 10**9
    twin.tick(OK, ev.PluginRestored(plugin="thermal_guard"))
    twin.run(2, {"gpu.temp_c": 95.0, "gpu.power_limit_w": 1200.0})
    assert (twin.lease(CAP) == 200.0).all()
    assert not [f for f in twin.engine.findings.active if f.startswith("suspended")]


def test_what_was_found_survives_a_gap_longer_than_the_lease() -> None:
    """After a pause the device stands at its safe value: that is our doing, and is given back."""
    twin = guarded()
    readback = 1200.0

    def step(temp_c: float, dt_s: float = 1.0) -> None:
        nonlocal readback
        decision = twin.tick({"gpu.temp_c": temp_c, "gpu.power_limit_w": readback}, dt_s=dt_s)
        for batch in decision.commands:
            readback = float(batch.value[0])

    for _ in range(3):
        step(60.0)
    for _ in range(5):
        step(87.0)
    readback = 750.0  # the agent enforced the lapse
    step(50.0, 31.0)
    for _ in range(150):
        step(50.0)
    assert readback == 1200.0
    assert np.isnan(twin.lease(CAP)).all()


def test_under_a_hold_protection_passes_although_nobody_knows_where_the_device_stands() -> None:
    twin = guarded()
    twin.run(3, {"gpu.temp_c": 60.0})
    twin.tick({"gpu.temp_c": 60.0}, ev.Held(author="ann"))
    twin.run(3, {"gpu.temp_c": 86.0})
    assert (twin.lease(CAP) < 500.0).all()


def test_a_pause_does_not_save_up_slew() -> None:
    twin = guarded()
    name = twin.site.name("gpu", 0)

    def ask(number: int, watts: float) -> ev.OperatorRequest:
        return ev.OperatorRequest(
            id=f"r{number}", author="ann", control=CAP, names=(name,), lo=watts, hi=watts
        )

    twin.run(2, OK)
    twin.tick(OK, ask(1, 300.0))
    twin.run(3, OK | {"gpu.power_limit_w": 300.0})
    twin.tick(OK, ev.RequestWithdrawn(author="ann", request="r1"), ask(2, 1000.0), dt_s=14.0)
    assert twin.lease(CAP)[0] == 350.0, "one usual tick's worth"


def test_a_dead_sink_is_an_alarm() -> None:
    twin = guarded()
    twin.run(3, {"gpu.temp_c": 60.0})
    twin.run(60, {"gpu.temp_c": 90.0})
    assert f"unanswered/{CAP}" in twin.engine.findings.active
    assert twin.engine.findings.active[f"unanswered/{CAP}"].count == twin.site.sizes["gpu"]
    cap_w = twin.lease(CAP)  # only the answers were lost: half of the devices show that they obey
    obeys = np.arange(len(cap_w)) % 2 == 0
    twin.tick({"gpu.temp_c": 90.0, "gpu.power_limit_w": np.where(obeys, cap_w, 1200.0)})
    assert twin.engine.findings.active[f"unanswered/{CAP}"].count == np.count_nonzero(~obeys)


def test_a_policy_that_reuses_its_buffers_is_held_to_what_it_said() -> None:
    class Sly(ThermalGuard):
        buffer = np.array([300.0])

        def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
            self.buffer -= 10.0
            index = np.array([0], np.int32)
            return [Proposal(CAP, index, np.array([200.0]), self.buffer, np.array([np.nan]), "sly")], memory

    twin = Twin(two_racks(), [Sly()], act=True)
    for _ in range(4):
        twin.tick(OK)
        assert twin.records("proposals"), "each change is in the journal"


def test_listeners_that_were_away_do_not_take_silence_for_heat() -> None:
    """After a pause of ten minutes the first readings are fresh, but slow signals have not come yet."""
    twin = guarded()
    slow = {"rack.supply_temp_c": 33.0, "rack.return_temp_c": 45.0, "rack.flow_lpm": 90.0}
    twin.run(3, OK | slow)
    twin.tick(OK, ev.TicksSkipped(count=600, why="restart"), dt_s=600.0)
    for _ in range(60):
        twin.tick(OK)
    assert np.isnan(twin.lease(CAP)).all()


def test_a_replaced_rack_is_learned_afresh() -> None:
    twin = guarded(history_s={"gpu.temp_c": 60})
    rack = {
        "rack.power_w": 80_000.0,
        "rack.supply_temp_c": 33.0,
        "rack.return_temp_c": 45.0,
        "rack.flow_lpm": 90.0,
    }
    twin.run(60, OK | rack)
    estimator = twin.engine.estimator
    assert estimator.capture_count[0] > 0
    twin.tick(
        {},
        ev.EntityReplaced(table="rack", name=twin.site.name("rack", 0), serial="new"),
        ev.EntityReplaced(table="gpu", name=twin.site.name("gpu", 3), serial="new"),
    )
    assert estimator.capture_count[0] == 0
    assert estimator.capture_count[1] > 0
    values = twin.engine.history.rings["gpu.temp_c"].ordered()[1]
    assert np.isnan(values[:, 3]).all()
    assert np.isfinite(values[:-1, 2]).any()


def test_a_pause_is_no_silence_but_what_was_silent_before_it_stays_so() -> None:
    periods_s = {"rack.supply_temp_c": 1.0}
    twin = Twin(two_racks(periods_s=periods_s), [ThermalGuard()], act=True)
    twin.run(3, {"gpu.temp_c": 50.0, "rack.supply_temp_c": 30.0})
    twin.run(60, {"gpu.temp_c": 50.0})  # the rack's sensor died, the GPUs' live
    row = find_signal("rack.supply_temp_c")
    gpu = find_signal("gpu.temp_c")
    assert row is not None
    assert gpu is not None
    racks, gpus = twin.engine.state.tables["rack"], twin.engine.state.tables["gpu"]
    before = racks.worst(row, twin.now_ns)[0]
    assert before > 30.0
    twin.tick(None, ev.TicksSkipped(count=600, why="restart"), dt_s=600.0)
    assert racks.worst(row, twin.now_ns)[0] == pytest.approx(before, abs=0.1), (
        "the pause alone is not counted"
    )
    assert gpus.worst(gpu, twin.now_ns)[0] == 50.0
    twin.run(30, {"gpu.temp_c": 50.0})
    assert racks.worst(row, twin.now_ns)[0] > before


def test_a_lease_that_is_no_longer_read_back_is_not_taken_for_done() -> None:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    twin.run(3, {"gpu.temp_c": 50.0, "gpu.power_limit_w": 1200.0})
    twin.run(3, {"gpu.temp_c": 86.0, "gpu.power_limit_w": 1200.0})
    cap = twin.engine.arbiter.leases["gpu.power_cap_w"].value[0]
    assert cap < 1200.0
    for _ in range(30):
        cap = twin.engine.arbiter.leases["gpu.power_cap_w"].value
        twin.tick({"gpu.temp_c": 86.0, "gpu.power_limit_w": cap})
    assert "unread/gpu.power_cap_w" not in twin.engine.findings.active
    twin.run(20, {"gpu.temp_c": 86.0})
    assert "unread/gpu.power_cap_w" in twin.engine.findings.active
    cap = twin.engine.arbiter.leases["gpu.power_cap_w"].value
    twin.tick({"gpu.temp_c": 86.0, "gpu.power_limit_w": cap})
    assert "unread/gpu.power_cap_w" not in twin.engine.findings.active
    twin.run(20)
    found = {f.id for f in twin.decision.findings if not f.id.startswith("unheard/")}
    assert found == {"beyond/gpu.temp_c/guard", "silence/lab/h"}, "one outage; its caps lapse"
