"""An inlet that keeps what a source gives it, and the wait for it.

inlet = RecordingInlet()
task = asyncio.create_task(source.run(inlet))
await until(lambda: inlet.items, "the first items", task)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Self

from tests.support.patience import PATIENCE_S
from twin.contracts import Item


class RecordingInlet:
    """`items` that were staged, the last ones polled each `poll_s`; `skipped`: reasons; `faults`: reasons of
    what was rejected or dropped.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.poll_s = 0.0
        self.skipped: list[str] = []
        self.faults: list[str] = []

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        self.items += items
        self.poll_s = poll_s

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        self.skipped.append(why)

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        self.faults.append(why)

    def fail(self, why: str, remedy: str = "") -> None:
        self.faults.append(why)

    def drop(self, where: str, why: str, count: int = 1) -> None:
        self.faults.append(why)


async def until(
    holds: Callable[[], object], what: str = "it", task: asyncio.Task[None] | None = None
) -> None:
    """Wait for a condition, while `task` runs; its end before that is a failure."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if task is not None and task.done():
            task.result()
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.01)
