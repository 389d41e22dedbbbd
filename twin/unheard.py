"""Who never spoke: entities that the site declares and that no source has ever reported.

An unknown entity is not a healthy one: silence is told of what once spoke, this is told of the rest. Waiting
is counted in the time of ticks while somebody listened, so that neither a restart nor a gap makes or hides
it. May import contracts, the site, maintenance windows and the state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.contracts import Finding
from twin.frame import I32, NS
from twin.maintenance import Windows
from twin.signals import TABLES
from twin.site import Site
from twin.state import DRIFT_PERIODS, OUT_OF_RANGE, UNTRUSTED, State, TableState

# Kinds of entities of which each is expected to report something as long as it lives.
SPEAKING = ("rack", "cdu", "feeder", "node", "gpu")
AFTER_S = 60.0  # or longer where messages are rarer
# Between two looks no more than this counts as waiting: in a longer gap nobody listened.
LOOK_S = 20.0
SHOWN_ENTITIES = 8


class Unheard:
    """For how long each entity has been waited for, in ns [n] by table; 0 for one that spoke."""

    def __init__(self, site: Site) -> None:
        self.waited_ns = {table: np.zeros(site.sizes[table], np.int64) for table in SPEAKING}
        self.looked_ns = 0

    def look(self, site: Site, state: State, windows: Windows) -> list[Finding]:
        """One finding for each table of which somebody has been waited for long enough."""
        gap_ns = state.now_ns - self.looked_ns if self.looked_ns else 0
        self.looked_ns = state.now_ns
        found = []
        for table in SPEAKING:
            if site.sizes[table] == 0:
                continue
            period_s = _period_s(state, table)
            spoke = spoken(site, state, table) | spares(site, table)
            if (spared := windows.spared(table, state.now_ns, period_s)) is not None:
                spoke |= spared
            waited_ns = self.waited_ns[table]
            waited_ns += min(gap_ns, round(max(LOOK_S, period_s) * NS))
            waited_ns[spoke] = 0
            late = np.flatnonzero(waited_ns >= round(_patience_s(period_s) * NS))
            if len(late):
                found.append(_finding(site, table, late, _patience_s(period_s)))
        return found

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Unheard:
        """The same on a changed site; who is new there is waited for from now on."""
        out = Unheard(site)
        out.looked_ns = self.looked_ns
        for table, waited_ns in self.waited_ns.items():
            kept = np.flatnonzero(old_of_new[table] >= 0)
            out.waited_ns[table][kept] = waited_ns[old_of_new[table][kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"waited_ns": self.waited_ns, "looked_ns": self.looked_ns}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.waited_ns = {t: np.array(waited) for t, waited in data["waited_ns"].items()}
        self.looked_ns = data["looked_ns"]


def spoken(site: Site, state: State, table: str) -> np.ndarray:
    """Who ever reported anything, usable or not [n]; for a node its GPUs speak as well."""
    spoke = _reported(state.tables[table])
    if table == "node" and site.sizes["gpu"]:
        spoke[site.node_of_gpu[_reported(state.tables["gpu"])]] = True
    return spoke


def heard_counts(site: Site, state: State) -> dict[str, dict[str, int]]:
    """By table, how many of how many were ever heard."""
    return {table: {"heard": int(np.count_nonzero(spoken(site, state, table))), "of": site.sizes[table]}
            for table in SPEAKING if site.sizes[table]}  # fmt: skip


def spares(site: Site, table: str) -> np.ndarray:
    """Who stands in a spare rack, of which nothing is expected [n]."""
    if table == "rack":
        return site.spare_rack.copy()
    if table in ("node", "gpu") and site.spare_rack.any():
        rack_of: np.ndarray = site.rack_of_node if table == "node" else site.rack_of_gpu
        return np.asarray(site.spare_rack[rack_of])
    return np.zeros(site.sizes[table], np.bool_)


def _reported(column: TableState) -> np.ndarray:
    out = np.asarray(np.isfinite(column.value).any(axis=0))
    if not out.all():  # in a large table that all speaks, this is the usual end
        out |= ((column.quality == UNTRUSTED) | (column.quality == OUT_OF_RANGE)).any(axis=0)
        out |= (column.raw >= 0).any(axis=0)
    return out


def _period_s(state: State, table: str) -> float:
    """Of its fastest signal: whoever lives has said that by then."""
    return float(state.tables[table].period_s[: len(TABLES[table].gauges)].min(initial=np.inf))


def _patience_s(period_s: float) -> float:
    """What reports rarely has its period, and is late only then."""
    return max(AFTER_S, DRIFT_PERIODS * period_s)


def _finding(site: Site, table: str, late: np.ndarray, patience_s: float) -> Finding:
    return Finding(
        f"unheard/{table}",
        "warning",
        f"{len(late)} of {site.sizes[table]} {table} entities were never heard",
        tuple(site.name(table, int(i)) for i in late[:SHOWN_ENTITIES]),
        (f"the site file has them, and nothing has come of them in {patience_s:.0f} s or more",),
        1.0,
        "Check their agents and sources, and that these use the names of the site file.",
        len(late),
    )
