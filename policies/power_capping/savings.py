"""Savings: running account of the work that caps cost and the energy that they save, by class and job.

The account keeps quarters of an hour for eight days. Work is lost while a GPU is at its cap and would draw
more; its recent power without a cap shows how much.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from policies.power_capping.budgets import gain_of
from policies.power_capping.curves import Curve, perf
from policies.power_capping.demand import AT_CAP_PU, CLASS_NAMES, classes, learned_pu
from policies.power_capping.headroom import CAP, SLACK_W, PowerState, cap_leases, power_state
from twin.catalogue import F64, I64, NS, Bool, clean, duration
from twin.contracts import ExplainRequest, View
from twin.site import Site
from twin.telemetry import GOOD

SLOT_S = 900.0
KEEP_SLOTS = 8 * 96  # eight days
MAX_JOBS = 24  # of a slot that are listed one by one; the others are summed
MAX_GAP_S = 60.0  # a longer pause between two looks counts as this much
DRAWN_S = 60.0  # time constant of what a GPU draws without a cap
PEAK_SLOTS = 4  # of the peaks of late: an hour
FORMAT = 1
NAMES = ("lost_gpu_s", "lost_most_gpu_s", "saved_ws", "net_ws", "held_gpu_s", "capped_gpu_s", "busy_gpu_s",
         "guessed_gpu_s", "unheard_gpu_s")  # fmt: skip
CAPPED = NAMES.index("capped_gpu_s")
STRAIGHT = "by a straight line from idle to demand, which overestimates: no curve of the job was learned"
NO_ACCOUNT = "no account of caps yet: it starts with the daemon"


class Peaks(NamedTuple):
    """The highest recent loads of all places [n_place], and the seconds that they cover."""

    now_w: F64
    lost_w: F64
    span_s: float


class CostRates(NamedTuple):
    """Costs of a second by GPU [n_gpu], in the order of NAMES [9, n_gpu]; True where a curve was used."""

    columns: F64
    curved: Bool


class CapAccount:
    """`PolicyAccount` of power_cap: counts between ticks."""

    name = "power-account"

    def __init__(self) -> None:
        self.failover, self.high_priority, self.problem = True, 1, ""
        self.slots: dict[int, dict[str, list[float]]] = {}  # begin of the slot in s -> who -> NAMES
        self.totals: dict[str, list[float]] = {}  # of classes and the site, since the account began
        self.curved_s, self.straight_s = 0.0, 0.0
        self.began_ns = 0
        self._last_ns, self._site = 0, ""
        self._free_w = np.zeros(0)  # the draw of each GPU of late without a cap; NaN unknown
        self._job = np.zeros(0, np.int64)
        self._peaks: deque[tuple[int, F64, F64]] = deque(maxlen=PEAK_SLOTS + 1)

    def observe(self, view: View, request: ExplainRequest) -> None:
        """Count the time since the last call."""
        now_ns, site = view.now_ns, view.site
        gap_s = (now_ns - self._last_ns) / NS if self._last_ns else 0.0
        if self._site != site.spec_hash:
            self._site, gap_s, n = site.spec_hash, 0.0, site.sizes["gpu"]
            self._free_w, self._job = np.full(n, np.nan), np.full(n, -1, np.int64)
            self._peaks.clear()
        if self._last_ns and gap_s == 0.0:
            return
        self._last_ns = now_ns
        self.began_ns = self.began_ns or now_ns
        dt_s = min(max(gap_s, 0.0), MAX_GAP_S)
        state = power_state(view, request, self.failover, self.high_priority)
        self._remember(state, now_ns)
        if not site.sizes["gpu"]:
            return
        cap_w = _cap_w(state)
        capped, at_cap = self._at_cap(view, cap_w, dt_s)
        if request.role == "leader" and dt_s > 0.0:
            costs = costs_now(view, capped, at_cap, self._free_w, cap_w)
            self._add(view, dt_s, costs, classes(view, self.high_priority))

    def peaks(self, site: Site) -> Peaks | None:
        """Return the highest loads of the last hour; None before the first observation."""
        if not self._peaks or self._site != site.spec_hash:
            return None
        now_w = np.fmax.reduce([p[1] for p in self._peaks])
        lost_w = np.fmax.reduce([p[2] for p in self._peaks])
        return Peaks(now_w, lost_w, max(0.0, self._last_ns / NS - self._peaks[0][0]))

    def _remember(self, state: PowerState, now_ns: int) -> None:
        slot = int(now_ns / NS // SLOT_S * SLOT_S)
        loads = state.loads
        if self._peaks and self._peaks[-1][0] == slot and len(self._peaks[-1][1]) == len(loads.now_w):
            _, now_w, lost_w = self._peaks.pop()
            self._peaks.append((slot, np.fmax(now_w, loads.now_w), np.fmax(lost_w, loads.lost_w)))
            return
        if self._peaks and len(self._peaks[-1][1]) != len(loads.now_w):
            self._peaks.clear()
        self._peaks.append((slot, loads.now_w.copy(), loads.lost_w.copy()))

    def _at_cap(self, view: View, cap_w: F64, dt_s: float) -> tuple[Bool, Bool]:
        """(GPUs under a cap, GPUs that stand at it); learns from the others what they draw without one."""
        site, jobs = view.site, view.jobs
        power_w = view.believed("gpu.power_w").astype(np.float64)
        reported = view.quality("gpu.power_w") == GOOD
        capped: Bool = np.isfinite(cap_w)
        at_cap: Bool = capped & reported & (power_w >= AT_CAP_PU * np.where(capped, cap_w, np.inf))
        slot = jobs.job_of_node[site.node_of_gpu].astype(np.int64)
        known = np.maximum(slot, 0)
        job = np.where(slot >= 0, slot * 2**31 + jobs.generation[known], -1)
        self._free_w[job != self._job] = np.nan  # another job draws otherwise
        self._job = job
        free, weight = reported & ~at_cap, 1.0 - np.exp(-max(dt_s, 1.0) / DRAWN_S)
        before_w = np.where(np.isfinite(self._free_w), self._free_w, power_w)
        self._free_w = np.where(free, before_w + weight * (power_w - before_w), self._free_w)
        return capped, at_cap

    def _add(self, view: View, dt_s: float, costs: CostRates, class_of: Any) -> None:
        begin = int(view.now_ns / NS // SLOT_S * SLOT_S)
        slot = self.slots.setdefault(begin, {})
        wrong = [k for k in self.slots if k > begin]  # of a clock that was set back since
        for old in [*wrong, *sorted(self.slots)[: -KEEP_SLOTS - len(wrong)]]:
            self.slots.pop(old, None)
        columns = dt_s * costs.columns
        slot.setdefault("watched_s", [0.0])[0] += dt_s
        moving = columns[0] > 0
        self.curved_s += dt_s * float((moving & costs.curved).sum())
        self.straight_s += dt_s * float((moving & ~costs.curved).sum())
        sums = np.zeros((len(NAMES), len(CLASS_NAMES)))
        for i in np.flatnonzero(columns.any(axis=1)).tolist():
            sums[i] = np.bincount(class_of, columns[i], len(CLASS_NAMES))
        for rows in (slot, self.totals):
            _into(rows, "site", sums.sum(axis=1))
            for c in np.flatnonzero(np.bincount(class_of, minlength=len(CLASS_NAMES))).tolist():
                _into(rows, f"class/{CLASS_NAMES[c]}", sums[:, c])
        hit = np.flatnonzero(columns[CAPPED] > 0)
        if len(hit):
            self._add_jobs(view, slot, hit, columns)

    def _add_jobs(self, view: View, slot: dict[str, list[float]], hit: I64, columns: F64) -> None:
        """Jobs that have caps; those beyond the bound of a slot are summed."""
        jobs, site = view.jobs, view.site
        of = jobs.job_of_node[site.node_of_gpu]
        some = np.unique(of[hit][of[hit] >= 0])
        if not len(some):
            return
        sums = np.array([np.bincount(of[of >= 0], row[of >= 0], jobs.n) for row in columns])
        jobs_named = sum(1 for who in slot if who.startswith("job/"))
        for j in some.tolist():
            who = f"job/{clean(jobs.names[j] or f'job{j}', 120)}"
            if who not in slot:
                who, jobs_named = (
                    (who, jobs_named + 1) if jobs_named < MAX_JOBS else ("jobs_beyond", jobs_named)
                )
            _into(slot, who, sums[:, j])

    def dump(self) -> dict[str, Any]:
        """Return the account as plain data."""
        return {"format": FORMAT, "names": list(NAMES), "began_ns": self.began_ns, "totals": self.totals,
                "curved_s": self.curved_s, "straight_s": self.straight_s,
                "slots": {str(k): dict(v) for k, v in self.slots.items()}}  # fmt: skip

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore the result of `dump`. Raises ValueError, KeyError or TypeError for anything else."""
        if tree["format"] != FORMAT or tree["names"] != list(NAMES):
            raise ValueError(f"of format {str(tree['format'])[:20]}; expected {FORMAT}")
        begun = sorted(tree["slots"], key=int)[-KEEP_SLOTS:]
        slots, totals = {int(k): _rows(tree["slots"][k]) for k in begun}, _rows(tree["totals"])
        began_ns, curved_s, straight_s = int(tree["began_ns"]), tree["curved_s"], tree["straight_s"]
        self.curved_s, self.straight_s = float(curved_s), float(straight_s)
        self.slots, self.totals, self.began_ns = slots, totals, began_ns


