"""CDU sections: the CDUs that one tick examines, with the racks and GPUs that they cool.

A site is looked at in turns, each CDU once in `LOOK_S`, so that no tick is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32, NS
from twin.contracts import View
from twin.site import Site
from twin.telemetry import GOOD

Rows = slice | I32

LOOK_S = 10.0  # between two looks at a CDU


@dataclass(frozen=True, slots=True)
class LoopCdus:
    """The CDUs of one decision: those of a loop, which follows the coldest; or one without a loop."""

    number: int
    loop: int  # -1: none is known
    cdus: I32
    racks: I32
    gpus: I32
    nodes: I32
    halls: I32


@dataclass(frozen=True, slots=True)
class CduSection:
    """Some CDUs of a site, and their loads, all by ascending row.

    `cdu_of_rack`, `cdu_of_gpu` and `rack_of_gpu` are places within `cdus` and `racks`; `at_racks` and
    `at_gpus` pick the rows of a column.
    """

    site: Site
    cdus: I32
    racks: I32
    gpus: I32
    cdu_of_rack: I32
    cdu_of_gpu: I32
    rack_of_gpu: I32
    at_racks: Rows
    at_gpus: Rows


def section_of(site: Site, groups: Sequence[LoopCdus]) -> CduSection:
    """Return the section of some groups."""
    cdus, racks, gpus = (
        np.sort(np.concatenate([np.zeros(0, np.int32), *(getattr(g, name) for g in groups)]))
        for name in ("cdus", "racks", "gpus")
    )
    place = np.zeros(max(site.sizes["cdu"], site.sizes["rack"]), np.int32)
    place[cdus] = np.arange(len(cdus))
    cdu_of_rack = place[site.cdu_of_rack[racks]]
    place[racks] = np.arange(len(racks))
    rack_of_gpu = place[site.rack_of_gpu[gpus]]
    places = cdu_of_rack, cdu_of_rack[rack_of_gpu], rack_of_gpu
    return CduSection(site, cdus, racks, gpus, *places, _rows_of(racks), _rows_of(gpus))


def _rows_of(index: I32) -> Rows:
    """Return consecutive rows as a slice, which reads without a copy."""
    if len(index) and int(index[-1]) - int(index[0]) + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def turn_of(groups: Sequence[LoopCdus], then_ns: int, now_ns: int) -> list[LoopCdus]:
    """Return the groups whose turn comes between two instants, with the same number of GPUs in each tick."""
    period_ns = round(LOOK_S * NS)
    gpus = np.array([len(g.gpus) for g in groups], np.int64)
    phase_ns = (period_ns * (np.cumsum(gpus) - gpus)) // max(int(gpus.sum()), 1)
    due = (now_ns - phase_ns) // period_ns > (then_ns - phase_ns) // period_ns
    return [group for group, its in zip(groups, due.tolist(), strict=True) if its]


def good(view: View, key: str, rows: Rows | None = None) -> F64:
    """Return current readings [n], or those of some rows; NaN elsewhere."""
    value, quality = view.believed(key), view.quality(key)
    if rows is not None:
        value, quality = value[rows], quality[rows]
    return np.where(quality == GOOD, value, np.nan).astype(np.float64)


def last_good(view: View, key: str) -> F64:
    """Return the last good readings [n] as long as they are timely by their own cadence; NaN elsewhere.

    A bad reading leaves the one before it in force: a set point stays as it is when a message is lost.
    """
    return np.where(view.lately_good(key), view.believed(key), np.nan).astype(np.float64)
