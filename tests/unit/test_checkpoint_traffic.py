"""Load of file systems by their own counters: restarts and saves beside traffic that no job tells of.

All traffic is simulated: transfers that share one storage equally, and its counters read every 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.checkpointing import Checkpoint, SaveTerms
from policies.checkpointing.contention import MOST_LOAD_PU
from policies.checkpointing.costs import JobBatch
from policies.checkpointing.storage_traffic import (
    COLUMNS,
    JOB_COLUMNS,
    MOST_STRETCH,
    OBSERVED_S,
    WINDOW_S,
    apart_pu,
    bound_start,
    follow_traffic,
    lately_pu,
    learn_stretch,
    learn_time,
    others_load_pu,
    start_s,
    stretch_pu,
)
from tests.support.sampled_cases import sampled
from tests.support.saving_jobs import Saving
from tests.support.shared_storage import busy_pu, finish_s
from twin.catalogue import F64, NS
from twin.telemetry import events as ev

FULL = 40e9  # bytes per second that the storage moves at most
START_S, WORK_S, EVERY_S = 30.0, 20.0, 3600.0  # of each job: a save, and a read, take 20 s alone
N_JOB, TICK_S = 16, 60.0
JOBS = {f"j{i}": (f"r1/node{i}",) for i in range(N_JOB)}
RACK = {"name": "r1", "profile": "air-8gpu", "nodes": N_JOB, "gpus_per_node": 1}
SITE = {
    "site": "lab",
    "halls": [{"name": "h", "racks": [RACK]}],
    "storage": [{"name": "fs"}],
    "max_jobs": N_JOB + 2,
}
FLUSH, RESTORE = "storage.flush_bytes_per_s", "storage.restore_bytes_per_s"


@dataclass
class Others:
    """Transfers of others: `load` of the storage's time from `begin_s` to `end_s`, in saves of 30 s alone."""

    load: float
    begin_s: float
    end_s: float
    work_s: float = 30.0

    def transfers(self, rng: np.random.Generator) -> tuple[F64, F64]:
        n = rng.poisson((self.end_s - self.begin_s) * self.load / self.work_s)
        begin = np.sort(rng.uniform(self.begin_s, self.end_s, n))
        return begin, rng.exponential(self.work_s, n)


class Storage:
    """A file system between jobs that tell of their saves and restarts, and others that tell nobody."""

    def __init__(self, twin: Saving, parts: list[Others], seed: int = 0, restarts_s: Any = ()) -> None:
        self.twin: Any = twin
        self.t_s = 0.0
        rng, until_s = np.random.default_rng(seed), parts[-1].end_s
        begin, work = (np.concatenate(x) for x in zip(*(p.transfers(rng) for p in parts), strict=True))
        each = np.arange(0.0, until_s - 2 * EVERY_S, EVERY_S)
        saves = (each + np.linspace(0.0, EVERY_S, N_JOB, endpoint=False)[:, None]).ravel()
        late_s = np.random.default_rng(seed + 1).uniform(0.0, 400.0, N_JOB)
        reads = np.array([t + 450.0 * i + late_s[i] for i in range(N_JOB) for t in restarts_s])
        begins = np.concatenate([saves, reads])
        own = np.argsort(begins, kind="stable")
        job = [np.repeat(np.arange(N_JOB), len(x)) for x in (each, list(restarts_s))]
        self.job = np.concatenate(job)[own]
        self.begin, self.is_save = begins[own], (np.arange(len(own)) < len(saves))[own]
        self.all_begin = np.append(self.begin, begin)
        self.all_work = np.append(np.full(len(own), WORK_S), work)
        end = finish_s(self.all_begin, self.all_work)
        self.end, self.edges = end[: len(own)], np.arange(0.0, until_s + TICK_S, TICK_S)
        self.rate = FULL * busy_pu(self.all_begin, end, self.edges)
        self.told = np.zeros(len(own), np.bool_)
        self.block_pu = 1.0  # of a save, for which it stops training

    def run(self, until_s: float, tells: bool = True) -> F64:
        """Ticks with the counters and what jobs report; what restarts were expected to take [tick, job]."""
        out = []
        while self.t_s < until_s:
            k = round(self.t_s / TICK_S)
            self.t_s += TICK_S
            events = [self._event(i) for i in np.flatnonzero((self.end <= self.t_s) & ~self.told)]
            self.twin.tick({FLUSH: self.rate[k], RESTORE: 0.0} if tells else None, *events, dt_s=TICK_S)
            out.append(self.twin.engine.memory["checkpoint"]["restart_s"][:N_JOB].copy())
        return np.array(out)

    def _event(self, i: int) -> ev.CheckpointTold:
        self.told[i] = True
        at_ns = self.twin.now_ns + round(TICK_S * NS) - round((self.t_s - self.end[i]) * NS)
        took, job = float(self.end[i] - self.begin[i]), f"j{self.job[i]}"
        if not self.is_save[i]:
            return ev.CheckpointTold(job=job, at_ns=at_ns, restart_s=START_S + took)
        said = {"save_s": took, "block_s": self.block_pu * took, "flush_s": took, "interval_s": EVERY_S}
        return ev.CheckpointTold(job=job, at_ns=at_ns, began_ns=at_ns - round(took * NS), **said)

    def true_restart_s(self, begin_s: float, end_s: float, n: int = 1500) -> float:
        """The mean restart at any time between, beside all that goes on there."""
        near = (self.all_begin > begin_s - 3600.0) & (self.all_begin < end_s)
        begin, work, took = self.all_begin[near], self.all_work[near], []
        for at_s in np.random.default_rng(9).uniform(begin_s, end_s - 1200.0, n):
            some = (begin > at_s - 3600.0) & (begin < at_s + 1200.0)
            end = finish_s(np.append(begin[some], at_s), np.append(work[some], WORK_S))
            took.append(START_S + end[-1] - at_s)
        return float(np.mean(took))


