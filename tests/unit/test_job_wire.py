"""Reports of jobs and advice to them, as bytes: as a client must write them, and refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.jobs import (
    INTERVAL,
    LOCAL,
    MAX_REPORT,
    REPORT,
    SINCE,
    Advice,
    JobBook,
    JobDecoder,
    JobLease,
    compose,
    decode_advice,
    job_of,
    level_of,
)
from connectors.jobs.wire import (
    JOB_BURST,
    MAX_EARLY,
    MAX_LEVEL,
    STRANGER_BURST,
    advice_topic,
    encode_advice,
    report_of,
)
from connectors.mqtt import Router
from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS, BadMessage
from twin.contracts import CommandBatch
from twin.telemetry import CheckpointTold, Ignored, Message

T = START_NS
BODY = {"v": 1, "id": "a-1", "t_ns": T, "tier": "durable", "began_ns": T - 90 * NS, "save_s": 42.5,
        "block_s": 3, "flush_s": 60.0, "restart_s": 0, "interval_s": 1800}  # fmt: skip


def raw(**change: Any) -> bytes:
    return json.dumps(BODY | change).encode()


def test_a_report_is_the_event_that_the_core_knows() -> None:
    assert report_of(raw(), "train/7", T + NS) == CheckpointTold(
        id="job/train/7#a-1", job="train/7", at_ns=T, tier="durable", began_ns=T - 90 * NS, save_s=42.5,
        block_s=3.0, flush_s=60.0, restart_s=0.0, interval_s=1800.0,
    )  # fmt: skip
    least = json.dumps({"v": 1, "id": "2", "t_ns": T, "interval_s": 600}).encode()
    event = report_of(least, "j", T)
    assert (event.tier, event.began_ns, event.save_s, event.interval_s) == ("durable", 0, 0.0, 600.0)
    assert report_of(raw(job="j", later=[{"field": 1}]), "j", T).job == "j"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"v": 2}, "not a report"),
    ({"id": ""}, "not a report"),
    ({"id": "x" * 101}, "not a report"),
    ({"id": 5}, "not a report"),
    ({"t_ns": 0}, "not a report"),
    ({"t_ns": 1.5}, "not a report"),
    ({"t_ns": 2**62}, "not a report"),
    ({"t_ns": T - 8 * 86_400 * NS, "began_ns": 0}, "check the clock"),
    ({"t_ns": T + 8 * 86_400 * NS}, "check the clock"),
    ({"began_ns": T + 1}, "later than t_ns"),
    ({"began_ns": -1}, "not a report"),
    ({"tier": "tape"}, "not a report"),
    ({"save_s": -1}, "not a report"),
    ({"save_s": "5"}, "not a report"),
    ({"save_s": True}, "not a report"),
    ({"save_s": None}, "not a report"),
    ({"block_s": 1.1e6}, "not a report"),
    ({"interval_s": 1.1e7}, "not a report"),
    ({"progress_per_s": -1}, "not a report"),
    ({"progress_per_s": 1.1e6}, "not a report"),
    ({"remaining_s": -1}, "not a report"),
    ({"remaining_s": 1.1e7}, "not a report"),
    ({"job": "other"}, "claims to be job 'other'"),
    ({"reason": "x" * MAX_REPORT}, "bytes of report"),
    ({"began_ns": 0, "save_s": 0, "block_s": 0, "flush_s": 0, "interval_s": 0}, "an empty report"),
]  # fmt: skip


@pytest.mark.parametrize("change,why", REFUSED)
def test_nonsense_is_refused_with_its_reason(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage, match=why) as caught:
        report_of(raw(**change), "j", T)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"null", b"[]", b"\xff" * 40, b"[" * 4000, b'{"v":1,"id":"1","t_ns":1e400}',
     raw()[:-9], json.dumps(BODY | {"save_s": math.nan}).encode(), raw().replace(b"42.5", b"1e999")],
)  # fmt: skip
def test_bytes_that_are_no_report(body: bytes) -> None:
    with pytest.raises(BadMessage, match=r"not a report|expected finite"):
        report_of(body, "j", T)


NAMES = [("4711", "4711"), ("a b", "a%20b"), ("ns/train", "ns%2Ftrain"), (".", "%2E"), ("..", "%2E."),
         (".x", "%2Ex"), ("a.b-c_d~e", "a.b-c_d~e"), ("jöb", "j%C3%B6b"), ("+#$", "%2B%23%24"),
         ("a%2Fb", "a%252Fb"), ("\0", "%00"), ("x" * MAX_LEVEL, "x" * MAX_LEVEL)]  # fmt: skip


@pytest.mark.parametrize("job,level", NAMES)
def test_a_name_is_one_level_of_a_topic_and_one_safe_file_name(job: str, level: str) -> None:
    assert level_of(job) == level
    assert job_of(level) == job


@pytest.mark.parametrize("job", ["", "x" * (MAX_LEVEL + 1), "ö" * 40, "\ud800"])
def test_a_name_that_can_be_none(job: str) -> None:
    with pytest.raises(BadMessage, match="job's name"):
        level_of(job)


@pytest.mark.parametrize(
    "level",
    ["", "a/b", "a b", ".x", "%2f", "%2F/..", "%41", "%", "%zz", "%FF", "a+", "#", "x" * 201],
)
def test_a_level_that_is_not_how_a_name_is_written(level: str) -> None:
    """Else two topics, or two files, would be the same job's."""
    with pytest.raises(BadMessage, match="a job's name"):
        job_of(level)


