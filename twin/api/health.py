"""Health over HTTP: levels of all parts, the most urgent ones, unknown ones, and expected failures.

One part is explained with its verdict, the evidence, what is missing and what to do. Answers are pages or
have a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import MAX_ROWS, Refused, answer, listed, live_of, number_of
from twin.api.runtime import Runtime
from twin.api.scopes import held_by, suggestion
from twin.catalogue import F64, I64, NS, TABLES, U8, Bool, clean, duration, signal_of, utc
from twin.contracts import (
    ACTION_WORDS,
    ACTIONS,
    ATTRIBUTIONS,
    FAILED,
    LEVELS,
    PAIRED,
    PARTS,
    UNKNOWN,
    WATCH,
    Forecast,
    drained_words,
    finite,
    is_failure,
    name_of_part,
    todo_words,
)
from twin.health import NVLINK_RULES, PORTS, SIGNALS, SPECS, ReportedFault, find
from twin.report import health_texts as words, why
from twin.site import lost_with, scale_up_blast
from twin.telemetry import GOOD

CHANCE, EXPECTED, DAY_S = "node.failure_pu", "site.node_failure_count", 86_400.0
SHOWN_WORST, SHOWN_FEW = 20, 6
MAX_TEXT = 400
SERVICE, DRAINED = "node.service_level", 3.0
DRAIN_FIRST = "drain the node"  # how actions begin that a drain has begun already
STANDS_OUT = 3.0  # times the fleet's average chance of failing, from which on a well node is shown
LOOKED_IN = (
    "node",
    "gpu",
    "switch",
    "link",
    "cdu",
    "rack",
    "hall",
    "supernode",
    "loop",
    "feeder",
    "storage",
    "site",
)  # for a name, in order
EQUIPMENT = ("cdu", "loop", "feeder", "storage")  # without a verdict of its own
SHOWN_FAULTS, SHOWN_FAILURES, SHOWN_PARTS, SHOWN_ROWS = 10, 10, 64, 50


# -- what was judged, in columns


def levels_of(live: Runtime, part: str) -> U8:
    """Return the levels of all parts of a kind [n]."""
    return live.engine.health.health(part).level


def node_concern(live: Runtime) -> U8:
    """Return the worst level of each node and its GPUs [n_node]."""
    worst = levels_of(live, "node").copy()
    gpus = levels_of(live, "gpu")
    raised = np.flatnonzero(gpus > 0)
    np.maximum.at(worst, live.engine.site.node_of_gpu[raised], gpus[raised])
    return worst


def counted(levels: U8) -> dict[str, int]:
    """Count the parts at each level."""
    return dict(zip(LEVELS, np.bincount(levels, minlength=len(LEVELS)).tolist(), strict=True))


def forecast_of(live: Runtime, key: str, horizon_s: float) -> Forecast | None:
    """Return a forecast in force."""
    return live.engine.forecasts.get((key, horizon_s))


def average_of(forecast: Forecast | None) -> float | None:
    """Return the mean over all nodes with a forecast; None for none."""
    if forecast is None:
        return None
    known = forecast.mean[np.isfinite(forecast.mean)].astype(np.float64)
    return float(known.mean()) if len(known) else None


def failed_since(live: Runtime) -> I64:
    """Return the instant from which each node has failed, ns [n_node]; 0 for a node that has not.

    A node has failed by its own verdict, by that of one of its GPUs, or by the log of failures. The forecast
    of the model is up to a minute older than these, so it does not decide.
    """
    health, site = live.engine.health, live.engine.site
    never = np.iinfo(np.int64).max
    since: I64 = np.full(site.sizes["node"], never)
    failed = health.failed_nodes(live.engine.diagnosis)
    for part in ("node", "gpu"):
        verdict = health.health(part)
        at = np.flatnonzero(verdict.level == FAILED)
        nodes = at if part == "node" else site.node_of_gpu[at]
        of_failed = failed[nodes]
        np.minimum.at(since, nodes[of_failed], verdict.since_ns[at[of_failed]])
    log = health.log()
    lasting = (log.end_ns == 0) & is_failure(log)
    np.minimum.at(since, log.node[lasting], log.start_ns[lasting])
    return np.where(since == never, 0, np.maximum(since, 1))


def failed_words(live: Runtime, node: int, since_ns: int) -> str:
    """Return a predicate on a node that has failed, such as "has failed since ..."; "" for one that has not.

    The log gives no start to a node that was never reported healthy, and an end only after a while.
    """
    if not since_ns:
        return ""
    well_ns, end_ns = (int(at_ns[node]) for at_ns in live.engine.health.failures.well_again())
    if well_ns > since_ns:
        until = f"counts as failed until {utc(end_ns)} UTC"
        return f"failed at {utc(since_ns)} UTC, is well since {utc(well_ns)} UTC and {until}"
    if since_ns < live.engine.health.log().begin_ns:
        return "has failed; it was never reported healthy"
    return f"has failed since {utc(since_ns)} UTC"


def band(
    forecast: Forecast | None, entity: int, average: float | None = None, failed: bool = False
) -> dict[str, Any]:
    """Return mean, interval and comparison with the average of one entity; none of these of one that has
    failed."""
    if forecast is None or failed:
        return {"mean": None, "lo": None, "hi": None, "average": None, "said": "", "basis": ""}
    mean, low, high = (finite(x[entity]) for x in (forecast.mean, forecast.lo, forecast.hi))
    return {"mean": mean, "lo": low, "hi": high, "average": average, "said": words.times(mean, average),
            "basis": evidence_text(why(forecast.basis))}  # fmt: skip


def evidence_text(text: str) -> str:
    """Return evidence as safe text: it may quote a device."""
    return clean(text, MAX_TEXT)


# -- rows


def reason_of(live: Runtime, part: str, index: int) -> str:
    """Return the gravest sentence about a part, with figures; "" for none.

    What is missing is a reason only where the part is unknown; its past is none.
    """
    unknown = int(live.engine.health.health(part).level[index]) == UNKNOWN
    found = (e.text for e in live.engine.health.verdicts.evidence(part, index)
             if e.rule != "history" and (unknown or not e.rule.startswith("missing:")))  # fmt: skip
    return evidence_text(next(found, ""))


def part_row(live: Runtime, part: str, index: int) -> dict[str, Any]:
    """Return a part as a row."""
    verdict = live.engine.health.health(part)
    owner = live.engine.site.name(PARTS[part], index // 2 if part in PAIRED else index)
    action = ACTIONS[int(verdict.action[index])]
    return {"part": part, "name": name_of_part(part, index, owner),
            "level": LEVELS[int(verdict.level[index])], "since_ns": int(verdict.since_ns[index]),
            "sure_pu": finite(verdict.sure_pu[index]), "action": action,
            "do": _todo(live, part, index, action), "why": reason_of(live, part, index)}  # fmt: skip


def drained(live: Runtime) -> Bool:
    """Return the nodes that racktwin drained [n_node]."""
    lease = live.engine.arbiter.leases.get(SERVICE)
    return np.zeros(live.engine.site.sizes["node"], np.bool_) if lease is None else lease.value >= DRAINED


def _todo(live: Runtime, part: str, index: int, action: str) -> str:
    """Return what people do about a part; a node that is drained already is not to be drained first."""
    words, site = todo_words(action, part), live.engine.site
    node = index if part == "node" else int(site.node_of_gpu[index]) if part == "gpu" else -1
    if node < 0 or not words.startswith(DRAIN_FIRST) or not drained(live)[node]:
        return words
    return drained_words(site.name("node", node)).removesuffix(".")


def node_row(ranked: Ranked, node: int) -> dict[str, Any]:
    """Return a node as a row: by its GPU if that is worse than the node as a whole."""
    live, concern, lemon = ranked.live, int(ranked.concern[node]), bool(ranked.lemon[node])
    site, part, index = live.engine.site, "node", node
    if concern > int(levels_of(live, "node")[node]):
        first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
        part, index = "gpu", first + int(np.argmax(levels_of(live, "gpu")[first:last]))
    row = part_row(live, part, index)
    if part == "gpu":
        row["why"] = f"gpu{index - int(site.gpu_start_of_node[node])}: {row['why'] or row['level']}"
    elif concern < WATCH and lemon:
        row["why"] = evidence_text((live.engine.health.lemons.evidence(node) or ("a lemon",))[0])
    since_ns = int(ranked.failed_ns[node])
    day = band(forecast_of(live, CHANCE, DAY_S), node, ranked.average, since_ns > 0)
    return row | {"part": "node", "name": site.name("node", node), "day": day, "lemon": lemon,
                  "failed_since_ns": since_ns or None,
                  "failed_words": failed_words(live, node, since_ns)}  # fmt: skip


class Ranked:
    """Nodes in order of urgency."""

    def __init__(self, live: Runtime) -> None:
        self.live, self.concern = live, node_concern(live)
        self.lemon: Bool = live.engine.health.lemons.is_lemon()
        forecast = forecast_of(live, CHANCE, DAY_S)
        self.average = average_of(forecast)
        self.failed_ns = failed_since(live)
        self.chance: F64 = np.zeros(len(self.concern))
        if forecast is not None:
            self.chance = np.nan_to_num(forecast.mean.astype(np.float64), nan=0.0)
            self.chance[self.failed_ns > 0] = 0.0

    def stand_out(self) -> np.ndarray:
        """Nodes not well, lemons, and those far likelier to fail than the average."""
        far = self.chance >= STANDS_OUT * self.average if self.average else np.False_
        return np.flatnonzero((self.concern >= WATCH) | self.lemon | far | (self.failed_ns > 0))

    def order(self, nodes: np.ndarray) -> np.ndarray:
        """The worst first: by level, then lemons, then by the chance of failing within a day."""
        keys = (nodes, -self.chance[nodes], ~self.lemon[nodes], -self.concern[nodes].astype(np.int64))
        return nodes[np.lexsort(keys)]

    def rows(self, nodes: np.ndarray) -> list[dict[str, Any]]:
        """These nodes, each in a line."""
        return [node_row(self, i) for i in nodes.tolist()]


# -- the whole


def expected(live: Runtime) -> list[dict[str, Any]]:
    """Return the expected number of node failures within each horizon, with a 90 % interval."""
    return [{"horizon_s": h, **{k: b[k] for k in ("mean", "lo", "hi", "basis")}}
            for h in words.HORIZONS_S if (f := forecast_of(live, EXPECTED, h)) is not None
            and (b := band(f, 0))["mean"] is not None]  # fmt: skip


def model_of(live: Runtime) -> str:
    """Return the model behind the chances, with the hash of its parameters."""
    forecast = forecast_of(live, CHANCE, DAY_S)
    return "" if forecast is None else forecast.model


def reporting_of(live: Runtime, table: str, keys: Sequence[str]) -> tuple[Bool, Bool]:
    """Return masks [n] of entities that ever reported any of these signals, and that report one now."""
    state, n = live.engine.state, live.engine.site.sizes[table]
    column, ever, now = state.tables[table], np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    for key in keys:
        signal = TABLES[table].by_name[key.partition(".")[2]]
        if signal.kind == "counter":
            ever |= column.raw[signal.row] >= 0
        else:
            ever |= np.isfinite(column.value[signal.row])
        now |= column.quality_of(signal, state.now_ns) == GOOD
    return ever, now


def kinds_of(part: str, side: int = 0) -> list[tuple[str, tuple[str, ...]]]:
    """Return the inputs of a verdict on a part (of a pair, on a side), each with its alternative signals."""
    return [
        (what, tuple(k.replace("{side}", str(side + 1)) for k in keys)) for what, keys in SPECS[part].kinds
    ]


def fitted(live: Runtime, part: str) -> np.ndarray:
    """Return the parts of a kind that there are, ascending: of DPUs, which a node need not have, those that
    ever reported anything.
    """
    if part != "dpu":
        return np.arange(len(levels_of(live, part)))
    ever = []
    for side in (0, 1):
        every = [key for _, keys in kinds_of(part, side) for key in keys]
        ever.append(reporting_of(live, PARTS[part], every)[0])
    return np.flatnonzero(np.stack(ever, axis=1))


def unknown(live: Runtime) -> list[dict[str, Any]]:
    """Return for each kind of part the number of unknown ones, their missing signals and the possible
    sources."""
    out = []
    for part, table in PARTS.items():
        there = fitted(live, part)
        levels = levels_of(live, part)[there]
        count = int(np.count_nonzero(levels == UNKNOWN))
        if count == 0:
            continue
        missing = []
        for what, keys in kinds_of(part):
            ever, now = reporting_of(live, table, keys)
            if part == "dpu":  # of the first of each node that has one
                ever, now = (mask[there[there % 2 == 0] // 2] for mask in (ever, now))
            if not now.all():
                missing.append({"what": what, "never": int((~ever).sum()),
                                "silent": int((ever & ~now).sum()), "of": len(ever),
                                "connect": words.comes_from(keys[0])})  # fmt: skip
        out.append({"part": part, "unknown": count, "of": len(levels), "missing": missing})
    return out


def failures(live: Runtime) -> dict[str, Any]:
    """Return the remembered failures: by class, still lasting, and with a common cause."""
    log = live.engine.health.log()
    real = is_failure(log)  # a node that people took out of service, or whose job failed, is none
    kinds = np.bincount(log.kind[real], minlength=len(log.classes)).tolist()
    last = (log.end_ns == 0) & real
    together = np.unique(log.node[last & log.shared])
    return {"since_ns": log.begin_ns, "total": int(real.sum()), "shared": int((log.shared & real).sum()),
            "by_class": {k: n for k, n in zip(log.classes, kinds, strict=True) if n},
            "down": len(np.unique(log.node[last])), "down_together": len(together),
            "together": [live.engine.site.name("node", int(i)) for i in together[:SHOWN_FEW]]}  # fmt: skip


def wear(live: Runtime, most: int = SHOWN_WORST) -> list[dict[str, Any]]:
    """List the remaining life of parts that drift towards a limit, the shortest first."""
    rows = []
    for left in live.engine.health.wear.remaining():
        known = np.flatnonzero(np.isfinite(left.mid_s))
        for i in known[np.argsort(left.mid_s[known], kind="stable")][:most].tolist():
            rows.append({"what": left.what, "name": live.engine.site.name(left.table, i),
                         "mid_s": float(left.mid_s[i]), "lo_s": finite(left.lo_s[i]),
                         "hi_s": finite(left.hi_s[i])})  # fmt: skip
    return sorted(rows, key=lambda r: float(str(r["mid_s"])))[:most]


def lowered(live: Runtime) -> dict[str, int]:
    """Return the GPUs with a limited clock, by cause."""
    counts = np.bincount(live.engine.health.health("gpu").lowered, minlength=len(ATTRIBUTIONS)).tolist()
    return {by: n for by, n in zip(ATTRIBUTIONS[1:], counts[1:], strict=True) if n}


def notes(live: Runtime) -> list[str]:
    """List the caveats of the health answer."""
    engine, out = live.engine, []
    if engine.health.looked_ns == 0:
        out.append("no health verdict yet: the first check follows the first tick")
    if forecast_of(live, CHANCE, DAY_S) is None:
        named = "failure" in engine.models
        suspended = "failure" in engine.suspended
        out.append("no forecasts of failures: the model failed and is suspended; racktwin alarm list says why"
                   if suspended else "no forecasts of failures yet" if named else
                   "no forecasts of failures: the site file names no model `failure`")  # fmt: skip
    return out


def judged_at(live: Runtime) -> dict[str, Any]:
    """Return the instant at which all parts were last judged."""
    engine = live.engine
    age_s = (engine.state.now_ns - engine.health.looked_ns) / NS if engine.health.looked_ns else None
    return {"tick": engine.state.tick, "now_ns": engine.state.now_ns, "judged_s": age_s}


def block(live: Runtime) -> dict[str, Any]:
    """Return the health of the summary, renewed once a second: counts, worst nodes, failures expected in a
    day."""
    ranked = Ranked(live)
    first = ranked.stand_out()
    day = [e for e in expected(live) if e["horizon_s"] == DAY_S]
    return {"parts": parts_of(live), "stand_out": len(first),
            "worst": ranked.rows(ranked.order(first)[:SHOWN_FEW]),
            "lemons": int(ranked.lemon.sum()), "expected_day": day[0] if day else None}  # fmt: skip


async def health(request: web.Request) -> web.Response:
    """Return the health of all parts, the worst first, the unknown parts, and the expected failures.

    Without a filter, `rows` are the nodes that stand out: not well, lemons, or far likelier to fail than the
    average. With `part`, `prefix` or `level`, all that match.
    """
    live, part, prefix = live_of(request), request.query.get("part"), request.query.get("prefix", "")
    wanted = listed(request, "level")
    if part is not None and part not in PARTS:
        raise Refused(400, f"no part {clean(part, 40)}; expected one of {', '.join(PARTS)}")
    if strange := [w for w in wanted if w not in LEVELS]:
        raise Refused(400, f"no level {clean(strange[0], 40)}; expected one of {', '.join(LEVELS)}")
    offset = number_of(request, "offset", 0, 0, 10**9)
    limit = number_of(request, "limit", SHOWN_WORST, 1, MAX_ROWS)
    total, rows = page(live, part, prefix, wanted, offset, limit)
    return answer({**whole(live, prefix), "total": total, "offset": offset, "limit": limit,
                   "next_offset": offset + limit if offset + limit < total else None,
                   "rows": rows})  # fmt: skip


def whole(live: Runtime, prefix: str = "") -> dict[str, Any]:
    """Return the answer without its rows; with counts of a place, if one is given."""
    lemons = np.flatnonzero(live.engine.health.lemons.is_lemon())
    return {**judged_at(live), "site": live.engine.site.file.site, "prefix": prefix,
            "parts": parts_of(live, prefix),
            "lemons": {"total": len(lemons),
                       "names": [live.engine.site.name("node", i) for i in lemons[:SHOWN_WORST].tolist()]},
            "lowered": lowered(live), "unknown": unknown(live), "expected": expected(live),
            "average_day": average_of(forecast_of(live, CHANCE, DAY_S)),
            "model": model_of(live), "failures": failures(live), "wear": wear(live),
            "faults": dict(live.engine.health.book.counts), "notes": notes(live)}  # fmt: skip


def parts_of(live: Runtime, prefix: str = "") -> dict[str, dict[str, int]]:
    """Count the parts of each kind by level, on the site or at a place of it."""
    out = {}
    for part, table in PARTS.items():
        there = fitted(live, part)
        if live.engine.site.sizes[table] and (len(there) or part != "dpu"):
            out[part] = counted(levels_of(live, part)[_members(live, part, prefix) if prefix else there])
    return out


def page(
    live: Runtime, part: str | None, prefix: str, levels: list[str], offset: int, limit: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return (number of matches, the rows of this page), the worst first."""
    keep = np.isin(np.arange(len(LEVELS)), [LEVELS.index(w) for w in levels]) if levels else None
    if part in (None, "node"):
        ranked = Ranked(live)
        if part is None and not prefix and keep is None:
            nodes = ranked.stand_out()
        else:
            nodes = _members(live, "node", prefix)
        if keep is not None:
            nodes = nodes[keep[ranked.concern[nodes]]]
        return len(nodes), ranked.rows(ranked.order(nodes)[offset : offset + limit])
    assert part is not None
    index, of = _members(live, part, prefix), levels_of(live, part)
    if keep is not None:
        index = index[keep[of[index]]]
    index = index[np.argsort(-of[index].astype(np.int64), kind="stable")]
    return len(index), [part_row(live, part, i) for i in index[offset : offset + limit].tolist()]


