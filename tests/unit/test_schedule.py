"""The known schedule: by how much each quantity falls when jobs reach their limits, in closed form."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from models.load.schedule import load_drops
from tests.support.builders import Twin, eight_nodes, two_racks
from twin.catalogue import F64, NS
from twin.telemetry import events as ev

MIN = 60.0
# Of a tray of gb200-nvl72: four GPUs that idle at 200 W, two CPUs at 50 W, 1,000 W in all.
IDLE_W, GPU_IDLE_W = 1000.0, 200.0


def job(name: str, nodes: list[str], limit_s: float, number: int = 0) -> ev.JobStarted:
    return ev.JobStarted(id=f"{name}{number}", job=name, nodes=tuple(nodes), time_limit_s=limit_s)


def trays(rack: str, n: int, first: int = 0) -> list[str]:
    return [f"lab/h/{rack}/node{i}" for i in range(first, first + n)]


def fall(twin: Twin, *horizons_s: float) -> dict[str, F64]:
    return load_drops(twin.engine.view(1.0), horizons_s)


@pytest.fixture
def twin() -> Twin:
    """Two racks whose trays draw 5 kW each."""
    made = Twin(two_racks())
    made.tick({"node.power_w": 5000.0})
    return made


def test_nothing_ends_nothing_falls(twin: Twin) -> None:
    for said in fall(twin, MIN, 60 * MIN).values():
        assert (said == 0.0).all()
    twin.tick({"node.power_w": 5000.0}, job("endless", trays("r1", 4), 0.0))
    for said in fall(twin, MIN, 60 * MIN).values():
        assert (said == 0.0).all()


def test_a_limit_takes_the_work_from_rack_cdu_both_feeders_site_and_demand(twin: Twin) -> None:
    twin.tick({"node.power_w": 5000.0}, job("a", [*trays("r1", 3), *trays("r2", 1)], 10 * MIN))
    said = fall(twin, 5 * MIN, 15 * MIN)
    work_w = 5000.0 - IDLE_W
    sizes = twin.site.sizes
    for key, value in said.items():
        assert value.shape == (2, sizes[key.partition(".")[0]])
        assert (value[0] == 0.0).all(), key
    assert said["rack.power_w"][1] == pytest.approx([3 * work_w, work_w])
    capture_pu = twin.site.design.capture_pu
    assert 0.5 < capture_pu[0] < 1.0
    assert said["cdu.heat_w"][1] == pytest.approx([4 * work_w * capture_pu[0]])
    assert said["feeder.power_w"][1] == pytest.approx([2 * work_w, 2 * work_w])
    assert said["site.power_w"][1] == pytest.approx([4 * work_w])
    assert said["site.gpu_demand_count"][1] == [16.0]
    assert said["site.gpu_running_count"][1] == [16.0]


def test_the_end_is_told_up_to_its_instant_and_not_after_it(twin: Twin) -> None:
    twin.tick({"node.power_w": 5000.0}, job("a", trays("r1", 1), 100.0))
    for waited_s in range(0, 99, 7):
        left_s = 100.0 - waited_s
        just, before = fall(twin, left_s, left_s - 0.001)["rack.power_w"][:, 0].tolist(), 0.0
        assert just == pytest.approx([4000.0, before])
        twin.tick({"node.power_w": 5000.0}, dt_s=7.0)
    # It runs on past its limit, as jobs do that take long to stop: nobody knows its end.
    twin.tick({"node.power_w": 5000.0})
    assert twin.engine.jobs.alive.sum() == 1
    assert (fall(twin, MIN, 1e6)["rack.power_w"] == 0.0).all()
    twin.tick({"node.power_w": 5000.0}, ev.JobEnded(id="e", job="a"))
    assert (fall(twin, MIN, 1e6)["rack.power_w"] == 0.0).all()


def test_a_job_that_runs_already_ends_by_its_start_and_not_by_when_it_was_heard_of(twin: Twin) -> None:
    began_ns = twin.now_ns + NS - round(9 * MIN * NS)  # a tick lasts a second
    late = msgspec.structs.replace(job("a", trays("r1", 1), 10 * MIN), started_ns=began_ns)
    twin.tick({"node.power_w": 5000.0}, late)
    assert fall(twin, 0.99 * MIN, 1.01 * MIN)["rack.power_w"][:, 0].tolist() == pytest.approx([0.0, 4000.0])


@pytest.mark.parametrize("limit_s", [1e-9, 1e12, 1e300, 5e-324])
def test_limits_of_any_size_are_no_trouble(twin: Twin, limit_s: float) -> None:
    twin.tick({"node.power_w": 5000.0}, job("a", trays("r1", 1), limit_s))
    twin.tick({"node.power_w": 5000.0})
    for said in fall(twin, MIN, 86_400.0).values():
        assert (said == 0.0).all()


def test_jobs_side_by_side_on_a_node_share_it(twin: Twin) -> None:
    both = trays("r1", 1)
    twin.tick({"node.power_w": 5000.0}, job("a", both, 5 * MIN), job("b", both, 30 * MIN))
    said = fall(twin, 10 * MIN, 60 * MIN)
    assert said["rack.power_w"][:, 0] == pytest.approx([2000.0, 4000.0])
    assert said["site.gpu_demand_count"][:, 0].tolist() == [2.0, 4.0]


def test_a_node_that_is_nowhere_and_one_that_idles_do_not_fall(twin: Twin) -> None:
    powers = np.full(twin.site.sizes["node"], 5000.0)
    powers[1] = 900.0  # below its idle power
    twin.tick({"node.power_w": powers}, job("a", ["lab/h/r9/node0", *trays("r1", 2)], 5 * MIN))
    assert fall(twin, 10 * MIN)["rack.power_w"][0, 0] == pytest.approx(4000.0)


def test_without_a_meter_of_its_own_a_node_is_as_its_gpus_if_all_are_heard() -> None:
    twin = Twin(two_racks())
    gpu_w = np.full(twin.site.sizes["gpu"], 900.0)
    twin.tick({"gpu.power_w": gpu_w}, job("a", trays("r1", 2), 5 * MIN))
    loss_pu = twin.site.design.node_loss_pu[0]
    assert 0.0 <= loss_pu < 0.2
    of_node_w = 4 * (900.0 - GPU_IDLE_W) * (1.0 + loss_pu)
    assert fall(twin, 10 * MIN)["rack.power_w"][0, 0] == pytest.approx(2 * of_node_w)
    gpu_w[1] = np.nan
    twin = Twin(two_racks())
    twin.tick({"gpu.power_w": gpu_w}, job("a", trays("r1", 2), 5 * MIN))
    assert fall(twin, 10 * MIN)["rack.power_w"][0, 0] == pytest.approx(of_node_w)


def test_where_only_racks_are_metered_busy_nodes_share_what_is_beyond_idling() -> None:
    twin = Twin(two_racks())
    design, nodes = twin.site.design, 18
    idle_w = nodes * IDLE_W + design.rack_overhead_w[0]
    twin.tick({"rack.power_w": [idle_w + 20e3, idle_w - 1e3]},
              job("a", trays("r1", 3), 5 * MIN), job("b", trays("r1", 1, 3), 50 * MIN),
              job("c", trays("r2", 1), 5 * MIN))  # fmt: skip
    said = fall(twin, 10 * MIN, 60 * MIN)
    assert said["rack.power_w"][:, 0] == pytest.approx([15e3, 20e3])
    assert said["rack.power_w"][:, 1] == pytest.approx([0.0, 0.0])
    # An outlook of some nodes is not shared by the others.
    powers = np.full(twin.site.sizes["node"], np.nan)
    powers[0] = 9000.0
    twin.tick({"rack.power_w": idle_w + 20e3, "node.power_w": powers})
    assert fall(twin, 10 * MIN)["rack.power_w"][0, 0] == pytest.approx(8e3 + 2 * 4e3)


def test_nothing_heard_is_nothing_said() -> None:
    twin = Twin(two_racks())
    twin.tick(None, job("a", trays("r1", 3), 5 * MIN))
    said = fall(twin, 10 * MIN)
    assert (said["rack.power_w"] == 0.0).all()
    assert said["site.gpu_demand_count"].tolist() == [[12.0]]


def test_air_has_no_share_in_a_cdu_and_a_rack_without_feeders_none_of_theirs() -> None:
    twin = Twin(eight_nodes())
    twin.tick({"node.power_w": 1300.0}, job("a", ["lab/h/r1/node0"], 5 * MIN))
    said = fall(twin, 10 * MIN)
    assert said["rack.power_w"][0, 0] > 0
    assert said["cdu.heat_w"].shape == (1, 0)
    assert said["feeder.power_w"].shape == (1, 0)


def nested() -> dict[str, Any]:
    """main feeds pdu, which feeds r1; r2 hangs on main directly, and on b."""
    tree = two_racks()
    tree["halls"][0]["feeders"] = [
        {"name": "pdu", "side": "A", "budget_w": 150_000, "serves": ["r1"]},
        {"name": "main", "side": "A", "budget_w": 300_000, "serves": ["pdu", "r2"]},
        {"name": "b", "side": "B", "budget_w": 300_000, "serves": ["r[1-2]"]},
    ]
    return tree


def test_a_feeder_carries_what_is_below_it() -> None:
    twin = Twin(nested())
    twin.tick({"node.power_w": 5000.0}, job("a", trays("r1", 2), 5 * MIN), job("b", trays("r2", 1), 9 * MIN))
    said = fall(twin, 6 * MIN, 10 * MIN)["feeder.power_w"]
    names = [name.rpartition("/")[2] for name in twin.site.names["feeder"]]
    by = {name: said[:, i].tolist() for i, name in enumerate(names)}
    assert by == {"pdu": [4000.0, 4000.0], "main": [4000.0, 6000.0], "b": [4000.0, 6000.0]}


def test_a_site_that_changes_keeps_the_ends_of_its_jobs(twin: Twin) -> None:
    from tests.support.builders import spec_of

    twin.tick({"node.power_w": 5000.0}, job("a", trays("r1", 2), 10 * MIN))
    later = spec_of(two_racks(racks="r[0-2]"))
    twin.tick(None, ev.SiteChanged(id="s", site_hash=later.digest(), spec=later.packed()))
    twin.site = twin.engine.site
    said = fall(twin, 5 * MIN, 15 * MIN)["rack.power_w"]
    assert said[0].tolist() == [0.0] * 3
    assert said[1].tolist() == [0.0, 8000.0, 0.0]
