"""A found setting is given back once, whole, and not twice: read-backs that lag, commands that are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, Wish, two_racks
from tests.unit.test_leases import CAP, twin, values
from twin.control.leases import MAX_ATTEMPTS
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import CommandAcked


def capped_pod() -> tuple[Twin, Wish]:
    """GPU 0 cut from 350 W to 300, read back, and let go again."""
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    pod.run(3, {"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    wish.proposals = []
    return pod, wish


def test_our_own_raise_on_its_way_is_nobody_elses_setting() -> None:
    pod, wish = capped_pod()
    cut = {"gpu.power_limit_w": [300.0, *[350.0] * 7]}
    wish.ask(CAP, [0], 200, 320)
    pod.tick(cut)
    wish.proposals = []
    pod.tick(cut)  # the raise to 320 is not read back yet
    (final,) = pod.commands()
    assert (values([final]), final.final) == ({0: 350.0}, True)


def test_a_lower_setting_of_somebody_else_stands_once_that_is_clear() -> None:
    pod, wish = capped_pod()
    wish.ask(CAP, [0], 200, 300)
    lower = {"gpu.power_limit_w": [240.0, *[350.0] * 7]}
    pod.tick(lower)
    wish.proposals = []
    for _ in range(9):
        pod.tick(lower)
        assert all(c.renewal for c in pod.commands()), "too early to say whose it is"
    pod.run(3, lower)
    assert np.isnan(pod.lease(CAP)[0])
    assert pod.engine.arbiter.leases[CAP].given[0] == 240.0


@pytest.mark.parametrize("settles_at", [350.0, 200.0])
def test_a_last_command_that_was_lost_is_given_again(settles_at: float) -> None:
    """The device goes on at 300 W, lets its lease lapse to what is safe, and is raised from there."""
    pod, _ = capped_pod()
    assert pod.engine.site.envelopes[CAP].safe[0] == 200.0
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    assert [c.final for c in pod.commands()] == [True]
    pod.run(30, {"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    said: list[Any] = []
    for _ in range(15):
        pod.tick({"gpu.power_limit_w": [settles_at, *[350.0] * 7]})
        said += pod.commands()
    if settles_at == 350.0:
        assert said == []
    else:
        assert [values([c])[0] for c in said] == [250.0, 300.0, 350.0]
        assert said[-1].final


def test_a_lease_amid_the_giving_back_remembers_what_was_found() -> None:
    pod, wish = capped_pod()
    late = {"gpu.power_limit_w": [300.0, *[350.0] * 7]}
    pod.tick(late)  # given back, and not read back yet
    wish.ask(CAP, [0], 200, 320)
    pod.tick(late)
    assert pod.engine.arbiter.leases[CAP].found[0] == 350.0


def test_an_old_reading_heard_first_after_a_silence_does_not_end_the_debt() -> None:
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    for _ in range(60):
        pod.tick({"gpu.power_w": 100.0})
    said: list[Any] = []
    for reads in (300.0, 300.0, 200.0, 200.0, 250.0, 300.0, 350.0):
        pod.tick({"gpu.power_limit_w": [reads, *[350.0] * 7]})
        said += pod.commands()
    assert [values([c])[0] for c in said] == [250.0, 300.0, 350.0]


def test_what_somebody_else_sets_afterwards_is_theirs() -> None:
    pod, wish = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    pod.run(50, {"gpu.power_limit_w": 350.0})
    assert np.isnan(pod.engine.arbiter.leases[CAP].given).all()
    wish.ask(CAP, [0], 200, 320)
    pod.tick({"gpu.power_limit_w": [280.0, *[350.0] * 7]})
    assert pod.engine.arbiter.leases[CAP].found[0] == 280.0
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    pod.run(100, {"gpu.power_limit_w": [280.0, *[350.0] * 7]})
    assert np.isnan(pod.engine.arbiter.leases[CAP].given).all()
    assert pod.commands() == []


def done(pod: Twin) -> CommandAcked:
    """The sink of GPU 0 answers that it carried out the last command."""
    lease = pod.engine.arbiter.leases[CAP]
    return CommandAcked(control=CAP, name=pod.site.name("gpu", 0), generation=int(lease.generation[0]),
                        command=f"1-{lease.command[0]}", state="done")  # fmt: skip


def test_a_device_that_answers_done_and_reads_lower_is_nobody_elses() -> None:
    """It rounds 320 W down to 300, or takes its time: our own cut must not be taken for what was found."""
    pod, wish = capped_pod()
    cut = {"gpu.power_limit_w": [300.0, *[350.0] * 7]}
    wish.ask(CAP, [0], 200, 320, 320)
    pod.tick(cut)
    pod.tick(cut, done(pod))
    pod.run(20, cut)
    wish.proposals = []
    pod.tick(cut)
    (final,) = pod.commands()
    assert (values([final]), final.final) == ({0: 350.0}, True)


def test_a_setting_of_somebody_else_is_not_raised_on_the_way_to_it() -> None:
    wish = Wish()
    pod = Twin(two_racks(), [wish], act=True)
    rest = [1200.0] * (pod.site.sizes["gpu"] - 1)
    wish.ask(CAP, [0], 200, 1000)
    pod.tick({"gpu.power_limit_w": 1200.0})
    pod.run(3, {"gpu.power_limit_w": [1000.0, *rest]})
    pod.run(15, {"gpu.power_limit_w": [400.0, *rest]})
    wish.proposals = []
    pod.tick({"gpu.power_limit_w": [400.0, *rest]})
    (final,) = pod.commands()
    assert (values([final]), final.final) == ({0: 400.0}, True)


def test_what_is_given_back_begins_inside_the_envelope() -> None:
    """A device that its lapse left at 100 W, where 200 are the least that may be commanded."""
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    pod.engine.arbiter.leases[CAP].expires_ns[0] = pod.now_ns + 1
    wish.proposals = []
    pod.tick({"gpu.power_limit_w": [100.0, *[350.0] * 7]})
    assert [values([c]) for c in pod.commands()] == [{0: 250.0}]


@pytest.mark.long
def test_a_device_that_keeps_no_last_command_is_not_raised_for_ever() -> None:
    pod, _ = capped_pod()
    reads, lapses_at, finals = 300.0, 0, 0
    for second in range(600):
        pod.tick({"gpu.power_limit_w": [reads, *[350.0] * 7]})
        for batch in pod.commands():
            reads, lapses_at, finals = float(batch.value[0]), second + 30, finals + batch.final
        reads = 200.0 if second == lapses_at else reads
    assert finals == 1 + MAX_ATTEMPTS
    lease = pod.engine.arbiter.leases[CAP]
    assert (reads, np.isnan(lease.given[0]), np.isnan(lease.lapsed[0])) == (200.0, True, True)


def test_one_strange_reading_before_a_silence_does_not_end_the_debt() -> None:
    pod, _ = capped_pod()
    pod.run(42, {"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    for _ in range(100):
        pod.tick({"gpu.power_w": 100.0})
    assert pod.engine.arbiter.leases[CAP].given[0] == 350.0
    pod.tick({"gpu.power_limit_w": [200.0, *[350.0] * 7]})
    assert [values([c]) for c in pod.commands()] == [{0: 250.0}]


def test_a_debt_survives_a_restart_and_a_snapshot_of_before_knows_of_none() -> None:
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    tree = decode(encode(pod.engine.dump()))
    back, _ = twin()
    back.engine.restore(tree)
    assert back.engine.arbiter.leases[CAP].given[0] == 350.0
    for lease in tree["arbiter"]["leases"].values():
        for name in ("given", "given_ns", "strays_ns", "losses", "seen"):
            del lease[name]
    old, _ = twin()
    old.engine.restore(tree)
    assert np.isnan(old.engine.arbiter.leases[CAP].given).all()


def test_another_device_owes_nothing() -> None:
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    lease = pod.engine.arbiter.leases[CAP]
    assert lease.given[0] == 350.0
    lease.forget("gpu", 0)
    assert np.isnan(lease.given[0])


def test_another_leader_has_had_the_site_and_nothing_is_owed() -> None:
    pod, _ = capped_pod()
    pod.tick({"gpu.power_limit_w": [300.0, *[350.0] * 7]})
    lease = pod.engine.arbiter.leases[CAP]
    lease.disown()
    assert np.isnan(lease.given).all()
