"""Predictions: expected losses of disturbing a node and of waiting, recorded before a step, then scored.

`record_predictions` stores a prediction; `settle`, at every run, stores what the job would lose at that
moment, so that the loss is known when the job is gone, and after a day scores the prediction by the outcome;
`prediction_accounts` gives both as plain data. The score is kept per node, and `score` sums it up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from policies.node_replacement.cost_benefit import DAY_S, HOUR_S, OptionOutcome
from policies.node_replacement.costs import (
    AT_NEXT,
    OPTIONS,
    QUEUE_SPARE_S,
    SPARE_PU,
    WATCH,
    Stakes,
    stakes_of,
)
from policies.node_replacement.headroom import load_limits, load_w, present_use, shift_load
from twin.catalogue import F64, I8, I32, NS, Bool
from twin.contracts import FAILED_TEST, PASSED, Memory, View, finite, is_failure
from twin.telemetry import ColumnSpec

SERVICE = "node.service_level"
# A failure logged so long after its job left may have ended the job. source: estimate
LATE_REPORT_S = 900.0
JOB_REMOVED = -1  # in place of the instant that a job left: a drain removed it
MOST_ACCOUNTS = 64  # accounts of each kind in one call
# Memory of each node for its open prediction, and the name in snapshots of earlier versions
COLUMNS = {
    "prediction_ns": ColumnSpec("i8", was="gate_ns"),  # 0 = none is open
    "prediction_option": ColumnSpec("i1", was="gate_course"),
    "prediction_actual_gpu_h": ColumnSpec("f8", was="gate_came_gpu_h"),
    # The job, as slot + 1 (0 = none, or it has left), and what it would lose, as last seen
    **{f"prediction_{name}": ColumnSpec(kind, was=f"gate_{name}")
       for name, kind in {"slot": "i4", "generation": "i4", "gpus": "f8", "lost_s": "f8", "stop_s": "f8",
                          "left_ns": "i8", "seen_ns": "i8", "failed": "i1"}.items()},
    **{f"prediction_{name}": ColumnSpec("f8", was=f"gate_{name}")
       for name in ("act_pu", "wait_pu", "act_gpu_h", "wait_gpu_h", "use_pu", "sure_pu")},
}  # fmt: skip
SCORES = {
    "score_count": ColumnSpec("i8", merge="sum"),
    "score_brier": ColumnSpec("f8", merge="sum"),
    "score_predicted_gpu_h": ColumnSpec("f8", was="score_said_gpu_h", merge="sum"),
    "score_actual_gpu_h": ColumnSpec("f8", was="score_came_gpu_h", merge="sum"),
    "score_predicted_pu": ColumnSpec("f8", was="score_said_pu", merge="sum"),
    "score_failed": ColumnSpec("i8", merge="sum"),
    "score_tests": ColumnSpec("i8", merge="sum"),
    "score_bad": ColumnSpec("i8", merge="sum"),
    "score_sure_brier": ColumnSpec("f8", merge="sum"),
    "score_lost": ColumnSpec("i8", merge="sum"),
}


@dataclass(frozen=True, slots=True)
class PredictionScore:
    """The score of all predictions so far; plain numbers.

    `brier`: mean square of (chance - outcome), 0 = perfect. `said`, `came`: sums of predictions and outcomes.
    `tests` of nodes that left, of which `bad` were faulty; `sure_brier` of the sureness that they were.
    `lost`: predictions replaced by another one of the same node before their day was over.
    """

    settled: int
    brier: float
    said_pu: float
    failed: int
    said_gpu_h: float
    came_gpu_h: float
    tests: int
    bad: int
    sure_brier: float
    lost: int


def limit_use(view: View, nodes: I32, spare_for: I32) -> tuple[F64, F64]:
    """Return (greatest used share of a limit of racks, feeders and CDUs, the same with the load moved)
    [k].

    Of those that carry the node or its spare; `spare_for` -1: no load moves. inf = unknown.
    """
    held, (busy_w, idle_w) = load_limits(view), load_w(view)
    now = present_use(view, held, nodes)
    there = np.flatnonzero(spare_for >= 0)
    then = now.copy()
    if len(there):
        spare = spare_for[there].astype(np.int32)
        now[there] = np.maximum(now[there], present_use(view, held, spare))
        then[there] = shift_load(view, held, nodes[there], spare, busy_w, idle_w).use_pu
    return now, then


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcome of an option for these nodes [k], the stakes, and the confidence in the fault."""

    nodes: I32
    option: I8
    outcome: OptionOutcome
    stakes: Stakes
    sure_pu: F64


