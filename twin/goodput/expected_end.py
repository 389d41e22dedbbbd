"""Expected end of a job: by the training that it says is left, or by its time limit."""

from __future__ import annotations

from typing import Literal, NamedTuple

from twin.catalogue import NS, TABLES
from twin.goodput.goodput import GoodputState
from twin.telemetry import JobSlots, State

REMAINING = TABLES["job"].by_name["remaining_s"]
WATCHED_S = 600.0  # of a job, before its share of training counts; source: estimate
LONGEST_S = 1e9  # of a time limit that ends anything: thirty years; source: estimate
LEAST_SHARE_PU = 0.05  # of training, below which what is left says nothing of an end; source: estimate


class ExpectedEnd(NamedTuple):
    """Expected end of a job, and its basis: the reported `progress`, or the time limit if that is earlier."""

    at_ns: int
    by: Literal["progress", "time_limit"]


def expected_end(state: State, jobs: JobSlots, goodput: GoodputState, slot: int) -> ExpectedEnd | None:
    """The end that is expected now; None where neither a limit nor current progress is known.

    Training that is left takes longer by the share of time in which the job stands still.
    """
    limit_s = float(jobs.time_limit_s[slot])
    by_progress = _by_progress(state, goodput, slot)
    if not 0.0 < limit_s <= LONGEST_S:
        return by_progress
    by_limit = ExpectedEnd(int(jobs.running_since_ns(slot)) + round(limit_s * NS), "time_limit")
    if by_limit.at_ns <= state.now_ns:  # suspended, or its scheduler lets it run on: the limit says nothing
        return by_progress
    return by_limit if by_progress is None else min(by_limit, by_progress)


def _by_progress(state: State, goodput: GoodputState, slot: int) -> ExpectedEnd | None:
    table = state.tables["job"]
    if not bool(table.current(REMAINING, state.now_ns, slot)):
        return None
    trained_s, still_s = float(goodput.trained_s[slot]), float(goodput.still_s[slot])
    watched_s = trained_s + still_s
    share = trained_s / watched_s if watched_s >= WATCHED_S else 1.0
    if share < LEAST_SHARE_PU:
        return None
    said_ns = int(table.last_good_ns(REMAINING, slice(slot, slot + 1))[0])
    left_s = float(table.value[REMAINING.row, slot]) / share
    return ExpectedEnd(max(said_ns + round(left_s * NS), state.now_ns), "progress")
