"""A broker as the source of an advisor: mqtt://[user@]host[:port][/integration]; mqtts: with TLS.

Needs paho-mqtt 1.6 or later, which keeps the connection on a daemon thread of its own. The password of `user`
is the job's token; RACKTWIN_CERT_FILE and RACKTWIN_KEY_FILE name a certificate of its own. Without the name
of an integration, any is accepted. May import paho-mqtt.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_ADVICE, MAX_WAITING = 4096, 64  # bytes that are kept of a message, reports that wait for the broker
MAX_BACKOFF_S, KEEPALIVE_S = 120, 60
FIRST_S = 5.0  # that the first question waits for the connection


class Broker:
    """Keeps the last advice and sends reports. Raises ValueError without paho-mqtt."""

    def __init__(self, url: str, level: str, token: Callable[[], str], ca_file: str | None) -> None:
        try:
            import paho.mqtt.client as mqtt
        except ImportError:
            raise ValueError("mqtt needs paho-mqtt: pip install paho-mqtt, or use a file or HTTP") from None
        parts = urlsplit(url)
        self._latest: bytes | None = None
        self._asked = False
        self._reports = f"IT/v1/PUB/Job/{level}"
        versions = getattr(mqtt, "CallbackAPIVersion", None)  # of paho-mqtt 2
        self._client: Any = mqtt.Client(*([] if versions is None else [versions.VERSION2]))
        self._client.max_queued_messages_set(MAX_WAITING)
        self._client.reconnect_delay_set(1, MAX_BACKOFF_S)
        if parts.username:
            self._client.username_pw_set(unquote(parts.username), token() or None)
        if parts.scheme == "mqtts":
            cert, key = (os.environ.get(f"RACKTWIN_{what}_FILE") for what in ("CERT", "KEY"))
            self._client.tls_set(ca_certs=ca_file, certfile=cert, keyfile=key)
        self._wanted = f"IT/v1/{unquote(parts.path).strip('/') or '+'}/Job/{level}"
        self._met = threading.Event()
        self._client.on_connect = self._on_connect
        self._client.on_message = self._on_message
        port = parts.port or (8883 if parts.scheme == "mqtts" else 1883)
        self._client.connect_async(parts.hostname or "", port, KEEPALIVE_S)
        self._client.loop_start()

    def _on_connect(self, client: Any, *_: Any) -> None:
        client.subscribe(self._wanted, 1)
        self._met.set()

    def _on_message(self, client: Any, userdata: Any, message: Any) -> None:
        if message.topic != self._reports:  # our own, which the wildcard lets in
            self._latest = bytes(message.payload[: MAX_ADVICE + 1])

    def fetch(self) -> bytes | None:
        """The last advice, None if none came yet. Raises OSError without a connection."""
        if not self._met.wait(0.0 if self._asked else FIRST_S) or not self._client.is_connected():
            self._asked = True
            raise OSError("no connection to the broker")
        return self._latest

    def send(self, body: bytes) -> None:
        """Send a report. Raises OSError if the broker cannot take it now."""
        if not self._client.is_connected() or self._client.publish(self._reports, body, 1).rc:
            raise OSError("the broker does not take a report")

    def close(self) -> None:
        """Leave the broker."""
        self._client.disconnect()
        self._client.loop_stop()
