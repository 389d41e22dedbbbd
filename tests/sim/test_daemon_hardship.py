"""The daemon as a process under floods, oversized and forged messages, on a full disk, and beside itself.

Each load with a short form for every day and a long one for the storm (`make storm`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_pod import pod
from tests.support.daemon_process import ROOT, RunningDaemon, running
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.storm_watch import Leases, Probe, Wire, alarms_of, lines_of, numbers_of, scald, ticks_of
from twin.run import TraceReader, verify_journal

Server = Callable[..., Path]
short, long = pytest.mark.slow, pytest.mark.storm
LAG_S = 0.2
RSS_BYTES = 250 * 2**20
MOST_WAITING = 5_000  # broker.queue_messages


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path, ("sys_interval 1",)) as running_broker:
        yield running_broker


@contextmanager
def flood(broker: Mosquitto, folder: Path, rate: int, seconds: float) -> Iterator[Callable[[], Any]]:
    """Messages by a process of its own; the call ends it and gives what it sent."""
    stop = folder / "flood.stop"
    stop.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.mqtt_flood",
         str(broker.port), str(rate), str(seconds), str(stop)],
        cwd=ROOT, stdout=subprocess.PIPE,
    )  # fmt: skip

    def end() -> Any:
        stop.touch()
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        return json.loads(out)

    try:
        yield end
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def link_of(daemon: RunningDaemon) -> dict[str, Any]:
    """What became of messages."""
    found: dict[str, Any] = daemon.get("/api/v1/messages")["messages"]
    return found


@pytest.mark.parametrize(
    ("rate", "seconds"), [pytest.param(20_000, 5.0, marks=short), pytest.param(20_000, 30.0, marks=long)]
)
def test_a_flood_delays_no_tick_and_what_is_lost_of_it_is_counted(
    broker: Mosquitto, tmp_path: Path, rate: int, seconds: float
) -> None:
    most = 0
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port) as racks:
        daemon.until(lambda: link_of(daemon)["staged"] > 36, what="the pod heard")
        before, begun = ticks_of(daemon), time.monotonic()
        with Probe(daemon) as probe, flood(broker, tmp_path, rate, seconds + 30) as end:
            scald(racks, 3)
            capped_s = 0.0
            while (now_s := time.monotonic() - begun) < seconds + 15:
                most = max(most, link_of(daemon)["link"]["waiting"])
                if not capped_s and racks.caps(3).max() < 1200.0:
                    capped_s = now_s
                if capped_s and now_s > seconds:
                    break
                time.sleep(0.1)
            sent = end()
            took_s = time.monotonic() - begun
        racks.fleet.stop()
        daemon.until(lambda: settled(daemon), 20, "the end of what arrives")
        after, found = ticks_of(daemon), link_of(daemon)
        link = found["link"]
        print(f"{sent}; {after}; p99 {probe.p99_s():.4f}, max {max(probe.took_s):.4f} s, rss "
              f"{probe.rss_bytes / 2**20:.0f} MB; capped after {capped_s:.1f} s; most {most}; {link}; "
              f"{ {k: found[k] for k in ('staged', 'bad', 'ignored', 'dropped')} }")  # fmt: skip
        assert sent["total"] >= 0.8 * rate * seconds, "the flood is one"
        assert capped_s > 0, "heat is answered in the midst of it"
        assert after["skipped"] == 0
        assert after["count"] - before["count"] >= took_s - 2
        assert after["late_s_p99"] < LAG_S
        assert probe.failed == 0
        assert probe.p99_s() < LAG_S
        assert probe.rss_bytes < RSS_BYTES
        assert most <= MOST_WAITING
        assert link["connections"] == 1
        assert link["received"] > 0.5 * sent["total"]
        # Each is staged, bad, ignored or dropped; only our own canary is none of that.
        told = found["staged"] + found["bad"] + found["ignored"] + found["dropped"]
        assert abs(link["received"] - told) <= 5
        assert found["dropped"] == link["dropped"]
        told = daemon.get("/metrics")
        for name in ("link.dropped", "bad", "history.samples"):  # whatever topics strangers invent
            assert f'racktwin_messages_total{{what="{name}"}}' in told, name
        kept = 1 - link["dropped"] / link["received"]
        for kind, count in (("bad", ("forged", "broken", "foreign")), ("ignored", ("unknown",))):
            share = sum(sent["sent"][k] for k in count) / sent["total"]
            assert found[kind] > 0.5 * share * kept * link["received"], kind


def settled(daemon: RunningDaemon) -> bool:
    """Whether nothing arrives any more."""
    before = link_of(daemon)["link"]["received"]
    time.sleep(0.3)
    after = link_of(daemon)["link"]
    return bool(after["received"] == before and after["waiting"] == 0)


@pytest.mark.parametrize("count", [pytest.param(5, marks=short), pytest.param(60, marks=long)])
def test_oversized_messages_are_skipped_and_counted(
    broker: Mosquitto, server: Server, tmp_path: Path, count: int
) -> None:
    publisher = server("mosquitto_pub", "mosquitto-clients")
    huge = tmp_path / "huge"
    huge.write_bytes(b'{"t_ns":1,"gpu":{"temp_c":[' + b"1," * 5_000_000)
    with running(tmp_path / "d", broker.port) as daemon:
        daemon.until(lambda: link_of(daemon)["link"]["connected"], what="the link")
        before = ticks_of(daemon)
        with Probe(daemon) as probe:
            for number in range(count):
                topic = f"IT/v1/PUB/Frame/lab/h/r1/node{number % 18}"
                told = [str(publisher), "-p", str(broker.port), "-q", str(number % 2), "-t", topic]
                subprocess.run([*told, "-f", str(huge)], check=True, timeout=30)

            def all_told() -> bool:
                return sum(v["count"] for v in link_of(daemon)["dropped_by_place"].values()) >= count

            daemon.until(all_told, 30, "all of them told")
            daemon.until(lambda: ticks_of(daemon)["count"] >= before["count"] + 2)
        after, found = ticks_of(daemon), link_of(daemon)
        assert found["link"]["dropped"] == found["dropped"] == count
        assert all("at most 4194304 are taken" in v["why"] for v in found["dropped_by_place"].values())
        assert after["skipped"] == 0
        assert probe.p99_s() < LAG_S
        assert probe.rss_bytes < RSS_BYTES
        print(f"p99 {probe.p99_s():.4f} s, rss {probe.rss_bytes / 2**20:.0f} MB, {after}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB where the state of a daemon in `tmp_path / "d"` is kept."""
    folder = tmp_path / "d" / "state"
    folder.mkdir(parents=True)
    told = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "racktwin-test", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if told.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {told.stderr.strip()[:200]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all that is left."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 2**16)
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    return ballast


@pytest.mark.slow
def test_on_a_full_disk_it_ticks_on_untraced_then_says_a_last_word_and_ends(
    broker: Mosquitto, small_disk: Path, tmp_path: Path
) -> None:
    with (
        running(tmp_path / "d", broker.port, history={"embedded": False}) as daemon,
        pod(broker.port) as racks,
        Wire(broker.port) as wire,
        Leases(racks) as leases,
    ):
        run = daemon.run_folder
        daemon.until(lambda: link_of(daemon)["staged"] > 36, what="the pod heard")
        daemon.until(lambda: _quiet(run), 30, "a journal that rests")
        ballast = fill(small_disk)
        daemon.until(lambda: "trace" in alarms_of(daemon), 15, "the alarm of the trace")
        at = ticks_of(daemon)["tick"]
        daemon.until(lambda: ticks_of(daemon)["tick"] >= at + 2, 10, "ticks without a trace")
        assert daemon.get("/api/v1/messages")["counts"]["ticks_not_traced"] > 0
        for node in range(36):
            scald(racks, node)  # findings and commands: more than the journal's last page holds
        assert daemon.process is not None
        assert daemon.process.wait(40) == 1
        assert "nothing more is commanded" in daemon.words()
        last = lines_of(run)[-1]
        assert last["body"]["journal"] == "no space left"
        assert last["body"]["held"] == "all commands"
        assert not (run / "journal.reserve").exists()
        assert verify_journal(run / "journal.jsonl").fault is None
        assert {(a.epoch, a.command) for a in wire.asked} <= numbers_of(lines_of(run))
        # As long as the disk is full it does not start, and says why.
        daemon.process = None
        fill(small_disk)
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(20) == 1
        assert "free space" in daemon.words()[-2000:]
        ballast.unlink()
        daemon.process = None
        daemon.start()
        daemon.until(lambda: racks.caps(20).max() < 1200.0, 30, "commands once there is space")
        assert (run / "journal.reserve").stat().st_size == 10**6
        assert daemon.stop() == 0
        assert verify_journal(run / "journal.jsonl").fault is None
        wire.check()
        assert leases.outlived == []


def _quiet(run: Path) -> bool:
    """Whether the journal has not grown for two ticks."""
    size = (run / "journal.jsonl").stat().st_size
    time.sleep(2.1)
    return (run / "journal.jsonl").stat().st_size == size


@pytest.mark.slow
def test_it_stops_in_time_under_load_and_follows_a_storm_of_reloads(
    broker: Mosquitto, tmp_path: Path
) -> None:
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port):
        daemon.until(lambda: link_of(daemon)["staged"] > 36, what="the pod heard")
        with flood(broker, tmp_path, 8000, 60) as end:
            before = ticks_of(daemon)
            for number in range(200):
                daemon.send(signal.SIGHUP)
                time.sleep(0.02 if number % 3 else 0.0)
            daemon.until(lambda: len(daemon.journal("reload")) > 3, 20, "reloads, told")
            daemon.until(lambda: ticks_of(daemon)["count"] >= before["count"] + 3)
            assert ticks_of(daemon)["skipped"] == 0
            assert daemon.get("/api/v1/site")["sizes"]["rack"] == 2
            begun = time.monotonic()
            assert daemon.stop() == 0
            took_s = time.monotonic() - begun
            assert took_s < 5.0
            end()
    assert verify_journal(daemon.run_folder / "journal.jsonl").fault is None
    assert lines_of(daemon.run_folder)[-1]["kind"] == "end"
    print(f"stopped in {took_s:.2f} s")


