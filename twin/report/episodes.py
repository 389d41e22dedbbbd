"""Episodes: commands and advice by policy and reason, and findings from raised to cleared.

An episode is one line of a table however often it repeats. Their number is bounded, and those beyond it are
counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from twin.contracts import (
    ClearedRecord,
    CommandBatch,
    DeferredRecord,
    FailedRecord,
    FindingRecord,
    JournalRecord,
    LapsedRecord,
    NarrowedRecord,
)
from twin.engine import shown
from twin.report.event_texts import SHOWN_NAMES
from twin.site import Site
from twin.telemetry import JobSlots

MAX_EPISODES = 300
# Journal records that say something went otherwise than a policy wanted.
OUTCOMES = {
    "deferred": "held back, to limit how many devices change at once",
    "failed": "sent repeatedly, never answered",
    "lapsed": "lease ran out, the device fell back",
    "narrowed": "overridden by a stronger policy or the allowed range",
}


@dataclass(slots=True)
class Action:
    """One proposal of a policy with one reason."""

    kind: str  # command or advice
    policy: str
    control: str
    reason: str
    first_ns: int
    last_ns: int
    names: tuple[str, ...]
    batches: int = 0
    entities: int = 0  # the most in one batch
    low: float = float("inf")
    high: float = float("-inf")

    def take(self, batch: CommandBatch) -> None:
        """Count another batch of the same."""
        self.batches += 1
        self.last_ns = batch.issued_ns
        self.entities = max(self.entities, len(batch.index))
        known = batch.value[np.isfinite(batch.value)]
        if len(known):
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))


@dataclass(slots=True)
class Condition:
    """One finding over the run; `cleared_ns` is None while it lasts."""

    identity: str
    severity: str
    title: str
    entities: tuple[str, ...]
    evidence: tuple[str, ...]
    action: str
    first_ns: int
    raised_ns: int
    cleared_ns: int | None = None
    times: int = 1
    lasted_ns: int = 0


@dataclass(slots=True)
class Episodes:
    """Actions, conditions and outcomes of a run."""

    actions: dict[tuple[str, str, str, str], Action] = field(default_factory=dict)
    conditions: dict[str, Condition] = field(default_factory=dict)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, control)
    batches: Counter[str] = field(default_factory=Counter)  # command, advice
    dropped: Counter[str] = field(default_factory=Counter)  # what did not fit

    def act(self, kind: str, batches: tuple[CommandBatch, ...], site: Site, jobs: JobSlots) -> int:
        """Take in the commands or the advice of a tick; returns how many entities they concern."""
        concerned = 0
        for batch in batches:
            if batch.renewal:
                continue  # the same wish, kept alive
            concerned += len(batch.index)
            self.batches[kind] += 1
            key = (kind, batch.policy, batch.control, batch.reason)
            found = self.actions.get(key)
            if found is None and len(self.actions) >= MAX_EPISODES:
                key = (kind, batch.policy, batch.control, "")
                found = self.actions.get(key)
                if found is None and len(self.actions) >= 2 * MAX_EPISODES:
                    self.dropped[kind] += 1
                    continue
            if found is None:
                table = batch.control.partition(".")[0]
                names = shown(site, jobs, table, batch.index[:SHOWN_NAMES])
                found = Action(*key, batch.issued_ns, batch.issued_ns, names)
                self.actions[key] = found
            found.take(batch)
        return concerned

    def record(self, record: JournalRecord, now_ns: int) -> None:
        """Take in one journal record: findings raised and cleared, outcomes."""
        match record:
            case FindingRecord():
                self._raise(record, now_ns)
            case ClearedRecord():
                found = self.conditions.get(record.id)
                if found is not None and found.cleared_ns is None:
                    found.cleared_ns = now_ns
                    found.lasted_ns += now_ns - found.raised_ns
            case DeferredRecord() | NarrowedRecord():
                self.outcomes[record.kind, record.control] += record.count
            case FailedRecord() | LapsedRecord():
                self.outcomes[record.kind, record.control] += len(record.index)

    def _raise(self, record: FindingRecord, now_ns: int) -> None:
        found = self.conditions.get(record.id)
        if found is not None:
            found.times += 1
            found.raised_ns, found.cleared_ns = now_ns, None
        elif len(self.conditions) < MAX_EPISODES:
            self.conditions[record.id] = Condition(
                record.id,
                record.severity,
                record.title,
                record.entities,
                record.evidence,
                record.action,
                now_ns,
                now_ns,
            )
        else:
            self.dropped["finding"] += 1
