"""Demo fleet: the demo's pod in real time, with its BMS and the agents of its 36 trays on one connection.

`python -m twin.simulation.demo_fleet PORT` is a process of its own, as a pod is. The agents are real ones
(`racktwin_agent`), only their devices are simulated: leases lapse and contingencies hold as on a node.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

from racktwin_agent.config import Broker
from racktwin_agent.devices import GPU_CAP, Column, DeviceError, Key, Sample
from racktwin_agent.fleet import Fleet
from racktwin_agent.publish import Out

from twin.simulation.demo_pod import FAULT_AT_S, FAULT_S, PERIOD_S, RACKS, Pod
from twin.telemetry import Message

TRAYS, PER_TRAY = 18, 4
LOW_W, HIGH_W = 200.0, 1200.0


class Tray:
    """Four GPUs of the pod as an agent's devices."""

    gpus = PER_TRAY

    def __init__(self, pod: Pod, rack: int, tray: int) -> None:
        self.pod, self.rack = pod, rack
        self.at = slice(tray * PER_TRAY, (tray + 1) * PER_TRAY)

    def sample(self, t_ns: int) -> Sample:
        """See racktwin_agent.devices."""
        pod, cell = self.pod, (self.rack, self.at)
        gpu: dict[str, Column] = {
            "power_w": [round(float(v), 1) for v in pod.power_w[cell]],
            "temp_c": [round(float(v)) for v in pod.temp_c[cell]],
            "power_limit_w": [float(v) for v in pod.cap_w[cell]],
            "energy_mj": [int(v) for v in pod.energy_mj[cell]],
            "util_pu": [pod.level] * PER_TRAY,
        }
        return Sample(t_ns, gpu, {"power_w": [round(float(pod.power_w[cell].sum()) + 700.0, 1)]})

    def limits(self, key: Key) -> tuple[float, float] | None:
        """See racktwin_agent.devices."""
        return None if self._number(key) is None else (LOW_W, HIGH_W)

    def get(self, key: Key) -> float | None:
        """See racktwin_agent.devices."""
        at = self._number(key)
        return None if at is None else float(self.pod.cap_w[self.rack, at])

    def set(self, key: Key, value: float) -> None:
        """See racktwin_agent.devices."""
        at = self._number(key)
        if at is None:
            raise DeviceError(f"no {key.name}")
        self.pod.cap_w[self.rack, at] = value

    def serials(self) -> list[str | None]:
        """See racktwin_agent.devices: they have none."""
        return [None] * PER_TRAY

    def gpu_at(self, bus_id: str) -> int | None:
        """See racktwin_agent.devices: these are on no bus."""
        return None

    def close(self) -> None:
        """See racktwin_agent.devices."""

    def _number(self, key: Key) -> int | None:
        if key.control != GPU_CAP or not key.name.startswith("gpu") or not key.name[3:].isdecimal():
            return None
        number = int(key.name[3:])
        return self.at.start + number if number < PER_TRAY else None


class Story:
    """Moves the pod on, and says what its BMS says."""

    def __init__(self, pod: Pod) -> None:
        self.pod, self.second = pod, 0

    def step(self, seconds: float) -> list[Out]:
        """Before each round of samples."""
        pod, out = self.pod, []
        if self.second == 0:
            out += [_out(m, retain=True) for m in pod.metadata()]
        for _ in range(max(1, round(seconds))):
            phase = self.second % PERIOD_S
            pod.move(self.second, FAULT_AT_S <= phase < FAULT_AT_S + FAULT_S)
            self.second += 1
        now_ns = time.time_ns()
        for rack in range(RACKS):
            out += [_out(m) for m in pod.points(rack, now_ns)]
        return out


def _out(message: Message, retain: bool = False) -> Out:
    return Out(message.topic, message.payload, 1 if retain else 0, retain)


def main(argv: list[str]) -> int:
    """The process: until a signal says stop."""
    if len(argv) not in (2, 3) or not argv[1].isdecimal():
        print("usage: python -m twin.simulation.demo_fleet PORT [STATE]", file=sys.stderr)
        return 2
    pod = Pod()
    story = Story(pod)
    devices = {
        f"demo-pod/hall1/r{rack + 1}/node{tray}": Tray(pod, rack, tray)
        for rack in range(RACKS)
        for tray in range(TRAYS)
    }
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    broker = Broker("127.0.0.1", int(argv[1]), "demo-pod")
    state = Path(argv[2]) if len(argv) == 3 else None
    with Fleet(devices, broker, before_step=story.step, state_dir=state, broker_gone_s=30.0):
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
