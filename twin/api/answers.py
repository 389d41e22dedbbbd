"""Responses: turn the state of the daemon into JSON, and refusals into plain text.

JSON has no NaN and no infinity: both are null. Arrays become lists; the caller bounds their length.
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
    """Return JSON text; NaN and infinity become null."""
    return msgspec.json.encode(tree, enc_hook=plain)


def answer(tree: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=packed(tree), status=status, content_type=JSON, headers=headers)


def refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON response with a refusal and its reason."""
    return answer({"error": clean(why, MAX_SAID), "status": status}, status, headers)


def live_of(request: web.Request) -> Runtime:
    """Return the daemon behind a request."""
    return request.app[LIVE]


async def read_of(request: web.Request) -> bytes:
    """Return the body of a request. Raises Refused if it does not arrive."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:g} s", {"Connection": "close"}) from None


async def body_of(request: web.Request, kind: type[T]) -> T:
    """Return the body as `kind`. Raises Refused with the place and the problem."""
    raw = await read_of(request)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Refused(400, f"the body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, "the body is not JSON; expected an object as /openapi.json describes it") from None


def number_of(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """Return a whole number of the query. Raises Refused outside its bounds."""
    text = request.query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19) or not low <= int(text) <= high:
        raise Refused(400, f"{name}: expected a whole number from {low} to {high}")
    return int(text)


def seconds_of(request: web.Request, name: str, default: float, low: float, high: float) -> float:
    """Return a number of the query. Raises Refused outside its bounds."""
    text = request.query.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise Refused(400, f"{name}: expected a number from {low:g} to {high:g}")
    return value


def listed(request: web.Request, name: str) -> list[str]:
    """Return the values of a query parameter, given once with commas or several times."""
    return [part for text in request.query.getall(name, []) for part in text.split(",") if part]


def known_query(request: web.Request, *names: str) -> None:
    """Raise Refused for an unknown parameter: a misspelt filter would select everything."""
    strange = sorted(set(request.query) - set(names))
    if strange:
        expected = ", ".join(names) or "none"
        raise Refused(400, f"unknown parameter {clean(strange[0], 60)}; expected {expected}")
