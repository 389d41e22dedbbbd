"""Goodput: time that trained, the member that a job waits for, and quiet where nobody is slow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from twin.catalogue import NS
from twin.contracts import Finding
from twin.goodput import ExpectedEnd, expected_end
from twin.goodput.segments import LARGE, Segments
from twin.telemetry import CheckpointTold, EntityReplaced, JobEnded, JobStarted

CLOCK_HZ, SLOW_GPU = 1.98e9, 9
NODES = tuple(f"lab/h/r1/node{i}" for i in range(8))  # 32 GPUs


def started(event: str = "s1", **more: Any) -> JobStarted:
    """A synchronous job on eight nodes."""
    return JobStarted(id=event, job="train", nodes=NODES, kind="training", coupling="synchronous", **more)


class Pod:
    """A site with one job whose members' tensor activity and clocks are given."""

    def __init__(self, tensor: bool = True) -> None:
        self.twin, self.tensor_read = Twin(two_racks(racks="r1")), tensor
        n = self.twin.site.sizes["gpu"]
        rng = np.random.default_rng(5)
        self.sm, self.clock = np.full(n, 0.9), np.full(n, CLOCK_HZ)
        self.tensor = 0.5 * (1.0 + 0.01 * rng.standard_normal(n))
        self.bits = np.zeros(n)

    def run(self, seconds: float, *events: Any, dt_s: float = 10.0) -> None:
        """Ticks with the values of now."""
        for _ in range(round(seconds / dt_s)):
            values = {
                "gpu.sm_active_pu": self.sm,
                "gpu.sm_clock_hz": self.clock,
                "gpu.clock_event_bits": self.bits,
            }
            if self.tensor_read:
                values["gpu.tensor_active_pu"] = self.tensor
            self.twin.tick(values, *events, dt_s=dt_s)
            events = ()

    def slow(self, gpus: Any, clock_pu: float) -> None:
        """These GPUs have this clock, and the others of the job wait for them."""
        pace = clock_pu / (0.8 + 0.2 * clock_pu)
        waiting = np.ones(len(self.clock), np.bool_)
        waiting[gpus] = False
        self.clock[gpus] *= clock_pu
        self.tensor[waiting] *= pace

    @property
    def findings(self) -> list[Finding]:
        """Findings of stragglers."""
        return [f for f in self.twin.decision.findings if f.id.startswith("job_straggler/")]

    @property
    def goodput(self) -> Any:
        """The state of the engine."""
        return self.twin.engine.goodput


@pytest.mark.long
def test_a_gpu_that_the_others_wait_for_is_named_with_its_cost() -> None:
    pod = Pod()
    pod.run(600, started())
    assert pod.findings == []
    pod.slow(SLOW_GPU, 0.8)
    pod.bits[SLOW_GPU] = 0x40
    pod.run(200)
    assert pod.findings == []  # not before it has lasted
    pod.run(900)
    (finding,) = pod.findings
    name = pod.twin.site.name("gpu", SLOW_GPU)
    assert (finding.id, finding.severity) == ("job_straggler/train", "warning")
    assert finding.entities == (name, "job:train")
    said = " ".join(finding.evidence)
    assert name in said
    assert "heat (hardware)" in said
    assert "1584 MHz" in said
    slot = pod.twin.engine.jobs.slot_of["train"]
    held = pod.goodput.held_back(slot, pod.twin.engine.state, pod.twin.engine.jobs)
    assert held.slowdown == pytest.approx(1.20, abs=0.04)  # 0.8 / 0.8 + 0.2
    named_s = (pod.twin.now_ns - held.since_ns) / NS - 300.0
    assert held.cost_gpu_h == pytest.approx((1 - 1 / held.slowdown) * 32 * named_s / 3600, rel=0.1)
    pod.clock[:], pod.tensor[:] = CLOCK_HZ, 0.5
    pod.run(900)
    assert pod.findings == []


@pytest.mark.long
def test_a_slow_node_is_named_as_a_node() -> None:
    pod = Pod()
    pod.run(300, started())
    pod.slow([8, 9, 10, 11], 0.7)
    pod.run(900)
    (finding,) = pod.findings
    assert finding.entities[0] == "lab/h/r1/node2"
    assert finding.count == 4


def test_a_low_clock_that_nobody_waits_for_is_no_straggler() -> None:
    pod = Pod()
    pod.run(300, started())
    pod.clock[SLOW_GPU] *= 0.7  # and all are as busy as ever: the job waits for memory or data
    pod.run(700)
    assert pod.findings == []


