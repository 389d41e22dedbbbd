"""MQTT input: splits a stream into publications and other packets, and queues publications within bounds.

Pure: bytes in, parcels out; it knows no socket and no client library. Memory is bounded whatever a broker
sends: a publication that is too large is skipped while it arrives and never kept, and a full queue first
loses its oldest publications of QoS 0, then asks that nothing more be read. Publications of a lane wait
apart, and delay no others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from connectors.mqtt.lane import Lane

PUBLISH = 0x30
MAX_CONTROL_BYTES = 65_536  # SUBACK is the longest that a broker answers with
PARCEL_BYTES = 400  # what a waiting publication costs beside its topic and payload
_SHED_TO, _RELIEVED_AT = 0.9, 0.5
_TURN = 8  # of others that go before one of the lane, where both wait


class WireError(Exception):
    """Received bytes are not MQTT 3.1.1."""


@dataclass(slots=True)
class Parcel:
    """A publication as received. `lost` is the reason for a dropped payload, otherwise ""."""

    t_ns: int
    topic: str
    payload: bytes
    mid: int  # 0 for QoS 0: nothing to acknowledge
    retained: bool
    size: int
    lost: str = ""


class Splitter:
    """Takes the stream in pieces of any length; appends publications to `parcels` and returns the rest."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.parcels: list[Parcel] = []
        self._chunks: list[bytes] = []
        self._held = self._skip = 0
        self._need = 2
        self._late: Parcel | None = None

    def feed(self, data: bytes, t_ns: int) -> bytes:
        """Take `data`, received at `t_ns`; returns the whole packets in it that are no publications."""
        if self._skip:
            gone = min(self._skip, len(data))
            self._skip -= gone
            if self._skip:
                return b""
            self._finish_skip()
            data = data[gone:]
        self._chunks.append(data)
        self._held += len(data)
        if self._held < self._need:
            return b""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        return self._split(data, t_ns)

    def _split(self, data: bytes, t_ns: int) -> bytes:
        control: list[bytes] = []
        at, end, need = 0, len(data), 2
        while end - at >= 2:
            kind = data[at]
            length, body = data[at + 1], at + 2
            if length & 0x80:
                length, body = _length(data, at + 1)
                if not body:
                    need = end - at + 1
                    break
            after = body + length
            if kind & 0xF0 != PUBLISH:
                if length > MAX_CONTROL_BYTES:
                    raise WireError(f"a control packet (type {kind >> 4}) of {length} bytes")
                if after > end:
                    need = after - at
                    break
                control.append(data[at:after])
            elif length > self.max_message_bytes:
                head = _head_end(data, kind, body, end)
                if head > end:
                    need = head - at
                    break
                lost = f"a message of {length} bytes; at most {self.max_message_bytes} are taken"
                self._late = self._parcel(data, kind, body, min(head, after), t_ns, lost)
                if after > end:
                    self._skip, at = after - end, end
                    break
                self._finish_skip()
            else:
                if after > end:
                    need = after - at
                    break
                self.parcels.append(self._parcel(data, kind, body, after, t_ns))
            at = after
        rest = data[at:]
        if rest:
            self._chunks.append(rest)
        self._held, self._need = len(rest), need
        return b"".join(control)

    def _finish_skip(self) -> None:
        if self._late is not None:
            self.parcels.append(self._late)
        self._late = None

    def _parcel(self, data: bytes, kind: int, body: int, after: int, t_ns: int, lost: str = "") -> Parcel:
        start = body + 2
        stop = start + (data[body] << 8 | data[body + 1]) if start <= after else after + 1
        qos, mid = kind >> 1 & 3, 0
        payload = stop + 2 if qos else stop
        if payload > after:
            raise WireError("a publication shorter than its own topic")
        if qos:
            if qos > 1:
                raise WireError(f"a publication with QoS {qos}; expected at most 1")
            mid = data[stop] << 8 | data[stop + 1]
            if not mid:
                raise WireError("a publication with QoS 1 without a packet id")
        try:
            topic = data[start:stop].decode()
        except UnicodeDecodeError:
            topic, lost = repr(data[start : start + 80]), lost or "its topic is not UTF-8"
        kept = b"" if lost else data[payload:after]
        return Parcel(t_ns, topic, kept, mid, bool(kind & 1), len(kept) + len(topic) + PARCEL_BYTES, lost)