def _members(live: Runtime, part: str, prefix: str) -> np.ndarray:
    table = PARTS[part]
    n = live.engine.site.sizes[table]
    index = held_by(live, table, prefix) if prefix and n else np.arange(n)
    mine = np.stack((2 * index, 2 * index + 1), axis=1).ravel() if part in PAIRED else index
    return np.intersect1d(mine, fitted(live, part)) if part == "dpu" else mine


# -- names


async def health_of(request: web.Request) -> web.Response:
    """Explain the health of one part: verdict, evidence, missing inputs, chance of failure, history, remedy.

    The name is that of a node, GPU, switch or link, with `#pump1`, `#psu2` or `#dpu1` behind it that of a
    pump, supply or DPU; a CDU, loop, feeder or storage answers with whom it serves, a rack, hall or site with
    its nodes.
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
    if (link := nvlink_of(live, name)) is not None:
        return nvlink_tree(live, *link)
    for table in LOOKED_IN if not side else ():
        row = site.entity(table, name.rstrip("/") if table != "site" else name)
        if row is None:
            continue
        if table in PARTS:
            return part_tree(live, table, row)
        if table in EQUIPMENT:
            return equipment_tree(live, table, row)
        return place_tree(live, table, row)
    hint = _job_hint(live, name) or suggestion(live, name) or "; racktwin device health lists all names"
    kinds = "node, GPU, switch, link, rack, hall, CDU, loop, feeder or storage"
    raise Refused(404, f"no {kinds} {clean(name, 120)}{hint}")


def _job_hint(live: Runtime, name: str) -> str:
    """Return a hint to the nodes of a job, for a query about the job's health."""
    jobs, site = live.engine.jobs, live.engine.site
    slot = jobs.names.index(name) if name in jobs.names else site.entity("job", name)
    nodes = np.flatnonzero(jobs.job_of_node == slot) if slot is not None else np.zeros(0, np.int64)
    if not len(nodes):
        return ""
    first = site.name("node", int(nodes[0]))
    return f"; it is a job on {len(nodes)} nodes: ask for one of them, such as {first}"


