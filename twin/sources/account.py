"""Account of one source: amount and time of its data, its clock, and the unused data with reasons."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from twin.catalogue import NS, duration, utc
from twin.contracts import Item
from twin.sources.clock import SourceClock
from twin.telemetry import Block, Reading

Outcome = Literal["ignored", "bad", "dropped", "failed", "late", "clock", "range"]
MAX_REASONS = 30  # of one source
MAX_CLAIMS = 50_000  # layouts that are remembered for CLAIM_S
OTHERS = "others"
ROUND_S = 2.0  # messages that are nearer to the first one of a round are of it; source: estimate
ROUNDS = 8  # over which the means are taken
QUIET_ROUNDS = 2.0  # a longer silence counts before its end
CLAIM_S = 60.0
DELAYS = 15  # latest delays, at most one a second, of which the median is taken
AHEAD_S, BEHIND_S = 2.0, 15.0  # a clock is said to be off; publishers may gather for ten seconds and more
# Messages that come so much later than they used to, by delays that differ by less, so many in a row. What
# was usual is forgotten within that many delays. source: estimate
SLOWER_S, ALIKE_S, STEADY, USUAL_OVER = 5.0, 2.0, 8, 3600
WRONG_S = 120.0  # off by more, it is an alarm
WRONG_FOR_S = 600.0  # after its last message
COUNTED = "its readings count from their arrival"
COARSEST_S = 60.0  # stamps of whole minutes stand for as long
SETTLE_S = 30.0  # after a step: if others step with it, it is the clock of this host. source: estimate
LATE_PU, LATE_OVER = 0.02, 500  # share of so many of the latest messages from which late ones have a line
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|[\w./-]*\d[\w./-]*")

REMEDIES: dict[str, str] = {
    "bad": "check its publisher: docs/telemetry.md says what is expected of each source",
    "dropped": "it sends more than the daemon accepts: send less often, or raise `broker.queue_messages`",
    "failed": "check that it runs and that its host answers",
    "late": "look for a second publisher of the same signals, a slow path, or a clock that was set back",
    "clock": "synchronise that host by NTP (`chronyc tracking`, `timedatectl`)",
    "delay": "check the load of its publisher, its network and the broker: readings arrive that late",
    "range": "compare the unit of that signal in the mapping with what the publisher sends",
}


class SourceRate:
    """Messages and readings by time, over as many rounds of a source as are worth a mean.

    A round is what comes within a short while: one message of an agent, or all that a Telegraf sends at once.
    The means are over the latest rounds, however far apart these are, so a source of one message each 30 s
    has as steady a rate as one of ten a second. `start_ns`: of the round that is open, which has `messages`
    and `readings` by now; 0: nothing came.
    """

    __slots__ = ("_gap_s", "_messages", "_readings", "_rounds", "messages", "readings", "start_ns")

    def __init__(self) -> None:
        self.start_ns = self.messages = self.readings = self._rounds = 0
        self._gap_s = self._messages = self._readings = 0.0  # means of the rounds that are closed

    def count(self, readings: int, now_ns: int) -> None:
        """Count a message with so many readings."""
        gap_s = (now_ns - self.start_ns) / NS
        if not self.start_ns or gap_s < 0.0:  # our clock was set back
            self.start_ns, self.messages, self.readings = now_ns, 0, 0
        elif gap_s >= ROUND_S:
            self._gap_s, self._messages, self._readings = self._with(gap_s)
            self._rounds = min(self._rounds + 1, ROUNDS)
            self.start_ns, self.messages, self.readings = now_ns, 0, 0
        self.messages += 1
        self.readings += readings

    def _with(self, gap_s: float) -> tuple[float, float, float]:
        """Means as if the open round ended now, so many seconds after its start."""
        share = 1.0 / min(self._rounds + 1, ROUNDS)
        return (
            self._gap_s + share * (gap_s - self._gap_s),
            self._messages + share * (self.messages - self._messages),
            self._readings + share * (self.readings - self._readings),
        )

    def means(self, now_ns: int) -> tuple[float, float, float] | None:
        """(seconds between rounds, messages and readings of a round); None before the second round."""
        open_s = (now_ns - self.start_ns) / NS
        if self._rounds and open_s > QUIET_ROUNDS * self._gap_s:
            return self._with(open_s)
        return (self._gap_s, self._messages, self._readings) if self._rounds else None


@dataclass(slots=True)
class UnusedLine:
    """One reason why something of a source was not used, or is doubted. Routine ones have no remedy."""

    outcome: Outcome
    what: str
    why: str
    remedy: str
    example: str
    count: int = 0
    last_ns: int = 0
    logged: bool = False


@dataclass(slots=True)
class SharedSignal:
    """Another source that carries the same signal: its number, and when it was last found doing so."""

    other: int
    looks: int
    last_ns: int


class AccountKeeper(Protocol):
    """Interface of the ledger to its accounts; `stage`: (readings that were too old, the newest stamp)."""

    counts: dict[str, int]
    now_ns: Callable[[], int]
    passed_ns: Callable[[], int] | None
    stage: Callable[[Sequence[Item], int, SourceAccount], tuple[int, int]]

    def account(self, name: str, outside: bool = False) -> SourceAccount: ...
    def claim(
        self, account: SourceAccount, table: str, signals: Iterable[str], run: tuple[int, int], now_ns: int
    ) -> None: ...
    def poll(self, table: str, signals: tuple[str, ...], run: tuple[int, int], period_s: float) -> None: ...
    def blame(self, account: SourceAccount, line: UnusedLine) -> None: ...
    def note_stranger(self, account: SourceAccount) -> None: ...


@dataclass(slots=True, eq=False)
class SourceAccount:
    """Implements `twin.contracts.contracts.Inlet` for one source. `number` is -1 before its first reading.

    Delays are arrival less stamp, in seconds: negative where its clock is ahead of ours.
    """

    ledger: AccountKeeper
    name: str
    outside: bool  # its name came from outside
    number: int = -1
    messages: int = 0
    readings: int = 0
    first_ns: int = 0
    last_ns: int = 0
    lines: dict[tuple[str, str], UnusedLine] = field(default_factory=dict)
    shared: dict[str, SharedSignal] = field(default_factory=dict)
    answers: int = 0  # of requests of ours
    failures: int = 0  # requests of ours without a good answer
    failure: str = ""  # the last one, and when it was
    failure_ns: int = 0
    _is_failing: bool = False
    rate: SourceRate = field(default_factory=SourceRate)
    _late_pu: float = 0.0  # share of the latest messages that were late
    _delays: deque[float] = field(default_factory=lambda: deque(maxlen=DELAYS))
    _delay_ns: int = 0
    _usual_s: float | None = None  # delay
    clock: SourceClock = field(default_factory=SourceClock)
    claims: set[Any] = field(default_factory=set)
    _polls: dict[Any, float] = field(default_factory=dict)  # layouts -> period at which they are asked for
    _claimed_ns: int = 0

    def of(self, source: str, outside: bool = False) -> SourceAccount:
        """The account of one of the sources that this one speaks for."""
        return self.ledger.account(source, outside)

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        """Stage what one message or answer brought, and count it; see `twin.contracts.contracts.Inlet`."""
        passed_ns, given = self.ledger.passed_ns, items
        items = self.clock.corrected(items, now_ns, None if passed_ns is None else passed_ns())
        if poll_s:
            self.answers += 1
            self._note_period(given, poll_s)
        if self._is_failing:
            self._heal()
        late, newest_ns = self.ledger.stage(items, now_ns, self)
        if self.clock.is_held:
            newest_ns = max((item.t_ns for item in given if isinstance(item, Reading | Block)), default=0)
        cells = self._claim(given, now_ns)
        self.rate.count(cells, now_ns)
        self.messages += 1
        self.readings += cells
        self.first_ns = self.first_ns or now_ns
        self.last_ns = max(self.last_ns, now_ns)
        self._late_pu += (bool(late) - self._late_pu) / min(self.messages, LATE_OVER)
        if newest_ns and now_ns - self._delay_ns >= NS:
            self._delay_ns = now_ns
            self._delays.append((now_ns - newest_ns + self.clock.back_ns) / NS)
            if not -AHEAD_S <= self._delays[-1] <= BEHIND_S:
                self._check_clock(now_ns)
            else:
                self._check_delay(now_ns)
        if late:
            why = f"readings older than what is known of the same device; {_stamped(now_ns - newest_ns)}"
            self.note(UnusedLine("late", "late", why, REMEDIES["late"], ""), 1, now_ns)

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        """Count a well-formed message that is not used, by its kind."""
        self.ledger.counts["ignored"] += 1
        self.note(UnusedLine("ignored", what, why, remedy, example))

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        """Count a bad message by where it came from."""
        self.ledger.counts["bad"] += 1
        remedy = remedy or REMEDIES["bad"]
        self.note(UnusedLine("bad", _VARIABLE.sub("*", why)[:80], why, remedy, where))

    def fail(self, why: str, remedy: str = "") -> None:
        """Count a request of ours that had no good answer; its reason is shown until the next one has."""
        self.ledger.counts["failed"] += 1
        self.failures += 1
        self._is_failing = True
        self.failure, self.failure_ns = why[:300], self.ledger.now_ns()
        self.note(UnusedLine("failed", _VARIABLE.sub("*", why)[:80], why, remedy or REMEDIES["failed"], ""))

    def _heal(self) -> None:
        self._is_failing = False
        for key in [key for key in self.lines if key[0] == "failed"]:
            del self.lines[key]

    def drop(self, where: str, why: str, count: int = 1) -> None:
        """Count what was lost before it could be decoded."""
        self.ledger.counts["dropped"] += count
        self.note(UnusedLine("dropped", where, why, REMEDIES["dropped"], where), count)

    def note(self, line: UnusedLine, count: int = 1, now_ns: int | None = None) -> None:
        """Count under a reason; beyond a number of them, the one quiet longest joins the others."""
        now_ns = self.ledger.now_ns() if now_ns is None else now_ns
        key = (line.outcome, line.what[:80])
        known = self.lines.pop(key, None)
        line.count, line.last_ns = (known.count if known is not None else 0) + count, now_ns
        line.why, line.example, line.remedy = line.why[:300], line.example[:200], line.remedy[:300]
        self.lines[key] = line
        line.logged = known is not None and known.logged
        if not line.logged and self._is_worth_a_line(line):
            line.logged = True
            self.ledger.blame(self, line)
        if len(self.lines) > MAX_REASONS:
            self._fold()
        if self.number < 0 and self.outside:
            self.ledger.note_stranger(self)

    def _fold(self) -> None:
        quiet = next(key for key in self.lines if key[1] != OTHERS)
        gone = self.lines.pop(quiet)
        rest = self.lines.setdefault(
            (gone.outcome, OTHERS), UnusedLine(gone.outcome, OTHERS, gone.why, gone.remedy, gone.example)
        )
        rest.count, rest.last_ns = rest.count + gone.count, max(rest.last_ns, gone.last_ns)

    def _check_clock(self, now_ns: int) -> None:
        offset_s = self.clock_offset_s()
        if offset_s is None or -AHEAD_S <= offset_s <= BEHIND_S:
            return
        side = "ahead of" if offset_s < 0 else "behind"
        why = f"its timestamps are {duration(abs(offset_s))} {side} our clock"
        if self.clock.back_ns:
            why += f"; {COUNTED}"
        elif offset_s > 0:
            why += ", or its messages come that late"
        self.note(UnusedLine("clock", "clock", why, REMEDIES["clock"], ""), 1, now_ns)

    def _check_delay(self, now_ns: int) -> None:
        """Say so where messages have become steadily later than they used to be."""
        delay_s = self._delays[-1]
        if self._usual_s is None:
            self._usual_s = sorted(self._delays)[STEADY // 2] if len(self._delays) >= STEADY else None
            return
        self._usual_s = min(delay_s, self._usual_s + (delay_s - self._usual_s) / USUAL_OVER)
        if delay_s < self._usual_s + SLOWER_S or self.clock.back_ns:
            return
        lately = list(self._delays)[-STEADY:]
        if min(lately) >= self._usual_s + SLOWER_S and max(lately) - min(lately) <= ALIKE_S:
            why = f"its messages arrive {duration(delay_s)} after their timestamps, later than usual"
            self.note(UnusedLine("clock", "delay", why, REMEDIES["delay"], ""), 1, now_ns)

    def wrong_clock(self, now_ns: int) -> str | None:
        """By how much its clock is wrong, in words, where that is an alarm and it still sends."""
        if not self._delays or abs(self._delays[-1]) < WRONG_S:  # there are thousands, and most are right
            return None
        if self.clock.is_held:  # it is not clear yet whether its clock or its way is late
            return None
        offset_s = self.clock_offset_s()
        if offset_s is None or abs(offset_s) < WRONG_S or not self.sends(now_ns):
            return None
        taken = offset_s < 0 or self.clock.back_ns > 0
        use = COUNTED if taken else "its readings count as old"
        return f"{self.name}: {self._off(offset_s)}; {use}"

    def odd_clock(self, now_ns: int) -> str | None:
        """The reason why its clock is worth a look, in words, where it is not wrong by minutes."""
        clock, back_s = self.clock, self.clock.back_ns / NS
        if self.stepped(now_ns) and now_ns - clock.found_ns > SETTLE_S * NS:
            at = utc(clock.found_ns, "%H:%M:%S")
            if clock.mistake == "stepped" and not clock.back_ns:
                return f"{self.name}: stepped back at {at}, and is right again"
            if clock.mistake == "stepped":
                return f"{self.name}: stepped back by {duration(back_s)} at {at}; {COUNTED}"
            return f"{self.name}: {self._off(back_s)}; {COUNTED}"
        offset_s = self.clock_offset_s()
        if self.ahead_s(now_ns) and offset_s is not None and -WRONG_S < offset_s < -AHEAD_S:
            return f"{self.name}: {self._off(offset_s)}; {COUNTED}"
        return None

    def _off(self, offset_s: float) -> str:
        if self.clock.mistake == "stands" and self.clock.back_ns:
            return f"its clock stands since {utc(self.clock.found_ns, '%H:%M:%S')}"
        return f"{duration(abs(offset_s))} {'ahead of' if offset_s < 0 else 'behind'} our clock"

    def stepped(self, now_ns: int) -> bool:
        """Return True if its clock is behind, or stepped back and is not right again for ten minutes.

        A delay of up to a minute that does not come of a step may be that of the way.
        """
        clock = self.clock
        if clock.mistake != "stepped":
            return clock.back_ns > COARSEST_S * NS
        return clock.back_ns > 0 or now_ns - clock.found_ns < WRONG_FOR_S * NS

    def ahead_s(self, now_ns: int) -> float:
        """By how much its last message was ahead of our clock; 0 where it was not, or no longer sends."""
        is_ahead = self._delays and self._delays[-1] <= -AHEAD_S and self.sends(now_ns)
        return -self._delays[-1] if is_ahead else 0.0

    def has_clock(self) -> bool:
        """Return True if its readings bear stamps of its own, as far as can be seen."""
        # A reading that we ask for, or without a stamp, gets our stamp
        return not self.answers and (self.clock.found_ns > 0 or any(self._delays))

    def sends(self, now_ns: int) -> bool:
        """Return True if it reported in the last ten minutes."""
        return now_ns - self.last_ns <= WRONG_FOR_S * NS

    def clock_offset_s(self) -> float | None:
        """Median delay of the latest messages, one that was measured; None before five of them."""
        return sorted(self._delays)[len(self._delays) // 2] if len(self._delays) >= 5 else None

    def latency_s(self) -> float | None:
        """By how much nine of ten messages come later than the quickest, at most; None before five."""
        if len(self._delays) < 5:
            return None
        return float(np.quantile(self._delays, 0.9) - min(self._delays))

    def worth_a_line(self) -> list[UnusedLine]:
        """Reasons that have a remedy; a few late readings are nothing."""
        return [line for line in self.lines.values() if self._is_worth_a_line(line)]

    def _is_worth_a_line(self, line: UnusedLine) -> bool:
        if line.outcome == "late" and self.messages and self._late_pu < LATE_PU:
            return False
        return bool(line.remedy)

    def _note_period(self, items: Sequence[Item], poll_s: float) -> None:
        """Say once how often these cells are asked for."""
        signals: tuple[str, ...]
        for item in items:
            if type(item) is Reading:
                run, signals = (item.entity, 1), (item.signal,)
            elif type(item) is Block:
                n = item.values.shape[1] if item.signals else item.counts.shape[1]
                run, signals = (item.start, n), (*item.signals, *item.counters)
            else:
                continue
            key = (item.table, *run, signals)
            if self._polls.get(key) != poll_s:
                self._polls[key] = poll_s
                self.ledger.poll(item.table, signals, run, poll_s)

    def _claim(self, items: Sequence[Item], now_ns: int) -> int:
        """Write down the cells that this source carries. Return their number."""
        if now_ns - self._claimed_ns >= CLAIM_S * NS or len(self.claims) > MAX_CLAIMS:
            self.claims.clear()
            self._claimed_ns = now_ns
        cells = 0
        claims = self.claims
        for item in items:
            key: tuple[Any, ...]
            if type(item) is Reading:
                cells += 1
                key = item[:3]  # table, entity, signal
                if key not in claims:
                    claims.add(key)
                    self.ledger.claim(self, item.table, (item.signal,), (item.entity, 1), now_ns)
            elif type(item) is Block:
                n = item.values.shape[1] if item.signals else item.counts.shape[1]
                names = (*item.signals, *item.counters)
                cells += n * len(names)
                key = (item.table, item.start, n, names)
                if key not in claims:
                    claims.add(key)
                    self.ledger.claim(self, item.table, names, (item.start, n), now_ns)
        return cells


def _stamped(delay_ns: int) -> str:
    return f"stamped {duration(max(delay_ns, 0) / NS)} before they came"