def test_a_router_knows_the_topics() -> None:
    router = Router(site_of(two_racks()), integration="racktwin", slot_of={"a/b": 0}.get)
    (event,) = router.decode(Message(T, REPORT + "a%2Fb", raw()))
    assert isinstance(event, CheckpointTold)
    assert event.job == "a/b"
    with pytest.raises(BadMessage, match="a job's name"):
        router.decode(Message(T, REPORT + "a/b", raw()))
    assert isinstance(router.decode(Message(T, advice_topic("racktwin", "a/b"), b"{}")), Ignored)
    assert router.reports.counts == {"reports": 1, "refused": 1, "early": 0}


def pay(decoder: JobDecoder, job: str, t_ns: int = T) -> int:
    """Count the reports of a job that are taken at once."""
    for n in range(10**6):
        try:
            decoder.spend(job, 300, t_ns)
        except BadMessage:
            return n
    raise AssertionError("no end")


def test_a_job_that_floods_spends_its_own_allowance_only() -> None:
    slots = {"a": 0, "b": 1}
    decoder = JobDecoder(slots.get)
    assert pay(decoder, "a") == JOB_BURST // 300
    assert pay(decoder, "b") == JOB_BURST // 300
    assert pay(decoder, "a", T + 60 * NS) == 60 * 256 // 300, "it fills again"
    strangers = sum(pay(decoder, f"nobody{n}") for n in range(50))
    assert strangers == STRANGER_BURST // 300, "strangers share one, whatever names they invent"
    assert len(decoder._jobs._left) == 2


def test_reports_that_come_before_their_job_wait_for_the_next() -> None:
    slots: dict[str, int] = {}
    decoder = JobDecoder(slots.get)

    def hear(job: str, number: int) -> list[str]:
        got = decoder.decode(Message(T, REPORT + job, raw(id=str(number))))
        return [] if isinstance(got, Ignored) else [e.id.partition("#")[2] for e in got]

    assert hear("a", 1) == hear("a", 2) == []
    slots["a"] = 0
    assert hear("a", 3) == ["1", "2", "3"]
    assert hear("a", 4) == ["4"]
    for number in range(10):
        hear("b", number)
    for number in range(MAX_EARLY):
        hear(f"stranger{number}", number)
    assert sum(map(len, decoder._early.values())) <= MAX_EARLY
    slots["b"] = 1
    assert hear("b", 10) == ["10"], "strangers had pushed the others out"
    for number in range(10):
        hear("c", number)
    slots["c"] = 2
    assert hear("c", 10) == ["6", "7", "8", "9", "10"]


