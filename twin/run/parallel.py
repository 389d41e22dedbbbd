"""Process pool: independent tasks in worker processes, here or on a cluster; results do not depend on where.

Workers on this host are single-threaded, ignore Ctrl-C (the parent handles it) and end with their parent:
each holds the read end of a pipe whose write end only the parent has. A task whose worker dies is retried
once, alone.

Under `on_cluster` the workers of a Dask cluster run the tasks, with the same results. A worker takes one task
at a time, so that results do not depend on its threads; the scheduler gives the task of a lost worker to
another. Dask is the extra `dask`, and is imported only when an address is given.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np

from twin.catalogue import CATALOGUE_HASH, ConfigError, ConnectorError, TwinError

T = TypeVar("T")
R = TypeVar("R")
Report = Callable[[float, str], None]  # the finished share of a task or of all of them, and a note
Work = Callable[[T, Report], R]

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SPAWN = multiprocessing.get_context("spawn")  # libraries that the parent imports are not in a worker
POLL_S = 0.2  # between two looks at the progress of workers
DIED = "its process ended: killed, or out of memory"
TIMEOUT_S = 10.0  # until the scheduler answers, and until it has a worker. source: estimate
REPORT_S = 1.0  # between two reports of a task to the scheduler, each a round trip. source: estimate
REMEDY = "start one with `dask scheduler` and `dask worker ADDRESS --nthreads 1 --nworkers N`"
LOST = 3  # workers that a task may lose before it is given up, as Dask's own `allowed-failures`


@dataclass(frozen=True)
class Failed:
    """The outcome of a task that raised. `error` is absent where it was raised in a worker."""

    reason: str
    error: Exception | None = None


DROPPED = Failed("the scheduler dropped it, as the workers that held its work are lost")


def no_report(share: float, note: str = "") -> None:
    """A `Report` for callers that show no progress."""


_CLUSTER: ContextVar[DaskCluster | None] = ContextVar("cluster", default=None)  # of the pools of this context


@dataclass(frozen=True)
class Pool(Generic[T, R]):
    """Runs `work` on tasks. With more than one process `work`, tasks and results have to be picklable.

    `work` is sent to each worker once: bind to it what all tasks share (`functools.partial`). `weights` are
    the relative costs of the tasks: the greatest starts first. `nice` lowers the priority of workers.
    """

    work: Work[T, R]
    processes: int = 1
    progress: Report = no_report
    nice: int = 0

    def results(self, tasks: Sequence[T], weights: Sequence[float] | None = None) -> list[R]:
        """The results in the order of the tasks. Raises the error of a task that fails."""
        done: dict[int, R] = {}
        with closing(self.completed(tasks, weights)) as outcomes:
            for i, outcome in outcomes:
                if isinstance(outcome, Failed):
                    raise outcome.error or TwinError(outcome.reason)
                done[i] = outcome
        return [done[i] for i in range(len(tasks))]

    def completed(
        self, tasks: Sequence[T], weights: Sequence[float] | None = None
    ) -> Generator[tuple[int, R | Failed], None, None]:
        """(index, outcome) of each task as it ends."""
        shares = TaskShares([1.0] * len(tasks) if weights is None else weights, self.progress)
        order = sorted(range(len(tasks)), key=lambda i: -shares.weights[i])
        if (cluster := _CLUSTER.get()) is not None:
            yield from cluster.completed(self.work, tasks, order, shares)
            return
        if self.processes <= 1 or len(tasks) <= 1:
            for i in range(len(tasks)):
                yield i, outcome_of(self.work, tasks[i], shares.of(i), in_worker=False)
                shares.end(i)
            return
        lost = yield from self._pooled(tasks, order, shares)
        for i in lost:
            if (yield from self._pooled(tasks, [i], shares)):
                yield i, Failed(DIED)

    def _pooled(
        self, tasks: Sequence[T], order: Sequence[int], shares: TaskShares
    ) -> Generator[tuple[int, R | Failed], None, list[int]]:
        """Run these tasks in one pool; returns those that were not done when a worker died."""
        waiting, lost = list(order)[::-1], list[int]()
        running: dict[Future[R | Failed], int] = {}
        processes = min(self.processes, len(order))
        with self._workers(processes, len(tasks)) as (workers, progress):
            while waiting or running:
                while waiting and len(running) < 2 * processes and not lost:
                    try:
                        running[workers.submit(_in_worker, tasks[waiting[-1]], waiting[-1])] = waiting[-1]
                    except BrokenProcessPool:
                        break
                    waiting.pop()
                if not running:
                    break
                for future in wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
                    i = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        lost.append(i)
                        continue
                    shares.end(i)
                    yield i, outcome
                shares.take(progress)
        return [i for i in order if i in (*lost, *waiting)]

    @contextmanager
    def _workers(self, processes: int, tasks: int) -> Iterator[tuple[Workers, Any]]:
        """A pool whose workers end with this block, however it ends; and the share that each task reports."""
        shares = SPAWN.Array("d", tasks, lock=False)
        workers = Workers(processes, self.nice, self.work, shares)
        try:
            yield workers, shares
        except BaseException:
            workers.close()  # they end in the middle of their tasks
            with suppress(KeyboardInterrupt):
                workers.pool.shutdown(wait=True, cancel_futures=True)
            raise
        workers.pool.shutdown(wait=True, cancel_futures=True)
        workers.close()


class Workers:
    """Spawned processes that end with their parent or when they are closed, whatever they are doing."""

    def __init__(self, processes: int, nice: int = 0, work: Any = None, shares: Any = None) -> None:
        self._held, self._lifeline = SPAWN.Pipe(duplex=False)
        arguments = (work, nice, self._held, shares)
        self.pool = ProcessPoolExecutor(processes, mp_context=SPAWN, initializer=_prepare, initargs=arguments)

    def submit(self, call: Callable[..., R], *arguments: Any) -> Future[R]:
        """Run a call in a worker. Raises BrokenProcessPool once a worker has died."""
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a worker, started here, imports NumPy
        try:
            return self.pool.submit(call, *arguments)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """End the workers at once; tasks that have not begun are dropped."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._lifeline.close()
        self._held.close()


