"""Saves in a preview: jobs count as saving when and as often as they are advised to."""

from __future__ import annotations

import numpy as np
import pytest

from policies.checkpointing.policy import REQUEST_S
from policies.checkpointing.texts import INTERVAL, SINCE
from tests.support.builders import Twin, two_racks
from tests.support.saving_jobs import EIGHT, Saving, chances, saved
from tests.unit.test_preview import Eye
from twin.catalogue import NS, digest
from twin.control import HANDOVER_S
from twin.engine import encode
from twin.engine.preview import PreviewState
from twin.engine.snapshot import decode
from twin.telemetry import AuthorityChanged, CheckpointTold, JobEnded, JobStarted

SAVE_S = 60.0  # as `saved` tells it


def endangered(authority: str) -> Saving:
    twin = Saving({"a": EIGHT}, authority=authority)
    twin.says.day, twin.says.hour = chances(n3=0.9), chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(10)
    assert "forecast to fail soon" in twin.why(SINCE)[0]
    return twin


def test_advice_to_save_ends_when_the_save_would_be_durable() -> None:
    """As it does where the job is asked and saves; nobody concludes that a job does not listen."""
    twin = endangered("advise")
    twin.wait(SAVE_S + 20)
    assert twin.why(SINCE) == []
    assert twin.engine.memory["checkpoint"]["save_deadline_ns"][0] == 0
    real = twin.engine.view().jobs.saved_ns[0]
    assert (twin.now_ns - real) / NS > 1000, "in reality it holds the old one"
    assert twin.engine.preview.saves.began_ns[0] > real


def test_a_job_that_was_never_asked_is_asked_when_the_policy_is_armed() -> None:
    twin = endangered("advise")
    twin.wait(REQUEST_S + 300.0, dt_s=20.0)
    twin.tick(None, AuthorityChanged(author="ann", policy="checkpoint", authority="act"))
    twin.wait(HANDOVER_S + 10.0, dt_s=5.0)
    assert np.isfinite(twin.since("a"))


def test_a_save_of_its_own_takes_the_place_of_the_one_that_was_never_taken() -> None:
    twin = endangered("advise")
    twin.wait(SAVE_S + 20)
    twin.told("a", ago_s=5.0)
    assert twin.engine.preview.saves.began_ns[0] == 0


def test_a_snapshot_and_the_end_of_the_job() -> None:
    twin = endangered("advise")
    twin.wait(SAVE_S + 20)
    dump = twin.engine.dump()
    assert dump["preview"]["saves"]["began_ns"][0] == twin.engine.preview.saves.began_ns[0] > 0
    twin.engine.preview = PreviewState(twin.site)
    twin.engine.restore(decode(encode(dump)))
    assert digest(twin.engine.dump()) == digest(dump)
    twin.tick(None, JobEnded(job="a"))
    assert twin.engine.preview.saves.began_ns[0] == 0


@pytest.mark.parametrize("authority", ["act", "approve"])
def test_those_who_are_asked_in_earnest_have_to_save(authority: str) -> None:
    twin = endangered(authority)
    twin.wait(SAVE_S + 20)
    assert bool(twin.why(SINCE)) == (authority == "act")


@pytest.mark.long
def test_a_job_that_is_advised_an_interval_keeps_it_and_saves_so_often() -> None:
    """Else it seems at risk for its own interval, and is advised saves that nobody would command."""
    eye = Eye("asks")
    eye.controls = (INTERVAL,)
    twin = Twin(two_racks(), [eye], authority={"asks": "advise"})
    twin.tick(None, JobStarted(job="a", nodes=EIGHT, kind="training"), dt_s=5.0)
    own = {"interval_s": 7200.0, "save_s": 20.0, "began_ns": twin.now_ns - 1000 * NS}
    twin.tick(None, CheckpointTold(job="a", at_ns=twin.now_ns + 5 * NS, **own), dt_s=5.0)
    eye.ask(INTERVAL, [0], 1.0, 1e6, 300.0)
    begun = []
    for _ in range(150):
        twin.tick(None, dt_s=5.0)
        jobs = eye.view.jobs
        begun.append(int(jobs.saved_ns[0] - twin.engine.arbiter.shadow[INTERVAL].issued_ns[0]) // NS)
    assert jobs.checkpoint_interval_s[0] == 300.0
    assert list(dict.fromkeys(begun[1:])) == [begun[1], 0, 300, 600]
    assert begun[1] < -1000, "its own one, until the first one more would be durable"
    real = twin.engine.view().jobs
    assert real.checkpoint_interval_s[0] == 7200.0
    assert real.saved_ns[0] < twin.now_ns - 1700 * NS
    eye.proposals = []
    twin.tick(None, dt_s=5.0)
    twin.tick(None, dt_s=5.0)
    assert eye.view.jobs.checkpoint_interval_s[0] == 7200.0, "what nobody asks for any more is no advice"
