"""Settings of devices: the values of leases, below the ceilings of a contingency while one stands.

Only this file changes a device. While a ceiling stands, what leases want is held back and given when it goes.
The power of the node is a setting too. Imports the agent's devices, power and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from racktwin_agent.devices import GPU_LOCK, DeviceError, Devices, Key
from racktwin_agent.power import NODE_POWER, Power
from racktwin_agent.stored import number, text

TOLERANCE = 0.5  # a setting this close is the same: devices round to what they can do


class Settings:
    """The settings of one node. `held`: the value that each device under a ceiling would otherwise have, and
    that a device without a ceiling has not taken back yet."""

    def __init__(self, devices: Devices, power: Power | None = None) -> None:
        self.devices, self.power = devices, power or Power()
        self.ceilings: dict[Key, float] = {}
        self.held: dict[Key, float] = {}
        self._locks: set[Key] = set()  # clock locks that this run set or removed

    def of(self, key: Key) -> Devices | Power:
        """Return the owner of a setting."""
        return self.power if key == NODE_POWER else self.devices

    def put(self, key: Key, value: float) -> bool:
        """Set a device within its ceiling; returns False if the value waits. Raises DeviceError."""
        ceiling = self.ceilings.get(key)
        if ceiling is None:
            self.held.pop(key, None)
            self._set(key, value)
            return True
        self.held[key] = value
        self._set(key, min(value, ceiling))
        return value <= ceiling

    def remember(self, ceilings: Mapping[Key, float]) -> None:
        """Store the present settings before ceilings lower them."""
        for key in ceilings:
            if key not in self.held:
                found = self.devices.get(key)
                if found is not None:
                    self.held[key] = found

    def lower(self, ceilings: Mapping[Key, float]) -> list[str]:
        """Put ceilings in force, or replace them; returns the failures. Never raises a setting above its
        wanted value."""
        self.remember(ceilings)
        failed = self._give_back([k for k in self.ceilings if k not in ceilings])
        for key, ceiling in ceilings.items():
            before = self.ceilings.get(key)
            self.ceilings[key] = ceiling
            try:
                wanted = self.held.get(key)
                if wanted is None or wanted > ceiling or (before is not None and ceiling > before):
                    self._set(key, ceiling if wanted is None else min(wanted, ceiling))
            except DeviceError as error:
                failed.append(str(error))
        return failed

    def enforce(self) -> list[str]:
        """Lower settings that exceed their ceiling again, after a failure or a change by others, and give
        back what could not be given back so far; returns the failures."""
        failed = self._give_back([key for key in self.held if key not in self.ceilings])
        for key, ceiling in self.ceilings.items():
            found = self.devices.get(key)
            if found is not None and found > ceiling + TOLERANCE:
                self.held.setdefault(key, found)  # it could not be read when the ceiling came
                try:
                    self.devices.set(key, ceiling)
                except DeviceError as error:
                    failed.append(str(error))
        return failed

    def release(self) -> list[str]:
        """Remove all ceilings and set the waiting values; returns the failures."""
        return self._give_back(list(self.ceilings))

    def _give_back(self, keys: list[Key]) -> list[str]:
        failed = []
        for key in keys:
            self.ceilings.pop(key, None)
            wanted = self.held.pop(key, None)
            if wanted is None:
                continue
            try:
                self._set(key, wanted)
            except DeviceError as error:
                failed.append(str(error))
                self.held[key] = wanted  # tried again
        return failed

    def _set(self, key: Key, value: float) -> None:
        found = self.of(key).get(key)
        # A lock that an earlier run set reads as none, so the first value of this run is set in any case.
        unsure = key.control == GPU_LOCK and key not in self._locks
        if found is None or unsure or abs(found - value) > TOLERANCE:
            self.of(key).set(key, value)
            if unsure:
                self._locks.add(key)

    def dump(self) -> dict[str, Any]:
        """Return the state that a restart needs: ceilings in force, and the values behind them."""
        return {
            "ceilings": [[*k, v] for k, v in self.ceilings.items()],
            "held": [[*k, v] for k, v in self.held.items()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from `dump`. Raises KeyError, TypeError or ValueError if it is invalid."""
        self.ceilings = {Key(text(c), text(n)): number(v) for c, n, v in data["ceilings"]}
        self.held = {Key(text(c), text(n)): number(v) for c, n, v in data["held"]}
