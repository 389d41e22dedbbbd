"""Demand of a Kubernetes API server: pods that wait and run, and workloads of Kueue, after random events."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
import pytest

from connectors.demand import DemandBook
from connectors.kubernetes import (
    Hosts,
    KubernetesClient,
    KubernetesSource,
    PodLabels,
    client as kubernetes_client,
    source as kubernetes,
)
from connectors.kubernetes.access import Access
from connectors.kubernetes.client import ApiError, Params
from connectors.kubernetes.demand import ADMISSION, PodDemand
from connectors.kubernetes.jobs import PodBook
from connectors.kubernetes.objects import KubernetesPod, KueueWorkload, Meta, Owner, PodSpec, WorkloadSpec
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet, until
from tests.support.kubernetes_apiserver import PODS, WORKLOADS, Cluster
from twin.catalogue import ConnectorError
from twin.telemetry import Reading

QUEUES = {
    "queues": [{"name": "train"}, {"name": "serve"}, {"name": "absent"}],
    "tenants": [{"name": "ml"}, {"name": "web"}],
    "priorities": [{"name": "high"}, {"name": "batch", "least": 10}],
}
SITE = site_of({**two_racks(), **QUEUES})
NODES, GPUS, ROUNDS, EVENTS = 4, 8, 20, 50
STATES = ("running", "pending", "held")
ARRIVES_S = 10.0  # of all demand, at the latest
DEMAND_S = kubernetes.DEMAND_S
ROWS = (("site", "lab"), ("queue", "train"), ("queue", "serve"), ("tenant", "ml"), ("tenant", "web"),
        *(("priority", name) for name in ("high", "batch", "rest")))  # fmt: skip
# Classes and numbers of objects: by name, by number, and of classes that the site does not list
PRIORITIES = (("high", 1000), ("batch", 5), ("", 0), ("", 20), ("best-effort", -10), ("other", 900))


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


def test_changes_arrive_within_ten_seconds_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "DEMAND_S", DEMAND_S)

    async def run() -> list[float]:
        cluster, inlet = Cluster(kueue=True), Kept()
        mine = source(cluster)
        mine._settle_s = kubernetes.SETTLE_S
        cluster.put_node("n0", gpus=GPUS)
        cluster.put_queue("train")
        lags: list[float] = []

        def shows(expected: list[float]) -> bool:
            return inlet.gpus("priority", "high") == expected

        async with cluster.serving():
            task = asyncio.create_task(mine.run(inlet))
            await until(lambda: inlet.gpus() == [0, 0, 0], "nothing is there", task)
            for change, expected in (
                (lambda: cluster.put_workload("w", 1, 4, priority=("high", 9)), [0, 4, 0]),
                (lambda: cluster.gone("w", resource=WORKLOADS), [0, 0, 0]),
                (lambda: cluster.put_pod("p", gpus=3, phase="Pending", priority=("high", 9)), [0, 3, 0]),
                (lambda: cluster.change(PODS, "p", {"spec": {"nodeName": "n0"}}, "ml"), [3, 0, 0]),
            ):
                await asyncio.sleep(0)  # at once after the last was added up: it waits the longest
                change()
                at_ns = cluster.written_ns
                await until(partial(shows, expected), f"{expected}", task)
                shown = [i for i in inlet.items if isinstance(i, Reading) and i.table == "priority"]
                lags.append((shown[-1].t_ns - at_ns) / 1e9)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return lags

    lags = asyncio.run(run())
    print("seconds from the event until it was added up:", [round(lag, 1) for lag in lags])
    assert max(lags) < ARRIVES_S


def test_a_job_keeps_its_class_while_one_of_its_workloads_is_left() -> None:
    """An elastic job has two for a while: the first is gone once the second is admitted."""

    def workload(name: str) -> KueueWorkload:
        owner = Owner("Job", "j1", "uid-j1", True)
        spec = WorkloadSpec(priority=9, priority_class_name="high")
        return KueueWorkload(Meta(name=name, namespace="ml", owner_references=[owner]), spec)

    demand = PodDemand(PodBook(Hosts(SITE, {}), PodLabels()))
    meta = Meta(name="p", namespace="ml", uid="p", owner_references=[Owner("Job", "j1", "uid-j1", True)])
    limits = msgspec.convert({"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}, PodSpec)
    demand.put(KubernetesPod(meta, limits))
    for name in ("first", "second"):
        demand.put_workload(workload(name))
    demand.put_workload(workload("first"), there=False)
    assert demand.claims(kueue=True)[0].priorities == ("high",)
    demand.changed = False
    demand.put_workload(workload("second"), there=False)
    assert demand.claims(kueue=True)[0].priorities == ()
    assert demand.changed


class Story:
    """Random events on a cluster, and its own count of them."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.rng, self.number = cluster, random.Random(seed), 0

    def objects(self, resource: Any) -> dict[tuple[str, str], dict[str, Any]]:
        """By namespace and name."""
        found = self.cluster.objects.items()
        return {(str(ns), n): o.raw for (res, ns, n), o in found if res == resource and not o.deleted}

    def event(self) -> None:
        pods, workloads = self.objects(PODS), self.objects(WORKLOADS)
        kinds = ("pod", "bind", "finish", "delete", "open", "workload", "admit", "evict", "drop")
        kind = self.rng.choice(kinds)
        self.number += 1
        if kind in kinds[1:5] and pods:
            self.change_pod(kind, *self.rng.choice(sorted(pods)))
        elif kind in kinds[6:] and workloads:
            space, name = self.rng.choice(sorted(workloads))
            if kind == "drop":
                self.cluster.gone(name, space, WORKLOADS)
            else:
                self.cluster.set_condition(name, "Admitted", str(kind == "admit"), space)
        else:
            self.put(pod=kind in kinds[:5])

    def put(self, pod: bool) -> None:
        space, queue = self.rng.choice(("ml", "web", "tmp")), self.rng.choice(("train", "serve", "else"))
        job, priority = f"j{self.rng.randrange(20)}-{space}", self.rng.choice(PRIORITIES)
        if pod:
            gates = self.rng.choice(((), (), (), (ADMISSION,), ("x/y",)))
            self.cluster.put_pod(f"p{self.number}", gpus=self.rng.randint(0, 8), owner=f"Job/{job}",
                                 phase="Pending", gates=gates, labels=label(queue), namespace=space,
                                 priority=priority)  # fmt: skip
            return
        sizes = self.rng.randint(1, 4), self.rng.randint(0, 8)
        self.cluster.put_workload(f"job-{job}", *sizes, queue=queue, active=self.rng.random() < 0.8,
                                  namespace=space, priority=priority, owner=f"Job/{job}")  # fmt: skip

    def change_pod(self, kind: str, space: str, pod: str) -> None:
        if kind == "delete":
            self.cluster.gone(pod, space)
        elif kind == "finish":
            self.cluster.change(PODS, pod, {"status": {"phase": "Succeeded"}}, space)
        else:
            node = {"nodeName": f"n{self.rng.randrange(NODES)}"} if kind == "bind" else {}
            self.cluster.change(PODS, pod, {"spec": {**node, "schedulingGates": None}}, space)

    def truth(self) -> dict[tuple[str, str], list[int]]:
        """GPUs by row and state, counted from the objects that the server has."""
        out = {row: dict.fromkeys(STATES, 0) for row in ROWS}

        def count(state: str, gpus: int, space: str, queue: str, spec: dict[str, Any]) -> None:
            rows = ("site", "lab"), ("queue", queue), ("tenant", space), ("priority", class_of(spec))
            for row in rows:
                if row in out:
                    out[row][state] += gpus

        workloads = self.objects(WORKLOADS)
        for (space, _), pod in self.objects(PODS).items():
            gates = [g["name"] for g in pod["spec"].get("schedulingGates") or ()]
            if pod["status"]["phase"] == "Succeeded" or ADMISSION in gates:
                continue
            state = "running" if pod["spec"].get("nodeName") else "held" if gates else "pending"
            gpus = int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            job = pod["metadata"]["ownerReferences"][0]["name"]
            ranked = workloads.get((space, f"job-{job}"), pod)["spec"]  # Kueue's priority counts, of its jobs
            count(state, gpus, space, pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], ranked)
        for (space, _), workload in workloads.items():
            spec, conditions = workload["spec"], workload["status"]["conditions"]
            if any(c["type"] == "Admitted" and c["status"] == "True" for c in conditions):
                continue
            each = spec["podSets"][0]["template"]["spec"]["containers"][0]["resources"]["requests"]
            gpus = spec["podSets"][0]["count"] * each["nvidia.com/gpu"]
            count("pending" if spec["active"] else "held", gpus, space, spec["queueName"], spec)
        return {row: [counts[s] for s in STATES] for row, counts in out.items()}


