"""Backtests in processes side by side, the bar, and a rival: the same numbers, and clean ends."""

from __future__ import annotations

import importlib.util
import io
import time
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.backtest import BacktestTerms, each_cells
from models.load import FORECASTERS, Forecaster, SeriesPanel
from tests.evaluation.forecasts import suite
from tests.evaluation.forecasts.lstm_rival import LSTM, RIVALS, check_installed
from twin.backtest import BacktestTask, Rival, backtest_terms, better_of, compare_rival, find_rival, run_all
from twin.backtest.load_report import rival_lines
from twin.backtest.load_run import budget_words
from twin.catalogue import ConfigError, TwinError
from twin.run import ProgressBar


def panel_of(n: int = 400, k: int = 2, seed: int = 0) -> SeriesPanel:
    rng = np.random.default_rng(seed)
    return SeriesPanel(0, 60.0, rng.normal(size=(n, k)).cumsum(axis=0), tuple(f"s{i}" for i in range(k)))


def kinds_of(*names: str) -> dict[str, type[Forecaster]]:
    return {name: FORECASTERS[name] for name in names}


def quiet() -> ProgressBar:
    return ProgressBar(Console(file=io.StringIO()), "backtest")


@pytest.mark.long
def test_the_numbers_do_not_hang_on_the_number_of_processes() -> None:
    kinds = kinds_of("last", "ewma5", "linear")
    asks = [BacktestTask(panel_of(seed=i), (1, 5, 100), kinds, backtest_terms(0.5)) for i in range(2)]
    alone, beside = (run_all(asks, jobs, quiet()) for jobs in (1, 2))
    for one, other in zip(alone, beside, strict=True):
        assert one.cuts == other.cuts
        assert [c.horizon for c in other.courses] == [1, 5, 100]
        for a, b in zip(one.courses, other.courses, strict=True):
            np.testing.assert_allclose(a.quantiles, b.quantiles, rtol=1e-9)
            np.testing.assert_array_equal(a.origins, b.origins)


@pytest.mark.slow
def test_an_error_in_a_worker_is_told_in_its_words() -> None:
    wrong = panel_of()
    with pytest.raises(TwinError, match="expected at most 199"):
        run_all([BacktestTask(wrong, (1, 300), kinds_of("last"), BacktestTerms())], 2, quiet())


@pytest.mark.long
def test_the_bar_moves_within_fits_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str]] = []

    class Seen(ProgressBar):
        def move(self, share: float, note: str = "") -> None:
            seen.append((share, note))

    ask = BacktestTask(
        panel_of(), (1, 5, 100), kinds_of("last", "linear", "autoregression"), backtest_terms(0.5, refits=8)
    )
    run_all([ask, ask], 1, Seen(Console(file=io.StringIO()), "x"))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)
    fits = [share for share, note in seen if note.startswith("fitting")]
    assert {note for _, note in seen} >= {"fitting linear", "fitting autoregression", "forecasting"}
    assert len(set(fits)) == len(fits) == 2 * 2 * 2 * 8  # asks, groups, forecasters, cuts
    clock = iter([0.0, 30.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 90.0))
    out = io.StringIO()
    bar = ProgressBar(Console(file=out, force_terminal=True, width=120), "x")
    bar.move(0.25, "fitting linear")
    assert bar._progress is not None
    assert bar._progress.tasks[0].fields["left"] == "about 1 min 30 s left"
    assert bar._progress.tasks[0].fields["note"] == "fitting linear"


def compared(names: tuple[str, str] = ("ewma5", "last"), pooled: list[int] | None = None) -> dict[str, Any]:
    panel = panel_of(600)
    asks = [BacktestTask(panel, (1, 20), kinds_of(name), backtest_terms(0.5)) for name in names]
    ours, other = run_all(asks, 1, quiet())
    told = compare_rival(
        Rival(names[1], FORECASTERS[names[1]]),
        (ours, each_cells(ours)),
        (other, each_cells(other)),
        pooled or [0, 1],
    )
    return told


@pytest.mark.long
def test_a_rival_beside_is_told_by_horizon_as_a_whole_and_for_what_stands_alone() -> None:
    told = compared(pooled=[0])
    assert [h["horizon_steps"] for h in told["horizons"]] == [1, 20]
    assert told["horizons"][0]["ratio"] > 1.0  # a mean lags behind a random walk
    assert told["horizons"][0]["better"] == "rival"
    assert told["overall"]["better"] == "rival"
    assert set(told["overall_of"]) == set(told["horizons"][0]["series"]) == {"s1"}
    assert told["budget"]["rival_fits"] == 0
    lines = suite._rival_markdown([{"name": "A | b", "rival": told}])
    rows = [line for line in lines if line.startswith("| A")]
    assert len(rows) == 2 * 3
    assert any(
        "last, not sure" in better_of(h, "last") or better_of(h, "last") == "last" for h in told["horizons"]
    )
    assert any("all horizons" in line for line in rival_lines(told))


@pytest.mark.long
def test_the_same_forecaster_is_even_with_itself() -> None:
    told = compared(("last", "last"))
    assert [h["ratio"] for h in told["horizons"]] == [1.0, 1.0]
    assert better_of(told["overall"], "last") == "even"


def test_without_its_library_a_forecaster_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_rival("lstm", RIVALS) == LSTM
    with pytest.raises(ConfigError, match=r"--rival lstm: needs PyTorch.*racktwin\[torch\]"):
        check_installed(LSTM)
    linear = find_rival("linear", RIVALS)
    assert linear == Rival("linear", FORECASTERS["linear"])
    check_installed(linear)
    assert find_rival(None) is None
    with pytest.raises(ConfigError, match="--rival lstm: expected one of last,"):
        find_rival("lstm")
    with pytest.raises(ConfigError, match="--rival oracle: expected one of last,"):
        find_rival("oracle")


def test_a_rival_that_cannot_learn_is_told() -> None:
    panel = panel_of(60)
    asks = [
        BacktestTask(panel, (1, 6), kinds_of(name), backtest_terms(0.5))
        for name in ("last", "gradient_boosting")
    ]
    ours, other = run_all(asks, 1, quiet())
    assert (ours.silent, other.silent) == ((), ("gradient_boosting",))
    words = budget_words(Rival("gradient_boosting", FORECASTERS["gradient_boosting"]), ours, other)
    assert words.endswith("gradient_boosting found too few rows to learn from, and says the last value")
    assert "too few" not in budget_words(Rival("last", FORECASTERS["last"]), ours, ours)


def test_a_slow_rival_is_fitted_more_seldom_and_once_for_all_horizons() -> None:
    assert (backtest_terms(0.5, LSTM).refits, backtest_terms(0.5, LSTM).as_one) == (4, True)
    assert (backtest_terms(0.5, find_rival("linear")).refits, backtest_terms(0.5).as_one) == (None, False)


@pytest.mark.evaluation
def test_the_lstm_beside_our_own() -> None:
    pytest.importorskip("torch")
    panel = panel_of(900, 1)
    asks = [
        BacktestTask(panel, (1, 90), kinds_of("last", "ewma5"), backtest_terms(0.5)),
        BacktestTask(panel, (1, 90), {"lstm": LSTM.kind}, backtest_terms(0.5, LSTM)),
    ]
    ours, other = run_all(asks, 1, quiet())
    told = compare_rival(LSTM, (ours, each_cells(ours)), (other, each_cells(other)), [0])
    assert told["budget"]["rival_fits"] == 4
    assert told["budget"]["rival_fits_cpu_s"] > 0.0
    assert "tries 8 settings" in told["budget_words"]
