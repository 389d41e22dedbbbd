"""Wear of a simulated site: each part reaches the twin's limit at the end of its life, by its own law."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.health.wear import WORN
from twin.plant import Script, scenario_of
from twin.plant.faults import BEYOND, BOTH, DRIFT_STEP, LIVES, SHAPES, wear_scripts

DAY_S = 86_400.0
SITE = site_of(two_racks())
LEARNED = {"filter_blocked": "cdu.filter", "exchanger_fouled": "cdu.ua", "pump_worn": "cdu.pump_head",
           "plate_degraded": "gpu.resistance"}  # fmt: skip


def life_s(script: Script) -> float:
    return script.ramp_s / BEYOND ** (1.0 / script.shape)


def test_what_is_worn_out_is_at_the_limit_that_the_twin_watches() -> None:
    limits = {w.what: w.limit_pu for w in WORN}
    assert {LEARNED[kind] for kind in LIVES} == set(limits)
    for script in wear_scripts(SITE, 3):
        level = script.level(life_s(script), 0.0)
        assert level == pytest.approx(1.0 / BEYOND, abs=2 * DRIFT_STEP)
        factors = [e.value for e in script.effects(level)]
        assert factors == pytest.approx([limits[LEARNED[script.kind]]] * len(factors), rel=1e-3)
        assert len(factors) == (2 if script.part == BOTH else 1)


def test_lives_are_drawn_within_their_bounds_and_by_the_seed() -> None:
    scripts = wear_scripts(SITE, 3)
    for script in scripts:
        life = LIVES[script.kind]
        assert life.short_d <= life_s(script) / DAY_S <= life.long_d
        assert SHAPES[0] <= script.shape <= SHAPES[1]
    assert scripts == wear_scripts(SITE, 3) != wear_scripts(SITE, 4)
    gpus = sum(s.kind == "plate_degraded" for s in scripts)
    assert 0 < gpus < 0.15 * SITE.sizes["gpu"]
    ten = wear_scripts(SITE, 3, 10.0)
    assert [life_s(s) for s in ten] == pytest.approx([life_s(s) / 10.0 for s in scripts])


def test_a_drift_moves_in_small_steps_and_never_back() -> None:
    script = Script("filter_blocked", "cdu", 0, 0.0, None, 0.1, 10 * DAY_S, shape=1.3)
    levels = [script.level(t, 0.0) for t in np.linspace(0.0, 11 * DAY_S, 5000)]
    steps = np.diff(levels)
    assert (steps >= 0.0).all()
    assert levels[-1] == 1.0
    day = {script.level(t, 0.0) for t in range(86_400)}
    assert len(day) <= 2 + 0.1**1.3 / DRIFT_STEP, "most steps of the plant see no change"
    exact = [min(t / 10.0, 1.0) ** 1.3 for t in np.linspace(0.0, 11.0, 5000)]
    assert np.abs(np.array(levels) - exact).max() <= DRIFT_STEP
    with pytest.raises(ValueError, match="shape above 0"):
        Script("filter_blocked", "cdu", 0, 0.0, shape=0.0)


def test_a_scenario_asks_for_wear() -> None:
    tree = {"name": "worn", "seed": 3, "hours": 1.0}
    assert scenario_of(tree, SITE).faults == ()
    assert scenario_of(tree | {"wear_pace": 24.0}, SITE).faults == wear_scripts(SITE, 3, 24.0)
