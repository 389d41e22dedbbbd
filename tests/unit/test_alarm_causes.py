"""Outages get the names of their sources, and what a dead link explains follows from its alarm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.contracts import Finding
from twin.daemon.alarm_causes import LINK, AlarmCauses
from twin.daemon.source_ledger import SourceLedger

FIRST = np.arange(144) < 72  # the GPUs of the first rack


def silenced() -> Twin:
    """Two racks, of whose GPUs those of the first fell silent."""
    twin = Twin(two_racks())
    twin.run(30, {"gpu.temp_c": 50.0})
    twin.run(20, {"gpu.temp_c": np.where(FIRST, np.nan, 50.0)})
    return twin


def named(twin: Twin, causes: AlarmCauses, *sources: str) -> Finding:
    ledger = SourceLedger(twin.site.sizes, lambda *_: (0, 0), lambda: twin.now_ns)
    share = 72 // len(sources)
    for i, source in enumerate(sources):
        account = ledger.account(source)
        account.last_ns = twin.now_ns - 20 * 10**9
        ledger.claim(account, "gpu", ["temp_c"], (i * share, share), twin.now_ns)
    ledger.claim(ledger.account("dcgm of r2"), "gpu", ["temp_c"], (72, 72), twin.now_ns)
    outages = twin.engine.diagnosis.silence.outages
    (outage,) = (
        f
        for f in causes.named(twin.decision.findings, outages, ledger, twin.site)
        if f.id.startswith("silence/")
    )
    return outage


@pytest.fixture(scope="module")
def twin() -> Twin:
    return silenced()


def test_one_source_gives_its_name_to_the_outage(twin: Twin) -> None:
    found = named(twin, AlarmCauses(), "bms gw-1")
    assert found.title.startswith("No data from bms gw-1 since ")
    assert found.title.endswith(": 72 signals of rack lab/h/r1")
    assert "carried by bms gw-1" in found.evidence


def test_many_sources_are_counted_and_the_place_stays_the_name(twin: Twin) -> None:
    found = named(twin, AlarmCauses(), *(f"agent lab/h/r1/node{i}" for i in range(18)))
    assert found.title.startswith("No data from rack lab/h/r1 since ")
    assert found.evidence[1].endswith(" and 12 more")


@pytest.mark.parametrize(
    ("source", "cause"), [("agent lab/h/r1/node0", LINK), ("scrape http://x:9400", None)]
)
def test_what_comes_over_a_link_follows_from_its_alarm(twin: Twin, source: str, cause: str | None) -> None:
    causes = AlarmCauses()
    found = named(twin, causes, source)
    relations = causes.of(["to-agents", "heartbeat"])
    assert relations.get(found.id) == cause
    assert relations["part/heartbeat"] == relations["sink/agents"] == relations["part/to-agents"] == LINK


def test_silent_signals_are_listed_on_request_with_their_ages(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for _ in range(30):
            pod.tick({"gpu.temp_c": 50.0})
        for _ in range(20):
            pod.tick({"gpu.temp_c": np.where(FIRST, np.nan, 50.0)})
            await asyncio.sleep(0)
        status, tree = await pod.ask("GET", "/api/v1/alarms/silence/lab/h/r1/children?limit=2")
        assert status == 200
        assert (tree["total"], tree["next_offset"]) == (72, 2)
        first = tree["silent"][0]
        assert (first["table"], first["name"]) == ("gpu", "lab/h/r1/node0/gpu0")
        assert first["age_s"]["temp_c"] == 20.0
        assert (await pod.ask("GET", "/api/v1/alarms/silence/none/children"))[0] == 404
        _, page = await pod.ask("GET", "/api/v1/summary")
        assert page["heard"]["gpu"]["silent"] == 72
        assert page["heard"]["gpu"]["heard"] == 72, "all are heard only while nothing is silent"
        assert [r["silent_s"] for r in page["racks"]] == [20.0, None]

    serve(tmp_path, check)
