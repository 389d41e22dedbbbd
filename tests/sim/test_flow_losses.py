"""Coolant that stops at full load: no GPU shuts itself down, and no node goes off where none is in danger."""

from __future__ import annotations

import pytest

from tests.support.flow_loss_run import CAP, live_through, run_losses
from tests.support.flow_losses import KINDS, FlowLoss, at_most_pu, losses_of
from tests.support.sampled_cases import sampled
from twin.catalogue import F64
from twin.plant import Disturbance

pytestmark = [pytest.mark.slow, pytest.mark.long]


def _progress(done: float, what: str) -> None:
    """Nobody looks on."""


NAMES = ["rack_blocked", "blocked_unseen", "meter_lies", "gpu_lies"]


@pytest.mark.parametrize("kind", sampled(NAMES, "rack_blocked", "gpu_lies"))
def test_a_loss_of_flow_costs_no_gpu_and_a_lie_no_node(kind: str) -> None:
    (found,) = live_through(tuple(losses_of("develop", [kind], 1)), _progress)
    assert found.shut_down == 0
    if KINDS[kind]:
        assert found.shut_down_capped > 0, "caps alone do not save them: the plant is worth the test"
        assert 0 < found.ordered <= found.gpus // 16, "the nodes of one rack of four"
        assert found.needless == 0
    else:
        assert (found.ordered, found.shut_down_capped) == (0, 0)


@pytest.mark.parametrize(
    "kind", sampled(["utility_lost", "utility_bridged", "utility_dips"], "utility_lost", "utility_bridged")
)
def test_without_the_utility_no_gpu_is_lost_and_where_pumps_run_on_no_node_stops(kind: str) -> None:
    (loss,) = losses_of("develop", [kind], 1)
    (found,) = live_through((loss,), _progress)
    assert found.shut_down == 0
    if KINDS[kind]:
        assert found.ordered > 0
        assert found.shut_down_capped > 0
    else:
        assert (found.ordered, found.shut_down_capped) == (0, 0)


@pytest.mark.parametrize(("hits", "trials", "most"), [(0, 200, 0.015), (1, 20, 0.2361), (10, 10, 1.0)])
def test_shares_are_bounded_by_wilson_and_the_rule_of_three(hits: int, trials: int, most: float) -> None:
    assert at_most_pu(hits, trials) == pytest.approx(most, abs=1e-4)


class Thinned(FlowLoss):
    """A rack with a tenth of its flow: enough for GPUs at their lowest clock, and too little at 600 W."""

    def apply(self, d: Disturbance, flow_lpm: F64, since_s: float, circuit: int = 0) -> None:
        d.rack_branch_factor[1] = 100.0


@pytest.mark.parametrize("locks", sampled([True, False], True))
def test_locked_clocks_save_a_rack_that_the_lowest_caps_do_not(locks: bool) -> None:
    """A site whose lowest cap is 600 W."""
    loss = Thinned("rack_starves", "gb200-nvl72", 61_000)
    controls = {CAP: {"min": 600.0}} | ({} if locks else {"gpu.clock_lock_mhz": {"min": 2100.0}})
    watch = run_losses((loss,), controls, None, _progress)
    assert not watch.burnt.any()
    assert watch.ordered.any() == (not locks)
    locked_mhz = watch.plant.truth.gpu_lock_mhz[watch.plant.site.rack_of_gpu == 1]
    assert (locked_mhz == 345.0).any() == locks
