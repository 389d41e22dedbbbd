"""Poison: an engine that fails on an event, on readings or in a state is restarted, and the ticks go on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.support.golden_story import Story, engine_for
from tests.support.poisoned_run import PoisonedRun, frames
from tests.support.sampled_cases import sampled
from twin.catalogue import NS
from twin.cli.main import main
from twin.contracts import QuarantineRecord
from twin.engine import Engine
from twin.report import sentence
from twin.run import (
    OPEN,
    Entry,
    Poison,
    Quarantine,
    TraceReader,
    find_poison,
    journal_lines,
    open_recorded,
    quarantine,
    replay_frames,
    resume,
)
from twin.telemetry import AuthorityChanged, FitFailed, Frame, JobStarted, TableUpdate, TicksSkipped

pytestmark = pytest.mark.slow
Fails = Callable[[Engine, Frame], bool]


@pytest.fixture(autouse=True, scope="module")
def _made() -> None:
    """The frames, before an engine is made to fail."""
    frames()


def outlook() -> Frame:
    """The frame with the outlook o2."""
    return next(f for f in frames() if has(f, "o2"))


def failing(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    """The engine raises half-way through a tick where `fails` says so."""
    apply = Engine._heed

    def heed(self: Engine, events: Any, records: Any) -> Any:
        out = apply(self, events, records)
        frame = getattr(self, "poison_frame", None)
        if frame is not None and fails(self, frame):
            raise RuntimeError("index 7 is out of bounds")
        return out

    tick = Engine.tick

    def begun(self: Engine, frame: Frame) -> Any:
        self.poison_frame = frame  # type: ignore[attr-defined]
        return tick(self, frame)

    monkeypatch.setattr(Engine, "_heed", heed)
    monkeypatch.setattr(Engine, "tick", begun)


def has(frame: Frame, key: str) -> bool:
    return any(event.id == key for event in frame.events)


def hot(frame: Frame) -> bool:
    """Readings of racks at one instant."""
    return any(isinstance(u, TableUpdate) and u.table == "rack" for u in frame.updates) and (
        frame.now_ns == frames()[8].now_ns
    )


def check_replay(folder: Path) -> tuple[Any, Engine]:
    """The run is made again from its trace, byte by byte."""
    engine, _, since = open_recorded(folder, engine_for)
    outcome = replay_frames(engine, TraceReader(folder), folder / OPEN, since=since)
    assert outcome.damage == []
    return outcome, engine


def notes(folder: Path) -> list[QuarantineRecord]:
    found = [msgspec.json.decode(line, type=Entry).record for line in journal_lines(folder / OPEN)]
    return [r for r in found if isinstance(r, QuarantineRecord)]


@pytest.mark.long
def test_an_event_on_which_the_engine_fails_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    run = PoisonedRun(folder, frames())
    engine = run.live()
    assert (run.deaths, run.starts) == (1, 2)
    [record] = notes(folder)
    assert (record.parts, record.whole) == (("event OutlookTold o2",), False)
    assert "index 7 is out of bounds" in sentence(record)
    # The quarantine has the whole frame, as it came.
    [kept] = TraceReader(folder / record.file)
    assert kept.events == outlook().events
    assert len(kept.updates) == len(outlook().updates)
    outcome, again = check_replay(folder)
    assert len(outcome.left_out) == 1
    assert again.checksum() == engine.checksum()
    # All but that event is as in a run that never had it.
    monkeypatch.undo()
    given = [dataclasses.replace(f, events=tuple(e for e in f.events if e.id != "o2")) for f in frames()]
    other = PoisonedRun(tmp_path / "other", given)
    assert other.live().checksum() == engine.checksum()


@pytest.mark.long
def test_readings_on_which_the_engine_fails_are_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    failing(monkeypatch, lambda _, frame: hot(frame))
    run = PoisonedRun(folder, frames())
    run.live()
    assert run.deaths == 1
    [record] = notes(folder)
    assert all(part.startswith("rack ") for part in record.parts)
    assert len(record.parts) == sum(u.table == "rack" for u in frames()[8].updates)
    check_replay(folder)


def test_without_it_the_same_failure_would_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash loop that the quarantine ends: nothing is found, so each start fails as the one before."""
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    monkeypatch.setattr("twin.run.recovery.ROUNDS", 2)
    monkeypatch.setattr("twin.run.recovery.find_poison", lambda engine, frame: NO_POISON)
    with pytest.raises(quarantine.StorageError, match="again and again"):
        PoisonedRun(tmp_path / "run", frames()).live()


NO_POISON = Poison(
    tick=0, now_ns=0, parts=(), names=(), marks=(), tables=(), whole=False, error="", traceback=""
)


