"""Rack columns: the state of all racks in columns, so that a site of a thousand racks fits in each update.

Numbers are rounded to what a screen shows. A stream begins with whole columns; then each update holds what
changed since the last one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import answer, live_of
from twin.api.runtime import Runtime
from twin.api.state import alarms_of
from twin.api.summary import (
    ages_s,
    current_values,
    is_aside,
    last_values,
    marks,
    power_of_racks,
    silent_s,
    urgency,
)
from twin.catalogue import F64, Bool, find_control, table_noun
from twin.contracts import DEGRADED, FAILED, WATCH
from twin.site import noun_key

STATES = ("unknown", "ok", "info", "warning", "critical", "maintenance")
# Temperatures of a rack, and of its GPUs, that have a guard: the least distance is the cooling margin.
_WARM = ("rack.supply_temp_c", "rack.return_temp_c", "rack.inlet_temp_c")

Columns = dict[str, list[float | int | None]]


def layout(live: Runtime) -> dict[str, Any]:
    """Return the names and places of the racks, which change only with the site."""
    site = live.engine.site
    n = site.sizes["rack"]
    guard = site.limits.get("rack.power_w")
    return {
        "site_hash": site.spec_hash,
        "names": site.names.get("rack", []),
        "halls": site.names.get("hall", []),
        "hall": site.hall_of_rack,
        "cdus": site.names.get("cdu", []),
        "cdu": site.cdu_of_rack,
        "feeders": site.names.get("feeder", []),
        "loops": site.names.get("loop", []),
        "spare": site.spare_rack,
        "gpus": np.bincount(site.rack_of_gpu, minlength=n) if site.sizes["gpu"] else np.zeros(n, int),
        "power_guard_w": np.full(n, np.nan) if guard is None else np.round(guard.guard),
        "states": STATES,
        "noun": table_noun(noun_key(site, "rack"), n),
    }


def columns(live: Runtime, alarms: list[dict[str, Any]]) -> Columns:
    """Return the columns of all racks, by name. `alarms`: the gravest first."""
    engine, site = live.engine, live.engine.site
    n = site.sizes["rack"]
    power, source = power_of_racks(live)
    hottest, margin = np.full(n, np.nan), np.full(n, np.nan)
    of_gpu = site.rack_of_gpu if site.sizes["gpu"] else None
    for key in _WARM:
        margin = np.fmin(margin, _below_guard(live, key))
    if of_gpu is not None:
        np.fmax.at(hottest, of_gpu, last_values(live, "gpu.temp_c"))
        np.fmin.at(margin, of_gpu, _below_guard(live, "gpu.temp_c"))
    out, repair = _out(live)
    reporting = _reporting(live)
    states = _states(live, alarms, reporting)
    oldest = np.full(n, np.nan)
    for age in ages_s(live).values():
        oldest = np.fmax(oldest, age)
    oldest = np.fmax(oldest, silent_s(live))
    return {
        "state": _spent(states, out, repair).tolist(),
        "reporting": reporting.astype(int).tolist(),
        "power_w": _rounded(power, 100.0),
        "from": [{"meter": 0, "nodes": 1, "GPUs": 2}.get(s) for s in source],
        "gpu_temp_c": _rounded(hottest, 1.0),
        "supply_temp_c": _rounded(last_values(live, "rack.supply_temp_c"), 0.1),
        "return_temp_c": _rounded(last_values(live, "rack.return_temp_c"), 0.1),
        "inlet_temp_c": _rounded(last_values(live, "rack.inlet_temp_c"), 0.1),
        "flow_lpm": _rounded(last_values(live, "rack.flow_lpm"), 0.1),
        "margin_k": _rounded(margin, 0.5),
        "capped": _capped(live).tolist(),
        "out": out.tolist(),
        "repair": repair.tolist(),
        "suspected": _counted(live, engine.health.health("gpu").level, (WATCH, DEGRADED)).tolist(),
        "failed": _counted(live, engine.health.health("gpu").level, (FAILED,)).tolist(),
        "age_s": _rounded(oldest, 1.0),
    }


def _reporting(live: Runtime) -> Bool:
    """Return the racks that report power or a temperature of a GPU now [n]: of the others nobody knows."""
    out: Bool = np.isfinite(current_values(live, "rack.power_w"))
    for table, key in (("node", "node.power_w"), ("gpu", "gpu.power_w"), ("gpu", "gpu.temp_c")):
        out[_rack_of(live, table)[np.isfinite(current_values(live, key))]] = True
    return out


def _below_guard(live: Runtime, key: str) -> F64:
    """Return the distance of a signal's last values to their guard [n]; NaN where either is unknown."""
    limit, value = live.engine.site.limits.get(key), last_values(live, key)
    return np.full(len(value), np.nan) if limit is None else limit.guard - value


