"""The workload of a simulated site: jobs on whole nodes that swing together, save, fail, restart and end."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.builders import site_of, two_racks
from twin.events import CheckpointTold, Event, JobEnded, JobStarted
from twin.frame import F64, NS
from twin.plant.jobs_drawn import Job, berths_of, longest_run
from twin.plant.swing import Swing
from twin.plant.tally import COMPUTE_SHARE_PU, Tally
from twin.plant.truth import Truth, blank
from twin.plant.workload import Mix, Workload
from twin.site import Site

SITE = site_of(two_racks())
TRAINING = Mix(1.0, 0.0, 0.0, job_hours=(40.0, 48.0))


def truth_of(site: Site = SITE) -> Truth:
    """All on, at the highest clock."""
    truth = blank(site)
    truth.gpu_alive[:] = truth.node_on[:] = True
    truth.gpu_clock_pu[:] = 1.0
    return truth


class Run:
    """A workload with a truth that nothing else moves."""

    def __init__(self, mix: Mix | None = None, seed: int = 1, site: Site = SITE) -> None:
        self.site, self.truth, self.work = site, truth_of(site), Workload(site, seed, mix)
        self.time_s = 0.0
        self.events: list[Event] = []

    def go(self, seconds: float, dt_s: float = 1.0) -> list[Event]:
        """So long in steps; what happened."""
        new: list[Event] = []
        for _ in range(round(seconds / dt_s)):
            new += self.work.step(self.truth, self.time_s, dt_s)
            self.time_s += dt_s
        self.events += new
        return new

    def record(self, seconds: float, dt_s: float = 1.0) -> F64:
        """SM activities [steps, n_gpu]."""
        out = []
        for _ in range(round(seconds / dt_s)):
            self.go(dt_s, dt_s)
            out.append(self.truth.gpu_sm_pu.copy())
        return np.array(out)

    def rows(self, job: Job) -> slice:
        """GPUs of a job."""
        start = self.site.gpu_start_of_node
        return slice(int(start[job.first]), int(start[job.last]))


def test_jobs_hold_whole_nodes_that_nobody_else_holds() -> None:
    for seed in range(10):
        run = Run(seed=seed)
        first = run.go(1)
        started = [e for e in first if isinstance(e, JobStarted)]
        nodes = [n for e in started for n in e.nodes]
        assert len(nodes) == len(set(nodes))
        assert all(SITE.entity("node", n) is not None for n in nodes)
        assert {e.kind for e in started} == {"training", "inference", "batch"}
        assert {e.job for e in started} == {j.name for j in run.work.jobs}
        for e in started:
            assert (e.coupling == "synchronous") == (e.kind == "training")
            assert (e.checkpoint_interval_s > 0) == (e.kind == "training")


def test_shares_of_the_mix_are_held() -> None:
    site = site_of(two_racks(racks="r[01-20]"))
    mix = Mix(0.5, 0.2, 0.1)
    berths = berths_of(np.arange(site.sizes["node"]), mix, np.random.default_rng(0))
    held = {
        k: sum(b.last - b.first for b in berths if b.kind == k) for k in ("training", "inference", "batch")
    }
    assert held == {"training": 180, "inference": 72, "batch": 36}
    assert all(a.last <= b.first for a, b in pairwise(berths))


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 5], [3, 4, 9, 10, 11]])
def test_berths_of_few_nodes_and_gaps_hold_only_those_nodes(nodes: list[int]) -> None:
    for seed in range(20):
        berths = berths_of(np.array(nodes), Mix(0.6, 0.3, 0.1), np.random.default_rng(seed))
        covered = [i for b in berths for i in range(b.first, b.last)]
        assert covered == nodes


def test_idle_nodes_rest_and_activities_are_shares() -> None:
    run = Run(Mix(0.5, 0.2, 0.1))
    seen = run.record(600)
    busy = np.zeros(SITE.sizes["gpu"], np.bool_)
    for job in run.work.jobs:
        busy[run.rows(job)] = True
    assert (seen[:, ~busy] == 0).all()
    assert (~busy).sum() >= 0.2 * SITE.sizes["gpu"]
    assert seen.min() >= 0
    assert seen.max() <= 1
    for column in (run.truth.gpu_tensor_pu, run.truth.gpu_dram_pu):
        assert column.min() >= 0
        assert column.max() <= 1


def test_members_of_a_training_job_swing_together_and_jobs_do_not() -> None:
    run = Run(TRAINING)
    seen = run.record(900)
    jobs = run.work.jobs
    assert len(jobs) >= 2
    means = []
    for job in jobs:
        own = seen[:, run.rows(job)]
        ratio = own / own.mean(axis=1, keepdims=True)
        assert np.ptp(ratio, axis=0).max() < 1e-9, "each member is a fixed multiple of the job"
        means.append(own.mean(axis=1))
        assert own.min() < 0.5 * own.max()
    assert abs(np.corrcoef(means[0], means[1])[0, 1]) < 0.5


def job(**change: Any) -> Job:
    """A plain training job on one row."""
    plain = Job("training-1", "training", 0, 1, 4, 1e9, (0.8, 0.5, 0.4), (0.25, 0.0, 0.2), 20.0, 0.0, 2.0,
                900.0, 20.0, 300.0)  # fmt: skip
    return replace(plain, **change)


@pytest.mark.parametrize("dt_s", [0.5, 1.0, 3.0, 7.0, 20.0, 50.0])
def test_the_mean_activity_does_not_depend_on_the_step(dt_s: float) -> None:
    """A dip of 2 s to a quarter in each 20 s: the mean is (18 + 2/4) / 20 of the compute level."""
    swing = Swing(1)
    swing.shape(1)
    swing.seat(0, job(phase_s=3.3), (0, 1), np.ones(1))
    columns = (np.zeros(1), np.zeros(1), np.zeros(1))
    total = np.zeros(3)
    steps = round(4200 / dt_s)
    for i in range(steps):
        swing.step(columns, i * dt_s, dt_s)
        total += [c[0] for c in columns]
    expected = [0.8 * (18 + 0.5) / 20, 0.5 * 18 / 20, 0.4 * (18 + 0.4) / 20]
    assert total / steps == pytest.approx(expected, rel=1e-6)


def test_periods_and_dips_are_those_of_the_mix() -> None:
    run = Run(replace(TRAINING, checkpoint_interval_s=(1e6, 1e6)))
    run.go(1)
    one = run.work.jobs[0]
    assert 5 <= one.period_s <= 60
    seen = run.record(1200, 0.1)[:, run.rows(one)][:, 0]
    low = seen < 0.99 * seen.max()
    begins = np.flatnonzero(np.diff(low.astype(int)) == 1)
    assert np.diff(begins).mean() * 0.1 == pytest.approx(one.period_s, rel=0.02)
    assert low.mean() == pytest.approx(one.dip_s / one.period_s, rel=0.1)


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
    assert (tally.progress.done_gpu_s, tally.progress.kept_gpu_s) == (20.0, 10.0)


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


def test_all_time_of_a_job_is_done_slowed_or_saving() -> None:
    run = Run(TRAINING)
    run.truth.gpu_clock_pu[:] = 0.8
    run.go(7200)
    p = run.work.progress
    gpus = sum(j.gpus for j in run.work.jobs)
    assert p.done_gpu_s + p.slowed_gpu_s + p.saving_gpu_s == pytest.approx(gpus * 7200, rel=0.005)


def test_jobs_end_when_their_work_is_done_and_others_follow() -> None:
    run = Run(Mix(0.6, 0.2, 0.2, job_hours=(0.05, 0.1)))
    run.go(7200)
    started = [e.job for e in run.events if isinstance(e, JobStarted)]
    ended = [e.job for e in run.events if isinstance(e, JobEnded)]
    assert len(ended) > 20
    assert len(started) == len(set(started))
    assert set(ended) < set(started)
    assert set(started) - set(ended) == {j.name for j in run.work.jobs}
    assert not any(e.job.startswith("inference") for e in run.events if isinstance(e, JobEnded))
    order = [e.job for e in run.events if isinstance(e, JobStarted | JobEnded)]
    assert all(order.index(name) < len(order) - 1 - order[::-1].index(name) for name in ended)


def test_inference_is_bursty_and_follows_the_day() -> None:
    run = Run(Mix(0.0, 1.0, 0.0, hour_at_start=3.0))
    night = run.record(1800)
    run.time_s = 12 * 3600.0
    noon = run.record(1800)
    assert noon.mean() > 1.3 * night.mean()
    one = noon[:, 0]
    assert 0.05 < one.std() / one.mean() < 1.0
    assert abs(np.corrcoef(noon[:, 0], noon[:, -1])[0, 1]) < 0.95


def test_a_constant_mix_has_no_jobs() -> None:
    run = Run(Mix(constant_pu=0.7))
    assert run.go(10) == []
    assert (run.truth.gpu_sm_pu == 0.7).all()
    assert (run.truth.gpu_tensor_pu > 0).all()
    assert run.work.jobs == ()


def test_the_same_seed_is_the_same_day_and_a_fork_goes_on_alike() -> None:
    a, b, c = Run(seed=4), Run(seed=4), Run(seed=5)
    for run in (a, b, c):
        run.go(700)
    assert np.array_equal(a.truth.gpu_sm_pu, b.truth.gpu_sm_pu)
    assert a.events == b.events
    assert not np.array_equal(a.truth.gpu_sm_pu, c.truth.gpu_sm_pu)
    fork = copy.deepcopy(b)
    a.go(700)
    fork.go(700)
    assert np.array_equal(a.truth.gpu_sm_pu, fork.truth.gpu_sm_pu)
    assert a.events == fork.events
    assert a.work.progress == fork.work.progress
    assert b.time_s == 700


def test_a_site_without_gpus_has_nothing_to_do() -> None:
    site = site_of({"site": "x", "halls": [{"name": "h", "racks": [{"name": "r1"}]}]})
    run = Run(site=site)
    assert run.go(10) == []


def test_a_lumped_truth_is_driven_by_node() -> None:
    truth = truth_of()
    n = SITE.sizes["node"]
    for name in ("gpu_sm_pu", "gpu_tensor_pu", "gpu_dram_pu"):
        setattr(truth, name, np.zeros(n))
    truth.gpu_clock_pu, truth.gpu_alive = np.ones(n), np.ones(n, np.bool_)
    work = Workload(SITE, 1, TRAINING)
    for t in range(60):
        work.step(truth, float(t), 1.0)
    assert truth.gpu_sm_pu.max() > 0.5
    assert work.jobs[0].gpus == 4 * (work.jobs[0].last - work.jobs[0].first)


@pytest.mark.parametrize(("healthy", "run"), [
    ([], (0, 0)), ([0, 0], (0, 0)), ([1], (0, 1)), ([1, 1, 0, 1, 1, 1, 0], (3, 6)), ([1, 0, 1], (0, 1)),
])  # fmt: skip
def test_longest_run(healthy: list[int], run: tuple[int, int]) -> None:
    assert longest_run(np.array(healthy, np.bool_)) == run


def test_a_mix_of_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match="shares"):
        Mix(0.6, 0.5, 0.0)
    with pytest.raises(ValueError, match="shares"):
        Mix(-0.1, 0.5, 0.0)
