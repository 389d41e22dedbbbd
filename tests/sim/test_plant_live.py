"""`racktwin simulation publish` with a real broker and daemon: a site that is seen, obeys and lets go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connectors.agents import ResultDecoder
from connectors.agents.command import requests_of
from tests.support.builders import START_NS, site_of
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.node_agents import Client, Heard
from tests.support.plant_process import CAP, EVERY, LEASE_S, SAFE_W, SINCE, SITE, PlantProcess, done, good
from twin.catalogue import NS
from twin.contracts import CommandBatch
from twin.plant import Plant, Sensors, scenario_of
from twin.simulation import LivePlant
from twin.site import Site
from twin.telemetry import CommandAcked, Message

pytestmark = [pytest.mark.slow, pytest.mark.long]
Server = Callable[..., Path]

QUIET = {"name": "quiet", "hours": 1, "seed": 1}


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(SITE)


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


def limits(daemon: RunningDaemon) -> np.ndarray:
    rows = daemon.get("/api/v1/state/gpu?signals=power_limit_w&limit=1000")["signals"]["power_limit_w"]
    return np.array([np.nan if v is None else v for v in rows["value"]], float)


def now() -> float:
    return float(int(time.time()))


def jobs(daemon: RunningDaemon) -> set[str]:
    """Jobs that its journal saw begin."""
    events = [line["body"]["event"] for line in daemon.journal("event")]
    return {e["job"] for e in events if e["type"] == "JobStarted"}


def frame_limits(message: Heard) -> list[float | None]:
    """The caps of rack r1 in its frame."""
    if message.topic != "IT/v1/PUB/Frame/lab/h/r1" or message.body is None:
        return []
    return list(message.body["gpu"]["power_limit_w"])


def test_the_daemon_sees_the_site_caps_it_and_lets_go_when_it_dies(broker: Mosquitto, tmp_path: Path) -> None:
    with (
        running(tmp_path / "d", broker.port, site=SITE) as daemon,
        PlantProcess(tmp_path / "p", broker.port, SITE) as plant,
        Client(broker.port) as client,
    ):
        seen = ("gpu.temp_c", "node.power_w", "rack.flow_lpm", "cdu.supply_temp_c", "feeder.power_w")
        daemon.until(lambda: all(good(daemon, key) == 1.0 for key in seen), what="the whole site heard")
        daemon.until(lambda: jobs(daemon), what="the jobs that run")
        daemon.until(lambda: (limits(daemon) > 1000).all(), what="the limits of all GPUs")
        ask = {"control": CAP, "names": ["lab/h/r1"], "hi": 700, "reason": "a test", "for_s": 600}
        daemon.post("/api/v1/requests", ask)
        daemon.until(lambda: (limits(daemon)[:72] == 700.0).all(), what="caps carried out and read back")
        assert (limits(daemon)[72:] > 1000).all(), "the other rack is left alone"
        daemon.until(lambda: len(done(daemon, CAP)) == 72, what="the answers of the agents")
        daemon.kill()
        killed, mark = time.monotonic(), client.mark()
        lapsed = client.wait(lambda m: frame_limits(m)[:1] == [SAFE_W], mark, LEASE_S + 10)
        assert set(frame_limits(lapsed)) <= {SAFE_W, None}, "now and then a reading is missing"
        assert LEASE_S / 3 < lapsed.at_s - killed < LEASE_S + 4, "the lease ran out, the safe value holds"
        said = plant.stop()
        assert said["heard"]["requests"] > 0
        assert said["ended"] == "interrupted"


def test_a_job_saves_as_it_is_advised_and_says_so(broker: Mosquitto, tmp_path: Path) -> None:
    with (
        running(tmp_path / "d", broker.port, site=SITE) as daemon,
        PlantProcess(tmp_path / "p", broker.port, SITE, "--speed", "10") as plant,
    ):
        daemon.until(lambda: jobs(daemon), what="the jobs that run")
        told = [line["body"]["event"] for line in daemon.journal("event")]
        job = next(e["job"] for e in told if e["type"] == "JobStarted" and e["kind"] == "training")

        def named() -> list[str]:
            slots = [f"lab/job{k}" for k in range(8)]
            rows = ((name, daemon.get(f"/api/v1/entities/job/{name}")["job"]) for name in slots)
            return [name for name, found in rows if found and found["job"] == job]

        daemon.until(named, what="the slot of the job")
        ask = {"control": EVERY, "names": named(), "lo": 45, "hi": 45, "want": 45, "reason": "a test",
               "for_s": 600}  # fmt: skip
        daemon.post("/api/v1/requests", ask)
        daemon.until(lambda: done(daemon, EVERY) == set(named()), what="the new interval, as the job reports")
        daemon.post("/api/v1/requests", ask | {"control": SINCE} | dict.fromkeys(("lo", "hi", "want"), now()))
        daemon.until(lambda: done(daemon, SINCE) == set(named()), what="the save, as the job reports")
        assert plant.stop()["heard"]["advice"] >= 2


@pytest.fixture
def live(site: Site) -> LivePlant:
    return LivePlant(Plant(site, 1, scenario_of(QUIET, site)), Sensors(site, 1))


def order(value: float, command: int = 1, epoch: int = 1, now_ns: int = START_NS) -> CommandBatch:
    """A cap for the first two GPUs of the second rack, for 30 s."""
    gpus, numbers = np.array([72, 73], np.int32), np.array([command, command], np.int64)
    none, end_ns = np.zeros(2, np.int32), now_ns + 30 * NS
    return CommandBatch(
        CAP, "p", epoch, gpus, none, numbers, np.full(2, value), "why", now_ns, end_ns, now_ns
    )


def told(live: LivePlant, batch: CommandBatch, at_ns: int) -> None:
    for topic, payload in requests_of(batch, live.site, "racktwin"):
        live.receive(Message(at_ns, topic, payload))


def answers(live: LivePlant, now_ns: int) -> list[CommandAcked]:
    """Return the answers of the plant's agents in a second, as the daemon decodes them."""
    decoder, out = ResultDecoder(live.site, "racktwin"), []
    for topic, payload, _ in live.move(1.0, now_ns):
        if "/Result/" in topic:
            out += [a for a in decoder.decode(Message(now_ns, topic, payload)) if isinstance(a, CommandAcked)]
    return out


