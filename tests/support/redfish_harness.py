"""Stories of a sink and a source against Redfish services of ours.

told(site, story)       # `async def story(services, mine)`, with the site's first node served
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import connectors.bmc.redfish_client
import connectors.bmc.sink
from connectors.bmc import GPU_CAP, NODE_CAP, Fleet, Key, RedfishBmc, RedfishCaps, RedfishClient
from tests.support.bmc_harness import Driven
from tests.support.redfish_service import PASSWORD, USER, Services
from twin.site import Site
from twin.wiring.bmc import Http

Story = Callable[[Services, Driven], Awaitable[None]]


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds become waits of a moment."""
    for name, seconds in (("LOOK_S", 0.02), ("FIRST_S", 0.02), ("LONGEST_S", 0.1), ("SETTLE_S", 0.3),
                          ("LAPSE_LONGEST_S", 0.1)):  # fmt: skip
        monkeypatch.setattr(connectors.bmc.sink, name, seconds)
    monkeypatch.setattr(connectors.bmc.redfish_client, "BUSY_S", 0.05)
    monkeypatch.setattr(connectors.bmc.redfish_client, "FORGOT_S", 0.05)


def fleet_of(
    site: Site, services: Services, command: tuple[str, ...] = ("gpus", "node"), *, timeout_s: float = 5.0,
    at_once: int = 16, password: str = PASSWORD, **more: Any,
) -> Fleet:  # fmt: skip
    http = Http()
    bmcs = []
    for node, service in enumerate(services.made):
        first, last = (int(x) for x in site.gpu_start_of_node[node : node + 2])
        client = RedfishClient(f"http://{service.host}", USER, lambda: password, http, timeout_s=timeout_s)
        most = {Key(GPU_CAP, g): 1200.0 for g in range(first, last)} | {Key(NODE_CAP, node): 6667.0}
        caps = RedfishCaps(command=command, most_w=most, **more)
        bmcs.append(RedfishBmc(service.host, node, client, range(first, last), caps))
    return Fleet(bmcs, at_once, http.close)


def told(
    site: Site, story: Story, *, count: int = 1, options: dict[str, Any] | None = None,
    fleet: dict[str, Any] | None = None, looks: bool = False, left: Any = lambda key: "",
) -> None:  # fmt: skip
    """Run a story against `count` services, the first of which serves the site's first node."""

    async def run() -> None:
        async with Services(count, **(options or {})) as services:
            mine = Driven(site, fleet_of(site, services, **(fleet or {})), looks=looks, left=left)
            async with mine:
                await story(services, mine)

    asyncio.run(run())
