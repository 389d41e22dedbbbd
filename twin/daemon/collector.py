"""Collector: garbage collection between ticks, so that a tick does not wait for one.

A pass over the young objects costs up to 30 ms in a storm of events. The interpreter begins one itself only
where more than `MOST_YOUNG` objects came since the last.
"""

from __future__ import annotations

import gc

MOST_YOUNG = 200_000
MIDDLE_EVERY, ALL_EVERY = 10, 600  # ticks between passes over what survived one, and over all


def freeze_heap() -> None:
    """Leave aside what lives as long as the process, and collect between ticks from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MOST_YOUNG, 10, 10)


def collect_garbage(tick: int) -> None:
    """Collect after a tick."""
    gc.collect(2 if tick % ALL_EVERY == 0 else 1 if tick % MIDDLE_EVERY == 0 else 0)
