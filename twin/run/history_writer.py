"""Writer thread of the embedded history. Its failures never reach the tick.

Samples wait in a bounded queue. A sample that cannot be written stays there and is retried. If the queue is
full, the oldest samples are dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from connectors.backoff import Backoff
from twin.catalogue import StorageError
from twin.run.history_sample import Sample
from twin.run.history_schema import is_damage, move_aside
from twin.run.history_store import HistoryStore

QUEUE_SAMPLES, QUEUE_BYTES = 4000, 256 * 2**20
RETRY_S, MAX_RETRY_S = 0.5, 15.0
TRIES = 3  # of a sample that fails for another reason than the disk
NICENESS = 10
ASIDE_BYTES = 10**9
NO_FACTS = {"bytes": 0, "oldest_ns": 0, "newest_ns": 0, "damaged": 0}


@dataclass
class Backlog:
    """Samples that wait, bounded by number and bytes."""

    most_samples: int = QUEUE_SAMPLES
    most_bytes: int = QUEUE_BYTES
    dropped: int = 0
    held_bytes: int = 0
    _samples: deque[Sample] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __len__(self) -> int:
        return len(self._samples)

    def put(self, sample: Sample) -> None:
        """Add a sample. If the backlog is full, drop the oldest ones."""
        with self._changed:
            self._samples.append(sample)
            self.held_bytes += sample.size_bytes
            while len(self._samples) > self.most_samples or (
                self.held_bytes > self.most_bytes and len(self._samples) > 1
            ):
                self._pop()
                self.dropped += 1
            self._changed.notify()

    def first(self, wait_s: float) -> Sample | None:
        """Return the oldest sample, which stays until `done`; None if none comes within `wait_s`."""
        with self._changed:
            if not self._samples:
                self._changed.wait(wait_s)
            return self._samples[0] if self._samples else None

    def done(self, sample: Sample, dropped: bool = False) -> None:
        """`sample` was written (or given up); it may have made room for another meanwhile."""
        with self._changed:
            if self._samples and self._samples[0] is sample:
                self._pop()
                self.dropped += dropped

    def wake(self) -> None:
        """Make `first` return."""
        with self._changed:
            self._changed.notify_all()

    def _pop(self) -> None:
        self.held_bytes -= self._samples.popleft().size_bytes


class HistoryWriter:
    """Writes what its backlog holds into a store, which `open_store` opens and opens again.

    Files that cannot be used are moved aside, and have `aside_bytes` together.
    """

    def __init__(
        self,
        path: Path,
        open_store: Callable[[], HistoryStore],
        backlog: Backlog,
        aside_bytes: int = ASIDE_BYTES,
    ) -> None:
        self.path, self.backlog, self.aside_bytes = path, backlog, aside_bytes
        self.written = self.write_errors = self.failures = self.moved_aside = 0
        self.error = ""  # why the last write failed; empty again after one that did not
        self.facts = dict(NO_FACTS)
        self._open_store = open_store
        self._store: HistoryStore | None = None
        self._stop = threading.Event()
        self._tries = 0
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Return True if the thread ended unexpectedly."""
        return not self._stop.is_set() and self._thread.ident is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """Ask the thread to write waiting samples and to end, without waiting for it."""
        self._stop.set()
        self.backlog.wake()

    def close(self, timeout_s: float = 2.5) -> bool:
        """Write waiting samples up to a deadline; return True if all were written."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return len(self.backlog) == 0

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not everywhere, and not under every filter
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        busy, backoff = False, Backoff(RETRY_S, MAX_RETRY_S)
        while not (self._stop.is_set() and (len(self.backlog) == 0 or self.failures)):
            sample = self.backlog.first(0.0 if busy else 1.0)
            try:
                if self._store is None:
                    self._store = self._open_store()
                if sample is not None:
                    self._store.add(sample)
                    self.backlog.done(sample)
                    self.written += 1
                    self._tries = 0
                busy = self._store.upkeep()
                if sample is not None or not busy:
                    self.facts = self._store.facts()
                self.failures, self.error = 0, ""
                backoff.reset()
            except Exception as error:
                busy = False
                self._failed(error, sample)
                self._stop.wait(backoff.next_s())
        self._shut()

    def _failed(self, error: Exception, sample: Sample | None) -> None:
        text = str(error) or type(error).__name__
        self.error = text if str(self.path) in text else f"{self.path}: {text}"
        self.write_errors += 1
        self.failures += 1
        self._shut()
        damaged = isinstance(error, sqlite3.DatabaseError) and is_damage(error)
        if damaged or isinstance(error, StorageError):
            try:
                kept = move_aside(self.path, self.aside_bytes)
                self.moved_aside += 1
                self.error += f"; moved to {kept.name}, a new file is begun"
            except OSError as moving:
                self.error += f"; cannot be moved aside: {moving.strerror or moving}"
        elif sample is not None and not isinstance(error, sqlite3.OperationalError | OSError):
            self._tries += 1
            if self._tries >= TRIES:  # it is the sample itself
                self.backlog.done(sample, dropped=True)
                self._tries = 0

    def _shut(self) -> None:
        if self._store is not None:
            with contextlib.suppress(sqlite3.Error):
                self._store.close()
        self._store = None
