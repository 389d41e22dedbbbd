"""Standby on a Kubernetes API server, whose autoscaler is the test: its taint, nodes that go and return."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.kubernetes import (
    KubernetesClient,
    KubernetesStandby,
    PodTemplateName,
    provisioning,
    standby as kubernetes_standby,
)
from connectors.kubernetes.access import Access
from connectors.kubernetes.autoscaler import DELETING, KEEP, OURS, STANDBY_EPOCH, ScaleDowns, standby_plan
from connectors.kubernetes.objects import KubernetesNode
from connectors.orders import SinkContext
from tests.support.builders import site_of, two_racks
from tests.support.inlets import until
from tests.support.kubernetes_apiserver import NODES, PROVISIONING, Cluster, marks
from tests.support.kubernetes_placement_sink import Heard, followed
from tests.support.kubernetes_service_sink import THEIRS, hurry, told
from twin.contracts import ASLEEP, READY, WAKING, CommandBatch
from twin.site import Site
from twin.telemetry import CommandAcked

GONE = {"key": DELETING, "value": "1764380000", "effect": "NoSchedule"}
STANDBY = "standby_state"
TEMPLATE = PodTemplateName("gpu", "whole-node")
KEPT = {KEEP: "true", OURS: "ready", STANDBY_EPOCH: "3"}


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(kubernetes_standby, "POLL_S", 0.02)


def tree(ready: str = "True", taints: Any = None, **annotations: str) -> KubernetesNode:
    meta = {"name": "n", "resourceVersion": "7", "annotations": annotations}
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return msgspec.convert({"metadata": meta, "spec": {"taints": taints}, "status": status}, KubernetesNode)


class Sleeping:
    """The sink beside its source; `order` commands it, `acks` are its answers."""

    def __init__(self, sink: KubernetesStandby, heard: Heard, acks: list[CommandAcked], epoch: int) -> None:
        self.sink, self.heard, self.acks, self.epoch, self.number = sink, heard, acks, epoch, 0

    async def order(self, standby: int, nodes: Sequence[int] = (0,), lease_s: float = 600) -> None:
        self.number += 1
        now_ns, n = time.time_ns(), len(nodes)
        end_ns = now_ns + round(lease_s * 1e9)
        await self.sink.apply((CommandBatch(
            "node.standby", "idle_power", self.epoch, np.array(nodes, np.int32), np.full(n, 4, np.int32),
            np.full(n, self.number, np.int64), np.full(n, float(standby)), "idle", now_ns, end_ns, end_ns,
        ),))  # fmt: skip

    async def reach(self, state: str, standby: int, nodes: Sequence[int] = (0,)) -> str:
        await self.order(standby, nodes)
        return await self.reached(state)

    async def reached(self, state: str) -> str:
        """The words of the present command's answer."""
        now = f"{self.epoch}-{self.number}"
        await until(lambda: any((a.command, a.state) == (now, state) for a in self.acks))
        return self.acks[-1].detail

    def standby(self, node: int) -> float | None:
        return self.heard.last(node, STANDBY)


@asynccontextmanager
async def sleeping(
    site: Site, cluster: Cluster, epoch: int = 3, template: PodTemplateName | None = None
) -> AsyncIterator[Sleeping]:
    acks: list[CommandAcked] = []
    async with followed(site, cluster, standby=True) as (source, heard):
        await until(lambda: source.busy("n0") is not None)
        client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{cluster.port}"), timeout_s=5)
        context = SinkContext(lambda items, _: acks.extend(i for i in items if isinstance(i, CommandAcked)),
                              lambda: True)  # fmt: skip
        sink = KubernetesStandby(client, source._hosts, context, source, template)
        task = asyncio.create_task(sink.run())
        try:
            yield Sleeping(sink, heard, acks, epoch)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def run(
    site: Site, story: Callable[[Cluster, Sleeping], Any], template: PodTemplateName | None = None,
    provisioning: bool = True,
) -> None:  # fmt: skip
    async def whole(cluster: Cluster) -> None:
        async with sleeping(site, cluster, template=template) as mine:
            await story(cluster, mine)

    told(whole, provisioning=provisioning and template is not None)


