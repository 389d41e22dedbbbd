"""leak_guard: one detector is no reason to act, two are; what follows, in which order, what people may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.leak_guard import GRACE_S, HOLD_S, JOIN_S, LeakGuard
from policies.leak_guard.switches import POWER
from policies.operator import Operator
from tests.support.builders import Twin, explained, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, ContractError
from twin.telemetry import events as ev

LIQUID, ELECTRICAL = "rack.liquid_isolation", "rack.electrical_isolation"
SAVE, CAP, SERVICE = "job.checkpoint_since_s", "gpu.power_cap_w", "node.service_level"
DRY: dict[str, Any] = {
    "gpu.power_limit_w": 1200.0,
    "node.leak_state": 0.0,
    "rack.leak_state": 0.0,
    "rack.liquid_isolation_state": 0.0,
    "rack.electrical_isolation_state": 0.0,
    "node.service_level_state": 0.0,
}
JOB = ev.JobStarted(id="j", job="train", nodes=("r1/node3", "r2/node0"), kind="training")
FULL = {"cdu.supply_pressure_pa": 230e3, "cdu.return_pressure_pa": 150e3, "cdu.fill_pump_state": 0.0}
LOW = {"cdu.supply_pressure_pa": 205e3, "cdu.return_pressure_pa": 125e3}


def trays(*wet: int, n: int = 36) -> list[float]:
    return [1.0 if i in wet else 0.0 for i in range(n)]


def guarded(authority: str = "act", **more: Any) -> Twin:
    policies = [LeakGuard(), Operator()]
    twin = Twin(two_racks(**more), policies, authority={"leak_guard": authority, "operator": "act"})
    twin.tick(DRY, JOB)
    return twin


def leaking(twin: Twin) -> list[int]:
    """Racks that the policy holds for leaking."""
    return np.flatnonzero(twin.engine.memory["leak_guard"]["since_ns"]).tolist()


@pytest.mark.parametrize(
    ("wet", "expected"),
    [
        ({"node.leak_state": trays(4)}, []),
        ({"rack.leak_state": [1.0, 0.0]}, []),
        ({"node.leak_state": trays(4, 5)}, [0]),
        ({"node.leak_state": trays(20), "rack.leak_state": [0.0, 1.0]}, [1]),
        ({"node.leak_state": trays(20), "rack.leak_state": [1.0, 0.0]}, []),
        ({"node.leak_state": trays(4), "rack.tray_leak_state": [1.0, 0.0]}, []),  # the same detector twice
        ({"rack.tray_leak_state": [1.0, 0.0], "rack.leak_state": [1.0, 0.0]}, []),  # one system says both
        ({"cdu.leak_state": 1.0, "hall.leak_state": 1.0}, []),  # whose leak it is, nobody says
        ({"cdu.leak_state": 1.0, "node.leak_state": trays(4)}, [0]),
        ({"hall.leak_state": 1.0, "rack.leak_state": [0.0, 1.0]}, []),  # the building's both
        ({"rack.leak_state": [1.0, 0.0], "cdu.leak_state": 1.0, "node.leak_state": trays(4)}, [0]),
        (
            {"rack.leak_state": [1.0, 0.0], "rack.leak_sensor_fault_state": 1.0, "node.leak_state": trays(4)},
            [],
        ),
    ],
)
def test_two_independent_detectors_are_needed(wet: dict[str, Any], expected: list[int]) -> None:
    twin = guarded()
    twin.tick(DRY | wet)
    assert leaking(twin) == expected


@pytest.mark.parametrize(
    ("systems", "wet", "expected"),
    [
        ({"ropes": "panel"}, {"rack.tray_leak_state": [1.0, 0.0], "rack.leak_state": [1.0, 0.0]}, [0]),
        ({"halls": "fire"}, {"hall.leak_state": 1.0, "rack.leak_state": [0.0, 1.0]}, [1]),
        ({"circuits": "cdus"}, {"cdu.leak_state": 1.0, "rack.leak_state": [0.0, 1.0]}, [1]),
        ({}, {"cdu.leak_state": 1.0, "rack.leak_state": [0.0, 1.0]}, []),
        ({"trays": "rmc"}, {"node.leak_state": trays(4, 5)}, []),
        ({"trays": "rmc"}, {"node.leak_state": trays(4, 5), "rack.leak_state": [1.0, 0.0]}, [0]),
        ({"trays": "building"}, {"node.leak_state": trays(4, 5), "rack.leak_state": [1.0, 0.0]}, []),
    ],
)
def test_a_site_says_which_system_reads_which_detectors(
    systems: dict[str, str], wet: dict[str, Any], expected: list[int]
) -> None:
    twin = Twin(two_racks(), [LeakGuard(**systems)], act=True)
    twin.tick(DRY)
    twin.tick(DRY | wet)
    assert leaking(twin) == expected


OF_SYSTEM: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "building": (
        {},
        {
            "rack.leak_state": 2,
            "rack.tray_leak_state": 2,
            "cdu.leak_state": 1,
            "hall.leak_state": 1,
        },
    ),
    "controllers": (
        {},
        {
            "cdu.fill_pump_state": 1,
            "cdu.supply_pressure_pa": 1,
            "cdu.return_pressure_pa": 1,
        },
    ),
    "board": ({}, {"node.leak_state": 1}),
    "gateway of boards": ({"trays": "rmc"}, {"node.leak_state": 36}),
}


@pytest.mark.parametrize("system", OF_SYSTEM)
@pytest.mark.parametrize("seed", range(2))
def test_nothing_that_one_system_says_isolates_a_rack(system: str, seed: int) -> None:
    settings, keys = OF_SYSTEM[system]
    rng = np.random.default_rng(seed)
    twin = Twin(two_racks(), [LeakGuard(**settings)], act=True)
    dry = DRY | {"rack.tray_leak_state": 0.0, "cdu.leak_state": 0.0, "hall.leak_state": 0.0} | FULL
    twin.run(3, dry)
    for _ in range(40):
        says: dict[str, Any] = {}
        for key, n in keys.items():
            values = rng.choice([0.0, 1.0, np.nan], n, p=[0.2, 0.6, 0.2])
            if key.endswith("_pa"):
                values = np.where(values == 1.0, 5e3, FULL[key])
            says[key] = values if key != "node.leak_state" or n > 1 else [*values, *[0.0] * 35]
        twin.tick(dry | says, dt_s=float(rng.choice([1.0, 30.0, 1800.0])))
        assert leaking(twin) == []
    assert not twin.commands(LIQUID)


def test_a_system_without_a_name_is_refused() -> None:
    with pytest.raises(ContractError, match="ropes: expected the name of a system"):
        LeakGuard(ropes="")


def test_detectors_that_flap_one_after_the_other_count_together() -> None:
    twin = guarded()
    for _ in range(3):
        twin.tick(DRY | {"node.leak_state": trays(4)})
        twin.tick(DRY, dt_s=HOLD_S - 10)
    twin.tick(DRY | {"node.leak_state": trays(9)})
    assert leaking(twin) == [0]


@pytest.mark.long
def test_single_flickers_of_many_detectors_isolate_nothing() -> None:
    twin = guarded()
    for tray in (*range(8), *range(8)):
        twin.tick(DRY | {"node.leak_state": trays(tray)})
        twin.run(20, DRY)
    assert leaking(twin) == []
    twin.run(5, DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY | {"node.leak_state": trays(4, 12)})
    assert leaking(twin) == [0], "two are wet now"
    twin.run(100, DRY | {"node.leak_state": trays(4)})
    assert leaking(twin) == [], "and one of them for a moment"
    assert np.isnan(twin.lease(LIQUID)).all()
    assert np.isnan(twin.lease(SERVICE)).all()


@pytest.mark.parametrize("readings, expected", [(1, []), (2, [0])])
def test_one_drop_is_forgotten_but_not_what_was_wet_twice(readings: int, expected: list[int]) -> None:
    twin = guarded()
    twin.run(readings, DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY, dt_s=30 * 86_400.0)
    twin.tick(DRY | {"node.leak_state": trays(9)})
    assert leaking(twin) == expected


def cleared(twin: Twin, identity: str = "o") -> ev.OperatorRequest:
    return ev.OperatorRequest(
        id=identity, author="ada", control=LIQUID, names=("r1",), lo=0.0, hi=0.0, want=0.0,
        expires_ns=twin.now_ns + 3600 * NS,
    )  # fmt: skip


def test_people_clear_a_wet_detector_once() -> None:
    """A request that goes on standing clears nothing that comes later."""
    twin = guarded()
    twin.run(3, DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY, cleared(twin))
    twin.tick(DRY, dt_s=HOLD_S + 10)
    twin.run(3, DRY | {"node.leak_state": trays(9)})
    assert leaking(twin) == [], "the first one is forgotten"
    twin.tick(DRY, dt_s=HOLD_S + 10)
    twin.tick(DRY | {"node.leak_state": trays(11)})
    assert leaking(twin) == [0]


def test_what_flaps_or_is_silent_is_not_cleared() -> None:
    twin = guarded()
    twin.run(3, DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY, cleared(twin))
    twin.run(60, DRY)
    assert twin.engine.memory["leak_guard"]["tray_first_ns"].any(), "dry for a minute is not dry"
    silent = {k: v for k, v in DRY.items() if k != "node.leak_state"}
    for _ in range(10):
        twin.tick(silent, dt_s=60.0)
    assert twin.engine.memory["leak_guard"]["tray_first_ns"].any(), "silent is not dry"
    twin.tick(DRY)
    assert not twin.engine.memory["leak_guard"]["tray_first_ns"].any()


@pytest.mark.long
def test_what_comes_at_one_instant_from_many_racks_is_one_witness_each() -> None:
    """As after a bad release of an agent or of the building's system: nothing is powered down."""
    many = two_racks(racks="r[1-4]")
    twin = Twin(many, [LeakGuard()], act=True)
    dry = DRY | {"node.leak_state": 0.0, "rack.tray_leak_state": 0.0}
    twin.run(3, dry)
    for values in (
        {"node.leak_state": [float(i % 18 in (3, 4, 5)) for i in range(72)]},
        {"rack.leak_state": [1.0] * 4, "rack.tray_leak_state": [1.0] * 4},
        {"node.leak_state": trays(*range(18, 30), n=72)},
    ):
        found = Twin(many, [LeakGuard()], act=True)
        found.run(3, dry)
        found.run(90, dry | values)
        assert leaking(found) == [], values
        assert np.isnan(found.lease(CAP)).all()
    found.run(3, dry | values | {"rack.leak_state": [0.0, 1.0, 0.0, 0.0]})
    assert leaking(found) == [1], "and the rope of that rack agrees later"


