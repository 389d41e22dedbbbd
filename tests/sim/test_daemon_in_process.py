"""The daemon in the loop of the test: a reload while a tick is in flight, `act` over the embedded broker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import two_racks
from tests.support.patience import PATIENCE_S
from twin.api.page import DecisionQuestion, DecisionSearch
from twin.catalogue import NS, ConfigError, TwinError
from twin.cli.main import main
from twin.config import Loaded, load_config, make_engine
from twin.contracts import JOURNAL_KINDS, AlarmRecord, CommandBatch, Decision, Finding, ReloadRecord
from twin.daemon import Daemon, SdNotify, load_checked
from twin.daemon.alarms import AlarmBook
from twin.engine import Engine
from twin.run import OPEN, TraceReader, closed_segments, journal_lines, open_recorded, replay_frames
from twin.site import build_site
from twin.telemetry import AuthorityChanged, Reading, events as ev

pytestmark = pytest.mark.slow
GUARDED = {"thermal_guard": {"authority": "act"}}


def configured(folder: Path, policies: dict[str, Any], **settings: Any) -> Loaded:
    """The configuration of a small daemon behind the embedded broker."""
    (folder / "site.yaml").write_text(yaml.safe_dump(two_racks(policies=policies)))
    config = {"site": "site.yaml", "broker": "embedded", "api": None, "tick_s": 0.2,
              "quotas": {"journal_reserve_mb": 1}, "history": {"embedded": False}} | settings  # fmt: skip
    (folder / "racktwin.yaml").write_text(yaml.safe_dump(config))
    return load_config(folder / "racktwin.yaml")


class Heard:
    """A sink that remembers under which name each command left."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.left = daemon, []  # type: ignore[var-annotated]

    def hook(self) -> None:
        for flow in self.daemon.services.dispatchers:
            sink: Any = flow.sink
            if sink.name == "agents":
                site = sink._site

                async def apply(commands: tuple[CommandBatch, ...], site: Any = site) -> None:
                    self.left += [site.name("gpu", int(i)) for c in commands for i in c.index]

                sink.apply = apply


def test_commands_of_a_tick_in_flight_never_meet_another_site(tmp_path: Path) -> None:
    """The journal is slow, and the site changes meanwhile: every command names what the engine meant."""
    config = configured(tmp_path, GUARDED, simulated=True)

    async def scene() -> tuple[list[str], list[str]]:
        daemon, loop = Daemon(config, SdNotify()), asyncio.get_running_loop()
        heard, in_flight = Heard(daemon), asyncio.Event()
        meant: list[str] = []
        write, send = daemon._journal, daemon.services.send

        def journal(decision: Decision, notes: Any) -> int:
            if any(not c.renewal for c in decision.commands):
                loop.call_soon_threadsafe(in_flight.set)
                time.sleep(1.0)
            return write(decision, notes)

        def sent(commands: tuple[CommandBatch, ...]) -> None:
            site = daemon.engine.site
            meant.extend(site.name("gpu", int(i)) for c in commands for i in c.index)
            send(commands)

        daemon._journal, daemon.services.send = journal, sent  # type: ignore[method-assign]
        task = asyncio.create_task(daemon.run())
        while not daemon.live.ready:
            await asyncio.sleep(0.02)
        for racks in ("r[0-1]", "r[1-2]"):
            (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks(racks=racks, policies=GUARDED)))
            in_flight.clear()
            heard.hook()
            hot(daemon)
            async with asyncio.timeout(20):
                await in_flight.wait()
            assert await daemon.reload("test") == []
            heard.hook()
            await asyncio.sleep(1.5)
        daemon.stop()
        await task
        return heard.left, meant

    left, meant = asyncio.run(scene())
    assert left, "something was commanded"
    assert set(left) <= set(meant)


def test_lines_in_memory_bear_the_numbers_of_the_journal_through_its_segments(tmp_path: Path) -> None:
    """Decisions, notes between ticks, and the manifest with which each segment begins."""
    config = configured(tmp_path, GUARDED, simulated=True)

    async def scene() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        daemon = Daemon(config, SdNotify())
        task = asyncio.create_task(daemon.run())
        while not daemon.live.ready:
            await asyncio.sleep(0.02)
        folder = Path(daemon.live.run_dir)
        assert daemon.recorder.journal is not None
        daemon.recorder.journal.segment_bytes = 4000
        while len(closed_segments(folder)) < 3:
            hot(daemon)
            daemon.live.note(AlarmRecord(what="acknowledged", id="x", author="ada"))
            await asyncio.sleep(0.1)
        asked = DecisionQuestion(kinds=frozenset(JOURNAL_KINDS), limit=1000)
        page = await DecisionSearch().page(daemon.live, asked)
        daemon.stop()
        await task
        lines = [json.loads(line) for line in journal_lines(folder / OPEN)]
        return page["decisions"], lines

    rows, lines = asyncio.run(scene())
    placed = [row for row in rows if row["at"] is not None]
    assert [(r["at"], r["kind"], r["tick"]) for r in placed] == [
        (f"{line['now_ns']}.{line['seq']}", line["kind"], line["tick"])
        for line in lines[::-1]
        if line["seq"] <= int(placed[0]["at"].partition(".")[2])
    ][: len(placed)]
    kinds = [row["kind"] for row in placed]
    assert kinds.count("manifest") >= 3
    assert {"alarm", "event"} & {*kinds}


