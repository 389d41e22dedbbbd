"""Programs that are asked: one that is given up has ended before the caller goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from connectors import program
from connectors.program import run_program
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize("pipes_end_s", [program.END_S, 0.0])
def test_a_program_that_is_given_up_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes_end_s: float
) -> None:
    monkeypatch.setattr(program, "END_S", pipes_end_s)
    noted = tmp_path / "pid"
    words = ["/bin/sh", "-c", f"echo $$ > {noted}.part; mv {noted}.part {noted}; exec sleep 600"]

    async def given_up() -> int:
        asked = asyncio.create_task(run_program(words, dict(os.environ), PATIENCE_S, 1000))
        while not noted.exists():
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return int(noted.read_text())

    pid = asyncio.run(given_up())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    gc.collect()  # nothing is left that warns of a process or a pipe


def test_a_program_that_is_given_up_twice_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that outlives its caller outlives the event loop too, which then cannot reap it."""
    kill, create = program._kill, asyncio.create_subprocess_exec
    begun = list[asyncio.subprocess.Process]()

    async def noted(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        begun.append(await create(*words, **options))
        return begun[-1]

    def late_kill(process: asyncio.subprocess.Process) -> None:
        asyncio.get_running_loop().call_later(0.3, kill, process)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    monkeypatch.setattr(program, "_kill", late_kill)

    async def given_up() -> None:
        asked = asyncio.create_task(run_program(["sleep", "600"], dict(os.environ), PATIENCE_S, 1000))
        while not begun:
            await asyncio.sleep(0.01)
        for _ in range(3):
            asked.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(given_up())
    assert begun[0].returncode == -signal.SIGKILL
