"""Silence: who no longer reports a usable value of a signal, as a finding. Decides nothing.

May import contracts, the site, the state and maintenance windows.
"""

from __future__ import annotations

import numpy as np

from twin.contracts import Finding
from twin.maintenance import Windows
from twin.signals import find_signal
from twin.site import Site
from twin.state import GOOD, MISSING, OUT_OF_RANGE, QUALITY_NAMES, STALE_PERIODS, UNTRUSTED, State

SHOWN_ENTITIES = 8


def silence_of(site: Site, state: State, key: str, windows: Windows) -> Finding | None:
    """Cells of a signal that were heard once, or only wrongly, and cannot be used now."""
    signal = find_signal(key)
    if signal is None or signal.kind == "counter" or site.sizes[signal.table] == 0:
        return None
    table, column = signal.table, state.tables[signal.table]
    quality = column.quality_of(signal, state.now_ns)
    wrong = (quality == UNTRUSTED) | (quality == OUT_OF_RANGE)
    unusable = (quality != GOOD) & (wrong | np.isfinite(column.value[signal.row]))
    # A reading that was left out once is no silence
    late_s = STALE_PERIODS * float(column.period_s[signal.row])
    unusable &= (quality != MISSING) | (column.age_s(signal, state.now_ns) > late_s)
    spared = windows.spared(table, state.now_ns, float(column.period_s[signal.row]))
    if spared is not None:
        unusable &= ~spared
    silent = np.flatnonzero(unusable)
    if len(silent) == 0:
        return None
    kinds = np.bincount(quality[silent], minlength=len(QUALITY_NAMES))
    evidence = [f"{n} {name.replace('_', ' ')}" for n, name in zip(kinds, QUALITY_NAMES, strict=True) if n]
    oldest_s = _oldest(column.age_s(signal, state.now_ns)[silent])
    if np.isfinite(oldest_s):
        evidence.append(f"oldest good reading {oldest_s:.0f} s ago")
    return Finding(
        f"silent/{key}",
        "warning",
        f"{len(silent)} {table} entities no longer report a usable {signal.name}",
        tuple(site.name(table, int(i)) for i in silent[:SHOWN_ENTITIES]),
        tuple(evidence),
        1.0,
        "Check the source; limits are judged by the worst case meanwhile.",
        len(silent),
    )


def _oldest(age_s: np.ndarray) -> float:
    finite = age_s[np.isfinite(age_s)]
    return float(finite.max()) if len(finite) else float("nan")
