"""Levels and placement of Kubernetes nodes: read from the fields of a node, and set by a patch.

A level is `spec.unschedulable`, our taint, and annotations that mark what is ours: what other people cordoned
stays theirs, and a daemon of an earlier epoch changes nothing. Placement is a taint of its own, so that
neither touches the other. Pure functions; `Hosts` remembers names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from connectors.kubernetes.objects import KubernetesNode
from connectors.slurm import expand_names, find_node
from twin.catalogue import TABLES
from twin.telemetry import NamedSite

SIGNAL, OWNER = "service_level_state", "service_owner_state"
LEVELS = TABLES["node"].by_name[SIGNAL].states
IN_SERVICE, CORDONED, DRAINING, DRAINED, REPLACE = range(5)
NOBODY, OURS, OTHERS = range(3)  # of service_owner_state
TAINT, EFFECT = "racktwin.io/out", "NoSchedule"
LEVEL, EPOCH, COMMAND = "racktwin.io/level", "racktwin.io/epoch", "racktwin.io/command"
REASON, FOUND = "racktwin.io/reason", "racktwin.io/found"
CONDITION = "RacktwinHealth"
PLACEMENT = "placement_state"
PLACEMENTS = TABLES["node"].by_name[PLACEMENT].states
USUAL, LAST, KEPT = range(3)
PLACEMENT_TAINT, PLACEMENT_EPOCH = "racktwin.io/placement", "racktwin.io/placement-epoch"
_EFFECTS = {LAST: "PreferNoSchedule", KEPT: "NoSchedule"}
MAX_REASON, MAX_STRANGERS = 250, 1000
_WORDS = ("InService", "Cordoned", "Draining", "Drained", "Replace")


class NodeCommand(NamedTuple):
    """A command on one node. `value`: of LEVELS or PLACEMENTS, by number."""

    value: int
    epoch: int
    command: int
    reason: str

    @property
    def id(self) -> str:
        """Return the id in acknowledgements."""
        return f"{self.epoch}-{self.command}"


class Plan(NamedTuple):
    """Way to carry out an order: a merge patch (None: nothing to change), or the reason for none."""

    patch: dict[str, Any] | None
    refusal: str = ""


def level_of(node: KubernetesNode, busy: bool) -> int | None:
    """Return the level of a node; None if unknown. `busy`: it has pods that a drain moves.

    A drain is over when nothing is left to move. A node that is open but not ready has no level that we know.
    """
    marks, ours = node.metadata.annotations or {}, our_taint(node)
    closed = bool(node.spec.unschedulable) or ours is not None
    if not closed:
        ready = node.condition("Ready")
        return IN_SERVICE if ready is not None and ready.status == "True" else None
    if LEVEL in marks:
        if marks[LEVEL] not in LEVELS:
            return None
        level = max(LEVELS.index(marks[LEVEL]), CORDONED)
    elif ours is not None:
        level = REPLACE if ours == "replace" else DRAINED
    else:
        return CORDONED  # by others: whether they want it empty they do not say
    return min(level, DRAINING) if busy else level


def owner_of(node: KubernetesNode, level: int | None) -> int | None:
    """Return the owner that has a node with this level out of service, by its marks; None if the level is
    unknown."""
    if level is None:
        return None
    if level == IN_SERVICE:
        return NOBODY
    return OURS if LEVEL in (node.metadata.annotations or {}) or our_taint(node) is not None else OTHERS


def our_taint(node: KubernetesNode) -> str | None:
    """Return the value of racktwin's taint; None without one."""
    taint = next((t for t in node.spec.taints or () if t.get("key") == TAINT), None)
    return None if taint is None else str(taint.get("value") or "")


def plan(node: KubernetesNode, order: NodeCommand) -> Plan:
    """Return the changes for an order on a node. Refuses nodes that others hold or a later daemon has
    settled."""
    marks = node.metadata.annotations or {}
    refusal = is_deposed(marks, EPOCH, order.epoch)
    if refusal:
        return Plan(None, refusal)
    closed = bool(node.spec.unschedulable)
    if order.value == IN_SERVICE:
        if LEVEL not in marks and our_taint(node) is None:
            why = (
                "cordoned by somebody else: racktwin does not uncordon it; run `kubectl uncordon` to free it"
            )
            return Plan(None, why if closed else "")
        return Plan(_release(node, order, marks))
    if marks.get(COMMAND) == order.id and LEVEL in marks and not closed:
        return Plan(
            None, "resumed by others: somebody made it schedulable after this command; racktwin leaves it so"
        )
    return Plan(_withdrawal(node, order, marks))


