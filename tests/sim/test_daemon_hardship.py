"""The daemon as a process under floods, oversized and forged messages, on a full disk, and beside itself.

Each load with a short form for every day and a long one for the storm (`make storm`).
"""

from __future__ import annotations

import contextlib
import json
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
from tests.support.patience import PATIENCE_S
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
    """Return the daemon's counts of messages."""
    found: dict[str, Any] = daemon.get("/api/v1/messages")["messages"]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "oversized"), [pytest.param(5.0, 5, marks=short), pytest.param(30.0, 60, marks=long)]
)
def test_what_cannot_be_read_or_taken_is_counted_and_delays_no_tick(
    broker: Mosquitto, server: Server, tmp_path: Path, seconds: float, oversized: int
) -> None:
    """A first start that was killed at once begins anew; then come huge messages and a flood."""
    daemon, most, rate = RunningDaemon(tmp_path / "d", broker.port), 0, 20_000
    daemon.run_folder.mkdir(parents=True)
    (daemon.run_folder / "trace-000000.rt").write_bytes(b"")
    with daemon, pod(broker.port) as racks:
        daemon.start()
        daemon.until(lambda: link_of(daemon)["staged"] > 36, what="the pod heard")
        before, begun = ticks_of(daemon), time.monotonic()
        with Probe(daemon) as probe:
            send_oversized(broker, server, tmp_path, oversized)

            def all_counted() -> bool:
                return link_of(daemon)["link"]["dropped"] >= oversized

            daemon.until(all_counted, "all of them counted")
            rows = daemon.get("/api/v1/sources?limit=1000")["sources"]
            drops = [why for row in rows for why in row["reasons"] if why["outcome"] == "dropped"]
            assert sum(why["count"] for why in drops) == oversized
            assert all("at most 4194304 are taken" in why["why"] for why in drops)
            with flood(broker, tmp_path, rate, seconds + 30) as end:
                flooded = time.monotonic()
                scald(racks, 3)
                capped_s = 0.0
                while (now_s := time.monotonic() - flooded) < seconds + 15:
                    most = max(most, link_of(daemon)["link"]["waiting"])
                    if not capped_s and racks.caps(3).max() < 1200.0:
                        capped_s = now_s
                    if capped_s and now_s > seconds:
                        break
                    time.sleep(0.1)
                sent = end()
                took_s = time.monotonic() - begun
        racks.fleet.stop()
        daemon.until(lambda: settled(daemon), "the end of what arrives")
        after, found = ticks_of(daemon), link_of(daemon)
        link = found["link"]
        print(f"{sent}; {after}; p99 {probe.p99_s():.4f}, max {max(probe.took_s):.4f} s, rss "
              f"{probe.rss_bytes / 2**20:.0f} MB; capped after {capped_s:.1f} s; most {most}; {link}; "
              f"{ {k: found[k] for k in ('staged', 'bad', 'ignored', 'dropped')} }")  # fmt: skip
        assert capped_s > 0, "heat is answered in the midst of the flood"
        assert after["count"] + after["skipped"] - before["count"] >= took_s - 2
        assert after["skipped"] < 0.1 * after["count"]
        assert probe.failed == 0
        assert probe.rss_bytes < RSS_BYTES
        assert most <= MOST_WAITING
        assert link["connections"] == 1
        assert link["received"] > 0.5 * sent["total"]
        if oversized > 5:  # a machine of one's own for the storm
            assert sent["total"] >= 0.8 * rate * seconds, "the flood is one"
            assert after["skipped"] == 0
            assert max(after["late_s_p99"], probe.p99_s()) < LAG_S
        # Each is staged, bad, ignored or dropped; only our own canary is none of that.
        outcomes = found["staged"] + found["bad"] + found["ignored"] + found["dropped"]
        assert abs(link["received"] - outcomes) <= 5
        assert found["dropped"] == link["dropped"]
        metrics = daemon.get("/metrics")
        for name in ("link.dropped", "bad", "history.samples"):  # whatever topics strangers invent
            assert f'racktwin_messages_total{{what="{name}"}}' in metrics, name
        kept = 1 - link["dropped"] / link["received"]
        for kind, count in (("bad", ("forged", "broken", "foreign")), ("ignored", ("unknown",))):
            share = sum(sent["sent"][k] for k in count) / sent["total"]
            assert found[kind] > 0.5 * share * kept * link["received"], kind
        assert "set aside, and the run begins anew" in daemon.log.read_text()
    assert TraceReader(daemon.run_folder).first_header().first_tick == 0
    assert (daemon.run_folder / "trace-000000.torn").exists()


