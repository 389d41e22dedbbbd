"""A restart at any moment goes on exactly: what a fuzz of restarts beside an uninterrupted run found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, site_of, two_racks
from tests.support.contract_plugins import site as contract_site
from twin.catalogue import NS, digest
from twin.diagnosis import Topology
from twin.diagnosis.cause import Cause
from twin.diagnosis.evidence_masks import DownstreamMask
from twin.diagnosis.sensor_checks import SETTLED, WATCHED, Bank, traits_of
from twin.diagnosis.xids import XID_S, Xids
from twin.engine import encode
from twin.engine.remap import slots_kept
from twin.engine.snapshot import decode
from twin.health.error_log import FaultBook
from twin.health.lemons import Lemons
from twin.telemetry import JobSlots, OperatorRequest

COLD = {"rack.power_w": 1e5, "rack.supply_temp_c": 32.0, "rack.return_temp_c": 47.0, "rack.flow_lpm": 90.0,
        "cdu.flow_lpm": 180.0, "cdu.supply_temp_c": 32.0, "cdu.return_temp_c": 47.0,
        "feeder.power_w": 1e5, "gpu.temp_c": 60.0, "gpu.power_w": 800.0}  # fmt: skip


def state_of(twin: Twin) -> dict[str, Any]:
    return decode(encode(twin.engine.dump()))


def live(twin: Twin, tick: int) -> None:
    """One tick of a seeded day, the same for every twin."""
    rng = np.random.default_rng(tick)
    twin.tick({key: value * (1.0 + 0.01 * rng.standard_normal()) for key, value in COLD.items()})


@pytest.mark.parametrize("at", [SETTLED - 1, SETTLED, SETTLED + 1])
def test_meters_that_were_read_often_go_on_as_they_were(at: int) -> None:
    sizes = {"site": 1}
    k = len(WATCHED["site"])
    one, other = (Bank(1, k, traits_of("site"), True) for _ in range(2))
    rng = np.random.default_rng(1)
    for tick in range(SETTLED + 9):
        value = rng.standard_normal((1, sizes["site"] * k)).astype(np.float32)
        if tick == at:  # as a restart writes what was kept
            for name in one.declared:
                getattr(other, name)[:] = getattr(one, name)
            other.refresh()
        one.update(value, None, slice(0, k))
        if tick >= at:
            other.update(value, None, slice(0, k))
            for name in one.declared:
                assert np.array_equal(getattr(one, name), getattr(other, name)), (tick, name)


@pytest.mark.long
def test_a_move_of_what_was_learned_right_after_a_restart_shifts_the_levels_too() -> None:
    twin = Twin(two_racks())
    for tick in range(179):  # moves come every 60 s
        live(twin, tick)
    again = [twin.restarted(two_racks(), [])]
    for tick in range(179, 184):
        live(twin, tick)
        for other in again:
            live(other, tick)
            assert digest(other.engine.estimator.dump()) == digest(twin.engine.estimator.dump()), tick
        again.append(twin.restarted(two_racks(), []))


def test_a_second_burst_of_as_many_xids_tells_its_own_codes() -> None:
    xids, gpu = Xids(2), np.zeros(3, np.int32)
    for k, codes in enumerate(((13, 31, 43), (45, 94, 95))):
        now_ns = START_NS + k * round(3 * XID_S) * NS
        xids.advance(now_ns)
        xids.add(gpu, np.array(codes, np.int32), now_ns)
        xids.advance(now_ns)
        assert xids.bursts(None, 9).tolist() == [0]
        assert xids.texts(gpu[:1], now_ns)[0].endswith(", ".join(map(str, codes)))


def test_what_stirs_a_rack_stirs_no_cdu_where_none_serves_it() -> None:
    tree = two_racks()
    tree["halls"][0]["cdus"][0]["serves"] = ["r1"]
    mask = DownstreamMask(Topology(site_of(tree)))
    mask.update([Cause("leak", "rack", 1)], [], NS)
    rows = mask.covered("cdu.flow_lpm/pump", 1)
    assert rows is None or not rows.any()
    del tree["halls"][0]["cdus"]
    mask = DownstreamMask(Topology(site_of(tree)))
    mask.update([Cause("leak", "rack", 1)], [], NS)
    rows = mask.covered("cdu.flow_lpm/pump", 0)  # left over from a site that had some
    assert rows is None or not rows.any()


def test_signals_of_lemons_know_at_once_what_is_heard_of() -> None:
    lemons, jobs = Lemons(contract_site()), JobSlots(4, 4)
    assert np.isnan(lemons.signals()[:, 0]).all()
    request = OperatorRequest(author="me", control="node.service_level", names=(), lo=0.0, hi=3.0)
    lemons.take(request, jobs, START_NS)
    assert not np.isnan(lemons.signals()[:, 0]).any()
    again = Lemons(contract_site())
    again.restore(lemons.dump())
    assert np.array_equal(lemons.signals(), again.signals(), equal_nan=True)


def test_a_book_without_its_replaced_devices_restarts_as_it_is() -> None:
    site, book = contract_site(), FaultBook(contract_site())
    book.advance(START_NS)
    book.forget("rack", 1)
    smaller = contract_site(1)
    old, book, again = book, FaultBook(smaller), FaultBook(smaller)
    book.adopt(old, slots_kept(site, smaller))
    again.restore(decode(encode(book.dump())))
    for one in (book, again):
        one.forget("gpu", 0)
        one.forget("rack", 0)
    assert book.dump()["replaced"] == again.dump()["replaced"]
