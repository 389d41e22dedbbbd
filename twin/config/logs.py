"""Logs: one line per record for journald, a terminal or a program, with text from outside made safe.

Text of a device may be long, frequent or multi-line, and a library may log a password: the log filters all
of these. A separate thread writes the lines, so that a slow reader does not delay the ticks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, Literal

Style = Literal["journal", "plain", "json"]

MAX_TEXT = 4000  # characters of a message
MAX_FIELD = 400
MAX_FIELDS = 16
MAX_FRAMES = 8  # of a traceback, the innermost
MAX_WAITING = 10_000  # lines that wait to be written
BURST, WINDOW_S, MAX_KEYS = 20, 60.0, 1000

# Libraries that say too much at the level at which ours say what matters.
QUIET = {
    "aiohttp.access": logging.ERROR, "aiohttp": logging.WARNING, "amqtt": logging.ERROR,
    "asyncio": logging.WARNING, "influxdb_client": logging.ERROR, "mqtt": logging.ERROR,
    "aiomqtt": logging.ERROR, "paho": logging.ERROR, "Rx": logging.WARNING, "transitions": logging.WARNING,
    "urllib3": logging.WARNING,
}  # fmt: skip

_PRIORITY = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
# Control characters, line and paragraph separators, and what turns the direction of writing round.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Each pattern is bounded, so that no text makes it slow.
_SECRET = (
    (re.compile(r"(?i)\b(bearer|basic|token)(\s{1,4})[A-Za-z0-9._~+/=-]{8,}"), r"\1\2***"),
    (
        re.compile(
            r"""(?i)((?:password|passwd|secret|token|api[_-]?key)["']?\s{0,4}[=:]\s{0,4})"""
            r"""("[^"]{0,500}"?|'[^']{0,500}'?|[^\s,;}&"']+)"""
        ),
        r"\1***",
    ),
    (re.compile(r"(://[^\s/:@]{0,100}):[^\s/@]{1,500}@"), r"\1:***@"),
)
_hidden: dict[str, None] = {}
MIN_SECRET, MAX_SECRETS = 6, 256


def conceal(secret: str | None) -> None:
    """Never let this text reach a log. Secrets too short to be distinguished from words are left to the
    patterns."""
    if secret is not None and len(secret) >= MIN_SECRET:
        _hidden[secret] = None
        while len(_hidden) > MAX_SECRETS:
            _hidden.pop(next(iter(_hidden)))


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`log.info("lost the broker", extra=fields(host=host))`: named values beside a message."""
    return {"fields": values}


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Foreign text as one harmless line of bounded length, without secrets."""
    text = text[: limit * 4]  # bounds the work; what is cut off further down is cut off here already
    for secret in _hidden:
        text = text.replace(secret, "***")
    for pattern, instead in _SECRET:
        text = pattern.sub(instead, text)
    text = _UNSAFE.sub(_escaped, text)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    code = ord(char)
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


