"""Causes of alarms: the sources that carried what is missing, and the alarms that follow from another one.

The engine finds outages from instants alone, so that a replay finds the same; the ledger of sources knows who
carried each reading and gives the outage its name. What cannot work without a link that is down follows from
that link's alarm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from twin.catalogue import NS, TABLES, utc
from twin.contracts import Finding
from twin.daemon.source_ledger import SourceLedger
from twin.diagnosis import Outage, Outages, where
from twin.site import Site

LINK = "part/mqtt"  # the alarm of the link that carries all topics
OF_TOPICS = ("agent ", "bms ", "sparkplug ", "topic ", "job ", "jobs ")  # sources that it brings
NAMED = 2  # sources in a title
SHOWN = 6
GRACE_S = 10.0  # between the stamp of the last reading and its arrival


class AlarmCauses:
    """Names outages by their sources. Asks the ledger once for each outage, and again when it grows."""

    def __init__(self) -> None:
        self._carriers: dict[str, tuple[int, tuple[str, ...]]] = {}  # outage -> its entities, its sources
        self._named: dict[str, tuple[Finding, Finding]] = {}  # outage -> as found, as named

    def named(
        self, findings: Iterable[Finding], outages: Outages, ledger: SourceLedger, site: Site
    ) -> list[Finding]:
        """The findings, with outages named by the sources that fell silent."""
        out, before = [], self._named
        self._named = {}
        self._carriers = {k: v for k, v in self._carriers.items() if k in outages.known}
        for finding in findings:
            outage = outages.known.get(finding.id)
            if outage is not None:
                was = before.get(finding.id)
                shown = was[1] if was is not None and was[0] is finding else None
                shown = shown or self._name(finding, outage, outages, ledger, site)
                self._named[finding.id] = finding, shown
                finding = shown
            out.append(finding)
        return out

    def _name(
        self, finding: Finding, outage: Outage, outages: Outages, ledger: SourceLedger, site: Site
    ) -> Finding:
        sources = self._sources(outage, outages, ledger)
        if not sources:
            return finding
        if len(sources) <= NAMED:
            since = utc(outage.since_ns, "%H:%M:%S")
            title = f"No data from {' and '.join(sources)} since {since}: {outage.signals} signals of "
            finding = replace(finding, title=title + where(site, outage))
        more = f" and {len(sources) - SHOWN} more" if len(sources) > SHOWN else ""
        carried = f"carried by {', '.join(sources[:SHOWN])}{more}"
        return replace(finding, evidence=(finding.evidence[0], carried, *finding.evidence[1:]))

    def _sources(self, outage: Outage, outages: Outages, ledger: SourceLedger) -> tuple[str, ...]:
        known = self._carriers.get(outage.id)
        if known is None or known[0] != outage.entities:
            known = self._carriers[outage.id] = outage.entities, _carriers(outage, outages, ledger)
        return known[1]

    def of(self, sinks: Iterable[str]) -> dict[str, str]:
        """Alarms that follow from the link's while that is active: id -> id of the cause.

        `sinks`: parts that send over the link.
        """
        causes = dict.fromkeys((f"part/{name}" for name in sinks), LINK)
        causes |= dict.fromkeys((f"sink/{name.removeprefix('to-')}" for name in sinks), LINK)
        for identity, (_, sources) in self._carriers.items():
            if sources and all(s.startswith(OF_TOPICS) for s in sources):
                causes[identity] = LINK
        return causes


def _carriers(outage: Outage, outages: Outages, ledger: SourceLedger) -> tuple[str, ...]:
    """Sources that carried what is missing and fell silent with it; else all that carried it."""
    numbers: set[int] = set()
    for table, index in outages.members[outage.id].items():
        for signal in (*TABLES[table].gauges, *TABLES[table].counters):
            column = ledger.carriers_of(signal.key)
            if column is not None:
                numbers.update(np.unique(column[index]).tolist())
    accounts = [ledger.numbered(n) for n in sorted(numbers) if n >= 0]
    silent = [a for a in accounts if a.last_ns <= outage.since_ns + GRACE_S * NS]
    return tuple(sorted(a.name for a in silent or accounts))
