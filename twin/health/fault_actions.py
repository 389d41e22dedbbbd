"""Open actions: what the codes of each device ask for, until it is done or lapses.

What is grave is kept apart, so that nothing milder hides it. May import frames and the words of health.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32, I64, NS, U8, Bool
from twin.health.levels import action

SOFT = action("check_facility")  # up to here nothing is to be undone: the application is restarted, heat goes
SOFT_S = 3600.0  # source: estimate; a job is long restarted, or its code came again
MILD_S = 2_419_200.0  # what is not grave and never came again. source: estimate, the span of lemon nodes
LOOK_S = 60.0  # between looks for what lapses
_COLUMNS = ("action", "code", "since_ns", "last_ns", "late_action", "late_code", "late_ns")


class OpenActions:
    """The actions open for n devices of a table; [2, n]: what is mild, what is grave."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.action = np.zeros((2, n), np.uint8)
        self.code = np.zeros((2, n), np.int32)
        self.since_ns = np.zeros((2, n), np.int64)
        self.last_ns = np.zeros((2, n), np.int64)
        # What was asked last, be it less: it stays when the stronger one is done
        self.late_action = np.zeros((2, n), np.uint8)
        self.late_code = np.zeros((2, n), np.int32)
        self.late_ns = np.zeros((2, n), np.int64)
        self.done_upto = np.zeros(n, np.uint8)  # by the last resolution, and when
        self.done_ns = np.zeros(n, np.int64)
        self._lapsed_ns = 0  # when it was last looked for what lapses

    def ask(
        self, entity: I32, code: I64, asked: U8, grave: Bool, at_ns: I64, told: Bool, now_ns: int
    ) -> None:
        """Faults in order of arrival [k]. What happened before the last resolution was resolved by it."""
        stale = told & (at_ns <= self.done_ns[entity]) & (asked <= self.done_upto[entity])
        for layer in (0, 1):
            some = np.flatnonzero((asked > 0) & ~stale & (grave == bool(layer)))
            if not len(some):
                continue
            # The strongest of each device, of equals the first.
            order = some[np.lexsort((some, -asked[some].astype(np.int16), entity[some]))]
            first = np.unique(entity[order], return_index=True)[1]
            best = order[first]
            of = entity[best]
            self.late_action[layer, of], self.late_code[layer, of] = asked[best], code[best]
            self.late_ns[layer, of] = now_ns
            higher = asked[best] > self.action[layer, of]
            again = of[asked[best] == self.action[layer, of]]
            of, best = of[higher], best[higher]
            self.action[layer, of], self.code[layer, of] = asked[best], code[best]
            self.since_ns[layer, of] = now_ns
            self.last_ns[layer, of] = now_ns
            self.last_ns[layer, again] = now_ns

    def resolve(self, index: I32, upto: int, now_ns: int) -> None:
        """Whatever was heard till now and asked for no more than this is done."""
        for layer in (0, 1):
            of = index[self.action[layer, index] <= upto]
            self._close(layer, of, self.late_ns[layer, of] > now_ns)
        newer = index[self.done_ns[index] <= now_ns]
        self.done_upto[newer], self.done_ns[newer] = upto, now_ns

    def lapse(self, now_ns: int) -> None:
        """Mild actions lapse when their code does not come again."""
        if now_ns - self._lapsed_ns < LOOK_S * NS:
            return
        self._lapsed_ns = now_ns
        open_now = np.flatnonzero(self.action[0]).astype(np.int32)
        if len(open_now):
            span_s = np.where(self.action[0, open_now] <= SOFT, SOFT_S, MILD_S)
            of = open_now[now_ns - self.last_ns[0, open_now] > span_s * NS]
            self._close(0, of, now_ns - self.late_ns[0, of] <= SOFT_S * NS)

    def forget(self, entity: int) -> None:
        """Another device sits here."""
        for name in (*_COLUMNS, "done_upto", "done_ns"):
            getattr(self, name)[..., entity] = 0

    def _close(self, layer: int, index: I32, later: Bool) -> None:
        """These are done; where something was asked `later` [k], that is what is open now."""
        at_ns = self.late_ns[layer, index[later]]
        asked = (self.late_action[layer, index[later]], self.late_code[layer, index[later]], at_ns, at_ns)
        for name in _COLUMNS[:4]:
            getattr(self, name)[layer, index] = 0
        for name in _COLUMNS[4:]:
            getattr(self, name)[layer, index[~later]] = 0
        for name, column in zip(_COLUMNS[:4], asked, strict=True):
            getattr(self, name)[layer, index[later]] = column

    def shown(self, name: str) -> Any:
        """A column as it counts: of the grave action where there is one, else of the mild one [n]."""
        column = getattr(self, name)
        return np.where(self.action[1] > 0, column[1], column[0])

    def remapped(self, n: int, old_of_new: I32) -> OpenActions:
        """The same for another site."""
        out, kept = OpenActions(n), np.flatnonzero(old_of_new >= 0)
        out._lapsed_ns = self._lapsed_ns
        for name in (*_COLUMNS, "done_upto", "done_ns"):
            getattr(out, name)[..., kept] = getattr(self, name)[..., old_of_new[kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum: of the devices of which there is something to tell."""
        index = np.flatnonzero(self.action.any(axis=0) | (self.done_ns > 0)).astype(np.int32)
        names = (*_COLUMNS, "done_upto", "done_ns")
        columns = {k: np.ascontiguousarray(getattr(self, k)[..., index]) for k in names}
        return {"index": index, "lapsed_ns": self._lapsed_ns, **columns}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self._lapsed_ns = int(data["lapsed_ns"])
        for name in (*_COLUMNS, "done_upto", "done_ns"):
            getattr(self, name)[..., data["index"]] = data[name]
