"""Fault counts by device and code: the last ten minutes, day and 28 days, and the newest of each code.

One row per pair of device and reported code, in arrays; old rows are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from twin import kernels
from twin.catalogue import F32, I32, I64, NS, Bool
from twin.health.fault_codes import CATALOGUE, CLASSES, MAX_CODE
from twin.telemetry import OWN, OldOfNew, RareState, column, scalar

SPANS_S = (600, 86_400, 2_419_200)  # source: NVIDIA and gpud rules of thumb; lemon nodes (arXiv 2410.21680)
DAY_S = 86_400
BUCKET_S = (60, 3600, DAY_S)  # a span is counted in these, so it may be one of them longer
_N_BUCKETS = tuple(span // bucket + 1 for span, bucket in zip(SPANS_S, BUCKET_S, strict=True))
KEPT_ALIKE = 3  # of one device and code that are kept one by one
MAX_CODES, MAX_UNKNOWN = 32, 8  # of one device; what comes above is counted together as MAX_CODE
SPARE_PAIRS = 10_000
FADE_S = 86_400.0  # in which a decayed count falls to 1/e
REFRESH_S = 1e6  # after which decayed counts are written anew, long before they overflow
_COLUMNS = ("entity", "code", "row", "ring_at", "ring_heard", "ring_times")


class Batch(NamedTuple):
    """Faults of one table in order of arrival [k]. `row` is a place in the catalogue."""

    entity: I32
    code: I64
    row: I32
    at_ns: I64
    times: I64
    dated: Bool  # the device itself says when

    def some(self, index: Any) -> Batch:
        """Return a selection of the batch."""
        return Batch(self.entity[index], self.code[index], self.row[index], self.at_ns[index],
                     self.times[index], self.dated[index])  # fmt: skip


class FaultCounts(RareState):
    """The (device, code) pairs of one table of n entities."""

    now_ns: int = scalar(0)
    merged: int = scalar(0)  # codes for which there was no row of their own
    _faded: F32 = column(OWN, "f4", lead=(len(CLASSES),))  # as if all that followed faded backwards
    _faded_ns: int = scalar(0)  # when those were worth what they say

    def __init__(self, n: int, table: str = OWN, now_ns: int = 0) -> None:
        super().__init__({table: n}, table)
        self.n, self.now_ns, self._faded_ns = n, now_ns, now_ns
        self.version = 0  # changes with every change of what can be asked
        self._allocate(0)
        self.size = 0
        self._sorted: I64 = np.zeros(0, np.int64)  # keys, ascending
        self._pair_of_sorted: I32 = np.zeros(0, np.int32)
        self._per_device = np.zeros(n, np.uint8)  # pairs of each
        self.total = np.zeros((3, n), np.int64)  # faults that mean something, by span

    @property
    def most(self) -> int:
        """Return the largest number of pairs."""
        return 2 * self.n + SPARE_PAIRS

    def _allocate(self, capacity: int) -> None:
        self.entity, self.code = np.zeros(capacity, np.int32), np.zeros(capacity, np.int64)
        self.row = np.zeros(capacity, np.int32)
        self.ring_at = np.zeros((KEPT_ALIKE, capacity), np.int64)
        self.ring_heard = np.zeros((KEPT_ALIKE, capacity), np.int64)
        self.ring_times = np.zeros((KEPT_ALIKE, capacity), np.int32)
        self.buckets = [np.zeros((k, capacity), np.uint16) for k in _N_BUCKETS]
        self.sums = np.zeros((3, capacity), np.int64)

    def _grow(self, wanted: int) -> None:
        if wanted <= len(self.entity):
            return
        old, old_buckets, old_sums = {k: getattr(self, k) for k in _COLUMNS}, self.buckets, self.sums
        # All there can be, at once: memory is taken where it is written to, and in a storm nothing is moved.
        # Beyond the most there is one of each device for all other codes
        self._allocate(max(wanted, self.most + self.n))
        for name, values in old.items():
            getattr(self, name)[..., : self.size] = values[..., : self.size]
        for new, was in zip(self.buckets, old_buckets, strict=True):
            new[:, : self.size] = was[:, : self.size]
        self.sums[:, : self.size] = old_sums[:, : self.size]

    def advance(self, now_ns: int) -> None:
        """Drop counts that are older than their span."""
        if now_ns <= self.now_ns:
            return
        for span, (every_s, bucket) in enumerate(zip(BUCKET_S, self.buckets, strict=True)):
            was, now = self.now_ns // (every_s * NS), now_ns // (every_s * NS)
            if now == was:
                continue
            gone = np.arange(max(was + 1, now - len(bucket) + 1), now + 1) % len(bucket)
            if self.size:
                lost = bucket[gone, : self.size].sum(axis=0, dtype=np.int64)
                if lost.any():
                    bucket[gone, : self.size] = 0
                    self.sums[span, : self.size] -= lost
                    self.total[span] -= self._by_device(lost)
                    self.version += 1
        past = self.sums[2, : self.size] == 0
        if now_ns // (DAY_S * NS) != self.now_ns // (DAY_S * NS) and past.any():
            self.keep(~past)
        self.now_ns = now_ns

    def _by_device(self, values: I64) -> I64:
        """Return the sum over the significant pairs of each device [n]."""
        means = ~CATALOGUE.ignore[self.row[: self.size]]
        summed = np.bincount(self.entity[: self.size], np.where(means, values, 0), self.n)
        return summed.astype(np.int64)

    def add(self, batch: Batch, received_ns: int) -> Bool:
        """Count faults that are not older than the longest span; True where one is new [k].

        A fault of the same device and code at the same instant by the device's clock is the same one.
        """
        pair = self._pairs(batch)
        order = np.lexsort((batch.at_ns, pair))  # by pair, then by instant, then as they came
        fresh = np.empty(len(pair), np.bool_)
        rings = self.ring_at, self.ring_heard, self.ring_times
        columns = pair, batch.at_ns, batch.times
        kernels.keep_newest(order, *columns, batch.dated, *rings, fresh, received_ns)
        counted = fresh.copy()
        counted[fresh] = ~CATALOGUE.ignore[self.row[pair[fresh]]]
        for span, every_s in enumerate(BUCKET_S):
            into = self.buckets[span], self.sums[span], self.total[span]
            kernels.count_faults(*columns, batch.entity, fresh, counted, *into, every_s * NS, self.now_ns)
        self._fade(pair[fresh], batch.at_ns[fresh], batch.times[fresh])
        self.version += 1
        return fresh

    def _pairs(self, batch: Batch) -> I32:
        """Return the pair of each fault [k]; pairs that are missing are created."""
        key = batch.entity.astype(np.int64) * (MAX_CODE + 1) + batch.code
        wanted, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        found = self._look(wanted)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            found[missing] = self._make(wanted[missing], batch.row[first[missing]])
        return found[inverse]

    def _look(self, key: I64) -> I32:
        at = np.searchsorted(self._sorted, key)
        if not len(self._sorted):
            return np.full(len(key), -1, np.int32)
        at = np.minimum(at, len(self._sorted) - 1)
        return np.where(self._sorted[at] == key, self._pair_of_sorted[at], -1).astype(np.int32)

    def _make(self, key: I64, row: I32) -> I32:
        """Create pairs for new keys; without room, uses the pair for all other codes of the device."""
        entity = (key // (MAX_CODE + 1)).astype(np.int32)
        first = np.searchsorted(entity, entity)  # ascending, as the keys are
        place = np.arange(len(key)) - first + self._per_device[entity]
        most = np.where(row > 0, MAX_CODES, MAX_UNKNOWN)
        own = (place < most) & (np.arange(len(key)) < self.most - self.size)
        if own.all():
            return self._insert(key, row)
        other = entity[~own].astype(np.int64) * (MAX_CODE + 1) + MAX_CODE
        self.merged += len(other)
        wanted = np.unique(np.concatenate([key[own], other]))
        wanted = wanted[self._look(wanted) < 0]
        at = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
        self._insert(wanted, np.where(key[at] == wanted, row[at], 0))
        return self._look(np.where(own, key, entity.astype(np.int64) * (MAX_CODE + 1) + MAX_CODE))

    def _insert(self, key: I64, row: I32) -> I32:
        """Insert new pairs for these ascending keys; returns their places."""
        self._grow(self.size + len(key))
        new = np.arange(self.size, self.size + len(key), dtype=np.int32)
        self.entity[new], self.code[new] = key // (MAX_CODE + 1), key % (MAX_CODE + 1)
        self.row[new] = row
        at = np.searchsorted(self._sorted, key)
        self._sorted = np.insert(self._sorted, at, key)
        self._pair_of_sorted = np.insert(self._pair_of_sorted, at, new)
        self.size += len(key)
        count = np.bincount(self.entity[new], minlength=self.n)
        self._per_device = np.minimum(self._per_device + count, 255).astype(np.uint8)
        return new

    def _fade(self, pair: I32, at_ns: I64, times: I64) -> None:
        """Add faults to the decayed counts."""
        if self.now_ns - self._faded_ns > REFRESH_S * NS:
            self._faded *= np.float32(np.exp(-(self.now_ns - self._faded_ns) / NS / FADE_S))
            self._faded_ns = self.now_ns
        cell = CATALOGUE.kind[self.row[pair]].astype(np.int64) * self.n + self.entity[pair]
        worth = times * np.exp((at_ns - self._faded_ns) / NS / FADE_S)
        np.add.at(self._faded.reshape(-1), cell, worth.astype(np.float32))

    def keep(self, wanted: Bool) -> None:
        """Keep these pairs alone [size]."""
        kept = np.flatnonzero(wanted)
        data = {name: getattr(self, name)[..., kept] for name in _COLUMNS}
        self._take(data, [bucket[:, kept] for bucket in self.buckets])

    def _take(self, data: Mapping[str, Any], buckets: list[Any]) -> None:
        """Replace the columns, and rebuild all derived state."""
        self.size = len(data["entity"])
        for name in _COLUMNS:
            setattr(self, name, np.array(data[name], order="C"))
        self.buckets = [np.array(bucket, np.uint16, order="C") for bucket in buckets]
        self.sums = np.array([bucket.sum(axis=0, dtype=np.int64) for bucket in self.buckets])
        key = self.entity.astype(np.int64) * (MAX_CODE + 1) + self.code
        self._pair_of_sorted = np.argsort(key, kind="stable").astype(np.int32)
        self._sorted = key[self._pair_of_sorted]
        self.total = np.array([self._by_device(some) for some in self.sums])
        count = np.bincount(self.entity, minlength=self.n)
        self._per_device = np.minimum(count, 255).astype(np.uint8)
        self.version += 1

    def by_class(self, out: F32) -> F32:
        """Write decayed counts by class into `out` [n_class, n]."""
        keep = np.float32(np.exp(-(self.now_ns - self._faded_ns) / NS / FADE_S))
        return np.multiply(self._faded, keep, out=out)

    def forget(self, table: str, entity: int) -> None:
        """Clear the counts of this slot for a new device."""
        super().forget(table, entity)
        if table == self.table:
            self.keep(self.entity[: self.size] != entity)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the pairs of devices that stay."""
        super().adopt(old, old_of_new)
        source = old_of_new[self.table]
        new_of_old = np.full(old.n, -1, np.int32)
        new_of_old[source[source >= 0]] = np.flatnonzero(source >= 0)
        entity = new_of_old[old.entity[: old.size]]
        kept = np.flatnonzero(entity >= 0)
        data = {name: getattr(old, name)[..., kept] for name in _COLUMNS} | {"entity": entity[kept]}
        self._take(data, [bucket[:, kept] for bucket in old.buckets])

    def lately(self, codes: tuple[int, ...], since_ns: int) -> I32:
        """Return the devices with one of these codes after an instant, ascending."""
        new = np.zeros(self.size, np.bool_)
        for received_ns in self.ring_heard:  # in order of the devices' times
            new |= received_ns[: self.size] > since_ns
        some = np.flatnonzero(new)
        return np.unique(self.entity[some[np.isin(self.code[some], codes)]]).astype(np.int32)

    def last_ns(self, kind: str) -> I64:
        """Return the last report of a code of this kind [n], by the devices' own times; 0 = never."""
        out = np.zeros(self.n, np.int64)
        some = np.flatnonzero(CATALOGUE.kind[self.row[: self.size]] == CLASSES.index(kind))
        np.maximum.at(out, self.entity[some], self.ring_at[-1, some])
        return out

    def of(self, entity: int) -> I32:
        """Return the pairs of a device."""
        first, last = np.searchsorted(self._sorted, np.array([entity, entity + 1]) * (MAX_CODE + 1))
        return self._pair_of_sorted[first:last]

    def dump(self) -> dict[str, Any]:
        """Return the whole state, for a snapshot or a checksum."""
        columns = {name: np.ascontiguousarray(getattr(self, name)[..., : self.size]) for name in _COLUMNS}
        buckets = [np.ascontiguousarray(bucket[:, : self.size]) for bucket in self.buckets]
        codes = CATALOGUE.code[columns.pop("row")]  # places in the catalogue change with its version
        return super().dump() | columns | {"known": codes, "buckets": buckets}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; earlier versions named the devices with decayed counts `faded_of`."""
        super().restore({"index": data.get("faded_of"), **data})
        rows = CATALOGUE.rows(np.asarray(data["known"]), self.table)
        self._take({**data, "row": rows}, data["buckets"])
