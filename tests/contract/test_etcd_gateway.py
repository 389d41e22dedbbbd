"""The election against a real etcd: terms, epochs, authentication, TLS and faulty members.

Processes that contend are in test_etcd.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.etcd_cluster import EtcdCluster, free_ports, make_certs, secure
from tests.support.patience import PATIENCE_S
from twin.catalogue import ConfigError, ConnectorError
from twin.config import load_config
from twin.daemon.etcd import Etcd, EtcdElection, EtcdRefused
from twin.daemon.leader import EpochFile, Term, clock_s
from twin.daemon.leadership import make_election


@pytest.fixture
def program(server: Callable[..., Path]) -> Path:
    return server("etcd", "etcd-server")


def election(urls: list[str], folder: Path, name: str = "a", term_s: float = 2.0) -> EtcdElection:
    return EtcdElection(Etcd(urls, 0.5), "/racktwin/lab", name, term_s, EpochFile(folder / name / "epoch"))


async def until(condition: Callable[[], object], deadline_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(one: EtcdElection, changes: list[Term | None]) -> AsyncIterator[None]:
    task = asyncio.create_task(one.run(changes.append))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_who_resigns_hands_on_its_head_at_once(program: Path, tmp_path: Path) -> None:
    async def play(urls: list[str]) -> None:
        a, b = election(urls, tmp_path, "a", 60.0), election(urls, tmp_path, "b", 60.0)
        changes: list[Term | None] = []
        async with contextlib.AsyncExitStack() as later:
            async with running(a, []):
                await until(a.may_act)
                await later.enter_async_context(running(b, changes))
                await until(lambda: b.status()["leader"] == "a")
                assert (b.may_act(), changes) == (False, [])
                assert a.term is not None
                epoch = a.term.epoch
                a.publish_head("the head")
            assert not a.may_act()
            await until(b.may_act)
            assert changes == [Term(b.status()["epoch"], "b", "a", epoch, "the head")]
            assert b.status()["epoch"] > epoch

    with EtcdCluster(program, tmp_path) as etcd:
        asyncio.run(play(etcd.urls))


def test_a_key_that_was_removed_ends_the_term_and_the_next_has_a_higher_epoch(
    program: Path, tmp_path: Path
) -> None:
    async def play(etcd: EtcdCluster) -> None:
        changes: list[Term | None] = []
        a = election(etcd.urls, tmp_path)
        async with running(a, changes):
            await until(a.may_act)
            key = base64.b64encode(b"/racktwin/lab/leader").decode()
            await asyncio.to_thread(etcd.members[0].ask, "/v3/kv/deleterange", {"key": key})
            await until(lambda: len(changes) == 3)
            first, lost, second = changes
            assert lost is None
            assert first is not None
            assert second is not None
            assert second.epoch > first.epoch

    with EtcdCluster(program, tmp_path) as etcd:
        asyncio.run(play(etcd))


def test_an_answer_that_got_lost_does_not_lose_the_term(program: Path, tmp_path: Path) -> None:
    """The transaction went through, but we did not hear so: the key is ours, and its epoch is kept."""

    async def play(urls: list[str]) -> None:
        a = election(urls, tmp_path, term_s=6.0)
        ask, lost = a.etcd.call, []

        async def forgetful(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await ask(path, body)
            if "compare" in body and not lost:
                lost.append(answer)
                raise ConnectorError("no answer in time")
            return answer

        a.etcd.call = forgetful  # type: ignore[method-assign]
        changes: list[Term | None] = []
        async with running(a, changes):
            await until(a.may_act)
            assert lost[0]["succeeded"]
            await until(lambda: a.status()["left_s"] > 5, 5.0)  # renewed
            assert len(changes) == 1

    with EtcdCluster(program, tmp_path) as etcd:
        asyncio.run(play(etcd.urls))


def test_a_renewal_across_a_change_of_etcds_leader_does_not_count(tmp_path: Path) -> None:
    """A deposed member can renew a lease that the new one lets end."""

    async def play() -> None:
        a = election(["http://127.0.0.1:1"], tmp_path)
        raft_terms = iter([5, 6, 6, 6])

        async def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"header": {"raft_term": str(next(raft_terms))}, "TTL": "2", "succeeded": True}

        a.etcd.call = call  # type: ignore[method-assign]
        with pytest.raises(ConnectorError, match="changed its leader"):
            await a._renew(Term(1, "a"))
        assert a._until == 0
        assert await a._renew(Term(1, "a")) == ""
        assert a._until > clock_s()

    asyncio.run(play())


def test_epochs_go_on_above_those_of_a_lock_on_this_host(program: Path, tmp_path: Path) -> None:
    async def play(urls: list[str]) -> None:
        earlier = 2**40
        EpochFile(tmp_path / "a" / "epoch").store(earlier)
        a = election(urls, tmp_path)
        async with running(a, []):
            await until(a.may_act)
            assert a.status()["epoch"] == earlier + 1
        b = election(urls, tmp_path, "b")  # knows it from etcd alone
        async with running(b, []):
            await until(b.may_act)
            assert b.status()["epoch"] == earlier + 2

    with EtcdCluster(program, tmp_path) as etcd:
        asyncio.run(play(etcd.urls))


def test_members_that_are_dead_or_silent_are_passed_over(program: Path, tmp_path: Path) -> None:
    async def play(url: str) -> None:
        silent = socket.create_server(("127.0.0.1", 0))  # it takes connections, and no more
        port = silent.getsockname()[1]
        dead = free_ports(1)[0]
        a = election([f"http://127.0.0.1:{dead}", f"http://127.0.0.1:{port}", url], tmp_path)
        async with running(a, []):
            await until(a.may_act)
            assert a.status()["endpoint"] == url
        silent.close()

    with EtcdCluster(program, tmp_path) as etcd:
        asyncio.run(play(etcd.urls[0]))


def test_something_that_is_no_etcd_is_said_to_be_none(tmp_path: Path) -> None:
    async def play() -> None:
        async def chat(request: web.Request) -> web.Response:
            return web.Response(text="<html>")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", chat)
        async with TestServer(app, host="127.0.0.1") as server:
            a = election([str(server.make_url("")).rstrip("/")], tmp_path)
            async with running(a, []):
                await until(lambda: "expected the JSON gateway of etcd" in a.status()["error"])
                assert not a.may_act()

    asyncio.run(play())


def configured(tmp_path: Path, **leader: Any) -> EtcdElection:
    (tmp_path / "secret").write_text("open sesame\n")
    tree = {"site": "s.yaml", "broker": "embedded", "leader": {"kind": "etcd", "name": "a", **leader}}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    made = make_election(load_config(tmp_path / "config.yaml"), "lab")
    assert isinstance(made, EtcdElection)
    return made


def test_a_user_with_a_password_leads_and_signs_in_anew(program: Path, tmp_path: Path) -> None:
    async def play(etcd: EtcdCluster) -> None:
        a = configured(tmp_path, endpoints=etcd.urls, username="twin", password_file="secret", term_s=2)
        async with running(a, []):
            await until(a.may_act)
            assert a.term is not None
            epoch = a.term.epoch
            a.etcd._token = "stale.1"
            end = a._until
            await until(lambda: a._until > end)
            assert a.status()["epoch"] == epoch
        wrong = configured(tmp_path, endpoints=etcd.urls, username="root", password_file="secret")
        async with running(wrong, []):
            await until(lambda: wrong.status()["error"])
            assert "invalid user ID or password" in wrong.status()["error"]
            assert "sesame" not in wrong.status()["error"]
        await wrong.etcd.open()
        anonymous = Etcd(etcd.urls, 1.0)
        await anonymous.open()
        with pytest.raises(EtcdRefused):
            await anonymous.call("/v3/kv/range", {"key": "AA=="})
        await anonymous.close()
        await wrong.etcd.close()

    with EtcdCluster(program, tmp_path) as etcd:
        secure(etcd.members[0])
        asyncio.run(play(etcd))


@pytest.mark.parametrize(
    ("leader", "expected"),
    [
        ({"endpoints": ["https://twin:secret@etcd1:2379"]}, "without a user"),
        ({"endpoints": ["https://etcd1:2379"], "username": "twin"}, "both username and password_file"),
        ({"endpoints": ["https://etcd1:2379"], "tls": {"ca_file": "nowhere.pem"}}, "leader.tls"),
    ],
)
def test_a_faulty_configuration_is_refused(tmp_path: Path, leader: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        configured(tmp_path, **leader)


def test_over_tls_with_a_certificate_and_not_without(
    program: Path, server: Callable[..., Path], tmp_path: Path
) -> None:
    certs = make_certs(server("openssl"), tmp_path / "certs")
    ours = {"ca_file": str(certs / "ca.pem"), "cert_file": str(certs / "cert.pem"),
            "key_file": str(certs / "key.pem")}  # fmt: skip

    async def play(urls: list[str]) -> None:
        a = configured(tmp_path, endpoints=urls, tls=ours)
        async with running(a, []):
            await until(a.may_act)
        for tls in ({"ca_file": ours["ca_file"]}, {}):
            b = configured(tmp_path, endpoints=urls, tls=tls)
            async with running(b, []):
                await until(lambda b=b: b.status()["error"])
                assert not b.may_act()

    with EtcdCluster(program, tmp_path, certs=certs) as etcd:
        asyncio.run(play(etcd.urls))
