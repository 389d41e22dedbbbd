"""Send lanes: ordered queues to a server, with retries, from a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from connectors.backoff import Backoff

RETRY_S, MAX_RETRY_S = 0.5, 15.0
LOOK_S = 1.0  # between two looks whether something waits without a notification
CLOSE_S = 1.8


class SendLane:
    """A queue that sends in order. A failed item delays only its own lane.

    `send` sends the oldest that waits, and gives False for nothing; `failed` takes whatever it raised, and
    gives the text of it.
    """

    def __init__(self, send: Callable[[], bool], failed: Callable[[Exception], str]) -> None:
        self._send, self._failed, self._backoff = send, failed, Backoff(RETRY_S, MAX_RETRY_S)
        self.error, self.due_s = "", 0.0

    def step(self) -> bool:
        """Send the next item unless the lane pauses after a failure; returns True if it sent one."""
        if time.monotonic() < self.due_s:
            return False
        try:
            moved = self._send()
        except Exception as error:  # none may end the thread
            self.error = self._failed(error)
            self.due_s = time.monotonic() + self._backoff.next_s()
            return False
        self.error = ""
        self._backoff.reset()
        return moved


class SendThread:
    """A thread that sends the items of its lanes, and calls `ended` at its end.

    `changed` is notified of what begins to wait in the first lane, and `waits` says, under its lock, whether
    anything does. The other lanes are looked at each second.
    """

    def __init__(
        self, name: str, lanes: Sequence[SendLane], waits: Callable[[], bool], ended: Callable[[], None]
    ) -> None:
        self._lanes, self._waits, self._ended = tuple(lanes), waits, ended
        self.changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def error(self) -> str:
        """Return the reason that an item is not sent now; "" if all are."""
        return "; ".join(dict.fromkeys(lane.error for lane in self._lanes if lane.error))

    @property
    def is_alive(self) -> bool:
        """Return True until the thread has ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start to send."""
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits if it can be done by then. A hanging server is left alone."""
        with self.changed:
            self._stop = True
            self.changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        ends_s = 0.0
        try:
            while True:
                if self._stop:
                    ends_s = ends_s or time.monotonic() + CLOSE_S
                    if time.monotonic() > ends_s:
                        return
                moved = [lane.step() for lane in self._lanes]
                if not any(moved) and self._stop:
                    return
                if not any(moved):
                    self._pause()
        finally:
            self._ended()

    def _pause(self) -> None:
        """Wait, but not while an item is ready or the end has come."""
        now_s, first = time.monotonic(), self._lanes[0]
        rests_s = [lane.due_s - now_s if lane.error else LOOK_S for lane in self._lanes]
        with self.changed:
            self.changed.wait_for(
                lambda: self._stop or (not first.error and self._waits()),
                max(0.0, min(LOOK_S, *rests_s)),
            )
