"""Host lists in the URL of a scrape: one target each, with the node that its host means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.prometheus import PrometheusSource
from tests.support.builders import site_of
from twin.catalogue import ConfigError
from twin.config import Scrape, load_config, targets_of
from twin.wiring import make_scrapes

SITE = {"site": "lab", "halls": [{"name": "h", "racks": [
    {"name": "r1", "nodes": 18, "gpus_per_node": 4}]}]}  # fmt: skip


def loaded(tmp_path: Path, *scrapes: dict[str, Any]) -> Any:
    path = tmp_path / "racktwin.yaml"
    path.write_text(yaml.safe_dump({"site": "site.yaml", "broker": "embedded", "scrapes": list(scrapes)}))
    return load_config(path)


def test_a_list_of_hosts_is_one_target_each_at_the_node_of_its_host(tmp_path: Path) -> None:
    part = {"url": "http://gpu[03-05]:9400/metrics", "map": "dcgm", "place": "lab/h/r1/node[3-5]"}
    made = make_scrapes(loaded(tmp_path, part), site_of(SITE))
    assert [s.name for s in made] == [f"exporter http://gpu0{n}:9400/metrics" for n in (3, 4, 5)]
    page = b'DCGM_FI_DEV_POWER_USAGE{gpu="1"} 700\n'
    for number, source in zip((3, 4, 5), made, strict=True):
        assert isinstance(source, PrometheusSource)
        assert source._url == f"http://gpu0{number}:9400/metrics"
        (reading,) = source.decoder.decode(page, 1)
        assert reading.entity == 4 * number + 1  # type: ignore[union-attr]


def test_an_exporter_that_two_maps_read_is_one_source_with_two_parts(tmp_path: Path) -> None:
    url = "http://someone:secret@gpu03:9100/metrics"
    made = make_scrapes(loaded(tmp_path, *({"url": url, "map": m} for m in ("dcgm", "node"))), site_of(SITE))
    shown = "exporter http://gpu03:9100/metrics"
    assert [s.name for s in made] == [f"{shown} (dcgm)", f"{shown} (node)"]
    assert {s.origins for s in made} == {(shown,)}


def test_a_host_that_is_called_like_a_node_needs_no_place(tmp_path: Path) -> None:
    servers = {"name": "srv[1-4]", "nodes": 1, "gpus_per_node": 2}
    site = site_of({"site": "lab", "halls": [{"name": "h", "racks": [servers]}]})
    made = make_scrapes(loaded(tmp_path, {"url": "http://srv[2-3]:9400/metrics", "map": "dcgm"}), site)
    readings = [s.decoder.decode(b'DCGM_FI_DEV_POWER_USAGE{gpu="1"} 700\n', 1) for s in made]  # type: ignore[attr-defined]
    assert [r.entity for (r,) in readings] == [3, 5]


@pytest.mark.parametrize(
    ("url", "place", "expected"),
    [
        ("http://a:1/m", None, [("http://a:1/m", None)]),
        ("http://a:1/m?x=[1-3]", "r1", [("http://a:1/m?x=[1-3]", "r1")]),
        ("http://[::1]:9400/metrics", None, [("http://[::1]:9400/metrics", None)]),
        ("https://n[01-02]/m", "r[7-8]", [("https://n01/m", "r7"), ("https://n02/m", "r8")]),
        ("http://n[1,3],m4:9/", None, [("http://n1/", None)]),
    ],
)
def test_only_a_list_is_expanded(url: str, place: str | None, expected: list[tuple[str, str | None]]) -> None:
    found = targets_of(Scrape(url=url, map="dcgm", place=place), "scrapes[0].url")
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("scrapes", "said"),
    [
        ([{"url": "http://n[5-1]:9400/m", "map": "dcgm"}], "$.scrapes[0].url: expected ascending ranges"),
        ([{"url": "http://n[1-3]/m", "map": "dcgm", "place": "r[1-2]"}], "3 hosts for 2 places"),
        ([{"url": "http://n[1-3]/m", "map": "dcgm"}, {"url": "http://n2/m", "map": "dcgm"}],
         "$.scrapes[1].url: $.scrapes[0] scrapes http://n2/m with map dcgm already"),
        ([{"url": "http://a:b@n2/m", "map": "dcgm"}, {"url": "http://c:d@n2/m", "map": "dcgm"}],
         "$.scrapes[1].url: $.scrapes[0] scrapes http://n2/m with map dcgm already"),
    ],
)  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(
    tmp_path: Path, scrapes: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *scrapes)
    assert any(said in problem for problem in caught.value.problems)
