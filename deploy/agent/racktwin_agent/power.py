"""Power of the node, as far as its own agent can stop it: runs a program once for each order.

Nothing runs that the configuration does not enable. An order is noted first; whoever drives the node calls
`run` once its answer had time to leave. A node cannot switch itself on. Imports the agent's devices.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from racktwin_agent.devices import POWER, DeviceError, Key

NODE_POWER = Key(POWER, "")
LEVELS = ("on", "shutdown", "off")
ON, STOP, OFF = range(3)
# source: systemctl(1): twice forced, the node is off at once, and nothing is ended or unmounted
COMMANDS = {STOP: ("systemctl", "poweroff"), OFF: ("systemctl", "poweroff", "--force", "--force")}


class Power:
    """The level ordered in this boot, and the programs of the enabled levels."""

    def __init__(self, commands: Mapping[int, tuple[str, ...]] | None = None) -> None:
        self.commands = dict(commands or {})
        self.level = ON
        self.why = self._news = ""  # the last order failed; and nobody knows yet
        self._due: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def limits(self, key: Key) -> tuple[float, float]:
        """Return the range of levels, as for a device."""
        return ON, OFF

    def get(self, key: Key) -> float:
        """Return the ordered level, as for a device."""
        return self.level

    def refuse(self, value: float) -> str | None:
        """Reason why an order is not carried out here, or None."""
        if value not in range(len(LEVELS)):
            return f"{value:g} is no state of a node's power"
        if value < self.level:
            return f"{LEVELS[self.level]} of this node was ordered: it cannot keep itself on"
        if value > self.level and value not in self.commands:
            return f"{LEVELS[int(value)]} is not enabled here: see [power] of the agent's configuration"
        return None

    def set(self, key: Key, value: float) -> None:
        """Note an order. Raises DeviceError for an order that is not enabled here."""
        if why := self.refuse(value):
            raise DeviceError(why)
        if value > self.level:
            self.level, self.why = int(value), ""
            self._due = self.commands[self.level]

    @property
    def is_due(self) -> bool:
        """Return True while an order waits for its program."""
        return bool(self._due)

    def columns(self) -> dict[str, Any]:
        """Return the read-back if a level is enabled; a node that sends it is not off."""
        return {"power_readback_state": [min(self.level, STOP)]} if self.commands else {}

    def run(self) -> str:
        """Run the program of the waiting order; returns a sentence for the log."""
        command, self._due = self._due, ()
        what = f"{LEVELS[self.level]} of this node: {' '.join(command)}"
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL)  # fmt: skip
        except (OSError, ValueError) as error:
            self._fail(f"{command[0]}: {getattr(error, 'strerror', None) or error}")
        return what

    def failure(self) -> str:
        """Return the reason that the last order failed, once: its program did not run or ended with an
        error."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if code != 0:
                self._fail(f"its program ended with status {code}")
        news, self._news = self._news, ""
        return news

    def _fail(self, why: str) -> None:
        self.level, self.why, self._news = ON, why, why


@runtime_checkable
class Powered(Protocol):
    """Simulated devices with a power of their node."""

    power: Power
