"""Jobs on Kubernetes: pods with GPUs, grouped by the label of their controller, as starts and ends.

A job holds the nodes that its pods are bound to. Ids come from the uids of makers and pods, so that a
restart repeats them. Pure; knows pods, not how they were received.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

from connectors.jobs import StartIds
from connectors.kubernetes.nodes import Hosts
from connectors.kubernetes.objects import GPU_RESOURCES, KubernetesPod, gpu_test, instant_s
from twin.catalogue import NS
from twin.telemetry import JobEnded, JobKind, JobStarted

# The widest comes first: pods of a JobSet bear the labels of its jobs as well.
# source: the labels that jobset, training-operator, KubeRay, LeaderWorkerSet, Volcano and batch/v1 set
JOB_LABELS = ("jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "ray.io/cluster",
              "leaderworkerset.sigs.k8s.io/name", "volcano.sh/job-name", "batch.kubernetes.io/job-name",
              "job-name")  # fmt: skip
UID_LABELS = ("jobset.sigs.k8s.io/jobset-uid",)
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KIND_LABEL = "racktwin.io/kind"  # what a pod says of its job
STORAGE_LABEL = "racktwin.io/storage"  # file system of the site that its job saves to
MAX_PODS = 1_000_000
APART = ("ReplicaSet", "StatefulSet")  # whose pods go on without each other
_KINDS: tuple[JobKind, ...] = get_args(JobKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLabels:
    """The labels and resources that turn pods of a `cluster` into jobs.

    `kinds` gives the kind of job of a namespace; the label racktwin.io/kind of a pod comes before it.
    """

    cluster: str = "cluster"
    job_labels: Sequence[str] = ()
    gpu_resources: Sequence[str] = ()
    kinds: Mapping[str, JobKind] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundPod:
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
    storage: str
    apart: bool
    time_limit_s: float
    start_s: float

    @property
    def works(self) -> bool:
        """Return True if it holds its node's GPUs."""
        return self.phase not in ("Succeeded", "Failed")


class _Run(NamedTuple):
    """A job as last reported. `reported`: some of its nodes are of the site."""

    id: str
    runs: frozenset[str]
    hosts: frozenset[str]
    reported: bool


