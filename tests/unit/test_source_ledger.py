"""The ledger of sources: rates, clocks, what is not used and why, who carries what; and its bounds."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.mqtt import FLOODED
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.contracts import Inlet
from twin.daemon import Daemon, Ingest, carrier_file
from twin.sources import ledger as ledger_module
from twin.telemetry import Block, Reading

T = 1_700_000_000 * NS


@pytest.fixture
def ingest() -> Ingest:
    made = Ingest(site_of(two_racks()), {})
    made.ledger.now_ns = lambda: T
    return made


def power(rack: int, at_ns: int, watts: float = 1000.0) -> Reading:
    return Reading("rack", rack, "power_w", watts, at_ns)


def row(ingest: Ingest, name: str, now_ns: int) -> dict[str, object]:
    (found,) = ingest.ledger.rows([ingest.of(name)], now_ns)
    return found


@pytest.mark.parametrize(
    ("every_s", "burst"),
    [(0.1, 1), (1.0, 1), (2.0, 1), (2.5, 1), (7.0, 12), (10.0, 1), (30.0, 2), (300.0, 1)],
)
def test_the_rate_of_a_source_is_steady_whenever_one_looks(every_s: float, burst: int) -> None:
    """Also of one that sends many messages at once, between two of its messages, and with some jitter."""
    account, rng = Ingest(site_of(two_racks()), {}).of("agent a"), np.random.default_rng(round(10 * every_s))
    for k in range(max(40, math.ceil(40.0 / every_s))):
        at_ns = T + round((k + rng.uniform(-0.1, 0.1)) * every_s * NS)
        for copy in range(burst):
            account.stage([power(0, at_ns), power(1, at_ns)], at_ns + copy * NS // 1000)
        if k * every_s > 20.0 and k > 10:
            means = account.rate.means(at_ns + round(rng.uniform(0.1, 0.9) * every_s * NS))
            assert means is not None
            assert means[1] / means[0] == pytest.approx(burst / every_s, rel=0.1)
            assert means[2] == pytest.approx(2 * means[1])
    long_silence = account.rate.means(at_ns + 24 * 3600 * NS)
    assert long_silence is not None
    assert long_silence[1] / long_silence[0] < 0.2 * burst / every_s


def test_a_source_of_one_message_in_30_s_reads_one_in_30_s(ingest: Ingest) -> None:
    account, shown = ingest.of("exporter http://n0:9400"), set()
    for k in range(1200):
        if k % 30 == 0:
            account.stage([power(0, T + k * NS)], T + k * NS)
        if k > 60:
            found = row(ingest, account.name, T + k * NS)
            shown.add((found["every_s"], found["messages_per_s"]))
    assert shown == {(30.0, round(1 / 30, 4))}


def test_requests_that_fail_are_counted_and_their_reason_goes_with_the_next_answer(ingest: Ingest) -> None:
    scrape, now = ingest.of("exporter http://n0:9400"), [T]
    ingest.ledger.now_ns = lambda: now[0]

    def told(at_ns: int) -> list[tuple[str, int]]:
        return [(line["outcome"], line["count"]) for line in ingest.ledger.overview(at_ns)]

    scrape.stage([power(0, T)], T, 15.0)
    for k in range(1, 4):
        now[0] = T + 15 * k * NS
        scrape.fail("http://n0:9400: no answer within 5 s", "check that the exporter runs")
    assert told(now[0]) == [("failed", 3)]
    found = row(ingest, scrape.name, now[0])
    assert (found["answers"], found["failures"], found["unused"]) == (1, 3, 0)
    now[0] += 15 * NS
    scrape.stage([power(0, now[0])], now[0], 15.0)
    assert told(now[0] + 5 * NS) == [], "what healed is not told any more"
    found = row(ingest, scrape.name, now[0])
    assert (found["answers"], found["failures"], found["reasons"]) == (2, 3, [])
    failure = found["last_failure"]
    assert isinstance(failure, dict)
    assert (failure["age_s"], failure["why"]) == (15.0, "http://n0:9400: no answer within 5 s")


class Relay:
    """A source that reads others."""

    name = "bmc"

    def __init__(self, *origins: str) -> None:
        self.origins = origins

    async def run(self, inlet: Inlet) -> None: ...


def test_a_source_has_one_row(ingest: Ingest) -> None:
    """Before it answers and after; what only reads others, or hears who names himself, has none."""
    exporter, bmcs = "exporter http://n0:9400/metrics", ("BMC 10.0.0.1", "BMC 10.0.0.2")
    inlets = [ingest.inlet_of(Relay(*origins)) for origins in ((exporter,), bmcs, ())]
    names = [exporter, *bmcs, "topic telegraf/a"]

    def listed() -> set[str]:
        return {account.name for account in ingest.ledger.listing(T)}

    assert listed() == set(names[:3]), "none has answered yet"
    inlets[0].stage([power(0, T)], T, 15.0)
    for inlet, name in zip((inlets[1], inlets[1], inlets[2]), names[1:], strict=True):
        inlet.of(name, outside=name.startswith("topic")).stage([power(0, T)], T)
    assert listed() == set(names)


def test_a_clock_that_is_off_is_said_once_with_the_remedy(
    ingest: Ingest, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong, slow = ingest.of("agent right"), ingest.of("agent wrong"), ingest.of("agent slow")
    with caplog.at_level(logging.WARNING):
        for k in range(40):
            now_ns = T + k * NS
            right.stage([power(0, now_ns - NS // 10)], now_ns)
            wrong.stage([power(0, now_ns + 30 * NS)], now_ns)
            slow.stage([power(1, now_ns - 9 * NS)], now_ns)  # Telegraf gathers for ten seconds
    assert [r.getMessage() for r in caplog.records if "clock" in r.getMessage()] == [
        "source agent wrong: its timestamps are 30 s ahead of our clock; synchronise that host by NTP "
        "(`chronyc tracking`, `timedatectl`)"
    ]
    assert row(ingest, "agent right", now_ns)["clock_offset_s"] == pytest.approx(0.1)
    assert row(ingest, "agent wrong", now_ns)["clock_offset_s"] == pytest.approx(-30.0)
    assert [r["source"] for r in ingest.ledger.overview(now_ns) if r["outcome"] == "clock"] == ["agent wrong"]


def test_late_readings_are_told_when_there_are_many(ingest: Ingest) -> None:
    account = ingest.of("topic telegraf/a")
    for k in range(100):
        account.stage([power(0, T + k * NS)], T + k * NS)
    account.stage([power(0, T)], T + 100 * NS)
    assert not ingest.ledger.overview(T + 100 * NS)
    for k in range(5):
        account.stage([power(0, T + k * NS)], T + 101 * NS)
    (line,) = ingest.ledger.overview(T + 110 * NS)
    assert (line["outcome"], line["count"]) == ("late", 6)
    assert "older than what is known of the same device" in line["why"]
    assert line["remedy"]


def test_late_readings_are_told_soon_also_after_months_without_any(ingest: Ingest) -> None:
    account, n = ingest.of("topic telegraf/a"), 3000
    for k in range(n):
        account.stage([power(0, T + k * NS)], T + k * NS)
    for k in range(20):
        account.stage([power(0, T + (n - 60) * NS)], T + (n + k) * NS)

    def told(now_ns: int) -> list[str]:
        return [line["outcome"] for line in ingest.ledger.overview(now_ns)]

    assert "late" in told(T + (n + 20) * NS)
    for k in range(n, 2 * n):
        account.stage([power(0, T + k * NS)], T + k * NS)
    assert "late" not in told(T + 2 * n * NS), "what is over has no line"


def test_a_flood_is_an_alarm_also_after_the_site_changed(ingest: Ingest) -> None:
    raised: list[str] = []
    alarms = SimpleNamespace(condition=lambda identity, *_: raised.append(identity), clear=lambda _: None)
    daemon: Any = SimpleNamespace(ingest=ingest, alarms=alarms, _flooded=(0, 0))
    for k, count in enumerate((1000, 10)):
        ingest.ledger.change_site(ingest.site.sizes)  # the counts begin anew
        ingest.of(FLOODED).drop(FLOODED, "20/s over the limit", count)
        Daemon._floods(daemon, T + 100 * k * NS)
    assert raised == ["flood/job-reports"] * 2


def test_each_agent_of_the_largest_site_is_known_as_a_carrier() -> None:
    n = 40_000  # more than an int16 counts
    ledger = Ingest(site_of(two_racks()), {}).ledger
    ledger.change_site({"node": n})
    for k in range(n):
        ledger.claim(ledger.account(f"agent n{k}", outside=True), "node", ("power_w",), (k, 1), T)
    numbers = ledger.carriers_of("node.power_w")
    assert numbers is not None
    assert ledger.numbered(int(numbers[n - 1])).name == f"agent n{n - 1}"


def test_two_sources_of_the_same_signals_are_told_and_one_after_the_other_is_not(ingest: Ingest) -> None:
    first, second, heir = ingest.of("exporter a"), ingest.of("exporter b"), ingest.of("exporter c")
    for k in range(300):
        first.stage([power(0, T + k * NS)], T + k * NS)
        second.stage([power(0, T + k * NS)], T + k * NS)
    now_ns = T + 300 * NS
    (line,) = ingest.ledger.overview(now_ns)
    assert (line["outcome"], line["example"]) == ("twice", "rack.power_w")
    assert "exporter" in line["why"]
    for k in range(300, 900):
        heir.stage([power(0, T + k * NS)], T + k * NS)
    assert not [r for r in ingest.ledger.overview(T + 900 * NS) if r["outcome"] == "twice"]


def test_the_ledger_knows_who_carries_a_cell(ingest: Ingest) -> None:
    agent, meter = ingest.of("agent lab/h/r1/node0", outside=True), ingest.of("BMS gateway lab", outside=True)
    block = Block("gpu", 0, ("temp_c", "power_w"), np.full((2, 4), 40.0, np.float32), (), np.empty((0, 4)), T)
    agent.stage([block], T)
    meter.stage([power(1, T)], T)
    column = ingest.ledger.carriers_of("gpu.temp_c")
    assert column is not None
    assert {ingest.ledger.numbered(n).name if n >= 0 else "" for n in column[:4].tolist()} == {agent.name}
    assert (column[4:] == -1).all()
    assert ingest.ledger.carriers_of("gpu.util_pu") is None
    assert row(ingest, agent.name, T)["carries"] == {"gpu": {"entities": 4, "signals": 2}}
    ingest.ledger.change_site(ingest.site.sizes)
    assert ingest.ledger.carriers_of("gpu.temp_c") is None
    agent.stage([block], T + NS)
    assert row(ingest, agent.name, T)["carries"] == {"gpu": {"entities": 4, "signals": 2}}


def test_values_out_of_range_are_told_of_the_source_that_brought_them(ingest: Ingest) -> None:
    scrape = ingest.of("exporter http://node0:9400/metrics")
    block = Block("gpu", 2, ("temp_c",), np.array([[40.0, 3130.0]], np.float32), (), np.empty((0, 2)), T)
    scrape.stage([block], T)
    ingest.take(0, T, 1.0)
    (line,) = ingest.ledger.overview(T)
    assert line["source"] == scrape.name
    assert line["why"].startswith("gpu.temp_c out of range: expected ")
    assert line["example"] == f"{ingest.site.name('gpu', 3)}: 3130"
    assert "unit" in line["remedy"]


def test_strangers_hide_no_real_source_and_their_counts_are_kept(ingest: Ingest) -> None:
    most = ledger_module.MAX_STRANGERS
    ingest.of("agent real", outside=True).stage([power(0, T)], T)
    ingest.of("exporter configured")
    for n in range(3 * most):
        ingest.of(f"agent invented{n}", outside=True).skip(
            "Frame", "not of the site", f"topic/{n}", "name it"
        )
    names = {a.name for a in ingest.ledger.listing(T)}
    assert {"agent real", "exporter configured", f"agent invented{3 * most - 1}"} <= names
    assert len(names) == most + 3
    (line,) = ingest.ledger.overview(T)
    assert (line["count"], line["sources"]) == (3 * most, most + 1)
    assert ingest.counts["ignored"] == 3 * most


def test_reasons_of_one_source_are_bounded_and_differ_by_kind_not_by_value(ingest: Ingest) -> None:
    account = ingest.of("topic plant/x")
    for n in range(100):
        account.reject(f"plant/x/{n}", f"temp: '{n} F'; expected a number")
    (line,) = account.lines.values()
    assert (line.count, line.example) == (100, "plant/x/99")
    for n in range(100):
        account.skip("a" * n, "why")
    assert len(account.lines) <= ledger_module.MAX_STRANGERS
    assert sum(x.count for x in account.lines.values()) == 200


def test_routine_is_counted_and_not_shown_first(ingest: Ingest) -> None:
    ingest.of("topic IT/v1").skip("own", "a request of a daemon")
    assert ingest.counts["ignored"] == 1
    assert not ingest.ledger.overview(T)


def test_who_carries_what_is_kept_over_a_restart(ingest: Ingest, tmp_path: Path) -> None:
    scrape, agent = ingest.of("exporter http://n0:9400"), ingest.of("agent lab/h/r1/node0", outside=True)
    old = ingest.of("exporter http://gone:9400")
    day_ns = round(carrier_file.KEPT_S * NS)
    old.stage([Reading("rack", 1, "flow_lpm", 80.0, T - 2 * day_ns)], T - 2 * day_ns)
    scrape.stage([power(0, T)], T)
    agent.stage([Reading("gpu", 2, "temp_c", 50.0, T)], T)
    site = ingest.site.spec_hash
    carrier_file.carrier_job(ingest.ledger, tmp_path, site)()
    after = Ingest(ingest.site, {}).ledger
    carrier_file.resume_carriers(after, tmp_path, site, T + NS)
    assert after.carried_by([scrape.name])[1] == after.carried_by([agent.name])[1] == 1
    assert after.carried_by([old.name]) == ({}, 0)
    assert after.publishers() == [agent.name]
    assert after.account(scrape.name).last_ns == T
    other = Ingest(ingest.site, {}).ledger
    carrier_file.resume_carriers(other, tmp_path, "another site", T + NS)
    assert other.publishers() == []
    path = tmp_path / carrier_file.NAME
    before = msgspec.msgpack.decode(path.read_bytes()) | {"format": 1}  # its sources had other names
    path.write_bytes(msgspec.msgpack.encode(before))
    carrier_file.resume_carriers(other, tmp_path, site, T + NS)
    assert other.publishers() == []


def test_a_clock_that_is_behind_is_known_after_a_restart_as_far_as_its_source_is(
    ingest: Ingest, tmp_path: Path
) -> None:
    for k in range(40):
        now_ns = T + k * NS
        ingest.of("agent late", outside=True).stage([power(0, now_ns - 3600 * NS)], now_ns)
        ingest.of("agent right", outside=True).stage([power(1, now_ns - 1)], now_ns)
    carrier_file.carrier_job(ingest.ledger, tmp_path, ingest.site.spec_hash)()
    after = Ingest(ingest.site, {})
    carrier_file.resume_carriers(after.ledger, tmp_path, ingest.site.spec_hash, now_ns)
    assert after.ledger.offsets_ns() == {"agent late": 3600 * NS}
    for name, rack, back_s in (("agent late", 0, 3600), ("agent right", 1, 0)):
        after.of(name).stage([power(rack, now_ns + NS - back_s * NS)], now_ns + NS)
    frame = after.take(0, now_ns + NS, 1.0)
    assert {t for update in frame.updates for t in update.t_ns.tolist()} == {now_ns + NS}
    assert row(after, "agent late", now_ns)["clock_corrected_s"] == 3600.0
    old = msgspec.msgpack.decode((tmp_path / carrier_file.NAME).read_bytes())
    del old["back_ns"]  # of a version before
    (tmp_path / carrier_file.NAME).write_bytes(msgspec.msgpack.encode(old))
    before = Ingest(ingest.site, {})
    carrier_file.resume_carriers(before.ledger, tmp_path, ingest.site.spec_hash, now_ns)
    assert before.ledger.publishers() == ["agent late", "agent right"]
    assert before.ledger.offsets_ns() == {}


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"{}", None])
def test_a_carrier_file_that_cannot_be_read_is_none(
    ingest: Ingest, tmp_path: Path, data: bytes | None
) -> None:
    if data is not None:
        (tmp_path / carrier_file.NAME).write_bytes(data)
    carrier_file.resume_carriers(ingest.ledger, tmp_path, ingest.site.spec_hash, T)
    assert ingest.ledger.publishers() == []


@pytest.mark.parametrize(
    ("delays_s", "told"),
    [
        ([0.1] * 20 + [10.1] * 8, True),  # a way that became slow
        ([0.1] * 20 + [10.1] * 7, False),
        ([10.1] * 60, False),  # a publisher that gathers has always come as late
        ([0.1] * 20 + [12.0 - 0.4 * k for k in range(29)], False),  # a backlog that drains
    ],
)
def test_a_delay_that_has_grown_is_told(ingest: Ingest, delays_s: list[float], told: bool) -> None:
    account = ingest.of("agent a")
    for k, delay_s in enumerate(delays_s):
        now_ns = T + k * NS + round(delay_s * NS)
        account.stage([power(0, T + k * NS)], now_ns)
    lines = [line.why for line in account.worth_a_line() if line.what == "delay"]
    assert lines == ["its messages arrive 10.1 s after their timestamps, later than usual"] * told
