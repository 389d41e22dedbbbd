"""power_guard: cuts at once what overloads a feeder, and gives back slowly.

Three bands (domain.md E, after Facebook's Dynamo): above 99 % of a budget GPUs are cut to where it is at
95 %, or lower while its breaker is warm; in between nothing moves; below 90 % for a minute the cut is
released bit by bit, each feeder at a time of its own. Who waits least is cut first: GPUs without a job, then
by class. One reading justifies one cut: the next waits for a later reading, or a higher one, and no longer
counts on GPUs that did not obey. A cut counts on no more than is sure, and so is rather too deep: as soon as
readings know of it, it is eased in steps, to no more than what all GPUs at their caps would draw. Load
targets that run are budgets as well; a CDU or loop that lost its flow bounds the caps below it. It narrows
what power_cap, which looks ahead, may ask for.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from policies.power_capping.budgets import (
    Carried,
    carried_by,
    dead_feeders,
    gain_of,
    other_w,
    pairs_of,
    sums_w,
)
from policies.power_capping.demand import CONTROL, Wants, classes, wants
from policies.power_capping.depth import below_of, caps_of, caps_w, deep_enough
from policies.power_capping.external_limits import targets_now
from policies.power_capping.loads import Loads, lifted, loads_of, unfed_feeders
from policies.power_capping.lost_sight import cooled, unseen
from twin.catalogue import F64, I64, NS, Bool, ContractError
from twin.contracts import Columns, Memory, Proposal, View, mask_index
from twin.physics import CONTINUOUS_PU, step, theta_steady

CUT_PU, TARGET_PU, CALM_PU = 0.99, 0.95, 0.90  # domain.md E
WARM, WARM_TARGET_PU = 0.6, 0.90  # a breaker at this share of its trip is relieved further. source: estimate
CALM_S, SPREAD_S = 60.0, 30.0  # below CALM_PU before anything is released. source: estimate
RELEASE_S = 120.0  # in which one class is given back. source: estimate
# From a cut to a reading that knows of it: a cap loop of 2.5 s (domain.md G), and a building's system may
# tell values of up to 3 s ago as if they were new. source: estimate
SETTLE_S = 5.0
RISEN_PU = 0.02  # of a budget, above what was cut for: that is cut as well, at once. source: estimate
# A cut is eased this long after it, by this share of what is left, at no more than so much of a class at once
# (a cap rises by 50 W a second at most, and has to be there before the next step). source: estimate
EASE_S, EASE_PU, EASE_CLASS_PU, EASE_LEAST_PU = 45.0, 0.6, 0.15, 0.005
FRESH_PU = 1.05  # of what nodes and a profile make of a load: so much it may be. source: estimate
DISOBEYS_PU = 0.05  # above its cap: it does not follow it. source: estimate
MOST_USE = 10.0  # times a budget; more is no worse
MOST_FEEDERS = 64  # that are named; the cuts below the others say so in one sentence
_GOLDEN = 0.6180339887498949


class PowerGuard:
    """Proposes upper bounds on the GPUs below feeders that are, or just were, overloaded."""

    name: ClassVar[str] = "power_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 50
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    # `depth`: classes that are at their floors; `deep_ns`, `deep_w`: when it was last deepened, and the load
    # then; `eased_ns`: when it was last eased; `calm_ns`: since when the feeder was calm; `theta`: heat of
    # its breaker, 1 = it trips; `gone`: 1 = it fed nothing
    memory: ClassVar[Columns | None] = Columns(
        feeder={
            "depth": "f8",
            "deep_ns": "i8",
            "deep_w": "f8",
            "eased_ns": "i8",
            "calm_ns": "i8",
            "theta": "f8",
            "seen_ns": "i8",
            "gone": "i8",
        },
    )

    def __init__(self, high_priority: float = 1.0) -> None:
        """`high_priority`: from where a job, or a rack of the site file, is high."""
        if isinstance(high_priority, bool) or not -(2**31) <= high_priority < 2**31:
            raise ContractError(f"high_priority: expected a number of 32 bits, got {high_priority!r}")
        self.high_priority = int(high_priority)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Cuts for overloaded feeders, held until they are calm again; bounds where flow or sight is lost."""
        site = view.site
        if not site.sizes["gpu"]:
            return [], dict(memory)
        dead = dead_feeders(view)
        # Who is not known to be dead is watched as long as its own meter speaks
        gone = dead | unfed_feeders(view, dead)
        carried = carried_by(view, pairs_of(site, gone, failover=False))
        granted_w = view.budget_w()
        budget_w = np.fmin(granted_w, targets_now(view)[1])
        budget_w = np.where(np.isfinite(budget_w), budget_w, np.nan)
        loads = loads_of(view, carried)
        spoken = cooled(view, carried, self.high_priority)
        if not site.sizes["feeder"]:
            return spoken, dict(memory)
        spoken += unseen(view, carried, loads, np.isfinite(budget_w) & ~dead)
        use = np.where(dead, 0.0, _use(loads.load_w, budget_w))
        # The breaker is of the feeder, whatever is granted or asked for
        rated = np.where(dead, 0.0, _use(loads.load_w, np.fmax(site.budget_w, granted_w)))
        kept = self._remembered(view, memory, use, CONTINUOUS_PU * np.nan_to_num(rated))
        known_ns = _last_cut_ns(carried, kept["deep_ns"]) + round(SETTLE_S * NS)
        later = loads.read_ns > known_ns
        # Another feeder of racks went: what flows now is no longer what the last cut was for
        anew = bool((gone & (memory["gone"] == 0))[site.feeders_of_rack.member].any())
        kept["gone"] = gone.astype(np.int64)
        risen = anew | (loads.load_w > kept["deep_w"] + RISEN_PU * np.nan_to_num(budget_w))
        over = np.flatnonzero((use > CUT_PU) & (later | (risen & (kept["depth"] > 0))))
        if not len(over) and not (kept["depth"] > 0).any():
            return spoken, kept
        want = wants(view, np.zeros(site.sizes["gpu"]), 0.0)
        rank = classes(view, self.high_priority).astype(np.float64)
        aim_w = np.where(kept["theta"] >= WARM, WARM_TARGET_PU, TARGET_PU) * budget_w
        for feeder, depth in _cuts(view, carried, want, rank, loads, aim_w, kept, over, later, anew):
            if depth > kept["depth"][feeder]:
                kept["deep_ns"][feeder], kept["deep_w"][feeder] = view.now_ns, loads.load_w[feeder]
            kept["depth"][feeder] = depth
        for feeder, depth in _eased(view, carried, want, rank, loads, aim_w, kept):
            kept["depth"][feeder], kept["eased_ns"][feeder] = depth, view.now_ns
        return [*_proposals(view, carried, kept["depth"], want, rank), *spoken], kept

    def _remembered(self, view: View, memory: Memory, use: F64, rated_pu: F64) -> Memory:
        """Update the memory of feeders at `use` of their budgets, before anything is cut or eased."""
        seen_ns = int(memory["seen_ns"].max())
        seen_s = (view.now_ns - seen_ns) / NS if seen_ns else 0.0
        # Whoever was not looked at is taken to have stood like this for ever
        theta = step(memory["theta"], rated_pu, seen_s) if seen_ns else theta_steady(rated_pu)
        calm_ns = np.where(memory["calm_ns"] > 0, memory["calm_ns"], view.now_ns)
        return dict(memory) | {
            "depth": _released(view, memory, use, theta, seen_s),
            "deep_ns": memory["deep_ns"].copy(),
            "deep_w": memory["deep_w"].copy(),
            "eased_ns": memory["eased_ns"].copy(),
            "calm_ns": np.where(use < CALM_PU, calm_ns, 0),
            "theta": np.minimum(theta, 1.0),
            "seen_ns": np.full(len(use), view.now_ns),
        }


