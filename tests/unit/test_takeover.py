"""A new term, and a leader who is new to the site: what is adopted, what settles, what passes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.support.builders import START_NS, Twin, Wish, eight_nodes, profile_tree, two_racks
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, digest
from twin.control import DONE, SENT
from twin.control.arbiter import OUTDATED_S
from twin.site import SiteSpec
from twin.telemetry import events as ev

CAP, LEVEL = "gpu.power_cap_w", "node.service_level"
NAN = float("nan")
FOUND = [350.0, 250.0, 300.0, 348.0, 150.0, NAN, 200.0, 400.0]
TAKEOVER = ev.EpochChanged(epoch=5, head="abc", adopt=True)


def standby(*policies: Any, found: Any = FOUND) -> Twin:
    """Eight GPUs (200..350 W, safe 200 W) as another daemon left them; nothing may act yet."""
    twin = Twin(eight_nodes(), policies or [Wish()])
    twin.run(3, {"gpu.power_limit_w": found, "gpu.temp_c": 50.0})
    assert twin.decision.commands == ()
    return twin


def act(*names: str) -> list[ev.Event]:
    return [ev.AuthorityChanged(author="takeover", policy=n, authority="act") for n in names or ("wish",)]


def seen(twin: Twin) -> dict[int, float]:
    return {int(i): float(v) for c in twin.commands(CAP) for i, v in zip(c.index, c.value, strict=True)}


def test_every_running_lease_is_commanded_anew_under_a_new_epoch() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0, 1], 200, 300, 300)
    twin.tick({"gpu.power_limit_w": 350.0})
    old = twin.commands(CAP)[0]
    twin.run(2, {"gpu.power_limit_w": 300.0})
    assert (twin.engine.arbiter.leases[CAP].state[:2] == DONE).all()
    twin.tick({"gpu.power_limit_w": 300.0}, ev.EpochChanged(epoch=2))
    (batch,) = twin.decision.commands
    assert (batch.epoch, batch.index.tolist(), batch.value.tolist()) == (2, [0, 1], [300.0, 300.0])
    assert not batch.renewal
    assert (batch.command > old.command.max()).all()
    assert batch.expires_ns == twin.now_ns + 30 * NS
    lease = twin.engine.arbiter.leases[CAP]
    assert lease.found[:2].tolist() == [350.0, 350.0], "what is owed is still known"
    assert lease.owner[:2].tolist() == [0, 0]
    name = twin.site.name("gpu", 0)
    late = {"control": CAP, "name": name, "generation": 0, "state": "done"}
    twin.tick(None, ev.CommandAcked(command=f"1-{old.command[0]}", **late))
    assert twin.engine.intake.counts == {"stale_acks": 1}
    assert lease.state[0] == SENT
    twin.tick(None, ev.CommandAcked(command=f"2-{batch.command[0]}", **late))
    assert lease.state[0] == DONE
    wish.proposals = []
    twin.tick({"gpu.power_limit_w": 300.0})
    assert twin.commands(CAP)[0].final, "given back as ever"


def test_the_same_epoch_again_commands_nothing() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 300)
    twin.run(2, {"gpu.power_limit_w": 350.0})
    twin.tick(None, ev.EpochChanged(epoch=1))
    assert twin.decision.commands == ()
    twin.tick(None, ev.EpochChanged(epoch=0))
    assert twin.decision.commands == ()
    assert "older" in twin.records("event")[0]["refused"]


def test_what_keeps_its_value_and_nobody_asks_for_is_not_commanded_anew() -> None:
    """A node that is drained stays so by itself; by now the drain may be somebody else's."""
    wish = Wish()
    twin = Twin(two_racks(), [wish], act=True)
    wish.ask(LEVEL, [0, 1], 3, 3, 3)
    twin.tick({"node.service_level_state": 0.0})
    twin.tick({"node.service_level_state": 3.0})
    lease = twin.engine.arbiter.leases[LEVEL]
    assert lease.running()[:2].all()
    wish.ask(LEVEL, [0], 3, 3, 3)
    twin.tick({"node.service_level_state": 3.0}, ev.EpochChanged(epoch=2))
    assert [c.index.tolist() for c in twin.commands(LEVEL)] == [[0]]
    assert lease.running()[1], "it is left to lapse"


