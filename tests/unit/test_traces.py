"""Recordings: where they lie, what `verify` notices, what `fetch` does with good, wrong and no answers."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from twin.catalogue import ConfigError, ConnectorError, StorageError
from twin.cli import traces
from twin.cli.commands import parser_of

CSV = b"time,x\n2020-01-01,1\n" * 50
EVENTS = [{"node_id": "a", "event_time": 3.5}, {"node_id": "b", "event_time": 231.9999}]
LATER = [{"node_id": "c", "event_time": 232.0}, {"node_id": "d", "event_time": 300.1}]
CUT = json.dumps(EVENTS, indent=0).encode()


def _file(local: str, path: str, content: bytes, **more: object) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    return {"local": local, "path": path, "size": len(content), "sha256": digest} | more


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> traces.Recording:
    tree = {
        "name": "small", "title": "t", "repository": "https://github.com/o/n", "commit": "a" * 40,
        "licence": "MIT", "exercises": "tests",
        "files": [
            _file("a.csv", "some dir/a.csv", CSV),
            _file("vc/b.csv.xz", "b.csv", CSV, transform="xz"),
            _file("c.json", "c.json", CUT, transform="cut", cut={"key": "event_time", "below": 232.0}),
        ],
    }  # fmt: skip
    path = tmp_path / "recordings.yaml"
    path.write_text(json.dumps({"recordings": [tree]}))
    known = traces.list_recordings(path)
    monkeypatch.setattr(traces, "list_recordings", lambda: known)
    return known[0]


class Web:
    """A server on the loopback that stands in for the public repository."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.short = False
        web = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                body = web.answers.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Length", str(len(body or b"") + (10 if web.short else 0)))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Web()
    at = f"/o/n/{'a' * 40}"
    server.answers = {
        f"{at}/some%20dir/a.csv": CSV,
        f"{at}/b.csv": CSV,
        f"{at}/c.json": json.dumps(EVENTS + LATER, indent=4).encode(),
    }
    yield server
    server.server.shutdown()
    server.server.server_close()
    server.thread.join()


def _states(checks: list[traces.FileCheck]) -> list[str]:
    return [c.state for c in checks]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RACKTWIN_TRACES": "/t", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/t"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/racktwin/traces"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/racktwin/traces"),
        ({"HOME": "/h", "RACKTWIN_TRACES": ""}, "/h/.cache/racktwin/traces"),
    ],
)
def test_root(env: dict[str, str], expected: str) -> None:
    assert traces.trace_root(env) == Path(expected)


def test_the_shipped_list_is_sound() -> None:
    known = traces.list_recordings()
    assert len(known) == 14
    for r in known:
        assert r.files
        assert all(traces.url_of(r, f).startswith("https://raw.githubusercontent.com/") for f in r.files)
        assert all(" " not in traces.url_of(r, f) for f in r.files)
    assert traces.find_recording("grid-hourly").commit.startswith("293fbd1")
    with pytest.raises(ConfigError, match="expected one of dsx-bms-capture"):
        traces.find_recording("nix")


EVALUATED = (  # of the evaluation and of backtests by hand: tests do without them
    "weather-years-sustaindc",
    "gpu-lives-titan",
    "node-failures-lanl",
    "node-availability-grid5000",
    "disk-failures-alpine-campaign",
    "training-step-traces",
)


@pytest.mark.parametrize("name", [r.name for r in traces.list_recordings()])
def test_recordings_at_hand_are_the_recorded_ones(name: str, recording: Callable[[str], Path]) -> None:
    if name in EVALUATED and not (traces.trace_root(os.environ) / name).exists():
        pytest.skip(f"recording {name}: no test reads it; `racktwin trace fetch {name}`")
    assert set(_states(traces.verify(name, recording(name).parent))) == {"ok"}


def test_the_cut_is_written_as_the_stored_file_is(recording: Callable[[str], Path]) -> None:
    stored = (recording("gpu-server-faults") / "fault_trace_to_day232.json").read_bytes()
    upstream = json.dumps(json.loads(stored) + LATER, indent=4).encode()
    file = traces.find_recording("gpu-server-faults").files[0]
    assert traces._transformed(upstream, file, "url") == stored


def test_a_file_that_is_packed_at_its_source_is_known_by_its_content() -> None:
    packed = lzma.compress(CSV)
    known = {"local": "d.xz", "path": "d.xz", "sha256": hashlib.sha256(CSV).hexdigest(), "size": len(CSV)}
    file = traces.TraceFile(**known, transform="packed")  # type: ignore[arg-type]
    assert traces._transformed(packed, file, "url") == CSV
    assert len(traces._transformed(lzma.compress(CSV * 1000), file, "url")) == len(CSV) + 1  # no more of it
    with pytest.raises(ConnectorError, match=r"url cannot be unpacked: .*expected an \.xz file"):
        traces._transformed(CSV, file, "url")


