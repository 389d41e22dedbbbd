"""Troubles of a power test site: what is drawn, how it comes to the arms, and that no breaker opens in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.evaluation.power.arms import CAP, Ours, jobs_told
from tests.evaluation.power.demand import Demand, draw
from tests.evaluation.power.plant import FeedLoss, Plant, Reading
from tests.evaluation.power.rivals import Proportional
from tests.evaluation.power.scores import CapWeek, goals, live
from tests.evaluation.power.site import GPU_MAX_W, SAFE_W, power_site
from tests.evaluation.power.test_week import B, flat, running
from tests.evaluation.power.troubled import Instruments, TroubledOurs
from tests.evaluation.power.troubles import BUSY_PU, KINDS, Trouble, Troubles, drawn, metered
from tests.evaluation.power.week import Week, worst_loss
from twin.catalogue import find_signal

GPUS, RACKS, FEEDERS = B.gpus, B.site.sizes["rack"], len(B.budget_w)
NODE_0 = B.site.node_of_gpu == 17  # of low priority


def trouble(kind: str, begin_s: int, end_s: int, mode: str = "", amount: float = 0.0) -> Trouble:
    """Of this kind, as wide as it may be: half the racks, half the nodes, feeder A or its first PDU."""
    gpu, rack, feeder = np.zeros(GPUS, np.bool_), np.zeros(RACKS, np.bool_), np.zeros(FEEDERS, np.bool_)
    if kind in ("all_silent", "late", "disordered"):
        rack[:] = feeder[:] = gpu[:] = True
    elif kind == "racks_silent":
        rack[: RACKS // 3] = True
        gpu = rack[B.site.rack_of_gpu]
    elif kind in ("commands_lost", "agents_gone"):
        gpu = B.site.node_of_gpu % (4 if kind == "commands_lost" else 10) == 0
    elif kind in ("deaf_node", "hung_node"):
        gpu = NODE_0.copy()
    elif kind == "gpu_sensors":
        gpu = np.arange(GPUS) % 20 == 0
    elif kind == "rack_meter":
        rack[0] = True
    elif kind == "derated":
        feeder[2] = True
    elif kind in ("feeder_meter", "feed_lost"):
        feeder[1] = True
    return Trouble(kind, begin_s, end_s, gpu, rack, feeder, mode, amount)


def reading(watts: float = 100.0) -> Reading:
    none = np.zeros(FEEDERS, np.bool_)
    return Reading(np.full(GPUS, watts), np.full(GPUS, 1200.0), np.full(RACKS, watts),
                   np.full(FEEDERS, watts), none, none)  # fmt: skip


def a_day() -> tuple[Demand, FeedLoss]:
    demand = draw(B, running(24), 3, 24)
    loss = worst_loss(B, demand)
    assert loss is not None
    return demand, loss


def same(one: Troubles, other: Troubles) -> bool:
    pairs = zip(one.listed, other.listed, strict=False)
    equal = [all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))
             for a, b in pairs]  # fmt: skip
    return len(one.listed) == len(other.listed) and all(equal)


def test_troubles_are_drawn_from_their_seed() -> None:
    demand, loss = a_day()
    told = drawn(B, demand, 1, loss)
    assert same(told, drawn(B, demand, 1, loss))
    assert not same(told, drawn(B, demand, 2, loss))
    assert set(told.counts()) == set(KINDS)
    week = drawn(
        B, demand._replace(job=np.tile(demand.job, (7, 1)), level=np.tile(demand.level, (7, 1))), 1, loss
    )
    for kind, count in week.counts().items():
        assert count - KINDS[kind].weekly in (0, 1), kind
    for t in week.listed:
        assert 0 <= t.begin_s < t.end_s <= 7 * 24 * 3600
        assert t.kind == "derated" or KINDS[t.kind].least_s <= t.end_s - t.begin_s <= KINDS[t.kind].most_s
    one_path = power_site("a")
    part = demand._replace(job=demand.job[:, :144], level=demand.level[:, :144])
    assert "feed_lost" not in drawn(one_path, part, 1, None).counts()


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_is_there_at_a_peak_and_one_while_the_feed_is_lost(seed: int) -> None:
    demand, loss = a_day()
    told = drawn(B, demand, seed, loss)
    wish = demand.level.sum(axis=1)
    busy = np.flatnonzero(wish >= np.sort(wish)[-round(BUSY_PU * demand.minutes)])
    for kind in set(KINDS) - {"feed_lost"}:
        mine = [t for t in told.listed if t.kind == kind]
        assert any(((busy * 60 < t.end_s) & (busy * 60 + 60 > t.begin_s)).any() for t in mine), kind
    assert any(t.begin_s <= loss.begin_s < t.end_s for t in told.listed if t.kind != "feed_lost")
    for other in told.losses():
        assert other.end_s < loss.begin_s or other.begin_s > loss.end_s, "both feeds lost: nothing is left"


def test_silence_is_no_reading_and_what_is_late_has_its_old_time() -> None:
    silent = trouble("racks_silent", 10, 20)
    late = trouble("late", 30, 32, amount=5.0)
    found = Instruments(Troubles((silent, late)))
    assert [(p.table, p.start, p.values.shape[1]) for p in found.heard(reading(), 9)] == [
        ("gpu", 0, GPUS), ("rack", 0, RACKS), ("feeder", 0, FEEDERS)]  # fmt: skip
    parcels = found.heard(reading(), 10)
    third = RACKS // 3
    assert [(p.table, p.start) for p in parcels] == [
        ("gpu", int(silent.gpu.sum())), ("rack", third), ("feeder", 0)]  # fmt: skip
    assert all(np.isfinite(p.values).all() for p in parcels)
    assert len(found.heard(reading(), 20)) == 3
    arrived = {second: [p.made_s for p in found.heard(reading(), second)] for second in range(30, 38)}
    assert arrived[30] == arrived[31] == []
    assert arrived[32] == [32] * 3
    assert arrived[35] == [30] * 3 + [35] * 3
    assert Instruments(Troubles((trouble("all_silent", 0, 9),))).heard(reading(), 3) == []


@pytest.mark.parametrize(
    ("mode", "amount", "low", "high"),
    [("stuck", 0.0, 100.0, 100.0), ("low", -0.1, 135.0, 135.0), ("high", 0.1, 165.0, 165.0),
     ("noisy", 0.03, 130.0, 170.0)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["rack_meter", "feeder_meter"])
def test_a_meter_that_is_wrong(kind: str, mode: str, amount: float, low: float, high: float) -> None:
    found, table = Instruments(Troubles((trouble(kind, 5, 9, mode, amount),))), kind.partition("_")[0]
    at = 0 if kind == "rack_meter" else 1
    shown = [next(p for p in found.heard(reading(w), s) if p.table == table).values[0]
             for s, w in ((5, 100.0), (6, 150.0), (9, 150.0))]  # fmt: skip
    assert low <= shown[1][at] <= high
    assert (mode == "noisy") == (shown[1][at] not in (low, high))
    assert np.delete(shown[1], at).tolist() == [150.0] * (len(shown[1]) - 1)
    assert shown[2].tolist() == [150.0] * len(shown[2])


class Loop:
    """An arm in these troubles, asked each second."""

    def __init__(self, troubles: Troubles, minutes: int = 4, level: float = 0.95) -> None:
        site = metered(B)
        self.demand = flat(B, minutes, level)
        self.arm, self.plant = TroubledOurs(site, troubles), Plant(site, self.demand)

    def until(self, second: int) -> Loop:
        while self.plant.time_s < second:
            minute, begins = divmod(self.plant.time_s, 60)
            events = [] if begins else jobs_told(B, self.demand, minute)
            self.plant.step(1)
            cap_w = self.arm.decide(self.plant.read(), self.plant.time_s, 1, events)
            if cap_w is not None:
                self.plant.command(cap_w)
        return self


def test_without_the_daemon_leases_lapse_and_it_goes_on_after() -> None:
    found = Loop(Troubles((trouble("daemon_gone", 40, 100),))).until(39)
    low = found.arm.floor.agents.cap_w < SAFE_W - 50
    ticks = found.arm.ticks
    assert low.any(), "or nothing is shown"
    found.until(80)
    assert found.arm.ticks == ticks
    leased = np.isfinite(found.arm.floor.agents.until_s)
    assert not leased.any()
    assert (found.plant.cap_w[low] == SAFE_W).all()
    found.until(101)
    state = found.arm.engine.state
    assert found.arm.ticks == ticks + 2
    assert state.tables["gpu"].resumed_ns[0] > 0, "the gap is known as one"
    found.until(130)
    assert (found.arm.floor.agents.cap_w == np.nan_to_num(
        found.arm.engine.arbiter.leases[CAP].value, nan=GPU_MAX_W)).mean() > 0.9  # fmt: skip


def test_commands_that_are_lost_leave_safe_caps_and_what_is_silent_gets_stale() -> None:
    lost = trouble("commands_lost", 40, 100)
    found = Loop(Troubles((lost,))).until(95)
    agents, lease = found.arm.floor.agents, found.arm.engine.arbiter.leases[CAP]
    assert not np.isfinite(agents.until_s[lost.gpu]).any()
    assert lease.running()[~lost.gpu].any()
    assert (agents.cap_w[~lost.gpu & lease.running()] == lease.value[~lost.gpu & lease.running()]).all()
    gone = trouble("all_silent", 30, 60)
    found = Loop(Troubles((gone,))).until(45)
    state, signal = found.arm.engine.state, find_signal("gpu.power_w")
    assert signal is not None
    assert (state.tables["gpu"].age_s(signal, state.now_ns) > 10).all()


@pytest.mark.evaluation
@pytest.mark.parametrize("name", ["racktwin", "proportional"])
def test_no_trouble_is_the_plain_run(name: str) -> None:
    demand = flat(B, 5, 0.85)
    arms = [Ours(B) if name == "racktwin" else Proportional(B) for _ in range(2)]
    plain = Week(B, demand, arms[0], FeedLoss(0, 180, 240)).run()
    empty = Week(B, demand, arms[1], FeedLoss(0, 180, 240), troubles=Troubles(())).run()
    assert empty.pop("troubles") == {}
    assert plain == empty
    assert plain["lost_pu"] > 0.0


@pytest.mark.evaluation
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_breaker_opens_in_any_of_them(kind: str) -> None:
    """A feed is lost amid it, at a demand of 130 kW more than the other one carries."""
    demand = flat(B, 20, 0.95)
    length_s = min(KINDS[kind].most_s, 900)
    mode, amount = ("low", -0.1) if kind.endswith("_meter") else ("", 0.1)
    one = trouble(kind, 240, 240 + length_s, mode, 40.0 if kind == "late" else amount)
    if kind == "feed_lost":
        one = one._replace(begin_s=600, end_s=660)
    loss = FeedLoss(0, 400, 460)
    week = Week(metered(B), demand, Ours(B), loss, troubles=Troubles((one,)))
    found = week.run()
    assert found["troubles"] == {kind: 1}
    assert found["trips"] == 0
    assert found["theta_most"] < 0.8
    assert found["needed_pu"] > 0.9, "or nothing is shown"


def test_a_run_in_troubles_is_judged_by_its_breakers_alone() -> None:
    row: dict[str, Any] = live(CapWeek("b", "none", 1, 2, 1.0, tuple(running(24).tolist()), True))
    assert sum(row["troubles"].values()) >= len(KINDS)
    told = goals([{"site": "b", "rows": [row | {"arm": "racktwin", "late_s": 9}], "troubles": {}}])
    assert [g["met"] for g in told] == [True]
    assert "breakers" in told[0]["goal"]
