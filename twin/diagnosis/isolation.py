"""Fault isolation by matching pursuit: the hypothesis that accounts for most of all deviations first, then
the rest.

Deviations in sigmas of all relations form one vector; each hypothesis at each entity is a direction in it.
The one whose direction carries most of the vector's energy is taken, its part is subtracted, and the rest is
searched again (Mallat and Zhang 1993): few causes for many symptoms, each at the lowest entity that
accounts for all of its own. Nothing is done while no deviation lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Residual
from twin.diagnosis.cusum import DeviationTrack
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

MAX_CAUSES, MAX_OUTLIERS = 12, 48  # looked for in one tick
BLOCKED = "branch_blocked"
LEAST_ENERGY = 9.0  # squared sigmas: three sigmas of a mean over a few readings that has lasted
# Of the energy in the relations that a hypothesis touches it accounts for at least this share.
LEAST_SHARE = 0.45
SIGNIFICANT = 0.03  # of a direction's squared length: relations with less say nothing of it
# A cause that predicts a deviation so plainly and without delay is refuted below this share of it.
PLAIN, PRESENT_PU = 8.0, 0.25
PLAIN_NODE = 2.0  # of a node: what distinguishes a meter that is off from a device that draws more than usual
# The newest reading of a row agrees with the mean over the last few to this share: it is not over.
LASTING_PU = 0.33
PROMPT = frozenset((
    BRANCH, SUM, DROP, PUMP, RACK_SUPPLY, VALVE, WATER, LOOP_FLOW, NODE_POWER, RACK_POWER, FILTER, HEAT_FLOW,
    SPLIT, GPU_POWER, GPU_CLOCK, PSU1, PSU2,
))  # fmt: skip
# Relations in which a sensor that is wrong shows in the reading itself
AT_ONCE = PROMPT - {GPU_CLOCK} | {"feeder.balance"}
SUSPECT_SIGMAS = 4.0  # of a meter that was contradicted lately; source: estimate
NOBODY: Mapping[tuple[str, str], I32] = MappingProxyType({})
# Relations that a sensor shows in later than others do: coolant warms up with the power of a while
LATER = frozenset((("rack.power_w", HEAT_FLOW),))
GROSS_SIGMAS = 8.0  # of one reading that no noise and no lag explains; source: estimate
FELT_FIRST = 0.3  # of a GPU's rise is there when the flow's reading comes, which is older; source: estimate
RIPE_S = 20.0  # in which relations that lag show what prompt ones show at once; source: estimate
ALIKE = 0.9  # of the energy: two meters of one balance that account for so much alike cannot be distinguished
# One reading of a flow that is so far off is believed at once if so many GPUs of the rack run hot already
EARLY_SIGMAS, CONFIRMING = 4.0, 8
UNSEEN = 0.7  # weight of a hypothesis whose own comparison there is none of: others are off
STICKY, STICKY_METER = 1.5, 4.0  # what is reported needs this much more energy against it: no flapping


class CandidatePairs(NamedTuple):
    """One term of a hypothesis: the entity, the row, and the sigmas per unit."""

    relation: str
    entity: I32
    row: I32
    slope: F64

    def of(self, entities: I32) -> CandidatePairs:
        """Return the terms of some entities."""
        mine = np.isin(self.entity, entities)
        return CandidatePairs(self.relation, self.entity[mine], self.row[mine], self.slope[mine])


@dataclass(slots=True)
class IsolatedFault:
    """An accepted hypothesis: its entity, its size, and the rows that it explains."""

    hypothesis: Hypothesis
    entity: int
    size: float  # in the unit of the hypothesis
    energy: float
    share: float  # of the energy that it touches
    rows: dict[str, I32]
    streak: int  # readings in a row in which the relation with the most information was off
    alone: bool = True  # no other entity accounts for it as well
    sigma: float = 0.0  # 1 sigma of its size


class _Tried(NamedTuple):
    """A hypothesis at the candidate entities `ids`."""

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
        """Set the balances of the power tree: per row its meters, feeders as load, racks as load."""
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
        """Return the causes, best first. `covered`: rows that are already explained."""
        active = set(tracks.active())
        if not active:
            return []
        sizes = self.topology.sizes
        asked = [h for h in HYPOTHESES if sizes.get(h.table) and not active.isdisjoint(h.relations)]
        needed = frozenset[str]().union(*(h.relations for h in asked))
        on: dict[str, Bool] = {}
        hidden: dict[str, Bool | None] = {}
        early = self._early(tracks)
        for name, track in tracks.tracks.items():
            residual = residuals.get(name) if name in needed else None
            if residual is None or len(residual.expected) != len(track.on):
                continue
            on[name] = track.on != 0
            if name == BRANCH and early is not None:
                on[name] |= early
            hidden[name] = covered(name, len(track.on))
            if (some := hidden[name]) is not None:
                on[name] &= ~some
        lively = {name for name in active if name in on and on[name].any()}
        since = {name: tracks.tracks[name].since_ns for name in on}
        tried: list[_Tried] = []
        for h in asked:
            if not lively.isdisjoint(h.relations):
                ids, pairs = self._candidates(h, self._pairs(h, now, residuals, on), on)
                if len(ids):
                    least = FELT_FIRST if h.kind == BLOCKED else 0.0
                    pairs = _ripened(len(ids), pairs, on, since, now.state.now_ns, least)
                    reported = is_reported(h)
                    weight = h.weight if h.relations[0] in residuals else UNSEEN * h.weight
                    tried.append(_Tried(h, ids, pairs, None if reported is None else reported[ids], weight))
        out: list[IsolatedFault] = []
        if not tried:
            return out
        relations = {p.relation for t in tried for p in t.pairs}
        z = {
            name: _deviation(tracks.tracks[name], early if name == BRANCH else None, hidden[name])
            for name in on
            if name in relations
        }
        pursuit = _Pursuit(tried, z, on)
        while len(out) < MAX_CAUSES and (fault := pursuit.best()) is not None:
            fault.streak = _streak(fault, tracks)
            out.append(fault)
        return out

    def outliers(
        self,
        residuals: dict[str, Residual],
        now: TickValues,
        rows_covered: Callable[[], Callable[[str, int], Bool | None]],
        suspects: Mapping[tuple[str, str], I32] = NOBODY,
        stirred: Callable[[str, int], Bool | None] | None = None,
    ) -> list[IsolatedFault]:
        """Causes of the single readings of this tick that are far off, best first, by relations that show
        them at once. `rows_covered` is asked for the rows that are accounted for only if some reading is.

        `suspects`: entities by table and signal, whose sensors less is enough to find wrong, and that do not
        cover the rows in which they show: only those that are `stirred` by a device are.
        """
        prompt = {name: residuals[name] for name in sorted(AT_ONCE & residuals.keys())}
        least = SUSPECT_SIGMAS if suspects else GROSS_SIGMAS
        with np.errstate(invalid="ignore", divide="ignore"):
            if not any((np.abs(r.measured - r.expected) > least * r.sigma).any() for r in prompt.values()):
                return []
            off = {
                name: np.nan_to_num((r.measured - r.expected) / r.sigma, posinf=0.0, neginf=0.0)
                for name, r in prompt.items()
            }
        out: list[IsolatedFault] = []
        if suspects and stirred is not None:
            out += self._outliers(residuals, now, _without(off, stirred), SUSPECT_SIGMAS, suspects)
        if any((np.abs(sigmas) > GROSS_SIGMAS).any() for sigmas in off.values()):
            out += self._outliers(residuals, now, _without(off, rows_covered()), GROSS_SIGMAS)
        return out

    def _outliers(
        self,
        residuals: dict[str, Residual],
        now: TickValues,
        z: dict[str, F64],
        least: float,
        only: Mapping[tuple[str, str], I32] = NOBODY,
    ) -> list[IsolatedFault]:
        """Return the causes of the deviations `z` beyond `least` sigmas, of some sensors or of all kinds."""
        on = {name: np.abs(sigmas) > least for name, sigmas in z.items()}
        lively = {name for name, far in on.items() if far.any()}
        sizes = self.topology.sizes
        tried: list[_Tried] = []
        for h in HYPOTHESES:
            if sizes.get(h.table) and not lively.isdisjoint(h.relations):
                some = only.get((h.table, h.signal)) if h.kind == "sensor_biased" else None
                if only and some is None:
                    continue
                pairs = self._pairs(h, now, residuals, on)
                if some is not None:
                    pairs = [p.of(some) for p in pairs]
                ids, pairs = self._candidates(h, pairs, on)
                if len(ids):
                    tried.append(_Tried(h, ids, pairs, None, h.weight))
        out: list[IsolatedFault] = []
        pursuit = _Pursuit(tried, z, on, AT_ONCE) if tried else None
        while pursuit is not None and len(out) < MAX_OUTLIERS and (fault := pursuit.best()) is not None:
            out.append(fault)
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
        self, h: Hypothesis, now: TickValues, residuals: dict[str, Residual], on: dict[str, Bool]
    ) -> list[CandidatePairs]:
        """Return the known pairs of entities with a row that is off, or may be."""
        found: list[CandidatePairs] = []
        near = np.zeros(self.topology.sizes[h.table], np.bool_)
        for term in h.terms(now):
            if term.relation not in residuals or term.relation not in on:
                continue
            table, slope = term.relation.partition(".")[0], term.slope
            if term.relation == "feeder.balance":
                if h.table not in self._balance:
                    continue
                entity, row, factor = self._balance[h.table]
                slope = slope[entity] * factor
            elif term.child:
                entity = self.topology.above(term.child, h.table)
                row = np.arange(len(entity), dtype=np.int32)
            elif table == h.table:
                entity = row = np.arange(len(slope), dtype=np.int32)
            else:
                row = self.topology.above(h.table, table)
                entity = np.arange(len(row), dtype=np.int32)
            if len(on[term.relation]):
                near[entity[on[term.relation][row]]] = True
            found.append(CandidatePairs(term.relation, entity, row, slope))
        out = []
        for relation, entity, row, slope in found:
            residual, at = residuals[relation], np.flatnonzero(near[entity])
            entity, row, slope = entity[at], row[at], slope[at]
            with np.errstate(divide="ignore", invalid="ignore"):
                read = np.maximum(row, 0)
                slope = slope / residual.sigma[read] if len(residual.sigma) else slope * np.nan
                known = (row >= 0) & (entity >= 0) & np.isfinite(slope)
                known &= np.isfinite(residual.measured[read] - residual.expected[read])
            out.append(CandidatePairs(relation, entity[known], row[known], slope[known]))
        return out

    def _candidates(
        self, h: Hypothesis, pairs: list[CandidatePairs], on: dict[str, Bool]
    ) -> tuple[I32, list[CandidatePairs]]:
        """Return entities with a row that is off, and their pairs, renumbered among them."""
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


def _without(z: dict[str, F64], hidden: Callable[[str, int], Bool | None]) -> dict[str, F64]:
    """Return copies of deviations without the hidden rows."""
    out = {name: sigmas.copy() for name, sigmas in z.items()}
    for name, sigmas in out.items():
        if (rows := hidden(name, len(sigmas))) is not None:
            sigmas[rows] = 0.0
    return out


def _deviation(track: DeviationTrack, early: Bool | None, hidden: Bool | None) -> F64:
    """Lasting deviations of a comparison in sigmas [n]: of `early` rows the last one, of `hidden` none."""
    gone = np.sign(track.mean) * track.last < LASTING_PU * np.abs(track.mean)
    out = np.where(gone, 0.0, track.mean).astype(np.float64)
    if early is not None:
        out = np.where(early, track.last, out).astype(np.float64)
    if hidden is not None:
        out[hidden] = 0.0
    return out


class _Pursuit:
    """All hypotheses at all of their entities side by side, so that one round is one pass.

    A *case* is one hypothesis at one entity, a *piece* one of its terms there, a *pair* one row of that.
    Sums go over pairs to pieces, then over pieces to cases.
    """

    def __init__(
        self,
        tried: list[_Tried],
        z: dict[str, F64],
        on: dict[str, Bool],
        prompt: frozenset[str] = PROMPT,
    ) -> None:
        """The deviations `z` and `on` become views of arrays of this object. `prompt`: relations that show at
        once what a hypothesis predicts."""
        self.tried, self.z, self.on = tried, z, on
        first, start = dict[str, int](), 0
        for name in {p.relation: None for t in tried for p in t.pairs}:
            first[name], start = start, start + len(z[name])
        self._z = np.concatenate([z[name] for name in first])
        self._on = np.concatenate([on[name] for name in first])
        for name, at in first.items():
            end = at + len(z[name])
            z[name], on[name] = self._z[at:end], self._on[at:end]
        self._first = np.cumsum([0, *(len(t.ids) for t in tried)])  # case of each hypothesis, and their end
        pairs = [(k, p) for k, t in enumerate(tried) for p in t.pairs]
        width = [len(tried[k].ids) for k, _ in pairs]
        begin = np.cumsum([0, *width])
        self._case_of_piece = np.concatenate(
            [np.arange(self._first[k], self._first[k] + n) for (k, _), n in zip(pairs, width, strict=True)]
        )
        self._row = np.concatenate([p.row + first[p.relation] for _, p in pairs])
        self._piece = np.concatenate([p.entity + at for (_, p), at in zip(pairs, begin[:-1], strict=True)])
        self._slope = np.concatenate([p.slope for _, p in pairs])
        self._case = self._case_of_piece[self._piece]
        squared = self._slope**2
        # Sensors of megahertz and megawatts have small ones
        self._length = np.maximum(self._sum(squared), 1e-300)
        # A direction may spread over many rows
        many = np.maximum(np.bincount(self._piece, minlength=len(self._case_of_piece))[self._piece], 1)
        self._significant = squared > SIGNIFICANT * self._length[self._case] / many
        # GPUs feel a blocked branch first
        plain = [
            (PLAIN_NODE if p.relation in (NODE_POWER, PSU1, PSU2) else PLAIN)
            if p.relation in prompt
            and len(tried[k].pairs) > 1
            and tried[k].hypothesis.kind != BLOCKED
            and (tried[k].hypothesis.key, p.relation) not in LATER
            else np.inf
            for k, p in pairs
        ]
        bound = np.repeat(plain, [len(p.row) for _, p in pairs])
        self._judged = np.flatnonzero(np.isfinite(bound))
        self._bound = bound[self._judged]
        self._sign = self._of_case([t.hypothesis.sign for t in tried])
        self._weight = self._of_case([t.weight for t in tried])
        sticky = (STICKY_METER if t.hypothesis.table == "feeder" else STICKY for t in tried)
        self._sticky = np.concatenate(
            [
                np.ones(len(t.ids)) if t.reported is None else np.where(t.reported, more, 1.0)
                for t, more in zip(tried, sticky, strict=True)
            ]
        )

    def _of_case(self, values: list[float]) -> F64:
        return np.repeat(np.array(values, np.float64), np.diff(self._first))

    def _sum(self, of_pair: np.ndarray) -> F64:
        """Return the sum over the pairs of each case [n_case]."""
        of_piece = np.bincount(self._piece, of_pair, len(self._case_of_piece))
        return np.bincount(self._case_of_piece, of_piece, self._first[-1]).astype(np.float64, copy=False)

    def best(self) -> IsolatedFault | None:
        """Take the case that accounts for most and subtract its part; None if none is good enough."""
        here = self._z[self._row]
        along, whole = self._sum(self._slope * here), self._sum(here**2)
        hit = self._sum(self._on[self._row] & self._significant)
        size, energy = along / self._length, along**2 / self._length
        share = energy / np.maximum(whole, 1e-12)
        fits = (hit > 0) & (energy >= LEAST_ENERGY) & (share >= LEAST_SHARE)
        fits &= (self._sign == 0) | (np.sign(size) == self._sign)
        if fits.any() and len(self._judged):
            fits &= ~self._contradicted(size, here)
        if not fits.any():
            return None
        value = np.where(fits, energy * self._weight, 0.0) * self._sticky
        case = int(np.argmax(value))
        k = int(np.searchsorted(self._first, case, side="right")) - 1
        taken, at, alone = self.tried[k], case - int(self._first[k]), True
        if taken.hypothesis.table == "feeder":
            mine = slice(self._first[k], self._first[k + 1])
            alone = int(np.count_nonzero(energy[mine] * fits[mine] > ALIKE * energy[case])) < 2
        amount, entity = float(size[case]), int(taken.ids[at])
        rows, sigma = self._take(taken, at, amount), float(self._length[case]) ** -0.5
        return IsolatedFault(
            taken.hypothesis, entity, amount, float(energy[case]), float(share[case]), rows, 0, alone, sigma
        )

    def _take(self, taken: _Tried, at: int, amount: float) -> dict[str, I32]:
        """Subtract a case's part from its rows; returns the deviating rows that it explains."""
        rows: dict[str, I32] = {}
        for p in taken.pairs:
            mine = p.entity == at
            row = p.row[mine]
            off = row[self.on[p.relation][row]]
            if len(off):
                rows[p.relation] = np.unique(off).astype(np.int32)
            self.z[p.relation][row] -= amount * p.slope[mine]
        for name, off in rows.items():
            self.on[name][off] = False
        return rows

    def _contradicted(self, size: F64, here: F64) -> Bool:
        """Return the cases [n] without an effect that the hypothesis clearly predicts in a prompt
        relation."""
        at = self._judged
        piece = self._piece[at]
        predicted = size[self._case[at]] * self._slope[at]
        most = np.abs(predicted)
        plain = most > self._bound
        absent = here[at] * np.sign(predicted) < PRESENT_PU * most
        n = len(self._case_of_piece)
        against = np.bincount(piece, plain & absent, n)
        refuted = (against > 0) & (2 * against >= np.bincount(piece, plain, n))
        out: Bool = np.bincount(self._case_of_piece, refuted, self._first[-1]) > 0
        return out


def _ripened(
    n: int, pairs: list[CandidatePairs], on: dict[str, Bool], since: dict[str, I64], now_ns: int, least: float
) -> list[CandidatePairs]:
    """Return the pairs; those of lagging relations are weighted by their possible progress."""
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
    """Return the longest streak of the deviating rows that the cause affects."""
    out = 0
    for name, rows in fault.rows.items():
        if name in PROMPT or len(fault.rows) == 1 or not any(r in PROMPT for r in fault.rows):
            streaks = np.sort(tracks.tracks[name].streak[rows]).tolist()
            out = max(out, (streaks[(len(streaks) - 1) // 2] + streaks[len(streaks) // 2]) // 2)
    return out