def _states(live: Runtime, alarms: list[dict[str, Any]], read: np.ndarray) -> np.ndarray:
    site = live.engine.site
    out = np.where(read, STATES.index("ok"), STATES.index("unknown"))
    spared = live.engine.windows.mask("rack")
    if spared is not None:
        out[spared] = STATES.index("maintenance")
    for name, severity in marks(live, alarms).items():
        row = site.entity("rack", name)
        if row is not None and severity in STATES:
            out[row] = STATES.index(severity)
    # An alarm names the first of many entities; the engine knows all that are beyond a bound.
    rung = [str(a.get("id")) for a in alarms if not is_aside(a)]
    for key, level in live.engine.findings.beyond.items():
        table = key.partition(".")[0]
        if table in ("rack", "node", "gpu") and any(i.startswith(f"beyond/{key}/") for i in rung):
            of = _rack_of(live, table)
            for bound, word in ((1, "warning"), (2, "critical")):
                at = np.unique(of[level == bound])
                out[at] = np.maximum(out[at] % STATES.index("maintenance"), STATES.index(word))
    return out


def _rack_of(live: Runtime, table: str) -> np.ndarray:
    """Return the rack of each rack, node or GPU [n]."""
    site = live.engine.site
    if table == "rack":
        return np.arange(site.sizes["rack"])
    return site.rack_of_gpu if table == "gpu" else site.rack_of_node


def _capped(live: Runtime) -> np.ndarray:
    """Return the GPUs of each rack under a running command on their caps or their node's [n]."""
    site = live.engine.site
    held = np.zeros(site.sizes["gpu"], np.bool_)
    of_gpu, of_node = (live.engine.arbiter.leases.get(f"{t}.power_cap_w") for t in ("gpu", "node"))
    if of_gpu is not None and of_gpu.n:
        held |= of_gpu.running()
    if of_node is not None and of_node.n and len(held):
        held |= of_node.running()[site.node_of_gpu]
    return np.bincount(site.rack_of_gpu[held], minlength=site.sizes["rack"])


def _spent(states: np.ndarray, out: np.ndarray, repair: np.ndarray) -> np.ndarray:
    """Return the states [n]: at least `info` with GPUs out of service, `warning` with GPUs to be repaired."""
    ok, info, warning = (STATES.index(s) for s in ("ok", "info", "warning"))
    states = np.where((states == ok) & (out > 0), info, states)
    return np.where(((states == ok) | (states == info)) & (repair > 0), warning, states)


def _out(live: Runtime) -> tuple[np.ndarray, np.ndarray]:
    """Return the GPUs of each rack [n]: on nodes that read out of service, and on nodes out until
    repaired."""
    site, lease = live.engine.site, live.engine.arbiter.leases.get("node.service_level")
    control = find_control("node.service_level")
    if not site.sizes["gpu"] or control is None:
        return np.zeros(site.sizes["rack"], np.int64), np.zeros(site.sizes["rack"], np.int64)
    level = np.nan_to_num(last_values(live, f"node.{control.readback}"), nan=0.0)
    broken = level >= control.high
    if lease is not None and lease.n:
        broken |= lease.running() & (lease.value >= control.high)
    gone, kept = (site.rack_of_gpu[nodes[site.node_of_gpu]] for nodes in (level > 0, broken))
    return np.bincount(gone, minlength=site.sizes["rack"]), np.bincount(kept, minlength=site.sizes["rack"])


def _counted(live: Runtime, level: np.ndarray, levels: tuple[int, ...]) -> np.ndarray:
    site = live.engine.site
    return np.bincount(site.rack_of_gpu[np.isin(level, levels)], minlength=site.sizes["rack"])


def _rounded(values: np.ndarray, step: float) -> list[float | int | None]:
    """Return values in steps; None where unknown."""
    known, digits = np.isfinite(values), 0 if step >= 1 else 1
    stepped = np.round(np.where(known, values, 0.0) / step) * step
    plain = stepped.astype(np.int64).tolist() if digits == 0 else np.round(stepped, digits).tolist()
    return [v if k else None for v, k in zip(plain, known.tolist(), strict=True)]


def changed(before: Columns, now: Columns) -> dict[str, Any]:
    """Return by column {"at": rows, "to": values} for few changes, {"all": values} for many."""
    out: dict[str, Any] = {}
    for name, values in now.items():
        old = before.get(name, [])
        if len(old) != len(values):
            out[name] = {"all": values}
            continue
        at = [i for i, (a, b) in enumerate(zip(old, values, strict=True)) if a != b]
        if len(at) * 2 > len(values):
            out[name] = {"all": values}
        elif at:
            out[name] = {"at": at, "to": [values[i] for i in at]}
    return out


async def racks(request: web.Request) -> web.Response:
    """Return all racks in columns: names and places, states, power, temperatures, flow, capped GPUs."""
    live = live_of(request)
    alarms = sorted(alarms_of(live), key=urgency)
    return answer({"tick": live.engine.state.tick, "now_ns": live.engine.state.now_ns,
                   **layout(live), "columns": columns(live, alarms)})  # fmt: skip