def saving() -> Saving:
    told = {"checkpoint_interval_s": EVERY_S, "checkpoint_save_s": WORK_S, "checkpoint_restart_s": 50.0}
    return Saving(JOBS, told=told, tree=SITE, policy=Checkpoint())


def foreseen_and_true(then: float, now: float, seed: int) -> tuple[float, float]:
    """The mean restart of six hours at the load `now`, as foreseen and as simulated."""
    change_s, end_s = 6 * 3600.0, 16 * 3600.0
    parts = [Others(then, 0.0, change_s), Others(now, change_s, end_s)]
    restarts_s = (1.5 * 3600.0, 3.6 * 3600.0)  # of the first job; the others follow one by one
    storage = Storage(saving(), parts, seed=seed, restarts_s=restarts_s)
    storage.run(change_s + 2 * WINDOW_S)
    begin_s, until_s = storage.t_s, end_s - 2 * EVERY_S
    foreseen, true = float(storage.run(until_s).mean()), storage.true_restart_s(begin_s, until_s)
    print(f"others' load {then} to {now}: {foreseen:.1f} s foreseen, {true:.1f} s (simulated)")
    return foreseen, true


@pytest.mark.long
@pytest.mark.parametrize("then, now", sampled([(0.05, 0.5), (0.2, 0.5), (0.5, 0.1), (0.3, 0.3)], (0.2, 0.5)))
def test_restarts_are_predicted_within_a_tenth_beside_load_that_no_job_tells_of(
    then: float, now: float
) -> None:
    foreseen, true = foreseen_and_true(then, now, round(100 * then + 10 * now))
    assert foreseen == pytest.approx(true, rel=0.10)


@pytest.mark.storm
def test_restarts_beside_others_that_take_most_are_predicted_within_a_tenth() -> None:
    found = np.array([foreseen_and_true(0.2, 0.6, seed) for seed in range(11, 19)])
    assert found[:, 0].mean() == pytest.approx(found[:, 1].mean(), rel=0.05)
    assert np.abs(found[:, 0] / found[:, 1] - 1.0).max() < 0.10


@pytest.mark.storm
def test_saves_that_take_longer_than_by_the_load_foretell_longer_restarts() -> None:
    parts, early_s = [Others(0.3, 0.0, 8 * OBSERVED_S)], [1.5 * OBSERVED_S]
    usual, slow = (Storage(saving(), parts, seed=5, restarts_s=early_s) for _ in "ab")
    late = slow.is_save & (slow.begin > 4 * OBSERVED_S)
    slow.end[late] += 0.5 * (slow.end - slow.begin)[late]
    before, after = (storage.run(4 * OBSERVED_S)[-1].mean() for storage in (usual, slow))
    assert after == before
    before, after = (storage.run(5 * OBSERVED_S)[-1].mean() - START_S for storage in (usual, slow))
    assert 1.15 * before < after < 1.6 * before


