"""Progress bar: the finished share of long work and the time left, on a terminal; nothing elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from twin.catalogue import duration
from twin.run.interrupt import check_interrupt

ROOMY = 90  # columns of a terminal with room for a note
ETA_AFTER = 0.03  # of the work: sooner no estimate is possible. source: estimate


class ProgressBar:
    """A bar that turns by itself, so that a long step does not look like a standstill."""

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
        """Show this share and note. Raises KeyboardInterrupt as `interrupt.check_interrupt` does."""
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
    """A span as precisely as it is known: whole seconds, tens of them, minutes."""
    unit = 1.0 if span_s < 20 else 10.0 if span_s < 120 else 60.0
    return max(round(span_s / unit) * unit, 1.0)
