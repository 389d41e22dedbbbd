"""Simulated loop: an asyncio event loop whose time jumps to the next timer; a seed is always the same.

It knows no sockets and no threads: what is given to an executor runs in the loop, after a drawn delay. What
asyncio promises stays: callbacks in the order in which they were asked for. Timers are drawn up to 2 ms late,
as on any machine, so that what is due at the same time comes in any order. Callbacks of a life that has ended
are dropped, and those of one that is frozen wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import weakref
from collections.abc import Callable
from typing import Any

from tests.support.storm.hosts import LIFE, Killed, Life

LATE_S = 0.002  # of a timer
JOB_S = 0.004  # of work in an executor, where the disk is well
STEP_S = 20e-6  # that a round of callbacks takes
CANCELLED = 200  # timers in the heap before they are swept out


class _NoSelector:
    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.BaseEventLoop):
    """`job_s` draws how long work in an executor takes; `on_fault` hears of exceptions that nobody took."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice, self.rounds = dice, 0
        self._now_s = 0.0
        self.lived: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # tasks of lives
        self._selector = _NoSelector()
        self._free_s: dict[int, float] = {}  # executor -> when it has done what it was given
        self.job_s: Callable[[Life | None], float] = lambda _: self.dice.expovariate(1 / JOB_S)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Seconds since the storm began."""
        return self._now_s

    def at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """`call_at` to the point, without the lateness of a machine."""
        return super().call_at(when, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Somewhat late, as timers are."""
        return super().call_at(when + self.dice.random() * LATE_S, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Work that begins once the executor is free, is done at one instant, and is told somewhat later."""
        future: asyncio.Future[Any] = self.create_future()
        context, life = contextvars.copy_context(), LIFE.get()
        took_s, share = self.job_s(life), self.dice.random()
        begins = max(self._now_s, self._free_s.get(id(executor), 0.0))
        self._free_s[id(executor)] = begins + took_s

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            try:
                result, error = func(*args), None
            except Killed:
                return
            except Exception as caught:
                result, error = None, caught
            self.at(begins + took_s, settle, result, error, context=context)

        self.at(begins + share * took_s, work, context=context)
        return future

    def _make_task(self, loop: Any, coro: Any, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, context=context)
        life = context.get(LIFE) if context is not None else LIFE.get()
        if life is not None:
            life.tasks.append(task)
            self.lived.add(task)
            if len(life.tasks) > 400:
                life.tasks[:] = [t for t in life.tasks if not t.done()]
        return task

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        """The next callbacks; where none is ready, time jumps to the next timer."""
        timers, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        if self._timer_cancelled_count > CANCELLED:  # type: ignore[has-type]
            left = [t for t in timers if not t._cancelled]
            for timer in timers:
                timer._scheduled = not timer._cancelled
            timers[:] = left
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        if not ready:
            if not timers:
                raise RuntimeError("everything waits for something that never comes")
            self._now_s = max(self._now_s, timers[0]._when)
        while timers and timers[0]._when <= self._now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._run_handle(handle)
        self.rounds += 1
        self._now_s += STEP_S

    def _run_handle(self, handle: Any) -> None:
        life: Life | None = handle._context.get(LIFE)
        if life is not None:
            if life.is_dead:
                return
            if life.frozen_until_s > self._now_s:
                life.waiting.append(handle)
                return
            life.steps += 1
            if life.steps == life.kill_at:
                life.kill()
                return
        handle._run()

    def freeze(self, life: Life, seconds: float) -> None:
        """Nothing of a life runs for so long; then all that waits, in order."""
        life.frozen_until_s = self._now_s + seconds

        def thaw() -> None:
            if life.frozen_until_s > self._now_s:
                return  # frozen again
            self._ready.extend(life.waiting)  # type: ignore[attr-defined]
            life.waiting.clear()

        self.at(life.frozen_until_s, thaw)

    def bury(self, life: Life) -> None:
        """Let go of what a life that ended was in the midst of; nothing of it may reach anything."""
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        for task in life.tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(BaseException):
                    context.run(task.get_coro().close)
        life.tasks.clear()
        life.waiting.clear()
