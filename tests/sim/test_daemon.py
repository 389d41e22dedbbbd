"""The daemon as a process, between a real Mosquitto and agents whose devices alone are simulated.

What it mirrors, what it commands, how it restarts, reloads and stops.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paho.mqtt.client as paho
import pytest

from connectors.dsx import discover, to_yaml
from connectors.files import read_capture
from tests.support.agent_pod import pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import Mosquitto, mosquitto
from twin.catalogue import NS
from twin.config import load_site, make_engine
from twin.engine import Engine
from twin.run import MessageSource, TraceReader, replay_arrivals, replay_frames, resume
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Message, Reading

pytestmark = pytest.mark.slow
Server = Callable[..., Path]


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


def publish(port: int, rows: list[Message], in_real_time: bool) -> None:
    """By a client that is not ours; returns when the broker has them."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.max_inflight_messages_set(1000)
    client.connect("127.0.0.1", port)
    client.loop_start()
    begun, told = time.monotonic(), []
    for row in rows:
        if in_real_time:
            time.sleep(max(0.0, begun + (row.t_ns - rows[0].t_ns) / NS - time.monotonic()))
        told.append(client.publish(row.topic, row.payload, 1, "/Metadata/" in row.topic))
    for info in told:
        info.wait_for_publish(20)
    client.disconnect()
    client.loop_stop()


def replayed_whole(run: Path) -> Engine:
    """The run made again from its trace and compared with its journal: Divergence where they differ."""
    reader = TraceReader(run)
    spec = msgspec.json.decode(reader.first_header().spec, type=SiteSpec)
    engine = make_engine(build_site(spec))
    outcome = replay_frames(engine, reader, run / "journal.jsonl")
    assert not outcome.damage
    assert outcome.compared_lines > 0
    return engine


@pytest.mark.parametrize("in_real_time", [False, pytest.param(True, marks=pytest.mark.storm)])
def test_a_capture_through_the_broker_gives_the_state_of_its_replay(
    broker: Mosquitto, tmp_path: Path, recording: Callable[[str], Path], in_real_time: bool
) -> None:
    capture = recording("dsx-bms-capture") / "dsx_exemplar.csv"
    site_yaml = to_yaml(discover(read_capture(capture), "titan"))
    with_site = tmp_path / "titan.yaml"
    with_site.write_text(site_yaml, encoding="utf-8")
    spec, site = load_site(with_site)
    engine = make_engine(site)
    replay_arrivals(engine, spec, MessageSource([capture], site), 1.0)
    with RunningDaemon(tmp_path / "d", broker.port) as daemon:
        daemon.site_path.write_text(site_yaml, encoding="utf-8")
        daemon.start()
        rows = [m for m in read_capture(capture) if isinstance(m, Message)]
        daemon.until(lambda: _part(daemon, "mqtt") == "running")
        publish(broker.port, rows, in_real_time)
        total = len(rows)

        def all_decoded() -> bool:
            link = daemon.get("/api/v1/messages")["messages"]["link"]
            return bool(link["received"] >= total and link["waiting"] == 0)

        daemon.until(all_decoded, 30, "all messages of the capture")
        time.sleep(2.5)
        assert daemon.stop() == 0
    live = resume(daemon.run_folder, lambda s: make_engine(build_site(s))).engine
    equal, near = compared(engine, live, last_readings(capture, site))
    assert equal > 100
    assert near <= equal / 10


def last_readings(capture: Path, site: Site) -> dict[tuple[str, int, str], list[float]]:
    """The readings of the last two seconds of each signal, by (table, entity, signal)."""
    told: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for arrival in MessageSource([capture], site):
        for r in arrival.items:
            if isinstance(r, Reading) and r.value is not None:
                told.setdefault((r.table, r.entity, r.signal), []).append((r.t_ns, r.value))
    return {k: [v for t, v in held if t >= held[-1][0] - 2 * NS] for k, held in told.items()}


def compared(
    engine: Engine, live: Engine, lately: dict[tuple[str, int, str], list[float]]
) -> tuple[int, int]:
    """(cells that are equal, cells that lie among the last readings): ticks begin at other instants here and
    there, so that of two readings within a second one run takes both into a tick, the other the later one."""
    equal = near = 0
    for table, there in engine.state.tables.items():
        here = live.state.tables[table]
        for signal_ in there.signals:
            if signal_.kind == "state":
                continue  # a pulse within a burst is kept, as it must be
            a, b = there.value[signal_.row], here.value[signal_.row]
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            equal += int((same & np.isfinite(a)).sum())
            for entity in np.flatnonzero(~same).tolist():
                fed_by = (signal_.name, signal_.base)
                known = [v for name in fed_by for v in lately.get((table, entity, name or ""), [])]
                off = signal_.quantum
                assert min(known) - off <= b[entity] <= max(known) + off, (signal_.key, a[entity], b[entity])
                near += 1
        np.testing.assert_array_equal(there.raw, here.raw, err_msg=table)
    return equal, near


def _part(daemon: RunningDaemon, name: str) -> str:
    found = [p for p in daemon.get("/api/v1/parts")["parts"] if p["name"] == name]
    return str(found[0]["state"]) if found else ""


