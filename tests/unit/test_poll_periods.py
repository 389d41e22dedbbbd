"""Sources that poll bring their own period, by an event of the frame, so that replays know it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from policies.thermal_guard import ThermalGuard
from tests.support.builders import START_NS, Twin, site_of, spec_of, two_racks
from twin.catalogue import NS, find_signal
from twin.daemon import Ingest
from twin.engine import Engine, encode
from twin.run import Recorder, TraceReader, replay_frames
from twin.sources import SourceAccount
from twin.telemetry import Block, Event, PollPeriodChanged, Reading

N = 144
POLL_S = 15.0


def page(n: int, temp_c: float = 50.0, power_w: float = 400.0) -> Block:
    """The GPUs of the first rack as one exporter shows them."""
    values = np.array([[temp_c] * n, [power_w] * n], np.float32)
    return Block("gpu", 0, ("temp_c", "power_w"), values, (), np.zeros((0, n), np.int64), 0)


def told(twin: Twin, names: range, signals: tuple[str, ...] = ("temp_c", "power_w"), **more: Any) -> Event:
    """The event of a source that polls these GPUs."""
    given = {"table": "gpu", "period_s": POLL_S, **more}
    return PollPeriodChanged(signals=signals, names=tuple(twin.site.name("gpu", i) for i in names), **given)


def stale_s(twin: Twin, key: str) -> np.ndarray:
    """Ages at which a signal is stale [n]."""
    signal = find_signal(key)
    assert signal is not None
    table = twin.engine.state.tables[signal.table]
    return table.limits(table.freshness.row_of(signal)).stale_ns / NS


def frame_events(
    ingest: Ingest, account: SourceAccount, poll_s: float, number: int
) -> list[PollPeriodChanged]:
    """The periods in a frame after one page."""
    now_ns = START_NS + number * NS
    block = page(8)
    block.t_ns = now_ns
    account.stage([block, Reading("node", 0, "power_w", 900.0, now_ns)], now_ns, poll_s)
    return [e for e in ingest.take(number, now_ns, 1.0).events if isinstance(e, PollPeriodChanged)]


def test_a_period_is_told_once_and_again_when_it_changes() -> None:
    ingest = Ingest(site_of(two_racks()), {})
    account = ingest.of("exporter http://gpu001:9400/metrics")
    assert frame_events(ingest, account, 0.0, 1) == [], "who publishes by himself has none to tell"
    first = frame_events(ingest, account, POLL_S, 2)
    names = tuple(f"lab/h/r1/node{i // 4}/gpu{i % 4}" for i in range(8))
    assert first == [
        PollPeriodChanged(table="gpu", signals=("temp_c", "power_w"), names=names, period_s=POLL_S),
        PollPeriodChanged(table="node", signals=("power_w",), names=("lab/h/r1/node0",), period_s=POLL_S),
    ]
    assert frame_events(ingest, account, POLL_S, 3) == []
    assert [e.period_s for e in frame_events(ingest, account, 60.0, 4)] == [60.0, 60.0]


def test_traces_of_before_are_read() -> None:
    written = b'{"type":"PeriodTold","table":"gpu","signals":["temp_c"],"names":["g"],"period_s":15.0}'
    event = msgspec.json.decode(written, type=Event)
    assert event == PollPeriodChanged(table="gpu", signals=("temp_c",), names=("g",), period_s=15.0)
    assert msgspec.json.encode(event) == written


def test_pages_of_many_exporters_in_a_tick_are_one_event() -> None:
    ingest = Ingest(site_of(two_racks()), {})
    for node in range(18):
        block = page(4)
        block.start, block.t_ns = 4 * node, START_NS
        ingest.of(f"exporter {node}").stage([block], START_NS, POLL_S)
    (event,) = ingest.take(1, START_NS, 1.0).events
    assert isinstance(event, PollPeriodChanged)
    assert len(event.names) == 72


def test_what_was_heard_once_is_current_for_some_of_its_polls_and_silent_soon_after() -> None:
    twin = Twin(two_racks())
    twin.tick({"gpu.temp_c": 50.0, "gpu.power_w": 400.0}, told(twin, range(72)))
    limits_s = stale_s(twin, "gpu.temp_c")
    assert (limits_s[:72] > 3 * POLL_S).all()
    assert (limits_s[72:] == 3.0).all(), "of the others nobody said anything"
    assert (stale_s(twin, "gpu.power_w_max")[:72] > 3 * POLL_S).all(), "companions come with it"
    assert (stale_s(twin, "gpu.util_pu") == 3.0).all()
    assert not twin.engine.state.tables["gpu"].learning()[:72].any()
    for _ in range(12):
        twin.tick(dt_s=POLL_S)
    (finding,) = [f for f in twin.decision.findings if f.id.startswith("silence/")]
    assert finding.count == 72, "the others are waited for until their cadence may be known"


def test_a_poll_that_never_repeats_its_value_is_no_report_on_change() -> None:
    twin = Twin(two_racks())
    twin.tick({"gpu.temp_c": 50.0}, told(twin, range(N), ("temp_c",)))
    for _ in range(20):
        twin.tick({"gpu.util_pu": 0.5}, dt_s=POLL_S)
    assert [f.id for f in twin.decision.findings if f.id.startswith("silence/")]


def test_a_slower_poll_is_waited_for_at_once() -> None:
    twin = Twin(two_racks())
    twin.tick(None, told(twin, range(N)))
    for _ in range(20):
        twin.tick({"gpu.temp_c": 50.0, "gpu.power_w": 400.0}, dt_s=POLL_S)
    learned_s = stale_s(twin, "gpu.temp_c").max()
    assert learned_s < 6 * POLL_S
    twin.tick(None, told(twin, range(N)), dt_s=0.1)
    assert stale_s(twin, "gpu.temp_c").max() == learned_s, "told again it changes nothing"
    twin.tick(None, told(twin, range(N), period_s=120.0), dt_s=0.1)
    assert stale_s(twin, "gpu.temp_c").min() > 3 * 120.0


def test_a_poll_is_kept_over_a_restart() -> None:
    twin = Twin(two_racks())
    twin.tick({"gpu.temp_c": 50.0}, told(twin, range(72)))
    assert (stale_s(twin.restarted(two_racks(), []), "gpu.temp_c") == stale_s(twin, "gpu.temp_c")).all()
    assert encode(twin.engine.dump()) == encode(twin.restarted(two_racks(), []).engine.dump())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"period_s": 0.0}, "expected a period"),
        ({"period_s": float("nan")}, "expected a period"),
        ({"signals": ("no_such",)}, "expected signals"),
        ({"table": "no_such"}, "expected signals"),
        ({"names": ("lab/h/r9",)}, "none of its entities"),
    ],
)
def test_a_period_that_cannot_be_is_refused_and_changes_nothing(more: dict[str, Any], why: str) -> None:
    twin = Twin(two_racks())
    event = told(twin, range(N))
    twin.tick({"gpu.temp_c": 50.0}, msgspec.structs.replace(event, **more))
    (record,) = twin.records("event")
    assert why in record["refused"]
    assert (stale_s(twin, "gpu.temp_c") == 3.0).all()


def test_a_newcomer_is_expected_as_often_as_its_peers() -> None:
    twin = Twin(two_racks())

    def tick(entities: range) -> None:
        for i in entities:
            twin.inbox.put(Reading("gpu", i, "temp_c", 50.0, twin.now_ns + 10 * NS), twin.now_ns + 10 * NS)
        twin.tick(dt_s=10.0)

    for _ in range(20):
        tick(range(4, 40))
    tick(range(3, 40))
    assert 30.0 < stale_s(twin, "gpu.temp_c")[3] < 100.0
    for _ in range(12):
        tick(range(4, 40))
    signal, column = find_signal("gpu.temp_c"), twin.engine.state.tables["gpu"]
    assert signal is not None
    silent = column.silent(signal, twin.now_ns)
    assert np.flatnonzero(silent).tolist() == [3], "not after 15 minutes"


@pytest.mark.long
def test_a_replay_knows_the_periods_and_decides_the_same(tmp_path: Path) -> None:
    tree = two_racks()
    site, rng = site_of(tree), np.random.default_rng(3)
    engine, ingest = Engine(site, [ThermalGuard()], []), Ingest(site, {})
    recorder = Recorder(engine, spec_of(tree), tmp_path / "run")
    for number in range(1, 190):
        now_ns = START_NS + number * NS
        if number < 40 and number % 15 == 1:
            block = page(72, power_w=float(rng.uniform(380, 420)))
            block.t_ns = now_ns
            ingest.of("exporter r1").stage([block], now_ns, POLL_S)
        frame = ingest.take(number, now_ns, 1.0)
        recorder.before(frame)
        decision = engine.tick(frame)
        recorder.after(engine, decision)
    recorder.finish(engine)
    recorder.close()
    assert engine.in_force["thermal_guard"], "its silence had time to count"
    again = Engine(site_of(tree), [ThermalGuard()], [])
    outcome = replay_frames(again, TraceReader(tmp_path / "run"), tmp_path / "run/journal.jsonl")
    assert outcome.journal_head == recorder.chain.head
    assert again.state.checksum() == engine.state.checksum()
