"""Live updates: one stream of server-sent events, built once and sent to every client.

A client first receives the whole overview and all racks. Then each second brings changes of them, new
decisions, and changed alarms. A slow or returning client receives what it missed, within a bounded buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from twin.api.access import TOKENS, WHO, bare
from twin.api.answers import Refused, answer, live_of, packed
from twin.api.page import Columns, changed, columns, with_responses
from twin.api.runtime import JournalLine, Runtime, is_routine
from twin.api.state import alarms_of
from twin.api.summary import Pulse, brief_alarm, overview, severities, summary, urgency
from twin.contracts import Decision

log = logging.getLogger(__name__)
EVERY_S = 1.0  # between two summaries
KEEP_ALIVE_S = 15.0  # a comment, so that proxies and clients see that the stream lives
WRITE_S = 20.0  # a client that takes nothing for this long is gone
QUEUE = 64  # updates that a slow client may lag behind
KEPT = 256  # updates that a client which comes back can still get
MAX_ALARMS = 200  # in one update
MAX_LINES = 100  # decisions in one update; the rest is counted
REPLACED = ("state", "racks")  # each builds on the one before; coming back for an old one is of no use


@dataclass(frozen=True, slots=True)
class Update:
    """An event of the stream, ready to be written."""

    number: int
    kind: str
    text: bytes


class Watcher:
    """One client: what waits for it, and how much it missed."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Update | None] = asyncio.Queue(QUEUE)
        self.missed = 0

    def give(self, update: Update | None) -> None:
        """The next update; the oldest is lost to a client that does not keep up."""
        if self.waiting.full():
            self.waiting.get_nowait()
            self.missed += 1
        self.waiting.put_nowait(update)

    def at_hand(self) -> list[Update | None]:
        """Take the updates that wait besides; None is the end."""
        return [self.waiting.get_nowait() for _ in range(self.waiting.qsize())]

    def begin_anew(self) -> None:
        """Forget the changes that wait: the whole state follows."""
        kept: list[Update | None] = []
        while not self.waiting.empty():
            update = self.waiting.get_nowait()
            if update is None or update.kind not in REPLACED:
                kept.append(update)
        for update in kept:
            self.waiting.put_nowait(update)


class Updates:
    """Follows the daemon and informs the watchers. `run` is a task that lives as long as the interface."""

    def __init__(self, live: Runtime) -> None:
        self.live, self.pulse = live, Pulse()
        self.watchers: set[Watcher] = set()
        self.kept: deque[Update] = deque(maxlen=KEPT)
        self.name = f"{live.started_ns:x}"  # of this run: numbers of another one mean nothing
        self.number = 0
        self.closed = False
        self._alarms: bytes = b""
        self._sent_s = -EVERY_S
        self._state: dict[str, bytes] = {}  # as last sent, by key
        self._racks: Columns = {}

    async def run(self) -> None:
        """Turn decisions into updates until the daemon stops."""
        followed = self.live.follow()
        if followed is None:
            self.closed = True
            raise RuntimeError("too many clients follow the daemon already")
        try:
            while not self.closed:
                decision: Decision | None = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        decision = await followed.get()
                        if decision is None:
                            return
                try:
                    self.turn(decision)
                except Exception as error:
                    # One update is lost; a screen that hangs for ever would be worse.
                    faults = self.live.counts["update_faults"] = self.live.counts.get("update_faults", 0) + 1
                    if faults == 1:
                        log.error("an update could not be made", exc_info=bare(error))
        finally:
            self.live.unfollow(followed)
            self.close()

    def turn(self, decision: Decision | None) -> None:
        """Send the updates of a tick, or of a second without one."""
        self.pulse.age_s(self.live)
        if decision is not None:
            self._decided(decision)
        now = time.monotonic()
        # A hair early is on time: a tick of one second must not become an update every other second.
        if now - self._sent_s < EVERY_S * 0.9:
            return
        self._sent_s = now
        if not self.watchers:  # nobody looks: nothing is made
            return
        every = sorted(alarms_of(self.live), key=urgency)
        rung = [a for a in every if a.get("state") != "suppressed"]
        shown = with_responses(self.live, [brief_alarm(a) for a in rung[:MAX_ALARMS]])
        seen = packed(shown)
        if seen != self._alarms:
            self._alarms = seen
            self.send("alarms", {"counts": severities(every), "total": len(rung), "alarms": shown})
        self._send_changes(every)

    def _send_changes(self, alarms: list[dict[str, Any]]) -> None:
        """Send what changed of the overview, key by key, and of the racks, column by column."""
        tree = self._overview(alarms)
        packs = {key: packed(value) for key, value in tree.items()}
        self.send("state", {k: msgspec.Raw(v) for k, v in packs.items() if self._state.get(k) != v})
        now = columns(self.live, alarms)
        differing = changed(self._racks, now)
        if differing:
            self.send("racks", {"site_hash": self.live.engine.site.spec_hash, "columns": differing})
        self._state, self._racks = packs, now

    def _overview(self, alarms: list[dict[str, Any]]) -> dict[str, Any]:
        tree = overview(self.live, self.pulse, alarms)
        del tree["alarms"]  # an update of their own
        return tree

    def whole(self) -> bytes:
        """Return the events that a client begins with: the overview, all racks and the alarms, as last
        sent."""
        every = sorted(alarms_of(self.live), key=urgency)
        if not self.watchers or not self._state:  # no client depends on what was sent
            self._state = {k: packed(v) for k, v in self._overview(every).items()}
            self._racks = columns(self.live, every)
        rung = [a for a in every if a.get("state") != "suppressed"]
        shown = with_responses(self.live, [brief_alarm(a) for a in rung[:MAX_ALARMS]])
        if not self.watchers:
            self._alarms = packed(shown)
        state = {k: msgspec.Raw(v) for k, v in self._state.items()} | {"whole": True}
        racks = {k: {"all": v} for k, v in self._racks.items()}
        return b"".join((
            _event("state", state),
            _event("racks", {"site_hash": self.live.engine.site.spec_hash, "columns": racks}),
            _event("alarms", {"counts": severities(every), "total": len(rung), "alarms": shown}),
        ))  # fmt: skip

    def _decided(self, decision: Decision) -> None:
        shown: list[dict[str, Any]] = []
        records = [r for r in decision.records if not is_routine(r)]
        for record in records[:MAX_LINES]:
            line = JournalLine(record, decision.tick, decision.now_ns).answer(self.live.engine.site)
            shown.append({k: line[k] for k in ("kind", "tick", "now_ns", "text")})
        if shown:
            self.send("decisions", {"decisions": shown, "left_out": max(0, len(records) - MAX_LINES)})

    def send(self, kind: str, tree: dict[str, Any]) -> None:
        """One update for everybody."""
        self.number += 1
        text = b"id: %s.%d\nevent: %s\ndata: %s\n\n" % (
            self.name.encode(), self.number, kind.encode(), packed(tree))  # fmt: skip
        update = Update(self.number, kind, text)
        if kind not in REPLACED:
            self.kept.append(update)
        for watcher in self.watchers:
            watcher.give(update)

    def since(self, last: str) -> tuple[list[Update], bool]:
        """(what came after an id, whether something is missing in between)."""
        run, _, digits = last.rpartition(".")
        if run != self.name or not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            return [], bool(last)
        after = int(digits)
        oldest = self.kept[0].number if self.kept else self.number + 1
        lost = len(self.kept) == KEPT and after < oldest - 1
        return [u for u in self.kept if u.number > after], lost

    def close(self) -> None:
        """End the stream and inform each watcher."""
        self.closed = True
        for watcher in self.watchers:
            watcher.give(None)


