"""Demand of a Kubernetes API server: pods that wait and run, and workloads of Kueue, after random events."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from connectors.demand import DemandBook
from connectors.kubernetes import (
    Hosts,
    KubernetesClient,
    KubernetesSource,
    client as kubernetes_client,
    source as kubernetes,
)
from connectors.kubernetes.access import Access
from connectors.kubernetes.demand import ADMISSION
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet, until
from tests.support.kubernetes_apiserver import PODS, WORKLOADS, Cluster
from twin.catalogue import ConnectorError
from twin.telemetry import Reading

QUEUES = {"queues": [{"name": "train"}, {"name": "serve"}, {"name": "absent"}], "tenants": [{"name": "ml"}]}
SITE = site_of({**two_racks(), **QUEUES})
NODES, GPUS, ROUNDS, EVENTS = 4, 8, 20, 50
STATES = ("running", "pending", "held")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_client, "FIRST_S", 0.01)
    monkeypatch.setattr(kubernetes, "FIRST_S", 0.02)
    monkeypatch.setattr(kubernetes, "DEMAND_S", 0.0)


def source(cluster: Cluster) -> KubernetesSource:
    client = KubernetesClient(lambda: Access(f"http://127.0.0.1:{cluster.port}"), timeout_s=5)
    hosts = Hosts(SITE, {"n[0-3]": "r1/node[0-3]"})
    mine = KubernetesSource(client, hosts, settle_s=0.02)
    mine.demand_book = DemandBook(SITE, ["kubernetes"])
    return mine


class Kept(RecordingInlet):
    """An inlet, by the last demand."""

    def value(self, table: str, name: str, signal: str) -> float | None:
        entity = SITE.entity(table, name)
        assert entity is not None or table == "site"
        key = (table, entity or 0, signal)
        found = [i.value for i in self.items if isinstance(i, Reading) and i[:3] == key]
        return found[-1] if found else -1.0

    def gpus(self, table: str = "site", name: str = "lab") -> list[float | None]:
        return [self.value(table, name, f"gpu_{state}_count") for state in STATES]

    def jobs(self, table: str = "site", name: str = "lab") -> list[float | None]:
        return [self.value(table, name, f"job_{state}_count") for state in STATES]


async def supervised(mine: KubernetesSource, inlet: Kept) -> None:
    """As the daemon does: a source whose server is away is run again."""
    while True:
        try:
            await mine.run(inlet)
        except ConnectorError:
            await asyncio.sleep(0.02)


def label(queue: str) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": queue}


def test_pods_and_workloads_are_counted_once() -> None:
    async def run() -> None:
        cluster, inlet = Cluster(kueue=True), Kept()
        for i in range(NODES):
            cluster.put_node(f"n{i}", gpus=GPUS)
        cluster.put_queue("train")
        cluster.put_queue("serve")
        cluster.put_pod("a-0", node="n0", gpus=8, owner="Job/a", labels=label("train"))
        cluster.put_pod("a-1", gpus=8, owner="Job/a", phase="Pending", labels=label("train"))
        cluster.put_pod("cpu", gpus=0, owner="Job/cpu", phase="Pending")
        cluster.put_pod("over", node="n1", gpus=8, owner="Job/o", phase="Succeeded")
        cluster.put_workload("b", pods=3, gpus=4)
        cluster.put_pod(
            "b-0", gpus=4, owner="Job/b", phase="Pending", gates=[ADMISSION], labels=label("train")
        )
        cluster.put_pod("c-0", gpus=2, owner="Job/c", phase="Pending", gates=["example.com/licence"])
        async with cluster.serving():
            task = asyncio.create_task(source(cluster).run(inlet))
            # a-0; a-1 and b, whose pod is Kueue's; c-0
            await until(lambda: inlet.gpus() == [8, 8 + 12, 2], "all is counted", task)
            assert inlet.jobs() == [1, 1, 1]
            assert inlet.gpus("queue", "train") == [8, 20, 0]
            assert inlet.gpus("queue", "serve") == [0, 0, 0]
            assert inlet.gpus("queue", "absent") == [None] * 3
            assert inlet.gpus("tenant", "ml") == [8, 20, 2]
            assert (inlet.value("queue", "train", "oldest_wait_s") or 0) > 1e6
            free = [inlet.value("site", "lab", f"gpu_{s}_count") for s in ("idle", "spare", "out")]
            assert free == [24, 0, 0]
            cluster.set_condition("b", "Admitted")
            cluster.change(PODS, "b-0", {"spec": {"schedulingGates": None}}, "ml")
            await until(lambda: inlet.gpus() == [8, 8 + 4, 2], "its pod counts in its place", task)
            cluster.put_node("n1", gpus=GPUS, unschedulable=True)
            await until(lambda: inlet.value("site", "lab", "gpu_out_count") == 8, "a closed node", task)
            assert inlet.value("site", "lab", "gpu_idle_count") == 16
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_cluster_without_kueue_has_its_pods_alone() -> None:
    async def run() -> None:
        cluster, inlet = Cluster(), Kept()
        cluster.put_node("n0", gpus=GPUS)
        cluster.put_pod("a", gpus=3, phase="Pending")
        cluster.put_pod("b", gpus=3, owner="Job/b", phase="Pending", gates=[ADMISSION])
        async with cluster.serving():
            task = asyncio.create_task(source(cluster).run(inlet))
            await until(lambda: inlet.gpus() == [0, 3, 3], "its pods", task)
            assert not inlet.faults
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


class Story:
    """Random events on a cluster, and its own count of them."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.rng, self.number = cluster, random.Random(seed), 0

    def objects(self, resource: Any) -> dict[str, dict[str, Any]]:
        found = self.cluster.objects.items()
        return {n: o.raw for (res, _, n), o in found if res == resource and not o.deleted}

    def event(self) -> None:
        pods, workloads = self.objects(PODS), self.objects(WORKLOADS)
        kinds = ("pod", "bind", "finish", "delete", "open", "workload", "admit", "evict", "drop")
        kind = self.rng.choice(kinds)
        self.number += 1
        pod = self.rng.choice(sorted(pods)) if pods else ""
        workload = self.rng.choice(sorted(workloads)) if workloads else ""
        if kind == "pod" or (kind in kinds[1:5] and not pod):
            owner = f"Job/j{self.rng.randrange(40)}"
            gates = self.rng.choice(((), (), (), (ADMISSION,), ("x/y",)))
            queue = self.rng.choice(("train", "serve"))
            self.cluster.put_pod(f"p{self.number}", gpus=self.rng.randint(0, 8), owner=owner, phase="Pending",
                                 gates=gates, labels=label(queue))  # fmt: skip
        elif kind == "workload" or (kind in kinds[6:] and not workload):
            name, queue = f"w{self.number}", self.rng.choice(("train", "serve"))
            sizes = self.rng.randint(1, 4), self.rng.randint(0, 8)
            self.cluster.put_workload(name, *sizes, queue=queue, active=self.rng.random() < 0.8)
        elif kind == "bind":
            node = f"n{self.rng.randrange(NODES)}"
            self.cluster.change(PODS, pod, {"spec": {"nodeName": node, "schedulingGates": None}}, "ml")
        elif kind == "finish":
            self.cluster.change(PODS, pod, {"status": {"phase": "Succeeded"}}, "ml")
        elif kind == "delete":
            self.cluster.gone(pod)
        elif kind == "open":
            self.cluster.change(PODS, pod, {"spec": {"schedulingGates": None}}, "ml")
        elif kind == "drop":
            self.cluster.gone(workload, resource=WORKLOADS)
        else:
            self.cluster.set_condition(workload, "Admitted", str(kind == "admit"))

    def truth(self) -> dict[str, Counter[str]]:
        """GPUs by queue and in all (""), counted from the objects."""
        out = {queue: Counter(dict.fromkeys(STATES, 0)) for queue in ("", "train", "serve")}
        for pod in self.objects(PODS).values():
            gates = [g["name"] for g in pod["spec"].get("schedulingGates") or ()]
            if pod["status"]["phase"] == "Succeeded" or ADMISSION in gates:
                continue
            state = "running" if pod["spec"].get("nodeName") else "held" if gates else "pending"
            gpus = int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            out[""][state] += gpus
        for workload in self.objects(WORKLOADS).values():
            spec, conditions = workload["spec"], workload["status"]["conditions"]
            if any(c["type"] == "Admitted" and c["status"] == "True" for c in conditions):
                continue
            each = spec["podSets"][0]["template"]["spec"]["containers"][0]["resources"]["requests"]
            state = "pending" if spec["active"] else "held"
            for queue in ("", spec["queueName"]):
                out[queue][state] += spec["podSets"][0]["count"] * each["nvidia.com/gpu"]
        return out


def test_demand_agrees_over_random_events_restarts_and_lost_watches() -> None:
    async def run() -> None:
        cluster, inlet = Cluster(kueue=True), Kept()
        story, mine = Story(cluster, seed=24), source(cluster)
        for i in range(NODES):
            cluster.put_node(f"n{i}", gpus=GPUS)
        cluster.put_queue("train")
        cluster.put_queue("serve")

        def agrees() -> bool:
            truth = story.truth()[""]
            return inlet.gpus() == [truth[s] for s in STATES]

        for number in range(ROUNDS):
            async with cluster.serving():  # each round is a restart of the server
                mine = source(cluster) if number % 4 == 0 else mine
                task = asyncio.create_task(supervised(mine, inlet))
                for at in range(EVENTS):
                    story.event()
                    if at % 10 == 0:
                        await asyncio.sleep(0.01)
                    if at == 25 and number % 3 == 0:
                        cluster.compacted = cluster.version  # watches begin anew
                await until(agrees, f"round {number}: {story.truth()['']}", task)
                await asyncio.sleep(0.06)
                assert agrees()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            inlet.items.clear() if number % 5 == 4 else None
        assert not inlet.faults or all("watch" in f or "connect" in f.lower() for f in inlet.faults)

    asyncio.run(run())
