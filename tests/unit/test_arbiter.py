"""The arbiter inside an engine: authority, hold, slew, blast radius, withdrawal. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, Wish, eight_nodes, two_racks
from twin.catalogue import ContractError
from twin.contracts import Proposal
from twin.control import check_proposal
from twin.telemetry import AuthorityChanged, EpochChanged, Held, JobStarted, Released, Resumed  # fmt: skip
from twin.telemetry.events import Approved

CAP, LEVEL = "gpu.power_cap_w", "node.service_level"
NAN, INF = float("nan"), float("inf")


def twin(wish: Wish | None = None, authority: str = "act", **more: Any) -> tuple[Twin, Wish]:
    """Eight GPUs (200..350 W, safe 200 W, slew 50 W/s, deadband 5 W) that read back 350 W."""
    wish = wish or Wish()
    out = Twin(eight_nodes(**more), [wish], authority={wish.name: authority})
    source = JobStarted(job="elsewhere", nodes=())  # jobs are known, and none of them runs here
    out.tick({"gpu.power_limit_w": 350.0, "node.service_level_state": 0.0}, source)
    return out, wish


def values(batches: list[Any]) -> dict[int, float]:
    return {int(i): float(v) for c in batches for i, v in zip(c.index, c.value, strict=True)}


I2, F2 = np.array([0, 1], np.int32), np.array([1.0, 2.0])


@pytest.mark.parametrize(
    "change",
    [
        {"control": "gpu.nonsense"},
        {"control": "node.power_cap_w"},
        {"index": np.array([1, 0], np.int32)},
        {"index": np.array([0, 0], np.int32)},
        {"index": np.array([-1, 0], np.int32)},
        {"index": np.array([0, 8], np.int32)},
        {"index": np.array([0.0, 1.0])},
        {"index": [0, 1]},
        {"index": np.array([[0, 1]], np.int32)},
        {"index": np.array([0], np.int32)},
        {"index": np.array([True, False])},
        {"lo": np.array([1.0])},
        {"lo": np.array([NAN, 1.0])},
        {"hi": np.array([NAN, 2.0])},
        {"lo": np.array([3.0, 3.0])},
        {"want": np.array(["a", "b"])},
        {"want": [1.0, 2.0]},
        {"hi": None},
        {"reason": None},
    ],
)
def test_a_broken_proposal_is_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"control": CAP, "index": I2, "lo": F2, "hi": F2, "want": F2, "reason": "because"}
    check_proposal(Proposal(**good), (CAP, "gpu.nonsense"), 8)
    with pytest.raises(ContractError):
        check_proposal(Proposal(**(good | change)), (CAP, "gpu.nonsense"), 8)


def test_a_policy_that_breaks_its_contract_is_suspended_and_its_intervals_hold_for_a_lease() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 200, 300, 300)
    pod.tick()
    wish.proposals = [Proposal(CAP, np.array([1.5]), F2[:1], F2[:1], F2[:1], "broken")]
    pod.tick()
    assert [f.id for f in pod.decision.findings] == ["suspended/wish"]
    assert pod.lease(CAP)[:2].tolist() == [300.0, 300.0]
    wish.proposals = []
    for _ in range(29):
        pod.tick({"gpu.power_limit_w": 300.0})
        assert pod.lease(CAP)[:2].tolist() == [300.0, 300.0]
    for _ in range(40):
        pod.tick({"gpu.power_limit_w": 300.0})
        raised = [c for c in pod.decision.commands if (c.value > 300.0).any()]
        assert not raised, "nobody knows whether they are still needed: they lapse, and are not raised"
    assert np.isnan(pod.lease(CAP)).all()


@pytest.mark.parametrize(
    "wishes, expected",
    [
        ([(200, 300, NAN)], 300.0),  # nobody wishes: the device's 350 W, as near as may be
        ([(200, 350, 250)], 250.0),
        ([(0, 3000, 250)], 250.0),  # the envelope narrows
        ([(0, 3000, INF)], 350.0),
        ([(0, 100, 50)], 200.0),  # beyond the envelope: its edge
        ([(-INF, INF, NAN)], 350.0),
        ([(200, 300, 260), (250, 350, 350)], 260.0),  # the stronger wish counts
        ([(200, 300, NAN), (310, 350, 340)], 300.0),  # a weaker one cannot widen
        ([(280, 350, NAN), (200, 250, 200)], 280.0),
        ([(200, 300, NAN), (200, 350, 210)], 210.0),
    ],
)
def test_what_proposals_come_to(wishes: list[tuple[float, float, float]], expected: float) -> None:
    policies = [Wish(f"w{i}", rank=i) for i in range(len(wishes))]
    pod = Twin(eight_nodes(), policies, act=True)
    pod.tick({"gpu.power_limit_w": 350.0})
    for policy, (lo, hi, want) in zip(policies, wishes, strict=True):
        policy.ask(CAP, [3], lo, hi, want)
    pod.run(5)
    assert pod.lease(CAP)[3] == expected
    assert np.isnan(np.delete(pod.lease(CAP), 3)).all()


def test_without_a_readback_the_protective_end_is_the_answer() -> None:
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 220, 300)
    pod.tick()
    assert values(pod.commands()) == {0: 220.0}


def test_who_could_not_have_its_way_is_recorded() -> None:
    strong, weak = Wish("strong", 0), Wish("weak", 1)
    pod = Twin(eight_nodes(), [strong, weak], act=True)
    strong.ask(CAP, [0, 1], 200, 250)
    weak.ask(CAP, [0, 1, 2, 3], [200, 300, 300, 400], [260, 320, 320, 500], [210, 310, 310, NAN])
    pod.tick({"gpu.power_limit_w": 350.0})
    assert [(r["policy"], r["count"]) for r in pod.records("narrowed")] == [("weak", 2)]


def test_a_level_between_two_states_is_a_state() -> None:
    pod, wish = twin()
    wish.ask(LEVEL, [0], 0.0, 4.0, 0.9)
    pod.tick()
    assert values(pod.commands()) == {0: 1.0}


def test_what_has_no_envelope_cannot_be_commanded() -> None:
    tree = eight_nodes()
    tree["halls"][0]["racks"].append({"name": "bare", "nodes": 1, "gpus_per_node": 1})
    wish = Wish()
    pod = Twin(tree, [wish], act=True)
    wish.ask(CAP, [7, 8], 200, 300, 250)
    pod.tick({"gpu.power_limit_w": 350.0})
    assert set(values(pod.commands())) == {7}
    pod.run(3)
    assert np.isnan(pod.lease(CAP)[8])


def test_down_at_once_and_up_at_the_slew_limit_however_long_it_stood() -> None:
    pod, wish = twin(Wish())
    wish.ask(CAP, [0], 200, 200)
    pod.tick()
    assert values(pod.commands()) == {0: 200.0}
    pod.run(100, {"gpu.power_limit_w": 200.0})
    wish.ask(CAP, [0], 200, 350, 350)
    steps = []
    for _ in range(4):
        pod.tick()
        steps.append(pod.lease(CAP)[0])
    assert steps == [250.0, 300.0, 350.0, 350.0]


@pytest.mark.parametrize("dt_s", [0.05, 0.1, 1.0, 7.0])
def test_the_slew_limit_is_a_rate_and_the_deadband_does_not_stop_it(dt_s: float) -> None:
    pod, wish = twin(Wish())
    wish.ask(CAP, [0], 200, 200)
    pod.tick(dt_s=dt_s)  # ticks of this length are usual here; a pause would not save up any slew
    wish.ask(CAP, [0], 200, 350, 350)
    for k in range(1, 10):
        pod.tick(dt_s=dt_s)
        expected = min(350.0, 200.0 + 50.0 * dt_s * k)
        assert pod.lease(CAP)[0] == pytest.approx(expected, abs=5.0)
    if dt_s < 1:
        assert pod.lease(CAP)[0] > 200.0


def test_a_setpoint_slower_than_its_deadband_still_moves() -> None:
    wish = Wish()
    pod = Twin(two_racks(), [wish], act=True)
    pod.tick({"cdu.supply_temp_request_c": 30.0})
    wish.ask("cdu.supply_temp_target_c", [0], 25, 45, 31.0)
    pod.run(60, {"cdu.supply_temp_request_c": 31.0})
    assert pod.lease("cdu.supply_temp_target_c")[0] == pytest.approx(31.0, abs=0.1)


def test_an_unknown_standing_value_is_taken_to_be_the_safe_one() -> None:
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 350, 350)
    pod.tick()
    assert values(pod.commands()) == {0: 250.0}, "from the safe 200 W, a second of slew up"


def test_a_wish_that_jitters_within_the_deadband_gives_no_commands() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1], 200, 350, 300)
    pod.run(3)
    rng = np.random.default_rng(1)
    for _ in range(50):
        wish.ask(CAP, [0, 1], 200, 350, 300 + rng.uniform(-4.9, 4.9, 2))
        pod.tick({"gpu.power_limit_w": 300.0})
        assert pod.commands() == []
    wish.ask(CAP, [0, 1], 200, 350, [294.0, 306.0])
    pod.tick()
    assert values(pod.commands()) == {0: 294.0, 1: 306.0}


@pytest.mark.parametrize(("reads", "first"), [(100.0, 250.0), (900.0, 350.0)])
def test_a_device_outside_its_envelope_is_taken_to_its_edge_at_once(reads: float, first: float) -> None:
    """From there on at the slew limit: no command ever lies outside."""
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 350, 350)
    pod.tick({"gpu.power_limit_w": reads})
    assert values(pod.commands()) == {0: first}


def test_a_bound_is_kept_even_within_the_deadband() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300, 300)
    pod.tick()
    wish.ask(CAP, [0], 200, 299, NAN)
    pod.tick()
    assert values(pod.commands()) == {0: 299.0}


def level_twin(radius: int, wishes: list[Wish]) -> Twin:
    pod = Twin(eight_nodes(controls={LEVEL: {"blast_radius": radius}}), wishes, act=True)
    pod.tick({"node.service_level_state": 0.0}, JobStarted(job="elsewhere", nodes=()))
    return pod


def test_no_more_than_the_blast_radius_is_out_and_recovery_is_never_held_back() -> None:
    wish = Wish()
    pod = level_twin(3, [wish])
    wish.ask(LEVEL, range(8), 3, 3)
    for _ in range(5):
        pod.tick()
        assert int((np.nan_to_num(pod.lease(LEVEL)) > 0).sum()) == 3
        assert pod.decision.deferred == {LEVEL: 5}
    wish.ask(LEVEL, range(8), 0, 0)
    pod.tick()
    assert (pod.lease(LEVEL) == 0).all()
    assert pod.decision.deferred == {}


def test_what_is_out_already_needs_no_room_and_what_others_took_out_takes_none() -> None:
    wish = Wish()
    pod = level_twin(2, [wish])
    wish.ask(LEVEL, [0, 5, 6, 7], 3, 3)
    pod.tick({"node.service_level_state": [1, 1, 1, 1, 0, 0, 0, 0]})  # 0 to 3 were cordoned by somebody
    assert values(pod.commands()) == {0: 3.0, 5: 3.0, 6: 3.0}, "0 is out already; of the others two have room"
    assert pod.decision.deferred == {LEVEL: 1}
    pod.tick()
    assert pod.decision.deferred == {LEVEL: 1}, "what is ours by now takes room, 0 among it"


def test_the_strongest_goes_first() -> None:
    strong, weak = Wish("strong", 0), Wish("weak", 1)
    pod = level_twin(2, [strong, weak])
    weak.ask(LEVEL, range(4), 1, 1)
    strong.ask(LEVEL, [6, 7], 2, 2)
    pod.tick()
    assert values(pod.commands()) == {6: 2.0, 7: 2.0}


@pytest.mark.long
def test_what_we_took_out_takes_room_after_its_lease_until_it_is_back() -> None:
    wish = Wish()
    pod = level_twin(1, [wish])
    wish.ask(LEVEL, [4], 3, 3)
    pod.tick()
    wish.proposals = []
    lease_s = 300
    for _ in range(lease_s + 5):
        pod.tick({"node.service_level_state": [0, 0, 0, 0, 3, 0, 0, 0]})
    assert np.isnan(pod.lease(LEVEL)).all(), "or the test shows nothing"
    wish.ask(LEVEL, [5], 1, 1)
    pod.tick({"node.service_level_state": [0, 0, 0, 0, 3, 0, 0, 0]})
    assert pod.commands() == []
    pod.tick({"node.service_level_state": 0.0})
    assert values(pod.commands()) == {5: 1.0}


def test_no_more_than_the_blast_radius_is_given_back_at_once() -> None:
    """A policy that wrongly takes everything back must not raise a whole site in one tick."""
    pod, wish = twin(controls={CAP: {"blast_radius": 3}})
    wish.ask(CAP, range(8), 200, 320)
    reads = {"gpu.power_limit_w": 320.0}
    pod.tick(reads)
    pod.run(20, reads)
    assert np.isfinite(pod.lease(CAP)).all(), "protection is not held back"
    wish.proposals = []
    for left in (5, 2, 0):
        pod.tick(reads)
        assert np.isfinite(pod.lease(CAP)).sum() == left, "the others keep their lease until it is their turn"


def test_a_hold_freezes_but_lets_protection_through() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0, 1, 2], 200, 350, 300)
    pod.tick()
    pod.tick(None, Held(author="ann"))
    wish.ask(CAP, [0, 1, 3], [200, 200, 200], [350, 350, 350], [350, 250, 340])
    renewed = 0
    for _ in range(60):
        pod.tick()
        renewed += sum(len(c.index) for c in pod.decision.commands if c.renewal)
        assert pod.lease(CAP)[[0, 1, 2]].tolist() == [300.0, 250.0, 300.0], (
            "up waits, down passes, 2 is renewed"
        )
    assert renewed >= 9
    assert pod.lease(CAP)[3] == 340.0, "down from the 350 W that it reads"
    pod.tick(None, Resumed(author="ann"))
    assert pod.lease(CAP)[:2].tolist() == [350.0, 250.0]
    assert np.isnan(pod.lease(CAP)[2]), "nobody asks for 2 any more: given back"


@pytest.mark.parametrize(("wanted", "passes"), [(300.0, True), (350.0, False)])
def test_under_a_hold_what_was_never_heard_counts_as_standing_at_its_worst(
    wanted: float, passes: bool
) -> None:
    """The GPU may draw its 350 W: a cap below protects. A wish for all of them does not, and waits."""
    wish = Wish()
    pod = Twin(eight_nodes(), [wish], act=True)
    pod.tick(None, Held(author="ann"))
    wish.ask(CAP, [0], 200, wanted, wanted)
    pod.tick()
    assert values(pod.commands()) == ({0: wanted} if passes else {})


def test_a_hold_starts_no_drain() -> None:
    pod, wish = twin()
    pod.tick(None, Held(author="ann"))
    wish.ask(LEVEL, [0], 3, 3)
    pod.run(3)
    assert np.isnan(pod.lease(LEVEL)).all()


def test_a_release_lets_everything_lapse_and_says_nothing_more() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    pod.tick(None, Released(author="ann"))
    for _ in range(40):
        pod.tick()
        assert pod.decision.commands == (), "not even the unanswered command is sent again"
    assert np.isnan(pod.lease(CAP)).all()
    pod.tick(None, Resumed(author="ann"))
    assert values(pod.commands()) == {0: 300.0}


def test_a_lease_that_is_not_renewed_lapses_as_its_control_says() -> None:
    pod, wish = twin()
    wish.ask(CAP, [0], 200, 300)
    pod.tick()
    pod.engine.arbiter.mode = "released"
    lapsed = []
    for second in range(1, 40):
        pod.tick()
        lapsed += [(second, r["control"], r["index"].tolist(), r["becomes"]) for r in pod.records("lapsed")]
    assert lapsed == [(30, CAP, [0], "safe")]


def test_advice_is_never_a_command_and_is_said_once() -> None:
    pod, wish = twin(authority="advise")
    wish.ask(CAP, [0, 1], 200, 300)
    pod.tick()
    assert pod.decision.commands == ()
    assert values(list(pod.decision.advice)) == {0: 300.0, 1: 300.0}
    for _ in range(5):
        pod.tick()
        assert pod.decision.commands == ()
        assert pod.decision.advice == ()
    wish.ask(CAP, [0, 1], 200, [280, 300])
    pod.tick()
    assert values(list(pod.decision.advice)) == {0: 280.0}
    assert np.isnan(pod.lease(CAP)).all()


def test_approval_is_waited_for_and_is_for_the_named_ones_only() -> None:
    pod, wish = twin(authority="approve")
    wish.ask(CAP, [0, 1, 2], 200, 300)
    pod.run(2)
    assert np.isnan(pod.lease(CAP)).all()
    approved = Approved(id="a1", author="ann", policy="wish", control=CAP, names=("r1/node1/gpu0",),
                        expires_ns=pod.now_ns + 5_000_000_000)  # fmt: skip
    pod.tick(None, approved)
    assert np.flatnonzero(~np.isnan(pod.lease(CAP))).tolist() == [1]
    pod.tick(None, Approved(id="a2", author="ann", policy="wish", control=LEVEL))
    assert np.flatnonzero(~np.isnan(pod.lease(CAP))).tolist() == [1], "for another control"
    for _ in range(40):
        pod.tick()
        assert not [c for c in pod.decision.commands if (c.value > 300.0).any()]
    assert np.isnan(pod.lease(CAP)).all(), (
        "the approval ran out while the policy still asks: the lease lapses"
    )
    pod.tick(None, Approved(id="a3", author="ann", policy="wish", control=CAP))
    assert np.flatnonzero(~np.isnan(pod.lease(CAP))).tolist() == [0, 1, 2]


def test_a_policy_that_is_off_is_not_asked() -> None:
    class Loud(Wish):
        asked = 0

        def propose(self, view: Any, memory: Any) -> tuple[list[Any], Any]:
            self.asked += 1
            return super().propose(view, memory)

    loud = Loud()
    pod, _ = twin(loud, authority="off")
    pod.run(3)
    assert loud.asked == 0
    pod.tick(None, AuthorityChanged(author="ann", policy="wish", authority="act"))
    assert loud.asked == 1


def test_commands_carry_the_epoch_and_numbers_never_repeat() -> None:
    pod, wish = twin()
    seen: list[int] = []
    for epoch in (1, 2, 5):
        pod.tick(None, EpochChanged(epoch=epoch))
        wish.ask(CAP, [0, 1], 200, 300 - 20 * epoch)
        pod.tick()
        for c in pod.commands():
            assert c.epoch == epoch
            seen += c.command.tolist()
    assert seen == sorted(set(seen))
    assert len(seen) == 6
    pod.tick(None, EpochChanged(epoch=4))
    assert pod.engine.arbiter.epoch == 5
    assert "older" in pod.records("event")[0]["refused"]
