"""What a plant asks of its workload, be it drawn (`twin.plant.workload`) or held (`twin.plant.held`).

May import events, the truth and the tally.
"""

from __future__ import annotations

from typing import Protocol

from twin.events import Event
from twin.plant.tally import Progress
from twin.plant.truth import Truth


class Work(Protocol):
    """Jobs on GPUs."""

    @property
    def progress(self) -> Progress:
        """What was done, lost, slowed and spent on saves since the beginning."""
        ...

    def step(self, truth: Truth, time_s: float, dt_s: float) -> list[Event]:
        """Write the activities of the step from `time_s` on; what began and ended, what jobs tell.

        Instants of what they tell are in ns since the plant began.
        """
        ...

    def lost_work(self) -> float:
        """GPU-seconds lost since the beginning."""
        ...

    def checkpoint(self, job: str, since_s: float) -> float | None:
        """Ask for a save begun no earlier than `since_s`."""
        ...

    def checkpoint_interval(self, job: str, interval_s: float) -> bool:
        """Save each `interval_s` from now on."""
        ...
