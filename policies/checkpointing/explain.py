"""Explanation of checkpointing: each training job's failure rate, its interval in force, and the best one.

Made with the functions that choose the intervals, on the state of now, whether or not the policy runs.
"""

from __future__ import annotations

import numpy as np

from policies.checkpointing.costs import DECLARED, MEASURED, PRIOR, SOURCES, save_terms
from policies.checkpointing.hazard import DAY_S, interruption_rates, job_nodes
from policies.checkpointing.plan import SaveTerms, best_plan, ettr_at
from policies.checkpointing.single_tier import FIXED_S
from policies.checkpointing.texts import INTERVAL, LOCAL, span
from twin.catalogue import F64, I32, clean
from twin.contracts import (
    ExplainRequest,
    Explanation,
    ExplanationRefused,
    KeyFigure,
    LeaseColumns,
    Memory,
    Sentence,
    TableColumn,
    Topic,
    TopicOption,
    Value,
    View,
    entities_within,
    finite,
    gamma_factors,
    table_of,
)
from twin.telemetry import KINDS

NAME = "checkpoint"
TRAINING = KINDS.index("training")
MOST_ROWS = 1000
MOST_NAMED = 5  # jobs in one sentence
SAME_PU = 0.01  # of an interval: a smaller difference is none
NO_RATE = "no failure forecast for most of its nodes: expected the model `failure`, and nodes that report"
TOPICS = (
    Topic(
        "plan",
        "each training job's failure rate, intervals in force and best, and the worth of fixed ones",
        (
            TopicOption("job", "this job alone"),
            TopicOption("offset", "rows to skip", "integer", 0, 0, 1e9),
            TopicOption("limit", "rows at most", "integer", 100, 1, MOST_ROWS),
        ),
        path="checkpoints",
    ),
)
BRIEF = (
    TableColumn("job"), TableColumn("nodes", "count"),
    TableColumn("failure_each_s", "s", "mean time to failure"),
    TableColumn("interval_s", "s", "interval in force"),
    TableColumn("ettr", "1", "forecast goodput"),
    TableColumn("best_interval_s", "s", "best interval"),
    TableColumn("best_ettr", "1", "forecast goodput at the best"),
    TableColumn("fixed_30_min", "1", "at 30 min"), TableColumn("fixed_60_min", "1", "at 60 min"),
    TableColumn("fixed_120_min", "1", "at 120 min"),
)  # fmt: skip
# Figures of one job: field of its row, unit, text
JOB_FIGURES = (
    ("nodes", "count", "nodes of the job"), ("failures_per_day", "1/d", "failures of its nodes per day"),
    ("failures_per_day_low", "1/d", "lower end, 90 %"), ("failures_per_day_high", "1/d", "upper end, 90 %"),
    ("process_failures_per_day", "1/d", "failures of its processes per day"),
    ("interval_s", "s", "interval in force"), ("ettr", "1", "share of its time spent training"),
    ("advised_s", "s", "interval advised"), ("best_interval_s", "s", "best interval now"),
    ("best_ettr", "1", "forecast share spent training"), ("local_interval_s", "s", "between saves to memory"),
    ("best_local_interval_s", "s", "best between saves to memory"), ("young_s", "s", "by Young's rule"),
    ("daly_s", "s", "by Daly's rule"), ("fixed_30_min", "1", "share that it trains at 30 min"),
    ("fixed_60_min", "1", "at 60 min"), ("fixed_120_min", "1", "at 120 min"),
)  # fmt: skip
Row = dict[str, Value]


