"""Answers of price, carbon and weather services, written from their public documentation, as series.

None of these readers was ever tried against the live service.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from connectors.outlooks import ElectricityMaps, EntsoePrices, OpenMeteo, OutlookSeries, WattTime
from connectors.outlooks.open_meteo import CUSTOMER_URL, URL
from twin.catalogue import NS, BadMessage
from twin.physics import wet_bulb_c

BEGIN = datetime(2026, 1, 14, 23, tzinfo=UTC)  # midnight in Brussels
NOW_NS = round(BEGIN.timestamp()) * NS
EUR = 1.08


def document(*series: str) -> bytes:
    head = (
        '<?xml version="1.0" encoding="utf-8"?>\n<Publication_MarketDocument '
        'xmlns="urn:iec62325.351:tc57wg16:451-3:publicationdocument:7:3"><mRID>1</mRID>'
        "<type>A44</type><createdDateTime>2026-01-14T12:00:00Z</createdDateTime>"
    )
    return (head + "".join(series) + "</Publication_MarketDocument>").encode()


def time_series(
    points: dict[int, float],
    *,
    begin: datetime = BEGIN,
    hours: float = 24,
    resolution: str = "PT60M",
    curve: str = "A03",
    currency: str = "EUR",
    auction: int | None = None,
    contract: str | None = None,
) -> str:
    sequence = "classificationSequence_AttributeInstanceComponent.position"
    number = "" if auction is None else f"<{sequence}>{auction}</{sequence}>"
    rows = "".join(
        f"<Point><position>{i}</position><price.amount>{p}</price.amount></Point>" for i, p in points.items()
    )
    end = begin + timedelta(hours=hours)
    if contract is not None:
        number += f"<contract_MarketAgreement.type>{contract}</contract_MarketAgreement.type>"
    return (
        f"<TimeSeries><mRID>1</mRID><businessType>A62</businessType>"
        f"<currency_Unit.name>{currency}</currency_Unit.name>"
        f"<price_Measure_Unit.name>MWH</price_Measure_Unit.name><curveType>{curve}</curveType>{number}"
        f"<Period><timeInterval><start>{begin:%Y-%m-%dT%H:%MZ}</start><end>{end:%Y-%m-%dT%H:%MZ}</end>"
        f"</timeInterval><resolution>{resolution}</resolution>{rows}</Period></TimeSeries>"
    )


def prices(*series: str) -> OutlookSeries:
    answer = EntsoePrices("10Y1001A1001A82H", "key", {"EUR": EUR}).read(document(*series))
    (found,) = answer.series
    return found


def eur(found: OutlookSeries) -> list[float | None]:
    return [None if v is None else round(v * 1000 / EUR, 6) for v in found.values]


def test_positions_left_out_repeat_the_one_before_and_prices_may_be_negative() -> None:
    found = prices(time_series({1: 50.0, 2: -12.5, 5: 0.0}, hours=6))
    assert eur(found) == [50.0, -12.5, -12.5, -12.5, 0.0, 0.0]
    assert (found.start_ns, found.step_ns) == (NOW_NS, 3600 * NS)
    assert found.values[0] == pytest.approx(0.054), "50 EUR/MWh at 1.08 USD"


def test_by_curve_a01_a_position_left_out_is_unknown() -> None:
    assert eur(prices(time_series({1: 50.0, 3: 20.0}, hours=4, curve="A01"))) == [50.0, None, 20.0, None]


def test_quarters_win_over_hours_and_other_auctions_do_not_count() -> None:
    found = prices(
        time_series({1: 10.0, 2: 20.0}, hours=3),
        time_series({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, hours=1, resolution="PT15M", auction=1),
        time_series({1: 999.0}, hours=3, auction=2),
    )
    assert found.step_ns == 900 * NS
    assert eur(found) == [1.0, 2.0, 3.0, 4.0, *[20.0] * 8]


def test_in_a_document_of_all_auctions_the_coupled_one_of_the_day_before_counts() -> None:
    """As Spain and Germany have them since October 2025, in any order."""
    found = prices(
        time_series({1: 300.0}, hours=1, resolution="PT15M", auction=1, contract="A07"),
        time_series({1: 192.55}, hours=1, resolution="PT15M", auction=2, contract="A01"),
        time_series({1: 196.99, 2: -184.4}, hours=1, resolution="PT15M", auction=1, contract="A01"),
    )
    assert eur(found) == [196.99, -184.4, -184.4, -184.4]
    with pytest.raises(BadMessage, match="without a period"):
        prices(time_series({1: 300.0}, contract="A07"))


@pytest.mark.parametrize(
    "day, hours", [(datetime(2026, 3, 28, 23, tzinfo=UTC), 23), (datetime(2026, 10, 24, 22, tzinfo=UTC), 25)]
)
def test_a_day_of_92_or_100_quarters_has_as_many_and_joins_a_day_of_hours(day: datetime, hours: int) -> None:
    own = {i: float(i) for i in range(1, 4 * hours + 1)}
    before = time_series({1: 7.0}, begin=day - timedelta(hours=2), hours=2)
    found = prices(time_series(own, begin=day, hours=hours, resolution="PT15M"), before)
    assert eur(found) == [*[7.0] * 8, *own.values()]
    wrong = time_series({4 * hours + 1: 1.0}, begin=day, hours=hours, resolution="PT15M")
    with pytest.raises(BadMessage, match=f"1 to {4 * hours}"):
        prices(wrong)


@pytest.mark.parametrize(
    "day, hours", [(datetime(2026, 3, 28, 23, tzinfo=UTC), 23), (datetime(2026, 10, 24, 22, tzinfo=UTC), 25)]
)
def test_a_day_of_23_or_25_hours_has_as_many_and_joins_the_next(day: datetime, hours: int) -> None:
    own = {i: float(i) for i in range(1, hours + 1)}
    after = time_series({1: 100.0}, begin=day + timedelta(hours=hours), hours=24)
    found = prices(time_series(own, begin=day, hours=hours), after)
    assert eur(found) == [*own.values(), *[100.0] * 24]


@given(
    st.dictionaries(st.integers(1, 96), st.floats(-500, 4000), min_size=1).map(lambda d: {1: 1.0} | d),
    st.integers(0, 95),
)
def test_the_price_in_force_is_that_of_the_last_position_so_far(points: dict[int, float], step: int) -> None:
    found = prices(time_series(points, hours=24, resolution="PT15M"))
    last = max(position for position in points if position <= step + 1)
    at_ns = NOW_NS + step * 900 * NS + 899 * NS
    assert found.at(at_ns) == pytest.approx(points[last] * EUR / 1000)


@pytest.mark.parametrize(
    "text, says",
    [
        (document(time_series({1: 5.0}, currency="GBP")), "usd_per: {GBP"),
        (document(time_series({1: 5.0}, curve="A04")), "curve type"),
        (document(time_series({1: 5.0}, resolution="P1D")), "resolution"),
        (document(time_series({25: 5.0})), "position '25'"),
        (document(time_series({1: float("nan")})), "a number"),
        (document(), "without a period"),
        (document(time_series({1: 5.0}))[:-30], "not whole"),
        (b"<html><p>busy</html>", "no XML"),
        (b'<?xml version="1.0" encoding="x-none"?><a/>', "no XML: unknown encoding"),
        (b'<?xml version="1.0" encoding="big5"?><a/>', "no XML: multi-byte encodings"),
        (b"", "not whole"),
        (b"<html></html>", "Publication_MarketDocument"),
        (
            b"<Acknowledgement_MarketDocument><Reason><code>999</code><text>No matching data found</text>"
            b"</Reason></Acknowledgement_MarketDocument>",
            "No matching data found",
        ),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "entities"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"), "entities"),
        (b"<a>" * 100 + b"</a>" * 100, "deeper"),
    ],
)
def test_a_document_that_is_none_is_refused_with_its_reason(text: bytes, says: str) -> None:
    with pytest.raises(BadMessage, match=says):
        EntsoePrices("10Y1001A1001A82H", "key", {"EUR": EUR}).read(text)


def at(hour: int) -> str:
    return f"{BEGIN + timedelta(hours=hour):%Y-%m-%dT%H:%M:%S.000Z}"


def test_electricity_maps_gives_a_forecast_with_its_gaps_and_the_latest_value() -> None:
    reader = ElectricityMaps("DE", "key")
    rows = [{"carbonIntensity": 300 + h, "datetime": at(h)} for h in (0, 1, 3)]
    answer = reader.read(json.dumps({"zone": "DE", "forecast": rows, "updatedAt": at(-1)}).encode())
    assert answer.series[0].values == (300.0, 301.0, None, 303.0)
    assert answer.made_ns == NOW_NS - 3600 * NS
    latest = {"zone": "DE", "carbonIntensity": 302, "datetime": at(-1), "isEstimated": True}
    (reading,) = reader.read_latest(json.dumps(latest).encode(), NOW_NS)
    assert (reading.table, reading.signal, reading.value) == ("site", "grid_carbon_g_per_kwh", 302.0)
    assert not reader.read_latest(json.dumps({**latest, "datetime": at(-30)}).encode(), NOW_NS), (
        "of yesterday"
    )


def moer(**meta: Any) -> bytes:
    rows = [{"point_time": f"{BEGIN + timedelta(minutes=5 * i):%Y-%m-%dT%H:%M:%S}+00:00", "value": 870.0 - i}
            for i in range(12)]  # fmt: skip
    meta = {"units": "lbs_co2_per_mwh", "signal_type": "co2_moer", "generated_at": at(0), **meta}
    return json.dumps({"data": rows, "meta": meta}).encode()


def test_watttime_gives_pounds_per_megawatt_hour_as_grams() -> None:
    reader = WattTime("CAISO_NORTH", "ann", "word", "co2_moer")
    (found,) = reader.read(moer()).series
    assert found.step_ns == 300 * NS
    assert found.values[0] == pytest.approx(394.63, abs=0.01)
    with pytest.raises(BadMessage, match="co2_aoer in"):
        reader.read(moer(signal_type="co2_aoer"))
    with pytest.raises(BadMessage, match="expected co2_moer in lbs"):
        reader.read(moer(units="percentile"))


def weather(**more: Any) -> dict[str, Any]:
    units = {
        "time": "unixtime",
        "temperature_2m": "°C",
        "relative_humidity_2m": "%",
        "surface_pressure": "hPa",
    }
    seconds = NOW_NS // NS
    return {
        "utc_offset_seconds": 0, "hourly_units": units, "current_units": units,
        "hourly": {"time": [seconds + 3600 * h for h in range(3)], "temperature_2m": [30.0, None, -5.0],
                   "relative_humidity_2m": [40, 50, 100], "surface_pressure": [1000.0, 1000.0, 1000.0]},
        "current": {"time": seconds - 600, "interval": 900, "temperature_2m": 29.5,
                    "relative_humidity_2m": 42, "surface_pressure": 1000.0},
    } | more  # fmt: skip


def test_open_meteo_gives_temperature_and_the_wet_bulb_of_its_humidity() -> None:
    reader = OpenMeteo(50.1, 8.7)
    answer = reader.read(json.dumps(weather()).encode(), NOW_NS)
    temp, wet = answer.series
    assert temp.values == (30.0, None, -5.0)
    expected = float(wet_bulb_c(np.array([30.0]), np.array([0.4]), 100_000.0)[0])
    assert wet.values[0] == pytest.approx(expected)
    assert wet.values[1] is None
    assert wet.values[2] == pytest.approx(-5.0, abs=0.01), "saturated air"
    assert (answer.readings[0].signal, answer.readings[0].value) == ("outdoor_temp_c", 29.5)
    old = weather()["current"] | {"time": NOW_NS // NS - 7200}
    assert not reader.read(json.dumps(weather(current=old)).encode(), NOW_NS).readings


def test_weather_in_other_units_or_of_no_sense_is_refused() -> None:
    reader, units = OpenMeteo(50.1, 8.7), weather()["hourly_units"]
    fahrenheit = weather(hourly_units=units | {"temperature_2m": "°F"})
    hot = weather(hourly=weather()["hourly"] | {"temperature_2m": [300.0, 1.0, 2.0]})
    short = weather(hourly=weather()["hourly"] | {"temperature_2m": [30.0]})
    for wrong, says in (
        (fahrenheit, "°F"),
        (hot, "no weather"),
        (short, "unequal"),
        ({"error": True}, "hourly"),
    ):
        with pytest.raises(BadMessage, match=says):
            reader.read(json.dumps(wrong).encode(), NOW_NS)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"<html>", b'{"forecast": 3}', b'{"forecast": [{}]}', b"\xff"]
)
def test_what_is_no_answer_is_a_bad_message_and_no_crash(text: bytes) -> None:
    for read in (
        ElectricityMaps("DE", "k").read,
        WattTime("X", "u", "p", "co2_moer").read,
        EntsoePrices("X", "k", {}).read,
    ):
        with pytest.raises(BadMessage):
            read(text)
    with pytest.raises(BadMessage):
        OpenMeteo(1.0, 2.0).read(text, NOW_NS)


@pytest.mark.parametrize("count", [0, 1])
def test_a_series_of_less_than_two_values_is_no_forecast(count: int) -> None:
    rows = [{"carbonIntensity": 1, "datetime": at(0)}] * count
    with pytest.raises(BadMessage, match="expected two at least"):
        ElectricityMaps("DE", "k").read(json.dumps({"forecast": rows}).encode())
    data = json.loads(moer())
    data["data"] = data["data"][:count]
    with pytest.raises(BadMessage, match="expected two at least"):
        WattTime("X", "u", "p", "co2_moer").read(json.dumps(data).encode())
    hourly = {name: column[:count] for name, column in weather()["hourly"].items()}
    with pytest.raises(BadMessage, match="two at least" if count else "unequal"):
        OpenMeteo(1.0, 2.0).read(json.dumps(weather(hourly=hourly)).encode(), NOW_NS)


def test_a_key_for_weather_goes_to_the_host_of_customers() -> None:
    assert (OpenMeteo(1, 2)._url, OpenMeteo(1, 2, "key")._url) == (URL, CUSTOMER_URL)
    assert OpenMeteo(1, 2, "key", "https://own")._url == "https://own"


def test_an_uneven_series_is_refused_and_not_stretched() -> None:
    rows = [{"carbonIntensity": 1, "datetime": f"2026-01-01T00:{m:02}:00Z"} for m in (0, 5, 17)]
    with pytest.raises(BadMessage, match="uneven"):
        ElectricityMaps("DE", "k").read(json.dumps({"forecast": rows}).encode())
