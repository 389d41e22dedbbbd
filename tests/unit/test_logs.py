"""Logs: one line a record, nothing foreign breaks it, nothing floods it, no secret is in it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from twin.config import logs, set_up, take_down
from twin.config.logs import Lines, LineWriter, LogLimiter, clean, conceal, fields


def record(text: str, *args: object, level: int = logging.INFO, name: str = "twin.x") -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, text, args, None)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of other tests garble no text of these."""
    monkeypatch.setattr(logs, "_hidden", {})


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """Yield the stream that `set_up` writes to; the state of the root logger is put back."""
    root = logging.getLogger()
    level, raises = root.level, logging.raiseExceptions
    stream = io.StringIO()
    yield stream
    root.setLevel(level)
    logging.raiseExceptions = raises


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31mred\x00\x7f\x85", "\\x1b[31mred\\x00\\x7f\\x85"),
        ("a\u2028b\u202eevil\ud800", "a\\u2028b\\u202eevil\\ud800"),
        ("über °C", "über °C"),
        ("x" * 5000, "x" * 4000 + "... (5000 characters)"),
    ],
)
def test_foreign_text_is_one_harmless_line(text: str, expected: str) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer hunter2hunter2", "password=hunter2hunter2", '{"password": "hunter2hunter2"}',
        "mqtts://twin:hunter2hunter2@broker:8883", "api_key = 'hunter2hunter2'", "?token=hunter2hunter2&x=1",
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_left_out(text: str) -> None:
    assert "hunter2" not in clean(text)
    assert "***" in clean(text)


def test_a_concealed_secret_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_hidden", {})
    conceal("correct horse battery")
    conceal("abc")  # no secret worth the name; it would garble words
    conceal(None)
    line = Lines("plain").format(record("broker said %s abc", "no to correct horse battery"))
    assert line.endswith("broker said no to *** abc")
    for i in range(1000):
        conceal(f"secret {i}")
    assert len(logs._hidden) <= logs.MAX_SECRETS


@pytest.mark.parametrize(
    ("level", "prefix"),
    [(logging.DEBUG, "<7>"), (logging.INFO, "<6>"), (logging.WARNING, "<4>"), (logging.ERROR, "<3>"),
     (logging.CRITICAL, "<2>")],
)  # fmt: skip
def test_the_journal_is_told_the_priority(level: int, prefix: str) -> None:
    one = record("lost %s", "the broker", level=level)
    one.fields = {"host": "b 1", "port": 1883, "why": 'a="b"\n'}
    assert Lines("journal").format(one) == (
        f'{prefix}x: lost the broker host="b 1" port=1883 why="a=\\"b\\"\\\\n"'
    )


def test_json_lines_are_json_and_own_keys_stay() -> None:
    one = record("hello\n%d", 3)
    one.fields = {"n": 3, "level": "forged", "odd key!": None}
    tree = json.loads(Lines("json").format(one))
    assert tree["message"] == "hello\\n3"
    assert (tree["level"], tree["n"], tree["odd_key_"]) == ("info", 3, None)


def test_an_exception_is_part_of_its_line() -> None:
    try:
        try:
            raise OSError("inner\ntext")
        except OSError as error:
            raise ValueError("outer password=hunter2hunter2") from error
    except ValueError:
        one = record("failed")
        one.exc_info = sys.exc_info()
    line = Lines("plain").format(one)
    assert "\n" not in line
    assert "hunter2" not in line
    assert "ValueError: outer" in line
    assert "OSError: inner\\\\ntext" in line
    assert re.search(r'at="?unit/test_logs\.py:\d+ test_an_exception', line)


def test_arguments_that_do_not_fit_cost_no_line() -> None:
    assert "%d things" in Lines("plain").format(record("%d things", "no number"))


def test_a_flood_of_one_kind_is_counted_and_others_pass() -> None:
    said: list[str] = []
    limit = LogLimiter(lambda r: said.append(r.getMessage()), burst=3, window_s=60)
    now = [0.0]
    limit._clock = lambda: now[0]
    passed = [limit.filter(record("bad message from %s", i)) for i in range(10)]
    assert passed == [True] * 3 + [False] * 7
    assert limit.filter(record("something else"))
    now[0] = 61.0
    assert limit.filter(record("bad message from %s", 99))
    assert said == ["7 more suppressed in 60 s, the last: bad message from 9"]


def test_a_critical_record_is_never_suppressed() -> None:
    limit = LogLimiter(lambda _: None, burst=1)
    assert [limit.filter(record("alarm %s", i, level=logging.CRITICAL)) for i in range(100)] == [True] * 100
    # Those below it have a count of their own at each level: a flood of warnings hides no error.
    warned = [limit.filter(record("alarm %s", i, level=logging.WARNING)) for i in range(5)]
    assert warned == [True, False, False, False, False]
    assert limit.filter(record("alarm %s", 5, level=logging.ERROR))


def test_kinds_are_bounded_and_none_is_forgotten_silently() -> None:
    said: list[str] = []
    limit = LogLimiter(lambda r: said.append(r.getMessage()), burst=1)
    for i in range(3 * logs.MAX_KEYS):
        limit.filter(record(f"kind {i}"))
        limit.filter(record(f"kind {i}"))
    assert len(limit._kinds) <= logs.MAX_KEYS
    limit.flush()
    assert len(said) == 3 * logs.MAX_KEYS


def test_lines_reach_the_stream_and_libraries_are_quiet(out: io.StringIO) -> None:
    writer = set_up(stream=out)
    logging.getLogger("twin.y").info("hello %s", "there", extra=fields(n=1))
    logging.getLogger("twin.y").debug("too much")
    logging.getLogger("aiohttp.access").warning("GET /")
    logging.getLogger("mqtt").warning("reconnecting")
    take_down(writer)
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    y: hello there n=1", lines[0])


def test_what_was_suppressed_is_said_at_the_end(out: io.StringIO) -> None:
    writer = set_up(stream=out)
    for i in range(logs.BURST + 5):
        logging.getLogger("twin.z").warning("again %d", i)
    take_down(writer)
    lines = out.getvalue().splitlines()
    assert len(lines) == logs.BURST + 1
    assert f"5 more suppressed in 60 s, the last: again {logs.BURST + 4}" in lines[-1]


def test_a_slow_reader_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    gate, written = threading.Event(), []

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            gate.wait(10)
            written.append(text)
            return len(text)

    writer = LineWriter(Stuck(), "plain")
    for i in range(100):
        writer.handle(record(f"line {i}"))
    assert writer.dropped >= 100 - 12
    gate.set()
    writer.close()
    assert "lines lost: the reader of the log was too slow" in "".join(written)


def test_the_journals_own_stream_is_recognised(tmp_path: Path) -> None:
    program = (
        "import os, sys, logging\nfrom twin.config.logs import set_up\n"
        "s = os.fstat(2)\nos.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'\n"
        "set_up()\nlogging.getLogger('twin.q').error('two\\nlines')\n"
    )
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stderr == "<3>q: two\\nlines\n"
    other = io.StringIO()
    assert logs.choose_style(other) == "plain"
    assert logs.choose_style(other, as_json=True) == "json"
    with (tmp_path / "f").open("w") as file:
        os.environ.pop("JOURNAL_STREAM", None)
        assert logs.choose_style(file) == "plain"
