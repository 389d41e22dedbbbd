"""Events, sane or not: each is applied or refused with its reason, never raised. May import `twin`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from policies.operator import Operator
from tests.support.builders import START_NS, Twin, Wish, eight_nodes, site_of, two_racks
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, TABLES, pack
from twin.control import ACK_STATES, Arbiter
from twin.engine.event_handlers import MAX_REQUESTS, MAX_SEEN, Intake
from twin.telemetry import events as ev

NAN, INF, HUGE = float("nan"), float("inf"), 2**80
CAP = "gpu.power_cap_w"
GPU = "r1/node0/gpu0"


def request(**more: Any) -> ev.OperatorRequest:
    given = {"id": "r", "author": "ann", "control": CAP, "names": (GPU,), "lo": 200.0, "hi": 300.0}
    return ev.OperatorRequest(**(given | more))


def approval(**more: Any) -> ev.Approved:
    given = {"id": "a", "author": "ann", "policy": "wish", "control": CAP}
    return ev.Approved(**(given | more))


def acked(**more: Any) -> ev.CommandAcked:
    given = {"control": CAP, "name": GPU, "generation": 0, "command": "1-1", "state": "done"}
    return ev.CommandAcked(**(given | more))


def refusal(*events: ev.Event, tree: dict[str, Any] | None = None) -> str | None:
    """Return why a fresh engine refused the last of these; the engine must live on and be storable."""
    pod = Twin(tree or eight_nodes(), [Wish()])
    pod.tick(None, *events)
    body = [r for r in bodies_of(pod.decision) if r["kind"] == "event"]
    pod.tick()
    pack(pod.engine.dump())
    if not body:
        assert isinstance(events[-1], ev.CommandAcked), (
            "answers alone may be counted rather than written one by one"
        )
        return "counted" if pod.engine.intake.counts else None
    return body[-1].get("refused")


@pytest.mark.parametrize(
    "event, why",
    [
        (ev.FaultReported(table="nonsense", name="?", code=-HUGE), None),
        (ev.TicksSkipped(count=-1), None),
        (ev.FitFailed(fit="?", model="?", why=""), None),
        (ev.JobEnded(job="ghost"), "no job ghost runs"),
        (ev.JobStarted(job="j", nodes=("r1/node0", "nowhere", "r1/node²")), None),
        (ev.JobStarted(job="j", nodes=("x",) * 100_000), None),
        (ev.JobStarted(job="j", nodes=("r1/node0",) * 200_000), None),
        (ev.JobStarted(job="", nodes=()), None),
        (ev.JobStarted(job="j", nodes=(), priority=HUGE), "expected a floor >= 0 and a priority"),
        (ev.JobStarted(job="j", nodes=(), floor_w=NAN), "expected a floor >= 0"),
        (ev.JobStarted(job="j", nodes=(), floor_w=-1.0), "expected a floor >= 0"),
        (request(), None),
        (request(id=""), "a request needs an id"),
        (request(control="gpu.nonsense"), "is not a control"),
        (request(lo=301.0), "expected lo <= hi"),
        (request(lo=NAN), "expected lo <= hi"),
        (request(hi=NAN), "expected lo <= hi"),
        (request(want=NAN), None),
        (request(lo=-INF, hi=INF, want=INF), None),
        (request(names=()), "names no gpu"),
        (request(names=(GPU, "gpu9")), "names a gpu that this site does not have"),
        (request(names=("r1/node0",)), "names a gpu that this site does not have"),
        (ev.RequestWithdrawn(author="ann", request="ghost"), "no request ghost"),
        (request(expires_ns=-1), "expected an instant"),
        (request(expires_ns=HUGE), "expected an instant"),
        (request(expires_ns=START_NS), "expired already, 1 s ago"),
        (approval(policy="ghost"), "no policy ghost"),
        (approval(), None),
        (approval(names=(GPU,)), None),
        (approval(id=""), "an approval needs an id"),
        (approval(control="gpu.powercap"), "is not a control"),
        (approval(names=("nope",)), "names a gpu that this site does not have"),
        (approval(expires_ns=-1), "expected an instant"),
        (approval(expires_ns=START_NS), "expired already"),
        (ev.ApprovalWithdrawn(author="ann", approval="ghost"), "no approval ghost"),
        (ev.AuthorityChanged(author="ann", policy="ghost", authority="act"), "no policy ghost"),
        (ev.EpochChanged(epoch=0), "older than 1"),
        (ev.EpochChanged(epoch=-HUGE), "older than 1"),
        (ev.EpochChanged(epoch=HUGE), "or no epoch"),
        (acked(control="gpu.nonsense"), "counted"),
        (acked(name="gpu9"), "counted"),
        (acked(command=""), "counted"),
        (acked(command="1"), "counted"),
        (acked(command="1-²"), "counted"),
        (acked(command="²-1"), "counted"),
        (acked(command="1--1"), "counted"),
        (acked(command="1-" + "9" * 40), "counted"),
        (acked(command="9" * 40 + "-1"), "counted"),
        (acked(command="0-1"), "counted"),
        (acked(generation=HUGE), "counted"),
        (acked(generation=-1), "counted"),
        (ev.EntityReplaced(table="nonsense", name="x", serial="s"), "no nonsense x"),
        (ev.EntityReplaced(table="gpu", name="x", serial="s"), "no gpu x"),
        (ev.EntityReplaced(table="gpu", name=GPU, serial="s"), None),
        (ev.BudgetGranted(author="g", feeder="x", budget_w=1.0, expires_ns=1), "no feeder x"),
        (ev.ModelFitted(fit="f", model="ghost", params_hash="", params=b""), "no model ghost"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, ev._Event) else "",
)
def test_what_becomes_of_an_event(event: ev.Event, why: str | None) -> None:
    found = refusal(event)
    if why is None:
        assert found is None
    elif why == "counted":
        assert found is not None
    else:
        assert found is not None
        assert why in found


def granting() -> dict[str, Any]:
    tree = two_racks()
    a, b = tree["halls"][0]["feeders"]
    a |= {"external": True, "guaranteed_w": 100_000.0}
    b |= {"external": True, "guaranteed_w": 50_000.0}
    del b["budget_w"]
    return tree


def grant(feeder: str, budget_w: float, seconds: float) -> ev.BudgetGranted:
    return ev.BudgetGranted(
        author="g", feeder=feeder, budget_w=budget_w, expires_ns=START_NS + round(seconds * NS)
    )


def test_a_grant_applies_while_it_runs_and_never_above_the_feeders_own() -> None:
    pod = Twin(granting())

    def budget() -> list[float]:
        return pod.engine.intake.budget_w(pod.site, pod.now_ns).tolist()  # type: ignore[no-any-return]

    pod.tick()
    assert budget() == [100_000, 50_000]
    pod.tick(None, grant("a", 250_000, 5), grant("b", 9e6, 3))
    assert budget() == [250_000, 9e6]
    pod.tick()
    assert budget() == [250_000, 50_000], "the lease of b ran out at second 3"
    pod.run(2)
    assert budget() == [100_000, 50_000]
    pod.tick(None, grant("a", 400_000, 99))
    assert budget() == [300_000, 50_000]
    pod.tick(None, grant("a", 0, 99))
    assert budget() == [0, 50_000], "a grant may also take away"


@pytest.mark.parametrize(
    "event, why",
    [
        (grant("a", NAN, 5), "expected a budget"),
        (grant("a", -1.0, 5), "expected a budget"),
        (grant("a", INF, 5), "expected a budget"),
        (ev.BudgetGranted(author="g", feeder="a", budget_w=1.0, expires_ns=HUGE), "and an instant"),
        (grant("a", 1.0, -5), "expired already, 6 s ago"),
    ],
)
def test_a_grant_that_is_no_budget_is_refused(event: ev.Event, why: str) -> None:
    assert why in str(refusal(event, tree=granting()))


def test_a_feeder_that_is_not_external_takes_no_grant() -> None:
    assert "not external" in str(refusal(grant("a", 1.0, 5), tree=two_racks()))


def test_an_event_counts_once() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    for _ in range(3):
        pod.tick(None, ev.JobStarted(id="e1", job="a", nodes=("r1/node0",)))
    assert pod.engine.jobs.counts["restarted"] == 0
    assert pod.engine.intake.counts == {"duplicate_events": 2}


def test_a_start_that_an_earlier_version_remembered_without_its_time_is_the_same_one() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    job = ev.JobStarted(id="x", job="j", nodes=("r1/node0",), priority=3, time_limit_s=60.0)
    pod.tick(None, job)
    assert pod.engine.intake.seen == {"JobStarted:x": "e416e79d0fcfbfeb"}  # by a version without the field
    assert b"started_ns" not in msgspec.msgpack.encode(job)
    pod.tick(None, msgspec.structs.replace(job, started_ns=START_NS))
    assert pod.engine.intake.counts == {"duplicate_events": 1}


def test_a_start_time_that_cannot_be_is_counted_and_the_job_runs() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    pod.tick(None, ev.JobStarted(id="x", job="j", nodes=("r1/node0",), started_ns=START_NS + HUGE))
    assert pod.engine.jobs.job_of_node[0] == 0
    assert pod.engine.intake.counts == {"implausible_starts": 1}


def test_what_is_remembered_is_bounded() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    intake = pod.engine.intake
    for i in range(MAX_SEEN + 500):
        assert intake.is_new(ev.TicksSkipped(id=f"e{i}", count=1))
    assert len(intake.seen) == MAX_SEEN
    assert not intake.is_new(ev.TicksSkipped(id=f"e{MAX_SEEN}", count=1))
    pod.tick(None, *(request(id=f"q{i}") for i in range(MAX_REQUESTS + 50)))
    assert len(intake.requests) == MAX_REQUESTS
    pod.tick(
        None,
        *(ev.Approved(id=f"a{i}", author="", policy="wish", control=CAP) for i in range(MAX_REQUESTS + 50)),
    )
    assert len(intake.approvals) == MAX_REQUESTS
    pod.tick(None, *(ev.EntityReplaced(table="gpu", name=GPU, serial=f"s{i}") for i in range(50)))
    assert len(intake.serials) == 1
    pod.tick(None, *(ev.FaultReported(table="gpu", name=f"x{i}", code=i) for i in range(1000)))
    assert len(intake.counts) < 10


def test_requests_and_approvals_run_out() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    until = pod.now_ns + 3 * NS
    approved = ev.Approved(id="a", author="ann", policy="wish", control=CAP, expires_ns=until)
    pod.tick(None, request(expires_ns=until), approved, request(id="for-ever"))
    pod.tick()
    assert len(pod.engine.intake.requests) == 2
    pod.tick()
    assert set(pod.engine.intake.requests) == {"for-ever"}
    assert pod.engine.intake.approvals == {}
    assert {(r["kind"], r["id"]) for r in bodies_of(pod.decision)} >= {
        ("request_expired", "r"),
        ("approval_expired", "a"),
    }


def test_the_same_serial_again_is_no_replacement() -> None:
    pod = Twin(eight_nodes())
    pod.tick({"gpu.temp_c": 50.0}, ev.EntityReplaced(table="gpu", name=GPU, serial="s1"))
    table = pod.engine.state.tables["gpu"]
    assert table.generation[0] == 1
    pod.tick({"gpu.temp_c": 50.0})
    pod.tick(None, ev.EntityReplaced(table="gpu", name=GPU, serial="s1"))
    assert "was already there" in pod.records("event")[0]["refused"]
    assert table.generation[0] == 1


def test_another_daemons_answer_is_not_ours() -> None:
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 250)
    pod.tick({"gpu.power_limit_w": 350.0}, ev.EpochChanged(epoch=3))
    (batch,) = pod.commands()
    pod.tick(None, acked(command=f"2-{batch.command[0]}"))
    assert pod.engine.arbiter.leases[CAP].state[0] == 1
    pod.tick(None, acked(command=f"3-{batch.command[0]}"))
    assert pod.engine.arbiter.leases[CAP].state[0] == 4


def test_a_new_job_in_an_old_slot_inherits_nothing() -> None:
    wish = Wish()
    wish.controls = ("job.power_cap_w",)
    pod = Twin(eight_nodes(max_jobs=1, controls={"job.power_cap_w": {"safe": 1000.0}}), [wish], act=True)
    pod.tick({"job.progress_per_s": 5.0}, ev.JobStarted(job="a", nodes=("r1/node0",)))
    pod.tick({"job.progress_per_s": 5.0})
    wish.ask("job.power_cap_w", [0], 500, 600, 600)
    pod.tick()
    assert pod.commands()[0].generation.tolist() == [1]
    wish.proposals = []
    pod.tick(None, ev.JobEnded(job="a"))
    assert np.isnan(pod.lease("job.power_cap_w")).all()
    pod.tick(dt_s=700.0)
    pod.tick(None, ev.JobStarted(job="b", nodes=("r1/node0",)))
    table = pod.engine.state.tables["job"]
    assert table.generation.tolist() == pod.engine.jobs.generation.tolist() == [2]
    assert np.isnan(table.value[TABLES["job"].by_name["progress_per_s"].row, 0])


def test_names_of_jobs_are_those_that_the_site_gives() -> None:
    pod = Twin(eight_nodes(max_jobs=3))
    pod.tick()
    name = pod.site.name("job", 2)
    assert pod.site.entity("job", name) == 2
    pod.tick(None, request(control="job.power_cap_w", names=(name,)))
    assert set(pod.engine.intake.requests) == {"r"}


def test_an_id_is_one_among_events_of_its_type() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    pod.tick(None, ev.Held(id="x", author="a"))
    pod.tick(None, ev.Resumed(id="x", author="a"))
    assert pod.engine.arbiter.mode == "normal"
    assert "refused" not in pod.records("event")[0]


def test_a_duplicate_is_told_once_per_tick() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    pod.tick(None, *[ev.Held(id="x", author="a")] * 3)
    assert [r["count"] for r in pod.records("duplicates")] == [2]
    pod.tick()
    assert pod.records("duplicates") == []
    assert pod.engine.intake.counts == {"duplicate_events": 2}


def test_another_event_under_a_used_id_is_refused_but_a_request_is_changed() -> None:
    pod = Twin(eight_nodes(), [Wish()])
    pod.tick(None, ev.JobStarted(id="x", job="j", nodes=()), request(id="x", lo=250, hi=300))
    pod.tick(None, ev.JobStarted(id="x", job="k", nodes=()), request(id="x", lo=250.0, hi=280.0))
    changed, refused = sorted(pod.records("event"), key=lambda r: "refused" in r)
    assert refused["refused"] == "id x already used for something else"
    assert refused["event"]["job"] == "k"
    assert set(pod.engine.jobs.slot_of) == {"j"}
    assert changed["event"]["hi"] == 280
    assert pod.engine.intake.requests["x"].hi == 280
    pod.tick(None, request(id="x", lo=250, hi=280))
    assert pod.records("event") == [], "a whole number of watts is the same request"
    pod.tick(None, *(ev.TicksSkipped(id="x", count=i + 1) for i in range(500)))
    assert len(pod.records("event")) <= 65
    assert pod.engine.intake.counts["reused_ids"] == 500


def test_the_order_of_requests_and_approvals_survives_a_restart() -> None:
    pod = Twin(two_racks(), [Operator()], act=True)
    gpu = pod.site.name("gpu", 0)
    seen = {"gpu.temp_c": 60.0, "gpu.power_limit_w": 1200.0}
    pod.run(2, seen)
    pod.tick(seen, request(id="z-first", names=(gpu,), lo=400.0, hi=400.0))
    pod.tick(seen, request(id="a-second", names=(gpu,), lo=900.0, hi=900.0))
    both = [ev.Approved(id=i, author="a", policy="operator", control=CAP) for i in ("z", "a")]
    pod.tick(seen, *both)
    pod.run(20, seen)
    back = pod.restarted(two_racks(), [Operator()])
    assert list(back.engine.intake.requests) == ["z-first", "a-second"]
    assert list(back.engine.intake.approvals) == ["z", "a"]
    assert back.engine.checksum() == pod.engine.checksum()
    requests = back.engine.intake.requests
    back.engine.intake.requests = dict(reversed(requests.items()))
    assert back.engine.checksum() != pod.engine.checksum(), "their order is content"
    back.engine.intake.requests = requests
    for _ in range(12):
        pod.tick(seen)
        back.tick(seen)
        assert back.lease(CAP)[0] == pod.lease(CAP)[0]
    assert back.engine.checksum() == pod.engine.checksum()


def test_approvals_are_withdrawn_and_end_with_the_authority() -> None:
    pod = Twin(eight_nodes(), [Wish(), Wish("other")])
    pod.tick(None, approval(id="a"), approval(id="b"), approval(id="c", policy="other"))
    pod.tick(None, ev.ApprovalWithdrawn(author="ann", approval="a"))
    assert set(pod.engine.intake.approvals) == {"b", "c"}
    pod.tick(None, ev.AuthorityChanged(author="ann", policy="wish", authority="approve"))
    assert set(pod.engine.intake.approvals) == {"c"}
    assert [r["id"] for r in pod.records("approval_dropped")] == ["b"]


def test_the_end_of_a_grant_is_told() -> None:
    pod = Twin(granting())
    pod.tick(None, grant("a", 280_000, 3))
    pod = pod.restarted(granting(), [])
    told = []
    for _ in range(5):
        pod.tick()
        told += pod.records("grant_expired")
    name = pod.site.name("feeder", 0)
    assert told == [{"kind": "grant_expired", "feeder": name, "was_w": 280e3, "becomes_w": 100e3}]


def test_a_job_on_unknown_nodes_runs_and_they_are_counted() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, ev.JobStarted(job="j", nodes=("r1/node0", "nope")))
    assert "refused" not in pod.records("event")[0]
    assert "j" in pod.engine.jobs.slot_of
    assert pod.engine.intake.counts == {"unknown_nodes": 1}


STRANGE = ("", "1", "1-", "-1", "1-1\n1-2", "1-1\n7", "1-\n", "\n1-5", "1-²", "1-" + "9" * 18,
           "1-" + "9" * 19, "2-5", "1- 5", "1-5 ", "1--5", "1-+5", "11-5", "1-5\r", "1-0", "1-1-1", "\n",
           "1-\x005")  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_answer_changes_no_other(strange: str) -> None:
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0, 1, 2, 3], 200, 300, 250)
    pod.tick({"gpu.power_limit_w": 350.0})
    (batch,) = pod.commands()
    commands = [f"1-{number}" for number in batch.command.tolist()]
    commands[1] = strange
    answers = [acked(name=pod.site.name("gpu", i), command=text) for i, text in enumerate(commands)]
    pod.tick(None, *answers)
    assert pod.engine.arbiter.leases[CAP].state[:4].tolist() == [4, 1, 4, 4]
    assert sum(pod.engine.intake.counts.values()) == 1


@pytest.mark.parametrize("seed", range(140))
def test_answers_of_a_tick_count_as_they_do_one_by_one(seed: int) -> None:
    """With ids that come again, entities that occur twice, other epochs, controls, names and numbers."""
    draw, site = np.random.default_rng(seed), site_of(eight_nodes())
    n, odd = site.sizes["gpu"], seed % 7  # a kind of oddness; 6: none
    answers = list[ev.CommandAcked]()
    for k in draw.permutation(n)[: draw.integers(1, n + 1)].tolist():
        given: dict[str, Any] = {"name": site.name("gpu", k), "command": f"1-{draw.integers(0, 2)}"}
        given |= {"generation": int(draw.integers(0, 2)), "state": str(draw.choice([*ACK_STATES]))}
        if odd < 6 and draw.random() < 0.4:
            before = answers[-1] if answers else acked()
            again = {"name": before.name, "command": before.command, "generation": before.generation}
            strange = {"id": "7"}, {"command": "2-1"}, {"control": "node.power_cap_w"}, {"name": "gpu0"}
            given |= (*strange, {"generation": 2**40}, again)[odd]
        answers.append(acked(**given))
    columns = {
        "value": np.where(draw.random(n) < 0.7, 500.0, np.nan),
        "generation": draw.integers(0, 2, n).astype(np.int32),
        "command": draw.integers(0, 2, n),
    }
    pods = [(Intake(site, {}), Arbiter(site)) for _ in range(2)]
    for _, arbiter in pods:
        for name, values in columns.items():
            getattr(arbiter.leases[CAP], name)[:] = values
    (at_once, leases), (in_turn, expected) = pods
    told = at_once.take_acks(answers, site, leases)
    fresh = [e for e in answers if not e.id or in_turn.is_new(e)]
    assert told == Counter((e.control, e.state, in_turn.acked(e, site, expected) or "") for e in fresh)
    assert pack(at_once.dump()) == pack(in_turn.dump())
    assert at_once.counts == in_turn.counts
    for key in (CAP, "node.power_cap_w"):
        assert leases.leases[key].state.tolist() == expected.leases[key].state.tolist()
