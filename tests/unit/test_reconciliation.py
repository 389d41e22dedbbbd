"""Readings that are not believed: what counts as contradicted, for how long, and what people are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.catalogue import NS
from twin.contracts import Residual
from twin.diagnosis.isolation import IsolatedFault
from twin.diagnosis.reconciliation import BIASED, MOST_RATED_PU, RECONCILED, Reconciliation, danger_sign
from twin.diagnosis.signature import HYPOTHESES

SITE = site_of(two_racks())
T0 = 1_000 * NS
RACK, FLOW, SUPPLY = "rack.power_w", "rack.flow_lpm", "rack.supply_temp_c"
USUAL = {
    "gpu.power_w": 900.0, "node.power_w": 5000.0, RACK: 92e3, "feeder.power_w": 92e3, FLOW: 100.0,
    SUPPLY: 25.0, "cdu.flow_lpm": 200.0,
}  # fmt: skip


class Readings(dict[str, Any]):
    """The values of a tick."""

    def __init__(self, at_s: float, **changes: Any) -> None:
        self.state = SimpleNamespace(now_ns=T0 + round(at_s * NS), tick=0)
        for key, value in (USUAL | {k.replace("__", "."): v for k, v in changes.items()}).items():
            n = SITE.sizes[key.partition(".")[0]]
            self[key] = np.broadcast_to(np.float64(value), (n,)).copy()

    def drawn_w(self) -> Any:
        return SITE.sum_by_rack("node", self["node.power_w"])


def biased(key: str, size: float, entity: int = 0, **more: Any) -> IsolatedFault:
    h = next(h for h in HYPOTHESES if h.kind == BIASED and h.key == key)
    return IsolatedFault(h, entity, size, 100.0, 1.0, {}, 0, **({"sigma": 2.0} | more))


class Watched:
    """A reconciliation whose isolation finds what the test says, or what the coolant of all tells."""

    def __init__(self) -> None:
        self.of = Reconciliation(SITE)
        self.common: dict[Any, Any] = {}
        self.of.common = SimpleNamespace(find=lambda now: self.common)  # type: ignore[assignment]
        self.suspects: Any = None

    def tick(
        self, now: Readings, *faults: IsolatedFault, residuals: Any = None, reported: Any = ()
    ) -> list[tuple[str, int]]:
        """The readings that are not believed then."""

        def outliers(residuals: Any, now: Any, covered: Any, suspects: Any, stirred: Any) -> Any:
            self.suspects = {key: at.tolist() for key, at in suspects.items()}
            return list(faults)

        masks: Any = SimpleNamespace(covered=None, stirred=None)
        isolation: Any = SimpleNamespace(outliers=outliers)
        self.of.update(isolation, residuals or {}, now, masks, reported)  # type: ignore[arg-type]
        found = []
        for key in USUAL:
            if (some := self.of.of(key, now.state.now_ns)) is not None:
                found += [(key, k) for k in some[0].tolist()]
        return found


@pytest.mark.parametrize(
    ("key", "read", "size", "doubted"),
    [
        (RACK, 110e3, 10e3, True),
        (RACK, 109e3, 9e3, False),
        (RACK, 90e3, -10e3, True),
        (SUPPLY, 28.0, 3.0, True),
        (SUPPLY, 27.9, 2.9, False),
        (FLOW, 120.0, 20.0, True),
        (FLOW, 119.0, 19.0, False),
    ],
)
def test_an_error_that_matters_is_doubted(key: str, read: float, size: float, doubted: bool) -> None:
    watched, values = Watched(), {key.replace(".", "__"): [USUAL[key], read]}
    for at_s in (0.0, 2.0):
        found = watched.tick(Readings(at_s, **values), biased(key, size, 1))
    assert found == ([(key, 1)] if doubted else [])
    if doubted:
        index, value, sigma = watched.of.of(key, T0 + 2 * NS)  # type: ignore[misc]
        assert (index.tolist(), value.tolist(), sigma.tolist()) == ([1], [read - size], [2.0])


def test_what_two_meters_account_for_alike_or_a_device_does_is_no_doubt() -> None:
    watched = Watched()
    assert watched.tick(Readings(0.0, rack__power_w=[200e3, 92e3]), biased(RACK, 100e3, alone=False)) == []
    device = next(h for h in HYPOTHESES if h.kind != BIASED)
    fault = IsolatedFault(device, 0, 100e3, 100.0, 1.0, {}, 0)
    assert watched.tick(Readings(1.0, rack__power_w=[200e3, 92e3]), fault) == []
    assert "gpu.temp_c" not in RECONCILED


def test_a_power_stays_in_doubt_while_it_stays_as_far_off_and_its_meter_is_suspected() -> None:
    watched, off = Watched(), {"rack__power_w": [200e3, 92e3]}
    assert watched.tick(Readings(0.0, **off), biased(RACK, 100e3)) == [(RACK, 0)]
    assert watched.suspects == {}
    assert watched.tick(Readings(10.0, **off)) == [(RACK, 0)]
    assert watched.suspects == {("rack", "power_w"): [0]}
    assert watched.tick(Readings(10.1, **off)) == []
    assert watched.tick(Readings(60.0)) == []
    assert watched.tick(Readings(60.1)) == []
    assert watched.suspects == {("rack", "power_w"): [0]}
    watched.tick(Readings(61.0))
    assert watched.suspects == {}


def test_a_power_that_comes_back_is_believed_at_once_and_a_second_leap_is_counted() -> None:
    watched, off = Watched(), {"rack__power_w": [200e3, 92e3]}
    watched.tick(Readings(0.0, **off), biased(RACK, 100e3))
    assert watched.tick(Readings(1.0, rack__power_w=[108e3, 92e3])) == []
    assert watched.tick(Readings(5.0, **off)) == [], "believed, until it is contradicted again"
    assert watched.tick(Readings(6.0, **off), biased(RACK, 100e3)) == [(RACK, 0)]
    (doubt,) = watched.of.doubts.values()
    assert (doubt.times, doubt.first_ns, doubt.last_ns) == (2, T0, T0 + 6 * NS)
    watched.tick(Readings(7.0, **off), biased(RACK, 150e3))
    (doubt,) = watched.of.doubts.values()
    assert (doubt.times, doubt.value) == (2, 50e3)
    watched.tick(Readings(8.0, **off), biased(RACK, 250e3))
    assert watched.of.doubts["rack", 0, "power_w"].value == 0.0, "no meter reads below zero"


def test_coolant_is_believed_as_soon_as_nothing_contradicts_it() -> None:
    watched, off = Watched(), {"rack__flow_lpm": [10.0, 100.0]}
    assert watched.tick(Readings(0.0, **off), biased(FLOW, -90.0)) == [], "a flow may have been read before"
    assert watched.tick(Readings(1.9, **off), biased(FLOW, -90.0)) == []
    assert watched.tick(Readings(2.0, **off), biased(FLOW, -90.0)) == [(FLOW, 0)]
    assert watched.suspects == {}
    assert watched.tick(Readings(3.0, **off)) == []
    assert watched.of.doubts == {}


def test_what_rests_on_no_later_reading_is_doubted_at_once() -> None:
    watched = Watched()
    watched.common = {("rack", 1, "flow_lpm"): (10.0, 100.0, 5.0), ("cdu", 0, "flow_lpm"): (9.0, 200.0, 5.0)}
    off = {"rack__flow_lpm": [100.0, 10.0], "cdu__flow_lpm": 9.0}
    assert watched.tick(Readings(0.0, **off)) == [(FLOW, 1), ("cdu.flow_lpm", 0)]


@pytest.mark.parametrize("key", list(MOST_RATED_PU))
def test_no_device_draws_many_times_its_rated_power(key: str) -> None:
    most = Reconciliation(SITE)._most[key]
    name, table = key.replace(".", "__"), key.partition(".")[0]
    column = np.full(len(most), USUAL[key])
    column[1] = MOST_RATED_PU[key] * most[1]
    assert Watched().tick(Readings(0.0, **{name: column})) == []
    column[1] *= 1.001
    watched = Watched()
    assert watched.tick(Readings(0.0, **{name: column})) == [(key, 1)]
    doubt = watched.of.doubts[table, 1, "power_w"]
    likely_w = 18 * 5000.0 if table == "feeder" else most[1]  # half of two racks, by their nodes
    assert [doubt.value, doubt.sigma] == pytest.approx([likely_w, 0.1 * most[1]])
    if table != "feeder":
        expected = Residual(key, np.full(len(most), np.nan), column, np.full(len(most), 1.0))
        expected.expected[1] = 0.5 * most[1]
        watched.tick(Readings(1.0, **{name: column}), residuals={key: expected})
        assert watched.of.doubts[table, 1, "power_w"].value == pytest.approx(0.5 * most[1])


def cause(kind: str, signal: str = "power_w") -> Any:
    return SimpleNamespace(kind=kind, table="rack", entity=1, signal=signal)


def test_a_sensor_that_is_reported_to_stand_still_reads_what_is_expected_of_it() -> None:
    residual = Residual(RACK, np.array([92e3, 70e3]), np.array([92e3, 92e3]), np.array([1e3, 2e3]))
    other = Residual("rack.flow_lpm/heat", *np.ones((3, 2)))
    residuals = {"rack.flow_lpm/heat": other, RACK: residual}
    for kind in ("sensor_frozen", "sensor_spiking"):
        watched = Watched()
        assert watched.tick(Readings(0.0), residuals=residuals, reported=[cause(kind)]) == [(RACK, 1)]
        doubt = watched.of.doubts["rack", 1, "power_w"]
        assert (doubt.read, doubt.value, doubt.sigma) == (92e3, 70e3, 2e3)
    assert Watched().tick(Readings(0.0), residuals=residuals, reported=[cause("sensor_biased")]) == []
    assert Watched().tick(Readings(0.0), residuals={}, reported=[cause("sensor_frozen")]) == []
    residual.sigma[1] = np.inf
    assert Watched().tick(Readings(0.0), residuals=residuals, reported=[cause("sensor_frozen")]) == []
    watched = Watched()
    watched.tick(Readings(0.0), residuals=residuals, reported=[cause("sensor_frozen", "leak_state")])
    assert watched.of.doubts == {}


def test_people_are_told_what_lasts_and_no_fault_names() -> None:
    watched, off = Watched(), {"rack__power_w": [200e3, 300e3]}
    faults = biased(RACK, 100e3), biased(RACK, 200e3, 1)
    watched.tick(Readings(0.0, **off), *faults)
    assert watched.of.findings(T0 + 2 * NS - 1, ()) == []
    (found,) = watched.of.findings(T0 + 2 * NS, ())
    assert (found.id, found.severity, found.count) == ("doubt/rack.power_w", "info", 2)
    assert found.entities == ("lab/h/r1", "lab/h/r2")
    assert found.title == "The power of 2 racks is not trusted: other readings contradict it"
    assert found.evidence == ("lab/h/r1: read 200 kW, others imply 100 kW",)
    (named,) = watched.of.findings(T0 + 2 * NS, [cause("sensor_biased")])
    assert named.entities == ("lab/h/r1",)
    assert "of lab/h/r1 is not trusted" in named.title
    watched.tick(Readings(3.0))
    assert watched.of.findings(T0 + 3 * NS, ()) == [], "both are believed again"
    watched.tick(Readings(4.0, **off), faults[0])
    watched.tick(Readings(5.0))
    (again,) = watched.of.findings(T0 + 5 * NS, ())
    assert again.entities == ("lab/h/r1",), "who leaps again and again is told also while it does not"


def test_the_danger_of_a_flow_is_below_and_of_a_temperature_above() -> None:
    assert [danger_sign(key) for key in (FLOW, "gpu.temp_c", RACK, "no.such_signal")] == [-1.0, 1.0, 1.0, 1.0]
