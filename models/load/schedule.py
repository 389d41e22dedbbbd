"""Known changes ahead: jobs that reach their limits, and external outlooks.

Two experts beside those that read the past. `schedule` says: as now, less what the jobs draw whose time limit
will be over. `outlook` holds published values of this quantity. Neither is believed blindly: the blend
weighs them by how they did.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, NS
from twin.contracts import View, good

SCHEDULE = "schedule"
EXPERTS = (SCHEDULE, "outlook")


def _ending(view: View, horizon_s: float) -> np.ndarray:
    """Return the slots of jobs whose time limit ends within this time; a job past its limit has no known
    end."""
    jobs = view.jobs
    left_s = jobs.time_limit_s - (view.now_ns - jobs.running_since_ns(slice(None))) / NS
    return np.flatnonzero(jobs.alive & (jobs.time_limit_s > 0) & (left_s > 0) & (left_s <= horizon_s))


def _node_work_w(view: View) -> F64:
    """Power of each node beyond idling [n_node], W; 0 where unknown.

    By its own meter, else by those of all its GPUs; else the nodes of a rack that run jobs share what the
    rack draws beyond what is known of it.
    """
    site, design = view.site, view.site.design
    rack, n_rack = site.rack_of_node, site.sizes["rack"]
    gpus = np.diff(site.gpu_start_of_node)
    idle_w = design.cpu_idle_w[rack] + design.node_other_w[rack] + gpus * design.gpu_idle_w[rack]
    work_w = good(view, "node.power_w") - idle_w
    gpu_w = good(view, "gpu.power_w")
    if len(gpu_w):
        of_gpus = np.bincount(site.node_of_gpu, weights=gpu_w, minlength=len(rack))  # NaN if one is silent
        by_gpus = (of_gpus - gpus * design.gpu_idle_w[rack]) * (1.0 + design.node_loss_pu[rack])
        work_w = np.where(np.isnan(work_w) & (gpus > 0), by_gpus, work_w)
    known_w = np.bincount(rack, weights=idle_w + np.nan_to_num(work_w), minlength=n_rack)
    busy = np.isnan(work_w) & (view.jobs.job_of_node >= 0)
    sharing = np.bincount(rack[busy], minlength=n_rack)
    rest_w = good(view, "rack.power_w") - design.rack_overhead_w - known_w
    work_w = np.where(busy, (rest_w / np.maximum(sharing, 1))[rack], work_w)
    return np.maximum(np.nan_to_num(work_w), 0.0)


def _jobs_of_nodes(view: View, slots: np.ndarray) -> F64:
    """Number of these jobs on each node [n_node]."""
    nodes = [np.zeros(0, np.int32), *(view.jobs.nodes[slot] for slot in slots.tolist())]
    return np.bincount(np.concatenate(nodes), minlength=view.site.sizes["node"]).astype(np.float64)


def load_drops(view: View, horizons_s: tuple[float, ...]) -> dict[str, F64]:
    """By how much each quantity falls until then, as jobs reach their limits: key -> [n_horizon, n].

    A rack by the work of its nodes, which jobs on one node share; a CDU by the share of it that its liquid
    carries, a feeder by its share of the rack; the site by the sum.
    """
    site = view.site
    node_w = np.zeros((len(horizons_s), site.sizes["node"]))
    gpus = np.zeros(len(horizons_s))
    slots = [_ending(view, h) for h in horizons_s]
    if any(len(s) for s in slots):
        work_w = _node_work_w(view)
        of_node = np.diff(site.gpu_start_of_node)
        running = np.maximum(_jobs_of_nodes(view, np.flatnonzero(view.jobs.alive)), 1.0)
        for i, some in enumerate(slots):
            ending_pu = _jobs_of_nodes(view, some) / running
            node_w[i] = ending_pu * work_w
            gpus[i] = ending_pu @ of_node
    rack_w = np.array(
        [np.bincount(site.rack_of_node, weights=row, minlength=site.sizes["rack"]) for row in node_w]
    )
    served = (site.cdu_of_rack >= 0) & site.design.liquid
    carried_w = np.nan_to_num(rack_w * site.design.capture_pu)
    cdu_w = np.array(
        [np.bincount(site.cdu_of_rack[served], row[served], minlength=site.sizes["cdu"]) for row in carried_w]
    )
    hung = site.cdu_of_rack >= 0
    hung_w = np.array(
        [np.bincount(site.cdu_of_rack[hung], row[hung], minlength=site.sizes["cdu"]) for row in rack_w]
    )
    return {
        "rack.power_w": rack_w,
        "cdu.power_w": hung_w,
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
