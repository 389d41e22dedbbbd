"""Backtests in processes side by side, the bar, and a rival: the same numbers, and clean ends."""

from __future__ import annotations

import importlib.util
import io
import time
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.backtest import Terms
from models.panel import Panel
from models.scores import each_cells
from twin.app import backtest_rival
from twin.app.backtest_rival import (
    beside_rival,
    check_installed,
    rival_lines,
    rival_markdown,
    rival_of,
    terms_of,
    who,
)
from twin.app.backtest_run import Ask, Bar, run_all
from twin.errors import ConfigError, TwinError


def panel_of(n: int = 400, k: int = 2, seed: int = 0) -> Panel:
    rng = np.random.default_rng(seed)
    return Panel(0, 60.0, rng.normal(size=(n, k)).cumsum(axis=0), tuple(f"s{i}" for i in range(k)))


def quiet() -> Bar:
    return Bar(Console(file=io.StringIO()), "backtest")


@pytest.mark.slow
def test_the_numbers_do_not_hang_on_the_number_of_processes() -> None:
    names = ("last", "ewma5", "linear")
    asks = [Ask(panel_of(seed=i), (1, 5, 100), names, terms_of(0.5)) for i in range(2)]
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
    asks = [Ask(wrong, (1, 100), ("no such",), Terms())]
    with pytest.raises(KeyError):
        run_all(asks, 1, quiet())
    with pytest.raises(TwinError, match="expected at most 199"):
        run_all([Ask(wrong, (1, 300), ("last",), Terms())], 2, quiet())


@pytest.mark.slow
def test_the_bar_moves_within_fits_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str]] = []

    class Seen(Bar):
        def move(self, share: float, note: str = "") -> None:
            seen.append((share, note))

    ask = Ask(panel_of(), (1, 5, 100), ("last", "linear", "autoregression"), terms_of(0.5))
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
    bar = Bar(Console(file=out, force_terminal=True, width=120), "x")
    bar.move(0.25, "fitting linear")
    assert bar._progress is not None
    assert bar._progress.tasks[0].fields["left"] == "about 1 min 30 s left"
    assert bar._progress.tasks[0].fields["note"] == "fitting linear"


def compared(names: tuple[str, str] = ("ewma5", "last"), pooled: list[int] | None = None) -> dict[str, Any]:
    panel = panel_of(600)
    asks = [Ask(panel, (1, 20), (name,), terms_of(0.5)) for name in names]
    ours, other = run_all(asks, 1, quiet())
    told = beside_rival(names[1], (ours, each_cells(ours)), (other, each_cells(other)), pooled or [0, 1])
    return told


def test_a_rival_beside_is_told_by_horizon_as_a_whole_and_for_what_stands_alone() -> None:
    told = compared(pooled=[0])
    assert [h["horizon_steps"] for h in told["horizons"]] == [1, 20]
    assert told["horizons"][0]["ratio"] > 1.0  # a mean lags behind a random walk
    assert told["horizons"][0]["better"] == "rival"
    assert told["overall"]["better"] == "rival"
    assert set(told["overall_of"]) == set(told["horizons"][0]["series"]) == {"s1"}
    assert told["budget"]["rival_fits"] == 0
    lines = rival_markdown([{"name": "A | b", "rival": told}])
    rows = [line for line in lines if line.startswith("| A")]
    assert len(rows) == 2 * 3
    assert any("last, not sure" in who(h, "last") or who(h, "last") == "last" for h in told["horizons"])
    assert any("all horizons" in line for line in rival_lines(told))


def test_the_same_forecaster_is_even_with_itself() -> None:
    told = compared(("last", "last"))
    assert [h["ratio"] for h in told["horizons"]] == [1.0, 1.0]
    assert who(told["overall"], "last") == "even"


def test_without_its_library_a_forecaster_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--rival lstm: needs PyTorch.*racktwin\[torch\]"):
        rival_of("lstm")
    with pytest.raises(ConfigError, match=r"--model lstm: needs PyTorch"):
        check_installed(["last", "lstm"], "--model")
    assert rival_of("linear") == "linear"
    assert rival_of(None) is None
    with pytest.raises(ConfigError, match="--rival oracle: expected one of last,"):
        rival_of("oracle")


def test_a_rival_that_cannot_learn_is_told() -> None:
    panel = panel_of(60)
    asks = [Ask(panel, (1, 6), (name,), terms_of(0.5)) for name in ("last", "gradient_boosting")]
    ours, other = run_all(asks, 1, quiet())
    assert (ours.silent, other.silent) == ((), ("gradient_boosting",))
    words = backtest_rival.budget_words("gradient_boosting", ours, other)
    assert words.endswith("gradient_boosting found too few rows to learn from, and says the last value")
    assert "too few" not in backtest_rival.budget_words("last", ours, ours)


def test_a_slow_rival_is_fitted_more_seldom_and_once_for_all_horizons() -> None:
    assert (terms_of(0.5, "lstm").refits, terms_of(0.5, "lstm").as_one) == (4, True)
    assert (terms_of(0.5, "linear").refits, terms_of(0.5).as_one) == (8, False)
    assert backtest_rival.SLOW_REFITS.keys() == backtest_rival.NEEDS.keys()


@pytest.mark.slow
def test_the_lstm_beside_our_own() -> None:
    pytest.importorskip("torch")
    panel = panel_of(900, 1)
    asks = [
        Ask(panel, (1, 90), ("last", "ewma5"), terms_of(0.5)),
        Ask(panel, (1, 90), ("lstm",), terms_of(0.5, "lstm")),
    ]
    ours, other = run_all(asks, 1, quiet())
    told = beside_rival("lstm", (ours, each_cells(ours)), (other, each_cells(other)), [0])
    assert told["budget"]["rival_fits"] == 4
    assert told["budget"]["rival_fits_cpu_s"] > 0.0
    assert "tries 8 settings" in told["budget_words"]
