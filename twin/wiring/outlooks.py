"""Outlook wiring: a source for each service of section `outlooks`, and the alarm of each."""

from __future__ import annotations

import os

from connectors.outlooks import (
    ElectricityMaps,
    EntsoePrices,
    HttpsClient,
    OpenMeteo,
    OutlookProvider,
    OutlookSource,
    WattTime,
)
from twin.catalogue import ConfigError
from twin.config import Loaded, OutlookService
from twin.wiring.external_files import is_uncheckable


def make_outlooks(loaded: Loaded) -> list[OutlookSource]:
    """The sources of all services. Raises ConfigError; sends no request."""
    out = []
    for i, part in enumerate(loaded.config.outlooks):
        ca_file = None if part.ca_file is None else str(loaded.file(part.ca_file))
        try:
            client = HttpsClient(part.timeout_s, ca_file)
        except ConfigError as error:
            raise ConfigError(f"{loaded.path}: $.outlooks[{i}].ca_file: {error}") from None
        out.append(OutlookSource(_provider(loaded, part), client, part.period_s))
    return out


def outlook_faults(loaded: Loaded) -> list[str]:
    """Files of authorities that hold no certificates; those that cannot be read are reported elsewhere."""
    out = []
    for i, part in enumerate(loaded.config.outlooks):
        if part.ca_file is None or is_uncheckable(part.ca_file):
            continue
        path = loaded.file(part.ca_file)
        if not os.access(path, os.R_OK):
            continue
        try:
            HttpsClient(part.timeout_s, str(path))
        except ConfigError as error:
            out.append(f"{loaded.path}: $.outlooks[{i}].ca_file: {error}")
    return out


def _provider(loaded: Loaded, part: OutlookService) -> OutlookProvider:
    zone, token = part.zone or "", loaded.secret(part.token_file)
    more = {} if part.url is None else {"url": part.url.rstrip("/")}
    if part.service == "entsoe":
        return EntsoePrices(zone, token or "", part.usd_per, **more)
    if part.service == "electricity_maps":
        return ElectricityMaps(zone, token or "", **more)
    if part.service == "watttime":
        password = loaded.secret(part.password_file) or ""
        return WattTime(zone, part.username or "", password, part.signal or "co2_moer", **more)
    return OpenMeteo(part.latitude or 0.0, part.longitude or 0.0, token, **more)
