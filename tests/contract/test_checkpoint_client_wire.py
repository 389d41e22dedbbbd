"""The client in a job and the daemon understand each other by each wire; a hostile one does no harm."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import socket
import socketserver
import ssl
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import racktwin_client.advisor as client
from racktwin_client import job_name, job_nodes, wires
from racktwin_client.advisor import NOTHING, NS, Advisor, advice_of

from connectors.jobs import Advice, FolderSink, JobBook, job_of, level_of
from connectors.jobs.wire import advice_topic, encode_advice, report_of
from connectors.slurm.jobs import JobLedger
from tests.contract.test_mosquitto_acl import SITE
from tests.support.builders import START_NS, site_of, two_racks
from tests.support.in_process_daemon import Pod, serve
from tests.support.inlets import until
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client
from tests.support.patience import PATIENCE_S
from tests.support.secured_mosquitto import Authority, secured_broker
from tests.unit.test_api_checkpoint import INTERVAL, SINCE, employ, wish

NAMES = ["4711", "4711_3", "ns/b", ".hidden", "a b%c+#é", "~", "x" * 200]


def wait(until: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def advice(job: str = "j", **more: Any) -> Advice:
    now_ns = time.time_ns()
    terms: dict[str, Any] = {"interval_s": 7.0, "save_since_ns": None, "issued_ns": now_ns,
                             "expires_ns": now_ns + 60 * NS, "epoch": 1}  # fmt: skip
    return Advice(job=job, **(terms | more))


def advisor(source: str, job: str = "j", **terms: Any) -> Advisor:
    given: dict[str, Any] = {"own_interval_s": 1000.0, "poll_s": 0.02, "least_interval_s": 0.001, "rank": 0}
    return Advisor(job, source, **(given | terms))


def test_advice_as_the_daemon_writes_it() -> None:
    said = advice(save_since_ns=5, reason="é" * 500)
    got = advice_of(encode_advice(said), "j", NOTHING, 100.0, said.issued_ns)
    assert (got.interval_s, got.want, got.until, got.order) == (7.0, (1, 5), 160.0, (1, said.issued_ns))


@pytest.mark.parametrize("job", NAMES)
def test_names_in_a_folder_and_reports_as_the_daemon_reads_them(tmp_path: Path, job: str) -> None:
    sink = FolderSink(tmp_path, JobBook(lambda slot, generation: job))
    sink._write_all([advice(job)])
    one = advisor(tmp_path.as_uri(), job)
    wait(lambda: one.interval_s == 7.0)
    with one.saving() as save:
        pass
    with one.saving("memory"):
        pass
    one.restored(30.0)
    one.close()
    lines = (tmp_path / f"{level_of(job)}.reports.jsonl").read_bytes().splitlines()
    told = [report_of(line, job, time.time_ns()) for line in lines]
    durable = [t.began_ns for t in told if t.tier == "durable"]
    assert set(durable) <= {0, save.began_ns}, "0 in what the other thread wrote before the save ended"
    assert [t.began_ns for t in told if t.restart_s] == [save.began_ns]
    assert durable.count(save.began_ns) >= 2
    assert {t.tier for t in told} == {"durable", "memory"}
    assert [t.restart_s for t in told if t.restart_s] == [30.0]
    assert {t.interval_s for t in told[1:] if t.tier == "durable"} == {7.0}
    assert {t.interval_s for t in told if t.tier == "memory"} == {0.0}, "it keeps none there"


def test_only_the_job_notes_which_save_is_durable(tmp_path: Path) -> None:
    """The other thread, about to report, would put an older one back."""
    writers = set()

    class Watched(Advisor):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_durable_ns":
                writers.add(threading.current_thread())
            super().__setattr__(name, value)

    one = Watched("j", tmp_path.as_uri(), own_interval_s=1000.0, poll_s=0.02, rank=0)
    wait((tmp_path / "j.reports.jsonl").exists)
    with one.saving():
        pass
    one.close()
    assert writers == {threading.current_thread()}


def test_the_daemon_itself_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pod: Pod) -> None:
        employ(pod, own="tenant.bob")
        wish(pod, INTERVAL, 1, 900.0)
        (tmp_path / "token").write_text(pod.secrets["own"] + "\n")
        asked = itertools.count()
        clock = types.SimpleNamespace(  # both clocks go with the ticks
            monotonic=lambda: time.monotonic() + pod.twin.now_ns / NS - START_NS / NS,
            sleep=time.sleep,
            time_ns=lambda: pod.twin.now_ns + 1000 * next(asked),
        )
        monkeypatch.setattr(client, "time", clock)
        one = advisor(pod.url, "ns/b", token_file=str(tmp_path / "token"), most_interval_s=4000.0)
        await until(lambda: one.interval_s == 900.0)
        assert not one.due(1)
        pod.tick(dt_s=5.0)
        wish(pod, SINCE, 1, pod.twin.now_ns / NS)
        pod.tick(dt_s=1.0)
        await until(lambda: one.due(2))
        with one.saving() as save:
            await asyncio.sleep(0.01)
        one.restored(44.0)
        await until(lambda: abs(pod.twin.engine.jobs.saved_ns[1] - save.began_ns) < 10 * NS)
        await until(lambda: pod.twin.engine.jobs.checkpoint_restart_s[1] > 0)
        assert pod.twin.engine.jobs.checkpoint_interval_s[1] == 900.0
        for step in range(5):
            pod.tick(dt_s=1.0)
            await asyncio.sleep(0.05)
            assert not one.due(step), "one save for one wish"
        assert one.problem == ""
        employ_nobody(pod)
        await until(lambda: one.interval_s == 1000.0)
        await asyncio.to_thread(one.close)

    serve(tmp_path, check)


def employ_nobody(pod: Pod) -> None:
    """The lease of the interval ends, which is not renewed."""
    pod.tick(dt_s=3600.0)


def test_over_a_broker_that_comes_and_goes(server: Callable[..., Path], tmp_path: Path) -> None:
    with mosquitto(server, tmp_path) as broker:
        one = advisor(f"mqtt://127.0.0.1:{broker.port}/racktwin", "ns/b")
        with Client(broker.port) as daemon:
            wait(lambda: one.problem == "" and one._wire is not None)
            topic = advice_topic("racktwin", "ns/b")

            def said() -> bool:
                daemon.say(topic, encode_advice(advice("ns/b")))
                return one.interval_s == 7.0

            wait(said)
            with one.saving() as save:
                pass
            heard = daemon.wait(lambda m: (m.body or {}).get("began_ns") == save.began_ns)
            assert job_of(heard.topic.removeprefix("IT/v1/PUB/Job/")) == "ns/b"
            assert report_of(json.dumps(heard.body).encode(), "ns/b", time.time_ns()).save_s > 0
        broker.stop()
        wait(lambda: "connection" in one.problem)
        assert one.interval_s == 7.0
        with one.saving() as later:
            pass
        broker.start()
        with Client(broker.port) as daemon:
            daemon.wait(lambda m: (m.body or {}).get("began_ns") == later.began_ns)
        one.close()
    assert not [t for t in threading.enumerate() if "paho" in t.name or "racktwin" in t.name]


def test_the_broker_that_we_ship(
    server: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secured_broker(server, tmp_path, SITE) as secured:
        ca_file, cert, key = secured.files("checkpoints")
        monkeypatch.setenv("RACKTWIN_CERT_FILE", cert)
        monkeypatch.setenv("RACKTWIN_KEY_FILE", key)
        one = advisor(f"mqtts://127.0.0.1:{secured.broker.port}/racktwin", ca_file=ca_file)
        with Client(secured.broker.port, secured.files("racktwin")) as daemon:

            def said() -> bool:
                daemon.say(advice_topic("racktwin", "j"), encode_advice(advice()))
                return one.interval_s == 7.0

            wait(said)
            daemon.wait(lambda m: m.topic == "IT/v1/PUB/Job/j" and m.body["interval_s"] == 7.0)
        one.close()


def test_https_with_an_authority_of_its_own_and_no_other(server: Callable[..., Path], tmp_path: Path) -> None:
    authority = Authority(server, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("twin", "subjectAltName=IP:127.0.0.1\n"))
    with answering(lambda h: h.answer(200, encode_advice(advice())), context) as (url, _):
        one = advisor(url.replace("http:", "https:"), ca_file=str(authority.ca))
        wait(lambda: one.interval_s == 7.0)
        one.close()
        other = advisor(url.replace("http:", "https:"))
        wait(lambda: "CERTIFICATE_VERIFY_FAILED" in other.problem)
        assert other.interval_s == 1000.0
        other.close()


def test_mqtt_without_paho_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paho.mqtt.client", None)
    one = advisor("mqtt://127.0.0.1:1", own_interval_s=0.001)
    wait(lambda: "pip install paho-mqtt" in one.problem)
    wait(lambda: one.due(1))
    one.close()


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as a test says, and notes what was asked."""

    reply: Callable[[Answers], None]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        with_errors = type(self).reply
        try:
            with_errors(self)
        except OSError:
            self.close_connection = True

    do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def answering(
    reply: Callable[[Answers], None], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[str]]]:
    """An HTTP server on loopback: its address, and what it was asked."""
    kind = type("Kind", (Answers,), {"reply": reply, "asked": []})
    httpd = socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind, bind_and_activate=True)
    httpd.daemon_threads = True
    httpd.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    if tls is not None:
        httpd.socket = tls.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", kind.asked  # type: ignore[attr-defined]
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def _elsewhere(h: Answers) -> None:
    h.answer(302, b"", Location="http://127.0.0.1:9/elsewhere")