class TaskShares:
    """The finished share of each task, summed up by weight for the caller's progress."""

    def __init__(self, weights: Sequence[float], progress: Report) -> None:
        self.weights, self._progress = weights, progress
        self._done = [0.0] * len(weights)
        self._ended = 0

    def of(self, i: int) -> Report:
        """A `Report` of one task in this process."""

        def report(share: float, note: str = "") -> None:
            self._done[i] = share
            self._print(note)

        return report

    def take(self, shares: Sequence[float]) -> None:
        """The shares that workers report."""
        self._done = [max(a, b) for a, b in zip(self._done, shares, strict=True)]
        self._print(f"{self._ended} of {len(self._done)} done")

    def end(self, i: int) -> None:
        """Count a task that has ended."""
        self._done[i] = 1.0
        self._ended += 1
        self._print(f"{self._ended} of {len(self._done)} done")

    def note(self, text: str) -> None:
        """Show a note beside the share that is done."""
        self._print(text)

    def _print(self, note: str) -> None:
        total = sum(self.weights) or 1.0
        done = sum(w * share for w, share in zip(self.weights, self._done, strict=True))
        self._progress(done / total, note)


def outcome_of(work: Work[T, R], task: T, report: Report, *, in_worker: bool) -> R | Failed:
    """Return the result, or a reason instead of an error, since an error might not be picklable."""
    try:
        return work(task, report)
    except Exception as error:
        reason = str(error) if isinstance(error, TwinError) else f"{type(error).__name__}: {error}"
        return Failed(reason, None if in_worker else error)


_work: list[Any] = []  # in a worker: the work, and the share of each task


