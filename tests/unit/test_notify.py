"""Alarms on their way to a receiver: each arrives, a dead receiver stalls nothing, no secret is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.patience import PATIENCE_S
from twin.catalogue import NS, ConfigError
from twin.config import Config, Loaded, Notify, Tls
from twin.contracts import Finding
from twin.daemon import notify
from twin.daemon.alarms import EASED_S, AlarmBook, AlarmChange
from twin.daemon.notify import Notifier

T0 = 1_700_000_000 * NS
SECRET = "s3cr3t-token-value"


class World:
    """A receiver on loopback that does as it is told, and a notifier that sends to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp = tmp_path
        self.mode: int | str = 200
        self.got: list[Any] = []
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self.book = AlarmBook(tmp_path)
        self.now = T0

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        self.headers.append(dict(request.headers))
        body = await request.json()
        if self.mode == "hang":
            await asyncio.sleep(60)
        while self.mode == "slow":
            await asyncio.sleep(0.01)
        if self.mode == 302:
            raise web.HTTPFound("/elsewhere")
        assert isinstance(self.mode, int)
        if self.mode < 300:
            self.got.append(body)
        return web.Response(status=self.mode, text="x" * 100_000)

    async def _elsewhere(self, request: web.Request) -> web.Response:
        raise AssertionError("a redirect was followed")

    @contextlib.asynccontextmanager
    async def serving(self, **tls: Any) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/hook", self._answer)
        app.router.add_post("/api/v2/alerts", self._answer)
        app.router.add_get("/elsewhere", self._elsewhere)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, **tls)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()

    def notifier(self, *targets: Notify) -> Notifier:
        config = Config(site="site.yaml", broker="embedded", notify=list(targets))
        return Notifier(Loaded(config, self.tmp / "config.yaml"), "lab", lambda: self.now)

    def target(self, kind: Any = "webhook", scheme: str = "http", **more: Any) -> Notify:
        path = "/hook" if kind == "webhook" else ""
        return Notify(kind=kind, url=f"{scheme}://127.0.0.1:{self.port}{path}", **more)

    def heard(self) -> int:
        """Count the changes that came; one that is sent again, as its answer was late, is the same."""
        return len({event["id"] for body in self.got for event in body["events"]})

    def changes(self, *findings: Finding) -> list[AlarmChange]:
        """Return the changes of alarms a second later, with these findings."""
        self.now += NS
        return self.book.update(findings, self.now)

    def see(self, notifier: Notifier, *findings: Finding) -> None:
        notifier.offer(self.changes(*findings))


@contextlib.asynccontextmanager
async def running(notifier: Notifier) -> AsyncIterator[None]:
    task = asyncio.create_task(notifier.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(true: Callable[[], Any], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "did not come"
        await asyncio.sleep(0.01)


def finding(identity: str = "heat/lab/r1", severity: str = "warning") -> Finding:
    return Finding(identity, severity, "Heat is off", ("lab/r1",), ("return 50 degC",), 0.99, "Look.")


def test_a_body_does_not_repeat_its_title(tmp_path: Path) -> None:
    title = "lab/r1/node3: gpu2: XID 95 (uncontained memory error)"
    found = Finding("health/lab/r1/node3", "critical", title, (), ("gpu2: XID 95 (uncontained memory error)",
                    "gpu2: 3 rows remapped"), 0.99, "Drain it.")  # fmt: skip
    (change,) = AlarmBook(tmp_path).update([found], T0)
    assert notify._event("1", change)["alarm"]["evidence"] == ["gpu2: 3 rows remapped"]
    assert notify._alert(change.alarm, "lab")["annotations"]["description"] == "gpu2: 3 rows remapped"


def in_world(tmp_path: Path, story: Callable[[World], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(World(tmp_path)), 240))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(notify, "LAST_RETRY_S", 0.2)


def test_a_webhook_hears_each_change(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target())
            async with running(notifier):
                world.see(notifier, finding(), finding("quiet", "info"))
                world.see(notifier)
                await until(lambda: sum(len(g["events"]) for g in world.got) == 2)
            events = [e for g in world.got for e in g["events"]]
            assert [e["what"] for e in events] == ["raised", "cleared"]
            assert events[0]["alarm"] == {
                "id": "heat/lab/r1", "severity": "warning", "state": "raised", "title": "Heat is off",
                "entities": ["lab/r1"], "evidence": ["return 50 degC"], "action": "Look.", "count": 1,
                "times": 1, "cause": "", "first_up": True, "again": False,
                "raised_at": "2023-11-14T22:13:21.000+00:00",
            }  # fmt: skip
            assert world.got[0]["site"] == "lab"
            assert len({e["id"] for e in events}) == 2

    in_world(tmp_path, story)


@pytest.mark.parametrize("mode", [500, 503, 429, 401])
def test_what_is_refused_for_now_is_sent_again(tmp_path: Path, mode: int) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target())
            world.mode = mode
            async with running(notifier):
                world.see(notifier, finding())
                await until(lambda: world.requests >= 3)
                assert notifier.faults() == {f"webhook 127.0.0.1:{world.port}": f"answered {mode}"}
                world.mode = 200
                await until(lambda: world.got)
                await until(lambda: not notifier.faults())
            (receiver,) = notifier.receivers
            assert receiver.counts["sent"] == 1
            assert receiver.counts["failed"] >= 3
            assert [e["what"] for g in world.got for e in g["events"]] == ["raised"]

    in_world(tmp_path, story)


@pytest.mark.parametrize("mode", [400, 404, 302])
def test_what_is_refused_for_good_is_counted(tmp_path: Path, mode: int) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target())
            world.mode = mode
            async with running(notifier):
                world.see(notifier, finding())
                (receiver,) = notifier.receivers
                await until(lambda: receiver.counts["refused"] == 1)
                assert world.requests == 1
                world.mode = 200
                world.see(notifier)
                await until(lambda: world.got)
            assert [e["what"] for g in world.got for e in g["events"]] == ["cleared"]

    in_world(tmp_path, story)


