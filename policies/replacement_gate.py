"""The gate: before a node is disturbed, what is foretold of it and of leaving it alone; afterwards what came.

`uses` and `terms_of` say what is at stake, `forward` runs both courses a day ahead, `opened` writes it down.
`settle`, at every call, keeps what the job would lose at that moment, so that the loss is known when the job
is gone, and after a day puts what came beside what was foretold; `told` gives both as plain data. The score
is kept per node, and `score` sums it up. May import contracts, the replacement_* files and words of failures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from policies.replacement_costs import AT_NEXT, COURSES, QUEUE_SPARE_S, SPARE_PU, WATCH, Stakes, stakes_of
from policies.replacement_forward import DAY_S, HOUR_S, Outcome, Terms, forward, terms_of
from policies.replacement_headroom import bounds, load_w, moved, use_now
from twin.contracts import Memory, View
from twin.frame import F64, I8, I32, NS, Bool
from twin.health.failure_words import is_failure
from twin.service_book import FAILED_TEST, PASSED

__all__ = ["COLUMNS", "Outcome", "Terms", "forward", "opened", "score", "settle", "terms_of", "told", "uses"]

SERVICE = "node.service_level"
# A failure that is logged so long after its job was gone may have ended it. source: estimate
LATE_S = 900.0
TAKEN = -1  # of a job that was taken from its node, in place of when it left
MOST_TOLD = 64  # accounts of each kind in one call
# What a policy has to remember of each node for the gate; see `opened` and `settle`
COLUMNS = {
    "gate_ns": "i8",  # when it was foretold; 0 = nothing is awaited
    "gate_course": "i1",
    "gate_act_pu": "f8", "gate_wait_pu": "f8", "gate_act_gpu_h": "f8", "gate_wait_gpu_h": "f8",
    "gate_use_pu": "f8",
    "gate_sure_pu": "f8",
    "gate_slot": "i4", "gate_generation": "i4",  # the job, as place + 1; 0 = none, or it has left
    "gate_gpus": "f8", "gate_lost_s": "f8", "gate_stop_s": "f8",  # at the last look that it was there
    "gate_left_ns": "i8",  # when the job was seen to have left
    "gate_seen_ns": "i8",  # the last look
    "gate_came_gpu_h": "f8",
    "gate_failed": "i1",
    "score_count": "i4", "score_brier": "f8", "score_said_gpu_h": "f8", "score_came_gpu_h": "f8",
    "score_said_pu": "f8", "score_failed": "i4", "score_tests": "i4", "score_bad": "i4",
    "score_sure_brier": "f8", "score_lost": "i4",
}  # fmt: skip


class Score(NamedTuple):
    """How good the gate's foresight was so far, over all nodes; plain numbers.

    `brier`: mean square of (chance - what came), 0 = perfect; `said`, `came`: sums. `tests` of nodes that
    left, of which `bad` were not well; `sure_brier` of what was thought of them. `lost`: predictions that
    another one of the same node replaced before their day was over.
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


def uses(view: View, nodes: I32, spare_for: I32) -> tuple[F64, F64]:
    """(greatest share of a limit of racks, feeders and CDUs in use now, the same with the load moved) [k].

    Of those that carry the node or its spare; `spare_for` -1: no load moves. inf = unknown.
    """
    held, (busy_w, idle_w) = bounds(view), load_w(view)
    now = use_now(view, held, nodes)
    there = np.flatnonzero(spare_for >= 0)
    then = now.copy()
    if len(there):
        spare = spare_for[there].astype(np.int32)
        now[there] = np.maximum(now[there], use_now(view, held, spare))
        then[there] = moved(view, held, nodes[there], spare, busy_w, idle_w).use_pu
    return now, then


def opened(
    view: View, memory: Memory, nodes: I32, course: I8, outcome: Outcome, at: Stakes, sure_pu: F64
) -> Memory:
    """The memory with what is foretold of these nodes [k], just before they are disturbed."""
    out = {name: memory[name].copy() if name in COLUMNS else memory[name] for name in memory}
    out["score_lost"][nodes] += out["gate_ns"][nodes] > 0
    slot = view.jobs.job_of_node[nodes]
    values: dict[str, Any] = {
        "gate_ns": view.now_ns, "gate_course": course, "gate_act_pu": outcome.act_pu,
        "gate_wait_pu": outcome.wait_pu, "gate_act_gpu_h": outcome.act_gpu_h,
        "gate_wait_gpu_h": outcome.wait_gpu_h, "gate_use_pu": outcome.act_use_pu,
        "gate_sure_pu": np.nan_to_num(sure_pu), "gate_slot": slot + 1,
        "gate_generation": np.where(slot >= 0, view.jobs.generation[slot], 0),
        "gate_gpus": at.job_gpus, "gate_lost_s": at.lost_s,
        "gate_stop_s": at.restart_s + np.where(at.spare, QUEUE_SPARE_S, 0.0),
        "gate_left_ns": 0, "gate_seen_ns": view.now_ns, "gate_came_gpu_h": 0.0, "gate_failed": 0,
    }  # fmt: skip
    for name, value in values.items():
        out[name][nodes] = value
    return out


