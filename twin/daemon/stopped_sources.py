"""Stopped sources: who carried readings that are missing and has said nothing since, in an operator's words.

The engine knows what is missing, the ledger of sources who carried it. A source that speaks on is not to
blame for what it no longer brings: that is the device behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from twin.catalogue import NS, utc
from twin.diagnosis import Outages, SilentCells, measured, place_of
from twin.sources import SourceAccount, SourceLedger
from twin.telemetry import State

GRACE_S = 10.0  # between the stamp of the last reading and its arrival
# Kinds of sources, as the ledger names them, with the words of operators and what to do
WORDS = {
    "agent": ("agent", "Look whether this node is up, then at racktwin-agent on it and at its network."),
    "bmc": ("BMC", "Look whether this BMC answers on the management network."),
    "bms": ("BMS gateway", "Look at this gateway and at its connection to the broker."),
    "scrape": ("exporter", "Look whether this exporter runs and whether its host answers."),
    "sparkplug": ("Sparkplug node", "Look at this node and at its connection to the broker."),
    "topic": ("topic", "Look at the program that publishes there and at its connection to the broker."),
}


@dataclass(frozen=True, slots=True)
class StoppedSource:
    """A source that carried what is missing: its last reading, and the age at which that was missed.

    `signals` counts what is missing of it.
    """

    account: SourceAccount
    last_ns: int
    wait_ns: int
    signals: int

    @property
    def label(self) -> str:
        """Name of the source for operators: `exporter http://n3:9400/metrics`."""
        return label_of(self.account.name)


def label_of(source: str) -> str:
    """The name of a source in the ledger as operators call it."""
    kind, _, name = source.partition(" ")
    return f"{WORDS[kind][0]} {name}" if kind in WORDS else source


def action_of(sources: Iterable[str]) -> str:
    """The first thing to do when these sources stop; "" for unusual kinds."""
    kinds = dict.fromkeys(source.partition(" ")[0] for source in sources)
    return " ".join(WORDS[kind][1] for kind in kinds if kind in WORDS)


def title_of(source: str, since_ns: int, signals: int, place: str) -> str:
    """`No data from exporter http://n3:9400 since 21:36:12: 44 signals of node lab/h/r1/node0`"""
    count = f"{signals} signals" if signals != 1 else "1 signal"
    return f"No data from {source} since {utc(since_ns, '%H:%M:%S')}: {count} of {place}"


def part_title(sources: Collection[str], label: str, ledger: SourceLedger, outages: Outages) -> str:
    """The title of the alarm of a part that is down: what it brought of these sources, if anything."""
    members, count = ledger.carried_by(sources)
    since_ns = max((ledger.account(name).last_ns for name in sources), default=0)
    return (
        title_of(label, since_ns, count, place_of(outages, members)) if count else f"No answer from {label}"
    )


def stopped_sources(state: State, ledger: SourceLedger, cells: SilentCells) -> tuple[StoppedSource, ...]:
    """The sources of silent readings that stopped with them, by name."""
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
