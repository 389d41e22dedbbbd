"""Records: how events, proposals and commands read in the journal. May import contracts, events and jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec
import numpy as np

from twin import events as ev
from twin.contracts import CommandBatch, Proposal
from twin.events import CheckpointTold, FaultReported
from twin.frame import I32
from twin.jobs import Jobs
from twin.site import Site

MOST_FAULTS = 64  # of one tick that the journal tells one by one; the rest of a storm is counted by code
MOST_REFUSED = 16  # reports of one tick that are refused and told one by one, with the reason
MOST_TABLE = 20  # characters of a name that is to be a table's
MOST_NAMES = 64  # of a record
_ALIKE = attrgetter("table", "code", "count")


def same_proposals(a: list[Proposal], b: list[Proposal]) -> bool:
    """Whether a policy says again what is in force."""
    return len(a) == len(b) and all(
        x.control == y.control
        and x.reason == y.reason
        and np.array_equal(x.index, y.index)
        and np.array_equal(x.lo, y.lo)
        and np.array_equal(x.hi, y.hi)
        and np.array_equal(x.want, y.want, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def brief_event(event: ev.Event) -> dict[str, Any]:
    """An event for the journal; long content is named by its hash, the trace has it whole."""
    body = cast(dict[str, Any], msgspec.to_builtins(event))
    for name in ("spec", "params"):
        if name in body:
            body[name] = f"{len(body[name])} characters, in the trace"
    for name in ("names", "nodes", "values"):
        if len(body.get(name, ())) > 64:
            body[name] = [*body[name][:64], f"and {len(body[name]) - 64} more"]
    return body


def shown(site: Site, jobs: Jobs, table: str, index: I32) -> tuple[str, ...]:
    """Entities as people know them, MOST_NAMES at most: jobs by the name that their users gave them."""
    some = index[:MOST_NAMES].tolist()
    if table != "job":
        return tuple(site.name(table, i) for i in some)
    return tuple(jobs.shown(i) or site.name(table, i) for i in some)


def names_of(control: str, index: I32, site: Site, jobs: Jobs) -> dict[str, Any]:
    """What a record of this control says of whom it is about, beside slots that others will have later."""
    table = control.partition(".")[0]
    return {"names": list(shown(site, jobs, table, index))} if table == "job" and len(index) else {}


def command_record(kind: str, c: CommandBatch, site: Site, jobs: Jobs) -> dict[str, Any]:
    """A batch of commands or of advice for the journal; a renewal is one short line."""
    table = c.control.partition(".")[0]
    if c.renewal:
        return {
            "kind": "renewal",
            "control": c.control,
            "count": len(c.index),
            "expires_ns": c.expires_ns,
            "reason": c.reason,
        }
    body: dict[str, Any] = {
        "kind": kind,
        "control": c.control,
        "policy": c.policy,
        "from": shown(site, jobs, table, c.index[:1])[0],
        "to": shown(site, jobs, table, c.index[-1:])[0],
        "index": c.index,
        **names_of(c.control, c.index, site, jobs),
        "value": c.value,
        "reason": c.reason,
    }
    if kind == "command":
        body |= {
            "epoch": c.epoch,
            "first_command": int(c.command[0]),
            "expires_ns": c.expires_ns,
            "deadline_ns": c.deadline_ns,
        }
        if c.final:
            body["final"] = True
    return body


def proposals_record(
    policy: str, new: list[Proposal], old: list[Proposal], site: Site, jobs: Jobs
) -> dict[str, Any]:
    """How what a policy proposes changed: new or moved intervals by control and reason, and who is let go.

    A bound that is the same for all is one number; `want` is "hi" or "lo" where it equals that bound.
    """
    before, after = _by_reason(old), _by_reason(new)
    changes: list[dict[str, Any]] = []
    for key, p in after.items():
        was = before.get(key)
        moved = np.ones(len(p.index), np.bool_) if was is None else _moved(p, was)
        gone = np.zeros(0, np.int32) if was is None else np.setdiff1d(was.index, p.index)
        if moved.any() or len(gone):
            change = {"control": p.control, "reason": p.reason, "index": p.index[moved]}
            change |= _bounds(p.lo[moved], p.hi[moved], p.want[moved])
            change |= names_of(p.control, p.index[moved], site, jobs)
            changes.append(change | ({"gone": gone} if len(gone) else {}))
    for key, was in before.items():
        if key not in after and len(was.index):
            changes.append({"control": was.control, "reason": was.reason, "gone": was.index})
    return {"kind": "proposals", "policy": policy, "proposals": changes}


def _by_reason(proposals: list[Proposal]) -> dict[tuple[str, str, int], Proposal]:
    """Proposals by control, reason and how often that pair came before."""
    out: dict[tuple[str, str, int], Proposal] = {}
    for p in proposals:
        number = sum(1 for key in out if key[:2] == (p.control, p.reason))
        out[p.control, p.reason, number] = p
    return out


def _moved(p: Proposal, was: Proposal) -> np.ndarray:
    """Where a proposal is new or differs from what was said before [len(p.index)]."""
    if len(was.index) == 0:
        return np.ones(len(p.index), np.bool_)
    at = np.minimum(np.searchsorted(was.index, p.index), len(was.index) - 1)
    known = was.index[at] == p.index
    want, wanted = p.want, was.want[at]
    same = (
        (p.lo == was.lo[at]) & (p.hi == was.hi[at]) & ((want == wanted) | (np.isnan(want) & np.isnan(wanted)))
    )
    return cast(np.ndarray, ~(known & same))


def _bounds(lo: np.ndarray, hi: np.ndarray, want: np.ndarray) -> dict[str, Any]:
    def short(values: np.ndarray) -> Any:
        return float(values[0]) if len(values) and (values == values[0]).all() else values

    wish: Any = short(want)
    if np.array_equal(want, hi):
        wish = "hi"
    elif np.array_equal(want, lo):
        wish = "lo"
    return {"lo": short(lo), "hi": short(hi), "want": wish}


class FaultTally:
    """Faults of one tick for the journal: the first told one by one, those of a storm counted by code."""

    def __init__(self) -> None:
        self._told: list[dict[str, Any]] = []
        self._counted: dict[tuple[str, int], int] = {}

    def add(self, event: FaultReported) -> None:
        """One more."""
        self.add_all([event])

    def add_all(self, events: Sequence[FaultReported]) -> None:
        """Some more, in order."""
        place = MOST_FAULTS - len(self._told)
        self._told += [{"kind": "event", "event": brief_event(event)} for event in events[:place]]
        for (table, code, times), many in Counter(map(_ALIKE, events[place:])).items():
            key = table[:MOST_TABLE], code
            if key not in self._counted and len(self._counted) >= MOST_FAULTS:
                key = "other", 0
            self._counted[key] = self._counted.get(key, 0) + times * many

    def records(self) -> list[dict[str, Any]]:
        """Journal bodies, in order."""
        return self._told + [
            {"kind": "faults", "table": table, "code": code, "count": count}
            for (table, code), count in sorted(self._counted.items())
        ]


class ReportTally:
    """Reports of jobs in one tick for the journal: counted, as the trace has each; the first refused told."""

    def __init__(self) -> None:
        self._taken = Counter[str]()
        self._refused: list[dict[str, Any]] = []
        self._more = 0

    def add(self, event: CheckpointTold, refused: str | None) -> None:
        """One more, and why it was refused if it was."""
        if refused is None:
            self._taken[event.tier] += 1
        elif len(self._refused) < MOST_REFUSED:
            self._refused.append({"kind": "event", "event": brief_event(event), "refused": refused})
        else:
            self._more += 1

    def records(self) -> list[dict[str, Any]]:
        """Journal bodies: what was refused, then the counts."""
        out = self._refused + [
            {"kind": "reports", "tier": tier, "count": count} for tier, count in sorted(self._taken.items())
        ]
        if self._more:
            out.append({"kind": "reports", "refused": "as the ones before", "count": self._more})
        return out
