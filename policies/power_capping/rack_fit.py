"""Rack fit: the number of racks that still fit, by nameplate, by recorded peaks, and at a risk per hour.

Pure: limits, shares and past power in, counts out. The risk is the probability that the load exceeds the
limit of any place within an hour. New racks draw what donor racks drew at the same instants, which preserves
correlation. The interval comes from a block bootstrap over days, since the hours of a day are correlated. If
the history is too short for the risk, only the nameplate counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F64, I64, Bool

MIN_DAYS = 14  # two whole weeks, so that a weekend counts as often as it comes. source: estimate
# No excess in n hours: its chance is below 3/n at 95 %. source: Hanley and Lippman-Hand, JAMA 249, 1983
RULE_OF_THREE = 3.0
MIN_SLOTS_PU = 0.5  # of an hour's slots that must be known for it to count. source: estimate
DRAWS = 24  # sets of donors; each is one possible set of new racks
RESAMPLES = 400  # of days
LOW, HIGH = 0.05, 0.95  # of the interval
MOST_RACKS = 500
SEED = 7
NOBODY = "the site has no rack of this kind to learn from"


class FitPlaces(NamedTuple):
    """Places that would carry a new rack [n_place]: their limit in W, the share of each installed rack
    [n_place, n_rack] and of a new one."""

    limit_w: F64
    share: F64
    new_share: F64


class PowerHistory(NamedTuple):
    """Power in slots of time: the highest in each slot [n_slot, n_rack] (NaN unknown), the hour and day (any
    numbers, ascending) of each slot."""

    power_w: F64
    hour: I64
    day: I64


@dataclass(frozen=True, slots=True)
class RackFit:
    """Racks that fit; None where it cannot be said. `low`..`high` bound `diverse` at 90 %."""

    nameplate: int | None
    peaks: int | None
    diverse: int | None
    low: int | None
    high: int | None
    hours: int
    days: int
    excess_pu: float | None  # share of hours above the limit with no new rack at all
    binds: int  # the place that stops the next rack, by the best of these that is known; -1 = none
    why_not: str  # why only the nameplate counts, or ""


def fit(
    places: FitPlaces, past: PowerHistory | None, nameplate_w: F64, new_w: float, donors: I64, risk_pu: float
) -> RackFit:
    """Compute the number of racks that still fit.

    `nameplate_w` [n_rack] of those that are there, `new_w` of a new one (NaN unknown), `donors`: racks whose
    past a new one takes after, `risk_pu` per hour.
    """
    plate, binds = by_nameplate(places, nameplate_w, new_w)
    if past is not None:  # who never reported teaches nothing
        donors = donors[np.isfinite(past.power_w[:, donors]).any(axis=0)]
    hours, days, kept = known_hours(past, places) if past is not None else (0, 0, np.zeros(0, np.bool_))
    why = _why_not(past, hours, days, donors, risk_pu)
    if why or past is None:
        return RackFit(plate, None, None, None, None, hours, days, None, binds, why or "no history is kept")
    used = PowerHistory(past.power_w[kept], past.hour[kept], past.day[kept])
    donors = donors[np.isfinite(used.power_w[:, donors]).any(axis=0)]
    if not len(donors):
        return RackFit(plate, None, None, None, None, hours, days, None, binds, NOBODY)
    peaks = by_peaks(places, used, donors)
    most = MOST_RACKS if plate is None else min(MOST_RACKS, 4 * plate + 50)
    worst, binds_at = _over(places, used, donors, most)
    diverse, low, high = _at_risk(worst, used, risk_pu)
    if diverse < most:
        binds = int(binds_at[diverse])
    return RackFit(plate, peaks, diverse, low, high, hours, days, float(worst[:, 0].mean()), binds, "")


def by_nameplate(places: FitPlaces, nameplate_w: F64, new_w: float) -> tuple[int | None, int]:
    """(racks that fit if all draw their nameplate at once, the place that stops the next); None: unknown."""
    if not np.isfinite(new_w) or new_w <= 0.0:
        return None, -1
    present = (places.share > 0).any(axis=0)
    if not np.isfinite(nameplate_w[present]).all():
        return None, -1
    there_w = places.share @ np.where(present, nameplate_w, 0.0)
    return _least(places, there_w, new_w)


def by_peaks(places: FitPlaces, past: PowerHistory, donors: I64) -> int:
    """Racks that fit if each new one draws its donors' highest peak while the others' sum is at its own."""
    there_w = _sums(places, past).max(axis=1)
    peak_w = float(np.nanmax(past.power_w[:, donors]))
    count, _ = _least(places, there_w, peak_w)
    return MOST_RACKS if count is None else count


def _least(places: FitPlaces, there_w: F64, each_w: float) -> tuple[int | None, int]:
    bound = np.isfinite(places.limit_w) & (places.new_share > 0)
    if not bound.any() or each_w <= 0.0:
        return None, -1
    room = np.floor((places.limit_w[bound] - there_w[bound]) / (places.new_share[bound] * each_w) + 1e-9)
    at = int(np.argmin(room))
    return int(np.clip(room[at], 0, MOST_RACKS)), int(np.flatnonzero(bound)[at])


def _sums(places: FitPlaces, past: PowerHistory) -> F64:
    """Sum the past power of racks by place [n_place, n_slot]."""
    present = (places.share > 0).any(axis=0)
    return np.asarray(places.share[:, present] @ past.power_w[:, present].T)


def known_hours(past: PowerHistory, places: FitPlaces) -> tuple[int, int, Bool]:
    """(hours that are known well enough, days that they are of, their slots [n_slot])."""
    present = (places.share > 0).any(axis=0)
    known = np.isfinite(past.power_w[:, present]).all(axis=1)
    hour, where, count = np.unique(past.hour, return_inverse=True, return_counts=True)
    usual = float(np.median(count)) if len(hour) else 0.0
    some = np.bincount(where, known, len(hour))
    kept_hour = (some >= MIN_SLOTS_PU * usual) & (some > 0)
    kept: Bool = known & kept_hour[where]
    return int(kept_hour.sum()), len(np.unique(past.day[kept])), kept


def _why_not(past: PowerHistory | None, hours: int, days: int, donors: I64, risk_pu: float) -> str:
    if past is None:
        return "no history is kept"
    if not len(donors):
        return NOBODY
    if days < MIN_DAYS:
        return f"days in the history: {days}; expected {MIN_DAYS} or more"
    if hours * risk_pu < RULE_OF_THREE:
        return f"hours in the history: {hours}; a risk of {risk_pu:g} needs {RULE_OF_THREE / risk_pu:.0f}"
    return ""


def _over(places: FitPlaces, past: PowerHistory, donors: I64, most: int) -> tuple[F64, I64]:
    """(share of the draws in which an hour is above a limit, with 0..most new racks [n_hour, most + 1]; the
    place that is over most often with one rack more [most + 1])."""
    rng = np.random.default_rng(SEED)  # tidy: allow np.random because of a fixed seed
    _, where = np.unique(past.hour, return_inverse=True)
    begin = np.flatnonzero(np.diff(where, prepend=-1))
    bound = np.flatnonzero(np.isfinite(places.limit_w) & (places.new_share > 0))
    # The room, in W of new racks, so that one sum of them serves all places [n_bound, n_slot]
    room_w = (places.limit_w[:, None] - _sums(places, past))[bound] / places.new_share[bound, None]
    tight = room_w.min(axis=0, initial=np.inf)
    n_hour = len(begin)
    over = np.zeros((n_hour, most + 1))
    power_w = past.power_w[:, donors]
    power_w = np.where(np.isfinite(power_w), power_w, np.nanmax(power_w, axis=0))
    over[:, 0] = np.maximum.reduceat(-tight, begin) > 0.0
    stops = np.full((DRAWS, most + 1), -1, np.int64)
    for draw in range(DRAWS):
        sum_w = np.zeros(len(tight))
        for k, donor in enumerate(_donors(rng, len(donors), most)):
            sum_w = sum_w + power_w[:, donor]
            worst = np.maximum.reduceat(sum_w - tight, begin) > 0.0
            over[:, k + 1] += worst / DRAWS
            stops[draw, k] = int(np.argmin(room_w[:, int(np.argmax(sum_w - tight))]))
            if worst.all():  # and so with every rack more
                over[:, k + 2 :] += 1.0 / DRAWS
                break
    place = bound[np.maximum(stops[0], 0)] if len(bound) else np.full(most + 1, -1)
    return np.minimum(over, 1.0), place


def _donors(rng: Any, n: int, most: int) -> I64:
    """The donor of each new rack: each once before any comes again, as two of one would peak together."""
    rounds = -(-most // n)
    return np.concatenate([rng.permutation(n) for _ in range(rounds)])[:most].astype(np.int64)


def _at_risk(over: F64, past: PowerHistory, risk_pu: float) -> tuple[int, int, int]:
    """(most racks at this risk, the same at the low and the high end of resampled days)."""
    _, where = np.unique(past.hour, return_inverse=True)
    begin = np.flatnonzero(np.diff(where, prepend=-1))
    _, day = np.unique(past.day[begin], return_inverse=True)
    n_day = int(day.max()) + 1
    sums = np.zeros((n_day, over.shape[1]))
    np.add.at(sums, day, over)
    hours = np.bincount(day, minlength=n_day).astype(np.float64)
    rng = np.random.default_rng(SEED + 1)  # tidy: allow np.random because of a fixed seed
    weight = rng.multinomial(n_day, np.full(n_day, 1.0 / n_day), RESAMPLES).astype(np.float64)
    each = (weight @ sums) / np.maximum(weight @ hours, 1.0)[:, None]
    counts = np.array([_most(row, risk_pu) for row in each])
    low, high = (int(np.quantile(counts, q, method="inverted_cdf")) for q in (LOW, HIGH))
    return _most(sums.sum(axis=0) / hours.sum(), risk_pu), low, high


def _most(chance: F64, risk_pu: float) -> int:
    """The last count before the chance is above the risk; 0 where even none is too many."""
    above = np.flatnonzero(chance > risk_pu + 1e-12)
    return max(0, int(above[0]) - 1) if len(above) else len(chance) - 1
