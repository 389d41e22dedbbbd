"""The collector: bounded whatever the length, peaks kept, lines that end where a sensor fell silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from twin.catalogue import NS
from twin.contracts import ClearedRecord, CommandBatch, FindingRecord
from twin.engine import Engine
from twin.report import Collector
from twin.report.collector import MAX_KEPT
from twin.report.decimation import Timeline, spread
from twin.report.episodes import MAX_EPISODES, Episodes
from twin.report.figures import key_figures, power_series
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Block, Inbox, JobSlots

START_NS = 1_800_000_000 * NS


def site_of(racks: int) -> Site:
    rack = {"name": f"r[001-{racks:03d}]", "nodes": 1, "gpus_per_node": 1}
    return build_site(SiteSpec({"site": "s", "halls": [{"name": "h", "racks": [rack]}]}, {}))


def block(table: str, signal: str, values: list[float], now_ns: int, start: int = 0) -> Block:
    shown = np.array([values], np.float32)
    return Block(table, start, (signal,), shown, (), np.zeros((0, len(values)), np.int64), now_ns)


def run(site: Site, ticks: list[list[Block]], dt_s: float = 1.0) -> Collector:
    engine, inbox, collector = Engine(site, [], []), Inbox(site.sizes), Collector()
    for tick, blocks in enumerate(ticks):
        now_ns = START_NS + round(tick * dt_s * NS)
        for b in blocks:
            inbox.put_block(replace(b, t_ns=now_ns), now_ns)
        frame = inbox.take(tick, now_ns, dt_s)
        collector.observe(engine, frame, engine.tick(frame))
    return collector


def test_series_stay_bounded_and_keep_their_peaks_over_1e5_observations() -> None:
    line = Timeline(100)
    values = np.ones(1)
    for i in range(100_000):
        line.advance(i)
        values[0] = 99.0 if i == 4_321 else -7.0 if i == 98_765 else 1.0
        line.add("x", ("x",), values)
    track = line.tracks["x"]
    assert track.low.shape == (1, 100)
    assert 50 <= line.points <= 100
    assert line.stride == 1024
    least, mean, greatest = track.overall()
    assert (least[0], greatest[0]) == (-7.0, 99.0)
    assert abs(mean[0] - (99_998 + 99 - 7) / 100_000) < 1e-9
    assert int(track.count.sum()) == 100_000
    assert (np.diff(line.times_ns()) == 1024).all()


def test_a_track_that_begins_late_is_empty_before() -> None:
    line = Timeline(4)
    for i in range(6):
        line.advance(i)
        if i >= 4:
            line.add("late", ("x",), np.array([float(i)]))
    assert line.points == 3
    assert np.isnan(line.tracks["late"].mean()[0, :2]).all()
    assert line.tracks["late"].mean()[0, 2] == 4.5


def test_spread_ignores_what_is_not_known() -> None:
    assert spread(np.array([np.nan, 3.0, 1.0, 2.0])).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert np.isnan(spread(np.array([np.nan]))).all()


def test_site_power_is_shown_only_once_every_rack_has_spoken() -> None:
    first = [block("rack", "power_w", [100.0], 0)]
    both = [block("rack", "power_w", [100.0, 300.0], 0)]
    power = power_series(run(site_of(2), [first, both, both]))
    assert power is not None
    assert power.whose == "racks"
    np.testing.assert_array_equal(power.mean, [np.nan, 400.0, 400.0])


def test_without_rack_power_the_nodes_count_then_the_gpus() -> None:
    gpu = [block("gpu", "power_w", [10.0, 20.0], 0)]
    node = [block("node", "power_w", [50.0, 60.0], 0)]
    found = [power_series(run(site_of(2), [b])) for b in (gpu, gpu + node)]
    assert [(p.whose, float(p.mean[0])) for p in found if p] == [("GPUs", 30.0), ("nodes", 110.0)]


def test_a_line_ends_where_its_sensor_fell_silent() -> None:
    both, one = [block("rack", "power_w", [1.0, 2.0], 0)], [block("rack", "power_w", [1.0], 0)]
    collector = run(site_of(2), [both] + [one] * 9, dt_s=100.0)
    shown = collector.time.tracks["rack.power_w"].mean()[:, :10]
    assert np.isfinite(shown[0]).all()
    assert np.isfinite(shown[1]).tolist() == [True] * 4 + [False] * 6
    collector.finish()
    assert [q.key for q in collector.signal_qualities()] == ["rack.power_w"]
    assert collector.signal_qualities()[0].share_at_end.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_of_very_many_racks_the_largest_get_a_series() -> None:
    n = MAX_KEPT + 30
    values = [float(i) for i in range(n)]
    collector = run(site_of(n), [[block("rack", "power_w", values, 0)]] * 2)
    track = collector.time.tracks["rack.power_w"]
    assert len(track.labels) == MAX_KEPT
    assert track.labels[0].endswith("r031")
    assert collector.time.tracks["spread rack.power_w"].high[4, 0] == n - 1


def batch(reason: str, issued_ns: int = 0, **more: Any) -> CommandBatch:
    given: dict[str, Any] = dict(
        control="gpu.power_cap_w",
        policy="p",
        epoch=0,
        index=np.array([0], np.int32),
        generation=np.zeros(1, np.int32),
        command=np.zeros(1, np.int64),
        value=np.array([5.0]),
        reason=reason,
        issued_ns=issued_ns,
        expires_ns=0,
        deadline_ns=0,
    )
    return CommandBatch(**(given | more))


def test_actions_repeat_into_one_line_and_are_bounded() -> None:
    book, site = Episodes(), site_of(1)
    jobs = JobSlots(site.sizes["job"], site.sizes["node"])
    book.act("advice", (batch("hot", 1), batch("hot", 9, value=np.array([7.0]))), site, jobs)
    book.act("advice", (batch("hot", 10, renewal=True),), site, jobs)
    (action,) = book.actions.values()
    assert (action.batches, action.first_ns, action.last_ns, action.low, action.high) == (2, 1, 9, 5.0, 7.0)
    assert action.names == ("s/h/r001/node0/gpu0",)
    for i in range(3 * MAX_EPISODES):
        book.act("command", (batch(f"reason {i}"),), site, jobs)
    assert len(book.actions) <= 2 * MAX_EPISODES
    assert sum(a.batches for a in book.actions.values() if a.kind == "command") == 3 * MAX_EPISODES


def test_a_finding_is_one_line_from_raised_to_cleared() -> None:
    book = Episodes()
    finding = FindingRecord(
        id="heat/x",
        severity="warning",
        title="t",
        entities=("x",),
        evidence=(),
        confidence_pu=None,
        action="",
    )
    book.record(finding, 10)
    book.record(ClearedRecord(id="heat/x"), 15)
    book.record(finding, 20)
    (found,) = book.conditions.values()
    assert (found.first_ns, found.times, found.lasted_ns, found.cleared_ns) == (10, 2, 5, None)


def test_a_collector_that_saw_nothing_has_figures_all_the_same() -> None:
    assert [f.label for f in key_figures(Collector(), {})] == ["Commands · advice", "Findings"]
