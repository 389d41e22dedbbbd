"""Findings: conditions that people should know of, raised once, kept while they last, cleared once.

First version: a balance that does not close, a read-back that differs, telemetry that fell silent, a plug-in
that was suspended. Decides nothing. May import contracts, the site and the estimator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.contracts import Finding, View
from twin.estimator import Estimator
from twin.frame import I32, NS
from twin.signals import find_signal
from twin.site import Site
from twin.state import MISSING, STALE, State

MAX_ACTIVE = 10_000
# A deviation must be this sure, for this long, to be called one: a healthy balance errs once in 10,000.
SURE_PU, LASTING_S = 0.9999, 60.0
SILENCE_EVERY_S = 10.0
SHOWN_ENTITIES = 8
# What each kind of entity is expected to report as long as it lives.
VITAL = {"gpu": "gpu.temp_c", "rack": "rack.power_w", "cdu": "cdu.supply_temp_c", "node": "node.power_w",
         "feeder": "feeder.power_w"}  # fmt: skip


class Findings:
    """Active findings, and since when each deviation has lasted."""

    def __init__(self, site: Site, estimator: Estimator) -> None:
        self.active: dict[str, Finding] = {}
        self.heat_since_ns = np.zeros(site.sizes["rack"], np.int64)
        self.balance_since_ns = np.zeros(len(estimator.balances), np.int64)
        self.silence_ns = 0
        self.counts = {"dropped": 0}

    def raise_(self, finding: Finding) -> list[dict[str, Any]]:
        """Add a finding; returns journal bodies: none while it is active, unless it has doubled in size."""
        known = self.active.get(finding.id)
        if known is not None and finding.count < 2 * known.count:
            return []
        if known is None and len(self.active) >= MAX_ACTIVE:
            self.counts["dropped"] += 1
            return []
        self.active[finding.id] = finding
        return [{"kind": "finding", "id": finding.id, "severity": finding.severity, "title": finding.title,
                 "entities": list(finding.entities), "evidence": list(finding.evidence),
                 "confidence_pu": finding.confidence_pu, "action": finding.action,
                 "count": finding.count}]  # fmt: skip

    def clear(self, identity: str) -> list[dict[str, Any]]:
        """End a finding, if it was active."""
        return [] if self.active.pop(identity, None) is None else [{"kind": "cleared", "id": identity}]

    def _keep_only(self, prefix: str, current: list[Finding]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        ids = {f.id for f in current}
        for identity in [k for k in self.active if k.startswith(prefix) and k not in ids]:
            records += self.clear(identity)
        for finding in current:
            records += self.raise_(finding)
        return records

    def deviations(self, site: Site, estimator: Estimator, now_ns: int) -> list[dict[str, Any]]:
        """Balances that have been off, surely, for a while."""
        heat, balance = estimator.residuals["rack.heat"], estimator.residuals["feeder.balance"]
        # Time is counted between readings: one odd reading that stands for long is still one reading.
        heat_ns, balance_ns = estimator.heat_heard_ns, estimator.balance_heard_ns
        self.heat_since_ns = _since(self.heat_since_ns, heat.confidence_pu > SURE_PU, heat_ns)
        self.balance_since_ns = _since(self.balance_since_ns, balance.confidence_pu > SURE_PU, balance_ns)
        found = []
        for rack in _lasting(self.heat_since_ns, heat_ns).tolist():
            found.append(
                Finding(
                    f"heat/{site.name('rack', rack)}",
                    "warning",
                    "The rack's heat balance is off",
                    (site.name("rack", rack),),
                    (
                        f"return {heat.measured[rack]:.2f} degC, expected {heat.expected[rack]:.2f} degC",
                        f"learned noise {heat.sigma[rack]:.3f} K",
                    ),
                    float(heat.confidence_pu[rack]),
                    "Compare flow, temperatures and power of this rack.",
                )
            )
        for i in _lasting(self.balance_since_ns, balance_ns).tolist():
            name = estimator.balances[i].name
            found.append(
                Finding(
                    f"balance/{name}",
                    "warning",
                    "A meter and what it serves disagree",
                    tuple(site.name("feeder", int(f)) for f in estimator.balances[i].meters[:SHOWN_ENTITIES]),
                    (f"meters {balance.measured[i]:.0f} W, loads {balance.expected[i]:.0f} W",),
                    float(balance.confidence_pu[i]),
                    "Check the meters, then look for a load that the site file lacks.",
                )
            )
        records = self._keep_only("heat/", [f for f in found if f.id.startswith("heat/")])
        return records + self._keep_only("balance/", [f for f in found if f.id.startswith("balance/")])

    def silences(self, site: Site, state: State) -> list[dict[str, Any]]:
        """Entities that have reported and fell silent, one finding per table and hall; checked every 10 s."""
        if state.now_ns - self.silence_ns < SILENCE_EVERY_S * NS:
            return []
        self.silence_ns = state.now_ns
        found: list[Finding] = []
        for table, key in VITAL.items():
            signal = find_signal(key)
            assert signal is not None
            if site.sizes[table] == 0:
                continue
            column = state.tables[table]
            quality = column.quality_of(signal, state.now_ns)
            heard = np.isfinite(column.value[signal.row])
            silent = np.flatnonzero(heard & ((quality == STALE) | (quality == MISSING)))
            if len(silent):
                oldest_s = _oldest(column.age_s(signal, state.now_ns)[silent])
                names = tuple(site.name(table, int(i)) for i in silent[:SHOWN_ENTITIES])
                more = f" and {len(silent) - SHOWN_ENTITIES} more" if len(silent) > SHOWN_ENTITIES else ""
                found.append(
                    Finding(
                        f"silent/{table}",
                        "warning",
                        f"{len(silent)} {table} entities no longer report {signal.name}",
                        names,
                        (f"oldest good reading {oldest_s:.0f} s ago{more}",),
                        1.0,
                        "Check the source; limits are judged by the worst case meanwhile.",
                        len(silent),
                    )
                )
        return self._keep_only("silent/", found)

    def limits(self, site: Site, view: View) -> list[dict[str, Any]]:
        """Entities that may be beyond a guard (warning) or a limit (critical), judged by the worst case."""
        found: list[Finding] = []
        for key, limit in site.limits.items():
            worst, read = view.worst(key), view.value(key)
            for level, bound, severity in (
                ("limit", limit.max, "critical"),
                ("guard", limit.guard, "warning"),
            ):
                with np.errstate(invalid="ignore"):
                    beyond = np.where(limit.max > limit.guard, worst > bound, worst < bound)
                index = np.flatnonzero(beyond)
                if len(index) == 0:
                    continue
                table, _, name = key.partition(".")
                first = int(index[0])
                rising = limit.max[first] > limit.guard[first]
                surely = (read[index] > bound[index]) if rising else (read[index] < bound[index])
                verb = "is" if surely.all() else "may be"
                evidence = (
                    f"{site.name(table, first)}: read {read[first]:.4g}, by now perhaps {worst[first]:.4g}, "
                    f"{level} {bound[first]:.4g}"
                )
                found.append(
                    Finding(
                        f"beyond/{key}/{level}",
                        severity,
                        f"{name} of {len(index)} {table} {verb} beyond its {level}",
                        tuple(site.name(table, int(i)) for i in index[:SHOWN_ENTITIES]),
                        (evidence,),
                        1.0,
                        "Look at the cooling of what these have in common.",
                        len(index),
                    )
                )  # fmt: skip
                break  # what is beyond its limit is beyond its guard as well
        return self._keep_only("beyond/", found)

    def mismatches(self, site: Site, control: str, index: I32) -> list[dict[str, Any]]:
        """Devices whose read-back has differed from the setpoint."""
        table = control.partition(".")[0]
        if len(index) == 0:
            return self.clear(f"readback/{control}")
        return self.raise_(
            Finding(
                f"readback/{control}",
                "critical",
                f"{len(index)} {table} entities do not do what {control} commands",
                tuple(site.name(table, int(i)) for i in index[:SHOWN_ENTITIES]),
                (),
                1.0,
                "Look for another writer of this control, or a device that refuses it.",
                len(index),
            )
        )

    def remap(self, site: Site, estimator: Estimator) -> None:
        """The site changed: durations are counted afresh."""
        self.heat_since_ns = np.zeros(site.sizes["rack"], np.int64)
        self.balance_since_ns = np.zeros(len(estimator.balances), np.int64)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "active": {
                k: [
                    f.id,
                    f.severity,
                    f.title,
                    list(f.entities),
                    list(f.evidence),
                    f.confidence_pu,
                    f.action,
                    f.count,
                ]
                for k, f in self.active.items()
            },
            "heat_since_ns": self.heat_since_ns,
            "balance_since_ns": self.balance_since_ns,
            "silence_ns": self.silence_ns,
            "counts": self.counts,
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.active = {
            k: Finding(f[0], f[1], f[2], tuple(f[3]), tuple(f[4]), f[5], f[6], f[7])
            for k, f in data["active"].items()
        }
        self.heat_since_ns, self.balance_since_ns = (
            np.array(data["heat_since_ns"]),
            np.array(data["balance_since_ns"]),
        )
        self.silence_ns, self.counts = data["silence_ns"], dict(data["counts"])


def _since(since_ns: np.ndarray, off: np.ndarray, heard_ns: np.ndarray) -> np.ndarray:
    return np.where(off, np.where(since_ns == 0, heard_ns, since_ns), 0)


def _lasting(since_ns: np.ndarray, heard_ns: np.ndarray) -> np.ndarray:
    return np.flatnonzero((since_ns > 0) & (heard_ns - since_ns >= LASTING_S * NS))


def _oldest(age_s: np.ndarray) -> float:
    finite = age_s[np.isfinite(age_s)]
    return float(finite.max()) if len(finite) else float("nan")
