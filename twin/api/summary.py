"""Summary for the person on duty, small enough to be sent once a second.

It holds the leader and the authority, alarms, commands with their reasons, the age of telemetry and ticks,
and a line for each rack.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.alerts import reported_counts
from twin.api import forecasts, health
from twin.api.comparisons import judged_counts
from twin.api.page import supply, with_responses
from twin.api.runtime import Runtime
from twin.api.state import alarms_of, policy_rows, unused, worst_of
from twin.catalogue import (
    INSTANTS,
    NS,
    Bool,
    Control,
    clean,
    control_value,
    find_control,
    plain_text,
    signal_of,
    text,
)
from twin.contracts import finite
from twin.control import Leases
from twin.site import hall_count, noun_key
from twin.telemetry import GOOD, MISSING

SEVERITIES = ("critical", "warning", "info")
SAMPLED = 1000  # entities of a table whose newest reading is looked for
SAID = ("title", "evidence", "action")  # of an alarm: sentences, in which keys stand as words
SHOWN_RACKS = 400
SHOWN_ALARMS = 50
SHOWN_REASONS = 3
SHOWN_MISSED = 6
# Of what a rack's card shows, the readings behind it
LATE_SHOWN = {
    "power_w": "rack.power_w", "supply_temp_c": "rack.supply_temp_c", "return_temp_c": "rack.return_temp_c",
    "inlet_temp_c": "rack.inlet_temp_c", "flow_lpm": "rack.flow_lpm", "gpu_temp_c_max": "gpu.temp_c",
}  # fmt: skip


class Pulse:
    """Instant of the last tick, by the monotonic clock."""

    def __init__(self) -> None:
        self.tick, self.seen_s = -1, time.monotonic()

    def age_s(self, live: Runtime) -> float:
        """Seconds since the tick changed."""
        if live.engine.state.tick != self.tick:
            self.tick, self.seen_s = live.engine.state.tick, time.monotonic()
        return time.monotonic() - self.seen_s


def summary(live: Runtime, pulse: Pulse) -> dict[str, Any]:
    """Return the state that a person on duty needs first, with a line for each rack."""
    alarms = sorted(alarms_of(live), key=urgency)
    return overview(live, pulse, alarms) | {"racks": racks(live, alarms)}


def overview(live: Runtime, pulse: Pulse, alarms: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary without its racks. `alarms`: by urgency; there may be thousands."""
    engine = live.engine
    reported = reported_counts(engine.site, engine.state, engine.diagnosis.silence.hidden)
    rung = [a for a in alarms if a.get("state") != "suppressed"]
    return {
        "site": engine.site.file.site, "version": live.version, "role": live.role, "epoch": live.epoch,
        "mode": engine.arbiter.mode, "ready": live.ready, "simulated": live.loaded.config.simulated,
        "now_ns": engine.state.now_ns, "started_ns": live.started_ns, "ticks": ticks(live, pulse),
        "policies": policy_rows(live), "alarm_counts": severities(alarms),
        "alarms": with_responses(live, [brief_alarm(a) for a in rung[:SHOWN_ALARMS]]),
        "alarms_total": len(rung), "alarms_missed": missed(live), "supply": supply(live),
        "windows": windows(live), "standing": standing(live),
        "commanded": commanded(live), "preview": advised(live), "wanting": wanting(live),
        "requests": len(engine.intake.requests),
        "approvals": len(engine.intake.approvals), "jobs": len(engine.jobs.slot_of), "parts": parts(live),
        "asked_gpus": gpus_of_jobs(live), "queue": queue(live),
        "load_targets": len(engine.intake.load_targets.current(engine.site)),
        "unused": unused(live),
        "telemetry_age_s": telemetry_age_s(live), "heard": reported,
        "noun_keys": {table: noun_key(engine.site, table) for table in reported},
        "forecasts": forecasts.block(live),
        "health": health.block(live), "judged": judged_counts(live, reported),
        "sections": live.sections, "story": live.story,
        "racks_total": engine.site.sizes["rack"], "halls_total": hall_count(engine.site),
        "sizes": engine.site.sizes,
        "history": live.history is not None,
        "contact": clean(live.loaded.config.contact),
        "expected_kept": live.loaded.config.history.expected if live.history is not None else [],
        "counts": dict(live.counts),
    }  # fmt: skip


