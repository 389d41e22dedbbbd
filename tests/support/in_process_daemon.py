"""A small daemon for tests of the interfaces: a real engine in the test's own loop, fed by plain values.

async with serving(tmp_path) as pod:
    await pod.tick({"gpu.temp_c": 60.0})
    status, tree = await pod.ask("GET", "/api/v1/state", "viewer")

Commands block, so for them the pod serves from a thread of its own, with a shell beside it:

with serving_aside(tmp_path, monkeypatch) as desk:
    assert desk.run("status", role="viewer") == 0
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, TypeVar, overload

import aiohttp
import pytest

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.journal_bodies import body_of
from tests.support.patience import PATIENCE_S
from twin.api import ApiServer, Part, Runtime
from twin.api.tokens import Tokens, add_token
from twin.cli.main import main
from twin.config import Api, Config, Loaded
from twin.contracts import Decision, JournalRecord, Policy
from twin.telemetry import Event

ROLES = ("viewer", "operator", "admin")
T = TypeVar("T")


class Pod:
    """A Runtime whose daemon is a few lines: what was put is in the next frame."""

    def __init__(
        self,
        folder: Path,
        api: Api | None = None,
        tree: dict[str, Any] | None = None,
        more: Sequence[Policy] = (),
    ) -> None:
        self.folder, self.url = folder, ""
        self.twin = Twin(
            tree or two_racks(), [Operator(), ThermalGuard(), *more],
            authority={"operator": "act", "thermal_guard": "approve"} | {p.name: "act" for p in more},
        )  # fmt: skip
        config = Config(site="site.yaml", broker="embedded", state="state", api=api or Api(port=0))
        self.loaded = Loaded(config, folder / "racktwin.yaml")
        self.live = Runtime(self.loaded, self.twin.engine, START_NS, version="test")
        self.live.role, self.live.epoch = "leader", 3
        self.live.parts["mqtt"] = Part("mqtt", "source", "running", START_NS)
        self.live.put_event, self.live.write_note = self._put, self._note
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self._events: list[Event] = []
        self.tokens_file = folder / "tokens.yaml"
        self.secrets = {role: add_token(self.tokens_file, f"{role}-1", role) for role in ROLES}
        self.tokens = Tokens(self.tokens_file)
        self.server = ApiServer(self.tokens)
        self.work: tuple[asyncio.Task[None], ...] = ()  # what makes it serve: ends by an error only

    def _put(self, event: Event) -> bool:
        self._events.append(event)
        return True

    def _note(self, record: JournalRecord) -> None:
        body = body_of(record)
        self.notes.append((body.pop("kind"), body))

    def tick(self, values: Mapping[str, Any] | None = None, dt_s: float = 1.0) -> Decision:
        """One tick, with what was asked meanwhile."""
        events, self._events = tuple(self._events), []
        decision = self.twin.tick(values, *events, dt_s=dt_s)
        self.live.stats.ticks += 1
        self.live.stats.took_s.append(0.002)
        self.live.ready = True
        self.live.settle(decision, events)
        return decision

    async def ticking(self) -> None:
        """Tick as often as somebody asks something, until cancelled."""
        while True:
            await asyncio.sleep(0.005)
            if self._events:
                self.tick()

    def head(self, role: str) -> dict[str, str]:
        """The header of a token; of `wrong`, one that nobody made; of `none`, nothing."""
        if role == "none":
            return {}
        return {"Authorization": f"Bearer {self.secrets.get(role, 'rt_' + 'x' * 43)}"}

    async def ask(
        self, method: str, path: str, role: str = "viewer", body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        """(status, JSON or text) of one exchange."""
        given = self.head(role) | {k.replace("_", "-"): v for k, v in headers.items()}
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        data = io.BytesIO(raw) if raw else None
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, data=data, headers=given) as response,
        ):
            text = await response.text()
            kind = response.headers.get("Content-Type", "")
            return response.status, json.loads(text) if kind.startswith("application/json") and text else text


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    api: Api | None = None,
    tree: dict[str, Any] | None = None,
    more: Sequence[Policy] = (),
) -> AsyncIterator[Pod]:
    """A pod that has ticked once, behind a real socket on loopback; `more` policies may act."""
    pod = Pod(folder, api, tree, more)
    pod.tick({"gpu.temp_c": 60.0, "gpu.power_w": 700.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0})
    service = asyncio.create_task(pod.server.run(pod.live))
    ticks = asyncio.create_task(pod.ticking())
    bound = asyncio.create_task(pod.server.bound.wait())
    pod.work = (service, ticks)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({service, bound}, return_when=asyncio.FIRST_COMPLETED)
        if service.done():
            service.result()
        pod.url = pod.server.url
        yield pod
    finally:
        for task in (service, ticks, bound):
            task.cancel()
        await asyncio.gather(service, ticks, bound, return_exceptions=True)


def serve(folder: Path, check: Callable[[Pod], Awaitable[None]], **more: Any) -> None:
    """Run a check against a pod that serves."""

    async def main() -> None:
        async with serving(folder, **more) as pod:
            await check(pod)

    asyncio.run(main())


class Desk:
    """A pod that serves from a thread of its own, and a shell beside it.

    Whatever ends that thread before its time is raised by the next thing that is done here.
    """

    def __init__(self, pod: Pod, folder: Path, ended: Future[None]) -> None:
        self.pod, self.folder = pod, folder
        self._loop, self._ended = asyncio.get_running_loop(), ended
        for role, secret in pod.secrets.items():
            path = self.token_file(role)
            path.write_text(secret + "\n")
            path.chmod(0o600)

    def token_file(self, role: str) -> Path:
        """Return the path of the token of a role."""
        return self.folder / f"{role}.token"

    def do(self, act: Callable[[], T]) -> T:
        """Call something on the daemon's loop."""
        told: Future[T] = Future()
        self.check()
        self._loop.call_soon_threadsafe(_settle, told, act)
        wait((told, self._ended), PATIENCE_S, FIRST_COMPLETED)
        self.check()
        return told.result(0)

    def run(self, *words: str, role: str = "operator") -> int:
        """The exit status of a command with the token of a role."""
        self.check()
        status = main([*words, "--url", self.pod.url, "--token-file", str(self.token_file(role))])
        self.check()
        return status

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._ended.done():
            self._ended.result()
            raise AssertionError("the pod serves no more")


