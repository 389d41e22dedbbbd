"""Long work: progress on a terminal, and a clean end at Ctrl-C or SIGTERM.

Python raises KeyboardInterrupt at any point of a program. That could leave half a tick in a recording, which
no replay reproduces, or a library could catch the exception and hide it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from twin.catalogue import duration

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ROOMY = 90  # columns of a terminal with room for a note
ETA_AFTER = 0.03  # of the work: sooner no estimate is possible. source: estimate

_asked = threading.Event()


def stop_at_once() -> None:
    """Let both signals raise KeyboardInterrupt, here and again at `check_interrupt`. Main thread only."""
    _asked.clear()
    for number in SIGNALS:
        signal.signal(number, _note)


def _note(_number: int, _frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if a library has swallowed one. Call it between parts of long work."""
    if _asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def asked_to_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Within: SIGINT and SIGTERM call `stop`, which raises nothing. Afterwards they do what they did before.

    Outside the main thread, which alone may set what a signal does, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, what in before.items():
            signal.signal(number, signal.SIG_DFL if what is None else what)


class ProgressBar:
    """Progress bar that animates by itself, so that a long step does not look stuck."""

    def __init__(self, console: Console, what: str) -> None:
        self._progress: Progress | None = None
        self._begun = time.monotonic()
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24 if console.width >= ROOMY else 10),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                *([TextColumn("{task.fields[note]}", style="dim")] if console.width >= ROOMY else []),
            )
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(what, total=1.0, left="", note="")

    def move(self, share: float, note: str = "") -> None:
        """Show this share and note. Raises KeyboardInterrupt as `check_interrupt` does."""
        check_interrupt()
        if self._progress is not None:
            took_s = time.monotonic() - self._begun
            left = f"about {duration(_rough(took_s * (1 / share - 1)))} left" if share > ETA_AFTER else ""
            self._progress.update(self._task, completed=share, note=note, left=left)

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _rough(span_s: float) -> float:
    """Round a span to whole seconds, tens of seconds, or minutes, by its length."""
    unit = 1.0 if span_s < 20 else 10.0 if span_s < 120 else 60.0
    return max(round(span_s / unit) * unit, 1.0)
