"""Rate of one source: messages and readings by time, over as many rounds of it as are worth a mean.

A round is what comes within a short while: one message of an agent, or all that a Telegraf sends at once. The
means are over the latest rounds, however far apart these are, so a source of one message each 30 s has as
steady a rate as one of ten a second. Memory is constant.
"""

from __future__ import annotations

from twin.catalogue import NS

ROUND_S = 2.0  # messages that are nearer to the first one of a round are of it; source: estimate
ROUNDS = 8  # over which the means are taken
QUIET_ROUNDS = 2.0  # a longer silence counts before its end


class SourceRate:
    """`start_ns`: of the round that is open, which has `messages` and `readings` by now; 0: nothing came."""

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
