"""HTTP client of the commands. It uses only the standard library, so that commands start fast.

It takes the address and the token from options, the environment, or the daemon's configuration on the same
host. A token is never a command-line argument, and is never sent in clear text to another host.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from twin.api.tokens import MAX_PRESENTED, PREFIX, read_secret
from twin.catalogue import ConfigError, ConnectorError
from twin.config import find_config

if TYPE_CHECKING:
    from twin.config import Loaded

DEFAULT_URL = "http://127.0.0.1:8077"
TIMEOUT_S = 15.0
MAX_ANSWER = 64 * 2**20
GIVE_TOKEN = (
    "give one with --token-file FILE (- reads it from standard input) or in the environment with "
    "RACKTWIN_TOKEN_FILE or RACKTWIN_TOKEN; on the daemon's own host, --config FILE names its configuration"
)
_LOCAL = ("127.0.0.1", "localhost", "::1")


class ApiRefused(ConnectorError):
    """A refusal by the daemon; the text is its reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Client:
    """A daemon's address and the token for it."""

    url: str
    token: str = ""
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    timeout_s: float = TIMEOUT_S
    hint: str = ""  # the origin of the token

    def get(self, path: str, **query: Any) -> Any:
        """Return the answer to a query; parameters that are None are left out."""
        given = {k: v for k, v in query.items() if v is not None}
        return self.call("GET", path + ("?" + urlencode(given) if given else ""))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to an action; entries that are None are left out."""
        return self.call("POST", path, {k: v for k, v in body.items() if v is not None})

    def delete(self, path: str) -> Any:
        """Return the answer to a DELETE request."""
        return self.call("DELETE", path)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request. Raises ApiRefused with the daemon's reason, or ConnectorError without an
        answer."""
        headers = {"Accept": "application/json", "User-Agent": "racktwin"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if method != "GET":
            headers |= {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
        connection = self._connect()
        try:
            connection.request(method, "/api/v1" + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectorError(self._silent(error)) from None
        finally:
            connection.close()
        return self._answer(response.status, raw)

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if (context := self.tls_context()) is not None:
            return http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self.timeout_s)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return TLS as the options set it; None for plain HTTP. Raises ConfigError if a token would
        travel unencrypted."""
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            return self._tls()
        if self.token and (parts.hostname or "") not in _LOCAL:
            raise ConfigError(
                f"{self.url}: would send the token unencrypted over the network; expected https://"
            )
        return None

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            # The trusted certificate may be the server's own, with any issuer.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            where = ", ".join(f for f in (self.ca_file, self.cert_file, self.key_file) if f)
            raise ConfigError(
                f"{where}: cannot be used for TLS: {error.strerror or 'no certificate in PEM'}"
            ) from None
        return context

    def _silent(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or "TLS failed"
            return f"{self.url}: {why}; name its certificate with --ca-file"
        if isinstance(error, TimeoutError):
            return f"{self.url}: no answer within {self.timeout_s:g} s; the daemon may be overloaded"
        if isinstance(error, ConnectionRefusedError | ConnectionResetError | FileNotFoundError):
            return f"no daemon answers at {self.url}: start it with `racktwin daemon run`, or set --url"
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        return f"no daemon answers at {self.url}: {why}; set --url or RACKTWIN_URL"

    def _answer(self, status: int, raw: bytes) -> Any:
        if len(raw) > MAX_ANSWER:
            raise ConnectorError(f"{self.url}: its answer is beyond {MAX_ANSWER} bytes; ask for less")
        try:
            tree = json.loads(raw)
        except ValueError:
            raise ConnectorError(
                f"{self.url}: answers {status}, but not as racktwin; the address may belong to another server"
            ) from None
        if status < 400:
            return tree
        why = str(tree.get("error", "")) if isinstance(tree, dict) else ""
        if status == 401:
            why = self._unauthorized(why)
        raise ApiRefused(status, why or f"{self.url} answers {status}")

    def _unauthorized(self, why: str) -> str:
        """Return a sentence on what is wrong with the token, and the options that give another one."""
        if not self.token:
            return f"{self.url} needs a token, and none was given: {GIVE_TOKEN}"
        return f"{self.url} does not accept the token: {why or 'HTTP 401'} ({self.hint}); {GIVE_TOKEN}"


def path_of(*parts: str) -> str:
    """Return a path with escaped parts; the slashes of names stay."""
    return "/" + "/".join(quote(p, safe="/:") for p in parts)


def connect(url: str | None, config: Path | None, token_file: str | None, ca_file: str | None = None,
            cert_file: str | None = None, key_file: str | None = None) -> Client:  # fmt: skip
    """Return the client that options, environment and configuration describe. Raises ConfigError."""
    env = os.environ
    chosen = url or env.get("RACKTWIN_URL")
    ca_file = ca_file or env.get("RACKTWIN_CA_FILE")
    own_token: Path | None = None
    url_given, is_named = chosen is not None, config is not None
    if config is None and (env.get("RACKTWIN_CONFIG") or chosen is None):
        with contextlib.suppress(ConfigError):  # nobody has to have one: the daemon may be elsewhere
            config = find_config()
    if config is not None:
        there, own_token, own_cert = _configured(config)
        if chosen is None:
            chosen, ca_file = there, ca_file or own_cert
    chosen = (chosen or DEFAULT_URL).rstrip("/")
    host = _host_of(chosen)
    if url_given and not is_named and host not in _LOCAL:
        own_token = None  # the administrator's of this host is nothing to another
    token, hint = _token(token_file, own_token)
    return Client(chosen, token, ca_file, cert_file or env.get("RACKTWIN_CERT_FILE"),
                  key_file or env.get("RACKTWIN_KEY_FILE"), hint=hint)  # fmt: skip


def _host_of(url: str) -> str:
    """Return the host of a daemon's address. Raises ConfigError for any other text."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError("--url: expected a host, and a port from 1 to 65535") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path
        or parts.query
        or parts.username
    ):
        raise ConfigError("--url: expected http://HOST:PORT or https://HOST:PORT, and nothing more")
    return parts.hostname


def _configured(path: Path) -> tuple[str, Path, str | None]:
    """Return (address, administrator's token, server's certificate) of a daemon on this host."""
    from twin.config import load_config

    loaded = load_config(path)
    tls = loaded.config.api.tls if loaded.config.api is not None else None
    cert = tls.cert_file if tls is not None else None
    return address_of(loaded), loaded.token_file, str(loaded.file(cert)) if cert else None


def address_of(loaded: Loaded) -> str:
    """Return the URL of a daemon on this host. Raises ConfigError, or ConnectorError if it is not known
    yet."""
    path, api = loaded.path, loaded.config.api
    if api is None:
        raise ConfigError(f"{path}: $.api: is off; the daemon cannot be queried")
    scheme = "http" if api.tls is None else "https"
    host = f"[{api.host}]" if ":" in api.host else {"0.0.0.0": "127.0.0.1"}.get(api.host, api.host)
    if api.port:
        return f"{scheme}://{host}:{api.port}"
    try:
        return (loaded.state / "api.url").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ConnectorError(
            f"no daemon of {path} has written its address: start it with "
            f"`racktwin daemon run --config {path}`"
        ) from None


def _token(given: str | None, own: Path | None) -> tuple[str, str]:
    """Return (token, its origin), from a file, standard input or the environment."""
    if given == "-":
        return _plausible(
            sys.stdin.readline().strip(), "standard input"
        ), "the token came from standard input"
    if given is not None and given.startswith(PREFIX):
        raise ConfigError(
            "--token-file: expected the name of a file; all users of the host can read a token on a "
            "command line"
        )
    if given is not None:
        return read_secret(Path(given)), f"the token came from {given}"
    if os.environ.get("RACKTWIN_TOKEN"):
        return _plausible(
            os.environ["RACKTWIN_TOKEN"].strip(), "RACKTWIN_TOKEN"
        ), "the token came from RACKTWIN_TOKEN"
    if os.environ.get("RACKTWIN_TOKEN_FILE"):
        path = os.environ["RACKTWIN_TOKEN_FILE"]
        return read_secret(Path(path)), f"the token came from {path}"
    if own is not None and own.exists():
        return read_secret(own), f"the token came from {own}"
    return "", ""


def _plausible(text: str, where: str) -> str:
    if not text.startswith(PREFIX) or len(text) > MAX_PRESENTED or not text.isprintable() or " " in text:
        raise ConfigError(f"{where}: is not a token; expected one line, {PREFIX}...")
    return text
