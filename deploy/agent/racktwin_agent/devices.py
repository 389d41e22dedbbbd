"""Interface to the devices of a node: samples as columns, and settings with limits.

`nvml.py` is the real thing, `simulated.py` a stand-in; whoever drives a fleet may bring another. Imports
nothing of the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Column = list[float | int | None]
GPU_CAP, NODE_CAP, POWER = "gpu.power_cap_w", "node.power_cap_w", "node.power_state"
GPU_LOCK = "gpu.clock_lock_mhz"
INLET = "water_inlet_temp_c"  # of a node
READBACK = {GPU_CAP: "power_limit_w", GPU_LOCK: "clock_lock_readback_mhz"}  # of each GPU
# Clock-event bits: hardware slowdown, that for heat, and power brake by an outside signal.
HW_SLOWDOWN, HW_THERMAL, POWER_BRAKE = 0x08, 0x40, 0x80


class DeviceError(Exception):
    """A device cannot be reached or refuses; the text says which and why."""


class Key(NamedTuple):
    """One setting: a control, and the name of the device within the node (`gpu3`; "" is the node itself)."""

    control: str
    name: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One instant of all devices: signal -> one value per device in order, None where there is none.

    `shutdown_c`: temperature at which each GPU shuts itself down.
    """

    t_ns: int
    gpu: Mapping[str, Column]
    node: Mapping[str, Column] = field(default_factory=dict)
    shutdown_c: Column = field(default_factory=list)

    def clock_bits(self) -> int:
        """Return the clock-event bits of all GPUs, combined."""
        bits = 0
        for value in self.gpu.get("clock_event_bits", ()):
            bits |= int(value or 0)
        return bits


class Devices(Protocol):
    """The devices of one node. Calls may come from two threads: one samples, the other sets."""

    gpus: int

    def sample(self, t_ns: int) -> Sample:
        """Return all values that can be read now. Never raises: an unreadable value is None."""
        ...

    def limits(self, key: Key) -> tuple[float, float] | None:
        """Return the range of a setting; None without such a device or setting."""
        ...

    def get(self, key: Key) -> float | None:
        """Return the value of a setting; None where it cannot be read."""
        ...

    def set(self, key: Key, value: float) -> None:
        """Change a setting. Raises DeviceError."""
        ...

    def nvlinks(self) -> list[Any]:
        """Return the counts of the NVLinks of each GPU (`nvlinks.GpuLinks`), in order; empty without
        NVLinks."""
        ...

    def serials(self) -> list[str | None]:
        """Return the serial of each GPU, in order; None where it cannot be read now."""
        ...

    def gpu_at(self, bus_id: str) -> int | None:
        """Return the GPU at a PCI address such as `0000:41:00`, or None."""
        ...

    def close(self) -> None:
        """Release the devices; settings stay."""
        ...


def settings(devices: Devices) -> list[Key]:
    """Return all settings of these devices, in order."""
    keys = [Key(control, f"gpu{i}") for control in READBACK for i in range(devices.gpus)]
    return [k for k in (*keys, Key(NODE_CAP, "")) if devices.limits(k) is not None]


def readbacks(devices: Devices, controls: set[str]) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return the columns of GPUs and of the node that read these controls back."""
    gpu: dict[str, Column] = {}
    node: dict[str, Column] = {}
    for control, signal in READBACK.items():
        if control in controls:
            gpu[signal] = [devices.get(Key(control, f"gpu{i}")) for i in range(devices.gpus)]
    if NODE_CAP in controls:
        node["power_cap_readback_w"] = [devices.get(Key(NODE_CAP, ""))]
    return gpu, node


def short_bus_id(text: str) -> str:
    """Return a PCI address in the form `0000:41:00`, also for `00000000:41:00.0` and `41:00`."""
    parts = text.strip().lower().split(".", 1)[0].split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    try:
        domain, bus, device = (int(p, 16) for p in parts)
    except ValueError:
        return text.strip().lower()
    return f"{domain:04x}:{bus:02x}:{device:02x}"
