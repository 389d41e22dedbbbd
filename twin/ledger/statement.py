"""Statement: energy, GPU-hours, cost and carbon of hours, by site, hall, rack, queue, tenant or job.

Rows are sums of the same hourly rows, so that the parts of any division make the same whole, in whole
nanoseconds of GPU time. A meter's gain lasts: its error adds up over the hours as it is, all others by their
squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from twin.contracts import finite
from twin.ledger.gpu_time import TIME_CLASSES
from twin.ledger.hour_record import AMOUNT_AT, AMOUNTS, FIGURES, HourRecord, LedgerRow, MeteredSum
from twin.physics import J_PER_KWH, pue, tue, wue_l_per_kwh

BY = ("site", "hall", "rack", "queue", "tenant", "job")
HALF_90 = 1.645  # half of a normal 90 % interval, over 1 sigma
ALL_PU = 1.0 - 1e-6  # of an energy, from which on it is all of it but for rounding
RowFilter = Callable[[LedgerRow], bool]
_SIGMA, _VAR = AMOUNT_AT["sigma_j"], AMOUNT_AT["var_j2"]


class StatementRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line. `energy_pm_kwh`: half of the 90 % interval. `gpu_ns`: GPU time by class, exact; `granted_ns`:
    of jobs. Names are "" where the line is of no job: idle nodes, racks beside their nodes, cooling, losses.

    None is not known: all but the energy of a rack; a cost, carbon or energy of GPUs where none of the energy
    has a price, an intensity or a reading of the GPUs. `unpriced_kwh`, `uncounted_kwh` and `ungauged_kwh` say
    how much of it has none.
    """

    name: str
    part: str
    tenant: str = ""
    queue: str = ""
    account: str = ""
    energy_kwh: float
    energy_pm_kwh: float
    gpu_energy_kwh: float | None = None
    ungauged_kwh: float | None = None
    cost_usd: float | None = None
    unpriced_kwh: float | None = None
    carbon_kg: float | None = None
    uncounted_kwh: float | None = None
    granted_ns: int | None = None
    gpu_ns: dict[str, int] | None = None


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """`hours` are those with a record, `watched_ns` the time that they account for. PUE, TUE and WUE are over
    the time in which all that they need is measured; `_known_pu` is its share: where it is 0 they are None.
    """

    by: str
    begin_ns: int
    end_ns: int
    hours: int
    watched_ns: int
    total: StatementRow
    rows: tuple[StatementRow, ...]
    pue: float | None = None
    pue_known_pu: float = 0.0
    tue: float | None = None
    tue_known_pu: float = 0.0
    wue_l_per_kwh: float | None = None
    wue_known_pu: float = 0.0
    unmetered_node_h: float = 0.0
    refused_counters: int = 0


class _Sum:
    """Sums of a line over the hours: amounts; errors of gains are added at the end of an hour."""

    def __init__(self, row: LedgerRow) -> None:
        self.row, self.amounts = row, [0.0] * len(AMOUNTS)
        self.gpu_ns, self.granted_ns = [0] * len(TIME_CLASSES), 0
        self.sigma2_j2 = 0.0  # of the hour that is being added

    def add(self, row: LedgerRow) -> None:
        amounts = [getattr(row, name) for name in AMOUNTS]
        self.sigma2_j2 += row.sigma_j**2
        amounts[_SIGMA] = 0.0
        self.amounts = [a + b for a, b in zip(self.amounts, amounts, strict=True)]
        if row.gpu_ns:
            self.gpu_ns = [a + b for a, b in zip(self.gpu_ns, row.gpu_ns, strict=True)]
        if row.part == "job":
            self.granted_ns += sum(row.gpu_ns)

    def end_hour(self) -> None:
        self.amounts[_SIGMA] += float(np.sqrt(self.sigma2_j2))
        self.sigma2_j2 = 0.0

    def meter(self, found: MeteredSum, parts: Iterable[LedgerRow]) -> None:
        """Take the error of a whole from its own meters, which is less than that of the `parts` in it."""
        self.sigma2_j2 = found.sigma_j**2
        self.amounts[_VAR] += found.var_j2 - sum(row.var_j2 for row in parts)

    def line(self, name: str) -> StatementRow:
        """Return the line; of a rack its energy alone."""
        of = {name: self.amounts[at] for name, at in AMOUNT_AT.items()}
        row, energy_j = self.row, of["energy_j"]
        sigma_j = float(np.sqrt(of["sigma_j"] ** 2 + max(of["var_j2"], 0.0)))
        common: dict[str, Any] = {"name": name, "part": row.part, "tenant": row.tenant, "queue": row.queue,
                  "account": row.account, "energy_kwh": energy_j / J_PER_KWH,
                  "energy_pm_kwh": HALF_90 * sigma_j / J_PER_KWH}  # fmt: skip
        if row.part == "rack":
            return StatementRow(**common)

        def known(value: float, without_j: float) -> float | None:
            return None if without_j > 0.0 and without_j >= ALL_PU * energy_j else value

        return StatementRow(
            **common,
            # A part that is not of nodes has no GPUs to be read: it leaves a whole without readings unknown
            gpu_energy_kwh=None if of["ungauged_j"] > 0.0 >= of["gpu_j"] else of["gpu_j"] / J_PER_KWH,
            ungauged_kwh=of["ungauged_j"] / J_PER_KWH,
            cost_usd=known(of["cost_usd"], of["unpriced_j"]), unpriced_kwh=of["unpriced_j"] / J_PER_KWH,
            carbon_kg=known(1e-3 * of["carbon_g"], of["uncounted_j"]),
            uncounted_kwh=of["uncounted_j"] / J_PER_KWH, granted_ns=self.granted_ns,
            gpu_ns=dict(zip(TIME_CLASSES, self.gpu_ns, strict=True)),
        )  # fmt: skip


