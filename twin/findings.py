"""Findings: conditions that people should know of, raised once, kept while they last, cleared once.

A balance that does not close, a read-back that differs, telemetry that fell silent or never came, an entity
that nothing guards, a plug-in that was suspended. What people work at is left out. Decides nothing. May
import contracts, the site, maintenance windows, who was never heard, and the estimator.

What is active is always as last evaluated. The journal hears of a finding when it begins, when it got worse
or doubled, and, if the evaluation before said so too, when it shrank to half or concerns others than told.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.contracts import Finding, View
from twin.estimator import Estimator
from twin.frame import I32, NS, Bool
from twin.maintenance import Windows
from twin.over_budget import over_budgets
from twin.signals import find_signal
from twin.silence import SHOWN_ENTITIES, silence_of
from twin.site import Site
from twin.state import GOOD, OUT_OF_RANGE, STALE_PERIODS, UNTRUSTED, State, TableState
from twin.unheard import Unheard

MAX_ACTIVE = 10_000
# A deviation must be this sure, for this long, to be called one: a healthy balance errs once in 10,000.
SURE_PU, LASTING_S = 0.9999, 60.0
SILENCE_EVERY_S = 10.0
# What each kind of entity is expected to report as long as it lives.
VITAL = {"gpu": "gpu.temp_c", "rack": "rack.power_w", "cdu": "cdu.supply_temp_c", "node": "node.power_w",
         "feeder": "feeder.power_w"}  # fmt: skip
# By which of its signals, with a limit, an entity is guarded: one is enough.
GUARDING = {
    "gpu": ("gpu.temp_c", "gpu.thermal_margin_k"),
    "rack": ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm", "rack.inlet_temp_c"),
}
# Controls that are advice: who does not follow it, or never answers, is no device at fault.
ADVISED = ("job.checkpoint_interval_s", "job.checkpoint_local_interval_s", "job.checkpoint_since_s")
_MAY_DECLINE = "A job may decline advice; if it should not, look at its client and the bounds set there."
PLACED = "node.placement"  # a wish to the scheduler: nothing that runs depends on it
_FORGETS = (
    "What a scheduler forgets, as Slurm its weights when it reads its configuration, comes back with the "
    "next renewal; else look at the rights that the commands need, or for others who mark or reserve a node."
)
_GRAVITY = {"info": 0, "warning": 1, "critical": 2}


class Findings:
    """Active findings, and since when each deviation has lasted."""

    def __init__(self, site: Site, estimator: Estimator) -> None:
        self.active: dict[str, Finding] = {}
        self.told: dict[str, Finding] = {}  # as last journaled
        self.heat_since_ns = np.zeros(site.sizes["rack"], np.int64)
        self.balance_since_ns = np.zeros(len(estimator.balances), np.int64)
        self.unguarded_since_ns = _nobody(site)
        self.unheard = Unheard(site)
        self.silence_ns = 0
        self.counts = {"dropped": 0}

    def raise_(self, finding: Finding) -> list[dict[str, Any]]:
        """Add or refresh a finding; returns journal bodies: none while nothing of weight has changed."""
        known, told = self.active.get(finding.id), self.told.get(finding.id)
        if known is None and len(self.active) >= MAX_ACTIVE:
            self.counts["dropped"] += 1
            return []
        self.active[finding.id] = finding
        if known is not None and told is not None:
            grew = finding.count >= 2 * told.count
            worse = _GRAVITY.get(finding.severity, 0) > _GRAVITY.get(told.severity, 0)
            if not (grew or worse or (_differs(finding, told) and _differs(known, told))):
                return []
        self.told[finding.id] = finding
        return [{"kind": "finding", "id": finding.id, "severity": finding.severity, "title": finding.title,
                 "entities": list(finding.entities), "evidence": list(finding.evidence),
                 "confidence_pu": finding.confidence_pu, "action": finding.action,
                 "count": finding.count}]  # fmt: skip

    def clear(self, identity: str) -> list[dict[str, Any]]:
        """End a finding, if it was active."""
        self.told.pop(identity, None)
        return [] if self.active.pop(identity, None) is None else [{"kind": "cleared", "id": identity}]

    def keep_only(self, prefix: str, current: list[Finding]) -> list[dict[str, Any]]:
        """Of the findings with this prefix these are true now; the others are over."""
        records: list[dict[str, Any]] = []
        ids = {f.id for f in current}
        for identity in [k for k in self.active if k.startswith(prefix) and k not in ids]:
            records += self.clear(identity)
        for finding in current:
            records += self.raise_(finding)
        return records

    def deviations(
        self, site: Site, estimator: Estimator, windows: Windows, explained: dict[str, Bool] | None = None
    ) -> list[dict[str, Any]]:
        """Balances off, surely, for a while; none that people work at, or that a diagnosis explains."""
        heat, balance = estimator.residuals["rack.heat"], estimator.residuals["feeder.balance"]
        # Time is counted between readings: one odd reading that stands for long is still one reading.
        heat_ns, balance_ns = estimator.heat_heard_ns, estimator.balance_heard_ns
        heat_off, balance_off = heat.confidence_pu > SURE_PU, balance.confidence_pu > SURE_PU
        told = explained or {}
        heat_off &= ~told.get("rack.heat", np.False_)
        balance_off &= ~told.get("feeder.balance", np.False_)
        racks, feeders = windows.mask("rack"), windows.mask("feeder")
        if racks is not None:
            heat_off &= ~racks
        if racks is not None or feeders is not None:
            balance_off &= ~estimator.balances_with(feeders, racks)
        self.heat_since_ns = _since(self.heat_since_ns, heat_off, heat_ns)
        self.balance_since_ns = _since(self.balance_since_ns, balance_off, balance_ns)
        found = []
        for rack in _lasting(self.heat_since_ns, heat_ns).tolist():
            found.append(
                Finding(
                    f"heat/{site.name('rack', rack)}",
                    "warning",
                    f"The heat balance of {site.name('rack', rack)} is off",
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
        records = self.keep_only("heat/", [f for f in found if f.id.startswith("heat/")])
        return records + self.keep_only("balance/", [f for f in found if f.id.startswith("balance/")])

    def silences(self, site: Site, state: State, windows: Windows | None = None) -> list[dict[str, Any]]:
        """What was heard once and is not usable now, whom nothing guards, who never spoke; every 10 s."""
        windows = Windows(site) if windows is None else windows
        if state.now_ns - self.silence_ns < SILENCE_EVERY_S * NS:
            return []
        self.silence_ns = state.now_ns
        keys = dict.fromkeys((*site.limits, *VITAL.values()))
        silent = [f for key in keys if (f := silence_of(site, state, key, windows)) is not None]
        unguarded = [
            f for table in GUARDING if (f := self._unguarded(site, state, table, windows)) is not None
        ]
        unheard = self.unheard.look(site, state, windows)
        records = self.keep_only("silent/", silent) + self.keep_only("unguarded/", unguarded)
        return records + self.keep_only("unheard/", unheard)

    def _unguarded(self, site: Site, state: State, table: str, windows: Windows) -> Finding | None:
        """Entities that live, or replaced one that did, and give no reading that has a limit."""
        column, n = state.tables[table], site.sizes[table]
        guarded, limited = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        period_s = 0.0
        for key in GUARDING[table]:
            signal, limit = find_signal(key), site.limits.get(key)
            assert signal is not None
            period_s = max(period_s, float(column.period_s[signal.row]))
            if limit is not None:
                stated = np.isfinite(limit.guard) | np.isfinite(limit.max)
                limited |= stated
                guarded |= stated & np.isfinite(column.value[signal.row])
        bare = np.flatnonzero(~guarded)
        bare = bare[_lives(column, bare, table) | (column.generation[bare] > 0)]
        if (spared := windows.mask(table)) is not None:
            bare = bare[~spared[bare]]
        since_ns = np.zeros(n, np.int64)
        before_ns = self.unguarded_since_ns[table][bare]
        since_ns[bare] = np.where(before_ns == 0, state.now_ns, before_ns)
        self.unguarded_since_ns[table] = since_ns
        lasting = bare[state.now_ns - since_ns[bare] > STALE_PERIODS * period_s * NS]
        if len(lasting) == 0:
            return None
        unlimited = int(np.count_nonzero(~limited[lasting]))
        signals = " or ".join(k.partition(".")[2] for k in GUARDING[table])
        why = (
            f"{len(lasting) - unlimited} have never reported {signals}",
            f"{unlimited} have no limit in a profile",
        )
        return Finding(
            f"unguarded/{table}",
            "warning",
            f"{len(lasting)} {table} are not guarded: no reading that has a limit",
            tuple(site.name(table, int(i)) for i in lasting[:SHOWN_ENTITIES]),
            tuple(text for text in why if not text.startswith("0 ")),
            1.0,
            "Connect a source for these readings, or give the rack a profile with limits.",
            len(lasting),
        )

    def limits(self, site: Site, view: View, windows: Windows) -> list[dict[str, Any]]:
        """Entities that may be beyond a guard (warning) or a limit (critical), judged by the worst case."""
        found: list[Finding] = []
        for key, limit in site.limits.items():
            guarded = view.beyond(key)
            if len(guarded) and (spared := windows.mask(key.partition(".")[0])) is not None:
                guarded = guarded[~spared[guarded]]
            if len(guarded):
                guarded = guarded[~_dark(site, view, key.partition(".")[0])[guarded]]
            if len(guarded) == 0:
                continue
            worst, read = view.worst(key), view.value(key)
            signal = find_signal(key)
            falling = signal is not None and signal.danger == "low"
            past = worst[guarded] < limit.max[guarded] if falling else worst[guarded] > limit.max[guarded]
            # What is beyond its limit is beyond its guard as well, and is told once.
            level, bound, severity = "guard", limit.guard, "warning"
            index = guarded
            if past.any():
                level, bound, severity, index = "limit", limit.max, "critical", guarded[past]
            surely = read[index] < bound[index] if falling else read[index] > bound[index]
            table, _, name = key.partition(".")
            first = int(index[0])
            unit = f" {signal.unit}" if signal is not None and signal.unit not in ("1", "state") else ""
            who = f"{site.name(table, first)}: " if len(index) > 1 else ""  # one alone is named anyway
            evidence = (
                f"{who}read {read[first]:.4g}{unit}, by now perhaps {worst[first]:.4g}{unit}, "
                f"{level} {bound[first]:.4g}{unit}"
            )
            found.append(
                Finding(
                    f"beyond/{key}/{level}",
                    severity,
                    f"{name} of {len(index)} {table} {'is' if surely.all() else 'may be'} beyond its {level}",
                    tuple(site.name(table, int(i)) for i in index[:SHOWN_ENTITIES]),
                    (evidence,),
                    1.0,
                    "Look at the cooling of what these have in common.",
                    len(index),
                )
            )
        found += over_budgets(site, view, windows)
        records, now = self.keep_only("beyond/", found), {f.id.rpartition("/")[0]: f.id for f in found}
        for record in records:  # what got worse, or only less bad, is not over
            if record["kind"] == "cleared" and (by := now.get(record["id"].rpartition("/")[0])):
                record["superseded_by"] = by
        return records

    def mismatches(
        self, names: tuple[str, ...], control: str, index: I32, evidence: str = ""
    ) -> list[dict[str, Any]]:
        """Devices whose read-back differs from the setpoint; names and evidence are of the first ones."""
        table = control.partition(".")[0]
        if len(index) == 0:
            return self.clear(f"readback/{control}")
        return self.raise_(
            Finding(
                f"readback/{control}",
                _severity(control, "critical"),
                f"{len(index)} {table} entities do not do what {control} commands",
                names[:SHOWN_ENTITIES],
                (evidence,) if evidence else (),
                1.0,
                _hint(control, "Look for another writer of this control, or a device that refuses it."),
                len(index),
            )
        )

    def unanswered(self, names: tuple[str, ...], control: str, index: I32) -> list[dict[str, Any]]:
        """Devices that never answered, or refused, until the command was given up."""
        if len(index) == 0:
            return self.clear(f"unanswered/{control}")
        table = control.partition(".")[0]
        return self.raise_(
            Finding(
                f"unanswered/{control}",
                _severity(control, "critical"),
                f"{len(index)} {table} did not carry out {control}",
                names[:SHOWN_ENTITIES],
                ("refused, or no answer, after repeated sending",),
                1.0,
                _hint(control, "Look at the agents of these devices; their leases go on being renewed."),
                len(index),
            )
        )

    def unread(self, names: tuple[str, ...], control: str, index: I32, wait_s: float) -> list[dict[str, Any]]:
        """Devices that answered a command and do not say, or no longer say, what they do."""
        if len(index) == 0:
            return self.clear(f"unread/{control}")
        table = control.partition(".")[0]
        return self.raise_(
            Finding(
                f"unread/{control}",
                _severity(control, "warning"),
                f"{control} of {len(index)} {table} is not confirmed: nothing is read back",
                names[:SHOWN_ENTITIES],
                (f"no read-back for {wait_s:.0f} s; a device out of reach lets its lease lapse",),
                1.0,
                _hint(control, "Check the agents of these devices: nobody sees what they do."),
                len(index),
            )
        )

    def remap(self, site: Site, estimator: Estimator, old_of_new: dict[str, I32]) -> None:
        """The site changed: durations are counted afresh, but for those who were never heard."""
        self.unheard = self.unheard.remapped(site, old_of_new)
        self.heat_since_ns = np.zeros(site.sizes["rack"], np.int64)
        self.balance_since_ns = np.zeros(len(estimator.balances), np.int64)
        self.unguarded_since_ns = _nobody(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "active": [_plain(f) for f in self.active.values()],  # a list: their order is content
            "told": [_plain(f) for f in self.told.values()],
            "unguarded_since_ns": self.unguarded_since_ns,
            "heat_since_ns": self.heat_since_ns,
            "balance_since_ns": self.balance_since_ns,
            "unheard": self.unheard.dump(),
            "silence_ns": self.silence_ns,
            "counts": self.counts,
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.active = {f[0]: _finding(f) for f in data["active"]}
        self.told = {f[0]: _finding(f) for f in data["told"]}
        self.unguarded_since_ns = {t: np.array(since) for t, since in data["unguarded_since_ns"].items()}
        self.heat_since_ns, self.balance_since_ns = (
            np.array(data["heat_since_ns"]),
            np.array(data["balance_since_ns"]),
        )
        if "unheard" in data:  # an older snapshot does not have it: they are waited for from now on
            self.unheard.restore(data["unheard"])
        self.silence_ns, self.counts = data["silence_ns"], dict(data["counts"])


def _differs(finding: Finding, told: Finding) -> bool:
    """Half of what was told, or others than those told."""
    moved = bool(told.entities) and set(finding.entities).isdisjoint(told.entities)
    return finding.count <= told.count / 2 or moved


def _dark(site: Site, view: View, table: str) -> Bool:
    """What stands in a rack that is known to be without power, and so cannot be hot [n]."""
    isolated = "rack.electrical_isolation_state"
    rack: Bool = (view.value(isolated) == 1.0) & (view.quality(isolated) == GOOD)
    of = {"gpu": site.rack_of_gpu, "node": site.rack_of_node}.get(table)
    if table == "rack" or of is None:
        return rack if table == "rack" else np.zeros(site.sizes[table], np.bool_)
    return rack[of]


def _severity(control: str, otherwise: str) -> str:
    return "info" if control in ADVISED else "warning" if control == PLACED else otherwise


def _hint(control: str, otherwise: str) -> str:
    """What to do about devices that do not do as commanded."""
    return _MAY_DECLINE if control in ADVISED else _FORGETS if control == PLACED else otherwise


def _nobody(site: Site) -> dict[str, np.ndarray]:
    return {table: np.zeros(site.sizes[table], np.int64) for table in GUARDING}


def _lives(column: TableState, index: np.ndarray, table: str) -> np.ndarray:
    """Whether each reports anything; of a rack, which need not be cooled by what we see, a temperature."""
    out = np.zeros(len(index), np.bool_)
    for signal in column.signals:
        if table == "gpu" or signal.name.endswith("_temp_c"):
            quality = column.quality[signal.row, index]
            out |= np.isfinite(column.value[signal.row, index])
            out |= (quality == UNTRUSTED) | (quality == OUT_OF_RANGE)
    return out


def _plain(f: Finding) -> list[Any]:
    return [f.id, f.severity, f.title, list(f.entities), list(f.evidence), f.confidence_pu, f.action, f.count]


def _finding(f: list[Any]) -> Finding:
    return Finding(f[0], f[1], f[2], tuple(f[3]), tuple(f[4]), f[5], f[6], f[7])


def _since(since_ns: np.ndarray, off: np.ndarray, heard_ns: np.ndarray) -> np.ndarray:
    return np.where(off, np.where(since_ns == 0, heard_ns, since_ns), 0)


def _lasting(since_ns: np.ndarray, heard_ns: np.ndarray) -> np.ndarray:
    return np.flatnonzero((since_ns > 0) & (heard_ns - since_ns >= LASTING_S * NS))
