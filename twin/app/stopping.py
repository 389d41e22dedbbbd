"""Ctrl-C and a service manager's stop as a wish that is asked for, not an error in the middle of a step.

Python raises KeyboardInterrupt wherever the program happens to be: half a tick is then in a recording, and
no replay gives it again. Part of the shell.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