def place_tree(live: Runtime, table: str, row: int) -> dict[str, Any]:
    """Return a rack, hall, supernode or site: its nodes, the worst first."""
    name = live.engine.site.name(table, row)
    total, rows = page(live, None, name, [], 0, SHOWN_ROWS)
    return {**judged_at(live), "kind": "place", "table": table, "name": name, "parts": parts_of(live, name),
            "total": total, "rows": rows, "model": model_of(live), "notes": notes(live)}  # fmt: skip


def equipment_tree(live: Runtime, table: str, row: int) -> dict[str, Any]:
    """Return a CDU, loop, feeder or storage: silent signals, drifts, and the state of the nodes that it
    serves.

    A CDU has its pumps as well.
    """
    engine, site = live.engine, live.engine.site
    racks, mask = _served(live, table, row), engine.windows.mask(table)
    pumps = [2 * row, 2 * row + 1] if table == "cdu" else []
    concern = Ranked(live).concern
    return {**judged_at(live), "kind": "equipment", "table": table, "name": site.name(table, row),
            "parts": [part_row(live, "pump", i) for i in pumps],
            "evidence": [e for i in pumps for e in evidence(live, "pump", i)],
            "missing": missing(live, "pump", 2 * row) if pumps else silent_signals(live, table, row),
            "remaining": remaining(live, table, row), "faults": reported_faults(live, table, row),
            "diagnosis": diagnosis(live, [(table, row)]),
            "racks": [site.name("rack", int(r)) for r in racks[:SHOWN_PARTS]], "racks_total": len(racks),
            "nodes": counted(concern[np.isin(site.rack_of_node, racks)]), "notes": [],
            "maintenance": bool(mask is not None and mask[row])}  # fmt: skip


