"""On a large site what is asked now and then takes turns, so that no tick does all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from models import REGISTRY as MODELS
from policies import REGISTRY as POLICIES
from tests.support.builders import Twin, Wish, spec_of, two_racks
from twin.site import site as site_module
from twin.telemetry import events as ev

CAP = "gpu.power_cap_w"


def busy_ticks(pod: Twin, seconds: int) -> list[set[str]]:
    """The plug-ins with periods of 5 s or more that run in each tick."""
    out = []
    for _ in range(seconds):
        before = dict(pod.engine.ran_ns)
        pod.tick({"rack.power_w": 60_000.0})
        out.append({name for name, ns in pod.engine.ran_ns.items() if before.get(name) != ns})
    return [{name for name in ran if name in pod.engine._turn_s} for ran in out]


def pod_of() -> Twin:
    policies = [POLICIES[name]() for name in ("idle_power", "power_cap", "replacement")]
    models = [MODELS[name]() for name in ("persistence", "power_curve")]
    return Twin(two_racks(), policies, models)


def test_what_runs_seldom_takes_turns_on_a_large_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "LARGE_GPUS", 144)
    first, *later = busy_ticks(pod_of(), 40)
    assert len(first) == 5, "all speak at once when nothing was said yet"
    assert max(map(len, later)) == 1
    for name in first:
        at = [k + 1 for k, ran in enumerate(later) if name in ran]
        assert {b - a for a, b in pairwise(at)} == {5 if name == "power_cap" else 10}
        assert at[0] % 5, "with the health of all parts, which is judged each 10 s"


def test_a_pause_does_not_bring_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "LARGE_GPUS", 144)
    pod = pod_of()
    busy_ticks(pod, 17)
    before = dict(pod.engine.ran_ns)
    pod.tick({"rack.power_w": 60_000.0}, dt_s=33.4)
    ran_ns = {name for name, ns in pod.engine.ran_ns.items() if before[name] != ns}
    assert ran_ns == set(before), "nobody waits longer for the pause"
    assert max(map(len, busy_ticks(pod, 40))) == 1


def test_the_first_tick_of_a_large_site_has_forecasts_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "LARGE_GPUS", 144)
    pod = Twin(two_racks(), models=[MODELS["failure"]()])
    pod.tick({"gpu.temp_c": 50.0})
    assert pod.engine.forecasts, "the next run is a minute later"


def test_on_a_small_site_they_keep_to_one_tick() -> None:
    first, *later = busy_ticks(pod_of(), 21)
    assert [k + 1 for k, ran in enumerate(later) if ran] == [5, 10, 15, 20]
    assert later[9] == first


class Seldom(Wish):
    """Caps three GPUs, and is not asked in urgent ticks."""

    period_s = 5.0
    urgent = False


def test_an_urgent_tick_in_which_the_site_changes_withdraws_no_cap() -> None:
    policy = Seldom()
    policy.ask(CAP, [1, 2, 3], 200.0, 800.0)
    pod = Twin(two_racks(), [policy], act=True)
    pod.run(3, {CAP.replace("cap", "limit"): 1200.0})
    later = spec_of(two_racks(racks="r[1-3]"))
    changed = ev.SiteChanged(id="s", site_hash=later.digest(), spec=later.packed())
    decision = pod.tick(None, changed, dt_s=0.1, urgent=True)
    assert not [batch.reason for batch in decision.commands]
    assert (pod.lease(CAP)[[1, 2, 3]] == 800.0).all()


def test_an_urgent_tick_in_which_a_policy_is_restored_withdraws_no_cap() -> None:
    policy = Seldom()
    policy.ask(CAP, [1, 2, 3], 200.0, 800.0)
    pod = Twin(two_racks(), [policy], act=True)
    pod.run(3, {CAP.replace("cap", "limit"): 1200.0})
    pod.engine.suspend(policy.name, ValueError("a fault"), pod.engine.state.now_ns)
    pod.tick(None, ev.PluginRestored(plugin=policy.name), dt_s=0.1, urgent=True)
    assert (pod.lease(CAP)[[1, 2, 3]] == 800.0).all()