def _huge(h: Answers) -> None:
    h.send_response(200)
    h.end_headers()
    for _ in range(10_000):
        h.wfile.write(b" " * 65536)


HOSTILE: dict[str, Callable[[Answers], None]] = {
    "elsewhere": _elsewhere,
    "huge": _huge,
    "garbage": lambda h: h.answer(200, b"\xff" * 100),
    "broken": lambda h: h.answer(500),
    "forbidden": lambda h: h.answer(403),
    "no http": lambda h: (h.wfile.write(b"SSH-2.0-x\r\n" * 100), None)[1],
    "headers": lambda h: (h.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000), None)[1],
    "nothing": lambda h: None,
    "half": lambda h: (h.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"), None)[1],
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_server_costs_the_job_nothing(kind: str) -> None:
    with answering(HOSTILE[kind]) as (url, asked):
        one = advisor(url, own_interval_s=0.01)
        wait(lambda: one.problem)
        wait(lambda: one.due(1))
        with one.saving():
            pass
        assert one.interval_s == 0.01
        one.close()
        assert set(asked) <= {"GET /v1/jobs/j/checkpoint", "POST /v1/jobs/j/checkpoint"}


def test_a_server_that_hangs_stops_neither_the_job_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "TIMEOUT_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        one = advisor(f"http://127.0.0.1:{deaf.getsockname()[1]}", own_interval_s=0.01)
        for step in range(100):
            if one.due(step):
                with one.saving():
                    pass
            time.sleep(0.001)
        wait(lambda: "timed out" in one.problem)
        one.close()


def test_a_report_that_is_refused_for_good_holds_up_no_other() -> None:
    said = encode_advice(advice())

    def reply(h: Answers) -> None:
        h.answer(*((200, said) if h.command == "GET" else (400, b"")))

    with answering(reply) as (url, asked):
        one = advisor(url)
        for _ in range(5):
            with one.saving():
                pass
        wait(lambda: not one._waiting and one.interval_s == 7.0)
        assert len([a for a in asked if a.startswith("POST")]) >= 6
        one.close()


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(lambda h: h.answer(200, encode_advice(advice()))) as (url, _):
        one = advisor(url)
        wait(lambda: one.interval_s == 7.0)
        one.close()


def test_a_job_that_the_twin_has_forgotten_registers_anew() -> None:
    said, known = encode_advice(advice()), set[str]()

    def reply(h: Answers) -> None:
        if h.path.endswith("/checkpoint"):
            h.answer(*((200, said) if known else (404, b'{"error": "no job j is known to run; nodes=..."}')))
        elif h.command == "POST":
            known.add("j")
            h.answer(200, b'{"registered": true, "warnings": []}')
        else:
            known.clear()
            h.answer(200, b"{}")

    with answering(reply) as (url, asked):
        one = advisor(url, nodes="gpu[1-2]")
        assert one.first_answer() == ""
        wait(lambda: one.interval_s == 7.0)
        known.clear()
        wait(lambda: asked.count("POST /v1/jobs/j") == 2 and known)
        wait(lambda: one.problem == "")
        one.close()
        assert not known, "its registration ends with the client"


def test_the_reason_of_a_refusal_reaches_the_job(caplog: pytest.LogCaptureFixture) -> None:
    error = json.dumps({"error": "node a runs job:7; name free nodes\x1b[31m" + "x" * 5000}).encode()
    with answering(lambda h: h.answer(409, error)) as (url, asked):
        one = advisor(url, nodes=["a"])
        said = one.first_answer()
        assert said.startswith("the twin refuses: node a runs job:7; name free nodes?[31mxxx")
        assert said.endswith("x (HTTP status 409)")
        assert len(said) <= 400
        assert said.split(";")[0] in caplog.text
        one.close()
        assert "DELETE /v1/jobs/j" not in asked, "what is not its own it does not end"


def test_a_job_that_nobody_knows_is_told_so() -> None:
    with answering(lambda h: h.answer(404, b'{"error": "no job j is known to run"}')) as (url, _):
        one = advisor(url)
        assert "no job j is known to run" in one.first_answer()
        one.close()


def test_nodes_need_http(tmp_path: Path) -> None:
    for source in ("", tmp_path.as_uri(), "mqtt://127.0.0.1:1"):
        with pytest.raises(ValueError, match="over http"):
            advisor(source, nodes=["a"])


def test_names_of_the_job_and_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RACKTWIN_JOB", "RACKTWIN_NODES", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RACKTWIN_JOB"):
        job_name()
    assert job_nodes() == socket.gethostname().partition(".")[0]
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-4]")
    ledger = JobLedger(site_of(two_racks()), {})
    ledger.cluster = "lab"
    assert job_name() == ledger.name_of("4711"), "the twin's name"
    assert job_nodes() == "gpu[1-4]"
    monkeypatch.setenv("RACKTWIN_JOB", "mine")
    assert job_name() == "mine"


def test_who_is_refused_sends_no_reports_until_then() -> None:
    with answering(lambda h: h.answer(403, b'{"error": "ask for a token"}')) as (url, asked):
        one = advisor(url)
        assert one.first_answer() == "the twin refuses: ask for a token (HTTP status 403)"
        with one.saving():
            pass
        wait(lambda: len(asked) > 3)
        one.close()
        assert set(asked) == {"GET /v1/jobs/j/checkpoint"}
        assert one._waiting
