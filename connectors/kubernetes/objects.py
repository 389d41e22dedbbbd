"""Objects of the Kubernetes API: the few fields of nodes and pods that are read, all of them optional.

An object that does not fit is reported by name and left out; the others of a list are read. Pure functions of
JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from fnmatch import translate
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from twin.catalogue import BadMessage

MAX_ITEMS = 1_000_000
MIRROR = "kubernetes.io/config.mirror"  # a static pod of the node's own agent
FINISHED = ("Succeeded", "Failed")
# Extended resources that are accelerators. source: the vendors' device plugins
GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "amd.com/gpu",
                 "huawei.com/Ascend*", "aws.amazon.com/neuron*", "habana.ai/gaudi", "google.com/tpu",
                 "gpu.intel.com/*")  # fmt: skip


def gpu_test(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a test for accelerator resources by these patterns; each of the few names is tested once."""
    match = re.compile("|".join(translate(p) for p in patterns)).match
    return lru_cache(1000)(lambda resource: match(resource) is not None)


class Owner(msgspec.Struct):
    """Owner of an object (meta/v1 OwnerReference)."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, rename="camel"):
    """meta/v1 ObjectMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[Owner] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def key(self) -> str:
        """Return namespace and name."""
        return f"{self.namespace}/{self.name}"

    @property
    def owner(self) -> Owner | None:
        """Return the controller that would recreate the pod."""
        return next((o for o in self.owner_references or () if o.controller), None)


class NodeCondition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str | None = ""
    message: str | None = ""


class _NodeSpec(msgspec.Struct):
    unschedulable: bool | None = None
    taints: list[dict[str, Any]] | None = None


class _NodeStatus(msgspec.Struct):
    conditions: list[NodeCondition] | None = None
    allocatable: dict[str, Any] | None = None


class KubernetesNode(msgspec.Struct):
    """A node of a cluster."""

    metadata: Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    def condition(self, kind: str) -> NodeCondition | None:
        """Return the condition of this type."""
        return next((c for c in self.status.conditions or () if c.type == kind), None)


class _Resources(msgspec.Struct):
    limits: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None


class _Container(msgspec.Struct):
    resources: _Resources | None = None


def _accelerators(container: _Container, is_gpu: Callable[[str], bool]) -> int:
    """Return the accelerators of a container; limits and requests of an extended resource are equal."""
    resources = container.resources or _Resources()
    asked = {**(resources.requests or {}), **(resources.limits or {})}
    return sum(count_of(count) for resource, count in asked.items() if is_gpu(resource))