def test_without_tensor_readings_the_clock_alone_names() -> None:
    pod = Pod(tensor=False)
    pod.run(300, started())
    pod.slow(SLOW_GPU, 0.8)
    pod.run(700)
    assert pod.findings[0].entities[0] == pod.twin.site.name("gpu", SLOW_GPU)


def test_members_that_differ_by_their_nature_are_quiet() -> None:
    pod = Pod()
    pod.tensor *= np.exp(0.05 * np.random.default_rng(2).standard_normal(len(pod.tensor)))
    pod.clock *= np.exp(0.03 * np.random.default_rng(3).standard_normal(len(pod.tensor)))
    pod.run(1000, started())
    assert pod.findings == []


def test_independent_work_and_gpus_of_no_job_are_left_alone() -> None:
    pod = Pod()
    event = JobStarted(id="i", job="serve", nodes=NODES, kind="inference", coupling="independent")
    pod.run(300, event)
    pod.slow(SLOW_GPU, 0.5)
    pod.run(700)
    assert pod.findings == []
    assert not pod.goodput.since_ns.any()


@pytest.mark.long
def test_time_is_trained_still_or_lost_and_adds_up() -> None:
    pod = Pod()
    pod.run(1200, started())
    slot, goodput = pod.twin.engine.jobs.slot_of["train"], pod.goodput
    pod.sm *= 0.05  # a save
    pod.run(300)
    pod.sm /= 0.05
    assert goodput.trained_s[slot] == pytest.approx(1200, abs=25)
    assert goodput.still_s[slot] == pytest.approx(300, abs=25)
    assert goodput.goodput_pu(slot) == pytest.approx(0.8, abs=0.02)
    now_ns = pod.twin.now_ns
    saved = CheckpointTold(id="c", job="train", at_ns=now_ns, began_ns=now_ns - 300 * NS, save_s=300.0)
    pod.run(10, saved)
    pod.run(400)
    before_s = goodput.trained_s[slot] + goodput.still_s[slot]
    pod.run(10, started("s2"))  # the same job again: what it trained since that save is lost
    assert goodput.restarts[slot] == 1
    assert goodput.lost_s[slot] == pytest.approx(410, abs=25)
    after_s = goodput.trained_s[slot] + goodput.still_s[slot] + goodput.lost_s[slot]
    assert after_s == pytest.approx(before_s + 10, abs=11)


def test_what_a_restart_costs_a_job_that_reports_no_saves_is_not_known() -> None:
    pod = Pod()
    pod.run(300, started())
    slot, goodput = pod.twin.engine.jobs.slot_of["train"], pod.goodput
    before_s = goodput.trained_s[slot]
    assert goodput.goodput_pu(slot) == pytest.approx(1.0, abs=0.1)
    pod.run(20, started("s2"))
    assert goodput.restarts[slot] == 1
    assert goodput.lost_s[slot] == 0.0
    assert goodput.trained_s[slot] >= before_s
    assert goodput.goodput_pu(slot) is None


def end_of(pod: Pod) -> ExpectedEnd | None:
    engine = pod.twin.engine
    return expected_end(engine.state, engine.jobs, engine.goodput, engine.jobs.slot_of["train"])


def told(pod: Pod, remaining_s: float) -> CheckpointTold:
    """A report of a job on what training is left."""
    return CheckpointTold(
        id=f"r{pod.twin.now_ns}", job="train", at_ns=pod.twin.now_ns, remaining_s=remaining_s
    )


@pytest.mark.long
def test_the_end_is_by_progress_where_the_job_tells_it_and_else_by_its_limit() -> None:
    pod = Pod()
    pod.run(900, started(time_limit_s=36_000.0))
    limit_ns = int(pod.twin.engine.jobs.started_ns[pod.twin.engine.jobs.slot_of["train"]]) + 36_000 * NS
    assert end_of(pod) == ExpectedEnd(limit_ns, "time_limit")
    pod.run(10, told(pod, 3600.0))
    end = end_of(pod)
    assert end is not None
    assert end.by == "progress"
    assert (end.at_ns - pod.twin.now_ns) / NS == pytest.approx(3600.0, abs=15.0)
    pod.sm *= 0.05
    pod.run(900)  # it stood still for half of the time: what is left takes twice as long
    pod.sm /= 0.05
    pod.run(10, told(pod, 3600.0))
    end = end_of(pod)
    assert end is not None
    assert (end.at_ns - pod.twin.now_ns) / NS == pytest.approx(7200.0, rel=0.05)
    pod.run(10, told(pod, 36_000.0))
    assert end_of(pod) == ExpectedEnd(limit_ns, "time_limit"), "which ends it first"
    pod.run(10, told(pod, 3600.0))
    pod.run(6000)  # it has not spoken for long
    assert end_of(pod) == ExpectedEnd(limit_ns, "time_limit")
    began_ns = limit_ns - 40_000 * NS
    pod.run(10, started("again", time_limit_s=36_000.0, started_ns=began_ns))
    assert end_of(pod) == ExpectedEnd(began_ns + 36_000 * NS, "time_limit"), "as its scheduler counts"


