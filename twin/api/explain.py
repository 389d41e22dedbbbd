"""Explanations over HTTP: each policy explains its own proposals.

The module names no policy. A topic that declares a path is also served there, as one flat object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from aiohttp import web
from msgspec.structs import replace

import policies
from twin.api.answers import Refused, answer, live_of
from twin.api.runtime import Runtime
from twin.api.scopes import suggestion
from twin.catalogue import NS, ContractError, StorageError, clean, did_you_mean, plain_text
from twin.contracts import (
    Explanation,
    ExplanationRefused,
    Policy,
    RecordedSeries,
    SeriesWanted,
    Topic,
    Value,
    as_row,
)
from twin.engine import Inquiry, explain as explain_now, series_wanted, topics_of
from twin.run import HistoryError

MOST_CELLS = 2_000_000  # recorded values of one explanation
STEPS_S = (300.0, 900.0, 3600.0)
READ_S = 60.0
MOST_SLOW = 2  # at once: each takes a second or so of a core
STATUS = {"unknown": 404, "invalid": 400, "impossible": 409}
RESERVED = ("topic",)
FORM = "form"  # of a topic's own path: `flat` (default) or `explanation`
Serving = Callable[[web.Request], Awaitable[web.StreamResponse]]
_slow: list[str] = []


async def explanations(request: web.Request) -> web.Response:
    """List the policies and the topics that each explains."""
    engine = live_of(request).engine
    rows = [
        {
            "policy": policy.name,
            "authority": engine.intake.authority[policy.name],
            "suspended": policy.name in engine.suspended,
            "topics": [asdict(topic) for topic in topics_of(policy)],
        }
        for policy in engine.policies
    ]
    return answer({"now_ns": engine.state.now_ns, "policies": rows})


async def of_policy(request: web.Request) -> web.Response:
    """Explain a policy's proposals, for the site or an entity: sentences, figures, tables and curves.

    The topics of a policy, and their options, are listed by `/explain`.
    """
    live, name = live_of(request), request.match_info["policy"]
    query: Mapping[str, Value] = {k: v for k, v in request.query.items() if k not in RESERVED}
    entity = request.match_info.get("entity", "")
    return answer(await explanation_of(live, name, entity, request.query.get("topic", ""), query))


def topic_routes() -> Iterator[tuple[Topic, Serving]]:
    """Return the topics with a path of their own, each with its handler."""
    for policy in policies.REGISTRY.values():
        for topic in topics_of(policy):
            if topic.path:
                yield topic, _serving(policy, topic)


def _serving(policy: type[Policy], topic: Topic) -> Serving:
    async def serve(request: web.Request) -> web.Response:
        live = live_of(request)
        query: Mapping[str, Value] = {k: v for k, v in request.query.items() if k != FORM}
        found = await explanation_of(live, policy.name, "", topic.name, query)
        return answer(found if request.query.get(FORM) == "explanation" else flat(live, found))

    serve.__doc__ = topic.text
    return serve


def policy_named(live: Runtime, name: str) -> Policy:
    """Return a policy of the daemon, or a registered one with its defaults. Raises Refused for any other
    name."""
    found = next((p for p in live.engine.policies if p.name == name), None)
    if found is None and name in policies.REGISTRY:
        found = policies.REGISTRY[name]()
    if found is None:
        names = [p.name for p in live.engine.policies]
        near = did_you_mean(name, names)
        raise Refused(404, f"no policy {clean(name, 60)}; expected one of {', '.join(names)}{near}")
    return found


async def explanation_of(
    live: Runtime, name: str, entity: str, topic: str, options: Mapping[str, Value]
) -> Explanation:
    """Return the explanation of a policy; its slow part runs in a thread. Raises Refused."""
    policy = policy_named(live, name)
    inquiry = Inquiry(entity=entity, topic=topic, options=options, role=live.role,
                      account=live.accounts.get(name))  # fmt: skip
    try:
        wanted = series_wanted(live.engine, policy, inquiry)
        if wanted is not None:
            series, note = await _recorded(live, wanted)
            inquiry = Inquiry(entity=entity, topic=topic, options=options, role=live.role,
                              account=live.accounts.get(name), series=series, series_note=note)  # fmt: skip
        found = explain_now(live.engine, policy, inquiry)
        if isinstance(found, Explanation):
            return _said(found)
        if len(_slow) >= MOST_SLOW:
            raise Refused(503, f"{MOST_SLOW} such queries are running already; try again later")
        _slow.append(name)
        try:
            return _said(await asyncio.to_thread(found))
        finally:
            _slow.remove(name)
    except ExplanationRefused as error:
        place = entity or str(options.get("name") or "")
        near = suggestion(live, place) if error.kind == "unknown" and place else ""
        raise Refused(STATUS[error.kind], str(error) + near) from None
    except ContractError as error:
        raise Refused(500, str(error)) from None


def _said(found: Explanation) -> Explanation:
    """Return the explanation with words for the keys in its texts. A key alone in a cell stays: it is an
    argument."""
    tables = tuple(
        replace(t, rows=tuple(tuple(_cell(value) for value in row) for row in t.rows)) for t in found.tables
    )
    sentences = tuple(replace(s, text=plain_text(s.text)) for s in found.sentences)
    return replace(found, sentences=sentences, tables=tables)


def _cell(value: Value) -> Value:
    return plain_text(value) if isinstance(value, str) and " " in value else value


async def _recorded(live: Runtime, wanted: SeriesWanted) -> tuple[RecordedSeries | None, str]:
    """Return (the highest recorded value of each slot, a note on missing data)."""
    if live.history is None:
        return None, "this daemon keeps no history of its own (history.embedded is false)"
    if not len(wanted.index):
        return None, "no entity to read recorded values of"
    table, until_ns = wanted.signal.partition(".")[0], live.engine.state.now_ns
    per_step = len(wanted.index) * wanted.days * 86_400
    step_s = next((s for s in STEPS_S if per_step / s <= MOST_CELLS), STEPS_S[-1])
    days = min(wanted.days, MOST_CELLS * step_s / 86_400 / len(wanted.index))
    names = [live.engine.site.name(table, int(i)) for i in wanted.index]
    since_ns = max(0, until_ns - round(days * 86_400 * NS))
    try:
        async with asyncio.timeout(READ_S):
            found = await live.history.query(wanted.signal, names, since_ns, until_ns, step_s, 50_000)
    except (HistoryError, StorageError) as error:
        return None, f"the history could not be read: {clean(str(error), 200)}"
    except TimeoutError:
        return None, f"the history took longer than {READ_S:g} s: ask for fewer days"
    note = "" if days >= wanted.days else f"only the last {days:.0f} days were read: many entities are needed"
    return await asyncio.to_thread(_as_series, found, names, step_s), note


def _as_series(found: dict[str, Any], names: list[str], step_s: float) -> RecordedSeries:
    columns = found.get("max", found["values"])
    value = np.array([columns[name] for name in names], np.float64).T.reshape(-1, len(names))
    return RecordedSeries(np.array(found["t_ns"], np.int64), value, step_s)


def flat(live: Runtime, found: Explanation) -> dict[str, Any]:
    """Return an explanation as one object: dotted figures nested, tables as lists of objects, notes as
    sentences."""
    out: dict[str, Any] = {
        "site": live.engine.site.file.site, "now_ns": found.now_ns, "tick": live.engine.state.tick,
        "role": live.role,
    }  # fmt: skip
    out |= _nested({figure.name: figure.value for figure in found.figures})
    for table in found.tables:
        parent, _, child = table.name.partition(".")
        rows = [_nested(as_row(table, row)) for row in table.rows]
        if not child:
            out[parent] = rows
            continue
        key = table.columns[0].name
        groups: dict[Value, list[dict[str, Value]]] = {}
        for row in rows:
            groups.setdefault(row.pop(key), []).append(row)
        for row in out.get(parent, ()):
            row[child] = groups.get(row[next(iter(row))], [])
    out["notes"] = [s.text for s in found.sentences if s.kind != "summary"]
    return out


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with dotted names as nested objects."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        at = out
        *path, last = name.split(".")
        for part in path:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[last] = value
    return out
