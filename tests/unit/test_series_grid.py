"""Times as people write them, zones and summer time, order, jitter and bins of series from files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from tests.support.series_files import hours_from, read_of, same_panels, table_of, told_of, values_of, written
from twin.catalogue import NS
from twin.tables import SeriesOptions, read_series

HOUR_NS = 3600 * NS


AT_NS = 1_700_158_546_680_590_000


@pytest.mark.parametrize(
    ("first", "second", "start_ns", "step_s"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.6805900", AT_NS, 1),
        ("2023-11-16T18:15:46.6805901", "2023-11-16T18:15:47.6805901", AT_NS + 100, 1),
        ("2023-11-16 18:15:46,680590", "2023-11-16 18:15:47,680590", None, 1),
        ("2023-11-16T18:15:46Z", "2023-11-16T18:15:47Z", AT_NS // NS * NS, 1),
        ("2023-11-16 18:15:46 UTC", "2023-11-16 18:15:47 UTC", AT_NS // NS * NS, 1),
        ("2023-11-16 19:15:46+01:00", "2023-11-16 20:15:47+02:00", AT_NS // NS * NS, 1),
        ("2023-11-16 13:15:46-0500", "2023-11-16 18:15:47", AT_NS // NS * NS, 1),
        ("2023/11/16 18:15", "2023/11/16 18:16", AT_NS // (60 * NS) * 60 * NS, 60),
        ("16.11.2023 18:15", "16.11.2023 18:16", AT_NS // (60 * NS) * 60 * NS, 60),
        ("11/16/2023 6:15 PM", "11/16/2023 6:16 PM", AT_NS // (60 * NS) * 60 * NS, 60),
        ("20231116T181546", "20231116T181547", AT_NS // NS * NS, 1),
        ("20231116181546", "20231116181547", AT_NS // NS * NS, 1),
        ("20231116", "20231117", AT_NS // (24 * HOUR_NS) * 24 * HOUR_NS, 86400),
        ("1700158546", "1700158547", AT_NS // NS * NS, 1),
        ("1700158546.68059", "1700158547.68059", AT_NS, 1),
        ("1700158546680", "1700158547680", AT_NS // 1_000_000 * 1_000_000, 1),
        ("1700158546680590", "1700158547680590", AT_NS, 1),
        ("1700158546680590001", "1700158547680590001", AT_NS + 1, 1),
        ("0", "60", 0, 60),
        ("0.5", "0.75", NS // 2, 0.25),
    ],
)
def test_times_of_many_kinds(
    tmp_path: Path, first: str, second: str, start_ns: int | None, step_s: float
) -> None:
    if "," in first:
        first, second, start_ns = f'"{first}"', f'"{second}"', AT_NS
    panel = read_of(tmp_path, table_of([first, second, "end"], [1, 2, ""])).panel
    assert (panel.start_ns, panel.step_s, panel.values[:, 0].tolist()) == (start_ns, step_s, [1, 2])


def test_day_first_or_month_first_is_told_by_any_row(tmp_path: Path) -> None:
    days = [f"{d:02d}/01/2023 00:00" for d in range(1, 31)]
    panel = read_of(tmp_path, table_of(days, range(30))).panel
    assert (panel.step_s, panel.values[:, 0].tolist()) == (86400, list(range(30)))


# --- zones and summer time


def _local(zone: str, begin: str, hours: int, step_min: int = 60) -> tuple[list[str], int]:
    """Return the readings of a local clock, step by step, and the first instant in ns."""
    first = datetime.fromisoformat(begin).replace(tzinfo=UTC)
    steps = range(0, hours * 60, step_min)
    shown = [(first + timedelta(minutes=m)).astimezone(ZoneInfo(zone)) for m in steps]
    return [f"{s.replace(tzinfo=None)}" for s in shown], int(first.timestamp()) * NS


@pytest.mark.parametrize("step_min", [60, 30, 15])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    ("zone", "begin"),
    [
        ("Europe/Berlin", "2023-10-28"),
        ("Europe/Berlin", "2023-03-25"),
        ("America/New_York", "2023-11-04"),
        ("Europe/Dublin", "2023-10-28"),
        ("Australia/Sydney", "2023-04-01"),
        ("America/Havana", "2023-11-04"),
        ("Europe/Moscow", "2014-10-25"),
        ("Australia/Lord_Howe", "2023-04-01"),
    ],
)
def test_neither_repeated_nor_missing_hour_shifts_the_data(
    tmp_path: Path, zone: str, begin: str, newest_first: bool, step_min: int
) -> None:
    times, start_ns = _local(zone, begin, 48, step_min)
    rows = list(zip(times, range(len(times)), strict=True))[:: -1 if newest_first else 1]
    panel = read_of(tmp_path, table_of([t for t, _ in rows], [v for _, v in rows]), zone=zone).panel
    assert (panel.start_ns, panel.zone, panel.step_s) == (start_ns, zone, step_min * 60)
    assert panel.values[:, 0].tolist() == list(range(len(times)))


def test_an_hour_kept_once_is_the_first_of_the_two(tmp_path: Path) -> None:
    times, _ = _local("Europe/Berlin", "2023-10-28 22:00", 5)
    read = read_of(tmp_path, table_of(dict.fromkeys(times), range(4)), zone="Europe/Berlin")
    assert times == [f"2023-10-29 0{h}:00:00" for h in (0, 1, 2, 2, 3)]
    assert values_of(read) == [0, 1, 2, None, 3]
    told_of(read, "1 rows in the hour repeated", "0 read as its second pass, the others as its first")


def test_a_repeated_hour_in_no_order_is_a_gap(tmp_path: Path) -> None:
    times, _ = _local("Europe/Berlin", "2023-10-28 22:00", 6)
    text = table_of([times[i] for i in (5, 0, 3, 1, 4, 2)], [5, 0, 3, 1, 4, 2])
    read = read_of(tmp_path, text, zone="Europe/Berlin")
    assert values_of(read) == [0, 1, None, None, 4, 5]
    told_of(read, "2 dropped", "the two passes cannot be distinguished")
    counted = read_of(tmp_path, text, zone="Europe/Berlin", aggregate="count", step_s=3600)
    assert values_of(counted) == [1, 1, None, None, 1, 1]


def test_events_in_the_repeated_hour_split_where_the_clock_steps_back(tmp_path: Path) -> None:
    clock = ["01:10", "01:50", "02:05", "02:05", "02:40", "02:10", "02:12", "02:55", "03:10", "04:10"]
    path = written(tmp_path, table_of([f"2023-10-29 {c}" for c in clock], [1] * 10))
    read = read_series([path], "t", [], SeriesOptions(zone="Europe/Berlin", aggregate="count", step_s=3600))
    assert values_of(read) == [3, 3, 1]  # the first and the last hour are not whole


def test_times_that_summer_time_skips_are_dropped(tmp_path: Path) -> None:
    read = read_of(tmp_path, table_of(hours_from(6, "2023-03-26 00:00"), range(6)), zone="Europe/Berlin")
    assert values_of(read) == [0, 1, 3, 4, 5]
    told_of(read, "1 rows at times that do not exist in Europe/Berlin", "2023-03-26T02:00:00")


def test_days_by_local_midnight_stay_one_row_each(tmp_path: Path) -> None:
    days = [f"{datetime(2023, 10, 20) + timedelta(days=i):%Y-%m-%d}" for i in range(20)]
    panel = read_of(tmp_path, table_of(days, range(20)), zone="Europe/Berlin").panel
    assert (panel.step_s, panel.values[:, 0].tolist()) == (86400, list(range(20)))


def test_leap_day(tmp_path: Path) -> None:
    panel = read_of(tmp_path, table_of(hours_from(72, "2024-02-28 00:00"), range(72))).panel
    assert panel.values[:, 0].tolist() == list(range(72))
    assert panel.t_ns()[48] == int(datetime(2024, 3, 1, tzinfo=UTC).timestamp()) * NS
    read = read_of(tmp_path, table_of([*hours_from(6, "2023-02-28 21:00"), "2023-02-29 01:00"], range(7)))
    assert values_of(read) == list(range(6))
    told_of(read, "1 rows with no time", "2023-02-29")


# --- order, duplicates, jitter: properties


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_shuffled_rows_are_the_same_panel(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("s")
    n = data.draw(st.integers(4, 60))
    step = data.draw(st.sampled_from([1, 7, 60, 900, 3600]))
    at = sorted(data.draw(st.sets(st.integers(0, 3 * n), min_size=n, max_size=n)))
    at = [0, 1, 2, 3, *(a + 4 for a in at)]  # so that the step is to be seen
    values = data.draw(st.lists(st.floats(-1e9, 1e9), min_size=len(at), max_size=len(at)))
    rows = [(1_600_000_000 + step * a, v) for a, v in zip(at, values, strict=True)]
    shuffled = data.draw(st.permutations(rows))
    again = shuffled + data.draw(st.lists(st.sampled_from(rows), max_size=len(rows) // 3))
    read = [
        read_of(folder, table_of(*zip(*r, strict=True)), **more)
        for more in ({"step_s": float(step)}, {"step_s": 3.0 * step})
        for r in (rows, shuffled, again)
    ]
    for one, *others in (read[:3], read[3:]):
        for other in others:
            same_panels(one.panel, other.panel)
    found = read[0].panel.values[:, 0]
    assert found[~np.isnan(found)].tolist() == values
    assert np.flatnonzero(~np.isnan(found)).tolist() == at


@pytest.mark.slow
@settings(max_examples=30)
@given(
    jitter=st.lists(st.integers(-20, 20), min_size=30, max_size=80),
    offset_s=st.integers(0, 59),
    step=st.sampled_from([60, 300]),
)
def test_a_clock_that_jitters_loses_no_row(
    tmp_path_factory: pytest.TempPathFactory, jitter: list[int], offset_s: int, step: int
) -> None:
    n = len(jitter)
    times = [1_600_000_000 + offset_s + step * i + j / 10 for i, j in enumerate(jitter)]
    text = table_of(times, range(n))
    panel = read_of(tmp_path_factory.mktemp("s"), text, step_s=float(step)).panel
    assert panel.values[:, 0].tolist() == list(range(n))


@pytest.mark.slow
@example(gaps=[5.0] + [1.0] * 29, step=5.0)  # begins with a bin
@settings(max_examples=30)
@given(
    gaps=st.lists(st.floats(0.001, 40), min_size=30, max_size=200),
    step=st.sampled_from([5.0, 10.0, 60.0]),
)
def test_bins_agree_with_counting_by_hand(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], step: float
) -> None:
    folder = tmp_path_factory.mktemp("s")
    apart = np.array(gaps) + np.arange(len(gaps)) * 0.618 % 1 / 3  # no two alike: events, not samples
    assume(abs(np.median(apart[1:]) - step) > 0.3 * step)
    t = np.round(1_600_000_000 + np.cumsum(apart), 6)
    v = np.arange(len(t)) % 7 + 1.0
    path = written(folder, table_of([f"{x:.6f}" for x in t], v))
    begun, last = int(t[0] // step), int(t[-1] // step) - 1
    first = begun + (t[0] % step > 0)  # the first bin that is whole
    assume(last - first >= 2)
    inside = [np.flatnonzero((t >= k * step) & (t < (k + 1) * step)) for k in range(first, last + 1)]
    for how, of in (("count", len), ("sum", lambda i: v[i].sum())):
        panel = read_series([path], "t", ["v"], SeriesOptions(step_s=step, aggregate=how)).panel
        assert panel.start_ns == first * round(step * NS)
        assert panel.values[:, 0].tolist() == [of(i) for i in inside]
    for how, one in (
        ("last", lambda i: v[i[-1]]),
        ("max", lambda i: v[i].max()),
        ("mean", lambda i: v[i].mean()),
    ):
        panel = read_series([path], "t", ["v"], SeriesOptions(step_s=step, aggregate=how)).panel
        got = panel.values[first - begun : first - begun + len(inside), 0]
        assert panel.start_ns == begun * round(step * NS)
        np.testing.assert_allclose(got, [one(i) if len(i) else np.nan for i in inside], rtol=1e-12)