def _served(live: Runtime, table: str, row: int) -> np.ndarray:
    """Return the racks that a CDU or loop cools or a feeder feeds; none for a storage, which jobs choose."""
    site = live.engine.site
    if table == "feeder":
        return site.racks_below(row)
    if table == "storage":
        return np.zeros(0, np.int32)
    cdus = [row] if table == "cdu" else np.flatnonzero(site.loop_of_cdu == row)
    return np.flatnonzero(np.isin(site.cdu_of_rack, cdus))


def silent_signals(live: Runtime, table: str, row: int) -> list[dict[str, Any]]:
    """List the signals that once reported and do not now; one line for an entity that has never reported."""
    state, out, ever_any = live.engine.state, [], False
    for name, signal in TABLES[table].by_name.items():
        ever, now = (bool(found[row]) for found in reporting_of(live, table, (signal.key,)))
        ever_any |= ever
        if ever and not now:
            age_s = float(state.tables[table].age_s(signal, state.now_ns)[row])
            out.append({"what": name, "state": f"silent for {duration(age_s)}",
                        "connect": words.comes_from(signal.key)})  # fmt: skip
    never = {"what": "all signals", "state": "never reported", "connect": words.comes_from(table)}
    return out if ever_any else [never]


def part_tree(live: Runtime, part: str, index: int) -> dict[str, Any]:
    """Return everything about one part."""
    engine, site = live.engine, live.engine.site
    table, entity = PARTS[part], index // 2 if part in PAIRED else index
    owner, row = site.name(table, entity), part_row(live, part, index)
    reasons = evidence(live, part, index)
    lacking = missing(live, part, index)
    node = entity if table == "node" else int(site.node_of_gpu[entity]) if part == "gpu" else -1
    spared = engine.windows.mask(table)
    tree = {
        **judged_at(live), "kind": "part", **row, "owner": owner,
        "sure": words.sure(row["sure_pu"]) if row["level"] not in ("healthy", "unknown") else "",
        "age_s": (engine.state.now_ns - row["since_ns"]) / NS if row["since_ns"] else None,
        "evidence": reasons, "missing": lacking,
        "lowered": ATTRIBUTIONS[int(engine.health.health(part).lowered[index])] if part == "gpu" else "",
        "faults": reported_faults(live, table, entity), "remaining": remaining(live, table, entity),
        "changes": words.changes(row["level"], row["action"], bool(lacking), part),
        "maintenance": bool(spared is not None and spared[entity]),
        "diagnosis": diagnosis(live, [(table, entity)]), "notes": notes(live),
        "lost_with_it": lost_with(site, part, index),
    }  # fmt: skip
    tree["lowered_words"] = words.LOWERED_WORDS[tree["lowered"]] if tree["lowered"] else ""
    if node >= 0:
        since_ns = int(failed_since(live)[node])
        tree |= {"node": site.name("node", node), "job": job(live, node), "failed_since_ns": since_ns or None,
                 "failed_words": failed_words(live, node, since_ns),
                 "chance": chances(live, node, since_ns > 0), "model": model_of(live),
                 "history": history(live, node), "lemon": lemon(live, node)}  # fmt: skip
    if part == "gpu":
        tree["nvlinks"] = nvlinks_of(live, entity)
    if part == "node":
        tree["parts"], tree["parts_counts"] = below(live, node)
        gpus = range(int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1]))
        tree["diagnosis"] = diagnosis(live, [("node", node), *(("gpu", g) for g in gpus)])
    return tree