def levels(twin: Twin) -> list[tuple[int, float]]:
    return [(int(i), v) for c in twin.commands(LEVEL) for i, v in zip(c.index, c.value.tolist(), strict=True)]


def drainable(*policies: Any) -> Twin:
    """Nodes in service on which no job runs."""
    twin = Twin(two_racks(max_jobs=4, controls={LEVEL: {"blast_radius": 9}}), policies, act=True)
    twin.tick({"node.service_level_state": 0.0}, ev.JobStarted(job="elsewhere", nodes=()))
    return twin


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_refused_command_is_repeated_only_while_a_policy_claims_it(claimed: bool, epoch: int) -> None:
    """A value that stays may be another's by now, in this term and in the next."""
    wish = Wish()
    twin = drainable(wish)
    wish.ask(LEVEL, [0], 3, 3, 3)
    twin.tick({"node.service_level_state": 0.0})
    (batch,) = twin.commands(LEVEL)
    answer = {"control": LEVEL, "name": twin.site.name("node", 0), "generation": 0, "state": "failed"}
    twin.tick(None, ev.CommandAcked(command=f"1-{batch.command[0]}", **answer))
    if not claimed:
        wish.proposals = []
    twin.tick(None, ev.EpochChanged(epoch=epoch))
    sent = list(twin.decision.commands)
    for _ in range(30):
        sent += twin.tick().commands
    assert bool([c for c in sent if c.control == LEVEL]) is claimed
    assert twin.engine.arbiter.leases[LEVEL].running()[0], "it is left to lapse"


def test_what_is_claimed_again_in_a_later_term_is_commanded_anew() -> None:
    wish = Wish()
    twin = drainable(wish)
    wish.ask(LEVEL, [0], 3, 3, 3)
    twin.tick({"node.service_level_state": 0.0})
    (old,) = twin.commands(LEVEL)
    wish.proposals = []
    twin.tick(None, ev.EpochChanged(epoch=2))
    assert twin.commands(LEVEL) == []
    wish.ask(LEVEL, [0], 3, 3, 3)
    twin.tick()
    (new,) = twin.commands(LEVEL)
    assert (new.epoch, new.policy) == (2, "wish")
    assert new.command[0] > old.command[0], "under a number that the journal of this term has"
    twin.tick()
    assert twin.commands(LEVEL) == []


def drained_before_a_restart(*more: ev.Event, skipped_s: float = 1.0) -> tuple[Twin, Wish]:
    """Nodes 0 and 1 are read back as drained, then a new term of the same daemon begins."""
    twin = drainable(wish := Wish())
    wish.ask(LEVEL, [0, 1], 3, 3, 3)
    twin.tick()
    assert levels(twin) == [(0, 3.0), (1, 3.0)]
    twin.run(2, {"node.service_level_state": [3.0, 3.0] + [0.0] * 34})
    twin.tick(None, *more, ev.EpochChanged(epoch=2), dt_s=skipped_s)
    assert levels(twin) == [], "people may have ended it meanwhile: first it is read back"
    return twin, wish


@pytest.mark.parametrize("skipped_s", [1.0, 400.0])  # within the lease, and after it
@pytest.mark.parametrize("held", [False, True])
def test_a_node_that_people_resumed_is_not_drained_anew_under_a_new_epoch(
    skipped_s: float, held: bool
) -> None:
    hold = [ev.Held(id="h", author="ann")] if held else []
    twin, wish = drained_before_a_restart(*hold, skipped_s=skipped_s)
    for _ in range(40):
        twin.tick({"node.service_level_state": [0.0, 3.0] + [0.0] * 34}, dt_s=10.0)
        assert 0 not in dict(levels(twin))
    if not held:
        wish.ask(LEVEL, [1], 3, 3, 3)
        twin.tick({"node.service_level_state": [0.0, 3.0] + [0.0] * 34})
        wish.ask(LEVEL, [0, 1], 3, 3, 3)
        twin.tick({"node.service_level_state": [0.0, 3.0] + [0.0] * 34})
        assert levels(twin) == [(0, 3.0)], "what is decided since is a new command"