def _prepare(work: Any, nice: int, lifeline: Connection, shares: Any) -> None:
    """Prepare a worker process, which ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(nice)
    _work[:] = [work, shares]
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _in_worker(task: Any, place: int) -> Any:
    work, shares = _work

    def report(share: float, _: str = "") -> None:
        shares[place] = share

    return outcome_of(work, task, report, in_worker=True)


@contextmanager
def on_cluster(address: str | None) -> Iterator[None]:
    """Within: the pools of this thread run on the Dask cluster whose scheduler has this address.

    None: on this machine. Raises ConfigError where Dask is not installed or the address is none, and
    ConnectorError where no scheduler or worker answers.
    """
    if address is None:
        yield
        return
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--cluster: Dask is not installed; expected the extra `dask`: pip install 'racktwin[dask]'"
        ) from error
    try:
        client = Client(address, timeout=TIMEOUT_S, set_as_default=False, name="racktwin")
    except ValueError as error:
        raise ConfigError(
            f"--cluster {address}: expected an address such as tcp://HOST:8786; {error}"
        ) from error
    except OSError as error:
        raise ConnectorError(f"--cluster {address}: no scheduler answers there; {REMEDY}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=TIMEOUT_S)
        except TimeoutError as error:
            raise ConnectorError(f"--cluster {address}: the scheduler has no worker; {REMEDY}") from error
        token = _CLUSTER.set(DaskCluster(client))
        try:
            yield
        finally:
            _CLUSTER.reset(token)


class DaskCluster:
    """Runs the tasks of pools on the workers of `client`, a `distributed.Client`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def completed(
        self, work: Work[Any, Any], tasks: Sequence[Any], order: Sequence[int], shares: TaskShares
    ) -> Iterator[tuple[int, Any]]:
        """(index, outcome) of each task as it ends; those first in `order` begin first."""
        from distributed import Event

        client, topic, versions = self._client, f"racktwin-{uuid.uuid4().hex}", _versions()
        reported, ended = [0.0] * len(tasks), queue.SimpleQueue[Any]()
        running, lost, bound = dict[Any, int](), dict.fromkeys(order, 0), self._send(work)

        def take(event: tuple[Any, tuple[int, float]]) -> None:
            place, share = event[1]
            reported[place] = share

        def begin(i: int, rank: int) -> None:
            given = (bound, tasks[i], (topic, i), versions)
            future = client.submit(_on_worker, *given, pure=False, priority=-rank)
            running[future] = i
            future.add_done_callback(ended.put)

        client.subscribe_topic(topic, take)
        stop, workers = Event(topic, client=client), self._workers()
        try:
            for rank, i in enumerate(order):
                begin(i, rank)
            while running:
                with suppress(queue.Empty):
                    future = ended.get(timeout=POLL_S)
                    i, outcome = running.pop(future), _result(future)
                    if outcome is DROPPED and lost[i] < LOST:  # the work itself was on lost workers alone
                        lost[i], bound = lost[i] + 1, self._send(work)
                        begin(i, 0)
                        continue
                    shares.end(i)
                    yield i, outcome
                shares.take(reported)
                workers = self._note_lost(workers, shares)
        finally:
            client.unsubscribe_topic(topic)
            if running:  # those that wait do not begin, those that run end at their next report
                stop.set()
                client.cancel(list(running), force=True)

    def _send(self, work: Work[Any, Any]) -> Any:
        """Have each worker take the work once, however many tasks it gets. Raises ConnectorError."""
        try:
            return self._client.scatter(work, broadcast=True, hash=False)
        except Exception as error:  # what a worker raises comes back as its text
            raise ConnectorError(
                f"--cluster: a worker cannot take the work: {error}; install the same racktwin there"
            ) from error

    def _workers(self) -> dict[str, str]:
        """Name of each worker by its address."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {address: f"{w['name']} on {w['host']}" for address, w in workers.items()}

    def _note_lost(self, before: dict[str, str], shares: TaskShares) -> dict[str, str]:
        """Name the workers that have gone; their tasks begin again on others."""
        now = self._workers()
        for address in before.keys() - now.keys():
            shares.note(f"worker {before[address]} is lost: its task begins again on another")
        return now


def _result(future: Any) -> Any:
    """The outcome of a task."""
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError

    try:
        return future.result()
    except KilledWorker as error:
        return Failed(f"{LOST + 1} workers ended while they ran it, the last was {error.last_worker.address}")
    except FutureCancelledError:
        return DROPPED
    except Exception as error:  # of Dask itself: those of the task come as an outcome
        return Failed(f"{type(error).__name__}: {error}")


def _versions() -> tuple[str, ...]:
    """Version of all that numbers depend on: other versions could give other bytes."""
    return (
        importlib.metadata.version("racktwin"),
        CATALOGUE_HASH,
        np.__version__,
        importlib.metadata.version("scikit-learn"),
    )


_one_at_a_time = threading.Lock()  # tasks change what belongs to the process, such as warnings


def _on_worker(work: Any, task: Any, place: tuple[str, int], versions: tuple[str, ...]) -> Any:
    from distributed import Event, get_worker

    worker, (topic, i) = get_worker(), place
    if (own := _versions()) != versions:
        return Failed(
            f"worker {worker.name} has racktwin, catalogue, NumPy, scikit-learn {own}; expected {versions}"
        )
    last_s = [time.monotonic()]

    def report(share: float, _: str = "") -> None:
        if time.monotonic() - last_s[0] >= REPORT_S:
            last_s[0] = time.monotonic()
            if Event(topic).is_set():
                raise TwinError("stopped: nobody waits for it any more")
            worker.log_event(topic, (i, share))

    with _one_at_a_time:
        return outcome_of(work, task, report, in_worker=True)
