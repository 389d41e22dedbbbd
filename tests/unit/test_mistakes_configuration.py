"""Mistakes that people make in the configuration, the site file and mappings, each with the message it gives.

A message says where, what is there, what was expected, and mostly what to do. None is silent.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from twin.cli.main import main
from twin.wiring import external_files

SITE = 'site: lab\nhalls:\n- name: h\n  racks:\n  - {name: "r[1-2]", profile: gb200-nvl72}\n'
CONFIG = "site: site.yaml\nbroker: {host: broker.example.net}\n"
OURS = "site: site.yaml\nbroker: {host: b, %s}\n"
RULE = "rules:\n- table: gpu\n  entity: ['{host}/gpu{i}']\n  signals: {p: %s}\n"


class Mistake(NamedTuple):
    """One mistake: what was written, and what must be said. `is_note`: it is allowed, and remarked."""

    said: tuple[str, ...]
    config: str | bytes | None = CONFIG
    site: str | None = SITE
    files: tuple[tuple[str, str | bytes], ...] = ()
    is_note: bool = False


def scrape(more: str, map_: str = "dcgm") -> str:
    return f"{CONFIG}scrapes:\n- {{map: {map_}, {more}}}\n"


MAPPED = scrape("url: 'http://n:9400/metrics'", "m.yaml")

CONFIGURATION = {
    "a key is misspelt": Mistake(("$.scrape: unknown key", "did you mean scrapes?"), CONFIG + "scrape: []\n"),
    "a key of a section is misspelt": Mistake(
        ("$.broker.prot: unknown key", "did you mean port?"), OURS % "prot: 1"
    ),
    "a password stands in the file": Mistake(
        ("$.broker.password: unknown key", "did you mean password_file?"), OURS % "password: x"
    ),
    "no site, a wrong broker and an unknown key": Mistake(
        ("$.broker: expected a mapping", "$.site: missing", "$.tick: unknown key"), "broker: b\ntick: 1\n"
    ),
    "no broker": Mistake(("$.broker: missing", "`broker: embedded`"), "site: site.yaml\n"),
    "the broker is a name": Mistake(
        ("$.broker: expected a mapping with `host`",), "site: site.yaml\nbroker: b\n"
    ),
    "the host is a URL": Mistake(
        ("$.broker.host: expected a name or an address alone", "'mqtt://b:1883'", "the port is `port`"),
        "site: site.yaml\nbroker: {host: 'mqtt://b:1883'}\n",
    ),
    "a number in quotes": Mistake(
        ("$.broker.port: expected a whole number", "write 1883"), OURS % "port: '1883'"
    ),
    "a number with a unit": Mistake(("$.tick_s: expected a number", "alone, 1"), CONFIG + "tick_s: 1s\n"),
    "a negative number": Mistake(
        ("$.tick_s: expected a number from 0.1 to 300, got -1",), CONFIG + "tick_s: -1\n"
    ),
    "a key twice": Mistake(("line 4", "'tick_s' is already in line 3"), CONFIG + "tick_s: 1\ntick_s: 2\n"),
    "tabs": Mistake(("line 3", "a tab; expected spaces"), "site: site.yaml\nbroker:\n\thost: b\n"),
    "an empty file": Mistake(("racktwin.yaml: is empty; expected the daemon's configuration",), ""),
    "no file": Mistake(("racktwin.yaml: cannot be read: No such file",), None),
    "the files are swapped": Mistake(("is a site file", "`site: site.yaml`"), SITE),
    "the site inside the configuration": Mistake(
        ("$.site: expected the path of a site file",), "site: {site: lab}\nbroker: embedded\n"
    ),
    "no site file": Mistake(("$.site", "no such file", "`racktwin site discover` makes one"), site=None),
    "one item without a list": Mistake(
        ("$.scrapes: expected a list", "begin each item with `- `"),
        CONFIG + "scrapes: {url: 'http://n:1/m', map: dcgm}\n",
    ),
    "a URL without http": Mistake(
        ("$.scrapes[0].url: expected a URL with http:// or https://",), scrape("url: 'node1:9400/metrics'")
    ),
    "an impossible port": Mistake(
        ("$.scrapes[0].url: expected a host and a port from 1 to 65535",),
        scrape("url: 'http://n:94000/metrics'"),
    ),
    "a map that is not there": Mistake(
        ("$.scrapes[0].map: dcmg: no such mapping", "ascend, dcgm"), scrape("url: 'http://n:1/m'", "dcmg")
    ),
    "a place that is not there": Mistake(
        ("$.scrapes[0].place: the site has no 'lab/h/r9/node0'",),
        scrape("url: 'http://n:1/m', place: lab/h/r9/node0"),
    ),
    "as many places as hosts": Mistake(
        ("$.scrapes[0].url: 3 hosts for 2 places; expected as many",),
        scrape("url: 'http://n[1-3]/m', place: 'lab/h/r1/node[0-1]'"),
    ),
    "the same exporter twice": Mistake(
        ("$.scrapes[1].url: $.scrapes[0] scrapes http://127.0.0.1:9400/m",),
        scrape("url: 'http://localhost:9400/m'") + "- {map: dcgm, url: 'http://127.0.0.1:9400/m'}\n",
    ),
    "a password file that is not there": Mistake(
        ("$.broker.password_file", "pw: the secret cannot be read"), OURS % "username: u, password_file: pw"
    ),
    "an empty password file": Mistake(
        ("pw: is empty; expected a secret",), OURS % "username: u, password_file: pw", files=(("pw", "\n"),)
    ),
    "a password that everybody may read": Mistake(
        ("expected 600 (chmod 600)",),
        OURS % "username: u, password_file: pw",
        files=(("pw", "x\n"),),
        is_note=True,
    ),
    "a password without a user": Mistake(
        ("$.broker.username: missing",), OURS % "password_file: pw", files=(("pw", "x\n"),)
    ),
    "a certificate that is none": Mistake(
        ("$.broker.tls: a file cannot be used", "expected PEM"),
        OURS % "tls: {ca_file: ca}",
        files=(("ca", "hello"),),
    ),
    "a certificate without its key": Mistake(
        ("$.broker.tls: expected cert_file and key_file, or neither",),
        OURS % "tls: {cert_file: ca}",
        files=(("ca", "hello"),),
    ),
    "the port of TLS without TLS": Mistake(
        ("port is 8883", "expected `tls: {}` or 1883"), OURS % "port: 8883", is_note=True
    ),
    "a feed that comes anyway": Mistake(
        ("$.broker.topics[0]: 'BMS/v1/#' overlaps BMS/v1",), OURS % "topics: ['BMS/v1/#']"
    ),
    "a topic that is no filter": Mistake(
        ("$.broker.topics: topic 'a/#/x': expected an MQTT filter",), OURS % "topics: ['a/#/x']"
    ),
    "open to the network without a token": Mistake(
        ("$.api.host: 0.0.0.0 is reachable", "`tokens_file`"), CONFIG + "api: {host: 0.0.0.0}\n"
    ),
    "a BMC of a node that is not there": Mistake(
        ("$.redfish[0].bmcs.b1: the site has no node 'lab/h/r9/node0'",),
        CONFIG + "redfish: [{bmcs: {b1: lab/h/r9/node0}, user: u, password_file: pw}]\n",
        files=(("pw", "x"),),
    ),
    "a host of Slurm at no node": Mistake(
        ("jobs.slurm.node_names: the site has no node 'lab/h/r9/node0'",),
        CONFIG + "jobs: {slurm: {node_names: {g1: lab/h/r9/node0}}}\n",
        is_note=True,
    ),
    "a mapping to no signal": Mistake(
        ("m.yaml: $.rules[0].signals.p: gpu has no signal 'power'",),
        MAPPED,
        files=(("m.yaml", RULE % "power"),),
    ),
    "a unit of something else": Mistake(
        ("$.rules[0].signals.p.unit: cannot turn 'C' into 'W'",),
        MAPPED,
        files=(("m.yaml", RULE % "{signal: power_w, unit: C}"),),
    ),
    "a section that is not indented": Mistake(
        ("$.broker: expected a mapping with `host`", "check the indentation below it"),
        "site: site.yaml\nbroker:\nhost: b\n",
    ),
    "an indentation too much": Mistake(
        ("line 4, column 8", "check the indentation"),
        "site: site.yaml\nbroker:\n  host: b\n   port: 1\n",
    ),
    "no space behind a colon": Mistake(
        ("line 2", "a `:` without a space behind it in the line before"),
        "site:site.yaml\nbroker: {host: b}\n",
    ),
    "a bracket that is not closed": Mistake(
        ("a bracket is not closed",), "site: site.yaml\nbroker: {host: b\n"
    ),
    "a template that was not filled in": Mistake(
        ("a template that was not filled in",), OURS.replace("b,", "{{ broker }},") % "port: 1"
    ),
    "a Windows path": Mistake(
        ("put a path with \\ in single quotes",), 'site: "C:\\sites\\site.yaml"\nbroker: embedded\n'
    ),
    "saved by Windows as UTF-16": Mistake(
        ("is UTF-16", "a YAML text file in UTF-8"), CONFIG.encode("utf-16")
    ),
    "quotes of a word processor": Mistake(
        ("line 1: typographic quotes",), "site: \u201csite.yaml\u201d\nbroker: embedded\n"
    ),
    "two documents": Mistake(("one document only",), CONFIG + "---\n" + CONFIG),
    "a host list with two points": Mistake(
        ("expected a host list such as node[01-18]",), scrape("url: 'http://node[01..18]:9400/m'")
    ),
    "a host list of the shell": Mistake(
        ("expected a host list such as node[01-18]",), scrape("url: 'http://node{01..18}:9400/m'")
    ),
    "a host list that is not closed": Mistake(
        ("expected a host list such as node[01-18]",), scrape("url: 'http://node[01-18:9400/m'")
    ),
    "a variable of the environment for a file": Mistake(
        ("$MQTT_PASSWORD", "variables of the environment are not put in"),
        OURS % "username: u, password_file: '$MQTT_PASSWORD'",
    ),
    "a decimal comma": Mistake(("$.tick_s: expected a number", "write 0.5"), CONFIG + "tick_s: 0,5\n"),
    "a port with a zero in front": Mistake(
        ("$.broker.port: expected a whole number", "write 1883"), OURS % "port: 01883"
    ),
    "a section switched off": Mistake(
        ("$.api: expected a mapping, got False; write null",), CONFIG + "api: off\n"
    ),
    "a section switched on": Mistake(
        ("$.broker.tls: expected a mapping, got True; {} has all defaults",), OURS % "tls: true"
    ),
    "one topic without a list": Mistake(
        ("$.broker.topics: expected a list", "write ['telegraf/#']"), OURS % "topics: telegraf/#"
    ),
    "a map for a topic that is not subscribed to": Mistake(
        ("$.broker.maps: 'telegraf/x' is none of `topics`", "did you mean telegraf/#?"),
        OURS % "topics: ['telegraf/#'], maps: {telegraf/x: telegraf}",
    ),
    "an empty client id": Mistake(("$.broker.client_id: is empty",), OURS % "client_id: ''"),
    "kilowatts for watts": Mistake(
        ("lab/f: budget_w is 120 W", "120 kW is 120000"),
        site=SITE + "feeders: [{name: f, serves: [r1], budget_w: 120}]\n",
        is_note=True,
    ),
    "a byte order mark and Windows' line ends": Mistake(
        ("racktwin.yaml: ok",), ("\ufeff" + CONFIG.replace("\n", "\r\n")).encode(), is_note=True
    ),
    "a name that means nothing": Mistake(
        ("$.names: the site has no 'lab/h/r9/node0', that 'g1' means",),
        MAPPED,
        files=(("m.yaml", "extends: dcgm\nnames: {g1: lab/h/r9/node0}\n"),),
        is_note=True,
    ),
}

SITES = {
    "a key is misspelt": (SITE.replace("halls", "hals"), "$.hals: unknown key", "did you mean halls?"),
    "a key at the wrong place": (
        SITE + "cdus: [{name: c}]\n",
        "$.cdus: unknown key",
        "belongs into an item of halls",
    ),
    "a unit in the key": (
        SITE + "feeders: [{name: a, budget_kw: 9}]\n",
        "$.feeders[0].budget_kw: unknown key",
        "did you mean budget_w?",
    ),
    "an unknown profile": (SITE.replace("gb200", "gb20"), "no profile 'gb20-nvl72'", "gb200-nvl72"),
    "a profile with _": (
        SITE.replace("200-", "200_"),
        "no profile 'gb200_nvl72'",
        "did you mean gb200-nvl72",
    ),
    "a range without quotes": (SITE.replace('"', ""), "a name with [ ] or { } is not in quotes"),
    "an authority that YAML takes for a truth value": (
        SITE + "policies: {thermal_guard: {authority: off}}\n",
        "authority: expected one of off, advise, approve, act, got False",
        "quote the word",
    ),
    "kilowatts for a highest cap": (
        SITE + "controls: {gpu.power_cap_w: {max: 1.2}}\n",
        "nothing is left, 200 to 1.2; expected min <= max within the 200 to 1200",
    ),
    "a setting that is none": (
        SITE + "policies: {power_cap: {settings: {contract_kw: 100}}}\n",
        "$.policies.power_cap.settings: there is no 'contract_kw'",
        "did you mean contract_w?",
    ),
    "a rack twice": (SITE + "  - {name: r1}\n", "the rack lab/h/r1 is described twice"),
    "a loop of feeders": (
        SITE + "feeders: [{name: a, serves: [b]}, {name: b, serves: [a]}]\n",
        "$.feeders[0].serves: lab/a is part of a loop; expected a tree",
    ),
    "a feeder of no rack": (
        SITE + "feeders: [{name: a, serves: [r9]}]\n",
        "$.feeders[0].serves: 'r9' is neither a feeder nor a rack of this file",
    ),
    "a feeder with two parents": (
        SITE + "feeders: [{name: a, serves: [c]}, {name: b, serves: [c]}, {name: c, serves: [r1]}]\n",
        "$.feeders[1].serves: 'c' is already served by lab/a",
    ),
    "a CDU of no rack": (
        SITE + "  cdus: [{name: c, serves: [r7]}]\n",
        "'lab/h/r7' is not a rack of this hall",
    ),
    "a rack on two CDUs": (
        SITE + "  cdus: [{name: c, serves: [r1]}, {name: d, serves: [r1]}]\n",
        "'lab/h/r1' is already served by lab/h/c",
    ),
    "a negative budget": (
        SITE + "feeders: [{name: a, budget_w: -5}]\n",
        "budget_w: expected a number > 0, got -5",
    ),
    "a range downwards": (SITE.replace("[1-2]", "[2-1]"), "expected an ascending range", "'r[2-1]'"),
    "a truth value for a name": (
        "site: lab\nhalls: [{name: no}]\n",
        "expected text, got False",
        "so quote it",
    ),
    "watts as kilowatts": (
        SITE + "controls: {gpu.power_cap_w: {min: 0.4}}\n",
        "$.controls.gpu.power_cap_w.min: 0.4 is below the 200 of catalogue or profile",
    ),
    "a control that is none": (
        SITE + "controls: {gpu.power_cap: {min: 400}}\n",
        "not a control of the catalogue",
        "gpu.power_cap_w",
    ),
    "a period with a unit": (
        SITE + "periods_s: {gpu: 30s}\n",
        "$.periods_s.gpu: expected a number",
        "alone, 30",
    ),
    "a policy that is none": (
        SITE + "policies: {thermal_gard: {}}\n",
        "'thermal_gard' is not registered",
        "thermal_guard",
    ),
    "an authority that is none": (
        SITE + "policies: {thermal_guard: {authority: activ}}\n",
        "expected one of off, advise, approve, act, got 'activ'",
    ),
    "text that is no text": ("\x00", "byte 0 is no text; expected YAML"),
}


def said_of(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "500")
    code = main(words)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("name", CONFIGURATION)
def test_a_mistake_in_the_configuration_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any, monkeypatch: Any
) -> None:
    mistake = CONFIGURATION[name]
    files = {"racktwin.yaml": mistake.config, "site.yaml": mistake.site, **dict(mistake.files)}
    for file, text in files.items():
        if text is not None:
            (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
            (tmp_path / file).chmod(0o644)
    code, text = said_of(["daemon", "check", "--config", "racktwin.yaml"], tmp_path, capsys, monkeypatch)
    assert code == (0 if mistake.is_note else 78)
    assert [part for part in mistake.said if part not in text + caplog.text] == [], text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", SITES)
def test_a_mistake_in_the_site_file_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, *parts = SITES[name]
    (tmp_path / "site.yaml").write_text(site)
    code, text = said_of(["site", "check", "site.yaml"], tmp_path, capsys, monkeypatch)
    assert code == 1
    assert text.count("site.yaml: ")
    assert [part for part in parts if part not in text] == [], text
    assert "Traceback" not in text


def test_what_stands_right_is_not_remarked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "racktwin.yaml").write_text(scrape("url: 'http://n:9400/metrics', place: lab/h/r1/node0"))
    code, text = said_of(["daemon", "check", "--config", "racktwin.yaml"], tmp_path, capsys, monkeypatch)
    assert (code, "note:" in text) == (0, False)


def test_an_authority_that_expired_is_told(
    tmp_path: Path,
    server: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=ca -keyout ca.key -out ca.pem"
    subprocess.run([str(server("openssl")), *words.split()], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "racktwin.yaml").write_text(OURS % "port: 8883, tls: {ca_file: ca.pem}")
    check = ["daemon", "check", "--config", "racktwin.yaml"]
    assert said_of(check, tmp_path, capsys, monkeypatch)[0] == 0
    monkeypatch.setattr(external_files, "time", SimpleNamespace(time=lambda: time.time() + 3 * 86_400))
    code, text = said_of(check, tmp_path, capsys, monkeypatch)
    assert code == 78
    assert "$.broker.tls.ca_file: its certificates expired, the last " in text
    assert "expected one that is valid now" in text
