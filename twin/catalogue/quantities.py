"""Quantities that a forecast may describe: signals of the catalogue, and sums of them."""

from __future__ import annotations

from dataclasses import dataclass

from twin.catalogue.signals import find_signal


@dataclass(frozen=True, slots=True)
class Quantity:
    """Quantity: its table, unit and physical bounds."""

    table: str
    unit: str
    low: float
    high: float


DERIVED: dict[str, Quantity] = {
    # The chance that a node fails within the horizon, and the number of nodes of the site that do
    "node.failure_pu": Quantity("node", "1", 0.0, 1.0),
    "site.node_failure_count": Quantity("site", "count", 0.0, 1e6),
    # The share of a job's time that waits for the clock of its GPUs: what a cap costs it
    "job.compute_pu": Quantity("job", "1", 0.0, 1.0),
    # The power of each of a job's GPUs at which its work takes the least energy
    "job.least_energy_w": Quantity("job", "W", 0.0, 1e4),
    "cdu.power_w": Quantity("cdu", "W", 0.0, 1e8),
    "cdu.heat_w": Quantity("cdu", "W", -1e7, 1e8),
    "site.power_w": Quantity("site", "W", 0.0, 1e10),
    "site.gpu_demand_count": Quantity("site", "count", 0.0, 4e6),
}


def find_quantity(key: str) -> Quantity | None:
    """A signal of the catalogue or a derived quantity."""
    if key in DERIVED:
        return DERIVED[key]
    signal = find_signal(key)
    if signal is None or signal.kind == "counter":
        return None
    return Quantity(signal.table, signal.unit, signal.low, signal.high)