def test_all_faults_of_a_list_are_named(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    one = {"name": "Small", "title": "t", "repository": "http://x/y", "commit": "main", "licence": "MIT",
           "exercises": "x", "files": [_file("../a", "a", b"", transform="cut", sha256="1")]}  # fmt: skip
    path.write_text(json.dumps({"recordings": [one]}))
    with pytest.raises(ConfigError) as caught:
        traces.list_recordings(path)
    text = str(caught.value)
    assert all(w in text for w in ("unique name", "repository", "40 hex", "inside", "64 hex", "transform"))
    assert len(caught.value.problems) == 6


def test_fetch_then_verify(listed: traces.Recording, web: Web, tmp_path: Path) -> None:
    assert _states(traces.verify("small", tmp_path)) == ["missing"] * 3
    assert _states(traces.fetch("small", tmp_path, web.base)) == ["fetched"] * 3
    assert _states(traces.verify("small", tmp_path)) == ["ok"] * 3
    assert lzma.decompress((tmp_path / "small/vc/b.csv.xz").read_bytes()) == CSV
    assert (tmp_path / "small/c.json").read_bytes() == CUT
    asked = len(web.asked)
    assert _states(traces.fetch("small", tmp_path, web.base)) == ["ok"] * 3
    assert len(web.asked) == asked  # what is right is not asked for again
    assert not list(tmp_path.rglob(".fetch-*"))


def test_verify_notices(listed: traces.Recording, web: Web, tmp_path: Path) -> None:
    traces.fetch("small", tmp_path, web.base)
    a, b = tmp_path / "small/a.csv", tmp_path / "small/vc/b.csv.xz"
    a.write_bytes(CSV[:-1] + b"?")
    assert _states(traces.verify("small", tmp_path)) == ["hash", "ok", "ok"]
    a.write_bytes(CSV + b"?")
    b.write_bytes(b.read_bytes()[:-9])
    assert _states(traces.verify("small", tmp_path)) == ["size", "unreadable", "ok"]
    a.write_bytes(CSV[:-1])
    b.unlink()
    b.with_suffix("").write_bytes(CSV)  # decompressed by hand: the content counts
    assert _states(traces.verify("small", tmp_path)) == ["size", "ok", "ok"]
    assert _states(traces.fetch("small", tmp_path, web.base)) == ["fetched", "ok", "ok"]


def test_a_bomb_is_not_unpacked(listed: traces.Recording, tmp_path: Path) -> None:
    bomb = tmp_path / "small/vc/b.csv.xz"
    bomb.parent.mkdir(parents=True)
    bomb.write_bytes(lzma.compress(bytes(30 << 20)))
    check = traces.verify("small", tmp_path)[1]
    assert (check.state, check.detail) == ("size", f"expected {len(CSV)} bytes, found more than {len(CSV)}")


@pytest.mark.parametrize("body", [CSV[:-1], CSV + b"x", CSV[:-1] + b"x", b""])
def test_a_wrong_body_is_not_kept(listed: traces.Recording, web: Web, tmp_path: Path, body: bytes) -> None:
    web.answers[next(iter(web.answers))] = body
    with pytest.raises(ConnectorError, match=r"not the published file"):
        traces.fetch("small", tmp_path, web.base)
    assert not [p for p in (tmp_path / "small").rglob("*") if p.is_file()]


def test_an_endless_body_is_cut_short(listed: traces.Recording, web: Web, tmp_path: Path) -> None:
    web.answers[next(iter(web.answers))] = bytes(1 << 20)
    with pytest.raises(ConnectorError, match=f"sends more than {len(CSV)} bytes"):
        traces.fetch("small", tmp_path, web.base)


def test_a_broken_off_or_absent_body(listed: traces.Recording, web: Web, tmp_path: Path) -> None:
    web.short = True
    with pytest.raises(ConnectorError, match="cannot download"):
        traces.fetch("small", tmp_path, web.base)
    web.short = False
    del web.answers[f"/o/n/{'a' * 40}/b.csv"]
    with pytest.raises(ConnectorError, match="HTTP 404") as caught:
        traces.fetch("small", tmp_path, web.base)
    assert "1 of 3 files are in place" in str(caught.value)
    web.answers[f"/o/n/{'a' * 40}/c.json"] = b'[{"x": 1}]'
    web.answers[f"/o/n/{'a' * 40}/b.csv"] = CSV
    with pytest.raises(ConnectorError, match="not a JSON list of events"):
        traces.fetch("small", tmp_path, web.base)


def test_no_network_says_what_to_do(listed: traces.Recording, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{free.getsockname()[1]}"  # nobody answers there
    with pytest.raises(ConnectorError) as caught:
        traces.fetch("small", tmp_path, base)
    text = str(caught.value)
    assert all(w in text for w in ("small/a.csv", f"{base}/o/n/", "proxy", "RACKTWIN_TRACES", "verify small"))


def test_only_the_web_is_opened(listed: traces.Recording, tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="expected http or https"):
        traces.fetch("small", tmp_path, "file:///etc")


def test_a_folder_that_cannot_be_written(listed: traces.Recording, web: Web, tmp_path: Path) -> None:
    (tmp_path / "small").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="cannot write"):
        traces.fetch("small", tmp_path, web.base)


def _run(*words: str) -> tuple[int, str]:
    args = parser_of("trace", words[0]).parse_args(words[1:])
    out = io.StringIO()
    console = Console(width=200, file=out)
    return args.verb.run(args, console, console), out.getvalue()


def test_command(listed: traces.Recording, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKTWIN_TRACES", str(tmp_path))
    monkeypatch.setattr(traces.fetch, "__defaults__", (None, web.base))
    assert _run("verify")[0] == 1
    with pytest.raises(ConfigError, match="nix"):
        _run("verify", "nix")
    code, text = _run("list", "--json")
    assert (code, json.loads(text)["recordings"][0]["present_files"]) == (0, 0)
    assert _run("fetch", "--json", "small")[0] == 0
    code, text = _run("verify", "small", "--json")
    assert (code, [f["state"] for f in json.loads(text)["files"]]) == (0, ["ok"] * 3)
    assert "3/3" in _run("list")[1]
    web.answers.clear()
    (tmp_path / "small/a.csv").unlink()
    code, text = _run("fetch")
    assert code == 1
    assert "HTTP 404" in text
