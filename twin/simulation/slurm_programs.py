"""Slurm programs of a simulated site: `sinfo`, `squeue`, `scontrol` and a burn-in test that ask its plant.

Each is a small script that sends its words over a socket of this host and says what comes back, so that the
daemon commands the simulated scheduler as it commands a real one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

PROGRAMS = ("sinfo", "squeue", "scontrol", "burn-in")
MAX_WORDS = 2**20  # bytes of a question
WAIT_S = 10.0
SCRIPT = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.settimeout({wait_s})
    link.connect({address!r})
    link.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode())
    link.shutdown(socket.SHUT_WR)
    code, text = json.loads(b"".join(iter(lambda: link.recv(65536), b"")))
(sys.stderr if code else sys.stdout).write(text)
sys.exit(code)
"""
Answer = Callable[[Sequence[str]], tuple[int, str]]


class SlurmPrograms:
    """The programs in `folder`, answered by a thread of this process until `close`."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        folder.mkdir(exist_ok=True)
        # An abstract address of Linux: no path of a folder that may be too long for one
        self._address = f"\0racktwin-demo-{os.getpid()}-{folder.stat().st_ino}"
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._address)
        self._server.listen(32)
        for name in PROGRAMS:
            path = folder / name
            text = SCRIPT.format(python=sys.executable, wait_s=WAIT_S, address=self._address)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
        threading.Thread(target=self._serve, name="slurm", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            with link:
                try:
                    link.settimeout(WAIT_S)
                    link.sendall(msgspec.json.encode(self._receive(link)))
                except OSError:
                    continue  # whoever asked is gone

    def _receive(self, link: socket.socket) -> tuple[int, str]:
        words = bytearray()
        while part := link.recv(65_536):
            words += part
            if len(words) > MAX_WORDS:
                return 1, "expected fewer words\n"
        try:
            return self._answer(msgspec.json.decode(bytes(words), type=list[str]))
        except (ValueError, KeyError, IndexError) as error:
            return 1, f"not understood: {error!r}\n"
