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

import msgspec

from twin.app.authority import on_standby, stricter
from twin.app.leader import MAX_HEAD, Term, make_election
from twin.app.opening import ARMED, unarmed_because
from twin.app.startup import LEVELS
from twin.contracts import Decision
from twin.errors import StorageError
from twin.events import (
    ApprovalWithdrawn,
    AuthorityChanged,
    EpochChanged,
    Event,
    Held,
    MaintenanceBegun,
    OperatorRequest,
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

    async def start(self) -> None:
        """Run for office; wait a moment for the answer, so that a lone daemon leads from its first tick."""
        self._task = asyncio.create_task(self._keep_running(), name="election")
        try:
            async with asyncio.timeout(FIRST_TERM_S):
                await self._first.wait()
        except TimeoutError:
            self.daemon.put(self._authorities({}, standby=True))
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
            and self.daemon.engine.arbiter.epoch == self.term.epoch
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
            daemon.put(self._authorities({}, standby=True))
            daemon.live.role = "standby"
            daemon.live.note("leader", {"lost": before.epoch})
            daemon.services.announce()
            return
        own = daemon.engine.arbiter.epoch
        told = _told(term.predecessor_head)
        adopt = term.predecessor_epoch not in (0, own) or (own == 0 and bool(told))
        log.info("leads with epoch %d%s", term.epoch, "; adopts what it finds" if adopt else "")
        daemon.live.role, daemon.live.epoch = "leader", term.epoch
        daemon.live.note(
            "leader",
            {"epoch": term.epoch, "predecessor": term.predecessor, "head": told.get("head", ""),
             "adopt": adopt},
        )  # fmt: skip
        head = str(told.get("head", ""))[:64]
        events: list[Event] = [EpochChanged(epoch=term.epoch, head=head, adopt=adopt)]
        events += self._authorities(told.get("authority", {}) if adopt else {}, standby=False)
        if adopt and told.get("mode") == "held":
            events.append(Held(author="takeover", reason="the leader before held the site"))
        elif adopt and told.get("mode") == "released":
            events.append(Released(author="takeover", reason="the leader before had released the site"))
        if adopt:
            events = [*_asked_of(told), *events]
            if told.get("asked_lost"):
                log.warning(
                    "%s standing requests of the leader before are not known here", told["asked_lost"]
                )
        daemon.put(events)
        daemon.services.announce()
        self._first.set()

    def _authorities(self, told: Any, standby: bool) -> list[Event]:
        """What each policy may do from the next frame on; never more than the leader before allowed it."""
        out: list[Event] = []
        told = told if isinstance(told, dict) else {}
        present = self._asked or self.daemon.engine.intake.authority
        asked = dict(present)
        for policy, level in self.daemon.authority.levels.items():
            wanted = on_standby(level) if standby else level
            if told.get(policy) in LEVELS:
                wanted = stricter(wanted, told[policy])
            if policy in present and wanted != present[policy]:
                author, asked[policy] = "standby" if standby else "takeover", wanted
                out.append(AuthorityChanged(author=author, policy=policy, authority=cast(Any, wanted)))
        self._asked = asked if out else self._asked
        return out

    def after(self, frame: Frame, decision: Decision) -> None:
        """After a tick: tell a successor where we are."""
        engine = self.daemon.engine
        if any(isinstance(e, AuthorityChanged) for e in frame.events):
            self._asked = None
        if self.term is not None:
            told = {"head": self.daemon.recorder.chain.head, "authority": engine.intake.authority,
                    "mode": engine.arbiter.mode}  # fmt: skip
            # What people asked of us holds for a successor too, as far as the place for it allows.
            asked: list[Event] = [*engine.windows.events(), *engine.intake.requests.values()]
            told["asked"] = [msgspec.to_builtins(e) for e in asked]
            text = json.dumps(told)
            if len(text) > MAX_HEAD:
                text = json.dumps(told | {"asked": [], "asked_lost": len(asked)})
            self.election.publish_head(text)

    def keep_authority(self) -> None:
        """People changed what a policy may do: remember it beyond this process."""
        if self.term is None:
            return
        try:
            self.daemon.authority.set(dict(self.daemon.engine.intake.authority))
        except StorageError as error:
            log.error("%s; after a restart the former authority holds", error)

    def veto(self, event: Event) -> str | None:
        """Why people may not ask this of this daemon now; None if they may."""
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
        if isinstance(event, Resumed) and self.daemon.live.stopping:
            return "the daemon stops"
        return None

    def status(self) -> dict[str, Any]:
        """For interfaces."""
        return {**self.election.status(), "may_act": self.may_act(), "at_s": time.monotonic()}


def _asked_of(told: dict[str, Any]) -> list[Event]:
    """Maintenance windows and requests that people gave to the leader before."""
    out: list[Event] = []
    for tree in told.get("asked", []) if isinstance(told.get("asked"), list) else []:
        try:
            out.append(msgspec.convert(tree, MaintenanceBegun | OperatorRequest))
        except msgspec.ValidationError as error:
            log.warning("the leader before left a request that cannot be read: %s", error)
    return out


def _told(text: str) -> dict[str, Any]:
    """What a leader left behind; nothing of it is trusted to be well formed."""
    try:
        tree = json.loads(text) if text else {}
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}
