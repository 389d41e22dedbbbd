"""Envelopes and limits: allowed ranges of controls and dangerous levels of signals, per entity.

Catalogue, profile, site: each may only narrow the one before; a control for which no `safe` value is stated
has no envelope and cannot be commanded.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, TABLES, Control, find_control
from twin.site.file import ControlLimits
from twin.site.profile import Profile
from twin.site.site import Envelope, Limit

# Rules that join the wishes of several racks for a device that serves them all.
_STRICTEST = {"min": np.fmax, "max": np.fmin, "safe": np.fmin, "slew_per_s": np.fmin}
DEFAULT_BLAST_SHARE = 0.01  # of the entities of a table, for a disruptive control; at least one


def _spread(per_rack: dict[str | None, float], rack_profile: list[str | None], racks: I32) -> F64:
    """Return a number per profile as a number per entity [n]."""
    by_rack = np.array([per_rack.get(p, np.nan) for p in rack_profile], np.float64)
    return by_rack[racks] if len(by_rack) else np.zeros(0, np.float64)


def envelopes_of(
    controls: dict[str, ControlLimits],
    profiles: dict[str, Profile],
    rack_profile: list[str | None],
    rack_of_entity: dict[str, I32],
    cdu_of_rack: I32,
    sizes: dict[str, int],
) -> tuple[dict[str, Envelope], list[str]]:
    """Return (envelope of every control, problems found)."""
    known = ", ".join(_all_controls())
    problems = [
        f"$.controls.{key}: not a control of the catalogue; expected one of {known}"
        for key in controls
        if find_control(key) is None
    ]
    out: dict[str, Envelope] = {}
    for table, spec in TABLES.items():
        for control in spec.controls:
            given = {k: p.controls[control.key] for k, p in profiles.items() if control.key in p.controls}
            columns = {}
            for name, strictest in _STRICTEST.items():
                stated = {k: getattr(v, name).value for k, v in given.items() if getattr(v, name) is not None}
                by_rack = np.array([stated.get(p or "", np.nan) for p in rack_profile], np.float64)
                columns[name] = np.full(sizes[table], np.nan)
                if table in rack_of_entity:
                    columns[name] = by_rack[rack_of_entity[table]]
                elif table == "cdu":  # what suits every rack that it serves
                    served = cdu_of_rack >= 0
                    strictest.at(columns[name], cdu_of_rack[served], by_rack[served])
            deadbands = [v.deadband.value for v in given.values() if v.deadband is not None]
            deadband = max([float(control.deadband), *deadbands])
            out[control.key] = _envelope(control, controls.get(control.key), columns, deadband, problems)
    return out, problems


_Bounds = tuple[F64, F64, F64, F64]  # low, high, safe and slew


def _all_controls() -> list[str]:
    return [c.key for spec in TABLES.values() for c in spec.controls]


def _envelope(
    control: Control,
    site: ControlLimits | None,
    columns: dict[str, F64],
    deadband: float,
    problems: list[str],
) -> Envelope:
    path, n = f"$.controls.{control.key}", len(columns["safe"])
    low, high = np.full(n, float(control.low)), np.full(n, float(control.high))
    # For a named level the first state is the normal one, and keeping is the only lapse it needs.
    safe = np.full(n, control.low if control.states or control.on_expiry == "keep" else np.nan)
    slew = np.full(n, float(control.slew_per_s))
    for name, target in (("min", low), ("max", high), ("safe", safe), ("slew_per_s", slew)):
        stated = np.isfinite(columns[name])
        target[stated] = columns[name][stated]
    if (low > high).any():
        problems.append(f"{path}: the racks on one CDU leave no value for it; expected profiles that overlap")
        return Envelope(low, high, safe, slew, deadband, 1)
    safe = np.clip(safe, low, high)
    if site is not None:
        low, high, safe, slew = _narrowed(path, site, (low, high, safe, slew), problems)
        if site.deadband is not None:
            deadband = site.deadband
    unknown = np.isnan(safe)
    low[unknown], high[unknown] = np.nan, np.nan
    blast = n if not control.disruptive else max(1, int(n * DEFAULT_BLAST_SHARE))
    if site is not None and site.blast_radius is not None:
        blast = site.blast_radius
    return Envelope(low, high, safe, slew, deadband, blast)


def _narrowed(path: str, site: ControlLimits, bounds: _Bounds, problems: list[str]) -> _Bounds:
    """Return bounds narrowed by the site file; notes attempts to widen them."""
    low, high, safe, slew = bounds
    n = len(low)
    above = "catalogue or profile; the site may only narrow"
    for name in ("min", "max", "safe", "slew_per_s", "deadband"):
        value = getattr(site, name)
        if value is not None and not np.isfinite(value):
            problems.append(f"{path}.{name}: expected a finite number, got {value}")
            return bounds
    if site.min is not None and n:
        if (site.min < low).any():
            problems.append(f"{path}.min: {site.min} is below the {low.max():g} of {above}")
        low = np.maximum(low, site.min)
    if site.max is not None and n:
        if (site.max > high).any():
            problems.append(f"{path}.max: {site.max} is above the {high.min():g} of {above}")
        high = np.minimum(high, site.max)
    if site.safe is not None:
        safe = np.full(n, site.safe)
    if n and (low > high).any():
        bounds_text = f"{low.max():g} to {high.min():g}"
        what = "min is above max" if site.min is not None and site.max is not None else "nothing is left"
        of = f"within the {bounds[0].max():g} to {bounds[1].min():g} of catalogue or profile"
        problems.append(f"{path}: {what}, {bounds_text}; expected min <= max {of}, in the unit of its name")
    elif n and ((safe < low) | (safe > high)).any():
        problems.append(f"{path}.safe: expected a value within [{low.max():g}, {high.min():g}]")
    if site.slew_per_s is not None:
        bound = slew[slew > 0].min(initial=np.inf)  # a slew of zero in the catalogue is none
        if not 0 < site.slew_per_s <= bound:
            problems.append(
                f"{path}.slew_per_s: expected a number > 0, at most {bound:g}, got {site.slew_per_s}"
            )
        slew = np.full(n, site.slew_per_s)
    if site.deadband is not None and site.deadband < 0:
        problems.append(f"{path}.deadband: expected a number >= 0, got {site.deadband}")
    if site.blast_radius is not None and site.blast_radius < 1:
        problems.append(f"{path}.blast_radius: expected at least 1, got {site.blast_radius}")
    return low, high, safe, slew


def limits_of(
    profiles: dict[str, Profile],
    rack_profile: list[str | None],
    rack_of_entity: dict[str, I32],
    sizes: dict[str, int],
    filled_pu: F64,
) -> dict[str, Limit]:
    """Return the limits of every signal with a limit in some profile.

    `filled_pu` [n_rack]: nodes of a rack over those of its profile. Trays are cooled side by side, so the
    least flow of a rack goes with their number.
    """
    out: dict[str, Limit] = {}
    keys = sorted({key for p in profiles.values() for key in p.limits})
    for key in keys:
        table = key.partition(".")[0]
        racks = rack_of_entity.get(table)
        if racks is None or len(racks) != sizes[table]:
            continue
        columns = []
        for field in ("guard", "max", "slew_per_s"):
            numbers: dict[str | None, float] = {}
            for name, profile in profiles.items():
                stated = profile.limits.get(key)
                value = getattr(stated, field) if stated is not None else None
                if value is not None:
                    numbers[name] = value.value
            limit = _spread(numbers, rack_profile, racks)
            columns.append(limit * filled_pu if key == "rack.flow_lpm" and field != "slew_per_s" else limit)
        out[key] = Limit(*columns)
    return out
