"""Causes of alarms: a graph from sources (broker, gateway, agent, exporter, BMC) over devices to signals.

The engine finds outages and silent devices from instants alone, so that a replay finds the same; the ledger
knows who carried each reading. An alarm of silence is named after the source that stopped. It follows from
the alarm of the daemon's part that hears or asks this source while that is down, else from the oldest alarm
of the same source. What cannot work without a link that is down follows from that link's alarm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from twin.catalogue import NS
from twin.contracts import Finding
from twin.daemon.stopped_sources import StoppedSource, action_of, stopped_sources, title_of
from twin.diagnosis import OF_SILENCE, silent_cells
from twin.engine import Engine
from twin.sources import SourceLedger

LINK = "mqtt"  # the part that hears all topics
PREFIXES = ("silence/", *(f"fault/{kind}/" for kind in OF_SILENCE))
NAMED = 2  # sources in a title
SHOWN = 6
OF_THE_BROKER = "The broker answers: look at the network between it and its publishers, and at its log."
ENDS_S = 30.0  # within which an alarm of silence ends once its data are back


@dataclass(frozen=True, slots=True)
class SilentAlarm:
    """An alarm of silence as it was found, the sources that stopped, and as it is shown."""

    found: Finding
    sources: tuple[StoppedSource, ...]
    shown: Finding

    @property
    def names(self) -> frozenset[str]:
        """The sources, as the ledger names them."""
        return frozenset(s.account.name for s in self.sources)

    @property
    def linger_s(self) -> float:
        """Seconds that it may last once its cause has ended: its next data, and a while."""
        return max((s.wait_ns for s in self.sources), default=0) / NS + ENDS_S


class AlarmCauses:
    """Names alarms of silence by their sources and relates them. `part_of`: source -> part that asks it."""

    def __init__(self) -> None:
        self.part_of: dict[str, str] = {}
        self._silent: dict[str, SilentAlarm] = {}  # the oldest first
        self._by_part: dict[str, str] = {}  # alarm of silence -> part that was down

    def named(self, findings: Iterable[Finding], engine: Engine, ledger: SourceLedger) -> list[Finding]:
        """The findings, with those of silence named by the sources that stopped."""
        out, known = [], self._silent
        for finding in findings:
            if finding.id.startswith(PREFIXES):
                silent = known[finding.id] = _named(finding, engine, ledger, known.get(finding.id))
                finding = silent.shown
            out.append(finding)
        present = {f.id for f in out}
        self._silent = {identity: silent for identity, silent in known.items() if identity in present}
        return out

    def down(self, waiting: Collection[str]) -> set[str]:
        """Parts that are away (of those that wait to be started again) and brought what is silent."""
        self._by_part = {k: part for k, part in self._by_part.items() if k in self._silent}
        for identity, silent in self._silent.items():
            parts = {self._part(name) for name in silent.names}
            if len(parts) == 1 and (part := parts.pop()) in waiting:
                self._by_part[identity] = part
        return set(self._by_part.values()) & set(waiting)

    def _part(self, source: str) -> str:
        """The part that hears or asks a source: the link for all that publish."""
        return self.part_of.get(source, LINK)

    def of(self, sinks: Iterable[str]) -> dict[str, tuple[str, float]]:
        """Alarms that follow from another one: id -> id of the cause, and for how many seconds they may
        outlast it. `sinks`: parts that send over the link.
        """
        link = f"part/{LINK}", ENDS_S
        causes = {f"part/{name}": link for name in sinks}
        causes |= {f"sink/{name.removeprefix('to-')}": link for name in sinks}
        roots: list[tuple[str, frozenset[str]]] = []
        for identity, silent in self._silent.items():
            names = silent.names
            elder = next((root for root, of in roots if names and names <= of), None)
            if (part := self._by_part.get(identity)) is not None:
                causes[identity] = f"part/{part}", silent.linger_s
            elif elder is not None:
                causes[identity] = elder, silent.linger_s
            else:
                roots.append((identity, names))
        return causes


def _named(finding: Finding, engine: Engine, ledger: SourceLedger, before: SilentAlarm | None) -> SilentAlarm:
    if before is not None and before.found is finding:
        return before
    cells = silent_cells(finding.id, engine.diagnosis)
    if before is not None and before.found.count == finding.count:
        sources = before.sources  # as they were when they stopped: they may have begun to speak again
    else:
        sources = stopped_sources(engine.state, ledger, cells)
    shown = finding
    if 0 < len(sources) <= NAMED and cells.members:
        title = title_of(
            " and ".join(s.label for s in sources),
            cells.since_ns or max(s.last_ns for s in sources),
            cells.count or sum(s.signals for s in sources),
            cells.place,
        )
        action = action_of(s.account.name for s in sources) or finding.action
        # A device whose source stopped is not known to have failed
        shown = replace(finding, title=title, action=action, severity="warning")
    elif sources and {s.account.name for s in sources} >= set(ledger.publishers()):
        label = f"all {len(sources)} publishers on the broker"
        title = title_of(label, cells.since_ns, cells.count, cells.place)
        shown = replace(finding, title=title, action=OF_THE_BROKER)
    elif sources:
        more = f" and {len(sources) - SHOWN} more" if len(sources) > SHOWN else ""
        carried = f"carried by {', '.join(s.label for s in sources[:SHOWN])}{more}"
        shown = replace(finding, evidence=(finding.evidence[0], carried, *finding.evidence[1:]))
    return SilentAlarm(finding, sources, shown)
