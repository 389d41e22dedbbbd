"""Rules of the arbiter one by one, on leases that the test sets: no engine, no ticks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of, two_racks
from twin.catalogue import I32, NS
from twin.contracts import CommandBatch, Proposal
from twin.control import Arbiter, Claim
from twin.control.arbiter import WHY_ADOPTED, Mode

CAP, LEVEL, PRESSURE = "gpu.power_cap_w", "node.service_level", "cdu.diff_pressure_target_pa"
T0 = 1_000 * NS
NAN = float("nan")
SAME = np.zeros(8, np.int32)


def rows(*index: int) -> I32:
    return np.array(index, np.int32)


def mask(*index: int) -> np.ndarray:
    out = np.zeros(8, np.bool_)
    out[list(index)] = True
    return out


def arbiter(controls: Any = None) -> Arbiter:
    """Eight GPUs of 200..350 W, safe 200 W, slew 50 W/s, deadband 5 W, a lease of 30 s."""
    return Arbiter(site_of(eight_nodes(controls=controls or {})))


def capped(*index: int, at_w: float = 300.0, controls: Any = None) -> Arbiter:
    """One with leases since T0 on these GPUs, which were found at 350 W."""
    out = arbiter(controls)
    out.take(CAP, rows(*index), np.full(len(index), at_w), "a test", T0, SAME)
    out.leases[CAP].found[list(index)] = 350.0
    return out


def claim(index: Any, lo: Any, hi: Any, want: Any, control: str = CAP) -> Claim:
    return Claim(0, "p", Proposal(control, index, lo, hi, want, "because"), None)


def wish(out: Arbiter, value: float, *index: int, key: str = CAP, read: Any = NAN) -> Any:
    """A settlement by which these entities get a value."""
    k = len(index)
    some = claim(rows(*index), np.full(k, 0.0), np.full(k, 1e7), np.full(k, value), key)
    return out.settle(key, [some], np.broadcast_to(np.float64(read), (out.leases[key].n,)).copy())


def said(batches: list[CommandBatch]) -> list[dict[int, float]]:
    return [dict(zip(c.index.tolist(), c.value.tolist(), strict=True)) for c in batches]


def test_who_waits_to_be_given_back_keeps_its_lease_and_the_longest_standing_goes_first() -> None:
    out = capped(0, 1, 2, 3, controls={CAP: {"blast_radius": 2}})
    lease, none = out.leases[CAP], mask()
    lease.changed_ns[:4] = [4 * NS, 2 * NS, NS, 3 * NS]
    renewal, final = out.withdraw(CAP, none, T0 + 16 * NS, 10.0)
    assert said([renewal, final]) == [{0: 300.0, 3: 300.0}, {1: 350.0, 2: 350.0}]
    assert (renewal.renewal, renewal.final, renewal.reason) == (True, False, "renewal")
    assert (final.renewal, final.final, final.policy) == (False, True, "arbiter")
    assert final.reason == "no longer needed: back to the earlier value"
    assert (lease.expires_ns[[0, 3]] == T0 + 46 * NS).all()
    assert lease.running()[:4].tolist() == [True, False, False, True]


@pytest.mark.parametrize(("age_s", "fresh"), [(14, False), (16, True)])
def test_who_waits_is_renewed_when_it_is_due_and_no_term_commands_it_anyway(age_s: int, fresh: bool) -> None:
    out = capped(0, 1, controls={CAP: {"blast_radius": 1}})
    out.fresh_term = fresh
    (batch,) = out.withdraw(CAP, mask(), T0 + age_s * NS, 10.0)
    assert batch.final
    assert (out.leases[CAP].expires_ns[1]) == T0 + 30 * NS


def test_who_is_given_back_goes_there_by_the_slew_limit_and_not_where_it_is_wanted() -> None:
    out = capped(0, 1, 2, at_w=250.0)
    out.leases[CAP].found[2] = NAN
    (batch,) = out.withdraw(CAP, mask(1), T0 + NS, 1.0)
    assert said([batch]) == [{0: 300.0}]
    assert (batch.reason, batch.final) == ("no longer needed: on the way back", False)
    assert out.leases[CAP].found[0] == 350.0
    modes: tuple[Mode, ...] = ("held", "released")
    for mode in modes:
        out.mode = mode
        assert out.withdraw(CAP, mask(), T0 + NS, 1.0) == []


def test_who_was_set_lower_by_others_is_given_back_from_there() -> None:
    out = capped(0, 1)
    lease, read = out.leases[CAP], np.array([240.0, 300.0, *[350.0] * 6])
    lease.seen[:], lease.differs_ns[0] = True, T0 + NS
    late, early = T0 + 11 * NS, T0 + 11 * NS - 1
    assert [m.tolist() for m in lease.others(rows(0, 1), read, np.full(8, 200.0), 5.0, late)] == [
        [True, False], [False, False],
    ]  # fmt: skip
    assert [m.tolist() for m in lease.others(rows(0, 1), read, np.full(8, 200.0), 5.0, early)] == [
        [False, False], [True, False],
    ]  # fmt: skip
    for lapse_w, mine in ((235.0, True), (234.9, False)):  # what a lapse led to is nobody else's
        taken, _ = lease.others(rows(0), read, np.full(8, lapse_w), 5.0, late)
        assert taken.tolist() == [not mine]
    assert said(out.withdraw(CAP, mask(1), late, 10.0, read)) == [{0: 240.0}]


def test_commands_without_an_answer_are_sent_again_but_not_under_a_release_nor_where_people_work() -> None:
    out = capped(0, 1)
    due = T0 + 10 * NS
    assert out.resend(CAP, due - 1)[0] is None
    out.mode = "released"
    batch, lost = out.resend(CAP, due)
    assert batch is None
    assert lost.tolist() == []
    out.mode = "held"
    assert out.resend(CAP, due, mask(0, 1))[0] is None
    batch, lost = out.resend(CAP, due, mask(1))
    assert batch is not None
    assert (batch.index.tolist(), batch.command.tolist(), batch.renewal) == ([0], [1], True)
    assert batch.reason == "no answer before the deadline"
    out.leases[CAP].attempts[0] = 3
    batch, lost = out.resend(CAP, due + 10 * NS, mask(1))
    assert batch is None
    assert lost.tolist() == [0], "given up"
    batch, lost = out.resend(CAP, due + 10 * NS)
    assert batch is not None
    assert (batch.index.tolist(), lost.tolist()) == ([1], [])


def test_bounds_and_wishes_of_whole_numbers_count_as_any() -> None:
    whole = [np.array([v, v]) for v in (210, 290, 250)]
    exact = [v.astype(np.float64) for v in whole]
    for unusual in (whole, [v[::-1] for v in exact], [np.repeat(v, 2)[::2] for v in exact]):
        done = arbiter().settle(CAP, [claim(np.array([1, 5], np.int64), *unusual)], np.full(8, NAN))
        assert done.value[[1, 5]].tolist() == [250.0, 250.0]
        assert (done.lo[1], done.hi[1], done.by.tolist()) == (210, 290, [-1, 0, -1, -1, -1, 0, -1, -1])


def test_what_stands_above_its_envelope_is_at_the_edge_at_once_where_a_lower_value_does_not_protect() -> None:
    limits = {"min": 60_000.0, "max": 200_000.0, "safe": 150_000.0}
    out = Arbiter(site_of(two_racks(controls={PRESSURE: limits})))
    for read, expected in ((400_000.0, 199_000.0), (190_000.0, 189_000.0), (NAN, 149_000.0)):
        done = wish(out, 70_000.0, 0, key=PRESSURE, read=read)
        out.limit(done, np.array([read]), 10.0)
        assert done.value.tolist() == [expected], "100 Pa/s"
    up = wish(out, 200_000.0, 0, key=PRESSURE, read=10_000.0)
    out.limit(up, np.array([10_000.0]), 10.0)
    assert up.value.tolist() == [200_000.0], "more protects: at once"


def test_under_a_hold_a_narrower_envelope_applies_where_it_protects_and_nobody_works() -> None:
    out = capped(0, 1)
    out.take(CAP, rows(2), np.array([240.0]), "a test", T0, SAME)
    out.site = site_of(eight_nodes(controls={CAP: {"min": 245.0, "max": 250.0, "safe": 250.0}}))
    assert out.confine(CAP, T0 + NS) == []
    out.mode = "held"
    (batch,) = out.confine(CAP, T0 + NS, mask(1))
    assert said([batch]) == [{0: 250.0}]
    assert batch.reason == "the envelope is narrower now"
    assert said(out.confine(CAP, T0 + NS)) == [{1: 250.0}]
    assert out.confine(CAP, T0 + NS) == []


def test_a_new_leader_adopts_what_is_read_back_inside_the_envelope_and_is_not_free() -> None:
    out = capped(7)
    read = np.array([350.0, 300.0, 345.0, NAN, 199.0, 351.0, 344.0, 300.0])
    known = ~np.isnan(read)
    assert out.adopt(CAP, read, known, SAME, T0) == [], "nothing settles"
    out.begin_term(1, False, T0)
    assert (out.fresh_term, out.settling, out.leases[CAP].value[7]) == (False, {}, 300.0)
    out.begin_term(4, True, T0)
    assert (out.fresh_term, out.epoch) == (True, 4)
    assert not out.leases[CAP].running().any(), "another daemon has led since"
    assert out.settling[CAP] == T0 + 30 * NS
    assert "cdu.supply_temp_target_c" not in out.settling, "nobody has any"
    out.mode = "released"
    assert out.adopt(CAP, read, known, SAME, T0) == []
    out.mode = "normal"
    assert out.mode_of(CAP) == "held"
    out.take(CAP, rows(7), np.array([290.0]), "a test", T0, SAME)
    (batch,) = out.adopt(CAP, read, known & ~mask(1), SAME, T0)
    assert (said([batch]), batch.reason, batch.epoch) == ([{6: 344.0}], WHY_ADOPTED, 4)
    assert said(out.adopt(CAP, read, known, SAME, T0)) == [{1: 300.0}]
    assert out.adopt(LEVEL, np.ones(8), known, SAME, T0) == [], "levels keep"


def test_a_control_settles_for_one_lease_of_its_own() -> None:
    out = arbiter()
    out.begin_term(2, True, T0)
    short = out.end_settling(T0 + 30 * NS)
    assert CAP in short
    assert short == sorted(short)
    assert LEVEL not in short
    assert out.mode_of(CAP) == "normal"
    assert out.mode_of(LEVEL) == "held"
    assert LEVEL not in out.end_settling(T0 + 300 * NS - 1)
    assert LEVEL in out.end_settling(T0 + 300 * NS)


def test_a_higher_epoch_commands_anew_what_ran_before_it() -> None:
    out = capped(0, 1, 2, 3)
    assert out.renew_term(CAP, T0 + NS) == []
    out.begin_term(2, False, T0 + NS)
    lease = out.leases[CAP]
    lease.issued_ns[1], lease.doubted_ns[2] = T0 + NS, T0
    (batch,) = out.renew_term(CAP, T0 + NS, mask(3))
    assert (said([batch]), batch.epoch, batch.command.tolist()) == ([{0: 300.0}], 2, [5])
    assert batch.reason == "as before, under epoch 2"
    out.fresh_term = False
    assert said(out.renew_term(CAP, T0 + 2 * NS, late=mask(3, 5))) == [{3: 300.0}]
    out.mode = "released"
    assert out.renew_term(CAP, T0 + 3 * NS, late=mask(0)) == []


def test_what_the_leader_before_took_out_counts_while_the_control_settles() -> None:
    out = arbiter()
    read, lapsed = np.array([3.0, 0.0, NAN, 1.0, 2.0, 3.0, 3.0, 0.0]), out.leases[LEVEL].lapsed
    out.inherit_outages(LEVEL, read, mask(0, 1, 2, 3))
    assert np.isnan(lapsed).all()
    out.begin_term(2, True, T0)
    lapsed[3] = 4.0
    out.leases[LEVEL].value[4] = 3.0
    out.inherit_outages(LEVEL, read, mask(0, 1, 2, 3, 4))
    assert np.array_equal(lapsed, [3, NAN, NAN, 4, NAN, NAN, NAN, NAN], equal_nan=True)


@pytest.mark.parametrize(("level", "known", "deferred"), [(3.0, False, 2), (3.0, True, 2), (0.0, True, 1)])
def test_what_is_out_by_us_takes_room_until_it_is_heard_to_be_back(
    level: float, known: bool, deferred: int
) -> None:
    out = arbiter({LEVEL: {"blast_radius": 2}})
    lease, read = out.leases[LEVEL], np.zeros(8)
    lease.value[0], lease.lapsed[1], read[1], read[7] = 3.0, 3.0, level, 3.0  # 7 is out by others
    done = wish(out, 3.0, 0, 2, 3, key=LEVEL)
    assert out.limit(done, read, 1.0, ~mask(1) if not known else None) == deferred
    assert np.flatnonzero(done.value == 3.0).tolist() == [0, 2][: 3 - deferred]


def test_a_renewal_is_for_what_is_wanted_or_held_and_for_nothing_in_doubt() -> None:
    due = T0 + 16 * NS
    for mode, fresh, renewed in (
        ("normal", False, [0]), ("held", False, [0, 1]), ("normal", True, []), ("released", False, []),
    ):  # fmt: skip
        out = capped(0, 1, 2, 3)
        out.mode, out.fresh_term = mode, fresh  # type: ignore[assignment]
        out.leases[CAP].doubted_ns[2] = T0
        done = wish(out, 300.0, 0, 2, 3)
        batches = out.command(done, np.full(8, NAN), SAME, due, mask(3))
        assert [i for b in batches for i in b.index.tolist()] == renewed
        assert all(b.renewal and b.reason == "renewal" for b in batches)
        assert (out.leases[CAP].expires_ns[renewed] == due + 30 * NS).all()


def test_in_doubt_another_policy_is_heard_and_the_owner_is_not() -> None:
    out = arbiter()
    for policy, expected in ((0, [{0: 1.0}]), (1, [{0: 1.0, 1: 1.0}])):
        lease = out.leases[LEVEL]
        lease.value[1], lease.owner[1], lease.doubted_ns[1] = 3.0, 0, T0
        done = wish(out, 1.0, 0, 1, key=LEVEL)
        done.claims[0] = Claim(policy, "p", done.claims[0].proposal, None)
        assert said(out.command(done, np.zeros(8), SAME, T0 + NS)) == expected
        lease.end(rows(0, 1))


def test_of_what_lapsed_or_another_led_nobody_is_the_owner() -> None:
    bare, out = arbiter().leases[CAP], capped(0, 1)
    lease = out.leases[CAP]
    lease.differs_ns[:], lease.attempts[:] = T0, 3
    assert lease.lapse(T0 + 30 * NS, mask(1)).tolist() == [0, 1]
    assert lease.owner.tolist() == bare.owner.tolist()
    assert (lease.lapsed[:2].tolist(), lease.differs_ns[:3].tolist()) == ([300.0, 300.0], [0, 0, T0])
    assert np.array_equal(lease.found[:2], [350.0, NAN], equal_nan=True), "what its owner left is not owed"
    out.take(CAP, rows(4), np.array([300.0]), "a test", T0, SAME)
    lease.given[5] = 300.0
    lease.disown()
    for name in (
        "value", "found", "lapsed", "given", "state", "owner", "attempts", "expires_ns", "differs_ns",
        "doubted_ns",
    ):  # fmt: skip
        assert np.array_equal(getattr(lease, name), getattr(bare, name), equal_nan=True), name


def test_a_changed_site_keeps_the_count_the_term_and_the_leases() -> None:
    out = capped(2)
    out.begin_term(6, False, T0)
    out.mode, out.settling = "held", {CAP: T0, "cdu.supply_temp_target_c": T0}
    moved = out.remapped(site_of(eight_nodes()), {"gpu": rows(*range(7, -1, -1))})
    assert (moved.next_command, moved.epoch, moved.mode) == (2, 6, "held")
    assert moved.settling == {CAP: T0}
    assert moved.fresh_term
    assert moved.leases[CAP].running().tolist() == mask(5).tolist()
