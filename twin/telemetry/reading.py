"""Decoded readings: a decoder's output for the Inbox, in core units, and the reasons why a message gave none.

Connectors make these, `twin.telemetry.inbox` takes them. Knows neither wire nor site.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Message(NamedTuple):
    """One message as received: `t_ns` is its time of arrival (UTC), not the device's time."""

    t_ns: int
    topic: str
    payload: bytes


class Reading(NamedTuple):
    """One value of one entity, in core units.

    `value` None is an explicit "no reading" (a null on the wire); `trusted` False a value that its source
    marks as not good. `t_ns` is the device's time, UTC.
    """

    table: str
    entity: int
    signal: str
    value: float | None
    t_ns: int
    trusted: bool = True


@dataclass(slots=True)
class Block:
    """Many signals of a contiguous run of entities at one instant: the fast path of batched sources.

    `values` is float32 [len(signals), n], NaN for "no reading"; `counts` is int64 [len(counters), n],
    negative for "no reading". The entities are `start .. start + n - 1`.
    """

    table: str
    start: int
    signals: tuple[str, ...]
    values: NDArray[np.float32]
    counters: tuple[str, ...]
    counts: NDArray[np.int64]
    t_ns: int


ELSEWHERE = "mirrored by the daemon of another part of the site"
OWN_MESSAGE = "own"  # the kind of a message that racktwin itself published


class Ignored(NamedTuple):
    """A well-formed message that is not used: `what` is its kind (a DSX point type), `why` the reason.

    `remedy` is what a person can do about it; without one it is routine.
    """

    what: str
    why: str
    remedy: str = ""


class Names(Protocol):
    """Lookup of a site's names, for decoders."""

    def entity(self, table: str, name: str) -> int | None:
        """Return the index of the entity with this full path or unique local name, or None."""
        ...


def nowhere(_name: str) -> bool:
    """Return False for every name: the site is not divided."""
    return False


class NamedSite(Names, Protocol):
    """Indices of a site's entities by name, and their names."""

    def name(self, table: str, index: int) -> str:
        """Return the full path of an entity."""
        ...
