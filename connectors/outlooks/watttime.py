"""WattTime emissions forecast: the emissions rate of a region, marginal or average, for the next hours.

A login gives a token for half an hour. source: WattTime API v3, /login and /v3/forecast.
"""

from __future__ import annotations

import base64

from connectors.outlooks.client import HttpsClient, ServiceError
from connectors.outlooks.series import OutlookAnswer, instant_ns, json_object, number_of, series_of
from twin.catalogue import NS, BadMessage

URL = "https://api.watttime.org"
CARBON = "site.grid_carbon_g_per_kwh"
TOKEN_NS = 25 * 60 * NS  # a token lasts 30 minutes
G_PER_KWH = {"lbs_co2_per_mwh": 0.45359237, "kg_co2_per_mwh": 1.0}  # 1 lb = 453.59237 g by definition


class WattTime:
    """Reader of `signal` (co2_moer: marginal, co2_aoer: average) of `region`."""

    quantities: tuple[str, ...] = (CARBON,)
    in_force: tuple[str, ...] = ()

    def __init__(self, region: str, username: str, password: str, signal: str, url: str = URL) -> None:
        self.name = f"watttime {region}"
        self._region, self._signal, self._url = region, signal, url
        self._login = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        self._token, self._token_ns = "", 0

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        """Log in if the token is old, and fetch the forecast; a refused token is renewed once."""
        for is_last in (False, True):
            fresh = not 0 <= now_ns - self._token_ns < TOKEN_NS or not self._token
            if fresh:
                head = {"Authorization": self._login}
                text = await client.get(f"{self._url}/login", {}, now_ns, head)
                self._token, self._token_ns = self._token_of(text), now_ns
            query = {"region": self._region, "signal_type": self._signal, "horizon_hours": "24"}
            headers = {"Authorization": f"Bearer {self._token}"}
            try:
                return self.read(await client.get(f"{self._url}/v3/forecast", query, now_ns, headers))
            except ServiceError as error:
                self._token = ""
                if error.status != 401 or fresh or is_last:
                    raise
        raise AssertionError("two tries end in an answer or an error")

    def _token_of(self, text: bytes) -> str:
        token = json_object(text, self.name).get("token")
        if not isinstance(token, str) or not 0 < len(token) < 10_000 or not token.isprintable():
            raise BadMessage(f"{self.name}: a login without a token; expected {{token: ..}}")
        return token

    def read(self, text: bytes) -> OutlookAnswer:
        """Return the series of a forecast. Raises BadMessage."""
        tree = json_object(text, self.name)
        rows, meta = tree.get("data"), tree.get("meta")
        if (
            not isinstance(rows, list)
            or not isinstance(meta, dict)
            or not all(isinstance(r, dict) for r in rows)
        ):
            raise BadMessage(f"{self.name}: no list `data` with `meta`; expected point_time and value")
        factor = G_PER_KWH.get(str(meta.get("units")))
        if factor is None or meta.get("signal_type", self._signal) != self._signal:
            raise BadMessage(
                f"{self.name}: {str(meta.get('signal_type'))[:40]} in {str(meta.get('units'))[:40]}; "
                f"expected {self._signal} in {', '.join(G_PER_KWH)}"
            )
        points = []
        for row in rows:
            value = number_of(row.get("value"), self.name)
            at_ns = instant_ns(row.get("point_time"), self.name)
            # A marginal rate may be below 0, where more load would lower emissions; the quantity begins at 0
            points.append((at_ns, None if value is None else max(0.0, factor * value)))
        made = meta.get("generated_at")
        return OutlookAnswer(
            (series_of(CARBON, points, self.name),), (), instant_ns(made, self.name) if made else 0
        )
