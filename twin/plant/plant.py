"""Plant: a seeded simulated site with hidden parameters that carries out commands and suffers faults.

`Plant.step` advances it in the order of causes: faults, work, commands, power, flow, heat. The plant shares
no equation with the estimator but textbook physics, and models more than the estimator does.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np

from twin.catalogue import F64, NS, Bool
from twin.contracts import CommandBatch
from twin.physics import output_of_input_w, rh_pu
from twin.plant.actuators import READY, Actuators, NodeStandby, NodeSwitches
from twin.plant.compute import XID_OFF_BUS, Compute
from twin.plant.cooling import Cooling
from twin.plant.disturbance import Disturbance, neutral
from twin.plant.facility import Facility
from twin.plant.failure_timeline import TimelinePlayer
from twin.plant.faults import Campaign
from twin.plant.hydraulics import Hydraulics, Leaks
from twin.plant.ledger import Costs, Ledger, PlantParts, Prices
from twin.plant.parameters import AIR_RISE_K, LUMPED, Parameters, draw, keep_equipment
from twin.plant.power import PlantPower
from twin.plant.scenario import Scenario
from twin.plant.truth import Truth, blank
from twin.plant.weather import Weather
from twin.plant.work import Work, dated
from twin.plant.workload import Workload
from twin.site import Site
from twin.telemetry import CommandAcked, EntityReplaced, Event, FaultReported

STEP_MAX_S = 2.0  # longer steps are done in equal parts
_ONES = np.ones(4096)  # a product with ones is a quicker sum of few
MAX_EVENTS = 100_000  # that nobody has asked for; older ones are lost
SETTLE_S, SETTLE_STEP_S = 900.0, 2.0
BUSY_PU = (0.6, 0.35, 0.3)  # activities where no workload sets them
INLET_MOVED_K = 0.02
LINK_BYTES_PER_S = 2e10  # of a link while its node is fully busy; source: estimate
FAN_PERIOD_S = 5.0  # of the control of fans in racks; source: estimate
# Counters that a new device starts at zero
COUNTERS_OF = {
    "gpu": ("gpu_xid_code", "gpu_sbe_count", "gpu_dbe_count", "gpu_nvlink_errors", "gpu_nvlink_replays",
            "gpu_nvlink_recoveries", "gpu_pcie_replays", "gpu_row_remaps"),
    "node": ("node_reboots",),
}  # fmt: skip


class Plant:
    """A simulated site. `truth` is its true state, `disturbance` its present faults; both may be changed."""

    def __init__(
        self,
        site: Site,
        seed: int = 0,
        scenario: Scenario | None = None,
        spread: float = 1.0,
        lump: bool | int = False,
        weather: Weather | None = None,
    ) -> None:
        """`lump`: each GPU of the site stands for so many (True: 4); `spread` scales the hidden differences.

        Without a scenario nothing goes wrong, and all GPUs keep a constant activity that may be overwritten.
        """
        self.site, self.seed = site, seed
        self.parameters: Parameters = draw(site, seed, spread, LUMPED if lump is True else max(1, int(lump)))
        p = self.parameters
        self.truth: Truth = blank(site)
        self._disturbance = neutral(site)
        self._troubled = False  # something goes on that was once wrong
        self._watched = False  # somebody outside holds it and may change it at any time
        self.workload: Work | None = None
        self.campaign: Campaign | None = None
        self.failures: TimelinePlayer | None = None
        self.prices = Prices()
        # Months may be run more coarsely: at 4 s the control of a building is still calm, at 10 s it is not
        self.step_max_s = STEP_MAX_S
        air = weather or Weather()
        if scenario is not None:
            self.workload = Workload(site, seed, scenario.workload)
            self.campaign = Campaign(site, scenario.scripts(site), seed)
            air = weather or scenario.weather
            self.prices = scenario.prices
        self.compute = Compute(site, p)
        self.hydraulics = Hydraulics(site, p)
        self.cooling = Cooling(site, p, self.hydraulics)
        self.facility = Facility(site, p, air)
        self.power = PlantPower(site, float(_rated_w(site, p).sum()))
        self.leaks = Leaks(site, p)
        self.actuators = Actuators(site)
        self.switches = NodeSwitches(site.sizes["node"], seed)
        self.standby = NodeStandby(site, seed)
        self.ledger, self.costs = Ledger(site.sizes["rack"]), Costs()
        self.start_ns = 0  # instant of time_s = 0, for commands that name instants
        self.job_names: dict[int, str] = {}  # slots of the twin's table of jobs, set by the caller
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._counts = {name: np.zeros(len(x)) for name, x in _rates(self._disturbance)}
        self._inlet_c = np.full(site.sizes["rack"], np.nan)
        nodes = np.maximum(np.diff(site.node_start_of_rack), 1)
        self._carried_w_per_k = p.rack_air_max_w / (AIR_RISE_K * nodes)  # by the fans at full speed, per node
        self._rise = np.zeros(site.sizes["rack"])
        self._has_air = not p.rack_liquid.all()
        self._unsettled, self._was_unsettled = True, True  # something that seldom changes does
        self.truth.seldom_count = 0
        self.last_dt_s, self._fans_due_s = 1.0, 0.0
        self.switch_on()
        self.settle()

    def keep_equipment_of(self, before: Site, spread: float) -> None:
        """Keep CDUs, loops, halls and feeders of a plant with fewer racks; called before the first step."""
        site, p = self.site, self.parameters
        keep_equipment(p, draw(before, self.seed, spread, p.lump))
        self.hydraulics = Hydraulics(site, p)
        self.cooling = Cooling(site, p, self.hydraulics)
        self.facility = Facility(site, p, self.facility.weather)
        self.switch_on()
        self.settle()

    @property
    def disturbance(self) -> Disturbance:
        """Return the present faults; the caller may change them between steps."""
        self._watched = True
        return self._disturbance

    @property
    def present(self) -> Disturbance:
        """Return the present faults, read only: the plant then need not search for changes in each step."""
        return self._disturbance

    @property
    def unsolved_cdus(self) -> Bool:
        """Return the CDUs whose flows did not converge and keep an earlier solution [n_cdu]."""
        return self.hydraulics.failed

    @property
    def now_ns(self) -> int:
        """Return the instant of the truth, ns."""
        return self.start_ns + round(self.truth.time_s * NS)

    def step(self, commands: Sequence[CommandBatch] = (), dt_s: float = 1.0) -> None:
        """Move by `dt_s`, after obeying `commands`. Powers and flows are means over its last 2 s at most."""
        if dt_s <= 0:
            raise ValueError(f"expected a step above 0 s, got {dt_s}")
        if commands:
            self._obey(self.actuators.take(commands, self.truth.time_s))
        parts = max(1, int(np.ceil(dt_s / self.step_max_s - 1e-9)))
        for _ in range(parts):
            self._part(dt_s / parts)

    def play(self, failures: TimelinePlayer) -> None:
        """Apply this failure timeline beside the campaign; agents report the health of parts from now on.

        A campaign may not act on the same entity in the same way. Raises ValueError for a timeline of another
        site.
        """
        if failures.site is not self.site and failures.site.spec_hash != self.site.spec_hash:
            raise ValueError(
                f"the failure timeline is of {failures.site.file.site}, not of {self.site.file.site}"
            )
        self.failures, self.truth.health_count, self._unsettled = failures, 0, True

    def acks(self) -> list[CommandAcked]:
        """Return the acknowledgements since the last call."""
        return self.actuators.answers()

    def events(self) -> list[Event]:
        """Return the events since the last call: jobs, and faults that devices report."""
        out = [dated(event, self.start_ns) for event in self._events]
        self._events.clear()
        return out

    def happened(self, events: Sequence[Event]) -> None:
        """Keep events until they are requested."""
        self._events.extend(events)

    def figures(self) -> dict[str, float]:
        """Return energy, PUE, TUE, WUE, carbon, cost, trips, throttling, work lost and saved since the
        begin."""
        lost = self.workload.lost_work() if self.workload is not None else 0.0
        saving = self.workload.progress.saving_gpu_s if self.workload is not None else 0.0
        self.costs.breaker_trips = int(np.count_nonzero(self.truth.feeder_tripped))
        out = self.costs.figures(self.truth, float(self.facility.water_l.sum()), self.compute.lost_gpu_s)
        out |= {"lost_work_gpu_s": lost, "checkpoint_gpu_s": saving}
        return out | {"solver_failures": float(self.hydraulics.failures)}

    def balances(self) -> dict[str, float]:
        """Return the relative errors of energy and mass over the last step: rounding, 1e-6 at most."""
        parts = PlantParts(self.compute, self.hydraulics, self.cooling, self.facility, self.power)
        return self.ledger.balances(self.truth, self.parameters, parts, self.last_dt_s)

    def fork(self) -> Plant:
        """Return a copy that continues independently; constant data is shared."""
        shared = [self.site, self.parameters]
        memo = {id(x): x for x in shared}  # tidy: allow id because the memo of deepcopy is keyed by it
        return copy.deepcopy(self, memo)

    # One part of a step.

    def _part(self, dt_s: float) -> None:
        t, p, d = self.truth, self.parameters, self._disturbance
        moved = self.campaign.apply(d, t.time_s, dt_s) if self.campaign is not None else False
        if self.failures is not None and self.failures.due(t.time_s + dt_s):
            moved = self._play(self.failures, dt_s) or moved
        moved = self.power.backup.step(d, dt_s) or moved
        if self.workload is not None:
            self.happened(self.workload.step(t, t.time_s, dt_s))
        self._obey(self.actuators.lapse(t.time_s))
        moved_nodes = self.switches.step(t)
        if self.standby.step(t) or moved_nodes:
            self.power.stale = True
        self.ledger.open(t)
        if moved or self._watched:
            self._read_disturbance()
            self._troubled = True
        if self._troubled:
            self._troubles(dt_s)
        self.facility.look_outside(t, p)
        self.physics(dt_s)
        t.time_s += dt_s
        self.last_dt_s = dt_s
        self._account(dt_s)
        if len(self.compute.shut_down):
            self._report_shut_down()
        if self._troubled or self.power.stale or self.compute.slowed or self.compute.cool_running:
            self._unsettled = True
        # A count that was raised in the step before may have ended in this one
        if self._unsettled or self._was_unsettled:
            t.seldom_count += 1
        self._was_unsettled, self._unsettled = self._unsettled, False

    def _obey(self, controls: Sequence[str]) -> None:
        if controls:
            self._unsettled = True
            self._carry_out(controls)

    def _troubles(self, dt_s: float) -> None:
        """Advance the consequences of faults: coolant that leaks, error counters that grow."""
        t, p, d = self.truth, self.parameters, self._disturbance
        self.leaks.step(t, p, d, self.hydraulics, dt_s)
        self.cooling.leak_heat(self.leaks.lost_w_per_k)
        self.hydraulics.read_disturbance(p, d, t.rack_isolated)
        counting = self._count(dt_s)
        self._troubled = counting or self.leaks.active

    def physics(self, dt_s: float) -> None:
        """Compute one step of at most `STEP_MAX_S`, without counting."""
        t, p = self.truth, self.parameters
        h, c, w = self.hydraulics, self.compute, self.cooling
        if self.power.stale:
            self._unsettled = True
            self.connect()
        h.step(t, p, dt_s)
        self._fans_due_s -= dt_s
        if self._fans_due_s <= 1e-9:
            self._fans_due_s += FAN_PERIOD_S
            self._fans(t)
        if h.changed or c.tuned_dt_s != dt_s:
            c.retune(p, h.ratio, dt_s)
            w.tune(p, dt_s)
        c.power(t, p, dt_s)
        self.power.step(t, p, c.rack_node_w, dt_s)
        c.heat(t, p, w.plates(t, p), dt_s)
        w.rack_step(t, p, c.heat_w, c.rack_gpu_w, dt_s)
        w.cdu_step(t, p, dt_s)
        w.hall_step(t, p, dt_s)
        self.facility.step(t, p, dt_s)
        self.facility.supply(w.primary_supply_c)
        nodes = c.nodes
        outlet = t.node_outlet_c.reshape(nodes.shape)
        np.multiply(t.node_power_w.reshape(nodes.shape), nodes.down(self._rise), out=outlet)
        t.node_outlet_c += t.node_inlet_c

    def _fans(self, t: Truth) -> None:
        """Update the fans' own control, the air of nodes, and other slow quantities."""
        p, w, c = self.parameters, self.cooling, self.compute
        c.set_fans(p, w.air_side(t, p, FAN_PERIOD_S))
        if self._has_air:
            np.multiply(w.fan, w.fan_factor, out=self.hydraulics.ratio, where=~p.rack_liquid)
            self.hydraulics.changed = True
        a = self._rise
        np.subtract(t.rack_inlet_c, self._inlet_c, out=a)
        if not (np.abs(a) < INLET_MOVED_K).all():  # NaN at the beginning
            self._inlet_c[:] = t.rack_inlet_c
            t.node_inlet_c[:] = p.node_inlet_add_k + t.rack_inlet_c[c.nodes.of]
        np.multiply(w.fan, w.fan_factor, out=a)
        a *= self._carried_w_per_k
        a *= t.rack_power_w
        a += 1.0  # an empty rack warms nothing
        np.divide(t.rack_air_heat_w, a, out=a)
        t.hall_rh_pu[:] = rh_pu(t.hall_cold_c, p.hall_moisture_c)
        t.hall_wet[:] = self._disturbance.hall_wet
        self.hydraulics.warm(t, p, 0.5 * (w.hot_c + w.pipe_c))
        self._troubled |= self.leaks.sweats(t, p)
        if len(t.link_bytes_per_s):
            # Traffic goes with the work of tensor cores: what they finish is exchanged
            d, first = self._disturbance, self.site.gpu_start_of_node[self.site.node_of_link]
            busy = t.gpu_tensor_pu[np.minimum(first, len(t.gpu_tensor_pu) - 1)]
            np.multiply(busy, LINK_BYTES_PER_S * d.link_rate_factor * ~t.link_down, out=t.link_bytes_per_s)

    def _account(self, dt_s: float) -> None:
        t = self.truth
        cooling_w = self.cooling.air_power_w() + _total(t.cdu_pump_power_w) + _total(self.facility.power_w)
        it_w, compute_w = _total(t.rack_power_w), _total(self.compute.rack_gpu_w) + self.compute.cpu_w
        t.cooling_power_w, t.utility_power_w = cooling_w, self.power.utility_w(it_w, cooling_w)
        self.costs.add(t, it_w, compute_w, self.prices, dt_s)

    # State that changes seldom.

    def connect(self) -> None:
        """Reconnect feeds, supplies and nodes after a change in the power tree."""
        t, p, d, of = self.truth, self.parameters, self._disturbance, self.site.rack_of_node
        self.power.sense(t, d)
        ok = d.node_psu_ok & self.power.side_ok[of]
        self.compute.set_feeds(p, self.site, ok, p.rack_share_a_pu[of])
        n_rack = self.site.sizes["rack"]
        nodes = np.bincount(of, minlength=n_rack)
        mean = np.bincount(of, weights=self.compute.share_a, minlength=n_rack) / np.maximum(nodes, 1)
        self.power.connect(t, np.where(nodes > 0, mean, p.rack_share_a_pu))
        fed = ok.any(axis=1) & ~t.rack_unpowered[of] & ~self.switches.off
        np.multiply(self.standby.power_w(), fed, out=t.node_rest_w)
        self.compute.set_alive(t, d, fed & (self.standby.level == READY))
        np.logical_or(d.node_unfit, self.switches.stopping, out=t.node_unfit)
        self._psu_ok, self._alive = d.node_psu_ok.copy(), d.gpu_alive.copy()

    def _read_disturbance(self) -> None:
        t, p, d = self.truth, self.parameters, self._disturbance
        self.power.read_disturbance(t, d)
        if not (np.array_equal(d.node_psu_ok, self._psu_ok) and np.array_equal(d.gpu_alive, self._alive)):
            self.power.stale = True
        self.compute.read_disturbance(d)
        self.hydraulics.read_disturbance(p, d, t.rack_isolated)
        self.cooling.read_disturbance(d)
        self.facility.read_disturbance(d)
        raised = np.flatnonzero(d.gpu_xid)
        for gpu in raised.tolist():
            code = int(d.gpu_xid[gpu])
            t.gpu_xid_code[gpu] = code
            self._events.append(FaultReported(table="gpu", name=self.site.name("gpu", gpu), code=code))

    def _count(self, dt_s: float) -> bool:
        """Advance error counters; fractions are kept for later. Returns True if one grew."""
        growing = False
        t, d = self.truth, self._disturbance
        for (name, rate), counter in zip(
            _rates(d),
            (t.gpu_sbe_count, t.gpu_dbe_count, t.gpu_nvlink_errors, t.link_error_count, t.link_discard_count),
            strict=True,
        ):
            if rate.any():
                growing = True
                rest = self._counts[name]
                rest += rate * dt_s
                whole = np.floor(rest)
                rest -= whole
                counter += whole.astype(np.int64)
        flapped = d.link_down & ~t.link_down
        t.link_flap_count += flapped
        np.copyto(t.link_down, d.link_down)
        return growing

    def _report_shut_down(self) -> None:
        for gpu in self.compute.shut_down.tolist():
            name = self.site.name("gpu", gpu)
            self._events.append(FaultReported(table="gpu", name=name, code=XID_OFF_BUS, detail="overheated"))
        self.compute.shut_down = np.zeros(0, np.intp)
        self.power.stale = True

    # Commands.

    def _carry_out(self, controls: Sequence[str]) -> None:
        """Apply the values in force on these controls."""
        t, p = self.truth, self.parameters
        for control in controls:
            value = self.actuators.value[control]
            known = np.isfinite(value)
            if control in ("gpu.power_cap_w", "node.power_cap_w"):
                self.apply_caps()
            elif control == "gpu.clock_lock_mhz":
                self.apply_locks()
            elif control == "cdu.supply_temp_target_c":
                self.cooling.target_c = np.where(known, value, p.cdu_supply_c)
                self.apply_set_points()
            elif control == "cdu.diff_pressure_target_pa":
                self.hydraulics.ask(t, p, value)
            elif control == "rack.liquid_isolation":
                t.rack_isolated[:] = known & (value >= 0.5)
                self.hydraulics.read_disturbance(p, self.present, t.rack_isolated)
            elif control == "rack.electrical_isolation":
                self.power.isolated[:] = known & (value >= 0.5)
                self.power.stale = True
            elif control == "node.service_level":
                t.node_service_level[known] = value[known].astype(np.int64)
            elif control == "node.power_state":
                self.switches.obey(value, t.time_s)
            elif control == "node.standby":
                self.standby.obey(value, t.time_s)
            else:
                self._pass_to_jobs(control, value)

    def apply_caps(self) -> None:
        """Set the limit of every GPU: its own cap, and its part of its node's cap less CPUs and fans.

        The limit of a node also holds while one supply carries all and loses more.
        """
        p, site, t = self.parameters, self.site, self.truth
        cap = p.gpu_cap_max_w.copy()
        own, node = self.actuators.get("gpu.power_cap_w"), self.actuators.get("node.power_cap_w")
        if own is not None:
            cap = np.minimum(cap, np.where(np.isfinite(own), own * p.lump, np.inf))
        t.node_cap_w[:] = p.node_cap_max_w
        if node is not None:
            t.node_cap_w[:] = np.fmin(node, p.node_cap_max_w)
            gpus = np.maximum(np.diff(site.gpu_start_of_node), 1)
            fans = (p.rack_fan_w * self.compute.per_node)[site.rack_of_node]
            rest = (
                p.node_other_w + fans + p.node_cpu_idle_w + p.node_cpu_dynamic_w
            )  # its GPUs get what these leave
            out = output_of_input_w(node, p.node_loss0_w, p.node_loss1, 2.0 * p.node_loss2_per_w)
            each = np.where(np.isfinite(node), (out - rest) / gpus, np.inf)
            cap = np.minimum(cap, np.maximum(each, 0.0)[site.node_of_gpu])
        t.gpu_cap_w[:] = cap
        self.compute.cap_least_w = float(cap.min(initial=np.inf))

    def apply_locks(self) -> None:
        """Set the highest clock of every GPU as it is locked."""
        top_mhz = self.site.envelopes["gpu.clock_lock_mhz"].high
        value = self.actuators.get("gpu.clock_lock_mhz")
        self.truth.gpu_lock_mhz[:] = top_mhz if value is None else np.fmin(value, top_mhz)
        self.compute.lock(self.truth.gpu_lock_mhz / top_mhz)

    def apply_set_points(self) -> None:
        """Apply the supply set points of the CDUs, and of the loops behind them."""
        self.cooling.set_points(self.truth, self.parameters)
        self.facility.aim_c = self.cooling.facility_aim_c(self.truth, self.parameters)

    def _pass_to_jobs(self, control: str, value: F64) -> None:
        if self.workload is None:
            return
        for slot, name in sorted(self.job_names.items()):
            wanted = float(value[slot])
            if np.isfinite(wanted) and control == "job.checkpoint_since_s":
                self.workload.checkpoint(name, wanted - self.start_ns / NS)
            elif np.isfinite(wanted) and control == "job.checkpoint_interval_s":
                self.workload.checkpoint_interval(name, wanted)
        value[:] = np.nan  # one-shot: not for the next job in this slot

    # Failures.

    def _play(self, failures: TimelinePlayer, dt_s: float) -> bool:
        """Apply the failure timeline of this step. Returns True if the disturbance changed."""
        t, d = self.truth, self.present
        moved = failures.apply(d, t.time_s, dt_s, self.start_ns)
        for counter, entity, growth in d.counts:
            getattr(t, counter)[entity] += growth
        for event in d.reports:
            if isinstance(event, FaultReported):
                t.gpu_xid_code[self.site.entity(event.table, event.name)] = event.code
            elif isinstance(event, EntityReplaced):
                slot = self.site.entity(event.table, event.name)
                for column in COUNTERS_OF.get(event.table, ()):
                    getattr(t, column)[slot] = 0
        self.happened(d.reports)
        d.counts.clear()
        d.reports.clear()
        np.logical_or(d.node_unfit, self.switches.stopping, out=t.node_unfit)
        t.health_count += 1
        self._unsettled = True
        return moved

    # Initial state.

    def switch_on(self) -> None:
        """Set the initial state: everything on, half warm, at the workload's first activity."""
        t, p, site = self.truth, self.parameters, self.site
        t.gpu_clock_pu[:], t.gpu_alive[:], t.node_on[:] = 1.0, True, True
        self.apply_caps()
        self.apply_locks()
        for column, level in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), BUSY_PU, strict=True):
            column[:] = level
        t.hall_cold_c[:], t.hall_rh_pu[:] = p.hall_set_c, 0.45
        t.rack_inlet_c[:] = p.hall_set_c[site.hall_of_rack] + p.rack_inlet_add_k
        t.rack_valve_pu[:] = p.rack_valve_pu
        t.cdu_coolant_l[:] = p.cdu_volume_l + p.cdu_reserve_l
        t.cdu_valve_pu[:] = 0.5
        t.gpu_temp_c[:], t.gpu_slowdown_c[:] = 45.0, p.gpu_slowdown_c
        supply = np.append(p.cdu_supply_c, 24.0)[site.cdu_of_rack]
        t.rack_supply_c[:], t.rack_return_c[:] = supply, supply + 8.0 * p.rack_liquid
        self.apply_set_points()
        t.cdu_drop_set_pa[:] = self.hydraulics.set_pa(p)
        self.facility.cold_c[:] = self.facility.aim_c
        self.facility.hot_c[:] = self.facility.aim_c + 8.0
        self.facility.supply(self.cooling.primary_supply_c)
        self.facility.look_outside(t, p)
        self.connect()
        self.compute.store(t, p, self.compute.stored_j)

    def settle(self, seconds: float = SETTLE_S) -> None:
        """Settle the plant at its present activity: no time passes, nothing is counted."""
        t = self.truth
        counted = ("gpu_energy_j", "throttle_s", "trips", "cdu_leaked_l", "cdu_filled_l", "feeder_theta")
        before = {name: getattr(t, name).copy() for name in counted}
        begun_s, lost_s, water_l = t.time_s, self.compute.lost_gpu_s, self.facility.water_l.copy()
        if self.workload is not None and begun_s == 0.0:
            memo = {id(self.site): self.site}  # tidy: allow id because the memo of deepcopy is keyed by it
            copy.deepcopy(self.workload, memo).step(t, 0.0, 1.0)
        for _ in range(round(seconds / SETTLE_STEP_S)):
            self.ledger.open(t)
            self.physics(SETTLE_STEP_S)
        for name, value in before.items():
            getattr(t, name)[:] = value
        t.feeder_theta[:] = self.power.theta_steady()
        t.time_s, self.compute.lost_gpu_s = begun_s, lost_s
        self.facility.water_l[:] = water_l
        self._set_means()

    def _set_means(self) -> None:
        t = self.truth
        t.cooling_power_w = self.cooling.air_power_w() + float(
            t.cdu_pump_power_w.sum() + self.facility.power_w.sum()
        )
        t.utility_power_w = self.power.utility_w(float(t.rack_power_w.sum()), t.cooling_power_w)
        self.last_dt_s = SETTLE_STEP_S


def _total(values: F64) -> float:
    return float(np.dot(values, _ONES[: len(values)])) if len(values) <= len(_ONES) else float(values.sum())


def _rates(d: Disturbance) -> tuple[tuple[str, F64], ...]:
    return (
        ("sbe", d.gpu_sbe_per_s), ("dbe", d.gpu_dbe_per_s), ("nvlink", d.gpu_nvlink_errors_per_s),
        ("link_errors", d.link_errors_per_s), ("link_discards", d.link_discards_per_s),
    )  # fmt: skip


def _rated_w(site: Site, p: Parameters) -> F64:
    """Return the power of every whole rack at full load, W [n_rack]."""
    gpus = np.bincount(site.rack_of_gpu, weights=p.gpu_cap_max_w, minlength=site.sizes["rack"])
    node = p.node_cpu_idle_w + p.node_cpu_dynamic_w + p.node_other_w
    net = gpus + np.bincount(site.rack_of_node, weights=node, minlength=len(gpus))
    loss = np.bincount(site.rack_of_node, weights=p.node_loss1, minlength=len(gpus))
    nodes = np.maximum(np.bincount(site.rack_of_node, minlength=len(gpus)), 1)
    return net * (1.0 + loss / nodes) + p.rack_overhead_w
