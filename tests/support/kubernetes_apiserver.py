"""A Kubernetes API server for tests: kmock's emulator, and what it lacks.

kmock (PyPI) keeps objects, serves lists, watches and patches. Ours: resource versions with conflicts, pages,
watches that go on from a version (bookmarks, 410), the field selectors of pods, merging conditions by type,
tokens, and eviction with disruption budgets and pods that take their time to leave.

async with Cluster().serving() as cluster:
    cluster.put_node("n1"); cluster.put_pod("train-0", node="n1", gpus=8)
    cluster.node("n1")["spec"]
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import kmock

from connectors.kubernetes.client import now_text

NODES, PODS = kmock.resource("v1/nodes"), kmock.resource("v1/pods")
WORKLOADS = kmock.resource("kueue.x-k8s.io/v1beta1/workloads")
PROVISIONING = kmock.resource("autoscaling.x-k8s.io/v1/provisioningrequests")
QUEUES = kmock.resource("kueue.x-k8s.io/v1beta1/localqueues")
JOB_LABEL = "training.kubeflow.org/job-name"


class Cluster(kmock.KubernetesEmulator):
    """One cluster. `tokens`: which are taken (None: no token is asked for)."""

    def __init__(self, kueue: bool = False, provisioning: bool = False) -> None:
        super().__init__()
        self.resources["v1/nodes"] = {"namespaced": False}
        self.resources["v1/pods"] = {"namespaced": True}
        self.kueue = kueue
        if kueue:
            self.resources["kueue.x-k8s.io/v1beta1/workloads"] = {"namespaced": True}
            self.resources["kueue.x-k8s.io/v1beta1/localqueues"] = {"namespaced": True}
        self.provisioning = provisioning
        if provisioning:
            self.resources["autoscaling.x-k8s.io/v1/provisioningrequests"] = {"namespaced": True}
        self.tokens: set[str] | None = None
        self.version = 100
        self.compacted = 0  # versions up to this one are no longer known to watches
        self.log: list[tuple[int, Any, str, dict[str, Any]]] = []
        self.written_ns = 0  # when the last change was made
        self.budget: dict[str, int] = {}  # label app -> evictions that are still allowed
        self.evicted: list[str] = []
        self.lingering = False  # evicted pods stay, on their way out, until `gone`
        self.failing: list[tuple[str, int]] = []  # (part of method and path, status) of answers to come
        self.uids = 0
        self.silence: asyncio.Event | None = None  # until it is set, nothing is answered
        self.port: int | None = None
        self.stopping = False
        self.writing = asyncio.Lock()
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Cluster]:
        """Serve, on the same port as before: what is stored outlives it. Watches are cut off at the end."""
        self.stopping = False
        async with self, kmock.Server(self, port=self.port) as server:
            self.port = server.port
            try:
                yield self
            finally:
                self.stopping = True
                self.changed.set()

    def put_node(self, name: str, gpus: int = 0, **spec: Any) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"conditions": [ready], "allocatable": {"cpu": "96", "nvidia.com/gpu": str(gpus)}}
        self._store(NODES, None, {"metadata": {"name": name}, "spec": spec, "status": status})

    def put_queue(self, name: str, namespace: str = "ml") -> None:
        """A local queue of Kueue."""
        meta = {"name": name, "namespace": namespace}
        self._store(QUEUES, namespace, {"metadata": meta, "spec": {"clusterQueue": "all"}})

    def put_workload(
        self, name: str, pods: int, gpus: int, queue: str = "train", namespace: str = "ml",
        active: bool = True, priority: tuple[str, int] = ("", 0), owner: str = "",
    ) -> None:  # fmt: skip
        """A workload of Kueue that asks for `pods` pods of `gpus` GPUs each, not admitted yet."""
        meta = {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"}
        container = {"resources": {"requests": {"nvidia.com/gpu": gpus}}}
        pod_set = {"name": "main", "count": pods, "template": {"spec": {"containers": [container]}}}
        spec = {"queueName": queue, "active": active, "podSets": [pod_set], **_ranked(priority)}
        self._store(WORKLOADS, namespace, {
            "metadata": {**meta, "ownerReferences": _makers(owner)},
            "spec": spec, "status": {"conditions": []},
        })  # fmt: skip

    def set_condition(
        self, name: str, kind: str, status: str = "True", namespace: str = "ml", resource: Any = WORKLOADS
    ) -> None:
        """A condition of a workload, or of another object, beside those that it has."""
        raw = self.objects[resource, namespace, name].raw
        others = [c for c in raw["status"]["conditions"] if c["type"] != kind]
        change = {"status": {"conditions": [*others, {"type": kind, "status": status}]}}
        self.change(resource, name, change, namespace)

    def put_pod(
        self, name: str, node: str = "", gpus: int = 1, owner: str = "Job/j1", phase: str = "Running",
        labels: dict[str, str] | None = None, namespace: str = "ml", gates: Sequence[str] = (),
        priority: tuple[str, int] = ("", 0), **meta: Any,
    ) -> None:  # fmt: skip
        """A pod. `priority`: its class and the number that the server resolves it to."""
        self.uids += 1
        spec: dict[str, Any] = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
        spec |= _ranked(priority)
        if node:
            spec["nodeName"] = node
        if gates:
            spec["schedulingGates"] = [{"name": gate} for gate in gates]
        self._store(PODS, namespace, {
            "metadata": {"name": name, "namespace": namespace, "uid": f"pod-{self.uids}",
                         "labels": labels or {}, "ownerReferences": _makers(owner), **meta},
            "spec": spec, "status": {"phase": phase},
        })  # fmt: skip

    def change(self, resource: Any, name: str, patch: dict[str, Any], namespace: str | None = None) -> None:
        """Change an object as another client of the API server would."""
        self.objects[resource, namespace, name].patch(patch)
        self._written(resource, namespace, name, "MODIFIED")

    def gone(self, name: str, namespace: str = "ml", resource: Any = PODS) -> None:
        """A pod left, or an object of another kind."""
        self._written(resource, namespace, name, "DELETED")
        self.objects[resource, namespace, name].delete()

    def node(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(self.objects[NODES, None, name].raw)

    def pods(self) -> list[str]:
        return sorted(name for (res, _, name), obj in self.objects.items() if res == PODS and not obj.deleted)

    def asked(self, method: str, part: str) -> int:
        """Count the requests of this method whose URL contains `part`."""
        return sum(r.method.value == method and part in str(r.url) for r in self._requests)

    def _store(self, resource: Any, namespace: str | None, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        key = (resource, namespace, name)
        if key in self.objects and not self.objects[key].deleted:
            self.objects[key].patch(body)
            self._written(resource, namespace, name, "MODIFIED")
            return
        if key in self.objects:
            self.objects[key].create(body)
        else:
            self.objects[key] = body
        self._written(resource, namespace, name, "ADDED")

    def _written(self, resource: Any, namespace: str | None, name: str, kind: str) -> None:
        self.version += 1
        self.written_ns = time.time_ns()
        found = self.objects[resource, namespace, name]
        found.patch({"metadata": {"resourceVersion": str(self.version)}})
        self.log.append((self.version, resource, kind, copy.deepcopy(found.raw)))
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        if self.tokens is not None and request.headers.get("Authorization", "")[7:] not in self.tokens:
            raise kmock.KubernetesError(401, "Unauthorized", "Unauthorized")
        if self.silence is not None:
            await self.silence.wait()
        absent = (("/kueue.", self.kueue), ("/autoscaling.x-k8s.io", self.provisioning))
        if any(part in str(request.url) and not there for part, there in absent):
            raise kmock.KubernetesError(404, "NotFound", "the server could not find the requested resource")
        shown = f"{request.method.value} {request.url}"
        for failure in self.failing:
            if failure[0] in shown:
                self.failing.remove(failure)
                raise kmock.KubernetesError(failure[1], "Injected", "asked for by the test")
        if request.subresource == "eviction" and request.method.value == "POST":
            return self._evict(request)
        if request.resource == PROVISIONING and request.action == kmock.action.CREATE:
            return self._provision(request)
        if request.action != kmock.action.UPDATE:
            return await super()._handle(request)
        async with self.writing:
            return await self._update(request)

    async def _update(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        """A patch: refused if it names an older version, conditions merged by type if it is strategic."""
        key = (request.resource, request.namespace, request.name)
        if key in self.objects and not self.objects[key].deleted:
            was = self.objects[key].raw
            given = request.data.get("metadata", {}).pop("resourceVersion", None)
            if given is not None and given != was["metadata"]["resourceVersion"]:
                raise kmock.KubernetesError(409, "Conflict", "the object has been modified")
            fresh = request.data.get("status", {}).get("conditions")
            if fresh is not None and "strategic" in request.headers["Content-Type"]:
                kinds = {c["type"] for c in fresh}
                kept = [c for c in was["status"]["conditions"] if c["type"] not in kinds]
                request.data["status"]["conditions"] = kept + fresh
        answer = await super()._handle(request)
        assert request.name is not None
        self._written(request.resource, request.namespace, request.name, "MODIFIED")
        return aiohttp.web.json_response(self.objects[key].raw, status=answer.status)

    def _provision(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        """A request for nodes: its name is taken once, and the server says when it was made."""
        body, space = copy.deepcopy(dict(request.data)), request.namespace
        name = body["metadata"]["name"]
        if (PROVISIONING, space, name) in self.objects:
            raise kmock.KubernetesError(409, "AlreadyExists", f"{name} already exists")
        assert body["apiVersion"] == "autoscaling.x-k8s.io/v1"
        assert body["metadata"]["namespace"] == space
        body["metadata"]["creationTimestamp"] = now_text()
        self._store(PROVISIONING, space, {**body, "status": {"conditions": []}})
        return aiohttp.web.json_response(self.objects[PROVISIONING, space, name].raw, status=201)

    def provisionings(self) -> list[dict[str, Any]]:
        """The requests for nodes, in the order of their making."""
        return [o.raw for (res, _, _), o in self.objects.items() if res == PROVISIONING and not o.deleted]

    def _evict(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        key = (PODS, request.namespace, request.name)
        if key not in self.objects or self.objects[key].deleted:
            raise kmock.KubernetesError(404, "NotFound", "no such pod")
        meta = self.objects[key].raw["metadata"]
        expected = request.data["deleteOptions"].get("preconditions", {}).get("uid")
        assert request.data["apiVersion"] == "policy/v1"
        assert request.data["metadata"] == {"name": request.name, "namespace": request.namespace}
        if expected is not None and expected != meta["uid"]:
            raise kmock.KubernetesError(409, "Conflict", "the UID in the precondition does not match")
        app = meta.get("labels", {}).get("app")
        if app in self.budget:
            if self.budget[app] <= 0:
                why = "Cannot evict pod as it would violate the pod's disruption budget."
                raise kmock.KubernetesError(429, "TooManyRequests", why)
            self.budget[app] -= 1
        assert request.name is not None
        self.evicted.append(request.name)
        if self.lingering:
            leaving = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
            self.change(PODS, request.name, leaving, request.namespace)
        else:
            self.gone(request.name, request.namespace or "")
        return aiohttp.web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _serve_list(self, request: kmock.Request) -> Any:
        found = [
            o.raw for (res, _, _), o in self.objects.items() if res == request.resource and not o.deleted
        ]
        found = [o for o in found if _selected(o, request.params)]
        first = int(request.params.get("continue", "0"))
        last = first + int(request.params.get("limit", "500"))
        if 0 < first < self.compacted:
            raise kmock.KubernetesError(410, "Expired", "the continue parameter is too old")
        more = {"continue": str(last)} if last < len(found) else {}
        return {"metadata": {"resourceVersion": str(self.version), **more}, "items": found[first:last]}

    async def _serve_watch(self, request: kmock.Request) -> AsyncIterator[Any]:
        yield b""
        seen = int(request.params["resourceVersion"])
        loop = asyncio.get_running_loop()
        until_s = loop.time() + float(request.params["timeoutSeconds"])
        while loop.time() < until_s:
            if seen < self.compacted:
                yield {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
                return
            changed = self.changed
            told = 0
            for version, resource, kind, body in list(self.log):
                if version > seen and resource == request.resource and _selected(body, request.params):
                    yield {"type": kind, "object": body}
                    told = version
            seen = self.version
            if told:
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(seen)}}}
            try:
                await asyncio.wait_for(changed.wait(), until_s - loop.time())
            except TimeoutError:
                return
            if self.stopping:
                assert request._raw_request is not None
                assert request._raw_request.transport is not None
                request._raw_request.transport.abort()
                return


def _makers(owner: str) -> list[dict[str, Any]]:
    kind, _, maker = owner.partition("/")
    return [{"kind": kind, "name": maker, "uid": f"uid-{maker}", "controller": True}] if owner else []


def _ranked(priority: tuple[str, int]) -> dict[str, Any]:
    """Keys of a spec: no class is named by an object whose class is none."""
    name, number = priority
    return {"priority": number, **({"priorityClassName": name} if name else {})}


def _selected(body: dict[str, Any], params: Any) -> bool:
    key, _, value = params.get("labelSelector", "").partition("=")
    if key and body["metadata"].get("labels", {}).get(key) != value:
        return False
    selector = params.get("fieldSelector", "")
    node = body["spec"].get("nodeName", "")
    if selector == "spec.nodeName!=":
        return bool(node)
    return not selector or selector == f"spec.nodeName={node}"


def marks(cluster: Cluster, node: str = "n0") -> dict[str, str]:
    """The annotations of a node."""
    found: dict[str, str] = cluster.node(node)["metadata"].get("annotations", {})
    return found
