"""Supervisor: runs every source, sink and service on its own task, and restarts it after a failure.

The wait before a restart grows, with jitter, so that a hundred daemons do not return at once. No failure
reaches the loop of the ticks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from connectors.backoff import Backoff
from twin.api import Part
from twin.catalogue import ConfigError, ConnectorError

log = logging.getLogger(__name__)
FIRST_S, LONGEST_S = 0.5, 4.0  # however long a broker was away, its data flows 10 s after it is back
STEADY_S = 60.0  # having run this long, a part starts its waiting times anew
ALARM_S = 10.0  # a part that is away this long is worth an alarm
BACK_S = 3.0  # a part that was away and runs this long is back, unless it says otherwise
STOP_S = 3.0  # a part that does not end within this time is left behind, and said so


class Supervisor:
    """Runs parts by name. `alarm(name, error)` is called for one that is away, and `None` when it is back."""

    def __init__(self, parts: dict[str, Part], alarm: Callable[[Part, str | None], None]) -> None:
        self.parts, self._alarm = parts, alarm
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alarmed: set[str] = set()

    def start(
        self,
        name: str,
        kind: Literal["source", "sink", "service"],
        run: Callable[[], Awaitable[None]],
        back_s: float | None = None,
    ) -> None:
        """Begin to run a part, until it is stopped. One that was away is back once it runs for `back_s`."""
        if name in self._tasks:
            raise ValueError(f"{name} runs already")
        self.parts[name] = Part(name, kind, since_ns=time.time_ns())
        self._tasks[name] = asyncio.create_task(
            self._keep(self.parts[name], run, back_s or BACK_S), name=name
        )

    async def _keep(self, part: Part, run: Callable[[], Awaitable[None]], back_s: float) -> None:
        backoff, away_since = Backoff(FIRST_S, LONGEST_S), None
        while True:
            begun = time.monotonic()
            if away_since is None:  # else it runs when it has run for a while
                _turn(part, "running", "")
            watch = asyncio.create_task(self._back_again(part, back_s))
            try:
                await run()
                error = "it ended by itself"
            except asyncio.CancelledError:
                if is_stopped():
                    _turn(part, "stopped", "")
                    raise
                error = "something that it waited for was cancelled"
                log.warning("%s: %s; restarting it", part.name, error)
            except (ConnectorError, ConfigError) as caught:  # each says what to do
                error = str(caught)
                log.warning("%s: %s", part.name, error)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
                log.exception("%s failed; restarting it", part.name)
            finally:
                watch.cancel()
            if is_stopped():  # it swallowed its cancellation: it ends all the same
                raise asyncio.CancelledError
            now = time.monotonic()
            if now - begun >= STEADY_S:
                backoff.reset()
            if now - begun >= back_s:  # it was well until now
                away_since = now
            away_since = begun if away_since is None else away_since
            part.restarts += 1
            _turn(part, "waiting", error[:500])
            pause_s = backoff.next_s()
            if part.name in self._alarmed or now + pause_s - away_since >= ALARM_S or part.restarts >= 5:
                self._alarmed.add(part.name)
                self._alarm(part, error)
            await asyncio.sleep(pause_s)

    async def _back_again(self, part: Part, back_s: float) -> None:
        """Clear the failure of a part that has run for a while since."""
        await asyncio.sleep(back_s)
        _turn(part, "running", "")
        part.restarts = 0
        if part.name in self._alarmed:
            self._alarmed.discard(part.name)
            self._alarm(part, None)

    def alarm_now(self, name: str) -> None:
        """Raise the alarm of a part that is away, since its data are missed by now."""
        part = self.parts.get(name)
        if part is not None and part.state == "waiting" and name not in self._alarmed:
            self._alarmed.add(name)
            self._alarm(part, part.error)

    async def stop_all(self) -> None:
        """Stop all parts."""
        await self.stop(*self._tasks)

    async def stop(self, *names: str) -> None:
        """Stop these parts, each within a time limit."""
        chosen = [n for n in names if n in self._tasks]
        tasks = [self._tasks.pop(n) for n in chosen]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                log.error("%s did not stop within %g s", task.get_name(), STOP_S)
        for name in chosen:
            part = self.parts.pop(name, None)
            if part is not None and name in self._alarmed:
                self._alarmed.discard(name)
                self._alarm(part, None)


def is_stopped() -> bool:
    """Return True if the present task was cancelled, and not only what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _turn(part: Part, state: Literal["starting", "running", "waiting", "stopped"], error: str) -> None:
    if part.state != state:
        part.since_ns = time.time_ns()
    part.state, part.error = state, error
