"""`racktwin trace record` against a real Mosquitto: it writes what was published, and survives a kill."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.files import BadRow, read_capture
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.patience import PATIENCE_S
from twin.catalogue import StorageError
from twin.cli.record import CaptureFiles
from twin.telemetry import Message


def record(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "twin", "trace", "record", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def publish(server: Callable[..., Path], broker: Mosquitto, topic: str, payload: bytes, *more: str) -> None:
    tool = server("mosquitto_pub", "mosquitto-clients")
    command = [str(tool), "-h", "127.0.0.1", "-p", str(broker.port), "-t", topic, "-s", *more]
    subprocess.run(command, input=payload, check=True, timeout=PATIENCE_S)


def wait_for(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.05)


def rows(path: Path) -> list[Message | BadRow]:
    return list(read_capture(path)) if path.exists() else []


@pytest.mark.long
def test_what_was_published_is_what_replay_reads(server: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "live.jsonl"
    with mosquitto(server, tmp_path) as broker:
        publish(server, broker, "BMS/v1/PUB/Metadata/Rack/a", b'{"kept":1}', "-r", "-q", "1")
        args = ("--broker", f"127.0.0.1:{broker.port}", "--out", str(out), "--format", "json")
        with record(*args) as process:
            wait_for(lambda: "SUBSCRIBE" in broker.log(), "the subscription")
            binary = bytes(range(256))
            publish(server, broker, "IT/v1/PUB/Frame/a/b", binary)
            publish(server, broker, "BMS/v1/PUB/Value/Rack/a", b'{"value":1.0}')
            publish(server, broker, "elsewhere", b"x")
            wait_for(lambda: len(rows(out)) == 3, "three rows")
            process.send_signal(signal.SIGTERM)
            said, complaint = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, complaint) == (0, "")
        summary = json.loads(said)
        assert (summary["messages"], summary["retained"], summary["lost"]) == (3, 1, 0)
        first, second, third = rows(out)
        assert isinstance(first, Message)
        assert isinstance(second, Message)
        assert isinstance(third, Message)
        assert first[1:] == ("BMS/v1/PUB/Metadata/Rack/a", b'{"kept":1}')
        assert second[1:] == ("IT/v1/PUB/Frame/a/b", binary)
        assert third[1:] == ("BMS/v1/PUB/Value/Rack/a", b'{"value":1.0}')
        assert abs(third.t_ns - time.time_ns()) < 600 * 10**9
        before = out.read_bytes()
        with record(*args) as process:
            _, complaint = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "never overwritten" in complaint
        assert out.read_bytes() == before


@pytest.mark.slow
def test_an_outage_and_a_kill_cost_no_more_than_their_own_time(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "live.jsonl"
    with mosquitto(server, tmp_path) as broker:
        with record("--broker", f"127.0.0.1:{broker.port}", "--out", str(out), "--topic", "a/#") as process:
            wait_for(lambda: "SUBSCRIBE" in broker.log(), "the subscription")
            publish(server, broker, "a/1", b"1")
            wait_for(lambda: len(rows(out)) == 1, "the first row")
            broker.stop()
            (broker.folder / "mosquitto.log").unlink()
            broker.start()
            wait_for(lambda: "SUBSCRIBE" in broker.log(), "the second subscription")
            publish(server, broker, "a/2", b"2")
            wait_for(lambda: len(rows(out)) == 2, "the second row")
            process.kill()
            process.communicate()
        whole = out.read_bytes()
        out.write_bytes(whole[:-7])
        first, torn = rows(out)
        assert isinstance(first, Message)
        assert isinstance(torn, BadRow)
        assert "half-written" in torn.reason


def test_no_broker_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "live.jsonl"
    with record("--broker", "127.0.0.1:1", "--out", str(out)) as process:
        _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert complaint.count("\n") == 1
    assert "127.0.0.1:1" in complaint
    assert not out.exists()


def test_files_are_cut_by_size_and_end_at_the_limit(tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    files = CaptureFiles(out, 2000, 6000)
    files.settle()
    for i in range(200):
        files.put(Message(10**18 + i, "a/b", b"x" * 50), False)
    files.close()
    names = [p.name for p in files.files]
    assert names[:3] == ["c.jsonl", "c-0001.jsonl", "c-0002.jsonl"]
    assert files.full
    read = [row for path in files.files for row in rows(path)]
    assert [getattr(row, "t_ns", None) for row in read] == [10**18 + i for i in range(files.messages)]
    assert all(p.stat().st_size <= 2000 for p in files.files)
    assert sum(p.stat().st_size for p in files.files) == files.bytes <= 6000


def test_a_later_file_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "c-0001.jsonl").write_text("kept")
    files = CaptureFiles(tmp_path / "c.jsonl", 100, 6000)
    files.settle()
    message = Message(10**18, "a/b", b"x" * 50)
    files.put(message, False)
    with pytest.raises(StorageError, match=r"c-0001\.jsonl"):
        files.put(message, False)
    files.close()
    assert (tmp_path / "c-0001.jsonl").read_text() == "kept"


def test_retained_messages_come_first_and_from_the_start(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path / "c.jsonl", 10**6, 10**6)
    t_ns = time.time_ns()
    files.put(Message(t_ns, "live", b"1"), False)
    files.put(Message(t_ns + 5, "kept", b"2"), True)
    files.close()
    assert rows(tmp_path / "c.jsonl") == [Message(t_ns, "kept", b"2"), Message(t_ns, "live", b"1")]


def test_a_configuration_with_the_embedded_broker_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("site: s.yaml\nbroker: embedded\n")
    with record("--config", str(config), "--out", str(tmp_path / "o.jsonl")) as process:
        _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "--broker 127.0.0.1:PORT" in " ".join(complaint.split())
    assert io.StringIO(complaint).readline().startswith("error ")
    assert os.listdir(tmp_path) == ["c.yaml"]
