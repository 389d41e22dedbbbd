"""Budgets: the limits of racks, feeders, CDUs, loops and the site as rows over racks, and the load that caps
cannot change.

A feeder counts with its present share of each rack. With `failover` each side carries all of a rack that both
sides feed, so that the loss of one side leaves the other inside its budget. The load that GPU caps cannot
change, and the losses of a rack, are subtracted beforehand. Feeders without power have no row, and their
racks count on the other feeders. An external limit of a feeder is compared with its present flow, not with
the flow after a loss of the other side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.allocation import Budgets
from policies.power_capping.demand import current
from policies.power_capping.unpowered import unpowered_gpus, unpowered_nodes
from twin.catalogue import F64, I32, I64, Bool
from twin.contracts import View, machines_pu
from twin.physics import COOLANTS, heat_rate_w_per_k
from twin.site import Site
from twin.telemetry import GOOD

# A CDU or loop at less of its nominal flow than this has lost capacity, and its heat falls with the flow.
# source: estimate; a controlled pump holds its flow within a tenth
LEAST_FLOW_PU = 0.8
# Where a pressure is asked of a CDU, its pumps are slow on purpose, and its coolant may get as warm as racks'
# returns may be; what asks for it keeps half of the nominal flow, its meters are off by some percent
PRESSURE, SLOWED_FLOW_PU = "cdu.diff_pressure_target_pa", 0.45
COOLANT_C = 35.0  # at which the heat rate of the racks' coolant is taken
# CDUs take from a loop what their valves let through: only open ones show a loss. source: estimate
VALVE, OPEN_PU = "cdu.facility_valve1_pu", 0.9
AT_ONCE_S = 5.0  # a rack's reading no older than this is of the instant of its GPUs'. source: estimate
DARK = ("feed_lost", "breaker_tripped")  # faults of a feeder that carries nothing
SUPPLIES = ("node.psu1_power_w", "node.psu2_power_w")  # on sides A and B
# A reading no older than this would show a loss by now; of what nodes draw, so much comes from a side that
# feeds them. source: estimate; two supplies that share differ by some percent
JUST_S, DRAWN_PU = 4.0, 0.2
LEAST_LOAD_W = 100.0  # what the meter of a feeder without power does not read. source: estimate


class Pairs(NamedTuple):
    """Pairs of a place and a rack that it carries [k], with the share of each watt of the rack.

    `drawn`: the place of the first feeder as it is fed now, whatever the others stand in for.
    """

    place: I64
    rack: I64
    share: F64
    drawn: int


class Carried(NamedTuple):
    """Racks, feeders, CDUs, loops, the site, then with failover feeders as they are fed now [n_place]: what
    they may carry (inf: no limit), and the pairs."""

    limit_w: F64
    pairs: Pairs
    n_rack: int
    n_feeder: int

    def name(self, site: Site, place: int) -> str:
        """Full name of a place; "site" for all racks together."""
        for table in ("rack", "feeder", "cdu", "loop"):
            if place < site.sizes[table]:
                return site.name(table, place)
            place -= site.sizes[table]
        return "site" if place == 0 else site.name("feeder", place - 1)

    def feeder(self, feeder: int) -> int:
        """The place of a feeder."""
        return self.n_rack + feeder

    @property
    def whole(self) -> int:
        """The place of all racks together."""
        n = len(self.limit_w)
        return n - 1 if self.pairs.drawn == self.n_rack else n - 1 - self.n_feeder

    def within(self, site_w: float, feeder_w: F64) -> Carried:
        """Add external limits of all racks together and of each feeder [n_feeder]; inf = no limit."""
        limit_w, first = self.limit_w.copy(), self.pairs.drawn
        limit_w[self.whole] = site_w
        limit_w[first : first + self.n_feeder] = np.fmin(limit_w[first : first + self.n_feeder], feeder_w)
        return self._replace(limit_w=limit_w)


def dead_feeders(view: View) -> Bool:
    """Return the feeders without voltage or with an open breaker, and all below them [n_feeder].

    They say so, or the diagnosis does where only their voltage shows it. One that fell silent after it
    reported so stays dead, unless its meter reports a load. So does one that reports a load itself, and
    that supplies below draw from by what they have just read: a contact that sticks moves nothing. A feed
    that is truly lost is dead as soon as either of the two shows it.
    """
    site = view.site
    dead: Bool = np.zeros(site.sizes["feeder"], np.bool_)
    carries = (view.quality("feeder.power_w") == GOOD) & (view.believed("feeder.power_w") >= LEAST_LOAD_W)
    for key in ("feeder.energised_state", "feeder.breaker_state"):
        says = view.value(key) >= 1.0
        if says.any():
            live = carries & ((view.quality(key) != GOOD) | _drawn_from(view))
            dead |= says & ~live
    for fault in view.faults():
        if fault.kind in DARK and fault.table == "feeder":
            dead[fault.entity] |= not carries[fault.entity]
    for _ in range(len(dead) if dead.any() else 0):
        above = site.parent_of_feeder
        lost = (above >= 0) & dead[np.maximum(above, 0)] & ~dead
        if not lost.any():
            break
        dead |= lost
    return dead


def _drawn_from(view: View) -> Bool:
    """Feeders whose meter and whose racks' supplies have just been read, and from which these draw
    [n_feeder]."""
    site = view.site
    feeder, rack = site.served_racks()
    out: Bool = np.zeros(site.sizes["feeder"], np.bool_)
    fresh = view.age_s("feeder.power_w") <= JUST_S
    whole_w = view.believed("node.power_w")
    for side, key in enumerate(SUPPLIES, 1):
        read = (view.quality(key) == GOOD) & (view.age_s(key) <= JUST_S) & np.isfinite(whole_w)
        drawn_w = site.sum_by_rack("node", np.where(read, view.value(key), 0.0).astype(np.float64))
        all_w = site.sum_by_rack("node", np.where(read, whole_w, 0.0).astype(np.float64))
        n = len(out)
        part = np.bincount(feeder, drawn_w[rack], n), np.bincount(feeder, all_w[rack], n)
        out |= (site.side_of_feeder == side) & (part[0] > DRAWN_PU * part[1])
    return out & fresh


def pairs_of(site: Site, dead: Bool, failover: bool) -> Pairs:
    """Return the share of each rack that every place carries while these feeders are dead.

    With `failover` as much as it comes to while all of side A, or all of side B, is lost as well.
    """
    return site.derived(f"pairs_of {failover}", lambda: _pairs_of(site, dead, failover), dead.tobytes())


def _pairs_of(site: Site, dead: Bool, failover: bool) -> Pairs:
    n_rack, n_feeder = site.sizes["rack"], site.sizes["feeder"]
    first_cdu = n_rack + n_feeder
    first_loop = first_cdu + site.sizes["cdu"]
    whole = first_loop + site.sizes["loop"]
    feeder, rack = site.served_racks()
    share = now = _shares(site, dead, feeder, rack)
    if failover:
        for side in (1, 2):
            share = np.maximum(share, _shares(site, dead | (site.side_of_feeder == side), feeder, rack))
    kept, flows = ~dead[feeder] & (share > 0), ~dead[feeder] & (now > 0) & failover
    cooled = np.flatnonzero((site.cdu_of_rack >= 0) & (np.nan_to_num(site.design.capture_pu) > 0))
    cdu = site.cdu_of_rack[cooled].astype(np.int64)
    looped = site.loop_of_cdu[cdu] >= 0
    loop = site.loop_of_cdu[cdu[looped]].astype(np.int64)
    halls = site.halls_of_loop
    of_hall, hall = halls.row_of_member.astype(np.int64), halls.member.astype(np.int64)
    every, capture = np.arange(n_rack), site.design.capture_pu[cooled]
    places = (every, n_rack + feeder[kept], first_cdu + cdu, first_loop + loop, first_loop + of_hall,
              np.full(n_rack, whole), whole + 1 + feeder[flows])  # fmt: skip
    racks = (every, rack[kept], cooled, cooled[looped], hall, every, rack[flows])
    shares = (np.ones(n_rack), share[kept], capture, capture[looped], site.heat_pu_of_loop[of_hall],
              np.ones(n_rack), now[flows])  # fmt: skip
    return Pairs(
        np.concatenate(places),
        np.concatenate(racks),
        np.concatenate(shares),
        whole + 1 if failover else n_rack,
    )


def _shares(site: Site, dead: Bool, feeder: I64, rack: I64) -> F64:
    """Share of each pair: living taps of the rack on this feeder or below it, of all that it has."""
    direct = site.feeders_of_rack
    taps = np.bincount(direct.row_of_member[~dead[direct.member]], minlength=site.sizes["rack"])
    return _taps_below(site, dead, feeder, rack) / np.maximum(taps[rack], 1)


def _taps_below(site: Site, dead: Bool, feeder: I64, rack: I64) -> F64:
    """Count the living taps of a rack that are this feeder or hang below it, per pair."""
    n_rack, direct = max(site.sizes["rack"], 1), site.feeders_of_rack
    key = feeder * n_rack + rack
    count = np.zeros(len(key))
    at, of = direct.member.astype(np.int64), direct.row_of_member.astype(np.int64)
    living = ~dead[at]
    at, of = at[living], of[living]
    while len(at):
        np.add.at(count, np.searchsorted(key, at * n_rack + of), 1.0)
        above = site.parent_of_feeder[at].astype(np.int64)
        at, of = above[above >= 0], of[above >= 0]
    return count


def carried_by(view: View, pairs: Pairs) -> Carried:
    """Limits of all places in force now, but for what outside demands add (`Carried.within`)."""
    site, design, n_feeder = view.site, view.site.design, view.site.sizes["feeder"]
    limit = view.limit("rack.power_w")
    stated_w = np.full(site.sizes["rack"], np.nan) if limit is None else limit.max
    limit_w = [np.fmin(stated_w, design.rack_max_w), view.budget_w()]
    for key, nominal_lpm, heat_w in (
        ("cdu.flow_lpm", design.cdu_flow_lpm, design.cdu_heat_w),
        ("loop.flow_lpm", design.loop_flow_lpm, design.loop_heat_w),
    ):
        reporting = (view.quality(key) == GOOD) & (nominal_lpm > 0)  # a loop without CDUs has no nominal flow
        flow = np.divide(
            view.believed(key), nominal_lpm, out=np.full(len(reporting), np.nan), where=reporting
        )
        if key.startswith("loop"):
            flow = np.where(_open_loops(view), flow, np.nan)
        carried = np.where((flow > 0) & (flow < LEAST_FLOW_PU), flow, 1.0)  # 0: its meter
        if key.startswith("cdu"):
            slowed = np.isfinite(view.commanded(PRESSURE)) & (flow >= SLOWED_FLOW_PU)
            carried = np.where(slowed & (carried < 1.0), _slowed_pu(view, flow), carried)
        limit_w.append(
            heat_w * (np.minimum(carried, machines_pu(view)) if key.startswith("loop") else carried)
        )
    limit_w.append(np.full(1 if pairs.drawn == site.sizes["rack"] else 1 + n_feeder, np.inf))
    together_w = np.concatenate(limit_w)
    return Carried(np.where(np.isnan(together_w), np.inf, together_w), pairs, site.sizes["rack"], n_feeder)


def _slowed_pu(view: View, flow: F64) -> F64:
    """Share of their heat that CDUs with slow pumps carry [n_cdu], with coolant that may get as warm as the
    guards of racks' returns. Where supply or guards are not known, as much as their flow over nominal."""
    site, design, limit = view.site, view.site.design, view.limit("rack.return_temp_c")
    guard_c, cooled = np.full(len(flow), np.nan), site.cdu_of_rack >= 0
    if limit is not None:
        np.fmin.at(guard_c, site.cdu_of_rack[cooled], limit.guard[cooled])
    warm = np.full(len(flow), COOLANT_C)
    w_per_k = heat_rate_w_per_k(COOLANTS[site.file.coolant], flow * design.cdu_flow_lpm, warm)
    carried = w_per_k * (guard_c - view.believed("cdu.supply_temp_c")) / design.cdu_heat_w
    return np.clip(np.where(np.isfinite(carried), carried, flow), flow, 1.0)


