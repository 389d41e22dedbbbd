"""The command line: one JSON object where asked for, a clear line where something is wrong."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console

from twin.cli import demo
from twin.cli.main import main
from twin.report import print_error
from twin.run import journal_lines, verify_journal

ROOT = Path(__file__).parents[2]
SITE = """\
site: lab
halls:
  - name: h1
    racks: [{name: r1, nodes: 1, gpus_per_node: 2}]
"""


def jsonl(seconds: int, rack: str = "r1") -> bytes:
    """A capture of our own: IT frames of a rack with two GPUs that grow warm."""
    lines = []
    for second in range(seconds):
        t_ns = 1_767_225_600_000_000_000 + second * 10**9
        body = {"t_ns": t_ns, "gpu": {"155": [300.0 + second, 310.0], "150": [50 + second % 30, 51]}}
        lines.append(
            json.dumps({"offset_s": second, "topic": f"IT/v1/PUB/Frame/lab/h1/{rack}", "payload": body})
        )
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture(scope="module")
def recorded_lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a site, a capture and a recorded run of it."""
    folder = tmp_path_factory.mktemp("recorded")
    site, capture, run = (str(folder / name) for name in ("site.yaml", "capture.jsonl", "run"))
    Path(site).write_text(SITE)
    Path(capture).write_bytes(jsonl(70))
    assert main(["trace", "replay", "--site", site, "--trace", capture, "--out", run, "--json"]) == 0
    return folder


