"""Heartbeat that DSX BMS v1 requires of an integration: its own time each 10 s, and an echo of the BMS's.

Points are ours by their metadata alone: those of type HeartbeatTimestampIntegration or
HeartbeatEchoIntegration whose `integration` is our name. Timestamps are milliseconds since 1970, as in
every value.
"""

from __future__ import annotations

import msgspec

from connectors.dsx.bms import MAX_METADATA_BYTES, MAX_TOPIC, MAX_VALUE_BYTES, PUB_METADATA, PUB_VALUE
from connectors.dsx.points import Metadata
from twin.catalogue import NS, BadMessage
from twin.telemetry import Ignored, Message

EVERY_S = 10.0
MAX_BEATS = 64
SYSTEM_METADATA, SYSTEM_VALUE = f"{PUB_METADATA}System/", f"{PUB_VALUE}System/"
_OURS = ("HeartbeatTimestampIntegration", "HeartbeatEchoIntegration")


class _Value(msgspec.Struct):
    value: float | None
    timestamp: int
    quality: int


class Heartbeat:
    """The heartbeat points of one integration, learned from what `receive` is given."""

    def __init__(self, integration: str) -> None:
        self.integration = integration
        self.bms_ms: float | None = None  # the last timestamp of the BMS
        self.bms_ns = 0  # when it reached us
        self._points: dict[str, str] = {}  # value topic -> point type
        self._last_ns: int | None = None
        self._metadata, self._value = msgspec.json.Decoder(Metadata), msgspec.json.Decoder(_Value)

    def receive(self, message: Message) -> Ignored | tuple[()]:
        """Take metadata of a System, or the BMS's own heartbeat. Raises BadMessage."""
        topic = message.topic
        if len(topic) > MAX_TOPIC:
            return Ignored("topic", "too long")
        if topic.startswith(SYSTEM_METADATA):
            return self._announce(topic[len(PUB_METADATA) :], message.payload)
        if not topic.startswith(f"{SYSTEM_VALUE}HeartbeatTimestampBms/"):
            return Ignored("System", "no heartbeat")
        if len(message.payload) > MAX_VALUE_BYTES:
            raise BadMessage(f"{len(message.payload)} bytes; expected at most {MAX_VALUE_BYTES}")
        try:
            wire = self._value.decode(message.payload)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"expected value, timestamp and quality: {str(error)[:120]}") from None
        if wire.quality == 1 and wire.value is not None and abs(wire.value) < 2**62:
            self.bms_ms, self.bms_ns = wire.value, message.t_ns
        return ()

    def _announce(self, key: str, payload: bytes) -> Ignored | tuple[()]:
        topic = f"BMS/v1/{self.integration}/Value/{key}"
        if len(payload) > MAX_METADATA_BYTES:
            raise BadMessage(f"{len(payload)} bytes; expected at most {MAX_METADATA_BYTES}")
        if not payload:
            self._points.pop(topic, None)
            return ()
        try:
            meta = self._metadata.decode(payload)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"expected the metadata of a point: {str(error)[:120]}") from None
        if not key.startswith(f"{meta.object_type}/{meta.point_type}/"):
            raise BadMessage(f"metadata of {meta.object_type}/{meta.point_type} on another's topic")
        if meta.point_type not in _OURS or meta.integration != self.integration:
            self._points.pop(topic, None)
            return Ignored(meta.point_type[:40], "not a heartbeat of this daemon")
        if len(self._points) < MAX_BEATS:
            self._points[topic] = meta.point_type
        return ()

    def due(self, now_ns: int) -> list[tuple[str, bytes]]:
        """Return the (topic, payload) to publish now; none within 10 s."""
        if self._last_ns is not None and 0 <= now_ns - self._last_ns < round(EVERY_S * NS):
            return []
        self._last_ns = now_ns
        out = []
        for topic, kind in self._points.items():
            value = self.bms_ms if kind == "HeartbeatEchoIntegration" else float(now_ns // 1_000_000)
            if value is not None:
                body = {"value": value, "timestamp": now_ns // 1_000_000, "quality": 1}
                out.append((topic, msgspec.json.encode(body)))
        return out
