"""Jobs on Kubernetes: pods with GPUs, gathered by the label of what made them, as starts and ends.

A job holds the nodes that its pods are bound to. Ids come from the uids of makers and pods, so that a
restart repeats them. Pure; knows pods, not how they were heard of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, get_args

from connectors.jobs import StartIds
from connectors.kubernetes.nodes import Hosts
from connectors.kubernetes.objects import GPU_RESOURCES, KubernetesPod, gpu_test
from twin.telemetry import JobEnded, JobKind, JobStarted

# The widest comes first: pods of a JobSet bear the labels of its jobs as well.
# source: the labels that jobset, training-operator, KubeRay, LeaderWorkerSet, Volcano and batch/v1 set
JOB_LABELS = ("jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "ray.io/cluster",
              "leaderworkerset.sigs.k8s.io/name", "volcano.sh/job-name", "batch.kubernetes.io/job-name",
              "job-name")  # fmt: skip
UID_LABELS = ("jobset.sigs.k8s.io/jobset-uid",)
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KIND_LABEL = "racktwin.io/kind"  # what a pod says of its job
MAX_PODS = 1_000_000
APART = ("ReplicaSet", "StatefulSet")  # whose pods go on without each other
_KINDS: tuple[JobKind, ...] = get_args(JobKind)


class _Held(NamedTuple):
    """A pod that is bound to a node, as far as it is kept. `moves`: a drain of its node waits for it."""

    key: str
    version: str
    uid: str
    host: str
    group: str  # its job as `namespace:name`; "" without GPUs
    run: str  # uid of what made it
    phase: str
    moves: bool
    kind: JobKind
    priority: int
    account: str
    apart: bool
    time_limit_s: float

    @property
    def works(self) -> bool:
        """True if it holds its node's GPUs."""
        return self.phase not in ("Succeeded", "Failed")


class _Run(NamedTuple):
    """A job as it was last told of. `told`: some of its nodes are of the site."""

    id: str
    runs: frozenset[str]
    hosts: frozenset[str]
    told: bool


