"""Sites whose GPUs take no caps: nodes stand in for them, through their BMCs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, gain_of
from policies.power_capping.budgets import by_node
from policies.power_capping.nodes import NODE_CONTROL, nodes_of
from policies.power_capping.power_cap import MARGIN_PU
from policies.power_capping.unreported import LEARNING_PERIODS, LEARNING_S, learning_s
from tests.support.builders import Twin
from tests.unit.test_power_cap import job, site
from tests.unit.test_power_cap_odd import of_racks
from twin.site import Site
from twin.telemetry import Event

CAP = "gpu.power_cap_w"
SWITCHES_W = 8_000.0  # of a rack beside its nodes


def without_gpu_caps(site: Site, racks: list[int]) -> None:
    """As if a BMC were all there is in these racks."""
    found = site.envelopes[CAP]
    inside = np.isin(site.rack_of_gpu, racks)
    columns = {f.name: getattr(found, f.name) for f in fields(found)}
    for name in ("low", "high", "safe"):
        columns[name] = np.where(inside, np.nan, columns[name])
    site.envelopes[CAP] = replace(found, **columns)


class BmcLoop:
    """Nodes draw what they want up to their caps; those of `racks` tell no more than their own power."""

    def __init__(self, tree: dict[str, Any], racks: list[int], **settings: Any) -> None:
        self.twin = Twin(tree, [PowerCap(**settings)], act=True)
        self.site = self.twin.site
        without_gpu_caps(self.site, racks)
        self.bmc = np.isin(self.site.rack_of_node, racks)
        n_node, n_gpu = self.site.sizes["node"], self.site.sizes["gpu"]
        self.wants_w, self.node_cap_w, self.gpu_cap_w = (
            np.full(n_node, 5000.0),
            np.full(n_node, 6667.0),
            np.full(n_gpu, 1200.0),
        )
        self.gpu_want_w = np.full(n_gpu, 1200.0)

    @property
    def node_w(self) -> np.ndarray:
        return np.where(self.bmc, np.minimum(self.wants_w, self.node_cap_w), 0.0)

    @property
    def gpu_w(self) -> np.ndarray:
        return np.where(self.bmc[self.site.node_of_gpu], 0.0, np.minimum(self.gpu_want_w, self.gpu_cap_w))

    @property
    def rack_w(self) -> np.ndarray:
        of_gpus = 1.05 * self.site.sum_by_rack("gpu", self.gpu_w)
        return self.site.sum_by_rack("node", self.node_w) + of_gpus + SWITCHES_W

    def run(self, seconds: int, *events: Event, node_silent: bool = False, rack_silent: bool = False) -> None:
        for _ in range(seconds // 5):
            hidden = np.where(self.bmc[self.site.node_of_gpu], np.nan, 1.0)
            heard = {CAP.replace("cap", "limit"): self.gpu_cap_w * hidden, "gpu.power_w": self.gpu_w * hidden}
            if not rack_silent:
                heard["rack.power_w"] = self.rack_w
            if not node_silent:
                heard["node.power_w"] = np.where(self.bmc, self.node_w, np.nan)
                heard["node.power_cap_readback_w"] = self.node_cap_w
            self.twin.tick(heard, *events, dt_s=5.0)
            events = ()
            for control, column in ((NODE_CONTROL, self.node_cap_w), (CAP, self.gpu_cap_w)):
                for batch in self.twin.commands(control):
                    column[batch.index] = batch.value


def test_a_site_of_bmcs_is_kept_within_its_budget() -> None:
    loop = BmcLoop(site(150_000, 150_000), [0, 1])
    loop.run(120)
    assert np.isnan(loop.twin.lease(CAP)).all()
    assert np.isfinite(loop.twin.lease(NODE_CONTROL)).all()
    assert 0.93 * 150_000 <= loop.rack_w.sum() <= (1 - MARGIN_PU) * 150_000 + 36 * 10.0


def test_nodes_and_gpus_side_by_side() -> None:
    loop = BmcLoop(site(150_000, 150_000), [1])
    loop.run(150)
    assert np.isfinite(loop.twin.lease(CAP)[:72]).all()
    assert np.isnan(loop.twin.lease(CAP)[72:]).all()
    assert np.isfinite(loop.twin.lease(NODE_CONTROL)[18:]).all()
    assert np.isnan(loop.twin.lease(NODE_CONTROL)[:18]).all()
    assert 0.9 * 150_000 <= loop.rack_w.sum() <= (1 - MARGIN_PU) * 150_000 + 18 * 10.0 + 72 * 5.0


def test_classes_and_jobs_hold_for_nodes_as_well() -> None:
    loop = BmcLoop(site(150_000, 150_000), [0, 1], high_priority=5)
    loop.run(150, job("low", range(0, 18)), job("high", range(18, 36), priority=9))
    assert loop.node_w[18:].min() == 5000.0
    assert np.ptp(loop.node_cap_w[:18]) <= 10.0
    assert loop.node_w[0] < 3000.0


@pytest.mark.long
def test_nodes_that_fell_silent_count_with_all_that_they_may_draw() -> None:
    loop = BmcLoop(site(150_000, 150_000), [0, 1])
    loop.wants_w[:] = 2000.0
    loop.run(60)
    assert loop.rack_w.sum() < 100_000
    loop.run(600, node_silent=True, rack_silent=True)
    loop.wants_w[:] = 6000.0
    assert loop.rack_w.sum() <= 150_000


def test_nodes_that_were_never_heard_are_no_reason_to_cut_while_meters_bound_them() -> None:
    """Half of the nodes speak, and the racks read what all draw; then the demand of all no longer fits."""
    loop = BmcLoop(site(150_000, 150_000), [0, 1])
    speaks = np.where(np.arange(36) % 2 == 0, 1.0, np.nan)
    for watts, cuts in ((2500.0, False), (4500.0, True)):
        for _ in range(12):
            heard = {"node.power_w": watts * speaks, "node.power_cap_readback_w": 6667.0 * speaks}
            loop.twin.tick({"rack.power_w": 18 * watts + SWITCHES_W} | heard, dt_s=5.0)
        leases = loop.twin.lease(NODE_CONTROL)
        assert np.isfinite(leases[np.isfinite(speaks)]).any() == cuts


def test_nothing_is_capped_while_all_fits_and_what_was_found_comes_back() -> None:
    loop = BmcLoop(site(300_000, 300_000), [0, 1])
    loop.run(60)
    assert np.isnan(loop.twin.lease(NODE_CONTROL)).all()
    loop = BmcLoop(site(150_000, 150_000), [0, 1])
    loop.node_cap_w[:] = 6000.0
    loop.run(60)
    assert loop.node_cap_w.max() < 4500.0
    loop.twin.engine.intake.budget_w = lambda site, _: np.full(2, 300_000.0)  # type: ignore[method-assign]
    loop.run(300)
    assert (loop.node_cap_w == 6000.0).all()
    assert np.isnan(loop.twin.lease(NODE_CONTROL)).all()


def test_which_nodes_stand_in() -> None:
    racks = [{"name": "r1", "profile": "gb200-nvl72"}, {"name": "r2", "nodes": 3, "gpus_per_node": 4},
             {"name": "r3", "profile": "gb200-nvl72", "nodes": 2, "gpus_per_node": 4}]  # fmt: skip
    twin = Twin(of_racks(racks))
    assert not by_node(twin.site).any()
    assert not len(nodes_of(twin.site).node)
    without_gpu_caps(twin.site, [2])
    assert by_node(twin.site).tolist() == [False, False, True]
    found = nodes_of(twin.site)
    assert found.node.tolist() == [21, 22]
    assert found.gpu.tolist() == [84, 88]
    assert np.flatnonzero(found.inside).tolist() == list(range(84, 92))
    assert gain_of(twin.site)[2] == 1.0
    assert gain_of(twin.site)[0] == pytest.approx(1.0 + twin.site.design.node_loss_pu[0])


def test_nodes_that_stand_in_are_waited_for_by_their_own_period() -> None:
    twin = Twin(of_racks([{"name": "r1", "profile": "gb200-nvl72"}]))
    twin.site.file.periods_s["node.power_w"] = 60.0
    assert learning_s(twin.site) == LEARNING_S, "each GPU speaks for itself"
    without_gpu_caps(twin.site, [0])
    assert learning_s(twin.site) == LEARNING_PERIODS * 60.0
