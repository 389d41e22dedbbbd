"""A small made-up fleet and what lives in it, for tests of the replacement backtest.

quarter = lived(one_fault(at_h=30.0), lambda quarter: Says(lambda view: []))
"""

from __future__ import annotations

import numpy as np

from tests.evaluation.replacement.fleet import DAY_S, HOUR_S, MEASURED, Scenario, Truth, draw
from tests.evaluation.replacement.quarter import Quarter
from tests.evaluation.replacement.view import FleetView, quarter_site
from twin.catalogue import Bool
from twin.contracts import Proposal

SMALL = Scenario("small", "a fleet that fails often", 30e-3, 0.03, 0.3, 2 * HOUR_S)
SITE = quarter_site(racks=2)  # 64 nodes, half of them stand by: halls of a rack and a spare one
N = SITE.sizes["node"]


def small(seed: int = 1, days: float = 20.0, scenario: Scenario = SMALL) -> Truth:
    return draw(scenario, MEASURED, seed, days * DAY_S, N)


def lived(truth: Truth, make: object = None, warm_s: float = 0.0) -> Quarter:
    quarter = Quarter(SITE, truth, 1, SMALL.rate, SMALL.job_s, 0.67, warm_s)
    quarter.run(None if make is None else make(quarter))  # type: ignore[operator]
    return quarter


def one_fault(at_h: float, shows: bool = False, again: bool = False, delay_h: float = 1.0) -> Truth:
    """Node 0 fails once, after so many hours; its repair takes ten hours."""
    blank = small()
    none = np.zeros((1, 8), np.bool_)
    first = none.copy()
    first[0, 0] = True
    whole = np.full((1, 8), 10 * HOUR_S)
    return Truth(
        N, 5 * DAY_S, np.zeros(N, np.bool_), np.zeros(1, np.int32), np.array([at_h * HOUR_S]),
        np.zeros(1, np.bool_), whole, first if again else none, np.full((1, 8), delay_h * HOUR_S),
        first if shows else none, first if shows else none, np.full((1, 8), 2 * HOUR_S),
        np.zeros((1, 8)), np.zeros(0, np.int32), np.zeros(0), np.full_like(blank.test_chance, 0.5),
    )  # fmt: skip


class Says:
    """An arm that says what a function of the view says."""

    name = "says"

    def __init__(self, say: object, swap: Bool | None = None) -> None:
        self.say, self.swap = say, swap

    def decide(self, view: FleetView) -> list[Proposal]:
        return self.say(view)  # type: ignore[operator,no-any-return]

    def exchange(self) -> Bool | None:
        return self.swap

    def busy(self) -> bool:
        return True
