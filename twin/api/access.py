"""Access: authorises HTTP requests by role, and records refusals.

Every refusal is counted and journaled at a bounded rate: a flood becomes one line with a count. A wrong token
delays its sender; a valid one always passes, so nobody can lock an operator out. The module does not depend
on the routes.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from twin.api.answers import Refused, known_query, live_of, refusal
from twin.api.tokens import PREFIX, Role, Token, Tokens
from twin.contracts import AccessRecord, JournalRecord

log = logging.getLogger(__name__)
WINDOW_S = 10.0  # refusals of one sender for one reason within this are one line of the journal
MAX_SENDERS = 500
MAX_LINES = 60  # lines a window, whatever the senders do
OTHERS = "others"
FREE_TRIES, LONGEST_WAIT_S, FORGIVEN_S = 5, 60.0, 300.0

WHO = web.RequestKey("who", Token)
TOKENS: web.AppKey[Tokens] = web.AppKey("tokens", Tokens)
HEADERS = {
    "Server": "racktwin",  # not which versions of what
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NOTHING = "default-src 'none'; frame-ancestors 'none'"
_LOCAL = ("127.0.0.1", "localhost", "::1")

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusals:
    """Counts refusals, journals a part of them, and gives the wait for a sender of wrong tokens."""

    def __init__(
        self, note: Callable[[JournalRecord], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note, self._clock = note, clock
        self.counts: dict[str, int] = {}
        self._open: OrderedDict[tuple[str, str], tuple[float, int, dict[str, Any]]] = OrderedDict()
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._window_s, self._lines = clock(), 0

    def log(self, remote: str, why: str, **more: Any) -> None:
        """Journal a refusal. The first of a window is a line at once; the others are counted until it
        ends."""
        self.counts[why] = self.counts.get(why, 0) + 1
        now = self._clock()
        self.flush(now)
        key = (remote, why)
        if key not in self._open and (len(self._open) >= MAX_SENDERS or not self._may_write(now)):
            key = (OTHERS, why)
            if key not in self._open:
                self._open[key] = (now, 1, more)
                return
        if key in self._open:
            begun, count, details = self._open[key]
            self._open[key] = (begun, count + 1, details)
            return
        self._open[key] = (now, 0, more)
        self._note(AccessRecord(remote=remote, why=why, count=1, **more))

    def _may_write(self, now: float) -> bool:
        if now - self._window_s >= WINDOW_S:
            self._window_s, self._lines = now, 0
        self._lines += 1
        return self._lines <= MAX_LINES

    def flush(self, now: float | None = None, everything: bool = False) -> None:
        """Write down the windows that have ended."""
        now = self._clock() if now is None else now
        while self._open:
            (remote, why), (begun, count, more) = next(iter(self._open.items()))
            if now - begun < WINDOW_S and not everything:
                return
            del self._open[remote, why]
            if count:
                self._note(AccessRecord(remote=remote, why=why, count=count, **more))

    def wrong(self, remote: str) -> None:
        """Note a wrong token of a sender."""
        now = self._clock()
        last, tries = self._wrong.pop(remote, (now, 0))
        if now - last > FORGIVEN_S:
            tries = 0
        self._wrong[remote] = (now, min(tries + 1, 1000))
        while len(self._wrong) > MAX_SENDERS:
            self._wrong.popitem(last=False)

    def wait_s(self, remote: str) -> float:
        """Return the seconds for which this sender's tokens are not checked; 0 if it need not wait."""
        last, tries = self._wrong.get(remote, (0.0, 0))
        if tries <= FREE_TRIES:
            return 0.0
        pause = min(LONGEST_WAIT_S, 2.0 ** min(tries - FREE_TRIES - 1, 16))
        return max(0.0, last + pause - self._clock())


REFUSALS: web.AppKey[Refusals] = web.AppKey("refusals", Refusals)


@dataclass(frozen=True, slots=True)
class Gate:
    """A route's conditions: a role (None: open to all), and its parameters (None: checked by its handler).

    A token of some halls passes `by_hall` alone: routes that keep to the halls of the token.
    """

    role: Role | None
    params: tuple[str, ...] | None
    by_hall: bool = False


GATES: web.AppKey[dict[tuple[str, str], Gate]] = web.AppKey("gates", dict)


def sender(request: web.Request) -> str:
    """Return the address behind a request; for IPv6 its network, because one sender has many addresses
    there."""
    try:
        address = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return "unknown"
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def is_local(host: str) -> bool:
    """Return True if a server's name or address is this host's loopback."""
    return host in _LOCAL


