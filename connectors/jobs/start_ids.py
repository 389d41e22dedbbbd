"""Ids of job starts: derived from data of the scheduler, so that a restart of the daemon repeats them.

A job that takes nodes and gives them back looks as it did before. The event is another one all the same, and
an id counts once, so the second use of an id gets a number behind it.
"""

from __future__ import annotations

import time
from collections import OrderedDict

MOST_IDS = 100_000  # remembered; the oldest are forgotten


class StartIds:
    """Ids in use since the daemon started, and how often each was used."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, int] = OrderedDict()

    def use(self, first: str) -> str:
        """Return the id of the next start like `first`: itself, then `first#2`, `first#3`, ..."""
        uses = self._uses.pop(first, 0) + 1
        self._uses[first] = uses
        if len(self._uses) > MOST_IDS:
            self._uses.popitem(last=False)
        return first if uses == 1 else f"{first}#{uses}"

    def use_anew(self, first: str) -> str:
        """Return an id that no daemon used before, for a job that may have moved while no daemon ran."""
        return self.use(f"{first}@{time.time_ns()}")
