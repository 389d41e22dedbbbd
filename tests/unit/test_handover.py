"""The hand-over from advice to commands: a policy that is armed goes on from its advice at any cadence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard
from tests.support.builders import two_racks
from tests.support.powered_plant import CAP, Loop
from tests.support.sampled_cases import sampled
from twin.telemetry import AuthorityChanged

READ_RARELY = ("gpu.power_w", "gpu.power_limit_w")
BUDGET_W = {"power_cap": 150_000, "power_guard": 75_000}


def armed_after(policy: Any, every_s: int, advises_s: int) -> tuple[Loop, float]:
    """(a loop in which a policy was just armed, the mean cap that it advised): GPUs are read this often."""
    tree = two_racks()
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = BUDGET_W[policy.name]
    loop = Loop(tree, [policy])
    loop.wants_w[:] = 1000.0
    loop.tick(AuthorityChanged(author="ann", policy=policy.name, authority="advise"))
    for second in range(advises_s):
        step(loop, every_s, second)
    assert (loop.gpu_w == 1000.0).all(), "nobody obeyed"
    advised_w = float(loop.twin.engine.arbiter.shadow[CAP].value.mean())
    step(loop, every_s, every_s // 4, AuthorityChanged(author="ann", policy=policy.name, authority="act"))
    return loop, advised_w


def step(loop: Loop, every_s: int, second: int, *events: Any) -> None:
    loop.silent = set() if second % every_s == 0 else set(READ_RARELY)
    loop.tick(*events)


@pytest.mark.long
@pytest.mark.parametrize("every_s", sampled([1, 30], 30))
@pytest.mark.parametrize("policy", [PowerCap, PowerGuard])
def test_who_is_armed_neither_cuts_again_nor_gives_back_before_its_commands_are_read(
    policy: Any, every_s: int
) -> None:
    loop, advised_w = armed_after(policy(), every_s, 5 * max(every_s, 20))
    assert loop.twin.lease(CAP).mean() == pytest.approx(advised_w, abs=2.0)
    for second in range(every_s // 4 + 1, every_s // 4 + 75):
        step(loop, every_s, second)
        assert loop.twin.lease(CAP).mean() == pytest.approx(advised_w, rel=0.06), second
        assert loop.feeder_w.max() <= BUDGET_W[policy.name] * 1.01
    assert loop.twin.engine.arbiter.shadow == {}, "what was read is reality"


@pytest.mark.long
def test_what_devices_never_tell_is_waited_for_no_longer_than_is_usual() -> None:
    loop, _ = armed_after(PowerCap(), 1, 60)
    loop.silent = set(READ_RARELY)
    lasts_s = 0
    while loop.twin.engine.arbiter.shadow:
        loop.tick()
        lasts_s += 1
        assert lasts_s < 200
    assert np.isfinite(loop.twin.lease(CAP)).all()
    assert lasts_s > 140
