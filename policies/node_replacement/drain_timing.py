"""Drain timing: a suspect that is not urgent leaves in a trough of demand, if its hazard allows the wait.

Each instant within reach of the forecast of demand is weighed by three figures: GPU-hours that jobs will miss
while the node is out, GPU-hours that its own job waits for another node, and those that a failure costs
meanwhile. The wait ends at the latest when the chance of a failure since the suspicion reaches RISK_PU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policies.node_replacement.costs import QUEUE_SPARE_S, SPARE_PU, WORTH, Chances, Delays, Stakes
from policies.node_replacement.spare_count import DEMAND, gpus_in_service
from twin.catalogue import F64
from twin.contracts import View, good

HOUR_S, DAY_S = 3600.0, 86_400.0
STEP_S = 300.0  # between the instants that are weighed, and the shortest wait
# A wait ends before the node has failed with this chance since it became a suspect, and after so long in any
# case. source: estimate
RISK_PU, MOST_WAIT_S = 0.05, 12 * HOUR_S
LEAST_GAIN_H = 0.1  # hours of the node's own GPUs that a wait has to save. source: estimate
BAND_SIGMA = 2 * 1.645  # standard deviations from one end of a band of 0.9 to the other


@dataclass(frozen=True, slots=True)
class DemandCurve:
    """GPUs in demand from now on: `mean` and standard deviation `sigma` at `at_s` [m], and the GPUs that are
    `there`, spares apart. Beyond the last instant demand is as it is on average."""

    at_s: F64
    mean: F64
    sigma: F64
    there: int

    def missed_pu(self, gpus: F64) -> F64:
        """Return the chance that jobs miss `gpus` [k] of a node, at each `at_s` [k, m]."""
        over = self.there - gpus[:, None] - self.mean
        z = over / np.maximum(self.sigma, 1e-9) / math.sqrt(2.0)
        erfc: F64 = np.vectorize(math.erfc, otypes=[float])(z)
        return 0.5 * erfc


@dataclass(frozen=True, slots=True)
class DrainTiming:
    """Of k nodes: the best time to leave from now on, the latest that the hazard permits (both s), and the
    GPU-hours that the wait saves after its risk; `later`: the wait pays."""

    leave_s: F64
    latest_s: F64
    gain_gpu_h: F64
    later: np.ndarray


def demand_curve(view: View) -> DemandCurve | None:
    """Return the forecast demand; None without a forecast, or if the present demand is unknown."""
    now = sum(float(good(view, f"site.gpu_{state}_count")[0]) for state in ("running", "pending"))
    found = sorted(
        (h, float(f.mean[0]), float(f.lo[0]), float(f.hi[0]))
        for (key, h), f in view.forecasts.items()
        if key == DEMAND and len(f.mean)
    )
    found = [row for row in found if all(map(math.isfinite, row))]
    if not found or not math.isfinite(now):
        return None
    at_s, mean, low, high = np.array([(0.0, now, now, now), *found]).T
    grid = np.arange(0.0, at_s[-1] + 1.0, STEP_S)
    sigma = np.interp(grid, at_s, np.maximum(high - low, 0.0)) / BAND_SIGMA
    return DemandCurve(grid, np.interp(grid, at_s, mean), sigma, gpus_in_service(view))


def drain_timing(
    curve: DemandCurve, chances: Chances, at: Stakes, waited_s: F64, delays: Delays, repair_s: float
) -> DrainTiming:
    """Return the best time for each of k nodes to leave. `waited_s` [k]: time since it became a suspect."""
    sizes, row = np.unique(at.node_gpus, return_inverse=True)
    missed_of = curve.missed_pu(sizes)
    missed = missed_of[row]
    hour, rest = _rates(chances)
    risk = -np.expm1(-_hazard(hour, rest, curve.at_s))
    # Of the job, what a failure costs beyond a planned stop is no less than its work and the notice
    fails_s = np.maximum(at.lost_s, at.usual_s) + delays.notice_s + at.restart_s + delays.queue_s
    risk_gpu_s = risk * (at.job_gpus * fails_s)[:, None]
    queue_s = np.where(at.busy & ~at.spare, max(delays.queue_s - QUEUE_SPARE_S, 0.0), 0.0)
    saved_gpu_s = (at.job_gpus * queue_s)[:, None] * (missed[:, :1] - missed)
    sure = np.clip(np.nan_to_num(chances.sure_pu), 0.0, 1.0)
    used = at.node_gpus * np.where(at.spare, SPARE_PU, 1.0)
    for share, out_s in ((sure, repair_s), (1.0 - sure, delays.test_s)):
        saved_gpu_s = saved_gpu_s + (share * used)[:, None] * _shifted(curve.at_s, missed_of, out_s)[row]
    gain = WORTH * saved_gpu_s - risk_gpu_s
    latest_s = _permitted_s(hour, rest, waited_s)
    gain[curve.at_s > latest_s[:, None]] = -np.inf
    gain[:, 0] = 0.0
    best = np.argmax(gain, axis=1)
    found = gain[np.arange(len(best)), best] / HOUR_S
    later = (best > 0) & (found > LEAST_GAIN_H * at.node_gpus)
    return DrainTiming(curve.at_s[best], latest_s, found, later)


def _shifted(at_s: F64, missed: F64, out_s: float) -> F64:
    """Seconds of the node that jobs miss less, if it is out for `out_s` from each instant on and not from now
    on [k, m]; beyond the forecast they miss as much as on average."""
    span = np.diff(at_s)
    sums = np.cumsum(0.5 * (missed[:, 1:] + missed[:, :-1]) * span, axis=1)
    until = np.concatenate([np.zeros((len(missed), 1)), sums], axis=1)  # missed from now to each instant
    mean = until[:, -1:] / max(float(at_s[-1]), 1.0)

    def missed_s(instant_s: F64) -> F64:
        inside = np.stack([np.interp(instant_s, at_s, row) for row in until])
        out: F64 = inside + mean * np.maximum(instant_s - at_s[-1], 0.0)
        return out

    return until - (missed_s(at_s + out_s) - missed_s(np.array([out_s])))


def _hazard(hour: F64, rest: F64, until_s: F64) -> F64:
    """Return the hazard from now until each instant [k, m]."""
    early = np.minimum(until_s, HOUR_S)
    out: F64 = hour[:, None] * early + rest[:, None] * (until_s - early)
    return out


def _permitted_s(hour: F64, rest: F64, waited_s: F64) -> F64:
    """Return the time from now until the chance of a failure since the suspicion is RISK_PU [k].

    The time that has passed counts by the rate of the next hour, which is the greater one. Without a rate
    nothing is permitted.
    """
    left = np.maximum(-math.log1p(-RISK_PU) - hour * waited_s, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = left / hour
        after = HOUR_S + (left - hour * HOUR_S) / rest
    out = np.where(first <= HOUR_S, first, np.nan_to_num(after, nan=0.0, posinf=MOST_WAIT_S))
    return np.where(
        hour > 0.0, np.clip(np.nan_to_num(out), 0.0, np.maximum(MOST_WAIT_S - waited_s, 0.0)), 0.0
    )


def _rates(chances: Chances) -> tuple[F64, F64]:
    """Failures per second in the first hour and in the rest of a day [k]; where the day shows no more than
    the hour, its rate goes on."""
    day = -np.log1p(-np.clip(np.nan_to_num(chances.day_pu), 0.0, 1.0 - 1e-9))
    hour = -np.log1p(-np.clip(np.nan_to_num(chances.hour_pu), 0.0, 1.0 - 1e-9))
    hour = np.maximum(hour, day * HOUR_S / DAY_S)
    return hour / HOUR_S, np.where(day > hour, (day - hour) / (DAY_S - HOUR_S), hour / HOUR_S)
