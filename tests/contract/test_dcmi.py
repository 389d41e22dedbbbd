"""Node caps by IPMI DCMI: the real `ipmitool` against BMCs of ours; what these hold counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.bmc import NODE_CAP, POWER, DcmiAccess, DcmiBmc, DcmiCommand, Fleet, Key, PowerSink
from connectors.orders import SinkContext
from tests.support.bmc_harness import Driven
from tests.support.builders import site_of, two_racks
from tests.support.dcmi_bmcs import PASSWORD, USER, Bmcs
from tests.support.redfish_harness import hurry
from twin.site import Site

Story = Callable[[Bmcs, Driven], Awaitable[None]]


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def program(server: Callable[..., Path]) -> str:
    return str(server("ipmitool"))


def fleet_of(bmcs: Bmcs, program: str, *, at_once: int = 8, password: str = PASSWORD, user: str = USER,
             **more: Any) -> Fleet:  # fmt: skip
    timeout_s, command = more.pop("timeout_s", 20.0), DcmiCommand(**more)
    made = []
    for i, port in enumerate(bmcs.ports):
        access = DcmiAccess(host="127.0.0.1", port=port, user=user, secret=lambda: password,
                            timeout_s=timeout_s, program=program)  # fmt: skip
        made.append(DcmiBmc(bmcs.host(i), i, access, 6667.0, command))
    return Fleet(made, at_once)


def told(site: Site, program: str, story: Story, *, count: int = 1, looks: bool = False, **more: Any) -> None:
    """Run a story against BMCs of the site's first nodes."""

    async def run(bmcs: Bmcs) -> None:
        async with Driven(site, fleet_of(bmcs, program, **more), looks=looks) as mine:
            await story(bmcs, mine)

    with Bmcs(count) as bmcs:
        asyncio.run(run(bmcs))


