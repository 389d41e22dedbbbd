"""HTTPS client: one GET at a time to a public service, bounded in time and size, with readable errors.

It verifies the server's certificate, follows no redirect and uses no proxy of the environment. A query may
hold a secret, so no text shows one.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from connectors.http_answer import body_of, failing_as
from twin.catalogue import NS, ConfigError, ConnectorError

MAX_BODY = 4 * 2**20  # two days of quarter hours are about 100 kB of XML
MOST_AFTER_S = 6 * 3600.0  # a server's wish to wait counts up to this. source: estimate
HINTS = {
    400: "; check the zone or region",
    401: "; expected 200: check the key or password, and whether it expired",
    403: "; expected 200: check the key, and whether the plan includes this zone",
    404: "; expected 200: check `url` and the zone or region",
    429: "; racktwin asks less often until the limit allows more",
}


class ServiceError(ConnectorError):
    """A request without a valid answer. `refused`: a retry does not help; `after_s`: earliest retry."""

    def __init__(self, why: str, status: int = 0, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.after_s = status, after_s

    @property
    def refused(self) -> bool:
        """Return True if only a person can solve the problem."""
        return 300 <= self.status < 500 and self.status not in (408, 429)


class HttpsClient:
    """Connections to one service. `ca_file`: trusted authorities in place of the host's.

    `ahead_s` is how far the server's clock was ahead of ours with its latest answer. Raises ConfigError for a
    file that is none.
    """

    def __init__(self, timeout_s: float, ca_file: str | None = None) -> None:
        self.timeout_s, self.ahead_s = timeout_s, 0.0
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{ca_file}: expected certificates in PEM: {error}") from None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "racktwin", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(
        self, url: str, params: dict[str, str], now_ns: int, headers: dict[str, str] | None = None
    ) -> bytes:
        """Return the body of the answer. Raises ServiceError with the actual result."""
        assert self._session is not None, "enter it first"
        where = shown(url)
        options: dict[str, Any] = {"ssl": self._tls} if url.startswith("https:") else {}
        with failing_as(ServiceError, where, self.timeout_s):
            async with self._session.get(
                url, params=params, headers=headers or {}, allow_redirects=False, **options
            ) as answer:
                date = _date_ns(answer.headers.get("Date"))
                self.ahead_s = 0.0 if date is None else (date - now_ns) / NS
                if answer.status != 200:
                    raise _refusal(where, answer, now_ns)
                return await body_of(answer, where, MAX_BODY, ServiceError)


def shown(url: str) -> str:
    """Return a URL without password and query, for people."""
    parts = urlsplit(url)
    return f"{parts.hostname or ''}{'' if parts.port is None else f':{parts.port}'}{parts.path}"


def _refusal(where: str, answer: aiohttp.ClientResponse, now_ns: int) -> ServiceError:
    status, hint = answer.status, HINTS.get(answer.status, "; expected 200")
    if 300 <= status < 400:
        target = shown(answer.headers.get("Location", ""))[:100]
        hint = (
            f" to {target or 'nowhere'}; redirects are not followed; if the service moved, set its new "
            "address in `url`"
        )
    return ServiceError(
        f"{where}: answers {status}{hint}", status, retry_after_s(answer.headers.get("Retry-After"), now_ns)
    )


def retry_after_s(text: str | None, now_ns: int) -> float:
    """Return the seconds until a server accepts the next request, from a number or a date (RFC 9110,
    10.2.3); 0: any."""
    if text is None:
        return 0.0
    text = text.strip()
    if text.isascii() and text.isdecimal() and len(text) < 12:
        return min(float(text), MOST_AFTER_S)
    date = _date_ns(text)
    return 0.0 if date is None else min(max(0.0, (date - now_ns) / NS), MOST_AFTER_S)


def _date_ns(text: str | None) -> int | None:
    if text is None or len(text) > 60:
        return None
    try:
        date = parsedate_to_datetime(text)
        return round((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()) * NS
    except (ValueError, TypeError, OverflowError):
        return None


def query_time(now_ns: int) -> datetime:
    """Return the hour of an instant, UTC."""
    return datetime.fromtimestamp(now_ns // NS, UTC).replace(minute=0, second=0, microsecond=0)
