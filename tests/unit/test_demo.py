"""A demo's folder is its own, its proof holds; what runs, recorders and examples say of themselves."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.unit.test_journal_rotation import KEEPING, run
from twin.catalogue import ConfigError, StorageError
from twin.cli import record
from twin.cli.acl import acl_text, identities
from twin.cli.commands import parser_of
from twin.cli.demo import MARKER, OURS, Ending, _prove, claimed, ending_words
from twin.cli.main import main
from twin.config import load_config, load_site
from twin.report.figures import doubt
from twin.run import Keeping, journal_lines, said_simulated

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys; from pathlib import Path; from twin.cli.demo import claimed\n"
    "with claimed(Path(sys.argv[1]), ()): print('held', flush=True); sys.stdin.read()\n"
)


def test_a_demo_empties_no_folder_of_somebody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = tmp_path / "out" / "live"
    live.mkdir(parents=True)
    (live / "state").mkdir()
    (live / "state" / "thesis.txt").write_text("years of work")
    assert main(["demo", "--out", str(tmp_path / "out"), "--for", "1s"]) == 1
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert (live / "state" / "thesis.txt").read_text() == "years of work"
    assert not (live / MARKER).exists()


@pytest.mark.parametrize("at", ["live", "live/deeper"])
def test_a_file_in_the_place_of_the_folder_is_kept(tmp_path: Path, at: str) -> None:
    (tmp_path / "live").write_text("mine")
    with pytest.raises(ConfigError, match="expected a new or empty folder"), claimed(tmp_path / at, OURS):
        pass
    assert (tmp_path / "live").read_text() == "mine"


def test_a_folder_of_a_demo_is_used_again_without_what_the_demo_left(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "live", OURS) as live:
        (live / "state" / "run").mkdir(parents=True)
        (live / "daemon.log").write_text("old")
        (live / "notes.txt").write_text("mine")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "kept").touch()
        (live / "pod.log").symlink_to(tmp_path / "elsewhere")
    with claimed(live, OURS):
        assert sorted(p.name for p in live.iterdir()) == [MARKER, "notes.txt"]
        assert (tmp_path / "elsewhere" / "kept").exists()


@pytest.mark.long
def test_a_second_demo_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (tmp_path / "daemon.log").write_text("of the first")
        with pytest.raises(ConfigError, match=rf"another demo runs in it \(process {holder.pid}\)"):
            claimed(tmp_path, OURS).__enter__()
        assert (tmp_path / "daemon.log").read_text() == "of the first"
        holder.communicate("")
    with claimed(tmp_path, OURS):
        assert not (tmp_path / "daemon.log").exists()


def test_a_run_is_proven_only_as_far_as_it_was_shown(tmp_path: Path) -> None:
    engine = run(tmp_path / "state" / "run", 20, Keeping(simulated=True))
    last, told = engine.state.tick, io.StringIO()
    assert _prove(tmp_path, last, Console(file=told, width=200)) == 0
    assert "byte-identical" in told.getvalue()
    (tmp_path / "report.html").unlink()
    with pytest.raises(StorageError, match=f"not proven: .*ends at tick {last}, and tick {last + 5}"):
        _prove(tmp_path, last + 5, Console(file=told))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("keeping", "simulated"), [(Keeping(), True), (Keeping(), False), (KEEPING, True)],
    ids=["whole", "real", "rotated"],
)  # fmt: skip
def test_a_run_says_whether_its_site_was_simulated(
    tmp_path: Path, keeping: Keeping, simulated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that is made again from it; a run that is not says nothing, as runs did before."""
    folder = tmp_path / "run"
    given = {name: getattr(keeping, name) for name in Keeping.__slots__}
    run(folder, 40, Keeping(**{**given, "simulated": simulated}))
    lines = [msgspec.json.decode(line) for line in journal_lines(folder / "journal.jsonl")]
    manifests = [line["body"] for line in lines if line["kind"] == "manifest"]
    assert len(manifests) > 1 or keeping is not KEEPING
    assert {body.get("simulated") for body in manifests} == ({True} if simulated else {None})
    assert main(["trace", "replay", "--trace", str(folder), "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["simulated"], told["compared_lines"] > 0) == (simulated, True)
    assert main(["trace", "replay", "--trace", str(folder), "--out", str(tmp_path / "again"), "--json"]) == 0
    assert said_simulated(tmp_path / "again") == simulated
    assert not said_simulated(tmp_path)
    (folder / "journal.jsonl").write_bytes(b"{\xff\n")
    assert said_simulated(folder) == (simulated and keeping is KEEPING)


def _recorder(*words: str) -> argparse.Namespace:
    parsed: argparse.Namespace = parser_of("trace", "record").parse_args(["--out", "x.jsonl", *words])
    return parsed


def test_a_recorder_knows_the_port_of_the_embedded_broker(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("site: s.yaml\nbroker: embedded\nembedded_port: 18999\n")
    settings, topics = record.settings_of(_recorder("--config", str(path)))
    assert (settings.host, settings.port, settings.tls) == ("127.0.0.1", 18999, False)
    assert topics == record.TOPICS
    path.write_text("site: s.yaml\nbroker: embedded\n")
    with pytest.raises(ConfigError, match="`embedded_port` there, or --broker"):
        record.settings_of(_recorder("--config", str(path)))


@pytest.mark.parametrize(
    "fault,tls,advice",
    [
        (
            "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required",
            True,
            "--cert-file and",
        ),
        ("[Errno 104] Connection reset by peer", False, "is it a port with TLS"),
        ("the broker closed the connection instead of a CONNACK", False, "is it a port with TLS"),
        ("TLS handshake failed: [Errno 104] Connection reset by peer", True, "does this port speak TLS?"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong_version_number", True, "does this port speak TLS?"),
        ("Connection refused", False, ""),
    ],
)
def test_a_recorder_says_what_to_give_where_tls_is_the_matter(fault: str, tls: bool, advice: str) -> None:
    told = record.advised(fault, tls)
    assert told.startswith(fault)
    assert advice in told
    assert bool(advice) == (told != fault)


def test_a_sparkplug_node_may_speak_of_itself_only(tmp_path: Path) -> None:
    _, site = load_site(ROOT / "deploy" / "sites" / "lab.yaml")
    text = acl_text(identities(site, sparkplug=("plant/edge1",)), "s")
    own = text.partition("user sparkplug.plant.edge1\n")[2].partition("\n\n")[0].splitlines()
    assert "topic write spBv1.0/plant/NDATA/edge1" in own
    assert "topic write spBv1.0/plant/DBIRTH/edge1/+" in own
    assert "topic read spBv1.0/plant/NCMD/edge1" in own
    assert not [line for line in own if "edge1" not in line and "STATE" not in line]
    assert "spBv1.0/plant" not in acl_text(identities(site), "s")
    for place in ("plant", "plant/", "/edge1", "plant/#", "a/b/c"):
        with pytest.raises(ConfigError, match="expected GROUP/NODE"):
            identities(site, sparkplug=(place,))


def test_the_lab_leaves_nothing_in_the_checkouts_own_folders() -> None:
    assert load_config(ROOT / "deploy" / "config" / "lab.yaml").state == ROOT / "build" / "lab"


def test_more_heat_than_power_is_doubted() -> None:
    assert doubt(0.97) == doubt(1.0) == ""
    assert "is impossible" in doubt(1.02)


def test_the_last_line_says_that_the_story_is_over_and_what_is_next(tmp_path: Path) -> None:
    text = ending_words(tmp_path, Ending(9, [], is_over=True))
    assert text.startswith(
        f"The story is over. Open {tmp_path / 'report.html'}. Next: `racktwin demo --stay`"
    )
    stopped = ending_words(tmp_path, Ending(9, []))
    assert stopped.startswith("The demo was stopped before its story was over. ")
    both = ending_words(tmp_path, Ending(9, ["a", "b"], is_over=True))
    assert both.startswith("The story is over; 2 expected reactions did not show in time. ")
