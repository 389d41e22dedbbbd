"""Safety case: the load that is left when every lease has lapsed. It must hold before any policy may act.

Caps fall to their safe values; what cannot be capped keeps drawing. With either feed lost, that sum must fit
every budget of the power tree.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64
from twin.site.profile import Profile
from twin.site.site import Site

CONTROL, HALL_BUDGET = "gpu.power_cap_w", "rack.hall_budget_w"


def hall_count(site: Site) -> int:
    """Return the halls of a fleet in the site file of its hub; 0 for any other site."""
    return int(np.isfinite(site.envelopes[HALL_BUDGET].safe).sum())


def noun_key(site: Site, table: str) -> str:
    """Return the key of the noun for a table's entities at this site.

    The racks of a hub are halls. A hub that has other racks too calls all of them racks.
    """
    return HALL_BUDGET if table == "rack" and 0 < hall_count(site) == site.sizes["rack"] else table


def lapse_power_w(site: Site, profiles: dict[str, Profile]) -> F64:
    """Return the power of each rack after its caps have lapsed [n_rack]: safe caps plus uncappable load.

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
    """Return the guaranteed power of each feeder [n_feeder]: its budget, or the guaranteed share of an
    external one."""
    return np.where(site.external_budget, site.guaranteed_w, site.budget_w)


def lapse_faults(site: Site, profiles: dict[str, Profile]) -> list[str]:
    """Return the budgets that the lapsed site would exceed with one feed lost, with the sums; empty if it
    is safe.

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
    """Shared feeders of a fleet that the guaranteed shares of its halls exceed with one feed lost, loops
    whose heat they exceed with all machines, and a contract that is below them.

    A hall that both sides feed counts in full on the surviving side, and so on each of them. An external
    feeder is above a hub that is a hall itself: it has its own guaranteed share for its halls, and no more.
    """
    share_w = np.nan_to_num(site.envelopes[HALL_BUDGET].safe)
    budget_w, faults = budgets_w(site), []
    for feeder in np.flatnonzero(np.isfinite(budget_w)).tolist():
        halls = site.racks_below(feeder)
        sum_w = float(share_w[halls].sum())
        if sum_w > budget_w[feeder]:
            own = "the guaranteed share" if site.external_budget[feeder] else "its budget"
            faults.append(
                f"{site.name('feeder', feeder)}: its halls are guaranteed {sum_w / 1e3:,.1f} kW, which it "
                f"carries alone with the other feed lost; expected at most {own} of "
                f"{budget_w[feeder] / 1e3:,.1f} kW: lower guaranteed_w, here and in the halls' files"
            )
    for name, entry in site.file.policies.items():
        contract_w = entry.settings.get("contract_w") if (entry.kind or name) == "hall_budgets" else None
        if isinstance(contract_w, float) and share_w.sum() > contract_w:
            faults.append(
                f"{name}: contract_w is {contract_w / 1e3:,.1f} kW and its halls are guaranteed "
                f"{share_w.sum() / 1e3:,.1f} kW, below which it does not cut; expected at least as much: "
                "lower guaranteed_w, here and in the halls' files"
            )
    for loop, heat_w, whole_w in _loop_shares(site):
        if heat_w > whole_w:
            faults.append(
                f"{site.name('loop', loop)}: its halls are guaranteed {heat_w / 1e3:,.1f} kW of heat; "
                f"expected at most its heat_w of {whole_w / 1e3:,.1f} kW: lower guaranteed_w, as for a feeder"
            )
    return faults


def share_notes(site: Site) -> list[str]:
    """Return the loops whose heat with one machine lost the guaranteed shares of their halls exceed, in
    words.

    Water warms in minutes, and each hall guards its temperatures below its share too: a note, and no fault.
    """
    return [
        f"{site.name('loop', loop)}: its halls are guaranteed {heat_w / 1e3:,.1f} kW of heat; with one of "
        f"its {site.machines_of_loop[loop]:g} machines lost it takes {one_lost_w / 1e3:,.1f} kW: then its "
        "water warms, and thermal_guard in the halls cuts below their shares"
        for loop, heat_w, whole_w in _loop_shares(site)
        if whole_w >= heat_w > (one_lost_w := whole_w * (1.0 - 1.0 / float(site.machines_of_loop[loop])))
    ]


def guaranteed_heat_w(site: Site) -> F64:
    """The heat of what the halls of each loop are guaranteed [n_loop]; 0 where it serves none."""
    share_w = np.nan_to_num(site.envelopes[HALL_BUDGET].safe)
    return site.halls_of_loop.sums(share_w) * site.heat_pu_of_loop


def _loop_shares(site: Site) -> list[tuple[int, float, float]]:
    """Return (loop, heat guaranteed to its halls, heat capacity with all machines) of loops of halls."""
    heat_w = guaranteed_heat_w(site)
    mine = np.flatnonzero(np.diff(site.halls_of_loop.start)).tolist()
    return [(loop, float(heat_w[loop]), float(site.design.loop_heat_w[loop])) for loop in mine]
