"""Files of load targets and of prices: what is read, what changes are told, what a half-written file does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import START_NS, Twin, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, ConfigError
from twin.contracts import Item
from twin.telemetry import LoadTargetSet, LoadTargetWithdrawn, OutlookTold
from twin.wiring.target_files import OutlookFileSource, TargetsSource, WatchedFile, read_targets

HEAD = "name,limit,feeders,begin,end,kind,best_effort\n"
YAML = """targets:
  - {name: peak, limit: 500 kW, feeders: [a, lab/h/b], begin: 2023-11-15T06:00:00+01:00, kind: utility}
  - name: open
    limit: 0.45MW
    end: "2023-11-15T09:00:00Z"
    best_effort: true
"""


class Watch:
    """A source of a file before an engine. `write` replaces the file, and gives it another instant."""

    def __init__(self, path: Path) -> None:
        self.twin, self.path, self.now_ns, self.number = Twin(two_racks()), path, START_NS, 0
        self.source = self.fresh()

    def fresh(self) -> TargetsSource:
        held = self.twin.engine.intake.load_targets.current
        return TargetsSource(
            self.path, self.twin.site, lambda: held(self.twin.site), 1.0, lambda: self.now_ns
        )

    def write(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")
        self.number += 1
        os.utime(self.path, ns=(self.number * NS, self.number * NS))

    def look(self, times: int = 2) -> list[Item]:
        taken = RecordingInlet()
        for _ in range(times):
            asyncio.run(self.source.check(taken))  # type: ignore[arg-type]
        self.faults = taken.faults
        self.twin.tick(None, *taken.items)  # type: ignore[arg-type]
        assert not [r for r in self.twin.records("event") if "refused" in r]
        return taken.items

    @property
    def names(self) -> list[str]:
        return [t.name for t in self.twin.engine.intake.load_targets.current(self.twin.site)]


def test_yaml_and_csv_say_the_same(tmp_path: Path) -> None:
    site = Twin(two_racks()).site
    (tmp_path / "t.yaml").write_text(YAML)
    (tmp_path / "t.csv").write_text(
        HEAD
        + "peak,500 kW,a lab/h/b,2023-11-15T05:00:00Z,,utility,no\n"
        + "open,450000 W,,,2023-11-15T09:00:00Z,,yes\n"
    )
    given = read_targets(tmp_path / "t.yaml", site)
    assert given == read_targets(tmp_path / "t.csv", site)
    peak, other = given
    assert (peak.limit_w, peak.feeders, peak.begin_ns, peak.end_ns) == (
        5e5, ("lab/h/a", "lab/h/b"), 1_700_024_400 * NS, 0)  # fmt: skip
    assert (other.limit_w, other.feeders, other.end_ns, other.best_effort) == (
        4.5e5,
        (),
        1_700_038_800 * NS,
        True,
    )


def test_changes_are_told_and_what_is_gone_is_withdrawn(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "t.csv")
    watch.write(HEAD + "x,500 kW,a,,,,\ny,400 kW,,,,,\n")
    assert watch.look(1) == []  # it may still be being written
    assert [type(e) for e in watch.look(1)] == [LoadTargetSet, LoadTargetSet]
    assert watch.names == ["file/x", "file/y"]
    assert watch.look(3) == []
    watch.write(HEAD + "x,500 kW,a,,,,\ny,300 kW,,,,,\n")
    (event,) = watch.look()
    assert isinstance(event, LoadTargetSet)
    assert (event.target, event.limit_w) == ("file/y", 3e5)
    watch.write(HEAD + "y,300 kW,,,,,\n")
    assert [(type(e), e.target) for e in watch.look()] == [(LoadTargetWithdrawn, "file/x")]
    # and back: what was told once is told again
    watch.write(HEAD + "x,500 kW,a,,,,\ny,300 kW,,,,,\n")
    watch.look()
    assert watch.names == ["file/y", "file/x"]


def test_a_restart_withdraws_what_the_file_dropped_meanwhile(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "t.csv")
    watch.write(HEAD + "x,500 kW,,,,,\ny,400 kW,,,,,\n")
    watch.look()
    watch.twin.tick(None, LoadTargetSet(author="someone", target="mine", limit_w=1.0))
    watch.write(HEAD + "y,400 kW,,,,,\n")
    watch.source = watch.fresh()
    watch.look()
    assert sorted(watch.names) == ["file/y", "mine"]


def test_what_is_over_is_left_out(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "t.csv")
    rows = "x,5 W,,,2023-11-14T22:00:00Z,,\ny,5 W,,,2023-11-14T22:14:00Z,,\n"
    watch.write(HEAD + rows)
    watch.look()
    assert watch.names == ["file/y"]
    watch.now_ns += 3600 * NS
    watch.write(HEAD + rows + "z,5 W,,,,,\n")
    assert [e.target for e in watch.look() if isinstance(e, LoadTargetWithdrawn)] == []


BROKEN = [
    (HEAD + "x,500 kW,a,,", "ends within a line, as if half written"),
    ("", "ends within a line"),
    ("na\n", "expected columns among"),
    ("name,limit,colour\nx,5 W,red\n", "expected columns among"),
    (HEAD + "x,500 kW\n", "line 2: expected 7 cells"),
    (HEAD + "x,500,,,,,\n", "limit '500'; expected a number with its unit"),
    (HEAD + "x,-5 kW,,,,,\n", "limit '-5 kW'"),
    (HEAD + "x,1e9 MW,,,,,\n", "limit '1e9 MW'"),
    (HEAD + "x,999999999 MW,,,,,\n", "limit '999999999 MW'"),
    (HEAD + "x,5 kW,nowhere,,,,\n", "no feeder 'nowhere'"),
    (
        HEAD + "x,5 kW,,2026-01-01T00:00:00,,,\n",
        "begin '2026-01-01T00:00:00'; expected ISO 8601 with an offset",
    ),
    (HEAD + "x,5 kW,,soon,,,\n", "begin 'soon'"),
    (HEAD + "x,5 kW,,2026-01-02T00:00:00Z,2026-01-01T00:00:00Z,,\n", "ends before it begins"),
    (HEAD + "x,5 kW,,,,weather,\n", "kind 'weather'"),
    (HEAD + "x,5 kW,,,,,perhaps\n", "best_effort 'perhaps'"),
    (HEAD + ",5 kW,,,,,\n", "name: expected 1 to"),
    (HEAD + "x,5 kW,,,,,\nx,6 kW,,,,,\n", "line 3: name 'x' is there twice"),
    (HEAD + "".join(f"x{n},5 kW,,,,,\n" for n in range(1001)), "1001 targets; expected at most 1000"),
    (HEAD + "x" * 2**20 + "\n", "bytes; expected at most"),
]


@pytest.mark.parametrize("text, words", BROKEN, ids=[str(n) for n in range(len(BROKEN))])
def test_a_broken_file_changes_nothing_and_is_told(tmp_path: Path, text: str, words: str) -> None:
    watch = Watch(tmp_path / "t.csv")
    watch.write(HEAD + "old,500 kW,,,,,\n")
    watch.look()
    watch.write(text)
    assert watch.look() == []
    assert words in watch.source.file.fault
    assert watch.source.file.fault.endswith("what it said before holds")
    assert len(watch.faults) == 1
    assert watch.names == ["file/old"]
    watch.write(HEAD + "new,500 kW,,,,,\n")
    watch.look()
    assert (watch.names, watch.source.file.fault) == (["file/new"], "")


YAMLS = [
    ("targets:\n  - {name: x, limit: 500 kW", "ends within a line"), ("targets: 5\n", "expected `targets:`"),
    ("[]\n", "expected `targets:`"), ("targets: [5]\n", "targets[0]: expected a mapping"),
    ("targets: [{name: x, limit: 5}]\n", "limit '5'"), ("targets: [{nam: x}]\n", "keys among"),
    ("targets: [{name: x, limit: 5 W, begin: 2026-01-01}]\n", "begin '2026-01-01'"),
    ("targets: [{name: x, limit: 5 W, begin: 2026-01-01T00:00:00}]\n", "with an offset"),
    ("targets: [{name: x, limit: 5 W, feeders: a}]\n", "feeders: expected a list"),
    ("targets: {\n", "expected YAML"),
]  # fmt: skip


@pytest.mark.parametrize("text, words", YAMLS)
def test_broken_yaml(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_targets(path, Twin(two_racks()).site)
    assert words in "; ".join(caught.value.problems)


def test_a_file_that_is_gone_says_so_until_it_is_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "t.yaml")
    assert watch.look() == []
    assert "cannot be read" in watch.source.file.fault
    watch.write("targets: [{name: x, limit: 5 W}]\n")
    watch.look()
    assert (watch.names, watch.source.file.fault) == (["file/x"], "")
    kept = watch.path.rename(tmp_path / "away")
    watch.look()
    assert "cannot be read" in watch.source.file.fault
    assert watch.names == ["file/x"]
    kept.rename(watch.path)
    watch.look()
    assert (watch.names, watch.source.file.fault) == (["file/x"], "")


def test_a_file_that_grows_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("1\n")
    file = WatchedFile(path)
    for n in range(5):
        assert not file.changed()
        with path.open("a") as opened:
            opened.write(f"{n}\n")
    file.changed()
    assert file.changed()


def price_file(path: Path, first_s: int, values: Sequence[Any]) -> None:
    from datetime import UTC, datetime

    begin = START_NS // NS - START_NS // NS % 3600 + first_s
    rows = [
        f"{datetime.fromtimestamp(begin + 3600 * n, UTC):%Y-%m-%dT%H:%M:%SZ},{v}\n"
        for n, v in enumerate(values)
    ]
    path.write_text("time,value\n" + "".join(rows))


def test_prices_come_as_an_outlook_and_are_told_again_as_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    price_file(path, -7200, [0.1, 0.2, 0.3, 0.4, 0.5])
    now = [START_NS]
    source = OutlookFileSource("site.grid_price_usd_per_kwh", path, 1.0, lambda: now[0])
    twin = Twin(two_racks())

    def look() -> list[OutlookTold]:
        taken = RecordingInlet()
        for _ in range(2):
            asyncio.run(source.check(taken))  # type: ignore[arg-type]
        return [e for e in taken.items if isinstance(e, OutlookTold)]

    (told,) = look()
    twin.tick(None, told)
    view = twin.engine.view(1.0)
    price = view.outlook("site.grid_price_usd_per_kwh", START_NS + 3600 * NS)
    assert (price.tolist(), told.step_s, told.values) == ([0.4], 3600.0, (0.3, 0.4, 0.5))
    assert look() == []
    now[0] += 3601 * NS
    assert [e.values for e in look()] == [(0.4, 0.5)]
    path.write_text("time,value\n2023-11-14T22:00:00Z,0.1\n2023-11-14T23:00")  # half written
    assert look() == []
    assert "ends within a line" in source.file.fault
    price_file(path, 7200, [0.7, 0.8])
    assert [e.values for e in look()] == [(0.7, 0.8)]
    assert source.file.fault == ""
    now[0] += 10 * 3600 * NS
    assert look() == []
    assert "the last value was over" in source.file.fault
