"""Clock of one source, judged by the stamps of its readings: a step back is found and corrected.

The delay of a message is its arrival less its stamp. From one message of a signal to the next it grows by no
more than the time that passed, on a slow path and from a backlog too, which deliver late but in order. Where
it grows by more, a clock stepped: that of the source back, or ours ahead. A source that was late from the
beginning is left as it is, since nothing tells its clock from a slow path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from twin.catalogue import NS
from twin.contracts import Item
from twin.telemetry import Block, Reading

GROWTH_NS = NS  # of a delay beyond the time that passed: stamps in whole seconds, jitter; source: estimate
NEAR_NS = 2 * NS  # a stamp that is nearer to its arrival needs no correction
# By so much, and half the time between them, the delays of two messages after a step may differ: those of
# stamps that stand differ by all of it, those of a backlog by more
ALIKE_NS, MOST_ALIKE_NS = NS // 5, 15 * NS
APART_NS = NS // 2  # messages that are nearer come of one flush
MAX_SIGNALS = 1000  # of a source, of which the delay is remembered


class SourceClock:
    """`back_ns`: by how much the clock is behind since its step; 0 where it goes right. `stepped_ns`: the
    arrival at which a step was found last.
    """

    __slots__ = ("_delays", "_step", "back_ns", "stepped_ns")

    def __init__(self) -> None:
        self.back_ns = self.stepped_ns = 0
        # Of each signal: (delay, time passed) of its last message in order
        self._delays: dict[tuple[Any, ...], tuple[int, int]] = {}
        # (growth of the delay, time passed) of the first message after what may be a step
        self._step: tuple[int, int] | None = None

    def corrected(self, items: Sequence[Item], now_ns: int, passed_ns: int | None = None) -> Sequence[Item]:
        """The items of a message, with the stamps that a clock without its step would have given.

        `passed_ns`: time by a clock that never steps; None: by `now_ns`.
        """
        last = items[-1] if items else None
        if not isinstance(last, Reading | Block):
            return items
        self._judge(last, now_ns, now_ns if passed_ns is None else passed_ns)
        return [moved(item, self.back_ns, now_ns) for item in items] if self.back_ns else items

    def _judge(self, item: Reading | Block, now_ns: int, passed_ns: int) -> None:
        raw_ns = now_ns - item.t_ns
        if raw_ns < self.back_ns // 2:
            self.back_ns = 0  # it was put right
        delay_ns = raw_ns - self.back_ns
        key = item[:3] if isinstance(item, Reading) else (item.table, item.start, item.signals, item.counters)
        before = self._delays.get(key)
        if before is not None and raw_ns > NEAR_NS:
            growth_ns = delay_ns - before[0]
            if growth_ns > passed_ns - before[1] + GROWTH_NS:
                if not self._confirms(growth_ns, passed_ns):
                    return
                self.back_ns, self.stepped_ns = self.back_ns + growth_ns, now_ns
                delay_ns -= growth_ns
        self._step = None
        if before is not None or len(self._delays) < MAX_SIGNALS:
            self._delays[key] = max(delay_ns, 0), passed_ns

    def _confirms(self, growth_ns: int, passed_ns: int) -> bool:
        """Return True for the second message in a row that is as late as the one before."""
        first, self._step = self._step, (growth_ns, passed_ns)
        if first is None:
            return False
        apart_ns = passed_ns - first[1]
        if abs(growth_ns - first[0]) > min(apart_ns // 2 + ALIKE_NS, MOST_ALIKE_NS):
            return False
        self._step = first
        return apart_ns >= APART_NS


def moved(item: Item, by_ns: int, now_ns: int) -> Item:
    """A reading or block with a later stamp, at most now; any other item as it is."""
    if isinstance(item, Reading):
        return item._replace(t_ns=min(item.t_ns + by_ns, now_ns))
    if isinstance(item, Block):
        return dataclasses.replace(item, t_ns=min(item.t_ns + by_ns, now_ns))
    return item
