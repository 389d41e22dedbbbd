"""The cheapest publisher there is: one ready-made round of MQTT publications, sent again and again.

`python -m tests.evaluation.bench.sender PORT ROUND RATE` is a process of its own, so that it does not
limit what it feeds: it writes to a socket, and changes nothing but the times within. RATE 0: a round for
each byte on standard input; else so many rounds per second until that is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path

HOST, TIMEOUT_S = "127.0.0.1", 30.0
CONNECT = b"\x00\x04MQTT\x04\x02\x00\x00"  # 3.1.1, a clean session, no keep-alive
NS = 10**9


def packet(topic: str, payload: bytes) -> bytes:
    """A publication of QoS 0 as it goes over the wire."""
    name = topic.encode()
    body = struct.pack(">H", len(name)) + name + payload
    return b"\x30" + _length(len(body)) + body


def _length(number: int) -> bytes:
    out = bytearray()
    while True:
        number, low = divmod(number, 128)
        out.append(low | (0x80 if number else 0))
        if not number:
            return bytes(out)


def write_round(path: Path, packets: list[bytes], places: list[int], text: bool) -> None:
    """A file for `main`. `places` are where in each packet its time is: 19 digits, or 8 bytes of msgpack."""
    starts, at = [], 0
    for one, place in zip(packets, places, strict=True):
        starts.append(at + place)
        at += len(one)
    head = json.dumps({"places": starts, "text": text}).encode() + b"\n"
    path.write_bytes(head + b"".join(packets))


def connect(port: int, name: str) -> socket.socket:
    """A connection that the broker has accepted. Raises OSError."""
    sock = socket.create_connection((HOST, port), TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = CONNECT + struct.pack(">H", len(name)) + name.encode()
    sock.sendall(b"\x10" + _length(len(body)) + body)
    answer = sock.recv(4)
    if answer != b"\x20\x02\x00\x00":
        raise OSError(f"the broker answered {answer!r}; expected that it accepts us")
    return sock


def _linger(sock: socket.socket) -> int:
    """A broker may forget what it has not read when a connection goes: wait to be ended, not for ever."""
    with contextlib.suppress(OSError):
        sock.recv(1)
    return 0


def main(argv: list[str]) -> int:
    """The process."""
    port, rate = int(argv[1]), float(argv[3])
    head, _, data = Path(argv[2]).read_bytes().partition(b"\n")
    told = json.loads(head)
    places, text, content = told["places"], told["text"], bytearray(data)
    sock = connect(port, f"bench-sender-{os.getpid()}")
    period_ns = round(NS / rate) if rate else 0
    due_ns = time.monotonic_ns()
    while True:
        rounds = 1
        if period_ns:
            due_ns += period_ns
            wait_s = max(0.0, (due_ns - time.monotonic_ns()) / NS)
            if select.select([sys.stdin], [], [], wait_s)[0]:
                return _linger(sock)
        else:
            rounds = len(os.read(0, 64))
            if not rounds:
                return _linger(sock)
        for _ in range(rounds):
            t_ns = time.time_ns()
            stamp = str(t_ns).encode() if text else struct.pack(">Q", t_ns)
            for at in places:
                content[at : at + len(stamp)] = stamp
            sock.sendall(content)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
