"""A light plant of a power test site: what its GPUs draw and get done under their caps, second by second.

Within a minute the demand of a node stands but for the dips that all GPUs of a training job share, so that a
minute under the same caps is a few products of small matrices, exact to the second. Caps take 2.5 s, meters
tell what was so 2 s ago, breakers warm and open, racks without a living feeder are dark. A synchronous job
goes at the pace of its slowest GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tests.evaluation.power.demand import TRAINING, Demand
from tests.evaluation.power.site import (
    BREAKER_OVER_BUDGET,
    CPU_IDLE_W,
    CPU_MAX_W,
    GPU_IDLE_W,
    GPU_MAX_W,
    GPU_MIN_W,
    LOSS_PU,
    OTHER_W,
    PowerSite,
    dead_below,
    shares_at_worst,
    shares_of,
)
from twin.catalogue import F64, I32, Bool
from twin.physics import breaker

MINUTE_S = 60
CAP_DELAY_S = 2.5  # from a command to the power that follows it. source: the project's goal for a cap loop
METER_DELAY_S = 2  # of racks and feeders, which tell it as if it were new. source: estimate
LEAST_CLOCK_PU = 0.1  # of the highest clock: a cap brings it no lower. source: estimate
MENDED_S = 4 * 3600  # until an open breaker is closed again. source: estimate
HELD_PU = 0.01  # of its wish by which a GPU has to be held to count as held. source: estimate
MOST_WAITING = 64  # commands on their way


class FeedLoss(NamedTuple):
    """A feeder is without power from one second on until another."""

    feeder: int
    begin_s: int
    end_s: int


class Reading(NamedTuple):
    """Readings at the end of a step: [n_gpu], [n_gpu], [n_rack], [n_feeder]; breakers also [n_feeder]."""

    gpu_w: F64
    cap_w: F64
    rack_w: F64
    feeder_w: F64
    dead: Bool
    tripped: Bool


class _Held(NamedTuple):
    """State that follows from the demand of a minute and the caps in force."""

    at: I32  # [n_node] place of each node's job among those that run, the last one is none's
    jobs: I32  # [k] those that run
    dip_of: F64  # [n_gpu] how much each GPU draws less in a dip
    busy_w: F64  # [n_gpu] what it draws otherwise
    rack_w: F64  # [n_rack] outside dips
    dip_w: F64  # [n_rack, k] less in a dip of each job
    free_w: F64
    free_dip_w: F64  # the same two without caps
    pace: F64  # [n_gpu] of its work, outside dips
    dip_pace: F64
    held: float  # whether a cap binds, and by how many watts in all
    held_w: float


class Plant:
    """Goes on by `step`. Work in GPU-seconds [n_node]: `work` done, `free_work` that without any caps."""

    def __init__(self, site: PowerSite, demand: Demand, seed: int = 0) -> None:
        """`seed`: of the site's own making, so far only in `demand`; kept for what may be drawn later."""
        core = site.site
        self.site, self.demand, self.seed = site, demand, seed
        self.node_of_gpu, self.rack_of_node = core.node_of_gpu, core.rack_of_node
        self.rack_of_gpu, self.n_rack = core.rack_of_gpu, core.sizes["rack"]
        self.time_s = 0
        self.cap_w = np.full(site.gpus, GPU_MAX_W)
        self.losses: list[FeedLoss] = []
        self.tripped_s = np.full(len(site.budget_w), -1, np.int64)  # when its breaker opened
        self.trips = 0
        self.theta = np.zeros(len(site.budget_w))
        self.theta_most = 0.0
        self.rating_w = BREAKER_OVER_BUDGET * site.budget_w
        self.work, self.free_work = np.zeros(site.nodes), np.zeros(site.nodes)
        self.energy_j, self.held_s, self.held_j, self.dark_s = 0.0, 0.0, 0.0, 0.0
        self.needed_s = 0.0  # seconds in which the wish was more than any one place may carry, a side lost
        self.worst_shares = shares_at_worst(core)
        self._waiting: list[tuple[int, F64]] = []
        self._held: _Held | None = None
        self._minute, self._fresh = -1, False
        self._dead = np.zeros(len(site.budget_w), np.bool_)
        self._told = self._dead.copy()
        self._rewire()
        self.rack_series = np.zeros((self.n_rack, 1))  # [n_rack, seconds] of the last step
        self.feeder_series = np.zeros((len(site.budget_w), 1))
        self._delta = np.zeros((0, 1))
        self._dark_before = self.dark
        self.step(0)

    # The present state

    @property
    def gpu_w(self) -> F64:
        """Of each GPU in the last second [n_gpu]."""
        return self._gpu_at(-1)

    @property
    def rack_w(self) -> F64:
        """In the last second [n_rack]."""
        return np.asarray(self.rack_series[:, -1])

    @property
    def feeder_w(self) -> F64:
        """In the last second [n_feeder]."""
        return np.asarray(self.feeder_series[:, -1])

    @property
    def dead(self) -> Bool:
        """Feeders without power or with an open breaker, and those below them [n_feeder]."""
        return self._dead

    def command(self, cap_w: F64, delay_s: float = CAP_DELAY_S) -> None:
        """These caps [n_gpu] hold some seconds later; within that time nothing follows them."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.pop(0)
        self._waiting.append((self.time_s + math.ceil(delay_s), np.clip(cap_w, GPU_MIN_W, GPU_MAX_W)))

    @property
    def commanded_w(self) -> F64:
        """The caps that will hold when all commands have arrived [n_gpu]."""
        return self._waiting[-1][1] if self._waiting else self.cap_w

    def read(self, at_peak: bool = False) -> Reading:
        """Return the readings of now: those of meters are 2 s late.

        `at_peak`: all readings are of the worst second of the last stretch instead. A site that is asked
        once a minute has only those.
        """
        series = self.feeder_series
        now = series.shape[1] - 1
        at = max(now - METER_DELAY_S, 0)
        second = now
        if at_peak:
            first = now + 1 - self._delta.shape[1]
            second = at = first + int(self.rack_series[:, first:].sum(axis=0).argmax())
        tripped = self.tripped_s >= 0
        return Reading(self._gpu_at(second - now - 1), self.cap_w, self.rack_series[:, at], series[:, at],
                       self._told.copy(), tripped)  # fmt: skip

    def peek_pu(self, seconds: int) -> float:
        """The most that any feeder would carry of its budget, a side lost, within the rest of this minute at
        most: with the caps in force and with those on their way."""
        worst = 0.0
        n = min(seconds, MINUTE_S - self.time_s % MINUTE_S)
        for cap_w in {id(c): c for c in (self.cap_w, self.commanded_w)}.values():
            held = self._held_under(cap_w, self._now_minute())
            rack_w = held.rack_w[:, None] - held.dip_w @ self._dips(held.jobs, n)
            load = self.worst_shares @ np.where(self.dark[:, None], 0.0, rack_w)
            worst = max(worst, float((load / self.site.budget_w[:, None]).max()))
        return worst

    # Going on

    def step(self, dt_s: int) -> None:
        """Go on by whole seconds; `rack_series` and `feeder_series` then hold them (the last ones before it
        where a step is short, so that meters can be late)."""
        end = self.time_s + dt_s
        racks, feeders = [self.rack_series[:, -4:]], [self.feeder_series[:, -4:]]
        if dt_s == 0:
            self._settle(0)
        while self.time_s < end:
            self._arrive()
            n = self._settle(min(end, self._next_edge()) - self.time_s)
            racks.append(self._rack_w[:, :n])
            feeders.append(self._feeder_w[:, :n])
        self.rack_series, self.feeder_series = np.concatenate(racks, axis=1), np.concatenate(feeders, axis=1)

    def _now_minute(self) -> int:
        return min(self.time_s // MINUTE_S, self.demand.minutes - 1)

    def _next_edge(self) -> int:
        edges = [self.time_s // MINUTE_S * MINUTE_S + MINUTE_S, *(due for due, _ in self._waiting)]
        for loss in self.losses:
            edges += [loss.begin_s, loss.end_s]
        edges += (self.tripped_s[self.tripped_s >= 0] + MENDED_S).tolist()
        return min(e for e in edges if e > self.time_s)

    def _arrive(self) -> None:
        """Commands, feeds and breakers whose time has come."""
        while self._waiting and self._waiting[0][0] <= self.time_s:
            self.cap_w = self._waiting.pop(0)[1]
            self._fresh = False
        mended = (self.tripped_s >= 0) & (self.time_s >= self.tripped_s + MENDED_S)
        self.tripped_s[mended] = -1
        dead = self.tripped_s >= 0
        lost = np.zeros(len(dead), np.bool_)
        for loss in self.losses:
            if loss.begin_s <= self.time_s < loss.end_s:
                lost[loss.feeder] = True
        if (dead_below(self.site.site, dead | lost) != self._dead).any():
            self._dead = dead_below(self.site.site, dead | lost)
            self._rewire()
        self._told = dead_below(self.site.site, lost)
        if self._minute != self._now_minute():
            self._fresh = False

    def _rewire(self) -> None:
        self._shares = shares_of(self.site.site, self._dead)
        self.dark = ~(self._shares.sum(axis=0) > 0)

    def _settle(self, seconds: int) -> int:
        """So many seconds, or fewer if a breaker opens; returns how many."""
        if not self._fresh or self._held is None:
            self._minute = self._now_minute()
            self._held, self._fresh = self._held_under(self.cap_w, self._minute), True
        held, lit = self._held, ~self.dark
        delta = self._dips(held.jobs, max(seconds, 1))
        rack_w = np.where(lit[:, None], held.rack_w[:, None] - held.dip_w @ delta, 0.0)
        feeder_w = self._shares @ rack_w
        n = seconds if seconds == 0 else self._warm(feeder_w)
        self._rack_w, self._feeder_w, self._delta = rack_w[:, : max(n, 1)], feeder_w[:, : max(n, 1)], delta
        if n == 0:
            self.rack_series, self.feeder_series = rack_w, feeder_w
            return 0
        dips = np.append(delta[:, :n].sum(axis=1), 0.0)[held.at]
        pace = held.pace * (n - dips[self.node_of_gpu]) + held.dip_pace * dips[self.node_of_gpu]
        on = held.at < len(held.jobs)
        done = np.bincount(self.node_of_gpu, pace, self.site.nodes)
        self.work += np.where(on & lit[self.rack_of_node], done, 0.0)
        self.free_work += np.where(on, n * np.bincount(self.node_of_gpu, minlength=self.site.nodes), 0.0)
        self.energy_j += float(self._rack_w.sum())
        self.held_s += n * held.held
        self.held_j += n * held.held_w
        self.dark_s += n * float(self.dark.any())
        free_w = held.free_w[:, None] - held.free_dip_w @ delta[:, :n]
        wish = (self.worst_shares @ free_w) > self.site.budget_w[:, None]
        self.needed_s += float(wish.any(axis=0).sum())
        self._delta = delta[:, :n]
        self.time_s += n
        return n

    def _warm(self, feeder_w: F64) -> int:
        """Heat the breakers; returns after how many seconds the first one opens, or all."""
        load = feeder_w / self.rating_w[:, None]
        n, aim = int(load.shape[1]), breaker.theta_steady(load)
        kept = math.exp(-1.0 / breaker.TAU_S)
        if float(aim.max(initial=0.0)) < 1.0:  # none can open, and the sum is exact
            weight = (1.0 - kept) * kept ** np.arange(n - 1, -1, -1)
            self.theta = np.where(self._dead, 0.0, self.theta * kept**n + aim @ weight)
            self.theta_most = max(self.theta_most, float(self.theta.max()))
            return n
        for second in range(n):
            self.theta = np.where(self._dead, 0.0, breaker.step(self.theta, load[:, second], 1.0))
            self.theta_most = max(self.theta_most, float(self.theta.max()))
            opens = (self.theta >= 1.0) | (load[:, second] >= breaker.MAGNETIC_PU)
            opens &= self.tripped_s < 0
            if opens.any():
                self.trips += int(opens.sum())
                self.tripped_s[opens] = self.time_s + second + 1
                return second + 1
        return n

    def _dips(self, jobs: I32, seconds: int) -> F64:
        """Share of each coming second that these jobs are in a dip [k, seconds]."""
        d = self.demand
        period, dip = d.period_s[jobs][:, None], d.dip_s[jobs][:, None]
        x = np.arange(seconds + 1) + self.time_s + d.phase_s[jobs][:, None]
        whole = np.floor(x / period)
        until = whole * dip + np.maximum(x - whole * period - (period - dip), 0.0)
        return np.asarray(np.diff(until, axis=1))

    def _held_under(self, cap_w: F64, minute: int) -> _Held:
        d, node = self.demand, self.node_of_gpu
        job = d.job[minute]
        jobs, found = np.unique(job, return_inverse=True)
        at = found.astype(np.int32)
        if len(jobs) and jobs[0] < 0:  # nodes without a job come last
            jobs, at = jobs[1:], np.where(at == 0, len(jobs) - 1, at - 1).astype(np.int32)
        k = len(jobs)
        level = d.level[minute]
        dip_pu = np.append(d.dip_pu[jobs], 1.0)[at]
        range_w = (GPU_MAX_W - GPU_IDLE_W) * d.spread
        wish_w = GPU_IDLE_W + range_w * level[node]
        dip_wish_w = GPU_IDLE_W + range_w * (level * dip_pu)[node]
        busy_w, dip_w = np.minimum(wish_w, cap_w), np.minimum(dip_wish_w, cap_w)
        key = self.rack_of_gpu * (k + 1) + at[node]

        def less(of_gpu: F64) -> F64:
            summed = np.bincount(key, of_gpu, self.n_rack * (k + 1)).reshape(self.n_rack, k + 1)
            return np.asarray(summed[:, :k] * (1 + LOSS_PU))

        cpu_w = CPU_IDLE_W + (CPU_MAX_W - CPU_IDLE_W) * level
        rest_w = np.bincount(self.rack_of_node, cpu_w * (1 + LOSS_PU) + OTHER_W, self.n_rack)
        on = (job >= 0)[node]
        held = on & (wish_w - busy_w > HELD_PU * wish_w)
        pace, dip_pace = self._pace(wish_w, busy_w, at, jobs), np.ones(len(node))
        if (dip_w < dip_wish_w).any():
            dip_pace = self._pace(dip_wish_w, dip_w, at, jobs)
        return _Held(
            at, jobs, busy_w - dip_w, busy_w,
            rest_w + np.bincount(self.rack_of_gpu, busy_w, self.n_rack) * (1 + LOSS_PU), less(busy_w - dip_w),
            rest_w + np.bincount(self.rack_of_gpu, wish_w, self.n_rack) * (1 + LOSS_PU),
            less(wish_w - dip_wish_w), pace, dip_pace, float(held.any()),
            float((wish_w - busy_w)[on].sum() * (1 + LOSS_PU)),
        )  # fmt: skip

    def _pace(self, wish_w: F64, power_w: F64, at: I32, jobs: I32) -> F64:
        """Speed of each GPU's work over that without a cap [n_gpu], by domain.md B; a job that is synchronous
        has the pace of its slowest."""
        d, out = self.demand, np.ones(len(wish_w))
        of = at[self.node_of_gpu]
        slow = np.flatnonzero((power_w < wish_w) & (of < len(jobs)))
        if not len(slow):
            return out
        job = jobs[of[slow]]
        share = (power_w[slow] - GPU_IDLE_W) / np.maximum(wish_w[slow] - GPU_IDLE_W, 1.0)
        clock = np.maximum(np.maximum(share, 0.0) ** (1.0 / d.gamma[job]), LEAST_CLOCK_PU)
        out[slow] = 1.0 / (d.compute_pu[job] / clock + 1.0 - d.compute_pu[job])
        least = np.ones(len(jobs) + 1)
        np.minimum.at(least, of[slow], out[slow])
        least[np.append(d.kind[jobs] != TRAINING, True)] = np.inf
        return np.minimum(out, least[of])

    def _gpu_at(self, second: int) -> F64:
        """Power of each GPU in a second of the last stretch, counted from its end [n_gpu]."""
        held = self._held
        assert held is not None
        width = self._delta.shape[1]
        delta = np.append(self._delta[:, max(second, -width)], 0.0)[held.at][self.node_of_gpu]
        return np.asarray(np.where(self.dark[self.rack_of_gpu], 0.0, held.busy_w - delta * held.dip_of))
