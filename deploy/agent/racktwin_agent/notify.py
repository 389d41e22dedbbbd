"""Notifications to systemd: ready, alive, stopping. Without systemd they do nothing."""

from __future__ import annotations

import os
import socket


def notify(text: str) -> None:
    """Send a line such as READY=1 to the service manager."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(text.encode(), address)
        except OSError:
            return
