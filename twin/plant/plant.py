"""The plant: a seeded simulated site with hidden parameters, that obeys commands and suffers faults.

`Plant.step` moves it by a step, in the order of causes: faults, work, commands, power, flow, heat. It
shares no equation with the estimator but textbook physics, and its structure has more to it. May import
everything in `twin.plant`, contracts and events.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from twin.contracts import CommandBatch
from twin.events import CommandAcked, Event, FaultReported
from twin.frame import F64, NS, Bool
from twin.physics.moist_air import rh_pu
from twin.plant.actuators import Actuators
from twin.plant.befalling import befall
from twin.plant.beginning import begin, settle
from twin.plant.campaign import Campaign
from twin.plant.compute import XID_OFF_BUS, Compute
from twin.plant.cooling import Cooling
from twin.plant.disturbance import Disturbance, neutral
from twin.plant.facility import Facility
from twin.plant.fleet_life import FleetLife
from twin.plant.hydraulics import Hydraulics
from twin.plant.leaks import Leaks
from twin.plant.ledger import Costs, Ledger, Prices
from twin.plant.obedience import obey
from twin.plant.parameters import AIR_RISE_K, LUMPED, Parameters, draw
from twin.plant.power import Power
from twin.plant.saves import dated
from twin.plant.truth import Truth, blank
from twin.plant.weather import Weather
from twin.plant.work import Work
from twin.plant.workload import Workload
from twin.site import Site

if TYPE_CHECKING:
    from twin.plant.scenario import Scenario

STEP_MAX_S = 2.0  # longer steps are done in equal parts
_ONES = np.ones(4096)  # a product with ones is a quicker sum of few
MAX_EVENTS = 100_000  # that nobody has asked for; older ones are lost
SETTLE_S = 900.0
INLET_MOVED_K = 0.02
LINK_BYTES_PER_S = 2e10  # of a link while its node is fully busy; source: estimate
FAN_PERIOD_S = 5.0  # of the control of fans in racks; source: estimate


class Plant:
    """A simulated site. `truth` is what is, `disturbance` what is wrong; both may be changed."""

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
        self.life: FleetLife | None = None
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
        self.power = Power(site, float(_rated_w(site, p).sum()))
        self.leaks = Leaks(site, p)
        self.actuators = Actuators(site)
        self.ledger, self.costs = Ledger(site.sizes["rack"]), Costs()
        self.start_ns = 0  # instant of time_s = 0, for commands that name instants
        self.job_names: dict[int, str] = {}  # slots of the twin's table of jobs, told by whoever knows
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
        self._begin()
        self.settle()

    @property
    def disturbance(self) -> Disturbance:
        """What is wrong; whoever holds it may change it between steps."""
        self._watched = True
        return self._disturbance

    @property
    def present(self) -> Disturbance:
        """What is wrong, to look at only: then the plant need not search for changes in each step."""
        return self._disturbance

    @property
    def unsolved_cdus(self) -> Bool:
        """CDUs whose flows did not converge and are those of an earlier solution [n_cdu]."""
        return self.hydraulics.failed

    @property
    def now_ns(self) -> int:
        """The instant of the truth."""
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

    def live(self, life: FleetLife) -> None:
        """Let this life go on beside the campaign; from now on agents also tell of the health of parts.

        A campaign may not do the same to the same entity. Raises ValueError for a life of another site.
        """
        if life.site is not self.site and life.site.spec_hash != self.site.spec_hash:
            raise ValueError(f"this life is of {life.site.file.site}, not of {self.site.file.site}")
        self.life, self.truth.health_count, self._unsettled = life, 0, True

    def acks(self) -> list[CommandAcked]:
        """What devices answered since last asked."""
        return self.actuators.answers()

    def events(self) -> list[Event]:
        """What happened since last asked: jobs, faults that devices report."""
        out = [dated(event, self.start_ns) for event in self._events]
        self._events.clear()
        return out

    def happened(self, events: Sequence[Event]) -> None:
        """Keep what happened until somebody asks for it."""
        self._events.extend(events)

    def figures(self) -> dict[str, float]:
        """Energy, PUE, TUE, WUE, carbon, cost, trips, throttling, work lost and saved since the beginning."""
        lost = self.workload.lost_work() if self.workload is not None else 0.0
        saving = self.workload.progress.saving_gpu_s if self.workload is not None else 0.0
        self.costs.breaker_trips = int(np.count_nonzero(self.truth.feeder_tripped))
        out = self.costs.figures(self.truth, float(self.facility.water_l.sum()), self.compute.lost_gpu_s)
        out |= {"lost_work_gpu_s": lost, "checkpoint_gpu_s": saving}
        return out | {"solver_failures": float(self.hydraulics.failures)}

    def balances(self) -> dict[str, float]:
        """Relative errors of energy and mass over the last step; each is rounding, 1e-6 at most."""
        parts = (self.compute, self.hydraulics, self.cooling, self.facility, self.power)
        return self.ledger.balances(self.truth, self.parameters, *parts, self.last_dt_s)

    def fork(self) -> Plant:
        """A plant that goes on by itself from here; what never changes is shared."""
        shared = [self.site, self.parameters]
        memo = {id(x): x for x in shared}  # tidy: allow id because the memo of deepcopy is keyed by it
        return copy.deepcopy(self, memo)

    def unsettle(self) -> None:
        """Something that seldom changes did."""
        self._unsettled = True

    # One part of a step.

    def _part(self, dt_s: float) -> None:
        t, p, d = self.truth, self.parameters, self._disturbance
        moved = self.campaign.apply(d, t.time_s, dt_s) if self.campaign is not None else False
        if self.life is not None and self.life.due(t.time_s + dt_s):
            moved = befall(self, self.life, dt_s) or moved
        if self.workload is not None:
            self.happened(self.workload.step(t, t.time_s, dt_s))
        self._obey(self.actuators.lapse(t.time_s))
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
        # What was raised in the step before may have ended in this one
        if self._unsettled or self._was_unsettled:
            t.seldom_count += 1
        self._was_unsettled, self._unsettled = self._unsettled, False

    def _obey(self, controls: Sequence[str]) -> None:
        if controls:
            self._unsettled = True
            obey(self, controls)

    def _troubles(self, dt_s: float) -> None:
        """What goes on by itself once something went wrong: coolant that leaves, counters that grow."""
        t, p, d = self.truth, self.parameters, self._disturbance
        self.leaks.step(t, p, d, self.hydraulics, dt_s)
        self.cooling.leak_heat(self.leaks.lost_w_per_k)
        self.hydraulics.read_disturbance(p, d, t.rack_isolated)
        counting = self._count(dt_s)
        self._troubled = counting or self.leaks.active

    def physics(self, dt_s: float) -> None:
        """Causes and effects of one step of at most `STEP_MAX_S`; nothing is counted."""
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
        """The fans' own control, and with it how warm the air of a node becomes per watt."""
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

    # What changes seldom.

    def connect(self) -> None:
        """Feeds, supplies and nodes after something in the power tree changed."""
        t, p, d, of = self.truth, self.parameters, self._disturbance, self.site.rack_of_node
        self.power.sense(t, d)
        ok = d.node_psu_ok & self.power.side_ok[of]
        self.compute.set_feeds(p, self.site, ok, p.rack_share_a_pu[of])
        n_rack = self.site.sizes["rack"]
        nodes = np.bincount(of, minlength=n_rack)
        mean = np.bincount(of, weights=self.compute.share_a, minlength=n_rack) / np.maximum(nodes, 1)
        self.power.connect(t, np.where(nodes > 0, mean, p.rack_share_a_pu))
        self.compute.set_alive(t, d, ok.any(axis=1) & ~t.rack_unpowered[of])
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
        """Counters of errors grow; what is less than one is kept for later. Whether any did."""
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

    # The beginning.

    def _begin(self) -> None:
        begin(self)

    def settle(self, seconds: float = SETTLE_S) -> None:
        """Bring the plant to rest under its present activity: no time passes, nothing is counted."""
        settle(self, seconds)


def _total(values: F64) -> float:
    return float(np.dot(values, _ONES[: len(values)])) if len(values) <= len(_ONES) else float(values.sum())


def _rates(d: Disturbance) -> tuple[tuple[str, F64], ...]:
    return (
        ("sbe", d.gpu_sbe_per_s), ("dbe", d.gpu_dbe_per_s), ("nvlink", d.gpu_nvlink_errors_per_s),
        ("link_errors", d.link_errors_per_s), ("link_discards", d.link_discards_per_s),
    )  # fmt: skip


def _rated_w(site: Site, p: Parameters) -> F64:
    """Power of the whole of every rack at full load, W [n_rack]."""
    gpus = np.bincount(site.rack_of_gpu, weights=p.gpu_cap_max_w, minlength=site.sizes["rack"])
    node = p.node_cpu_idle_w + p.node_cpu_dynamic_w + p.node_other_w
    net = gpus + np.bincount(site.rack_of_node, weights=node, minlength=len(gpus))
    loss = np.bincount(site.rack_of_node, weights=p.node_loss1, minlength=len(gpus))
    nodes = np.maximum(np.bincount(site.rack_of_node, minlength=len(gpus)), 1)
    return net * (1.0 + loss / nodes) + p.rack_overhead_w
