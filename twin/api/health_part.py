"""One part explained: its verdict with the evidence, what is missing, how likely it fails, and what to do.

For a node, a GPU, a switch, a link, a pump or a supply; a CDU is its pumps, and a rack, hall or site the list
of its nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import Refused, answer, live_of
from twin.api.health import (
    CHANCE,
    Ranked,
    average_of,
    band,
    counted,
    forecast_of,
    heard_of,
    kinds_of,
    levels_of,
    looked,
    model_of,
    near,
    notes,
    number,
    page,
    part_row,
    parts_of,
    told,
)
from twin.api.runtime import Runtime
from twin.catalogue import NS, clean, duration, find_signal
from twin.contracts import ACTION_WORDS, ACTIONS, ATTRIBUTIONS, LEVELS, PAIRED, PARTS
from twin.health import SIGNALS, Heard, find, is_failure
from twin.report import health_texts as words

LOOKED_IN = (
    "node",
    "gpu",
    "switch",
    "link",
    "cdu",
    "rack",
    "hall",
    "supernode",
    "site",
)  # for a name, in order
SHOWN_FAULTS, SHOWN_FAILURES, SHOWN_PARTS, SHOWN_ROWS = 10, 10, 64, 50


async def health_of(request: web.Request) -> web.Response:
    """One part explained: verdict, evidence, what is missing, how likely it fails, history, what to do.

    The name is that of a node, GPU, switch, link or CDU, with `#pump1` or `#psu2` behind it that of a pump or
    supply; a rack, hall or site answers with its nodes.
    """
    return answer(of_name(live_of(request), request.match_info["name"]))


def of_name(live: Runtime, name: str) -> dict[str, Any]:
    """Explain the part that `name` stands for. Raises Refused, with similar names, if there is none."""
    site = live.engine.site
    owner, _, side = name.partition("#")
    if side:
        for part in PAIRED:
            row = site.entity(PARTS[part], owner)
            if row is not None and side in (f"{part}1", f"{part}2"):
                return part_tree(live, part, 2 * row + int(side[-1]) - 1)
    for table in LOOKED_IN if not side else ():
        row = site.entity(table, name.rstrip("/") if table != "site" else name)
        if row is None:
            continue
        if table in PARTS:
            return part_tree(live, table, row)
        if table == "cdu":
            return cdu_tree(live, row)
        return place_tree(live, table, row)
    alike = near(live, name)
    hint = f"; did you mean {', '.join(alike)}?" if alike else "; racktwin health lists what there is"
    raise Refused(404, f"no node, GPU, switch, link, CDU or rack {clean(name, 120)}{hint}")


def place_tree(live: Runtime, table: str, row: int) -> dict[str, Any]:
    """A rack, hall, supernode or site: its nodes, the worst first."""
    name = live.engine.site.name(table, row)
    total, rows = page(live, None, name, [], 0, SHOWN_ROWS)
    return {**looked(live), "kind": "place", "table": table, "name": name, "parts": parts_of(live, name),
            "total": total, "rows": rows, "model": model_of(live), "notes": notes(live)}  # fmt: skip


def cdu_tree(live: Runtime, row: int) -> dict[str, Any]:
    """A CDU: its pumps, what drifts, and how those are that it cools."""
    engine, site = live.engine, live.engine.site
    racks = np.flatnonzero(site.cdu_of_rack == row)
    concern = Ranked(live).concern
    cooled = np.isin(site.rack_of_node, racks)
    return {**looked(live), "kind": "cdu", "name": site.name("cdu", row),
            "parts": [part_row(live, "pump", i) for i in (2 * row, 2 * row + 1)],
            "evidence": [e for i in (2 * row, 2 * row + 1) for e in evidence(live, "pump", i)],
            "missing": missing(live, "pump", 2 * row), "remaining": remaining(live, "cdu", row),
            "faults": heard(live, "cdu", row), "diagnosis": diagnosis(live, [("cdu", row)]),
            "racks": [site.name("rack", int(r)) for r in racks[:SHOWN_PARTS]], "racks_total": len(racks),
            "cools": counted(concern[cooled]), "notes": [],
            "maintenance": engine.windows.mask("cdu") is not None and bool(
                engine.windows.mask("cdu")[row])}  # type: ignore[index]  # fmt: skip


def part_tree(live: Runtime, part: str, index: int) -> dict[str, Any]:
    """Everything about one part."""
    engine, site = live.engine, live.engine.site
    table, entity = PARTS[part], index // 2 if part in PAIRED else index
    owner, row = site.name(table, entity), part_row(live, part, index)
    said = evidence(live, part, index)
    lacking = missing(live, part, index)
    node = entity if table == "node" else int(site.node_of_gpu[entity]) if part == "gpu" else -1
    spared = engine.windows.mask(table)
    tree = {
        **looked(live), "kind": "part", **row, "owner": owner,
        "sure": words.sure(row["sure_pu"]) if row["level"] not in ("healthy", "unknown") else "",
        "age_s": (engine.state.now_ns - row["since_ns"]) / NS if row["since_ns"] else None,
        "evidence": said, "missing": lacking,
        "lowered": ATTRIBUTIONS[int(engine.health.health(part).lowered[index])] if part == "gpu" else "",
        "faults": heard(live, table, entity), "remaining": remaining(live, table, entity),
        "changes": words.changes(row["level"], row["action"], bool(lacking), part),
        "maintenance": bool(spared is not None and spared[entity]),
        "diagnosis": diagnosis(live, [(table, entity)]), "notes": notes(live),
    }  # fmt: skip
    tree["lowered_words"] = words.LOWERED_WORDS[tree["lowered"]] if tree["lowered"] else ""
    if node >= 0:
        tree |= {"node": site.name("node", node), "job": job(live, node), "chance": chances(live, node),
                 "model": model_of(live), "history": history(live, node),
                 "lemon": lemon(live, node)}  # fmt: skip
    if part == "node":
        tree["parts"], tree["parts_counts"] = below(live, node)
        gpus = range(int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1]))
        tree["diagnosis"] = diagnosis(live, [("node", node), *(("gpu", g) for g in gpus)])
    return tree


def evidence(live: Runtime, part: str, index: int) -> list[dict[str, Any]]:
    """List the evidence of a verdict, the gravest first; `missing` lists the missing inputs."""
    now_ns = live.engine.state.now_ns
    return [{"level": LEVELS[e.level], "text": told(e.text), "rule": e.rule, "source": told(e.source),
             "since_ns": e.since_ns, "age_s": (now_ns - e.since_ns) / NS if e.since_ns else None,
             "sure_pu": number(e.sure_pu)}
            for e in live.engine.health.verdicts.evidence(part, index)
            if not e.rule.startswith("missing:")]  # fmt: skip


def missing(live: Runtime, part: str, index: int) -> list[dict[str, Any]]:
    """List the inputs of a verdict that do not report now: since when, and their possible sources."""
    state, table = live.engine.state, PARTS[part]
    entity = index // 2 if part in PAIRED else index
    out = []
    for what, keys in kinds_of(part, index % 2):
        ever, now = heard_of(live, table, keys)
        if now[entity]:
            continue
        ages = [float(state.tables[table].age_s(signal, state.now_ns)[entity])
                for key in keys if (signal := find_signal(key)) is not None]  # fmt: skip
        since = duration(min(ages)) if ever[entity] else ""
        out.append({"what": what, "state": f"silent for {since}" if since else "never heard",
                    "connect": words.comes_from(keys[0])})  # fmt: skip
    return out


def heard(live: Runtime, table: str, entity: int) -> list[dict[str, Any]]:
    """The last faults of a device, the newest first; of a node, those of its GPUs too."""
    site, book = live.engine.site, live.engine.health.book
    found: list[tuple[str, Heard]] = [("", h) for h in book.of(table, entity)]
    if table == "node":
        first, last = int(site.gpu_start_of_node[entity]), int(site.gpu_start_of_node[entity + 1])
        found += [(f"gpu{g - first}", h) for g in range(first, last) for h in book.of("gpu", g)]
    found.sort(key=lambda pair: -pair[1].at_ns)
    now_ns, rows = live.engine.state.now_ns, []
    for of, h in found[:SHOWN_FAULTS]:
        entry = find(h.code, "gpu" if of else table, h.detail)
        rows.append({"of": of, "code": h.code, "label": entry.label, "means": entry.name,
                     "asks": "nothing" if entry.ignore else ACTION_WORDS[ACTIONS[entry.action]],
                     "source": entry.source, "times": h.times, "at_ns": h.at_ns,
                     "age_s": (now_ns - h.at_ns) / NS, "detail": clean(h.detail, 200)})  # fmt: skip
    return rows


def diagnosis(live: Runtime, entities: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """List the findings of the diagnosis on these entities."""
    from twin.diagnosis import finding_of

    found = [finding_of(f, live.engine.site) for f in live.engine.diagnosis.faults
             if (f.table, f.entity) in entities]  # fmt: skip
    return [{"id": f.id, "severity": f.severity, "title": told(f.title), "action": f.action}
            for f in found[:SHOWN_FAULTS]]  # fmt: skip


def remaining(live: Runtime, table: str, entity: int) -> list[dict[str, Any]]:
    """List the drifts of an entity with their remaining time."""
    wear = live.engine.health.wear
    said = [told(t) for t in wear.evidence(table, entity)]
    rows = [{"what": left.what, "mid_s": float(left.mid_s[entity]), "lo_s": number(left.lo_s[entity]),
             "hi_s": number(left.hi_s[entity]), "said": ""}
            for left in wear.remaining()
            if left.table == table and np.isfinite(left.mid_s[entity])]  # fmt: skip
    return [*rows, *({"what": "", "mid_s": None, "lo_s": None, "hi_s": None, "said": t} for t in said)]


def chances(live: Runtime, node: int) -> list[dict[str, Any]]:
    """The chance of failing within each horizon, with its interval, beside the fleet's average."""
    out = []
    for horizon_s in words.HORIZONS_S:
        forecast = forecast_of(live, CHANCE, horizon_s)
        if forecast is not None:
            out.append({"horizon_s": horizon_s, **band(forecast, node, average_of(forecast))})
    return out


