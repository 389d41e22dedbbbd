"""A panel: series side by side on one regular grid of time, a gap is NaN.

What every forecaster reads, in the daemon and in a backtest. Holds values and their grid; it estimates
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twin.catalogue import F64, I64, NS, ContractError


@dataclass(frozen=True)
class SeriesPanel:
    """`values` [n_time, n] at `start_ns + row * step_s`; NaN without a reading.

    `known` holds columns [n_time + n_ahead] that are known ahead of time, such as a weather forecast or a
    calendar of maintenance: a forecaster may read them at the instant that it forecasts. `zone` is the IANA
    time zone in which people live there, for hours of the day and days of the week. `memo` is for what
    forecasters worked out of these rows and may want again; panels that share one must hold the same values
    at the same instants, so its keys are of instants, not of places in a panel. Raises ContractError for
    other shapes.
    """

    start_ns: int
    step_s: float
    values: F64
    names: tuple[str, ...] = ()
    zone: str = "UTC"
    known: Mapping[str, F64] = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype != np.float64:
            raise ContractError(
                f"values: expected float64 [n_time, n], got {self.values.dtype} {self.values.shape}"
            )
        if not self.step_s > 0:
            raise ContractError(f"step_s: expected seconds > 0, got {self.step_s}")
        for name, column in self.known.items():
            if column.ndim != 1 or len(column) < len(self.values):
                raise ContractError(
                    f"known {name}: expected at least {len(self.values)} rows, got {column.shape}"
                )

    @property
    def n_time(self) -> int:
        return len(self.values)

    @property
    def n(self) -> int:
        """Number of series."""
        return int(self.values.shape[1])

    def t_ns(self, rows: I64 | None = None) -> I64:
        """Instants of these rows (rows past the end too), or of all. int64 [n_rows]"""
        rows = np.arange(self.n_time) if rows is None else rows
        return self.start_ns + np.round(rows * (self.step_s * NS)).astype(np.int64)

    def upto(self, row: int) -> SeriesPanel:
        """The panel as known at `row`: values up to it, and signals known ahead. A view, not a copy."""
        return SeriesPanel(
            self.start_ns, self.step_s, self.values[: row + 1], self.names, self.zone, self.known
        )
