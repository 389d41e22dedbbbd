"""Matching pursuit: the hypothesis that accounts for most of all deviations first, then for what is left.

Deviations in sigmas of all relations form one vector; each hypothesis at each entity is a direction in it.
The one whose direction carries most of the vector's energy is taken, its part is subtracted, and the rest is
looked at again (Mallat and Zhang 1993): few causes for many symptoms, each at the lowest entity that
accounts for all of its own. Nothing is done while no deviation lasts. May import signatures and tracks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.contracts import Residual
from twin.diagnosis.places import Places
from twin.diagnosis.signature import HYPOTHESES, Hypothesis, Now
from twin.diagnosis.tracks import Tracks
from twin.frame import F64, I32, Bool
from twin.site import Site

MAX_CAUSES = 12  # looked for in one tick
LEAST_ENERGY = 9.0  # squared sigmas: three sigmas of a mean over a few readings that has lasted
# Of the energy in the relations that a hypothesis touches it accounts for at least this share.
LEAST_SHARE = 0.45
SIGNIFICANT = 0.03  # of a direction's squared length: relations with less say nothing of it
STICKY = 1.5  # what is told needs this much more energy against it: no flapping


class Pairs(NamedTuple):
    """One term of a hypothesis: which entity shows in which row, by how many sigmas per unit."""

    relation: str
    entity: I32
    row: I32
    slope: F64


@dataclass(slots=True)
class Found:
    """A hypothesis that was taken: of which entity, by how much, and the rows that it accounts for."""

    hypothesis: Hypothesis
    entity: int
    size: float  # in the unit of the hypothesis
    energy: float
    share: float  # of the energy that it touches
    rows: dict[str, I32]


class Pursuit:
    """Finds causes among the deviations of a tick."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._balance: dict[str, tuple[I32, I32, F64]] = {}

    def set_balances(self, site: Site, members: list[tuple[I32, I32, I32]]) -> None:
        """The balances of the power tree: per row its meters, feeders as load, racks as load."""
        meters = [(int(f), i, 1.0) for i, (m, _, _) in enumerate(members) for f in m]
        loads = [(int(f), i, -1.0) for i, (_, c, _) in enumerate(members) for f in c]
        racks = [(int(r), i, 1.0) for i, (_, _, rs) in enumerate(members) for r in rs]
        for table, some in (("feeder", meters + loads), ("rack", racks)):
            columns = list(zip(*some, strict=True)) if some else [(), (), ()]
            self._balance[table] = (
                np.array(columns[0], np.int32), np.array(columns[1], np.int32), np.array(columns[2], float)
            )  # fmt: skip

    def find(
        self,
        tracks: Tracks,
        residuals: dict[str, Residual],
        now: Now,
        covered: Callable[[str, int], Bool | None],
        is_told: Callable[[Hypothesis], Bool | None],
    ) -> list[Found]:
        """Causes, best first. `covered` says which rows are accounted for already."""
        active = tracks.active()
        if not active:
            return []
        z: dict[str, F64] = {}
        on: dict[str, Bool] = {}
        for name, track in tracks.tracks.items():
            residual = residuals.get(name)
            if residual is None or len(residual.expected) != len(track.on):
                continue
            z[name] = track.mean.astype(np.float64)
            on[name] = track.on != 0
            if (hidden := covered(name, len(track.on))) is not None:
                z[name][hidden] = 0.0
                on[name] &= ~hidden
        lively = {name for name in active if name in on and on[name].any()}
        tried = [
            (h, self._pairs(h, now, residuals, z), is_told(h))
            for h in HYPOTHESES
            if self.places.sizes.get(h.table) and not lively.isdisjoint(h.relations)
        ]
        out: list[Found] = []
        while tried and len(out) < MAX_CAUSES:
            best = self._best(tried, z, on)
            if best is None:
                break
            found, pairs = best
            out.append(found)
            for p in pairs:
                mine = p.entity == found.entity
                z[p.relation][p.row[mine]] -= found.size * p.slope[mine]
            for name, rows in found.rows.items():
                on[name][rows] = False
        return out

    def _pairs(
        self, h: Hypothesis, now: Now, residuals: dict[str, Residual], z: dict[str, F64]
    ) -> list[Pairs]:
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
                entity = self.places.above(term.child, h.table)
                row, slope = np.arange(len(entity), dtype=np.int32), term.slope
            elif table == h.table:
                entity = row = np.arange(len(term.slope), dtype=np.int32)
                slope = term.slope
            else:
                row = self.places.above(h.table, table)
                entity, slope = np.arange(len(row), dtype=np.int32), term.slope
            with np.errstate(divide="ignore", invalid="ignore"):
                slope = slope / residual.sigma[np.maximum(row, 0)] if len(residual.sigma) else slope * np.nan
                known = (row >= 0) & (entity >= 0) & np.isfinite(slope)
                known &= np.isfinite((residual.measured - residual.expected)[np.maximum(row, 0)])
            out.append(Pairs(term.relation, entity[known], row[known], slope[known]))
        return out

    def _best(
        self,
        tried: list[tuple[Hypothesis, list[Pairs], Bool | None]],
        z: dict[str, F64],
        on: dict[str, Bool],
    ) -> tuple[Found, list[Pairs]] | None:
        best: tuple[float, Hypothesis, list[Pairs], int, float, float, float] | None = None
        for h, pairs, told in tried:
            n = self.places.sizes[h.table]
            along, length, whole, hit = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
            for p in pairs:
                here = z[p.relation][p.row]
                along += np.bincount(p.entity, p.slope * here, n)
                length += np.bincount(p.entity, p.slope**2, n)
                whole += np.bincount(p.entity, here**2, n)
            length = np.maximum(length, 1e-12)
            for p in pairs:
                shows = on[p.relation][p.row] & (p.slope**2 > SIGNIFICANT * length[p.entity] / _many(p, n))
                hit += np.bincount(p.entity, shows, n)
            size, energy = along / length, along**2 / length
            share = energy / np.maximum(whole, 1e-12)
            fits = (hit > 0) & (energy >= LEAST_ENERGY) & (share >= LEAST_SHARE)
            if h.sign:
                fits &= np.sign(size) == h.sign
            if not fits.any():
                continue
            value = np.where(fits, energy * h.weight, 0.0)
            if told is not None:
                value *= np.where(told, STICKY, 1.0)
            at = int(np.argmax(value))
            if best is None or value[at] > best[0]:
                best = (float(value[at]), h, pairs, at, float(size[at]), float(energy[at]), float(share[at]))
        if best is None:
            return None
        _, h, pairs, at, size, energy, share = best
        rows: dict[str, I32] = {}
        for p in pairs:
            mine = p.row[(p.entity == at) & on[p.relation][p.row]]
            if len(mine):
                rows[p.relation] = np.unique(mine).astype(np.int32)
        return Found(h, at, size, energy, share, rows), pairs


def _many(pairs: Pairs, n: int) -> F64:
    """How many rows of the term each pair's entity has: a direction may spread over many."""
    return np.maximum(np.bincount(pairs.entity, minlength=n)[pairs.entity], 1).astype(np.float64)
