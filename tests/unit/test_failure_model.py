"""The model of failures on the log alone: closed forms, what is left out, and what it is silent about."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from models.failure import Failure, failure_history
from models.failure.fits import FORMER_PARTS, Fitted
from models.failure.fleet_rate import TOO_WIDE, interval
from models.failure.live_hazard import NOBODY
from models.failure.model import HORIZONS_S, NODE, SITE
from models.failure.rates import PRIOR_NODE_DAYS, PRIOR_SHAPE, shock_times
from models.failure.self_exciting import PARTS
from tests.support.failing_fleet import CLASSES, DAY_NS, NAMES, START_NS, View, log_of, quiet
from twin.catalogue import NS, ContractError
from twin.contracts import Forecast, gamma_factors

N = 20
TAKEN_OUT = CLASSES.index("taken_out")
SPANS_D = tuple(h / 86_400.0 for h in HORIZONS_S)


def said(model: Failure, view: View) -> dict[tuple[str, float], Forecast]:
    model.update(view)
    return {(f.signal, f.horizon_s): f for f in model.predict(view)}


def rate_of(faults: int, node_days: float) -> float:
    return (PRIOR_SHAPE + faults) / (PRIOR_NODE_DAYS + node_days)


def test_the_prior_has_the_mean_and_the_spread_of_the_two_clusters() -> None:
    prior = stats.gamma(PRIOR_SHAPE, scale=1.0 / PRIOR_NODE_DAYS)
    assert prior.mean() == pytest.approx((6.50e-3 + 2.34e-3) / 2.0)
    assert prior.std() == pytest.approx((6.50e-3 - 2.34e-3) / 2.0)


def test_before_anything_failed_the_literature_speaks() -> None:
    for day, words in ((0.0, "0 s"), (1 / 1440, "1 min"), (2.0, "2 days")):
        found = said(Failure(), View(N, day, log_of([]), quiet(N)))
        shape = 240.0 * rate_of(0, N * day)
        for horizon_s, span_d in zip(HORIZONS_S, SPANS_D, strict=True):
            forecast = found[NODE, horizon_s]
            expected = 1.0 - (1.0 + span_d / (240.0 + day)) ** -shape
            assert forecast.mean == pytest.approx(expected, rel=1e-4)
            assert "published failure rates" in forecast.basis
            assert forecast.basis.endswith(f"no failure in {words}")


def test_a_node_that_failed_is_gamma_poisson() -> None:
    """(prior + own) failures over (prior + own) days; the days of repair are none."""
    rows = [(3, 1.0, 2.0, 0, False), (3, 5.0, 6.0, 0, False), (4, 8.0, 9.0, 1, False)]
    found = said(Failure(), View(N, 10.0, log_of(rows), quiet(N)))
    rate = rate_of(3, N * 10.0 - 3.0)
    own, up_d = np.zeros(N), np.full(N, 10.0)
    own[[3, 4]], up_d[[3, 4]] = (2, 1), (8.0, 9.0)
    for horizon_s, span_d in zip(HORIZONS_S, SPANS_D, strict=True):
        expected = 1.0 - (1.0 + span_d / (240.0 + up_d)) ** -(rate * 240.0 + own)
        forecast = found[NODE, horizon_s]
        assert forecast.mean == pytest.approx(expected, rel=1e-5)
        assert (forecast.lo < forecast.mean).all()
        assert (forecast.mean < forecast.hi).all()
        assert "failure rates of this fleet: 3 failures in 10 days" in forecast.basis


def test_who_is_down_or_worked_at_is_no_candidate() -> None:
    rows = [(0, 1.0, 0.0, 0, False), (1, 1.0, 0.0, TAKEN_OUT, False), (2, 1.0, 2.0, 0, False)]
    view = View(N, 3.0, log_of(rows), quiet(N))
    view.under = np.arange(N) == 5
    mean = said(Failure(), view)[NODE, 3600.0].mean
    assert np.flatnonzero(np.isnan(mean)).tolist() == [0, 1, 5]


def test_what_people_took_out_is_no_failure() -> None:
    rows = [(1, 1.0, 2.0, TAKEN_OUT, False)]
    found = said(Failure(), View(N, 3.0, log_of(rows), quiet(N)))
    without = said(Failure(), View(N, 3.0, log_of([]), quiet(N)))
    for key, forecast in found.items():
        assert forecast.mean == pytest.approx(without[key].mean)


def test_what_failed_before_the_watch_began_is_down_and_not_counted() -> None:
    log = log_of([(1, -0.5, 0.0, 0, False)])
    past = failure_history(log, N, START_NS + DAY_NS)
    assert past.own.k == 0
    assert np.flatnonzero(past.down).tolist() == [1]


def test_shocks_are_a_rate_of_all_and_tell_nothing_of_a_node() -> None:
    minute = 1.0 / 1440.0
    struck = [(node, 4.0 + node * minute, 4.5, 0, True) for node in range(6)]
    later = [(node, 7.0, 7.5, 0, True) for node in range(3)]
    found = said(Failure(), View(N, 10.0, log_of(struck + later), quiet(N)))
    alone = said(Failure(), View(N, 10.0, log_of([]), quiet(N)))
    past = failure_history(log_of(struck + later), N, START_NS + 10 * DAY_NS)
    assert past.own.k == 0
    assert past.shock_nodes.tolist() == [6.0, 3.0]
    shock = 9.0 / max(past.node_days, PRIOR_NODE_DAYS)
    for horizon_s, span_d in zip(HORIZONS_S, SPANS_D, strict=True):
        mean = found[NODE, horizon_s].mean
        assert np.ptp(mean) == 0.0, "a node that was struck is not worse than others"
        expected = 1.0 - (1.0 - alone[NODE, horizon_s].mean) * np.exp(-shock * span_d)
        assert mean == pytest.approx(expected, rel=1e-4)
    assert "2 shocks" in found[NODE, 3600.0].basis
    assert found[SITE, 2_592_000.0].mean[0] > 2.0 * alone[SITE, 2_592_000.0].mean[0]


@pytest.mark.parametrize(
    "seconds, expected",
    [
        ([], []),
        ([0], [1]),
        ([0, 600, 1200], [3]),
        ([0, 601], [1, 1]),
        ([0, 0, 0, 3600, 3700], [3, 2]),
    ],
)
def test_shocks_are_runs_of_ten_minutes(seconds: list[int], expected: list[int]) -> None:
    at, nodes = shock_times(np.array(seconds, np.int64) * NS)
    assert nodes.tolist() == expected
    assert len(at) == len(expected)


@pytest.mark.parametrize("shape", [1.0, 2.0, 5.0, 30.0, 500.0])
def test_factors_are_quantiles_of_a_gamma(shape: float) -> None:
    low, high = gamma_factors(np.array([shape]))
    exact = stats.gamma(shape, scale=1.0 / shape).ppf([0.05, 0.95])
    assert low[0] == pytest.approx(exact[0], abs=0.03)
    assert high[0] == pytest.approx(exact[1], rel=0.03)


def test_a_node_of_which_nothing_is_known_gets_the_fleets_rate_and_a_wide_interval() -> None:
    values = quiet(N)
    silent = np.arange(N) == 7
    values[silent, NAMES.index("level")] = 1.0
    for name in ("gpu_gap_pu", "temp_z", "busy_pu"):
        values[silent, NAMES.index(name)] = np.nan
    rows = [(node, 1.0 + node, 1.5 + node, 0, False) for node in range(5)]
    forecast = said(Failure(), View(N, 100.0, log_of(rows), values))[NODE, 86_400.0]
    rate = rate_of(5, N * 100.0 - 2.5)
    assert forecast.mean[7] == pytest.approx(1.0 - (1.0 + 1.0 / 240.0) ** -(240.0 * rate), rel=1e-4)
    assert forecast.mean[7] > forecast.mean[8], "of others it is known that they lasted 100 days"
    assert forecast.hi[7] / forecast.mean[7] > 2.5
    assert "1 nodes of which nothing is known: the fleet's rate" in forecast.basis


def test_a_site_of_which_nothing_is_heard_gets_no_forecast() -> None:
    model, nothing = Failure(), np.full((N, len(NAMES)), np.nan)
    assert said(model, View(N, 1.0, log_of([]), nothing)) == {}
    assert said(model, View(0, 1.0, log_of([]), nothing[:0])) == {}
    assert said(model, View(N, 1.0, log_of([]), np.zeros((N, 0)), ())) == {}
    assert model.training() == {}
    assert model.next_fit_s() > 20 * 86_400.0
    assert said(model, View(N, 1.0, log_of([]), quiet(N))), "once something is heard, it speaks"


def test_the_fleets_number_of_the_first_week_is_negative_binomial() -> None:
    rows = [(node, 0.5 + 0.1 * node, 0.55 + 0.1 * node, 0, False) for node in range(8)]
    found = said(Failure(), View(N, 3.0, log_of(rows), quiet(N)))
    rate = rate_of(8, N * 3.0 - 8 * 0.05)
    mean = rate * N * 7.0
    forecast = found[SITE, 604_800.0]
    assert forecast.mean[0] == pytest.approx(mean, rel=1e-5)
    low, high = interval(mean, mean + mean**2 / (PRIOR_SHAPE + 8))
    assert (forecast.lo[0], forecast.hi[0]) == (low, high)


def test_few_nodes_are_expected_to_fail_less_than_once() -> None:
    forecast = said(Failure(), View(N, 0.01, log_of([]), quiet(N)))[SITE, 86_400.0]
    assert forecast.mean[0] == pytest.approx(rate_of(0, 0.01 * N) * N, rel=1e-3)
    assert (forecast.lo[0], forecast.hi[0]) == (0.0, 1.0)


def test_later_the_fleets_number_follows_daily_counts() -> None:
    rows = [(day % N, day + 0.5, day + 0.6, 0, False) for day in range(40)]
    forecast = said(Failure(), View(N, 40.2, log_of(rows), quiet(N)))[SITE, 604_800.0]
    assert forecast.mean[0] == pytest.approx(7.0, rel=0.01)
    assert forecast.lo[0] <= 7.0 <= forecast.hi[0]
    assert forecast.basis == "daily counts of 40 days"


@given(
    st.lists(
        st.tuples(st.integers(0, N - 1), st.floats(0.0, 29.0), st.floats(0.01, 3.0), st.booleans()),
        max_size=40,
    )
)
def test_bands_hold_the_mean_and_grow_with_the_horizon(rows: list[tuple[int, float, float, bool]]) -> None:
    log = log_of([(n, a, a + d if a + d < 30.0 else 0.0, 0, s) for n, a, d, s in rows])
    found = said(Failure(), View(N, 30.0, log, quiet(N)))
    before = np.zeros(N)
    for horizon_s in HORIZONS_S:
        forecast = found[NODE, horizon_s]
        up = np.isfinite(forecast.mean)
        assert (forecast.lo[up] >= 0.0).all()
        assert (forecast.lo[up] <= forecast.mean[up]).all()
        assert (forecast.mean[up] <= forecast.hi[up]).all()
        assert (forecast.hi[up] <= 1.0).all()
        assert (forecast.mean[up] >= before[up]).all()
        before = forecast.mean
        count = found[SITE, horizon_s]
        given = bool(np.isfinite(count.lo[0]))
        assert given == bool(np.isfinite(count.hi[0]))
        assert given != (TOO_WIDE in count.basis)
        assert not given or count.lo[0] <= count.mean[0] <= count.hi[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"signals": ("rack.power_w",)},
        {"horizons_s": (3600.0, 60.0)},
        {"horizons_s": (1e9,)},
        {"horizons_s": (1.0,)},
    ],
)
def test_other_signals_and_horizons_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        Failure(**settings)  # type: ignore[arg-type]


def test_strengths_of_a_version_before_give_way_to_the_assumed_ones() -> None:
    rest = {
        "faults": np.array([30.0]),
        "names": np.zeros(0, np.uint8),
        "champions": np.array([NOBODY.array() for _ in HORIZONS_S]),
    }
    former = Fitted(rest | {"theta": np.full(FORMER_PARTS, 0.1)}, HORIZONS_S)
    assert former.theta is None
    assert former.faults == 0.0
    assert Fitted(rest | {"theta": np.full(len(PARTS), 0.1)}, HORIZONS_S).faults == 30.0
    with pytest.raises(ContractError, match="theta: expected"):
        Fitted(rest | {"theta": np.full(3, 0.1)}, HORIZONS_S)
