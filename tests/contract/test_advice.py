"""Advice is a preview: for every registered policy, what it advises is what it would command, on the plant.

The same site, seed and trouble is played twice, once with the policy at `advise` and nobody obeying, once at
`act`. The long form, under `make storm`, plays each policy on five sites with ten seeds for ten minutes.
"""

from __future__ import annotations

import numpy as np
import pytest

from policies import REGISTRY
from tests.support.advice_stories import ALL, CAP, SITES, TROUBLES, Story, played, wheres
from twin.catalogue import digest
from twin.engine import encode
from twin.engine.event_handlers import Intake
from twin.engine.snapshot import decode
from twin.telemetry import AuthorityChanged

LONG_S, SEEDS = 600, 10
NEAR_PU = 0.15  # of a control's range, by which advice and commands of the same trouble may part on average
# Heat stays as it is while nobody obeys: a GPU reads a degree more, of three between guard and limit
HEAT_PU = {"thermal_guard": 0.35, ALL: 0.35}
SETTLED_S = 20  # after arming
# The proposals of these do not depend on power, which falls in reality as on the shadow but by noise
STEADY = ("thermal_guard", "leak_guard", "operator", "replacement", "checkpoint")
SHORT = [
    pytest.param(name, where, 1, 0, id=f"{name}-{where}")
    for name in sorted(TROUBLES)
    for where in wheres(name)[:1]
]
LONG = [
    pytest.param(name, where, seed, LONG_S, marks=pytest.mark.storm, id=f"{name}-{where}-{seed}-long")
    for name in sorted(TROUBLES)
    for where in wheres(name)
    for seed in range(SEEDS)
]
# The scope groups the tests by story, so that each story is played once
STORIES = pytest.mark.parametrize(("name", "where", "seed", "seconds"), [*SHORT, *LONG], scope="module")


def test_every_policy_has_a_story() -> None:
    assert set(TROUBLES) == {ALL, *REGISTRY}, "tests/support/advice_stories.py: a trouble in which it speaks"
    assert len(SITES) == 5


@pytest.mark.long
@STORIES
def test_the_first_advice_is_the_first_command(name: str, where: str, seed: int, seconds: int) -> None:
    story = played(name, where, seed, seconds)
    assert story.first_advice == story.first_commands
    # A job drawn by some seed already saves as often as is best: nobody has anything to say to it
    mute = (name, seconds) == ("checkpoint", LONG_S)
    assert story.first_advice or mute, "nothing was advised: the trouble is none"
    assert story.commanded_by_advice == 0
    assert story.advises.engine.suspended == story.acts.engine.suspended == {}


@STORIES
def test_advice_does_not_wind_up_while_nobody_obeys(name: str, where: str, seed: int, seconds: int) -> None:
    """It stays within what was commanded in the world that obeys, and has news no more often."""
    story = played(name, where, seed, seconds)
    for control, levels in story.levels.items():
        advised, acted = np.array(levels).T
        assert advised.min() >= acted.min() - NEAR_PU, control
        assert advised.max() <= acted.max() + NEAR_PU, control
        most_advised, most_acted = story.most[control]
        assert (most_advised <= most_acted + HEAT_PU.get(name, NEAR_PU)).all(), control
    assert story.said[0] <= 3 * story.said[1] + 10


@STORIES
def test_arming_commands_what_was_advised_and_goes_on_from_there(
    name: str, where: str, seed: int, seconds: int
) -> None:
    story = played(name, where, seed, seconds)
    stays, arms = story.armed()
    for control in story.levels:
        envelope = stays.engine.site.envelopes[control]
        wanted, armed = story.leases(stays, control, True), story.leases(arms, control, False)
        stood = arms.engine.view().readback(control)
        reach = np.where(envelope.slew_per_s > 0, envelope.slew_per_s * arms.dt_s, np.inf)
        close = np.abs(armed - wanted) <= envelope.deadband
        on_the_way = np.abs(armed - stood) >= reach - 1e-6  # as far as one step leads from where it stands
        assert (np.isnan(wanted) | close | (on_the_way & (armed <= wanted))).all(), control
        assert (np.isnan(armed) | np.isfinite(wanted)).all(), control
    before = {control: story.level(stays, control, True) for control in story.levels}
    acted = {control: max(pair) for control in story.levels for pair in story.levels[control][-1:]}
    for _ in range(SETTLED_S):
        arms.step()
        if name in STEADY:
            stays.step()
            for control in before:
                one, other = story.leases(stays, control, True), story.leases(arms, control, False)
                assert (~(np.abs(one - other) > stays.engine.site.envelopes[control].deadband)).all(), control
        for control, level in before.items():
            now = story.level(arms, control, False)
            assert now <= max(level, acted[control]) + NEAR_PU, control
    assert not any(shadow.apart.any() for shadow in arms.engine.arbiter.shadow.values())
    assert not any("readback" in finding.id for finding in arms.decision.findings)


@pytest.mark.long
def test_disarming_and_turning_off_leave_no_shadow_behind() -> None:
    story = played("power_cap", "hgx", 1)
    sim = story.advises.fork()
    sim.inject(AuthorityChanged(author="ann", policy="power_cap", authority="off"))
    sim.step()
    assert sim.decision.commands == ()
    for _ in range(15):
        sim.step()
        assert sim.decision.advice == ()
    assert sim.engine.arbiter.shadow == {}
    assert sim.engine.preview.power.turn_ns == 0


def test_the_shadow_is_seen_by_those_who_advise_alone() -> None:
    """Reality stays as it is for alarms, diagnosis and interfaces, and nothing of the shadow is commanded."""
    story = played("power_cap", "hgx", 1)
    sim = story.advises
    truth, read = sim.plant.truth, sim.engine.view()
    assert np.isnan(read.commanded(CAP)).all()
    assert read.value("gpu.power_w").sum() > 0.95 * truth.gpu_power_w.sum()
    assert (read.readback(CAP) == sim.engine.site.envelopes[CAP].high).all()
    assert np.isfinite(sim.engine.arbiter.shadow[CAP].value).all()


@pytest.mark.long
def test_a_snapshot_holds_the_shadow() -> None:
    story = played("power_guard", "hgx", 1)
    one, other = story.advises.fork(), story.advises.fork()
    other.engine.restore(decode(encode(one.engine.dump())))
    for _ in range(10):
        one.step()
        other.step()
        assert digest(one.engine.dump()) == digest(other.engine.dump())
        assert [a.value.tolist() for a in one.decision.advice] == [
            a.value.tolist() for a in other.decision.advice
        ]


@pytest.mark.long
def test_without_a_shadow_the_advice_winds_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what the tests above are about: one that reads that nobody obeys cuts more and more."""
    monkeypatch.setattr(Intake, "previews", lambda *_: False)
    story = Story("power_cap", "one_feeder", 1, 60)
    advised, acted = np.array(story.levels[CAP]).T
    assert story.first_advice == story.first_commands
    assert advised[-1] > acted[-1] + NEAR_PU
