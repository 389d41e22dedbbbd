"""The part of the benchmark that asks what the control room costs: the daemon, and the browser.

The interface of a daemon serves a site of 100,000 GPUs in 1,396 racks that ticks once a second: first for
nobody, then for many viewers at once, each a stream of its own in another process. Where Playwright and
Chromium are, a browser opens the page too. Figures come under `page.`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from connectors.agents import ItDecoder
from tests.evaluation.bench.load import GPUS_PER_RACK, START_NS, Load, spec_for
from tests.evaluation.bench.run import SPARSE_PERIOD_S
from tests.evaluation.harness import Figures, answer_parent, ask_child, percentiles, short, table
from twin.api import ApiServer, Runtime
from twin.api.tokens import Tokens, add_token
from twin.catalogue import NS
from twin.config import Api, Config, Loaded, make_engine
from twin.site import build_site
from twin.telemetry import Inbox

RACKS, VIEWERS, SECONDS = 1396, 200, 30
BROWSE = "tests.evaluation.bench.page_viewers"
SETTLE_S = 5.0
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (
    ("page.first_contentful_paint_s", False, 1.0),
    ("page.tick_with_viewers_per_alone", False, 1.1),
)
ROWS: tuple[tuple[str, str, float], ...] = (
    ("racks", "racks", 1.0),
    ("viewers at once", "viewers", 1.0),
    ("  of these refused", "viewers_refused", 1.0),
    ("a tick without viewers p50, ms", "tick_alone_ms_p50", 1.0),
    ("a tick with them p50, ms", "tick_viewers_ms_p50", 1.0),
    ("  the two as a ratio, in processor time", "tick_with_viewers_per_alone", 1.0),
    ("lateness of ticks with them p99, ms", "late_viewers_ms_p99", 1.0),
    ("processor time of a viewer, ms a second", "cpu_ms_per_viewer_s", 1.0),
    ("memory of a viewer, kB", "rss_bytes_per_viewer", 1e-3),
    ("bytes of a viewer, kB a second", "bytes_per_viewer_s", 1e-3),
    ("its first update, kB", "first_bytes_per_viewer", 1e-3),
    ("first contentful paint, s", "first_contentful_paint_s", 1.0),
    ("the overview shows its figures after, s", "overview_shown_s", 1.0),
    ("transferred until then, kB", "transferred_bytes", 1e-3),
    ("  of these script and style, kB", "asset_bytes", 1e-3),
    ("script time until then, s", "script_s", 1.0),
    ("script time of a second afterwards, ms", "script_ms_per_s", 1.0),
)


class PageLoad(msgspec.Struct, frozen=True):
    """Task of the process that measures."""

    racks: int
    viewers: int
    seconds: int
    browser: bool = True


def measure_page(quick: bool, scratch: Path, say: Callable[[str], None]) -> Figures:
    """The figures of a large site, or quick ones of a small site."""
    task = PageLoad(16, 8, 4) if quick else PageLoad(RACKS, VIEWERS, SECONDS)
    say(f"page: {task.racks} racks, {task.viewers} viewers")
    found = ask_child("tests.evaluation.bench.page", task)
    return {f"page.{'quick.' if quick else ''}{k}": v for k, v in found.items()}


class PageServer:
    """A daemon's interface over a site whose racks all speak each second, and a tenth of whose GPUs do."""

    def __init__(self, racks: int, folder: Path) -> None:
        spec = spec_for(racks, SPARSE_PERIOD_S)
        self.site = build_site(spec)
        self.engine = make_engine(self.site)
        self.load, self.inbox = Load(self.site, 1.0 / SPARSE_PERIOD_S), Inbox(self.site.sizes)
        self.decoder = ItDecoder(self.site)
        config = Config(site="site.yaml", broker="embedded", state=".", api=Api(port=0), simulated=True)
        loaded = Loaded(config, folder / "racktwin.yaml")
        self.live = Runtime(loaded, self.engine, time.time_ns(), version="bench")
        self.live.role, self.live.ready = "leader", True
        self.token = add_token(folder / "tokens.yaml", "viewer", "viewer")
        self.server = ApiServer(Tokens(folder / "tokens.yaml"))
        self.ticks, self.took_ms, self.late_ms = 0, list[float](), list[float]()
        self.took_cpu_ms: list[float] = []  # the same in processor time: other programs do not count

    def tick(self) -> None:
        """One second of the site."""
        now_ns = START_NS + (self.ticks + 1) * NS
        arrivals = self.load.arrive(self.ticks, now_ns)
        blocks = [b for message in arrivals.messages for b in self.decoder.decode(message)]
        for block in [*blocks, *arrivals.blocks]:
            self.inbox.put_block(block, now_ns)
        for event in arrivals.events:
            self.inbox.put_event(event)
        began, cpu_s = time.perf_counter(), time.thread_time()
        decision = self.engine.tick(self.inbox.take(self.ticks, now_ns, 1.0))
        self.live.settle(decision, ())
        self.took_ms.append(1e3 * (time.perf_counter() - began))
        self.took_cpu_ms.append(1e3 * (time.thread_time() - cpu_s))
        self.load.obey(decision)
        self.ticks += 1
        self.live.stats.ticks = self.ticks

    async def beat(self) -> None:
        """Tick once a second, by the clock."""
        due = time.monotonic()
        while True:
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.late_ms.append(1e3 * max(0.0, time.monotonic() - due))
            self.tick()

    async def watched(self, seconds: float) -> Figures:
        """Ticks and processor time over some seconds from now."""
        self.took_ms.clear()
        self.took_cpu_ms.clear()
        self.late_ms.clear()
        cpu_s, began = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return {**percentiles("tick_ms", self.took_ms), **percentiles("tick_cpu_ms", self.took_cpu_ms),
                **percentiles("late_ms", self.late_ms),
                "cpu_pu": (time.process_time() - cpu_s) / took, "rss_bytes": float(_rss_bytes())}  # fmt: skip


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _child(*words: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", BROWSE, *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{BROWSE} {words[0]} ended with {process.returncode}")
    found: dict[str, Any] = msgspec.json.decode(out)
    return found


