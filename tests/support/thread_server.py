"""A server of asyncio in a thread of its own, for tests that are no coroutine.

with in_thread(Services(1)) as services: ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `server` on a loop of its own; what goes wrong there is raised here."""
    loop, end, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    made: list[T] = []
    faults: list[BaseException] = []

    async def serve() -> None:
        try:
            async with server as entered:
                made.append(entered)
                ready.set()
                await end.wait()
        except BaseException as error:
            faults.append(error)
            ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        if faults:
            raise faults[0]
        yield made[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
