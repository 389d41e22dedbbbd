"""Service reports on nodes by people: a repair, a test that passed or failed.

Each becomes an event of the next frame in the name of its author, and is in the journal. Policies read it as
they read the site's own tests.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from twin.api.access import author
from twin.api.actions import new_id, submit
from twin.api.answers import Refused, body_of, live_of
from twin.api.health import near
from twin.api.runtime import Runtime
from twin.catalogue import NS, clean
from twin.contracts import AHEAD_S
from twin.telemetry import events as ev

MAX_NOTE = 2000  # characters
MAX_ALIKE = 3  # nodes that are named where a local name is not unique
MAX_TEST = 80  # characters of a test's name
POLICY = "replacement"
NOBODY_ACTS = (
    "it is written down, but no policy named replacement runs here: add `policies: {replacement: {}}` to the "
    "site file, then `racktwin reload`"
)


class NodeRepair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node was repaired; the note is for who looks at its record later."""

    note: str = ""


class NodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A test of a node ended: passed or failed. Instants are ns since 1970; without them it ended now."""

    passed: bool
    note: str = ""
    test: str = ""
    began_ns: int | None = None
    ended_ns: int | None = None


def node_of(live: Runtime, name: str) -> int:
    """A node by its path or unique local name. Raises Refused, with names that are alike."""
    site = live.engine.site
    node = site.entity("node", name.rstrip("/"))
    if node is not None:
        return node
    for table in ("gpu", "rack", "hall", "cdu", "switch"):
        if site.entity(table, name.rstrip("/")) is not None:
            article = "a GPU" if table == "gpu" else "a CDU" if table == "cdu" else f"a {table}"
            raise Refused(404, f"{clean(name, 120)} is {article}; expected a node, such as "
                               f"{site.name('node', 0)}")  # fmt: skip
    # A local name that is not unique, such as node3: the first racks that have one
    there = (
        n for rack in site.names["rack"] if site.entity("node", n := f"{rack}/{name.rstrip('/')}") is not None
    )
    alike = list(islice(there, MAX_ALIKE)) or near(live, name)
    first = site.name("node", 0) if site.sizes["node"] else "none: this site has no nodes"
    hint = f"; did you mean {', '.join(alike)}?" if alike else f"; expected such as {first}"
    raise Refused(404, f"no node {clean(name, 120)} on this site{hint}")


def note_of(text: str) -> str:
    """A note on one line, whole. Raises Refused for one that is too long: none of it is lost unsaid."""
    if len(text) > MAX_NOTE:
        raise Refused(400, f"note: {len(text):,} characters; expected at most {MAX_NOTE:,}: name the ticket "
                           "and leave the rest there")  # fmt: skip
    lines = [clean(line.strip(), MAX_NOTE) for line in text.splitlines()]
    return " / ".join(line for line in lines if line)


async def repaired(request: web.Request) -> web.Response:
    """A person says that a node was repaired: it waits no longer for that, but for a test."""
    body, live = await body_of(request, NodeRepair), live_of(request)
    name = live.engine.site.name("node", node_of(live, request.match_info["node"]))
    event = ev.NodeRepaired(id=new_id(request), author=author(request), name=name, note=note_of(body.note))
    return await submit(request, event, node=name, **_unheeded(live))


async def tested(request: web.Request) -> web.Response:
    """A person says how a test of a node ended: evidence like that of the site's own burn-in."""
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
        test=f"{test}, told by {who}" if test else f"told by {who}", detail=note_of(body.note),
    )  # fmt: skip
    return await submit(request, event, node=name, passed=body.passed, **_unheeded(live))


def _unheeded(live: Runtime) -> dict[str, Any]:
    """Return the warnings to add where no policy acts on the report."""
    if POLICY not in live.engine.intake.authority:
        return {"warnings": [NOBODY_ACTS]}
    if POLICY in live.engine.suspended:
        return {"warnings": ["it is written down, but the policy replacement is suspended: racktwin alarms "
                             "says why"]}  # fmt: skip
    return {}
