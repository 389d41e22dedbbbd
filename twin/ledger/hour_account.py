"""Hour account: the energy and GPU time of the hour that runs, by hall and job, while it is not over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from twin.catalogue import F64, I64
from twin.ledger.gpu_time import (
    BUSY,
    CAPPED,
    CHECKPOINT,
    FREE,
    IDLE,
    RESTART,
    SEEN,
    THROTTLED,
    TIME_CLASSES,
    SeenTime,
)
from twin.ledger.hour_record import HourRecord, LedgerRow, MeteredSum
from twin.ledger.row_sums import exact_sums, row_sums
from twin.physics import J_PER_KWH
from twin.telemetry import EntityState, Sizes, column, scalar

HOUR_NS = 3_600 * 10**9
MAX_ROWS = 20_000  # of an hour; jobs beyond are one row for each hall, queue and tenant; source: estimate
OTHERS = "(others)"
Key = tuple[str, str, str, str, str, str]  # hall, part, queue, tenant, account, job
ENERGY, SIGMA, VAR, OF_GPUS, COST, CARBON, UNPRICED, UNCOUNTED = range(8)
_NO_TIME, _NO_ENERGY = np.zeros((0, len(TIME_CLASSES)), np.int64), np.zeros((0, 8))


class HourAccount(EntityState):
    """Rows of the hour; `time_ns` [rows, classes], `amount` [rows, 8]; sums of racks, halls and the site."""

    begin_ns: int = scalar(0)  # of the hour; 0: none has begun
    watched_ns: int = scalar(0)
    rows: list[list[str]] = scalar([])
    time_ns: I64 = scalar(_NO_TIME)
    amount: F64 = scalar(_NO_ENERGY)
    rack: F64 = column("rack", "f8", lead=(3,), of_place=True)  # energy, sigma, variance
    hall: F64 = column("hall", "f8", lead=(3,), of_place=True)
    site: F64 = scalar(np.zeros(3))
    it_j: float = scalar(0.0)
    compute_j: float = scalar(0.0)
    unmetered_s: float = scalar(0.0)
    refused: int = scalar(0)
    compute_known: bool = scalar(True)
    cooling_known: bool = scalar(True)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._place: dict[Key, int] = {}

    def derive(self) -> None:
        """The place of each row by its key."""
        self._place = {(k[0], k[1], k[2], k[3], k[4], k[5]): i for i, k in enumerate(self.rows)}

    def row(self, key: Key) -> int:
        """The place of a row, which is made where it is new."""
        found = self._place.get(key)
        if found is None and len(self.rows) >= MAX_ROWS and key[5] not in ("", OTHERS):
            return self.row((*key[:5], OTHERS))
        if found is None:
            found = self._place[key] = len(self.rows)
            self.rows.append(list(key))
            if found >= len(self.time_ns):  # in steps, as jobs come one by one
                more = max(64, len(self.time_ns))
                self.time_ns = np.vstack([self.time_ns, np.zeros((more, len(TIME_CLASSES)), np.int64)])
                self.amount = np.vstack([self.amount, np.zeros((more, 8))])
        return found

    def add_time(self, rows: I64, nodes: I64, span_ns: I64, granted: np.ndarray, seen: SeenTime) -> None:
        """Add time of nodes [k] in rows [k]: `span_ns` each, GPUs as `seen`; `granted`: a job held them."""
        n = len(self.time_ns)
        of_class = seen.gpus[nodes] * span_ns[:, None]
        for k, at in enumerate(SEEN):
            where = at
            if at == IDLE:
                free = exact_sums(rows[~granted], of_class[~granted, k], n)
                self.time_ns[:, FREE] += free
                rows_, part = rows[granted], of_class[granted, k]
            else:
                rows_, part = rows, of_class[:, k]
            self.time_ns[:, where] += exact_sums(rows_, part, n)

    def slow(self, rows: I64, seen: SeenTime) -> None:
        """Take the time in which GPUs of nodes were slowed out of the busy time of their rows [n_node]."""
        for at, slowed_ns in ((THROTTLED, seen.throttled_ns), (CAPPED, seen.capped_ns)):
            if slowed_ns.any():
                moved = np.minimum(exact_sums(rows, slowed_ns, len(self.time_ns)), self.time_ns[:, BUSY])
                self.time_ns[:, BUSY] -= moved
                self.time_ns[:, at] += moved

    def take_out(self, row: int, at: int, wanted_ns: int) -> int:
        """Move time of a row from idle, then busy, to CHECKPOINT or RESTART; returns how much there was."""
        assert at in (CHECKPOINT, RESTART)
        moved = 0
        for source in (IDLE, BUSY):
            part = min(wanted_ns - moved, int(self.time_ns[row, source]))
            self.time_ns[row, source] -= part
            moved += part
        self.time_ns[row, at] += moved
        return moved

    def add_energy(
        self, rows: I64, energy_j: F64, sigma2_j2: F64, var_j2: F64, gpu_j: F64, money: tuple[float, float]
    ) -> None:
        """Add energies [k] to rows [k], with price and carbon intensity; NaN for one that is not known."""
        n = len(self.amount)
        added = row_sums(rows, energy_j, n)
        self.amount[:, ENERGY] += added
        self.amount[:, SIGMA] += np.sqrt(row_sums(rows, sigma2_j2, n))
        self.amount[:, VAR] += row_sums(rows, var_j2, n)
        self.amount[:, OF_GPUS] += row_sums(rows, gpu_j, n)
        for per_kwh, known, unknown in (
            (money[0], COST, UNPRICED),
            (money[1], CARBON, UNCOUNTED),
        ):
            if np.isfinite(per_kwh):
                self.amount[:, known] += added * (per_kwh / J_PER_KWH)
            else:
                self.amount[:, unknown] += added

    def record(self, names: Mapping[str, Sequence[str]]) -> HourRecord:
        """The hour as it is kept. `names`: of racks, halls and the site."""
        rows = tuple(
            LedgerRow(key[0], key[1], key[2], key[3], key[4], key[5], tuple(time), *amount)
            for key, time, amount in zip(self.rows, self.time_ns.tolist(), self.amount.tolist(), strict=False)
            if any(time) or any(amount)
        )
        return HourRecord(
            self.begin_ns,
            self.watched_ns,
            MeteredSum(*self.site.tolist()),
            {name: MeteredSum(*self.hall[:, i].tolist()) for i, name in enumerate(names["hall"])},
            {name: MeteredSum(*self.rack[:, i].tolist()) for i, name in enumerate(names["rack"])},
            rows,
            self.it_j,
            self.compute_j if self.compute_known else 0.0,
            self.unmetered_s,
            self.refused,
            self.cooling_known,
        )

    def begin(self, begin_ns: int) -> None:
        """Begin an hour with nothing in it."""
        self.begin_ns, self.watched_ns = begin_ns, 0
        self.rows, self._place = [], {}
        self.time_ns, self.amount = _NO_TIME.copy(), _NO_ENERGY.copy()
        self.rack[:], self.hall[:], self.site = 0.0, 0.0, np.zeros(3)
        self.it_j = self.compute_j = self.unmetered_s = 0.0
        self.refused, self.compute_known, self.cooling_known = 0, True, True
