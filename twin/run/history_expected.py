"""Expected values in the history: of each compared signal what was expected, and half of its 90 % band.

They lie in tables of their own beside the measured ones. A question asks for `rack.power_w/expected`, and for
`rack.power_w/band`.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, F64, Signal, find_signal
from twin.contracts import Z90
from twin.diagnosis import measured_signal
from twin.engine import Engine

BALANCE = "balance"  # its rows are sums of feeders and racks, no entities
END, BAND = "/expected", "/band"  # of a table's name, and of a signal's


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


def expected_rows(engine: Engine, table: str) -> tuple[tuple[str, ...], F32] | None:
    """(names, values [k, n]) of what is expected of a table now; None where nothing is."""
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
    names = [n for n, values in expected.items() if np.isfinite(values).any()]
    if not names:
        return None
    rows = [(n, expected[n]) for n in names] + [(n + BAND, Z90 * sigma[n]) for n in names]
    values = np.stack([_in_quanta(f"{table}.{n.removesuffix(BAND)}", v) for n, v in rows])
    return tuple(n for n, _ in rows), values


def _in_quanta(key: str, values: F64) -> F32:
    """Values in whole quanta of their signal, as the store packs them well."""
    signal = find_signal(key)
    if signal is None or signal.quantum <= 0:
        return values.astype(np.float32)
    quantum = np.float32(signal.quantum)
    return np.rint(values / np.float64(quantum)).astype(np.float32) * quantum
