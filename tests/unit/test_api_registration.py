"""Jobs that register themselves over HTTP: on which nodes, by whose token, until when; and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from connectors.jobs import JobLeases, registration
from tests.support.in_process_daemon import Pod, serve
from tests.unit.test_api_checkpoint import employ
from twin.api import job_reports
from twin.api.job_reports import end_lapsed
from twin.api.tokens import add_token
from twin.telemetry import JobStarted

AT = "/v1/jobs/{}"
TWO = {"nodes": ["lab/h/r2/node[0-1]"]}


def jobs_of(pod: Pod) -> dict[str, tuple[list[str], float]]:
    """Nodes and lease of each job that runs."""
    jobs, site = pod.twin.engine.jobs, pod.twin.site
    return {name: ([site.name("node", i) for i in jobs.nodes[slot].tolist()], float(jobs.lease_s[slot]))
            for name, slot in jobs.slot_of.items()}  # fmt: skip


def test_a_job_registers_itself_with_nodes_and_gpus_and_ends(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["own"] = _token(pod, "job.mine")
        status, said = await pod.ask("POST", AT.format("mine"), "own", TWO | {"lease_s": 900})
        nodes = ["lab/h/r2/node0", "lab/h/r2/node1"]
        assert (status, said["nodes"], said["gpus"], said["lease_s"]) == (200, nodes, 8, 900.0)
        assert said["registered"]
        assert "policies: {checkpoint" in said["warnings"][0]
        assert jobs_of(pod) == {"mine": (nodes, 900.0)}
        assert not pod.twin.engine.jobs.known, "nothing is known of the other nodes"
        assert pod.twin.engine.jobs.protected_nodes().all()
        before = pod.twin.engine.jobs.counts["restarted"]
        assert (await pod.ask("POST", AT.format("mine"), "own", TWO | {"lease_s": 900}))[0] == 200
        assert pod.twin.engine.jobs.counts["restarted"] == before, "the same once more starts nothing"
        assert (await pod.ask("GET", AT.format("mine") + "/checkpoint", "own"))[0] == 200
        moved = await pod.ask("POST", AT.format("mine"), "own", {"nodes": nodes[:1]})
        assert (moved[0], jobs_of(pod)) == (200, {"mine": (nodes[:1], 600.0)})
        assert (await pod.ask("DELETE", AT.format("mine"), "own"))[1] == {"job": "mine", "registered": False}
        assert jobs_of(pod) == {}
        assert (await pod.ask("DELETE", AT.format("mine"), "own"))[0] == 404

    serve(tmp_path, check)


def _token(pod: Pod, name: str) -> str:
    secret = add_token(pod.tokens_file, name, "job")
    pod.tokens.reload()
    return secret


REFUSALS: list[tuple[str, str, Any, int, tuple[str, ...]]] = [
    ("own", "other", TWO, 403, ("job.mine", "other is another", "ask the operator for a token")),
    ("viewer", "mine", TWO, 403, ("needs the role job or operator",)),
    ("none", "mine", TWO, 401, ("Authorization: Bearer",)),
    ("wrong", "mine", TWO, 401, ("unknown here or has expired", "racktwin token add")),
    ("own", "mine", {}, 400, ("nodes",)),
    ("own", "mine", {"nodes": []}, 400, ("nodes", "length")),
    ("own", "mine", {"nodes": ["gpu7"]}, 400, ("no node gpu7", "such as lab/h/r1/node0", "ask the operator")),
    ("own", "mine", {"nodes": ["gpu[7"]}, 400, ("expected a host list such as gpu[001-004]",)),
    ("own", "mine", TWO | {"kind": "mining"}, 400, ("kind",)),
    ("own", "mine", TWO | {"lease_s": 1}, 400, ("lease_s", ">= 60")),
    ("own", "mine", TWO | {"priority": 9}, 400, ("priority",)),
    ("own", "mine", {"nodes": ["lab/h/r1/node0"]}, 409, ("node lab/h/r1/node0 runs job:4711", "name free")),
    ("ann", "ns%2Fb", TWO, 403, ("tenant.ann", "ns/b is another")),
    ("nobody", "mine", TWO, 403, ("tenant.",)),
]


@pytest.mark.parametrize("role,job,body,status,words", REFUSALS)
def test_a_refusal_says_why_and_what_to_do(
    tmp_path: Path, role: str, job: str, body: Any, status: int, words: tuple[str, ...]
) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.mine", ann="tenant.ann", nobody="tenant.")
        found, said = await pod.ask("POST", AT.format(job), role, body)
        assert found == status, said
        assert [w for w in words if w not in said["error"]] == [], said
        assert sorted(jobs_of(pod)) == ["4711", "ns/b"]

    serve(tmp_path, check)


def test_a_tenant_registers_jobs_of_its_own_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_reports, "MAX_OF_TENANT", 1)

    async def check(pod: Pod) -> None:
        employ(pod, ann="tenant.ann", bob="tenant.bob")
        assert (await pod.ask("POST", AT.format("x"), "ann", TWO))[0] == 200
        slot = pod.twin.engine.jobs.slot_of["x"]
        assert pod.twin.engine.jobs.tenants[slot] == "ann"
        assert (await pod.ask("DELETE", AT.format("x"), "bob"))[0] == 403
        status, said = await pod.ask("POST", AT.format("y"), "ann", {"nodes": ["lab/h/r2/node2"]})
        assert (status, "1 jobs are registered by tenant.ann" in said["error"]) == (409, True)
        assert (await pod.ask("POST", AT.format("y"), "bob", {"nodes": ["lab/h/r2/node2"]}))[0] == 200

    serve(tmp_path, check)


def test_whoever_registers_and_ends_jobs_all_the_time_uses_up_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "MAX_OF_TENANT", 5)

    async def check(pod: Pod) -> None:
        employ(pod, ann="tenant.ann", bob="tenant.bob")
        generation = pod.twin.engine.jobs.generation
        before, statuses = int(generation.sum()), set[int]()
        for k in range(8):
            status, said = await pod.ask("POST", AT.format(f"x{k}"), "ann", TWO)
            statuses.add(status)
            if status == 200:
                assert (await pod.ask("DELETE", AT.format(f"x{k}"), "ann"))[0] == 200
        assert statuses == {200, 429}
        assert "keep one registration for the life of a job" in said["error"]
        assert int(generation.sum()) - before == 5
        assert (await pod.ask("POST", AT.format("y"), "bob", TWO))[0] == 200

    serve(tmp_path, check)


def test_the_job_of_a_scheduler_stays_the_schedulers(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.4711")
        status, said = await pod.ask("POST", AT.format("4711"), "own", TWO)
        assert (status, said["registered"], said["nodes"]) == (200, False, ["lab/h/r1/node0"])
        status, said = await pod.ask("DELETE", AT.format("4711"), "own")
        assert (status, "reported by a scheduler" in said["error"]) == (409, True)
        end_lapsed(pod.live, JobLeases(), 1e9)
        pod.tick()
        assert "4711" in jobs_of(pod)

    serve(tmp_path, check)


def test_a_scheduler_takes_over_a_job_that_registered_itself(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["own"] = _token(pod, "job.mine")
        assert (await pod.ask("POST", AT.format("mine"), "own", TWO))[0] == 200
        pod._events.append(JobStarted(id="s", job="mine", nodes=("lab/h/r2/node0",), kind="training"))
        pod.tick()
        assert jobs_of(pod) == {"mine": (["lab/h/r2/node0"], 0.0)}
        assert pod.twin.engine.jobs.known

    serve(tmp_path, check)


def test_a_standby_registers_nothing(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["own"], pod.live.role = _token(pod, "job.mine"), "standby"
        status, said = await pod.ask("POST", AT.format("mine"), "own", TWO)
        assert (status, "ask the leader" in said["error"]) == (503, True)

    serve(tmp_path, check)


def test_a_registration_lapses_when_its_client_is_silent(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["own"] = _token(pod, "job.mine")
        assert (await pod.ask("POST", AT.format("mine"), "own", TWO | {"lease_s": 60}))[0] == 200
        leases = JobLeases()  # as after a restart: the whole lease from now on
        for now_s, running in ((0.0, True), (60.0, True), (60.1, False)):
            end_lapsed(pod.live, leases, now_s)
            ended = pod.tick()
            assert ("mine" in jobs_of(pod)) == running
        record = next(r for r in ended.records if r.kind == "event")
        assert "has not asked for advice for 1 min" in str(record)

    serve(tmp_path, check)


def test_after_a_takeover_a_registration_has_its_whole_lease(tmp_path: Path) -> None:
    """Meanwhile its client asked the other daemon."""

    async def check(pod: Pod) -> None:
        assert (await pod.ask("POST", AT.format("mine"), "operator", TWO | {"lease_s": 60}))[0] == 200
        leases = JobLeases()
        for now_s, role, running in (
            (0.0, "leader", True), (2.0, "standby", True), (3600.0, "leader", True), (3660.1, "leader", False)
        ):  # fmt: skip
            pod.live.role = role  # type: ignore[assignment]
            end_lapsed(pod.live, leases, now_s)
            pod.tick()
            assert ("mine" in jobs_of(pod)) == running

    serve(tmp_path, check)


STEPS = st.lists(st.tuples(st.floats(0.0, 500.0), st.sets(st.sampled_from("abc"))), max_size=30)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.dictionaries(st.sampled_from("abc"), st.floats(60.0, 1000.0)))
def test_a_lease_lapses_exactly_when_nobody_asked_for_so_long(
    steps: list[tuple[float, set[str]]], leased: Mapping[str, float]
) -> None:
    leases, now_s = JobLeases(), 0.0
    leases.lapsed(leased, now_s)
    heard = dict.fromkeys(leased, 0.0)
    for dt_s, asked in steps:
        now_s += dt_s
        for job in asked:
            leases.renew(job, now_s)
        heard |= {job: now_s for job in asked if job in leased}
        assert set(leases.lapsed(leased, now_s)) == {j for j in leased if now_s - heard[j] > leased[j]}
