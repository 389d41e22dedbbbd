"""The case that must hold before anything may act: what is left when every lease has lapsed.

Caps fall to their safe values; what cannot be capped keeps drawing. With either feed lost, that sum must fit
every budget of the power tree. May import the site, profiles and the catalogue; decides nothing else.
"""

from __future__ import annotations

import numpy as np

from twin.frame import F64
from twin.profile import Profile
from twin.site import Site

CONTROL = "gpu.power_cap_w"


def lapse_power_w(site: Site, profiles: dict[str, Profile]) -> F64:
    """Power of each rack when its caps have lapsed [n_rack]: safe caps plus what cannot be capped; NaN = unknown.

    Unmanaged: CPUs at their maximum and the rack's overhead, as the profile states them.
    """
    safe_w = np.nan_to_num(site.envelopes[CONTROL].safe, nan=np.inf)
    managed = site.sum_by_rack("gpu", safe_w)
    managed[~np.isfinite(managed)] = np.nan
    out = np.full(site.sizes["rack"], np.nan)
    for rack, name in enumerate(site.profile_of_rack):
        profile = profiles.get(name) if name else None
        if profile is None:
            continue
        nodes = int(site.node_start_of_rack[rack + 1] - site.node_start_of_rack[rack])
        cpu_w = nodes * float(profile.layout.cpus_per_node.value) * (profile.get("cpu_max_w") or 0.0)
        out[rack] = managed[rack] + cpu_w + (profile.get("rack_overhead_w") or 0.0)
    return out


def lapse_faults(site: Site, profiles: dict[str, Profile]) -> list[str]:
    """Budgets that the lapsed site would break with one feed lost, each with the sums; empty = the case holds.

    A rack that both sides feed counts in full on the surviving side, and so on each of them.
    """
    rack_w = lapse_power_w(site, profiles)
    budget_w = np.where(site.external_budget, site.guaranteed_w, site.budget_w)
    faults = []
    for feeder in np.flatnonzero(np.isfinite(budget_w)).tolist():
        racks = site.racks_below(feeder)
        known = rack_w[racks]
        name = site.name("feeder", feeder)
        if np.isnan(known).any():
            unknown = site.name("rack", int(racks[np.isnan(known)][0]))
            faults.append(f"{name}: the load of {unknown} after a lapse is unknown; expected a profile with safe caps")
        elif known.sum() > budget_w[feeder]:
            faults.append(f"{name}: {known.sum() / 1e3:.1f} kW after all leases lapse with the other feed lost, "
                          f"budget {budget_w[feeder] / 1e3:.1f} kW; lower gpu.power_cap_w safe by site `controls`")  # fmt: skip
    return faults
