"""The hazard on telemetry: what it is fitted on, when it may win, and what a whole life of it looks like."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from models import trees
from models.failure import Failure, live_hazard as hazard
from models.failure.cases import BEFORE, QUIET, UNUSUAL
from models.failure.live_hazard import (
    DAY_NS,
    NOBODY,
    Champion,
    bins_of,
    calibrate,
    choose,
    fit_horizon,
    outcomes,
)
from models.failure.model import FIT_LEAST_S, HORIZONS_S, NODE
from models.failure.recalibration import logistic, logit
from models.failure.self_exciting import PARTS
from tests.support.failing_fleet import NAMES, START_NS, Fleet, View, log_of, quiet
from twin.catalogue import NS, ContractError, digest, pack, unpack

HOUR_NS = 3600 * NS


def cases_of(k: int, days: float, seed: int, telling: float = 3.0, share: float = 0.1) -> dict[str, Any]:
    """k cases over some days, one in ten failed within the day; feature 0 tells, feature 1 is noise."""
    rng = np.random.default_rng(seed)
    y = rng.random(k) < share
    t_ns = START_NS + np.sort(rng.uniform(0.0, days, k) * DAY_NS).astype(np.int64)
    x = np.stack([rng.normal(telling * y, 1.0), rng.normal(0.0, 1.0, k)], axis=1).astype(np.float16)
    failed_ns = np.where(y, t_ns + rng.integers(1, DAY_NS, k), 0)
    return {
        "node": np.arange(k, dtype=np.int32), "t_ns": t_ns, "weight": np.full(k, 144.0, np.float32),
        "how": np.full(k, QUIET, np.uint8), "failed_ns": failed_ns, "lost_ns": np.zeros(k, np.int64),
        "x": x, "said": np.full((k, 8), share, np.float32) * np.where(np.arange(8) < 4, 1.0, np.nan),
    }  # fmt: skip


def end_of(cases: dict[str, Any]) -> int:
    return int(cases["t_ns"][-1]) + 40 * DAY_NS


@pytest.mark.parametrize(
    "how, failed_h, lost_h, settled_h, hour, day",
    [
        (QUIET, 0, 0, 100.0, False, False),
        (QUIET, 0, 0, 10.0, False, None),  # the day is not over
        (QUIET, 0.5, 0, 100.0, None, True),  # of the hour before a failure other cases tell
        (BEFORE, 0.5, 0, 100.0, True, None),
        (UNUSUAL, 5.0, 0, 10.0, False, None),  # it failed, but others may too until the day is over
        (UNUSUAL, 5.0, 0, 100.0, False, True),
        (UNUSUAL, 30.0, 0, 100.0, False, False),
        (QUIET, 0, 5.0, 100.0, False, None),  # taken away
        (QUIET, 0, 30.0, 100.0, False, False),
        (QUIET, 0, 0, 0.5, None, None),
    ],
)
def test_an_outcome_is_known_once_the_horizon_is_over(
    how: int, failed_h: float, lost_h: float, settled_h: float, hour: bool | None, day: bool | None
) -> None:
    cases = {
        "node": np.array([0]), "t_ns": np.array([START_NS]),
        "weight": np.array([6.0]), "how": np.array([how]),
        "failed_ns": np.array([START_NS + round(failed_h * HOUR_NS) if failed_h else 0]),
        "lost_ns": np.array([START_NS + round(lost_h * HOUR_NS) if lost_h else 0]),
    }  # fmt: skip
    settled_ns = START_NS + round(settled_h * HOUR_NS)
    for horizon_s, expected in ((3600.0, hour), (86_400.0, day)):
        found = outcomes(cases, settled_ns, horizon_s)
        assert (bool(found.y[0]) if len(found.at) else None) is expected
        if len(found.at):
            assert found.weight[0] == pytest.approx(6.0 * 600.0 / horizon_s)


def test_the_line_is_logistic_regression_drawn_to_the_baseline() -> None:
    rng = np.random.default_rng(0)
    base, raw = rng.beta(1.0, 8.0, 6000), rng.normal(-2.0, 2.0, 6000)
    y = rng.random(6000) < logistic(0.4 + 0.7 * logit(base) + 0.8 * raw)
    many = np.full(6000, 100.0)
    rival = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        np.stack([logit(base), raw], axis=1), y
    )
    assert calibrate(base, raw, y, many) == pytest.approx([rival.intercept_[0], *rival.coef_[0]], abs=2e-3)
    few = np.full(6000, 1e-6)
    assert calibrate(base, raw, y, few) == pytest.approx([0.0, 1.0, 0.0], abs=1e-2)
    turned = calibrate(base, -raw, y, many)
    assert turned[2] == 0.0, "trees that are worse than nothing are not turned round"


def test_bins_hold_enough_failures_and_are_as_sure_as_these() -> None:
    p = np.linspace(0.01, 0.9, 2000)
    y = np.random.default_rng(1).random(2000) < p
    bins = bins_of(p, y, np.ones(2000))
    assert (np.diff(bins[:, 0]) > 0).all()
    assert len(bins) == hazard.MOST_BINS
    edges = np.append(logistic(bins[:, 0]), 1.0)
    for low, high, spread in zip(edges[:-1], edges[1:], bins[:, 1], strict=True):
        inside = (p >= low - 1e-9) & (p < high - 1e-9)
        hits = y[inside].sum()
        assert hits >= hazard.LEAST_IN_BIN
        assert spread == pytest.approx(np.sqrt(1 / (hits + 0.5) + 1 / ((~y[inside]).sum() + 0.5)), rel=0.1)
    assert len(bins_of(p, np.zeros(2000, bool), np.ones(2000))) == 1


def test_trees_find_what_tells_and_are_calibrated_on_later_cases() -> None:
    cases = cases_of(4000, 30.0, 2)
    fitted = fit_horizon(cases, end_of(cases), 86_400.0, 1, 0)
    known = unpack(pack(fitted))
    hazards = hazard.Hazards({1: known})
    p = hazards.say(cases["x"].astype(np.float64), np.full((4, 4000), 0.1))[0]
    y = cases["failed_ns"] > 0
    assert p[y].mean() > 5.0 * p[~y].mean()
    assert p.mean() == pytest.approx(y.mean(), rel=0.2)
    low, high = hazards.band(0, p)
    assert ((low < p) & (p < high)).all()
    assert digest(fit_horizon(cases, end_of(cases), 86_400.0, 1, 0)) == digest(fitted)


def test_trees_that_do_not_last_are_not_believed() -> None:
    """Trees that predict early failures only lose their weight: later cases refute them."""
    cases, rng = cases_of(4000, 30.0, 11), np.random.default_rng(11)
    before = fit_horizon(cases, end_of(cases), 86_400.0, 1, 0)
    late = np.arange(4000) > 2400
    cases["x"][late, 0] = rng.permutation(cases["x"][late, 0])
    after = fit_horizon(cases, end_of(cases), 86_400.0, 1, 0)
    assert before["line"][2] > 0.7
    assert after["line"][2] < 0.2
    first = cases["t_ns"][cases["failed_ns"] > 0]
    split_ns = int(np.sort(first)[int(hazard.EARLIER * len(first))])
    elsewhere = cases["t_ns"] + DAY_NS > split_ns
    cases["x"][elsewhere] = rng.normal(0.0, 1.0, (int(elsewhere.sum()), 2))
    again = fit_horizon(cases, end_of(cases), 86_400.0, 1, 0)
    assert digest([again[key] for key in trees.KEYS]) == digest([after[key] for key in trees.KEYS])


def test_what_is_not_known_yet_is_not_learned_from() -> None:
    """Outcomes and cases beyond what has settled may be anything: the fit and the choice stay the same."""
    cases = cases_of(4000, 40.0, 3)
    cases["said"][:, 5] = np.where(cases["failed_ns"] > 0, 0.4, 0.05)
    settled_ns = START_NS + 30 * DAY_NS
    planted = copy.deepcopy(cases)
    late = cases["t_ns"] + DAY_NS > settled_ns
    planted["failed_ns"][late] = cases["t_ns"][late] + 1
    planted["lost_ns"][late] = 0
    planted["x"][late] = 5.0
    planted["said"][late] = 0.5
    # Failures after it had settled are not known either.
    assert late.sum() > 500
    for use in (cases, planted):
        use["fit"] = fit_horizon(use, settled_ns, 86_400.0, 1, 0)
        use["choice"] = choose(use, settled_ns, 86_400.0, 1, NOBODY, 0)
    assert digest(planted["fit"]) == digest(cases["fit"])
    assert planted["choice"] == cases["choice"]


@pytest.mark.parametrize("x", [np.nan, 0.0], ids=["unknown", "all equal"])
def test_features_that_tell_nothing_grow_no_trees(x: float) -> None:
    cases = cases_of(2000, 30.0, 4)
    cases["x"][:] = x
    assert fit_horizon(cases, end_of(cases), 86_400.0, 1, 0) == {}


def test_few_failures_grow_no_trees() -> None:
    cases = cases_of(2000, 30.0, 5, share=0.005)
    assert fit_horizon(cases, end_of(cases), 86_400.0, 1, 0) == {}


def scored(p: Any, k: int = 3000, days: float = 30.0, share: float = 0.1) -> dict[str, Any]:
    cases = cases_of(k, days, 6, share=share)
    cases["said"][:, 5] = p(cases["failed_ns"] > 0)
    return cases


def decide(cases: dict[str, Any], before: Champion = NOBODY) -> Champion:
    end_ns = end_of(cases)
    return choose(cases, end_ns, 86_400.0, 1, before, 0)


def test_a_challenger_wins_on_evidence_alone() -> None:
    rng = np.random.default_rng(7)
    better = scored(lambda y: np.where(y, 0.3, 0.08))
    won = decide(better)
    assert won.hazard
    assert won.gain >= won.low > 0.0
    assert won.failures == (better["failed_ns"] > 0).sum()
    # In nats per failure: what two constants spare each failure, less what they cost the others
    y = better["failed_ns"] > 0
    spared = np.log(0.3 / 0.1) - (~y).sum() / y.sum() * np.log(0.9 / 0.92)
    assert won.gain == pytest.approx(spared, rel=1e-3)
    assert not decide(scored(lambda y: np.full(len(y), 0.1))).hazard, "as good"
    assert not decide(scored(lambda y: np.clip(rng.normal(0.1, 0.02, len(y)), 0.01, 1))).hazard, (
        "as good by chance"
    )
    assert not decide(scored(lambda y: np.where(y, 0.3, 0.08), 100)).hazard, "too few failures"
    assert not decide(scored(lambda y: np.where(y, 0.3, 0.08), 3000, 3.0)).hazard, "too few days"
    assert not decide(scored(lambda y: np.full(len(y), np.nan))).hazard, "it said nothing"


def test_a_champion_stays_while_it_is_better_at_all() -> None:
    held = Champion(True, 5 * NS, 0.5, 0.1, 0.9, 40)
    little = decide(scored(lambda y: np.where(y, 0.102, 0.1)), held)
    assert (little.hazard, little.since_ns) == (True, 5 * NS)
    worse = decide(scored(lambda y: np.where(y, 0.09, 0.1)), held)
    assert (worse.hazard, worse.since_ns) == (False, 0)


@pytest.mark.parametrize("bad", [np.zeros(5), np.array([1.0, np.nan, 0, 0, 0, 0]), np.zeros((6, 1))])
def test_a_champion_is_six_numbers(bad: np.ndarray) -> None:
    with pytest.raises(ContractError):
        Champion.of(bad)


def life(
    fleet: Fleet, days: float, model: Failure, begin: float = 0.0, step_d: float = 600 / 86_400
) -> list[Any]:
    """Live through some days; what was said of the next hour: (day, probabilities, who failed)."""
    nodes, starts = (np.array(x) for x in list(zip(*fleet.rows, strict=True))[:2])
    out, fitted = [], begin
    for day in np.arange(begin + step_d, days, step_d):
        view = fleet.view(day)
        model.update(view)
        mean = next(f.mean for f in model.predict(view) if f.signal == NODE)
        failed = np.zeros(fleet.n, bool)
        failed[nodes[(starts > day) & (starts <= day + 1 / 24)]] = True
        out.append((day, mean, failed))
        if day - fitted >= model.next_fit_s() / 86_400.0:
            fitted = day
            model.load(model.fit(model.training(), 0))
    return out


@pytest.mark.long
def test_signs_are_learned_and_what_is_said_comes_true() -> None:
    model, fleet = Failure(), Fleet(60, 40.0, 0.06, 0.6, 1)
    told = life(fleet, 40.0, model)
    assert model.fitted.champions[0].hazard
    assert model.fitted.champions[0].gain > 0.5
    basis = next(f.basis for f in model.predict(fleet.view(40.0)) if f.signal == NODE)
    assert "telemetry, since 2023-" in basis
    p = np.concatenate([mean[np.isfinite(mean)] for day, mean, _ in told if day > 25.0])
    y = np.concatenate([failed[np.isfinite(mean)] for day, mean, failed in told if day > 25.0])
    assert p.mean() == pytest.approx(y.mean(), rel=0.3)
    high = p > 0.02
    assert y[high].mean() == pytest.approx(p[high].mean(), rel=0.5)
    assert y[high].mean() > 10.0 * y[~high].mean()


@pytest.mark.long
def test_without_signs_the_baseline_stays_in_force() -> None:
    model = Failure()
    life(Fleet(60, 20.0, 0.09, 0.0, 2), 20.0, model, step_d=1200 / 86_400)
    assert model.fitted.hazards.places, "nothing was fitted: the test shows nothing"
    assert not any(c.hazard for c in model.fitted.champions)


@pytest.mark.long
def test_a_restart_changes_nothing() -> None:
    fleet, model = Fleet(40, 22.0, 0.1, 0.7, 3), Failure()
    life(fleet, 20.0, model, step_d=1200 / 86_400)
    assert model.fitted.hazards.places
    other = Failure()
    other.load(unpack(pack(model.parameters())))
    other.restore(unpack(pack(model.memory())))
    for k in range(40):
        view = fleet.view(20.0 + (k + 1) * 60.0 / 86_400.0)
        for each in (model, other):
            each.update(view)
        said = [[[f.mean, f.lo, f.hi, f.basis, f.model] for f in m.predict(view)] for m in (model, other)]
        assert digest(said[0]) == digest(said[1])
    assert digest(other.memory()) == digest(model.memory())
    assert digest(other.training()) == digest(model.training())


def test_garbage_features_break_nothing() -> None:
    model, rng = Failure(), np.random.default_rng(8)
    log = log_of([(node, 0.2 * node, 0.2 * node + 0.1, 0, False) for node in range(30)])
    for k in range(60):
        values = rng.choice([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, 7.0], (40, len(NAMES)))
        model.update(View(40, 7.0 + k / 48, log, values))
    model.load(model.fit(model.training(), 0))
    model.update(View(40, 9.0, log, values))
    for forecast in model.predict(View(40, 9.0, log, values)):
        assert np.isfinite(forecast.mean).all()


def told_for_an_hour() -> tuple[Failure, View]:
    """A model whose hazard is in force for the next hour alone, and a view that it has taken in."""
    cases = cases_of(3000, 30.0, 12)
    cases["how"][:] = np.where(cases["failed_ns"] > 0, BEFORE, QUIET)
    cases["said"][:, :4] = 1.8e-4  # of the literature's rate, as it is said below
    cases["failed_ns"] = np.where(cases["failed_ns"] > 0, cases["t_ns"] + 60 * NS, 0)
    model = Failure()
    fitted = fit_horizon(cases, end_of(cases), 3600.0, 0, 0)
    champions = np.array([Champion(i == 0, START_NS, 0.5, 0.2, 0.8, 300).array() for i in range(4)])
    model.load({
        "theta": np.zeros(len(PARTS)), "faults": np.zeros(1), "champions": champions,
        "names": np.frombuffer(b"ecc_sbe_recent\nbusy_pu", np.uint8),
        **{f"3600/{key}": array for key, array in fitted.items()},
    })  # fmt: skip
    values = np.array([[4.0, 0.0], [0.0, 0.0]])
    view = View(2, 1.0, log_of([]), values, ("ecc_sbe_recent", "busy_pu"))
    model.update(view)
    return model, view


def test_features_that_the_trees_do_not_know_are_waited_for_in_words_and_not_for_a_week() -> None:
    model, view = told_for_an_hour()
    model.begun_ns = START_NS - 400 * DAY_NS
    known = view.node_features()
    log = log_of([(0, 0.02 * k, 0.02 * k + 0.01, 0, False) for k in range(40)])
    model.update(View(2, 1.005, log, known.values, known.names))
    assert model.next_fit_s() > FIT_LEAST_S
    wider = np.column_stack([known.values, known.values[:, :1]])
    more = View(2, 1.01, log, wider, (*known.names, "age_d"))
    model.update(more)
    basis = next(f.basis for f in model.predict(more) if f.signal == NODE)
    assert "telemetry, since" not in basis
    assert "the next one takes it in" in basis
    assert model.next_fit_s() == FIT_LEAST_S


def test_who_fails_within_an_hour_fails_within_a_day() -> None:
    """Longer horizons are not below the hazard of the next hour."""
    model, view = told_for_an_hour()
    found = [f for f in model.predict(view) if f.signal == NODE]
    assert found[0].mean[0] > 5.0 * found[0].mean[1]
    assert (
        "telemetry, since 2023-11-14T22:10:00Z: better than the failure rates alone by 0.5" in found[0].basis
    )
    for shorter, longer in itertools.pairwise(found):
        assert (longer.mean >= shorter.mean).all()
        assert (longer.lo <= longer.mean).all()
        assert (longer.mean <= longer.hi).all()
    assert found[1].mean[0] == found[0].mean[0]


@pytest.mark.parametrize(
    "kind, shared, expected", [(0, False, "failed_ns"), (0, True, "lost_ns"), (2, False, "lost_ns")]
)
def test_only_a_failure_of_its_own_is_an_outcome(kind: int, shared: bool, expected: str) -> None:
    model, values = Failure(), quiet(3)
    values[1, NAMES.index("ecc_sbe_recent")] = 3.0
    for slot in range(20):
        log = log_of([(1, 1.05, 0.0, kind, shared)] if slot > 8 else [])
        model.update(View(3, 1.0 + slot / 144, log, values))
    mine = (model.cases.get("node") == 1) & (model.cases.get("t_ns") < START_NS + round(1.05 * DAY_NS))
    assert mine.any()
    for name in ("failed_ns", "lost_ns"):
        assert (model.cases.get(name)[mine] > 0).all() == (name == expected)
        assert not model.cases.get(name)[~mine].any()


def test_work_at_a_node_ends_what_can_be_seen_of_it() -> None:
    model, values = Failure(), quiet(3)
    values[1, NAMES.index("ecc_sbe_recent")] = 3.0
    for slot in range(12):
        view = View(3, 1.0 + slot / 144, log_of([]), values)
        view.under = np.arange(3) == 1 if slot > 8 else None
        model.update(view)
    mine = model.cases.get("node") == 1
    assert mine.any()
    assert (model.cases.get("lost_ns")[mine] == START_NS + DAY_NS + 9 * 600 * NS).all()
    assert not model.cases.get("lost_ns")[~mine].any()


def test_a_replaced_node_is_another() -> None:
    model, log = Failure(), log_of([(0, 0.5, 0.6, 0, False)])
    values = quiet(5)
    values[2, NAMES.index("ecc_sbe_recent")] = 3.0
    for k in range(10):
        model.update(View(5, 1.0 + k / 144, log, values))
    model.forget("node", 2)
    mine = model.cases.get("node") == 2
    assert mine.any()
    assert (model.cases.get("lost_ns")[mine] > 0).all()
    assert not model.cases.get("lost_ns")[~mine].any()
    model.forget("gpu", 1)
    model.forget("node", 99)


def test_parameters_of_another_kind_are_refused() -> None:
    model, fleet = Failure(), Fleet(10, 5.0, 0.5, 0.5, 9)
    for day in np.arange(0.1, 5.0, 0.05):
        model.update(fleet.view(day))
    good = model.fit(model.training(), 0)
    model.load(good)
    kept = digest(model.parameters())
    for bad in (
        good | {"theta": np.full(3, 1.0)}, good | {"faults": np.array([-1.0])}, good | {"other": np.zeros(1)},
        good | {"champions": good["champions"][:2]}, {k: v for k, v in good.items() if k != "names"},
        good | {"champions": good["champions"] + np.array([1.0, 0, 0, 0, 0, 0])},
        good | {"names": np.array(["level", "action"])}, good | {"names": np.array([None])},
        good | {f"{HORIZONS_S[0]:g}/line": np.zeros(3)},
    ):  # fmt: skip
        with pytest.raises(ContractError):
            model.load(bad)
        assert digest(model.parameters()) == kept
    with pytest.raises(ContractError):
        model.fit({}, 0)
    model.restore({"horizons_s": np.array([1.0])})
    assert model.begun_ns == 0
