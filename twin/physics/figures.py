"""Efficiency figures of a site from energies over a span of time: PUE, TUE and WUE.

The figure of two spans together comes from the sums of their energies in J, never from the mean of two
ratios. A figure is NaN where nothing was used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
J_PER_KWH = 3.6e6


def _ratio(over: F64 | float, under: F64 | float) -> F64:
    top, bottom = np.broadcast_arrays(np.asarray(over, np.float64), np.asarray(under, np.float64))
    out: F64 = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    return out


def pue(total_j: F64 | float, it_j: F64 | float) -> F64:
    """Power usage effectiveness: all energy over that of the IT equipment; source: ISO/IEC 30134-2."""
    return _ratio(total_j, it_j)


def tue(total_j: F64 | float, compute_j: F64 | float) -> F64:
    """Total usage effectiveness, PUE times ITUE: fans and pumps inside racks do not hide; as `itue`."""
    return _ratio(total_j, compute_j)


def wue_l_per_kwh(water_l: F64 | float, it_j: F64 | float) -> F64:
    """Water usage effectiveness, l per kWh of IT equipment; source: ISO/IEC 30134-9."""
    return _ratio(np.asarray(water_l, np.float64) * J_PER_KWH, it_j)
