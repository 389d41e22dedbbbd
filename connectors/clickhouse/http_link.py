"""Link to a ClickHouse server: inserts and queries over its HTTP interface, by urllib3.

An insert is one block, so it is taken as a whole or not at all, and a server that took it already takes it no
second time: it knows it by its token. Names go as parameters of the query, never into its text.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3
import zstandard
from urllib3.exceptions import HTTPError

from twin.catalogue import ConfigError

TIMEOUT_S = 15.0
MAX_ANSWER = 32 * 2**20
MAX_TEXT = 300  # of a server's complaint
LEVEL = 1  # of zstd
UNREACHABLE, REFUSED_LOGIN, NO_TABLE, NO_DATABASE, NO_RIGHT = 0, 516, 60, 81, 497
_REMEDIES = {
    REFUSED_LOGIN: "expected `username` and the password in `password_file` of a user of that server",
    194: "expected `username` and the password in `password_file` of a user of that server",
    NO_TABLE: "expected the tables that `racktwin fleet history --schema` prints",
    NO_DATABASE: "expected the database that `racktwin fleet history --schema` creates",
    NO_RIGHT: "expected the rights that `racktwin fleet history --schema` names",
    201: "the user's quota at the server is used up",
}
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0", "\b": "\\b"})


class ClickHouseError(Exception):
    """A failed request. `status` is 0 without an answer; `code` is ClickHouse's own, or 0."""

    def __init__(self, text: str, status: int = UNREACHABLE, code: int = 0) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Login:
    """A user of the server; its password is never shown."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


class ClickHouseLink:
    """One server and database. Raises ConfigError for an invalid URL or login."""

    def __init__(
        self,
        url: str,
        database: str,
        login: Login | None = None,
        trust: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        login = login or Login()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.password or parts.query:
            raise ConfigError("the URL of ClickHouse: expected http(s)://HOST:PORT without a password")
        for text in (login.username, login.password):
            if text is not None and not (text.isascii() and text.isprintable() and text.strip() == text):
                raise ConfigError("user and password of ClickHouse: expected one line of printable ASCII")
        self.place = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        self.database, self.timeout_s = database, timeout_s
        self._url, self._secret = url.rstrip("/") + "/", login.password or ""
        self._headers = {"X-ClickHouse-User": login.username} if login.username is not None else {}
        if login.password is not None:
            self._headers["X-ClickHouse-Key"] = login.password
        context = (trust or ssl.create_default_context()) if parts.scheme == "https" else None
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=4, ssl_context=context)
        self._packer = zstandard.ZstdCompressor(level=LEVEL)

    def insert(self, table: str, columns: Sequence[str], form: str, body: bytes) -> None:
        """Insert rows in a format of ClickHouse; a repeat makes no duplicates. Raises ClickHouseError."""
        names = ", ".join(columns)
        settings = {
            "query": f"INSERT INTO {self.database}.{table} ({names}) FORMAT {form}",
            # A server that gathers inserts on its own would say yes before it has them.
            "async_insert": "0",
            "insert_deduplication_token": blake2b(body, digest_size=16).hexdigest(),
            # A try that failed between table and rollup is made whole by the next one.
            "deduplicate_blocks_in_dependent_materialized_views": "1",
        }
        if self._request(settings, self._packer.compress(body), {"Content-Encoding": "zstd"}):
            raise ClickHouseError(
                f"{self.place}: is not ClickHouse: it answers an insert with text; check host and port", 200
            )

    def ask(self, sql: str, names: Mapping[str, str | int | float] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a SELECT; `names` are its parameters. Raises ClickHouseError."""
        settings = {"wait_end_of_query": "1", "default_format": "JSONEachRow"}
        settings |= {f"param_{name}": _escaped(value) for name, value in (names or {}).items()}
        text = self._request(settings, sql.encode(), {})
        try:
            return [msgspec.json.decode(line, type=dict) for line in text.splitlines() if line]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ClickHouseError(
                f"{self.place}: is not ClickHouse: its answer is not JSON; check host and port", 200
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _request(self, settings: dict[str, str], body: bytes, headers: dict[str, str]) -> bytes:
        query, ends_s = urlencode({"database": self.database, **settings}), time.monotonic() + self.timeout_s
        try:
            answer = self._pool.request(
                "POST",
                f"{self._url}?{query}",
                body=body,
                headers={**self._headers, **headers},
                timeout=urllib3.Timeout(total=self.timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except (HTTPError, OSError) as error:
            raise ClickHouseError(f"{self.place}: {self._clean(_why(error, self.timeout_s))}") from None
        try:
            text = _whole(answer, ends_s)
        except (HTTPError, OSError) as error:
            raise ClickHouseError(f"{self.place}: {self._clean(_why(error, self.timeout_s))}") from None
        finally:
            with contextlib.suppress(Exception):
                answer.release_conn()
        if len(text) > MAX_ANSWER:
            raise ClickHouseError(
                f"{self.place}: an answer of more than {MAX_ANSWER} bytes; ask for less", 413
            )
        if answer.status != 200:
            raise self._refusal(answer.status, answer.headers.get("X-ClickHouse-Exception-Code", ""), text)
        return text

    def _refusal(self, status: int, code_text: str, text: bytes) -> ClickHouseError:
        code = int(code_text) if code_text.isascii() and code_text.isdigit() and len(code_text) < 9 else 0
        said = self._clean(text.decode("utf-8", "replace")) or "without a word"
        remedy = f"; {_REMEDIES[code]}" if code in _REMEDIES else ""
        return ClickHouseError(f"{self.place}: answers {status}: {said}{remedy}", status, code)

    def _clean(self, text: str) -> str:
        """Return text without the password, which the server may repeat."""
        if self._secret:
            text = text.replace(self._secret, "***")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_TEXT]


def _whole(answer: urllib3.BaseHTTPResponse, ends_s: float) -> bytes:
    """Return the body, or one byte more than the limit. Raises HTTPError if it is incomplete."""
    data = bytearray()
    while part := answer.read1(MAX_ANSWER + 1 - len(data)):
        data += part
        if len(data) > MAX_ANSWER:
            answer.close()  # its connection would begin with the rest
            break
        if time.monotonic() > ends_s:
            answer.close()
            raise urllib3.exceptions.TimeoutError
    return bytes(data)


def _escaped(value: str | int | float) -> str:
    """Return a parameter in the server's form: a text with the escapes of TSV."""
    return value.translate(_ESCAPES) if isinstance(value, str) else repr(value)


def _why(error: Exception, timeout_s: float) -> str:
    if isinstance(error, urllib3.exceptions.SSLError):
        return f"TLS failed: {error}; expected a certificate for this host name that `tls.ca_file` trusts"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "no answer; check that the server runs, and its host and port"
    if isinstance(error, urllib3.exceptions.TimeoutError):  # the base of the one above
        return f"no complete answer within {timeout_s:g} s"
    return f"{type(error).__name__}: {error}"
