"""Checkpoints over HTTP: who may report for which job, what is taken of it, and what is advised meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.jobs import MAX_REPORT, decode_advice
from connectors.jobs.wire import JOB_BURST
from tests.support.builders import START_NS, eight_nodes, site_of, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.api.summary import _means
from twin.api.tokens import add_token
from twin.catalogue import NS, control_value, find_control
from twin.contracts import AdviceRecord
from twin.control import ACCEPTED, DONE, SENT
from twin.report import sentence
from twin.telemetry import CheckpointTold, JobEnded, JobStarted, OperatorRequest
from twin.telemetry.jobs import REST_S
from twin.wiring import Roster, answers_of

INTERVAL, SINCE = "job.checkpoint_interval_s", "job.checkpoint_since_s"
AT = "/v1/jobs/{}/checkpoint"


def body(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"v": 1, "id": str(number), "t_ns": START_NS + number * NS, "began_ns": START_NS - 60 * NS,
            "save_s": 30.0, "block_s": 5.0, "interval_s": 600.0, **more}  # fmt: skip


def employ(pod: Pod, **tokens: str) -> None:
    """Two jobs that run, and tokens of the role `job`: role name -> token name."""
    pod.live._events = []  # type: ignore[attr-defined]
    pod._events += [
        JobStarted(id="s1", job="4711", nodes=("lab/h/r1/node0",), kind="training", tenant="ann"),
        JobStarted(id="s2", job="ns/b", nodes=("lab/h/r1/node1",), kind="training", tenant="bob"),
    ]
    pod.tick()
    for role, name in tokens.items():
        pod.secrets[role] = add_token(pod.tokens_file, name, "job")
    pod.tokens.reload()


def wish(pod: Pod, control: str, slot: int, value: float) -> None:
    """An operator asks for it, who may act here: a lease like that of any policy."""
    pod._events.append(OperatorRequest(
        id=f"w{control}{slot}{value}", author="ada", control=control, names=(f"lab/job{slot}",), lo=value,
        hi=value, want=value, reason="a drain"))  # fmt: skip
    pod.tick()


def test_a_report_is_taken_and_answered_with_advice(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.4711")
        wish(pod, INTERVAL, 0, 900.0)
        wish(pod, SINCE, 0, START_NS / NS + 5)
        for number, path in enumerate((AT, "/api" + AT)):
            status, done = await pod.ask("POST", path.format("4711"), "own", body(number))
            assert (status, done["taken"], done["advice"]["interval_s"]) == (200, True, 900.0)
        pod.tick()
        jobs = pod.twin.engine.jobs
        assert (jobs.checkpoint_save_s[0], jobs.checkpoint_block_s[0]) == (30.0, 5.0)
        assert 0 <= jobs.saved_ns[0] - (START_NS - 60 * NS) < 10 * NS, "but for the delay of the report"
        assert pod.live.counts["checkpoint_reports"] == 2
        status, tree = await pod.ask("GET", AT.format("4711"), "own")
        lease = pod.twin.engine.arbiter.leases[INTERVAL]
        assert status == 200
        assert tree["told"]["interval_s"] == 600.0
        assert (tree["expires_ns"], tree["epoch"], tree["reason"]) == (
            lease.expires_ns[0], 1, "requested by ada: a drain")  # fmt: skip
        advice = decode_advice(json.dumps(tree).encode())
        assert (advice.job, advice.interval_s, advice.save_since_ns) == ("4711", 900.0, START_NS + 5 * NS)
        assert advice.issued_ns == pod.twin.now_ns
        status, tree = await pod.ask("GET", AT.format("ns%2Fb"), "viewer")
        assert (status, tree["job"], tree["interval_s"], tree["expires_ns"] - tree["issued_ns"]) == (
            200, "ns/b", None, 0)  # fmt: skip
        assert tree["told"]["interval_s"] is None

    serve(tmp_path, check)


def test_who_may_speak_for_whom(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(
            pod, own="job.4711", ann="tenant.ann", other="job.9", nobody="tenant.", odd="4711", pre="x.4711"
        )
        may = {
            "own": (200, 403), "ann": (200, 403), "other": (403, 403), "odd": (403, 403), "pre": (403, 403),
            "nobody": (403, 403), "operator": (200, 200), "admin": (200, 200), "viewer": (403, 403),
            "none": (401, 401), "wrong": (401, 401),
        }  # fmt: skip
        for number, (role, expected) in enumerate(may.items()):
            for job, status in zip(("4711", "ns%2Fb"), expected, strict=True):
                said = await pod.ask("POST", AT.format(job), role, body(number + 1))
                assert said[0] == status, (role, job, said)
                asked = await pod.ask("GET", AT.format(job), role)
                assert asked[0] == (200 if role == "viewer" else status), (role, job, asked)
        for role in ("own", "ann"):
            for path in ("/api/v1/state", "/api/v1/summary", "/api/v1/leases", "/api/v1/racks"):
                assert (await pod.ask("GET", path, role))[0] == 403, "a job sees nothing of the site"
            assert (await pod.ask("GET", "/api/v1/whoami", role))[1]["role"] == "job", "but its own token"
        assert (await pod.ask("GET", AT.format("4712"), "own"))[0] == 403
        assert (await pod.ask("GET", AT.format("4712"), "viewer"))[0] == 404
        assert any(n["why"] == "not its own job" for k, n in pod.notes if k == "access")

    serve(tmp_path, check)


def test_a_tenant_without_a_name_owns_no_job(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, nobody="tenant.")
        pod._events.append(JobStarted(id="s3", job="free", nodes=("lab/h/r2/node0",)))
        pod.tick()
        assert (await pod.ask("GET", AT.format("free"), "nobody"))[0] == 403

    serve(tmp_path, check)


BAD: list[tuple[Any, int, str]] = [
    (b"", 400, "not a report"),
    (b"{", 400, "not a report"),
    (body(save_s=-1), 400, "save_s"),
    (body(t_ns=1), 400, "check the clock"),
    (body(job="other"), 400, "claims to be job 'other'"),
    (body(reason="x" * MAX_REPORT), 413, "bytes of report"),
    (b"x" * (2**20 + 1), 413, ""),
]


@pytest.mark.parametrize("sent,status,why", BAD)
def test_what_is_refused(tmp_path: Path, sent: Any, status: int, why: str) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.4711")
        found, said = await pod.ask("POST", AT.format("4711"), "own", sent)
        assert found == status
        assert why in said["error"]
        assert pod._events == []

    serve(tmp_path, check)


def test_a_job_that_floods_waits(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.4711")
        big = body(reason="x" * (MAX_REPORT - 400))
        found = [
            (await pod.ask("POST", AT.format("4711"), "own", big))[0] for _ in range(JOB_BURST // 3500 + 2)
        ]
        assert found[0] == 200
        assert found[-1] == 429
        assert (await pod.ask("POST", AT.format("ns%2Fb"), "operator", body()))[0] == 200

    serve(tmp_path, check)


def test_a_full_queue_and_a_standby_say_so(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="job.4711")
        pod.live.put_event = lambda event: False
        assert (await pod.ask("POST", AT.format("4711"), "own", body()))[0] == 503
        pod.live.veto = lambda event: "this daemon is a standby; ask the leader"
        status, said = await pod.ask("POST", AT.format("4711"), "own", body())
        assert (status, "is a standby" in said["error"]) == (503, True)
        pod.live.role = "standby"
        status, said = await pod.ask("GET", AT.format("4711"), "own")
        assert (status, said["error"]) == (503, "this daemon is a standby; ask the leader")

    serve(tmp_path, check)


def test_advice_ends_with_its_lease_and_with_its_job(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod)
        wish(pod, INTERVAL, 0, 900.0)
        roster = Roster(lambda: pod.twin.engine)
        generation = int(pod.twin.engine.arbiter.leases[INTERVAL].generation[0])
        assert roster.job_of(0, generation) == "4711"
        held = [(c, s, p.value, p.reason) for c, s, p in roster.leases()]
        assert held == [(INTERVAL, 0, 900.0, "requested by ada: a drain")]
        pod._events.append(JobEnded(id="e", job="4711"))
        pod.tick()
        assert (await pod.ask("GET", AT.format("4711")))[0] == 404
        assert roster.job_of(0, generation) is None
        pod.twin.tick(dt_s=REST_S + 1)
        pod._events.append(JobStarted(id="s9", job="new", nodes=("lab/h/r1/node0",), kind="training"))
        pod.tick()
        assert pod.twin.engine.jobs.slot_of["new"] == 0
        assert (roster.job_of(0, generation), roster.job_of(0, generation + 1)) == (None, "new")
        assert [roster.job_of(s, 1) for s in (-1, 10**6)] == [None, None]

    serve(tmp_path, check)


def told(job: str, began_s: float, now_ns: int, **more: Any) -> CheckpointTold:
    began_ns = START_NS + round(began_s * NS)
    return CheckpointTold(id=f"{job}{began_s}{more}", job=job, at_ns=now_ns, began_ns=began_ns, **more)


def test_a_save_that_is_new_enough_answers_the_wish_for_one(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=eight_nodes())
    pod.tick()
    employ(pod)
    wish(pod, SINCE, 0, START_NS / NS + 10)
    engine = pod.twin.engine
    lease = engine.arbiter.leases[SINCE]
    assert lease.state[0] == SENT
    pod.tick(dt_s=60.0)

    def hear(event: CheckpointTold) -> int:
        pod._events.append(event)
        pod.tick()
        acks = answers_of(engine, (event,))
        pod._events += acks  # type: ignore[arg-type]
        pod.tick()
        return len(acks)

    assert hear(told("4711", 5.0, pod.twin.now_ns)) == 0, "too old"
    assert hear(told("4711", 20.0, pod.twin.now_ns, tier="memory")) == 0, "a node takes it with it"
    assert hear(told("ns/b", 20.0, pod.twin.now_ns)) == 0, "another job's"
    assert hear(told("stranger", 20.0, pod.twin.now_ns)) == 0
    assert lease.state[0] < ACCEPTED
    assert hear(told("4711", 30.0, pod.twin.now_ns)) == 1
    assert lease.state[0] == DONE
    assert hear(told("4711", 40.0, pod.twin.now_ns)) == 0, "once is enough"


def findings_of(pod: Pod, seconds: int, interval_s: float, every_s: int) -> dict[str, tuple[str, int]]:
    """All findings about advice in so long, by id: a job reports an interval every so often (0: never)."""
    found: dict[str, tuple[str, int]] = {}
    for second in range(0, seconds, 30):
        if every_s and second % every_s == 0:
            pod._events.append(CheckpointTold(id=f"r{second}", job="4711", at_ns=pod.twin.now_ns,
                                              interval_s=interval_s))  # fmt: skip
        pod.tick(dt_s=30.0)
        for finding in pod.twin.decision.findings:
            if "job." in finding.id:
                found[finding.id] = (finding.severity, finding.count)
    return found


def test_a_job_that_follows_is_no_finding(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=eight_nodes())
    employ(pod)
    wish(pod, INTERVAL, 0, 905.0)
    assert findings_of(pod, 1500, 905.0, 300) == {}
    assert pod.twin.engine.arbiter.leases[INTERVAL].state[0] == DONE


def test_a_job_that_never_answers_is_one_quiet_finding(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=eight_nodes())
    employ(pod)
    wish(pod, INTERVAL, 0, 905.0)
    assert findings_of(pod, 1500, 0.0, 0) == {f"unanswered/{INTERVAL}": ("info", 1)}


def test_a_job_that_goes_its_own_way_is_no_alarm(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=eight_nodes())
    employ(pod)
    wish(pod, INTERVAL, 0, 905.0)
    found = findings_of(pod, 1500, 600.0, 300)
    assert found
    assert {severity for severity, _ in found.values()} == {"info"}


def test_a_job_that_fell_silent_is_one_quiet_finding(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=eight_nodes())
    employ(pod)
    wish(pod, INTERVAL, 0, 905.0)
    findings_of(pod, 600, 905.0, 300)
    assert findings_of(pod, 900, 0.0, 0) == {f"unread/{INTERVAL}": ("info", 1)}


def test_a_job_that_follows_after_all_ends_the_finding(tmp_path: Path) -> None:
    """Advice that was given up as unanswered, for a broker that was gone, is renewed all the same."""
    pod = Pod(tmp_path, tree=eight_nodes())
    employ(pod)
    wish(pod, INTERVAL, 0, 905.0)
    assert findings_of(pod, 1500, 0.0, 0) != {}
    event = CheckpointTold(id="r", job="4711", at_ns=pod.twin.now_ns, interval_s=905.04)
    pod._events.append(event)
    pod.tick()
    acks = answers_of(pod.twin.engine, (event, event))
    assert len(acks) == 1
    pod._events += acks  # type: ignore[arg-type]
    pod.tick()
    assert pod.twin.engine.arbiter.leases[INTERVAL].state[0] == DONE
    assert [f.id for f in pod.twin.decision.findings if "job." in f.id] == []


def test_a_wish_for_a_save_is_asked_for_and_shows_no_duration() -> None:
    since_s = 1.7e9
    record = AdviceRecord(
        control="job.checkpoint_since_s",
        policy="checkpoint",
        first_name="lab/job0",
        last_name="lab/job0",
        index=np.array([0]),
        value=np.array([since_s]),
        names=("lab/job0",),
        reason="a drain",
    )
    words = "checkpoint would ask for a save of lab/job0: a drain"
    assert sentence(record, site_of(two_racks())) == words
    assert control_value(since_s, record.control) == "2023-11-14 22:13:20 UTC"
    control = find_control("job.checkpoint_since_s")
    assert control is not None
    assert _means(control, np.array([since_s, since_s])) == "2023-11-14 22:13:20 UTC"
