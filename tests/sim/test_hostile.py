"""A node's identity in the hands of an attacker: a real daemon, a broker as we ship it, a real agent beside.

What it forges about others or in the daemon's name goes nowhere; what it floods and garbles about itself is
counted, bounded and harmless to who reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.agents.frame import FAULT_BURST, FAULT_PER_S
from tests.support.builders import two_racks
from tests.support.daemon_process import ROOT, RunningDaemon
from tests.support.node_agents import NODE, Client, agent, write_config
from tests.support.patience import PATIENCE_S
from tests.support.secured_mosquitto import Secured, secured_broker
from twin.cli.acl import agent_user
from twin.run import verify_journal

pytestmark = pytest.mark.slow
Server = Callable[..., Path]
NS = 10**9
MINE = "lab/h/r1/node1"  # the attacker's own node; NODE is its neighbour's
NASTY = "\x1b]0;owned\x07\x1b[2J\r\n<3>twin: forged line\u202e<img src=x onerror=alert(1)>[red]"
SITE = two_racks(policies={"thermal_guard": {"authority": "act"}, "operator": {"authority": "act"}})


def tls(files: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("ca_file", "cert_file", "key_file"), files, strict=True))


@contextmanager
def daemon_on(secured: Secured, folder: Path) -> Iterator[RunningDaemon]:
    daemon = RunningDaemon(folder, secured.broker.port, site=SITE)
    daemon.config["broker"]["tls"] = tls(secured.files("racktwin"))
    daemon.write_config()
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()


@contextmanager
def agent_on(secured: Secured, folder: Path) -> Iterator[Path]:
    """A real agent of NODE; where its state is."""
    lines = "\n".join(f'{key} = "{path}"' for key, path in tls(secured.files(agent_user(NODE))).items())
    with agent(write_config(folder, secured.broker.port, f"[broker.tls]\n{lines}")):
        yield folder / "state" / "state.json"


def request(epoch: int, watts: float) -> bytes:
    now = time.time_ns()
    body = {"v": 1, "path": "lab/h/r1", "control": "gpu.power_cap_w", "policy": "x", "epoch": epoch,
            "issued_ns": now, "expires_ns": now + 600 * NS, "names": ["node0/gpu0"], "generations": [0],
            "commands": [1], "values": [watts], "lapse": [watts], "reason": "forged"}  # fmt: skip
    return json.dumps(body).encode()


def forgeries() -> Iterator[tuple[str, bytes]]:
    """In the name of the daemon, of the neighbour, of others altogether."""
    own, now = "IT/v1/racktwin", time.time_ns()
    yield f"{own}/Request/gpu.power_cap_w/lab/h/r1", request(2**53 - 1, 300.0)
    plan = json.loads(request(2**53 - 1, 300.0))
    plan |= {"caps_w": [300.0], "triggers": ["broker_gone"], "hold_s": 86_400}
    yield f"{own}/Contingency/lab/h/r1", json.dumps(plan).encode()
    yield f"{own}/Daemon/two", b'{"v":1,"state":"online","role":"leader","epoch":9007199254740991,"t_ns":1}'
    yield f"{own}/Canary/racktwin", b"spoofed"
    frame = {"t_ns": now, "gpu": {"temp_c": [99.0] * 4, "power_limit_w": [1.0] * 4}}
    yield f"IT/v1/PUB/Frame/{NODE}", json.dumps(frame).encode()
    yield "IT/v1/PUB/Frame/lab/h/r1", json.dumps(frame).encode()
    yield f"IT/v1/PUB/Agent/{NODE}", b'{"state":"offline","t_ns":1}'
    yield (
        "IT/v1/PUB/Event/jobs/slurm",
        b'{"type":"JobStarted","id":"1","job":"mine","nodes":["lab/h/r1/node0"]}',
    )
    yield "BMS/v1/PUB/Value/Rack/RackPower/x", b'{"value":1,"timestamp":1}'
    yield "telegraf/x", b"cpu,host=x usage=1"
    yield f"{own}/Result/gpu.power_cap_w/{NODE}", b"{}"


def garbage() -> Iterator[tuple[str, bytes]]:
    """On its own topics, where the broker lets it speak."""
    frame, event, state = (f"IT/v1/PUB/{what}/{MINE}" for what in ("Frame", "Event", "Agent"))
    for payload in (b"", b"\xff\xfe", b"[" * 200_000, b'{"t_ns":NaN}', b"\xdf" + b"\x81" * 50_000, b"null"):
        for topic in (frame, event, state, f"IT/v1/racktwin/Result/gpu.power_cap_w/{MINE}"):
            yield topic, payload
    for t_ns in (2**62 - 1, 2**63, -1, 0, 10**400):
        yield frame, json.dumps({"t_ns": t_ns, "gpu": {"temp_c": [1e308, -1e308, 1.5, None]}}).encode()
    yield frame, json.dumps({"t_ns": time.time_ns(), "from": NODE, "gpu": {"temp_c": [99.0] * 4}}).encode()
    yield event, json.dumps({"type": "JobEnded", "id": "1", "job": NASTY, "from": NASTY}).encode()
    for name in (NODE, f"{NODE}/gpu0", "lab", NASTY):
        yield event, json.dumps(fault(name, 0)).encode()
    yield state, json.dumps({"state": "online", "t_ns": 2**62 - 1, "version": NASTY, "epoch": 2**61}).encode()
    answer = {"v": 1, "epoch": 2**53 - 1, "t_ns": 1, "names": ["gpu0"], "generations": [0],
              "commands": [2**62 - 1], "states": ["failed"], "details": [NASTY]}  # fmt: skip
    yield f"IT/v1/racktwin/Result/gpu.power_cap_w/{MINE}", json.dumps(answer).encode()
    yield f"IT/v1/racktwin/Result/\u202e<img src=x onerror=alert(1)>[red]/{MINE}", b"{}"


def fault(name: str, number: int, detail: str = NASTY) -> dict[str, Any]:
    return {"type": "FaultReported", "id": f"{number}", "table": NASTY[:40], "name": name, "code": 79,
            "detail": detail}  # fmt: skip


def cli(daemon: RunningDaemon, *words: str) -> str:
    """Return the output of a command of people."""
    environment = {**os.environ, "RACKTWIN_TOKEN": daemon.token(), "NO_COLOR": "1", "COLUMNS": "200"}
    url = f"http://127.0.0.1:{daemon.port}"
    command = [sys.executable, "-m", "twin", *words, "--url", url]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def column(daemon: RunningDaemon, node: str, signal: str) -> list[Any]:
    """A signal of the GPUs of a node; empty where nobody has measured it."""
    found = daemon.get(f"/api/v1/state/gpu?prefix={node}&signals={signal}")["signals"][signal]
    return found["value"] if set(found["quality"]) == {"good"} else []


@pytest.mark.long
def test_an_attacker_with_the_identity_of_one_node_harms_itself_alone(server: Server, tmp_path: Path) -> None:
    with (
        secured_broker(server, tmp_path, yaml.safe_dump(SITE)) as secured,
        daemon_on(secured, tmp_path / "daemon") as daemon,
        agent_on(secured, tmp_path / "agent") as state,
        Client(secured.broker.port, secured.files(agent_user(MINE)), "IT/v1/racktwin/Daemon/#") as attacker,
    ):
        daemon.until(lambda: heard(daemon, NODE), "the neighbour's readings")
        before = daemon.get("/api/v1/messages")["messages"]["bad"]
        for retain in (False, True):
            for topic, payload in forgeries():
                attacker.say(topic, payload, retain=retain)
            for topic, payload in garbage():
                attacker.say(topic, payload, retain=retain)
        begun = time.monotonic()
        for number in range(1500):  # 5 MB of events, as fast as they go
            body = json.dumps(fault(MINE, number, NASTY + "x" * 3200))
            attacker.say(f"IT/v1/PUB/Event/{MINE}", body.encode())
        now = time.time_ns()
        own = {"t_ns": now, "gpu": {"temp_c": [41.0] * 4}}
        attacker.say(f"IT/v1/PUB/Frame/{MINE}", json.dumps(own).encode())
        daemon.until(
            lambda: heard(daemon, MINE, 41.0), what="its own true reading, after those of the future"
        )
        flooded_s = time.monotonic() - begun

        ask = {
            "control": "gpu.power_cap_w",
            "names": [f"{NODE}/gpu0"],
            "hi": 900.0,
            "reason": "test",
            "for_s": 60,
        }
        daemon.post("/api/v1/requests", ask)
        daemon.until(
            lambda: column(daemon, NODE, "power_limit_w")[:1] == [900.0],
            "the daemon's own command to be obeyed",
        )
        book = json.loads(state.read_text())["book"]
        assert book["epoch"] == daemon.get("/api/v1/summary")["epoch"] < 2**40
        assert [lease[2]["value"] for lease in book["leases"]] == [900.0]
        assert json.loads(state.read_text())["contingency"]["plan"] in (None, *plans(state, 300.0))

        messages = daemon.get("/api/v1/messages")["messages"]
        assert messages["bad"] - before > 1000
        blamed = {s["name"] for s in daemon.get("/api/v1/sources")["sources"] if s["unused"]}
        assert f"agent {MINE}" in blamed
        assert not any(NODE in name for name in blamed)
        told = [line["body"]["event"] for line in daemon.journal("event")]
        assert {event["name"] for event in told if event["type"] == "FaultReported"} == {MINE}
        assert not [event for event in told if event["type"].startswith("Job")]
        readable(daemon)
        daemon.stop()
    size = sum(p.stat().st_size for p in daemon.run_folder.glob("journal*.jsonl"))
    assert size < 2 * (FAULT_BURST + FAULT_PER_S * flooded_s) + 10**6, "an attacker fills the journal"
    verify_journal(daemon.run_folder / "journal.jsonl")


def heard(daemon: RunningDaemon, node: str, temp_c: float | None = None) -> bool:
    found = column(daemon, node, "temp_c")
    return len(found) == 4 and (temp_c is None or found == [temp_c] * 4)


def plans(state: Path, watts: float) -> Iterator[Any]:
    """The plan that is armed, unless it is the forged one."""
    plan = json.loads(state.read_text())["contingency"]["plan"]
    if plan is not None and watts not in plan[5].values():
        yield plan


def readable(daemon: RunningDaemon) -> None:
    """Whatever people read of it is plain text, a line for each thing."""
    for words in (("status",), ("alarm", "list"), ("control", "decisions", "--limit", "200")):
        said = cli(daemon, *words)
        harmless(said)
    harmless(daemon.log.read_text(errors="replace"))


def harmless(text: str) -> None:
    """Lines that neither drive a terminal nor turn the direction of writing; none is the attacker's own."""
    assert not set("\x1b\x07\u202e") & set(text)
    assert not any(line.startswith("<3>") for line in text.splitlines())
