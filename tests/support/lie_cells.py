"""Cells of the table of lies: each a signal that a simulated site measures, a kind of lie, and its extent.

A signal "rack.*" stands for all that a table reports, "bms.*" for all that the building's gateway does, and
"agent.*" for all of the agents. A cell of time has such a signal: its messages come with other stamps, at
another time, or twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tests.support.lying_sensors import Change, Lie
from twin.catalogue import F32, F64, Bool, find_signal
from twin.site import Site

BEGIN_S = 10  # of a lie, after the run began
PAST_S = 120  # of what was read before, which a replay brings again
BMS, AGENT = ("rack", "cdu", "feeder", "loop", "hall", "site"), ("node", "gpu")
SIDES = {"bms": BMS, "agent": AGENT}
Past = Sequence[Mapping[str, F32 | F64]]  # second -> key -> all values that were read last

VALUE_KINDS = (
    "x10", "x1.5", "x0.1", "zero", "negative", "nan", "frozen", "swapped", "replayed", "leap", "drift",
    "spikes",
)  # fmt: skip
MANY_KINDS = ("x10", "x0.1", "zero", "nan", "frozen", "swapped", "replayed")  # of more than one device
SELDOM_KINDS = ("x10", "zero", "nan", "frozen")  # of signals that no policy goes by
STATE_KINDS = ("flipped", "nan")
MAIN = (
    "rack.power_w", "feeder.power_w", "gpu.power_w", "node.power_w", "gpu.temp_c", "gpu.power_limit_w",
    "rack.flow_lpm", "cdu.flow_lpm", "rack.supply_temp_c", "rack.return_temp_c", "cdu.supply_temp_c",
    "loop.supply_temp_c", "node.psu1_power_w", "gpu.hbm_temp_c",
)  # fmt: skip
# Of the entities of a table; of "one", the first number is which
FIRST = {"gpu": 5, "node": 1}
DRIFT_PU = 0.01  # of the first value, each second
SPIKE_EVERY_S, SPIKE_S = 8, 2
TIME_KINDS = (
    "back_10s", "back_1h", "ahead_10s", "ahead_1h", "stands", "late_10s", "late_60s", "stamps_jitter",
    "out_of_order", "twice", "replayed_old",
)  # fmt: skip
TIME_EXTENTS = ("one", "rack", "bms", "all")


class Cell(NamedTuple):
    """`signal`: table and signal; `kind` of the lie; `extent`: one, rack, or all of its table."""

    signal: str
    kind: str
    extent: str

    @property
    def key(self) -> str:
        return " ".join(self)

    @property
    def of_time(self) -> bool:
        return self.signal == "time.*"


def value_cells(measured: Sequence[str]) -> list[Cell]:
    """All cells of the values of these signals, those that policies go by first."""
    out: list[Cell] = []
    rest = [key for key in measured if key not in MAIN]
    for key in (*MAIN, *rest):
        signal = find_signal(key)
        is_state = signal is not None and signal.kind == "state"
        kinds = STATE_KINDS if is_state else VALUE_KINDS if key in MAIN else SELDOM_KINDS
        out += [Cell(key, kind, "one") for kind in kinds]
    for key in (*MAIN, "bms.*", "agent.*"):
        table = key.partition(".")[0]
        extents = {
            "gpu": ("rack", "all"),
            "node": ("rack", "all"),
            "agent": ("one", "rack", "all"),
            "loop": (),
        }
        out += [Cell(key, kind, extent) for extent in extents.get(table, ("all",)) for kind in MANY_KINDS]
    out += [Cell(key, "flipped", "all") for key in rest if key.endswith(("leak_state", "energised_state"))]
    return out


def time_cells() -> list[Cell]:
    """All cells of time."""
    return [Cell("time.*", kind, extent) for kind in TIME_KINDS for extent in TIME_EXTENTS]


def entities_of(site: Site, table: str, cell: Cell) -> tuple[int, ...]:
    """Those that lie."""
    n, first = site.sizes[table], FIRST.get(table, 0)
    if cell.extent == "one" and cell.kind == "swapped" and n > 1:
        # With that of another rack, or of the feeder of the other side
        step = n // site.sizes["rack"] if table in ("gpu", "node") else 1
        return (first, (first + step) % n)
    if cell.extent == "one":
        return (first,)
    if cell.extent == "rack" and table == "gpu":
        return tuple(np.flatnonzero(site.rack_of_gpu == 0).tolist())
    if cell.extent == "rack" and table == "node":
        return tuple(np.flatnonzero(site.rack_of_node == 0).tolist())
    return tuple(range(n))


def tables_of(cell: Cell) -> Sequence[str]:
    """The tables of which something lies."""
    if cell.of_time:
        return {"bms": BMS, "all": (*BMS, *AGENT)}.get(cell.extent, AGENT)
    table = cell.signal.partition(".")[0]
    return SIDES.get(table, (table,))


def own_gpus(site: Site, cell: Cell) -> Bool:
    """GPUs [n_gpu] that the lying sensors belong to; of those above a rack it is none."""
    out: Bool = np.zeros(site.sizes["gpu"], np.bool_)
    at = {"rack": site.rack_of_gpu, "node": site.node_of_gpu, "gpu": np.arange(len(out))}
    for table in tables_of(cell):
        if table in at:
            out |= np.isin(at[table], entities_of(site, table, cell))
    return out


def lies_of(cell: Cell, site: Site, measured: Sequence[str], past: Past) -> list[Lie]:
    """The lies of a cell of values."""
    keys = [cell.signal]
    if cell.signal.endswith("*"):
        keys = [k for k in measured if k.partition(".")[0] in tables_of(cell)]
    out: list[Lie] = []
    for key in keys:
        table, _, name = key.partition(".")
        at = entities_of(site, table, cell)
        signal = find_signal(key)
        if cell.signal.endswith("*") and signal is not None and signal.kind == "state":
            continue
        out.append(Lie(table, name, at, _change(cell.kind, key, at, past), BEGIN_S))
    return out


def _change(kind: str, key: str, at: tuple[int, ...], past: Past) -> Change:
    """The change of values [k] of the entities `at` of a signal."""
    if kind == "frozen":
        return _frozen()
    if kind == "replayed":
        here = np.array(at)
        return lambda old, second: past[second % len(past)].get(key, past[0][key])[here].astype(old.dtype)
    factor = {"x10": 10.0, "x1.5": 1.5, "x0.1": 0.1, "negative": -1.0}.get(kind)
    if factor is not None:
        return lambda old, _: old * old.dtype.type(factor)
    value = {"zero": 0.0, "nan": np.nan, "out_of_range": 1e9}.get(kind)
    if value is not None:
        return lambda old, _: np.full_like(old, value)
    warm = key.endswith("temp_c")
    others: dict[str, Callable[[F32, int], F32]] = {
        "swapped": lambda old, _: np.roll(old, 1),
        "flipped": lambda old, _: 1.0 - np.minimum(old, 1.0),
        "leap": lambda old, s: old + (25.0 if warm else old) * (s % 4 < 2),
        "drift": lambda old, s: old + s * (0.5 if warm else DRIFT_PU * old),
        "spikes": lambda old, s: np.where(s % SPIKE_EVERY_S < SPIKE_S, old * 3.0, old).astype(old.dtype),
    }
    return others[kind]


def _frozen() -> Change:
    kept: list[F32] = []

    def change(old: F32, _: int) -> F32:
        if not kept:
            kept.append(old.copy())
        return np.where(np.isfinite(kept[0]), kept[0], old)

    return change
