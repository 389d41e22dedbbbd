"""The case that must hold before anything may act: what is left when every lease has lapsed.

Caps fall to their safe values; what cannot be capped keeps drawing. With either feed lost, that sum must fit
every budget of the power tree.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64
from twin.site.profile import Profile
from twin.site.site import Site

CONTROL, HALL_BUDGET = "gpu.power_cap_w", "rack.hall_budget_w"


def lapse_power_w(site: Site, profiles: dict[str, Profile]) -> F64:
    """Power of each rack when its caps have lapsed [n_rack]: safe caps plus what cannot be capped.

    Unmanaged: what is left of a node at its maximum without its GPUs, and the rack's overhead. NaN = unknown:
    what a profile does not state is not zero. A rack of switches only draws what the profile says of one.
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
        if nodes == 0 and profile.layout.racks.value > profile.layout.compute_racks.value:
            out[rack] = _stated(profile, "switch_rack_max_w")
            continue
        gpus_w = float(profile.layout.gpus_per_node.value) * _stated(profile, "gpu_max_w")
        cpus_w = float(profile.layout.cpus_per_node.value) * _stated(profile, "cpu_max_w")
        rest_w = _stated(profile, "node_max_w") - gpus_w
        rest_w = cpus_w if cpus_w > rest_w else rest_w
        out[rack] = managed[rack] + nodes * rest_w + _stated(profile, "rack_overhead_w")
    return out


def _stated(profile: Profile, name: str) -> float:
    value = profile.get(name)
    return np.nan if value is None else value


def budgets_w(site: Site) -> F64:
    """Guaranteed power of each feeder [n_feeder]: its budget, or the guaranteed share of an external one."""
    return np.where(site.external_budget, site.guaranteed_w, site.budget_w)


def lapse_faults(site: Site, profiles: dict[str, Profile]) -> list[str]:
    """Budgets that the lapsed site would break with one feed lost, with the sums; empty = the case holds.

    A rack that both sides feed counts in full on the surviving side, and so on each of them.
    """
    rack_w = lapse_power_w(site, profiles)
    budget_w = budgets_w(site)
    faults = []
    for feeder in np.flatnonzero(np.isfinite(budget_w)).tolist():
        racks = site.racks_below(feeder)
        known = rack_w[racks]
        name = site.name("feeder", feeder)
        if np.isnan(known).any():
            unknown = site.name("rack", int(racks[np.isnan(known)][0]))
            faults.append(
                f"{name}: the load of {unknown} after a lapse is unknown; expected a profile with safe caps"
            )
        elif known.sum() > budget_w[feeder]:
            faults.append(
                f"{name}: {known.sum() / 1e3:.1f} kW after all leases lapse with the other feed lost, "
                f"budget {budget_w[feeder] / 1e3:.1f} kW; lower gpu.power_cap_w safe by site `controls`"
            )
    return faults


def share_faults(site: Site) -> list[str]:
    """Shared feeders of a fleet that the guaranteed shares of its halls exceed with one feed lost.

    A hall that both sides feed counts in full on the surviving side, and so on each of them.
    """
    share_w = np.nan_to_num(site.envelopes[HALL_BUDGET].safe)
    budget_w, faults = budgets_w(site), []
    for feeder in np.flatnonzero(np.isfinite(budget_w)).tolist():
        halls = site.racks_below(feeder)
        sum_w = float(share_w[halls].sum())
        if sum_w > budget_w[feeder]:
            faults.append(
                f"{site.name('feeder', feeder)}: its halls are guaranteed {sum_w / 1e3:,.1f} kW, which it "
                f"carries alone with the other feed lost; expected at most its budget of "
                f"{budget_w[feeder] / 1e3:,.1f} kW: lower guaranteed_w, here and in the halls' files"
            )
    return faults
