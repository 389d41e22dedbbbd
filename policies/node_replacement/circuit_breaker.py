"""Circuit breaker: blocks withdrawals of nodes that look bad together, since they share a cause.

It is open while a fault of power or cooling above them is diagnosed, while their failures are known to be
shared, or while more of them became suspect within the hour than chance explains: under one rack, scale-up
domain, CDU, loop, feeder, hall or network plane, in one job, with one error code, or in all. It holds back
only these nodes, and never a return to service.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from policies.node_replacement.topology import below, cdu_of_node, loop_of_node
from twin.catalogue import I64, NS, Bool
from twin.contracts import DEGRADED, Fault, View
from twin.diagnosis import FAULT_KINDS
from twin.health import EXPLAINS, PRIOR_PER_S, log_tail
from twin.telemetry import GOOD

WINDOW_S = 3600.0  # `newly` are the suspects of the last hour
LEAST = 3  # nodes; two may be chance, whatever else
LEAST_LOG_PU = math.log(1e-3)  # of so many by chance, over all places of a kind. source: estimate
SITE_SHARE = 0.02  # of all nodes within an hour: too many whatever is usual. source: estimate
SURE_PU = 0.5  # below which a diagnosis counts for nothing. source: estimate
# No code makes more of what is usual than this: faulty GPUs, 148 of 419 interruptions. source: The Llama 3
# Herd of Models, arXiv 2407.21783, table 5
ONE_CAUSE_PU = 0.35
QUIET_S = 3600.0  # after the last sign of it the breaker closes. source: estimate
# While as many of them stay suspect as would open it; then people have seen it. source: estimate
MOST_HELD_S = 86_400.0
# Of 419 interruptions 35 were the network's. source: the same
NETWORK_PU = 0.084
PLACES = ("rack", "supernode", "cdu", "feeder", "loop", "hall", "site")
MAX_TURNS = 32  # causes that are distinguished at once


class BreakerState(NamedTuple):
    """State of the breaker: open or closed, the nodes that it holds back [n_node], and the reason.

    `held_ns` [n_node]: when each last shared a cause; to be passed to the next call. `table` and `entity` are
    of the first cause ("" and -1 where it is no place).
    """

    open: bool
    nodes: Bool
    why: str
    held_ns: I64
    table: str = ""
    entity: int = -1


class _Cause(NamedTuple):
    nodes: Bool
    why: str
    table: str
    entity: int


class _Group(NamedTuple):
    """A property that suspects may share: pairs (row of a suspect, entity), and the nodes of each entity."""

    table: str
    row: I64
    entity: I64
    size: I64
    share_pu: float = 1.0  # of what is usual


def check_breaker(
    view: View,
    newly: Bool,
    usual_per_h: float,
    suspect: Bool | None = None,
    held_ns: I64 | None = None,
) -> BreakerState:
    """Return the suspects that must not be withdrawn now because they share a cause.

    `newly` [n_node]: became suspect within the last hour; `usual_per_h`: how many nodes of the fleet do, by
    experience (0 or NaN: unknown; then the rate of failures of a published fleet). With `held_ns` of the
    call before and the present `suspect` nodes the breaker stays open for `QUIET_S` after the last sign, and
    as long as enough of those that it holds are still suspect, at most `MOST_HELD_S`.
    """
    n = view.site.sizes["node"]
    kept_ns = np.zeros(n, np.int64) if held_ns is None else held_ns.copy()
    causes = [*_facility(view, newly), *_shared(view, newly)]
    taken: Bool = np.zeros(n, np.bool_)
    for cause in causes:
        taken |= cause.nodes
    causes += _unlikely(view, newly & ~taken, usual_per_h)
    for cause in causes:
        taken |= cause.nodes
    still = _held_over(view, kept_ns, taken, suspect)
    kept_ns[taken] = view.now_ns
    kept_ns[(view.now_ns - kept_ns >= round(MOST_HELD_S * NS)) & ~taken] = 0
    why = "; ".join(dict.fromkeys(cause.why for cause in causes))
    if still.any():
        count = int(np.count_nonzero(still))
        late = f"{count} node{'s' * (count > 1)} became suspect together with others a while ago"
        why = f"{why}; {late}" if why else late
    first = causes[0] if causes else _Cause(still, "", "", -1)
    nodes = taken | still
    return BreakerState(bool(nodes.any()), nodes, why, kept_ns, first.table, first.entity)


def _held_over(view: View, held: I64, taken: Bool, suspect: Bool | None) -> Bool:
    """Return the nodes that stay held back without a new sign of a common cause [n_node]."""
    ago_ns = view.now_ns - held
    known: Bool = (held > 0) & (ago_ns >= 0) & ~taken
    if suspect is not None:
        known &= suspect
    recent = known & (ago_ns < round(QUIET_S * NS))
    if suspect is None:
        return recent
    old = known & (ago_ns < round(MOST_HELD_S * NS))
    enough = np.count_nonzero(old | (taken & (held > 0))) >= LEAST
    return old if enough else recent


def _facility(view: View, newly: Bool) -> list[_Cause]:
    """Return grave faults of power and cooling with suspects below them."""
    out: list[_Cause] = []
    if not newly.any():
        return out
    for fault in view.faults():
        if fault.kind not in EXPLAINS or fault.signal or fault.confidence_pu < SURE_PU:
            continue
        nodes = newly & below(view.site, fault.table, fault.entity)
        if nodes.any() and len(out) < MAX_TURNS:
            out.append(_Cause(nodes, _fault_words(view, fault, nodes), fault.table, fault.entity))
    return out


def _fault_words(view: View, fault: Fault, nodes: Bool) -> str:
    name = view.site.name(fault.table, fault.entity)
    count = int(np.count_nonzero(nodes))
    kind = FAULT_KINDS.get(fault.kind)
    what = f"{fault.kind} of {name}" if kind is None else kind.title.format(name=name)
    return f"{what}: {count} suspect node{'s' * (count > 1)} below it"


def _shared(view: View, newly: Bool) -> list[_Cause]:
    """Return the suspects whose failure of the last hour has a known common cause."""
    log = view.failures()
    recent = log.shared & (view.now_ns - log.start_ns <= round(WINDOW_S * NS))
    nodes: Bool = np.zeros(len(newly), np.bool_)
    nodes[log.node[recent]] = True
    nodes &= newly
    if not nodes.any():
        return []
    count = int(np.count_nonzero(nodes))
    return [_Cause(nodes, f"{count} node{'s' * (count > 1)} failed with a cause in common", "", -1)]


def _unlikely(view: View, newly: Bool, usual_per_h: float) -> list[_Cause]:
    """Return places, jobs and codes with too many suspects, the most improbable first."""
    n = len(newly)
    prior = PRIOR_PER_S * WINDOW_S * n
    usual = usual_per_h * WINDOW_S / 3600.0 if usual_per_h > 0 and math.isfinite(usual_per_h) else prior
    left = newly.copy()
    suspects = np.flatnonzero(left)
    out: list[_Cause] = []
    if len(suspects) < LEAST:
        return out
    groups = _groups(view, suspects)
    for _ in range(MAX_TURNS):
        found = _best(groups, left, suspects, usual / n)
        if found is None:
            return out
        at, entity, count, alike = found
        group = groups[at]
        nodes: Bool = np.zeros(n, np.bool_)
        nodes[suspects[group.row[group.entity == entity]]] = True
        nodes &= left
        left &= ~nodes
        size = int(group.size[entity])
        mean = usual * group.share_pu * size / n
        place = " or ".join(_place_words(view, groups[g], e) for g, e in [(at, entity), *alike])
        why = f"{count} of {size} nodes {place} became suspect within an hour, where {mean:.2g} do by chance"
        out.append(_Cause(nodes, why, group.table, entity if group.table in PLACES else -1))
    return out


def _best(
    groups: list[_Group], left: Bool, suspects: I64, each: float
) -> tuple[int, int, int, list[tuple[int, int]]] | None:
    """Return (group, entity, count, others of the same nodes) of the best explanation; None if chance
    explains it.

    Asked are those where chance does not account for what is left. Compared is how likely just these suspects
    are if one of all such places is struck, each number of its nodes as likely as any other, and the rest
    come by chance, `each` of a node: so a rack is named before the hall around it, and the hall where they
    are all over it.
    """
    n, there = len(left), int(np.count_nonzero(left))
    best: tuple[float, int, int, int, list[tuple[int, int]]] | None = None
    for g, group in enumerate(groups):
        here = left[suspects[group.row]]
        counts = np.bincount(group.entity[here], minlength=len(group.size))
        for entity in np.flatnonzero(counts >= LEAST).tolist():
            k, size = int(counts[entity]), int(group.size[entity])
            alike = (group.size < 2 * size) & (2 * group.size > size)
            places = math.log(np.count_nonzero(alike))
            by_chance = log_tail(k, each * group.share_pu * size) + places
            crowd = group.table == "site" and k >= SITE_SHARE * n
            if by_chance > LEAST_LOG_PU and not crowd:
                continue
            ways = math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
            sense = -math.log(size + 1) - ways - places - k * math.log(group.share_pu)
            sense += (there - k) * math.log(each) + each * size
            if best is None or sense > best[0] + 1e-9:
                best = (sense, g, entity, k, [])
            elif abs(sense - best[0]) <= 1e-9 and len(best[4]) < 2 and _same(groups, best, g, entity, here):
                best[4].append((g, entity))
    return None if best is None else best[1:]


def _same(
    groups: list[_Group],
    best: tuple[float, int, int, int, list[tuple[int, int]]],
    g: int,
    entity: int,
    here: Bool,
) -> bool:
    """True if another place holds exactly the suspects of the best one."""
    old, new = groups[best[1]], groups[g]
    rows = np.intersect1d(old.row[old.entity == best[2]], new.row[(new.entity == entity) & here])
    return len(rows) == best[3]


def _place_words(view: View, group: _Group, entity: int) -> str:
    if group.table == "job":
        return f"of job {view.jobs.names[entity]}"
    if group.table == "xid":
        return f"that report XID {entity}"
    if group.table == "plane":
        return f"with bad links of {view.site.planes[entity]}"
    return f"of {view.site.name(group.table, entity)}"


def _groups(view: View, suspects: I64) -> list[_Group]:
    """Return the properties that these nodes may share, table by table; the lowest first."""
    site, out = view.site, []
    of_node = {
        "rack": site.rack_of_node,
        "supernode": site.supernode_of_node,
        "cdu": cdu_of_node(site),
        "job": view.jobs.job_of_node,
        "loop": loop_of_node(site),
        "hall": site.hall_of_rack[site.rack_of_node],
        "site": np.zeros(site.sizes["node"], np.int32),
    }
    rows = np.arange(len(suspects))
    out += [_by_code(view, suspects), _by_plane(view, suspects), _by_feeder(view, suspects)]
    for table, above in of_node.items():
        size = np.bincount(above[above >= 0], minlength=site.sizes[table])
        at = above[suspects].astype(np.int64)
        out.append(_Group(table, rows[at >= 0], at[at >= 0], size))
    return out


def _by_feeder(view: View, suspects: I64) -> _Group:
    site = view.site
    feeder, rack = site.served_racks()
    nodes_of_rack = np.diff(site.node_start_of_rack)
    size = np.bincount(feeder, nodes_of_rack[rack], site.sizes["feeder"]).astype(np.int64)
    order = np.argsort(rack, kind="stable")
    racks = site.rack_of_node[suspects]
    lo, hi = (np.searchsorted(rack[order], racks, side) for side in ("left", "right"))
    rows = np.repeat(np.arange(len(racks)), hi - lo)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(hi - lo) - (hi - lo), hi - lo)
    return _Group("feeder", rows, feeder[order][np.repeat(lo, hi - lo) + within], size)


def _by_code(view: View, suspects: I64) -> _Group:
    """Group by the greatest error code that a GPU of each node reports; any node may report a code."""
    site, n = view.site, view.site.sizes["node"]
    code = np.zeros(n, np.int64)
    good = view.quality("gpu.xid_code") == GOOD
    codes = np.where(good, np.nan_to_num(view.value("gpu.xid_code")), 0.0).astype(np.int64)
    np.maximum.at(code, site.node_of_gpu, codes)
    at = code[suspects]
    rows = np.flatnonzero(at > 0)
    size = np.zeros(int(at.max(initial=0)) + 1, np.int64)
    size[at[rows]] = n
    return _Group("xid", rows, at[rows], size, ONE_CAUSE_PU)


def _by_plane(view: View, suspects: I64) -> _Group:
    """Group by the network planes in which a node has a bad link."""
    site, n_plane = view.site, max(len(view.site.planes), 1)
    has = np.unique(site.node_of_link.astype(np.int64) * n_plane + site.plane_of_link)
    size = np.bincount(has % n_plane, minlength=n_plane)
    bad = np.flatnonzero(view.health("link").level >= DEGRADED)
    pairs = np.unique(site.node_of_link[bad].astype(np.int64) * n_plane + site.plane_of_link[bad])
    mine = np.isin(pairs // n_plane, suspects)
    rows = np.searchsorted(suspects, pairs[mine] // n_plane)
    return _Group("plane", rows, pairs[mine] % n_plane, size, NETWORK_PU)