async def _measured(task: PageLoad, folder: Path) -> Figures:
    page = PageServer(task.racks, folder)
    for _ in range(3):
        page.tick()
    tasks = [asyncio.create_task(page.server.run(page.live)), asyncio.create_task(page.beat())]
    await page.server.bound.wait()
    try:
        await asyncio.sleep(SETTLE_S)
        alone = await page.watched(task.seconds)
        lasts = task.seconds + 2 * SETTLE_S + 5.0
        viewers = asyncio.create_task(
            _child("streams", page.server.url, page.token, str(task.viewers), str(lasts))
        )
        await asyncio.sleep(SETTLE_S + 5.0)
        many = await page.watched(task.seconds)
        seen = await viewers
        shown = await _child("browser", page.server.url, page.token) if task.browser else {}
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _figures(task, alone, many, seen) | shown


def _figures(task: PageLoad, alone: Figures, many: Figures, seen: dict[str, Any]) -> Figures:
    """Cost of the viewers: the daemon with them, less the daemon without."""
    connected = int(seen["connected"])
    out: Figures = {"racks": float(task.racks), "gpus": float(task.racks * GPUS_PER_RACK)}
    out |= {"viewers": float(connected), "viewers_refused": float(seen["refused"])}
    for case, found in (("alone", alone), ("viewers", many)):
        out |= {k.replace("_ms", f"_{case}_ms", 1): v for k, v in found.items() if "_ms" in k}

    def grown(key: str) -> float:
        return (float(many[key]) - float(alone[key])) / max(1, connected)

    return out | {
        "tick_with_viewers_per_alone": float(many["tick_cpu_ms_p50"]) / float(alone["tick_cpu_ms_p50"]),
        "cpu_alone_pu": alone["cpu_pu"],
        "cpu_viewers_pu": many["cpu_pu"],
        "cpu_ms_per_viewer_s": 1e3 * grown("cpu_pu"),
        "rss_bytes_per_viewer": max(0.0, grown("rss_bytes")),
        "bytes_per_viewer_s": float(seen["bytes_per_s"]),
        "first_bytes_per_viewer": float(seen["first_bytes"]),
    }


def measured(task: PageLoad) -> Figures:
    """All of one site, in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-page-") as folder:
        found = asyncio.run(_measured(task, Path(folder)))
    return {k: v for k, v in found.items() if not isinstance(v, float) or np.isfinite(v)}


def show(found: Figures, out: Console) -> None:
    """The figures as a table."""
    for prefix in ("page.", "page.quick."):
        rows = [(title, short(found.get(prefix + key), factor)) for title, key, factor in ROWS
                if prefix + key in found]  # fmt: skip
        if rows:
            out.print(table("the control room", ("", prefix.rstrip(".")), rows))


if __name__ == "__main__":
    answer_parent(PageLoad, measured, pinned=False)
