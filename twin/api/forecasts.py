"""Forecasts on the first screen: what is expected of the site, how sure that is, and what it rests on.

Small enough for the summary: the site's own quantities, and a line for each feeder whose band reaches its
budget within the hour. Where there is no forecast, it says why.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from models.load import GRIDS
from twin.api.runtime import Runtime
from twin.catalogue import NS, clean, duration, find_quantity
from twin.contracts import Forecast, measured
from twin.engine import EngineView
from twin.report import shown, why

FIRST = ("site.power_w", "site.gpu_demand_count", "site.grid_price_usd_per_kwh")  # these are shown first
BUDGET_WITHIN_S = 3600.0
SHOWN_BUDGETS = 20


def row_s(forecast: Forecast) -> float | None:
    """The length of the rows behind a forecast; None where its model does not tell."""
    if not forecast.model.startswith("load@"):
        return None
    return next((step_s for _, step_s, _, most_s in GRIDS if forecast.horizon_s <= most_s), None)


def block(live: Runtime) -> dict[str, Any]:
    """The part of the summary: `rows` of the site's quantities; `budgets`, `waits`, `notes` as lines."""
    in_force = live.engine.forecasts
    every = sorted({key for key, _ in in_force})
    keys = [*(k for k in FIRST if k in every), *(k for k in every if k not in FIRST)]
    rows, unheard, view = [], [], live.engine.view()
    waits: set[tuple[float, float]] = set()  # (horizon, row) of which there is no band yet
    for key in (k for k in keys if k.startswith("site.")):
        row = _row(live, view, key)
        if row["now"] is None and all(a["mean"] is None for a in row["ahead"]):
            unheard.append(key)
            continue
        rows.append(row)
        lacking = [in_force[key, a["horizon_s"]] for a in row["ahead"] if a["lo"] is None]
        waits |= {(f.horizon_s, step_s) for f in lacking if (step_s := row_s(f)) is not None}
    return {"quantities": keys, "rows": rows, "unheard": unheard, "budgets": budgets(live),
            "waits": _waits(waits), "notes": notes(live)}  # fmt: skip


def _row(live: Runtime, view: EngineView, key: str) -> dict[str, Any]:
    what = find_quantity(key)
    assert what is not None, key  # or the engine would have refused the forecast
    now = measured(view, key)[0]
    ahead = [_ahead(f) for (k, _), f in sorted(live.engine.forecasts.items()) if k == key]
    values = (now, *(v for a in ahead for v in (a["mean"], a["lo"], a["hi"])))
    most = max((abs(v) for v in values if v is not None and v == v), default=0.0)
    how = shown(what.unit, float(most))
    return {"signal": key, "name": live.engine.site.name("site", 0), "unit": what.unit,
            "now": float(now) if np.isfinite(now) else None, "ahead": ahead,
            "shown": {"unit": how.unit, "factor": how.factor, "digits": how.digits}}  # fmt: skip


def _ahead(forecast: Forecast, entity: int = 0) -> dict[str, Any]:
    """One horizon. Without a band the centre is hardly more than the present value, and rests on nothing."""
    mean, low, high = (float(x[entity]) for x in (forecast.mean, forecast.lo, forecast.hi))
    sure = math.isfinite(mean) and math.isfinite(low) and math.isfinite(high)
    return {"horizon_s": forecast.horizon_s, "mean": mean if math.isfinite(mean) else None,
            "lo": low if sure else None, "hi": high if sure else None,
            "why": clean(why(forecast.basis, row_s(forecast)), 300) if sure else ""}  # fmt: skip


def budgets(live: Runtime) -> list[str]:
    """A line for each feeder whose band reaches its budget within the hour, the soonest first.

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


def _waits(lacking: set[tuple[float, float]]) -> list[str]:
    out = []
    for step_s in sorted({step_s for _, step_s in lacking}):
        far = ", ".join(duration(horizon_s) for horizon_s, step in sorted(lacking) if step == step_s)
        out.append(f"no bands yet for {far}: they take two full rows of {duration(step_s)}, and a change")
    return out


def notes(live: Runtime) -> list[str]:
    """List the missing forecasts with their reasons."""
    engine, out = live.engine, []
    for name in engine.models:
        if name in engine.suspended:
            out.append(f"model {name} failed and is suspended: racktwin alarms says why")
    if not engine.models:
        out.append("no model forecasts here: the site file names none")
    elif not engine.forecasts and not out:
        out.append("no forecast yet: the first tick of the models is to come")
    models = {f.model for f in engine.forecasts.values()}
    for name, model in engine.models.items():
        if model.fit_every_s <= 0 or name not in engine.fitted_ns:
            continue
        every_s = getattr(model, "next_fit_s", lambda model=model: model.fit_every_s)()
        left_s = every_s - (engine.state.now_ns - engine.fitted_ns[name]) / NS
        when = f"the next fit begins in {max(1, left_s / 60):.0f} min"
        if f"{name}@unfitted" in models:
            out.append(f"no fit yet: simple rules only; {when}")
        elif all(key.endswith("/grid") for key in getattr(model, "parameters", dict)()):
            out.append(f"too little was heard for the last fit: simple rules only; {when}")
    return out
