"""What verdicts and the diagnosis both tell: which evidence is told already, and which is only an echo.

May import rules and records.
"""

from __future__ import annotations

from twin.health import rules_gpu, rules_node, rules_parts
from twin.health.levels import FAILED
from twin.health.records import Evidence
from twin.health.rules_shared import DIAGNOSIS

# Kinds of the diagnosis that tell the same as a rule of health, beside the kind of the rule's own name. What
# is told of a whole node goes for its GPUs too.
_SAME = {
    "xid": ("gpu_off_bus", "xid_burst"),
    "xid_repeated": ("xid_burst",),
    "ecc": ("ecc_growth",),
    "row": ("ecc_growth",),
    "nvlink": ("nvlink_flaps",),
    "thermal": ("plate_degraded", "tray_blocked"),
    "temp": ("plate_degraded", "tray_blocked"),
    "clock": ("plate_degraded", "tray_blocked"),
    "telemetry": ("gpu_off_bus", "node_silent", "node_down"),
    "recovery": ("gpu_off_bus",),
    "leak": ("leak",),
    "psu": ("psu_lost",),
    "link": ("link_down",),
}
_OF_DIAGNOSIS = [r for r in (*rules_gpu.RULES, *rules_node.RULES, *rules_parts.SWITCH, *rules_parts.LINK,
                             *rules_parts.PUMPS, *rules_parts.PSUS) if r.source == DIAGNOSIS]  # fmt: skip
_ECHOES = {r.id for r in _OF_DIAGNOSIS if not r.keys}  # they hear nothing themselves
_RUNS_ON = ("psu_lost",)  # a part fails, and its node runs on: as grave as the diagnosis says


def is_told(evidence: Evidence, told: dict[str, int]) -> bool:
    """Whether the diagnosis tells this already, as gravely as we would.

    `told`: by kind, 0 info, 1 warning, 2 critical.
    """
    rank = 2 if evidence.level >= FAILED and evidence.rule not in _RUNS_ON else 1
    return any(told.get(kind, -1) >= rank for kind in _same(evidence.rule))


def is_over(evidence: Evidence, told: dict[str, int]) -> bool:
    """Whether the diagnosis told this and tells it no more, so that a verdict only keeps it for a while."""
    echo = evidence.source == DIAGNOSIS and evidence.rule in _ECHOES
    return echo and told.keys().isdisjoint(_same(evidence.rule))


def _same(rule: str) -> tuple[str, ...]:
    return (rule, *_SAME.get(rule, _SAME.get(rule.partition("_")[0], ())))
