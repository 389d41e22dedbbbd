"""A recorded run is made again byte for byte, in journal, trace and state. Where it is not, the
first tick and field that differ are named."""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from policies import REGISTRY
from tests.golden.conftest import Run
from tests.support.golden_story import (
    CAP,
    CHANGED_AT,
    FEED_LOST_AT,
    LEAK_AT,
    OUTLOOK_FROM,
    SECOND_LEAK_AT,
    START_NS,
    Story,
    engine_for,
    record,
    spec,
)
from tests.support.journal_bodies import bodies_of
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, Divergence
from twin.cli.main import main
from twin.contracts import OtherRecord, journal_schema
from twin.engine.engine import MARK_AT, MARK_EVERY
from twin.run import Cutter, Entry, Recorder, TraceReader, journal_lines, manifest, replay_frames
from twin.run.journal import Chain
from twin.run.trace import MAGIC, TraceEncoder, record as framed
from twin.telemetry import Frame, events as ev


@pytest.mark.long
def test_the_story_is_not_empty(run: Run) -> None:
    """Otherwise the golden tests would prove nothing."""
    kinds = collections.Counter(r["kind"] for d in run.kept.decisions for r in bodies_of(d))
    assert kinds["site"] == 1
    assert kinds["finding"] >= 1
    assert kinds["maintenance_expired"] == 1
    assert run.engine.suspended == {}
    events = [e for f in run.kept.frames for e in f.events]
    fitted = [e for e in events if isinstance(e, ev.ModelFitted)]
    assert len(fitted) == 2
    assert run.engine.intake.params_hash == {"persistence": fitted[1].params_hash}
    failed = [e for e in events if isinstance(e, ev.FitFailed)]
    assert [e.why for e in failed] == ["the site changed meanwhile"]
    assert [f.tick for f in run.kept.frames if f.urgent] == [LEAK_AT, FEED_LOST_AT + 1, SECOND_LEAK_AT + 2]
    assert run.engine.state.tables["gpu"].generation.sum() == 1
    assert run.engine.jobs.slot_of.keys() == {"b"}
    assert {c.epoch for d in run.kept.decisions for c in d.commands if "under epoch" in c.reason} == {2}
    assert run.engine.site.names["rack"] == ["golden/h1/r0", "golden/h1/r1"]


def test_every_registered_policy_acts_in_the_story(run: Run) -> None:
    acted = {c.policy for d in run.kept.decisions for c in d.commands if not c.renewal}
    assert acted - {"arbiter"} == set(REGISTRY)


def test_what_was_learned_moves_with_its_rack(run: Run) -> None:
    """r1 was rack 0 and is rack 1: leases, generations and the fitted band go along."""
    before, after = (run.kept.frames[CHANGED_AT], run.kept.frames[CHANGED_AT + 1])
    assert not before.events
    assert any(isinstance(e, ev.SiteChanged) for e in after.events)
    assert run.engine.state.tables["gpu"].generation.tolist() == [0] * 8 + [0, 0, 1] + [0] * 5
    drained = run.engine.arbiter.leases["node.service_level"].value
    assert np.isnan(drained[:2]).all()
    assert drained[3] == 3


def test_outlooks_are_told_refused_kept_and_forgotten(run: Run) -> None:
    said = {r["event"]["id"]: r.get("refused") for d in run.kept.decisions for r in bodies_of(d)
            if r["kind"] == "event" and r["event"]["type"] == "OutlookTold"}  # fmt: skip
    assert said == {"o1": None, "o2": None, "o3": "no rack r9"}
    # The weather was over after 90 s; the plan of r1 went along when it became rack 1.
    assert OUTLOOK_FROM + 90 < CHANGED_AT
    (held,) = run.engine.intake.outlooks.entries()
    assert (held.quantity, held.name) == ("rack.power_w", "golden/h1/r1")
    at_ns = START_NS + (OUTLOOK_FROM + 300) * NS
    found = run.engine.intake.outlooks.at("rack.power_w", at_ns, run.engine.site)
    assert np.array_equal(found, [np.nan, 9000.0], equal_nan=True)


@pytest.mark.long
def test_recording_again_gives_the_same_bytes(run: Run, tmp_path: Path) -> None:
    """Fits in worker processes included."""
    engine, outcome = record(tmp_path / "again")
    assert outcome.journal_head == run.outcome.journal_head
    assert engine.checksum() == run.engine.checksum()
    assert _bytes(tmp_path / "again") == _bytes(run.folder)


