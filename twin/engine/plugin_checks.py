"""Plug-in checks: a policy's memory and accounts and a model's forecasts, checked before they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import ContractError, find_quantity
from twin.contracts import Forecast, Memory, Policy
from twin.site import Site

MAX_ACCOUNTS = 256  # of one policy in one tick


def fresh_memory(policy: Policy, site: Site) -> Memory:
    """The columns that a policy declared, as they begin."""
    if policy.memory is None:
        return {}
    return policy.memory.fresh(site.sizes)


def checked_memory(policy: Policy, memory: Memory, site: Site, kept: Memory) -> Memory:
    """Return the arrays that a policy returned, copied if it can still write to them; see `Columns.checked`.
    Raises ContractError for undeclared ones."""
    return {} if policy.memory is None else policy.memory.checked(memory, site.sizes, kept)


def checked_accounts(accounts: object) -> list[dict[str, Any]]:
    """Return the accounts of a policy. Raises ContractError if they are not plain data, or too many."""
    if not isinstance(accounts, list):
        raise ContractError(f"accounts: expected a list, got {type(accounts).__name__}")
    if len(accounts) > MAX_ACCOUNTS:
        raise ContractError(f"{len(accounts)} accounts; expected at most {MAX_ACCOUNTS}")
    for account in accounts:
        if not isinstance(account, dict):
            raise ContractError(f"an account: expected a dict, got {type(account).__name__}")
        for key, value in account.items():
            if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None):
                raise ContractError(
                    f"account of {key!r}: expected text or a number, got {type(value).__name__}"
                )
    return accounts


def check_forecast(forecast: Forecast, model: str, sizes: dict[str, int]) -> None:
    """Raises ContractError if a forecast is not what `Forecast` promises."""
    what = find_quantity(forecast.signal)
    if what is None:
        raise ContractError(f"forecasts {forecast.signal!r}, which is not a quantity that can be forecast")
    if not forecast.horizon_s >= 0 or not forecast.model.startswith(f"{model}@"):
        raise ContractError(f"{forecast.signal}: expected a horizon >= 0 and a model named {model}@...")
    shape = (sizes[what.table],)
    if any(np.shape(x) != shape for x in (forecast.mean, forecast.lo, forecast.hi)):
        raise ContractError(f"{forecast.signal}: mean, lo and hi must be of shape {shape}")
