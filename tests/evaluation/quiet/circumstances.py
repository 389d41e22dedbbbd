"""Circumstances of a healthy plant: weather, the grade of sensors, planned work, ordinary life, other
devices, open doors, a changed site, a demand response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from tests.evaluation.health.failure_timeline import ordinary_life
from tests.evaluation.quiet.healthy_sites import ROOM_PU, SEASONS, HealthyRun, site_spec
from tests.support.sensor_grades import CoarseSensors, SlowSensors
from twin.catalogue import NS
from twin.plant import FailureTable, FailureTimeline, Plant, Sensors, TimelineEvent
from twin.plant.weather import Weather
from twin.simulation import Simulation
from twin.site import Site
from twin.telemetry import EntityReplaced, LoadTargetSet, SiteChanged

GRADES = {"coarse": CoarseSensors, "slow": SlowSensors}
GAPS_PU = 0.05  # of the readings do not come
WORKED_ON = 8  # one node in so many is drained in a run
REBOOT_S = 240.0  # for which an agent is away
RESPONSE_PU = 0.7  # of the draw at the time
# Warm air that comes back over and around racks at full power, and what a door or a missing panel adds to a
# rack for a while; source: estimate, after ASHRAE TC 9.9 on recirculation and the Rack Cooling Index
RECIRCULATED_K, DOOR_K = (0.5, 3.0), (1.5, 5.0)
DOOR_EVERY_S, DOOR_OPEN_S, AIR_TAU_S = 600.0, (30.0, 400.0), 45.0


def sensors_of(run: HealthyRun, site: Site) -> Sensors:
    """The sensors of a run, of its grade."""
    if run.sensors in GRADES:
        return GRADES[run.sensors](site, run.seed)
    return Sensors(site, run.seed, drop_out_pu=GAPS_PU) if run.sensors == "gaps" else Sensors(site, run.seed)


def weather_of(run: HealthyRun) -> Weather:
    """The weather of a run, in its season."""
    return replace(SEASONS[run.season], seed=run.seed)


def maintenance(run: HealthyRun, site: Site) -> FailureTimeline:
    """Nodes are drained and returned. Every second one is announced and restarts meanwhile."""
    rng = np.random.default_rng((run.seed, 0x3A))
    nodes = rng.choice(site.sizes["node"], max(2, site.sizes["node"] // WORKED_ON), replace=False).tolist()
    out: list[TimelineEvent] = []
    away: list[tuple[int, float, float]] = []
    for k, node in enumerate(nodes):
        begin_s = float(rng.uniform(0.2, 0.6)) * run.seconds
        end_s = begin_s + 0.2 * run.seconds
        out.append(TimelineEvent(begin_s, "hold", "node_unfit", node, 1.0, k))
        out.append(TimelineEvent(end_s, "free", "node_unfit", node, 0.0, k))
        if k % 2 == 0:
            back_s = min(begin_s + REBOOT_S, 0.5 * (begin_s + end_s))
            out.append(TimelineEvent(begin_s, "work", "node", node, end_s - begin_s))
            out.append(TimelineEvent(begin_s, "hold", "node_silent", node, 1.0, k))
            out.append(TimelineEvent(back_s, "free", "node_silent", node, 0.0, k))
            out.append(TimelineEvent(back_s, "count", "node_reboots", node, 1.0))
            away.append((node, begin_s, back_s))
    none = FailureTable(
        *(np.zeros(0, kind) for kind in ("i4", "u1", "i4", "f8", "f8", "?", "f8", "?", "?", "?"))
    )
    days, lemons = run.seconds / 86_400.0, np.zeros(site.sizes["node"], np.bool_)
    out.sort(key=lambda event: event.time_s)
    return FailureTimeline(days, run.seed, 0.0, tuple(out), none, lemons, tuple(away))


def events_of(run: HealthyRun, site: Site) -> FailureTimeline | None:
    """Return the events of a run: planned work, or events without consequence; None: no events."""
    if run.load == "ordinary":
        return ordinary_life(site, run.seed, run.seconds / 86_400.0)
    return maintenance(run, site) if run.load in ("maintenance", "replaced") else None


def load_target(run: HealthyRun, simulation: Simulation) -> LoadTargetSet:
    """From now on, for a third of the run, less than the site draws."""
    now_ns = simulation.now_ns
    return LoadTargetSet(
        author="grid", target="response", kind="demand_response", start_ns=now_ns + NS,
        limit_w=RESPONSE_PU * float(simulation.plant.truth.rack_power_w.sum()),
        end_ns=now_ns + run.seconds // 3 * NS,
    )  # fmt: skip


def site_change(run: HealthyRun) -> SiteChanged:
    """The description of the site is another one: the budgets of its feeders are raised by a tenth."""
    spec = site_spec(run, 1.1 * ROOM_PU)
    return SiteChanged(site_hash=spec.digest(), spec=spec.packed())


def replace_gpus(plant: Plant, node: int) -> list[EntityReplaced]:
    """The GPUs of a node change places: each slot has another device, and healthy ones all."""
    site, p, compute = plant.site, plant.parameters, plant.compute
    first, end = (int(x) for x in site.gpu_start_of_node[node : node + 2])
    columns = [getattr(p, f.name) for f in fields(p) if f.name.startswith("gpu_")]
    for column in [*columns, compute.static0, compute.static1, compute.static2]:
        column[first:end] = np.roll(column[first:end], 1)
    compute.tuned_dt_s = 0.0  # resistances are worked out anew
    return [
        EntityReplaced(table="gpu", name=site.name("gpu", gpu), serial=f"spare-{plant.seed}-{gpu}")
        for gpu in range(first, end)
    ]


def moving_air(plant: Plant, seed: int) -> Callable[[int], None]:
    """Racks breathe some of the hall's warm air, the more the more it draws, each by its place; now and then
    a door or a panel is open for minutes beside one of them."""
    site, p, t = plant.site, plant.parameters, plant.truth
    rng, n = np.random.default_rng((seed, 0xD0)), site.sizes["rack"]
    still_k, returned_k = p.rack_inlet_add_k.copy(), rng.uniform(*RECIRCULATED_K, n)
    full_w = max(float(p.gpu_cap_max_w.sum()), 1.0)
    added_k, door_k, shut_s, next_s = np.zeros(n), np.zeros(n), np.zeros(n), 0.0

    def drive(second: int) -> None:
        nonlocal next_s
        if second >= next_s:
            next_s = second + float(rng.exponential(DOOR_EVERY_S))
            rack = int(rng.integers(n))
            door_k[rack] = rng.uniform(*DOOR_K)
            shut_s[rack] = second + float(rng.uniform(*DOOR_OPEN_S))
        door_k[shut_s <= second] = 0.0
        aim_k = returned_k * min(float(t.rack_power_w.sum()) / full_w, 1.0) + door_k
        added_k[:] += (aim_k - added_k) * -np.expm1(-1.0 / AIR_TAU_S)
        p.rack_inlet_add_k[:] = still_k + added_k

    return drive