ADVICE = Advice(
    job="a b", interval_s=900.0, save_since_ns=T, issued_ns=T, expires_ns=T + NS, epoch=3, reason="x"
)


def test_advice_is_as_the_document_has_it() -> None:
    assert json.loads(encode_advice(ADVICE)) == {
        "v": 1, "job": "a b", "interval_s": 900.0, "save_since_ns": T, "issued_ns": T, "expires_ns": T + NS,
        "epoch": 3, "local_interval_s": None, "reason": "x",
    }  # fmt: skip
    assert decode_advice(encode_advice(ADVICE)) == ADVICE
    assert advice_topic("racktwin", "a b") == "IT/v1/racktwin/Job/a%20b"


@pytest.mark.parametrize("change", [{"interval_s": 0}, {"interval_s": -1}, {"interval_s": "9"}, {"epoch": -1},
                                    {"issued_ns": None}, {"v": 2}, {"reason": "x" * 5000}])  # fmt: skip
def test_advice_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        decode_advice(json.dumps(msgspec.to_builtins(ADVICE) | change).encode())


def part(value: float, left_s: float, issued_s: float = 0.0) -> JobLease:
    return JobLease(1, value, T + round(issued_s * NS), T + round(left_s * NS), 3, f"because {value:g}")


def test_two_leases_are_one_advice_that_ends_with_the_interval() -> None:
    advice = compose("j", part(600, 300), part(1.7e9, 600), T)
    assert advice is not None
    assert (advice.interval_s, advice.save_since_ns) == (600.0, 1_700_000_000 * NS)
    assert (advice.expires_ns, advice.reason) == (T + 300 * NS, "because 1.7e+09; because 600")


