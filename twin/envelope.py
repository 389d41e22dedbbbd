"""What controls may be and where signals become dangerous, per entity: catalogue, profile and site, narrowing.

Each layer may only narrow the one before; a control for which no `safe` value is stated has no envelope
here and cannot be commanded. May import the catalogue, profiles and the site's schema.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64, I32
from twin.profile import Profile
from twin.signals import TABLES, Control, find_control
from twin.site import Envelope, Limit
from twin.sitefile import ControlLimits

DEFAULT_BLAST_SHARE = 0.01  # of the entities of a table, for a disruptive control; at least one


def _spread(per_rack: dict[str | None, float], rack_profile: list[str | None], racks: I32) -> F64:
    """A number per profile, as a number per entity [n]."""
    by_rack = np.array([per_rack.get(p, np.nan) for p in rack_profile], np.float64)
    return by_rack[racks] if len(by_rack) else np.zeros(0, np.float64)


def envelopes_of(
    controls: dict[str, ControlLimits],
    profiles: dict[str, Profile],
    rack_profile: list[str | None],
    rack_of_entity: dict[str, I32],
    sizes: dict[str, int],
) -> tuple[dict[str, Envelope], list[str]]:
    """(envelope of every control, problems found)."""
    problems = [f"$.controls.{key}: not a control of the catalogue; expected one of {', '.join(_all_controls())}"
                for key in controls if find_control(key) is None]  # fmt: skip
    out: dict[str, Envelope] = {}
    for table, spec in TABLES.items():
        for control in spec.controls:
            racks = rack_of_entity.get(table)
            out[control.key] = _envelope(control, controls.get(control.key), profiles, rack_profile, racks,
                                         sizes[table], problems)  # fmt: skip
    return out, problems


def _all_controls() -> list[str]:
    return [c.key for spec in TABLES.values() for c in spec.controls]


def _envelope(
    control: Control,
    site: ControlLimits | None,
    profiles: dict[str, Profile],
    rack_profile: list[str | None],
    racks: I32 | None,
    n: int,
    problems: list[str],
) -> Envelope:
    path = f"$.controls.{control.key}"
    low, high = np.full(n, float(control.low)), np.full(n, float(control.high))
    # For a named level the first state is the normal one, and keeping is the only lapse it needs.
    safe = np.full(n, 0.0 if control.states or control.on_expiry == "keep" else np.nan)
    slew = np.full(n, float(control.slew_per_s))
    if racks is not None:
        given = {name: p.controls[control.key] for name, p in profiles.items() if control.key in p.controls}
        for field, target in (("min", low), ("max", high), ("safe", safe), ("slew_per_s", slew)):
            numbers: dict[str | None, float] = {
                k: getattr(v, field).value for k, v in given.items() if getattr(v, field) is not None
            }
            column = _spread(numbers, rack_profile, racks)
            stated = np.isfinite(column)
            target[stated] = column[stated]
    if site is not None:
        if site.min is not None and n:
            if (site.min < low).any():
                problems.append(f"{path}.min: {site.min} is below the {low.max():g} of catalogue or profile; the site may only narrow")  # fmt: skip
            low = np.maximum(low, site.min)
        if site.max is not None and n:
            if (site.max > high).any():
                problems.append(f"{path}.max: {site.max} is above the {high.min():g} of catalogue or profile; the site may only narrow")  # fmt: skip
            high = np.minimum(high, site.max)
        if site.safe is not None:
            safe = np.full(n, site.safe)
        if site.slew_per_s is not None:
            slew = np.full(n, site.slew_per_s)
        if n and (low > high).any():
            problems.append(f"{path}: min is above max; expected min <= max")
        if n and ((safe < low) | (safe > high)).any():
            problems.append(f"{path}.safe: expected a value within [{low.max():g}, {high.min():g}]")
        if site.blast_radius is not None and site.blast_radius < 1:
            problems.append(f"{path}.blast_radius: expected at least 1, got {site.blast_radius}")
    unknown = np.isnan(safe)
    low[unknown], high[unknown] = np.nan, np.nan
    deadband = control.deadband if site is None or site.deadband is None else site.deadband
    blast = n if not control.disruptive else max(1, int(n * DEFAULT_BLAST_SHARE))
    if site is not None and site.blast_radius is not None:
        blast = site.blast_radius
    return Envelope(low, high, safe, slew, deadband, blast)


def limits_of(
    profiles: dict[str, Profile], rack_profile: list[str | None], rack_of_entity: dict[str, I32], sizes: dict[str, int]
) -> dict[str, Limit]:
    """Limits of every signal for which some profile states one."""
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
                limit = profile.limits.get(key)
                value = getattr(limit, field) if limit is not None else None
                if value is not None:
                    numbers[name] = value.value
            columns.append(_spread(numbers, rack_profile, racks))
        out[key] = Limit(*columns)
    return out
