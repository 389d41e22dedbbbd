"""DPUs by Redfish: their health, heat and port errors, from the node's BMC or from their own BMC.

A node's BMC lists them as network adapters; the BMC of a BlueField has one system, the DPU's, and one card.
Nothing in Redfish shows whether a switch is offloaded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from connectors.bmc.redfish_client import JSON, Gone, link

Get = Callable[[str], Awaitable[JSON]]
Members = Callable[[str | None], Awaitable[list[str]]]
SIDES = 2  # DPUs of a node that have a place
HEALTH = {"OK": 0.0, "Warning": 1.0, "Critical": 2.0}  # source: DSP0268, Resource.Health
ABSENT = ("Absent", "Disabled", "StandbyOffline")  # source: DSP0268, Resource.State
NAMES = ("Model", "Name", "Id", "SKU")  # of an adapter, which show that it is a DPU
WORDS = ("bluefield", "dpu")
SENSOR = "/bluefield_temp"  # source: NVIDIA BlueField BMC, "BMC Sensor Data"


class DpuSpot(NamedTuple):
    """Paths of one DPU: resources with its health, its temperatures, and metrics of its ports."""

    health: tuple[str, ...]
    heat: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths."""
        return self.health + self.heat + self.ports


def dpus_of(adapters: Sequence[JSON], ids: Sequence[str]) -> list[JSON]:
    """Return the network adapters that are DPUs: those with these Ids in their order, otherwise those that
    declare it."""
    if ids:
        by_id = {str(body.get("Id"))[:200]: body for body in adapters}
        return [by_id[i] for i in ids if i in by_id]
    return [
        body
        for body in adapters
        if any(word in str(body.get(name, ""))[:200].lower() for name in NAMES for word in WORDS)
    ]


async def spot_of(adapter: JSON, get: Get, members: Members) -> DpuSpot:
    """Return the paths of an adapter's own resources. Raises ConnectorError."""
    heat = link(adapter, "EnvironmentMetrics")
    ports = []
    for path in await members(link(adapter, "Ports") or link(adapter, "NetworkPorts")):
        try:
            metrics = link(await get(path), "Metrics")
        except Gone:
            metrics = path  # it is listed: without it there is no sum over the ports
        ports += [metrics] if metrics else []
    return DpuSpot((str(adapter["@odata.id"]),), (heat,) if heat else (), tuple(ports))


async def spot_of_card(systems: Iterable[str], cards: Iterable[str], get: Get, members: Members) -> DpuSpot:
    """Return the paths of a DPU at its own BMC: its system, card and adapter. Raises ConnectorError."""
    found = DpuSpot(tuple(systems))
    for path in cards:
        card = await get(path)
        heat = link(card, "EnvironmentMetrics")
        sensors = [at for at in await members(link(card, "Sensors")) if at.endswith(SENSOR)]
        adapters = [await get(at) for at in await members(link(card, "NetworkAdapters"))]
        more = [await spot_of(adapter, get, members) for adapter in adapters]
        found = DpuSpot(
            found.health + tuple(p for spot in more for p in spot.health),
            found.heat + tuple(sensors or ([heat] if heat else []))
            + tuple(p for spot in more for p in spot.heat),
            found.ports + tuple(p for spot in more for p in spot.ports),
        )  # fmt: skip
    return found


async def bodies_of(spot: DpuSpot, get: Get) -> dict[str, JSON]:
    """Return the contents of a DPU's resources, by path, without missing ones.

    Raises Gone where all are, and ConnectorError.
    """
    out: dict[str, JSON] = {}
    for path in spot.paths:
        with contextlib.suppress(Gone):
            out[path] = await get(path)
    if spot.paths and not out:
        raise Gone(f"{spot.paths[0]}: gone, with all other resources of the DPU")
    return out


def dpu_values(side: int, spot: DpuSpot, bodies: dict[str, JSON]) -> list[tuple[str, float]]:
    """Return (signal of the node, value) of its DPU of this number, 1 or 2: of several the worst, errors
    summed."""
    out = []
    states = [value for path in spot.health if (value := _health(bodies.get(path, {}))) is not None]
    if states:
        out.append((f"dpu{side}_health_state", max(states)))
    heat = [value for path in spot.heat if (value := _temperature(bodies.get(path, {}))) is not None]
    if heat:
        out.append((f"dpu{side}_temp_c", max(heat)))
    counts = [_errors(bodies.get(path, {})) for path in spot.ports]
    known = [count for count in counts if count is not None]
    if counts and len(known) == len(counts):  # a sum without one of its parts would be another counter
        out.append((f"dpu{side}_port_error_count", sum(known)))
    return out


def _health(body: JSON) -> float | None:
    status = body.get("Status")
    if not isinstance(status, dict) or status.get("State") in ABSENT:
        return None
    states = [HEALTH.get(str(status.get(name))[:40]) for name in ("Health", "HealthRollup")]
    return max((value for value in states if value is not None), default=None)


def _temperature(body: JSON) -> float | None:
    found = body.get("TemperatureCelsius", body)
    return _number(found.get("Reading")) if isinstance(found, dict) else None


def _errors(body: JSON) -> int | None:
    """Return the errors of a port in both directions. source: DSP0268, PortMetrics."""
    both = [_number(body.get(name)) for name in ("RXErrors", "TXErrors")]
    known = [int(value) for value in both if value is not None and value >= 0]
    return sum(known) if known else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
