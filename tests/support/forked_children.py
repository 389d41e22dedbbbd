"""Children that a test kills in the midst of their work, forked from one process that has imported it all.

with ForkedChildren("tests.unit.test_history_service:write") as children:
    pid = children.start("folder", "7")
    children.line()  # what the child prints
    children.kill(pid)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import importlib, os, sys
module, name = sys.argv[1].split(":")
work = getattr(importlib.import_module(module), name)
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        work(*line.split())
        os._exit(0)
    print("child", pid, flush=True)
    os.waitpid(pid, 0)
    # A line that the killed child had begun must not swallow this one
    print("\\nended", flush=True)
"""


class ForkedChildren:
    """`work` is `module:function`; its arguments are texts without spaces. One child at a time."""

    def __init__(self, work: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, work],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._lines: list[str] = []

    def __enter__(self) -> ForkedChildren:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.kill()
        self._parent.communicate()

    def start(self, *arguments: str) -> int:
        """Its process."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(" ".join(arguments) + "\n")
        self._parent.stdin.flush()
        while not (line := self._next()).startswith("child "):
            self._lines.append(line)
        return int(line.split()[1])

    def line(self) -> str:
        """The next line that the child printed; "ended" behind its last."""
        return self._lines.pop(0) if self._lines else self._next()

    def _next(self) -> str:
        assert self._parent.stdout is not None
        while (line := self._parent.stdout.readline()) == "\n":
            pass
        assert line.endswith("\n"), "the process of the children ended"
        return line[:-1]

    def kill(self, pid: int) -> list[str]:
        """The lines that it had printed and nobody had read."""
        os.kill(pid, signal.SIGKILL)
        lines = []
        while (line := self.line()) != "ended":
            lines.append(line)
        return lines
