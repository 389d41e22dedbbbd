"""Lane: a separate, bounded queue for topics to which many clients may publish.

A publication beyond the rate of its topic, or of all topics, is refused before anything is decoded, so that
readings of devices never wait behind reports of jobs. Refusals are counted, with the topic that has most.
Time is that of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from twin.catalogue import NS

# Of one topic: as many at once as a client holds back while its broker is away, twice; then two a second. Of
# all: as many at once as wait at most, then so many a second. source: estimate; 10,000 jobs that save and
# report every five minutes make 70 a second
EACH_AT_ONCE, EACH_PER_S = 128.0, 2.0
ALL_AT_ONCE, ALL_PER_S = 4000.0, 500.0
MAX_WAITING, MAX_WAITING_BYTES = 4000, 8 * 2**20
MAX_TOPICS = 20_000  # with a rate of their own; beyond, the topic that was quiet longest is forgotten


class RefusalCount(NamedTuple):
    """Refusals within a span of time: their number, the topic with the most, and its number."""

    number: int
    within_s: float
    topic: str
    of_topic: int


class Lane:
    """Admits publications on topics that begin with `prefix`, by number and rate."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.refused = 0
        self._of: OrderedDict[str, tuple[float, int]] = OrderedDict()  # what is left of each, and since when
        self._all: tuple[float, int] = (ALL_AT_ONCE, 0)
        self._count, self._since_ns = 0, 0
        self._by: dict[str, int] = {}

    def admits(self, topic: str, t_ns: int, waiting: int, waiting_bytes: int) -> bool:
        """Return True if one more message that arrived at `t_ns` is accepted, with this many waiting."""
        each = _left(self._of.pop(topic, (EACH_AT_ONCE, t_ns)), EACH_AT_ONCE, EACH_PER_S, t_ns)
        total = _left(self._all, ALL_AT_ONCE, ALL_PER_S, t_ns)
        room = waiting < MAX_WAITING and waiting_bytes < MAX_WAITING_BYTES
        taken = float(room and each >= 1.0 and total >= 1.0)
        self._of[topic], self._all = (each - taken, t_ns), (total - taken, t_ns)
        if len(self._of) > MAX_TOPICS:
            self._of.popitem(last=False)
        if not taken:
            self._since_ns = self._since_ns or t_ns
            self._count += 1
            self.refused += 1
            if topic in self._by or len(self._by) < MAX_TOPICS:
                self._by[topic] = self._by.get(topic, 0) + 1
        return bool(taken)

    def take_refusals(self, now_ns: int) -> RefusalCount | None:
        """Return the refusals since the last call; None for none."""
        count, within_s = self._count, max((now_ns - self._since_ns) / NS, 1e-3)
        self._count, self._since_ns = 0, now_ns
        if not count:
            return None
        topic = max(self._by, key=self._by.__getitem__)
        of_topic, self._by = self._by[topic], {}
        return RefusalCount(count, within_s, topic, of_topic)


def _left(allowance: tuple[float, int], most: float, per_s: float, t_ns: int) -> float:
    left, since_ns = allowance
    return min(most, left + per_s * max(0, t_ns - since_ns) / NS)