def test_what_turns_out_to_be_everywhere_is_let_go_before_anything_is_isolated() -> None:
    twin = Twin(two_racks(racks="r[1-4]"), [LeakGuard()], act=True)
    twin.run(3, DRY)
    wet = trays(4, 5, 6, n=72)
    twin.tick(DRY | {"node.leak_state": wet})
    assert leaking(twin) == [0]
    wet = trays(4, 5, 6, 20, 21, 40, n=72)
    twin.run(100, DRY | {"node.leak_state": wet})
    assert leaking(twin) == []
    assert np.isnan(twin.lease(LIQUID)).all()


@pytest.mark.long
def test_what_is_around_speaks_against_one_rack_of_two() -> None:
    """The one whose detector became wet last: the other one's has been wet for long, and may lie."""
    twin = guarded()
    twin.run(100, DRY | {"node.leak_state": trays(4)})
    twin.run(3, DRY | {"node.leak_state": trays(4, 20), "cdu.leak_state": 1.0})
    assert leaking(twin) == [1]
    twin.run(100, DRY | {"node.leak_state": trays(4, 20), "cdu.leak_state": 1.0, "hall.leak_state": 1.0})
    assert leaking(twin) == [1]
    twin.run(3, DRY | {"node.leak_state": trays(4, 5, 20), "cdu.leak_state": 1.0})
    assert leaking(twin) == [0, 1], "a detector of its own agrees"


