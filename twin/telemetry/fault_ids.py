"""Fault ids: ids of known faults, so that a repeated delivery counts once, even after a storm.

Kept as numbers in two generations: when the younger is full, the older is forgotten as a whole. Imports
events and their columns.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twin.telemetry.events import FaultReported
from twin.telemetry.fault_columns import FaultColumns

KEPT = 200_000  # the last ids are remembered, at times twice as many
Answer = Literal["new", "again", "reused"]


class FaultIds:
    """Known fault ids, with a checksum of the fault that used each."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def receive(self, event: FaultReported) -> Answer:
        """Note a fault with an id: whether it is new, the same once more, or another one under its id.

        When it happened does not distinguish two: an agent that reads its log again may date it otherwise.
        """
        return self.receive_all(FaultColumns.of([event]))[0]

    def receive_all(self, faults: FaultColumns) -> list[Answer]:
        """Check many faults, in order of arrival; one without an id is new."""
        named = faults.mark >= 0
        keys, marks = faults.key.view(np.uint64)[named].tolist(), faults.mark[named].tolist()
        young, old = self._young, self._old
        apart = len(young) + len(keys) <= self.kept and len(set(keys)) == len(keys)
        if apart and young.keys().isdisjoint(keys) and old.keys().isdisjoint(keys):
            young.update(zip(keys, marks, strict=True))
            return ["new"] * len(faults)
        answers = (self._receive(key, mark) for key, mark in zip(keys, marks, strict=True))
        return [next(answers) if has_id else "new" for has_id in named.tolist()]

    def _receive(self, key: int, mark: int) -> Answer:
        known = self._young.get(key)
        if known is None:
            known = self._old.get(key)
        if known is not None:
            return "again" if known == mark else "reused"
        if len(self._young) >= self.kept:
            self._young, self._old = {}, self._young
        self._young[key] = mark
        return "new"

    def dump(self) -> dict[str, NDArray[np.uint64]]:
        """Return the whole state, for a snapshot or a checksum: [k, 2] of each generation."""
        return {name: _pairs(ids) for name, ids in (("young", self._young), ("old", self._old))}

    def restore(self, data: dict[str, NDArray[np.uint64]]) -> None:
        """Take over what `dump` gave."""
        self._young, self._old = (dict(zip(*data[name].T.tolist(), strict=True)) for name in ("young", "old"))


def _pairs(ids: dict[int, int]) -> NDArray[np.uint64]:
    out = np.empty((len(ids), 2), np.uint64)
    out[:, 0] = np.fromiter(ids.keys(), np.uint64, len(ids))
    out[:, 1] = np.fromiter(ids.values(), np.uint64, len(ids))
    return out
