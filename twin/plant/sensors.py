"""Sensors of a simulated site: its truth as devices report it, with errors, steps, delays and gaps.

IT side: agents report GPUs and nodes each second, each rack at an instant of its own. Building side: a BMS
reports racks, CDUs, loops, feeders and halls each 2 s, values 1 to 3 s late. Equal seeds and truths give
equal observations.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F32, I64, Bool
from twin.plant.disturbance import Disturbance, SensorFault
from twin.plant.meters import (
    Column,
    DelayedPanel,
    Gateway,
    Meter,
    Noise,
    Observation,
    Panel,
    Report,
    Sampling,
)
from twin.plant.truth import Truth
from twin.site import Site
from twin.telemetry import Event

GPU_HEALTH = (
    Meter("thermal_margin_k"),
    Meter("row_remap_pending_state", seldom=True),
    Meter("row_remap_failed_state", seldom=True),
    Meter("recovery_action_state", seldom=True),
)
GPU_HEALTH_COUNTERS = ("pcie_replay_count", "nvlink_replay_count", "nvlink_recovery_count", "row_remap_count")
NODE_HEALTH_COUNTERS = ("reboot_count",)


class HealthPanels:
    """The panels of GPUs and nodes; `ahead_ns` [n_node] as of the agents' other reports."""

    def __init__(self, site: Site, ahead_ns: I64, period_s: float, noise: Noise) -> None:
        of_gpu = ahead_ns[site.node_of_gpu]
        exact = Sampling(period_s, noise, 0.0)
        self.gpu = Panel("gpu", GPU_HEALTH, GPU_HEALTH_COUNTERS, of_gpu, exact)
        self.node = Panel("node", (), NODE_HEALTH_COUNTERS, ahead_ns, exact)
        self.gpu.often = self.node.often = 0
        self._margin_k = np.empty(site.sizes["gpu"])
        self._seen = -1  # the truth's count of changes

    def reports(
        self, t: Truth, d: Disturbance, temp_c: F32, now_ns: int, agent: Bool | None, of_gpu: Bool | None
    ) -> list[Report]:
        """Return a round of reports. `temp_c` [n_gpu] is the reported temperature, NaN = none; the margin
        refers to it.

        `agent` [n_node] and `of_gpu` [n_gpu]: who speaks; None = all. A GPU off the bus reads nothing.
        """
        changed = t.health_count != self._seen
        self._seen = t.health_count
        np.subtract(t.gpu_slowdown_c, temp_c, out=self._margin_k)
        self.gpu.read((
            self._margin_k, d.gpu_remap_pending, d.gpu_remap_failed, d.gpu_recovery_action,
        ), (
            t.gpu_pcie_replays, t.gpu_nvlink_replays, t.gpu_nvlink_recoveries, t.gpu_row_remaps,
        ), now_ns, changed)  # fmt: skip
        self.node.read((), (t.node_reboots,), now_ns, changed)
        if not t.gpu_alive.all():
            self.gpu.blank(~t.gpu_alive)
        panels = ((self.node, agent), (self.gpu, of_gpu))
        return [panel.report(who) for panel, who in panels if panel.n and (who is None or who.any())]


# Errors, 1 sigma; source: estimate. DCGM gives whole degrees and clocks in steps of 15 MHz; shares come
# without a step: the catalogue's quantum is coarser than theirs.
POWER, GAIN, TEMP_K, FLOW = 0.005, 0.003, 0.3, 0.005
BMS_TEMP_K, PRESSURE, METER = 0.05, 0.003, 0.001
ACTIVITY = 0.005
WATER_GAIN = 0.012  # class 2, its limits of 2 % as a 90 % interval; source: ISO 4064-1
DROP_OUT_PU = 0.001
DELAYS_S = (1.0, 2.0, 3.0)
MAX_CLOCK_HZ = 1.98e9  # highest SM clock of an H100 SXM, NVIDIA data sheet; where no profile says
CLOCK_STEP_HZ = 15e6
VOLTAGE_V, FREQUENCY_HZ, POWER_FACTOR_PU = 415.0, 50.0, 0.99  # of a feeder; source: estimate
IT_AHEAD_NS, BMS_AHEAD_NS = (50_000_000, 250_000_000), 300_000_000  # before the end of the round
POWER_CAP_BIT, HARDWARE_SLOWED_BIT = 0x4, 0x8  # of the clock's event bits; source: DCGM field 112
SCALE_TOP_PU = 1.0
SELDOM_ROUNDS = 10  # after which all is read anyway
IN_USE = 25.0  # a share of 4 % of the SMs has some kernel running all the time; source: estimate

