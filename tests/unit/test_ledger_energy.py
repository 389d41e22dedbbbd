"""Energy of the ledger: gaps, counters that reset, jump or are replaced, and errors that meters state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from twin.catalogue import NS, TABLES
from twin.ledger.gpu_time import JobTime, ReportedSpans
from twin.ledger.metered_energy import EnergyCounters, PowerIntegral
from twin.ledger.node_gaps import NodeGaps
from twin.telemetry import JobEnded, JobStarted, TableState

NAN = np.nan
ENERGY = TABLES["feeder"].by_name["energy_mj"]


def watts(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_a_gap_is_held_with_an_error_and_then_filled_by_the_mean_of_both_ends() -> None:
    integral = PowerIntegral({"rack": 2}, "rack")
    integral.add(watts(100.0, 50.0), 1.0, False)
    for _ in range(10):
        integral.add(watts(NAN, 50.0), 1.0, False)
    held_j, var_j2, known_s = integral.take()
    assert held_j == pytest.approx([1100.0, 550.0])
    assert var_j2 == pytest.approx([(0.3 * 1000.0) ** 2, 0.0])
    assert known_s.tolist() == [11.0, 11.0]
    integral.add(watts(200.0, 50.0), 1.0, False)
    more_j, less_j2, _ = integral.take()
    assert held_j[0] + more_j[0] == pytest.approx(100.0 + 10 * 150.0 + 200.0)
    # The error is that of the move across the gap, and no more that of a reading that was held
    assert var_j2[0] + less_j2[0] == pytest.approx(((100.0 / 12**0.5 + 0.05 * 200.0) * 10.0) ** 2)


def test_what_was_never_read_is_unknown_and_not_zero() -> None:
    integral = PowerIntegral({"rack": 2}, "rack")
    integral.add(watts(NAN, 10.0), 5.0, False)
    energy_j, _, known_s = integral.take()
    assert (energy_j.tolist(), known_s.tolist()) == ([0.0, 50.0], [0.0, 5.0])


def test_a_pause_in_which_nobody_listened_is_a_gap_of_all() -> None:
    integral = PowerIntegral({"rack": 1}, "rack")
    integral.add(watts(100.0), 1.0, False)
    integral.add(watts(300.0), 3600.0, True)
    energy_j, var_j2, _ = integral.take()
    assert energy_j[0] == pytest.approx(100.0 + 200.0 * 3600.0)
    assert var_j2[0] > 0.0


class Feeder:
    """One feeder with a counter and a power meter, look by look."""

    def __init__(self) -> None:
        self.table = TableState("feeder", 1)
        self.growth = EnergyCounters({"feeder": 1}, "feeder", ENERGY)
        self.total_j = 0.0
        self.refused = 0

    def step(
        self, power_w: float, counter_j: float | None, span_s: float = 10.0, reset: bool = False
    ) -> None:
        if counter_j is not None:
            self.table.raw[0, 0] = 1  # that it was read at all; the Inbox gives the growth
            self.table.total[0, 0] = round(counter_j * 1e3)
            self.table.resets[0, 0] += reset
        energy_j, _, refused = self.growth.settle(
            self.table, watts(power_w * span_s), watts(0.0), watts(power_w), np.array([True])
        )
        self.total_j += float(energy_j[0])
        self.refused += refused


def test_a_counter_counts_over_gaps_and_once() -> None:
    feeder = Feeder()
    feeder.step(100.0, 0.0)
    at_first_j = feeder.total_j
    feeder.step(101.0, 1000.0)
    for _ in range(5):
        feeder.step(99.0, None)  # silent: the power stands in
    feeder.step(99.0, 7030.0)
    feeder.step(99.0, 7030.0)  # heard again, or late: nothing more but the look's own power
    assert feeder.total_j - at_first_j == pytest.approx(7030.0 + 990.0)
    assert feeder.refused == 0


@pytest.mark.parametrize(("counter_j", "reset"), [(200.0, True), (5_000_000.0, False)])
def test_a_counter_that_begins_anew_or_is_replaced_gives_way_to_the_power(
    counter_j: float, reset: bool
) -> None:
    feeder = Feeder()
    feeder.step(100.0, 0.0)
    feeder.step(100.0, 1000.0)
    feeder.step(100.0, counter_j, reset=reset)
    feeder.step(100.0, counter_j + 1000.0)
    assert feeder.total_j == pytest.approx(4000.0)
    assert feeder.refused == 1


def test_gpus_counters_fill_the_gap_of_their_node() -> None:
    gaps = NodeGaps({"node": 1})
    yes, no = np.array([True]), np.array([False])

    def node_w(gpus_w: float) -> float:
        return 200.0 + 1.1 * gpus_w

    rng = np.random.default_rng(1)
    for gpus_w in rng.uniform(500.0, 4000.0, 300).tolist():
        gaps.settle(watts(10.0 * node_w(gpus_w)), watts(0.0), yes, watts(10.0 * gpus_w), yes, 10.0)
    total_j = 0.0
    for _ in range(30):  # 300 s without a word; the last power is held
        energy_j, _, unfilled = gaps.settle(watts(40_000.0), watts(9.0), yes, watts(0.0), no, 10.0)
        assert unfilled.all()
        total_j += float(energy_j[0])
    energy_j, var_j2, unfilled = gaps.settle(
        watts(40_000.0), watts(-100.0), yes, watts(310.0 * 900.0), yes, 10.0
    )
    total_j += float(energy_j[0])
    assert not unfilled.any()
    assert total_j == pytest.approx(310.0 * node_w(900.0), rel=0.01)
    assert float(var_j2[0]) + 30 * 9.0 == pytest.approx((0.02 * total_j) ** 2, rel=0.02)


def test_each_restart_counts_though_it_comes_back_to_the_same_save() -> None:
    time = JobTime({"job": 1})
    for at_ns in (10, 20, 20):
        time.receive(0, 1, ReportedSpans(tier=0, began_ns=5, at_ns=at_ns, save_s=3.0, restart_s=120.0))
    assert time.owed_ns[0].tolist() == [3 * NS, 240 * NS]


@pytest.mark.long
def test_a_job_that_came_and_went_between_two_looks_is_not_its_predecessors() -> None:
    pod = Twin(two_racks(racks="r1"))
    node = pod.site.name("node", 0)

    def run(seconds: int, *events: Any) -> None:
        for _ in range(seconds):
            pod.tick({"node.power_w": 1000.0, "rack.power_w": 20_000.0}, *events)
            events = ()

    run(30, JobStarted(id="a", job="A", nodes=(node,), tenant="alice"))
    run(620, JobEnded(id="b", job="A"))  # a freed slot rests for ten minutes
    while pod.engine.ledger.booked_ns != pod.now_ns - 9 * NS:  # the next tick is that of a look
        run(1)
    run(1, JobStarted(id="c", job="B", nodes=(node,), tenant="bob"))
    run(3)
    run(30, JobEnded(id="d", job="B"))
    assert pod.engine.jobs.slot_of == {}
    hour = pod.engine.ledger.running()
    assert hour is not None
    spent = {row.tenant: sum(row.gpu_ns) / NS / 4 for row in hour.rows if row.part == "job"}
    assert spent["alice"] == pytest.approx(30.0, abs=1.0)
    assert spent["bob"] == pytest.approx(4.0, abs=1.0)


def test_a_restart_after_a_job_told_its_queue_books_the_same() -> None:
    pod = Twin(two_racks(racks="r1"))
    node = pod.site.name("node", 0)
    values = {"node.power_w": 1000.0, "rack.power_w": 20_000.0}

    def started(event: str, **more: Any) -> JobStarted:
        return JobStarted(id=event, job="A", nodes=(node,), tenant="alice", **more)

    for events in [(started("a"),), *[()] * 30, (started("b", queue="train", account="phys"),), *[()] * 30]:
        pod.tick(values, *events)
    other = pod.restarted(two_racks(racks="r1"), ())
    for _ in range(30):
        pod.tick(values)
        other.tick(values)
    assert other.engine.checksum() == pod.engine.checksum()
    hour = pod.engine.ledger.running()
    assert hour is not None
    assert {row.queue for row in hour.rows if row.part == "job"} == {"", "train"}
