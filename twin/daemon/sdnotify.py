"""Service manager notification: notifies systemd that the service is ready, reloading, stopping or alive.

Datagrams to the socket that NOTIFY_SOCKET names; without one, nothing happens. Only the standard library is
used.
"""

from __future__ import annotations

import os
import socket
import time

MAX_STATUS = 200


class SdNotify:
    """The link to systemd. A datagram that does not go out is counted, and never holds up the caller."""

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self.failed = 0
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._address = "\0" + address[1:] if address[0] == "@" else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @property
    def active(self) -> bool:
        """Return True if systemd listens."""
        return self._socket is not None

    @property
    def watchdog_s(self) -> float:
        """Return the interval in which `watchdog` must be called; 0 without a watchdog."""
        pid, usec = os.environ.get("WATCHDOG_PID", ""), os.environ.get("WATCHDOG_USEC", "")
        if not self.active or not usec.isdecimal() or (pid and pid != str(os.getpid())):
            return 0.0
        return int(usec) / 1e6

    def ready(self, status: str = "") -> None:
        """Report that the service is ready, after the start and after each reload."""
        self._send("READY=1", status)

    def reloading(self, status: str = "") -> None:
        """Report a reload; `ready` ends it."""
        # systemd orders this against its own signal by CLOCK_MONOTONIC.
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={usec}", status)

    def stopping(self, status: str = "") -> None:
        """Report a clean stop."""
        self._send("STOPPING=1", status)

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send("", text)

    def watchdog(self) -> None:
        """Report that the service is alive."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str = "") -> None:
        if self._socket is None:
            return
        # A line break in the text would begin another assignment.
        line = "".join(c if c.isprintable() else " " for c in status)[:MAX_STATUS]
        message = "\n".join(part for part in (state, f"STATUS={line}" if line else "") if part)
        try:
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError:
            self.failed += 1
