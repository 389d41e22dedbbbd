"""Parts of `racktwin top` without a terminal: the mirror of the stream, cells, details, the stream."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from twin.api.page import changed
from twin.catalogue import ConnectorError
from twin.cli.top.app import ascii_text
from twin.cli.top.cells import ShortNames, alarm_cells, brief_span, rack_cells, severity_cells, sign
from twin.cli.top.command import speaks_utf8
from twin.cli.top.details import alarm_text, child_rows, entity_text
from twin.cli.top.feed import EventParser
from twin.cli.top.mirror import SiteMirror

HOSTILE = "[red]x[/red]\x1b[31m\x07\u202ey"
STATES = ["unknown", "ok", "info", "warning", "critical", "maintenance"]


def layout(n: int = 2) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        "state": [1] * n, "power_w": [80_000] * n, "margin_k": [9.0] * n, "capped": [0] * n, "out": [0] * n,
        "failed": [0] * n, "gpu_temp_c": [60] * n, "age_s": [None] * n,
    }  # fmt: skip
    return {
        "site_hash": "a", "names": [f"lab/h/r{i}" for i in range(n)], "halls": ["lab/h"], "states": STATES,
        "columns": columns, "gpus": [72] * n, "power_guard_w": [100_000.0] * n,
    }  # fmt: skip


def state(**more: Any) -> dict[str, Any]:
    return {"whole": True, "site": "lab", "ticks": {"age_s": 0.2, "every_s": 1.0, "tick": 5}, "supply": [],
            "now_ns": 10**18, "sizes": {"gpu": 144}} | more  # fmt: skip


def mirror(n: int = 2) -> SiteMirror:
    made = SiteMirror()
    made.set_layout(layout(n))
    made.take("state", state(), 100.0)
    return made


COLUMN = st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=6, max_size=6)


@given(st.lists(COLUMN, min_size=1, max_size=8))
def test_the_mirror_has_what_the_daemon_has(steps: list[list[int | None]]) -> None:
    """Whatever changes, the columns are the daemon's, and no row that changed is left out."""
    made, before = mirror(6), list[int | None]([9] * 6)
    made.columns["power_w"] = list(before)
    for now in steps:
        columns: Any = changed({"power_w": list(before)}, {"power_w": list(now)})
        tree = {"site_hash": "a", "columns": columns}
        change = made.take("racks", tree, 0.0)
        assert made.columns["power_w"] == now
        assert change.rows == [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
        before = now


def test_racks_of_another_site_file_are_read_anew() -> None:
    assert mirror().take("racks", {"site_hash": "b", "columns": {}}, 0.0).stale


def test_a_state_keeps_what_it_does_not_name() -> None:
    made = mirror()
    made.take("state", {"role": "standby"}, 101.0)
    assert (made.state["site"], made.state["role"]) == ("lab", "standby")
    made.take("state", state(), 102.0)
    assert "role" not in made.state


@pytest.mark.parametrize(
    ("now_s", "heard_s", "expected"),
    [
        (101.0, 101.0, ""),
        (102.7, 100.0, ""),
        (103.1, 100.0, "No update from the daemon for 3 s"),
        (103.9, 103.5, "not ticked for 4 s"),
        (109.0, 100.0, "No update from the daemon for 9 s"),
    ],
)
def test_a_silent_daemon_is_told_within_three_seconds(now_s: float, heard_s: float, expected: str) -> None:
    """Silent where the stream says nothing, not ticking where it does and the tick is old."""
    why = mirror().silence(now_s, heard_s)
    assert (expected in why) if expected else why == ""


def test_nothing_is_silent_before_anything_was_heard() -> None:
    assert SiteMirror().silence(1e6, 0.0) == ""


@given(st.binary(max_size=400), st.integers(1, 40))
def test_the_stream_is_cut_the_same_however_it_arrives(noise: bytes, step: int) -> None:
    """Chunks of any size give the same events; comments and the reconnect time are none."""
    text = noise.replace(b"\n", b"").hex().encode()
    raw = (
        b'retry: 3000\n\nid: a.1\nevent: state\ndata: {"x":"%s"}\n\n: here\n\nevent: racks\ndata: {}\n\n'
        % text
    )
    parser, found = EventParser(), []
    for i in range(0, len(raw), step):
        found += parser.feed(raw[i : i + step])
    assert found == [("state", {"x": text.decode()}, "a.1"), ("racks", {}, "")]


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(ConnectorError, match="not JSON"):
        EventParser().feed(b"data: <html>\n\n")


def test_unknown_is_never_zero_and_old_says_its_age() -> None:
    made = mirror()
    made.columns |= {
        "power_w": [None, 0],
        "gpu_temp_c": [None, 0],
        "margin_k": [None, 0.0],
        "age_s": [None, 75],
    }
    unknown, zero = (rack_cells(made, ShortNames("lab", ["lab/h"]), row) for row in (0, 1))
    assert [unknown[2][0], unknown[5][0], unknown[9][0], unknown[10][0]] == ["unknown", "-", "-", ""]
    assert [zero[2][0], zero[5][0], zero[9][0], zero[10][0]] == ["0 W", "0 K", "0 °C", "75 s"]


def test_each_severity_has_the_sign_of_the_page() -> None:
    signs = {k: sign(k)[0] for k in ("critical", "warning", "info", "ok", "unknown")}
    assert signs == {"critical": "▲", "warning": "◆", "info": "●", "ok": "✓", "unknown": "?"}
    assert severity_cells({"critical": 2, "info": 1, "shelved": 3}) == [
        ("▲ 2 critical", "bold red"), ("● 1 notice", "cyan"), ("3 shelved", "dim"),
    ]  # fmt: skip


def test_names_are_shortened_by_what_all_have_in_common() -> None:
    names = ShortNames("lab", ["lab/h"])
    assert (names.short("lab/h/r1"), names.short("lab")) == ("r1", "lab")
    assert names.brief("lab/h/r1/node0 at 2001-09-09 01:46:40", 10**18) == "r1/node0 at 01:46:40"
    assert ShortNames("lab", ["lab/a", "lab/b"]).short("lab/a/r1") == "a/r1"


def drawn(renderable: Any) -> str:
    console = Console(width=100, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_an_alarm_says_what_where_since_when_how_bad_and_what_to_do() -> None:
    alarm = {
        "id": "a/b", "severity": "warning", "title": f"Pump {HOSTILE} is slow", "entities": ["lab/h/cdu1"],
        "evidence": ["1,200 rpm of 1,500 rpm"], "action": "replace it", "count": 1, "state": "raised",
        "raised_ns": 10**18 - 65 * 10**9, "doing": ["power_cap holds the power cap"], "confidence_pu": 0.92,
    }  # fmt: skip
    text = drawn(alarm_text(alarm, {}, ShortNames("lab", ["lab/h"]), 10**18))
    for words in (
        "◆ Pump [red]x[/red]", "warning, 92 % sure", "cdu1", "01:45:35 UTC (1 min 5 s)", "1,200 rpm", "You",
        "racktwin does", "power_cap holds the power cap", "replace it", "not acknowledged",
    ):  # fmt: skip
        assert words in text
    assert not set("\x1b\x07\u202e") & set(text)


def test_whatever_comes_from_outside_is_text() -> None:
    names = ShortNames("lab", ["lab/h"])
    alarm = {"id": "x", "severity": "critical", "title": HOSTILE, "raised_ns": 0, "ack_author": HOSTILE}
    texts = [names.brief(HOSTILE), names.short(HOSTILE)]
    texts += [cell for cell, _ in alarm_cells(alarm, names, 10**18)]
    rows = child_rows("node", [HOSTILE], {}, {"rows": [{"name": HOSTILE, "level": "watch", "why": HOSTILE}]})
    texts += [cell for cell, _ in next(iter(rows.values()))]
    reading = {"value": 1.0, "quality": HOSTILE, "unit": "W", "age_s": 1.0}
    lease = {"name": "y", "control": HOSTILE, "policy": HOSTILE, "value": 1.0, "unit": "W"}
    tree = {"now_ns": 10**18, "name": "x", "alarms": [alarm], "comparisons": [], "leases": [], "job": None,
            "signals": {HOSTILE: reading}, "decisions": [{"now_ns": 1, "text": HOSTILE}]}  # fmt: skip
    texts.append(drawn(entity_text(tree, {"level": "watch", "why": HOSTILE}, [lease], names)))
    assert not set("\x1b\x07\u202e") & set("".join(texts))


@given(st.text(st.characters(exclude_categories=("C", "M", "Z"))))
def test_without_utf8_every_character_takes_the_columns_it_took(text: str) -> None:
    from rich.cells import cell_len

    assert ascii_text(text).isascii()
    assert len(ascii_text(text)) == sum(cell_len(c) for c in text)


def test_the_locale_says_whether_the_terminal_takes_utf8() -> None:
    assert speaks_utf8({"LANG": "de_DE.UTF-8"})
    assert speaks_utf8({"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"})
    assert speaks_utf8({"LC_ALL": "en_US.utf8", "LANG": "C"})
    assert not speaks_utf8({"LC_CTYPE": "C.UTF-8"}), "Python sets this where no locale is set"
    assert not speaks_utf8({"LANG": "en_US.ISO-8859-1"})
    assert not speaks_utf8({"LC_ALL": "C", "LANG": "en_US.UTF-8"})


def test_a_span_has_one_unit() -> None:
    assert [brief_span(s) for s in (0, 119, 120, 7200, 172_800, None)] == [
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
        "-",
    ]
