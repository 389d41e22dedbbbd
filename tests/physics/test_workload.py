"""The workload of a simulated site: jobs on whole nodes that swing together, save, fail, restart and end."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from tests.support.scripted_workload import SITE, TRAINING, Run, truth_of
from twin.plant.jobs import PlantJob, berths_of, longest_run
from twin.plant.workload import Mix, Swing, Workload
from twin.telemetry import JobEnded, JobStarted


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


def test_members_of_a_training_job_wait_for_the_one_with_the_lowest_clock() -> None:
    run = Run(replace(TRAINING, swing_pu=0.0))
    run.go(1)
    first, last = (rows := run.rows(run.work.jobs[0])).start, rows.stop
    tensor, sm = run.truth.gpu_tensor_pu[first:last].copy(), run.truth.gpu_sm_pu[first:last].copy()
    run.truth.gpu_clock_pu[first] = 0.5
    run.go(1)
    pace = 0.5 / (0.8 + 0.2 * 0.5)
    assert run.truth.gpu_tensor_pu[first + 1 : last] == pytest.approx(tensor[1:] * pace)
    assert run.truth.gpu_tensor_pu[first] == tensor[0]
    assert run.truth.gpu_sm_pu[first:last] == pytest.approx(sm)
    run.truth.gpu_clock_pu[first] = 1.0
    run.go(1)
    assert run.truth.gpu_tensor_pu[first:last] == pytest.approx(tensor)


def job(**change: Any) -> PlantJob:
    """A plain training job on one row."""
    plain = PlantJob("training-1", "training", 0, 1, 4, 1e9, (0.8, 0.5, 0.4), (0.25, 0.0, 0.2), 20.0, 0.0,
                     2.0, 900.0, 20.0, 300.0)  # fmt: skip
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
