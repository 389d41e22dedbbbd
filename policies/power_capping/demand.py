"""Demand: the power that each GPU may draw within the next minutes, and its priority.

A GPU at its cap, or without readings, may want its maximum. Any other GPU wants its recent peak and a little
more; if the forecast of its rack is higher, all GPUs of the rack want more. A GPU that is known to be off or
absent wants nothing. The floor of a job and the guarantee of its tenant come before the wishes of others in
the same class.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from policies.power_capping.unpowered import unpowered_gpus
from twin.catalogue import F64, I8, I32, I64, Bool, ContractError
from twin.contracts import View, good
from twin.telemetry import GOOD, KINDS

CONTROL = "gpu.power_cap_w"
CURVE = ("job.compute_pu", 0.0)  # the share of a job's time that waits for the clock, as learned of it
LEAST = ("job.least_energy_w", 0.0)  # W of a GPU at which the job's work takes the least energy, as learned
# Classes of priority: what has no job, the usual, what is marked high, and what people wait for
IDLE, USUAL, HIGH, WAITED_FOR = range(4)
CLASS_NAMES = ("idle", "usual", "high", "waited_for")
AT_CAP_PU = 0.95  # beyond this share of its cap a GPU may want more. source: estimate
RESERVE_PU = 0.10  # above what was drawn at most of late. source: estimate
FORGET_S = 900.0  # time constant with which a peak is forgotten: 15 minutes, as far as shaping looks ahead
HORIZON_S = 900.0
REQUESTS = "site.requests_per_s"
MOST_TENANTS = 1000


class Draws(NamedTuple):
    """Of all GPUs [n_gpu]: what they draw (as bad as may be), W, the range of their caps, W, and whether they
    can be capped here."""

    power_w: F64
    floor_w: F64
    most_w: F64
    capped: Bool


class Wants(NamedTuple):
    """For all GPUs [n_gpu]: worst-case draw, minimum, maximum, and possible demand."""

    power_w: F64
    floor_w: F64
    most_w: F64
    demand_w: F64
    peak_w: F64  # to be remembered
    capped: Bool  # can be capped here

    def of_capped(self, values: F64, other: float | F64 = 0.0) -> F64:
        """`values` [n_gpu] where GPUs can be capped, `other` elsewhere."""
        return values if self.capped.all() else np.where(self.capped, values, other)


class Tenant(NamedTuple):
    """The priority that its jobs have at least, and the share of the site's GPU watts that is its own."""

    priority: int
    share_pu: float


def tenants_of(text: str) -> dict[str, Tenant]:
    """`acme=10:0.3, lab=0:0.2` as NAME=PRIORITY:SHARE. Raises ContractError: which part, what expected."""
    out: dict[str, Tenant] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, found, rest = (x.strip() for x in part.partition("="))
        priority, _, share = rest.partition(":")
        try:
            tenant = Tenant(int(priority), float(share))
        except ValueError:
            found = ""
        if not name or not found or abs(tenant.priority) >= 2**31 or not 0.0 <= tenant.share_pu <= 1.0:
            raise ContractError(f"tenants: expected NAME=PRIORITY:SHARE, SHARE 0 to 1, got {part[:200]!r}")
        if name in out:
            raise ContractError(f"tenants: {name[:200]} is named twice")
        out[name] = tenant
    if len(out) > MOST_TENANTS:
        raise ContractError(f"tenants: expected at most {MOST_TENANTS}, got {len(out)}")
    if sum(t.share_pu for t in out.values()) > 1.0 + 1e-9:
        raise ContractError("tenants: the shares together are more than 1; expected at most all of the site")
    return out


def draws(view: View) -> Draws:
    """Return the worst-case power of GPUs, and the range of their caps."""
    envelope, site, off = view.envelope(CONTROL), view.site, unpowered_gpus(view)
    capped = np.isfinite(envelope.low) & ~off
    floor_w, most_w = np.where(capped, envelope.low, 0.0), np.where(capped, envelope.high, 0.0)
    power_w = view.worst("gpu.power_w").astype(np.float64)
    if (unknown := ~np.isfinite(power_w)).any():
        rack_most_w = site.design.gpu_max_w[site.rack_of_gpu]
        power_w = np.where(unknown, np.where(capped, most_w, rack_most_w), power_w)
    power_w = np.where(capped, np.minimum(power_w, most_w), np.where(off, 0.0, power_w))
    if unknown.any():
        power_w = np.nan_to_num(power_w)
    return Draws(power_w, floor_w, most_w, capped)