def explain(view: View, memory: Memory, request: ExplainRequest) -> Explanation:
    """Return the explanation of all training jobs, of those on an entity, or of one job."""
    jobs = view.jobs
    slots = np.flatnonzero(jobs.alive & (jobs.kind == TRAINING)).astype(np.int32)
    if request.topic == "plan":
        return _plan(view, memory, request, slots)
    entity = ""
    if request.entity:
        table, entity, inside = entities_within(view, request.entity)
        if table == "job":
            return _of_job(view, memory, request, int(inside["job"][0]))
        slots = slots[np.isin(slots, jobs.job_of_node[inside.get("node", np.zeros(0, np.int32))])]
    rows = [
        row | {"failure_each_s": _failure_each_s(row)}
        for row in rows_of(view, memory, request, slots[:MOST_ROWS])
    ]
    where = f" on {clean(entity, 120)}" if entity else ""
    text = f"{len(slots):,} training jobs{where}" if len(slots) else f"no training job is known to run{where}"
    sentences = [Sentence(text), *(Sentence(why, "note") for why in _unknown(rows))]
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        entity=entity,
        sentences=tuple(sentences),
        tables=(table_of("jobs", BRIEF, rows, "training jobs", len(slots)),),
    )


def _plan(view: View, memory: Memory, request: ExplainRequest, slots: I32) -> Explanation:
    """Return all figures of the jobs, page by page."""
    job = request.options.get("job")
    if job is not None:
        slot = view.jobs.slot_of.get(str(job))
        if slot is None or not view.jobs.alive[slot]:
            raise ExplanationRefused(f"no job {clean(str(job), 80)} is known to run", "unknown")
        slots = np.array([slot], np.int32)
    offset, limit = int(request.options.get("offset") or 0), int(request.options.get("limit") or 100)
    more = offset + limit < len(slots)
    rows = rows_of(view, memory, request, slots[offset : offset + limit])
    page: Row = {
        "total": len(slots),
        "offset": offset,
        "next_offset": offset + limit if more else None,
    }
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        figures=tuple(KeyFigure(name, value) for name, value in page.items()),
        tables=(table_of("jobs", list(rows[0]) if rows else ["job"], rows, total=len(slots)),),
    )


def _of_job(view: View, memory: Memory, request: ExplainRequest, slot: int) -> Explanation:
    """Return one job: its rates, intervals and costs, and the reasons of proposals in force."""
    (row,) = rows_of(view, memory, request, np.array([slot], np.int32))
    sentences = [Sentence(f"job {row['job']}: {row['why']}" if row["why"] else _interval_text(row))]
    for proposal in request.status(NAME).proposals:
        if slot in proposal.index:
            sentences.append(Sentence(f"proposed: {clean(proposal.reason, 400)}"))
    advised_s, kept_s = row["advised_s"], row["interval_s"]
    if isinstance(advised_s, float) and isinstance(kept_s, float) and abs(kept_s / advised_s - 1.0) > SAME_PU:
        text = f"it was advised {span(advised_s)}, and reports that it keeps {span(kept_s)}"
        sentences.append(Sentence(text, "warning"))
    sentences.append(Sentence(_cost_text(row), "note"))
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        entity=str(row["job"]),
        sentences=tuple(sentences),
        figures=tuple(KeyFigure(name, row[name], unit, text) for name, unit, text in JOB_FIGURES),
    )