def _use(load_w: F64, budget_w: F64) -> F64:
    """Load over budget, to MOST_USE; NaN where there is no budget. Any load is too much for a budget of 0."""
    some = np.divide(load_w, budget_w, out=np.full(len(load_w), np.nan), where=budget_w > 0)
    none = np.where((budget_w <= 0) & (load_w > 0), MOST_USE, np.nan)
    return np.minimum(np.where(budget_w > 0, some, none), MOST_USE)


def _last_cut_ns(carried: Carried, deep_ns: I64) -> I64:
    """When GPUs below each feeder were last cut, for its sake or another one's above them [n_feeder]."""
    pairs, first = carried.pairs, carried.feeder(0)
    mine = (pairs.place >= first) & (pairs.place < first + len(deep_ns))
    feeder, rack = pairs.place[mine] - first, pairs.rack[mine]
    of_rack, out = np.zeros(carried.n_rack, np.int64), deep_ns.copy()
    np.maximum.at(of_rack, rack, deep_ns[feeder])
    np.maximum.at(out, feeder, of_rack[rack])
    return out


def _cuts(
    view: View,
    carried: Carried,
    want: Wants,
    rank: F64,
    loads: Loads,
    aim_w: F64,
    kept: Memory,
    over: I64,
    later: Bool,
    anew: bool,
) -> list[tuple[int, float]]:
    """(feeder, how deep its cut has to be) of those that are over their budgets.

    `later` [n_feeder]: their readings know of the last cut; else only what they rose by since is cut now.
    `anew`: a feeder went. Then all that is too much by what is known at once is cut, but for what GPUs above
    their caps will save.
    """
    if not len(over):
        return []
    now_w = np.minimum(np.nan_to_num(view.value("gpu.power_w").astype(np.float64)), want.most_w)
    cap_w = view.commanded(CONTROL)
    # A GPU that is not under its cap by now does not listen
    obeys = ~(now_w > (1.0 + DISOBEYS_PU) * np.where(np.isfinite(cap_w), cap_w, np.inf)) & loads.gpu_heard
    rest_w = sums_w(carried, np.nan_to_num(other_w(view, want.power_w, gain=1.0)))
    settled = view.readback(CONTROL) <= (1.0 + DISOBEYS_PU) * cap_w
    lapsed_w = np.where(settled, np.fmax(cap_w, view.envelope(CONTROL).safe), np.inf)
    out = []
    for feeder in over.tolist():
        below = below_of(view, carried, want, rank, carried.feeder(feeder), loads)
        least, load_w = float(kept["depth"][feeder]), float(loads.load_w[feeder])
        if loads.metered[feeder]:
            # What is read says how much has to go; a cut saves what the GPUs themselves draw, no more
            power_w, excess_w = now_w[below.at], load_w - float(aim_w[feeder])
            if not later[feeder]:
                power_w = np.minimum(power_w, caps_of(below, least))
                saved_w = float(below.share @ (now_w[below.at] - power_w))
                if anew:
                    load_w = min(load_w, FRESH_PU * _by_nodes_w(carried, loads, feeder))
                    excess_w = load_w - float(aim_w[feeder]) - saved_w
                else:
                    excess_w = load_w - float(kept["deep_w"][feeder])
            elif least > 0:
                below = below._replace(share=below.share * obeys[below.at])
            goal_w = float(below.share @ power_w) - excess_w
        else:  # nobody tells what flows: their caps have to vouch for it
            power_w, heard = want.power_w[below.at], loads.gpu_heard[below.at]
            goal_w = float(aim_w[feeder] - rest_w[carried.feeder(feeder)])
            if heard.any():  # those that are silent may hear nothing either, and fall to their safe caps
                goal_w -= float((below.share * ~heard) @ np.fmin(power_w, lapsed_w[below.at]))
                below = below._replace(share=below.share * heard)
        out.append((feeder, deep_enough(below, power_w, goal_w, least)))
    return out


