"""Dask cluster: the results of one process, whatever workers come and go; errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.storm_watch import until
from twin.catalogue import ConfigError, ConnectorError, TwinError
from twin.cli.main import main
from twin.run import Failed, Pool, Report, on_cluster

pytestmark = pytest.mark.slow


def work(factor: int, task: int, report: Report) -> tuple[int, int]:
    report(0.5, "half")
    if task == 3:
        raise TwinError("three is refused")
    if task == 4:
        raise ValueError("four")
    return factor * task, os.getpid()


def dies_once(folder: Path, task: int, report: Report) -> int:
    """The worker of task 1 is killed the first time that it runs it."""
    mark = folder / "died"
    if task == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def waits(folder: Path, task: int, report: Report) -> int:
    """Report until told to stop."""
    (folder / f"begun{task}").touch()
    try:
        while True:
            report(0.1, "")
            time.sleep(0.05)
    finally:
        (folder / f"ended{task}").touch()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and two workers of one thread, each a process of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard", "--protocol", "tcp", "--host", "127.0.0.1"]
    calls = [
        ["distributed.cli.dask_scheduler", *common, "--port", "0"],
        ["distributed.cli.dask_worker", *common, "--nworkers", "2", "--nthreads", "1",
         "--local-directory", str(folder)],
    ]  # fmt: skip
    with (folder / "log").open("w") as log, ExitStack() as stack:
        for module, *words in calls:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            until(file.exists, PATIENCE_S, "the scheduler")
        yield until(lambda: _address(file), PATIENCE_S, "the scheduler's address")


def _address(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["address"])
    except ValueError:
        return ""


def test_a_cluster_gives_what_one_process_gives_in_other_processes(address: str) -> None:
    shares: list[float] = []
    with on_cluster(address):
        pool = Pool(partial(work, 10), progress=lambda share, _="": shares.append(share))
        outcomes = pool.results([1, 2, 6, 7], [1.0, 4.0, 2.0, 3.0])
    assert [value for value, _ in outcomes] == [10, 20, 60, 70]
    assert os.getpid() not in {pid for _, pid in outcomes}
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert Pool(partial(work, 10)).results([1]) == [(10, os.getpid())]  # outside it is here again


def test_an_error_costs_its_own_task(address: str) -> None:
    with on_cluster(address):
        outcomes = dict(Pool(partial(work, 1)).completed([1, 3, 4, 2]))
    assert [outcomes[0][0], outcomes[3][0]] == [1, 2]
    reasons = [outcome.reason for outcome in outcomes.values() if isinstance(outcome, Failed)]
    assert sorted(reasons) == ["ValueError: four", "three is refused"]


def test_the_task_of_a_killed_worker_is_run_by_another_and_the_worker_is_named(
    address: str, tmp_path: Path
) -> None:
    notes: list[str] = []
    with on_cluster(address):
        pool = Pool(partial(dies_once, tmp_path), progress=lambda _, note="": notes.append(note))
        assert pool.results(list(range(6))) == list(range(6))
    assert (tmp_path / "died").exists()
    assert any("is lost" in note for note in notes), notes


def test_ctrl_c_ends_the_tasks_that_run_and_no_other_begins(address: str, tmp_path: Path) -> None:
    over = threading.Event()

    def interrupt() -> None:
        until(lambda: list(tmp_path.glob("begun*")), PATIENCE_S, "a task runs")
        os.kill(os.getpid(), signal.SIGINT)
        while not over.wait(15.0):  # Python drops the exception where it is in a destructor: people try again
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with on_cluster(address):
        try:
            with pytest.raises(KeyboardInterrupt):
                Pool(partial(waits, tmp_path)).results(list(range(8)))
        finally:
            over.set()
        begun = until(lambda: _names(tmp_path, "begun") == _names(tmp_path, "ended"), PATIENCE_S, "all end")
        assert begun
        assert Pool(partial(work, 10)).results([1, 2])[0][0] == 10  # the workers are free again
    assert len(_names(tmp_path, "begun")) <= 4


def _names(folder: Path, what: str) -> set[str]:
    return {path.name.removeprefix(what) for path in folder.glob(f"{what}*")}


@pytest.mark.long
def test_a_backtest_on_a_cluster_is_the_same_byte_for_byte(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = (f"{1_700_000_000 + 600 * i},{x:.3f}" for i, x in enumerate(50 + rng.normal(size=400).cumsum()))
    (tmp_path / "load.csv").write_text("\n".join(["t,w", *rows]) + "\n")
    words = ["backtest", "load", "--series", str(tmp_path / "load.csv"), "--time-column", "t"]
    words += ["--value-column", "w", "--experts", "last,ewma5", "--horizons", "1,3,12", "--json"]
    told = []
    for where in ([], ["--jobs", "2"], ["--cluster", address]):
        assert main([*words, *where]) == 0
        told.append(re.sub(r'"(wall_s|fit_s|predict_ms)": ?[^,}]+', "", capsys.readouterr().out))
    assert told[0] == told[1] == told[2]


def test_what_is_no_cluster_is_refused_in_words() -> None:
    with (
        pytest.raises(ConfigError, match=r"--cluster nonsense://x: expected an address"),
        on_cluster("nonsense://x"),
    ):
        pass
    with (
        pytest.raises(ConnectorError, match=r"no scheduler answers there; start one with"),
        on_cluster("tcp://127.0.0.1:1"),
    ):
        pass


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"expected the extra `dask`"), on_cluster("tcp://127.0.0.1:1"):
        pass


def test_dask_is_not_imported_without_an_address() -> None:
    code = (
        "import sys, twin.run as r\nwith r.on_cluster(None): r.Pool\nassert 'distributed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
