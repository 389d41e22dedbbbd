"""Arrivals cut into frames, runs written and compared, frames checked against their site."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.contract_plugins import START_NS, engine_of, site
from twin.catalogue import NS, StorageError
from twin.cli.main import main
from twin.config import spec_of
from twin.run import (
    Arrival,
    Cutter,
    Outcome,
    Recorder,
    TraceReader,
    TraceWriter,
    recordings,
    replay_frames,
    summary,
)
from twin.run.recordings import check_fits
from twin.site import SiteSpec
from twin.telemetry import Block, Counts, Frame, Reading, TableUpdate, events as ev


def arrival(seconds: float, *items: Any) -> Arrival:
    return Arrival(START_NS + round(seconds * NS), list(items))


def power(seconds: float, value: float = 9e3, rack: int = 0) -> Reading:
    return Reading("rack", rack, "power_w", value, START_NS + round(seconds * NS))


def cut(arrivals: Iterable[Arrival], dt_s: float = 1.0, racks: int = 2) -> tuple[list[Frame], Cutter]:
    cutter = Cutter(engine_of(site(racks), [], []), dt_s, lambda now_ns, site_hash: [])
    return list(cutter.frames(arrivals)), cutter


def since(frame: Frame) -> float:
    return (frame.now_ns - START_NS) / NS


def test_nothing_arrives_no_frame() -> None:
    assert cut([])[0] == []


def test_ticks_are_nominal_and_without_holes() -> None:
    frames, _ = cut([arrival(0.2, power(0.2)), arrival(3.7, power(3.7)), arrival(4.0, power(4.0))])
    assert [since(f) for f in frames] == [1, 2, 3, 4]
    assert [f.tick for f in frames] == [0, 1, 2, 3]
    assert [f.dt_s for f in frames] == [1, 1, 1, 1]
    assert [len(f.updates) > 0 for f in frames] == [True, False, False, True]


def test_an_urgent_reading_closes_the_frame_but_not_at_once_again() -> None:
    leak = lambda s, rack: Reading("rack", rack, "leak_state", 1.0, START_NS + round(s * NS))  # noqa: E731
    # Of two racks, one after the other; a leak that lasts is urgent once.
    arrivals = [arrival(0.1), arrival(1.3, leak(1.3, 0)), arrival(1.32, leak(1.32, 1)),
                arrival(1.9, leak(1.9, 0)), arrival(2.5, leak(2.5, 1))]  # fmt: skip
    frames, _ = cut(arrivals)
    assert [(since(f), f.urgent) for f in frames] == [
        (1, False), (1.3, True), (1.4, True), (2, False), (3, False),
    ]  # fmt: skip
    assert sum(f.dt_s for f in frames) == pytest.approx(3.0)


def test_a_long_gap_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_QUIET_TICKS", 100)
    frames, _ = cut([arrival(0.5, power(0.5)), arrival(1e6, power(1e6)), arrival(1e6 + 1)])
    assert len(frames) < 10
    skipped = [e for f in frames for e in f.events if isinstance(e, ev.TicksSkipped)]
    assert len(skipped) == 1
    assert skipped[0].count == pytest.approx(1e6, rel=1e-3)
    assert since(frames[-1]) == pytest.approx(1e6 + 1, abs=1)
    assert [f.tick for f in frames] == list(range(len(frames)))


def test_a_replaced_device_counts_afresh() -> None:
    """The new device's counter is not the old one's: no growth, no jump."""

    def energy(seconds: float, raw: int) -> Block:
        t_ns = START_NS + round(seconds * NS)
        none = np.empty((0, 1), np.float32)
        return Block("gpu", 0, (), none, ("energy_mj",), np.array([[raw]], np.int64), t_ns)

    other = ev.EntityReplaced(table="gpu", name="contract/h1/r0/node0/gpu0", serial="S2")
    arrivals = [arrival(0.5, energy(0.5, 1000)), arrival(1.5, energy(1.5, 2000)), arrival(2.5, other),
                arrival(2.6, energy(2.6, 500_000)), arrival(3.5, energy(3.5, 500_700))]  # fmt: skip
    frames, cutter = cut(arrivals)
    gains = [int(c.gain[0, 0]) for f in frames for c in f.counts]
    assert gains == [0, 1000, 0, 700]
    assert cutter.inbox.counts["counter_jumps"] == 0


def test_a_device_that_tells_another_serial_counts_afresh() -> None:
    """As above, by what the device says of itself; the first serial and one that is known change nothing."""

    def energy(seconds: float, raw: int) -> Block:
        t_ns = START_NS + round(seconds * NS)
        none = np.empty((0, 1), np.float32)
        return Block("gpu", 0, (), none, ("energy_mj",), np.array([[raw]], np.int64), t_ns)

    name = "contract/h1/r0/node0/gpu0"
    first, again, other = (
        ev.IdentityTold(id=f"{k}", table="gpu", name=name, serial=s)
        for k, s in enumerate(("S-0001", "S-0001", "S-0002"))
    )
    arrivals = [arrival(0.5, energy(0.5, 1000)), arrival(1.5, first, energy(1.5, 2000)), arrival(2.2, again),
                arrival(2.5, other), arrival(2.6, energy(2.6, 500_000)),
                arrival(3.5, energy(3.5, 500_700))]  # fmt: skip
    engine = engine_of(site(2), [], [])
    cutter = Cutter(engine, 1.0, lambda *_: [])
    gains, events = [], []
    for frame in cutter.frames(arrivals):
        gains += [int(c.gain[0, 0]) for c in frame.counts]
        events += list(frame.events)
        engine.tick(frame)
    assert gains == [0, 1000, 0, 700]
    assert events == [first, other]
    assert cutter.inbox.counts["counter_jumps"] == 0
    assert engine.intake.serials == {f"gpu:{name}": "S-0002"}


def test_behind_a_change_of_the_site_readings_are_in_its_numbers() -> None:
    racks = [{"name": n, "profile": "gb200-nvl72", "nodes": 2} for n in ("q", "r0", "r1")]
    later = spec_of({"site": "contract", "max_jobs": 4, "halls": [{"name": "h1", "racks": racks}]}, None, "x")
    change = ev.SiteChanged(site_hash=later.digest(), spec=later.packed())
    frames, cutter = cut(
        [arrival(0.5, power(0.5, rack=1)), arrival(1.5, power(1.5, rack=1), change, power(1.6, rack=2))]
    )
    assert cutter.site.sizes["rack"] == 3
    (update,) = (u for u in frames[1].updates if u.table == "rack")
    assert update.entity is not None
    assert update.entity.tolist() == [2]
    assert frames[1].events == (change,)


def update(table: str, row: int, entity: list[int] | None, m: int) -> TableUpdate:
    index = None if entity is None else np.array(entity, np.int32)
    return TableUpdate(
        table, np.array([row], np.int32), index, np.zeros((1, m), np.int32), np.zeros(m, np.int64)
    )


def counts(row: int, entity: int) -> Counts:
    zero = np.zeros((1, 1), np.int64)
    return Counts("gpu", np.array([row], np.int32), np.array([entity], np.int32), zero, zero, zero[0])


@pytest.mark.parametrize(
    "part",
    [
        update("rack", 0, [2], 1),
        update("rack", 0, None, 3),
        update("rack", 99, None, 2),
        update("rack", -1, None, 2),
        update("moon", 0, None, 2),
        update("rack", 0, [1, 1], 2),
        counts(44, 1),
        counts(0, 16),
    ],
)
def test_frames_that_do_not_fit_their_site_are_refused(part: Any) -> None:
    frame = Frame(7, START_NS, 1.0)
    check_fits(frame, site())
    field = "counts" if isinstance(part, Counts) else "updates"
    with pytest.raises(StorageError, match="tick 7"):
        check_fits(dataclasses.replace(frame, **{field: (part,)}), site())


def test_a_change_to_no_site_is_refused() -> None:
    for packed in (b"", b"{}", b'{"file":{},"profiles":{}}', b"\xff"):
        frame = Frame(7, START_NS, 1.0, events=(ev.SiteChanged(site_hash="x", spec=packed),))
        with pytest.raises(StorageError, match="tick 7: changes the site to none"):
            check_fits(frame, site())


def test_a_recorder_without_a_folder_keeps_the_chain_only(tmp_path: Path) -> None:
    """The head of a run is the same, written or not."""
    heads = []
    for folder in (None, tmp_path / "run"):
        engine = engine_of(site(), [], [])
        recorder = Recorder(engine, SiteSpec({}, {}), folder)
        for tick in range(3):
            frame = Frame(tick, START_NS + tick * NS, 1.0)
            recorder.before(frame)
            recorder.after(engine, engine.tick(frame))
        recorder.finish(engine)
        recorder.close()
        heads.append(recorder.chain.head)
    assert heads[0] == heads[1]
    outcome = replay_frames(
        engine_of(site(), [], []), TraceReader(tmp_path / "run"), tmp_path / "run/journal.jsonl"
    )
    assert (outcome.ticks, outcome.journal_head) == (3, heads[0])


def test_racks_of_the_same_name_in_two_halls_are_told_apart() -> None:
    halls = [{"name": h, "racks": [{"name": "r1"}]} for h in ("h1", "h2")]
    halls[0]["racks"].append({"name": "only"})  # type: ignore[union-attr, attr-defined]
    where = recordings.build_site(spec_of({"site": "s", "halls": halls}, None, "s"))
    result = summary(engine_of(where, [], []), Outcome(), None, 0.0)
    assert set(result["racks"]) == {"s/h1/r1", "only", "s/h2/r1"}
    assert result["power_tree"]["residual_pu"] is None


@pytest.mark.parametrize("kind", ["no_such_module:Thing", "this:Zen"])
def test_a_trace_does_not_bring_code_of_its_own(tmp_path: Path, kind: str) -> None:
    """A recorded run names its site; a plug-in named there is loaded only if the user says so."""
    spec = SiteSpec({"site": "x", "policies": {"p": {"kind": kind}}}, {})
    writer = TraceWriter(tmp_path, spec.digest(), spec.packed())
    writer.write(Frame(0, 10**9, 1.0))
    writer.close()
    assert main(["trace", "replay", "--trace", str(tmp_path)]) == 1
    assert "this" not in sys.modules  # nothing was imported
