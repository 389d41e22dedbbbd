"""No secret of a running daemon is ever seen: not in logs, files, answers, or what the system shows of it.

The other ends answer with the secret that they were sent, as careless ones do, so that errors could quote it.
"""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import free_port, mosquitto
from tests.support.patience import PATIENCE_S
from twin.api.routes import READING
from twin.api.tokens import ROLES, add_token
from twin.run import TraceReader

pytestmark = pytest.mark.slow
Server = Callable[..., Path]
FILES = ("broker", "influx", "scrape", "webhook", "etcd")
SECRETS = {name: f"{name}-Zq7!x9/kP&{name[::-1]}" for name in FILES}
IN_URLS = {"scrape-url": "hidden-in-a-scrape", "hook-url": "hidden-in-hook"}


class _Parrot(BaseHTTPRequestHandler):
    """Refuses, and says all that it was told."""

    heard: set[str]

    def _refuse(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = f"{self.path} {self.headers.get('Authorization')} {body.decode(errors='replace')}"
        self.heard.add(said)
        answer = json.dumps({"code": 16, "message": said, "error": said}).encode()
        self.send_response(401, "no " + said.replace("\n", " ")[:200])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = _refuse  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def parrot() -> Iterator[tuple[int, set[str]]]:
    """The port of an HTTP server that refuses everybody with their own words, and what it heard."""
    heard: set[str] = set()
    kind = type("Parrot", (_Parrot,), {"heard": heard})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as httpd:
        httpd.daemon_threads = True
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield int(httpd.server_address[1]), heard
        finally:
            httpd.shutdown()
            thread.join()


def write_secrets(folder: Path) -> dict[str, str]:
    """Path of each secret's file, by name."""
    folder.mkdir()
    for name, secret in SECRETS.items():
        path = folder / name
        path.write_text(secret + "\n")
        path.chmod(0o600)
    return {name: str(folder / name) for name in SECRETS}


def settings(files: dict[str, str], port: int) -> dict[str, Any]:
    """A configuration with a secret wherever one can be given."""
    here = f"127.0.0.1:{port}"
    leader = {"kind": "etcd", "endpoints": [f"http://{here}"], "name": "one", "username": "twin",
              "password_file": files["etcd"]}  # fmt: skip
    return {
        "history": {"every_s": 1.0, "influx": {
            "url": f"http://{here}/influx", "token_file": files["influx"]}},
        "scrapes": [
            {"url": f"http://someone:{IN_URLS['scrape-url']}@{here}/one", "map": "node", "period_s": 1.0},
            {"url": f"http://{here}/two", "map": "node", "period_s": 1.0, "token_file": files["scrape"]},
        ],
        "notify": [{"kind": "webhook", "url": f"http://{here}/hook/{IN_URLS['hook-url']}",
                    "token_file": files["webhook"], "min_severity": "info"}],
        "leader": leader,
    }  # fmt: skip


def measure(port: int) -> None:
    """A reading, so that there is history to write."""
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.username_pw_set("twin", SECRETS["broker"])
    client.connect("127.0.0.1", port)
    client.loop_start()
    body = {"t_ns": time.time_ns(), "gpu": {"power_w": [700.0] * 4}}
    client.publish("IT/v1/PUB/Frame/lab/h/r1/node0", json.dumps(body), 1).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


def try_to_come_in(daemon: RunningDaemon, tokens: dict[str, str]) -> None:
    """Whatever may go wrong with a token, and might be reported."""
    hold = {"reason": "an attack"}
    for path in ("/api/v1/summary", "/api/v1/tokens", "/metrics", "/api/v1/events"):
        assert daemon.ask("GET", path, token="")[0] == 401
        assert daemon.ask("GET", path, token="rt_" + "wrong" * 8)[0] in (401, 429)
    assert daemon.ask("POST", "/api/v1/hold", hold, token="")[0] == 401
    assert daemon.ask("POST", "/api/v1/hold", hold, token="rt_" + "wrong" * 8)[0] in (401, 429)
    for method, path in (("POST", "/api/v1/hold"), ("POST", "/api/v1/release"), ("GET", "/api/v1/tokens")):
        assert daemon.ask(method, path, hold if method == "POST" else None, token=tokens["viewer"])[0] == 403
    assert daemon.ask("POST", "/api/v1/release", hold, token=tokens["operator"])[0] == 403
    secret = tokens["admin"]
    assert daemon.ask("GET", f"/api/v1/summary?token={secret}", token=secret)[0] == 400
    assert daemon.ask("GET", f"/{secret}", token=secret)[0] == 404
    assert daemon.ask("POST", "/api/v1/hold", {secret: secret}, token=secret)[0] == 400
    for text in (
        f"GET /api/v1/summary HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\x01\r\n\r\n",
        f"{secret} {secret} {secret}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=PATIENCE_S) as raw:
            raw.sendall(text.encode())
            assert secret.encode() not in raw.recv(65_536)


def answers(daemon: RunningDaemon, token: str) -> Iterator[tuple[str, str]]:
    """Yield the answers of the interface to an administrator, the stream's beginning included."""
    for route in READING:
        if "{" in route.path or route.path.endswith("/events"):
            continue
        query = "?signal=rack.power_w&name=lab/h/r1" if route.path.endswith("/history") else ""
        yield route.path, str(daemon.ask("GET", route.path + query, token=token))
    for path in ("/metrics", "/openapi.json", "/", "/readyz", "/api/v1/state/rack"):
        yield path, str(daemon.ask("GET", path, token=token))
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_S)
    connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    yield "/api/v1/events", "".join(response.readline().decode() for _ in range(8))
    response.close()
    connection.close()


def processes(pid: int) -> Iterator[tuple[str, str]]:
    """Command line and environment of a process and of all that it started."""
    own = psutil.Process(pid)
    for one in (own, *own.children(recursive=True)):
        for name in ("cmdline", "environ", "comm"):
            yield (
                f"/proc/{one.pid}/{name}",
                Path(f"/proc/{one.pid}/{name}").read_bytes().decode(errors="replace"),
            )


def files(daemon: RunningDaemon) -> Iterator[tuple[str, str]]:
    """All that it wrote: as it is, and what is packed unpacked."""
    yield "the log", daemon.log.read_text(errors="replace")
    for path in sorted((daemon.folder / "state").rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes().decode("latin-1")
    reader = TraceReader(daemon.run_folder)
    yield "the trace's header", repr(reader.first_header())
    yield "the trace", repr([frame.events for frame in reader])
    for path in (daemon.folder / "state").rglob("*.sqlite*"):
        if path.suffix == ".sqlite":
            with sqlite3.connect(path) as rows:
                yield str(path), "\n".join(rows.iterdump())


def shown(text: str, secrets: dict[str, str]) -> list[str]:
    """Return the secrets that a text shows, plain, in Basic or as a URL or JSON would write them."""
    found = []
    for name, secret in secrets.items():
        forms = {secret, json.dumps(secret)[1:-1], secret.replace("/", "%2F").replace("&", "%26")}
        forms |= {base64.b64encode(f"{user}:{secret}".encode()).decode() for user in ("twin", "someone")}
        found += [name] * any(form in text for form in forms)
    return found


@pytest.mark.long
def test_no_secret_of_a_running_daemon_is_ever_seen(server: Server, tmp_path: Path) -> None:
    paths = write_secrets(tmp_path / "secrets")
    accounts = tmp_path / "accounts"
    subprocess.run(
        [str(server("mosquitto_passwd", "mosquitto")), "-b", "-c", str(accounts), "twin", SECRETS["broker"]],
        check=True, capture_output=True,
    )  # fmt: skip
    accounts.chmod(0o644)
    tokens_file = tmp_path / "tokens.yaml"
    tokens: dict[str, str] = {role: add_token(tokens_file, role, role) for role in ROLES}
    lines = (f"password_file {accounts}",)
    with mosquitto(server, tmp_path, lines, open_to_all=False) as broker, parrot() as (port, heard):
        more = settings(paths, port)
        daemon = RunningDaemon(tmp_path / "one", broker.port, **more)
        api = free_port()
        daemon.port = api
        daemon.config["broker"] |= {"username": "twin", "password_file": paths["broker"]}
        daemon.config["api"] = {"port": api, "tokens_file": str(tokens_file)}
        daemon.write_config()
        daemon.token = lambda: tokens["admin"]  # type: ignore[method-assign]
        texts: list[tuple[str, str]] = []
        try:
            daemon.start()
            assert daemon.process is not None
            try_to_come_in(daemon, tokens)
            kinds = {"etcd", "scrape", "influx", "webhook"}
            measure(broker.port)
            daemon.until(
                lambda: kinds <= set(shown(str(heard), SECRETS)),
                "each secret to be sent where it belongs",
            )
            daemon.send(signal.SIGHUP)
            daemon.until(lambda: "reload" in daemon.words(), "the reload")
            texts += processes(daemon.process.pid)
            texts += answers(daemon, tokens["admin"])
            daemon.until(lambda: len({r["why"] for r in refusals(daemon)}) >= 3, "refusals on record")
            broker.stop()  # the link's complaints
            daemon.until(lambda: "mqtt" in daemon.words(), "the link to be missed")
            texts += answers(daemon, tokens["admin"])
            daemon.stop()
        finally:
            daemon.kill()
    why = {row["why"] for row in refusals(daemon)}
    assert {"no token", "no such token", "role too small"} <= why
    assert any(row.get("name") == "viewer" and row["needs"] == "operator" for row in refusals(daemon))
    everything = SECRETS | IN_URLS | tokens
    texts += files(daemon)
    assert {name: shown(text, everything) for name, text in texts if shown(text, everything)} == {}
    assert shown(f"so {SECRETS['broker']} was", everything) == ["broker"]  # the search can find


def refusals(daemon: RunningDaemon) -> list[dict[str, Any]]:
    """Refused accesses in the journal."""
    return [line.get("body", line) for line in daemon.journal("access")]