def nvlink_of(live: Runtime, name: str) -> tuple[int, int] | None:
    """Return (GPU, number) of an NVLink such as `gpu0/nvlink14` after the name of a node; None for another
    name."""
    owner, _, tail = name.rpartition("/")
    digits = tail.removeprefix("nvlink")
    if digits == tail or not (digits.isascii() and digits.isdigit()) or len(digits) > 2:
        return None
    gpu = live.engine.site.entity("gpu", owner)
    return None if gpu is None or int(digits) >= PORTS else (gpu, int(digits))


def nvlinks_of(live: Runtime, gpu: int) -> dict[str, Any]:
    """Return how many NVLinks of a GPU are read and those that counted, the last to recover first."""
    health = live.engine.health
    links, failing = health.nvlinks, bool(health.recurring.failing[gpu])
    counted = [
        {
            "link": link,
            "name": links.name(PORTS * gpu + link),
            "level": LEVELS[links.level(gpu, link, failing)],
            "counts": links.counts(gpu, link),
            "recovered": sum(count for _, count in links.recovered(gpu, link)),
        }
        for link in (links.index[links.of_gpu(gpu)] % PORTS).tolist()
    ]
    return {"read": int(links.read[gpu]), "counted": counted}


def nvlink_tree(live: Runtime, gpu: int, link: int) -> dict[str, Any]:
    """Return an NVLink: its verdict and counts, its ends, and the entities lost with it; otherwise as its
    GPU."""
    health, site = live.engine.health, live.engine.site
    tree, counts = part_tree(live, "gpu", gpu), health.nvlinks.counts(gpu, link)
    level = health.nvlinks.level(gpu, link, bool(health.recurring.failing[gpu]))
    named = level >= WATCH
    of_link = [e for e in tree["evidence"] if named and e["rule"] in NVLINK_RULES]
    source = words.comes_from("gpu.nvlink_recovery_count")
    never = {"what": "counts of the link", "state": "never reported", "connect": source}
    lacking = [] if counts else [never]
    action = tree["action"] if of_link else "none"
    return tree | {
        "part": "nvlink", "name": f"{site.name('gpu', gpu)}/nvlink{link}", "level": LEVELS[level],
        "ends": health.nvlinks.name(PORTS * gpu + link), "counts": counts, "action": action,
        "recovered": [{"day": day, "count": n} for day, n in health.nvlinks.recovered(gpu, link)],
        "do": todo_words(action, "gpu"), "why": of_link[0]["text"] if of_link else "", "evidence": of_link,
        "missing": lacking, "lost_with_it": scale_up_blast(site, gpu).text, "diagnosis": [], "faults": [],
        "changes": words.changes(LEVELS[level], action, bool(lacking), "link"), "remaining": [],
        "lowered": "", "lowered_words": "", "sure": "", "sure_pu": None,
    }  # fmt: skip