def wants(view: View, peak_w: F64, since_s: float) -> Wants:
    """Estimate the demand of GPUs from power, caps, peaks `since_s` ago, and forecasts of their racks."""
    power_w, floor_w, most_w, capped = draws(view)
    reporting = current(view, "gpu.power_w")
    cap_w = np.fmin(view.readback(CONTROL), view.commanded(CONTROL))  # some devices report no cap
    peak_w, demand_w = expected(power_w, reporting, cap_w, most_w, peak_w, since_s)
    growth = growth_of(view)
    demand_w = demand_w if growth is None else demand_w * growth
    demand_w = np.clip(demand_w + inference_reserve_w(view, demand_w), floor_w, most_w)
    return Wants(power_w, floor_w, most_w, demand_w, peak_w, capped)


def current(view: View, key: str) -> Bool:
    """Return the entities whose reading is good, or recent enough that its worst case is no higher [n].

    Until the cadence of a source is learned, its second message is never late.
    """
    return np.asarray((view.quality(key) == GOOD) | (view.worst(key) <= view.value(key)), np.bool_)


def expected(
    power_w: F64, reporting: Bool, cap_w: F64, most_w: F64, peak_w: F64, since_s: float
) -> tuple[F64, F64]:
    """(peak, demand) [n] of devices that draw this under these caps (NaN: none), had these peaks `since_s`
    ago, and may draw `most_w`."""
    at_cap = power_w >= AT_CAP_PU * np.where(np.isfinite(cap_w), np.minimum(cap_w, most_w), np.inf)
    peak = np.maximum(peak_w * np.exp(-since_s / FORGET_S), np.where(reporting, power_w, 0.0))
    return peak, np.where(at_cap | ~reporting, most_w, (1.0 + RESERVE_PU) * peak)


def growth_of(view: View) -> F64 | None:
    """Return the upper band of the rack's forecast over its present power [n_gpu]; at least 1."""
    forecast = view.forecasts.get(("rack.power_w", HORIZON_S))
    if forecast is None:
        return None
    now_w = view.believed("rack.power_w").astype(np.float64)
    ratio = np.nan_to_num(forecast.hi / np.where(now_w > 0, now_w, np.nan), nan=1.0, posinf=1.0)
    return np.maximum(ratio, 1.0)[view.site.rack_of_gpu]


def requests_growth(view: View) -> float:
    """The upper band of the forecast of requests over their present rate; 1 where it does not rise, or is not
    known."""
    forecast = view.forecasts.get((REQUESTS, HORIZON_S))
    if forecast is None:
        return 1.0
    now, high = float(good(view, REQUESTS)[0]), float(forecast.hi[0])
    return high / now if now > 0.0 and now < high < math.inf else 1.0


def inference_jobs(view: View) -> Bool:
    """Slots of jobs that answer requests [n_job]."""
    return np.asarray(view.jobs.alive & (view.jobs.kind == KINDS.index("inference")), np.bool_)


def inference_reserve_w(view: View, demand_w: F64) -> F64 | float:
    """Return the power above `demand_w` that more requests may add to GPUs of inference jobs [n_gpu].

    What a GPU draws beyond its idle power grows as the requests do at most, since batches fill up.
    """
    growth, serves = requests_growth(view), inference_jobs(view)
    if growth <= 1.0 or not serves.any():
        return 0.0
    of_gpu = np.append(serves, False)[slot_of_gpu(view)]
    idle_w = np.nan_to_num(view.site.design.gpu_idle_w)[view.site.rack_of_gpu]
    return np.where(of_gpu, (growth - 1.0) * np.maximum(demand_w - idle_w, 0.0), 0.0)


def classes(view: View, high_priority: int, tenants: dict[str, Tenant] | None = None) -> I8:
    """The class of each GPU [n_gpu]: of its node's job, or its tenant, or of its rack where the site file
    marks that."""
    site, jobs = view.site, view.jobs
    job, priority = jobs.job_of_node, jobs.priority
    busy, slot = job >= 0, np.maximum(job, 0)
    if tenants:
        least = np.full(jobs.n, -(2**31), np.int64)
        for at in np.flatnonzero(jobs.alive).tolist():
            tenant = tenants.get(jobs.tenants[at])
            least[at] = least[at] if tenant is None else tenant.priority
        priority = np.maximum(priority, least).astype(np.int32)
    out = np.where(busy, USUAL, IDLE).astype(np.int8)
    out[busy & (priority[slot] >= high_priority)] = HIGH
    out[busy & (jobs.kind[slot] == KINDS.index("inference"))] = WAITED_FOR
    if not jobs.known:
        out[:] = USUAL  # nobody says what runs where: nothing is idle
    marked = (site.priority_of_rack >= high_priority)[site.rack_of_node]
    out[marked & (out == USUAL)] = HIGH
    return out[site.node_of_gpu]