@pytest.mark.long
def test_a_detector_that_was_wet_for_days_is_no_second_witness() -> None:
    twin = guarded()
    twin.run(3, DRY | {"node.leak_state": trays(4)})
    for _ in range(48):
        twin.tick(DRY | {"node.leak_state": trays(4)}, dt_s=3600.0)
    twin.run(100, DRY | {"node.leak_state": trays(4), "cdu.leak_state": 1.0})
    assert leaking(twin) == []


def missing(twin: Twin) -> bool:
    return any(f.kind == "coolant_loss" for f in twin.engine.diagnosis.faults)


def test_missing_coolant_is_no_graver_alarm_each_time_that_a_detector_is_not_read() -> None:
    """A graver finding is journaled again: once a second for detectors that are read now and then."""
    twin = guarded()
    twin.run(3, DRY | FULL)
    twin.run(15, DRY | FULL | LOW)
    (heard,) = (f for f in twin.engine.diagnosis.faults if f.kind == "coolant_loss")
    twin.run(2, DRY | FULL | LOW | {"rack.leak_state": [np.nan, 0.0]})
    (deaf,) = (f for f in twin.engine.diagnosis.faults if f.kind == "coolant_loss")
    assert len(deaf.evidence) == len(heard.evidence) + 1
    assert deaf.count == heard.count