@pytest.mark.long
@pytest.mark.parametrize("how", sampled(["crashes", "killed", "hangs"], "killed", "hangs"))
def test_what_ends_or_hangs_the_process_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The first time an exception stands for the crash; in the copies it is one."""
    parent, tick = os.getpid(), Engine.tick

    def crash(self: Engine, frame: Frame) -> Any:
        if has(frame, "o2"):
            if os.getpid() == parent:
                raise RuntimeError("the process ends here")
            if how != "hangs":
                os.kill(os.getpid(), signal.SIGTRAP if how == "crashes" else signal.SIGKILL)
            while True:
                pass
        return tick(self, frame)

    monkeypatch.setattr(Engine, "tick", crash)
    monkeypatch.setattr(quarantine, "PROBE_S", 0.4 if how == "hangs" else 10.0)
    run = PoisonedRun(tmp_path / "run", frames()[:14])
    run.live()
    assert run.deaths == 1
    [record] = notes(tmp_path / "run")
    assert record.parts == ("event OutlookTold o2",)
    assert {"crashes": "signal 5", "killed": "signal 9", "hangs": "did not end"}[how] in record.error
    check_replay(tmp_path / "run")


@pytest.mark.parametrize("how", ["signal 9", "signal 15", "MemoryError", "no copy"])
def test_a_copy_that_is_killed_once_says_nothing_of_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A copy dies first if memory is short, or cannot be made: the tick is innocent, and runs."""
    folder = tmp_path / "run"
    run = PoisonedRun(folder, frames()[:14])
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    begun = run.start()
    assert not run.go_on(*begun)
    begun[1].close()
    monkeypatch.undo()
    texts = {"MemoryError": "Traceback\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB"}

    def aside(*_: object) -> str:
        if how == "no copy":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return texts.get(how, f"{quarantine.ENDED} {how[7:]}")

    monkeypatch.setattr(quarantine, "tick_aside", aside)
    back = resume(folder, engine_for)
    assert back.poisons == []
    assert back.engine.state.tick == outlook().tick


@pytest.mark.long
@pytest.mark.parametrize("step", sampled(range(3), 1))
def test_a_start_that_is_killed_while_it_examines_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before the frame is kept, between its two files, and behind them."""
    folder = tmp_path / "run"
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    run = PoisonedRun(folder, frames()[:14])
    run.starts = 1
    begun = run.start()
    assert not run.go_on(*begun)
    begun[1].close()
    if (pid := os.fork()) == 0:
        write, written = quarantine.atomic_write, []

        def killed(path: Path, content: Any, *more: Any) -> None:
            if len(written) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            written.append(path)
            write(path, content, *more)
            if step == 2 and len(written) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        quarantine.atomic_write = killed  # type: ignore[assignment]
        try:
            resume(folder, engine_for)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    run.live()
    assert run.deaths == 0
    assert len(list(folder.glob("poison-*.json"))) == 1
    check_replay(folder)


def test_a_tick_that_was_done_and_now_fails_is_found_in_the_same_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version fails on what the one before took: its decisions stand in the journal."""
    folder = tmp_path / "run"
    run = PoisonedRun(folder, frames()[:11])
    begun = run.start()
    assert run.go_on(*begun)
    begun[1].close()
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    back = resume(folder, engine_for)
    assert [p.names for p in back.poisons] == [("event OutlookTold o2",)]
    assert back.engine.state.tick == 10
    assert not (folder / "resuming").exists()
    assert resume(folder, engine_for).engine.checksum() == back.engine.checksum()


