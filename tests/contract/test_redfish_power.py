"""Power of nodes by Redfish against a service of ours: the resets that it was sent count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

import connectors.bmc.power
import connectors.bmc.redfish_client
from connectors.bmc import POWER, PowerSink
from connectors.orders import SinkContext
from tests.support.bmc_harness import Driven
from tests.support.builders import site_of, two_racks
from tests.support.redfish_harness import fleet_of, hurry
from tests.support.redfish_service import PASSWORD, ROOT, Services
from twin.catalogue import NS, ConnectorError
from twin.site import Site

STOP, OFF = 1.0, 2.0
Story = Callable[[Services, "Powered"], Awaitable[None]]


class Powered(Driven):
    """A source and a power sink of the node's BMC; `agent` is the level that its agent reads back."""

    def __init__(self, site: Site, services: Services, looks: bool, **more: Any) -> None:
        super().__init__(site, fleet_of(site, services, (), power=True, **more), looks=looks)
        context = SinkContext(self.stage, lambda: self.leads, self.now_ns)
        self.agent: float | None = None
        switches = {bmc.node: bmc.switch for bmc in self.fleet.bmcs}  # type: ignore[attr-defined]
        self.sink: Any = PowerSink(
            "power", site, switches, context, lambda node: self.agent, self.fleet.close
        )
        self.source._agent_level = lambda node: self.agent

    async def order(self, level: float, policy: str = "thermal_guard", **more: Any) -> Any:
        return await self.command({0: level}, POWER, policy=policy, **more)

    async def resend(self, batch: Any, *, later_s: float = 0.0) -> None:
        """The same numbers again, as the engine renews and sends again."""
        now_ns = self.now_ns()
        again = replace(batch, policy="", renewal=True, issued_ns=now_ns, expires_ns=now_ns + 300 * NS,
                        deadline_ns=batch.deadline_ns + round(later_s * NS))  # fmt: skip
        await self.sink.apply((again,))


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    for name, seconds in (("FIRST_S", 0.02), ("LONGEST_S", 0.1), ("AGENT_S", 0.4)):
        monkeypatch.setattr(connectors.bmc.power, name, seconds)


def told(site: Site, story: Story, *, looks: bool = False, **more: Any) -> None:
    async def run() -> None:
        async with Services() as services, Powered(site, services, looks, **more) as mine:
            await story(services, mine)

    asyncio.run(run())


