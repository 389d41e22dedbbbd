"""The runtime behind the interfaces: bounded memory, answers to those who wait, followers that lag."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from twin.api import JournalLine, Runtime, runtime as live_module
from twin.api.runtime import FOLLOWER_QUEUE, MAX_FOLLOWERS
from twin.config import Config, Loaded
from twin.contracts import Bound, ClearedRecord, CommandRecord, ProposalChange, ProposalsRecord
from twin.telemetry import Event, Held, OperatorRequest


@pytest.fixture
def twin() -> Twin:
    return Twin(two_racks())


@pytest.fixture
def live(twin: Twin) -> Runtime:
    return Runtime(Loaded(Config(site="s.yaml", broker="embedded"), Path("/nowhere/c.yaml")), twin.engine, 0)


def test_lines_are_bounded_by_number_and_by_size(live: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MAX_LINES_BYTES", 10_000)
    for n in range(5000):
        live.keep(JournalLine(ClearedRecord(id="small"), n, n))
    assert len(live.lines) == live_module.MAX_LINES
    for n in range(20):
        change = ProposalChange(control="c", reason="", index=np.zeros(250, np.int32), lo=Bound(np.zeros(10)))
        live.keep(JournalLine(ProposalsRecord(policy="p", proposals=(change,)), n, n))
    held = [line for line in live.lines if line.kind == "proposals"]
    assert len(held) == 9, "1,080 bytes of columns each"
    assert live.lines[-1].tick == 19


def test_who_asks_hears_whether_it_holds(live: Runtime, twin: Twin) -> None:
    async def asked(event: Event) -> str | None:
        live.put_event = twin.inbox.put_event
        waiting = asyncio.create_task(live.submit(event))
        await asyncio.sleep(0)
        frame_events = tuple(twin.inbox.events)
        live.settle(twin.tick(), frame_events)
        return await waiting

    assert asyncio.run(asked(Held(id="h", author="ann"))) is None
    assert twin.engine.arbiter.mode == "held"
    wrong = OperatorRequest(id="r", author="ann", control="gpu.power_cap_w", names=("nowhere",), lo=1, hi=2)
    assert "does not have" in (asyncio.run(asked(wrong)) or "")
    assert asyncio.run(live.submit(Held(author="ann"))) == "an event needs an id"
    live.veto = lambda event: "not now"
    assert asyncio.run(asked(Held(id="h2", author="ann"))) == "not now"


def test_a_request_that_no_tick_takes_says_so(live: Runtime) -> None:
    live.put_event = lambda event: True
    told = asyncio.run(live.submit(Held(id="h", author="ann"), timeout_s=0.01))
    assert told == "no tick took the request within 0.01 s; it may still take effect"
    live.put_event = lambda event: False
    assert "full" in (asyncio.run(live.submit(Held(id="h", author="ann"))) or "")


@pytest.mark.long
def test_followers_are_bounded_and_lose_the_oldest(live: Runtime, twin: Twin) -> None:
    queue = live.follow()
    assert queue is not None
    for _ in range(FOLLOWER_QUEUE + 10):
        live.settle(twin.tick(), ())
    assert queue.qsize() == FOLLOWER_QUEUE
    first = queue.get_nowait()
    assert first is not None
    assert first.tick == 10
    others = [live.follow() for _ in range(MAX_FOLLOWERS)]
    assert others[-1] is None
    live.unfollow(queue)
    assert live.follow() is not None


def test_a_batch_of_a_smaller_site_is_found_where_the_names_of_its_ends_stand_now(twin: Twin) -> None:
    """A rack came before it, so numbers are four greater now; one in whose midst it came tells nothing."""
    site = twin.site

    def batch(first: int, last: int, index: np.ndarray) -> JournalLine:
        record = CommandRecord(
            control="gpu.power_cap_w", policy="p", first_name=site.name("gpu", first),
            last_name=site.name("gpu", last), index=index, value=np.zeros(len(index)), reason="", epoch=1,
            first_command=1, expires_ns=0, deadline_ns=0,
        )  # fmt: skip
        return JournalLine(record, 1, 1, 1)

    moved = batch(10, 29, np.arange(6, 26))
    for gpu in range(40):
        mine = 10 <= gpu <= 29
        assert moved.touches(site, {"gpu": np.array([gpu], np.int32)}) == mine
        assert moved.concerns(site, ("gpu", gpu, site.name("gpu", gpu))) == mine
    split = batch(10, 33, np.arange(6, 26))
    assert split.shift(site) is None
    assert not split.touches(site, {"gpu": np.array([15], np.int32)})
    assert split.concerns(site, ("gpu", 33, site.name("gpu", 33))), "by its name"
    assert split.answer(site)["body"].get("names", []) == []