def test_what_is_read_back_as_drained_is_commanded_under_the_new_epoch() -> None:
    twin, _ = drained_before_a_restart()
    twin.tick({"node.service_level_state": [3.0, 2.0] + [0.0] * 34})
    (batch,) = twin.commands(LEVEL)
    assert (batch.epoch, batch.renewal, levels(twin)) == (2, False, [(0, 3.0), (1, 3.0)])


def test_another_policy_drains_at_once_what_people_may_have_resumed() -> None:
    wish, other = Wish(), Wish("other")
    twin = drainable(other, wish)
    wish.ask(LEVEL, [0], 1, 4, 1)
    twin.tick()
    twin.run(2, {"node.service_level_state": [1.0] + [0.0] * 35})
    other.ask(LEVEL, [0], 3, 4, 3)
    twin.tick(None, ev.EpochChanged(epoch=2))
    assert levels(twin) == [(0, 3.0)]


def test_no_device_is_told_twice_in_the_first_tick_of_a_term() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, range(4), 200, 300, 300)
    twin.run(16, {"gpu.power_limit_w": 350.0})  # renewals are due
    wish.ask(CAP, [0, 1], 200, [250, 300], [250, 300])  # one changes in this tick, one stays, two are let go
    twin.tick(None, ev.EpochChanged(epoch=2))
    told = [int(i) for c in twin.decision.commands for i in c.index]
    assert sorted(told) == [0, 1, 2, 3]
    assert {c.epoch for c in twin.decision.commands} == {2}


def test_released_stays_released_under_a_new_epoch() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 300)
    twin.run(2, {"gpu.power_limit_w": 350.0})
    twin.tick(None, ev.Released(author="ann"), ev.EpochChanged(epoch=2))
    assert twin.decision.commands == ()


def test_what_is_set_is_adopted_as_found() -> None:
    """350 is free, 348 within the deadband of it; 150 and 400 cannot be commanded; one was never heard."""
    twin = standby()
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER, *act())
    assert seen(twin) == {1: 250.0, 2: 300.0, 6: 200.0}
    (batch,) = twin.commands(CAP)
    assert (batch.policy, batch.epoch, batch.reason) == ("arbiter", 5, "adopted at takeover, as found")
    (event,) = [r["event"] for r in twin.records("event") if r["event"]["type"] == "EpochChanged"]
    assert (event["head"], event["adopt"]) == ("abc", True)
    (settling,) = twin.records("settling")
    assert settling["until_ns"][CAP] == twin.now_ns + 30 * NS
    assert settling["until_ns"][LEVEL] == twin.now_ns + 300 * NS
    assert "job.power_cap_w" in settling["until_ns"] or twin.site.sizes["job"] == 0


def test_a_stale_read_back_is_not_adopted_until_it_is_heard() -> None:
    twin = standby()
    twin.tick(None, dt_s=20.0)
    twin.tick(None, TAKEOVER, *act())
    assert seen(twin) == {}
    twin.tick({"gpu.power_limit_w": FOUND})
    assert seen(twin) == {1: 250.0, 2: 300.0, 6: 200.0}, "while it settles, what comes late is adopted too"
    twin.run(40, {"gpu.power_limit_w": 260.0})
    assert seen(twin) == {}


def test_a_cap_that_was_lowered_just_before_the_takeover_is_not_raised_again() -> None:
    """GPU 1 went down to 210 W after its last report; GPU 2 does not report again."""
    twin = standby()
    twin.tick(None, TAKEOVER, *act(), dt_s=0.4)
    assert seen(twin) == {}, "what was read back before the takeover may be outdated"
    later = np.array(FOUND)
    later[1], later[2] = 210.0, NAN
    twin.tick({"gpu.power_limit_w": later}, dt_s=0.6)
    assert seen(twin) == {1: 210.0, 6: 200.0}
    twin.tick(None, dt_s=1.0)
    assert seen(twin) == {}, "the last reading of GPU 2 is bad"
    again = standby()
    again.tick(None, TAKEOVER, *act(), dt_s=0.4)
    again.tick(None, dt_s=OUTDATED_S - 0.1)
    assert seen(again) == {}
    again.tick(None, dt_s=0.1)
    assert seen(again) == {1: 250.0, 2: 300.0, 6: 200.0}, "before their leases lapse"


