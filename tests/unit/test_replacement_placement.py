"""replacement: who gets jobs last, which spares are kept, and that all of it is opened again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.node_replacement import (
    PLACED_LAST,
    PLACEMENT,
    RESERVED,
    Replacement,
    spare_count,
    spare_pool_of,
)
from policies.node_replacement.phases import QUIET_S
from policies.node_replacement.placement import PLACED_NORMALLY
from policies.node_replacement.spare_count import per_day_of
from tests.support.builders import two_racks
from tests.support.replacement_site import EIGHT, Replacing
from twin.catalogue import NS, ContractError
from twin.contracts import DEGRADED, FAILED
from twin.telemetry import events as ev

SPARES = 4  # the last of each of two racks' nodes


def placing(jobs: Any = None, spares: int = 0, **settings: Any) -> Replacing:
    """A site whose scheduler tells in which order it uses its nodes."""
    tree = two_racks(controls={"node.service_level": {"blast_radius": 36}}, max_jobs=8)
    if spares:
        for rack in tree["halls"][0]["racks"]:
            rack["spare_nodes"] = spares
    twin = Replacing(jobs, tree=tree, **settings)
    twin.placement = np.zeros(twin.n)
    return twin


def told(twin: Replacing, state: int) -> list[int]:
    assert twin.placement is not None
    found: list[int] = np.flatnonzero(twin.placement == state).tolist()
    return found


def test_a_suspect_that_is_watched_comes_last_and_is_opened_again() -> None:
    twin = placing({"a": EIGHT})
    twin.bad(0, sure_pu=0.05)
    twin.wait(60)
    assert (twin.phase(), told(twin, PLACED_LAST)) == ("suspect", []), "it may have left within a minute"
    twin.wait(60)
    assert (twin.phase(), told(twin, PLACED_LAST)) == ("suspect", [0])
    twin.well()
    twin.wait(QUIET_S + 60, dt_s=30.0)
    assert (twin.phase(), told(twin, PLACED_LAST)) == ("in_service", [])


@pytest.mark.long
def test_on_probation_a_node_comes_last() -> None:
    twin = placing(burn_in=True)
    twin.bad(0)
    twin.wait(300)
    assert twin.phase() == "testing"
    twin.well()
    twin.tests(0, True)
    twin.wait(120)
    assert twin.phase() == "probation"
    assert (twin.level[0], told(twin, PLACED_LAST)) == (0, [0])
    twin.wait(8 * 86_400.0, dt_s=3600.0)
    assert (twin.phase(), told(twin, PLACED_LAST)) == ("in_service", [])


def test_where_nobody_reads_the_order_back_none_is_asked_for() -> None:
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES)
    twin.placement = None
    twin.bad(0, sure_pu=0.05)
    twin.wait(120)
    assert twin.phase() == "suspect"
    assert not twin.asked(PLACEMENT)


def test_it_can_be_switched_off_and_then_opens_what_is_marked() -> None:
    twin = placing({"a": EIGHT}, place_last=False)
    assert twin.placement is not None
    twin.placement[[1, 5]] = PLACED_LAST, RESERVED
    twin.bad(0, sure_pu=0.05)
    twin.wait(120)
    assert not told(twin, PLACED_LAST) + told(twin, RESERVED)
    assert {value for _, value in twin.asked(PLACEMENT)} == {PLACED_NORMALLY}


def test_a_mark_that_nobody_remembers_is_opened_once() -> None:
    """A daemon that lost its disk finds it in the scheduler."""
    twin = placing()
    assert twin.placement is not None
    twin.placement[3] = PLACED_LAST
    twin.wait(120)
    assert twin.asked(PLACEMENT) == [(3, PLACED_NORMALLY)]


def test_one_that_only_advises_marks_nothing() -> None:
    twin = placing({"a": EIGHT}, authority="advise", keep_spares=True, spares=SPARES)
    twin.bad(0, sure_pu=0.05)
    twin.wait(120)
    assert not twin.asked(PLACEMENT)


def test_what_looks_bad_together_is_no_matter_of_single_nodes() -> None:
    twin = placing({"a": EIGHT})
    for node in range(14):
        twin.bad(node)
    twin.wait(120)
    assert twin.phase(0) == "suspect"
    assert not told(twin, PLACED_LAST)


def keeping(**settings: Any) -> Replacing:
    """Nodes fail so often, by their forecast, that some of the eight spares are wanted."""
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES, **settings)
    twin.says.day = 0.006
    twin.wait(60)
    return twin


def wanted(twin: Replacing) -> int:
    found = spare_pool_of(twin.engine.view())  # type: ignore[arg-type]
    assert found is not None
    return min(found.wanted, int(twin.site.spare_node.sum()))


def test_as_many_spares_are_kept_as_are_wanted() -> None:
    twin = keeping()
    kept = told(twin, RESERVED)
    assert 1 < len(kept) == wanted(twin) < 2 * SPARES
    assert twin.site.spare_node[kept].all()
    twin.wait(300)
    assert told(twin, RESERVED) == kept, "the same ones"


def test_a_node_that_is_out_opens_one_and_its_return_closes_it() -> None:
    twin = keeping()
    before = len(told(twin, RESERVED))
    twin.level[9] = 3.0
    twin.wait(60)
    assert len(told(twin, RESERVED)) == before - 1
    twin.level[9] = 0.0
    twin.wait(60)
    assert len(told(twin, RESERVED)) == before


def test_who_takes_over_is_opened_for_the_job() -> None:
    twin = keeping()
    before = set(told(twin, RESERVED))
    twin.bad(0, FAILED, "drain", 0.97)
    twin.wait(60)
    pair = twin.memory["spare_pair"]
    spare = [i for i in np.flatnonzero(pair == pair[0]).tolist() if i]
    assert pair[0]
    assert len(spare) == 1
    assert spare[0] not in told(twin, RESERVED)
    assert len(told(twin, RESERVED)) == len(before), "the node is not out yet"
    twin.saves()
    twin.wait(60)
    assert twin.level[0] >= 3
    assert len(told(twin, RESERVED)) == len(before) - 1


def test_a_spare_that_works_or_is_ill_is_not_kept() -> None:
    twin = keeping()
    first, second, *_ = told(twin, RESERVED)
    name = "/".join(twin.site.name("node", first).split("/")[-2:])
    twin.look(ev.JobStarted(id="b", job="b", nodes=(name,), kind="batch"))
    before = len(told(twin, RESERVED))
    twin.wait(60)
    assert first not in told(twin, RESERVED)
    twin.bad(second, DEGRADED, "drain", 0.05)
    twin.look()
    assert second in told(twin, RESERVED), "nobody shall get it while it is ill"
    twin.wait(60)
    assert second in told(twin, RESERVED)
    assert len(set(told(twin, RESERVED)) - {second}) == before, "another takes its place"


def test_a_kept_spare_that_fails_is_never_opened_on_its_way_out() -> None:
    twin = keeping()
    first = told(twin, RESERVED)[0]
    twin.bad(first, FAILED, "drain", 0.9)
    for _ in range(12):
        twin.look()
        assert first in told(twin, RESERVED) or twin.level[first] >= 1
    assert twin.level[first] >= 1


@pytest.mark.long
def test_another_is_kept_for_one_that_the_scheduler_refuses() -> None:
    """Others have reserved it, say."""
    first, *rest = told(keeping(), RESERVED)
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES)
    twin.unmoved, twin.says.day = [first], 0.006
    twin.wait(300)
    assert told(twin, RESERVED) == rest, "it may be slow"
    twin.wait(600, dt_s=30.0)
    kept = told(twin, RESERVED)
    assert len(kept) == len(rest) + 1
    assert set(rest) < set(kept)
    twin.wait(3600, dt_s=30.0)
    asked = twin.engine.arbiter.leases[PLACEMENT].running()
    assert np.flatnonzero(asked).tolist() == kept, "nobody asks for it again and again"
    twin.unmoved = []
    twin.wait(90_000, dt_s=600.0)
    assert told(twin, RESERVED) == kept, "nor changes what does well"


@pytest.mark.long
def test_a_scheduler_that_was_away_has_refused_nothing() -> None:
    kept = told(keeping(), RESERVED)
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES)
    twin.unmoved, twin.says.day = list(range(twin.n)), 0.006
    twin.wait(40)
    assert np.flatnonzero(twin.memory["not_reserved_s"]).tolist() == kept
    twin.placement, there = None, twin.placement
    twin.wait(1500)
    twin.placement, twin.unmoved = there, []
    twin.wait(120)
    assert told(twin, RESERVED) == kept


def test_the_time_in_which_nobody_looks_refuses_nothing() -> None:
    kept = told(keeping(), RESERVED)
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES)
    twin.unmoved, twin.says.day = list(range(twin.n)), 0.006
    twin.wait(40)
    before = twin.memory["not_reserved_s"].max()
    assert before > 0.0
    twin.now_ns += 900 * NS
    twin.look()
    assert twin.memory["not_reserved_s"].max() == before
    twin.unmoved = []
    twin.wait(120)
    assert told(twin, RESERVED) == kept


def test_where_the_scheduler_refuses_all_spares_as_many_are_asked_for_as_are_wanted() -> None:
    twin = placing({"a": EIGHT}, keep_spares=True, spares=SPARES)
    twin.unmoved, twin.says.day = list(range(twin.n)), 0.006
    twin.wait(3600, dt_s=30.0)
    assert not told(twin, RESERVED)
    asked = twin.engine.arbiter.leases[PLACEMENT].running()
    assert np.count_nonzero(asked) == wanted(twin)


def test_the_spare_of_a_node_that_waits_for_its_jobs_end_is_kept_until_then() -> None:
    twin = keeping()
    twin.bad(0, DEGRADED, "drain", 0.4)
    twin.wait(120)
    assert twin.phase() == "cordoned"
    pair = twin.memory["spare_pair"]
    spare = next(i for i in np.flatnonzero(pair == pair[0]).tolist() if i)
    before = told(twin, RESERVED)
    assert spare in before
    twin.wait(600, dt_s=60.0)
    assert told(twin, RESERVED) == before, "its job goes on, and does its work"
    twin.bad(0, FAILED, "drain", 0.97)
    twin.wait(60)
    assert twin.phase() == "saving"
    assert spare not in told(twin, RESERVED)


def test_a_suspect_asks_for_no_more_than_a_spare() -> None:
    twin = keeping()
    before = wanted(twin)
    day = np.full(twin.n, 0.006)
    day[20] = 0.95
    twin.says.day = day
    twin.wait(60)
    assert wanted(twin) <= before + 2
    rate = per_day_of(twin.engine.view())  # type: ignore[arg-type]
    twin.level[20] = 3.0
    twin.wait(60)
    after = per_day_of(twin.engine.view())  # type: ignore[arg-type]
    assert rate is not None
    assert after is not None
    assert after < rate, "it is out already"


def test_repairs_that_took_no_time_ask_for_hardly_any_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log whose failures ended as they began."""
    monkeypatch.setattr(spare_count, "repair_h", lambda view: (0.0, 0.0))
    twin = keeping()
    rate = per_day_of(twin.engine.view())  # type: ignore[arg-type]
    assert rate == pytest.approx(0.006 * twin.n, rel=1e-3)
    assert len(told(twin, RESERVED)) <= 1


