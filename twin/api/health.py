"""Health over HTTP: how well all parts are, whom to look at first, what is unknown, which failures to expect.

One part is explained in `api_health_part`. Answers are pages or have a bound.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

import numpy as np
from aiohttp import web

from twin.api.answers import MAX_ROWS, Refused, answer, listed, live_of, number_of
from twin.api.runtime import Runtime
from twin.api.scopes import inside
from twin.catalogue import F64, NS, TABLES, U8, Bool, clean
from twin.contracts import (
    ACTIONS,
    ATTRIBUTIONS,
    LEVELS,
    PAIRED,
    PARTS,
    UNKNOWN,
    WATCH,
    Forecast,
    name_of_part,
    todo_words,
)
from twin.health import SPECS, is_failure
from twin.report import health_texts as words, why
from twin.telemetry import GOOD

CHANCE, EXPECTED, DAY_S = "node.failure_pu", "site.node_failure_count", 86_400.0
SHOWN_WORST, SHOWN_FEW = 20, 6
MAX_TEXT = 400
STANDS_OUT = 3.0  # times the fleet's average chance of failing, from which on a well node is shown


# -- what was judged, in columns


def levels_of(live: Runtime, part: str) -> U8:
    """Levels of all parts of a kind [n]."""
    return live.engine.health.health(part).level


def node_concern(live: Runtime) -> U8:
    """The worst level of each node and its GPUs [n_node]."""
    worst = levels_of(live, "node").copy()
    gpus = levels_of(live, "gpu")
    raised = np.flatnonzero(gpus > 0)
    np.maximum.at(worst, live.engine.site.node_of_gpu[raised], gpus[raised])
    return worst


def counted(levels: U8) -> dict[str, int]:
    """Count the parts at each level."""
    return dict(zip(LEVELS, np.bincount(levels, minlength=len(LEVELS)).tolist(), strict=True))


def forecast_of(live: Runtime, key: str, horizon_s: float) -> Forecast | None:
    """A forecast in force."""
    return live.engine.forecasts.get((key, horizon_s))


def average_of(forecast: Forecast | None) -> float | None:
    """The mean over all nodes for which there is one; None for none."""
    if forecast is None:
        return None
    known = forecast.mean[np.isfinite(forecast.mean)].astype(np.float64)
    return float(known.mean()) if len(known) else None


def number(value: Any) -> float | None:
    """A number that JSON can carry, or None."""
    value = float(value)
    return value if math.isfinite(value) else None


def band(forecast: Forecast | None, entity: int, average: float | None = None) -> dict[str, Any]:
    """Mean, interval and comparison with the average, of one entity."""
    if forecast is None:
        return {"mean": None, "lo": None, "hi": None, "average": None, "said": "", "basis": ""}
    mean, low, high = (number(x[entity]) for x in (forecast.mean, forecast.lo, forecast.hi))
    return {"mean": mean, "lo": low, "hi": high, "average": average, "said": words.times(mean, average),
            "basis": told(why(forecast.basis))}  # fmt: skip


def told(text: str) -> str:
    """Evidence may quote what a device said."""
    return clean(text, MAX_TEXT)


# -- rows


def reason_of(live: Runtime, part: str, index: int) -> str:
    """The gravest sentence on a part, with figures; empty where nothing was said.

    What is missing is a reason only where the part is unknown; its past is none.
    """
    unknown = int(live.engine.health.health(part).level[index]) == UNKNOWN
    found = (e.text for e in live.engine.health.verdicts.evidence(part, index)
             if e.rule != "history" and (unknown or not e.rule.startswith("missing:")))  # fmt: skip
    return told(next(found, ""))


def part_row(live: Runtime, part: str, index: int) -> dict[str, Any]:
    """A part in a line."""
    held = live.engine.health.health(part)
    owner = live.engine.site.name(PARTS[part], index // 2 if part in PAIRED else index)
    action = ACTIONS[int(held.action[index])]
    return {"part": part, "name": name_of_part(part, index, owner), "level": LEVELS[int(held.level[index])],
            "since_ns": int(held.since_ns[index]), "sure_pu": number(held.sure_pu[index]), "action": action,
            "do": todo_words(action, part), "why": reason_of(live, part, index)}  # fmt: skip


def node_row(live: Runtime, node: int, concern: int, lemon: bool, average: float | None) -> dict[str, Any]:
    """A node in a line: by its GPU, where that is worse off than the node as a whole."""
    site, part, index = live.engine.site, "node", node
    if concern > int(levels_of(live, "node")[node]):
        first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
        part, index = "gpu", first + int(np.argmax(levels_of(live, "gpu")[first:last]))
    row = part_row(live, part, index)
    if part == "gpu":
        row["why"] = f"gpu{index - int(site.gpu_start_of_node[node])}: {row['why'] or row['level']}"
    elif concern < WATCH and lemon:
        row["why"] = told((live.engine.health.lemons.evidence(node) or ("a lemon",))[0])
    day = band(forecast_of(live, CHANCE, DAY_S), node, average)
    return row | {"part": "node", "name": site.name("node", node), "day": day, "lemon": lemon}


class Ranked:
    """Nodes in the order in which somebody should look at them."""

    def __init__(self, live: Runtime) -> None:
        self.live, self.concern = live, node_concern(live)
        self.lemon: Bool = live.engine.health.lemons.is_lemon()
        forecast = forecast_of(live, CHANCE, DAY_S)
        self.average = average_of(forecast)
        self.chance: F64 = np.zeros(len(self.concern))
        if forecast is not None:
            self.chance = np.nan_to_num(forecast.mean.astype(np.float64), nan=0.0)

    def stand_out(self) -> np.ndarray:
        """Nodes not well, lemons, and those far likelier to fail than the average."""
        far = self.chance >= STANDS_OUT * self.average if self.average else np.False_
        return np.flatnonzero((self.concern >= WATCH) | self.lemon | far)

    def order(self, nodes: np.ndarray) -> np.ndarray:
        """The worst first: by level, then lemons, then by the chance of failing within a day."""
        keys = (nodes, -self.chance[nodes], ~self.lemon[nodes], -self.concern[nodes].astype(np.int64))
        return nodes[np.lexsort(keys)]

    def rows(self, nodes: np.ndarray) -> list[dict[str, Any]]:
        """These nodes, each in a line."""
        return [node_row(self.live, i, int(self.concern[i]), bool(self.lemon[i]), self.average)
                for i in nodes.tolist()]  # fmt: skip


# -- the whole


def expected(live: Runtime) -> list[dict[str, Any]]:
    """Return the expected number of node failures within each horizon, with a 90 % interval."""
    return [{"horizon_s": h, **{k: b[k] for k in ("mean", "lo", "hi", "basis")}}
            for h in words.HORIZONS_S if (f := forecast_of(live, EXPECTED, h)) is not None
            and (b := band(f, 0))["mean"] is not None]  # fmt: skip


def model_of(live: Runtime) -> str:
    """The model behind the chances, with the hash of its parameters."""
    forecast = forecast_of(live, CHANCE, DAY_S)
    return "" if forecast is None else forecast.model


def heard_of(live: Runtime, table: str, keys: tuple[str, ...]) -> tuple[Bool, Bool]:
    """(who ever reported any of these signals, who does so now) [n] each."""
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


def unknown(live: Runtime) -> list[dict[str, Any]]:
    """Of each kind of part: how many are unknown, what is not heard of how many, and who would tell it."""
    out = []
    for part, table in PARTS.items():
        levels = levels_of(live, part)
        count = int(np.count_nonzero(levels == UNKNOWN))
        if count == 0:
            continue
        missing = []
        for what, keys in kinds_of(part):
            ever, now = heard_of(live, table, keys)
            if not now.all():
                missing.append({"what": what, "never": int((~ever).sum()),
                                "silent": int((ever & ~now).sum()), "of": len(ever),
                                "connect": words.comes_from(keys[0])})  # fmt: skip
        out.append({"part": part, "unknown": count, "of": len(levels), "missing": missing})
    return out


def failures(live: Runtime) -> dict[str, Any]:
    """Failures that are remembered: by class, those that last, and those that had a cause in common."""
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
                         "mid_s": float(left.mid_s[i]), "lo_s": number(left.lo_s[i]),
                         "hi_s": number(left.hi_s[i])})  # fmt: skip
    return sorted(rows, key=lambda r: float(str(r["mid_s"])))[:most]


def lowered(live: Runtime) -> dict[str, int]:
    """GPUs whose clock is held down, by whose doing that is."""
    counts = np.bincount(live.engine.health.health("gpu").lowered, minlength=len(ATTRIBUTIONS)).tolist()
    return {by: n for by, n in zip(ATTRIBUTIONS[1:], counts[1:], strict=True) if n}


def notes(live: Runtime) -> list[str]:
    """List the caveats of the health answer."""
    engine, out = live.engine, []
    if engine.health.looked_ns == 0:
        out.append("nothing was judged yet: the first look follows the first tick")
    if forecast_of(live, CHANCE, DAY_S) is None:
        named = "failure" in engine.models
        suspended = "failure" in engine.suspended
        out.append("no forecasts of failures: the model failed and is suspended; racktwin alarms says why"
                   if suspended else "no forecasts of failures yet" if named else
                   "no forecasts of failures: the site file names no model `failure`")  # fmt: skip
    return out


def looked(live: Runtime) -> dict[str, Any]:
    """When all of it was judged."""
    engine = live.engine
    age_s = (engine.state.now_ns - engine.health.looked_ns) / NS if engine.health.looked_ns else None
    return {"tick": engine.state.tick, "now_ns": engine.state.now_ns, "judged_s": age_s}


def block(live: Runtime) -> dict[str, Any]:
    """The part of the summary, made once a second: counts, the worst nodes, failures expected in a day."""
    ranked = Ranked(live)
    first = ranked.stand_out()
    day = [e for e in expected(live) if e["horizon_s"] == DAY_S]
    return {"parts": parts_of(live), "stand_out": len(first),
            "worst": ranked.rows(ranked.order(first)[:SHOWN_FEW]),
            "lemons": int(ranked.lemon.sum()), "expected_day": day[0] if day else None}  # fmt: skip


async def health(request: web.Request) -> web.Response:
    """Return the health of all parts, the worst first, what is unknown, and the expected failures.

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
    """All but the rows; counts are of a place, if one is given."""
    lemons = np.flatnonzero(live.engine.health.lemons.is_lemon())
    return {**looked(live), "site": live.engine.site.file.site, "prefix": prefix,
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
        if live.engine.site.sizes[table]:
            levels = levels_of(live, part)
            out[part] = counted(levels[_members(live, part, prefix)] if prefix else levels)
    return out


def page(
    live: Runtime, part: str | None, prefix: str, levels: list[str], offset: int, limit: int
) -> tuple[int, list[dict[str, Any]]]:
    """(how many match, these of them), the worst first."""
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
    index = inside(live.engine.site, table, prefix) if prefix and n else np.arange(n)
    return np.stack((2 * index, 2 * index + 1), axis=1).ravel() if part in PAIRED else index


# -- names


def near(live: Runtime, name: str) -> list[str]:
    """Names of this site that somebody may have meant."""
    site = live.engine.site
    head, tail = name.rstrip("/"), ""
    while head and (last := head.rpartition("/")[2]) and any(last.startswith(w) for w in ("node", "gpu")):
        head, tail = head.rpartition("/")[0], f"/{last}{tail}"
    known = [n for table in ("rack", "cdu", "switch", "hall") for n in site.names.get(table, [])]
    local = {n.rpartition("/")[2]: n for n in reversed(known)}
    found = [head] if head in known else [
        local.get(n, n) for n in difflib.get_close_matches(head.partition("#")[0], [*known, *local], 6, 0.6)
    ]  # fmt: skip
    out: dict[str, None] = {}
    for place in found:
        rack = site.entity("rack", place)
        whole_name = f"{place}{tail}"
        if tail and rack is not None and not _exists(live, whole_name):
            last_node = int(site.node_start_of_rack[rack + 1] - site.node_start_of_rack[rack]) - 1
            whole_name = place if last_node < 0 else f"{place}/node0 to {place}/node{last_node}"
        out[whole_name] = None
    return list(out)[:3]


def _exists(live: Runtime, name: str) -> bool:
    return any(live.engine.site.entity(t, name) is not None for t in ("node", "gpu", "rack", "cdu", "switch"))