def test_coolant_that_is_missing_is_an_alarm_and_a_witness() -> None:
    twin = guarded()
    twin.run(3, DRY | FULL)
    twin.run(15, DRY | FULL | LOW)
    assert missing(twin)
    assert leaking(twin) == []
    assert not twin.commands()
    rows = explained(twin, "leak_guard").table("suspects")
    assert [row["rack"] for row in rows] == ["lab/h/r1", "lab/h/r2"]
    twin.tick(DRY | FULL | LOW | {"rack.leak_state": [0.0, 1.0]})
    assert leaking(twin) == [1]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"cdu.return_pressure_pa": 125e3}, id="one meter alone"),
        pytest.param({"cdu.return_pressure_pa": 15e3}, id="a tenth"),
        pytest.param({"cdu.supply_pressure_pa": 180e3, "cdu.return_pressure_pa": 150e3}, id="a pump"),
        pytest.param({"cdu.supply_pressure_pa": 222e3, "cdu.return_pressure_pa": 143e3}, id="cooler"),
        pytest.param({"cdu.fill_pump_state": 1.0}, id="a top-up"),
    ],
)
def test_what_is_no_loss_of_coolant(values: dict[str, Any]) -> None:
    twin = guarded()
    twin.run(3, DRY | FULL)
    twin.run(120, DRY | FULL | values)
    assert not missing(twin)
    twin.run(3, DRY | FULL | values | {"rack.leak_state": [0.0, 1.0]})
    assert leaking(twin) == []


def at_temperature(warmer_k: float, lost_pu: float = 0.0, vessel: float = 1.0) -> dict[str, float]:
    """Readings of a circuit so much warmer, that lost this share of its gas's volume in coolant: p V stays.

    A vessel of 1 has 0.23 l of gas per litre of coolant, which expands by 4e-4/K.
    """
    gas = 1.0 + lost_pu - 4e-4 * warmer_k / (0.23 * vessel)
    static_pa = (150e3 + 101_325.0) / gas - 101_325.0
    return {
        "cdu.supply_pressure_pa": static_pa + 80e3,
        "cdu.return_pressure_pa": static_pa,
        "cdu.fill_pump_state": 0.0,
        "cdu.supply_temp_c": 32.0 + warmer_k,
        "cdu.return_temp_c": 42.0 + warmer_k,
    }


