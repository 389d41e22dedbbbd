"""hall_budgets: lends budgets to the halls of a fleet under the feeders, loops and contracts that they share.

Each hall has at least its guaranteed share. The rest goes first to the expected demand of halls, then up to
their maximum, the higher priority first. With `failover` each side of a redundant supply carries all of a
hall that both sides feed, so that the loss of one side leaves the other inside its budget.

A request with an upper bound limits the budget of a hall. The difference is lent to other halls.

A lowered budget counts with its former value until the hall reports that it keeps the lower one and draws no
more than that, or until the grant expires. Only then is the difference lent to others. So the sum of all
budgets never exceeds a feeder during the change from one split to the next.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from policies.hall_limits import HallLimits, hall_limits, loop_heat_w
from policies.power_capping import (
    COURSE_COLUMNS,
    Carried,
    Devices,
    Settings,
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
    measured,
    scope_of,
    table_of,
)
from twin.site import HALL_BUDGET as CONTROL, Site
from twin.telemetry import GOOD

# A grant is in force by the hall's clock: so much later than by ours, and on its way. source: estimate
SKEW_S = 3.0
# Where the daemon of a hall died, caps stay for their lease; so long takes the fall then. source: estimate
SETTLE_S = 5.0
CAP = "gpu.power_cap_w"
SLIP_S = 0.005  # of an age in float32, and of rounding to its quantum
ROOM_W = 1.0  # of rounding
STILL_W = 1000.0  # beyond its budget, that is worth a word of what a hall may still hold. source: estimate
REASONS = ("lowered: others need it, or a feeder carries less", "raised: there is room for it", "as it was")
# Counts of a summary, as a hall reports them
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
    TableColumn("age_s", "s", "reported before"),
    TableColumn("full", text="held back by"),
    TableColumn("why", text="because"),
    TableColumn("asked_w", "W", "people ask for at most"),
    *(TableColumn(key, detail=True) for key in ("heard", "floor_w", "heard_pu", *COUNTS)),
)
FEEDER_COLUMNS = (
    TableColumn("feeder", text="shared"),
    TableColumn("kind"),
    TableColumn("side"),
    TableColumn("lost"),
    TableColumn("budget_w", "W", "may carry"),
    TableColumn("power_w", "W", "meter"),
    TableColumn("held_w", "W", "halls may hold"),
    TableColumn("other_w", "W", "reserve and other loads"),
    TableColumn("left_w", "W", "left"),
    TableColumn("why", text="because"),
)
TOGETHER = Topic("together", "All halls of this hub as one row, as reported to the hub above it.")
TOGETHER_COLUMNS = (
    TableColumn("power_w", "W"),
    TableColumn("demand_w", "W", "wants"),
    TableColumn("floor_w", "W", "at its lowest caps"),
    TableColumn("held_w", "W", "may hold"),
    TableColumn("told_w", "W", "say they hold"),
    TableColumn("lapse_s", "s", "from the end of a grant to the guaranteed shares"),
    TableColumn("heard_pu", "1", "share of its GPUs that report"),
    *(TableColumn(key) for key in COUNTS),
)
PART_COLUMNS = (
    TableColumn("feeder", text="shared"),
    TableColumn("kind"),
    TableColumn("hall"),
    TableColumn("part_w", "W", "holds"),
    TableColumn("guaranteed_w", "W", "of it guaranteed"),
    TableColumn("why", text="because"),
)


@dataclass(eq=False)
class HallBudgets:
    """Proposes a budget for each hall of a fleet.

    `failover`: keep the loss of one side inside the budgets; `margin_pu` of each limit stays free; a hall
    that is silent for `silent_s` is lent nothing beyond its guaranteed share; the rest as in
    `external_limits.Settings`.
    """

    name: ClassVar[str] = "hall_budgets"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 5  # before the operator: people narrow a budget, and do not overload a feeder
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    # `budget_w`: in force by our leases when last seen, and since when; `held_w`: what the hall may hold by
    # an earlier one, and until when; `lost_w`: the heat that a loop lacks the flow for
    memory: ClassVar[Columns | None] = Columns(
        rack={"budget_w": "f8", "since_ns": "i8", "held_w": "f8", "held_ns": "i8"},
        loop={"lost_w": "f8"},
        scalars={"seen_ns": "i8"} | COURSE_COLUMNS,
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE, TOGETHER)

    failover: bool = True
    margin_pu: float = 0.0
    silent_s: float = 15.0
    contract_w: float = float("nan")
    ramp_up_w_per_s: float = float("nan")
    ramp_down_w_per_s: float = float("nan")
    lead_s: float = 900.0

    def __post_init__(self) -> None:
        """Check the settings. Raises ContractError with the setting, its value and the expected one."""
        if not isinstance(self.failover, bool):
            raise ContractError(f"failover: expected true or false, got {self.failover!r}")
        for key, most in (("margin_pu", 0.5), ("silent_s", 3600.0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not 0.0 <= value <= most:
                raise ContractError(f"{key}: expected 0 to {most:g}, got {value!r}")
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        self.terms = Settings(**{key: own[key] for key in asdict(Settings()) if key in own}).checked()

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Lower budgets at once; raise them by what is left beside all that halls may still hold."""
        halls = Halls.of(view, self.silent_s)
        if not halls.is_hall.any():
            return [], dict(memory)
        held = _remembered(view, memory, halls)
        counted_w = _counted_w(halls, held)
        limits, known = self.limits(view, halls, memory, counted_w)
        kept, goal_w = held | known, _split(view.site, limits, halls)
        given_w = _raised(view.site, limits, halls, goal_w, counted_w)
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
        if request.topic == TOGETHER.name:
            one = table_of(TOGETHER.name, TOGETHER_COLUMNS, [account.together()], "all halls as one", 1)
            return Explanation(policy=self.name, now_ns=view.now_ns, tables=(one,))
        silent = int((account.halls.is_hall & ~account.halls.reporting).sum())
        rows = in_scope(inside, "rack", np.flatnonzero(account.halls.is_hall).astype(np.int32)).tolist()
        sentences = [Sentence(f"halls below shared feeders: {len(rows)}; silent halls: {silent}")]
        sentences += [Sentence(f"{view.site.name('feeder', i)} is lost", "warning") for i in account.lost]
        sentences += [Sentence(text, "warning") for text in account.lowered()]
        if silent:
            sentences.append(
                Sentence(f"a hall that is silent for {self.silent_s:g} s has its guaranteed share", "note")
            )
        parts = account.parts(rows)
        shared = account.place_rows(
            {(str(part["feeder"]), str(part["kind"])) for part in parts} if entity else None
        )
        return Explanation(
            policy=self.name,
            now_ns=view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=(
                KeyFigure("halls", len(rows), "count", "halls of the fleet"),
                KeyFigure("silent_halls", silent, "count", "silent halls"),
            ),
            tables=(
                table_of("halls", COLUMNS, account.rows(rows), "halls and their budgets", len(rows)),
                table_of("feeders", FEEDER_COLUMNS, shared, "what halls share", len(shared)),
                table_of("parts", PART_COLUMNS, parts, "division among the halls", len(parts)),
            ),
        )

    def limits(self, view: View, halls: Halls, memory: Memory, counted_w: F64) -> tuple[HallLimits, Memory]:
        """Return the limits of what halls share, and what to remember of them.

        A hall that reports no power draws all that it may hold by now: `counted_w`.
        """
        draws_w = np.where(np.isfinite(halls.power_w), halls.power_w, counted_w)
        found, known = hall_limits(view, self.terms, self.failover, halls.is_hall, draws_w, memory)
        limit_w = found.carried.limit_w
        free_w = self.margin_pu * np.where(np.isfinite(limit_w), limit_w, 0.0)
        left_w = found.left_w - free_w - _unseen_w(view, found, halls)
        return replace(found, left_w=np.maximum(left_w, 0.0)), known


