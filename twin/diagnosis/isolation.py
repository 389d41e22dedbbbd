"""Fault isolation by matching pursuit: the hypothesis that accounts for most of all deviations first, then
the rest.

Deviations in sigmas of all relations form one vector; each hypothesis at each entity is a direction in it.
The one whose direction carries most of the vector's energy is taken, its part is subtracted, and the rest is
searched again (Mallat and Zhang 1993): few causes for many symptoms, each at the lowest entity that
accounts for all of its own. Nothing is done while no deviation lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Residual
from twin.diagnosis.deviations import Tracks
from twin.diagnosis.signature import (
    BRANCH,
    DROP,
    FILTER,
    GPU_CLOCK,
    GPU_POWER,
    GPU_TEMP,
    HEAT_FLOW,
    HYPOTHESES,
    LOOP_FLOW,
    NODE_POWER,
    PSU1,
    PSU2,
    PUMP,
    RACK_POWER,
    RACK_SUPPLY,
    SPLIT,
    SUM,
    VALVE,
    WATER,
    Hypothesis,
    TickValues,
)
from twin.diagnosis.topology import Topology
from twin.site import Site

MAX_CAUSES = 12  # looked for in one tick
LEAST_ENERGY = 9.0  # squared sigmas: three sigmas of a mean over a few readings that has lasted
# Of the energy in the relations that a hypothesis touches it accounts for at least this share.
LEAST_SHARE = 0.45
SIGNIFICANT = 0.03  # of a direction's squared length: relations with less say nothing of it
# What it predicts so plainly in a relation without delay must be there to this share, or it is not the cause.
PLAIN, PRESENT_PU = 8.0, 0.25
PLAIN_NODE = 2.0  # of a node: what tells a meter that is off from a device that draws more than usual
# The newest reading of a row agrees with the mean over the last few to this share: it is not over.
LASTING_PU = 0.33
PROMPT = frozenset((
    BRANCH, SUM, DROP, PUMP, RACK_SUPPLY, VALVE, WATER, LOOP_FLOW, NODE_POWER, RACK_POWER, FILTER, HEAT_FLOW,
    SPLIT, GPU_POWER, GPU_CLOCK, PSU1, PSU2,
))  # fmt: skip
FELT_FIRST = 0.3  # of a GPU's rise is there when the flow's reading comes, which is older; source: estimate
RIPE_S = 20.0  # in which relations that lag show what prompt ones show at once; source: estimate
ALIKE = 0.9  # of the energy: two meters of one balance that account for so much alike cannot be told apart
# One reading of a flow that is so far off is believed at once if so many GPUs of the rack run hot already
EARLY_SIGMAS, CONFIRMING = 4.0, 8
UNSEEN = 0.7  # weight of a hypothesis whose own comparison there is none of: others are off
STICKY, STICKY_METER = 1.5, 4.0  # what is reported needs this much more energy against it: no flapping


class CandidatePairs(NamedTuple):
    """One term of a hypothesis: which entity shows in which row, by how many sigmas per unit."""

    relation: str
    entity: I32
    row: I32
    slope: F64


@dataclass(slots=True)
class IsolatedFault:
    """A hypothesis that was taken: of which entity, by how much, and the rows that it accounts for."""

    hypothesis: Hypothesis
    entity: int
    size: float  # in the unit of the hypothesis
    energy: float
    share: float  # of the energy that it touches
    rows: dict[str, I32]
    streak: int  # readings in a row in which the relation that tells most was off
    alone: bool = True  # no other entity accounts for it as well


class _Tried(NamedTuple):
    """A hypothesis at the entities `ids` that it may be true of."""

    hypothesis: Hypothesis
    ids: I32
    pairs: list[CandidatePairs]
    reported: Bool | None
    weight: float


class FaultIsolation:
    """Finds causes among the deviations of a tick."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._balance: dict[str, tuple[I32, I32, F64]] = {}

    def set_balances(self, site: Site, members: list[tuple[I32, I32, I32]]) -> None:
        """The balances of the power tree: per row its meters, feeders as load, racks as load."""
        meters = [(int(f), i, 1.0) for i, (m, _, _) in enumerate(members) for f in m]
        loads = [(int(f), i, -1.0) for i, (_, c, _) in enumerate(members) for f in c]
        racks = [(int(r), i, 1.0) for i, (_, _, rs) in enumerate(members) for r in rs]
        for table, some in (("feeder", meters + loads), ("rack", racks)):
            columns = list(zip(*some, strict=True)) if some else [(), (), ()]
            self._balance[table] = (
                np.array(columns[0], np.int32),
                np.array(columns[1], np.int32),
                np.array(columns[2], float),
            )

    def find(
        self,
        tracks: Tracks,
        residuals: dict[str, Residual],
        now: TickValues,
        covered: Callable[[str, int], Bool | None],
        is_reported: Callable[[Hypothesis], Bool | None],
    ) -> list[IsolatedFault]:
        """Causes, best first. `covered` says which rows are accounted for already."""
        active = tracks.active()
        if not active:
            return []
        z: dict[str, F64] = {}
        on: dict[str, Bool] = {}
        early = self._early(tracks)
        for name, track in tracks.tracks.items():
            residual = residuals.get(name)
            if residual is None or len(residual.expected) != len(track.on):
                continue
            gone = np.sign(track.mean) * track.last < LASTING_PU * np.abs(track.mean)
            z[name] = np.where(gone, 0.0, track.mean).astype(np.float64)
            on[name] = track.on != 0
            if name == BRANCH and early is not None:
                z[name] = np.where(early, track.last, z[name]).astype(np.float64)
                on[name] |= early
            if (hidden := covered(name, len(track.on))) is not None:
                z[name][hidden] = 0.0
                on[name] &= ~hidden
        lively = {name for name in active if name in on and on[name].any()}
        since = {name: tracks.tracks[name].since_ns for name in on}
        tried: list[_Tried] = []
        for h in HYPOTHESES:
            if self.topology.sizes.get(h.table) and not lively.isdisjoint(h.relations):
                ids, pairs = self._candidates(h, self._pairs(h, now, residuals, z), on)
                if len(ids):
                    least = FELT_FIRST if h.kind == "branch_blocked" else 0.0
                    pairs = _ripened(len(ids), pairs, on, since, now.state.now_ns, least)
                    reported = is_reported(h)
                    weight = h.weight if h.relations[0] in residuals else UNSEEN * h.weight
                    tried.append(_Tried(h, ids, pairs, None if reported is None else reported[ids], weight))
        out: list[IsolatedFault] = []
        while tried and len(out) < MAX_CAUSES:
            best = self._best(tried, z, on)
            if best is None:
                break
            fault, pairs, at = best
            fault.streak = _streak(fault, tracks)
            out.append(fault)
            for p in pairs:
                mine = p.entity == at
                z[p.relation][p.row[mine]] -= fault.size * p.slope[mine]
            for name, rows in fault.rows.items():
                on[name][rows] = False
        return out

    def _early(self, tracks: Tracks) -> Bool | None:
        """Racks [n] of which one reading of the flow is too low and whose GPUs confirm it already."""
        flow, temp = tracks.tracks.get(BRANCH), tracks.tracks.get(GPU_TEMP)
        if flow is None or temp is None or not temp.active:
            return None
        low = flow.last < -EARLY_SIGMAS
        if not low.any():
            return None
        hot = self.topology.count("gpu", "rack", temp.on > 0)
        early: Bool = low & (hot >= CONFIRMING)
        return early if early.any() else None

    def _pairs(
        self, h: Hypothesis, now: TickValues, residuals: dict[str, Residual], z: dict[str, F64]
    ) -> list[CandidatePairs]:
        out = []
        for term in h.terms(now):
            residual = residuals.get(term.relation)
            if residual is None or term.relation not in z:
                continue
            table = term.relation.partition(".")[0]
            if term.relation == "feeder.balance":
                if h.table not in self._balance:
                    continue
                entity, row, factor = self._balance[h.table]
                slope = term.slope[entity] * factor
            elif term.child:
                entity = self.topology.above(term.child, h.table)
                row, slope = np.arange(len(entity), dtype=np.int32), term.slope
            elif table == h.table:
                entity = row = np.arange(len(term.slope), dtype=np.int32)
                slope = term.slope
            else:
                row = self.topology.above(h.table, table)
                entity, slope = np.arange(len(row), dtype=np.int32), term.slope
            with np.errstate(divide="ignore", invalid="ignore"):
                slope = slope / residual.sigma[np.maximum(row, 0)] if len(residual.sigma) else slope * np.nan
                known = (row >= 0) & (entity >= 0) & np.isfinite(slope)
                known &= np.isfinite((residual.measured - residual.expected)[np.maximum(row, 0)])
            out.append(CandidatePairs(term.relation, entity[known], row[known], slope[known]))
        return out

    def _candidates(
        self, h: Hypothesis, pairs: list[CandidatePairs], on: dict[str, Bool]
    ) -> tuple[I32, list[CandidatePairs]]:
        """Entities that have a row which is off, and their pairs with entities counted among them only."""
        hit = np.zeros(self.topology.sizes[h.table], np.bool_)
        for p in pairs:
            hit[p.entity[on[p.relation][p.row]]] = True
        ids = np.flatnonzero(hit).astype(np.int32)
        place = (np.cumsum(hit) - 1).astype(np.int32)
        out = []
        for p in pairs:
            mine = hit[p.entity]
            out.append(CandidatePairs(p.relation, place[p.entity[mine]], p.row[mine], p.slope[mine]))
        return ids, out

    def _best(
        self,
        tried: list[_Tried],
        z: dict[str, F64],
        on: dict[str, Bool],
    ) -> tuple[IsolatedFault, list[CandidatePairs], int] | None:
        best: tuple[float, _Tried, int, float, float, float] | None = None
        alone = True
        for candidate in tried:
            h, ids, pairs, reported, weight = candidate
            n = len(ids)
            along, length, whole, hit = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
            for p in pairs:
                here = z[p.relation][p.row]
                along += np.bincount(p.entity, p.slope * here, n)
                length += np.bincount(p.entity, p.slope**2, n)
                whole += np.bincount(p.entity, here**2, n)
            length = np.maximum(length, 1e-300)  # sensors of megahertz and megawatts have small ones
            for p in pairs:
                shows = on[p.relation][p.row] & (p.slope**2 > SIGNIFICANT * length[p.entity] / _many(p, n))
                hit += np.bincount(p.entity, shows, n)
            size, energy = along / length, along**2 / length
            share = energy / np.maximum(whole, 1e-12)
            fits = (hit > 0) & (energy >= LEAST_ENERGY) & (share >= LEAST_SHARE)
            if len(pairs) > 1 and h.kind != "branch_blocked" and fits.any():  # GPUs feel that first
                fits &= ~_contradicted(pairs, size, z, n)
            if h.sign:
                fits &= np.sign(size) == h.sign
            if not fits.any():
                continue
            value = np.where(fits, energy * weight, 0.0)
            if reported is not None:
                value *= np.where(reported, STICKY_METER if h.table == "feeder" else STICKY, 1.0)
            at = int(np.argmax(value))
            if best is None or value[at] > best[0]:
                alike = int(np.count_nonzero(energy * fits > ALIKE * energy[at]))
                alone = alike < 2 or h.table != "feeder"
                best = (float(value[at]), candidate, at, float(size[at]), float(energy[at]), float(share[at]))
        if best is None:
            return None
        _, taken, at, amount, most, part = best
        rows: dict[str, I32] = {}
        for p in taken.pairs:
            mine = p.row[(p.entity == at) & on[p.relation][p.row]]
            if len(mine):
                rows[p.relation] = np.unique(mine).astype(np.int32)
        fault = IsolatedFault(taken.hypothesis, int(taken.ids[at]), amount, most, part, rows, 0, alone)
        return fault, taken.pairs, at


