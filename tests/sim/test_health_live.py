"""Health of a real daemon behind a broker: an XID names the GPU, raises an alarm, and both go once cured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_pod import pod
from tests.support.builders import Twin, two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client
from tests.support.sampled_cases import sampled
from twin.cli.main import main
from twin.telemetry import EntityReplaced, FaultReported

NODE, GPU = "lab/h/r1/node3", "lab/h/r1/node3/gpu2"
OFF_BUS = "NVRM: Xid (PCI:0000:03:00): 79, pid=1234, GPU has fallen off the bus."
CURED = ("NVRM: Xid (PCI:0000:03:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) "
         "to 0x0 (None)")  # fmt: skip


def report(client: Client, identity: str, code: int, detail: str) -> None:
    """Publish the agent's report of a line of its node's kernel log."""
    body = {"type": "FaultReported", "id": identity, "from": NODE, "table": "gpu", "name": GPU, "code": code,
            "detail": detail}  # fmt: skip
    client.say(f"IT/v1/PUB/Event/{NODE}", json.dumps(body).encode())


def explained(daemon: RunningDaemon, name: str, level: str) -> dict[str, Any] | None:
    tree: dict[str, Any] = daemon.get(f"/api/v1/health/{name}")
    return tree if tree["level"] == level else None


def alarms(daemon: RunningDaemon) -> list[dict[str, Any]]:
    """Those that name the node or its GPU."""
    every = daemon.get(f"/api/v1/alarms?entity={NODE}")["alarms"]
    return [a for a in every if a["id"].startswith(("health/", "fault/"))]


def read(daemon: RunningDaemon, capsys: pytest.CaptureFixture[str], name: str) -> str:
    """Return the output of `device health`, as one line."""
    assert main(["device", "health", name, "--config", str(daemon.config_path)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.long
def test_an_xid_is_explained_alarmed_and_over_when_cured(
    server: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        mosquitto(server, tmp_path) as broker,
        running(tmp_path / "twin", broker.port, site=two_racks(racks="r1")) as daemon,
        pod(broker.port, racks=1, state=tmp_path / "agent"),
        Client(broker.port) as client,
    ):
        daemon.until(lambda: explained(daemon, GPU, "healthy"), what="a GPU that is heard and well")
        assert alarms(daemon) == []
        report(client, "boot-1", 79, OFF_BUS)
        tree = daemon.until(lambda: explained(daemon, GPU, "failed"), what="the verdict")
        assert any("79" in e["text"] or "off the bus" in e["text"] for e in tree["evidence"])
        assert {(f["code"], f["times"]) for f in tree["faults"]} == {(79, 1)}
        raised = daemon.until(lambda: alarms(daemon), what="the alarm")
        assert raised[0]["severity"] == "critical"
        assert raised[0]["action"]
        for name in (GPU, "r1/node3"):
            text = read(daemon, capsys, name)
            assert "has failed" in text
            assert "XID 79" in text
            assert "restart it" in text  # what to do
        assert f"{NODE} failed" in read(daemon, capsys, "r1")
        daemon.kill()
        daemon.start()
        assert explained(daemon, GPU, "failed")  # from its snapshot and what came after it
        report(client, "boot-3", 154, CURED)
        daemon.until(lambda: explained(daemon, GPU, "healthy"), what="the cure")
        daemon.until(lambda: not alarms(daemon), what="the end of the alarm")


def fault(code: int, detail: str = "", number: int = 0) -> FaultReported:
    return FaultReported(id=f"f{number}", table="gpu", name=GPU, code=code, detail=detail)


VALUES = {"gpu.temp_c": 60.0, "gpu.power_w": 700.0, "gpu.sm_clock_hz": 1.9e9, "gpu.util_pu": 1.0}


@pytest.mark.parametrize("seconds", sampled([120, 1200], 120))
def test_another_gpu_in_its_place_is_not_blamed(seconds: int) -> None:
    twin = Twin(two_racks(racks="r1"))
    twin.run(30, VALUES)
    twin.tick(VALUES, fault(79, OFF_BUS))
    twin.run(20, VALUES)
    told = [f for f in twin.decision.findings if f.severity == "critical" and NODE in " ".join(f.entities)]
    assert told
    gpu = twin.site.entity("gpu", GPU)
    assert gpu is not None
    assert twin.engine.health.book.of("gpu", gpu)
    twin.tick(VALUES, EntityReplaced(table="gpu", name=GPU, serial="another"))
    twin.run(seconds, VALUES)
    assert twin.engine.health.book.of("gpu", gpu) == ()
    named = [f for f in twin.decision.findings if f.id.startswith(("health/", "fault/"))]
    assert not [f for f in named if NODE in " ".join(f.entities)]