def _rows(tree: Any) -> dict[str, list[float]]:
    out = {str(k)[:200]: [float(x) for x in v] for k, v in tree.items()}
    if any(len(v) != (1 if k == "watched_s" else len(NAMES)) for k, v in out.items()):
        raise ValueError("a row has not all columns")
    return out


def _into(rows: dict[str, list[float]], who: str, values: F64) -> None:
    before, more = rows.get(who), values.tolist()
    rows[who] = more if before is None else [a + b for a, b in zip(before, more, strict=True)]


def _cap_w(state: PowerState) -> F64:
    """Return the leased cap of each GPU [n_gpu]; NaN if it may draw its maximum."""
    value = cap_leases(state)[0]
    return np.where(value < state.view.envelope(CAP).high - SLACK_W, value, np.nan)


def costs_now(view: View, capped: Bool, at_cap: Bool, free_w: F64, cap_w: F64) -> CostRates:
    """Compute the cost of caps per second now, by GPU. `free_w` [n_gpu]: recent power without a cap."""
    site, jobs = view.site, view.jobs
    n, rack = site.sizes["gpu"], site.rack_of_gpu
    slot: I64 = jobs.job_of_node[site.node_of_gpu].astype(np.int64)
    busy = (slot >= 0) | (not jobs.known)
    reported = view.quality("gpu.power_w") == GOOD
    power_w = np.where(reported, view.believed("gpu.power_w"), 0.0).astype(np.float64)
    most_w = np.where(np.isfinite(site.envelopes[CAP].high), site.envelopes[CAP].high, power_w)
    known = np.isfinite(free_w)
    demand_w = np.clip(np.where(known, free_w, most_w), power_w, np.maximum(most_w, power_w))
    idle_w = np.minimum(np.nan_to_num(site.design.gpu_idle_w[rack]), power_w)
    at_w = np.maximum(np.where(capped, cap_w, power_w), power_w)
    learned = learned_pu(view)
    share = np.full(len(slot), np.nan) if learned is None else learned
    gamma_known = np.isfinite(share)
    work = at_cap & busy
    loss, most_loss = np.zeros(n), np.zeros(n)
    if (at := np.flatnonzero(work)).size:
        loss[at] = _loss(at_w[at], idle_w[at], demand_w[at], share[at])
        most_loss[at] = _loss(at_w[at], idle_w[at], np.maximum(most_w, power_w)[at], share[at])
    loss, most_loss = (_paced(x, slot, view) for x in (loss, most_loss))
    gain = gain_of(site)[rack]
    # A guess is no saving, and a GPU without a job would not have drawn more
    saved_w = np.where(work & known, (demand_w - power_w) * gain, 0.0)
    net_w = saved_w - np.where(known, loss * demand_w * gain, 0.0)
    columns = np.array([loss, np.maximum(most_loss, loss), saved_w, net_w, work, capped, busy, work & ~known,
                        capped & ~reported], np.float64)  # fmt: skip
    return CostRates(columns, gamma_known)


