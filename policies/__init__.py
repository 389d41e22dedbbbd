"""Policies of racktwin: one module or package each, and one line in this registry.

A policy is pure and imports only the contracts of the core. A site file names an external policy as
`module:Class`.
"""

from __future__ import annotations

from policies.checkpointing import Checkpoint
from policies.cooling_setpoint import CoolingSetpoint
from policies.hall_budgets import HallBudgets
from policies.idle_power import IdlePower
from policies.leak_guard import LeakGuard
from policies.node_replacement import Replacement
from policies.operator import Operator
from policies.power_capping import PowerCap, PowerGuard
from policies.thermal_guard import ThermalGuard
from twin.contracts import Policy

REGISTRY: dict[str, type[Policy]] = {
    "thermal_guard": ThermalGuard,
    "leak_guard": LeakGuard,
    "operator": Operator,
    "checkpoint": Checkpoint,
    "replacement": Replacement,
    "power_guard": PowerGuard,
    "power_cap": PowerCap,
    "cooling_setpoint": CoolingSetpoint,
    "idle_power": IdlePower,
}
# Of the site files that name them: no site runs these otherwise
BY_NAME: dict[str, type[Policy]] = {"hall_budgets": HallBudgets}
