"""ENTSO-E day-ahead prices: document A44 of a bidding zone, in XML.

A period is a UTC interval with a resolution, so that a day of 23 or 25 hours needs no care. By curve type A03
a position that is left out repeats the one before it; by A01 it is unknown. The same document has the prices
of intraday auctions (contract A07) and of other auctions of the day before (sequence 2, as EXAA's).
source: ENTSO-E, Web API guide, 4.2.10 and 5.5; Manual of Procedures, curve types; of contracts,
github.com/EnergieID/entsoe-py, issue 446.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from connectors.outlooks.client import HttpsClient, query_time
from connectors.outlooks.series import OutlookAnswer, OutlookSeries, instant_ns, series_of
from twin.catalogue import NS, BadMessage

URL = "https://web-api.tp.entsoe.eu/api"
PRICE = "site.grid_price_usd_per_kwh"
STEPS_S = {"PT15M": 900, "PT30M": 1800, "PT60M": 3600, "PT1H": 3600}
ENERGY_KWH = {"MWH": 1000.0, "KWH": 1.0}
AHEAD, BACK = timedelta(hours=48), timedelta(hours=2)
MAX_STEPS = 4000  # of one period: a month of quarter hours
MAX_DEPTH = 32
CONTRACT, DAY_AHEAD = "contract_MarketAgreement.type", "A01"


class EntsoePrices:
    """Reader of the prices of `zone` (an EIC code). `usd_per`: dollars for one unit of each currency."""

    quantities: tuple[str, ...] = (PRICE,)
    in_force: tuple[str, ...] = (PRICE,)  # the price of this hour is settled

    def __init__(self, zone: str, token: str, usd_per: dict[str, float], url: str = URL) -> None:
        self.name = f"entsoe {zone}"
        self._zone, self._token, self._usd_per, self._url = zone, token, {"USD": 1.0, **usd_per}, url

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        """Fetch the hours from shortly before now to the day after tomorrow."""
        hour = query_time(now_ns)
        query = {
            "documentType": "A44",
            "in_Domain": self._zone,
            "out_Domain": self._zone,
            CONTRACT: DAY_AHEAD,
            "periodStart": f"{hour - BACK:%Y%m%d%H%M}",
            "periodEnd": f"{hour + AHEAD:%Y%m%d%H%M}",
            "securityToken": self._token,
        }
        return self.read(await client.get(self._url, query, now_ns, {"Accept": "application/xml"}))

    def read(self, text: bytes) -> OutlookAnswer:
        """Return the prices of a document. Raises BadMessage."""
        root = xml_tree(text, self.name)
        if root.tag == "Acknowledgement_MarketDocument":
            code, why = _text(root, "Reason/code"), _text(root, "Reason/text")
            raise BadMessage(f"{self.name}: no prices: {why[:200]} (reason {code[:10]}); check the zone")
        if root.tag != "Publication_MarketDocument":
            raise BadMessage(f"{self.name}: a {root.tag[:60]}; expected a Publication_MarketDocument")
        ahead = (s for s in root.findall("TimeSeries") if _text(s, CONTRACT) in ("", DAY_AHEAD))
        first = [s for s in ahead if _auction(s) == "1"]
        # Finer periods go last: where an hour has quarters too, the quarters are what is settled
        periods = sorted((p for s in first for p in self._periods(s)), key=lambda p: -p.step_ns)
        if not periods:
            raise BadMessage(
                f"{self.name}: a document without a period; expected prices of the first auction"
            )
        made = _text(root, "createdDateTime")
        return OutlookAnswer((_joined(periods, self.name),), (), instant_ns(made, self.name) if made else 0)

    def _periods(self, series: Element) -> list[_Period]:
        currency, unit = _text(series, "currency_Unit.name"), _text(series, "price_Measure_Unit.name").upper()
        if currency not in self._usd_per:
            raise BadMessage(
                f"{self.name}: prices in {currency[:10] or 'no currency'}; expected a factor in "
                f"`usd_per: {{{currency[:10] or 'EUR'}: ..}}`"
            )
        if unit not in ENERGY_KWH:
            raise BadMessage(f"{self.name}: prices for a {unit[:20] or 'nothing'}; expected MWH")
        factor = self._usd_per[currency] / ENERGY_KWH[unit]
        curve = _text(series, "curveType")
        if curve not in ("A01", "A03"):
            raise BadMessage(f"{self.name}: curve type {curve[:10]!r}; expected A01 or A03")
        return [self._period(p, factor, curve == "A03") for p in series.findall("Period")]

    def _period(self, period: Element, factor: float, repeats: bool) -> _Period:
        resolution = _text(period, "resolution")
        step_s = STEPS_S.get(resolution)
        if step_s is None:
            raise BadMessage(f"{self.name}: resolution {resolution[:10]!r}; expected PT15M, PT30M or PT60M")
        start_ns = instant_ns(_text(period, "timeInterval/start"), self.name)
        count = (instant_ns(_text(period, "timeInterval/end"), self.name) - start_ns) // (step_s * NS)
        if not 0 < count <= MAX_STEPS:
            raise BadMessage(f"{self.name}: a period of {count} steps; expected 1 to {MAX_STEPS}")
        values: list[float | None] = [None] * count
        for point in period.findall("Point"):
            position, amount = _text(point, "position"), _text(point, "price.amount")
            try:
                place, price = int(position), float(amount)
                if not (1 <= place <= count and -1e6 < price < 1e6):
                    raise ValueError
            except ValueError:
                raise BadMessage(
                    f"{self.name}: position {position[:10]!r} with price {amount[:20]!r}; expected 1 to "
                    f"{count} and a number"
                ) from None
            values[place - 1] = price * factor
        if repeats:
            for i in range(1, count):
                if values[i] is None:
                    values[i] = values[i - 1]
        return _Period(start_ns, step_s * NS, values)


class _Period(NamedTuple):
    start_ns: int
    step_ns: int
    values: list[float | None]


def _joined(periods: list[_Period], where: str) -> OutlookSeries:
    """Return one series in the finest step of all."""
    step_ns = periods[-1].step_ns
    points: dict[int, float | None] = {}
    for period in periods:
        parts = period.step_ns // step_ns
        for i, value in enumerate(period.values):
            for part in range(parts):
                at_ns = period.start_ns + i * period.step_ns + part * step_ns
                if value is not None or at_ns not in points:
                    points[at_ns] = value
    return series_of(PRICE, points.items(), where)


def _auction(series: Element) -> str:
    """Return the number of the auction; 0 for zones with a single one."""
    return _text(series, "classificationSequence_AttributeInstanceComponent.position") or "1"


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def xml_tree(text: bytes, where: str) -> Element:
    """Return a document without its namespaces. Raises BadMessage; a document with entity declarations is
    refused."""
    builder, parser = TreeBuilder(), expat.ParserCreate(namespace_separator="}")
    depth = 0

    def start(tag: str, _: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise BadMessage(f"{where}: XML deeper than {MAX_DEPTH} elements")
        builder.start(tag.rpartition("}")[2], {})

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag.rpartition("}")[2])

    def refuse(*_: object) -> None:
        raise BadMessage(f"{where}: XML with a document type, which may declare entities; expected none")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    # An encoding that Python lacks, or whose characters have several bytes, is no fault of expat's
    except (expat.ExpatError, LookupError, ValueError) as error:
        what = "not whole" if "unclosed" in str(error) or "no element" in str(error) else "no XML"
        raise BadMessage(
            f"{where}: an answer of {len(text)} bytes that is {what}: {str(error)[:80]}"
        ) from None
    return builder.close()
