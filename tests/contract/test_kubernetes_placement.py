"""Placement on a Kubernetes API server: checked on what it holds, beside service levels and rivals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import kmock
import msgspec
import numpy as np
import pytest

from connectors.kubernetes import orders
from connectors.kubernetes.nodes import EPOCH, PLACEMENT_EPOCH, PLACEMENT_TAINT, placement_of, placement_plan
from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.placement import CONTROL
from tests.support.builders import site_of, two_racks
from tests.support.kubernetes_apiserver import NODES, Cluster, marks
from tests.support.kubernetes_placement_sink import GARBAGE, KEPT, LAST, OUT, placing, taints
from tests.support.kubernetes_service_sink import THEIRS, Driven, hurry, told
from twin.site import Site


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def tree(taints: Any, **marks: str) -> KubernetesNode:
    annotations = {f"racktwin.io/{k}": v for k, v in marks.items()}
    meta = {"name": "n", "resourceVersion": "7", "annotations": annotations}
    return msgspec.convert({"metadata": meta, "spec": {"taints": taints}}, KubernetesNode)


def test_what_a_node_says() -> None:
    assert placement_of(msgspec.convert({"metadata": {"name": "n"}}, KubernetesNode)) == 0
    assert placement_of(tree([THEIRS, OUT, {}])) == 0
    assert placement_of(tree([OUT, {**LAST, "timeAdded": "2026-01-01T00:00:00Z"}])) == 1
    assert placement_of(tree([KEPT, THEIRS])) == 2
    for ours in GARBAGE:
        assert placement_of(tree([THEIRS, *ours])) is None


def test_what_is_written() -> None:
    assert placement_plan(tree([THEIRS]), 0, 3) == (None, "")
    assert placement_plan(tree([THEIRS], **{"placement-epoch": "2"}), 0, 3) == (None, "")
    assert placement_plan(tree([KEPT], **{"placement-epoch": "3"}), 2, 3) == (None, "")
    epoch = {"resourceVersion": "7", "annotations": {PLACEMENT_EPOCH: "3"}}
    # whoever leads now holds the mark, or the daemon before could take it away
    assert placement_plan(tree([KEPT], **{"placement-epoch": "2"}), 2, 3).patch == {"metadata": epoch}
    assert placement_plan(tree(None), 1, 3).patch == {"metadata": epoch, "spec": {"taints": [LAST]}}
    assert placement_plan(tree([LAST]), 0, 3).patch == {"metadata": epoch, "spec": {"taints": None}}
    for ours in GARBAGE:
        cleared = placement_plan(tree([*ours, OUT]), 0, 3).patch
        assert cleared == {"metadata": epoch, "spec": {"taints": [OUT]}}
    for placement in range(3):
        later, strange = (tree([LAST], **{"placement-epoch": e}) for e in ("4", "-1"))
        refusal = placement_plan(later, placement, 3).refusal
        assert refusal == "a daemon of the newer epoch 4 commands it; this daemon has epoch 3"
        assert "expected a number: remove it" in placement_plan(strange, placement, 3).refusal


def test_last_kept_and_back(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        before = cluster.node("n0")
        async with placing(site, cluster) as mine:
            assert await mine.reach("done", 1) == "last"
            assert taints(cluster) == [THEIRS, LAST]
            assert await mine.reach("done", 2) == "kept"
            assert taints(cluster) == [THEIRS, KEPT]
            assert marks(cluster) == {PLACEMENT_EPOCH: "3"}
            assert await mine.reach("done", 0) == "usual"
            assert cluster.node("n0")["spec"] == before["spec"]
            assert cluster.node("n0")["status"] == before["status"]
            await mine.reach("done", 0, nodes=(1,))  # usual and never ours: nothing is written
            assert "annotations" not in cluster.node("n1")["metadata"]
            assert [a.command for a in mine.acks] == ["3-1", "3-2", "3-3", "3-4"]
            assert {(a.generation, a.control) for a in mine.acks} == {(4, CONTROL)}
            assert [a.name for a in mine.acks][2:] == ["lab/h/r1/node0", "lab/h/r1/node1"]

    told(story)


def test_service_levels_and_placement_leave_each_other_alone(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with placing(site, cluster) as mine:
            await mine.reach("done", 2)
            await mine.level(3)  # withdrawn, while it is kept
            assert cluster.node("n0")["spec"] == {"unschedulable": True, "taints": [THEIRS, KEPT, OUT]}
            await mine.reach("done", 1)
            assert taints(cluster) == [THEIRS, OUT, LAST]
            await mine.level(4)
            assert taints(cluster) == [THEIRS, LAST, {**OUT, "value": "replace"}]
            await mine.level(0)
            assert cluster.node("n0")["spec"] == {"taints": [THEIRS, LAST]}
            assert marks(cluster) == {EPOCH: "3", PLACEMENT_EPOCH: "3"}
            await mine.level(2)
            await mine.reach("done", 0)  # usual, while it is out
            assert cluster.node("n0")["spec"] == {"unschedulable": True, "taints": [THEIRS, OUT]}
            await mine.level(0)
            assert cluster.node("n0")["spec"] == {"taints": [THEIRS]}

    told(story)


def test_a_restart_and_a_takeover(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with placing(site, cluster) as mine:
            await mine.reach("done", 2, number=7)
        assert cluster.asked("PATCH", "/") == 1
        async with placing(site, cluster) as mine:
            await mine.reach("done", 2, number=7, renewal=True)
            cluster.change(NODES, "n0", {"spec": {"taints": None}})  # somebody frees it
            await mine.order(2, number=7, renewal=True)
            await mine.until(lambda: taints(cluster) == [KEPT])
            await mine.idle()
            assert len(mine.acks) == 1
        assert cluster.asked("PATCH", "/") == 2
        async with placing(site, cluster, epoch=4) as new, placing(site, cluster, epoch=3) as deposed:
            await new.reach("done", 2, policy="arbiter")
            assert marks(cluster) == {PLACEMENT_EPOCH: "4"}
            said = await deposed.reach("failed", 0)
            assert said == "a daemon of the newer epoch 4 commands it; this daemon has epoch 3"
            assert taints(cluster) == [KEPT]
            await new.reach("done", 0)
            await deposed.reach("failed", 2)
            assert taints(cluster) == []

    told(story)


def test_a_lease_that_ends_leaves_the_node_as_it_is(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        handle = cluster._handle
        async with placing(site, cluster) as mine:
            await mine.order(2, lease_s=0)
            await mine.reach("done", 2, nodes=(1,))

            async def slowly(request: kmock.Request) -> Any:
                if request.method.value == "GET":  # it ends between our reading and our writing
                    mine.placing._now_ns = lambda: time.time_ns() + 601 * 10**9
                return await handle(request)

            cluster._handle = slowly  # type: ignore[method-assign]
            await mine.order(2, nodes=(2,))
            await mine.until(lambda: not mine.placing._works)
            assert [taints(cluster, f"n{n}") for n in range(3)] == [[THEIRS], [THEIRS, KEPT], [THEIRS]]
            assert [a.name for a in mine.acks] == ["lab/h/r1/node1"]

    told(story)


@pytest.mark.parametrize("ours", GARBAGE)
def test_garbage_in_our_taint_is_replaced_and_in_our_epoch_is_told(site: Site, ours: list[Any]) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.change(NODES, "n0", {"spec": {"taints": [THEIRS, *ours]}})
        cluster.change(NODES, "n1", {"spec": {"taints": [*ours, OUT]}})
        cluster.change(NODES, "n2", {"metadata": {"annotations": {PLACEMENT_EPOCH: "soon"}}})
        async with placing(site, cluster) as mine:
            await mine.reach("done", 2)
            assert taints(cluster) == [THEIRS, KEPT]
            await mine.reach("done", 0, nodes=(1,))
            assert taints(cluster, "n1") == [OUT]
            assert "expected a number: remove it" in await mine.reach("failed", 2, nodes=(2,))
            assert taints(cluster, "n2") == [THEIRS]

    told(story)


def test_many_nodes_at_once(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        busy, most, handle = 0, 0, cluster._handle

        async def counted(request: kmock.Request) -> Any:
            nonlocal busy, most
            busy, most = busy + 1, max(most, busy + 1)
            await asyncio.sleep(0.01)
            busy -= 1
            return await handle(request)

        cluster._handle = counted  # type: ignore[method-assign]
        for n in range(40):
            cluster.put_node(f"w{n}")
        async with placing(site, cluster) as mine:
            names = {e: f"w{e}" for e in range(40)}
            mine.hosts._hosts = dict(names)
            mine.hosts.name = names.__getitem__  # type: ignore[method-assign]
            await mine.order(2, nodes=tuple(names))
            await mine.until(lambda: sum(a.state == "done" for a in mine.acks) == 40)
        assert most == orders.AT_ONCE
        assert all(taints(cluster, host) == [KEPT] for host in names.values())

    told(story)


@pytest.mark.parametrize("seed", range(2))
def test_a_storm(site: Site, seed: int) -> None:
    """Refusals, restarts and rival daemons; then nodes are as ordered last, and others' marks as before."""
    rng = np.random.default_rng(seed)
    wanted, levels = {0: 0, 1: 0, 2: 0}, 0

    def failures() -> Iterator[tuple[str, int]]:
        for _ in range(rng.integers(0, 5)):
            yield str(rng.choice(("GET", "PATCH"))), int(rng.choice([429, 500, 503, 409]))

    async def story(cluster: Cluster) -> None:
        nonlocal levels
        before, number = cluster.node("n3"), 0
        for epoch in range(2, 6):
            async with placing(site, cluster, epoch) as mine, placing(site, cluster, epoch - 1) as deposed:
                for _ in range(6):
                    cluster.failing = list(failures())
                    node, placement, number = int(rng.integers(3)), int(rng.integers(3)), number + 1
                    wanted[node], levels = placement, int(rng.integers(5))
                    await mine.order(placement, nodes=(node,), number=number)
                    await mine.order(placement, nodes=(node,), number=number, renewal=True)  # told twice
                    await Driven.order(mine, levels, number=number)
                    if marks(cluster, f"n{node}").get(PLACEMENT_EPOCH) == str(epoch):
                        await deposed.order(int(rng.integers(3)), nodes=(node,))
                    await asyncio.sleep(float(rng.uniform(0, 0.03)))
        cluster.failing = []
        async with placing(site, cluster, 6) as last:
            await last.level(levels)
            for node, placement in wanted.items():
                await last.reach("done", placement, nodes=(node,))
        for node, placement in wanted.items():
            assert placement_of(msgspec.convert(cluster.node(f"n{node}"), KubernetesNode)) == placement
            out = {**OUT, "value": "replace" if levels == 4 else "draining"}
            left = [t for t in taints(cluster, f"n{node}") if t["key"] != PLACEMENT_TAINT]
            assert left == [THEIRS, *([out] if node == 0 and levels >= 2 else [])]
        assert ("unschedulable" in cluster.node("n0")["spec"]) == (levels > 0)
        assert cluster.node("n3") == before  # which nobody spoke of

    told(story)
