"""A faulty site file is refused whole: file, key, value and expectation of every fault. May import `twin`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from tests.support.builders import site_of, spec_of, two_racks
from twin.catalogue import ConfigError
from twin.site import SiteFile, build_site, convert, expand, salvage, short
from twin.site.file import MAX_PATTERN

SITES = Path(__file__).resolve().parents[2] / "deploy" / "sites"


def problems_of(tree: Any) -> list[str]:
    """Return the problems of a tree; every line names the file and a path."""
    with pytest.raises(ConfigError) as caught:
        site_of(tree)
    found = caught.value.problems
    assert len(found) == len(set(found))
    assert all(p.startswith("test.yaml: $") for p in found), found
    return [p.removeprefix("test.yaml: ") for p in found]


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """The two racks' site with one key set."""
    tree = copy.deepcopy(two_racks())
    at: Any = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return tree


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("r1", ["r1"]),
        ("r[1-3]", ["r1", "r2", "r3"]),
        ("r[009-011]", ["r009", "r010", "r011"]),
        ("a[1-2]b", ["a1b", "a2b"]),
        ("[08-10]", ["08", "09", "10"]),
        ("r[7-7]", ["r7"]),
    ],
)
def test_a_name_stands_for_these(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


FORMS = ["", "a b", "r[3-1]", "r[1-2][3-4]", "r[1-]", "r[a-b]", "r1/2", "r[1-99999999]", "r[-1-2]", "ä"]
HOSTILE = ["r1\n", "r[1-2]\n", "r[١-٩]", "r[1-200001]", "r" * (MAX_PATTERN + 1), f"r[1-{'9' * 5000}]"]


@pytest.mark.parametrize("pattern", FORMS + HOSTILE, ids=short)
def test_a_name_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        expand(pattern)


RACK, FEED = ["halls", 0, "racks", 0], ["halls", 0, "feeders", 0]


@pytest.mark.parametrize(
    "path, value, expected",
    [
        (["sitte"], 1, "$.sitte: unknown key; expected one of controls, coolant"),
        (["site"], "lab[1-2]", "$.site: expected one name without a range, got 'lab[1-2]'"),
        (["site"], "my lab", "$.site: expected a name or a name with one range"),
        (["schema"], 2, "$.schema: expected 1, got 2"),
        (["coolant"], "oil", "$.coolant: expected one of pg25, water, got 'oil'"),
        (["max_jobs"], 0, "$.max_jobs: expected 1 to 1000000, got 0"),
        (["max_jobs"], -5, "$.max_jobs: expected 1 to 1000000, got -5"),
        (["halls"], {"name": "h"}, "$.halls: expected a list, got {'name': 'h'}"),
        (["periods_s"], {"gpu.nonsense_w": 5.0}, "$.periods_s.gpu.nonsense_w: expected a table or a signal"),
        (["periods_s"], {"gpu": float("inf")}, "$.periods_s.gpu: expected seconds > 0, got inf"),
        (["periods_s"], {"gpu": float("nan")}, "$.periods_s.gpu: expected seconds > 0, got nan"),
        (
            ["false_alarms_per_rack_hour"],
            0,
            "$.false_alarms_per_rack_hour: expected a number > 0 and <= 1, such as 0.0005 for 1 in 2,000",
        ),
        (["false_alarms_per_rack_hour"], 2000.0, "$.false_alarms_per_rack_hour: expected a number > 0 and"),
        (["false_alarms_per_rack_hour"], float("nan"), "$.false_alarms_per_rack_hour: expected a number > 0"),
        (["history_s"], {"gpu.energy_mj": 60.0}, "$.history_s.gpu.energy_mj: expected a gauge or state"),
        (
            ["history_s"],
            {"gpu.temp_c": 1e9},
            "$.history_s.gpu.temp_c: expected seconds up to a week, got 1000000000",
        ),
        (["models"], {"p": {"signals": ["gpu.x"]}}, "$.models.p.signals: 'gpu.x' is not a gauge"),
        (["models"], {"p": {"horizons_s": [0.0]}}, "$.models.p.horizons_s: expected seconds up to a week"),
        (
            ["policies"],
            {"operator": {"authority": "yes"}},
            "$.policies.operator.authority: expected one of off, advise, approve, act, got",
        ),
        (["controls"], {"gpu.cap": {}}, "$.controls.gpu.cap: not a control of the catalogue"),
        (
            ["controls"],
            {"gpu.power_cap_w": {"max": 1300.0}},
            "$.controls.gpu.power_cap_w.max: 1300.0 is above the 1200",
        ),
        (
            ["controls"],
            {"gpu.power_cap_w": {"min": 100.0}},
            "$.controls.gpu.power_cap_w.min: 100.0 is below the 200",
        ),
        (
            ["controls"],
            {"gpu.power_cap_w": {"min": float("nan")}},
            "$.controls.gpu.power_cap_w.min: expected a finite",
        ),
        (
            ["controls"],
            {"gpu.power_cap_w": {"safe": 100.0}},
            "$.controls.gpu.power_cap_w.safe: expected a value within",
        ),
        (
            ["controls"],
            {"gpu.power_cap_w": {"min": 900.0, "max": 800.0}},
            "$.controls.gpu.power_cap_w: min is above max",
        ),
        (
            ["controls"],
            {"gpu.power_cap_w": {"slew_per_s": 51.0}},
            "slew_per_s: expected a number > 0, at most 50, got 51",
        ),
        (["controls"], {"gpu.power_cap_w": {"slew_per_s": 0.0}}, "slew_per_s: expected a number > 0"),
        (["controls"], {"gpu.power_cap_w": {"deadband": -1.0}}, "deadband: expected a number >= 0, got -1.0"),
        (
            ["controls"],
            {"node.service_level": {"blast_radius": 0}},
            "blast_radius: expected at least 1, got 0",
        ),
        (
            [*RACK, "profile"],
            "gb300",
            "$.halls[0].racks[0].profile: no profile named 'gb300'; expected one of",
        ),
        (
            [*RACK, "profile"],
            "cloudmatrix384",
            "$.halls[0].racks[0].name: cloudmatrix384 spans 16 racks; expected a mul",
        ),
        ([*RACK, "nodes"], -1, "$.halls[0].racks[0].nodes: expected 0 to 10000, got -1"),
        (
            [*RACK, "gpus_per_node"],
            10_001,
            "$.halls[0].racks[0].gpus_per_node: expected 0 to 10000, got 10001",
        ),
        ([*RACK, "priority"], 2**40, "$.halls[0].racks[0].priority: expected a number of 32 bits"),
        ([*RACK, "name"], "r[2-1]", "$.halls[0].racks[0].name: expected an ascending range"),
        (
            [*RACK, "name"],
            "r[1-250000]",
            "$.halls[0].racks[0].name: expected an ascending range of at most 200000",
        ),
        ([*FEED, "serves"], ["r[1-3]"], "$.halls[0].feeders[0].serves: 'r3' is neither a feeder nor a rack"),
        ([*FEED, "side"], "C", "$.halls[0].feeders[0].side: expected one of A, B, none, got 'C'"),
        ([*FEED, "budget_w"], 0.0, "$.halls[0].feeders[0].budget_w: expected a number > 0, got 0.0"),
        ([*FEED, "budget_w"], float("nan"), "$.halls[0].feeders[0].budget_w: expected a number > 0, got nan"),
        ([*FEED, "budget_w"], float("inf"), "$.halls[0].feeders[0].budget_w: expected a number > 0, got inf"),
        ([*FEED, "external"], True, "$.halls[0].feeders[0].guaranteed_w: missing; an external budget needs"),
        (
            [*FEED, "guaranteed_w"],
            4e5,
            "$.halls[0].feeders[0].guaranteed_w: expected at most budget_w, got 400000",
        ),
        (
            ["halls", 0, "cdus", 0, "serves"],
            ["r9"],
            "$.halls[0].cdus[0].serves: 'lab/h/r9' is not a rack of this hall",
        ),
        (["halls", 0, "cdus", 0, "loop"], "fws", "$.halls[0].cdus[0].loop: 'fws' is not a loop of this file"),
        (["loops"], [{"name": "w", "approach_k": 0.1}], "$.loops[0].approach_k: expected 1 to 30 K, got 0.1"),
        (["loops"], [{"name": "w", "fans_w": 0.0}], "$.loops[0].fans_w: expected a number > 0, got 0.0"),
        (
            ["halls", 0, "planes"],
            [{"name": "p", "links_per_node": 0}],
            "planes[0].links_per_node: expected 1 to 10000",
        ),
        (
            ["halls", 0, "planes"],
            [{"name": "p", "links_per_node": 1, "racks": ["x"]}],
            "'lab/h/x' is not a rack of this hall",
        ),
        (
            ["halls", 0, "planes"],
            [{"name": "p", "links_per_node": 1}, {"name": "p1", "links_per_node": 1}],
            "$.halls.planes: links of p1 would be named like those of another plane",
        ),
        (
            ["halls", 0, "planes"],
            [{"name": "p[1-2]", "links_per_node": 1}],
            "planes[0].name: expected one name, got",
        ),
        (["halls", 0, "name"], "h[1-2]", "$.halls[0]"),
    ],
)
def test_one_fault_is_named(path: list[Any], value: Any, expected: str) -> None:
    if expected == "$.halls[0]":  # two halls alike are fine: names are looked for in their own hall first
        assert site_of(changed(path, value)).sizes["rack"] == 4
        return
    found = problems_of(changed(path, value))
    assert any(expected in p for p in found), found
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "feeders, expected",
    [
        ([("x", ["y"]), ("y", ["x"])], "is part of a loop; expected a tree"),
        ([("x", ["x"])], "is part of a loop; expected a tree"),
        ([("x", ["y"]), ("y", ["z"]), ("z", ["x"])], "is part of a loop; expected a tree"),
        ([("x", ["z"]), ("y", ["z"]), ("z", ["r1"])], "'z' is already served by lab/h/x"),
        ([("r1", ["r2"]), ("x", ["r1"])], "'r1' names both a feeder and a rack"),
        ([("x", ["r1"]), ("x", ["r2"])], "the feeder lab/h/x is described twice"),
    ],
)
def test_the_power_tree_is_a_tree(feeders: list[tuple[str, list[str]]], expected: str) -> None:
    tree = changed(["halls", 0, "feeders"], [{"name": n, "serves": s} for n, s in feeders])
    assert any(expected in p for p in problems_of(tree))


