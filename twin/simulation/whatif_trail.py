"""Trail of a course: a few site-wide curves in a bounded number of points, each the worst of its stretch."""

from __future__ import annotations

import numpy as np

POINTS = 480
# Curve -> what one point says of its stretch. Power is a mean; what is dangerous is at its worst.
CURVES = {
    "hottest_gpu_c": "max",
    "throttled_gpus": "max",
    "it_power_kw": "mean",
    "lowest_flow_lpm": "min",
    "warmest_supply_c": "max",
}


class Trail:
    """Curves over `horizon_s` seconds."""

    def __init__(self, horizon_s: float, points: int = POINTS) -> None:
        self.horizon_s, self.points = horizon_s, points
        self._values = np.full((len(CURVES), points), np.nan)
        self._count = np.zeros(points, np.int64)

    def add(self, time_s: float, *values: float) -> None:
        """Add the present value of each curve, in the order of CURVES; NaN = unknown."""
        at = min(self.points - 1, max(0, int((time_s / self.horizon_s) * self.points - 1e-9)))
        column, n = self._values[:, at], int(self._count[at])
        self._count[at] = n + 1
        for k, (how, value) in enumerate(zip(CURVES.values(), values, strict=True)):
            held = column[k]
            if n == 0 or held != held:
                column[k] = value
            elif how == "mean":
                column[k] = held + (value - held) / (n + 1)
            elif value == value:
                column[k] = max(held, value) if how == "max" else min(held, value)

    def columns(self) -> dict[str, list[float]]:
        """The curves with `time_s`, where there is anything; plain lists."""
        known = np.flatnonzero(self._count)
        step_s = self.horizon_s / self.points
        out = {"time_s": [(k + 1) * step_s for k in known.tolist()]}
        return out | {name: self._values[k, known].tolist() for k, name in enumerate(CURVES)}
