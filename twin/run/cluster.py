"""Dask cluster: workers on other machines that run the tasks of a pool, with the same results as here.

A worker takes one task at a time, so that results do not depend on its threads. The scheduler gives the task
of a lost worker to another. Dask is the extra `dask`, and is imported only when an address is given.
"""

from __future__ import annotations

import importlib.metadata
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from twin.catalogue import CATALOGUE_HASH, ConfigError, ConnectorError, TwinError
from twin.run.parallel import CLUSTER, POLL_S, Failed, TaskShares, Work, outcome_of

TIMEOUT_S = 10.0  # until the scheduler answers, and until it has a worker. source: estimate
REPORT_S = 1.0  # between two reports of a task to the scheduler, each a round trip. source: estimate
REMEDY = "start one with `dask scheduler` and `dask worker ADDRESS --nthreads 1 --nworkers N`"
LOST = 3  # workers that a task may lose before it is given up, as Dask's own `allowed-failures`

DROPPED = Failed("the scheduler dropped it, as the workers that held its work are lost")


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
        token = CLUSTER.set(DaskCluster(client))
        try:
            yield
        finally:
            CLUSTER.reset(token)


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