def _open_loops(view: View) -> Bool:
    """Loops whose CDUs ask for all the flow there is, their valves open [n_loop].

    Else little flow is what little heat asks for: cut for it, heat and flow would fall together to nothing.
    """
    n_loop, loop = view.site.sizes["loop"], view.site.loop_of_cdu
    reported = (view.quality(VALVE) == GOOD) & (loop >= 0)
    valve = np.bincount(loop[reported], view.value(VALVE)[reported], n_loop)
    found: Bool = valve >= OPEN_PU * np.maximum(np.bincount(loop[reported], minlength=n_loop), 1)
    return found


def other_w(view: View, gpu_w: F64, gain: F64 | float, reporting: Bool | None = None) -> F64:
    """Return the power of each rack that does not depend on its GPUs [n_rack].

    What its meter, as bad as it may read by now, shows beyond its GPUs; `gpu_w` [n_gpu] is what they draw,
    and `gain` what the rack draws for a watt of them. Where its reading is older than theirs, or GPUs are
    silent, the two are not of one instant: then it is kept within what the profile states of nodes that are
    on. A rack that never reported has the most of that. NaN where neither a meter nor a profile says.
    `reporting` [n_gpu]: given where nodes stand in for GPUs, as in power_nodes; nothing of their nodes is
    beside them then.
    """
    site, (least_w, most_w) = view.site, stated_w(view, reporting is not None)
    if reporting is None:
        reporting = current(view, "gpu.power_w") | unpowered_gpus(view)
    rest_w = view.worst("rack.power_w") - site.sum_by_rack("gpu", np.where(reporting, gpu_w, 0.0)) * gain
    rest_w = np.maximum(rest_w, 0.0)
    silent = site.sum_by_rack("gpu", (~reporting).astype(np.float64)) > 0
    at_once = np.isfinite(rest_w) & ~silent & (view.age_s("rack.power_w") <= AT_ONCE_S)
    return np.where(at_once, rest_w, np.fmax(np.fmin(rest_w, most_w), np.where(silent, np.nan, least_w)))


