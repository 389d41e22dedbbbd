"""Mirror: a plant in the state of the twin, with learned parameters and measured levels.

It answers questions of what would happen from now on. Parameters and levels that are unknown stay as in a
settled plant of the same design. Diagnosed faults continue as disturbances where their size can be known.

Calibration: flows and pressures of one moment give resistances and pump heads without delay. Parameters with
memory (plates, exchangers, the share of the liquid) are taken as the estimator has learned them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import numpy as np

from twin.catalogue import F64, NS, Bool, signal_of
from twin.contracts import Fault
from twin.plant.compute import CLOCK_MIN_PU, Compute
from twin.plant.cooling import Cooling
from twin.plant.disturbance import Disturbance, SensorFault, SensorTrouble, neutral
from twin.plant.faults import LEAK_LPM, PUBLISHED
from twin.plant.frozen_workload import FrozenWorkload
from twin.plant.hydraulics import Hydraulics
from twin.plant.meters import DelayedPanel, Panel
from twin.plant.parameters import Parameters
from twin.plant.plant import Plant
from twin.plant.sensors import Sensors
from twin.plant.weather import DAY_S
from twin.telemetry import GOOD, MISSING, STALE

if TYPE_CHECKING:
    from twin.engine import Engine

LEAST_FLOW_PU, LEAST_DROP_PA = 0.05, 500.0  # below, a reading shows no resistance; source: estimate
RUNNING_PU = 0.05  # a pump below this speed stands; source: estimate
FULL_SPEED_PU = 0.98  # above it a pump can give no more, and its pressure is no set point
BUSY_PU = 0.10  # of the dynamic power, below which it shows no coefficient; source: estimate
FEED_SHARES = (0.35, 0.65)  # of one side of a rack's feeds, while both carry; source: estimate
WORKS_PU = 0.5  # of the highest power: readings below teach little of a plate; source: estimate
LATELY_S = 10.0  # source: estimate
TRUST = (0.5, 2.0)  # a reading that asks for more or less of a parameter than that is not believed
BIT_ANY_SLOW = 0x4 | 0x20 | 0x40  # power cap and thermal slowdown, DCGM field 112


class TwinReadings:
    """Good or at most stale readings of the twin, and its learned parameters."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.site = engine, engine.site
        self.now_ns = engine.state.now_ns
        self._parameters = getattr(engine.estimator, "parameters", {})

    def reading(self, key: str) -> F64:
        """Return the last value of a gauge or state [n]; NaN without a usable one."""
        signal = signal_of(key)
        column = self.engine.state.tables[signal.table]
        quality = column.quality_of(signal, self.now_ns)
        value = column.value[signal.row].astype(np.float64)
        # One reading that was left out does not make a device unknown
        lately = (quality == MISSING) & (column.age_s(signal, self.now_ns) <= LATELY_S)
        return np.where((quality == GOOD) | (quality == STALE) | lately, value, np.nan)

    def count(self, key: str) -> F64:
        """Return the raw value of a counter [n]; 0 if it never reported."""
        signal = signal_of(key)
        raw = self.engine.state.tables[signal.table].raw[signal.row]
        out: F64 = np.maximum(raw, 0).astype(np.float64)
        return out

    def parameter(self, name: str, n: int, reference: bool = False) -> F64:
        """Return a parameter of the estimator [n], or its settled value; NaN without one."""
        found = self._parameters.get(name)
        if found is None or len(found.value) != n:
            return np.full(n, np.nan)
        return np.array(found.reference if reference else found.value, np.float64)

    def diagnosed(self, kind: str, table: str) -> Bool:
        """Return the entities [n] with this fault in the diagnosis now."""
        out = np.zeros(self.site.sizes[table], np.bool_)
        for fault in self.engine.diagnosis.faults:
            if fault.kind == kind and fault.table == table:
                out[fault.entity] = True
        return out


