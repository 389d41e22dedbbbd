"""Service levels on a Kubernetes API server in trouble: conflicts, rivals, restarts, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import kmock
import msgspec
import numpy as np
import pytest

from connectors.kubernetes.nodes import EPOCH, REASON, TAINT, level_of
from connectors.kubernetes.objects import KubernetesNode
from tests.support.builders import site_of, two_racks
from tests.support.kubernetes_apiserver import NODES, PODS, Cluster, marks
from tests.support.kubernetes_service_sink import THEIRS, Driven, driven, hurry, told
from twin.site import Site

LEASE_S = 3.0  # in which a busy machine begins what it is told


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_a_node_that_changes_meanwhile_keeps_what_others_wrote(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        handle, times = cluster._update, iter(range(3))

        async def raced(request: kmock.Request) -> Any:
            if (n := next(times, None)) is not None:  # between our reading and our writing
                cluster.change(NODES, "n0", {"spec": {"taints": [THEIRS, {**THEIRS, "key": f"k{n}"}]}})
            return await handle(request)

        cluster._update = raced  # type: ignore[method-assign]
        async with driven(site, cluster) as mine:
            await mine.reach("done", 2)
            assert mine.sink.counts["conflicts"] == 3
        assert [t["key"] for t in cluster.node("n0")["spec"]["taints"]] == ["dedicated", "k2", TAINT]

    told(story)


def test_two_daemons(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster, epoch=3) as old, driven(site, cluster, epoch=4) as new:
            await old.reach("done", 3)
            await new.reach("done", 0)
            detail = await old.reach("failed", 4)
            assert detail == "a daemon of the newer epoch 4 commands it; this daemon has epoch 3"
            assert cluster.node("n0")["spec"] == {"taints": [THEIRS]}
            old.leads = False
            await old.order(3, nodes=(1,))
            await new.reach("done", 1, nodes=(2,))
            assert cluster.node("n1")["spec"] == {"taints": [THEIRS]}

    told(story)


def test_a_restart_goes_on_and_does_nothing_twice(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0")
        cluster.lingering = True
        async with driven(site, cluster) as mine:
            await mine.reach("in_progress", 3, number=7)
        writes = cluster.asked("PATCH", "/"), cluster.asked("POST", "eviction")
        assert writes == (2, 1)  # the node and its status
        async with driven(site, cluster) as mine:
            await mine.reach("in_progress", 3, number=7, renewal=True)
            cluster.gone("a-0")
            await mine.until(lambda: mine.last()[0] == "done")
            await mine.order(3, number=7, renewal=True)
            await asyncio.sleep(0.1)
            assert len(mine.acks) == 2
        assert (cluster.asked("PATCH", "/"), cluster.asked("POST", "eviction")) == writes
        assert marks(cluster)[REASON] == "XID 79 twice"  # a renewal gives none

    told(story)


def test_a_server_restart_is_outlived(site: Site) -> None:
    cluster = Cluster()

    async def run() -> None:
        async with cluster.serving():
            cluster.put_node("n0")
            cluster.put_pod("a-0", node="n0")
            cluster.lingering = True
            mine = Driven(site, cluster.port, 3)
            task = asyncio.create_task(mine.sink.run())
            await mine.reach("in_progress", 3)
        await mine.until(lambda: "retrying: " in mine.last()[1])
        assert mine.sink.fault
        assert mine.last()[0] == "in_progress"
        async with cluster.serving():
            await mine.until(lambda: not mine.sink.fault)  # though the pod is still there
            assert mine.last()[0] == "in_progress"
            cluster.gone("a-0")
            await mine.until(lambda: mine.last()[0] == "done")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert cluster.evicted == ["a-0"]


def test_what_is_taken_back_or_not_renewed_stops(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0", labels={"app": "a"})
        cluster.put_pod("b-0", node="n1", labels={"app": "a"})
        cluster.budget = {"a": 0}
        async with driven(site, cluster) as mine:
            await mine.reach("in_progress", 3, nodes=(0, 1), lease_s=LEASE_S)
            await mine.reach("done", 0)
            assert cluster.node("n0")["spec"] == {"taints": [THEIRS]}
            await asyncio.sleep(LEASE_S + 0.1)
            cluster.budget = {}
            asked = cluster.asked("POST", "eviction")
            await asyncio.sleep(0.2)
            assert cluster.asked("POST", "eviction") == asked
            assert cluster.node("n1")["spec"]["unschedulable"] is True  # it stays as it is

    assert told(story).evicted == []


def test_a_drain_that_takes_too_long_fails_and_says_why(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0", labels={"app": "a"})
        cluster.budget = {"a": 0}
        async with driven(site, cluster) as mine:
            detail = await mine.reach("failed", 3, deadline_s=0.2)
            assert detail.startswith("not done in time: ml/a-0 must wait (Cannot evict")

    told(story)


@pytest.mark.parametrize(
    "failure, state, why",
    [
        (("PATCH", 403), "failed", "expected the rights of deploy/kubernetes/rbac.yaml"),
        (("GET", 404), "failed", "answers 404"),
        (("PATCH", 422), "failed", "answers 422 Injected: asked for by the test"),
        (("PATCH", 503), "done", "drained"),
        (("status", 403), "done", "no pod is left"),
        (("eviction", 500), "done", "no pod is left; evicted: 1"),
        (("eviction", 403), "failed", "expected the rights of"),
    ],
)
def test_refusals(site: Site, failure: tuple[str, int], state: str, why: str) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0")
        cluster.failing = [failure]
        async with driven(site, cluster) as mine:
            detail = await mine.reach(state, 3)
            assert why in detail or why == "drained"
            if state == "failed":  # and the next renewal finds it mended
                await mine.reach("done", 3, number=1, renewal=True)

    told(story)


def test_unknown_nodes_and_strange_marks(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster) as mine:
            detail = await mine.reach("failed", 3, nodes=(9,))
            assert detail == "the cluster has no such node; see kubernetes.node_names"
            cluster.change(NODES, "n0", {"metadata": {"annotations": {EPOCH: "soon"}}})
            assert "expected a number: remove it" in await mine.reach("failed", 3)
            mine.sink._hosts.listed = False
            await mine.order(3, nodes=(9,))
            await mine.until(lambda: "are not listed yet" in mine.last()[1])
            assert mine.last()[0] == "in_progress"

    told(story)


@pytest.mark.parametrize("part, patches", [("/api/v1/nodes", 0), ("/api/v1/pods", 2)])
def test_a_daemon_that_is_deposed_stops_at_once(site: Site, part: str, patches: int) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0")
        handle = cluster._handle

        async with driven(site, cluster) as mine:

            async def deposed(request: kmock.Request) -> Any:
                if request.method.value == "GET" and part in str(request.url):
                    mine.leads = False
                return await handle(request)

            cluster._handle = deposed  # type: ignore[method-assign]
            await mine.order(3)
            await mine.until(lambda: not mine.leads)
            await asyncio.sleep(0.1)
            cluster._handle = handle  # type: ignore[method-assign]
            mine.leads = True  # of another term: what was ordered before is not taken up again
            mine.sink._wake.set()
            await asyncio.sleep(0.1)
            assert cluster.asked("PATCH", "/") == patches
            assert not mine.acks

    assert told(story).evicted == []


def test_a_pod_that_is_gone_already_has_left(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0")
        evict = cluster._evict

        def gone(request: kmock.Request) -> Any:
            cluster.gone("a-0")
            return evict(request)

        cluster._evict = gone  # type: ignore[method-assign]
        async with driven(site, cluster) as mine:
            await mine.reach("done", 3)

    told(story)


def test_another_pod_of_the_same_name_is_not_evicted(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0")
        evict = cluster._evict

        def replaced(request: kmock.Request) -> Any:
            cluster.change(PODS, "a-0", {"metadata": {"uid": "another"}, "spec": {"nodeName": "n1"}}, "ml")
            return evict(request)

        cluster._evict = replaced  # type: ignore[method-assign]
        async with driven(site, cluster) as mine:
            await mine.reach("done", 3)

    assert told(story).evicted == []


@pytest.mark.parametrize("seed", range(2))
def test_a_storm(site: Site, seed: int) -> None:
    """Refusals, races, restarts of the sink and rival daemons; then the nodes are as was ordered last."""
    rng = np.random.default_rng(seed)
    wanted = {0: 0, 1: 0, 2: 0}
    drained: set[str] = set()

    async def story(cluster: Cluster) -> None:
        for n in range(4):
            for k in range(3):
                cluster.put_pod(f"p{n}-{k}", node=f"n{n}", labels={"app": "a"})
        before = cluster.node("n3")
        epoch, number = 1, 0
        for _ in range(4):
            epoch += 1
            async with driven(site, cluster, epoch) as mine, driven(site, cluster, epoch - 1) as deposed:
                for _ in range(6):
                    cluster.budget = {"a": int(rng.integers(0, 2))}
                    parts = ("GET", "PATCH", "eviction", "status")
                    cluster.failing = [
                        (str(rng.choice(parts)), int(rng.choice([429, 500, 503, 409])))
                        for _ in range(rng.integers(0, 5))
                    ]
                    node, level, number = int(rng.integers(3)), int(rng.integers(5)), number + 1
                    wanted[node] = level
                    if level >= 3:
                        drained.add(f"p{node}")
                    await mine.order(level, nodes=(node,), number=number)
                    await mine.order(level, nodes=(node,), number=number, renewal=True)  # told twice
                    if epoch > 2 and mine.acks and EPOCH in marks(cluster, f"n{node}"):
                        held = int(marks(cluster, f"n{node}")[EPOCH]) == epoch
                        await deposed.order(int(rng.integers(5)), nodes=(node,) if held else ())
                    await asyncio.sleep(float(rng.uniform(0, 0.03)))
        cluster.budget, cluster.failing = {}, []
        async with driven(site, cluster, epoch + 1) as last:
            for node, level in wanted.items():
                await last.order(level, nodes=(node,))
            await last.until(lambda: sum(a.state == "done" for a in last.acks) == 3)
        for node, level in wanted.items():
            left = any(p.startswith(f"p{node}-") for p in cluster.pods())
            read = level_of(msgspec.convert(cluster.node(f"n{node}"), KubernetesNode), busy=left)
            assert read == level
        assert cluster.node("n3") == before  # which nobody spoke of
        assert {e[:2] for e in cluster.evicted} <= drained
        assert len(cluster.evicted) == len(set(cluster.evicted))

    told(story)
