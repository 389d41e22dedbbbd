"""A simulated plant behind a real broker: a leak is isolated, and the building obeys requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.daemon_process import running
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.node_agents import Client, Heard
from tests.support.plant_process import CAP, LIQUID, SINCE, SITE, TARGET, PlantProcess, done, good

pytestmark = [pytest.mark.slow, pytest.mark.long]
Server = Callable[..., Path]


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


def test_a_leak_is_isolated_through_the_broker_and_stays_so(broker: Mosquitto, tmp_path: Path) -> None:
    """Detectors of trays by their agents, the pan and the isolation by the building's messages."""
    leaks = [{"kind": "leak", "entity": "r1/node5", "begin_s": 8.0, "severity": 1.0}]
    scenario = tmp_path / "leak.yaml"
    scenario.write_text(yaml.safe_dump({"name": "leak", "hours": 1, "seed": 1, "faults": leaks}))
    site = SITE | {"policies": {"leak_guard": {"authority": "act"}}}
    with (
        running(tmp_path / "d", broker.port, site=site) as daemon,
        PlantProcess(tmp_path / "p", broker.port, SITE, "--scenario", str(scenario)) as plant,
        Client(broker.port, hears="BMS/#") as client,
    ):
        daemon.until(lambda: good(daemon, "rack.leak_state") == 1.0, what="the racks heard")

        def says(topic: str) -> Callable[[Heard], bool]:
            return lambda m: (
                f"/Value/Rack/{topic}/lab/r1" in m.topic and bool(m.body) and m.body["value"] == 1
            )

        client.wait(says("RackLiquidIsolationStatus"), seconds=180.0)
        assert daemon.until(lambda: done(daemon, LIQUID), what="the isolation read back") == {"lab/h/r1"}
        commands = [line["body"] for line in daemon.journal("command")]
        controls = [body["control"] for body in commands]
        assert controls.index(SINCE) < controls.index(LIQUID), "jobs save first"
        assert {CAP, "node.service_level", "node.power_state"} <= set(controls)
        assert "not understood" not in plant.stop()["heard"]


def test_the_building_obeys_requests_and_echoes_them(broker: Mosquitto, tmp_path: Path) -> None:
    with (
        running(tmp_path / "d", broker.port, site=SITE) as daemon,
        PlantProcess(tmp_path / "p", broker.port, SITE, "--seed", "3") as plant,
        Client(broker.port, hears="BMS/#") as client,
    ):
        daemon.until(lambda: good(daemon, "cdu.supply_temp_c") == 1.0, what="the CDU heard")
        (row,) = daemon.get("/api/v1/state/cdu?signals=supply_temp_request_c")["signals"].values()
        (before_c,) = row["value"]
        wanted = before_c - 0.4
        why = {"reason": "a test", "for_s": 600}
        daemon.post("/api/v1/requests", {"control": TARGET, "names": ["cdu1"], "hi": wanted, **why})
        daemon.post("/api/v1/requests", {"control": LIQUID, "names": ["r2"], "lo": 1, "hi": 1, **why})

        def value(topic: str, least: float, most: float) -> Callable[[Heard], bool]:
            path = f"BMS/v1/PUB/Value/{topic}/"
            return lambda m: m.topic.startswith(path) and least <= m.body["value"] <= most

        client.wait(value("Rack/RackLiquidIsolationStatus/lab/r2", 1, 1))
        client.wait(value("CDU/LiquidTemperatureSpRequest/lab/cdu1", 0, wanted + 0.06))
        flow = client.wait(value("Rack/RackLiquidFlow/lab/r2", 0, 0.1), client.mark())
        assert flow.body["quality"] == 1
        client.wait(lambda m: "/HeartbeatEchoBms/" in m.topic and "/Value/" in m.topic)
        isolated = daemon.until(lambda: done(daemon, LIQUID), what="the isolation read back")
        assert isolated == {"lab/h/r2"}
        heard = plant.stop()["heard"]
        assert heard["requests to the BMS"] > 1
        assert "not understood" not in heard
