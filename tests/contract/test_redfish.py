"""Power caps by Redfish against a service of ours: what it holds counts, not what we believe."""

from __future__ import annotations

import asyncio

import pytest

from connectors.bmc import GPU_CAP, NODE_CAP, sink
from tests.support.bmc_harness import Driven
from tests.support.builders import site_of, two_racks
from tests.support.redfish_harness import fleet_of, hurry, told
from tests.support.redfish_service import Adapter, Services
from twin.site import Site


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_caps_of_gpus_and_of_the_node_are_set_and_read_back(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command({0: 700.4, 2: 650.0})
        await mine.command({0: 4800.0}, NODE_CAP)
        assert await mine.answer(0) == ("done", "")
        assert await mine.answer(2) == ("done", "")
        assert await mine.answer(0, "node") == ("done", "")
        one = services[0]
        assert [g.value for g in one.gpus] == [700, 1200, 650, 1200]  # never above what was asked
        assert one.node is not None
        assert one.node.value == 4800
        assert mine.read("power_limit_w")[-2:] in ([(0, 700.0), (2, 650.0)], [(2, 1200.0), (2, 650.0)])
        assert mine.answers()[0].command == "3-1"
        assert one.signed_in == 1

    told(site, story)


def test_what_is_as_wanted_is_not_set_again(site: Site) -> None:
    """A restart commands all again under a new epoch and new numbers."""

    async def story(services: Services, mine: Driven) -> None:
        await mine.command(dict.fromkeys(range(4), 700.0))
        for g in range(4):
            await mine.answer(g)
        before = services[0].patches()
        again = Driven(site, fleet_of(site, services))
        async with again:
            again.epoch, again.number = 4, 100
            await again.command(dict.fromkeys(range(4), 700.0))
            for g in range(4):
                assert (await again.answer(g))[0] == "done"
        assert services[0].patches() == before == 4

    told(site, story)


def test_a_renewal_asks_nothing_while_the_last_look_agrees(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        batch = await mine.command({0: 700.0})
        await mine.answer(0)
        asked = len(services[0].asked)
        for _ in range(5):
            await mine.again(batch)
        await asyncio.sleep(0.1)
        assert len(services[0].asked) == asked
        services[0].gpus[0].value = 900.0  # a stranger, seen by the next look
        async with mine.fleet.lane(mine.fleet.bmcs[0]):
            mine.fleet.note((await mine.fleet.bmcs[0].read()).caps, 1)
        await mine.again(batch)
        await mine.until(lambda: services[0].gpus[0].value == 700)

    told(site, story)


def test_decreases_come_before_increases(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command(dict.fromkeys(range(4), 700.0))
        for g in range(4):
            await mine.answer(g)
        services[0].asked.clear()
        await mine.command({0: 900.0, 1: 500.0, 2: 1000.0, 3: 400.0})
        await mine.until(lambda: [g.value for g in services[0].gpus] == [900, 500, 1000, 400])
        order = [path[-20] for method, path in services[0].asked if method == "PATCH"]
        assert order == ["4", "2", "1", "3"]

    told(site, story)


def test_the_newest_wins_and_the_old_is_ignored(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        services[0].faults.busy = 5
        first = await mine.command({0: 600.0})
        await mine.command({0: 800.0})
        assert (await mine.answer(0))[0] == "done"
        assert services[0].gpus[0].history == [800]
        await mine.sink.apply((first,))
        await mine.command({0: 300.0}, epoch=2, command=[99])
        await asyncio.sleep(0.1)
        assert services[0].gpus[0].value == 800
        assert mine.sink.counts["old"] == 2

    told(site, story)


def test_nothing_is_changed_while_another_daemon_leads(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        mine.leads = False
        await mine.command({0: 600.0}, lease_s=0.05)
        await asyncio.sleep(0.2)
        assert services[0].patches() == 0

    told(site, story)


def test_a_value_beyond_the_device_fails_in_words_and_is_not_sent(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        services[0].gpus[0].low = 450.0
        await mine.command({0: 400.0})
        state, words = await mine.answer(0)
        assert state == "failed"
        assert "400 W is outside 450..1200 W" in words
        assert services[0].patches() == 0

    told(site, story)


def test_a_lease_that_ends_goes_to_the_safe_value(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        batch = await mine.command({0: 400.0, 1: 900.0}, lease_s=20.0)
        await mine.answer(0)
        await mine.answer(1)
        mine.shift_s = 15.0
        await mine.again(batch, lease_s=20.0)
        mine.shift_s = 30.0  # beyond the first end, before the renewed one
        await asyncio.sleep(0.1)
        assert [g.value for g in services[0].gpus[:2]] == [400, 900]
        services[0].faults.busy = 3
        mine.shift_s = 36.0
        await mine.until(lambda: [g.value for g in services[0].gpus[:2]] == [750, 750])
        assert mine.sink.counts["lapsed"] == 2
        await mine.command({0: 500.0})
        await mine.until(lambda: services[0].gpus[0].value == 500)

    told(site, story)


def test_a_clock_that_is_set_ahead_ends_no_lease_before_the_next_tick_renews_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "LOOK_S", 60.0)  # that the next tick comes in time is not asked here

    async def story(services: Services, mine: Driven) -> None:
        batch = await mine.command({0: 400.0}, lease_s=20.0)
        await mine.answer(0)
        mine.shift_s = 3600.0
        mine.sink._end_leases()  # a look between the step and the tick
        await mine.again(batch, lease_s=20.0)
        mine.sink._end_leases()
        assert mine.sink.counts["lapsed"] == 0
        assert services[0].gpus[0].value == 400

    told(site, story)


def test_a_safe_value_that_is_refused_is_told(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command({0: 900.0}, lease_s=20.0)
        await mine.answer(0)
        services[0].gpus[0].low = 800.0
        mine.shift_s = 21.0
        await mine.until(lambda: mine.sink.fault)
        assert "gpu0: its lease ended: 750 W is outside 800..1200 W" in mine.sink.fault
        services[0].gpus[0].low = 200.0
        await mine.until(lambda: services[0].gpus[0].value == 750)
        await mine.until(lambda: mine.sink.fault == "")

    told(site, story)


def test_what_was_given_back_does_not_lapse(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command({0: 400.0})
        await mine.answer(0)
        await mine.command({0: 1200.0}, final=True)
        await mine.until(lambda: services[0].gpus[0].value == 1200)
        mine.shift_s = 100.0
        await asyncio.sleep(0.1)
        assert services[0].gpus[0].value == 1200
        assert mine.sink.counts["lapsed"] == 0

    told(site, story)


def test_a_limit_that_was_off_is_switched_on_and_off_again(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        gpu = services[0].gpus[0]
        gpu.mode = "Disabled"
        await mine.command({0: 1200.0})  # nothing caps: that is as wanted
        assert (await mine.answer(0))[0] == "done"
        assert services[0].patches() == 0
        await mine.command({0: 500.0})
        await mine.until(lambda: (gpu.value, gpu.mode) == (500, "Automatic"))
        await mine.command({0: 1200.0}, final=True)
        await mine.until(lambda: (gpu.value, gpu.mode) == (1200, "Disabled"))

    told(site, story)


def test_an_agents_gpus_are_left_to_it(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.until(lambda: len(mine.read("power_w")) >= 4)
        assert mine.poll_s == 0.2, "looks bring their own period"
        assert dict(mine.read("power_w")) == {
            0: 4000.0,
            1: 301.0,
            2: 302.0,
            3: 303.0,
        }  # the node's, no GPU 0's
        mine.forget()
        await mine.command({0: 500.0, 1: 500.0})
        assert (await mine.answer(1))[0] == "done"
        assert [g.value for g in services[0].gpus[:2]] == [1200, 500]
        assert mine.answers(site.name("gpu", 0)) == []  # the agent answers

    told(site, story, looks=True, left=lambda key: "the agent's" if key == (GPU_CAP, 0) else "")


def test_sessions_are_given_back(site: Site) -> None:
    async def run() -> None:
        async with Services() as services:
            async with Driven(site, fleet_of(site, services)) as mine:
                await mine.command({0: 500.0})
                await mine.answer(0)
                assert len(services[0].tokens) == 1
            assert services[0].tokens == {}

    asyncio.run(run())


def test_a_source_and_a_sink_that_stop_together_leave_no_session(site: Site) -> None:
    async def run() -> None:
        async with Services() as services:
            fleet = fleet_of(site, services)
            await fleet.bmcs[0].read()
            assert len(services[0].tokens) == 1
            services[0].faults.slow_s = 0.1
            await asyncio.gather(fleet.close(), fleet.close())
            assert services[0].tokens == {}

    asyncio.run(run())


def test_looks_read_back_limits_and_power(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.until(lambda: len(mine.read("power_w")) >= 5)
        assert sorted(mine.read("power_w")[:5]) == [
            (0, 300.0),
            (0, 4000.0),
            (1, 301.0),
            (2, 302.0),
            (3, 303.0),
        ]
        assert mine.read("power_limit_w")[:4] == [(g, 1200.0) for g in range(4)]
        assert mine.read("power_cap_readback_w")[0] == (0, 6600.0)
        assert mine.spoiled == []

    told(site, story, looks=True)


def test_the_nodes_limit_beside_power_metrics(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command({0: 4800.0}, NODE_CAP)
        assert await mine.answer(0, "node") == ("done", "")
        assert services[0].node is not None
        assert services[0].node.value == 4800

    told(site, story, options={"node_as": "metrics"})


def test_a_gpu_too_few_is_not_guessed_around(site: Site) -> None:
    """With a GPU off the bus, the third of the service is not the third of the node."""

    async def story(services: Services, mine: Driven) -> None:
        services[0].gpus.pop()
        await mine.command({0: 500.0, 2: 500.0})
        state, words = await mine.answer(2)
        assert (state, "lists 3 GPUs, the site's node has 4" in words) == ("failed", True)
        assert services[0].patches() == 0

    told(site, story)


def test_the_order_of_gpus_can_be_named(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        await mine.command({0: 500.0})
        await mine.answer(0)
        assert [g.value for g in services[0].gpus] == [1200, 1200, 1200, 500]

    told(site, story, fleet={"gpu_ids": ("GPU_4", "GPU_3", "GPU_2", "GPU_1")})


def test_two_limits_that_may_be_the_nodes_need_a_name(site: Site) -> None:
    other = {"Id": "Other", "ControlType": "Power", "SetPoint": 1.0, "AllowableMax": 9.0}

    async def unnamed(services: Services, mine: Driven) -> None:
        services[0].extra_controls.append(other)
        await mine.command({0: 4800.0}, NODE_CAP)
        state, words = await mine.answer(0, "node")
        assert (state, "2 power limits match the node" in words) == ("failed", True)

    async def named(services: Services, mine: Driven) -> None:
        services[0].extra_controls.append(other)
        await mine.command({0: 4800.0}, NODE_CAP)
        assert (await mine.answer(0, "node"))[0] == "done"

    told(site, unnamed)
    told(site, named, fleet={"node_control": "NodePower_0"})


def test_dpus_are_read_beside_the_node(site: Site) -> None:
    async def story(services: Services, mine: Driven) -> None:
        services[0].adapters += [Adapter("DPU_0"), Adapter("DPU_1", health="Critical", temp_c=108.0)]
        await mine.until(lambda: mine.read("dpu2_health_state") == [(0, 2.0)])
        assert mine.read("dpu2_temp_c") == [(0, 108.0)]
        assert mine.read("dpu1_health_state") == [(0, 0.0)]
        assert mine.read("dpu1_port_error_count") == [(0, 0)]

    told(site, story, looks=True)
