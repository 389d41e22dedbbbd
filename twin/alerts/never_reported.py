"""Never-reported entities: the site file declares them, but no source has ever reported them.

An unknown entity is not healthy. The finding of stale data covers entities that have reported before; this
finding covers the others. The waiting time counts ticks with a connected source, so that a restart or a gap
neither raises nor hides the finding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from twin.catalogue import I64, NS, Bool, counted, duration, table_noun
from twin.contracts import Finding, Windows
from twin.site import Site, noun_key
from twin.telemetry import OUT_OF_RANGE, UNTRUSTED, EntityState, State, TableState, keyed, scalar

# Kinds of entities of which each is expected to report something as long as it lives.
REPORTING = ("rack", "cdu", "feeder", "node", "gpu")
AFTER_S = 60.0  # or longer where messages are rarer
# Between two checks no more than this counts as waiting: in a longer gap nobody listened.
MOST_GAP_S = 20.0
SHOWN_ENTITIES = 8


class NeverReported(EntityState):
    """Waiting time of each entity in ns [n], by table; 0 for one that has reported."""

    waited_ns: dict[str, I64] = keyed("i8", keys=REPORTING)
    looked_ns: int = scalar(0)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)

    def findings(self, site: Site, state: State, windows: Windows) -> list[Finding]:
        """One finding for each table with entities that have been waited for long enough."""
        gap_ns = state.now_ns - self.looked_ns if self.looked_ns else 0
        self.looked_ns = state.now_ns
        late_tables = []
        for table in REPORTING:
            if site.sizes[table] == 0:
                continue
            period_s, patience_s, stale_ns = _cadence(state, table)
            reports = reported(site, state, table)
            connected = bool(reports.any())
            reports |= _not_expected(site, table)
            if (in_maintenance := windows.excused(table, state.now_ns, stale_ns)) is not None:
                reports |= in_maintenance
            waited_ns = self.waited_ns[table]
            waited_ns += min(gap_ns, round(max(MOST_GAP_S, period_s) * NS))
            waited_ns[reports] = 0
            late = np.flatnonzero(waited_ns >= round(patience_s * NS))
            if len(late):
                late_tables.append(_finding(site, table, late, patience_s, connected))
        return late_tables


def reported(site: Site, state: State, table: str) -> np.ndarray:
    """Entities that ever reported anything, usable or not [n]; a node also by its GPUs."""
    reports = _reported(state.tables[table])
    if table == "node" and site.sizes["gpu"]:
        reports[site.node_of_gpu[_reported(state.tables["gpu"])]] = True
    return reports


def reported_counts(site: Site, state: State, mute: Mapping[str, Bool]) -> dict[str, dict[str, int]]:
    """By table, how many entities report, of how many; how many are silent or have no cadence yet.

    `mute` [n]: entities that are silent.
    """
    out = {}
    for table in REPORTING:
        if site.sizes[table]:
            ever = reported(site, state, table)
            silent = ever & mute.get(table, np.False_)
            out[table] = {
                "heard": int(np.count_nonzero(ever & ~silent)),
                "of": site.sizes[table],
                "silent": int(np.count_nonzero(silent)),
                "learning": int(np.count_nonzero(ever & state.tables[table].learning())),
            }
    return out


def _not_expected(site: Site, table: str) -> np.ndarray:
    """Entities of which nothing is expected [n]: of spare racks, and without meters by the site file."""
    if table == "rack":
        return np.asarray(site.spare_rack | ~site.metered_rack)
    if table == "feeder":
        return np.asarray(~site.metered_feeder)
    if table in ("node", "gpu") and site.spare_rack.any():
        rack_of: np.ndarray = site.rack_of_node if table == "node" else site.rack_of_gpu
        return np.asarray(site.spare_rack[rack_of])
    return np.zeros(site.sizes[table], np.bool_)


def _reported(column: TableState) -> np.ndarray:
    if (column.bad_count == 0).any():  # a signal of which all have a good reading
        return np.ones(column.n, np.bool_)
    out = np.asarray(np.isfinite(column.value).any(axis=0))
    if not out.all():  # a large table that reports in full ends here
        out |= ((column.quality == UNTRUSTED) | (column.quality == OUT_OF_RANGE)).any(axis=0)
        out |= (column.raw >= 0).any(axis=0)
    return out


def _cadence(state: State, table: str) -> tuple[float, float, I64]:
    """(declared period in s, wait in s until it is late, age in ns of a stale reading [n]) of the fastest
    signal.
    """
    column = state.tables[table]
    row = int(np.argmin(column.freshness.period_s[: column.freshness.n_gauges]))
    period_s, patience_s = float(column.freshness.period_s[row]), float(column.freshness.drift_s[row])
    return period_s, max(AFTER_S, patience_s), column.limits(row).stale_ns


def _finding(site: Site, table: str, late: np.ndarray, patience_s: float, connected: bool) -> Finding:
    """`connected`: others of the kind report. Where none ever did, a source is yet to be set up: no alarm."""
    key = noun_key(site, table)
    return Finding(
        f"unheard/{table}",
        "warning" if connected else "info",
        f"{len(late):,} of {counted(key, site.sizes[table])} have never reported",
        tuple(site.name(table, int(i)) for i in late[:SHOWN_ENTITIES]),
        (f"they are in the site file, but sent nothing for {duration(patience_s)} or more",),
        1.0,
        "Check their agents and sources, and that these use the names of the site file. Remove absent "
        "equipment from that file (`nodes`, `gpus_per_node` of a rack): it counts at its maximum power."
        if connected
        else f"Connect a source of readings of {table_noun(key, 2)}; until then they are not monitored.",
        len(late),
    )
