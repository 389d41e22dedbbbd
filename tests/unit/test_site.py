"""Built sites of small, known topologies. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes, site_of, two_racks
from twin.catalogue import TABLES, ConfigError
from twin.contracts import Columns
from twin.control import Setpoints
from twin.engine.remap import slots_kept
from twin.site import Site, SiteFile, SiteSpec, salvage, short, site as site_module
from twin.site.file import MAX_PROBLEMS
from twin.site.site import Relation
from twin.telemetry import SiteChanged


def matrix() -> dict[str, Any]:
    return {
        "site": "cm",
        "halls": [{"name": "h", "racks": [{"name": "r[01-32]", "profile": "cloudmatrix384"}]}],
    }


def test_two_racks_of_nvl72() -> None:
    site = site_of(two_racks())
    expected = {
        "hall": 1,
        "supernode": 2,
        "rack": 2,
        "node": 36,
        "gpu": 144,
        "cdu": 1,
        "feeder": 2,
        "job": 1024,
    }
    assert {k: site.sizes[k] for k in expected} == expected
    assert site.name("gpu", 143) == "lab/h/r2/node17/gpu3"
    assert site.entity("gpu", "r2/node17/gpu3") == 143
    assert site.gpus_of_rack(1) == slice(72, 144)
    assert [site.feeders_of_rack.of_row(r).tolist() for r in (0, 1)] == [[0, 1], [0, 1]]
    assert site.side_of_feeder.tolist() == [1, 2]


def test_a_supernode_of_sixteen_racks_has_its_nodes_in_twelve() -> None:
    site = site_of(matrix())
    nodes = np.diff(site.node_start_of_rack)
    assert nodes.tolist() == ([4] * 12 + [0] * 4) * 2
    assert site.sizes["gpu"] == 768
    assert site.sizes["supernode"] == 2
    assert [site.name("supernode", i) for i in (0, 1)] == ["cm/h/r01+15", "cm/h/r17+15"]
    assert np.bincount(site.supernode_of_node).tolist() == [48, 48]


def test_limits_of_compute_racks_are_not_those_of_switch_racks() -> None:
    site = site_of(matrix())
    compute = np.diff(site.node_start_of_rack) > 0
    for key in ("rack.power_w", "rack.flow_lpm", "rack.supply_temp_c", "rack.return_temp_c"):
        limit = site.limits[key]
        assert np.isfinite(limit.max[compute]).all(), key
        assert np.isnan(limit.max[~compute]).all(), key
        assert np.isnan(limit.guard[~compute]).all(), key
    assert np.isfinite(site.limits["gpu.temp_c"].max).all()


def test_the_least_flow_of_a_rack_goes_with_its_nodes() -> None:
    tree = two_racks(racks="r1")
    whole = site_of(tree)
    tree["halls"][0]["racks"][0]["nodes"] = 2
    part = site_of(tree)
    for level in ("guard", "max"):
        flow = [getattr(s.limits["rack.flow_lpm"], level)[0] for s in (whole, part)]
        assert flow[1] == pytest.approx(flow[0] * 2 / 18)
    assert part.limits["rack.supply_temp_c"].max[0] == whole.limits["rack.supply_temp_c"].max[0]


def test_nodes_of_a_group_are_for_the_racks_that_compute() -> None:
    tree = matrix()
    tree["halls"][0]["racks"][0]["nodes"] = 2
    assert np.diff(site_of(tree).node_start_of_rack).tolist() == ([2] * 12 + [0] * 4) * 2


@pytest.mark.parametrize(
    "table, name",
    [
        ("gpu", "r1/node0/gpu²"),
        ("gpu", "r1/node٣/gpu0"),
        ("node", "r1/node"),
        ("node", "r1/node18"),
        ("node", "r1/node-1"),
        ("node", "r1/node0000000000000"),
        ("node", "r1/node1e0"),
        ("node", "node0"),
        ("gpu", "gpu0"),
        ("gpu", ""),
        ("rack", "r3"),
        ("rack", ""),
        ("link", "r1/node0/nvlink"),
        ("link", "r1/node0/rail4"),
        ("job", "lab/job1024"),
        ("job", "job0"),
        ("job", "lab/job"),
        ("nonsense", "r1"),
    ],
)
def test_a_name_that_means_nothing_is_none(table: str, name: str) -> None:
    assert site_of(two_racks()).entity(table, name) is None


@pytest.mark.parametrize("table", ["node", "gpu"])
def test_many_names_at_once_mean_what_each_means(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "MOST_PARSED", 2)
    alone, together = site_of(two_racks()), site_of(two_racks())
    names = [alone.name(table, i) for i in range(alone.sizes[table])]
    asked = [*names[::-1], names[0].partition("/")[2], "nobody/node0/gpu0", f"{names[0]}0"]
    assert together.entities(table, asked).tolist() == [
        -1 if (i := alone.entity(table, name)) is None else i for name in asked
    ]


def test_names_that_nobody_knows_make_a_site_list_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "MOST_PARSED", 2)
    site, tables, paths = site_of(two_racks()), list[str](), Site._paths

    def counted(self: Site, table: str) -> list[str]:
        tables.append(table)
        return paths(self, table)

    monkeypatch.setattr(Site, "_paths", counted)
    for k in range(3):
        assert site.entities("node", [f"other{k}/node{i}" for i in range(9)]).tolist() == [-1] * 9
    assert tables == ["node"]


def test_a_local_name_in_two_halls_means_neither() -> None:
    tree = two_racks()
    tree["halls"][0]["name"] = "h[1-2]"
    site = site_of(tree)
    assert site.entity("rack", "r1") is None
    assert site.entity("rack", "h2/r1") == site.entity("rack", "lab/h2/r1") == 2
    assert [site.feeders_of_rack.of_row(r).tolist() for r in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_relation_keeps_each_pair_once() -> None:
    relation = Relation.of([[2, 0, 2], [], [1]])
    assert relation.start.tolist() == [0, 2, 2, 3]
    assert relation.of_row(0).tolist() == [0, 2]
    assert relation.row_of_member.tolist() == [0, 0, 2]
    assert relation.sums(np.array([1.0, 10.0, 100.0])).tolist() == [101.0, 0.0, 10.0]


def test_a_built_site_cannot_be_written_to() -> None:
    site = site_of(two_racks())
    for array in (site.envelopes["gpu.power_cap_w"].high, site.limits["gpu.temp_c"].max, site.rack_of_node,
                  site.feeders_of_rack.member, site.budget_w):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_every_table_has_a_size() -> None:
    assert set(site_of({"site": "bare"}).sizes) == set(TABLES)


def test_slots_follow_their_paths() -> None:
    old, new = site_of(two_racks()), site_of(two_racks(racks="r[2-3]", max_jobs=5))
    kept = slots_kept(old, new)
    assert kept["rack"].tolist() == [1, -1]
    assert kept["gpu"].tolist() == [*range(72, 144), *[-1] * 72]
    assert kept["job"].tolist() == [0, 1, 2, 3, 4]
    memory = {"x": np.arange(144.0)}
    moved = Columns(gpu={"x": "f8"}).moved(memory, kept, new.sizes)
    assert moved["x"].tolist() == [*range(72, 144), *[0.0] * 72]


def test_a_changed_site_moves_leases_and_calibration() -> None:
    twin = Twin(two_racks())
    twin.tick()
    engine = twin.engine
    lease = engine.arbiter.leases["gpu.power_cap_w"]
    at = np.array([71, 72], np.int32)
    new = Setpoints(at, np.array([500.0, 600.0]), np.zeros(2, np.int32), np.zeros(2, np.int32))
    lease.grant(new, 1, twin.now_ns, np.full(144, 1200.0))
    engine.arbiter.mode = "held"  # or what nobody asks for would be given back
    engine.estimator.capture[:] = [0.7, 0.8]
    spec = SiteSpec({**two_racks(racks="r[2-3]")}, {})
    spec.profiles.update(_profiles("gb200-nvl72"))
    twin.tick(None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    lease = engine.arbiter.leases["gpu.power_cap_w"]
    assert lease.value[0] == 600.0
    assert np.isnan(lease.value[1:]).all()
    assert lease.found[0] == 1200.0
    assert engine.estimator.capture.tolist() == [0.8, 0.9]
    assert engine.site.spec_hash == spec.digest()


def _profiles(*names: str) -> dict[str, Any]:
    from tests.support.builders import profile_tree

    return {n: profile_tree(n) for n in names}


def test_the_hash_of_a_site_is_of_its_content() -> None:
    one, same, other = site_of(eight_nodes()), site_of(eight_nodes()), site_of(eight_nodes(max_jobs=3))
    assert one.spec_hash == same.spec_hash != other.spec_hash


def test_a_chain_and_many_roots_are_built() -> None:
    n = 20_000
    chain = [{"name": f"f{i}", "serves": [f"f{i + 1}"]} for i in range(n - 1)] + [{"name": f"f{n - 1}"}]
    site = site_of({"site": "s", "feeders": chain})
    assert not site.root_of_feeder().any()
    assert len(site.subtree(5)) == n - 5
    hall = {"name": "h[1-50]", "feeders": [{"name": "f[1-50]", "serves": ["g[1-50]"]}, {"name": "g[1-50]"}]}
    site = site_of({"site": "s", "halls": [hall]})
    roots = np.arange(5000).reshape(50, 2, 50)[:, [0, 0]]
    assert site.root_of_feeder().tolist() == roots.ravel().tolist()


def problems_of(tree: dict[str, Any]) -> list[str]:
    """Return the problems for which a site is refused."""
    with pytest.raises(ConfigError) as caught:
        site_of(tree)
    return [p.removeprefix("test.yaml: ") for p in caught.value.problems]


MANY = "x[1-150000]"


@pytest.mark.long
@pytest.mark.parametrize(
    "tree, expected",
    [
        ({"halls": [{"name": f"h{i}-[1-150000]"} for i in range(50)]}, "$.halls[1].name: more than 200000"),
        ({"loops": [{"name": f"l{i}-[1-150000]"} for i in range(50)]}, "$.loops[1].name: more than 200000"),
        ({"feeders": [{"name": "f", "serves": [MANY] * 50}]}, "$.feeders[0].serves: more than 1000000"),
        (
            {
                "halls": [
                    {
                        "name": "h[1-150000]",
                        "planes": [{"name": "p", "links_per_node": 1, "racks": ["r[1-40000]"]}],
                    }
                ]
            },
            "$.halls[0].planes[0].racks: more than 1000000",
        ),
    ],
)
def test_names_that_are_written_out_are_limited_in_all(tree: dict[str, Any], expected: str) -> None:
    (found,) = problems_of({"site": "s", **tree})
    assert found.startswith(expected)


def test_the_problems_of_a_file_are_limited() -> None:
    found = problems_of({"site": "s", **{f"k{i}": 1 for i in range(MAX_PROBLEMS + 7)}})
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "$: and 7 more"


def test_huge_values_are_quoted_in_brief() -> None:
    deep: list[Any] = ["x"]
    for _ in range(40):
        deep = [deep] * 10
    for value in (deep, 1 << 20_000, "x" * 10**6, {"k" * 10**6: deep}):
        assert len(short(value)) <= 60
    _, faults = salvage(SiteFile, {"site": 5, "schema": 1 << 20_000, "q" * 10**5: deep})
    assert len(faults.problems) == 3
    assert all(len(p) < 300 for p in faults.problems)


def test_a_file_of_wrong_form_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.site.site.SiteSpec.digest", lambda self: pytest.fail("hashed"))
    assert len(problems_of(two_racks(q0=[["x"]]))) == 1


def with_stores(*switches: str, stores: str = "fs[1-2]") -> dict[str, Any]:
    """Two racks with switches in the hall and file systems of the site."""
    tree = two_racks(storage=[{"name": stores}])
    tree["halls"][0]["switches"] = [{"name": n} for n in switches]
    return tree


def test_switches_and_file_systems_have_names() -> None:
    site = site_of(with_stores("leaf[1-4]", "spine1"))
    assert (site.sizes["switch"], site.sizes["storage"]) == (5, 2)
    assert site.name("switch", 4) == "lab/h/spine1"
    assert site.name("storage", 1) == "lab/fs2"
    for name in ("lab/h/leaf3", "h/leaf3", "leaf3"):
        assert site.entity("switch", name) == 2
    assert site.entity("storage", "fs1") == 0
    assert site.entity("storage", "leaf1") is None
    twin = Twin(with_stores("leaf[1-4]"))
    twin.tick({"switch.temp_c": 40.0, "storage.flush_bytes_per_s": [1e9, 2e9]})
    row = TABLES["storage"].by_name["flush_bytes_per_s"].row
    assert twin.engine.state.tables["storage"].value[row].tolist() == [1e9, 2e9]


def test_what_switches_and_file_systems_said_moves_with_their_paths() -> None:
    twin = Twin(with_stores("leaf[1-3]"))
    twin.tick({"switch.temp_c": [41.0, 42.0, 43.0], "storage.used_pu": [0.25, 0.5]})
    tree = with_stores("leaf3", "leaf[8-9]", "leaf2", stores="fs[2-3]")
    kept = slots_kept(twin.site, site_of(tree))
    assert kept["switch"].tolist() == [2, -1, -1, 1]
    assert kept["storage"].tolist() == [1, -1]
    spec = SiteSpec(tree, _profiles("gb200-nvl72"))
    twin.tick(None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    tables = twin.engine.state.tables
    temps = tables["switch"].value[TABLES["switch"].by_name["temp_c"].row]
    assert (temps[0], temps[3]) == (43.0, 42.0)
    assert np.isnan(temps[1:3]).all()
    used = tables["storage"].value[TABLES["storage"].by_name["used_pu"].row]
    assert used[0] == 0.5
    assert np.isnan(used[1])


def test_a_site_without_switches_gains_some() -> None:
    twin = Twin(two_racks())
    twin.tick({"rack.power_w": 1000.0})
    spec = SiteSpec(with_stores("leaf1"), _profiles("gb200-nvl72"))
    twin.tick(None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    assert twin.engine.site.entity("switch", "leaf1") == 0
    assert (
        twin.engine.state.tables["rack"].value[TABLES["rack"].by_name["power_w"].row].tolist() == [1000.0] * 2
    )


@pytest.mark.parametrize(
    "tree, expected",
    [
        (with_stores("a", "a"), "$: the switch lab/h/a is described twice"),
        (with_stores("a", stores="a[3-1]"), "$.storage[0].name: expected an ascending range"),
        (with_stores("a b"), "$.halls[0].switches[0].name: expected a name"),
        (with_stores("a", stores="x[1-200000]"), "$.storage[0].name: more than 200000 names"),
        ({**two_racks(), "storage": ["fs1"]}, "$.storage[0]: expected a mapping"),
        ({**two_racks(), "storage": [{"name": "fs1", "size": 3}]}, "$.storage[0].size: unknown key"),
    ],
)
def test_faulty_switches_and_file_systems_are_refused(tree: dict[str, Any], expected: str) -> None:
    assert any(p.startswith(expected) for p in problems_of(tree)), problems_of(tree)
