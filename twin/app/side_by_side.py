"""Independent runs in some processes, their results in order: the same however many processes there are.

Part of the shell; may import the standard library alone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def mapped(
    work: Callable[[Any], dict[str, Any]], tasks: Sequence[Any], processes: int
) -> Iterator[dict[str, Any]]:
    """`work` of each task. Both have to be picklable where there is more than one process."""
    if processes <= 1 or len(tasks) == 1:
        yield from map(work, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=context) as pool:
        yield from pool.map(work, tasks)