def test_a_limit_is_set_made_harmless_activated_and_given_back(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        await mine.command({0: 4800.7}, NODE_CAP)
        assert await mine.answer(0, "node") == ("done", "")
        has = bmcs.get(0)
        # found as one that switches the node off where a limit cannot be met: 2 is an entry in the log
        assert (has["limit_w"], has["active"], has["correction_ms"], has["sample_s"]) == (
            4800,
            True,
            1000,
            30,
        )
        assert has["action"] == 0x11
        assert mine.read("power_cap_readback_w") == [(0, 6667.0), (0, 4800.0)]
        await mine.command({0: 5000.0}, NODE_CAP)
        await mine.until(lambda: bmcs.get(0)["limit_w"] == 5000)
        assert bmcs.get(0)["activations"] == 1
        mine.forget()
        await mine.command({0: 6667.0}, NODE_CAP, final=True)
        assert (await mine.answer(0, "node"))[0] == "done"
        assert bmcs.get(0)["active"] is False

    told(site, program, story)


def test_a_running_limit_that_would_switch_off_is_made_harmless_before_it_is_lowered(
    site: Site, program: str
) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        bmcs.set(0, active=True, limit_w=6000, stuck=True)
        await mine.command({0: 4800.0}, NODE_CAP)
        state, words = await mine.answer(0, "node")
        assert (state, "might switch the node off" in words) == ("failed", True)
        assert bmcs.get(0)["limit_w"] == 6000
        bmcs.set(0, stuck=False)
        mine.forget()
        await mine.command({0: 4800.0}, NODE_CAP)
        assert (await mine.answer(0, "node"))[0] == "done"
        assert bmcs.get(0)["limit_w"] == 4800
        assert bmcs.get(0)["activations"] == 0

    told(site, program, story)


def test_what_is_as_wanted_is_not_set_again(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        bmcs.set(0, limit_w=4800, active=True)
        await mine.command({0: 4800.0}, NODE_CAP)
        assert await mine.answer(0, "node") == ("done", "")
        has = bmcs.get(0)
        assert (has["sets"], has["activations"], has["action"]) == (0, 0, 1)

    told(site, program, story)


def test_a_lease_that_ends_goes_to_the_safe_value(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        await mine.command({0: 3000.0}, NODE_CAP, lease_s=20.0)
        await mine.answer(0, "node")
        mine.shift_s = 21.0
        await mine.until(lambda: bmcs.get(0)["limit_w"] == 4860)  # the profile's

    told(site, program, story)


def test_looks_read_the_limit_and_the_power(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        await mine.until(lambda: mine.read("power_w"))
        assert mine.read("power_w")[0] == (0, 4321.0)
        assert mine.read("power_cap_readback_w")[0] == (0, 6667.0)  # none is active: the node's most
        bmcs.set(0, limit_w=4000, active=True, measures=False)
        await mine.until(lambda: mine.read("power_cap_readback_w")[-1] == (0, 4000.0))
        mine.forget()
        await mine.until(lambda: len(mine.read("power_cap_readback_w")) >= 2)
        assert mine.read("power_w") == []
        assert mine.spoiled == []
        assert mine.poll_s == 0.2, "looks bring their own period"

    told(site, program, story, looks=True)


LASTING: dict[str, tuple[dict[str, Any], str]] = {
    "ignores": ({"deaf": True}, "switches|exception action|enforces"),
    "rounds": ({"round_w": 400}, "took 4860 W and enforces 4800 W"),
    "out of range": ({"low_w": 5000}, "out of range"),
    "no DCMI": ({"code": 0xC1}, "Invalid command"),
    "busy": ({"code": 0xC0}, "busy"),
    "no rights": ({"code": 0xD4}, "Insufficient privilege"),
    "cut short": ({"cut": 5}, "which no node can draw|expected a power limit|enforces|action"),
    "cut to nothing": ({"cut": 0}, "dcmi power get_limit"),
    "would switch off": ({"stuck": True}, "might switch the node off"),
}


@pytest.mark.parametrize("case", LASTING.values(), ids=LASTING)
def test_a_fault_that_lasts_fails_in_words(
    site: Site, program: str, case: tuple[dict[str, Any], str]
) -> None:
    fault, expected = case

    async def story(bmcs: Bmcs, mine: Driven) -> None:
        bmcs.set(0, **fault)
        await mine.command({0: 4860.0}, NODE_CAP, deadline_s=0.5)
        state, words = await mine.answer(0, "node")
        assert state == "failed"
        assert any(part in words for part in expected.split("|")), words
        assert PASSWORD not in f"{mine.staged}{mine.sink.fault}"
        assert bmcs.get(0)["active"] is False or fault.keys() & {"round_w", "cut"}

    told(site, program, story)


def test_a_mute_bmc_holds_up_no_other(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        bmcs.set(1, mute=True)
        await mine.command(dict.fromkeys(range(4), 4500.0), NODE_CAP, deadline_s=25.0)
        for node in (0, 2, 3):
            assert await mine.answer(node, "node") == ("done", "")
        bmcs.set(1, mute=False)
        assert await mine.answer(1, "node") == ("done", "")

    told(site, program, story, count=4, at_once=2, timeout_s=2.0)


def test_a_wrong_password_and_a_program_that_is_absent(site: Site, program: str) -> None:
    async def wrong(bmcs: Bmcs, mine: Driven) -> None:
        await mine.command({0: 4500.0}, NODE_CAP, deadline_s=0.2)
        state, words = await mine.answer(0, "node")
        assert (state, "Unable to establish" in words) == ("failed", True)

    async def absent(bmcs: Bmcs, mine: Driven) -> None:
        await mine.command({0: 4500.0}, NODE_CAP, deadline_s=0.2)
        assert "No such file" in (await mine.answer(0, "node"))[1]

    told(site, program, wrong, password="another")
    told(site, "/nowhere/ipmitool", absent)


def test_a_node_is_stopped_and_switched_by_its_chassis(site: Site, program: str) -> None:
    async def story(bmcs: Bmcs, mine: Driven) -> None:
        bmc: Any = mine.fleet.bmcs[0]
        context = SinkContext(mine.stage, lambda: True, mine.now_ns)
        mine.sink = power = PowerSink("power", site, {0: bmc.switch}, context)  # type: ignore[assignment]
        assert (await bmc.read()).level == 0
        await mine.command({0: 1.0}, POWER)
        await mine.until(lambda: bmcs.get(0)["switched"] == " soft")
        bmcs.set(0, power="off")
        assert await mine.answer(0, "node") == ("done", "")
        mine.forget()
        await mine.command({0: 0.0}, POWER, policy="operator")
        assert await mine.answer(0, "node") == ("done", "")
        mine.forget()
        await mine.command({0: 2.0}, POWER)
        assert await mine.answer(0, "node") == ("done", "")
        assert (bmcs.get(0)["switched"], power.counts["sent"]) == (" soft on off", 3)
        assert (await bmc.read()).level == 2

    told(site, program, story)


def test_the_password_is_on_no_command_line(site: Site, tmp_path: Path) -> None:
    """A program in ipmitool's place writes down what it was given."""
    fake = tmp_path / "ipmitool"
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\nenv > {tmp_path}/env\nyes x | head -c 200000\n'
    )
    fake.chmod(0o700)
    os.environ["SECRET_OF_THE_DAEMON"] = "not for children"
    try:
        access = DcmiAccess(host="bmc", port=623, user=USER, secret=lambda: PASSWORD, program=str(fake))
        bmc = DcmiBmc("bmc", 0, access, 6667.0)
        with pytest.raises(Exception, match="expected a power limit"):
            asyncio.run(bmc.cap(Key(NODE_CAP, 0)))
    finally:
        del os.environ["SECRET_OF_THE_DAEMON"]
    assert PASSWORD not in (tmp_path / "words").read_text()
    env = (tmp_path / "env").read_text()
    assert f"IPMI_PASSWORD={PASSWORD}" in env
    assert "SECRET_OF_THE_DAEMON" not in env


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    fake = tmp_path / "ipmitool"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    fake.chmod(0o700)
    access = DcmiAccess(host="bmc", port=623, user=USER, secret=lambda: PASSWORD, program=str(fake),
                        timeout_s=0.5)  # fmt: skip
    bmc = DcmiBmc("bmc", 0, access, 1.0)
    with pytest.raises(Exception, match=r"no answer within 0\.5 s"):
        asyncio.run(bmc.cap(Key(NODE_CAP, 0)))
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists() if pid else True
