"""The link that all members of a job wait for: named by both ends, and not where it is only noisy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin
from tests.support.straggler_trial import pod_tree
from twin.contracts import Finding
from twin.telemetry import Block, JobEnded, JobStarted, NvlinksCounted

NODES = tuple(f"lab/h/r1/node{i}" for i in range(8))  # 32 GPUs and ports
PORT, PORT_NAME = 9, "lab/h/r1/node2/rail1"
LINKS, NVLINKS = ("error_count", "flap_count"), ("nvlink_error_count", "nvlink_recovery_count")


class Pod:
    """A site with one job, whose members' activity and links are given."""

    def __init__(self) -> None:
        self.twin = Twin(pod_tree("r1"))
        n = self.twin.site.sizes
        rng = np.random.default_rng(5)
        self.tensor = 0.5 * (1.0 + 0.01 * rng.standard_normal(n["gpu"]))
        self.clock = np.full(n["gpu"], 1.98e9)
        self.rx = np.full(n["link"], 3e10)
        self.counts = {"link": np.zeros((2, n["link"]), np.int64), "gpu": np.zeros((2, n["gpu"]), np.int64)}
        self.grows = {table: np.zeros(counts.shape, np.int64) for table, counts in self.counts.items()}
        start = JobStarted(id="s", job="train", nodes=NODES, kind="training", coupling="synchronous")
        self.run(900, start)

    def run(self, seconds: float, *events: Any) -> None:
        """Ticks of ten seconds with the values of now."""
        for _ in range(round(seconds / 10)):
            self.tick(self.twin, *events)
            events = ()

    def tick(self, twin: Twin, *events: Any) -> None:
        """One tick of a twin, which may be another."""
        at_ns = twin.now_ns + 10 * 10**9
        if twin is self.twin:
            for table, grown in self.grows.items():
                self.counts[table] += grown
        for table, names in (("link", LINKS), ("gpu", NVLINKS)):
            none = np.empty((0, self.counts[table].shape[1]), np.float32)
            block = Block(table, 0, (), none, names, self.counts[table].copy(), at_ns)
            twin.inbox.put_block(block, at_ns)
        values = {"gpu.sm_active_pu": 0.9, "gpu.tensor_active_pu": self.tensor,
                  "gpu.sm_clock_hz": self.clock, "link.rx_bytes_per_s": self.rx}  # fmt: skip
        twin.tick(values, *events, dt_s=10.0)

    @property
    def findings(self) -> list[Finding]:
        """Findings of stragglers."""
        return [f for f in self.twin.decision.findings if f.id.startswith("job_straggler/")]


@pytest.mark.long
def test_a_port_that_errs_while_all_wait_is_named_by_both_ends_with_its_cost() -> None:
    pod = Pod()
    assert pod.findings == []
    pod.tensor /= 1.25
    pod.grows["link"][0, PORT] = 500
    pod.run(900)
    (finding,) = pod.findings
    assert (
        finding.title
        == f"{PORT_NAME} to one of the 4 switches from lab/h/leaf1 to lab/h/leaf4 holds job:train back"
    )
    assert finding.entities == (PORT_NAME, "job:train")
    assert "errors in about ten minutes, and no other link of the job shows this" in finding.evidence[1]
    engine = pod.twin.engine
    held = engine.goodput.held_back(engine.jobs.slot_of["train"], engine.state, engine.jobs)
    assert held is not None
    assert (held.table, held.gpus) == ("link", ())
    assert held.slowdown == pytest.approx(1.25, abs=0.03)
    assert 0.0 < held.cost_gpu_h < 0.2 * 32 * 0.25
    pod.tensor *= 1.25
    pod.grows["link"][:] = 0
    pod.run(900)
    assert pod.findings == []


@pytest.mark.long
def test_an_nvlink_is_named_by_its_number_and_chip() -> None:
    pod = Pod()
    pod.tensor /= 1.2
    pod.grows["gpu"][1, 13] = 1
    told = NvlinksCounted(id="n", name="lab/h/r1/node3", read=(18,) * 4, gpu=(1,), link=(7,), recoveries=(5,))
    pod.run(900, told)
    (finding,) = pod.findings
    assert finding.title.startswith("lab/h/r1/node3/gpu1/nvlink7 to switch chip 7 of ")
    assert finding.entities[0] == "lab/h/r1/node3/gpu1"


