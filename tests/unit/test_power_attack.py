"""Attacks on what comes in from outside: other speakers, floods, files that are none, BMCs that lie."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.bmc import GPU_CAP, Fleet, Key, RedfishBmc, RedfishCaps, RedfishClient, redfish
from connectors.bmc.dcmi import parse_power
from connectors.bmc.limits import BmcReading, Cap
from connectors.bmc.redfish import Map, Spot
from connectors.bmc.redfish_client import SIGN_IN, HttpAnswer
from connectors.dsx import FlexDecoder, FlexTrust, KeySet
from connectors.dsx.flex import MAX_EVENTS
from policies.power_capping import PowerCap, PowerGuard
from tests.support.bmc_harness import Driven
from tests.support.builders import START_NS, Twin, site_of, two_racks
from tests.support.flex_messages import CORRELATION, envelope, key, key_set, message, signer, target
from tests.support.powered_plant import Loop
from twin.catalogue import ActuationError, BadMessage, ConfigError, ConnectorError
from twin.contracts import MAX_TARGETS, LoadTargets
from twin.telemetry import Ignored, LoadTargetSet
from twin.wiring.target_files import WatchedFile, read_targets

FEEDS = {"main-a": "lab/h/a", "main-b": "lab/h/b"}


class Desk:
    """A decoder before an engine that takes in what it says, with a key for each of two ISVs."""

    def __init__(self, **more: Any) -> None:
        self.twin = Twin(two_racks())
        public = (key(n).as_dict(private=False) | {"isv": isv} for n, isv in (("k1", "acme"), ("k2", "evil")))
        self.keys, self.more = KeySet(key_set(*public), "keys"), more
        self.restart()

    def restart(self) -> None:
        def seen() -> list[str]:
            return [known.partition(":")[2] for known in self.twin.engine.intake.seen]

        self.decoder = FlexDecoder(FEEDS, self.keys, lambda: self.held, seen, FlexTrust(**self.more))

    @property
    def held(self) -> Any:
        return self.twin.engine.intake.load_targets.current(self.twin.site)

    def say(self, event: Any, at_s: float, isv: str = "acme", settle: bool = True) -> Any:
        got = self.decoder.decode(message(event, at_s, isv))
        if settle and not isinstance(got, Ignored):
            self.twin.now_ns = START_NS + round(at_s * 1e9) - 10**9
            self.twin.tick(None, *got)
        return got

    def limit_kw(self, at_s: float) -> float:
        t_ns = START_NS + round(at_s * 1e9)
        return min((t.limit_w / 1e3 for t in self.held if t.runs(t_ns)), default=float("inf"))


@pytest.mark.parametrize("settle", [True, False])
def test_nobody_takes_the_place_of_anothers_target_by_its_correlation(settle: bool) -> None:
    """Correlations are no secret: power states tell them."""
    desk = Desk()
    ours = desk.say(envelope(target(200, "main-a")), 1, settle=settle)
    lift = envelope(target(90_000, "main-a"), at_s=2, isv="evil", by=signer("k2"))
    assert [e.target for e in ours] == [f"{CORRELATION}/main-a"]
    assert desk.say(lift, 2, "evil", settle=settle) == []
    assert "another holds a target of this correlationid" in desk.decoder.faults[0]
    if settle:
        assert desk.limit_kw(3) == 200


def test_nulls_in_a_row_lift_nothing_behind_them() -> None:
    """Each cuts a hole; what is left behind each hole stays, however many there are."""
    desk = Desk()
    desk.say(envelope(target(200, "main-a", start_s=1, end_s=1000)), 1)
    for n, start in enumerate((800, 600, 400, 700)):
        hole = target(None, "main-a", start_s=start, end_s=start + 10)
        desk.say(envelope(hole, at_s=2 + n, correlationid=str(uuid.uuid4())), 2 + n)
    for at_s in (300, 405, 500, 605, 650, 705, 750, 805, 900):
        assert (desk.limit_kw(at_s) == 200) == (at_s not in (405, 605, 705, 805)), at_s


@pytest.mark.long
def test_names_of_what_is_left_stay_within_what_a_name_may_be() -> None:
    desk = Desk()
    desk.say(envelope(target(200, "main-a", start_s=1, end_s=100_000)), 1)
    for n in range(180):
        hole = target(None, "main-a", start_s=1000 + 20 * n, end_s=1010 + 20 * n)
        desk.say(envelope(hole, at_s=2 + n, correlationid=str(uuid.uuid4())), 2 + n)
    assert not [r for r in desk.twin.records("event") if "refused" in r]
    assert desk.limit_kw(50_000) == 200


def test_removals_that_multiply_are_refused_and_lift_nothing() -> None:
    """A thousand targets on end of each other, and a thousand holes in all of them, would be a million."""
    desk = Desk(unsigned="accept")
    long = [target(200 + n, "main-a", start_s=2, end_s=10**6 + n) for n in range(900)]
    desk.say(envelope(data={"targets": long}), 1)
    assert len(desk.held) == 900
    holes = [target(None, "main-a", start_s=100 + 20 * n, end_s=110 + 20 * n) for n in range(1000)]
    other = str(uuid.uuid4())
    with pytest.raises(BadMessage, match="changes of targets"):
        desk.say(envelope(data={"targets": holes}, at_s=2, correlationid=other), 2)
    desk.restart()  # a new allowance
    with pytest.raises(BadMessage, match="comes to 1800 targets in force"):
        desk.say(envelope(data={"targets": holes[:1]}, at_s=3, correlationid=other), 3)
    assert (len(desk.held), desk.limit_kw(105)) == (900, 200)
    # what was refused is not remembered as told either
    over = envelope(data={"targets": [target(None, "main-a")]}, at_s=4, correlationid=other)
    assert len(desk.say(over, 4)) == 900
    assert desk.limit_kw(5) == float("inf")


def test_one_speakers_flood_takes_nothing_of_anothers_allowance() -> None:
    desk = Desk()
    flood = [target(300, "main-b", start_s=n + 10, end_s=n + 11) for n in range(900)]
    events = [
        envelope(*flood, at_s=n, isv="evil", by=signer("k2"), correlationid=str(uuid.uuid4()))
        for n in range(3)
    ]
    for n in range(2):
        desk.say(events[n], n, "evil", settle=False)
    with pytest.raises(BadMessage, match="more load targets of evil"):
        desk.say(events[2], 2, "evil", settle=False)
    assert desk.say(envelope(target(200, "main-a"), at_s=4), 4)
    assert desk.limit_kw(5) == 200


def test_an_old_signing_in_a_new_envelope_does_not_count_after_a_restart_either() -> None:
    desk = Desk()
    old = envelope(target(100, "main-a"))
    desk.say(old, 1)
    desk.say(envelope(target(None, "main-a"), at_s=2, correlationid=str(uuid.uuid4())), 2)
    assert desk.limit_kw(3) == float("inf")
    desk.restart()
    again = old | {"id": str(uuid.uuid4()), "time": envelope(at_s=3)["time"]}
    with pytest.raises(BadMessage, match="the same signature came before"):
        desk.say(again, 3)


def test_a_message_of_nothing_but_unknown_feeds_is_told_in_few_words() -> None:
    desk = Desk(unsigned="accept")
    wide = envelope(data={"targets": [target(1, *(f"x{n}" for n in range(1000))) for _ in range(100)]})
    entries = 0
    known = desk.decoder._known

    def counted() -> str:
        nonlocal entries
        entries += 1
        return known()

    desk.decoder._known = counted  # type: ignore[method-assign]
    with pytest.raises(BadMessage, match="no feed 'x0'"):
        desk.say(wide, 1)
    assert entries <= 200
    many = envelope(data={"targets": [target(1, start_s=n + 2, end_s=n + 3) for n in range(1000)]})
    with pytest.raises(BadMessage, match=f"more than {MAX_EVENTS} targets"):
        desk.say(many, 1)


def test_a_speaker_cannot_take_all_the_room_of_people() -> None:
    held, site = LoadTargets(), Twin(two_racks()).site
    for n in range(MAX_TARGETS):
        held.set(LoadTargetSet(author="//grid/v1/isv/x", target=f"{n}", limit_w=1e9, kind="flex"), site, 1)
    flood = LoadTargetSet(author="//grid/v1/isv/x", target="more", limit_w=1e9, kind="flex")
    assert "load targets" in (held.set(flood, site, 1) or "")
    assert held.set(LoadTargetSet(author="op", target="stop", limit_w=1e5), site, 1) is None


@pytest.mark.parametrize("name", ["t.csv", "t.yaml"])
def test_a_file_of_targets_shows_no_word_of_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    """Whoever may write to the folder could link to a secret, and read the alarm."""
    (tmp_path / "secret").write_text("hunter2,hunter3\nhunter4,hunter5\n")
    (tmp_path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError) as caught:
        read_targets(tmp_path / name, Twin(two_racks()).site)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.csv", "t.yaml"])
def test_a_file_of_targets_that_is_no_file_does_not_hold_a_thread(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    watched = WatchedFile(tmp_path / name)
    assert not any(watched.changed() for _ in range(3))
    assert "no plain file" in watched.fault
    with pytest.raises(ConfigError, match="no plain file"):
        read_targets(tmp_path / name, Twin(two_racks()).site)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no plain file"):
        read_targets(tmp_path / name, Twin(two_racks()).site)


class Bloated:
    """A service whose every resource is as large as an answer may be, and whose walk never ends."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, 0
        self.body: dict[str, Any] = {}

    async def root(self) -> dict[str, Any]:
        return {"Systems": {"@odata.id": "/redfish/v1/S"}, "Chassis": {"@odata.id": "/redfish/v1/C"}}

    async def get(self, path: str) -> HttpAnswer:
        self.asked += 1
        members = [{"@odata.id": f"/redfish/v1/C/{n}"} for n in range(256)]
        body = {"Members": members, "Controls": {"@odata.id": path + "/X"}, "ControlType": "Power"}
        return HttpAnswer(self.body or body, "", self.size)

    async def close(self) -> None: ...


