"""Compute: the nodes of a plant and their GPUs. Activity becomes power, power becomes heat, heat lowers
clocks.

Each GPU is a heat capacity behind a plate, C dT/dt = P - (T - T_ref)/R, stepped exactly while P and T_ref are
constant. The coolant receives what the capacity does not store, so no energy is lost. Coolant that stands in
a plate may boil: then the GPU gets no hotter until the plate is dry.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool
from twin.physics import COOLANTS, boiling_c
from twin.plant.disturbance import Disturbance
from twin.plant.layout import Runs
from twin.plant.parameters import LEAKAGE_SCALE_K, Parameters
from twin.plant.truth import Truth
from twin.site import Site

RETUNE_PU = 1e-3  # a flow that changed by less leaves the resistances as they are: 0.05 % of them at most
FAN_W = 0.5  # of a node: changes below are left out
RATIO_MIN = 0.02  # below so much of the nominal flow a plate is as good as stagnant; source: estimate
CLOCK_FALL_PER_S, CLOCK_RISE_PER_S = 0.05, 0.02  # of thermal throttling; source: estimate
CLOCK_MIN_PU = 0.17  # 345 of 1980 MHz of an H100
RECOVER_K = 3.0  # below slowdown before the clock may rise again; source: estimate
BIT_POWER_CAP, BIT_SW_THERMAL, BIT_HW_THERMAL = 0x4, 0x20, 0x40  # DCGM field 112
HARD_K = 3.0  # above slowdown it is the hardware that slows; source: estimate
XID_OFF_BUS = 79
PLATE_KG = 0.02  # of coolant in the plate of a GPU and the hoses next to it; source: estimate
EVAPORATION_J_PER_KG = 2.26e6  # of water at its boiling point, IAPWS-IF97; its glycol stays behind
# Zuber: a flat wall under water at 0.1 MPa gives off 1.1 MW/m2 before vapour covers it; here over 40 cm2 of a
# plate, which is an estimate. Below, the wall's superheat goes with the cube root of the flux (Rohsenow)
CRITICAL_W, CRITICAL_SUPERHEAT_K = 4400.0, 25.0
DRY_FACTOR = 20.0  # vapour conducts heat a twentieth as well as coolant: 0.025 over 0.5 W/m K


class Compute:
    """GPUs and nodes. Per-step results of racks are kept in arrays [n_rack]."""

    def __init__(self, site: Site, p: Parameters) -> None:
        n_gpu, n_node, n_rack = site.sizes["gpu"], site.sizes["node"], site.sizes["rack"]
        self.gpus = Runs(site.gpu_start_of_node[site.node_start_of_rack])
        self.nodes = Runs(site.node_start_of_rack)
        self.trays = Runs(site.gpu_start_of_node)
        tray = self.trays.shape[1] if self.trays.equal else 0
        self.single = tray == 1  # one GPU per node: their columns are the same
        self.half = tray // 2 if self.trays.equal and tray > 1 and tray % 2 == 0 else 0
        self.tray = tray
        self.resistance = np.zeros(n_gpu)
        self.decay = np.zeros(n_gpu)
        self.plate_factor = np.ones(n_gpu)
        self.tuned_ratio, self.tuned_dt_s = np.full(n_rack, np.nan), 0.0
        self.upstream = np.zeros(n_gpu if self.half else 0)  # K per W of the partner upstream
        self.thermal_clock = np.ones(n_gpu)
        self.lock_pu = np.ones(n_gpu)  # the highest clock that a lock allows
        self.slowed = self.cool_running = self.locked = False
        self.burnt = np.zeros(n_gpu, np.bool_)  # shut down by heat, until its node is switched off
        self.any_dead = self.any_off = False
        self.slowdown_least = float(p.gpu_slowdown_c.min()) if n_gpu else np.inf
        self.shutdown_least = float(p.gpu_shutdown_c.min()) if n_gpu else np.inf
        # E = leak(T) as a polynomial: leak0 + T (leak1 + T leak2), around 40 degC
        k = p.gpu_leak_w_per_k
        self.static2 = k / (2.0 * LEAKAGE_SCALE_K)
        self.static1 = k - 80.0 * self.static2
        self.static0 = p.gpu_idle_w - 40.0 * k + 1600.0 * self.static2
        self.base_w = np.zeros(n_node)
        self.fan_w_of_node = np.full(n_rack, np.nan)
        self.per_node = 1.0 / np.maximum(np.diff(site.node_start_of_rack), 1)
        self.cpu_w = 0.0  # of all nodes
        self.share_a = np.zeros(n_node)
        self.cap_least_w = -np.inf  # the lowest cap of any GPU
        self.a, self.b = np.empty(n_gpu), np.empty(n_gpu)
        self.c, self.d = np.empty(n_node), np.empty(n_node)
        self.gpu_sum = np.empty(n_node)
        self.rack_gpu_w, self.rack_node_w = np.zeros(n_rack), np.zeros(n_rack)
        self.stored_j, self.stored_before_j = np.zeros(n_rack), np.zeros(n_rack)
        self.heat_w = np.zeros(n_rack)  # out of the GPUs, mean over the step
        self.lost_gpu_s = 0.0
        self.shut_down = np.zeros(0, np.intp)  # GPUs that fell off in this step
        self.coolant = COOLANTS[site.file.coolant]
        self.cdu_of_rack = np.where(p.rack_liquid, site.cdu_of_rack, -1)
        # The lowest temperature at which any coolant boils, and the heat that boiled in each plate [n_gpu]
        self.boils_least = self.coolant.boiling_c if p.rack_liquid.any() else np.inf
        self.boiled_j, self.any_boiled = np.zeros(n_gpu), False

    def retune(self, p: Parameters, ratio: F64, dt_s: float) -> None:
        """Update resistances and time constants for this flow over nominal flow [n_rack] if it changed."""
        moved = np.abs(ratio - self.tuned_ratio)
        if dt_s == self.tuned_dt_s and moved.max(initial=0.0) <= RETUNE_PU:
            return
        self.tuned_ratio[:] = ratio
        self.tuned_dt_s = dt_s
        factor = np.maximum(ratio, RATIO_MIN) ** p.rack_exponent
        runs, shape = self.gpus, self.gpus.shape
        r = self.resistance.reshape(shape)
        np.multiply(p.gpu_convection_k_per_w.reshape(shape), runs.down(factor), out=r)
        r += p.gpu_conduction_k_per_w.reshape(shape)
        if self.any_boiled:
            # Coolant that flows again fills the plates
            self.boiled_j[(ratio > RATIO_MIN)[runs.of]] = 0.0
            self.any_boiled = bool(self.boiled_j.any())
            self.resistance += p.gpu_convection_k_per_w * factor[runs.of] * (DRY_FACTOR - 1.0) * self.dry(p)
        r *= self.plate_factor.reshape(shape)
        np.multiply(self.resistance, p.gpu_heat_capacity_j_per_k, out=self.decay)
        np.divide(-dt_s, self.decay, out=self.decay)
        np.exp(self.decay, out=self.decay)
        if self.half:
            np.copyto(self.upstream.reshape(shape),
                      runs.down(p.rack_upstream_k_per_w / np.maximum(ratio, RATIO_MIN)))  # fmt: skip

    def dry(self, p: Parameters) -> Bool:
        """Return the plates whose coolant has boiled away [n_gpu]."""
        out: Bool = self.boiled_j >= PLATE_KG * EVAPORATION_J_PER_KG * p.lump
        return out

    def read_disturbance(self, d: Disturbance) -> None:
        """Read the plates that conduct badly, alone or with their tray."""
        factor = d.gpu_plate_factor * d.node_plate_factor[self.trays.of]
        if not np.array_equal(factor, self.plate_factor):
            self.plate_factor[:] = factor
            self.tuned_dt_s = 0.0

    def lock(self, clock_pu: F64) -> None:
        """Set the highest clock of each GPU [n_gpu] by its lock; NaN without a lock."""
        self.lock_pu[:] = np.where(np.isfinite(clock_pu), clock_pu, 1.0)
        self.locked = bool((self.lock_pu < 1.0).any())

    def set_feeds(self, p: Parameters, site: Site, ok: Bool, share_a: F64) -> None:
        """Set the supplies that work [n_node, 2], and the share of two that do [n_node].

        One that carries all alone loses twice as much by its resistance.
        """
        both = ok.all(axis=1)
        self.share_a[:] = np.where(both, share_a, ok[:, 0].astype(np.float64))
        self.loss2 = p.node_loss2_per_w * np.where(both, 1.0, 2.0)
        self.loss1 = 1.0 + p.node_loss1

    def set_fans(self, p: Parameters, fan_w: F64) -> None:
        """Set the fan power of a whole rack [n_rack], spread over its nodes; small changes are ignored."""
        np.multiply(fan_w, self.per_node, out=fan_w)
        if not np.abs(fan_w - self.fan_w_of_node).max(initial=0.0) < FAN_W:
            self.fan_w_of_node[:] = fan_w
            self.base_w[:] = p.node_other_w + fan_w[self.nodes.of]

    def power(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Compute the power of every GPU from activity, temperature, cap and clock, and of every node."""
        a, b = t.gpu_power_w, self.b
        np.multiply(t.gpu_tensor_pu, p.gpu_cross_w, out=a)
        a += p.gpu_sm_w
        a *= t.gpu_sm_pu
        np.multiply(t.gpu_tensor_pu, p.gpu_tensor_w, out=b)
        a += b
        np.multiply(t.gpu_dram_pu, p.gpu_dram_w, out=b)
        a += b
        np.multiply(t.gpu_temp_c, self.static2, out=b)
        b += self.static1
        b *= t.gpu_temp_c
        b += self.static0
        a += b  # demand; b: static
        if (
            self.slowed
            or self.cool_running
            or self.locked
            or (len(a) and np.maximum.reduce(a) > self.cap_least_w)
        ):
            self._slow(t, p, a, b, dt_s)
        if self.any_dead:
            a *= t.gpu_alive
            self.lost_gpu_s += float(np.count_nonzero(~t.gpu_alive)) * p.lump * dt_s
        if dt_s == 1.0:
            t.gpu_energy_j += a
        else:
            np.multiply(a, dt_s, out=b)
            t.gpu_energy_j += b
        self._nodes(t, p)

    def _slow(self, t: Truth, p: Parameters, demand: F64, static: F64, dt_s: float) -> None:
        """Lower power and clock where a cap, a lock or heat limits them.

        Dynamic power is f V(f)^2, of which the exponent of a cap is the law; source: estimate.
        """
        if self.slowed:
            t.gpu_clock_pu[:] = 1.0
            t.gpu_event_bits[:] = 0
        capped = np.flatnonzero(demand > t.gpu_cap_w)
        slower = self.cool_running or self.locked
        self.slowed = bool(len(capped)) or slower
        if len(capped):
            # An idle GPU may stand above its cap by its static power alone
            dynamic = np.maximum(demand[capped] - static[capped], 1e-9)
            room = np.maximum(t.gpu_cap_w[capped] - static[capped], 0.0) / dynamic
            gamma = p.gpu_exponent[capped]
            clock = np.maximum(room ** (1.0 / gamma), CLOCK_MIN_PU)
            t.gpu_clock_pu[capped] = clock
            t.gpu_event_bits[capped] = BIT_POWER_CAP
            floor = static[capped] + dynamic * CLOCK_MIN_PU**gamma
            # A cap below what the lowest clock draws is exceeded
            demand_capped = np.maximum(t.gpu_cap_w[capped], floor)
        if slower:
            highest = np.minimum(self.thermal_clock, self.lock_pu)
            at = np.flatnonzero(highest < t.gpu_clock_pu)
            dynamic = demand[at] - static[at]
            low = highest[at]
            slowed_w = static[at] + dynamic * low ** p.gpu_exponent[at]
        if len(capped):
            demand[capped] = demand_capped
        if slower:
            demand[at] = slowed_w
            t.gpu_clock_pu[at] = low
            hot = at[self.thermal_clock[at] <= self.lock_pu[at]]
            over_k = t.gpu_temp_c[hot] - p.gpu_slowdown_c[hot]
            t.gpu_event_bits[hot] |= np.where(over_k > HARD_K, BIT_HW_THERMAL, BIT_SW_THERMAL)
            t.throttle_s[hot] += dt_s
        busy = (t.gpu_sm_pu > 0.0) & t.gpu_alive
        self.lost_gpu_s += float(((1.0 - t.gpu_clock_pu) * busy).sum()) * p.lump * dt_s

    def _nodes(self, t: Truth, p: Parameters) -> None:
        c, out = self.c, t.node_power_w
        if self.single:
            gpu_w, sm = t.gpu_power_w, t.gpu_sm_pu
        else:
            gpu_w = self.trays.sums(t.gpu_power_w.reshape(self.trays.shape), self.gpu_sum)
            sm = self._mean_sm(t)
        cpu = t.node_cpu_power_w
        np.multiply(sm, p.node_cpu_dynamic_w, out=cpu)
        cpu += p.node_cpu_idle_w
        np.add(cpu, gpu_w, out=c)
        c += self.base_w  # delivered to the node
        np.multiply(c, self.loss2, out=out)
        out += self.loss1
        out *= c
        out += p.node_loss0_w
        if self.any_off:
            out *= t.node_on
            out += t.node_rest_w
            cpu *= t.node_on
        self.cpu_w = float(np.add.reduce(cpu))
        np.multiply(out, self.share_a, out=t.node_psu_power_w[:, 0])
        np.subtract(out, t.node_psu_power_w[:, 0], out=t.node_psu_power_w[:, 1])
        self.nodes.sums(out.reshape(self.nodes.shape), self.rack_node_w)
        self.gpus.sums(t.gpu_power_w.reshape(self.gpus.shape), self.rack_gpu_w)

    def _mean_sm(self, t: Truth) -> F64:
        out = self.trays.sums(t.gpu_sm_pu.reshape(self.trays.shape), self.d)
        if self.trays.equal:
            out /= self.tray
        else:
            out /= np.maximum(np.diff(self.trays.start), 1)
        return out

    def heat(self, t: Truth, p: Parameters, reference_c: F64, dt_s: float) -> None:
        """Compute the temperatures at the end of the step, plates against `reference_c` [n_rack]; returns
        the heat that left."""
        runs, shape = self.gpus, self.gpus.shape
        a, b, temp = self.a, self.b, t.gpu_temp_c
        np.multiply(self.resistance, t.gpu_power_w, out=a)
        a2 = a.reshape(shape)
        a2 += runs.down(reference_c)
        if self.half:
            np.multiply(self.upstream, t.gpu_power_w, out=b)
            for k in range(self.half):
                a[self.half + k :: self.tray] += b[k :: self.tray]
        np.subtract(temp, a, out=temp)
        temp *= self.decay
        temp += a
        hottest = float(np.maximum.reduce(temp)) if len(temp) else -np.inf
        if hottest > self.boils_least:
            self._boil(t, p, dt_s)
        np.multiply(p.gpu_hbm_rise_k, t.gpu_dram_pu, out=b)
        np.add(temp, b, out=t.gpu_hbm_temp_c)
        self.stored_before_j, self.stored_j = self.stored_j, self.stored_before_j
        self.store(t, p, self.stored_j)
        np.subtract(self.stored_j, self.stored_before_j, out=self.heat_w)
        self.heat_w *= -1.0 / dt_s
        self.heat_w += self.rack_gpu_w
        if self.cool_running or hottest > self.slowdown_least:
            self._throttle(t, p, dt_s)

    def _boil(self, t: Truth, p: Parameters, dt_s: float) -> None:
        """Take away what boils in this step: a wet plate holds its GPU at its boiling temperature, as far as
        the critical heat flux allows; beyond that flux vapour covers it, and it is as good as dry."""
        point_c = np.append(boiling_c(self.coolant, t.cdu_return_pa), np.inf)[self.cdu_of_rack]
        hot = np.flatnonzero(t.gpu_temp_c > point_c[self.gpus.of])
        power_w, critical_w = t.gpu_power_w[hot], CRITICAL_W * p.lump
        holds_c = point_c[self.gpus.of[hot]] + power_w * (
            p.gpu_conduction_k_per_w[hot] * self.plate_factor[hot]
        )
        holds_c += CRITICAL_SUPERHEAT_K * np.cbrt(power_w / critical_w)
        capacity = p.gpu_heat_capacity_j_per_k[hot]
        over_j = np.maximum(t.gpu_temp_c[hot] - holds_c, 0.0) * capacity
        taken_j = np.where(self.dry(p)[hot], 0.0, np.minimum(over_j, critical_w * dt_s))
        t.gpu_temp_c[hot] -= taken_j / capacity
        self.boiled_j[hot] += taken_j
        self.boiled_j[hot[(power_w > critical_w) & (over_j > 0.0)]] = np.inf
        if self.dry(p)[hot].any() or self.boiled_j[hot].any():
            self.any_boiled, self.tuned_dt_s = True, 0.0

    def store(self, t: Truth, p: Parameters, out: F64) -> F64:
        """Return the heat stored in the GPUs of each rack, J over 0 degC [n_rack]."""
        np.multiply(p.gpu_heat_capacity_j_per_k, t.gpu_temp_c, out=self.b)
        return self.gpus.sums(self.b.reshape(self.gpus.shape), out)

    def _throttle(self, t: Truth, p: Parameters, dt_s: float) -> None:
        clock, temp = self.thermal_clock, t.gpu_temp_c
        fall = temp > p.gpu_slowdown_c
        rise = temp < p.gpu_slowdown_c - RECOVER_K
        clock -= fall * (CLOCK_FALL_PER_S * dt_s)
        clock += rise * (CLOCK_RISE_PER_S * dt_s)
        np.clip(clock, CLOCK_MIN_PU, 1.0, out=clock)
        self.cool_running = bool((clock < 1.0).any())
        self.slowed |= self.cool_running
        if temp.max(initial=-273.0) > self.shutdown_least:
            gone = np.flatnonzero((temp > p.gpu_shutdown_c) & t.gpu_alive)
            if len(gone):
                self.burnt[gone] = True
                t.trips[gone] += 1
                t.gpu_xid_code[gone] = XID_OFF_BUS
                self.shut_down = gone

    def set_alive(self, t: Truth, d: Disturbance, on: Bool) -> None:
        """Set the GPUs on the bus: not fallen off, not shut down, and with power at their node [n_node]."""
        back = on & ~t.node_on
        if back.any():
            self.burnt &= ~back[self.trays.of]
        t.node_on[:] = on
        t.gpu_alive[:] = d.gpu_alive & ~self.burnt & on[self.trays.of]
        self.any_off = not on.all()
        self.any_dead = not t.gpu_alive.all()
