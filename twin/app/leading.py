"""Leading: whether commands may leave, and what a change of that means for the engine.

A standby ticks at `advise`, with its own journal. Who takes over says so with a new epoch, takes up what
the leader before it was allowed, adopts what it finds, and changes nothing for one lease unless protective.
Part of the shell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any, cast

from twin.app.authority import on_standby
from twin.app.handover import Handover, read_handover
from twin.app.leader import Term, make_election
from twin.app.opening import ARMED, unarmed_because
from twin.app.target_handover import taken_over
from twin.contracts import Decision
from twin.errors import StorageError
from twin.events import (
    ApprovalWithdrawn,
    AuthorityChanged,
    EpochChanged,
    Event,
    Held,
    MaintenanceEnded,
    Released,
    RequestWithdrawn,
    Resumed,
)
from twin.frame import Frame
from twin.profile import parse_profile
from twin.safety import lapse_faults

if TYPE_CHECKING:
    from twin.app.daemon import Daemon

log = logging.getLogger(__name__)
FIRST_TERM_S = 1.0  # a lock on this host is won at once; then the first tick leads already
# What a standby may be asked: nothing that only the leader can carry out.
OURS = ("standby", "takeover", "configuration")  # authors of what no person decided
_WITHDRAWALS = (RequestWithdrawn, ApprovalWithdrawn)


class Leading:
    """The daemon's side of the election."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        loaded = daemon.loaded
        self.election = make_election(loaded, daemon.engine.site.file.site)
        self.term: Term | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._asked: dict[str, str] | None = None  # levels on their way to the engine
        self._published: Handover | None = None
        self._text: dict[str, Any] = {}  # the same, made anew only where more than the head changed

    async def start(self) -> None:
        """Run for office; wait a moment for the answer, so that a lone daemon leads from its first tick."""
        self._task = asyncio.create_task(self._keep_running(), name="election")
        try:
            async with asyncio.timeout(FIRST_TERM_S):
                await self._first.wait()
        except TimeoutError:
            self.daemon.put(self._authorities(None, standby=True))
            self.daemon.live.role = "standby"
            log.info("standing by: another daemon leads, or nobody can be asked yet")

    async def _keep_running(self) -> None:
        while True:
            try:
                await self.election.run(self._changed)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("the election failed; it is tried again")
            self._changed(None)
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """Resign."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def may_act(self) -> bool:
        """Whether a command may leave at this moment: our term holds, and the engine has taken it up."""
        return (
            self.term is not None
            and not self.daemon.live.stopping
            and self._leads()
            and self.election.may_act()
        )

    def _changed(self, term: Term | None) -> None:
        before, self.term = self.term, term
        daemon = self.daemon
        if term is None:
            if before is None:
                return
            log.warning("leads no longer; commands end here")
            daemon.services.forget_commands()
            daemon.put(self._authorities(None, standby=True))
            daemon.live.role = "standby"
            daemon.live.note("leader", {"lost": before.epoch})
            daemon.services.announce()
            return
        own = daemon.engine.arbiter.epoch
        left = read_handover(term.predecessor_head)
        adopt = term.predecessor_epoch not in (0, own) or (own == 0 and bool(term.predecessor_head))
        log.info("leads with epoch %d%s", term.epoch, "; adopts what it finds" if adopt else "")
        daemon.live.role, daemon.live.epoch = "leader", term.epoch
        daemon.live.note(
            "leader",
            {"epoch": term.epoch, "predecessor": term.predecessor, "head": left.head, "adopt": adopt},
        )
        events: list[Event] = self._asked_of(left) if adopt else []
        events.append(EpochChanged(epoch=term.epoch, head=left.head, adopt=adopt))
        events += self._authorities(left if adopt else None, standby=False)
        if adopt:
            events += self._mode_of(left)
        daemon.put(events)
        daemon.services.announce()
        self._published = None
        self._first.set()

    def _mode_of(self, left: Handover) -> list[Event]:
        """A hold or a release of the leader before, or the end of ours, which it had ended since."""
        if left.windows is None and left.lost:
            log.error("%d windows and requests of the leader before are not known here: held", left.lost)
            return [Held(author="takeover", reason="not all maintenance windows are known here")]
        if left.mode == "held":
            return [Held(author="takeover", reason="the leader before held the site")]
        if left.mode == "released":
            return [Released(author="takeover", reason="the leader before had released the site")]
        ended = left.mode == "normal" and self.daemon.engine.arbiter.mode != "normal"
        return [Resumed(author="takeover")] if ended else []

    def _asked_of(self, left: Handover) -> list[Event]:
        """What people asked of the leader before, and the end of what it knew no more."""
        engine = self.daemon.engine
        if left.lost:
            log.warning("%d standing requests of the leader before are not known here", left.lost)
        out: list[Event] = [*(left.windows or ()), *(left.requests or ())]
        if left.windows is not None:
            known = {w.id for w in left.windows}
            out += [MaintenanceEnded(author="takeover", window=w.id)
                    for w in engine.windows.events() if w.id not in known]  # fmt: skip
        if left.requests is not None:
            known = {r.id for r in left.requests}
            out += [RequestWithdrawn(author="takeover", request=r)
                    for r in engine.intake.requests if r not in known]  # fmt: skip
        return out + taken_over(left.targets, engine.intake.load_targets.events())

    def _authorities(self, left: Handover | None, standby: bool) -> list[Event]:
        """What each policy may do from the next frame on; never more than the leader before allowed it."""
        out: list[Event] = []
        book = self.daemon.authority
        present = self._asked or self.daemon.engine.intake.authority
        asked = dict(present)
        for policy, level in book.levels.items():
            wanted = on_standby(level) if standby else level
            if left is not None and policy in left.authority:
                wanted = book.after(policy, left.authority[policy], left.decided_ns.get(policy, 0))
            if policy in present and wanted != present[policy]:
                author, asked[policy] = "standby" if standby else "takeover", wanted
                out.append(AuthorityChanged(author=author, policy=policy, authority=cast(Any, wanted)))
        self._asked = asked if out else self._asked
        return out

    def _leads(self) -> bool:
        """Whether the engine has taken up our term; until then it holds what a standby may do."""
        return self.term is not None and self.daemon.engine.arbiter.epoch == self.term.epoch

    def after(self, frame: Frame, decision: Decision) -> None:
        """After a tick: tell a successor where we are, and at once where people changed anything."""
        engine, book = self.daemon.engine, self.daemon.authority
        for event in frame.events:
            if isinstance(event, AuthorityChanged):
                self._asked = None
                if event.author not in OURS:
                    book.decided_ns[event.policy] = frame.now_ns
        if not self._leads():
            return
        left = Handover(self.daemon.recorder.chain.head, dict(engine.intake.authority), dict(book.decided_ns),
                        engine.arbiter.mode, engine.windows.events(),
                        tuple(engine.intake.requests.values()),
                        targets=engine.intake.load_targets.events())  # fmt: skip
        if left.same_but_head(self._published) and self._text:
            self._text["head"] = left.head
        else:
            self._text = json.loads(left.text())
        self.election.publish_head(json.dumps(self._text), soon=not left.same_but_head(self._published))
        self._published = left

    def keep_authority(self) -> None:
        """People changed what a policy may do: remember it beyond this process."""
        if not self._leads():
            return
        try:
            self.daemon.authority.set(dict(self.daemon.engine.intake.authority))
        except StorageError as error:
            log.error("%s; after a restart the former authority holds", error)

    def veto(self, event: Event) -> str | None:
        """Why people may not ask this of this daemon now; None if they may."""
        if self.daemon.live.stopping:
            return "the daemon stops"
        if self.term is None and not isinstance(event, _WITHDRAWALS):
            return "this daemon stands by; ask the one that leads"
        if isinstance(event, AuthorityChanged) and event.authority in ARMED:
            if why := unarmed_because(self.daemon.loaded):
                return why
            spec = self.daemon.opened.spec
            profiles = {n: parse_profile(t, n) for n, t in spec.profiles.items()}
            if self.daemon.engine.site.sizes["gpu"]:
                faults = lapse_faults(self.daemon.engine.site, profiles)
                if faults:
                    return faults[0]
        return None

    def status(self) -> dict[str, Any]:
        """For interfaces."""
        return {**self.election.status(), "may_act": self.may_act(), "at_s": time.monotonic()}
