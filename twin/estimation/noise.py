"""Noise of residuals: the learned distance of a reading from its expectation, per row.

A difference that lasts is no noise, so nothing is learned from one that is far off, and one that creeps is
learned slowly: a fault must not become what is normal.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F64, I64, NS, Bool
from twin.telemetry import OWN, EntityState, column

NOISE_MEMORY_S = 600.0  # time constant of the learned noise; source: estimate
# The mean over MEAN_S of a residual that creeps is the fault's, not noise: its square is learned with
# CREEP_S, what is left of a reading beside it with NOISE_MEMORY_S; source: estimate
MEAN_S, CREEP_S = 120.0, 4 * 3600.0
NOISE_WARMUP = 30  # residuals before a noise is called learned; source: estimate
# Beyond so many sigmas for so long it is no noise: nothing is learned from it, lest a fault become normal;
# source: estimate.
FAULT_SIGMAS, FAULT_S = 4.0, 10.0


class ResidualNoise(EntityState):
    """Learned root mean square of residuals, per row [n]: a constant loss is part of the normal state.

    With m the mean after a residual r and m0 before it, (r - m0) (r - m) and m^2 have the sum r^2 in the mean
    over independent residuals (West 1979): both parts together are no smaller than what one memory learns.
    """

    variance: F64 = column(OWN, "f8")  # of both parts
    mean: F64 = column(OWN, "f8")  # of the last residuals
    creeping: F64 = column(OWN, "f8")  # mean square of that
    count: I64 = column(OWN, "i8")
    off_ns: I64 = column(OWN, "i8")  # since when it has been far off; 0 = it is not

    def __init__(self, n: int, floor: F64, table: str = OWN) -> None:
        super().__init__({table: n}, table)
        self.n, self.floor = n, floor

    def sigma(self, rows: slice = slice(None)) -> F64:
        """Return the noise learned so far [n], or of a part; NaN before `NOISE_WARMUP` residuals."""
        learned = np.sqrt(self.variance[rows])
        np.maximum(learned, self.floor[rows], out=learned)
        np.copyto(learned, np.nan, where=self.count[rows] < NOISE_WARMUP)
        return learned

    def readings_left(self) -> I64:
        """Return how many more readings it takes until the noise is learned [n]."""
        return np.maximum(NOISE_WARMUP - self.count, 0)

    def learn(self, difference: F64, received_ns: I64, dt_s: float, rows: slice = slice(None)) -> None:
        """Learn residuals (NaN: none) of readings of `received_ns`; one far off counts as four sigmas.

        With `rows`, both are those of a part of the rows, `dt_s` seconds after that part's turn before.
        """
        kernels.learn_noise(
            difference,
            received_ns,
            self.variance[rows],
            self.mean[rows],
            self.creeping[rows],
            self.count[rows],
            self.off_ns[rows],
            self.floor[rows],
            min(1.0, dt_s / NOISE_MEMORY_S),
            min(1.0, dt_s / MEAN_S),
            min(1.0, dt_s / CREEP_S),
            FAULT_SIGMAS,
            FAULT_S * NS,
            NOISE_WARMUP,
        )

    def lasting(self, received_ns: I64, rows: slice = slice(None)) -> Bool:
        """Return the rows that have deviated for so long that they must not teach."""
        off_ns = self.off_ns[rows]
        return np.asarray((off_ns > 0) & (received_ns - off_ns >= FAULT_S * NS))
