"""Outside files: what a configuration names beside itself, looked at before a daemon needs it.

Certificates, secrets, mappings and the state folder. What only a service manager can show (`credential:`) is
told as not checkable, never passed in silence. Part of the shell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from connectors.routing import extra_route
from connectors.series_map import load_map
from twin.app.config import Broker, Loaded
from twin.errors import ConfigError

SECRETS = ("password_file", "token_file")
READ = ("ca_file", "cert_file", "key_file", "conf", "tokens_file")
CREDENTIAL = "credential:"


def outside_faults(loaded: Loaded) -> tuple[list[str], list[str]]:
    """(faults, notes on what cannot be checked here) of all files that a configuration names."""
    faults: list[str] = []
    notes: list[str] = []
    for where, name, key in _named(loaded.config, "$"):
        if is_uncheckable(name):
            notes.append(f"{where}: {name}: not checkable here, as systemd has set no CREDENTIALS_DIRECTORY")
            continue
        try:
            if key in SECRETS:
                loaded.secret(name)
            elif not os.access(path := loaded.file(name), os.R_OK):
                why = "cannot be read" if path.exists() else "is not there"
                faults.append(f"{loaded.path}: {where}: {path}: {why}; expected a readable file")
        except ConfigError as error:
            faults += [f"{loaded.path}: {where}: {problem}" for problem in error.problems]
    return faults + _mappings(loaded) + _state(loaded) + _jobs(loaded), notes


def is_uncheckable(name: str | None) -> bool:
    """A credential of systemd, where systemd did not start us."""
    return name is not None and name.startswith(CREDENTIAL) and not os.environ.get("CREDENTIALS_DIRECTORY")


def without_uncheckable(loaded: Loaded) -> Loaded:
    """The same without files of the interface that cannot be looked at here, for checks that open them."""
    api = loaded.config.api
    if api is None:
        return loaded
    tls = api.tls
    if tls is not None and any(map(is_uncheckable, (tls.ca_file, tls.cert_file, tls.key_file))):
        api = msgspec.structs.replace(api, tls=None)
    if is_uncheckable(api.tokens_file):
        api = msgspec.structs.replace(api, tokens_file=None)
    return Loaded(msgspec.structs.replace(loaded.config, api=api), loaded.path)


def _named(part: Any, where: str) -> Iterator[tuple[str, str, str]]:
    """(place, name, key) of every file below a part of the configuration."""
    if isinstance(part, list):
        for i, item in enumerate(part):
            yield from _named(item, f"{where}[{i}]")
    elif isinstance(part, msgspec.Struct):
        for key in part.__struct_fields__:
            value = getattr(part, key)
            if key in (*SECRETS, *READ) and isinstance(value, str):
                yield f"{where}.{key}", value, key
            else:
                yield from _named(value, f"{where}.{key}")


def _mappings(loaded: Loaded) -> list[str]:
    faults: list[str] = []
    named = [(f"$.scrapes[{i}].map", scrape.map) for i, scrape in enumerate(loaded.config.scrapes)]
    broker = loaded.config.broker if isinstance(loaded.config.broker, Broker) else Broker(host="")
    for topic in dict.fromkeys((*broker.topics, *broker.maps)):
        try:
            extra_route(topic)
        except (ConfigError, ValueError) as error:
            faults.append(f"{loaded.path}: $.broker.topics: {error}")
        if topic in broker.maps:
            named.append((f"$.broker.maps.{topic}", broker.maps[topic]))
    for where, name in named:
        try:
            load_map(name, loaded.path.parent)
        except ConfigError as error:
            faults += [f"{loaded.path}: {where}: {problem}" for problem in error.problems]
    return faults


def _jobs(loaded: Loaded) -> list[str]:
    """The folder that jobs share with us is made by people, who know what users jobs run as."""
    if loaded.config.jobs.folder is None:
        return []
    folder = loaded.file(loaded.config.jobs.folder)
    if folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return []
    return [
        f"{loaded.path}: $.jobs.folder: {folder}: expected a folder that we may read and write; see "
        "deploy/docs/checkpoints.md"
    ]


def _state(loaded: Loaded) -> list[str]:
    """The folder need not be there yet; it must be possible to make it and to write into it."""
    folder: Path = loaded.state
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not there.is_dir():
        return [f"{loaded.path}: $.state: {there} is no folder; expected one, or a place to make it"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"{loaded.path}: $.state: {there} cannot be written by this user; expected a folder of ours"]
    return []
