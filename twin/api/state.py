"""Read routes for the state: tables, entities, the site, forecasts, leases and sources, in columns and pages.

Each value comes with its quality, its age and, if the signal has a limit, its worst case.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import MAX_ROWS, Refused, answer, listed, live_of, number_of
from twin.api.comparisons import comparisons_of
from twin.api.health import CHANCE, failed_since
from twin.api.page import job_of_slot, with_responses
from twin.api.request_bodies import control_of
from twin.api.runtime import Runtime, is_routine
from twin.api.scopes import entity_of, held_by, is_below, table_of
from twin.catalogue import (
    CONTROLS,
    F32,
    INSTANTS,
    TABLES,
    Control,
    Signal,
    clean,
    control_value,
    plain_text,
    signal_words,
)
from twin.config import packaged_profiles
from twin.control import ACCEPTED, DONE, EXPIRED, FAILED, IN_PROGRESS, NONE, SENT, Leases
from twin.estimation import worst_case
from twin.telemetry import QUALITY_NAMES

LEASE_STATES = {NONE: "none", SENT: "sent", ACCEPTED: "accepted", IN_PROGRESS: "in_progress", DONE: "done",
                FAILED: "failed", EXPIRED: "expired"}  # fmt: skip
# Tables directly below an entity, as its names say.
BELOW = {
    "site": ("hall", "supernode", "loop"),
    "hall": ("rack", "cdu", "feeder"),
    "rack": ("node",),
    "node": ("gpu", "link"),
}
SHOWN_CHILDREN = 200
SHOWN_LINES = 20
SHOWN_UNUSED = 8  # on the first screen
MAX_TEXT = 320


def worst_of(live: Runtime, signal: Signal) -> F32:
    """The worst case per entity."""
    engine = live.engine
    return worst_case(engine.site, engine.state, engine.estimator, engine.windows, signal)


def _now(live: Runtime) -> dict[str, Any]:
    return {"tick": live.engine.state.tick, "now_ns": live.engine.state.now_ns}


async def tables(request: web.Request) -> web.Response:
    """List the tables of the catalogue with their entities, signals, and readings of each quality."""
    live = live_of(request)
    state, sizes = live.engine.state, live.engine.site.sizes
    found = []
    for name, spec in TABLES.items():
        counts = np.zeros(len(QUALITY_NAMES), np.int64)
        for signal in (*spec.gauges, *spec.counters) if sizes[name] else ():
            quality = state.tables[name].quality_of(signal, state.now_ns)
            counts += np.bincount(quality, minlength=len(QUALITY_NAMES))
        found.append({"table": name, "entities": sizes[name], "signals": len(spec.by_name),
                      "controls": len(spec.controls), "readings": dict(zip(QUALITY_NAMES, counts.tolist(),
                                                                           strict=True))})  # fmt: skip
    return answer({**_now(live), "tables": found})


async def table(request: web.Request) -> web.Response:
    """Return a page of a table in columns: names; values, qualities, ages and worst cases by signal."""
    live, name = live_of(request), table_of(request.match_info["table"])
    spec, site = TABLES[name], live.engine.site
    chosen = [s.partition(".")[2] if s.startswith(f"{name}.") else s for s in listed(request, "signals")]
    strange = [s for s in chosen if s not in spec.by_name]
    if strange:
        raise Refused(400, f"no signal {clean(strange[0], 60)} of {name}; expected {', '.join(spec.by_name)}")
    index = _rows(request, live, name)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    page = index[offset : offset + limit]
    columns = {}
    for signal in spec.by_name.values():
        if chosen and signal.name not in chosen:
            continue
        column = _column(live, signal, page)
        # A table has many signals: without a request by name, those without a source are left out.
        if chosen or any(q != "missing" for q in column["quality"]):
            columns[signal.name] = column
    more = offset + limit < len(index)
    return answer({**_now(live), "table": name, "total": len(index), "offset": offset, "limit": limit,
                   "next_offset": offset + limit if more else None,
                   "names": [site.name(name, int(i)) for i in page], "signals": columns})  # fmt: skip


def _rows(request: web.Request, live: Runtime, name: str) -> np.ndarray:
    """The entities that a page is cut from."""
    site, wanted, prefix = live.engine.site, listed(request, "names"), request.query.get("prefix", "")
    if len(wanted) > MAX_ROWS:
        raise Refused(400, f"names: {len(wanted)} given; expected at most {MAX_ROWS}")
    if wanted:
        return np.unique(np.array([entity_of(live, name, n) for n in wanted], np.int64))
    return held_by(live, name, prefix) if prefix else np.arange(site.sizes[name])


def _column(live: Runtime, signal: Signal, page: np.ndarray) -> dict[str, Any]:
    state = live.engine.state
    column = state.tables[signal.table]
    quality = column.quality_of(signal, state.now_ns)[page]
    out: dict[str, Any] = {"unit": signal.unit, "kind": signal.kind}
    if signal.states:
        out["states"] = list(signal.states)
    if signal.kind == "counter":
        out["value"] = column.total[signal.row][page]
    else:
        # A float32 has more digits than the measurement.
        digits = max(0, math.ceil(-math.log10(signal.quantum))) + 1
        out["value"] = column.value[signal.row][page].astype(float).round(digits)
        out["late"] = column.late(signal, state.now_ns)[page].tolist()
        if signal.danger != "none":
            out["worst"] = worst_of(live, signal)[page].astype(float).round(digits)
    out["quality"] = [QUALITY_NAMES[q] for q in quality.tolist()]
    out["age_s"] = np.round(column.age_s(signal, state.now_ns)[page], 3)
    limit = live.engine.site.limits.get(signal.key)
    if limit is not None:
        out["guard"], out["max"] = limit.guard[page], limit.max[page]
    return out


async def entity(request: web.Request) -> web.Response:
    """Describe one entity: readings, children, leases, forecasts, alarms and the latest decisions."""
    live, name = live_of(request), table_of(request.match_info["table"])
    site = live.engine.site
    row = entity_of(live, name, request.match_info["name"])
    path, page = site.name(name, row), np.array([row])
    text = (live.engine.jobs.shown(row) if name == "job" else "") or path  # as findings and decisions name it
    signals = {}
    for signal in TABLES[name].by_name.values():
        column = _column(live, signal, page)
        if column["quality"] != ["missing"]:
            signals[signal.name] = {k: v[0] if k not in ("unit", "kind", "states") else v
                                    for k, v in column.items()}  # fmt: skip
    leases = [lease for control in TABLES[name].controls
              for lease in lease_rows(live, live.engine.arbiter.leases[control.key], page)]  # fmt: skip
    head = path.rpartition("/")[0]
    return answer({
        **_now(live), "table": name, "name": path, "parent": head or None,
        "generation": int(live.engine.state.tables[name].generation[row]),
        "serial": live.engine.intake.serials.get(f"{name}:{path}"),
        "job": _job(live, name, row), "signals": signals, "children": _children(live, name, row),
        "comparisons": comparisons_of(live, name, row),
        "leases": leases, "forecasts": forecast_rows(live, name, page),
        "alarms": with_responses(live, alarms_of(live, text)),
        "decisions": _lines(live, name, row, text),
    })  # fmt: skip


def _children(live: Runtime, name: str, row: int) -> dict[str, Any]:
    site, out = live.engine.site, {}
    path = site.name(name, row)
    if name == "job":
        nodes = live.engine.jobs.nodes[row].tolist() if live.engine.jobs.alive[row] else []
        return {
            "node": {"total": len(nodes), "names": [site.name("node", i) for i in nodes[:SHOWN_CHILDREN]]}
        }
    for below in BELOW.get(name, ()):
        if name == "rack":
            members = range(int(site.node_start_of_rack[row]), int(site.node_start_of_rack[row + 1]))
        elif name == "node" and below == "gpu":
            members = range(int(site.gpu_start_of_node[row]), int(site.gpu_start_of_node[row + 1]))
        elif name == "node":
            members = range(*np.searchsorted(site.node_of_link, [row, row + 1]).tolist())
        else:
            every = site.names.get(below, [])
            found = [i for i, n in enumerate(every) if name == "site" or n.startswith(path + "/")]
            out[below] = {"total": len(found), "names": [every[i] for i in found[:SHOWN_CHILDREN]]}
            continue
        shown = [site.name(below, i) for i in members[:SHOWN_CHILDREN]]
        out[below] = {"total": len(members), "names": shown}
    return out


def _job(live: Runtime, name: str, row: int) -> dict[str, Any] | None:
    """The job that runs on a node or GPU, or that an entity of the table of jobs is."""
    jobs, site = live.engine.jobs, live.engine.site
    slot = row if name == "job" else -1
    if name in ("node", "gpu"):
        slot = int(jobs.job_of_node[row if name == "node" else int(site.node_of_gpu[row])])
    if slot < 0 or not jobs.alive[slot]:
        return None
    return {"job": jobs.names[slot], "lease_s": float(jobs.lease_s[slot]) or None, **job_of_slot(live, slot)}


def _lines(live: Runtime, name: str, row: int, path: str) -> list[dict[str, Any]]:
    """The newest journal lines that concern an entity."""
    out: list[dict[str, Any]] = []
    site = live.engine.site
    for line in reversed(live.lines):
        if not is_routine(line.record) and line.concerns(site, (name, row, path)):
            out.append(line.answer(site))
        if len(out) >= SHOWN_LINES:
            break
    return out


def alarms_of(live: Runtime, path: str = "", cleared: bool = False) -> list[dict[str, Any]]:
    """Alarms of the book, or bare findings; with a path, those that name it or an entity below it."""
    if live.alarms is not None:
        every: list[dict[str, Any]] = live.alarms.listing(cleared)
    else:
        every = [{"id": f.id, "severity": f.severity, "title": f.title, "entities": list(f.entities),
                  "evidence": list(f.evidence), "action": f.action, "count": f.count, "state": "active"}
                 for f in live.engine.findings.active.values()]  # fmt: skip
    if not path:
        return every
    return [a for a in every if any(is_below(e, path) for e in a.get("entities", ()))]


def lease_rows(live: Runtime, lease: Leases, page: np.ndarray) -> list[dict[str, Any]]:
    """Running leases of these entities."""
    site, control = live.engine.site, lease.control
    readback = _readback(live, control)
    rows = []
    for i in page[np.isfinite(lease.value[page])].tolist():
        owner = int(lease.owner[i])
        value = float(lease.value[i])
        row = {"control": control.key, "name": site.name(control.table, i), "value": value,
               "unit": control.unit,
               "policy": live.engine.policies[owner].name if 0 <= owner < len(live.engine.policies) else None,
               "command": f"{live.engine.arbiter.epoch}-{int(lease.command[i])}",
               "state": LEASE_STATES[int(lease.state[i])], "begun_ns": int(lease.begun_ns[i]) or None,
               "issued_ns": int(lease.issued_ns[i]),
               "expires_ns": int(lease.expires_ns[i]), "on_expiry": control.on_expiry,
               "found": lease.found[i], "readback": readback[i]}  # fmt: skip
        if control.key in INSTANTS or (control.states and 0 <= value < len(control.states)):
            row["means"] = control_value(value, control.key)
        rows.append(row)
    return rows


def _readback(live: Runtime, control: Control) -> np.ndarray:
    n = live.engine.site.sizes[control.table]
    if control.readback is None:
        return np.full(n, np.nan)
    signal = TABLES[control.table].by_name[control.readback]
    value: np.ndarray = live.engine.state.tables[control.table].value[signal.row].astype(float)
    return value


async def leases(request: web.Request) -> web.Response:
    """List the running leases, of all controls or of one."""
    live, key, prefix = live_of(request), request.query.get("control"), request.query.get("prefix", "")
    if key is not None:
        control_of(key)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    rows: list[dict[str, Any]] = []
    total = 0
    for name, lease in live.engine.arbiter.leases.items():
        if key not in (None, name):
            continue
        running = np.flatnonzero(lease.running())
        if prefix:
            running = np.intersect1d(running, held_by(live, lease.control.table, prefix))
        first = max(0, offset - total)
        total += len(running)
        rows += lease_rows(live, lease, running[first : first + limit - len(rows)])
    more = offset + limit < total
    return answer({**_now(live), "mode": live.engine.arbiter.mode, "epoch": live.engine.arbiter.epoch,
                   "total": total, "offset": offset, "next_offset": offset + limit if more else None,
                   "leases": rows})  # fmt: skip


def forecast_rows(live: Runtime, name: str, page: np.ndarray) -> list[dict[str, Any]]:
    """Forecasts of a table's signals for these entities; a node that has failed has no chance of failing."""
    out = []
    known = failed_since(live)[page] == 0 if name == "node" else np.ones(len(page), np.bool_)
    for (key, horizon_s), forecast in sorted(live.engine.forecasts.items()):
        if key.partition(".")[0] == name:
            values = {
                k: np.where(known | (key != CHANCE), v[page].astype(float), np.nan)
                for k, v in (("mean", forecast.mean), ("lo", forecast.lo), ("hi", forecast.hi))
            }
            names = [live.engine.site.name(name, int(i)) for i in page]
            out.append({"signal": key, "horizon_s": horizon_s, "model": forecast.model,
                        "basis": forecast.basis, "names": names, **values})  # fmt: skip
    return out


