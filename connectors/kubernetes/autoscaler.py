"""Scale-down: the taint by which the cluster autoscaler removes a node, and the annotation that forbids it.

A node that is gone counts as asleep only if it bore the taint when it was last listed: any other that
vanished is unknown. The annotation is ours where our mark stands beside it; what others set stays theirs.
Source of the names: FAQ of kubernetes/autoscaler.
"""

from __future__ import annotations

from typing import Any

from connectors.kubernetes.nodes import Plan, is_deposed, merge_patch
from connectors.kubernetes.objects import KubernetesNode
from twin.contracts import ASLEEP, READY, WAKING

STANDBY = "standby_state"
KEEP, TRUE = "cluster-autoscaler.kubernetes.io/scale-down-disabled", "true"
DELETING = "ToBeDeletedByClusterAutoscaler"
OURS, STANDBY_EPOCH = "racktwin.io/standby", "racktwin.io/standby-epoch"


def is_leaving(node: KubernetesNode) -> bool:
    """Return True if the autoscaler has begun to remove a node."""
    return any(t.get("key") == DELETING for t in node.spec.taints or ())


def standby_plan(node: KubernetesNode, standby: int, epoch: int) -> Plan:
    """Return the changes that keep a node (READY) or release it to the autoscaler (ASLEEP), as ordered in
    this epoch."""
    marks = node.metadata.annotations or {}
    refusal = is_deposed(marks, STANDBY_EPOCH, epoch)
    if refusal:
        return Plan(None, refusal)
    there, marked = marks.get(KEEP), OURS in marks
    others = there is not None and not (marked and there == TRUE)
    gone: dict[str, Any] = {KEEP: None} if there is not None else {}
    if standby == ASLEEP:
        if others and there == TRUE:
            return Plan(None, f"somebody else set the annotation {KEEP}; racktwin does not remove it")
        if not marked:
            return Plan(None)
        return Plan(
            merge_patch(node, {**({} if others else gone), OURS: None, STANDBY_EPOCH: str(epoch)}, {})
        )
    if others:
        why = f"somebody set the annotation {KEEP} to {str(there)[:40]!r}: kept; expected {TRUE!r}"
        return Plan(None, "" if there == TRUE else why)
    if there == TRUE and marks.get(STANDBY_EPOCH) == str(epoch):
        return Plan(None)
    return Plan(merge_patch(node, {KEEP: TRUE, OURS: "ready", STANDBY_EPOCH: str(epoch)}, {}))


class ScaleDowns:
    """Nodes that the autoscaler removed, by entity, until they are Ready again."""

    def __init__(self) -> None:
        self.away: set[int] = set()

    def take(self, entity: int, node: KubernetesNode, there: bool) -> None:
        """Take a node's present state, or its last one if the cluster no longer has it."""
        if not there and is_leaving(node):
            self.away.add(entity)
        elif not there or _is_ready(node):
            self.away.discard(entity)

    def standby_of(self, entity: int, node: KubernetesNode | None, busy: bool) -> int | None:
        """Return READY, WAKING or ASLEEP; None if unknown. `busy`: it has pods that a drain moves.

        A node that is leaving sleeps once it is empty. One that came back and is not Ready yet is waking.
        """
        if node is None:
            return ASLEEP if entity in self.away else None
        if is_leaving(node):
            return None if busy else ASLEEP
        if _is_ready(node):
            return READY
        return WAKING if entity in self.away else None


def _is_ready(node: KubernetesNode) -> bool:
    ready = node.condition("Ready")
    return ready is not None and ready.status == "True"
