"""Read routes for decisions with reasons, alarms, history, requests and approvals.

Decisions are lines of the journal, newest first: the latest from memory, older ones from its files.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from twin.api.access import WHO
from twin.api.answers import MAX_ROWS, Refused, answer, listed, live_of, number_of, seconds_of
from twin.api.page import (
    SEARCH,
    SITE_POWER,
    DecisionQuestion,
    dossier_reader,
    journal_state,
    place_of,
    recorded,
    scope_of,
    with_responses,
)
from twin.api.request_bodies import control_of
from twin.api.runtime import MAX_TEXT, WHOLE_TEXT, Runtime
from twin.api.scopes import entity_of, is_below
from twin.api.state import alarms_of
from twin.api.summary import SEVERITIES, brief_alarm, parts, severities, urgency, wanting
from twin.catalogue import NS, StorageError, clean
from twin.contracts import JOURNAL_KINDS
from twin.diagnosis import silent_cells
from twin.run import FOREVER_NS, HistoryError, recorded_signal

MAX_POINTS = 5000
MAX_NAMES = 100  # entities of one question to the history
HISTORY_WAIT_S = 20.0
DAY_S = 86_400
EVENTS_AMONG = 4  # lines, of which one may be an event where only few are wanted
STATES = ("raised", "acknowledged", "shelved", "suppressed", "flapping", "cleared", "active")


async def decisions(request: web.Request) -> web.Response:
    """List decisions with reasons, newest first, from memory and then from the journal on disk.

    One page searches the journal for about a second; `next` goes on from there, as `before`. With
    `events=few` at most one line in four is an event, and `events_left_out` counts the others.
    """
    live, control, policy = live_of(request), request.query.get("control"), request.query.get("policy")
    if control is not None:
        control_of(control)
    names = request.query.getall("entity", [])[:MAX_NAMES]
    kinds = _among(request, "kind", JOURNAL_KINDS)
    limit = number_of(request, "limit", 100, 1, MAX_ROWS)
    few_events = not kinds and "few" in _among(request, "events", ("few",))
    asked = DecisionQuestion(
        frozenset(kinds), control, policy,
        tuple(scope_of(live, name, request.query.get("below") == "true", len(names) > 1) for name in names),
        number_of(request, "since", 0, 0, FOREVER_NS), number_of(request, "until", FOREVER_NS, 0, FOREVER_NS),
        _before(request.query.get("before")), limit,
        WHOLE_TEXT if request.query.get("whole") == "true" else MAX_TEXT,
        -(-limit // EVENTS_AMONG) if few_events else None,
    )  # fmt: skip
    if asked.since_ns > asked.until_ns:
        raise Refused(400, f"since ({asked.since_ns}) is after until ({asked.until_ns})")
    page = await request.app[SEARCH].page(live, asked)
    return answer({"tick": live.engine.state.tick, "kept": len(live.lines), **page})


def _among(request: web.Request, name: str, known: tuple[str, ...]) -> list[str]:
    """Return the words of a filter. Raises Refused for an unknown word, which would match nothing."""
    words = listed(request, name)
    for word in words:
        if word not in known:
            raise Refused(400, f"{name}: {clean(word, 60)!r} is unknown; expected some of {', '.join(known)}")
    return words


def _before(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if (place := place_of(text)) is None:
        raise Refused(400, "before: expected the value of `next` from the page before, such as 1800000000.3")
    return place


async def decision(request: web.Request) -> web.Response:
    """Return one decision by its place, with the authority then, its approval, confirmation and whole case.

    `at` is what `/decisions` calls so: instant and number in the journal.
    """
    if (place := place_of(request.match_info["at"])) is None:
        raise Refused(400, "expected the place of a decision: instant and number, such as 1800000000.3")
    live = live_of(request)
    entity = request.query.get("entity")
    about = None if entity is None else scope_of(live, entity)
    reader = dossier_reader(live)
    return answer(await request.app[SEARCH].read(reader.read, place, about))


async def journal(request: web.Request) -> web.Response:
    """Return the journal's first and last instant, its last hash, and whether the chain holds at the end."""
    live = live_of(request)
    return answer(await request.app[SEARCH].state(live, journal_state))


