"""Lying sensors: wires of a simulated site report another value than their meters read, for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F32
from twin.plant import Observation, Report, Sensors

Change = Callable[[F32, int], F32]  # of the values [k] and the seconds since the lie began


@dataclass(frozen=True)
class Lie:
    """A signal of some entities reads `change` of its value from `begin_s` on, until `end_s`."""

    table: str
    signal: str
    entities: tuple[int, ...]
    change: Change
    begin_s: int
    end_s: int = 1 << 30


class LyingSensors:
    """The sensors of a plant, of which some lie."""

    def __init__(self, sensors: Sensors, *lies: Lie) -> None:
        self.sensors, self.lies, self.second = sensors, lies, 0

    def observe(self, *args: Any) -> Observation:
        """Reports of the sensors, falsified by the lies."""
        observation = self.sensors.observe(*args)
        for lie in self.lies:
            if lie.begin_s <= self.second < lie.end_s:
                self._spoil(observation, lie)
        self.second += 1
        return observation

    def _spoil(self, observation: Observation, lie: Lie) -> None:
        at, second = np.array(lie.entities, np.intp), self.second - lie.begin_s
        for report in observation.reports:
            if report.table == lie.table and lie.signal in report.signals:
                row = report.signals.index(lie.signal)
                report.values = values = report.values.copy()
                values[row, at] = lie.change(values[row, at], second)
            elif report.table == lie.table and lie.signal in report.counters:
                _spoil_counts(report, report.counters.index(lie.signal), lie.change, at, second)


def _spoil_counts(report: Report, row: int, change: Change, at: np.ndarray, second: int) -> None:
    """A counter that lies: NaN is "no reading"."""
    report.counts = counts = report.counts.copy()
    with np.errstate(invalid="ignore"):
        read = np.asarray(change(counts[row, at].astype(np.float64), second), np.float64)  # type: ignore[arg-type]
    counts[row, at] = np.where(np.isfinite(read), np.nan_to_num(read), -1.0).astype(np.int64)
