"""Service reports on nodes by people: a repair, a test that passed or failed.

Each becomes an event of the next frame in the name of its author, and is in the journal. Policies read it as
they read the site's own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from twin.api.access import author
from twin.api.actions import new_id, submit
from twin.api.answers import Refused, body_of, live_of
from twin.api.health import part_tree
from twin.api.runtime import Runtime
from twin.api.scopes import near
from twin.catalogue import NS, clean
from twin.contracts import AHEAD_S
from twin.report import score_of
from twin.telemetry import events as ev

MAX_NOTE = 2000  # characters
MAX_ALIKE = 3  # nodes that are named where a local name is not unique
MAX_TEST = 80  # characters of a test's name
POLICY = "replacement"
NOBODY_ACTS = (
    "the report is recorded, but no policy named replacement runs here: add `policies: {replacement: {}}` "
    "to the "
    "site file, then `racktwin daemon reload`"
)
FORMAT = 1
MOST_ROWS, MOST_TESTS, MOST_GPUS, MOST_FAULTS = 200, 20, 64, 256


class NodeRepair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A repair of a node; the note is for later readers of its record."""

    note: str = ""


class NodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The end of a node's test: passed or failed. Instants are ns since 1970; without them it ended now."""

    passed: bool
    note: str = ""
    test: str = ""
    began_ns: int | None = None
    ended_ns: int | None = None


def node_of(live: Runtime, name: str) -> int:
    """Return a node by its path or unique local name. Raises Refused, with similar names."""
    site = live.engine.site
    node = site.entity("node", name.rstrip("/"))
    if node is not None:
        return node
    first = site.name("node", 0) if site.sizes["node"] else "none: this site has no nodes"
    for table in ("gpu", "rack", "hall", "cdu", "switch"):
        if site.entity(table, name.rstrip("/")) is not None:
            article = "a GPU" if table == "gpu" else "a CDU" if table == "cdu" else f"a {table}"
            raise Refused(404, f"{clean(name, 120)} is {article}; expected a node, such as {first}")
    # A local name that is not unique, such as node3: the first racks that have one
    there = (
        n for rack in site.names["rack"] if site.entity("node", n := f"{rack}/{name.rstrip('/')}") is not None
    )
    alike = list(islice(there, MAX_ALIKE)) or near(live, name)
    hint = f"; did you mean {', '.join(alike)}?" if alike else f"; expected such as {first}"
    raise Refused(404, f"no node {clean(name, 120)} on this site{hint}")


def note_of(text: str) -> str:
    """Return a note as one complete line. Raises Refused if it is too long, so that nothing is lost
    silently."""
    if len(text) > MAX_NOTE:
        raise Refused(400, f"note: {len(text):,} characters; expected at most {MAX_NOTE:,}: name the ticket "
                           "and leave the rest there")  # fmt: skip
    lines = [clean(line.strip(), MAX_NOTE) for line in text.splitlines()]
    return " / ".join(line for line in lines if line)


async def repaired(request: web.Request) -> web.Response:
    """Report that a node was repaired; it then waits for a test."""
    body, live = await body_of(request, NodeRepair), live_of(request)
    name = live.engine.site.name("node", node_of(live, request.match_info["node"]))
    event = ev.NodeRepaired(id=new_id(request), author=author(request), name=name, note=note_of(body.note))
    return await submit(request, event, node=name, **_unheeded(live))


async def tested(request: web.Request) -> web.Response:
    """Report the result of a node's test; it counts like the site's own burn-in."""
    body, live = await body_of(request, NodeTest), live_of(request)
    name = live.engine.site.name("node", node_of(live, request.match_info["node"]))
    now_ns = live.engine.state.now_ns
    ended_ns = now_ns if body.ended_ns is None else body.ended_ns
    began_ns = ended_ns if body.began_ns is None else body.began_ns
    for what, at_ns in (("began_ns", began_ns), ("ended_ns", ended_ns)):
        if not 0 < at_ns < 2**63:
            raise Refused(400, f"{what}: expected an instant in ns since 1970, got {at_ns}")
    if ended_ns > now_ns + round(AHEAD_S * NS):
        raise Refused(400, f"ended_ns: {(ended_ns - now_ns) / NS:,.0f} s in the future; expected a test that "
                           "is over")  # fmt: skip
    if began_ns > ended_ns:
        raise Refused(400, "began_ns: after ended_ns; expected a test that began before it ended")
    who = author(request)
    if len(body.test) > MAX_TEST:
        raise Refused(400, f"test: {len(body.test):,} characters; expected a name of at most {MAX_TEST}")
    test = clean(body.test.strip(), MAX_TEST)
    event = ev.NodeTested(
        id=new_id(request), name=name, began_ns=began_ns, ended_ns=ended_ns, passed=body.passed,
        test=f"{test}, reported by {who}" if test else f"reported by {who}", detail=note_of(body.note),
    )  # fmt: skip
    return await submit(request, event, node=name, passed=body.passed, **_unheeded(live))


