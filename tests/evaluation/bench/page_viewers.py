"""Those who look at the control room in the benchmark, in a process of their own: streams, and a browser.

    python -m tests.evaluation.bench.page_viewers streams URL TOKEN COUNT SECONDS
    python -m tests.evaluation.bench.page_viewers browser URL TOKEN

Each prints one JSON object.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from typing import Any

import aiohttp
import msgspec

AFTER_S = 10.0  # of a browser that looks on
MOST_S = 60.0


class StreamCount:
    """Bytes of all streams: of their first second, and afterwards."""

    def __init__(self) -> None:
        self.connected = self.refused = self.first = self.later = 0


async def _stream(session: aiohttp.ClientSession, url: str, token: str, count: StreamCount) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with session.get(f"{url}/api/v1/events", headers=headers) as response:
        if response.status != 200:
            count.refused += 1
            return
        count.connected += 1
        began = time.monotonic()
        async for chunk in response.content.iter_any():
            if time.monotonic() - began < 1.0:
                count.first += len(chunk)
            else:
                count.later += len(chunk)


async def streams(url: str, token: str, viewers: int, seconds: float) -> dict[str, Any]:
    """So many viewers for so long."""
    count, connector = StreamCount(), aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks = [asyncio.create_task(_stream(session, url, token, count)) for _ in range(viewers)]
        began = time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    n = max(1, count.connected)
    return {"connected": count.connected, "refused": count.refused, "first_bytes": count.first / n,
            "bytes_per_s": count.later / n / max(1.0, took_s - 1.0)}  # fmt: skip


def browser(url: str, token: str) -> dict[str, Any]:
    """One browser that opens the overview and looks on for a while; nothing where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    with sync_playwright() as playwright:
        arguments = ["--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox"]
        program = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = program.new_page(viewport={"width": 1366, "height": 900})
        tap = page.context.new_cdp_session(page)
        tap.send("Performance.enable")
        began = time.monotonic()
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector(".figure-value", timeout=1e3 * MOST_S)
        page.wait_for_selector(".tile", timeout=1e3 * MOST_S)
        shown_s = time.monotonic() - began
        early = _metrics(tap)
        entries = page.evaluate(
            "() => ({paint: performance.getEntriesByName('first-contentful-paint')[0].startTime, all:"
            " ['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
            ".map((e) => [e.name, e.transferSize])})"
        )
        time.sleep(AFTER_S)
        late = _metrics(tap)
        program.close()
    assets = sum(size for name, size in entries["all"] if "/api/" not in name)
    return {
        "first_contentful_paint_s": entries["paint"] / 1e3,
        "overview_shown_s": shown_s,
        "transferred_bytes": sum(size for _, size in entries["all"]),
        "asset_bytes": assets,
        "script_s": early["ScriptDuration"],
        "script_ms_per_s": 1e3 * (late["ScriptDuration"] - early["ScriptDuration"]) / AFTER_S,
        "page_heap_bytes": late["JSHeapUsedSize"],
    }


def _metrics(tap: Any) -> dict[str, float]:
    return {m["name"]: m["value"] for m in tap.send("Performance.getMetrics")["metrics"]}


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    answer = (
        asyncio.run(streams(words[0], words[1], int(words[2]), float(words[3])))
        if what == "streams"
        else browser(words[0], words[1])
    )
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
