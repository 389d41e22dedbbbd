"""Figures of a site from sums over a span of time: PUE, TUE, WUE, carbon and cost. NumPy only.

All from energies in J: figures of two spans come from the sums of both, never from means of ratios. NaN where
nothing was used. Imports nothing of ours.
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


def itue(it_j: F64 | float, compute_j: F64 | float) -> F64:
    """IT equipment's energy over that of its chips, boards and links: what its fans and supplies cost.

    Source: Patterson et al., TUE, a new energy-efficiency metric, ISC 2013.
    """
    return _ratio(it_j, compute_j)


def tue(total_j: F64 | float, compute_j: F64 | float) -> F64:
    """Total usage effectiveness, PUE times ITUE: fans and pumps inside racks do not hide; as `itue`."""
    return _ratio(total_j, compute_j)


def wue_l_per_kwh(water_l: F64 | float, it_j: F64 | float) -> F64:
    """Water usage effectiveness, l per kWh of IT equipment; source: ISO/IEC 30134-9."""
    return _ratio(np.asarray(water_l, np.float64) * J_PER_KWH, it_j)


def carbon_g(energy_j: F64 | float, carbon_g_per_kwh: F64 | float) -> F64:
    """Carbon dioxide that this energy stands for, g."""
    return np.asarray(np.asarray(energy_j, np.float64) / J_PER_KWH * carbon_g_per_kwh, np.float64)


def cost_usd(energy_j: F64 | float, price_usd_per_kwh: F64 | float) -> F64:
    """What this energy costs at one price, USD."""
    return np.asarray(np.asarray(energy_j, np.float64) / J_PER_KWH * price_usd_per_kwh, np.float64)
