"""Expected power and clock of GPUs, from their activities, clock and cap.

P = idle + (a sm + b tensor + c dram) s^gamma, at most the cap, where s is the clock over the highest. The
coefficients of each GPU are learned around those of all GPUs of its profile. What leaks grows with the
temperature: idle is that at the temperature which they were learned at.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, I64, Bool
from twin.estimation.noise import ResidualNoise
from twin.estimation.parameter import Covariance, Delayed, Fit, Reference, for_prior, solve
from twin.estimation.readings import Readings, filled
from twin.physics import ACTIVITY_WEIGHTS, CLOCK_MIN_PU, EXPONENT, LEAK_PU_PER_K, LEAK_SPREAD_PU_PER_K, capped
from twin.site import Site
from twin.telemetry import EntityState, column, part

MEMORY_S = 3600.0  # of the coefficients; source: estimate
SETTLED_S = 600.0  # of weighted readings before a coefficient's value is its reference; source: estimate
# 1 sigma of the prior as shares of idle or of the dynamic power at full activity: of a profile's coefficients
# around the design, and of one GPU's around its profile's; source: estimate.
POOL_IDLE, POOL_SHARE = 0.25, 0.3
OWN_IDLE, OWN_SHARE = 0.08, 0.04
MODEL_ERROR_PU = 0.01  # of one reading at full activity, of the highest power; source: estimate
IDLE_ERROR_PU = 0.25  # of that, of an idle one; source: estimate
NOISE_PU = 0.003  # floor of the learned noise, of the highest power: a GPU's meter; source: estimate
IDLE_WEIGHT = 0.2  # an idle reading teaches so much of what one at full activity does; source: estimate
SLOWED_PU = 0.985  # below, a clock is lowered: two steps of 15 MHz below 1980 MHz are not
LEAST_TEACHING_PU = 0.93  # of the clock: above, the exponent is lost in noise; source: estimate
LEAST_DRAWN_PU = 0.05  # of the highest power, above idle, for the same reason; source: estimate
EXPONENT_LOW, EXPONENT_HIGH = 1.5, 3.5  # what is physically plausible; domain facts give 2.5-3
EXPONENT_SPREAD, EXPONENT_ERROR = 0.25, 0.5  # of the prior, and of one reading; source: estimate
EXPONENT_LAW = 0.05  # 1 sigma of the law itself between low and high clocks; source: estimate
# By which the activities of a GPU at one work differ from what its power shows; source: estimate
ACTIVITY_NOISE_PU = 0.02
# A power by the clock so near the cap, of it or of what the exponent leaves open, is the cap;
# source: estimate
AT_CAP_PU, AT_CAP_SIGMAS = 0.08, 2.0
POOLED = 10_001  # GPUs, at most about so many, that determine the coefficients of a profile
MOVE_PU = 0.1  # doubt in an expectation while it moves, of its last step; source: estimate
CAP_MOVE_PU = 0.5  # the same at a cap; source: estimate
READ_PU = 0.01  # by which a cap is read back as another one: devices round it. source: estimate
WORKING_PU = 0.1  # of SM activity: below, a GPU may lower its clock as it likes; source: estimate
# Parameters [5, n]
IDLE, SM, TENSOR, DRAM, GAMMA = range(5)


# Share of a profile's GPUs whose highest clocks are believed; those beyond may be wrong; source: estimate
ROBUST_PU = 0.98


class GpuPower(EntityState):
    """Expectations of `gpu.power_w` and `gpu.sm_clock_hz`, and the coefficients behind them."""

    gamma_var: F64 = column("gpu", "f8", EXPONENT_SPREAD**2)
    sigma: F64 = column("gpu", "f8", np.nan)
    expected: F64 = column("gpu", "f8", np.nan)
    top_hz: F64 = column("gpu", "f8", np.nan)  # the highest clock of the whole profile, in use
    pool: F64 = column("profile", "f8", np.nan, lead=(4,))
    pool_var: F64 = column("profile", "f8", np.nan, lead=(4,))
    set: Delayed = part()
    fit: Fit = part()
    reference: Reference = part()
    covariance: Covariance = part()
    exponent_var: Delayed = part()  # comes into use with the exponent
    usual_c: Delayed = part()  # temperature that coefficients are learned at
    clock: Delayed = part()  # highest reading at work
    noise: ResidualNoise = part()

    def __init__(self, site: Site) -> None:
        design, of = site.design, site.rack_of_gpu
        profiles = sorted({p or "" for p in site.profile_of_rack})
        self.n_group = max(len(profiles), 1)
        n = self.n = site.sizes["gpu"]
        super().__init__({"gpu": n, "profile": self.n_group})
        self.idle_w, self.max_w = design.gpu_idle_w[of], design.gpu_max_w[of]
        self.span_w = self.max_w - self.idle_w
        first = np.stack([self.idle_w, *(w * self.span_w for w in ACTIVITY_WEIGHTS), np.full(n, EXPONENT)])
        self.set = Delayed(first, "gpu")
        self.fit = Fit(4, n, MEMORY_S, "gpu")
        self.reference = Reference(2, n, SETTLED_S, "gpu")
        self.usual_c = Delayed(np.full((1, n), np.nan), "gpu")
        self.exponent_var = Delayed(np.full((1, n), EXPONENT_SPREAD**2), "gpu")
        self.clock = Delayed(np.full((1, n), np.nan), "gpu")
        of_rack = np.array([profiles.index(p or "") for p in site.profile_of_rack], np.int32)
        self.group: I32 = of_rack[of]
        stride = n // POOLED + 1
        self._sample = slice(0, n, stride + 1 - stride % 2)  # odd: all places in a tray have their turn
        self._design = self._by_group(first[:4])
        span = self._design[1:].sum(axis=0)
        self._design_spread = np.stack([POOL_IDLE * self._design[0], *[POOL_SHARE * span] * 3])
        self._own_spread = np.stack([OWN_IDLE * self.idle_w, *[OWN_SHARE * self.span_w] * 3])
        self.covariance = Covariance(np.hypot(self._own_spread, self._design_spread[:, self.group]), "gpu")
        self.unknown_w = np.zeros(n)  # 1 sigma for that the coefficients are not known, where it was asked
        self.noise = ResidualNoise(n, np.where(np.isfinite(self.max_w), NOISE_PU * self.max_w, 1.0), "gpu")
        self.activity, self.clock_doubt_hz = np.zeros(n), np.zeros(n)
        self.static_w, self.dynamic_w = np.full(n, np.nan), np.full(n, np.nan)
        self.warmer_k = np.zeros(n)  # than where it was learned
        self._leak_w_per_k = np.nan_to_num(LEAK_PU_PER_K * self.max_w)
        self._leak_spread_w_per_k = np.nan_to_num(LEAK_SPREAD_PU_PER_K * self.max_w)
        self._scratch = np.empty(n, np.int64)
        self._features: list[F64] = []
        self.capped = np.zeros(0, np.intp)  # GPUs whose power is expected at their cap

    def _by_group(self, values: F64) -> F64:
        """Return for each group the values [k, group] of its first GPU; NaN for an empty group."""
        out = np.full((len(values), self.n_group), np.nan)
        groups, first = np.unique(self.group, return_index=True)
        out[:, groups] = values[:, first]
        return out

    def expect(self, readings: Readings) -> F64:
        """Return the expected power [n], W, by activity, clock and cap of this tick."""
        whole = readings.known("gpu", "sm_active_pu")
        sm, _ = readings.good("gpu", "sm_active_pu" if whole else "util_pu")
        self.activity, met = sm, np.empty(self.n)
        tensor, dram = (
            readings.good("gpu", name)[0] if whole and readings.known("gpu", name) else None
            for name in ("tensor_active_pu", "dram_active_pu")
        )
        self._features = [sm, *(np.zeros(0) if share is None else share for share in (tensor, dram))]
        found = kernels.expect_power(
            self.set.in_use,
            sm,
            tensor,
            dram,
            readings.lately("gpu", "temp_c"),
            self.usual_c.in_use[0],
            self._leak_w_per_k,
            readings.lately("gpu", "power_limit_w"),
            self.warmer_k,
            self.static_w,
            self.dynamic_w,
            met,
            self._scratch,
        )
        self.capped = capped = self._scratch[:found].copy()
        if len(capped):
            met[capped] = np.maximum(met[capped], self._floor_w(capped))
        held_w = met[capped]
        clock_hz, _ = readings.good("gpu", "sm_clock_hz")
        slowed = np.flatnonzero((clock_hz < SLOWED_PU * self.top_hz) & (sm > 0.0))
        if len(slowed):
            by_clock, sigma_w = self._slowed(clock_hz, slowed)
            at_cap = met[slowed]
            # A clock that a cap holds down says no more than the cap does; none lets it be exceeded
            near = by_clock + np.maximum(AT_CAP_PU * at_cap, AT_CAP_SIGMAS * sigma_w) >= at_cap
            met[slowed] = np.where(near, at_cap, by_clock)
            self.capped = capped[met[capped] == held_w]
        return met

    def _floor_w(self, at: I64) -> F64:
        """Return the power of GPUs `at` at their lowest clock, W: no cap reaches below it."""
        return np.asarray(
            self.static_w[at] + self.dynamic_w[at] * CLOCK_MIN_PU ** self.set.in_use[GAMMA, at], np.float64
        )

    def parameter_sigma(self, at: I64) -> F64:
        """1 sigma, W, of the expectation of GPUs `at` for that their coefficients are not known; kept in
        `unknown_w`, which is 0 elsewhere.

        A GPU that has idled so far may draw what it likes once it works. A lowered clock holds back the doubt
        of what its work draws; a cap all of it, unless it may not bind or the lowest clock may draw more.
        """
        self.unknown_w[:] = 0.0
        static_w, dynamic_w = self.static_w[at], np.maximum(self.dynamic_w[at], 1e-3)
        met_pu = np.clip((self.expected[at] - static_w) / dynamic_w, 0.0, 1.0)
        features = [
            np.ones(len(at)),
            *(met_pu * f[at] if len(f) else np.zeros(len(at)) for f in self._features),
        ]
        # d P / d gamma of P = static + dynamic s^gamma
        slope_w = dynamic_w * met_pu * np.log(np.maximum(met_pu, 1e-6)) / self.set.in_use[GAMMA, at]
        unknown_w = np.hypot(self.covariance.sigma(at, features), slope_w * self._exponent_sigma(at))
        if len(held := self.capped):
            room_w, met_w = np.zeros(self.n), self.expected[held]
            room_w[held] = np.minimum(
                met_w - self._floor_w(held), self.static_w[held] + self.dynamic_w[held] - met_w
            )
            unknown_w = np.maximum(unknown_w - np.maximum(room_w[at], 0.0), 0.0)
        self.unknown_w[at] = filled(unknown_w)
        return self.unknown_w[at]

    def _exponent_sigma(self, at: I64) -> F64:
        """Return 1 sigma of the exponents in use of GPUs `at`: no number of readings makes a power law
        exact."""
        return np.asarray(np.sqrt(self.exponent_var.in_use[0, at] + EXPONENT_LAW**2), np.float64)

    def _slowed(self, clock_hz: F64, at: np.ndarray) -> tuple[F64, F64]:
        """Return the power of GPUs `at` with a lowered clock, and 1 sigma for the uncertain exponent, W."""
        fall = np.log(np.maximum((clock_hz[at] / self.top_hz[at]).astype(np.float32), 1e-3))
        left_w = self.dynamic_w[at] * np.exp(self.set.in_use[GAMMA, at].astype(np.float32) * fall)
        return self.static_w[at] + left_w, left_w * np.abs(fall) * self._exponent_sigma(at)

    def expect_clock(self, readings: Readings, temp_c: F64, hot_c: F64) -> F64:
        """Return the expected clock [n], Hz, by demand and cap; NaN where idle or slowed by heat.

        No clock falls below the lowest. The less a cap leaves beside what an idle GPU draws, the more the
        error of that power counts: `clock_doubt_hz`, 1 sigma.
        """
        cap_w = readings.lately("gpu", "power_limit_w")
        expected = np.empty(self.n)
        self.clock_doubt_hz[:] = 0.0
        found = kernels.expect_clock(
            self.static_w,
            self.dynamic_w,
            cap_w,
            self.max_w,
            self.activity,
            temp_c,
            hot_c,
            self.top_hz,
            WORKING_PU,
            expected,
            self._scratch,
        )
        at = self._scratch[:found].copy()
        if found:
            room_w = np.maximum(cap_w[at] - self.static_w[at], 1e-3 * self.dynamic_w[at])
            exponent, room = self.set.in_use[GAMMA, at], (room_w / self.dynamic_w[at]).astype(np.float32)
            expected[at] *= np.maximum(np.exp(np.log(room) / exponent), CLOCK_MIN_PU)
            idle = [np.ones(len(at)), *[np.zeros(len(at))] * 3]
            power_w = np.hypot(filled(self.sigma[at]), self.covariance.sigma(at, idle))
            bent = np.log(room) / exponent * self._exponent_sigma(at)
            share = np.minimum(np.hypot(power_w / room_w, bent) / exponent, 1.0)
            self.clock_doubt_hz[at] = filled(share * expected[at])
        return expected

    def under(self, at: I64, drawn_w: F64, in_force_w: F64, cap_w: F64) -> F64:
        """Return the power of GPUs `at` under other caps, W [k], along their learned curves.

        `drawn_w`: now, under the caps `in_force_w` (NaN: none). One that stands at a lower cap would draw
        what its activity asks for.
        """
        held = (drawn_w >= (1.0 - AT_CAP_PU) * in_force_w) & (cap_w > (1.0 + READ_PU) * in_force_w)
        free_w = self.static_w[at] + self.dynamic_w[at]
        demand_w = np.where(held, np.fmax(drawn_w, free_w), drawn_w)
        power_w = np.fmin(demand_w, cap_w)
        static_w = self.set.in_use[IDLE, at]
        # Only a cap below what the lowest clock draws is not met; the root is dear
        low = np.flatnonzero(cap_w < static_w + (demand_w - static_w) * CLOCK_MIN_PU**EXPONENT_LOW)
        exponent = self.set.in_use[GAMMA, at[low]]
        power_w[low] = capped(static_w[low], demand_w[low], cap_w[low], exponent)[0]
        return power_w

    def learn(
        self, rows: slice, readings: Readings, measured: F64, received_ns: I64, taught: Bool, dt_s: float
    ) -> None:
        """Take in the readings of a part of the GPUs; `taught` [m]: new ones, outside maintenance."""
        m = rows.stop - rows.start
        power, read_ns, expected = measured[rows], received_ns[rows], self.expected[rows]
        sm = self._features[0][rows]
        features = [np.ones(m), sm, *(f[rows] if len(f) else np.zeros(m) for f in self._features[1:])]
        finite = np.isfinite(expected - power) & taught
        clock_hz, _ = readings.good("gpu", "sm_clock_hz")
        top = self.top_hz[rows]
        # A GPU that is not slowed: by its clock; where that is not known, by its cap
        held = np.zeros(self.n, np.bool_)
        held[self.capped] = True
        full = np.where(np.isfinite(clock_hz[rows] * top), clock_hz[rows] >= SLOWED_PU * top, ~held[rows])
        working = sm > WORKING_PU
        clocks = self.clock.learning[0, rows]
        np.fmax(clocks, np.where(taught & working, clock_hz[rows], np.nan), out=clocks)
        lasting = self.noise.lasting(read_ns, rows)
        usable = finite & ~lasting
        weight = np.where(usable & full, IDLE_WEIGHT + (1.0 - IDLE_WEIGHT) * np.minimum(sm, 1.0), 0.0)
        sigma = self.sigma[rows]
        bound = np.where(np.isfinite(sigma), 4.0 * (sigma + self.unknown_w[rows]), np.inf)
        y = np.minimum(np.maximum(power, expected - bound), expected + bound)
        y -= self.static_w[rows] - self.set.in_use[IDLE, rows]
        self._learn_usual(rows, readings.good("gpu", "temp_c")[0][rows], weight * dt_s)
        busy = IDLE_ERROR_PU + (1.0 - IDLE_ERROR_PU) * np.minimum(sm, 1.0)
        self.fit.learn(rows, features, y, MODEL_ERROR_PU * busy * self.max_w[rows], weight, dt_s)
        self._learn_exponent(rows, power, clock_hz[rows] / top, usable & ~full & working)

    def _learn_usual(self, rows: slice, temp_c: F64, weight_s: F64) -> None:
        """Follow the temperature [m] that coefficients are learned at."""
        usual_c = self.usual_c.learning[0, rows]
        usable = np.isfinite(temp_c) & (weight_s > 0.0)
        np.copyto(usual_c, temp_c, where=usable & np.isnan(usual_c))
        share = weight_s / np.clip(self.fit.taught_s[rows] + weight_s, 1.0, MEMORY_S)
        usual_c += np.where(usable, share * (temp_c - usual_c), 0.0)

    def leak_doubt_w(self, rows: slice = slice(None)) -> F64:
        """Return 1 sigma [m], W, for the uncertain leakage at the present temperature."""
        doubt_w: F64 = self._leak_spread_w_per_k[rows] * np.abs(self.warmer_k[rows])
        return doubt_w

    def _learn_exponent(self, rows: slice, power: F64, pu: F64, usable: Bool) -> None:
        # Near the lowest clock nothing is left of the dynamic power but the error of the idle one
        drawn_w = power - self.static_w[rows]
        teaching = usable & (pu < LEAST_TEACHING_PU) & (self.dynamic_w[rows] > 0.3 * self.span_w[rows])
        at = np.flatnonzero(teaching & (drawn_w > LEAST_DRAWN_PU * self.max_w[rows]))
        if not len(at):
            return
        share = drawn_w[at] / self.dynamic_w[rows][at]
        fall = np.log(pu[at])
        implied = np.clip(np.log(np.minimum(share, 1.0)) / fall, EXPONENT_LOW, EXPONENT_HIGH)
        var = self.gamma_var[rows][at]
        gain = var / (var + (EXPONENT_ERROR * 0.2 / -fall) ** 2)
        learning = self.set.learning[GAMMA, rows]
        learning[at] += gain * (implied - learning[at])
        self.gamma_var[rows][at] = np.maximum((1.0 - gain) * var, 1e-4)

    def refresh_pool(self) -> None:
        """Update the coefficients of each profile from its GPUs, and the highest clock."""
        group = self.group[self._sample]
        told = _beyond_noise(self.fit.normal[:, self._sample], self.fit.moment[:, self._sample])
        told = for_prior(*told, self._own_spread[:, self._sample])
        summed = [np.array([np.bincount(group, row, self.n_group) for row in part]) for part in told]
        self.pool, self.pool_var, _ = solve(summed[0], summed[1], self._design, 1.0 / self._design_spread**2)
        self.top_hz = self._highest(self.clock.in_use[0])[self.group]

    def _highest(self, clock_hz: F64) -> F64:
        """Return the highest clock of each profile [n_group], robust against a single faulty sensor."""
        sample = np.arange(len(clock_hz))[self._sample]
        clocks = sample[np.isfinite(clock_hz[sample])]
        group = self.group[clocks]
        order = np.lexsort((clock_hz[clocks], group))
        ends = np.searchsorted(group[order], np.arange(self.n_group + 1))
        count = np.diff(ends)
        at = ends[:-1] + np.floor(ROBUST_PU * np.maximum(count - 1, 0)).astype(np.int64)
        highest = np.full(self.n_group, np.nan)
        filled = count > 0
        highest[filled] = clock_hz[clocks[order[at[filled]]]]
        return np.where(highest > 0.0, highest, np.nan)

    def move(self, rows: slice, taught_ns: I64) -> None:
        """Move the learned coefficients one step towards use; `taught_ns` [m]: newest reading used."""
        of = self.group[rows]
        prior, var = self.pool[:, of], self.pool_var[:, of]
        # A GPU is as far from its profile's coefficients as GPUs are, and those are not certain either
        spread = np.sqrt(self._own_spread[:, rows] ** 2 + np.minimum(var, self._design_spread[:, of] ** 2))
        theta, variance, factor = self.fit.solve(rows, prior, spread)
        self.set.learning[:4, rows] = theta
        self.set.move(rows)
        self.covariance.move(rows, factor)
        self.exponent_var.learning[0, rows] = self.gamma_var[rows]
        self.exponent_var.move(rows)
        self.usual_c.move(rows)
        self.clock.move(rows)
        value = np.stack([theta[IDLE], theta[SM:].sum(axis=0)])
        self.reference.settle(rows, value, self.fit.taught_s[rows], taught_ns)
        self.reference.sigma[0, rows] = np.sqrt(variance[IDLE])
        self.reference.sigma[1, rows] = np.sqrt(variance[SM:].sum(axis=0))

    def forget(self, table: str, entity: int) -> None:
        """Clear the slot of a new GPU, which begins with its profile's values."""
        if table == "gpu":
            top_hz = float(self.top_hz[entity])
            super().forget(table, entity)
            of = int(self.group[entity])
            known = self.pool[:, of] if np.isfinite(self.pool[:, of]).all() else self._design[:, of]
            self.set.reset(entity, np.append(known, EXPONENT))
            self.top_hz[entity] = top_hz