def stated_w(view: View, standing_in: bool) -> tuple[F64, F64]:
    """(least, most) that profiles state of what racks draw beside their GPUs [n_rack], W; NaN: not stated.

    `standing_in`: nodes that stand in for their GPUs are none of it.
    """
    site, design = view.site, view.site.design
    nodes = site.sum_by_rack("node", (~unpowered_nodes(view)).astype(np.float64))
    if standing_in:
        nodes = np.where(by_node(site), 0.0, nodes)
    overhead_w = np.nan_to_num(design.rack_overhead_w)
    least_w, most_w = (
        nodes * (cpu_w + design.node_other_w) + overhead_w for cpu_w in (design.cpu_idle_w, design.cpu_max_w)
    )
    return least_w, most_w


def by_node(site: Site) -> Bool:
    """Racks whose GPUs cannot be capped, but the nodes around them can [n_rack]."""
    of_gpu, of_node = site.envelopes["gpu.power_cap_w"].low, site.envelopes["node.power_cap_w"].low
    if not np.isnan(of_gpu).any():
        return np.zeros(site.sizes["rack"], np.bool_)
    node = site.node_start_of_rack[:-1].astype(np.int64)
    gpu = site.gpu_start_of_node[node].astype(np.int64)
    some = gpu < site.gpu_start_of_node[site.node_start_of_rack[1:]]
    out = np.zeros(len(node), np.bool_)
    out[some] = np.isnan(of_gpu[gpu[some]]) & np.isfinite(of_node[node[some]])
    return out