UPDATES: web.AppKey[Updates] = web.AppKey("updates", Updates)


async def summarised(request: web.Request) -> web.Response:
    """Summarise the daemon: leader, alarms, commands with their reasons, and age of the data."""
    updates = request.app[UPDATES]
    return answer(summary(updates.live, updates.pulse))


async def events(request: web.Request) -> web.StreamResponse:
    """Stream server-sent events: `state`, `racks`, `decisions`, `alarms`, and `missed` for a slow client.

    The first `state` and `racks` are whole; later ones hold the keys, and the rows of columns, that changed.
    """
    updates, live = request.app[UPDATES], live_of(request)
    config = live.loaded.config.api
    most = max(1, (config.max_clients if config is not None else 512) // 2)
    if updates.closed or len(updates.watchers) >= most:
        raise Refused(503, f"{most} clients watch already, or the daemon stops", {"Retry-After": "10"})
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
    )
    watcher = Watcher()
    last = request.headers.get("Last-Event-ID", "")[:100]
    back, lost = updates.since(last)
    first = updates.whole()
    updates.watchers.add(watcher)
    try:
        await response.prepare(request)
        await _write(response, b"retry: 3000\n\n")
        if lost:
            await _write(response, _missed(None))
        for update in back:
            await _write(response, update.text)
        await _write(response, first)
        tokens, token = request.app[TOKENS], request[WHO]
        await _follow(response, watcher, updates, lambda: tokens.in_force(token))
    except (ConnectionError, TimeoutError):
        pass  # it left, or takes nothing any more
    finally:
        updates.watchers.discard(watcher)
    return response


async def _follow(
    response: web.StreamResponse, watcher: Watcher, updates: Updates, admitted: Callable[[], bool]
) -> None:
    """Send the updates until the daemon stops or the client is no longer `admitted`."""
    while True:
        update: Update | None = None
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                update = await watcher.waiting.get()
        except TimeoutError:
            if not admitted():
                return
            await _write(response, b": still here\n\n")
            continue
        if update is None or not admitted():
            return
        if watcher.missed:
            missed, watcher.missed = watcher.missed, 0
            watcher.begin_anew()
            await _write(response, _missed(missed) + updates.whole())
            if update.kind in REPLACED:
                continue
        # All updates of a second in one write: that is most of what a viewer costs
        texts, more = [update.text], watcher.at_hand()
        texts += [u.text for u in more if u is not None]
        await _write(response, b"".join(texts))
        if None in more:
            return


def _missed(count: int | None) -> bytes:
    return _event("missed", {"count": count})


def _event(kind: str, tree: dict[str, Any]) -> bytes:
    """Encode an event without a number, which a reconnecting client cannot request."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), packed(tree))


async def _write(response: web.StreamResponse, text: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(text)
