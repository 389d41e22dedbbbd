"""Run of a test program and its files: in its own process group under a lock, with its output kept.

The program inherits the lock of its node: it holds for as long as anything of it lives, also after us. No
shell reads its words, and of our environment it gets little. Imports the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

MAX_FILE = 2**20  # bytes of output that are kept of a run
MAX_TAIL = 4096  # bytes of its end, for the event
MAX_FILES = 500  # of the last runs
GRACE_S = 5.0  # between asking a program to end and ending it
STOP_S = 1.0  # the same when we end ourselves
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "KUBECONFIG", "SSH_AUTH_SOCK")
LAST_FAILURE = 125  # of exit codes; shells end with 126 or 127 where they could run nothing
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


class BurnInOutcome(NamedTuple):
    """Result of a run; `passed` None: nothing about the node."""

    passed: bool | None
    detail: str


class BurnInFolder:
    """Folder of locks and outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stem(self, node: str) -> str:
        """Return a file name that is unique for a node."""
        mark = hashlib.blake2b(node.encode(), digest_size=4).hexdigest()
        return f"{_UNFIT.sub('_', node).strip('.')[-80:]}-{mark}"

    def lock(self, node: str) -> IO[str] | None:
        """Return the lock of a node, or None while a program holds it. Raises OSError."""
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(self.folder / f"{self.stem(node)}.lock", flags, 0o640), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return file

    def holder(self, node: str) -> int | None:
        """Return the process group that last ran under a lock."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / f"{self.stem(node)}.lock").read_text()[:20])
        return None

    def alive(self, node: str) -> bool:
        """Return True if a process of this node's program is alive."""
        file = self.lock(node)
        if file is None:
            return True
        file.close()
        return False

    def output(self, node: str, began_ns: int) -> IO[bytes]:
        """Return a new file for a run's output."""
        return (self.folder / f"{self.stem(node)}-{began_ns // 10**9}.log").open("wb")

    def prune(self) -> None:
        """Keep the outputs of the last runs only."""
        with contextlib.suppress(OSError):
            logs = [
                (entry.stat().st_mtime_ns, entry.path)
                for entry in os.scandir(self.folder)
                if entry.name.endswith(".log")
            ]
            for _, path in sorted(logs)[:-MAX_FILES]:
                os.unlink(path)


async def run_test(
    words: Sequence[str], places: BurnInFolder, node: str, host: str, timeout_s: float, began_ns: int
) -> BurnInOutcome:
    """Run a test of a node to its end; ended at `timeout_s` or when cancelled, with all that it started.

    Raises OSError where our own files fail.
    """
    lock = places.lock(node)
    if lock is None:
        lock = await _outlive(places, node)
        if lock is None:
            return BurnInOutcome(None, "an earlier test of this node still runs and cannot be ended")
    try:
        process, output = await _spawn(words, lock, node, host)
    except (OSError, ValueError) as error:
        return BurnInOutcome(
            None, f"{words[0][:200]}: cannot be run: {getattr(error, 'strerror', None) or error}"
        )
    finally:
        lock.close()  # the program has its own hold of it
    keeping = asyncio.create_task(_keep(output, places, node, began_ns))
    late, grace_s = False, GRACE_S
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        late = True
    except asyncio.CancelledError:
        grace_s = STOP_S
        raise
    finally:
        await asyncio.shield(_finish(process, places, node, keeping, grace_s))
    tail = keeping.result() if keeping.done() and not keeping.cancelled() else b""
    text = tail.decode("utf-8", "replace").strip()
    return _judge(process.returncode, late, timeout_s, text)


def _judge(code: int | None, late: bool, timeout_s: float, output: str) -> BurnInOutcome:
    if late:
        return BurnInOutcome(None, f"{output}\n[no end within {timeout_s:g} s; it was ended]".strip())
    if code is None or not 0 <= code <= LAST_FAILURE:
        why = f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
        return BurnInOutcome(None, f"{output}\n[{why}: no result]".strip())
    return BurnInOutcome(code == 0, output or f"[exit {code}, no output]")


async def _spawn(
    words: Sequence[str], lock: IO[str], node: str, host: str
) -> tuple[asyncio.subprocess.Process, IO[bytes]]:
    """Start the program; returns (program, its output). Raises OSError, ValueError.

    The pipe is ours: of asyncio's, `wait` would wait for what the program leaves behind.
    """
    env = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
    reads, writes = os.pipe()
    output = os.fdopen(reads, "rb", buffering=0)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            start_new_session=True,
            pass_fds=(lock.fileno(),),
            env={**env, "LANG": "C.UTF-8", "RACKTWIN_NODE": node, "RACKTWIN_HOST": host},
        )
    except BaseException:
        output.close()
        raise
    finally:
        os.close(writes)
    with contextlib.suppress(OSError):
        lock.seek(0)
        lock.truncate()
        lock.write(str(process.pid))
        lock.flush()
    return process, output


async def _keep(output: IO[bytes], places: BurnInFolder, node: str, began_ns: int) -> bytes:
    """Write the output to its file, as far as there is room; its end. No program waits for a full disk."""
    tail, written = b"", 0
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
    with contextlib.ExitStack() as open_files:
        open_files.callback(transport.close)
        file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            file = open_files.enter_context(places.output(node, began_ns))
        while part := await reader.read(2**16):
            tail = (tail + part)[-MAX_TAIL:]
            with contextlib.suppress(OSError):
                if file is not None and written < MAX_FILE:
                    await asyncio.to_thread(file.write, part[: MAX_FILE - written])
            written += len(part)
        with contextlib.suppress(OSError):
            if file is not None:
                file.write(b"\n[cut here; the end was:]\n" + tail if written > MAX_FILE else b"")
                file.flush()
    await asyncio.to_thread(places.prune)
    return tail


async def _finish(
    process: asyncio.subprocess.Process,
    places: BurnInFolder,
    node: str,
    keeping: asyncio.Task[bytes],
    grace_s: float,
) -> None:
    """Wait until nothing of the program is left, and return its output."""
    if process.returncode is None or places.alive(node):
        await _end_group(process.pid, places, node, grace_s)
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
    await asyncio.wait([keeping], timeout=2)
    if not keeping.done():  # the pipe was handed on to something that left the group
        keeping.cancel()
        await asyncio.wait([keeping])


async def _end_group(group: int, places: BurnInFolder, node: str, grace_s: float) -> None:
    """Ask all of a process group to end, then kill it. The lock proves that it is still the same group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        for _ in range(int(grace_s / 0.05)):
            if not places.alive(node):
                return
            await asyncio.sleep(0.05)


async def _outlive(places: BurnInFolder, node: str) -> IO[str] | None:
    """End a program that an earlier daemon left running; returns the lock, or None on failure."""
    group = places.holder(node)
    if group is not None and group > 1:
        await _end_group(group, places, node, STOP_S)
    return places.lock(node)