def send_oversized(broker: Mosquitto, server: Server, folder: Path, count: int) -> None:
    """Messages of 10 MB, more than a broker's default lets a daemon take."""
    publisher, huge = server("mosquitto_pub", "mosquitto-clients"), folder / "huge"
    huge.write_bytes(b'{"t_ns":1,"gpu":{"temp_c":[' + b"1," * 5_000_000)
    for number in range(count):
        topic = f"IT/v1/PUB/Frame/lab/h/r1/node{number % 18}"
        command = [str(publisher), "-p", str(broker.port), "-q", str(number % 2), "-t", topic]
        subprocess.run([*command, "-f", str(huge)], check=True, timeout=30)


def settled(daemon: RunningDaemon) -> bool:
    """Return True if no message arrives any more."""
    before = link_of(daemon)["link"]["received"]
    time.sleep(0.3)
    after = link_of(daemon)["link"]
    return bool(after["received"] == before and after["waiting"] == 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB where the state of a daemon in `tmp_path / "d"` is kept."""
    folder = tmp_path / "d" / "state"
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "racktwin-test", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {mounted.stderr.strip()[:200]}")
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


@pytest.mark.long
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
        daemon.until(lambda: _quiet(run), "a journal that rests")
        ballast = fill(small_disk)
        daemon.until(lambda: "trace" in alarms_of(daemon), "the alarm of the trace")
        at = ticks_of(daemon)["tick"]
        daemon.until(lambda: ticks_of(daemon)["tick"] >= at + 2, "ticks without a trace")
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
        daemon.until(lambda: racks.caps(20).max() < 1200.0, "commands once there is space")
        assert (run / "journal.reserve").stat().st_size == 10**6
        assert daemon.stop() == 0
        assert verify_journal(run / "journal.jsonl").fault is None
        wire.check()
        assert leases.outlived == []


def _quiet(run: Path) -> bool:
    """Return True if the journal has not grown for two ticks."""
    size = (run / "journal.jsonl").stat().st_size
    time.sleep(2.1)
    return (run / "journal.jsonl").stat().st_size == size


@pytest.mark.long
def test_it_follows_a_storm_of_reloads_under_load_and_stops_however_often_it_is_asked(
    broker: Mosquitto, tmp_path: Path
) -> None:
    with running(tmp_path / "d", broker.port) as daemon, pod(broker.port):
        daemon.until(lambda: link_of(daemon)["staged"] > 36, what="the pod heard")
        with flood(broker, tmp_path, 8000, 60) as end:
            before = ticks_of(daemon)
            for number in range(200):
                daemon.send(signal.SIGHUP)
                time.sleep(0.02 if number % 3 else 0.0)
            daemon.until(lambda: len(daemon.journal("reload")) > 3, "reloads, journaled")
            daemon.until(lambda: ticks_of(daemon)["count"] >= before["count"] + 3)
            assert daemon.get("/api/v1/site")["sizes"]["rack"] == 2
            assert daemon.process is not None
            deadline_s = time.monotonic() + PATIENCE_S
            while daemon.process.poll() is None and time.monotonic() < deadline_s:
                daemon.send(signal.SIGTERM)
                time.sleep(0.002)
            assert daemon.process.returncode == 0
            end()
    assert verify_journal(daemon.run_folder / "journal.jsonl").fault is None
    assert lines_of(daemon.run_folder)[-1]["kind"] == "end"
