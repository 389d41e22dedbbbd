"""PUE, TUE and WUE of a statement: over the time in which all that they need is measured, with its share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, site_of, two_racks
from tests.support.ledger_month import tree
from twin.ledger import HourRecord, LedgerRow, statement
from twin.ledger.hour_record import FIGURES, MeteredSum, RatioSum
from twin.ledger.water_meters import MAKEUP, WaterMeters
from twin.telemetry import Block, TableState

EVER = (0, 2**62)
HOUR_NS = 3600 * 10**9


def record(number: int, **sides: tuple[float, float]) -> HourRecord:
    figures = {name: RatioSum(*both, float(HOUR_NS)) for name, both in sides.items()}
    row = LedgerRow("h", "idle", energy_j=100.0)
    return HourRecord(number * HOUR_NS, HOUR_NS, MeteredSum(100.0), {}, {}, (row,), figures=figures)


def test_an_hour_without_a_figure_leaves_it_to_the_others() -> None:
    hours = [record(i, pue=(110.0, 100.0), tue=(110.0, 50.0)) for i in range(3)]
    hours.append(record(3, pue=(130.0, 100.0)))
    found = statement(hours, "site", *EVER)
    assert found.pue == pytest.approx(460.0 / 400.0)
    assert found.tue == pytest.approx(330.0 / 150.0)
    assert (found.pue_known_pu, found.tue_known_pu, found.wue_known_pu) == (1.0, 0.75, 0.0)
    assert found.wue_l_per_kwh is None
    own = statement(hours, "site", *EVER, lambda row: row.part == "job")
    assert [getattr(own, name) for name in ("pue", "tue", "wue_l_per_kwh")] == [None] * 3
    assert set(FIGURES) == {"pue", "tue", "wue"}


def test_an_hour_of_a_version_before_has_no_figures_and_all_else() -> None:
    import msgspec

    raw = msgspec.json.encode({"begin_ns": 0, "watched_ns": HOUR_NS, "site": {}, "halls": {}, "racks": {},
                               "rows": [{"hall": "h", "part": "idle", "energy_j": 3.6e6}], "it_j": 5.0,
                               "compute_j": 4.0, "cooling_known": True})  # fmt: skip
    found = statement([msgspec.json.decode(raw, type=HourRecord)], "site", *EVER)
    assert (found.total.energy_kwh, found.tue, found.tue_known_pu) == (1.0, None, 0.0)


READ: dict[str, Any] = {
    "rack.power_w": 30_000.0, "node.power_w": 3000.0, "node.cpu_power_w": 500.0, "gpu.power_w": 600.0,
    "node.power_on_state": 1.0, "loop.power_w": 6000.0,
}  # fmt: skip


LOOP = {"name": "fws", "cooling": "tower"}


def looped() -> Twin:
    return Twin(two_racks(racks="r1") | {"loops": [LOOP]})


def share_known(pod: Twin, figure: str) -> float:
    hour = pod.engine.ledger.running()
    assert hour is not None
    return float(hour.figures.get(figure, RatioSum()).known_ns) / hour.watched_ns


@pytest.mark.long
def test_gpus_that_nobody_reads_for_minutes_cost_their_minutes_alone() -> None:
    pod = looped()
    for _ in range(60):
        pod.tick(READ, dt_s=10.0)
    assert share_known(pod, "tue") == pytest.approx(1.0, abs=0.05)
    silent = READ | {"gpu.power_w": np.nan}
    for _ in range(60):
        pod.tick(silent, dt_s=10.0)
    for _ in range(60):
        pod.tick(READ, dt_s=10.0)
    assert share_known(pod, "pue") == pytest.approx(1.0, abs=0.05)
    assert 0.55 < share_known(pod, "tue") < 0.8
    hour = pod.engine.ledger.running()
    assert hour is not None
    found = statement([hour], "site", *EVER)
    n_node, n_gpu = pod.site.sizes["node"], pod.site.sizes["gpu"]
    assert found.tue == pytest.approx(36_000.0 / (500.0 * n_node + 600.0 * n_gpu), rel=0.02)
    ungauged_kwh, energy_kwh = found.total.ungauged_kwh, found.total.energy_kwh
    assert ungauged_kwh is not None
    assert 0.0 < ungauged_kwh < energy_kwh
    assert found.total.gpu_energy_kwh is not None


def test_a_node_that_is_off_takes_nothing_that_is_missed() -> None:
    pod = looped()
    on, cpu = np.ones(pod.site.sizes["node"]), np.full(pod.site.sizes["node"], 500.0)
    gpu = np.full(pod.site.sizes["gpu"], 600.0)
    on[0], cpu[0], gpu[pod.site.node_of_gpu == 0] = 0.0, np.nan, np.nan
    for _ in range(60):
        pod.tick(READ | {"node.power_on_state": on, "node.cpu_power_w": cpu, "gpu.power_w": gpu}, dt_s=10.0)
    assert share_known(pod, "tue") == pytest.approx(1.0, abs=0.05)


class Water:
    """Two loops with water meters beside racks of 100 J a look."""

    def __init__(self, cooling: str = "tower", loops: int = 2) -> None:
        made = tree(1, cooling)
        made["loops"] = [{"name": f"fws{i}", "cooling": cooling} for i in range(loops)]
        for hall in made["halls"]:
            hall["cdus"][0]["loop"] = "fws0"
        self.meters, self.table = WaterMeters(site_of(made)), TableState("loop", loops)
        self.now_ns, self.known = 10**9, [0.0, 0.0, 0.0]

    def look(self, *litres: float | None, reset: bool = False) -> None:
        begin_ns, self.now_ns = self.now_ns, self.now_ns + 10 * 10**9
        for loop, total_l in enumerate(litres):
            if total_l is not None:
                self.table.raw[MAKEUP.row, loop] = 1
                self.table.total[MAKEUP.row, loop] = round(1e3 * total_l)
                self.table.received_ns(MAKEUP)[loop] = self.now_ns
        self.table.resets[MAKEUP.row, 0] += reset
        told = self.meters.settle(self.table, 100.0, begin_ns, self.now_ns)
        self.known = [a + b for a, b in zip(self.known, told, strict=True)]


def test_water_waits_until_all_its_meters_were_read() -> None:
    water = Water()
    water.look(5.0, None)  # the other loop has no meter that was read: nothing is known
    water.look(6.0, None)
    water.look(7.0, 1.0)  # from here on
    assert water.known == [0.0, 0.0, 0.0]
    water.look(8.0, None)
    water.look(None, None)
    assert water.known == [0.0, 0.0, 0.0]
    water.look(None, 3.0)  # both were read since: 1 l and 2 l, over three looks
    assert water.known == [3.0, 300.0, 30e9]
    water.look(10.0, 4.0)  # what the first drew in that gap is in its counter
    assert water.known == [6.0, 400.0, 40e9]


def test_a_water_meter_that_begins_anew_costs_its_time() -> None:
    water = Water()
    water.look(5.0, 1.0)
    water.look(6.0, 2.0)
    water.look(6.0, 3.0, reset=True)
    assert water.known == [2.0, 100.0, 10e9]
    water.look(7.0, 4.0)
    assert water.known == [4.0, 200.0, 20e9]
    water.meters.forget("loop", 1)  # replaced
    water.look(8.0, 90.0)
    assert water.known == [4.0, 200.0, 20e9]
    water.look(9.0, 91.0)
    assert water.known == [6.0, 300.0, 30e9]


def test_dry_coolers_need_no_meter_and_make_no_water_figure_alone() -> None:
    water = Water("dry_cooler")
    for _ in range(5):
        water.look(None, None)
    assert water.known == [0.0, 0.0, 0.0]
    water.look(1.0, None)
    water.look(3.0, None)
    assert water.known == [2.0, 100.0, 10e9]


def test_racks_count_on_while_a_water_meter_tells_nothing() -> None:
    water = Water()
    water.look(5.0, 1.0)
    water.look(6.0, 2.0)
    water.table.raw[MAKEUP.row, 0] = -1
    for _ in range(3):
        water.look(None, 3.0)
    water.look(10.0, 6.0)  # with all that was drawn since
    assert water.known == [10.0, 500.0, 50e9]


class Counting:
    """A site whose GPUs have an energy counter beside their power; each takes 600 W."""

    def __init__(self) -> None:
        self.twin, self.counted_mj = looped(), 10**9

    def run(self, looks: int, silent: bool = False, null: bool = False) -> None:
        """Looks of ten seconds; `silent`: no node tells anything, `null`: the counters have no reading."""
        n = self.twin.site.sizes["gpu"]
        for _ in range(looks):
            self.counted_mj += 600 * 10 * 1000
            at_ns = self.twin.now_ns + 10 * 10**9
            counts = np.full((1, n), -1 if null else self.counted_mj, np.int64)
            if not silent:
                none = np.empty((0, n), np.float32)
                self.twin.inbox.put_block(Block("gpu", 0, (), none, ("energy_mj",), counts, at_ns), at_ns)
            whole = {k: v for k, v in READ.items() if not silent or k.partition(".")[0] in ("rack", "loop")}
            self.twin.tick(whole, dt_s=10.0)

    @property
    def hour(self) -> HourRecord:
        hour = self.twin.engine.ledger.running()
        assert hour is not None
        return hour

    @property
    def tue(self) -> float:
        n = self.twin.site.sizes
        return 36_000.0 / (500.0 * n["node"] + 600.0 * n["gpu"])


@pytest.mark.long
def test_the_power_of_a_gpu_stands_in_for_a_null_counter_and_counts_once() -> None:
    pod = Counting()
    pod.run(100)
    pod.run(60, null=True)
    pod.run(100)
    found = statement([pod.hour], "site", *EVER)
    gpus_kwh = 600.0 * 2600.0 * pod.twin.site.sizes["gpu"] / 3.6e6
    assert found.total.gpu_energy_kwh == pytest.approx(gpus_kwh, rel=0.02)
    assert found.tue == pytest.approx(pod.tue, rel=0.02)


@pytest.mark.long
def test_counters_that_tell_of_an_outage_are_not_set_against_a_look() -> None:
    pod = Counting()
    pod.run(100)
    pod.run(60, silent=True)
    pod.run(100)
    found = statement([pod.hour], "site", *EVER)
    assert found.tue == pytest.approx(pod.tue, rel=0.02)
    assert 0.6 < found.tue_known_pu < 0.85


def test_energy_of_gpus_is_unknown_of_a_whole_none_of_whose_gpus_are_read() -> None:
    rows = (LedgerRow("h", "idle", energy_j=100.0, ungauged_j=100.0), LedgerRow("h", "cooling", energy_j=9.0))
    hour = HourRecord(0, HOUR_NS, MeteredSum(109.0), {}, {}, rows)
    assert statement([hour], "site", *EVER).total.gpu_energy_kwh is None
    assert statement([hour], "hall", *EVER).rows[0].gpu_energy_kwh is None
    assert statement([hour], "tenant", *EVER).rows[1].gpu_energy_kwh == 0.0  # of the cooling


def test_a_restart_while_counters_are_awaited_books_the_same() -> None:
    pod = Counting()
    pod.run(30)
    pod.run(5, silent=True)
    one, other = pod.twin, pod.twin.restarted(two_racks(racks="r1") | {"loops": [LOOP]}, ())
    assert one.engine.ledger.waits_ns < one.engine.ledger.booked_ns
    for twin in (one, other):
        twin.tick({"rack.power_w": 30_000.0, "loop.power_w": 6000.0}, dt_s=10.0)
    assert other.engine.checksum() == one.engine.checksum()