class PodBook:
    """The pods of a cluster, which nodes they keep busy, and what has happened to jobs since it was asked."""

    def __init__(
        self, hosts: Hosts, cluster: str = "cluster", *, job_labels: Iterable[str] = (),
        gpu_resources: Iterable[str] = (), kinds: Mapping[str, JobKind] | None = None,
    ) -> None:  # fmt: skip
        self._hosts, self.cluster = hosts, cluster
        self._labels = (*job_labels, *JOB_LABELS)
        self._is_gpu = gpu_test((*gpu_resources, *GPU_RESOURCES))
        self._kinds = kinds or {}
        self._pods: dict[str, _Held] = {}
        self._groups: dict[str, dict[str, _Held]] = {}
        self._busy: dict[str, int] = {}  # host -> pods that a drain waits for
        self.turned: dict[str, None] = {}  # hosts that became busy or idle; the caller clears it
        self._touched: dict[str, None] = {}
        self._told: dict[str, _Run] = {}
        self._ids = StartIds()
        self._ends: dict[str, str] = {}  # group -> phase of the pod that left last
        self.refused = 0  # pods beyond MAX_PODS

    def busy(self, host: str) -> bool:
        """True if pods are there that a drain moves away."""
        return self._busy.get(host, 0) > 0

    def keep(self, keys: Collection[str]) -> None:
        """There are no other pods than these."""
        for key in [k for k in self._pods if k not in keys]:
            self.remove(key)

    def take(self, pods: Iterable[KubernetesPod]) -> None:
        """These are all pods that there are."""
        found = {p.key: p for p in pods}
        self.keep(found)
        for pod in found.values():
            self.put(pod)

    def put(self, pod: KubernetesPod) -> None:
        """A pod is new, or has changed."""
        was = self._pods.get(pod.key)
        version = pod.metadata.resource_version
        if was is not None and version and was.version == version:
            return
        held = self._held(pod) if pod.spec.node_name else None
        if held is not None and was is not None and held[2:] == was[2:]:
            self._pods[held.key] = held  # it only has another version
            if held.group:
                self._groups[held.group][held.key] = held
            return
        if was is not None:
            self.remove(pod.key)
        if held is None:
            return
        if len(self._pods) >= MAX_PODS:
            self.refused += 1
            return
        self._pods[held.key] = held
        if held.moves:
            before = self._busy.get(held.host, 0)
            self._busy[held.host] = before + 1
            if not before:
                self.turned[held.host] = None
        if held.group:
            self._groups.setdefault(held.group, {})[held.key] = held
            self._touched[held.group] = None

    def remove(self, key: str) -> None:
        """A pod is gone."""
        held = self._pods.pop(key, None)
        if held is None:
            return
        if held.moves:
            left = self._busy[held.host] - 1
            if left:
                self._busy[held.host] = left
            else:
                del self._busy[held.host]
                self.turned[held.host] = None
        if held.group:
            members = self._groups[held.group]
            del members[key]
            self._ends[held.group] = held.phase
            self._touched[held.group] = None
            if not members:
                del self._groups[held.group]

    def _held(self, pod: KubernetesPod) -> _Held:
        meta, labels = pod.metadata, pod.metadata.labels or {}
        owner, course = meta.owner, pod.course
        named = next((name for label in self._labels if (name := labels.get(label))), "")
        group = ""
        if course != "stays" and pod.holds_gpus(self._is_gpu):
            # a label's name, else the maker's or, without one, the pod's own
            own = f"{owner.kind.lower()}.{owner.name}" if owner else f"pod.{meta.name}"
            group = f"{meta.namespace}:{named or own}"
        asked = labels.get(KIND_LABEL)
        kind = next((k for k in _KINDS if k == asked), self._kinds.get(meta.namespace, "unknown"))
        return _Held(
            pod.key, meta.resource_version, meta.uid, pod.spec.node_name or "", group,
            next((u for label in UID_LABELS if (u := labels.get(label))), owner.uid if owner else meta.uid),
            pod.status.phase or "", course in ("leaving", "bare", "evict"), kind,
            max(-(2**31), min(pod.spec.priority or 0, 2**31 - 1)), labels.get(QUEUE_LABEL, "")[:100],
            not named and owner is not None and owner.kind in APART,
            max(0.0, pod.spec.active_deadline_seconds or 0.0),
        )  # fmt: skip

    def name_of(self, group: str) -> str:
        """A job's name in the twin."""
        return f"k8s:{self.cluster}:{group}"

    def changes(self, known: Mapping[str, Collection[str]] | None = None) -> list[JobStarted | JobEnded]:
        """Starts and ends of jobs since the last call. `known` are the nodes of each job that the twin takes
        to be running: to be given once, when all pods are here."""
        known = known or {}
        ended: list[JobStarted | JobEnded] = []
        started: list[JobStarted | JobEnded] = []
        for group in self._touched:
            working = [h for h in self._groups.get(group, {}).values() if h.works]
            was = self._told.get(group)
            runs = frozenset(h.run for h in working)
            if was is not None and not (runs & was.runs):
                del self._told[group]
                if was.told:
                    ended.append(
                        JobEnded(id=f"{was.id}:end", job=self.name_of(group), reason=self._reason(group))
                    )
            event = self._start_of(group, working, known.get(self.name_of(group)))
            if event is not None:
                started.append(event)
        self._touched.clear()
        self._ends = {g: p for g, p in self._ends.items() if g in self._told}
        mine = {self.name_of(group) for group in self._told} | {event.job for event in ended}
        for name in known:
            if name.startswith(self.name_of("")) and name not in mine:
                ended.append(JobEnded(job=name, reason="ended while nobody watched"))
        return ended + started

    def _reason(self, group: str) -> str:
        """Why a job has no working pod any more, by those that are left of it, else by the last to go."""
        phases = {h.phase for h in self._groups.get(group, {}).values()} or {self._ends.get(group, "")}
        if "Failed" in phases:
            return "failed"
        return "completed" if "Succeeded" in phases else "its pods left"

    def _start_of(self, group: str, working: list[_Held], known: Collection[str] | None) -> JobStarted | None:
        if not working:
            return None
        hosts = frozenset(h.host for h in working)
        runs = frozenset(h.run for h in working)
        was = self._told.get(group)
        if was is not None:
            # Of a job that completes, one node after the other is done: it ends when it has left all.
            over = any(h.phase == "Succeeded" for h in self._groups[group].values())
            if hosts == was.hosts or (over and hosts < was.hosts):
                return None
        nodes = [self._hosts.name(e) for h in sorted(hosts) if (e := self._hosts.entity_of(h)) is not None]
        # A pod that is made anew makes another id, be it on the same node: an id counts once.
        members = sorted(f"{h.host} {h.uid}" for h in working)
        digest = hashlib.blake2b("\n".join(members).encode(), digest_size=6).hexdigest()
        first = f"k8s:{self.cluster}:{group}:{min(runs)}:{digest}"
        moved = was is None and known is not None and set(known) != set(nodes)
        first = self._ids.use_anew(first) if moved else self._ids.use(first)
        told = bool(nodes) or (was is not None and was.told)
        self._told[group] = _Run(first, runs | (was.runs if was else frozenset()), hosts, told)
        if not told:
            return None
        kinds = {h.kind for h in working}
        return JobStarted(
            id=first,
            job=self.name_of(group),
            nodes=tuple(dict.fromkeys(nodes)),
            kind=kinds.pop() if len(kinds) == 1 else "unknown",
            coupling="independent" if all(h.apart for h in working) else "synchronous",
            priority=max(h.priority for h in working),
            tenant=group.partition(":")[0],
            account=next((h.account for h in working if h.account), ""),
            time_limit_s=max(h.time_limit_s for h in working),
        )
