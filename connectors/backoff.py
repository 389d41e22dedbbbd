"""Backoff: growing delays between retries, with jitter, for every connection and send queue."""

from __future__ import annotations

import random


class Backoff:
    """Pauses that double from `first_s` to `longest_s`; each is drawn within `jitter` times its length."""

    def __init__(self, first_s: float, longest_s: float, jitter: tuple[float, float] = (0.5, 1.5)) -> None:
        self.first_s, self.longest_s, self._jitter = first_s, longest_s, jitter
        self._pause_s = first_s

    def next_s(self, least_s: float = 0.0) -> float:
        """Return the length of the next pause, at least `least_s` before jitter; the one after it is twice
        as long."""
        pause_s = max(self._pause_s, least_s)
        self._pause_s = min(self.longest_s, 2.0 * pause_s)
        return pause_s * random.uniform(*self._jitter)

    def reset(self) -> None:
        """Restart with the first pause, after a success."""
        self._pause_s = self.first_s
