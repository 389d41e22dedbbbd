"""Spares: kept by the site's file, chosen by topology and headroom, and as many as the repairs ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import nbinom, poisson

from policies.node_replacement import free_spares
from policies.node_replacement.headroom import load_limits, load_w, present_use, shift_load
from policies.node_replacement.spare_count import LARGE_PU, MOST_OUT, SHORT_PU, spare_pool, tail_pu
from policies.node_replacement.spares import assign_spares, unwell
from tests.support.builders import Twin, site_of, two_racks
from tests.support.scripted_health import ailing
from twin.catalogue import ConfigError
from twin.contracts import DEGRADED, HEALTHY, UNKNOWN, WATCH, Fault, NodeFeatures
from twin.telemetry import JobSlots, events as ev

DAY_S = 86_400.0


# ---------------------------------------------------------------- the site's file
def racks_of(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"site": "lab", "halls": [{"name": "h", "racks": list(groups)}]}


def test_spare_nodes_are_the_last_of_each_rack_and_all_of_a_spare_rack() -> None:
    site = site_of(racks_of(
        {"name": "r[1-2]", "profile": "air-8gpu", "nodes": 4, "gpus_per_node": 1, "spare_nodes": 1},
        {"name": "s1", "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 1, "spare": True},
        {"name": "t1", "profile": "air-8gpu", "nodes": 3, "gpus_per_node": 1},
        {"name": "u1", "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 1, "spare_nodes": 2},
    ))  # fmt: skip
    names = [site.name("node", i) for i in np.flatnonzero(site.spare_node).tolist()]
    assert names == [f"lab/h/{x}" for x in ("r1/node3", "r2/node3", "s1/node0", "s1/node1", "u1/node0",
                                            "u1/node1")]  # fmt: skip
    assert site.spare_rack.tolist() == [False, False, True, False, False]
    assert not site.spare_node.flags.writeable


def test_racks_of_switches_keep_no_spares() -> None:
    site = site_of(racks_of({"name": "r[01-16]", "profile": "cloudmatrix384", "spare_nodes": 1}))
    nodes = np.diff(site.node_start_of_rack)
    assert (site.sum_by_rack("node", site.spare_node.astype(np.float64)) == (nodes > 0)).all()


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"nodes": 4, "spare_nodes": 5}, "racks[0].spare_nodes: expected 0 to 4, the nodes of a rack, got 5"),
        ({"nodes": 4, "spare_nodes": -1}, "spare_nodes: expected 0 to 4, the nodes of a rack, got -1"),
        ({"nodes": 4, "spare": True, "spare_nodes": 1}, "expected either spare or spare_nodes"),
        ({"nodes": 4, "spare_nodes": "two"}, "racks[0].spare_nodes: expected"),
        ({"nodes": 4, "spare_nodes": 1.5}, "racks[0].spare_nodes: expected"),
        ({"nodes": 0, "spare_nodes": 1}, "expected 0 to 0, the nodes of a rack"),
    ],
)  # fmt: skip
def test_spares_that_cannot_be_are_refused(group: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        site_of(racks_of({"name": "r1", "profile": "air-8gpu", "gpus_per_node": 1, **group}))
    assert any(says in problem for problem in caught.value.problems), caught.value.problems


def test_roles_are_the_kept_nodes_that_are_free_and_in_service() -> None:
    site = site_of(racks_of({"name": "r1", "profile": "air-8gpu", "nodes": 6, "spare_nodes": 4}))
    jobs = JobSlots(2, 6)
    jobs.job_of_node[2] = 0
    level = np.array([0.0, 0.0, 0.0, 1.0, np.nan, 0.0])
    assert np.flatnonzero(free_spares(site, jobs, level)).tolist() == [4, 5]


# ---------------------------------------------------------------- the choice
RACK_W = 20_000.0


def hall(budget_w: float | None = None, nodes: int = 4, racks: int = 4, **more: Any) -> dict[str, Any]:
    """Two halls of four racks of four nodes, the last node of each kept; two feeders each, and two CDUs."""
    names = f"[1-{racks}]"
    return {
        "site": "lab",
        "loops": [{"name": "l1"}],
        "halls": [{
            "name": hall_name,
            "racks": [{"name": f"{hall_name}{names}", "profile": "air-8gpu", "nodes": nodes, "spare_nodes": 1,
                       **more}],
            "cdus": [{"name": f"cdu-{hall_name}[1-2]", "serves": [f"{hall_name}{names}"], "loop": "l1"}],
            "feeders": [{"name": f"a-{hall_name}", "side": "A", "serves": [f"{hall_name}{names}"],
                         "budget_w": budget_w},
                        {"name": f"b-{hall_name}", "side": "B", "serves": [f"{hall_name}{names}"],
                         "budget_w": budget_w}],
        } for hall_name in ("x", "y")],
    }  # fmt: skip


class Pod(Twin):
    """Nodes that are well and draw as told: 6 kW with a job, 1 kW without, unless told otherwise."""

    def __init__(self, tree: dict[str, Any] | None = None, **jobs: list[str]) -> None:
        super().__init__(tree or hall())
        self.ill = ailing(self.engine)
        started = [ev.JobStarted(id=j, job=j, nodes=tuple(nodes), kind="training", coupling="synchronous")
                   for j, nodes in jobs.items()]  # fmt: skip
        self.tick(None, *(started or [ev.JobStarted(id="-", job="-", nodes=(), kind="batch")]))
        self.draw(np.where(self.engine.jobs.job_of_node >= 0, 6000.0, 1000.0))

    def draw(self, watts: Any) -> None:
        self.tick({"node.power_w": watts, "node.power_w_max": watts})

    def node(self, name: str) -> int:
        found = self.site.entity("node", name)
        assert found is not None
        return found

    def view(self, faults: tuple[Fault, ...] = ()) -> Any:
        self.engine.diagnosis.faults = faults
        return self.engine.view(1.0)

    def pick(self, *leaving: str, taken: tuple[str, ...] = (), faults: tuple[Fault, ...] = ()) -> Any:
        mask = np.zeros(self.site.sizes["node"], np.bool_)
        mask[[self.node(t) for t in taken]] = True
        nodes = np.array([self.node(x) for x in leaving], np.int32)
        chosen, score, why = assign_spares(self.view(faults), nodes, self.site.spare_node, mask)
        assert ((chosen >= 0) == np.isfinite(score)).all()
        assert [w == "" for w in why] == (chosen >= 0).tolist()
        used = chosen[chosen >= 0]
        assert len(used) == len(set(used.tolist()))
        names = [self.site.name("node", i).removeprefix("lab/") if i >= 0 else None for i in chosen.tolist()]
        return names, score, why


ONE = {"a": ["x1/node0", "x2/node0", "y3/node1"]}


def test_the_nearest_spare_is_the_first() -> None:
    pod = Pod(**ONE)
    near = ["x/x1/node3", "x/x2/node3", "x/x3/node3", "x/x4/node3", "y/y1/node3"]
    for i, name in enumerate(near):
        gone = tuple(n for n in near[:i])
        assert pod.pick("x1/node0", taken=gone)[0] == [name]
    scores = [pod.pick("x1/node0", taken=tuple(near[:i]))[1][0] for i in range(5)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[1] > scores[2] > scores[4]
    everything = tuple(pod.site.name("node", i) for i in np.flatnonzero(pod.site.spare_node).tolist())
    found = pod.pick("x1/node0", taken=everything)
    assert found[0] == [None]
    assert found[2] == ["no spare is free: 8 promised to another node"]


def test_each_leaving_node_gets_its_own_and_the_first_has_the_choice() -> None:
    pod = Pod(a=["x1/node0", "x1/node1", "x1/node2", "y1/node0"])
    pod.draw(2000.0)  # so that no rack is full
    names, _, why = pod.pick("x1/node1", "y1/node0")
    assert names == ["x/x1/node3", "y/y1/node3"]
    names, _, _ = pod.pick("x1/node0", "x1/node1", "x1/node2")
    assert len(set(names)) == 3
    assert all(name.startswith("x/") for name in names)
    assert why == ["", ""]


def test_where_more_leave_than_there_are_spares_the_last_have_none() -> None:
    pod = Pod(a=[f"x{r}/node{n}" for r in (1, 2, 3, 4) for n in (0, 1, 2)])
    pod.draw(2000.0)
    names, _, why = pod.pick(*(f"x{r}/node{n}" for r in (1, 2, 3, 4) for n in (0, 1, 2)))
    assert [n is not None for n in names] == [True] * 8 + [False] * 4
    assert set(why[8:]) == {"all spares are promised to nodes of higher priority"}


def test_a_node_without_a_job_needs_none_and_without_a_source_of_jobs_nobody_knows() -> None:
    assert Pod(**ONE).pick("x2/node1")[2] == ["no job runs on it"]
    silent = Twin(hall())
    ailing(silent.engine)
    silent.tick(None)
    n = silent.site.sizes["node"]
    _, _, why = assign_spares(silent.engine.view(1.0), np.array([0], np.int32), silent.site.spare_node,
                       np.zeros(n, np.bool_))  # fmt: skip
    assert why == ["the jobs on it are unknown"]


def test_a_job_within_one_domain_stays_there_and_one_across_does_not_need_to() -> None:
    tree = two_racks()
    tree["halls"][0]["racks"][0]["spare_nodes"] = 2
    tree["halls"][0]["feeders"] = []
    within, across = ["r1/node0", "r1/node1"], ["r1/node2", "r2/node2"]
    pod = Pod(tree, within=within, across=across, alone=["r1/node5"])
    both = ("r1/node16", "r1/node17")
    for leaves in ("r1/node0", "r1/node2", "r1/node5"):
        assert pod.pick(leaves)[0][0] in ("h/r1/node16", "h/r1/node17")
    names, _, why = pod.pick("r1/node0", taken=both)
    assert names == [None]
    assert "scale-up domain" in why[0]
    assert pod.pick("r1/node2", taken=both)[0] == ["h/r2/node16"]
    assert pod.pick("r1/node5", taken=both)[0] == ["h/r2/node16"]


def test_who_is_not_well_free_and_in_service_is_no_spare() -> None:
    pod = Pod(**ONE)
    first = pod.node("x1/node3")
    pod.ill.say("node", first, UNKNOWN, "silent")
    assert pod.pick("x1/node0")[0] == ["x/x2/node3"]
    pod.ill.say("node", first, WATCH, "a little")
    assert pod.pick("x1/node0")[0] == ["x/x1/node3"]
    pod.ill.say("gpu", first * 8 + 2, DEGRADED, "bad")
    assert pod.pick("x1/node0")[0] == ["x/x2/node3"]
    level = np.zeros(pod.site.sizes["node"])
    level[pod.node("x2/node3")] = 1.0
    pod.tick({"node.service_level_state": level})
    assert pod.pick("x1/node0")[0][0] in ("x/x3/node3", "x/x4/node3")
    pod.tick(None, ev.JobStarted(id="b", job="b", nodes=("x3/node3", "x4/node3"), kind="batch"))
    assert pod.pick("x1/node0")[0][0].startswith("y/")


@pytest.mark.parametrize(
    ("node_gap", "gpu", "serves"),
    [(np.nan, HEALTHY, True), (0.9, HEALTHY, False), (np.nan, UNKNOWN, False), (np.nan, DEGRADED, False)],
)  # fmt: skip
def test_a_node_without_a_bmc_serves_while_its_gpus_are_known_and_a_silent_one_does_not(
    node_gap: float, gpu: int, serves: bool
) -> None:
    site = site_of(racks_of({"name": "r1", "profile": "air-8gpu", "nodes": 2}))
    levels = {"node": np.full(2, UNKNOWN), "gpu": np.full(16, HEALTHY)}
    levels["gpu"][3] = gpu
    gaps = np.array([[node_gap, 0.0], [0.0, 0.0]], np.float32)
    view: Any = SimpleNamespace(
        site=site, health=lambda part: SimpleNamespace(level=levels[part]),
        node_features=lambda: NodeFeatures(("node_gap_pu", "gpu_gap_pu"), gaps),
    )  # fmt: skip
    assert unwell(view).tolist() == [not serves, True]


def test_a_spare_that_is_likely_to_fail_itself_comes_last_or_not_at_all() -> None:
    pod = Pod(**ONE)
    chance = np.full(pod.site.sizes["node"], 0.01)
    chance[pod.node("x1/node3")] = 0.15
    pod.ill.forecast(DAY_S, chance)
    assert pod.pick("x1/node0")[0] == ["x/x2/node3"]
    for name in ("x2", "x3", "x4", "y1", "y2", "y3", "y4"):
        chance[pod.node(f"{name}/node3")] = 0.3
    pod.ill.forecast(DAY_S, chance)
    assert pod.pick("x1/node0")[0] == ["x/x1/node3"]
    chance[pod.node("x1/node3")] = 0.3
    pod.ill.forecast(DAY_S, chance)
    assert "8 likely to fail itself" in pod.pick("x1/node0")[2][0]


@pytest.mark.parametrize(
    ("kind", "table", "name", "expected"),
    [
        ("pump_trip", "cdu", "cdu-x1", "x/x3/node3"),
        ("feed_lost", "feeder", "a-x", "y/"),
        ("branch_blocked", "rack", "x1", "x/x2/node3"),
        ("exchanger_fouled", "cdu", "cdu-x1", "x/x3/node3"),
        ("gpu_off_bus", "gpu", "x1/node3/gpu0", "x/x1/node3"),
    ],
)
def test_not_below_what_is_failing(kind: str, table: str, name: str, expected: str) -> None:
    pod = Pod(**ONE)
    entity = pod.site.entity(table, name)
    assert entity is not None
    one = Fault(kind, table, entity, "", "critical", 0.9, 0, ())
    assert pod.pick("x1/node0", faults=(one,))[0][0].startswith(expected)


def test_a_coolant_near_its_guard_is_avoided_and_beyond_it_is_no_place() -> None:
    tree = two_racks()
    tree["halls"][0]["racks"][0]["spare_nodes"] = 1
    tree["halls"][0]["feeders"] = []
    pod = Pod(tree, a=["r1/node0"])
    limit = pod.site.limits["rack.supply_temp_c"].guard[0]
    assert pod.pick("r1/node0")[0] == ["h/r1/node17"]
    pod.tick({"rack.supply_temp_c": [limit + 2.0, 30.0], "node.power_w": 1000.0})
    assert pod.pick("r1/node0")[0] == ["h/r2/node17"]


# ---------------------------------------------------------------- budgets
def test_a_spare_that_would_break_a_budget_is_none() -> None:
    """Hall x draws 3 x 6 + 13 x 1 + 4 x 0.2 = 31.8 kW; 5 kW more on each feeder, as the other may be lost."""
    jobs = {"a": ["x1/node0", "x2/node0", "x3/node0", "y1/node0"]}
    for budget_w, expected in ((40_000.0, "x"), (36_700.0, "none"), (36_900.0, "x")):
        pod = Pod(hall(budget_w), **jobs)
        name = pod.pick("y1/node0", taken=tuple(f"y{r}/node3" for r in (1, 2, 3, 4)))[0][0]
        assert (name is not None and name.startswith("x")) == (expected == "x"), budget_w
    pod = Pod(hall(36_700.0), **jobs)
    names, _, why = pod.pick("y1/node0", taken=tuple(f"y{r}/node3" for r in (1, 2, 3, 4)))
    assert names == [None]
    assert why[0].startswith("every spare would break a limit: the best takes lab/")
    assert "to 100%" in why[0]
    # Within the hall what leaves is taken off, so that nothing changes on its feeders
    assert pod.pick("x1/node0")[0][0].startswith("x/")


def test_loads_that_moved_before_count_for_those_that_come_after() -> None:
    jobs = {"a": ["y1/node0", "y2/node0"]}
    taken = tuple(f"y{r}/node3" for r in (1, 2, 3, 4))
    pod = Pod(hall(22_000.0), **jobs)  # 16.8 kW drawn in x: 5 more fit, 10 do not
    names, _, why = pod.pick("y1/node0", "y2/node0", taken=taken)
    assert names[0] is not None
    assert names[1] is None
    assert "break a limit" in why[1]
    pod = Pod(hall(26_900.0), **jobs)
    assert None not in pod.pick("y1/node0", "y2/node0", taken=taken)[0]


def test_what_is_not_measured_counts_with_its_most() -> None:
    pod = Pod(hall(1e9), **ONE)
    view = pod.view()
    known = load_limits(view)
    design = pod.site.design
    assert known.now_w[0] == pytest.approx(6000.0 + 3 * 1000.0 + np.nan_to_num(design.rack_overhead_w[0]))
    silent = Twin(hall(1e9))
    held = load_limits(silent.engine.view(1.0))
    assert held.now_w[:8] == pytest.approx(design.rack_max_w)
    assert held.now_w[8] == pytest.approx(design.rack_max_w[:4].sum())
    assert not held.measured.any()
    busy, idle = load_w(silent.engine.view(1.0))
    assert (busy > idle).all()
    load = shift_load(
        silent.engine.view(1.0), held, np.array([0], np.int32), np.array([7], np.int32), busy, idle
    )
    assert load.fits.all()
    now = present_use(silent.engine.view(1.0), held, np.array([7], np.int32))
    assert load.use_pu == pytest.approx(now)


def test_a_limit_that_is_broken_already_forbids_more_load_only() -> None:
    pod = Pod(hall(10_000.0), **{"a": ["x1/node0", "y1/node0"]})
    assert pod.pick("x1/node0")[0][0].startswith("x/")  # within: nothing changes
    assert pod.pick("x1/node0", taken=tuple(f"x{r}/node3" for r in (1, 2, 3, 4)))[0] == [None]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), budget_w=st.floats(15_000, 60_000))
def test_no_budget_is_ever_broken_by_all_moves_together(seed: int, budget_w: float) -> None:
    rng = np.random.default_rng(seed)
    busy = np.flatnonzero((rng.random(32) < 0.6) & ~SHAPE.spare_node)
    pod = Pod(hall(budget_w), a=[SHAPE.name("node", i) for i in busy.tolist()])
    watts = np.where(pod.engine.jobs.job_of_node >= 0, rng.uniform(2000, 9000, 32), 800.0)
    pod.draw(watts)
    watts = pod.engine.view(1.0).value("node.power_w").astype(np.float64)
    leaving = rng.permutation(busy)[: rng.integers(0, len(busy) + 1)]
    names, _, _ = pod.pick(*(pod.site.name("node", i) for i in leaving.tolist()))
    view = pod.view()
    before, (most, idle) = load_limits(view), load_w(view)
    then = watts.copy()
    for node, name in zip(leaving.tolist(), names, strict=True):
        if name is not None:
            then[pod.node(name)] += most[node] - watts[pod.node(name)]
            then[node] = idle[node]
    for feeder in range(4):
        racks = pod.site.racks_below(feeder)
        inside = np.isin(pod.site.rack_of_node, racks)
        now_w, then_w = watts[inside].sum(), then[inside].sum()
        assert then_w <= max(budget_w, now_w) + 1.0 or np.isnan(budget_w)
    assert len(before.now_w) == 8 + 4 + 4


SHAPE = site_of(hall())


# ---------------------------------------------------------------- the pool
VIEW = Pod().view()


@pytest.mark.parametrize("mean", [1e-6, 0.1, 1.0, 7.3, 36.7, 500.0, 5000.0])
def test_the_number_out_is_poisson(mean: float) -> None:
    tail = tail_pu(mean)
    n = np.arange(len(tail))
    law = poisson.sf(n, mean)
    assert tail == pytest.approx(law, rel=1e-6, abs=1e-12)
    assert tail[-1] <= 1e-6
    wanted = spare_pool(VIEW, mean, (24.0, 24.0), 0, np.inf).wanted
    assert wanted == int(poisson.ppf(1.0 - SHORT_PU, mean))


@pytest.mark.parametrize("shape", [0.5, 3.0, 50.0])
def test_a_rate_that_is_only_believed_needs_more(shape: float) -> None:
    for mean in (0.5, 7.3, 200.0):
        tail = tail_pu(mean, shape)
        law = nbinom.sf(np.arange(len(tail)), shape, shape / (shape + mean))
        assert tail == pytest.approx(law, rel=1e-5, abs=1e-7)
        unsure = spare_pool(VIEW, mean, (24.0, 24.0), 0, shape).wanted
        assert unsure == int(nbinom.ppf(1.0 - SHORT_PU, shape, shape / (shape + mean)))
        assert unsure >= spare_pool(VIEW, mean, (24.0, 24.0), 0, np.inf).wanted


def test_only_the_mean_of_repairs_counts() -> None:
    """M/G/inf by simulation: lognormal repairs of median 20 h and mean 133 h, as in the trace of faults."""
    rng = np.random.default_rng(7)
    sigma = np.sqrt(2.0 * np.log(133.0 / 20.0))
    per_day, days = 6.0, 40_000.0
    begins = np.sort(rng.uniform(0.0, days, rng.poisson(per_day * days)))
    ends = begins + rng.lognormal(np.log(20.0), sigma, len(begins)) / 24.0
    at = np.arange(3000.0, days, 5.0)
    out = np.searchsorted(begins, at) - np.searchsorted(np.sort(ends), at)
    found = spare_pool(VIEW, per_day, (20.0, 133.0), 0, np.inf)
    assert found.mean_out == pytest.approx(per_day * 133.0 / 24.0)
    assert (out > found.wanted).mean() == pytest.approx(SHORT_PU, abs=0.006)
    assert (out > found.wanted - 8).mean() > 0.03


def test_the_sentence_says_how_many_are_missing_or_too_many() -> None:
    found = spare_pool(VIEW, 6.66, (20.0, 133.0), 40, np.inf)
    assert found.short
    assert f"{found.wanted} spares are wanted and 40 are there: 6.7 nodes leave a day" in found.sentence
    assert 0.2 < found.chance_short_pu < 0.5
    enough = spare_pool(VIEW, 6.66, (20.0, 133.0), found.wanted, np.inf)
    assert not enough.short
    assert not enough.large
    assert f"{found.wanted} are there: " in enough.sentence
    many = spare_pool(VIEW, 6.66, (20.0, 133.0), 200, np.inf)
    assert many.large
    assert f"{200 - found.wanted} more than needed" in many.sentence
    assert many.chance_short_pu < LARGE_PU


def test_a_fleet_that_never_fails_needs_none_and_nonsense_is_none() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        found = spare_pool(VIEW, rate, (20.0, 133.0), 0)
        assert (found.wanted, found.short, found.chance_short_pu) == (0, False, 0.0)
    assert spare_pool(VIEW, 1e9, (20.0, 133.0), 0, 1.0).wanted <= MOST_OUT
    assert spare_pool(VIEW, 1.0, (50.0, 20.0), 0, np.inf).mean_out == pytest.approx(50.0 / 24.0)


def test_the_band_of_the_forecast_is_the_belief() -> None:
    pod = Pod(**ONE)
    day = np.full(pod.site.sizes["node"], 0.01)
    pod.ill.forecast(DAY_S, day, half=0.0)
    sure = spare_pool(pod.view(), 20.0, (20.0, 133.0), 0).wanted
    pod.ill.forecast(DAY_S, day, half=0.015)
    assert (
        spare_pool(pod.view(), 20.0, (20.0, 133.0), 0).wanted
        > sure
        == spare_pool(VIEW, 20.0, (20.0, 133.0), 0).wanted
    )


def test_a_cdu_without_room_for_the_heat_is_a_limit_too() -> None:
    """Two racks on one CDU, made for 2 x 0.9 or so of their most: just below it, 5 kW more do not fit."""
    tree = two_racks(racks="r[1-4]")
    tree["halls"][0]["racks"][0]["spare_nodes"] = 1
    tree["halls"][0]["cdus"] = [{"name": "cdu[1-2]", "serves": ["r[1-4]"]}]
    tree["halls"][0]["feeders"] = []
    pod = Pod(tree, a=["r1/node0"])
    most_w = pod.site.limits["rack.power_w"].guard[0]
    heat_w, capture = pod.site.design.cdu_heat_w[1], pod.site.design.capture_pu[2]
    draws = np.where(np.arange(72) == 0, 6000.0, 1000.0)
    others = ("r1/node17", "r2/node17", "r4/node17")
    for left_w, fits in ((5100.0, True), (4900.0, False)):
        # The other rack of the CDU draws more than it may, so that this one's limit is the CDU's
        this_w = most_w - 20_000.0
        rest_w = heat_w / capture - this_w - left_w
        pod.tick({"node.power_w": draws, "node.power_w_max": draws,
                  "rack.power_w": [50_000.0, 50_000.0, this_w, rest_w]})  # fmt: skip
        names, _, why = pod.pick("r1/node0", taken=others)
        assert (names[0] == "h/r3/node17") == fits
        assert fits or "h/cdu2 to 100%" in why[0]
