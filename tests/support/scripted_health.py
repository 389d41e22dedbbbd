"""A health whose parts say what a test tells them to, for tests of alarms, commands and interfaces.

ill = ailing(engine)
ill.say("gpu", 2, FAILED, "XID 79: fell off the bus", action="replace", sure_pu=0.97)
ill.forecast(86_400.0, mean, lo, hi)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import NS
from twin.contracts import DEGRADED, HEALTHY, PAIRED, PARTS, Evidence, FailureLog, Forecast, Health, action
from twin.engine import Engine
from twin.health import SIGNALS, HealthState, ReportedFault
from twin.health.common_cause import Shock
from twin.health.error_log import FaultBook
from twin.health.failures import Failures
from twin.health.lemons import Lemons
from twin.health.verdicts import Verdicts
from twin.health.wear import Remaining, Wear
from twin.site import Site

CLASSES = ("off_bus", "memory", "link", "thermal", "power", "software", "silent", "taken_out", "other")

NEVER_NS = 2**62


class _Silent:
    """Takes whatever the engine tells it, and makes nothing of it."""

    def update(self, *_: Any) -> None:
        pass

    def take(self, *_: Any) -> None:
        pass

    def forget(self, *_: Any) -> None:
        pass

    def advance(self, *_: Any) -> None:
        pass


class _Verdicts(_Silent, Verdicts):
    def __init__(self, site: Site) -> None:
        self.held: dict[str, Health] = {}
        self.said: dict[tuple[str, int], list[Evidence]] = {}
        for part, table in PARTS.items():
            n = site.sizes[table] * (2 if part in PAIRED else 1)
            self.held[part] = Health(part, np.full(n, HEALTHY, np.uint8), np.zeros(n, np.int64),
                                     np.zeros(n, np.uint8), np.ones(n, np.float32),
                                     np.zeros(n, np.uint8))  # fmt: skip

    def health(self, part: str) -> Health:
        return self.held[part]

    def evidence(self, part: str, index: int) -> tuple[Evidence, ...]:
        return tuple(sorted(self.said.get((part, index), ()), key=lambda e: -e.level))

    def reasons(self, part: str, index: Any, least: int) -> dict[int, list[Evidence]]:
        of = {i: [e for e in self.evidence(part, i) if e.level >= least and ":" not in e.rule]
              for i in index.tolist()}  # fmt: skip
        return {i: found for i, found in of.items() if found}


class _Lemons(_Silent, Lemons):
    def __init__(self, n_node: int) -> None:
        self.why: dict[int, tuple[str, ...]] = {}
        self.counts = np.zeros((n_node, len(SIGNALS)), np.float32)

    def is_lemon(self) -> Any:
        return np.isin(np.arange(len(self.counts)), list(self.why))

    def signals(self) -> Any:
        return self.counts

    def evidence(self, node: int) -> tuple[str, ...]:
        return self.why.get(node, ())


class _Wear(_Silent, Wear):
    def __init__(self) -> None:
        self.left: list[Remaining] = []

    def remaining(self) -> tuple[Remaining, ...]:
        return tuple(self.left)

    def evidence(self, table: str, entity: int) -> tuple[str, ...]:
        return ()


class _Book(_Silent, FaultBook):
    def __init__(self) -> None:
        self.counts = {"heard": 0, "dropped": 0}
        self.faults: dict[tuple[str, int], list[ReportedFault]] = {}

    def receive(self, *_: Any) -> bool:
        return False

    def of(self, table: str, entity: int) -> tuple[ReportedFault, ...]:
        return tuple(self.faults.get((table, entity), ()))


class _Failures(_Silent, Failures):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, str, bool]] = []
        self.begin_ns, self.now_ns = 0, NEVER_NS
        self.causes: tuple[Shock, ...] = ()
        self.well_ns = np.zeros(10_000, np.int64)

    def shocks(self) -> tuple[Shock, ...]:
        return self.causes

    def log(self) -> FailureLog:
        node, start, end, kind, shared = zip(*self.rows, strict=True) if self.rows else ((), (), (), (), ())
        return FailureLog(np.array(node, np.int32), np.array(start, np.int64), np.array(end, np.int64),
                          np.array([CLASSES.index(k) for k in kind], np.uint8), np.array(shared, np.bool_),
                          CLASSES, self.begin_ns)  # fmt: skip


class Ailing:
    """A site with scripted verdicts of its health, and the forecasts beside it."""

    def __init__(self, site: Site, health: HealthState, forecasts: dict[tuple[str, float], Forecast]) -> None:
        self.site, self.health, self.forecasts = site, health, forecasts
        self.verdicts, self.lemons = _Verdicts(site), _Lemons(site.sizes["node"])
        self.wear, self.book, self.failures = _Wear(), _Book(), _Failures()
        health.verdicts, health.lemons, health.wear = self.verdicts, self.lemons, self.wear
        health.book, health.failures = self.book, self.failures
        health.looked_ns = NEVER_NS  # it never looks again by itself

    def say(
        self, part: str, index: int, level: int, text: str = "", *, action_name: str = "none",
        sure_pu: float = 0.9, since_ns: int = 0, rule: str = "test", source: str = "estimate",
        lowered: int = 0,
    ) -> None:  # fmt: skip
        """A part is at a level, for one more reason if `text` says so."""
        held = self.verdicts.held[part]
        if level >= held.level[index]:
            held.sure_pu[index], held.since_ns[index] = sure_pu, since_ns
        held.level[index], held.lowered[index] = max(int(held.level[index]), level), lowered
        held.action[index] = max(int(held.action[index]), action(action_name))
        if text:
            self.verdicts.said.setdefault((part, index), []).append(
                Evidence(rule, level, text, since_ns, sure_pu, source)
            )

    def forecast(
        self, horizon_s: float, mean: Any, half: float = 0.02, key: str = "node.failure_pu", basis: str = ""
    ) -> None:
        """A chance per node (or one for all), with an interval of so much to both sides."""
        n = self.site.sizes[key.partition(".")[0]]
        centre = np.broadcast_to(np.asarray(mean, np.float32), (n,)).copy()
        low, high = np.maximum(centre - np.float32(half), 0), centre + np.float32(half)
        if key.startswith("node."):
            high = np.minimum(high, 1)
        self.forecasts[key, horizon_s] = Forecast(key, horizon_s, centre, low, high, "failure@test", basis)

    def failed(
        self, node: int, start_ns: int, end_ns: int = 0, kind: str = "other", shared: bool = False
    ) -> None:
        """A node became unusable."""
        self.failures.rows.append((node, start_ns, end_ns, kind, shared))

    def wears(self, what: str, entity: int, days: tuple[float, float, float]) -> None:
        """A drift that ends in so many days: middle, low, high."""
        table = what.partition(".")[0]
        columns = [np.full(self.site.sizes[table], np.nan) for _ in range(3)]
        for column, value in zip(columns, days, strict=True):
            column[entity] = value * 86_400.0
        self.wear.left.append(Remaining(what, table, *columns))

    def reports(
        self, table: str, entity: int, code: int, at_ns: int, times: int = 1, detail: str = ""
    ) -> None:
        """A device said that something is wrong."""
        self.book.faults.setdefault((table, entity), []).append(
            ReportedFault(at_ns, at_ns, code, times, detail)
        )

    def unwell(self, part: str, index: int, **more: Any) -> None:
        """Degraded, for a reason that says so."""
        self.say(part, index, DEGRADED, f"{part} {index} is slow", action_name="drain", **more)


def ailing(engine: Engine) -> Ailing:
    """The engine's health from now on says what it is told to."""
    return Ailing(engine.site, engine.health, engine.forecasts)


def days_ago_ns(now_ns: int, days: float) -> int:
    """An instant so many days before."""
    return now_ns - round(days * 86_400.0 * NS)
