"""Recurrences over repairs, reloads, restarts and steps of the clock; and their text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.recurring_devices import DAY_S, HOUR_S, Living, Watched, every, racks
from tests.unit.test_health_recurring import ERRORS, FIVE, FLAPS, GAP, PCIE, SILENT, linked, troubled
from twin.catalogue import NS, TwinError, digest
from twin.contracts import DEGRADED, action
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.health.recurring import ALARM, SETTLE_NS, Recurring
from twin.telemetry import MaintenanceBegun

SETTLE_S = SETTLE_NS / NS


# -- repairs and work


def test_a_new_gpu_has_no_past_and_its_neighbours_keep_theirs() -> None:
    watch = troubled()
    for at_s in FIVE:
        watch.look(13 * HOUR_S + at_s, {ERRORS: [6]})
    assert watch.recurring.of(ERRORS)[0].tolist() == [6, 7]
    watch.recurring.forget("gpu", 7)
    assert watch.recurring.of(ERRORS)[0].tolist() == [6]
    watch.recurring.forget("gpu", 6)
    assert not watch.recurring.standing.any()  # at once, not at the next look
    assert not watch.recurring.score().any()
    watch.look(26 * HOUR_S, {ERRORS: [6, 7]})
    assert watch.recurring.cycles[ERRORS].count.tolist() == [1, 1]


def test_with_a_new_node_all_that_its_parts_had_is_over() -> None:
    watch = troubled(linked(), FLAPS)
    for at_s in FIVE:
        watch.look(13 * HOUR_S + at_s, {ERRORS: [13], SILENT: [3], PCIE: [100]})
    watch.recurring.forget("node", 3)
    assert np.flatnonzero(watch.recurring.score()).tolist() == [25]
    assert watch.recurring.text(3) == ""
    assert watch.recurring.text(25)


@pytest.mark.parametrize("table", ["node", "gpu", "link"])
def test_where_people_work_nothing_is_counted_nor_soon_after(table: str) -> None:
    site = linked()
    device, key = {"node": (3, SILENT), "gpu": (13, ERRORS), "link": (7, FLAPS)}[table]
    watch = Watched(site)
    for at_s in FIVE:
        watch.look(at_s + HOUR_S, {key: [device]}, work={table: [device]})
        watch.look(at_s + HOUR_S + SETTLE_S - 10.0, {ERRORS: [12], SILENT: [3], FLAPS: [6]})
    assert not any(len(c.index) for c in watch.recurring.cycles.values())
    watch.look(15 * HOUR_S, {key: [device]}, work={"node": [9]})
    watch.look(17 * HOUR_S + SETTLE_S, {key: [device]})
    assert watch.recurring.of(key)[0].tolist() == [device]


def test_what_came_before_work_may_be_cured_by_it() -> None:
    watch = troubled()
    watch.look(14 * HOUR_S, work={"gpu": [4, 5, 6, 7], "node": [1]})
    assert not watch.recurring.standing.any()
    watch.look(16 * HOUR_S, {ERRORS: [7]})
    assert not watch.recurring.score().any()


def test_sleep_cures_nothing_and_its_time_does_not_count() -> None:
    watch, awake = troubled(), troubled()
    sleeping = {"gpu": [4, 5, 6, 7], "node": [1], "link": []}
    for hour in range(14, 24):
        watch.look(hour * HOUR_S, asleep=sleeping)
    awake.look(14 * HOUR_S)
    assert watch.recurring.standing[1]
    assert watch.recurring.score()[1] >= 0.95 * awake.recurring.score()[1]
    watch.look(24 * HOUR_S, {ERRORS: [7]}, asleep=sleeping)
    watch.look(24.5 * HOUR_S, {ERRORS: [7]})
    assert watch.recurring.cycles[ERRORS].count.tolist() == [5], "nothing is counted as it wakes"
    assert watch.recurring.standing[1]


def test_what_recurs_stays_true_of_a_node_that_is_out_and_is_over_when_it_comes_back() -> None:
    """Or the alarm would end as soon as the node is drained, and people would put it back."""
    watch = troubled(linked(), FLAPS)
    watch.look(13.2 * HOUR_S, {SILENT: [3]})
    score = float(watch.recurring.score()[3])
    for hour in range(14, 100, 4):
        watch.look(hour * HOUR_S, {FLAPS: [7]}, broken=[3])  # which people may cause
        assert watch.recurring.standing[3]
        assert watch.recurring.score()[3] > score - 0.3  # it grows as the fleet turns out to have less
    assert re.search(r"flaps 5 times in 1\d h, the last \d.* days ago \(", watch.recurring.text(3))
    watch.look(98.5 * HOUR_S, {FLAPS: [7], SILENT: [3]})
    assert not any(len(c.index) for c in watch.recurring.cycles.values())
    watch.look(98 * HOUR_S + SETTLE_S, {FLAPS: [7]})
    assert watch.recurring.cycles[FLAPS].count.tolist() == [1]
    watch.look(100 * HOUR_S, {FLAPS: [7]})
    assert watch.recurring.cycles[FLAPS].count.tolist() == [2]


def test_who_is_out_at_the_first_look_is_watched_from_then_on() -> None:
    watch = Watched(racks(2))
    watch.recurring = Recurring(watch.site)
    watch.look(0.0, broken=[3])
    watch.look(HOUR_S, broken=[3])
    assert watch.recurring.usual[SILENT].since_ns[3] == watch.begin_ns + HOUR_S * NS
    watch.look(-5 * HOUR_S, broken=[3])  # a clock that went back
    assert watch.recurring.usual[SILENT].since_ns[3] == watch.begin_ns + HOUR_S * NS


def test_nobody_else_waits_for_a_node_that_is_out() -> None:
    watch = Watched(racks(2))
    for at_s in FIVE:
        watch.look(at_s + HOUR_S, {ERRORS: [7]}, broken=[30])
    assert watch.recurring.score()[1] == pytest.approx(troubled().recurring.score()[1], abs=0.2)
    since_ns = watch.recurring.usual[SILENT].since_ns - watch.begin_ns  # nor is one that is out watched
    assert (since_ns / NS / HOUR_S).tolist() == [13.0 if node == 30 else 0.0 for node in range(36)]
    begun_ns = watch.recurring.usual[PCIE].since_ns - watch.begin_ns
    assert np.flatnonzero(begun_ns).tolist() == [120, 121, 122, 123]


# -- reloads and restarts


def test_links_that_lost_their_node_are_nobodys() -> None:
    site = linked()
    watch = troubled(site, FLAPS)
    site.node_of_link.flags.writeable = True
    site.node_of_link[7] = -1
    for at_s in FIVE:
        watch.look(14 * HOUR_S + at_s, {FLAPS: [7]}, work={"link": [9]}, broken=[35])
    watch.look(40 * HOUR_S, {FLAPS: [7]})
    assert watch.recurring.cycles[FLAPS].count.tolist() == [5]  # of before
    assert not watch.recurring.score().any()
    assert watch.recurring.of(FLAPS)[0].size == 0
    assert watch.recurring.text(35) == ""
    assert watch.recurring.free_ns[35] > 0


def test_a_site_of_nothing_and_one_without_gpus_cost_nothing_and_raise_nothing() -> None:
    for tree in ({"site": "none", "halls": []}, {"site": "bare", "halls": [{"name": "h", "racks": [
            {"name": "r1", "profile": "air-8gpu", "nodes": 3, "gpus_per_node": 0}]}]}):  # fmt: skip
        twin = Living(tree)
        for _ in range(3):
            twin.look()
        twin.again().engine.tick(twin.inbox.take(9, twin.now_ns + NS, 1.0))
        assert twin.recurring.score().tolist() == [0.0] * twin.site.sizes["node"]


def test_a_node_without_gpus_falls_silent_by_itself() -> None:
    rack = {"name": "r1", "profile": "air-8gpu", "nodes": 9, "gpus_per_node": 0}
    twin = Living({"site": "bare", "halls": [{"name": "h", "racks": [rack]}]})
    twin.look()
    for _ in range(5):
        twin.rests(2)
        twin.look(silent={"node": [2]}, dt_s=200.0)
        twin.look()
    assert np.flatnonzero(twin.recurring.standing).tolist() == [2]


def test_a_snapshot_of_before_recurrences_were_watched_is_read() -> None:
    twin = Living(two_racks())
    twin.look()
    told = twin.engine.health.dump()
    del told["recurring"], told["rates"]["hushed"]
    other = Living(two_racks())
    other.engine.health.restore(decode(encode(told)))
    assert other.engine.health.looked_ns == twin.now_ns
    assert digest(other.recurring.dump()) == digest(Living(two_racks()).recurring.dump())
    other.look(dt_s=120.0)


# -- clocks and counters


def test_a_clock_that_steps_alarms_nobody_and_loses_nobody() -> None:
    for step_s in (-60.0, -HOUR_S, -30 * DAY_S, 2 * HOUR_S, 30 * DAY_S):
        watch = Watched(racks(2))
        watch.look(HOUR_S, {ERRORS: [7]})
        watch.look(4 * HOUR_S, {ERRORS: [7]})
        watch.look(4 * HOUR_S + step_s)
        assert np.isfinite(watch.recurring.score()).all()
        watch.look(4 * HOUR_S + step_s + 60.0, {PCIE: [50]})
        assert not watch.alarmed, step_s
        watch.live([(30 * DAY_S + DAY_S + s, k, g) for s, k, g in every(3.0, 5, ERRORS, 90)], 32 * DAY_S)
        assert watch.alarmed <= {1, 22}
        assert 22 in watch.alarmed, step_s


def test_health_waits_for_a_clock_that_went_back() -> None:
    """The engine refuses such ticks; health, told of one, neither judges nor fails, and goes on after it."""
    twin, totals = Living(two_racks()), np.zeros(144, np.int64)
    engine = twin.engine
    for _ in range(3):
        twin.look(counts={ERRORS: totals})
    before, looked_ns = digest(engine.health.dump()), engine.health.looked_ns
    for back_s in (0.0, 5.0, HOUR_S, 40 * DAY_S):
        engine.state.now_ns = twin.now_ns - round(back_s * NS)
        engine.health.update(engine.state, engine.estimator, engine.diagnosis, engine.jobs, engine.windows)
        assert digest(engine.health.dump()) == before
    engine.state.now_ns = twin.now_ns
    totals[7] += 1
    twin.look(counts={ERRORS: totals})
    assert engine.health.looked_ns == looked_ns + 60 * NS
    assert engine.health.recurring.cycles[ERRORS].index.tolist() == [7]
    with pytest.raises(TwinError, match="the one before"):
        twin.look(dt_s=-120.0)


@pytest.mark.long
def test_a_counter_that_begins_anew_is_no_trouble_unless_it_counts() -> None:
    twin, totals = Living(two_racks()), np.full(144, 900, np.int64)
    twin.look(counts={ERRORS: totals})
    for _ in range(6):
        twin.rests(3, counts={ERRORS: totals})
        totals[7] = 0 if totals[7] else 900  # 900 again is growth
        totals[9] = 0
        twin.look(counts={ERRORS: totals})
    assert twin.recurring.cycles[ERRORS].index.tolist() == [7]
    assert twin.recurring.cycles[ERRORS].count.tolist() == [3]


def test_what_grows_unheard_is_one_trouble() -> None:
    twin, totals = Living(two_racks()), np.zeros(144, np.int64)
    twin.look(counts={ERRORS: totals})
    for k in range(5):
        totals[7] += 1
        twin.look(counts={ERRORS: totals}, silent={"gpu": [7]} if k < 4 else {}, dt_s=700.0)
    assert twin.recurring.cycles[ERRORS].count.tolist() == [1]


@pytest.mark.long
def test_while_nobody_listens_nobody_falls_silent() -> None:
    twin = Living(two_racks())
    for _ in range(6):
        twin.rests(2)
        twin.look(dt_s=4 * HOUR_S)  # the daemon slept
    assert not any(len(c.index) for c in twin.recurring.cycles.values())
    everyone = {"node": range(36), "gpu": range(144)}
    for _ in range(6):
        twin.rests(2)
        twin.look(silent=everyone, dt_s=300.0)  # its collector did
        twin.look()
    assert not any(len(c.index) for c in twin.recurring.cycles.values())


# -- words


def test_the_words_name_the_gpu_how_often_since_when_and_what_is_usual() -> None:
    watch = troubled()
    watch.look(13 * HOUR_S + 120.0)
    told = watch.recurring.text(1)
    assert re.fullmatch(r"gpu3: NVLink errors 5 times in 12 h \(usual: once in \d\d days\)", told), told
    watch.look(15 * HOUR_S)
    assert re.search(r"5 times in 14 h, the last 2 h ago \(usual", watch.recurring.text(1))
    watch.look(13 * HOUR_S + 4.5 * DAY_S, {ERRORS: [7]})
    found = [re.sub(r"\(.*", "", watch.recurring.text(node)) for node in (0, 1, 2)]
    assert found in (["", "gpu3: NVLink errors 6 times in 5 days ", ""], ["", "", ""])


@pytest.mark.parametrize(("days", "words"), [
    (0.0, "0 min"), (1 / 48, "30 min"), (1.49 / 24, "89 min"), (1.6 / 24, "2 h"), (1.0, "24 h"),
    (1.99, "48 h"), (2.0, "2 days"), (6.94, "6.9 days"), (9.96, "10 days"), (123.4, "123 days")])  # fmt: skip
def test_spans_of_time_read_as_people_say_them(days: float, words: str) -> None:
    from twin.health.recurring import _span

    assert _span(days) == words


def test_links_and_nodes_are_named_as_people_know_them() -> None:
    watch = troubled(linked(), FLAPS)
    told = watch.recurring.text(3)
    assert told.startswith(watch.site.name("link", 7).rpartition("/")[2] + ": flaps 5 times in 12 h")
    assert troubled(key=SILENT).recurring.text(7).startswith("silences 5 times in 12 h")
    assert troubled(key="node.reboot_count").recurring.text(7).startswith("restarts 5 times in 12 h")


def test_the_gravest_comes_first_and_there_are_at_most_three() -> None:
    watch = Watched(racks(2))
    for k in range(6):
        came: dict[str, Any] = {ERRORS: [4], SILENT: [1]} if k % 2 else {}
        watch.look((1 + 2 * k) * HOUR_S, came | {PCIE: [5], GAP: [6], "gpu.row_remap_count": [7]})
    said = watch.recurring.text(1).split("; ")
    assert len(said) == 3
    assert [re.sub(" in 10.*| in 8.*", "", text) for text in said] == [
        "gpu1: PCIe replays 6 times", "gpu3: remapped rows or contained errors of its memory 6 times",
        "gpu0: NVLink errors 3 times",
    ]  # fmt: skip


def test_a_node_is_told_to_be_drained_at_once_and_why() -> None:
    twin, totals = Living(two_racks()), np.zeros(144, np.int64)
    twin.look(counts={ERRORS: totals})
    for _ in range(5):
        twin.rests(3, counts={ERRORS: totals})
        totals[80] += 7
        twin.look(counts={ERRORS: totals})
    assert twin.recurring.score()[20] >= ALARM
    health = twin.engine.health
    assert health.health("node").level[20] == DEGRADED
    assert health.health("node").action[20] == action("drain")
    texts = {e.rule: e.text for e in health.verdicts.evidence("node", 20)}
    assert re.fullmatch(
        r"trouble recurs: gpu0: NVLink errors 5 times in 12 h \(usual: once in \d\d days\)",
        texts["recurs"],
    ), texts["recurs"]
    found = [f for f in twin.engine.findings.active if f.startswith("health/")]
    assert found == [f"health/{twin.site.name('node', 20)}"]
    name, until_ns = twin.site.name("node", 20), twin.now_ns + 7200 * NS
    work = MaintenanceBegun(id="w", table="node", names=(name,), until_ns=until_ns, author="me")
    twin.look(work, counts={ERRORS: totals})
    assert not twin.recurring.standing.any()


@pytest.mark.long
def test_much_later_nothing_has_grown() -> None:
    """100,000 looks with trouble here and there: what is kept is bounded by the site, not by time."""
    watch = Watched(racks(1), [ERRORS, SILENT])
    rng = np.random.default_rng(13)
    watch.look(1.0)
    size = 0
    for k in range(100_000):
        came = {ERRORS: [int(rng.integers(72))], SILENT: [int(rng.integers(18))]} if k % 20 == 0 else None
        if came is not None or k % 360 == 0:
            watch.look(10.0 * (k + 1), came)
        if k == 20_000:
            size = len(encode(watch.recurring.dump()))
    assert len(encode(watch.recurring.dump())) < 1.5 * size
    assert sum(len(c.index) for c in watch.recurring.cycles.values()) <= 90
    assert not watch.alarmed