def test_a_service_cannot_fill_the_memory_with_large_resources() -> None:
    fake = Bloated(2**20)
    bmc = RedfishBmc("b", 0, fake, range(4), RedfishCaps(command=("gpus",)))  # type: ignore[arg-type]
    with pytest.raises(ConnectorError, match="bytes"):
        asyncio.run(bmc.read())
    assert fake.asked * fake.size <= redfish.MAX_WALK_BYTES + fake.size


def test_nor_with_large_limits_once_it_was_walked() -> None:
    fake = Bloated(2**20)
    bmc = RedfishBmc("b", 0, fake, range(64), RedfishCaps(command=("gpus",)))  # type: ignore[arg-type]
    spots = [Spot(f"/redfish/v1/P/{n}", "metrics") for n in range(64)]
    bmc._map = Map(gpus=spots, gpu_power=[""] * 64)
    fake.body = {"PowerLimitWatts": {"SetPoint": 500}}
    with pytest.raises(ConnectorError, match="bytes in all"):
        asyncio.run(bmc.read())
    assert fake.asked == 9


class Tarpit:
    """A BMC that answers at last, always."""

    name, node = "slow", 0
    keys: tuple[Key, ...] = ()

    async def read(self) -> BmcReading:
        await asyncio.sleep(3600)
        return BmcReading(())

    async def cap(self, key: Key) -> Cap:
        raise NotImplementedError

    async def put(self, cap: Cap, value_w: float, final: bool) -> None: ...

    async def close(self) -> None: ...


