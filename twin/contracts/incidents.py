"""Incident: one problem of the same entities, even if its finding ends and begins again.

An incident is reported once. A finding that returns soon after its end is not reported again, unless it is
more severe or concerns other entities. The alarm book, the health alarms and the count of false alarms share
this rule.
"""

from __future__ import annotations

from collections.abc import Collection

from twin.catalogue import NS
from twin.contracts.contracts import Finding

# After the end of a finding: so long the same is the same incident. What is critical may have got out of
# hand again, so that people are notified sooner; source: estimate
SAME_S, SAME_CRITICAL_S = 3600.0, 600.0
GRAVITY = {"info": 0, "warning": 1, "critical": 2}


def goes_on(finding: Finding, entities: Collection[str], gravest: str, ended_ns: int, now_ns: int) -> bool:
    """Return True if a finding that begins now is of the incident that ended then.

    `entities` are those of the incident, and `gravest` its gravest severity.
    """
    gravity = GRAVITY.get(finding.severity, 1)
    within_s = SAME_CRITICAL_S if gravity >= GRAVITY["critical"] else SAME_S
    same = not {*finding.entities}.isdisjoint(entities) or not (finding.entities or entities)
    return same and gravity <= GRAVITY.get(gravest, 1) and now_ns - ended_ns <= within_s * NS


def trouble_of(identity: str) -> str:
    """The trouble that a finding is of: readings beyond a guard or beyond a limit are one trouble."""
    return identity.rpartition("/")[0] if identity.startswith("beyond/") else identity
