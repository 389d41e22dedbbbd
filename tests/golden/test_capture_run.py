"""The real capture through the real command: discovered, replayed, counted to the last message."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.conftest import ROOT
from twin.cli.main import main

KEYS = {"messages", "racks", "power_tree", "ticks", "commands", "state_checksum", "journal_head", "wall_s"}
REPORTING = [f"Pod1C-E0{i}" for i in range(1, 7)]
COOLED = REPORTING[1:]


def cli(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twin", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capture") / "titan.yaml"


@pytest.fixture
def capture(recording: Callable[[str], Path], site: Path) -> Path:
    """The capture; its site file is discovered once."""
    path = recording("dsx-bms-capture") / "dsx_exemplar.csv"
    if not site.exists():
        done = cli("site", "discover", path, "-o", site)
        assert done.returncode == 0, done.stderr
        assert "1 CDU" in done.stdout
    return path


def replayed(capsys: pytest.CaptureFixture[str], site: Path, *args: str | Path) -> dict[str, Any]:
    assert main(["trace", "replay", "--site", str(site), "--json", *map(str, args)]) == 0
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out)
    assert said.out.count("\n") == 1
    return found


@pytest.mark.slow
def test_the_command_gives_one_json_object_and_nothing_else(capture: Path, site: Path) -> None:
    done = cli("trace", "replay", "--site", site, "--trace", capture, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result.keys() >= KEYS
    assert done.stdout == done.stdout.strip() + "\n"
    assert "\n" not in done.stdout.strip()


def test_what_is_discovered(capture: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six racks that report power, of which five have liquid points; one CDU; the two busways."""
    tree = yaml.safe_load(site.read_text())
    hall = tree["halls"][0]
    assert [r["name"] for r in hall["racks"]][:6] == REPORTING
    assert [c["name"] for c in hall["cdus"]] == ["C-F00-CDU-05"]
    assert {"C-E-BUS-E1", "C-E-BUS-E2"} <= {f["name"] for f in hall["feeders"]}
    result = replayed(capsys, site, "--trace", capture)
    assert [k for k, r in result["racks"].items() if r["power_w"] is not None] == REPORTING
    assert [k for k, r in result["racks"].items() if r["liquid_capture"] is not None] == COOLED


