"""A simulated fleet whose nodes fail, some of them after signs in the telemetry, and a view of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from twin.catalogue import NS
from twin.contracts import FailureLog, NodeFeatures

DAY_NS = 86_400 * NS
START_NS = 1_700_000_000 * NS // (600 * NS) * 600 * NS
CLASSES = ("memory", "off_bus", "taken_out")
NAMES = ("level", "gpu_gap_pu", "ecc_sbe_recent", "ecc_sbe_daily", "temp_z", "busy_pu", "noise", "failed_30d")


def log_of(rows: Any, begin_ns: int = START_NS) -> FailureLog:
    """From (node, start day, end day or 0, class, shared)."""
    rows = sorted(rows, key=lambda row: row[1])
    column = [np.array(x) for x in zip(*rows, strict=True)] if rows else [np.zeros(0)] * 5
    at = [np.round(x.astype(float) * DAY_NS).astype(np.int64) for x in column[1:3]]
    end_ns = np.where(column[2] > 0, begin_ns + at[1], 0).astype(np.int64)
    return FailureLog(column[0].astype(np.int32), begin_ns + at[0], end_ns, column[3].astype(np.uint8),
                      column[4].astype(np.bool_), CLASSES, begin_ns)  # fmt: skip


class View:
    """Subset of a view that a model of failures reads."""

    def __init__(
        self, n: int, day: float, log: FailureLog, values: Any, names: tuple[str, ...] = NAMES
    ) -> None:
        self.site = SimpleNamespace(sizes={"node": n, "site": 1})
        self.now_ns, self.dt_s = START_NS + round(day * DAY_NS), 60.0
        self._log, self._features = log, NodeFeatures(names, np.asarray(values, np.float32))
        self.under: Any = None

    def failures(self) -> FailureLog:
        return self._log

    def node_features(self) -> NodeFeatures:
        return self._features

    def maintenance(self, table: str) -> Any:
        return self.under


def quiet(n: int) -> np.ndarray:
    """Features of n nodes on a quiet day."""
    out = np.zeros((n, len(NAMES)), np.float32)
    out[:, NAMES.index("busy_pu")] = 0.5
    return out


class Fleet:
    """n nodes over some days. signs: share of failures that announce themselves by errors, hours before."""

    def __init__(
        self, n: int, days: float, rate: float, signs: float, seed: int, noise_per_d: float = 0.05
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n, self.rng = n, rng
        per_day = rate * np.where(rng.random(n) < 0.05, 8.0, 0.7)
        rows, spells = [], []
        for node in range(n):
            at = rng.exponential(1.0 / per_day[node])
            while at < days:
                repair_d = float(rng.lognormal(np.log(0.8), 0.5))
                rows.append((node, at, at + repair_d, int(rng.integers(2)), False))
                if rng.random() < signs:
                    spells.append((node, at - rng.lognormal(np.log(0.15), 0.8), at, rng.uniform(2.0, 5.0)))
                at += repair_d + rng.exponential(1.0 / per_day[node])
            for begin in rng.uniform(0.0, days, rng.poisson(noise_per_d * days)):
                spells.append((node, begin, begin + rng.exponential(0.2), rng.uniform(1.0, 4.0)))
        self.rows = sorted(rows, key=lambda row: row[1])
        self.spells = sorted(spells, key=lambda spell: spell[1])

    def log(self, day: float) -> FailureLog:
        """As known on this day."""
        return log_of([(n, a, b if b <= day else 0.0, c, s) for n, a, b, c, s in self.rows if a <= day])

    def features(self, day: float) -> np.ndarray:
        out = quiet(self.n)
        sbe, since = NAMES.index("ecc_sbe_recent"), NAMES.index("ecc_sbe_daily")
        for node, begin, end, strength in self.spells:
            if begin <= day < end:
                out[node, sbe] = strength
            if begin <= day < end + 0.5:
                out[node, since] = strength * 0.5
        out[:, NAMES.index("temp_z")] = self.rng.normal(0.0, 1.0, self.n)
        out[:, NAMES.index("noise")] = self.rng.normal(0.0, 1.0, self.n)
        out[self.rng.random(self.n) < 0.02, NAMES.index("temp_z")] = np.nan
        return out

    def view(self, day: float) -> View:
        return View(self.n, day, self.log(day), self.features(day))


def lived(model: Any, n: int = 10, days: float = 6.0, rate: float = 0.5, seed: int = 9) -> Fleet:
    """The fleet that a model has watched for so long, once an hour."""
    fleet = Fleet(n, days, rate, 0.5, seed)
    for hour in range(1, round(24 * days)):
        model.update(fleet.view(hour / 24.0))
    return fleet