def calibrate(twin: TwinReadings, p: Parameters, activity: F64, fan_w: F64) -> dict[str, F64]:
    """Set parameters to known values; returns factors [n] of a Disturbance for reported faults.

    `activity` [3, n_gpu] is what GPUs do now, `fan_w` [n_rack] what the fans of nodes draw. What a reported
    fault has changed goes into the factor of that fault, over what the parameter was when it was well.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        _gpus(twin, p, activity)
        _nodes(twin, p, activity, fan_w)
        _racks(twin, p)
        factors = _circuits(twin, p)
        factors |= _exchangers(twin, p) | _plates(twin, p)
    return factors


def _near(wanted: F64, drawn: F64, low: float = TRUST[0], high: float = TRUST[1]) -> F64:
    """Return the value that a reading implies, within a trusted range; otherwise the drawn one."""
    known = np.isfinite(wanted) & (wanted > 0.0)
    return np.where(known, np.clip(wanted, low * drawn, high * drawn), drawn)


def _gpus(twin: TwinReadings, p: Parameters, activity: F64) -> None:
    """Set power coefficients, so that an unlimited GPU draws its power in the twin."""
    sm, tensor, dram = activity
    power, temp = twin.reading("gpu.power_w"), twin.reading("gpu.temp_c")
    bits = np.nan_to_num(twin.reading("gpu.clock_event_bits")).astype(np.int64)
    free = (bits & BIT_ANY_SLOW) == 0
    over_k = np.where(np.isfinite(temp), temp, 45.0) - 40.0
    static = p.gpu_idle_w + p.gpu_leak_w_per_k * over_k * (1.0 + over_k / 120.0)
    dynamic = sm * (p.gpu_sm_w + tensor * p.gpu_cross_w) + tensor * p.gpu_tensor_w + dram * p.gpu_dram_w
    most = p.gpu_sm_w + p.gpu_tensor_w + p.gpu_dram_w + p.gpu_cross_w
    informative = free & (dynamic >= BUSY_PU * most)
    factor = np.where(informative, _near((power - static) / dynamic, np.ones_like(dynamic)), 1.0)
    for name in ("gpu_sm_w", "gpu_tensor_w", "gpu_dram_w", "gpu_cross_w"):
        getattr(p, name)[:] *= factor


def _nodes(twin: TwinReadings, p: Parameters, activity: F64, fan_w: F64) -> None:
    """Set the power of a node beside its GPUs, from its own meter."""
    site, n = twin.site, twin.site.sizes["node"]
    count = np.maximum(np.diff(site.gpu_start_of_node), 1)
    use = np.bincount(site.node_of_gpu, weights=activity[0], minlength=n) / count
    cpu = twin.reading("node.cpu_power_w")
    p.node_cpu_idle_w[:] = _near(cpu - p.node_cpu_dynamic_w * use, p.node_cpu_idle_w, 0.2, 5.0)
    cpu = np.where(np.isfinite(cpu), cpu, p.node_cpu_idle_w + p.node_cpu_dynamic_w * use)
    gpus = np.bincount(site.node_of_gpu, weights=twin.reading("gpu.power_w"), minlength=n)
    delivered = (twin.reading("node.power_w") - p.node_loss0_w) / (1.0 + p.node_loss1)
    fans = (fan_w / np.maximum(np.diff(site.node_start_of_rack), 1))[site.rack_of_node]
    p.node_other_w[:] = _near(delivered - gpus - cpu - fans, p.node_other_w, 0.1, 5.0)


def _racks(twin: TwinReadings, p: Parameters) -> None:
    """Set the overhead, and the share of heat into the coolant."""
    site, n = twin.site, twin.site.sizes["rack"]
    power = twin.reading("rack.power_w")
    nodes = np.bincount(site.rack_of_node, weights=twin.reading("node.power_w"), minlength=n)
    overhead, factor = twin.parameter("rack.overhead", n), twin.parameter("rack.loss_factor", n)
    learned = np.isfinite(overhead) & np.isfinite(factor)
    p.rack_overhead_pu[learned] = np.maximum(factor[learned] - 1.0, 0.0)
    rest = np.where(learned, overhead, power - nodes * (1.0 + p.rack_overhead_pu))
    p.rack_overhead_w[:] = _near(rest, np.maximum(p.rack_overhead_w, 1.0), 0.0, 5.0)
    one, two = (
        np.bincount(site.rack_of_node, weights=twin.reading(f"node.psu{k}_power_w"), minlength=n)
        for k in (1, 2)
    )
    share = one / (one + two)
    # Where one side is lost, its share says nothing of both
    both = (share > FEED_SHARES[0]) & (share < FEED_SHARES[1])
    p.rack_share_a_pu[both] = share[both]
    capture = twin.engine.estimator.liquid_capture()
    gpus = np.bincount(site.rack_of_gpu, weights=twin.reading("gpu.power_w"), minlength=n)
    to_air = p.rack_to_air_w_per_k * (twin.reading("rack.return_temp_c") - twin.reading("rack.inlet_temp_c"))
    wanted = capture * power + np.nan_to_num(to_air)
    others = np.maximum(power - gpus, 1.0)
    part = np.clip((wanted - p.rack_plate_capture_pu * gpus) / others, 0.0, 0.99)
    known = np.isfinite(part) & p.rack_liquid
    p.rack_rest_capture_pu[known] = part[known]
    plates = np.clip((wanted - part * others) / gpus, 0.5, 1.0)
    known &= np.isfinite(plates)
    p.rack_plate_capture_pu[known] = plates[known]


def _circuits(twin: TwinReadings, p: Parameters) -> dict[str, F64]:
    """Set resistances of branches and filters, pressure set points and pumps."""
    flow, drop = twin.reading("rack.flow_lpm"), twin.reading("rack.diff_pressure_pa")
    informative = p.rack_liquid & (flow >= LEAST_FLOW_PU * p.rack_flow_lpm) & (drop >= LEAST_DROP_PA)
    now = np.where(informative, drop / flow**2, twin.parameter("rack.branch", len(flow)))
    blocked = twin.diagnosed("branch_blocked", "rack")
    well = np.where(blocked, twin.parameter("rack.branch", len(flow), reference=True), now)
    p.rack_branch[:] = np.where(p.rack_liquid, _near(well, p.rack_branch, 0.1, 10.0), p.rack_branch)
    # Without any flow the remaining opening is unknown: it counts as shut
    shut = blocked & ~(flow >= LEAST_FLOW_PU * p.rack_flow_lpm)
    factors = {
        "rack_branch_factor": _factor(blocked, np.where(shut, 1e12 * p.rack_branch, now), p.rack_branch)
    }

    through, across = twin.reading("cdu.flow_lpm"), twin.reading("cdu.diff_pressure_pa")
    running = through >= LEAST_FLOW_PU * p.cdu_flow_lpm
    now = np.where(running, twin.reading("cdu.filter_diff_pressure_pa") / through**2, np.nan)
    clogged = twin.diagnosed("filter_blocked", "cdu")
    well = np.where(clogged, twin.parameter("cdu.filter", len(through), reference=True), now)
    p.cdu_filter[:] = _near(well, p.cdu_filter, 0.1, 10.0)
    factors["cdu_filter_factor"] = _factor(clogged, now, p.cdu_filter)

    speeds = np.stack([twin.reading("cdu.pump1_speed_pu"), twin.reading("cdu.pump2_speed_pu")], axis=1)
    on = speeds > RUNNING_PU
    pumps = np.maximum(on.sum(axis=1), 1)
    squared = np.where(on, speeds**2, 0.0).sum(axis=1) / pumps
    filter_now = p.cdu_filter * factors["cdu_filter_factor"]
    inner = (p.cdu_inner + filter_now) * through**2
    head = across + inner + p.cdu_curve.mean(axis=1) * (through / pumps) ** 2
    drawn = p.cdu_head0_pa.mean(axis=1)
    informative = running & on.any(axis=1) & (across >= LEAST_DROP_PA)
    factor = _near(np.where(informative, head / squared, np.nan), drawn) / drawn
    p.cdu_head0_pa[:] *= factor[:, None]
    set_pa = twin.reading("cdu.diff_pressure_setpoint_pa")
    steady = informative & (np.nanmax(np.where(on, speeds, 0.0), axis=1, initial=0.0) < FULL_SPEED_PU)
    steady &= ~clogged & on.all(axis=1)
    set_pa = np.where(np.isfinite(set_pa), set_pa, np.where(steady, across, np.nan))
    p.cdu_drop_set_pa[:] = _near(set_pa, p.cdu_drop_set_pa)
    return factors


def _exchangers(twin: TwinReadings, p: Parameters) -> dict[str, F64]:
    n = len(p.cdu_flow_lpm)
    ua = twin.parameter("cdu.ua", n)
    fouled = twin.diagnosed("exchanger_fouled", "cdu")
    well = np.where(fouled, twin.parameter("cdu.ua", n, reference=True), ua)
    p.cdu_ua_w_per_k[:] = _near(well, p.cdu_ua_w_per_k, 0.2, 3.0)
    valve, primary = twin.reading("cdu.facility_valve1_pu"), twin.reading("cdu.facility_flow_lpm")
    full = np.where(valve >= 0.05, primary / valve, twin.parameter("cdu.valve_full_lpm", n))
    p.cdu_primary_lpm[:] = _near(full, p.cdu_primary_lpm, 0.2, 5.0)
    return {"cdu_ua_factor": np.minimum(_factor(fouled, ua, p.cdu_ua_w_per_k), 1.0)}


def _plates(twin: TwinReadings, p: Parameters) -> dict[str, F64]:
    """Cold plates. The estimator's resistance stands over the rack's supply: what the first half of a tray
    adds to the water of the second is no resistance of the second.

    It learns a line, offset + R P, and at steady work nothing distinguishes the two. A plate of the
    plant has no offset, so it gets the resistance of the line where the GPU works.
    """
    site, n = twin.site, twin.site.sizes["gpu"]
    works_w = np.fmax(twin.reading("gpu.power_w"), WORKS_PU * site.design.gpu_max_w[site.rack_of_gpu])
    offset = np.nan_to_num(twin.parameter("gpu.offset_k", n) / works_w)
    now = twin.parameter("gpu.resistance", n) + offset
    was = twin.parameter("gpu.resistance", n, reference=True) + offset
    bad = twin.diagnosed("plate_degraded", "gpu") | twin.diagnosed("tray_blocked", "node")[site.node_of_gpu]
    drawn = p.gpu_conduction_k_per_w + p.gpu_convection_k_per_w
    count = np.diff(site.gpu_start_of_node)[site.node_of_gpu]
    place = np.arange(n) - site.gpu_start_of_node[site.node_of_gpu]
    later = (count > 1) & (count % 2 == 0) & (place >= count // 2)
    added = np.where(later, p.rack_upstream_k_per_w[site.rack_of_gpu], 0.0)
    well = np.where(bad, was, now) - added
    ratio = _near(well, drawn, 0.3, 4.0) / drawn
    p.gpu_conduction_k_per_w[:] *= ratio
    p.gpu_convection_k_per_w[:] *= ratio
    capacity = twin.parameter("gpu.tau_s", n) / np.where(np.isfinite(now), now, drawn)
    p.gpu_heat_capacity_j_per_k[:] = _near(capacity, p.gpu_heat_capacity_j_per_k)
    return {"gpu_plate_factor": np.maximum(_factor(bad, now - added, drawn * ratio), 1.0)}


def _factor(diagnosed: Bool, now: F64, well: F64) -> F64:
    """Return the factor by which a reported fault has changed a parameter [n]; 1 if none or unknown."""
    ratio = now / well
    return np.where(diagnosed & np.isfinite(ratio) & (ratio > 0.0), ratio, 1.0)


MAX_CLOCK_HZ = 1.98e9  # highest SM clock of an H100 SXM, NVIDIA data sheet; where no profile says
SHARES = (
    1.0,
    0.65,
    0.5,
)  # tensor and memory activity beside that of the SMs, where unknown; source: estimate
LEAK_PU = 0.25  # of the greatest leak: how fast one leaks that is given without its size; source: estimate
CAP_SLACK_W = 1.0  # a limit so near to the highest is none
HEATED = 0x20 | 0x40  # clock event bits of thermal slowdown, DCGM field 112
# Faults whose size the readings or the estimator give; other reported faults are carried by kind only.
MEASURED = ("branch_blocked", "filter_blocked", "exchanger_fouled", "plate_degraded", "tray_blocked",
            "pump_worn", "heat_wave")  # fmt: skip


def mirror_twin(
    engine: Engine,
    plant: Plant,
    *,
    hold_work: bool = True,
    hold_weather: bool = True,
    load_pu: F64 | None = None,
) -> list[str]:
    """Put a fresh plant at its time 0 into the state of the twin; returns reported faults that it cannot
    represent.

    `hold_work`: GPUs keep what they do and jobs go on as the twin knows them; else the plant's own workload
    goes on. `hold_weather`: the day goes on from the outdoor air of now. `load_pu` [n_gpu]: activity of GPUs
    that the twin has not read yet; NaN: as of those that work. Raises ValueError if the plant is of another
    site, lumps its GPUs or has moved already.
    """
    if (
        plant.site.spec_hash != engine.site.spec_hash
        or plant.parameters.lump != 1
        or plant.truth.time_s != 0.0
    ):
        raise ValueError("expected a fresh plant of the same site, its GPUs each by itself")
    twin = TwinReadings(engine)
    plant.start_ns = engine.state.now_ns
    plant.job_names = {slot: name for name, slot in sorted(engine.jobs.slot_of.items())}
    activity = activity_of(twin, plant)
    if load_pu is not None:
        _put_to_work(twin, activity, load_pu)
    fan_w = plant.cooling.fan**3 * plant.parameters.rack_fan_w
    factors = calibrate(twin, plant.parameters, activity, fan_w)
    _rebuild(plant)
    if hold_weather:
        _hold_weather(twin, plant)
    if hold_work:
        plant.workload = FrozenWorkload(
            engine.site, engine.jobs, activity, twin.reading("job.checkpoint_age_s"), engine.state.now_ns
        )
    _commanded(twin, plant)
    plant.settle()
    _as_read(twin, plant)
    d = plant.present
    for name, factor in factors.items():
        getattr(d, name)[:] = factor
    left = _carry_over(twin, plant, d)
    well = neutral(engine.site)
    if any(not np.array_equal(getattr(d, f.name), getattr(well, f.name), equal_nan=f.name.endswith("_pu"))
           for f in dataclasses.fields(d)):  # fmt: skip
        plant.disturbance  # noqa: B018  from now on the plant looks at it in each step
    return left


def activity_of(twin: TwinReadings, plant: Plant) -> F64:
    """Return the present activity of every GPU [3, n_gpu]: as reported, otherwise from its power or its
    job."""
    site, p = twin.site, plant.parameters
    sm, tensor, dram = (twin.reading(f"gpu.{name}_active_pu") for name in ("sm", "tensor", "dram"))
    most = p.gpu_sm_w + p.gpu_tensor_w + p.gpu_dram_w + p.gpu_cross_w
    by_power = np.clip((twin.reading("gpu.power_w") - p.gpu_idle_w) / most, 0.0, 1.0)
    busy = twin.engine.jobs.job_of_node[site.node_of_gpu] >= 0
    guess = np.where(np.isfinite(by_power), by_power, np.where(busy, 0.7, 0.0))
    sm = np.where(np.isfinite(sm), sm, guess)
    other = [
        np.where(np.isfinite(x), x, sm * share) for x, share in zip((tensor, dram), SHARES[1:], strict=True)
    ]
    out: F64 = np.clip(np.stack([sm, *other]), 0.0, 1.0)
    return out


def _put_to_work(twin: TwinReadings, activity: F64, load_pu: F64) -> None:
    """Set the activity of GPUs without readings: the mean of busy ones, scaled to the load."""
    unread = np.isnan(twin.reading("gpu.power_w")) & np.isnan(twin.reading("gpu.sm_active_pu"))
    works = ~unread & (activity[0] >= BUSY_PU)
    mean = activity[:, works].mean(axis=1) if works.any() else np.array(SHARES)
    wanted = np.where(np.isfinite(load_pu), load_pu, mean[0])[unread]
    activity[:, unread] = np.minimum(mean[:, None] * (wanted / max(float(mean[0]), 1e-6)), 1.0)


def read_as_one(sensors: Sensors) -> None:
    """Give all meters no errors of their own: those of the site are in the readings behind the plant."""
    for panel in vars(sensors).values():
        if isinstance(panel, Panel):
            panel.true_gain = [None] * len(panel.meters)
        if isinstance(panel, DelayedPanel):
            panel._gains[:] = 1.0


def _rebuild(plant: Plant) -> None:
    """Rebuild the parts whose numbers depend on changed parameters."""
    site, p = plant.site, plant.parameters
    plant.compute, plant.hydraulics = Compute(site, p), Hydraulics(site, p)
    plant.cooling = Cooling(site, p, plant.hydraulics)
    plant.switch_on()


def _hold_weather(twin: TwinReadings, plant: Plant) -> None:
    """Shift the day of the plant's weather so that the present temperature matches the reading."""
    outdoor = float(twin.reading("site.outdoor_temp_c")[0])
    weather = dataclasses.replace(
        plant.facility.weather, begin_s=float(twin.now_ns // NS % int(DAY_S)), fronts_k=0.0
    )
    if np.isfinite(outdoor):
        weather = dataclasses.replace(weather, mean_c=weather.mean_c + outdoor - weather.at(0.0)[0])
    plant.facility.weather, plant.facility.weather_s = weather, -np.inf
    plant.facility.look_outside(plant.truth, plant.parameters)


def _commanded(twin: TwinReadings, plant: Plant) -> None:
    """Put in force the running leases with their remaining time, and the limits that devices report."""
    engine, actuators, p = twin.engine, plant.actuators, plant.parameters
    base = twin.reading("cdu.supply_temp_setpoint_c")
    lease = engine.arbiter.leases["cdu.supply_temp_target_c"]
    base = np.where(lease.running(), lease.found, base)
    known = np.isfinite(base) & (base >= 5.0) & (base <= 60.0)
    p.cdu_supply_c[known] = base[known]
    plant.cooling.target_c = p.cdu_supply_c.copy()
    lease = engine.arbiter.leases["cdu.diff_pressure_target_pa"]
    own_pa = np.where(lease.running() & np.isfinite(lease.found), lease.found, p.cdu_drop_set_pa)
    p.cdu_drop_set_pa[:] = own_pa
    for key, lease in engine.arbiter.leases.items():
        stands = np.full(lease.n, np.nan)
        if key == "gpu.power_cap_w":
            stands = twin.reading("gpu.power_limit_w")
            stands = np.where(stands < p.gpu_cap_max_w - CAP_SLACK_W, stands, np.nan)
        elif key in ("rack.liquid_isolation", "rack.electrical_isolation"):
            stands = twin.reading(f"{key}_state")
            stands = np.where(stands > 0.0, stands, np.nan)
        running = lease.running()
        if key.startswith("job.") or not (running.any() or np.isfinite(stands).any()):
            continue
        left_s = np.maximum((lease.expires_ns - twin.now_ns) / NS, 0.0)
        actuators.value[key] = np.where(running, lease.value, stands)
        ends = running & (lease.control.on_expiry != "keep")
        actuators.until_s[key] = np.where(ends, left_s, np.inf)
        actuators.next_s = min(actuators.next_s, float(actuators.until_s[key].min(initial=np.inf)))
    t = plant.truth
    plant.apply_caps()
    plant.apply_locks()
    plant.apply_set_points()
    asked_pa = actuators.get("cdu.diff_pressure_target_pa")
    plant.hydraulics.ask(t, p, np.full(len(own_pa), np.nan) if asked_pa is None else asked_pa)
    for key, column in (("rack.liquid_isolation", t.rack_isolated), ("rack.electrical_isolation", None)):
        value = actuators.get(key)
        if value is not None:
            (plant.power.isolated if column is None else column)[:] = np.nan_to_num(value) >= 0.5
    t.node_service_level[:] = np.nan_to_num(twin.reading("node.service_level_state")).astype(np.int64)
    plant.power.stale = True


def _as_read(twin: TwinReadings, plant: Plant) -> None:
    """Set levels to their readings in a settled plant; drops the history of settling."""
    t, p = plant.truth, plant.parameters
    c, w, h, f = plant.compute, plant.cooling, plant.hydraulics, plant.facility
    for column, key in (
        (t.gpu_temp_c, "gpu.temp_c"), (t.gpu_hbm_temp_c, "gpu.hbm_temp_c"), (t.gpu_power_w, "gpu.power_w"),
        (t.rack_return_c, "rack.return_temp_c"), (t.rack_supply_c, "rack.supply_temp_c"),
        (t.rack_inlet_c, "rack.inlet_temp_c"), (t.hall_cold_c, "hall.cold_aisle_temp_c"),
        (t.hall_rh_pu, "hall.cold_aisle_rh_pu"), (t.cdu_supply_c, "cdu.supply_temp_c"),
        (t.cdu_return_c, "cdu.return_temp_c"), (t.cdu_valve_pu, "cdu.facility_valve1_pu"),
        (w.hot_c, "cdu.return_temp_c"), (w.cold_c, "cdu.supply_temp_c"), (w.pipe_c, "cdu.supply_temp_c"),
        (w.primary_supply_c, "cdu.facility_supply_temp_c"),
        (f.cold_c[: f.n_loop], "loop.supply_temp_c"), (f.hot_c[: f.n_loop], "loop.return_temp_c"),
    ):  # fmt: skip
        value = twin.reading(key)
        np.copyto(column, value, where=np.isfinite(value))
    speed = np.fmax(twin.reading("cdu.pump1_speed_pu"), twin.reading("cdu.pump2_speed_pu"))
    np.copyto(h.speed, speed, where=speed > RUNNING_PU)
    h.stale, h.steady = True, False
    h.error_before[:] = 0.0
    w.error_before_k = t.cdu_supply_c - t.cdu_setpoint_c
    f.error_before_k = f.cold_c - f.aim_c
    _slowed(twin, plant)
    c.burnt[:] = False
    c.shut_down = np.zeros(0, np.intp)
    for column, key, factor in (
        (t.gpu_energy_j, "gpu.energy_mj", 1e-3), (t.gpu_sbe_count, "gpu.ecc_sbe_count", 1.0),
        (t.gpu_dbe_count, "gpu.ecc_dbe_count", 1.0), (t.gpu_nvlink_errors, "gpu.nvlink_error_count", 1.0),
        (t.link_error_count, "link.error_count", 1.0), (t.link_flap_count, "link.flap_count", 1.0),
        (t.link_discard_count, "link.discard_count", 1.0),
    ):  # fmt: skip
        column[:] = (twin.count(key) * factor).astype(column.dtype)
    c.store(t, p, c.stored_j)
    plant.power.stale = True


def _slowed(twin: TwinReadings, plant: Plant) -> None:
    """Start GPUs that heat has slowed at their present clock."""
    t, c = plant.truth, plant.compute
    bits = np.nan_to_num(twin.reading("gpu.clock_event_bits")).astype(np.int64)
    clock = np.nan_to_num(twin.reading("gpu.sm_clock_hz") / MAX_CLOCK_HZ, nan=1.0)
    heated = (bits & HEATED) != 0
    c.thermal_clock[:] = np.where(heated, np.clip(clock, CLOCK_MIN_PU, 1.0), 1.0)
    c.cool_running = bool((c.thermal_clock < 1.0).any())
    c.slowed = True  # looked at in the first step
    t.gpu_event_bits[:] = bits & BIT_ANY_SLOW
    t.throttle_s[:], t.trips[:] = 0.0, 0


def _carry_over(twin: TwinReadings, plant: Plant, d: Disturbance) -> list[str]:
    """Apply reported faults and stopped equipment as disturbances; returns those that this cannot
    represent."""
    site = twin.site
    for k, name in enumerate(("pump1", "pump2")):
        d.cdu_pump_ok[:, k] = ~(twin.reading(f"cdu.{name}_speed_pu") <= RUNNING_PU)
    dead = twin.reading("node.power_on_state") == 0.0
    d.node_psu_ok[dead] = False
    d.feeder_ok[:] = ~(twin.reading("feeder.energised_state") == 1.0)
    tripped = twin.reading("feeder.breaker_state") == 1.0
    plant.truth.feeder_tripped[:] = tripped
    d.feeder_ok[tripped] = True  # it is the breaker that is open, not what lies above
    d.link_down[:] = twin.reading("link.up_state") == 1.0
    left = []
    for fault in twin.engine.diagnosis.faults:
        if fault.kind not in MEASURED and not _carried(twin, plant, d, fault):
            left.append(f"{fault.kind} of {site.name(fault.table, fault.entity)}")
    if left:
        left.sort()
    return left


def _carried(twin: TwinReadings, plant: Plant, d: Disturbance, fault: Fault) -> bool:
    """Apply one reported fault; returns False if no disturbance represents it or its size is unknown."""
    at = fault.entity
    if fault.kind == "pump_trip":
        return not d.cdu_pump_ok[at].all()
    if fault.kind == "valve_stuck":
        d.cdu_valve_stuck_pu[at] = plant.truth.cdu_valve_pu[at]
    elif fault.kind == "leak":
        getattr(d, f"{fault.table}_leak_lpm")[at] = LEAK_PU * LEAK_LPM[fault.table]
    elif fault.kind == "water_detected":
        d.hall_wet[at] = True
    elif fault.kind == "cooler_failed":
        d.loop_fan_factor[at] = _fan_factor(plant, at)
    elif fault.kind == "psu_lost":
        supplies = [float(twin.reading(f"node.psu{k}_power_w")[at]) for k in (1, 2)]
        d.node_psu_ok[at, int(supplies[1] < supplies[0])] = False
    elif fault.kind == "gpu_off_bus":
        d.gpu_alive[at] = False
    elif fault.kind == "node_silent":
        d.sensors.append(SensorFault("node", at, "", "silent"))
    elif fault.kind in ("sensor_frozen", "sensor_silent", "sensor_biased"):
        return _sensor(twin, d, fault)
    else:
        return fault.kind in ("feed_lost", "breaker_tripped", "node_down", "link_down")
    return True


def _sensor(twin: TwinReadings, d: Disturbance, fault: Fault) -> bool:
    """Keep a faulty sensor faulty, with its present error."""
    if fault.signal not in PUBLISHED.get(fault.table, ()):
        return False
    amount = 0.0
    if fault.kind == "sensor_biased":
        residual = twin.engine.estimator.residuals.get(f"{fault.table}.{fault.signal}")
        amount = 0.0 if residual is None else float(residual.difference[fault.entity])
        if not np.isfinite(amount) or amount == 0.0:
            return False
    trouble = cast("SensorTrouble", fault.kind.removeprefix("sensor_"))
    d.sensors.append(SensorFault(fault.table, fault.entity, fault.signal, trouble, amount))
    return True


# Remaining air flow of a failed cooler beneath a chiller, if unknown; source: estimate
CHILLED_FAN_PU = 0.3


def _fan_factor(plant: Plant, loop: int) -> float:
    """Return the remaining air flow of a loop's heat rejection that explains its supply at full fan speed."""
    p, f = plant.parameters, plant.facility
    if p.loop_chiller_pu[loop] > 0.0:
        return CHILLED_FAN_PU  # a chiller holds the supply: it says nothing of the fans
    away_k = max(float(f.cold_c[loop] - f.air_c[loop]), 0.5)
    conductance = float(f.into_w[loop]) / away_k
    clean = float(p.loop_heat_w[loop] / p.loop_approach_k[loop])
    return float(np.clip((conductance / clean) ** (1.0 / 0.8), 0.05, 1.0))