@pytest.mark.long
@pytest.mark.parametrize("seed", sampled(["0", "random"], "random"))
def test_replay_is_identical_under_any_hash_seed(
    run: Run, tmp_path: Path, blocked_cli: Callable[..., object], seed: str
) -> None:
    out = tmp_path / "again"
    done = blocked_cli(seed, "trace", "replay", "--trace", run.folder, "--no-compare", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["state_checksum"] == run.engine.checksum()
    assert result["journal_head"] == run.outcome.journal_head
    assert result["ticks"] == run.outcome.ticks
    assert result["commands"] == run.outcome.commands > 0
    assert _bytes(out) == _bytes(run.folder)


@pytest.mark.long
@pytest.mark.parametrize("kernels", sampled(["0", "1"], "0"))
def test_replay_is_identical_with_and_without_compiled_kernels(
    run: Run,
    blocked_cli: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
) -> None:
    monkeypatch.setenv("RACKTWIN_KERNELS", kernels)
    done = blocked_cli("1", "trace", "replay", "--trace", run.folder, "--json")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_replay_compares_every_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", "--trace", str(run.folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compared_lines"] == len(list(journal_lines(run.folder / "journal.jsonl")))
    assert result["damage"] == []


def test_segments_name_their_sites(run: Run) -> None:
    reader = TraceReader(run.folder)
    frames = list(reader)
    assert [h.site_hash for h in reader.headers] == [spec(["r1"]).digest(), spec(["r0", "r1"]).digest()]
    assert reader.headers[1].first_tick == CHANGED_AT + 1
    assert len(frames) == run.outcome.ticks


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.suffix in (".rt", ".jsonl")}


def _rewrite(run: Run, folder: Path, change: Callable[[Frame], Frame | None]) -> Path:
    """The run with other frames, its journal untouched."""
    folder.mkdir()
    shutil.copy(run.folder / "journal.jsonl", folder)
    encoder = TraceEncoder()
    reader = TraceReader(run.folder)
    data = b""
    for frame in reader:
        if not data:
            data = MAGIC + framed(encoder.header(reader.headers[0]))
        changed = change(frame)
        if changed is not None:
            data += framed(encoder.encode(changed))
    (folder / "trace-000000.rt").write_bytes(data)
    return folder


def _with_value(frame: Frame, table: str, row: int, entity: int, q: int) -> Frame:
    updates = []
    for u in frame.updates:
        if u.table == table and row in u.rows.tolist():
            changed = u.q.copy()
            changed[u.rows.tolist().index(row), entity] = q
            u = u._replace(q=changed)
        updates.append(u)
    return dataclasses.replace(frame, updates=tuple(updates))


def _with_events(frame: Frame, events: tuple[ev.Event, ...]) -> Frame:
    return dataclasses.replace(frame, events=events)


def _row(run: Run, key: str) -> int:
    table, _, name = key.partition(".")
    return next(s.row for s in run.engine.state.tables[table].signals if s.name == name)


def _hotter(run: Run) -> Callable[[Frame], Frame]:
    row = _row(run, "gpu.temp_c")
    return lambda f: _with_value(f, "gpu", row, 5, 170) if f.tick == 40 else f


def _watt(run: Run, tick: int) -> Callable[[Frame], Frame]:
    row = _row(run, "gpu.power_w")
    return lambda f: _with_value(f, "gpu", row, 5, 1234) if f.tick == tick else f


def _request(frame: Frame) -> Frame:
    if frame.tick != 20:
        return frame
    return _with_events(
        frame,
        tuple(
            msgspec.structs.replace(e, want=901.0) if isinstance(e, ev.OperatorRequest) else e
            for e in frame.events
        ),
    )


def _no_job(frame: Frame) -> Frame:
    return _with_events(frame, ()) if frame.tick == 5 else frame


def _missing(frame: Frame) -> Frame | None:
    return None if frame.tick == 131 else frame