def job(live: Runtime, node: int) -> str | None:
    """The job on a node."""
    jobs = live.engine.jobs
    slot = int(jobs.job_of_node[node])
    return clean(jobs.names[slot]) if slot >= 0 and jobs.alive[slot] else None


def history(live: Runtime, node: int) -> dict[str, Any]:
    """Failures, replacements and reboots of a node, as far as anybody watched."""
    engine, site = live.engine, live.engine.site
    log, state = engine.health.log(), engine.state
    mine = np.flatnonzero(log.node == node)
    rows = [{"class": log.classes[int(log.kind[i])], "start_ns": int(log.start_ns[i]),
             "end_ns": int(log.end_ns[i]) or None, "shared": bool(log.shared[i]),
             "lasted_s": (int(log.end_ns[i] or state.now_ns) - int(log.start_ns[i])) / NS}
            for i in mine[::-1][:SHOWN_FAILURES].tolist()]  # fmt: skip
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    reboots = find_signal("node.reboot_count")
    assert reboots is not None
    column = state.tables["node"]
    known = bool(column.raw[reboots.row, node] >= 0)
    return {"watched_s": (state.now_ns - log.begin_ns) / NS if log.begin_ns else None,
            "failures": rows, "failures_total": int(is_failure(log)[mine].sum()),
            "replaced": int(column.generation[node]),
            "gpus_replaced": int(state.tables["gpu"].generation[first:last].sum()),
            "serial": engine.intake.serials.get(f"node:{site.name('node', node)}"),
            "reboots": int(column.total[reboots.row, node]) if known else None}  # fmt: skip


