"""Demands from outside met by the real engine: a demand response, and a restart in the middle of it.

Simulated; GPUs follow their caps a second later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard
from tests.support.builders import START_NS, two_racks
from tests.support.powered_plant import Loop
from twin.catalogue import NS
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import JobStarted, LoadTargetSet

pytestmark = pytest.mark.slow
HIGH = 5
HIGH_NODES, LOW_NODES = range(0, 9), range(9, 36)
WANTS_W = 1000.0


def policies_of(**settings: Any) -> Loop:
    return Loop(
        two_racks("gb200-nvl72"), [PowerGuard(high_priority=HIGH), PowerCap(high_priority=HIGH, **settings)]
    )


def story(**settings: Any) -> Loop:
    """Two racks that are full of jobs, a quarter of them high; nothing but what is set limits them."""
    loop = policies_of(**settings)
    loop.wants_w[:] = WANTS_W
    loop.tick(
        *(job(f"low{i}", range(9 + 9 * i, 18 + 9 * i)) for i in range(3)), job("high", HIGH_NODES, HIGH)
    )
    loop.run(60)
    return loop


def job(name: str, nodes: range, priority: int = 0) -> JobStarted:
    names = tuple(f"lab/h/r{1 + i // 18}/node{i % 18}" for i in nodes)
    return JobStarted(job=name, nodes=names, kind="training", coupling="synchronous", priority=priority)


def gpus(nodes: range) -> np.ndarray:
    return np.arange(4 * nodes.start, 4 * nodes.stop)


def load_w(loop: Loop) -> float:
    return float(loop.rack_w.sum())


def course_w(loop: Loop, seconds: int, dt_s: float = 1.0) -> np.ndarray:
    """The site's load after each tick."""
    out = []
    for _ in range(round(seconds / dt_s)):
        loop.tick(dt_s=dt_s)
        out.append(load_w(loop))
    return np.array(out)


def asked(loop: Loop, limit_w: float, **more: Any) -> LoadTargetSet:
    return LoadTargetSet(author="grid", target="dr", limit_w=limit_w, kind="demand_response", **more)


@pytest.mark.long
def test_a_demand_response_is_there_within_seconds_spares_what_is_high_and_ends_on_the_ramp() -> None:
    ramp_w_per_s = 200.0
    loop = story(ramp_up_w_per_s=ramp_w_per_s)
    assert (loop.gpu_w == WANTS_W).all()
    full_w = load_w(loop)
    limit_w = 0.7 * full_w
    end_ns = loop.twin.now_ns + 900 * NS
    loop.tick(asked(loop, limit_w, end_ns=end_ns))
    first_w = course_w(loop, 10)
    assert first_w[-1] <= limit_w
    held_w = course_w(loop, 880, 5.0)
    assert held_w.max() <= limit_w
    assert held_w[-1] >= 0.94 * limit_w, "and no work was given away for nothing"
    assert (loop.gpu_w[gpus(HIGH_NODES)] == WANTS_W).all()
    assert (loop.gpu_w[gpus(LOW_NODES)] < 0.75 * WANTS_W).all()
    rises_w = course_w(loop, 450)
    assert rises_w[-1] == pytest.approx(full_w)
    minute_w = rises_w[60:] - rises_w[:-60]
    # A synchronous job is raised as a whole: its steps lag the ramp by up to the dwell of a raise
    assert minute_w.max() <= 2.5 * 60 * ramp_w_per_s
    steady_w = rises_w[0] + ramp_w_per_s * np.arange(1, len(rises_w) + 1)
    assert (rises_w <= steady_w + 5 * ramp_w_per_s).all(), "never ahead of the ramp"
    assert not loop.twin.engine.suspended


@pytest.mark.long
def test_a_restart_in_the_middle_of_a_response_keeps_to_it() -> None:
    loop = story(ramp_up_w_per_s=100.0)
    full_w = load_w(loop)
    limit_w = 0.75 * full_w
    loop.tick(asked(loop, limit_w, end_ns=loop.twin.now_ns + 600 * NS))
    loop.run(120)
    assert load_w(loop) <= limit_w
    before = loop.twin
    loop.twin = policies_of(ramp_up_w_per_s=100.0).twin
    loop.twin.engine.restore(decode(encode(before.engine.dump())))
    loop.twin.now_ns, loop.twin.number = before.now_ns, before.number
    loop.twin.now_ns += 40 * NS
    after_w = course_w(loop, 300)
    assert after_w.max() <= limit_w
    ends_w = course_w(loop, 420)
    begun = int(np.argmax(ends_w > limit_w))
    assert begun > 0
    rises_w = ends_w[begun:]
    assert rises_w[60] <= limit_w + 65 * 100.0
    assert loop.twin.now_ns > START_NS