MARK = MARK_EVERY + MARK_AT  # the second one
CASES = {
    "a value that a policy acts on": (
        _hotter,
        40,
        "kind: recorded 'renewal at tick 50', replayed 'proposals at tick 40'",
    ),
    "a value that nobody acts on, at the next mark": (
        lambda run: _watt(run, MARK),
        MARK,
        "mark.state.gpu.power_w",
    ),
    "a value of the last tick, in the checksum": (lambda run: _watt(run, 232), 232, "end.state_checksum"),
    "the wish of a request": (lambda run: _request, 20, "event.event.want"),
    "an event that is gone": (lambda run: _no_job, 5, "kind"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", sampled(CASES, "a value that a policy acts on", "a value of the last tick, in the checksum")
)
def test_a_tampered_trace_differs_at_tick_and_field(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, tick, field = CASES[name]
    folder = _rewrite(run, tmp_path / "bent", change(run))
    assert main(["trace", "replay", "--trace", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"tick {tick}, field {field}" in said.err.replace("\n", "")
    assert "Traceback" not in said.err


@pytest.mark.long
def test_frames_of_another_site_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the frame that changes the site, those behind it speak of racks that do not exist."""
    folder = _rewrite(run, tmp_path / "bent", _missing)
    assert main(["trace", "replay", "--trace", str(folder), "--no-compare"]) == 1
    assert "tick 132: 2 of rack" in capsys.readouterr().err


def test_a_journal_forged_with_its_chain_differs(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Someone rewrote a decision and made the chain hold again: the replay shows it."""
    folder = tmp_path / "forged"
    shutil.copytree(run.folder, folder)
    (folder / "journal.jsonl").write_bytes(b"".join(line + b"\n" for line in _forged(folder)))
    assert main(["journal", "verify", str(folder)]) == 0
    assert main(["trace", "replay", "--trace", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "tick 78, field command.value[0]" in said
    assert "recorded 1199.0" in said


def _forged(folder: Path) -> Iterator[bytes]:
    chain = Chain()
    for line in journal_lines(folder / "journal.jsonl"):
        entry = msgspec.json.decode(line, type=Entry)
        body = entry.body
        if entry.kind == "command" and entry.tick == 78 and body["control"] == CAP:
            body = {**body, "value": [1199.0, *body["value"][1:]]}
        yield chain.line(OtherRecord(entry.kind, body), entry.tick, entry.now_ns)


def test_the_manifest_is_compared(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another authority is another run; it says so before anything else."""
    args = ["trace", "replay", "--trace", str(run.folder), "--authority", "operator=off"]
    assert main(args) == 1
    assert "field manifest.authority.operator" in capsys.readouterr().err
    assert manifest(run.engine).site_hash == run.engine.site.spec_hash


@pytest.mark.long
def test_authority_of_the_recording_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded under another authority than the site file says: replayed under that, unasked."""
    from tests.support.golden_story import Story, engine_for
    from twin.run import replay_arrivals

    story = Story(90)
    engine = engine_for(story.spec)
    engine.intake.authority["operator"] = "advise"
    outcome = replay_arrivals(engine, story.spec, story, 1.0, tmp_path / "run", (story,))  # type: ignore[arg-type]
    assert outcome.commands > 0
    assert main(["trace", "replay", "--trace", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_checksum"] == engine.checksum()


def test_every_line_fits_the_schema(run: Run) -> None:
    """Lines of a real run are valid, and each is read as the typed record of its kind."""
    check, kinds = Draft202012Validator(journal_schema()), set()
    for line in journal_lines(run.folder / "journal.jsonl"):
        check.validate(msgspec.json.decode(line))
        entry = msgspec.json.decode(line, type=Entry)
        assert not isinstance(entry.record, OtherRecord), line[:500]
        kinds.add(entry.kind)
    assert kinds >= {"manifest", "event", "proposals", "command", "renewal", "mark", "end"}


def test_a_line_that_no_tick_makes_is_found_also_before_a_late_tick(tmp_path: Path) -> None:
    """Ticks were skipped, but none was lost: all that is journaled must be made again."""
    folder, story = tmp_path / "run", Story(20)
    engine = engine_for(story.spec)
    recorder = Recorder(engine, story.spec, folder)
    assert recorder.journal is not None
    for frame in Cutter(engine, 1.0, lambda now_ns, site_hash: []).frames(story):
        late = (ev.TicksSkipped(count=2, why="overload"),) if frame.tick == 10 else ()
        late_frame = dataclasses.replace(frame, events=(*frame.events, *late))
        recorder.before(late_frame)
        recorder.after(engine, engine.tick(late_frame))
        if frame.tick == 9:
            recorder.journal.append([recorder.chain.line(OtherRecord("finding", {}), 9, frame.now_ns)])
    recorder.finish(engine)
    with pytest.raises(Divergence, match="tick 9"):
        replay_frames(engine_for(story.spec), TraceReader(folder), folder / "journal.jsonl")
