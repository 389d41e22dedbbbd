"""Client of one Redfish service: JSON over aiohttp, with sessions, limits and retries for all callers.

Signs in by a session, by Basic where there is none; a session that was forgotten is opened anew once, a
refused password rests for a while, lest the account be locked. Answers have a limit in time and size, and no
redirect leads to another host.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec

from connectors.bmc.limits import Changed
from connectors.http_answer import body_of, failing_as
from connectors.orders import always
from twin.catalogue import ActuationError, ConfigError, ConnectorError

ROOT = "/redfish/v1/"  # source: DSP0266, the one path that is fixed
MAX_BODY = 2**20  # bytes of an answer
MAX_PATH = 1000  # characters of a link
REDIRECTS = 3
REST_S = 60.0  # after a refused password. source: estimate, below usual lockout counters
FORGOT_S = 5.0  # after a session that was forgotten at once: a service has few. source: estimate
BUSY_S = 30.0  # a service may ask us to wait no longer than this
SIGN_IN = "sign-in"  # the POST that opens a session
JSON = dict[str, Any]


class Gone(ConnectorError):
    """The resource does not exist, or no longer."""


class HttpAnswer(NamedTuple):
    """A resource, its version ("" if the service gives none), and its size in bytes."""

    body: JSON
    tag: str
    size: int = 0


class RedfishClient:
    """One service. `secret` gives the password at each sign-in; `http` is the session of aiohttp.

    `may_change` is asked before each request that changes anything: a sign-in may come before it.
    """

    def __init__(
        self,
        base: str,
        user: str,
        secret: Callable[[], str],
        http: Callable[[], aiohttp.ClientSession],
        *,
        timeout_s: float = 5.0,
        tls: Any = None,
    ) -> None:
        self.base, self._user, self._secret, self._http = base.rstrip("/"), user, secret, http
        self._timeout_s, self._tls = timeout_s, tls
        self.may_change: Callable[[], bool] = always
        self._token = self._session_path = ""
        self._basic = ""
        self._root: JSON | None = None
        self._signing = asyncio.Lock()  # an order on the power may come while others read
        self._rest_until_s = self._busy_until_s = 0.0
        self._resting = ""

    async def get(self, path: str) -> HttpAnswer:
        """Return a resource. Raises Gone, ConnectorError, or ActuationError if the service refuses."""
        return await self._ask("GET", path)

    async def patch(self, path: str, body: JSON, tag: str) -> None:
        """Change a resource that is still at `tag`. Raises Changed, ConnectorError, ActuationError."""
        await self._ask("PATCH", path, body, tag)

    async def post(self, path: str, body: JSON) -> None:
        """Request an action. Raises Gone, ConnectorError, or ActuationError if the service refuses."""
        await self._ask("POST", path, body)

    async def root(self) -> JSON:
        """Return the service root, requested once."""
        if self._root is None:
            try:
                self._root = (await self._once("GET", ROOT, None, "", signed=False)).body
            except Gone as error:
                raise ConnectorError(
                    f"{error}; expected a Redfish service: is this a BMC's address?"
                ) from None
        return self._root

    async def close(self) -> None:
        """Release the session: a BMC has few."""
        path, token, self._session_path = self._session_path, self._token, ""
        if path and token:
            with contextlib.suppress(ConnectorError, ActuationError):
                await self._once("DELETE", path, None, "")
        self._token = ""

    async def _ask(self, method: str, path: str, body: JSON | None = None, tag: str = "") -> HttpAnswer:
        now_s = time.monotonic()
        if now_s < self._rest_until_s:
            raise ConnectorError(f"{self.base}: {self._resting}")
        if now_s < self._busy_until_s and method != "POST":  # an order on the power waits for nothing
            raise ConnectorError(f"{self.base}: asks to wait {self._busy_until_s - now_s:.0f} s more")
        async with self._signing:
            if not self._token and not self._basic:
                await self._sign_in()
        token = self._token
        try:
            return await self._once(method, path, body, tag)
        except _NotSigned:
            if self._basic:
                raise self._refused("Basic") from None
        async with self._signing:
            if self._token == token:  # it forgot our session
                await self._sign_in()
        try:
            return await self._once(method, path, body, tag)
        except _NotSigned:
            self._token, self._rest_until_s = "", time.monotonic() + FORGOT_S
            self._resting = "drops sessions as soon as they are opened"
            raise ConnectorError(f"{self.base}: {self._resting}") from None

    async def _sign_in(self) -> None:
        self._token = self._session_path = ""
        self._basic = ""
        try:
            password = await asyncio.to_thread(self._secret)
        except ConfigError as error:
            raise ConnectorError(f"{self.base}: {str(error)[:200]}") from None
        path = link(((await self.root()).get("Links") or {}), "Sessions")
        if path is None:
            self._basic = _basic(self._user, password)
            return
        try:
            answer = await self._once(
                "POST", path, {"UserName": self._user, "Password": password}, "", signed=False
            )
        except _NotSigned:
            raise self._refused("a new session") from None
        except Gone:
            answer = HttpAnswer({}, "")
        except ActuationError as error:
            if getattr(error, "status", 0) in (400, 403):
                raise self._refused("a new session") from None
            answer = HttpAnswer({}, "")
        self._token = answer.tag
        if self._token:
            self._session_path = answer.body.get("@odata.id") or ""
        else:
            self._basic = _basic(self._user, password)

    def _refused(self, what: str) -> ConnectorError:
        self._token = self._basic = ""
        self._rest_until_s = time.monotonic() + REST_S
        self._resting = f"refuses {what} to user {self._user[:40]}; expected its password in password_file"
        return ConnectorError(f"{self.base}: {self._resting}")

    async def _once(
        self, method: str, path: str, body: JSON | None, tag: str, *, signed: bool = True
    ) -> HttpAnswer:
        for _ in range(REDIRECTS):
            answer = await self._send(method, path, body, tag, signed)
            if isinstance(answer, HttpAnswer):
                return answer
            path = answer
        raise ConnectorError(f"{self.base}{path}: more than {REDIRECTS} redirects")

    async def _send(
        self, method: str, path: str, body: JSON | None, tag: str, signed: bool
    ) -> HttpAnswer | str:
        """Send one request; returns the answer, or the path on this service that it leads to."""
        headers = {"If-Match": tag} if tag else {}
        options: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls}
        if signed and self._token:
            headers["X-Auth-Token"] = self._token
        elif signed and self._basic:
            headers["Authorization"] = self._basic
        if body is not None:
            headers["Content-Type"] = "application/json"
            options["data"] = msgspec.json.encode(body)
        url = self.base + path
        if signed and method in ("PATCH", "POST") and not self.may_change():
            raise ConnectorError(f"{url}: another daemon leads now; the {method} is not sent")
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        with failing_as(ConnectorError, url, self._timeout_s):
            async with self._http().request(
                method, url, headers=headers, allow_redirects=False, timeout=limit, **options
            ) as answer:
                text = await body_of(answer, url, MAX_BODY, ConnectorError)
                return self._judge(method if signed or method != "POST" else SIGN_IN, url, answer, text)

    def _judge(self, method: str, url: str, answer: aiohttp.ClientResponse, text: bytes) -> HttpAnswer | str:
        """Return the meaning of an answer."""
        status, headers = answer.status, answer.headers
        if status in (301, 302, 303, 307, 308):
            if method != "GET" and status not in (307, 308):
                raise ConnectorError(f"{url}: answers a {method} with {status}")
            return self._same_host(url, headers.get("Location", ""))
        if status == 401:
            raise _NotSigned(f"{url}: answers 401")
        if status in (429, 503):
            after = headers.get("Retry-After", "")
            if after.isascii() and after.isdigit() and len(after) < 6:
                self._busy_until_s = time.monotonic() + min(float(after), BUSY_S)
            raise ConnectorError(f"{url}: answers {status}: busy{f', for {after[:5]} s' if after else ''}")
        if status in (412, 428):
            raise Changed(f"{url}: answers {status}: the resource changed meanwhile")
        if status in (404, 410):
            raise Gone(f"{url}: answers {status}")
        if method == SIGN_IN and status >= 400:  # that has the password, which an answer might hold
            text = b""
        if status >= 500 or status == 408:
            raise ConnectorError(f"{url}: answers {status} {_words(text)}".rstrip())
        if status >= 400:
            raise Refusal(f"{url}: answers {status} {_words(text)}".rstrip(), status)
        if method == SIGN_IN:
            location = headers.get("Location", "")
            path = self._same_host(url, location) if location else ""
            return HttpAnswer({"@odata.id": path}, headers.get("X-Auth-Token", ""))
        if method != "GET":
            return HttpAnswer({}, "")
        found = decoded(text, url)
        tag = headers.get("ETag") or found.get("@odata.etag")
        return HttpAnswer(found, tag[:200] if isinstance(tag, str) and tag.isprintable() else "", len(text))

    def _same_host(self, url: str, location: str) -> str:
        """Return the path of a Location. Raises ConnectorError for another host."""
        try:
            to, here = urlsplit(urljoin(url, location)), urlsplit(self.base)
            same = (to.scheme, to.hostname, to.port) == (here.scheme, here.hostname, here.port)
        except ValueError:
            same = False
        if not same or not location or len(to.path) > MAX_PATH:
            raise ConnectorError(
                f"{url}: redirects to another host ({location[:80]!r}); expected a path on this host"
            )
        return to.path + (f"?{to.query}" if to.query else "")


class Refusal(ActuationError):
    """A permanent refusal of the service."""

    def __init__(self, words: str, status: int) -> None:
        self.status = status
        super().__init__(words)


class _NotSigned(ConnectorError):
    pass


def decoded(text: bytes, url: str) -> JSON:
    """Return the object in an answer. Raises ConnectorError for anything else."""
    try:
        body = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectorError(f"{url}: expected JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise ConnectorError(f"{url}: expected a JSON object, got {type(body).__name__}")
    return body


def link(body: Any, name: str) -> str | None:
    """Return the path that a property refers to; None if it is absent or no path of this service."""
    found = body.get(name) if isinstance(body, dict) else None
    path = found.get("@odata.id") if isinstance(found, dict) else None
    return path if is_path(path) else None


def is_path(path: object) -> bool:
    """Return True for a path on the service: `/redfish/...`, without host or parent steps."""
    return (
        isinstance(path, str)
        and path.startswith("/redfish/")
        and len(path) <= MAX_PATH
        and path.isascii()
        and path.isprintable()
        and not {" ", "\\", "#"} & set(path)
        and "/../" not in f"{path}/"
    )


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _words(text: bytes) -> str:
    """Return the text of a refusal (the error object of DSP0266), as one short line."""
    try:
        error = msgspec.json.decode(text)["error"]
        more = error.get("@Message.ExtendedInfo") or [{}]
        words = more[0].get("Message") or error.get("message")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError,
            IndexError):  # fmt: skip
        return ""
    return " ".join(words.split())[:200] if isinstance(words, str) else ""
