"""Hour account: the energy and GPU time of the hour that runs, by hall and job, while it is not over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
from twin.ledger.hour_record import AMOUNT_AT, AMOUNTS, FIGURES, HourRecord, LedgerRow, MeteredSum, RatioSum
from twin.ledger.row_sums import exact_sums, row_sums
from twin.physics import J_PER_KWH
from twin.telemetry import EntityState, Sizes, column, scalar

HOUR_NS = 3_600 * 10**9
MAX_ROWS = 20_000  # of an hour; jobs beyond are one row for each hall, queue and tenant; source: estimate
OTHERS = "(others)"
Key = tuple[str, str, str, str, str, str]  # hall, part, queue, tenant, account, job
_NO_TIME, _NO_ENERGY = np.zeros((0, len(TIME_CLASSES)), np.int64), np.zeros((0, len(AMOUNTS)))


class AddedEnergy(NamedTuple):
    """Energies with the variances of gains and of gaps, and the GPUs' part of each, NaN: unknown [k]."""

    energy_j: F64
    sigma2: F64
    var_j2: F64
    gpu_j: F64


class HourAccount(EntityState):
    """Rows of the hour; `time_ns` [rows, classes], `amount` [rows, AMOUNTS]; sums of racks, halls and the
    site; both sides of each of FIGURES and the time of which they are known, `figures` [figures, 3].
    """

    begin_ns: int = scalar(0)  # of the hour; 0: none has begun
    watched_ns: int = scalar(0)
    rows: list[list[str]] = scalar([])
    time_ns: I64 = scalar(_NO_TIME)
    amount: F64 = scalar(_NO_ENERGY)
    rack: F64 = column("rack", "f8", lead=(3,), of_place=True)  # energy, sigma, variance
    hall: F64 = column("hall", "f8", lead=(3,), of_place=True)
    site: F64 = scalar(np.zeros(3))
    figures: F64 = scalar(np.zeros((len(FIGURES), 3)))
    unmetered_s: float = scalar(0.0)
    refused: int = scalar(0)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._place: dict[Key, int] = {}

    def derive(self) -> None:
        """Recompute the place of each row by its key."""
        self._place = {(k[0], k[1], k[2], k[3], k[4], k[5]): i for i, k in enumerate(self.rows)}

    def row(self, key: Key) -> int:
        """Return the place of a row; creates a new one."""
        found = self._place.get(key)
        if found is None and len(self.rows) >= MAX_ROWS and key[5] not in ("", OTHERS):
            return self.row((*key[:5], OTHERS))
        if found is None:
            found = self._place[key] = len(self.rows)
            self.rows.append(list(key))
            if found >= len(self.time_ns):  # in steps, as jobs come one by one
                more = max(64, len(self.time_ns))
                self.time_ns = np.vstack([self.time_ns, np.zeros((more, len(TIME_CLASSES)), np.int64)])
                self.amount = np.vstack([self.amount, np.zeros((more, len(AMOUNTS)))])
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
        """Move time of a row from idle, then busy, to CHECKPOINT or RESTART; returns the time moved."""
        assert at in (CHECKPOINT, RESTART)
        moved = 0
        for source in (IDLE, BUSY):
            part = min(wanted_ns - moved, int(self.time_ns[row, source]))
            self.time_ns[row, source] -= part
            moved += part
        self.time_ns[row, at] += moved
        return moved

    def add_energy(self, rows: I64, added: AddedEnergy, money: tuple[float, float]) -> None:
        """Add energies [k] to rows [k], with price and carbon intensity; NaN for one that is not known."""
        n = len(self.amount)

        def add(name: str, sums: F64) -> None:
            self.amount[:, AMOUNT_AT[name]] += sums

        energy_j = row_sums(rows, added.energy_j, n)
        add("energy_j", energy_j)
        add("sigma_j", np.sqrt(row_sums(rows, added.sigma2, n)))
        add("var_j2", row_sums(rows, added.var_j2, n))
        gauged = np.isfinite(added.gpu_j)
        add("gpu_j", row_sums(rows, np.where(gauged, added.gpu_j, 0.0), n))
        if not gauged.all():
            add("ungauged_j", row_sums(rows, np.where(gauged, 0.0, added.energy_j), n))
        for per_kwh, known, unknown in (
            (money[0], "cost_usd", "unpriced_j"),
            (money[1], "carbon_g", "uncounted_j"),
        ):
            if np.isfinite(per_kwh):
                add(known, energy_j * (per_kwh / J_PER_KWH))
            else:
                add(unknown, energy_j)

    def add_figure(self, name: str, over: float, under: float, known_ns: float) -> None:
        """Add to both sides of a figure of FIGURES where both are known."""
        self.figures[FIGURES.index(name)] += over, under, known_ns

    def record(self, names: Mapping[str, Sequence[str]]) -> HourRecord:
        """Return the record of the hour. `names`: of racks, halls and the site."""
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
            self.unmetered_s,
            self.refused,
            {name: RatioSum(*x) for name, x in zip(FIGURES, self.figures.tolist(), strict=True) if x[2]},
        )

    def begin(self, begin_ns: int) -> None:
        """Begin an empty hour."""
        self.begin_ns, self.watched_ns = begin_ns, 0
        self.rows, self._place = [], {}
        self.time_ns, self.amount = _NO_TIME.copy(), _NO_ENERGY.copy()
        self.rack[:], self.hall[:], self.site = 0.0, 0.0, np.zeros(3)
        self.figures = np.zeros((len(FIGURES), 3))
        self.unmetered_s, self.refused = 0.0, 0