@pytest.mark.parametrize("vessel", sampled([0.5, 1.0, 5.0], 1.0))
@pytest.mark.parametrize("warmer_k", [-20.0, -10.0, 10.0, 20.0])
def test_coolant_that_warms_or_cools_is_not_missing_and_what_leaks_then_is(
    warmer_k: float, vessel: float
) -> None:
    twin = guarded()
    twin.run(3, DRY | at_temperature(0.0))
    for step in range(1, 41):
        twin.tick(DRY | at_temperature(warmer_k * step / 40.0, vessel=vessel), dt_s=15.0)
        assert not missing(twin)
    twin.run(30, DRY | at_temperature(warmer_k, vessel=vessel))
    assert not missing(twin)
    twin.run(15, DRY | at_temperature(warmer_k, 0.25, vessel))
    assert missing(twin)


def test_a_leak_of_a_tenth_of_the_gas_is_told_in_a_warm_circuit_that_is_as_usual() -> None:
    twin = guarded()
    twin.run(3, DRY | at_temperature(10.0))
    twin.run(15, DRY | at_temperature(10.0, 0.08))
    assert missing(twin)


def test_a_fill_pump_that_begins_again_within_a_day_tells_a_loss() -> None:
    twin = guarded()
    twin.run(3, DRY | FULL)
    fills = FULL | {"cdu.fill_pump_state": 1.0}
    twin.run(30, DRY | fills)
    twin.tick(DRY | FULL, dt_s=3600.0)
    twin.run(30, DRY | fills)
    assert missing(twin)


def test_who_works_on_a_circuit_bleeds_and_fills_it() -> None:
    twin = guarded()
    twin.tick(
        DRY | FULL,
        ev.MaintenanceBegun(
            id="m",
            author="ada",
            table="rack",
            names=("r2",),
            until_ns=twin.now_ns + 3600 * NS,
            reason="a hose",
        ),
    )
    twin.run(60, DRY | FULL | LOW)
    assert not missing(twin)


BOARDS = {"node.power_readback_state": 0.0}


def test_wet_trays_and_those_below_go_off_and_the_others_stop() -> None:
    tree = two_racks(controls={SERVICE: {"blast_radius": 36}})
    tree["halls"][0]["racks"][0]["nodes_from"] = "bottom"
    twin = Twin(tree, [LeakGuard()], act=True)
    twin.run(2, DRY | BOARDS)
    twin.run(2 + round(GRACE_S), DRY | BOARDS | {"node.leak_state": trays(4, 5)})
    power = twin.lease(POWER)
    assert (power[:6] == 2.0).all(), "wet, or below"
    assert (power[6:18] == 1.0).all(), "without coolant"
    assert np.isnan(power[18:]).all(), "the other rack"
    said = {p.reason for p in twin.engine.in_force["leak_guard"] if p.control == POWER}
    why = "two or more detectors or signs show that lab/h/r1 leaks"
    assert said == {
        f"switch off wet equipment and everything below it: {why}",
        f"stop equipment that loses its coolant: {why}",
    }


def test_where_nobody_says_which_way_water_runs_every_tray_of_the_rack_goes_off() -> None:
    twin = guarded()
    twin.run(3, DRY | BOARDS)
    twin.run(2 + round(GRACE_S), DRY | BOARDS | {"node.leak_state": trays(4, 5)})
    assert (twin.lease(POWER)[:18] == 2.0).all()
    assert np.isnan(twin.lease(POWER)[18:]).all()


