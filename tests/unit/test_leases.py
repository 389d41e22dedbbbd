"""The life of a lease: answers in any order, deadlines, retries, lapses, read-backs. May import `twin`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, Wish, eight_nodes
from twin.catalogue import NS, Control, find_control
from twin.control import (
    ACK_STATES,
    DONE,
    EXPIRED,
    FAILED,
    IN_PROGRESS,
    MISMATCH_S,
    NONE,
    SENT,
    Leases,
    Setpoints,
)
from twin.control.leases import _ACK, MAX_ATTEMPTS
from twin.telemetry import CommandAcked, EntityReplaced, JobStarted

T0 = 1_000 * NS
CAP, LEVEL = "gpu.power_cap_w", "node.service_level"


def control(key: str) -> Control:
    found = find_control(key)
    assert found is not None
    return found


def leases(key: str = "gpu.power_cap_w", value: float = 500.0, found: float = 1200.0) -> Leases:
    """Three slots; a lease of command 7 runs on slot 1."""
    out = Leases(control(key), 3)
    out.grant(one(value), 7, T0, np.full(3, found))
    assert out.command[1] == 7
    return out


def one(value: float) -> Setpoints:
    """A value for slot 1, by policy 4, for generation 2."""
    at = np.array([1, 4, 2], np.int32)
    return Setpoints(at[:1], np.array([value]), at[1:2], at[2:])


def test_a_grant_notes_everything() -> None:
    lease = leases()
    assert lease.running().tolist() == [False, True, False]
    assert (lease.value[1], lease.found[1], lease.owner[1], lease.generation[1]) == (500.0, 1200.0, 4, 2)
    assert lease.expires_ns[1] == T0 + 30 * NS
    assert lease.deadline_ns[1] == T0 + 10 * NS
    assert (lease.state[1], lease.attempts[1]) == (SENT, 1)
    lease.grant(one(450.0), 8, T0 + NS, np.full(3, 500.0))
    assert lease.found[1] == 1200.0, "what was found is what was there before the first command"
    assert lease.begun_ns[1] == T0, "another value is no break"
    lease.end(np.array([1], np.int32))
    lease.grant(one(450.0), 9, T0 + 5 * NS, np.full(3, 500.0))
    assert lease.begun_ns[1] == T0 + 5 * NS


@pytest.mark.parametrize(
    "entity, generation, command, expected",
    [
        (1, 2, 7, True),
        (1, 2, 6, False),
        (1, 2, 8, False),
        (1, 1, 7, False),
        (1, 3, 7, False),
        (0, 0, 0, False),
        (2, 2, 7, False),
        (-1, 2, 7, False),
        (3, 2, 7, False),
        (1, 2**70, 7, False),
    ],
)
def test_an_answer_counts_only_for_its_own_command(
    entity: int, generation: int, command: int, expected: bool
) -> None:
    lease = leases()
    assert lease.ack(entity, generation, command, "done") is expected
    assert (lease.state[1] == DONE) == expected


@pytest.mark.parametrize("order", list(itertools.permutations(["accepted", "in_progress", "done"])))
def test_answers_in_any_order_and_twice_end_in_done(order: tuple[str, ...]) -> None:
    lease = leases()
    seen = []
    for state in (*order, *order):
        assert lease.ack(1, 2, 7, state)
        seen.append(int(lease.state[1]))
    assert seen == sorted(seen)
    assert seen[-1] == DONE


@pytest.mark.parametrize(
    "answers, expected",
    [
        (["failed", "done"], DONE),
        (["done", "failed"], DONE),
        (["in_progress", "failed"], FAILED),
        (["failed", "in_progress"], FAILED),
        (["failed", "failed"], FAILED),
        (["in_progress", "accepted"], IN_PROGRESS),
    ],
)
def test_done_is_the_end(answers: list[str], expected: int) -> None:
    lease = leases()
    for state in answers:
        lease.ack(1, 2, 7, state)
    assert lease.state[1] == expected


def test_an_answer_after_the_lease_was_given_back_is_heard_and_changes_nothing() -> None:
    lease = leases()
    lease.end(np.array([1], np.int32))
    assert lease.ack(1, 2, 7, "done")
    assert lease.state[1] == NONE
    assert not lease.running().any()


def test_an_answer_after_a_lapse_is_stale() -> None:
    lease = leases()
    assert lease.lapse(T0 + 30 * NS - 1).tolist() == []
    assert lease.lapse(T0 + 30 * NS).tolist() == [1]
    assert not lease.ack(1, 2, 7, "done")
    assert lease.state[1] == EXPIRED
    assert lease.lapse(T0 + 60 * NS).tolist() == []


@pytest.mark.parametrize("age_s, expected", [(0, False), (14.9, False), (15, True), (29, True)])
def test_a_lease_is_due_in_the_second_half_of_its_life(age_s: float, expected: bool) -> None:
    lease = leases()
    assert lease.due(T0 + round(age_s * NS)).tolist() == [False, expected, False]
    lease.renew(np.array([1], np.int32), T0 + round(age_s * NS))
    assert lease.expires_ns[1] == T0 + round((age_s + 30) * NS)


def test_silence_is_asked_again_at_each_deadline_three_times_in_all() -> None:
    lease = leases()
    sent, lost = [T0], []
    for second in range(1, 100):
        now_ns = T0 + second * NS
        late = lease.overdue(now_ns)
        again = lease.retry(late, now_ns)
        sent += [now_ns] * len(again)
        lost += [now_ns] * (len(late) - len(again))
        assert lease.command[1] == 7, "the same number: a repeated command is harmless"
    assert [t - T0 for t in sent] == [0, 10 * NS, 20 * NS]
    assert [t - T0 for t in lost] == [30 * NS]
    assert lease.attempts[1] == MAX_ATTEMPTS + 1, "given up, and told once"
    assert lease.state[1] == FAILED


def test_a_refusal_is_asked_again_soon_and_not_for_ever() -> None:
    lease = leases("node.service_level", 3.0)  # deadline two hours
    sent = []
    for second in range(1, 200):
        now_ns = T0 + second * NS
        again = lease.retry(lease.overdue(now_ns), now_ns)
        sent += [second] * len(again)
        lease.ack(1, 2, 7, "failed")
    assert sent == [10, 20]
    assert lease.state[1] == FAILED


@pytest.mark.parametrize("state", ["accepted", "in_progress", "done", "failed"])
def test_only_what_is_not_done_is_overdue(state: str) -> None:
    lease = leases()
    lease.ack(1, 2, 7, state)
    assert lease.overdue(T0 + 10 * NS).tolist() == ([] if _ACK[state] == DONE else [1])


def test_few_leases_are_judged_as_they_are_among_many() -> None:
    few, many = Leases(control(CAP), 40), Leases(control(CAP), 40)
    for lease, index in ((few, np.array([3, 5, 8])), (many, np.array([3, 5, 8, *range(20, 40)]))):
        at, values = index.astype(np.int32), 500.0 + index
        lease.grant(Setpoints(at, values, at, at), 1, T0, np.full(40, 1200.0))
    readback = np.where(np.arange(40) == 5, 900.0, 500.0 + np.arange(40))
    found = []
    for second in range(1, 45):
        now_ns = T0 + second * NS
        heard_ns = np.where(np.arange(40) % 8 == 0, T0, now_ns)  # nobody hears of 8
        differs = [lease.compare(readback, heard_ns, 1.0, now_ns) for lease in (few, many)]
        overdue = [lease.overdue(now_ns) for lease in (few, many)]
        for of_few, of_many in (differs, overdue):
            assert of_few.tolist() == of_many[of_many < 20].tolist()
        found.append((differs[0].tolist(), overdue[0].tolist()))
        for lease, late in zip((few, many), overdue, strict=True):
            lease.retry(late, now_ns)
    for name in ("state", "seen", "differs_ns", "attempts"):
        assert (getattr(few, name)[:20] == getattr(many, name)[:20]).all(), name
    assert ([5], []) in found, "the read-back of 5 differs"
    assert any(8 in late for _, late in found), "nobody answers for 8"


def mismatched(lease: Leases, readback: float, seconds: range, heard_s: float | None = None) -> list[int]:
    """Seconds at which the read-back of slot 1 counts as a mismatch."""
    out = []
    for s in seconds:
        now_ns = T0 + s * NS
        heard = np.full(3, now_ns if heard_s is None else T0 + round(heard_s * NS))
        if len(lease.compare(np.full(3, readback), heard, max(lease.control.deadband, 1e-6), now_ns)):
            out.append(s)
    return out


def test_a_readback_that_differs_for_ten_seconds_is_a_mismatch_and_clears() -> None:
    lease = leases()
    assert mismatched(lease, 1200.0, range(1, 30)) == list(range(1 + int(MISMATCH_S), 30))
    assert mismatched(lease, 503.0, range(30, 32)) == []
    assert lease.state[1] == DONE, "a read-back that agrees is as good as an answer"
    assert mismatched(lease, 506.0, range(32, 50)) == list(range(42, 50))


@pytest.mark.parametrize(
    "readback, heard_s, expected", [(1200.0, -1.0, 0), (float("nan"), None, 1), (1200.0, 0.5, 1)]
)
def test_a_readback_older_than_the_command_proves_nothing(
    readback: float, heard_s: float | None, expected: int
) -> None:
    assert bool(mismatched(leases(), readback, range(1, 20), heard_s)) is bool(expected)


def test_a_drain_in_progress_is_no_mismatch_until_its_deadline() -> None:
    lease = leases("node.service_level", 3.0)
    lease.ack(1, 2, 7, "in_progress")
    assert mismatched(lease, 2.0, range(1, 7200, 60)) == []
    assert mismatched(lease, 2.0, range(7185, 7203)) == [7200, 7201, 7202]
    done = leases("node.service_level", 3.0)
    done.ack(1, 2, 7, "done")
    assert mismatched(done, 2.0, range(1, 13)) == [11, 12]


def test_leases_move_with_their_slots_and_survive_storage() -> None:
    lease = leases()
    moved = Leases(lease.control, 4)
    moved.adopt(lease, {"gpu": np.array([-1, 2, 1, -1], np.int32)})
    assert moved.running().tolist() == [False, False, True, False]
    assert moved.command[2] == 7
    back = Leases(lease.control, 3)
    back.restore(lease.dump())
    assert all(
        np.array_equal(back.dump()[k], v, equal_nan=v.dtype.kind == "f") for k, v in lease.dump().items()
    )
    lease.forget("gpu", 1)
    assert not lease.running().any()
    assert not lease.ack(1, 2, 7, "done")


def twin() -> tuple[Twin, Wish]:
    """Eight GPUs (200..350 W, slew 50 W/s) that read back 350 W, and a policy that may act."""
    wish = Wish()
    out = Twin(eight_nodes(), [wish], act=True)
    source = JobStarted(job="elsewhere", nodes=())  # jobs are known, and none of them runs here
    out.tick({"gpu.power_limit_w": 350.0, "node.service_level_state": 0.0}, source)
    return out, wish


def values(batches: list[Any]) -> dict[int, float]:
    return {int(i): float(v) for c in batches for i, v in zip(c.index, c.value, strict=True)}


def test_what_nobody_asks_for_is_given_back_as_it_was_found() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 200, [200, 240])
    pod.tick()
    pod.run(120, {"gpu.power_limit_w": [200, 240, *[350.0] * 6]})
    wish.proposals = []
    steps = []
    for _ in range(6):
        pod.tick()
        steps.append([(values([c]), c.final) for c in pod.commands()])
    assert steps == [
        [({0: 250.0, 1: 290.0}, False)],
        [({0: 300.0, 1: 340.0}, False)],
        [({0: 350.0, 1: 350.0}, True)],
        [], [], [],
    ]  # fmt: skip
    for _ in range(60):
        pod.tick()
        assert pod.records("lapsed") == []


def test_the_answer_to_the_last_command_is_not_called_stale() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0], 300, 320)
    pod.tick()
    wish.proposals = []
    pod.tick()
    (final,) = pod.commands()
    assert final.final
    ack = CommandAcked(
        control=CAP, name="r1/node0/gpu0", generation=0, command=f"1-{final.command[0]}", state="done"
    )
    pod.tick(None, ack)
    assert pod.engine.intake.counts == {}


@pytest.mark.parametrize("twice", [False, True])
def test_answers_of_one_tick_are_counted_by_what_became_of_them(twice: bool) -> None:
    """One by one where a device answers twice, at once where none does: the same counts."""
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 300, 320)
    pod.tick()
    (batch,) = pod.commands()
    answers = [
        CommandAcked(control=CAP, name=f"r1/node{i}/gpu0", generation=0, command=f"1-{number}", state=state)
        for i, number, state in (
            (0, batch.command[0], "done"), (1, batch.command[1] + 7, "done"),
            *([(0, batch.command[0], "accepted")] if twice else []),
        )
    ]  # fmt: skip
    pod.tick(None, *answers)
    told = {(r["state"], bool(r.get("refused"))): r["count"] for r in pod.records("acks")}
    assert told == {("done", False): 1, ("done", True): 1} | ({("accepted", False): 1} if twice else {})
    assert pod.engine.intake.counts == {"stale_acks": 1}
    assert pod.engine.arbiter.leases[CAP].state[:2].tolist() == [DONE, SENT]


@pytest.mark.parametrize("generation", [-1, 2**31, 2**70])
def test_an_answer_with_a_generation_that_no_device_has_is_stale(generation: int) -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 300, 320)
    pod.tick()
    (batch,) = pod.commands()
    pod.tick(None, *(
        CommandAcked(control=CAP, name=f"r1/node{i}/gpu0", generation=of, command=f"1-{batch.command[i]}",
                     state="done")
        for i, of in enumerate((generation, 0))
    ))  # fmt: skip
    assert pod.engine.intake.counts == {"stale_acks": 1}
    assert pod.engine.arbiter.leases[CAP].state[:2].tolist() == [SENT, DONE]


def test_where_nothing_was_found_and_what_keeps_is_left_to_lapse() -> None:
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)  # no read-back was ever heard
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    wish.proposals = []
    pod.tick()
    assert pod.commands() == []
    assert pod.lease(CAP)[0] == 200.0
    pod.run(30)
    assert np.isnan(pod.lease(CAP)[0])
    pod, wish = twin()
    wish.ask(LEVEL, [0], 1, 1)
    pod.tick()
    wish.proposals = []
    pod.tick()
    assert pod.lease(LEVEL)[0] == 1.0
    assert pod.commands() == []


def test_a_replaced_device_has_no_lease_until_the_next_settlement() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 200, 300)
    pod.tick()
    before = pod.commands()[0]
    wish.proposals = []
    pod.engine.arbiter.mode = "held"
    pod.tick(None, EntityReplaced(table="gpu", name="r1/node0/gpu0", serial="new"))
    assert np.isnan(pod.lease(CAP)[0])
    assert pod.lease(CAP)[1] == 300.0
    late = CommandAcked(
        control=CAP, name="r1/node0/gpu0", generation=0, command=f"1-{before.command[0]}", state="done"
    )
    pod.tick(None, late)
    assert pod.engine.intake.counts == {"stale_acks": 1}
    pod.engine.arbiter.mode = "normal"
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    (batch,) = [c for c in pod.commands() if 0 in c.index]
    assert batch.generation.tolist() == [1]


@pytest.mark.long
def test_a_drain_survives_a_restart_in_the_middle() -> None:
    pod, wish = twin()
    wish.ask(LEVEL, [2], 3, 3)
    pod.tick()
    (batch,) = pod.commands()
    assert batch.deadline_ns - batch.issued_ns == 7200 * 10**9
    name = "r1/node2"
    answer = {"control": LEVEL, "name": name, "generation": 0, "command": f"1-{batch.command[0]}"}
    pod.tick(None, CommandAcked(state="in_progress", **answer))
    draining = [0.0, 0, 2, 0, 0, 0, 0, 0]
    for _ in range(60):
        pod.tick({"node.service_level_state": draining}, dt_s=30.0)
    twin2 = pod.restarted(eight_nodes(), [wish])
    assert twin2.engine.checksum() == pod.engine.checksum()
    for _ in range(60):
        twin2.tick({"node.service_level_state": draining}, dt_s=30.0)
        assert twin2.commands() == [], "still the same command"
        assert not [f for f in twin2.decision.findings if f.id.startswith("readback")]
    twin2.tick(None, CommandAcked(state="done", **answer))
    assert twin2.engine.arbiter.leases[LEVEL].state[2] == 4
    draining[2] = 3.0
    twin2.tick({"node.service_level_state": draining})
    assert twin2.lease(LEVEL)[2] == 3.0
    assert twin2.engine.intake.counts == {}


def test_a_readback_that_differs_is_an_alarm_and_is_cleared() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 200, 300)
    pod.tick()
    raised = []
    for second in range(1, 25):
        pod.tick({"gpu.power_limit_w": 350.0 if second < 20 else 300.0})
        raised.append(any(f.id == f"readback/{CAP}" for f in pod.decision.findings))
    assert raised == [False] * 10 + [True] * 9 + [False] * 5


def test_overdue_commands_are_sent_again_then_failed() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    number = pod.commands()[0].command[0]
    again, failed = [], []
    for second in range(1, 45):
        pod.tick()
        again += [
            (second, int(c.command[0])) for c in pod.decision.commands if c.reason.startswith("no answer")
        ]
        failed += [second for _ in pod.records("failed")]
    assert again == [(10, number), (20, number)]
    assert failed == [30]


@pytest.mark.parametrize("seed", range(40))
def test_answers_at_once_count_as_they_do_one_by_one(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 12))
    at_once, in_turn = (Leases(control(CAP), n) for _ in range(2))
    columns = {
        "value": np.where(draw.random(n) < 0.7, 500.0, np.nan),
        "state": draw.integers(NONE, EXPIRED + 1, n).astype(np.uint8),
        "generation": draw.integers(0, 2, n).astype(np.int32),
        "command": draw.integers(0, 3, n),
    }
    for lease in (at_once, in_turn):
        for name, values in columns.items():
            getattr(lease, name)[:] = values
    entity = draw.permutation(n)[: draw.integers(1, n + 1)].astype(np.int32)
    generation, command = (draw.integers(0, high, len(entity)) for high in (2, 3))
    states = draw.choice([*_ACK], len(entity)).tolist()
    told = zip(entity.tolist(), generation.tolist(), command.tolist(), states, strict=True)
    expected = [in_turn.ack(*answer) for answer in told]
    state = np.array([ACK_STATES.index(told) for told in states], np.uint8)
    assert at_once.ack_all(entity, generation, command, state).tolist() == expected
    assert at_once.state.tolist() == in_turn.state.tolist()