class PodBook:
    """The pods of a cluster, their busy nodes, and the changes of jobs since the last call."""

    def __init__(self, hosts: Hosts, labels: PodLabels) -> None:
        self._hosts, self.cluster, self._kinds = hosts, labels.cluster, labels.kinds
        self._labels = (*labels.job_labels, *JOB_LABELS)
        self.is_gpu = gpu_test((*labels.gpu_resources, *GPU_RESOURCES))
        self._pods: dict[str, _BoundPod] = {}
        self._groups: dict[str, dict[str, _BoundPod]] = {}
        self._busy: dict[str, int] = {}  # host -> pods that a drain waits for
        self.turned: dict[str, None] = {}  # hosts that became busy or idle; the caller clears it
        self._touched: dict[str, None] = {}
        self._runs: dict[str, _Run] = {}
        self._ids = StartIds()
        self._ends: dict[str, str] = {}  # group -> phase of the pod that left last
        self.refused = 0  # pods beyond MAX_PODS

    def busy(self, host: str) -> bool:
        """Return True if a node has pods that a drain moves."""
        return self._busy.get(host, 0) > 0

    def keep(self, keys: Collection[str]) -> None:
        """Keep only these pods."""
        for key in [k for k in self._pods if k not in keys]:
            self.remove(key)

    def take(self, pods: Iterable[KubernetesPod]) -> None:
        """Take the complete list of pods."""
        bound = {p.key: p for p in pods}
        self.keep(bound)
        for pod in bound.values():
            self.put(pod)

    def put(self, pod: KubernetesPod) -> None:
        """Add or change a pod."""
        was = self._pods.get(pod.key)
        version = pod.metadata.resource_version
        if was is not None and version and was.version == version:
            return
        bound = self._bind(pod) if pod.spec.node_name else None
        if bound is not None and was is not None and replace(bound, version=was.version) == was:
            self._pods[bound.key] = bound  # it only has another version
            if bound.group:
                self._groups[bound.group][bound.key] = bound
            return
        if was is not None:
            self.remove(pod.key)
        if bound is None:
            return
        if len(self._pods) >= MAX_PODS:
            self.refused += 1
            return
        self._pods[bound.key] = bound
        if bound.moves:
            before = self._busy.get(bound.host, 0)
            self._busy[bound.host] = before + 1
            if not before:
                self.turned[bound.host] = None
        if bound.group:
            self._groups.setdefault(bound.group, {})[bound.key] = bound
            self._touched[bound.group] = None

    def remove(self, key: str) -> None:
        """Remove a pod."""
        bound = self._pods.pop(key, None)
        if bound is None:
            return
        if bound.moves:
            left = self._busy[bound.host] - 1
            if left:
                self._busy[bound.host] = left
            else:
                del self._busy[bound.host]
                self.turned[bound.host] = None
        if bound.group:
            members = self._groups[bound.group]
            del members[key]
            self._ends[bound.group] = bound.phase
            self._touched[bound.group] = None
            if not members:
                del self._groups[bound.group]

    def group_of(self, pod: KubernetesPod) -> tuple[str, str]:
        """Return (name that a label gives its job, the job as `namespace:name`); "" for a pod without
        GPUs."""
        meta, labels = pod.metadata, pod.metadata.labels or {}
        named = next((name for label in self._labels if (name := labels.get(label))), "")
        if pod.on_drain == "stays" or not pod.holds_gpus(self.is_gpu):
            return named, ""
        # a label's name, else the maker's or, without one, the pod's own
        owner = meta.owner
        own = f"{owner.kind.lower()}.{owner.name}" if owner else f"pod.{meta.name}"
        return named, f"{meta.namespace}:{named or own}"

    def maker_of(self, pod: KubernetesPod) -> str:
        """Return the uid of a pod's owner, or its own."""
        meta, labels = pod.metadata, pod.metadata.labels or {}
        maker = meta.owner.uid if meta.owner else meta.uid
        return next((u for label in UID_LABELS if (u := labels.get(label))), maker)

    def _bind(self, pod: KubernetesPod) -> _BoundPod:
        meta, labels = pod.metadata, pod.metadata.labels or {}
        owner, on_drain = meta.owner, pod.on_drain
        named, group = self.group_of(pod)
        label = labels.get(KIND_LABEL)
        kind = next((k for k in _KINDS if k == label), self._kinds.get(meta.namespace, "unknown"))
        return _BoundPod(
            key=pod.key,
            version=meta.resource_version,
            uid=meta.uid,
            host=pod.spec.node_name or "",
            group=group,
            run=self.maker_of(pod),
            phase=pod.status.phase or "",
            moves=on_drain in ("leaving", "bare", "evict"),
            kind=kind,
            priority=max(-(2**31), min(pod.spec.priority or 0, 2**31 - 1)),
            account=labels.get(QUEUE_LABEL, "")[:100],
            storage=labels.get(STORAGE_LABEL, "")[:100],
            apart=not named and owner is not None and owner.kind in APART,
            time_limit_s=max(0.0, pod.spec.active_deadline_seconds or 0.0),
            start_s=instant_s(pod.status.start_time),
        )

    def name_of(self, group: str) -> str:
        """Return a job's name in the twin."""
        return f"k8s:{self.cluster}:{group}"

    def changes(
        self, known: Mapping[str, Collection[str]] | None = None, whole: bool = True
    ) -> list[JobStarted | JobEnded]:
        """Starts and ends of jobs since the last call. `known` are the nodes of each job that the twin takes
        to be running: to be given once, when all pods are here.

        While the pods are not `whole`, a job without pods has not ended.
        """
        known = known or {}
        ended: list[JobStarted | JobEnded] = []
        started: list[JobStarted | JobEnded] = []
        for group in self._touched:
            working = [h for h in self._groups.get(group, {}).values() if h.works]
            was = self._runs.get(group)
            runs = frozenset(h.run for h in working)
            if was is not None and not (runs & was.runs):
                del self._runs[group]
                if was.reported:
                    ended.append(
                        JobEnded(id=f"{was.id}:end", job=self.name_of(group), reason=self._reason(group))
                    )
            event = self._start_of(group, working, known.get(self.name_of(group)))
            if event is not None:
                started.append(event)
        self._touched.clear()
        self._ends = {g: p for g, p in self._ends.items() if g in self._runs}
        mine = {self.name_of(group) for group in self._runs} | {event.job for event in ended}
        for name in known if whole else ():
            if name.startswith(self.name_of("")) and name not in mine:
                ended.append(JobEnded(job=name, reason="ended while nobody watched"))
        return ended + started

    def _reason(self, group: str) -> str:
        """Return the end of a job without working pods, from its remaining pods, else from the last one."""
        phases = {h.phase for h in self._groups.get(group, {}).values()} or {self._ends.get(group, "")}
        if "Failed" in phases:
            return "failed"
        return "completed" if "Succeeded" in phases else "its pods left"

    def _start_of(
        self, group: str, working: list[_BoundPod], known: Collection[str] | None
    ) -> JobStarted | None:
        if not working:
            return None
        hosts = frozenset(h.host for h in working)
        runs = frozenset(h.run for h in working)
        was = self._runs.get(group)
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
        reported = bool(nodes) or (was is not None and was.reported)
        self._runs[group] = _Run(first, runs | (was.runs if was else frozenset()), hosts, reported)
        if not reported:
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
            account=(queue := next((h.account for h in working if h.account), "")),
            queue=queue,
            storage=next((h.storage for h in working if h.storage), ""),
            time_limit_s=max(h.time_limit_s for h in working),
            started_ns=min((round(h.start_s * NS) for h in working if h.start_s > 0), default=0),
        )