async def forecasts(request: web.Request) -> web.Response:
    """Return the forecasts of the models: the mean and a 90 % band for each horizon."""
    live, key = live_of(request), request.query.get("signal")
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    current = sorted({k.partition(".")[0] for k, _ in live.engine.forecasts})
    if key is not None:
        current = [t for t in current if key.partition(".")[0] == t]
    rows, longest = [], 0
    for name in current:
        index = _rows(request, live, name)
        longest = max(longest, len(index))
        found = forecast_rows(live, name, index[offset : offset + limit])
        rows += [r for r in found if key in (None, r["signal"])]
    return answer({**_now(live), "forecasts": rows, "offset": offset,
                   "next_offset": offset + limit if offset + limit < longest else None})  # fmt: skip


async def vocabulary(request: web.Request) -> web.Response:  # noqa: ARG001
    """Return the words for signals, without their table, and for controls, as people call them."""
    names = sorted({s.name for spec in TABLES.values() for s in spec.by_name.values()})
    return answer({"signals": {name: signal_words(name) for name in names}, "controls": CONTROLS})


async def site(request: web.Request) -> web.Response:
    """Describe the site: sizes, names of the places, signals and controls, policies with their authority."""
    live = live_of(request)
    engine, built = live.engine, live.engine.site
    return answer({
        **_now(live), "site": built.file.site, "site_hash": built.spec_hash, "sizes": built.sizes,
        "names": {t: built.names.get(t, [])[:MAX_ROWS] for t in ("hall", "rack", "cdu", "loop", "feeder")},
        "signals": [{"key": s.key, "unit": s.unit, "kind": s.kind, "low": s.low, "high": s.high,
                     "states": list(s.states), "period_s": s.period_s}
                    for t, spec in TABLES.items() if built.sizes[t] for s in spec.by_name.values()],
        "controls": [{"key": c.key, "unit": c.unit, "on_expiry": c.on_expiry, "protective": c.protective,
                      "lease_s": c.lease_s, "states": list(c.states), "disruptive": c.disruptive,
                      "controllable": int(np.isfinite(built.envelopes[c.key].low).sum())}
                     for t, spec in TABLES.items() if built.sizes[t] for c in spec.controls],
        "policies": policy_rows(live), "models": sorted(engine.models),
        "profiles": sorted({p for p in built.profile_of_rack if p}), "packaged": packaged_profiles(),
    })  # fmt: skip