class Boundary:
    """Follows a stream of packets in pieces of any length; `complete` is True between two packets."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0

    @property
    def complete(self) -> bool:
        """Return True between two packets."""
        return not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """Process the next piece. Raises WireError for a remaining length of more than four bytes."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left, at = self._left - step, at + step
                continue
            self._head.append(data[at])
            at += 1
            if len(self._head) > 1:
                length, body = _length(self._head, 1)
                if body:
                    self._left = length
                    self._head.clear()


def _length(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Return (remaining length, begin of the body), the latter 0 if the length itself is incomplete."""
    length = 0
    for i in range(4):
        if at + i >= len(data):
            return 0, 0
        byte = data[at + i]
        length |= (byte & 0x7F) << 7 * i
        if not byte & 0x80:
            return length, at + i + 1
    raise WireError("a remaining length of more than four bytes")


def _head_end(data: bytes, kind: int, body: int, end: int) -> int:
    """Return the end of topic and number of a publication; beyond `end` if it has not arrived yet."""
    if body + 2 > end:
        return body + 2
    return body + 2 + (data[body] << 8 | data[body + 1]) + (2 if kind & 0x06 else 0)


class MessageBacklog:
    """Publications that wait for staging: first in, first out, bounded by number and bytes.

    Retained publications and those of QoS 1 are never dropped, as they are not sent again. Where only such
    ones wait, `blocked` says that nothing more may be read until `relieved`. Those of the `lane` are bounded
    by it alone, whatever their QoS; `refused` are the numbers of those that it refused, to be acknowledged.
    """

    def __init__(self, max_messages: int, max_bytes: int, lane: Lane | None = None) -> None:
        self.max_messages, self.max_bytes = max_messages, max_bytes
        self.bytes = 0
        self.dropped = 0
        self.blocked = False
        self._queue: deque[Parcel] = deque()
        self.lane, self.refused = lane, list[int]()
        self._side: deque[Parcel] = deque()
        self._side_bytes = self._turn = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._side)

    def put(self, parcels: list[Parcel]) -> int:
        """Take all of `parcels`; returns how many older or of them had to be dropped."""
        if self.lane is not None:
            prefix = self.lane.prefix
            aside = [p for p in parcels if p.topic.startswith(prefix)]
            if aside:
                parcels = [p for p in parcels if not p.topic.startswith(prefix)]
                self._put_aside(self.lane, aside)
        self._queue.extend(parcels)
        for parcel in parcels:
            self.bytes += parcel.size
        if len(self._queue) <= self.max_messages and self.bytes <= self.max_bytes:
            return 0
        return self._shed()

    def pop(self) -> Parcel:
        """Return the oldest message; of the lane only every ninth while others wait."""
        if self._side and (not self._queue or self._turn >= _TURN):
            parcel, self._turn = self._side.popleft(), 0
            self._side_bytes -= parcel.size
            return parcel
        parcel = self._queue.popleft()
        self._turn += 1
        self.bytes -= parcel.size
        if self.blocked and self._within(_RELIEVED_AT):
            self.blocked = False
        return parcel

    def _put_aside(self, lane: Lane, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if lane.admits(parcel.topic, parcel.t_ns, len(self._side), self._side_bytes):
                self._side.append(parcel)
                self._side_bytes += parcel.size
            elif parcel.mid:
                self.refused.append(parcel.mid)

    def _within(self, share: float) -> bool:
        return len(self._queue) <= share * self.max_messages and self.bytes <= share * self.max_bytes

    def _shed(self) -> int:
        """Drop a tenth at once, so that the walk over the queue is paid for by many messages."""
        queue, kept, before = self._queue, deque[Parcel](), self.dropped
        while queue and not (
            len(queue) + len(kept) <= _SHED_TO * self.max_messages and self.bytes <= _SHED_TO * self.max_bytes
        ):
            parcel = queue.popleft()
            if parcel.mid or parcel.retained or parcel.lost:
                kept.append(parcel)
            else:
                self.bytes -= parcel.size
                self.dropped += 1
        kept.extend(queue)
        self._queue = kept
        self.blocked = not self._within(1.0)
        return self.dropped - before