@pytest.mark.parametrize(
    "interval,since,expected",
    [
        (part(600, 300), None, (600.0, False, 300)),
        (None, part(1.7e9, 600), (None, True, 600)),
        (part(600, 300), part(1.7e9, 100), (600.0, False, 300)),  # nobody renews the save: it is over
        (part(600, 300), part(1.7e9, 300), (600.0, True, 300)),
        (part(600, 0), part(1.7e9, 5), (None, True, 5)),
        (part(600, 5), part(1.7e9, -1), (600.0, False, 5)),
        (part(600, 0), part(1.7e9, 0), None),
        (None, None, None),
    ],
)
def test_what_has_ended_is_not_advised(
    interval: JobLease | None, since: JobLease | None, expected: tuple[float | None, bool, int] | None
) -> None:
    advice = compose("j", interval, since, T)
    got = None if advice is None else (
        advice.interval_s, advice.save_since_ns is not None, (advice.expires_ns - T) // NS)  # fmt: skip
    assert got == expected


@pytest.mark.parametrize(
    "interval,since,local,expected",
    [
        (part(600, 300), None, part(60, 600), (600.0, False, 60.0, 300)),
        (part(600, 300), None, part(60, 100), (600.0, False, None, 300)),  # nobody renews it
        (part(600, 0), part(1.7e9, 500), part(60, 400), (None, True, 60.0, 400)),
        (None, part(1.7e9, 300), part(60, 400), (None, True, 60.0, 300)),
        (None, part(1.7e9, 300), part(60, 0), (None, True, None, 300)),
        (None, None, part(60, 600), (None, False, 60.0, 600)),
    ],
)
def test_the_interval_in_memory_goes_with_the_durable_one(
    interval: JobLease | None, since: JobLease | None, local: JobLease | None, expected: tuple[Any, ...]
) -> None:
    advice = compose("j", interval, since, T, local)
    assert advice is not None
    assert (advice.interval_s, advice.save_since_ns is not None, advice.local_interval_s,
            (advice.expires_ns - T) // NS) == expected  # fmt: skip
    assert decode_advice(encode_advice(advice)) == advice


def test_renewals_never_let_the_memory_interval_flicker() -> None:
    """Leases begin apart and are renewed at half their time: no advice leaves out what is in force."""
    book = JobBook(lambda slot, generation: "a")
    next_s = {INTERVAL: 0.0, LOCAL: 37.0}
    for _ in range(40):
        control = min(next_s, key=next_s.__getitem__)
        at_s = next_s[control]
        value = {INTERVAL: 600.0, LOCAL: 60.0}[control]
        (advice,) = book.take((batch(control, {0: value}, at_s=at_s, renewal=at_s > 40.0),))
        next_s[control] = at_s + {INTERVAL: 150.0, LOCAL: 300.0}[control] + 1.0
        assert advice.interval_s == 600.0
        assert advice.local_interval_s == (None if at_s < 37.0 else 60.0)


def batch(
    control: str, slots: dict[int, float], at_s: float = 0.0, generation: int = 1, **more: Any
) -> CommandBatch:
    n, now_ns = len(slots), T + round(at_s * NS)
    lease_s = 300 if control == INTERVAL else 600
    return CommandBatch(
        control, "checkpoint", 3, np.array(list(slots), np.int32), np.full(n, generation, np.int32),
        np.arange(n, dtype=np.int64), np.array(list(slots.values())), more.pop("reason", "due"), now_ns,
        now_ns + lease_s * NS, now_ns + NS, **more,
    )  # fmt: skip


def test_a_book_puts_a_lease_beside_the_one_that_came_before() -> None:
    book = JobBook(lambda slot, generation: {0: "a", 1: "b"}[slot])
    (a, b) = book.take((batch(INTERVAL, {0: 600.0, 1: 900.0}, reason="hazard"),))
    assert (a.job, a.interval_s, b.job, b.interval_s, a.save_since_ns) == ("a", 600.0, "b", 900.0, None)
    (a,) = book.take((batch(SINCE, {0: 1.7e9}, at_s=10, reason="a drain"),))
    assert (a.interval_s, a.save_since_ns, a.reason) == (600.0, 1_700_000_000 * NS, "a drain; hazard")
    assert (a.issued_ns, a.expires_ns) == (T + 10 * NS, T + 300 * NS)
    (a, b) = book.take((batch(INTERVAL, {0: 600.0, 1: 900.0}, at_s=151, renewal=True, reason="renewal"),))
    assert (a.reason, a.expires_ns) == ("a drain; hazard", T + 451 * NS), "a renewal keeps the reason"
    assert b.save_since_ns is None


def test_advice_never_reaches_who_took_the_slot() -> None:
    sitting = {(0, 1): "first"}
    book = JobBook(lambda slot, generation: sitting.get((slot, generation)))
    book.take((batch(SINCE, {0: 1.7e9}),))
    sitting.clear()
    sitting[0, 2] = "second"
    assert book.take((batch(INTERVAL, {0: 600.0}, at_s=1),)) == []
    (advice,) = book.take((batch(INTERVAL, {0: 700.0}, at_s=2, generation=2),))
    assert (advice.job, advice.save_since_ns) == ("second", None), "nor what the first was asked for"
    assert len(book._parts) == 1


def test_a_book_begins_with_what_runs_already() -> None:
    held = [(SINCE, 0, part(1.7e9, 600)._replace(generation=1))]
    book = JobBook(lambda slot, generation: "a", held)
    (advice,) = book.take((batch(INTERVAL, {0: 600.0}, at_s=1, renewal=True, reason="renewal"),))
    assert (advice.save_since_ns, advice.reason) == (1_700_000_000 * NS, "because 1.7e+09")
