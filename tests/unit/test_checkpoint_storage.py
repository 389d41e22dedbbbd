"""checkpoint: one file system for all, which nobody may claim for himself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.checkpointing import Checkpoint, best_plan
from policies.checkpointing.costs import DRAIN_PU as STORAGE_PU
from policies.checkpointing.policy import MOST_AWAITED_S, REQUEST_S
from policies.checkpointing.texts import INTERVAL, SINCE
from tests.support.saving_jobs import EIGHT, OTHERS, RESTLESS, Saving, chances, drain, saved, terms
from twin.catalogue import NS
from twin.telemetry import events as ev


def test_many_jobs_of_one_file_system_leave_it_time() -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    given = {"checkpoint_interval_s": 600.0, "checkpoint_save_s": 120.0, "checkpoint_restart_s": 60.0}
    twin = Saving(nodes, told=given, storage=[{"name": "fs"}], max_jobs=40)
    twin.says.day = 0.9
    twin.wait(10)
    often = np.array([twin.often(job) for job in nodes])
    assert (120.0 / often).sum() <= STORAGE_PU * 1.01
    assert (120.0 / often).sum() >= STORAGE_PU * 0.9, "and does not waste it"
    alone = Saving(nodes, told=given, max_jobs=40)
    alone.says.day = 0.9
    alone.wait(10)
    assert alone.often("j0") < 0.7 * often[0]


@pytest.mark.parametrize("bad", [{"storage.health_state": 2.0}, {"storage.used_pu": 0.99}])
def test_a_file_system_that_is_down_or_full_gets_nothing_more(bad: dict[str, float]) -> None:
    twin = Saving({"a": EIGHT}, storage=[{"name": "fs"}])
    twin.tick(bad)
    twin.says.day, twin.says.hour = 0.5, chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(60, bad)
    assert twin.engine.in_force["checkpoint"] == []
    twin.wait(60, {"storage.health_state": 0.0, "storage.used_pu": 0.5})
    assert twin.engine.in_force["checkpoint"]


def test_a_full_file_system_stops_no_saves_onto_another() -> None:
    full = {"storage.used_pu": [0.5, 0.99]}
    policy = Checkpoint(storage_of_queue={"": "fs"})
    twin = Saving({"a": EIGHT}, policy=policy, storage=[{"name": "fs"}, {"name": "archive"}])
    twin.tick(full)
    twin.says.day, twin.says.hour = 0.5, chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(60, full)
    assert SINCE in {p.control for p in twin.engine.in_force["checkpoint"]}


@pytest.mark.long
@pytest.mark.parametrize("key", ["storage.flush_bytes_per_s", "storage.restore_bytes_per_s"])
def test_what_else_is_written_or_restored_leaves_less_to_checkpoints(key: str) -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    often = []
    for steady in (0.0, 0.9e9):
        more: dict[str, Any] = {"history_s": {key: 600}, "max_jobs": 40}
        told = {"checkpoint_interval_s": 86_400.0, "checkpoint_save_s": 60.0}
        twin = Saving(nodes, told=told, storage=[{"name": "fs"}], **more)
        for k in range(120):
            twin.tick({key: 1e9 if k == 0 else steady}, dt_s=5.0)
        twin.says.day = 0.95
        twin.tick({key: steady}, dt_s=5.0)
        twin.wait(65, {key: steady})
        often.append(twin.often("j0"))
    assert often[1] > 2.0 * often[0]


def test_how_long_a_restart_takes_moves_no_interval_of_one_tier() -> None:
    """A failure costs the same restart whenever a job saved: the plan ignores the bandwidth of restores."""
    short, long = (terms(1e-4, restart_s=x) for x in (60.0, 6000.0))
    assert best_plan(long).interval_s == pytest.approx(best_plan(short).interval_s, rel=1e-6)
    assert best_plan(long).ettr < 0.9 * best_plan(short).ettr


def test_a_job_that_claims_long_flushes_stretches_no_other_below_its_share() -> None:
    """Two jobs of as many nodes; half of the half of its time that the file system has is each one's own."""
    often = []
    for claimed_s in (60.0, 5e5):
        twin = Saving({"liar": EIGHT, "b": OTHERS}, told=RESTLESS, storage=[{"name": "fs"}])
        twin.says.day = 0.9
        for _ in range(5):
            twin.told("liar", block_s=60.0, flush_s=claimed_s)
        twin.wait(70)
        often.append(twin.often("b"))
    assert often[1] <= max(often[0], 60.0 / (0.5 * STORAGE_PU)) + 5.0
    assert often[1] < 1000.0


def test_an_interval_that_storage_drains_with_little_room_is_left_alone_where_another_gains_nothing() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.16
    twin.told("a", ago_s=100.0, interval_s=2400.0, save_s=60.0, block_s=60.0, flush_s=1300.0)
    twin.wait(130)
    assert twin.why(INTERVAL) == []


def test_saves_ahead_do_not_all_come_at_once_to_one_file_system() -> None:
    nodes = {f"j{i}": (f"r{1 + i // 18}/node{i % 18}",) for i in range(36)}
    twin = Saving(nodes, storage=[{"name": "fs"}], max_jobs=40)
    twin.says.day, twin.says.hour = 0.001, 0.5
    twin.tick(None, *(ev.CheckpointTold(job=job, began_ns=twin.now_ns - 1200 * NS) for job in nodes))
    twin.wait(5)
    assert len(twin.why(SINCE)) == 10, "ten of 60 s fill ten minutes"


def test_a_job_that_claims_endless_saves_keeps_no_other_from_saving() -> None:
    """Most is at stake by what `liar` says: it would fill the queue of saves for eleven days."""
    twin = Saving({"liar": EIGHT, "b": OTHERS}, storage=[{"name": "fs"}])
    twin.says.day, twin.says.hour = 0.001, 0.5
    year_ns = 365 * 86_400 * NS
    twin.tick(
        None,
        ev.CheckpointTold(
            job="liar", began_ns=twin.now_ns - year_ns, block_s=1.0, flush_s=1e6, interval_s=1e7
        ),
        drain(),
    )
    twin.wait(10)
    assert np.isfinite(twin.since("liar"))
    saved(twin, "b")
    twin.wait(10)
    assert np.isfinite(twin.since("b"))
    kept, slot = twin.engine.memory["checkpoint"], twin.engine.jobs.slot_of["liar"]
    assert kept["save_deadline_ns"][slot] - kept["requested_ns"][slot] <= (REQUEST_S + MOST_AWAITED_S) * NS
