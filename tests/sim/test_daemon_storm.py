"""The daemon as a process, killed at any moment and left alone by its broker and its history server.

Each with a short form for every day and a long one for the storm (`make storm`).
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paho.mqtt.client as paho
import pytest

from tests.support.agent_pod import Pod, pod
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.storm_watch import (
    LEASE_S,
    Leases,
    Wire,
    alarms_of,
    lines_of,
    numbers_of,
    scald,
    ticks_of,
    until,
)
from tests.support.victoriametrics import Victoria
from twin.config import make_engine
from twin.contracts import Decision
from twin.engine import Engine
from twin.run import TraceReader, replay_frames, resume, verify_journal
from twin.run.storage import read_holes
from twin.site import SiteSpec, build_site
from twin.telemetry import Frame

Server = Callable[..., Path]
short, long = pytest.mark.slow, pytest.mark.storm


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


class Decided:
    """All commands of a run that is made again."""

    def __init__(self) -> None:
        self.commands: set[tuple[int, int, float, int]] = set()

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """See Observer."""
        for c in decision.commands:
            for number, value in zip(c.command.tolist(), c.value.tolist(), strict=True):
                self.commands.add((c.epoch, number, value, c.expires_ns))


def made_again(run: Path) -> tuple[Engine, Decided]:
    """The run from its first frame, byte by byte against its journal: Divergence where they differ."""
    reader = TraceReader(run)
    spec = msgspec.json.decode(reader.first_header().spec, type=SiteSpec)
    engine, decided = make_engine(build_site(spec)), Decided()
    outcome = replay_frames(engine, reader, run / "journal.jsonl", (decided,))
    assert not outcome.damage
    assert not read_holes(run)
    assert outcome.compared_lines > 0
    return engine, decided


class Killer:
    """Kills a daemon at drawn moments and judges how it goes on."""

    def __init__(self, daemon: RunningDaemon, racks: Pod, wire: Wire, tmp_path: Path, seed: int) -> None:
        self.daemon, self.racks, self.wire, self.tmp_path = daemon, racks, wire, tmp_path
        self.life_s = 3.0
        self.rng = np.random.default_rng(seed)
        self.in_start = self.tails = self.in_flight = 0

    def live(self, seconds: float) -> int:
        """Let it run, heat coming and going; the last tick that it told."""
        told, end = -1, time.monotonic() + seconds
        flip = time.monotonic()
        while time.monotonic() < end:
            told = max(told, int(ticks_of(self.daemon)["tick"]))
            if time.monotonic() >= flip:
                flip = time.monotonic() + 0.5
                node = int(self.rng.integers(0, 36))
                if self.rng.random() < 0.6:
                    scald(self.racks, node)
                else:
                    self.racks.cool(node)
        return told

    def once(self, deep: bool) -> None:
        """A life, a kill, sometimes one in the start behind it, and what is there then."""
        run = self.daemon.run_folder
        told = self.live(float(self.rng.uniform(0.3, self.life_s)))
        self.daemon.kill()
        if self.rng.random() < 0.4:
            self.daemon.start(wait=False)
            time.sleep(float(self.rng.uniform(0.2, 1.5)))
            self.daemon.kill()
            self.in_start += 1
        sent = {(a.epoch, a.command) for a in list(self.wire.asked)}
        journal = lines_of(run)
        assert sent <= numbers_of(journal), "a command left before it was in the journal"
        journaled = max(line["tick"] for line in journal)
        if deep:
            self._tail(run)
        self.daemon.start()
        resumed = [x["body"]["resumed"] for x in lines_of(run, "manifest") if "resumed" in x["body"]][-1]
        assert resumed["lost"] is None, resumed
        assert told <= resumed["last_tick"], (told, resumed)
        # A trace may know of the tick in flight, and the one of a start that was killed.
        assert journaled <= resumed["last_tick"] <= journaled + 3, (journaled, resumed)
        self.in_flight += resumed["last_tick"] > journaled
        self.tails += resumed["snapshot_tick"] >= 0 and resumed["replayed"] > 0
        assert ticks_of(self.daemon)["tick"] > resumed["last_tick"]
        verdict = verify_journal(run / "journal.jsonl")
        assert verdict.fault is None or verdict.fault.startswith("the last line"), verdict

    def _tail(self, run: Path) -> None:
        """Snapshot and tail give what the whole run gives."""
        copy = self.tmp_path / "copy"
        shutil.copytree(run, copy)
        resumed = resume(copy, lambda spec: make_engine(build_site(spec)))
        assert resumed.snapshot_tick >= 0, "a snapshot takes part"
        whole, _ = made_again(copy)
        assert whole.state.tick == resumed.engine.state.tick
        assert whole.checksum() == resumed.engine.checksum()
        shutil.rmtree(copy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "seed"), [pytest.param(3, 1, marks=short), pytest.param(50, 2, marks=long)]
)
def test_killed_at_any_moment_it_goes_on_where_it_was(
    broker: Mosquitto, tmp_path: Path, kills: int, seed: int
) -> None:
    quotas = {"journal_reserve_mb": 1, "journal_segment_mb": 1}
    with (
        running(tmp_path / "d", broker.port, snapshot_every_s=2, quotas=quotas) as daemon,
        pod(broker.port) as racks,
        Wire(broker.port) as wire,
        Leases(racks) as leases,
    ):
        scald(racks, 0)
        daemon.until(lambda: leases.running() > 0, what="the first leases")
        killer = Killer(daemon, racks, wire, tmp_path, seed)
        killer.life_s = 1.5 if kills < 10 else 3.0
        killer.live(1.0)
        for number in range(kills):
            killer.once(deep=number % max(2, kills // 5) == 1)
        scald(racks, 35)
        daemon.until(lambda: racks.caps(35).max() < 1200.0, what="caps after the last kill")
        assert killer.tails > 0
        if kills > 10:
            assert killer.in_start > 0
            daemon.kill()
            until(leases.lapsed, LEASE_S + 2, "all caps at their safe value")
            assert leases.running() == 0
            daemon.start()
        assert daemon.stop() == 0
        asked = {(a.epoch, a.command, a.value, a.expires_ns) for a in wire.asked}
        wire.check()
        assert leases.looks > 50
        assert leases.outlived == []
    assert verify_journal(daemon.run_folder / "journal.jsonl").fault is None
    _, decided = made_again(daemon.run_folder)
    assert len(asked) > 10
    assert asked <= decided.commands, "what left was decided, renewals too"
    print(f"{kills} kills: {len(asked)} commands on the wire, {killer.in_flight} ticks in flight, "
          f"{killer.tails} tails, {killer.in_start} killed in the start")  # fmt: skip


POINT = "Rack/RackLiquidSupplyTemperature"


class Bms:
    """A BMS that tells the supply temperature of both racks; its metadata is retained, and told once."""

    def __init__(self, port: int) -> None:
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, "a-bms", clean_session=False)
        self.client.reconnect_delay_set(1, 1)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.base_c = 30.0
        for rack in ("r1", "r2"):
            body = {"objectType": "Rack", "pointType": "RackLiquidSupplyTemperature",
                    "rackLocationId": rack, "engUnit": "degC"}  # fmt: skip
            told = self.client.publish(f"BMS/v1/PUB/Metadata/{POINT}/{rack}", json.dumps(body), 1, True)
            told.wait_for_publish(10)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            if not self.client.is_connected():
                continue
            for rack in ("r1", "r2"):
                body = {"value": self.base_c, "timestamp": time.time_ns() // 10**6, "quality": 1}
                self.client.publish(f"BMS/v1/PUB/Value/{POINT}/{rack}", json.dumps(body))

    def heard_by(self, daemon: RunningDaemon, base_c: float) -> Callable[[], bool]:
        """Publish another temperature. Return a check that the daemon has it from both racks."""
        self.base_c = base_c

        def heard() -> bool:
            rows = daemon.get("/api/v1/state/rack?signals=supply_temp_c")["signals"]["supply_temp_c"]
            return [round(v or 0.0, 1) for v in rows["value"]] == [base_c, base_c]

        return heard

    def close(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(5)
        self.client.disconnect()
        self.client.loop_stop()


def ticked(before: dict[str, Any], after: dict[str, Any], away_s: float) -> None:
    """Ticks went on while something was away; their times count in the storm, on a machine of its own."""
    assert after["count"] + after["skipped"] - before["count"] >= away_s * 0.9 - 2
    assert after["skipped"] <= 0.1 * away_s + 1
    if away_s > LEASE_S:
        assert after["skipped"] == 0
        assert max(after["took_s_p99"], after["late_s_p99"]) < 0.5, after


def good(daemon: RunningDaemon, key: str) -> int:
    """Count the entities that have a good value of a signal."""
    table, _, name = key.partition(".")
    column = daemon.get(f"/api/v1/state/{table}?signals={name}&limit=1000")["signals"][name]
    return sum(q.lower() == "good" for q in column["quality"])


def learning(daemon: RunningDaemon) -> int:
    """Entities whose cadence is not known yet."""
    return sum(table["learning"] for table in daemon.get("/api/v1/summary")["heard"].values())


@pytest.mark.long
@pytest.mark.parametrize("away_s", [pytest.param(8.0, marks=short), pytest.param(60.0, marks=long)])
def test_without_its_broker_it_ticks_on_and_takes_up_again(
    broker: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    if away_s < LEASE_S:  # agents wait up to 30 s between two tries, as long as they have been away or longer
        monkeypatch.setattr("racktwin_agent.link.MAX_DELAY_S", 1.0)
    with (
        running(tmp_path / "d", broker.port) as daemon,
        pod(broker.port) as racks,
        Wire(broker.port) as wire,
        Leases(racks) as leases,
    ):
        bms = Bms(broker.port)
        try:
            daemon.until(lambda: good(daemon, "gpu.temp_c") == 144, what="all GPUs heard")
            daemon.until(bms.heard_by(daemon, 30.0), what="values of the BMS")
            if away_s > LEASE_S:  # silence of what is still learned is waited for longer than this
                daemon.until(lambda: learning(daemon) == 0, "cadences")
            scald(racks, 0)
            daemon.until(lambda: leases.running() == 4, what="leases")
            before, begun = ticks_of(daemon), time.monotonic()
            broker.stop()
            daemon.until(lambda: "part/mqtt" in alarms_of(daemon), "the alarm of the link")

            def collapsed() -> list[str]:
                children = daemon.get("/api/v1/alarms/part/mqtt/children")["alarms"]
                return [a["id"] for a in children if a["state"] == "suppressed"]

            if away_s > LEASE_S:
                daemon.until(lambda: any(i.startswith("silence/") for i in collapsed()), "silence")
            # The hot node is hot; the longer that lasts, the more is asked of it, and nobody answers any more
            heat = ("beyond/", "health/lab/h/r1/node0", "readback/gpu.")
            rung = {i for i in alarms_of(daemon) if not i.startswith(heat)}
            assert rung == {"part/mqtt"}, "one alarm, and the heat that was read"
            if away_s > LEASE_S:
                until(leases.lapsed, LEASE_S + 2, "agents that let their leases lapse by themselves")
                assert leases.running() == 0
            time.sleep(max(0.0, away_s - (time.monotonic() - begun)))
            away = time.monotonic() - begun
            after = ticks_of(daemon)
            ticked(before, after, away)
            broker.start()
            back = time.monotonic()
            daemon.until(bms.heard_by(daemon, 31.0), what="values of the BMS again")
            flowing_s = time.monotonic() - back
            daemon.until(lambda: good(daemon, "gpu.temp_c") == 144, "all agents again")
            asked = len(wire.asked)
            scald(racks, 35)
            daemon.until(lambda: racks.caps(35).max() < 1200.0, "commands again")
            until(lambda: len(wire.asked) > asked, 10, "that the commands were heard on the wire")
            daemon.until(lambda: "part/mqtt" not in alarms_of(daemon), "the alarm's end")
            # Retained messages outlived the broker: another process of ours learns it again.
            daemon.kill()
            daemon.start()
            daemon.until(bms.heard_by(daemon, 32.0), what="metadata, retained")
            assert daemon.stop() == 0
        finally:
            bms.close()
        wire.check()
        assert leases.outlived == []
    made_again(daemon.run_folder)
    print(f"away {away:.1f} s: {after}; data after {flowing_s:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("away_s", [pytest.param(8.0, marks=short), pytest.param(60.0, marks=long)])
def test_without_its_history_server_nothing_waits_and_nothing_is_lost(
    broker: Mosquitto, server: Server, tmp_path: Path, away_s: float
) -> None:
    victoria = Victoria(server("victoria-metrics"), tmp_path)
    victoria.start()
    outside = {"influx": {"url": victoria.url, "resend_s": 120.0}, "every_s": 1.0}
    name = "lab/h/r1/node7/gpu2"
    try:
        with running(tmp_path / "d", broker.port, history=outside) as daemon, pod(broker.port):

            def known() -> dict[str, Any]:
                found: dict[str, Any] = daemon.get("/api/v1/messages")["messages"]["history"]
                return found

            def kept() -> set[int]:
                found = daemon.get(f"/api/v1/history?signal=gpu.power_w&name={name}&last_s=600&step=1")
                pairs = zip(found["t_ns"], found["values"][name], strict=True)
                return {t // 10**6 for t, v in pairs if v is not None}

            daemon.until(lambda: known()["influx"]["written_points"] > 400, what="points written")
            victoria.stop()
            begun, before = time.monotonic(), ticks_of(daemon)
            daemon.until(lambda: known()["influx"]["error"], "the outage noticed")
            time.sleep(max(0.0, away_s - (time.monotonic() - begun)))
            away = time.monotonic() - begun
            if away_s > 40:
                assert "history/influx" in alarms_of(daemon)
            assert known()["influx"]["queue_points"] > 144
            newest_s = time.time() - max(kept()) / 1000
            assert newest_s < 5, "the embedded history answers, and goes on"
            after = ticks_of(daemon)
            ticked(before, after, away)
            held = kept()
            assert len(held) >= away * 0.9 - 2
            victoria.start()
            daemon.until(lambda: not known()["influx"]["error"] and known()["influx"]["queue_points"] < 1000,
                         "what waited is written")  # fmt: skip
            told = known()
            assert (told["dropped"], told["influx"]["dropped_points"], told["influx"]["refused_points"]) == (
                0,
                0,
                0,
            )
            daemon.until(lambda: "history/influx" not in alarms_of(daemon), "the alarm's end")
            wanted = {"rack": "r1", "node": "node7", "gpu": "gpu2"}

            def missing() -> set[int]:
                for labels, points in victoria.series("gpu_power_w").items():
                    if wanted.items() <= dict(labels).items():
                        return held - set(points)
                return held

            daemon.until(lambda: not missing(), "every instant of the outage on the server")
            print(f"away {away:.1f} s: {len(held)} instants, {after}, {told['influx']}")
    finally:
        victoria.stop()
