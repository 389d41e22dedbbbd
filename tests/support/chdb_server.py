"""A ClickHouse of the tests' own: chdb in a process of its own, behind the part of the HTTP interface in use.

server = ChdbServer(tmp_path); server.start(); server.sql("SELECT 1"); server.stop(); server.kill()

The data outlives the process. `server.fail(...)` makes the next requests fail in a way that servers do.
As a program, `python -m tests.support.chdb_server PORT FOLDER`, it serves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import zstandard

from tests.support.patience import PATIENCE_S
from tests.support.victoriametrics import free_port

ROOT = Path(__file__).parents[2]
USER, PASSWORD = "hall", "s3cr3t-Pass"
_CODE = re.compile(r"Code: (\d+)")
_INSERT = re.compile(r"(INSERT INTO .*) FORMAT (\w+)\s*$", re.DOTALL)
_SETTINGS = (
    "async_insert",
    "insert_deduplication_token",
    "deduplicate_blocks_in_dependent_materialized_views",
)
# Statuses of exceptions. source: ClickHouse, src/Server/HTTPHandler.cpp, exceptionCodeToHTTPStatus
_STATUS = {516: 403, 60: 404, 81: 404, 62: 400, 47: 404, 27: 400, 457: 400}


class ChdbServer:
    """The process; `url` stays the same over restarts. One user, `USER`."""

    name = "chdb"

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The program with its arguments."""
        return [sys.executable, "-m", "tests.support.chdb_server", str(self.port), str(self.folder / "data")]

    def start(self) -> None:
        """Begin, and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=ROOT)
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.sql("SELECT 1")
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
                assert time.monotonic() < ends, "it did not answer in time"
                time.sleep(0.05)

    def sql(self, text: str) -> list[dict[str, Any]]:
        """Rows of a statement, run as the administrator that a test is."""
        headers = {
            "X-ClickHouse-User": USER,
            "X-ClickHouse-Key": PASSWORD,
            "X-ClickHouse-Format": "JSONEachRow",
        }
        request = urllib.request.Request(f"{self.url}/", text.encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return [json.loads(line) for line in answer.read().splitlines() if line]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{text}: {error.read().decode()}") from None

    def fail(self, how: str, count: int) -> None:
        """The next requests fail. `500`, `quota`: refused before; `lost`: done, and the answer is lost;
        `html`: another server answers."""
        self.sql(f"FAIL {how} {count}")

    def seen_tokens(self) -> list[str]:
        """Tokens of all inserts so far, in order, those that failed too."""
        return [row["token"] for row in self.sql("TOKENS")]

    @property
    def runs(self) -> bool:
        """True unless it was ended."""
        return self._process is not None

    def stop(self) -> None:
        """End in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End as by a power cut of the process."""
        self._end(signal.SIGKILL)

    def _end(self, how: int) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
        self._process = None


def serve(port: int, folder: Path) -> None:
    """Serve until SIGTERM."""
    from chdb.session import Session  # type: ignore[import-not-found,unused-ignore]

    session, lock = Session(str(folder)), threading.Lock()
    failing: list[str] = []
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = {k: v[-1] for k, v in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.headers["Content-Encoding"] == "zstd":
                body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
            if "insert_deduplication_token" in asked:
                tokens.append(asked["insert_deduplication_token"])
            login = (self.headers["X-ClickHouse-User"], self.headers["X-ClickHouse-Key"])
            if login != (USER, PASSWORD):
                return self.answer(
                    403, f"Code: 516. DB::Exception: {login[0]}: Authentication failed: {login[1]}"
                )
            if body.startswith(b"FAIL "):
                _, how, count = body.decode().split()
                failing[:] = [how] * int(count)
                return self.answer(200, "")
            if body == b"TOKENS":
                return self.answer(200, "".join(json.dumps({"token": t}) + "\n" for t in tokens))
            how = failing.pop(0) if failing else ""
            if how == "500":
                return self.answer(500, "Code: 241. DB::Exception: Memory limit exceeded")
            if how == "quota":
                return self.answer(
                    500, "Code: 201. DB::Exception: Quota for user `hall` for 3600s has been exceeded"
                )
            if how == "html":
                return self.answer(200, "<html>")
            status, text = self.run(asked, body)
            if how == "lost":
                self.close_connection = True
                self.connection.close()
                return None
            return self.answer(status, text)

        def run(self, asked: dict[str, str], body: bytes) -> tuple[int, str]:
            names = {k.removeprefix("param_"): v for k, v in asked.items() if k.startswith("param_")}
            found = _INSERT.fullmatch(asked.get("query", ""))
            try:
                with lock:
                    if found is None:
                        sql = asked.get("query") or body.decode()
                        return 200, str(session.query(sql, "JSONEachRow", params=names or None))
                    path = folder.parent / "body"
                    path.write_bytes(body)
                    settings = ", ".join(f"{k} = '{asked[k]}'" for k in _SETTINGS if k in asked)
                    more = f" SETTINGS {settings}" if settings else ""
                    if body:
                        session.query(f"{found[1]} FROM INFILE '{path}'{more} FORMAT {found[2]}")
                    else:
                        session.query(f"{found[1]} SELECT * FROM {found[1].split()[2]} LIMIT 0")
                    return 200, ""
            except Exception as error:
                code = int(match[1]) if (match := _CODE.search(str(error))) else 0
                return _STATUS.get(code, 500), str(error)

        def answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            if status != 200 and (match := _CODE.match(text)):
                self.send_header("X-ClickHouse-Exception-Code", match[1])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
