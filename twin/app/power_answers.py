"""Why: the cap of each GPU, who holds it there and by what budget, how much it matters, what would lift it.

Read from leases, from what policies propose now, and from the budgets above each rack. May import the core
and policies; changes nothing.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from policies.power_budgets import gain_of
from policies.power_demand import classes
from twin.app.api_answer import Refused
from twin.app.api_places import job_of
from twin.app.live import Live
from twin.app.power_headroom import (
    ADD_IT,
    CAP,
    NODE_CAP,
    SLACK_W,
    Ground,
    capped_of,
    first_to_bind,
    ground_of,
    limits_at,
    place_rows,
    policies_of,
)
from twin.app.power_worth import CLASS_NAMES
from twin.app.report_text import clean
from twin.frame import I32, I64
from twin.maintenance import below
from twin.state import GOOD

MAX_GROUPS = 50
TABLES = ("rack", "node", "gpu", "feeder", "cdu", "loop", "hall", "site")
STATES = ("", "sent", "accepted", "under way", "done", "failed", "expired")
CLASS_WORDS = {
    "idle": "has no job: cut first",
    "usual": "the usual: cut after what is idle",
    "high": "high priority: cut after the usual",
    "waited_for": "inference, which people wait for: cut last",
}
LIFTS = {
    "power_cap": "raises wait 30 to 60 s, and for the cuts whose place they take",
    "power_guard": "it gives back step by step once the load has been below 90 % of the budget for a minute",
    "operator": "a person asked for it: `racktwin requests` lists who, `racktwin withdraw` takes it back",
}


class _Said(NamedTuple):
    """What policies propose now for each GPU [n_gpu]: which sentence of `sentences`, -1 = none."""

    number: I64
    sentences: list[str]


def why(live: Live, name: str) -> dict[str, Any]:
    """The caps of a rack, node, GPU, job or whatever holds some. Raises Refused for a name of nothing."""
    engine, site = live.engine, live.engine.site
    kind, full, gpus = _gpus_of(live, name)
    ground = ground_of(engine)
    racks = np.unique(site.rack_of_gpu[gpus])
    above = _above(ground, racks)
    capped = capped_of(engine)[gpus]
    notes = [] if policies_of(live) else [ADD_IT]
    if not len(gpus):
        notes.append(f"{full} holds no GPU: nothing of it can be capped")
    mine = place_rows(live, ground, above[: 2 * MAX_GROUPS])
    groups, groups_total = _groups(live, ground, gpus[capped])
    advised = _advised(live, gpus[~capped])
    return {
        "site": site.file.site, "now_ns": engine.state.now_ns, "name": full, "kind": kind,
        "gpus": len(gpus), "capped_gpus": int(capped.sum()), "policies": policies_of(live),
        "groups": groups, "groups_total": groups_total, "advised": advised,
        "first": first_to_bind(mine), "nodes": _node_caps(live, gpus), "notes": notes,
    }  # fmt: skip


def _gpus_of(live: Live, name: str) -> tuple[str, str, I32]:
    """(kind, full name, GPUs) of a name. Raises Refused."""
    site = live.engine.site
    if name == "site":  # as headroom calls all racks together
        name = site.file.site
    slot = job_of(live, name)
    if slot is not None and live.engine.jobs.alive[slot]:
        mask = (live.engine.jobs.job_of_node == slot)[site.node_of_gpu]
        return "job", clean(live.engine.jobs.names[slot], 120), np.flatnonzero(mask).astype(np.int32)
    for table in TABLES:
        row = site.entity(table, name.rstrip("/"))
        if row is None:
            continue
        if table == "gpu":
            return table, site.name("gpu", row), np.array([row], np.int32)
        if table == "feeder":
            gpus = np.flatnonzero(np.isin(site.rack_of_gpu, site.racks_below(row))).astype(np.int32)
        elif table in ("cdu", "loop"):
            served = site.cdu_of_rack == row if table == "cdu" else np.isin(
                site.cdu_of_rack, np.flatnonzero(site.loop_of_cdu == row))  # fmt: skip
            gpus = np.flatnonzero(served[site.rack_of_gpu]).astype(np.int32)
        else:
            gpus = below(site, table, np.array([row], np.int32)).get("gpu", np.zeros(0, np.int32))
        return table, site.name(table, row), gpus
    raise Refused(404, f"no rack, node, GPU, feeder or job {clean(name, 120)}; `racktwin power` names places")


def _above(ground: Ground, racks: I32) -> list[int]:
    """Places that carry any of these racks, by either feed."""
    n = len(ground.loads.now_w)
    found = [c.pairs.place[np.isin(c.pairs.rack, racks)] for c in (ground.now, ground.lost)]
    places = np.unique(np.concatenate(found))
    return [int(p) for p in places[places < n]]


def _said(live: Live, policy: str) -> _Said:
    """What a policy proposes for each GPU now."""
    engine = live.engine
    n, high = engine.site.sizes["gpu"], engine.site.envelopes[CAP].high
    number, sentences = np.full(n, -1, np.int64), list[str]()
    for p in engine.in_force.get(policy, []):
        if p.control == CAP and len(p.index):
            number[p.index[p.hi < high[p.index] - SLACK_W]] = len(sentences)
            sentences.append(clean(p.reason, 300))
    return _Said(number, sentences)


def _groups(live: Live, ground: Ground, gpus: I32) -> tuple[list[dict[str, Any]], int]:
    """Capped GPUs, those alike together: same rack, policy, sentence, class and job."""
    engine, site = live.engine, live.engine.site
    lease, jobs = engine.arbiter.leases[CAP], engine.jobs
    gpus = gpus[lease.running()[gpus]]
    if not len(gpus):
        return [], 0
    class_of = classes(ground.view, _high(live))
    said = {o: _said(live, engine.policies[o].name) for o in np.unique(lease.owner[gpus]).tolist()
            if 0 <= o < len(engine.policies)}  # fmt: skip
    owner = lease.owner[gpus].astype(np.int64)
    sentence = np.full(len(gpus), -1, np.int64)
    for o, told in said.items():
        sentence[owner == o] = told.number[gpus[owner == o]]
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
    limits = limits_at(live, ground, engine.state.now_ns)
    lifts: dict[int, dict[str, Any]] = {}
    out = []
    for k in range(min(kinds.shape[1], MAX_GROUPS)):
        rack, who, at, of, slot = kinds[:, k].tolist()
        mine = gpus[where == k]
        policy = engine.policies[who].name if 0 <= who < len(engine.policies) else ""
        reason = said[who].sentences[at] if at >= 0 else ""
        place = _named(live, ground, rack, reason)
        if place is not None and place not in lifts:
            lifts[place] = _lift(live, ground, place, limits.target[place])
        held = lifts[place] if place is not None else {}
        class_name = CLASS_NAMES[of] if 0 <= of < len(CLASS_NAMES) else str(of)
        out.append({
            "rack": site.name("rack", rack), "gpus": len(mine), "first": site.name("gpu", int(mine[0])),
            **_figures(ground, lease, mine), "policy": policy, "reason": reason,
            "releasing": at < 0, "class": class_name, "class_words": CLASS_WORDS.get(class_name, ""),
            "job": clean(jobs.names[slot] or f"job{slot}", 120) if slot >= 0 else None,
            "priority": int(jobs.priority[slot]) if slot >= 0 else None,
            "place": held.get("place"), "place_kind": held.get("kind"), "place_limit_w": held.get("limit_w"),
            "place_load_w": held.get("load_w"),
            "place_lost_w": held.get("lost_w"),
            "lift": _lift_words(held, policy, at < 0),
        })  # fmt: skip
    out.sort(key=lambda r: (-r["gpus"], r["rack"]))
    return out, int(kinds.shape[1])


def _figures(ground: Ground, lease: Any, mine: I32) -> dict[str, Any]:
    """Caps, what is read back, power, the most: lowest and highest of these GPUs."""
    view = ground.view
    value, high = lease.value[mine], view.site.envelopes[CAP].high[mine]
    back = np.where(view.quality("gpu.power_limit_w") == GOOD, view.value("gpu.power_limit_w"), np.nan)[mine]
    power = np.where(view.quality("gpu.power_w") == GOOD, view.value("gpu.power_w"), np.nan)[mine]
    states = sorted({STATES[s] for s in np.unique(lease.state[mine]).tolist() if 0 < s < len(STATES)})
    return {"cap_low_w": float(value.min()), "cap_high_w": float(value.max()), "most_w": float(high.max()),
            "floor_w": float(view.site.envelopes[CAP].low[mine].min()),
            "read_back_w": float(np.nanmax(back)) if np.isfinite(back).any() else None,
            "power_w": float(np.nanmean(power)) if np.isfinite(power).any() else None,
            "states": states, "since_ns": int(lease.changed_ns[mine].min()),
            "expires_ns": int(lease.expires_ns[mine].min())}  # fmt: skip


def _named(live: Live, ground: Ground, rack: int, reason: str) -> int | None:
    """The place above a rack that a sentence names, the longest name first."""
    site, found = live.engine.site, None
    for place in _above(ground, np.array([rack], np.int32)):
        name = ground.now.name(site, place)
        if re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/-])", reason) and (
            found is None or len(name) > len(ground.now.name(site, found))
        ):
            found = place
    return found


def _lift(live: Live, ground: Ground, place: int, target: str) -> dict[str, Any]:
    """What a place holds back, and how much more it would have to carry for all caps below it to go."""
    engine, view, site = live.engine, ground.view, live.engine.site
    lease, high = engine.arbiter.leases[CAP], engine.site.envelopes[CAP].high
    missing_w = np.where(capped_of(engine) & lease.running(), np.nan_to_num(high - lease.value), 0.0)
    of_rack_w = site.sum_by_rack("gpu", missing_w) * gain_of(site)
    pairs = ground.lost.pairs if ground.loads.kind[place] == "feeder" else ground.now.pairs
    here = pairs.place == place
    need_w = float(pairs.share[here] @ of_rack_w[pairs.rack[here]])
    limits = limits_at(live, ground, engine.state.now_ns)
    ends = {clean(t.name, 120): t.end_ns for t in view.load_targets()}.get(target)
    limit_w = min(limits.budget_w[place], limits.target_w[place])
    load_w, lost_w = ground.loads.now_w[place], ground.loads.lost_w[place]
    return {"place": ground.now.name(site, place), "kind": ground.loads.kind[place], "need_w": need_w,
            "limit_w": float(limit_w) if np.isfinite(limit_w) else None,
            "load_w": float(load_w) if np.isfinite(load_w) else None,
            "lost_w": float(lost_w) if np.isfinite(lost_w) and ground.loads.kind[place] == "feeder" else None,
            "target": target, "target_ends_ns": ends}  # fmt: skip


def _lift_words(held: dict[str, Any], policy: str, releasing: bool) -> str:
    """What would lift a cap, in a sentence."""
    then = LIFTS.get(policy, f"it goes when {policy or 'whoever holds it'} asks for it no more")
    if releasing:
        return f"it is on its way back: {then}"
    if not held:
        return then
    where = "for the site" if held["kind"] == "site" else f"at {held['place']}"
    words = (
        f"{held['need_w'] / 1e3:.1f} kW more {where}, or as much less other load, would lift all caps below"
    )
    if held["target"]:
        until = "ends or is withdrawn" if held["target_ends_ns"] else "is withdrawn"
        how = f"(`racktwin power withdraw {held['target']}`)"
        words = f"it goes when load target {held['target']} {until} {how}; {words}"
    return f"{words}; {then}"


def _advised(live: Live, gpus: I32) -> list[dict[str, Any]]:
    """What policies would do to GPUs that they may not touch."""
    engine, out = live.engine, list[dict[str, Any]]()
    high = engine.site.envelopes[CAP].high
    for policy in engine.policies:
        if engine.intake.authority[policy.name] == "act":
            continue
        for p in engine.in_force.get(policy.name, []):
            if p.control != CAP:
                continue
            mine = np.isin(p.index, gpus) & (p.hi < high[p.index] - SLACK_W)
            if mine.any() and len(out) < MAX_GROUPS:
                out.append({"policy": policy.name, "authority": engine.intake.authority[policy.name],
                            "gpus": int(mine.sum()), "cap_low_w": float(p.hi[mine].min()),
                            "cap_high_w": float(p.hi[mine].max()),
                            "reason": clean(p.reason, 300)})  # fmt: skip
    return out


def _node_caps(live: Live, gpus: I32) -> list[dict[str, Any]]:
    """Nodes among these that are capped as a whole, at most MAX_GROUPS."""
    engine, site = live.engine, live.engine.site
    lease = engine.arbiter.leases.get(NODE_CAP)
    if lease is None or not lease.n or not len(gpus):
        return []
    high = site.envelopes[NODE_CAP].high
    nodes = np.unique(site.node_of_gpu[gpus])
    held = nodes[(lease.running() & (lease.value < high - SLACK_W))[nodes]]
    names = dict(enumerate(p.name for p in engine.policies))
    return [{"node": site.name("node", i), "cap_w": float(lease.value[i]), "most_w": float(high[i]),
             "policy": names.get(int(lease.owner[i]), "")}
            for i in held[:MAX_GROUPS].tolist()]  # fmt: skip


def _high(live: Live) -> int:
    """From where the priority of a job is high, as the policy was told."""
    policy = next((p for p in live.engine.policies if p.name == "power_cap"), None)
    return int(getattr(policy, "high_priority", 1))