def test_a_bmc_that_answers_slowly_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import connectors.bmc.limits

    monkeypatch.setattr(connectors.bmc.limits, "VISIT_S", 0.05)

    async def visit() -> None:
        slow = Tarpit()
        fleet = Fleet([slow], 1)
        with pytest.raises(ConnectorError, match="whole visit"):
            async with fleet.lane(slow):
                await slow.read()
        assert fleet.failing == {"slow"}

    asyncio.run(visit())


def test_a_bmc_cannot_say_that_its_node_draws_what_no_node_draws() -> None:
    text = "    Instantaneous power reading:  999999 Watts\n    Power reading state is: activated"
    with pytest.raises(ConnectorError, match="no node can draw"):
        parse_power(text)


class Steps:
    """A BMC that takes a cap in two steps, and somebody who takes the lead between them."""

    name, node = "b", 0
    keys: tuple[Key, ...] = (Key(GPU_CAP, 0),)

    def __init__(self) -> None:
        self.begun, self.done = 0, 0

    async def read(self) -> BmcReading:
        return BmcReading(())

    async def cap(self, key: Key) -> Cap:
        return Cap(key, 1200.0, 200.0, 1200.0)

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        self.begun += 1
        await asyncio.sleep(2.0)
        self.done += 1

    async def close(self) -> None: ...


def test_a_change_in_several_steps_ends_with_its_leader() -> None:
    async def run() -> None:
        bmc = Steps()
        async with Driven(site_of(two_racks()), Fleet([bmc], 1)) as mine:
            await mine.command({0: 600.0})
            await mine.until(lambda: bmc.begun > 0)
            mine.leads = False
            sink: Any = mine.sink
            await mine.until(lambda: not sink._tasks and not sink._due)
        assert (bmc.begun, bmc.done) == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("limit_w", [0.0, 5e-324, 500.0])
@pytest.mark.parametrize("feeders", [(), ("lab/h/a",)])
def test_a_target_of_nothing_ends_at_the_floors_and_is_told(limit_w: float, feeders: tuple[str, ...]) -> None:
    """500 W for 500 kW: no device goes below its least, and people are told that it is not kept."""
    loop = Loop(two_racks(), [PowerCap(), PowerGuard()])
    loop.wants_w[:] = 1000.0
    loop.run(10)
    loop.tick(LoadTargetSet(author="u", target="oops", limit_w=limit_w, feeders=feeders, kind="flex"))
    loop.run(120, 5.0)
    low_w = loop.site.envelopes["gpu.power_cap_w"].low
    assert (loop.cap_w >= low_w).all()
    assert loop.cap_w.max() <= low_w.max() + 5.0
    reasons = {p.reason for name in ("power_cap", "power_guard") for p in loop.twin.engine.in_force[name]}
    assert any("oops" in reason for reason in reasons)


@pytest.mark.parametrize("status", [400, 409, 500, 503])
def test_what_a_bmc_says_to_a_sign_in_is_not_quoted(status: int) -> None:
    client = RedfishClient("https://b", "u", lambda: "hunter2", lambda: None)  # type: ignore[arg-type, return-value]
    said: Any = SimpleNamespace(status=status, headers={})
    with pytest.raises((ConnectorError, ActuationError)) as caught:
        client._judge(SIGN_IN, "https://b/s", said, b'{"error": {"message": "no user u/hunter2"}}')
    assert "hunter2" not in str(caught.value)
