"""Two levels over real nats-servers: a site hub hears its hall, and is a hall of the top hub at a leaf."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.nats import (
    BudgetSink,
    HallSummary,
    NatsLink,
    SummaryDecoder,
    SummarySource,
    budget_subject,
    encode,
    summary_subject,
)
from policies import BY_NAME
from tests.support.builders import Twin, site_of
from tests.support.inlets import RecordingInlet, until
from tests.support.nats_servers import NatsFleet, nats_fleet
from tests.support.two_levels import hub_tree, top_tree
from twin.catalogue import NS, ConnectorError
from twin.config import Config, FleetLink, FleetSettings, Loaded
from twin.contracts import CommandBatch
from twin.site import HALL_BUDGET
from twin.telemetry import BudgetGranted, Reading
from twin.wiring import HallState, make_fleet

pytestmark = pytest.mark.slow


async def kept(source: Any, inlet: RecordingInlet) -> None:
    while True:
        with contextlib.suppress(ConnectorError):
            await source.run(inlet)
        await asyncio.sleep(0.1)


async def again_until(say: Callable[[], Any], holds: Callable[[], object], what: str) -> None:
    """Say it again until something holds: a leaf that is about to connect forwards nothing."""

    async def keep() -> None:
        while True:
            with contextlib.suppress(ConnectorError):
                await say()
            await asyncio.sleep(0.1)

    task = asyncio.create_task(keep())
    try:
        await until(holds, what, task)
    finally:
        task.cancel()


def east(name: str, text: str) -> str:
    """The configuration of a hub whose first hall is the site."""
    return text.replace("hall-a", "east").replace("HALL-A", "EAST")


def granted(value_w: float) -> CommandBatch:
    now_ns, one = time.time_ns(), np.zeros(1, np.int32)
    return CommandBatch(
        control=HALL_BUDGET, policy="hall_budgets", epoch=7, index=one, generation=one,
        command=np.array([3]), value=np.array([value_w]), reason="test", issued_ns=now_ns,
        expires_ns=now_ns + 10 * NS, deadline_ns=now_ns,
    )  # fmt: skip


def configured(top: NatsFleet, own: NatsFleet, folder: Path) -> Loaded:
    for name, word in (("own", own.password), ("above", top.hall_password)):
        (folder / name).write_text(word)
        (folder / name).chmod(0o600)
    up = FleetLink(
        servers=[top.leaf["east"].url], hall="east", feeder="main", username="hall", password_file="above"
    )
    fleet = FleetSettings(servers=[own.hub.url], username="fleet", password_file="own", above=up)
    return Loaded(Config(site="site.yaml", broker="embedded", fleet=fleet), folder / "racktwin.yaml")


def test_a_site_hub_hears_its_halls_and_is_heard_and_granted_as_a_hall(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    async def play(top: NatsFleet, own: NatsFleet) -> None:
        engine = Twin(hub_tree("east"), [BY_NAME["hall_budgets"]()]).engine
        state = HallState(lambda: 5, lambda: {"warning": 2}, lambda: ("run", 10, "head"), lambda: True)
        made = make_fleet(configured(top, own, tmp_path), engine.site, lambda: engine, state)
        assert made.publisher is not None
        above = NatsLink(top.daemon(), "cpc.*.v1.summary")
        hall = NatsLink(own.hall("hall-a"), budget_subject("hall-a"))
        grants, told = BudgetSink(site_of(top_tree()), above), SummaryDecoder(site_of(top_tree()))
        inlet, at_top, at_hall = RecordingInlet(), RecordingInlet(), list[Any]()
        sources = [*((source, inlet) for source in made.sources), (SummarySource(above, told), at_top)]
        tasks = [asyncio.create_task(kept(source, to)) for source, to in sources]
        tasks.append(asyncio.create_task(hall.run(at_hall.append, lambda *_: None)))
        try:
            links = (above, hall, *made.links.values())
            await until(lambda: all(link.connected for link in links), "links")
            assert list(made.links) == ["fleet", "fleet.above"]
            one = HallSummary(hall="hall-a", epoch=1, sequence=1, t_ns=time.time_ns(), power_w=3e5)
            await again_until(
                lambda: hall.publish(summary_subject("hall-a"), encode(one)),
                lambda: any(isinstance(x, Reading) and x.signal == "hall_power_w" for x in inlet.items),
                "the summary of its hall",
            )
            await again_until(
                lambda: grants.apply((granted(1e6),)),
                lambda: any(isinstance(x, BudgetGranted) and x.feeder == "main" for x in inlet.items),
                "its own grant",
            )
            await again_until(made.publisher.once, lambda: "east" in told.newest, "its summary at the top")
            assert (told.newest["east"].head, told.newest["east"].alarms) == ("head", {"warning": 2})
            await again_until(
                lambda: made.sinks[0].apply((granted(5e5),)), lambda: at_hall, "the grant of its hall"
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    folders = [tmp_path / name for name in ("top", "site")]
    with (
        nats_fleet(server, folders[0], ("east",), east) as top,
        nats_fleet(server, folders[1], ("hall-a",)) as own,
    ):
        asyncio.run(play(top, own))
