"""Tables of text: faults of mappings, times and zones, bad cells and rows, gaps, sums, real recordings."""

from __future__ import annotations

import gzip
import itertools
import lzma
import math
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from connectors.files import read_mapping, read_series, read_tree, tabular, text_table
from connectors.files.tabular import Series, mapping_of
from twin.catalogue import ConfigError, StorageError
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Reading

DEPLOY = Path(__file__).parents[2] / "deploy"
HOUR_NS = 3600 * 10**9


class Known:
    """A site of these names, in this order."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def entity(self, table: str, name: str) -> int | None:
        return self.names.index(name) if name in self.names else None


def _tree(**more: Any) -> dict[str, Any]:
    return {
        "time": {"column": "t", "format": "epoch_s"},
        "entity": {"table": "node", "name": "n"},
        "columns": {"p": {"signal": "power_w", "unit": "kW"}, "c": {"signal": "inlet_temp_c", "unit": "F"}},
    } | more


def _read(tmp_path: Path, *texts: str | bytes, names: tuple[str, ...] = ("n",), **more: Any) -> Series:
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.csv")
        paths[-1].write_bytes(text.encode() if isinstance(text, str) else text)
    series = read_series(paths, mapping_of(_tree(**more), "m.yaml"), Known(*names))
    c = series.counts
    assert c.total == c.decoded + c.ignored + c.bad
    return series


def _values(series: Series, signal: str = "power_w") -> list[tuple[float, float | None]]:
    return [(t / 1e9, r.value) for t, rs in series for r in rs if r.signal == signal]


def test_units_become_the_cores(tmp_path: Path) -> None:
    (t, readings), *rest = _read(tmp_path, "t,p,c\n1.5,2,212\n")
    assert (t, rest) == (1_500_000_000, [])
    assert readings[0] == Reading("node", 0, "power_w", 2000.0, t)
    assert readings[1].value == pytest.approx(100.0)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_newest_first_bom_tail_and_blank_lines(tmp_path: Path, end: str) -> None:
    lines = ["\ufefft,p,c", "3,3,", "", "2,2,", "1,1,", "", "(3 rows affected)", "", "Completion time: 2025"]
    series = _read(tmp_path, end.join(lines))
    assert _values(series) == [(1, 1000), (2, 2000), (3, 3000)]
    c = series.counts
    assert (c.total, c.decoded, c.ignored, c.bad, c.empty_cells) == (8, 3, 5, 0, 3)
    assert c.reasons["ignored", "row", "after the last row of data"] == (2, "(3 rows affected)")
    assert _values(series, "inlet_temp_c") == [(1, None), (2, None), (3, None)]  # empty is a reading: none


@pytest.mark.parametrize(
    "cell", ["nan", "inf", "-inf", "1e999", "1_0", "x", "\0", "0x10", "9" * 65, "1" * 70_000, "1,5"]
)
def test_a_bad_cell_costs_only_itself(tmp_path: Path, cell: str) -> None:
    series = _read(tmp_path, f't;p;c\n1;"{cell}";32\n', delimiter=";")
    assert _values(series) == []
    assert _values(series, "inlet_temp_c") == [(1, pytest.approx(0.0, abs=1e-9))]
    assert (series.counts.decoded, series.counts.bad_cells) == (1, 1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("2,1", "number of cells differs"),
        ("2,1,1,1", "number of cells differs"),
        ("soon,1,1", "no time as epoch_s"),
        ("-1,1,1", "from 1970"),
        ("1e99,1,1", "from 1970"),
        ("nan,1,1", "from 1970"),
        ("1,5,5", "the same time twice"),
        ("9" * 65 + ",1,1", "no time"),
    ],
)
def test_a_bad_row_among_good_ones(tmp_path: Path, row: str, why: str) -> None:
    series = _read(tmp_path, f"t,p,c\n1,1,1\n{row}\n3,3,3\n")
    assert _values(series) == [(1, 1000), (3, 3000)]
    assert series.counts.bad == 1
    assert any(why in key[2] for key in series.counts.reasons)


def test_rows_that_are_all_bad_are_not_a_tail(tmp_path: Path) -> None:
    assert _read(tmp_path, "t,p,c\nx,1,1\ny,1,1\n").counts.bad == 2


def test_entities_by_name(tmp_path: Path) -> None:
    entity = {"table": "node", "column": "who", "template": "{name}/node0"}
    text = "who,t,p,c\na,1,1,1\nb,1,2,2\nghost,1,9,9\nb,2,3,3\n"
    series = _read(tmp_path, text, entity=entity, names=("b/node0", "a/node0"), columns=_tree()["columns"])
    assert [(t, [(r.entity, r.value) for r in rs if r.signal == "power_w"]) for t, rs in series] == [
        (10**9, [(0, 2000), (1, 1000)]),
        (2 * 10**9, [(0, 3000)]),
    ]
    assert series.counts.reasons["ignored", "node", "no such entity in the site"] == (1, "ghost")


@pytest.mark.parametrize(
    ("text", "format", "zone", "expected"),
    [
        ("2024-07-01 12:00:00.250", "iso", "UTC", "2024-07-01T12:00:00.250+00:00"),
        ("2024-07-01 12:00:00", "iso", "America/New_York", "2024-07-01T16:00:00+00:00"),
        ("2024-01-01 12:00:00", "iso", "America/New_York", "2024-01-01T17:00:00+00:00"),
        ("2024-01-01 12:00:00+01:00", "iso", "America/New_York", "2024-01-01T11:00:00+00:00"),
        ("01.07.2024 12:00", "%d.%m.%Y %H:%M", "Europe/Berlin", "2024-07-01T10:00:00+00:00"),
        ("01.07.2024 12:00 +0200", "%d.%m.%Y %H:%M %z", "UTC", "2024-07-01T10:00:00+00:00"),
        ("Jul 01 2024 12:00", "%b %d %Y %H:%M", "UTC", "2024-07-01T12:00:00+00:00"),
        ("1719835200250", "epoch_ms", "UTC", "2024-07-01T12:00:00.250+00:00"),
        ("2024-11-03 01:30:00", "iso", "America/New_York", "2024-11-03T05:30:00+00:00"),  # the earlier one
    ],
)
def test_times(tmp_path: Path, text: str, format: str, zone: str, expected: str) -> None:
    time = {"column": "t", "format": format, "zone": zone}
    ((t_ns, _),) = _read(tmp_path, f"t,p,c\n{text},1,1\n", time=time)
    assert t_ns == round(datetime.fromisoformat(expected).timestamp() * 1000) * 10**6


@pytest.mark.parametrize("back", [False, True])
def test_the_repeated_and_the_skipped_hour(tmp_path: Path, back: bool) -> None:
    autumn = ["2024-11-03 00:30", "2024-11-03 01:30", "2024-11-03 01:30", "2024-11-03 02:30"]
    spring = ["2024-03-10 01:30", "2024-03-10 02:30", "2024-03-10 03:30"]
    rows = [f"{t},{i},1" for i, t in enumerate([*spring, *autumn])]
    text = "\n".join(["t,p,c", *(rows[::-1] if back else rows)])
    series = _read(tmp_path, text, time={"column": "t", "zone": "America/New_York"})
    values = _values(series)
    assert [v for _, v in values] == [0, 2000, 3000, 4000, 5000, 6000]
    steps = [b[0] - a[0] for a, b in itertools.pairwise(values)]
    assert [*steps[:1], *steps[2:]] == [3600] * 4
    assert (series.counts.repeated_hours, series.counts.bad) == (2, 1)
    assert any("does not exist" in why for _, _, why in series.counts.reasons)


def test_a_sum_with_a_part_missing_is_missing(tmp_path: Path) -> None:
    texts = ("t,p,c\n1,1,1\n2,2,2\n3,3,3\n4,4,4\n", "t,p,c\n1,10,1\n3,x,3\n4,,4\n")
    series = _read(tmp_path, *texts, combine="sum")
    assert _values(series) == [(1, 11000), (2, None), (3, None), (4, None)]
    assert series.counts.incomplete_sums == 3
    alone = _read(tmp_path, texts[0], combine="sum")
    assert _values(alone)[1] == (2, 2000)
    apart = _read(tmp_path, *texts)  # not summed: the second file has nothing new to say
    assert (apart.counts.bad, _values(apart)[0]) == (3, (1, 1000))


def test_a_file_without_rows_makes_every_sum_unknown(tmp_path: Path) -> None:
    assert _values(_read(tmp_path, "t,p,c\n1,1,1\n", "t,p,c\n", combine="sum")) == [(1, None)]


def test_gaps(tmp_path: Path) -> None:
    rows = "".join(f"{t},{p},{50 * p},0\n" for t, p in enumerate([1, 0, 1, 0, 0, 0, 1, 0]))
    gap = {"all_zero": ["p", "z"], "min_run": 2}
    series = _read(tmp_path, "t,p,c,z\n" + rows, gap=gap)
    assert [v for _, v in _values(series)] == [1000, 0, 1000, None, None, None, 1000, 0]
    assert [v for _, v in _values(series, "inlet_temp_c")][3:6] == [None] * 3
    assert (series.counts.gap_samples, series.counts.decoded) == (3, 8)
    two = _read(tmp_path, "t,p,c,z\n" + rows, gap=gap | {"min_files": 2})
    assert two.counts.gap_samples == 0


def test_missing_steps(tmp_path: Path) -> None:
    text = "t,p,c\n0,1,1\n60,1,1\n240,1,1\n301,1,1\n"
    assert _read(tmp_path, text, interval_s=60).counts.missing_steps == 2


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path, m = tmp_path / f"a.csv{suffix}", mapping_of(_tree(), "m")
    path.write_bytes(pack(b"t,p,c\n1,1,1\n"))
    assert _values(read_series([path], m, Known("n"))) == [(1, 1000)]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(StorageError, match="cannot be read"):
        read_series([path], m, Known("n"))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_ROWS", 2)
    with pytest.raises(ConfigError, match="at most 2 rows"):
        _read(tmp_path, "t,p,c\n1,1,1\n2,1,1\n3,1,1\n")
    monkeypatch.setattr(text_table, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        _read(tmp_path, "t,p,c\n1,1,1\n")


def test_a_header_that_does_not_fit(tmp_path: Path) -> None:
    for text, why in (
        ("t,c\n", "line 1: no column 'p', found 't', 'c'"),
        ("t,p,p,c\n", "column 'p' occurs more than once"),
        ("", "the file is empty"),
        ("\0\n", "found binary data"),
    ):
        with pytest.raises(ConfigError, match=why):
            _read(tmp_path, text)


def test_all_faults_of_a_mapping_at_once() -> None:
    tree = {
        "time": {"column": "t", "format": "when", "zone": "Mars/Base"},
        "entity": {"table": "node", "name": "n", "column": "c", "template": "{name}{name}"},
        "delimiter": "ab", "interval_s": 0, "gap": {"min_run": 0},
        "columns": {
            "a": {"signal": "power_w", "unit": "C"},
            "b": {"signal": "colour", "unit": "1"},
            "c": {"signal": "fan_hz", "unit": "RPM", "scale": math.inf},
            "d": {"signal": "fan_hz", "unit": "RPM"},
        },
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        mapping_of(tree, "m.yaml")
    assert len(caught.value.problems) == 12
    assert all(p.startswith("m.yaml: $.") for p in caught.value.problems)
    with pytest.raises(ConfigError) as caught:
        mapping_of(
            {"time": {"colum": "t"}, "columns": {"a": {"signal": "x"}}, "gap": {"min_run": "x"}}, "m.yaml"
        )
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("name", ["biohpc-hourly", "helios-gpu-demand", "grid-carbon", "grid-price"])
def test_shipped_mappings_are_sound(name: str) -> None:
    assert read_mapping(DEPLOY / f"mappings/{name}.yaml").columns


def _site(name: str) -> Site:
    return build_site(SiteSpec(read_tree(DEPLOY / f"sites/{name}.yaml"), {}), name)


def test_biohpc(recording: Callable[[str], Path]) -> None:
    paths = sorted(recording("gpu-server-hourly-biohpc").glob("*_usage_stats.txt"))
    series = read_series(paths, read_mapping(DEPLOY / "mappings/biohpc-hourly.yaml"), _site("biohpc"))
    c = series.counts
    assert (c.total, c.decoded, c.ignored, c.bad, c.bad_cells) == (47_376, 47_361, 15, 0, 0)
    assert (c.repeated_hours, c.missing_steps) == (4, 5_477)
    samples = list(series)
    assert [t for t, _ in samples] == sorted({t for t, _ in samples})
    assert {r.entity for r in samples[-1][1]} == {0, 1, 2}
    # the newest line of cbsugpu05: 2025-10-31 09:00 in New York, 73.3075 W, 37 degC, 0.75 %
    assert samples[-1][0] == int(datetime.fromisoformat("2025-10-31T13:00:00+00:00").timestamp()) * 10**9
    assert [r.value for r in samples[-1][1][:5]] == [73.3075, 75.78, 37.0, 0.0075, 0.0]


@pytest.mark.long
@pytest.mark.slow
def test_helios_sum(recording: Callable[[str], Path]) -> None:
    paths = sorted(recording("gpu-demand-helios-earth").glob("*/cluster_sequence_vc.csv.xz"))
    mapping, site = read_mapping(DEPLOY / "mappings/helios-gpu-demand.yaml"), _site("helios-earth")
    series = read_series(paths, mapping, site)
    c = series.counts
    assert (c.total, c.decoded, c.ignored, c.bad, c.incomplete_sums) == (714_240, 714_240, 0, 0, 0)
    assert (c.gap_samples, c.missing_steps) == (1_566, 0)
    gone = []
    for t, rs in series:
        values = {r.signal: r.value for r in rs}
        running, idle = values["gpu_running_count"], values["gpu_idle_count"]
        # all 856 GPUs run or idle, at every minute that has a reading
        assert running is None or idle is None or running + idle == 856
        if all(value is None for value in values.values()):
            gone.append(t)
    assert len(gone) == 1_566
    start = int(datetime.fromisoformat("2020-05-09T23:56:00+00:00").timestamp()) * 10**9
    assert gone[0] == start
    one = read_series(paths[:1], mapping, site)
    assert (one.counts.decoded, one.counts.gap_samples) == (44_640, 0)


def test_grid(recording: Callable[[str], Path]) -> None:
    root = recording("grid-hourly")
    for folder, name in (
        ("carbon_intensity", "grid-carbon"),
        ("electricity_prices/standardized", "grid-price"),
    ):
        for path in sorted(root.glob(f"{folder}/*/2023/*.csv")):
            series = read_series([path], read_mapping(DEPLOY / f"mappings/{name}.yaml"), Known("grid"))
            c = series.counts
            assert (c.total, c.decoded, c.missing_steps) == (8760, 8760, 0)
            values = [r.value for _, rs in series for r in rs if r.value is not None]
            usual = (0.01, 0.3) if name == "grid-price" else (100, 800)  # USD/kWh, g/kWh
            assert usual[0] < sum(values) / len(values) < usual[1]


def test_twenty_thousand_mutated_rows_never_raise(tmp_path: Path) -> None:
    chance = random.Random(20)
    good = [
        "2024-11-03 0%d:%02d:%02d,a,1.5,20\n",
        '"2024-03-10 0%d:%02d:%02d","b",3,4\n',
        "000%d-%02d-%02d,b,1,1\n",
    ]
    alphabet = [
        '"',
        ",",
        "\n",
        "\r",
        "\0",
        "-",
        "9",
        "é",
        "\ufeff",
        "\x85",
        "nan",
        "1e400",
        "W",
        ":",
        "\u2028",
        "٣",
    ]
    lines = []
    for _ in range(20_000):
        line = list(chance.choice(good) % (chance.randrange(4), chance.randrange(60), chance.randrange(60)))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(line) + 1)
            line[at : at + chance.randrange(3)] = [chance.choice(alphabet)]
        lines.append("".join(line))
    entity = {"table": "node", "column": "who"}
    for zone in ("UTC", "America/New_York", "Pacific/Apia"):
        text = "t,who,p,c\n" + "".join(lines)
        series = _read(tmp_path, text, time={"column": "t", "zone": zone}, entity=entity, names=("a", "b"))
        assert min(series.counts.decoded, series.counts.bad, series.counts.bad_cells) > 100
        for t_ns, readings in series:
            assert 0 <= t_ns < 2**63
            assert all(r.value is None or math.isfinite(r.value) for r in readings)
    body = "".join(lines).encode()
    for start in range(0, len(body) - 400, 5_000):  # raw bytes, cut anywhere, are no different
        _read(tmp_path, b"t,who,p,c\n" + body[start : start + 400] + b"\xff\xfe", entity=entity, names=("a",))
