"""A small daemon for tests of the interfaces: a real engine in the test's own loop, fed by plain values.

async with serving(tmp_path) as pod:
    await pod.tick({"gpu.temp_c": 60.0})
    status, tree = await pod.ask("GET", "/api/v1/state", "viewer")
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.builders import START_NS, Twin, two_racks
from twin.app.api import ApiServer
from twin.app.config import Api, Config, Loaded
from twin.app.live import Live, Part
from twin.app.tokens import Tokens, add_token
from twin.contracts import Decision, Policy
from twin.events import Event

ROLES = ("viewer", "operator", "admin")


class Pod:
    """A Live whose daemon is a few lines: what was put is in the next frame."""

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
        self.live = Live(self.loaded, self.twin.engine, START_NS, version="test")
        self.live.role, self.live.epoch = "leader", 3
        self.live.parts["mqtt"] = Part("mqtt", "source", "running", START_NS)
        self.live.put_event, self.live.write_note = self._put, self._note
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self._events: list[Event] = []
        self.tokens_file = folder / "tokens.yaml"
        self.secrets = {role: add_token(self.tokens_file, f"{role}-1", role) for role in ROLES}
        self.tokens = Tokens(self.tokens_file)
        self.server = ApiServer(self.tokens)

    def _put(self, event: Event) -> bool:
        self._events.append(event)
        return True

    def _note(self, kind: str, body: dict[str, Any]) -> None:
        self.notes.append((kind, body))

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
    try:
        async with asyncio.timeout(10):
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
