"""Replacement: withdraws nodes before they fail, has them tested or repaired, and returns them to service.

Evidence against a node makes it a suspect. Once the evidence has stood for a while, the option of least
expected cost is taken: watch it, let it leave when its job ends, drain it after a save, or at once. No step
is taken where too many nodes are out, where many look bad together, or where the prediction says that waiting
is better. Nodes that operators or other policies withdrew are left to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.node_replacement import predictions, texts
from policies.node_replacement.assessment import ReplacementRules, assess
from policies.node_replacement.costs import LOOK_S, TEST_S, Delays
from policies.node_replacement.evidence import evidence_of
from policies.node_replacement.explain import TOPICS, explain
from policies.node_replacement.limits import WithdrawalLimits
from policies.node_replacement.ownership import track_owners
from policies.node_replacement.phases import PROBATION, SUSPECT, next_phases
from policies.node_replacement.placement import PLACEMENT, PlacementSettings, placement_proposals
from policies.node_replacement.transitions import adopt_replaced, apply_transitions, restart_confirmation
from twin.catalogue import NS, ContractError
from twin.contracts import Columns, ExplainRequest, Explanation, Memory, Proposal, Topic, View
from twin.telemetry import ColumnSpec

SERVICE, TESTED, SINCE = "node.service_level", "node.burn_in_since_s", "job.checkpoint_since_s"
PAUSE_S = 60.0  # after a longer one, suspicions are confirmed again
HOUR_S, DAY_S = 3600.0, 86_400.0


_WAS = {  # names in snapshots of earlier versions
    "option": "course", "rule": "row", "hold": "held", "needs_repair": "repairs", "level_reached": "reached",
    "level_confirmed": "shown", "owner": "whose", "test_attempts": "tries", "failed_tests": "attempts",
    "evidence_ns": "begun_ns", "test_requested_ns": "tested_ns", "others_withdrew_ns": "others_ns",
    "common_cause_ns": "shared_ns", "spare_pair": "pair", "not_reserved_s": "unkept_s",
    "save_since_s": "save_s", "known": "looked_ns",
}  # fmt: skip
_COLUMNS = {
    "i1": ("phase", "cause", "option", "action", "rule", "hold", "needs_repair", "level_reached",
           "level_confirmed", "owner"),
    "i2": ("test_attempts", "failed_tests", "offences"),
    "i8": ("entered_ns", "deadline_ns", "evidence_ns", "suspected_ns", "quiet_ns", "withdrawn_ns",
           "test_requested_ns", "returned_ns", "resumed_ns", "others_withdrew_ns", "common_cause_ns",
           "spare_pair", "leave_ns", "leave_by_ns"),
    "f8": ("not_reserved_s", "chance_1h_pu", "chance_24h_pu", "sure_pu", "save_since_s", "next_s",
           "durable_s", "job_gpus", "lost_s", *texts.COSTS, "repair_gpu_h", "wait_saves_gpu_h"),
    "?": ("known",),  # the node was present in the last run
}  # fmt: skip
MEMORY = Columns(
    scalars={
        "ran_ns": ColumnSpec("i8", was="looked_ns"),  # of the last run
        "spares_wanted": ColumnSpec("i4", was="spares"),
        **predictions.SCORES,
    },
    node={
        **{n: ColumnSpec(kind, was=_WAS.get(n, "")) for kind, names in _COLUMNS.items() for n in names},
        "ours": ColumnSpec("?", of_place=True),  # withdrawn by this policy
        **predictions.COLUMNS,
    },
)


@dataclass(eq=False)
class Replacement:
    """Proposes service levels, saves before drains, tests of withdrawn nodes, and placement.

    `burn_in`: the site runs a test of its own on withdrawn nodes. `test_h`: hours for which a false alarm
    keeps a node out (0: 2 with a test, else 8). `queue_h`: hours that a job waits for another node.
    `offences`: withdrawals from which on a node is to be exchanged. `probation_days`: of tighter watch after
    a return. `place_last`: the scheduler uses suspects and nodes on probation last. `keep_spares`: it keeps
    the wanted number of spares free. The others are the most that may be out at once; `site_count` 0: no
    count.
    """

    name: ClassVar[str] = "replacement"
    controls: ClassVar[tuple[str, ...]] = (SERVICE, TESTED, SINCE, PLACEMENT)
    rank: ClassVar[int] = 40
    period_s: ClassVar[float] = 10.0
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = MEMORY
    topics: ClassVar[tuple[Topic, ...]] = TOPICS

    burn_in: bool = False
    test_h: float = 0.0
    queue_h: float = 0.5
    offences: float = 3
    probation_days: float = 7.0
    site_count: float = 0
    site_share: float = 0.08
    rack_share: float = 0.25
    domain_share: float = 0.25
    job_share: float = 0.25
    place_last: bool = True
    keep_spares: bool = False

    def __post_init__(self) -> None:
        """Check the settings. Raises ContractError with the setting and the expected value."""
        for name in ("burn_in", "place_last", "keep_spares"):
            if not isinstance(getattr(self, name), bool):
                raise ContractError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        self.placement = PlacementSettings(self.place_last, self.keep_spares)
        test_s = _number("test_h", self.test_h, 0.0, 720.0) * HOUR_S or (TEST_S if self.burn_in else LOOK_S)
        count = round(_number("site_count", self.site_count, 0, 1e6))
        names = ("site_share", "rack_share", "domain_share", "job_share")
        checked = [_number(name, getattr(self, name), 0.0, 1.0) for name in names]
        limits = WithdrawalLimits(count or WithdrawalLimits().site_count, *checked)
        self.rules = ReplacementRules(
            self.burn_in,
            Delays(test_s, _number("queue_h", self.queue_h, 0.0, 720.0) * HOUR_S),
            limits,
            round(_number("offences", self.offences, 1, 100)),
            _number("probation_days", self.probation_days, 0.0, 365.0) * DAY_S,
        )

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Return service levels, saves, tests and placement for nodes that leave or return."""
        phase = memory["phase"]
        evidence = evidence_of(view, phase == SUSPECT, phase == PROBATION)
        now_ns, n = view.now_ns, len(phase)
        last_ns = int(memory["ran_ns"])
        fresh = ~memory["known"] & bool(last_ns)
        active = (phase != 0) | (evidence.cause != 0) | (memory["cause"] != 0)
        active |= (memory["withdrawn_ns"] > 0) | (memory["prediction_ns"] > 0) | fresh
        after = dict(memory)
        marked = track_owners(view, after)
        after["ran_ns"], after["known"] = np.array(now_ns, np.int64), np.ones(n, np.bool_)
        paused = last_ns == 0 or now_ns - last_ns > round(max(PAUSE_S, 1.5 * view.dt_s) * NS)
        elapsed_s = 0.0 if paused else (now_ns - last_ns) / NS
        if not (active | marked).any():
            return placement_proposals(view, after, self.placement, elapsed_s), after
        after = {name: column.copy() for name, column in after.items()}
        if fresh.any():
            adopt_replaced(view, after, fresh, last_ns)
        if last_ns and paused:
            restart_confirmation(after, now_ns)
        assessed = assess(view, evidence, after, self.rules, marked)
        phases, by = next_phases(after["phase"][assessed.at], assessed.conditions)
        apply_transitions(view, after, assessed, phases, by, self.rules)
        after = predictions.settle(view, after, (after["spare_pair"] != 0) & (after["phase"] != 0))
        placed = placement_proposals(view, after, self.placement, elapsed_s)
        return [*texts.proposals(view, after), *placed], after

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """Return the phases of nodes, their options and pending events; see `topics`."""
        return explain(view, memory, request, self.rules.burn_in)

    def accounts(self, view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
        """Return moves between phases, predictions, and their outcomes."""
        return texts.accounts(view, before, after)


def _number(name: str, value: float, low: float, high: float) -> float:
    """Return a setting as a number. Raises ContractError if it is no number, or out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(f"{name}: expected a number, got {value!r}")
    if not low <= value <= high:
        raise ContractError(f"{name}: expected {low:g} to {high:g}, got {value:g}")
    return float(value)
