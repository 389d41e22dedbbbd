"""Job slots: reuse, generations, capacity, nodes. May import `twin`."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.jobs import skip_start_times
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, TABLES
from twin.telemetry import JobEnded, JobSlots, JobStarted, start_fault
from twin.telemetry.jobs import REST_S

T0 = 1_700_000_000 * NS


def start(jobs: JobSlots, name: str, nodes: list[int], at_s: float = 0.0, **more: object) -> int | None:
    return jobs.start(JobStarted(job=name, nodes=(), **more), nodes, 0, T0 + round(at_s * NS))  # type: ignore[arg-type]


def end(jobs: JobSlots, name: str, at_s: float = 0.0) -> int | None:
    return jobs.end(JobEnded(job=name), T0 + round(at_s * NS))


def test_the_rest_time_is_the_longest_lease_on_a_job() -> None:
    assert max(c.lease_s for c in TABLES["job"].controls) == REST_S


def test_a_job_takes_a_slot_and_its_nodes() -> None:
    jobs = JobSlots(3, 6)
    assert start(jobs, "a", [4, 1, 1], priority=7, kind="training", tenant="t", floor_w=5.0) == 0
    assert start(jobs, "b", [2], coupling="independent") == 1
    assert jobs.alive.tolist() == [True, True, False]
    assert jobs.nodes[0].tolist() == [1, 4]
    assert jobs.job_of_node.tolist() == [-1, 0, 1, -1, 0, -1]
    assert jobs.synchronous.tolist() == [True, False, False]
    assert (jobs.priority[0], jobs.floor_w[0], jobs.tenants[0], jobs.generation[0]) == (7, 5.0, "t", 1)
    assert end(jobs, "a") == 0
    assert jobs.job_of_node.tolist() == [-1, -1, 1, -1, -1, -1]
    assert not jobs.alive[0]


@pytest.mark.parametrize("after_s, expected", [(0.0, None), (599.0, None), (600.0, 0), (1e6, 0)])
def test_a_slot_rests_before_it_is_used_again(after_s: float, expected: int | None) -> None:
    jobs = JobSlots(1, 1)
    start(jobs, "a", [0])
    end(jobs, "a", 10.0)
    assert start(jobs, "b", [0], 10.0 + after_s) == expected
    assert jobs.counts["refused_full"] == (expected is None)
    assert jobs.generation[0] == (1 if expected is None else 2)


def test_more_jobs_than_slots_are_refused_and_counted() -> None:
    jobs = JobSlots(2, 4)
    assert [start(jobs, f"j{i}", [i]) for i in range(4)] == [0, 1, None, None]
    assert jobs.counts["refused_full"] == 2
    assert set(jobs.slot_of) == {"j0", "j1"}
    assert jobs.job_of_node.tolist() == [0, 1, -1, -1]


def test_the_number_of_a_scheduler_names_a_job_where_one_alone_has_it() -> None:
    jobs = JobSlots(4, 4)
    start(jobs, "slurm:a:101", [0])
    start(jobs, "slurm:a:102", [1])
    start(jobs, "slurm:b:102", [2])
    assert [jobs.slot_named(n) for n in ("101", "job:101", "slurm:b:102")] == [0, 0, 2]
    assert [jobs.slot_named(n) for n in ("102", "1", "", "job:")] == [None] * 4


def test_an_end_before_its_start_is_counted_and_harmless() -> None:
    jobs = JobSlots(2, 2)
    assert end(jobs, "a") is None
    assert start(jobs, "a", [0]) == 0
    assert end(jobs, "a") == 0
    assert end(jobs, "a") is None
    assert jobs.counts["unknown_ended"] == 2


def test_a_second_start_replaces_the_nodes_in_the_same_slot() -> None:
    jobs = JobSlots(2, 4)
    start(jobs, "a", [0, 1])
    assert start(jobs, "a", [1, 2]) == 0
    assert jobs.nodes[0].tolist() == [1, 2]
    assert jobs.job_of_node.tolist() == [-1, 0, 0, -1]
    assert jobs.counts["restarted"] == 1
    assert jobs.generation[0] == 1


def test_jobs_move_with_their_nodes_and_survive_storage() -> None:
    jobs = JobSlots(3, 4)
    start(jobs, "a", [0, 3])
    start(jobs, "b", [1])
    moved = jobs.remapped(3, np.array([3, -1, 1], np.int32))
    assert moved.nodes[0].tolist() == [0]
    assert moved.job_of_node.tolist() == [0, -1, 1]
    back = JobSlots(3, 4)
    back.restore(jobs.dump())
    assert back.slot_of == {"a": 0, "b": 1}
    assert [x.tolist() for x in back.nodes] == [[0, 3], [1], []]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_jobs_fit_into_another_number_of_slots(n: int) -> None:
    jobs = JobSlots(3, 4)
    for i, name in enumerate(("a", "b", "c")):
        start(jobs, name, [i])
    moved = jobs.remapped(4, np.arange(4, dtype=np.int32), n)
    assert moved.n == len(moved.alive) == len(moved.names) == len(moved.nodes) == n
    assert set(moved.slot_of) == {"a", "b", "c"} if n >= 3 else {"a", "b", "c"} >= set(moved.slot_of)
    assert moved.job_of_node.tolist() == [i if i < min(n, 3) else -1 for i in range(4)]
    assert start(moved, "d", [3]) == (3 if n > 3 else None)
    assert jobs.n == 3, "the old one is untouched"


def test_what_a_job_says_of_itself_is_kept_moved_and_stored() -> None:
    jobs = JobSlots(3, 4)
    told = {
        "account": "physics",
        "time_limit_s": 3600.0,
        "checkpoint_interval_s": 600.0,
        "checkpoint_save_s": 20.0,
        "checkpoint_restart_s": 90.0,
    }
    start(jobs, "a", [0], **told)
    start(jobs, "b", [1])
    back = JobSlots(3, 4)
    back.restore(jobs.dump())
    moved = jobs.remapped(4, np.arange(4, dtype=np.int32), 5)
    for some in (jobs, back, moved):
        assert some.accounts[:2] == ["physics", ""]
        for name in ("time_limit_s", "checkpoint_interval_s", "checkpoint_save_s", "checkpoint_restart_s"):
            assert getattr(some, name)[:2].tolist() == [told[name], 0.0]
        assert len(some.accounts) == len(some.time_limit_s) == some.n
        assert some.known
    start(jobs, "a", [0])
    assert jobs.time_limit_s[0] == 0.0, "a second start says all of it anew"
    end(jobs, "a")
    assert jobs.accounts[0] == ""


def test_a_job_runs_since_its_scheduler_started_it_and_else_since_it_was_heard_of() -> None:
    jobs = JobSlots(3, 4)
    start(jobs, "old", [0], started_ns=T0 - 3600 * NS)
    start(jobs, "silent", [1])
    start(jobs, "ahead", [2], started_ns=T0 + 5 * NS)
    slots = slice(None)
    assert ((T0 - jobs.running_since_ns(slots)) / NS).tolist() == [3600.0, 0.0, 0.0]
    assert jobs.started_ns.tolist() == [T0] * 3, "a restart is known by when it was heard of"
    back = JobSlots(3, 4)
    back.restore(jobs.dump())
    assert back.running_since_ns(slots).tolist() == jobs.running_since_ns(slots).tolist()
    start(jobs, "old", [0, 3], 60.0, started_ns=T0 - 3600 * NS)
    assert jobs.running_since_ns(0) == T0 - 3600 * NS, "a resized job keeps its start"
    start(jobs, "old", [0], 120.0)
    assert jobs.running_since_ns(0) == T0 + 120 * NS


def test_the_start_of_a_run_that_is_reported_again_is_no_restart() -> None:
    jobs = JobSlots(4, 4)
    start(jobs, "a", [0, 1])
    start(jobs, "a", [0, 1], 60.0, started_ns=T0 - 5 * NS)
    assert (jobs.started_ns[0], jobs.counts["restarted"]) == (T0, 0)
    assert jobs.running_since_ns(0) == T0 - 5 * NS
    start(jobs, "a", [0, 2], 90.0, started_ns=T0 - 5 * NS)
    assert (jobs.started_ns[0], jobs.counts["restarted"]) == (T0 + 90 * NS, 1), "on other nodes it restarted"
    start(jobs, "a", [0, 2], 200.0, started_ns=T0 + 150 * NS)
    assert (jobs.started_ns[0], jobs.counts["restarted"]) == (T0 + 200 * NS, 2), "so it did after a requeue"


@pytest.mark.parametrize("started_ns", [-1, 1, T0 + 61 * NS, 2**63, -(2**70), 10**30])
def test_a_start_time_that_cannot_be_is_ignored_with_a_reason(started_ns: int) -> None:
    jobs, event = JobSlots(1, 1), JobStarted(job="a\n", nodes=(), started_ns=started_ns)
    assert jobs.start(event, [0], 0, T0) == 0
    assert jobs.running_since_ns(0) == T0
    reason = start_fault(event, T0)
    assert reason is not None
    assert "job a\ufffd: its start is" in reason
    inlet = RecordingInlet()
    skip_start_times([event, JobStarted(job="b", nodes=(), started_ns=T0), JobEnded(job="a")], inlet, T0)
    assert inlet.skipped == [reason]


def test_unknown_work_is_protected() -> None:
    jobs = JobSlots(2, 6)
    assert not jobs.known
    assert jobs.protected_nodes().all(), "nobody has said what runs here"
    start(jobs, "a", [0, 1], kind="training")
    start(jobs, "b", [1, 2])
    assert jobs.known
    assert jobs.protected_nodes().tolist() == [False, True, True, False, False, False]
    assert start(jobs, "c", [4]) is None
    assert jobs.protected_nodes().tolist() == [False, True, True, False, True, False], "no slot, but it runs"
    back = JobSlots(2, 6)
    back.restore(jobs.dump())
    assert back.protected_nodes().tolist() == jobs.protected_nodes().tolist()
    moved = jobs.remapped(3, np.array([4, 2, -1], np.int32))
    assert moved.protected_nodes().tolist() == [True, True, False]
    end(jobs, "b")
    assert jobs.protected_nodes().tolist() == [False, False, False, False, True, False]


def test_a_node_that_jobs_share_is_busy_until_the_last_of_them_ends() -> None:
    jobs = JobSlots(3, 4)
    start(jobs, "a", [0, 1], kind="training")
    start(jobs, "b", [1, 2])
    start(jobs, "c", [1])
    end(jobs, "c")
    assert jobs.job_of_node.tolist() == [0, 1, 1, -1]
    back = JobSlots(3, 4)
    back.restore(jobs.dump())
    moved = jobs.remapped(4, np.arange(4, dtype=np.int32), 1)
    assert moved.job_of_node.tolist() == [0, 0, -1, -1], "what ends for want of a slot leaves the others"
    for held in (jobs, back):
        end(held, "b")
        assert held.job_of_node.tolist() == [0, 0, -1, -1]
        start(held, "a", [3])
        assert held.job_of_node.tolist() == [-1, -1, -1, 0]
        end(held, "a")
        assert (held.job_of_node == -1).all()


def test_jobs_without_a_slot_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.telemetry.jobs.MAX_UNSLOTTED", 2)
    jobs = JobSlots(0, 4)
    for i in range(4):
        start(jobs, f"j{i}", [i])
    assert list(jobs.unslotted) == ["j2", "j3"]
