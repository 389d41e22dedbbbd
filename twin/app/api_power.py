"""Power over HTTP: headroom, why a cap is what it is, what caps cost, how many more racks fit on a feeder.

Answers are pages or have a bound; the history is read beside the loop. May import the core; changes nothing.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
from aiohttp import web

from twin.app.api_answer import MAX_ROWS, Refused, answer, listed, live_of, number_of, seconds_of
from twin.app.history_query import HistoryError
from twin.app.live import Live
from twin.app.power_answers import why as why_of
from twin.app.power_fit import MIN_DAYS, Fit, Past, Places, fit
from twin.app.power_headroom import KINDS, Ground, ground_of, headroom, limits_at
from twin.app.power_worth import cost as cost_of
from twin.app.report_text import clean
from twin.errors import StorageError
from twin.frame import F64, I32, NS

MOST_HOURS = 192.0
DAYS, MOST_DAYS = 31.0, 366.0
MOST_CELLS = 2_000_000  # readings of one question about a feeder
STEPS_S = (300.0, 900.0, 3600.0)
READ_S = 60.0
MOST_FITS = 2  # at once: each takes a second or so of a core
_fitting: list[int] = []


async def power(request: web.Request) -> web.Response:
    """Headroom of every budget now, with the other side lost, and by the upper band of the forecast.

    Feeders, CDUs, loops, the site, and the fullest racks; what binds first; caps in force; what is missing.
    """
    kinds = listed(request, "kind")
    if strange := [k for k in kinds if k not in KINDS]:
        raise Refused(400, f"kind: {clean(strange[0], 40)!r} is unknown; expected some of {', '.join(KINDS)}")
    return answer(headroom(live_of(request), kinds, number_of(request, "limit", 20, 0, MAX_ROWS)))


async def why(request: web.Request) -> web.Response:
    """Why a rack, node, GPU, job or feeder is capped: policy, reason, budget, class, what would lift it."""
    name = request.query.get("name", "")
    if not name or len(name) > 400:
        raise Refused(400, "name: expected a rack, node, GPU, job or feeder")
    return answer(why_of(live_of(request), name))


async def cost(request: web.Request) -> web.Response:
    """What caps cost in work and saved in energy over the last hours: of the site, by class, by job."""
    return answer(cost_of(live_of(request), seconds_of(request, "hours", 24.0, 0.25, MOST_HOURS)))


async def fits(request: web.Request) -> web.Response:
    """How many more racks fit on a feeder, by nameplate, by peaks, and at a risk per hour with diversity.

    A new rack hangs as most racks of this feeder do, draws like racks of its profile, and counts with the
    other side lost.
    """
    live = live_of(request)
    feeder = live.engine.site.entity("feeder", name := request.query.get("feeder", ""))
    if feeder is None:
        raise Refused(404, f"no feeder {clean(name, 120)}; `racktwin power --kind feeder` lists them")
    risk_pu = seconds_of(request, "risk", 0.01, 1e-6, 0.5)
    days = seconds_of(request, "days", DAYS, 1.0, MOST_DAYS)
    most_w = request.query.get("nameplate_w")
    given_w = seconds_of(request, "nameplate_w", math.nan, 1.0, 1e7) if most_w is not None else math.nan
    return answer(await fit_of(live, feeder, request.query.get("racks"), risk_pu, days, given_w))


async def fit_of(
    live: Live, feeder: int, profile: str | None, risk_pu: float, days: float, given_w: float
) -> dict[str, Any]:
    """The whole answer of `fits`. Raises Refused."""
    engine, site = live.engine, live.engine.site
    ground = ground_of(engine)
    there = site.racks_below(feeder)
    if not len(there):
        raise Refused(409, f"{site.name('feeder', feeder)} feeds no rack: how would a new one hang?")
    template, profile, donors, new_w = _template(live, there, profile, given_w)
    names, lost, now = _places(live, ground, template)
    racks = np.flatnonzero((lost.share > 0).any(axis=0) | np.isin(np.arange(site.sizes["rack"]), donors))
    past, notes = await _past(live, racks.astype(np.int32), days)
    nameplate_w = np.asarray(site.design.rack_max_w, np.float64)
    if len(_fitting) >= MOST_FITS:
        raise Refused(503, f"{MOST_FITS} such questions are being answered; ask again in a while")
    _fitting.append(feeder)
    try:
        looks = {what: await asyncio.to_thread(fit, places, past, nameplate_w, new_w, donors, risk_pu)
                 for what, places in (("lost", lost), ("both", now))}  # fmt: skip
    finally:
        _fitting.pop()
    if not len(names):
        notes.append("no place above these racks has a budget: nothing says how many fit")
    if not math.isfinite(new_w):
        notes.append("nobody says what a new rack may draw: give --nameplate, or a profile with rack_max_w")
    elif not np.isfinite(nameplate_w[(lost.share > 0).any(axis=0)]).all():
        notes.append("some racks have no profile that says what they may draw: no count by nameplate")
    if past is not None and live.power is not None:
        notes += _censored(live)
    return {
        "site": site.file.site, "now_ns": engine.state.now_ns, "feeder": site.name("feeder", feeder),
        "profile": profile, "nameplate_w": new_w if math.isfinite(new_w) else None, "risk_pu": risk_pu,
        "like": site.name("rack", template), "donors": len(donors), "racks_there": len(there),
        "min_days": MIN_DAYS, "places": names, "lost": _told(looks["lost"], names),
        "both": _told(looks["both"], names), "notes": notes,
    }  # fmt: skip


def _template(
    live: Live, there: I32, profile: str | None, given_w: float
) -> tuple[int, str | None, np.ndarray, float]:
    """(the rack that a new one hangs like, its profile, racks that it draws like, its nameplate in W)."""
    site = live.engine.site
    fed = {r: (*site.feeders_of_rack.of_row(r).tolist(), int(site.cdu_of_rack[r])) for r in there.tolist()}
    usual = max(set(fed.values()), key=lambda f: (sum(1 for v in fed.values() if v == f), f))
    template = min(r for r, f in fed.items() if f == usual)
    nodes = np.diff(site.node_start_of_rack)
    if profile is None:
        busy = [r for r, f in fed.items() if f == usual and nodes[r] > 0]
        template = busy[0] if busy else template
        profile = site.profile_of_rack[template]
    known = sorted({p for p in site.profile_of_rack if p})
    if profile is not None and profile not in known and not math.isfinite(given_w):
        raise Refused(404, f"racks: no rack here has the profile {clean(profile, 60)}; expected one of "
                           f"{', '.join(known) or 'none'}, or nameplate_w beside it")  # fmt: skip
    alike = np.array([p == profile for p in site.profile_of_rack], np.bool_) & (nodes > 0)
    alike &= profile is not None
    new_w = given_w
    stated_w = site.design.rack_max_w[alike]
    if not math.isfinite(new_w) and np.isfinite(stated_w).any():
        new_w = float(np.nanmax(stated_w))
    return template, profile, np.flatnonzero(alike), new_w


def _places(live: Live, ground: Ground, template: int) -> tuple[list[dict[str, Any]], Places, Places]:
    """(places with a limit above a new rack, what they carry with the other side lost, and with both)."""
    site, n = live.engine.site, site_places(ground)
    limits = limits_at(live, ground, live.engine.state.now_ns)
    bound = np.isfinite(limits.budget_w)
    kinds = np.array([k not in ("rack",) for k in ground.loads.kind], np.bool_)
    shares = []
    for carried in (ground.lost, ground.now):
        share = np.zeros((n, site.sizes["rack"]))
        mine = carried.pairs.place < n
        share[carried.pairs.place[mine], carried.pairs.rack[mine]] = carried.pairs.share[mine]
        shares.append(share)
    at = np.flatnonzero((shares[0][:, template] > 0) & bound & kinds)
    names = [{"place": ground.now.name(site, int(p)), "kind": ground.loads.kind[int(p)],
              "limit_w": float(limits.budget_w[p]), "share": float(shares[0][p, template]),
              "load_w": None if not np.isfinite(ground.loads.lost_w[p]) else float(ground.loads.lost_w[p])}
             for p in at]  # fmt: skip
    made = [Places(limits.budget_w[at].astype(np.float64), s[at], s[at, template]) for s in shares]
    return names, made[0], made[1]


def site_places(ground: Ground) -> int:
    """How many places there are, those that stand in for others left out."""
    return len(ground.loads.now_w)


async def _past(live: Live, racks: I32, days: float) -> tuple[Past | None, list[str]]:
    """The highest power of racks in each slot, from the history; what is missing of it, in sentences."""
    if live.history is None or not len(racks):
        return None, ["this daemon keeps no history of its own (history.embedded is false)"]
    site, until_ns = live.engine.site, live.engine.state.now_ns
    step_s = next((s for s in STEPS_S if len(racks) * days * 86_400 / s <= MOST_CELLS), STEPS_S[-1])
    most_days = MOST_CELLS * step_s / 86_400 / len(racks)
    names = [site.name("rack", int(r)) for r in racks]
    since_ns = max(0, until_ns - round(min(days, most_days) * 86_400 * NS))
    try:
        async with asyncio.timeout(READ_S):
            found = await live.history.query("rack.power_w", names, since_ns, until_ns, step_s, 50_000)
    except (HistoryError, StorageError) as error:
        return None, [f"the history could not be read: {clean(str(error), 200)}"]
    except TimeoutError:
        return None, [f"the history took longer than {READ_S:g} s: ask for fewer days"]
    past = await asyncio.to_thread(_as_past, found, names, racks, site.sizes["rack"])
    notes = [f"each slot of {step_s / 60:.0f} min counts with its highest reading of every rack"]
    if min(days, most_days) < days:
        notes.append(f"only the last {most_days:.0f} days were read, as the feeder has many racks")
    return past, notes


def _as_past(found: dict[str, Any], names: list[str], racks: I32, n_rack: int) -> Past:
    t_s = np.array(found["t_ns"], np.int64) // NS
    columns = found.get("max", found["values"])
    power_w: F64 = np.full((len(t_s), n_rack), np.nan)
    for name, rack in zip(names, racks.tolist(), strict=True):
        power_w[:, rack] = np.array(columns[name], np.float64)
    return Past(power_w, t_s // 3600, t_s // 86_400)


def _censored(live: Live) -> list[str]:
    """Whether caps held demand back while the history was written: then it shows less than is wanted."""
    total = cost_of(live, MOST_HOURS)["total"]
    if not total or total["held_gpu_h"] <= 0.001 * total["busy_gpu_h"] or total["busy_gpu_h"] <= 0:
        return []
    share = f"{100 * total['held_gpu_h'] / total['busy_gpu_h']:.1f} %"
    text = f"caps held {share} of the busy GPU-hours that were counted: demand was higher than the history "
    return [f"{text}shows, and fewer racks fit than diversity says"]


def _told(found: Fit, names: list[dict[str, Any]]) -> dict[str, Any]:
    stop = names[found.binds]["place"] if 0 <= found.binds < len(names) else None
    return {"nameplate": found.nameplate, "peaks": found.peaks, "diverse": found.diverse, "low": found.low,
            "high": found.high, "hours": found.hours, "days": found.days, "excess_pu": found.excess_pu,
            "stops": stop, "why_not": found.why_not}  # fmt: skip
