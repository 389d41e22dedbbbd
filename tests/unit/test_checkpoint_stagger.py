"""checkpoint: saves are moved so that they meet neither on storage nor on feeders; what is not moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.checkpointing import Checkpoint
from policies.checkpointing.calendar import (
    BIN_S,
    MOST_LOSS_PU,
    PLANNED_PU,
    SPAN,
    GivenSaves,
    PlannedSave,
    SaveCalendar,
)
from policies.checkpointing.costs import storage_of
from policies.checkpointing.texts import INTERVAL, SINCE
from tests.support.saving_fleet import FleetSettings, SavingFleet, calendar_advisor, engine_advisor
from tests.support.saving_jobs import EIGHT, OTHERS, Saving, drain
from twin.catalogue import ContractError

HOUR_S = 3600.0


PLAIN = PlannedSave(
    due_s=1200.0, early_s=300.0, late_s=300.0, interval_s=1200.0, block_s=10.0, busy_s=10.0, storage=0,
    feeders=np.array([0]), watts=np.array([1000.0]),
)  # fmt: skip


def save(**more: Any) -> PlannedSave:
    return replace(PLAIN, **more)


def test_no_window_of_a_feeder_gets_more_than_its_ramp_while_there_is_room() -> None:
    limit = np.array([10_000.0, 4000.0])
    calendar = SaveCalendar(limit, 1, HOUR_S)
    rng = np.random.default_rng(3)
    for i in range(60):
        watts = rng.uniform(500, 2000, 1)
        calendar.place(save(feeders=np.array([i % 2]), watts=watts, block_s=float(rng.uniform(2, 90))), 60.0)
    for table in (calendar._falls, calendar._rises):
        total = np.concatenate([np.zeros((2, 1)), np.cumsum(table, axis=1)], axis=1)
        windows = (total[:, SPAN:] - total[:, :-SPAN]).max(axis=1)
        assert (windows <= PLANNED_PU * limit + 1e-6).all()
        assert windows.max() > 0


def test_a_save_that_meets_nobody_keeps_its_time() -> None:
    calendar = SaveCalendar(np.array([10_000.0]), 1, HOUR_S)
    assert calendar.best_s(save(), 60.0) == 1200.0


def test_a_save_that_stops_no_training_keeps_its_time_as_well() -> None:
    """No time costs it anything, so that none is better than its own."""
    calendar = SaveCalendar(np.array([10_000.0]), 1, HOUR_S)
    assert calendar.best_s(save(block_s=0.0, watts=np.zeros(1)), 60.0) == 1200.0


def test_saves_of_one_storage_are_moved_apart_and_those_of_two_are_not() -> None:
    calendar = SaveCalendar(np.array([1e9]), 2, HOUR_S)
    first = calendar.place(save(block_s=60.0, busy_s=60.0), 60.0)
    second = calendar.place(save(block_s=60.0, busy_s=60.0), 60.0)
    assert abs(first - second) >= 60.0
    assert calendar.place(save(block_s=60.0, busy_s=60.0, storage=1), 60.0) == 1200.0
    assert calendar.place(save(block_s=60.0, busy_s=60.0, storage=-1), 60.0) == 1200.0


@pytest.mark.parametrize("block_s", [2.0, 60.0, 400.0])
def test_a_ramp_moves_no_save_by_more_than_the_plan_may_lose(block_s: float) -> None:
    """All feeders are full everywhere: it stays where the loss is small, whatever the ramp."""
    calendar = SaveCalendar(np.array([100.0]), 1, HOUR_S)
    begin = np.arange(600.0, 1900.0, BIN_S)
    n = len(begin)
    every_s, none = np.full(n, 1e5), np.full(n, -1)
    watts, feeder = np.linspace(2000.0, 100.0, n), np.zeros(n, np.int64)
    block = np.full(n, BIN_S)
    calendar.add(
        GivenSaves(
            at_s=begin,
            interval_s=every_s,
            block_s=block,
            busy_s=np.zeros(n),
            storage=none,
            entry=np.arange(n),
            feeder=feeder,
            watts=watts,
        )
    )
    moved = calendar.best_s(save(block_s=block_s, busy_s=block_s, storage=-1), 60.0)
    assert moved > 1200.0, "later is emptier"
    assert block_s * ((moved - 1200.0) / 1200.0) ** 2 <= MOST_LOSS_PU * 1200.0


def test_jobs_that_would_save_together_are_told_other_intervals_and_why() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}], policy=Checkpoint())
    twin.says.day = 0.3
    for job in "ab":
        twin.told(job, ago_s=61.0, interval_s=2400.0, save_s=60.0, block_s=60.0, flush_s=60.0)
    twin.wait(10)
    kept = twin.engine.memory["checkpoint"]
    slots = [twin.engine.jobs.slot_of[job] for job in "ab"]
    begins_s = kept["slot_ns"][slots] / 1e9
    assert abs(begins_s[0] - begins_s[1]) >= 60.0
    assert any("so that saves do not overlap" in why for why in twin.why(INTERVAL))
    plain = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}], policy=Checkpoint(stagger=False))
    plain.says.day = 0.3
    plain.told("a", ago_s=61.0, interval_s=2400.0, save_s=60.0, block_s=60.0, flush_s=60.0)
    plain.wait(10)
    assert not plain.engine.memory["checkpoint"]["slot_ns"].any()


def test_a_save_ahead_of_trouble_is_asked_for_at_once_and_ends_the_shift() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}])
    twin.says.day = 0.3
    for job in "ab":
        twin.told(job, ago_s=1000.0, interval_s=2400.0, save_s=60.0, block_s=60.0, flush_s=60.0)
    twin.wait(10)
    kept, slot = twin.engine.memory["checkpoint"], twin.engine.jobs.slot_of["a"]
    twin.tick(None, drain())
    twin.wait(10)
    assert len(twin.why(SINCE)) == 1
    kept = twin.engine.memory["checkpoint"]
    assert kept["save_since_s"][slot] > 0
    assert kept["round_s"][slot] == kept["slot_ns"][slot] == 0


@pytest.mark.parametrize(
    "wrong", [{"ramp_pu": 0.0}, {"ramp_pu": True}, {"stagger": 1}, {"storage_of_queue": {"train": 3}}]
)
def test_settings_that_are_wrong_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        Checkpoint(**wrong)  # type: ignore[arg-type]


def test_jobs_of_two_queues_on_two_file_systems_do_not_wait_for_each_other() -> None:
    names = {"train": "fast", "long": "slow"}
    twin = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fast"}, {"name": "slow"}],
                  policy=Checkpoint(storage_of_queue=names, ramp_pu=1.0))  # fmt: skip
    twin.says.day = 0.3
    for job, queue in (("a", "train"), ("b", "long")):
        twin.engine.jobs.queues[twin.engine.jobs.slot_of[job]] = queue
        twin.told(job, ago_s=61.0, interval_s=2400.0, save_s=60.0, block_s=60.0, flush_s=60.0)
    twin.wait(10)
    assert not twin.engine.memory["checkpoint"]["round_s"].any()


@pytest.mark.long
def test_a_small_fleet_that_began_at_once_stays_within_its_ramp_and_trains_more() -> None:
    """Six rounds of a hundred jobs; `python -m tests.support.saving_fleet 1000` is the whole of it."""
    herd = FleetSettings(n=100, work_s=(4.0, 8.0), ramp_pu=0.08)
    staggered = SavingFleet(herd, calendar_advisor(herd)).run(6)
    assert staggered.beyond == 0
    assert staggered.effective_pu > SavingFleet(herd, None).run(6).effective_pu + 0.01
    assert (
        staggered.effective_pu > SavingFleet(replace(herd, begin_s=1200.0), None).run(6).effective_pu - 1e-4
    )
    assert staggered.saves > 0.95 * 6 * herd.n, "intervals are moved, and not made longer"


@pytest.mark.long
def test_the_policy_in_an_engine_staggers_a_fleet() -> None:
    herd = FleetSettings(n=100, work_s=(4.0, 8.0), ramp_pu=0.08)
    staggered = SavingFleet(herd, engine_advisor(herd)).run(2)
    plain = SavingFleet(herd, None).run(2)
    assert staggered.worst_pu < plain.worst_pu
    assert staggered.effective_pu > plain.effective_pu


def test_a_restart_is_expected_to_take_longer_where_others_save_more() -> None:
    """A job's restart was declared; the other one keeps the file system busy for half of its time."""
    twin = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}], policy=Checkpoint(stagger=False))
    twin.says.day = 0.3
    slot = twin.engine.jobs.slot_of["a"]
    for job, interval_s in (("a", 2400.0), ("b", 60.0)):
        twin.told(job, ago_s=61.0, interval_s=interval_s, save_s=60.0, block_s=60.0, flush_s=60.0)
    twin.wait(10)
    kept = twin.engine.memory["checkpoint"]
    # 600 s as it said; the read in them is what a save takes alone: 60 s less the half that the other took
    assert kept["restart_s"][slot] == pytest.approx(600.0 - 30.0 + 30.0 / 0.5, rel=1e-6)


def test_what_a_job_says_of_its_storage_counts_before_its_queue() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS}, storage=[{"name": "fast"}, {"name": "slow"}])
    jobs, slots = twin.engine.jobs, np.array([twin.engine.jobs.slot_of[job] for job in "ab"], np.int32)
    view = twin.engine.view(1.0)
    assert storage_of(view, slots, {}).tolist() == [-1, -1]
    jobs.queues[slots[0]] = jobs.queues[slots[1]] = "train"
    jobs.storages[slots[1]] = "slow"
    assert storage_of(view, slots, {"train": 0}).tolist() == [0, 1]
    jobs.storages[slots[1]] = "elsewhere"
    assert storage_of(view, slots, {"train": 0}).tolist() == [0, -1], "of another site: nobody knows"