def test_agents_obey_refuse_the_deposed_and_the_late_and_lapse(live: LivePlant) -> None:
    caps, now = live.plant.truth.gpu_cap_w, START_NS
    told(live, order(700.0, epoch=2), now)
    said = answers(live, now := now + NS)
    assert [(a.name, a.state, a.command) for a in said] == [
        (f"lab/h/r2/node0/gpu{i}", "done", "2-1") for i in (0, 1)
    ]
    assert (caps[72:74] == 700.0).all()
    assert caps[74] > 1000.0
    told(live, order(600.0, command=2, epoch=1, now_ns=now), now)
    said = answers(live, now := now + NS)
    assert [a.state for a in said] == ["failed", "failed"], "an older epoch"
    told(live, order(600.0, command=3, epoch=2, now_ns=now - 40 * NS), now)
    said = answers(live, now := now + NS)
    assert [a.state for a in said] == ["failed", "failed"]
    assert "expired" in said[0].detail
    assert (caps[72:74] == 700.0).all()
    for _ in range(30):
        live.move(1.0, now := now + NS)
    assert (caps[72:74] == SAFE_W).all(), "30 s after it was issued the lease is over"


def test_speed_moves_the_physics_and_not_the_leases(site: Site) -> None:
    live, now = LivePlant(Plant(site, 1), Sensors(site, 1), speed=10.0), START_NS
    told(live, order(700.0), now)
    for _ in range(29):
        live.move(1.0, now := now + NS)
    assert live.plant.truth.time_s == pytest.approx(290.0)
    assert (live.plant.truth.gpu_cap_w[72:74] == 700.0).all()
    live.move(2.0, now + 2 * NS)
    assert (live.plant.truth.gpu_cap_w[72:74] == SAFE_W).all()


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        ("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r9", b"{}"),
        ("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1", b"{}"),
        ("IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1", b"[" * 5000),
        ("IT/v1/racktwin/Request/no.such/lab/h/r1", b"{}"),
        ("BMS/v1/racktwin/Value/Rack/RackPower/lab/r1/power_w", b'{"value":1,"timestamp":1,"quality":1}'),
        ("BMS/v1/racktwin/Value/Rack/RackLiquidIsolationRequest/lab/r1/liquid_isolation_request_state",
         b'{"value":7,"timestamp":1,"quality":1}'),
        ("BMS/v1/racktwin/Value/CDU/LiquidTemperatureSpRequest/lab/cdu1/supply_temp_request_c", b"\xff"),
    ],
)  # fmt: skip
def test_nonsense_is_counted_and_changes_nothing(live: LivePlant, topic: str, payload: bytes) -> None:
    live.receive(Message(START_NS, topic, payload))
    assert live.counts["not understood"] == 1
    live.move(1.0, START_NS + NS)
    assert not live.plant.truth.rack_isolated.any()
    assert not live.plant.actuators.value


def test_a_daemon_that_comes_later_is_told_the_jobs_that_run(live: LivePlant) -> None:
    def begun(number: int) -> list[tuple[str, str]]:
        out = live.move(1.0, START_NS + number * NS)
        events = [msgspec.json.decode(m.payload) for m in out if m.topic.startswith("IT/v1/PUB/Event/jobs/")]
        return [(e["job"], e["id"]) for e in events if e["type"] == "JobStarted"]

    first = begun(1)
    assert first
    assert not begun(2)
    live.receive(Message(START_NS, "IT/v1/racktwin/Daemon/racktwin", b'{"v":1,"state":"online"}'), True)
    assert begun(3) == first, "with their old identities"


def test_it_comes_back_after_an_outage_of_the_broker(broker: Mosquitto, tmp_path: Path) -> None:
    with PlantProcess(tmp_path / "p", broker.port, SITE) as plant:
        with Client(broker.port) as client:
            client.wait(lambda m: bool(frame_limits(m)))
        broker.stop()
        time.sleep(2.0)
        broker.start()
        with Client(broker.port, hears="#") as client:
            client.wait(lambda m: bool(frame_limits(m)))
            client.wait(lambda m: m.retained and "/Metadata/Rack/RackLiquidFlow/" in m.topic)
        said = plant.stop()
        assert said["connections"] == 2
        assert said["lost"] > 0


def test_it_refuses_the_broker_of_a_real_building(broker: Mosquitto, tmp_path: Path) -> None:
    topic = "BMS/v1/PUB/Metadata/Rack/RackPower/x"
    body = {"objectType": "Rack", "pointType": "RackPower", "engUnit": "kW", "rackLocationId": "a1"}
    with Client(broker.port, hears="BMS/v1/PUB/Value/#") as client:
        client.say(topic, msgspec.json.encode(body), retain=True)
        with PlantProcess(tmp_path / "p", broker.port, SITE) as plant:
            assert plant.process.wait(40) == 1
            assert "carries the metadata of a building" in plant.log.read_text()
        assert client.mark() == 0, "nothing was published"
