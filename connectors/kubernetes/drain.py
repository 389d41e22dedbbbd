"""Drain of a node: evictions of its pods, as their disruption budgets allow.

Pods are never deleted: an eviction that a budget refuses (429) is asked for again later. Pods that belong to
the node stay, and so do pods that no controller would make anew, unless that is allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from connectors.backoff import Backoff
from connectors.kubernetes.client import ApiError, Away, KubernetesClient
from connectors.kubernetes.objects import KubernetesPod, read_items
from twin.catalogue import BadMessage

AT_ONCE = 8  # evictions of one node that are asked for at the same time
PER_ROUND = 50  # evictions of one round
# source: estimate; a budget frees as pods become ready elsewhere, which takes tens of seconds
FIRST_S, LONGEST_S = 5.0, 60.0
MAX_NAMED = 3


class RemainingPods(NamedTuple):
    """Pods on a node: `waiting` for their budgets because of `why`; `bare` pods have no controller."""

    leaving: int
    waiting: tuple[str, ...]
    bare: tuple[str, ...]
    staying: int
    unread: int
    why: str

    @property
    def empty(self) -> bool:
        """Return True if no pod is left that a drain moves."""
        return not (self.leaving or self.waiting or self.bare or self.unread)

    @property
    def stuck(self) -> bool:
        """Return True if only an operator can continue the drain."""
        return bool(self.bare) and not (self.leaving or self.waiting or self.unread)

    def summary(self, evicted: int) -> str:
        """Return one sentence for the acknowledgement."""
        if self.empty:
            stay = f"; pods that belong to the node and stay: {self.staying}" if self.staying else ""
            return f"no pod is left; evicted: {evicted}{stay}"
        parts = []
        if self.leaving:
            parts.append("1 pod is leaving" if self.leaving == 1 else f"{self.leaving} pods are leaving")
        if self.waiting:
            parts.append(f"{_named(self.waiting)} must wait ({self.why})")
        if self.unread:
            parts.append(f"{self.unread} pods cannot be read")
        if self.bare:
            parts.append(
                f"{_named(self.bare)} would be lost, since no controller recreates them: delete "
                "them by hand, "
                "or set kubernetes.evict_bare_pods"
            )
        return "; ".join(parts)


def _named(keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return ", ".join(keys[:MAX_NAMED]) + more


@dataclass(slots=True)
class RefusedEviction:
    """An eviction that a budget refused; it is retried at `due_s` (monotonic)."""

    due_s: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))


@dataclass(slots=True)
class Drain:
    """Progress of a drain: evicted pods, and retry times of refused ones."""

    evicted: int = 0
    why: str = "there are many"
    refused: dict[str, RefusedEviction] = field(default_factory=dict)  # by uid of the pod


async def evict_due(
    client: KubernetesClient, host: str, drain: Drain, bare_too: bool, wanted: Callable[[], bool]
) -> RemainingPods:
    """List the pods of a node and evict those that are due, while the drain is `wanted`.

    Raises ApiError, Away.
    """
    path, params = "/api/v1/pods", {"fieldSelector": f"spec.nodeName={host}"}
    pods: list[KubernetesPod] = []
    unread = 0
    async for page in client.pages(path, params):
        try:
            some, bad = read_items(page, KubernetesPod)
        except BadMessage as error:
            raise Away(f"{path}: {error}") from error
        # A server that does not know the selector would give the pods of all nodes.
        pods += [p for p in some if p.spec.node_name == host]
        unread += sum(fault.host in (host, None) for fault in bad)
    kinds: dict[str, list[KubernetesPod]] = {"stays": [], "over": [], "leaving": [], "bare": [], "evict": []}
    for pod in pods:
        kinds["evict" if bare_too and pod.on_drain == "bare" else pod.on_drain].append(pod)
    uids = {p.metadata.uid for p in kinds["evict"]}
    drain.refused = {uid: refused for uid, refused in drain.refused.items() if uid in uids}
    now_s, first = time.monotonic(), RefusedEviction()
    due = [p for p in kinds["evict"] if drain.refused.get(p.metadata.uid, first).due_s <= now_s]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(pod: KubernetesPod) -> str:
        async with gate:
            return await _evict(client, pod) if wanted() else "no longer wanted"

    answers = await asyncio.gather(*(one(p) for p in due[:PER_ROUND]), return_exceptions=True)
    waiting = [p.key for p in kinds["evict"]]
    for pod, answer in zip(due, answers, strict=False):
        if isinstance(answer, BaseException):
            continue
        if answer:
            refused = drain.refused.setdefault(pod.metadata.uid, RefusedEviction())
            refused.due_s = now_s + refused.backoff.next_s()
            drain.why = answer
        else:
            drain.evicted += 1
            waiting.remove(pod.key)
    for answer in answers:  # after all the others were noted
        if isinstance(answer, BaseException):
            raise answer
    leaving = len(kinds["leaving"]) + len(kinds["evict"]) - len(waiting)
    bare = tuple(p.key for p in kinds["bare"])
    return RemainingPods(leaving, tuple(waiting), bare, len(kinds["stays"]), unread, drain.why)


async def _evict(client: KubernetesClient, pod: KubernetesPod) -> str:
    """Evict a pod; returns the reason if it stays for now, or "". Raises ApiError if forbidden."""
    meta = pod.metadata
    path = f"/api/v1/namespaces/{quote(meta.namespace, safe='')}/pods/{quote(meta.name, safe='')}/eviction"
    options = {"apiVersion": "v1", "kind": "DeleteOptions"}
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": meta.name, "namespace": meta.namespace},
        # Of the same name there may be another by now, which need not be here.
        "deleteOptions": {**options, **({"preconditions": {"uid": meta.uid}} if meta.uid else {})},
    }
    try:
        await client.post(path, body)
    except ApiError as error:
        if error.status == 404:
            return ""
        # 409: another pod by now; 5xx: among others, several budgets for one pod
        if error.status in (409, 429) or error.status >= 500 or "being terminated" in error.message:
            return (error.message or error.reason)[:120]
        raise
    return ""
