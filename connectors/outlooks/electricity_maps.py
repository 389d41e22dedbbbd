"""Electricity Maps: forecast and latest carbon intensity of a zone, grams of CO2 equivalent per kWh.

source: Electricity Maps API v3, carbon-intensity/forecast and carbon-intensity/latest.
"""

from __future__ import annotations

from connectors.outlooks.client import HttpsClient, ServiceError
from connectors.outlooks.series import OutlookAnswer, instant_ns, json_object, number_of, series_of
from twin.catalogue import NS, BadMessage
from twin.telemetry import Reading

URL = "https://api.electricitymaps.com"
CARBON = "site.grid_carbon_g_per_kwh"
LATEST_S = 3 * 3600  # an older latest value is no present one. source: estimate


class ElectricityMaps:
    """Reader of the average carbon intensity of `zone`, such as DE or US-CAL-CISO."""

    quantities: tuple[str, ...] = (CARBON,)
    in_force: tuple[str, ...] = ()

    def __init__(self, zone: str, token: str, url: str = URL) -> None:
        self.name = f"electricity_maps {zone}"
        self._zone, self._token, self._url = zone, token, url

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        """Fetch the forecast, and the latest value if the plan includes it."""
        headers, base = {"auth-token": self._token}, f"{self._url}/v3/carbon-intensity"
        text = await client.get(f"{base}/forecast", {"zone": self._zone}, now_ns, headers)
        answer = self.read(text)
        try:
            latest = await client.get(f"{base}/latest", {"zone": self._zone}, now_ns, headers)
            return OutlookAnswer(answer.series, self.read_latest(latest, now_ns), answer.made_ns)
        except (ServiceError, BadMessage):  # of another plan, or just now: the forecast holds
            return answer

    def read(self, text: bytes) -> OutlookAnswer:
        """Return the series of a forecast. Raises BadMessage."""
        tree = json_object(text, self.name)
        rows = tree.get("forecast")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise BadMessage(f"{self.name}: no list `forecast`; expected one of carbonIntensity and datetime")
        points = [
            (instant_ns(row.get("datetime"), self.name), number_of(row.get("carbonIntensity"), self.name))
            for row in rows
        ]
        made = tree.get("updatedAt")
        return OutlookAnswer(
            (series_of(CARBON, points, self.name),), (), instant_ns(made, self.name) if made else 0
        )

    def read_latest(self, text: bytes, now_ns: int) -> tuple[Reading, ...]:
        """Return the present value, if any. Raises BadMessage."""
        tree = json_object(text, self.name)
        value, at_ns = (
            number_of(tree.get("carbonIntensity"), self.name),
            instant_ns(tree.get("datetime"), self.name),
        )
        if value is None or not -LATEST_S * NS < at_ns - now_ns <= LATEST_S * NS:
            return ()
        # It stands for the hour that began then, and is the newest that there is
        return (Reading("site", 0, CARBON.partition(".")[2], value, now_ns),)