def test_what_is_described_twice_is_refused() -> None:
    tree = two_racks()
    hall = tree["halls"][0]
    hall["racks"].append({"name": "r2"})
    hall["cdus"].append({"name": "cdu1"})
    tree["loops"] = [{"name": "w"}, {"name": "w"}]
    found = problems_of(tree)
    for name in ("rack lab/h/r2", "cdu lab/h/cdu1", "loop lab/w"):
        assert f"$: the {name} is described twice; expected unique names" in found
    tree["halls"].append({"name": "h"})
    assert "$: the hall lab/h is described twice; expected unique names" in problems_of(tree)


def test_a_rack_that_two_cdus_serve_is_refused() -> None:
    tree = two_racks()
    tree["halls"][0]["cdus"].append({"name": "cdu2", "serves": ["r1"]})
    assert problems_of(tree) == ["$.halls[0].cdus[1].serves: 'lab/h/r1' is already served by lab/h/cdu1"]


def test_all_faults_of_form_and_of_meaning_come_at_once() -> None:
    text = """
site: lab
colour: blue                                        # 1 unknown key
max_jobs: many                                      # 2 not a number
halls:
  - name: h
    racks: [{name: "r[1-2]", profile: nvl73}]       # 3 no such profile
    cdus: [{name: cdu1, serves: ["r[1-3]"]}]        # 4 no such rack
    feeders:
      - {name: a, budget_w: 12e6, serves: [r1, b]}  # 5 YAML reads text
      - {name: b, budget_w: -1, serves: [a]}        # 6 a negative budget, 7 a loop
controls: {gpu.power_cap_w: {deadband: -1.0}}       # 8 negative
history_s: {on: 5}                                  # 9 a key that is a truth value
"""
    found = problems_of(yaml.safe_load(text))
    expected = [
        "$.colour: unknown key",
        "$.max_jobs: expected a whole number, got 'many'",
        "no profile named 'nvl73'",
        "cdus[0].serves: 'lab/h/r3' is not a rack",
        "feeders[0].budget_w: expected a number, got '12e6'",
        "feeders[1].budget_w: expected a number > 0",
        "is part of a loop",
        "deadband: expected a number >= 0",
        "$.history_s: the key True is read as bool",
    ]
    missing = [e for e in expected if not any(e in p for p in found)]
    assert not missing, found
    assert len(found) == len(expected), found