def test_a_stretch_fades_and_one_liar_makes_no_other_job_wait_for_ever() -> None:
    kept = {name: np.zeros(2) for name in COLUMNS}
    at = np.zeros(1, np.int64)
    assert stretch_pu(kept).tolist() == [1.0, 1.0]
    for _ in range(20):
        learn_stretch(kept, at, np.array([30.0]), np.array([20.0]))
    assert stretch_pu(kept)[0] == pytest.approx(1.5, abs=0.1)
    assert stretch_pu(kept)[1] == 1.0, "another file system"
    learn_stretch(kept, at, np.array([1e6]), np.array([20.0]))
    assert stretch_pu(kept)[0] < 2.0
    for _ in range(20):
        learn_stretch(kept, at, np.array([1e6]), np.array([20.0]))
    assert stretch_pu(kept)[0] == MOST_STRETCH


def test_a_stretch_is_forgotten_while_nobody_saves() -> None:
    kept = {name: np.zeros(1) for name in COLUMNS}
    learn_stretch(kept, np.zeros(1, np.int64), np.array([30.0]), np.array([20.0]))
    for _ in range(150):  # a few months
        for name in ("took_s", "expected_s", "count"):
            kept[f"traffic_saves_{name}"] *= np.exp(-10.0)
        assert stretch_pu(kept)[0] == pytest.approx(1.0, abs=1e-3)


def test_what_of_a_restart_is_no_read_is_at_most_what_the_quickest_one_leaves() -> None:
    kept, slot = {name: np.zeros(3) for name in JOB_COLUMNS}, np.array([1], np.int32)
    kept["start_s"][:] = 40.0
    assert start_s(kept, slot)[0] == 40.0, "nothing is known"
    for most_s, bound_s in ((60.0, 60.0), (35.0, 35.0), (45.0, 37.0), (20.0, 20.0)):
        bound_start(kept, slot, np.array([most_s]))
        assert kept["start_most_s"].tolist() == [0.0, bound_s, 0.0]
        assert start_s(kept, slot)[0] == min(40.0, bound_s)


def test_saves_that_are_kept_apart_meet_the_more_of_each_other_the_busier_storage_is() -> None:
    assert apart_pu([0.0, 0.5, 1.0]).tolist() == [1.0, 0.75, 0.0]


def test_without_counters_or_before_an_hour_of_them_all_is_as_jobs_tell() -> None:
    blind, young = saving(), saving()
    for twin in (blind, young):
        storage = Storage(twin, [Others(0.6, 0.0, 6 * 3600.0)])
        storage.run(OBSERVED_S - 600.0, tells=twin is young)
    mine = [twin.engine.memory["checkpoint"] for twin in (blind, young)]
    for name in ("restart_s", "interval_s", "slot_ns", "round_s", "save_since_s"):
        assert np.array_equal(mine[0][name], mine[1][name]), name
    assert not any(mine[0][name].any() for name in COLUMNS if name != "traffic_ns")


@pytest.mark.long
def test_what_counters_show_of_others_leaves_less_to_checkpoints_without_any_history() -> None:
    often = []
    for steady in (0.0, 0.9):
        told = {"checkpoint_interval_s": 86_400.0, "checkpoint_save_s": 60.0}
        twin = Saving(JOBS, told=told, tree=SITE, policy=Checkpoint())
        for k in range(80):
            twin.tick({FLUSH: FULL * (1.0 if k < 2 else steady), RESTORE: 0.0}, dt_s=TICK_S)
        twin.says.day = 0.999
        for _ in range(3):
            twin.tick({FLUSH: FULL * steady, RESTORE: 0.0}, dt_s=TICK_S)
        often.append(twin.often("j0"))
    assert often[1] > 1.5 * often[0]


@pytest.mark.long
def test_counters_that_fall_silent_are_forgotten_and_come_back() -> None:
    parts = [Others(0.05, 0.0, 2 * OBSERVED_S), Others(0.7, 2 * OBSERVED_S, 5 * OBSERVED_S)]
    storage = Storage(saving(), parts, seed=4, restarts_s=[1.5 * OBSERVED_S])
    quiet = storage.run(2 * OBSERVED_S)[-1].mean()
    assert storage.run(3 * OBSERVED_S)[-1].mean() > 1.2 * quiet
    assert storage.run(3.2 * OBSERVED_S, tells=False)[-1].mean() < 1.2 * quiet, "as jobs tell"
    assert storage.run(4 * OBSERVED_S)[-1].mean() > 1.2 * quiet