def settle(view: View, memory: Memory, has_spare: Bool | None = None) -> Memory:
    """The memory a call later: what was lost since, and the score of what is over after a day.

    Lost is the work that no durable save held when the job was last seen on the node, and its restart, if
    the node failed under it or was taken from it; and the time that the node is out of service, less where a
    spare stands in (`has_spare` [n_node]). A job that ended by itself lost nothing.
    """
    nodes = np.flatnonzero(memory["gate_ns"] > 0).astype(np.int32)
    if not len(nodes):
        return memory
    out = {name: memory[name].copy() if name in COLUMNS else memory[name] for name in memory}
    spare = np.zeros(len(nodes), np.bool_) if has_spare is None else has_spare[nodes]
    failed_ns = _failed_ns(view, nodes, out["gate_ns"][nodes])
    _idle(view, out, nodes, spare)
    _jobs(view, out, nodes, failed_ns)
    over = view.now_ns - out["gate_ns"][nodes] >= round(DAY_S * NS)
    done = nodes[over]
    if len(done):
        _score(view, out, done)
        out["gate_ns"][done] = 0
    return out


def _failed_ns(view: View, nodes: I32, since_ns: np.ndarray) -> np.ndarray:
    """When each node first failed by itself since then [k]; 0 = it did not. What it was taken out for, and
    what failed with a cause in common, nobody foretold of this node."""
    log = view.failures()
    rows = np.flatnonzero(is_failure(log) & ~log.shared)
    first = np.full(view.site.sizes["node"], np.iinfo(np.int64).max)
    after = np.full(view.site.sizes["node"], np.iinfo(np.int64).max)
    after[nodes] = since_ns
    rows = rows[log.start_ns[rows] >= after[log.node[rows]]]
    np.minimum.at(first, log.node[rows], log.start_ns[rows])
    return np.where(first[nodes] < np.iinfo(np.int64).max, first[nodes], 0)


def _idle(view: View, out: Memory, nodes: I32, spare: Bool) -> None:
    """Add the time since the last look of nodes that are out of service, or down."""
    level = view.readback(SERVICE)[nodes]
    log = view.failures()
    down = np.zeros(view.site.sizes["node"], np.bool_)
    down[log.node[is_failure(log) & (log.end_ns == 0)]] = True
    with np.errstate(invalid="ignore"):
        gone = (level >= 1.0) | down[nodes]
    gone &= view.jobs.job_of_node[nodes] < 0
    seen = np.minimum(view.now_ns, out["gate_ns"][nodes] + round(DAY_S * NS))
    hours = np.maximum(seen - out["gate_seen_ns"][nodes], 0) / NS / HOUR_S
    gpus = np.diff(view.site.gpu_start_of_node)[nodes]
    out["gate_came_gpu_h"][nodes] += np.where(gone, hours * gpus * np.where(spare, SPARE_PU, 1.0), 0.0)
    out["gate_seen_ns"][nodes] = view.now_ns


def _jobs(view: View, out: Memory, nodes: I32, failed_ns: np.ndarray) -> None:
    """Keep what jobs would lose while they are there; count it for those that were stopped."""
    jobs = view.jobs
    slot = out["gate_slot"][nodes] - 1
    here = (slot >= 0) & (jobs.job_of_node[nodes] == slot)
    here &= jobs.generation[np.maximum(slot, 0)] == out["gate_generation"][nodes]
    # A job that starts again in its place was stopped
    here &= jobs.started_ns[np.maximum(slot, 0)] <= out["gate_ns"][nodes]
    stay = nodes[here]
    if len(stay):
        at = stakes_of(view, stay, np.zeros(len(stay), np.bool_))
        out["gate_gpus"][stay], out["gate_lost_s"][stay] = at.job_gpus, at.lost_s
    left = nodes[(slot >= 0) & ~here]
    out["gate_left_ns"][left] = view.now_ns
    out["gate_slot"][left] = 0
    # One that left by itself is known as stopped only when its node is known to have failed
    gone_ns, course = out["gate_left_ns"][nodes], out["gate_course"][nodes]
    within = (failed_ns > 0) & (failed_ns <= out["gate_ns"][nodes] + round(DAY_S * NS))
    broke = within & (gone_ns > 0) & (failed_ns <= gone_ns + round(LATE_S * NS))
    # An idle node interrupts nobody, but is foretold to fail where it stays in service
    broke |= within & (gone_ns == 0) & (out["gate_slot"][nodes] == 0) & (course == WATCH)
    fresh = broke & (out["gate_failed"][nodes] == 0)
    taken = np.isin(nodes, left) & (course >= AT_NEXT) & ~broke
    taken &= _ordered(view, nodes)
    stopped = (fresh & (gone_ns > 0)) | taken
    lost_s = out["gate_lost_s"][nodes] + out["gate_stop_s"][nodes]
    out["gate_came_gpu_h"][nodes] += np.where(stopped, out["gate_gpus"][nodes] * lost_s / HOUR_S, 0.0)
    out["gate_failed"][nodes[fresh]] = 1
    out["gate_left_ns"][nodes[taken]] = TAKEN  # what fails from here on interrupts nobody