def _by_nodes_w(carried: Carried, loads: Loads, feeder: int) -> float:
    """Return a feeder's load by its racks' nodes, which report at once; by meters where none reports."""
    mine = carried.pairs.place == carried.feeder(feeder)
    racks = carried.pairs.rack[mine]
    share = lifted(carried.pairs.share[mine], loads.rack_w[racks], float(loads.load_w[feeder]))
    likely_w = loads.likely_w[racks]
    return float(share @ np.where(likely_w > 0, likely_w, loads.rack_w[racks]))


def _eased(
    view: View, carried: Carried, want: Wants, rank: F64, loads: Loads, aim_w: F64, kept: Memory
) -> list[tuple[int, float]]:
    """(feeder, how deep is enough) of those that were just cut, and deeper than they had to be.

    A step needs a reading that knows of the last one. Whatever stands below its cap counts as if it rose to
    it at once; what is not heard, from nothing.
    """
    moved_ns = np.maximum(kept["deep_ns"], kept["eased_ns"])
    ripe = loads.metered & (kept["depth"] > 0) & (loads.load_w < aim_w)
    ripe &= view.now_ns - kept["deep_ns"] <= round(EASE_S * NS)
    ripe &= loads.read_ns > _last_cut_ns(carried, moved_ns) + round(SETTLE_S * NS)
    out: list[tuple[int, float]] = []
    if not ripe.any():
        return out
    now_w = np.where(loads.gpu_heard, np.nan_to_num(view.value("gpu.power_w").astype(np.float64)), 0.0)
    gain = gain_of(view.site)[view.site.rack_of_gpu]
    for feeder in np.flatnonzero(ripe).tolist():
        below = below_of(view, carried, want, rank, carried.feeder(feeder), loads)
        below = below._replace(share=below.share * gain[below.at])
        depth, drawn_w = float(kept["depth"][feeder]), now_w[below.at]
        room_w = float(below.share @ np.maximum(caps_of(below, depth) - drawn_w, 0.0))
        spare_w = float(aim_w[feeder] - loads.load_w[feeder]) - room_w
        if spare_w <= EASE_LEAST_PU * float(aim_w[feeder]):
            continue
        low, high = max(depth - EASE_CLASS_PU, 0.0), depth
        goal_w = room_w + EASE_PU * spare_w
        while high - low > 1e-4:
            middle = 0.5 * (low + high)
            raised_w = float(below.share @ np.maximum(caps_of(below, middle) - drawn_w, 0.0))
            low, high = (middle, high) if raised_w > goal_w else (low, middle)
        out.append((feeder, high))
    return out


