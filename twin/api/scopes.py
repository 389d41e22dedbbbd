"""Places: the tables and entities that a question names, and what is inside a rack or hall.

A name is a full path or a local name that is unique; one that stands for nothing is refused.
"""

from __future__ import annotations

import numpy as np

from twin.api.answers import Refused
from twin.api.runtime import Runtime
from twin.catalogue import TABLES, clean
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
    """The slot of a job by its own name, with or without `job:` in front; None where no such job runs."""
    slots = live.engine.jobs.slot_of
    return slots.get(name, slots.get(name.removeprefix("job:")))


def entity_of(live: Runtime, table: str, name: str) -> int:
    """An entity by its full path or unique local name; a job by its own as well. Raises Refused."""
    found = live.engine.site.entity(table, name)
    if found is None and table == "job":
        found = job_of(live, name)
    if found is None:
        raise Refused(404, f"no {table} {clean(name, 120)}; /api/v1/state/{table} lists their names")
    return found


def is_below(path: str, place: str) -> bool:
    """`h/r1` is not above `h/r10`."""
    return path == place or path.startswith(place + "/")


def inside(site: Site, table: str, place: str) -> np.ndarray:
    """Entities of a table at a place or inside it, ascending. Raises Refused for a place that is none."""
    place = place.rstrip("/")
    if table not in COMPUTED:
        return np.flatnonzero([is_below(site.name(table, i), place) for i in range(site.sizes[table])])
    members = _members(site, table, place)
    if members is None:
        raise Refused(404, f"no place {clean(place, 120)} on this site; expected a hall, rack or node")
    return members


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
            raise Refused(404, f"no {table} {clean(name, 120)} on this site, and nothing that holds one")
        found |= dict.fromkeys(site.name(table, i) for i in members.tolist())
    return tuple(found)