def test_a_system_is_stopped_a_node_switched_off_and_on_again_as_people_ask(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        one = services[0]
        await mine.order(STOP)
        assert await mine.answer(0, "node") == ("done", "")
        assert (one.resets, mine.read("power_readback_state")[-1]) == (["GracefulShutdown"], (0, 1.0))
        assert mine.read("power_on_state")[-1] == (0, 1.0)
        mine.forget()
        await mine.order(OFF)
        assert await mine.answer(0, "node") == ("done", "")
        assert one.resets == ["GracefulShutdown", "ForceOff"]
        assert (mine.read("power_readback_state")[-1], mine.read("power_on_state")[-1]) == (
            (0, 2.0),
            (0, 0.0),
        )
        mine.forget()
        await mine.order(0.0, policy="arbiter")
        why = f"{one.host}: is off; racktwin never switches a node on"
        assert await mine.answer(0, "node") == ("failed", why)
        assert len(one.resets) == 2
        mine.forget()
        await mine.order(0.0, policy="operator")
        assert await mine.answer(0, "node") == ("done", "")
        assert (one.resets[2:], one.power) == (["On"], "On")

    told(site, story)


def test_what_is_off_is_as_wanted(site: Site) -> None:
    """A shutdown is not asked for; an off is, as each second counts, and refused: it is off all the same."""

    async def story(services: Services, mine: Powered) -> None:
        services[0].power = "Off"
        await mine.order(STOP)
        assert await mine.answer(0, "node") == ("done", "")
        assert services[0].resets == []
        mine.forget()
        await mine.order(OFF)
        assert await mine.answer(0, "node") == ("done", "")
        assert services[0].resets == ["ForceOff"]

    told(site, story)


@pytest.mark.parametrize("level, kind", [(STOP, "GracefulShutdown"), (OFF, "ForceOff")])
def test_who_switches_a_node_on_again_is_not_overruled_without_a_new_number(
    site: Site, level: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors.bmc.power, "SETTLE_S", {1: 0.05, 2: 0.05})

    async def story(services: Services, mine: Powered) -> None:
        batch = await mine.order(level)
        await mine.answer(0, "node")
        services[0].power = "On"
        for later_s in (0.0, 120.0, 240.0):
            await asyncio.sleep(0.05)
            await mine.resend(batch, later_s=later_s)
        mine.shift_s = 1000.0  # its lease is over too
        await asyncio.sleep(0.3)
        assert services[0].resets == [kind]
        await mine.order(level)
        await mine.until(lambda: services[0].resets == [kind, kind])

    told(site, story)


def test_an_off_overtakes_a_shutdown_and_everything_that_asks_the_same_bmc(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors.bmc.power, "SETTLE_S", {1: 0.1, 2: 9.0})

    async def story(services: Services, mine: Powered) -> None:
        one = services[0]
        one.faults.deaf = 10**6
        await mine.order(STOP)
        await mine.until(lambda: one.resets == ["GracefulShutdown"] * 3)
        one.faults.deaf = 0
        async with mine.fleet.lane(mine.fleet.bmcs[0]):  # somebody reads, for long
            one.faults.hang = 1
            hanging = asyncio.create_task(mine.fleet.bmcs[0].read())
            await mine.until(lambda: one.faults.hang == 0)
            began_s = time.monotonic()
            await mine.order(OFF)
            await mine.until(lambda: one.resets[-1] == "ForceOff")
            assert time.monotonic() - began_s < 2.0
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
        assert await mine.answer(0, "node") == ("done", "")
        one.power, sent = "On", len(one.resets)  # nothing is left of the shutdown
        await asyncio.sleep(0.3)
        assert len(one.resets) == sent

    told(site, story, timeout_s=20.0)


def test_an_off_does_not_wait_where_a_busy_bmc_asked_readers_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors.bmc.redfish_client, "BUSY_S", 30.0)

    async def story(services: Services, mine: Powered) -> None:
        one, reader = services[0], mine.fleet.bmcs[0]
        await reader.read()
        one.faults.busy, one.faults.retry_after = 1, "30"
        for _ in range(2):
            with pytest.raises(ConnectorError, match=r"busy|asks to wait"):
                await reader.read()
        await mine.order(OFF)
        await mine.until(lambda: one.power == "Off")

    told(site, story)


