"""Placement as the source reads it back, and what the sink need not ask for where the source has seen it."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import pytest

from connectors.kubernetes.objects import KubernetesNode
from connectors.kubernetes.placement import ECHO_NS
from tests.support.builders import site_of, two_racks
from tests.support.kubernetes_apiserver import NODES, Cluster
from tests.support.kubernetes_placement_sink import GARBAGE, KEPT, followed, placing, taints, until
from tests.support.kubernetes_service_sink import THEIRS, hurry, told
from twin.site import Site


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_placement_is_read_back(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_node("n2", taints=[KEPT])
        async with followed(site, cluster) as (_, heard), placing(site, cluster) as mine:
            assert [heard.last(n) for n in range(4)] == [0.0, 0.0, 2.0, 0.0]
            levels = len(heard.of(0, "service_level_state"))
            for placement in (1, 2, 0, 1):
                await mine.reach("done", placement)
                await until(lambda wanted=placement: heard.last(0) == wanted)  # type: ignore[misc]
            assert len(heard.of(0, "service_level_state")) == levels  # that did not change
            cluster.change(NODES, "n0", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
            await until(lambda: heard.last(0, "service_level_state") is None)
            assert heard.last(0) == 1.0  # not ready, it is told all the same
            await mine.reach("done", 2)
            await until(lambda: heard.last(0) == 2.0)
            cluster.change(NODES, "n0", {"spec": {"taints": GARBAGE[0]}})
            await until(lambda: heard.last(0) is None)
            cluster._written(NODES, None, "n2", "DELETED")
            await until(lambda: heard.last(2) is None)
            for before, after in pairwise(heard.of(0)):  # told later is of later, or the twin would drop it
                assert after.t_ns > before.t_ns or after.value == before.value

    told(story)


def test_placement_is_read_only_where_it_is_commanded(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_node("n2", taints=[KEPT])
        async with followed(site, cluster, placement=False) as (_, heard):
            cluster.change(NODES, "n0", {"spec": {"taints": [KEPT], "unschedulable": True}})
            await until(lambda: heard.last(0, "service_level_state") == 1.0)
            assert [heard.of(n) for n in range(4)] == [[]] * 4
            assert heard.last(0, "service_owner_state") == 2.0

    told(story)


def test_all_is_told_again_as_of_when_the_server_spoke(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: Cluster) -> None:
        async with followed(site, cluster) as (source, heard):
            monkeypatch.setattr("connectors.kubernetes.source.RESTATE_S", 0.0)
            told = len(heard.of(1))
            await until(lambda: len(heard.of(1)) > told + 1)
            assert heard.of(1)[-1].t_ns == min(source.nodes.received_ns, source.pods.received_ns)

    told(story)


def test_a_node_that_vanished_unheard_of_is_unknown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.put_node("n2", taints=[KEPT])
        async with followed(site, cluster) as (source, heard):
            monkeypatch.setattr("connectors.kubernetes.source.RESTATE_S", 0.0)
            cluster.objects[NODES, None, "n2"].delete()
            cluster.compacted = cluster.version + 2  # it must be listed anew
            cluster.change(NODES, "n1", {"spec": {"taints": [KEPT]}})
            cluster.put_node("n3", taints=[THEIRS])
            await until(lambda: heard.last(2) is None and heard.last(1) == 2.0)
            assert source.node_of("n2") is None

    told(story)


def test_what_the_source_sees_as_wanted_is_not_asked_for(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        async with (
            followed(site, cluster) as (source, heard),
            placing(site, cluster, seen=source.node_of) as mine,
        ):
            await mine.order(0, nodes=(0, 1, 2, 3))
            await mine.until(lambda: sum(a.state == "done" for a in mine.acks) == 4)
            assert cluster.asked("GET", "/nodes/") == 0
            await mine.reach("done", 2, number=8)
            assert (cluster.asked("GET", "/nodes/"), cluster.asked("PATCH", "/nodes/")) == (1, 1)
            await until(lambda: heard.last(0) == 2.0)
            await mine.order(2, number=8, renewal=True)  # just written: the source may see what was before
            await mine.until(lambda: cluster.asked("GET", "/nodes/") == 2)
            await mine.idle()
            mine.placing._now_ns = lambda: time.time_ns() + ECHO_NS + 10**9
            for _ in range(3):
                seen = mine.placing.counts["seen"]
                await mine.order(2, number=8, renewal=True)
                await mine.until(lambda before=seen: mine.placing.counts["seen"] > before)  # type: ignore[misc]
            assert cluster.asked("GET", "/nodes/") == 2
            cluster.change(NODES, "n0", {"spec": {"taints": [THEIRS]}})  # somebody frees it
            await until(lambda: heard.last(0) == 0.0)
            await mine.order(2, number=8, renewal=True)
            await mine.until(lambda: taints(cluster) == [THEIRS, KEPT])
            assert len(mine.acks) == 5

    told(story)


def test_what_is_old_or_was_written_since_is_not_relied_on(site: Site) -> None:
    async def story(cluster: Cluster) -> None:
        usual = msgspec.convert(cluster.node("n0"), KubernetesNode)
        async with placing(site, cluster, seen=lambda _: usual) as mine:  # a source that lags behind
            await mine.reach("done", 2)
            await mine.reach("done", 0)
            assert taints(cluster) == [THEIRS]
        async with followed(site, cluster) as (source, _):
            assert source.node_of("n1") is not None
            assert source.node_of("elsewhere") is None
            heard_ns = source.nodes.received_ns
            source.nodes.received_ns = time.time_ns() - ECHO_NS - 10**9
            assert source.node_of("n1") is None
            source.nodes.received_ns, source.nodes.version = heard_ns, ""  # it must be listed anew
            assert source.node_of("n1") is None

    told(story)