@dataclass(frozen=True, slots=True, kw_only=True)
class Halls:
    """The racks of a site as halls of a fleet [n_rack]; what is not stated is NaN.

    `now_w`: the budget in force by our leases; `reporting`: its summary is no older than allowed;
    `reported_w`: the budget that it reports to hold, by a grant that was issued at `grant_ns` or later (0: by
    none, or its power is not known since); `asked_w`: the most that people leave to it; `lapse_s`: from the
    end of a grant until it draws its share at most.
    """

    is_hall: Bool
    reporting: Bool
    least_w: F64
    most_w: F64
    now_w: F64
    power_w: F64
    demand_w: F64
    reported_w: F64
    grant_ns: I64
    guaranteed_w: F64
    age_s: F64
    asked_w: F64
    lapse_s: F64

    @classmethod
    def of(cls, view: View, silent_s: float) -> Halls:
        """As their summaries report."""
        envelope = view.envelope(CONTROL)
        is_hall = np.isfinite(envelope.safe)
        least_w, most_w = np.nan_to_num(envelope.low), np.nan_to_num(envelope.high)
        commanded_w = view.commanded(CONTROL)
        age_s = view.age_s("rack.hall_power_w")

        def latest(name: str) -> F64:
            key = f"rack.hall_{name}"
            good = is_hall & (view.quality(key) == GOOD) & (view.age_s(key) <= silent_s)
            return np.where(good, view.believed(key), np.nan).astype(np.float64)

        told_s, power_w = view.age_s("rack.hall_grant_age_s"), latest("power_w")
        grant_s = told_s + latest("grant_age_s")
        # A power from before says nothing of what it draws by that grant
        known = np.isfinite(grant_s) & np.isfinite(power_w) & (age_s <= told_s + SLIP_S)
        issued_ns = view.now_ns - np.round(np.where(known, grant_s, 0.0) * NS).astype(np.int64)
        return cls(
            is_hall=is_hall,
            reporting=is_hall & (age_s <= silent_s),
            least_w=least_w,
            most_w=most_w,
            now_w=np.where(np.isnan(commanded_w), least_w, commanded_w),
            power_w=power_w,
            demand_w=latest("demand_w"),
            reported_w=latest("budget_readback_w"),
            grant_ns=np.where(known, issued_ns, 0),
            guaranteed_w=latest("guaranteed_w"),
            age_s=np.asarray(age_s, np.float64),
            asked_w=_asked_w(view, least_w, most_w),
            # A hall's own report stands however old; a hall whose daemon dies needs this at least
            lapse_s=np.fmax(view.believed("rack.hall_lapse_s"), _lease_s(CAP) + SETTLE_S).astype(np.float64),
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
    """The account of one instant: who holds what of all that halls share, and why."""

    view: View
    halls: Halls
    limits: HallLimits
    kept: Memory
    counted_w: F64
    full: Bool
    lost: list[int]  # feeders without power
    others_reporting: Bool  # its other figures are no older than allowed

    @classmethod
    def of(cls, policy: HallBudgets, view: View, memory: Memory) -> HallAccount:
        """As the policy would split now."""
        halls = Halls.of(view, policy.silent_s)
        kept = _remembered(view, memory, halls)
        counted_w = _counted_w(halls, kept)
        limits, _ = policy.limits(view, halls, memory, counted_w)
        full = sums_w(limits.carried, counted_w) >= limits.left_w - ROOM_W
        lost: list[int] = np.flatnonzero(dead_feeders(view)).tolist()
        others_reporting = view.age_s("rack.hall_gpu_count") <= policy.silent_s
        return cls(view, halls, limits, kept, counted_w, full, lost, others_reporting)

    def rows(self, halls: list[int]) -> list[dict[str, Value]]:
        """A row of each hall."""
        site, out = self.view.site, list[dict[str, Value]]()
        figures = {key: self._reported(key) for key in ("floor_w", "heard_pu", *COUNTS)}
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
                "full": self.limits.carried.name(site, above[0]) if above else "",
                "why": self.why(i),
                "asked_w": finite(self.halls.asked_w[i]) if self._is_asked(i) else None,
                "heard": bool(self.halls.reporting[i]),
            }
            out.append(row | {key: finite(values[i]) for key, values in figures.items()})
        return out

    def parts(self, halls: list[int]) -> list[dict[str, Value]]:
        """A row for each hall below each place that it shares."""
        site, pairs = self.view.site, self.limits.carried.pairs
        why, out = {i: self.why(i) for i in halls}, list[dict[str, Value]]()
        mine = np.isin(pairs.place, self._shared_places()) & np.isin(pairs.rack, halls)
        for k in np.flatnonzero(mine).tolist():
            hall, share, place = int(pairs.rack[k]), float(pairs.share[k]), int(pairs.place[k])
            out.append(
                {
                    "feeder": self.limits.carried.name(site, place),
                    "kind": self.limits.kind(site, place),
                    "hall": site.name("rack", hall),
                    "part_w": finite(share * self.counted_w[hall]),
                    "guaranteed_w": finite(share * self.halls.least_w[hall]),
                    "why": why[hall],
                }
            )
        return out

    def place_rows(self, named: set[tuple[str, str]] | None) -> list[dict[str, Value]]:
        """A row of each place that halls share; of those with these names and kinds alone, if given."""
        site, limits, out = self.view.site, self.limits, list[dict[str, Value]]()
        carried, held_w = limits.carried, sums_w(limits.carried, self.counted_w)
        limit_w = carried.limit_w.copy()
        first, n = carried.feeder(0), carried.n_feeder
        dead = [first + i for i in self.lost]
        limit_w[dead] = self.view.budget_w()[self.lost]
        read_w = self._read_w()
        for place in self._shared_places():
            name, kind = carried.name(site, place), limits.kind(site, place)
            if named is not None and (name, kind) not in named:
                continue
            side = site.side_of_feeder[place - first] if first <= place < first + n else 0
            out.append(
                {
                    "feeder": name,
                    "kind": kind,
                    "side": ("", "A", "B")[int(side)],
                    "lost": place in dead,
                    "budget_w": finite(limit_w[place]),
                    "power_w": finite(read_w[place]),
                    "held_w": finite(held_w[place]),
                    "other_w": finite(limit_w[place] - limits.left_w[place]),
                    "left_w": 0.0 if place in dead else finite(limits.left_w[place] - held_w[place]),
                    "why": limits.why(site, place),
                }
            )
        return out

    def lowered(self) -> list[str]:
        """Sentences on what takes less than the site file states, or is let in, and guarantees more."""
        site, limits, out = self.view.site, self.limits, list[str]()
        least_w = sums_w(limits.carried, np.nan_to_num(self.halls.least_w))
        for place in self._shared_places():
            if not (why := limits.why(site, place)):
                continue
            text = f"{limits.carried.name(site, place)}: {why}"
            if least_w[place] > limits.left_w[place] + ROOM_W:
                text += f"; its halls are guaranteed {_said_w(float(least_w[place]))}, and keep that"
            out.append(text)
        return out

    def together(self) -> dict[str, Value]:
        """All halls as one. A hall that is silent draws what it may hold, wants its share, and has no GPU in
        service."""
        halls, own_w = self.halls, float(self.limits.beside_w.sum())
        reporting, mine = halls.reporting, halls.is_hall
        draws_w = np.where(np.isfinite(halls.power_w), halls.power_w, self.counted_w)
        wants_w = np.where(reporting, np.fmin(np.fmax(halls.demand_w, draws_w), halls.most_w), halls.least_w)
        counted = np.where(mine, np.nan_to_num(self.view.believed("rack.hall_gpu_count")), 0.0)
        out = np.where(np.isfinite(self._reported("gpu_out_count")), self._reported("gpu_out_count"), counted)
        gpus = float(counted.sum())
        reporting_gpus = float((np.nan_to_num(self._reported("heard_pu")) * counted).sum())
        reported_w = np.fmax(
            self.view.believed("rack.hall_budget_readback_w"), np.fmax(halls.power_w, halls.least_w)
        )
        alarms: dict[str, Value] = {
            key: float(np.nan_to_num(self._reported(key)).sum()) for key in COUNTS[2:]
        }
        return alarms | {
            "power_w": float(draws_w[mine].sum()) + own_w if reporting.any() else None,
            "demand_w": float(wants_w[mine].sum()) + own_w,
            "floor_w": finite(self._reported("floor_w")[mine].sum() + own_w),
            "held_w": float(self.counted_w.sum()) + own_w,
            "told_w": float(reported_w[mine].sum()) + own_w,
            "lapse_s": _lease_s(CONTROL) + SKEW_S + float(halls.lapse_s[mine].max(initial=0.0)),
            "heard_pu": reporting_gpus / gpus if gpus else None,
            "gpu_count": gpus,
            "gpu_out_count": float(np.minimum(out, counted)[mine].sum()),
        }

    def why(self, i: int) -> str:
        """The reason for the budget of a hall, in words that name no other hall."""
        halls, now_w = self.halls, float(self.halls.now_w[i])
        if not halls.reporting[i]:
            age_s = float(halls.age_s[i])
            silent = f"silent for {age_s:.0f} s" if np.isfinite(age_s) else "never reported"
            if self.others_reporting[i]:
                silent = f"reports no power for {age_s:.0f} s, but reports its state"
                silent = (
                    silent if np.isfinite(age_s) else "reports its state, but has never reported its power"
                )
            return f"{silent}: its guaranteed share alone{self._still(i)}"
        above, site = self._full_above(i), self.view.site
        dead = [f"{site.name('feeder', k)} is lost" for k in self.lost if i in self._below(k)][:1]
        if self._is_asked(i) and now_w >= halls.asked_w[i] - ROOM_W:
            text = f"people ask for at most {_said_w(halls.asked_w[i])}"
        elif now_w >= halls.most_w[i] - ROOM_W:
            text = "its maximum"
        elif above:
            full, by = (
                self.limits.full(site, above[0]),
                f"by priority {int(site.priority_of_rack[i])} and demand",
            )
            text = f"{full}: {by}"
        elif now_w >= halls.demand_w[i] - ROOM_W:
            text = "its expected demand and its part of the rest"
        else:
            text = "raised as other halls confirm that they have lowered theirs"
        return "; ".join([*dead, text]) + self._still(i)

    def _still(self, i: int) -> str:
        counted_w = float(self.counted_w[i])
        beyond = counted_w > self.halls.now_w[i] + STILL_W
        return f"; counts with {_said_w(counted_w)} until it reports less" if beyond else ""

    def _is_asked(self, i: int) -> bool:
        return bool(self.halls.asked_w[i] < self.halls.most_w[i])

    def _below(self, feeder: int) -> list[int]:
        above, rack = self.view.site.served_racks()
        found: list[int] = rack[above == feeder].tolist()
        return found

    def _full_above(self, i: int) -> list[int]:
        pairs, shared = self.limits.carried.pairs, self._shared_places()
        places: list[int] = pairs.place[(pairs.rack == i) & self.full[pairs.place]].tolist()
        # A limit from outside explains more than a feeder that is full as well
        found = [place for place in places if place in shared]
        return sorted(found, key=lambda place: self.limits.why(self.view.site, place) == "")

    def _shared_places(self) -> list[int]:
        return self.limits.shared_places(self.view.site, self.halls.is_hall)

    def _read_w(self) -> F64:
        """Readings of each place [n_place], NaN where none; of loops the heat, of the site all halls."""
        view, carried = self.view, self.limits.carried
        out, first = np.full(len(carried.limit_w), np.nan), carried.feeder(0)
        read_w = measured(view, "feeder.power_w")
        for begin in (first, carried.pairs.drawn):
            out[begin : begin + carried.n_feeder] = read_w
        loop = first + carried.n_feeder + view.site.sizes["cdu"]
        out[loop : loop + view.site.sizes["loop"]] = loop_heat_w(view)
        out[carried.whole] = np.where(self.halls.is_hall, self.halls.power_w, self.limits.beside_w).sum()
        return out

    def _reported(self, name: str) -> F64:
        key = f"rack.hall_{name}"
        good = self.halls.reporting & (self.view.quality(key) == GOOD)
        return np.where(good, self.view.believed(key), np.nan).astype(np.float64)


