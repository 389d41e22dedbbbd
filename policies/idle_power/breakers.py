"""Breakers at a wake-up: the heat of each feeder's breaker, and the starts that its trip curve allows.

A feeder's breaker is rated for its budget over CONTINUOUS_PU. The heat of its thermal part follows the load,
to which a start adds the draw of a booting node; its magnetic part sees the inrush of the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.node_replacement import LoadLimits
from twin.catalogue import F64, NS
from twin.contracts import Memory, View
from twin.physics import CONTINUOUS_PU, HOLD_PU, MAGNETIC_PU, TAU_S, step, theta_steady
from twin.telemetry import ColumnSpec

# Of the most that a node draws, while its supplies start: they limit it, and have been charged on standby
# before. source: estimate
INRUSH_PU = 5.0
SAFE_PU = 0.8  # of a trip, thermal or magnetic, that starts may bring a breaker to. source: estimate
BOOT_S = 600.0  # that a start lasts. source: estimate
COLUMNS = {"theta": ColumnSpec("f8", np.nan)}  # heat of the breaker, 1 = it trips


@dataclass(frozen=True, slots=True)
class BreakerRoom:
    """Watts that each feeder's breaker still bears: `start_w` for as long as nodes boot, and `inrush_w` at
    the moment that they start [n_feeder]; inf where no rating is known."""

    start_w: F64
    inrush_w: F64


def ratings_w(view: View) -> F64:
    """The ratings of the feeders' breakers [n_feeder]; NaN where a feeder has no budget."""
    out: F64 = np.fmax(view.site.budget_w, view.budget_w()) / CONTINUOUS_PU
    return np.where(out > 0.0, out, np.nan)


def follow_heat(view: View, memory: Memory, limits: LoadLimits, looked_ns: int) -> None:
    """The heat of breakers under the load since the last look. Replaces the column `theta` of `memory`.

    A load that is unknown is taken to be as much as the breaker holds.
    """
    rating = ratings_w(view)
    load_pu = _feeders(limits, limits.now_w) / rating
    load_pu = np.where(np.isfinite(load_pu), load_pu, HOLD_PU)
    before = memory["theta"]
    # One that was never watched is taken to have carried this load for ever
    before = np.where(np.isnan(before), np.minimum(theta_steady(load_pu), 1.0), before)
    seen_s = (view.now_ns - looked_ns) / NS if looked_ns else 0.0
    after = np.minimum(step(before, load_pu, max(seen_s, 0.0)), 1.0)  # it would have tripped
    memory["theta"] = np.where(np.isfinite(rating), after, np.nan)


def breaker_room(view: View, memory: Memory, limits: LoadLimits) -> BreakerRoom:
    """The room of each feeder's breaker now. None for starts where it is hot already."""
    rating, now_w = ratings_w(view), _feeders(limits, limits.now_w)
    theta = np.where(np.isfinite(memory["theta"]), memory["theta"], 1.0)
    keeps = np.exp(-BOOT_S / TAU_S)
    # The load at which the heat is SAFE_PU once the nodes have booted
    aim = np.maximum(SAFE_PU - theta * keeps, 0.0) / (1.0 - keeps)
    most_w = np.where(theta < SAFE_PU, HOLD_PU * np.sqrt(aim) * rating, 0.0)
    known = np.isfinite(rating)
    return BreakerRoom(
        np.where(known, most_w - now_w, np.inf),
        np.where(known, SAFE_PU * MAGNETIC_PU * rating - now_w, np.inf),
    )


def _feeders(limits: LoadLimits, values: F64) -> F64:
    """Of each rack, feeder and CDU, those of the feeders."""
    out: F64 = values[limits.n_rack : limits.n_rack + limits.n_feeder]
    return out
