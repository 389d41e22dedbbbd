"""Wires between a job and the twin: a shared folder, and the twin's own address over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import stat
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

MAX_ADVICE, MAX_REPORT_FILE = 4096, 2**20  # bytes; longer advice is none, a longer file begins anew
MAX_ANSWER = 2**20  # bytes of an answer that names a job's nodes
MAX_REASON = 350  # characters
TIMEOUT_S = 5.0


class Refusal(OSError):
    """The twin's answer that it will not, with its reason and remedy. `status` is that of HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the twin refuses: {reason} (HTTP status {status})")
        self.status = status


class FolderWire:
    """A folder: advice in `{job}.json`, put there whole; reports as lines in `{job}.reports.jsonl`."""

    def __init__(self, folder: str, level: str) -> None:
        place, self._torn = os.path.join(folder, level), b""
        self._advice, self._reports = place + ".json", place + ".reports.jsonl"

    def fetch(self) -> bytes | None:
        """The advice, None if there is none."""
        try:  # a pipe or a device would hold us up, or never end
            with open(self._advice, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
                return file.read(MAX_ADVICE + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        except FileNotFoundError:
            return None

    def send(self, body: bytes) -> None:
        """Append a report."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
        handle = os.open(self._reports, flags, 0o640)
        with open(handle, "wb", buffering=0) as file:
            line, self._torn = self._torn + body + b"\n", b"\n"  # until the whole line is written
            found = os.fstat(handle)  # what has other names may be a file of somebody's choice
            if found.st_size > MAX_REPORT_FILE and found.st_nlink == 1:
                file.truncate(0)
            if file.write(line) != len(line):
                raise OSError("a report was not written whole: is the disk full?")
            self._torn = b""


class HttpWire:
    """The twin's own address: no redirect is followed and no proxy asked. Raises Refusal with its reasons."""

    def __init__(self, url: str, level: str, token: Callable[[], str], ca_file: str | None) -> None:
        parts, self._token = urlsplit(url), token
        kind: Any = http.client.HTTPConnection
        if parts.scheme == "https":
            kind = partial(http.client.HTTPSConnection, context=ssl.create_default_context(cafile=ca_file))
        self._connect = partial(kind, parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        self._address = f"{parts.scheme}://{parts.hostname}:{parts.port or ''}".rstrip(":")
        self._job = f"{parts.path.rstrip('/')}/v1/jobs/{level}"

    def _ask(self, method: str, path: str, body: bytes | None = None, most: int = MAX_ADVICE) -> bytes | None:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            with closing(self._connect()) as asked:
                asked.request(method, path, body, headers)
                with asked.getresponse() as answer:
                    read, until = b"", time.monotonic() + TIMEOUT_S
                    while len(read) <= most and time.monotonic() < until and (part := answer.read1(most)):
                        read += part
        except OSError as error:
            what = f"no answer from {self._address}: {error}; expected the twin's interface there"
            raise OSError(what) from error
        if not 200 <= answer.status < 300:
            why = _reason(read) or f"{self._address} gives no reason: is it the twin's address?"
            raise Refusal(answer.status, why)
        return read if answer.status == 200 else None

    def fetch(self) -> bytes | None:
        """The advice, None if there is none."""
        return self._ask("GET", f"{self._job}/checkpoint")

    def send(self, body: bytes) -> None:
        """Send a report."""
        self._ask("POST", f"{self._job}/checkpoint", body)

    def register(self, body: bytes) -> dict[str, Any]:
        """Register the job; the twin's answer."""
        answer = json.loads(self._ask("POST", self._job, body, MAX_ANSWER) or b"{}")
        return answer if isinstance(answer, dict) else {}

    def unregister(self) -> None:
        """End the registration of the job."""
        self._ask("DELETE", self._job)


def _reason(answer: bytes) -> str:
    """The sentence of a refusal; "" where there is none."""
    with suppress(ValueError, RecursionError):
        tree = json.loads(answer)
        if isinstance(tree, dict) and isinstance(tree.get("error"), str):
            return str(tree["error"])[:MAX_REASON]
    return ""
