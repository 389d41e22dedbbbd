"""A part of the benchmark in a process of its own, with one thread on one core: how it is asked and answers.

Part of the shell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from twin.app.bench_plant import ONE_THREAD

T = TypeVar("T")


def ask_child(module: str, task: msgspec.Struct, prefix: str) -> dict[str, Any]:
    """What `module` measures of a task, each figure under `prefix`. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", module, msgspec.json.encode(task).decode()]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, check=True)
    found = msgspec.json.decode(done.stdout, type=dict[str, float | int])
    return {f"{prefix}{key}": value for key, value in found.items()}


def answer_parent(kind: type[T], measured: Callable[[T], dict[str, float | int]]) -> None:
    """Read a task from the command line, write its figures as JSON to standard output."""
    task = msgspec.json.decode(sys.argv[1], type=kind)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.stdout.buffer.write(msgspec.json.encode(measured(task)) + b"\n")