def _ordered(view: View, nodes: I32) -> Bool:
    """Nodes that are ordered to be drained, or are [k]."""
    level = np.fmax(view.commanded(SERVICE)[nodes], view.readback(SERVICE)[nodes])
    with np.errstate(invalid="ignore"):
        out: Bool = level >= 2.0
    return out


def _score(view: View, out: Memory, done: I32) -> None:
    """Put what came beside what was foretold, for these nodes."""
    acted = out["gate_course"][done] != WATCH
    said = np.where(acted, out["gate_act_pu"][done], out["gate_wait_pu"][done])
    cost = np.where(acted, out["gate_act_gpu_h"][done], out["gate_wait_gpu_h"][done])
    known = np.isfinite(said) & np.isfinite(cost)
    rows, said, cost = done[known], said[known], cost[known]
    failed = out["gate_failed"][rows].astype(np.float64)
    out["score_count"][rows] += 1
    out["score_brier"][rows] += (said - failed) ** 2
    out["score_said_pu"][rows] += said
    out["score_failed"][rows] += failed.astype(np.int32)
    out["score_said_gpu_h"][rows] += cost
    out["score_came_gpu_h"][rows] += out["gate_came_gpu_h"][rows]
    book = view.service()
    after = book.ended_ns[done] > out["gate_ns"][done]
    bad = after & (book.result[done] == FAILED_TEST)
    bad |= (book.repaired_ns[done] > out["gate_ns"][done]) | (book.replaced_ns[done] > out["gate_ns"][done])
    tested = acted & (bad | (after & (book.result[done] == PASSED)))
    rows, truth = done[tested], bad[tested].astype(np.float64)
    out["score_tests"][rows] += 1
    out["score_bad"][rows] += truth.astype(np.int32)
    out["score_sure_brier"][rows] += (out["gate_sure_pu"][rows] - truth) ** 2


def score(memory: Memory) -> Score:
    """The running score over all nodes, as plain numbers."""
    total = {name: memory[name].sum().item() for name in COLUMNS if name.startswith("score_")}
    settled, tests = int(total["score_count"]), int(total["score_tests"])
    return Score(
        settled, total["score_brier"] / max(settled, 1), total["score_said_pu"], int(total["score_failed"]),
        total["score_said_gpu_h"], total["score_came_gpu_h"], tests, int(total["score_bad"]),
        total["score_sure_brier"] / max(tests, 1), int(total["score_lost"]),
    )  # fmt: skip


def told(view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
    """Accounts of what was foretold, and of what is known to have come of it, since `before`."""
    out: list[dict[str, Any]] = []
    new = np.flatnonzero((after["gate_ns"] != before["gate_ns"]) & (after["gate_ns"] > 0))
    for node in new[:MOST_TOLD].tolist():
        out.append({"what": "gate", "at_ns": int(after["gate_ns"][node])} | _both(view, after, node))
    over = np.flatnonzero((before["gate_ns"] > 0) & (after["gate_ns"] == 0))
    total = score(after)
    for node in over[:MOST_TOLD].tolist():
        came = {
            "what": "outcome", "at_ns": int(before["gate_ns"][node]),
            "failed": bool(after["gate_failed"][node]), "lost_gpu_h": float(after["gate_came_gpu_h"][node]),
        }  # fmt: skip
        out.append(came | _both(view, after, node) | {f"score_{k}": x for k, x in total._asdict().items()})
    return out


def _both(view: View, memory: Memory, node: int) -> dict[str, Any]:
    """What was foretold of a node, as plain data; what nobody knew is None."""
    names = ("act_gpu_h", "wait_gpu_h", "act_pu", "wait_pu", "use_pu")
    numbers = {name: float(memory[f"gate_{name}"][node]) for name in names}
    known = {name: x if np.isfinite(x) else None for name, x in numbers.items()}
    return {"node": view.site.name("node", node), "course": COURSES[int(memory["gate_course"][node])]} | known
