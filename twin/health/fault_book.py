"""The fault book: what devices reported of themselves, per device and code, bounded.

May import events, the site and the catalogue of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from twin.events import FaultReported
from twin.frame import F32, I32, I64, U8
from twin.site import Site


class Heard(NamedTuple):
    """A fault as it was heard."""

    at_ns: int
    heard_ns: int
    code: int
    times: int
    detail: str


class FaultBook:
    """Faults by device. Tables: gpu (XIDs), switch and node (SXIDs, codes of agents), others as they come."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.counts: dict[str, int] = {}

    def hear(self, events: Sequence[FaultReported], now_ns: int) -> bool:
        """Take in faults in order of arrival; True if one of them wants to be judged at once."""
        return False

    def within(self, table: str, span_s: float) -> I32:
        """Faults that mean something within the last 600, 86,400 or 2,419,200 s [n]."""
        return np.zeros(self.site.sizes[table], np.int32)

    def repeated(self, table: str) -> tuple[I32, I32, I32]:
        """(entity ascending, code, count) of codes that came MOST_ALIKE times or more within 24 h."""
        none = np.zeros(0, np.int32)
        return none, none, none

    def open_action(self, table: str) -> U8:
        """The strongest action that the codes ask for and that nothing since has done [n]: 0 = none."""
        return np.zeros(self.site.sizes[table], np.uint8)

    def open_code(self, table: str) -> I32:
        """The code behind it [n]; 0 = none."""
        return np.zeros(self.site.sizes[table], np.int32)

    def open_since_ns(self, table: str) -> I64:
        """When it was heard [n]; 0 = none."""
        return np.zeros(self.site.sizes[table], np.int64)

    def by_class(self) -> tuple[tuple[str, ...], F32]:
        """(names of classes, decayed counts of the last day [n_class, n_gpu])."""
        return (), np.zeros((0, self.site.sizes["gpu"]), np.float32)

    def of(self, table: str, entity: int) -> tuple[Heard, ...]:
        """The last faults of a device, the newest last."""
        return ()

    def resolve(self, table: str, index: I32, upto: int, now_ns: int) -> None:
        """What asked for an action of at most this place in ACTIONS is done for these entities."""

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> FaultBook:
        """What is known, for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new."""
        return FaultBook(site)

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
