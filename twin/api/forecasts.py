"""Forecasts for the overview: expected values of the site, their bands and their basis.

Small enough for the summary: the site's own quantities, and a line for each feeder whose band reaches its
budget within the hour. A forecast is shown once it has a band; until then a sentence says when that will be.
Outlooks, the future values that people and scripts outside state, are sent and listed here too.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from models.half_widths import LEAST_SPANS
from models.load import GRIDS
from twin.api.access import author
from twin.api.actions import new_id, submit
from twin.api.answers import MAX_ROWS, Refused, answer, body_of, live_of, number_of
from twin.api.runtime import Runtime
from twin.catalogue import NS, clean, duration, find_quantity
from twin.contracts import Forecast, finite, measured
from twin.engine import MAX_STEP_S, MAX_VALUES, EngineView, Outlook
from twin.report import known_ahead, shown, time_left, why
from twin.telemetry import events as ev

FIRST = ("site.power_w", "site.gpu_demand_count", "site.grid_price_usd_per_kwh")  # these are shown first
BUDGET_WITHIN_S = 3600.0
SHOWN_BUDGETS = 20
MAX_NAME = 512
MAX_AHEAD_S = 366 * 86_400.0


def row_s(forecast: Forecast) -> float | None:
    """Return the length of the rows behind a forecast, s; None if its model does not give it."""
    return _row_s(forecast.horizon_s) if forecast.model.startswith("load@") else None


def _row_s(horizon_s: float) -> float | None:
    return next((step_s for _, step_s, _, most_s in GRIDS if horizon_s <= most_s), None)


def block(live: Runtime) -> dict[str, Any]:
    """Return the forecasts of the summary: `rows` of the site's quantities, `budgets` and `notes` as
    lines, `awaited`."""
    every = sorted({key for key, _ in live.engine.forecasts})
    keys = [*(k for k in FIRST if k in every), *(k for k in every if k not in FIRST)]
    rows, unreported, view = [], [], live.engine.view()
    lacking: dict[str, list[float]] = {}  # quantity -> horizons without a band
    for key in (k for k in keys if k.startswith("site.")):
        row, expected = _row(live, view, key)
        if row["now"] is None and not expected:
            unreported.append(key)
            continue
        with_band = [a["horizon_s"] for a in row["ahead"]]
        lacking[key] = [h for k, h in sorted(live.engine.forecasts) if k == key and h not in with_band]
        if with_band:
            rows.append(row)
    return {"quantities": keys, "rows": rows, "unheard": unreported, "budgets": budgets(live),
            "awaited": _awaited(live, lacking, bool(rows)), "notes": notes(live)}  # fmt: skip


def _row(live: Runtime, view: EngineView, key: str) -> tuple[dict[str, Any], bool]:
    """Return a quantity with the horizons that have a band, and True if it has any forecast."""
    what = find_quantity(key)
    assert what is not None, key  # or the engine would have refused the forecast
    now = measured(view, key)[0]
    every = [f for (k, _), f in sorted(live.engine.forecasts.items()) if k == key]
    own = {f.horizon_s: row_s(f) for f in every}
    ahead = known_ahead([_ahead(f) for f in every], own.__getitem__)
    values = (now, *(v for a in ahead for v in (a["mean"], a["lo"], a["hi"])))
    most = max((abs(v) for v in values if v is not None and v == v), default=0.0)
    how = shown(what.unit, float(most))
    row = {"signal": key, "name": live.engine.site.name("site", 0), "unit": what.unit,
           "now": finite(now), "ahead": ahead,
           "shown": {"unit": how.unit, "factor": how.factor, "digits": how.digits}}  # fmt: skip
    return row, any(math.isfinite(float(f.mean[0])) for f in every)


def _ahead(forecast: Forecast, entity: int = 0) -> dict[str, Any]:
    """Return one horizon; without a band, `lo` and `hi` are null."""
    mean, low, high = (float(x[entity]) for x in (forecast.mean, forecast.lo, forecast.hi))
    sure = math.isfinite(mean) and math.isfinite(low) and math.isfinite(high)
    return {"horizon_s": forecast.horizon_s, "mean": finite(mean),
            "lo": low if sure else None, "hi": high if sure else None,
            "why": clean(why(forecast.basis, row_s(forecast)), 300) if sure else ""}  # fmt: skip


def budgets(live: Runtime) -> list[str]:
    """Return a line for each feeder whose band reaches its budget within the hour, the soonest first.

    A budget lent from outside counts until it ends, the guaranteed share after that.
    """
    engine, found = live.engine, []
    reached = np.zeros(engine.site.sizes["feeder"], np.bool_)
    for (key, horizon_s), f in sorted(engine.forecasts.items(), key=lambda item: item[0][1]):
        if key != "feeder.power_w" or horizon_s > BUDGET_WITHIN_S:
            continue
        budget_w = engine.intake.budget_w(engine.site, engine.state.now_ns + round(horizon_s * NS))
        for i in np.flatnonzero(~reached & np.isfinite(f.lo) & (f.hi >= budget_w)).tolist():
            reached[i] = True
            how = shown("W", float(budget_w[i]))
            budget, centre = (f"{v * how.factor:.{how.digits}f}" for v in (budget_w[i], f.mean[i]))
            found.append(
                f"feeder {clean(engine.site.name('feeder', i))}: the upper end of its 90 % band reaches its "
                f"budget of {budget} {how.unit} in {duration(horizon_s)}; {centre} {how.unit} expected"
            )
    more = len(found) - SHOWN_BUDGETS
    return [*found[:SHOWN_BUDGETS], *([f"and {more} more feeders"] if more > 0 else [])]


def _awaited(live: Runtime, lacking: dict[str, list[float]], any_shown: bool) -> str:
    """Return sentences on the start of forecasts and on the fit that replaces simple rules; "" for none.

    `lacking`: the horizons without a band of each reported quantity. `any_shown`: some have one.
    """
    if not live.engine.models:
        return ""
    if not live.engine.forecasts:
        return "Forecasts begin with the first tick of the models."
    out = []
    names = [key for key, horizons_s in lacking.items() if horizons_s]
    if names:
        first, *more = sorted({h for key in names for h in lacking[key]})
        of = "" if len(names) == len(lacking) else f" {', '.join(names)}"
        which = "next" if any_shown else "first"
        begins = [f"{which} forecast ({duration(first)} ahead) in {_begin(live, names, first)}",
                  *(f"{duration(h)} ahead in {_begin(live, names, h)}" for h in more)]  # fmt: skip
        out.append(f"Learning{of}: {', '.join(begins)}.")
        out.append(f"A forecast needs {LEAST_SPANS} times its horizon of history.")
    fitted, fit = _fit(live, set(lacking))
    of = "" if fitted == set(lacking) else f" of {', '.join(sorted(fitted))}"
    return " ".join([*out, *([f"Forecasts{of} rest on {fit}."] if fit else [])])


def _begin(live: Runtime, keys: list[str], horizon_s: float) -> str:
    """Return the time until all of these quantities have a band at a horizon, given their readings."""
    now_ns, out = live.engine.state.now_ns, []
    for key in keys:
        forecast = live.engine.forecasts.get((key, horizon_s))
        if forecast is None or math.isfinite(float(forecast.lo[0])):
            continue
        model = live.engine.models.get(forecast.model.partition("@")[0])
        awaits_ns = getattr(model, "awaits_ns", None)
        left_ns = 0 if awaits_ns is None else awaits_ns(key).get(horizon_s, now_ns) - now_ns
        out.append(LEAST_SPANS * horizon_s if awaits_ns is None else left_ns / NS)
    return time_left(max(out, default=0.0))


def _fit(live: Runtime, keys: set[str]) -> tuple[set[str], str]:
    """Return (which, rules) of the simple rules behind these forecasts until the soonest fit.

    (empty, "") once all have one.
    """
    engine, found = live.engine, list[tuple[float, set[str], str]]()
    for name, model in engine.models.items():
        mine = {key: f.model for (key, _), f in engine.forecasts.items()
                if key in keys and f.model.startswith(f"{name}@")}  # fmt: skip
        if not mine or model.fit_every_s <= 0 or name not in engine.fitted_ns:
            continue
        every_s = getattr(model, "next_fit_s", lambda model=model: model.fit_every_s)()
        left_s = every_s - (engine.state.now_ns - engine.fitted_ns[name]) / NS
        which = "first" if f"{name}@unfitted" in mine.values() else "next"
        text = f"simple rules until the {which} fit in {time_left(left_s)}"
        if which == "next":
            if not all(key.endswith("/grid") for key in getattr(model, "parameters", dict)()):
                continue
            text += ", because too few readings arrived for the last one"
        found.append((left_s, set(mine), text))
    _, which_keys, text = min(found, key=lambda fit: fit[0], default=(0.0, set(), ""))
    return which_keys, text


def notes(live: Runtime) -> list[str]:
    """Return the reasons for missing forecasts, a line each."""
    engine = live.engine
    if not engine.models:
        return ["the site file names no forecast model"]
    return [
        f"model {name} failed and is suspended: racktwin alarm list says why"
        for name in engine.models
        if name in engine.suspended
    ]


class NewOutlook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values of a quantity in the future: from `start_ns` on, each for `step_s`; null = unknown.

    `name` is the entity; without one it is the site. It replaces the outlook of this quantity and
    entity before; with null values only, that is taken back.
    """

    quantity: str
    start_ns: int
    step_s: float
    values: list[float | None]
    name: str = ""


