"""Scopes: resolve the tables and entities that a request names, and the entities inside a rack or hall.

A name is a full path or a unique local name; an unknown name is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from difflib import get_close_matches

import numpy as np

from twin.api.answers import Refused
from twin.api.runtime import Runtime
from twin.catalogue import TABLES, Bool, clean
from twin.contracts import below
from twin.site import Site

MAX_NAMED = 2000  # names of one body; a rack or hall stands for all that is inside it
HOLDING = ("site", "hall", "supernode", "rack", "node")
COMPUTED = ("node", "gpu", "link")  # tables whose names are made, not kept: too many to look through


def table_of(name: str) -> str:
    """A table of the catalogue. Raises Refused."""
    if name not in TABLES:
        raise Refused(404, f"no table {clean(name, 40)}; expected one of {', '.join(TABLES)}")
    return name


def job_of(live: Runtime, name: str) -> int | None:
    """The slot of a job by its own name, with or without `job:` in front, or by its scheduler's own number;
    None where no such job runs."""
    return live.engine.jobs.slot_named(name)


def entity_of(live: Runtime, table: str, name: str) -> int:
    """An entity by its full path or unique local name; a job by its own as well. Raises Refused."""
    found = live.engine.site.entity(table, name)
    if found is None and table == "job":
        found = job_of(live, name)
    if found is None:
        hint = suggestion(live, name) or f"; /api/v1/state/{table} lists their names"
        raise Refused(404, f"no {table} {clean(name, 120)}{hint}")
    return found


def is_below(path: str, place: str) -> bool:
    """`h/r1` is not above `h/r10`."""
    return path == place or path.startswith(place + "/")


def held_by(live: Runtime, table: str, place: str) -> np.ndarray:
    """Entities of a table at a place, inside it, or of a running job, ascending. Raises Refused."""
    site, slot = live.engine.site, job_of(live, place)
    if slot is None:
        slot = site.entity("job", place)
    if slot is None:
        return inside(site, table, place)
    if table == "job":
        return np.array([slot])
    return below(site, "node", live.engine.jobs.nodes[slot]).get(table, np.zeros(0, np.int32))


def inside(site: Site, table: str, place: str) -> np.ndarray:
    """Return the entities of a table at a place or inside it, ascending. Raises Refused for an unknown
    place."""
    place = place.rstrip("/")
    if table not in COMPUTED:
        return np.flatnonzero([is_below(site.name(table, i), place) for i in range(site.sizes[table])])
    members = _members(site, table, place)
    if members is None:
        raise Refused(404, f"no place {clean(place, 120)} on this site; expected a hall, rack or node")
    return members


def masks_of(live: Runtime, tables: Iterable[str], place: str) -> dict[str, Bool]:
    """Mask of the entities at a place or inside it, by table; of all without a place. Raises Refused for a
    place that has none."""
    site, out = live.engine.site, dict[str, Bool]()
    sizes = site.sizes
    named = ((holder, site.entity(holder, place)) for holder in HOLDING)
    place = next((site.name(holder, row) for holder, row in named if row is not None), place)
    for table in tables:
        out[table] = np.full(sizes[table], not place, np.bool_)
        if place and sizes[table]:
            with contextlib.suppress(Refused):  # one table of several may know no such place
                out[table][held_by(live, table, place)] = True
    if place and not any(mask.any() for mask in out.values()):
        raise Refused(404, f"nothing at {clean(place, 120)} on this site{suggestion(live, place)}")
    return out


def _members(site: Site, table: str, place: str) -> np.ndarray | None:
    for holder in (*HOLDING, table):
        row = site.entity(holder, place)
        if row is not None:
            return below(site, holder, np.array([row], np.int32)).get(table, np.zeros(0, np.int32))
    return None


def expand(live: Runtime, table: str, names: list[str]) -> tuple[str, ...]:
    """Entities of a table by name; a node, rack, hall or site stands for all inside it. Raises Refused."""
    if len(names) > MAX_NAMED:
        raise Refused(
            400, f"names: {len(names)} given; expected at most {MAX_NAMED}; name racks or halls instead"
        )
    site, found = live.engine.site, dict[str, None]()
    for name in names:
        row = site.entity(table, name)
        if row is None and table == "job":
            row = job_of(live, name)
        if row is not None:
            found[site.name(table, row)] = None
            continue
        members = _members(site, table, name.rstrip("/"))
        if members is None or not len(members):
            raise Refused(
                404,
                f"no {table} {clean(name, 120)} on this site, and no entity that contains "
                f"one{suggestion(live, name)}",
            )
        found |= dict.fromkeys(site.name(table, i) for i in members.tolist())
    return tuple(found)


def near(live: Runtime, name: str) -> list[str]:
    """Return names of this site that are similar to the given one."""
    site = live.engine.site
    head, tail = name.rstrip("/"), ""
    while head and (last := head.rpartition("/")[2]) and any(last.startswith(w) for w in ("node", "gpu")):
        head, tail = head.rpartition("/")[0], f"/{last}{tail}"
    known = [
        n
        for table in ("rack", "cdu", "loop", "switch", "hall", "feeder", "storage")
        for n in site.names.get(table, [])
    ]
    local = {n.rpartition("/")[2]: n for n in reversed(known)}
    local |= {n.partition("/")[2]: n for n in reversed(known) if n.count("/") > 1}
    found = [head] if head in known else [
        local.get(n, n) for n in get_close_matches(head.partition("#")[0], [*known, *local], 6, 0.6)
    ]  # fmt: skip
    out: dict[str, None] = {}
    for place in found:
        rack = site.entity("rack", place)
        whole_name = f"{place}{tail}"
        if tail and rack is not None and not _exists(live, whole_name):
            last_node = int(site.node_start_of_rack[rack + 1] - site.node_start_of_rack[rack]) - 1
            whole_name = place if last_node < 0 else f"{place}/node0 to {place}/node{last_node}"
        out[whole_name] = None
    return list(out)[:3]


def _exists(live: Runtime, name: str) -> bool:
    return any(live.engine.site.entity(t, name) is not None for t in ("node", "gpu", "rack", "cdu", "switch"))


def suggestion(live: Runtime, name: str) -> str:
    """`; did you mean PLACE?`, or nothing where no place of the site is like it."""
    alike = near(live, name)
    return f"; did you mean {' or '.join(alike)}?" if alike else ""
