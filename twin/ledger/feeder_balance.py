"""Feeder balance: the gains of racks' meters, by the counters of the feeders that carry them together.

One look shows only by how much the meters of a group of racks differ from their roots together. Racks take
more and less at different times, though: over many hours only the right gains make all sums agree. So they
are learned as a Kalman filter does it, hour by hour, beside the gain of the roots with what is lost below
them, and how that grows with the load.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from twin.catalogue import F64, Bool
from twin.ledger.energy_split import COUNTER_PU, LOSS_PU, RootGroups
from twin.ledger.rack_meters import GAIN_PU
from twin.telemetry import EntityState, OldOfNew, column, scalar

WINDOW_S = 3600.0  # of energies that are compared; source: estimate
MOST_RACKS = 64  # of a group; beyond, one rack moves its sum by too little to be identified
DRIFT_PU = 0.0002  # 1 sigma by which a gain moves in a day; source: estimate
FIRST_NOISE_PU, LEAST_NOISE_PU = 0.002, 0.0002  # 1 sigma of a window's balance, of its energy; estimates
NOISE_WINDOWS = 50  # of which the noise is the mean
SURPRISE = 4.0  # sigmas, beyond which a window has another cause
ROOT, LOAD = -2, -1  # places after the racks: gain of the roots, losses that grow with the load
ROOT_PU = float(np.hypot(COUNTER_PU, LOSS_PU))  # 1 sigma of the first, with what is lost at all loads


class LearnedGains(NamedTuple):
    """Relative error of each rack's meter: true energy over metered, less 1, and its sigma [n_rack]."""

    off_pu: F64
    sigma_pu: F64


class FeederBalance(EntityState):
    """Groups of racks below the same roots [g]: gains of the racks in order, of the roots and losses, with
    their covariance; energies of the window that runs.
    """

    rack_j: F64 = column("rack", "f8")
    spoiled: Bool = column("rack", "?")  # something of it was not read in this window
    mean: list[F64] = scalar([])
    covar: list[F64] = scalar([])
    noise_pu2: F64 = scalar(np.zeros(0))
    windows: F64 = scalar(np.zeros(0))
    root_j: F64 = scalar(np.zeros(0))
    usual_j: F64 = scalar(np.zeros(0))  # mean energy of a window
    window_s: float = scalar(0.0)

    def __init__(self, groups: RootGroups) -> None:
        super().__init__(groups.site.sizes)
        self._groups, n = groups, groups.n
        racks = [np.flatnonzero(groups.of_rack == g) for g in range(n)]
        roots = [groups.roots[groups.of_root == g] for g in range(n)]
        # A rack with roots of its own is compared with them in each look; a large group identifies no rack
        fits = [2 <= len(a) <= MOST_RACKS and len(b) > 0 for a, b in zip(racks, roots, strict=True)]
        self._racks = [a if ok else a[:0] for a, ok in zip(racks, fits, strict=True)]
        self._roots = roots
        self.mean = [np.zeros(len(a) + 2 if len(a) else 0) for a in self._racks]
        self.covar = [np.diag(_prior_pu(len(a)) ** 2) if len(a) else np.zeros((0, 0)) for a in self._racks]
        self.noise_pu2, self.windows = np.full(n, FIRST_NOISE_PU**2), np.zeros(n)
        self.root_j, self.usual_j = np.zeros(n), np.zeros(n)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Restart for another site, whose groups differ."""

    def forget(self, table: str, entity: int) -> None:
        """Forget a replaced meter: its gain is unknown, and the window is incomplete."""
        super().forget(table, entity)
        for g, (racks, roots) in enumerate(zip(self._racks, self._roots, strict=True)):
            if table == "rack" and entity in racks:
                self._reset(g, int(np.searchsorted(racks, entity)))
            elif table == "feeder" and len(racks) and entity in roots:
                self._reset(g, ROOT)

    def _reset(self, g: int, at: int) -> None:
        self.mean[g][at] = 0.0
        self.covar[g][at, :] = self.covar[g][:, at] = 0.0
        self.covar[g][at, at] = _prior_pu(len(self._racks[g]))[at] ** 2
        self.spoiled[self._racks[g]] = True

    def observe(self, rack_j: F64, whole: Bool, root_j: F64, root_whole: Bool, span_s: float) -> None:
        """Add a look: energies of racks by their meters, of feeders by their counters; `whole`: all of it was
        read [n_rack], [n_feeder].
        """
        self.rack_j += rack_j
        self.spoiled |= ~whole
        self.window_s += span_s
        for g, roots in enumerate(self._roots):
            self.root_j[g] += float(root_j[roots].sum())
        if self.window_s < WINDOW_S:
            return
        for g, (racks, roots) in enumerate(zip(self._racks, self._roots, strict=True)):
            complete = root_whole[roots].all() and self.root_j[g] > 0.0
            if len(racks) and complete and not self.spoiled[racks].any():
                self._learn(g, self.rack_j[racks], float(self.root_j[g]))
            # A later reading of a counter adds the energy of this window to the next one
            self.spoiled[racks] = not root_whole[roots].all()
        self.rack_j[:], self.root_j[:], self.window_s = 0.0, 0.0, 0.0

    def _learn(self, g: int, rack_j: F64, root_j: float) -> None:
        """Learn from one window of a group: gains and losses make the difference of roots and racks."""
        self.windows[g] += 1.0
        self.usual_j[g] += (root_j - self.usual_j[g]) / min(self.windows[g], float(NOISE_WINDOWS))
        row = np.append(rack_j / root_j, (1.0, root_j / self.usual_j[g] - 1.0))
        off_pu = (root_j - float(rack_j.sum())) / root_j - float(row @ self.mean[g])
        covar = self.covar[g]
        covar[np.diag_indices(len(rack_j) + 1)] += DRIFT_PU**2 * WINDOW_S / 86_400.0
        known_pu2 = float(row @ covar @ row)
        noise_pu2 = max(float(self.noise_pu2[g]), LEAST_NOISE_PU**2)
        step_pu2 = min(off_pu**2, SURPRISE**2 * (known_pu2 + noise_pu2))
        self.noise_pu2[g] += (step_pu2 - self.noise_pu2[g]) / min(self.windows[g] + 1.0, float(NOISE_WINDOWS))
        if off_pu**2 > SURPRISE**2 * (known_pu2 + noise_pu2):
            return
        gain = covar @ row / (known_pu2 + noise_pu2)
        self.mean[g] += gain * off_pu
        covar -= np.outer(gain, row @ covar)
        self.covar[g] = 0.5 * (covar + covar.T)

    def gains(self) -> LearnedGains:
        """Return the errors of racks' meters as known now; of their class where nothing was learned.

        Errors that no meter of its class has are of something else, such as a wrong meter or a rack that is
        not listed: then those of all its group are not known.
        """
        n = len(self.rack_j)
        off, sigma = np.zeros(n), np.full(n, GAIN_PU)
        for g, racks in enumerate(self._racks):
            if len(racks) and (np.abs(self.mean[g]) <= SURPRISE * _prior_pu(len(racks))).all():
                off[racks] = self.mean[g][:ROOT]
                var = np.diag(self.covar[g])[:ROOT]
                sigma[racks] = np.minimum(np.sqrt(np.maximum(var, 0.0)), GAIN_PU)
        return LearnedGains(off, sigma)


def _prior_pu(racks: int) -> F64:
    """Return the prior 1 sigma of the parameters of a group."""
    return np.array([GAIN_PU] * racks + [ROOT_PU, LOSS_PU])
