"""Client of a Kubernetes API server: JSON over aiohttp, with limits, retries and token renewal for callers.

Each answer has a limit in time and size. 429 and 5xx are tried again after a wait that grows, a refused token
is read anew once, redirects and proxies are not followed. Knows no kind of object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import aiohttp
import msgspec

from connectors.backoff import Backoff
from connectors.http_answer import body_of, failing_as
from connectors.kubernetes.access import Access
from connectors.orders import always
from twin.catalogue import ConfigError, ConnectorError

MAX_BODY = 64 * 2**20  # bytes of an answer: a page of 500 pods is about 10 MB
MAX_LINE = 8 * 2**20  # bytes of one event of a watch; etcd holds objects of 1.5 MB
MAX_PAGES = 4000
PAGE = 500  # objects. source: the page size of kubectl (--chunk-size)
TRIES, FIRST_S, LONGEST_S = 4, 0.25, 4.0
WATCH_S = 45  # after which a watch is asked for anew, so that a dead connection is found out
_TYPES = {"merge": "application/merge-patch+json", "strategic": "application/strategic-merge-patch+json"}

Params = dict[str, str]


class ApiError(ConnectorError):
    """A refusal of the server: `status` as in HTTP, `reason` a word such as Conflict, `after_s` the wait
    before a retry."""

    def __init__(self, what: str, status: int, reason: str, message: str, after_s: float = 0.0) -> None:
        self.status, self.reason, self.after_s = status, reason, after_s
        self.message = message[:300]
        hint = {
            401: "; expected a valid token: renew it where it was read from",
            403: "; expected the rights of deploy/kubernetes/rbac.yaml",
        }.get(status, "")
        super().__init__(f"{what}: answers {status} {reason}: {self.message or 'no reason given'}{hint}")


class Away(ConnectorError):
    """The server is unreachable or its answer is invalid: worth another try later."""


class Expired(ConnectorError):
    """The server no longer keeps the version from which a watch or a list continues (410): list again."""


class KubernetesClient:
    """A connection that opens at first use. `load` gives the access, with the present token.

    `may_change` is asked before each request that changes anything, the repeated ones included.
    """

    def __init__(
        self, load: Callable[[], Access], *, timeout_s: float = 10.0, may_change: Callable[[], bool] = always
    ) -> None:
        self._load, self._timeout_s, self._may_change = load, timeout_s, may_change
        self._access: Access | None = None
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections; the next request opens one again, with the access as its files have it then.

        A renewed authority or certificate shows as no answer, and not as a refused token.
        """
        session, self._session, self._access = self._session, None, None
        if session is not None:
            await session.close()

    async def get(self, path: str, params: Params | None = None) -> bytes:
        """Return the answer's body. Raises ApiError if the server refuses, Away without an answer."""
        return await self._tried("GET", path, params)

    async def patch(self, path: str, body: object, kind: Literal["merge", "strategic"] = "merge") -> bytes:
        """Change an object; a resourceVersion in the patch makes the server refuse (409) a stale one."""
        return await self._tried("PATCH", path, None, body, _TYPES[kind])

    async def post(self, path: str, body: object, tries: int = 1) -> bytes:
        """Send an object, once unless said otherwise: 429 has a meaning of its own for an eviction."""
        return await self._tried("POST", path, None, body, "application/json", tries)

    async def pages(self, path: str, params: Params | None = None) -> AsyncGenerator[bytes, None]:
        """Yield a list, page by page. Raises Expired if it changed too much to continue."""
        token = ""
        for _ in range(MAX_PAGES):
            more: Params = {"limit": str(PAGE), **(params or {}), **({"continue": token} if token else {})}
            try:
                page = await self.get(path, more)
            except ApiError as error:
                if error.status == 410:
                    raise Expired(str(error)) from error
                raise
            yield page
            token = _continued(path, page)
            if not token:
                return
        raise Away(f"{path}: more than {MAX_PAGES} pages of {PAGE}")

    async def watch(self, path: str, params: Params) -> AsyncGenerator[bytes, None]:
        """Yield events as lines, until the server ends the watch after WATCH_S; b"" marks its begin.

        Raises Expired, ApiError, Away.
        """
        access = await self._opened()
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S), **params}
        limit = aiohttp.ClientTimeout(total=WATCH_S + self._timeout_s, sock_connect=self._timeout_s)
        try:
            with failing_as(Away, f"{access.server}{path}", WATCH_S + self._timeout_s):
                async with self._ask(access, "GET", path, query, timeout=limit) as answer:
                    if answer.status == 401:
                        await self._renew(access, path)
                        raise Away(f"{path}: the token was renewed")
                    if answer.status != 200:
                        raise _refusal("GET", path, answer, await body_of(answer, path, MAX_BODY, Away))
                    yield b""
                    async for line in _lines(answer, path):
                        yield line
        except ApiError as error:
            if error.status == 410:
                raise Expired(str(error)) from error
            raise

    async def _tried(
        self,
        method: str,
        path: str,
        params: Params | None,
        body: object = None,
        kind: str = "",
        tries: int = TRIES,
    ) -> bytes:
        """Request until there is an answer that a retry would not improve."""
        backoff, renewed, least_s = Backoff(FIRST_S, LONGEST_S, (0.75, 1.25)), False, 0.0
        for left in range(tries - 1, -1, -1):
            access = await self._opened()
            try:
                return await self._once(access, method, path, params, body, kind)
            except ApiError as error:
                if error.status == 401 and not renewed:
                    renewed = True
                    await self._renew(access, path)
                    return await self._once(await self._opened(), method, path, params, body, kind)
                if left == 0 or not (error.status == 429 or error.status >= 500):
                    raise
                least_s = min(error.after_s, LONGEST_S)
            except Away:
                if left == 0:
                    raise
            await asyncio.sleep(backoff.next_s(least_s))
        raise AssertionError("no attempts left")

    async def _once(
        self, access: Access, method: str, path: str, params: Params | None, body: object, kind: str
    ) -> bytes:
        if method != "GET" and not self._may_change():
            raise Away(f"{access.server}{path}: another daemon leads now; the {method} is not sent")
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        more: dict[str, Any] = {}
        if kind:
            more = {"data": msgspec.json.encode(body), "headers": {"Content-Type": kind}}
        with failing_as(Away, f"{access.server}{path}", self._timeout_s):
            async with self._ask(access, method, path, params or {}, timeout=limit, **more) as answer:
                text = await body_of(answer, path, MAX_BODY, Away)
                if answer.status not in (200, 201, 202):
                    raise _refusal(method, path, answer, text)
                return text

    def _ask(
        self, access: Access, method: str, path: str, params: Params, **more: Any
    ) -> Any:  # what aiohttp gives is awaited or entered
        headers = {**more.pop("headers", {})}
        if access.token is not None:
            headers["Authorization"] = f"Bearer {access.token}"
        if access.tls is not None:
            more["ssl"] = access.tls
        if access.tls_name is not None:
            more["server_hostname"] = access.tls_name
        assert self._session is not None
        url = access.server + path
        return self._session.request(
            method, url, params=params, headers=headers, allow_redirects=False, **more
        )

    async def _opened(self) -> Access:
        if self._access is None:
            self._access = await self._loaded()
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "application/json", "User-Agent": "racktwin"},
            )
        return self._access

    async def _loaded(self) -> Access:
        try:
            return await asyncio.to_thread(self._load)
        except ConfigError as error:
            raise Away(f"access: {str(error)[:300]}") from error

    async def _renew(self, refused: Access, path: str) -> None:
        """Reload a refused token, which may have been renewed in its file. Raises ApiError (401) if it was
        not."""
        if self._access is refused or self._access is None:  # None: closed meanwhile
            self._access = await self._loaded()
        if self._access is None or self._access.token == refused.token:
            where = "" if refused.token_from is None else f" of {refused.token_from}"
            what = "no token" if refused.token is None else f"the token{where}"
            raise ApiError(f"{refused.server}{path}", 401, "Unauthorized", f"{what} was refused")


