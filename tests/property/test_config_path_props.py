"""Any text in the place of a path: a configuration is read, or refused by the key that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from twin.catalogue import ConfigError
from twin.config import load_config, load_site
from twin.wiring.external_files import external_file_faults

TLS = {"ca_file": "ca.pem", "cert_file": "c.pem", "key_file": "k.pem"}
WHOLE: dict[str, Any] = {
    "site": "site.yaml",
    "state": "state",
    "broker": {
        "host": "b", "username": "u", "password_file": "pw", "tls": TLS,
        "topics": ["t/#"], "maps": {"t/#": "telegraf"},
    },
    "scrapes": [{"url": "https://n/m", "map": "dcgm", "token_file": "t", "tls": TLS}],
    "jobs": {"folder": "jobs", "slurm": {"conf": "slurm.conf"}},
    "kubernetes": {"kubeconfig": "kube"},
    "power": {"flex": {"identifier": "us", "feeds": {"a": "site"}, "keys_file": "k", "sign_key_file": "s"},
              "targets_file": "t.yaml", "outlooks_files": {"site.grid_price_usd_per_kwh": "p.csv"}},
    "history": {"influx": {"url": "https://i", "token_file": "t", "tls": TLS}},
    "api": {"tls": TLS, "tokens_file": "tokens"},
    "notify": [{"kind": "webhook", "url": "https://n", "token_file": "t", "tls": TLS}],
    "leader": {"kind": "etcd", "endpoints": ["https://e"], "username": "u", "password_file": "p", "tls": TLS},
    "redfish": [{"bmcs": {"b": "lab/h/r1/node0"}, "user": "u", "password_file": "p", "ca_file": "ca"}],
    "outlooks": [
        {"service": "watttime", "zone": "X", "username": "u", "password_file": "p", "ca_file": "ca"},
        {"service": "open_meteo", "latitude": 50.1, "longitude": 8.7, "token_file": "t"},
    ],
    "fleet": {"hall": "a", "feeder": "f", "credentials_file": "c", "nkey_file": "n", "username": "u",
              "password_file": "p", "ca_file": "ca", "cert_file": "c", "key_file": "k"},
    "dcmi": [{"bmcs": {"c": "lab/h/r1/node1"}, "user": "u", "password_file": "p", "program": "ipmitool"}],
}  # fmt: skip


def places(part: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every text."""
    if isinstance(part, str):
        return [where]
    pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [found for key, item in pairs for found in places(item, (*where, key))]


def path_places() -> list[tuple[Any, ...]]:
    """Those that hold a path."""
    named = ("site", "state", "folder", "conf", "kubeconfig", "map", "program")
    return [
        place
        for place in places(WHOLE)
        if place[-1] in named or str(place[-1]).endswith("_file") or {"maps", "outlooks_files"} & set(place)
    ]


def changed(tree: Any, place: tuple[Any, ...], text: str) -> Any:
    head, *rest = place
    out = dict(tree) if isinstance(tree, dict) else list(tree)
    out[head] = changed(tree[head], tuple(rest), text) if rest else text
    return out


def shown(place: tuple[Any, ...]) -> str:
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)


PATHS = st.one_of(
    st.sampled_from(["a\0b", "a" * 256, "é" * 128, "x/" * 2000, "~nobody-of-this-name/x", "~", "b" * 300,
                     "", ".", "..", "/", "/dev/null/x", "credential:a\0", "credential:" + "a" * 300]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=400),
    st.lists(st.sampled_from(["a", "..", "~", "b" * 200, "é" * 90]), max_size=40).map("/".join),
)  # fmt: skip


def told(file: Path) -> tuple[list[str], list[str]]:
    """(what is refused, else what is wrong with the files that are named)."""
    try:
        return [], external_file_faults(load_config(file))[0]
    except ConfigError as error:
        return list(error.problems), []


def test_the_configuration_above_is_one(tmp_path: Path) -> None:
    (tmp_path / "racktwin.yaml").write_text(yaml.safe_dump(WHOLE))
    load_config(tmp_path / "racktwin.yaml")


@pytest.mark.long
@given(st.sampled_from(path_places()), PATHS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_is_read_or_refused_by_its_key(tmp_path: Path, place: tuple[Any, ...], text: str) -> None:
    file = tmp_path / "racktwin.yaml"
    file.write_text(yaml.safe_dump(changed(WHOLE, place, text), allow_unicode=True), encoding="utf-8")
    problems, faults = told(file)
    assert all(shown(place) in problem for problem in problems)
    assert all(fault.startswith(str(file.parent)) for fault in faults)


@pytest.mark.parametrize("place", path_places(), ids=shown)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\0b", "holds a NUL byte"),
        ("a" * 300, "and 300 in one name"),
        ("x/" * 2100, "expected at most 3840"),
    ],
    ids=["nul", "name", "path"],
)
def test_a_path_that_no_file_can_have_is_refused_by_its_key(
    tmp_path: Path, place: tuple[Any, ...], text: str, why: str
) -> None:
    file = tmp_path / "racktwin.yaml"
    file.write_text(yaml.safe_dump(changed(WHOLE, place, text)))
    with pytest.raises(ConfigError) as told:
        load_config(file)
    (problem,) = told.value.problems
    assert shown(place) in problem
    assert why in problem


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "../x", "~"])
def test_a_profile_that_no_file_can_have_is_named(tmp_path: Path, name: str) -> None:
    racks = [{"name": "r1", "nodes": 1, "profile": name}]
    (tmp_path / "site.yaml").write_text(
        yaml.safe_dump({"site": "lab", "halls": [{"name": "h", "racks": racks}]})
    )
    with pytest.raises(ConfigError, match="no profile"):
        load_site(tmp_path / "site.yaml")


def test_every_key_of_a_file_is_in_the_configuration_above() -> None:
    """A new key that ends in _file comes here, so that it is checked as well."""
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    keys = {line.split("`")[1] for line in reference.splitlines() if line.startswith("| `")}
    known = {str(key) for place in places(WHOLE) for key in place}
    assert {key for key in keys if key.endswith(("_file", "_files"))} - known == set()