@pytest.mark.long
def test_a_node_that_people_switch_on_again_is_theirs_until_more_is_wet() -> None:
    twin = guarded()
    wet = DRY | {"node.leak_state": trays(4, 5)}
    twin.run(3, DRY | BOARDS)
    twin.run(2 + round(GRACE_S), wet | BOARDS)
    twin.run(3, wet | {"node.power_readback_state": [2.0] * 18 + [0.0] * 18})
    by_hand = {"node.power_readback_state": [2.0] * 3 + [0.0] + [2.0] * 14 + [0.0] * 18}
    for _ in range(200):
        twin.tick(wet | by_hand)
        assert not [c for c in twin.commands(POWER) if 3 in c.index]
    assert np.isnan(twin.lease(POWER)[3])
    assert any("switched on" in s.text for s in explained(twin, "leak_guard").sentences)
    twin.run(2, DRY | {"node.leak_state": trays(4, 5, 9)} | by_hand)
    assert twin.lease(POWER)[3] == 2.0


def test_a_request_for_power_does_not_bring_back_a_node_of_a_rack_that_nobody_cleared() -> None:
    twin = guarded()
    twin.run(3, DRY | BOARDS)
    twin.run(2 + round(GRACE_S), DRY | BOARDS | {"node.leak_state": trays(4, 5)})
    off = DRY | {"node.power_readback_state": [2.0] * 18 + [0.0] * 18}
    ask = ev.OperatorRequest(
        id="on", author="ada", control=POWER, names=("r1/node4",), lo=0.0, hi=0.0, want=0.0,
        expires_ns=twin.now_ns + 900 * NS,
    )  # fmt: skip
    twin.run(3, off)
    twin.tick(off, ask)
    twin.run(3, off)
    assert twin.lease(POWER)[4] == 2.0
    twin.tick(off, cleared(twin))
    twin.tick(off, dt_s=HOLD_S + 10)
    twin.run(3, off)
    assert twin.lease(POWER)[4] == 0.0, "it is cleared, and the request stands"


def test_it_saves_and_powers_down_at_once_and_isolates_after_the_grace() -> None:
    twin = guarded(controls={SERVICE: {"blast_radius": 36}})
    twin.tick(DRY | {"node.leak_state": trays(4, 5)})
    found_s = twin.now_ns // NS
    assert twin.lease(SAVE)[0] == found_s
    caps = twin.lease(CAP)
    assert (caps[:72] == 200.0).all()
    assert np.isnan(caps[72:]).all(), "the other rack is left alone"
    assert np.isnan(twin.lease(SERVICE)).all(), "it may flicker"
    twin.run(2, DRY | {"node.leak_state": trays(4, 5)})
    assert (twin.lease(SERVICE)[:18] == 3.0).all()
    assert np.isnan(twin.lease(LIQUID)).all()
    for _ in range(int(GRACE_S) - 1):
        twin.tick(DRY | {"node.leak_state": trays(4, 5)})
    assert twin.lease(LIQUID)[0] == twin.lease(ELECTRICAL)[0] == 1.0
    assert np.isnan(twin.lease(LIQUID)[1])


def test_water_that_spreads_does_not_wait() -> None:
    twin = guarded()
    twin.run(1 + round(JOIN_S), DRY | {"node.leak_state": trays(4, 5, 6, 7)})
    assert twin.lease(LIQUID)[0] == twin.lease(ELECTRICAL)[0] == 1.0


def test_advise_says_it_and_commands_nothing() -> None:
    twin, advice = guarded("advise"), set()
    for _ in range(5):
        decision = twin.tick(DRY | {"node.leak_state": trays(4, 5, 6, 7)})
        assert not decision.commands
        advice |= {c.control for c in decision.advice}
    assert advice == {SAVE, CAP, SERVICE, LIQUID, ELECTRICAL, POWER}


def approval(identity: str, *names: str) -> ev.Approved:
    return ev.Approved(id=identity, author="ada", policy="leak_guard", control=LIQUID, names=names)


