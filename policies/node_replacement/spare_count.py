"""Spare count: the number of spares a site needs, so that rarely more nodes are out than there are spares.

Nodes leave at random and return when they are repaired, each on its own: the number that is out follows the
law of an M/G/inf queue, Poisson with the rate times the mean repair time, for any distribution of repair
times. Where the rate is a Gamma belief, the law is the negative binomial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from policies.checkpointing import DAY_S, nearest_forecast, rate_per_s, spread_of
from twin.catalogue import F64, NS
from twin.contracts import View, is_failure

SHORT_PU = 0.01  # chance of more nodes out than spares that is accepted. source: estimate
LARGE_PU = 1e-4  # below which the pool is larger than it need be. source: estimate
MOST_OUT = 200_000  # nodes for which the law is looked at
SWING = 0.1  # of the expected number that is out, within which nothing changes. source: estimate
SERVICE = "node.service_level"
DEMAND = "site.gpu_demand_count"
AHEAD_S = 21_600.0  # of the forecast of demand that counts. source: estimate
DAY_H = 24.0
# Median and mean hours of repair where no failure of this site is mended yet. source: gpu-server-faults
# trace, domain.md C
REPAIR_H = (20.0, 133.0)
LEAST_REPAIRS = 5
LEAST_H = 0.01  # nothing is mended sooner, whatever a log says. source: estimate


class DemandAhead(NamedTuple):
    """Maximum expected demand in `gpus`, its time, and the number `there` beside the spares."""

    gpus: float
    horizon_s: float
    there: int

    @property
    def short(self) -> bool:
        """True if jobs will wait for GPUs."""
        return self.gpus > self.there


@dataclass(frozen=True, slots=True)
class SparePool:
    """Wanted and present spares, True if they are too few, and the chance that they run out."""

    wanted: int
    have: int
    short: bool
    chance_short_pu: float
    sentence: str
    mean_out: float = 0.0
    large: bool = False


def spare_pool_of(view: View) -> SparePool | None:
    """The spares that the forecast failures and the repairs of this site ask for now; None without a
    forecast."""
    per_day = per_day_of(view)
    if per_day is None:
        return None
    pool = spare_pool(view, per_day, repair_h(view), int(np.count_nonzero(view.site.spare_node)))
    found = demand_ahead(view)
    if found is None:
        return pool
    text = f"{found.gpus:,.0f} GPUs are expected to be in demand within {found.horizon_s / 3600.0:g} h"
    text += f", {found.there:,} are there beside the spares"
    more = f"{text}: no more spares than that are kept" if found.short else text
    return replace(pool, sentence=f"{pool.sentence} {more}.")


def wanted_band(view: View) -> tuple[int, int] | None:
    """(the fewest spares that will do, the most that are reasonable), never more than there are, nor than
    other nodes; None without a forecast. Between them a forecast may swing."""
    per_day = per_day_of(view)
    if per_day is None:
        return None
    median, mean = repair_h(view)
    out, shape = per_day * max(median, mean) / DAY_H, common_shape(view)
    spares = int(np.count_nonzero(view.site.spare_node))
    most = min(spares, len(view.site.spare_node) - spares)
    low, high = (min(_first(tail_pu(out * x, shape), SHORT_PU), most) for x in (1.0 - SWING, 1.0 + SWING))
    wanted = demand_ahead(view)
    # Where jobs will wait for GPUs, a spare beyond what failures ask for is theirs
    return low, low if wanted is not None and wanted.short else high


def demand_ahead(view: View) -> DemandAhead | None:
    """Return the GPUs expected to be in demand within AHEAD_S; None without a forecast."""
    horizons = [h for key, h in view.forecasts if key == DEMAND and h <= AHEAD_S]
    means = [float(view.forecasts[DEMAND, h].mean[0]) for h in horizons]
    found = max(((m, h) for m, h in zip(means, horizons, strict=True) if math.isfinite(m)), default=None)
    if found is None:
        return None
    return DemandAhead(found[0], found[1], gpus_in_service(view))


def gpus_in_service(view: View) -> int:
    """Return the GPUs of the nodes that take jobs, without spares."""
    level = np.fmax(view.readback(SERVICE), view.commanded(SERVICE))
    there = ~view.site.spare_node & ~(level >= 1.0)
    return int(np.diff(view.site.gpu_start_of_node)[there].sum())


def per_day_of(view: View) -> float | None:
    """Return the nodes of the site that are forecast to leave within a day; None without a forecast.

    A node that fails repeatedly is out only once at a time, so that a suspect counts for no more than one
    node. Nodes that are out already count like the others.
    """
    best = nearest_forecast(view, DAY_S)
    if best is None:
        return None
    each = np.asarray(best.mean, np.float64) * DAY_S / best.horizon_s
    level = np.fmax(view.readback(SERVICE), view.commanded(SERVICE))
    with np.errstate(invalid="ignore"):
        each = np.where(level >= 1.0, np.nan, each)
    known = np.isfinite(each)
    if not known.any():
        return None
    turn_d = max(*repair_h(view), LEAST_H) / DAY_H
    away = np.maximum(each[known], 0.0) * turn_d
    usual = float(np.median(each[known]))
    return float((away / (1.0 + away)).sum()) / turn_d + usual * int(np.count_nonzero(level >= 1.0))


def repair_h(view: View) -> tuple[float, float]:
    """Return (median, mean) hours of a repair: of this site, once it had enough."""
    log = view.failures()
    mended = is_failure(log) & (log.end_ns > 0)
    hours = (log.end_ns[mended] - log.start_ns[mended]) / NS / 3600.0
    return (float(np.median(hours)), float(hours.mean())) if len(hours) >= LEAST_REPAIRS else REPAIR_H


def spare_pool(
    view: View, per_day: float, repair_h: tuple[float, float], have: int, shape: float | None = None
) -> SparePool:
    """Return the spares needed if `per_day` nodes of the site leave by failure or withdrawal.

    `repair_h`: median and mean hours until a node is back; only the mean counts, as of each node that leaves,
    and it is no less than the median, as repair times have a long tail. `have`: all that are kept as spares,
    those in use included. `shape` of the Gamma belief in the rate; None: as sure as the forecasts say.
    """
    median, mean = (x if math.isfinite(x) and x > 0.0 else 0.0 for x in repair_h)
    rate = per_day if math.isfinite(per_day) and per_day > 0.0 else 0.0
    hours = max(mean, median)
    out = rate * hours / DAY_H
    sure = common_shape(view) if shape is None else shape
    tail = tail_pu(out, sure)
    have = max(have, 0)
    wanted, chance = _first(tail, SHORT_PU), float(tail[have]) if have < len(tail) else 0.0
    short, large = have < wanted, have > _first(tail, LARGE_PU)
    away = f"{hours / DAY_H:.2g} days" if hours >= 2 * DAY_H else f"{hours:.2g} h"
    often = f"{100 * chance:.0f} %" if chance >= SHORT_PU else f"less than {100 * SHORT_PU:.0f} %"
    away_count = f"{out:.2g} {'is' if f'{out:.2g}' == '1' else 'are'}"
    sentence = (
        f"{_count_text(wanted, have, large)}: {rate:.2g} nodes leave a day and stay away {away} on "
        f"average, so {away_count} out on average. With {have}, more nodes than spares are out {often} "
        f"of the time; with {wanted}, at most {100 * SHORT_PU:.0f} %."
    )
    return SparePool(wanted, have, short, chance, sentence, out, large)


def _count_text(wanted: int, have: int, large: bool) -> str:
    there = {0: "none is", 1: "1 is"}.get(have, f"{have} are")
    text = f"{wanted} spare{'s are' if wanted != 1 else ' is'} wanted and {there} there"
    return f"{text}, {have - wanted} more than needed" if large else text


def _first(tail: F64, most_pu: float) -> int:
    """Return the smallest number of spares that is exceeded with at most this chance."""
    return int(np.argmax(tail <= most_pu))


def tail_pu(mean: float, shape: float = math.inf) -> F64:
    """Return the chance that more than 0, 1, 2, ... are out [m], down to below 1e-6.

    Poisson of this mean, or with a Gamma `shape` the negative binomial with it. Summed from the far end, so
    that small chances are right.
    """
    if not mean > 0.0:
        return np.zeros(1)
    spread = 0.0 if not shape > 0.0 or math.isinf(shape) else mean / shape
    width = math.sqrt(mean * (1.0 + spread))
    # Beyond, Poisson and Gamma tails are below 1e-6 of what is asked for
    most = int(min(mean + 12.0 * width + 30.0 * (1.0 + spread), MOST_OUT))
    n = np.arange(1, most + 1, dtype=np.float64)
    if spread == 0.0:
        steps, first = math.log(mean) - np.log(n), -mean
    else:
        # p(n) / p(n - 1) = (shape + n - 1) / n * spread / (1 + spread)
        steps = np.log(shape + n - 1.0) - np.log(n) + math.log(spread / (1.0 + spread))
        first = -shape * math.log1p(spread)
    log_pu = first + np.concatenate([[0.0], np.cumsum(steps)])
    weight = np.exp(log_pu)
    beyond = np.concatenate([np.cumsum(weight[::-1])[::-1][1:], [0.0]])
    out: F64 = np.minimum(beyond, 1.0)
    return out


def common_shape(view: View) -> float:
    """Return the Gamma shape of the belief in the common rate of all nodes, from the band of a day's
    forecast.

    A shared uncertainty does not average out over nodes; the rest does. inf without a forecast.
    """
    day = nearest_forecast(view, DAY_S)
    if day is None:
        return math.inf
    mean = rate_per_s(day.mean, day.horizon_s)
    spread = spread_of(mean, rate_per_s(day.hi, day.horizon_s))
    known = np.isfinite(mean) & np.isfinite(day.hi)
    least = float(spread[known].min(initial=np.inf))
    return 1.0 / least if 0.0 < least < math.inf else math.inf
