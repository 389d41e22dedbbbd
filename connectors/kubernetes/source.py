"""Source of a Kubernetes API server: lists, then watches jobs, levels and placement of nodes.

A watch goes on where the list or the last one ended; where the server keeps that no longer (410), all is
listed anew. A server that is silent ends no job, and levels grow old. Writes nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Generic

import msgspec

from connectors.backoff import Backoff
from connectors.demand import DemandBook
from connectors.jobs import skip_start_times
from connectors.kubernetes.autoscaler import STANDBY, ScaleDowns
from connectors.kubernetes.client import WATCH_S, ApiError, Away, Expired, KubernetesClient, page_meta
from connectors.kubernetes.demand import QUEUES, WORKLOADS, PodDemand
from connectors.kubernetes.jobs import PodBook, PodLabels
from connectors.kubernetes.nodes import OWNER, PLACEMENT, SIGNAL, Hosts, level_of, owner_of, placement_of
from connectors.kubernetes.objects import (
    MAX_ITEMS,
    Kind,
    KubernetesNode,
    KubernetesPod,
    KueueQueue,
    KueueWorkload,
    UnreadObject,
    fault_of,
    read_change,
    read_items,
    read_object,
    version_of,
)
from twin.catalogue import BadMessage, ConnectorError
from twin.contracts import Inlet
from twin.telemetry import Reading

SETTLE_S = 1.0  # pods of a job are bound one after the other: events within this time are staged together
RESTATE_S = 30.0  # between two readings of a level that did not change, as of the server's last answer
FAILURES = 3  # watches on end that fail before the link counts as down
FIRST_S, LONGEST_S = 0.5, 1.0  # pauses after a watch that failed
ABSENT_S = 300.0  # until a cluster without Kueue, or without the right to read it, is asked again
DEMAND_S = 5.0  # demand that changes is added up so often at most
REMEDY = "check that `kubectl get nodes` works with this kubeconfig on this host"
MAX_FAULTS = 200  # of one list that are reported
SLICE = 500  # pods that are taken in at a stretch
FRESH_S = 2 * WATCH_S  # what the server said longer ago says nothing of now
_SIGNALS = (SIGNAL, OWNER, PLACEMENT, STANDBY)
_Levels = tuple[float | None, float | None, float | None]  # of a node, in the order of _SIGNALS
_Readings = tuple[float | None, ...]  # likewise, with its standby
UNKNOWN: _Readings = (None, None, None, None)


class Followed(Generic[Kind]):
    """One kind of object: listed, then watched. `whole` gets each list, `one` each later change."""

    def __init__(
        self,
        client: KubernetesClient,
        path: str,
        kind: type[Kind],
        whole: Callable[[list[Kind]], Awaitable[None]],
        one: Callable[[Kind, bool], None],
    ) -> None:
        self.path, self._client = path, client
        self._kind: type[Kind] = kind
        self._whole: Callable[[list[Kind]], Awaitable[None]] = whole
        self._one: Callable[[Kind, bool], None] = one
        self.version = ""
        self.listed = False
        self.unread: dict[str, str | None] = {}  # keys that cannot be read -> their hosts, None: any
        self._hosts_unread: frozenset[str | None] = frozenset()
        self.received_ns = 0  # when the server last spoke of these objects
        self._failed, self._backoff = 0, Backoff(FIRST_S, LONGEST_S)

    async def run(self, inlet: Inlet) -> None:
        """Follow until cancelled. Raises ConnectorError after three failures of the server in a row."""
        self.version = ""
        self._succeeded()
        while True:
            try:
                if not self.version:
                    await self._list(inlet)
                await self._watch(inlet)
                self._succeeded()
                # a server that ends watches at once is not asked without a pause
                await asyncio.sleep(0.05)
            except Expired as error:
                inlet.skip("watch", str(error)[:200])
                self.version = ""
                await self._pause(error)
            except Away as error:
                inlet.fail(str(error), REMEDY)
                await self._pause(error)

    async def _pause(self, error: ConnectorError) -> None:
        self._failed += 1
        if self._failed >= FAILURES:
            raise ConnectorError(f"kubernetes: {error}") from error
        await asyncio.sleep(self._backoff.next_s())

    def _succeeded(self) -> None:
        self._failed = 0
        self._backoff.reset()

    async def _list(self, inlet: Inlet) -> None:
        self.listed = False
        objects: list[Kind] = []
        version, faults, unread = "", list[str](), dict[str, str | None]()
        async for page in self._client.pages(self.path, {}):
            try:
                some, bad = await asyncio.to_thread(read_items, page, self._kind)
            except BadMessage as error:
                raise Away(f"{self.path}: {error}") from error
            version = page_meta(self.path, page)[0]
            objects += some
            faults += [str(fault) for fault in bad[: MAX_FAULTS - len(faults)]]
            unread |= {fault.key: fault.host for fault in bad}
            if len(objects) > MAX_ITEMS:
                raise Away(f"{self.path}: more than {MAX_ITEMS} objects")
        for why in faults:
            inlet.reject("kubernetes", f"{self.path}: {why}")
        self._note_unread(unread)
        await self._whole(objects)
        self.listed, self.version, self.received_ns = True, version or "0", time.time_ns()

    async def _watch(self, inlet: Inlet) -> None:
        params = {"resourceVersion": self.version}
        async with aclosing(self._client.watch(self.path, params)) as lines:
            async for line in lines:
                self.received_ns = time.time_ns()
                if not line:
                    continue
                try:
                    self._change(line)
                except BadMessage as error:
                    inlet.reject("kubernetes", f"{self.path}: {error}")
                self._succeeded()

    def _change(self, line: bytes) -> None:
        """Take in an event. Raises BadMessage, Expired, Away."""
        change = read_change(line)
        if change.type == "ERROR":
            code, message = fault_of(change)
            if code == 410:
                raise Expired(f"{self.path}: {message}")
            raise Away(f"{self.path}: the watch fails: {code} {message}")
        self.version = version_of(change) or self.version
        if change.type not in ("ADDED", "MODIFIED", "DELETED"):
            return
        there = change.type != "DELETED"
        try:
            found = read_object(bytes(change.object), self._kind)
        except UnreadObject as error:
            if there or not error.key:
                self._note_unread(self.unread | {error.key: error.host})
                raise
            space, _, name = error.key.partition("/")
            found = msgspec.convert({"metadata": {"namespace": space, "name": name}}, self._kind)
        if found.metadata.key in self.unread:
            self._note_unread({k: host for k, host in self.unread.items() if k != found.metadata.key})
        self._one(found, there)

    def _note_unread(self, unread: dict[str, str | None]) -> None:
        self.unread, self._hosts_unread = unread, frozenset(unread.values())

    @property
    def partial(self) -> bool:
        """Return True while some objects cannot be read."""
        return bool(self.unread)

    def may_hide(self, host: str) -> bool:
        """Return True if an object that cannot be read may be on a node."""
        return host in self._hosts_unread or None in self._hosts_unread


def _levels_of(node: KubernetesNode, busy: bool) -> _Levels:
    level, place = level_of(node, busy), placement_of(node)
    owner = owner_of(node, level)
    placement = None if place is None else float(place)
    if level is None or owner is None:
        return None, None, placement  # a node that is not ready, or has strange marks, still has a placement
    return float(level), float(owner), placement


class KubernetesSource:
    """Follows a cluster. `known` gives the nodes of the jobs that run in the twin.

    `also` has signals that are read beside service levels: `placement_state`, and `standby_state`, by which
    the autoscaler takes nodes away.
    """

    name = "kubernetes"

    def __init__(
        self,
        client: KubernetesClient,
        hosts: Hosts,
        labels: PodLabels | None = None,
        *,
        known: Callable[[], Mapping[str, Collection[str]]] = dict,
        settle_s: float = SETTLE_S,
        also: Collection[str] = (),
    ) -> None:
        self._client, self._hosts, self._known, self._settle_s = client, hosts, known, settle_s
        self.book = PodBook(hosts, labels or PodLabels())
        self._nodes: dict[str, KubernetesNode] = {}
        self._signals = {s: at for at, s in enumerate(_SIGNALS) if s in (SIGNAL, OWNER, *also)}
        self._scale_downs = ScaleDowns()
        self._readings_before: dict[int, _Readings] = {}
        self._changed: dict[str, None] = {}  # nodes by their names in the cluster
        self._stated_s = -math.inf
        self.nodes = Followed(client, "/api/v1/nodes", KubernetesNode, self._all_nodes, self._node)
        self.pods = Followed(client, "/api/v1/pods", KubernetesPod, self._all_pods, self._pod)
        self.demand = PodDemand(self.book)
        # Where what jobs hold and wait for is added up; to be set before it runs
        self.demand_book: DemandBook | None = None
        self.workloads = Followed(client, WORKLOADS, KueueWorkload, self._all_workloads, self._workload)
        self.queues = Followed(client, QUEUES, KueueQueue, self._all_queues, self._queue)
        self._has_kueue: bool | None = None  # None: not known yet
        self._added_s = -math.inf

    async def run(self, inlet: Inlet) -> None:
        """Follow nodes and pods. Raises ConnectorError without an answer of the server; this ends no job."""
        known = self._known()
        self._stated_s = -math.inf
        self._added_s, self._has_kueue = -math.inf, None
        tasks = [asyncio.create_task(f.run(inlet)) for f in (self.nodes, self.pods)]
        if self.demand_book is not None:
            tasks.append(asyncio.create_task(self._follow_kueue(inlet)))
        self.nodes.listed = self.pods.listed = False
        try:
            while True:
                done, _ = await asyncio.wait(
                    tasks, timeout=self._settle_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                if self.pods.listed:
                    self._stage_jobs(inlet, known)
                    known = known if self.pods.partial else {}
                if self.pods.listed and self.nodes.listed:
                    self._stage_levels(inlet)
                    self._stage_demand(inlet)
                self._report_faults(inlet)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

    def node_of(self, host: str) -> KubernetesNode | None:
        """Return the node as the server last described it; None if that may be outdated."""
        listed = self.nodes.listed and self.nodes.version != ""
        fresh = time.time_ns() - self.nodes.received_ns <= FRESH_S * 10**9
        return self._nodes.get(host) if listed and fresh else None

    def busy(self, host: str) -> bool | None:
        """Return True if a node has pods that a drain moves; None if that may be outdated or is unknown."""
        fresh = time.time_ns() - self.pods.received_ns <= FRESH_S * 10**9
        known = self.pods.listed and fresh
        return (self.book.busy(host) or (None if self.pods.may_hide(host) else False)) if known else None

    def took_away(self, entity: int) -> bool:
        """Return True if the autoscaler removed a node from the cluster."""
        return self._hosts.host_of(entity) is None and entity in self._scale_downs.away

    def _follow_scale_down(self, node: KubernetesNode, there: bool) -> None:
        entity = self._hosts.entity_of(node.metadata.name)
        if entity is not None:
            self._scale_downs.take(entity, node, there)

    async def _all_nodes(self, nodes: list[KubernetesNode]) -> None:
        before, self._nodes = self._nodes, {n.metadata.name: n for n in nodes}
        for host, node in before.items():
            if host not in self._nodes:
                self._follow_scale_down(node, False)
        for node in nodes:
            self._follow_scale_down(node, True)
        self._hosts.take(self._nodes)

    async def _all_pods(self, pods: list[KubernetesPod]) -> None:
        """Take all pods in slices, between which the loop goes on; nothing is staged before the last. A pod
        that is missing may be one that could not be read: then none has ended."""
        keys = {p.key for p in pods} | self.pods.unread.keys()
        if "" not in self.pods.unread:
            self.book.keep(keys)
            self.demand.keep(keys)
        for first in range(0, len(pods), SLICE):
            for pod in pods[first : first + SLICE]:
                self._pod(pod, True)
            await asyncio.sleep(0)

    def _node(self, node: KubernetesNode, there: bool) -> None:
        name = node.metadata.name
        self._changed[name] = None
        self.demand.changed = True  # its GPUs may be out of service now
        self._follow_scale_down(node, there)
        if there:
            self._nodes[name] = node
            self._hosts.add(name)
        else:
            self._nodes.pop(name, None)
            self._hosts.remove(name)

    def _pod(self, pod: KubernetesPod, there: bool) -> None:
        if there:
            self.book.put(pod)
            self.demand.put(pod)
        else:
            self.book.remove(pod.key)
            self.demand.remove(pod.key)

    async def _all_workloads(self, workloads: list[KueueWorkload]) -> None:
        self._has_kueue = True
        self.demand.keep_workloads(workloads)

    def _workload(self, workload: KueueWorkload, there: bool) -> None:
        self.demand.put_workload(workload, there)

    async def _all_queues(self, queues: list[KueueQueue]) -> None:
        self.demand.queues.clear()
        for queue in queues:
            self._queue(queue, True)

    def _queue(self, queue: KueueQueue, there: bool) -> None:
        self.demand.put_queue(queue, there)

    async def _follow_kueue(self, inlet: Inlet) -> None:
        """Follow Kueue's queues and workloads if the cluster has any; 404 means a cluster without Kueue."""
        while True:
            tasks = [asyncio.create_task(f.run(inlet)) for f in (self.queues, self.workloads)]
            try:
                # no gather: a child that fails as this is cancelled would hide the cancellation
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                if error.status == 403:
                    inlet.skip("kueue", str(error)[:200], "", "apply deploy/kubernetes/rbac.yaml again")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._has_kueue = False
            self.demand.keep_workloads(())
            await asyncio.sleep(ABSENT_S)

    def _stage_demand(self, inlet: Inlet) -> None:
        """Report the held and requested GPUs of jobs: changes within DEMAND_S, everything each RESTATE_S."""
        book, now_ns, now_s = self.demand_book, time.time_ns(), time.monotonic()
        if book is None or self._has_kueue is None or (self._has_kueue and not self.queues.listed):
            return
        followed = [self.nodes, self.pods, *((self.workloads, self.queues) if self._has_kueue else ())]
        if now_ns - min(f.received_ns for f in followed) > FRESH_S * 10**9:
            return
        if now_s - self._added_s < (DEMAND_S if self.demand.changed else RESTATE_S):
            return
        self._added_s, self.demand.changed = now_s, False
        claims = self.demand.claims(self._has_kueue)
        queues = set(self.demand.queues.values())
        stock = self.demand.stock(self._nodes, lambda n: _levels_of(n, self.book.busy(n.metadata.name)))
        inlet.stage(book.take(self.name, claims, stock, queues, now_ns, FRESH_S), now_ns)
        book.report(inlet)

    def _stage_jobs(self, inlet: Inlet, known: Mapping[str, Collection[str]]) -> None:
        events = self.book.changes(known, whole=not self.pods.partial)
        if events:
            skip_start_times(events, inlet, now_ns := time.time_ns())
            inlet.stage(events, now_ns)

    def _stage_levels(self, inlet: Inlet) -> None:
        """Report changes at once and everything periodically, as of the server's last answer."""
        now_ns = time.time_ns()
        at_ns = min(self.nodes.received_ns, self.pods.received_ns)
        if now_ns - at_ns > FRESH_S * 10**9:
            return
        whole = time.monotonic() - self._stated_s >= RESTATE_S
        changed = {**self._changed, **self.book.turned}
        self._changed.clear()
        self.book.turned.clear()
        before = self._readings_before
        levels: dict[int, _Readings] = {} if whole else dict(before)
        for host in self._nodes if whole else changed:
            entity = self._hosts.entity_of(host)
            if entity is not None and self._hosts.host_of(entity) in (host, None):
                levels[entity] = self._readings_of(entity, host)
        for entity in self._scale_downs.away:
            if self._hosts.host_of(entity) is None:
                levels[entity] = self._readings_of(entity, "")
        current = {**dict.fromkeys(before, UNKNOWN), **levels}  # for a node that is gone
        readings: list[Reading] = []
        for e in sorted(e for e, values in current.items() if whole or before.get(e) != values):
            was = before.get(e)
            for signal, at in self._signals.items():
                value = current[e][at]
                same = was is not None and value == was[at]
                if whole or not same:
                    # A change is of now, or it would be older than the reading before it.
                    readings.append(Reading("node", e, signal, value, at_ns if same else now_ns))
        if readings:
            inlet.stage(readings, now_ns)
        self._readings_before = levels
        if whole:
            self._stated_s = time.monotonic()

    def _readings_of(self, entity: int, host: str) -> _Readings:
        # With a pod that cannot be read on it, no drain counts as over
        node, busy = self._nodes.get(host), self.book.busy(host) or self.pods.may_hide(host)
        levels = UNKNOWN[:-1] if node is None else _levels_of(node, busy)
        standby = self._scale_downs.standby_of(entity, node, busy)
        return *levels, None if standby is None else float(standby)

    def _report_faults(self, inlet: Inlet) -> None:
        for host in self._hosts.strangers:
            why = f"{host[:60]!r} of Kubernetes is not a node of the site"
            inlet.skip("host", why, host[:60], "name its node in `kubernetes.node_names`")
        self._hosts.strangers.clear()
        for why in self._hosts.faults:
            inlet.reject(self.name, why)
        self._hosts.faults.clear()
        if self.book.refused:
            inlet.drop(self.name, "more pods than are kept", self.book.refused)
            self.book.refused = 0
