"""Jobs save: at their interval, when asked, and they tell of it; what a failure costs is the work since."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.scripted_workload import SITE, TRAINING, Run
from twin.catalogue import F64, NS
from twin.plant.work import COMPUTE_SHARE_PU, Tally
from twin.plant.workload import Mix
from twin.telemetry import CheckpointTold, JobEnded, JobStarted


def test_checkpoints_come_at_their_interval_and_rest_the_job() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(1)
    one = run.work.jobs[0]
    seen = run.record(7200)[:, run.rows(one)][:, 0]
    saving = seen < 0.2 * seen.max()
    begins = np.flatnonzero(np.diff(saving.astype(int)) == 1)
    assert 600 <= one.interval_s <= 1800
    assert np.diff(begins) == pytest.approx(one.interval_s + one.save_s, abs=2)
    assert saving.sum() == pytest.approx(len(begins) * one.save_s, rel=0.15)
    assert 10 <= one.save_s <= 40
    age = run.work.checkpoint_age_s(one.name, run.time_s)
    assert age is not None
    assert 0 <= age <= one.interval_s + 2 * one.save_s


def test_a_save_that_is_asked_for_begins_at_once() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(5)
    one = run.work.jobs[0]
    assert run.work.checkpoint("nobody", 0.0) is None
    assert run.work.checkpoint(one.name, run.time_s) == pytest.approx(one.save_s)
    run.go(2)
    assert run.truth.gpu_sm_pu[run.rows(one)].max() < 0.1
    left = run.work.checkpoint(one.name, 5.0)
    assert left == pytest.approx(one.save_s - 2, abs=1.01)
    run.go(one.save_s + 1)
    assert run.work.checkpoint(one.name, 5.0) == 0.0
    assert run.truth.gpu_sm_pu[run.rows(one)].min() > 0.5
    age = run.work.checkpoint_age_s(one.name, run.time_s)
    assert age == pytest.approx(one.save_s + 3, abs=1.5)


def test_a_save_asked_for_during_another_follows_it() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(5)
    one = run.work.jobs[0]
    run.work.checkpoint(one.name, run.time_s)
    run.go(3)
    left = run.work.checkpoint(one.name, run.time_s)
    assert left is not None
    assert left > one.save_s
    run.go(left - one.save_s + 2)
    age = run.work.checkpoint_age_s(one.name, run.time_s)
    assert age == pytest.approx(one.save_s + 2, abs=1.5), "the one that ran is whole"
    run.go(one.save_s)
    assert run.work.checkpoint(one.name, 8.0) == 0.0


def test_an_interval_can_be_set() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(5)
    one = run.work.jobs[0]
    assert run.work.checkpoint_interval(one.name, 100.0)
    assert not run.work.checkpoint_interval("nobody", 100.0)
    run.work.checkpoint(one.name, run.time_s)
    seen = run.record(2000)[:, run.rows(one)][:, 0]
    begins = np.flatnonzero(np.diff((seen < 0.1).astype(int)) == 1)
    assert np.diff(begins) == pytest.approx(100 + one.save_s, abs=2)


def test_an_interval_holds_from_the_last_save_on() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0, checkpoint_interval_s=(5000.0, 5000.0)))
    run.go(5)
    one = run.work.jobs[0]
    run.work.checkpoint(one.name, run.time_s)
    run.go(500)
    run.work.checkpoint_interval(one.name, 700.0)
    began = [e.began_ns for e in run.go(700) if isinstance(e, CheckpointTold) and e.job == one.name]
    assert began[0] // NS == 5, "it says at once that its interval is another"
    assert began[-1] / NS == pytest.approx(5.0 + one.save_s + 700.0, abs=1.0)


def test_jobs_tell_of_each_save_and_speak_every_five_minutes() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(7200)
    for one in run.work.jobs:
        told = [e for e in run.events if isinstance(e, CheckpointTold) and e.job == one.name]
        assert all(a.at_ns < b.at_ns <= a.at_ns + 300.001 * NS for a, b in pairwise(told))
        saves = [e for e in told if e.save_s]
        assert len(saves) >= 3
        for e in saves:
            assert (e.save_s, e.block_s, e.flush_s) == (one.save_s,) * 3
            assert (e.at_ns - e.began_ns) / NS == pytest.approx(one.save_s)
        assert np.diff([e.began_ns / NS for e in saves]) == pytest.approx(one.interval_s + one.save_s, abs=2)
        assert all(e.interval_s == one.interval_s for e in told)
        age = run.work.checkpoint_age_s(one.name, run.time_s)
        assert age == pytest.approx(run.time_s - saves[-1].began_ns / NS)
        held = 0
        for e in told:
            held = e.began_ns if e.save_s else held
            assert e.began_ns == held, "before its first save it holds nothing"


def test_what_they_tell_of_their_progress_follows_the_clock_and_not_their_saves() -> None:
    run = Run(TRAINING)
    run.go(400.0)
    [job, *_] = run.work.jobs

    def told() -> F64:
        new = [e for e in run.go(1000.0) if isinstance(e, CheckpointTold) and e.job == job.name]
        assert len(new) > 2
        return np.array([e.progress_per_s for e in new][1:])

    assert told() == pytest.approx(job.gpus, rel=1e-6)
    run.truth.gpu_clock_pu[:] = 0.8
    slower = 1.0 / (COMPUTE_SHARE_PU / 0.8 + 1.0 - COMPUTE_SHARE_PU)
    assert told() == pytest.approx(job.gpus * slower, rel=1e-6)


def test_other_jobs_tell_nothing_of_saves() -> None:
    run = Run(Mix(0.0, 0.5, 0.4))
    assert not [e for e in run.go(3000) if isinstance(e, CheckpointTold)]


def test_a_job_that_is_back_tells_what_that_took_and_has_its_own_interval_again() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(5)
    one = run.work.jobs[0]
    own_s = one.interval_s
    run.work.checkpoint_interval(one.name, 4000.0)
    run.truth.gpu_alive[run.rows(one).start] = False
    after = run.go(one.restart_s + 2)
    back = next(e for e in after if isinstance(e, CheckpointTold) and e.job == one.name + ".1")
    started = next(e for e in after if isinstance(e, JobStarted) and e.job == one.name + ".1")
    assert after.index(started) < after.index(back)
    assert (back.restart_s, back.began_ns, back.save_s) == (one.restart_s, 0, 0.0)
    assert back.interval_s == started.checkpoint_interval_s == own_s


def test_a_dead_member_stops_a_synchronous_job_and_costs_the_work_since_its_save() -> None:
    run = Run(TRAINING)
    run.go(5)
    one, other = run.work.jobs[:2]
    run.work.checkpoint(one.name, run.time_s)
    run.go(one.save_s + 300)
    dead = run.rows(one).start
    run.truth.gpu_alive[dead] = False
    events = run.go(1)
    assert [(type(e), e.job) for e in events if isinstance(e, JobEnded)] == [(JobEnded, one.name)]
    assert run.work.lost_work() == pytest.approx(300 * one.gpus, rel=0.02)
    assert run.work.progress.interruptions == 1
    assert (run.truth.gpu_sm_pu[run.rows(one)] == 0).all()
    assert run.truth.gpu_sm_pu[run.rows(other)].max() > 0
    again = [e for e in run.go(one.restart_s + 2) if isinstance(e, JobStarted)]
    assert [e.job for e in again] == [f"{one.name}.1"]
    assert SITE.name("node", int(SITE.node_of_gpu[dead])) not in again[0].nodes
    assert again[0].nodes
    lost = run.work.lost_work()
    run.go(600)
    assert run.work.lost_work() == lost, "a death is paid for once"


def test_an_independent_job_loses_the_part_of_a_dead_node_once() -> None:
    run = Run(Mix(0.0, 0.0, 1.0, job_hours=(40.0, 48.0)))
    run.go(100)
    one = next(j for j in run.work.jobs if j.last - j.first > 1)
    run.truth.node_on[one.first] = False
    assert not [e for e in run.go(1) if isinstance(e, JobEnded)]
    assert run.work.lost_work() == pytest.approx(100 * 4, rel=0.03)
    run.truth.gpu_alive[run.rows(one).start] = False
    run.go(10)
    assert run.work.lost_work() == pytest.approx(100 * 4, rel=0.03)
    assert run.work.progress.interruptions == 0


def test_lost_work_has_to_be_done_again() -> None:
    tally = Tally(np.array([False]))
    tally.seat(0, (0, 2), 2, 50.0)
    tally.count(np.ones(2), 10.0)
    assert tally.done[0] == 70.0
    tally.lose(0, 0.5)
    assert tally.done[0] == 60.0
    assert tally.progress.lost_gpu_s == 10.0
    assert (tally.progress.done_gpu_s, tally.progress.lost_gpu_s) == (20.0, 10.0)


def test_a_slow_job_ends_later() -> None:
    ends = []
    for clock in (1.0, 0.5):
        run = Run(Mix(1.0, 0.0, 0.0, job_hours=(0.5, 0.5), swing_pu=0.0), seed=2)
        run.truth.gpu_clock_pu[:] = clock
        run.go(1)
        first = run.work.jobs[0].name
        while not any(isinstance(e, JobEnded) and e.job == first for e in run.go(1)):
            assert run.time_s < 20_000
        ends.append(run.time_s)
    assert ends[1] > 1.4 * ends[0]


def test_a_node_that_goes_off_counts_as_well_and_all_may_go() -> None:
    run = Run()
    run.go(30)
    run.truth.node_on[:] = False
    events = run.go(1)
    training = [j for j in events if isinstance(j, JobEnded)]
    assert len(training) == run.work.progress.interruptions >= 1
    run.go(3600, 5.0)
    run.truth.node_on[:] = True
    events = run.go(3600, 5.0)
    assert any(isinstance(e, JobStarted) and ".1" in e.job for e in events)


def test_a_low_clock_slows_a_synchronous_job_as_a_whole() -> None:
    fast, slow = (Run(replace(TRAINING, swing_pu=0.0), seed=3) for _ in range(2))
    one = None
    for run in (fast, slow):
        run.go(1)
        one = run.work.jobs[0]
        if run is slow:
            run.truth.gpu_clock_pu[run.rows(one).start] = 0.5
        run.go(3000)
    assert one is not None
    # Time of the whole job at clock s: c / s + 1 - c, c = 0.8
    expected = 1.0 - 1.0 / (0.8 / 0.5 + 0.2)
    lost = fast.work.progress.done_gpu_s - slow.work.progress.done_gpu_s
    ran_s = 3000 - 3000 * one.save_s / (one.interval_s + one.save_s)
    assert lost == pytest.approx(expected * one.gpus * ran_s, rel=0.03)
    assert slow.work.progress.slowed_gpu_s == pytest.approx(lost, rel=0.02)
    assert fast.work.progress.slowed_gpu_s == 0
