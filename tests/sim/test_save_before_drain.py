"""Replacement and checkpoints together: a node goes bad, its job saves once, and is drained only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.checkpointing import Checkpoint
from policies.checkpointing.texts import SINCE
from tests.support.builders import Twin
from tests.support.replacement_site import Replacing
from twin.catalogue import NS
from twin.contracts import FAILED
from twin.telemetry import events as ev

WHOLE = tuple(f"r1/node{i}" for i in range(18)) + tuple(f"r2/node{i}" for i in range(18))
BLOCK_S, FLUSH_S, STEP_S = 30.0, 360.0, 5.0  # longer than an ask may follow another


class _WithCheckpoints(Twin):
    """Runs `checkpoint` beside what it is made with."""

    def __init__(self, tree: Any, policies: Any, models: Any, authority: Any) -> None:
        super().__init__(
            tree, [Checkpoint(), *policies], models, authority={**authority, "checkpoint": "act"}
        )


class Both(Replacing, _WithCheckpoints):
    """A job of all nodes that saves as the client for jobs does: once for each wish that no save meets."""

    def __init__(self, listens: bool = True) -> None:
        self.listens, self.met_s = listens, np.nan
        self.begun_s: list[float] = []  # saves that were wished for
        self.durable_s: list[float] = []
        self.wished_s = self.drained_s = np.nan
        super().__init__({"a": WHOLE}, queue_h=0.05)
        self.evicts = False  # it goes on for a while, and could be asked again
        for k in range(3):
            self.look(self.told(self.now_ns - (1800 + k) * NS))

    def told(self, began_ns: int) -> ev.CheckpointTold:
        return ev.CheckpointTold(job="a", at_ns=self.now_ns + NS, began_ns=began_ns, save_s=FLUSH_S,
                                 block_s=BLOCK_S, flush_s=FLUSH_S, interval_s=3600.0)  # fmt: skip

    def step(self) -> None:
        """One look; the job hears, saves and tells."""
        now_s, told = self.now_ns / NS, []
        if len(self.durable_s) < len(self.begun_s) and now_s >= self.begun_s[-1] + FLUSH_S:
            self.durable_s.append(now_s)
            told.append(self.told(round(self.begun_s[-1] * NS)))
        self.look(*told, dt_s=STEP_S)
        now_s = self.now_ns / NS
        if np.isnan(self.drained_s) and self.level[0] >= 2:
            self.drained_s = now_s
        wish_s = float(self.lease(SINCE)[self.engine.jobs.slot_of["a"]])
        if not np.isfinite(wish_s):
            return
        self.wished_s = now_s if np.isnan(self.wished_s) else self.wished_s
        new = wish_s != self.met_s and not (self.begun_s and self.begun_s[-1] >= wish_s)
        if self.listens and new:
            self.met_s = wish_s
            self.begun_s.append(now_s)

    def go(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def until_drained(self) -> None:
        """And for some minutes more, in which `checkpoint` sees a node that is being drained."""
        while np.isnan(self.drained_s) and self.now_ns / NS < 1_700_003_000.0:
            self.step()
        self.go(200.0)


@pytest.mark.long
def test_a_drain_follows_the_one_save_that_was_asked_for() -> None:
    twin = Both()
    twin.go(60)
    assert not twin.begun_s
    twin.bad(0, FAILED, "drain", 0.9)
    twin.until_drained()
    assert len(twin.begun_s) == 1, "both policies may ask; the job saves once"
    assert twin.durable_s[0] < twin.drained_s <= twin.durable_s[0] + 30.0, (
        "when that is durable, and then soon"
    )
    assert "saving" in twin.moves()


@pytest.mark.long
def test_checkpoints_ask_first_and_the_drain_waits_for_that_save() -> None:
    """A verdict makes `checkpoint` ask within seconds; replacement confirms it for a while first."""
    twin = Both()
    twin.bad(0, FAILED, "drain", 0.9)
    twin.go(15)
    assert any("one of its nodes is in bad health" in reason for _, _, _, reason in twin.commanded)
    assert twin.memory["phase"][0] <= 1, "not yet in replacement's hands"
    twin.until_drained()
    assert len(twin.begun_s) == 1
    assert all(since_s <= twin.begun_s[0] for _, since_s in twin.asked(SINCE)), "no other one is asked for"
    assert twin.drained_s > twin.durable_s[0]


@pytest.mark.long
def test_a_job_that_never_saves_is_waited_for_until_the_deadline_and_no_longer() -> None:
    twin = Both(listens=False)
    twin.says.hour = np.where(np.arange(twin.n) == 0, 0.9, 1e-4)
    twin.says.day = np.where(np.arange(twin.n) == 0, 0.95, 2e-3)
    twin.bad(0, FAILED, "drain", 0.9)
    deadline_ns = 0
    for _ in range(1000):
        twin.step()
        deadline_ns = max(deadline_ns, int(twin.memory["deadline_ns"][0]) * (twin.phase() == "saving"))
        if np.isfinite(twin.drained_s):
            break
    assert not twin.begun_s
    assert np.isfinite(twin.wished_s)
    assert deadline_ns / NS <= twin.drained_s <= deadline_ns / NS + 30.0
    assert 60.0 <= twin.drained_s - twin.wished_s <= 1800.0 + 60.0
