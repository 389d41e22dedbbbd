"""History sample: the values of one tick that the history keeps, as plain immutable arrays.

The daemon's loop takes the sample, so it only copies. The writer threads resolve names later.

Expected values are in separate tables beside the measured ones. A query names them `rack.power_w/expected`
and `rack.power_w/band`, which is half of the 90 % band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from twin.catalogue import F32, F64, I64, Signal, find_signal
from twin.contracts import Z90
from twin.diagnosis import measured_signal
from twin.engine import Engine
from twin.run.history_chunks import NO_COUNT, quality_words
from twin.site import Site
from twin.telemetry import GOOD, STALE, TableState

BALANCE = "balance"  # its rows are sums of feeders and racks, no entities
END, BAND = "/expected", "/band"  # of a table's name, and of a signal's


@dataclass(slots=True)
class Layout:
    """The names of a site's entities, in the order of their indices; spelled out when first asked for."""

    site: Site
    _names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The site's hash, which names this layout."""
        return self.site.spec_hash

    def names(self, table: str) -> list[str]:
        """Full paths of a table's entities."""
        found = self._names.get(table)
        if found is None:
            found = self._names[table] = self._spell(table)
        return found

    def _spell(self, table: str) -> list[str]:
        if table in ("node", "gpu"):
            above = "rack" if table == "node" else "node"
            start = self.site.node_start_of_rack if table == "node" else self.site.gpu_start_of_node
            parents, sizes = self.names(above), np.diff(start).tolist()
            return [f"{p}/{table}{k}" for p, n in zip(parents, sizes, strict=True) for k in range(n)]
        return [self.site.name(table, i) for i in range(self.site.sizes[table])]


@dataclass(frozen=True, slots=True)
class TableSample:
    """One table: gauges [k, n], NaN (with the quality inside) where not good; totals [c, n], -1 for none."""

    table: str
    gauges: tuple[str, ...]
    value: F32
    counters: tuple[str, ...]
    total: I64


@dataclass(frozen=True, slots=True)
class Sample:
    """All tables at one instant. `bad_cells` counts what was not good, of the rows that are kept."""

    t_ns: int
    layout: Layout
    tables: tuple[TableSample, ...]
    bad_cells: int
    expected: tuple[TableSample, ...] = ()  # beside the tables: what was expected of them, with its bands

    @property
    def size_bytes(self) -> int:
        """Bytes in memory."""
        return sum(t.value.nbytes + t.total.nbytes for t in (*self.tables, *self.expected))

    @property
    def points(self) -> int:
        """Readings in it, gaps included."""
        return sum(t.value.size + t.total.size for t in self.tables)


def take_sample(engine: Engine, layout: Layout, now_ns: int, expected: Sequence[str] = ()) -> Sample:
    """Copy the last readings with their quality, and the expected values of these tables."""
    tables, bad_cells = [], 0
    for name, state in engine.state.tables.items():
        taken, bad = _take_table(name, state, now_ns)
        if taken is not None:
            tables.append(taken)
            bad_cells += bad
    beside = [_take_expected(engine, name) for name in expected]
    return Sample(now_ns, layout, tuple(tables), bad_cells, tuple(t for t in beside if t is not None))


def _take_expected(engine: Engine, table: str) -> TableSample | None:
    rows = expected_rows(engine, table)
    if rows is None:
        return None
    return TableSample(table + END, *rows, (), np.zeros((0, rows[1].shape[1]), np.int64))


def _take_table(name: str, state: TableState, now_ns: int) -> tuple[TableSample | None, int]:
    gauges = np.flatnonzero(state.bad_count < state.n)
    counters = [r for r in range(len(state.counters)) if state.n and state.raw[r].max() >= 0]
    if state.n == 0 or (len(gauges) == 0 and not counters):
        return None, 0
    value, bad_cells = state.value[gauges], 0
    for k, row in enumerate(gauges.tolist()):
        timely = state.timely(row, now_ns)
        if not state.bad_count[row] and timely is None:
            continue
        quality = state.quality[row]
        if timely is not None:
            quality = np.where((quality == GOOD) & ~timely, np.uint8(STALE), quality)
        quality_words(value[k], quality)
        bad_cells += int(np.count_nonzero(quality))
    total = state.total[counters]
    for k, row in enumerate(counters):
        silent = state.raw[row] < 0
        timely = state.timely(row + len(state.signals), now_ns)
        if timely is not None:
            silent |= ~timely
        if silent.any():
            total[k][silent] = NO_COUNT
            bad_cells += int(np.count_nonzero(silent))
    for array in (value, total):
        array.flags.writeable = False
    return TableSample(
        name,
        tuple(state.signals[r].name for r in gauges.tolist()),
        value,
        tuple(state.counters[r].name for r in counters),
        total,
    ), bad_cells


def stored_key(key: str) -> tuple[str, str] | None:
    """(table, key) under which the store keeps what a question asks for; None if that is nothing."""
    name, slash, what = key.partition("/")
    signal = find_signal(name)
    if signal is None or (slash and (what not in ("expected", "band") or signal.kind == "counter")):
        return None
    if not slash:
        return signal.table, key
    return signal.table + END, f"{signal.table}{END}.{signal.name}{BAND if what == 'band' else ''}"


def recorded_signal(key: str) -> Signal | None:
    """The signal of a key as stored or as asked; None if there is none."""
    table, dot, name = key.partition(".")
    return find_signal(table.removesuffix(END) + dot + name.removesuffix(END).removesuffix(BAND))


def expected_columns(engine: Engine, table: str) -> dict[str, tuple[F64, F64]]:
    """(expected, 1 sigma) [n] by signal of a table, of those of which anything is expected now."""
    expected: dict[str, F64] = {}
    sigma: dict[str, F64] = {}
    for name, residual in engine.estimator.residuals.items():
        of, _, rest = name.partition(".")
        signal = find_signal(f"{of}.{measured_signal(name)}")
        if of != table or rest == BALANCE or signal is None:
            continue
        # Of several comparisons of a signal, the first that is learned
        was, known = expected.get(signal.name), sigma.get(signal.name)
        if was is None or known is None:
            expected[signal.name], sigma[signal.name] = residual.expected.copy(), residual.sigma.copy()
            continue
        better = (np.isnan(known) & np.isfinite(residual.sigma)) | np.isnan(was)
        was[better], known[better] = residual.expected[better], residual.sigma[better]
    return {n: (values, sigma[n]) for n, values in expected.items() if np.isfinite(values).any()}


def expected_rows(engine: Engine, table: str) -> tuple[tuple[str, ...], F32] | None:
    """(names, values [k, n]) of what is expected of a table now; None where nothing is."""
    columns = expected_columns(engine, table)
    if not columns:
        return None
    rows = [(n, values) for n, (values, _) in columns.items()]
    rows += [(n + BAND, Z90 * sigma) for n, (_, sigma) in columns.items()]
    values = np.stack([_in_quanta(f"{table}.{n.removesuffix(BAND)}", v) for n, v in rows])
    return tuple(n for n, _ in rows), values


def _in_quanta(key: str, values: F64) -> F32:
    """Values in whole quanta of their signal, as the store packs them well."""
    signal = find_signal(key)
    if signal is None or signal.quantum <= 0:
        return values.astype(np.float32)
    quantum = np.float32(signal.quantum)
    return np.rint(values / np.float64(quantum)).astype(np.float32) * quantum
