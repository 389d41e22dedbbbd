"""A source of outlooks by its schedule: when it asks, what it tells, and when people are told of failures."""

from __future__ import annotations

import asyncio

import pytest

from connectors.outlooks import HttpsClient, OutlookAnswer, OutlookSeries, OutlookSource, ServiceError
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, BadMessage
from twin.telemetry import OutlookTold, Reading

PRICE = "site.grid_price_usd_per_kwh"
HOUR_NS = 3600 * NS


class Scripted:
    """A provider that answers by a script; the last entry stands for all that follow."""

    name, quantities, in_force = "scripted", (PRICE,), (PRICE,)

    def __init__(self, *script: OutlookAnswer | Exception) -> None:
        self.script, self.asked = list(script), 0

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        self.asked += 1
        found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(found, Exception):
            raise found
        return found


class Clocked:
    """A source by a clock of the test."""

    def __init__(self, *script: OutlookAnswer | Exception, period_s: float = 1800.0) -> None:
        self.provider, self.s, self.inlet = Scripted(*script), 0.0, RecordingInlet()
        self.client = HttpsClient(5.0)
        self.source = OutlookSource(
            self.provider, self.client, period_s, lambda: START_NS + round(self.s * NS), lambda: self.s
        )

    def step(self) -> float:
        wait_s = asyncio.run(self.source.step(self.inlet))  # type: ignore[arg-type]
        self.s += wait_s
        return wait_s

    def run(self, seconds: float) -> None:
        end = self.s + seconds
        while self.s < end:
            self.step()


def answer(*values: float | None, start_h: float = 0.0, made_ns: int = 0) -> OutlookAnswer:
    start_ns = START_NS + round(start_h * HOUR_NS)
    return OutlookAnswer((OutlookSeries(PRICE, start_ns, HOUR_NS, values),), (), made_ns)


def test_what_is_to_come_is_an_outlook_that_the_engine_takes_and_the_price_of_now_is_a_reading() -> None:
    clocked = Clocked(answer(0.1, -0.2, None, 0.4, start_h=-1.0))
    clocked.step()
    told, reading = clocked.inlet.items
    assert isinstance(told, OutlookTold)
    assert (told.start_ns, told.step_s, told.values) == (START_NS, 3600.0, (-0.2, None, 0.4))
    assert reading == Reading("site", 0, "grid_price_usd_per_kwh", -0.2, START_NS)
    assert any("1 of 3 values" in why for why in clocked.inlet.skipped)
    twin = Twin(two_racks())
    twin.tick(None, told)
    assert twin.engine.intake.outlooks.at(PRICE, START_NS + 1, twin.site).tolist() == [-0.2]
    assert not [r for r in twin.records("event") if "refused" in r]


def test_it_asks_once_in_a_period_and_tells_each_price_when_it_begins() -> None:
    clocked = Clocked(answer(*range(1, 13)))
    clocked.run(4 * 3600.0)
    assert clocked.provider.asked == 8
    prices = [i.value for i in clocked.inlet.items if isinstance(i, Reading)]
    assert sorted(set(prices)) == [1, 2, 3, 4]
    assert prices == sorted(prices)


@pytest.mark.parametrize("error", [ServiceError("x: busy", 429, 600.0), ServiceError("x: busy", 503, 600.0)])
def test_it_asks_no_sooner_than_the_service_wants(error: ServiceError) -> None:
    clocked = Clocked(error, answer(0.1, 0.2))
    clocked.run(599.0)
    assert clocked.provider.asked == 1
    clocked.run(300.0)
    assert clocked.provider.asked == 2


def test_failures_change_nothing_and_alarm_when_they_last_or_all_values_are_over() -> None:
    clocked = Clocked(answer(0.1, 0.2, 0.3), ServiceError("x: no complete answer within 5 s"))
    clocked.step()
    clocked.run(1501.0)
    assert clocked.provider.asked == 2
    assert clocked.source.fault == "", "one failure is no alarm"
    clocked.run(300.0)
    assert clocked.provider.asked > 3
    assert "what it said before holds" in clocked.source.fault
    clocked.run(3 * 3600.0)
    assert "all values are over" in clocked.source.fault
    assert clocked.provider.asked < 20, "pauses grow"


def test_a_refused_key_alarms_at_once_and_a_good_answer_ends_the_alarm() -> None:
    clocked = Clocked(ServiceError("x: answers 401", 401), answer(0.1, 0.2))
    clocked.step()
    assert "answers 401" in clocked.source.fault
    clocked.run(60.0)
    assert clocked.source.fault == ""


def test_values_that_are_over_alarm_though_the_service_answers() -> None:
    """It gives the same old day again and again."""
    clocked = Clocked(answer(0.1, 0.2))
    clocked.run(3 * 3600.0)
    assert "no future values" in clocked.source.fault
    assert "all values are over" in clocked.source.fault
    assert len([i for i in clocked.inlet.items if isinstance(i, OutlookTold)]) == 4


@pytest.mark.parametrize(
    "wrong, says",
    [
        (answer(1e6, 0.1), "expected -5 to 20"),
        (answer(0.1, 0.2, start_h=9000.0), "clock of this host"),
        (answer(None, None), "no future values"),
        (BadMessage("x: an answer that is no JSON"), "no JSON"),
    ],
)
def test_an_absurd_answer_tells_nothing(wrong: OutlookAnswer | Exception, says: str) -> None:
    clocked = Clocked(wrong)
    clocked.step()
    assert clocked.inlet.items == []
    assert says in clocked.inlet.faults[0]


def test_old_values_missing_quantities_and_other_clocks_are_told_and_used() -> None:
    clocked = Clocked(answer(0.1, 0.2, made_ns=START_NS - 20 * HOUR_NS))
    clocked.client.ahead_s = -7200.0
    clocked.provider.quantities = (PRICE, "site.outdoor_temp_c")  # type: ignore[assignment]
    clocked.step()
    assert len(clocked.inlet.items) == 2
    for words in ("made 20 h ago", "7200 s behind", "no value of site.outdoor_temp_c"):
        assert any(words in why for why in clocked.inlet.skipped), words
