"""Outlooks: what holds when, what replaces what, what is refused, what is kept, and what it costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.builders import START_NS, Twin, site_of, spec_of, two_racks
from twin.catalogue import NS, ContractError, digest, pack, unpack
from twin.contracts import brief_event
from twin.engine import MAX_VALUES, encode, outlook as held_in
from twin.engine.outlook import MAX_OUTLOOKS, Outlooks
from twin.engine.snapshot import decode
from twin.telemetry import events as ev

SITE = site_of(two_racks(racks="r[1-3]"))
RACKS = ("lab/h/r1", "lab/h/r2", "lab/h/r3")
NAN, INF = math.nan, math.inf


def told(
    quantity: str = "rack.power_w", name: str = "r1", values: Any = (1.0,), **more: Any
) -> ev.OutlookTold:
    """An outlook from the start on in steps of an hour."""
    given = {"author": "ada", "start_ns": START_NS, "step_s": 3600.0} | more
    return ev.OutlookTold(quantity=quantity, name=name, values=tuple(values), **given)


def at(outlooks: Outlooks, at_s: float, quantity: str = "rack.power_w") -> list[float | None]:
    values = outlooks.at(quantity, START_NS + round(at_s * NS), SITE)
    return [None if np.isnan(v) else float(v) for v in values]


VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=1, max_size=6)
TOLD = st.tuples(
    st.integers(0, 2), VALUES, st.integers(-7200, 7200), st.sampled_from([1.0, 1.5, 900.0, 3600.0])
)


@settings(max_examples=100)
@given(
    some=st.lists(TOLD, max_size=8), moments=st.lists(st.integers(-10_000, 30_000), min_size=1, max_size=8)
)
def test_the_latest_told_holds_each_value_for_its_step(some: Any, moments: list[int]) -> None:
    """Against a plain list of who said what last; and so it is after a snapshot and after the expiry."""
    outlooks, last = Outlooks(), dict[int, Any]()
    for rack, values, start_s, step_s in some:
        event = told(name=RACKS[rack], values=values, start_ns=START_NS + start_s * NS, step_s=step_s)
        assert outlooks.take(event, SITE) is None
        last[rack] = (values, start_s, step_s)

    def expected(rack: int, at_s: int) -> float | None:
        if rack not in last:
            return None
        values, start_s, step_s = last[rack]
        step = math.floor((at_s - start_s) / step_s)
        return values[step] if 0 <= step < len(values) else None

    again = Outlooks()
    again.restore(unpack(pack(outlooks.dump())))
    assert digest(again.dump()) == digest(outlooks.dump())
    for at_s in sorted(moments):
        wanted = [expected(rack, at_s) for rack in range(3)]
        assert at(outlooks, at_s) == at(again, at_s) == wanted
        again.expire(START_NS + at_s * NS)
        assert at(again, at_s) == wanted


def test_a_step_ends_where_the_next_begins() -> None:
    outlooks = Outlooks()
    outlooks.take(told(values=(10.0, None, 30.0)), SITE)
    end_s = 3 * 3600
    for at_s, value in ((-1e-9, None), (0.0, 10.0), (3600 - 1e-9, 10.0), (3600, None), (7200, 30.0),
                        (end_s - 1e-9, 30.0), (end_s, None)):  # fmt: skip
        assert at(outlooks, at_s) == [value, None, None], at_s


def test_what_is_told_between_two_questions_is_in_the_second() -> None:
    outlooks = Outlooks()
    wanted: list[float | None] = [None] * 3
    for rack, value in ((0, 1.0), (2, 3.0), (0, 5.0), (1, 2.0)):
        outlooks.take(told(name=RACKS[rack], values=[value]), SITE)
        wanted[rack] = value
        assert at(outlooks, 0) == wanted


def test_the_site_needs_no_name() -> None:
    outlooks = Outlooks()
    for name in ("", "lab"):
        outlooks.take(told("site.outdoor_temp_c", name, [-5.5, 7]), SITE)
    assert len(list(outlooks.entries())) == 1
    assert at(outlooks, 3600, "site.outdoor_temp_c") == [7.0]
    assert at(outlooks, 3600, "site.grid_price_usd_per_kwh") == [None]
    assert at(outlooks, 3600) == [None] * 3


@pytest.mark.parametrize("names", [("r2", "lab/h/r2"), ("h/r2", "r2"), ("lab/h/r2", "h/r2")])
def test_an_entity_has_one_outlook_under_whatever_name(names: tuple[str, str]) -> None:
    outlooks = Outlooks()
    for name, value in zip(names, (1.0, 2.0), strict=True):
        assert outlooks.take(told(name=name, values=[value]), SITE) is None
    assert at(outlooks, 0) == [None, 2.0, None]
    assert [o.name for o in outlooks.entries()] == ["lab/h/r2"]


def test_quantities_of_all_tables_have_their_places() -> None:
    outlooks = Outlooks()
    for quantity, name, place in (("gpu.power_w", "r2/node1/gpu3", 79), ("node.power_w", "r3/node0", 36),
                                  ("cdu.heat_w", "cdu1", 0), ("site.power_w", "", 0)):  # fmt: skip
        assert outlooks.take(told(quantity, name, [500.0]), SITE) is None
        assert np.flatnonzero(~np.isnan(outlooks.at(quantity, START_NS, SITE))).tolist() == [place]


def test_unknown_values_only_take_back_what_was_told() -> None:
    outlooks = Outlooks()
    outlooks.take(told(values=[5.0]), SITE)
    assert at(outlooks, 0) == [5.0, None, None]
    assert outlooks.take(told(name="lab/h/r1", values=[None, None]), SITE) is None
    assert (at(outlooks, 0), outlooks.dump()) == ([None] * 3, [])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantity": "rack.colour"}, "rack.colour is not a quantity that can be forecast"),
    ({"quantity": ""}, "is not a quantity"),
    ({"quantity": "x" * 10_000}, "is not a quantity"),
    ({"quantity": "gpu.energy_mj"}, "gpu.energy_mj is not a quantity"),
    ({"quantity": "job.progress_per_s", "name": "lab/job0"}, "jobs come and go"),
    ({"quantity": "cdu.heat_w", "name": "r1"}, "no cdu r1"),
    ({"name": "r9"}, "no rack r9"),
    ({"name": ""}, "names no rack"),
    ({"name": "/" * 10_000}, "no rack ///"),
    ({"quantity": "site.outdoor_temp_c", "name": "elsewhere"}, "no site elsewhere"),
    ({"step_s": 0.0}, "expected a step from a second"),
    ({"step_s": 1e-10}, "expected a step from a second"),
    ({"step_s": -1.0}, "expected a step"),
    ({"step_s": NAN}, "expected a step"),
    ({"step_s": INF}, "expected a step"),
    ({"step_s": 8 * 86_400.0}, "to a week"),
    ({"start_ns": -1}, "and an instant"),
    ({"start_ns": 2**62}, "and an instant"),
    ({"start_ns": 2**100}, "and an instant"),
    ({"values": ()}, "expected 1 to 2000 values, got 0"),
    ({"values": (1.0,) * (MAX_VALUES + 1)}, "expected 1 to 2000 values, got 2001"),
    ({"values": (1.0, NAN)}, "expected values from 0 to 1e+06 W, got nan"),
    ({"values": (None, INF)}, "got inf"),
    ({"values": (-0.1,)}, "got -0.1"),
    ({"values": (10**400,)}, "expected values from 0"),
    ({"quantity": "site.outdoor_temp_c", "name": "", "values": (61.0,)}, "from -60 to 60 degC, got 61"),
]  # fmt: skip


@pytest.mark.parametrize("change,why", REFUSED)
def test_what_is_refused_says_why_and_changes_nothing(change: dict[str, Any], why: str) -> None:
    outlooks = Outlooks()
    outlooks.take(told(values=[5.0]), SITE)
    before = digest(outlooks.dump())
    said = outlooks.take(told(**{"values": (1.0,), **change}), SITE)
    assert said is not None
    assert why in said
    assert len(said) < 600
    assert digest(outlooks.dump()) == before
    assert at(outlooks, 0) == [5.0, None, None]


def test_one_that_is_over_is_refused_where_the_time_is_known() -> None:
    outlooks = Outlooks()
    late = told(start_ns=1_700_000_000)  # seconds, by mistake
    said = outlooks.take(late, SITE, START_NS)
    assert said is not None
    assert "over already" in said
    assert outlooks.take(told(), SITE, START_NS + 3599 * NS) is None
    assert "0 s ago" in (outlooks.take(told(), SITE, START_NS + 3600 * NS) or "")


def test_the_number_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_in, "MAX_OUTLOOKS", 3)
    outlooks = Outlooks()
    for name in ("r1", "r2", "r3", "r1"):  # r1 told anew is the newest
        outlooks.take(told(name=name), SITE)
    assert at(outlooks, 0) == [1.0] * 3
    outlooks.take(told("cdu.heat_w", "cdu1"), SITE)
    assert [o.name for o in outlooks.entries()] == ["lab/h/r3", "lab/h/r1", "lab/h/cdu1"]
    assert at(outlooks, 0) == [1.0, None, 1.0]


def test_the_values_of_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_in, "MAX_ALL_VALUES", 10)
    outlooks = Outlooks()
    for round_ in range(3):
        for name in ("r1", "r2", "r3"):
            outlooks.take(told(name=name, values=[float(round_)] * 4), SITE)
            assert sum(len(o.values) for o in outlooks.entries()) <= 10
    assert at(outlooks, 0) == [None, 2.0, 2.0]
    for name in ("r2", "r3"):
        outlooks.take(told(name=name, values=[None]), SITE)
    assert outlooks._n_values == 0
    outlooks.take(told(values=[1.0] * 11), SITE)  # larger than all that may be held
    assert outlooks.dump() == []


def test_an_outlook_is_forgotten_when_it_is_over() -> None:
    outlooks = Outlooks()
    outlooks.take(told(values=[1.0] * 2), SITE)
    outlooks.take(told(name="r2"), SITE)
    outlooks.take(told(name="r2", values=[1.0] * 5), SITE)  # the end of the one before counts no more
    for at_s, n in ((0, 2), (3600, 2), (7199, 2), (7200, 1), (4 * 3600, 1), (5 * 3600, 0), (9 * 3600, 0)):
        outlooks.expire(START_NS + at_s * NS)
        assert len(outlooks.dump()) == n, at_s
    outlooks.take(told(start_ns=START_NS + 10 * 3600 * NS), SITE)
    outlooks.expire(START_NS + 11 * 3600 * NS)
    assert outlooks.dump() == []


def test_what_is_given_out_may_be_written_into() -> None:
    outlooks = Outlooks()
    outlooks.take(told(values=[5.0]), SITE)
    outlooks.at("rack.power_w", START_NS, SITE)[:] = 0
    assert at(outlooks, 0) == [5.0, None, None]
    with pytest.raises(ValueError, match="read-only"):
        next(outlooks.entries()).values[0] = 0


def test_a_changed_site_keeps_outlooks_by_name() -> None:
    """r2 moves from place 1 to 2, r1 is gone for a while; the names of the old site mean what they meant."""
    outlooks = Outlooks()
    for name, value in (("r1", 1.0), ("r2", 2.0)):
        outlooks.take(told(name=name, values=[value]), SITE)
    assert at(outlooks, 0) == [1.0, 2.0, None]
    other = site_of(two_racks(racks="r[0-4]"))
    assert outlooks.at("rack.power_w", START_NS, other)[:3].tolist()[1:] == [1.0, 2.0]
    without = two_racks(racks="r[2-3]")
    assert outlooks.at("rack.power_w", START_NS, site_of(without))[0] == 2.0
    # A second r2 in another hall makes the short name ambiguous, but not what was meant.
    twice = two_racks(racks="r[1-3]")
    twice["halls"] = [{"name": "a", "racks": twice["halls"][0]["racks"]}, *twice["halls"]]
    found = outlooks.at("rack.power_w", START_NS, site_of(twice))
    assert np.flatnonzero(~np.isnan(found)).tolist() == [3, 4]
    assert at(outlooks, 0) == [1.0, 2.0, None]


# Within an engine: snapshots, traces, replays.


def engine() -> Twin:
    return Twin(two_racks(racks="r[1-3]", max_jobs=2))


def story(twin: Twin) -> None:
    """Outlooks that are told, replaced, refused, over, and a site that changes below them."""
    twin.tick(None, told(id="a", values=[5, None, 7]), told("site.power_w", "", [1e6], id="b"))
    twin.tick(None, told(id="c", name="r9"), told(id="d", name="r3", values=[3.0], step_s=2.0))
    twin.tick({"rack.power_w": 500.0}, told(id="a", values=[5.0, None, 7.0]))  # delivered twice
    twin.tick(None, told(id="e", name="lab/h/r1", values=[NAN]))
    later = spec_of(two_racks(racks="r[0-3]", max_jobs=2))
    twin.tick(None, ev.SiteChanged(id="s", site_hash=later.digest(), spec=later.packed()))
    twin.tick(None, told(id="f", name="r0", values=[9.0]))


def view(twin: Twin) -> Any:
    return twin.engine.view(1.0)


def test_a_model_is_told_through_its_view() -> None:
    twin = engine()
    twin.tick(None, told(id="a", values=[5, None, 7]))
    assert view(twin).outlook("rack.power_w", START_NS + 7200 * NS) == pytest.approx(
        [7.0, NAN, NAN], nan_ok=True
    )
    assert np.isnan(view(twin).outlook("cdu.heat_w", START_NS)).all()
    with pytest.raises(ContractError, match="not a quantity"):
        view(twin).outlook("rack.colour", START_NS)


def test_the_journal_says_what_was_told_and_what_was_refused() -> None:
    twin = engine()
    twin.tick(None, told(id="a"), told(id="b", name="r9"))
    taken, refused = twin.records("event")
    assert (taken["event"]["type"], taken["event"]["author"]) == ("OutlookTold", "ada")
    assert "refused" not in taken
    assert refused["refused"] == "no rack r9"
    twin.tick(None, told(id="a"))
    assert twin.records("duplicates") == [{"kind": "duplicates", "count": 1}]
    twin.tick(None, told(id="a", values=[2.0]))
    assert "already used" in twin.records("event")[0]["refused"]


def test_a_snapshot_brings_them_back() -> None:
    twin = engine()
    story(twin)
    raw = encode(twin.engine.dump())
    again = Twin(two_racks(racks="r[0-3]", max_jobs=2))
    again.engine.restore(decode(raw))
    assert again.engine.checksum() == twin.engine.checksum()
    assert len(twin.engine.intake.outlooks.dump()) == 3
    instant = START_NS + 7200 * NS
    for quantity in ("rack.power_w", "site.power_w"):
        np.testing.assert_array_equal(
            view(again).outlook(quantity, instant), view(twin).outlook(quantity, instant)
        )
    assert view(again).outlook("rack.power_w", instant)[1] == 7.0


def test_a_snapshot_of_a_version_before_has_none() -> None:
    twin = engine()
    story(twin)
    data = twin.engine.dump()
    del data["intake"]["outlooks"]
    again = Twin(two_racks(racks="r[0-3]", max_jobs=2))
    again.engine.restore(decode(encode(data)))
    assert again.engine.intake.outlooks.dump() == []


def test_a_trace_of_them_replays_identically() -> None:
    from twin.run.trace import TraceDecoder, TraceEncoder

    twin, frames = engine(), list[Any]()
    take = twin.inbox.take

    def taken(*args: Any) -> Any:
        frames.append(take(*args))
        return frames[-1]

    twin.inbox.take = taken  # type: ignore[method-assign]
    story(twin)
    encoder, decoder, again = TraceEncoder(), TraceDecoder(), engine()
    for frame in frames:
        again.engine.tick(decoder.decode(encoder.encode(frame)))
    assert again.engine.checksum() == twin.engine.checksum()
    assert digest(again.engine.intake.outlooks.dump()) == digest(twin.engine.intake.outlooks.dump())


def test_any_event_survives_the_trace_and_the_journal() -> None:
    event = told(id="a", values=[1, None, 2.5, -0.0, NAN, INF])
    back = msgspec.msgpack.decode(msgspec.msgpack.encode((event,)), type=tuple[ev.Event, ...])[0]
    assert isinstance(back, ev.OutlookTold)
    assert repr(back.values) == "(1.0, None, 2.5, -0.0, nan, inf)"
    msgspec.json.encode(brief_event(event))


# Cost.


def holding(count: int) -> tuple[Outlooks, Any]:
    tree = two_racks(profile="air-8gpu", racks="r[1-5000]")
    tree["halls"][0].pop("cdus")
    site, outlooks = site_of(tree), Outlooks()
    values = tuple(float(v) for v in range(288))
    for i in range(count):
        event = told(name=f"lab/h/r{i + 1}", values=values, start_ns=START_NS + i, step_s=300.0)
        assert outlooks.take(event, site) is None
    return outlooks, site


def calls_of(work: Callable[[], Any]) -> int:
    """Function calls, of Python and of C, that `work` makes: its cost, whatever else the machine is doing."""
    count = 0

    def tally(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_it_stays_cheap_when_it_is_full() -> None:
    """A question or an expiry costs as much with all outlooks as with ten; a new one looks up no places."""
    instant = START_NS + 3600 * NS + 5000

    def costs(count: int) -> tuple[int, ...]:
        outlooks, site = holding(count)
        assert len(list(outlooks.entries())) == count
        power = outlooks.at("rack.power_w", instant, site)
        assert (power[:count] == 12.0).all()
        anew = told(name="lab/h/r7", values=[1.0], start_ns=instant)

        def one_more() -> None:
            outlooks.take(anew, site)
            outlooks.at("rack.power_w", instant, site)

        one_more()
        questions = (
            lambda: outlooks.at("rack.power_w", instant, site),
            lambda: outlooks.at("site.power_w", instant, site),
            lambda: outlooks.expire(instant),
            one_more,
        )
        return tuple(calls_of(question) for question in questions)

    *few, few_anew = costs(10)
    *full, full_anew = costs(MAX_OUTLOOKS)
    assert full == few
    assert full_anew - few_anew <= 5 * (MAX_OUTLOOKS - 10)