def record_predictions(view: View, memory: Memory, made: Prediction) -> Memory:
    """Return the memory with a prediction, made just before the nodes are disturbed."""
    out = {name: memory[name].copy() if name in COLUMNS else memory[name] for name in memory}
    nodes, at = made.nodes, made.stakes
    _add(out, "score_lost", out["prediction_ns"][nodes] > 0)
    slot = view.jobs.job_of_node[nodes]
    values: dict[str, Any] = {
        "prediction_ns": view.now_ns,
        "prediction_option": made.option,
        "prediction_act_pu": made.outcome.act_pu,
        "prediction_wait_pu": made.outcome.wait_pu,
        "prediction_act_gpu_h": made.outcome.act_gpu_h,
        "prediction_wait_gpu_h": made.outcome.wait_gpu_h,
        "prediction_use_pu": made.outcome.act_use_pu,
        "prediction_sure_pu": np.nan_to_num(made.sure_pu),
        "prediction_slot": slot + 1,
        "prediction_generation": np.where(slot >= 0, view.jobs.generation[slot], 0),
        "prediction_gpus": at.job_gpus,
        "prediction_lost_s": at.lost_s,
        "prediction_stop_s": at.restart_s + np.where(at.spare, QUEUE_SPARE_S, 0.0),
        "prediction_left_ns": 0,
        "prediction_seen_ns": view.now_ns,
        "prediction_actual_gpu_h": 0.0,
        "prediction_failed": 0,
    }
    for name, value in values.items():
        out[name][nodes] = value
    return out


def settle(view: View, memory: Memory, has_spare: Bool | None = None) -> Memory:
    """Return the memory one run later: the losses since, and the score of predictions that are a day old.

    Lost is the work that no durable save held when the job was last seen on the node, and its restart, if
    the node failed under it or was taken from it; and the time that the node is out of service, less where a
    spare stands in (`has_spare` [n_node]). A job that ended by itself lost nothing.
    """
    nodes = np.flatnonzero(memory["prediction_ns"] > 0).astype(np.int32)
    if not len(nodes):
        return memory
    out = {name: memory[name].copy() if name in COLUMNS else memory[name] for name in memory}
    spare = np.zeros(len(nodes), np.bool_) if has_spare is None else has_spare[nodes]
    failed_ns = _first_failure_ns(view, nodes, out["prediction_ns"][nodes])
    _add_idle_time(view, out, nodes, spare)
    _add_lost_work(view, out, nodes, failed_ns)
    over = view.now_ns - out["prediction_ns"][nodes] >= round(DAY_S * NS)
    done = nodes[over]
    if len(done):
        _score_finished(view, out, done)
        out["prediction_ns"][done] = 0
    return out


def _first_failure_ns(view: View, nodes: I32, since_ns: np.ndarray) -> np.ndarray:
    """The instant at which each node first failed by itself since then [k]; 0 = it did not. Withdrawals and
    failures with a common cause were not predicted for this node."""
    log = view.failures()
    rows = np.flatnonzero(is_failure(log) & ~log.shared)
    first = np.full(view.site.sizes["node"], np.iinfo(np.int64).max)
    after = np.full(view.site.sizes["node"], np.iinfo(np.int64).max)
    after[nodes] = since_ns
    rows = rows[log.start_ns[rows] >= after[log.node[rows]]]
    np.minimum.at(first, log.node[rows], log.start_ns[rows])
    return np.where(first[nodes] < np.iinfo(np.int64).max, first[nodes], 0)


