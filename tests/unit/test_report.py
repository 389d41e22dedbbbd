"""The report: one file that loads nothing; names are safe whoever gave them; emptiness is explained."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.builders import spec_of
from tests.support.fleets import fleet_tree
from tests.unit.test_collect import block, run, site_of
from twin.catalogue import (
    NS,
    StorageError,
    TimeAxis,
    clean,
    duration,
    number,
    percent,
    quantity,
    table_noun,
    utc,
)
from twin.report import Collector, render_terminal, write_report
from twin.report.svg import nice_ticks
from twin.report.writer import render
from twin.site import build_site, noun_key

HOSTILE = "<script>alert(1)</script>\"' onload=x \u202e\x00\ud800"
VOID = {"meta", "line", "path", "rect", "circle", "br"}


class Page(HTMLParser):
    """Reads a page, checks that its tags nest, and keeps what matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def collected(racks: int = 3, ticks: int = 40) -> Collector:
    rng = np.random.default_rng(1)
    frames = []
    for _ in range(ticks):
        power = 50_000 + 1000 * rng.normal(size=racks)
        frames.append(
            [
                block("rack", "power_w", power.tolist(), 0),
                block("rack", "flow_lpm", [60.0] * racks, 0),
                block("rack", "supply_temp_c", [30.0] * racks, 0),
                block("rack", "return_temp_c", (30 + power * 0.9 / 4000).tolist(), 0),
                block("gpu", "temp_c", [60.0] * racks, 0),
                block("site", "gpu_running_count", [2.0], 0),
            ]
        )
    return run(site_of(racks), frames)


def summary_of(**more: Any) -> dict[str, Any]:
    return {
        "site": "titan",
        "source": ["/data/dsx.csv"],
        "simulated": False,
        "wall_s": 2.0,
        "messages": {"total": 10, "decoded": 8, "bad": 1, "ignored": {"PumpHours": 1}},
        **more,
    }


@pytest.mark.parametrize("racks", [1, 3, 9, 130])
def test_the_page_is_whole_and_loads_nothing(racks: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(collected(racks), summary_of(), path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not [t for t, a in page.tags if t in ("link", "img", "iframe") or "src" in a]
    assert "default-src 'none'" in text
    for words in ("real recording", "dsx.csv", "IT power of the site", "Heat taken by liquid", "not guarded"):
        assert words in page.text
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert "NaN" not in text
    assert "nan" not in re.findall(r'd="([^"]*)"', text)


def test_what_a_message_named_is_escaped_everywhere() -> None:
    collector = collected()
    book = collector.episodes
    book.record(
        {
            "kind": "finding",
            "id": HOSTILE,
            "severity": HOSTILE,
            "title": HOSTILE,
            "entities": [HOSTILE],
            "evidence": [HOSTILE],
            "action": HOSTILE,
        },
        5,
    )
    book.outcomes["failed", HOSTILE] += 1
    for track in collector.time.tracks.values():
        track.labels = [HOSTILE + str(i) for i in range(len(track.labels))]
    reason = {"outcome": HOSTILE, "count": 3, "why": HOSTILE, "remedy": HOSTILE, "example": HOSTILE}
    messages = {"total": 9, "decoded": 1, "bad": 1, "reasons": [reason]}
    text = render(
        collector,
        summary_of(
            site=HOSTILE,
            source=[HOSTILE],
            messages=messages,
            damage=[HOSTILE],
            state_checksum=HOSTILE,
            inbox={HOSTILE: 4},
        ),
    )
    page = Page(text)
    assert [t for t, _ in page.tags].count("script") == 2  # its own: the times and the read-out
    assert not [a for _, a in page.tags if "onload" in a]
    assert "alert(1)" in page.text
    assert not set("\u202e\x00\ud800") & set(text)


@pytest.mark.parametrize(
    "summary",
    [
        {},
        summary_of(),
        {"messages": None, "racks": 3, "source": 7, "inbox": [], "wall_s": "x", "ticks": 0},
        {"messages": {"total": 5, "decoded": "x", "ignored": 4}},
    ],
)
def test_an_empty_run_says_why_there_is_nothing(summary: dict[str, Any]) -> None:
    page = Page(render(Collector(), summary))
    assert "The twin ran no tick" in page.text
    assert "svg" not in [t for t, _ in page.tags]


def test_a_run_that_heard_nothing_says_so() -> None:
    page = Page(render(run(site_of(2), [[]] * 3), {}))
    assert "no reading that it plots ever arrived" in page.text
    assert not [a for t, a in page.tags if t == "svg"]


def test_the_racks_of_a_hub_are_halls() -> None:
    text = Page(render(run(build_site(spec_of(fleet_tree())), [[]] * 3), {})).text
    assert "2 meters, 2 halls" in text


def test_a_rack_beside_the_halls_of_a_hub_is_no_hall_and_a_silent_hall_is_missed() -> None:
    tree = fleet_tree()
    tree["halls"][0]["racks"].append({"name": "store"})
    site = build_site(spec_of(tree))
    text = Page(render(run(site, [[block("rack", "power_w", [3e5], 0)]] * 30), {})).text
    assert "1 rack, 2 meters, 2 halls" in text
    assert "the 1 (of 3) reporting" in text
    assert (table_noun(noun_key(site, "rack"), 3), table_noun(noun_key(site, "node"))) == ("racks", "node")


def test_one_tick_gives_dots() -> None:
    text = render(collected(2, 1), {"simulated": True})
    assert "<circle" in text
    assert "generated by racktwin itself (simulated)" in text


def test_a_report_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        write_report(Collector(), {}, tmp_path / "nowhere" / "report.html")


def test_the_terminal_shows_the_same_figures() -> None:
    out = io.StringIO()
    render_terminal(collected(), summary_of(site="[red]x[/red]"), Console(file=out, width=150))
    text = out.getvalue()
    assert "Peak IT power" in text
    assert "[red]x[/red]" in text
    assert "▁" in text
    render_terminal(Collector(), {"ticks": 0}, Console(file=out, width=100))
    assert "No tick was run" in out.getvalue()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 25, 50, 75, 100]), (0.3, 0.9, [0.2, 0.4, 0.6, 0.8, 1.0]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_span_the_data(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_numbers_read_well() -> None:
    shown = [number(x) for x in (0.0, 1234.5, 12.34, -0.5, 1e-9, float("nan"))]
    assert shown == ["0", "1,234", "12.3", "−0.5", "0", "–"]
    assert quantity(132_000, "W") == "132 kW"
    assert quantity(5.5e6, "W") == "5.5 MW"
    assert quantity(0.25, "1") == "25 %"
    assert (percent(0.99996), percent(1.0)) == ("> 99.9 %", "100 %")
    assert (duration(5), duration(3700), duration(200_000)) == ("5 s", "1 h 1 min", "2 d 7 h")
    assert clean("a\nb" * 200, 10) == "a�ba�ba�b…"
    assert utc(2**62 * 4)


def test_time_is_utc_for_real_dates_and_an_offset_for_made_up_ones() -> None:
    times = np.array([0, 3600, 7200], np.int64) * NS
    real = TimeAxis(times + 1_800_000_000 * NS, 1_800_000_000 * NS, 1_800_007_200 * NS)
    assert real.caption() == "UTC, 2027-01-15"
    assert [label for _, label in real.ticks(2)] == ["08:00", "09:00", "10:00"]
    made_up = TimeAxis(times, 0, 7200 * NS)
    assert made_up.caption() == "hours since the start"
    assert made_up.label(3661 * NS) == "+1:01:01"
    assert [label for _, label in made_up.ticks(2)] == ["0", "1", "2"]
