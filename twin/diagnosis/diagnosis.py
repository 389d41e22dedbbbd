"""Diagnosis: reports each fault once, at the lowest entity that accounts for all deviations.

Each tick, lasting deviations of the estimator's comparisons, misbehaving sensors and device reports become
symptoms. Hypotheses are covered greedily, the one that accounts for most first, and the rest is examined
again, so that two faults at once are two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from twin.catalogue import F64, Bool
from twin.contracts import Fault, Finding, Residual, Windows
from twin.diagnosis.alarm_budget import AlarmBudget
from twin.diagnosis.cause import Cause, CauseBook, finding_of, overlap
from twin.diagnosis.contradictions import Contradictions
from twin.diagnosis.deviations import NewReadings, Tracks
from twin.diagnosis.device_reports import DeviceReports, good, reported
from twin.diagnosis.devices import DeviceFaults
from twin.diagnosis.evidence_masks import DownstreamMask, IdleMask
from twin.diagnosis.fault_kinds import FAULT_KINDS
from twin.diagnosis.growth import Growth
from twin.diagnosis.inventory import Inventory
from twin.diagnosis.isolation import FaultIsolation
from twin.diagnosis.reconciliation import Reconciliation, RowMasks
from twin.diagnosis.sensor_checks import SensorChecks
from twin.diagnosis.signature import (
    DRIFTS,
    GPU_CLOCK,
    GPU_POWER,
    GPU_TEMP,
    LOOP_USUAL,
    NODE_POWER,
    PSU1,
    PSU2,
    SPLIT,
    Hypothesis,
    TickValues,
)
from twin.diagnosis.silence import Silence
from twin.diagnosis.topology import LADDER, Topology
from twin.diagnosis.verdict import DiagnosisVerdicts
from twin.diagnosis.xids import OFF_BUS_XID, XID_KEPT, XIDS
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import EntityState, FaultReported, JobSlots, OldOfNew, State, keyed, part, scalar

FORMAT = 6
OF_WORK = (GPU_POWER, GPU_CLOCK, NODE_POWER)  # comparisons that rest on what is known of the work
# With odd power at once: of a rack; of a site, by number and by share; source: estimate
MANY, MANY_GPUS, MANY_PU = {"gpu": 3, "node": 2}, 4, 0.01
RESISTANCE = "gpu.resistance"
DRIFTS_EVERY = 10  # ticks: what is learned moves slowly
OF_SILENCE = ("sensor_silent", "node_silent", "gpu_off_bus")  # an outage takes their place
KEPT_IN_HEAT = (GPU_TEMP,)  # a comparison that holds while clocks are lowered by heat
WARM_K = 1.0  # outdoors over what was usual


class Diagnosis(EntityState):
    """Faults of a site and the symptoms behind them."""

    format: int = scalar(FORMAT)
    readings: NewReadings = part()
    tracks: Tracks = part()
    watch: SensorChecks = part()
    growth: Growth = part()
    contradictions: Contradictions = part()
    devices: DeviceFaults = part()
    silence: Silence = part()
    reports: DeviceReports = part()
    inventory: Inventory = part()
    downstream: DownstreamMask = part()
    book: CauseBook = part()
    reconciliation: Reconciliation = part()
    # Learned device parameters beside their first values: expected, measured and sigma [3, n]
    drifts: dict[str, F64] = keyed("f8", np.nan, lead=(3,))

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site, self.topology = site, Topology(site)
        budget = AlarmBudget(site)
        self.readings, self.tracks = NewReadings(site.sizes), Tracks(site.sizes, budget)
        self.reports, self.devices = DeviceReports(self.topology), DeviceFaults(self.topology)
        self.inventory, self.contradictions = Inventory(self.topology), Contradictions(self.topology)
        self.watch, self.growth = SensorChecks(site.sizes, budget), Growth(site, budget)
        self.isolation, self.verdicts = FaultIsolation(self.topology), DiagnosisVerdicts(self.watch)
        self.downstream, self.silence = DownstreamMask(self.topology), Silence(self.topology, self.reports)
        self.book, self.reconciliation = CauseBook(self.topology), Reconciliation(site)
        self.faults: tuple[Fault, ...] = ()
        self._balanced, self._now_ns = False, 0
        self._slowed: Bool | None = None
        self._idle: IdleMask | None = None

    def update(
        self,
        state: State,
        estimator: Estimator,
        jobs: JobSlots,
        windows: Windows,
        faults: Sequence[FaultReported],
        dt_s: float,
    ) -> None:
        """Update the diagnosis after the estimator. Never raises for bad or missing data."""
        if not self._balanced:
            members = [(b.meters, b.feeders, b.racks) for b in estimator.balances]
            self.isolation.set_balances(self.site, members)
            self._balanced = True
        in_maintenance = self._in_maintenance(windows)
        self.readings.begin()
        self.watch.update(state, self.readings, in_maintenance)
        residuals = dict(estimator.residuals)
        residuals[LOOP_USUAL] = self.devices.loops(
            state, self.tracks, estimator.loop_steps_k, estimator.loop_aim_c
        )
        if state.tick % DRIFTS_EVERY == 0:
            self.drifts = _drifts(estimator)
        residuals |= {name: Residual(name, *columns) for name, columns in self.drifts.items()}
        self.tracks.update(residuals, state, self.readings, in_maintenance)
        gaps = self.devices.gaps(state, self.tracks)
        outright = self._outright(state, faults, windows, dt_s, residuals.get(NODE_POWER))
        causes = [*outright, *self._deduced(state, residuals, outright, gaps)]
        self.book.update(causes, state.now_ns, self._lacks_data)
        self.faults = self.book.faults()
        now, reported = TickValues(state, self.topology), self.book.reported.values()
        self._now_ns = state.now_ns
        masks = RowMasks(self._covered, self.downstream.stirred)
        self.reconciliation.update(self.isolation, residuals, now, masks, reported)

    def _in_maintenance(self, windows: Windows) -> dict[str, Bool]:
        return {t: m for t in self.site.sizes if (m := windows.mask(t)) is not None}

    def _outright(
        self,
        state: State,
        faults: Sequence[FaultReported],
        windows: Windows,
        dt_s: float,
        node_power: Residual | None,
    ) -> list[Cause]:
        """Return causes that need no comparison: reports, silences, stopped pumps, counters, sensors."""
        in_maintenance = self._in_maintenance(windows)
        causes = self.reports.causes(state, in_maintenance, windows.worked, dt_s)
        causes += self.inventory.causes(state, in_maintenance, dt_s, causes)
        causes += self.devices.pumps(state, in_maintenance, dt_s, self.reports.unfed_from_ns(state.now_ns))
        causes += self.devices.filters(state, in_maintenance)
        causes += self.growth.causes(state, faults, in_maintenance)
        causes += self.contradictions.causes(state, in_maintenance, self.watch, self.book.reported.keys())
        idle = self._idle = IdleMask(state, self.topology)
        self._slowed = self.devices.slowed(state)
        dry, heated = idle.dry_gpus(), self._slowed
        if dry is not None:
            heated = dry if heated is None else heated | dry
        causes += self.silence.causes(
            state, self.watch, self.growth, windows, heated, self._behind_cooling(state, causes)
        )
        idle.switch_off(self.silence.burnt)
        causes += self.devices.weather(state, in_maintenance)
        disturbed = self.downstream.disturbed
        causes += self.devices.sensors(
            self.watch, self.tracks, self._dark(), idle.masks(), node_power, disturbed
        )
        return causes

    def _behind_cooling(self, state: State, causes: list[Cause]) -> Bool:
        """Return the GPUs [n] behind a present or recent fault of the cooling, or in an isolated rack."""
        out = np.zeros(self.site.sizes["gpu"], np.bool_)
        if reported(state, "rack.liquid_isolation_state"):
            out |= (good(state, "rack.liquid_isolation_state") == 1.0)[self.site.rack_of_gpu]
        for kind, table, entity, _ in (*(c.key for c in causes), *self.downstream.causes):
            if FAULT_KINDS[kind].cooling and table in LADDER[1:-1]:
                out[self.topology.below(table, entity, "gpu")] = True
        return out

    def _dark(self) -> dict[str, Bool]:
        """Return the devices that are reported as a whole or do not report [n per table]."""
        out = dict(self.silence.hidden)
        if self.reports.lost.any():
            out["feeder"] = self.reports.lost
        return out

    def _deduced(
        self, state: State, residuals: dict[str, Residual], outright: list[Cause], gaps: np.ndarray
    ) -> list[Cause]:
        """Return causes that only comparisons show, of deviations that no report explains."""
        dry = None if self._idle is None else self._idle.dry_rack
        self.downstream.update(outright, self.book.reported.values(), state.now_ns, dry)
        if not self.tracks.active():
            return []
        now = TickValues(state, self.topology)
        isolated = self.isolation.find(self.tracks, residuals, now, self._covered(), self._reported)
        causes = [self._as_reported(self.verdicts.cause(f, now, residuals, gaps)) for f in isolated]
        warm = self.devices.warmer_k > WARM_K  # what the weather does is no cooler's fault
        blind = bool(self.silence.outages.masks)
        return [
            c
            for c in causes
            if c is not None
            and not (warm and c.kind == "cooler_failed")
            and not (blind and c.key not in self.book.reported and self._lacks_data(c))
        ]

    def _lacks_data(self, cause: Cause) -> bool:
        """Return True if a silence keeps from sight what would confirm or end this cause."""
        if cause.kind == "gpu_off_bus" and cause.severity != "info":  # no longer what a reset may be
            unseen = self.silence.hidden.get("gpu")
            return unseen is not None and bool(unseen[cause.entity])
        blind = None if cause.kind in OF_SILENCE else self.silence.outages.blind(cause.table)
        return blind is not None and bool(blind[cause.entity])

    def _as_reported(self, cause: Cause | None) -> Cause | None:
        """Return the cause; of two meters in one balance the one that was reported first stays the wrong
        one."""
        if cause is None or cause.table != "feeder" or cause.key in self.book.reported:
            return cause
        for known in self.book.reported.values():
            alike = (known.kind, known.table) == (cause.kind, "feeder")
            if alike and (overlap(known.covers, cause.covers) or cause.covers.keys() <= {SPLIT}):
                return known
        return cause

    def _covered(self) -> Callable[[str, int], Bool | None]:
        """Return the rows without further evidence: downstream of a fault, or of GPUs that heat slows."""
        slowed, idle = self._slowed, self._idle
        nodes = None
        if slowed is not None:
            at = self.site.node_of_gpu[slowed]
            nodes = np.bincount(at, minlength=self.site.sizes["node"]) > 0

        many = {name: rows for name in OF_WORK if (rows := self._with_others(name)) is not None}

        def covered(relation: str, n: int) -> Bool | None:
            out = self.downstream.covered(relation, n)
            if idle is not None and (rows := idle.covered(relation, n)) is not None:
                out = rows if out is None else out | rows
            if relation in many:
                out = many[relation] if out is None else out | many[relation]
            by_heat = {"gpu": slowed, "node": nodes}.get(relation.partition(".")[0])
            if by_heat is None or relation in KEPT_IN_HEAT or len(by_heat) != n:
                return out
            return by_heat if out is None else out | by_heat

        return covered

    def _with_others(self, name: str) -> Bool | None:
        """Rows of a comparison that rests on the work, where several of a rack are off at once, or many of
        all: so many meters do not fail together, but what is expected is wrong. A node whose supplies
        disagree with its meter is not among them."""
        on = self.tracks.on(name)
        if on is None:
            return None
        off: Bool = on != 0
        table = name.partition(".")[0]
        if name == NODE_POWER:
            for supply in (PSU1, PSU2):
                disagrees = self.tracks.on(supply)
                off &= True if disagrees is None else disagrees == 0
        rack_of = self.topology.above(table, "rack")
        if np.count_nonzero(off) > max(MANY_GPUS, MANY_PU * len(off)):
            return off
        many = np.bincount(rack_of[off], minlength=self.site.sizes["rack"]) >= MANY[table]
        return off & many[rack_of] if many.any() else None

    def _reported(self, h: Hypothesis) -> Bool | None:
        """Return the entities [n] with this hypothesis reported; None for none."""
        signal = h.signal if h.kind == "sensor_biased" else ""
        mine = [k[2] for k in self.book.reported if k[0] == h.kind and k[1] == h.table and k[3] == signal]
        if not mine:
            return None
        out = np.zeros(self.site.sizes[h.table], np.bool_)
        out[mine] = True
        return out

    def explained(self, residual: str) -> Bool | None:
        """Return the rows [n] of a comparison that a reported fault explains or that lack data; None for
        none."""
        track = self.tracks.tracks.get(residual)
        out = None if track is None else cast("Bool | None", self.book.covered(residual, len(track.on)))
        table, _, name = residual.partition(".")
        blind = self.silence.outages.blind(table) if name == "heat" else None
        return out if blind is None else blind if out is None else out | blind

    def findings(self, site: Site) -> list[Finding]:
        """Return the faults as findings for operators, many of one kind as one."""
        return [finding_of(f, site) for f in self.book.alarms(self.faults)]

    def doubted(self) -> list[Finding]:
        """Return the untrusted readings without a named sensor fault."""
        return self.reconciliation.findings(self._now_ns, self.book.reported.values())

    def derive(self) -> None:
        """The book was written."""
        self.faults = self.book.faults()

    def remapped(self, site: Site, old_of_new: OldOfNew) -> Diagnosis:
        """Return reported faults and learned behaviour for a changed site; the search for others starts
        again."""
        out = Diagnosis(site)
        out.adopt(self, old_of_new)
        return out

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; one of an unknown format is left: faults are found again."""
        if data.get("format") == FORMAT - 1:
            data = _from_5(data)
        if data.get("format") == FORMAT:
            super().restore(data)


