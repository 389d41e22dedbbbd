"""Runs of a backtest, one after another or in processes side by side, with a bar that shows they move.

The numbers are the same whatever the number of processes: a group of horizons is lived through by itself.
Workers end with their parent. Part of the shell.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from models.backtest import FIT_ISSUES, Part, Result, Terms, groups_of, joined, live
from models.forecasters import FORECASTERS
from models.online import stride
from models.panel import Panel
from twin.app.report_text import duration
from twin.app.stopping import look
from twin.errors import TwinError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ROOMY = 90  # columns of a terminal with room to say what is going on
LOOK_S = 0.2  # between two looks at how far workers are
ETA_AFTER = 0.03  # of the work: sooner nothing can be told. source: estimate


class Ask(NamedTuple):
    """One backtest: forecasters by name."""

    panel: Panel
    horizons: tuple[int, ...]
    names: tuple[str, ...]
    terms: Terms


class _Task(NamedTuple):
    ask: int
    group: tuple[int, ...]
    work: float


class Bar:
    """How far the work is and how long it may still take, on a terminal; nothing elsewhere.

    It turns by itself, so that a long fit does not look like a standstill.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._progress: Progress | None = None
        self._begun = time.monotonic()
        if console.is_terminal:
            columns = (
                SpinnerColumn(), TextColumn("{task.description}"),
                BarColumn(bar_width=24 if console.width >= ROOMY else 10),
                TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                *([TextColumn("{task.fields[note]}", style="dim")] if console.width >= ROOMY else []),
            )  # fmt: skip
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(what, total=1.0, left="", note="")

    def move(self, share: float, note: str = "") -> None:
        """So much is done; `note`: what is going on. Raises KeyboardInterrupt as `stopping.look` does."""
        look()
        if self._progress is not None:
            took_s = time.monotonic() - self._begun
            left = f"about {duration(_rough(took_s * (1 / share - 1)))} left" if share > ETA_AFTER else ""
            self._progress.update(self._task, completed=share, note=note, left=left)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _rough(span_s: float) -> float:
    """A span as roughly as it is known: whole seconds, tens of them, minutes."""
    unit = 1.0 if span_s < 20 else 10.0 if span_s < 120 else 60.0
    return max(round(span_s / unit) * unit, 1.0)


def run_all(asks: Sequence[Ask], jobs: int, bar: Bar) -> list[Result]:
    """The results of all backtests, in their order. Raises TwinError as `models.backtest` does."""
    tasks = [
        _Task(i, group, _work(ask, group))
        for i, ask in enumerate(asks)
        for group in groups_of(ask.panel, ask.horizons, ask.terms)
    ]
    parts = (
        _in_turn(asks, tasks, bar) if jobs <= 1 or len(tasks) == 1 else _side_by_side(asks, tasks, jobs, bar)
    )
    return [
        joined(
            ask.panel, ask.horizons, ask.names, ask.terms,
            [part for task, part in zip(tasks, parts, strict=True) if task.ask == i],
        )
        for i, ask in enumerate(asks)
    ]  # fmt: skip


def _work(ask: Ask, group: tuple[int, ...]) -> float:
    """About how long a task takes, in forecasts of one horizon."""
    rows = sum(ask.panel.n_time / stride(h) for h in group)
    fitted = any(FORECASTERS[name].fitted for name in ask.names)
    return rows + (FIT_ISSUES * ask.terms.refits if fitted else 0)


def one_part(ask: Ask, group: tuple[int, ...], tell: Callable[[float, str], None] | None = None) -> Part:
    """One group of horizons of a backtest. Numbers that overflow are judged, not warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = {name: FORECASTERS[name] for name in ask.names}
        return live(ask.panel, group, kinds, ask.terms, tell)


def _in_turn(asks: Sequence[Ask], tasks: Sequence[_Task], bar: Bar) -> list[Part]:
    total = sum(task.work for task in tasks)
    done, parts = 0.0, []
    for task in tasks:

        def tell(share: float, note: str, task: _Task = task, before: float = done) -> None:
            bar.move((before + share * task.work) / total, note)

        parts.append(one_part(asks[task.ask], task.group, tell))
        done += task.work
    return parts


def _side_by_side(asks: Sequence[Ask], tasks: Sequence[_Task], jobs: int, bar: Bar) -> list[Part]:
    """The greatest tasks first, so that none is left alone at the end."""
    total = sum(task.work for task in tasks)
    order = sorted(range(len(tasks)), key=lambda i: -tasks[i].work)
    parts: dict[int, Part] = {}
    with _workers(min(jobs, len(tasks)), len(tasks)) as (pool, shares):
        try:
            waiting = {pool.submit(_in_worker, asks[tasks[i].ask], tasks[i].group, i): i for i in order}
            while waiting:
                for future in wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED).done:
                    i, found = waiting.pop(future), future.result()
                    if isinstance(found, str):
                        raise TwinError(found)
                    parts[i] = found
                bar.move(sum(shares[i] * task.work for i, task in enumerate(tasks)) / total)
        except BrokenProcessPool:
            raise TwinError(
                "a worker process ended: killed, or out of memory; try again with --jobs 1"
            ) from None
    return [parts[i] for i in range(len(tasks))]


@contextmanager
def _workers(processes: int, tasks: int) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    """A pool whose workers end with this block, however it ends; and how far each task is."""
    context = multiprocessing.get_context("spawn")
    held, lifeline = context.Pipe(duplex=False)
    shares = context.Array("d", tasks, lock=False)
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a worker imports NumPy
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(held, shares))
    try:
        yield pool, shares
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


_shares: list[Any] = []  # in a worker: how far each task is


def _prepare(lifeline: Connection, shares: Any) -> None:
    """In a worker: Ctrl-C is the parent's to see; without a parent nobody wants the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _shares[:] = [shares]
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _in_worker(ask: Ask, group: tuple[int, ...], place: int) -> Part | str:
    """A part, or in a line why there is none: an error of its own making might not survive the way back."""

    def tell(share: float, _: str) -> None:
        _shares[0][place] = share

    try:
        return one_part(ask, group, tell)
    except TwinError as error:
        return str(error)
