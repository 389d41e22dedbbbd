"""The connection to the broker: paho-mqtt on a thread of its own, back-off with jitter, and bounded memory.

Offline the last frame of each topic is kept, and results and events up to a bound; the rest is dropped.
Imports the agent's configuration and publications.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from racktwin_agent.config import Broker
from racktwin_agent.publish import Out

MAX_WAITING = 1000
MIN_DELAY_S, MAX_DELAY_S = 0.5, 30.0


class Link:
    """Keeps a connection. Its thread calls `receive(topic, payload)` and `changed(connected, why)`."""

    def __init__(
        self,
        broker: Broker,
        topics: Sequence[str],
        will: Out,
        receive: Callable[[str, bytes], None],
        changed: Callable[[bool, str], None],
    ) -> None:
        self.broker, self.topics, self._receive, self._changed = broker, list(topics), receive, changed
        self.connected = False
        self.dropped = 0
        self._waiting: deque[Out] = deque()
        self._latest: dict[str, Out] = {}
        self._lock = threading.Lock()
        self._tries = 0
        client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=broker.client_id, protocol=mqtt.MQTTv311)
        client.max_queued_messages_set(MAX_WAITING)
        client.max_inflight_messages_set(100)
        client.connect_timeout = 5.0
        client.will_set(will.topic, will.payload, will.qos, will.retain)
        if broker.username is not None:
            client.username_pw_set(broker.username, broker.password())
        if broker.ca_file is not None:
            client.tls_set(
                ca_certs=str(broker.ca_file),
                certfile=None if broker.cert_file is None else str(broker.cert_file),
                keyfile=None if broker.key_file is None else str(broker.key_file),
            )
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_connect_fail = self._on_connect_fail
        client.on_message = self._on_message
        client.on_socket_open = self._on_socket_open
        self._client = client

    def start(self) -> None:
        """Start to connect; continues until `stop`."""
        self._back_off()
        self._client.connect_async(self.broker.host, self.broker.port, self.broker.keepalive_s)
        self._client.loop_start()

    def is_alive(self) -> bool:
        """Return True while the thread of the connection runs; without the thread nothing reconnects."""
        name = f"paho-mqtt-client-{self.broker.client_id}"
        return any(t.name == name for t in threading.enumerate())

    def send(self, out: Out) -> None:
        """Publish a message; while offline, messages that must not be lost wait."""
        with self._lock:
            if not self.connected:
                if out.qos:
                    if len(self._waiting) >= MAX_WAITING:
                        self._waiting.popleft()
                        self.dropped += 1
                    self._waiting.append(out)
                elif out.topic in self._latest or len(self._latest) < MAX_WAITING:
                    self._latest[out.topic] = out
                return
        self._publish(out)

    def _publish(self, out: Out) -> mqtt.MQTTMessageInfo:
        info = self._client.publish(out.topic, out.payload, out.qos, out.retain)
        if info.rc == mqtt.MQTT_ERR_QUEUE_SIZE:
            self.dropped += 1
        return info

    def stop(self, last: Sequence[Out] = ()) -> None:
        """Publish the last state, wait briefly for its delivery, and disconnect."""
        if self.connected:
            for out in last:
                info = self._publish(out)
                if info.rc == mqtt.MQTT_ERR_SUCCESS:
                    try:
                        info.wait_for_publish(2.0)
                    except (RuntimeError, ValueError):
                        break
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(
        self, client: mqtt.Client, userdata: Any, flags: Any, reason: Any, properties: Any
    ) -> None:
        if reason.is_failure:
            self._back_off()
            self._changed(False, f"the broker refuses us: {reason}")
            return
        if self.topics:
            client.subscribe([(t, 1) for t in self.topics])
        with self._lock:
            self.connected, self._tries = True, 0
            waiting = [*self._waiting, *self._latest.values()]
            self._waiting.clear()
            self._latest.clear()
        self._changed(True, "connected")
        for out in waiting:
            self._publish(out)

    def _on_socket_open(self, client: mqtt.Client, userdata: Any, sock: Any) -> None:
        """Set TCP_NODELAY: an echo behind an acknowledgement must not wait 40 ms."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _on_disconnect(
        self, client: mqtt.Client, userdata: Any, flags: Any, reason: Any, properties: Any
    ) -> None:
        was = self.connected
        with self._lock:
            self.connected = False
        self._back_off()
        if was:
            self._changed(False, f"disconnected: {reason}")

    def _on_connect_fail(self, client: mqtt.Client, userdata: Any) -> None:
        self._back_off()
        self._changed(False, f"{self.broker.host}:{self.broker.port} cannot be reached")

    def _back_off(self) -> None:
        """Wait a random part of twice the last wait, so that a thousand nodes do not reconnect at once."""
        delay = min(MAX_DELAY_S, MIN_DELAY_S * 2 ** min(self._tries, 10)) * random.uniform(0.5, 1.0)
        self._tries += 1
        self._client.reconnect_delay_set(delay, delay)

    def _on_message(self, client: mqtt.Client, userdata: Any, message: mqtt.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        if message.retain and "/Request/" in topic:
            self.dropped += 1  # a command is for now; who retains one wants it obeyed for ever
            return
        self._receive(topic, bytes(message.payload))
