"""Audit: checks that a forecast does not change when rows after its origin do, so that it never looks ahead.

Rows after an origin are replaced, once by gaps and once by wild values, everything is forecast again, and
compared with what was said before. Columns that are known ahead stay. A backtest runs this every time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from models.load import SeriesPanel
from twin.catalogue import F64, I64, Bool, TwinError

SPOILS = ("gaps", "wild values")
WILD = 1e6  # times the greatest value: what no rule that reads it could overlook. source: estimate
# Of the greater of two numbers: sums taken in another order differ by less. source: estimate
SAME = 1e-7


class LookAhead(TwinError):
    """A forecast knew of rows after its origin: nothing that was scored with it can be believed."""

    def __init__(self, who: str, row: int, seen: str) -> None:
        self.who, self.row = who, row
        super().__init__(f"look ahead: {who} forecast otherwise from row {row} when {seen}")


def spoil(panel: SeriesPanel, row: int, how: str) -> SeriesPanel:
    """A copy of `panel` whose values after `row` are gaps or wild values (of SPOILS)."""
    values = panel.values.copy()
    rest = values[row + 1 :]
    if how == "gaps":
        rest[:] = np.nan
    else:
        greatest = np.nanmax(np.abs(values), initial=1.0)
        steps = np.arange(rest.size, dtype=np.float64).reshape(rest.shape)
        rest[:] = WILD * greatest * (1.0 + steps / 7.0) * np.where(steps % 2 == 0, 1.0, -1.0)
    return SeriesPanel(panel.start_ns, panel.step_s, values, panel.names, panel.zone, panel.known)


def differ(one: F64, other: F64) -> Bool:
    """Mask of the places at which two arrays of one shape differ. NaN equals NaN."""
    gap = np.isnan(one) & np.isnan(other)
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= SAME * np.maximum(np.abs(one), np.abs(other))
    out: Bool = ~(gap | near | (one == other))
    return out


def check_points(names: tuple[str, ...], origins: I64, before: F64, again: F64, how: str) -> None:
    """Raise LookAhead if experts say otherwise. before, again [n_expert, n_horizon, n_origin, n]."""
    wrong = differ(before, again)
    for name, cells in zip(names, wrong, strict=True):
        row = np.asarray(cells.any(axis=(0, 2)))
        if row.any():
            # The last origin lies next to the rows that were replaced.
            raise LookAhead(name, int(origins[np.flatnonzero(row)[-1]]), f"later rows became {how}")


def check_issued(who: str, origins: I64, before: F64, again: F64, how: str) -> None:
    """Raise LookAhead if the issued forecasts [n_origin, ...] differ."""
    apart = differ(before, again)
    wrong = np.asarray(apart.any(axis=tuple(range(1, apart.ndim))))
    if wrong.any():
        raise LookAhead(who, int(origins[np.flatnonzero(wrong)[-1]]), f"later rows became {how}")


def check_fit(name: str, cut: int, before: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]) -> None:
    """Raise LookAhead if a fit on the rows before `cut` gave other parameters when later rows differ."""
    same = before.keys() == again.keys() and all(
        before[key].shape == again[key].shape
        and not differ(before[key].astype(np.float64), again[key].astype(np.float64)).any()
        for key in before
    )
    if not same:
        raise LookAhead(f"the fit of {name}", cut - 1, "later rows were replaced")
