"""idle_power: puts unneeded nodes to sleep, and wakes them before the demand returns.

Enough idle GPUs stay ready for the time that a wake-up takes: for the upper band of the demand forecast, for
a reserve learned from past rises of this site, and for failures. Other idle healthy nodes sleep, whole racks
first, once they were unneeded for as long as the cost of a start requires. Waiting jobs wake nodes at once.
If the demand or its forecast is unknown, no more nodes go to sleep.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from policies.idle_power import account, breakers, demand, nodes
from policies.idle_power.breakers import follow_heat
from policies.idle_power.demand import DemandState, demand_state, learn, need_since
from policies.idle_power.explain import explanation
from policies.idle_power.nodes import (
    ASKED,
    BACK,
    CONTROL,
    FOUND,
    REFUSED_S,
    SLEEPING,
    WOKEN,
    NodeRoster,
    follow,
    roster_of,
    sleepable,
)
from policies.idle_power.readiness import Readiness
from policies.idle_power.wake import BOOT_PU, wake_first
from policies.node_replacement import LoadLimits, load_limits
from twin.catalogue import I32, NS, ContractError
from twin.contracts import (
    ASLEEP,
    PAGE,
    READY,
    Columns,
    ExplainRequest,
    Explanation,
    Memory,
    Proposal,
    Topic,
    View,
)
from twin.telemetry import ColumnSpec

FAILURES = "site.node_failure_count"
DAY_S = 86_400.0
SLEEP_TEXT = "no job runs on it, and no forecast needs it before it could wake"
WAKE_TEXT = "it is needed as soon as it can wake"
MOST_DT_S = 600.0  # of the account, between two looks


class IdlePower:
    """Proposes which nodes sleep and which are woken."""

    name: ClassVar[str] = "idle_power"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 80
    period_s: ClassVar[float] = 10.0
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = Columns(
        node=nodes.COLUMNS,
        site=demand.COLUMNS | account.COLUMNS | {"wake_s": ColumnSpec("f8")},
        feeder=breakers.COLUMNS,
        scalars={"looked_ns": "i8"},
    )
    topics: ClassVar[tuple[Topic, ...]] = (PAGE,)

    def __init__(
        self,
        late_pu: float = 5e-4,
        wake_s: float = 600.0,
        idle_s: float = 600.0,
        awake_s: float = 1800.0,
        learn_s: float = 259_200.0,
        ramp_pu: float = 0.05,
    ) -> None:
        """`late_pu`: share of the rises of demand that may find too few nodes awake. `wake_s`: until a woken
        node takes jobs, as long as none took longer. `idle_s`, `awake_s`: that a node was without a job, and
        awake, before it sleeps. `learn_s`: time that demand is watched before anybody sleeps. `ramp_pu`: of a
        feeder's budget, the most that starts of one look add.
        """
        bounds = {
            "late_pu": (late_pu, 1e-6, 0.1),
            "wake_s": (wake_s, 10.0, 2400.0),
            "idle_s": (idle_s, 0.0, 86_400.0),
            "awake_s": (awake_s, 0.0, 86_400.0),
            "learn_s": (learn_s, 0.0, 2_592_000.0),
            "ramp_pu": (ramp_pu, 0.001, 1.0),
        }
        for name, (value, low, high) in bounds.items():
            if not isinstance(value, int | float) or not low <= value <= high:
                raise ContractError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")
        self.late_pu, self.wake_s, self.idle_s = late_pu, wake_s, idle_s
        self.awake_s, self.learn_s, self.ramp_pu = awake_s, learn_s, ramp_pu

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Propose the nodes to sleep and the nodes to wake."""
        if view.site.sizes["node"] == 0 or view.site.sizes["gpu"] == 0:
            return [], memory
        out = dict(memory)
        roster, now_ns = roster_of(view), view.now_ns
        follow(view, out, roster)
        outlook = self.outlook(view, out, roster)
        looked_ns = int(memory["looked_ns"])
        dt_s = min((now_ns - looked_ns) / NS, MOST_DT_S) if looked_ns else 0.0
        account.settle(view, out, dt_s)
        if learn(view, out, outlook.state, outlook.lead_s):
            account.count_rise(out, roster, outlook.state)
        limits = load_limits(view)
        follow_heat(view, out, limits, looked_ns)
        out["looked_ns"] = np.array(now_ns, np.int64)
        if outlook.state.known:
            missing = outlook.need - outlook.ready
            if missing > 0:
                self._wake(view, out, roster, missing, limits)
            elif not outlook.hold:
                self._lay_down(view, out, outlook)
        return self._proposals(view, out), out

    def outlook(self, view: View, memory: Memory, roster: NodeRoster) -> Readiness:
        """Nodes needed in addition to the present ones."""
        lead_s = max(self.wake_s, float(memory["wake_s"][0])) + demand.LOOK_S
        state = demand_state(view, memory, lead_s, self.late_pu)
        hold = self._hold(view, memory, state, roster)
        failures = _failures(view, lead_s) * float(roster.gpus.max(initial=0.0))
        return Readiness(state, roster, lead_s, failures, roster.ready_gpus(memory["phase"]), hold)

    def _hold(self, view: View, memory: Memory, state: DemandState, roster: NodeRoster) -> str:
        if not np.isfinite(roster.standby).any():
            return "no scheduler reports that nodes may sleep (node.standby_state)"
        if not view.jobs.known:
            return "no source of jobs has reported"
        if not state.known:
            return "no scheduler reports running and pending GPUs"
        if not state.forecast:
            return "no forecast of GPU demand reaches as far ahead as a node needs to wake"
        begun_ns = int(memory["begun_ns"][0])
        left_s = self.learn_s - (view.now_ns - begun_ns) / NS if begun_ns else self.learn_s
        return f"demand is observed for {left_s / 3600.0:.1f} h more" if left_s > 0.0 else ""

    def _wake(self, view: View, out: Memory, roster: NodeRoster, missing: float, limits: LoadLimits) -> None:
        """Start sleepers for so many GPUs, as far as limits allow. Changes `out`."""
        # One that was asked and still is awake is simply no longer asked
        asked = np.flatnonzero((out["phase"] == ASKED) & (view.readback(CONTROL) == READY)).astype(np.int32)
        out["phase"][asked], out["phase_ns"][asked] = WOKEN, view.now_ns
        sleeps = np.isin(out["phase"], (SLEEPING, FOUND)) & roster.serves
        failed = (out["refused_ns"] > 0) & (view.now_ns - out["refused_ns"] < round(REFUSED_S * NS))
        for may in (sleeps & ~failed, sleeps & failed):  # who did not come back lately is tried last
            sleepers = np.flatnonzero(may).astype(np.int32)
            if missing > 0.0 and len(sleepers):
                chosen = wake_first(view, out, limits, sleepers, missing, self.ramp_pu)
                missing -= float(roster.gpus[chosen].sum())
                out["phase"][chosen], out["phase_ns"][chosen] = WOKEN, view.now_ns

    def _lay_down(self, view: View, out: Memory, outlook: Readiness) -> None:
        """Ask nodes to sleep that were not needed for long enough. Changes `out`."""
        hold_s = max(self.idle_s, BOOT_PU * outlook.lead_s)  # a start costs as much as so long a sleep saves
        needed = need_since(out, view.now_ns, min(hold_s, (demand.SLOTS - 2) * demand.LOOK_S))
        if math.isnan(needed):
            return
        spare = outlook.ready - max(needed + outlook.failures, outlook.need)
        at = sleepable(view, out, outlook.roster, self.idle_s, self.awake_s)
        at = at[np.cumsum(outlook.roster.gpus[at]) <= spare]
        out["phase"][at], out["phase_ns"][at] = ASKED, view.now_ns

    def _proposals(self, view: View, memory: Memory) -> list[Proposal]:
        phase, age_ns = memory["phase"], view.now_ns - memory["phase_ns"]
        asleep = np.isin(phase, (ASKED, SLEEPING))
        ready = (phase == WOKEN) | (phase == BACK) & (age_ns < round(self.awake_s * NS))
        out = list[Proposal]()
        for mask, level, why in ((asleep, ASLEEP, SLEEP_TEXT), (ready, READY, WAKE_TEXT)):
            index: I32 = np.flatnonzero(mask).astype(np.int32)
            if len(index):
                out.append(Proposal.uniform(CONTROL, index, float(level), float(level), why))
        return out

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        """Explain the nodes needed, ready and asleep, the saved energy, and the reason why no more sleep."""
        return explanation(view, memory, request, self.outlook(view, memory, roster_of(view)))

    def accounts(self, view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
        """A record at the first look of each hour in which any node slept."""
        hours = [int(m["looked_ns"]) // (3600 * NS) for m in (before, after)]
        if hours[0] == hours[1] or not after["slept_s"][0]:
            return []
        return [account.account_of(after)]


def _failures(view: View, lead_s: float) -> float:
    """Nodes that may fail until another one is awake, by the upper end of the forecast for a day."""
    found = [f for (key, _), f in view.forecasts.items() if key == FAILURES and len(f.hi)]
    day = min(found, key=lambda f: abs(math.log(f.horizon_s / DAY_S)), default=None)
    upper = math.nan if day is None else float(day.hi[0])
    return math.ceil(upper * lead_s / day.horizon_s) if day is not None and math.isfinite(upper) else 0.0
