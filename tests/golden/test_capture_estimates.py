"""The estimator on a real site: calibrated on the first half of the capture, judged on the second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.score_capture import Score, score, table

COOLED = [f"Pod1C-E0{i}" for i in range(2, 7)]
FOUND: list[Score] = []


@pytest.fixture
def found(recording: Callable[[str], Path]) -> Score:
    path = recording("dsx-bms-capture") / "dsx_exemplar.csv"
    if not FOUND:
        FOUND.append(score(path))
    return FOUND[0]


def test_the_halves_are_halves(found: Score) -> None:
    assert found.learned_s == pytest.approx(found.judged_s, abs=0.1)
    assert found.learned_s == pytest.approx(49.7, abs=0.5)


def test_return_temperatures_are_within_a_kelvin(found: Score) -> None:
    assert [r.name.rpartition("/")[2] for r in found.racks] == COOLED
    for rack in found.racks:
        assert rack.readings >= 40
        assert rack.worst_k <= 1.0
        # The site is steady: holding the last value errs by some hundredths of a kelvin, and so do we
        assert rack.mean_k <= 0.15
        assert rack.held_mean_k <= 0.15
        assert 0.93 <= rack.capture_pu <= 0.99


def test_the_power_trees_meters_agree_within_their_noise(found: Score) -> None:
    assert found.balances
    for balance in found.balances:
        assert balance.agrees, table(found)
        assert balance.noise_pu < 0.01


def test_the_table_names_all(found: Score) -> None:
    text = table(found)
    for name in [*COOLED, *(b.name for b in found.balances)]:
        assert name in text