@pytest.mark.slow
def test_asked_to_stop_again_and_again_it_still_ends_well(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port) as daemon:
        daemon.until(lambda: ticks_of(daemon)["tick"] >= 1)
        assert daemon.process is not None
        while daemon.process.poll() is None:
            daemon.send(signal.SIGTERM)
            time.sleep(0.002)
        assert daemon.process.returncode == 0
    assert lines_of(daemon.run_folder)[-1]["kind"] == "end"


@pytest.mark.slow
def test_a_first_start_that_was_killed_at_once_is_begun_anew(broker: Mosquitto, tmp_path: Path) -> None:
    daemon = RunningDaemon(tmp_path / "d", broker.port)
    daemon.run_folder.mkdir(parents=True)
    (daemon.run_folder / "trace-000000.rt").write_bytes(b"")
    daemon.start()
    try:
        daemon.until(lambda: ticks_of(daemon)["tick"] >= 1)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    assert TraceReader(daemon.run_folder).first_header().first_tick == 0
    assert (daemon.run_folder / "trace-000000.torn").exists()
    assert "set aside, and the run begins anew" in daemon.words()


@pytest.mark.slow
def test_damaged_history_and_alarms_are_moved_aside_and_told(broker: Mosquitto, tmp_path: Path) -> None:
    with running(tmp_path / "d", broker.port, history={"every_s": 0.5}) as daemon:
        daemon.until(lambda: link_of(daemon)["history"]["samples"] > 1, what="a history")
        daemon.kill()
        state = daemon.folder / "state"
        stores = [p for p in (state / "history").iterdir() if p.suffix not in ("-wal", "-shm")]
        for path in [*stores, state / "alarms.json"]:
            path.write_bytes(os.urandom(50_000))
        daemon.start()
        daemon.until(lambda: link_of(daemon)["history"]["moved_aside"] == 1, 15, "the history moved aside")
        daemon.until(lambda: "history/moved_aside" in alarms_of(daemon), 15, "an alarm of that")
        daemon.until(lambda: link_of(daemon)["history"]["samples"] > 1, 15, "another history")
        assert (state / "alarms.damaged.json").exists() or (state / "alarms.damaged").exists()
        assert "alarms.json: damaged" in daemon.log.read_text()
        assert daemon.stop() == 0