def test_levels_that_keep_are_seen_and_not_commanded() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    level = [3.0, 0, 0, 0, 0, 0, 0, 0]
    twin.tick({"node.service_level_state": level}, TAKEOVER)
    twin.run(3, {"node.service_level_state": level})
    assert twin.decision.commands == ()
    assert np.isnan(twin.lease(LEVEL)).all()


def test_where_nobody_may_act_nothing_is_adopted() -> None:
    twin = standby()
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER)
    assert twin.decision.commands == ()
    twin.tick({"gpu.power_limit_w": FOUND}, *act())
    assert seen(twin) == {1: 250.0, 2: 300.0, 6: 200.0}


def test_for_one_lease_only_protection_changes_anything() -> None:
    wish = Wish()
    twin = standby(wish)
    wish.ask(CAP, [0, 1, 2], [200, 320, 200], [260, 350, 280], [260, 320, 280])
    readback = np.array([350.0, 250.0, 300.0, 350, 350, 350, 350, 350])
    twin.tick({"gpu.power_limit_w": readback}, TAKEOVER, *act())
    assert twin.lease(CAP)[:3].tolist() == [260.0, 250.0, 280.0], "down at once, not up"
    for second in range(1, 30):
        twin.tick({"gpu.power_limit_w": twin.lease(CAP)})
        assert twin.lease(CAP)[1] == 250.0, second
        assert twin.records("settled") == []
    twin.tick({"gpu.power_limit_w": twin.lease(CAP)})
    (settled,) = twin.records("settled")
    assert CAP in settled["controls"]
    assert LEVEL not in settled["controls"]
    assert twin.lease(CAP)[1] == 300.0, "at the slew limit"


def test_what_protected_while_it_settles_is_given_back_only_after() -> None:
    wish = Wish()
    twin = standby(wish, found=350.0)
    wish.ask(CAP, [0], 200, 250, 250)
    twin.tick({"gpu.power_limit_w": 350.0}, TAKEOVER, *act())
    wish.proposals = []
    for _ in range(29):
        twin.tick({"gpu.power_limit_w": [250.0] + [350.0] * 7})
        assert twin.lease(CAP)[0] == 250.0
    twin.run(3, {"gpu.power_limit_w": [250.0] + [350.0] * 7})
    assert np.isnan(twin.lease(CAP)[0])


def test_adopted_leases_are_renewed_while_it_settles_and_then_lapse() -> None:
    """The setting from before the lease is unknown: the device falls to the safe value of its control."""
    twin = standby()
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER, *act())
    expires = twin.engine.arbiter.leases[CAP].expires_ns[1]
    for _ in range(29):
        twin.tick({"gpu.power_limit_w": FOUND})
        assert twin.lease(CAP)[1] == 250.0
    assert twin.engine.arbiter.leases[CAP].expires_ns[1] > expires
    for _ in range(31):
        twin.tick({"gpu.power_limit_w": FOUND})
        assert twin.commands(CAP) == []
    assert np.isnan(twin.lease(CAP)).all()
    assert np.isnan(twin.engine.arbiter.leases[CAP].found).all()


def test_what_a_policy_goes_on_wanting_is_held_without_a_gap() -> None:
    wish = Wish()
    twin = standby(wish)
    wish.ask(CAP, [1, 2], 200, [250, 300], NAN)
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER, *act())
    for _ in range(90):
        twin.tick({"gpu.power_limit_w": np.where(np.isnan(twin.lease(CAP)), FOUND, twin.lease(CAP))})
        assert twin.lease(CAP)[1:3].tolist() == [250.0, 300.0]


def test_heat_passes_at_once_and_advice_becomes_command() -> None:
    twin = standby(ThermalGuard(), Operator(), found=350.0)
    hot = {"gpu.power_limit_w": 350.0, "gpu.temp_c": [99.0] + [50.0] * 7}
    twin.run(3, hot)
    assert twin.decision.commands == ()
    twin.tick(hot, TAKEOVER, *act("thermal_guard", "operator"))
    assert seen(twin) == {0: 200.0}
    assert twin.decision.advice == ()
    assert not twin.engine.arbiter.shadow[CAP].apart.any()
    twin.run(2, hot)
    assert twin.decision.advice == ()


