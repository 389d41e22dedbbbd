"""Record of a simulated fleet's life for scoring: the true events, and the twin's reports of them.

Plain data, times in seconds since the plant began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twin.catalogue import F64

HOUR_S, DAY_S = 3600.0, 86_400.0
HORIZONS_S = (HOUR_S, DAY_S, 7 * DAY_S, 30 * DAY_S)  # of the forecasts that are scored


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure as it truly was. `end_s` is inf while it lasts, `precursor_s` NaN where nothing precedes it.

    `shared`: a cause in common with other nodes; it tells nothing of the node.
    """

    node: int
    kind: str
    begin_s: float
    end_s: float
    precursor_s: float = math.nan
    shared: bool = False

    @property
    def own(self) -> bool:
        """The node's own failure."""
        return not self.shared

    @property
    def announced(self) -> bool:
        """Something that can be measured precedes it."""
        return math.isfinite(self.precursor_s)


@dataclass(frozen=True, slots=True)
class Spell:
    """A time without a break in which the twin would have drained a node, with the first reason for it."""

    node: int
    begin_s: float
    last_s: float  # the last look at which it still would
    reason: str


@dataclass
class Course:
    """One fleet's life with its twin beside it. `n` nodes, [origin] and [origin, n] at the scored instants.

    `said` holds the chances by horizon; `counted` (mean, low, high) [origin, 3] of the fleet's failures.
    `flagged_s` is when each node was first called a lemon (inf: never) [n]; `noticed` are failures that the
    twin saw, as (node, begin_s). `cost_ms` is the mean time of a tick by part.
    """

    seed: int
    strength: float
    n: int
    gpus: int
    begin_s: float
    train_s: float
    end_s: float
    failures: list[Failed]
    lemons: list[int]
    spells: list[Spell] = field(default_factory=list)
    noticed: list[tuple[int, float]] = field(default_factory=list)
    flagged_s: F64 = field(default_factory=lambda: np.zeros(0))
    flagged_28d: list[int] = field(default_factory=list)  # that were called lemons on the 28th day
    origin_s: F64 = field(default_factory=lambda: np.zeros(0))
    said: dict[float, np.ndarray] = field(default_factory=dict)
    counted: dict[float, F64] = field(default_factory=dict)
    cost_ms: dict[str, float] = field(default_factory=dict)
    ticks: int = 0
    models: dict[str, str] = field(default_factory=dict)  # what the forecasts last said they rest on
    suspended: list[str] = field(default_factory=list)  # models that broke their contract
    incidents: list[Any] = field(default_factory=list)  # `HealthIncident`
