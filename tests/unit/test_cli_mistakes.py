"""Mistakes on the command line: each is told with what, where, what was expected, and what to do."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twin.cli.commands import FORMER, NOUNS, help_of, parser_of, verb_of
from twin.cli.main import main, parse

SITE = """\
site: lab
halls:
  - name: h1
    racks: [{name: r1, nodes: 1, gpus_per_node: 2}]
"""
FRAME = {"t_ns": 1_767_225_600_000_000_000, "gpu": {"155": [300.0, 310.0], "150": [50, 51]}}
ROW = {"offset_s": 0, "topic": "IT/v1/PUB/Frame/lab/h1/r1", "payload": FRAME}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound but not listening: a connection is refused
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def main_code(call: str) -> int:
    """The exit code of a call."""
    try:
        return main(shlex.split(call))
    except SystemExit as end:
        return int(end.code or 0)


def said(call: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, standard error) of a call."""
    code = main_code(call)
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return code, " ".join(out.err.split())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # words that are no commands
        ("statsu", "unknown command 'statsu'; did you mean status?"),
        ("alram list", "unknown command 'alram'; did you mean alarm?"),
        ("alarm lsit", "racktwin alarm: unknown verb 'lsit'; did you mean list?"),
        ("ackk X", "unknown command 'ackk'; did you mean ack?"),
        ("approvals", "did you mean policy approvals?"),
        ("trace", "racktwin trace: a verb is missing: expected record, replay, info"),
        ("fleet", "racktwin fleet: a verb is missing: expected run, status, budgets"),
        ("fleet --log-json", "racktwin fleet: a verb is missing: expected run, status, budgets"),
        ("policy reboot", "expected list, set, explain, approvals, approve, revoke"),
        # options
        ("alarm list --severty critical", "unknown option '--severty'; did you mean --severity?"),
        ("trace replay --trcae x", "unknown option '--trcae'; did you mean --trace"),
        (
            "site check a.yaml --all-of-it",
            "unknown option '--all-of-it'; expected an option that the help lists",
        ),
        ("alarm shelve X --for 2h", "required: --reason"),
        ("alarm list --format xml", "--format: 'xml': expected one of table, json, csv"),
        ("device health --part gpus", "'gpus': expected one of gpu, node"),
        ("daemon run --json", "--json: this command prints no table; leave the option out"),
        ("site check site.yaml --format csv", "'csv': expected one of table, json"),
        (
            "policy set thermal_guard acts --reason x",
            "'acts': expected one of off, advise, approve, act; did you mean act?",
        ),
        ("completion tcsh", "'tcsh': expected one of bash, zsh, fish"),
        # values
        ("alarm shelve X --for 90 --reason x", "--for: '90': expected a duration with its unit, such as 90s"),
        ("alarm shelve X --for -2h --reason x", "--for: '-2h': expected a duration with its unit"),
        ("alarm shelve X --for soon --reason x", "'soon': expected a duration with its unit"),
        ("control decisions --limit 0", "--limit: '0': expected a whole number from 1"),
        ("power target x --limit 500", "'500': expected a power with its unit, such as 500kW"),
        ("power target x --limit 5kW --until soonish", "--until 'soonish': expected a time such as 06:00"),
        ("simulation publish --site s --broker host:port", "'host:port': expected HOST or HOST:PORT"),
        ("simulation publish --site s --broker mqtts://h:8883", "`broker.tls` of the configuration sets TLS"),
        ("simulation run --site site.yaml --seed -1", "--seed: '-1': expected a whole number from 0"),
        (
            "simulation run --site site.yaml --for 1h --authority thermal_gard=act",
            "did you mean thermal_guard",
        ),
        ("simulation run --site site.yaml --for 1h --authority thermal_guard=acts", "did you mean act?"),
        ("journal show run --kind comand", "--kind comand: is unknown; expected one of"),
        (
            "control request gpu.power_cap_w r1 --reason x",
            "a bound is missing: expected --lo, --hi or --want",
        ),
        ("forecast list --name r1", "--name: a quantity is missing: expected one such as rack.power_w"),
        (
            "checkpoint plan --nodes 4 --url http://x",
            "are of a hypothetical job: expected no --url",
        ),
        ("status hall1", "unexpected argument 'hall1'; expected only the arguments that the help lists"),
        # files
        ("site check nowhere.yaml", "nowhere.yaml: cannot be read: No such file or directory"),
        ("site check run", "run: cannot be read: Is a directory"),
        ("models import x --key nowhere", "--key nowhere: cannot be read: No such file or directory"),
        ("journal verify run --key run", "--key run: cannot be read: Is a directory"),
        (
            "trace replay --trace empty",
            "empty: a folder without trace-*.rt; expected a recorded run or a file",
        ),
        (
            "trace replay --trace capture.jsonl",
            "--site: missing; `racktwin site discover` creates a site",
        ),
        ("trace replay --trace nowhere", "nowhere: no such file"),
        ("trace replay --trace torn/trace-000000.rt", "torn/trace-000000.rt"),
        ("trace replay --site other.yaml --trace capture.jsonl", "or --foreign to replay it"),
        ("trace replay --site other.yaml --trace run", "leave --site out to use the site in the trace"),
        (
            "trace replay --site site.yaml --trace capture.jsonl --out empty-not",
            "--out empty-not: exists; expected a new file",
        ),
        ("trace record --broker 127.0.0.1 --out capture.txt", "expected a name that ends in .jsonl"),
        ("site discover capture.jsonl --out site.yaml", "no retained metadata"),
        ("site acl --site site.yaml --out no/such/racktwin.acl", "no/such/racktwin.acl: cannot be written"),
        ("token list", "no configuration: neither --config nor RACKTWIN_CONFIG names one"),
        ("daemon run", "`racktwin init` writes one"),
        ("daemon check --config site.yaml", "is a site file, which says what stands where; expected"),
        # the daemon
        ("status --url 127.0.0.1:8077", "--url: expected http://HOST:PORT"),
        (
            "status --url http://127.0.0.1:{port}",
            "no daemon answers at http://127.0.0.1:{port}: start it with `racktwin",
        ),
        ("status --url http://127.0.0.1:{port} --token-file nowhere", "nowhere"),
        (
            "device report h/r1/node0 --url http://127.0.0.1:{port} --out capture.jsonl",
            "--force overwrites it",
        ),
        ("status --watch now", "--watch: 'now': expected a duration with its unit"),
        ("simulation publish --site site.yaml --broker 127.0.0.1:{port} --for 1s", "127.0.0.1:{port}"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(
    recorded: Path, capsys: pytest.CaptureFixture[str], closed_port: int, call: str, words: str
) -> None:
    code, err = said(call.replace("{port}", str(closed_port)), capsys)
    assert code not in (0, 130)
    assert words.replace("{port}", str(closed_port)) in err


def test_a_group_without_a_verb_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said("fleet", capsys)
    assert code == 2
    assert err.startswith("usage: racktwin fleet VERB ...")
    assert help_of("fleet").splitlines()[-1] in err


def test_a_fleet_with_a_configuration_starts_the_hub() -> None:
    for call in (["fleet", "--config", "hub.yaml"], ["fleet", "--log-json", "--config=hub.yaml"]):
        assert parse(call).command == "fleet run"


@pytest.mark.parametrize(
    "call",
    [
        "daemon run --config nowhere.yaml",
        "daemon check --config nowhere.yaml",
        "fleet --config nowhere.yaml",
        "run --config nowhere.yaml",
        "site check nowhere.yaml site.yaml",
        "token list --config nowhere.yaml",
        "status --config nowhere.yaml",
        "journal verify nowhere",
        "journal verify torn-journal",
        "trace info nowhere",
        "alarm lsit",
    ],
)
def test_every_error_begins_alike(recorded: Path, capsys: pytest.CaptureFixture[str], call: str) -> None:
    (recorded / "torn-journal").write_text("{}\n")
    assert main_code(call) not in (0, 130)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note ")]
    assert [line for line in lines if not line.startswith("error ")] == []
    assert lines


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """Files for the mistakes: a site, another one, a capture of the first, a run of it, a torn one."""
    (folder / "site.yaml").write_text(SITE)
    (folder / "other.yaml").write_text(SITE.replace("site: lab", "site: other").replace("r1", "x1"))
    (folder / "capture.jsonl").write_text(f"{json.dumps(ROW)}\n" * 5)
    (folder / "empty").mkdir()
    (folder / "empty-not").mkdir()
    (folder / "empty-not" / "file").write_text("mine")
    files = ["--site", str(folder / "site.yaml"), "--trace", str(folder / "capture.jsonl")]
    assert main(["trace", "replay", *files, "--out", str(folder / "run")]) == 0
    (folder / "torn").mkdir()
    whole = (folder / "run" / "trace-000000.rt").read_bytes()
    (folder / "torn" / "trace-000000.rt").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture
def recorded(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(made / "none"))
    for name in ("RACKTWIN_CONFIG", "RACKTWIN_URL", "RACKTWIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize(("noun", "verb"), [(n, v) for n, noun in NOUNS.items() for v in noun.verbs])
def test_every_help_has_examples_that_parse(noun: str, verb: str) -> None:
    examples = verb_of(noun, verb).examples
    assert examples
    for example in examples:
        assert parse([noun, *filter(None, [verb]), *shlex.split(example)]).command == f"{noun} {verb}".strip()
    text = parser_of(noun, verb).format_help()
    assert "examples:" in text
    wrong = ("%%", "--json", "HOST=PORT", "default: \n")
    assert [words for words in wrong if words in text] == []


def test_a_name_of_before_works_and_names_the_new_one(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "site.yaml"]) == 0
    assert "note `racktwin check` is now `racktwin site check`" in capsys.readouterr().err
    assert parse(["approve", "thermal_guard", "gpu.power_cap_w"]).command == "policy approve"
    assert parse(["approve", "--json"]).command == "policy approvals"
    assert parse(["outlook", "--quantity", "rack.power_w", "plan.csv"]).command == "forecast send"
    assert parse(["maintenance", "--end", "window-1"]).command == "device close"
    assert parse(["run", "--check", "--online", "--listen", "1.5"]).listen_s == 1.5
    assert (parse(["init", "--seconds", "0"]).for_s, parse(["init", "--for", "0s"]).for_s) == (0, 0)
    for new in " | ".join(FORMER.values()).split(" | "):
        noun, verb = new.split()
        assert verb in NOUNS[noun].verbs


def test_the_configuration_is_found_where_the_help_says(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "racktwin").mkdir()
    named = tmp_path / "racktwin" / "racktwin.yaml"
    named.write_text(f"site: {recorded / 'site.yaml'}\nbroker: embedded\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["daemon", "check"]) == 0
    assert str(named) in capsys.readouterr().out
    monkeypatch.setenv("RACKTWIN_CONFIG", str(tmp_path / "gone.yaml"))
    assert main(["daemon", "check"]) == 78
    assert "gone.yaml: cannot be read" in capsys.readouterr().err


def test_an_answer_goes_to_a_file_in_the_format_of_its_ending(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "list", "--out", str(tmp_path / "list.csv")]) == 0
    head, *rows = (tmp_path / "list.csv").read_text().splitlines()
    assert head.startswith("name,")
    assert rows
    assert main(["trace", "info", "run", "--out", str(tmp_path / "run.json")]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["form"] == "native"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = set(script.replace('"', " ").replace(")", " ").split())
    assert {verb for noun in NOUNS.values() for verb in noun.verbs if verb} <= words
    assert ("acknowledge" if shell == "fish" else "--acknowledge") in words
    assert not {"--seconds", "--hours", "--json"} & words


# The completions of a shell for a line; {line} as words, {script} is what `completion` printed.
ASKED = {
    "bash": 'source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
            'COMPREPLY=(); _racktwin; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "zsh": "autoload -U +X compinit && compinit -u -D; source {script}; f() {{ emulate -L sh; "
           'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); _racktwin; '
           'printf "%s\\n" "${{COMPREPLY[@]}}"; }}; f',
    "fish": "source {script}; complete -C '{line}' | string split -f1 \\t",
}  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "offered", "beside"),
    [
        ("racktwin al", {"alarm"}, {"status"}),
        ("racktwin alarm sh", {"shelve"}, {"ack", "alarm"}),
        ("racktwin alarm list --sev", {"--severity"}, {"--reason"}),
        ("racktwin alarm list --format ", {"table", "json", "csv"}, {"--format"}),
        ("racktwin sources --", {"--limit", "--watch"}, {"--severity"}),
    ],
)
def test_completion_in_the_shell(
    shell: str, line: str, offered: set[str], beside: set[str], tmp_path: Path,
    server: Callable[..., Path], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    program = server(shell)
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    words = " ".join(f"'{word}'" for word in line.split(" "))
    asked = ASKED[shell].format(script=script, words=words, line=line)
    flags = {"zsh": ["-f"], "fish": ["--no-config"], "bash": ["--norc"]}[shell]
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TERM": "dumb"}
    answer = subprocess.run([str(program), *flags, "-c", asked], capture_output=True, text=True, env=home,
                            cwd=tmp_path, timeout=60, check=False)  # fmt: skip
    begun = line.rpartition(" ")[2]  # zsh drops what does not fit by itself
    found = {word for word in answer.stdout.split() if word.startswith(begun)}
    assert offered <= found, answer.stderr
    assert not beside & found


# Commands whose output is no data: a file of another form, a terminal, a process that runs
NO_DATA = {
    ("site", "discover"): "a site file",
    ("site", "acl"): "an access list",
    ("site", "split"): "writes site files, and says which",
    ("completion", ""): "a script",
    ("init", ""): "writes files, and says which",
    ("demo", ""): "a process that tells a story",
    ("daemon", "run"): "a process with logs",
    ("fleet", "run"): "a process with logs",
    ("top", ""): "a terminal that is drawn on",
}


def test_every_command_that_prints_data_prints_json() -> None:
    """By its kind: whatever is not named here takes --json, and says so."""
    without = set()
    for name, noun in NOUNS.items():
        for verb in noun.verbs:
            if not verb_of(name, verb).answers:
                without.add((name, verb))
            else:
                assert "--json" in parser_of(name, verb)._option_string_actions, (name, verb)
    assert without == NO_DATA.keys()