async def take_outlook(request: web.Request) -> web.Response:
    """Send future values: weather, day-ahead prices, a plan. Forecasts learn how far to trust them."""
    body, live = await body_of(request, NewOutlook), live_of(request)
    what = find_quantity(body.quantity)
    if what is None:
        raise Refused(404, f"{clean(body.quantity, 60)} is not a quantity that can be forecast; expected a "
                           "signal such as site.outdoor_temp_c, or cdu.heat_w, site.power_w or "
                           "site.gpu_demand_count")  # fmt: skip
    if len(body.name) > MAX_NAME:
        raise Refused(400, f"name: expected at most {MAX_NAME} characters")
    if not 1 <= body.step_s <= MAX_STEP_S:
        raise Refused(400, f"step_s: expected seconds from 1 to {MAX_STEP_S:g}, got {body.step_s:g}")
    if not 0 < len(body.values) <= MAX_VALUES:
        raise Refused(400, f"values: expected 1 to {MAX_VALUES}, got {len(body.values)}")
    now_ns = live.engine.state.now_ns
    end_ns = body.start_ns + round(body.step_s * NS) * len(body.values)
    if not now_ns < end_ns:
        ago = (now_ns - end_ns) // NS
        raise Refused(400, f"start_ns: the last value was over {ago} s ago; expected ns since 1970 (UTC)")
    if body.start_ns - now_ns > MAX_AHEAD_S * NS:
        raise Refused(400, "start_ns: begins in more than a year; expected ns since 1970 (UTC)")
    event = ev.OutlookTold(
        id=new_id(request), author=author(request), quantity=body.quantity, name=body.name,
        start_ns=body.start_ns, step_s=body.step_s, values=tuple(body.values),
    )  # fmt: skip
    return await submit(request, event, quantity=body.quantity, values=len(body.values), end_ns=end_ns)


