"""The one taxonomy of faults: rules of health name only its kinds, and none is alarmed by both."""

from __future__ import annotations

import pytest

from twin.contracts import PARTS
from twin.diagnosis import FAULT_KINDS
from twin.health import SPECS
from twin.health.alarms import is_alarmed, is_over
from twin.health.rules import DIAGNOSIS, Rule

RULES = [(part, rule) for part, spec in SPECS.items() for rule in spec.rules]
SIGNS = [
    pytest.param(part, r, k, id=f"{part}-{r.id}-{k}")
    for part, r in RULES
    for k in FAULT_KINDS
    if r.sign_of(k)
]
RANK = {"info": 0, "warning": 1, "critical": 2}


@pytest.mark.parametrize("part, rule", [pytest.param(p, r, id=f"{p}-{r.id}") for p, r in RULES])
def test_a_rule_names_kinds_of_the_taxonomy(part: str, rule: Rule) -> None:
    assert set(rule.faults) <= set(FAULT_KINDS)
    assert rule.id not in rule.faults
    if rule.source == DIAGNOSIS:
        assert any(rule.sign_of(kind) for kind in FAULT_KINDS), "what the diagnosis tells is of its taxonomy"


@pytest.mark.parametrize("part, rule, kind", SIGNS)
def test_a_sign_is_of_a_fault_that_its_part_or_node_can_have(part: str, rule: Rule, kind: str) -> None:
    around = {"gpu": ("gpu", "node"), "psu": ("node",), "pump": ("cdu",), "node": ("node", "gpu")}
    assert set(FAULT_KINDS[kind].tables) & set(around.get(part, (PARTS[part],)))


@pytest.mark.parametrize("part, rule, kind", SIGNS)
def test_what_the_diagnosis_tells_as_gravely_is_not_alarmed_again(part: str, rule: Rule, kind: str) -> None:
    assert is_alarmed(rule, rule.level, {kind: RANK["critical"]})
    same = rule.source == DIAGNOSIS and kind == rule.id  # how grave that is, the diagnosis says
    assert is_alarmed(rule, rule.level, {kind: RANK["info"]}) == same
    assert not is_alarmed(rule, rule.level, {"heat_wave": RANK["critical"]})
    assert is_over(rule, {}) == rule.echo
    assert not is_over(rule, {kind: RANK["info"]})
