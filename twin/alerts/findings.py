"""Findings: conditions that operators should know of. A finding is raised once and cleared once.

Conditions are: a balance that does not close, a read-back that differs, stale or missing telemetry, an entity
without a limit, a feeder beyond its budget, a suspended plug-in. Entities in maintenance are left out.

`active` holds the result of the last evaluation. The journal records a finding when it begins, gets worse or
doubles. If two evaluations agree, it also records that a finding halved or concerns other entities.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np

from twin.alerts.never_reported import SHOWN_ENTITIES, NeverReported
from twin.alerts.worst_cases import eased, exceeds, feared_findings, worst_cases
from twin.catalogue import (
    F64,
    I32,
    I64,
    NS,
    Bool,
    clean,
    control_words,
    counted,
    duration,
    find_signal,
    quantity,
    signal_of,
    signal_words,
)
from twin.contracts import (
    GRAVITY,
    ClearedRecord,
    Finding,
    FindingRecord,
    JournalRecord,
    Residual,
    View,
    Windows,
    machines_awaited,
    machines_pu,
    machines_unknown,
    mask_index,
)
from twin.diagnosis import AlarmBudget, Outages, lasting_sigmas
from twin.estimation import Estimator
from twin.site import HALL_BUDGET, Site, guaranteed_heat_w, noun_key
from twin.telemetry import (
    GOOD,
    OUT_OF_RANGE,
    QUALITY_NAMES,
    UNTRUSTED,
    EntityState,
    OldOfNew,
    State,
    TableState,
    column,
    keyed,
    part,
    records,
    scalar,
)

MAX_ACTIVE = 10_000
# A deviation must last so long to be called one, and noise of a balance is alike no longer; source: estimate
LASTING_S = 60.0
SILENCE_EVERY_S = 10.0
# The signal that each kind of entity is expected to report as long as it lives.
VITAL = {"gpu": "gpu.temp_c", "rack": "rack.power_w", "cdu": "cdu.supply_temp_c", "node": "node.power_w",
         "feeder": "feeder.power_w"}  # fmt: skip
# By which of its signals, with a limit, an entity is guarded: one is enough.
GUARDING = {
    "gpu": ("gpu.temp_c", "gpu.thermal_margin_k"),
    "rack": ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm", "rack.inlet_temp_c"),
}
# Controls that are advice: who does not follow it, or never answers, is no device at fault.
ADVISED = ("job.checkpoint_interval_s", "job.checkpoint_local_interval_s", "job.checkpoint_since_s")
_MAY_DECLINE = "A job may decline advice. If it should follow it, check its client and the bounds set there."
PLACED = "node.placement"  # a wish to the scheduler: nothing that runs depends on it
_FORGETS = (
    "What a scheduler forgets, as Slurm its weights when it reads its configuration, comes back with the "
    "next renewal; else look at the rights that the commands need, or for others who mark or reserve a node."
)


class Findings(EntityState):
    """Active findings, and since when each deviation has lasted."""

    active: dict[str, Finding] = records(Finding, "id")
    journaled: dict[str, Finding] = records(Finding, "id", was="told")  # as last written
    heat_since_ns: I64 = column("rack", "i8")
    balance_since_ns: I64 = column("balance", "i8")
    # Signals of which a reading is beyond a bound: 1 the guard, 2 the limit, 0 neither
    beyond: dict[str, np.ndarray] = keyed("i1")
    unguarded_since_ns: dict[str, I64] = keyed("i8", keys=tuple(GUARDING))
    never_reported: NeverReported = part(was="unheard")
    silence_ns: int = scalar(0)
    counts: dict[str, int] = scalar({"dropped": 0})

    def __init__(self, site: Site, estimator: Estimator) -> None:
        super().__init__({**site.sizes, "balance": len(estimator.balances)})
        self.never_reported = NeverReported(site)
        tests = site.sizes["rack"] + len(estimator.balances)
        self._sure_sigmas = lasting_sigmas(AlarmBudget(site).chance("balances", tests * LASTING_S, LASTING_S))

    def raise_(self, finding: Finding) -> list[JournalRecord]:
        """Add or refresh a finding; returns journal records: none while nothing of weight has changed.

        Of more than MAX_ACTIVE the critical ones are kept.
        """
        known, journaled = self.active.get(finding.id), self.journaled.get(finding.id)
        if known is None and self.full:
            self.counts["dropped"] += 1
            mild = (k for k, f in self.active.items() if f.severity != "critical")
            if finding.severity != "critical" or (least := next(mild, None)) is None:
                return []
            return self.clear(least) + self.raise_(finding)
        self.active[finding.id] = finding
        if known is not None and journaled is not None:
            grew = finding.count >= 2 * journaled.count
            worse = GRAVITY.get(finding.severity, 0) > GRAVITY.get(journaled.severity, 0)
            if not (grew or worse or (_differs(finding, journaled) and _differs(known, journaled))):
                return []
        self.journaled[finding.id] = finding
        return [FindingRecord(**{f.name: getattr(finding, f.name) for f in fields(finding)})]

    @property
    def full(self) -> bool:
        """Return True if there is no room for another finding."""
        return len(self.active) >= MAX_ACTIVE

    def clear(self, identity: str) -> list[JournalRecord]:
        """End a finding, if it was active."""
        self.journaled.pop(identity, None)
        over = self.active.pop(identity, None)
        return [] if over is None else [ClearedRecord(id=identity, title=over.title)]

    def keep_only(self, prefix: str, current: list[Finding]) -> list[JournalRecord]:
        """Of the findings with this prefix these are true now; the others are over."""
        records: list[JournalRecord] = []
        ids = {f.id for f in current}
        for identity in [k for k in self.active if k.startswith(prefix) and k not in ids]:
            records += self.clear(identity)
        for finding in current:
            records += self.raise_(finding)
        return records

    def deviations(
        self, site: Site, estimator: Estimator, windows: Windows, explained: dict[str, Bool] | None = None
    ) -> list[JournalRecord]:
        """Balances off, surely, for a while; none that people work at, or that a diagnosis explains."""
        heat, balance = estimator.residuals["rack.heat"], estimator.residuals["feeder.balance"]
        # Time is counted between readings: one odd reading that stands for long is still one reading.
        heat_ns, balance_ns = estimator.heat_received_ns, estimator.balance_received_ns
        heat_off, balance_off = self._surely(heat), self._surely(balance)
        explained = explained or {}
        heat_off &= ~explained.get("rack.heat", np.False_)
        balance_off &= ~explained.get("feeder.balance", np.False_)
        racks, feeders = windows.mask("rack"), windows.mask("feeder")
        if racks is not None:
            heat_off &= ~racks
        if racks is not None or feeders is not None:
            balance_off &= ~estimator.balances_with(feeders, racks)
        self.heat_since_ns = _since(self.heat_since_ns, heat_off, heat_ns)
        self.balance_since_ns = _since(self.balance_since_ns, balance_off, balance_ns)
        heats = [
            Finding(
                f"heat/{site.name('rack', rack)}",
                "warning",
                f"The heat balance of {site.name('rack', rack)} is off",
                (site.name("rack", rack),),
                (
                    f"return {heat.measured[rack]:.2f} °C, expected {heat.expected[rack]:.2f} °C",
                    f"learned noise {heat.sigma[rack]:.3f} K",
                ),
                float(heat.confidence_pu[rack]),
                "Compare flow, temperatures and power of this rack.",
            )
            for rack in _lasting(self.heat_since_ns, heat_ns).tolist()
        ]
        balances = [
            Finding(
                f"balance/{estimator.balances[i].name}",
                "warning",
                f"The meter of {site.name('feeder', int(estimator.balances[i].meters[0]))} "
                "and the loads below it disagree",
                tuple(site.name("feeder", int(f)) for f in estimator.balances[i].meters[:SHOWN_ENTITIES]),
                (
                    f"meters {quantity(balance.measured[i], 'W', 4)}, "
                    f"loads {quantity(balance.expected[i], 'W', 4)}",
                ),
                float(balance.confidence_pu[i]),
                "Check the meters, then look for a load that is missing in the site file.",
            )
            for i in _lasting(self.balance_since_ns, balance_ns).tolist()
        ]
        return self.keep_only("heat/", heats) + self.keep_only("balance/", balances)

    def _surely(self, residual: Residual) -> Bool:
        with np.errstate(invalid="ignore"):
            off: Bool = np.abs(residual.measured - residual.expected) > self._sure_sigmas * residual.sigma
        return off

    def outages(self, site: Site, view: View, outages: Outages) -> list[JournalRecord]:
        """Readings that stopped together, with what may be beyond a limit meanwhile."""
        found = [
            replace(f, evidence=(*f.evidence, *worst_cases(site, view, outages.members[f.id])))
            for f in outages.findings(site)
        ]
        return self.keep_only("silence/", found)

    def coverage(self, site: Site, state: State, windows: Windows | None = None) -> list[JournalRecord]:
        """Unusable readings, entities that no limit guards, entities that never reported; every 10 s."""
        windows = Windows(site) if windows is None else windows
        if state.now_ns - self.silence_ns < SILENCE_EVERY_S * NS:
            return []
        self.silence_ns = state.now_ns
        keys = dict.fromkeys((*site.limits, *VITAL.values()))
        unusable = [f for key in keys if (f := _unusable(site, state, key, windows)) is not None]
        unguarded = [
            f for table in GUARDING if (f := self._unguarded(site, state, table, windows)) is not None
        ]
        unreported = self.never_reported.findings(site, state, windows)
        return [
            *self.keep_only("unusable/", unusable),
            *self.keep_only("unguarded/", unguarded),
            *self.keep_only("unheard/", unreported),
        ]

    def _unguarded(self, site: Site, state: State, table: str, windows: Windows) -> Finding | None:
        """Entities that live, or replaced one that did, and give no reading that has a limit."""
        column, n = state.tables[table], site.sizes[table]
        guarded, limited = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        rows = dict.fromkeys(signal_of(key).row for key in GUARDING[table])
        for key, row in zip(GUARDING[table], rows, strict=True):
            if (limit := site.limits.get(key)) is not None:
                stated = np.isfinite(limit.guard) | np.isfinite(limit.max)
                limited |= stated
                guarded |= stated & np.isfinite(column.value[row])
        bare = np.flatnonzero(~guarded)
        bare = bare[_lives(column, bare, table) | (column.generation[bare] > 0)]
        if (in_maintenance := windows.mask(table)) is not None:
            bare = bare[~in_maintenance[bare]]
        since_ns = np.zeros(n, np.int64)
        before_ns = self.unguarded_since_ns[table][bare]
        since_ns[bare] = np.where(before_ns == 0, state.now_ns, before_ns)
        self.unguarded_since_ns[table] = since_ns
        if not len(bare):
            return None
        stale_ns = np.max([column.limits(row).stale_ns[bare] for row in rows], axis=0)
        lasting = bare[state.now_ns - since_ns[bare] > stale_ns]
        if len(lasting) == 0:
            return None
        unlimited = int(np.count_nonzero(~limited[lasting]))
        words = " or ".join(signal_words(k.partition(".")[2]) for k in GUARDING[table])
        why = (
            f"{len(lasting) - unlimited} have never reported {words}",
            f"{unlimited} have no limit in a profile",
        )
        return Finding(
            f"unguarded/{table}",
            "warning",
            f"{_who(site, table, lasting)} {_are(lasting)} not guarded: no reading with a limit",
            tuple(site.name(table, int(i)) for i in lasting[:SHOWN_ENTITIES]),
            tuple(text for text in why if not text.startswith("0 ")),
            1.0,
            "Connect a source for these readings, or give the rack a profile with limits.",
            len(lasting),
        )

    def limits(self, site: Site, view: View, windows: Windows) -> list[JournalRecord]:
        """Entities whose last good reading is beyond a guard (warning) or a limit (critical).

        What is beyond only as the worst case of an old reading follows from what is silent or unusable, which
        is reported, and is critical where a second signal speaks for it. Policies judge by the worst case all
        the same.
        """
        beyond: list[Finding] = []
        for key in site.limits:
            before, level = self.beyond.get(key), self._levels(site, view, windows, key)
            if level is not None:
                beyond.append(_beyond(site, view, key, level, before))
        beyond += feared_findings(site, view, lambda table: _excused(site, view, windows, table))
        beyond += _overloads(site, view, windows)
        beyond += _unkept_targets(site, view) + _short_loops(site, view)
        unknown = self.keep_only("unknown/", _unknown_machines(site, view))
        records, now = self.keep_only("beyond/", beyond), {f.id.rpartition("/")[0]: f.id for f in beyond}
        return unknown + [  # what got worse, or only less bad, is not over
            msgspec.structs.replace(record, superseded_by=by)
            if isinstance(record, ClearedRecord) and (by := now.get(record.id.rpartition("/")[0]))
            else record
            for record in records
        ]

    def _levels(self, site: Site, view: View, windows: Windows, key: str) -> np.ndarray | None:
        """Return the bound that each entity is beyond [n], as in `beyond`; None where no entity is.

        One that is beyond a bound stays so until it is back by a step, lest whole degrees ring at each turn.
        """
        index, before, limit = view.beyond(key), self.beyond.pop(key, None), site.limits[key]
        if before is not None:
            either = before != 0
            either[index] = True
            index = mask_index(either)
        if len(index):
            index = index[~_excused(site, view, windows, key.partition(".")[0], index)]
        if not len(index):
            return None
        read = view.believed(key)[index]
        was = np.zeros(len(index), np.int8) if before is None else before[index]
        level = np.zeros(len(limit.guard), np.int8)
        for step, bound in ((1, limit.guard[index]), (2, limit.max[index])):
            level[index[exceeds(key, read, np.where(was >= step, eased(key, bound), bound))]] = step
        if not level.any():
            return None
        self.beyond[key] = level
        return level

    def mismatches(
        self, names: tuple[str, ...], control: str, index: I32, evidence: str = ""
    ) -> list[JournalRecord]:
        """Devices whose read-back differs from the setpoint; names and evidence are of the first ones."""
        if len(index) == 0:
            return self.clear(f"readback/{control}")
        return self.raise_(
            Finding(
                f"readback/{control}",
                _severity(control, "critical"),
                f"{counted(control, len(index))} {'does' if len(index) == 1 else 'do'} not follow "
                f"the commanded {control_words(control)}",
                names[:SHOWN_ENTITIES],
                (evidence,) if evidence else (),
                1.0,
                _hint(control, "Check whether something else sets this control, or the device refuses it."),
                len(index),
            )
        )

    def unanswered(self, names: tuple[str, ...], control: str, index: I32) -> list[JournalRecord]:
        """Devices that never answered, or refused, until the command was given up."""
        if len(index) == 0:
            return self.clear(f"unanswered/{control}")
        return self.raise_(
            Finding(
                f"unanswered/{control}",
                _severity(control, "critical"),
                f"{counted(control, len(index))} did not take the commanded {control_words(control)}",
                names[:SHOWN_ENTITIES],
                ("sent repeatedly, but refused or not answered",),
                1.0,
                _hint(control, "Check the agents of these devices; racktwin keeps renewing their leases."),
                len(index),
            )
        )

    def unread(self, names: tuple[str, ...], control: str, index: I32, wait_s: float) -> list[JournalRecord]:
        """Devices that answered a command but do not, or no longer, report a read-back."""
        if len(index) == 0:
            return self.clear(f"unread/{control}")
        return self.raise_(
            Finding(
                f"unread/{control}",
                _severity(control, "warning"),
                f"The {control_words(control)} of {counted(control, len(index))} is not confirmed: "
                "no read-back arrives",
                names[:SHOWN_ENTITIES],
                (f"no read-back for {wait_s:.0f} s; an unreachable device lets its lease lapse",),
                1.0,
                _hint(control, "Check the agents of these devices: their state is unknown."),
                len(index),
            )
        )

    def remapped(self, site: Site, estimator: Estimator, old_of_new: OldOfNew) -> Findings:
        """Findings of a changed site: what lasts goes on, but for balances, whose members changed."""
        out = Findings(site, estimator)
        out.adopt(self, old_of_new)
        return out


def _unusable(site: Site, state: State, key: str, windows: Windows) -> Finding | None:
    """Entities whose source sends a signal and calls it bad, or sends what no device can have."""
    signal = find_signal(key)
    if signal is None or signal.kind == "counter" or site.sizes[signal.table] == 0:
        return None
    table, column = signal.table, state.tables[signal.table]
    if not column.bad_count[signal.row]:
        return None
    quality = column.quality[signal.row]
    wrong = (quality == UNTRUSTED) | (quality == OUT_OF_RANGE)
    in_maintenance = windows.excused(table, state.now_ns, column.limits(signal.row).stale_ns)
    if in_maintenance is not None:
        wrong &= ~in_maintenance
    index = np.flatnonzero(wrong)
    if len(index) == 0:
        return None
    kinds = np.bincount(quality[index], minlength=len(QUALITY_NAMES))
    evidence = [f"{n} {name.replace('_', ' ')}" for n, name in zip(kinds, QUALITY_NAMES, strict=True) if n]
    oldest_s = _oldest(column.age_s(signal, state.now_ns)[index])
    if np.isfinite(oldest_s):
        evidence.append(f"oldest good reading {oldest_s:.0f} s ago")
    return Finding(
        f"unusable/{key}",
        "warning",
        f"{_who(site, table, index)} {'reports' if len(index) == 1 else 'report'} no usable "
        f"{signal_words(signal.name)}",
        tuple(site.name(table, int(i)) for i in index[:SHOWN_ENTITIES]),
        tuple(evidence),
        1.0,
        "Check the sensor and the units of its source; meanwhile limits use the worst case.",
        len(index),
    )


def _who(site: Site, table: str, index: np.ndarray) -> str:
    """The name of one entity, the number of several."""
    return site.name(table, int(index[0])) if len(index) == 1 else counted(noun_key(site, table), len(index))


def _are(index: np.ndarray) -> str:
    return "is" if len(index) == 1 else "are"


def _oldest(age_s: np.ndarray) -> float:
    finite = age_s[np.isfinite(age_s)]
    return float(finite.max()) if len(finite) else float("nan")


def _beyond(site: Site, view: View, key: str, levels: np.ndarray, before: np.ndarray | None) -> Finding:
    """Return the finding on readings beyond a guard; where some pass the limit as well, on those alone.

    `levels` [n]: see `Findings.beyond`, as now and as they were. Those that were worse are named first: as
    they ease, one sees that it is the same trouble.
    """
    signal, limit, read = signal_of(key), site.limits[key], view.believed(key)
    level, bound, severity = ("guard", limit.guard, "warning")
    if (levels == 2).any():
        level, bound, severity = ("limit", limit.max, "critical")
    index = np.flatnonzero(levels == levels.max())
    if before is not None:
        index = index[np.argsort(-before[index], kind="stable")]
    table, _, name = key.partition(".")
    first = int(index[0])
    unit = signal.unit if signal.unit != "state" else "count"

    def read_as(value: float) -> str:
        return quantity(float(value), unit, 4)

    who = f"{site.name(table, first)}: " if len(index) > 1 else ""  # one alone is named anyway
    worst = view.worst(key)[first]
    by_now = f", by now perhaps {read_as(worst)}" if worst != read[first] else ""
    passed = bool(exceeds(key, read[first : first + 1], bound[first : first + 1])[0])
    until = "" if passed else f", over at {read_as(eased(key, bound[first : first + 1])[0])}"
    current = (view.quality(key)[index] == GOOD).all()
    return Finding(
        f"beyond/{key}/{level}",
        severity,
        f"The {signal_words(name)} of {_who(site, table, index)} "
        f"{'is' if current else 'was, when last read,'} beyond its {level}",
        tuple(site.name(table, int(i)) for i in index[:SHOWN_ENTITIES]),
        (f"{who}read {read_as(read[first])}{by_now}, {level} {read_as(bound[first])}{until}",),
        1.0,
        "Check the cooling that these share.",
        len(index),
    )


def _overloads(site: Site, view: View, windows: Windows) -> list[Finding]:
    """At most one finding: feeders whose last good reading that is believed is above the budget."""
    if not site.sizes["feeder"]:
        return []
    read_w, budget_w = view.believed("feeder.power_w"), view.budget_w()
    over = read_w > budget_w
    if over.any() and (in_maintenance := windows.mask("feeder")) is not None:
        over = over & ~in_maintenance
    index = np.flatnonzero(over)
    if not len(index):
        return []
    first = int(index[np.argmax(read_w[index] - budget_w[index])])
    surely = (view.quality("feeder.power_w")[index] == GOOD).all()
    evidence = f"{site.name('feeder', first)}: read {quantity(read_w[first], 'W', 4)}, "
    evidence += f"budget {quantity(budget_w[first], 'W', 4)}"
    return [
        Finding(
            "beyond/feeder.power_w/budget",
            "critical",
            f"The power of {_who(site, 'feeder', index)} {'is' if surely else 'may be'} beyond the budget",
            tuple(site.name("feeder", int(i)) for i in index[:SHOWN_ENTITIES]),
            (evidence,),
            1.0,
            "Check that power_guard acts, or shed load before a breaker trips.",
            len(index),
        )
    ]


def _unkept_targets(site: Site, view: View) -> list[Finding]:
    """At most one finding: running targets below the guaranteed shares of the halls that they limit.

    Budgets of halls are cut to their shares then and no further, so these targets are not kept.
    """
    share_w = np.nan_to_num(site.envelopes[HALL_BUDGET].safe)
    if not share_w.any():
        return []
    names, evidence = list[str](), list[str]()
    for target in view.load_targets():
        places = [-1] if target.feeders is None else target.feeders.tolist()
        for feeder in places if target.runs(view.now_ns) else ():
            sum_w = float(share_w.sum()) if feeder < 0 else float(share_w @ _fed_pu(site, feeder))
            if sum_w > target.limit_w:
                names.append(site.file.site if feeder < 0 else site.name("feeder", feeder))
                evidence.append(
                    f"{names[-1]}: {clean(target.name, 120)} allows {quantity(target.limit_w, 'W', 4)}, and "
                    f"its halls are guaranteed {quantity(sum_w, 'W', 4)}"
                )
    if not names:
        return []
    return [
        Finding(
            "beyond/load_target/guaranteed",
            "warning",
            "Halls are guaranteed more power than a load target allows",
            tuple(names[:SHOWN_ENTITIES]),
            tuple(evidence[:SHOWN_ENTITIES]),
            1.0,
            "The halls keep these shares: lower guaranteed_w here and in the halls' files, or tell the "
            "author of the target.",
            len(names),
        )
    ]


def _short_loops(site: Site, view: View) -> list[Finding]:
    """At most one finding: loops whose machines in service take less heat than their halls are guaranteed."""
    if not len(site.halls_of_loop.member):
        return []
    heat_w = guaranteed_heat_w(site)
    kept_pu = machines_pu(view)
    index = np.flatnonzero((heat_w > kept_pu * site.design.loop_heat_w) & ~machines_unknown(view))
    if not len(index):
        return []
    names = tuple(site.name("loop", i) for i in index[:SHOWN_ENTITIES].tolist())
    evidence = tuple(
        f"{name}: takes {quantity(kept_pu[i] * site.design.loop_heat_w[i], 'W', 4)}, "
        f"{100 * kept_pu[i]:.0f} % of its machines; its halls are guaranteed {quantity(heat_w[i], 'W', 4)}"
        for name, i in zip(names, index.tolist(), strict=False)
    )
    return [
        Finding(
            "beyond/loop.machine_out_count/guaranteed",
            "warning",
            "Halls are guaranteed more power than the machines of their loop cool",
            names,
            evidence,
            1.0,
            "Water warms in minutes, and thermal_guard in the halls cuts below their shares: bring a machine "
            "back, or check loop.machine_out_count, which stays in force until a new value arrives.",
            len(index),
        )
    ]


def _unknown_machines(site: Site, view: View) -> list[Finding]:
    """At most one finding: loops of halls of which nobody reports how many machines are lost."""
    index = np.flatnonzero(machines_unknown(view) & ~machines_awaited(view))
    if not len(index):
        return []
    names, kept_pu = tuple(site.name("loop", i) for i in index[:SHOWN_ENTITIES].tolist()), machines_pu(view)
    age_s = view.age_s("loop.machine_out_count")
    evidence = tuple(
        f"{name}: loop.machine_out_count was "
        + (f"last reported {duration(age_s[i])} ago" if np.isfinite(age_s[i]) else "never reported")
        + f"; its {site.machines_of_loop[i]:g} machines count as {100 * kept_pu[i]:.0f} % in service, which "
        f"take {quantity(kept_pu[i] * site.design.loop_heat_w[i], 'W', 4)}"
        for name, i in zip(names, index.tolist(), strict=False)
    )
    return [
        Finding(
            "unknown/loop.machine_out_count",
            "warning",
            "The number of lost machines of a loop that halls share is unknown: one of several counts as "
            "lost",
            names,
            evidence,
            1.0,
            "Let the BMS publish loop.machine_out_count of these loops at least every hour, even while it is "
            "0; `racktwin sources` shows what arrives.",
            len(index),
        )
    ]


def _fed_pu(site: Site, feeder: int) -> F64:
    """The share of each rack that a feeder carries while all are energised [n_rack]."""
    direct, n = site.feeders_of_rack, site.sizes["rack"]
    mine = np.isin(direct.member, site.subtree(feeder))
    taps = np.bincount(direct.row_of_member, minlength=n)
    return np.bincount(direct.row_of_member[mine], minlength=n) / np.maximum(taps, 1)


def _differs(finding: Finding, journaled: Finding) -> bool:
    """Half as many as journaled, or others."""
    moved = bool(journaled.entities) and set(finding.entities).isdisjoint(journaled.entities)
    return finding.count <= journaled.count / 2 or moved


def _excused(site: Site, view: View, windows: Windows, table: str, index: Any = slice(None)) -> Bool:
    """Mask of entities in maintenance, and in racks known to be without power, which cannot be hot [k]."""
    dark, in_maintenance = _dark(site, view, table, index), windows.mask(table)
    return dark if in_maintenance is None else dark | in_maintenance[index]


def _dark(site: Site, view: View, table: str, index: Any) -> Bool:
    """Mask of these entities that are in racks known to be without power [k]."""
    isolated = "rack.electrical_isolation_state"
    rack: Bool = (view.value(isolated) == 1.0) & (view.quality(isolated) == GOOD)
    of = {"gpu": site.rack_of_gpu, "node": site.rack_of_node}.get(table)
    if of is None and table != "rack":
        rack, of = np.zeros(site.sizes[table], np.bool_), None
    out: Bool = rack[index if of is None else of[index]]
    return out


def _severity(control: str, otherwise: str) -> str:
    return "info" if control in ADVISED else "warning" if control == PLACED else otherwise


def _hint(control: str, otherwise: str) -> str:
    """Advice on devices that do not follow commands."""
    return _MAY_DECLINE if control in ADVISED else _FORGETS if control == PLACED else otherwise


def _lives(column: TableState, index: np.ndarray, table: str) -> np.ndarray:
    """Mask of entities that report anything; of a rack, which other loops may cool, a temperature."""
    out = np.zeros(len(index), np.bool_)
    for signal in column.signals:
        if table == "gpu" or signal.name.endswith("_temp_c"):
            quality = column.quality[signal.row, index]
            out |= np.isfinite(column.value[signal.row, index])
            out |= (quality == UNTRUSTED) | (quality == OUT_OF_RANGE)
    return out


def _since(since_ns: np.ndarray, off: np.ndarray, received_ns: np.ndarray) -> np.ndarray:
    return np.where(off, np.where(since_ns == 0, received_ns, since_ns), 0)


def _lasting(since_ns: np.ndarray, received_ns: np.ndarray) -> np.ndarray:
    return np.flatnonzero((since_ns > 0) & (received_ns - since_ns >= LASTING_S * NS))