def _loss(at_w: F64, idle_w: F64, demand_w: F64, share: F64) -> F64:
    """Share of the work that is not done at this power [n]: by the curve where its share is known, else by a
    straight line."""
    range_w = demand_w - idle_w
    line = np.clip(np.divide(at_w - idle_w, range_w, out=np.ones(len(at_w)), where=range_w > 0), 0.0, 1.0)
    curve = perf(at_w, Curve(idle_w, np.maximum(demand_w, idle_w + SLACK_W), share))
    return 1.0 - np.where(np.isfinite(share) & np.isfinite(curve), curve, line)


def _paced(loss: F64, slot: I64, view: View) -> F64:
    """Give all GPUs of a synchronous job the loss of its slowest one [n_gpu]."""
    jobs = view.jobs
    together = (slot >= 0) & (jobs.alive & jobs.synchronous)[np.maximum(slot, 0)]
    worst = np.zeros(jobs.n)
    np.maximum.at(worst, slot[together], loss[together])
    return np.where(together, worst[np.maximum(slot, 0)], loss)


class CapCosts(NamedTuple):
    """Costs of caps over the last hours, in GPU-hours and kWh: of the site, by class and by job."""

    watched_h: float
    total: dict[str, float] | None
    classes: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    notes: list[str]


def cap_costs(view: View, account: CapAccount | None, hours: float) -> CapCosts:
    """The costs of caps over the last hours."""
    if account is None:
        return CapCosts(0.0, None, [], [], [NO_ACCOUNT])
    since_s = view.now_ns / NS - 3600.0 * hours
    sums: dict[str, list[float]] = {}
    for begin, rows in account.slots.items():
        if begin + SLOT_S > since_s:
            for who, values in rows.items():
                _into(sums, who, np.array(values))
    watched_h = round(sums.pop("watched_s", [0.0])[0] / 3600.0, 3)
    total = _in_hours(sums.get("site"))
    of_class: list[dict[str, Any]] = [
        {"class": n, **_in_hours(v)} for n in CLASS_NAMES if (v := sums.get(f"class/{n}"))
    ]
    jobs: list[dict[str, Any]] = [
        {"job": k[4:], **_in_hours(v)} for k, v in sums.items() if k.startswith("job/")
    ]
    jobs = sorted(jobs, key=lambda r: (-r["lost_gpu_h"], r["job"]))[:200]
    if (beyond := sums.get("jobs_beyond")) is not None:
        jobs.append({"job": "", **_in_hours(beyond)})
    notes = _notes(view, account, total, watched_h, hours)
    return CapCosts(watched_h, total, of_class, jobs, notes)


