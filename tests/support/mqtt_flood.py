"""A flood of MQTT messages, cheaply made: python -m tests.support.mqtt_flood PORT RATE SECONDS STOP_FILE

A socket of its own and packets that are encoded once a second; forged, foreign and broken ones among them.
Writes one line of JSON at the end: how many of each kind the broker took.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from pathlib import Path

KINDS = ("frame", "forged", "foreign", "broken", "unknown")
WEIGHTS = (70, 10, 8, 7, 5)
STEP_S = 0.02
NODES, STRANGERS = 18, 300


def packet(topic: str, payload: bytes) -> bytes:
    """A PUBLISH of QoS 0."""
    name = topic.encode()
    rest = len(name).to_bytes(2, "big") + name + payload
    length, out = len(rest), bytearray([0x30])
    while True:
        length, low = divmod(length, 128)
        out.append(low | (0x80 if length else 0))
        if not length:
            return bytes(out) + rest


def connected(port: int) -> socket.socket:
    """A session with the broker."""
    made = socket.create_connection(("127.0.0.1", port), 10)
    made.sendall(b"\x10\x11\x00\x04MQTT\x04\x02\x00\x00\x00\x05flood")
    assert made.recv(4)[3] == 0
    return made


def packets(kind: str, t_ns: int) -> list[bytes]:
    """One of a kind for each node of the second rack; what the first one says is left to others."""
    out = []
    for number in range(STRANGERS if kind == "foreign" else NODES):
        path = f"lab/h/r2/node{number}"
        gpu = {"temp_c": [44.0 + number % 7] * 4, "power_w": [700.0 + number] * 4, "util_pu": [0.9] * 4}
        body = {"t_ns": t_ns, "gpu": gpu}
        if kind == "forged":
            body["from"] = "lab/h/r1/node99"
        topic = f"IT/v1/PUB/Frame/{path}"
        if kind == "foreign":
            topic = f"IT/v1/PUB/Event/elsewhere/h/r{number}"
        text = json.dumps(body).encode()
        if kind == "broken":
            text = text[: len(text) // 2]
        if kind == "unknown":
            topic = f"BMS/v1/PUB/Value/Rack/Nothing{number}"
        out.append(packet(topic, text))
    return out


def main(port: int, rate: int, seconds: float, stop: Path) -> None:
    """Publish at an even pace until the time is over, or the file is there."""
    dice, link = random.Random(1), connected(port)
    sent = dict.fromkeys(KINDS, 0)
    begun = time.monotonic()
    told, total, ready = -1, 0, {}
    while (now := time.monotonic() - begun) < seconds and not stop.exists():
        if int(now) != told:
            told, t_ns = int(now), time.time_ns()
            ready = {kind: packets(kind, t_ns) for kind in KINDS}
        due = int(rate * now) - total
        if due <= 0:
            time.sleep(STEP_S / 4)
            continue
        kinds = dice.choices(KINDS, WEIGHTS, k=min(due, rate))
        link.sendall(b"".join(dice.choice(ready[kind]) for kind in kinds))
        for kind in kinds:
            sent[kind] += 1
        total += len(kinds)
        time.sleep(STEP_S)
    link.sendall(b"\xc0\x00")  # PINGREQ: its answer says that all before it was taken
    link.settimeout(60)
    assert link.recv(2) == b"\xd0\x00"
    link.sendall(b"\xe0\x00")
    link.close()
    print(json.dumps({"sent": sent, "total": total, "seconds": time.monotonic() - begun}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
