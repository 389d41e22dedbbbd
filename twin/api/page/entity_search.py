"""Entity search: entities and jobs whose names contain a typed text, a bounded number of them."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from twin.api.answers import Refused, answer, live_of, number_of
from twin.api.runtime import Runtime
from twin.catalogue import clean

NAMED = ("rack", "cdu", "feeder", "loop", "hall", "switch", "storage")
COMPUTED = ("gpu", "node", "link")
MAX_TEXT = 120


async def find(request: web.Request) -> web.Response:
    """Find entities by a part of their name: racks, nodes, GPUs, CDUs, feeders, loops, halls and jobs."""
    live, text = live_of(request), request.query.get("text", "").strip()
    limit = number_of(request, "limit", 20, 1, 100)
    if not text or len(text) > MAX_TEXT:
        raise Refused(400, f"text: expected 1 to {MAX_TEXT} characters of a name")
    rows = []
    for table, name, shown in _matches(live, text.lower()):
        rows.append({"table": table, "name": name, "shown": clean(shown)})
        if len(rows) == limit:
            break
    return answer({"found": rows})


def _matches(live: Runtime, text: str) -> Iterator[tuple[str, str, str]]:
    """Return (table, full name, shown name): exact matches, then partial matches, then nodes and GPUs
    inside."""
    site, jobs = live.engine.site, live.engine.jobs
    for table in (*NAMED, *COMPUTED):
        row = site.entity(table, text) if site.sizes.get(table) else None
        if row is not None:
            yield table, site.name(table, row), site.name(table, row)
    for table in NAMED:
        for name in site.names.get(table, []):
            if text in name.lower() and text != name.lower():
                yield table, name, name
    for name, slot in jobs.slot_of.items():
        if text in name.lower():
            yield "job", site.name("job", slot), name
    yield from _inside(live, text)


def _inside(live: Runtime, text: str) -> Iterator[tuple[str, str, str]]:
    """Return nodes and GPUs below a rack with the typed local name, or below any: `r1/node3/gpu2`,
    `node3`."""
    site = live.engine.site
    head, _, tail = text.partition("/")
    anywhere = text.startswith(("node", "gpu"))
    if anywhere:
        head, tail = "", text
    for rack in site.names.get("rack", []) if tail else []:
        if not anywhere and not rack.lower().endswith("/" + head):
            continue
        for table in ("node", "gpu"):
            row = site.entity(table, f"{rack}/{tail}")
            if row is not None:
                name = site.name(table, row)
                yield table, name, name
