"""A plant that stands where the twin stands: what is learned becomes its parameters, what is read its state.

For questions of what would happen from now on. What nobody knows is as in a settled plant of the same design;
faults that the diagnosis tells go on as disturbances where their size can be known. May import the core and
everything in `twin.plant`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import numpy as np

from twin.contracts import Fault
from twin.frame import F64, NS
from twin.plant.calibrated import BIT_ANY_SLOW, RUNNING_PU, Seen, calibrate
from twin.plant.compute import CLOCK_MIN_PU, Compute
from twin.plant.cooling import Cooling
from twin.plant.disturbance import Disturbance, SensorFault, SensorTrouble, neutral
from twin.plant.faults import LEAK_LPM, PUBLISHED
from twin.plant.held import HeldWorkload
from twin.plant.hydraulics import Hydraulics
from twin.plant.meters import DelayedPanel, Panel
from twin.plant.obedience import set_caps, set_points
from twin.plant.plant import Plant
from twin.plant.sensors import Sensors
from twin.plant.weather import DAY_S

if TYPE_CHECKING:
    from twin.engine import Engine

MAX_CLOCK_HZ = 1.98e9  # highest SM clock of an H100 SXM, NVIDIA data sheet; where no profile says
SHARES = (
    1.0,
    0.65,
    0.5,
)  # tensor and memory activity beside that of the SMs, where unknown; source: estimate
LEAK_PU = 0.25  # of the greatest leak: how fast one leaks that is told without its size; source: estimate
CAP_SLACK_W = 1.0  # a limit so near to the highest is none
HEATED = 0x20 | 0x40  # clock event bits of thermal slowdown, DCGM field 112
# Faults whose size the readings or the estimator give; the others that are told are carried by kind alone.
MEASURED = ("branch_blocked", "filter_blocked", "exchanger_fouled", "plate_degraded", "tray_blocked",
            "pump_worn", "heat_wave")  # fmt: skip


def mirror(engine: Engine, plant: Plant, *, hold_work: bool = True, hold_weather: bool = True) -> list[str]:
    """Make a fresh plant, at its time 0, stand where the twin stands; returns told faults it cannot carry.

    `hold_work`: GPUs keep what they do and jobs go on as the twin knows them; else the plant's own workload
    goes on. `hold_weather`: the day goes on from the outdoor air of now. Raises ValueError if the plant is of
    another site, lumps its GPUs or has moved already.
    """
    if (
        plant.site.spec_hash != engine.site.spec_hash
        or plant.parameters.lump != 1
        or plant.truth.time_s != 0.0
    ):
        raise ValueError("expected a fresh plant of the same site, its GPUs each by itself")
    seen = Seen(engine)
    plant.start_ns = engine.state.now_ns
    plant.job_names = {slot: name for name, slot in sorted(engine.jobs.slot_of.items())}
    activity = activity_of(seen, plant)
    fan_w = plant.cooling.fan**3 * plant.parameters.rack_fan_w
    factors = calibrate(seen, plant.parameters, activity, fan_w)
    _rebuild(plant)
    if hold_weather:
        _hold_weather(seen, plant)
    if hold_work:
        plant.workload = HeldWorkload(
            engine.site, engine.jobs, activity, seen.reading("job.checkpoint_age_s"), engine.state.now_ns
        )
    _commanded(seen, plant)
    plant.settle()
    _as_read(seen, plant)
    d = plant.present
    for name, factor in factors.items():
        getattr(d, name)[:] = factor
    left = _carry_over(seen, plant, d)
    well = neutral(engine.site)
    if any(not np.array_equal(getattr(d, f.name), getattr(well, f.name), equal_nan=f.name.endswith("_pu"))
           for f in dataclasses.fields(d)):  # fmt: skip
        plant.disturbance  # noqa: B018  from now on the plant looks at it in each step
    return left


def activity_of(seen: Seen, plant: Plant) -> F64:
    """What every GPU does now [3, n_gpu]: as reported, else from its power, else as a job holds it or not."""
    site, p = seen.site, plant.parameters
    sm, tensor, dram = (seen.reading(f"gpu.{name}_active_pu") for name in ("sm", "tensor", "dram"))
    most = p.gpu_sm_w + p.gpu_tensor_w + p.gpu_dram_w + p.gpu_cross_w
    by_power = np.clip((seen.reading("gpu.power_w") - p.gpu_idle_w) / most, 0.0, 1.0)
    busy = seen.engine.jobs.job_of_node[site.node_of_gpu] >= 0
    guess = np.where(np.isfinite(by_power), by_power, np.where(busy, 0.7, 0.0))
    sm = np.where(np.isfinite(sm), sm, guess)
    other = [
        np.where(np.isfinite(x), x, sm * share) for x, share in zip((tensor, dram), SHARES[1:], strict=True)
    ]
    out: F64 = np.clip(np.stack([sm, *other]), 0.0, 1.0)
    return out


def read_as_one(sensors: Sensors) -> None:
    """Meters without errors of their own: those of the site are in the readings that made the plant."""
    for panel in vars(sensors).values():
        if isinstance(panel, Panel):
            panel.true_gain = [None] * len(panel.meters)
        if isinstance(panel, DelayedPanel):
            panel._gains[:] = 1.0


def _rebuild(plant: Plant) -> None:
    """The parts that hold numbers made from parameters, which have changed."""
    site, p = plant.site, plant.parameters
    plant.compute, plant.hydraulics = Compute(site, p), Hydraulics(site, p)
    plant.cooling = Cooling(site, p, plant.hydraulics)
    plant._begin()


def _hold_weather(seen: Seen, plant: Plant) -> None:
    """The day of the plant's weather, moved so that it now is as warm as it is read to be."""
    outdoor = float(seen.reading("site.outdoor_temp_c")[0])
    weather = dataclasses.replace(
        plant.facility.weather, begin_s=float(seen.now_ns // NS % int(DAY_S)), fronts_k=0.0
    )
    if np.isfinite(outdoor):
        weather = dataclasses.replace(weather, mean_c=weather.mean_c + outdoor - weather.at(0.0)[0])
    plant.facility.weather, plant.facility.weather_s = weather, -np.inf
    plant.facility.look_outside(plant.truth, plant.parameters)


def _commanded(seen: Seen, plant: Plant) -> None:
    """What is in force: running leases with the time they have left, and what devices report beside them."""
    engine, actuators, p = seen.engine, plant.actuators, plant.parameters
    base = seen.reading("cdu.supply_temp_setpoint_c")
    lease = engine.arbiter.leases["cdu.supply_temp_target_c"]
    base = np.where(lease.running(), lease.found, base)
    known = np.isfinite(base) & (base >= 5.0) & (base <= 60.0)
    p.cdu_supply_c[known] = base[known]
    plant.cooling.target_c = p.cdu_supply_c.copy()
    for key, lease in engine.arbiter.leases.items():
        stands = np.full(lease.n, np.nan)
        if key == "gpu.power_cap_w":
            stands = seen.reading("gpu.power_limit_w")
            stands = np.where(stands < p.gpu_cap_max_w - CAP_SLACK_W, stands, np.nan)
        elif key in ("rack.liquid_isolation", "rack.electrical_isolation"):
            stands = seen.reading(f"{key}_state")
            stands = np.where(stands > 0.0, stands, np.nan)
        running = lease.running()
        if key.startswith("job.") or not (running.any() or np.isfinite(stands).any()):
            continue
        left_s = np.maximum((lease.expires_ns - seen.now_ns) / NS, 0.0)
        actuators.value[key] = np.where(running, lease.value, stands)
        ends = running & (lease.control.on_expiry != "keep")
        actuators.until_s[key] = np.where(ends, left_s, np.inf)
        actuators.next_s = min(actuators.next_s, float(actuators.until_s[key].min(initial=np.inf)))
    t = plant.truth
    set_caps(plant)
    set_points(plant)
    for key, column in (("rack.liquid_isolation", t.rack_isolated), ("rack.electrical_isolation", None)):
        value = actuators.get(key)
        if value is not None:
            (plant.power.isolated if column is None else column)[:] = np.nan_to_num(value) >= 0.5
    t.node_service_level[:] = np.nan_to_num(seen.reading("node.service_level_state")).astype(np.int64)
    plant.power.stale = True


def _as_read(seen: Seen, plant: Plant) -> None:
    """Levels as they are read, in a plant that has settled; what it went through meanwhile is forgotten."""
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
        value = seen.reading(key)
        np.copyto(column, value, where=np.isfinite(value))
    speed = np.fmax(seen.reading("cdu.pump1_speed_pu"), seen.reading("cdu.pump2_speed_pu"))
    np.copyto(h.speed, speed, where=speed > RUNNING_PU)
    h.stale, h.steady = True, False
    h.error_before[:] = 0.0
    w.error_before_k = t.cdu_supply_c - t.cdu_setpoint_c
    f.error_before_k = f.cold_c - f.aim_c
    _slowed(seen, plant)
    c.burnt[:] = False
    c.shut_down = np.zeros(0, np.intp)
    for column, key, factor in (
        (t.gpu_energy_j, "gpu.energy_mj", 1e-3), (t.gpu_sbe_count, "gpu.ecc_sbe_count", 1.0),
        (t.gpu_dbe_count, "gpu.ecc_dbe_count", 1.0), (t.gpu_nvlink_errors, "gpu.nvlink_error_count", 1.0),
        (t.link_error_count, "link.error_count", 1.0), (t.link_flap_count, "link.flap_count", 1.0),
        (t.link_discard_count, "link.discard_count", 1.0),
    ):  # fmt: skip
        column[:] = (seen.count(key) * factor).astype(column.dtype)
    c.store(t, p, c.stored_j)
    plant.power.stale = True


def _slowed(seen: Seen, plant: Plant) -> None:
    """GPUs that heat has slowed already go on from the clock that they have."""
    t, c = plant.truth, plant.compute
    bits = np.nan_to_num(seen.reading("gpu.clock_event_bits")).astype(np.int64)
    clock = np.nan_to_num(seen.reading("gpu.sm_clock_hz") / MAX_CLOCK_HZ, nan=1.0)
    heated = (bits & HEATED) != 0
    c.thermal_clock[:] = np.where(heated, np.clip(clock, CLOCK_MIN_PU, 1.0), 1.0)
    c.cool_running = bool((c.thermal_clock < 1.0).any())
    c.slowed = True  # looked at in the first step
    t.gpu_event_bits[:] = bits & BIT_ANY_SLOW
    t.throttle_s[:], t.trips[:] = 0.0, 0


def _carry_over(seen: Seen, plant: Plant, d: Disturbance) -> list[str]:
    """Told faults and what stands still as disturbances; returns those that go on in no other way."""
    site = seen.site
    for k, name in enumerate(("pump1", "pump2")):
        d.cdu_pump_ok[:, k] = ~(seen.reading(f"cdu.{name}_speed_pu") <= RUNNING_PU)
    dead = seen.reading("node.power_on_state") == 0.0
    d.node_psu_ok[dead] = False
    d.feeder_ok[:] = ~(seen.reading("feeder.energised_state") == 1.0)
    tripped = seen.reading("feeder.breaker_state") == 1.0
    plant.truth.feeder_tripped[:] = tripped
    d.feeder_ok[tripped] = True  # it is the breaker that is open, not what lies above
    d.link_down[:] = seen.reading("link.up_state") == 1.0
    left = []
    for fault in seen.engine.diagnosis.faults:
        if fault.kind not in MEASURED and not _carried(seen, plant, d, fault):
            left.append(f"{fault.kind} of {site.name(fault.table, fault.entity)}")
    if left:
        left.sort()
    return left


def _carried(seen: Seen, plant: Plant, d: Disturbance, fault: Fault) -> bool:
    """Let one told fault go on; False for one that has no place in a disturbance, or of unknown size."""
    at = fault.entity
    if fault.kind == "pump_trip":
        return not d.cdu_pump_ok[at].all()
    if fault.kind == "valve_stuck":
        d.cdu_valve_stuck_pu[at] = plant.truth.cdu_valve_pu[at]
    elif fault.kind == "leak":
        getattr(d, f"{fault.table}_leak_lpm")[at] = LEAK_PU * LEAK_LPM[fault.table]
    elif fault.kind == "cooler_failed":
        d.loop_fan_factor[at] = _fan_factor(plant, at)
    elif fault.kind == "psu_lost":
        supplies = [float(seen.reading(f"node.psu{k}_power_w")[at]) for k in (1, 2)]
        d.node_psu_ok[at, int(supplies[1] < supplies[0])] = False
    elif fault.kind == "gpu_off_bus":
        d.gpu_alive[at] = False
    elif fault.kind == "node_silent":
        d.sensors.append(SensorFault("node", at, "", "silent"))
    elif fault.kind in ("sensor_frozen", "sensor_silent", "sensor_biased"):
        return _sensor(seen, d, fault)
    else:
        return fault.kind in ("feed_lost", "breaker_tripped", "node_down", "link_down")
    return True


def _sensor(seen: Seen, d: Disturbance, fault: Fault) -> bool:
    """A sensor that lies goes on lying: as far off as it is now, if it is off."""
    if fault.signal not in PUBLISHED.get(fault.table, ()):
        return False
    amount = 0.0
    if fault.kind == "sensor_biased":
        residual = seen.engine.estimator.residuals.get(f"{fault.table}.{fault.signal}")
        amount = 0.0 if residual is None else float(residual.difference[fault.entity])
        if not np.isfinite(amount) or amount == 0.0:
            return False
    trouble = cast("SensorTrouble", fault.kind.removeprefix("sensor_"))
    d.sensors.append(SensorFault(fault.table, fault.entity, fault.signal, trouble, amount))
    return True


# Air that is left of a failed cooler beneath a chiller, where nothing tells; source: estimate
CHILLED_FAN_PU = 0.3


def _fan_factor(plant: Plant, loop: int) -> float:
    """Air flow that is left of a loop's heat rejection: as much as explains its supply at full fans."""
    p, f = plant.parameters, plant.facility
    if p.loop_chiller_pu[loop] > 0.0:
        return CHILLED_FAN_PU  # a chiller holds the supply: it says nothing of the fans
    away_k = max(float(f.cold_c[loop] - f.air_c[loop]), 0.5)
    conductance = float(f.into_w[loop]) / away_k
    clean = float(p.loop_heat_w[loop] / p.loop_approach_k[loop])
    return float(np.clip((conductance / clean) ** (1.0 / 0.8), 0.05, 1.0))