def _said_w(value_w: float) -> str:
    return f"{value_w / 1e6:,.2f} MW" if value_w >= 2e6 else f"{value_w / 1e3:,.1f} kW"


def _remembered(view: View, memory: Memory, halls: Halls) -> Memory:
    """The memory with what each hall may hold by now."""
    now_ns, leased = view.now_ns, np.isfinite(view.commanded(CONTROL))
    held_for_ns = np.round((_lease_s(CONTROL) + SKEW_S + halls.lapse_s) * NS).astype(np.int64)
    # A budget in force since the last tick was issued with that tick at the earliest
    changed = memory["budget_w"] != halls.now_w
    since_ns = np.where(changed, memory["seen_ns"], memory["since_ns"])
    held_w, held_ns = memory["held_w"].copy(), memory["held_ns"].copy()
    held_w[held_ns <= now_ns] = 0.0
    # It has taken a grant that was issued after the last change, and so refuses the ones before; its caps may
    # not have fallen yet, which its power shows
    acked = leased & (halls.grant_ns > 0) & (halls.grant_ns >= since_ns - round(SLIP_S * NS))
    held_w[acked & (halls.reported_w <= halls.now_w + ROOM_W)] = 0.0
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
    reported_w = np.fmax(np.fmax(halls.reported_w, halls.power_w), halls.guaranteed_w)
    return np.where(halls.is_hall, np.fmax(kept["held_w"], reported_w), 0.0)