def telemetry_age_s(live: Runtime) -> float | None:
    """Return the age of the newest reading; None before the first.

    About a thousand entities of each table are looked at, and all of them where none of these reported.
    """
    tables = live.engine.state.tables.values()
    steps = [max(1, column.t_ns.shape[1] // SAMPLED) for column in tables]
    for some in (steps, [1] * len(steps)):
        newest = (int(c.t_ns[:, ::step].max(initial=0)) for c, step in zip(tables, some, strict=True))
        if newest_ns := max(newest, default=0):
            return max(0.0, (live.engine.state.now_ns - newest_ns) / NS)
    return None


def gpus_of_jobs(live: Runtime) -> int:
    """GPUs of the nodes that jobs hold."""
    site = live.engine.site
    return int(np.diff(site.gpu_start_of_node)[live.engine.jobs.job_of_node >= 0].sum())


def queue(live: Runtime) -> dict[str, float | None]:
    """Jobs and GPUs that wait, as a scheduler says; None where none does."""
    return {
        f"{name}s": finite(current_values(live, f"site.{name}_pending_count")[0]) for name in ("job", "gpu")
    }


def ticks(live: Runtime, pulse: Pulse) -> dict[str, Any]:
    """Return the statistics of the tick loop."""
    stats = live.stats
    return {"tick": live.engine.state.tick, "every_s": live.loaded.config.tick_s,
            "age_s": round(pulse.age_s(live), 3), "count": stats.ticks, "skipped": stats.skipped,
            "urgent": stats.urgent, "took_s_p50": quantile(stats.took_s, 0.5),
            "took_s_p99": quantile(stats.took_s, 0.99),
            "late_s_p99": quantile(stats.late_s, 0.99)}  # fmt: skip


def quantile(values: Any, share: float) -> float | None:
    """Return a quantile of the measurements; None for none."""
    return round(float(np.quantile(np.array(values), share)), 6) if len(values) else None


def severities(alarms: list[dict[str, Any]]) -> dict[str, int]:
    """Alarms that ring, by severity, and how many are shelved or suppressed."""
    out = dict.fromkeys((*SEVERITIES, "shelved", "suppressed"), 0)
    for alarm in alarms:
        state = str(alarm.get("state"))
        kind = state if is_aside(alarm) else str(alarm.get("severity"))
        out[kind] = out.get(kind, 0) + 1
    return out


def urgency(alarm: dict[str, Any]) -> tuple[bool, int, bool]:
    """Sort key: active before shelved or suppressed, then by severity, then unacknowledged first."""
    severity = alarm.get("severity")
    rank = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    return is_aside(alarm), rank, bool(alarm.get("ack_author"))


def is_aside(alarm: dict[str, Any]) -> bool:
    """Return True while an alarm does not ring: it is shelved, or follows from another one."""
    return alarm.get("state") in ("shelved", "suppressed")


def brief_alarm(alarm: dict[str, Any]) -> dict[str, Any]:
    """An alarm, bounded, its text made safe: titles and evidence name what came from outside. Evidence that
    only repeats the title is left out."""
    out: dict[str, Any] = {}
    for name, value in alarm.items():
        if isinstance(value, str):
            out[name] = clean(plain_text(value) if name in SAID else value, 300)
        elif isinstance(value, list | tuple):
            texts = [plain_text(v) if name in SAID and isinstance(v, str) else v for v in value[:8]]
            out[name] = [clean(v, 300) if isinstance(v, str) else v for v in texts]
            if name == "evidence":
                title = clean(plain_text(str(alarm.get("title", ""))), 300)
                out[name] = [v for v in out[name] if not text.is_stated(str(v), title)]
        elif isinstance(value, int | float | bool | None):
            out[name] = value
    return out


def missed(live: Runtime) -> dict[str, Any]:
    """Severe alarms that ended unacknowledged: their number, and the newest ones."""
    every = live.alarms.missed() if live.alarms is not None else []
    return {"total": len(every), "alarms": [brief_alarm(a) for a in every[:SHOWN_MISSED]]}


def commanded(live: Runtime) -> list[dict[str, Any]]:
    """List the running commands: a line per control and policy, with the reasons in force."""
    leases = live.engine.arbiter.leases
    return _orders(live, {key: (lease, lease.running()) for key, lease in leases.items()})


def advised(live: Runtime) -> list[dict[str, Any]]:
    """List the preview in the same way: what would run beside it if the policies that advise might act."""
    shadows = live.engine.arbiter.shadow
    return _orders(live, {key: (lease, lease.running() & lease.apart) for key, lease in shadows.items()})


def _orders(live: Runtime, of: Mapping[str, tuple[Leases, Bool]]) -> list[dict[str, Any]]:
    """A line per control and policy of some leases of each control [n]."""
    engine, out = live.engine, []
    for key, (lease, chosen) in of.items():
        running = np.flatnonzero(chosen)
        for owner in np.unique(lease.owner[running]).tolist():
            mine = running[lease.owner[running] == owner]
            values = lease.value[mine]
            policy = engine.policies[owner].name if 0 <= owner < len(engine.policies) else ""
            reasons = [p.reason for p in engine.in_force.get(policy, []) if p.control == key and len(p.index)]
            out.append({
                "control": key, "policy": policy, "count": len(mine), "unit": lease.control.unit,
                "low": float(values.min()), "high": float(values.max()),
                "means": _means(lease.control, values),
                "reasons": [clean(plain_text(r), 300) for r in dict.fromkeys(reasons)][:SHOWN_REASONS],
                "first": engine.site.name(lease.control.table, int(mine[0])),
                "expires_ns": int(lease.expires_ns[mine].min()),
            })  # fmt: skip
    return out


def windows(live: Runtime) -> list[dict[str, Any]]:
    """List the maintenance windows: nothing protects these entities until they end."""
    out = []
    for w in live.engine.windows.events()[:50]:
        names = [clean(n) for n in w.names[:4]]
        out.append({"id": w.id, "author": clean(w.author), "table": w.table, "names": names,
                    "count": len(w.names), "until_ns": w.until_ns,
                    "reason": clean(w.reason, 200)})  # fmt: skip
    return out


def standing(live: Runtime) -> list[dict[str, Any]]:
    """List the operators' requests in force."""
    out = []
    for r in list(live.engine.intake.requests.values())[:50]:
        out.append({"id": r.id, "author": clean(r.author), "control": r.control, "lo": r.lo, "hi": r.hi,
                    "first": clean(r.names[0]), "count": len(r.names), "expires_ns": r.expires_ns,
                    "reason": clean(r.reason, 200)})  # fmt: skip
    return out


def _means(control: Control, values: np.ndarray) -> str | None:
    """States and instants in words; None for numbers, and where no value is finite."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    if control.key in INSTANTS:
        return " to ".join(
            dict.fromkeys(control_value(float(v), control.key) for v in (values.min(), values.max()))
        )
    named = sorted({int(v) for v in np.unique(values)}) if control.states else []
    return ", ".join(control.states[v] for v in named if 0 <= v < len(control.states)) or None


def wanting(live: Runtime) -> list[dict[str, Any]]:
    """List the proposals of policies in `approve`, which wait for an operator's approval."""
    engine, out = live.engine, []
    for policy in engine.policies:
        if engine.intake.authority[policy.name] != "approve":
            continue
        for p in engine.in_force[policy.name]:
            approvals = [a for a in engine.intake.approvals.values()
                    if a.policy == policy.name and a.control == p.control]  # fmt: skip
            if len(p.index) == 0 or any(not a.names for a in approvals):
                continue  # nothing is wanted, or it is approved wherever it is wanted
            table, control = p.control.partition(".")[0], find_control(p.control)
            unit = control.unit if control is not None else ""
            out.append({"policy": policy.name, "control": p.control, "count": len(p.index), "unit": unit,
                        "low": float(p.lo.min()), "high": float(p.hi.max()),
                        "reason": clean(plain_text(p.reason), 300),
                        "means": None if control is None else _means(control, np.concatenate([p.lo, p.hi])),
                        "first": engine.site.name(table, int(p.index[0])),
                        "approved_partly": bool(approvals)})  # fmt: skip
    return out[:50]


def parts(live: Runtime) -> list[dict[str, Any]]:
    """Sources, sinks and services: how each is doing, and since when."""
    now_ns = time.time_ns()
    return [{"name": p.name, "kind": p.kind, "state": p.state, "restarts": p.restarts,
             "since_s": max(0.0, round((now_ns - p.since_ns) / NS, 1)) if p.since_ns else None,
             "error": clean(p.error, 300)}
            for p in sorted(live.parts.values(), key=lambda p: (p.kind, p.name))]  # fmt: skip


def racks(live: Runtime, alarms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per rack. Power is the rack's own, or the sum of what its nodes or GPUs report, and says so."""
    engine, site = live.engine, live.engine.site
    n = site.sizes["rack"]
    if n == 0:
        return []
    power, source = power_of_racks(live)
    columns: dict[str, np.ndarray] = {}
    for name in ("supply_temp_c", "return_temp_c", "inlet_temp_c", "flow_lpm"):
        columns[name] = last_values(live, f"rack.{name}")
    hottest, worst = np.full(n, np.nan), np.full(n, np.nan)
    if site.sizes["gpu"]:
        np.fmax.at(hottest, site.rack_of_gpu, last_values(live, "gpu.temp_c"))
        np.fmax.at(worst, site.rack_of_gpu, worst_of(live, signal_of("gpu.temp_c")).astype(float))
    capped = np.zeros(n, np.int64)
    lease = engine.arbiter.leases.get("gpu.power_cap_w")
    if lease is not None and lease.n:
        np.add.at(capped, site.rack_of_gpu[np.flatnonzero(lease.running())], 1)
    gravest, silent, ages = marks(live, alarms), silent_s(live), ages_s(live)
    rank = [
        SEVERITIES.index(s) if (s := gravest.get(name)) in SEVERITIES else 9 for name in site.names["rack"]
    ]
    order = np.sort(np.argsort(rank, kind="stable")[:SHOWN_RACKS])  # the gravest must be among those shown
    return [{"name": site.names["rack"][i], "power_w": power[i], "power_from": source[i],
             **{k: round(float(v[i]), 2) for k, v in columns.items()}, "gpu_temp_c_max": hottest[i],
             "gpu_temp_c_worst": worst[i], "gpus_capped": int(capped[i]),
             "ages_s": {name: float(age[i]) for name, age in ages.items()
                        if np.isfinite(age[i]) and (name != "power_w" or source[i] == "meter")},
             "silent_s": silent[i], "severity": gravest.get(site.names["rack"][i], "")}
            for i in order.tolist()]  # fmt: skip


def silent_s(live: Runtime) -> np.ndarray:
    """Seconds since an outage took readings of each rack, its nodes or GPUs [n]; NaN where none did."""
    engine, site = live.engine, live.engine.site
    since_ns = np.full(site.sizes["rack"], np.nan)
    outages = engine.diagnosis.silence.outages
    of_rack: dict[str, np.ndarray] = {
        "rack": np.arange(site.sizes["rack"]),
        "node": site.rack_of_node,
        "gpu": site.rack_of_gpu,
    }
    for key, members in outages.members.items():
        for table, rack_of in of_rack.items():
            if table in members:
                np.fmin.at(since_ns, rack_of[members[table]], float(outages.known[key].since_ns))
    return np.round((engine.state.now_ns - since_ns) / NS, 1)


def ages_s(live: Runtime) -> dict[str, np.ndarray]:
    """Ages of readings that are late, as of the oldest in each rack [n]; NaN where none is."""
    state, site = live.engine.state, live.engine.site
    out = {}
    for name, key in LATE_SHOWN.items():
        signal = signal_of(key)
        column, age_s = state.tables[signal.table], np.full(site.sizes["rack"], np.nan)
        late = np.flatnonzero(column.late(signal, state.now_ns))
        at = site.rack_of_gpu[late] if signal.table == "gpu" else late
        np.fmax.at(age_s, at, column.age_s(signal, state.now_ns)[late])
        out[name] = np.round(age_s, 1)
    return out


def current_values(live: Runtime, key: str) -> np.ndarray:
    """Values of a signal where they are good, NaN elsewhere [n]."""
    signal, state = signal_of(key), live.engine.state
    column = state.tables[signal.table]
    good = column.quality_of(signal, state.now_ns) == GOOD
    out: np.ndarray = np.where(good, column.value[signal.row].astype(float), np.nan)
    return out


def last_values(live: Runtime, key: str) -> np.ndarray:
    """Last good values of a signal, however old, unless something else came since [n]; an old one is shown
    with its age.
    """
    signal, state = signal_of(key), live.engine.state
    column = state.tables[signal.table]
    bad = ~np.isin(column.quality[signal.row], (GOOD, MISSING))
    out: np.ndarray = np.where(bad, np.nan, column.value[signal.row].astype(float))
    return out


def power_of_racks(live: Runtime) -> tuple[np.ndarray, list[str]]:
    """(power, where it comes from) per rack: its meter first, then its nodes', then its GPUs', then what its
    meter read last.
    """
    site = live.engine.site
    power = current_values(live, "rack.power_w")
    source = ["meter" if known else "" for known in np.isfinite(power)]
    for table, name in (("node", "nodes"), ("gpu", "GPUs")):
        if site.sizes[table] == 0:
            continue
        summed = site.sum_by_rack(table, current_values(live, f"{table}.power_w"))
        fresh = ~np.isfinite(power) & np.isfinite(summed) & (summed > 0)
        power = np.where(fresh, summed, power)
        source = [name if f else s for f, s in zip(fresh, source, strict=True)]
    last = last_values(live, "rack.power_w")
    source = ["meter" if not s and known else s for s, known in zip(source, np.isfinite(last), strict=True)]
    power = np.where(np.isfinite(power), power, last)
    return np.round(power, 1), source


def marks(live: Runtime, alarms: list[dict[str, Any]]) -> dict[str, str]:
    """The gravest alarm of each rack, by the entities that alarms name."""
    names = set(live.engine.site.names.get("rack", []))
    out: dict[str, str] = {}
    for alarm in alarms:  # the gravest first
        if is_aside(alarm):
            continue
        for entity in alarm.get("entities", ()):
            place = str(entity)
            while place and place not in names:
                place = place.rpartition("/")[0]
            if place:
                out.setdefault(place, str(alarm.get("severity")))
    return out
