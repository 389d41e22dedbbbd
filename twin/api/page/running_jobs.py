"""Running jobs: each with its nodes, training progress, straggler and number of capped GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import MAX_ROWS, answer, live_of, number_of
from twin.api.runtime import Runtime
from twin.catalogue import clean
from twin.goodput import expected_end
from twin.telemetry import KINDS

SHOWN_NODES = 64


async def jobs(request: web.Request) -> web.Response:
    """List the running jobs, those with the most nodes first."""
    live = live_of(request)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    slots, wanted = live.engine.jobs, request.query.get("name", "")
    found = [int(s) for s in np.flatnonzero(slots.alive) if wanted in slots.names[int(s)]]
    found.sort(key=lambda s: (-len(slots.nodes[s]), slots.names[s]))
    capped = _capped_of_nodes(live)
    more = offset + limit < len(found)
    return answer({"now_ns": live.engine.state.now_ns, "total": len(found), "offset": offset,
                   "next_offset": offset + limit if more else None,
                   "jobs": [_row(live, s, capped) for s in found[offset : offset + limit]]})  # fmt: skip


def job_of_slot(live: Runtime, slot: int) -> dict[str, Any]:
    """Return a running job as a row of `jobs`."""
    return _row(live, slot, _capped_of_nodes(live))


def _capped_of_nodes(live: Runtime) -> np.ndarray:
    """Return the capped GPUs of each node [n]."""
    site, lease = live.engine.site, live.engine.arbiter.leases.get("gpu.power_cap_w")
    if lease is None or not lease.n:
        return np.zeros(site.sizes["node"], np.int64)
    return np.bincount(site.node_of_gpu[lease.running()], minlength=site.sizes["node"])


def _row(live: Runtime, slot: int, capped: np.ndarray) -> dict[str, Any]:
    slots, site = live.engine.jobs, live.engine.site
    nodes = slots.nodes[slot]
    gpus = int((site.gpu_start_of_node[nodes + 1] - site.gpu_start_of_node[nodes]).sum()) if len(nodes) else 0
    return {
        "name": clean(slots.names[slot]), "entity": site.name("job", slot),
        "kind": KINDS[int(slots.kind[slot])], "priority": int(slots.priority[slot]),
        "tenant": clean(slots.tenants[slot]), "nodes": len(nodes), "gpus": gpus,
        "capped_gpus": int(capped[nodes].sum()),
        "node_names": [site.name("node", int(n)) for n in nodes[:SHOWN_NODES]],
        "started_ns": int(slots.running_since_ns(slot)) or None,
        "time_limit_s": float(slots.time_limit_s[slot]) or None,
        "saved_ns": int(slots.saved_ns[slot]) or None,
        "interval_s": float(slots.checkpoint_interval_s[slot]) or None,
        **_goodput(live, slot),
    }  # fmt: skip


def _goodput(live: Runtime, slot: int) -> dict[str, Any]:
    """Return a synchronous job's goodput, its expected end, and the member that it waits for."""
    engine = live.engine
    state, held = engine.goodput, engine.goodput.held_back(slot, engine.state, engine.jobs)
    end = expected_end(engine.state, engine.jobs, state, slot)
    return {
        "goodput_pu": state.goodput_pu(slot), "trained_s": float(state.trained_s[slot]),
        "still_s": float(state.still_s[slot]), "lost_s": float(state.lost_s[slot]),
        "restarts": int(state.restarts[slot]), "straggler_gpu_h": float(state.cost_gpu_h[slot]),
        "expected_end_ns": end and end.at_ns, "expected_end_by": end and end.by,
        "held_back_by": None if held is None else {
            "table": held.table, "entity": held.entity, "gpus": len(held.gpus), "slowdown": held.slowdown,
            "ends": held.ends or None, "since_ns": held.since_ns, "evidence": list(held.evidence),
        },
    }  # fmt: skip
