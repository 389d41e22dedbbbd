"""Clock of one source, judged by the stamps of its readings: a step back is found and corrected.

Stamps that suddenly go back while messages come as before are those of a clock that was set back: a slow path
delivers late, but in order. A source that was late from the beginning is left as it is, since nothing tells
its clock from a slow path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from twin.catalogue import NS
from twin.contracts import Item
from twin.telemetry import Block, Reading

STEP_NS = 120 * NS  # less may be messages of two intervals in turns; source: estimate
ALIKE_NS = 15 * NS  # delays of two messages by one clock; publishers gather for ten seconds
APART_NS = NS // 2  # messages that are nearer come of one flush


class SourceClock:
    """`back_ns`: by how much the clock was set back; 0 where it goes right."""

    __slots__ = ("_arrival_ns", "_delay_ns", "_newest_ns", "back_ns")

    def __init__(self) -> None:
        self.back_ns = 0
        self._newest_ns = 0  # newest stamp before a step
        self._delay_ns = self._arrival_ns = 0  # of the first message after one; 0: there was none

    def corrected(self, items: Sequence[Item], now_ns: int) -> Sequence[Item]:
        """The items of a message, with the stamps that a clock without its step would have given."""
        last = items[-1] if items else None
        if not isinstance(last, Reading | Block):
            return items
        self._judge(last.t_ns, now_ns)
        if not self.back_ns:
            return items
        return [self._moved(item, now_ns) for item in items]

    def _judge(self, stamp_ns: int, now_ns: int) -> None:
        delay_ns = now_ns - stamp_ns
        if delay_ns < STEP_NS:
            self.back_ns = self._delay_ns = 0
            self._newest_ns = max(self._newest_ns, min(stamp_ns, now_ns))
        elif self._newest_ns - stamp_ns < STEP_NS:
            self._delay_ns = 0  # late, but in order
        elif not self._delay_ns:
            self._delay_ns, self._arrival_ns = delay_ns, now_ns
        elif abs(delay_ns - self._delay_ns) > ALIKE_NS:
            self.back_ns, self._delay_ns, self._arrival_ns = 0, delay_ns, now_ns
        elif now_ns - self._arrival_ns >= APART_NS:
            self.back_ns = self.back_ns or min(delay_ns, self._delay_ns)

    def _moved(self, item: Item, now_ns: int) -> Item:
        if isinstance(item, Reading):
            return item._replace(t_ns=min(item.t_ns + self.back_ns, now_ns))
        if isinstance(item, Block):
            return dataclasses.replace(item, t_ns=min(item.t_ns + self.back_ns, now_ns))
        return item
