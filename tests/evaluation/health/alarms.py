"""True and false alarms: spells of alarm put together, and matched with the failures of their nodes.

An alarm begins when the twin would drain a node that is up. It lasts until the node fails, or until the twin
would not have drained it for 24 h. It came true if the node's own failure began within 7 days of the alarm's
beginning and before it had been over for 24 h; one whose time is not over yet is pending and counts neither
way; every other one is a false drain. What the twin says while a node is down, and in the hour after it came
back, is no alarm. Part of the shell; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.evaluation.health.course import DAY_S, HOUR_S, Course, Failed, Spell

OVER_S = DAY_S  # without the wish to drain, after which an alarm is over
WITHIN_S = 7 * DAY_S  # from the beginning of an alarm: a failure later is not its doing
SETTLE_S = (
    HOUR_S  # after a repair, until counters and verdicts are those of the mended node; source: estimate
)
TRUE, FALSE, PENDING = "true", "false", "pending"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm. `failure` is the one that it announced, where it came true."""

    node: int
    begin_s: float
    last_s: float
    reason: str
    outcome: str
    failure: Failed | None = None
    hit_by_others: bool = False  # the node went down meanwhile, by a cause in common with others

    @property
    def lead_s(self) -> float:
        """From the alarm to the failure; NaN where none followed."""
        return math.nan if self.failure is None else self.failure.begin_s - self.begin_s


def alarms_of(course: Course) -> list[Alarm]:
    """All alarms of a course by node and time, those of the training days too."""
    spells: dict[int, list[Spell]] = {}
    for spell in sorted(course.spells, key=lambda s: (s.node, s.begin_s)):
        spells.setdefault(spell.node, []).append(spell)
    failures: dict[int, list[Failed]] = {}
    for failed in sorted(course.failures, key=lambda f: (f.node, f.begin_s)):
        failures.setdefault(failed.node, []).append(failed)
    out: list[Alarm] = []
    for node, said in spells.items():
        for up in _up_times(failures.get(node, []), course.begin_s, course.end_s):
            out += _within(said, up, course.end_s)
    return out


@dataclass(frozen=True, slots=True)
class _Up:
    """A node serves from `begin_s` until it fails, or until the course ends."""

    begin_s: float
    end_s: float
    failure: Failed | None


def _up_times(failures: Sequence[Failed], begin_s: float, end_s: float) -> list[_Up]:
    out, at_s = [], begin_s
    for failed in failures:
        if failed.begin_s > at_s:
            out.append(_Up(at_s, min(failed.begin_s, end_s), failed if failed.begin_s <= end_s else None))
        at_s = max(at_s, failed.end_s + SETTLE_S)
    return [*out, _Up(at_s, end_s, None)] if at_s < end_s else out


def _within(said: Sequence[Spell], up: _Up, end_s: float) -> list[Alarm]:
    """The alarms of one time of service: spells cut to it, those near to each other put together."""
    joined: list[Spell] = []
    for spell in said:
        if spell.begin_s >= up.end_s or spell.last_s < up.begin_s:
            continue  # at or after the failure, or of an earlier service
        cut = Spell(spell.node, max(spell.begin_s, up.begin_s), min(spell.last_s, up.end_s), spell.reason)
        if joined and cut.begin_s - joined[-1].last_s <= OVER_S:
            before = joined.pop()
            cut = Spell(cut.node, before.begin_s, max(before.last_s, cut.last_s), before.reason)
        joined.append(cut)
    return [_judged(spell, up, end_s) for spell in joined]


def _judged(spell: Spell, up: _Up, end_s: float) -> Alarm:
    until_s = min(spell.begin_s + WITHIN_S, spell.last_s + OVER_S)
    failed = up.failure
    came = failed is not None and failed.begin_s <= until_s
    if failed is not None and came and failed.own:
        return Alarm(spell.node, spell.begin_s, spell.last_s, spell.reason, TRUE, failed)
    pending = failed is None and end_s < until_s
    outcome = PENDING if pending else FALSE
    return Alarm(spell.node, spell.begin_s, spell.last_s, spell.reason, outcome, None, came)
