"""Labelled series become readings as a mapping says; mappings are checked whole. May import `connectors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

from connectors.series import SeriesSample, SeriesTable, Sums, packed
from connectors.series_map import EXPORTERS, load_map, mapping_of
from connectors.slurm import expand_names
from connectors.slurm.hostlist import MAX_HOSTS, expand_hosts
from tests.support.builders import site_of, two_racks
from twin.catalogue import ConfigError
from twin.site import Site
from twin.telemetry import Block, Inbox, Reading

T = 1_700_000_000 * 10**9
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def site() -> Site:
    tree = two_racks(storage=[{"name": "fs[1-2]"}])
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 4}]
    tree["halls"][0]["switches"] = [{"name": "sw[1-4]"}]
    return site_of(tree)


def table(site: Site, *rules: dict[str, Any], place: str | None = None, **more: Any) -> SeriesTable:
    return SeriesTable(mapping_of({"rules": list(rules), **more}), site, "m.yaml", place)


GPU = {"table": "gpu", "entity": ["{host}/gpu{i}", "{place}/gpu{i}"]}


def test_labels_name_the_entity_and_units_are_converted(site: Site) -> None:
    rule = {
        **GPU,
        "signals": {"p": {"signal": "power_w", "unit": "kW"}, "u": {"signal": "util_pu", "unit": "%"}},
    }
    found = table(site, rule).read(
        [
            SeriesSample("p", {"host": "r1/node0", "i": "3"}, 0.5),
            SeriesSample("u", {"host": "lab/h/r2/node0", "i": "0"}, 50, 7),
        ],
        T,
    )
    assert found == [Reading("gpu", 3, "power_w", 500.0, T), Reading("gpu", 72, "util_pu", 0.5, 7)]


def test_a_place_stands_for_what_the_labels_do_not_say(site: Site) -> None:
    t = table(site, {**GPU, "signals": {"p": "power_w"}}, place="lab/h/r1/node1")
    assert t.read([SeriesSample("p", {"host": "stranger", "i": "0"}, 1.0)], T)[0].entity == 4
    assert t.read([SeriesSample("p", {"i": "1"}, 1.0)], T)[0].entity == 5
    assert t.read([SeriesSample("p", {"i": "4"}, 1.0)], T) == []
    assert t.strangers.take() == [("no gpu 'lab/h/r1/node1/gpu4' in the site file", 1)]


def test_names_that_the_site_does_not_have_are_told_once_a_report(site: Site) -> None:
    t = table(site, {**GPU, "signals": {"p": "power_w", "c": "temp_c"}})
    samples = [SeriesSample(s, {"host": "node99", "i": str(i)}, 1.0) for s in "pc" for i in range(2)]
    for _ in range(3):
        t.read([*samples, SeriesSample("p", {"host": "lab/h/r1/node1", "i": "0"}, 1.0)], T)
    assert t.strangers.take() == [(f"no gpu 'node99/gpu{i}' in the site file", 3) for i in range(2)]
    t.read([SeriesSample("p", {"gpu": "0", "UUID": "GPU-1"}, 1.0)], T)
    ((why, _),) = t.strangers.take()
    assert why == (
        "no label names the gpu: expected those of {host}/gpu{i} or {place}/gpu{i}, got gpu='0', UUID='GPU-1'"
    )


def test_parts_of_a_known_node_that_the_site_does_not_list_are_routine(site: Site) -> None:
    rule = {"table": "link", "entity": ["{host}/rail{n}"], "signals": {"r": "rx_bytes_per_s"}}
    t = table(site, rule)
    t.read([SeriesSample("r", {"host": "lab/h/r1/node0", "n": "77"}, 1.0)], T)
    assert not t.strangers.kinds
    t.read([SeriesSample("r", {"host": "node99", "n": "0"}, 1.0)], T)
    assert t.strangers.take() == [("no link 'node99/rail0' in the site file", 1)]


def test_hosts_by_other_names(site: Site) -> None:
    t = table(site, {**GPU, "signals": {"p": "power_w"}}, names={"gpu[001-018]": "lab/h/r2/node[0-17]"})
    assert t.read([SeriesSample("p", {"host": "gpu003", "i": "1"}, 1.0)], T)[0].entity == 72 + 8 + 1
    assert t.read([SeriesSample("p", {"host": "gpu003.hpc.example", "i": "1"}, 1.0)], T)[0].entity == 81
    assert t.read([SeriesSample("p", {"host": "gpu019", "i": "1"}, 1.0)], T) == []


def test_patterns_choose_and_name(site: Site) -> None:
    t = table(
        site,
        {
            "table": "link",
            "entity": ["{host}/rail{n}"],
            "where": {"device": r"mlx5_(?P<n>\d+)", "port": "1"},
            "signals": {"rx": "rx_bytes"},
        },
        place=None,
    )
    at = {"host": "r1/node0", "port": "1"}
    assert t.read([SeriesSample("rx", {**at, "device": "mlx5_2"}, 5)], T) == [
        Reading("link", 2, "rx_bytes", 5, T)
    ]
    for labels in (
        {**at, "device": "mlx5_2x"},
        {**at, "device": "mlx5_2", "port": "11"},
        at,
        {**at, "device": "mlx5_" + "1" * 500},
    ):
        assert t.read([SeriesSample("rx", labels, 5)], T) == []


def test_numbers_are_counted_otherwise(site: Site) -> None:
    rule = {
        "table": "gpu",
        "entity": ["{place}/gpu{core}"],
        "numbers": {"core": {"subtract": 1, "divide": 8}},
        "signals": {"u": "util_pu"},
    }
    t = table(site, rule, place="r1/node0")
    cores = [SeriesSample("u", {"core": str(c)}, 0.5) for c in (0, 1, 8, 9, 32, 33)]
    assert [r.entity for r in t.read(cores, T)] == [0, 0, 1, 3]
    assert (
        t.read([SeriesSample("u", {"core": "x"}, 0.5), SeriesSample("u", {"core": "9" * 40}, 0.5)], T) == []
    )


def test_no_reading_is_said_and_nonsense_is_told(site: Site) -> None:
    rule = {
        **GPU,
        "signals": {
            "p": {"signal": "power_w", "blank": [0]},
            "e": "energy_mj",
            "s": {"signal": "health_state", "states": {"1": 0, "0": 1, "off": None}},
        },
    }
    t = table(site, rule, blank=[2147483632])
    at = {"host": "r1/node0", "i": "0"}

    def value(name: str, raw: Any) -> Any:
        (found,) = t.read([SeriesSample(name, at, raw)], T)
        return found.value

    for nothing in (None, float("nan"), 0, 2147483632, 2147483632.0):
        assert value("p", nothing) is None
    assert not t.faults.take()
    for vast in (float("inf"), 10**400):
        assert value("p", vast) == float("inf")  # the Inbox calls it out of range
    assert value("p", True) == 1.0
    assert [value("s", v) for v in (1, 0.0, "1", "off")] == [0, 1, 0, None]
    assert [value("e", v) for v in (7, 7.0, 2**63 - 1)] == [7, 7, 2**63 - 1]
    assert not t.faults.take()
    for name, bad in (("p", "hot"), ("s", 2), ("s", None), ("e", -1), ("e", 2**63), ("e", 10**400)):
        assert value(name, bad) is None
    assert sum(n for _, n in t.faults.take()) == 6


def test_shares_need_all_their_parts(site: Site) -> None:
    rules = (
        {**GPU, "ratios": [{"signal": "mem_used_pu", "part": "used", "of": ["used", "free"]}]},
        {
            "table": "storage",
            "entity": ["{fs}"],
            "ratios": [{"signal": "used_pu", "part": "avail", "of": ["size"], "complement": True}],
        },
    )
    t = table(site, *rules)
    g0, g1 = ({"host": "r1/node0", "i": i} for i in "01")
    found = t.read(
        [
            SeriesSample("used", g0, 30),
            SeriesSample("used", g1, 1),
            SeriesSample("free", g0, 10),
            SeriesSample("avail", {"fs": "fs2"}, 25.0),
            SeriesSample("size", {"fs": "fs2"}, 100.0),
        ],
        T,
    )
    assert found == [Reading("gpu", 0, "mem_used_pu", 0.75, T), Reading("storage", 1, "used_pu", 0.75, T)]
    for size in (0, float("nan"), float("inf"), "x"):
        assert (
            t.read([SeriesSample("avail", {"fs": "fs2"}, 25.0), SeriesSample("size", {"fs": "fs2"}, size)], T)
            == []
        )


def test_parts_of_a_counter_add_up_by_their_growth(site: Site) -> None:
    rule = {
        "table": "storage",
        "entity": ["{fs}"],
        "signals": {"w": {"signal": "written_bytes", "add": True}},
    }
    sums = Sums()
    one, other = (SeriesTable(mapping_of({"rules": [rule]}), site, sums=sums) for _ in range(2))

    def total(t: SeriesTable, **targets: int) -> Any:
        (found,) = t.read([SeriesSample("w", {"fs": "fs1", "target": k}, v) for k, v in targets.items()], T)
        return found.value

    assert total(one, a=1000, b=500) == 0
    assert total(one, a=1010, b=505) == 15
    assert total(other, c=10**9) == 15  # a part that appears brings no growth
    assert total(other, c=10**9 + 1) == 16
    assert total(one, a=1020) == 26  # one that is silent takes none away
    assert total(one, a=3, b=510) == 31  # one that begins anew has grown by what is not known


def test_series_lend_labels_to_others_of_their_report(site: Site) -> None:
    joins = [{"series": "a", "by": "d", "take": ["s"]}, {"series": "b", "by": "s", "take": ["fs", "d"]}]
    rule = {"table": "storage", "entity": ["{fs}"], "signals": {"w": "written_bytes"}}
    t = table(site, rule, joins=joins)
    known = [SeriesSample("a", {"d": "x", "s": "1"}, 1), SeriesSample("b", {"s": "1", "fs": "fs2"}, 1)]
    wanted = [SeriesSample("w", {"d": "x"}, 5), SeriesSample("w", {"d": "y"}, 7)]
    assert t.read([*wanted, *known], T) == [Reading("storage", 1, "written_bytes", 5, T)]
    assert t.read([*wanted, known[0]], T) == []  # of another report nothing is lent
    own = SeriesSample("w", {"d": "x", "fs": "fs1"}, 9)
    assert t.read([own, *known], T) == [Reading("storage", 0, "written_bytes", 9, T)]


def test_what_reports_alike_becomes_a_block_that_the_inbox_reads_the_same(site: Site) -> None:
    readings = [Reading("gpu", e, s, float(e), T) for e in (4, 5, 6, 9) for s in ("power_w", "temp_c")]
    readings += [Reading("gpu", e, "energy_mj", 10 * e if e != 5 else None, T) for e in (4, 5, 6, 9)]
    readings += [Reading("gpu", 4, "temp_c", 90.0, T), Reading("gpu", 4, "util_pu", 0.5, T, trusted=False)]
    out = packed(readings)
    blocks = [b for b in out if isinstance(b, Block)]
    assert [(b.start, b.signals, b.counters) for b in blocks] == [(4, ("power_w", "temp_c"), ("energy_mj",))]
    assert np.array_equal(blocks[0].counts, [[40, -1, 60]])
    a, b = Inbox(site.sizes), Inbox(site.sizes)
    for inbox, items in ((a, readings), (b, out)):
        for item in items:
            (inbox.put_block if isinstance(item, Block) else inbox.put)(item, T)  # type: ignore[arg-type]
    fa, fb = a.take(0, T, 1.0), b.take(0, T, 1.0)

    def cells(frame: Any) -> dict[Any, int]:
        return {
            (u.table, int(row), int(e)): int(u.q[k, j])
            for u in frame.updates
            for k, row in enumerate(u.rows)
            for j, e in enumerate(range(u.q.shape[1]) if u.entity is None else u.entity)
        }

    assert cells(fa) == cells(fb)
    assert cells(fa)


def test_an_overflow_is_out_of_range_not_a_crash(site: Site) -> None:
    block = packed([Reading("gpu", e, "power_w", 1e300, T) for e in range(20)])[0]
    assert isinstance(block, Block)
    assert np.isfinite(block.values).all()


@pytest.mark.parametrize("path", sorted(EXPORTERS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_packaged_mappings_hold(path: Path, site: Site) -> None:
    mapping, file = load_map(path.stem)
    assert SeriesTable(mapping, site, file).wanted


@pytest.mark.parametrize(
    "tree, expected",
    [
        ({"rules": [{"table": "gpus", "entity": ["x"]}]}, "$.rules[0].table: expected one of site, hall"),
        ({"rules": [{"table": "gpu", "entity": []}]}, "$.rules[0].entity: expected at least one template"),
        ({"rules": [{**GPU, "signals": {"p": "powr_w"}}]}, "gpu has no signal 'powr_w'"),
        (
            {"rules": [{**GPU, "signals": {"p": {"signal": "power_w", "unit": "C"}}}]},
            "cannot turn 'C' into 'W'",
        ),
        (
            {"rules": [{**GPU, "signals": {"p": {"signal": "power_w", "add": True, "most": True}}}]},
            "expected one of `add` and `most`",
        ),
        ({"rules": [{**GPU, "signals": {"p": {"signal": "energy_mj", "rate": True}}}]}, "expected a gauge"),
        ({"rules": [{**GPU, "where": {"a": "("}}]}, "$.rules[0].where.a"),
        ({"rules": [{**GPU, "numbers": {"i": {"divide": 0}}}]}, "expected a whole number >= 1"),
        (
            {"rules": [{**GPU, "ratios": [{"signal": "power_w", "part": "a", "of": ["b"]}]}]},
            "expected a signal in",
        ),
        ({"rules": [], "names": {"a[1-2]": "b"}}, "2 names for 1 entities"),
        ({"rules": [], "names": {"a[1-": "b"}}, "$.names.a[1-: expected"),
        ({"rules": [{**GPU, "entities": []}]}, "$.rules[0].entities: unknown key"),
    ],
)
def test_a_wrong_mapping_is_refused(site: Site, tree: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SeriesTable(mapping_of(tree, "m.yaml"), site, "m.yaml")
    assert any(expected in p and p.startswith("m.yaml: ") for p in caught.value.problems), (
        caught.value.problems
    )


def test_a_file_extends_a_packaged_mapping(tmp_path: Path) -> None:
    mapping, _ = load_map(str(DEPLOY / "mappings" / "telegraf-lab.yaml"))
    assert mapping.rules == load_map("telegraf")[0].rules
    lab = site_of(yaml.safe_load((DEPLOY / "sites" / "lab.yaml").read_text(encoding="utf-8")))
    names = expand_names(mapping.names, "$")
    assert [lab.entity("node", n) for n in names.values()] == list(range(18))
    (tmp_path / "bad.yaml").write_text("extends: nothing\n")
    with pytest.raises(ConfigError, match="no packaged mapping"):
        load_map("bad.yaml", tmp_path)
    for name in ("no-such", "../dcgm", "/etc/passwd/x"):
        with pytest.raises(ConfigError, match="expected a file, or one of ascend, dcgm"):
            load_map(name, tmp_path)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("", []),
        ("a", ["a"]),
        ("a1,b[2-3]", ["a1", "b2", "b3"]),
        ("g[001-003,7]x", ["g001x", "g002x", "g003x", "g7x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("[1-2]", ["1", "2"]),
        ("lab/h/r1/node[0-1]", ["lab/h/r1/node0", "lab/h/r1/node1"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "a[",
        "a[]",
        "a[3-1]",
        "a]",
        "a,",
        ",a",
        "a,,b",
        "a[1-2",
        "a[x-y]",
        "a[1--2]",
        f"a[1-{MAX_HOSTS + 1}]",
        "a[0-999][0-999]",
        "a[1-9999999999]",
        ",".join(["a[1-200000]"] * 2),
    ],
)
def test_a_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        expand_hosts(text)


def test_a_name_for_two_entities_is_refused() -> None:
    with pytest.raises(ConfigError, match="a2 is named twice"):
        expand_names({"a[1-2]": "x[1-2]", "a2": "y"}, "f: $.names")


@hypothesis.given(st.text("a1[]-,0/", max_size=30))
def test_any_text_is_a_host_list_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert all(hosts)
    assert expand_hosts(",".join(hosts)) == hosts


def test_a_series_whose_labels_are_lent_late_has_not_grown_by_all_that_it_ever_counted(site: Site) -> None:
    joins = [{"series": "info", "by": "d", "take": ["fs", "t"]}]
    rule = {"table": "storage", "entity": ["{fs}"], "where": {"t": "tcp|rdma"},
            "signals": {"w": {"signal": "flush_bytes_per_s", "rate": True}}}  # fmt: skip
    t = table(site, rule, joins=joins)

    def rate(report: int, bytes_: float, **info: str) -> Any:
        page = [SeriesSample("w", {"d": "x"}, bytes_), SeriesSample("o", {}, 0)]
        page += [SeriesSample("info", {"d": "x", "fs": "fs1", **info}, 1)] if info else []
        found = t.read(page, T + report * 10 * 10**9)
        return found[0].value if found else None

    assert rate(0, 1e12) is None  # the other series is not told yet
    assert rate(1, 1e12, t="tcp") is None
    assert rate(2, 1e12 + 1e9, t="tcp") == pytest.approx(1e8)
    assert rate(3, 1e12 + 2e9) is None
    assert rate(4, 1e12 + 3e9, t="tcp") == pytest.approx(1e8)
    assert rate(5, 1e12 + 4e9, t="rdma") is None  # of another path now
    assert rate(6, 1e12 + 5e9, t="rdma") == pytest.approx(1e8)


def test_a_series_without_the_label_lends_to_none_that_lack_it_too(site: Site) -> None:
    rule = {"table": "storage", "entity": ["{fs}"], "signals": {"w": "written_bytes"}}
    t = table(site, rule, joins=[{"series": "a", "by": "d", "take": ["fs"]}])
    assert t.read([SeriesSample("a", {"d": "", "fs": "fs1"}, 1), SeriesSample("w", {}, 5)], T) == []
