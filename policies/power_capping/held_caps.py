"""Held caps: the capped GPUs of a place, with the policy and the budget behind each cap, and its remedy.

The sources are the leases, the proposals in force and the budgets above each rack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies.power_capping.budgets import gain_of
from policies.power_capping.demand import CLASS_NAMES, classes
from policies.power_capping.headroom import (
    ADD_IT,
    CAP,
    NODE_CAP,
    SLACK_W,
    PowerState,
    cap_leases,
    capped_by,
    capped_of,
    first_to_bind,
    limit_from,
    limits_at,
    place_rows,
    policies_of,
)
from twin.catalogue import I32, I64, clean
from twin.contracts import LEASE_STATES, LeaseColumns, entities_within, finite
from twin.telemetry import GOOD

MAX_GROUPS = 50
CLASS_WORDS = {
    "idle": "has no job: cut first",
    "usual": "normal priority: cut after idle GPUs",
    "high": "high priority: cut after normal priority",
    "waited_for": "inference, which users wait for: cut last",
}
LIFTS = {
    "power_cap": "caps rise 30 to 60 s after there is room, once the cuts that make the room are carried out",
    "power_guard": "it raises caps step by step once the load has been below 90 % of the budget for a minute",
    "operator": "a person requested it: `racktwin control requests` lists the authors, `... withdraw` "
    "withdraws it",
}


class _CapReasons(NamedTuple):
    """The sentence of `sentences` by which a policy caps each GPU now [n_gpu]; -1 = none."""

    number: I64
    sentences: list[str]


@dataclass(frozen=True, slots=True)
class HeldCaps:
    """The caps of a place: counts, groups of GPUs that are capped alike, and caps that are only advised."""

    kind: str
    name: str
    gpus: int
    capped_gpus: int
    groups: list[dict[str, Any]]
    groups_total: int
    advised: list[dict[str, Any]]
    first: dict[str, Any] | None
    nodes: list[dict[str, Any]]
    notes: list[str]


def held_caps(state: PowerState, name: str) -> HeldCaps:
    """The caps of a rack, node, GPU, job or any place that holds GPUs. Raises ExplanationRefused."""
    site = state.view.site
    kind, full, inside = entities_within(state.view, name)
    gpus = inside.get("gpu", np.zeros(0, np.int32))
    above = _above(state, np.unique(site.rack_of_gpu[gpus]))
    capped = capped_of(state)[gpus]
    notes = [] if policies_of(state.request) else [ADD_IT]
    if not len(gpus):
        notes.append(f"{full} has no GPU: nothing in it can be capped")
    groups, groups_total = _groups(state, gpus[capped])
    return HeldCaps(
        kind,
        clean(full, 120),
        len(gpus),
        int(capped.sum()),
        groups,
        groups_total,
        _advised(state, gpus[~capped]),
        first_to_bind(place_rows(state, above[: 2 * MAX_GROUPS])),
        _node_caps(state, gpus),
        notes,
    )


def job_caps(state: PowerState) -> list[dict[str, Any]]:
    """Return the running jobs, last to be cut first: class, priority, caps and power of a GPU of each."""
    view, site, jobs = state.view, state.view.site, state.view.jobs
    of_gpu, n = jobs.job_of_node[site.node_of_gpu], jobs.n
    capped, own, class_of = capped_of(state), capped_by(state, CAP), classes(view, state.high_priority)
    cap_w, power_w = cap_leases(state)[0], view.believed("gpu.power_w")
    out: list[dict[str, Any]] = []
    counts = np.bincount(of_gpu[of_gpu >= 0], minlength=n)
    for slot in np.argsort(-counts, kind="stable")[:MAX_GROUPS].tolist():
        mine = np.flatnonzero(of_gpu == slot)
        if not jobs.alive[slot] or not len(mine):
            continue
        own_w = cap_w[mine[own[mine]]]
        known_w = power_w[mine][np.isfinite(power_w[mine])]
        out.append({
            "job": clean(jobs.names[slot] or f"job{slot}", 120), "class": CLASS_NAMES[int(class_of[mine[0]])],
            "priority": int(jobs.priority[slot]), "gpus": len(mine), "capped": int(capped[mine].sum()),
            "cap_w": float(own_w.min()) if len(own_w) else None,
            "power_w": float(known_w.mean()) if len(known_w) else None,
        })  # fmt: skip
    return sorted(out, key=lambda r: (-CLASS_NAMES.index(r["class"]), -r["priority"], r["job"]))


def _above(state: PowerState, racks: I32) -> list[int]:
    """Places that carry any of these racks, by either feed."""
    n = len(state.loads.now_w)
    found = [c.pairs.place[np.isin(c.pairs.rack, racks)] for c in (state.now, state.lost)]
    places = np.unique(np.concatenate(found))
    return [int(p) for p in places[places < n]]


def _cap_reasons(state: PowerState, owner: int) -> _CapReasons:
    """The reasons that a policy gives for its caps now."""
    n, high = state.view.site.sizes["gpu"], state.view.envelope(CAP).high
    number, sentences = np.full(n, -1, np.int64), list[str]()
    for p in state.request.policies[owner].proposals:
        if p.control == CAP and len(p.index):
            number[p.index[p.hi < high[p.index] - SLACK_W]] = len(sentences)
            sentences.append(clean(p.reason, 300))
    return _CapReasons(number, sentences)


def _groups(state: PowerState, gpus: I32) -> tuple[list[dict[str, Any]], int]:
    """Group capped GPUs by rack, policy, sentence, class and job."""
    view, policies = state.view, state.request.policies
    site, jobs, lease = view.site, view.jobs, state.request.leases(CAP)
    # A lease at the maximum caps nothing: such a GPU is in `nodes`, by the cap of its node
    gpus = gpus[capped_by(state, CAP)[gpus]]
    if not len(gpus) or lease is None:
        return [], 0
    class_of = classes(view, state.high_priority)
    reasons = {
        o: _cap_reasons(state, o) for o in np.unique(lease.owner[gpus]).tolist() if 0 <= o < len(policies)
    }
    owner = lease.owner[gpus].astype(np.int64)
    sentence = np.full(len(gpus), -1, np.int64)
    for o, given in reasons.items():
        sentence[owner == o] = given.number[gpus[owner == o]]
    columns = (
        site.rack_of_gpu[gpus],
        owner,
        sentence,
        class_of[gpus],
        jobs.job_of_node[site.node_of_gpu[gpus]],
    )
    key = np.stack([np.asarray(x, np.int64) for x in columns])
    kinds, where = np.unique(key, axis=1, return_inverse=True)
    where = where.reshape(-1)
    limits = limits_at(state, view.now_ns)
    lifts: dict[int, dict[str, Any]] = {}
    out = []
    for k in range(min(kinds.shape[1], MAX_GROUPS)):
        rack, who, at, of, slot = kinds[:, k].tolist()
        mine = gpus[where == k]
        policy = policies[who].name if 0 <= who < len(policies) else ""
        reason = reasons[who].sentences[at] if at >= 0 else ""
        place = _named(state, rack, reason)
        if place is not None and place not in lifts:
            lifts[place] = _lift(state, place, limits.target[place])
        full = lifts[place] if place is not None else {}
        class_name = CLASS_NAMES[of] if 0 <= of < len(CLASS_NAMES) else str(of)
        out.append({
            "rack": site.name("rack", rack), "gpus": len(mine), "first": site.name("gpu", int(mine[0])),
            **_figures(state, lease, mine), "policy": policy, "reason": reason,
            "releasing": at < 0, "class": class_name, "class_words": CLASS_WORDS.get(class_name, ""),
            "job": clean(jobs.names[slot] or f"job{slot}", 120) if slot >= 0 else None,
            "priority": int(jobs.priority[slot]) if slot >= 0 else None,
            "place": full.get("place"), "place_kind": full.get("kind"), "place_limit_w": full.get("limit_w"),
            "place_limit_from": full.get("limit_from"),
            "place_load_w": full.get("load_w"),
            "place_lost_w": full.get("lost_w"),
            "lift": _lift_words(full, policy, at < 0),
        })  # fmt: skip
    out.sort(key=lambda r: (-r["gpus"], r["rack"]))
    return out, int(kinds.shape[1])


def _figures(state: PowerState, lease: LeaseColumns, mine: I32) -> dict[str, Any]:
    """Return the range of caps, read-backs, power and maximum of these GPUs."""
    view = state.view
    value, high = lease.value[mine], view.site.envelopes[CAP].high[mine]
    back = np.where(view.quality("gpu.power_limit_w") == GOOD, view.value("gpu.power_limit_w"), np.nan)[mine]
    power = np.where(view.quality("gpu.power_w") == GOOD, view.believed("gpu.power_w"), np.nan)[mine]
    states = sorted({LEASE_STATES[s] for s in np.unique(lease.state[mine]).tolist() if s})
    return {"cap_low_w": float(value.min()), "cap_high_w": float(value.max()), "most_w": float(high.max()),
            "floor_w": float(view.site.envelopes[CAP].low[mine].min()),
            "read_back_w": float(np.nanmax(back)) if np.isfinite(back).any() else None,
            "power_w": float(np.nanmean(power)) if np.isfinite(power).any() else None,
            "states": ", ".join(states), "since_ns": int(lease.begun_ns[mine].min()),
            "expires_ns": int(lease.expires_ns[mine].min())}  # fmt: skip


def _named(state: PowerState, rack: int, reason: str) -> int | None:
    """The place above a rack that a sentence names, the longest name first."""
    site, found = state.view.site, None
    for place in _above(state, np.array([rack], np.int32)):
        name = state.now.name(site, place)
        if re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/-])", reason) and (
            found is None or len(name) > len(state.now.name(site, found))
        ):
            found = place
    return found


def _lift(state: PowerState, place: int, target: str) -> dict[str, Any]:
    """Return the place's limit, and the power it would need to carry for all caps below it to end."""
    view, site = state.view, state.view.site
    missing_w = np.where(capped_of(state), np.nan_to_num(view.envelope(CAP).high - cap_leases(state)[0]), 0.0)
    of_rack_w = site.sum_by_rack("gpu", missing_w) * gain_of(site)
    pairs = state.lost.pairs if state.loads.kind[place] == "feeder" else state.now.pairs
    here = pairs.place == place
    need_w = float(pairs.share[here] @ of_rack_w[pairs.rack[here]])
    limits = limits_at(state, view.now_ns)
    ends = {clean(t.name, 120): t.end_ns for t in view.load_targets()}.get(target)
    limit_w = min(limits.budget_w[place], limits.target_w[place])
    load_w, lost_w = state.loads.now_w[place], state.loads.lost_w[place]
    return {"place": state.now.name(site, place), "kind": state.loads.kind[place], "need_w": need_w,
            "limit_w": finite(limit_w),
            "load_w": finite(load_w),
            "lost_w": float(lost_w) if np.isfinite(lost_w) and state.loads.kind[place] == "feeder" else None,
            "limit_from": f"load target {target}" if target else limit_from(state, place, limits),
            "target": target, "target_ends_ns": ends}  # fmt: skip