def evidence(live: Runtime, part: str, index: int) -> list[dict[str, Any]]:
    """List the evidence of a verdict, the gravest first; `missing` lists the missing inputs."""
    now_ns = live.engine.state.now_ns
    return [{"level": LEVELS[e.level], "text": evidence_text(e.text), "rule": e.rule,
             "source": evidence_text(e.source),
             "since_ns": e.since_ns, "age_s": (now_ns - e.since_ns) / NS if e.since_ns else None,
             "sure_pu": finite(e.sure_pu)}
            for e in live.engine.health.verdicts.evidence(part, index)
            if not e.rule.startswith("missing:")]  # fmt: skip


def missing(live: Runtime, part: str, index: int) -> list[dict[str, Any]]:
    """List the inputs of a verdict that do not report now, with times and possible sources."""
    state, table = live.engine.state, PARTS[part]
    entity = index // 2 if part in PAIRED else index
    out = []
    for what, keys in kinds_of(part, index % 2):
        ever, now = reporting_of(live, table, keys)
        if now[entity]:
            continue
        ages = [float(state.tables[table].age_s(signal_of(key), state.now_ns)[entity]) for key in keys]
        since = duration(min(ages)) if ever[entity] else ""
        out.append({"what": what, "state": f"silent for {since}" if since else "never reported",
                    "connect": words.comes_from(keys[0])})  # fmt: skip
    return out