def test_leases_of_an_earlier_term_of_ours_do_not_count() -> None:
    """Deposed and elected again: another daemon has had the site since."""
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0, 1], 200, 300, 300)
    twin.run(2, {"gpu.power_limit_w": 350.0})
    wish.proposals = []
    twin.tick({"gpu.power_limit_w": [240.0] + [350.0] * 7}, TAKEOVER)
    assert seen(twin) == {0: 240.0}
    assert np.isnan(twin.lease(CAP)[1])


def test_what_became_of_earlier_commands_is_no_alarm_of_ours() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0, 1], 200, 300, 300)
    twin.run(60)
    assert f"unanswered/{CAP}" in twin.engine.findings.active
    wish.proposals = []
    twin.tick(None, TAKEOVER)
    assert f"unanswered/{CAP}" not in twin.engine.findings.active


def test_a_hold_of_the_leader_before_goes_on_after_it_settled() -> None:
    wish = Wish()
    twin = standby(wish)
    wish.ask(CAP, [1], 320, 350, 320)
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER, *act(), ev.Held(author="takeover"))
    for _ in range(60):
        twin.tick({"gpu.power_limit_w": FOUND})
        assert twin.lease(CAP)[[1, 2, 6]].tolist() == [250.0, 300.0, 200.0]
    twin.tick({"gpu.power_limit_w": FOUND}, ev.Resumed(author="ann"))
    assert twin.lease(CAP)[1] == 300.0


def test_people_at_work_are_not_disturbed_by_a_takeover() -> None:
    twin = standby()
    window = ev.MaintenanceBegun(
        id="m", author="ann", table="node", names=("r1/node1",), until_ns=START_NS + 99 * NS
    )
    twin.tick({"gpu.power_limit_w": FOUND}, window, TAKEOVER, *act())
    assert seen(twin) == {2: 300.0, 6: 200.0}


def test_settling_survives_a_restart() -> None:
    wish = Wish()
    twin = standby(wish)
    wish.ask(CAP, [1], 320, 350, 320)
    twin.tick({"gpu.power_limit_w": FOUND}, TAKEOVER, *act())
    twin.run(3, {"gpu.power_limit_w": FOUND})
    back = twin.restarted(eight_nodes(), [wish])
    assert back.engine.arbiter.settling == twin.engine.arbiter.settling != {}
    for _ in range(50):
        one, other = (t.tick({"gpu.power_limit_w": FOUND}) for t in (twin, back))
        assert digest(bodies_of(one)) == digest(bodies_of(other))
    assert back.engine.checksum() == twin.engine.checksum()


def test_under_a_hold_a_narrower_envelope_applies_where_it_protects() -> None:
    """A changed site allows 800 W at most: what runs at 900 W goes down, what runs at 500 W stays."""
    twin = Twin(two_racks(), [Operator()], act=True)
    ask = [
        ev.OperatorRequest(id=f"q{w}", author="ann", control=CAP, names=(f"r1/node0/gpu{k}",),
                           lo=0.0, hi=w, want=w)
        for k, w in enumerate((900.0, 500.0))
    ]  # fmt: skip
    values = {"gpu.power_limit_w": 1200.0, "gpu.temp_c": 50.0}
    twin.tick(values, *ask)
    twin.tick(values, ev.Held(author="ann"), ev.RequestWithdrawn(author="ann", request="q900.0"))
    tree = two_racks(controls={CAP: {"max": 800.0}})
    spec = SiteSpec(tree, {"gb200-nvl72": profile_tree("gb200-nvl72")})
    twin.tick(None, ev.SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    assert twin.lease(CAP)[:2].tolist() == [800.0, 500.0]
    (batch,) = twin.commands(CAP)
    assert (batch.policy, batch.index.tolist()) == ("arbiter", [0])
    assert "narrower" in batch.reason
    twin.tick(values)
    assert twin.commands(CAP) == []


@pytest.mark.parametrize(
    "answer, heard, expected", [("done", False, True), ("done", True, False), (None, False, False)]
)
def test_a_device_that_answers_and_never_reads_back_is_told(answer: Any, heard: bool, expected: bool) -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 300)
    twin.run(2)
    number = twin.engine.arbiter.leases[CAP].command[0]
    if answer:
        name = twin.site.name("gpu", 0)
        twin.tick(None, ev.CommandAcked(control=CAP, name=name, generation=0,
                                        command=f"1-{number}", state=answer))  # fmt: skip
    values = {"gpu.power_limit_w": 300.0} if heard else {}
    twin.run(8, values)
    assert f"unread/{CAP}" not in twin.engine.findings.active
    twin.run(10, values)
    assert (f"unread/{CAP}" in twin.engine.findings.active) == expected
    twin.tick({"gpu.power_limit_w": 300.0})
    assert f"unread/{CAP}" not in twin.engine.findings.active