def test_what_passes_is_tried_again_until_the_deadline_and_what_lasts_is_told(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        one = services[0]
        one.faults.busy = 4
        batch = await mine.order(OFF, deadline_s=20.0)
        assert await mine.answer(0, "node") == ("done", "")
        assert any(a.state == "in_progress" and "503" in a.detail for a in mine.answers())
        one.power, one.faults.busy = "On", 10**6
        mine.forget()
        batch = await mine.order(OFF, deadline_s=0.3)
        state, words = await mine.answer(0, "node")
        assert (state, "answers 503" in words) == ("failed", True)
        assert PASSWORD not in str(mine.staged)
        one.faults.busy = 0
        await mine.resend(batch)  # a renewal brings no more time
        await asyncio.sleep(0.2)
        assert one.power == "On"
        await mine.resend(batch, later_s=20.0)
        await mine.until(lambda: one.power == "Off")

    told(site, story)


def test_a_reset_that_is_not_offered_is_refused_with_what_is(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        one = services[0]
        one.offers = ["On", "ForceOff"]
        await mine.order(STOP)
        state, words = await mine.answer(0, "node")
        assert (state, one.resets) == ("failed", [])
        assert "offers no GracefulShutdown for shutdown; it offers On, ForceOff" in words
        one.offers, one.reset_info = None, ["GracefulShutdown"]  # where only an ActionInfo says it
        await mine.until(lambda: one.resets == ["GracefulShutdown"])
        mine.forget()
        await mine.order(OFF)
        assert "it offers GracefulShutdown" in (await mine.answer(0, "node"))[1]
        one.reset_info = None
        mine.forget()
        await mine.order(OFF)
        assert "it offers nothing" in (await mine.answer(0, "node"))[1]

    told(site, story)


def test_a_refusal_is_told_in_the_words_of_the_bmc(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        services[0].power = "PoweringOn"
        monkey = services[0]._reset
        services[0]._reset = lambda kind: _refused()  # type: ignore[method-assign]
        await mine.order(OFF)
        state, words = await mine.answer(0, "node")
        assert (state, "answers 403 not this user" in words) == ("failed", True)
        services[0]._reset = monkey  # type: ignore[method-assign]
        await mine.until(lambda: mine.answers()[-1].state == "done")

    def _refused() -> Any:
        from tests.support.redfish_service import _error

        return _error(403, "Base.InsufficientPrivilege", "not this user")

    told(site, story)


def test_a_reset_that_was_taken_and_not_obeyed_is_sent_again_in_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors.bmc.power, "SETTLE_S", {0: 9.0, 1: 9.0, 2: 0.1})

    async def story(services: Services, mine: Powered) -> None:
        services[0].faults.deaf = 1
        await mine.order(OFF)
        assert await mine.answer(0, "node") == ("done", "")
        assert services[0].resets == ["ForceOff", "ForceOff"]

    told(site, story)


def test_an_agent_goes_first_with_a_shutdown_and_never_with_an_off(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        one, mine.agent = services[0], 0.0
        await mine.order(STOP)
        await asyncio.sleep(0.1)
        mine.agent = 1.0  # it has begun
        await asyncio.sleep(0.6)
        assert (one.resets, mine.sink.counts["left_to_agents"], mine.answers()) == ([], 1, [])
        mine.agent = 0.0  # switched on again; now it does not answer
        began_s = time.monotonic()
        await mine.order(STOP)
        await mine.until(lambda: one.resets == ["GracefulShutdown"])
        assert time.monotonic() - began_s >= 0.4
        one.power = "On"
        await mine.order(OFF)
        await mine.until(lambda: one.resets[-1] == "ForceOff")

    told(site, story)


def test_a_bmc_that_says_on_does_not_hide_that_an_agent_stops_its_system(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        await mine.until(lambda: (0, 0.0) in mine.read("power_readback_state"))
        mine.agent = 1.0
        await asyncio.sleep(0.5)
        mine.forget()
        await mine.until(lambda: len(mine.read("power_on_state")) >= 2)
        assert mine.read("power_readback_state") == []
        services[0].power = "Off"
        await mine.until(lambda: mine.read("power_readback_state")[-1:] == [(0, 2.0)])

    told(site, story, looks=True)


def test_nothing_is_switched_while_another_daemon_leads(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        mine.leads = False
        await mine.order(OFF)
        await asyncio.sleep(0.2)
        assert services[0].resets == []

    told(site, story)


def test_a_renewal_of_what_this_daemon_does_not_remember_begins_nothing(site: Site) -> None:
    async def story(services: Services, mine: Powered) -> None:
        await mine.order(OFF, deadline_s=-30.0, renewal=True)
        assert await mine.answer(0, "node") == (
            "failed",
            "the deadline has passed; no further step is started",
        )
        assert services[0].resets == []

    told(site, story)


def test_two_systems_that_can_be_reset_need_a_name(site: Site) -> None:
    reset = {"#ComputerSystem.Reset": {"target": f"{ROOT}/Systems/Other/Reset",
                                       "ResetType@Redfish.AllowableValues": ["ForceOff"]}}  # fmt: skip
    other = {"@odata.id": f"{ROOT}/Systems/Other", "Id": "Other", "PowerState": "On", "Actions": reset}

    async def unnamed(services: Services, mine: Powered) -> None:
        services[0].more_systems.append(other)
        await mine.order(OFF)
        state, words = await mine.answer(0, "node")
        assert (state, "2 systems match the node" in words) == ("failed", True)

    async def named(services: Services, mine: Powered) -> None:
        services[0].more_systems.append(other)
        await mine.order(OFF)
        assert await mine.answer(0, "node") == ("done", "")
        assert services[0].power == "Off"

    told(site, unnamed)
    told(site, named, system="Board_0")
