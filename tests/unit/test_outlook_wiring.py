"""Section `outlooks`: what is checked, and the sources and alarms that are made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.outlooks import ServiceError
from tests.support.builders import Twin, two_racks
from twin.catalogue import ConfigError
from twin.config import load_config
from twin.wiring import make_grid_interface, power_faults

ENTSOE = {"service": "entsoe", "zone": "10YFR-RTE------C", "token_file": "key", "usd_per": {"EUR": 1.08}}
MAPS = {"service": "electricity_maps", "zone": "DE", "token_file": "key"}
WATT = {"service": "watttime", "zone": "CAISO_NORTH", "username": "ann", "password_file": "key"}
METEO = {"service": "open_meteo", "latitude": 50.1, "longitude": 8.7}


def write(folder: Path, *services: dict[str, Any], **more: Any) -> Path:
    tree = {"site": "site.yaml", "broker": "embedded", "outlooks": list(services), **more}
    (folder / "racktwin.yaml").write_text(yaml.safe_dump(tree))
    (folder / "key").write_text("a-key\n")
    (folder / "key").chmod(0o600)
    return folder / "racktwin.yaml"


def test_each_service_becomes_a_source_with_an_alarm_of_its_own(tmp_path: Path) -> None:
    loaded, twin = load_config(write(tmp_path, ENTSOE, MAPS, METEO)), Twin(two_racks())
    assert power_faults(loaded, twin.site) == []
    outside = make_grid_interface(loaded, twin.site, lambda: twin.engine, lambda: True)
    names = [source.name for source in outside.sources]
    assert names == [
        "outlook entsoe 10YFR-RTE------C", "outlook electricity_maps DE", "outlook open_meteo 50.1,8.7",
    ]  # fmt: skip
    assert outside.wrong() == {}
    service = outside.services[1]
    service._failure, service._refused = str(ServiceError("x: answers 401", 401)), True
    assert list(outside.wrong()) == ["outside/outlook electricity_maps DE"]


@pytest.mark.parametrize(
    "services, says",
    [
        ([{"service": "entsoe", "zone": "X"}], "$.outlooks[0].token_file: missing; entsoe needs it"),
        ([{**ENTSOE, "usd_per": {}}], "$.outlooks[0].usd_per: missing"),
        ([{**ENTSOE, "usd_per": {"euro": 1.0}}], "'euro': expected three capitals"),
        ([{**ENTSOE, "usd_per": {"EUR": 0.0}}], "$.outlooks[0].usd_per.EUR: expected a number"),
        ([{**ENTSOE, "zone": "a b"}], "$.outlooks[0].zone"),
        ([{**MAPS, "username": "ann"}], "$.outlooks[0].username: electricity_maps has none"),
        ([{**METEO, "latitude": 91}], "$.outlooks[0].latitude"),
        ([{**METEO, "period_s": 1}], "$.outlooks[0].period_s"),
        ([{**METEO, "url": "http://weather.example.net"}], "expected https://"),
        ([{**METEO, "url": "ftp://x"}], "$.outlooks[0].url"),
        ([MAPS, WATT], "$.outlooks[1]: site.grid_carbon_g_per_kwh comes from $.outlooks[0] too"),
    ],
)
def test_a_section_that_is_wrong_is_refused_with_its_place(
    tmp_path: Path, services: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(write(tmp_path, *services))
    assert says in "; ".join(refused.value.problems)


def test_what_a_file_tells_no_service_tells(tmp_path: Path) -> None:
    files = {"outlooks_files": {"site.grid_price_usd_per_kwh": "price.csv"}}
    with pytest.raises(ConfigError, match=r"comes from \$\.power\.outlooks_files too"):
        load_config(write(tmp_path, ENTSOE, power=files))


def test_files_that_hold_no_certificates_are_told_by_the_check(tmp_path: Path) -> None:
    path = write(tmp_path, {**METEO, "ca_file": "ca.pem"})
    (tmp_path / "ca.pem").write_text("none")
    (fault,) = power_faults(load_config(path), Twin(two_racks()).site)
    assert "$.outlooks[0].ca_file" in fault
    assert "expected certificates in PEM" in fault
