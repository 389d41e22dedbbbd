"""Redfish services that fail: what passes only delays, what lasts is told, nobody waits for the dead."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import connectors.bmc.redfish_client
from connectors.bmc import RedfishBmc, RedfishCaps, RedfishClient
from tests.support.bmc_harness import Driven
from tests.support.builders import site_of, two_racks
from tests.support.redfish_harness import hurry, told
from tests.support.redfish_service import PASSWORD, ROOT, USER, Services
from tests.support.secured_mosquitto import Authority
from twin.catalogue import ConnectorError
from twin.site import Site
from twin.wiring.bmc import Http


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


FAULTS: dict[str, dict[str, Any]] = {
    "busy": {"busy": 3},
    "asks to wait": {"busy": 1, "retry_after": "60"},
    "drops connections": {"drop": 3},
    "says nonsense": {"garbage": 2},
    "talks without end": {"huge": 1},
    "breaks": {"error": 3},
    "forgets the session": {"forget": 3},
    "changed meanwhile": {"stale": 2},
    "changed again and again": {"stale": 5},
    "answers yes and does nothing": {"ignore": 2},
    "takes its time": {"delay": 3},
    "no versions": {"tags": False},
    "Basic only": {"sessions": False},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_passes_delays_a_command_no_more(
    site: Site, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors.bmc.redfish_client, "MAX_BODY", 2**18)

    async def story(services: Services, mine: Driven) -> None:
        for name, value in fault.items():
            setattr(services[0].faults, name, value)
        await mine.command({0: 500.0}, deadline_s=25.0)
        assert (await mine.answer(0))[0] == "done"
        assert services[0].gpus[0].value == 500
        assert mine.sink.fault == ""

    told(site, story)


LASTING: dict[str, tuple[dict[str, Any], str]] = {
    "busy": ({"busy": 10**6}, "answers 503"),
    "ignores": ({"ignore": 10**6}, "took 500 W and enforces 1200 W"),
    "rounds": ({"round_w": 180.0}, "took 500 W and enforces 540 W"),
    "redirects to another host": ({"redirect": "http://192.0.2.1/redfish/v1"}, "redirects to another host"),
    "leads in circles": ({"redirect": ROOT}, "redirects"),
    "hangs": ({"hang": 10**6}, "no complete answer within"),
    "sessions all taken": ({"max_sessions": 0}, "503"),
    "refuses us": ({"locked": 10**6}, "refuses a new session to user racktwin"),
}


@pytest.mark.parametrize("case", LASTING.values(), ids=LASTING)
def test_a_fault_that_lasts_fails_in_words_by_the_deadline(
    site: Site, case: tuple[dict[str, Any], str]
) -> None:
    fault, expected = case

    async def story(services: Services, mine: Driven) -> None:
        for name, value in fault.items():
            setattr(services[0].faults, name, value)
        await mine.command({0: 500.0}, deadline_s=0.6)
        state, words = await mine.answer(0)
        assert state == "failed"
        assert expected in words
        assert any(a.state == "in_progress" for a in mine.answers())
        everything = f"{mine.staged}{mine.sink.fault}{mine.spoiled}"
        assert PASSWORD not in everything
        assert not any(token in everything for token in services[0].tokens)

    told(site, story, fleet={"timeout_s": 0.2})


def test_a_refused_password_is_not_tried_again_and_again(site: Site) -> None:
    """Else the account would be locked."""

    async def story(services: Services, mine: Driven) -> None:
        await mine.command(dict.fromkeys(range(4), 500.0), deadline_s=0.5)
        for g in range(4):
            assert (await mine.answer(g))[0] == "failed"
        assert services[0].refused == 1

    told(site, story, fleet={"password": "another"}, looks=True)


@pytest.mark.long
def test_five_dead_services_of_fifty_do_not_hold_up_the_others() -> None:
    """All others are capped while the dead are still waited for, with fewer places than there are dead."""
    site = site_of(two_racks(racks="r[1-3]"))

    async def story(services: Services, mine: Driven) -> None:
        dead = range(0, 50, 10)
        for i in dead:
            services[i].faults.hang = 10**6
        await mine.until(lambda: all(services[i].host in mine.fleet.failing for i in dead))
        asked = sum(len(services[i].asked) for i in dead)
        gpus = {int(site.gpu_start_of_node[n]): 500.0 for n in range(50)}
        await mine.command(gpus, deadline_s=100.0)
        for node, gpu in enumerate(gpus):
            if node not in dead:
                assert await mine.answer(gpu) == ("done", "")
        assert all(s.gpus[0].value == 500 for n, s in enumerate(services.made) if n not in dead)
        # each try of a dead one takes its timeout of 1.5 s, two at a time
        assert sum(len(services[i].asked) for i in dead) - asked <= 20
        assert {urlsplit(why.split(": ")[0]).netloc for _, why in mine.spoiled} == {
            services[i].host for i in dead
        }
        for i in dead:
            services[i].faults.hang = 0
        await mine.until(lambda: all(s.gpus[0].value == 500 for s in services.made))
        assert mine.sink.fault == ""

    told(site, story, count=50, fleet={"at_once": 4, "timeout_s": 1.5}, looks=True)


def test_who_a_service_is_is_checked(site: Site, server: Callable[..., Path], tmp_path: Path) -> None:
    """Trusted by its authority; not without; and, where people say so, unseen."""
    authority = Authority(server, tmp_path)
    cert, key = authority.issue("127.0.0.1", "subjectAltName=IP:127.0.0.1")
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(cert, key)

    async def look(tls: ssl.SSLContext) -> str:
        async with Services(tls=own) as services:
            http = Http()
            base = f"https://{services[0].host}"
            bmc = RedfishBmc(
                "bmc", 0, RedfishClient(base, USER, lambda: PASSWORD, http, tls=tls), range(4), RedfishCaps()
            )
            try:
                return f"{len((await bmc.read()).caps)} caps"
            except ConnectorError as error:
                return str(error)
            finally:
                await http.close()

    unseen = ssl.create_default_context()
    unseen.check_hostname, unseen.verify_mode = False, ssl.CERT_NONE
    assert asyncio.run(look(ssl.create_default_context(cafile=authority.ca))) == "5 caps"
    assert asyncio.run(look(unseen)) == "5 caps"
    assert "its certificate is not trusted" in asyncio.run(look(ssl.create_default_context()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_faults_ends_at_the_last_commands(site: Site, seed: int) -> None:
    """Twelve services, commands and faults at random: afterwards all is as commanded last, once it may be."""
    rng = random.Random(seed)
    kinds = ["busy", "drop", "garbage", "error", "forget", "stale", "ignore"]

    async def story(services: Services, mine: Driven) -> None:
        wanted: dict[int, float] = {}
        batches = []
        for _ in range(40):
            service = services[rng.randrange(12)]
            setattr(service.faults, rng.choice(kinds), rng.randrange(1, 5))
            values = {rng.randrange(48): float(rng.randrange(200, 1201)) for _ in range(6)}
            wanted |= values
            batches.append(await mine.command(values, deadline_s=1.0))
            if rng.random() < 0.3:
                await mine.sink.apply((rng.choice(batches),))  # a straggler
            await asyncio.sleep(rng.random() * 0.05)

        def off() -> list[int]:
            values = [g.value for g in itertools.chain(*(s.gpus for s in services.made))]
            return [g for g, w in wanted.items() if values[g] is None or abs(values[g] - w) > 5]

        for _ in range(40):  # what failed is commanded again, as the engine does
            await asyncio.sleep(0.1)
            if not off():
                break
            await mine.command({g: wanted[g] for g in off()}, deadline_s=1.0)
        await mine.until(lambda: not off())
        assert len(mine.sink._orders) <= 60

    told(site, story, count=12)
