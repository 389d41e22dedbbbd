"""Recordings of real sites through the twin: the alarms above info that it raises of each.

Nobody recorded which faults these sites had, so an alarm here is one to look at, not one known to be false.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from connectors.dsx import discover
from connectors.files import BadRow, discover_ipmi, read_capture
from twin.catalogue import NS
from twin.config import load_site, spec_of
from twin.contracts import Decision
from twin.engine import Engine
from twin.run import Report, open_source, replay_arrivals
from twin.site import SiteSpec, build_site
from twin.telemetry import Frame

DEPLOY = Path(__file__).parents[3] / "deploy"
HOUR_S = 3600.0


class Recording(NamedTuple):
    """A recording that the twin can replay: its folder, the site and mapping of a table, the tick."""

    name: str
    pattern: str
    dt_s: float = 1.0
    site: str = ""
    mapping: str = ""


KNOWN = (
    Recording("dsx-bms-capture", "dsx_exemplar.csv"),
    Recording("node-ipmi-sdr-harvard", "*.tar.gz"),
    Recording("gpu-server-hourly-biohpc", "*.txt", HOUR_S, "sites/biohpc.yaml",
              "mappings/biohpc-hourly.yaml"),
)  # fmt: skip


@dataclass(frozen=True)
class Replayed:
    """A recording and what was raised of it: (detector, entities, severity, evidence) of each alarm."""

    name: str
    span_s: float
    racks: int
    ticks: int
    alarms: list[tuple[str, str, str, str]]


class Raised:
    """Observer that keeps each finding above info once it begins."""

    def __init__(self) -> None:
        self.alarms: list[tuple[str, str, str, str]] = []
        self._active: set[str] = set()
        self.first_ns, self.last_ns = 0, 0

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After a tick."""
        self.first_ns, self.last_ns = self.first_ns or frame.now_ns, frame.now_ns
        active = {f.id: f for f in engine.findings.active.values() if f.severity != "info"}
        for identity in sorted(active.keys() - self._active):
            found = active[identity]
            entities, evidence = " ".join(found.entities), "; ".join(found.evidence)
            self.alarms.append((identity.rpartition("/")[0] or identity, entities, found.severity, evidence))
        self._active = set(active)


def recordings_in(folder: Path) -> list[tuple[Recording, list[Path]]]:
    """Those that are there, with their files."""
    found = ((known, sorted((folder / known.name).glob(known.pattern))) for known in KNOWN)
    return [(known, files) for known, files in found if files]


def replay(task: tuple[Recording, list[Path]], report: Report) -> Replayed:
    """Replay a recording through a twin without policies and forecasts."""
    recording, files = task
    spec = _spec(recording, files)
    site = build_site(spec, recording.name)
    engine, raised = Engine(site, [], []), Raised()
    mapping = DEPLOY / recording.mapping if recording.mapping else None
    outcome = replay_arrivals(
        engine, spec, open_source(files, site, mapping), recording.dt_s, None, (raised,)
    )
    report(1.0, recording.name)
    span_s = (raised.last_ns - raised.first_ns) / NS
    return Replayed(recording.name, span_s, site.sizes["rack"], outcome.ticks, raised.alarms)


def _spec(recording: Recording, files: list[Path]) -> SiteSpec:
    if recording.site:
        return load_site(DEPLOY / recording.site)[0]
    if recording.pattern.endswith(".tar.gz"):
        return spec_of(discover_ipmi(files[0], "recorded"), None, recording.name)
    messages = (m for m in read_capture(files[0]) if not isinstance(m, BadRow))
    return spec_of(discover(iter(messages)).site, None, recording.name)
