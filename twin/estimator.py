"""The estimator: what a reading ought to be, beside what it is, with the noise of their difference learned.

First version: the heat balance of each liquid-cooled rack (flow x rise against electric power; learns the
share of the power that the liquid carries) and the balances of the power tree (a meter against the sum of
what it serves). An expectation uses only parameters learned from earlier ticks. May import the state, the
site, maintenance windows, contracts and `twin.physics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.contracts import Residual
from twin.errors import ConfigError
from twin.frame import F64, I32, I64, NS, Bool
from twin.maintenance import Windows
from twin.physics.liquid import COOLANTS, heat_rate_w_per_k, heat_w
from twin.site import Site
from twin.state import GOOD, State

# Prior of the liquid's share of a rack's heat: NVL72 about 115 of 132 kW by vendors' figures, wide because
# sites differ; source: estimate.
CAPTURE_PRIOR, CAPTURE_SIGMA = 0.90, 0.10
# The share may drift this much per root second (valves, air flow); source: estimate.
CAPTURE_DRIFT_PER_SQRT_S = 2e-4
MIN_RISE_K = 1.0  # below, the rise drowns in the sensors' error: no learning
MIN_FLOW_LPM = 1.0  # a stream that stands still carries nothing, whatever the rise
MIN_POWER_W = 1000.0  # a rack that idles below this says nothing about its liquid
NOISE_MEMORY_S = 600.0  # time constant of the learned noise
NOISE_WARMUP = 30  # residuals before a noise is called learned
# Beyond so many sigmas for so long it is no noise: nothing is learned from it, lest a fault become normal.
FAULT_SIGMAS, FAULT_S = 4.0, 10.0
# Meters of class 0.5 and their sampling at different instants; the floor under a learned balance noise.
METER_NOISE_PU = 0.002


def confidence_of(difference: F64, sigma: F64) -> F64:
    """Probability that a difference is real: erf(|z| / sqrt 2) of a normal; NaN = unknown."""
    return _erf(np.abs(difference) / sigma / np.sqrt(2.0))


def _erf(x: F64) -> F64:
    # Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7
    t = 1.0 / (1.0 + 0.3275911 * x)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 1.0 - poly * np.exp(-x * x)


class Noise:
    """Learned root mean square of residuals, per row [n]: a constant loss is part of what is normal."""

    def __init__(self, n: int, floor: F64) -> None:
        self.n, self.floor = n, floor
        self.variance = np.zeros(n)
        self.count = np.zeros(n, np.int64)
        self.off_ns = np.zeros(n, np.int64)  # since when it has been far off; 0 = it is not

    def sigma(self) -> F64:
        """What was learned so far; NaN before `NOISE_WARMUP` residuals."""
        learned = np.maximum(np.sqrt(self.variance), self.floor)
        return np.where(self.count >= NOISE_WARMUP, learned, np.nan)

    def learn(self, difference: F64, heard_ns: I64, dt_s: float) -> None:
        """Take in residuals (NaN: none) of readings of `heard_ns`; one far off counts as four sigmas."""
        known = np.isfinite(difference)
        warm = self.count >= NOISE_WARMUP
        bound = np.where(warm, FAULT_SIGMAS * np.maximum(np.sqrt(self.variance), self.floor), np.inf)
        far = known & (np.abs(difference) > bound)
        near = known & ~(np.abs(difference) > bound / 2)
        self.off_ns = np.where(near, 0, np.where(far & (self.off_ns == 0), heard_ns, self.off_ns))
        known &= ~((self.off_ns > 0) & (heard_ns - self.off_ns >= FAULT_S * NS))
        clipped = np.where(known, np.clip(difference, -bound, bound), 0.0)
        self.count += known
        share = np.maximum(1.0 / np.maximum(self.count, 1), min(1.0, dt_s / NOISE_MEMORY_S))
        self.variance = np.where(known, self.variance + share * (clipped**2 - self.variance), self.variance)

    def dump(self) -> dict[str, Any]:
        return {"variance": self.variance, "count": self.count, "off_ns": self.off_ns}

    def restore(self, data: dict[str, Any]) -> None:
        self.variance, self.count = np.array(data["variance"]), np.array(data["count"])
        self.off_ns = np.array(data["off_ns"])


@dataclass(frozen=True, slots=True)
class Balance:
    """A closed sum in the power tree: meters on one side, what they serve on the other."""

    name: str
    meters: I32  # feeders
    feeders: I32  # children that count as load
    racks: I32  # racks that count as load
    inferred: bool  # rests on an edge that was guessed


def balances_of(site: Site) -> list[Balance]:
    """The sums that the topology offers: per group of roots, per parent with children, per rack with taps.

    Racks fed from A and B are shared between roots, so those roots are summed together.
    """
    out: list[Balance] = []
    several = site.sizes["hall"] > 1

    def short(table: str, entity: int) -> str:
        """A name that no other balance has: halls may use the same names for their racks and feeders."""
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
            out.append(Balance(short("rack", rack) + "<taps", direct.astype(np.int32), none,
                               np.array([rack], np.int32),
                               bool(site.inferred_feeder[direct].any())))  # fmt: skip
    return out


def _joined_roots(site: Site) -> list[tuple[I32, I32, bool]]:
    """(roots, the racks they reach, whether an edge below was guessed) of roots that share racks."""
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
    """The items of each group, in their order."""
    order = np.argsort(group, kind="stable")
    groups, first = np.unique(group[order], return_index=True)
    return dict(zip(groups.tolist(), np.split(items[order], first[1:]), strict=True))


class Estimator:
    """Residuals and learned parameters of a site."""

    def __init__(self, site: Site) -> None:
        if site.file.coolant not in COOLANTS:
            raise ConfigError(f"$.coolant: expected one of {', '.join(COOLANTS)}, got {site.file.coolant!r}")
        self.site, self.coolant = site, COOLANTS[site.file.coolant]
        n = site.sizes["rack"]
        self.capture = np.full(n, CAPTURE_PRIOR)
        self.capture_var = np.full(n, CAPTURE_SIGMA**2)
        self.capture_count = np.zeros(n, np.int64)
        self.heat_noise = Noise(
            n, np.full(n, 0.02)
        )  # K; half the last digit of the capture's sensors and more
        self.balances = balances_of(site)
        self.balance_noise = Noise(len(self.balances), np.full(len(self.balances), METER_NOISE_PU))
        self.residuals: dict[str, Residual] = {}
        # Per comparison, the instant of the oldest reading that it rests on: a reading is learned from once.
        self.heat_heard_ns = np.zeros(n, np.int64)
        self.balance_heard_ns = np.zeros(len(self.balances), np.int64)
        self._meter = _incidence([b.meters for b in self.balances])
        self._load_feeder = _incidence([b.feeders for b in self.balances])
        self._load_rack = _incidence([b.racks for b in self.balances])

    def update(self, state: State, dt_s: float, windows: Windows | None = None) -> None:
        """Compare, then learn. Uses only good readings; anything else gives NaN.

        Nothing is learned of racks and balances that are, or contain, what people work at.
        """
        racks = None if windows is None else windows.racks_touched()
        feeders = None if windows is None else windows.mask("feeder")
        self._rack_heat(state, dt_s, racks)
        untouched = None if racks is None and feeders is None else ~self.balances_with(feeders, racks)
        self._power_tree(state, dt_s, untouched)

    def balances_with(self, feeders: Bool | None, racks: Bool | None) -> Bool:
        """Balances of which one of these is a member [n_balance]."""
        out = np.zeros(len(self.balances), np.bool_)
        for (rows, members), chosen in (
            (self._meter, feeders),
            (self._load_feeder, feeders),
            (self._load_rack, racks),
        ):
            if chosen is not None:
                out[rows[chosen[members]]] = True
        return out

    def _good(self, state: State, table: str, name: str) -> tuple[F64, I64]:
        """(good values, NaN elsewhere; instants of the readings)"""
        column = state.tables[table]
        signal = next(s for s in column.signals if s.name == name)
        value = column.value[signal.row].astype(np.float64)
        heard_ns = column.t_ns[column.partition.group_of_row[signal.row]]
        return np.where(column.quality_of(signal, state.now_ns) == GOOD, value, np.nan), heard_ns

    def _rack_heat(self, state: State, dt_s: float, touched: Bool | None) -> None:
        names = ("power_w", "flow_lpm", "supply_temp_c", "return_temp_c")
        (power_w, flow_lpm, supply_c, return_c), heard = zip(
            *(self._good(state, "rack", k) for k in names), strict=True
        )
        heard_ns = np.minimum.reduce(heard)
        fresh, self.heat_heard_ns = heard_ns > self.heat_heard_ns, heard_ns
        rate = heat_rate_w_per_k(self.coolant, flow_lpm, (supply_c + return_c) / 2)
        carried_w = heat_w(self.coolant, flow_lpm, supply_c, return_c)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected_c = supply_c + self.capture * power_w / rate
        usable = np.isfinite(carried_w) & (power_w >= MIN_POWER_W) & (return_c - supply_c >= MIN_RISE_K)
        usable &= flow_lpm >= MIN_FLOW_LPM
        expected_c = np.where(usable, expected_c, np.nan)
        measured_c = np.where(usable, return_c, np.nan)
        sigma = self.heat_noise.sigma()
        difference = measured_c - expected_c
        self.residuals["rack.heat"] = Residual(
            "rack.heat", expected_c, measured_c, sigma, confidence_of(difference, sigma)
        )
        # Scalar Kalman step on carried = capture * power; flow and temperature err by about 2 % of the heat.
        with np.errstate(invalid="ignore"):
            ratio = np.where(usable, carried_w / np.where(usable, power_w, 1.0), self.capture)
        self.capture_var = np.minimum(self.capture_var + CAPTURE_DRIFT_PER_SQRT_S**2 * dt_s, CAPTURE_SIGMA**2)
        learned = usable & fresh if touched is None else usable & fresh & ~touched
        gain = np.where(learned, self.capture_var / (self.capture_var + 0.02**2), 0.0)
        self.capture = np.clip(self.capture + gain * (ratio - self.capture), 0.0, 1.2)
        self.capture_var = (1.0 - gain) * self.capture_var
        self.capture_count += learned
        # While the share is still being found, the difference is not noise.
        settled = learned & (self.capture_count > NOISE_WARMUP)
        self.heat_noise.learn(np.where(settled, difference, np.nan), heard_ns, dt_s)

    def liquid_capture(self) -> F64:
        """Share of each rack's electric power that its liquid carries [n_rack]; NaN while unknown."""
        return np.where(self.capture_count > 0, self.capture, np.nan)

    def _power_tree(self, state: State, dt_s: float, untouched: Bool | None) -> None:
        feeder_w, feeder_ns = self._good(state, "feeder", "power_w")
        rack_w, rack_ns = self._good(state, "rack", "power_w")
        heard_ns = np.full(len(self.balances), np.iinfo(np.int64).max)
        for (rows, members), t_ns in (
            (self._meter, feeder_ns),
            (self._load_feeder, feeder_ns),
            (self._load_rack, rack_ns),
        ):
            np.minimum.at(heard_ns, rows, t_ns[members])
        fresh, self.balance_heard_ns = heard_ns > self.balance_heard_ns, heard_ns
        measured = _sums(self._meter, feeder_w, len(self.balances))
        expected = _sums(self._load_feeder, feeder_w, len(self.balances))
        expected += _sums(self._load_rack, rack_w, len(self.balances))
        with np.errstate(divide="ignore", invalid="ignore"):
            off_pu = np.where(expected > 0, (measured - expected) / expected, np.nan)
        sigma_pu = self.balance_noise.sigma()
        self.residuals["feeder.balance"] = Residual(
            "feeder.balance", expected, measured, sigma_pu * expected, confidence_of(off_pu, sigma_pu)
        )
        if untouched is not None:
            fresh &= untouched
        self.balance_noise.learn(np.where(fresh, off_pu, np.nan), heard_ns, dt_s)

    def tree_residual_pu(self) -> tuple[float | None, bool]:
        """(difference of the outermost complete balances over their load, whether an edge was guessed)."""
        residual = self.residuals.get("feeder.balance")
        if residual is None:
            return None, False
        whole = np.isfinite(residual.measured - residual.expected)
        outer = [
            i
            for i, b in enumerate(self.balances)
            if whole[i] and len(b.racks) and (self.site.parent_of_feeder[b.meters] < 0).all()
        ]
        load = float(sum(residual.expected[i] for i in outer))
        if not outer or load <= 0:
            return None, False
        off = float(sum(residual.measured[i] - residual.expected[i] for i in outer))
        return off / load, any(self.balances[i].inferred for i in outer)

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: what was learned of the old one is not true of it."""
        if table != "rack":
            return
        self.capture[entity], self.capture_var[entity] = CAPTURE_PRIOR, CAPTURE_SIGMA**2
        self.capture_count[entity] = self.heat_heard_ns[entity] = 0
        self.heat_noise.variance[entity] = 0.0
        self.heat_noise.count[entity] = self.heat_noise.off_ns[entity] = 0

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Estimator:
        """What was learned, for a changed site; balances are learned afresh, since their members changed."""
        out = Estimator(site)
        kept = np.flatnonzero(old_of_new["rack"] >= 0)
        source = old_of_new["rack"][kept]
        for name in ("capture", "capture_var", "capture_count"):
            getattr(out, name)[kept] = getattr(self, name)[source]
        out.heat_noise.variance[kept] = self.heat_noise.variance[source]
        out.heat_noise.count[kept] = self.heat_noise.count[source]
        out.heat_noise.off_ns[kept] = self.heat_noise.off_ns[source]
        out.heat_heard_ns[kept] = self.heat_heard_ns[source]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything learned, for a snapshot or a checksum."""
        return {"capture": self.capture, "capture_var": self.capture_var, "capture_count": self.capture_count,
                "heat_heard_ns": self.heat_heard_ns, "balance_heard_ns": self.balance_heard_ns,
                "heat_noise": self.heat_noise.dump(), "balance_noise": self.balance_noise.dump()}  # fmt: skip

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        for name in ("capture", "capture_var", "capture_count", "heat_heard_ns", "balance_heard_ns"):
            setattr(self, name, np.array(data[name]))
        self.heat_noise.restore(data["heat_noise"])
        self.balance_noise.restore(data["balance_noise"])


def _incidence(members: list[I32]) -> tuple[I32, I32]:
    """(row, member) pairs."""
    rows = np.repeat(np.arange(len(members), dtype=np.int32), [len(m) for m in members])
    return rows, np.concatenate([np.zeros(0, np.int32), *members]).astype(np.int32)


def _sums(pairs: tuple[I32, I32], values: F64, n: int) -> F64:
    rows, members = pairs
    return np.bincount(rows, weights=values[members], minlength=n).astype(np.float64)
