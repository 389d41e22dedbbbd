"""Pool: the same results with any number of processes; errors and dying workers cost their own task only."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from twin.catalogue import TwinError
from twin.run import DIED, Failed, Pool, Report


def work(factor: int, task: int, report: Report) -> int:
    report(0.5, "half")
    if task == 3:
        raise TwinError("three is refused")
    if task == 4:
        raise ValueError("four")
    if task == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return factor * task


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_give_what_one_gives(processes: int) -> None:
    seen: list[float] = []
    pool = Pool(partial(work, 10), processes, lambda share, _="": seen.append(share))
    assert pool.results([1, 2, 6, 7], [1.0, 4.0, 2.0, 3.0]) == [10, 20, 60, 70]
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_costs_its_own_task(processes: int) -> None:
    pool = Pool(partial(work, 1), processes)
    outcomes = dict(pool.completed([1, 3, 4, 2]))
    assert (outcomes[0], outcomes[3]) == (1, 2)
    reasons = [outcome.reason for outcome in outcomes.values() if isinstance(outcome, Failed)]
    assert sorted(reasons) == ["ValueError: four", "three is refused"]
    with pytest.raises(TwinError, match="three is refused"):
        pool.results([1, 3])


@pytest.mark.long
def test_a_task_whose_worker_dies_is_tried_once_more_and_the_others_are_done() -> None:
    outcomes = dict(Pool(partial(work, 1), 2).completed([1, 5, 2, 6, 7]))
    assert outcomes.pop(1) == Failed(DIED)
    assert outcomes == {0: 1, 2: 2, 3: 6, 4: 7}


def test_no_task_gives_no_result() -> None:
    assert Pool(partial(work, 1), 4).results([]) == []
