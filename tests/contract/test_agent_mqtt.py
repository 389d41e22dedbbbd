"""The node agent as a process, over a real Mosquitto: what racktwin publishes is obeyed, answered and echoed.

The GPUs are simulated; everything between the two ends is real.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from racktwin_agent.config import Broker
from racktwin_agent.fleet import Fleet
from racktwin_agent.publish import Out
from racktwin_agent.simulated import SimulatedDevices

from connectors.agents import ContingencyTerms, ItDecoder, ResultDecoder, contingency_of
from connectors.agents.command import requests_of
from tests.contract.test_mosquitto_acl import Secured, secured  # noqa: F401
from tests.support.builders import site_of
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.node_agents import NODE, Client, Heard, agent, frames, results, start, status, write_config
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS
from twin.cli.acl import agent_user
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import Block, CommandAcked, FaultReported, Message, Reading

pytestmark = pytest.mark.slow
Server = Callable[..., Path]


def a_site() -> Site:
    """Two nodes of four GPUs; caps from 200 to 1200 W, safe 600 W."""
    profile = {"name": "r1", "profile": "gb200-nvl72", "nodes": 2, "gpus_per_node": 4}
    return site_of({"site": "lab", "halls": [{"name": "h", "racks": [profile]}]})


SITE = a_site()
SAFE_W = float(SITE.envelopes["gpu.power_cap_w"].safe[0])


def batch(values: list[float], command: int = 17, epoch: int = 3, lease_s: float = 30.0, **more: Any) -> Any:
    n, now = len(values), time.time_ns()
    plain = CommandBatch(
        "gpu.power_cap_w",
        "thermal_guard",
        epoch,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
        command + np.arange(n),
        np.array(values),
        "a test",
        now,
        now + round(lease_s * NS),
        now + 10 * NS,
    )
    return replace(plain, **more)


def ask(client: Client, wanted: CommandBatch, **changes: Any) -> float:
    ((topic, payload),) = requests_of(wanted, SITE, "racktwin")
    if changes:
        payload = msgspec.json.encode(msgspec.json.decode(payload) | changes)
    return client.say(topic, payload)


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running:
        yield running


def decoded(message: Heard, decoder: Any) -> list[Any]:
    items = decoder.decode(Message(time.time_ns(), message.topic, msgspec.json.encode(message.body)))
    assert isinstance(items, list)
    return items


def test_a_request_is_carried_out_answered_and_echoed_as_racktwin_reads_it(
    broker: Mosquitto, tmp_path: Path
) -> None:
    # samples come every 30 s: what is seen before that is the echo
    with Client(broker.port) as client, agent(write_config(tmp_path, broker.port, interval_s=30)):
        online = client.wait(status(state="online", contingency="none"))
        (reading,) = decoded(online, ResultDecoder(SITE))
        assert isinstance(reading, Reading)
        assert (reading.table, reading.signal, reading.value) == ("node", "agent_state", 0.0)
        (first, _) = decoded(client.wait(frames(0, 1200)), ItDecoder(SITE))
        assert isinstance(first, Block)
        assert {"power_w", "temp_c", "power_limit_w", "clock_event_bits"} <= set(first.signals)
        for number in range(12):
            mark, watts = client.mark(), 400.0 + number
            ask(client, batch([watts] * 5, 100 * (number + 1)))  # GPU 4 is the other node's
            client.wait(frames(3, watts), mark)
            answer = client.wait(results("done"), mark)
        assert answer.body["names"] == ["gpu0", "gpu1", "gpu2", "gpu3"]
        acks = decoded(answer, ResultDecoder(SITE, "racktwin", 3))
        assert [a.state for a in acks] == ["done"] * 4
        assert acks[3] == CommandAcked(
            control="gpu.power_cap_w", name=f"{NODE}/gpu3", generation=0, command="3-1203", state="done"
        )
    client.wait(status(state="offline"))


def test_what_is_refused_is_answered_with_its_reason(broker: Mosquitto, tmp_path: Path) -> None:
    with Client(broker.port) as client, agent(write_config(tmp_path, broker.port)):
        client.wait(status(state="online"))
        ask(client, batch([700.0], 1, epoch=5))
        client.wait(results("done"))

        def refused(wanted: CommandBatch, **changes: Any) -> str:
            mark = client.mark()
            ask(client, wanted, **changes)
            return str(client.wait(results("failed"), mark).body["details"][0])

        late = time.time_ns() - 40 * NS
        assert "expired" in refused(batch([300.0], 2, epoch=5, issued_ns=late, expires_ns=late + 30 * NS))
        assert refused(batch([300.0], 999, epoch=4)) == "epoch 4 is older than 5: another daemon leads"
        assert "outside 200..1200" in refused(batch([5000.0], 3, epoch=5))
        assert "no gpu.power_cap_w of gpu7" in refused(batch([300.0], 4, epoch=5), names=["node0/gpu7"])
        mark = client.mark()
        for changes in (
            {"control": "node.power_cap_w"},
            {"path": "lab/h/r2"},
            {"names": ["../r2/node0/gpu0"]},
            {"values": []},
            {"v": 2},
            {"epoch": -1},
            {"commands": ["1"]},
        ):
            ask(client, batch([300.0], 5, epoch=5), **changes)
        client.say("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1", b"[" * 100_000)
        client.say("IT/v1/other/Request/gpu.power_cap_w/lab/h/r1", b"{}")
        client.say("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1", b" " * 3 * 2**20)
        ask(client, batch([650.0], 6, epoch=5))
        client.wait(results("done"), mark)
        assert [m for m in client.heard[mark:] if results("failed")(m)] == []
        client.wait(frames(0, 650), mark)


def test_a_killed_agent_carries_out_the_lapse_when_it_is_started_again(
    broker: Mosquitto, tmp_path: Path
) -> None:
    config = write_config(tmp_path, broker.port)
    with Client(broker.port) as client:
        with agent(config) as process:
            client.wait(status(state="online"))
            ask(client, batch([300.0] * 4, lease_s=3.0))
            client.wait(frames(3, 300))
            mark = client.mark()
            process.send_signal(signal.SIGKILL)
            process.wait()
            client.wait(status(state="offline"), mark)  # the last will
        mark = client.mark()
        with agent(config):
            # simulated GPUs forget: what is seen is that the new agent ends the lease of the killed one
            client.wait(status(state="online", epoch=3), mark)
            client.wait(frames(3, SAFE_W), mark)
            text = config.with_name("agent.log").read_text()
            assert "resumed 4 leases, epoch 3" in text
            mark = client.mark()
            ask(client, batch([300.0], 999, epoch=2))
            assert "older than 3" in client.wait(results("failed"), mark).body["details"][0]


def contingency(client: Client, caps: list[float], hold_s: float = 1.0, **more: Any) -> None:
    now = time.time_ns()
    ((topic, payload),) = contingency_of(
        SITE,
        np.arange(len(caps), dtype=np.int32),
        np.array(caps),
        ContingencyTerms("racktwin", 3, now, now + 3600 * NS, hold_s=hold_s, **more),
    )
    client.say(topic, payload, retain=True)


def test_without_a_broker_the_caps_delivered_beforehand_are_applied_and_later_given_back(
    broker: Mosquitto, tmp_path: Path
) -> None:
    config = write_config(tmp_path, broker.port, "[triggers]\nbroker_gone_s = 1.5")
    with agent(config):
        with Client(broker.port) as client:
            client.wait(status(state="online", contingency="none"))
            contingency(client, [450.0, 450.0, 450.0, 450.0])
            client.wait(status(contingency="armed"))
            ask(client, batch([400.0, 900.0], lease_s=120.0))
            client.wait(frames(1, 900))
        broker.stop()
        log = config.with_name("agent.log")
        until = time.monotonic() + PATIENCE_S
        while "broker_gone" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        state = msgspec.json.decode((tmp_path / "state" / "state.json").read_bytes())
        assert state["contingency"]["trigger"] == "broker_gone"
        broker.start()
        with Client(broker.port) as client:
            # 400 W was lower than its contingency cap, and stays; what was not commanded is lowered as well
            active = client.wait(status(state="online", contingency="active:broker_gone"))
            assert active.body["epoch"] == 3
            fault = client.wait(lambda m: m.topic == f"IT/v1/PUB/Event/{NODE}")
            (event,) = decoded(fault, ItDecoder(SITE))
            assert isinstance(event, FaultReported)
            assert (event.table, event.name) == ("node", NODE)
            assert "broker_gone" in event.detail
            client.wait(lambda m: frames(0, 400)(m) and frames(1, 450)(m) and frames(3, 450)(m))
            client.wait(status(contingency="armed"))
            client.wait(lambda m: frames(0, 400)(m) and frames(1, 900)(m) and frames(3, 1200)(m))


def test_a_lost_power_supply_lowers_caps_and_commands_wait_behind_them(
    broker: Mosquitto, tmp_path: Path
) -> None:
    supply = tmp_path / "psu"
    supply.write_text("1\n")
    tables = f'[[triggers.psu]]\nname = "psu1"\nfile = "{supply}"\n'
    config = write_config(tmp_path, broker.port, tables)
    with Client(broker.port) as client, agent(config):
        client.wait(status(state="online"))
        contingency(client, [500.0] * 4)
        client.wait(status(contingency="armed"))
        supply.write_text("0\n")
        client.wait(status(contingency="active:psu_lost"))
        client.wait(frames(2, 500))
        mark = client.mark()
        ask(client, batch([800.0, 300.0]))
        answer = client.wait(results("accepted"), mark)
        assert answer.body["states"] == ["accepted", "done"]
        assert "contingency" in answer.body["details"][0]
        client.wait(lambda m: frames(0, 500)(m) and frames(1, 300)(m), mark)
        supply.write_text("1\n")
        client.wait(lambda m: frames(0, 800)(m) and frames(1, 300)(m) and frames(2, 1200)(m), mark)


def test_xids_of_the_kernels_log_are_told_once_with_the_same_id(broker: Mosquitto, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.log"
    line = "NVRM: Xid (PCI:0000:03:00): 79, pid=123, name=python, GPU has fallen off the bus.\n"
    kernel.write_text("something else\n" + line)
    config = write_config(tmp_path, broker.port, kernel_log=str(kernel))
    decoder, seen = ItDecoder(SITE), []
    with Client(broker.port) as client:
        for _ in range(2):
            mark = client.mark()
            with agent(config):
                heard = client.wait(lambda m: "/Event/" in m.topic, mark)
                seen += decoded(heard, decoder)
        mark = client.mark()
        with agent(config):
            client.wait(lambda m: "/Event/" in m.topic, mark)
            with open(kernel, "a") as file:
                file.write(line.replace("79", "48"))
            (other,) = decoded(
                client.wait(lambda m: "/Event/" in m.topic and m.body["code"] == 48, mark), decoder
            )
    assert seen[0] == seen[1]
    assert (seen[0].table, seen[0].name, seen[0].code) == ("gpu", f"{NODE}/gpu2", 79)
    assert other.id != seen[0].id


def test_a_request_that_was_retained_is_not_obeyed(broker: Mosquitto, tmp_path: Path) -> None:
    with Client(broker.port) as client:
        ((topic, payload),) = requests_of(batch([300.0]), SITE, "racktwin")
        client.say(topic, payload, retain=True)
        with agent(write_config(tmp_path, broker.port)):
            client.wait(status(state="online"))
            ask(client, batch([1000.0, 500.0], 1))
            client.wait(frames(1, 500))
            assert [m for m in client.heard if frames(0, 300)(m)] == []


def test_a_flood_of_requests_loses_some_and_harms_nothing(broker: Mosquitto, tmp_path: Path) -> None:
    config = write_config(tmp_path, broker.port)
    with Client(broker.port, hears="IT/v1/PUB/#") as client, agent(config) as process:
        client.wait(status(state="online"))
        ((topic, _),) = requests_of(batch([300.0]), SITE, "racktwin")
        for _ in range(3000):
            client._mqtt.publish(topic, b"x" * 30_000)
        until = time.monotonic() + PATIENCE_S
        while not [m for m in client.heard[-200:] if frames(0, 444)(m)]:
            assert time.monotonic() < until
            ask(client, batch([444.0], 99, renewal=True))
            time.sleep(0.5)
        assert process.poll() is None
        status_text = Path(f"/proc/{process.pid}/status").read_text()
        (peak,) = [line for line in status_text.splitlines() if line.startswith("VmHWM")]
        assert int(peak.split()[1]) < 200_000, peak


def test_a_second_agent_of_the_same_state_folder_does_not_start(broker: Mosquitto, tmp_path: Path) -> None:
    config = write_config(tmp_path, broker.port)
    with Client(broker.port) as client, agent(config):
        client.wait(status(state="online"))
        other = start(config)
        assert other.wait(20) == 1
    assert "another agent uses this folder" in config.with_name("agent.log").read_text()


def test_an_agent_without_a_broker_or_with_a_wrong_password_goes_on_trying_and_stops_at_once(
    server: Server, tmp_path: Path
) -> None:
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    secret.write_text("right\n")
    subprocess.run(
        [str(server("mosquitto_passwd", "mosquitto")), "-c", "-b", str(passwords), "agent", "right"],
        check=True,
    )
    passwords.chmod(0o644)
    lines = (f"password_file {passwords}",)
    login = f'username = "agent"\npassword_file = "{secret}"'
    with mosquitto(server, tmp_path, lines, open_to_all=False) as broker:
        config = write_config(tmp_path, broker.port, broker=login)
        log = config.with_name("agent.log")

        def told(text: str) -> None:
            until = time.monotonic() + PATIENCE_S
            while text not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)

        with agent(config):
            told("broker: connected")
        secret.write_text("wrong\n")
        with agent(config):
            told("the broker refuses us")
        broker.stop()
        with agent(config) as process:
            told("cannot be reached")
            process.terminate()
            assert process.wait(5) == 0
    assert "right" not in log.read_text()
    assert "wrong" not in log.read_text()


def test_an_order_on_the_power_is_answered_and_read_back_before_its_program_runs(
    broker: Mosquitto, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    program = f"[\"{sys.executable}\", \"-c\", \"open(r'{ran}', 'a').write('x')\"]"
    tables = f'[power]\nenable = ["shutdown"]\nshutdown_command = {program}'
    config = write_config(tmp_path, broker.port, tables)

    def answered(m: Heard) -> bool:
        return m.topic == f"IT/v1/racktwin/Result/node.power_state/{NODE}"

    def reads_back(m: Heard) -> bool:
        return "/Frame/" in m.topic and m.body.get("node", {}).get("power_readback_state") == [1]

    order = replace(batch([1.0]), control="node.power_state", deadline_ns=time.time_ns() + 120 * NS)
    with Client(broker.port) as client:
        with agent(config):
            client.wait(status(state="online"))
            ask(client, order)
            answer = client.wait(answered)
            assert (answer.body["states"], ran.exists()) == (["accepted"], False)
            frame = client.wait(reads_back)
            signals = {s for block in decoded(frame, ItDecoder(SITE)) for s in block.signals}
            assert "power_readback_state" in signals
            for _ in range(200):
                if ran.exists() and ran.read_text():
                    break
                time.sleep(0.05)
            ask(client, replace(order, value=np.array([2.0]), command=np.array([18])))
            refused = client.wait(lambda m: answered(m) and m.body["states"] == ["failed"])
            assert "off is not enabled here" in refused.body["details"][0]
        with agent(config):  # as after a boot
            mark = client.mark()
            client.wait(status(state="online"), mark)
            ask(client, replace(order, renewal=True, issued_ns=time.time_ns()))
            client.wait(lambda m: answered(m) and m.body["states"] == ["done"], mark)
            client.wait(reads_back, client.mark())
    assert ran.read_text() == "x"


def test_an_agent_with_a_certificate_under_the_shipped_access_list(secured: Secured, tmp_path: Path) -> None:  # noqa: F811
    site = site_of({"site": "lab", "halls": [{"name": "h1", "racks": [
        {"name": "r1", "profile": "gb200-nvl72"}]}]})  # fmt: skip
    node, port = "lab/h1/r1/node0", secured.broker.port
    authority = secured.authority
    cert, key = authority.issue(agent_user(node))
    tls = f'[broker.tls]\nca_file = "{authority.ca}"\ncert_file = "{cert}"\nkey_file = "{key}"'
    config = write_config(tmp_path / "agent", port, broker=tls, node=node)
    identity = (str(authority.ca), *authority.issue("racktwin"))
    with Client(port, identity) as client, agent(config):
        client.wait(frames(3, 1200, node))
        client.wait(lambda m: m.topic == f"IT/v1/PUB/Agent/{node}" and m.body["state"] == "online")
        now = time.time_ns()
        terms = ContingencyTerms("racktwin", 3, now, now + 60 * NS)
        ((topic, plan),) = contingency_of(site, np.arange(4, dtype=np.int32), np.full(4, 500.0), terms)
        client.say(topic, plan, retain=True)
        client.wait(lambda m: m.topic == f"IT/v1/PUB/Agent/{node}" and m.body["contingency"] == "armed")
        for topic, payload in requests_of(batch([450.0] * 4), site, "racktwin"):
            client.say(topic, payload)
        client.wait(frames(3, 450, node))
        client.wait(results("done", node))


def test_a_fleet_of_many_nodes_obeys_as_agents_do(broker: Mosquitto, tmp_path: Path) -> None:
    site = site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r[1-2]", "profile": "gb200-nvl72"}]}]})  # fmt: skip
    assert site.sizes["node"] == 36
    devices = {site.name("node", i): SimulatedDevices(4, seed=i) for i in range(36)}
    moved: list[float] = []

    def plant(seconds: float) -> list[Out]:
        moved.append(seconds)
        return [Out("IT/v1/PUB/Test/plant", b"1")]

    config = Broker("127.0.0.1", broker.port, "fleet")
    with Client(broker.port) as client:
        with Fleet(devices, config, interval_s=0.5, before_step=plant) as fleet:
            client.wait(frames(3, 1200, site.name("node", 35)))
            client.wait(lambda m: m.topic == "IT/v1/PUB/Test/plant")
            wanted = batch([450.0] * 144)
            mark = client.mark()
            for topic, payload in requests_of(wanted, site, "racktwin"):
                client.say(topic, payload)
            for i in range(36):
                client.wait(frames(3, 450, site.name("node", i)), mark)
                client.wait(results("done", site.name("node", i)), mark)
            client.say("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1", b"nonsense")
            short = batch([300.0] * 144, 1000, lease_s=1.0)
            for topic, payload in requests_of(short, site, "racktwin"):
                client.say(topic, payload)
            for i in (0, 35):
                client.wait(frames(0, 300, site.name("node", i)))
                mark = client.mark()
                client.wait(frames(0, SAFE_W, site.name("node", i)))
            assert fleet.refused == 1
            assert fleet.lost == 0
        gone = client.wait(
            lambda m: m.topic == f"IT/v1/PUB/Agent/{site.name('node', 35)}" and m.body["state"] == "offline"
        )
        assert gone.body["epoch"] == 3
    assert sum(moved) >= 1


def test_a_fleet_whose_plant_fails_says_so(broker: Mosquitto, tmp_path: Path) -> None:
    def broken(seconds: float) -> list[Out]:
        raise ZeroDivisionError("no plant")

    said: list[str] = []
    fleet = Fleet({NODE: SimulatedDevices(1)}, Broker("127.0.0.1", broker.port, "f"), before_step=broken,
                  state_dir=tmp_path / "fleet", say=said.append)  # fmt: skip
    fleet.start()
    with pytest.raises(ZeroDivisionError):
        fleet.stop()
    assert any("no plant" in text for text in said)
