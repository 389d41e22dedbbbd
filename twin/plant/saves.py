"""What simulated jobs say of their saves, as the client in a real job would.

A report follows each save that is whole, each recovery and each new interval, and comes every SPEAK_S all the
same. May import events and frames.
"""

from __future__ import annotations

import msgspec

from twin.events import CheckpointTold, Event
from twin.frame import NS

SPEAK_S = 300.0  # between reports at most, as the client that jobs may use has it


def saved(
    job: str,
    at_s: float,
    began_s: float,
    save_s: float,
    block_s: float,
    interval_s: float,
    progress_per_s: float = 0.0,
) -> CheckpointTold:
    """That a save which began at `began_s` is durable at `at_s`; instants in ns since the plant began.

    It took `save_s`, of which the job stood still for `block_s`.
    """
    return CheckpointTold(job=job, at_ns=_ns(at_s), began_ns=_ns(began_s), save_s=save_s, block_s=block_s,
                          flush_s=save_s, interval_s=interval_s, progress_per_s=progress_per_s)  # fmt: skip


def goes_on(
    job: str,
    at_s: float,
    interval_s: float,
    began_s: float | None = None,
    restart_s: float = 0.0,
    progress_per_s: float = 0.0,
) -> CheckpointTold:
    """That nothing new is saved: it holds what began at `began_s` (None: it cannot tell), or recovered."""
    began_ns = 0 if began_s is None else _ns(began_s)
    return CheckpointTold(job=job, at_ns=_ns(at_s), began_ns=began_ns, restart_s=restart_s,
                          interval_s=interval_s, progress_per_s=progress_per_s)  # fmt: skip


def dated(event: Event, start_ns: int) -> Event:
    """The same with instants of a plant that began at `start_ns`; only reports on saves have any."""
    if not isinstance(event, CheckpointTold):
        return event
    began_ns = event.began_ns and event.began_ns + start_ns
    return msgspec.structs.replace(event, at_ns=event.at_ns + start_ns, began_ns=began_ns)


def _ns(time_s: float) -> int:
    """Never 0, which says nothing."""
    return round(time_s * NS) or 1
