"""Statement: energy, GPU-hours, cost and carbon of hours, by site, hall, rack, queue, tenant or job.

Rows are sums of the same hourly rows, so that the parts of any division make the same whole, in whole
nanoseconds of GPU time. A meter's gain lasts: its error adds up over the hours as it is, all others by their
squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from twin.ledger.gpu_time import TIME_CLASSES
from twin.ledger.hour_record import HourRecord, LedgerRow, MeteredSum
from twin.physics import J_PER_KWH, pue, tue

BY = ("site", "hall", "rack", "queue", "tenant", "job")
HALF_90 = 1.645  # half of a normal 90 % interval, over 1 sigma
NS_PER_H = 3_600 * 10**9
RowFilter = Callable[[LedgerRow], bool]


class StatementRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line. `energy_pm_kwh`: half of the 90 % interval. `gpu_ns`: GPU time by class, exact; `granted_ns`:
    of jobs. Names are "" where the line is of no job: idle nodes, racks beside their nodes, cooling, losses.
    """

    name: str
    part: str
    tenant: str = ""
    queue: str = ""
    account: str = ""
    energy_kwh: float
    energy_pm_kwh: float
    gpu_energy_kwh: float
    cost_usd: float
    unpriced_kwh: float
    carbon_kg: float
    uncounted_kwh: float
    granted_ns: int
    gpu_ns: dict[str, int]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """`hours` are those with a record, `watched_ns` the time that they account for. PUE and TUE are None
    where a part of them is not measured; no signal tells of water, so there is no WUE.
    """

    by: str
    begin_ns: int
    end_ns: int
    hours: int
    watched_ns: int
    total: StatementRow
    rows: tuple[StatementRow, ...]
    pue: float | None = None
    tue: float | None = None
    wue_l_per_kwh: float | None = None
    unmetered_node_h: float = 0.0
    refused_counters: int = 0


@dataclass
class _Sum:
    """Sums of a line over the hours."""

    row: LedgerRow
    energy_j: float = 0.0
    sigma_j: float = 0.0
    var_j2: float = 0.0
    gpu_j: float = 0.0
    cost_usd: float = 0.0
    carbon_g: float = 0.0
    unpriced_j: float = 0.0
    uncounted_j: float = 0.0
    granted_ns: int = 0
    sigma2_j2: float = 0.0  # of the hour that is being added
    gpu_ns: list[int] | None = None

    def add(self, row: LedgerRow) -> None:
        self.energy_j += row.energy_j
        self.var_j2 += row.var_j2
        self.sigma2_j2 += row.sigma_j**2
        self.gpu_j += row.gpu_j
        self.cost_usd += row.cost_usd
        self.carbon_g += row.carbon_g
        self.unpriced_j += row.unpriced_j
        self.uncounted_j += row.uncounted_j
        held = self.gpu_ns or [0] * len(TIME_CLASSES)
        self.gpu_ns = [a + b for a, b in zip(held, row.gpu_ns or [0] * len(held), strict=True)]
        if row.part == "job":
            self.granted_ns += sum(row.gpu_ns)

    def end_hour(self) -> None:
        self.sigma_j += float(np.sqrt(self.sigma2_j2))
        self.sigma2_j2 = 0.0

    def meter(self, found: MeteredSum) -> None:
        """Take the error of a whole from its own meters, which is less than that of its parts."""
        self.sigma2_j2 = found.sigma_j**2
        self.var_j2 += found.var_j2

    def line(self, name: str) -> StatementRow:
        times = dict(zip(TIME_CLASSES, self.gpu_ns or [0] * len(TIME_CLASSES), strict=True))
        sigma_j = float(np.sqrt(self.sigma_j**2 + max(self.var_j2, 0.0)))
        return StatementRow(
            name=name, part=self.row.part, tenant=self.row.tenant, queue=self.row.queue,
            account=self.row.account,
            energy_kwh=self.energy_j / J_PER_KWH, energy_pm_kwh=HALF_90 * sigma_j / J_PER_KWH,
            gpu_energy_kwh=self.gpu_j / J_PER_KWH, cost_usd=self.cost_usd,
            unpriced_kwh=self.unpriced_j / J_PER_KWH, carbon_kg=1e-3 * self.carbon_g,
            uncounted_kwh=self.uncounted_j / J_PER_KWH, granted_ns=self.granted_ns, gpu_ns=times,
        )  # fmt: skip


