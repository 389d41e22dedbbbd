"""Servers in a thread of their own, for tests that are no coroutine: of asyncio, and of plain HTTP.

with in_thread(Services(1)) as services: ...
with http_thread(Handler) as port: ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128  # of the 5 by default, a busy host loses those of a dozen clients at once


@contextmanager
def http_thread(handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> Iterator[int]:
    """Serve HTTP by this handler; yields the port."""
    server = _HttpServer((host, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
