"""Nodes with recurrent trouble: it must be their own, neither by chance nor of all together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from tests.support.recurring_devices import DAY_S, HOUR_S, Watched, chance, every, mask, racks
from tests.support.sampled_cases import sampled
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.health.recurring import ALARM, FAMILIES, KEYS, STILL, STREAMS

ERRORS, REPLAYS, PCIE, GAP = (
    "gpu.nvlink_error_count", "gpu.nvlink_replay_count", "gpu.pcie_replay_count", "gpu.gap")  # fmt: skip
FLAPS, SILENT = "link.flap_count", "node.gap"
FIVE = tuple(k * 3 * HOUR_S for k in range(5))


def linked(names: str = "r[1-2]") -> Any:
    """Two racks with two links a node."""
    tree = two_racks(racks=names)
    tree["halls"][0]["planes"] = [{"name": "compute", "racks": [names], "links_per_node": 2}]
    return site_of(tree)


def few(nodes: int, gpus: int = 1) -> Any:
    """One rack of so many nodes."""
    rack = {"name": "r1", "profile": "air-8gpu", "nodes": nodes, "gpus_per_node": gpus}
    return site_of({"site": "lab", "halls": [{"name": "h", "racks": [rack]}]})


def troubled(site: Any = None, key: str = ERRORS, device: int = 7, **more: Any) -> Watched:
    """A site on which one device had trouble five times, three hours apart."""
    watch = Watched(site if site is not None else racks(2))
    for at_s in FIVE:
        watch.look(at_s + HOUR_S, {key: [device]}, **more)
    return watch


def weight(watch: Watched, key: str) -> float:
    """Return the weight of a nat of a stream."""
    family = next(s.family for s in STREAMS if s.key == key)
    return float(watch.recurring.weights()[FAMILIES.index(family)])


@pytest.mark.parametrize("key", [s.key for s in STREAMS])
def test_trouble_every_three_hours_speaks_for_a_drain_of_its_node_alone(key: str) -> None:
    site = linked()
    watch = troubled(site, key, 7)
    node = int(watch.recurring.node_of(key.partition(".")[0], np.array([7], np.int32))[0])
    drains = next(s.drains for s in STREAMS if s.key == key)
    assert watch.recurring.standing.tolist() == mask(36, {node} if drains else ()).tolist()
    score = watch.recurring.score()
    assert np.flatnonzero(score).tolist() == ([node] if drains else [])
    index, told = watch.recurring.of(key)
    assert index.tolist() == [7]  # what does not speak for a drain is a feature still
    assert told[0] > ALARM
    assert score[node] == pytest.approx(told[0] * weight(watch, key) if drains else 0.0, rel=1e-6)


def test_what_came_once_or_twice_needs_nobody() -> None:
    watch = Watched(racks(2))
    watch.look(HOUR_S, {ERRORS: [7]})
    assert not watch.recurring.score().any()
    assert watch.recurring.of(ERRORS)[0].size == 0
    watch.look(4 * HOUR_S, {ERRORS: [7]})
    assert 0.0 < watch.recurring.score()[1] < ALARM
    assert not watch.recurring.standing.any()


def test_once_is_no_recurrence_however_usual_it_is() -> None:
    watch = Watched(racks(2))
    watch.recurring.cycles[ERRORS].add(np.array([7], np.int32), watch.begin_ns, np.array([5.9]), np.ones(1))
    watch.look(60.0)
    assert watch.recurring.cycles[ERRORS].scores(watch.recurring.now_ns)[0][0] > 0.0
    assert watch.recurring.of(ERRORS)[0].size == 0
    assert not watch.recurring.score().any()
    assert watch.recurring.text(1) == ""


def test_an_alarm_stands_until_little_speaks_for_it() -> None:
    watch = troubled()
    was, fell_to = True, 0.0
    for hour in range(14, 7 * 24):
        watch.look(hour * HOUR_S)
        score = float(watch.recurring.score()[1])
        if was and not watch.recurring.standing[1]:
            fell_to = score
        was = bool(watch.recurring.standing[1])
        assert was == (score >= STILL)
    assert 0.0 < fell_to < STILL
    watch = troubled()
    watch.look(20 * HOUR_S)
    assert watch.recurring.score()[1] > STILL
    fresh = Watched(racks(2))
    fresh.recurring.restore(watch.recurring.dump() | {"standing": np.zeros(36, np.bool_)})
    assert fresh.recurring.standing[1] == (fresh.recurring.score()[1] >= ALARM)  # less raises none


# -- one mishap, one voice


def test_counters_of_one_mishap_tell_it_once() -> None:
    one, all_three = troubled(), Watched(racks(2))
    for at_s in FIVE:
        came = {key: [7] for key in KEYS if key.startswith("gpu.nvlink")}
        all_three.look(at_s + HOUR_S, came)
    # The fleet has a little more trouble of that family
    assert all_three.recurring.score()[1] == pytest.approx(one.recurring.score()[1], rel=0.03)


def test_all_links_of_a_node_tell_once_what_its_host_does() -> None:
    site = linked()
    both = Watched(site)
    for at_s in FIVE:
        both.look(at_s + HOUR_S, {FLAPS: [6, 7], "link.error_count": [6, 7]})
    alone = troubled(site, FLAPS).recurring.score()[3]
    assert alone - 1.5 < both.recurring.score()[3] <= alone  # the fleet has a little more of it


def test_troubles_of_different_kinds_add_up() -> None:
    watch = Watched(racks(2))
    for at_s in FIVE:
        watch.look(at_s + HOUR_S, {ERRORS: [7]})
        watch.look(at_s + 2 * HOUR_S, {PCIE: [5]})
    alone = [float(watch.recurring.of(key)[1][0]) * weight(watch, key) for key in (ERRORS, PCIE)]
    assert watch.recurring.score()[1] == pytest.approx(sum(alone))
    assert watch.recurring.text(1).count(" times in ") == 2


def test_a_node_of_one_gpu_that_falls_silent_is_not_heard_twice() -> None:
    site = few(20)
    twice, once = Watched(site), Watched(site)
    for at_s in FIVE:
        twice.look(at_s + HOUR_S, {SILENT: [7], GAP: [7], "node.reboot_count": [7]})
        once.look(at_s + HOUR_S, {SILENT: [7]})
    assert twice.recurring.score()[7] == pytest.approx(once.recurring.score()[7], rel=0.03)


def test_the_only_gpu_of_a_node_may_fall_silent_alone() -> None:
    assert np.flatnonzero(troubled(few(20), GAP).recurring.standing).tolist() == [7]


def test_a_silent_node_takes_its_gpus_along() -> None:
    watch = Watched(racks(2))
    for at_s in FIVE:
        watch.look(at_s + HOUR_S, {GAP: [4, 5]}, hushed={"node": [1]})
        watch.look(at_s + HOUR_S + 10.0, {GAP: [12, 13, 14, 15]})  # before its node is known to be silent
    assert watch.recurring.of(GAP)[0].size == 0
    for at_s in FIVE:
        watch.look(DAY_S + at_s, {GAP: [4, 5]}, hushed={"gpu": [6]})
    assert watch.recurring.of(GAP)[0].tolist() == [4, 5]
    assert np.flatnonzero(watch.recurring.standing).tolist() == [1]


# -- what many have


@pytest.mark.parametrize("key", [ERRORS, GAP, SILENT, "node.reboot_count"])
@pytest.mark.parametrize("spread_s", [0.0, 60.0, 900.0])
@pytest.mark.parametrize("share", ["site", "rack"])
def test_what_the_site_or_a_rack_has_together_is_nobodys_own(key: str, spread_s: float, share: str) -> None:
    """A collector, a switch or a feed fails every three hours; its nodes are heard at different looks."""
    site = racks(8)
    rng, nodes = np.random.default_rng(1), np.arange(144) if share == "site" else np.arange(36, 54)
    first = nodes * 4 if key.startswith("gpu") else nodes
    delay_s = rng.uniform(0.0, spread_s, len(nodes))
    troubles = [(at_s + d, key, int(i)) for at_s in FIVE for i, d in zip(first, delay_s, strict=True)]
    watch = Watched(site)
    watch.live(troubles, DAY_S)
    assert not watch.alarmed


def test_half_a_rack_is_the_racks_and_less_is_not() -> None:
    for count in (8, 9):
        watch = Watched(racks(30))  # 540 nodes: 5 % are 27
        for at_s in FIVE:
            watch.look(at_s + HOUR_S, {ERRORS: np.arange(count) * 4})
        assert len(watch.alarmed) == (count if count < 9 else 0)


def test_nodes_that_fall_silent_in_the_same_look_have_a_collector_in_common() -> None:
    for count, alarms in ((4, 4), (5, 0), (20, 0)):
        watch = Watched(racks(30))
        for at_s in FIVE:
            watch.look(at_s + HOUR_S, {SILENT: np.arange(count) * 20})  # in as many racks
        assert len(watch.alarmed) == alarms


def test_many_silences_at_once_are_chance_where_looks_are_rare_and_silences_usual() -> None:
    watch, rng = Watched(racks(30)), np.random.default_rng(2)
    for k in range(1, 5 * 288):
        watch.look(k * 300.0, {SILENT: np.flatnonzero(rng.random(540) < 2.0 / 288)})
    assert watch.recurring.usual[SILENT].mean_per_day > 0.7
    assert not watch.alarmed
    for k in range(6):
        some = {0, *np.flatnonzero(rng.random(540) < 8.0 / 540).tolist()}
        watch.look(5 * DAY_S + k * 300.0 * 12, {SILENT: sorted(some)})
    assert watch.recurring.of(SILENT)[0].tolist().count(0) == 1


@pytest.mark.parametrize("nodes", [2, 3, 4, 6, 8])
def test_on_a_small_site_what_most_have_is_nobodys_own(nodes: int) -> None:
    watch = Watched(few(nodes))
    watch.live(chance(np.random.default_rng(3), np.full(nodes, 8.0), 10.0, ERRORS), 10 * DAY_S)
    assert not watch.alarmed
    together = Watched(few(nodes))
    for at_s in FIVE:
        together.look(at_s + HOUR_S, {ERRORS: np.arange(nodes)})
    assert not together.alarmed


@pytest.mark.parametrize("key", [ERRORS, PCIE])
@pytest.mark.parametrize("nodes", [3, 8, 24])
def test_a_node_all_of_whose_gpus_have_trouble_is_found_on_a_small_site(nodes: int, key: str) -> None:
    watch, both = Watched(few(nodes, 8)), Watched(few(nodes, 8))
    for at_s in (k * 3 * HOUR_S for k in range(8)):
        watch.look(at_s + HOUR_S, {key: np.arange(8, 16)})
        both.look(at_s + HOUR_S, {key: np.arange(8, 24)})
    assert np.flatnonzero(watch.recurring.standing).tolist() == [1]
    assert not both.alarmed or (nodes, key) == (24, PCIE), "what two of a few have is the site's"


def test_a_single_node_may_have_trouble() -> None:
    assert troubled(few(1), ERRORS, 0).recurring.standing.tolist() == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("per_day", "count"), sampled([(48.0, 2), (6.0, 10)], (48.0, 2)))
def test_a_counter_that_trickles_everywhere_from_the_first_minute_alarms_nobody(
    per_day: float, count: int
) -> None:
    site = racks(count)
    rng, days = np.random.default_rng(int(per_day)), 3.0 if per_day < 48 else 1.0
    watch = Watched(site)
    watch.live(chance(rng, np.full(site.sizes["gpu"], per_day), days, ERRORS), days * DAY_S)
    assert not watch.alarmed


# -- chance, and how soon


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "per_day"), [(0.3, 0.1), (0.1, 0.05)])
def test_a_fleet_with_chance_trouble_alarms_hardly_ever(shape: float, per_day: float) -> None:
    """Simulated: 270 nodes for 30 days; below two false alarms in 100 node-months, however unlike devices."""
    site, rng, days = racks(15), np.random.default_rng(8), 30.0
    each = rng.gamma(shape, per_day / shape, site.sizes["gpu"])
    troubles = chance(rng, each, days, ERRORS)
    troubles += [(at_s, REPLAYS, gpu) for at_s, _, gpu in troubles]  # the same mishaps
    troubles += chance(rng, rng.gamma(shape, per_day / shape, 270), days, SILENT)
    watch = Watched(site)
    watch.live(troubles, days * DAY_S)
    assert len(watch.alarmed) <= 0.02 * 270


def test_trouble_every_two_to_four_hours_is_told_within_a_day() -> None:
    rng = np.random.default_rng(4)
    watch, took_h = Watched(racks(4)), []
    watch.live(chance(rng, np.full(288, 0.02), 10.0, ERRORS), 10 * DAY_S)
    assert not watch.alarmed
    kept = encode(watch.recurring.dump())
    for gpu in range(0, 288, 12):
        watch.recurring.restore(decode(kept))
        at_s = 10 * DAY_S + 60.0
        while not watch.recurring.standing[gpu // 4]:
            watch.look(at_s, {ERRORS: [gpu]})
            last_h = (at_s - 10 * DAY_S) / HOUR_S
            at_s += rng.uniform(2.0, 4.0) * HOUR_S
        took_h.append(last_h)
        assert last_h > 2.0  # no sooner than the third time
    assert np.median(took_h) <= 10.0
    assert max(took_h) <= 16.0


def test_chronic_trouble_is_told_for_a_week_and_then_known() -> None:
    rng = np.random.default_rng(6)
    watch = Watched(racks(4))
    per_day = np.full(288, 0.02)
    per_day[7] = 10.0
    watch.live(chance(rng, per_day, 9.0, ERRORS), 9 * DAY_S)
    assert watch.alarmed == {1}
    watch.alarmed = set()
    chronic = np.zeros(288)
    chronic[7] = 10.0
    watch.live([(9 * DAY_S + s, k, g) for s, k, g in chance(rng, chronic, 30.0, ERRORS)], 39 * DAY_S)
    assert not watch.alarmed
    # what the others have is told as before
    watch.live(every(3.0, 5, ERRORS, 100, 39 * DAY_S), 40 * DAY_S)
    assert watch.alarmed == {25}


@pytest.mark.parametrize("step_s", [0.1, 1.0, 10.0, 60.0, 300.0])
def test_ticks_of_any_length_give_about_the_same_scores(step_s: float) -> None:
    watch = Watched(racks(2))
    rng = np.random.default_rng(9)
    troubles = [(HOUR_S * (1 + 2.5 * k) + float(rng.uniform(0, 600)), ERRORS, 7) for k in range(6)]
    watch.live(troubles, 16 * HOUR_S, step_s)
    exact = Watched(racks(2))
    exact.live(troubles, 16 * HOUR_S, 0.01)
    assert watch.recurring.score()[1] == pytest.approx(exact.recurring.score()[1], abs=0.1)
    assert watch.alarmed == {1}
