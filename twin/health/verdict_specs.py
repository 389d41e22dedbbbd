"""Verdict specs: for each kind of part its rules, the evidence there should be, and the signals that show its
life.

Data.
"""

from __future__ import annotations

from dataclasses import dataclass

from twin.health import rules_gpu, rules_node, rules_parts
from twin.health.reported import Kinds
from twin.health.rules import Rule


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a kind of part: its rules, kinds of evidence, and signals of which one shows life."""

    rules: tuple[Rule, ...]
    kinds: Kinds
    vital: tuple[str, ...]
    condition: tuple[str, ...] = ()  # of which one must have been told; none: what shows life is enough

    def rule(self, rule_id: str) -> Rule | None:
        """The rule with this id; None: such evidence is of no rule."""
        return next((rule for rule in self.rules if rule.id == rule_id), None)


# In this order, since a node is judged by its GPUs and supplies
SPECS: dict[str, Spec] = {
    "gpu": Spec(rules_gpu.RULES, rules_gpu.KINDS, rules_gpu.VITAL, rules_gpu.CONDITION),
    "switch": Spec(rules_parts.SWITCH, rules_parts.SWITCH_KINDS, rules_parts.SWITCH_VITAL),
    "link": Spec(rules_parts.LINK, rules_parts.LINK_KINDS, rules_parts.LINK_VITAL),
    "pump": Spec(rules_parts.PUMPS, rules_parts.PUMP_KINDS, rules_parts.PUMP_VITAL),
    "psu": Spec(rules_parts.PSUS, rules_parts.PSU_KINDS, rules_parts.PSU_VITAL),
    "node": Spec(rules_node.RULES, rules_node.KINDS, rules_node.VITAL),
}
