"""A board swap at a real daemon behind a broker: what the old board did is not held against the new one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_pod import pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import mosquitto
from tests.support.node_agents import Client

NODE, GPU = "lab/h/r1/node3", "lab/h/r1/node3/gpu2"
OFF_BUS = "NVRM: Xid (PCI:0000:03:00): 79, pid=1234, GPU has fallen off the bus."


def say(client: Client, identity: str, kind: str, table: str, name: str, **more: Any) -> None:
    """Publish an event as the agent of the node does."""
    body = {"type": kind, "id": identity, "from": NODE, "table": table, "name": name, **more}
    client.say(f"IT/v1/PUB/Event/{NODE}", json.dumps(body).encode())


def health(daemon: RunningDaemon, name: str, *levels: str) -> dict[str, Any] | None:
    tree: dict[str, Any] = daemon.get(f"/api/v1/health/{name}")
    return tree if tree["level"] in levels else None


@pytest.mark.long
def test_a_swapped_gpu_and_a_swapped_node_begin_anew(server: Callable[..., Path], tmp_path: Path) -> None:
    with (
        mosquitto(server, tmp_path) as broker,
        running(tmp_path / "twin", broker.port, site=two_racks(racks="r1")) as daemon,
        pod(broker.port, racks=1, state=tmp_path / "agent"),
        Client(broker.port) as client,
    ):
        daemon.until(lambda: health(daemon, GPU, "healthy"), "a GPU that is heard and well")
        say(client, "i1", "IdentityTold", "gpu", GPU, serial="1650322000001")
        say(client, "i2", "IdentityTold", "node", NODE, serial="BOARD-0001")
        say(client, "f1", "FaultReported", "gpu", GPU, code=79, detail=OFF_BUS)
        daemon.until(lambda: health(daemon, GPU, "failed"), "the verdict")
        daemon.kill()
        daemon.start()
        say(client, "i3", "IdentityTold", "gpu", GPU, serial="1650322000001")  # an agent that starts anew
        say(client, "i4", "IdentityTold", "gpu", GPU, serial="Default string")
        daemon.until(lambda: health(daemon, GPU, "failed"), "the same board is as it was")
        say(client, "i5", "IdentityTold", "gpu", GPU, serial="1650322000002")
        tree = daemon.until(lambda: health(daemon, GPU, "healthy", "unknown"), "another board")
        assert not [f for f in tree["faults"] if f["code"] == 79]
        say(client, "f2", "FaultReported", "node", NODE, code=79, detail=OFF_BUS)
        daemon.until(lambda: health(daemon, NODE, "failed", "degraded"), "the node's own fault")
        say(client, "i6", "IdentityTold", "node", NODE, serial="BOARD-0002")
        daemon.until(lambda: health(daemon, NODE, "healthy", "unknown"), "another node in its place")
        daemon.until(lambda: health(daemon, GPU, "healthy"), "and it is well")
