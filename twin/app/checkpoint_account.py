"""What a job has of its time: work that a failure does not take back, under many rules of saving at once.

Time runs in pieces, over each of which every rule's interval stays the same. From a strike on the job
restarts for `restart_s`; then it works until as much was done since its last save began as its interval
says, stands still for `save_s`, and works on. A save is durable `flush_s` after training goes on; until then
the work that it holds is at risk, and no other save begins. A strike takes all work that no durable save
holds, and one while the job restarts makes it restart anew. What was done by the end counts. Exact: no steps
in time. Part of the shell; NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.frame import F64, Bool


class Costs(NamedTuple):
    """What saves and restarts take in truth, seconds."""

    save_s: float
    restart_s: float
    flush_s: float = 0.0


class Course(NamedTuple):
    """What came of each rule in each piece [n_piece, n_rule]: work done less work lost; saves begun.

    length_s [n_piece]. Work that a strike takes is taken from the piece that it ends, if it was done before.
    """

    length_s: F64
    useful_s: F64
    saves: F64


class Alarms(NamedTuple):
    """A failure is foretold at the begin of a piece [n_piece], to rules that heed it [n_rule].

    They save at once where at least `least_s` of work is at risk and no other save is under way.
    """

    rings: Bool
    heeds: Bool
    least_s: float


def run(edge_s: F64, strike: Bool, interval_s: F64, costs: Costs, alarms: Alarms | None = None) -> Course:
    """Go through the pieces.

    edge_s [n_piece + 1]: their ends, ascending; strike [n_piece]: whether a failure ends a piece; interval_s
    [n_piece, n_rule], `inf`: no save.
    """
    useful, saves = np.zeros_like(interval_s), np.zeros_like(interval_s)
    length_s = np.diff(edge_s)
    ages = _Ages(interval_s.shape[1], costs)
    restart_s = 0.0
    for i, left_s in enumerate(length_s.tolist()):
        if restart_s > 0.0:
            spent_s = min(restart_s, left_s)
            restart_s, left_s = restart_s - spent_s, left_s - spent_s
        elif alarms is not None and alarms.rings[i]:
            saves[i] += ages.ahead(alarms)
        if left_s > 0.0:
            done_s, begun = ages.work(left_s, interval_s[i])
            useful[i] += done_s
            saves[i] += begun
        if strike[i]:
            useful[i] -= ages.lose()
            restart_s = costs.restart_s
    return Course(length_s, useful, saves)


class _Ages:
    """Each rule's place between two saves [n_rule]: seconds since the last one began, and what it holds."""

    def __init__(self, n_rule: int, costs: Costs) -> None:
        self.save_s, self.flush_s = costs.save_s, costs.flush_s
        self.since_s = np.full(n_rule, costs.save_s)  # as if a save had just ended
        self.holds_s = np.zeros(n_rule)  # of work at risk until that save is durable

    def ahead(self, alarms: Alarms) -> F64:
        """Save now where enough work is at risk and the last save is durable. How many saves [n_rule]."""
        durable = (self.since_s >= self.save_s + self.flush_s) | (self.holds_s == 0.0)
        due = alarms.heeds & durable & (self.since_s - self.save_s >= max(alarms.least_s, 1e-9))
        self._begin(due)
        out: F64 = due.astype(np.float64)
        return out

    def _begin(self, due: Bool) -> None:
        self.holds_s = np.where(due, self.since_s - self.save_s, self.holds_s)
        self.since_s = np.where(due, 0.0, self.since_s)

    def work(self, span_s: float, interval_s: F64) -> tuple[F64, F64]:
        """(work done, saves begun) over a span under these intervals [n_rule]."""
        # Two saves never overlap: the next waits until the last is durable.
        interval_s = np.maximum(interval_s, self.flush_s)
        overdue = self.since_s - self.save_s >= interval_s
        self._begin(overdue)
        period_s = self.save_s + interval_s
        before_s = np.maximum(self.since_s - self.save_s, 0.0)
        with np.errstate(invalid="ignore"):
            turns = np.floor((self.since_s + span_s) / period_s)
            whole_s = np.where(turns > 0, turns * interval_s, 0.0)
            past_s = np.where(turns > 0, turns * period_s, 0.0)
        self.since_s = np.maximum(self.since_s + span_s - past_s, 0.0)
        self.holds_s = np.where(turns > 0, interval_s, self.holds_s)
        done_s = whole_s + np.maximum(self.since_s - self.save_s, 0.0) - before_s
        return done_s, turns + overdue

    def lose(self) -> F64:
        """A strike: work at risk [n_rule], which is gone; the job goes on from its last durable save."""
        lost_s = np.maximum(self.since_s - self.save_s, 0.0)
        lost_s += np.where(self.since_s < self.save_s + self.flush_s, self.holds_s, 0.0)
        self.since_s = np.full_like(self.since_s, self.save_s)
        self.holds_s = np.zeros_like(self.holds_s)
        return lost_s