def _beyond_noise(normal: F64, moment: F64) -> tuple[F64, F64]:
    """Return the normal equations of m GPUs without what the noise of their activities seems to teach.

    `normal` [10, m], `moment` [4, m]; see `solve`. Activities that hardly move are noise, and no power
    follows them: a GPU at one work would split its power between idle and each activity with false certainty.
    With the covariance C of the activities, K^2 C remains, K = C (C + s^2 I)^-1, and as much of its moment.
    """
    share = normal / np.maximum(normal[0], 1e-300)
    mean = share[1:4]
    spread = share[[[4, 5, 6], [5, 7, 8], [6, 8, 9]]] - mean[:, None] * mean
    a, b, c = spread + (ACTIVITY_NOISE_PU**2 * np.eye(3))[:, :, None]
    adjugate = np.stack([np.cross(x, y, axis=0) for x, y in ((b, c), (c, a), (a, b))], axis=1)
    kept = (spread[:, :, None] * adjugate).sum(axis=1) / (a * adjugate[:, 0]).sum(axis=0)
    kept = (kept[:, :, None] * kept).sum(axis=1)
    left = (kept[:, :, None] * spread).sum(axis=1) + mean[:, None] * mean
    moved = (kept * (moment[1:] - mean * moment[0])).sum(axis=1) + mean * moment[0]
    of_activity = left[[0, 0, 0, 1, 1, 2], [0, 1, 2, 1, 2, 2]] * normal[0]
    return np.concatenate([normal[:4], of_activity]), np.concatenate([moment[:1], moved])