def take_away(cluster: Cluster, node: str = "n0") -> None:
    """As the autoscaler does: the taint, then the node goes."""
    cluster.change(NODES, node, {"spec": {"taints": [THEIRS, GONE]}})
    cluster.gone(node, None, NODES)  # type: ignore[arg-type]


def test_plans() -> None:
    ours = KEPT | {"other": "x"}
    meta = {"resourceVersion": "7", "annotations": KEPT}
    assert standby_plan(tree(), READY, 3).patch == {"metadata": meta}
    assert standby_plan(tree(**ours), READY, 3) == (None, "")
    assert standby_plan(tree(**{**ours, STANDBY_EPOCH: "2"}), READY, 3).patch == {"metadata": meta}
    assert standby_plan(tree(), ASLEEP, 3) == (None, "")
    removed = standby_plan(tree(**ours), ASLEEP, 3).patch
    assert removed is not None
    assert removed["metadata"]["annotations"] == {KEEP: None, OURS: None, STANDBY_EPOCH: "3"}
    # what others set stays, with or without our mark
    assert standby_plan(tree(**{KEEP: "true"}), READY, 3) == (None, "")
    assert "somebody else set the annotation" in standby_plan(tree(**{KEEP: "true"}), ASLEEP, 3).refusal
    assert "somebody set" in standby_plan(tree(**{**ours, KEEP: "false"}), READY, 3).refusal
    unmarked = standby_plan(tree(**{**ours, KEEP: "false"}), ASLEEP, 3).patch
    assert unmarked is not None
    assert unmarked["metadata"]["annotations"] == {OURS: None, STANDBY_EPOCH: "3"}
    for standby in (READY, ASLEEP):
        assert "epoch 4" in standby_plan(tree(**{**ours, STANDBY_EPOCH: "4"}), standby, 3).refusal


def test_only_the_autoscalers_own_sign_is_sleep() -> None:
    downs, leaving = ScaleDowns(), tree("False", [GONE])
    assert downs.standby_of(0, tree(), False) == READY
    assert downs.standby_of(0, tree("Unknown"), False) is None
    assert downs.standby_of(0, tree("False", [THEIRS]), False) is None
    assert downs.standby_of(0, leaving, False) == ASLEEP
    assert downs.standby_of(0, leaving, True) is None  # its pods still run
    downs.take(0, tree(), False)
    assert downs.standby_of(0, None, False) is None  # it vanished
    downs.take(0, leaving, False)
    assert downs.standby_of(0, None, False) == ASLEEP
    downs.take(0, tree("False"), True)
    assert downs.standby_of(0, tree("False"), False) == WAKING
    downs.take(0, tree(), True)
    assert (downs.standby_of(0, tree(), False), downs.standby_of(0, tree("False"), False)) == (READY, None)


