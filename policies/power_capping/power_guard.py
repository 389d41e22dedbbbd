"""power_guard: cuts GPU caps at once when a feeder is overloaded, and releases the cut slowly.

Three bands (domain.md E, after Facebook's Dynamo): above 99 % of a budget GPUs are cut to where it is at
95 %, or lower while its breaker is warm; in between nothing moves; below 90 % for a minute the cut is
released bit by bit, each feeder at a time of its own. Who waits least is cut first: GPUs without a job, then
by class. One reading justifies one cut: the next waits for a later reading, or a higher one, and no longer
counts on GPUs that did not obey. A cut counts on no more than is sure, and so is rather too deep: as soon as
readings know of it, it is eased in steps, to no more than what all GPUs at their caps would draw. Load
targets that run are budgets as well; a CDU or loop that lost its flow bounds the caps below it. It narrows
what power_cap, which looks ahead, may ask for.

The *depth* of a cut is one number, the class that waits least first. At depth 0 all may have their most; from
d to d + 1 the caps of class d fall from their most to their floors, and all classes below it stand at theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

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
from policies.power_capping.demand import CONTROL, Draws, classes, draws
from policies.power_capping.external_limits import targets_now
from policies.power_capping.loads import Loads, lifted, loads_of, unfed_feeders
from twin.catalogue import F64, I32, I64, NS, Bool, ContractError, clean, text
from twin.contracts import (
    PAGE,
    Columns,
    ExplainRequest,
    Explanation,
    KeyFigure,
    Memory,
    Proposal,
    Sentence,
    TableColumn,
    Topic,
    Value,
    View,
    finite,
    in_scope,
    mask_index,
    scope_of,
    table_of,
)
from twin.physics import CONTINUOUS_PU, step, theta_steady

CUT_PU, TARGET_PU, CALM_PU = 0.99, 0.95, 0.90  # domain.md E
WARM, WARM_TARGET_PU = 0.6, 0.90  # a breaker at this share of its trip is relieved further. source: estimate
CALM_S, SPREAD_S = 60.0, 30.0  # below CALM_PU before anything is released. source: estimate
RELEASE_S = 120.0  # in which one class is given back. source: estimate
# From a cut to a reading that knows of it: a cap loop of 2.5 s (domain.md G), and a building's system may
# report values of up to 3 s ago as if they were new. source: estimate
SETTLE_S = 5.0
RISEN_PU = 0.02  # of a budget, above what was cut for: that is cut as well, at once. source: estimate
# A cut is eased this long after it, by this share of what is left, at no more than so much of a class at once
# (a cap rises by 50 W a second at most, and has to be there before the next step). source: estimate
EASE_S, EASE_PU, EASE_CLASS_PU, EASE_LEAST_PU = 45.0, 0.6, 0.15, 0.005
FRESH_PU = 1.05  # of what nodes and a profile make of a load: so much it may be. source: estimate
DISOBEYS_PU = 0.05  # above its cap: it does not follow it. source: estimate
MOST_USE = 10.0  # times a budget; more is no worse
MOST_FEEDERS = 64  # that are named; the cuts below the others say so in one sentence
AIM_PU = 0.95  # of what is left: as a feeder that was overloaded. source: domain.md E
LOST_PU = 0.999  # of its capacity: a CDU or loop with less has lost some
STAYS_PU = 0.10  # of its range, by which a cap that flow bounds may rise before it is moved. source: estimate
MOST_COOLED = 64  # CDUs and loops that lost flow and are looked at in a tick, the worst first
_OF_CUT = ("deep_ns", "deep_w", "deep_limit_w", "deep_metered", "cut_ns")
_GOLDEN = 0.6180339887498949
CAP_COLUMNS = (
    TableColumn("gpus", "count"),
    TableColumn("cap_low_w", "W", "cap"),
    TableColumn("cap_high_w", "W", "to"),
)
BOUND_COLUMNS = (TableColumn("reason"), *CAP_COLUMNS)
FEEDER_COLUMNS = (
    TableColumn("feeder"),
    TableColumn("load_w", "W"),
    TableColumn("basis"),
    TableColumn("age_s", "s"),
    TableColumn("budget_w", "W"),
    TableColumn("use_pu", "1", "of budget"),
    TableColumn("breaker_pu", "1", "of breaker's trip"),
    TableColumn("depth", "1", detail=True),
    TableColumn("cut_s", "s", "last cut before"),
    TableColumn("calm_s", "s", "calm for"),
    *CAP_COLUMNS,
    TableColumn("lift", text="ends after"),
)


class PowerGuard:
    """Proposes upper bounds on the GPUs below feeders that are, or just were, overloaded."""

    name: ClassVar[str] = "power_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 50
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    # `depth`: classes that are at their floors; `deep_ns`, `deep_w`, `deep_limit_w`, `deep_metered`: when it
    # was last deepened, the load and the budget then, and 1 if a meter gave that load; `cut_ns`: when the cut
    # began; `eased_ns`: when it was last eased; `calm_ns`: since when the feeder was calm; `theta`: heat of
    # its breaker, 1 = it trips; `gone`: 1 = it fed nothing
    memory: ClassVar[Columns | None] = Columns(
        feeder={
            "depth": "f8",
            "deep_ns": "i8",
            "deep_w": "f8",
            "deep_limit_w": "f8",
            "deep_metered": "i8",
            "cut_ns": "i8",
            "eased_ns": "i8",
            "calm_ns": "i8",
            "theta": "f8",
            "seen_ns": "i8",
            "gone": "i8",
        },
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def __init__(self, high_priority: float = 1.0) -> None:
        """`high_priority`: from where a job, or a rack of the site file, is high."""
        if isinstance(high_priority, bool) or not -(2**31) <= high_priority < 2**31:
            raise ContractError(f"high_priority: expected a number of 32 bits, got {high_priority!r}")
        self.high_priority = int(high_priority)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Propose cuts for overloaded feeders until they are calm, and bounds where flow or sight is lost."""
        site = view.site
        if not site.sizes["gpu"]:
            return [], dict(memory)
        state = feeders_of(view)
        bounds = self._bounds(view, state)
        if not site.sizes["feeder"]:
            return bounds, dict(memory)
        carried, loads = state.carried, state.loads
        kept = self._remembered(view, memory, state)
        known_ns = _last_cut_ns(carried, kept["deep_ns"]) + round(SETTLE_S * NS)
        later = loads.read_ns > known_ns
        # Another feeder of racks went: what flows now is no longer what the last cut was for
        lost = bool((state.gone & (memory["gone"] == 0))[site.feeders_of_rack.member].any())
        kept["gone"] = state.gone.astype(np.int64)
        risen = lost | (loads.load_w > kept["deep_w"] + RISEN_PU * np.nan_to_num(state.budget_w))
        over = np.flatnonzero((state.use_pu > CUT_PU) & (later | (risen & (kept["depth"] > 0))))
        if not len(over) and not (kept["depth"] > 0).any():
            return bounds, kept
        cuts = _Cuts.of(view, state, kept, self.high_priority)
        for feeder in over.tolist():
            depth = cuts.deepened(feeder, bool(later[feeder]), lost)
            if depth > kept["depth"][feeder]:
                if not kept["depth"][feeder]:
                    kept["cut_ns"][feeder] = view.now_ns
                kept["deep_ns"][feeder], kept["deep_w"][feeder] = view.now_ns, loads.load_w[feeder]
                kept["deep_limit_w"][feeder] = state.budget_w[feeder]
                kept["deep_metered"][feeder] = loads.metered[feeder]
            kept["depth"][feeder] = depth
        for feeder in cuts.easing():
            if (enough := cuts.eased(feeder)) is not None:
                kept["depth"][feeder], kept["eased_ns"][feeder] = enough, view.now_ns
        return [*cuts.proposals(), *bounds], kept

    def _bounds(self, view: View, state: Feeders) -> list[Proposal]:
        """Return the bounds that need no memory: at CDUs and loops without flow, and at silent feeders."""
        bounds = cooled(view, state.carried, self.high_priority)
        if not view.site.sizes["feeder"]:
            return bounds
        blind = np.isfinite(state.budget_w) & ~state.dead
        return [*bounds, *unseen(view, state.carried, state.loads, blind)]

    def _remembered(self, view: View, memory: Memory, state: Feeders) -> Memory:
        """Update the memory of the feeders before any cut or release."""
        seen_ns = int(memory["seen_ns"].max())
        seen_s = (view.now_ns - seen_ns) / NS if seen_ns else 0.0
        # A feeder that was never watched is taken to have carried this load for ever
        theta = step(memory["theta"], state.rated_pu, seen_s) if seen_ns else theta_steady(state.rated_pu)
        calm_ns = np.where(memory["calm_ns"] > 0, memory["calm_ns"], view.now_ns)
        return dict(memory) | {
            "depth": _released(view, memory, state.use_pu, theta, seen_s),
            **{name: memory[name].copy() for name in (*_OF_CUT, "eased_ns")},
            "calm_ns": np.where(state.use_pu < CALM_PU, calm_ns, 0),
            "theta": np.minimum(theta, 1.0),
            "seen_ns": np.full(len(state.use_pu), view.now_ns),
        }

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """The feeders that are cut, near their budgets or warm: load, budget, depth, caps, release."""
        entity, inside = scope_of(view, request)
        state, site = feeders_of(view), view.site
        gpus = in_scope(inside, "gpu", np.arange(site.sizes["gpu"], dtype=np.int32))
        index, by, cap_w = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0)
        if len(gpus) and (memory["depth"] > 0).any():
            index, by, cap_w = _Cuts.of(view, state, memory, self.high_priority).caps()
            mine = np.isin(index, gpus)
            index, by, cap_w = index[mine], by[mine], cap_w[mine]
        watched = memory["depth"] > 0 if inside is None else np.isin(np.arange(len(state.use_pu)), by)
        watched |= np.isin(np.arange(len(watched)), in_scope(inside, "feeder", _near(state, memory)))
        rows = [
            _row(view, state, memory, feeder) | _cap_cells(cap_w[by == feeder])
            for feeder in np.flatnonzero(watched)[:MOST_FEEDERS].tolist()
        ]
        bounds: list[dict[str, Value]] = []
        for p in self._bounds(view, state) if len(gpus) else ():
            if len(kept := np.flatnonzero(np.isin(p.index, gpus))):
                bounds.append(_cap_cells(p.hi[kept]) | {"reason": clean(p.reason, 300)})
        cut = int((memory["depth"] > 0).sum())
        calm = f"calm: below {CALM_PU:.0%} of the budget, the breaker below {WARM:.0%} of its trip"
        text = f"{len(index):,} GPUs need a cap for {cut} of {len(state.use_pu)} feeders"
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=(Sentence(text), *(Sentence(str(row["reason"])) for row in bounds[:3]),
                       Sentence(calm, "note")),
            figures=(
                KeyFigure("capped_gpus", len(index), "count", "GPUs that need a cap for overloaded feeders"),
                KeyFigure("cut_feeders", cut, "count", "feeders whose overload has to be cut"),
            ),
            tables=(
                table_of("feeders", FEEDER_COLUMNS, rows, "feeders that are cut or near their budgets",
                         int(watched.sum())),
                table_of("bounds", BOUND_COLUMNS, bounds, "bounds where flow or readings are lost"),
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Feeders:
    """The feeders at one instant [n_feeder]: budgets in force, load over budget and over what is rated.

    `dead`: without power, by reports; `gone`: or by the supplies of the nodes below.
    """

    carried: Carried
    loads: Loads
    dead: Bool
    gone: Bool
    budget_w: F64
    use_pu: F64
    rated_pu: F64


def feeders_of(view: View) -> Feeders:
    """Loads of all feeders against their budgets."""
    dead = dead_feeders(view)
    # A feeder that is not known to be dead is watched as long as its own meter speaks
    gone = dead | unfed_feeders(view, dead)
    carried = carried_by(view, pairs_of(view.site, gone, failover=False))
    granted_w = view.budget_w()
    budget_w = np.fmin(granted_w, targets_now(view)[1])
    budget_w = np.where(np.isfinite(budget_w), budget_w, np.nan)
    loads = loads_of(view, carried)
    use_pu = np.where(dead, 0.0, _use(loads.load_w, budget_w))
    # The breaker is of the feeder, whatever is granted or asked for
    rated = np.where(dead, 0.0, _use(loads.load_w, np.fmax(view.site.budget_w, granted_w)))
    return Feeders(carried, loads, dead, gone, budget_w, use_pu, CONTINUOUS_PU * np.nan_to_num(rated))


def _use(load_w: F64, budget_w: F64) -> F64:
    """Return load over budget, at most MOST_USE; NaN without a budget. Any load exceeds a budget of 0."""
    some = np.divide(load_w, budget_w, out=np.full(len(load_w), np.nan), where=budget_w > 0)
    none = np.where((budget_w <= 0) & (load_w > 0), MOST_USE, np.nan)
    return np.minimum(np.where(budget_w > 0, some, none), MOST_USE)


def _last_cut_ns(carried: Carried, deep_ns: I64) -> I64:
    """Return the last cut of GPUs below each feeder, for its own or another feeder's sake [n_feeder]."""
    pairs, first = carried.pairs, carried.feeder(0)
    mine = (pairs.place >= first) & (pairs.place < first + len(deep_ns))
    feeder, rack = pairs.place[mine] - first, pairs.rack[mine]
    of_rack, out = np.zeros(carried.n_rack, np.int64), deep_ns.copy()
    np.maximum.at(of_rack, rack, deep_ns[feeder])
    np.maximum.at(out, feeder, of_rack[rack])
    return out


def _by_nodes_w(carried: Carried, loads: Loads, feeder: int) -> float:
    """Return a feeder's load by its racks' nodes, which report at once; by meters where none reports."""
    mine = carried.pairs.place == carried.feeder(feeder)
    racks = carried.pairs.rack[mine]
    share = lifted(carried.pairs.share[mine], loads.rack_w[racks], float(loads.load_w[feeder]))
    likely_w = loads.likely_w[racks]
    return float(share @ np.where(likely_w > 0, likely_w, loads.rack_w[racks]))


class Below(NamedTuple):
    """GPUs below one place [k]: which, watts at it for a watt of each, and their bounds."""

    at: I64
    share: F64
    floor_w: F64
    most_w: F64
    rank: F64


def below_of(
    view: View, carried: Carried, want: Draws, rank: F64, place: int, loads: Loads | None = None
) -> Below:
    """GPUs below a place; with `loads`, of a feeder.

    Where more flows than its racks should make, they draw more of their power here.
    """
    site = view.site
    mine = carried.pairs.place == place
    racks, share = carried.pairs.rack[mine], carried.pairs.share[mine]
    if loads is not None and loads.metered[place - carried.feeder(0)]:
        share = lifted(share, loads.rack_w[racks], float(loads.load_w[place - carried.feeder(0)]))
    start = site.gpu_start_of_node[site.node_start_of_rack]
    many = start[racks + 1] - start[racks]
    at = np.repeat(start[racks] - np.cumsum(many) + many, many) + np.arange(many.sum())
    return Below(at, np.repeat(share, many) * want.capped[at], want.floor_w[at], want.most_w[at], rank[at])


def caps_w(depth: F64 | float, rank: F64, floor_w: F64, most_w: F64) -> F64:
    """Return caps at a depth: classes below it are at their floors, the class at the depth in between."""
    return floor_w + np.clip(1.0 - (depth - rank), 0.0, 1.0) * (most_w - floor_w)


def caps_of(x: Below, depth: float) -> F64:
    """Caps of these GPUs at a depth [k]."""
    return caps_w(depth, x.rank, x.floor_w, x.most_w)


class _Moved(NamedTuple):
    """The power that GPUs may rise by, at depths between two: `fixed_w` of those whose caps are the same
    there, and (rank, share, floor, range, draw) of each class whose caps move."""

    fixed_w: float
    classes: list[tuple[float, F64, F64, F64, F64]]

    @classmethod
    def between(cls, x: Below, drawn_w: F64, low: float, high: float) -> _Moved:
        moves = (x.rank > low - 1.0) & (x.rank < high)
        at = np.flatnonzero(~moves)
        fixed = Below(x.at[at], x.share[at], x.floor_w[at], x.most_w[at], x.rank[at])
        fixed_w = float(fixed.share @ np.maximum(caps_of(fixed, high) - drawn_w[at], 0.0))
        found = []
        for rank in np.unique(x.rank[moves]).tolist():
            at = np.flatnonzero(x.rank == rank)
            floor_w = x.floor_w[at]
            found.append((rank, x.share[at], floor_w, x.most_w[at] - floor_w, drawn_w[at]))
        return cls(fixed_w, found)

    def raised_w(self, depth: float) -> float:
        """Watts by which all together may rise above what they draw, at this depth."""
        sum_w = self.fixed_w
        for rank, share, floor_w, range_w, drawn_w in self.classes:
            rise_w = min(max(1.0 - (depth - rank), 0.0), 1.0) * range_w
            rise_w += floor_w
            rise_w -= drawn_w
            sum_w += float(share @ np.maximum(rise_w, 0.0, out=rise_w))
        return sum_w


def deep_enough(x: Below, power_w: F64, goal_w: float, least: float) -> float:
    """The least depth, and at least `least`, at which GPUs that want `power_w` [k] draw at most `goal_w`."""

    def drawn_w(depth: float) -> float:
        return float(x.share @ np.minimum(power_w, caps_of(x, depth)))

    low, high = least, max(least, float(x.rank.max(initial=0.0)) + 1.0)  # no class is above the last one
    if drawn_w(low) <= goal_w:
        return low
    if drawn_w(high) > goal_w:
        return high
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if drawn_w(middle) > goal_w else (low, middle)
    return high


@dataclass(frozen=True)
class _Cuts:
    """The cuts of one tick: how deep each feeder has to be cut, and the caps that follow."""

    view: View
    state: Feeders
    kept: Memory
    want: Draws
    rank: F64

    @classmethod
    def of(cls, view: View, state: Feeders, kept: Memory, high_priority: int) -> _Cuts:
        return cls(view, state, kept, draws(view), classes(view, high_priority).astype(np.float64))

    @cached_property
    def aim_w(self) -> F64:
        """The load to which each feeder is cut [n_feeder]."""
        return np.where(self.kept["theta"] >= WARM, WARM_TARGET_PU, TARGET_PU) * self.state.budget_w

    @cached_property
    def _read_w(self) -> F64:
        return np.nan_to_num(self.view.believed("gpu.power_w").astype(np.float64))

    @cached_property
    def _now_w(self) -> F64:
        return np.minimum(self._read_w, self.want.most_w)

    @cached_property
    def _obeys(self) -> Bool:
        """Return the reporting GPUs that are not above their commanded cap."""
        cap_w = self.view.commanded(CONTROL)
        over = self._now_w > (1.0 + DISOBEYS_PU) * np.where(np.isfinite(cap_w), cap_w, np.inf)
        return ~over & self.state.loads.gpu_reporting

    @cached_property
    def _lapsed_w(self) -> F64:
        """Return the power of a silent GPU after its lease lapses."""
        view, cap_w = self.view, self.view.commanded(CONTROL)
        settled = view.readback(CONTROL) <= (1.0 + DISOBEYS_PU) * cap_w
        return np.where(settled, np.fmax(cap_w, view.envelope(CONTROL).safe), np.inf)

    @cached_property
    def _rest_w(self) -> F64:
        """The power that no cap moves, by place."""
        beside_w = other_w(self.view, self.want.power_w, gain=1.0)
        return sums_w(self.state.carried, np.nan_to_num(beside_w))

    def _below(self, feeder: int) -> Below:
        carried = self.state.carried
        place = carried.feeder(feeder)
        return below_of(self.view, carried, self.want, self.rank, place, self.state.loads)

    def deepened(self, feeder: int, later: bool, lost: bool) -> float:
        """The depth that a feeder above its budget needs.

        `later`: its reading knows of the last cut; else only the rise since is cut now. `lost`: another
        feeder went. Then all of the known excess is cut at once, but for what GPUs above their caps will
        save.
        """
        loads, kept, below = self.state.loads, self.kept, self._below(feeder)
        least, load_w = float(kept["depth"][feeder]), float(loads.load_w[feeder])
        if loads.metered[feeder]:
            # The reading says how much has to go; a cut saves the power of the GPUs themselves, no more
            power_w, excess_w = self._now_w[below.at], load_w - float(self.aim_w[feeder])
            if not later:
                power_w = np.minimum(power_w, caps_of(below, least))
                saved_w = float(below.share @ (self._now_w[below.at] - power_w))
                if lost:
                    load_w = min(load_w, FRESH_PU * _by_nodes_w(self.state.carried, loads, feeder))
                    excess_w = load_w - float(self.aim_w[feeder]) - saved_w
                else:
                    excess_w = load_w - float(kept["deep_w"][feeder])
            elif least > 0:
                below = below._replace(share=below.share * self._obeys[below.at])
            goal_w = float(below.share @ power_w) - excess_w
        else:  # no meter shows what flows: their caps have to vouch for it
            power_w, known = self.want.power_w[below.at], loads.gpu_reporting[below.at]
            goal_w = float(self.aim_w[feeder] - self._rest_w[self.state.carried.feeder(feeder)])
            if known.any():  # those that are silent may receive nothing either, and fall to their safe caps
                goal_w -= float((below.share * ~known) @ np.fmin(power_w, self._lapsed_w[below.at]))
                below = below._replace(share=below.share * known)
        return deep_enough(below, power_w, goal_w, least)

    def easing(self) -> list[int]:
        """Feeders that were cut recently and are below their aim, by a reading after the last step."""
        kept, loads, now_ns = self.kept, self.state.loads, self.view.now_ns
        moved_ns = np.maximum(kept["deep_ns"], kept["eased_ns"])
        ripe = loads.metered & (kept["depth"] > 0) & (loads.load_w < self.aim_w)
        ripe &= now_ns - kept["deep_ns"] <= round(EASE_S * NS)
        ripe &= loads.read_ns > _last_cut_ns(self.state.carried, moved_ns) + round(SETTLE_S * NS)
        return np.flatnonzero(ripe).tolist()

    def eased(self, feeder: int) -> float | None:
        """Return the sufficient depth for a feeder; None if there is nothing to release.

        What stands below its cap counts as if it rose to it at once; what does not report, from nothing.
        """
        below, loads, aim_w = self._below(feeder), self.state.loads, float(self.aim_w[feeder])
        gain = gain_of(self.view.site)[self.view.site.rack_of_gpu[below.at]]
        below = below._replace(share=below.share * gain)
        depth = float(self.kept["depth"][feeder])
        drawn_w = np.where(loads.gpu_reporting[below.at], self._read_w[below.at], 0.0)
        room_w = float(below.share @ np.maximum(caps_of(below, depth) - drawn_w, 0.0))
        spare_w = aim_w - float(loads.load_w[feeder]) - room_w
        if spare_w <= EASE_LEAST_PU * aim_w:
            return None
        low, high = max(depth - EASE_CLASS_PU, 0.0), depth
        goal_w = room_w + EASE_PU * spare_w
        moved = _Moved.between(below, drawn_w, low, high)
        while high - low > 1e-4:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if moved.raised_w(middle) > goal_w else (low, middle)
        return high

    def caps(self) -> tuple[I32, I64, F64]:
        """(GPUs that are capped, the feeder that is cut deepest above each, cap) [k]."""
        site, carried, depth = self.view.site, self.state.carried, self.kept["depth"]
        pairs, want, first = carried.pairs, self.want, carried.feeder(0)
        of_place = np.zeros(len(carried.limit_w))
        of_place[first : first + len(depth)] = depth
        cut = np.flatnonzero(of_place[pairs.place] > 0)
        # By rack, the deepest last
        cut = cut[np.lexsort((of_place[pairs.place[cut]], pairs.rack[cut]))]
        last = np.append(np.diff(pairs.rack[cut]) != 0, True)[: len(cut)]
        deepest, by = np.zeros(site.sizes["rack"]), np.full(site.sizes["rack"], -1)
        deepest[pairs.rack[cut[last]]] = of_place[pairs.place[cut[last]]]
        by[pairs.rack[cut[last]]] = pairs.place[cut[last]] - first
        cap_w = caps_w(deepest[site.rack_of_gpu], self.rank, want.floor_w, want.most_w)
        # Where nothing is cut, rounding alone may put a cap below its maximum
        index = mask_index(want.capped & (deepest > 0)[site.rack_of_gpu] & (cap_w < want.most_w))
        return index, by[site.rack_of_gpu[index]], cap_w[index]

    def proposals(self) -> list[Proposal]:
        """The deepest cut of all feeders above each GPU."""
        view, (capped, by, cap_w) = self.view, self.caps()
        out: list[Proposal] = []
        if not len(capped):
            return out
        commanded = np.isfinite(view.commanded(CONTROL)[capped])
        for feeder, mine in _by_feeder(by):
            index, hi_w = capped[mine], cap_w[mine]
            # A GPU that was cut follows the release; one that stands lower by another's setting is left there
            wish_w = np.where(commanded[mine], hi_w, np.nan)
            out.append(Proposal(CONTROL, index, self.want.floor_w[index], hi_w, wish_w, self._why(feeder)))
        return out

    def _why(self, feeder: int) -> str:
        """Return the reason of a feeder's cut; its figures are of the latest deepening, so they stay."""
        what = f"is or was beyond {100 * CUT_PU:.0f} % of its budget"
        if feeder < 0:
            return f"one of many feeders {what}: `racktwin policy explain power_guard` lists them"
        deep_ns, load_w, limit_w, metered, cut_ns = (self.kept[name][feeder] for name in _OF_CUT)
        said = f"{self.view.site.name('feeder', feeder)} {what}"
        if not cut_ns:  # in the memory of an earlier version
            return said
        load = f"{text.quantity(load_w, 'W')} {'measured' if metered else 'in the worst case'}"
        at, since = (text.utc(int(t_ns), "%H:%M:%S") for t_ns in (deep_ns, cut_ns))
        return f"{said}: {load} at {at} UTC, limit {text.quantity(limit_w, 'W')}; cut since {since} UTC"


def _by_feeder(by: I64) -> list[tuple[int, I64 | slice]]:
    """Return the named feeders among `by` [k], and -1 for all others, each with its places in `by`."""
    if (by == by[0]).all():  # one feeder above all, as a rule
        return [(int(by[0]), slice(None))]
    named = np.flatnonzero(np.bincount(by))[:MOST_FEEDERS]
    place = np.full(int(by.max()) + 1, len(named), np.int16)
    place[named] = np.arange(len(named))
    order = np.argsort(place[by], kind="stable")
    cuts = np.cumsum(np.bincount(place[by], minlength=len(named) + 1))[:-1]
    parts = zip([*named.tolist(), -1], np.split(order, cuts), strict=True)
    return [(feeder, mine) for feeder, mine in parts if len(mine)]


def _wait_s(n: int) -> F64:
    """Seconds for which each feeder stays calm before its cut is released [n_feeder]."""
    phase = (np.arange(n, dtype=np.float64) * _GOLDEN) % 1.0
    return CALM_S + SPREAD_S * phase


def _released(view: View, memory: Memory, use: F64, theta: F64, seen_s: float) -> F64:
    """Return the depth of each feeder's cut after its release so far [n_feeder]."""
    depth = memory["depth"]
    calm_s = (view.now_ns - memory["calm_ns"]) / NS
    calm = (memory["calm_ns"] > 0) & (calm_s >= _wait_s(len(depth))) & (use < CALM_PU)
    calm &= theta < WARM
    return np.where(calm, np.maximum(depth - seen_s / RELEASE_S, 0.0), depth)


def _near(state: Feeders, memory: Memory) -> I32:
    """Feeders beyond the calm band, or with a warm breaker."""
    return mask_index((state.use_pu >= CALM_PU) | (memory["theta"] >= WARM))


def _row(view: View, state: Feeders, memory: Memory, feeder: int) -> dict[str, Value]:
    """A feeder with its load, its budget and its cut."""
    loads, depth = state.loads, float(memory["depth"][feeder])
    deep_ns, calm_ns = int(memory["deep_ns"][feeder]), int(memory["calm_ns"][feeder])
    metered = bool(loads.metered[feeder])
    wait_s = float(_wait_s(len(state.use_pu))[feeder])
    calm_s = (view.now_ns - calm_ns) / NS if calm_ns else 0.0
    lift = ""
    if depth > 0:
        released = calm_s >= wait_s and memory["theta"][feeder] < WARM
        lift = f"released, a class in {RELEASE_S:.0f} s" if released else f"{wait_s:.0f} s calm"
    return {
        "feeder": view.site.name("feeder", feeder),
        "load_w": finite(loads.load_w[feeder]),
        "basis": "measured" if metered else "worst case",
        "age_s": (view.now_ns - int(loads.read_ns[feeder])) / NS if metered else None,
        "budget_w": finite(state.budget_w[feeder]),
        "use_pu": finite(state.use_pu[feeder]),
        "breaker_pu": float(memory["theta"][feeder]),
        "depth": depth,
        "cut_s": (view.now_ns - deep_ns) / NS if depth > 0 and deep_ns else None,
        "calm_s": calm_s if calm_ns else None,
        "lift": lift,
    }


def _cap_cells(cap_w: F64) -> dict[str, Value]:
    """The cells on a group of caps."""
    low_w, high_w = (float(cap_w.min()), float(cap_w.max())) if len(cap_w) else (None, None)
    return {"gpus": len(cap_w), "cap_low_w": low_w, "cap_high_w": high_w}


def unseen(view: View, carried: Carried, loads: Loads, bound: Bool) -> list[Proposal]:
    """Return safe caps for silent GPUs below feeders without any reading of their load.

    `bound` [n_feeder]: those that have a budget. A rack that never reported asks for nothing.
    """
    site, pairs = view.site, carried.pairs
    blind = np.zeros(len(carried.limit_w), np.bool_)
    first = carried.feeder(0)
    blind[first : first + len(bound)] = bound & ~loads.metered & np.isfinite(loads.load_w)
    if not blind.any():
        return []
    below = np.zeros(carried.n_rack, np.bool_)
    below[pairs.rack[blind[pairs.place]]] = True
    envelope = view.envelope(CONTROL)
    silent = ~loads.gpu_reporting & np.isfinite(view.believed("gpu.power_w"))
    index = mask_index(below[site.rack_of_gpu] & silent & np.isfinite(envelope.low))
    if not len(index):
        return []
    safe_w, commanded_w = envelope.safe[index], view.commanded(CONTROL)[index]
    # A GPU that stands lower is left there
    want_w = np.where(commanded_w <= safe_w, np.nan, safe_w)
    why = "neither these GPUs nor the feeders above them reported for three periods: safe caps"
    return [Proposal(CONTROL, index, envelope.low[index], safe_w.copy(), want_w, why)]


def cooled(view: View, carried: Carried, high_priority: int) -> list[Proposal]:
    """Return bounds for GPUs below CDUs and loops with less flow, so that their heat is still removed.

    Without a memory, as `unseen`: where flow or readings are back, nothing is bounded any more. A cap stays
    where it is until it may rise by a tenth of its range.
    """
    site, design = view.site, view.site.design
    whole_w = np.concatenate([design.cdu_heat_w, design.loop_heat_w])
    first = carried.n_rack + carried.n_feeder
    left_w = carried.limit_w[first : first + len(whole_w)]
    short = np.flatnonzero(np.isfinite(left_w) & (left_w < LOST_PU * whole_w))
    out: list[Proposal] = []
    if not len(short):
        return out
    want = draws(view)
    rank = classes(view, high_priority).astype(np.float64)
    # Losses that a cut saves on the way to GPUs come on top: they count when they are read
    fixed_w = sums_w(carried, np.nan_to_num(other_w(view, want.power_w, gain=1.0)))
    commanded_w = view.commanded(CONTROL)
    for at in short[np.argsort(left_w[short] / whole_w[short], kind="stable")][:MOST_COOLED].tolist():
        below = below_of(view, carried, want, rank, first + at)
        goal_w = AIM_PU * float(left_w[at]) - float(fixed_w[first + at])
        cap_w = caps_of(below, deep_enough(below, below.most_w, goal_w, 0.0))
        bounded = (below.share > 0) & (cap_w < below.most_w)
        order = np.argsort(below.at[bounded], kind="stable")
        index, cap_w = below.at[bounded][order].astype(np.int32), cap_w[bounded][order]
        if not len(index):
            continue
        stays = commanded_w[index] >= cap_w - STAYS_PU * (want.most_w - want.floor_w)[index]
        wished_w = np.where(stays, np.nan, cap_w)
        why = f"{carried.name(site, first + at)} has {100 * left_w[at] / whole_w[at]:.0f} % of its flow"
        out.append(Proposal(CONTROL, index, want.floor_w[index], cap_w, wished_w, why))
    return out
