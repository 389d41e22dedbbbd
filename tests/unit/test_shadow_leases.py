"""Shadow leases row by row: what is handed over, what counts as carried out, what a restart must know."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of
from twin.catalogue import NS, Control, digest, find_control
from twin.control import ACK_STATES, Arbiter, Leases, Setpoints
from twin.control.arbiter import Settlement
from twin.control.shadow import ShadowLeases

CAP = "gpu.power_cap_w"
T0 = 1_000 * NS
NAN = float("nan")


def control() -> Control:
    found = find_control(CAP)
    assert found is not None
    return found


def real(values: list[float]) -> Leases:
    """Leases that run with these values; none where the value is NaN."""
    out = Leases(control(), len(values))
    out.value[:] = values
    return out


def mask(*rows: int) -> np.ndarray:
    return np.array(rows, np.bool_)


def test_what_was_advised_and_is_claimed_now_is_handed_over_once_it_runs() -> None:
    shadow, leases = ShadowLeases(control(), 5), real([500.0, 500.0, 500.0, NAN, 500.0])
    shadow.apart[:] = mask(1, 1, 1, 1, 0)
    advised = mask(0, 0, 1, 0, 0)
    shadow.part(leases, advised, mask(1, 0, 1, 1, 1), np.zeros(5, np.int64), T0)
    assert shadow.handed_ns.tolist() == [T0, 0, 0, 0, 0]
    assert shadow.apart.tolist() == advised.tolist()
    shadow.part(leases, mask(1, 0, 0, 0, 0), mask(0, 0, 0, 0, 0), np.zeros(5, np.int64), T0 + NS)
    assert shadow.handed_ns.tolist() == [0] * 5, "advised anew: the shadow goes its own way again"


@pytest.mark.parametrize(
    "passed_s,heard_s,ends",
    [(9.9, 9.9, False), (10, 5, True), (10, 4.9, False), (149.9, 4.9, False), (150, 0, True)],
)
def test_a_handover_ends_when_the_device_was_heard_or_missed_once(
    passed_s: float, heard_s: float, ends: bool
) -> None:
    shadow, none = ShadowLeases(control(), 3), mask(0, 0, 0)
    shadow.handed_ns[1] = T0
    heard_ns = np.full(3, T0 + round(heard_s * NS), np.int64)
    shadow.part(real([NAN, 500.0, NAN]), none, none, heard_ns, T0 + round(passed_s * NS))
    assert shadow.handed_ns.tolist() == [0, 0 if ends else T0, 0]


def test_the_shadow_speaks_where_it_is_apart_and_the_handed_over_command_where_it_is_not() -> None:
    shadow, leases = ShadowLeases(control(), 4), real([10.0, 20.0, 30.0, 40.0])
    shadow.value[:], shadow.owner[:] = [1.0, 2.0, 3.0, 40.0], [4, 5, 4, 4]
    shadow.apart[:], shadow.handed_ns[2] = mask(1, 1, 0, 1), T0
    assert shadow.value_beside(leases).tolist() == [1, 2, 30, 40]
    assert shadow.value_beside(leases, [4]).tolist() == [1, 20, 30, 40]
    assert np.array_equal(shadow.obeyed(leases), [1, 2, 30, NAN], equal_nan=True)
    assert np.array_equal(shadow.obeyed(leases, [4]), [1, NAN, 30, NAN], equal_nan=True)
    assert shadow.metered(T0 + 10 * NS).tolist() == [False, False, True, False]
    assert not shadow.metered(T0 + 10 * NS - 1).any()


def advising() -> Arbiter:
    """An arbiter in a fresh term whose shadow of the fourth GPU is on a way of its own."""
    out = Arbiter(site_of(eight_nodes()))
    out.fresh_term = True
    shadow = out.shadow_of(CAP, True)
    assert shadow is not None
    shadow.value[3], shadow.apart[3] = 300.0, True
    return out


def test_a_restart_keeps_the_shadow_and_a_snapshot_of_a_version_before_has_none() -> None:
    arbiter, again = advising(), Arbiter(site_of(eight_nodes()))
    data = arbiter.dump()
    again.restore(data)
    assert digest(again.dump()) == digest(data)
    assert again.shadow[CAP].value[3] == 300
    del data["shadow"]
    again.restore(data)
    assert again.shadow == {}


def test_another_site_keeps_the_shadow_in_its_new_rows() -> None:
    moved = advising().remapped(site_of(eight_nodes()), {"gpu": np.arange(8, dtype=np.int32)[::-1]})
    assert moved.fresh_term
    assert moved.shadow[CAP].apart.tolist() == [False] * 4 + [True] + [False] * 3
    assert moved.shadow[CAP].value[4] == 300


def test_a_move_protects_from_where_the_device_stands_and_from_the_worst_where_nobody_knows() -> None:
    arbiter = Arbiter(site_of(eight_nodes()))
    arbiter.leases[CAP].value[:2] = 300.0
    edge = arbiter.site.envelopes[CAP]
    value = np.array([290.0, 310.0, 340.0, 340.0, 350.0, NAN, 250.0, 250.0])
    read = np.array([200.0, 350.0, NAN, 330.0, NAN, 330.0, 251.0, 250.0])
    done = Settlement(control(), edge.low, edge.high, value, np.zeros(8, np.int32), [])
    expected = [True, False, True, False, False, False, True, False]
    assert arbiter.protects(done, read).tolist() == expected


def test_what_people_set_by_hand_is_no_longer_owed() -> None:
    leases = real([NAN, NAN, NAN, NAN, 400.0])
    for column in (leases.found, leases.lapsed, leases.given):
        column[:] = 1000.0
    index = np.array([0, 1, 2, 4], np.int32)
    read = np.array([600.0, 201.0, NAN, 600.0, 600.0])
    leases.left_to_others(index, read, np.full(5, 200.0), 1.0)
    for column in (leases.found, leases.lapsed, leases.given):
        assert np.isnan(column).tolist() == [True, False, False, False, False]


def test_the_last_command_of_a_lease_is_answered_after_its_end_be_it_the_first_of_all() -> None:
    leases, row = Leases(control(), 3), np.array([1], np.int32)
    leases.grant(Setpoints(row, np.array([500.0]), row, row), 1, T0, np.full(3, 900.0))
    leases.give_back(row, T0 + NS)
    assert leases.ack(1, 1, 1, "done")
    done = np.array([ACK_STATES.index("done")], np.uint8)
    assert leases.ack_all(row, row.astype(np.int64), row.astype(np.int64), done).tolist() == [True]
    assert not leases.ack(0, 0, 0, "done"), "nothing was ever commanded here"
