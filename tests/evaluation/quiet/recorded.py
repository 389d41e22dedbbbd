"""Recordings of real sites through the twin: the alarms above info that it raises of each.

Nobody recorded which faults these sites had, so an alarm here is one to look at, not one known to be false.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from connectors.dsx import discover
from connectors.files import BadRow, discover_ipmi, read_capture
from twin.config import spec_of
from twin.contracts import Decision
from twin.engine import Engine
from twin.run import Report, open_source, replay_arrivals
from twin.site import build_site
from twin.telemetry import Frame

KNOWN = {"dsx-bms-capture": "dsx_exemplar.csv", "node-ipmi-sdr-harvard": "*.tar.gz"}  # file of a recording
TICK_S = 1.0


class Replayed(NamedTuple):
    """A recording and what was raised of it: (detector, entities, severity, evidence) of each alarm."""

    name: str
    span_s: float
    racks: int
    alarms: list[tuple[str, str, str, str]]


class Raised:
    """Observer that keeps each finding above info once it begins."""

    def __init__(self) -> None:
        self.alarms: list[tuple[str, str, str, str]] = []
        self._active: set[str] = set()

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After a tick."""
        active = {f.id: f for f in engine.findings.active.values() if f.severity != "info"}
        for identity in sorted(active.keys() - self._active):
            f = active[identity]
            detector = identity.partition("/")[0]
            self.alarms.append((detector, " ".join(f.entities), f.severity, "; ".join(f.evidence)))
        self._active = set(active)


def recordings_in(folder: Path) -> list[Path]:
    """The files of those that are there."""
    return [file for name, pattern in KNOWN.items() for file in sorted((folder / name).glob(pattern))]


def replay(path: Path, report: Report) -> Replayed:
    """Replay a recording through a twin without policies and forecasts."""
    if path.name.endswith(".tar.gz"):
        tree = discover_ipmi(path, "recorded")
    else:
        tree = discover(m for m in read_capture(path) if not isinstance(m, BadRow)).site
    spec, raised = spec_of(tree, None, path.name), Raised()
    site = build_site(spec, path.name)
    engine, source = Engine(site, [], []), open_source([path], site, None)
    outcome = replay_arrivals(engine, spec, source, TICK_S, None, (raised,))
    report(1.0, path.parent.name)
    return Replayed(path.parent.name, outcome.ticks * TICK_S, site.sizes["rack"], raised.alarms)
