"""Provisioning requests: ask the cluster autoscaler to bring nodes back before pods wait for them.

A request (autoscaling.x-k8s.io/v1) names a pod template of the site, whose pods each fill a node, and their
number. Its annotation names the nodes, so that neither a restart nor another daemon asks twice. The
autoscaler deletes requests that are over. source: its proposal provisioning-request.md, and its own classes
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from connectors.kubernetes.client import KubernetesClient
from connectors.kubernetes.objects import Meta, NodeCondition, instant_s, read_items
from twin.catalogue import BadMessage

API = "autoscaling.x-k8s.io/v1"
CLASS = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
LABEL, NODES = "racktwin.io/standby", "racktwin.io/nodes"
MOST_NODES = 100  # of a request
LIVE_S = 1800.0  # after which a request that brought nothing counts no more: as long as a command may take
AGAIN_S = 300.0  # after a refusal, until it is asked again, then for each node by itself. source: estimate


class _Status(msgspec.Struct):
    conditions: list[NodeCondition] | None = None


class ProvisioningRequest(msgspec.Struct):
    """A request for nodes, as far as it is read."""

    metadata: Meta
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes of the request."""
        try:
            found = json.loads((self.metadata.annotations or {}).get(NODES, "[]"))
        except (ValueError, RecursionError):
            return []
        return [str(name) for name in found] if isinstance(found, list) else []

    @property
    def age_s(self) -> float:
        """Return the age of the request, s; 0 if the server gives none."""
        made_s = instant_s(self.metadata.creation_timestamp)
        return time.time() - made_s if made_s else 0.0

    def message(self, kind: str) -> str | None:
        """Return the message of a true condition; None otherwise."""
        some = (c for c in self.status.conditions or () if c.type == kind and c.status == "True")
        return next(((c.message or c.reason or "no reason given")[:120] for c in some), None)

    @property
    def progress(self) -> str:
        """Return the state of the request, in words."""
        if (why := self.message("Failed")) is not None:
            return f"the autoscaler cannot bring it back: {why}; racktwin asks again later"
        if self.message("Provisioned") is not None:
            return "the autoscaler has capacity, but the node has not joined yet"
        if self.message("Accepted") is not None:
            return "the autoscaler has accepted the request to bring it back"
        return "the request to bring it back waits for the autoscaler"


@dataclass(frozen=True, slots=True)
class PodTemplateName:
    """The site's pod template for node requests."""

    namespace: str
    name: str


class Provisioner:
    """Requests nodes that the autoscaler removed. All its state is in the cluster."""

    def __init__(self, client: KubernetesClient, template: PodTemplateName) -> None:
        self._client, self._template = client, template
        self._path = f"/apis/{API}/namespaces/{quote(template.namespace, safe='')}/provisioningrequests"
        self.counts = {"asked": 0}

    async def ask(self, nodes: Sequence[str], mark: str) -> dict[str, str]:
        """Request those of these nodes without an open request; returns the progress of each, in words.

        `mark` names the command. The same one, for the same nodes after the same requests, makes one once.
        Raises ApiError, Away, BadMessage.
        """
        latest, made_before, failed = await self._open()
        live = {name: found for name, found in latest.items() if _lives(found)}
        missing = [name for name in nodes if name not in live]
        together = [name for name in missing if name not in failed]
        alone = [name for name in missing if name in failed]
        parts = [together[i : i + MOST_NODES] for i in range(0, len(together), MOST_NODES)]
        made = dict.fromkeys(missing, ProvisioningRequest(Meta(name="new")).progress)
        for part in [*parts, *([name] for name in alone)]:
            before = sum(made_before.get(name, 0) for name in part)
            digest = hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12]
            await self._client.post(self._path, self._body(part, f"{mark}-{before}-{digest}"))
            self.counts["asked"] += len(part)
        return {name: live[name].progress if name in live else made[name] for name in nodes}

    async def _open(self) -> tuple[dict[str, ProvisioningRequest], dict[str, int], set[str]]:
        """Return (the youngest request for each node, their number for it, nodes with a failed one)."""
        latest, count, failed = dict[str, ProvisioningRequest](), dict[str, int](), set[str]()
        async for page in self._client.pages(self._path, {"labelSelector": f"{LABEL}=ready"}):
            found, bad = read_items(page, ProvisioningRequest)
            if bad:
                raise BadMessage(f"{self._path}: {bad[0]}")
            for request in found:
                if request.message("Failed") is not None:
                    failed.update(request.nodes)
                for name in request.nodes:
                    count[name] = count.get(name, 0) + 1
                    if name not in latest or request.age_s <= latest[name].age_s:
                        latest[name] = request
        return latest, count, failed

    def _body(self, nodes: Sequence[str], mark: str) -> dict[str, Any]:
        meta = {
            "name": f"racktwin-{mark}",
            "namespace": self._template.namespace,
            "labels": {LABEL: "ready"},
            "annotations": {NODES: json.dumps(list(nodes))},
        }
        pods = {"count": len(nodes), "podTemplateRef": {"name": self._template.name}}
        spec = {"provisioningClassName": CLASS, "podSets": [pods]}
        return {"apiVersion": API, "kind": "ProvisioningRequest", "metadata": meta, "spec": spec}


def _lives(request: ProvisioningRequest) -> bool:
    """Return True while a request may still bring its nodes, or was refused recently."""
    if request.message("Failed") is not None:
        return request.age_s < AGAIN_S
    over = request.message("BookingExpired") is not None or request.message("CapacityRevoked") is not None
    return not over and request.age_s < LIVE_S
