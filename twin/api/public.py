"""Public routes, and those without JSON of the site: health, the page, metrics, the document.

Open answers say nothing of the site: only whether the daemon lives and is ready, and an empty page that asks
for a token.
"""

from __future__ import annotations

import asyncio
import os
import threading

from aiohttp import web

from twin.api.answers import Refused, answer, listed, live_of
from twin.api.comparisons import COMPARED
from twin.api.metrics import CONTENT_TYPE, MAX_EXPECTED_SERIES, Metrics, render
from twin.api.page import assets
from twin.api.routes import ACTING, PREFIX, READING, Param, Route, document
from twin.api.runtime import Runtime
from twin.api.scopes import table_of
from twin.api.updates import UPDATES
from twin.catalogue import TABLES, clean

METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)
LATE_TICKS, LATE_S = 5.0, 10.0  # no tick for so many of its lengths, and for so long, is not ready


async def healthz(_: web.Request) -> web.Response:
    """Answer that the process is alive."""
    return answer({"alive": True})


async def readyz(request: web.Request) -> web.Response:
    """Return readiness: it ticks, writes its journal and receives telemetry. Otherwise 503, with reasons."""
    reasons = unready(live_of(request), request.app[UPDATES].pulse.age_s(live_of(request)))
    return answer({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def unready(live: Runtime, age_s: float) -> list[str]:
    """Return the reason why the daemon is not ready. The answer is public, so it holds no names."""
    reasons = []
    if live.stopping:
        reasons.append("it stops")
    if not live.ready or live.decision is None:
        reasons.append("the first tick is not done")
    elif age_s > max(LATE_S, LATE_TICKS * live.loaded.config.tick_s):
        reasons.append(f"no tick for {age_s:.0f} s")
    if live.run_dir and not os.access(live.run_dir, os.W_OK):
        reasons.append("the folder of the journal cannot be written")
    sources = [p for p in live.parts.values() if p.kind == "source"]
    if not any(p.state == "running" for p in sources):
        reasons.append("no source runs" if sources else "there is no source")
    return reasons


async def metrics(request: web.Request) -> web.Response:
    """Return metrics as Prometheus text: the daemon's and, by default, all tables of the site.

    Expected values, residuals and bands of the tables stand beside them, by default as far as there is room.
    """
    chosen = [table_of(t) for t in listed(request, "tables") if t != "none"]
    if not chosen and "tables" not in request.query:
        chosen = list(TABLES)
    expected = None
    if "expected" in request.query:
        expected = [t for t in listed(request, "expected") if t != "none"]
        for table in expected:
            if table not in COMPARED:
                raise Refused(404, f"expected: the table {clean(table, 40)} has no expected values; "
                                   "expected some of "
                              f"{', '.join(COMPARED)}")  # fmt: skip
    made = request.app[METRICS]
    columns, left_out = made.of_site(chosen, expected, request.query.get("prefix", ""))
    text = made.own()
    if columns:
        # One at a time, and beside the ticks: a hundred thousand series take tens of milliseconds.
        if not _RENDERING.acquire(blocking=False):
            raise Refused(503, "another scrape is being answered", {"Retry-After": "1"})
        try:
            text += await asyncio.to_thread(render, columns, left_out)
        finally:
            _RENDERING.release()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


_RENDERING = threading.Lock()


async def openapi(_: web.Request) -> web.Response:
    """Return this document."""
    return answer(document(ROUTES))


ROUTES: tuple[Route, ...] = (
    *READING, *ACTING,
    Route("GET", "/healthz", healthz, None, "daemon"),
    Route("GET", "/readyz", readyz, None, "daemon"),
    Route("GET", "/metrics", metrics, "viewer", "daemon",
          (Param("tables", "of the site; commas between them; none for the daemon's own series only"),
           Param("expected", "tables whose expected values, residuals and bands are wanted; default: those "
                 f"of `tables`, small ones first, up to {MAX_EXPECTED_SERIES:,} series"),
           PREFIX),
          media="text/plain"),
    Route("GET", "/openapi.json", openapi, "viewer", "daemon"),
    Route("GET", "/", assets.index, None, "daemon", media="text/html"),
    Route("GET", "/page/{file}", assets.part, None, "daemon", media="text/javascript"),
)  # fmt: skip
