"""Demand: GPUs that jobs hold and wait for, by queue, tenant and priority, and requests of services."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import answer, live_of
from twin.api.runtime import Runtime
from twin.catalogue import TABLES, clean
from twin.contracts import finite
from twin.telemetry import GOOD

SHOWN = ("queue", "tenant", "priority", "service")
MAX_SHOWN = 1000
# Signals of the site that are of demand: those that it shares with queues, and its stock
SITE = (*TABLES["queue"].by_name, "gpu_idle_count", "gpu_spare_count", "gpu_out_count", "requests_per_s")
BUSY_PU = 0.05  # of a GPU's units: below it waits. source: estimate


async def demand(request: web.Request) -> web.Response:
    """List the GPUs that jobs hold and wait for: of the site, then by queue, tenant, priority and service.

    null: unknown.
    """
    live = live_of(request)
    rows = _rows(live, "site", SITE)
    rows[0] |= busy_gpus(live)
    for table in SHOWN:
        rows += _rows(live, table, tuple(TABLES[table].by_name))
    return answer({"now_ns": live.engine.state.now_ns, "rows": rows})


def busy_gpus(live: Runtime) -> dict[str, int | None]:
    """Return the number of GPUs that are busy by their activity; None if no GPU reports its activity."""
    active = _current(live, "gpu", "sm_active_pu")
    active = np.where(np.isfinite(active), active, _current(live, "gpu", "util_pu"))
    known = np.isfinite(active)
    return {"gpu_busy_count": int((active[known] > BUSY_PU).sum()) if known.any() else None,
            "gpu_activity_known_count": int(known.sum())}  # fmt: skip


def _rows(live: Runtime, table: str, signals: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row for each entity: its name and present values."""
    site = live.engine.site
    columns = {signal: _current(live, table, signal) for signal in signals}
    rows: list[dict[str, Any]] = []
    for entity in range(min(site.sizes[table], MAX_SHOWN)):
        known = {signal: finite(column[entity]) for signal, column in columns.items()}
        rows.append({"table": table, "name": clean(site.name(table, entity)), **known})
    return rows


def _current(live: Runtime, table: str, signal: str) -> np.ndarray:
    """Return the good values of a signal, NaN elsewhere [n]."""
    state, spec = live.engine.state, TABLES[table].by_name[signal]
    column = state.tables[table]
    good = column.quality_of(spec, state.now_ns) == GOOD
    out: np.ndarray = np.where(good, column.value[spec.row].astype(float), np.nan)
    return out
