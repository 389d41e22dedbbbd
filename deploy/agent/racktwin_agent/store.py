"""State store of an agent: one small JSON file, replaced as a whole, and a lock that admits one agent.

Imports nothing of the agent.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Protocol


class Store(Protocol):
    """Keeps the last state that it was given."""

    def load(self) -> dict[str, Any] | None:
        """Return the state, or None if there is none. Raises ValueError if it cannot be read."""
        ...

    def save(self, state: dict[str, Any], durable: bool) -> None:
        """Store the state. When this returns, it survives the end of the process, and with `durable` a
        loss of power. Raises OSError."""
        ...


class MemoryStore:
    """Keeps the state in memory only: for simulated fleets."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def load(self) -> dict[str, Any] | None:
        """See Store."""
        return self.state

    def save(self, state: dict[str, Any], durable: bool) -> None:
        """See Store."""
        self.state = state


class FileStore:
    """A file in a folder of its own. Raises OSError if the folder is unusable or another agent uses it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "state.json"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._folder)
            raise OSError(error.errno, "another agent uses this folder", str(folder)) from None

    def load(self) -> dict[str, Any] | None:
        """See Store."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        state = json.loads(text)
        if not isinstance(state, dict):
            raise ValueError(f"{self.path}: expected an object")
        return state

    def put_aside(self) -> Path:
        """Move an unreadable state away; returns its new path."""
        aside = self.path.with_suffix(".unreadable")
        os.replace(self.path, aside)
        return aside

    def save(self, state: dict[str, Any], durable: bool) -> None:
        """See Store."""
        new = self.path.with_suffix(".new")
        with open(new, "wb") as file:
            file.write(json.dumps(state, separators=(",", ":")).encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, self.path)
        if durable:
            os.fsync(self._folder)

    def close(self) -> None:
        """Release the folder for another agent."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
