"""Drawing faults for seeded campaigns: which entity, how bad, how slowly; ranges kept apart for scoring.

DEVELOP and HELD_OUT halve every range into alternate quarters, so that both reach from mild to grave; where a
kind has a range, they share no value, but what is all or nothing (a pump that stops) is the same in both, on
other seeds. It is interpolation, not another world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.diagnosis import FAULT_KINDS
from twin.plant import BOTH, PUBLISHED, Script
from twin.site import CDU_FILTER_DROP_PA, RACK_DROP_PA, Site

Index = NDArray[np.intp]

BIAS_K = (2.0, 6.0)  # of temperatures
BIAS_PU = {"lpm": (0.08, 0.25), "pa": (0.10, 0.30), "w": (0.06, 0.25), "hz": (0.10, 0.25)}  # of the nominal
SPIKE_FACTOR = 4.0  # a spike is so much higher than the bias of the same draw
TYPICAL_LOAD_PU = 0.7  # of the design, where a bias scales with what is usually read
CLOCK_HZ = 1.9e9  # highest clock of a GPU, roughly; source: estimate
SLOW = ("exchanger_fouled", "pump_worn", "plate_degraded")
# Lowest and highest severity that can be told from noise and still happens; source: estimate
SEVERITY: dict[str, tuple[float, float]] = {
    "pump_worn": (0.35, 0.9),
    "filter_blocked": (0.45, 1.0),
    "exchanger_fouled": (0.4, 0.9),
    "valve_stuck": (0.75, 1.0),
    "branch_blocked": (0.3, 0.9),
    "tray_blocked": (0.25, 1.0),
    "plate_degraded": (0.25, 1.0),
    "leak": (0.2, 1.0),
    "cooler_failed": (0.6, 1.0),
    "heat_wave": (0.5, 1.0),
    "grid_event": (0.12, 0.5),
    "xid_burst": (0.4, 1.0),
    "ecc_growth": (0.2, 1.0),
    "nvlink_flaps": (0.2, 1.0),
    "link_congested": (0.4, 1.0),
}
SIZED = (*SEVERITY, "sensor_biased", "sensor_spiking")  # kinds that are small or large
# Seconds from nothing to the whole severity; kinds that are not named strike at once; source: estimate
RAMP_S: dict[str, tuple[float, float]] = {
    **dict.fromkeys(SLOW, (300.0, 3600.0)),
    "filter_blocked": (30.0, 900.0),
    "heat_wave": (1200.0, 3600.0),
    "ecc_growth": (60.0, 600.0),
    "tray_blocked": (0.0, 120.0),
}
TOTAL = {"branch_blocked": 0.5, "filter_blocked": 0.3}  # share of draws that block it all
LASTS_S = {"grid_event": (3.0, 60.0)}  # others last
XIDS = (31, 48, 63, 74, 94, 95, 119)  # of GPUs that stay on the bus


@dataclass(frozen=True, slots=True)
class Ranges:
    """The quarters of each range that draws come from, and a word for the seeds, so that none is shared."""

    name: str
    quarters: tuple[int, int]
    seed_word: int
    share: float | None = None  # of the greatest size: all faults are of this one

    def generator(self, seed: int) -> np.random.Generator:
        """The source of chance of one drawn case."""
        return np.random.default_rng([self.seed_word, seed])

    def within(self, low: float, high: float, rng: np.random.Generator) -> float:
        """A number of this range."""
        quarter = self.quarters[int(rng.integers(2))]
        return low + (high - low) * (quarter + float(rng.uniform())) / 4.0

    def size(self, low: float, high: float, rng: np.random.Generator) -> float:
        """The size of a fault: a number of this range, or the given share of its upper end."""
        drawn = self.within(low, high, rng)
        return drawn if self.share is None else self.share * high


DEVELOP = Ranges("develop", (0, 2), 11)
HELD_OUT = Ranges("held_out", (1, 3), 13)


def entities(site: Site, kind: str, table: str) -> Index:
    """Entities that can have this fault with an effect, ascending; may be empty."""
    everything: Index = np.arange(site.sizes[table])
    design = site.design
    liquid = design.liquid & (site.cdu_of_rack >= 0) & np.isfinite(design.rack_flow_lpm)
    cooled = np.bincount(site.cdu_of_rack[liquid], minlength=site.sizes["cdu"])[: site.sizes["cdu"]] > 0
    if table == "cdu":
        return everything[cooled]
    if table == "loop":
        loops = site.loop_of_cdu[cooled]
        return np.unique(loops[loops >= 0]).astype(np.intp)
    if table == "feeder":
        return np.array([f for f in everything.tolist() if len(site.racks_below(f))], np.intp)
    wet = kind in ("branch_blocked", "tray_blocked", "leak")
    if table == "rack":
        return everything[liquid] if wet else everything[np.diff(site.node_start_of_rack) > 0]
    if table == "node":
        fed = np.diff(site.feeders_of_rack.start) > 0
        needs_feed = kind in ("psu_lost", "node_down")
        keep = liquid[site.rack_of_node] if wet else np.ones(len(everything), np.bool_)
        if needs_feed:
            keep &= fed[site.rack_of_node]
        return everything[keep]
    return everything


def kinds_of(site: Site) -> tuple[str, ...]:
    """Kinds of fault that can be drawn on this site, in the order of FAULT_KINDS."""
    unseen = ("coolant_loss", "water_detected")  # of leaks, those are drawn that wet a detector of a rack
    return tuple(
        name
        for name, kind in FAULT_KINDS.items()
        if name not in unseen and any(len(entities(site, name, t)) for t in kind.tables if _acts(name, t))
    )


def _acts(kind: str, table: str) -> bool:
    """Return True if a script of this kind on this table has a cause in the plant."""
    return not kind.startswith("sensor_") or table in PUBLISHED


def draw(
    site: Site,
    rng: np.random.Generator,
    kind: str | None = None,
    ranges: Ranges = DEVELOP,
    begin_s: float = 0.0,
) -> Script:
    """One fault that begins at `begin_s`; no kind = any that the site can have, each as likely.

    Raises ValueError if the site has no entity for this kind.
    """
    if kind is None:
        kinds = kinds_of(site)
        kind = kinds[int(rng.integers(len(kinds)))] if kinds else "none"
    tables = [t for t in FAULT_KINDS[kind].tables if _acts(kind, t) and len(entities(site, kind, t))]
    if not tables:
        raise ValueError(f"{site.file.site} has nothing that a {kind} could befall")
    table = tables[int(rng.integers(len(tables)))]
    found = entities(site, kind, table)
    entity = int(found[int(rng.integers(len(found)))])
    severity = ranges.size(*SEVERITY.get(kind, (1.0, 1.0)), rng)
    if rng.uniform() < TOTAL.get(kind, 0.0) and ranges.share is None:
        severity = 1.0
    ramp_s = ranges.within(*RAMP_S[kind], rng) if kind in RAMP_S else 0.0
    signal, amount, part = "", 0.0, 0
    if kind.startswith("sensor_"):
        signal = PUBLISHED[table][int(rng.integers(len(PUBLISHED[table])))]
        amount = _amount(site, table, entity, signal, ranges, rng)
        amount *= SPIKE_FACTOR if kind == "sensor_spiking" else float(rng.choice([-1.0, 1.0]))
    elif kind == "xid_burst":
        amount = float(rng.choice(XIDS))
    elif kind in ("pump_trip", "psu_lost"):
        part = int(rng.integers(2))
    elif kind == "pump_worn":
        part = BOTH
    end_s = begin_s + ranges.within(*LASTS_S[kind], rng) if kind in LASTS_S else None
    return Script(kind, table, entity, begin_s, end_s, severity, ramp_s, signal, amount, part)


def draw_pair(
    site: Site,
    rng: np.random.Generator,
    ranges: Ranges = DEVELOP,
    begin_s: float = 0.0,
    apart_s: tuple[float, float] = (0.0, 60.0),
    kinds: tuple[str, ...] | None = None,
) -> tuple[Script, Script]:
    """Two faults of entities of which neither is above the other; the second begins a little later.

    Raises ValueError if 1,000 draws find none, as on a site of one GPU.
    """
    allowed = kinds or kinds_of(site)
    first = second = draw(site, rng, allowed[int(rng.integers(len(allowed)))], ranges, begin_s)
    for attempt in range(1000):
        if attempt % 20 == 19:
            first = draw(site, rng, allowed[int(rng.integers(len(allowed)))], ranges, begin_s)
        later_s = begin_s + float(rng.uniform(*apart_s))
        second = draw(site, rng, allowed[int(rng.integers(len(allowed)))], ranges, later_s)
        a, b = (first.table, first.entity), (second.table, second.entity)
        if a != b and a not in above(site, *b) and b not in above(site, *a):
            return first, second
    raise ValueError(f"{site.file.site} has no two entities that are not above one another")


def above(site: Site, table: str, entity: int) -> list[tuple[str, int]]:
    """Entities that this one hangs on, by place, cooling and power; the site last."""
    out: list[tuple[str, int]] = []
    at = entity
    if table == "link":
        at, table = int(site.node_of_link[at]), "node"
        out.append(("node", at))
    if table == "gpu":
        at, table = int(site.node_of_gpu[at]), "node"
        out.append(("node", at))
    if table == "node":
        at, table = int(site.rack_of_node[at]), "rack"
        out.append(("rack", at))
    if table == "rack":
        for feeder in site.feeders_of_rack.of_row(at).tolist():
            out += [("feeder", feeder), *_feeders_above(site, feeder)]
        at, table = int(site.cdu_of_rack[at]), "cdu"
        out += [("cdu", at)] if at >= 0 else []
    if table == "cdu" and at >= 0 and site.loop_of_cdu[at] >= 0:
        out.append(("loop", int(site.loop_of_cdu[at])))
    if table == "feeder":
        out += _feeders_above(site, at)
    return [*out, ("site", 0)]


def _feeders_above(site: Site, feeder: int) -> list[tuple[str, int]]:
    out: list[tuple[str, int]] = []
    at = int(site.parent_of_feeder[feeder])
    while at >= 0:
        out.append(("feeder", at))
        at = int(site.parent_of_feeder[at])
    return out


def _amount(
    site: Site, table: str, entity: int, signal: str, ranges: Ranges, rng: np.random.Generator
) -> float:
    """Draw the offset of a sensor, in its unit: well above the noise of a good one."""
    unit = signal.rpartition("_")[2]
    if unit == "c":
        return ranges.size(*BIAS_K, rng)
    return ranges.size(*BIAS_PU[unit], rng) * usual(site, table, entity, signal)


def usual(site: Site, table: str, entity: int, signal: str) -> float:
    """Return the reading of this signal on a busy day, from the design; 1 if no design has it."""
    d = site.design
    of = entity
    if table in ("gpu", "node"):
        of = int((site.rack_of_gpu if table == "gpu" else site.rack_of_node)[entity])
    value = np.nan
    if table == "gpu":
        value = d.gpu_max_w[of] if signal == "power_w" else CLOCK_HZ / TYPICAL_LOAD_PU
    elif table == "node":
        value = d.rack_max_w[of] / int(site.node_start_of_rack[of + 1] - site.node_start_of_rack[of])
    elif signal == "filter_diff_pressure_pa":
        value = CDU_FILTER_DROP_PA / TYPICAL_LOAD_PU
    elif signal == "diff_pressure_pa":
        value = RACK_DROP_PA / TYPICAL_LOAD_PU
    elif table == "rack":
        value = d.rack_max_w[of] if signal == "power_w" else d.rack_flow_lpm[of] / TYPICAL_LOAD_PU
    elif table == "cdu":
        value = d.cdu_flow_lpm[of] / (1.0 if signal == "facility_flow_lpm" else TYPICAL_LOAD_PU)
    elif table == "loop":
        value = d.loop_flow_lpm[of] / TYPICAL_LOAD_PU
    elif table == "feeder":
        value = np.nansum(d.rack_max_w[site.racks_below(of)]) / 2.0
    value = TYPICAL_LOAD_PU * float(value)
    return value if np.isfinite(value) and value > 0 else 1.0