GPU = (
    Meter("power_w", relative=POWER, gain=GAIN, step=1.0),
    Meter("temp_c", absolute=TEMP_K, step=1.0),
    Meter("hbm_temp_c", absolute=TEMP_K, step=1.0),
    Meter("util_pu", top=SCALE_TOP_PU, factor=IN_USE),
    Meter("sm_active_pu", relative=ACTIVITY, top=SCALE_TOP_PU),
    Meter("tensor_active_pu", relative=ACTIVITY, top=SCALE_TOP_PU),
    Meter("dram_active_pu", relative=ACTIVITY, top=SCALE_TOP_PU),
    Meter("sm_clock_hz", step=CLOCK_STEP_HZ, factor=MAX_CLOCK_HZ, seldom=True),
    Meter("power_limit_w", seldom=True),
    Meter("clock_event_bits", seldom=True),
    Meter("xid_code", seldom=True),
)
# The first counts on and on, the others seldom do
GPU_COUNTERS = ("energy_mj", "throttle_power_ns", "throttle_thermal_ns", "ecc_sbe_count", "ecc_dbe_count",
                "nvlink_error_count")  # fmt: skip
NODE = (
    Meter("power_w", relative=METER, gain=GAIN, step=1.0),
    Meter("cpu_power_w", relative=POWER, gain=GAIN, step=1.0),
    Meter("inlet_temp_c", absolute=TEMP_K, step=0.5),
    Meter("outlet_temp_c", absolute=TEMP_K, step=0.5),
    Meter("psu1_power_w", relative=METER, gain=GAIN, step=1.0),
    Meter("psu2_power_w", relative=METER, gain=GAIN, step=1.0),
    Meter("leak_state", seldom=True),
    Meter("power_on_state", seldom=True),
    Meter("agent_state", seldom=True),
    Meter("service_level_state", seldom=True),
    Meter("power_cap_readback_w", seldom=True),
    Meter("power_readback_state", seldom=True),
)
RACK = (
    Meter("power_w", relative=METER, gain=GAIN, step=10.0),
    Meter("inlet_temp_c", absolute=BMS_TEMP_K, step=0.1),
    Meter("leak_state"),
    Meter("tray_leak_state"),
    Meter("leak_sensor_fault_state"),
    Meter("electrical_isolation_state"),
)
RACK_LIQUID = (
    Meter("supply_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("return_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("flow_lpm", relative=FLOW, gain=GAIN, step=0.01),
    Meter("diff_pressure_pa", relative=PRESSURE, step=10.0),
    Meter("valve_pu", step=0.001, top=SCALE_TOP_PU),
    Meter("liquid_isolation_state"),
)
CDU = (
    Meter("supply_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("return_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("flow_lpm", relative=FLOW, gain=GAIN, step=0.1),
    Meter("supply_pressure_pa", relative=PRESSURE, step=10.0),
    Meter("return_pressure_pa", relative=PRESSURE, step=10.0),
    Meter("diff_pressure_pa", relative=PRESSURE, step=10.0),
    Meter("filter_diff_pressure_pa", relative=PRESSURE, step=10.0),
    Meter("facility_supply_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("facility_return_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("facility_flow_lpm", relative=FLOW, gain=GAIN, step=0.1),
    Meter("facility_valve1_pu", step=0.001, top=SCALE_TOP_PU),
    Meter("pump1_speed_pu", step=0.001),
    Meter("pump2_speed_pu", step=0.001),
    Meter("fill_pump_state"),
    Meter("available_state"),
    Meter("running_state"),
    Meter("leak_state"),
    Meter("supply_temp_setpoint_c", step=0.01),
    Meter("supply_temp_request_c", step=0.01),
)
PRESSURE_SET = (Meter("diff_pressure_setpoint_pa", step=10.0),)
LOOP = (
    Meter("supply_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("return_temp_c", absolute=BMS_TEMP_K, step=0.01),
    Meter("flow_lpm", relative=FLOW, gain=GAIN, step=0.1),
    Meter("leak_state"),
)
LOOP_COUNTERS = ("makeup_ml",)
LOOP_POWER = (Meter("power_w", relative=METER, gain=GAIN, step=10.0),)
FEEDER = (
    Meter("power_w", relative=METER, gain=GAIN, step=10.0),
    Meter("apparent_power_va", relative=METER, gain=GAIN, step=10.0),
    Meter("power_factor_pu", step=0.01, top=SCALE_TOP_PU),
    Meter("voltage_v", relative=METER, gain=METER, step=0.1),
    Meter("current_a", relative=METER, gain=GAIN, step=0.1),
    Meter("frequency_hz", absolute=0.01, step=0.01),
    Meter("energised_state"),
    Meter("breaker_state"),
)
HALL = (
    Meter("cold_aisle_temp_c", absolute=BMS_TEMP_K, step=0.1),
    Meter("hot_aisle_temp_c", absolute=BMS_TEMP_K, step=0.1),
    Meter("cold_aisle_rh_pu", absolute=0.01, step=0.001, top=SCALE_TOP_PU),
)
FLOOR = (Meter("leak_state"),)  # of a hall; published once it was wet
WEATHER = (
    Meter("outdoor_temp_c", absolute=0.1, step=0.1),
    Meter("outdoor_wet_bulb_c", absolute=0.1, step=0.1),
)
LINK = (
    Meter("up_state"),
    Meter("rx_bytes_per_s", relative=ACTIVITY),
    Meter("tx_bytes_per_s", relative=ACTIVITY),
)
STANDBY = (Meter("standby_state"),)
LOCK = (Meter("clock_lock_readback_mhz"),)  # published when anything changes that seldom does
LINK_COUNTERS = ("error_count", "flap_count", "discard_count")


@dataclass(frozen=True, slots=True)
class Periods:
    """Reporting periods of each side."""

    it_s: float = 1.0
    bms_s: float = 2.0
    link_s: float = 10.0
    weather_s: float = 60.0


class Sensors:
    """All sensors of a site. `noise` scales every error: 0 makes them exact but for their steps and delays.

    `lump`: where each GPU of a plant stands for so many, agents report one of them: their powers, limits and
    energies are this share of the truth's.
    """

    def __init__(
        self,
        site: Site,
        seed: int = 0,
        periods: Periods | None = None,
        noise: float = 1.0,
        drop_out_pu: float = DROP_OUT_PU,
        lump: int = 1,
    ) -> None:
        self.site, self.periods = site, periods or Periods()
        self.lump = lump
        self.drop_out_pu = drop_out_pu if noise else 0.0
        rng = np.random.default_rng((seed, 0x5E))
        n = site.sizes
        longest = [n[t] for t in ("gpu", "node", "link")]
        longest.append(len(CDU) * sum(n[t] for t in ("rack", "cdu", "loop", "feeder", "hall")))
        self.noise = Noise(rng, max(longest))
        step_ns = 1_000_000
        of_rack = rng.integers(IT_AHEAD_NS[0] // step_ns, IT_AHEAD_NS[1] // step_ns, n["rack"]) * step_ns
        node_ahead: I64 = of_rack[site.rack_of_node]
        self._rng = rng
        self._scale = noise
        p = self.periods
        agents = Sampling(p.it_s, self.noise, noise)
        self.gpu = Panel("gpu", GPU, GPU_COUNTERS, node_ahead[site.node_of_gpu], agents)
        self.node = Panel("node", NODE, (), node_ahead, agents)
        # Apart, so that its readings draw nothing from what the others draw from
        of_gpu = node_ahead[site.node_of_gpu]
        self.clock_lock = Panel("gpu", LOCK, (), of_gpu, Sampling(p.it_s, self.noise, 0.0))
        self.standby = Panel("node", STANDBY, (), node_ahead, Sampling(p.it_s, self.noise, 0.0))
        of_hall = np.full(n["hall"], BMS_AHEAD_NS)
        self.floor = Panel("hall", FLOOR, (), of_hall, Sampling(p.bms_s, self.noise, 0.0))
        self._was_wet = False
        self.health = HealthPanels(site, node_ahead, p.it_s, self.noise)
        of_link, outside = node_ahead[site.node_of_link], np.full(1, BMS_AHEAD_NS)
        self.link = Panel("link", LINK, LINK_COUNTERS, of_link, agents._replace(period_s=p.link_s))
        self.weather = Panel("site", WEATHER, (), outside, agents._replace(period_s=p.weather_s))
        self.rack, self.rack_liquid = self._bms("rack", RACK), self._bms("rack", RACK_LIQUID)
        self.cdu, self.loop = self._bms("cdu", CDU), self._bms("loop", LOOP)
        self.feeder, self.hall = self._bms("feeder", FEEDER, ("energy_mj",)), self._bms("hall", HALL)
        building = (self.rack, self.rack_liquid, self.cdu, self.loop, self.feeder, self.hall)
        self.gateway = Gateway(building, self.noise, noise)
        # The electricity meter of a loop's plant: read by another gateway, with errors of its own
        own = Noise(np.random.default_rng((seed, 0x5E, 1)), n["loop"])
        self.loop_power = Panel(
            "loop",
            LOOP_POWER,
            LOOP_COUNTERS,
            np.full(n["loop"], BMS_AHEAD_NS),
            Sampling(self.periods.bms_s, own, noise),
        )
        gains = np.random.default_rng((seed, 0x5E, 2)).standard_normal(n["loop"])
        self._ml_per_l = 1e3 * (1.0 + WATER_GAIN * noise * gains)
        own = Noise(np.random.default_rng((seed, 0x5E, 3)), n["cdu"])
        self.pressure_set = Panel(
            "cdu", PRESSURE_SET, (), np.full(n["cdu"], BMS_AHEAD_NS), Sampling(self.periods.bms_s, own, 0.0)
        )
        self.gpu.often = 1
        for signal in ("power_w", "power_limit_w"):
            self.gpu.factors[self.gpu.signals.index(signal)] = 1.0 / lump
        self._seen, self._rounds = -1, 0  # the truth's count of seldom changes, rounds since all was read
        self._rack_zero, self._rack_dry = np.zeros(n["rack"]), np.zeros(n["rack"], np.bool_)
        self._cdu_one = np.ones(n["cdu"])
        self._has_lock = bool(np.isfinite(site.envelopes["gpu.clock_lock_mhz"].high).any())
        self._has_liquid: Bool = site.design.liquid & (site.cdu_of_rack >= 0)
        self._throttle_power_ns = np.zeros(n["gpu"], np.int64)
        self._feeder_mj = np.zeros(n["feeder"])
        self._gpu_scratch = np.empty(n["gpu"])
        self._last_ns: int | None = None

    def _bms(self, table: str, meters: Sequence[Meter], counters: Sequence[str] = ()) -> DelayedPanel:
        n = self.site.sizes[table]
        delay_s = self._rng.choice(DELAYS_S, n) if self._scale else np.zeros(n)
        ahead = np.full(n, BMS_AHEAD_NS, np.int64)
        sampling = Sampling(self.periods.bms_s, self.noise, self._scale)
        return DelayedPanel(table, meters, counters, ahead, sampling, delay_s)

    def fork(self) -> Sensors:
        """Return an independent copy of the sensors; the site is shared."""
        return copy.deepcopy(self, {id(self.site): self.site})  # tidy: allow id because the copy's key is its

    def observe(
        self, truth: Truth, disturbance: Disturbance, now_ns: int, events: Sequence[Event] = ()
    ) -> Observation:
        """Return the reports of the round that ends at `now_ns`; `events` are passed on."""
        dt_s = 0.0 if self._last_ns is None else (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns
        self.noise.refresh()
        faults: dict[str, list[SensorFault]] = {}
        for fault in disturbance.sensors:
            faults.setdefault(fault.table, []).append(fault)
        reports = self._observe_building(truth, faults, now_ns, dt_s)
        reports += self._observe_it(truth, disturbance, faults, now_ns, dt_s)
        reports.sort(key=lambda report: report.arrival_ns)
        return Observation(reports, events, now_ns)

    def _finish(
        self,
        panel: Panel,
        faults: dict[str, list[SensorFault]],
        present: Bool | None = None,
        dead: Bool | None = None,
    ) -> list[Report]:
        panel.drop_out(self.drop_out_pu)
        panel.spoil(faults.get(panel.table, ()))
        if dead is not None:
            panel.blank(dead)
        if panel.n == 0 or (present is not None and not present.any()):
            return []
        return [panel.report(present)]

    # The IT side.

    def _observe_it(
        self,
        truth: Truth,
        disturbance: Disturbance,
        faults: dict[str, list[SensorFault]],
        now_ns: int,
        dt_s: float,
    ) -> list[Report]:
        site, out = self.site, list[Report]()
        # Nobody counts the changes of a truth made by hand: then all is looked at
        seldom = truth.seldom_count < 0 or truth.seldom_count != self._seen or self._rounds >= SELDOM_ROUNDS
        if seldom and truth.gpu_event_bits.any():
            np.add(self._throttle_power_ns, round(dt_s * 1e9), out=self._throttle_power_ns,
                   where=(truth.gpu_event_bits & POWER_CAP_BIT) != 0)  # fmt: skip
        if self.gpu.due(now_ns):
            self._seen, self._rounds = truth.seldom_count, 0 if seldom else self._rounds + 1
            board, agent = self._speaking(truth, disturbance, faults)
            self.node.read((
                truth.node_power_w, truth.node_cpu_power_w, truth.node_inlet_c, truth.node_outlet_c,
                truth.node_psu_power_w[:, 0], truth.node_psu_power_w[:, 1], truth.node_leak, truth.node_on,
                ~truth.node_on | disturbance.node_silent, truth.node_service_level, truth.node_cap_w,
                truth.node_power_level,
            ), (), now_ns, seldom)  # fmt: skip
            out += self._finish(self.node, faults, board)
            if seldom and self.standby.n:  # the scheduler reports it, whether or not the node speaks
                self.standby.read((truth.node_standby_level,), (), now_ns)
                out.append(self.standby.report(None))
            self._read_gpus(truth, disturbance, now_ns, seldom)
            of_gpu = None if agent is None else agent[site.node_of_gpu]
            if disturbance.gpu_silent.any():
                of_gpu = ~disturbance.gpu_silent if of_gpu is None else of_gpu & ~disturbance.gpu_silent
            dead = None if truth.gpu_alive.all() else ~truth.gpu_alive
            out += self._finish(self.gpu, faults, of_gpu, dead)
            if seldom and self._has_lock:
                self.clock_lock.read((truth.gpu_lock_mhz,), (), now_ns)
                self.clock_lock.spoil(faults.get("gpu", ()))
                if dead is not None:
                    self.clock_lock.blank(dead)
                out += [self.clock_lock.report(of_gpu)] if of_gpu is None or of_gpu.any() else []
            if truth.health_count >= 0:
                temp_c = self.gpu.values[self.gpu.signals.index("temp_c")]
                out += self.health.reports(truth, disturbance, temp_c, now_ns, agent, of_gpu)
        if self.link.due(now_ns):
            rates = truth.link_bytes_per_s
            self.link.read((truth.link_down, rates, rates),
                           (truth.link_error_count, truth.link_flap_count, truth.link_discard_count),
                           now_ns)  # fmt: skip
            out += self._finish(self.link, faults)
        return out

    def _read_gpus(self, truth: Truth, disturbance: Disturbance, now_ns: int, seldom: bool) -> None:
        seldom = seldom or self.gpu.marred
        bits = truth.gpu_event_bits
        if seldom and disturbance.gpu_slowed.any():
            bits = bits | np.where(disturbance.gpu_slowed, HARDWARE_SLOWED_BIT, 0)
        energy_mj = np.multiply(truth.gpu_energy_j, 1e3 / self.lump, out=self._gpu_scratch)
        thermal_ns = truth.throttle_s * 1e9 if seldom else truth.throttle_s
        self.gpu.read((
            truth.gpu_power_w, truth.gpu_temp_c, truth.gpu_hbm_temp_c, truth.gpu_sm_pu, truth.gpu_sm_pu,
            truth.gpu_tensor_pu, truth.gpu_dram_pu, truth.gpu_clock_pu, truth.gpu_cap_w, bits,
            truth.gpu_xid_code,
        ), (
            energy_mj, self._throttle_power_ns, thermal_ns, truth.gpu_sbe_count, truth.gpu_dbe_count,
            truth.gpu_nvlink_errors,
        ), now_ns, seldom)  # fmt: skip

    def _speaking(
        self, truth: Truth, disturbance: Disturbance, faults: dict[str, list[SensorFault]]
    ) -> tuple[Bool | None, Bool | None]:
        """Return the nodes whose board reports, and those whose agent reports, [n_node] each; None = all.

        The board's controller speaks while there is power, the agent while the node is on. A node whose every
        signal is silent has lost its network: both are mute.
        """
        mute = [f.entity for f in faults.get("node", ()) if f.trouble == "silent" and not f.signal]
        hushed = bool(disturbance.node_silent.any())
        if not mute and not hushed and truth.node_on.all() and not truth.rack_unpowered.any():
            return None, None
        board: Bool = ~truth.rack_unpowered[self.site.rack_of_node]
        board[[e for e in mute if 0 <= e < len(board)]] = False
        agent: Bool = board & truth.node_on
        if hushed:
            agent &= ~disturbance.node_silent
        return board, agent

    # The building side.

    def _observe_building(
        self, truth: Truth, faults: dict[str, list[SensorFault]], now_ns: int, dt_s: float
    ) -> list[Report]:
        self._sample(truth, now_ns)
        self._feeder_mj += truth.feeder_power_w * (dt_s * 1e3)
        out: list[Report] = []
        if self.rack.due(now_ns):
            self.gateway.read_late(now_ns)
            np.copyto(self.feeder.counts[0], self._feeder_mj, casting="unsafe")
            for panel in self.gateway.panels:
                there = self._has_liquid if panel is self.rack_liquid else None
                out += self._finish(panel, faults, None if there is None or there.all() else there)
        if self.loop_power.due(now_ns):
            self.loop_power.noise.refresh()
            self.loop_power.read((truth.loop_power_w,), (truth.loop_water_l * self._ml_per_l,), now_ns)
            out += self._finish(self.loop_power, faults)
        if self.pressure_set.due(now_ns):
            self.pressure_set.noise.refresh()
            self.pressure_set.read((truth.cdu_drop_set_pa,), (), now_ns)
            out += self._finish(self.pressure_set, faults)
        self._was_wet |= bool(truth.hall_wet.any())
        if self._was_wet and self.floor.due(now_ns):
            self.floor.read((truth.hall_wet,), (), now_ns)
            out += self._finish(self.floor, faults)
        if self.weather.due(now_ns):
            outdoor = (np.array([truth.outdoor_c]), np.array([truth.wet_bulb_c]))
            self.weather.read(outdoor, (), now_ns)
            out += self._finish(self.weather, faults)
        return out

    def _sample(self, t: Truth, now_ns: int) -> None:
        """Sample the building's own sensors now; they report later."""
        tray, zero = self._rack_dry, self._rack_zero
        if t.node_leak.any():
            tray = tray.copy()
            tray[self.site.rack_of_node[t.node_leak]] = (
                True  # the same value to all: repeated racks do no harm
            )
        pumps = t.cdu_pump_speed_pu
        running: Bool = (pumps[:, 0] > 0.0) | (pumps[:, 1] > 0.0)
        self.gateway.sample((
            # Racks
            t.rack_power_w, t.rack_inlet_c, t.rack_leak, tray, zero, t.rack_unpowered,
            t.rack_supply_c, t.rack_return_c, t.rack_flow_lpm, t.rack_drop_pa, t.rack_valve_pu,
            t.rack_isolated,
            # CDUs
            t.cdu_supply_c, t.cdu_return_c, t.cdu_flow_lpm, t.cdu_supply_pa, t.cdu_return_pa, t.cdu_drop_pa,
            t.cdu_filter_drop_pa, t.cdu_primary_supply_c, t.cdu_primary_return_c, t.cdu_primary_flow_lpm,
            t.cdu_valve_pu, pumps[:, 0], pumps[:, 1], t.cdu_filling, self._cdu_one, running,
            t.cdu_leak, t.cdu_setpoint_c, t.cdu_setpoint_c,
            # Loops, feeders, halls
            t.loop_supply_c, t.loop_return_c, t.loop_flow_lpm, t.loop_leak, *_feeders(t),
            t.hall_cold_c, t.hall_hot_c, t.hall_rh_pu,
        ), now_ns)  # fmt: skip


def _feeders(truth: Truth) -> tuple[Column, ...]:
    """The columns of `FEEDER`: three-phase quantities from power and voltage."""
    live = truth.feeder_energised & ~truth.feeder_tripped
    voltage_v = np.where(live, truth.feeder_voltage_pu * VOLTAGE_V, 0.0)
    apparent_va = truth.feeder_power_w / POWER_FACTOR_PU
    current_a = np.zeros_like(voltage_v)
    np.divide(apparent_va, np.sqrt(3.0) * voltage_v, out=current_a, where=voltage_v > 1.0)
    factor = np.full_like(voltage_v, POWER_FACTOR_PU)
    hertz = np.where(truth.feeder_energised, FREQUENCY_HZ, np.nan)
    return (truth.feeder_power_w, apparent_va, factor, voltage_v, current_a, hertz,
            ~truth.feeder_energised, truth.feeder_tripped)  # fmt: skip
