"""Files of any kind as a panel: packing, separators, decimal marks, errors, limits, gaps, real recordings."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from connectors.files import text_table as series_text
from tests.support.series_files import hours_from, read_of, same_panels, table_of, told_of, values_of, written
from twin.catalogue import NS, ConfigError, StorageError
from twin.tables import SeriesOptions, grid, read_series

HOUR_NS = 3600 * NS
START_NS = 1_700_000_000 * NS // HOUR_NS * HOUR_NS  # 2023-11-14 22:00 UTC


PLAIN = table_of(hours_from(6), [1, 2.5, -3, 4e3, 5, 6])
KNOWN = [1, 2.5, -3, 4000, 5, 6]


@pytest.mark.parametrize(
    "packed",
    [
        PLAIN.encode(),
        lzma.compress(PLAIN.encode()),
        gzip.compress(PLAIN.encode(), mtime=0),
        bz2.compress(PLAIN.encode()),
        zstandard.compress(PLAIN.encode()),
        gzip.compress(PLAIN[:40].encode(), mtime=0) + gzip.compress(PLAIN[40:].encode(), mtime=0),
        zstandard.compress(PLAIN[:40].encode()) + zstandard.compress(PLAIN[40:].encode()),
        PLAIN.encode("utf-8-sig"),
        PLAIN.encode("utf-16"),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.rstrip("\n").encode(),
        PLAIN.replace(",", ";").encode(),
        PLAIN.replace(",", "\t").encode(),
        PLAIN.replace(",", " | ").encode(),
        PLAIN.replace(",", ";").replace(".", ",").encode(),
        PLAIN.replace(",", '","').replace("\n", '"\n"').join('""').removesuffix('""').encode(),
        b"A title\n# and a comment, with commas, in it\n\n" + PLAIN.encode(),
        PLAIN.replace("\n", ",\n").encode(),
        PLAIN.replace("\n", "\n\n").encode(),
        PLAIN.encode() + b"\n(6 rows affected)\n\nCompletion time: 2025-10-31\n",
    ],
    ids=str,
)
def test_every_dress_of_a_file_is_the_same_panel(tmp_path: Path, packed: bytes) -> None:
    read = read_of(tmp_path, packed)
    assert values_of(read) == KNOWN
    assert (read.panel.start_ns, read.panel.step_s, read.panel.names) == (START_NS, 3600.0, ("v",))
    assert (read.rows, read.step_given) == (6, False)
    assert len(read.notes) == (1 if b"affected" in packed else 0), read.notes


def test_the_name_of_a_file_says_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, lzma.compress(PLAIN.encode()), "plain.gz")
    assert read_series([path], "t", ["v"]).panel.values[:, 0].tolist() == KNOWN


def test_columns_in_another_encoding_are_found(tmp_path: Path) -> None:
    assert values_of(read_of(tmp_path, PLAIN.replace("v", "Temp °C").encode("cp1252"), "Temp °C")) == KNOWN


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1.234,5", "2", "1.234.567,25"], [1234.5, 2, 1234567.25]),
        (["1234.5", "2", "3"], [1234.5, 2, 3]),
        (["-0,5", "+7,25", "1e3"], [-0.5, 7.25, 1000]),
        (["1,5", "12.000", "3"], [1.5, 12000, 3]),
    ],
)
def test_decimal_commas_where_semicolons_separate(
    tmp_path: Path, cells: list[str], numbers: list[float]
) -> None:
    assert values_of(read_of(tmp_path, table_of([0, 60, 120], cells, ";"))) == numbers


def test_decimal_point_and_comma_far_apart_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_text, "CHUNK_ROWS", 2)
    with pytest.raises(ConfigError, match=r"s.csv.*'v'.*point in line 3.*commas"):
        read_of(tmp_path, table_of(range(4), ["1", "1.5", "1,5", "2"], ";"))


def test_what_is_no_number_is_a_gap_and_told(tmp_path: Path) -> None:
    cells = [1, "NA", "", "nan", "inf", "-inf", "null", "-", "oops", 10, "1e999", 12]
    read = read_of(tmp_path, table_of(hours_from(12), cells))
    assert values_of(read) == [1, *[None] * 8, 10, None, 12]
    told_of(read, "1 cells of 'v' that are no numbers", "line 10: 'oops'")
    told_of(read, "8 rows without a value")
    told_of(read, "gap of 8 h from 2023-11-14 23:00:00+00:00")


def test_lines_that_are_no_data_are_counted(tmp_path: Path) -> None:
    text = PLAIN + "total,99\nnow,7\n2023,8\n23 rows,9\n2023-11-15 09:00,7,8\n,3\n"
    read = read_of(tmp_path, text)
    assert values_of(read) == KNOWN
    told_of(read, "5 rows with no time dropped", "line 8: 'total'")
    told_of(read, "1 rows with more cells than the header", "line 12: '2023-11-15 09:00'")


def test_a_file_of_mostly_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s.csv: expected a time in 't'.*7 of 13 rows.*line 8: 'x'"):
        read_of(tmp_path, PLAIN + "x,1\n" * 7)
    with pytest.raises(ConfigError, match=r"more cells than the header.*line 2"):
        read_of(tmp_path, table_of(hours_from(3), ["1,5", "2,5", "3,5"]))


def test_a_quote_that_nothing_ends_costs_its_line_only(tmp_path: Path) -> None:
    read = read_of(tmp_path, PLAIN.replace("4000.0", '"4000').replace("-3", '"-3"'))
    assert values_of(read) == KNOWN
    text = PLAIN + '"an open end,1\n' + "\n".join(f"{t},7" for t in hours_from(3, "2023-11-15 04:00"))
    read = read_of(tmp_path, text)
    assert values_of(read) == [*KNOWN, 7, 7, 7]
    told_of(read, "a quote without an end")


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        (PLAIN, "V", "line 1: no column 'V', found 't', 'v'; did you mean v?"),
        ("t;power_w;x\n1;2;3\n", "powr", "did you mean power_w?"),
        ("2023-11-14,1\n2023-11-15,2\n", "v", "looks like data"),
        ("", "v", "the file is empty"),
        ("\n\n\n", "v", "the file is empty"),
        ("t,v,v\n1,2,3\n", "v", "'v' occurs more than once"),
        (b"PK\x03\x04rest", "v", "a ZIP file or workbook"),
        (b"ab\x00\x01cd", "v", "binary"),
        ("t,v\n", "v", "no rows"),
        ("t,v\n\n\n", "v", "no rows"),
        (
            table_of(hours_from(3), ["a", "b", 3]),
            "v",
            "column 'v': expected numbers, found 1 in 3 rows; line 2: 'a'",
        ),
        (table_of(hours_from(3), ["", "", ""]), "v", "found 0 in 3 rows, all others are empty"),
        (table_of(["a", "b"], [1, 2]), "v", "column 't', line 2: 'a' is not a time: expected ISO 8601"),
        (table_of(["01/02/2023", "02/02/2023"], [1, 2]), "v", "day or month first?"),
        (table_of(hours_from(1), [1]), "v", "one instant only"),
        (table_of([0, 3, 4, 9, 77, 90, 200], range(7)), "v", "times are irregular (1 s to 110 s apart)"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str | bytes, column: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_of(tmp_path, text, column)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"aggregate": "median"}, "expected one of mean, sum, last, max, count"),
        ({"aggregate": "count"}, "--step"),
        ({"step_s": 0.0}, "step: expected"),
        ({"step_s": float("nan")}, "step: expected"),
        ({"zone": "Europe/Atlantis"}, "Europe/Berlin"),
        ({"known_columns": ["v"]}, "'v': given 2 times"),
        ({"gap_ranges": [("2023", "soon")]}, "gap"),
        ({"gap_ranges": [("2023-11-15", "2023-11-14")]}, "FROM before TO"),
        ({"gap_ranges": [("2023-11-01", "2023-12-01")]}, "no value outside"),
        ({"where": ("v", "77")}, "no rows of v=77"),
        ({"step_s": 1e6}, "shorter --step"),
        ({"step_s": 1e-4}, "expected at most 5,000,000: give a longer --step"),
    ],
)
def test_wrong_requests_are_named(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_of(tmp_path, PLAIN, **more)
    assert words in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none.csv: cannot be read"):
        read_series([tmp_path / "none.csv"], "t", ["v"])
    packed = lzma.compress(table_of(range(9999), range(9999)).encode())
    for broken in (packed[:-50], packed[:200] + b"x" * 50 + packed[250:]):
        with pytest.raises(StorageError, match="cannot be read"):
            read_of(tmp_path, broken)
    with pytest.raises(ConfigError, match="value column: expected at least one"):
        read_series([tmp_path / "none.csv"], "t", [])


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_text, "MAX_BYTES", 1_000_000)
    for bomb in (b"t,v\n" + b"1,2\n" * 1_000_000, b" " * 4_000_000, b"t,v\n1," + b"2" * 4_000_000):
        for packed in (lzma.compress(bomb, preset=0), gzip.compress(bomb), zstandard.compress(bomb), bomb):
            with pytest.raises(ConfigError, match="at most 1,000,000 bytes unpacked"):
                read_of(tmp_path, packed)


def test_rows_and_steps_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_text, "MAX_ROWS", 10)
    path = written(tmp_path, PLAIN)
    with pytest.raises(ConfigError, match="at most 10 rows"):
        read_series([path, path], "t", ["v"])
    far = PLAIN + "1970-01-01 00:00:00,7\n"
    monkeypatch.setattr(grid, "MAX_GRID_ROWS", 1000)
    with pytest.raises(ConfigError, match=r"steps of 60 min from 1970-01-01 .*2023-11-15 03:00:00"):
        read_of(tmp_path, far)


# --- several columns, known ahead, gaps


def test_several_files_lie_side_by_side(tmp_path: Path) -> None:
    a = written(tmp_path, table_of(hours_from(4), [1, 2, 3, 4]), "a/s.csv")
    b = written(
        tmp_path,
        gzip.compress(table_of(hours_from(4, "2023-11-15 00:00"), [5, 6, "", 8]).encode()),
        "b/s.csv",
    )
    panel = read_series([a, b], "t", ["v"]).panel
    nan = np.nan
    assert (panel.names, panel.start_ns) == (("a", "b"), START_NS)
    np.testing.assert_array_equal(panel.values.T, [[1, 2, 3, 4, nan, nan], [nan, nan, 5, 6, nan, 8]])
    read = read_series([a, b], "t", ["v"], SeriesOptions(total=True))
    assert (read.panel.names, values_of(read), read.rows) == (("total",), [None, None, 8, 10, None, None], 8)
    both = read_series([a, b], "t", ["v"], SeriesOptions(step_s=7200, aggregate="max")).panel
    np.testing.assert_array_equal(both.values.T, [[2, 4, nan], [nan, 6, 8]])
    late = written(tmp_path, table_of(hours_from(4, "2023-11-15 05:00"), [5, 6, 7, 8]), "c.csv")
    with pytest.raises(ConfigError, match="no value is left"):
        read_series([a, late], "t", ["v"], SeriesOptions(total=True))


def test_names_of_columns(tmp_path: Path) -> None:
    text = "t,v,w\n" + "".join(f"{t},{i},{-i}\n" for i, t in enumerate(hours_from(3)))
    a, b = written(tmp_path, text, "a.csv.xz"), written(tmp_path, text, "b.csv")
    for paths, columns, names in (
        ([a], ["w"], ("w",)),
        ([a], ["v", "w"], ("v", "w")),
        ([a, b], ["w"], ("a", "b")),
        ([a, b], ["v", "w"], ("a:v", "a:w", "b:v", "b:w")),
    ):
        assert read_series(paths, "t", columns).panel.names == names
    assert len(set(read_series([a, a], "t", ["w"]).panel.names)) == 2


def test_known_columns_go_on_after_the_last_value(tmp_path: Path) -> None:
    rows = [
        f"{t},{'' if i > 3 or i < 1 else i},{'' if i == 2 else 10 * i}" for i, t in enumerate(hours_from(7))
    ]
    text = "\n".join(["t,v,c", *rows])
    panel = read_of(tmp_path, text, known_columns=["c"]).panel
    assert panel.values[:, 0].tolist() == [1, 2, 3]
    assert panel.start_ns == START_NS + HOUR_NS
    np.testing.assert_array_equal(panel.known["c"], [10, np.nan, 30, 40, 50, 60])
    binned = read_of(tmp_path, text, known_columns=["c"], step_s=7200, aggregate="max").panel
    np.testing.assert_array_equal(binned.known["c"], [5, 30, 45, 60])
    assert binned.values[:, 0].tolist() == [1, 3]


def test_gaps_asked_for(tmp_path: Path) -> None:
    text = table_of(hours_from(6), [1, 2, 0, 0, 5, 6])
    read = read_of(tmp_path, text, gap_ranges=[("2023-11-15 00:00", "2023-11-15T03:00+01:00")])
    assert values_of(read) == [1, 2, None, None, 5, 6]
    told_of(read, "gap asked for, 2023-11-15 00:00 to 2023-11-15T03:00+01:00: 2 rows")
    local = read_of(
        tmp_path, text, zone="Europe/Berlin", gap_ranges=[("2023-11-15 00:00", "2023-11-15 01:00")]
    )
    assert values_of(local) == [1, 2, None, 0, 5, 6]
    touching = [("2023-11-15 01:30", "2023-11-15 02:10")]
    summed = read_of(tmp_path, text, aggregate="sum", step_s=7200, gap_ranges=touching)
    assert values_of(summed) == [3, None, None], "a bin that a gap touches is a gap"


def test_one_series_of_several_in_a_file(tmp_path: Path) -> None:
    rows = [f"{t},{name},{i if name == 'a' else -i}" for i, t in enumerate(hours_from(5)) for name in "ba"]
    text = "\n".join(["t,who,v", *rows, "(10 rows)"])
    assert values_of(read_of(tmp_path, text, where=("who", "a"))) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"10 rows for 5: choose one series with --where"):
        read_of(tmp_path, text)
    assert values_of(read_of(tmp_path, text, aggregate="sum")) == [0] * 5
    assert values_of(read_of(tmp_path, text, aggregate="max")) == [0, 1, 2, 3, 4]


def test_duplicates_count_once(tmp_path: Path) -> None:
    read = read_of(tmp_path, PLAIN + "2023-11-14 23:00,7\n2023-11-15 00:00,-3\n")
    assert values_of(read) == [1, 7, *KNOWN[2:]]
    told_of(read, "2 duplicate instants: last kept")
    empty = read_of(tmp_path, PLAIN + "2023-11-14 23:00,\n")
    assert values_of(empty) == KNOWN, "an empty cell does not undo a value"


def test_events_are_counted_without_a_value(tmp_path: Path) -> None:
    events = [100, 100, 101, 119, 130, 130, 175, 181]
    path = written(tmp_path, "t\n" + "\n".join(map(str, events)))
    read = read_series([path], "t", [], SeriesOptions(step_s=10, aggregate="count"))
    assert (values_of(read), read.panel.names) == ([3, 1, 0, 2, 0, 0, 0, 1], ("count",))
    assert (read.panel.start_ns, read.step_given, read.rows) == (100 * NS, True, 8)
    told_of(read, "a bin without rows is 0")


def test_a_sum_with_a_row_missing_is_a_gap(tmp_path: Path) -> None:
    hours, values = hours_from(16, "2023-11-14 00:00"), list[object](range(16))
    values[9] = ""
    text = table_of(hours[:5] + hours[7:], values[:5] + values[7:])
    read = read_of(tmp_path, text, aggregate="sum", step_s=4 * 3600)
    assert values_of(read) == [6, None, None, 54]
    assert values_of(read_of(tmp_path, text, step_s=4 * 3600)) == [1.5, 5.5, (8 + 10 + 11) / 3, 13.5]


# --- real recordings


@pytest.mark.slow
def test_demand_of_a_cluster(recording: Callable[[str], Path]) -> None:
    paths = sorted(recording("gpu-demand-helios-earth").glob("*/cluster_sequence_vc.csv.xz"))
    one = read_series(paths[:1], "time", ["running_gpu_num"])
    assert (one.panel.values.shape, one.panel.step_s, one.notes) == ((44640, 1), 60.0, ())
    outage = ("2020-05-09 23:56", "2020-05-11 00:00")
    some = read_series(paths[:3], "time", ["running_gpu_num"], SeriesOptions(total=True, gap_ranges=[outage]))
    parts = [read_series([p], "time", ["running_gpu_num"]).panel.values[:, 0] for p in paths[:3]]
    expected = np.sum(parts, axis=0)
    gap = np.isnan(some.panel.values[:, 0])
    assert gap.sum() == 24 * 60 + 4
    np.testing.assert_array_equal(some.panel.values[~gap, 0], expected[~gap])
    assert read_series(paths[:3], "time", ["running_gpu_num"]).panel.names == tuple(
        p.parent.name for p in paths[:3]
    )


def test_servers_by_the_hour(recording: Callable[[str], Path]) -> None:
    for path in sorted(recording("gpu-server-hourly-biohpc").glob("*_usage_stats.txt")):
        read = read_series(
            [path], "timestamp", ["powerave", "utilave"], SeriesOptions(zone="America/New_York")
        )
        assert (read.panel.step_s, read.panel.n) == (3600.0, 2)
        assert np.isfinite(read.panel.values[:, 0]).sum() == read.rows
        told_of(read, "2 rows with no time dropped", f"({read.rows} rows affected)")


def test_price_and_carbon(recording: Callable[[str], Path]) -> None:
    root = recording("grid-hourly")
    for path in sorted(root.glob("electricity_prices/*/*/*/*.csv")):
        one, other = (read_series([path], f"Datetime ({c})", ["Price (USD/MWh)"]) for c in ("UTC", "Local"))
        assert one.panel.values.shape == (8760, 1)
        same_panels(one.panel, other.panel)
    for path in sorted(root.glob("carbon_intensity/*/*/*.csv")):
        panel = read_series([path], "Datetime (UTC)", ["Carbon Intensity gCO₂eq/kWh (direct)"]).panel
        assert panel.values.shape == (8760, 1)
        assert np.isfinite(panel.values).all()


def test_requests(recording: Callable[[str], Path]) -> None:
    path = next(recording("llm-requests-azure-conv").glob("*.csv"))
    for step, rows in ((10.0, 349), (60.0, 58)):
        read = read_series([path], "TIMESTAMP", [], SeriesOptions(step_s=step, aggregate="count"))
        assert read.rows == 19_366
        assert read.panel.values.shape == (rows, 1)
        assert read.panel.start_ns % round(step * NS) == 0
        assert 0.9 * 19_366 < read.panel.values.sum() < 19_366
