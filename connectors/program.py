"""Programs of this host that answer queries, such as `squeue`, with limits to their time and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

END_S = 2.0  # for its pipes to be read to their end once it is killed; they may stay open
REAP_S, POLL_S = 5.0, 0.05  # for the kernel to end it on a host that is short of processors or memory


class ProgramAnswer(NamedTuple):
    """Answer of a program: its exit code (negative: a signal), its output and its errors."""

    code: int
    out: str
    errors: str
    is_cut: bool  # it wrote more than was asked for, and was ended


async def run_program(
    words: Sequence[str], env: Mapping[str, str], timeout_s: float, most_bytes: int
) -> ProgramAnswer:
    """Run it to its end. Raises OSError or ValueError where it cannot be run, TimeoutError where it hangs.

    It leads a process group, which ends with it. A program that hangs takes up to END_S and REAP_S more until
    it has ended.
    """
    process = await asyncio.create_subprocess_exec(
        *words, env=env, start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            pipes = process.stdout, process.stderr
            out, errors = await asyncio.gather(*(_upto(process, pipe, most_bytes) for pipe in pipes))
            code = await process.wait()
    finally:
        if process.returncode is None:
            _kill(process)
            await _wait_for_end(process)
    text, words_of_errors = (raw[:most_bytes].decode("utf-8", "replace") for raw in (out, errors))
    return ProgramAnswer(code, text, words_of_errors, max(len(out), len(errors)) > most_bytes)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    """Wait until a killed program has ended, whoever cancels the wait: else it outlives the event loop."""
    end = asyncio.ensure_future(_reap(process))
    cancelled: asyncio.CancelledError | None = None
    while not end.done():
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _reap(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.communicate(), END_S)
    deadline_s = time.monotonic() + REAP_S
    while process.returncode is None and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)


async def _upto(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, limit: int
) -> bytes:
    """Return all output of a pipe; the program is ended beyond `limit`."""
    got = bytearray()
    while stream is not None and (part := await stream.read(2**16)):
        if len(got) <= limit:
            got += part
            if len(got) > limit:
                _kill(process)
    return bytes(got)
