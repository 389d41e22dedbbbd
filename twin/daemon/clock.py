"""Clock: nominal instants of ticks, which never go back, never drift, and skip missed ticks.

Ticks lie on a grid of UTC that is followed by the monotonic clock. A wall clock that steps ahead (or a host
that slept) skips ticks and reports it; one that steps back is followed slowly, since time must advance. Only
the clock reads the time of day for the ticks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from twin.catalogue import NS
from twin.run import URGENT_GAP_NS

SLEW_PU = 0.05  # of a tick: how fast a wall clock that stepped back is followed
STEP_TOLERANCE_NS = NS // 4  # less is noise of the two clocks


@dataclass(frozen=True, slots=True)
class Tick:
    """A frame that is due: its nominal instant, the time since the one before, and what was missed."""

    now_ns: int
    dt_s: float
    urgent: bool
    skipped: int
    why: str
    late_s: float


class Clock:
    """Hands out ticks `step_s` apart. `last_ns` is the nominal instant of the last one, of an earlier run."""

    def __init__(
        self,
        step_s: float,
        last_ns: int = 0,
        wall_ns: Callable[[], int] = time.time_ns,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.step_ns = round(step_s * NS)
        self._wall, self._mono = wall_ns, mono_ns
        self.last_ns = last_ns  # of the last cut, regular or urgent
        wall = max(self._wall(), last_ns)
        # `_grid_ns` is the next regular instant, due when the monotonic clock shows `_due_mono`.
        self._grid_ns = (wall // self.step_ns + 1) * self.step_ns
        self._due_mono = self._mono() + (self._grid_ns - wall)
        if last_ns == 0:
            self.last_ns = self._grid_ns - self.step_ns
        self.ahead_ns = max(0, last_ns - self._wall())  # of the wall clock; 0 if it is followed

    def now_ns(self) -> int:
        """Return the present instant on the tick grid, never before the last tick."""
        return max(self.last_ns, self._grid_ns - (self._due_mono - self._mono()))

    def wait_s(self) -> float:
        """Seconds until the next regular tick is due."""
        return max(0, self._due_mono - self._mono()) / NS

    def wait_urgent_s(self) -> float:
        """Seconds until an urgent tick may be cut."""
        return max(0, self.last_ns + URGENT_GAP_NS - self.now_ns()) / NS

    def urgent(self) -> Tick | None:
        """Return an urgent tick now; None if the regular tick is as near."""
        now = self.now_ns()
        if now - self.last_ns < URGENT_GAP_NS or self._grid_ns - now < URGENT_GAP_NS // 4:
            return None
        tick = Tick(now, (now - self.last_ns) / NS, True, 0, "", 0.0)
        self.last_ns = now
        return tick

    def regular(self) -> Tick:
        """The tick that is due. Those that were missed are skipped, and counted in it."""
        mono, wall = self._mono(), self._wall()
        late = max(0, mono - self._due_mono)
        missed = late // self.step_ns
        at_ns = self._grid_ns + missed * self.step_ns
        due = self._due_mono + missed * self.step_ns
        why = "overload" if missed else ""
        # Offset of the wall clock at the instant at which this tick was due.
        off = wall - (mono - due) - at_ns
        if off >= self.step_ns:
            jump = off // self.step_ns
            at_ns += jump * self.step_ns
            missed += jump
            why = "the clock went ahead, or the host slept"
            off -= jump * self.step_ns
        elif off > STEP_TOLERANCE_NS:  # less than a tick ahead: leases are counted by the wall clock
            at_ns, off = at_ns + off, 0
        at_ns, due, pace = self._follow(at_ns, due, off)
        self.ahead_ns = max(0, -off) if -off > STEP_TOLERANCE_NS else 0
        dt_s = (at_ns - self.last_ns) / NS
        self.last_ns = at_ns
        self._grid_ns, self._due_mono = at_ns + pace, due + self.step_ns
        return Tick(at_ns, dt_s, False, int(missed), why, late / NS)

    def _follow(self, at_ns: int, due: int, off: int) -> tuple[int, int, int]:
        """(instant, when it was due, nominal length of the next step), nearer to the wall clock."""
        if off < -STEP_TOLERANCE_NS:
            return at_ns, due, self.step_ns - min(-off, round(self.step_ns * SLEW_PU))
        # Small deviations go into the waiting time, so that nominal instants stay on their grid.
        small = max(-self.step_ns // 100, min(self.step_ns // 100, off))
        return at_ns, due - small, self.step_ns
