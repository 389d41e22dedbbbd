"""Connectors of a fleet against real nats-servers, with the configurations that deploy/fleet ships."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.nats import (
    BudgetDecoder,
    BudgetSink,
    BudgetSource,
    HallSummary,
    NatsLink,
    SummaryDecoder,
    SummarySource,
    budget_subject,
    encode,
    summary_subject,
)
from tests.support.builders import site_of
from tests.support.fleets import fleet_tree
from tests.support.nats_servers import NatsFleet, nats_fleet
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS, ConnectorError
from twin.contracts import CommandBatch
from twin.site import HALL_BUDGET, Site
from twin.sources import SourceLedger
from twin.telemetry import BudgetGranted, Reading

pytestmark = pytest.mark.slow
SUMMARIES = "cpc.*.v1.summary"


class Wired:
    """The hub's and one hall's end of a fleet, with what each of them staged."""

    def __init__(self, fleet: NatsFleet, site: Site) -> None:
        self.site, self.staged = site, list[Any]()
        streams = {"cpc-hall-a": "cpc.hall-a.>"}
        self.hub = NatsLink(fleet.daemon(), SUMMARIES, streams)
        self.hall = NatsLink(fleet.hall("hall-a"), "cpc.hall-a.v1.budget")
        self.other = NatsLink(fleet.hall("hall-b"))
        self.ledger = SourceLedger(site.sizes, self.stage, time.time_ns)
        self.sink = BudgetSink(site, self.hub)

    def stage(self, items: Any, now_ns: int, account: Any = None) -> tuple[int, int]:
        self.staged += items
        return 0, 0

    async def until(self, holds: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := holds():
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"waited for {what}")

    async def tell(self, link: NatsLink, hall: str, sequence: int, payload: bytes = b"", **more: Any) -> None:
        told = HallSummary(
            hall=hall, epoch=more.pop("epoch", 5), sequence=sequence, t_ns=time.time_ns(), **more
        )
        with contextlib.suppress(ConnectorError):  # the server may cut us off
            await link.publish(summary_subject(hall), payload or encode(told), f"{hall}:5:{sequence}")

    def named(self, source: str) -> bool:
        """True once something of this source was refused, and named."""
        return any(a.name.startswith(source) and a.lines for a in self.ledger.listing(0))

    async def heard(self, sequence: int) -> None:
        """Tell until it arrives: a leaf that is about to connect forwards nothing."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not any(isinstance(x, Reading) for x in self.staged):
            await self.tell(self.hall, "hall-a", sequence, power_w=3e5)
            sequence += 1
            await asyncio.sleep(0.1)
        assert any(isinstance(x, Reading) for x in self.staged)


async def _kept(source: Any, inlet: Any) -> None:
    while True:
        with contextlib.suppress(ConnectorError):
            await source.run(inlet)
        await asyncio.sleep(0.1)


class _Mute:
    """A source that reads nothing, to hold a link up."""

    def __init__(self, link: NatsLink) -> None:
        self.link = link

    async def run(self, inlet: Any) -> None:
        await self.link.run(lambda _: None, lambda *_: None)


@contextlib.asynccontextmanager
async def wired(fleet: NatsFleet) -> AsyncIterator[Wired]:
    """All links up."""
    out = Wired(fleet, site_of(fleet_tree()))
    parts = [
        (SummarySource(out.hub, SummaryDecoder(out.site)), out.ledger),
        (BudgetSource(out.hall, BudgetDecoder("hall-a", "main")), out.ledger.account("budgets")),
        (_Mute(out.other), None),
    ]
    inlet = _Every(out.ledger)
    tasks = [asyncio.create_task(_kept(s, inlet if a is out.ledger else a)) for s, a in parts]
    try:
        await out.until(lambda: out.hub.connected and out.hall.connected and out.other.connected, "links")
        yield out
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Every:
    """The inlet of all halls, as the daemon's Ingest is."""

    def __init__(self, ledger: SourceLedger) -> None:
        self.of = ledger.account


def batch(site: Site, value_w: float, lease_s: float = 10.0) -> CommandBatch:
    now_ns, one = time.time_ns(), np.zeros(1, np.int32)
    return CommandBatch(
        control=HALL_BUDGET, policy="hall_budgets", epoch=7, index=one, generation=one,
        command=np.array([3]), value=np.array([value_w]), reason="test", issued_ns=now_ns,
        expires_ns=now_ns + round(lease_s * NS), deadline_ns=now_ns,
    )  # fmt: skip


