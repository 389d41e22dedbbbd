"""Arms of the replacement backtest: what they may know, what they come to, and how they are compared."""

from __future__ import annotations

import numpy as np
import pytest

from models.failure import FaultLog
from tests.evaluation.replacement.fleet import DAY_S, HOUR_S, MEASURED, NONE, draw
from tests.evaluation.replacement.jobs import SAVE_S
from tests.evaluation.replacement.quarter import SERVICE
from tests.evaluation.replacement.replay import Replayed, scored
from tests.evaluation.replacement.rivals import AfterTest, Counted, Oracle, at
from tests.evaluation.replacement.scores import FIGURES, FleetQuarter, compared, goals, live_task, paired
from tests.evaluation.replacement.view import START_NS, FleetView
from tests.support.small_fleet import SMALL, N, Says, lived, one_fault, small
from twin.catalogue import NS
from twin.contracts import Proposal


@pytest.mark.evaluation
def test_the_oracle_is_struck_by_nothing_and_the_rivals_by_less() -> None:
    truth = small(2, 12.0)
    reactive = lived(truth).floor.tally
    oracle = lived(truth, lambda q: Oracle(q.nodes)).floor.tally
    counted = lived(truth, lambda q: Counted(q.view)).floor.tally
    tested = lived(truth, lambda q: AfterTest(q.view)).floor.tally
    assert oracle.interruptions == 0 < reactive.interruptions
    assert sum(oracle.lost.values()) < 0.6 * sum(reactive.lost.values())
    assert counted.interruptions < reactive.interruptions
    assert tested.interruptions < reactive.interruptions


@pytest.mark.evaluation
def test_what_is_told_ahead_never_comes_from_a_fault_without_a_warning() -> None:
    """With no warnings, no verdict ever speaks: the view has nothing of the truth."""
    truth = draw(SMALL, NONE, 1, 5 * DAY_S, N)
    told = []

    def say(view: FleetView) -> list[Proposal]:
        told.append(bool((view.told & ~view.down).any()))
        return []

    lived(truth, lambda q: Says(say))
    assert told
    assert not any(told)


@pytest.mark.evaluation
def test_forecasts_rest_on_the_past_alone() -> None:
    """Two fleets that differ in what is to come are forecast alike."""

    def first(later_h: float) -> np.ndarray:
        kept: list[np.ndarray] = []

        def say(view: FleetView) -> list[Proposal]:
            if view.now_ns <= START_NS + round(50 * HOUR_S) * NS:
                kept.append(view.forecasts["node.failure_pu", 86_400.0].mean.copy())
            return []

        lived(one_fault(later_h), lambda q: Says(say))
        return kept[-1]

    assert np.array_equal(first(60.0), first(110.0), equal_nan=True)
    assert not np.array_equal(first(45.0), first(110.0), equal_nan=True)


@pytest.mark.evaluation
@pytest.mark.parametrize("arm", ["reactive", "replacement"])
def test_an_arm_lives_and_its_figures_are_whole(arm: str) -> None:
    row = live_task(FleetQuarter(SMALL, MEASURED, 1, arm, 3.0, 1.0, 2))
    assert row["total_gpu_h"] == pytest.approx(row["lost_gpu_h"] + row["out_gpu_h"])
    assert 0.0 < row["goodput_pu"] <= 1.0
    assert row["lost_gpu_h"] == pytest.approx(
        sum(v for k, v in row.items() if k.startswith("lost_") and k != "lost_gpu_h")
    )


def test_paired_differences_have_students_interval() -> None:
    found = paired(np.array([1.0, 2.0, 3.0, 4.0]))
    assert found["mean"] == 2.5
    assert found["worst"] == 1.0
    assert found["high"] - 2.5 == pytest.approx(2.353 * np.std([1, 2, 3, 4], ddof=1) / 2.0)
    assert np.isnan(paired(np.array([1.0]))["low"])


def test_goals_are_judged_beside_the_oracle() -> None:
    rows = []
    for seed, (ours, best) in enumerate([(60.0, 10.0), (70.0, 10.0), (65.0, 20.0)]):
        for arm, lost in (("reactive", 100.0), ("replacement", ours), ("oracle", best)):
            others = dict.fromkeys([key for key, _ in FIGURES], 0.04)
            rows.append({**others, "arm": arm, "seed": seed, "lost_gpu_h": lost, "total_gpu_h": lost})
    told = compared(rows)
    ours_told = next(a for a in told["arms"] if a["arm"] == "replacement")
    assert ours_told["lost_gpu_h_of_oracle"]["pu"] == pytest.approx(105.0 / 260.0)
    found = goals([{"scenario": "lemons", "warnings": "measured", **told}])
    assert [g["met"] for g in found] == [True, True, True]


def test_a_replay_meets_what_comes_while_a_node_is_out() -> None:
    """Node 3 fails every five days; withdrawn from day 21 for ever, it meets the faults that follow."""
    start_d = np.arange(2.0, 40.0, 5.0)
    k = len(start_d)
    log = FaultLog(
        16, np.full(k, 3, np.int32), start_d, start_d + 0.5, np.zeros(k, np.int32), ("x",), 0.0, 40.0
    )

    def say(view: FleetView) -> list[Proposal]:
        return at(SERVICE, np.array([3]), 3.0, "out")

    found = Replayed(log, 21.0, lambda view: Says(say)).run()
    told = scored(log, 21.0, "says", found.withdrawn, found.met, found.out_d)
    assert [node for node, _ in found.withdrawn] == [3]
    assert told["precision"] == 1.0
    assert told["avoided"] == int((start_d > 21.0).sum()) == told["faults"]
    assert told["recall"] == pytest.approx(2 / 4), "the faults of days 22 and 27, within a week of day 21"
    assert told["base_precision"] < 0.2
    assert SAVE_S == 60.0
