"""Coolant that stops at full load: no GPU shuts itself down, and no node goes off where none is in danger."""

from __future__ import annotations

import pytest

from tests.support.flow_loss_run import live_through
from tests.support.flow_losses import KINDS, losses_of

pytestmark = pytest.mark.slow


def _progress(done: float, what: str) -> None:
    """Nobody looks on."""


@pytest.mark.parametrize("kind", ["rack_blocked", "blocked_unseen", "meter_lies", "gpu_lies"])
def test_a_loss_of_flow_costs_no_gpu_and_a_lie_no_node(kind: str) -> None:
    (loss,) = losses_of("develop", [kind], 1)
    found = live_through(loss, _progress)
    # Where the flow meter repeats itself, the caps come later, and some GPUs have seconds left by then
    lost = 0.1 * found.shut_down_capped if kind == "blocked_unseen" else 0
    assert found.shut_down <= lost
    if KINDS[kind]:
        assert found.shut_down_capped > 0, "caps alone do not save them: the plant is worth the test"
        assert 0 < found.ordered <= found.gpus // 16, "the nodes of one rack of four"
        assert found.needless == 0
    else:
        assert (found.ordered, found.shut_down_capped) == (0, 0)