@pytest.mark.long
def test_a_slip_of_a_counter_is_no_bandwidth() -> None:
    twin = saving()
    for k in range(400):
        rate = 90e12 if k == 100 else FULL * (k % 2)
        twin.tick({FLUSH: rate, RESTORE: 0.0}, dt_s=TICK_S)
    traffic = follow_traffic(twin.engine.view(1.0), dict(twin.engine.memory["checkpoint"]))
    assert traffic.write_bytes_per_s[0] == pytest.approx(FULL, rel=0.01)
    assert traffic.busy_pu[0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.long
def test_saves_are_foreseen_to_take_as_long_as_at_the_load_of_now() -> None:
    view_terms = SaveTerms(*(np.array([x]) for x in (60.0, 30.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)))
    nothing: Any = None
    batch = JobBatch(nothing, nothing, nothing, view_terms, *[nothing] * 4, slower=np.array([1.5]))
    assert (batch.terms_now.block_s, batch.terms_now.flush_s, batch.terms_now.restart_s) == (90.0, 45.0, 9.0)
    parts = [Others(0.1, 0.0, 2 * OBSERVED_S), Others(0.7, 2 * OBSERVED_S, 6 * OBSERVED_S)]
    twin = saving()
    storage = Storage(twin, parts, seed=4)
    storage.block_pu = 0.25
    seen: list[float] = []
    made = JobBatch.terms_now.fget
    assert made is not None

    def look(batch: JobBatch) -> SaveTerms:
        seen.append(float(np.median(batch.slower)))
        return made(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobBatch, "terms_now", property(look))
        storage.run(2 * OBSERVED_S)
        before = seen[-1]
        storage.run(4 * OBSERVED_S)
    assert before == pytest.approx(1.0, abs=0.2)
    assert seen[-1] > 1.5 * before


@pytest.mark.long
def test_a_restart_of_the_daemon_changes_nothing() -> None:
    one, other = (Storage(saving(), [Others(0.5, 0.0, 4 * OBSERVED_S)], seed=2) for _ in "ab")
    for storage in (one, other):
        storage.run(1.5 * OBSERVED_S)
    before = other.twin
    other.twin = before.restarted(SITE, list(before.engine.policies), [before.says])
    other.twin.engine.intake.authority = dict(before.engine.intake.authority)
    for storage in (one, other):
        storage.run(2 * OBSERVED_S)
    mine, theirs = (s.twin.engine.memory["checkpoint"] for s in (one, other))
    assert mine["traffic_flush_mean"][0] > 0.2 * FULL
    for name, column in mine.items():
        assert np.array_equal(column, theirs[name]), name


def test_a_time_that_was_measured_beside_nobody_says_most() -> None:
    kept = {name: np.zeros(3) for name in JOB_COLUMNS}
    slot = np.array([1], np.int32)
    learn_time(kept, "alone", slot, np.array([100.0]), np.array([0.8]))
    assert kept["alone_s"].tolist() == [0.0, 100.0, 0.0]
    learn_time(kept, "alone", slot, np.array([60.0]), np.array([0.0]))
    assert 60.0 < kept["alone_s"][1] < 70.0
    for _ in range(30):  # its saves have become larger
        learn_time(kept, "alone", slot, np.array([90.0]), np.array([0.0]))
    assert kept["alone_s"][1] == pytest.approx(90.0, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_others_have_the_rest_of_a_load_and_never_more(busy: float, duty: float) -> None:
    others = float(others_load_pu(busy, duty))
    assert 0.0 <= others <= min(busy, MOST_LOAD_PU)
    assert float(others_load_pu(busy, 0.0)) == pytest.approx(min(busy, MOST_LOAD_PU))
    if 0.0 < others < MOST_LOAD_PU:  # own work, stretched by them, is the duty
        assert (busy - others) / (1.0 - others) == pytest.approx(min(duty, 0.99), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_a_transfer_of_its_own_fades_from_a_load(work_s: float, ago_s: float) -> None:
    part = float(lately_pu(work_s, ago_s))
    assert 0.0 <= part <= min(1.0, work_s / WINDOW_S)
    assert float(lately_pu(work_s, ago_s + 10.0)) <= part


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20)), min_size=1, max_size=12))
def test_counters_of_shared_storage_add_up_to_all_work(transfers: list[tuple[float, float]]) -> None:
    begin, work = np.array(transfers).T
    busy = busy_pu(begin, finish_s(begin, work), np.arange(0.0, 400.0, 7.0))
    assert busy.min() >= -1e-9
    assert busy.max() <= 1.0 + 1e-9
    assert 7.0 * busy.sum() == pytest.approx(work.sum())
