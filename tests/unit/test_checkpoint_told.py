"""Reports of a job on its checkpoints: robust estimates, read-backs, storage; nonsense is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import Twin, eight_nodes
from twin.catalogue import NS, find_signal
from twin.engine.job_reports import checkpoint_reported
from twin.telemetry import DURATIONS, GOOD, JobSlots, events as ev
from twin.telemetry.jobs import REPORTED

YEAR_S = 366 * 86_400.0


def running(**said: Any) -> Twin:
    """A job `a` on two nodes, that said this at its start."""
    twin = Twin(eight_nodes(max_jobs=2))
    twin.tick(None, ev.JobStarted(job="a", nodes=("r1/node0", "r1/node1"), kind="training", **said))
    twin.tick(None, dt_s=600.0)
    return twin


def tell(twin: Twin, ago_s: float = 0.0, late_s: float = 0.0, off_s: float = 0.0, **said: Any) -> str | None:
    """A report that the job made `late_s` ago, on a clock that is `off_s` ahead; the reason if refused."""
    at_ns = twin.now_ns + NS + round((off_s - late_s) * NS)
    began = {"began_ns": at_ns - round(ago_s * NS)} if ago_s else {}
    twin.tick(None, ev.CheckpointTold(**{"job": "a", "at_ns": at_ns, **began, **said}))
    why = [r["refused"] for r in twin.records("event") if r["event"]["type"] == "CheckpointTold"]
    assert len(why) + sum(r["count"] for r in twin.records("reports")) == 1
    return why[0] if why else None


def reading(twin: Twin, name: str) -> float:
    """The reading of the job, NaN if it is not good."""
    signal = find_signal(f"job.{name}")
    assert signal is not None
    table = twin.engine.state.tables["job"]
    good = table.quality_of(signal, twin.now_ns)[0] == GOOD
    return float(table.value[signal.row, 0]) if good else math.nan


def test_what_it_says_is_known_and_read_back() -> None:
    twin = running()
    jobs = twin.engine.jobs
    assert jobs.checkpoint_told_ns[0] == 0
    said = {"save_s": 20.0, "block_s": 5.0, "flush_s": 90.0, "restart_s": 300.0, "interval_s": 1800.0}
    assert tell(twin, ago_s=120.0, **said) is None
    assert jobs.checkpoint_save_s[0] == 20.0
    assert jobs.checkpoint_block_s[0] == 5.0
    assert jobs.checkpoint_flush_s[0] == 90.0
    assert jobs.checkpoint_restart_s[0] == 300.0
    assert jobs.checkpoint_interval_s[0] == 1800.0
    assert jobs.saved_ns[0] == twin.now_ns - 120 * NS
    assert jobs.checkpoint_told_ns[0] == twin.now_ns
    assert jobs.recoveries[0] == 1
    assert reading(twin, "checkpoint_save_s") == pytest.approx(20.0)
    assert reading(twin, "checkpoint_flush_s") == pytest.approx(90.0)
    assert reading(twin, "checkpoint_age_s") == 120.0
    assert reading(twin, "checkpoint_interval_readback_s") == 1800.0
    assert math.isnan(reading(twin, "progress_per_s")), "of that it said nothing"


def test_its_progress_is_read_from_the_newest_report() -> None:
    twin = running()
    tell(twin, progress_per_s=12.5)
    assert reading(twin, "progress_per_s") == pytest.approx(12.5)
    tell(twin, tier="memory", save_s=1.0, progress_per_s=10.0)
    assert reading(twin, "progress_per_s") == pytest.approx(10.0)
    tell(twin, save_s=2.0, progress_per_s=99.0, late_s=60.0)
    assert reading(twin, "progress_per_s") == pytest.approx(10.0), "an older report says nothing of now"


def test_a_save_in_memory_is_kept_apart() -> None:
    twin = running()
    jobs = twin.engine.jobs
    tell(twin, ago_s=600.0, save_s=60.0, block_s=60.0)
    tell(twin, ago_s=30.0, tier="memory", block_s=2.0, save_s=3.0, restart_s=40.0, interval_s=900.0)
    assert (jobs.checkpoint_block_s[0], jobs.checkpoint_local_block_s[0]) == (60.0, 2.0)
    assert (jobs.checkpoint_restart_s[0], jobs.checkpoint_local_restart_s[0]) == (0.0, 40.0)
    assert jobs.checkpoint_save_s[0] == 60.0
    assert jobs.saved_ns[0] == twin.now_ns - 601 * NS
    assert jobs.saved_local_ns[0] == twin.now_ns - 30 * NS
    assert reading(twin, "checkpoint_age_s") == 600.0, "that is of the durable tier"
    assert (jobs.checkpoint_interval_s[0], jobs.checkpoint_local_interval_s[0]) == (0.0, 900.0)
    assert np.isnan(reading(twin, "checkpoint_interval_readback_s")), "it said nothing of that one"
    assert reading(twin, "checkpoint_local_interval_readback_s") == 900.0
    assert jobs.recoveries[0] == 1
    tell(twin, restart_s=500.0)
    assert jobs.recoveries[0] == 1, "it has a memory tier and did not use it: a node was lost"


@pytest.mark.parametrize("field", ["save_s", "block_s", "flush_s", "restart_s"])
@pytest.mark.parametrize("lie", [0.001, 9e5])
def test_one_lie_does_not_move_an_estimate_far(field: str, lie: float) -> None:
    twin = running()
    column = getattr(twin.engine.jobs, f"checkpoint_{field}")
    for k in range(12):
        tell(twin, **{field: lie if k in (1, 6) else 50.0 + k})
        assert 50.0 <= column[0] <= 50.0 + k, k


def test_what_was_said_at_the_start_is_a_measurement_like_another() -> None:
    twin = running(checkpoint_save_s=30.0, checkpoint_restart_s=200.0)
    tell(twin, save_s=9e5)
    assert twin.engine.jobs.checkpoint_save_s[0] == 30.0
    tell(twin, save_s=40.0)
    assert twin.engine.jobs.checkpoint_save_s[0] == 40.0


def test_what_has_really_changed_is_believed_after_three_times() -> None:
    twin = running()
    for value in (60.0, 60.0, 60.0, 60.0, 60.0, 240.0, 240.0, 240.0):
        tell(twin, save_s=value)
    assert twin.engine.jobs.checkpoint_save_s[0] == 240.0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"save_s": math.nan}, "expected save_s of 0"),
        ({"block_s": -1.0}, "expected block_s of 0"),
        ({"flush_s": math.inf}, "expected flush_s of 0"),
        ({"restart_s": 1e7}, "expected restart_s of 0"),
        ({"interval_s": 1e9}, "expected interval_s of 0"),
        ({"interval_s": -math.inf}, "expected interval_s of 0"),
        ({}, "says nothing"),
        ({"progress_per_s": -1.0}, "expected progress_per_s of 0"),
        ({"progress_per_s": math.nan}, "expected progress_per_s of 0"),
        ({"progress_per_s": 2e6}, "expected progress_per_s of 0"),
        ({"remaining_s": -1.0}, "expected remaining_s of 0"),
        ({"remaining_s": math.nan}, "expected remaining_s of 0"),
        ({"remaining_s": 2e7}, "expected remaining_s of 0"),
        ({"job": "b", "save_s": 1.0}, "no job b has a slot"),
        ({"save_s": 1.0, "off_s": 9 * 86_400.0}, "its clock reads 777600 s from ours"),
        ({"save_s": 1.0, "late_s": 9 * 86_400.0}, "its clock reads -777600 s from ours"),
        ({"at_ns": 1, "save_s": 1.0}, "check its host"),
        ({"at_ns": -5, "save_s": 1.0}, "check its host"),
        ({"at_ns": 2**80, "save_s": 1.0}, "check its host"),
        ({"ago_s": -100.0}, "holds a state of -100 s ago"),
        ({"ago_s": YEAR_S + 10}, "check its clock"),
        ({"began_ns": -1}, "check its clock"),
    ],
)
def test_nonsense_is_refused_with_words_and_changes_nothing(said: dict[str, Any], why: str) -> None:
    twin = running(checkpoint_save_s=30.0)
    before = {k: np.copy(v) for k, v in twin.engine.jobs.dump().items() if isinstance(v, np.ndarray)}
    told = tell(twin, **said)
    assert told is not None
    assert why in told
    after = twin.engine.jobs.dump()
    for name, column in before.items():
        assert np.array_equal(column, after[name], equal_nan=column.dtype.kind == "f"), name


def test_twice_or_too_late_changes_nothing_newer() -> None:
    twin = running()
    first = ev.CheckpointTold(
        job="a", at_ns=twin.now_ns, began_ns=twin.now_ns - 50 * NS, restart_s=90.0, interval_s=600.0
    )
    twin.tick(None, first, first)
    assert [r["refused"] for r in twin.records("event")] == ["heard already"]
    assert twin.records("reports") == [{"kind": "reports", "tier": "durable", "count": 1}]
    twin.tick(None, dt_s=60.0)
    tell(twin, ago_s=10.0, interval_s=1200.0, restart_s=91.0)
    jobs = twin.engine.jobs
    newest = jobs.saved_ns[0]
    twin.tick(None, dt_s=5.0)
    twin.tick(None, first)  # again, out of order
    assert jobs.saved_ns[0] == newest
    assert jobs.checkpoint_interval_s[0] == 1200.0
    assert jobs.recoveries[0] == 2
    assert reading(twin, "checkpoint_interval_readback_s") == 1200.0


def test_what_another_source_read_later_stands() -> None:
    twin = running()
    tell(twin, ago_s=5.0)  # from now on its lag is known
    twin.tick({"job.checkpoint_interval_readback_s": 333.0}, dt_s=400.0)
    tell(twin, late_s=300.0, interval_s=1200.0, ago_s=9.0)
    assert reading(twin, "checkpoint_interval_readback_s") == 333.0
    assert twin.engine.jobs.checkpoint_interval_s[0] == 1200.0
    tell(twin, interval_s=1200.0)
    assert reading(twin, "checkpoint_interval_readback_s") == 1200.0


def test_reports_push_no_other_id_out() -> None:
    twin = running()
    for k in range(3):
        tell(twin, id=f"job/a#{k}", save_s=10.0)
    assert not [key for key in twin.engine.intake.seen if key.startswith("CheckpointTold")]


def test_after_a_recovery_it_holds_what_it_came_back_to() -> None:
    twin = running()
    tell(twin, ago_s=100.0)
    tell(twin, ago_s=5000.0, restart_s=300.0)
    assert twin.engine.jobs.saved_ns[0] == twin.now_ns - 5000 * NS


@pytest.mark.parametrize("off_s", [-86_400.0, -3600.0, 0.0, 3600.0])
def test_a_clock_that_is_off_still_tells_how_old_a_save_is(off_s: float) -> None:
    twin = running()
    tell(twin, off_s=off_s, ago_s=100.0, interval_s=600.0)
    saved_s = (twin.now_ns - twin.engine.jobs.saved_ns[0]) / NS
    assert saved_s == pytest.approx(100.0, abs=2.0)
    twin.tick(None, dt_s=60.0)
    tell(twin, off_s=off_s, late_s=300.0, ago_s=10.0)  # it waited for five minutes
    saved_s = (twin.now_ns - twin.engine.jobs.saved_ns[0]) / NS
    if off_s <= 0.0:
        assert saved_s == pytest.approx(162.0, abs=3.0), "what waited tells of no newer save than before"
    assert twin.engine.jobs.checkpoint_told_ns[0] <= twin.now_ns


def test_a_slot_forgets_with_its_job_and_a_new_start_of_the_same_does_not() -> None:
    twin = running(checkpoint_interval_s=500.0)
    said = {"save_s": 20.0, "block_s": 5.0, "flush_s": 90.0, "restart_s": 300.0, "interval_s": 1800.0}
    tell(twin, ago_s=120.0, **said)
    tell(twin, tier="memory", ago_s=12.0, **said)
    jobs = twin.engine.jobs
    held = {name: np.copy(getattr(jobs, name)[0]) for name in REPORTED}
    twin.tick(None, ev.JobStarted(job="a", nodes=("r1/node5",), kind="training"))
    assert jobs.nodes[0].tolist() == [5]
    assert all(np.array_equal(held[name], getattr(jobs, name)[0]) for name in REPORTED)
    assert (jobs.checkpoint_save_s[0], jobs.checkpoint_interval_s[0]) == (20.0, 1800.0)
    twin.tick(None, ev.JobEnded(job="a"))
    assert tell(twin, save_s=1.0) == "no job a has a slot"
    twin.tick(None, dt_s=601.0)
    twin.tick(None, ev.JobStarted(job="c", nodes=("r1/node2",), kind="training"))
    assert jobs.slot_of == {"c": 0}
    assert all(not np.any(getattr(jobs, name)[0]) for name in (*REPORTED, *DURATIONS))
    assert np.isnan(jobs.checkpoint_past[0]).all()
    assert math.isnan(reading(twin, "checkpoint_interval_readback_s"))


def test_all_of_it_survives_storage_and_another_site() -> None:
    twin = running(checkpoint_save_s=44.0)
    tell(twin, ago_s=120.0, block_s=5.0, save_s=20.0, interval_s=1800.0)
    jobs = twin.engine.jobs
    back = JobSlots(jobs.n, 8)
    back.restore(jobs.dump())
    moved = jobs.remapped(4, np.arange(4, dtype=np.int32), 5)
    for some in (back, moved):
        for name in (*REPORTED, "checkpoint_past"):
            assert np.array_equal(getattr(some, name)[:2], getattr(jobs, name), equal_nan=True), name
            assert len(getattr(some, name)) == some.n
    again = twin.restarted(eight_nodes(max_jobs=2), [])
    report = ev.CheckpointTold(job="a", at_ns=twin.now_ns + NS // 2, save_s=9e5, interval_s=700.0)
    for other in (twin, again):
        other.tick(None, report)
        assert [r["count"] for r in other.records("reports")] == [1]
    assert twin.engine.checksum() == again.engine.checksum()


def test_a_snapshot_that_knew_less_is_read() -> None:
    twin = running(checkpoint_save_s=44.0)
    data = twin.engine.jobs.dump()
    for name in (*REPORTED, "checkpoint_past"):
        del data[name]
    back = JobSlots(2, 8)
    back.restore(data)
    assert back.checkpoint_save_s[0] == 44.0
    assert back.checkpoint_past.shape == (2, len(DURATIONS) + 1, 5)
    assert not back.saved_ns.any()


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "at_ns": st.integers(-(2**64), 2**64),
                "began_ns": st.integers(-(2**64), 2**64),
                "save_s": st.floats(),
                "block_s": st.floats(),
                "flush_s": st.floats(0.0, 1e6),
                "restart_s": st.floats(0.0, 1e6),
                "interval_s": st.floats(0.0, 1e7),
                "tier": st.sampled_from(["durable", "memory"]),
                "job": st.sampled_from(["a", "", "nobody"]),
            },
        ),
        max_size=12,
    )
)
def test_whatever_is_said_all_stays_finite_and_in_bounds(said: list[dict[str, Any]]) -> None:
    twin = Twin(eight_nodes(max_jobs=2))
    twin.tick(None, ev.JobStarted(job="a", nodes=("r1/node0",), kind="training"))
    jobs, state = twin.engine.jobs, twin.engine.state
    for report in said:
        checkpoint_reported(ev.CheckpointTold(**{"job": "a", **report}), jobs, state)
    for name in DURATIONS:
        assert ((getattr(jobs, name) >= 0) & (getattr(jobs, name) <= 1e6)).all()
    for name in ("saved_ns", "saved_local_ns", "checkpoint_told_ns"):
        assert getattr(jobs, name).max() <= twin.now_ns
    twin.tick(None)


@pytest.mark.parametrize("off_s", [3 * 3600.0, 6 * 86_400.0])
def test_a_clock_that_was_ahead_and_is_set_right_is_believed_at_once(off_s: float) -> None:
    twin = running()
    jobs = twin.engine.jobs
    assert tell(twin, ago_s=50.0, off_s=off_s, interval_s=600.0, restart_s=90.0) is None
    for k in range(3):
        assert tell(twin, ago_s=10.0, late_s=0.5, interval_s=1200.0 + k, restart_s=90.0) is None
        assert jobs.checkpoint_interval_s[0] == 1200.0 + k
        assert reading(twin, "checkpoint_interval_readback_s") == pytest.approx(1200.0 + k)
        assert twin.now_ns - 20 * NS < jobs.saved_ns[0] <= twin.now_ns
    assert jobs.recoveries[0] == 4
    assert tell(twin, late_s=30.0, interval_s=5.0) is None
    assert jobs.checkpoint_interval_s[0] == 1202.0, "what comes late is old as ever"


@pytest.mark.parametrize("off_s", [-600.0, -3600.0])
def test_a_clock_that_is_set_back_is_believed_after_as_many_reports_as_are_remembered(off_s: float) -> None:
    twin = running()
    jobs = twin.engine.jobs
    for k in range(6):
        tell(twin, ago_s=10.0, late_s=0.5, interval_s=600.0 + k)
        twin.tick(None, dt_s=60.0)
    heard = []
    for k in range(8):
        tell(twin, ago_s=10.0, late_s=0.5, off_s=off_s, interval_s=1200.0 + k)
        heard.append(jobs.checkpoint_interval_s[0] == 1200.0 + k)
        twin.tick(None, dt_s=60.0)
    assert heard == [False] * 4 + [True] * 4
    assert (twin.now_ns - jobs.saved_ns[0]) / NS == pytest.approx(70.0, abs=3.0)


def test_the_journal_counts_reports_and_shows_the_first_refused() -> None:
    twin = running()
    at_ns = twin.now_ns + NS
    good = [ev.CheckpointTold(job="a", at_ns=at_ns - k, save_s=10.0) for k in range(40)]
    memory = [ev.CheckpointTold(job="a", at_ns=at_ns - k, tier="memory", block_s=1.0) for k in range(3)]
    bad = [ev.CheckpointTold(job=f"b{k}", at_ns=at_ns, save_s=10.0) for k in range(100)]
    twin.tick(None, *good, *memory, *bad)
    refused = [r for r in twin.records("event") if "refused" in r]
    assert [r["event"]["job"] for r in refused] == [f"b{k}" for k in range(16)]
    assert refused[0]["refused"] == "no job b0 has a slot"
    assert twin.records("reports") == [
        {"kind": "reports", "tier": "durable", "count": 40},
        {"kind": "reports", "tier": "memory", "count": 3},
        {"kind": "reports", "refused": "as the ones before", "count": 84},
    ]
    assert twin.engine.intake.counts["refused_reports"] == 100
