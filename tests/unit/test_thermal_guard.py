"""thermal_guard: caps before the limit, on worst cases, never on nothing. May import `twin` and policies."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from policies.thermal_guard import RELEASE_S, ThermalGuard, strain
from tests.support.builders import Twin, Wish, explained, profile_tree, two_racks
from twin.site import SiteSpec
from twin.telemetry import EntityReplaced, Held, SiteChanged

CAP = "gpu.power_cap_w"
NAN, INF = float("nan"), float("inf")
# GB200 NVL72: 200..1200 W; temp guard 82, max 87; margin guard 5, max -2; flow guard 40, max 30
COOL = {"gpu.temp_c": 60.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0, "rack.supply_temp_c": 32.0}


# Where nobody says that coolant flows, nothing bounds how hot a silent GPU may become
ALONE = {key: value for key, value in COOL.items() if key.startswith("gpu.")}


def guarded(values: dict[str, Any] = COOL) -> Twin:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    twin.run(3, values)
    return twin


def gpus(value: float, *at: int, other: float = 60.0) -> np.ndarray:
    out = np.full(144, other)
    out[list(at)] = value
    return out


@pytest.mark.parametrize(
    "worst, guard, limit, expected",
    [
        (82, 82, 87, 0),
        (84.5, 82, 87, 0.5),
        (87, 82, 87, 1),
        (120, 82, 87, 1),
        (20, 82, 87, 0),
        (5, 5, -2, 0),
        (1.5, 5, -2, 0.5),
        (-2, 5, -2, 1),
        (-50, 5, -2, 1),
        (40, 5, -2, 0),
        (NAN, 82, 87, 0),
        (90, NAN, 87, 0),
        (90, 82, NAN, 0),
        (80, 85, 85, 0),
        (85, 85, 85, 1),
        (86, 85, 85, 1),
        (INF, 82, 87, 1),
        (-INF, 82, 87, 0),
        (-INF, 40, 30, 1),
    ],
)
def test_strain(worst: float, guard: float, limit: float, expected: float) -> None:
    column = [np.array([x], np.float64) for x in (worst, guard, limit)]
    assert strain(*column)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"gpu.temp_c": gpus(82, 3)}, {}),
        ({"gpu.temp_c": gpus(84.5, 3)}, {3: 700.0}),
        ({"gpu.temp_c": gpus(87, 3, 100)}, {3: 200.0, 100: 200.0}),
        ({"gpu.temp_c": gpus(129, 0)}, {0: 200.0}),
        ({"gpu.hbm_temp_c": gpus(92.5, 5)}, {5: 700.0}),
        ({"gpu.thermal_margin_k": gpus(2, 7, other=40)}, {7: 1200 - 3 / 7 * 1000}),
        ({"gpu.thermal_margin_k": gpus(-10, 7, other=40)}, {7: 200.0}),
        ({"gpu.temp_c": gpus(84.5, 3), "gpu.thermal_margin_k": gpus(-2, 3, other=40)}, {3: 200.0}),
        ({"rack.flow_lpm": [96.0, 35.0]}, dict.fromkeys(range(72, 144), 700.0)),
        ({"rack.flow_lpm": [0.0, 96.0]}, dict.fromkeys(range(72), 200.0)),
        ({"rack.supply_temp_c": [32.0, 45.0]}, dict.fromkeys(range(72, 144), 200.0)),
        ({"rack.return_temp_c": [64.5, 40.0]}, dict.fromkeys(range(72), 700.0)),
    ],
)  # fmt: skip
def test_what_is_capped_and_where(change: dict[str, Any], expected: dict[int, float]) -> None:
    twin = guarded()
    twin.tick(COOL | change)
    lease = twin.lease(CAP)
    found = {int(i): float(lease[i]) for i in np.flatnonzero(~np.isnan(lease))}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("flow", [18.0, 0.0])
def test_a_lost_flow_caps_the_whole_rack_within_two_ticks(flow: float) -> None:
    twin = guarded()
    twin.run(10, COOL)
    twin.tick(COOL | {"rack.flow_lpm": [96.0, flow]})
    (batch,) = twin.commands(CAP)
    assert batch.index.tolist() == list(range(72, 144))
    assert (batch.value == 200.0).all(), "at once, in the tick that hears of it"
    assert "rack.flow_lpm" in batch.reason


def test_a_silent_gpu_drifts_hot_and_is_at_its_safe_value_before_the_limit() -> None:
    twin = guarded(ALONE)
    rest = {k: v for k, v in ALONE.items() if k != "gpu.temp_c"}
    caps = []
    for _ in range(8):
        twin.tick(rest)
        caps.append(twin.lease(CAP)[0])
    # 60 degC; 8 K/s after 1.5 s of silence: 82 at 4.25 s, 87 at 4.9 s
    assert np.isnan(caps[:4]).all()
    safe_w = float(twin.site.envelopes[CAP].safe[0])
    assert safe_w > 200.0, "silence alone is not heat: it takes no GPU to its minimum"
    assert caps[4:] == [safe_w] * 4
    assert (twin.lease(CAP) == safe_w).all()
    twin.tick(COOL | {"gpu.temp_c": 90.0})
    assert (twin.lease(CAP) == 200.0).all(), "heat does"


def test_a_bad_sensor_is_as_bad_as_a_silent_one() -> None:
    twin = guarded(ALONE)
    for _ in range(8):
        twin.tick(ALONE | {"gpu.temp_c": gpus(500.0, 9)})
    assert np.flatnonzero(~np.isnan(twin.lease(CAP))).tolist() == [9]


@pytest.mark.long
def test_what_was_never_heard_is_not_capped() -> None:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    twin.run(400)
    twin.tick({"gpu.temp_c": NAN, "rack.flow_lpm": NAN})
    twin.run(400)
    assert twin.decision.commands == ()
    # Never heard is not healthy: said for each table, and nothing else is.
    assert {f.id for f in twin.decision.findings} == {
        f"unheard/{table}" for table in ("gpu", "node", "rack", "cdu", "feeder")
    }
    assert np.isnan(twin.lease(CAP)).all()


def test_a_cap_rests_at_its_lowest_for_a_minute_and_is_then_given_back() -> None:
    twin = guarded()
    seen = []
    for temp in (84.5, 86.0, 83.0, 60.0):
        twin.tick(COOL | {"gpu.temp_c": gpus(temp, 3)})
        seen.append(float(twin.lease(CAP)[3]))
    assert seen == [700.0, 400.0, 400.0, 400.0], "no pumping around the guard"
    held = 0
    while twin.lease(CAP)[3] == 400.0:
        twin.tick(COOL)
        held += 1
        assert held < 100
    assert held == RELEASE_S - 1  # since the last tick above the guard, one second earlier
    raised = [float(twin.lease(CAP)[3])]
    for _ in range(20):
        twin.tick(COOL)
        raised.append(float(twin.lease(CAP)[3]))
    assert raised[:15] == [450.0 + 50.0 * k for k in range(15)], "up at the slew limit"
    assert np.isnan(raised[-1])


def test_protection_passes_a_hold_and_an_urgent_frame() -> None:
    twin = guarded()
    twin.tick(COOL, Held(author="ann"))
    twin.tick({"rack.flow_lpm": [96.0, 0.0]}, dt_s=0.1, urgent=True)
    assert (twin.lease(CAP)[72:] == 200.0).all()


def test_nobody_widens_it() -> None:
    wish = Wish()
    twin = Twin(two_racks(), [wish, ThermalGuard()], act=True)
    wish.ask(CAP, range(144), 1100, 1200, 1200)
    twin.tick(COOL | {"gpu.temp_c": gpus(84.5, 3)})
    assert twin.lease(CAP)[3] == 700.0
    assert twin.lease(CAP)[4] == 1200.0


def test_a_replaced_gpu_starts_without_the_old_ones_episode() -> None:
    twin = guarded()
    twin.tick(COOL | {"gpu.temp_c": gpus(86.0, 3)})
    twin.tick(COOL, EntityReplaced(table="gpu", name="r1/node0/gpu3", serial="n"))
    assert np.isnan(twin.lease(CAP)[3])


@pytest.mark.parametrize("change", ["narrowed", "no cap"])
def test_a_changed_envelope_does_not_break_the_guard_in_an_episode(change: str) -> None:
    twin = guarded()
    twin.tick(COOL | {"gpu.temp_c": gpus(87.0, 3)})
    tree = copy.deepcopy(two_racks())
    profile = profile_tree("gb200-nvl72")
    if change == "narrowed":
        tree["controls"] = {CAP: {"min": 300.0}}
    else:
        tree["halls"][0]["racks"] = [{"name": "r[1-2]", "nodes": 18, "gpus_per_node": 4}]
    spec = SiteSpec(tree, {"gb200-nvl72": profile} if change == "narrowed" else {})
    twin.tick(COOL, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    twin.tick(COOL)
    assert twin.decision.findings == (), "not suspended"
    if change == "narrowed":
        assert twin.engine.in_force["thermal_guard"][0].hi[0] == 300.0
    twin.run(3, COOL)
    assert twin.engine.suspended == {}


def test_a_site_without_gpus_or_limits_is_left_alone() -> None:
    for tree in (
        {"site": "bare"},
        {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r", "nodes": 1}]}]},
    ):
        twin = Twin(tree, [ThermalGuard()], act=True)
        twin.run(3)
        assert twin.engine.suspended == {}
        assert twin.decision.commands == ()


def test_an_explanation_has_the_numbers_of_the_proposals() -> None:
    twin = guarded()
    twin.tick(COOL | {"gpu.temp_c": gpus(84.5, 3, 5), "rack.flow_lpm": [96.0, 35.0]})
    twin.tick({"gpu.temp_c": gpus(60.0, 3), "rack.flow_lpm": [96.0, 35.0]})
    found = explained(twin, "thermal_guard")
    proposals = twin.engine.in_force["thermal_guard"]
    rows = found.table("strains")
    for p in proposals:
        mine = [r for r in rows if r["reason"] == p.reason]
        assert sum(int(str(r["gpus"])) for r in mine) == len(p.index)
        assert min(r["cap_low_w"] for r in mine) == p.hi.min()  # type: ignore[type-var]
        assert max(r["cap_high_w"] for r in mine) == p.hi.max()  # type: ignore[type-var]
    assert found.tables[0].total == len(rows)
    (flow,) = (r for r in rows if r["signal"] == "rack.flow_lpm")
    assert (flow["entity"], flow["gpus"], flow["value"]) == ("lab/h/r2", 72, 35.0)
    assert (flow["guard"], flow["limit"], flow["unit"], flow["age_s"]) == (40.0, 30.0, "l/min", 0.0)
    assert (flow["basis"], flow["quality"]) == ("measured", "good")
    (rest,) = (r for r in rows if r["signal"] is None)
    assert (rest["gpus"], rest["lift"]) == (2, f"{RELEASE_S - 1:.0f} s more inside every guard")
    assert found.figure("capped_gpus") == 74
    alone = explained(twin, "thermal_guard", "r1")
    assert (alone.figure("capped_gpus"), len(alone.table("strains"))) == (2, 1)


def test_a_silent_sensor_is_explained_by_its_worst_case_and_its_age() -> None:
    twin = guarded(ALONE)
    for _ in range(8):
        twin.tick(ALONE | {"gpu.temp_c": gpus(500.0, 9)})
    (row,) = explained(twin, "thermal_guard").table("strains")
    assert (row["entity"], row["basis"], row["quality"]) == (
        "lab/h/r1/node2/gpu1",
        "worst case",
        "out_of_range",
    )
    assert (row["value"], row["age_s"]) == (60.0, 8.0)
    assert row["cap_low_w"] == twin.site.envelopes[CAP].safe[9]
