"""What was found is given back once, whole, and not twice: read-backs that lag, commands that are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.builders import Twin, Wish
from tests.unit.test_leases import CAP, twin, values


def capped_pod() -> tuple[Twin, Wish]:
    """GPU 0 cut from 350 W to 300, read back, and let go again."""
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    pod.run(3, {"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    wish.proposals = []
    return pod, wish


def test_our_own_raise_on_its_way_is_nobody_elses_setting() -> None:
    pod, wish = capped_pod()
    cut = {"gpu.power_limit_w": [300.0, *[350.0] * 7]}
    wish.ask(CAP, [0], 200, 320)
    pod.tick(cut)
    wish.proposals = []
    pod.tick(cut)  # the raise to 320 is not read back yet
    (final,) = pod.commands()
    assert (values([final]), final.final) == ({0: 350.0}, True)


def test_a_lower_setting_of_somebody_else_stands_once_that_is_clear() -> None:
    pod, wish = capped_pod()
    wish.ask(CAP, [0], 200, 300)
    lower = {"gpu.power_limit_w": [240.0, *[350.0] * 7]}
    pod.tick(lower)
    wish.proposals = []
    for _ in range(9):
        pod.tick(lower)
        assert all(c.renewal for c in pod.commands()), "too early to say whose it is"
    pod.run(3, lower)
    assert np.isnan(pod.lease(CAP)[0])
    assert pod.engine.arbiter.leases[CAP].given[0] == 240.0


@pytest.mark.parametrize("settles_at", [350.0, 200.0])
def test_a_last_command_that_was_lost_is_given_again(settles_at: float) -> None:
    """The device goes on at 300 W, lets its lease lapse to what is safe, and is raised from there."""
    pod, _ = capped_pod()
    assert pod.engine.site.envelopes[CAP].safe[0] == 200.0
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    assert [c.final for c in pod.commands()] == [True]
    pod.run(30, {"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    said: list[Any] = []
    for _ in range(15):
        pod.tick({"gpu.power_limit_w": [settles_at, *[350.0] * 7]})
        said += pod.commands()
    if settles_at == 350.0:
        assert said == []
    else:
        assert [values([c])[0] for c in said] == [250.0, 300.0, 350.0]
        assert said[-1].final


def test_a_lease_amid_the_giving_back_remembers_what_was_found() -> None:
    pod, wish = capped_pod()
    late = {"gpu.power_limit_w": [300.0, *[350.0] * 7]}
    pod.tick(late)  # given back, and not read back yet
    wish.ask(CAP, [0], 200, 320)
    pod.tick(late)
    assert pod.engine.arbiter.leases[CAP].found[0] == 350.0


def test_an_old_reading_heard_first_after_a_silence_does_not_end_the_debt() -> None:
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    for _ in range(60):
        pod.tick({"gpu.power_w": 100.0})
    said: list[Any] = []
    for reads in (300.0, 300.0, 200.0, 200.0, 250.0, 300.0, 350.0):
        pod.tick({"gpu.power_limit_w": [reads, *[350.0] * 7]})
        said += pod.commands()
    assert [values([c])[0] for c in said] == [250.0, 300.0, 350.0]


def test_what_somebody_else_sets_afterwards_is_theirs() -> None:
    pod, wish = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    pod.run(50, {"gpu.power_limit_w": 350.0})
    assert np.isnan(pod.engine.arbiter.leases[CAP].given).all()
    wish.ask(CAP, [0], 200, 320)
    pod.tick({"gpu.power_limit_w": [280.0, *[350.0] * 7]})
    assert pod.engine.arbiter.leases[CAP].found[0] == 280.0
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    pod.run(100, {"gpu.power_limit_w": [280.0, *[350.0] * 7]})
    assert np.isnan(pod.engine.arbiter.leases[CAP].given).all()
    assert pod.commands() == []