def class_of(spec: dict[str, Any]) -> str:
    """The class of the site that an object belongs to: by name, else by number."""
    name = spec.get("priorityClassName", "")
    return name if name in ("high", "batch") else "batch" if spec["priority"] >= 10 else "rest"


@pytest.mark.long
def test_demand_agrees_over_random_events_restarts_and_lost_watches() -> None:
    async def run() -> None:
        cluster, inlet = Cluster(kueue=True), Kept()
        story, mine = Story(cluster, seed=24), source(cluster)
        for i in range(NODES):
            cluster.put_node(f"n{i}", gpus=GPUS)
        for queue in ("train", "serve", "else"):
            cluster.put_queue(queue)
        some: Counter[tuple[str, str]] = Counter()  # quiet points at which a row had GPUs

        def agrees() -> bool:
            return {row: inlet.gpus(*row) for row in ROWS} == story.truth()

        def more(than: int) -> bool:
            return len(inlet.items) > than

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
                await until(agrees, f"round {number}: {story.truth()}", task)
                before = len(inlet.items)
                mine.demand.changed = True
                await until(partial(more, before), "it is added up again", task)
                assert agrees()
                some.update(row for row, counts in story.truth().items() if sum(counts))
                assert sum(story.truth()["site", "lab"]) == sum(
                    sum(counts) for (table, _), counts in story.truth().items() if table == "priority"
                )
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            inlet.items.clear() if number % 5 == 4 else None
        assert set(some) == set(ROWS)
        assert not inlet.faults or all("watch" in f or "connect" in f.lower() for f in inlet.faults)

    asyncio.run(run())


