"""The operator's commands: against a real daemon's interface, and with nobody there."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.support.in_process_daemon import Desk, serving_aside
from twin.api import connect
from twin.api.summary import brief_alarm
from twin.api.tokens import add_token, read_tokens, write_private
from twin.catalogue import NS, ConfigError, clean
from twin.cli.main import main
from twin.cli.operate import show
from twin.cli.operate.show import since_words, state_words

CAP = "gpu.power_cap_w"
NASTY = "\x1b[31m[bold]evil[/bold]\u202e"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with serving_aside(tmp_path, monkeypatch) as desk:
        yield desk


def test_status_says_first_what_matters(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: desk.pod.tick({"gpu.temp_c": 95.0}))
    desk.pod.live.stats.skipped = 4
    desk.pod.live.parts["mqtt"].error = NASTY
    assert desk.run("status") == 0
    said = capsys.readouterr().out
    first, told = said.splitlines()[0], " ".join(said.split())
    assert first.startswith(
        "lab: the daemon leads and works normally; no policy may act by itself, thermal_guard"
    )
    assert first.endswith("only with approval; the newest reading is 0 s old")
    assert "waits for approval of the power cap of 144 GPUs" in told
    assert "`racktwin policy approve thermal_guard gpu.power_cap_w`" in told
    for expected in ("lab", "leader (epoch 3)", "act: operator", "approve: thermal_guard", "4 skipped",
                     "1 critical", "The temperature of 144 GPUs is beyond its limit",
                     "beyond/gpu.temp_c/limit", "thermal_guard waits for approval", "mqtt"):  # fmt: skip
        assert expected in said
    assert said.index("critical") < said.index("waits for approval") < said.index("mqtt")
    assert "\x1b" not in said
    assert "[bold]evil[/bold]" in said  # as text, not as markup
    assert clean(NASTY) in said
    assert desk.run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["role"] == "leader"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "x: the daemon leads and works normally; a and b may act, c only with approval; the newest "
             "reading is 3 s old"),
        ({"role": "standby"}, "x: the daemon stands by, another one leads; a and b may act once "
         "it leads and works, c only"),
        ({"mode": "held"}, "x: the daemon leads and is on hold: it changes no command; a and b may "
         "act once it leads and works,"),
        ({"policies": [], "telemetry_age_s": None},
         "x: the daemon leads and works normally; no policy may act by itself; no reading has arrived yet"),
    ],
)  # fmt: skip
def test_the_first_line_is_a_sentence_on_state_authority_and_age(more: dict[str, Any], expected: str) -> None:
    levels = {"a": "act", "b": "act", "c": "approve", "d": "advise", "operator": "act"}
    policies = [{"name": n, "authority": level, "suspended": False} for n, level in levels.items()]
    policies.append({"name": "e", "authority": "act", "suspended": True})
    tree = {"site": "x", "role": "leader", "mode": "normal", "policies": policies, "telemetry_age_s": 3.0}
    assert state_words(tree | more).startswith(expected)


def test_an_alarm_says_when_in_utc_and_how_long_ago() -> None:
    now_ns = 1_800_000_000 * NS
    assert since_words(now_ns - 180 * NS, now_ns) == "since 07:57:00 UTC (3 min ago)"
    assert since_words(now_ns - 86_400 * NS, now_ns) == "since 2027-01-14 08:00:00 UTC (1 d ago)"


def test_evidence_that_only_repeats_the_title_is_left_out() -> None:
    chance = "chance of failing within a day: 60 %"
    title, reason = "lab/h/r1/node3: gpu2: XID 79: fell off the bus", "gpu2: XID 79: fell off the bus"
    assert brief_alarm({"title": title, "evidence": [reason, chance]})["evidence"] == [chance]


def test_status_shows_what_people_set_and_may_have_forgotten(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.run("control", "request", CAP, "r1", "--hi", "900", "--reason", "noise") == 0
    assert desk.run("device", "maintain", "rack", "r2", "--for", "2h", "--reason", "pump") == 0
    capsys.readouterr()
    assert desk.run("status") == 0
    said = " ".join(capsys.readouterr().out.split())
    asked = "asks for a power cap of at most 900 W for lab/h/r1/node0/gpu0 and 71 more, without an end: noise"
    assert asked in said
    assert "maintenance of rack lab/h/r2 until" in said or "maintenance of rack r2 until" in said
    assert "no protection there (pump)" in said


def test_a_round_of_requests_and_approvals(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: desk.pod.tick({"gpu.temp_c": 95.0}))
    assert (
        desk.run("control", "request", CAP, "r1", "--hi", "900", "--for", "2h", "--reason", "noise", "--json")
        == 0
    )
    identity = json.loads(capsys.readouterr().out)["id"]
    assert desk.run("control", "requests") == 0
    said = capsys.readouterr().out
    names = ", ".join(f"lab/h/r1/node0/gpu{i}" for i in range(3))
    assert f"{CAP} at most 900 W for {names} and 69 more until" in said
    assert "by operator-1: noise" in said
    assert desk.run("control", "withdraw", identity) == 0
    assert desk.pod.twin.engine.intake.requests == {}
    capsys.readouterr()
    assert desk.run("policy", "approvals") == 0
    assert "GPU temperature is beyond its guard" in capsys.readouterr().out
    assert desk.run("policy", "approve", "thermal_guard", CAP, "--for", "1h", "--json") == 0
    identity = json.loads(capsys.readouterr().out)["id"]
    assert desk.run("policy", "approvals") == 0
    assert "thermal_guard may act on gpu.power_cap_w of all until" in capsys.readouterr().out
    assert desk.run("control", "decisions", "--kind", "command") == 0
    assert "thermal_guard commands power cap" in capsys.readouterr().out
    assert desk.run("control", "withdraw", identity, "--approval") == 0
    assert desk.pod.twin.engine.intake.approvals == {}


def test_hold_resume_release_and_their_roles(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    arbiter = desk.pod.twin.engine.arbiter
    assert desk.run("control", "hold", "--reason", "x", role="viewer") == 1
    assert "needs the role operator; the token viewer-1 has the role viewer" in capsys.readouterr().err
    assert desk.run("control", "hold", "--reason", "x") == 0
    assert arbiter.mode == "held"
    assert desk.run("control", "resume") == 0
    assert desk.run("control", "release", "--reason", "x") == 1
    assert arbiter.mode == "normal"
    assert desk.run("control", "release", "--reason", "x", role="admin") == 0
    assert arbiter.mode == "released"


def test_authority_shows_and_sets(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.run("policy", "list") == 0
    assert "thermal_guard" in capsys.readouterr().out
    arm = ("policy", "set", "thermal_guard", "act", "--reason", "x")
    assert desk.run(*arm, role="admin") == 2
    assert "--acknowledge" in capsys.readouterr().err
    assert desk.run(*arm, "--acknowledge", "thermal_guard may act on moon", role="admin") == 1
    assert '"thermal_guard may act on lab"' in capsys.readouterr().err
    assert desk.run(*arm, "--acknowledge", "thermal_guard may act on lab", role="admin") == 0
    assert desk.pod.twin.engine.intake.authority["thermal_guard"] == "act"


def test_maintenance_and_alarms(desk: Desk, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from twin.daemon.alarms import AlarmBook

    assert desk.run("device", "maintain", "rack", "r1", "--for", "2h", "--reason", "pump", "--json") == 0
    identity = json.loads(capsys.readouterr().out)["id"]
    assert desk.run("device", "windows") == 0
    assert "rack lab/h/r1 until" in capsys.readouterr().out
    assert desk.run("device", "close", identity) == 0
    book = AlarmBook(tmp_path / "book")
    book.condition("part/mqtt", "warning", f"The broker is gone {NASTY}")
    book.update([], desk.pod.twin.now_ns)
    desk.pod.live.alarms = book
    assert desk.run("alarm", "ack", "part/mqtt", "--note", "on it") == 0
    assert desk.run("alarm", "shelve", "part/mqtt", "--for", "10min", "--reason", "known") == 0
    capsys.readouterr()
    assert desk.run("alarm", "list") == 0
    said = capsys.readouterr().out
    assert "shelved" in said
    assert "\x1b" not in said
    older = {
        "alarms": [msgspec.to_builtins(book.alarms["part/mqtt"])],
        "next_offset": None,
        "total": 1,
    }  # without its clock
    show.show_alarms(older, console := Console(width=200, record=True))
    assert "since 11-14 22:13:" in console.export_text()
    assert desk.run("alarm", "unshelve", "part/mqtt") == 0
    assert desk.run("alarm", "ack", "nobody") == 1
    assert "no alarm nobody" in capsys.readouterr().err


def test_a_bound_and_the_words_for_act_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    daemon = ("--url", "http://127.0.0.1:1", "--reason", "x")
    assert main(["control", "request", CAP, "r1", *daemon]) == 2
    assert "a bound is missing: expected --lo, --hi or --want; see `racktwin control request --help`" in (
        capsys.readouterr().err
    )
    assert main(["policy", "set", "thermal_guard", "act", *daemon]) == 2
    assert '--acknowledge "thermal_guard may act on SITE"' in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ("control", "hold"), ("alarm", "shelve", "x"), ("control", "request", CAP, "r1", "--hi", "nan"),
    ("policy", "approve", "a", "b", "--for", "soon"), ("policy", "approve", "thermal_guard"),
    ("policy", "set", "thermal_guard"), ("policy", "set", "thermal_guard", "off"),
    ("device", "maintain", "rack"), ("control", "request", CAP, "r1", "--hi", "9"),
])  # fmt: skip
def test_the_parser_says_what_is_missing(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == 2


def test_nobody_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["status", "--url", url]) == 1
        said = capsys.readouterr().err
        assert f"no daemon answers at {url}: start it with `racktwin daemon run`" in " ".join(said.split())


def test_another_server_is_not_taken_for_a_daemon(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *args: Any) -> None:
            pass

    with contextlib.closing(HTTPServer(("127.0.0.1", 0), Other).socket) as held:
        server = HTTPServer(("127.0.0.1", 0), Other, bind_and_activate=False)
        server.socket.close()
        server.socket = held
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{held.getsockname()[1]}"]) == 1
        thread.join(10)
    assert "may belong to another server" in capsys.readouterr().err


def test_the_token_comes_from_a_file_the_environment_or_standard_input(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    url = desk.pod.url
    assert main(["status", "--url", url]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "needs a token, and none was given: give one with --token-file FILE" in said
    assert "RACKTWIN_TOKEN_FILE or RACKTWIN_TOKEN" in said
    assert "--config FILE" in said
    monkeypatch.setenv("RACKTWIN_URL", url)
    monkeypatch.setenv("RACKTWIN_TOKEN_FILE", str(desk.folder / "viewer.token"))
    assert main(["status"]) == 0
    monkeypatch.setenv("RACKTWIN_TOKEN", desk.pod.secrets["admin"])
    assert main(["control", "release", "--reason", "x"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(desk.pod.secrets["viewer"] + "\n"))
    assert main(["control", "release", "--reason", "x", "--token-file", "-"]) == 1
    monkeypatch.setenv("RACKTWIN_TOKEN", "hunter2")
    capsys.readouterr()
    assert main(["status"]) == 1
    both = capsys.readouterr()
    assert "RACKTWIN_TOKEN: is not a token" in both.err
    assert "hunter2" not in both.out + both.err


def test_on_the_daemons_host_its_configuration_is_enough(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "racktwin.yaml"
    config.write_text("site: site.yaml\nbroker: embedded\napi: {port: 0, tokens_file: tokens.yaml}\n")
    assert (tmp_path / "state" / "api.url").read_text().strip() == desk.pod.url
    (desk.folder / "admin.token").replace(tmp_path / "state" / "admin.token")
    assert main(["status", "--config", str(config)]) == 0
    assert main(["token", "add", "screen", "--config", str(config), "--role", "viewer", "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    client = connect(desk.pod.url, None, None)
    assert (
        main(["daemon", "reload", "--config", str(config)]) == 1
    )  # this pod has no configuration to reload, but tokens
    answer = type(client)(client.url, made["token"]).get("/whoami")
    assert (answer["name"], answer["role"]) == ("screen", "viewer")


def test_tokens_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "t.yaml", tmp_path / "ann.token"
    at = ("--tokens-file", str(file))
    assert main(["token", "add", "ann", *at, "--role", "admin", "-o", str(out)]) == 0
    secret = out.read_text().strip()
    said = capsys.readouterr()
    assert secret not in said.out + said.err
    assert out.stat().st_mode & 0o777 == 0o600
    assert main(["token", "add", "bob", *at, "--expires-days", "30"]) == 0
    assert capsys.readouterr().out.strip().startswith("rt_")
    assert main(["token", "list", *at]) == 0
    said = capsys.readouterr()
    assert "ann" in said.out
    assert "sha256" not in said.out
    assert main(["token", "revoke", "ann", *at]) == 0
    assert [t.name for t in read_tokens(file)] == ["bob"]
    assert main(["token", "revoke", "ann", *at]) == 1
    assert main(["token", "add", "ann", *at, "-o", str(out)]) == 0, "a token takes the place of one"


def test_a_token_is_written_over_no_other_file_and_into_none_without_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "t.yaml", tmp_path / "racktwin.yaml"
    config.write_text("site: site.yaml\n")
    at = ("--tokens-file", str(file))
    assert main(["token", "add", "bob", *at]) == 0
    before = file.read_bytes()
    for out, why in (
        (file, "holds no token"),
        (config, "holds no token"),
        (tmp_path / "no" / "x", "No such"),
    ):
        assert main(["token", "add", "ann", *at, "-o", str(out)]) == 1
        said = capsys.readouterr()
        assert why in said.err
        assert "rt_" not in said.err.replace("expected one line, rt_", "")
    assert file.read_bytes() == before
    assert config.read_text() == "site: site.yaml\n"


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8077", "ftp://x", "http://", "http://x/y", "http://u:p@x", "http://x:99999", "http://[x"],
)
def test_an_address_is_checked(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--url: expected"):
        connect(url, None, None)


def test_a_token_is_not_sent_in_clear_over_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKTWIN_TOKEN", "rt_" + "x" * 43)
    with pytest.raises(ConfigError, match="unencrypted over the network"):
        connect("http://192.0.2.1:8077", None, None).get("/state")


def test_the_administrators_token_of_this_host_goes_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "racktwin.yaml"
    config.write_text("site: site.yaml\nbroker: embedded\nstate: state\n")
    secret = add_token(tmp_path / "tokens.yaml", "local-admin", "admin")
    (tmp_path / "state").mkdir()
    write_private(tmp_path / "state" / "admin.token", secret)
    monkeypatch.setenv("RACKTWIN_CONFIG", str(config))
    assert connect(None, None, None).token == secret
    assert connect("http://localhost:8077", None, None).token == secret
    assert connect("https://twin.example:8077", None, None).token == ""
    assert connect("https://twin.example:8077", config, None).token == secret, "who names it means it"


def test_a_command_starts_without_what_the_daemon_needs() -> None:
    code = (
        "import sys; from twin.cli.main import main; main(['status', '--url', 'http://127.0.0.1:1']); print("
        "[m for m in ('aiohttp', 'twin.engine.engine', 'policies', 'textual', 'uvloop') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_calibration_of_the_site_and_of_an_entity(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.run("calibration", role="viewer") == 0
    said = capsys.readouterr().out
    assert "144" in said
    assert "no learned parameter has drifted beyond its band" in said
    assert desk.run("calibration", "r1/node0/gpu1", "--format", "json", role="viewer") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["name"] == "lab/h/r1/node0/gpu1"
    assert {p["state"] for p in tree["parameters"]} == {"unknown"}
    assert desk.run("calibration", "cdu1", "--format", "csv", role="viewer") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("parameter,text,unit,state,value,band,nominal,")
    assert any(line.startswith("cdu.ua,") for line in lines)
    for words, why in (
        (("calibration", "r1/node0/gpu9"), "no r1/node0/gpu9 with learned parameters"),
        (("calibration", "--below", "r7"), "nothing at r7"),
        (("calibration", "--parameter", "gpu.resistence"), "expected a name such as gpu.resistance"),
    ):
        assert desk.run(*words) == 1
        assert why in capsys.readouterr().err
