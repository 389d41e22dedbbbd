"""Lemons among devices with serials: devices that failed before and would fail again in service.

A device that failed comes before a judge when it would serve again: when its next stay begins, or a day after
a fault that it stayed through. Its score is the number of its faults, fading; the worst are withdrawn, no
more than a budget of the fleet. Beside it stands the oracle, which knows who will fail how often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.lives.life_hazard import SERIAL, LifeHazard
from models.lives.life_log import EPISODE_D, LifeLog
from twin.catalogue import F64, I64


@dataclass(frozen=True)
class Returns:
    """Decisions in order of time: asset, stay, day [k]; its episodes before, and to come [k]."""

    asset: I64
    stay: I64
    day: F64
    before: F64
    later: F64


@dataclass(frozen=True)
class LemonVerdict:
    """Devices withdrawn, how many of them failed again, repeat failures avoided of all, and the oracle's."""

    candidates: int
    withdrawn: int
    failed_again: int
    avoided: int
    repeats: int
    oracle_avoided: int


def returns_of(log: LifeLog, from_d: float, to_d: float) -> Returns:
    """Decisions from one day to before another: devices that failed before and would serve on."""
    at = np.flatnonzero(log.episode)
    asset, day = log.asset[log.stay[at]].astype(np.int64), log.day[at]
    rows = []
    order = np.lexsort((day, asset))
    asset, day, stay_of = asset[order], day[order], log.stay[at][order].astype(np.int64)
    first = np.searchsorted(asset, np.arange(len(log.assets)))
    last = np.searchsorted(asset, np.arange(len(log.assets)), side="right")
    for a, t, stay in zip(asset, day, stay_of, strict=True):
        if log.to_d[stay] > t + EPISODE_D:
            rows.append((max(t + EPISODE_D, from_d), a, stay, t + EPISODE_D < from_d))
    for stay in np.flatnonzero(last[log.asset] > first[log.asset]):
        a, t = int(log.asset[stay]), float(log.from_d[stay])
        if day[first[a]] <= t or (t < from_d and log.to_d[stay] > from_d and day[first[a]] < from_d):
            rows.append((max(t, from_d), a, int(stay), t < from_d))
    rows = [row for row in rows if from_d <= row[0] < to_d and log.to_d[row[2]] > row[0]]
    rows.sort(key=lambda row: row[:3])
    if not rows:
        none = np.zeros(0, np.int64)
        return Returns(none, none, np.zeros(0), np.zeros(0), np.zeros(0))
    t, a, stay = (
        np.array([r[0] for r in rows]),
        np.array([r[1] for r in rows]),
        np.array([r[2] for r in rows]),
    )
    key = asset * 1e7 + day
    before = np.searchsorted(key, a * 1e7 + t, side="right") - first[a]
    return Returns(a, stay, t, before.astype(np.float64), (last - first)[a] - before.astype(np.float64))


def scores(hazard: LifeHazard, found: Returns) -> F64:
    """Faults of each device before the decision, fading as the past of serials does in the hazard [k].

    A lemon fails more often than its like: place and age, which its like share, do not count.
    """
    log = hazard.cells.log
    terms = [held.terms for held in hazard.frailties if held.terms.group == SERIAL]
    half_life_d = terms[0].half_life_d if terms else np.inf
    at = np.flatnonzero(log.episode)
    asset, day = log.asset[log.stay[at]], log.day[at]
    out = np.zeros(len(found.asset))
    for i, (a, t) in enumerate(zip(found.asset, found.day, strict=True)):
        out[i] = (0.5 ** ((t - day[(asset == a) & (day <= t)]) / half_life_d)).sum()
    return out


def withdraw(found: Returns, score: F64, threshold: float, most: int) -> Returns:
    """The decisions at which a device is withdrawn: the first at which its score reaches the threshold."""
    gone: dict[int, int] = {}
    for i in range(len(found.asset)):
        if score[i] >= threshold and int(found.asset[i]) not in gone and len(gone) < most:
            gone[int(found.asset[i])] = i
    at = np.array(sorted(gone.values()), np.int64)
    return Returns(found.asset[at], found.stay[at], found.day[at], found.before[at], found.later[at])


def choose_threshold(found: Returns, score: F64, share: float) -> float:
    """The score that a share of the devices reaches at one of their decisions that is nearest to this share.

    Nearest as a ratio, as many devices may have the same score.
    """
    if not len(score) or share >= 1.0:
        return 0.0
    if share <= 0.0:
        return np.inf
    best = np.zeros(int(found.asset.max()) + 1)
    np.maximum.at(best, found.asset, score)
    ranked = np.sort(best[np.unique(found.asset)])
    value, first = np.unique(ranked, return_index=True)
    reached = 1.0 - first / len(ranked)
    return float(value[np.argmin(np.abs(np.log(reached / share)))])


def judge_lemons(hazard: LifeHazard, train_d: float, fleet: float, budget: float) -> LemonVerdict:
    """Withdraw by a threshold chosen before `train_d`, and count what came after it.

    The threshold is such that as many devices a day as the budget allows after it would have been withdrawn
    before it, among as many decisions.
    """
    log = hazard.cells.log
    past, found = returns_of(log, log.begin_d, train_d), returns_of(log, train_d, log.until_d)
    most = int(budget * fleet)
    pace = most / max(log.until_d - train_d, 1.0)
    # Decisions of the last year before: rates of faults drift.
    recent_d = min(365.0, train_d - log.begin_d)
    late = past.day >= train_d - recent_d
    near = Returns(past.asset[late], past.stay[late], past.day[late], past.before[late], past.later[late])
    share = pace * recent_d / max(len(np.unique(near.asset)), 1)
    gone = withdraw(found, scores(hazard, found), choose_threshold(near, scores(hazard, near), share), most)
    at = np.flatnonzero(log.episode & (log.repeats > 0) & (log.day >= train_d))
    by_asset = np.zeros(len(log.assets))
    np.maximum.at(by_asset, found.asset, found.later)
    return LemonVerdict(
        len(np.unique(found.asset)), len(gone.asset), int((gone.later > 0).sum()), int(gone.later.sum()),
        len(at), int(np.sort(by_asset)[::-1][:most].sum()),
    )  # fmt: skip
