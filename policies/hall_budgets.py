"""hall_budgets: the budgets that a fleet lends to its halls under the feeders that they share.

Each hall has its guaranteed share at least. What is left goes first to what halls are about to want, then up
to their most, the higher priority first. With `failover` each side of a redundant supply carries all of a
hall that both sides feed, so that the loss of one leaves the other inside its budget.

People narrow a budget by a request for at most so much: what a hall may then not have is lent to others.

A budget that is lowered counts as before until the hall tells that it holds the lower one and draws no more,
or until the grant has run out. Only what is then left is lent to others: on the way from one split to the
next the sum of all that halls may draw does not exceed a feeder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from policies.power_capping import (
    Carried,
    Devices,
    allocate,
    budgets_of,
    carried_by,
    dead_feeders,
    pairs_of,
    sums_w,
)
from twin.catalogue import F64, I32, I64, NS, Bool, ContractError, find_control
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
    scope_of,
    table_of,
)
from twin.site import HALL_BUDGET as CONTROL, Site
from twin.telemetry import GOOD

# A grant is in force by the hall's clock: so much later than by ours, and on its way. source: estimate
SKEW_S = 3.0
# Where the daemon of a hall died, caps stay for their lease; so long takes the fall then. source: estimate
SETTLE_S = 5.0
SLIP_S = 0.005  # of an age in float32, and of rounding to its quantum
ROOM_W = 1.0  # of rounding
STILL_W = 1000.0  # beyond its budget, that is worth a word of what a hall may still hold. source: estimate
REASONS = ("lowered: others need it, or a feeder carries less", "raised: there is room for it", "as it was")
# What a summary counts, as it is told
COUNTS = ("gpu_count", "gpu_out_count", "alarm_critical_count", "alarm_warning_count", "alarm_info_count")
COLUMNS = (
    TableColumn("hall"),
    TableColumn("priority", "count"),
    TableColumn("power_w", "W"),
    TableColumn("demand_w", "W", "wants"),
    TableColumn("budget_w", "W"),
    TableColumn("held_w", "W", "may hold"),
    TableColumn("guaranteed_w", "W"),
    TableColumn("most_w", "W", "at most"),
    TableColumn("age_s", "s", "heard before"),
    TableColumn("full", text="held back by"),
    TableColumn("why", text="because"),
    TableColumn("asked_w", "W", "people ask for at most"),
    *(TableColumn(key, detail=True) for key in ("heard", "floor_w", "heard_pu", *COUNTS)),
)
FEEDER_COLUMNS = (
    TableColumn("feeder"),
    TableColumn("side"),
    TableColumn("lost"),
    TableColumn("budget_w", "W", "may carry"),
    TableColumn("power_w", "W", "meter"),
    TableColumn("held_w", "W", "halls may hold"),
    TableColumn("other_w", "W", "kept free, and loads of others"),
    TableColumn("left_w", "W", "left"),
)
PART_COLUMNS = (
    TableColumn("feeder"),
    TableColumn("hall"),
    TableColumn("part_w", "W", "holds"),
    TableColumn("guaranteed_w", "W", "of it guaranteed"),
    TableColumn("why", text="because"),
)


class HallBudgets:
    """Proposes a budget for each hall of a fleet."""

    name: ClassVar[str] = "hall_budgets"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 5  # before the operator: people narrow a budget, and do not overload a feeder
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    # `budget_w`: in force by our leases when last seen, and since when; `held_w`: what the hall may hold by
    # an earlier one, and until when
    memory: ClassVar[Columns | None] = Columns(
        rack={"budget_w": "f8", "since_ns": "i8", "held_w": "f8", "held_ns": "i8"},
        scalars={"seen_ns": "i8"},
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def __init__(self, failover: bool = True, margin_pu: float = 0.0, silent_s: float = 15.0) -> None:
        """`failover`: keep the loss of one side inside the budgets; `margin_pu` of each budget stays free;
        a hall that is silent for `silent_s` is lent nothing beyond its guaranteed share."""
        if not isinstance(failover, bool):
            raise ContractError(f"failover: expected true or false, got {failover!r}")
        for key, value, most in (("margin_pu", margin_pu, 0.5), ("silent_s", silent_s, 3600.0)):
            if isinstance(value, bool) or not 0.0 <= value <= most:
                raise ContractError(f"{key}: expected 0 to {most:g}, got {value!r}")
        self.failover, self.margin_pu, self.silent_s = failover, float(margin_pu), float(silent_s)

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Lower budgets at once; raise them by what is left beside all that halls may still hold."""
        halls = Halls.of(view, self.silent_s)
        if not halls.is_hall.any():
            return [], dict(memory)
        kept = _remembered(view, memory, halls)
        carried, left_w = self.left_w(view, halls)
        goal_w = _split(view.site, carried, left_w, halls)
        given_w = _raised(view.site, carried, left_w, halls, goal_w, _counted_w(halls, kept))
        out = []
        change = np.sign(np.round(given_w - halls.now_w))
        for sign, reason in zip((-1.0, 1.0, 0.0), REASONS, strict=True):
            index = np.flatnonzero(halls.is_hall & (change == sign)).astype(np.int32)
            if len(index):
                hi = given_w[index]
                out.append(Proposal(CONTROL, index, halls.least_w[index], hi, hi.copy(), reason))
        return out, kept

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """Each hall: what it draws, wants, holds and is guaranteed, and the feeder that holds it back."""
        entity, inside = scope_of(view, request)
        account = HallAccount.of(self, view, memory)
        silent = int((account.halls.is_hall & ~account.halls.heard).sum())
        rows = in_scope(inside, "rack", np.flatnonzero(account.halls.is_hall).astype(np.int32)).tolist()
        sentences = [Sentence(f"halls below shared feeders: {len(rows)}; silent halls: {silent}")]
        sentences += [Sentence(f"{view.site.name('feeder', i)} is lost", "warning") for i in account.lost]
        if silent:
            sentences.append(
                Sentence(f"a hall that is silent for {self.silent_s:g} s has its guaranteed share", "note")
            )
        parts = account.parts(rows)
        feeders = account.feeders({str(part["feeder"]) for part in parts} if entity else None)
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(
                KeyFigure("halls", len(rows), "count", "halls of the fleet"),
                KeyFigure("silent_halls", silent, "count", "halls that are silent"),
            ),
            tables=(
                table_of("halls", COLUMNS, account.rows(rows), "halls and their budgets", len(rows)),
                table_of("feeders", FEEDER_COLUMNS, feeders, "shared feeders", len(feeders)),
                table_of("parts", PART_COLUMNS, parts, "who holds what of a shared feeder", len(parts)),
            ),
        )

    def left_w(self, view: View, halls: Halls) -> tuple[Carried, F64]:
        """(places, what each may carry of halls [n_place]); inf: no limit."""
        site = view.site
        carried = carried_by(view, pairs_of(site, dead_feeders(view), self.failover))
        beside_w = np.where(halls.is_hall, 0.0, np.nan_to_num(view.worst("rack.power_w").astype(np.float64)))
        left_w = (1.0 - self.margin_pu) * carried.limit_w - sums_w(carried, beside_w)
        return carried, np.maximum(left_w - _unseen_w(view, carried, halls, beside_w), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halls:
    """The racks of a site as halls of a fleet [n_rack]; what is not told is NaN.

    `now_w`: the budget in force by our leases; `heard`: its summary is no older than allowed; `told_w`: the
    budget that it says it holds, by a grant that was issued at `grant_ns` or later (0: by none); `asked_w`:
    the most that people leave to it.
    """

    is_hall: Bool
    heard: Bool
    least_w: F64
    most_w: F64
    now_w: F64
    power_w: F64
    demand_w: F64
    told_w: F64
    grant_ns: I64
    guaranteed_w: F64
    age_s: F64
    asked_w: F64

    @classmethod
    def of(cls, view: View, silent_s: float) -> Halls:
        """As their summaries tell."""
        envelope = view.envelope(CONTROL)
        is_hall = np.isfinite(envelope.safe)
        least_w, most_w = np.nan_to_num(envelope.low), np.nan_to_num(envelope.high)
        commanded_w = view.commanded(CONTROL)
        age_s = view.age_s("rack.hall_power_w")

        def latest(name: str) -> F64:
            key = f"rack.hall_{name}"
            good = is_hall & (view.quality(key) == GOOD) & (view.age_s(key) <= silent_s)
            return np.where(good, view.believed(key), np.nan).astype(np.float64)

        grant_s = view.age_s("rack.hall_grant_age_s") + latest("grant_age_s")
        known = np.isfinite(grant_s)
        issued_ns = view.now_ns - np.round(np.where(known, grant_s, 0.0) * NS).astype(np.int64)
        return cls(
            is_hall=is_hall,
            heard=is_hall & (age_s <= silent_s),
            least_w=least_w,
            most_w=most_w,
            now_w=np.where(np.isnan(commanded_w), least_w, commanded_w),
            power_w=latest("power_w"),
            demand_w=latest("demand_w"),
            told_w=latest("budget_readback_w"),
            grant_ns=np.where(known, issued_ns, 0),
            guaranteed_w=latest("guaranteed_w"),
            age_s=np.asarray(age_s, np.float64),
            asked_w=_asked_w(view, least_w, most_w),
        )


def _asked_w(view: View, least_w: F64, most_w: F64) -> F64:
    """The most that standing requests of people leave to each hall [n_rack]: never less than its share."""
    asked_w = most_w.copy()
    for request in view.requests:
        if request.control == CONTROL:
            index = view.targets(request)
            asked_w[index] = np.minimum(asked_w[index], request.hi)
    return np.maximum(asked_w, least_w)


@dataclass(frozen=True, slots=True)
class HallAccount:
    """The account of one instant: who holds what of each shared feeder, and why."""

    view: View
    halls: Halls
    carried: Carried
    left_w: F64
    kept: Memory
    counted_w: F64
    full: Bool
    lost: list[int]  # feeders without power
    else_heard: Bool  # its other figures are no older than allowed

    @classmethod
    def of(cls, policy: HallBudgets, view: View, memory: Memory) -> HallAccount:
        """As the policy would split now."""
        halls = Halls.of(view, policy.silent_s)
        carried, left_w = policy.left_w(view, halls)
        kept = _remembered(view, memory, halls)
        counted_w = _counted_w(halls, kept)
        full = sums_w(carried, counted_w) >= left_w - ROOM_W
        lost: list[int] = np.flatnonzero(dead_feeders(view)).tolist()
        else_heard = view.age_s("rack.hall_gpu_count") <= policy.silent_s
        return cls(view, halls, carried, left_w, kept, counted_w, full, lost, else_heard)

    def rows(self, halls: list[int]) -> list[dict[str, Value]]:
        """A row of each hall."""
        site, out = self.view.site, list[dict[str, Value]]()
        told = {key: self._told(key) for key in ("floor_w", "heard_pu", *COUNTS)}
        for i in halls:
            above = self._full_above(i)
            row: dict[str, Value] = {
                "hall": site.name("rack", i),
                "priority": int(site.priority_of_rack[i]),
                "power_w": finite(self.halls.power_w[i]),
                "demand_w": finite(self.halls.demand_w[i]),
                "budget_w": finite(self.halls.now_w[i]),
                "held_w": finite(self.kept["held_w"][i]),
                "guaranteed_w": finite(self.halls.least_w[i]),
                "most_w": finite(self.halls.most_w[i]),
                "age_s": finite(self.halls.age_s[i], 1),
                "full": self.carried.name(site, above[0]) if above else "",
                "why": self.why(i),
                "asked_w": finite(self.halls.asked_w[i]) if self._is_asked(i) else None,
                "heard": bool(self.halls.heard[i]),
            }
            out.append(row | {key: finite(values[i]) for key, values in told.items()})
        return out

    def parts(self, halls: list[int]) -> list[dict[str, Value]]:
        """A row for each hall below each feeder."""
        pairs, site = self.carried.pairs, self.view.site
        first, out = self.carried.feeder(0), list[dict[str, Value]]()
        why = {i: self.why(i) for i in halls}
        of_feeder = (pairs.place >= first) & (pairs.place < first + self.carried.n_feeder)
        for k in np.flatnonzero(of_feeder & np.isin(pairs.rack, halls)).tolist():
            hall, share = int(pairs.rack[k]), float(pairs.share[k])
            out.append(
                {
                    "feeder": site.name("feeder", int(pairs.place[k]) - first),
                    "hall": site.name("rack", hall),
                    "part_w": finite(share * self.counted_w[hall]),
                    "guaranteed_w": finite(share * self.halls.least_w[hall]),
                    "why": why[hall],
                }
            )
        return out

    def feeders(self, names: set[str] | None) -> list[dict[str, Value]]:
        """A row of each feeder above halls; of those with these names alone, if any are given."""
        view, site, first = self.view, self.view.site, self.carried.feeder(0)
        held_w = sums_w(self.carried, self.counted_w)
        budget_w, read = view.budget_w(), view.quality("feeder.power_w") == GOOD
        power_w, out = view.believed("feeder.power_w"), list[dict[str, Value]]()
        feeder, rack = site.served_racks()
        for i in np.unique(feeder[self.halls.is_hall[rack]]).tolist():
            if names is not None and site.name("feeder", i) not in names:
                continue
            free_w = self.left_w[first + i]
            out.append(
                {
                    "feeder": site.name("feeder", i),
                    "side": ("", "A", "B")[int(site.side_of_feeder[i])],
                    "lost": i in self.lost,
                    "budget_w": finite(budget_w[i]),
                    "power_w": finite(power_w[i]) if read[i] else None,
                    "held_w": finite(held_w[first + i]),
                    "other_w": finite(budget_w[i] - free_w),
                    "left_w": 0.0 if i in self.lost else finite(free_w - held_w[first + i]),
                }
            )
        return out

    def why(self, i: int) -> str:
        """The reason for the budget of a hall, in words that name no other hall."""
        halls, now_w = self.halls, float(self.halls.now_w[i])
        if not halls.heard[i]:
            age_s = float(halls.age_s[i])
            silent = f"silent for {age_s:.0f} s" if np.isfinite(age_s) else "never heard"
            if self.else_heard[i]:
                silent = f"tells no power for {age_s:.0f} s, and else its state"
                silent = silent if np.isfinite(age_s) else "tells its state, and never its power"
            return f"{silent}: its guaranteed share alone{self._still(i)}"
        above, site = self._full_above(i), self.view.site
        dead = [f"{site.name('feeder', k)} is lost" for k in self.lost if i in self._below(k)][:1]
        if self._is_asked(i) and now_w >= halls.asked_w[i] - ROOM_W:
            text = f"people ask for at most {_said_w(halls.asked_w[i])}"
        elif now_w >= halls.most_w[i] - ROOM_W:
            text = "all that it may have"
        elif above:
            full = f"{self.carried.name(site, above[0])} is full"
            text = f"{full}: by priority {int(site.priority_of_rack[i])} and demand"
        elif now_w >= halls.demand_w[i] - ROOM_W:
            text = "what it is about to want, and its part of what is left"
        else:
            text = "raised as others tell that they have given back"
        return "; ".join([*dead, text]) + self._still(i)

    def _still(self, i: int) -> str:
        counted_w = float(self.counted_w[i])
        beyond = counted_w > self.halls.now_w[i] + STILL_W
        return f"; counts with {_said_w(counted_w)} until it tells less" if beyond else ""

    def _is_asked(self, i: int) -> bool:
        return bool(self.halls.asked_w[i] < self.halls.most_w[i])

    def _below(self, feeder: int) -> list[int]:
        above, rack = self.view.site.served_racks()
        found: list[int] = rack[above == feeder].tolist()
        return found

    def _full_above(self, i: int) -> list[int]:
        pairs = self.carried.pairs
        found: list[int] = pairs.place[(pairs.rack == i) & self.full[pairs.place]].tolist()
        return found

    def _told(self, name: str) -> F64:
        key = f"rack.hall_{name}"
        good = self.halls.heard & (self.view.quality(key) == GOOD)
        return np.where(good, self.view.believed(key), np.nan).astype(np.float64)


def _said_w(value_w: float) -> str:
    return f"{value_w / 1e6:,.2f} MW" if value_w >= 2e6 else f"{value_w / 1e3:,.1f} kW"


def _remembered(view: View, memory: Memory, halls: Halls) -> Memory:
    """The memory with what each hall may hold by now."""
    now_ns, leased = view.now_ns, np.isfinite(view.commanded(CONTROL))
    held_for_ns = round((_lease_s(CONTROL) + SKEW_S + _lease_s("gpu.power_cap_w") + SETTLE_S) * NS)
    # What is in force since the last tick was issued with that tick at the earliest
    changed = memory["budget_w"] != halls.now_w
    since_ns = np.where(changed, memory["seen_ns"], memory["since_ns"])
    held_w, held_ns = memory["held_w"].copy(), memory["held_ns"].copy()
    held_w[held_ns <= now_ns] = 0.0
    # It has taken a grant that was issued after the last change, and so refuses the ones before
    acked = leased & (halls.grant_ns > 0) & (halls.grant_ns >= since_ns - round(SLIP_S * NS))
    held_w[acked & (halls.told_w <= halls.now_w + ROOM_W)] = 0.0
    # Without a lease of ours, one of a daemon before us may be in force
    now_w = np.where(leased, halls.now_w, halls.most_w)
    renewed = halls.is_hall & (now_w >= held_w)
    return {
        "budget_w": halls.now_w.copy(),
        "since_ns": since_ns,
        "held_w": np.where(halls.is_hall, np.maximum(held_w, now_w), 0.0),
        "held_ns": np.where(renewed, now_ns + held_for_ns, held_ns),
        "seen_ns": np.array(now_ns),
    }


def _lease_s(key: str) -> float:
    control = find_control(key)
    return 0.0 if control is None else control.lease_s


def _counted_w(halls: Halls, kept: Memory) -> F64:
    """Power that each hall may draw by now [n_rack]: by what it may hold, says that it holds, and draws."""
    told_w = np.fmax(np.fmax(halls.told_w, halls.power_w), halls.guaranteed_w)
    return np.where(halls.is_hall, np.fmax(kept["held_w"], told_w), 0.0)


def _unseen_w(view: View, carried: Carried, halls: Halls, beside_w: F64) -> F64:
    """Power that the meters of feeders read beyond all that halls tell and may draw [n_place].

    A hall that tells too little, or a load that nobody told of, is then taken off what others get.
    """
    site, out = view.site, np.zeros(len(carried.limit_w))
    now = carried_by(view, pairs_of(site, dead_feeders(view), failover=False))
    likely_w = sums_w(now, np.where(halls.is_hall, np.fmax(halls.now_w, halls.power_w), beside_w))
    metered = view.quality("feeder.power_w") == GOOD
    read_w = np.where(metered, view.believed("feeder.power_w"), 0.0).astype(np.float64)
    first, n = carried.feeder(0), carried.n_feeder
    more_w = np.maximum(read_w - likely_w[now.feeder(0) : now.feeder(0) + n], 0.0)
    out[first : first + n] = more_w
    out[carried.pairs.drawn : carried.pairs.drawn + n] = more_w
    return out


def _split(site: Site, carried: Carried, left_w: F64, halls: Halls) -> F64:
    """The budgets that halls should have [n_rack]: demand first, then up to their most, by priority."""
    budgets, _ = budgets_of(carried, site, left_w)
    rack, room_w = np.arange(carried.n_rack, dtype=np.int32), halls.asked_w - halls.least_w
    room_w = np.where(halls.heard & ~_unfed(site, carried), room_w, 0.0)
    wanted_w = np.clip(np.nan_to_num(halls.demand_w) - halls.least_w, 0.0, room_w)
    priority: I32 = site.priority_of_rack
    first = allocate(Devices(rack, priority, halls.least_w, wanted_w, room_w), budgets, carried.n_rack)
    rest_w = np.maximum(halls.least_w + room_w - first.power_w, 0.0)
    return allocate(Devices(rack, priority, first.power_w, rest_w, room_w), budgets, carried.n_rack).power_w


def _unfed(site: Site, carried: Carried) -> Bool:
    """Halls below feeders none of which has power [n_rack]: no feeder limits them then, and the one that
    returns, or was believed lost, must not find more than their shares."""
    first, place = carried.feeder(0), carried.pairs.place
    out: Bool = np.zeros(carried.n_rack, np.bool_)
    out[site.served_racks()[1]] = True
    out[carried.pairs.rack[(place >= first) & (place < first + carried.n_feeder)]] = False
    return out


def _raised(site: Site, carried: Carried, left_w: F64, halls: Halls, goal_w: F64, counted_w: F64) -> F64:
    """The budgets that may be granted now [n_rack]: `goal_w` where that is no raise, and else as near to it
    as what is left beside all that is counted allows."""
    budgets, _ = budgets_of(carried, site, left_w)
    more_w = np.maximum(goal_w - counted_w, 0.0)
    rack = np.arange(carried.n_rack, dtype=np.int32)
    found = allocate(Devices(rack, site.priority_of_rack, counted_w, more_w, more_w), budgets, carried.n_rack)
    # Below a feeder that may be overloaded already, nothing is raised
    over = np.zeros(carried.n_rack, np.bool_)
    over[budgets.group[(found.left_w < -ROOM_W)[budgets.row]]] = True
    given_w = np.where(over, halls.now_w, found.power_w)
    return np.clip(np.minimum(goal_w, given_w), halls.least_w, halls.most_w)
