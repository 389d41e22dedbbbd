"""A week of a power test site under one arm: a tick each minute, and each second around peaks and faults.

The plant itself goes by seconds throughout; what is coarser away from peaks is how often the arm is asked.
On the site with two feeds one of them is lost for an hour, at the second of the highest demand; there may be
other trouble all the while (`power_troubles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.evaluation.power.arms import Arm, Ours, jobs_told
from tests.evaluation.power.demand import Demand
from tests.evaluation.power.plant import MINUTE_S, FeedLoss, Plant
from tests.evaluation.power.rivals import Proportional, Static, Thresholds, Uncapped
from tests.evaluation.power.site import PowerSite
from tests.evaluation.power.troubled import troubled
from tests.evaluation.power.troubles import Troubles
from twin.catalogue import F64, I64, Bool
from twin.telemetry import Event

NEAR_PU = 0.985  # of any budget, a side lost: from here on the arm is asked each second. source: estimate
CLOSE_BEFORE_S, CLOSE_AFTER_S = 60, 600  # of what is looked at closely around a fault. source: estimate
LOSS_S = 3600  # that a feed is lost for
CALM_S = 10  # within all budgets, after which a loss is overcome. source: estimate
SETTLE_S = 3  # for which a budget may be exceeded. source: the goal of the project for a lost feed
# Of a minute in which jobs begin or end: caps that were those of idle nodes rise by so much a second
NEWS_S = (5, 5, 10, 40)
EDGE_MIN = 30  # of a run, in which nothing is lost
MOST_TOLD = 20  # places and seconds of a run that are told


class Watch:
    """Time of each feeder above a limit [n_feeder], spell by spell."""

    def __init__(self, limit_w: F64) -> None:
        self.limit_w = limit_w
        self.spell_s: I64 = np.zeros(len(limit_w), np.int64)
        self.over_s, self.late_s, self.longest_s, self.worst_pu, self.worst_late_pu = 0, 0, 0, 0.0, 0.0
        self.last_over_s = -1

    def look(self, load_w: F64, second: int) -> None:
        """At loads [n_feeder, seconds], the first one of this second."""
        over = load_w > self.limit_w[:, None] * (1.0 + 1e-9)
        if not over.any():
            self.spell_s[:] = 0
            return
        above_pu = load_w / self.limit_w[:, None] - 1.0
        self.worst_pu = max(self.worst_pu, float(above_pu.max()))
        for k in range(load_w.shape[1]):
            now: Bool = over[:, k]
            self.spell_s = np.where(now, self.spell_s + 1, 0)
            if not now.any():
                continue
            self.over_s += 1
            self.last_over_s = second + k
            self.longest_s = max(self.longest_s, int(self.spell_s.max()))
            late = self.spell_s > SETTLE_S
            if late.any():
                self.late_s += 1
                self.worst_late_pu = max(self.worst_late_pu, float(above_pu[late, k].max()))


class Told(NamedTuple):
    """A limit that was exceeded for longer than it may be: when, whose, by how much."""

    second: int
    feeder: str
    over_w: float


class Overcome:
    """Time from the loss of a feed to the last excess of another feeder over its budget, until it is calm."""

    def __init__(self, loss: FeedLoss) -> None:
        self.loss, self.after_s, self.calm_s = loss, 0, 0

    def look(self, over: Bool, begun: int) -> None:
        """At seconds in which any feeder was [seconds], the first one of this second."""
        for second in range(max(self.loss.begin_s - begun, 0), len(over)):
            if self.calm_s >= CALM_S:
                return
            self.calm_s = 0 if over[second] else self.calm_s + 1
            if over[second]:
                self.after_s = begun + second + 1 - self.loss.begin_s


class Week:
    """One arm on one site and demand; `step_minute` until the end, then `figures`."""

    def __init__(self, site: PowerSite, demand: Demand, arm: Arm, loss: FeedLoss | None = None,
                 every_second: bool = False, troubles: Troubles | None = None) -> None:  # fmt: skip
        """With `troubles` the arm lives in them, and begins anew."""
        self.site, self.demand, self.every_second = site, demand, every_second
        self.arm, self.troubles = arm, troubles
        losses = [] if loss is None else [loss]
        if troubles is not None:
            self.arm, self.demand = troubled(arm, site, troubles), troubles.hung(site, demand)
            losses += troubles.losses()
        self.plant = Plant(site, self.demand)
        self.plant.losses += losses
        self.overcome = [Overcome(one) for one in losses]
        self.budgets, self.exposed = Watch(site.budget_w), Watch(site.budget_w)
        self.ticks, self.close_min = 0, 0
        if arm.still:  # what it wants for ever holds from the beginning
            cap_w = self.arm.decide(self.plant.read(), 0, 0, [])
            self.plant.command(self.plant.cap_w if cap_w is None else cap_w, delay_s=0.0)
        self.late: list[Told] = []
        self.bare: list[Told] = []

    def run(self) -> dict[str, Any]:
        """All minutes of the demand; the figures."""
        for minute in range(self.demand.minutes):
            self.step_minute(minute)
        return self.figures()

    def step_minute(self, minute: int) -> None:
        """The next minute, in one step, or four where jobs come or go, or sixty."""
        events = jobs_told(self.site, self.demand, minute)
        close = self.every_second or (not self.arm.still and self._close())
        self.close_min += close
        steps = (1,) * MINUTE_S if close else (MINUTE_S,)
        if events and not close and not self.arm.still:
            steps = NEWS_S
        for dt_s in steps:
            begun = self.plant.time_s
            self.plant.step(dt_s)
            self._look(begun)
            self._ask(dt_s, events)
            events = []

    def _close(self) -> bool:
        now = self.plant.time_s
        for one in self.overcome:
            for at in (one.loss.begin_s, one.loss.end_s):
                if at - CLOSE_BEFORE_S - MINUTE_S < now <= at + CLOSE_AFTER_S:
                    return True
        if self.troubles is not None and self.troubles.closely(now):
            return True
        opened = self.plant.tripped_s
        if ((opened >= 0) & (now - opened <= CLOSE_AFTER_S)).any():
            return True
        return self.plant.peek_pu(MINUTE_S) > NEAR_PU

    def _look(self, begun: int) -> None:
        n = self.plant.time_s - begun
        if self.troubles is not None:
            self.budgets.limit_w = self.troubles.limit_w(self.site, begun)
        rack_w, feeder_w = self.plant.rack_series[:, -n:], self.plant.feeder_series[:, -n:]
        self._note(self.budgets, feeder_w, begun, self.late)
        self._note(self.exposed, self.plant.worst_shares @ rack_w, begun, self.bare)
        for one in self.overcome:
            if one.calm_s < CALM_S and self.plant.time_s > one.loss.begin_s:
                one.look(np.asarray((feeder_w > self.site.budget_w[:, None]).any(axis=0)), begun)

    def _note(self, watch: Watch, load_w: F64, begun: int, told: list[Told]) -> None:
        before = watch.late_s
        watch.look(load_w, begun)
        if watch.late_s > before and len(told) < MOST_TOLD:
            over_w = load_w.max(axis=1) - watch.limit_w
            at = int(over_w.argmax())
            told.append(Told(watch.last_over_s, self.site.site.names["feeder"][at], float(over_w[at])))

    def _ask(self, dt_s: int, events: list[Event]) -> None:
        read = self.plant.read(at_peak=dt_s > 1)
        cap_w = self.arm.decide(read, self.plant.time_s, dt_s, events)
        self.ticks += 1
        if cap_w is not None:
            self.plant.command(cap_w)

    def figures(self) -> dict[str, Any]:
        """Of the run so far."""
        p, high, span = self.plant, self.site.high, max(self.plant.time_s, 1)

        def lost(nodes: Bool) -> float:
            return 1.0 - float(p.work[nodes].sum()) / max(float(p.free_work[nodes].sum()), 1e-9)

        return {
            "arm": self.arm.name, "trips": p.trips,
            "late_s": self.budgets.late_s, "over_s": self.budgets.over_s,
            "worst_over_pu": self.budgets.worst_pu, "longest_over_s": self.budgets.longest_s,
            "exposed_s": self.exposed.over_s, "exposed_late_s": self.exposed.late_s,
            "worst_exposed_pu": self.exposed.worst_pu,
            "after_loss_s": max((one.after_s for one in self.overcome), default=None),
            "lost_high_pu": lost(high), "lost_low_pu": lost(~high),
            "lost_pu": lost(np.ones_like(high)), "binds_pu": p.held_s / span, "held_w": p.held_j / span,
            "needed_pu": p.needed_s / span, "dark_h": p.dark_s / 3600.0, "energy_mwh": p.energy_j / 3.6e9,
            "theta_most": p.theta_most, "close_pu": self.close_min * MINUTE_S / span, "ticks": self.ticks,
            "late_where": [told._asdict() for told in self.late],
            "exposed_where": [told._asdict() for told in self.bare],
            **({} if self.troubles is None else {"troubles": self.troubles.counts()}),
        }  # fmt: skip


ARMS = ("none", "static", "proportional", "polca", "racktwin")


def arm_of(name: str, site: PowerSite) -> Arm:
    """A fresh arm. Raises KeyError for an unknown name."""
    if name == "racktwin":
        return Ours(site)
    if name == "none":
        return Uncapped()
    rivals: dict[str, type[Static] | type[Proportional] | type[Thresholds]] = {
        "static": Static, "proportional": Proportional, "polca": Thresholds}  # fmt: skip
    return rivals[name](site)


def worst_loss(site: PowerSite, demand: Demand) -> FeedLoss | None:
    """Feed A is lost in the second of the highest wish; None on a site with one feed, or in a short run."""
    core, minutes = site.site, demand.minutes
    side = np.flatnonzero((core.side_of_feeder == 1) & (core.parent_of_feeder < 0))
    if not len(side) or minutes <= 2 * EDGE_MIN:
        return None
    wish = demand.level.sum(axis=1) + 0.2 * (demand.job >= 0).sum(axis=1)
    minute = EDGE_MIN + int(wish[EDGE_MIN : minutes - EDGE_MIN].argmax())
    plant = Plant(site, demand)
    plant.time_s = minute * MINUTE_S
    plant.step(MINUTE_S)
    second = minute * MINUTE_S + int(plant.rack_series[:, -MINUTE_S:].sum(axis=0).argmax())
    return FeedLoss(int(side[0]), second, second + LOSS_S)
