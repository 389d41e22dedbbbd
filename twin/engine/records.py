"""Journal records of a tick: proposals, commands and events as the journal has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np

from twin.catalogue import I32
from twin.contracts import (
    AdviceRecord,
    Bound,
    CommandBatch,
    CommandRecord,
    EventRecord,
    FaultsRecord,
    JournalRecord,
    Proposal,
    ProposalChange,
    ProposalsRecord,
    RenewalRecord,
    ReportsRecord,
    brief_event,
)
from twin.site import Site
from twin.telemetry import CheckpointTold, FaultReported, JobSlots

MOST_FAULTS = 64  # of one tick that the journal lists one by one; the rest of a storm is counted by code
MOST_REFUSED = 16  # reports of one tick that are refused and listed one by one, with the reason
MOST_TABLE = 20  # characters of a name that is to be a table's
MOST_NAMES = 64  # of a record
_ALIKE = attrgetter("table", "code", "count")


def same_proposals(a: list[Proposal], b: list[Proposal]) -> bool:
    """Return True if the proposals of a policy equal those in force."""
    return len(a) == len(b) and all(
        x.control == y.control
        and x.reason == y.reason
        and np.array_equal(x.index, y.index)
        and np.array_equal(x.lo, y.lo)
        and np.array_equal(x.hi, y.hi)
        and np.array_equal(x.want, y.want, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def shown(site: Site, jobs: JobSlots, table: str, index: I32) -> tuple[str, ...]:
    """Return names of entities, at most MOST_NAMES; a job by the name that its user gave it."""
    some = index[:MOST_NAMES].tolist()
    if table != "job":
        return tuple(site.name(table, i) for i in some)
    return tuple(jobs.shown(i) or site.name(table, i) for i in some)


def job_names(control: str, index: I32, site: Site, jobs: JobSlots) -> tuple[str, ...]:
    """Return the names of a record's jobs, since slots are reused; () for controls of other tables."""
    return shown(site, jobs, "job", index) if control.startswith("job.") else ()


def command_record(c: CommandBatch, site: Site, jobs: JobSlots) -> CommandRecord | RenewalRecord:
    """A batch of commands for the journal; a renewal is one short line."""
    table = c.control.partition(".")[0]
    if c.renewal:
        return RenewalRecord(control=c.control, count=len(c.index), expires_ns=c.expires_ns, reason=c.reason)
    return CommandRecord(
        control=c.control,
        policy=c.policy,
        first_name=shown(site, jobs, table, c.index[:1])[0],
        last_name=shown(site, jobs, table, c.index[-1:])[0],
        index=c.index,
        names=job_names(c.control, c.index, site, jobs),
        value=c.value,
        reason=c.reason,
        epoch=c.epoch,
        first_command=int(c.command[0]),
        expires_ns=c.expires_ns,
        deadline_ns=c.deadline_ns,
        final=c.final,
    )


def advice_record(c: CommandBatch, site: Site, jobs: JobSlots) -> AdviceRecord:
    """A batch of advice for the journal."""
    table = c.control.partition(".")[0]
    return AdviceRecord(
        control=c.control,
        policy=c.policy,
        first_name=shown(site, jobs, table, c.index[:1])[0],
        last_name=shown(site, jobs, table, c.index[-1:])[0],
        index=c.index,
        names=job_names(c.control, c.index, site, jobs),
        value=c.value,
        reason=c.reason,
    )


def proposals_record(
    policy: str, new: list[Proposal], old: list[Proposal], site: Site, jobs: JobSlots
) -> ProposalsRecord:
    """Change of a policy's proposals: new or moved intervals, and the entities that are let go.

    A bound that is the same for all is one number; `want` is "hi" or "lo" where it equals that bound.
    """
    before, after = _by_reason(old), _by_reason(new)
    changes: list[ProposalChange] = []
    for key, p in after.items():
        was = before.get(key)
        moved = np.ones(len(p.index), np.bool_) if was is None else _moved(p, was)
        gone = np.zeros(0, np.int32) if was is None else _gone(was.index, p.index)
        if moved.any() or len(gone):
            at = p.index[moved]
            lo, hi, want = _bounds(p.lo[moved], p.hi[moved], p.want[moved])
            changes.append(
                ProposalChange(
                    control=p.control,
                    reason=p.reason,
                    index=at,
                    lo=lo,
                    hi=hi,
                    want=want,
                    names=job_names(p.control, at, site, jobs),
                    gone=gone if len(gone) else None,
                )
            )
    for key, was in before.items():
        if key not in after and len(was.index):
            changes.append(ProposalChange(control=was.control, reason=was.reason, gone=was.index))
    return ProposalsRecord(policy=policy, proposals=tuple(changes))


