"""Malformed messages through the whole path: decoders, Inbox, trace, engine, journal.

Twenty thousand in `make test`, ten million in `make storm`. All are counted, none raises, memory stays
flat, the engine ticks on, and a replay of the recording agrees.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from connectors.agents import FRAME, encode_json
from models import persistence
from policies import thermal_guard
from tests.property.test_dsx_fuzz import malformed as malformed_bms
from tests.support.builders import site_of
from tests.unit.test_it_frame import malformed as malformed_it
from twin.catalogue import NS
from twin.engine import Engine
from twin.run import MessageSource
from twin.run.journal import Chain, verify
from twin.run.trace import TraceDecoder, TraceEncoder
from twin.site import Site
from twin.telemetry import Block, Inbox, Message, Reading
from twin.telemetry.inbox import FUTURE_TOLERANCE_NS

T = 1_767_225_600 * NS
BATCH = 1000
LONG = pytest.param(10_000_000, marks=[pytest.mark.storm, pytest.mark.timeout(4 * 3600)])


def a_site() -> Site:
    """Knows the racks of the IT messages and, of the BMS ones, three owners in each table."""
    names = ("e", "eee", "eeeee")
    racks = [
        {"name": "r1", "profile": "air-8gpu", "nodes": 3, "gpus_per_node": 2},
        {"name": "r2", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 4},
        {"name": "r3", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 0},
        *({"name": n, "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 1} for n in names),
    ]
    cdus = [{"name": n, "serves": [n], "loop": n} for n in names]
    served = (("e", "A", "r1"), ("eee", "B", "r1"), ("eeeee", "A", "r2"))
    feeders = [{"name": n, "side": side, "budget_w": 1e5, "serves": [rack]} for n, side, rack in served]
    halls = [{"name": "h", "racks": racks, "cdus": cdus, "feeders": feeders}]
    return site_of({"site": "lab", "halls": halls, "loops": [{"name": n} for n in names]})


def engine_of(site: Site) -> Engine:
    policies, models = [thermal_guard.ThermalGuard()], [persistence.Persistence()]
    return Engine(site, policies, models, {p.name: "act" for p in policies})


def a_message(rng: random.Random, now_ns: int) -> Message:
    chance = rng.random()
    if chance < 0.55:
        message = malformed_bms(rng)
    elif chance < 0.92:
        message = malformed_it(rng)
    elif chance < 0.97:  # between them a sound one, so that the engine has something to decide
        columns = {
            "temp_c": [rng.randint(40, 95) if rng.random() < 0.98 else 10**4] * 6,  # no GPU is so hot
            "power_w": [rng.randint(100, 400) if rng.random() < 0.5 else None] * 6,
            "156": [now_ns // 10**7] * 6,
        }
        message = Message(0, FRAME + "lab/h/r1", encode_json(now_ns, columns))
    else:
        topic = rng.choice(
            ["", "/", "spBv1.0/x", "BMS/v1/", "IT/v1/", "BMS/v1/\udcff", "\u2028" * 99, "x" * 9999]
        )
        message = Message(0, topic, rng.randbytes(rng.randint(0, 99)))
    if (
        b"1767225600" in message.payload and rng.random() < 0.7
    ):  # most clocks run, so that most values are news
        ms = now_ns // 10**6 + rng.choice([0, 0, 0, -500, 500, 10**7, -(10**7)])
        message = message._replace(payload=message.payload.replace(b"1767225600000", b"%d" % ms))
    return message._replace(t_ns=now_ns)


def put(inbox: Inbox, item: Any, now_ns: int) -> None:
    if isinstance(item, Reading):
        inbox.put(item, now_ns)
    elif isinstance(item, Block):
        inbox.put_block(item, now_ns)
    else:
        inbox.put_event(item)


@pytest.mark.long
@pytest.mark.parametrize("messages", [20_000, LONG])
def test_malformed_messages_through_the_whole_path(messages: int, tmp_path: Path) -> None:
    rng, site = random.Random(7), a_site()
    source, inbox, engine = MessageSource([], site), Inbox(site.sizes), engine_of(site)
    encoder, chain, replayed = TraceEncoder(), Chain(), engine_of(site)
    decoder, items, now = TraceDecoder(), Counter[str](), T
    batches, held = messages // BATCH, 0
    journal = (tmp_path / "journal.jsonl").open("w+b")  # the lines in memory would count as growth
    try:
        for batch in range(batches):
            if batch == 9 * batches // 10:  # tracing is slow, and memory that grows goes on growing
                gc.collect()
                tracemalloc.start()
            for _ in range(BATCH):
                now += NS // 100
                message = a_message(rng, now)
                arrival = source.take(message)
                for item in arrival.items if arrival is not None else ():
                    items[type(item).__name__] += 1
                    put(inbox, item, now)
            frame = inbox.take(batch, now, BATCH / 100)
            for u in (*frame.updates, *frame.counts):
                assert int(u.t_ns.max()) <= now + FUTURE_TOLERANCE_NS
            payload = encoder.encode(frame)
            decision = engine.tick(frame)
            journal.writelines(line + b"\n" for line in chain.lines(decision))
            replayed.tick(decoder.decode(payload))
            if batch % 10 == 9:
                assert engine.checksum() == replayed.checksum()
            if batch == 95 * batches // 100:
                gc.collect()
                held = tracemalloc.get_traced_memory()[0]
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
    summary = source.messages.summary()
    assert summary["total"] == messages == summary["decoded"] + summary["ignored"] + summary["bad"]
    assert min(summary["decoded"], summary["ignored"], summary["bad"]) > messages // 20, summary
    assert min(items[k] for k in ("FaultReported", "JobStarted", "JobEnded")) > messages // 20_000, items
    assert min(items["Reading"], items["Block"]) > messages // 50, items
    counts = inbox.counts
    kinds = ("accepted", "coalesced", "older", "clamped", "missing", "out_of_range")
    assert min(counts[k] for k in kinds) > messages // 2000, counts
    assert counts["events"] == sum(v for k, v in items.items() if k not in ("Reading", "Block"))
    assert counts["events_dropped"] == 0
    assert engine.state.tick == batches - 1
    assert growth < 500_000
    with journal:
        journal.seek(0)
        assert verify(line[:-1] for line in journal).fault is None
