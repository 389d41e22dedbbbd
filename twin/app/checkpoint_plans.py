"""Checkpoints of a daemon's jobs over the interface: rate, interval in force and best, what others cost.

By the live policy's own sums on the state of now, whether that policy runs or not. May import the core,
models and policies; changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from models.failure_rates import gamma_factors
from policies.checkpoint_costs import MEASURED, PRIOR, SAID, SOURCES, terms_of
from policies.checkpoint_hazard import DAY_S, held_by, rates_of
from policies.checkpoint_plan import Terms, ettr_at, plan
from twin.app.api_answer import MAX_ROWS, Refused, answer, live_of, number_of
from twin.app.checkpoint_table import FIXED_S
from twin.app.live import Live
from twin.app.report_text import clean
from twin.frame import F64, I32
from twin.jobs import KINDS
from twin.view import EngineView

TRAINING = KINDS.index("training")
CONTROL, LOCAL = "job.checkpoint_interval_s", "job.checkpoint_local_interval_s"
NO_RATE = "nothing is forecast of most of its nodes: expected the model `failure`, and nodes that are heard"


async def plans(request: web.Request) -> web.Response:
    """Each training job's rate of failures, interval in force and best, and what fixed ones are worth."""
    live, jobs = live_of(request), live_of(request).engine.jobs
    asked = request.query.get("job")
    slots = np.flatnonzero(jobs.alive & (jobs.kind == TRAINING)).astype(np.int32)
    if asked is not None:
        slot = jobs.slot_of.get(asked)
        if slot is None or not jobs.alive[slot]:
            raise Refused(404, f"no job {clean(asked, 80)} is known to run")
        slots = np.array([slot], np.int32)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 100, 1, MAX_ROWS)
    more = offset + limit < len(slots)
    return answer({"now_ns": live.engine.state.now_ns, "total": len(slots), "offset": offset,
                   "next_offset": offset + limit if more else None,
                   "jobs": rows(live, slots[offset : offset + limit])})  # fmt: skip


def rows(live: Live, slots: I32) -> list[dict[str, Any]]:
    """One for each of these jobs; what is not known is null, and `why` says why."""
    if not len(slots):
        return []
    engine, view = live.engine, view_of(live)
    held = held_by(view, slots)
    rates = rates_of(view, held)
    terms, source = terms_of(view, slots, held, rates)
    best = plan(terms)
    told_s = engine.jobs.checkpoint_interval_s[slots]
    advised_s = np.asarray(engine.arbiter.leases[CONTROL].value, np.float64)[slots]
    told_s = np.where(told_s > 0, told_s, np.nan)
    # What a job reports that it keeps is so, whatever it was advised
    reported = np.isfinite(told_s) & (engine.jobs.checkpoint_told_ns[slots] > 0)
    force_s = np.where(np.isfinite(advised_s) & ~reported, advised_s, told_s)
    known_restart = engine.jobs.checkpoint_restart_s[slots] > 0
    restart_source = np.select([known_restart & (engine.jobs.recoveries[slots] > 0), known_restart],
                               [MEASURED, SAID], PRIOR)  # fmt: skip
    local_s = engine.jobs.checkpoint_local_interval_s[slots]
    local_s = np.where(local_s > 0, local_s, np.nan)
    low, high = gamma_factors(rates.shape)
    columns = {
        "failures_per_day": DAY_S * rates.per_s, "failures_per_day_low": DAY_S * rates.per_s * low,
        "failures_per_day_high": DAY_S * rates.per_s * high,
        "process_failures_per_day": DAY_S * terms.soft_per_s,
        "save_s": terms.block_s, "flush_s": terms.flush_s, "restart_s": terms.restart_s,
        "interval_s": force_s, "ettr": _worth(terms, force_s, local_s), "advised_s": advised_s,
        "local_interval_s": local_s,
        "advised_local_s": np.asarray(engine.arbiter.leases[LOCAL].value, np.float64)[slots],
        "best_interval_s": best.interval_s, "best_local_interval_s": best.local_interval_s,
        "best_ettr": best.ettr, "young_s": best.young_s, "daly_s": best.daly_s,
        **{name: ettr_at(terms, s) for name, s in FIXED_S.items()},
    }  # fmt: skip
    out = []
    for i, slot in enumerate(slots.tolist()):
        known = bool(np.isfinite(rates.per_s[i]))
        out.append({"job": engine.jobs.names[slot], "nodes": int(held.size[i]),
                    "costs": SOURCES[int(source[i])], "restart_costs": SOURCES[int(restart_source[i])],
                    "why": "" if known else NO_RATE,
                    **{name: _number(column[i]) for name, column in columns.items()}})  # fmt: skip
    return out


def _worth(terms: Terms, interval_s: F64, local_s: F64) -> F64:
    worth = ettr_at(terms, np.where(np.isfinite(interval_s), interval_s, 0.0), local_s)
    return np.where(np.isfinite(interval_s), worth, np.nan)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def view_of(live: Live) -> EngineView:
    """The state as policies see it."""
    engine = live.engine
    return EngineView(
        engine.site, engine.state, engine.jobs, engine.arbiter, engine.estimator, engine.history, (),
        engine.forecasts, engine.intake.budget_w(engine.site, engine.state.now_ns), 1.0,
        lambda _: np.zeros(0, np.int32), engine.windows, engine.diagnosis.faults, None, engine.health,
    )  # fmt: skip
