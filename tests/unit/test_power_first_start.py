"""power_cap at a first start: sources appear one after another, and what was never heard is no reason to cut
while meters show that power is within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard
from policies.power_capping.unreported import LEARNING_S, _depth
from tests.support.builders import Twin, explained, site_of, two_racks
from tests.support.powered_plant import CAP
from tests.support.sampled_cases import sampled
from twin.catalogue import NS
from twin.telemetry import Block

GPUS, PER_NODE, NODES = 72, 4, 18
SCRAPE_S = 15
LOSS_PU = 0.164  # of its GPUs, as the profile says
BESIDE_W = 15_000.0
CAPPED_W = 5.0  # below its most


class Pod:
    """A rack of 72 GPUs that draw `draws_w` each, below one feeder. Each node is scraped on its own."""

    def __init__(self, budget_w: float, draws_w: float, act: bool = True) -> None:
        tree = two_racks(racks="r1")
        hall = tree["halls"][0]
        hall["feeders"] = [dict(hall["feeders"][0], budget_w=budget_w)]
        self.twin = Twin(tree, [PowerGuard(), PowerCap()], act=act)
        self.most_w = self.twin.site.envelopes[CAP].high
        self.draws_w, self.cap_w = np.full(GPUS, draws_w), self.most_w.copy()
        self.first_s = np.random.default_rng(3).uniform(2.0, 58.0, NODES)  # of each node's exporter
        self.feeder_s, self.rack_s, self.second = 0.0, 40.0, 0
        self.mute = np.zeros(NODES, np.bool_)
        self.advised: list[tuple[int, float, str]] = []

    @property
    def rack_w(self) -> float:
        return float(np.minimum(self.draws_w, self.cap_w).sum()) * (1.0 + LOSS_PU) + BESIDE_W

    def run(self, seconds: int) -> Pod:
        for _ in range(seconds):
            self.second += 1
            self._scrape()
            meters = {"feeder.power_w": self.feeder_s, "rack.power_w": self.rack_s}
            self.twin.tick({key: self.rack_w for key, at in meters.items() if self.second >= at})
            for policy in self.twin.engine.in_force.values():
                self.advised += [
                    (self.second, float(p.hi.min()), p.reason)
                    for p in policy
                    if (p.hi < self.most_w[p.index] - CAPPED_W).any()
                ]
            for batch in self.twin.commands(CAP):
                self.cap_w[batch.index] = batch.value
        return self

    def _scrape(self) -> None:
        now_ns = self.twin.now_ns + NS
        since_s = self.second - np.ceil(self.first_s)
        power_w = np.minimum(self.draws_w, self.cap_w)
        for node in np.flatnonzero((since_s >= 0) & (since_s % SCRAPE_S == 0) & ~self.mute).tolist():
            mine = slice(PER_NODE * node, PER_NODE * (node + 1))
            values = np.stack([power_w[mine], self.cap_w[mine]]).astype(np.float32)
            counts = np.empty((0, PER_NODE), np.int64)
            block = Block("gpu", mine.start, ("power_w", "power_limit_w"), values, (), counts, now_ns)
            self.twin.inbox.put_block(block, now_ns)


@pytest.mark.long
@pytest.mark.parametrize("act", sampled([True, False], True))
@pytest.mark.parametrize(
    ("feeder_s", "rack_s"), sampled([(0, 40), (0, 0), (20, 55), (50, 0)], (0, 40), (50, 0))
)
def test_sources_that_appear_one_after_another_are_no_reason_to_cut(
    act: bool, feeder_s: float, rack_s: float
) -> None:
    """The meters show 40 % of headroom all the time."""
    pod = Pod(120_000.0, 670.0, act)
    pod.feeder_s, pod.rack_s = feeder_s, rack_s
    assert pod.rack_w <= 0.6 * 120_000.0
    pod.run(200)
    assert pod.advised == []
    assert np.isnan(pod.twin.lease(CAP)).all()


@pytest.mark.long
def test_an_overload_is_cut_while_most_gpus_were_never_heard() -> None:
    pod = Pod(80_000.0, 1150.0).run(12)
    assert (pod.first_s < 12).sum() < NODES / 2
    assert pod.rack_w <= 80_000.0
    pod.run(300)
    assert 0.7 * 80_000.0 <= pod.rack_w <= 80_000.0  # the guard eases as the breaker cools down


def test_a_demand_that_no_longer_fits_is_cut_while_gpus_are_waited_for() -> None:
    """At 97 % of the budget the guard is calm; the look ahead counts a reserve for all, heard or not."""
    pod = Pod(100_000.0, (97_000.0 - BESIDE_W) / (1.0 + LOSS_PU) / GPUS)
    pod.rack_s = 0
    pod.run(12)
    why = " GPUs have never reported and count with the power that the meters above them leave"
    assert any(reason.endswith(why) for _, _, reason in pod.advised)
    assert min(cap_w for _, cap_w, _ in pod.advised) > 0.9 * pod.draws_w[0]


@pytest.mark.long
def test_what_speaks_no_more_may_draw_its_most_as_ever() -> None:
    pod = Pod(100_000.0, 800.0).run(200)
    assert not any(reason.startswith("the demand") for _, _, reason in pod.advised)
    pod.mute[:12] = True
    pod.run(300)
    assert any(reason.startswith("the demand") for _, _, reason in pod.advised)
    assert np.nanmin(pod.cap_w) < 1000.0


@pytest.mark.parametrize("heard", [1, 9])
def test_without_a_meter_all_are_waited_for_and_then_count_with_their_most(heard: int) -> None:
    pod = Pod(80_000.0, 500.0)
    pod.feeder_s = pod.rack_s = np.inf
    pod.first_s[:], pod.mute[heard:] = 5.0, True
    pod.run(round(LEARNING_S))
    assert pod.advised == []
    pod.run(20)
    never = GPUS - PER_NODE * heard
    why = "have never reported and count with their maximum, as no meter above them reports"
    assert all(reason.endswith(f"; {never} of its 72 GPUs {why}") for _, _, reason in pod.advised)
    assert len(np.flatnonzero(np.isfinite(pod.twin.lease(CAP)))) == GPUS


@pytest.mark.long
def test_the_period_of_the_site_file_makes_the_learning_time_longer() -> None:
    pod = Pod(80_000.0, 500.0)
    pod.twin.site.file.periods_s["gpu"] = 60.0
    pod.feeder_s = pod.rack_s = np.inf
    pod.first_s[:], pod.mute[9:] = 5.0, True
    pod.run(299)
    assert pod.advised == []
    pod.run(20)
    assert pod.advised


@pytest.mark.long
def test_a_meter_that_falls_silent_bounds_nobody_for_long() -> None:
    pod = Pod(80_000.0, 500.0)
    pod.mute[9:], pod.first_s[:], pod.rack_s = True, 2.0, np.inf
    pod.run(100)
    before = len(pod.advised)
    caps_w = [cap_w for _, cap_w, _ in pod.advised]
    assert min(caps_w, default=1200.0) > 600.0
    pod.feeder_s = np.inf
    pod.run(600)
    assert min(cap_w for _, cap_w, _ in pod.advised[before:]) < min(caps_w, default=1200.0)


def test_who_speaks_first_brings_no_peak_along() -> None:
    """Half of the GPUs idle, the others work: while all are unheard nobody knows which."""
    pod = Pod(120_000.0, 500.0)
    pod.draws_w[:36], pod.draws_w[36:] = 150.0, 1000.0
    pod.run(100)
    peak_w = pod.twin.engine.memory["power_cap"]["peak_w"]
    assert peak_w[:36].max() < 160.0


def test_people_are_told_how_unheard_gpus_count() -> None:
    pod = Pod(120_000.0, 670.0).run(12)
    text = " ".join(s.text for s in explained(pod.twin, "power_cap").sentences)
    assert f"{(pod.first_s > 12).sum() * PER_NODE} of 72 GPUs have never reported" in text


def test_meters_are_asked_from_the_lowest_feeder_up() -> None:
    tree = two_racks()
    tree["halls"][0]["feeders"] = [
        {"name": "ups", "side": "A", "serves": ["panel"]},
        {"name": "panel", "side": "A", "serves": ["a[1-2]"]},
        {"name": "a[1-2]", "side": "A", "serves": ["r[1-2]"]},
        {"name": "b", "side": "B", "serves": ["r[1-2]"]},
    ]
    site = site_of(tree)
    names = [site.name("feeder", i).rpartition("/")[2] for i in range(site.sizes["feeder"])]
    assert dict(zip(names, _depth(site).tolist(), strict=True)) == {
        "ups": 0, "panel": 1, "a1": 2, "a2": 2, "b": 0
    }  # fmt: skip