def test_heat_is_answered_by_caps_that_agents_carry_out_and_report(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port) as racks:
        daemon.until(lambda: _good(daemon, "gpu.temp_c") == 144, what="all GPUs heard")
        racks.heat(node=3)
        daemon.until(lambda: racks.caps(node=3).max() < 1200, what="caps lowered on the hot node")
        assert racks.caps(node=4).min() == 1200.0, "the others are left alone"
        leases = daemon.until(lambda: _done(daemon), what="acks and read-back")
        assert {row["name"].rpartition("/")[0] for row in leases} == {"lab/h/r1/node3"}
        assert any(line["body"]["policy"] == "thermal_guard" for line in daemon.journal("command"))
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def _good(daemon: RunningDaemon, key: str) -> int:
    table, _, name = key.partition(".")
    rows = daemon.get(f"/api/v1/state/{table}?signals={name}&limit=1000")
    column = rows["signals"][name]
    return sum(q.lower() == "good" for q in column["quality"])


def _done(daemon: RunningDaemon) -> list[dict[str, Any]]:
    rows = daemon.get("/api/v1/leases?control=gpu.power_cap_w")["leases"]
    return rows if rows and all(r["state"] == "done" for r in rows) else []


def test_a_restart_goes_on_with_its_leases_and_repeats_itself(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port) as racks:
        daemon.until(lambda: _good(daemon, "gpu.temp_c") == 144, what="all GPUs heard")
        racks.heat(node=0)
        daemon.until(lambda: _done(daemon), what="a cap in force")
        before = daemon.get("/api/v1/state")["tick"]
        daemon.kill()
        daemon.start()
        assert daemon.get("/api/v1/state")["tick"] > before, "the numbers of ticks go on"
        daemon.until(lambda: _done(daemon), what="the cap in force again")
        assert racks.caps(node=0).max() < 1200.0
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def test_a_site_that_changed_while_it_was_away(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon:
        daemon.until(lambda: _part(daemon, "mqtt") == "running")
        assert daemon.stop() == 0
        daemon.write_site(two_racks(racks="r[0-3]"))
        daemon.start()
        with pod(broker.port, racks=3):
            daemon.until(lambda: _good(daemon, "gpu.temp_c") == 216, what="GPUs of three racks")
            rows = daemon.get("/api/v1/state/gpu?signals=temp_c&limit=1000")
            heard = {n for n, q in zip(rows["names"], rows["signals"]["temp_c"]["quality"], strict=True)
                     if q.lower() == "good"}  # fmt: skip
            assert {name.split("/")[2] for name in heard} == {"r1", "r2", "r3"}
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def test_it_stops_within_five_seconds_and_says_why_it_will_not_start_twice(
    broker: Mosquitto, tmp_path: Path
) -> None:
    with running(tmp_path / "d", broker.port) as daemon:
        second = RunningDaemon(tmp_path / "d", broker.port)
        second.start(wait=False)
        assert second.process is not None
        assert second.process.wait(20) == 1
        assert "is in use by process" in second.words()
        begun = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begun < 5.0


def test_a_reload_takes_over_a_changed_site_and_refuses_a_wrong_one(
    broker: Mosquitto, tmp_path: Path
) -> None:
    with running(tmp_path / "d", broker.port) as daemon:
        good = two_racks(policies={"thermal_guard": {"authority": "act"}})
        daemon.write_site(
            {**good, "halls": [{**good["halls"][0], "racks": [{"name": "r1", "profile": "none"}]}]}
        )
        daemon.send(signal.SIGHUP)
        daemon.until(lambda: any(a["id"] == "reload" for a in daemon.get("/api/v1/alarms")["alarms"]))
        assert daemon.get("/api/v1/site")["sizes"]["rack"] == 2
        daemon.write_site(two_racks(racks="r[1-3]", policies={"thermal_guard": {"authority": "advise"}}))
        daemon.send(signal.SIGHUP)
        daemon.until(lambda: daemon.get("/api/v1/site")["sizes"]["rack"] == 3)
        daemon.until(lambda: not daemon.get("/api/v1/alarms")["alarms"])
        with pod(broker.port, racks=3):
            daemon.until(lambda: _good(daemon, "gpu.temp_c") == 216, what="GPUs of the third rack")
        reloads = [line["body"] for line in daemon.journal("reload")]
        assert [bool(r["refused"]) for r in reloads] == [True, False]
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def test_act_is_refused_over_the_embedded_broker(tmp_path: Path) -> None:
    daemon = RunningDaemon(tmp_path / "d", "embedded")
    daemon.start(wait=False)
    assert daemon.process is not None
    assert daemon.process.wait(20) == 78
    assert "simulated: true" in daemon.words()
    daemon.write_site(two_racks())
    daemon.start()
    try:
        body = {"policy": "thermal_guard", "authority": "act", "reason": "a test",
                "acknowledge": "thermal_guard may act on lab"}  # fmt: skip
        status, answer = daemon.ask("POST", "/api/v1/authority", body)
        assert status == 409
        assert "embedded broker" in json.dumps(answer)
    finally:
        daemon.kill()
