"""Host: a simulated machine with clocks of its own. Life: one process on it, from its start to its end.

Code finds the life that it runs in by a context variable, which asyncio hands on to every task and callback.
Inside a life the functions of `time` tell the clocks of its host; outside they are those of the real machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from twin.catalogue import NS, START_NS
from twin.daemon.clock import Clock
from twin.daemon.leader import EpochFile
from twin.daemon.notify import Notifier

BOOT_S = 1e6  # of every host before the storm begins


class Killed(BaseException):
    """The process of this life has ended: nothing of it goes on."""


class Timeline(Protocol):
    """True time, as no host knows it."""

    def time(self) -> float:
        """Seconds since the storm began."""
        ...


@dataclass
class Host:
    """A machine. `step_ns` is how far its wall clock is ahead; `drift` of both clocks is a share of time."""

    name: str
    timeline: Timeline
    step_ns: int = 0
    drift: float = 0.0

    def boot_ns(self) -> int:
        """Time since it was started, by a clock that nobody sets."""
        return round((BOOT_S + self.timeline.time()) * (1.0 + self.drift) * NS)

    def wall_ns(self) -> int:
        """The wall clock of the host."""
        passed = self.boot_ns() - round(BOOT_S * (1.0 + self.drift) * NS)
        return START_NS + passed + self.step_ns


@dataclass(eq=False)
class Life:
    """A process. `steps` counts the callbacks that it ran; it is killed at number `kill_at`, if given."""

    host: Host
    is_dead: bool = False
    frozen_until_s: float = -1e9
    steps: int = 0
    kill_at: int = -1
    waiting: list[Any] = field(default_factory=list)  # callbacks that wait for its thaw
    tasks: list[Any] = field(default_factory=list)
    on_kill: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """End it here: no cleanup, and nothing after it."""
        if not self.is_dead:
            self.is_dead = True
            self.on_kill()

    def check(self) -> None:
        """Raises Killed where it has ended."""
        if self.is_dead:
            raise Killed


LIFE: ContextVar[Life | None] = ContextVar("life", default=None)

_REAL: dict[str, Any] = {
    name: getattr(time, name)
    for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
        "clock_gettime", "clock_gettime_ns",
    )
}  # fmt: skip


def wall_ns() -> int:
    """`time.time_ns` of the present life."""
    life = LIFE.get()
    return int(_REAL["time_ns"]()) if life is None else life.host.wall_ns()


def boot_ns(clock: int = 0) -> int:
    """`time.monotonic_ns` of the present life."""
    life = LIFE.get()
    return int(_REAL["monotonic_ns"]()) if life is None else life.host.boot_ns()


def _real_or(name: str, simulated: Callable[[], Any]) -> Callable[..., Any]:
    real = _REAL[name]

    def read(*args: Any) -> Any:
        return real(*args) if LIFE.get() is None else simulated()

    return read


# Functions that have a clock as their default were made before the storm
_DEFAULTS = (Clock.__init__, EpochFile.__init__, Notifier.__init__)


@contextlib.contextmanager
def simulated_clocks() -> Iterator[None]:
    """Inside the block every life reads the clocks of its host."""
    told = {
        "time": lambda: wall_ns() / NS,
        "time_ns": wall_ns,
        "monotonic": lambda: boot_ns() / NS,
        "monotonic_ns": boot_ns,
        "perf_counter": lambda: boot_ns() / NS,
        "perf_counter_ns": boot_ns,
        "clock_gettime": lambda: boot_ns() / NS,
        "clock_gettime_ns": boot_ns,
    }
    by_real = {_REAL[name]: _real_or(name, simulated) for name, simulated in told.items()}
    before = [f.__defaults__ for f in _DEFAULTS]
    try:
        for name in told:
            setattr(time, name, by_real[_REAL[name]])
        for function in _DEFAULTS:
            given = function.__defaults__ or ()
            function.__defaults__ = tuple(  # type: ignore[attr-defined]
                by_real.get(x, x) if callable(x) else x for x in given
            )
        yield
    finally:
        for name, real in _REAL.items():
            setattr(time, name, real)
        for function, defaults in zip(_DEFAULTS, before, strict=True):
            function.__defaults__ = defaults  # type: ignore[attr-defined]
