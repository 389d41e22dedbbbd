"""Questions of `simulation whatif` that are refused or warned of, in one line that says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_site import BASE, FROM, SCENARIO, SITE, lab, recorded
from twin.catalogue import StorageError
from twin.cli.main import main
from twin.simulation import newest_snapshot

__all__ = ["lab", "recorded"]
ERROR = re.compile(r"^error [^\n]+\n$")


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(list(args)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert ERROR.match(said.err), said.err
    return said.err


def test_a_snapshot_of_another_site(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "site.yaml").write_text(SITE.replace("nodes: 2", "nodes: 3"))
    told = refused(capsys, *FROM)
    assert "snapshot is of site" in told
    assert told.count(" (lab)") == 2
    assert "another one since" in told
    (lab / "site.yaml").write_text(SITE.replace("site: lab", "site: other"))
    assert re.search(
        r"is of site [0-9a-f]+ \(lab\), this is [0-9a-f]+ \(other\)$", refused(capsys, *FROM).strip()
    )


def test_a_broken_snapshot(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, _, _ = newest_snapshot(lab / "run")
    for name, raw, words in (
        ("cut.rts", whole[:-9], "damaged"), ("none.rts", b"hello", "not a racktwin snapshot"),
        ("empty.rts", b"", "not a"),
    ):  # fmt: skip
        (lab / name).write_bytes(raw)
        said = refused(capsys, *BASE, "--from", name)
        assert name in said
        assert words in said
    (lab / "nothing").mkdir()
    assert "holds no whole snapshot" in refused(capsys, *BASE, "--from", "nothing")
    assert "No such file" in refused(capsys, *BASE, "--from", "nowhere")


def test_the_newest_whole_snapshot_of_a_folder(
    lab: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path, _ = newest_snapshot(recorded / "run")
    (lab / "two").mkdir()
    (lab / "two" / path.name).write_bytes(whole)
    (lab / "two" / "snapshot-999999999999.rts").write_bytes(whole[:100])
    assert newest_snapshot(lab / "two") == (
        whole, lab / "two" / path.name, [lab / "two" / "snapshot-999999999999.rts"],
    )  # fmt: skip
    assert main([*BASE, "--from", "two", "--jobs", "1", "--horizon", "2s"]) == 0
    assert f"(snapshot-999999999999.rts): {path.name} is used" in capsys.readouterr().err
    (lab / "two" / path.name).unlink()
    with pytest.raises(StorageError, match=r"snapshot-999999999999\.rts: snapshot is damaged"):
        newest_snapshot(lab / "two")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "0"], "--seeds 0: expected a number of seeds"),
        (["--seeds", "3,3"], "--seeds 3,3: expected"),
        (["--seeds", "a"], "--seeds a: expected"),
        (["--authority", "nobody=act"], "--authority nobody=act: expected"),
        (["--authority", "thermal_guard=now"], "--authority thermal_guard=now: expected"),
    ],
)
def test_wrong_calls(lab: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert words in refused(capsys, *FROM, *args)


def test_a_scenario_with_faults(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(SCENARIO.replace("h/cdu1", "h/cdu9"))
    assert "scenario.yaml: $.faults[0].entity: expected" in refused(capsys, *FROM)
    (lab / "scenario.yaml").write_text("name: [")
    assert "scenario.yaml: line 2" in refused(capsys, *FROM)


def test_late_faults_and_short_horizons(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--jobs", "1", "--horizon", "5s"]) == 0
    assert "ends after 5 s, before these faults begin: pump_trip (10 s)" in capsys.readouterr().err
    assert "--horizon 0.5: expected at least a step of dt_s" in refused(capsys, *BASE, "--horizon", "0.5s")


def test_a_report_is_tried_before_and_written_last(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "site.yaml/x: cannot be written" in refused(capsys, *BASE, "--report", "site.yaml/x")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert main([*BASE, "--jobs", "1", "--horizon", "2s", "--report", "out"]) == 1
    assert "Hottest GPU" in capsys.readouterr().out
    assert list((lab / "out").iterdir()) == []
