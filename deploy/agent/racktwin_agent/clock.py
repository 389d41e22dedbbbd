"""Time as the agent needs it: what the wall says, and a count since boot that nobody can step.

Leases are counted on the second one, so that a stepped wall clock neither ends nor prolongs them. Imports
nothing of the agent.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

NS = 1_000_000_000


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
    """When something ends: counted since boot while this boot lasts, by the wall after a reboot."""

    boot_ns: int
    wall_ns: int
    span_ns: int

    @classmethod
    def after(cls, expires_ns: int, span_ns: int, at: Instant) -> Deadline:
        """Return the deadline `expires_ns` of the sender's clock, at most its stated span from now."""
        left = min(expires_ns - at.wall_ns, span_ns)
        return cls(at.boot_ns + left, at.wall_ns + left, span_ns)

    def over(self, at: Instant) -> bool:
        """Return True once the deadline has passed."""
        return at.boot_ns >= self.boot_ns

    def rebooted(self, at: Instant) -> Deadline:
        """The same in another boot: what the wall leaves of it, never more than its whole span."""
        left = max(0, min(self.wall_ns - at.wall_ns, self.span_ns))
        return Deadline(at.boot_ns + left, at.wall_ns + left, self.span_ns)
