"""Local triggers: lost power supply input, power brake, lost broker, overheating GPUs.

Each trigger has its evidence. An input that could never be read is no trigger: it is unknown, and reported as
such.
Imports the agent's clock, contingency, devices and overheating.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from racktwin_agent.clock import NS, Instant
from racktwin_agent.contingency import HEAT
from racktwin_agent.devices import HW_SLOWDOWN, POWER_BRAKE
from racktwin_agent.overheating import Overheating


@dataclass(frozen=True, slots=True)
class PsuInput:
    """Source for the input of a power supply: a file, or a command with status 0 for yes and 1 for no.

    A file's text is compared with `lost`; with `min` its number must be at least that.
    """

    name: str
    file: str = ""
    command: tuple[str, ...] = ()
    lost: tuple[str, ...] = ("0", "lost", "offline")
    min: float | None = None
    timeout_s: float = 5.0

    def read(self) -> bool | None:
        """Return True with input, False without, None if unknown."""
        return self._run() if self.command else self._look()

    def _run(self) -> bool | None:
        try:
            done = subprocess.run(self.command, timeout=self.timeout_s, check=False, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return {0: True, 1: False}.get(done.returncode)

    def _look(self) -> bool | None:
        try:
            with open(Path(self.file), encoding="utf-8") as file:
                text = file.read(256).strip()
            return float(text) >= self.min if self.min is not None else text.lower() not in self.lost
        except (OSError, ValueError):
            return None


def read_water_inlet(file: Path) -> float | None:
    """Return the temperature of the incoming coolant, degC; None if it cannot be read.

    source: Linux, Documentation/hwmon/sysfs-interface: temp*_input is in millidegrees Celsius
    """
    try:
        with open(file, encoding="utf-8") as text:
            temp_c = float(text.read(64)) / 1e3
    except (OSError, ValueError):
        return None
    return temp_c if -50.0 <= temp_c <= 150.0 else None


def read_inputs(inputs: tuple[PsuInput, ...]) -> dict[str, bool | None]:
    """Return all inputs by name."""
    return {x.name: x.read() for x in inputs}


@dataclass(slots=True)
class Watch:
    """Derives the present triggers from readings. Times are since boot.

    `supplies`: the names of those whose input is read. One without input that cannot be read has none still:
    many fall silent with it.
    """

    broker_gone_s: float = 60.0
    power_brake_s: float = 2.0
    lost: dict[str, bool | None] = field(default_factory=dict)
    heat: Overheating | None = None
    supplies: tuple[str, ...] = ()
    _without: set[str] = field(default_factory=set)
    _apart_ns: int | None = None
    _braked_ns: int | None = None
    _bits: int = 0

    def resume(self, trigger: str, at: Instant) -> None:
        """Take a trigger of before a restart for present until a reading shows otherwise."""
        if trigger == "psu_lost":
            self._without = set(self.supplies)
        elif trigger == "broker_gone":
            self._apart_ns = at.boot_ns - round(self.broker_gone_s * NS) - 1
        elif trigger == "power_brake":
            self._braked_ns = at.boot_ns - round(self.power_brake_s * NS)

    def connected(self, is_connected: bool, at: Instant) -> None:
        """Note the connection to the broker, or its loss."""
        if is_connected:
            self._apart_ns = None
        elif self._apart_ns is None:
            self._apart_ns = at.boot_ns

    def clocks(self, bits: int, at: Instant) -> None:
        """Note the clock-event bits of the node's GPUs."""
        if bits & (HW_SLOWDOWN | POWER_BRAKE):
            self._bits = bits
            if self._braked_ns is None:
                self._braked_ns = at.boot_ns
        else:
            self._braked_ns = None

    def inputs(self, found: dict[str, bool | None]) -> list[str]:
        """Note the inputs of the power supplies; return those that changed."""
        said = []
        for name, has_input in found.items():
            if name not in self.lost or self.lost[name] is not has_input:
                word = {True: "has input", False: "lost its input", None: "cannot be read"}[has_input]
                if has_input is not True or name in self.lost:
                    said.append(f"power supply {name} {word}")
        self.lost = found
        self._without = {
            name
            for name, has_input in found.items()
            if has_input is False or (has_input is None and name in self._without)
        }
        return said

    def present(self, at: Instant) -> dict[str, str]:
        """Return the present triggers with their evidence."""
        out = {}
        if self._without:
            out["psu_lost"] = f"no input at {', '.join(sorted(self._without)[:8])}"
        if self._braked_ns is not None and at.boot_ns - self._braked_ns >= self.power_brake_s * NS:
            out["power_brake"] = f"clock events {self._bits:#x}"
        if self.heat is not None and self.heat.evidence:
            out[HEAT] = self.heat.evidence
        if self._apart_ns is not None and at.boot_ns - self._apart_ns > self.broker_gone_s * NS:
            out["broker_gone"] = f"for {(at.boot_ns - self._apart_ns) / NS:.0f} s"
        return out
