"""Life log: stays of devices (assets) at positions, and their faults, on a clock of days.

An asset is one device, identified by its serial number; a position is a place that one asset at a time
occupies, named by levels from the outermost to the innermost (row, cabinet, cage, slot, node). A stay is the
time of one asset at one position: an asset that moves, or comes back from repair, begins another. A stay that
ends without a fault shows that the asset was alive until then and no more (censoring). In observation gaps
nobody watched: no fault there is no sign of health. `LifeLog.known_at` is the only way to look back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from models.failure import FaultLog
from twin.catalogue import F64, I32, I64, Bool, ContractError

REMOVED, FAILED, WATCHED = 0, 1, 2  # how a stay ended: taken out alive, with a fault, not at all
ENDINGS = ("removed", "failed", "watched")
SAME_D = 1.0 / 86_400.0  # a fault so close to the end of a stay ended it: clocks count seconds
# Faults of one asset less than a day apart are one episode: reports of one defect. source: estimate
EPISODE_D = 1.0


@dataclass(frozen=True)
class LifeLog:
    """Stays and faults. asset, place: int32 [k] of each stay; begin_d, end_d: days [k], `inf`: still there.

    `place` is a row of `places` [n_place, n_level], the numbers of the levels. Faults in order of time: stay,
    kind: int32 [m], day [m]. The log watches from `begin_d` to `until_d`, apart from `gaps` [g, 2]. Raises
    ContractError for what is no such log.
    """

    assets: tuple[str, ...]
    levels: tuple[str, ...]
    places: I32
    asset: I32
    place: I32
    from_d: F64
    to_d: F64
    stay: I32
    day: F64
    kind: I32
    classes: tuple[str, ...]
    begin_d: float
    until_d: float
    gaps: F64

    def __post_init__(self) -> None:
        if any(part.shape != (self.k,) for part in (self.place, self.from_d, self.to_d)):
            raise ContractError("expected asset, place, from_d and to_d of one length")
        if any(part.shape != self.stay.shape for part in (self.day, self.kind)):
            raise ContractError("expected stay, day and kind of one length")
        if self.places.ndim != 2 or self.places.shape[1] != len(self.levels):
            raise ContractError(f"expected places of {len(self.levels)} levels")
        if self.gaps.shape != (len(self.gaps), 2) or not (self.gaps[:, 0] <= self.gaps[:, 1]).all():
            raise ContractError("expected gaps of a begin and a later end")
        for name, part, size in (
            ("asset", self.asset, len(self.assets)),
            ("place", self.place, len(self.places)),
            ("stay", self.stay, self.k),
            ("kind", self.kind, len(self.classes)),
        ):
            if len(part) and not 0 <= part.min() <= part.max() < size:
                raise ContractError(f"expected {name} from 0 to {size - 1}")
        if not (self.to_d >= self.from_d).all() or not np.isfinite(self.from_d).all():
            raise ContractError("expected every stay to end at its begin or later")
        if np.any(np.diff(self.day) < 0):
            raise ContractError("expected faults in order of time")
        at = self.stay
        if not ((self.day >= self.from_d[at] - SAME_D) & (self.day <= self.to_d[at] + SAME_D)).all():
            raise ContractError("expected every fault within its stay")

    @property
    def k(self) -> int:
        """Number of stays."""
        return len(self.asset)

    @cached_property
    def first_d(self) -> F64:
        """The day on which each asset was first seen in service [n_asset]."""
        out = np.full(len(self.assets), np.inf)
        np.minimum.at(out, self.asset, self.from_d)
        return out

    @cached_property
    def ending(self) -> I32:
        """Ending of each stay, a place in ENDINGS [k]."""
        out = np.where(self.to_d < self.until_d - SAME_D, REMOVED, WATCHED).astype(np.int32)
        last = np.full(self.k, -np.inf)
        np.maximum.at(last, self.stay, self.day)
        out[last >= self.to_d - SAME_D] = FAILED
        return out

    @cached_property
    def episode(self) -> Bool:
        """Faults that begin an episode [m]: the first of each asset, or a day after the one before."""
        asset = self.asset[self.stay]
        order = np.lexsort((self.day, asset))
        new = np.ones(len(order), np.bool_)
        new[1:] = np.diff(asset[order]) != 0
        new[1:] |= np.diff(self.day[order]) >= EPISODE_D
        out = np.empty(len(order), np.bool_)
        out[order] = new
        return out

    @cached_property
    def repeats(self) -> I64:
        """Episodes that the asset of each fault had before [m]."""
        asset = self.asset[self.stay]
        order = np.lexsort((self.day, asset))
        total = np.cumsum(self.episode[order])
        first = np.searchsorted(asset[order], asset[order])
        out = np.empty(len(order), np.int64)
        out[order] = total - (total[first] - 1) - self.episode[order]
        return out

    def watched_d(self, begin_d: F64, end_d: F64) -> F64:
        """Return the observed days between begins and ends."""
        out = np.maximum(end_d - begin_d, 0.0)
        for low, high in self.gaps:
            out = out - np.maximum(np.minimum(end_d, high) - np.maximum(begin_d, low), 0.0)
        return np.maximum(out, 0.0)

    def known_at(self, day: float) -> LifeLog:
        """The log as known on this day: no later stay and fault, and no later end."""
        kept = self.from_d <= day
        place_of = np.cumsum(kept, dtype=np.int32) - 1
        late = self.day <= day
        gaps = self.gaps[self.gaps[:, 0] < day]
        return replace(
            self,
            asset=self.asset[kept],
            place=self.place[kept],
            from_d=self.from_d[kept],
            to_d=np.where(self.to_d[kept] <= day, self.to_d[kept], np.inf),
            stay=place_of[self.stay[late]],
            day=self.day[late],
            kind=self.kind[late],
            until_d=float(max(min(self.until_d, day), self.begin_d)),
            gaps=np.minimum(gaps, day),
        )

    def as_faults(self) -> FaultLog:
        """Episodes as a log of faults of assets; the repair lasts until the asset's next stay."""
        begun = np.flatnonzero(self.episode)
        asset, day = self.asset[self.stay[begun]], self.day[begun]
        order = np.lexsort((self.from_d, self.asset))
        stays = self.asset[order].astype(np.float64) * 1e7 + self.from_d[order]
        after = np.searchsorted(stays, asset * 1e7 + day + SAME_D, side="right")
        same = (after < self.k) & (self.asset[order[np.minimum(after, self.k - 1)]] == asset)
        back = np.where(same, self.from_d[order[np.minimum(after, self.k - 1)]], np.inf)
        # A fault within a stay that goes on: it was repaired on the spot.
        end = np.where(self.to_d[self.stay[begun]] > day + SAME_D, day, np.maximum(back, day))
        return FaultLog(
            len(self.assets), asset.astype(np.int32), day, end, self.kind[begun], self.classes or ("any",),
            self.begin_d, self.until_d,
        )  # fmt: skip
