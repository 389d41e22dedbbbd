"""Causes of alarms: a graph from sources (broker, gateway, agent, exporter, BMC) over devices to signals.

The engine finds outages and silent devices from timestamps alone, so that a replay finds the same ones. The
ledger of sources knows the source of each reading. A silence alarm names the source that stopped. If the
source still sends other readings, the alarm names the device behind it. A silence alarm follows from the
alarm of the connector of its source while that connector is down, else from the oldest alarm of the same
source. An alarm about equipment that needs a failed link follows from the alarm of that link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from twin.catalogue import NS, utc
from twin.contracts import ExplanationRefused, Finding, entities_within
from twin.diagnosis import OF_SILENCE, Outages, SilentCells, measured, place_of, silent_cells
from twin.engine import Engine
from twin.sources import SourceAccount, SourceLedger
from twin.telemetry import State

LINK = "mqtt"  # the part that receives all topics
NODE_DOWN, POWER = "fault/node_down/", "node.power_state"
PREFIXES = ("silence/", *(f"fault/{kind}/" for kind in OF_SILENCE))
NAMED = 2  # sources in a title
SHOWN = 6
OF_THE_BROKER = "The broker answers: check the network between it and its publishers, and its log."
ENDS_S = 30.0  # within which an alarm of silence ends once its data are back
GRACE_S = 10.0  # between the stamp of the last reading and its arrival
# Advice by the first word of a source's name in the ledger
FIRST_LOOK = {
    "agent": "Check that this node is up, then racktwin-agent on it and its network.",
    "BMC": "Check that this BMC answers on the management network.",
    "BMS": "Check this gateway and its connection to the broker.",
    "exporter": "Check that this exporter runs and that its host answers.",
    "Sparkplug": "Check this node and its connection to the broker.",
    "topic": "Check the program that publishes there and its connection to the broker.",
}


@dataclass(frozen=True, slots=True)
class StoppedSource:
    """A stopped source of missing readings: its last reading, and the age at which it counts as late.

    `signals` counts what is missing of it.
    """

    account: SourceAccount
    last_ns: int
    wait_ns: int
    signals: int


@dataclass(frozen=True, slots=True)
class SilentAlarm:
    """A silence alarm as found by the engine, its stopped sources, and its displayed form."""

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
        self._off: dict[str, tuple[Finding, Finding]] = {}  # alarm of nodes that are off: as found, as shown

    def named(self, findings: Iterable[Finding], engine: Engine, ledger: SourceLedger) -> list[Finding]:
        """The findings, with those of silence named by the sources that stopped, and those of nodes that are
        off by the policy that switched them off.
        """
        out, known = [], self._silent
        for finding in findings:
            if finding.id.startswith(PREFIXES):
                silent = known[finding.id] = _named(finding, engine, ledger, known.get(finding.id))
                finding = silent.shown
            elif finding.id.startswith(NODE_DOWN):
                shown = _switched_off(finding, engine)
                before = self._off.get(finding.id)
                if before is None or before[0] is not finding or before[1] != shown:
                    self._off[finding.id] = finding, shown
                finding = self._off[finding.id][1]
            out.append(finding)
        present = {f.id for f in out}
        self._off = {identity: pair for identity, pair in self._off.items() if identity in present}
        self._silent = {identity: silent for identity, silent in known.items() if identity in present}
        return out

    def down(self, waiting: Collection[str]) -> set[str]:
        """Return the failed parts whose readings are silent."""
        self._by_part = {k: part for k, part in self._by_part.items() if k in self._silent}
        for identity, silent in self._silent.items():
            parts = {self._part(name) for name in silent.names}
            if len(parts) == 1 and (part := parts.pop()) in waiting:
                self._by_part[identity] = part
        return set(self._by_part.values()) & set(waiting)

    def _part(self, source: str) -> str:
        """Return the part that reads a source: the link for every publisher."""
        return self.part_of.get(source, LINK)

    def part_down(
        self, part: str, broker: str, ledger: SourceLedger, outages: Outages
    ) -> tuple[str, str] | None:
        """Return (title, action) of the alarm of a part that is down, with what its other end brought;
        None if that has no name. `broker`: that of the link.
        """
        if part == LINK:
            sources, label = ledger.publishers(), broker
            action = "Check that the broker runs and that its host answers."
        else:
            sources = [source for source, of in self.part_of.items() if of == part]
            if len(sources) != 1:
                return None
            label, action = sources[0], _action(sources)
        members, count = ledger.carried_by(sources)
        if not count:
            return f"No answer from {label}", action
        since_ns = max(ledger.account(name).last_ns for name in sources)
        return _title(label, since_ns, count, place_of(outages, members)), action

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


def _switched_off(finding: Finding, engine: Engine) -> Finding:
    """The finding with the action that is left where a policy holds some of its nodes switched off."""
    view, nodes = engine.view(), np.zeros(0, np.int32)
    for name in finding.entities[:SHOWN]:
        with contextlib.suppress(ExplanationRefused):
            nodes = np.union1d(nodes, entities_within(view, name)[2].get("node", nodes[:0]))
    lease = engine.arbiter.leases[POWER]
    off = nodes[lease.running()[nodes] & (lease.value[nodes] > 0)]
    if not len(off):
        return finding
    owner = int(lease.owner[off[0]])
    policy = engine.policies[owner].name if 0 <= owner < len(engine.policies) else "an earlier run"
    it = "it" if len(off) == 1 else "them"
    start = f"start {it} only once the cause of that is over."
    if len(off) == len(nodes):
        return replace(finding, action=f"{policy} switched {it} off: {start}")
    some = engine.site.name("node", int(off[0])) if len(off) == 1 else f"{len(off)} nodes of these"
    return replace(finding, action=f"{policy} switched off {some}: {start} For the rest: {finding.action}")


def _named(finding: Finding, engine: Engine, ledger: SourceLedger, before: SilentAlarm | None) -> SilentAlarm:
    if before is not None and before.found is finding:
        return before
    cells = silent_cells(finding.id, engine.diagnosis)
    if before is not None and before.found.count == finding.count:
        sources = before.sources  # as they were when they stopped: they may have begun to speak again
    else:
        sources = _stopped(engine.state, ledger, cells)
    shown = finding
    if 0 < len(sources) <= NAMED and cells.members:
        title = _title(
            " and ".join(s.account.name for s in sources),
            cells.since_ns or max(s.last_ns for s in sources),
            cells.count or sum(s.signals for s in sources),
            cells.place,
        )
        action = _action(s.account.name for s in sources) or finding.action
        # A device whose source stopped is not known to have failed
        shown = replace(finding, title=title, action=action, severity="warning")
    elif sources and {s.account.name for s in sources} >= set(ledger.publishers()):
        label = f"all {len(sources)} publishers on the broker"
        title = _title(label, cells.since_ns, cells.count, cells.place)
        shown = replace(finding, title=title, action=OF_THE_BROKER)
    elif sources:
        more = f" and {len(sources) - SHOWN} more" if len(sources) > SHOWN else ""
        carried = f"carried by {', '.join(s.account.name for s in sources[:SHOWN])}{more}"
        shown = replace(finding, evidence=(finding.evidence[0], carried, *finding.evidence[1:]))
    return SilentAlarm(finding, sources, shown)


def _action(sources: Iterable[str]) -> str:
    """The first thing to do when these sources stop; "" for unusual kinds."""
    kinds = dict.fromkeys(source.partition(" ")[0] for source in sources)
    return " ".join(FIRST_LOOK[kind] for kind in kinds if kind in FIRST_LOOK)


def _title(source: str, since_ns: int, signals: int, place: str) -> str:
    """`No data from exporter http://n3:9400 since 21:36:12 UTC: 44 signals of node lab/h/r1/node0`"""
    count = f"{signals} signals" if signals != 1 else "1 signal"
    return f"No data from {source} since {utc(since_ns, '%H:%M:%S')} UTC: {count} of {place}"


def _stopped(state: State, ledger: SourceLedger, cells: SilentCells) -> tuple[StoppedSource, ...]:
    """Return the stopped sources of silent readings, by name."""
    found: dict[int, tuple[int, int, int]] = {}  # number -> last reading, age at which it was missed, count
    for table, index in cells.members.items():
        column = state.tables[table]
        for signal in measured(column):
            carriers = ledger.carriers_of(signal.key)
            if carriers is None or (cells.signals and signal.name not in cells.signals):
                continue
            silent = index[column.silent(signal, state.now_ns)[index]]
            number, last_ns = carriers[silent], column.last_good_ns(signal, silent)
            wait_ns = column.limits(signal.row).silent_ns[silent]
            for n in np.unique(number[number >= 0]).tolist():
                mine, (last, wait, count) = number == n, found.get(n, (0, 0, 0))
                found[n] = (
                    max(last, int(last_ns[mine].max())),
                    max(wait, int(wait_ns[mine].max())),
                    count + int(np.count_nonzero(mine)),
                )
    newest_ns = max((last for last, _, _ in found.values()), default=0)
    stopped = [
        StoppedSource(account, last, wait, count)
        for n, (last, wait, count) in found.items()
        if (account := ledger.numbered(n)).last_ns <= last + GRACE_S * NS and last + wait >= newest_ns
    ]
    return tuple(sorted(stopped, key=lambda s: s.account.name))