def policy_rows(live: Runtime) -> list[dict[str, Any]]:
    """Return each policy, strongest first, with its authority and its present proposals."""
    engine = live.engine
    return [{"name": p.name, "rank": p.rank, "urgent": p.urgent, "authority": engine.intake.authority[p.name],
             "controls": list(p.controls), "suspended": p.name in engine.suspended,
             "reasons": [clean(plain_text(x.reason), 300)
                         for x in engine.in_force[p.name] if len(x.index)][:5]}
            for p in engine.policies]  # fmt: skip


async def sources(request: web.Request) -> web.Response:
    """List the sources of telemetry with their rates, ages, clocks, and what of them is not used and why."""
    ledger = live_of(request).ledger
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    wanted = request.query.get("name", "")
    now_ns = time.time_ns()
    every = [] if ledger is None else ledger.listing(now_ns)
    found = [s for s in every if wanted in s.name]
    page = found[offset : offset + limit]
    rows = [] if ledger is None else ledger.rows(page, now_ns)
    more = offset + limit if offset + limit < len(found) else None
    return answer({"now_ns": now_ns, "total": len(found), "offset": offset, "next_offset": more,
                   "sources": plain(rows)})  # fmt: skip


def unused(live: Runtime) -> list[dict[str, Any]]:
    """A line per reason why something of the last hour was not used, over all sources."""
    return [] if live.ledger is None else plain(live.ledger.overview(time.time_ns())[:SHOWN_UNUSED])


def plain(tree: Any) -> Any:
    """The same with all texts cleaned: they contain topics and labels that any publisher may choose."""
    if isinstance(tree, dict):
        return {clean(k, MAX_TEXT): plain(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [plain(v) for v in tree]
    return clean(tree, MAX_TEXT) if isinstance(tree, str) else tree
