"""Publishers of a room on a real broker and behind real HTTP, second by second in real time.

wires = LivePublishers(room, broker.port, [Building(room)], {"/dcgm": DcgmExporter(room, 0)})
wires.url("/dcgm"); wires.start(); ...; wires.close()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from connectors.dsx import PUB_METADATA
from tests.support.node_agents import Client
from tests.support.publishers import Exporter, Publisher, Room
from twin.catalogue import NS


class LivePublishers:
    """The publishers of a room. The server answers 503 for a page that was taken out of `pages`."""

    def __init__(
        self, room: Room, port: int, publishers: Sequence[Publisher], pages: dict[str, Exporter]
    ) -> None:
        self.room, self.publishers, self.pages, self._port = room, publishers, pages, port
        self.lock, self._end = threading.Lock(), threading.Event()
        self._exporters = _serve(pages, self.lock)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._exporters.server_port}{path}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(20)
        self._exporters.shutdown()
        self._exporters.server_close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            with Client(self._port, hears="nothing/#") as client:
                while not self._end.wait(max(0.0, (self.room.now_ns + NS - time.time_ns()) / NS)):
                    with self.lock:
                        self.room.pass_second()
                        messages = [m for p in self.publishers for m in p.messages(self.room.now_ns)]
                    for message in messages:
                        retain = message.topic.startswith(PUB_METADATA)
                        client.tell(message.topic, message.payload, retain)
        except BaseException as error:
            self.failure = error


def _serve(pages: dict[str, Exporter], lock: threading.Lock) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                exporter = pages.get(self.path)
                body = b"" if exporter is None else exporter.page()
            self.send_response(200 if body else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
