"""Health in words: chances that are never certain, comparisons, spans, what levels and actions say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from twin.api.health import kinds_of
from twin.catalogue import find_signal
from twin.contracts import ACTIONS, ATTRIBUTIONS, FAILURE_CLASSES, LEVELS, PARTS
from twin.health import SIGNALS
from twin.report import health_texts as words


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "-"), (math.nan, "-"), (0.0, "< 0.01 %"), (0.00009, "< 0.01 %"), (0.0004, "0.04 %"),
        (0.0031, "0.3 %"), (0.031, "3.1 %"), (0.31, "31 %"), (0.5, "50 %"), (0.994, "> 99 %"),
        (1.0, "> 99 %"),
    ],
)  # fmt: skip
def test_chances(value: float | None, said: str) -> None:
    assert words.chance(value) == said


@pytest.mark.parametrize(
    ("value", "usual", "said"),
    [
        (0.04, 0.004, "10 x the average"), (0.01, 0.004, "2.5 x the average"),
        (0.004, 0.004, "about average"),
        (0.001, 0.004, "below average"), (None, 0.004, ""), (0.004, None, ""), (0.0, 0.004, ""),
        (0.4, 0.0, ""), (math.nan, 0.1, ""), (0.1, math.nan, ""),
    ],
)  # fmt: skip
def test_comparisons_with_the_fleet(value: float | None, usual: float | None, said: str) -> None:
    assert words.times(value, usual) == said


@pytest.mark.parametrize(("value", "said"), [(None, "-"), (0.0, "< 0.01"), (0.154, "0.15"), (3.26, "3.3"),
                                             (61.4, "61"), (math.nan, "-")])  # fmt: skip
def test_numbers_of_failures(value: float | None, said: str) -> None:
    assert words.count(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, ""), (math.nan, ""), (1.0, "sure (99 %)"), (0.9, "sure (90 %)"), (0.7, "fairly sure (70 %)"),
     (0.5, "more likely than not (50 %)"), (0.49, "only a suspicion (49 %)")],
)  # fmt: skip
def test_how_sure(value: float | None, said: str) -> None:
    assert words.sure(value) == said


@given(st.floats(0, 1))
def test_no_chance_reads_as_certain(value: float) -> None:
    assert words.chance(value) not in ("0 %", "0.0 %", "0.00 %", "100 %")


def test_every_word_of_the_core_has_words_here() -> None:
    assert set(words.LEVEL_WORDS) == set(LEVELS)
    assert set(words.LOWERED_WORDS) == set(ATTRIBUTIONS)
    assert set(words.HELD_DOWN) == set(ATTRIBUTIONS[1:])
    assert set(words.SIGNAL_WORDS) == set(SIGNALS)
    assert set(words.CLASS_WORDS) == set(FAILURE_CLASSES)
    for part in PARTS:
        kinds = kinds_of(part)
        assert kinds
        for _, keys in kinds:
            assert all(find_signal(key) is not None for key in keys)
            assert words.comes_from(keys[0])
    for action in ACTIONS[1:]:
        assert words.changes("degraded", action, False)
    assert words.changes("degraded", "none", False) == words.changes("degraded", "watch", False)


@pytest.mark.parametrize(
    ("level", "action", "missing", "part"),
    [
        ("unknown", "none", True, "once the missing signals report"),
        ("healthy", "none", False, "An error that it reports"),
        ("healthy", "none", True, "could hide a fault"),
        ("failed", "replace", False, "new serial number"),
        ("degraded", "check_facility", False, "a reset does not help"),
    ],
)
def test_what_would_change_a_verdict(level: str, action: str, missing: bool, part: str) -> None:
    assert part in words.changes(level, action, missing)


@pytest.mark.parametrize(
    ("part", "level", "action", "told"),
    [
        ("psu", "failed", "replace", "gives its share of the power again"),  # nobody tells its serial number
        ("pump", "failed", "check_facility", "when the pump runs"),
        ("link", "failed", "run_diagnostics", "when the link is up"),
        ("psu", "watch", "watch", "clears by itself"),  # its meter
        ("psu", "unknown", "none", "once the missing signals report"),
        ("gpu", "failed", "replace", "new serial number"),
    ],
)
def test_what_would_change_the_verdict_on_a_part(part: str, level: str, action: str, told: str) -> None:
    assert told in words.changes(level, action, False, part)


def test_counts_and_the_worst() -> None:
    levels = {"healthy": 5, "unknown": 0, "watch": 2, "degraded": 0, "failed": 1}
    assert words.counted(levels) == "1 failed, 2 watch, 5 healthy"
    assert words.worst(levels) == "failed"
    assert words.counted({}) == "none"
    assert words.worst({}) == "healthy"