def reported_faults(live: Runtime, table: str, entity: int) -> list[dict[str, Any]]:
    """Return the last faults of a device, the newest first; for a node, with those of its GPUs."""
    site, book = live.engine.site, live.engine.health.book
    found: list[tuple[str, ReportedFault]] = [("", h) for h in book.of(table, entity)]
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
    return [{"id": f.id, "severity": f.severity, "title": evidence_text(f.title), "action": f.action}
            for f in found[:SHOWN_FAULTS]]  # fmt: skip


def remaining(live: Runtime, table: str, entity: int) -> list[dict[str, Any]]:
    """List the drifts of an entity with their remaining time."""
    wear = live.engine.health.wear
    lines = [evidence_text(t) for t in wear.evidence(table, entity)]
    rows = [{"what": left.what, "mid_s": float(left.mid_s[entity]), "lo_s": finite(left.lo_s[entity]),
             "hi_s": finite(left.hi_s[entity]), "said": ""}
            for left in wear.remaining()
            if left.table == table and np.isfinite(left.mid_s[entity])]  # fmt: skip
    return [*rows, *({"what": "", "mid_s": None, "lo_s": None, "hi_s": None, "said": t} for t in lines)]


def chances(live: Runtime, node: int, failed: bool) -> list[dict[str, Any]]:
    """Return the chance of failing within each horizon, with its interval and the fleet's average; no figure
    for a node that has failed."""
    out = []
    for horizon_s in words.HORIZONS_S:
        forecast = forecast_of(live, CHANCE, horizon_s)
        if forecast is not None:
            out.append({"horizon_s": horizon_s, **band(forecast, node, average_of(forecast), failed)})
    return out


