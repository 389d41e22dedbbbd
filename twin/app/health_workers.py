"""Several fleets at once: each in a process of its own, the courses in the order of the tasks.

A worker ends with its parent, and so does the worker that fits its models. Part of the shell.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from twin.app.backtest_run import LOOK_S, THREADS, Bar
from twin.app.health_course import Course
from twin.app.health_run import Task, run_course
from twin.errors import TwinError

_shares: list[Any] = []  # in a worker: how far each task is


def run_tasks(tasks: Sequence[Task], jobs: int, bar: Bar) -> list[Course]:
    """All courses, the same whatever `jobs` is. Raises TwinError for a task that failed."""
    total = sum(task.work for task in tasks)
    if jobs <= 1 or len(tasks) == 1:
        courses, done = [], 0.0
        for task in tasks:

            def tell(share: float, task: Task = task, before: float = done) -> None:
                bar.move((before + share * task.work) / total, task.words)

            courses.append(run_course(task, tell))
            done += task.work
        return courses
    found: dict[int, Course] = {}
    with _workers(min(jobs, len(tasks)), len(tasks)) as (pool, shares):
        waiting: dict[Future[Course | str], int] = {
            pool.submit(_in_worker, task, i): i for i, task in enumerate(tasks)
        }
        try:
            while waiting:
                for future in wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED).done:
                    i, course = waiting.pop(future), future.result()
                    if isinstance(course, str):
                        raise TwinError(course)
                    found[i] = course
                share = sum(shares[i] * task.work for i, task in enumerate(tasks)) / total
                bar.move(share, f"{len(found)} of {len(tasks)} fleets")
        except BrokenProcessPool:
            raise TwinError(
                "a worker process ended: killed, or out of memory; try again with --jobs 1"
            ) from None
    return [found[i] for i in range(len(tasks))]


@contextmanager
def _workers(processes: int, tasks: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    """A pool that ends with this block, however it ends; and how far each task is."""
    context = multiprocessing.get_context("spawn")
    held, lifeline = context.Pipe(duplex=False)
    shares = context.Array("d", tasks, lock=False)
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a worker imports NumPy
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(held, shares))
    finished = False
    try:
        yield pool, shares
        finished = True
    finally:
        for name, value in before.items():
            _restore(name, value)
        if not finished:
            lifeline.close()  # workers end in the middle of their fleets
        with suppress(KeyboardInterrupt):
            pool.shutdown(wait=True, cancel_futures=True)
        lifeline.close()
        held.close()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _prepare(lifeline: Connection, shares: Any) -> None:
    """In a worker: Ctrl-C is the parent's to see; without a parent nobody wants the course."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _shares[:] = [shares]
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _in_worker(task: Task, place: int) -> Course | str:
    """A course, or in a line why there is none: an error of its own making might not survive the way back."""

    def tell(share: float) -> None:
        _shares[0][place] = share

    try:
        return run_course(task, tell)
    except TwinError as error:
        return str(error)
    except Exception as error:  # told with the task that it befell
        return f"{task.words}: {type(error).__name__}: {error}"
