"""Planted bugs: one mistake each in the daemon, the agent or their libraries, to see that storms find it.

`python -m tests.support.storm.planted [NAME ..]` tells for each the first seed whose storm finds it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from racktwin_agent.leases import RUNNING, LeaseBook
from racktwin_agent.store import MemoryStore

from policies.operator import Operator
from policies.power_capping import PowerCap, PowerGuard
from tests.support.storm.storm import Report, Shape, blow
from twin.control.arbiter import Arbiter
from twin.control.leases import Leases
from twin.daemon.daemon import Daemon
from twin.daemon.dispatcher import Dispatcher
from twin.daemon.etcd import EtcdElection
from twin.daemon.leader import EpochFile
from twin.daemon.leadership import Leadership
from twin.daemon.services import Services
from twin.engine import Engine
from twin.run.journal_writer import JournalWriter
from twin.run.replay import Recorder

MOST = int(os.environ.get("RACKTWIN_STORM_SEEDS", "100"))
SHAPE = Shape(hours=0.035, every_s=4.0)
Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    """A planted bug, under the name of its function."""
    BUGS[plant.__name__] = plant
    return plant


@bug
def sent_before_journaled(patch: pytest.MonkeyPatch) -> None:
    made = Daemon.__init__

    def init(self: Daemon, *args: Any) -> None:
        made(self, *args)
        tick = self.engine.tick

        def hasty(frame: Any) -> Any:
            decision = tick(frame)
            if decision.commands:
                self.services.send(decision.commands)
            return decision

        self.engine.tick = hasty  # type: ignore[method-assign]

    patch.setattr(Daemon, "__init__", init)


@bug
def failed_fsync_ignored(patch: pytest.MonkeyPatch) -> None:
    def fail(self: JournalWriter, error: OSError) -> None:
        self.failed = ""

    sync = JournalWriter.sync

    def careless(self: JournalWriter) -> None:
        import contextlib

        from twin.catalogue import StorageError

        with contextlib.suppress(StorageError):
            sync(self)

    patch.setattr(JournalWriter, "_fail", fail)
    patch.setattr(JournalWriter, "sync", careless)


@bug
def journal_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalWriter, "sync", lambda self: self._safe())


@bug
def short_write_taken_for_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalWriter, "_put", lambda self, data: self._file.write(data))


@bug
def journal_segment_begins_a_new_chain(patch: pytest.MonkeyPatch) -> None:
    rotate = JournalWriter.rotate

    def broken(self: JournalWriter) -> None:
        rotate(self)
        self.chain.head = "0" * 32

    patch.setattr(JournalWriter, "rotate", broken)


@bug
def agent_takes_old_epochs(patch: pytest.MonkeyPatch) -> None:
    refuse = LeaseBook._refuse
    patch.setattr(
        LeaseBook, "_refuse", lambda self, request, at: refuse(self, replace(request, epoch=2**52), at)
    )


@bug
def agent_takes_expired_requests(patch: pytest.MonkeyPatch) -> None:
    refuse = LeaseBook._refuse

    def lax(self: LeaseBook, request: Any, at: Any) -> str | None:
        why = refuse(self, request, at)
        return None if why is not None and why.startswith("expired") else why

    patch.setattr(LeaseBook, "_refuse", lax)


@bug
def agent_lets_no_lease_lapse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseBook, "lapse", lambda self, at: [])


@bug
def agent_forgets_leases_in_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "load", lambda self: None)


@bug
def agent_keeps_the_value_at_a_lapse(patch: pytest.MonkeyPatch) -> None:
    def lapse(self: LeaseBook, at: Any) -> list[str]:
        for key, lease in list(self.leases.items()):
            if lease.phase == RUNNING and lease.until.over(at):
                del self.leases[key]
        return []

    patch.setattr(LeaseBook, "lapse", lapse)


@bug
def expiry_ignored_at_the_sink(patch: pytest.MonkeyPatch) -> None:
    carry = Dispatcher._carry_out

    async def late(self: Dispatcher, site: Any, commands: Any) -> None:
        now_ns, self._now_ns = self._now_ns, lambda: 0
        try:
            await carry(self, site, commands)
        finally:
            self._now_ns = now_ns

    patch.setattr(Dispatcher, "_carry_out", late)


@bug
def term_not_checked_before_sending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "may_act", lambda self: self.term is not None and self._leads())


@bug
def term_counted_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    renew = EtcdElection._renew

    async def late(self: EtcdElection, term: Any) -> str:
        lost = await renew(self, term)
        if not lost:
            self._until = self._clock() + self.term_s
        return lost

    patch.setattr(EtcdElection, "_renew", late)


@bug
def deposed_member_believed(patch: pytest.MonkeyPatch) -> None:
    async def renew(self: EtcdElection, term: Any) -> str:
        asked = self._clock()
        alive = await self.etcd.call("/v3/lease/keepalive", {"ID": str(self._lease)})
        if int(alive.get("TTL", 0)) <= 0:
            return "the lease has ended"
        self._until = asked + min(self.term_s, float(alive["TTL"])) - self.margin_s
        return ""

    patch.setattr(EtcdElection, "_renew", renew)


@bug
def epoch_taken_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EpochFile, "next", lambda self, seen=0: max(seen, 1_767_225_700))


@bug
def queue_kept_through_the_end_of_a_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Services, "forget_commands", lambda self: None)
    patch.setattr(Leadership, "may_act", lambda self: self.term is not None and self.election.may_act())


@bug
def blast_radius_off_by_one(patch: pytest.MonkeyPatch) -> None:
    contain = Arbiter._contain

    def lax(self: Arbiter, done: Any, lease: Any, change: Any, *rest: Any) -> Any:
        most = self.site.envelopes[done.control.key].blast_radius
        return 0 if len(change) == most + 1 else contain(self, done, lease, change, *rest)

    patch.setattr(Arbiter, "_contain", lax)


@bug
def envelope_not_kept(patch: pytest.MonkeyPatch) -> None:
    settle = Arbiter.settle

    def wide(self: Arbiter, key: str, claims: Any, readback: Any) -> Any:
        out = settle(self, key, claims, readback)
        out.value[out.by >= 0] += 300.0
        return out

    patch.setattr(Arbiter, "settle", wide)


@bug
def lease_longer_than_its_control_allows(patch: pytest.MonkeyPatch) -> None:
    def renew(self: Leases, index: Any, now_ns: int) -> None:
        self.expires_ns[index] = now_ns + 2 * round(self.control.lease_s * 1e9)

    patch.setattr(Leases, "renew", renew)


@bug
def numbers_begin_anew_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    restore = Arbiter.restore

    def forgetful(self: Arbiter, data: Any) -> None:
        restore(self, data)
        self.next_command = 1

    patch.setattr(Arbiter, "restore", forgetful)


@bug
def notes_are_lost(patch: pytest.MonkeyPatch) -> None:
    journal = Daemon._journal
    patch.setattr(Daemon, "_journal", lambda self, decision, notes: journal(self, decision, notes[:1]))


@bug
def clock_read_in_a_policy(patch: pytest.MonkeyPatch) -> None:
    propose = Operator.propose

    def moody(self: Operator, view: Any, memory: Any) -> Any:
        proposals, memory = propose(self, view, memory)
        shift = time.time_ns() // 10**9 % 3
        return [replace(p, lo=np.minimum(p.hi, p.lo + shift)) for p in proposals], memory

    patch.setattr(Operator, "propose", moody)


@bug
def stale_state_in_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    dump = Engine.dump

    def stale(self: Engine) -> Any:
        fresh = dump(self)
        from twin.run.replay import copied

        old = self.__dict__.setdefault("_old_arbiter", copied(fresh["arbiter"]))
        self.__dict__["_old_arbiter"] = copied(fresh["arbiter"])
        return fresh | {"arbiter": old}

    patch.setattr(Engine, "dump", stale)


@bug
def released_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arbiter, "mode_of", lambda self, key: "normal")


@bug
def frame_traced_after_the_tick(patch: pytest.MonkeyPatch) -> None:
    """Every second frame never reaches the trace."""
    before = Recorder.before

    def lossy(self: Recorder, frame: Any) -> None:
        if frame.tick % 7 != 3:
            before(self, frame)

    patch.setattr(Recorder, "before", lossy)


@bug
def budgets_ignored(patch: pytest.MonkeyPatch) -> None:
    for policy in (PowerGuard, PowerCap):
        patch.setattr(policy, "propose", lambda self, view, memory: ([], memory))


# Bugs that the mixture meets too seldom: storms of the trouble in which they show, and of nothing else
FOCUS: dict[str, Shape] = {
    "failed_fsync_ignored": replace(SHAPE, trouble=("disk",)),
    "agent_forgets_leases_in_a_restart": replace(SHAPE, trouble=("agents",)),
    "term_counted_from_the_answer": replace(SHAPE, trouble=("etcd",), every_s=2.0),
    "deposed_member_believed": replace(SHAPE, trouble=("etcd",), every_s=2.0),
    "budgets_ignored": replace(SHAPE, trouble=("feed",)),
    "frame_traced_after_the_tick": replace(SHAPE, trouble=("kill",)),
    "stale_state_in_a_snapshot": replace(SHAPE, trouble=("kill",), snapshot_s=5.0, every_s=15.0),
    "released_ignored": replace(SHAPE, trouble=("weather",), people_s=1.5),
    "queue_kept_through_the_end_of_a_term": replace(SHAPE, trouble=("etcd", "cut", "weather"), daemons=1),
    "expiry_ignored_at_the_sink": replace(
        SHAPE, hours=0.06, every_s=2.0, trouble=("clock", "broker", "reset")
    ),
}


def shape_for(name: str) -> Shape:
    """The storms that look for a bug."""
    return FOCUS.get(name, SHAPE)


# Name -> the first seed whose storm finds it
FOUND: dict[str, int] = {
    "sent_before_journaled": 1, "failed_fsync_ignored": 1, "journal_not_synced": 1,
    "short_write_taken_for_whole": 1, "journal_segment_begins_a_new_chain": 1, "agent_takes_old_epochs": 2,
    "agent_takes_expired_requests": 4, "agent_lets_no_lease_lapse": 2,
    "agent_forgets_leases_in_a_restart": 1, "agent_keeps_the_value_at_a_lapse": 2,
    "term_not_checked_before_sending": 2, "epoch_taken_twice": 1, "blast_radius_off_by_one": 5,
    "envelope_not_kept": 2, "lease_longer_than_its_control_allows": 1,
    "numbers_begin_anew_after_a_restart": 1, "notes_are_lost": 1, "clock_read_in_a_policy": 1,
    "frame_traced_after_the_tick": 1, "budgets_ignored": 4,
    "term_counted_from_the_answer": 4, "deposed_member_believed": 1, "released_ignored": 2,
    "stale_state_in_a_snapshot": 1, "queue_kept_through_the_end_of_a_term": 1,
    "expiry_ignored_at_the_sink": 12,
}  # fmt: skip


def hunt(name: str, seeds: range) -> tuple[int, Report] | None:
    """The first seed whose storm finds a bug, with its report."""
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="storm-"))
        try:
            with pytest.MonkeyPatch.context() as patch:
                BUGS[name](patch)
                report = blow(seed, folder, shape_for(name))
        finally:
            shutil.rmtree(folder)
        if report.faults:
            return seed, report
    return None


def main(names: list[str]) -> None:
    """Hunt those bugs, or all."""
    for name in names or BUGS:
        began = time.process_time()
        found = hunt(name, range(1, MOST + 1))
        what = f"seed {found[0]}: {found[1].faults[0][:150]}" if found else f"not within {MOST} seeds"
        print(f"{name}: {what} ({time.process_time() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
