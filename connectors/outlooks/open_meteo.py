"""Open-Meteo weather: temperature and wet bulb, now and in the next hours.

Times are asked for as seconds since 1970, so no time zone takes part. source: Open-Meteo API, v1/forecast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from connectors.outlooks.client import HttpsClient
from connectors.outlooks.series import OutlookAnswer, json_object, number_of, series_of
from twin.catalogue import NS, BadMessage
from twin.physics import wet_bulb_c
from twin.telemetry import Reading

URL, CUSTOMER_URL = "https://api.open-meteo.com", "https://customer-api.open-meteo.com"
TEMPERATURE, WET_BULB = "site.outdoor_temp_c", "site.outdoor_wet_bulb_c"
FIELDS = {"temperature_2m": "°C", "relative_humidity_2m": "%", "surface_pressure": "hPa"}
CURRENT_S = 3600  # an older current value is no present one. source: estimate
MAX_ROWS = 1000
LEAST_HPA, MOST_HPA = 500.0, 1100.0


class OpenMeteo:
    """Reader of the weather at a place, in degrees north and east. `token`: the key of a commercial plan."""

    quantities: tuple[str, ...] = (TEMPERATURE, WET_BULB)
    in_force: tuple[str, ...] = ()

    def __init__(
        self, latitude: float, longitude: float, token: str | None = None, url: str | None = None
    ) -> None:
        self.name = f"open_meteo {latitude:g},{longitude:g}"
        # Keys are known to the hosts of customers alone
        self._url, self._query = url or (URL if token is None else CUSTOMER_URL), {
            "latitude": f"{latitude:.4f}",
            "longitude": f"{longitude:.4f}",
            "hourly": ",".join(FIELDS),
            "current": ",".join(FIELDS),
            "timeformat": "unixtime",
            "timezone": "GMT",
            "forecast_days": "4",
        } | ({} if token is None else {"apikey": token})  # fmt: skip

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        """Fetch the forecast of some days and the present weather."""
        return self.read(await client.get(f"{self._url}/v1/forecast", self._query, now_ns), now_ns)

    def read(self, text: bytes, now_ns: int) -> OutlookAnswer:
        """Return series and readings of a forecast. Raises BadMessage."""
        tree = json_object(text, self.name)
        hourly, units = tree.get("hourly"), tree.get("hourly_units")
        if not isinstance(hourly, dict) or not isinstance(units, dict):
            raise BadMessage(f"{self.name}: no `hourly` with `hourly_units`; expected both")
        self._check_units(units)
        times = hourly.get("time")
        columns = [hourly.get(name) for name in FIELDS]
        lengths = {len(c) if isinstance(c, list) else -1 for c in (times, *columns)}
        if len(lengths) != 1 or not 0 < min(lengths) <= MAX_ROWS:
            raise BadMessage(
                f"{self.name}: columns of unequal length; expected {', '.join(FIELDS)} for each time"
            )
        at_ns = [self._instant(t) for t in times or ()]
        temp, wet = self._air(columns)
        series = [
            series_of(quantity, zip(at_ns, values, strict=True), self.name)
            for quantity, values in ((TEMPERATURE, temp), (WET_BULB, wet))
        ]
        return OutlookAnswer(tuple(series), self._current(tree, now_ns))

    def _current(self, tree: dict[str, Any], now_ns: int) -> tuple[Reading, ...]:
        now, units = tree.get("current"), tree.get("current_units")
        if not isinstance(now, dict) or not isinstance(units, dict):
            return ()
        self._check_units(units)
        at_ns = self._instant(now.get("time"))
        if not -CURRENT_S * NS < at_ns - now_ns <= CURRENT_S * NS:
            return ()
        air = self._air([[now.get(name)] for name in FIELDS])
        return tuple(
            Reading("site", 0, quantity.partition(".")[2], values[0], now_ns)  # it stands for an interval
            for quantity, values in zip((TEMPERATURE, WET_BULB), air, strict=True)
            if values[0] is not None
        )

    def _air(self, columns: list[Any]) -> tuple[list[float | None], list[float | None]]:
        """Return (temperature, wet bulb) of each row, degC; None = unknown."""
        rows = [[number_of(v, self.name) for v in column] for column in columns]
        temp, humidity, pressure = (np.array([np.nan if v is None else v for v in r]) for r in rows)
        with np.errstate(invalid="ignore"):
            if (np.abs(temp) > 80).any() or (humidity < 0).any() or (humidity > 105).any():
                raise BadMessage(f"{self.name}: no weather: expected degrees C, and humidity from 0 to 100 %")
            known = pressure[np.isfinite(pressure)]
            # The height of the place is what counts; the weather's part of it moves a wet bulb by 0.1 K
            air_pa = 100.0 * float(np.clip(known.mean() if len(known) else 1013.25, LEAST_HPA, MOST_HPA))
            wet = wet_bulb_c(temp, np.minimum(humidity, 100.0) / 100.0, air_pa)
        return _known(temp), _known(wet)

    def _check_units(self, units: dict[str, Any]) -> None:
        for name, unit in FIELDS.items():
            if units.get(name) != unit:
                raise BadMessage(f"{self.name}: {name} in {str(units.get(name))[:20]}; expected {unit}")

    def _instant(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 31_536_000 < value < 7_258_118_400:
            raise BadMessage(f"{self.name}: time {str(value)[:40]!r}; expected seconds since 1970")
        return value * NS


def _known(values: np.ndarray) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]
