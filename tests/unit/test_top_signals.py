"""`racktwin top` on a terminal of its own, interrupted as a shell or `timeout` does it."""

from __future__ import annotations

import http.server
import os
import pty
import signal
import sys
import threading

TOKEN = "rt_" + "a" * 43


class _Nobody(http.server.BaseHTTPRequestHandler):
    """A daemon that knows who asks, and nothing else."""

    def do_GET(self) -> None:
        body = b'{"role": "viewer", "name": "v"}'
        self.send_response(200 if self.path.endswith("/whoami") else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_an_interrupt_and_a_continuation_end_it_with_130() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Nobody)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    child, terminal = pty.fork()
    if child == 0:
        words = [sys.executable, "-m", "twin", "top", "--url", url]
        os.execve(words[0], words, os.environ | {"RACKTWIN_TOKEN": TOKEN, "TERM": "xterm-256color"})
    seen = b""
    try:
        while b"quit" not in seen:  # its line of keys is drawn
            seen += os.read(terminal, 65_536)
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGCONT)
        while True:
            try:
                seen += os.read(terminal, 65_536)
            except OSError:  # the terminal is closed
                break
    finally:
        server.shutdown()
        server.server_close()
    _, status = os.waitpid(child, 0)
    assert b"Traceback" not in seen
    assert os.waitstatus_to_exitcode(status) == 130