class Refused(KubernetesClient):
    """Each list is refused after as many turns of the loop as its path says."""

    def __init__(self, turns: dict[str, int]) -> None:
        super().__init__(lambda: Access("http://127.0.0.1:9"))
        self._turns = turns

    async def pages(self, path: str, params: Params | None = None) -> AsyncGenerator[bytes, None]:
        for _ in range(self._turns[path.rpartition("/")[2]]):
            await asyncio.sleep(0)
        raise ApiError(path, 403, "Forbidden", "")
        yield b""


@pytest.mark.parametrize("later", range(6))
def test_a_source_whose_lists_are_refused_one_after_the_other_ends(later: int) -> None:
    """Kueue's refusal, as the source is cancelled for that of the nodes, hides no cancellation."""

    async def story() -> None:
        turns = {"nodes": 3, "pods": 99, "localqueues": 3 + later, "workloads": 99}
        mine = KubernetesSource(Refused(turns), Hosts(SITE, {}), settle_s=9)
        mine.demand_book = DemandBook(SITE, ["kubernetes"])
        task = asyncio.create_task(mine.run(Kept()))
        for _ in range(200):
            await asyncio.sleep(0)
        assert task.done()
        with pytest.raises(ApiError, match="nodes: answers 403"):
            task.result()

    asyncio.run(story())