def test_a_state_that_fails_with_any_input_costs_a_tick_then_the_trace_then_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the tick is left out. Twice: back to the snapshot. Thrice: the twin begins anew."""
    folder = tmp_path / "run"
    job = frames()[5].events[0]
    assert isinstance(job, JobStarted)

    def fails(engine: Engine, frame: Frame) -> bool:
        return frame.now_ns >= frames()[13].now_ns and "train" in engine.jobs.names

    failing(monkeypatch, fails)
    run = PoisonedRun(folder, frames())
    engine = run.live()
    assert run.deaths == 3
    texts = " | ".join(run.faults)
    assert "with any input" in texts
    assert "begins again at the snapshot of tick 11" in texts
    assert "begins anew" in texts
    assert engine.state.now_ns == frames()[-1].now_ns
    assert [r.whole for r in notes(folder)] == [True, True, True]
    assert len(Quarantine(folder).poisons) == 3
    assert check_replay(folder)[0].compared_lines > 0  # of what began anew, from its own snapshot


def test_a_state_that_fails_once_costs_one_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    failing(monkeypatch, lambda _, frame: frame.now_ns == frames()[13].now_ns)
    run = PoisonedRun(folder, frames())
    engine = run.live()
    assert run.deaths == 1
    outcome, again = check_replay(folder)
    assert again.checksum() == engine.checksum()
    assert outcome.ticks == len(frames()) - 1


@pytest.mark.long
def test_what_fails_again_and_again_is_left_out_from_the_third_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def fails(_: Engine, frame: Frame) -> bool:
        late = frame.now_ns >= frames()[8].now_ns
        return late and any(u.table == "gpu" for u in frame.updates)

    failing(monkeypatch, fails)
    run = PoisonedRun(folder, frames())
    run.live()
    assert run.deaths == 3
    assert run.left_out == len(frames()) - 8 - 3
    check_replay(folder)


def test_an_event_that_was_left_out_is_left_out_when_it_comes_again(tmp_path: Path) -> None:
    store, frame = Quarantine(tmp_path), outlook()
    engine = engine_for(Story(0).spec)
    poison = find_poison(engine, frame, lambda _, f: "Error: no" if has(f, "o2") else "")
    store.keep(poison, frame, "", b"")
    later = dataclasses.replace(frame, now_ns=frame.now_ns + 10**6 * NS)
    rest, left_out = Quarantine(tmp_path).without_known(later)
    assert left_out == ["event OutlookTold o2"]
    assert not has(rest, "o2")
    assert len(rest.updates) == len(frame.updates)


def test_the_bound_of_failures_holds_back_neither_another_leader_nor_who_disarms(tmp_path: Path) -> None:
    """And what another version failed on holds back nothing."""
    store, at = Quarantine(tmp_path), outlook()
    events = (
        *(AuthorityChanged(author="ada", policy=f"p{n}", authority="off") for n in range(3)),
        *(FitFailed(fit="f", model="m", why=f"{n}") for n in range(3)),
    )
    for n, event in enumerate(events):
        frame = dataclasses.replace(at, now_ns=at.now_ns + n, updates=(), counts=(), events=(event,))
        store.keep(
            find_poison(cast(Engine, None), frame, lambda _, f: "no" if f.events else ""), frame, "", b""
        )
    later = dataclasses.replace(at, now_ns=at.now_ns + NS, updates=(), counts=(), events=events)
    assert store.without_known(later)[0].events == events[:3]
    much_later = dataclasses.replace(later, now_ns=at.now_ns + 4000 * NS)
    assert store.without_known(much_later)[0].events == events  # without an id they need not be the same
    store.poisons = {k: msgspec.structs.replace(p, version="0") for k, p in store.poisons.items()}
    assert store.without_known(later)[0].events == events


@pytest.mark.parametrize("seed", range(20))
def test_any_few_parts_are_found_and_no_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    events = tuple(TicksSkipped(id=f"s{n}", count=1) for n in range(int(rng.integers(1, 200))))
    frame = dataclasses.replace(outlook(), events=events)
    first = len(frame.updates) + len(frame.counts)
    guilty = set(rng.choice(len(events), size=min(len(events), int(rng.integers(0, 5))), replace=False))
    ids = {events[n].id for n in guilty}
    asked = []

    def probe(_: Engine, rest: Frame) -> str:
        asked.append(rest)
        return "ValueError: no" if any(e.id in ids for e in rest.events) else ""

    poison = find_poison(cast(Engine, None), frame, probe)
    assert poison.parts == tuple(sorted(first + n for n in guilty))
    assert bool(poison.error) == bool(guilty)
    assert len(asked) <= 2 + (len(guilty)) * 10


@pytest.mark.long
def test_the_command_tells_and_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    failing(monkeypatch, lambda _, frame: has(frame, "o2"))
    PoisonedRun(folder, frames()[:14]).live()
    assert main(["trace", "quarantine", str(folder), "--again", "--format", "json"]) == 1
    [row] = json.loads(capsys.readouterr().out)["left_out"]
    assert row["again"] == "RuntimeError: index 7 is out of bounds"
    monkeypatch.undo()
    assert main(["trace", "quarantine", str(folder), "--again"]) == 0
    assert "passes" in capsys.readouterr().out
    [kept] = folder.glob("poison-*.rt")
    kept.rename(kept.with_suffix(".away"))
    assert main(["trace", "quarantine", str(folder), "--again"]) == 0
    assert "tick 10: cannot be repeated" in capsys.readouterr().out
    kept.with_suffix(".away").rename(kept)
    assert main(["trace", "replay", "--trace", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "left out event OutlookTold o2" in out
    assert "equal to its journal" in out


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    for format_of in ("table", "json"):
        assert main(["trace", "quarantine", str(tmp_path), "--format", format_of]) == 1
        out = capsys.readouterr()
        assert not out.out
        assert "expected the folder of a run, such as state/run" in " ".join(out.err.split())
