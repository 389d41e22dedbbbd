"""Ctrl-C in the middle of long work: it ends at once, says so, and no library can eat it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from twin.cli.backtest import load
from twin.cli.main import main
from twin.run import ProgressBar, long_work

CALL = ["backtest", "load", "--series", "x", "--time-column", "t", "--value-column", "v"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clear the stop flag: one test must not stop the next one in this process."""
    before = {number: signal.getsignal(number) for number in long_work.SIGNALS}
    yield
    long_work.stop_at_once()
    for number, action in before.items():
        signal.signal(number, action)


BUSY_S = 3.0  # of processor time: the command has begun its work, wherever in it


def busy_s(pid: int) -> float:
    """Processor time of it and of its children so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(busy_s(int(child)) for child in children)


def until_busy(process: subprocess.Popen[str]) -> None:
    """Until it has used so much processor time, however slow this machine is."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if busy_s(process.pid) >= BUSY_S:
            return
        time.sleep(0.05)
    pytest.fail(f"it did not begin its work; exit {process.poll()}")


@pytest.mark.long
def test_ctrl_c_ends_it_at_once_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{1_700_000_000 + 60 * i},{v:.3f}" for i, v in enumerate(rng.normal(size=20_000).cumsum())]
    (tmp_path / "long.csv").write_text("\n".join(["t,v", *rows]) + "\n")
    words = [sys.executable, "-m", "twin", "backtest", "load", "--series", str(tmp_path / "long.csv"),
             "--time-column", "t", "--value-column", "v"]  # fmt: skip
    for more in ([], ["--jobs", "2"]):
        running = subprocess.Popen([*words, *more], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            until_busy(running)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60.0)
        finally:
            running.kill()
            running.communicate()
        assert (running.returncode, out, err.strip()) == (130, "", "interrupted")


def put(monkeypatch: pytest.MonkeyPatch, run: Callable[..., int]) -> None:
    """Let `racktwin backtest load` do this."""
    name = "backtest load"
    monkeypatch.setitem(load.VERBS, name, replace(load.VERBS[name], run=run))


def test_ctrl_c_in_the_import_of_a_library_is_one_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Struck:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def imports(*_: object) -> int:
        type("Library", (), {"part": Struck()})
        return 0

    put(monkeypatch, imports)
    assert main(CALL) == 130
    assert capsys.readouterr().err.strip() == "interrupted"

    def breaks(*_: object) -> int:
        raise RuntimeError("another one") from ValueError("its cause")

    put(monkeypatch, breaks)
    with pytest.raises(RuntimeError, match="another one"):
        main(CALL)


def test_ctrl_c_that_a_library_ate_is_raised_again_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def works(*_: object) -> int:
        with ProgressBar(Console(stderr=True), "backtest") as bar:
            bar.move(0.1)
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            bar.move(0.2)
        return 0

    put(monkeypatch, works)
    for _ in range(2):
        assert main(CALL) == 130
        assert capsys.readouterr().err.strip() == "interrupted"
