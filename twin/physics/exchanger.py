"""Counterflow heat exchanger: effectiveness from NTU, and back.

eps = (1 - e^(-N (1 - C)))/(1 - C e^(-N (1 - C))), N = UA/C_min, C = C_min/C_max. Written here with
f = (1 - e^(-N (1 - C)))/(1 - C), so that eps = 1/(1/f + C): smooth through C = 1, where f = N.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

FLOW_EXPONENT = 0.8  # of a film's conductance in turbulent flow (Dittus and Boelter)
PRIMARY_SHARE = 0.5  # of the clean resistance, on the primary side at nominal flows; source: estimate


@dataclass(frozen=True, slots=True)
class Transfer:
    """Heat transferred and outlet temperatures, [n] each."""

    heat_w: F64  # from warm to cold; below 0 if "warm" comes in colder
    warm_out_c: F64
    cold_out_c: F64
    effectiveness: F64


def effectiveness(ntu: F64, capacity_ratio: F64) -> F64:
    """Heat over the greatest possible heat, [n] in 0..1; `ntu` 0..inf, `capacity_ratio` 0..1."""
    unmixed = 1.0 - capacity_ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        x = ntu * unmixed
        f = np.where(unmixed == 0.0, ntu, np.where(x == 0.0, ntu, -np.expm1(-x) / unmixed))
        eps: F64 = 1.0 / (1.0 / f + capacity_ratio)
    return eps


def effectiveness_slope(eps: F64, capacity_ratio: F64) -> F64:
    """d eps/d NTU, [n]: (1 - eps)(1 - C eps), exact for counterflow."""
    return (1.0 - eps) * (1.0 - capacity_ratio * eps)


def ntu_of(eps: F64, capacity_ratio: F64) -> F64:
    """The inverse of `effectiveness`, [n]; inf at eps = 1, NaN outside 0..1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        f = eps / (1.0 - capacity_ratio * eps)
        y = f * (1.0 - capacity_ratio)
        ntu = np.where(y == 0.0, f, -np.log1p(-np.minimum(y, 1.0)) / y * f)
    return np.where((eps >= 0.0) & (eps <= 1.0), np.where(eps == 1.0, np.inf, ntu), np.nan)


def film_factor(primary_ratio: F64, secondary_ratio: F64) -> F64:
    """Clean resistance over that at nominal flows, [n]: what UA is divided by; inf without flow."""
    with np.errstate(divide="ignore"):
        factor: F64 = (
            PRIMARY_SHARE * np.maximum(primary_ratio, 0.0) ** -FLOW_EXPONENT
            + (1.0 - PRIMARY_SHARE) * np.maximum(secondary_ratio, 0.0) ** -FLOW_EXPONENT
        )
    return factor


def transfer(ua: F64, warm_w_per_k: F64, cold_w_per_k: F64, warm_in_c: F64, cold_in_c: F64) -> Transfer:
    """Heat and outlets of two streams, W/K each (below 0 counts as no flow), through `ua`, W/K; all [n].

    Without flow on one side no heat comes across and that side stands at the other's inlet: the limit of ever
    smaller flow. Without flow on both, nothing changes.
    """
    warm, cold = np.maximum(warm_w_per_k, 0.0), np.maximum(cold_w_per_k, 0.0)
    least, most = np.minimum(warm, cold), np.maximum(warm, cold)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(most == 0.0, 0.0, least / most)
        ntu = np.where(least == 0.0, np.where(most == 0.0, 0.0, np.inf), ua / least)
    eps = effectiveness(ntu, ratio)
    approach_k = warm_in_c - cold_in_c
    warm_side = np.where(warm <= cold, eps, eps * ratio)
    cold_side = np.where(warm <= cold, eps * ratio, eps)
    return Transfer(
        heat_w=eps * least * approach_k,
        warm_out_c=warm_in_c - warm_side * approach_k,
        cold_out_c=cold_in_c + cold_side * approach_k,
        effectiveness=eps,
    )


def ua_of(heat_w: F64, warm_w_per_k: F64, cold_w_per_k: F64, warm_in_c: F64, cold_in_c: F64) -> F64:
    """Conductance that a measured heat speaks for, W/K [n]: the inverse of `transfer`.

    NaN where no conductance gives this heat: more than the greatest possible, against the temperatures, or
    without flow or difference. How sure it is: `heat_slope_k`.
    """
    least, most = np.minimum(warm_w_per_k, cold_w_per_k), np.maximum(warm_w_per_k, cold_w_per_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        eps = heat_w / (least * (warm_in_c - cold_in_c))
        ua: F64 = least * ntu_of(eps, least / most)
    return np.where((least > 0.0) & (ua < np.inf), ua, np.nan)


def heat_slope_k(ua: F64, warm_w_per_k: F64, cold_w_per_k: F64, warm_in_c: F64, cold_in_c: F64) -> F64:
    """d heat/d UA, W per W/K [n]: near 0 the heat says nothing about the conductance. 0 without flow."""
    least, most = np.minimum(warm_w_per_k, cold_w_per_k), np.maximum(warm_w_per_k, cold_w_per_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = least / most
        eps = effectiveness(ua / least, ratio)
    slope = effectiveness_slope(eps, ratio) * (warm_in_c - cold_in_c)
    return np.where(least > 0.0, slope, 0.0 * (warm_in_c - cold_in_c))