def job(live: Runtime, node: int) -> str | None:
    """Return the job on a node."""
    jobs = live.engine.jobs
    slot = int(jobs.job_of_node[node])
    return clean(jobs.names[slot]) if slot >= 0 and jobs.alive[slot] else None


def history(live: Runtime, node: int) -> dict[str, Any]:
    """Return the failures, replacements and reboots of a node in the observed time."""
    engine, site = live.engine, live.engine.site
    log, state = engine.health.log(), engine.state
    mine = np.flatnonzero(log.node == node)
    rows = [{"class": log.classes[int(log.kind[i])], "start_ns": int(log.start_ns[i]),
             "end_ns": int(log.end_ns[i]) or None, "shared": bool(log.shared[i]),
             "lasted_s": (int(log.end_ns[i] or state.now_ns) - int(log.start_ns[i])) / NS}
            for i in mine[::-1][:SHOWN_FAILURES].tolist()]  # fmt: skip
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    reboots = signal_of("node.reboot_count")
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
    return {"is": bool(lemons.is_lemon()[node]), "why": [evidence_text(t) for t in lemons.evidence(node)],
            "signals": [{"name": n, "words": words.SIGNAL_WORDS.get(n, n), "value": finite(v)}
                        for n, v in zip(SIGNALS, signals, strict=True)]}  # fmt: skip


def below(live: Runtime, node: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
    """Return (GPUs, links, supplies and DPUs of a node, the worst first; counts by kind and level)."""
    site, both = live.engine.site, np.arange(2 * node, 2 * node + 2)
    members = {
        "gpu": np.arange(site.gpu_start_of_node[node], site.gpu_start_of_node[node + 1]),
        "link": np.arange(*np.searchsorted(site.node_of_link, [node, node + 1])),
        "psu": both,
    }
    if len(dpus := np.intersect1d(both, fitted(live, "dpu"))):
        members["dpu"] = dpus
    rows, counts = [], {}
    for part, index in members.items():
        levels = levels_of(live, part)[index]
        counts[part] = counted(levels)
        order = index[np.argsort(-levels.astype(np.int64), kind="stable")][:SHOWN_PARTS]
        rows += [part_row(live, part, i) for i in order.tolist()]
    return rows, counts
