"""Pods become jobs: gathered by label or maker, told once, ended once; and what a drain does with each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from connectors.kubernetes import Hosts, KubernetesSource, PodLabels, jobs
from connectors.kubernetes.jobs import PodBook
from connectors.kubernetes.objects import (
    KubernetesNode,
    KubernetesPod,
    read_change,
    read_items,
    read_object,
    version_of,
)
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, BadMessage
from twin.site import Site
from twin.telemetry import JobEnded, JobStarted

A = {"training.kubeflow.org/job-name": "a"}


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


def pod(
    name: str = "p", node: str | None = "n0", gpus: Any = "1", owner: str = "Job/j", phase: str = "Running",
    labels: dict[str, str] | None = None, namespace: str = "ml", resource: str = "nvidia.com/gpu",
    meta: dict[str, Any] | None = None, began: str | None = None, **spec: Any,
) -> KubernetesPod:  # fmt: skip
    kind, _, maker = owner.partition("/")
    refs = [{"kind": kind, "name": maker, "uid": f"u-{maker}", "controller": True}] if owner else None
    return msgspec.convert({
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": labels,
                     "ownerReferences": refs, **(meta or {})},
        "spec": {"nodeName": node, "containers": [{}, {"resources": {"limits": {resource: gpus}}}], **spec},
        "status": {"phase": phase, "startTime": began},
    }, KubernetesPod)  # fmt: skip


def book(site: Site, **more: Any) -> PodBook:
    return PodBook(Hosts(site, {"n[0-9]": "r1/node[0-9]"}), PodLabels(cluster="lab", **more))


def only(book: PodBook, *pods: KubernetesPod) -> JobStarted:
    book.take(pods)
    (event,) = book.changes()
    assert isinstance(event, JobStarted)
    return event


@pytest.mark.parametrize(
    "labels, owner, job, coupling",
    [
        (A, "PyTorchJob/x", "ml:a", "synchronous"),
        ({"job-name": "b"}, "Job/b", "ml:b", "synchronous"),
        ({"job-name": "w-0", "jobset.sigs.k8s.io/jobset-name": "w"}, "Job/w-0", "ml:w", "synchronous"),
        ({"site/run": "r", **A}, "Job/x", "ml:r", "synchronous"),
        ({}, "ReplicaSet/web-1", "ml:replicaset.web-1", "independent"),
        ({}, "Notebook/n", "ml:notebook.n", "synchronous"),
        ({"job-name": ""}, "", "ml:pod.p", "synchronous"),
        ({"ray.io/cluster": "r"}, "StatefulSet/r", "ml:r", "synchronous"),
    ],
)
def test_groups(site: Site, labels: dict[str, str], owner: str, job: str, coupling: str) -> None:
    event = only(book(site, job_labels=["site/run"]), pod(labels=labels, owner=owner))
    assert (event.job, event.coupling, event.nodes) == (f"k8s:lab:{job}", coupling, ("lab/h/r1/node0",))


@pytest.mark.parametrize(
    "found",
    [
        pod(gpus="0"),
        pod(gpus=0),
        pod(resource="cpu"),
        pod(node=None),
        pod(node=""),
        pod(owner="DaemonSet/dcgm"),
        pod(phase="Succeeded"),
        pod(phase="Failed"),
        msgspec.convert({"metadata": {"name": "x"}, "spec": {"nodeName": "n0"}}, KubernetesPod),
    ],
)
def test_what_holds_no_gpus_is_no_job(site: Site, found: KubernetesPod) -> None:
    mine = book(site)
    mine.take([found])
    assert mine.changes() == []


@pytest.mark.parametrize(
    "resource", ["amd.com/gpu", "nvidia.com/mig-1g.5gb", "huawei.com/Ascend910", "x/npu"]
)
def test_accelerators(site: Site, resource: str) -> None:
    assert only(book(site, gpu_resources=["x/n*"]), pod(resource=resource, gpus=8)).tenant == "ml"


def test_devices_by_claim_and_beside_containers_are_taken_for_gpus(site: Site) -> None:
    only(book(site), pod(gpus="0", resourceClaims=[{"name": "gpu"}]))
    sidecar = [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]
    only(book(site), pod(gpus="0", initContainers=sidecar))


def test_what_a_job_says_of_itself(site: Site) -> None:
    labels = {**A, "kueue.x-k8s.io/queue-name": "gold", "racktwin.io/kind": "batch"}
    labels["racktwin.io/storage"] = "fs"
    event = only(book(site), pod(labels=labels, priority=2**40, activeDeadlineSeconds=3600))
    assert (event.kind, event.account, event.priority) == ("batch", "gold", 2**31 - 1)
    assert (event.time_limit_s, event.storage) == (3600, "fs")
    kinds: Any = {"ml": "training"}
    assert only(book(site, kinds=kinds), pod(labels={"racktwin.io/kind": "odd"})).kind == "training"
    mixed = pod("a", labels={**A, "racktwin.io/kind": "batch"}), pod("b", labels=A)
    assert only(book(site, kinds=kinds), *mixed).kind == "unknown"  # in doubt, protected


def test_a_job_began_with_its_first_pod(site: Site) -> None:
    pods = [
        pod("a", labels=A, began="2026-01-01T00:01:00Z"),
        pod("b", "n1", labels=A, began="2026-01-01T00:00:30Z"),
        pod("c", "n2", labels=A, began="soon"),
        pod("d", "n3", labels=A, began="2025-01-01T00:00:00Z", phase="Succeeded"),
    ]
    assert only(book(site), *pods).started_ns == (1_767_225_600 + 30) * NS
    assert only(book(site), pod(labels=A), pod("c", "n2", labels=A, began="soon")).started_ns == 0


def test_a_job_that_is_run_again_is_another_run(site: Site) -> None:
    mine = book(site)
    first = only(mine, pod(labels=A, owner="Job/one"))
    mine.take([pod("q", labels=A, owner="Job/two")])
    ended, started = mine.changes()
    assert isinstance(ended, JobEnded)
    assert (ended.id, ended.job, ended.reason) == (f"{first.id}:end", first.job, "its pods left")
    assert isinstance(started, JobStarted)
    assert started.job == first.job
    assert started.id != first.id


def test_a_job_that_completes_ends_when_it_has_left_all(site: Site) -> None:
    mine = book(site)
    pods = [pod(f"p{n}", f"n{n}", labels=A) for n in range(3)]
    only(mine, *pods)
    for n in range(2):
        mine.put(pod(f"p{n}", f"n{n}", labels=A, phase="Succeeded"))
        assert mine.changes() == []
    mine.remove("ml/p0")
    assert mine.changes() == []
    mine.put(pod("p2", "n2", labels=A, phase="Failed"))
    (ended,) = mine.changes()
    assert isinstance(ended, JobEnded)
    assert ended.reason == "failed"


def test_jobs_on_strangers_and_jobs_that_ended_unwatched(site: Site) -> None:
    mine = book(site)
    mine.take([pod("x", "stranger"), pod("y", "n1", labels=A)])
    known = dict.fromkeys(("k8s:lab:ml:a", "k8s:lab:ml:old", "k8s:labyrinth:ml:x", "slurm:lab:1"), ())
    assert [(type(e), e.job) for e in mine.changes(known)] == [
        (JobEnded, "k8s:lab:ml:old"), (JobStarted, "k8s:lab:ml:a")
    ]  # fmt: skip
    mine.take([])
    assert [e.job for e in mine.changes()] == ["k8s:lab:ml:a"]


@pytest.mark.parametrize(
    "found, course",
    [
        (pod(), "evict"),
        (pod(owner=""), "bare"),
        (pod(owner="DaemonSet/d"), "stays"),
        (pod(owner="Node/n0"), "stays"),
        (pod(owner="", meta={"annotations": {"kubernetes.io/config.mirror": "h"}}), "stays"),
        (pod(phase="Succeeded"), "over"),
        (pod(phase="Failed"), "over"),
        (pod(meta={"deletionTimestamp": "2026-01-01T00:00:00Z"}), "leaving"),
        (pod(phase="Pending"), "evict"),
        (pod(phase="Unknown"), "evict"),
    ],
)
def test_what_a_drain_does(site: Site, found: KubernetesPod, course: str) -> None:
    assert found.on_drain == course
    mine = book(site)
    mine.put(found)
    assert mine.busy("n0") == (course in ("evict", "bare", "leaving"))
    mine.remove(found.key)
    assert not mine.busy("n0")


phases = st.sampled_from(["Running", "Pending", "Succeeded", "Failed"])
steps = st.tuples(st.integers(0, 3), st.integers(0, 3), phases, st.booleans(), st.booleans())


@given(st.lists(steps, max_size=30))
@example([(0, 1, "Running", True, True), (2, 0, "Running", True, True), (2, 0, "Running", False, True)])
def test_starts_and_ends_follow_each_other(site: Site, steps: list[tuple[int, int, str, bool, bool]]) -> None:
    mine, running, seen = book(site), dict[str, JobStarted](), set[str]()
    there: dict[str, KubernetesPod] = {}
    for n, (name, node, phase, here, ask) in enumerate(steps):
        labels = {"job-name": "ab"[name % 2]}
        one = pod(f"p{name}", f"n{node}", labels=labels, phase=phase, meta={"uid": f"u{n}"})
        if here:
            there[one.key] = one
            mine.put(one)
        else:
            there.pop(one.key, None)
            mine.remove(one.key)
        for event in mine.changes() if ask else ():
            if isinstance(event, JobEnded):
                assert event.id == f"{running.pop(event.job).id}:end"
            else:
                assert event.id not in seen
                seen.add(event.id)
                running[event.job] = event
    for event in mine.changes():
        if isinstance(event, JobStarted):
            running[event.job] = event
        else:
            del running[event.job]
    fresh = book(site)
    fresh.take(there.values())
    expected = {e.job: e for e in fresh.changes() if isinstance(e, JobStarted)}
    assert set(running) == set(expected)
    for host in (f"n{k}" for k in range(4)):
        busy = any(p.spec.node_name == host and p.on_drain == "evict" for p in there.values())
        assert mine.busy(host) == busy


def test_pods_have_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_PODS", 2)
    mine = book(site)
    mine.take([pod(f"p{n}") for n in range(5)])
    assert mine.refused == 3


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message(text: bytes) -> None:
    for read in (
        lambda: read_items(text, KubernetesPod),
        lambda: read_object(text, KubernetesNode),
        lambda: read_change(text),
    ):
        try:
            read()
        except BadMessage:
            continue


def test_single_bad_objects_are_told() -> None:
    good = '{"metadata": {"name": "a", "unknown": {}}, "spec": {"nodeName": null}, "status": null}'
    text = f'{{"items": [{good}, 7, {{"metadata": {{"name": "b"}}}}, {{"metadata": {{}}}}]}}'
    found, bad = read_items(text.encode(), KubernetesPod)
    assert [p.metadata.name for p in found] == ["b"]
    assert len(bad) == 3
    assert read_items(b'{"items": null}', KubernetesPod) == ([], [])
    deep = b'{"type": "ADDED", "object": ' + b"[" * 100_000
    with pytest.raises(BadMessage):
        read_change(deep)
    assert (
        version_of(read_change(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}'))
        == "9"
    )
    assert version_of(read_change(b'{"type": "ERROR", "object": 7}')) == ""


class Listing:
    """A client whose lists have these pods."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    async def pages(self, path: str, params: Any) -> AsyncIterator[bytes]:
        yield msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": self.items})