def test_a_name_that_cannot_be_read_makes_no_false_complaints() -> None:
    for bad in ({"nmae": "r1"}, {"name": 5}, {"name": "r["}, "r1", {"name": "r1", "nodes": -1}):
        tree = changed(["halls", 0, "racks"], [bad])
        assert not any("neither" in p or "not a rack" in p for p in problems_of(tree))
    tree = changed(["halls", 0, "racks"], 7)
    assert problems_of(tree) == ["$.halls[0].racks: expected a list, got 7"]


def test_faulty_items_keep_the_places_of_the_others() -> None:
    tree = changed(["halls", 0, "racks"], ["r1", {"name": "r2", "nodes": -1}])
    assert [p.split(":")[0] for p in problems_of(tree)] == [
        "$.halls[0].racks[0]",
        "$.halls[0].racks[1].nodes",
    ]


@pytest.mark.parametrize(
    "text, hint",
    [
        ("12e6", "; YAML reads this as text, write 12000000.0 or 1.200000e+07"),
        ("1_0e3.", ""),
        ("lots", ""),
        ("'5'", "; YAML reads this as text: write 5"),
    ],
)
def test_yaml_1_1_reads_some_numbers_as_text(text: str, hint: str) -> None:
    value = yaml.safe_load(text)
    (found,) = problems_of(changed([*FEED, "budget_w"], value))
    assert found == f"$.halls[0].feeders[0].budget_w: expected a number, got {value!r}{hint}"
    if hint:
        for written in hint.split("write ")[1].split(" or "):
            assert yaml.safe_load(written) == float(value)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("on", "bool"),
        ("no", "bool"),
        ("0123", "int"),
        ("1:20", "int"),
        ("1.5", "float"),
        ("2024-01-02", "date"),
    ],
)
def test_yaml_1_1_reads_some_names_as_something_else(text: str, kind: str) -> None:
    value = yaml.safe_load(text)
    (found,) = problems_of(changed(["halls", 0, "cdus", 0, "name"], value))
    assert (
        found
        == f"$.halls[0].cdus[0].name: expected text, got {value!r}; YAML reads this as {kind}, so quote it"
    )