def count_of(quantity: object) -> int:
    """Return a quantity of an extended resource, which is a whole number; 0 if it is invalid."""
    text = str(quantity)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def instant_s(text: str | None) -> float:
    """Return an instant of Kubernetes in seconds since 1970; 0 for none."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except (ValueError, OverflowError):
        return 0.0


class PodSpec(msgspec.Struct, rename="camel"):
    """The spec of a pod: requested resources, priority, and its node."""

    node_name: str | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    active_deadline_seconds: float | None = None
    resource_claims: list[Any] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None

    def gpus(self, is_gpu: Callable[[str], bool]) -> int:
        """Return the accelerators that a pod of this kind requests; a claim of devices counts as one."""
        own = sum(_accelerators(c, is_gpu) for c in self.containers or ())
        before = max((_accelerators(c, is_gpu) for c in self.init_containers or ()), default=0)
        return max(own, before) + len(self.resource_claims or ())


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str | None = None
    start_time: str | None = None


class KubernetesPod(msgspec.Struct):
    """A pod, bound to a node or not."""

    metadata: Meta
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def key(self) -> str:
        """Return namespace and name."""
        return self.metadata.key

    @property
    def finished(self) -> bool:
        """Return True if it has finished and will not run again."""
        return self.status.phase in FINISHED

    @property
    def part_of_node(self) -> bool:
        """Return True if it belongs to its node: a mirror of a static pod, or of a DaemonSet."""
        owner = self.metadata.owner
        mirror = MIRROR in (self.metadata.annotations or {})
        return mirror or (owner is not None and owner.kind in ("DaemonSet", "Node"))

    @property
    def on_drain(self) -> Literal["stays", "over", "leaving", "bare", "evict"]:
        """Return its treatment by a drain; `bare`: no controller would recreate it."""
        if self.part_of_node:
            return "stays"
        if self.finished:
            return "over"
        if self.metadata.deletion_timestamp is not None:
            return "leaving"
        return "bare" if self.metadata.owner is None else "evict"

    def holds_gpus(self, is_gpu: Callable[[str], bool]) -> bool:
        """Return True if it requests accelerators, or devices by claims."""
        return self.spec.gpus(is_gpu) > 0


class _Template(msgspec.Struct):
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class _PodSet(msgspec.Struct):
    count: int | None = 1
    template: _Template = msgspec.field(default_factory=_Template)


class WorkloadSpec(msgspec.Struct, rename="camel"):
    """The spec of a workload: its queue, its sets of pods and its priority."""

    queue_name: str | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    pod_sets: list[_PodSet] | None = None
    active: bool | None = None
    maximum_execution_time_seconds: float | None = None


class _WorkloadStatus(msgspec.Struct):
    conditions: list[NodeCondition] | None = None


class KueueWorkload(msgspec.Struct):
    """A workload of Kueue, which is admitted to the cluster as a whole."""

    metadata: Meta
    spec: WorkloadSpec = msgspec.field(default_factory=WorkloadSpec)
    status: _WorkloadStatus = msgspec.field(default_factory=_WorkloadStatus)

    def holds(self, kind: str) -> bool:
        """Return True if this condition is true."""
        return any(c.type == kind and c.status == "True" for c in self.status.conditions or ())


class KueueQueue(msgspec.Struct):
    """A local queue of Kueue, to which workloads of a namespace are submitted."""

    metadata: Meta


class Named(Protocol):
    """An object with a name."""

    @property
    def metadata(self) -> Meta:
        """Return its metadata."""


Kind = TypeVar("Kind", bound=Named)
WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Items(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class UnreadObject(BadMessage):
    """An object that does not fit. `key` is its namespace and name, "" if unknown; `host` the node that it is
    bound to, "" for none, None if unknown."""

    def __init__(self, message: str, text: bytes) -> None:
        super().__init__(message)
        try:
            tree = msgspec.json.decode(text)
        except WRONG:
            tree = None
        meta, spec = (tree.get(part) if isinstance(tree, dict) else None for part in ("metadata", "spec"))
        name, space = (meta.get(part) if isinstance(meta, dict) else None for part in ("name", "namespace"))
        self.key = f"{space}/{name}" if isinstance(name, str) and isinstance(space, str) else ""
        host = (spec.get("nodeName") or "") if isinstance(spec, dict) else None
        self.host = host if isinstance(host, str) else None


def read_items(page: bytes, kind: type[Kind]) -> tuple[list[Kind], list[UnreadObject]]:
    """Return (the objects of a page of a list, the omitted ones). Raises BadMessage for no list."""
    try:
        items = msgspec.json.decode(page, type=_Items).items or []
    except WRONG as error:
        raise BadMessage(f"expected a list of {kind.__name__}s: {str(error)[:200]}") from None
    objects: list[Kind] = []
    bad: list[UnreadObject] = []
    for item in items[:MAX_ITEMS]:
        try:
            objects.append(read_object(bytes(item), kind))
        except UnreadObject as error:
            bad.append(error)
    return objects, bad


def read_object(text: bytes, kind: type[Kind]) -> Kind:
    """Return one object. Raises UnreadObject for one of another kind, or without a name."""
    try:
        decoded = msgspec.json.decode(text, type=kind)
    except WRONG as error:
        shown = text[:80].decode("utf-8", "replace")
        raise UnreadObject(f"{kind.__name__} {shown!r}: {str(error)[:200]}", text) from None
    if not 0 < len(decoded.metadata.name) <= 253:
        raise UnreadObject(f"{kind.__name__}: metadata.name: expected 1 to 253 characters", text)
    return decoded


class Change(msgspec.Struct):
    """An event of a watch; `object` is not read yet."""

    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str | None = ""


class _Versioned(msgspec.Struct):
    metadata: Meta


def read_change(line: bytes) -> Change:
    """Return an event of a watch. Raises BadMessage."""
    try:
        return msgspec.json.decode(line, type=Change)
    except WRONG as error:
        raise BadMessage(f"event {line[:80].decode('utf-8', 'replace')!r}: {str(error)[:200]}") from None


def version_of(change: Change) -> str:
    """Return the version that a watch has reached; "" if the object has none."""
    try:
        return msgspec.json.decode(change.object, type=_Versioned).metadata.resource_version
    except WRONG:
        return ""


def fault_of(change: Change) -> tuple[int, str]:
    """Return (code, message) of an error event."""
    try:
        status = msgspec.json.decode(change.object, type=_Status)
    except WRONG:
        return 0, "an unreadable error"
    return status.code, (status.message or "")[:200]