@pytest.mark.long
def test_a_port_that_carries_less_than_its_peers_is_named() -> None:
    pod = Pod()
    pod.tensor /= 1.2
    pod.rx[PORT] *= 0.4
    pod.run(900)
    assert pod.findings[0].entities[0] == PORT_NAME
    assert "it carries 40 % of the traffic of its peers" in pod.findings[0].evidence[1]


@pytest.mark.long
def test_a_link_that_erred_before_is_no_reason_and_slowness_without_a_sign_names_nobody() -> None:
    pod = Pod()
    pod.grows["link"][0, PORT] = 500
    pod.run(2400)
    assert pod.findings == [], "nobody waits for it"
    pod.tensor /= 1.25
    pod.run(900)
    assert pod.findings == [], "it errs as ever"


@pytest.mark.long
def test_several_links_with_the_same_sign_name_none_of_them() -> None:
    pod = Pod()
    pod.tensor /= 1.25
    pod.grows["link"][0, [PORT, PORT + 4]] = 500
    pod.run(900)
    assert pod.findings == []


@pytest.mark.long
def test_a_slow_gpu_is_named_and_not_a_link_where_its_clock_says_why() -> None:
    pod = Pod()
    others = np.arange(len(pod.tensor)) != PORT
    pod.tensor[others] /= 1.25
    pod.clock[PORT] *= 0.75
    pod.grows["gpu"][0, PORT] = 500
    pod.run(900)
    assert pod.findings[0].title.startswith("lab/h/r1/node2/gpu1 holds")
    pod.clock[PORT] /= 0.75  # now only its link is left to say why
    pod.run(1500)
    assert "an NVLink of lab/h/r1/node2/gpu1 (which one is not known)" in pod.findings[0].title


@pytest.mark.long
def test_a_restart_goes_on_and_a_new_job_begins_anew() -> None:
    pod = Pod()
    pod.tensor /= 1.25
    pod.grows["link"][0, PORT] = 500
    pod.run(700)
    assert pod.findings
    pod.grows["link"][:] = 0  # an inbox that is new knows no growth yet
    pod.run(10)
    again = pod.twin.restarted(pod_tree("r1"), ())
    assert again.engine.checksum() == pod.twin.engine.checksum()
    pod.tick(pod.twin)
    pod.tick(again)
    assert again.engine.checksum() == pod.twin.engine.checksum()
    assert [f.title for f in again.decision.findings] == [f.title for f in pod.twin.decision.findings]
    pod.run(10, JobEnded(id="e", job="train"))
    assert pod.findings == []
    goodput = pod.twin.engine.goodput
    assert (goodput.slow_links, goodput.signs, float(goodput.slowdown.max())) == ({}, {}, 1.0)


@pytest.mark.long
def test_a_changed_site_accuses_the_same_link_and_forgets_one_that_left() -> None:
    pod = Pod()
    pod.grows["link"][0, PORT + 4] = 60  # it is noisy ever, which is noted
    pod.run(1300)
    pod.tensor /= 1.25
    pod.grows["link"][0, PORT] = 500
    pod.run(700)
    goodput, slot = pod.twin.engine.goodput, pod.twin.engine.jobs.slot_of["train"]
    assert goodput.slow_links[slot][:3] == ["link", PORT, 2]
    assert goodput.signs[slot][1]
    n = {t: np.arange(k, dtype=np.int32) for t, k in pod.twin.site.sizes.items()}
    without_first = n | {"link": n["link"][4:], "gpu": n["gpu"][4:], "node": n["node"][1:]}
    moved = goodput.remapped(pod.twin.site, without_first)
    assert moved.slow_links[slot][:3] == ["link", PORT - 4, 1]
    assert moved.slow_links[slot][3:] == goodput.slow_links[slot][3:]
    assert [row[1] for row in moved.signs[slot][1]] == [row[1] - 4 for row in goodput.signs[slot][1]]
    left = goodput.remapped(pod.twin.site, n | {"link": n["link"][PORT + 1 :]})
    assert left.slow_links == {}


@pytest.mark.long
def test_a_link_that_carries_less_as_ever_is_no_reason() -> None:
    pod = Pod()
    pod.rx[PORT] *= 0.4  # a stage of the pipeline that receives less
    pod.run(2400)
    again = pod.twin.restarted(pod_tree("r1"), ())
    assert again.engine.goodput.signs == pod.twin.engine.goodput.signs
    pod.tensor /= 1.25
    pod.run(900)
    assert pod.findings == []
    pod.rx[PORT] *= 0.25  # and now much less than it did
    pod.run(60)
    assert [f.entities[0] for f in pod.findings] == [PORT_NAME]
