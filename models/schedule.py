"""What is known of coming changes: jobs that must have ended, and what was told from outside.

Two experts beside those that read the past. `schedule` says: as now, less what the jobs draw whose time limit
will be over. `outlook` says what somebody told of this very quantity. Neither is believed blindly: the blend
weighs them by how they did. May import the core's contracts and quantities; NumPy only.
"""

from __future__ import annotations

import numpy as np

from twin.contracts import View
from twin.frame import F64, NS
from twin.quantities import good

EXPERTS = ("schedule", "outlook")


def _ending(view: View, until_ns: int) -> np.ndarray:
    """Slots of jobs whose time limit ends in (now, until]; of a job past its limit nobody knows the end."""
    jobs = view.jobs
    limited = jobs.alive & (jobs.time_limit_s > 0)
    end_ns = jobs.started_ns + np.round(jobs.time_limit_s * NS).astype(np.int64)
    return np.flatnonzero(limited & (end_ns > view.now_ns) & (end_ns <= until_ns))


def _node_work_w(view: View) -> F64:
    """What each node draws beyond idling [n_node]; 0 where unknown."""
    site, design = view.site, view.site.design
    rack = site.rack_of_node
    gpus = np.diff(site.gpu_start_of_node)
    idle_w = design.cpu_idle_w[rack] + design.node_other_w[rack] + gpus * design.gpu_idle_w[rack]
    power_w = good(view, "node.power_w")
    gpu_w = good(view, "gpu.power_w")
    if len(gpu_w):
        heard = np.isfinite(gpu_w)
        of_gpus = np.bincount(site.node_of_gpu, weights=np.where(heard, gpu_w, 0.0), minlength=len(rack))
        count = np.bincount(site.node_of_gpu, weights=heard, minlength=len(rack))
        all_heard = (count == gpus) & (gpus > 0)
        by_gpus = of_gpus + design.cpu_idle_w[rack] + design.node_other_w[rack]
        power_w = np.where(np.isfinite(power_w), power_w, np.where(all_heard, by_gpus, np.nan))
    return np.maximum(np.nan_to_num(power_w - idle_w), 0.0)


def falls(view: View, horizons_s: tuple[float, ...]) -> dict[str, F64]:
    """By how much each quantity falls until then, as jobs reach their limits: key -> [n_horizon, n].

    A rack by the work of its nodes; a CDU by the share of it that its liquid carries, a feeder by its share
    of the rack; the site by the sum.
    """
    site = view.site
    node_w = np.zeros((len(horizons_s), site.sizes["node"]))
    gpus = np.zeros(len(horizons_s))
    slots = [_ending(view, view.now_ns + round(h * NS)) for h in horizons_s]
    if any(len(s) for s in slots):
        work_w = _node_work_w(view)
        of_node = np.diff(site.gpu_start_of_node)
        for i, some in enumerate(slots):
            nodes = np.unique(np.concatenate([view.jobs.nodes[slot] for slot in some] or [[]])).astype(
                np.int64
            )
            node_w[i, nodes] = work_w[nodes]
            gpus[i] = of_node[nodes].sum()
    rack_w = np.array(
        [np.bincount(site.rack_of_node, weights=row, minlength=site.sizes["rack"]) for row in node_w]
    )
    served = (site.cdu_of_rack >= 0) & site.design.liquid
    carried_w = np.nan_to_num(rack_w * site.design.capture_pu)
    cdu_w = np.array(
        [np.bincount(site.cdu_of_rack[served], row[served], minlength=site.sizes["cdu"]) for row in carried_w]
    )
    return {
        "rack.power_w": rack_w,
        "cdu.heat_w": cdu_w,
        "feeder.power_w": _of_feeders(view, rack_w),
        "site.power_w": rack_w.sum(axis=1, keepdims=True),
        "site.gpu_demand_count": gpus[:, None],
        "site.gpu_running_count": gpus[:, None],
    }


def _of_feeders(view: View, rack_w: F64) -> F64:
    """Shares of racks that hang on a feeder directly, and on those below it [n_horizon, n_feeder]."""
    site = view.site
    feeds = np.diff(site.feeders_of_rack.start)
    rack = site.feeders_of_rack.row_of_member
    share = 1.0 / np.maximum(feeds, 1)
    n = site.sizes["feeder"]
    out = np.array(
        [np.bincount(site.feeders_of_rack.member, (row * share)[rack], minlength=n) for row in rack_w]
    )
    if n:
        # Children before parents: a feeder is deeper than the one above it.
        depth, above = np.zeros(n, np.int64), site.parent_of_feeder
        at = above
        while (at >= 0).any():
            depth += at >= 0
            at = np.where(at >= 0, above[np.maximum(at, 0)], -1)
        for level in range(int(depth.max(initial=0)), 0, -1):
            at_level = np.flatnonzero(depth == level)
            for row in out:
                row += np.bincount(above[at_level], row[at_level], minlength=n)
    return out
