"""Line protocol as InfluxDB reads it: each reading comes out once, with the tags of its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from line_protocol_parser import parse_line

from connectors.influx import heads_of
from connectors.influx.lines import escaped, head_of, lines
from twin.catalogue import NS

T_NS = 1_700_000_000 * NS + 123


def columns(table: str, gauges: dict[str, Any], counters: dict[str, Any] | None = None) -> Any:
    """A table at one instant."""
    n = len(next(iter((gauges or counters or {}).values())))
    return SimpleNamespace(
        table=table,
        gauges=tuple(gauges),
        value=np.array(list(gauges.values()), np.float32).reshape(len(gauges), n),
        counters=tuple(counters or {}),
        total=np.array(list((counters or {}).values()), np.int64).reshape(len(counters or {}), n),
    )


@pytest.mark.parametrize(
    ("table", "path", "tags"),
    [
        ("site", "lab", {"site": "lab"}),
        ("loop", "lab/l1", {"site": "lab", "loop": "l1"}),
        ("feeder", "lab/h/a", {"site": "lab", "hall": "h", "feeder": "a"}),
        ("rack", "lab/h/r1", {"site": "lab", "hall": "h", "rack": "r1"}),
        ("node", "lab/h/r1/node0", {"site": "lab", "hall": "h", "rack": "r1", "node": "node0"}),
        (
            "gpu",
            "lab/h/r1/node0/gpu3",
            {"site": "lab", "hall": "h", "rack": "r1", "node": "node0", "gpu": "gpu3"},
        ),
        (
            "link",
            "lab/h/r1/node0/eth1",
            {"site": "lab", "hall": "h", "rack": "r1", "node": "node0", "link": "eth1"},
        ),
    ],
)
def test_tags_are_the_levels_of_the_path(table: str, path: str, tags: dict[str, str]) -> None:
    got = parse_line(head_of(table, path).decode() + " x=1 1")
    assert (got["measurement"], got["tags"]) == (table, tags)


def test_readings_come_out_as_they_went_in() -> None:
    gauges = {"power_w": [880.5, np.nan, np.nan], "clock_hz": [1.965e9, 0.1, np.nan]}
    heads = heads_of("gpu", [f"lab/h/r/n/gpu{i}" for i in range(3)])
    text, count = lines(heads, columns("gpu", gauges, {"energy_mj": [2**62, -1, -1]}), 0, 3, T_NS)
    got = [parse_line(line) for line in text.decode().split("\n")]
    assert count == 2 == len(got), "who has no reading has no line"
    assert got[0]["fields"] == {"power_w": 880.5, "clock_hz": 1965000064.0, "energy_mj": 2**62} | {
        "clock_hz": pytest.approx(1.965e9)
    }
    assert got[1]["fields"] == {"clock_hz": 0.1}
    assert got[0]["time"] == T_NS
    assert got[1]["tags"]["gpu"] == "gpu1"


def test_a_run_of_entities_is_that_run() -> None:
    n = 50
    heads = heads_of("rack", [f"lab/h/r{i}" for i in range(n)])
    whole = columns("rack", {"power_w": np.arange(n)})
    text, count = lines(heads, whole, 10, 20, T_NS)
    got = [parse_line(line) for line in text.decode().split("\n")]
    assert count == 10
    assert [(g["tags"]["rack"], g["fields"]["power_w"]) for g in got] == [
        (f"r{i}", float(i)) for i in range(10, 20)
    ]
    assert lines(heads, columns("rack", {"power_w": [np.nan] * n}), 0, n, T_NS) == (b"", 0)


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "a, =b", "a\nb", "a\0b", "end ", " ", "é", "a\\"])
def test_odd_names_stay_one_tag(name: str) -> None:
    heads = heads_of("rack", [f"lab/h/{name}"])
    text, _ = lines(heads, columns("rack", {"power_w": [1.5]}), 0, 1, T_NS)
    assert text.count(b"\n") == 0
    got = parse_line(text.decode())
    assert got["fields"] == {"power_w": 1.5}
    assert set(got["tags"]) == {"site", "hall", "rack"}
    assert got["tags"]["rack"].startswith(name[0].strip("\n\0"))


def test_no_line_can_be_smuggled_in() -> None:
    assert escaped("x\nrack,site=lab power_w=1") == "xrack\\,site\\=lab\\ power_w\\=1"