async def alarms(request: web.Request) -> web.Response:
    """List alarms, the most severe first, by severity, state, and entity with everything below it."""
    live = live_of(request)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 200, 1, MAX_ROWS)
    wanted, states = _among(request, "severity", SEVERITIES), _among(request, "state", STATES)
    every = alarms_of(live, cleared="cleared" in states)
    if name := request.query.get("entity", ""):
        every = _at(live, every, name)
    rows = [a for a in every if (not wanted or a.get("severity") in wanted)
            and (a.get("state") in states if states else a.get("state") != "suppressed")]  # fmt: skip
    rows.sort(key=urgency)
    more = offset + limit < len(rows)
    shown = [brief_alarm(a) for a in rows[offset : offset + limit]]
    now_ns = live.engine.state.now_ns
    return answer({"now_ns": now_ns, "counts": severities(every), "total": len(rows), "offset": offset,
                   "next_offset": offset + limit if more else None,
                   "alarms": with_responses(live, shown)})  # fmt: skip


async def children(request: web.Request) -> web.Response:
    """List the alarms and silent signals that an alarm suppresses."""
    live, identity = live_of(request), request.match_info["id"]
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 200, 1, MAX_ROWS)
    every = [a for a in alarms_of(live, cleared=True) if identity in (a.get("id"), a.get("cause"))]
    if not every:
        raise Refused(404, f"no alarm {clean(identity, 200)}; it may have cleared")
    members: dict[str, np.ndarray] = {}
    for alarm in every:
        for table, index in silent_cells(alarm["id"], live.engine.diagnosis).members.items():
            members[table] = np.union1d(members.get(table, index), index)
    total = sum(map(len, members.values()))
    page = [(t, int(i)) for t, index in members.items() for i in index.tolist()][offset : offset + limit]
    return answer({"alarms": [brief_alarm(a) for a in every if a.get("cause") == identity],
                   "total": total, "offset": offset,
                   "next_offset": offset + limit if offset + limit < total else None,
                   "silent": [_silent(live, table, entity) for table, entity in page]})  # fmt: skip


def _silent(live: Runtime, table: str, entity: int) -> dict[str, Any]:
    """Return an entity without data: its signals that once reported, each with the age of its last
    reading."""
    state, ages = live.engine.state, {}
    for signal in state.tables[table].signals:
        column = state.tables[table]
        age_s = float(column.age_s(signal, state.now_ns)[entity])
        if math.isfinite(age_s):
            ages[signal.name] = round(age_s, 3)
    return {"table": table, "name": live.engine.site.name(table, entity), "age_s": ages}


