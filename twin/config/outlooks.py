"""Section `outlooks` of the configuration: public services of prices, carbon intensity and weather."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from twin.config.section import Problems, Strict

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_SERVICES = 20
QUANTITIES_OF = {
    "entsoe": ("site.grid_price_usd_per_kwh",),
    "electricity_maps": ("site.grid_carbon_g_per_kwh",),
    "watttime": ("site.grid_carbon_g_per_kwh",),
    "open_meteo": ("site.outdoor_temp_c", "site.outdoor_wet_bulb_c"),
}
NEEDS = {
    "entsoe": ("zone", "token_file", "usd_per"),
    "electricity_maps": ("zone", "token_file"),
    "watttime": ("zone", "username", "password_file"),
    "open_meteo": ("latitude", "longitude"),
}
TAKES = {
    "entsoe": (),
    "electricity_maps": (),
    "watttime": ("signal",),
    "open_meteo": ("token_file",),
}
OWN = ("zone", "latitude", "longitude", "token_file", "username", "password_file", "usd_per", "signal")
_ZONE = re.compile(r"[A-Za-z0-9_.\-]{1,40}")
_CURRENCY = re.compile(r"[A-Z]{3}")


class OutlookService(Strict, msgspec.Struct, frozen=True):
    """A service that is asked on schedule over HTTPS; its values become outlooks, present ones readings.

    entsoe: day-ahead prices (`zone`, `token_file`, `usd_per`). electricity_maps: average carbon intensity
    (`zone`, `token_file`). watttime: rate of CO2 (`zone`, `username`, `password_file`). open_meteo: weather
    (`latitude`, `longitude`; `token_file` for a commercial plan).
    """

    service: Literal["entsoe", "electricity_maps", "watttime", "open_meteo"]  # which one; below
    # entsoe: EIC of the bidding zone, 10Y1001A1001A82H; electricity_maps: DE; watttime: CAISO_NORTH
    zone: str | None = None
    latitude: float | None = None  # of the site, degrees north
    longitude: float | None = None  # of the site, degrees east
    token_file: str | None = None  # file with the key of the service, or credential:NAME
    username: str | None = None  # account at watttime
    password_file: str | None = None  # file with its password, or credential:NAME
    # dollars for one unit of the currency that prices come in; you keep it up to date: {EUR: 1.08}
    usd_per: dict[str, float] = {}
    # of watttime; co2_moer: marginal rate, co2_aoer: average. One is not comparable with the other
    signal: Literal["co2_moer", "co2_aoer"] | None = None
    url: str | None = None  # where else the service is, such as a host of your own
    period_s: float = 1800.0  # between two requests
    timeout_s: float = 20.0  # of a request
    ca_file: str | None = None  # certificate authorities to trust; default: those of the host


def outlook_problems(services: Sequence[OutlookService], files: Sequence[str]) -> list[str]:
    """Errors of this section beyond its types. `files`: quantities that files provide already."""
    out = Problems()
    if len(services) > MAX_SERVICES:
        out.append(f"$.outlooks: expected at most {MAX_SERVICES} services, got {len(services)}")
    stated = dict.fromkeys(files, "power.outlooks_files")
    for i, part in enumerate(services):
        where = f"outlooks[{i}]"
        out.within(f"{where}.period_s", part.period_s, 60, 86_400)
        out.within(f"{where}.timeout_s", part.timeout_s, 1, 120)
        out += _key_problems(part, where)
        out += _value_problems(part, where)
        if part.url is not None:
            out.http(f"{where}.url", part.url)
            host = urlsplit(part.url).hostname if len(out) == 0 else None
            if part.url.startswith("http:") and host is not None and host not in LOOPBACK:
                out.append(f"$.{where}.url: expected https://: a key would go over the network in the clear")
        for quantity in QUANTITIES_OF[part.service]:
            other = stated.setdefault(quantity, where)
            if other != where:
                out.append(f"$.{where}: {quantity} comes from $.{other} too; expected one of the two")
    return out[:20]


def _key_problems(part: OutlookService, where: str) -> list[str]:
    needs, takes = NEEDS[part.service], TAKES[part.service]
    given = [key for key in OWN if getattr(part, key) not in (None, {})]
    out = [f"$.{where}.{key}: missing; {part.service} needs it" for key in needs if key not in given]
    surplus = [key for key in given if key not in (*needs, *takes)]
    return out + [
        f"$.{where}.{key}: {part.service} has none; expected {', '.join((*needs, *takes))}" for key in surplus
    ]


def _value_problems(part: OutlookService, where: str) -> list[str]:
    out = Problems()
    if part.zone is not None and not _ZONE.fullmatch(part.zone):
        out.append(f"$.{where}.zone: {part.zone[:60]!r}: expected letters, digits and -_. alone")
    if part.latitude is not None:
        out.within(f"{where}.latitude", part.latitude, -90, 90)
    if part.longitude is not None:
        out.within(f"{where}.longitude", part.longitude, -180, 180)
    for currency, dollars in part.usd_per.items():
        if not _CURRENCY.fullmatch(currency):
            out.append(f"$.{where}.usd_per: {currency[:20]!r}: expected three capitals, such as EUR")
        out.within(f"{where}.usd_per.{currency[:20]}", dollars, 1e-6, 1e3)
    return out
