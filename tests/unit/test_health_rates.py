"""Growth of counters fades as it should, and neither gaps, resets nor restarts look like bursts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.health_site import Ward, on
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.health.rates import DAILY_S, GAP_S, RECENT_S, Rates

SBE, DBE = "gpu.ecc_sbe_count", "gpu.ecc_dbe_count"


def counted(ward: Ward, counts: list[int], key: str = SBE, dt_s: float = 10.0) -> np.ndarray:
    """Looks with these totals at GPU 3; what is left of its growth in the end (recent, daily)."""
    for total in counts:
        ward.look(counts={key: on(144, 3, total)}, dt_s=dt_s)
    return np.array([ward.rates.counted(key)[3], ward.rates.counted(key, recent=False)[3]])


def test_what_was_counted_before_the_first_look_is_no_growth() -> None:
    ward = Ward(two_racks())
    assert counted(ward, [5000, 5000]).tolist() == [0.0, 0.0]
    assert ward.rates.recent_per_h(SBE)[3] == 0.0
    assert np.isnan(ward.rates.recent_per_h(DBE)).all()
    assert np.isnan(ward.rates.daily_per_h("link.error_count")).all()


def test_a_burst_fades_with_the_two_times() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 100])
    ward.run(60, counts={SBE: on(144, 3, 100)})
    left = [float(ward.rates.counted(SBE, recent)[3]) for recent in (True, False)]
    assert left == pytest.approx([100 * np.exp(-600 / RECENT_S), 100 * np.exp(-600 / DAILY_S)], rel=0.01)
    assert ward.rates.recent_per_h(SBE)[3] == pytest.approx(left[0] * 6.0, rel=1e-4)
    assert ward.rates.daily_per_h(SBE)[3] == pytest.approx(left[1] / 24.0, rel=1e-4)
    assert ward.rates.recent_per_h(SBE)[4] == 0.0


@pytest.mark.parametrize("dt_s", [5.0, 60.0, 300.0])
def test_steady_growth_gives_its_rate_whatever_the_ticks(dt_s: float) -> None:
    ward = Ward(two_racks())
    looks = int(4 * RECENT_S / dt_s)
    counted(ward, [round(k * dt_s) for k in range(looks + 1)], dt_s=dt_s)  # one a second
    assert ward.rates.recent_per_h(SBE)[3] == pytest.approx(3600 * (1 - np.exp(-4)), rel=0.02)


def test_growth_after_a_silence_is_spread_over_it() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 0])
    for _ in range(120):  # two hours in which this GPU says nothing, and grew by one a minute
        ward.take({"gpu.temp_c": 60.0}, {DBE: 0}, 60.0)
        ward.judge()
    recent, _ = counted(ward, [120])
    assert recent == pytest.approx(RECENT_S / 60.0, rel=0.05)
    other = Ward(two_racks())
    assert counted(other, [0, 0, 120])[0] == pytest.approx(120, rel=0.02)  # without one it is a burst


def test_a_pause_of_the_daemon_is_no_burst() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 0])
    recent, daily = counted(ward, [86_400 // 60], dt_s=86_400.0)
    assert recent == pytest.approx(10.0, rel=0.01)
    assert daily == pytest.approx(1440 * (1 - np.exp(-1)), rel=0.01)


def test_a_counter_that_begins_anew_grows_by_what_it_counts() -> None:
    ward = Ward(two_racks())
    assert counted(ward, [900, 900, 4])[0] <= 4.1


def test_much_later_nothing_is_left_and_small_growth_is_seen_again() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 1000])
    for _ in range(30):
        ward.look(counts={SBE: on(144, 3, 1000)}, dt_s=86_400.0)
    assert not ward.rates.counters[SBE].lively
    assert ward.rates.above(SBE, 0.1).tolist() == []
    assert counted(ward, [1001])[0] == pytest.approx(1.0, rel=0.02)
    assert ward.rates.above(SBE, 0.5).tolist() == [3]
    assert ward.rates.moved(SBE).tolist() == [3]


def test_the_usual_leaves_out_the_last_minutes() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 600])
    index = np.array([3], np.int32)
    assert ward.rates.usual_per_h(SBE, index)[0] == pytest.approx(0.0, abs=0.3)
    for k in range(144):  # twelve hours of one a minute
        ward.look(counts={SBE: on(144, 3, 605 + 5 * k)}, dt_s=300.0)
    assert ward.rates.usual_per_h(SBE, index)[0] == pytest.approx((600 * 0.6 + 3600 * 24 / 60 * 0.39) / 24,
                                                                  rel=0.1)  # fmt: skip


def quiet(ward: Ward, gpus: list[int], looks: int, dt_s: float = 10.0) -> None:
    for _ in range(looks):
        silent = {key: on(144, gpus, np.nan, 50.0) for key in ("gpu.temp_c", "gpu.power_w")}
        ward.take(silent, {}, dt_s)
        ward.judge()


def test_gaps_are_the_share_of_the_last_hour() -> None:
    ward = Ward(two_racks())
    assert np.isnan(ward.rates.gap_pu("gpu")).all()
    quiet(ward, [], 2)
    assert (ward.rates.gap_pu("gpu") == 0.0).all()
    quiet(ward, [7], 60)
    gap = ward.rates.gap_pu("gpu")
    assert gap[7] == pytest.approx(1 - np.exp(-600 / GAP_S), abs=0.01)
    assert gap[8] == 0.0
    quiet(ward, [], 360)
    assert ward.rates.gap_pu("gpu")[7] == pytest.approx(gap[7] * np.exp(-1), rel=0.01)
    assert np.isnan(ward.rates.gap_pu("node")).all()


def test_who_never_spoke_has_no_gap() -> None:
    ward = Ward(two_racks())
    quiet(ward, [7], 30)
    assert np.isnan(ward.rates.gap_pu("gpu")[7])


def test_nobody_is_silent_while_nobody_listens() -> None:
    ward = Ward(two_racks())
    quiet(ward, [], 3)
    ward.take({"node.power_w": 4000.0}, {}, 7200.0)  # the daemon was off; no GPU has spoken yet
    for column in ward.state.tables.values():
        column.resumed_ns[:] = ward.now_ns, ward.now_ns - 7200 * 10**9
    ward.judge()
    assert ward.rates.gap_pu("gpu").max() < 0.01


def test_another_device_begins_at_nothing() -> None:
    ward = Ward(two_racks())
    counted(ward, [0, 100])
    ward.state.tables["gpu"].replace(3)
    ward.rates.forget("gpu", 3)
    ward.inbox.forget("gpu", 3)
    assert counted(ward, [70_000, 70_000]).tolist() == [0.0, 0.0]


def test_a_restart_goes_on_bit_by_bit() -> None:
    one, other = Ward(two_racks()), Ward(two_racks())
    for ward in (one, other):
        counted(ward, [0, 30, 30, 45])
        quiet(ward, [9], 5)
    fresh = Rates(one.site)
    fresh.restore(decode(encode(other.rates.dump())))
    other.rates = fresh
    for ward in (one, other):
        counted(ward, [50, 90])
    a, b = encode(one.rates.dump()), encode(other.rates.dump())
    assert a == b
