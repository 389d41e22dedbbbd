"""Clock of one source, judged by the stamps of its readings: an offset is learned and corrected.

The delay of a message is its arrival less its stamp. From one message of a signal to the next it grows by no
more than the time that passed, on a slow path and from a backlog too, which deliver late but in order. Where
it grows by more, a clock stepped: that of the source back, or ours ahead. A delay of a minute that does not
change is a clock that is behind; one that changes slowly is a clock that runs slow; a stamp that stays while
the values under it change is a clock that stands. A clock that is ahead needs no correction here: the Inbox
takes its readings as of their arrival.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from twin.catalogue import NS, find_signal
from twin.contracts import Item
from twin.telemetry import Block, FaultReported, JobStarted, Reading

GROWTH_NS = NS  # of a delay beyond the time that passed: stamps in whole seconds, jitter; source: estimate
NEAR_NS = 2 * NS  # a stamp that is nearer to its arrival needs no correction
# By so much, and half the time between them, the delays of two messages after a step may differ: those of
# stamps that stand differ by all of it, those of a backlog by more
ALIKE_NS, MOST_ALIKE_NS = NS // 5, 15 * NS
APART_NS = NS // 2  # messages that are nearer come of one flush
MAX_SIGNALS = 1000  # of a source, of which the delay is remembered
# A longer delay is watched, since publishers gather for ten seconds and more. That of a source which was
# never in time is corrected; else from LATE_NS and two periods on, as `cadence` learns what is less
WATCH_NS, LATE_NS, LEAST_PERIODS = 15 * NS, 50 * NS, 2
# A delay must stay so long: of a source that was never in time, and of one that was. A queue shrinks or
# grows meanwhile. source: estimate
FIRST_NS, STEADY_NS = 20 * NS, 600 * NS
# Of the time that passes, by which the delay of a clock changes at most; a backlog that drains no faster is
# not distinguished from a clock. source: clocks are slewed by up to 8.3 % (chrony, maxslewrate)
CLOCK_PU = 0.1
JITTER_NS = 3 * NS // 4  # of a delay to either side, stamps being in whole seconds
# A stamp stays so long, and so many values come with it, before its clock stands. source: estimate
STANDS_NS, LEAST_CHANGES = 10 * NS, 3
MAX_HELD = 20_000  # signals of a source whose readings wait for the verdict on its clock
MOST_HELD_NS = 600 * NS
Mistake = Literal["", "stepped", "behind", "stands"]
Key = tuple[Any, ...]


@dataclass(slots=True)
class Slopes:
    """The slopes of all lines from one delay on that pass by the later ones, as shares of the time."""

    low_pu: float = -np.inf
    high_pu: float = np.inf

    def narrow(self, grown_ns: int, span_ns: int, off_ns: int) -> None:
        """Take in a delay that has grown by so much in this time, give or take `off_ns`."""
        self.low_pu = max(self.low_pu, (grown_ns - off_ns) / span_ns)
        self.high_pu = min(self.high_pu, (grown_ns + off_ns) / span_ns)

    def are_none(self) -> bool:
        """Return True if the delays lie on no line."""
        return self.low_pu > self.high_pu

    def are_of_a_clock(self) -> bool:
        """Return True if all of them are those of a clock."""
        return -CLOCK_PU <= self.low_pu <= self.high_pu <= CLOCK_PU


@dataclass(slots=True)
class LateSignal:
    """The delays of one signal that is late since `since_ns`. `near`: the lines by which all are steady;
    `wide`: those for a source that gathers.
    """

    key: Key
    since_ns: int
    first_ns: int
    last_ns: int  # time passed at the last message
    delay_ns: int
    near: Slopes = field(default_factory=Slopes)
    wide: Slopes = field(default_factory=Slopes)

    def goes_on(self, delay_ns: int, passed_ns: int) -> bool:
        """Take in one more message; False if the delays no longer lie on a line."""
        apart_ns, span_ns = passed_ns - self.last_ns, max(passed_ns - self.since_ns, 1)
        grown_ns = delay_ns - self.first_ns
        self.near.narrow(grown_ns, span_ns, 2 * JITTER_NS)
        self.wide.narrow(grown_ns, span_ns, 2 * min(apart_ns // 2 + JITTER_NS, MOST_ALIKE_NS))
        self.last_ns, self.delay_ns = passed_ns, delay_ns
        return not self.wide.are_none()

    def is_of_a_clock(self, passed_ns: int, least_ns: int) -> bool:
        """Return True once its pace is known, after so long at least."""
        is_clock = self.near.are_of_a_clock() or self.wide.are_of_a_clock()
        return is_clock and passed_ns - self.since_ns >= least_ns


@dataclass(slots=True)
class StandingStamp:
    """A stamp that one signal bears again and again, since `since_ns`; `changes` of its values under it."""

    key: Key
    item: Reading | Block
    since_ns: int
    received_ns: int
    changes: int = 0

    def goes_on(self, item: Reading | Block, passed_ns: int) -> bool:
        """Take in one more message of the signal; False if its stamp is another one."""
        if item.t_ns != self.item.t_ns:
            return False
        self.changes += _differs(item, self.item)
        self.item, self.received_ns = item, passed_ns
        return True


class SourceClock:
    """`back_ns`: by how much the clock is behind; 0 where it goes right. `found_ns`: the arrival at which
    this was found last, and `mistake`: in which way.
    """

    __slots__ = ("_delays", "_drains", "_first", "_held", "_held_ns", "_late", "_newest_ns", "_standing",
                 "_step", "_was_in_time", "back_ns", "found_ns", "mistake")  # fmt: skip

    def __init__(self) -> None:
        self.back_ns = self.found_ns = 0
        self.mistake: Mistake = ""
        # Of each signal: (delay, time passed) of its last message in order
        self._delays: dict[Key, tuple[int, int]] = {}
        # (growth of the delay, time passed) of the first message after what may be a step
        self._step: tuple[int, int] | None = None
        self._late: LateSignal | None = None
        self._standing: StandingStamp | None = None
        self._newest_ns = 0  # stamp
        self._was_in_time = False
        self._drains = False  # it was late from its first message on, by a backlog
        self._first: tuple[Key, int, int] | None = None  # signal, its first delay, time passed
        self._held: dict[Key, Item] = {}
        self._held_ns = 0  # time passed when the first was held

    @property
    def is_held(self) -> bool:
        """Return True while readings wait until it is clear whether the clock or the way is late."""
        return bool(self._held)

    def resume(self, back_ns: int) -> None:
        """Go on with what an earlier run learned."""
        self.back_ns, self._was_in_time = back_ns, back_ns > 0
        self.mistake = "behind" if back_ns else ""

    def corrected(self, items: Sequence[Item], now_ns: int, passed_ns: int | None = None) -> Sequence[Item]:
        """The items of a message, with the stamps that a clock without its offset would have given.

        Those of a source that was late from its first message on are held until it is clear why, and come
        with a later message. A delay that falls is that of a backlog, whose stamps count as they are.
        `passed_ns`: time by a clock that never steps; None: by `now_ns`.
        """
        passed_ns = now_ns if passed_ns is None else passed_ns
        if (newest := _newest(items, now_ns)) is not None:
            self._judge(newest, now_ns, passed_ns)
        if not (self._was_in_time or self._drains or self.back_ns):
            items = self._hold(items, passed_ns)
        elif self._held:
            items = [*self._held.values(), *items]
            self._held.clear()
        return [moved(item, self.back_ns, now_ns) for item in items] if self.back_ns else items

    def _hold(self, items: Sequence[Item], passed_ns: int) -> Sequence[Item]:
        """Keep the last reading of each signal; return what is not held.

        That is events, and states, also those of a block, since a leak in a backlog is a leak.
        """
        self._held_ns = self._held_ns if self._held else passed_ns
        rest: list[Item] = []
        for item in items:
            if isinstance(item, Block):
                states, others = _apart(item)
                rest += states
                self._held |= {_key_of(other): other for other in others}
            elif isinstance(item, Reading) and not _is_state(item.table, item.signal):
                self._held[_key_of(item)] = item
            else:
                rest.append(item)
        if len(self._held) <= MAX_HELD and passed_ns - self._held_ns < MOST_HELD_NS:
            return rest
        self._was_in_time = True  # no verdict: its stamps count as they are, until the delay stays for long
        rest = [*self._held.values(), *rest]
        self._held.clear()
        return rest

    def _judge(self, item: Reading | Block, now_ns: int, passed_ns: int) -> None:
        raw_ns, key = now_ns - item.t_ns, _key_of(item)
        if raw_ns <= NEAR_NS and not self.back_ns:  # by far the most
            self._was_in_time, self._newest_ns = True, max(self._newest_ns, item.t_ns)
            self._step = self._late = self._standing = None
            self._note(key, raw_ns, passed_ns)
            return
        if self.mistake == "stands" and item.t_ns > self._newest_ns + NS:
            self.mistake = "behind"  # it goes on, from where it stood
        self._newest_ns = max(self._newest_ns, item.t_ns)
        if self.mistake == "stands" or self._stands(key, item, passed_ns):
            self._find("stands", now_ns - self._newest_ns, now_ns)
            return
        if raw_ns < self.back_ns // 2:
            self.back_ns = 0  # it was put right
        elif raw_ns < self.back_ns - NEAR_NS:
            self.back_ns = raw_ns  # its messages come no sooner than they are sent
        if self._is_step(key, raw_ns, now_ns, passed_ns):
            return
        delay_ns = raw_ns - self.back_ns
        if not self._was_in_time and not self._drains:
            self._drains = self._falls(key, delay_ns, passed_ns)
        if self._stays_late(key, delay_ns, passed_ns):
            self._find("behind", raw_ns, now_ns)
            delay_ns = 0
        self._note(key, delay_ns, passed_ns)

    def _note(self, key: Key, delay_ns: int, passed_ns: int) -> None:
        """Remember the last delay of a signal."""
        if key in self._delays or len(self._delays) < MAX_SIGNALS:
            self._delays[key] = max(delay_ns, 0), passed_ns

    def _find(self, mistake: Mistake, back_ns: int, now_ns: int) -> None:
        if self.mistake != mistake or not self.back_ns:
            self.found_ns = now_ns
        self.mistake, self.back_ns = mistake, back_ns
        self._late = self._step = None

    def _is_step(self, key: Key, raw_ns: int, now_ns: int, passed_ns: int) -> bool:
        """Return True for the message of which it is not clear yet; correct from the second one on."""
        before = self._delays.get(key)
        if before is not None and raw_ns > NEAR_NS:
            growth_ns = raw_ns - self.back_ns - before[0]
            if growth_ns > passed_ns - before[1] + GROWTH_NS:
                if not self._confirms(growth_ns, passed_ns):
                    return True
                self.found_ns = now_ns
                self._find("stepped", self.back_ns + growth_ns, now_ns)
        self._step = None
        return False

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

    def _stays_late(self, key: Key, delay_ns: int, passed_ns: int) -> bool:
        """Return True once the delay has been that of a clock for long enough."""
        late = self._late
        if delay_ns <= WATCH_NS:
            self._late, self._was_in_time = None, True
        elif late is None or (key != late.key and delay_ns < late.delay_ns - 2 * JITTER_NS):
            self._late = LateSignal(key, passed_ns, delay_ns, passed_ns, delay_ns)
        elif key == late.key or self._came_since(late.last_ns, key):
            late.key = key
            two_ns = LEAST_PERIODS * (passed_ns - late.last_ns)
            if not late.goes_on(delay_ns, passed_ns):
                self._late = LateSignal(key, passed_ns, delay_ns, passed_ns, delay_ns)
            elif self._was_in_time:
                return delay_ns >= max(LATE_NS, two_ns) and late.is_of_a_clock(passed_ns, STEADY_NS)
            else:
                return late.is_of_a_clock(passed_ns, max(FIRST_NS, two_ns))
        return False

    def _came_since(self, passed_ns: int, key: Key) -> bool:
        """Return True if the message before of a signal came after that."""
        before = self._delays.get(key)
        return before is not None and before[1] > passed_ns

    def _falls(self, key: Key, delay_ns: int, passed_ns: int) -> bool:
        """Return True once the delay of a signal has fallen by more than that of a clock and of jitter."""
        first = self._first
        if first is None or (key != first[0] and self._delays.get(first[0], (0, 0))[1] <= first[2]):
            before = self._delays.get(key)  # a point of a dead device comes once
            if first is None or before is not None:
                self._first = (key, delay_ns, passed_ns) if before is None else (key, *before)
            return False
        fell_ns = first[1] - delay_ns
        return key == first[0] and fell_ns > MOST_ALIKE_NS + CLOCK_PU * (passed_ns - first[2])

    def _stands(self, key: Key, item: Reading | Block, passed_ns: int) -> bool:
        """Return True once the newest stamp of the source has stayed while the values under it changed."""
        standing = self._standing
        if standing is None or (key != standing.key and self._came_since(standing.received_ns, key)):
            self._standing = StandingStamp(key, item, passed_ns, passed_ns)
        elif key == standing.key:
            if not standing.goes_on(item, passed_ns):
                self._standing = StandingStamp(key, item, passed_ns, passed_ns)
            elif standing.changes >= LEAST_CHANGES and passed_ns - standing.since_ns >= STANDS_NS:
                return item.t_ns >= self._newest_ns - NS
        return False


def _newest(items: Sequence[Item], now_ns: int) -> Reading | Block | None:
    """The last item with a stamp if it is in time, else the newest: a point of a dead device may be last."""
    last = items[-1] if items else None
    if isinstance(last, Reading | Block) and now_ns - last.t_ns <= NEAR_NS:  # by far the most
        return last
    stamped = (item for item in reversed(items) if isinstance(item, Reading | Block))
    return max(stamped, key=lambda item: item.t_ns, default=None)


def _key_of(item: Reading | Block) -> Key:
    """The signals and entities of an item."""
    if isinstance(item, Reading):
        return item[:3]
    return item.table, item.start, item.signals, item.counters


def _is_state(table: str, name: str) -> bool:
    signal = find_signal(f"{table}.{name}")
    return signal is not None and signal.kind == "state"


def _apart(block: Block) -> tuple[list[Block], list[Block]]:
    """(the states of a block, its other signals), each as one block or none."""
    rows = {name: row for row, name in enumerate(block.signals) if _is_state(block.table, name)}
    if not rows:
        return [], [block]
    no_counts = block.counts[:0]
    states = dataclasses.replace(
        block, signals=(*rows,), values=block.values[[*rows.values()]], counters=(), counts=no_counts
    )
    others = tuple(name for name in block.signals if name not in rows)
    if not others and not block.counters:
        return [states], []
    rest = [row for row, name in enumerate(block.signals) if name not in rows]
    return [states], [dataclasses.replace(block, signals=others, values=block.values[rest])]


def _differs(item: Reading | Block, before: Reading | Block) -> bool:
    """Return True if two items of the same signals have other values."""
    if isinstance(item, Reading) or isinstance(before, Reading):
        return isinstance(item, Reading) and isinstance(before, Reading) and item.value != before.value
    same = np.array_equal(item.values, before.values, equal_nan=True)
    return not (same and np.array_equal(item.counts, before.counts))


def moved(item: Item, by_ns: int, now_ns: int) -> Item:
    """A reading, block, fault or start with a later instant, at most now; any other item as it is."""
    if isinstance(item, FaultReported) and item.at_ns:
        return msgspec.structs.replace(item, at_ns=min(item.at_ns + by_ns, now_ns))
    if isinstance(item, JobStarted) and item.started_ns > 0:
        return msgspec.structs.replace(item, started_ns=min(item.started_ns + by_ns, now_ns))
    if isinstance(item, Reading):
        return item._replace(t_ns=min(item.t_ns + by_ns, now_ns))
    if isinstance(item, Block):
        return dataclasses.replace(item, t_ns=min(item.t_ns + by_ns, now_ns))
    return item