def test_kept_let_go_taken_away_and_back(site: Site) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        assert [mine.standby(n) for n in range(4)] == [0.0] * 4
        assert await mine.reach("done", READY) == "kept"
        assert marks(cluster) == KEPT
        assert "has not started" in await mine.reach("in_progress", ASLEEP)
        assert marks(cluster) == {STANDBY_EPOCH: "3"}
        take_away(cluster)
        assert "removed it" in await mine.reached("done")
        await until(lambda: mine.standby(0) == ASLEEP)
        assert "for pending pods" in await mine.reach("in_progress", READY)
        status = {"conditions": [{"type": "Ready", "status": "False"}]}
        cluster._store(NODES, None, {"metadata": {"name": "n0"}, "spec": {}, "status": status})
        await until(lambda: mine.standby(0) == WAKING)
        await until(lambda: mine.acks[-1].detail == "it is kept, but not Ready")
        cluster.change(NODES, "n0", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        assert await mine.reached("done") == "kept"
        await until(lambda: mine.standby(0) == READY)
        assert marks(cluster) == KEPT

    run(site, story)


def test_a_node_that_vanishes_is_unknown_and_not_asleep(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.kubernetes.source.RESTATE_S", 0.0)

    async def story(cluster: Cluster, mine: Sleeping) -> None:
        cluster.gone("n0", None, NODES)  # type: ignore[arg-type]
        await until(lambda: mine.standby(0) is None)
        for standby in (READY, ASLEEP):
            assert "no such node" in await mine.reach("failed", standby)
        # A watch that ended meanwhile: what the node was when it was last listed counts
        cluster.change(NODES, "n1", {"spec": {"taints": [GONE]}})
        await until(lambda: mine.standby(1) == ASLEEP)
        cluster.objects[NODES, None, "n1"].delete()
        cluster.objects[NODES, None, "n2"].delete()
        cluster.compacted = cluster.version + 2
        cluster.change(NODES, "n3", {"spec": {"taints": [THEIRS]}})
        cluster.put_node("n4")
        await until(lambda: mine.standby(2) is None)
        assert mine.standby(1) == ASLEEP

    run(site, story)


def test_what_others_keep_and_what_works_does_not_sleep(site: Site) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        cluster.change(NODES, "n0", {"metadata": {"annotations": {KEEP: "true"}}})
        assert "somebody else set the annotation" in await mine.reach("failed", ASLEEP)
        await mine.reach("done", READY)
        assert marks(cluster) == {KEEP: "true"}
        await mine.reach("done", READY, (1,))
        cluster.put_pod("p", "n1")
        await until(lambda: mine.sink._source.busy("n1"))
        assert "it runs pods" in await mine.reach("failed", ASLEEP, (1,))
        assert marks(cluster, "n1") == KEPT
        assert "ready or asleep" in await mine.reach("failed", WAKING, (2,))
        mine.epoch = 2
        assert "epoch 3" in await mine.reach("failed", READY, (1,))
        mine.epoch = 4
        await mine.reach("done", READY, (1,))
        assert marks(cluster, "n1") == {**KEPT, STANDBY_EPOCH: "4"}

    run(site, story)


async def asleep(cluster: Cluster, mine: Sleeping, *nodes: int) -> None:
    for node in nodes:
        take_away(cluster, f"n{node}")
        await until(lambda node=node: mine.standby(node) == ASLEEP)  # type: ignore[misc]


def returned(cluster: Cluster, node: str) -> None:
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster._store(NODES, None, {"metadata": {"name": node}, "spec": {"taints": []}, "status": status})


def test_nodes_are_asked_back_together_before_pods_wait(site: Site) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        await asleep(cluster, mine, 0, 1)
        assert "waits for the autoscaler" in await mine.reach("in_progress", READY, (0, 1))
        (request,) = cluster.provisionings()
        assert request["spec"] == {
            "provisioningClassName": "best-effort-atomic-scale-up.autoscaling.x-k8s.io",
            "podSets": [{"count": 2, "podTemplateRef": {"name": "whole-node"}}],
        }
        assert json.loads(request["metadata"]["annotations"]["racktwin.io/nodes"]) == [
            "lab/h/r1/node0", "lab/h/r1/node1",
        ]  # fmt: skip
        name = request["metadata"]["name"]
        for kind, words in (("Accepted", "has accepted"), ("Provisioned", "has capacity")):
            cluster.set_condition(name, kind, namespace="gpu", resource=PROVISIONING)
            await until(lambda words=words: words in mine.acks[-1].detail)  # type: ignore[misc]
        await mine.order(READY, (0, 1))
        for node in ("n0", "n1"):
            returned(cluster, node)
        await until(lambda: sum(a.state == "done" and a.detail == "kept" for a in mine.acks) >= 2)
        assert len(cluster.provisionings()) == 1
        assert mine.standby(0) == mine.standby(1) == READY

    run(site, story, TEMPLATE)


def answered(acks: list[CommandAcked], nodes: int) -> bool:
    return len({a.name for a in acks}) == nodes


def test_a_restart_asks_for_no_node_twice_and_for_another_as_well(site: Site) -> None:
    async def whole(cluster: Cluster) -> None:
        async with followed(site, cluster, standby=True) as (source, heard):
            await until(lambda: source.busy("n0") is not None)
            for epoch, nodes, requests in ((3, (0, 1), 1), (4, (0, 1), 1), (5, (0, 1, 2), 2)):
                client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{cluster.port}"), timeout_s=5)
                acks: list[CommandAcked] = []
                context = SinkContext(
                    lambda items, _, acks=acks: acks.extend(i for i in items if isinstance(i, CommandAcked)),
                    lambda: True,
                )
                sink = KubernetesStandby(client, source._hosts, context, source, TEMPLATE)
                mine, task = Sleeping(sink, heard, acks, epoch), asyncio.create_task(sink.run())
                for node in nodes:
                    if mine.standby(node) != ASLEEP:
                        await asleep(cluster, mine, node)
                await mine.reach("in_progress", READY, nodes)
                await until(partial(answered, acks, len(nodes)))
                assert len(cluster.provisionings()) == requests
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    told(whole, provisioning=True)


def test_what_the_autoscaler_refuses_is_asked_again_node_by_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        await asleep(cluster, mine, 0, 1)
        await mine.reach("in_progress", READY, (0, 1))
        (request,) = cluster.provisionings()
        cluster.set_condition(request["metadata"]["name"], "Failed", namespace="gpu", resource=PROVISIONING)
        await until(lambda: "cannot bring it back" in mine.acks[-1].detail)
        assert len(cluster.provisionings()) == 1, "not again at once"
        monkeypatch.setattr(provisioning, "AGAIN_S", -1.0)
        await until(lambda: len(cluster.provisionings()) == 3)
        assert [r["spec"]["podSets"][0]["count"] for r in cluster.provisionings()] == [2, 1, 1]

    run(site, story, TEMPLATE)


def test_a_node_that_goes_later_is_asked_back_too_and_one_whose_request_expired_again(site: Site) -> None:
    """Both under the same command: its number alone does not name a request."""

    async def story(cluster: Cluster, mine: Sleeping) -> None:
        await asleep(cluster, mine, 0)
        await mine.reach("in_progress", READY, (0, 1))
        await until(lambda: len(cluster.provisionings()) == 1)
        await asleep(cluster, mine, 1)
        mine.sink._works[1].due_s = 0.0
        await until(lambda: len(cluster.provisionings()) == 2)
        first = cluster.provisionings()[0]["metadata"]["name"]
        cluster.set_condition(first, "BookingExpired", namespace="gpu", resource=PROVISIONING)
        await until(lambda: len(cluster.provisionings()) == 3)
        nodes = [
            json.loads(r["metadata"]["annotations"]["racktwin.io/nodes"]) for r in cluster.provisionings()
        ]
        assert nodes == [["lab/h/r1/node0"], ["lab/h/r1/node1"], ["lab/h/r1/node0"]]

    run(site, story, TEMPLATE)


@pytest.mark.parametrize("lacks", ["the resource", "the right"])
def test_without_provisioning_requests_a_node_comes_back_for_pods(site: Site, lacks: str) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        await asleep(cluster, mine, 0)
        cluster.failing = [("POST", 403)] * 50 if lacks == "the right" else []
        words = await mine.reach("in_progress", READY)
        assert "no provisioning request can be made" in words
        assert ("404" if lacks == "the resource" else "403") in words
        returned(cluster, "n0")
        assert await mine.reached("done") == "kept"

    run(site, story, TEMPLATE, provisioning=lacks != "the resource")


def test_nothing_is_asked_for_sleep_nor_by_who_does_not_lead(site: Site) -> None:
    async def story(cluster: Cluster, mine: Sleeping) -> None:
        await asleep(cluster, mine, 0)
        await mine.reach("done", ASLEEP)
        mine.sink._may_act = lambda: False
        asked = cluster.asked("GET", "provisioningrequests")
        await mine.order(READY)
        await until(lambda: not mine.sink._works)
        assert cluster.provisionings() == []
        assert cluster.asked("GET", "provisioningrequests") == asked == 0

    run(site, story, TEMPLATE)