def rows_of(view: View, memory: Memory, request: ExplainRequest, slots: I32) -> list[Row]:
    """Return a row for each of these jobs; unknown figures are None, and `why` gives the reason."""
    if not len(slots):
        return []
    jobs, nodes = view.jobs, job_nodes(view, slots)
    rates = interruption_rates(view, nodes)
    terms, source = save_terms(view, slots, nodes, rates)
    measured_s = terms.restart_s
    terms = terms._replace(restart_s=restart_now_s(memory, slots, measured_s))
    best = best_plan(terms)
    stated_s, local_s = (
        np.where(x > 0, x, np.nan)
        for x in (jobs.checkpoint_interval_s[slots], jobs.checkpoint_local_interval_s[slots])
    )
    advised_s, advised_local_s = (_leased(request.leases(control), slots) for control in (INTERVAL, LOCAL))
    # The interval that a job reports to keep is in force, whatever it was advised
    reported = np.isfinite(stated_s) & (jobs.checkpoint_told_ns[slots] > 0)
    force_s = np.where(np.isfinite(advised_s) & ~reported, advised_s, stated_s)
    known = jobs.checkpoint_restart_s[slots] > 0
    restart_source = np.select([known & (jobs.recoveries[slots] > 0), known], [MEASURED, DECLARED], PRIOR)
    low, high = gamma_factors(rates.shape)
    columns = {
        "failures_per_day": DAY_S * rates.per_s,
        "failures_per_day_low": DAY_S * rates.per_s * low,
        "failures_per_day_high": DAY_S * rates.per_s * high,
        "process_failures_per_day": DAY_S * terms.soft_per_s,
        "save_s": terms.block_s,
        "flush_s": terms.flush_s,
        "restart_s": measured_s,
        "restart_now_s": terms.restart_s,
        "interval_s": force_s,
        "ettr": _worth(terms, force_s, local_s),
        "advised_s": advised_s,
        "local_interval_s": local_s,
        "advised_local_s": advised_local_s,
        "best_interval_s": best.interval_s,
        "best_local_interval_s": best.local_interval_s,
        "best_ettr": best.ettr,
        "young_s": best.young_s,
        "daly_s": best.daly_s,
        **{name: ettr_at(terms, s) for name, s in FIXED_S.items()},
    }
    out = []
    for i, slot in enumerate(slots.tolist()):
        row: Row = {
            "job": jobs.names[slot],
            "nodes": int(nodes.size[i]),
            "costs": SOURCES[int(source[i])],
            "restart_costs": SOURCES[int(restart_source[i])],
            "why": "" if np.isfinite(rates.per_s[i]) else NO_RATE,
        }
        out.append(row | {name: finite(column[i]) for name, column in columns.items()})
    return out


def restart_now_s(memory: Memory, slots: I32, measured_s: F64) -> F64:
    """Return restart times at the storage load of the policy's last look, otherwise as measured [m]."""
    now = memory.get("restart_s")
    if now is None:
        return measured_s
    return np.where(now[slots] > 0, now[slots], measured_s)


def _leased(leases: LeaseColumns | None, slots: I32) -> F64:
    """Return the advised interval of each job; NaN without advice."""
    return np.full(len(slots), np.nan) if leases is None else np.asarray(leases.value, np.float64)[slots]


def _worth(terms: SaveTerms, interval_s: F64, local_s: F64) -> F64:
    worth = ettr_at(terms, np.where(np.isfinite(interval_s), interval_s, 0.0), local_s)
    return np.where(np.isfinite(interval_s), worth, np.nan)


def _failure_each_s(row: Row) -> float | None:
    rate = row["failures_per_day"]
    return DAY_S / rate if isinstance(rate, float) and rate > 0.0 else None


def _unknown(rows: list[Row]) -> list[str]:
    """Return the reasons for missing figures, each with the jobs concerned."""
    of: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            of.setdefault(str(row["why"]), []).append(clean(str(row["job"]), 40))
    return [
        f"{', '.join(jobs[:MOST_NAMED])}"
        + (f" and {len(jobs) - MOST_NAMED:,} more" if len(jobs) > MOST_NAMED else "")
        + f": {why}"
        for why, jobs in of.items()
    ]


def _interval_text(row: Row) -> str:
    best_s, ettr = row["best_interval_s"], row["best_ettr"]
    if not isinstance(best_s, float) or not isinstance(ettr, float):
        return f"job {row['job']}: no failure is expected, so any interval is good"
    kept_s = row["interval_s"]
    kept = f"it saves every {span(kept_s)}" if isinstance(kept_s, float) else "its interval is unknown"
    share = f"{100 * ettr:.1f} % of its time"
    return f"job {row['job']}: {kept}; best is every {span(best_s)}, at which it trains {share}"


def _cost_text(row: Row) -> str:
    names = ("save_s", "flush_s", "restart_s")
    save_s, flush_s, restart_s = (x if isinstance(x := row[name], float) else 0.0 for name in names)
    durable = f" and is durable {span(flush_s)} later" if flush_s else ""
    now_s = row["restart_now_s"]
    now = ""
    if isinstance(now_s, float) and abs(now_s - restart_s) > SAME_PU * restart_s:
        now = f", {span(now_s)} at the load of storage now"
    return (
        f"a save stops it for {span(save_s)}{durable} ({row['costs']}), a restart takes {span(restart_s)} "
        f"({row['restart_costs']}){now}"
    )