def _unseen_w(view: View, limits: HallLimits, halls: Halls) -> F64:
    """Power that the meters of feeders read beyond all that halls report and may draw [n_place].

    A hall that reports too little, or a load that is not reported, is then taken off what others get.
    """
    site, carried, out = view.site, limits.carried, np.zeros(len(limits.left_w))
    now = carried_by(view, pairs_of(site, dead_feeders(view), failover=False))
    draws_w = np.where(halls.is_hall, np.fmax(halls.now_w, halls.power_w), limits.beside_w)
    likely_w = sums_w(now, draws_w)
    metered = view.quality("feeder.power_w") == GOOD
    read_w = np.where(metered, view.believed("feeder.power_w"), 0.0).astype(np.float64)
    first, n = carried.feeder(0), carried.n_feeder
    more_w = np.maximum(read_w - likely_w[now.feeder(0) : now.feeder(0) + n], 0.0)
    out[first : first + n] = more_w
    out[carried.pairs.drawn : carried.pairs.drawn + n] = more_w
    out[carried.whole] = more_w[site.parent_of_feeder < 0].sum()
    return out


def _split(site: Site, limits: HallLimits, halls: Halls) -> F64:
    """The budgets that halls should have [n_rack]: demand first, then up to their most, by priority."""
    carried = limits.carried
    budgets, _ = budgets_of(carried, site, limits.left_w)
    rack, room_w = np.arange(carried.n_rack, dtype=np.int32), halls.asked_w - halls.least_w
    room_w = np.where(halls.reporting & ~_unfed(site, carried), room_w, 0.0)
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


def _raised(site: Site, limits: HallLimits, halls: Halls, goal_w: F64, counted_w: F64) -> F64:
    """The budgets that may be granted now [n_rack]: `goal_w` where that is no raise, and else as near to it
    as what is left beside all that is counted allows."""
    carried = limits.carried
    budgets, _ = budgets_of(carried, site, limits.left_w)
    more_w = np.maximum(goal_w - counted_w, 0.0)
    rack = np.arange(carried.n_rack, dtype=np.int32)
    found = allocate(Devices(rack, site.priority_of_rack, counted_w, more_w, more_w), budgets, carried.n_rack)
    # Below a feeder that may be overloaded already, nothing is raised
    over = np.zeros(carried.n_rack, np.bool_)
    over[budgets.group[(found.left_w < -ROOM_W)[budgets.row]]] = True
    given_w = np.where(over, halls.now_w, found.power_w)
    return np.clip(np.minimum(goal_w, given_w), halls.least_w, halls.most_w)
