"""Scale-down: a node that the cluster autoscaler takes away, by its own taint; an annotation forbids it.

A node that is gone counts as asleep only if it bore the taint when it was last heard of: any other that
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
    """True if the autoscaler has begun to take a node away."""
    return any(t.get("key") == DELETING for t in node.spec.taints or ())


def standby_plan(node: KubernetesNode, standby: int, epoch: int) -> Plan:
    """Changes that keep a node (READY) or let the autoscaler have it (ASLEEP), as ordered in this epoch."""
    marks = node.metadata.annotations or {}
    refusal = is_deposed(marks, STANDBY_EPOCH, epoch)
    if refusal:
        return Plan(None, refusal)
    there, marked = marks.get(KEEP), OURS in marks
    others = there is not None and not (marked and there == TRUE)
    gone: dict[str, Any] = {KEEP: None} if there is not None else {}
    if standby == ASLEEP:
        if others and there == TRUE:
            return Plan(None, f"others keep it: the annotation {KEEP} is not racktwin's, and stays")
        if not marked:
            return Plan(None)
        return Plan(
            merge_patch(node, {**({} if others else gone), OURS: None, STANDBY_EPOCH: str(epoch)}, {})
        )
    if others:
        why = f"others set the annotation {KEEP} to {str(there)[:40]!r}, which stays; expected {TRUE!r}"
        return Plan(None, "" if there == TRUE else why)
    if there == TRUE and marks.get(STANDBY_EPOCH) == str(epoch):
        return Plan(None)
    return Plan(merge_patch(node, {KEEP: TRUE, OURS: "ready", STANDBY_EPOCH: str(epoch)}, {}))


class ScaleDowns:
    """Nodes that the autoscaler took away, by entity, until they are Ready again."""

    def __init__(self) -> None:
        self.away: set[int] = set()

    def take(self, entity: int, node: KubernetesNode, there: bool) -> None:
        """A node as it is, or as it was last where the cluster has it no more."""
        if not there and is_leaving(node):
            self.away.add(entity)
        elif not there or _is_ready(node):
            self.away.discard(entity)

    def standby_of(self, entity: int, node: KubernetesNode | None, busy: bool) -> int | None:
        """READY, WAKING or ASLEEP; None where that is unknown. `busy`: pods are there that a drain moves.

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