def _proposals(view: View, carried: Carried, depth: F64, want: Wants, rank: F64) -> list[Proposal]:
    """The deepest cut of all feeders above each GPU."""
    site, pairs = view.site, carried.pairs
    of_place = np.zeros(len(carried.limit_w))
    of_place[carried.feeder(0) : carried.feeder(0) + len(depth)] = depth
    cut = np.flatnonzero(of_place[pairs.place] > 0)
    # By rack, the deepest last
    cut = cut[np.lexsort((of_place[pairs.place[cut]], pairs.rack[cut]))]
    last = np.append(np.diff(pairs.rack[cut]) != 0, True)[: len(cut)]
    deepest, by = np.zeros(site.sizes["rack"]), np.full(site.sizes["rack"], -1)
    deepest[pairs.rack[cut[last]]] = of_place[pairs.place[cut[last]]]
    by[pairs.rack[cut[last]]] = pairs.place[cut[last]] - carried.feeder(0)
    cap_w = caps_w(deepest[site.rack_of_gpu], rank, want.floor_w, want.most_w)
    held: Bool = want.capped & (cap_w < want.most_w)
    by_gpu = by[site.rack_of_gpu]
    named, commanded_w = np.unique(by_gpu[held])[:MOST_FEEDERS].tolist(), view.commanded(CONTROL)
    out = []
    for feeder in [*named, -1]:
        index = mask_index(held & (by_gpu == feeder if feeder >= 0 else ~np.isin(by_gpu, named)))
        if not len(index):
            continue
        who = site.name("feeder", feeder) if feeder >= 0 else "one of many feeders"
        why = f"{who} is or was beyond {100 * CUT_PU:.0f} % of its budget"
        # What was cut follows the release; what stands lower of its own is left there
        wished_w = np.where(np.isfinite(commanded_w[index]), cap_w[index], np.nan)
        out.append(Proposal(CONTROL, index, want.floor_w[index], cap_w[index], wished_w, why))
    return out


def _released(view: View, memory: Memory, use: F64, theta: F64, seen_s: float) -> F64:
    """Return the depth of each feeder's cut after its release so far [n_feeder]."""
    depth = memory["depth"]
    wait_s = CALM_S + SPREAD_S * ((np.arange(len(depth)) * _GOLDEN) % 1.0)
    calm = (memory["calm_ns"] > 0) & ((view.now_ns - memory["calm_ns"]) / NS >= wait_s) & (use < CALM_PU)
    calm &= theta < WARM
    return np.where(calm, np.maximum(depth - seen_s / RELEASE_S, 0.0), depth)