def _add_idle_time(view: View, out: Memory, nodes: I32, spare: Bool) -> None:
    """Add the time since the last run of nodes that are out of service, or down."""
    level = view.readback(SERVICE)[nodes]
    log = view.failures()
    down = np.zeros(view.site.sizes["node"], np.bool_)
    down[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    with np.errstate(invalid="ignore"):
        gone = (level >= 1.0) | down[nodes]
    gone &= view.jobs.job_of_node[nodes] < 0
    seen = np.minimum(view.now_ns, out["prediction_ns"][nodes] + round(DAY_S * NS))
    hours = np.maximum(seen - out["prediction_seen_ns"][nodes], 0) / NS / HOUR_S
    gpus = np.diff(view.site.gpu_start_of_node)[nodes]
    out["prediction_actual_gpu_h"][nodes] += np.where(
        gone, hours * gpus * np.where(spare, SPARE_PU, 1.0), 0.0
    )
    out["prediction_seen_ns"][nodes] = view.now_ns


def _add_lost_work(view: View, out: Memory, nodes: I32, failed_ns: np.ndarray) -> None:
    """Store the loss that running jobs would have; add it for jobs that were stopped."""
    jobs = view.jobs
    slot = out["prediction_slot"][nodes] - 1
    here = (slot >= 0) & (jobs.job_of_node[nodes] == slot)
    here &= jobs.generation[np.maximum(slot, 0)] == out["prediction_generation"][nodes]
    # A job that starts again in its place was stopped
    here &= jobs.started_ns[np.maximum(slot, 0)] <= out["prediction_ns"][nodes]
    stay = nodes[here]
    if len(stay):
        at = stakes_of(view, stay, np.zeros(len(stay), np.bool_))
        out["prediction_gpus"][stay], out["prediction_lost_s"][stay] = at.job_gpus, at.lost_s
    left = nodes[(slot >= 0) & ~here]
    out["prediction_left_ns"][left] = view.now_ns
    out["prediction_slot"][left] = 0
    # A job that left by itself counts as stopped only once its node is known to have failed
    gone_ns, option = out["prediction_left_ns"][nodes], out["prediction_option"][nodes]
    within = (failed_ns > 0) & (failed_ns <= out["prediction_ns"][nodes] + round(DAY_S * NS))
    broke = within & (gone_ns > 0) & (failed_ns <= gone_ns + round(LATE_REPORT_S * NS))
    # An idle node interrupts no job, but is predicted to fail where it stays in service
    broke |= within & (gone_ns == 0) & (out["prediction_slot"][nodes] == 0) & (option == WATCH)
    fresh = broke & (out["prediction_failed"][nodes] == 0)
    taken = np.isin(nodes, left) & (option >= AT_NEXT) & ~broke
    taken &= _draining(view, nodes)
    stopped = (fresh & (gone_ns > 0)) | taken
    lost_s = out["prediction_lost_s"][nodes] + out["prediction_stop_s"][nodes]
    out["prediction_actual_gpu_h"][nodes] += np.where(
        stopped, out["prediction_gpus"][nodes] * lost_s / HOUR_S, 0.0
    )
    out["prediction_failed"][nodes[fresh]] = 1
    out["prediction_left_ns"][nodes[taken]] = JOB_REMOVED  # a failure from here on interrupts no job


def _draining(view: View, nodes: I32) -> Bool:
    """Return the nodes that are drained, or commanded to be [k]."""
    level = np.fmax(view.commanded(SERVICE)[nodes], view.readback(SERVICE)[nodes])
    with np.errstate(invalid="ignore"):
        out: Bool = level >= 2.0
    return out


def _score_finished(view: View, out: Memory, done: I32) -> None:
    """Compare the outcome with the prediction, for these nodes."""
    acted = out["prediction_option"][done] != WATCH
    predicted = np.where(acted, out["prediction_act_pu"][done], out["prediction_wait_pu"][done])
    cost = np.where(acted, out["prediction_act_gpu_h"][done], out["prediction_wait_gpu_h"][done])
    known = np.isfinite(predicted) & np.isfinite(cost)
    rows, predicted, cost = done[known], predicted[known], cost[known]
    failed = out["prediction_failed"][rows].astype(np.float64)
    _add(out, "score_count", np.ones(len(rows)))
    _add(out, "score_brier", (predicted - failed) ** 2)
    _add(out, "score_predicted_pu", predicted)
    _add(out, "score_failed", failed)
    _add(out, "score_predicted_gpu_h", cost)
    _add(out, "score_actual_gpu_h", out["prediction_actual_gpu_h"][rows])
    book = view.service()
    after = book.ended_ns[done] > out["prediction_ns"][done]
    bad = after & (book.result[done] == FAILED_TEST)
    bad |= (book.repaired_ns[done] > out["prediction_ns"][done]) | (
        book.replaced_ns[done] > out["prediction_ns"][done]
    )
    tested = acted & (bad | (after & (book.result[done] == PASSED)))
    rows, truth = done[tested], bad[tested].astype(np.float64)
    _add(out, "score_tests", truth >= 0)
    _add(out, "score_bad", truth)
    _add(out, "score_sure_brier", (out["prediction_sure_pu"][rows] - truth) ** 2)


def _add(out: Memory, name: str, values: np.ndarray) -> None:
    out[name] = (out[name] + values.sum()).astype(out[name].dtype)


def score(memory: Memory) -> PredictionScore:
    """Return the running score over all nodes, as plain numbers."""
    total = {name: memory[name].item() for name in SCORES}
    settled, tests = int(total["score_count"]), int(total["score_tests"])
    return PredictionScore(
        settled,
        total["score_brier"] / max(settled, 1),
        total["score_predicted_pu"],
        int(total["score_failed"]),
        total["score_predicted_gpu_h"],
        total["score_actual_gpu_h"],
        tests,
        int(total["score_bad"]),
        total["score_sure_brier"] / max(tests, 1),
        int(total["score_lost"]),
    )


def prediction_accounts(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Return the accounts of predictions made and of outcomes known, since `before`."""
    out: list[dict[str, Any]] = []
    new = np.flatnonzero((after["prediction_ns"] != before["prediction_ns"]) & (after["prediction_ns"] > 0))
    for node in new[:MOST_ACCOUNTS].tolist():
        out.append(
            {"what": "gate", "at_ns": int(after["prediction_ns"][node])}
            | _predicted_figures(view, after, node)
        )
    over = np.flatnonzero((before["prediction_ns"] > 0) & (after["prediction_ns"] == 0))
    total = score(after)
    for node in over[:MOST_ACCOUNTS].tolist():
        came = {
            "what": "outcome",
            "at_ns": int(before["prediction_ns"][node]),
            "failed": bool(after["prediction_failed"][node]),
            "lost_gpu_h": float(after["prediction_actual_gpu_h"][node]),
        }
        out.append(
            came | _predicted_figures(view, after, node) | {f"score_{k}": x for k, x in asdict(total).items()}
        )
    return out


def _predicted_figures(view: View, memory: Memory, node: int) -> dict[str, Any]:
    """Return the prediction for a node, as plain data; unknown figures are None."""
    names = ("act_gpu_h", "wait_gpu_h", "act_pu", "wait_pu", "use_pu")
    known = {name: finite(memory[f"prediction_{name}"][node]) for name in names}
    return {
        "node": view.site.name("node", node),
        "course": OPTIONS[int(memory["prediction_option"][node])],
    } | known
