"""Titles of findings: words that stay while the figures behind them move."""

from __future__ import annotations

import pytest

from twin.contracts import Evidence
from twin.health import SPECS
from twin.health.alarms import TITLES, heading
from twin.health.rules import Rule

RULES = {rule.id: rule for spec in SPECS.values() for rule in spec.rules}
# Their note names a code, a state or what a device asks for: that is what the finding is of
NAMED = {"xid", "code", "sxid", "recovery_action", "service_level", "link_congested", "xid_before"}


def said(rule: Rule, a: float, b: float, note: str) -> str:
    return heading(Evidence(rule.id, rule.level, rule.text(a, b, note), 0, 0.9, rule.source))


@pytest.mark.parametrize("id_", sorted(RULES))
def test_a_title_stands_while_figures_and_notes_move(id_: str) -> None:
    rule = RULES[id_]
    first, later = said(rule, 61.0, 3.0, "3 times"), said(rule, 74.0, 9.0, "4 times, the last 2 h ago")
    assert (first == later) is (id_ not in NAMED)
    assert first
    if id_ not in NAMED:
        assert "{" not in first
        assert "61" not in first
        assert "%" not in first


def test_titles_are_of_rules_that_there_are() -> None:
    assert set(TITLES) <= set(RULES)


def test_what_no_rule_has_words_for_names_itself() -> None:
    assert heading(Evidence("test", 3, "a GPU of it is gone", 0, 0.9, "x")) == "a GPU of it is gone"