def test_an_approval_isolates_one_rack() -> None:
    twin = guarded("approve")
    wet = DRY | {"node.leak_state": trays(4, 5, 6, 7, 20, 21, 22, 23)}
    twin.run(3, wet)
    twin.tick(wet, approval("all"), approval("both", "r1", "r2"))
    refused = [r["refused"] for r in twin.records("event") if "refused" in r]
    assert len(refused) == 2
    assert all("exactly one rack" in why for why in refused)
    assert np.isnan(twin.lease(LIQUID)).all()
    twin.tick(wet, approval("one", "r2"))
    assert twin.lease(LIQUID)[1] == 1.0
    assert np.isnan(twin.lease(LIQUID)[0])


@pytest.mark.long
def test_an_isolation_without_echo_is_an_alarm() -> None:
    twin = guarded()
    wet = DRY | {"node.leak_state": trays(4, 5, 6, 7)}
    for _ in range(120):
        twin.tick(wet)
    assert any(LIQUID in f.id for f in twin.decision.findings), [f.id for f in twin.decision.findings]


def test_once_isolated_it_stays_so_when_all_is_dry_until_a_person_opens_it() -> None:
    twin = guarded()
    twin.run(4, DRY | {"node.leak_state": trays(4, 5, 6, 7)})
    shut = DRY | {"rack.liquid_isolation_state": [1.0, 0.0], "rack.electrical_isolation_state": [1.0, 0.0]}
    twin.tick(shut, dt_s=HOLD_S + 60)
    twin.tick(shut, dt_s=400.0)
    assert leaking(twin) == [0]
    assert all(c.value.max() == 1.0 for c in twin.decision.commands if c.control == LIQUID)
    opened = ev.OperatorRequest(id="o", author="ada", control=LIQUID, names=("r1",), lo=0.0, hi=0.0, want=0.0)
    twin.tick(shut | {"node.leak_state": trays(4)}, opened)
    assert leaking(twin) == [0], "still wet: the request of a person does not open a leaking rack"
    twin.tick(shut, dt_s=HOLD_S + 60)
    twin.tick(shut)
    assert leaking(twin) == []
    assert twin.lease(LIQUID)[0] == 0.0


def test_an_explanation_has_the_numbers_of_the_proposals() -> None:
    twin = guarded()
    twin.run(2, DRY | {"node.leak_state": trays(4, 5, 20), "hall.leak_state": 0.0})
    twin.run(9, DRY | {"node.leak_state": trays(5, 20)})
    found = explained(twin, "leak_guard")
    leaking, alarm = found.table("racks")
    assert (leaking["rack"], leaking["detectors"], leaking["since_s"]) == ("lab/h/r1", 2, 10.0)
    assert leaking["isolates_s"] == GRACE_S - 10.0
    by_control = {p.control: p for p in twin.engine.in_force["leak_guard"]}
    assert leaking["gpus"] == len(by_control[CAP].index)
    assert leaking["nodes"] == len(by_control[SERVICE].index)
    assert leaking["jobs"] == len(by_control[SAVE].index)
    assert (alarm["rack"], alarm["detectors"], alarm["isolates_s"]) == ("lab/h/r2", 1, None)
    rows = [(r["entity"], r["value"], r["age_s"], r["quality"]) for r in found.table("detectors")]
    assert rows == [
        ("lab/h/r1/node4", 0.0, 0.0, "good"),
        ("lab/h/r1/node5", 1.0, 0.0, "good"),
        ("lab/h/r2/node2", 1.0, 0.0, "good"),
    ]
    twin.tick(DRY | {"node.leak_state": trays(5, 20)}, dt_s=GRACE_S - 10.0)
    assert explained(twin, "leak_guard", "r1").table("racks")[0]["isolates_s"] == 0.0
    assert LIQUID in {p.control for p in twin.engine.in_force["leak_guard"]}
