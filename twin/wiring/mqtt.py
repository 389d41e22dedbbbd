"""MQTT wiring: settings of the link with their secrets, routes of the extra topics, and the source."""

from __future__ import annotations

import os
from pathlib import Path

from connectors.mqtt import LinkSettings
from twin.catalogue import ConfigError
from twin.config import Broker, Loaded, Tls, warn_exposed
from twin.wiring.embedded_broker import HOST


def link_settings(loaded: Loaded, embedded_port: int | None = None) -> LinkSettings:
    """Settings of the configured broker. Raises ConfigError for a file that is absent; quotes no secret.

    `embedded_port` is that of the embedded broker, where the configuration asks for it.
    """
    broker = loaded.config.broker
    if not isinstance(broker, Broker):
        if embedded_port is None:
            raise ConfigError(
                f"{loaded.path}: $.broker: the embedded broker is part of a running daemon; expected its port"
            )
        return LinkSettings(HOST, embedded_port)
    tls = broker.tls
    files = {} if tls is None else _tls_files(loaded, tls)
    return LinkSettings(
        host=broker.host,
        port=broker.port,
        client_id=broker.client_id,
        username=broker.username,
        password=loaded.secret(broker.password_file),
        tls=tls is not None,
        ca_file=files.get("ca_file"),
        cert_file=files.get("cert_file"),
        key_file=files.get("key_file"),
        keepalive_s=broker.keepalive_s,
        queue_messages=broker.queue_messages,
        queue_bytes=broker.queue_bytes,
        max_message_bytes=broker.max_message_bytes,
    )


def _tls_files(loaded: Loaded, tls: Tls) -> dict[str, str | None]:
    """Absolute paths of the files, which must be readable. Raises ConfigError with all that are not."""
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError(f"{loaded.path}: $.broker.tls: expected cert_file and key_file, or neither")
    found: dict[str, str | None] = {}
    problems: list[str] = []
    for key in ("ca_file", "cert_file", "key_file"):
        name = getattr(tls, key)
        path: Path | None = None if name is None else loaded.file(name)
        if path is not None and not os.access(path, os.R_OK):
            problems.append(f"{loaded.path}: $.broker.tls.{key}: {path}: cannot be read")
        found[key] = None if path is None else str(path)
        if key == "key_file" and path is not None:
            warn_exposed(path)
    if problems:
        raise ConfigError(problems)
    return found
