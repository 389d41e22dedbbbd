"""Time as the agent needs it: what the wall says, a count since boot that nobody can step, and the clock of
the daemon that leads.

Leases are counted on the second one, so that a stepped wall clock neither ends nor prolongs them. Imports
nothing of the agent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NS = 1_000_000_000
# The daemon's clock may run slow by so much of the time that passes, but no further between two messages:
# what comes later than that was on the way. source: it follows a clock that was set back by 5 %
SLOW_PU, MOST_SLOW_NS = 0.06, 10 * NS
# Messages that are issued nearer to each other do not show a backlog. source: estimate, a tick
LEAST_APART_NS = NS // 2
# Of a clock that is right, the quickest message of a daemon took no longer. source: estimate
NEAR_NS = 10 * NS


class Instant(NamedTuple):
    """One moment on both clocks: UTC nanoseconds, and nanoseconds since boot, sleep included."""

    wall_ns: int
    boot_ns: int


def current_instant() -> Instant:
    """This moment."""
    return Instant(time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def boot_id() -> str:
    """The name of this boot; counts since boot can be compared within one boot only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


class Deadline(NamedTuple):
    """End of a time span: counted since boot while this boot lasts, by the wall clock after a reboot."""

    boot_ns: int
    wall_ns: int
    span_ns: int

    @classmethod
    def after(cls, left_ns: int, span_ns: int, at: Instant) -> Deadline:
        """Return the deadline so long from now, at most its stated span."""
        left = min(left_ns, span_ns)
        return cls(at.boot_ns + left, at.wall_ns + left, span_ns)

    def over(self, at: Instant) -> bool:
        """Return True once the deadline has passed."""
        return at.boot_ns >= self.boot_ns

    def rebooted(self, at: Instant) -> Deadline:
        """The same in another boot: what the wall leaves of it, never more than its whole span."""
        left = max(0, min(self.wall_ns - at.wall_ns, self.span_ns))
        return Deadline(at.boot_ns + left, at.wall_ns + left, self.span_ns)


@dataclass(slots=True)
class SenderClock:
    """The clock of the daemon of one epoch, against the count since boot. `least_ns`: by how much the count
    was ahead of the instant of the message that came soonest. `received_ns`: when the last one came.

    `known` once a later message took as long as one before: those of a backlog, which come at once, do not.
    `since_ns` is the instant of the message that it must be compared with.
    """

    epoch: int = -1
    least_ns: int = 0
    received_ns: int = 0
    since_ns: int = 0
    known: bool = False

    def age_ns(self, epoch: int, issued_ns: int, at: Instant) -> int:
        """Return how long a message was on its way, and learn of it.

        That is by this node's clock or against the messages before, whichever is less: a node whose clock is
        wrong refuses the first messages of a daemon at most. Where by it the quickest message took at most
        `NEAR_NS`, that clock is right, and the greater counts: that message had a way too, and after a
        silence the daemon's clock may only seem slow. An instant in this node's future shows no delay.
        """
        ahead_ns, wall_ns = at.boot_ns - issued_ns, at.wall_ns - issued_ns
        ages, quickest_ns = [wall_ns] if wall_ns >= 0 else [], wall_ns
        if epoch == self.epoch:
            quickest_ns = self.least_ns + at.wall_ns - at.boot_ns
            least_ns = self.least_ns + min(round((at.boot_ns - self.received_ns) * SLOW_PU), MOST_SLOW_NS)
            apart_ns = issued_ns - self.since_ns
            if not self.known and least_ns - ahead_ns > apart_ns // 2 > 0:
                self.since_ns = issued_ns
            else:
                self.known |= apart_ns >= LEAST_APART_NS
            least_ns = min(least_ns, ahead_ns)
            if self.known:
                ages.append(ahead_ns - least_ns)
        else:
            self.epoch, self.since_ns, self.known, least_ns = epoch, issued_ns, False, ahead_ns
        self.least_ns, self.received_ns = least_ns, at.boot_ns
        return max(ages, default=0) if quickest_ns <= NEAR_NS else min(ages, default=0)
