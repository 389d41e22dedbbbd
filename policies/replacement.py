"""replacement: takes nodes out of service before they fail, has them tested or mended, brings them back.

What speaks against a node makes it a suspect; once that stood for a while, the course that is expected to
cost least is taken: watch, let it go when its job ends, drain it after a save, or at once. Nothing is done
where too many are out already, where many look bad together, or where both courses, run forward, say that to
wait is better. Only what was withdrawn here is brought back here; what people or other policies withdrew is
theirs. May import contracts and the other files of this policy; reads the view, touches nothing.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from policies import replacement_gate as gate
from policies import replacement_words as words
from policies.replacement_costs import LOOK_S, TEST_S, Prices
from policies.replacement_evidence import evidence_of
from policies.replacement_limits import Limits
from policies.replacement_look import Look, Rules, look
from policies.replacement_moves import adopt, apply, confirm_anew
from policies.replacement_owner import follow
from policies.replacement_phases import PROBATION, SUSPECT, step
from policies.replacement_placement import PLACEMENT, Wishes, placements
from twin.contracts import Columns, Memory, Proposal, View
from twin.errors import ContractError
from twin.frame import NS

SERVICE, TESTED, SINCE = "node.service_level", "node.burn_in_since_s", "job.checkpoint_since_s"
PAUSE_S = 60.0  # after a longer one everything is confirmed anew
HOUR_S, DAY_S = 3600.0, 86_400.0


class Replacement:
    """Proposes service levels, saves before drains, tests of nodes that were taken out, and placement."""

    name: ClassVar[str] = "replacement"
    controls: ClassVar[tuple[str, ...]] = (SERVICE, TESTED, SINCE, PLACEMENT)
    rank: ClassVar[int] = 40
    period_s: ClassVar[float] = 10.0
    urgent: ClassVar[bool] = False
    memory: ClassVar[Columns | None] = Columns(
        "node",
        {
            "phase": "i1", "cause": "i1", "course": "i1", "action": "i1", "row": "i1", "held": "i1",
            "repairs": "i1", "reached": "i1", "shown": "i1", "ward": "i1", "whose": "i1",
            "tries": "i2", "attempts": "i2", "offences": "i2",
            "looked_ns": "i8", "entered_ns": "i8", "deadline_ns": "i8", "begun_ns": "i8",
            "suspected_ns": "i8", "quiet_ns": "i8", "withdrawn_ns": "i8", "tested_ns": "i8",
            "returned_ns": "i8", "resumed_ns": "i8", "others_ns": "i8", "shared_ns": "i8", "pair": "i8",
            "unkept_s": "f8",  # for how long a spare was commanded to be kept and was not
            "spares": "i4",  # how many are wanted, the same everywhere
            "chance_1h_pu": "f8", "chance_24h_pu": "f8", "sure_pu": "f8", "save_s": "f8", "next_s": "f8",
            "durable_s": "f8", "job_gpus": "f8", "lost_s": "f8",
            "watch_gpu_h": "f8", "cordon_gpu_h": "f8", "next_gpu_h": "f8", "save_gpu_h": "f8",
            "once_gpu_h": "f8", "repair_gpu_h": "f8",
        } | gate.COLUMNS,
    )  # fmt: skip

    def __init__(
        self, burn_in: bool = False, test_h: float = 0.0, queue_h: float = 0.5, offences: float = 3,
        probation_days: float = 7.0, site_count: float = 0, site_share: float = 0.08,
        rack_share: float = 0.25, domain_share: float = 0.25, job_share: float = 0.25,
        place_last: bool = True, keep_spares: bool = False,
    ) -> None:  # fmt: skip
        """`burn_in`: the site runs a test of its own on nodes that were taken out. `test_h`: hours for which
        a false alarm keeps a node out (0: 2 with a test, else 8). `queue_h`: that a job waits for another
        node. `offences`: withdrawals from which on a node is to be exchanged. `probation_days`: of tighter
        watch after a return. `place_last`: the scheduler shall use suspects and nodes on probation after all
        others; `keep_spares`: and leave as many spares free as are wanted. The others are the most that may
        be out at once; `site_count` 0: no count."""
        for name, value in (("burn_in", burn_in), ("place_last", place_last), ("keep_spares", keep_spares)):
            if not isinstance(value, bool):
                raise ContractError(f"{name}: expected true or false, got {value!r}")
        self.wishes = Wishes(place_last, keep_spares)
        test_s = _number("test_h", test_h, 0.0, 720.0) * HOUR_S or (TEST_S if burn_in else LOOK_S)
        count = round(_number("site_count", site_count, 0, 1e6))
        shares = (site_share, rack_share, domain_share, job_share)
        names = ("site_share", "rack_share", "domain_share", "job_share")
        checked = [_number(name, share, 0.0, 1.0) for name, share in zip(names, shares, strict=True)]
        limits = Limits(count, *checked) if count else Limits(Limits().site_count, *checked)
        self.rules = Rules(
            burn_in, Prices(test_s, _number("queue_h", queue_h, 0.0, 720.0) * HOUR_S), limits,
            round(_number("offences", offences, 1, 100)),
            _number("probation_days", probation_days, 0.0, 365.0) * DAY_S,
        )  # fmt: skip

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Levels for nodes that are on their way out or back, with what was weighed."""
        phase = memory["phase"]
        evidence = evidence_of(view, phase == SUSPECT, phase == PROBATION)
        now_ns, n = view.now_ns, len(phase)
        last_ns = int(memory["looked_ns"].max()) if n else 0
        fresh = (memory["looked_ns"] == 0) & bool(last_ns)
        active = (phase != 0) | (evidence.cause != 0) | (memory["cause"] != 0)
        active |= (memory["withdrawn_ns"] > 0) | (memory["gate_ns"] > 0) | fresh
        kept = dict(memory)
        found = follow(view, kept)
        kept["looked_ns"] = np.full(n, now_ns, np.int64)
        paused = last_ns == 0 or now_ns - last_ns > round(max(PAUSE_S, 1.5 * view.dt_s) * NS)
        looked_s = 0.0 if paused else (now_ns - last_ns) / NS
        if not (active | found).any():
            return placements(view, kept, self.wishes, looked_s), kept
        kept = {name: column.copy() for name, column in kept.items()}
        if fresh.any():
            adopt(view, kept, fresh, last_ns)
        if last_ns and paused:
            confirm_anew(kept, now_ns)
        seen: Look = look(view, evidence, kept, self.rules, found)
        after, by = step(kept["phase"][seen.at], seen.seen)
        apply(view, kept, seen, after, by, self.rules)
        kept = gate.settle(view, kept, (kept["pair"] != 0) & (kept["phase"] != 0))
        return [*words.proposals(view, kept), *placements(view, kept, self.wishes, looked_s)], kept

    def accounts(self, view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
        """What moved, what was predicted of it, and what came of that."""
        return words.accounts(view, before, after)


def _number(name: str, value: float, low: float, high: float) -> float:
    """A setting. Raises ContractError where it is no number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(f"{name}: expected a number, got {value!r}")
    if not low <= value <= high:
        raise ContractError(f"{name}: expected {low:g} to {high:g}, got {value:g}")
    return float(value)
