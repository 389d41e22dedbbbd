"""Trouble of memory: rows remapped and errors contained are one kind of trouble, that comes again by days.

And what seldom begins needs less to be believed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.recurring_devices import DAY_S, HOUR_S, Watched, racks
from twin.catalogue import NS
from twin.health.error_log import FaultBook
from twin.health.recurring import ALARM, FALSE_PER_MONTH, FAMILIES, LEAST_A, MOST_A, BaselineRate, Recurring
from twin.telemetry import FaultReported

REMAPS, SITE = "gpu.row_remap_count", racks(2)
MONTH_S = 30.0 * DAY_S
NODE = 1  # of GPU 7


class Reporting(Watched):
    """A site whose GPUs report codes as well, after a quiet month."""

    def __init__(self, *more: Any) -> None:
        self.book = FaultBook(SITE)
        super().__init__(SITE, *more)
        update = self.recurring.update
        vars(self.recurring)["update"] = lambda now, rates, broken: update(now, rates, broken, self.book)
        self.live([], MONTH_S, step_s=HOUR_S)

    def report(self, at_s: float, code: int, gpu: int = 7) -> None:
        event = FaultReported(table="gpu", name=SITE.name("gpu", gpu), code=code)
        self.book.receive([event], self.begin_ns + round((MONTH_S + at_s) * NS))

    def later(self, at_s: float, came: Any = None) -> bool:
        self.look(MONTH_S + at_s, came)
        return bool(self.recurring.standing[NODE])


@pytest.mark.parametrize(("first", "second"), [(63, 94), (94, 94), (94, REMAPS), (REMAPS, REMAPS)])
def test_twice_within_a_day_is_enough_where_it_hardly_ever_comes(first: Any, second: Any) -> None:
    watch = Reporting()
    for k, what in enumerate((first, second)):
        at_s = (1.0 + 18.0 * k) * HOUR_S
        if what != REMAPS:
            watch.report(at_s - 5.0, what)
        assert watch.later(at_s, {REMAPS: [7]} if what == REMAPS else None) is (k == 1)
    assert "remapped rows or contained errors of its memory 2 times in 18 h" in watch.recurring.text(NODE)
    assert watch.later(60 * HOUR_S)  # cells wear by days
    assert not watch.later(6 * DAY_S)


def test_a_row_that_is_counted_and_reported_came_once() -> None:
    watch = Reporting()
    watch.report(HOUR_S - 5.0, 63)
    assert not watch.later(HOUR_S, {REMAPS: [7]})
    watch.report(HOUR_S + 120.0, 94)  # the same mishap
    assert not watch.later(HOUR_S + 130.0)
    assert watch.recurring.cycles[REMAPS].count.tolist() == [1]


def test_a_report_counts_at_one_look_only_and_others_tell_nothing_of_memory() -> None:
    watch = Reporting()
    watch.report(HOUR_S, 94)
    for k in range(6):
        watch.later((1.0 + 3.0 * k) * HOUR_S)
    assert watch.recurring.cycles[REMAPS].count.tolist() == [1]
    watch.report(20 * HOUR_S, 31)
    watch.report(20 * HOUR_S, 48)
    watch.later(20 * HOUR_S + 5.0)
    assert watch.recurring.cycles[REMAPS].count.tolist() == [1]


def test_codes_are_heard_where_nobody_counts_rows() -> None:
    watch = Reporting(("gpu.gap", "node.gap"))
    for at_s in (HOUR_S, 19 * HOUR_S):
        watch.report(at_s - 5.0, 94)
        watch.later(at_s)
    assert watch.recurring.of(REMAPS)[0].tolist() == [7]


def test_a_nat_counts_the_more_the_seldomer_trouble_begins() -> None:
    """A is the log of beginnings per false drain that is allowed: closed form."""
    recurring, gpus = Recurring(SITE), SITE.sizes["gpu"] // SITE.sizes["node"]
    usual: BaselineRate = recurring.usual[REMAPS]
    memory = FAMILIES.index("memory")
    assert recurring.weights()[memory] == pytest.approx(1.0)  # nothing is known
    usual.n_reporting, usual.all_days = SITE.sizes["gpu"], 1e12
    for per_day in (1e-9, 0.001, 0.02, 0.3, 1e9):
        usual.mean_per_day = per_day
        alarm = np.clip(np.log(per_day * gpus * 30.0 / FALSE_PER_MONTH), LEAST_A, MOST_A)
        assert recurring.weights()[memory] == pytest.approx(ALARM / alarm, rel=1e-6)
    usual.mean_per_day, usual.all_days = 0.001, 30.0 * gpus  # one node-month
    mean = (0.001 * gpus * 30.0 + FALSE_PER_MONTH * np.exp(ALARM)) / 2.0
    assert recurring.weights()[memory] == pytest.approx(ALARM / np.log(mean / FALSE_PER_MONTH), rel=1e-6)


def test_the_last_report_of_a_kind_is_known_by_the_times_of_the_devices() -> None:
    book, now_ns = FaultBook(SITE), 10**18
    assert not book.last_ns("gpu", "bus").any()
    assert len(book.lately("gpu", (94,), 0)) == 0
    ago = {(3, 79): 50, (3, 94): 5, (9, 79): 700}
    for (gpu, code), s in ago.items():
        name = SITE.name("gpu", gpu)
        book.receive([FaultReported(table="gpu", name=name, code=code, at_ns=now_ns - s * NS)], now_ns)
    last_ns = book.last_ns("gpu", "bus")
    assert np.flatnonzero(last_ns).tolist() == [3, 9]
    assert last_ns[[3, 9]].tolist() == [now_ns - 50 * NS, now_ns - 700 * NS]
    assert book.lately("gpu", (79, 94), now_ns - 1).tolist() == [3, 9]  # heard now, however old
    assert book.lately("gpu", (94,), now_ns - 1).tolist() == [3]
    assert len(book.lately("gpu", (94,), now_ns)) == 0