def lemon(live: Runtime, node: int) -> dict[str, Any]:
    """Return the lemon verdict on a node, its evidence and its seven signals."""
    lemons = live.engine.health.lemons
    signals = lemons.signals()[node]
    return {"is": bool(lemons.is_lemon()[node]), "why": [told(t) for t in lemons.evidence(node)],
            "signals": [{"name": n, "words": words.SIGNAL_WORDS.get(n, n), "value": number(v)}
                        for n, v in zip(SIGNALS, signals, strict=True)]}  # fmt: skip


def below(live: Runtime, node: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
    """(GPUs, links and supplies of a node, the worst first; how many are at each level by kind)."""
    site = live.engine.site
    members = {
        "gpu": np.arange(site.gpu_start_of_node[node], site.gpu_start_of_node[node + 1]),
        "link": np.arange(*np.searchsorted(site.node_of_link, [node, node + 1])),
        "psu": np.arange(2 * node, 2 * node + 2),
    }
    rows, counts = [], {}
    for part, index in members.items():
        levels = levels_of(live, part)[index]
        counts[part] = counted(levels)
        order = index[np.argsort(-levels.astype(np.int64), kind="stable")][:SHOWN_PARTS]
        rows += [part_row(live, part, i) for i in order.tolist()]
    return rows, counts
