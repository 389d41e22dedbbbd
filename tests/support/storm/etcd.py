"""Simulated etcd: one linearizable store behind several members, as the JSON gateway of v3 answers.

An answer may be late or lost though the request was carried out; hosts may be cut off from members. When its
leadership moves, leases begin anew, and for a while the deposed member still renews leases that it no longer
keeps.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from tests.support.storm.hosts import LIFE
from tests.support.storm.loop import SimulatedLoop
from twin.daemon.etcd import EtcdRefused

NOT_FOUND, UNAVAILABLE = 5, 14


@dataclass
class Row:
    """A key's value."""

    value: str
    lease: int
    created: int
    modified: int


class SimulatedEtcd:
    """The cluster. `cut`: (host, endpoint) that do not hear each other; `deposed` still answers renewals."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.dice = loop, random.Random(loop.dice.random())
        self.rows: dict[str, Row] = {}
        self.leases: dict[int, tuple[float, float]] = {}  # id -> (until, TTL)
        self.revision, self.raft_term, self._next = 1, 2, 100
        self.cut: set[tuple[str, str]] = set()
        self.down: set[str] = set()
        self.lost_answer = 0.0
        self.delay_s = 0.004
        self.deposed: tuple[str, int, float] | None = None  # endpoint, its term, until when

    async def ask(self, timeout_s: float, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """See `Etcd._ask`. Raises TimeoutError or EtcdRefused."""
        life = LIFE.get()
        assert life is not None
        begun = self.loop.time()
        await asyncio.sleep(self.dice.expovariate(1 / self.delay_s))
        unheard = endpoint in self.down or (life.host.name, endpoint) in self.cut
        answer: dict[str, Any] | EtcdRefused | None = None
        if not unheard:
            answer = self._answer(endpoint, path, body)
        if unheard or self.dice.random() < self.lost_answer or (life.host.name, endpoint) in self.cut:
            await asyncio.sleep(max(0.0, begun + timeout_s - self.loop.time()))
            raise TimeoutError
        await asyncio.sleep(self.dice.expovariate(1 / self.delay_s))
        if isinstance(answer, EtcdRefused):
            raise answer
        assert answer is not None
        return answer

    def move_leadership(self, endpoint: str) -> None:
        """Another member leads; the one at `endpoint` has not heard of it yet."""
        now = self.loop.time()
        self._expire(now)
        self.deposed = (endpoint, self.raft_term, now + self.dice.uniform(0.5, 4.0))
        self.raft_term += 1
        self.leases = {lease: (now + ttl, ttl) for lease, (_, ttl) in self.leases.items()}

    def left_s(self, lease: int) -> float:
        """Seconds until a lease ends in the cluster; 0 for one that is unknown."""
        until_s, _ = self.leases.get(lease, (0.0, 0.0))
        return max(0.0, until_s - self.loop.time())

    def _expire(self, now: float) -> None:
        for lease in [x for x, (until, _) in self.leases.items() if until <= now]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        del self.leases[lease]
        gone = [key for key, row in self.rows.items() if row.lease == lease]
        for key in gone:
            del self.rows[key]
        self.revision += bool(gone)

    def _header(self, term: int | None = None) -> dict[str, str]:
        return {"revision": str(self.revision), "raft_term": str(term or self.raft_term)}

    def _answer(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any] | EtcdRefused:
        now = self.loop.time()
        self._expire(now)
        if self.deposed is not None:
            member, term, until = self.deposed
            if now >= until:
                self.deposed = None
            elif member == endpoint:
                if path.endswith("keepalive"):
                    return {"ID": body["ID"], "TTL": "3", "header": self._header(term)}
                return EtcdRefused(UNAVAILABLE, "no leader")
        match path.rpartition("/")[2]:
            case "txn":
                return self._txn(body)
            case "grant":
                self._next += 1
                ttl = float(body["TTL"])
                self.leases[self._next] = (now + ttl, ttl)
                return {"ID": str(self._next), "TTL": str(int(ttl)), "header": self._header()}
            case "keepalive":
                lease = int(body["ID"])
                if lease not in self.leases:
                    return {"ID": body["ID"], "header": self._header()}
                ttl = self.leases[lease][1]
                self.leases[lease] = (now + ttl, ttl)
                return {"ID": body["ID"], "TTL": str(int(ttl)), "header": self._header()}
            case "revoke":
                if int(body["ID"]) not in self.leases:
                    return EtcdRefused(NOT_FOUND, "requested lease not found")
                self._end(int(body["ID"]))
                return {"header": self._header()}
        raise AssertionError(path)

    def _txn(self, body: dict[str, Any]) -> dict[str, Any]:
        for compare in body.get("compare", ()):
            row = self.rows.get(compare["key"])
            if compare["target"] == "CREATE":
                is_equal = (0 if row is None else row.created) == int(compare["create_revision"])
            else:
                is_equal = (0 if row is None else row.modified) == int(compare["mod_revision"])
            if not is_equal:
                return {"header": self._header()}
        puts = [op["request_put"] for op in body["success"] if "request_put" in op]
        if any(int(put["lease"]) and int(put["lease"]) not in self.leases for put in puts):
            return {"header": self._header()}
        self.revision += bool(puts)
        responses: list[dict[str, Any]] = []
        for op in body["success"]:
            if "request_put" in op:
                put, key = op["request_put"], op["request_put"]["key"]
                row = self.rows.get(key)
                created = self.revision if row is None else row.created
                self.rows[key] = Row(put["value"], int(put["lease"]), created, self.revision)
                responses.append({"response_put": {}})
            else:
                row = self.rows.get(op["request_range"]["key"])
                kvs = [] if row is None else [{
                    "value": row.value, "lease": str(row.lease), "create_revision": str(row.created),
                    "mod_revision": str(row.modified),
                }]  # fmt: skip
                responses.append({"response_range": {"kvs": kvs}})
        return {"header": self._header(), "succeeded": True, "responses": responses}