def _named(by: str, row: LedgerRow) -> tuple[str, LedgerRow]:
    """(name of the line that a row belongs to, what the line says beside it)."""
    if by == "site":
        return "", LedgerRow("", "site")
    if by == "hall":
        return row.hall, LedgerRow(row.hall, "hall")
    if row.part != "job":
        return "", LedgerRow("", row.part)
    if by == "queue":
        return row.queue, LedgerRow("", "job", row.queue)
    if by == "tenant":
        return row.tenant, LedgerRow("", "job", tenant=row.tenant)
    return row.job, LedgerRow("", "job", row.queue, row.tenant, row.account, row.job)


def statement(
    hours: Iterable[HourRecord], by: str, begin_ns: int, end_ns: int, holds: RowFilter | None = None
) -> Statement:
    """The statement of the hours that begin in [begin_ns, end_ns). `holds`: the rows that the reader may see;
    None: all.
    """
    lines: dict[tuple[str, ...], _Sum] = {}
    total = _Sum(LedgerRow("", "site"))
    racks: dict[str, _Sum] = {}
    it_j = compute_j = unmetered_s = 0.0
    count = watched_ns = refused = 0
    computed = cooled = True
    for hour in hours:
        if not begin_ns <= hour.begin_ns < end_ns:
            continue
        count, watched_ns = count + 1, watched_ns + hour.watched_ns
        for row in hour.rows:
            if holds is not None and not holds(row):
                continue
            name, said = _named(by, row)
            key = (name, said.part, said.queue, said.tenant, said.account)
            lines.setdefault(key, _Sum(said)).add(row)
            total.add(row)
        if holds is None:
            total.var_j2 = total.var_j2 - sum(row.var_j2 for row in hour.rows)
            total.meter(hour.site)
            if by in ("site", "hall"):
                _whole(lines, by, hour)
            for name, found in hour.racks.items():
                rack = racks.setdefault(name, _Sum(LedgerRow("", "rack")))
                rack.energy_j += found.energy_j
                rack.meter(found)
        for line in (total, *lines.values(), *racks.values()):
            line.end_hour()
        it_j, compute_j, unmetered_s = (
            it_j + hour.it_j,
            compute_j + hour.compute_j,
            unmetered_s + hour.unmetered_s,
        )
        computed, cooled = computed and hour.compute_j > 0.0, cooled and hour.cooling_known
        refused += hour.refused
    whole = holds is None and count > 0
    found_rows = [racks[n].line(n) for n in racks] if by == "rack" else [
        line.line(key[0]) for key, line in lines.items()
    ]  # fmt: skip
    found_rows.sort(key=lambda row: (row.part != "job", -row.energy_kwh, row.name))
    return Statement(
        by=by, begin_ns=begin_ns, end_ns=end_ns, hours=count, watched_ns=watched_ns,
        total=total.line(""), rows=tuple(found_rows),
        pue=_figure(pue(total.energy_j, it_j)) if whole and cooled else None,
        tue=_figure(tue(total.energy_j, compute_j)) if whole and cooled and computed else None,
        unmetered_node_h=unmetered_s / 3600.0 if whole else 0.0, refused_counters=refused if whole else 0,
    )  # fmt: skip


def _whole(lines: dict[tuple[str, ...], _Sum], by: str, hour: HourRecord) -> None:
    """Errors of the site, or of halls, by their own meters."""
    for key, line in lines.items():
        found = hour.site if by == "site" else hour.halls.get(key[0])
        if found is not None:
            line.var_j2 -= sum(r.var_j2 for r in hour.rows if by == "site" or r.hall == key[0])
            line.meter(found)


def _figure(value: np.ndarray) -> float | None:
    found = float(value)
    return found if np.isfinite(found) else None