class Lines(logging.Formatter):
    """A record as one line."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style

    def format(self, record: logging.LogRecord) -> str:
        """The line, without the line break."""
        text = message_of(record)
        values: dict[str, Any] = {}
        given = getattr(record, "fields", None)
        if isinstance(given, dict):
            for key, value in list(given.items())[:MAX_FIELDS]:
                plain = isinstance(value, int | float | bool) or value is None
                values[re.sub(r"\W", "_", str(key))[:40]] = value if plain else clean(str(value), MAX_FIELD)
        if record.exc_info and record.exc_info[1] is not None:
            values |= _exception(record.exc_info[1])
        if self.style == "json":
            return self._json(record, clean(text), values)
        name = record.name.removeprefix("twin.")
        rest = "".join(f" {key}={_quoted(value)}" for key, value in values.items())
        if self.style == "journal":
            priority = next(p for level, p in _PRIORITY if record.levelno >= level)
            return f"<{priority}>{name}: {clean(text)}{rest}"
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        return f"{at:%F %T}.{at.microsecond // 1000:03d} {record.levelname:<7} {name}: {clean(text)}{rest}"

    def _json(self, record: logging.LogRecord, text: str, values: dict[str, Any]) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        own = {"t": at, "level": record.levelname.lower(), "logger": record.name, "message": text}
        return json.dumps(own | {k: v for k, v in values.items() if k not in own}, default=str)


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text and not re.search(r'[\s"=]', text) else json.dumps(text, ensure_ascii=False)


def _exception(error: BaseException) -> dict[str, Any]:
    """The exception and its frames, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    places = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in reversed(frames)]
    out = {"exception": clean(f"{type(error).__name__}: {error}", MAX_FIELD * 2), "at": " < ".join(places)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        out["cause"] = clean(f"{type(cause).__name__}: {cause}", MAX_FIELD)
    return out


def message_of(record: logging.LogRecord) -> str:
    """The text with its arguments; arguments that do not fit it must not cost the line."""
    try:
        return record.getMessage()
    except Exception:
        return f"{record.msg} {record.args!r}"


_Kind = tuple[str, int, str]  # logger, level, text before its arguments


@dataclass
class _Count:
    """Records of one kind: since when they are counted, how many went out and how many did not."""

    since_s: float
    passed: int = 0
    suppressed: int = 0
    last: logging.LogRecord | None = None  # the last that did not


class LogLimiter(logging.Filter):
    """Lets the first of each kind of record through, then counts, and says how many it held back.

    The kind is logger, level and text before its arguments: a thousand devices with one complaint are one
    kind, and warnings use up nothing of the errors'. What is critical always goes out.
    """

    def __init__(
        self, say: Callable[[logging.LogRecord], None], burst: int = BURST, window_s: float = WINDOW_S
    ) -> None:
        super().__init__()
        self._say, self.burst, self.window_s = say, burst, window_s
        self._clock: Callable[[], float] = time.monotonic
        self._kinds: OrderedDict[_Kind, _Count] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record goes out."""
        if record.levelno >= logging.CRITICAL:
            return True
        now, kind = self._clock(), (record.name, record.levelno, str(record.msg)[:200])
        with self._lock:
            ended = self._end(now)
            count = self._kinds.get(kind)
            if count is None:
                if len(self._kinds) >= MAX_KEYS:
                    ended += self._summary(self._kinds.popitem(last=False)[1])
                count = self._kinds[kind] = _Count(now)
            goes = count.passed < self.burst
            if goes:
                count.passed += 1
            else:
                count.suppressed, count.last = count.suppressed + 1, record
        for summary in ended:
            self._say(summary)
        return goes

    def flush(self) -> None:
        """Say what was held back so far."""
        with self._lock:
            ended = self._end(float("inf"))
        for summary in ended:
            self._say(summary)

    def tick(self) -> None:
        """Say what was held back in windows that have ended."""
        with self._lock:
            ended = self._end(self._clock())
        for summary in ended:
            self._say(summary)

    def _end(self, now: float) -> list[logging.LogRecord]:
        out: list[logging.LogRecord] = []
        while self._kinds:
            kind, count = next(iter(self._kinds.items()))
            if now - count.since_s < self.window_s:
                break
            del self._kinds[kind]
            out += self._summary(count)
        return out

    def _summary(self, count: _Count) -> list[logging.LogRecord]:
        last = count.last
        if last is None:
            return []
        text = f"{count.suppressed} more suppressed in {self.window_s:g} s, the last: {message_of(last)}"
        return [logging.LogRecord(last.name, last.levelno, __file__, 0, "%s", (text,), None)]


class LineWriter(logging.Handler):
    """Formats at once and writes from a thread; drops and counts when the reader is too slow."""

    def __init__(self, stream: IO[str], style: Style) -> None:
        super().__init__()
        self.stream, self.dropped = stream, 0
        self.setFormatter(Lines(style))
        self.limit = LogLimiter(self._put)
        self.addFilter(self.limit)
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line."""
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a record must never fail the code that wrote it
            try:
                self._lines.put_nowait(self.format(record))
            except queue.Full:
                self.dropped += 1

    def _write(self) -> None:
        reported = 0
        while True:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                self.limit.tick()
                continue
            if line is None:
                return
            if self.dropped > reported:
                lost, reported = self.dropped - reported, self.dropped
                text = f"{lost} lines lost: the reader of the log was too slow"
                record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
                line = f"{self.format(record)}\n{line}"
            with contextlib.suppress(OSError, ValueError):
                self.stream.write(line + "\n")
                self.stream.flush()

    def close(self) -> None:
        """Write what waits, but do not wait long for a reader."""
        if self._thread.is_alive():
            self.limit.flush()
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=0.5)
            self._thread.join(1.0)
        super().close()


def choose_style(stream: IO[str], as_json: bool = False) -> Style:
    """JSON if asked for; journald's form where the stream is the journal's own; else plain lines."""
    if as_json:
        return "json"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stat = os.fstat(stream.fileno())
        if os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}":
            return "journal"
    return "plain"


def set_up(level: str = "info", as_json: bool = False, stream: IO[str] | None = None) -> LineWriter:
    """Send every record of this process to `stream` (standard error). `take_down` ends it."""
    stream = sys.stderr if stream is None else stream
    writer = LineWriter(stream, choose_style(stream, as_json))
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, LineWriter):
            take_down(old)
    root.addHandler(writer)
    root.setLevel(getattr(logging, level.upper()))
    for name, quiet in QUIET.items():
        logging.getLogger(name).setLevel(max(quiet, root.level))
    logging.captureWarnings(True)
    logging.raiseExceptions = False
    atexit.register(take_down, writer)
    return writer


def take_down(writer: LineWriter) -> None:
    """The end of logging to `writer`."""
    logging.getLogger().removeHandler(writer)
    logging.captureWarnings(False)
    writer.close()
    atexit.unregister(take_down)