D = TypeVar("D", bound=Desk)


def _settle(told: Future[T], act: Callable[[], T]) -> None:
    """Hold what a call gives or raises."""
    try:
        told.set_result(act())
    except BaseException as error:
        told.set_exception(error)


@overload
def serving_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, columns: int = ..., **more: Any
) -> contextlib.AbstractContextManager[Desk]: ...
@overload
def serving_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[D], *, columns: int = ..., **more: Any
) -> contextlib.AbstractContextManager[D]: ...
@contextlib.contextmanager
def serving_aside(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any] = Desk,
    *,
    columns: int = 200,
    **more: Any,
) -> Iterator[Any]:
    """A desk of this kind, made on the daemon's loop; the shell is that wide and knows no daemon.

    `more` goes to `serving`. What ends the thread of the daemon is raised here at the latest.
    """
    for name in [n for n in os.environ if n.startswith("RACKTWIN_") and n != "RACKTWIN_TRACES"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", str(columns))
    ready: Future[tuple[Desk, Callable[[], object]]] = Future()
    ended: Future[None] = Future()

    async def serve() -> None:
        async with serving(folder, **more) as pod:
            leave = asyncio.Event()
            left = asyncio.create_task(leave.wait())
            loop = asyncio.get_running_loop()
            ready.set_result((kind(pod, folder, ended), lambda: loop.call_soon_threadsafe(leave.set)))
            done, _ = await asyncio.wait({left, *pod.work}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    # Daemonic, so that a thread that hangs fails its test and does not keep the process.
    threading.Thread(target=_settle, args=(ended, lambda: asyncio.run(serve())), daemon=True).start()
    wait((ready, ended), PATIENCE_S, FIRST_COMPLETED)
    if ended.done():
        ended.result()
    desk, leave = ready.result(0)
    try:
        yield desk
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed: the error that did it follows
            leave()
        ended.result(PATIENCE_S)
