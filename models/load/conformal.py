"""Conformal edges: adaptive conformal inference for each edge of each band.

An edge is as far from the median as it was said to be, times a factor that grows after each outcome beyond
the edge and shrinks after each within (Gibbs and Candes, NeurIPS 2021; as a tracker of a quantile:
Angelopoulos, Candes and Tibshirani, NeurIPS 2023). So the share beyond comes out right in the long run,
whatever the series does.
"""

from __future__ import annotations

import numpy as np

from models.load.forecaster import LEVELS, MEDIAN
from twin.catalogue import F64

LEVEL = np.array(LEVELS)[:, None]
SIDE = np.sign(LEVEL - 0.5)
TAIL = np.minimum(LEVEL, 1.0 - LEVEL)  # share of outcomes that should lie beyond an edge
# Independent outcomes in which an edge finds its place: fewer make it restless, more let coverage drift with
# the series. source: tuned on synthetic series
MEMORY = 200.0
# Share beyond a normal quantile z that its logarithm moves: z times the density at z.
SLOPE = np.array([0.0372, 0.1696, 0.2143, np.inf, 0.2143, 0.1696, 0.0372])[:, None]
WIDEST = 3.0  # bound of a logarithm, a factor of 20 either way. source: estimate
# Share of the 99 % band, and of the lattice's step, by which an edge on the median is thought to be off it,
# so that a factor can move it. source: estimate
ROOM, ROOM_LATTICE = 0.05, 0.25
# Share beyond the edges that come back to a series that sits still. The 90 % band stays where ties, fairly
# counted, leave 90 % in it, at some cost in pinball loss. source: estimate
OUTERMOST = 0.01


def tail_shares(actual: F64, said: F64) -> F64:
    """Share of an outcome `actual` [n] beyond each quantile `said` [n_level, n], outward; NaN without either.

    An outcome on a quantile counts by the randomised probability integral transform in expectation (Czado,
    Gneiting and Held, Biometrics 65, 2009): it is spread evenly over the levels between its neighbours.
    """
    below, above = said < actual, said > actual
    low = np.where(below, LEVEL, 0.0).max(axis=0)
    high = np.where(above, LEVEL, 1.0).min(axis=0)
    part = (high - LEVEL) / (high - low)
    np.maximum(part, 0.0, out=part)
    np.minimum(part, 1.0, out=part)
    tied = ~(below | above).all(axis=0)
    over = np.where(tied, part, below)
    out: F64 = np.where(SIDE > 0.0, over, 1.0 - over)
    out += np.where(np.isfinite(actual + said[0] + said[-1]), 0.0, np.nan)
    return out


class Conformal:
    """State: `log_width` [n_level, n], logarithms of the factors. `share` is what one outcome counts.

    An edge finds its place in `memory` independent outcomes.
    """

    def __init__(self, n: int, share: float, memory: float = MEMORY) -> None:
        self.log_width = np.zeros((len(LEVELS), n))
        self._step = share / (memory * SLOPE)

    def moved(self, median: F64, curve: F64, quantum: F64, wider: F64 | float = 0.0) -> F64:
        """`curve` [n_level, n] with its edges in their places, in order and round `median` [n].

        quantum [n]: step of the series' lattice, 0 if continuous. wider [n_level, n] adds to the logarithms.
        """
        room = ROOM * (curve[-1] - curve[0]) + ROOM_LATTICE * quantum
        width = (curve - median) * SIDE
        np.maximum(width, 0.0, out=width)
        width += room
        width *= np.exp(self.log_width + wider)
        width -= room
        width[MEDIAN] = 0.0
        np.maximum(width, 0.0, out=width)
        # An inner edge that moved past an outer one takes it along.
        upper, lower = width[MEDIAN:], width[MEDIAN::-1]
        np.maximum.accumulate(upper, axis=0, out=upper)
        np.maximum.accumulate(lower, axis=0, out=lower)
        width *= SIDE
        width += median
        return width

    def learn(self, actual: F64, said: F64) -> None:
        """The outcome [n], NaN where there is none, of quantiles `said` [n_level, n]."""
        step = tail_shares(actual, said)
        # An outer edge on the median that is met could not lie better. Spread over the levels, such an
        # outcome says nothing, so that a few moves would push the edge out for good: let it come back.
        met = (said == said[MEDIAN]) & (said == actual) & (TAIL <= OUTERMOST) & (self.log_width > 0.0)
        step[met] = 0.0
        step -= TAIL
        step *= self._step
        step[~np.isfinite(step)] = 0.0
        self.log_width += step
        np.minimum(self.log_width, WIDEST, out=self.log_width)
        np.maximum(self.log_width, -WIDEST, out=self.log_width)