def _by_reason(proposals: list[Proposal]) -> dict[tuple[str, str, int], Proposal]:
    """Proposals by control, reason and how often that pair came before."""
    out: dict[tuple[str, str, int], Proposal] = {}
    for p in proposals:
        number = sum(1 for key in out if key[:2] == (p.control, p.reason))
        out[p.control, p.reason, number] = p
    return out


def _gone(before: I32, after: I32) -> I32:
    """The entities of `before` that are not in `after`; both ascend."""
    if not len(before) or not len(after):
        return before
    gone: I32 = before[_places(after, before) < 0]
    return gone


def _places(known: I32, asked: I32) -> I32:
    """Place of each of `asked` in `known`; -1: nowhere. Both ascend and are not empty."""
    place = np.full(max(int(known[-1]), int(asked[-1])) + 1, -1, np.int32)
    place[known] = np.arange(len(known), dtype=np.int32)
    out: I32 = place[asked]
    return out


def _moved(p: Proposal, was: Proposal) -> np.ndarray:
    """Mask of the intervals that are new or moved [len(p.index)]."""
    if len(was.index) == 0:
        return np.ones(len(p.index), np.bool_)
    if len(p.index) == 0:
        return np.zeros(0, np.bool_)
    at = _places(was.index, p.index)
    known = at >= 0
    want, wanted = p.want, was.want[at]
    same = (
        (p.lo == was.lo[at]) & (p.hi == was.hi[at]) & ((want == wanted) | (np.isnan(want) & np.isnan(wanted)))
    )
    return cast(np.ndarray, ~(known & same))


def _bounds(lo: np.ndarray, hi: np.ndarray, want: np.ndarray) -> tuple[Bound, Bound, Bound]:
    def short(values: np.ndarray) -> Bound:
        alike = len(values) and (values == values[0]).all()
        return Bound(float(values[0]) if alike else values)

    if np.array_equal(want, hi):
        return short(lo), short(hi), Bound("hi")
    if np.array_equal(want, lo):
        return short(lo), short(hi), Bound("lo")
    return short(lo), short(hi), short(want)


class FaultTally:
    """Faults of one tick for the journal: the first ones singly, the rest of a storm as counts by code."""

    def __init__(self) -> None:
        self._reported: list[JournalRecord] = []
        self._counted: dict[tuple[str, int], int] = {}

    def add(self, event: FaultReported) -> None:
        """Add one."""
        self.add_all([event])

    def add_all(self, events: Sequence[FaultReported]) -> None:
        """Add several, in order."""
        place = MOST_FAULTS - len(self._reported)
        self._reported += [EventRecord(event=brief_event(event)) for event in events[:place]]
        for (table, code, times), many in Counter(map(_ALIKE, events[place:])).items():
            key = table[:MOST_TABLE], code
            if key not in self._counted and len(self._counted) >= MOST_FAULTS:
                key = "other", 0
            self._counted[key] = self._counted.get(key, 0) + times * many

    def records(self) -> list[JournalRecord]:
        """Journal records, in order."""
        return self._reported + [
            FaultsRecord(table=table, code=code, count=count)
            for (table, code), count in sorted(self._counted.items())
        ]


class ReportTally:
    """Job reports of one tick for the journal: counts, since the trace has each, and the first refusals."""

    def __init__(self) -> None:
        self._taken = Counter[str]()
        self._refused: list[JournalRecord] = []
        self._more = 0

    def add(self, event: CheckpointTold, refused: str | None) -> None:
        """Add one, with the reason if it was refused."""
        if refused is None:
            self._taken[event.tier] += 1
        elif len(self._refused) < MOST_REFUSED:
            self._refused.append(EventRecord(event=brief_event(event), refused=refused))
        else:
            self._more += 1

    def records(self) -> list[JournalRecord]:
        """Return journal records: refusals first, then the counts."""
        out = self._refused + [
            ReportsRecord(tier=tier, count=count) for tier, count in sorted(self._taken.items())
        ]
        if self._more:
            out.append(ReportsRecord(refused="as the ones before", count=self._more))
        return out
