"""Properties of the wire of jobs: names, reports and advice in any shape, and files cut anywhere."""

from __future__ import annotations

import asyncio
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings, strategies as st

from connectors.jobs import (
    INTERVAL,
    LOCAL,
    MAX_REASON,
    SINCE,
    Advice,
    FolderSource,
    JobBook,
    ReportFolder,
    decode_advice,
    job_of,
    level_of,
)
from connectors.jobs.wire import MAX_ADVICE, MAX_LEVEL, encode_advice, report_of
from tests.support.builders import START_NS
from tests.unit.test_job_files import Desk
from twin.catalogue import NS, BadMessage
from twin.contracts import CommandBatch
from twin.telemetry import CheckpointTold

T = START_NS
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@given(st.text(max_size=80))
def test_every_name_is_one_level_and_one_file_or_refused(job: str) -> None:
    try:
        level = level_of(job)
    except BadMessage:
        surrogates = any(0xD800 <= ord(c) < 0xE000 for c in job)
        assert not job or surrogates or len(job.encode()) * 3 > MAX_LEVEL
        return
    assert re.fullmatch(r"[A-Za-z0-9._~%-]{1,200}", level)
    assert not level.startswith(".")
    assert job_of(level) == job


@given(st.text(alphabet="ab./%2EeFf+#~\0ö ", max_size=12) | st.text(max_size=250))
def test_a_level_is_the_one_of_its_name_or_none(level: str) -> None:
    """No two levels are one job: else a job had two topics, or two files."""
    try:
        job = job_of(level)
    except BadMessage:
        return
    assert level_of(job) == level


BODY = {"v": 1, "id": "1", "t_ns": T, "tier": "durable", "began_ns": T - NS, "save_s": 1.0, "block_s": 1.0,
        "flush_s": 1.0, "restart_s": 1.0, "interval_s": 60.0}  # fmt: skip


def bounded(event: CheckpointTold) -> None:
    costs = (event.save_s, event.block_s, event.flush_s, event.restart_s)
    assert all(math.isfinite(c) and 0 <= c <= 1e6 for c in costs)
    assert 0 <= event.interval_s <= 1e7
    assert 0 <= event.began_ns <= event.at_ns < 2**62
    assert event.tier in ("durable", "memory")
    assert event.began_ns or event.interval_s or any(costs)


def bounded_or_refused(payload: bytes) -> None:
    why = ""
    try:
        bounded(report_of(payload, "j", T))
    except BadMessage as error:
        why = str(error)
    assert len(why) < 500


@given(st.binary(max_size=200) | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_whatever_bytes_come_are_a_report_or_refused(payload: bytes) -> None:
    bounded_or_refused(payload)


@given(st.dictionaries(st.sampled_from([*BODY, "job", "other"]), JSON, max_size=3))
def test_whatever_a_report_holds_it_is_bounded_or_refused(change: dict[str, Any]) -> None:
    bounded_or_refused(json.dumps(BODY | change).encode())


@given(
    st.text(min_size=1, max_size=22),
    st.none() | st.floats(1e-3, 1e7),
    st.none() | st.integers(0, 2**62 - 1),
    st.text(max_size=MAX_REASON),
    st.integers(0, 2**53 - 1),
)
def test_advice_comes_back_and_always_fits(
    job: str, interval_s: float | None, since_ns: int | None, reason: str, epoch: int
) -> None:
    try:
        level_of(job)
        msgspec.json.encode(reason)
    except (BadMessage, UnicodeEncodeError):
        return
    advice = Advice(job=job, interval_s=interval_s, save_since_ns=since_ns, issued_ns=T, expires_ns=T + NS,
                    epoch=epoch, reason=reason)  # fmt: skip
    raw = encode_advice(advice)
    assert len(raw) <= MAX_ADVICE
    assert b"\n" not in raw
    assert decode_advice(raw) == advice


STEP = st.tuples(
    st.sampled_from(("advise", "save", "local", "renew", "end", "wait")),
    st.integers(0, 2),
    st.integers(1, 900),
)


@given(st.lists(STEP, max_size=30))
def test_a_book_says_to_who_holds_the_lease_what_the_leases_say(
    steps: list[tuple[str, int, int]],
) -> None:
    """Against a plain table of the leases that live, as the arbiter has it."""
    now_s, names = 0, [f"j{slot}-1" for slot in range(3)]
    generation = [1, 1, 1]
    leases: dict[tuple[str, int], tuple[float, int]] = {}
    book = JobBook(lambda slot, asked: names[slot] if generation[slot] == asked else None)
    for what, slot, number in steps:
        if what == "wait":
            now_s += number
            continue
        if what == "end":
            generation[slot] += 1
            names[slot] = f"j{slot}-{generation[slot]}"
            leases = {key: held for key, held in leases.items() if key[1] != slot}
            continue
        leases = {key: held for key, held in leases.items() if held[1] > now_s}
        control = {"save": SINCE, "local": LOCAL}.get(what, INTERVAL)
        is_renewal = what == "renew" and (control, slot) in leases
        value = leases[control, slot][0] if is_renewal else float(number)
        leases[control, slot] = (value, now_s + (300 if control == INTERVAL else 600))
        now_ns = T + now_s * NS
        batch = CommandBatch(
            control, "p", 1, np.array([slot], np.int32), np.array([generation[slot]], np.int32),
            np.zeros(1, np.int64), np.array([value]), "why", now_ns, T + leases[control, slot][1] * NS,
            now_ns, is_renewal,
        )  # fmt: skip
        (advice,) = book.take((batch,))
        interval, since = leases.get((INTERVAL, slot)), leases.get((SINCE, slot))
        assert advice.job == names[slot]
        assert advice.interval_s == (None if interval is None else interval[0])
        local = leases.get((LOCAL, slot))
        ends_s = min(held[1] for held in (since, local) if held) if interval is None else interval[1]
        assert advice.expires_ns == T + ends_s * NS
        assert advice.save_since_ns == (round(since[0] * NS) if since and since[1] >= ends_s else None)
        assert advice.local_interval_s == (local[0] if local and local[1] >= ends_s else None)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.lists(st.integers(1, 200), max_size=25))
def test_lines_cut_anywhere_are_read_once_and_in_order(kinds: list[int], cuts: list[int]) -> None:
    """Good lines, bad ones, empty ones and long ones, appended in pieces of any length between looks."""
    text, good = b"", []
    for number, kind in enumerate(kinds):
        if kind == 0:
            text += json.dumps({"v": 1, "id": str(number), "t_ns": T, "interval_s": 60.0}).encode() + b"\n"
            good.append(str(number))
        else:
            text += {1: b"{nonsense}\n", 2: b"\r\n", 3: b"x" * 5000 + b"\n"}[kind]
    with tempfile.TemporaryDirectory() as name:
        desk, got = Desk(), list[str]()
        source = FolderSource(Path(name), lambda: {"a": 0}, ReportFolder(None, 0.0), now_ns=lambda: T)
        at = 0
        with (Path(name) / "a.reports.jsonl").open("ab", buffering=0) as file:
            for cut in [*cuts, len(text)]:
                file.write(text[at : at + cut])
                at += cut
                asyncio.run(source.read_new(desk))
                got += desk.ids
        for _ in range(4):
            asyncio.run(source.read_new(desk))
        assert got + desk.ids == good
        assert desk.lost == []
