"""Errors of racktwin, by their cause and by the reaction of the daemon.

Imports nothing. Every message names the place, the value found and the value expected. `ConfigError` collects
all faults of a file, so that an operator can correct them at once.
"""

from __future__ import annotations


class TwinError(Exception):
    """Anything that racktwin raises on purpose."""


class ConfigError(TwinError):
    """The operator's file is wrong: refuse to start, naming file, key, value and expectation."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class BadMessage(TwinError):
    """A device sent nonsense: count it, sample it to the log, carry on."""


class ConnectorError(TwinError):
    """A link is down: back off and restart that connector only."""


class ActuationError(TwinError):
    """A sink refused or timed out: a negative acknowledgement, retried while the lease lives."""


class StorageError(TwinError):
    """A trace or journal cannot be read or written; carries the file and the byte position."""


class Divergence(TwinError):
    """A replay decided differently: names the first differing tick and field."""

    def __init__(self, tick: int, field: str, recorded: object, replayed: object) -> None:
        self.tick, self.field, self.recorded, self.replayed = tick, field, recorded, replayed
        super().__init__(
            f"replay differs at tick {tick}, field {field}: recorded {recorded!r}, replayed {replayed!r}"
        )


class ContractError(TwinError):
    """A plug-in broke its contract: it is suspended and its intervals hold until their lease ends."""
