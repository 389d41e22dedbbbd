"""Service levels on a Kubernetes API server: checked on what the server holds, not on what we believe."""

from __future__ import annotations

import asyncio
import time

import kmock
import pytest

from connectors.kubernetes.nodes import CONDITION, EPOCH, FOUND, LEVEL, REASON, TAINT
from connectors.kubernetes.sink import CONTROL, RESUMED_S
from tests.support.builders import site_of, two_racks
from tests.support.kubernetes_apiserver import NODES, Cluster, marks
from tests.support.kubernetes_service_sink import THEIRS, Driven, driven, hurry, told
from twin.site import Site

OURS = {"key": TAINT, "value": "draining", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_the_emulator_as_others_wrote_it(site: Site) -> None:
    async def run() -> None:
        async with kmock.KubernetesEmulator() as api, kmock.Server(api) as server:
            api.resources["v1/pods"] = {}
            api.objects["v1/nodes", None, "n0"] = {"metadata": {"name": "n0"}, "spec": {}}
            other = {"metadata": {"name": "p", "namespace": "ml"}, "spec": {"nodeName": "n1"}}
            api.objects["v1/pods", "ml", "p"] = other  # it knows no field selector, and gives this one too
            mine = Driven(site, server.port, 3)
            task = asyncio.create_task(mine.sink.run())
            for level in (1, 2, 3):
                await mine.reach("done", level)
            node = api.objects["v1/nodes", None, "n0"]
            assert node >= {"spec": {"unschedulable": True, "taints": [OURS]}}
            assert node["status"]["conditions"][0]["type"] == CONDITION
            await mine.reach("done", 0)
            assert node["spec"] == {}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_each_level_and_back(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster) as mine:
            before = cluster.node("n0")
            await mine.reach("done", 1)
            spec = cluster.node("n0")["spec"]
            assert spec == {"unschedulable": True, "taints": [THEIRS]}
            assert (marks(cluster)[LEVEL], marks(cluster)[EPOCH]) == ("cordoned", "3")
            assert marks(cluster)[REASON] == "XID 79 twice"
            await mine.reach("done", 2)
            assert cluster.node("n0")["spec"]["taints"] == [THEIRS, OURS]
            await mine.reach("done", 4)
            assert cluster.node("n0")["spec"]["taints"] == [THEIRS, {**OURS, "value": "replace"}]
            kinds = {c["type"]: c["status"] for c in cluster.node("n0")["status"]["conditions"]}
            assert kinds == {"Ready": "True", CONDITION: "False"}
            await mine.reach("done", 0)
            after = cluster.node("n0")
            assert after["spec"] == before["spec"]
            assert marks(cluster) == {EPOCH: "3"}
            kinds = {c["type"]: c["status"] for c in after["status"]["conditions"]}
            assert kinds == {"Ready": "True", CONDITION: "True"}
            assert [a.command for a in mine.acks] == ["3-1", "3-2", "3-3", "3-4"]
            assert {(a.name, a.generation, a.control) for a in mine.acks} == {("lab/h/r1/node0", 4, CONTROL)}

    told(story)


def test_a_drain_moves_pods_and_leaves_those_of_the_node(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("train-0", node="n0")
        cluster.put_pod("elsewhere", node="n1")
        cluster.put_pod("agent", node="n0", owner="DaemonSet/agent")
        cluster.put_pod(
            "static", node="n0", owner="Node/n0", annotations={"kubernetes.io/config.mirror": "x"}
        )
        cluster.put_pod("was", node="n0", phase="Succeeded")
        cluster.lingering = True
        async with driven(site, cluster) as mine:
            detail = await mine.reach("in_progress", 3)
            assert detail == "1 pod is leaving"
            assert cluster.evicted == ["train-0"]
            cluster.gone("train-0")
            await mine.until(lambda: mine.last()[0] == "done")
            assert mine.last()[1] == "no pod is left; evicted: 1; pods that belong to the node and stay: 2"

    assert told(story).pods() == ["agent", "elsewhere", "static", "was"]


def test_a_disruption_budget_is_waited_for(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        for n in range(2):
            cluster.put_pod(f"web-{n}", node="n0", labels={"app": "web"}, owner="ReplicaSet/web")
        cluster.budget = {"web": 1}
        async with driven(site, cluster) as mine:
            detail = await mine.reach("in_progress", 3)
            assert "must wait (Cannot evict pod as it would violate" in detail
            await mine.until(lambda: cluster.asked("POST", "eviction") >= 5)
            assert len(cluster.evicted) == 1
            assert mine.last()[0] == "in_progress"
            cluster.budget = {"web": 1}
            await mine.until(lambda: mine.last()[0] == "done")

    assert sorted(told(story).evicted) == ["web-0", "web-1"]


def test_pods_that_nobody_would_make_anew(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_pod("mine", node="n0", owner="")
        async with driven(site, cluster) as mine:
            detail = await mine.reach("failed", 3)
            assert detail.startswith("ml/mine would be lost, since no controller recreates them")
            assert cluster.pods() == ["mine"]
            await mine.order(3, number=1, renewal=True)
            cluster.gone("mine")
            await mine.order(3, number=1, renewal=True)
            await mine.until(lambda: mine.last()[0] == "done")
        cluster.put_pod("mine", node="n0", owner="")
        async with driven(site, cluster, evict_bare_pods=True) as mine:
            await mine.reach("done", 3, number=8)

    assert told(story).evicted == ["mine"]


def test_what_others_cordoned_stays_theirs(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.change(NODES, "n0", {"spec": {"unschedulable": True}})
        async with driven(site, cluster) as mine:
            assert "cordoned by somebody else" in await mine.reach("failed", 0)
            assert cluster.node("n0")["spec"]["unschedulable"] is True
            await mine.reach("done", 3)
            assert marks(cluster)[FOUND] == "cordoned"
            await mine.reach("done", 0)
            assert cluster.node("n0")["spec"] == {"unschedulable": True, "taints": [THEIRS]}
            await mine.reach("done", 0, nodes=(1,))  # in service and never ours: nothing is written
            assert "annotations" not in cluster.node("n1")["metadata"]

    told(story)


def test_what_somebody_opens_again_is_not_fought_over(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster) as mine:
            await mine.reach("done", 1)
            cluster.change(NODES, "n0", {"spec": {"unschedulable": None}})
            assert "made it schedulable" in await mine.reach("failed", 1, number=1, renewal=True)
            assert "unschedulable" not in cluster.node("n0")["spec"]
            said = await mine.reach("failed", 2)  # a new number, too soon
            assert said == "resumed by others: somebody made it schedulable again just before"
            mine.sink._now_ns = lambda: time.time_ns() + round(RESUMED_S * 1e9)
            await mine.reach("failed", 2, number=2)  # sent again it stays refused
            assert "unschedulable" not in cluster.node("n0")["spec"]
            await mine.reach("done", 2)  # a new decision is another matter
            assert cluster.node("n0")["spec"]["unschedulable"] is True

    told(story)


def test_who_leads_anew_judges_by_what_is_there(site: Site) -> None:
    """A new leader withdraws a node again if another daemon has opened it since the earlier term."""

    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster) as mine:
            await mine.reach("done", 1)
            mine.leads = False
            await mine.until(lambda: not mine.sink._works)
            cluster.change(NODES, "n0", {"spec": {"unschedulable": None}})
            mine.leads = True
            await mine.reach("done", 2)
            assert cluster.node("n0")["spec"]["unschedulable"] is True

    told(story)


def test_what_was_opened_before_a_new_level_came_is_left_open(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with driven(site, cluster) as mine:
            await mine.reach("done", 4)
            cluster.change(NODES, "n0", {"spec": {"unschedulable": None}})
            assert "resumed by others" in await mine.reach("failed", 3)  # nothing has told of it yet
            assert "unschedulable" not in cluster.node("n0")["spec"]
            await mine.reach("done", 3, policy="operator")  # people asked for it
            await mine.reach("done", 0)
            await mine.reach("done", 2)  # it was opened by our own word
            cluster.change(NODES, "n0", {"spec": {"unschedulable": None}})
        async with driven(site, cluster, epoch=4) as after:
            # a daemon without memory commands anew what was in force: the marks say that it was undone
            assert "resumed by others" in await after.reach("failed", 2, policy="arbiter")
            assert "unschedulable" not in cluster.node("n0")["spec"]
            await after.reach("done", 2)

    told(story)
