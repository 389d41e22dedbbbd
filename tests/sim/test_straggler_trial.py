"""Slow members of simulated jobs are named and healthy jobs are left alone: part of the straggler trial."""

from __future__ import annotations

import pytest

from tests.support.straggler_trial import Trial, run_healthy, run_slow


@pytest.mark.long
def test_slow_members_are_named_and_healthy_jobs_are_quiet() -> None:
    trial = Trial()
    run_slow(24, 3, trial)
    assert sum(trial.right.values()) >= 22, trial.misses
    assert max(map(abs, trial.errors_pu)) < 0.05
    run_healthy(40.0, 4, trial)
    assert not trial.false_jobs
