"""Lying sensors: one wire of a simulated site reports another value than its meter reads, for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F32
from twin.plant import Observation, Sensors

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
        at = np.array(lie.entities, np.intp)
        for report in observation.reports:
            if report.table == lie.table and lie.signal in report.signals:
                row = list(report.signals).index(lie.signal)
                values = report.values.copy()
                values[row, at] = lie.change(values[row, at], self.second - lie.begin_s)
                report.values = values
