"""A staged pod: the demo's plant run ahead in closed loop to a moment of its story, then served as a daemon.

with staged_pod(folder) as stage:
    open_page(stage.url, stage.token)

From then on it ticks once a second, so that the page is live. Nothing waits for the story to come about.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin import VERSION
from twin.api import ApiServer, Part, Runtime
from twin.api.tokens import Tokens, add_token
from twin.catalogue import NS
from twin.config import Api, Config, Loaded, load_site
from twin.contracts import Decision
from twin.daemon.alarms import AlarmBook
from twin.daemon.policy_accounts import PolicyAccounts
from twin.engine import Engine
from twin.run import FILE_NAME, HistoryReader
from twin.simulation.demo_site import DemoPast, DemoSite
from twin.simulation.story import load_story
from twin.telemetry import Frame

DEMO = Path(__file__).parents[2] / "twin" / "simulation" / "demo"
AFTER_S = 60.0  # of the story, beyond the moment at which the chapter begins
LOOK_S = 5.0  # between two looks of the policies' accounts
START_S = 120.0


class RecordedPast:
    """The history that the past left, asked as the daemon's own."""

    def __init__(self, folder: Path) -> None:
        self.reader = HistoryReader(folder / "history" / FILE_NAME, 1.0)

    async def query(self, *asked: Any) -> dict[str, Any]:
        """See `HistoryService.query`."""
        return await asyncio.to_thread(self.reader.query, *asked)


@dataclass
class StagedPod:
    """Address of the pod, and the token of its administrator."""

    url: str
    token: str


class Stage:
    """The loop of plant and engine, and the runtime that shows it."""

    def __init__(self, folder: Path, chapter: str) -> None:
        site_file = folder / "demo-pod.yaml"
        shutil.copyfile(DEMO / "site.yaml", site_file)
        spec, site = load_site(site_file)
        self.story = load_story(DEMO / "story.yaml", site).only(chapter)
        demo = DemoSite(self.story, spec, site)
        begin_s = max(c.at_s for c in self.story.chapters) + AFTER_S
        present_ns = time.time_ns() // NS * NS
        self.loop = DemoPast(demo, present_ns - round(begin_s * NS), folder)
        config = Config(site=site_file.name, broker="embedded", state=".", api=Api(port=0), simulated=True)
        self.live = Runtime(
            Loaded(config, folder / "racktwin.yaml"), self.loop.engine, time.time_ns(),
            run_dir=str(folder / "run"), version=VERSION,
        )  # fmt: skip
        self.live.role, self.live.epoch = "leader", 1
        self.live.parts["mqtt"] = Part("mqtt", "source", "running", time.time_ns())
        self.live.alarms = self.book = AlarmBook(folder / "book")
        self.accounts = PolicyAccounts(self.live)
        self.loop.observers = (self,)
        self._looked_ns = 0
        self.loop.run(self.story.past_s)
        demo.begin()
        self.loop.dt_s = 1.0
        self.loop.run(begin_s)
        self.live.history = RecordedPast(folder)

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After each tick: what a daemon would do with it."""
        began = time.perf_counter()
        self.live.stats.ticks += 1
        self.live.ready = True
        self.live.settle(decision, frame.events)
        self.book.update(engine.findings.active.values(), decision.now_ns)
        if decision.now_ns - self._looked_ns >= LOOK_S * NS:
            self._looked_ns = decision.now_ns
            self.accounts.observe()
        self.live.stats.took_s.append(time.perf_counter() - began)

    async def beat(self) -> None:
        """Tick once a second."""
        while True:
            await asyncio.sleep(1.0)
            self.loop.step()


@contextlib.contextmanager
def staged_pod(folder: Path, chapter: str = "pump") -> Iterator[StagedPod]:
    """A pod at a chapter of the demo's story, behind a real socket on loopback."""
    stage = Stage(folder, chapter)
    tokens_file = folder / "tokens.yaml"
    token = add_token(tokens_file, "operator", "admin")
    server = ApiServer(Tokens(tokens_file))
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        leave = asyncio.Event()
        tasks = [asyncio.create_task(server.run(stage.live)), asyncio.create_task(stage.beat())]
        await server.bound.wait()
        ready.set_result((asyncio.get_running_loop(), leave))
        await leave.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, leave = ready.result(START_S)
    try:
        yield StagedPod(server.url, token)
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join(START_S)
        stage.loop.close()
