"""Allowance: bounds the bytes that one sender may put on record, at once and over time.

Events and answers are recorded forever, and cost their size, so that one hostile or broken device can neither
fill the disk nor press the records of others out of their quota. Time is that of arrival: a replay decides
the same.
"""

from __future__ import annotations

from twin.catalogue import NS, BadMessage

MAX_SPEAKERS = 1_000_000


class Allowance:
    """A budget of `burst` bytes for each sender, refilled by `per_s`. Name only known senders."""

    def __init__(self, what: str, burst: int, per_s: int) -> None:
        self.what, self.burst, self.per_s = what, burst, per_s
        self._left: dict[str, tuple[float, int]] = {}  # speaker -> (bytes that are left, when that was)

    def spend(self, speaker: str, size: int, t_ns: int, shown: str = "") -> None:
        """Take `size` bytes. Raises BadMessage, and takes nothing, where less is left.

        `shown` is the speaker's name for people, where that is another one.
        """
        left, since_ns = self._left.get(speaker, (float(self.burst), t_ns))
        left = min(self.burst, left + self.per_s * max(0, t_ns - since_ns) / NS)
        if size > left:
            raise BadMessage(
                f"more {self.what} of {(shown or speaker)[:200]} than {self.burst} bytes at once and "
                f"{self.per_s} a second: dropped; check the sender"
            )
        if speaker in self._left or len(self._left) < MAX_SPEAKERS:
            self._left[speaker] = (left - size, max(since_ns, t_ns))
