"""Answers: how the interface turns what the daemon holds into JSON, and a refusal into plain words.

JSON has no NaN and no infinity: both are null. Arrays are lists, and bounded by whoever asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from twin.api.runtime import Runtime
from twin.catalogue import clean

LIVE: web.AppKey[Runtime] = web.AppKey("live", Runtime)
MAX_SAID = 500  # characters of a reason
MAX_ROWS = 1000  # of one answer
BODY_S = 10.0
JSON = "application/json"
T = TypeVar("T")


class Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.headers = status, why, dict(headers or {})


def plain(value: Any) -> Any:
    """Convert types that msgspec cannot encode: arrays, sets and NumPy's numbers."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def packed(tree: Any) -> bytes:
    """JSON text; what is not a number is null."""
    return msgspec.json.encode(tree, enc_hook=plain)


def answer(tree: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON response."""
    return web.Response(body=packed(tree), status=status, content_type=JSON, headers=headers)


def refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON response that says no, and why."""
    return answer({"error": clean(why, MAX_SAID), "status": status}, status, headers)


def live_of(request: web.Request) -> Runtime:
    """The daemon behind a request."""
    return request.app[LIVE]


async def read_of(request: web.Request) -> bytes:
    """The body. Raises Refused for one that does not come."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:g} s", {"Connection": "close"}) from None


async def body_of(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`. Raises Refused with what is wrong, where."""
    raw = await read_of(request)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Refused(400, f"the body is not as expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, "the body is no JSON; expected an object as /openapi.json describes it") from None


def number_of(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query. Raises Refused outside its bounds."""
    text = request.query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19) or not low <= int(text) <= high:
        raise Refused(400, f"{name}: expected a whole number from {low} to {high}")
    return int(text)


def seconds_of(request: web.Request, name: str, default: float, low: float, high: float) -> float:
    """A number of the query. Raises Refused outside its bounds."""
    text = request.query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise Refused(400, f"{name}: expected a number from {low:g} to {high:g}")
    return value


def listed(request: web.Request, name: str) -> list[str]:
    """The values of a query parameter, given once with commas or several times."""
    return [part for text in request.query.getall(name, []) for part in text.split(",") if part]


def known_query(request: web.Request, *names: str) -> None:
    """A misspelt filter would be one that lets everything through. Raises Refused."""
    strange = sorted(set(request.query) - set(names))
    if strange:
        expected = ", ".join(names) or "none"
        raise Refused(400, f"unknown parameter {clean(strange[0], 60)}; expected {expected}")
