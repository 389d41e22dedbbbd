"""Demand in Kubernetes: GPUs of bound pods, of pending pods, and of workloads that Kueue holds back.

A pod that is bound to a node holds its GPUs. One that is not is pending, or held while a gate closes it.
A workload that Kueue has not admitted is pending; its own pods, if there are any, are not counted then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from connectors.demand import JobClaim, Stock
from connectors.kubernetes.jobs import MAX_PODS, QUEUE_LABEL, PodBook
from connectors.kubernetes.nodes import IN_SERVICE, KEPT
from connectors.kubernetes.objects import (
    KubernetesNode,
    KubernetesPod,
    KueueQueue,
    KueueWorkload,
    PodSpec,
    WorkloadSpec,
    count_of,
    instant_s,
)

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/workloads"
QUEUES = "/apis/kueue.x-k8s.io/v1beta1/localqueues"
ADMISSION = "kueue.x-k8s.io/admission"  # the gate by which Kueue holds pods
OVER = ("Finished", "DeactivationTarget")


class _Rank(NamedTuple):
    """A priority, and the name of its class where it has one."""

    names: tuple[str, ...]
    number: int

    @classmethod
    def of(cls, spec: PodSpec | WorkloadSpec) -> _Rank:
        """Return the rank of an object, as Kubernetes or Kueue resolved it."""
        name = (spec.priority_class_name or "")[:253]
        return cls((name,) if name else (), spec.priority or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PodClaim:
    """A pod with GPUs. `host`: where it is bound; `gated`: Kueue has not admitted it; `maker`: a uid."""

    group: str
    state: Literal["running", "pending", "held"]
    gpus: int
    host: str
    queue: str
    limit_s: float
    since_s: float
    gated: bool
    maker: str
    rank: _Rank


class PodDemand:
    """Pods with GPUs and workloads of Kueue that count. `book` groups pods into jobs."""

    def __init__(self, book: PodBook) -> None:
        self._book = book
        self._pods: dict[str, _PodClaim] = {}
        self._groups: dict[str, dict[str, _PodClaim]] = {}
        self._workloads: dict[str, JobClaim] = {}
        # Of what workloads stand for, by its uid, the rank by each of them: its pods have that of the first
        self._ranks: dict[str, dict[str, _Rank]] = {}
        self._stands_for: dict[str, tuple[str, _Rank]] = {}  # workload -> that uid, and its rank
        self._used: dict[str, int] = {}  # host -> GPUs of pods that are bound to it
        self.queues: dict[str, str] = {}  # local queues of Kueue: key -> name
        self.changed = True  # since the caller last cleared it

    def keep(self, keys: Collection[str]) -> None:
        """Keep only these pods."""
        for key in [k for k in self._pods if k not in keys]:
            self.remove(key)

    def put(self, pod: KubernetesPod) -> None:
        """Add or change a pod."""
        claim = self._claim_of(pod)
        if claim == self._pods.get(pod.key):
            return
        self.remove(pod.key)
        if claim is None or len(self._pods) >= MAX_PODS:
            return
        self._pods[pod.key] = claim
        self._groups.setdefault(claim.group, {})[pod.key] = claim
        if claim.host:
            self._used[claim.host] = self._used.get(claim.host, 0) + claim.gpus
        self.changed = True

    def remove(self, key: str) -> None:
        """Remove a pod."""
        claim = self._pods.pop(key, None)
        if claim is None:
            return
        members = self._groups[claim.group]
        del members[key]
        if not members:
            del self._groups[claim.group]
        if claim.host:
            self._used[claim.host] -= claim.gpus
            if not self._used[claim.host]:
                del self._used[claim.host]
        self.changed = True

    def put_workload(self, workload: KueueWorkload, there: bool = True) -> None:
        """Add, change or remove a workload."""
        key = workload.metadata.key
        claim = self._waiting(workload) if there else None
        maker = workload.metadata.owner
        before = self._stands_for.pop(key, None)
        if before is not None:
            del self._ranks[before[0]][key]
            if not self._ranks[before[0]]:
                del self._ranks[before[0]]
        now = (maker.uid, _Rank.of(workload.spec)) if there and maker and maker.uid else None
        if now is not None:
            self._stands_for[key] = now
            self._ranks.setdefault(now[0], {})[key] = now[1]
        self.changed |= now != before
        if claim != self._workloads.get(key):
            self._workloads.pop(key, None)
            if claim is not None:
                self._workloads[key] = claim
            self.changed = True

    def keep_workloads(self, workloads: Iterable[KueueWorkload]) -> None:
        """Keep only these workloads."""
        self._workloads.clear()
        self._ranks.clear()
        self._stands_for.clear()
        for workload in workloads:
            self.put_workload(workload)
        self.changed = True

    def put_queue(self, queue: KueueQueue, there: bool = True) -> None:
        """Add or remove a local queue."""
        self.queues.pop(queue.metadata.key, None)
        if there:
            self.queues[queue.metadata.key] = queue.metadata.name
        self.changed = True

    def claims(self, kueue: bool) -> list[JobClaim]:
        """Return the claims of all jobs. `kueue`: workloads are read, so gated pods belong to them."""
        out = list(self._workloads.values()) if kueue else []
        for group, members in self._groups.items():
            pods = [p for p in members.values() if not (kueue and p.gated)]
            namespace, jobs = group.partition(":")[0], 1
            own = next((p.queue for p in pods if p.queue), "")  # of a pod that names none
            # a job counts once, as what most of it is not waiting for: running before pending before held
            for state in ("running", "pending", "held"):
                alike: dict[tuple[str, _Rank], list[_PodClaim]] = {}
                for pod in pods:
                    if pod.state == state:
                        ranks = self._ranks.get(pod.maker) if kueue else None
                        rank = ranks[min(ranks)] if ranks else pod.rank
                        alike.setdefault((pod.queue or own, rank), []).append(pod)
                for (queue, rank), some in alike.items():
                    out.append(_claim_of(some, (queue,) if queue else (), namespace, rank, jobs))
                    jobs = 0
        return out

    def stock(
        self,
        nodes: Mapping[str, KubernetesNode],
        state_of: Callable[[KubernetesNode], tuple[float | None, float | None, float | None]],
    ) -> Stock:
        """Return the GPUs of nodes without pods. `state_of` gives (level, owner, placement) of a node."""
        idle = spare = out = 0
        for host, node in nodes.items():
            there = (node.status.allocatable or {}).items()
            gpus = sum(count_of(count) for name, count in there if self._book.is_gpu(name))
            free = max(gpus - self._used.get(host, 0), 0)
            level, _, placement = state_of(node) if free else (None, None, None)
            if level != IN_SERVICE:
                out += free
            elif placement == KEPT:
                spare += free
            else:
                idle += free
        return Stock(idle, spare, out)

    def _claim_of(self, pod: KubernetesPod) -> _PodClaim | None:
        bound = bool(pod.spec.node_name)
        if pod.finished or (not bound and pod.metadata.deletion_timestamp is not None):
            return None
        _, group = self._book.group_of(pod)
        if not group:
            return None
        gates = [g.get("name") for g in pod.spec.scheduling_gates or ()]
        return _PodClaim(
            group=group,
            state="running" if bound else "held" if gates else "pending",
            gpus=pod.spec.gpus(self._book.is_gpu),
            host=pod.spec.node_name or "",
            queue=(pod.metadata.labels or {}).get(QUEUE_LABEL, "")[:100],
            limit_s=max(0.0, pod.spec.active_deadline_seconds or 0.0),
            since_s=instant_s(pod.metadata.creation_timestamp),
            gated=ADMISSION in gates,
            maker=self._book.maker_of(pod),
            rank=_Rank.of(pod.spec),
        )

    def _waiting(self, workload: KueueWorkload) -> JobClaim | None:
        """Return the claim of a workload that is not admitted; None for any other, whose pods count."""
        meta, spec = workload.metadata, workload.spec
        if workload.holds("Admitted") or any(workload.holds(kind) for kind in OVER):
            return None
        sets = ((max(p.count or 0, 0), p.template.spec.gpus(self._book.is_gpu)) for p in spec.pod_sets or ())
        gpus = sum(count * each for count, each in sets)
        if not gpus:
            return None
        return JobClaim(
            "held" if spec.active is False else "pending",
            gpus,
            (spec.queue_name,) if spec.queue_name else (),
            (meta.namespace,),
            limit_s=max(0.0, spec.maximum_execution_time_seconds or 0.0),
            since_s=instant_s(meta.creation_timestamp),
            priorities=(rank := _Rank.of(spec)).names,
            priority=rank.number,
        )


def _claim_of(
    pods: Sequence[_PodClaim], queues: tuple[str, ...], namespace: str, rank: _Rank, jobs: int
) -> JobClaim:
    """Return the claim of a job's pods in one state, queue and priority class."""
    return JobClaim(
        pods[0].state,
        sum(p.gpus for p in pods),
        queues,
        (namespace,),
        jobs=jobs,
        limit_s=max(p.limit_s for p in pods),
        since_s=min((p.since_s for p in pods if p.since_s), default=0.0),
        priorities=rank.names,
        priority=rank.number,
    )