def is_deposed(marks: Mapping[str, str], key: str, epoch: int) -> str:
    """Return the reason why a daemon of this epoch may not command, from annotation `key`; "" if it may."""
    there = marks.get(key, "0")
    if not (there.isascii() and there.isdigit() and len(there) <= 18):
        return f"annotation {key} is {there[:40]!r}; expected a number: remove it"
    if int(there) > epoch:
        return f"a daemon of the newer epoch {there} commands it; this daemon has epoch {epoch}"
    return ""


def _release(node: KubernetesNode, order: NodeCommand, marks: Mapping[str, str]) -> dict[str, Any]:
    """Remove racktwin's marks; the epoch stays, so that a deposed daemon cannot withdraw the node again."""
    spec: dict[str, Any] = {}
    if node.spec.unschedulable and LEVEL in marks and marks.get(FOUND) != "cordoned":
        spec["unschedulable"] = None
    if our_taint(node) is not None:
        spec["taints"] = [t for t in node.spec.taints or () if t.get("key") != TAINT] or None
    gone: dict[str, str | None] = {k: None for k in (LEVEL, COMMAND, REASON, FOUND) if k in marks}
    return merge_patch(node, {**gone, EPOCH: str(order.epoch)}, spec)


def _withdrawal(node: KubernetesNode, order: NodeCommand, marks: Mapping[str, str]) -> dict[str, Any] | None:
    """Return cordon, taint and mark; None if they are already set."""
    wanted: dict[str, str | None] = {
        LEVEL: LEVELS[order.value],
        EPOCH: str(order.epoch),
        COMMAND: order.id,
        REASON: order.reason[:MAX_REASON],
        FOUND: marks.get(FOUND) or ("cordoned" if node.spec.unschedulable else "open"),
    }
    if not order.reason:
        wanted[REASON] = marks.get(REASON, "")
    spec: dict[str, Any] = {} if node.spec.unschedulable else {"unschedulable": True}
    value = {DRAINING: "draining", DRAINED: "draining", REPLACE: "replace"}.get(order.value)
    if our_taint(node) != value:
        others = [t for t in node.spec.taints or () if t.get("key") != TAINT]
        ours = [] if value is None else [{"key": TAINT, "value": value, "effect": EFFECT}]
        spec["taints"] = others + ours or None
    changed = {k: v for k, v in wanted.items() if marks.get(k) != v}
    return merge_patch(node, changed, spec) if changed or spec else None


def merge_patch(
    node: KubernetesNode, annotations: Mapping[str, str | None], spec: dict[str, Any]
) -> dict[str, Any]:
    """Return a merge patch that the server refuses if the node has changed since it was read."""
    meta: dict[str, Any] = {"annotations": dict(annotations)}
    if node.metadata.resource_version:
        meta["resourceVersion"] = node.metadata.resource_version
    return {"metadata": meta, **({"spec": spec} if spec else {})}


def placement_of(node: KubernetesNode) -> int | None:
    """Return USUAL, LAST or KEPT, by racktwin's taint; None for a foreign value. Readiness does not
    matter."""
    ours = [t for t in node.spec.taints or () if t.get("key") == PLACEMENT_TAINT]
    if not ours:
        return USUAL
    if len(ours) > 1:  # one key may come with several effects
        return None
    value, effect = ours[0].get("value"), ours[0].get("effect")
    return next((p for p, e in _EFFECTS.items() if (PLACEMENTS[p], e) == (value, effect)), None)


