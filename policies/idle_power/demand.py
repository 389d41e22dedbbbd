"""Demand reserve: the number of idle GPUs that must stay ready for a rise of demand.

A woken node is ready after the lead time. So the GPUs that are needed within the lead time must be ready now:
the upper band of the demand forecast, plus a reserve. The reserve is a quantile of the excess of demand over
the band that was forecast one lead time before. It is learned from this site alone, and works with any
forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, NS
from twin.contracts import Memory, View, good
from twin.telemetry import ColumnSpec

DEMAND = "site.gpu_demand_count"
LOOK_S = 60.0  # between two instants at which a band is written down, and a rise is looked for
SLOTS = 64  # instants that are kept: leads of up to an hour
LARGEST = 128  # excesses that are kept of each period
PERIOD_S = 28 * 86_400.0  # excesses of this period and of the one before count; source: estimate

COLUMNS = {
    "band_gpus": ColumnSpec("f8", np.nan, trail=(SLOTS,)),  # by the minute, in turn
    "need_gpus": ColumnSpec("f8", np.nan, trail=(SLOTS,)),
    "band_ns": ColumnSpec("i8", trail=(SLOTS,)),
    "excess_gpus": ColumnSpec("f8", -np.inf, trail=(2, LARGEST)),  # the largest, falling; this period's first
    "rises": ColumnSpec("f8", trail=(2,)),
    "period_ns": ColumnSpec("i8"),
    "demand_gpus": ColumnSpec("f8", np.nan),  # at the last look
    "begun_ns": ColumnSpec("i8"),
}


@dataclass(frozen=True, slots=True)
class DemandState:
    """GPUs of the site now: `running`, `pending`; `band`: the most that is forecast to be wanted within the
    lead; `reserve` beyond it. NaN = unknown."""

    running: float
    pending: float
    band: float
    reserve: float

    @property
    def known(self) -> bool:
        """True if the scheduler reports demand now."""
        return math.isfinite(self.running + self.pending)

    @property
    def forecast(self) -> bool:
        """True if a forecast reaches as far as the lead."""
        return math.isfinite(self.band)

    @property
    def need(self) -> float:
        """Idle GPUs that must be ready; without a forecast, the pending ones."""
        if not self.forecast:
            return self.pending
        return max(self.band, self.running + self.pending) - self.running + self.reserve


def demand_state(view: View, memory: Memory, lead_s: float, late_pu: float) -> DemandState:
    """The demand now, and what has to be ready for a share of at most `late_pu` of its rises to come late."""
    running = float(good(view, "site.gpu_running_count")[0])
    pending = float(good(view, "site.gpu_pending_count")[0])
    return DemandState(running, pending, _band(view, lead_s), quantile_of(memory, late_pu))


def _band(view: View, lead_s: float) -> float:
    """The upper end of the forecasts up to the lead and of the next one beyond; NaN where none reaches it."""
    upper = {
        horizon_s: float(forecast.hi[0])
        for (quantity, horizon_s), forecast in view.forecasts.items()
        if quantity == DEMAND and len(forecast.hi) and math.isfinite(float(forecast.hi[0]))
    }
    beyond = min((h for h in upper if h >= lead_s), default=None)
    if beyond is None:
        return math.nan
    return max(upper[h] for h in upper if h <= beyond)


def quantile_of(memory: Memory, late_pu: float) -> float:
    """The excess that at most this share of the rises was beyond, in this period and the one before; the
    largest there was while there were too few."""
    rises = float(memory["rises"][0].sum())
    largest = np.sort(memory["excess_gpus"][0].ravel())[::-1]
    at = min(int(rises * late_pu), LARGEST - 1)
    found = float(largest[at])
    return max(found, 0.0) if math.isfinite(found) else 0.0


def learn(view: View, memory: Memory, state: DemandState, lead_s: float) -> bool:
    """Once a minute: write down the band, and compare a rise with the band of a lead before. Replaces columns
    of `memory`; whether demand rose in this minute."""
    now_ns = view.now_ns
    slot = (now_ns // round(LOOK_S * NS)) % SLOTS
    if now_ns - int(memory["band_ns"][0, slot]) < round(LOOK_S * NS):
        return False
    for name in ("band_gpus", "need_gpus", "band_ns", "demand_gpus", "begun_ns"):
        memory[name] = memory[name].copy()
    demand = state.running + state.pending
    before, memory["demand_gpus"][0] = float(memory["demand_gpus"][0]), demand
    if demand > before:
        then = _then(memory["band_ns"][0], memory["band_gpus"][0], now_ns, lead_s)
        if math.isfinite(then):
            _note_rise(memory, demand - then, now_ns)
    band = max(state.band, demand) if state.known and state.forecast else np.nan
    memory["band_gpus"][0, slot], memory["band_ns"][0, slot] = band, now_ns
    memory["need_gpus"][0, slot] = state.need if state.known else np.nan
    if not memory["begun_ns"][0] and math.isfinite(band):
        memory["begun_ns"][0] = now_ns
    return demand > before


def _then(at_ns: np.ndarray, band: np.ndarray, now_ns: int, lead_s: float) -> float:
    """The band recorded one lead ago, or up to two minutes before that; NaN if none was recorded."""
    age_s = (now_ns - at_ns) / NS
    there = (age_s >= lead_s) & (age_s < lead_s + 2 * LOOK_S)
    return float(band[there][np.argmin(age_s[there])]) if there.any() else math.nan


def _note_rise(memory: Memory, excess: float, now_ns: int) -> None:
    """Count a rise, and keep its excess if it is among the largest."""
    kept, rises, period_ns = (memory[k].copy() for k in ("excess_gpus", "rises", "period_ns"))
    if now_ns - int(period_ns[0]) >= round(PERIOD_S * NS):
        kept[0, 1], kept[0, 0] = kept[0, 0], -np.inf
        rises[0, 1], rises[0, 0], period_ns[0] = rises[0, 0], 0.0, now_ns
    rises[0, 0] += 1.0
    if excess > kept[0, 0, -1]:
        at = int(np.searchsorted(-kept[0, 0], -excess))
        kept[0, 0, at + 1 :] = kept[0, 0, at:-1].copy()
        kept[0, 0, at] = excess
    memory["excess_gpus"], memory["rises"], memory["period_ns"] = kept, rises, period_ns


def need_since(memory: Memory, now_ns: int, hold_s: float) -> float:
    """The most idle GPUs that had to be ready within the last `hold_s`; NaN where that was unknown."""
    lately = now_ns - memory["band_ns"][0] <= round(hold_s * NS)
    needs: F64 = memory["need_gpus"][0][lately]
    return float(needs.max()) if len(needs) and np.isfinite(needs).all() else math.nan
