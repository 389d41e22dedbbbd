"""Start times of jobs that are not used, with the reason: those that the clock of a scheduler got wrong."""

from __future__ import annotations

from collections.abc import Iterable

from twin.contracts import Inlet
from twin.telemetry import JobEnded, JobStarted, start_fault

REMEDY = "synchronise the clocks of this host and of the scheduler"


def skip_start_times(events: Iterable[JobStarted | JobEnded], inlet: Inlet, now_ns: int) -> None:
    """Count the start times that the twin ignores; these jobs run all the same."""
    for event in events:
        if isinstance(event, JobStarted) and (why := start_fault(event, now_ns)):
            inlet.skip("start time", why, event.job[:60], REMEDY)