def waits() -> int:
    """Count the voluntary context switches of this thread: waits, but no preemptions."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.mark.long
def test_a_dead_receiver_stalls_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 1.0)

    async def story(world: World) -> None:
        dead, hanging = World(tmp_path), World(tmp_path)
        async with world.serving(), hanging.serving():
            async with dead.serving():
                pass  # its port refuses now
            hanging.mode = "hang"
            notifier = world.notifier(dead.target(), hanging.target(), world.target())
            refusing, silent, well = notifier.receivers
            async with running(notifier):
                seen = [world.changes(finding(f"x/{i}")) for i in range(1000)]
                before = waits()
                for changes in seen:
                    notifier.offer(changes)
                assert waits() - before < 100
                await until(lambda: world.heard() == 1999)
                await until(lambda: refusing.fault and "TimeoutError" in silent.fault and not well.fault)
                hanging.mode = 200
                await until(lambda: hanging.heard() == 1999)
                async with dead.serving():
                    await until(lambda: dead.heard() == 1999)
                await until(lambda: not notifier.faults())

    in_world(tmp_path, story)


def test_the_queue_is_bounded_and_keeps_what_is_grave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "MAX_PENDING", 10)

    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target(min_severity="info"))
            (receiver,) = notifier.receivers
            world.see(notifier, *[finding(f"c{i}", "critical") for i in range(6)])
            world.see(notifier, *[finding(f"c{i}", "critical") for i in range(6)],
                      *[finding(f"i{i}", "info") for i in range(6)])  # fmt: skip
            assert receiver.counts["dropped"] == 2
            async with running(notifier):
                await until(lambda: world.got)
            told = [e["alarm"]["id"] for g in world.got for e in g["events"]]
            assert told == [*(f"c{i}" for i in range(6)), *(f"i{i}" for i in range(2, 6))]

    in_world(tmp_path, story)


def test_alertmanager_is_told_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RESEND_S", 0.1)

    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target("alertmanager"))
            async with running(notifier):
                f = finding()
                world.see(notifier, f, finding("readback/gpu.power_cap_w"))
                await until(lambda: len(world.got) >= 3)
                world.now += 60 * NS
                await until(lambda: world.got[-1][0]["endsAt"] > "2023-11-14T22:19:00")
                world.see(notifier, finding(severity="critical"))
                await until(lambda: any(a["labels"]["severity"] == "critical" for a in world.got[-1]))
                world.see(notifier)
                (receiver,) = notifier.receivers
                await until(lambda: receiver.pending == 0 and not receiver._firing)
                seen = len(world.got)
                await asyncio.sleep(0.3)
                assert len(world.got) == seen  # nothing is active, nothing is said
            first = {a["labels"]["alarm"]: a for a in world.got[0]}
            assert first["heat/lab/r1"]["labels"] == {
                "alertname": "racktwin_heat", "alarm": "heat/lab/r1", "severity": "warning", "site": "lab",
                "entity": "lab/r1", "cause": "heat/lab/r1",
            }  # fmt: skip
            assert "entity" not in first["readback/gpu.power_cap_w"]["labels"]
            assert first["heat/lab/r1"]["startsAt"] == "2023-11-14T22:13:21.000+00:00"
            assert first["heat/lab/r1"]["endsAt"] == "2023-11-14T22:18:21.000+00:00"
            last = {tuple(a["labels"].values()): a for g in world.got for a in g}
            ended = {
                k[2] for k, a in last.items() if k[1] == "heat/lab/r1" and a["endsAt"] < "2023-11-14T22:18"
            }
            assert ended == {"warning", "critical"}

    in_world(tmp_path, story)


def test_what_changes_while_it_is_sent_is_sent_as_well(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            notifier = world.notifier(world.target("alertmanager"))
            world.mode = "slow"
            async with running(notifier):
                world.see(notifier, finding())
                await until(lambda: world.requests == 1)
                world.book.acknowledge("heat/lab/r1", "ada", "on it")  # the same alert, said otherwise
                world.see(notifier, finding())
                world.mode = 200
                await until(lambda: len(world.got) == 2)
            assert ["acknowledged" in g[0]["annotations"] for g in world.got] == [False, True]

    in_world(tmp_path, story)


def test_what_is_shelved_or_harmless_is_over_for_receivers(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        notifier = world.notifier(Notify(kind="alertmanager", url="http://127.0.0.1:9"))
        (receiver,) = notifier.receivers
        world.see(notifier, finding())
        assert list(receiver._firing) == ["heat/lab/r1"]
        world.book.shelve("heat/lab/r1", world.now + 10 * NS, "ada", "known")
        world.see(notifier, finding())
        assert receiver._firing == {}
        world.now += 20 * NS
        world.see(notifier, finding())
        assert list(receiver._firing) == ["heat/lab/r1"]
        harmless = finding(severity="info")
        world.see(notifier, harmless)
        world.now += round(EASED_S * NS)
        world.see(notifier, harmless)
        assert receiver._firing == {}
        again = world.notifier(Notify(kind="alertmanager", url="http://127.0.0.1:9"))
        world.see(notifier, finding(severity="critical"))
        again.prime(world.book.active(), world.now)
        assert list(again.receivers[0]._firing) == ["heat/lab/r1"]

    in_world(tmp_path, story)


def test_the_token_is_sent_and_nowhere_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def story(world: World) -> None:
        async with world.serving():
            (tmp_path / "token").write_text(SECRET + "\n")
            notifier = world.notifier(world.target(token_file="token"))
            async with running(notifier):
                world.mode = 401
                world.see(notifier, finding())
                await until(lambda: world.requests >= 2)
                (tmp_path / "token").write_text("renewed")
                await until(lambda: world.headers[-1]["Authorization"] == "Bearer renewed")
                (tmp_path / "token").unlink()
                await until(lambda: "cannot be read" in str(notifier.faults()))
                (tmp_path / "token").write_text("renewed")
                world.mode = 200
                await until(lambda: world.got)
            assert world.headers[0]["Authorization"] == f"Bearer {SECRET}"

    in_world(tmp_path, story)
    assert SECRET not in caplog.text
    assert "renewed" not in caplog.text


def test_no_credentials_in_a_url(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected `token_file`") as caught:
        World(tmp_path).notifier(Notify(kind="webhook", url=f"http://me:{SECRET}@host/x"))
    assert SECRET not in str(caught.value)


def test_tls_trusts_the_named_ca_alone(tmp_path: Path) -> None:
    import ssl

    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip

    async def story(world: World) -> None:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        async with world.serving(ssl_context=server):
            trusting = world.notifier(world.target(scheme="https", tls=Tls(ca_file="cert.pem")))
            wary = world.notifier(world.target(scheme="https"))
            async with running(trusting), running(wary):
                world.see(trusting, finding())
                await until(lambda: world.got)
                world.see(wary, finding(), finding("b"))
                await until(lambda: "ertificate" in str(wary.faults()))
            assert len(world.got) == 1

    in_world(tmp_path, story)
    with pytest.raises(ConfigError, match=r"\$\.notify\.tls"):
        World(tmp_path).notifier(Notify(kind="webhook", url="https://x", tls=Tls(ca_file="none.pem")))


def test_no_receivers_no_work(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        notifier = world.notifier()
        async with running(notifier):
            world.see(notifier, finding())
            await asyncio.sleep(0.05)

    in_world(tmp_path, story)


def picky(world: World, refuses: str, most: int = 200) -> None:
    """Let the receiver answer 400 to a body with this alarm, and 413 to one of more than so many events."""
    plain = world._answer

    async def answer(request: web.Request) -> web.Response:
        events = (await request.json())["events"]
        if len(events) > most:
            world.requests += 1
            return web.Response(status=413)
        if any(e["alarm"]["id"] == refuses for e in events):
            world.requests += 1
            return web.Response(status=400)
        return await plain(request)

    world._answer = answer


@pytest.mark.parametrize("most", [200, 7])
def test_a_refused_body_loses_the_refused_alarm_alone(tmp_path: Path, most: int) -> None:
    async def story(world: World) -> None:
        picky(world, "x/77", most)
        async with world.serving():
            notifier = world.notifier(world.target())
            world.see(notifier, *[finding(f"x/{i}") for i in range(150)])
            async with running(notifier):
                (receiver,) = notifier.receivers
                await until(lambda: not receiver.pending)
                await until(lambda: not notifier.faults())
            told = [e["alarm"]["id"] for g in world.got for e in g["events"]]
            assert sorted(told) == sorted(f"x/{i}" for i in range(150) if i != 77)
            assert receiver.counts == {"sent": 149, "dropped": 0, "refused": 1, "failed": 0}

    in_world(tmp_path, story)


def test_a_receiver_that_refuses_everything_is_not_flooded(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.mode = 404
        async with world.serving():
            notifier = world.notifier(world.target())
            world.see(notifier, *[finding(f"x/{i}") for i in range(1000)])
            async with running(notifier):
                (receiver,) = notifier.receivers
                await until(lambda: receiver.counts["refused"])
                await asyncio.sleep(1.0)
                assert world.requests < 60
                assert receiver.pending > 900, "they wait for the receiver to be put right"
                world.mode = 200
                await until(lambda: not receiver.pending)
            assert world.heard() > 900

    in_world(tmp_path, story)


@pytest.mark.parametrize("failure", [asyncio.CancelledError, ValueError])
def test_a_receiver_that_fails_within_goes_on_and_disturbs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    async def story(world: World) -> None:
        other = World(tmp_path)
        async with world.serving(), other.serving():
            notifier = world.notifier(world.target(), other.target())
            first, _ = notifier.receivers
            plain, failures = first._post, 3

            async def failing(*args: Any) -> None:
                nonlocal failures
                failures -= 1
                if failures >= 0:
                    raise failure
                await plain(*args)

            monkeypatch.setattr(first, "_post", failing)
            other.mode = "slow"
            async with running(notifier):
                world.see(notifier, finding())
                await until(lambda: world.got)
                assert other.requests == 1, "what the other sends goes on"
                other.mode = 200
                await until(lambda: other.got)
                await until(lambda: not notifier.faults())

    in_world(tmp_path, story)


def test_a_token_that_no_header_can_hold_is_said_and_waited_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            (tmp_path / "token").write_text("two\nlines")
            notifier = world.notifier(world.target(token_file="token"))
            async with running(notifier):
                world.see(notifier, finding())
                await until(notifier.faults)
                assert "two" not in str(notifier.faults())
                (tmp_path / "token").write_text("renewed")
                await until(lambda: world.got)

    in_world(tmp_path, story)


def test_what_a_dead_webhook_has_still_to_take_outlives_the_process(tmp_path: Path) -> None:
    """The book holds the alarm by then, so that nothing announces it anew."""

    async def story(world: World) -> None:
        async with world.serving():
            first = world.notifier(world.target())
        world.see(first, finding())
        world.see(first, finding(), finding("leak/lab/r2", "critical"))
        first.path.parent.mkdir()
        first.save_if_due(world.now, at_once=True)  # as a kill leaves it
        assert str(world.port) not in first.path.read_text()  # a URL may be a secret
        second = world.notifier(world.target())
        second.load()
        world.see(second)
        async with world.serving(), running(second):
            await until(lambda: world.heard() == 4)
        events = [(e["what"], e["alarm"]["id"]) for body in world.got for e in body["events"]]
        assert sorted(set(events)) == [
            (what, alarm) for what in ("cleared", "raised") for alarm in ("heat/lab/r1", "leak/lab/r2")
        ]
        second.save_if_due(world.now + 11 * NS, at_once=False)
        third = world.notifier(world.target())
        third.load()
        assert not third.receivers[0].pending  # nothing is sent a second time

    in_world(tmp_path, story)


def test_after_a_reload_what_was_sent_meanwhile_is_not_sent_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with world.serving():
            first = world.notifier(world.target())
        first.path.parent.mkdir()
        world.see(first, finding())
        first.save()
        second = world.notifier(world.target())
        second.take_over(first)
        async with world.serving(), running(second):
            await until(lambda: world.heard() == 1 and not second.receivers[0].pending)
            world.see(second)
            await until(lambda: world.heard() == 2 and not second.receivers[0].pending)
        second.save()
        third = world.notifier(world.target())
        third.load()
        assert not third.receivers[0].pending

    in_world(tmp_path, story)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format":2,"waiting":[]}',
        '{"format":1,"waiting":[{"receiver":"x","changes":[{}],"active":[]}]}',
    ],
)
def test_a_file_of_waiting_changes_that_is_none_is_passed_over(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    notifier = world.notifier(Notify(kind="webhook", url="http://127.0.0.1:9/hook"))
    notifier.path.parent.mkdir()
    notifier.path.write_text(content)
    notifier.load()
    assert not notifier.receivers[0].pending
    assert "notify.json: damaged" in caplog.text
    notifier.save()
    notifier.load()
    assert caplog.text.count("damaged") == 1