@pytest.mark.long
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "silent"])
@pytest.mark.parametrize(("owner", "most"), [(1.0, 2), (2.0, 4)], ids=["ours", "others"])
def test_what_the_leader_before_took_out_takes_room(owner: float, most: int, heard: bool) -> None:
    """Of four nodes that shall be out it had taken two, as many as may be; two of others' take no room."""
    wish = Wish()
    twin = Twin(eight_nodes(controls={LEVEL: {"blast_radius": 2}}), [wish])
    twin.tick(None, ev.JobStarted(job="elsewhere", nodes=()))
    found = {"node.service_level_state": [3, 3, 0, 0, 0, 0, 0, 0],
             "node.service_owner_state": [owner, owner, 0, 0, 0, 0, 0, 0]}  # fmt: skip
    wish.ask(LEVEL, range(4), 3, 3, 3)
    twin.tick(found)
    twin.tick(found if heard else None, dt_s=600.0)  # so that it is old where it is not heard any more
    twin.tick(found if heard else None, TAKEOVER, *act())
    for _ in range(310):
        twin.tick(found if heard else None)
    out = np.flatnonzero(twin.lease(LEVEL) == 3.0).tolist()
    assert out == list(range(most))
    wish.ask(LEVEL, range(4), 0, 0, 0)
    twin.tick(found)
    assert (twin.lease(LEVEL)[:most] == 0.0).all(), "a return is never held back"


@pytest.mark.long
@pytest.mark.parametrize("by", [0.0, 2.0], ids=["nobody", "others"])
def test_what_the_leader_before_took_out_and_others_brought_back_takes_no_room(by: float) -> None:
    """They may take the same nodes out again, by the mark that is theirs: there is room for two of ours."""
    wish = Wish()
    twin = Twin(eight_nodes(controls={LEVEL: {"blast_radius": 2}}), [wish])
    twin.tick(None, ev.JobStarted(job="elsewhere", nodes=()))

    def reads(level: float, owner: float) -> dict[str, Any]:
        return {"node.service_level_state": [level, level, 0, 0, 0, 0, 0, 0],
                "node.service_owner_state": [owner, owner, 0, 0, 0, 0, 0, 0]}  # fmt: skip

    twin.tick(reads(3, 1))
    twin.tick(reads(3, 1), TAKEOVER, *act())
    twin.run(310, reads(3, 1))
    assert twin.engine.arbiter.leases[LEVEL].lapsed[:2].tolist() == [3.0, 3.0]
    twin.tick(reads(0, by))
    wish.ask(LEVEL, [4, 5, 6], 3, 3, 3)
    twin.tick(reads(3, 2))
    assert np.flatnonzero(twin.lease(LEVEL) == 3.0).tolist() == [4, 5]


@pytest.mark.parametrize("told", [True, False])
def test_a_leader_without_a_past_takes_an_old_fault_of_a_node_that_returned_as_history(told: bool) -> None:
    """The broker kept the report while the daemon's disk was lost."""
    before, after = Twin(eight_nodes()), Twin(eight_nodes())
    before.tick({"node.service_level_state": 3.0})
    before.run(12, {"node.service_level_state": 0.0})
    returned = before.engine.health.book.returned()
    assert len(returned) == 8
    after.now_ns = before.now_ns
    after.tick(None, ev.EpochChanged(epoch=5, adopt=True, returned=returned if told else {}))
    old_ns = min(returned.values()) - NS
    late = [
        ev.FaultReported(table="gpu", name=f"r1/node{g}/gpu0", code=79, at_ns=old_ns + 2 * g * NS)
        for g in range(2)
    ]
    for twin in (before, after):
        twin.tick(None, *late)
    assert before.engine.health.book.open_grave("gpu")[:2].tolist() == [False, True]
    assert after.engine.health.book.open_grave("gpu")[:2].tolist() == [not told, True]