def test_every_message_is_accounted_for(
    capture: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = replayed(capsys, site, "--trace", capture)["messages"]
    assert counted["total"] == 4711 == counted["decoded"] + counted["ignored"] + counted["bad"]
    assert counted["decoded"] >= 4500
    assert counted["bad"] == 0
    assert sum(row["count"] for row in counted["reasons"]) == counted["ignored"] > 0
    assert all(row["why"] for row in counted["reasons"])


def test_heat_and_power_balance(capture: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = replayed(capsys, site, "--trace", capture)
    for rack in COOLED:
        assert 0.93 <= result["racks"][rack]["liquid_capture"] <= 0.99
    assert result["racks"]["Pod1C-E01"]["liquid_capture"] is None
    assert abs(result["power_tree"]["residual_pu"]) < 0.01
    assert result["ticks"] == 100
    assert result["commands"] == 0


def test_recorded_and_replayed_natively(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replayed(capsys, site, "--trace", capture, "--out", tmp_path / "run")
    assert main(["trace", "replay", "--trace", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for key in ("state_checksum", "journal_head", "ticks", "racks", "power_tree", "commands"):
        assert again[key] == first[key]
    assert again["compared_lines"] > 0


Row = list[str]


def bent(capture: Path, to: Path, change: Callable[[list[Row]], list[Row]]) -> Path:
    rows = list(csv.reader(io.StringIO(capture.read_text())))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(change(rows[1:]))
    to.write_text(out.getvalue())
    return to


def _patched(topic_part: str, **changes: Any) -> Callable[[list[Row]], list[Row]]:
    def change(rows: list[Row]) -> list[Row]:
        out = []
        for offset, topic, payload in rows:
            if topic.startswith("BMS/v1/PUB/Value/") and topic_part in topic:
                # The timestamp is a placeholder without quotes: not JSON before it is filled in.
                body = json.loads(payload.replace("{{timestamp_ms}}", "7777777"))
                payload = json.dumps({**body, **changes}).replace("7777777", "{{timestamp_ms}}")
            out.append([offset, topic, payload])
        return out

    return change


@pytest.mark.parametrize("changes", [{"value": None}, {"quality": 0}], ids=["null", "bad quality"])
def test_a_rack_without_readings_has_none(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """A null and a value that its source distrusts are no readings: no power, no capture, and no zero."""
    path = bent(capture, tmp_path / "bent.csv", _patched("Rack/RackPower", **changes))
    result = replayed(capsys, site, "--trace", path)
    counted = result["messages"]
    assert counted["total"] == 4711 == counted["decoded"] + counted["ignored"] + counted["bad"]
    assert counted["bad"] == 0
    assert {r["power_w"] for r in result["racks"].values()} == {None}
    assert {r["liquid_capture"] for r in result["racks"].values()} == {None}
    assert result["power_tree"]["residual_pu"] is None
    assert result["inbox"]["missing"] + result["inbox"]["untrusted"] > 0


def test_one_bad_value_does_not_move_the_picture(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last reading of a rack turns bad: its last good value stands, as it would for a stale one."""

    def change(rows: list[Row]) -> list[Row]:
        last = max(i for i, r in enumerate(rows) if "Value/Rack/RackPower" in r[1] and "rack03" in r[1])
        assert '"quality":1' in rows[last][2]
        rows[last][2] = rows[last][2].replace('"quality":1', '"quality":0')
        return rows

    path = bent(capture, tmp_path / "bent.csv", change)
    result = replayed(capsys, site, "--trace", path)
    whole = replayed(capsys, site, "--trace", capture)
    assert result["inbox"]["untrusted"] == 2  # with its companion, the maximum
    assert result["racks"]["Pod1C-E03"]["power_w"] == pytest.approx(46904, rel=0.02)
    assert result["state_checksum"] != whole["state_checksum"]


def test_metadata_that_comes_late(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value means nothing before its metadata: counted as ignored, with that reason, and never guessed."""

    def change(rows: list[Row]) -> list[Row]:
        late = [r for r in rows if "/Metadata/Rack/" in r[1]]
        rest = [r for r in rows if "/Metadata/Rack/" not in r[1]]
        half = len(rest) // 2
        return rest[:half] + [[rest[half][0], r[1], r[2]] for r in late] + rest[half:]

    path = bent(capture, tmp_path / "bent.csv", change)
    result = replayed(capsys, site, "--trace", path)
    counted = result["messages"]
    assert counted["total"] == 4711 == counted["decoded"] + counted["ignored"] + counted["bad"]
    early = [row for row in counted["reasons"] if "metadata" in row["why"]]
    assert sum(k["count"] for k in early) > 100
    assert counted["bad"] == 0
    for rack in COOLED:
        assert result["racks"][rack]["liquid_capture"] is None or (
            0.93 <= result["racks"][rack]["liquid_capture"] <= 0.99
        )
    assert [k for k, r in result["racks"].items() if r["power_w"] is not None] == REPORTING


def test_without_metadata_nothing_is_decoded(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bent(capture, tmp_path / "bent.csv", lambda rows: [r for r in rows if "/Metadata/" not in r[1]])
    assert main(["trace", "replay", "--site", str(site), "--trace", str(path), "--json"]) == 1
    said = capsys.readouterr()
    counted = json.loads(said.out)["messages"]
    assert counted["decoded"] == counted["bad"] == 0
    assert counted["ignored"] == counted["total"] == 4545
    assert main(["site", "discover", str(path)]) == 1


def test_broken_lines_are_counted_and_named(
    capture: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: list[Row]) -> list[Row]:
        rows[1000][2] = '{"value": 1e'
        rows[2000][0] = "soon"
        rows[3000][2] = "\x00"
        return rows

    path = bent(capture, tmp_path / "bent.csv", change)
    counted = replayed(capsys, site, "--trace", path)["messages"]
    bad = [row for row in counted["reasons"] if row["outcome"] == "bad"]
    assert counted["bad"] == sum(row["count"] for row in bad) == 3
    assert counted["total"] == 4711 == counted["decoded"] + counted["ignored"] + counted["bad"]
    assert any(row["example"] == "line 2002" and row["remedy"] for row in bad)
