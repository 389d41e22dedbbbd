"""Jobs and levels of a Kubernetes API server: kmock's as it is, and with what it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import kmock
import pytest

from connectors.kubernetes import (
    Hosts,
    KubernetesClient,
    KubernetesSource,
    PodLabels,
    client as kubernetes_client,
    source as kubernetes,
)
from connectors.kubernetes.access import Access, from_kubeconfig
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet, until
from tests.support.kubernetes_apiserver import JOB_LABEL, NODES, PODS, Cluster
from tests.support.kubernetes_service_sink import driven, hurry, told
from tests.support.patience import PATIENCE_S
from twin.catalogue import ConnectorError
from twin.site import Site
from twin.telemetry import JobEnded, JobStarted, Reading

NAMES = {"n[0-3]": "r1/node[0-3]"}


class Kept(RecordingInlet):
    """An inlet, by jobs and levels of nodes."""

    def level(self, node: int) -> float | None:
        return self.read("service_level_state", node)

    def read(self, signal: str, node: int) -> float | None:
        told = [e.value for e in self.items
                if isinstance(e, Reading) and (e.signal, e.entity) == (signal, node)]  # fmt: skip
        return told[-1] if told else -1.0

    @property
    def started(self) -> list[JobStarted]:
        return [e for e in self.items if isinstance(e, JobStarted)]

    @property
    def ended(self) -> list[JobEnded]:
        return [e for e in self.items if isinstance(e, JobEnded)]


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_client, "FIRST_S", 0.01)
    monkeypatch.setattr(kubernetes, "FIRST_S", 0.02)


def source(site: Site, port: int | None, **more: Any) -> KubernetesSource:
    client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{port}"), timeout_s=5)
    known = more.pop("known", tuple)
    labels = PodLabels(cluster="lab", **more)
    return KubernetesSource(client, Hosts(site, NAMES), labels, known=known, settle_s=0.02)


Story = Callable[[Kept, asyncio.Task[None]], Awaitable[None]]


async def watched(mine: KubernetesSource, story: Story) -> Kept:
    """Return the inlet of a source that runs while a story goes on."""
    inlet = Kept()
    task = asyncio.create_task(mine.run(inlet))
    try:
        await story(inlet, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return inlet


def test_the_emulator_as_others_wrote_it(site: Site) -> None:
    async def run() -> None:
        async with kmock.KubernetesEmulator() as api, kmock.Server(api) as server:
            api.resources["v1/pods"] = {}
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            node = {"metadata": {"name": "n1"}, "spec": {"unschedulable": True}, "status": ready}
            api.objects["v1/nodes", None, "n1"] = node

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.level(1) == 1.0, task=task)
                await server.client.patch("/api/v1/nodes/n1", json={"spec": {"unschedulable": False}})
                await until(lambda: inlet.level(1) == 0.0, task=task)
                meta = {"name": "p", "namespace": "ml", "labels": {JOB_LABEL: "a"}}
                eight = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
                pod = {"metadata": meta, "spec": {"nodeName": "n1", "containers": [eight]}}
                await server.client.post("/api/v1/namespaces/ml/pods", json=pod)
                await until(lambda: inlet.started, task=task)
                await server.client.delete("/api/v1/namespaces/ml/pods/p")
                await until(lambda: inlet.ended, task=task)

            inlet = await watched(source(site, server.port), story)
            assert not inlet.faults

    asyncio.run(run())


def test_levels_are_read_back_as_they_are_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)

    async def story(cluster: Cluster) -> None:
        cluster.put_pod("a-0", node="n0", labels={JOB_LABEL: "a"})
        cluster.lingering = True

        async def levels(inlet: Kept, task: asyncio.Task[None]) -> None:
            async with driven(site, cluster) as mine:
                await mine.order(1)
                await until(lambda: inlet.level(0) == 1.0, task=task)
                assert [inlet.read("service_owner_state", n) for n in (0, 1)] == [1.0, 0.0]
                await mine.order(4)
                await until(lambda: inlet.level(0) == 2.0, task=task)  # pods are leaving
                cluster.gone("a-0")
                await until(lambda: inlet.level(0) == 4.0 and inlet.ended, task=task)
                await mine.order(0)
                await until(lambda: inlet.level(0) == 0.0, task=task)
                not_ready = [{"type": "Ready", "status": "Unknown"}]
                cluster.change(NODES, "n0", {"status": {"conditions": not_ready}})
                await until(lambda: inlet.level(0) is None, task=task)
                assert inlet.read("service_owner_state", 0) is None
                cluster.change(NODES, "n1", {"spec": {"unschedulable": True}})
                await until(lambda: inlet.level(1) == 1.0, task=task)
                assert inlet.read("service_owner_state", 1) == 2.0

        inlet = await watched(source(site, cluster.port), levels)
        for signal in ("service_level_state", "service_owner_state"):
            read = [e for e in inlet.items if isinstance(e, Reading) and (e.entity, e.signal) == (0, signal)]
            for before, after in pairwise(read):  # what is told later is of later, or the twin would drop it
                assert after.t_ns > before.t_ns or after.value == before.value

    told(story)


def test_jobs_come_grow_and_go(site: Site) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            for n in range(3):
                cluster.put_node(f"n{n}")
            cluster.put_pod("waits", labels={JOB_LABEL: "waits"})
            cluster.put_pod("web", node="n2", gpus=0, owner="ReplicaSet/web")
            cluster.put_pod("a-0", node="n0", labels={JOB_LABEL: "a"}, owner="PyTorchJob/a")
            ids: list[str] = []

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.started, task=task)
                cluster.put_pod("a-1", node="n1", labels={JOB_LABEL: "a"}, owner="PyTorchJob/a")
                await until(lambda: len(inlet.started) == 2, task=task)
                assert [e.nodes for e in inlet.started] == [
                    ("lab/h/r1/node0",), ("lab/h/r1/node0", "lab/h/r1/node1")
                ]  # fmt: skip
                assert {e.job for e in inlet.started} == {"k8s:lab:ml:a"}
                ids.append(inlet.started[-1].id)

            inlet = await watched(source(site, cluster.port), story)
            assert not inlet.faults

            async def again(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.started and inlet.ended, task=task)
                assert [e.id for e in inlet.started] == ids  # a restart repeats them
                assert [e.job for e in inlet.ended] == ["k8s:lab:ml:gone"]
                cluster.change(PODS, "a-0", {"status": {"phase": "Succeeded"}}, "ml")
                cluster.change(PODS, "a-1", {"status": {"phase": "Succeeded"}}, "ml")
                await until(lambda: len(inlet.ended) == 2, task=task)
                assert inlet.ended[1].reason == "completed"
                assert inlet.ended[1].id == ids[0] + ":end"
                assert len(inlet.started) == 1

            known = dict.fromkeys(("k8s:lab:ml:gone", "k8s:other:ml:x", "slurm:lab:7"), ())
            known |= {"k8s:lab:ml:a": inlet.started[-1].nodes}
            await watched(source(site, cluster.port, known=lambda: known), again)

    asyncio.run(run())


def test_a_pod_made_anew_on_its_node_is_told(site: Site) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            for n in range(2):
                cluster.put_pod(f"a-{n}", node=f"n{n}", labels={JOB_LABEL: "a"})

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.started, task=task)
                cluster.gone("a-1")
                await until(lambda: len(inlet.started) == 2, task=task)
                cluster.put_pod("a-1", node="n1", labels={JOB_LABEL: "a"})
                await until(lambda: len(inlet.started) == 3, task=task)
                assert len({e.id for e in inlet.started}) == 3  # an id counts once
                assert inlet.started[2].nodes == inlet.started[0].nodes
                assert not inlet.ended

            await watched(source(site, cluster.port), story)

    asyncio.run(run())


def test_a_watch_that_is_too_old_lists_anew(site: Site) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            for n in range(2):
                cluster.put_node(f"n{n}")
                cluster.put_pod(f"a-{n}", node=f"n{n}", labels={JOB_LABEL: f"a{n}"})

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: len(inlet.started) == 2 and inlet.level(1) == 0.0, task=task)
                cluster.compacted = cluster.version + 2
                cluster.objects[PODS, "ml", "a-1"].delete()  # nobody is told of it
                cluster.change(NODES, "n1", {"spec": {"unschedulable": True}})
                cluster.put_node("n3")
                await until(lambda: inlet.ended and inlet.level(1) == 1.0, task=task)
                assert [e.job for e in inlet.ended] == ["k8s:lab:ml:a1"]
                assert len(inlet.started) == 2

            inlet = await watched(source(site, cluster.port), story)
            assert any("too old" in why for why in inlet.skipped)

    asyncio.run(run())


def test_a_server_that_is_gone_ends_no_job(site: Site) -> None:
    async def run() -> None:
        cluster = Cluster()
        async with cluster.serving():
            cluster.put_node("n0")
            cluster.put_pod("a-0", node="n0", labels={JOB_LABEL: "a"})
            cluster.put_pod("b-0", node="n0", labels={JOB_LABEL: "b"})
            mine = source(site, cluster.port)
            first = Kept()
            task = asyncio.create_task(mine.run(first))
            await until(lambda: len(first.started) == 2, task=task)
        with pytest.raises(ConnectorError, match="kubernetes"):
            await asyncio.wait_for(task, PATIENCE_S)
        assert not first.ended
        cluster.gone("a-0")
        async with cluster.serving():

            async def back(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.ended, task=task)
                assert [e.job for e in inlet.ended] == ["k8s:lab:ml:a"]
                assert not inlet.started

            await watched(mine, back)

    asyncio.run(run())


def test_many_pods_come_in_pages_and_a_lost_page_lists_anew(site: Site) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            cluster.put_node("n0")
            for n in range(1203):
                cluster.put_pod(f"a-{n}", node="n0" if n % 2 else "elsewhere", labels={JOB_LABEL: f"a{n}"})
            cluster.failing = [("continue=500", 410), ("continue=1000", 503)]

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.started, task=task)
                assert len(inlet.started) == 601
                assert cluster.asked("GET", "continue=1000") == 2

            await watched(source(site, cluster.port), story)

    asyncio.run(run())


@pytest.mark.parametrize("junk", [{"metadata": 7}, {}, {"metadata": {"name": "x"}, "spec": []}, "a"])
def test_objects_that_are_none_are_told_and_left_out(site: Site, junk: Any) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            cluster.put_node("n0")
            raw = cluster.objects[NODES, None, "n0"].raw
            listing = {"metadata": {"resourceVersion": "1"}, "items": [junk, raw]}
            cluster["list", NODES] << listing

            async def story(inlet: Kept, task: asyncio.Task[None]) -> None:
                await until(lambda: inlet.level(0) == 0.0 and inlet.faults, task=task)

            inlet = await watched(source(site, cluster.port), story)
            assert any("Node" in why for why in inlet.faults)

    asyncio.run(run())


@pytest.mark.parametrize("page", [b"", b"not JSON", b"[]", b'{"items": 7}', b"[" * 100_000])
def test_a_list_that_is_none_ends_the_source(site: Site, page: bytes) -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            cluster["list", PODS] << page
            with pytest.raises(ConnectorError, match=r"expected a list"):
                await asyncio.wait_for(source(site, cluster.port).run(Kept()), PATIENCE_S)

    asyncio.run(run())


def test_a_renewed_token_is_read_and_a_revoked_one_is_told(site: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    conf = tmp_path / "config"

    async def run() -> None:
        async with Cluster().serving() as cluster:
            conf.write_text(
                "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
                "users: [{name: u, user: {tokenFile: token}}]\n"
                f"clusters: [{{name: k, cluster: {{server: 'http://127.0.0.1:{cluster.port}'}}}}]\n"
            )
            cluster.tokens = {"first"}
            cluster.put_node("n0")
            client = KubernetesClient(lambda: from_kubeconfig(conf), timeout_s=5)
            await client.get("/api/v1/nodes/n0")
            token.write_text("second\n")
            cluster.tokens = {"second"}
            await client.get("/api/v1/nodes/n0")
            cluster.tokens = {"third"}
            with pytest.raises(ConnectorError, match=r"401 .*token of .*token was refused.*renew it"):
                await client.get("/api/v1/nodes/n0")
            await client.close()

    asyncio.run(run())


def test_a_silent_server_is_not_waited_for() -> None:
    async def run() -> None:
        async with Cluster().serving() as cluster:
            cluster.silence = asyncio.Event()
            client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{cluster.port}"), timeout_s=0.1)
            with pytest.raises(ConnectorError, match=r"no complete answer within 0\.1 s"):
                await client.get("/api/v1/nodes")
            cluster.silence.set()
            await client.close()

    asyncio.run(run())