def _lift_words(held: dict[str, Any], policy: str, releasing: bool) -> str:
    """Write the sentence that says when a cap ends."""
    then = LIFTS.get(policy, f"it ends when {policy or 'its owner'} no longer proposes it")
    if releasing:
        return f"it is being lifted: {then}"
    if not held:
        return then
    where = "for the site" if held["kind"] == "site" else f"at {held['place']}"
    words = (
        f"{held['need_w'] / 1e3:.1f} kW more {where}, or as much less other load, would lift all caps below"
    )
    if held["target"]:
        until = "ends or is withdrawn" if held["target_ends_ns"] else "is withdrawn"
        how = f"(`racktwin power withdraw {held['target']}`)"
        words = f"it ends when load target {held['target']} {until} {how}; {words}"
    return f"{words}; {then}"


def _advised(state: PowerState, gpus: I32) -> list[dict[str, Any]]:
    """Return the caps that policies propose for GPUs on which they may not act."""
    out: list[dict[str, Any]] = []
    high = state.view.envelope(CAP).high
    for policy in state.request.policies:
        if policy.authority == "act":
            continue
        for p in policy.proposals:
            if p.control != CAP:
                continue
            mine = np.isin(p.index, gpus) & (p.hi < high[p.index] - SLACK_W)
            if mine.any() and len(out) < MAX_GROUPS:
                out.append({"policy": policy.name, "authority": policy.authority, "gpus": int(mine.sum()),
                            "cap_low_w": float(p.hi[mine].min()), "cap_high_w": float(p.hi[mine].max()),
                            "reason": clean(p.reason, 300)})  # fmt: skip
    return out


def _node_caps(state: PowerState, gpus: I32) -> list[dict[str, Any]]:
    """Nodes among these that are capped as a whole, at most MAX_GROUPS."""
    site, (value, owner) = state.view.site, cap_leases(state, NODE_CAP)
    if not len(value) or not len(gpus):
        return []
    high, policies = state.view.envelope(NODE_CAP).high, state.request.policies
    nodes = np.unique(site.node_of_gpu[gpus])
    capped = nodes[(value < high - SLACK_W)[nodes]]
    return [{"node": site.name("node", i), "cap_w": float(value[i]), "most_w": float(high[i]),
             "policy": policies[owner[i]].name if 0 <= owner[i] < len(policies) else ""}
            for i in capped[:MAX_GROUPS].tolist()]  # fmt: skip
