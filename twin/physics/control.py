"""A PI controller, many at once: limits, a greatest rate, no wind-up. NumPy only; imports nothing of ours.

u = kp e + I, dI/dt = ki e. Against a limit the integral stops where u meets it; while the rate holds u back,
the integral does not run further ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(slots=True)
class PI:
    """State of n controllers; the plant copies it whole. Gains below 0 reverse the action."""

    gain: F64  # kp, output per unit of error [n]
    rate_per_s: F64  # ki, output per unit of error and second [n]
    low: F64
    high: F64
    slew_per_s: F64  # greatest change of the output per second; inf = free
    output: F64
    integral: F64

    @classmethod
    def of(
        cls,
        output: F64,
        gain: F64 | float,
        rate_per_s: F64 | float,
        low: F64 | float = 0.0,
        high: F64 | float = 1.0,
        slew_per_s: F64 | float = np.inf,
    ) -> PI:
        """At rest with this output [n] and no error."""
        shape = output.shape
        full = [
            np.broadcast_to(np.asarray(x, np.float64), shape).copy() for x in (gain, rate_per_s, low, high)
        ]
        slew = np.broadcast_to(np.asarray(slew_per_s, np.float64), shape).copy()
        begin = np.clip(output, full[2], full[3])
        return cls(full[0], full[1], full[2], full[3], slew, begin, begin.copy())

    def step(self, error: F64, dt_s: float) -> F64:
        """The output after `dt_s` with this error (wanted less measured) [n]; where it is NaN, all stays."""
        known = np.isfinite(error)
        e = np.where(known, error, 0.0)
        grown = self.integral + self.rate_per_s * e * dt_s
        wanted = self.gain * e + grown
        bounded = np.clip(wanted, self.low, self.high)
        most = self.slew_per_s * dt_s
        moved = np.clip(bounded, self.output - most, self.output + most)
        # Against a limit the integral gives back what u could not take, never more than it just gained.
        excess = wanted - bounded
        gained = grown - self.integral
        back = np.where(
            excess * gained > 0.0, np.sign(excess) * np.minimum(np.abs(excess), np.abs(gained)), 0.0
        )
        held = (bounded - moved) * gained > 0.0
        integral = np.where(held, self.integral, grown - back)
        self.integral = np.where(known, integral, self.integral)
        self.output = np.where(known, moved, self.output)
        return self.output

    def track(self, output: F64, error: F64) -> None:
        """Go on from `output` [n] without a bump, as after manual operation; NaN leaves that one as it is."""
        known = np.isfinite(output)
        bounded = np.clip(output, self.low, self.high)
        e = np.where(np.isfinite(error), error, 0.0)
        self.output = np.where(known, bounded, self.output)
        self.integral = np.where(known, bounded - self.gain * e, self.integral)