def _host_fits(request: web.Request) -> bool:
    """Return True for a Host that names this daemon. DNS rebinding leads a browser to loopback under a
    foreign name."""
    config = live_of(request).loaded.config.api
    if config is None or not is_local(config.host):
        return True
    host = request.headers.get("Host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower() in _LOCAL


def _place(request: web.Request) -> str:
    """Return the route of a request. A foreign path is not repeated: it may hold a secret."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "an unknown path"


def _admitted(request: web.Request, role: Role, by_hall: bool) -> Token:
    """Return the token behind a request. Raises Refused, and journals the refusal."""
    refusals, remote, place = request.app[REFUSALS], sender(request), _place(request)
    scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
    challenge = {"WWW-Authenticate": 'Bearer realm="racktwin"'}
    if scheme.lower() != "bearer" or not presented.strip():
        refusals.log(remote, "no token", path=place)
        raise Refused(401, f"a token is needed: send the header Authorization: Bearer {PREFIX}...", challenge)
    token, why = request.app[TOKENS].who(presented.strip())
    if token is None:
        wait_s = refusals.wait_s(remote)
        refusals.wrong(remote)
        if wait_s > 0:
            refusals.log(remote, "too many wrong tokens", path=place)
            raise Refused(429, "too many wrong tokens; wait", {"Retry-After": str(int(wait_s) + 1)})
        refusals.log(remote, why, path=place)
        raise Refused(401, "this token is unknown here or has expired; ask the operator for a new one "
                           "(racktwin token add NAME --role ROLE)", challenge)  # fmt: skip
    if not token.may(role):
        refusals.log(remote, "role too small", path=place, name=token.name, role=token.role, needs=role)
        raise Refused(403, f"needs the role {role}; the token {token.name} has the role {token.role}")
    if token.halls and not by_hall:
        raise other_hall(request, token)
    return token


def other_hall(request: web.Request, token: Token) -> Refused:
    """Refuse data beyond a token's own halls, and journal it; the refusal names no other hall."""
    more = {"path": _place(request), "name": token.name, "role": token.role}
    request.app[REFUSALS].log(sender(request), "not its own hall", **more)
    why = f"the token {token.name} is only for {', '.join(token.halls)}"
    return Refused(403, f"{why}: it reads /api/v1/fleet, and as operator holds and releases their budgets")


@web.middleware
async def admit(request: web.Request, handler: Answering) -> web.StreamResponse:
    """Check every request: the host name, the token, then its role. Turns errors into answers."""
    try:
        if not _host_fits(request):
            request.app[REFUSALS].log(sender(request), "foreign host name", path=_place(request))
            raise Refused(421, "the request names another host; use localhost or 127.0.0.1")
        method = "GET" if request.method == "HEAD" else request.method
        gate = request.app[GATES].get((method, _place(request)), Gate("viewer", ()))
        if gate.role is not None:
            request[WHO] = _admitted(request, gate.role, gate.by_hall)
        if gate.params is not None:
            known_query(request, *gate.params)
        return await handler(request)
    except Refused as error:
        return refusal(error.status, error.why, error.headers)
    except web.HTTPRequestEntityTooLarge:
        return refusal(413, "the body is too large; expected at most 1 MiB")
    except web.HTTPException as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return refusal(error.status, f"{error.reason}; /openapi.json lists all paths", allow)
    except (ConnectionError, TimeoutError):
        return refusal(503, "the answer took too long; try again")
    except Exception as error:
        live = live_of(request)
        live.counts["api_faults"] = live.counts.get("api_faults", 0) + 1
        # The error's text may quote the request; its place is enough to find it.
        log.error("%s %s failed", request.method, _place(request), exc_info=bare(error))
        return refusal(500, "an internal error, counted and logged; the daemon keeps running")


def bare(error: BaseException) -> tuple[type[BaseException], BaseException, Any]:
    """Return the place of an error without its text, for the log."""
    return RuntimeError, RuntimeError(type(error).__name__), error.__traceback__


async def harden(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every answer has."""
    response.headers["Server"] = HEADERS["Server"]  # aiohttp has put its own there
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Content-Security-Policy", NOTHING)
    if request.secure:
        response.headers.setdefault("Strict-Transport-Security", "max-age=31536000")


def author(request: web.Request) -> str:
    """Return the author: the name of the token, never anything that the request says."""
    return request[WHO].name
