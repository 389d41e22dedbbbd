"""From a reading to the cap that answers it: agents, building and observer in one process, with one clock.

`python -m tests.evaluation.bench.react TASK` plays the site of a running daemon. The agents are real ones
(`racktwin_agent`) on simulated devices. A sample begins when a reading beyond its guard is published, at an
instant of its own between the ticks, and ends when an observer at the broker sees the device's lowered cap
read back; of a rack that loses its flow, the last of its GPUs.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from racktwin_agent.clock import current_instant
from racktwin_agent.config import Broker
from racktwin_agent.devices import Sample
from racktwin_agent.fleet import Fleet
from racktwin_agent.publish import Out
from racktwin_agent.simulated import SimulatedDevices

from tests.evaluation.bench.plan import DROPS, PER_RACK, PER_TRAY, TRAYS, Outcome, ReactionLoad
from twin.catalogue import ConnectorError

HOST, SITE, CONTROL = "127.0.0.1", "bench/hall1", "gpu.power_cap_w"
HOT_C, FLOW_LPM = 85.0, 96.0  # a guard is at 82 degC; flow is strained below 40 l/min
POINT = "RackLiquidFlow"
FRAMES, REQUESTS = "IT/v1/PUB/Frame/", f"IT/v1/racktwin/Request/{CONTROL}/"
DAEMONS = "IT/v1/racktwin/Daemon/"
READY_S, ANSWER_S = 40.0, 15.0
LOWER_W = 1.0
Key = tuple[str, int]  # the path of a node, the number of a GPU


class Tray(SimulatedDevices):
    """A node whose GPUs are hot when they are told so."""

    def __init__(self, seed: int) -> None:
        super().__init__(PER_TRAY, seed)
        self.hot: set[int] = set()

    def sample(self, t_ns: int) -> Sample:
        """See racktwin_agent.devices."""
        sample = super().sample(t_ns)
        for number in self.hot:
            sample.gpu["temp_c"][number] = HOT_C
        return sample


class Building:
    """The flow of each rack, published each second."""

    def __init__(self, racks: int) -> None:
        self.flow_lpm = [FLOW_LPM] * racks
        self._told = False

    def step(self, seconds: float) -> list[Out]:
        """Before each round of the agents' samples."""
        out = [self.point(rack) for rack in range(len(self.flow_lpm))]
        if not self._told:
            self._told = True
            out = [self._metadata(rack) for rack in range(len(self.flow_lpm))] + out
        return out

    def point(self, rack: int) -> Out:
        """Return the message of a rack's meter now."""
        body = {"value": self.flow_lpm[rack], "timestamp": time.time_ns() // 10**6, "quality": 1}
        return Out(f"BMS/v1/PUB/Value/Rack/{POINT}/bench/r{rack + 1}/{POINT}", json.dumps(body).encode())

    def _metadata(self, rack: int) -> Out:
        name = f"r{rack + 1}"
        body = {"objectType": "Rack", "pointType": POINT, "engUnit": "LPM", "rackLocationId": name,
                "rackLocationName": name}  # fmt: skip
        topic = f"BMS/v1/PUB/Metadata/Rack/{POINT}/bench/{name}/{POINT}"
        return Out(topic, json.dumps(body).encode(), 1, True)


class Wait:
    """One sample under way: GPUs that must still show less than `below_w`."""

    def __init__(self, begun_s: float, below_w: dict[Key, float]) -> None:
        self.begun_s, self.below_w = begun_s, below_w
        self.request_s = self.done_s = 0.0


class Observer:
    """Sees what passes the broker, and dates it."""

    def __init__(self, port: int) -> None:
        self.role = ""  # of the daemon
        self.watt: dict[Key, float] = {}
        self._of: dict[Key, Wait] = {}
        self._paths: dict[str, int] = {}  # nodes and racks that somebody waits for
        self._lock = threading.Lock()
        client = self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "bench-observer")
        client.on_message = self._on_message
        client.on_connect = lambda c, *_: c.subscribe([(f + "#", 0) for f in (FRAMES, REQUESTS, DAEMONS)])
        client.connect(HOST, port)
        client.loop_start()

    def close(self) -> None:
        """Leave."""
        self.client.disconnect()
        self.client.loop_stop()

    def expect(self, keys: list[Key]) -> Wait:
        """A sample that begins now."""
        with self._lock:
            below_w = {key: self.watt.get(key, float("inf")) - LOWER_W for key in keys}
            for node, _ in keys:
                for path in (node, node.rpartition("/")[0]):
                    self._paths[path] = self._paths.get(path, 0) + 1
            wait = Wait(time.monotonic(), below_w)
            self._of.update(dict.fromkeys(keys, wait))
            return wait

    def _on_message(self, client: Any, userdata: Any, message: mqtt.MQTTMessage) -> None:
        at_s, topic = time.monotonic(), message.topic
        with self._lock:
            if topic.startswith(FRAMES):
                path = topic[len(FRAMES) :]
                if path in self._paths or (path, 0) not in self.watt:
                    self._frame(path, json.loads(message.payload), at_s)
            elif topic.startswith(DAEMONS):
                self.role = json.loads(message.payload).get("role", "")
            elif topic[len(REQUESTS) :] in self._paths:
                self._request(topic[len(REQUESTS) :], json.loads(message.payload), at_s)

    def _frame(self, path: str, body: dict[str, Any], at_s: float) -> None:
        for number, watt in enumerate(body.get("gpu", {}).get("power_limit_w", ())):
            key = path, number
            self.watt[key] = watt
            wait = self._of.get(key)
            if wait is None or watt >= wait.below_w[key]:
                continue
            del self._of[key], wait.below_w[key]
            for name in (path, path.rpartition("/")[0]):
                self._paths[name] -= 1
                if not self._paths[name]:
                    del self._paths[name]
            if not wait.below_w:
                wait.done_s = at_s

    def _request(self, rack: str, body: dict[str, Any], at_s: float) -> None:
        if body["renewal"]:
            return
        for name in body["names"]:
            node, _, gpu = name.partition("/")
            wait = self._of.get((f"{rack}/{node}", int(gpu[3:])))
            if wait is not None and not wait.request_s:
                wait.request_s = at_s


