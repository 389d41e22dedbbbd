"""Weather of a simulated site: a daily swing, and fronts that pass in half a day.

A closed form in time and seed, so that it needs no state and every fork has the same weather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twin.catalogue import F64

WARMEST_S = 54_000.0  # three in the afternoon; source: estimate
DAY_S = 86_400.0
# Saturation pressure rises by about 6.4 % per kelvin, so does the humidity of the same air fall; from
# Magnus's formula near 15 degC
HUMIDITY_PER_K = 0.064
FRONT_S = (20_000.0, 130_000.0)  # shortest and longest wave of fronts; source: estimate
WAVES = 6
DRIEST_PU = 0.05


@dataclass(frozen=True)
class Weather:
    """Outdoor air. `begin_s` is the time of day when the plant begins; `rh_pu` holds at `mean_c`.

    `swing_k` is half of the daily range, `fronts_k` the standard deviation of what fronts add; both 0: the
    weather stays as it is.
    """

    mean_c: float = 16.0
    swing_k: float = 6.0
    rh_pu: float = 0.55
    begin_s: float = 36_000.0
    fronts_k: float = 0.0
    seed: int = 0

    def at(self, time_s: float) -> tuple[float, float]:
        """Return (dry bulb in degC, relative humidity) at a time since the plant's begin."""
        warm_k = 0.0
        if self.swing_k:
            phase = 2.0 * np.pi * (time_s + self.begin_s - WARMEST_S) / DAY_S
            warm_k = self.swing_k * float(np.cos(phase))
        if self.fronts_k:
            rate, phases = self._waves
            warm_k += self.fronts_k * float(np.sqrt(2.0 / WAVES) * np.sin(rate * time_s + phases).sum())
        humid = self.rh_pu * float(np.exp(-HUMIDITY_PER_K * warm_k))
        return self.mean_c + warm_k, min(max(humid, DRIEST_PU), 1.0)

    @cached_property
    def _waves(self) -> tuple[F64, F64]:
        """Return (angular rates in 1/s, phases) of the fronts."""
        rng = np.random.default_rng([self.seed, 5])
        period_s = np.exp(rng.uniform(np.log(FRONT_S[0]), np.log(FRONT_S[1]), WAVES))
        return 2.0 * np.pi / period_s, rng.uniform(0.0, 2.0 * np.pi, WAVES)
