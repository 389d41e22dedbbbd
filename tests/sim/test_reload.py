"""A reload takes a configuration over whole, between two ticks, or leaves everything as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import Mosquitto, mosquitto
from twin.config import load_config
from twin.contracts import CommandBatch, Decision
from twin.daemon import Daemon, SdNotify
from twin.telemetry import Reading

pytestmark = pytest.mark.slow
Server = Callable[..., Path]
GUARDED = {"thermal_guard": {"authority": "act"}}


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


def parts(daemon: RunningDaemon) -> dict[str, str]:
    return {p["name"]: p["state"] for p in daemon.get("/api/v1/parts")["parts"]}


def test_what_is_refused_is_refused_again_and_nothing_stops(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon:
        daemon.until(lambda: parts(daemon).get("mqtt") == "running")
        before, good = parts(daemon), dict(daemon.config)
        wrong: list[dict[str, Any]] = [
            {"broker": {**good["broker"], "maps": {"telegraf/#": "no-such-map"}}},
            {"notify": [{"kind": "webhook", "url": "https://h", "tls": {"ca_file": "missing.pem"}}]},
            {"history": {"influx": {"url": "http://h", "token_file": "missing"}}},
            {"scrapes": [{"url": "http://h", "map": "no-such-map"}]},
        ]
        for change in wrong:
            daemon.config = {**good, **change}
            daemon.write_config()
            for _ in range(2):
                status, answer = daemon.ask("POST", "/api/v1/reload", {"reason": "a test"})
                assert status == 409, (change, answer)
                assert parts(daemon) == before, change
        daemon.config = good
        daemon.write_config()
        status, answer = daemon.ask("POST", "/api/v1/reload", {"reason": "a test"})
        assert status == 200, answer
        assert parts(daemon) == before
        daemon.until(lambda: not [a for a in daemon.get("/api/v1/alarms")["alarms"] if a["id"] == "reload"])


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
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks(policies=GUARDED)))
    config = {"site": "site.yaml", "broker": "embedded", "simulated": True, "api": None, "tick_s": 0.2,
              "quotas": {"journal_reserve_mb": 1}, "history": {"embedded": False}}  # fmt: skip
    (tmp_path / "racktwin.yaml").write_text(yaml.safe_dump(config))

    async def scene() -> tuple[list[str], list[str]]:
        daemon, loop = Daemon(load_config(tmp_path / "racktwin.yaml"), SdNotify()), asyncio.get_running_loop()
        heard, in_flight = Heard(daemon), asyncio.Event()
        meant: list[str] = []
        write, send = daemon._journal, daemon.services.send

        def journal(decision: Decision, notes: Any) -> None:
            if any(not c.renewal for c in decision.commands):
                loop.call_soon_threadsafe(in_flight.set)
                time.sleep(1.0)
            write(decision, notes)

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


def hot(daemon: Daemon) -> None:
    """A node of the second rack is too hot."""
    site, now_ns = daemon.ingest.site, time.time_ns()
    name = site.names["rack"][1]
    for gpu in range(4):
        entity = site.entity("gpu", f"{name}/node3/gpu{gpu}")
        assert entity is not None
        daemon.ingest.stage([Reading("gpu", entity, "temp_c", 95.0, now_ns)], now_ns)
