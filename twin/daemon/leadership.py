"""Leadership: the term of this daemon, and the effect of its beginning and end on the engine.

A standby ticks at `advise`, with its own journal. A daemon that takes over begins a new epoch, continues with
what the former leader allowed, adopts the commands in force, and changes nothing for the length of one lease
unless it protects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from twin.api import Runtime
from twin.catalogue import StorageError
from twin.config import Loaded
from twin.contracts import Decision, LeaderRecord
from twin.daemon.authority import on_standby
from twin.daemon.bootstrap import ARMED, OpenedRun, unarmed_because
from twin.daemon.handover import Handover, read_handover, targets_after
from twin.daemon.leader import Election, EpochFile, HostElection, Term, election_name, lock_path
from twin.daemon.supervision import is_stopped
from twin.site import lapse_faults, parse_profile
from twin.telemetry import (
    ApprovalWithdrawn,
    AuthorityChanged,
    EpochChanged,
    Event,
    Frame,
    Held,
    MaintenanceEnded,
    Released,
    RequestWithdrawn,
    Resumed,
)

log = logging.getLogger(__name__)
FIRST_TERM_S = 1.0  # a lock on this host is won at once; then the first tick leads already
OURS = ("standby", "takeover", "configuration")  # authors of what no person decided
_WITHDRAWALS = (RequestWithdrawn, ApprovalWithdrawn)


def make_election(loaded: Loaded, site: str) -> Election:
    """Make the election of the configuration. Raises ConfigError for secrets that cannot be read."""
    leader = loaded.config.leader
    name = leader.name or socket.gethostname()
    epochs = EpochFile(loaded.state / "epoch")
    if leader.kind == "host":
        return HostElection(lock_path(loaded, site), name, epochs)
    from twin.daemon.etcd import make_etcd_election  # only a site with etcd loads its client

    return make_etcd_election(loaded, site, name, epochs)


class Leadership:
    """Daemon's side of the election: its term, and the handover from the former leader.

    `put` queues events for the next frame. `on_change` is called when this daemon begins or ceases to lead.
    """

    def __init__(self, live: Runtime, opened: OpenedRun, put: Callable[[list[Event]], None]) -> None:
        self.live, self.opened, self._put = live, opened, put
        self.on_change: Callable[[bool], None] = _ignore
        self.election = make_election(live.loaded, election_name(live.engine.site))
        self.term: Term | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._requested: dict[str, str] | None = None  # levels on their way to the engine
        self._published: Handover | None = None
        self._text: dict[str, Any] = {}  # the same, made anew only where more than the head changed

    async def start(self) -> None:
        """Join the election, and wait a moment so that a single daemon leads from its first tick."""
        self._task = asyncio.create_task(self._keep_running(), name="election")
        try:
            async with asyncio.timeout(FIRST_TERM_S):
                await self._first.wait()
        except TimeoutError:
            self._put(self._authorities(None, standby=True))
            self.live.role = "standby"
            log.info("standing by: another daemon leads, or the election has not answered yet")

    async def _keep_running(self) -> None:
        while True:
            try:
                await self.election.run(self._take_term)
            except (Exception, asyncio.CancelledError):
                if is_stopped():
                    raise
                log.exception("the election failed; it is tried again")
            self._take_term(None)
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """Resign."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def may_act(self) -> bool:
        """Return True if a command may leave now: the term holds, and the engine has begun it."""
        return self.term is not None and not self.live.stopping and self._leads() and self.election.may_act()

    def _take_term(self, term: Term | None) -> None:
        before, self.term = self.term, term
        if term is None:
            if before is None:
                return
            log.warning("this daemon no longer leads; it sends no more commands")
            self._put(self._authorities(None, standby=True))
            self.live.role = "standby"
            self.live.note(LeaderRecord(lost=before.epoch))
            self.on_change(False)
            return
        own = self.live.engine.arbiter.epoch
        left = read_handover(term.predecessor_head)
        adopt = term.predecessor_epoch not in (0, own) or (own == 0 and bool(term.predecessor_head))
        log.info(
            "this daemon leads with epoch %d%s",
            term.epoch,
            "; it adopts the commands in force" if adopt else "",
        )
        self.live.role, self.live.epoch = "leader", term.epoch
        self.live.note(
            LeaderRecord(epoch=term.epoch, predecessor=term.predecessor, head=left.head, adopt=adopt)
        )
        events: list[Event] = self._requests_of(left) if adopt else []
        events.append(
            EpochChanged(
                epoch=term.epoch, head=left.head, adopt=adopt, returned=dict(left.returned) if adopt else {}
            )
        )
        events += self._authorities(left if adopt else None, standby=False)
        if adopt:
            events += self._mode_of(left)
        self._put(events)
        self.on_change(True)
        self._published = None
        self._first.set()

    def _mode_of(self, left: Handover) -> list[Event]:
        """A hold or a release of the former leader, or the end of ours if that leader had ended it."""
        if left.windows is None and left.lost:
            log.error(
                "%d windows and requests of the former leader did not fit its handover; the site is held",
                left.lost,
            )
            return [Held(author="takeover", reason="not all maintenance windows are known here")]
        if left.mode == "held":
            return [Held(author="takeover", reason="the leader before held the site")]
        if left.mode == "released":
            return [Released(author="takeover", reason="the leader before had released the site")]
        ended = left.mode == "normal" and self.live.engine.arbiter.mode != "normal"
        return [Resumed(author="takeover")] if ended else []

    def _requests_of(self, left: Handover) -> list[Event]:
        """Requests that the former leader left, and the end of those that it no longer knew."""
        engine = self.live.engine
        if left.lost:
            log.warning("%d requests of the former leader did not fit its handover; they are lost", left.lost)
        out: list[Event] = [*(left.windows or ()), *(left.requests or ())]
        if left.windows is not None:
            known = {w.id for w in left.windows}
            out += [
                MaintenanceEnded(author="takeover", window=w.id)
                for w in engine.windows.events()
                if w.id not in known
            ]
        if left.requests is not None:
            known = {r.id for r in left.requests}
            out += [
                RequestWithdrawn(author="takeover", request=r)
                for r in engine.intake.requests
                if r not in known
            ]
        return out + targets_after(left.targets, engine.intake.load_targets.events())

    def _authorities(self, left: Handover | None, standby: bool) -> list[Event]:
        """Authority of each policy from the next frame on; never more than the former leader allowed."""
        out: list[Event] = []
        book = self.opened.authority
        present = self._requested or self.live.engine.intake.authority
        asked = dict(present)
        for policy, level in book.levels.items():
            wanted = on_standby(level) if standby else level
            if left is not None and policy in left.authority:
                wanted = book.after(policy, left.authority[policy], left.decided_ns.get(policy, 0))
            if policy in present and wanted != present[policy]:
                author, asked[policy] = "standby" if standby else "takeover", wanted
                out.append(AuthorityChanged(author=author, policy=policy, authority=cast(Any, wanted)))
        self._requested = asked if out else self._requested
        return out

    def _leads(self) -> bool:
        """True once the engine has begun our term; until then it holds the authority of a standby."""
        return self.term is not None and self.live.engine.arbiter.epoch == self.term.epoch

    def after(self, frame: Frame, decision: Decision) -> None:
        """After a tick: update the handover, at once where operators changed anything."""
        engine, book = self.live.engine, self.opened.authority
        for event in frame.events:
            if isinstance(event, AuthorityChanged):
                self._requested = None
                if event.author not in OURS:
                    book.decided_ns[event.policy] = frame.now_ns
        if not self._leads():
            return
        left = Handover(
            self.opened.recorder.chain.head,
            dict(engine.intake.authority),
            dict(book.decided_ns),
            engine.arbiter.mode,
            engine.windows.events(),
            tuple(engine.intake.requests.values()),
            targets=engine.intake.load_targets.events(),
            returned=engine.health.book.returned(),
        )
        if left.same_but_head(self._published) and self._text:
            self._text["head"] = left.head
        else:
            self._text = json.loads(left.text())
        self.election.publish_head(json.dumps(self._text), soon=not left.same_but_head(self._published))
        self._published = left

    def keep_authority(self) -> None:
        """Keep what operators allowed a policy beyond this process."""
        if not self._leads():
            return
        try:
            self.opened.authority.set(dict(self.live.engine.intake.authority))
        except StorageError as error:
            log.error("%s; after a restart the authority of before holds again", error)

    def veto(self, event: Event) -> str | None:
        """Reason why this daemon cannot take the request now; None if it can."""
        if self.live.stopping:
            return "the daemon stops"
        if self.term is None and not isinstance(event, _WITHDRAWALS):
            return "this daemon is a standby; ask the leader"
        if isinstance(event, AuthorityChanged) and event.authority in ARMED:
            if why := unarmed_because(self.live.loaded):
                return why
            spec = self.opened.spec
            profiles = {n: parse_profile(t, n) for n, t in spec.profiles.items()}
            if self.live.engine.site.sizes["gpu"]:
                faults = lapse_faults(self.live.engine.site, profiles)
                if faults:
                    return faults[0]
        return None

    def status(self) -> dict[str, Any]:
        """For interfaces."""
        return {**self.election.status(), "may_act": self.may_act(), "at_s": time.monotonic()}


def _ignore(leads: bool) -> None:
    """Ignore a change until the services register their handler."""
