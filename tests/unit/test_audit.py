"""The audit of a backtest: each kind of look ahead that is planted is caught and named; no honest rule is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest

from models.backtest import (
    BacktestGroup,
    BacktestTerms,
    LookAhead,
    audit,
    differ,
    lines,
    load as backtest,
    run_group,
)
from models.backtest.audit import spoil
from models.load import ForecastGrid, Parameters, QuantileForecast, SeriesPanel, forward_fill
from twin.catalogue import F64, I64

N = 400


class Rule:
    """A forecaster made of one line: the value of `at` for every horizon."""

    name: ClassVar[str] = "rule"
    fitted: ClassVar[bool] = False

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid, self.level = grid, np.nan

    @property
    def reach_rows(self) -> int:
        return 50

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        return {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.level = float(parameters["level"][0]) if parameters else np.nan

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        return forward_fill(panel.values)[origins]

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        return QuantileForecast(np.repeat(self.at(panel, origins)[None], len(self.grid.horizons), axis=0))


class Honest(Rule):
    name = "honest"


class NextRow(Rule):
    name = "next_row"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        return panel.values[np.minimum(origins + 1, panel.n_time - 1)]


class Centred(Rule):
    """Smoothing with as many rows after as before."""

    name = "centred"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        around = np.clip(origins[:, None] + np.arange(-3, 4), 0, panel.n_time - 1)
        return np.nan_to_num(panel.values[around]).mean(axis=1)


class Scaled(Rule):
    """Pulled to the mean of all rows that were handed over."""

    name = "scaled"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        return 0.9 * forward_fill(panel.values)[origins] + 0.1 * np.nanmean(panel.values, axis=0)


class Batched(Rule):
    """Pulled to the mean over the origins that it is asked for at once."""

    name = "batched"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        last = forward_fill(panel.values)[origins]
        return last - 0.01 * last.mean(axis=0)


class Interpolated(Rule):
    """Fills gaps from both sides."""

    name = "interpolated"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        out = []
        for column in panel.values.T:
            known = np.flatnonzero(np.isfinite(column))
            out.append(np.interp(origins, known, column[known]) if len(known) else np.full(len(origins), 0.0))
        return np.stack(out, axis=1)


class Fitted(Rule):
    name = "fitted"
    fitted = True

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        return {"level": np.array([np.nanmean(past.values)])}

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        return np.full((len(origins), panel.n), self.level)


class Underneath(Fitted):
    """Its fit looks below the view that it was given."""

    name = "underneath"

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        base = past.values.base
        return {"level": np.array([np.nanmean(past.values if base is None else base)])}


class LateFitted(Underneath):
    """Has nothing to say after its first fits, and looks ahead from then on."""

    name = "late_fitted"

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        return super().fit(past, seed) if past.n_time > 100 else {}


class Ahead(Rule):
    """Reads what is known ahead: allowed."""

    name = "ahead"

    def at(self, panel: SeriesPanel, origins: I64) -> F64:
        at = np.minimum(origins + self.grid.horizons[0], len(panel.known["plan"]) - 1)
        return np.repeat(panel.known["plan"][at][:, None], panel.n, axis=1)


def walk(gap: bool = False) -> SeriesPanel:
    rng = np.random.default_rng(4)
    values = np.cumsum(rng.normal(size=(N, 2)), axis=0)
    plan = np.append(values[:, 0], np.zeros(20))
    if gap:
        values[300:320, 1] = np.nan
    return SeriesPanel(0, 60.0, values, ("a", "b"), known={"plan": plan})


def run(*kinds: type[Rule], panel: SeriesPanel | None = None) -> backtest.Result:
    return backtest.backtest(panel or walk(), (1, 4, 40), {kind.name: kind for kind in (Honest, *kinds)})


@pytest.mark.parametrize("kind", [NextRow, Centred, Scaled, Batched, Interpolated, Underneath, LateFitted])
def test_a_planted_leak_is_caught_and_named(kind: type[Rule]) -> None:
    with pytest.raises(LookAhead, match=kind.name) as caught:
        run(Fitted, kind, panel=walk(gap=True))
    assert kind.name in caught.value.who
    assert 0 <= caught.value.row < N


def test_rules_that_look_back_and_at_what_is_known_ahead_pass() -> None:
    result = run(Fitted, Ahead, panel=walk(gap=True))
    assert result.origins_checked > 50


def test_the_row_that_is_named_is_the_last_that_knows_nothing_of_what_was_replaced() -> None:
    with pytest.raises(LookAhead) as caught:
        run(NextRow)
    assert caught.value.row == 200 + int(backtest.AUDITED[0] * 199)


def test_a_fit_that_is_given_rows_after_its_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = backtest.Experts.fit_before

    def late(self: backtest.Experts, panel: SeriesPanel, cut: int, names: list[str]) -> dict[str, Parameters]:
        return honest(self, panel, min(cut + 1, panel.n_time), names)

    monkeypatch.setattr(backtest.Experts, "fit_before", late)
    with pytest.raises(LookAhead, match="the fit of fitted"):
        run(Fitted)


@pytest.mark.parametrize("horizon", [1, 4, 40])
def test_a_combination_that_is_taught_a_row_too_early_is_caught(
    monkeypatch: pytest.MonkeyPatch, horizon: int
) -> None:
    class Early(backtest.HorizonLine):
        def advance(
            self, panel: SeriesPanel, words: backtest.ExpertForecasts, origins: I64
        ) -> tuple[F64, F64]:
            learn = self.online.learn
            ahead = np.vstack([panel.values[1:], panel.values[-1:]])
            self.online.learn = lambda row, actual: learn(row, ahead[row])  # type: ignore[method-assign]
            try:
                return super().advance(panel, words, origins)
            finally:
                del self.online.learn

    monkeypatch.setattr(backtest, "HorizonLine", Early)
    with pytest.raises(LookAhead, match=f"the combination {horizon} rows ahead"):
        backtest.backtest(walk(), (horizon,), {"honest": Honest})


def test_bands_that_are_given_a_later_row_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = lines.restlessness

    def peeking(values: F64, origins: I64) -> F64:
        return honest(values, np.minimum(origins + 1, len(values) - 1))

    monkeypatch.setattr(lines, "restlessness", peeking)
    with pytest.raises(LookAhead, match="the combination"):
        run()


def test_spoiling_leaves_the_past_and_what_is_known_ahead() -> None:
    panel = walk()
    for how in audit.SPOILS:
        other = spoil(panel, 100, how)
        np.testing.assert_array_equal(other.values[:101], panel.values[:101])
        assert not np.isclose(other.values[101:], panel.values[101:]).any()
        assert other.known is panel.known
    assert np.isnan(spoil(panel, 100, "gaps").values[101:]).all()


def test_numbers_differ_by_more_than_the_order_of_a_sum() -> None:
    one = np.array([1.0, 1.0, np.nan, np.nan, 0.0, np.inf])
    other = np.array([1.0 + 1e-12, 1.0 + 1e-5, np.nan, 1.0, 1e-30, np.inf])
    assert differ(one, other).tolist() == [False, True, False, True, True, False]


def test_a_horizon_without_an_origin_near_an_audited_row_is_passed_over() -> None:
    audit.check_issued("x", np.zeros(0, np.int64), np.zeros((0, 2, 7)), np.zeros((0, 2, 7)), "gaps")
    rule = BacktestTerms(as_one=True)
    run_group(
        BacktestGroup(walk(), (1, 190), (1, 190)), {"honest": Honest}, rule
    )  # one row in 11 for the second