class Play:
    """The site and its samples."""

    def __init__(self, task: ReactionLoad) -> None:
        self.task, self.dice = task, random.Random(1)
        self.trays = {
            f"{SITE}/r{rack + 1}/node{tray}": Tray(rack * TRAYS + tray)
            for rack in range(task.racks)
            for tray in range(TRAYS)
        }
        self.building = Building(task.racks)
        broker = Broker(HOST, task.port, "bench-agents")
        self.fleet = Fleet(self.trays, broker, before_step=self.building.step, state_dir=Path(task.state))
        self.observer = Observer(task.port)

    def run(self) -> None:
        """Both kinds; a line on standard output for each."""
        with self.fleet:
            self._ready()
            gpus = [(node, g) for node in self.trays for g in range(PER_TRAY)]
            hot = gpus[: self.task.hot_racks * PER_RACK]
            self.dice.shuffle(hot)
            waits = []
            for key in hot[: self.task.ordinary]:
                time.sleep(self.dice.uniform(0.0, 2.0 * self.task.ordinary_gap_s))
                waits.append(self._heat(key))
            self._tell("ordinary", waits)
            waits = []
            racks = range(self.task.hot_racks, self.task.racks)
            turns = [(rack, flow_lpm) for flow_lpm in DROPS for rack in racks]
            for rack, flow_lpm in turns[: self.task.urgent]:
                time.sleep(self.dice.uniform(0.0, 2.0 * self.task.urgent_gap_s))
                waits.append(self._drain(rack, flow_lpm))
            self._tell("urgent", waits)
        self.observer.close()

    def _ready(self) -> None:
        """The daemon leads, and the observer knows every GPU."""
        end, observer, gpus = time.monotonic() + READY_S, self.observer, len(self.trays) * PER_TRAY
        while len(observer.watt) < gpus or observer.role != "leader":
            if time.monotonic() > end:
                raise ConnectorError(
                    f"{len(observer.watt)} of {gpus} GPUs were heard within {READY_S:g} s, and the daemon is "
                    f"{observer.role or 'unheard of'}; expected all, and a leader"
                )
            time.sleep(0.05)
        time.sleep(self.task.settle_s)

    def _heat(self, key: Key) -> Wait:
        """A GPU is beyond its guard, and its agent says so."""
        path, number = key
        tray, node = self.trays[path], self.fleet.nodes[path]
        wait = self.observer.expect([key])
        tray.hot.add(number)
        at = current_instant()
        self.fleet.link.send(node.report(tray.sample(at.wall_ns), at))
        return wait

    def _drain(self, rack: int, flow_lpm: float) -> Wait:
        """A rack loses most of its flow, and its meter says so."""
        nodes = [f"{SITE}/r{rack + 1}/node{tray}" for tray in range(TRAYS)]
        wait = self.observer.expect([(node, g) for node in nodes for g in range(PER_TRAY)])
        self.building.flow_lpm[rack] = flow_lpm
        self.fleet.link.send(self.building.point(rack))
        return wait

    def _tell(self, kind: str, waits: list[Wait]) -> None:
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end and not all(w.done_s for w in waits):
            time.sleep(0.05)
        done = [w for w in waits if w.done_s]
        outcome = Outcome(
            kind,
            [w.done_s - w.begun_s for w in done],
            [w.request_s - w.begun_s for w in done if w.request_s],
            len(waits) - len(done),
        )
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """Read the load from the command line."""
    Play(msgspec.json.decode(sys.argv[1], type=ReactionLoad)).run()


if __name__ == "__main__":
    main()