def hot(daemon: Daemon) -> None:
    """A node of the second rack is too hot."""
    site, now_ns = daemon.ingest.site, time.time_ns()
    name = site.names["rack"][1]
    for gpu in range(4):
        entity = site.entity("gpu", f"{name}/node3/gpu{gpu}")
        assert entity is not None
        daemon.ingest.stage([Reading("gpu", entity, "temp_c", 95.0, now_ns)], now_ns)


def test_act_is_refused_over_the_embedded_broker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`simulated: true` for the simulated pod"):
        load_checked(configured(tmp_path, GUARDED))
    assert main(["daemon", "check", "--config", str(tmp_path / "racktwin.yaml")]) == 78

    async def asked() -> str | None:
        daemon = Daemon(configured(tmp_path, {}), SdNotify())
        task = asyncio.create_task(daemon.run())
        while not daemon.live.ready:
            await asyncio.sleep(0.02)
        why = daemon.live.veto(AuthorityChanged(author="ann", policy="thermal_guard", authority="act"))
        daemon.stop()
        await task
        return why

    assert "the embedded broker knows no identities" in (asyncio.run(asked()) or "")


def test_input_on_which_the_engine_fails_ends_the_daemon_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start leaves it out, says so by an alarm and in the journal, and does so if it comes again."""
    config = configured(tmp_path, GUARDED, simulated=True)
    heed = Engine._heed

    def failing(self: Engine, events: Any, records: Any) -> Any:
        if any(e.id == "poison" for e in events):
            raise RuntimeError("index 7 is out of bounds")
        return heed(self, events, records)

    monkeypatch.setattr(Engine, "_heed", failing)
    poison = ev.BudgetGranted(id="poison", author="ada", feeder="x", budget_w=1.0, expires_ns=1)

    async def dies() -> Daemon:
        daemon = Daemon(config, SdNotify())
        task = asyncio.create_task(daemon.run())
        while not daemon.live.ready:
            await asyncio.sleep(0.02)
        daemon.put([poison])
        with pytest.raises(TwinError, match="index 7 is out of bounds"):
            await task
        return daemon

    async def lives() -> tuple[Daemon, list[str]]:
        daemon = Daemon(config, SdNotify())
        task = asyncio.create_task(daemon.run())
        daemon.put([poison])
        while not daemon.live.counts.get("input_left_out") or daemon.tick_no < first.tick_no + 4:
            await asyncio.sleep(0.02)
        alarm = daemon.alarms.alarms["quarantine"]
        daemon.stop()
        await task
        return daemon, [alarm.severity, *alarm.evidence]

    first = asyncio.run(dies())
    folder = first.opened.folder
    assert not list(folder.glob("snapshot-*.rts"))  # of an engine that is half in a tick
    last, (severity, again, text) = asyncio.run(lives())
    assert severity == "critical"
    assert again.startswith("1 more")
    assert f"tick {first.tick_no}: left out event BudgetGranted poison" in text
    lines = [json.loads(line) for line in journal_lines(folder / OPEN)]
    assert [line["body"]["poisoned"] for line in lines if line["kind"] == "quarantine"] == [first.tick_no]
    assert sum(line["kind"] == "end" for line in lines) == 1
    engine, _, since = open_recorded(folder, lambda s: make_engine(build_site(s)))
    outcome = replay_frames(engine, TraceReader(folder), folder / OPEN, since=since)
    assert outcome.damage == []
    assert engine.checksum() == last.engine.checksum()


def reloading(tmp_path: Path, scene: Callable[[Daemon], Awaitable[None]], **more: Any) -> None:
    """Run a scene beside a small daemon that ticks."""
    config = configured(tmp_path, GUARDED, simulated=True, **more)

    async def run() -> None:
        daemon = Daemon(config, SdNotify())
        task = asyncio.create_task(daemon.run())
        while not daemon.live.ready:
            await asyncio.sleep(0.02)
        try:
            await scene(daemon)
        finally:
            daemon.stop()
            await task

    asyncio.run(run())


def test_a_change_that_comes_while_a_reload_is_under_way_is_read_as_well(tmp_path: Path) -> None:
    async def scene(daemon: Daemon) -> None:
        async with daemon.tick_lock:  # the first one waits here, having read the files
            first = asyncio.create_task(daemon.reload("first"))
            await asyncio.sleep(0.5)
            (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks(racks="r[3-4]", policies=GUARDED)))
            others = [asyncio.create_task(daemon.reload(f"SIGHUP {i}")) for i in range(50)]
            await asyncio.sleep(0.1)
        assert await first == []
        assert [await other for other in others] == [[]] * 50
        assert daemon.ingest.site.names["rack"] == ["lab/h/r3", "lab/h/r4"]
        reloads = [line.record for line in daemon.live.lines if isinstance(line.record, ReloadRecord)]
        assert len(reloads) == 2

    reloading(tmp_path, scene)


def test_a_reload_that_fails_is_refused_or_said_to_be_in_force_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(daemon: Daemon) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("no such thing")

        before = daemon.loaded
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks(racks="r[3-4]", policies=GUARDED)))
        with monkeypatch.context() as patch:
            patch.setattr(daemon.services, "prepare", fail)
            assert await daemon.reload("ada") == ["ValueError: no such thing"]
        assert daemon.loaded is before
        assert daemon.ingest.site.names["rack"] == ["lab/h/r1", "lab/h/r2"]
        await seen(daemon, "A new configuration was refused")
        with monkeypatch.context() as patch:
            patch.setattr(daemon.services, "start_links", fail)
            with pytest.raises(TwinError, match="in force only in part: ValueError: no such thing"):
                await daemon.reload("ada")
        assert daemon.ingest.site.names["rack"] == ["lab/h/r3", "lab/h/r4"]
        await seen(daemon, "A new configuration is in force only in part")
        assert await daemon.reload("ada") == []  # it changes nothing, and starts nothing
        await asyncio.sleep(0.5)
        await seen(daemon, "A new configuration is in force only in part")

    reloading(tmp_path, scene)


async def seen(daemon: Daemon, title: str) -> None:
    """Wait until the alarm of a reload has this title."""
    async with asyncio.timeout(PATIENCE_S):
        while title not in [a.title for a in daemon.alarms.active() if a.id == "reload"]:
            await asyncio.sleep(0.05)


def test_a_reload_takes_renewed_files_of_an_unchanged_configuration(tmp_path: Path) -> None:
    """Tokens, certificates and mappings are replaced under their names."""
    for name in ("hook.token", "exporter.token"):
        (tmp_path / name).write_text("first")
    (tmp_path / "own.yaml").write_text("extends: dcgm\n")
    more = {
        "notify": [{"kind": "webhook", "url": "http://127.0.0.1:9/x", "token_file": "hook.token"}],
        "scrapes": [{"url": "http://127.0.0.1:9/metrics", "map": "own.yaml", "token_file": "exporter.token"}],
    }

    async def scene(daemon: Daemon) -> None:
        services = daemon.services

        async def renewed() -> tuple[bool, bool]:
            links, notifier = services.links, services.notifier
            assert await daemon.reload("ada") == []
            return services.links is not links, services.notifier is not notifier

        assert await renewed() == (False, False)
        (tmp_path / "exporter.token").write_text("second")
        assert await renewed() == (True, False)
        (tmp_path / "hook.token").write_text("second")
        assert await renewed() == (False, True)
        (tmp_path / "own.yaml").write_text("extends: dcgm\nnames: {n1: lab/h/r1/node0}\n")
        assert await renewed() == (True, False)
        assert await renewed() == (False, False)

    reloading(tmp_path, scene, **more)


def test_alarms_that_wait_for_a_receiver_are_sent_to_the_corrected_address(tmp_path: Path) -> None:
    def notify(*urls: str) -> list[dict[str, str]]:
        return [{"kind": "webhook", "url": url} for url in urls]

    async def scene(daemon: Daemon) -> None:
        finding = Finding("heat/lab/h/r1", "warning", "Heat is off", ("lab/h/r1",), (), 0.99, "Look.")
        (change,) = AlarmBook(tmp_path / "book").update([finding], NS)
        daemon.services.notifier.offer([change])
        first, other = daemon.services.notifier.receivers
        await asyncio.sleep(0.2)
        tree = yaml.safe_load((tmp_path / "racktwin.yaml").read_text())
        urls = ("http://127.0.0.1:7/kept", "http://127.0.0.1:8/right", "http://127.0.0.1:8/more")
        (tmp_path / "racktwin.yaml").write_text(yaml.safe_dump(tree | {"notify": notify(*urls)}))
        assert await daemon.reload("ada") == []
        kept, right, more = daemon.services.notifier.receivers
        assert [r.target.url for r in (first, other)] == ["http://127.0.0.1:9/wrong", urls[0]]
        assert (kept.pending, right.pending, more.pending) == (other.pending, first.pending, 0)
        assert first.pending > 0

    reloading(tmp_path, scene, notify=notify("http://127.0.0.1:9/wrong", "http://127.0.0.1:7/kept"))
