"""Troubles of a run on a power test site, beside the loss of a feed for an hour.

Drawn from a seed of its own, alike for all arms; rates are of a week. Network: racks silent (10 s to half an
hour), everything silent (30 to 300 s), readings 5 to 60 s late with the time of their making, readings twice
and out of order, commands that do not reach some nodes (10 to 600 s), agents of nodes that are gone (neither
readings nor commands; what lapsed meanwhile is carried out when they are back), the daemon itself gone (60 to
600 s; leases lapse). Instruments and physics: meters of racks and of feeders stuck, 3 to 10 % low or high, or
noisy; power sensors of GPUs stuck; a node that tells its cap and does not obey it, for an hour; a node that
hangs, idle and silent; a PDU that may carry 10 % less for hours, asked for a minute before; another feed lost
for 10 to 60 s. The first of each kind is in the busiest twentieth of the run, and one trouble, of a kind that
the seed chooses, is there while the feed is lost for an hour. Rates and shares are estimates. Silence is no
reading at all: see `power_troubled`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from tests.evaluation.power.demand import Demand
from tests.evaluation.power.plant import MINUTE_S, FeedLoss
from tests.evaluation.power.site import PowerSite
from twin.catalogue import F64, Bool


class Kind(NamedTuple):
    """Number in a week, length (s), and True in `close` if an arm is asked each second all the while."""

    weekly: int
    least_s: int
    most_s: int
    close: bool


KINDS = {
    "racks_silent": Kind(6, 10, 1800, True),
    "all_silent": Kind(4, 30, 300, True),
    "late": Kind(4, 120, 1800, True),
    "disordered": Kind(4, 120, 1800, True),
    "commands_lost": Kind(6, 10, 600, True),
    "agents_gone": Kind(4, 60, 1800, True),
    "daemon_gone": Kind(4, 60, 600, True),
    "rack_meter": Kind(8, 600, 14400, False),
    "feeder_meter": Kind(8, 600, 14400, False),
    "gpu_sensors": Kind(4, 600, 14400, False),
    "deaf_node": Kind(4, 3600, 3600, False),
    "hung_node": Kind(4, 600, 7200, False),
    "derated": Kind(3, 7200, 21600, False),
    "feed_lost": Kind(3, 10, 60, True),
}
MODES = ("stuck", "low", "high", "noisy")  # of a meter that is wrong
WRONG_PU, NOISE_PU = (0.03, 0.10), 0.03
LATE_S = (5, 60)
LOST_PU, GONE_PU, STUCK_PU = (0.05, 0.30), (0.02, 0.10), 0.05  # of nodes, of nodes, of GPUs
DERATED_PU, WEEK_H, BUSY_PU = 0.10, 168, 0.05
ASKED_S = MINUTE_S  # before a PDU may carry less
CLOSE_S = 120  # looked at closely after a begin or an end
APART_S = 1800  # between losses of feeds: both at once leave nothing to be capped
PERIOD_S = 2.0  # in which meters of these sites tell, as their site file would say


class Trouble(NamedTuple):
    """One trouble and whom it befalls: masks [n_gpu], [n_rack], [n_feeder]; `amount` as its kind has it: how
    late (s), or by how much a meter is wrong."""

    kind: str
    begin_s: int
    end_s: int
    gpu: Bool
    rack: Bool
    feeder: Bool
    mode: str = ""
    amount: float = 0.0


class Troubles(NamedTuple):
    """All troubles of a run, in order of their beginning, and the seed of what is drawn second by second."""

    listed: tuple[Trouble, ...]
    seed: int = 0

    def at(self, second: int, *kinds: str) -> list[Trouble]:
        """Those of these kinds that are there."""
        return [t for t in self.listed if t.kind in kinds and t.begin_s <= second < t.end_s]

    def closely(self, second: int) -> bool:
        """Return True if an arm is asked each second in the minute from then on."""
        for t in self.listed:
            edges = (t.begin_s, t.end_s)
            if any(at - 2 * MINUTE_S < second <= at + CLOSE_S for at in edges):
                return True
            if KINDS[t.kind].close and t.begin_s <= second <= t.end_s:
                return True
        return False

    def losses(self) -> list[FeedLoss]:
        """Feeds that are lost beside the one that every run knows."""
        return [
            FeedLoss(int(np.flatnonzero(t.feeder)[0]), t.begin_s, t.end_s)
            for t in self.listed
            if t.kind == "feed_lost"
        ]

    def limit_w(self, site: PowerSite, second: int) -> F64:
        """Return the limits of feeders [n_feeder]."""
        out = site.budget_w.copy()
        for t in self.at(second, "derated"):
            out[t.feeder] *= 1.0 - t.amount
        return out

    def hung(self, site: PowerSite, demand: Demand) -> Demand:
        """The demand with nodes that hang: they do nothing, and their work is nobody's loss."""
        level = demand.level.copy()
        for t in self.listed:
            if t.kind == "hung_node":
                node = np.unique(site.site.node_of_gpu[t.gpu])
                level[t.begin_s // MINUTE_S : -(-t.end_s // MINUTE_S), node] = 0.0
        return demand._replace(level=level)

    def counts(self) -> dict[str, int]:
        """Count the troubles of each kind."""
        return dict(Counter(t.kind for t in self.listed))


def drawn(site: PowerSite, demand: Demand, seed: int, loss: FeedLoss | None) -> Troubles:
    """Draw a run's troubles, from a stream of its own; a short run has shorter ones, one of each kind."""
    rng, core, span_s = np.random.default_rng([23, seed]), site.site, demand.minutes * MINUTE_S
    wish = demand.level.sum(axis=1)
    busy = np.sort(np.argsort(-wish, kind="stable")[: max(round(BUSY_PU * demand.minutes), 1)])
    kinds = [k for k in KINDS if k != "feed_lost" or (core.side_of_feeder > 0).any()]
    during = str(rng.choice([k for k in kinds if k != "feed_lost"]))
    out: list[Trouble] = []
    for kind in kinds:
        how = KINDS[kind]
        for i in range(max(1, round(how.weekly * demand.minutes / 60 / WEEK_H))):
            length_s = round(np.exp(rng.uniform(np.log(how.least_s), np.log(how.most_s))))
            length_s = min(length_s, max(how.least_s, span_s // 4), span_s // 2)
            part = rng.uniform()
            within_s = round(part * (length_s - 1))
            at_s = int(rng.choice(busy)) * MINUTE_S + int(rng.integers(MINUTE_S))
            if i > 0:
                at_s = int(rng.integers(span_s))
            if loss is not None and kind == "feed_lost":
                at_s = _apart(at_s, loss, span_s)
            begin_s = max(min(at_s - within_s, span_s - length_s), 0)
            out.append(_befallen(rng, site, kind, begin_s, begin_s + length_s))
        if loss is not None and kind == during:
            begin_s = max(loss.begin_s - round(rng.uniform(0.1, 0.9) * length_s), 0)
            out.append(_befallen(rng, site, kind, begin_s, begin_s + length_s))
    return Troubles(tuple(sorted(out, key=lambda t: (t.begin_s, t.kind))), seed)


def _apart(at_s: int, loss: FeedLoss, span_s: int) -> int:
    """The same second, or one after the loss, or before it."""
    if not loss.begin_s - APART_S < at_s < loss.end_s + APART_S:
        return at_s
    after = loss.end_s + APART_S
    return after if after + MINUTE_S < span_s else max(loss.begin_s - APART_S, 0)


def _befallen(rng: np.random.Generator, site: PowerSite, kind: str, begin_s: int, end_s: int) -> Trouble:
    core, n_node = site.site, site.nodes
    gpu, rack = np.zeros(site.gpus, np.bool_), np.zeros(core.sizes["rack"], np.bool_)
    feeder, mode, amount = np.zeros(len(site.budget_w), np.bool_), "", 0.0
    roots = np.flatnonzero(core.parent_of_feeder < 0)
    if kind == "racks_silent":
        rack[rng.choice(len(rack), int(rng.integers(1, 4)), replace=False)] = True
        gpu = rack[core.rack_of_gpu]
    elif kind in ("all_silent", "disordered", "late"):
        rack[:], feeder[:] = True, True
        amount = float(rng.integers(LATE_S[0], LATE_S[1] + 1)) if kind == "late" else 0.0
        if kind == "late" and rng.uniform() < 0.5:  # of some racks alone
            rack[rng.choice(len(rack), len(rack) // 2, replace=False)] = feeder[:] = False
        gpu = rack[core.rack_of_gpu]
    elif kind in ("commands_lost", "agents_gone"):
        share = rng.uniform(*(LOST_PU if kind == "commands_lost" else GONE_PU))
        gpu = np.isin(core.node_of_gpu, rng.choice(n_node, max(round(share * n_node), 1), replace=False))
    elif kind in ("deaf_node", "hung_node"):
        gpu = core.node_of_gpu == rng.integers(n_node)
    elif kind == "gpu_sensors":
        gpu = rng.uniform(size=site.gpus) < STUCK_PU
    elif kind in ("rack_meter", "feeder_meter"):
        mask = rack if kind == "rack_meter" else feeder
        mask[int(rng.integers(len(mask)))] = True
        mode, wrong = str(rng.choice(MODES)), float(rng.uniform(*WRONG_PU))
        amount = {"low": -wrong, "high": wrong, "noisy": NOISE_PU}.get(mode, 0.0)
    elif kind == "derated":
        feeder[rng.choice(np.flatnonzero(~np.isin(np.arange(len(feeder)), roots)))] = True
        amount = DERATED_PU
        begin_s, end_s = begin_s // MINUTE_S * MINUTE_S, end_s // MINUTE_S * MINUTE_S
    elif kind == "feed_lost":
        feeder[int(rng.choice(roots))] = True
    return Trouble(kind, begin_s, end_s, gpu, rack, feeder, mode, amount)


def metered(site: PowerSite) -> PowerSite:
    """The site with the periods of its meters told, without which their silence shows after minutes."""
    file = site.site.file
    periods = {"rack": PERIOD_S, "feeder": PERIOD_S, **file.periods_s}
    told = msgspec.structs.replace(file, periods_s=periods)
    return site._replace(site=dataclasses.replace(site.site, file=told))