@pytest.fixture
def lab(recorded_lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recorded folder; the commands run there."""
    shutil.copytree(recorded_lab, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_replay_json(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*REPLAY, "--json"]
    assert main(args) == 0
    result = said(capsys)
    assert result["messages"] == {
        "total": 70, "decoded": 70, "ignored": 0, "bad": 0, "reasons": [],
    }  # fmt: skip
    assert result["ticks"] == 69
    assert set(result["racks"]) == {"r1"}
    assert main(["trace", "replay", "--trace", "run", "--json"]) == 0
    again = said(capsys)
    assert again["state_checksum"] == result["state_checksum"]
    assert again["compared_lines"] == len(list(journal_lines(lab / "run" / "journal.jsonl")))


@pytest.mark.long
def test_replay_for_people(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*REPLAY, "--report", "report"]
    assert main(args) == 0
    assert "report.html" in capsys.readouterr().out
    assert (lab / "report" / "report.html").stat().st_size > 1000
    assert main(["trace", "replay", "--trace", "run"]) == 0
    assert "equal to its journal" in capsys.readouterr().out


def test_speed_is_kept(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "short.jsonl").write_bytes(jsonl(4))
    args = ["trace", "replay", "--site", "site.yaml", "--trace", "short.jsonl", "--speed", "20", "--json"]
    assert main(args) == 0
    assert said(capsys)["wall_s"] >= 0.09


def test_authority_from_the_command_line(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*REPLAY, "--json", "--out", "other"]
    assert main([*args, "--authority", "thermal_guard=off", "--authority", "operator=act"]) == 0
    first = json.loads(next(journal_lines(lab / "other" / "journal.jsonl")))
    assert first["body"]["authority"]["thermal_guard"] == "off"
    assert first["body"]["authority"]["operator"] == "act"


def test_check(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "bad.yaml").write_text("site: lab\nhals: []\nmax_jobs: many\n")
    assert main(["site", "check", "site.yaml", "bad.yaml", "--json"]) == 1
    result = said(capsys)
    assert result["site.yaml"]["ok"]
    assert result["site.yaml"]["sizes"]["gpu"] == 2
    faults = "\n".join(result["bad.yaml"]["faults"])
    assert "bad.yaml: $.hals" in faults
    assert "$.max_jobs" in faults
    assert main(["site", "check", "site.yaml"]) == 0


def test_record_info(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "info", "run", "--json"]) == 0
    info = said(capsys)
    assert info["form"] == "native"
    assert info["ticks"] == 69
    assert info["journal_lines"] > 0
    assert info["damage"] == []
    assert main(["trace", "info", "capture.jsonl", "--json"]) == 0
    assert said(capsys)["messages"] == 70


def test_journal_show(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "show", "run", "--kind", "mark", "--limit", "1", "--json"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["kind"] for line in shown] == ["mark"]
    assert main(["journal", "show", "run"]) == 0
    assert "manifest" in capsys.readouterr().out


def test_entries_left_out_are_counted(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*more: str) -> tuple[str, str]:
        assert main(["journal", "show", "run", *more]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    assert "left out" not in shown("--limit", "100000")[0]
    count = len(shown("--json", "--limit", "100000")[0].splitlines())
    assert count > 3
    later = shown("--limit", "2")[0]
    assert f"{count - 2} later entr" in later
    assert f"`--limit {count}` shows all, `--last` the last ones" in later
    assert f"{count - 2} earlier entr" in shown("--limit", "2", "--last")[0]
    out, err = shown("--limit", "2", "--json")
    assert len(out.splitlines()) == 2
    assert "left out" in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert "racktwin" in capsys.readouterr().out
    assert main([]) == 2


def test_text_from_outside_cannot_steer_the_terminal() -> None:
    made = Console(file=io.StringIO(), width=20, highlight=False, emoji=False)
    print_error(made, "a\x1b[31mb\r\n:fire:[red]x")
    assert made.file.getvalue() == "error a\ufffd[31mb\ufffd :fire:[red]x\n"  # type: ignore[attr-defined]


def test_an_error_is_red_and_its_text_is_not() -> None:
    made = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    print_error(made, "no such file")
    assert made.file.getvalue() == "\x1b[31merror\x1b[0m no such file\n"  # type: ignore[attr-defined]


def _change(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flipped(at: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        position = int(len(data) * at)
        return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]

    return change


@pytest.mark.parametrize("change", [lambda d: d[: len(d) * 2 // 3], _flipped(0.6)], ids=["cut", "flip"])
def test_a_damaged_trace(
    lab: Path, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes]
) -> None:
    """Reported with its position, and what lies before it is replayed and compared."""
    _change(lab / "run" / "trace-000000.rt", change)
    assert main(["trace", "info", "run", "--json"]) == 1
    info = said(capsys)
    assert 0 < info["ticks"] < 69
    assert info["damage"][0].startswith("trace-000000.rt at byte ")
    assert main(["trace", "replay", "--trace", "run", "--json"]) == 1
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["ticks"] == info["ticks"]
    assert result["damage"] == info["damage"]
    assert result["compared_lines"] > 0
    assert "trace-000000.rt at byte" in told.err


@pytest.mark.parametrize("change", [lambda d: d[:-9], _flipped(0.7)], ids=["cut", "flip"])
def test_a_damaged_journal(
    lab: Path, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes]
) -> None:
    journal = lab / "run" / "journal.jsonl"
    _change(journal, change)
    verdict = verify_journal(journal)
    assert main(["journal", "verify", "run", "--json"]) == 1
    found = said(capsys)
    assert (found["ok"], found["cut"]) == (False, False)
    assert (found["line"], found["byte"]) == (verdict.line_no, verdict.position)
    assert main(["trace", "replay", "--trace", "run", "--json"]) == 1
    told = capsys.readouterr()
    # Where the chain breaks, the line before the break may be the bent one.
    assert json.loads(told.out)["compared_lines"] in (verdict.lines, verdict.lines - 1)
    assert f"line {verdict.line_no}, byte {verdict.position}" in told.err
    assert main(["trace", "info", "run"]) == 1
    assert f"byte {verdict.position}" in capsys.readouterr().err
    # Cut there: the rest is kept, and what remains holds.
    whole = journal.read_bytes()
    assert main(["journal", "verify", "run", "--cut"]) == 0
    assert journal.read_bytes() + journal.with_suffix(".torn").read_bytes() == whole
    assert main(["journal", "verify", "run"]) == 0


def test_show_prints_what_lies_before_the_damage(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _change(lab / "run" / "journal.jsonl", lambda d: d[:-9])
    assert main(["journal", "show", "run"]) == 1
    told = capsys.readouterr()
    assert "manifest" in told.out
    assert "the last line is torn" in told.err
    _change(lab / "run" / "journal.jsonl", lambda d: d.split(b"\n", 1)[0] + b"\n{}\n")
    assert main(["journal", "show", "run"]) == 1
    told = capsys.readouterr()
    assert "manifest" in told.out
    assert "line 2" in told.err


@pytest.mark.long
def test_a_replay_says_how_much_it_compared(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "replay", "--trace", "run"]) == 0
    assert "equal to its journal: " in capsys.readouterr().out
    journal = lab / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[3:]]))
    assert main(["trace", "replay", "--trace", "run"]) == 1
    assert f"equal to its journal: 2 of {len(lines)} lines" in capsys.readouterr().out
    journal.unlink()
    assert main(["trace", "replay", "--trace", "run"]) == 0
    assert "not compared: no journal here" in capsys.readouterr().out


def test_one_segment_of_a_run(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A segment ends before the journal does, which is no difference."""
    assert main(["trace", "replay", "--trace", "run/trace-000000.rt", "--json"]) == 0
    assert said(capsys)["ticks"] == 69


NOISE = bytes((i * 7919 + (i >> 3)) % 256 for i in range(3000))
FILES: dict[str, bytes] = {
    "empty": b"", "empty.jsonl": b"", "empty.rt": b"", "empty.tar.gz": b"", "noise": NOISE, "noise.rt": NOISE,
    "noise.jsonl": NOISE, "noise.tar.gz": NOISE, "noise.csv.gz": b"\x1f\x8b" + NOISE, "noise.jsonl.xz": NOISE,
    "magic.rt": b"rttrace1", "record.rt": b"rttrace1" + NOISE, "text": b"hello\nworld\n",
    "list.yaml": b"- 1\n",
    "null.yaml": b"", "deep.yaml": b"[" * 3000, "esc.yaml": b'site: "a\\e[31m"\nfoo: 1\n',
    "bin.yaml": b"\xff\xfe\x00", "nul": b"\0" * 99,
    "journal.jsonl": b'{"seq":0,"prev":"%s","kind":"command","tick":0,"now_ns":-9,"body":{}}\n' % (b"0" * 32),
    "late.jsonl": b'{"seq":0,"prev":"x","kind":"acks","tick":0,"now_ns":9000000000000000000,"body":{}}\n',
}  # fmt: skip
PATHS = [*FILES, "folder", "nowhere", "link", "/dev/null", ".."]
CALLS: list[tuple[str, ...]] = [
    ("site", "check", "?"), ("trace", "info", "--json", "?"), ("site", "discover", "?"),
    ("site", "discover", "?", "-o", "made/site.yaml"), ("journal", "show", "?"), ("journal", "verify", "?"),
    ("trace", "replay", "--trace", "?"), ("trace", "replay", "--site", "?", "--trace", "capture.jsonl"),
    ("trace", "replay", "--site", "site.yaml", "--trace", "?"),
    ("trace", "replay", "--site", "site.yaml", "--trace", "text", "--map", "?"),
    ("trace", "replay", "--site", "site.yaml", "--trace", "capture.jsonl", "?"),
]  # fmt: skip


@pytest.fixture(scope="module")
def junk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("junk")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("nowhere")
    (folder / "site.yaml").write_text(SITE)
    (folder / "capture.jsonl").write_bytes(jsonl(2))
    return folder


def refused(call: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr) of a call that must end in an ordinary way."""
    try:
        code: Any = main(call)
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert "\x1b" not in told.err + told.out
    return code, told.err


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_any_file_in_any_place_is_met_with_a_clear_line(
    junk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: tuple[str, ...]
) -> None:
    monkeypatch.chdir(junk)
    for path in PATHS:
        code, err = refused([path if part == "?" else part for part in call], capsys)
        assert code in (0, 1, 2), path
        if code == 1 and "--json" not in call:
            assert err.strip(), path
            assert any(word in err for word in (path, Path(path).name, "--site", "nested")), (path, err)


REPLAY = ["trace", "replay", "--site", "site.yaml", "--trace", "capture.jsonl"]


@pytest.mark.parametrize(
    "call, code, what",
    [
        (["trace", "replay", "--trace", "capture.jsonl"], 1, "--site: missing"),
        (["trace", "replay", "--site", "site.yaml", "--trace", "nowhere"], 1, "nowhere: no such file"),
        (["trace", "replay", "--site", "site.yaml", "--trace", "text"], 1, "needs --map"),
        (["trace", "replay", "--site", "site.yaml", "--trace", "empty.jsonl"], 1, "has nothing to replay"),
        ([*REPLAY, "noise.rt"], 1, "forms differ"),
        (["trace", "replay", "--trace", "noise.rt", "noise.rt"], 1, "one recorded run at a time"),
        ([*REPLAY, "--speed", "0"], 1, "--speed 0"),
        ([*REPLAY, "--speed", "nan"], 1, "--speed nan"),
        ([*REPLAY, "--tick", "0"], 2, "--tick: '0': expected a duration"),
        ([*REPLAY, "--tick", "x"], 2, "such as 90s, 15min, 2h"),
        ([*REPLAY, "--out", "folder/.."], 1, "exists"),
        (
            [*REPLAY, "--out", "text"],
            1,
            "exists; expected a new file",
        ),
        ([*REPLAY, "--report", "text"], 1, "a file"),
        (
            [*REPLAY, "--authority", "x"],
            1,
            "POLICY=off|advise",
        ),
        (
            [*REPLAY, "--authority", "x=act"],
            1,
            "operator",
        ),
        (["trace", "replay", "--bogus"], 2, "unknown option"),
        (["journal"], 2, "a verb is missing: expected show, verify, schema"),
        (["journal", "show", "journal.jsonl", "--limit", "x"], 2, "expected a whole number"),
        (["bogus"], 2, "unknown command"),
        (["site", "discover", "text"], 1, "not a recording; expected"),
        (["site", "discover", "noise.jsonl"], 1, "no retained metadata"),
        (["site", "discover", "capture.jsonl"], 1, "BMS/v1/PUB/Metadata"),
        (["journal", "verify", "empty.jsonl"], 1, "is empty; expected"),
        (["demo", "--out", "text"], 1, "text"),
    ],
)
def test_bad_calls(
    junk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: list[str],
    code: int,
    what: str,
) -> None:
    monkeypatch.chdir(junk)
    got, err = refused(call, capsys)
    assert got == code
    assert what in err
    if code == 1:
        assert len(err.strip().splitlines()) == 1


@pytest.mark.long
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_in_a_run_are_met(
    lab: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """Trace and journal overwritten anywhere: an exit code and a message, whatever they now say."""
    run = lab / "bent"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(lab / "run", run)
    for name in data.draw(st.sets(st.sampled_from(["trace-000000.rt", "journal.jsonl"]), min_size=1)):
        content = bytearray((run / name).read_bytes())
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=50))
        (run / name).write_bytes(bytes(content))
    for call in (
        ["trace", "info"],
        ["trace", "replay", "--trace"],
        ["journal", "show"],
        ["journal", "verify"],
    ):
        code, _ = refused([*call, str(run)], capsys)
        assert code in (0, 1)


def test_a_reader_that_leaves_is_no_error(lab: Path) -> None:
    """`racktwin journal show --json run | head -1`."""
    command = (
        f"{shlex.quote(sys.executable)} -m twin journal show --json --limit 999 {lab / 'run'} | head -c 1"
    )
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""


def _demo(folder: Path, traces: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twin", "demo", "--recorded", "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "RACKTWIN_TRACES": str(traces)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.long
def test_demo_of_recordings_without_one_and_then_with_it(
    tmp_path: Path,
    recording: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as short:
        short.setenv("RACKTWIN_TRACES", str(tmp_path / "none"))
        short.setattr(demo, "RECORDED_PAST_S", 60.0)
        short.setattr(demo, "RECORDED_S", 20.0)
        assert main(["demo", "--recorded", "--out", str(tmp_path / "demo")]) == 0
    told = capsys.readouterr().out
    assert "racktwin trace fetch" in told
    assert "byte-identical" in told
    assert "imulated" in (tmp_path / "demo/simulated/report.html").read_text()
    assert not (tmp_path / "demo/real").exists()
    again = _demo(tmp_path / "demo", recording("dsx-bms-capture").parent)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "demo/real/report.html").stat().st_size > 5000
    assert (tmp_path / "demo/simulated/report.html").stat().st_size > 5000
    assert "byte-identical" in again.stdout
    assert not again.stderr


@pytest.mark.parametrize(("given", "after"), [(None, "1"), ("4", "4")])
def test_blas_runs_in_one_thread_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str | None, after: str
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert main(["journal", "schema"]) == 0
    assert os.environ["OPENBLAS_NUM_THREADS"] == after