def _in_hours(values: list[float] | None) -> dict[str, float]:
    v = dict(zip(NAMES, values if values is not None else [0.0] * len(NAMES), strict=True))
    busy = v["busy_gpu_s"]
    return {
        "lost_gpu_h": v["lost_gpu_s"] / 3600, "lost_most_gpu_h": v["lost_most_gpu_s"] / 3600,
        "lost_pu": v["lost_gpu_s"] / busy if busy > 0 else 0.0, "busy_gpu_h": busy / 3600,
        "saved_kwh": v["saved_ws"] / 3.6e6, "net_kwh": v["net_ws"] / 3.6e6,
        "held_gpu_h": v["held_gpu_s"] / 3600, "capped_gpu_h": v["capped_gpu_s"] / 3600,
        "guessed_gpu_h": v["guessed_gpu_s"] / 3600, "unheard_gpu_h": v["unheard_gpu_s"] / 3600,
    }  # fmt: skip


def _gpu_time(gpu_h: float) -> str:
    return f"{gpu_h:.3g} GPU-h" if gpu_h >= 0.1 else f"{3600 * gpu_h:.2g} GPU-s"


def _notes(
    view: View, account: CapAccount, total: dict[str, float], watched_h: float, hours: float
) -> list[str]:
    out = []
    if watched_h < 0.9 * hours:
        out.append(f"counted over {duration(round(3600 * watched_h))} of these {hours:g} h")
    if account.straight_s > 0 and account.curved_s <= 0:
        out.append(STRAIGHT)
    elif account.straight_s > 0:
        share = account.straight_s / (account.straight_s + account.curved_s)
        out.append(f"{100 * share:.0f} % of it {STRAIGHT}")
    if total["guessed_gpu_h"] > 0:
        guessed = f"{total['guessed_gpu_h']:.3g} GPU-h"
        out.append(
            f"of {guessed} the draw without a cap was never seen: their lost work counts with the maximum "
            "that they may have, their energy not at all"
        )
    if total["unheard_gpu_h"] > 0:
        out.append(f"{_gpu_time(total['unheard_gpu_h'])} under caps were not reported and do not count")
    if not view.jobs.known:
        out.append("no source of jobs reports: every GPU counts as working")
    if account.problem:
        out.append(account.problem)
    return out
