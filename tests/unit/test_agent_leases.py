"""The agent's leases: what is carried out, what is refused and why, and that nothing outlives its lease."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from racktwin_agent.clock import NS, Deadline, Instant
from racktwin_agent.devices import GPU_CAP, GPU_LOCK, Key
from racktwin_agent.leases import LeaseBook
from racktwin_agent.settings import Settings
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.wire import Order, Request

T0 = Instant(1_767_225_600 * NS, 5_000 * NS)
CAP = Key(GPU_CAP, "gpu0")


def at(seconds: float, wall_step_s: float = 0.0) -> Instant:
    """So much later; the wall clock stepped by as much."""
    return Instant(T0.wall_ns + round((seconds + wall_step_s) * NS), T0.boot_ns + round(seconds * NS))


def request(epoch: int = 3, issued_s: float = 0.0, span_s: float = 30.0, **more: Any) -> Request:
    issued = T0.wall_ns + round(issued_s * NS)
    plain = Request(
        GPU_CAP, "thermal_guard", epoch, issued, issued + round(span_s * NS), False, False, "why", {}
    )
    return replace(plain, **more)


def order(command: int, value: float, lapse: float | None = 600.0, name: str = "gpu0") -> Order:
    return Order(name, 0, command, value, lapse)


def full(durable: bool) -> None:
    """A store that has no room."""
    raise OSError(28, "No space left on device")


class Bench:
    """A lease book on simulated devices of 200..1200 W."""

    def __init__(self) -> None:
        self.devices = SimulatedDevices(2)
        self.saved: list[bool] = []
        self.book = LeaseBook(Settings(self.devices), self.saved.append)

    def take(self, seconds: float, wanted: Request, *orders: Order) -> list[tuple[str, str]]:
        return [(a.state, a.detail) for a in self.book.take(wanted, list(orders), at(seconds))]

    def cap(self, name: str = "gpu0") -> float | None:
        return self.devices.get(Key(GPU_CAP, name))


def test_a_lock_of_clocks_is_a_lease_like_any_other() -> None:
    bench, lock = Bench(), Key(GPU_LOCK, "gpu0")
    assert bench.take(0, request(control=GPU_LOCK), order(17, 345.0, 1980.0)) == [("done", "")]
    assert (bench.devices.get(lock), bench.cap()) == (345.0, 1200)
    assert len(bench.book.lapse(at(30))) == 1
    assert bench.devices.get(lock) == 1980.0


def test_a_command_is_stored_and_carried_out_and_lapses_when_nobody_renews_it() -> None:
    bench = Bench()
    assert bench.take(0, request(), order(17, 500)) == [("done", "")]
    assert bench.saved == [True]
    assert (bench.cap(), bench.cap("gpu1")) == (500, 1200)
    assert bench.book.next_end_ns() == at(30).boot_ns
    assert bench.book.lapse(at(29.9)) == []
    assert bench.cap() == 500
    (said,) = bench.book.lapse(at(30))
    assert "gpu0" in said
    assert "3-17" in said
    assert bench.cap() == 600
    assert bench.book.lapse(at(31)) == []
    assert bench.book.next_end_ns() is None


def test_a_renewal_prolongs_and_an_unknown_one_is_a_command() -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    assert bench.take(15, request(issued_s=15, renewal=True), order(17, 500)) == [("done", "")]
    assert bench.book.lapse(at(44.9)) == []
    bench.book.lapse(at(45))
    assert bench.cap() == 600
    assert bench.take(50, request(issued_s=50, renewal=True), order(17, 450)) == [("done", "")]
    assert bench.cap() == 450
    assert bench.take(51, request(issued_s=51, renewal=True), order(99, 470, name="gpu1")) == [("done", "")]
    assert bench.cap("gpu1") == 470
    counts = {"applied": 2, "renewed": 2, "repeated": 0, "refused": 0, "lapsed": 1}
    assert bench.book.counts == counts


def test_null_keeps_and_final_ends_without_a_lapse() -> None:
    bench = Bench()
    bench.take(0, request(), order(1, 500, None))
    bench.take(0, request(), order(2, 500, name="gpu1"))
    bench.take(1, request(issued_s=1, final=True), order(3, 1000, name="gpu1"))
    bench.book.lapse(at(100))
    assert (bench.cap(), bench.cap("gpu1")) == (500, 1000)


@pytest.mark.parametrize(
    "seconds,wanted,line,why",
    [
        (30, request(), order(1, 500), "expired 0.0 s ago"),
        (0, request(span_s=0), order(1, 500), "a lease of 0 s"),
        (0, request(span_s=-5), order(1, 500), "a lease of -5 s"),
        (0, request(span_s=3601), order(1, 500), "a lease of 3601 s"),
        (0, request(), order(1, 199.9), "199.9 is outside 200..1200"),
        (0, request(), order(1, 1200.1), "is outside 200..1200"),
        (0, request(), order(1, 500, 150), "its lapse to 150 is outside 200..1200"),
        (0, request(), order(1, 500, name="gpu2"), "no gpu.power_cap_w of gpu2 here"),
        (0, request(), order(1, 500, name="gpu-1"), "no gpu.power_cap_w of gpu-1 here"),
        (0, request(), order(1, 500, name=""), "no gpu.power_cap_w of this node here"),
        (0, request(control="node.service_level"), order(1, 1), "no node.service_level of gpu0 here"),
    ],
)
def test_refusals_say_why_and_change_nothing(seconds: float, wanted: Request, line: Order, why: str) -> None:
    bench = Bench()
    ((state, detail),) = bench.take(seconds, wanted, line)
    assert state == "failed"
    assert why in detail
    assert (bench.cap(), bench.cap("gpu1")) == (1200, 1200)
    assert bench.book.leases == {}
    assert bench.book.counts["refused"] == 1


def test_one_refused_order_does_not_stop_the_others() -> None:
    bench = Bench()
    answers = bench.book.take(request(), [order(1, 5000), order(2, 400, name="gpu1")], T0)
    assert {a.name: a.state for a in answers} == {"gpu0": "failed", "gpu1": "done"}
    assert (bench.cap(), bench.cap("gpu1")) == (1200, 400)


def test_a_deposed_daemon_is_refused_also_for_devices_it_never_commanded() -> None:
    bench = Bench()
    bench.take(0, request(epoch=5), order(1, 500))
    ((state, detail),) = bench.take(1, request(epoch=4, issued_s=1), order(900, 300, name="gpu1"))
    assert (state, detail) == ("failed", "epoch 4 is older than 5: another daemon leads")
    assert bench.cap("gpu1") == 1200
    # an order that is refused shows the epoch all the same, and a new leader counts from where it likes
    bench.take(2, request(epoch=6, issued_s=2), order(1, 9999))
    assert bench.book.epoch == 6
    assert bench.take(3, request(epoch=6, issued_s=3), order(0, 450)) == [("done", "")]


def test_repeats_and_stragglers() -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    assert bench.take(1, request(), order(17, 500)) == [("done", "already known")]
    assert bench.take(10, request(issued_s=10), order(18, 700)) == [("done", "")]
    assert bench.take(11, request(issued_s=5), order(17, 500)) == [("failed", "superseded by command 18")]
    assert bench.cap() == 700
    bench.take(20, request(issued_s=20, renewal=True), order(18, 700))
    # a renewal that comes late neither shortens nor prolongs
    assert bench.take(21, request(issued_s=15, renewal=True), order(18, 700)) == [("done", "already known")]
    assert bench.book.lapse(at(49.9)) == []
    assert len(bench.book.lapse(at(50))) == 1
    # a daemon that lost its count with its disk: an old number, issued later
    assert bench.take(60, request(issued_s=60), order(3, 650)) == [("done", "")]


def test_a_repeat_of_what_a_renewal_changed_or_a_device_refused_is_not_done() -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    bench.take(10, request(issued_s=10, renewal=True), order(17, 450))
    assert bench.take(11, request(), order(17, 500)) == [("failed", "superseded by a renewal")]
    assert bench.cap() == 450
    bench.devices.refuses = True
    bench.take(12, request(issued_s=12), order(18, 400, name="gpu1"))
    again = bench.take(13, request(issued_s=12), order(18, 400, name="gpu1"))
    assert again == [("accepted", "already known")]


def test_each_answer_names_its_order_and_its_command() -> None:
    bench = Bench()

    def answer(seconds: float, command: int, value: float, **more: Any) -> tuple[str, str]:
        wanted = request(**{"issued_s": seconds, **more})
        (a,) = bench.book.take(wanted, [Order("gpu1", 4, command, value, 600.0)], at(seconds))
        assert (a.name, a.generation, a.command) == ("gpu1", 4, command)
        return a.state, a.detail

    assert answer(0, 17, 500) == ("done", "")
    assert answer(1, 17, 500, issued_s=0) == ("done", "already known")
    assert answer(2, 18, 5000)[0] == "failed"
    bench.devices.refuses = True
    assert answer(3, 19, 400) == ("failed", "gpu1 refuses")
    bench.devices.refuses = False
    bench.book.settings.lower({Key(GPU_CAP, "gpu1"): 300.0})
    assert answer(4, 20, 700) == ("accepted", "held at 300 by a contingency cap until its trigger is gone")
    bench.book.save = full
    assert answer(5, 21, 450)[0] == "failed"
    assert answer(6, 22, 450, epoch=2)[0] == "failed"


@pytest.mark.parametrize("step_s", [-86_400.0, -20.0, 20.0, 86_400.0])
def test_a_wall_clock_that_steps_neither_ends_nor_prolongs_a_lease(step_s: float) -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    assert bench.book.lapse(at(29.9, step_s)) == []
    assert len(bench.book.lapse(at(30, step_s))) == 1


def test_a_clock_that_is_behind_grants_no_more_than_the_stated_span() -> None:
    bench = Bench()
    bench.book.take(request(issued_s=500), [order(17, 500)], at(0))  # issued in our future
    assert bench.book.lapse(at(29.9)) == []
    assert len(bench.book.lapse(at(30))) == 1


def test_what_cannot_be_stored_is_not_carried_out() -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    bench.book.save = full
    ((state, detail),) = bench.take(1, request(issued_s=1), order(18, 300))
    assert (state, detail) == ("failed", "the lease cannot be stored: No space left on device")
    assert bench.cap() == 500
    # a renewal may go on: the stored lease ends earlier, which is safe
    assert bench.take(2, request(issued_s=2, renewal=True), order(17, 500)) == [("done", "")]
    bench.book.lapse(at(32))
    assert bench.cap() == 600


def test_a_device_that_refuses_is_reported_and_its_lapse_is_tried_until_it_works() -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    bench.devices.refuses = True
    ((state, detail),) = bench.take(1, request(issued_s=1), order(18, 400))
    assert (state, detail) == ("failed", "gpu0 refuses")
    assert "the lapse failed" in bench.book.lapse(at(40))[0]
    assert "the lapse failed" in bench.book.lapse(at(41))[0]
    bench.devices.refuses = False
    assert len(bench.book.lapse(at(42))) == 1
    assert bench.cap() == 600


def restarted(bench: Bench, moment: Instant, same_boot: bool) -> LeaseBook:
    data = json.loads(json.dumps(bench.book.dump()))
    book = LeaseBook(Settings(bench.devices))
    book.restore(data, moment, same_boot)
    return book


@pytest.mark.parametrize("step_s", [-86_400.0, 0.0, 86_400.0])
def test_a_restart_carries_out_the_lapse_by_the_clock_since_boot(step_s: float) -> None:
    bench = Bench()
    bench.take(0, request(epoch=9), order(17, 500))
    book = restarted(bench, at(10, step_s), True)
    assert (book.epoch, book.leases) == (9, bench.book.leases)
    assert book.lapse(at(29.9, step_s)) == []
    assert len(book.lapse(at(30, step_s))) == 1
    assert bench.cap() == 600


@pytest.mark.parametrize(
    "off_s,step_s,ends_s", [(10, 0, 20), (100, 0, 0), (10, -10_000, 30), (10, 10_000, 0)]
)
def test_after_a_reboot_the_wall_clock_decides_within_the_span(
    off_s: float, step_s: float, ends_s: float
) -> None:
    bench = Bench()
    bench.take(0, request(), order(17, 500))
    boot = Instant(T0.wall_ns + round((off_s + step_s) * NS), 7 * NS)
    book = restarted(bench, boot, False)
    assert book.leases[CAP].until.boot_ns == 7 * NS + round(ends_s * NS)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"epoch": 1},
        {"epoch": "x", "leases": []},
        {"epoch": 1, "leases": 5},
        {"epoch": 1, "leases": [["c", "n", {}]]},
        {"epoch": 1, "leases": [["c", "n", {"until": [1, 2]}]]},
    ],
)
def test_a_stored_book_that_is_none_is_refused(data: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        LeaseBook(Settings(SimulatedDevices(1))).restore(data, T0, True)


def test_a_deadline_is_the_earlier_of_both() -> None:
    assert Deadline.after(5, 10, T0).boot_ns == T0.boot_ns + 5
    assert Deadline.after(15, 10, T0).boot_ns == T0.boot_ns + 10


MOVES = st.lists(
    st.tuples(
        st.floats(0, 20),  # seconds that pass
        st.floats(-100, 100),  # the wall clock is off by
        st.integers(0, 4),  # epoch
        st.integers(0, 6),  # command
        st.floats(-40, 40),  # issued so long before or after
        st.floats(-5, 60),  # span
        st.sampled_from([100.0, 200.0, 350.5, 700.0, 1200.0, 1300.0]),
        st.sampled_from([None, 200.0, 600.0, 2000.0]),
        st.sampled_from(["gpu0", "gpu1", "gpu2", ""]),
        st.booleans(),  # final
        st.sampled_from(["", "restart", "device refuses"]),
    ),
    max_size=25,
)


@given(MOVES)
def test_no_command_outlives_its_lease_and_epochs_only_grow(moves: list[Any]) -> None:
    bench, passed = Bench(), 0.0
    book = bench.book
    allowed: dict[str, list[tuple[float, float]]] = {"gpu0": [], "gpu1": []}  # value, until (seconds)
    kept: dict[str, set[float]] = {"gpu0": {1200.0}, "gpu1": {1200.0}}
    for wait, step, epoch, command, issued, span, value, lapse, name, final, odd in moves:
        passed += wait
        moment = at(passed, step)
        bench.devices.refuses = odd == "device refuses"
        if odd == "restart":
            fresh = LeaseBook(Settings(bench.devices))
            fresh.restore(json.loads(json.dumps(book.dump())), moment, True)
            book = fresh
        before = book.epoch
        book.lapse(moment)
        wanted = request(epoch, passed + issued, span, final=final)
        (answer,) = book.take(wanted, [order(command, value, lapse, name)], moment)
        assert book.epoch >= before
        if epoch < before or value in (100.0, 1300.0) or name in ("gpu2", "") or span <= 0:
            assert answer.state == "failed"
        if "refuses" in answer.detail and lapse is not None:
            kept[name].add(lapse)  # a lease all the same: what it superseded must still come to an end
        if answer.state == "done" and name in allowed:
            allowed[name].append((value, passed + span))
            if final or lapse is None:
                kept[name].add(value)
            if lapse is not None:
                kept[name].add(lapse)
            # the same again changes nothing
            (again,) = book.take(wanted, [order(command, value, lapse, name)], moment)
            assert again.state in ("done", "accepted")
            assert bench.cap(name) == value or again.state == "accepted"
        bench.devices.refuses = False
        book.lapse(moment)
        for gpu, values in allowed.items():
            held = bench.cap(gpu)
            live = {v for v, until in values if passed < until + 1e-6}
            assert held in live | kept[gpu], (gpu, held, live, kept[gpu])
    book.lapse(at(passed + 3600))
    for gpu, values in kept.items():
        assert bench.cap(gpu) in values


LEASE_S, RENEWED_S = 30.0, 15.0  # of a cap
OF_NODE = {
    "right": lambda t: 0.0,
    "10 s ahead": lambda t: 10.0,
    "25 s ahead": lambda t: 25.0,
    "1 h ahead": lambda t: 3600.0,
    "1 h behind": lambda t: -3600.0,
    "set forward by 1 h": lambda t: 3600.0 * (t > 100.0),
    "set back by 1 h": lambda t: -3600.0 * (t > 100.0),
    "fast by 5 %": lambda t: 0.05 * t,
    "slow by 5 %": lambda t: -0.05 * t,
    "stands": lambda t: -t,
    "repeats a second": lambda t: -1.0 * (t > 100.0),
}
OF_DAEMON = {
    "right": lambda t: 0.0,
    "1 h ahead": lambda t: 3600.0,
    "1 h behind": lambda t: -3600.0,
    "set forward by 1 h": lambda t: 3600.0 * (t > 90.0),
    "waits for a clock that was set back": lambda t: -0.05 * t,
}


@pytest.mark.parametrize("of_daemon", OF_DAEMON)
@pytest.mark.parametrize("of_node", OF_NODE)
def test_a_lease_that_is_renewed_stands_whatever_the_clocks_show_and_ends_in_time(
    of_node: str, of_daemon: str
) -> None:
    """At most the first message of a daemon is refused, and its lease cut short."""
    bench, rng = Bench(), random.Random(3)
    capped: list[tuple[float, bool]] = []
    last_s = 0.0
    for tenth in range(6000):
        t = tenth / 10
        if tenth % round(10 * RENEWED_S) == 0 and t < 400.0:
            came_s = t + rng.uniform(0.0, 1.0)
            sent = request(issued_s=t + OF_DAEMON[of_daemon](t), span_s=LEASE_S, renewal=t > 0)
            moment = at(came_s, OF_NODE[of_node](came_s))
            (answer,) = bench.book.take(sent, [order(17, 500)], moment)
            assert answer.state == "done" or t == 0.0, (t, answer.detail)
            last_s = came_s if t < 400.0 else last_s
        bench.book.lapse(at(t, OF_NODE[of_node](t)))
        capped.append((t, bench.cap() == 500))
    assert all(on for t, on in capped if 16.1 < t < last_s + LEASE_S - 2.5)
    assert not any(on for t, on in capped if t > last_s + LEASE_S + 0.1)


@pytest.mark.parametrize("off_s", [0.0, -3600.0])
def test_what_lay_on_the_way_for_longer_than_its_lease_is_refused_although_the_clock_is_behind(
    off_s: float,
) -> None:
    bench = Bench()
    for t in (0.0, 15.0, 30.0):
        bench.book.take(request(issued_s=t), [order(17, 500)], at(t, off_s))
    ((state, detail),) = [
        (a.state, a.detail) for a in bench.book.take(request(issued_s=45), [order(18, 300)], at(80, off_s))
    ]
    assert state == "failed"
    assert detail.startswith("expired")
    assert bench.book.lapse(at(80, off_s)) != []
    assert bench.cap() == 600


@pytest.mark.parametrize("apart_s", [0.0, 0.3, 1.0, 10.0])
def test_a_backlog_of_a_new_daemon_is_as_old_as_the_clock_of_the_node_says(apart_s: float) -> None:
    """The connection stood for 100 s, and all that a new leader commanded meanwhile comes at once."""
    bench = Bench()
    bench.book.take(request(epoch=2), [order(1, 500)], at(0))
    for n in range(7):
        came_s = 100.0 + 0.01 * n
        (answer,) = bench.take(came_s, request(issued_s=1 + n * apart_s), order(17 + n, 300))
        assert (answer[0] == "failed") == (came_s - 1 - n * apart_s >= 30.0)
    assert bench.take(102.0, request(issued_s=101.9), order(40, 400)) == [("done", "")]


def test_a_node_whose_clock_is_ahead_believes_a_daemon_from_its_second_tick_on() -> None:
    bench = Bench()
    states = [
        bench.book.take(request(issued_s=t), [order(17 + n, 400)], at(t + 0.1, 3600.0))[0].state
        for n, t in enumerate((0.0, 0.0, 1.0, 2.0, 2.0))
    ]
    assert states == ["failed", "failed", "done", "done", "done"]


def test_the_clock_of_a_node_counts_where_every_message_of_a_daemon_was_slow() -> None:
    """The quickest of all messages took 2.7 s, and so does not tell how long the later one was on its way."""
    bench = Bench()
    for t in (0.0, 5.0, 10.0):
        assert bench.take(t + 2.7, request(issued_s=t), order(17, 500)) == [("done", "")]
    ((state, detail),) = bench.take(45.1, request(issued_s=15.0), order(18, 300))
    assert (state, detail.partition(" ")[0]) == ("failed", "expired")


def test_a_silence_before_a_late_request_adds_nothing_to_its_lease() -> None:
    """A daemon's clock may have gone slow meanwhile; by that of the node, which is right, it has not."""
    bench = Bench()
    for t in (0.0, 1.0, 2.0):
        assert bench.take(t + 0.1, request(issued_s=t), order(17, 500)) == [("done", "")]
    ((state, detail),) = bench.take(241.0, request(issued_s=202.0), order(18, 300))
    assert (state, detail.partition(" ")[0]) == ("failed", "expired")