async def outlooks(request: web.Request) -> web.Response:
    """List the outlooks in force, the latest first, each with its present value."""
    live = live_of(request)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 200, 1, MAX_ROWS)
    wanted = request.query.get("quantity", "")
    rows = [o for o in live.engine.intake.outlooks.entries() if wanted in ("", o.quantity)][::-1]
    more = offset + limit < len(rows)
    now_ns = live.engine.state.now_ns
    return answer({"now_ns": now_ns, "total": len(rows), "offset": offset,
                   "next_offset": offset + limit if more else None,
                   "outlooks": [_brief(o, now_ns) for o in rows[offset : offset + limit]]})  # fmt: skip


def _brief(held: Outlook, now_ns: int) -> dict[str, object]:
    what = find_quantity(held.quantity)
    step = (now_ns - held.start_ns) // held.step_ns
    return {
        "quantity": held.quantity, "unit": what.unit if what else "", "name": held.name,
        "author": held.author, "id": held.id, "start_ns": held.start_ns, "end_ns": held.end_ns,
        "step_s": held.step_s, "values": len(held.values),
        "unknown": int(np.isnan(held.values).sum()),
        "now": float(held.values[step]) if 0 <= step < len(held.values) else None,
        "low": float(np.nanmin(held.values)), "high": float(np.nanmax(held.values)),
    }  # fmt: skip
