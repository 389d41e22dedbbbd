"""Simulated devices: GPUs that exist nowhere, for tests and demonstrations. NOT a measurement of anything.

Seeded. Each GPU draws what a made-up training job wants, up to its power limit, and warms by a first-order
law; a test may take its power, its link, its coolant or its flow away. Imports the agent's devices.
"""

from __future__ import annotations

import random
import threading
from typing import Any

from racktwin_agent.devices import (
    GPU_LOCK,
    HW_THERMAL,
    NODE_CAP,
    POWER_BRAKE,
    READBACK,
    Column,
    DeviceError,
    Key,
    Sample,
    short_bus_id,
)

IDLE_W, WANTED_W = 90.0, 880.0
K_PER_W, TAU_S = 0.028, 7.0
SLOWDOWN_C, SHUTDOWN_C = 89.0, 95.0
LOW_MHZ, HIGH_MHZ = 345.0, 1980.0
CLOCK_EXPONENT = 2.7  # of dynamic power over the clock; source: estimate


class SimulatedDevices:
    """`gpus` GPUs of one node. Public fields may change while it runs."""

    def __init__(
        self, gpus: int, seed: int = 0, low_w: float = 200.0, high_w: float = 1200.0, coolant_c: float = 33.0
    ) -> None:
        self.gpus, self.low_w, self.high_w, self.coolant_c = gpus, low_w, high_w, coolant_c
        self.load_pu = self.flow_pu = 1.0
        self.lost: set[int] = set()
        self.refuses = False
        self.lockable = True  # whether its clocks can be locked
        self.braked = False
        self.serial: list[str | None] = [None] * gpus  # nodes of one seed must not claim each other's devices
        self._dice = random.Random(seed)
        self._limit = [high_w] * gpus
        self._lock_mhz = [HIGH_MHZ] * gpus
        self._node_limit = high_w * gpus
        self._power = [IDLE_W] * gpus
        self._temp = [coolant_c] * gpus
        self._energy = [0] * gpus
        self._last_ns = 0
        self._lock = threading.Lock()

    def _step(self, t_ns: int) -> None:
        dt = min(max((t_ns - self._last_ns) / 1e9, 0.0), 60.0) if self._last_ns else 1.0
        self._last_ns = t_ns
        share = self._node_limit / max(self.gpus, 1)
        for i in range(self.gpus):
            clock = (self._lock_mhz[i] / HIGH_MHZ) ** CLOCK_EXPONENT
            wanted = IDLE_W + (WANTED_W - IDLE_W) * self.load_pu * clock + self._dice.gauss(0, 5)
            self._power[i] = max(IDLE_W, min(wanted, self._limit[i], share))
            leaves_k = self.flow_pu * (self._temp[i] - self.coolant_c)
            self._temp[i] += (self._power[i] * K_PER_W - leaves_k) * min(1.0, dt / TAU_S)
            self._energy[i] += round(self._power[i] * dt * 1e3)

    def sample(self, t_ns: int) -> Sample:
        """See Devices."""
        with self._lock:
            self._step(t_ns)
            capped = [self._limit[i] <= self._power[i] + 1 for i in range(self.gpus)]
            bits = [(4 if c else 0) | (POWER_BRAKE if self.braked else 0) for c in capped]
            bits = [b | (HW_THERMAL if t >= SLOWDOWN_C else 0) for b, t in zip(bits, self._temp, strict=True)]
            gpu: dict[str, Column] = {
                "power_w": [round(p, 1) for p in self._power],
                "temp_c": [round(t, 1) for t in self._temp],
                "util_pu": [self.load_pu] * self.gpus,
                "sm_clock_hz": [
                    min(1.98e9 * (p / WANTED_W) ** 0.4, 1e6 * m)
                    for p, m in zip(self._power, self._lock_mhz, strict=True)
                ],
                "power_limit_w": list(self._limit),
                READBACK[GPU_LOCK]: list(self._lock_mhz),
                "clock_event_bits": list(bits),
                "energy_mj": list(self._energy),
                "ecc_sbe_count": [0] * self.gpus,
            }
            for column in gpu.values():
                for i in self.lost:
                    column[i] = None
            node: dict[str, Column] = {
                "power_w": [round(sum(self._power) + 700, 1)],
                "power_cap_readback_w": [self._node_limit],
            }
        return Sample(t_ns, gpu, node, [SHUTDOWN_C] * self.gpus)

    def _number(self, key: Key) -> int | None:
        names = {f"gpu{i}": i for i in range(self.gpus)}
        return names.get(key.name) if key.control in READBACK else None

    def limits(self, key: Key) -> tuple[float, float] | None:
        """See Devices."""
        if key == Key(NODE_CAP, ""):
            return self.low_w * self.gpus, self.high_w * self.gpus
        if self._number(key) is None or (key.control == GPU_LOCK and not self.lockable):
            return None
        return (LOW_MHZ, HIGH_MHZ) if key.control == GPU_LOCK else (self.low_w, self.high_w)

    def get(self, key: Key) -> float | None:
        """See Devices."""
        if key == Key(NODE_CAP, ""):
            return self._node_limit
        at = self._number(key)
        return None if at is None or at in self.lost else self._settings(key)[at]

    def set(self, key: Key, value: float) -> None:
        """See Devices."""
        at = self._number(key)
        if self.refuses or at in self.lost:
            raise DeviceError(f"{key.name or 'the node'} refuses")
        with self._lock:
            if key == Key(NODE_CAP, ""):
                self._node_limit = value
            elif at is None:
                raise DeviceError(f"no {key.name}")
            else:
                self._settings(key)[at] = value

    def _settings(self, key: Key) -> list[float]:
        return self._lock_mhz if key.control == GPU_LOCK else self._limit

    def nvlinks(self) -> list[Any]:
        """See Devices."""
        return []

    def serials(self) -> list[str | None]:
        """See Devices: only the serials that a test sets."""
        return [None if i in self.lost else serial for i, serial in enumerate(self.serial)]

    def gpu_at(self, bus_id: str) -> int | None:
        """See Devices: GPU n is on bus n + 1."""
        wanted = short_bus_id(bus_id)
        return next((i for i in range(self.gpus) if short_bus_id(f"0:{i + 1:x}:0") == wanted), None)

    def close(self) -> None:
        """See Devices."""