def _at(live: Runtime, every: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the alarms of an entity and everything below it; alarms may name entities outside the site."""
    named = [a for a in every if any(is_below(e, name) for e in a.get("entities", ()))]
    if named:
        return named
    path = scope_of(live, name).about[2]
    return [a for a in every if any(is_below(e, path) for e in a.get("entities", ()))]


async def history(request: web.Request) -> web.Response:
    """Return a signal of some entities over time, by default over the last 24 hours.

    With `beside=expected`, what was expected at each time, half of its 90 % band, and measured - expected.
    """
    live, key, names = live_of(request), request.query.get("signal", ""), listed(request, "name")
    whole_site = key == SITE_POWER
    signal = recorded_signal("rack.power_w" if whole_site else key)
    if signal is None:
        raise Refused(
            400, f"signal: {clean(key, 60)!r} is not in the catalogue; expected a name such as rack.power_w"
        )
    if not whole_site and not 1 <= len(names) <= MAX_NAMES:
        raise Refused(400, f"name: expected 1 to {MAX_NAMES} entities, got {len(names)}")
    full = [live.engine.site.name(signal.table, entity_of(live, signal.table, n)) for n in names]
    until_ns = number_of(request, "until", live.engine.state.now_ns, 0, 2**63 - 1)
    last_s = seconds_of(request, "last_s", DAY_S, 1, 3660 * DAY_S)
    since_ns = number_of(request, "since", max(0, until_ns - round(last_s * NS)), 0, 2**63 - 1)
    step_s = seconds_of(request, "step", max(1.0, (until_ns - since_ns) / NS / 500), 0.1, 366 * DAY_S)
    points = number_of(request, "max_points", MAX_POINTS, 1, MAX_POINTS)
    beside = request.query.get("beside", "")
    if beside not in ("", "expected"):
        raise Refused(400, f"beside: {clean(beside, 40)!r} is not kept; expected `expected`")
    if since_ns >= until_ns:
        raise Refused(400, f"since ({since_ns}) is not before until ({until_ns})")
    if live.history is None:
        raise Refused(503, "this daemon keeps no history of its own; set history.embedded: true")
    try:
        async with asyncio.timeout(HISTORY_WAIT_S):
            if whole_site:
                found = await recorded(live, since_ns, until_ns, step_s, points)
            else:
                found = await live.history.query(key, full, since_ns, until_ns, step_s, points)
            if beside:
                found |= await _expected(live, key, found, (since_ns, until_ns))
            elif "/" in key:
                _kept(live, signal.table, found["values"])
    except HistoryError as error:
        raise Refused(400, str(error)) from None
    except StorageError as error:
        raise Refused(503, str(error)) from None
    except TimeoutError:
        raise Refused(503, f"the history took longer than {HISTORY_WAIT_S:g} s; ask for less") from None
    return answer({"signal": key, "unit": signal.unit, "since_ns": since_ns, "until_ns": until_ns,
                   "step_s": step_s, **found})  # fmt: skip


def _kept(live: Runtime, table: str, values: dict[str, list[float | None]]) -> None:
    """Raise Refused if expected values of a table are not stored, now or earlier."""
    kept = live.loaded.config.history.expected
    if table not in kept and all(v is None for column in values.values() for v in column):
        raise Refused(404, f"the history keeps no expected values of the table {table}; add {table} to "
                      "history.expected of the configuration")  # fmt: skip


async def _expected(live: Runtime, key: str, found: dict[str, Any], span: tuple[int, int]) -> dict[str, Any]:
    """Return `expected`, `band` and `residual` by name, at the instants of the readings; None where
    unknown."""
    signal = recorded_signal(key)
    if live.history is None or signal is None or "/" in key or key == SITE_POWER or signal.kind == "counter":
        raise Refused(400, f"beside: {clean(key, 60)} has no expected values; expected a gauge such as "
                      "rack.power_w")  # fmt: skip
    names, out = list(found["values"]), dict[str, dict[str, list[float | None]]]()
    for what in ("expected", "band"):
        part = await live.history.query(f"{key}/{what}", names, *span, found["step_s"], MAX_POINTS)
        at = {t_ns: i for i, t_ns in enumerate(part["t_ns"])}
        places = [at.get(t_ns) for t_ns in found["t_ns"]]
        out[what] = {n: [None if i is None else part["values"][n][i] for i in places] for n in names}
    _kept(live, signal.table, out["expected"])
    out["residual"] = {
        name: [None if m is None or e is None else float(f"{m - e:.6g}")
               for m, e in zip(found["values"][name], out["expected"][name], strict=True)]
        for name in names
    }  # fmt: skip
    return out


async def requests(request: web.Request) -> web.Response:
    """List the standing requests of operators."""
    standing = live_of(request).engine.intake.requests.values()
    return answer({"requests": [_standing(msgspec.to_builtins(r)) for r in standing]})


async def approvals(request: web.Request) -> web.Response:
    """List the standing approvals, and the proposals that wait for approval."""
    live = live_of(request)
    standing = live.engine.intake.approvals.values()
    return answer(
        {"approvals": [_standing(msgspec.to_builtins(a)) for a in standing], "wanting": wanting(live)}
    )


def _standing(body: dict[str, Any]) -> dict[str, Any]:
    names = body.get("names", [])
    body = {k: clean(v, 500) if isinstance(v, str) else v for k, v in body.items() if k != "type"}
    return body | {"names": [clean(n) for n in names[:MAX_NAMES]], "names_total": len(names)}


async def maintenance(request: web.Request) -> web.Response:
    """List the open maintenance windows."""
    standing = live_of(request).engine.windows.events()
    return answer({"windows": [_standing(msgspec.to_builtins(w)) for w in standing]})


async def running_parts(request: web.Request) -> web.Response:
    """List the sources, sinks and services of this daemon."""
    return answer({"parts": parts(live_of(request))})


async def messages(request: web.Request) -> web.Response:
    """Return the counts of received messages by outcome, and the daemon's own counters."""
    live = live_of(request)
    return answer({"messages": live.messages(), "counts": live.counts, "events": live.engine.intake.counts})


async def whoami(request: web.Request) -> web.Response:
    """Return the name and role of the token in use."""
    token = request[WHO]
    return answer(
        {
            "name": token.name,
            "role": token.role,
            "created": token.created,
            "expires": token.expires,
            "halls": token.halls,
        }
    )