@pytest.mark.parametrize("tree", [None, 5, [], "site: lab"])
def test_a_tree_that_is_no_mapping_is_refused(tree: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(SiteFile, tree, "s.yaml")
    assert caught.value.problems == [f"s.yaml: $: expected a mapping, got {tree!r}"]


def test_the_faults_of_a_profile_come_with_those_of_the_site() -> None:
    spec = spec_of(two_racks())
    spec.profiles["gb200-nvl72"]["layout"]["nodes"]["value"] = -1
    spec.file["schema"] = 7
    with pytest.raises(ConfigError) as caught:
        build_site(spec, "s.yaml")
    found = str(caught.value)
    assert "s.yaml: $.schema: expected 1, got 7" in found
    assert "profile gb200-nvl72: $.layout.nodes.value" in found


def test_salvage_keeps_what_is_sound() -> None:
    raw = {
        "site": "lab",
        "max_jobs": "x",
        "halls": [{"name": "h", "racks": [{"name": "r1", "priority": 3}, {"name": 1}]}],
    }
    file, faults = salvage(SiteFile, raw)
    assert file is not None
    assert [r.priority for r in file.halls[0].racks] == [3, 0]
    assert file.halls[0].racks[0].name == "r1"
    assert len(faults.problems) == 2
    assert faults.names_lost


def test_a_sound_file_is_taken_as_it_is() -> None:
    tree = two_racks(max_jobs=7)
    assert msgspec.to_builtins(convert(SiteFile, tree, "f"))["max_jobs"] == 7


def test_too_many_of_anything_is_refused_before_memory_is_asked_for() -> None:
    racks = [{"name": "r[1-1000]", "nodes": 10_000}]
    (found,) = problems_of({"site": "s", "halls": [{"name": "h", "racks": racks}]})
    assert found == "$.halls[0].racks[0]: more than 4000000 nodes with these; expected fewer for one daemon"
    racks = [{"name": "r[1-10]", "nodes": 1000, "gpus_per_node": 1000}]
    (found,) = problems_of({"site": "s", "halls": [{"name": "h", "racks": racks}]})
    assert found == "$.halls: 10000000 GPUs; expected at most 4000000 for one daemon"
    planes = [{"name": "p", "links_per_node": 10_000}]
    hall = {"name": "h", "racks": [{"name": "r[1-100]", "nodes": 100}], "planes": planes}
    assert "100000000 links" in problems_of({"site": "s", "halls": [hall]})[0]


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_sites_build(path: Path) -> None:
    assert site_of(yaml.safe_load(path.read_text(encoding="utf-8"))).sizes["site"] == 1


def test_twenty_lines_make_a_hundred_thousand_gpus() -> None:
    text = (SITES / "atlas-100k.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 20
    site = site_of(yaml.safe_load(text))
    assert 98_000 < site.sizes["gpu"] < 102_000
    assert site.sizes["hall"] == 4
    assert (site.cdu_of_rack >= 0).all()
    assert (site.loop_of_cdu >= 0).all()
    assert site.spare_rack.sum() == 20
    per_rack = np.diff(site.feeders_of_rack.start)
    assert (per_rack == 2).all()
    sides = site.side_of_feeder[site.feeders_of_rack.member].reshape(-1, 2)
    assert (np.sort(sides, axis=1) == [1, 2]).all()
    roots = np.flatnonzero(site.parent_of_feeder < 0)
    assert len(roots) == 8
    assert all(len(site.racks_below(int(r))) == 349 for r in roots)
    assert site.external_budget[roots].all()