async def _lines(answer: aiohttp.ClientResponse, path: str) -> AsyncGenerator[bytes, None]:
    """Yield the non-empty lines of an endless body. Raises Away for one beyond MAX_LINE."""
    rest = bytearray()
    async for part in answer.content.iter_any():
        rest += part
        if b"\n" in part:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.strip():
                    yield line
        if len(rest) > MAX_LINE:
            raise Away(f"{path}: an event beyond {MAX_LINE} bytes")


class _Status(msgspec.Struct):
    """Text of a refusal by the server (meta/v1 Status)."""

    reason: str | None = ""
    message: str | None = ""


def _refusal(method: str, path: str, answer: aiohttp.ClientResponse, text: bytes) -> ApiError:
    try:
        status = msgspec.json.decode(text, type=_Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = _Status(answer.reason or "", text[:200].decode("utf-8", "replace"))
    after = answer.headers.get("Retry-After", "")
    after_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
    return ApiError(
        f"{method} {path}", answer.status, (status.reason or "")[:60], status.message or "", after_s
    )


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str | None = ""
    continue_: str | None = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMeta = _ListMeta()


def _continued(path: str, page: bytes) -> str:
    return page_meta(path, page)[1]


def page_meta(path: str, page: bytes) -> tuple[str, str]:
    """Return (resourceVersion, continue token) of a page of a list. Raises Away for anything else."""
    try:
        meta = msgspec.json.decode(page, type=_Page).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Away(f"{path}: expected a list in JSON: {str(error)[:200]}") from None
    return meta.resource_version or "", meta.continue_ or ""


def now_text() -> str:
    """Return the present instant in the form of Kubernetes."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