def test_a_job_without_limit_and_progress_has_no_end() -> None:
    pod = Pod()
    pod.run(900, started())
    assert end_of(pod) is None
    pod.run(10, told(pod, 5.0))
    pod.run(100)
    end = end_of(pod)
    assert end == ExpectedEnd(pod.twin.now_ns, "progress"), "it is due now, and not in the past"


def test_a_limit_that_has_passed_is_no_end() -> None:
    """Slurm lets a job run on that was suspended, or under OverTimeLimit."""
    pod = Pod()
    pod.run(900, started(time_limit_s=600.0))
    assert end_of(pod) is None
    pod.run(10, told(pod, 3600.0))
    end = end_of(pod)
    assert end is not None
    assert end.by == "progress"


@pytest.mark.long
def test_what_nobody_hears_counts_for_nothing() -> None:
    pod = Pod()
    pod.run(600, started())
    slot = pod.twin.engine.jobs.slot_of["train"]
    watched_s = pod.goodput.trained_s[slot]
    for _ in range(40):
        pod.twin.tick(dt_s=10.0)
    late_s = pod.goodput.trained_s[slot] - watched_s + pod.goodput.still_s[slot]
    assert late_s < 120.0  # until the readings are stale


@pytest.mark.long
def test_a_straggler_that_is_no_longer_heard_is_not_told_on() -> None:
    pod = Pod()
    pod.run(600, started())
    pod.slow(SLOW_GPU, 0.8)
    pod.run(1200)
    assert len(pod.findings) == 1
    for _ in range(60):
        pod.twin.tick(dt_s=10.0)
    assert pod.findings == []


@pytest.mark.long
def test_a_new_job_in_the_slot_begins_anew() -> None:
    pod = Pod()
    pod.run(300, started())
    pod.slow(SLOW_GPU, 0.8)
    pod.run(900)
    assert pod.findings
    pod.run(10, JobEnded(id="e", job="train"))
    assert pod.findings == []
    assert pod.goodput.slowdown.max() == 1.0
    event = JobStarted(id="n", job="next", nodes=NODES, kind="training", coupling="synchronous")
    pod.run(40, event)
    assert not pod.goodput.since_ns.any()
    assert pod.goodput.trained_s[pod.twin.engine.jobs.slot_of["next"]] <= 40.0


@pytest.mark.long
def test_a_restart_of_the_twin_goes_on_and_a_replaced_gpu_begins_anew() -> None:
    pod = Pod()
    pod.run(300, started())
    pod.slow(SLOW_GPU, 0.8)
    pod.run(900)
    again = pod.twin.restarted(two_racks(racks="r1"), ())
    assert again.engine.checksum() == pod.twin.engine.checksum()
    values = {"gpu.sm_active_pu": pod.sm, "gpu.sm_clock_hz": pod.clock, "gpu.tensor_active_pu": pod.tensor}
    one, other = (t.tick(values, dt_s=10.0) for t in (pod.twin, again))
    assert [f.id for f in one.findings] == [f.id for f in other.findings]
    assert again.engine.checksum() == pod.twin.engine.checksum()
    name = pod.twin.site.name("gpu", SLOW_GPU)
    pod.run(10, EntityReplaced(id="r", table="gpu", name=name, serial=""))
    assert pod.goodput.since_ns[SLOW_GPU] == 0


def test_medians_of_segments_are_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    sizes = np.append(rng.integers(0, 60, 20), [LARGE + 3, 0, LARGE, LARGE + 8, 5])
    of = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    values = rng.lognormal(0.0, 5.0, len(of)).astype(np.float32)
    values[rng.random(len(of)) < 0.2] = np.nan
    values[(of == 7) | (of == 22)] = np.nan
    parts = Segments.made(of, 26)
    got = parts.medians(values)
    for i in range(26):
        some = values[(of == i) & np.isfinite(values)].astype(np.float64)
        assert np.isnan(got[i]) if not len(some) else got[i] == pytest.approx(np.median(some), rel=1e-6)
    assert parts.counts(np.isfinite(values)).sum() == np.isfinite(values).sum()


def test_a_limit_that_no_job_lives_to_see_is_none() -> None:
    pod = Pod()
    pod.run(900, started(time_limit_s=1e300))
    assert end_of(pod) is None
    pod.run(10, told(pod, 3600.0))
    end = end_of(pod)
    assert end is not None
    assert end.by == "progress"
