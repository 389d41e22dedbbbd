"""BMCs that speak IPMI 2.0 and the power commands of DCMI, made with pyghmi, in a process of their own.

with Bmcs(2) as bmcs:                      # bmcs.host(0) is 127.0.0.1:PORT
    bmcs.set(0, limit_w=500, active=True)
    bmcs.get(0)["limit_w"]

pyghmi serves sessions; the DCMI commands (group 0xDC, 02h to 05h, DCMI 1.5 section 6.6) are ours. `set` also
makes faults: `mute` (no answer), `code` (a completion code for all), `cut` (bytes that answers end at),
`deaf` (what is set is taken and forgotten), `stuck` (the exception action stays), `round_w`, `slow_s`.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

USER, PASSWORD = "racktwin", "pass-word-of-tests"
GROUP = 0xDC
START: dict[str, Any] = {
    "limit_w": 6000, "active": False, "action": 1, "correction_ms": 500, "sample_s": 30, "power_w": 4321,
    "measures": True, "low_w": 1000, "high_w": 6667, "mute": False, "code": 0, "cut": 99, "deaf": False,
    "stuck": False, "round_w": 1, "slow_s": 0.0, "sets": 0, "activations": 0, "asked": 0,
    "power": "on", "switched": "",
}  # fmt: skip


class Bmcs:
    """`count` BMCs on loopback."""

    def __init__(self, count: int = 1) -> None:
        held = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        self.ports = [one.getsockname()[1] for one in held]
        for one in held:
            one.close()

    def __enter__(self) -> Bmcs:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *map(str, self.ports)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._tell({})  # it answers when it listens
        return self

    def __exit__(self, *_: type | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def host(self, number: int) -> str:
        """Its address, as a configuration names it."""
        return f"127.0.0.1:{self.ports[number]}"

    def set(self, number: int, **values: Any) -> None:
        """Change what a BMC has or does."""
        assert values.keys() <= START.keys()
        self._tell({"bmc": number, "set": values})

    def get(self, number: int) -> dict[str, Any]:
        """Return the settings of a BMC, and how often it was set (`sets`, `activations`) and asked."""
        return self._tell({"bmc": number})

    def _tell(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(ports: list[int]) -> None:
    """Run BMCs on these ports until killed."""
    from pyghmi.ipmi.bmc import Bmc

    class Dcmi(Bmc):  # type: ignore[misc]
        def __init__(self, port: int) -> None:
            super().__init__({USER: PASSWORD}, port=port, address="127.0.0.1")
            self.has = dict(START)

        def get_power_state(self) -> str:
            return str(self.has["power"])

        def power_on(self) -> None:
            self.has |= {"power": "on", "switched": self.has["switched"] + " on"}

        def power_off(self) -> None:
            self.has |= {"power": "off", "switched": self.has["switched"] + " off"}

        def power_shutdown(self) -> None:
            self.has["switched"] += " soft"  # until a test says that it has stopped

        def handle_raw_request(self, request: Any, session: Any) -> None:
            if request["netfn"] == 0x2C and bytes(request["data"])[:1] == bytes([GROUP]):
                answer(self.has, request["command"], bytes(request["data"]), session)
            else:
                super().handle_raw_request(request, session)

    bmcs = [Dcmi(port) for port in ports]

    def listen() -> None:
        for line in sys.stdin:
            what = json.loads(line)
            has = bmcs[what["bmc"]].has if what else {}
            has.update(what.get("set", {}))
            print(json.dumps(has), flush=True)

    threading.Thread(target=listen, daemon=True).start()
    Bmc.listen(timeout=1)


def answer(has: dict[str, Any], command: int, data: bytes, session: Any) -> None:
    """One DCMI power command."""
    has["asked"] += 1
    time.sleep(has["slow_s"])
    if has["mute"]:
        return
    code, body = has["code"], b""
    if code == 0 and command == 0x02:
        watts = has["power_w"]
        state = 0x40 if has["measures"] else 0
        body = struct.pack("<HHHHIIB", watts, watts - 9, watts + 9, watts, int(time.time()), 1000, state)
    elif code == 0 and command == 0x03:
        body = b"\0\0" + struct.pack("<BHIHH", has["action"], has["limit_w"], has["correction_ms"], 0,
                                     has["sample_s"])  # fmt: skip
        code = 0 if has["active"] else 0x80
    elif code == 0 and command == 0x04:
        action, limit_w, correction_ms, _, sample_s = struct.unpack("<BHIHH", data[4:15])
        code = 0 if has["low_w"] <= limit_w <= has["high_w"] else 0x84
        has["sets"] += 1
        if code == 0 and not has["deaf"]:
            limit_w = round(limit_w / has["round_w"]) * has["round_w"]
            has |= {"limit_w": limit_w, "correction_ms": correction_ms, "sample_s": sample_s}
            has["action"] = has["action"] if has["stuck"] else action
    elif code == 0 and command == 0x05:
        has["activations"] += 1
        has["active"] = has["active"] if has["deaf"] else bool(data[1])
    elif code == 0:
        code = 0xC1
    session.send_ipmi_response(data=list((bytes([GROUP]) + body)[: has["cut"]]), code=code)


if __name__ == "__main__":
    serve([int(port) for port in sys.argv[1:]])
