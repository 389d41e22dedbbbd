"""Promises: what a policy's memory and a model's forecasts must look like, checked before they are used.

May import contracts, the catalogue and the site.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.contracts import Forecast, Memory, Policy
from twin.errors import ContractError
from twin.quantities import find_quantity
from twin.site import Site

MAX_ACCOUNTS = 256  # of one policy in one tick


def fresh_memory(policy: Policy, site: Site) -> Memory:
    """The columns that a policy declared, as they begin."""
    if policy.memory is None:
        return {}
    n = site.sizes[policy.memory.table]
    return {name: np.zeros(n, kind) for name, kind in policy.memory.columns.items()}


def checked_memory(policy: Policy, memory: Memory, site: Site) -> Memory:
    """Columns of our own with what a policy gave back. Raises ContractError for others than declared."""
    expected = fresh_memory(policy, site)
    for name, column in expected.items():
        given = memory.get(name)
        if given is None or given.shape != column.shape or given.dtype != column.dtype:
            raise ContractError(f"memory column {name}: expected {column.dtype} {column.shape}")
    # A policy may hand back the read-only views that it was given: the engine keeps columns of its own.
    return {name: np.array(memory[name]) for name in expected}


def checked_accounts(told: object) -> list[dict[str, Any]]:
    """What a policy accounts for, if it is plain data. Raises ContractError otherwise, or for too many."""
    if not isinstance(told, list):
        raise ContractError(f"accounts: expected a list, got {type(told).__name__}")
    if len(told) > MAX_ACCOUNTS:
        raise ContractError(f"{len(told)} accounts; expected at most {MAX_ACCOUNTS}")
    for account in told:
        if not isinstance(account, dict):
            raise ContractError(f"an account: expected a dict, got {type(account).__name__}")
        for key, value in account.items():
            if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None):
                raise ContractError(
                    f"account of {key!r}: expected text or a number, got {type(value).__name__}"
                )
    return told


def check_forecast(forecast: Forecast, model: str, sizes: dict[str, int]) -> None:
    """Raises ContractError if a forecast is not what `Forecast` promises."""
    what = find_quantity(forecast.signal)
    if what is None:
        raise ContractError(f"forecasts {forecast.signal!r}, which is no quantity that can be forecast")
    if not forecast.horizon_s >= 0 or not forecast.model.startswith(f"{model}@"):
        raise ContractError(f"{forecast.signal}: expected a horizon >= 0 and a model named {model}@...")
    shape = (sizes[what.table],)
    if any(np.shape(x) != shape for x in (forecast.mean, forecast.lo, forecast.hi)):
        raise ContractError(f"{forecast.signal}: mean, lo and hi must be of shape {shape}")
