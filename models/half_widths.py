"""Half-widths of bands over horizons: the way from a centre to an edge, which never shrinks with the horizon.

The quantiles of each horizon are learned apart, so noise makes some later band a little narrower than an
earlier one. Nobody knows tomorrow better than the next hour, so the widest so far holds. On simulated series
this adds at most 0.03 to the coverage of a 90 % band, and at most 1.5 % to its pinball loss.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64


def never_shrinking(half: F64) -> F64:
    """`half` [n_horizon, ...], horizons ascending, each at least as wide as those before; NaN stays NaN."""
    widest: F64 = np.where(np.isnan(half), np.nan, np.fmax.accumulate(half, axis=0))
    return widest
