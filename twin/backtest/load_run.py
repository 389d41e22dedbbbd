"""Load backtests in one process or in several, and a rival on the same origins.

A group of horizons is one task, as it is lived through by itself. A rival runs with the same bands,
rounding and calibration as the blend, so that only the forecasts differ.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from models.backtest import (
    FIT_ISSUES,
    BacktestGroup,
    BacktestResult,
    BacktestTerms,
    Cells,
    GroupResult,
    compare_errors,
    groups_of,
    join,
    overall,
    run_group,
    to_rival,
    winner,
)
from models.load import FORECASTERS, Forecaster, SeriesPanel, stride
from twin.catalogue import ConfigError, number
from twin.run import Pool, ProgressBar, Report

USUAL_FITS = 30  # that a daemon makes in a month. source: estimate; to share out the work


class BacktestTask(NamedTuple):
    """One backtest: a panel, its horizons and the forecasters by name."""

    panel: SeriesPanel
    horizons: tuple[int, ...]
    kinds: Mapping[str, type[Forecaster]]
    terms: BacktestTerms


Group = tuple[BacktestTask, tuple[int, ...]]  # a backtest, and horizons of it that are lived through together


def run_all(asks: Sequence[BacktestTask], jobs: int, bar: ProgressBar) -> list[BacktestResult]:
    """The results of all backtests, in their order. Raises TwinError as `models.backtest.load` does."""
    groups = [groups_of(ask.panel, ask.horizons, ask.terms) for ask in asks]
    tasks = [(ask, group) for ask, own in zip(asks, groups, strict=True) for group in own]
    parts = iter(Pool(_run_group, jobs, bar.move).results(tasks, [_cost(*task) for task in tasks]))
    return [
        join(ask.panel, ask.horizons, tuple(ask.kinds), ask.terms, [next(parts) for _ in own])
        for ask, own in zip(asks, groups, strict=True)
    ]


def _cost(ask: BacktestTask, group: tuple[int, ...]) -> float:
    """The approximate cost of a group, in forecasts of one horizon."""
    rows = sum(ask.panel.n_time / stride(h) for h in group)
    fitted = any(kind.fitted for kind in ask.kinds.values())
    return rows + (FIT_ISSUES * (ask.terms.refits or USUAL_FITS) if fitted else 0)


def _run_group(task: Group, report: Report) -> GroupResult:
    """One group of horizons. Numbers that overflow are judged, not warned of."""
    ask, group = task
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_group(BacktestGroup(ask.panel, ask.horizons, group), ask.kinds, ask.terms, report)


@dataclass(frozen=True)
class Rival:
    """A forecaster by name. `as_one`: one fit serves all horizons; `cost_note`: what its fits include."""

    name: str
    kind: type[Forecaster]
    refits: int | None = None  # as the daemon
    as_one: bool = False
    cost_note: str = ""


def find_rival(name: str | None, others: Mapping[str, Rival] | None = None) -> Rival | None:
    """The rival of this name: one of `others`, or a forecaster of the blend. ConfigError for any other."""
    if name is None:
        return None
    if others and name in others:
        return others[name]
    if name not in FORECASTERS:
        known = ", ".join((*FORECASTERS, *(others or ())))
        raise ConfigError(f"--rival {name}: expected one of {known}")
    return Rival(name, FORECASTERS[name])


def backtest_terms(
    start: float, rival: Rival | None = None, checks_fits: bool = True, refits: int | None = None
) -> BacktestTerms:
    """Terms of a backtest of the blend, or of this rival in its place. `refits` None: as the daemon."""
    return BacktestTerms(
        start,
        refits if rival is None or rival.refits is None else rival.refits,
        checks_fits=checks_fits,
        as_one=rival is not None and rival.as_one,
        clock=time.perf_counter,
        cpu=time.process_time,
    )


def compare_rival(
    rival: Rival,
    ours: tuple[BacktestResult, Sequence[Cells]],
    theirs: tuple[BacktestResult, Sequence[Cells]],
    pooled: Sequence[int],
) -> dict[str, Any]:
    """Comparison as plain data: per horizon, over all of them, and the processor time of both."""
    panel = ours[0].panel
    alone = [j for j in range(panel.n) if j not in pooled]
    horizons = []
    for held, other in zip(ours[1], theirs[1], strict=True):
        row = {"horizon_steps": held.horizon, "horizon_s": held.horizon * panel.step_s}
        more = {panel.names[j]: compare_errors(held, other, [j]) for j in alone}
        horizons.append(row | compare_errors(held, other, pooled) | {"series": more})

    def whole(columns: Sequence[int]) -> dict[str, Any]:
        scores = overall([to_rival(a, b, columns) for a, b in zip(ours[1], theirs[1], strict=True)])
        found: dict[str, Any] = dict(scores)
        return found | winner(found["ratio"], 1.0, found["low"], found["high"])

    return {
        "name": rival.name,
        "horizons": horizons,
        "overall": whole(pooled),
        "overall_of": {panel.names[j]: whole([j]) for j in alone},
        "budget": {
            "ours_fits": len(ours[0].cuts),
            "ours_fits_cpu_s": round(ours[0].fits_cpu_s, 3),
            "rival_fits": len(theirs[0].cuts),
            "rival_fits_cpu_s": round(theirs[0].fits_cpu_s, 3),
        },
        "budget_words": budget_words(rival, ours[0], theirs[0]),
    }


def budget_words(rival: Rival, ours: BacktestResult, other: BacktestResult) -> str:
    """A sentence on the processor time of both."""
    cost = (
        f"processor time of all fits: our blend {number(ours.fits_cpu_s)} s ({len(ours.cuts)} fits), "
        f"{rival.name} {number(other.fits_cpu_s)} s ({len(other.cuts)} fits{rival.cost_note}"
    )
    few = f"; {rival.name} found too few rows to learn from, and says the last value"
    return cost + ")" + (few if rival.name in other.silent else "")
