"""Many courses at once: each in one process, single-threaded, their results in the order of the cases.

A worker that loses its parent, or is told to stop, ends at once: all hold the reading end of one pipe whose
writing end only the parent has. A course that fails costs its own case only. Part of the shell.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twin.app.stopping import look
from twin.app.whatif import ARMS, Arm, Case, Course, Question, run_course
from twin.errors import TwinError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NICE = 5
Task = tuple[Case, Arm]

_asked: list[Question] = []  # in a worker: the one question of its call


@dataclass
class Result:
    """A case with its two courses, or why there are none."""

    case: Case
    courses: dict[Arm, Course] = field(default_factory=dict)
    error: str = ""


class CaseBar:
    """How far all courses are, on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, total: float, what: str) -> None:
        self.done, self._last = 0.0, 0.0
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                       TextColumn("{task.fields[note]}"), TimeElapsedColumn())  # fmt: skip
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(what, total=total, note="")

    def move(self, part: float, note: str = "") -> None:
        """`part` more courses than those that are done. Raises KeyboardInterrupt as `stopping.look` does."""
        look()
        if self._progress is not None and (note or time.monotonic() - self._last > 0.1):
            self._last = time.monotonic()
            self._progress.update(self._task, completed=self.done + part, note=note)

    def __enter__(self) -> CaseBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def run_cases(question: Question, cases: Sequence[Case], processes: int, bar: CaseBar) -> list[Result]:
    """All cases, both arms, in the order of `cases`: the same whatever `processes` is."""
    results = [Result(case) for case in cases]
    place = {result.case.number: result for result in results}
    tasks: list[Task] = [(case, arm) for case in cases for arm in ARMS]

    def take(task: Task, outcome: Course | str) -> None:
        result = place[task[0].number]
        if isinstance(outcome, Course):
            result.courses[task[1]] = outcome
            if task[0].number != cases[0].number:
                outcome.trail = {}  # only the first case is drawn
        elif not result.error:
            result.error = outcome
        bar.done += 1.0
        bar.move(0.0, f"{round(bar.done)} of {len(tasks)} courses")

    if processes <= 1 or len(tasks) == 1:
        for task in tasks:
            take(task, _course(question, task, _share(question, task, bar.move)))
    else:
        _in_parallel(question, tasks, processes, take)
    for result in results:
        result.courses = {arm: result.courses[arm] for arm in ARMS if arm in result.courses}
    return results


def _share(question: Question, task: Task, move: Callable[[float], None]) -> Callable[[float], None]:
    horizon_s = question.horizon_s or task[0].scenario.duration_s
    return lambda seconds: move(seconds / horizon_s)


def _course(question: Question, task: Task, progress: Callable[[float], None] | None = None) -> Course | str:
    """A course, or in a line why it failed."""
    try:
        return run_course(question, *task, progress)
    except TwinError as error:
        return str(error)
    except Exception as error:  # one bad case must not lose the others
        return f"{type(error).__name__}: {error}"


def _in_parallel(
    question: Question, tasks: Sequence[Task], processes: int, take: Callable[[Task, Course | str], None]
) -> None:
    """Tasks in workers; those that a dying worker took along are tried once more, each by itself."""
    lost = _one_pool(question, list(tasks), min(processes, len(tasks)), take)
    for task in lost:
        if _one_pool(question, [task], 1, take):
            take(task, "its process ended: killed, or out of memory")


def _one_pool(
    question: Question, tasks: list[Task], processes: int, take: Callable[[Task, Course | str], None]
) -> list[Task]:
    """Run tasks in one pool; returns those that were not done when a worker died."""
    waiting, running = tasks[::-1], dict[Future[Course | str], Task]()
    lost: list[Task] = []
    with _workers(question, processes) as pool:
        while waiting or running:
            while waiting and len(running) < 2 * processes and not lost:
                try:
                    running[pool.submit(_work, waiting[-1])] = waiting[-1]
                except BrokenProcessPool:
                    break
                waiting.pop()
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    take(task, future.result())
                except BrokenProcessPool:
                    lost.append(task)
    number = {(task[0].number, task[1]): i for i, task in enumerate(tasks)}
    return sorted([*lost, *waiting], key=lambda task: number[task[0].number, task[1]])


@contextmanager
def _workers(question: Question, processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose workers end with this block, however it ends."""
    context = multiprocessing.get_context("spawn")
    held, lifeline = context.Pipe(duplex=False)
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a worker imports NumPy
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(question, held))
    try:
        yield pool
    except BaseException:
        lifeline.close()
        with suppress(KeyboardInterrupt):
            pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        pool.shutdown(wait=True, cancel_futures=True)
        lifeline.close()
        held.close()


def _prepare(question: Question, lifeline: Connection) -> None:
    """In a worker: Ctrl-C is the parent's to see; without a parent nobody wants the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICE)
    _asked[:] = [question]
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _work(task: Task) -> Course | str:
    """In a worker."""
    return _course(_asked[0], task)