def test_a_pod_that_cannot_be_read_ends_no_job_and_makes_no_node_idle(site: Site) -> None:
    client, inlet = Listing(), RecordingInlet()
    source: Any = KubernetesSource(client, Hosts(site, {"n[0-9]": "r1/node[0-9]"}), PodLabels(cluster="lab"))  # type: ignore[arg-type]

    def listed(*items: Any, known: dict[str, tuple[str, ...]] | None = None) -> list[Any]:
        client.items, inlet.items = list(items), []
        asyncio.run(source.pods._list(inlet))
        source._stage_jobs(inlet, known or {})
        return inlet.items

    one: Any = msgspec.to_builtins(pod())
    odd = one | {"spec": one["spec"] | {"priority": "high"}}
    assert [e.nodes for e in listed(one)] == [("lab/h/r1/node0",)]
    assert listed(odd, known={"k8s:lab:ml:job.j": ("lab/h/r1/node0",)}) == []
    assert (source.busy("n0"), source.busy("n1")) == (True, False)
    assert len(inlet.faults) == 1
    assert [type(e) for e in listed()] == [JobEnded]
    assert source.busy("n0") is False


@pytest.mark.parametrize(
    "spec, hidden",
    [({"nodeName": "n1", "priority": "high"}, ["n1"]), ({"priority": "high"}, []), (7, ["n0", "n1"])],
)
def test_a_pod_that_cannot_be_read_hides_only_its_own_node_and_as_long_as_it_is_there(
    site: Site, spec: Any, hidden: list[str]
) -> None:
    client, inlet = Listing(), RecordingInlet()
    source: Any = KubernetesSource(client, Hosts(site, {"n[0-9]": "r1/node[0-9]"}), PodLabels(cluster="lab"))  # type: ignore[arg-type]
    odd = {"metadata": {"namespace": "ml", "name": "odd"}, "spec": spec}

    def unknown() -> list[str]:
        return [host for host in ("n0", "n1") if source.busy(host) is None]

    def watched(kind: str) -> None:
        source.pods._change(msgspec.json.encode({"type": kind, "object": odd}))

    client.items = [odd]
    asyncio.run(source.pods._list(inlet))
    assert unknown() == hidden
    watched("DELETED")
    assert unknown() == []
    with pytest.raises(BadMessage):
        watched("ADDED")
    assert unknown() == hidden
