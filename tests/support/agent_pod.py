"""A pod of real agents with simulated devices, whose coolant a test may take away.

with pod(broker.port) as racks:
    racks.heat(node=3); racks.caps(node=3)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from racktwin_agent.config import Broker
from racktwin_agent.fleet import Fleet
from racktwin_agent.simulated import SimulatedDevices

from twin.catalogue import F64

TRAYS, PER_TRAY = 18, 4


class Pod:
    """Racks of 18 trays with four GPUs each; nodes are numbered through all racks."""

    def __init__(self, port: int, racks: int, site: str, state: Path | None, client_id: str) -> None:
        self.devices = {
            f"{site}/r{rack + 1}/node{tray}": SimulatedDevices(PER_TRAY, seed=rack * TRAYS + tray)
            for rack in range(racks)
            for tray in range(TRAYS)
        }
        self.fleet = Fleet(self.devices, Broker("127.0.0.1", port, client_id), state_dir=state)

    def node(self, number: int) -> SimulatedDevices:
        return list(self.devices.values())[number]

    def heat(self, node: int, coolant_c: float = 70.0) -> None:
        """Warm coolant for one tray: its GPUs go beyond their guard."""
        self.node(node).coolant_c = coolant_c

    def cool(self, node: int) -> None:
        self.node(node).coolant_c = 33.0

    def caps(self, node: int | None = None) -> F64:
        """Power limits that the devices have, of one node or of all."""
        chosen = self.devices.values() if node is None else [self.node(node)]
        return np.array([limit for d in chosen for limit in d._limit])


@contextmanager
def pod(
    port: int, racks: int = 2, site: str = "lab/h", state: Path | None = None, client_id: str = "pod"
) -> Iterator[Pod]:
    """A pod that publishes."""
    made = Pod(port, racks, site, state, client_id)
    made.fleet.start()
    try:
        yield made
    finally:
        made.fleet.stop()
