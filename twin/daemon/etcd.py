"""Election through etcd: a key under a lease, created by a transaction if no daemon holds it.

`Etcd` calls the JSON gateway (v3, etcd >= 3.4) at one endpoint after the other; `EtcdElection` keeps a term.
A term is timed from before its renewal request, so that it ends here before the lease ends in etcd. A renewal
counts only if the cluster had the same leader before and after it, since a deposed member can still renew.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

from connectors.http_answer import why_no_answer
from twin.catalogue import ConfigError, ConnectorError
from twin.config import Loaded
from twin.daemon.leader import MAX_HEAD, POLL_S, EpochFile, OnChange, Term, clock_s, parse_record, pause

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
RETRY_S = 0.3
# Codes of gRPC: another member may know better.
_ELSEWHERE = {1: "cancelled", 4: "deadline", 8: "exhausted", 13: "internal", 14: "unavailable"}
_UNAUTHENTICATED, _NOT_FOUND = 16, 5
# Advice on a refusal, by words of etcd (api/v3rpc/rpctypes/error.go)
HINTS = (
    ("authentication failed", "expected the user and the password of `leader.username` and `password_file`"),
    ("user name is empty", "expected `leader.username` and `leader.password_file`, as it knows users"),
    ("permission denied", "expected a user that may read and write the keys below /racktwin/"),
)


class EtcdRefused(ConnectorError):
    """Refusal by etcd; `code` is the gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Etcd:
    """Requests to a cluster: to the member that answered last, then to the others."""

    def __init__(
        self,
        endpoints: list[str],
        timeout_s: float,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoints = [e.rstrip("/") for e in endpoints]
        self._timeout_s, self._username, self._password, self._tls = timeout_s, username, password, tls
        self._at = 0
        self._token = ""
        self._session: aiohttp.ClientSession | None = None

    @property
    def endpoint(self) -> str:
        """Return the endpoint of the first attempt."""
        return self.endpoints[self._at]

    async def open(self) -> None:
        """Prepare the connections without sending a request."""
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=4)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response. Raises EtcdRefused, or ConnectorError with the failure of each member."""
        failures: list[str] = []
        for k in range(len(self.endpoints)):
            at = (self._at + k) % len(self.endpoints)
            try:
                answer = await self._ask_as_user(self.endpoints[at], path, body)
            except EtcdRefused as error:
                if error.code not in _ELSEWHERE:
                    self._at = at
                    raise
                failures.append(str(error))
            except (aiohttp.ClientError, OSError, ValueError) as error:
                why = str(error) if type(error) is ValueError else why_no_answer(error, self._timeout_s)
                failures.append(f"{self.endpoints[at]}: {why[:200]}")
            else:
                self._at = at
                return answer
        self._at = (self._at + 1) % len(self.endpoints)
        raise ConnectorError(f"etcd: {'; '.join(failures)}")

    async def _ask_as_user(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._username is None:
            return await self._ask(endpoint, path, body)
        if self._token:
            with contextlib.suppress(_Expired):
                return await self._ask(endpoint, path, body)
        self._token = ""
        credentials = {"name": self._username, "password": self._password or ""}
        answer = await self._ask(endpoint, "/v3/auth/authenticate", credentials)
        self._token = str(answer.get("token", ""))
        return await self._ask(endpoint, path, body)

    async def _ask(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "open() comes first"
        headers = {"Authorization": self._token} if self._token else {}
        async with self._session.post(
            endpoint + path, data=json.dumps(body), headers=headers, allow_redirects=False
        ) as response:
            raw = bytearray()
            async for chunk in response.content.iter_chunked(65_536):
                raw += chunk
                if len(raw) > MAX_ANSWER_BYTES:
                    raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes of answer")
        try:
            tree = json.loads(raw)
        except ValueError:
            raise ValueError(f"expected the JSON gateway of etcd, got HTTP {response.status}") from None
        if not isinstance(tree, dict):
            raise ValueError("expected a JSON object")
        fault = tree.get("error", tree if response.status >= 400 else None)
        if fault is not None:
            inner = fault if isinstance(fault, dict) else tree
            code = inner.get("code", inner.get("grpc_code", 0))
            text = str(inner.get("message", fault))[:200]
            if self._token and (code == _UNAUTHENTICATED or "auth store is old" in text):
                raise _Expired(_UNAUTHENTICATED, text)
            hint = next((f"; {hint}" for words, hint in HINTS if words in text), "")
            raise EtcdRefused(code if isinstance(code, int) else 0, f"{endpoint}: {text}{hint}")
        result = tree.get("result", tree)  # what streams is wrapped
        if not isinstance(result, dict):
            raise ValueError("expected a JSON object")
        return result


class _Expired(EtcdRefused):
    """The token has expired."""


class EtcdElection:
    """Election among daemons on several hosts that contend for a key in etcd."""

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        name: str,
        term_s: float,
        epochs: EpochFile,
        clock: Callable[[], float] = clock_s,
    ) -> None:
        self.etcd, self.name, self.term_s, self._epochs, self._clock = etcd, name, term_s, epochs, clock
        self.margin_s = max(0.5, 0.15 * term_s)  # for clocks that run at different speeds
        self._office, self._memory = _b64(f"{prefix}/leader"), _b64(f"{prefix}/last")
        self.term: Term | None = None
        self._until = 0.0
        self._lease = self._created = 0
        self._offer: Term | None = None  # what our last transaction asked for
        self._head = self._stored = self._leader = self._error = ""
        self._soon = asyncio.Event()  # the successor's handover should not wait

    async def run(self, on_change: OnChange) -> None:
        """Contend until cancelled, then resign. Raises StorageError when the epoch cannot be kept."""
        await self.etcd.open()
        try:
            while True:
                await self._contend()
                on_change(self.term)
                lost = await self._hold()
                epoch, self.term = self.term.epoch if self.term else 0, None
                log.warning("the term with epoch %d is over: %s", epoch, lost)
                on_change(None)
                # Even if the lease lives on: who lost a term begins another, with a higher epoch.
                self._offer = None
        finally:
            term, self.term = self.term, None
            try:
                with contextlib.suppress(ConnectorError, TimeoutError):
                    async with asyncio.timeout(min(2.0, self.term_s / 2)):
                        await self._resign(term)
            finally:
                self._lease, self._offer = 0, None
                await self.etcd.close()

    def may_act(self, now_s: float | None = None) -> bool:
        """True strictly before the end of the last confirmed grant, less a margin."""
        return self.term is not None and (self._clock() if now_s is None else now_s) < self._until

    def publish_head(self, head: str, soon: bool = False) -> None:
        """Keep `head` for the successor; stored with the next renewal, or with one that is made at once."""
        if len(head) <= MAX_HEAD:
            self._head = head
            if soon:
                self._soon.set()

    def status(self) -> dict[str, Any]:
        """Return the status for display."""
        acts = self.may_act()
        return {
            "kind": "etcd", "role": "leader" if acts else "standby", "name": self.name,
            "epoch": self.term.epoch if self.term else 0,
            "leader": self.name if acts else self._leader,
            "left_s": round(max(0.0, self._until - self._clock()), 2) if self.term else 0.0,
            "endpoint": self.etcd.endpoint, "error": self._error,
        }  # fmt: skip

    async def _contend(self) -> None:
        """Contend, and return when this daemon leads."""
        while True:
            try:
                won = await self._stand()
                if self._error:
                    log.info("etcd answers again")
                self._error = ""
            except ConnectorError as error:
                if not self._error:
                    log.warning("%s; no daemon can begin to lead until etcd answers", error)
                won, self._error = None, str(error)
            if won is not None and self._clock() < self._until:
                self._epochs.store(won.epoch)
                self.term, self._leader = won, won.name
                return
            if won is not None:  # won, but too slowly: the next attempt gives it back first
                self._offer = None
            await asyncio.sleep(POLL_S)

    async def _stand(self) -> Term | None:
        """Try once to take the key, if no daemon holds it."""
        answer = await self.etcd.call("/v3/kv/txn", {"success": [_get(self._office), _get(self._memory)]})
        office, memory = (_kv(answer, i) for i in (0, 1))
        if office is not None:
            if self._lease == 0 or _int(office, "lease") != self._lease:
                self._leader = _value(office).get("name", "")
                return None
            if self._offer is not None:  # the answer to our transaction got lost, but it went through
                self._created = _int(office, "create_revision")
                return self._offer
        if self._lease:
            await self._revoke()
            if office is not None:
                return None
        asked = self._clock()
        lease = await self.etcd.call("/v3/lease/grant", {"TTL": str(math.ceil(self.term_s)), "ID": "0"})
        self._lease = _int(lease, "ID")
        self._until = asked + min(self.term_s, _int(lease, "TTL")) - self.margin_s
        before = _value(memory)
        last = before.get("epoch", 0)
        term = Term(self._epochs.next(last), self.name, before.get("name", ""), last, before.get("head", ""))
        self._offer, self._stored = term, before.get("head", "")
        self._head = self._head or self._stored
        answer = await self.etcd.call(
            "/v3/kv/txn",
            {
                "compare": [
                    {"key": self._office, "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
                    # Two who read the same memory must not both win with the same epoch.
                    {
                        "key": self._memory,
                        "target": "MOD",
                        "result": "EQUAL",
                        "mod_revision": str(_int(memory or {}, "mod_revision")),
                    },
                ],
                "success": [
                    _put(self._office, {"name": self.name, "epoch": term.epoch}, self._lease),
                    _put(self._memory, self._left(term, self._stored)),
                ],
            },
        )
        if not answer.get("succeeded"):
            self._offer = None
            await self._revoke()
            return None
        self._created = _int(answer.get("header", {}), "revision")
        return term

    async def _hold(self) -> str:
        """Renew until the term is lost, and return the reason."""
        assert self.term is not None
        pause_s = self.term_s / 3
        while True:
            left_s = self._until - self._clock()
            if left_s <= 0:
                return f"etcd did not confirm it in time: {self._error or 'this process was held up'}"
            await pause(min(pause_s, left_s), self._soon)
            left_s = self._until - self._clock()
            if left_s <= 0:
                continue
            try:
                async with asyncio.timeout(left_s):
                    lost = await self._renew(self.term)
                if lost:
                    return lost
                pause_s, self._error = self.term_s / 3, ""
            except ConnectorError as error:
                pause_s, self._error = min(RETRY_S, self.term_s / 10), str(error)
            except TimeoutError:
                self._error = self._error or "no answer in time"

    async def _renew(self, term: Term) -> str:
        """Renew the term; return the reason if it is lost. Raises ConnectorError if that is unknown."""
        asked, head = self._clock(), self._head
        alive = await self.etcd.call("/v3/lease/keepalive", {"ID": str(self._lease)})
        if _int(alive, "TTL") <= 0:
            return "the lease has ended"
        action = _get(self._office) if head == self._stored else _put(self._memory, self._left(term, head))
        answer = await self.etcd.call("/v3/kv/txn", {"compare": [self._in_office()], "success": [action]})
        if not answer.get("succeeded"):
            return "the key was removed or taken"
        self._stored = head
        if _int(alive.get("header", {}), "raft_term") != _int(answer.get("header", {}), "raft_term"):
            raise ConnectorError("etcd changed its leader during the renewal")
        self._until = asked + min(self.term_s, _int(alive, "TTL")) - self.margin_s
        return ""

    async def _resign(self, term: Term | None) -> None:
        if term is not None and self._head != self._stored:
            left = _put(self._memory, self._left(term, self._head))
            await self.etcd.call("/v3/kv/txn", {"compare": [self._in_office()], "success": [left]})
        if self._lease:
            await self._revoke()

    async def _revoke(self) -> None:
        """Revoke the lease of this daemon, which deletes the key."""
        try:
            await self.etcd.call("/v3/lease/revoke", {"ID": str(self._lease)})
        except EtcdRefused as error:
            if error.code != _NOT_FOUND:
                raise
        self._lease = 0

    def _in_office(self) -> dict[str, Any]:
        return {
            "key": self._office,
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(self._created),
        }

    def _left(self, term: Term, head: str) -> dict[str, Any]:
        return {"name": self.name, "epoch": term.epoch, "head": head}


def make_etcd_election(loaded: Loaded, site: str, name: str, epochs: EpochFile) -> EtcdElection:
    """The election that a configuration describes. Raises ConfigError for files that cannot be read."""
    return EtcdElection(make_etcd(loaded), _prefix(site), name, loaded.config.leader.term_s, epochs)


async def leader_of(etcd: Etcd, site: str) -> str:
    """Name of the daemon that leads a site; "" where none does. Raises ConnectorError."""
    answer = await etcd.call("/v3/kv/txn", {"success": [_get(_b64(f"{_prefix(site)}/leader"))]})
    return str(_value(_kv(answer, 0)).get("name", ""))


async def keep_head(etcd: Etcd, site: str, name: str, payload: bytes) -> None:
    """Keep a signed head of the journal of the daemon `name`. Raises ConnectorError."""
    value = base64.b64encode(payload).decode("ascii")
    await etcd.call("/v3/kv/put", {"key": _head_key(site, name), "value": value})


async def kept_heads(etcd: Etcd, site: str, name: str) -> list[bytes]:
    """The signed heads of all runs of a daemon. Raises ConnectorError."""
    end = f"{_prefix(site)}/journal/{name}0"  # "0" comes behind "/"
    asked = {"request_range": {"key": _head_key(site, f"{name}/"), "range_end": _b64(end), "limit": "1000"}}
    answer = await etcd.call("/v3/kv/txn", {"success": [asked]})
    try:
        found = answer["responses"][0]["response_range"].get("kvs", [])
        return [base64.b64decode(str(kv["value"]), validate=True) for kv in found]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ConnectorError("expected signed heads from etcd, got something else") from None


def _head_key(site: str, name: str) -> str:
    return _b64(f"{_prefix(site)}/journal/{name}")


def _prefix(site: str) -> str:
    return f"/racktwin/{site}"


def make_etcd(loaded: Loaded) -> Etcd:
    """The cluster that a configuration describes. Raises ConfigError for files that cannot be read."""
    leader = loaded.config.leader
    password = loaded.secret(leader.password_file)
    if any("@" in endpoint for endpoint in leader.endpoints):
        raise ConfigError(
            f"{loaded.path}: $.leader.endpoints: expected URLs without a user; use username and password_file"
        )
    if (leader.username is None) != (password is None):
        raise ConfigError(f"{loaded.path}: $.leader: expected both username and password_file, or neither")
    tls = loaded.trust(leader.tls, "leader.tls") if leader.tls is not None else None
    # An endpoint that swallows requests must leave time for the others.
    timeout_s = min(1.5, leader.term_s / (2 + len(leader.endpoints)))
    return Etcd(leader.endpoints, timeout_s, leader.username, password, tls)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")


def _get(key: str) -> dict[str, Any]:
    return {"request_range": {"key": key}}


def _put(key: str, value: dict[str, Any], lease: int = 0) -> dict[str, Any]:
    return {"request_put": {"key": key, "value": _b64(json.dumps(value)), "lease": str(lease)}}


def _kv(answer: dict[str, Any], i: int) -> dict[str, Any] | None:
    """The key that the i-th read of a transaction found. Raises ConnectorError for no answer of etcd."""
    try:
        found = answer["responses"][i]["response_range"].get("kvs", [])
        return dict(found[0]) if found else None
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ConnectorError("expected the answer of etcd to a transaction, got something else") from None


def _int(tree: Any, key: str) -> int:
    """A number of the gateway, which writes them as text and leaves out zeros."""
    try:
        return int(tree.get(key, 0))
    except (AttributeError, TypeError, ValueError):
        raise ConnectorError(f"expected a number as {key} in an answer of etcd") from None


def _value(kv: dict[str, Any] | None) -> dict[str, Any]:
    try:
        return parse_record(base64.b64decode(str((kv or {}).get("value", ""))))
    except ValueError:
        return {}
