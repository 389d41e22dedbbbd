"""Learned cadence and what follows from silence: healthy sources of any period raise nothing, faults do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.thermal_guard import ThermalGuard
from tests.support.builders import Twin, two_racks
from twin.catalogue import NS, find_signal
from twin.contracts import Finding
from twin.telemetry import MaintenanceBegun, Reading

GUARD, LIMIT = 82.0, 87.0  # of gpu.temp_c in the profile


def gpus(rng: np.random.Generator, n: int, **more: Any) -> dict[str, Any]:
    """Return readings of healthy GPUs as an exporter gives them."""
    return {"gpu.temp_c": rng.integers(48, 54, n), "gpu.power_w": rng.uniform(380, 420, n), **more}


def grave(twin: Twin) -> list[str]:
    """Findings that are more than information, but for what was never heard."""
    active = twin.engine.findings.active.values()
    return [f.id for f in active if f.severity != "info" and not f.id.startswith("unheard/")]


def critical(twin: Twin) -> list[str]:
    return [f.id for f in twin.engine.findings.active.values() if f.severity == "critical"]


def found(twin: Twin, identity: str) -> Finding:
    return twin.engine.findings.active[identity]


@pytest.mark.long
def test_gpus_that_are_scraped_every_15_s_raise_nothing_and_are_not_capped() -> None:
    twin, rng = Twin(two_racks(), [ThermalGuard()]), np.random.default_rng(1)
    n = twin.site.sizes["gpu"]
    for number in range(120):
        twin.tick(gpus(rng, n) if number % 3 == 0 else None, dt_s=5.0)
        assert grave(twin) == []
        assert not twin.engine.in_force["thermal_guard"]
    for _ in range(20):
        twin.tick(dt_s=5.0)
        assert critical(twin) == []
    (silence,) = grave(twin)
    assert silence.startswith("silence/"), "a scrape that stops is told within seven of its periods"


@pytest.mark.long
@pytest.mark.parametrize(("before", "lost"), [(3, 1), (12, 2), (40, 1)])
def test_a_lost_scrape_of_healthy_gpus_is_nothing(before: int, lost: int) -> None:
    """DCGM is the only source, and nobody knows what the coolant does."""
    twin, rng = Twin(two_racks(), [ThermalGuard()]), np.random.default_rng(8)
    n = twin.site.sizes["gpu"]
    for number in range(6 * (before + lost + 2)):
        heard = number % 6 == 0 and not before <= number // 6 < before + lost
        twin.tick(gpus(rng, n) if heard else None, dt_s=2.5)
        assert grave(twin) == []
        assert not twin.engine.in_force["thermal_guard"]


@pytest.mark.long
def test_scrapes_of_which_a_third_is_lost_raise_nothing() -> None:
    twin, rng = Twin(two_racks(), [ThermalGuard()]), np.random.default_rng(9)
    site = twin.site
    for number in range(3 * 80):
        if number % 3 == 0:
            lost = rng.uniform(size=site.sizes["node"]) < 0.3
            for i in np.flatnonzero(~lost[site.node_of_gpu]).tolist():
                at_ns = twin.now_ns + 5 * NS
                twin.inbox.put(Reading("gpu", i, "temp_c", float(rng.integers(48, 54)), at_ns), at_ns)
        twin.tick(dt_s=5.0)
        assert grave(twin) == []
        assert not twin.engine.in_force["thermal_guard"]


@pytest.mark.parametrize("period_s", [10, 60])
def test_telegraf_of_any_interval_raises_nothing(period_s: int) -> None:
    twin, rng = Twin(two_racks()), np.random.default_rng(2)
    n = twin.site.sizes["gpu"]
    due_s = period_s * np.arange(12) + rng.uniform(0, 2, 12)  # its flush jitters
    for number in range(24):
        came = ((due_s > (number - 1) * period_s / 2) & (due_s <= number * period_s / 2)).any()
        twin.tick(gpus(rng, n) if came else None, dt_s=period_s / 2)
        assert grave(twin) == []


def test_a_hot_gpu_is_critical_at_any_cadence() -> None:
    twin, rng = Twin(two_racks()), np.random.default_rng(3)
    n = twin.site.sizes["gpu"]
    for number in range(40):
        values = gpus(rng, n)
        if number > 30:
            values["gpu.temp_c"] = np.where(np.arange(n) == 7, 92.0, 50.0)
        twin.tick(values if number % 3 == 0 else None, dt_s=5.0)
    finding = found(twin, "beyond/gpu.temp_c/limit")
    assert (finding.severity, finding.count) == ("critical", 1)


def test_a_gpu_that_reported_every_second_and_falls_silent_is_feared_for() -> None:
    twin, rng = Twin(two_racks(), [ThermalGuard()]), np.random.default_rng(4)
    n = twin.site.sizes["gpu"]
    for _ in range(40):
        twin.tick(gpus(rng, n))
    twin.run(8)
    assert twin.engine.in_force["thermal_guard"]
    assert critical(twin) == [], "silence alone is never critical"


@pytest.mark.long
def test_a_gpu_whose_coolant_flows_is_feared_no_hotter_than_its_power_can_make_it() -> None:
    rng = np.random.default_rng(6)
    signal = find_signal("gpu.temp_c")
    assert signal is not None

    def worst(*, flow_lpm: float, silent_s: int) -> float:
        twin = Twin(two_racks())
        n = twin.site.sizes["gpu"]
        rack = {"rack.supply_temp_c": 30.0, "rack.flow_lpm": flow_lpm}
        twin.run(40, gpus(rng, n) | {"gpu.power_w": 200.0, "gpu.temp_c": 40.0} | rack)
        twin.run(silent_s, rack)
        return float(twin.engine.view().worst("gpu.temp_c").max())

    nominal = worst(flow_lpm=115.0, silent_s=15)
    # 30 degC, 0.028 K/W at its 1200 W with a tenth to spare, and 3 K of sensors
    assert nominal == pytest.approx(30.0 + 1.1 * 34.0 + 3.0, abs=0.5)
    assert nominal < GUARD
    assert worst(flow_lpm=115.0, silent_s=3) == pytest.approx(40.0 + 8.0 * 1.5, abs=0.1)
    assert worst(flow_lpm=60.0, silent_s=15) > nominal
    assert worst(flow_lpm=5.0, silent_s=15) == signal.high, "stagnant: as fast as a plate can heat"


def test_a_rack_that_is_not_heard_bounds_nothing() -> None:
    twin, rng = Twin(two_racks()), np.random.default_rng(7)
    twin.run(40, gpus(rng, twin.site.sizes["gpu"]))
    twin.run(15)
    assert twin.engine.view().worst("gpu.temp_c").max() > LIMIT


LEARN_S = 150


def scraped(policies: list[ThermalGuard], **rack: float) -> tuple[Twin, dict[str, Any]]:
    """A twin whose GPUs were scraped every 15 s, its racks heard each second; and these readings."""
    twin, rng = Twin(two_racks(), policies), np.random.default_rng(10)
    n = twin.site.sizes["gpu"]
    racks = {"rack.supply_temp_c": 30.0, "rack.flow_lpm": 115.0, **rack}
    for second in range(LEARN_S):
        twin.tick(gpus(rng, n) | racks if second % 15 == 0 else racks)
    return twin, racks


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "coolant of the rack is lost": (
        {"rack.flow_lpm": [3.0, 115.0]},
        "lab/h/r1: coolant flow reads 3 l/min, guard 40 l/min",
    ),
    "its inlet is hot": (
        {"rack.supply_temp_c": [60.0, 30.0], "rack.flow_lpm": [60.0, 115.0]},
        "lab/h/r1: supply temperature reads 60 °C, guard 43 °C",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAILING)
def test_silence_is_critical_where_a_second_signal_says_that_the_cooling_fails(name: str) -> None:
    changed, sentence = FAILING[name]
    twin, racks = scraped([])
    twin.run(160, racks | changed)
    fear = found(twin, "beyond/gpu.temp_c/feared")
    assert (fear.severity, fear.count) == ("critical", 72)
    assert sentence in fear.evidence
    assert "by now perhaps 130 °C, limit 87 °C" in fear.evidence[0] or name == "its inlet is hot"
    (silence,) = [i for i in grave(twin) if i.startswith("silence/")]
    assert found(twin, silence).severity == "warning", "silence by itself is none"
    rng = np.random.default_rng(11)
    twin.run(3, racks | changed | gpus(rng, twin.site.sizes["gpu"]))
    assert "beyond/gpu.temp_c/feared" not in twin.engine.findings.active, "they are heard, and cool"


@pytest.mark.long
def test_gpus_of_a_node_that_is_off_are_not_feared_for() -> None:
    twin, racks = scraped([])
    nodes = np.arange(twin.site.sizes["node"])
    twin.run(
        160, racks | {"rack.flow_lpm": [3.0, 115.0], "node.power_on_state": np.where(nodes < 2, 0.0, 1.0)}
    )
    assert found(twin, "beyond/gpu.temp_c/feared").count == 64, "72 but for two nodes"


@pytest.mark.long
def test_silence_is_a_warning_where_the_second_signal_is_silent_too() -> None:
    twin, racks = scraped([])
    lost = racks | {"rack.flow_lpm": 3.0}
    twin.run(3, lost)
    twin.run(400)
    assert [i for i in critical(twin) if i.endswith("/feared")] == []


def test_clocks_that_heat_lowers_speak_for_it() -> None:
    twin, rng = Twin(two_racks()), np.random.default_rng(12)
    n = twin.site.sizes["gpu"]
    for bits in (0.0, float(0x40)):
        for _ in range(60):
            beside = {"gpu.clock_event_bits": np.where(np.arange(n) == 5, bits, 0.0)}
            twin.tick((gpus(rng, n) if bits == 0.0 else {}) | beside)
    fear = found(twin, "beyond/gpu.temp_c/feared")
    assert fear.entities == ("lab/h/r1/node1/gpu1",)
    assert "heat lowers its clock" in fear.evidence[1]


@pytest.mark.long
def test_what_people_work_at_is_not_feared_for() -> None:
    twin, racks = scraped([])
    lost = racks | {"rack.flow_lpm": 3.0}
    until_ns = twin.now_ns + 3600 * NS
    racks_of_both = ("lab/h/r1", "lab/h/r2")
    window = MaintenanceBegun(id="w", author="a", table="rack", names=racks_of_both, until_ns=until_ns)
    twin.tick(lost, window)
    twin.run(120, lost)
    assert critical(twin) == []


def test_gpus_whose_coolant_stands_are_not_waited_for() -> None:
    twin, racks = scraped([])
    twin.run(4, racks)
    worst = twin.engine.view().worst("gpu.temp_c")
    assert worst.max() < GUARD
    twin.run(8, racks | {"rack.flow_lpm": [3.0, 115.0]})
    worst = twin.engine.view().worst("gpu.temp_c")
    assert worst[:72].min() > GUARD, "a scrape every 15 s says nothing of the seconds between"
    assert worst[72:].max() < GUARD
    assert [i for i in critical(twin) if i.endswith("/feared")] == [], "they were heard as often as ever"