def test_where_all_are_spares_none_is_kept() -> None:
    twin = placing(keep_spares=True, spares=18)
    twin.says.day = 0.1
    twin.wait(60)
    assert twin.site.spare_node.all()
    assert not told(twin, RESERVED)


@pytest.mark.long
def test_a_forecast_that_swings_about_a_threshold_moves_nothing() -> None:
    twin = keeping()
    sure = [x for x in np.linspace(0.004, 0.009, 200).tolist() if says(twin, x) != says(twin, x * 1.01)]
    assert sure, "there is a threshold"
    twin.says.day = sure[0]
    twin.wait(60)
    before = len(twin.asked(PLACEMENT))
    for k in range(20):
        twin.says.day = sure[0] * (1.0 + 0.01 * (k % 2))
        twin.wait(60, dt_s=30.0)
    assert len(twin.asked(PLACEMENT)) - before <= 1


def says(twin: Replacing, day: float) -> int:
    """Return the number of spares that such a forecast makes the policy want."""
    twin.says.day = day
    twin.look()
    return wanted(twin)


def test_where_nothing_is_forecast_what_is_kept_stays_so() -> None:
    twin = keeping()
    kept = told(twin, RESERVED)
    twin.says.day = np.full(twin.n, np.nan)
    twin.wait(1800, dt_s=60.0)
    assert told(twin, RESERVED) == kept
    lease = twin.engine.arbiter.leases[PLACEMENT]
    assert lease.running()[kept].all(), "a reservation ends where nobody renews it"


@pytest.mark.parametrize("given", [{"place_last": 1}, {"keep_spares": "yes"}])
def test_a_bad_setting_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="expected true or false"):
        Replacement(**given)
