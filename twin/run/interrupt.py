"""Ctrl-C and a service manager's stop: as a wish that is asked for, and as an error that is not lost.

Python raises KeyboardInterrupt wherever the program happens to be: half a tick is then in a recording, and
no replay gives it again; or it falls into a library that catches everything, and nobody hears of it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_asked = threading.Event()


def stop_at_once() -> None:
    """Let both signals raise KeyboardInterrupt, here and again at `check_interrupt`. Main thread only."""
    _asked.clear()
    for number in SIGNALS:
        signal.signal(number, _hear)


def _hear(_number: int, _frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Between two parts of long work. Raises KeyboardInterrupt where one was raised and a library ate it."""
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
