"""Suspects that leave at once beside suspects that wait for a trough of demand, over weeks of demand.

python -m tests.support.drain_timing_weeks [/path/to/gpu-demand-helios-earth]

Without a recording demand is made up: days, weekends, and noise that lasts for hours. Each suspect is drawn
with a chance of failing, a job and its saves; both arms meet the same one. It leaves at once, or by
`drain_timing`, asked each five minutes with a forecast that knows the past alone. Scored are GPU-hours: those
that jobs miss while the node is out, those that its job waits for another node, and those that failures cost
meanwhile, by their chance.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from policies.node_replacement.costs import QUEUE_SPARE_S, Chances, Delays, Stakes
from policies.node_replacement.drain_timing import STEP_S, DemandCurve, drain_timing
from tests.support.idle_power_month import recorded_demand
from twin.catalogue import F64

HOUR, DAY = 12, 288  # steps
HORIZONS = (1, 3, 12, 36, 72, 144, 288)  # steps ahead that are forecast
NODE_GPUS, REPAIR_S = 8, 24 * 3600.0
LEARNED = 14 * DAY  # steps of history that a forecast looks back at


@dataclass
class TimingScore:
    """GPU-hours of all suspects, and hours that they waited."""

    suspects: int = 0
    waited: int = 0
    missed_gpu_h: float = 0.0
    queued_gpu_h: float = 0.0
    failed_gpu_h: float = 0.0
    waited_h: float = 0.0
    worst_risk_pu: float = 0.0

    @property
    def lost_gpu_h(self) -> float:
        """All together."""
        return self.missed_gpu_h + self.queued_gpu_h + self.failed_gpu_h


def made_up_demand(weeks: int, seed: int, gpus: int = 1000) -> F64:
    """GPUs in demand each five minutes: days, weekends, and noise that lasts for some hours."""
    rng, n = np.random.default_rng(seed), weeks * 7 * DAY
    at = np.arange(n)
    day = np.sin(2 * np.pi * (at / DAY - 0.3)) * 0.15
    weekend = np.where((at // DAY) % 7 >= 5, -0.1, 0.0)
    noise, keep = np.zeros(n), np.exp(-1 / (4 * HOUR))
    steps = rng.normal(0.0, 0.05 * np.sqrt(1 - keep**2), n)
    for i in range(1, n):
        noise[i] = keep * noise[i - 1] + steps[i]
    return np.round(gpus * (0.85 + day + weekend + noise))


def forecast(demand: F64, now: int, there: int) -> DemandCurve:
    """The demand of the same time on the days before, drawn towards that of now; sigma by its own errors."""
    past = demand[now - LEARNED : now + 1]
    usual = past[-1 - DAY * np.arange(1, 14)].mean()
    at, mean, sigma = [0], [demand[now]], [0.0]
    for h in HORIZONS:
        pull = float(np.exp(-h / (6 * HOUR)))
        days = past[-1 - DAY * np.arange(1, 14) + h] if h < DAY else past[-1 - DAY * np.arange(0, 13)]
        at.append(h)
        mean.append(float(days.mean()) + pull * (demand[now] - usual))
        sigma.append(float(days.std()) * np.sqrt(1.0 - pull**2))
    grid = np.arange(HORIZONS[-1] + 1)
    return DemandCurve(grid * STEP_S, np.interp(grid, at, mean), np.interp(grid, at, sigma), there)


def drawn(rng: np.random.Generator) -> tuple[Stakes, Chances]:
    """A suspect: its job, and its chances."""
    busy = bool(rng.random() < 0.7)
    job = NODE_GPUS * int(rng.choice([1, 2, 4, 8, 16])) if busy else NODE_GPUS // 2
    one, no = np.ones(1), np.zeros(1, np.bool_)
    interval = float(rng.uniform(900.0, 7200.0))
    stakes = Stakes(job * one, NODE_GPUS * one, 0.25 * interval * one, np.inf * one, 0.5 * interval * one,
                    60 * one, 60 * one, 600 * one, 1e5 * one, ~no, np.array([busy]), no)  # fmt: skip
    chance = np.array([rng.uniform(0.05, 0.6)])
    return stakes, Chances(-np.expm1(np.log1p(-chance) / 24), chance, np.array([rng.uniform(0.2, 0.9)]))


def leave_after(demand: F64, now: int, there: int, stakes: Stakes, chances: Chances, delays: Delays) -> int:
    """Steps until `drain_timing` lets the suspect go."""
    for waited in range(DAY):
        curve = forecast(demand, now + waited, there)
        found = drain_timing(curve, chances, stakes, np.array([waited * STEP_S]), delays, REPAIR_S)
        if not found.later[0]:
            return waited
    return DAY


def book(
    score: TimingScore, demand: F64, there: int, at: int, waited: int, case: tuple[Stakes, Chances, Delays]
) -> None:
    """Add what a suspect of the instant `at` costs that leaves `waited` steps later."""
    stakes, chances, delays = case
    missed = np.clip(demand - (there - NODE_GPUS), 0, NODE_GPUS) * STEP_S / 3600.0
    sure, left = float(chances.sure_pu[0]), at + waited
    for share, out_s in ((sure, REPAIR_S), (1.0 - sure, delays.test_s)):
        score.missed_gpu_h += share * float(missed[left : left + round(out_s / STEP_S)].sum())
    wait_s = delays.queue_s if demand[left] > there - NODE_GPUS else QUEUE_SPARE_S
    busy = float(stakes.busy[0])
    score.queued_gpu_h += busy * float(stakes.job_gpus[0]) * wait_s / 3600.0
    risk = -np.expm1(np.log1p(-float(chances.day_pu[0])) * waited / DAY)
    fails_s = float(stakes.usual_s[0] + stakes.restart_s[0]) + delays.notice_s
    score.failed_gpu_h += risk * float(stakes.job_gpus[0]) * fails_s / 3600.0
    score.suspects, score.waited = score.suspects + 1, score.waited + (waited > 0)
    score.waited_h += waited / HOUR
    score.worst_risk_pu = max(score.worst_risk_pu, risk)


def played(demand: F64, suspects: int, seed: int, busy_pu: float = 0.8) -> tuple[TimingScore, TimingScore]:
    """(leaving at once, leaving by the forecast) over this demand; the site serves all of it for `busy_pu`
    of the time."""
    rng, delays = np.random.default_rng(seed), Delays()
    there = round(float(np.quantile(demand, busy_pu)))
    once, timed = TimingScore(), TimingScore()
    room = 2 * DAY + round(REPAIR_S / STEP_S)
    for at in sorted(rng.integers(LEARNED, len(demand) - room, suspects).tolist()):
        stakes, chances = drawn(rng)
        case = stakes, chances, delays
        book(once, demand, there, at, 0, case)
        book(timed, demand, there, at, leave_after(demand, at, there, stakes, chances, delays), case)
    return once, replace(timed)


def main() -> None:
    """Play it, and print both scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a recording of Helios' demand")
    parser.add_argument("--suspects", type=int, default=1000)
    parser.add_argument("--weeks", type=int, default=26)
    args = parser.parse_args()
    if args.folder is None:
        demand = made_up_demand(args.weeks, seed=1)
    else:
        minutes = recorded_demand(args.folder)
        known = np.flatnonzero(np.isfinite(minutes))
        demand = np.interp(np.arange(0, len(minutes), STEP_S / 60.0), known, minutes[known])
    for busy_pu in (0.5, 0.8, 0.95):
        for name, score in zip(("at once", "timed"), played(demand, args.suspects, 2, busy_pu), strict=True):
            print(
                f"enough GPUs {busy_pu:.0%} of the time, {name}: {score.lost_gpu_h:,.0f} GPU-h lost; {score}"
            )


if __name__ == "__main__":
    main()
