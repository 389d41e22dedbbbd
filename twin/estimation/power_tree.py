"""Power tree: meters against the sum of the loads below them, and the shares of feeds in a load.

A constant loss or gain error is part of the noise of a balance. The share of a feed is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32, I64, Bool
from twin.contracts import Residual
from twin.estimation.comparisons import Board, Row
from twin.estimation.readings import Lag, Latest, filled, share_of
from twin.site import Site

# Meters of class 0.5 and their sampling at different instants; the floor under a learned balance noise.
METER_NOISE_PU = 0.002
SPLIT, BALANCE = "feeder.power_w/split", "feeder.balance"
# Meters of a building are read at instants of their own, which are unknown: while one moves, by more than a
# share of its reading, or while the nodes below it did, it is doubted by so much of how far; source: estimate
MOVED_S, MOVED_SHARE, LEAST_MOVE_PU = 5.0, 0.5, 0.01
LEAST_LOAD_W = 1000.0  # below, how feeds share says nothing; source: estimate


def rows(site: Site, balances: Sequence[Balance]) -> list[Row]:
    """Return the relations of this part; the table `balance` has a row per sum."""
    n = site.sizes["feeder"]
    return [
        Row(
            SPLIT, "feeder", n, METER_NOISE_PU, "feeder.odds", np.nan, 0.3, 0.01, 3e-4, low=0.0, relative=True
        ),
        Row(BALANCE, "balance", len(balances), METER_NOISE_PU),
    ]


@dataclass(frozen=True, slots=True)
class Balance:
    """A closed sum in the power tree: meters on one side, their loads on the other."""

    name: str
    meters: I32  # feeders
    feeders: I32  # children that count as load
    racks: I32  # racks that count as load
    inferred: bool  # rests on an edge that was guessed


def balances_of(site: Site) -> list[Balance]:
    """Return the sums of the topology: per group of roots, per parent with children, per rack with taps.

    Racks fed from A and B are shared between roots, so those roots are summed together.
    """
    out: list[Balance] = []
    several = site.sizes["hall"] > 1

    def short(table: str, entity: int) -> str:
        """Return a unique name of a balance: halls may use the same names for racks and feeders."""
        full = site.name(table, entity)
        return full.partition("/")[2] if several else full.rpartition("/")[2]

    none = np.zeros(0, np.int32)
    for members, racks, inferred in _joined_roots(site):
        name = "+".join(short("feeder", int(m)) for m in members[:4])
        out.append(Balance(name + ("+..." if len(members) > 4 else ""), members, none, racks, inferred))
    children, _ = site.below_feeder()
    for feeder in np.flatnonzero(np.diff(children.start)).tolist():
        name = short("feeder", feeder) + ">children"
        out.append(Balance(name, np.array([feeder], np.int32), children.of_row(feeder), none, False))
    has_parent = site.parent_of_feeder >= 0
    for rack in np.flatnonzero(np.diff(site.feeders_of_rack.start)).tolist():
        direct = site.feeders_of_rack.of_row(rack)
        if has_parent[direct].all():
            out.append(
                Balance(
                    short("rack", rack) + "<taps",
                    direct.astype(np.int32),
                    none,
                    np.array([rack], np.int32),
                    bool(site.inferred_feeder[direct].any()),
                )
            )
    return out


def _joined_roots(site: Site) -> list[tuple[I32, I32, bool]]:
    """Return (roots, racks below, True if an edge below was guessed) of roots that share racks."""
    served = site.feeders_of_rack
    if not len(served.member):
        return []
    root = site.root_of_feeder()
    lead = list(range(len(root)))  # union-find; the first root of a group leads it

    def leader(at: int) -> int:
        while lead[at] != at:
            lead[at] = at = lead[lead[at]]
        return at

    row, of_pair = served.row_of_member, root[served.member]
    beside = (row[1:] == row[:-1]) & (of_pair[1:] != of_pair[:-1])
    for one, other in np.unique(np.stack([of_pair[1:], of_pair[:-1]])[:, beside], axis=1).T.tolist():
        first, second = sorted((leader(one), leader(other)))
        lead[second] = first
    group = np.array([leader(r) for r in root.tolist()], np.int32)
    guessed = np.zeros(len(root), np.bool_)
    guessed[group[site.inferred_feeder]] = True
    filled = np.flatnonzero(np.diff(served.start)).astype(np.int32)
    racks = _by_group(filled, group[served.member[served.start[filled]]])
    roots = np.flatnonzero(site.parent_of_feeder < 0).astype(np.int32)
    members = _by_group(roots, group[roots])
    return [(members[g], racks[g], bool(guessed[g])) for g in sorted(racks)]


def _by_group(items: I32, group: I32) -> dict[int, I32]:
    """Return the items of each group, in their order."""
    order = np.argsort(group, kind="stable")
    groups, first = np.unique(group[order], return_index=True)
    return dict(zip(groups.tolist(), np.split(items[order], first[1:]), strict=True))


class PowerTreeEstimator:
    """The balances of a site, and the share of each root in jointly fed loads."""

    def __init__(self, site: Site, balances: Sequence[Balance]) -> None:
        self.balances, self.n = balances, len(balances)
        self._meter = _incidence([b.meters for b in self.balances])
        self._load_feeder = _incidence([b.feeders for b in self.balances])
        self._load_rack = _incidence([b.racks for b in self.balances])
        self._root = site.parent_of_feeder < 0
        groups = [b.meters for b in self.balances if len(b.meters) > 1 and self._root[b.meters].all()]
        self._group, self._member = _incidence(groups)
        self.moved = Lag(2, site.sizes, "feeder")  # what a meter read lately, and last
        self._n_groups, self._n_feeder = len(groups), site.sizes["feeder"]
        self._served = site.served_racks()
        feeds = np.maximum(np.diff(site.feeders_of_rack.start), 1)
        self._part = 1.0 / feeds[self._served[1]]  # of a rack's power
        self._below_w = np.zeros(self._n_feeder)  # by how far the power of nodes below moved lately

    def touched(self, feeders: Bool | None, racks: Bool | None) -> Bool:
        """Return the balances that contain one of these [n_balance]."""
        out = np.zeros(self.n, np.bool_)
        for (rows, members), chosen in (
            (self._meter, feeders),
            (self._load_feeder, feeders),
            (self._load_rack, racks),
        ):
            if chosen is not None:
                out[rows[chosen[members]]] = True
        return out

    def moves_below(self, rack_w: F64) -> None:
        """Take in the power of the nodes of racks in the last ticks [k, n_rack]."""
        feeder, rack = self._served
        of = np.stack([np.bincount(feeder, self._part * w[rack], self._n_feeder) for w in rack_w])
        self._below_w = of.max(axis=0) - of.min(axis=0)

    def update(self, feeder: Latest, rack: Latest, board: Board, now_ns: int, dt_s: float) -> None:
        """Update every sum, and every root's share."""
        feeder_w, feeder_ns = feeder["power_w"], feeder.received_ns("power_w")
        rack_w, rack_ns = rack["power_w"], rack.received_ns("power_w")
        received_ns = np.full(self.n, np.iinfo(np.int64).max)
        for (rows, members), t_ns in (
            (self._meter, feeder_ns),
            (self._load_feeder, feeder_ns),
            (self._load_rack, rack_ns),
        ):
            np.minimum.at(received_ns, rows, t_ns[members])
        measured = _sums(self._meter, feeder_w, self.n)
        expected = _sums(self._load_feeder, feeder_w, self.n)
        expected += _sums(self._load_rack, rack_w, self.n)
        level = np.where(expected > 0, expected, np.nan)
        doubt_w = self._moving(feeder_w, now_ns, dt_s)
        loose = _sums(self._meter, doubt_w, self.n)
        board.put(BALANCE, expected, measured, received_ns, level=level, loose=loose)
        if self._n_groups:
            self._split(feeder_w, feeder_ns, board)
            board.loose[board.cells[SPLIT]] = doubt_w

    def _moving(self, feeder_w: F64, now_ns: int, dt_s: float) -> F64:
        """Return 1 sigma [n_feeder], W, for a changing meter and older readings of others.

        One reading far from the one before and the one after is a spike of the meter, and no move, unless
        nodes below moved as well.
        """
        last_w, share = self.moved.level[1].copy(), share_of(dt_s, np.full(1, MOVED_S))
        shares = np.stack([share, np.ones(1)])
        calm_w = self.moved.toward(np.stack([feeder_w, feeder_w]), shares, (now_ns, dt_s))[0]
        far_w = np.fmin(np.abs(feeder_w - calm_w), np.abs(last_w - calm_w))
        away_w = np.maximum(filled(far_w), self._below_w) - LEAST_MOVE_PU * np.abs(feeder_w)
        return np.asarray(MOVED_SHARE * np.maximum(filled(away_w), 0.0), np.float64)

    def _split(self, feeder_w: F64, received_ns: I64, board: Board) -> None:
        """Expect each root from the deliveries of the others of its group."""
        whole = np.bincount(self._group, weights=feeder_w[self._member], minlength=self._n_groups)
        others = np.full(self._n_feeder, np.nan)
        # The delivery of others may be known although the meter itself is silent
        known = np.where(np.isfinite(feeder_w), feeder_w, 0.0)[self._member]
        silent = np.bincount(
            self._group, weights=~np.isfinite(feeder_w[self._member]), minlength=self._n_groups
        )
        known_w = np.bincount(self._group, weights=known, minlength=self._n_groups)
        alone = (silent[self._group] == 1) & ~np.isfinite(feeder_w[self._member])
        others[self._member] = np.where(alone, known_w[self._group], whole[self._group] - known)
        others[others < LEAST_LOAD_W] = np.nan
        oldest = np.full(self._n_groups, np.iinfo(np.int64).max)
        np.minimum.at(oldest, self._group, received_ns[self._member])
        read_ns = np.zeros(self._n_feeder, np.int64)
        read_ns[self._member] = oldest[self._group]
        board.put_ratio(SPLIT, others, feeder_w, read_ns)

    def off_pu(self, residual: Residual | None) -> tuple[float | None, bool]:
        """Return (deviation of the outermost complete balances over their load, True if an edge was
        guessed)."""
        if residual is None:
            return None, False
        whole = np.isfinite(residual.difference)
        outer = [
            i for i, b in enumerate(self.balances) if whole[i] and len(b.racks) and self._root[b.meters].all()
        ]
        load = float(sum(residual.expected[i] for i in outer))
        if not outer or load <= 0:
            return None, False
        off = float(sum(residual.difference[i] for i in outer))
        return off / load, any(self.balances[i].inferred for i in outer)


def _incidence(members: list[I32]) -> tuple[I32, I32]:
    """Return (row, member) pairs."""
    rows = np.repeat(np.arange(len(members), dtype=np.int32), [len(m) for m in members])
    return rows, np.concatenate([np.zeros(0, np.int32), *members]).astype(np.int32)


def _sums(pairs: tuple[I32, I32], values: F64, n: int) -> F64:
    rows, members = pairs
    return np.bincount(rows, weights=values[members], minlength=n).astype(np.float64)
