"""Demo pod: two simulated racks of GB200 NVL72, one of which loses its coolant for a minute.

Seeded and closed loop: it publishes as real devices would (BMS points and IT frames) and obeys its caps.
Waveforms and constants are plain; this is no physics model. The live demo (`demo_fleet`) moves the same pod
in real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connectors.agents import encode_json
from twin.catalogue import NS, START_NS
from twin.contracts import Decision
from twin.engine import Engine
from twin.run import Arrival, MessageSource
from twin.site import Site
from twin.telemetry import CommandAcked, Frame, Message

SECONDS, FAULT_AT, FAULT_UNTIL = 420, 120, 180
RACKS, GPUS = 2, 72
# Live, the story repeats: a minute of calm, 40 s without coolant in rack r2, recovery.
PERIOD_S, FAULT_AT_S, FAULT_S = 240, 60, 40
CAP = "gpu.power_cap_w"
SITE = """\
# A simulated pod, made by `racktwin demo`: two racks, one CDU, feeds A and B.
site: demo-pod
halls:
  - name: hall1
    racks: [{name: "r[1-2]", profile: gb200-nvl72}]
    cdus: [{name: cdu1, serves: ["r[1-2]"]}]
    feeders:
      - {name: busway-a, side: A, budget_w: 200000, serves: ["r[1-2]"]}
      - {name: busway-b, side: B, budget_w: 200000, serves: ["r[1-2]"]}
policies:
  thermal_guard: {authority: act}
"""
_POINTS = {
    "RackPower": "kW",
    "RackLiquidFlow": "LPM",
    "RackLiquidSupplyTemperature": "C",
    "RackLiquidReturnTemperature": "C",
}


class Pod:
    """The racks' state. Arrays are [rack, gpu] or [rack]."""

    def __init__(self, seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)
        self.temp_c = 52.0 + self.rng.normal(0, 1.0, (RACKS, GPUS))
        self.return_c = np.full(RACKS, 44.5)
        self.flow_lpm = np.full(RACKS, 96.0)
        self.energy_mj = np.zeros((RACKS, GPUS), np.int64)
        self.cap_w = np.full((RACKS, GPUS), 1200.0)
        self.power_w = np.zeros((RACKS, GPUS))
        self.rack_w = np.zeros(RACKS)
        self.level = 1.0

    def metadata(self, t_ns: int = START_NS) -> list[Message]:
        """Messages that the BMS retains."""
        out = []
        for rack in range(RACKS):
            for point, unit in _POINTS.items():
                body = {
                    "objectType": "Rack",
                    "pointType": point,
                    "engUnit": unit,
                    "rackLocationId": f"r{rack + 1}",
                    "rackLocationName": f"r{rack + 1}",
                }
                topic = f"BMS/v1/PUB/Metadata/Rack/{point}/demo/r{rack + 1}/{point}"
                out.append(Message(t_ns, topic, msgspec.json.encode(body)))
        return out

    def move(self, second: int, blocked: bool) -> None:
        """One second on; `blocked`: the last rack has no coolant."""
        rng = self.rng
        self.level = level = 0.55 if second % 56 >= 50 else 1.0  # training: 50 s of work, a dip of 6 s
        # A GPU at its cap is regulated around it: its meter never stands still
        noise = rng.normal(1.0, 0.006, (RACKS, GPUS))
        self.power_w = np.minimum(880.0 * level, self.cap_w) * noise
        self.flow_lpm += (np.array([96.0, 18.0 if blocked else 96.0]) - self.flow_lpm) * 0.2
        self.rack_w = self.power_w.sum(axis=1) + 24_000.0
        rise_k = 0.93 * self.rack_w / (self.flow_lpm / 60_000 * 1012 * 3950)
        self.return_c += (33.0 + rise_k - self.return_c) * 0.08
        resistance = 0.022 * (96.0 / self.flow_lpm[:, None]) ** 0.7
        aim_c = (33.0 + self.return_c)[:, None] / 2 + resistance * self.power_w
        self.temp_c += (aim_c - self.temp_c) / 8.0 + rng.normal(0, 0.1, (RACKS, GPUS))
        self.energy_mj += (self.power_w * 1000).astype(np.int64)

    def step(self, second: int) -> list[Message]:
        """One second on: the messages of that second, in order."""
        self.move(second, FAULT_AT <= second < FAULT_UNTIL)
        out: list[Message] = []
        for rack in range(RACKS):
            t_ns = START_NS + round((second - 0.6 + 0.1 * rack) * NS)
            out += [*self.points(rack, t_ns), self._frame(rack, t_ns)]
        return out

    def points(self, rack: int, t_ns: int) -> list[Message]:
        """Points of a rack on the BMS."""
        values = (float(self.rack_w[rack]) / 1e3, self.flow_lpm[rack], 33.0, self.return_c[rack])
        out = []
        for point, value in zip(_POINTS, values, strict=True):
            noisy = round(float(value * (1 + self.rng.normal(0, 0.0008))), 3)
            body = {"value": noisy, "timestamp": t_ns // 1_000_000, "quality": 1}
            out.append(
                Message(
                    t_ns, f"BMS/v1/PUB/Value/Rack/{point}/demo/r{rack + 1}/{point}", msgspec.json.encode(body)
                )
            )
        return out

    def _frame(self, rack: int, t_ns: int) -> Message:
        gpu: dict[str, Any] = {
            "155": np.round(self.power_w[rack], 1).tolist(),
            "150": np.round(self.temp_c[rack]).tolist(),
            "164": self.cap_w[rack].tolist(),
            "156": self.energy_mj[rack].tolist(),
            "util_pu": [self.level] * GPUS,
        }
        return Message(t_ns, f"IT/v1/PUB/Frame/demo-pod/hall1/r{rack + 1}", encode_json(t_ns, gpu))


class PodSource(MessageSource):
    """The pod's messages as a source of a replay, and an observer that hands the caps back to the pod.

    Works because frames are cut as arrivals are drawn: a second is simulated after the tick before it.
    """

    def __init__(self, site: Site, seconds: int = SECONDS, seed: int = 7, keep: Path | None = None) -> None:
        super().__init__([], site)
        self.pod, self.seconds, self.keep = Pod(seed), seconds, keep
        self._acks: list[CommandAcked] = []

    def __iter__(self) -> Iterator[Arrival]:
        kept: list[bytes] = []
        for second in range(self.seconds + 1):
            for message in self.pod.metadata() if second == 0 else self.pod.step(second):
                if self.keep is not None:
                    offset_s = round((message.t_ns - START_NS) / NS, 3)
                    kept.append(
                        msgspec.json.encode(
                            {
                                "offset_s": offset_s,
                                "topic": message.topic,
                                "payload": message.payload.decode(),
                            }
                        )
                    )
                if (arrival := self.take(message)) is not None:
                    yield arrival
            if self._acks:
                acks, self._acks = self._acks, []
                yield Arrival(START_NS + second * NS, list(acks))
        if self.keep is not None:
            self.keep.write_bytes(b"\n".join(kept) + b"\n")

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Obey what was commanded and say so; a repeated command is acknowledged again, as agents do."""
        for batch in decision.commands:
            if batch.control != CAP:
                continue
            self.pod.cap_w.reshape(-1)[batch.index] = batch.value
            if batch.renewal or batch.final:
                continue
            for k, entity in enumerate(batch.index.tolist()):
                self._acks.append(
                    CommandAcked(
                        control=CAP,
                        name=engine.site.name("gpu", entity),
                        generation=int(batch.generation[k]),
                        command=f"{batch.epoch}-{batch.command[k]}",
                        state="done",
                    )
                )