def _ripened(
    n: int, pairs: list[CandidatePairs], on: dict[str, Bool], since: dict[str, I64], now_ns: int, least: float
) -> list[CandidatePairs]:
    """The pairs, with those of relations that lag weighted by how far they can have come by now."""
    first_ns = np.full(n, now_ns, np.int64)
    prompt = np.zeros(n, np.bool_)
    for p in pairs:
        if p.relation in PROMPT:
            hit = on[p.relation][p.row]
            np.minimum.at(first_ns, p.entity[hit], since[p.relation][p.row[hit]])
            prompt[p.entity[hit]] = True
    if not prompt.any():
        return pairs
    ripe = np.where(prompt, np.maximum(-np.expm1(-(now_ns - first_ns) / (RIPE_S * NS)), least), 1.0)
    return [p if p.relation in PROMPT else p._replace(slope=p.slope * ripe[p.entity]) for p in pairs]


def _streak(fault: IsolatedFault, tracks: Tracks) -> int:
    """The longest streak of the rows that are off and that the cause moves."""
    out = 0
    for name, rows in fault.rows.items():
        if name in PROMPT or len(fault.rows) == 1 or not any(r in PROMPT for r in fault.rows):
            out = max(out, int(np.median(tracks.tracks[name].streak[rows])))
    return out


def _contradicted(pairs: list[CandidatePairs], size: F64, z: dict[str, F64], n: int) -> Bool:
    """Entities [n] of which a prompt relation does not show what the hypothesis plainly predicts of it."""
    out = np.zeros(n, np.bool_)
    for p in pairs:
        if p.relation in PROMPT:
            predicted = size[p.entity] * p.slope
            absent = z[p.relation][p.row] * np.sign(predicted) < PRESENT_PU * np.abs(predicted)
            plain = np.abs(predicted) > (PLAIN_NODE if p.relation in (NODE_POWER, PSU1, PSU2) else PLAIN)
            against = np.bincount(p.entity, plain & absent, n)
            out |= (against > 0) & (2 * against >= np.bincount(p.entity, plain, n))
    return out


def _many(pairs: CandidatePairs, n: int) -> F64:
    """Return the number of the term's rows for each pair's entity: a direction may spread over many."""
    return np.maximum(np.bincount(pairs.entity, minlength=n)[pairs.entity], 1).astype(np.float64)