def _from_5(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dump of format 5, with nested records, keyed columns as rows and reporting rates as
    numbers, in the present format."""
    book = data["book"]
    return {
        **data,
        "format": FORMAT,
        "readings": {"seen_ns": {f"{table}.{group}": t_ns for table, group, t_ns in data["readings"]}},
        "tracks": {"tracks": data["tracks"]},
        "watch": {"meters": data["watch"]},
        "downstream": {"causes": [[*key, *times] for key, times in data["wake"]]},
        "book": {"waiting": [[*key, *times] for key, times in book["waiting"]], "reported": book["told"]},
        "growth": {**data["growth"], "xids": _xids_from_5(data["growth"]["xids"])},
        "drifts": {name: np.stack(columns) for name, *columns in data["drifts"]},
    }


def _xids_from_5(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rings of XIDs, of which format 5 kept the filled places, the oldest first."""
    index, many = np.asarray(data["gpu"]), np.asarray(data["kept"], np.int64)
    k = np.arange(len(index))
    row = np.repeat(k, many)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(many) - many, many)
    at_ns, code = np.zeros((XID_KEPT, len(index)), np.int64), np.zeros((XID_KEPT, len(index)), np.int32)
    at_ns[nth, row], code[nth, row] = data["at_ns"], data["code"]
    off_bus, off = np.zeros(len(index), np.int64), code[nth, row] == OFF_BUS_XID
    off_bus[row[off]] = nth[off] + 1
    burst_from_ns = np.where(many >= XIDS, at_ns[np.maximum(many - XIDS, 0), k], 0)
    return {
        "index": index,
        "many": many,
        "newest_ns": at_ns[np.maximum(many - 1, 0), k],
        "at_ns": at_ns,
        "code": code,
        "burst_from_ns": burst_from_ns,
        "burst_ns": data["burst_ns"],
        "off_bus": off_bus,
    }


def _drifts(estimator: Estimator) -> dict[str, F64]:
    """Return comparisons of the learned device parameters with their first values [3, n]."""
    out: dict[str, F64] = {}
    known = estimator.parameters
    for name, share in DRIFTS.items():
        p = known.get(name)
        if p is not None and len(p.value):
            sigma = np.hypot(share * np.abs(p.reference), np.nan_to_num(p.sigma))
            expected = p.reference
            if name == RESISTANCE and not estimator.gpus.temp.all_liquid:
                # The common drift of all GPUs of a node in air is that of its air
                expected = expected * (1.0 + estimator.air_drift)
            out[f"{name}/drift"] = np.stack([expected, p.value, sigma])
    return out
