"""The daemon as a process, between a real Mosquitto and agents whose devices alone are simulated.

What it mirrors, what it commands, how it restarts, reloads and stops.
"""

from __future__ import annotations

import os
import re
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
from tests.support.storm_watch import alarms_of, scald
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
        daemon.until(lambda: link(daemon)["connected"], what="the subscriptions")
        publish(broker.port, rows, in_real_time)
        daemon.until(
            lambda: link(daemon)["received"] >= len(rows) and link(daemon)["waiting"] == 0,
            "all messages of the capture",
        )
        at = daemon.get("/api/v1/summary")["ticks"]["tick"]
        daemon.until(lambda: daemon.get("/api/v1/summary")["ticks"]["tick"] >= at + 2, what="their ticks")
        assert daemon.stop() == 0
    live = resume(daemon.run_folder, lambda s: make_engine(build_site(s))).engine
    equal, near = compared(engine, live, last_readings(capture, site))
    assert equal > 100
    assert near <= equal / 10


def link(daemon: RunningDaemon) -> dict[str, Any]:
    """The state and the counts of its link to the broker."""
    return dict(daemon.get("/api/v1/messages")["messages"]["link"])


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


@pytest.mark.long
def test_heat_is_answered_by_caps_that_outlive_a_kill_and_damaged_files(
    broker: Mosquitto, tmp_path: Path
) -> None:
    with (
        running(tmp_path / "d", broker.port, history={"every_s": 0.5}) as daemon,
        pod(broker.port) as racks,
    ):
        daemon.until(lambda: _good(daemon, "gpu.temp_c") == 144, what="all GPUs heard")
        scald(racks, 3)
        daemon.until(lambda: racks.caps(node=3).max() < 1200, what="caps lowered on the hot node")
        assert racks.caps(node=4).min() == 1200.0, "the others are left alone"
        leases = daemon.until(lambda: _done(daemon), what="acks and read-back")
        assert {row["name"].rpartition("/")[0] for row in leases} == {"lab/h/r1/node3"}
        assert any(line["body"]["policy"] == "thermal_guard" for line in daemon.journal("command"))
        assert daemon.process is not None
        assert mapped(daemon.process.pid) == set(), "libraries of statistics belong into workers"
        daemon.until(lambda: history(daemon)["samples"] > 1, what="a history")
        before = daemon.get("/api/v1/state")["tick"]
        daemon.kill()
        state = daemon.folder / "state"
        stores = [p for p in (state / "history").iterdir() if p.suffix not in ("-wal", "-shm")]
        for path in [*stores, state / "alarms.json"]:
            path.write_bytes(os.urandom(50_000))
        daemon.start()
        assert daemon.get("/api/v1/state")["tick"] > before, "the numbers of ticks go on"
        daemon.until(lambda: _done(daemon), what="the cap in force again")
        assert racks.caps(node=3).max() < 1200.0
        daemon.until(lambda: history(daemon)["moved_aside"] == 1, "the history moved aside")
        daemon.until(lambda: history(daemon)["samples"] > 1, "another history")
        daemon.until(lambda: "history/moved_aside" in alarms_of(daemon), "an alarm of that")
        assert (state / "alarms.damaged").exists()
        assert "alarms.json: damaged" in daemon.log.read_text()
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def history(daemon: RunningDaemon) -> dict[str, Any]:
    """The counts of its history."""
    return dict(daemon.get("/api/v1/messages")["messages"]["history"])


def mapped(process: int | str) -> set[str]:
    """The libraries of statistics, all with compiled parts, that a process has in its memory."""
    found = re.findall(
        r"/site-packages/(sklearn|scikit_learn|scipy|statsmodels|pandas|torch)[./]",
        Path(f"/proc/{process}/maps").read_text(),
    )
    return set(found)


def test_the_search_for_libraries_finds_one_that_is_loaded() -> None:
    import scipy.optimize  # noqa: F401

    assert "scipy" in mapped("self")


def _good(daemon: RunningDaemon, key: str) -> int:
    table, _, name = key.partition(".")
    rows = daemon.get(f"/api/v1/state/{table}?signals={name}&limit=1000")
    column = rows["signals"][name]
    return sum(q.lower() == "good" for q in column["quality"])


def _done(daemon: RunningDaemon) -> list[dict[str, Any]]:
    rows = daemon.get("/api/v1/leases?control=gpu.power_cap_w")["leases"]
    return rows if rows and all(r["state"] == "done" for r in rows) else []


@pytest.mark.long
def test_a_configuration_is_taken_over_whole_or_refused(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port, racks=3):
        daemon.until(lambda: parts(daemon).get("mqtt") == "running")
        second = RunningDaemon(tmp_path / "d", broker.port)
        second.start(wait=False)
        assert second.process is not None
        assert second.process.wait(20) == 1, "one daemon for each state folder"
        assert "is in use by process" in second.words()
        what_cannot_be_made_is_refused_again_and_stops_nothing(daemon)
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
        daemon.until(lambda: _good(daemon, "gpu.temp_c") == 216, what="GPUs of the third rack")
        reloads = [line["body"] for line in daemon.journal("reload")]
        assert [bool(r["refused"]) for r in reloads] == [True] * 8 + [False, True, False]
        assert daemon.stop() == 0
        daemon.write_site(two_racks(racks="r[0-3]"))  # changed while it was away
        daemon.start()
        daemon.until(lambda: _good(daemon, "gpu.temp_c") == 216, what="GPUs of three racks")
        rows = daemon.get("/api/v1/state/gpu?signals=temp_c&limit=1000")
        heard = {n for n, q in zip(rows["names"], rows["signals"]["temp_c"]["quality"], strict=True)
                 if q.lower() == "good"}  # fmt: skip
        assert {name.split("/")[2] for name in heard} == {"r1", "r2", "r3"}
        assert daemon.stop() == 0
        replayed_whole(daemon.run_folder)


def what_cannot_be_made_is_refused_again_and_stops_nothing(daemon: RunningDaemon) -> None:
    """Parts that a configuration asks for in vain: each is refused twice, and no part is touched."""
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


def parts(daemon: RunningDaemon) -> dict[str, str]:
    """The state of every part, by its name."""
    return {p["name"]: p["state"] for p in daemon.get("/api/v1/parts")["parts"]}
