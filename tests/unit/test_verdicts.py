"""Verdicts as a whole: never healthy when unknown, no flapping, windows, restarts. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, site_of, two_racks
from tests.support.health_site import WELL, Ward, fault, on
from twin.catalogue import NS, find_signal
from twin.contracts import DEGRADED, FAILED, HEALTHY, PAIRED, PARTS, UNKNOWN, WATCH, action
from twin.engine import encode
from twin.engine.remap import slots_kept
from twin.engine.snapshot import decode
from twin.health import HealthState
from twin.health.verdicts import KEPT_S, Verdicts
from twin.telemetry import STALE_PERIODS, FaultReported, MaintenanceBegun, MaintenanceEnded

N = 144
FAILED_ROW, PENDING = "gpu.row_remap_failed_state", "gpu.row_remap_pending_state"
VITAL = ("gpu.temp_c", "gpu.power_w", "gpu.sm_clock_hz", "gpu.util_pu", "gpu.health_state")


def silent(gpus: Any) -> dict[str, Any]:
    return {key: on(N, gpus, np.nan, WELL[key]) for key in VITAL}


def test_before_anything_is_heard_all_is_unknown() -> None:
    ward = Ward(two_racks())
    ward.take({}, {}, 10.0)
    ward.judge()
    for part in PARTS:
        health = ward.verdicts.health(part)
        assert set(health.level.tolist()) <= {UNKNOWN}, part
        assert np.isnan(health.sure_pu).all(), part
        if len(health.level):
            assert "missing:everything" in {e.rule for e in ward.verdicts.evidence(part, 0)}


def test_a_gpu_that_falls_silent_is_unknown_and_comes_back_after_a_while() -> None:
    ward = Ward(two_racks())
    ward.run(10)
    ward.look(silent([5]))
    assert ward.level("gpu", 5) == UNKNOWN
    assert np.isnan(ward.verdicts.health("gpu").sure_pu[5])
    assert int(ward.verdicts.health("gpu").since_ns[5]) == ward.now_ns
    ward.run(5)
    assert ward.level("gpu", 5) == UNKNOWN  # it spoke again, but a level stays for a minute
    ward.look()
    assert ward.level("gpu", 5) == HEALTHY


def test_what_comes_and_goes_does_not_flap() -> None:
    ward = Ward(two_racks())
    ward.run(10)
    levels = []
    for k in range(60):
        ward.look({PENDING: on(N, 5, k % 6 == 0)})
        levels.append(ward.level("gpu", 5))
    assert set(levels) == {DEGRADED}


def test_no_level_becomes_better_within_its_time() -> None:
    rng = np.random.default_rng(5)
    ward = Ward(two_racks())
    ward.run(2)
    before, since = ward.verdicts.health("gpu").level, ward.verdicts.health("gpu").since_ns
    for _ in range(100):
        ward.look({FAILED_ROW: rng.random(N) < 0.02, PENDING: rng.random(N) < 0.05}
                  | silent(np.flatnonzero(rng.random(N) < 0.05)))  # fmt: skip
        health = ward.verdicts.health("gpu")
        better = health.level < before
        assert (ward.now_ns - since[better] >= KEPT_S * NS).all()
        assert (health.since_ns[health.level != before] == ward.now_ns).all()
        assert (health.since_ns[health.level == before] == since[health.level == before]).all()
        before, since = health.level, health.since_ns


def test_no_gpu_is_healthy_of_which_nothing_vital_is_heard() -> None:
    rng = np.random.default_rng(7)
    ward = Ward(two_racks())
    ward.run(2)
    for _ in range(40):
        quiet = rng.random(N) < 0.2
        ward.look(silent(np.flatnonzero(quiet)))
        level, node = ward.verdicts.health("gpu").level, ward.verdicts.health("node").level
        assert (level[quiet] >= UNKNOWN).all()
        worst = level.reshape(36, 4).max(axis=1)
        assert (node >= worst).all()


def window(ward: Ward, table: str, name: str) -> MaintenanceBegun:
    until_ns = ward.now_ns + 7200 * NS
    return MaintenanceBegun(id="w", author="ops", table=table, names=(name,), until_ns=until_ns)


def test_where_people_work_nothing_is_judged() -> None:
    ward = Ward(two_racks())
    ward.run(2)
    ward.look(None, window(ward, "node", ward.site.name("node", 2)))
    ward.look({FAILED_ROW: on(N, [9, 20], 1)}, faults=[fault("psu_lost", "node", 2)])
    assert [ward.level("gpu", i) for i in (8, 9, 11, 20)] == [UNKNOWN, UNKNOWN, UNKNOWN, FAILED]
    assert [ward.level("node", i) for i in (2, 5)] == [UNKNOWN, FAILED]
    assert [ward.level("psu", i) for i in (4, 5, 6)] == [UNKNOWN, UNKNOWN, HEALTHY]
    assert ward.evidence("gpu", 9)["maintenance"].level == UNKNOWN
    assert "row_remap_failed" not in ward.evidence("gpu", 9)
    assert ward.action("gpu", 9) == 0
    ward.look({FAILED_ROW: on(N, 9, 1)}, MaintenanceEnded(author="ops", window="w"))
    assert ward.level("gpu", 9) == FAILED
    assert "maintenance" not in ward.evidence("gpu", 9)


def test_evidence_comes_the_gravest_first() -> None:
    ward = Ward(two_racks())
    ward.look({FAILED_ROW: on(N, 5, 1), PENDING: on(N, 5, 1)}, faults=[fault("sensor_frozen", "gpu", 5)])
    told = ward.verdicts.evidence("gpu", 5)
    levels = [e.level for e in told]
    assert levels == sorted(levels, reverse=True)
    assert [e.rule for e in told][:3] == ["row_remap_failed", "row_remap_pending", "sensor_frozen"]
    assert {e.level for e in told} == {FAILED, DEGRADED, WATCH, UNKNOWN, HEALTHY}


def test_another_gpu_is_not_blamed_for_the_old_one() -> None:
    ward = Ward(two_racks())
    ward.run(2, {FAILED_ROW: on(N, 5, 1)})
    ward.state.tables["gpu"].replace(5)
    ward.inbox.forget("gpu", 5)
    for part in (ward.book, ward.rates, ward.verdicts):
        part.forget("gpu", 5)
    assert ward.level("gpu", 5) == UNKNOWN
    ward.look()
    assert ward.level("gpu", 5) == HEALTHY


def storm(ward: Ward, k: int) -> None:
    """A look with much going on, the same for the same k."""
    rng = np.random.default_rng(k)
    values = {FAILED_ROW: rng.random(N) < 0.01, PENDING: rng.random(N) < 0.02,
              "gpu.clock_event_bits": np.where(rng.random(N) < 0.1, 0x48, 0),
              "gpu.temp_c": np.where(rng.random(N) < 0.03, np.nan, 60.0 + 30 * (rng.random(N) < 0.02)),
              "node.psu1_power_w": np.where(rng.random(36) < 0.1, 0.0, 2000.0),
              "cdu.pump1_speed_pu": 0.7, "cdu.pump2_speed_pu": 0.0}  # fmt: skip
    counts = {"gpu.ecc_sbe_count": 40 * k * (np.arange(N) < 3), "node.reboot_count": k // 9,
              "gpu.throttle_thermal_ns": 10**8 * k * (np.arange(N) == 8)}  # fmt: skip
    events = [ward.xid(int(i), 79 if i % 2 else 31) for i in rng.integers(0, N, 2)]
    faults = [fault("pump_trip", "cdu", 0)] if k % 5 == 4 else [fault("psu_lost", "node", k % 7)]
    ward.look(values, *events, counts=counts, faults=faults, dt_s=20.0)


def image(ward: Ward) -> bytes:
    """All that anybody can see."""
    seen: list[Any] = []
    for part in PARTS:
        health = ward.verdicts.health(part)
        seen += [health.level, health.since_ns, health.action, health.sure_pu, health.lowered]
        for i in range(len(health.level)):
            seen.append(
                [[e.rule, e.level, e.text, e.since_ns, e.sure_pu] for e in ward.verdicts.evidence(part, i)]
            )
    return encode({"seen": seen})


def test_a_restart_decides_bit_by_bit_the_same_and_shows_the_same_evidence() -> None:
    one, other = Ward(two_racks()), Ward(two_racks())
    for k in range(10):
        storm(one, k)
        storm(other, k)
    fresh = Verdicts(other.site)
    fresh.restore(decode(encode(other.verdicts.dump())))
    other.verdicts = fresh
    assert image(one) == image(other)
    for k in range(10, 16):
        storm(one, k)
        storm(other, k)
        assert image(one) == image(other), k
    assert encode(one.verdicts.dump()) == encode(other.verdicts.dump())
    assert len(set(one.verdicts.health("gpu").level.tolist())) >= 4  # it was a storm


def test_a_changed_site_keeps_its_verdicts() -> None:
    ward = Ward(two_racks())
    watts = {"node.psu1_power_w": on(36, 2, 0.0, 2000.0)}
    ward.run(2, {FAILED_ROW: on(N, 5, 1)} | watts, faults=[fault("psu_lost", "node", 2)])
    more = site_of(two_racks(racks="r[0-2]"))
    kept = slots_kept(ward.site, more)
    moved = Verdicts(more)
    moved.adopt(ward.verdicts, kept)
    for part, table in PARTS.items():
        health, old = moved.health(part), ward.verdicts.health(part)
        pair = 2 if part in PAIRED else 1
        for new, was in enumerate(np.repeat(kept[table], pair).tolist()):
            k = was * pair + new % pair
            assert health.level[new] == (UNKNOWN if was < 0 else old.level[k])
            if was >= 0:
                mine = [e.rule for e in moved.evidence(part, new) if not e.rule.startswith("missing:")]
                assert mine == [e.rule for e in ward.verdicts.evidence(part, k)
                                if not e.rule.startswith("missing:")]  # fmt: skip


@pytest.mark.long
def test_an_engine_judges_and_tells_after_a_restart_what_it_told_before() -> None:
    pod = Twin(two_racks())
    values: dict[str, Any] = WELL | {"gpu.clock_event_bits": on(N, 5, 0x48)}
    for _ in range(30):
        pod.tick(values)
    pod.tick(values, FaultReported(table="gpu", name=pod.site.name("gpu", 20), code=79))
    pod.run(12, values)
    again = pod.restarted(two_racks(), [])
    for _ in range(2):
        for part in PARTS:
            one, other = (p.engine.health.health(part) for p in (pod, again))
            assert np.array_equal(one.level, other.level)
            assert np.array_equal(one.sure_pu, other.sure_pu, equal_nan=True)
            for i in range(len(one.level)):
                told = [p.engine.health.verdicts.evidence(part, i) for p in (pod, again)]
                assert told[0] == told[1]
        assert pod.engine.health.health("gpu").level[20] == FAILED
        assert pod.engine.health.health("node").level[5] == FAILED
        pod.run(25, values)
        again.inbox.resume(again.engine.state)
        again.run(25, values)


def as_of_1(data: dict[str, Any]) -> dict[str, Any]:
    """A dump of the health of a site in format 1."""
    verdicts, wear = dict(data["verdicts"]), dict(data["wear"])
    columns = [verdicts.pop(name) for name in ("level", "since_ns", "action", "sure_pu", "lowered")]
    verdicts["health"] = {part: [c[part] for c in columns] for part in PARTS}
    verdicts["reported"] = {part: [0, bits] for part, bits in verdicts.pop("bits").items()}
    wear["points"] = {
        what: [points["index"], points["value"], points["reference"]]
        for what, points in wear["points"].items()
    }
    return {**data, "format": 1, "verdicts": verdicts, "wear": wear}


def test_the_format_before_is_read_and_any_other_one_is_judged_anew() -> None:
    pod = Twin(two_racks())
    values: dict[str, Any] = WELL | {"gpu.clock_event_bits": on(N, 5, 0x48)}
    pod.run(30, values)
    data = pod.engine.health.dump()
    back, other = HealthState(pod.site), HealthState(pod.site)
    back.restore(decode(encode(as_of_1(data))))
    assert encode(back.dump()) == encode(data)
    assert (back.health("gpu").level != UNKNOWN).any()
    other.restore(data | {"format": 99})
    assert (other.health("gpu").level == UNKNOWN).all()


@pytest.mark.parametrize(
    ("part", "key"), [("psu", "node.psu2_power_w"), ("pump", "cdu.pump2_speed_pu")], ids=("psu", "pump")
)
def test_one_reading_that_is_missed_is_no_silence(part: str, key: str) -> None:
    signal = find_signal(key)
    assert signal is not None
    ward = Ward(two_racks(periods_s={key: signal.period_s}))
    well = {"cdu.pump1_speed_pu": 0.6, "cdu.pump2_speed_pu": 0.6}
    ward.run(10, well)
    for _ in range(round(STALE_PERIODS * signal.period_s / 10.0)):
        ward.look(well | {key: np.nan})
        assert [ward.level(part, i) for i in (0, 1)] == [HEALTHY, HEALTHY]
    ward.look(well | {key: np.nan})
    assert [ward.level(part, i) for i in (0, 1)] == [HEALTHY, UNKNOWN]
    assert "life" in ward.evidence(part, 1) or ward.verdicts.evidence(part, 1)[0].rule == "missing:everything"


def test_a_supply_that_never_reported_is_unknown() -> None:
    ward = Ward(two_racks())
    ward.run(3, {"node.psu2_power_w": np.nan})
    assert [ward.level("psu", i) for i in (0, 1)] == [HEALTHY, UNKNOWN]


def test_a_node_tells_why_what_is_to_be_done_is_to_be_done() -> None:
    ward = Ward(two_racks())
    ward.run(3)
    ward.look({PENDING: on(N, 5, 1)}, faults=[fault("xid_burst", "gpu", 5, sure=0.9)])
    assert ward.action("node", 1) == action("run_diagnostics")
    (told,) = (e.text for e in ward.evidence("node", 1).values())
    assert told == ("gpu1 is degraded: a row of its memory waits to be remapped, which needs a reset; "
                    "it keeps reporting errors: xid_burst was seen")  # fmt: skip
    # One that is healthy, and for which there is something to be done all the same
    ward.look({"gpu.clock_event_bits": np.where(np.arange(N) < 72, 0x20, 0)})
    assert (ward.level("node", 9), ward.action("node", 9)) == (HEALTHY, action("check_facility"))
    texts = [e.text for e in ward.verdicts.evidence("node", 9) if e.rule == "gpu:lowered_facility"]
    assert texts == ["gpu0 is healthy: heat lowers its clock; the cause is the facility or the rack, not "
                     "this GPU"]  # told once, not of each GPU  # fmt: skip
    assert not ward.evidence("node", 30)


def test_an_unknown_part_says_that_nothing_shows_its_life() -> None:
    ward = Ward(two_racks())
    ward.run(3)
    ward.look(silent([5]))
    assert ward.evidence("gpu", 5)["life"].level == UNKNOWN
    assert ward.evidence("node", 1)["gpu:life"].text.startswith(
        "gpu1 is unknown: nothing shows that it is well"
    )
    ward.look(None, window(ward, "node", ward.site.name("node", 2)))
    assert list(ward.evidence("gpu", 9)) == ["maintenance"]


@pytest.mark.parametrize(
    ("key", "level"),
    [("gpu.util_pu", UNKNOWN), ("gpu.power_w", UNKNOWN), ("gpu.sm_clock_hz", UNKNOWN),
     ("gpu.temp_c", HEALTHY), ("gpu.health_state", HEALTHY)],
)  # fmt: skip
def test_that_a_gpu_works_does_not_say_that_it_is_well(key: str, level: int) -> None:
    ward = Ward(two_racks())
    for _ in range(3):
        ward.take({key: 1.0 if key != "gpu.health_state" else 0.0, "node.power_w": 4000.0}, {}, 10.0)
        ward.judge()
    assert (ward.level("gpu", 5), ward.level("node", 1)) == (level, level)
