"""Diagnosis: reports each fault once, at the lowest entity that accounts for all that deviates.

Each tick, lasting deviations of the estimator's comparisons, misbehaving sensors and device reports become
symptoms. Hypotheses are covered greedily, the one that accounts for most first, and the rest is examined
again, so that two faults at once are two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from twin.catalogue import I32, Bool
from twin.contracts import Fault, Finding, Residual, Windows
from twin.diagnosis.cause import Book, Cause, finding_of, overlap
from twin.diagnosis.deviations import NewReadings, Tracks
from twin.diagnosis.device_reports import Reports
from twin.diagnosis.devices import LOOP_USUAL, DeviceFaults
from twin.diagnosis.downstream_mask import Wake
from twin.diagnosis.growth import Growth
from twin.diagnosis.idle_mask import Still
from twin.diagnosis.isolation import Pursuit
from twin.diagnosis.sensor_checks import SensorChecks
from twin.diagnosis.signature import (
    DRIFTS,
    GPU_CLOCK,
    GPU_POWER,
    GPU_TEMP,
    NODE_POWER,
    PSU1,
    PSU2,
    SPLIT,
    Hypothesis,
    TickValues,
)
from twin.diagnosis.silence import Silence
from twin.diagnosis.topology import Places
from twin.diagnosis.verdict import DiagnosisVerdicts
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import EntityState, Event, JobSlots, State

FORMAT = 5
OF_WORK = (GPU_POWER, GPU_CLOCK, NODE_POWER)  # comparisons that rest on what is known of the work
# With odd power at once: of a rack; of a site, by number and by share; source: estimate
MANY, MANY_GPUS, MANY_PU = {"gpu": 3, "node": 2}, 4, 0.01
DRIFTS_EVERY = 10  # ticks: what is learned moves slowly
KEPT_IN_HEAT = (GPU_TEMP,)  # a comparison that holds while clocks are lowered by heat
WARM_K = 1.0  # outdoors over what was usual


class Diagnosis:
    """Faults of a site and the symptoms behind them."""

    def __init__(self, site: Site) -> None:
        self.site, self.places = site, Places(site)
        self.readings, self.tracks = NewReadings(), Tracks()
        self.reports, self.devices = Reports(self.places), DeviceFaults(self.places)
        self.watch, self.growth = SensorChecks(site.sizes), Growth(site)
        self.pursuit, self.verdicts = Pursuit(self.places), DiagnosisVerdicts(self.watch)
        self.wake, self.silence = Wake(self.places), Silence(self.places)
        self.book = Book(self.places)
        self.faults: tuple[Fault, ...] = ()
        self.drifts: dict[str, Residual] = {}
        self._balanced = False
        self._slowed: Bool | None = None
        self._still: Still | None = None

    def update(
        self,
        state: State,
        estimator: Estimator,
        jobs: JobSlots,
        windows: Windows,
        events: Sequence[Event],
        dt_s: float,
    ) -> None:
        """Look at this tick, after the estimator. Raises nothing for bad or missing data."""
        if not self._balanced:
            members = [(b.meters, b.feeders, b.racks) for b in estimator.balances]
            self.pursuit.set_balances(self.site, members)
            self._balanced = True
        spared = {t: m for t in self.site.sizes if (m := windows.mask(t)) is not None}
        self.readings.begin()
        self.watch.update(state, self.readings, spared, dt_s)
        residuals = dict(estimator.residuals)
        residuals[LOOP_USUAL] = self.devices.loops(state, self.tracks)
        if state.tick % DRIFTS_EVERY == 0:
            self.drifts = _drifts(estimator)
        residuals |= self.drifts
        self.tracks.update(residuals, state, self.readings, spared)
        gaps = self.devices.gaps(state, self.tracks)
        outright = self._outright(state, events, spared, dt_s, residuals.get(NODE_POWER))
        causes = [*outright, *self._deduced(state, residuals, outright, gaps)]
        self.book.update(causes, state.now_ns)
        self.faults = self.book.faults()

    def _outright(
        self,
        state: State,
        events: Sequence[Event],
        spared: dict[str, Bool],
        dt_s: float,
        node_power: Residual | None,
    ) -> list[Cause]:
        """Return causes that need no comparison: reports, silences, stopped pumps, counters, sensors."""
        causes = self.reports.causes(state, spared, dt_s)
        causes += self.devices.pumps(state, spared, dt_s)
        causes += self.devices.filters(state, spared)
        causes += self.growth.causes(state, events, spared)
        still = self._still = Still(state, self.places)
        self._slowed = self.devices.slowed(state)
        dry, heated = still.dry_gpus(), self._slowed
        if dry is not None:
            heated = dry if heated is None else heated | dry
        causes += self.silence.causes(state, self.watch, self.growth, spared, heated)
        still.switch_off(self.silence.burnt)
        causes += self.devices.weather(state, spared)
        causes += self.devices.sensors(self.watch, self.tracks, self._dark(), still.masks(), node_power)
        return causes

    def _dark(self) -> dict[str, Bool]:
        """Devices that are told as a whole or of which nothing is heard [n per table]."""
        out = dict(self.silence.hidden)
        if self.reports.lost.any():
            out["feeder"] = self.reports.lost
        return out

    def _deduced(
        self, state: State, residuals: dict[str, Residual], outright: list[Cause], gaps: np.ndarray
    ) -> list[Cause]:
        """Return causes that only comparisons show, of deviations that no report explains."""
        self.wake.update(outright, [t.cause for t in self.book.told.values()], state.now_ns)
        if not self.tracks.active():
            return []
        now = TickValues(state, self.places)
        found = self.pursuit.find(self.tracks, residuals, now, self._covered(), self._told)
        causes = [self._as_told(self.verdicts.cause(f, now, residuals, gaps)) for f in found]
        warm = self.devices.warmer_k > WARM_K  # what the weather does is no cooler's fault
        return [c for c in causes if c is not None and not (warm and c.kind == "cooler_failed")]

    def _as_told(self, cause: Cause | None) -> Cause | None:
        """The cause; of two meters in one balance the one that was told first stays the one that is wrong."""
        if cause is None or cause.table != "feeder" or cause.key in self.book.told:
            return cause
        for told in self.book.told.values():
            alike = (told.cause.kind, told.cause.table) == (cause.kind, "feeder")
            if alike and (overlap(told.cause.covers, cause.covers) or cause.covers.keys() <= {SPLIT}):
                return told.cause
        return cause

    def _covered(self) -> Callable[[str, int], Bool | None]:
        """Rows that tell nothing new: in a wake, or of GPUs whose clocks heat lowers."""
        slowed, still = self._slowed, self._still
        nodes = None
        if slowed is not None:
            at = self.site.node_of_gpu[slowed]
            nodes = np.bincount(at, minlength=self.site.sizes["node"]) > 0

        many = {name: rows for name in OF_WORK if (rows := self._with_others(name)) is not None}

        def covered(relation: str, n: int) -> Bool | None:
            out = self.wake.covered(relation, n)
            if still is not None and (rows := still.covered(relation, n)) is not None:
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
        rack_of = self.places.above(table, "rack")
        if np.count_nonzero(off) > max(MANY_GPUS, MANY_PU * len(off)):
            return off
        many = np.bincount(rack_of[off], minlength=self.site.sizes["rack"]) >= MANY[table]
        return off & many[rack_of] if many.any() else None

    def _told(self, h: Hypothesis) -> Bool | None:
        signal = h.signal if h.kind == "sensor_biased" else ""
        mine = [k[2] for k in self.book.told if k[0] == h.kind and k[1] == h.table and k[3] == signal]
        if not mine:
            return None
        out = np.zeros(self.site.sizes[h.table], np.bool_)
        out[mine] = True
        return out

    def explained(self, residual: str) -> Bool | None:
        """Rows [n] of a comparison whose deviation a told fault accounts for; None if there are none."""
        track = self.tracks.tracks.get(residual)
        return None if track is None else cast("Bool | None", self.book.covered(residual, len(track.on)))

    def findings(self, site: Site) -> list[Finding]:
        """The faults as people are told of them."""
        return [finding_of(f, site) for f in self.faults]

    def _kept(self) -> tuple[EntityState, ...]:
        return (self.growth, self.devices, self.reports, self.silence)

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: what was wrong with the old one is not true of it."""
        self.tracks.forget(table, entity)
        self.watch.forget(table, entity)
        self.book.forget(table, entity)
        for part in self._kept():
            part.forget(table, entity)
        self.faults = self.book.faults()

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Diagnosis:
        """Return the reported faults for a changed site; the search for unconfirmed ones starts again."""
        out = Diagnosis(site)
        out.book = self.book.remapped(old_of_new, out.places)
        out.tracks = self.tracks.remapped(old_of_new, site.sizes)
        out.watch = self.watch.remapped(old_of_new, site.sizes)
        out.verdicts = DiagnosisVerdicts(out.watch)
        for mine, theirs in zip(out._kept(), self._kept(), strict=True):
            mine.adopt(theirs, old_of_new)
        out.faults = out.book.faults()
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "format": FORMAT,
            "readings": self.readings.dump(),
            "tracks": self.tracks.dump(),
            "watch": self.watch.dump(),
            "growth": self.growth.dump(),
            "devices": self.devices.dump(),
            "silence": self.silence.dump(),
            "reports": self.reports.dump(),
            "wake": self.wake.dump(),
            "drifts": [[k, r.expected, r.measured, r.sigma] for k, r in self.drifts.items()],
            "book": self.book.dump(),
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave; one of another format is left: faults are found again."""
        if data.get("format") != FORMAT:
            return
        self.readings.restore(data["readings"])
        for name in ("tracks", "watch", "growth", "devices", "silence", "reports", "wake", "book"):
            getattr(self, name).restore(data[name])
        self.drifts = {k: Residual(k, *map(np.array, columns)) for k, *columns in data["drifts"]}
        self.faults = self.book.faults()


def _drifts(estimator: Estimator) -> dict[str, Residual]:
    """Return comparisons of the learned device parameters with their first values."""
    out: dict[str, Residual] = {}
    known = estimator.parameters
    for name, share in DRIFTS.items():
        p = known.get(name)
        if p is not None and len(p.value):
            sigma = np.hypot(share * np.abs(p.reference), np.nan_to_num(p.sigma))
            key = f"{name}/drift"
            # Copies: what is learned moves on beneath them
            out[key] = Residual(key, p.reference.copy(), p.value.copy(), sigma)
    return out