def test_summaries_go_up_and_budgets_come_down_also_after_a_cut(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    async def play(fleet: NatsFleet) -> None:
        async with wired(fleet) as fleet_links:
            await fleet_links.heard(1)
            found = [x for x in fleet_links.staged if isinstance(x, Reading) and x.signal == "hall_power_w"]
            assert (found[0].table, found[0].entity, found[0].value) == ("rack", 0, 3e5)
            for cut in (False, True):
                if cut:
                    fleet.leaf["hall-a"].stop()
                    await fleet_links.until(lambda: not fleet_links.hall.connected, "the cut")
                    fleet.leaf["hall-a"].start()
                    await fleet_links.until(lambda: fleet_links.hall.connected, "the link")
                fleet_links.staged.clear()
                value_w = 5e5 + cut
                await _granted(fleet_links, value_w)
            async with asyncio.timeout(PATIENCE_S):
                await _streamed(fleet)

    with nats_fleet(server, tmp_path) as fleet:
        asyncio.run(play(fleet))


async def _granted(links: Wired, value_w: float) -> None:
    """A grant that arrives, as it is sent again like a renewal."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        await links.sink.apply((batch(links.site, value_w),))
        await asyncio.sleep(0.1)
        for item in links.staged:
            if isinstance(item, BudgetGranted) and item.budget_w == value_w:
                assert (item.feeder, item.author, item.epoch) == ("main", "fleet", 7)
                assert item.expires_ns - item.issued_ns == 10 * NS
                return
    raise AssertionError("no grant arrived")


async def _streamed(fleet: NatsFleet) -> None:
    """The hub's stream holds what was told, each summary once."""
    import nats

    client = await nats.connect(fleet.hub.url, user=fleet.user, password=fleet.password)
    info = await client.jetstream().stream_info("cpc-hall-a")
    assert info.config.subjects == ["cpc.hall-a.>"]
    assert info.state.messages >= 2
    await client.close()


def test_a_hall_speaks_for_itself_alone_and_what_cannot_be_is_counted_by_name(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    async def play(fleet: NatsFleet) -> None:
        async with wired(fleet) as links:
            await links.heard(1)
            links.staged.clear()
            await links.tell(links.other, "hall-a", 900, power_w=1.0)  # of another hall's leaf
            await links.tell(links.hall, "hall-a", 901, epoch=4, power_w=1.0)
            await links.tell(links.hall, "hall-a", 902, power_w=1e7)
            await links.tell(links.hall, "hall-a", 903, payload=b"\xff{garbage")
            await links.tell(links.hall, "hall-a", 904, payload=b" " * 50_000)
            await links.tell(links.hall, "hall-b", 905, power_w=1.0)  # in the name of another hall
            for sequence in range(906, 1000):
                await links.tell(links.hall, "hall-a", sequence, power_w=2e5)
                if links.staged:
                    break
                await asyncio.sleep(0.1)
            told = [x.value for x in links.staged if isinstance(x, Reading) and x.signal == "hall_power_w"]
            assert told[0] == 2e5, "nothing else got through"
            account = links.ledger.account("hall hall-a", True)
            lines = list(account.lines.values())
            assert sum(line.count for line in lines) == 4, "old epoch, lie, garbage, blanks"
            whys = " ".join(line.why for line in lines)
            assert "no longer leads" in whys
            assert "expected W, at most twice that" in whys

    with nats_fleet(server, tmp_path) as fleet:
        asyncio.run(play(fleet))


def _flood(fleet: NatsFleet, size: int) -> bytes:
    """Publish a summary of so many bytes past any client library; what the server said."""
    said, chunk = b"", b"x" * 65_536
    login = {"user": fleet.hall_user, "pass": fleet.hall_password, "verbose": False, "pedantic": False}
    with socket.create_connection(("127.0.0.1", fleet.leaf["hall-a"].port), timeout=PATIENCE_S) as wire:
        wire.sendall(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
        with contextlib.suppress(OSError):
            wire.sendall(f"PUB {summary_subject('hall-a')} {size}\r\n".encode())
            for _ in range(size // len(chunk)):
                wire.sendall(chunk)
        with contextlib.suppress(OSError):
            while data := wire.recv(65_536):
                said += data
    return said


def test_garbage_on_every_subject_and_a_summary_of_100_mb_harm_no_other_hall(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    async def play(fleet: NatsFleet) -> None:
        async with wired(fleet) as links:
            await links.heard(1)
            for link in (links.hall, links.other, links.hub):
                for hall in ("hall-a", "hall-b", "hall-x"):
                    for subject in (summary_subject(hall), budget_subject(hall)):
                        with contextlib.suppress(ConnectorError):
                            await link.publish(subject, b"\xff{garbage")
            for name in ("budgets", "hall hall-b"):
                await links.until(partial(links.named, name), f"garbage, named, of {name}")
            assert b"Maximum Payload" in await asyncio.to_thread(_flood, fleet, 100 * 2**20)
            # A leaf lets this through, as frames of telemetry are larger than what a hub takes
            await links.tell(links.hall, "hall-a", 2, payload=b"{" * 2**20)
            for link, hall, power_w in ((links.other, "hall-b", 1.23e5), (links.hall, "hall-a", 2.34e5)):
                links.staged.clear()
                for sequence in range(1000, 1300):
                    await links.tell(link, hall, sequence, power_w=power_w)
                    if any(isinstance(x, Reading) and x.value == power_w for x in links.staged):
                        break
                    await asyncio.sleep(0.1)
                assert any(isinstance(x, Reading) and x.value == power_w for x in links.staged), hall
            await _granted(links, 5e5)

    with nats_fleet(server, tmp_path) as fleet:
        asyncio.run(play(fleet))
