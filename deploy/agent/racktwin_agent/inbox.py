"""Inbox of the agent: one queue, bounded in count and bytes, filled by threads and emptied by the loop.

A flood loses and counts the newest items: the daemon repeats its requests. Imports nothing of the agent.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

MAX_ITEMS = 2000
MAX_BYTES = 16 * 2**20


class Inbox:
    """A queue of (kind, item); `lost` counts the items that found no room."""

    def __init__(self, items: int = MAX_ITEMS, size: int = MAX_BYTES) -> None:
        self._queue: queue.Queue[tuple[str, Any, int]] = queue.Queue(items)
        self._lock = threading.Lock()
        self._room = size
        self.lost = 0

    def put(self, what: str, item: Any, size: int = 0) -> bool:
        """Put an item of the given size in bytes; returns False and counts the item if there is no room."""
        with self._lock:
            if size <= self._room:
                try:
                    self._queue.put_nowait((what, item, size))
                except queue.Full:
                    pass
                else:
                    self._room -= size
                    return True
            self.lost += 1
            return False

    def get(self, timeout_s: float) -> tuple[str, Any] | None:
        """Return the oldest item, or None if none arrives in time."""
        try:
            what, item, size = self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        with self._lock:
            self._room += size
        return what, item