def gain_of(site: Site) -> F64:
    """Watts that a rack draws for one more of its GPUs [n_rack]: regulators and fans follow the load. A node
    that stands in for its GPUs is measured with them."""
    return site.derived("gain_of", lambda: np.where(by_node(site), 1.0, _own_gain(site)))


def _own_gain(site: Site) -> F64:
    return np.asarray(1.0 + np.nan_to_num(site.design.node_loss_pu), np.float64)


def sums_w(carried: Carried, of_rack: F64) -> F64:
    """Sum these watts of racks by the place that carries them [n_place]."""
    pairs = carried.pairs
    return np.bincount(pairs.place, pairs.share * of_rack[pairs.rack], len(carried.limit_w)).astype(
        np.float64
    )


def budgets_of(
    carried: Carried, site: Site, limit_w: F64, jobs: tuple[I32, I32, F64] | None = None
) -> tuple[Budgets, I64]:
    """(budgets over racks, and over jobs that hang together as groups behind them; the place of each row).

    `limit_w` [n_place] is what is left for GPUs. `jobs`: (job, rack, range of its GPUs there in W), ascending
    by job.
    """
    pairs, bound = carried.pairs, np.isfinite(limit_w)
    kept = bound[pairs.place]
    place, group = pairs.place[kept], pairs.rack[kept]
    share = pairs.share[kept] * gain_of(site)[pairs.rack[kept]]
    if jobs is not None and len(jobs[0]):
        job, rack, count = jobs
        many = np.bincount(group, minlength=carried.n_rack)
        order = np.argsort(group, kind="stable")
        first = np.cumsum(many) - many
        times = many[rack]
        at = order[
            np.repeat(first[rack], times)
            + np.arange(times.sum())
            - np.repeat(np.cumsum(times) - times, times)
        ]
        key = place[at] * (int(job.max()) + 1) + np.repeat(job, times)
        pair, inverse = np.unique(key, return_inverse=True)
        summed = np.bincount(inverse, np.repeat(count, times) * share[at])
        place = np.concatenate([place, pair // (int(job.max()) + 1)])
        group = np.concatenate([group, carried.n_rack + pair % (int(job.max()) + 1)])
        share = np.concatenate([share, summed])
    order = np.argsort(place, kind="stable")
    rows, start = np.unique(place[order], return_index=True)
    cuts = np.append(start, len(order)).astype(np.int32)
    return Budgets(cuts, group[order].astype(np.int32), share[order], limit_w[rows]), rows