def _unheeded(live: Runtime) -> dict[str, Any]:
    """Return the warnings to add where no policy acts on the report."""
    if POLICY not in live.engine.intake.authority:
        return {"warnings": [NOBODY_ACTS]}
    if POLICY in live.engine.suspended:
        return {"warnings": ["the report is recorded, but the policy replacement is suspended: "
                             "racktwin alarm list says why"]}  # fmt: skip
    return {}


def record(live: Runtime, node: int, rows: Sequence[dict[str, Any]], notes: Sequence[str], since_ns: int,
           planned: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """Return the record of a node as plain data. `rows`: its history; `planned`: its row of the plan."""
    engine, site = live.engine, live.engine.site
    name, tree = site.name("node", node), part_tree(live, "node", node)
    serials = engine.intake.serials
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    rack = int(site.rack_of_node[node])
    gpus = [{"name": (gpu := site.name("gpu", g)), "serial": _serial(serials.get(f"gpu:{gpu}"))}
            for g in range(first, min(last, first + MOST_GPUS))]  # fmt: skip
    of = {kind: [r for r in rows if r["kind"] == kind] for kind in ("test", "repair", "replaced", "finding")}
    drains = [r for r in rows if r["kind"] == "command"]
    return {
        "format": FORMAT, "made_ns": engine.state.now_ns, "site": site.file.site, "node": name,
        "rack": site.name("rack", rack), "simulated": live.loaded.config.simulated,
        "racktwin": live.version, "since_ns": since_ns,
        "serial": _serial(serials.get(f"node:{name}")), "gpus": gpus, "gpus_total": last - first,
        "level": tree["level"], "action": tree["action"], "do": tree["do"], "sure": tree["sure"],
        "evidence": tree["evidence"], "missing": tree["missing"], "parts": _ill(tree),
        "chance": [{k: c[k] for k in ("horizon_s", "mean", "lo", "hi", "said")} for c in tree["chance"]],
        "lemon": tree["lemon"], "failures": tree["history"]["failures"],
        "failures_total": tree["history"]["failures_total"], "watched_s": tree["history"]["watched_s"],
        "reboots": tree["history"]["reboots"], "gpus_replaced": tree["history"]["gpus_replaced"],
        "faults": _faults(live, node), "planned": planned, "drains": drains[-MOST_ROWS:],
        "tests": of["test"][-MOST_TESTS:], "tests_total": len(of["test"]),
        "tests_failed": sum(r["data"].get("passed") is False for r in of["test"]),
        "repairs": (of["repair"] + of["replaced"])[-MOST_ROWS:], "findings": of["finding"][-MOST_ROWS:],
        "history": [r for r in rows if r["kind"] != "finding"][-MOST_ROWS:], "history_total": len(rows),
        "score": score_of(rows), "notes": list(notes),
    }  # fmt: skip


def _serial(text: str | None) -> str | None:
    return clean(text) if text else None


def _ill(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the GPUs, links and supplies of a node with evidence."""
    return [p for p in tree["parts"] if p["level"] not in ("healthy", "unknown")]


def _faults(live: Runtime, node: int) -> list[dict[str, Any]]:
    """Return the faults that the node's devices reported: by code and device, first, last and count; the
    latest first."""
    from twin.health import find

    site, book = live.engine.site, live.engine.health.book
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    faults = [("", "node", h) for h in book.of("node", node)]
    faults += [(f"gpu{g - first}", "gpu", h) for g in range(first, last) for h in book.of("gpu", g)]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for of, table, h in faults:
        row = rows.setdefault((of, h.code), {
            "of": of, "code": h.code, "times": 0, "first_ns": h.at_ns, "last_ns": h.at_ns, "detail": "",
            **_meaning(find(h.code, table, h.detail))})  # fmt: skip
        row["times"] += h.times
        row["first_ns"] = min(row["first_ns"], h.at_ns)
        if h.at_ns >= row["last_ns"]:
            row["last_ns"], row["detail"] = h.at_ns, clean(h.detail, 200) or row["detail"]
    return sorted(rows.values(), key=lambda r: -r["last_ns"])[:MOST_FAULTS]


def _meaning(entry: Any) -> dict[str, str]:
    return {"label": entry.label, "means": entry.name}