def placement_plan(node: KubernetesNode, placement: int, epoch: int) -> Plan:
    """Return the changes that give a node this placement, as ordered in this epoch.

    A node that is marked already gets the epoch, so that a deposed daemon cannot free it. One that has no
    mark of ours and shall have none is left alone: nothing is written on a cluster at each takeover.
    """
    marks = node.metadata.annotations or {}
    refusal = is_deposed(marks, PLACEMENT_EPOCH, epoch)
    if refusal:
        return Plan(None, refusal)
    there = placement_of(node)
    if there == placement and (placement == USUAL or marks.get(PLACEMENT_EPOCH) == str(epoch)):
        return Plan(None)
    spec: dict[str, Any] = {}
    if there != placement:
        ours = {"key": PLACEMENT_TAINT, "value": PLACEMENTS[placement], "effect": _EFFECTS.get(placement)}
        others = [t for t in node.spec.taints or () if t.get("key") != PLACEMENT_TAINT]
        spec["taints"] = others + ([] if placement == USUAL else [ours]) or None
    return Plan(merge_patch(node, {PLACEMENT_EPOCH: str(epoch)}, spec))


def condition_patch(node: KubernetesNode, level: int, reason: str, now: str) -> dict[str, Any] | None:
    """Return a strategic patch of the node's status with racktwin's condition, True in service; None if it
    is already set.

    Conditions are merged by type, so that those of the node's own agent stay.
    """
    status = "True" if level == IN_SERVICE else "False"
    message = reason[:MAX_REASON] or f"racktwin: {LEVELS[level]}"
    was = node.condition(CONDITION)
    if was is not None and (was.status, was.reason, was.message) == (status, _WORDS[level], message):
        return None
    if was is None and level == IN_SERVICE:
        return None  # of a node that was never withdrawn nothing is said
    condition: dict[str, Any] = {
        "type": CONDITION,
        "status": status,
        "reason": _WORDS[level],
        "message": message,
        "lastHeartbeatTime": now,
    }
    if was is None or was.status != status:
        condition["lastTransitionTime"] = now
    return {"status": {"conditions": [condition]}}


class Hosts:
    """Map of cluster nodes to entities: by the names of the configuration, else by the node's own name.

    A node that bears the name of a rack of one node is that node. The source fills it, the sink reads it.
    """

    def __init__(self, site: NamedSite, node_names: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError for names that are no host lists."""
        self._site = site
        self._names = expand_names(dict(node_names or {}), "$.kubernetes.node_names")
        self._entities: dict[str, int] = {}
        self._hosts: dict[int, str] = {}
        self._others: dict[int, dict[str, None]] = {}  # hosts of an entity that has one already
        self.listed = False
        self.strangers: dict[str, None] = {}  # the caller clears it
        self.faults: list[str] = []  # likewise

    def entity_of(self, host: str) -> int | None:
        """Return the node of a host."""
        known = self._entities.get(host)
        if known is not None:
            return known
        entity = find_node(self._site, self._names.get(host, host))
        if entity is None:
            if len(self.strangers) < MAX_STRANGERS:
                self.strangers[host] = None
            return None
        self._entities[host] = entity
        return entity

    def host_of(self, entity: int) -> str | None:
        """Return the name in the cluster; None while it has no such node."""
        return self._hosts.get(entity)

    def name(self, entity: int) -> str:
        """Return the full path of a node."""
        return self._site.name("node", entity)

    def take(self, hosts: Iterable[str]) -> None:
        """Take the complete list of the cluster's nodes."""
        self._hosts, self._others = {}, {}
        for host in hosts:
            self.add(host)
        self.listed = True

    def add(self, host: str) -> None:
        """Add a node of the cluster. If two match the same entity, the first one counts."""
        entity = self.entity_of(host)
        if entity is None or self._hosts.setdefault(entity, host) == host:
            return
        self._others.setdefault(entity, {})[host] = None
        if len(self.faults) < 100:
            self.faults.append(
                f"{host} and {self._hosts[entity]} are both {self.name(entity)}; see kubernetes.node_names"
            )

    def remove(self, host: str) -> None:
        """Remove a node; another one of the same entity takes its place."""
        entity = self.entity_of(host)
        if entity is None:
            return
        others = self._others.get(entity, {})
        others.pop(host, None)
        if self._hosts.get(entity) == host:
            del self._hosts[entity]
            if others:
                self._hosts[entity] = next(iter(others))
                del others[self._hosts[entity]]
