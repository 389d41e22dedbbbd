"""`racktwin daemon check --online` against a real broker, exporters and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from connectors.mqtt import MqttLink
from tests.support.mosquitto import free_port, mosquitto
from tests.support.mqtt_links import Server, held, settings
from tests.support.online_checks import check
from tests.support.thread_server import http_thread

PAGES = {
    "/metrics": ("text/plain", 'DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="lab/h/r1/node0"} 700\n'
                               'DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="stranger7"} 700\n'),
    "/nameless": ("text/plain", 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 700\n'),
    "/node": ("text/plain", 'node_load1 0.5\nnode_boot_time_seconds 1\n'),
    "/": ("text/html", "<html><body>exporter</body></html>"),
}  # fmt: skip


class Exporter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, text = PAGES.get(self.path, ("text/plain", "no such page"))
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.send_response(204 if self.path.startswith("/api/v2/write?org=racktwin&bucket=racktwin") else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_thread(Exporter) as port:
        yield f"http://127.0.0.1:{port}"


def test_an_exporter_that_fits_is_shown_with_what_it_carries_and_whom_it_names_in_vain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    code, text = check(tmp_path, capsys, scrapes=[{"url": f"{url}/metrics", "map": "dcgm"}],
                       history={"influx": {"url": url}})  # fmt: skip
    assert code == 0
    assert f"ok    exporter {url}/metrics: 1 readings" in text
    assert "ok    history.influx" in text
    assert "no gpu 'stranger7/gpu0' in the site file" in text
    assert "reports 1 signals of 1 gpu" in text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/", "a page of HTML; expected metrics in the text format of Prometheus"),
        ("/metric", "answers 404; expected 200: check the path, usually /metrics"),
        ("/node", "it has node_load1, node_boot_time_seconds; check `map`"),
        ("/nameless", "no label names the gpu"),
    ],
)
def test_an_exporter_that_does_not_fit_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, path: str, said: str
) -> None:
    code, text = check(tmp_path, capsys, scrapes=[{"url": url + path, "map": "dcgm"}])
    assert code == 1
    assert f"FAIL  exporter {url}{path}: " in text
    assert said in text


def test_what_is_not_there_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    code, text = check(
        tmp_path, capsys, scrapes=[{"url": f"{gone}/metrics", "map": "dcgm"}],
        history={"influx": {"url": gone}}, leader={"kind": "etcd", "endpoints": [gone]},
        broker={"host": "127.0.0.1", "port": free_port()},
    )  # fmt: skip
    assert code == 1
    for name in (f"exporter {gone}/metrics", "history.influx", "leader.etcd", "broker 127.0.0.1"):
        assert f"FAIL  {name}" in text


def test_a_broker_is_listened_to_and_a_wrong_prefix_is_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = {"t_ns": time.time_ns(), "gpu": {"temp_c": [40.0] * 4}}
    with mosquitto(server, tmp_path / "broker") as broker:

        async def say(*topics: str) -> None:
            async with held(MqttLink(settings(broker, "edge", persistent=False))) as edge:
                for topic in topics:
                    await edge.link.publish(topic, json.dumps(frame).encode(), qos=1, retain=True)

        place = {"host": "127.0.0.1", "port": broker.port}
        code, text = check(tmp_path, capsys, broker=place)
        assert code == 1
        assert "check that the publishers run" in text
        asyncio.run(say("plant7/cpu/x"))
        code, text = check(tmp_path, capsys, broker=place)
        assert code == 1
        assert "it carries plant7/cpu/...: is the prefix right" in text
        asyncio.run(say("IT/v1/PUB/Frame/lab/h/r1/node0", "IT/v1/PUB/Frame/lab/h/r1/node99"))
        code, text = check(tmp_path, capsys, broker=place)
        assert code == 0
        assert "1 messages with 4 readings of 2 sources" in text
        assert "no rack or node 'lab/h/r1/node99' in the site file" in text


def test_a_broker_that_does_not_know_us_says_what_to_look_at(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pw").write_text("wrong\n")
    (tmp_path / "pw").chmod(0o600)
    with mosquitto(server, tmp_path / "broker", open_to_all=False) as broker:
        place = {"host": "127.0.0.1", "port": broker.port, "username": "u", "password_file": "pw"}
        code, text = check(tmp_path, capsys, broker=place)
        assert code == 1
        assert "FAIL  broker 127.0.0.1" in text
        assert "not authori" in text.lower()
        assert "username" in text
        code, text = check(tmp_path, capsys, broker={**place, "tls": {}})
        assert code == 1
        assert "TLS" in text


def test_stamps_in_seconds_are_named_and_not_staged(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = {"t_ns": int(time.time()), "gpu": {"temp_c": [40.0] * 4}}
    line = f"nvidia_smi,host=lab/h/r1/node0,index=0 power_draw=1 {int(time.time())}"
    with mosquitto(server, tmp_path / "broker") as broker:

        async def say() -> None:
            async with held(MqttLink(settings(broker, "edge", persistent=False))) as edge:
                topic = "IT/v1/PUB/Frame/lab/h/r1/node0"
                await edge.link.publish(topic, json.dumps(frame).encode(), qos=1, retain=True)
                await edge.link.publish("telegraf/node0/gpu", line.encode(), qos=1, retain=True)

        asyncio.run(say())
        topics = {"host": "127.0.0.1", "port": broker.port, "topics": ["telegraf/#"]}
        code, text = check(tmp_path, capsys, broker=topics)
    assert code == 1
    assert text.count("looks like seconds; expected") == 2
