"""A start of the daemon that ends or fails at its n-th step on the disk, in a forked child.

A step is each opening for writing, rename, removal, truncation, new folder, write of a trace or journal line,
and each fsync below the test's folder. `kill` ends the process before the step, half-way through it where it
is a write; `refuse` lets the step alone fail, as a full disk does; `count` does neither.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S
from twin.cli.main import main
from twin.daemon import leader, leadership
from twin.daemon.daemon import Daemon

TICKS = 3
# The commands import these when they run. Here the parent imports them once for all its children
for _name in (
    "rich.progress",
    "rich.table",
    "twin.cli.init",
    "twin.cli.run",
    "twin.config.reference",
    "twin.report.terminal",
):
    importlib.import_module(_name)
MARKED = {"os.rename", "os.remove", "os.mkdir", "os.truncate"}


class Steps:
    """Counts the steps below `folder`, and breaks the one that is chosen."""

    def __init__(self, folder: Path, mode: str, chosen: int) -> None:
        self.folder, self.mode, self.chosen = str(folder), mode, chosen
        self.names: list[str] = []

    def step(self, name: str, path: object, half: Callable[[], object] | None = None) -> None:
        """Pass, or break here. The history has a thread of its own, and its own tests."""
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if not text.startswith(self.folder) or "/history" in text:
            return
        self.names.append(f"{name} {os.path.relpath(text, self.folder)}")
        if len(self.names) - 1 != self.chosen:
            return
        if self.mode == "kill":
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "refuse":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event in MARKED:
            self.step(event.partition(".")[2], args[0])
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self.step("open", args[0])

    def install(self) -> None:
        """From now on, in this process."""
        opened, sync, reserve = io.open, os.fsync, os.posix_fallocate
        steps = self

        class Written(io.FileIO):
            def write(self, data: Any) -> int:
                steps.step("write", self.name, lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]))
                return io.FileIO.write(self, data)

        def open_(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            if buffering == 0 and set(mode) & set("xaw+"):
                return Written(os.fspath(file), mode.replace("b", ""))
            return opened(file, mode, buffering, *more, **named)

        def path_of(descriptor: int) -> str:
            return os.readlink(f"/proc/self/fd/{descriptor}")

        def synced(descriptor: int) -> None:
            self.step("fsync", path_of(descriptor))
            sync(descriptor)

        def reserved(descriptor: int, at: int, size: int) -> None:
            self.step("reserve", path_of(descriptor))
            reserve(descriptor, at, size)

        io.open, os.fsync, os.posix_fallocate = open_, synced, reserved
        sys.addaudithook(self.hear)


def start(folder: str, mode: str, chosen: str, words: str = "") -> None:
    """Start the daemon of `folder` and let it tick three times; prints its exit code, then its steps.

    With `words`, their spaces as +, it goes on until its log has them.
    """
    awaited, log, begun = words.replace("+", " "), Path(folder) / "words.log", time.monotonic()
    steps = Steps(Path(folder), mode, int(chosen))
    leadership.lock_path = lambda loaded, site: loaded.state / "leader.lock"  # below the folder too
    after = Daemon._after

    def stop_soon(self: Daemon, *what: Any) -> None:
        after(self, *what)
        if self.tick_no < self.opened.last_tick + 1 + TICKS:
            return
        if awaited in log.read_text() or time.monotonic() - begun > PATIENCE_S:
            self.stop()

    Daemon._after = stop_soon  # type: ignore[method-assign]
    leader.POLL_S = 0.05
    _call(steps, ["daemon", "run", "--config", f"{folder}/racktwin.yaml"])


def init(folder: str, mode: str, chosen: str) -> None:
    """Make the files of a site in `folder`; prints the exit code, then the steps."""
    words = ["--force", "--yes", "--broker", "none", "--no-slurm", "--no-kubernetes"]
    _call(Steps(Path(folder), mode, int(chosen)), ["init", folder, *words])


def _call(steps: Steps, command: list[str]) -> None:
    words = open(f"{steps.folder}/words.log", "a")  # noqa: SIM115  # as long as the child lives
    os.dup2(words.fileno(), 2)
    steps.install()
    try:
        code = main(command)
    except BaseException:
        traceback.print_exc()
        code = -1
    print("code", code, flush=True)
    for name in steps.names:
        print("step", name.replace(" ", ":"), flush=True)
    os._exit(0)
