"""Fleet history over HTTP: values, alarms, commands and decisions of all halls, as ClickHouse has them.

A question takes a thread of its own while the server answers; a few at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from connectors.clickhouse import LISTS, ClickHouseError, FleetReader, ListQuestion, ValueQuestion
from twin.api.answers import MAX_ROWS, Refused, answer, known_query, live_of, number_of, seconds_of
from twin.api.runtime import Runtime
from twin.archive import fleet_reader
from twin.catalogue import NS, ConfigError, clean, find_signal

MAX_FLEET_QUESTIONS = 4  # at once
MAX_NAME = 500  # characters
MAX_ENTITIES = 4000
DAY_S, YEAR_S = 86_400, 366 * 86_400
FOREVER_NS = 2**62
T = TypeVar("T")
FLEET_QUESTIONS: web.AppKey[asyncio.Semaphore] = web.AppKey("fleet_questions", asyncio.Semaphore)


async def values(request: web.Request) -> web.Response:
    """Return a signal of entities over time in one hall or in all, by default over the last 24 hours.

    Each row is of one hall, entity and step: mean, least, most and last. `table` says which rows of the
    server were asked: values as they came, or their rollups.
    """
    known_query(request, "signal", "entity", "hall", "since", "until", "last_s", "step")
    key, entity = _name(request, "signal"), _name(request, "entity", MAX_ENTITIES)
    signal = find_signal(key)
    if signal is None:
        raise Refused(
            400, f"signal: {clean(key, 60)!r} is not in the catalogue; expected a name such as rack.power_w"
        )
    if not entity:
        raise Refused(400, "entity: missing; expected full paths, or their ends, such as hall1/r07")
    since_ns, until_ns = _range(request)
    step = seconds_of(request, "step", math.inf, 0.001, math.inf)
    asked = ValueQuestion(
        entity=entity, signal=key, since_ns=since_ns, until_ns=until_ns, hall=_name(request, "hall"),
        step_s=step if step < YEAR_S else None,
    )  # fmt: skip
    found = await _ask(request, lambda reader: reader.values(asked, time.time_ns()))
    span = {"since_ns": since_ns, "until_ns": until_ns}
    return answer({"signal": key, "unit": signal.unit, **span, **found})


async def lists(request: web.Request) -> web.Response:
    """List alarms, commands or decisions of one hall or of all, newest first, by default of the last 24
    hours.

    `entity` is a path or part of one, and names all below it; `hash` is the hash of the journal's line.
    """
    known_query(request, "what", "entity", "hall", "since", "until", "last_s", "limit")
    what = request.query.get("what", "decisions")
    if what not in LISTS:
        raise Refused(400, f"what: {clean(what, 40)!r} is unknown; expected {', '.join(LISTS)}")
    since_ns, until_ns = _range(request)
    asked = ListQuestion(
        what=what, since_ns=since_ns, until_ns=until_ns, hall=_name(request, "hall"),
        entity=_name(request, "entity"), limit=number_of(request, "limit", 200, 1, MAX_ROWS),
    )  # fmt: skip
    found = await _ask(request, lambda reader: reader.lines(asked))
    return answer({"what": what, "since_ns": since_ns, "until_ns": until_ns, **found})


def _name(request: web.Request, name: str, most: int = MAX_NAME) -> str:
    text = request.query.get(name, "")
    if len(text) > most or "\0" in text:
        raise Refused(400, f"{name}: expected at most {most} characters, none of them NUL")
    return text


def _range(request: web.Request) -> tuple[int, int]:
    """Return [since, until); without `since`, the last `last_s` seconds."""
    until_ns = number_of(request, "until", time.time_ns(), 0, FOREVER_NS)
    last_s = seconds_of(request, "last_s", DAY_S, 1, 100 * YEAR_S)
    since_ns = number_of(request, "since", max(0, until_ns - round(last_s * NS)), 0, FOREVER_NS)
    if since_ns >= until_ns:
        raise Refused(400, f"since ({since_ns}) is not before until ({until_ns})")
    return since_ns, until_ns


async def _ask(request: web.Request, question: Callable[[FleetReader], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of the server. Raises Refused without one."""
    turn = request.app[FLEET_QUESTIONS]
    if turn.locked():
        raise Refused(
            503, f"{MAX_FLEET_QUESTIONS} questions to the fleet's history are being answered; ask again later"
        )
    async with turn:
        try:
            return await beside(lambda: _answer(live_of(request), question))
        except ConfigError as error:
            raise Refused(503, str(error)) from None
        except ClickHouseError as error:
            raise Refused(503, f"the history of the fleet: {error}") from None


async def beside(work: Callable[[], T]) -> T:
    """Run `work` in a thread that the end of the daemon does not wait for; its result."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def resolve(result: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if done.done() else result())

    def run() -> None:
        try:
            found = work()
        except Exception as error:
            resolve(partial(done.set_exception, error))
        else:
            resolve(partial(done.set_result, found))

    threading.Thread(target=run, name="fleet-history", daemon=True).start()
    found: T = await done
    return found


def _answer(live: Runtime, question: Callable[[FleetReader], dict[str, Any]]) -> dict[str, Any]:
    reader = fleet_reader(live.loaded)
    try:
        return question(reader)
    finally:
        reader.link.close()