def _named(by: str, row: LedgerRow) -> tuple[str, LedgerRow]:
    """Return (name of a row's line, its further text)."""
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
    sides = {name: [0.0, 0.0, 0.0] for name in FIGURES}
    unmetered_s = 0.0
    count = watched_ns = refused = 0
    for hour in hours:
        if not begin_ns <= hour.begin_ns < end_ns:
            continue
        count, watched_ns = count + 1, watched_ns + hour.watched_ns
        for row in hour.rows:
            if holds is not None and not holds(row):
                continue
            name, said = _named(by, row)
            key = (name, said.part, said.queue, said.tenant, said.account)
            if key not in lines:
                lines[key] = _Sum(said)
            lines[key].add(row)
            total.add(row)
        if holds is None:
            total.meter(hour.site, hour.rows)
            if by in ("site", "hall"):
                _whole(lines, by, hour)
            for name, found in hour.racks.items():
                rack = racks.setdefault(name, _Sum(LedgerRow("", "rack")))
                rack.amounts[AMOUNT_AT["energy_j"]] += found.energy_j
                rack.meter(found, ())
            for name, ratio in hour.figures.items():
                parts = (ratio.over, ratio.under, ratio.known_ns)
                sides[name] = [a + b for a, b in zip(sides[name], parts, strict=True)]
        for line in (total, *lines.values(), *racks.values()):
            line.end_hour()
        unmetered_s += hour.unmetered_s
        refused += hour.refused
    whole = holds is None
    found_rows = [racks[n].line(n) for n in racks] if by == "rack" else [
        line.line(key[0]) for key, line in lines.items()
    ]  # fmt: skip
    found_rows.sort(key=lambda row: (row.part != "job", -row.energy_kwh, row.name))
    known = {name: min(of[2] / watched_ns, 1.0) if watched_ns else 0.0 for name, of in sides.items()}
    return Statement(
        by=by, begin_ns=begin_ns, end_ns=end_ns, hours=count, watched_ns=watched_ns,
        total=total.line(""), rows=tuple(found_rows),
        pue=finite(pue(*sides["pue"][:2])), pue_known_pu=known["pue"],
        tue=finite(tue(*sides["tue"][:2])), tue_known_pu=known["tue"],
        wue_l_per_kwh=finite(wue_l_per_kwh(sides["wue"][0], sides["wue"][1])), wue_known_pu=known["wue"],
        unmetered_node_h=unmetered_s / 3600.0 if whole else 0.0, refused_counters=refused if whole else 0,
    )  # fmt: skip


def _whole(lines: dict[tuple[str, ...], _Sum], by: str, hour: HourRecord) -> None:
    """Return the errors of the site, or of halls, by their own meters."""
    for key, line in lines.items():
        found = hour.site if by == "site" else hour.halls.get(key[0])
        if found is not None:
            line.meter(found, (r for r in hour.rows if by == "site" or r.hall == key[0]))