def together(view: View) -> I32:
    """Return the synchronous job of each GPU, counted from 0; -1 = none [n_gpu]."""
    jobs, site = view.jobs, view.site
    slots = np.flatnonzero(jobs.alive & jobs.synchronous)
    if not len(slots):
        return np.full(site.sizes["gpu"], -1, np.int32)
    place = np.full(jobs.n + 1, -1, np.int32)
    place[slots] = np.arange(len(slots), dtype=np.int32)
    return place[jobs.job_of_node][site.node_of_gpu]


def slot_of_gpu(view: View) -> I64:
    """The slot of the job of each GPU; one past the last slot = none [n_gpu]."""
    slot = view.jobs.job_of_node.astype(np.int64)
    return np.where(slot >= 0, slot, view.jobs.n)[view.site.node_of_gpu]


def learned_pu(view: View) -> F64 | None:
    """Of each GPU the share of its job's time that waits for the clock [n_gpu], NaN where nobody knows; None
    where nothing is learned yet."""
    found = _of_gpus(view, CURVE)
    return None if found is None else np.clip(found, 0.0, 1.0)


def learned_least_w(view: View) -> F64:
    """The power of each GPU at which its job's work takes the least energy [n_gpu]; NaN if unknown."""
    found = _of_gpus(view, LEAST)
    return np.full(view.site.sizes["gpu"], np.nan) if found is None else found


def _of_gpus(view: View, key: tuple[str, float]) -> F64 | None:
    """A forecast of jobs, for each of their GPUs [n_gpu]; None where it is known of no job."""
    forecast = view.forecasts.get(key)
    if forecast is None or not np.isfinite(forecast.mean).any():
        return None
    alive = np.where(view.jobs.alive, forecast.mean.astype(np.float64), np.nan)
    return np.asarray(np.append(alive, np.nan)[slot_of_gpu(view)])


def kept_pu(view: View, want: Wants) -> F64 | None:
    """The share of its range that each GPU needs so that its job keeps its floor [n_gpu]; None = no job has
    one.

    `floor_w` of a job are watts of all its GPUs together; those that cannot be capped count with what they
    draw.
    """
    if not (view.jobs.floor_w[view.jobs.alive] > 0).any():
        return None
    return _spread_pu(want, slot_of_gpu(view), np.append(view.jobs.floor_w * view.jobs.alive, 0.0))


def guaranteed_pu(view: View, want: Wants, tenants: dict[str, Tenant], site_w: float) -> F64 | None:
    """The share of its range that each GPU has by what its tenant is guaranteed of `site_w`, the watts that
    all GPUs may have together [n_gpu]; None = nobody is guaranteed anything."""
    jobs, names = view.jobs, [name for name, tenant in tenants.items() if tenant.share_pu > 0]
    if not names:
        return None
    number, of_slot = {name: i for i, name in enumerate(names)}, np.full(jobs.n + 1, len(names), np.int64)
    for at in np.flatnonzero(jobs.alive).tolist():
        of_slot[at] = number.get(jobs.tenants[at], len(names))
    goal_w = np.array([tenants[name].share_pu * site_w for name in names] + [0.0])
    return _spread_pu(want, of_slot[slot_of_gpu(view)], goal_w)


def _spread_pu(want: Wants, owner: I64, goal_w: F64) -> F64:
    """Return an equal share of the ranges of an owner's GPUs that adds up to `goal_w` [n_gpu]."""
    n, least_w = len(goal_w), np.where(want.capped, want.floor_w, want.power_w)
    least = np.bincount(owner, least_w, n)
    room_w = np.bincount(owner, np.where(want.capped, want.most_w - want.floor_w, 0.0), n)
    share = np.divide(goal_w - least, room_w, out=np.zeros(n), where=room_w > 0)
    return np.clip(share, 0.0, 1.0)[owner]
