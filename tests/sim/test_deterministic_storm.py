"""Storms in simulated time: two daemons, their election, broker, agents and disks fail by seed, and nothing
unsafe happens; each planted bug is found.

`make storm` blows more: RACKTWIN_STORM_SEEDS is their number, RACKTWIN_STORM_FIRST the first seed, and
RACKTWIN_STORM_HOURS their length. `python -m tests.support.storm SEED --hours H` blows one of them again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.storm.planted import BUGS, FOUND, shape_for
from tests.support.storm.storm import Shape, blow

FIRST = int(os.environ.get("RACKTWIN_STORM_FIRST", "1000"))
SEEDS = int(os.environ.get("RACKTWIN_STORM_SEEDS", "20"))
HOURS = float(os.environ.get("RACKTWIN_STORM_HOURS", "0.25"))
QUICK = ("sent_before_journaled", "epoch_taken_twice", "agent_forgets_leases_in_a_restart")


@pytest.mark.long
def test_the_same_seed_is_the_same_storm(tmp_path: Path) -> None:
    shape = Shape(hours=0.02, every_s=3.0, replay_each=1)
    one, other = (blow(3, tmp_path / name, shape) for name in ("one", "other"))
    assert not one.faults, one.text()
    assert one.commands > 10
    assert (one.digest, one.commands, one.lives) == (other.digest, other.commands, other.lives)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    BUGS[name](monkeypatch)
    assert blow(FOUND[name], tmp_path / "storm", shape_for(name)).faults


@pytest.mark.storm
@pytest.mark.parametrize("name", sorted(FOUND.keys() - set(QUICK)))
def test_each_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    BUGS[name](monkeypatch)
    assert blow(FOUND[name], tmp_path / "storm", shape_for(name)).faults


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_no_storm_makes_it_unsafe(tmp_path: Path, seed: int) -> None:
    report = blow(seed, tmp_path / "storm", Shape(hours=HOURS))
    assert not report.faults, report.text()
