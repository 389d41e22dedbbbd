"""External files of a configuration, checked before a daemon needs them.

Certificates, secrets, mappings, the state folder, host names, the program of the burn-in. Files that only a
service manager can show (`credential:`) are reported as not checkable, never passed in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import ssl
import time
from pathlib import Path
from typing import Any

import msgspec

from connectors.kubernetes import HOST, load_access
from connectors.mqtt import extra_route
from connectors.series_map import load_map
from connectors.slurm import expand_names
from twin.anchor import HeadSigner
from twin.catalogue import ConfigError
from twin.config import Api, Broker, Loaded, Tls, texts_of

SECRETS = ("password_file", "token_file")
READ = ("ca_file", "cert_file", "key_file", "conf", "tokens_file", "kubeconfig", "keys_file", "sign_key_file")
RENEWED = (*SECRETS, "ca_file", "cert_file", "key_file", "kubeconfig", "map")
CREDENTIAL = "credential:"


def external_file_faults(loaded: Loaded) -> tuple[list[str], list[str]]:
    """(faults, notes on what cannot be checked here) of all files that a configuration names."""
    faults: list[str] = []
    notes: list[str] = []
    for where, key, name in texts_of(loaded.config):
        if key not in (*SECRETS, *READ):
            continue
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
    faults += [
        *_trust(loaded, "$", loaded.config),
        *_mappings(loaded),
        *_state(loaded),
        *_jobs(loaded),
        *_hosts(loaded),
        *_sign_key(loaded),
    ]
    for more, remarks in (_cluster(loaded), _burn_in(loaded)):
        faults += more
        notes += remarks
    return faults, notes


def file_digests(loaded: Loaded) -> dict[str, str]:
    """Section of a configuration -> digest of the files that its parts were made with, as they are now.

    Without those that are read again by themselves (Slurm's own, tokens of the interface, keys of ISVs); the
    key of the journal stays as it was at the start.
    """
    hashes: dict[str, Any] = {}
    for where, key, name in texts_of(loaded.config):
        if key not in RENEWED and not where.startswith(("$.broker.maps.", "$.power.flex.sign_key_file")):
            continue
        content = b"none"
        with contextlib.suppress(OSError, ConfigError):
            content = hashlib.blake2b(loaded.file(name).read_bytes()).digest()
        section = where.split(".")[1].partition("[")[0]
        hashes.setdefault(section, hashlib.blake2b()).update(where.encode() + content)
    return {section: digest.hexdigest() for section, digest in hashes.items()}


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


def _sign_key(loaded: Loaded) -> list[str]:
    """A file that should sign the journal's heads and holds no key."""
    name = loaded.config.journal.sign_key_file
    if name is None or is_uncheckable(name):
        return []
    try:
        text = loaded.secret(name) or ""
    except ConfigError:  # reported with the other files
        return []
    try:
        HeadSigner.of_pem(text, f"{loaded.path}: $.journal.sign_key_file: {name}")
    except ConfigError as error:
        return list(error.problems)
    return []


def _trust(loaded: Loaded, where: str, part: Any) -> list[str]:
    """Faults of certificates and keys of the client's side of TLS, wherever they stand."""
    if isinstance(part, list):
        return [fault for i, item in enumerate(part) for fault in _trust(loaded, f"{where}[{i}]", item)]
    if isinstance(part, Tls):
        named = [name for name in (part.ca_file, part.cert_file, part.key_file) if name is not None]
        if any(is_uncheckable(name) or not os.access(loaded.file(name), os.R_OK) for name in named):
            return []  # reported with the other files
        if (part.cert_file is None) != (part.key_file is None):
            return [f"{loaded.path}: {where}: expected cert_file and key_file, or neither"]
        try:
            trusted = loaded.trust(part, where.removeprefix("$.")).get_ca_certs() if part.ca_file else []
        except ConfigError as error:
            return list(error.problems)
        ends = [str(cert["notAfter"]) for cert in trusted]
        if ends and all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
            return [f"{loaded.path}: {where}.ca_file: its certificates expired, the last {max(ends)}; "
                    "expected one that is valid now (`openssl x509 -enddate`)"]  # fmt: skip
        return []
    if isinstance(part, msgspec.Struct) and not isinstance(part, Api):
        fields = part.__struct_fields__
        return [fault for key in fields for fault in _trust(loaded, f"{where}.{key}", getattr(part, key))]
    return []


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
        "docs/checkpoints.md"
    ]


def _hosts(loaded: Loaded) -> list[str]:
    """Names of nodes that no daemon would start with."""
    faults: list[str] = []
    for part, where in ((loaded.config.jobs.slurm, "jobs.slurm"), (loaded.config.kubernetes, "kubernetes")):
        try:
            expand_names(part.node_names if part is not None else {}, f"$.{where}.node_names")
        except ConfigError as error:
            faults += [f"{loaded.path}: {problem}" for problem in error.problems]
    return faults


def _cluster(loaded: Loaded) -> tuple[list[str], list[str]]:
    """Access to Kubernetes as its kubeconfig has it; the server is not asked."""
    part = loaded.config.kubernetes
    if part is None:
        return [], []
    if part.kubeconfig is None and not os.environ.get(HOST):
        return [], [
            f"$.kubernetes: not checkable here, as this is no pod ({HOST} is not set); outside a pod "
            "the daemon needs kubernetes.kubeconfig, or it does not start"
        ]
    path = None if part.kubeconfig is None else loaded.file(part.kubeconfig)
    if path is not None and not os.access(path, os.R_OK):
        return [], []  # reported with the other files
    try:
        load_access(path, part.context)
    except ConfigError as error:
        return [f"{loaded.path}: $.kubernetes: {problem}" for problem in error.problems], []
    return [], []


def _burn_in(loaded: Loaded) -> tuple[list[str], list[str]]:
    """The site's test: a program that is there, and names in braces that are filled in."""
    part = loaded.config.burn_in
    if part is None:
        return [], []
    notes = [
        f"$.burn_in.command: {name} is given to the program as it is; known: {{node}}, {{host}}"
        for name in dict.fromkeys(re.findall(r"\{[A-Za-z_]+\}", " ".join(part.command[1:])))
        if name not in ("{node}", "{host}")
    ]
    program = part.command[0]
    if "/" not in program:
        if shutil.which(program) is None:
            notes.append(f"$.burn_in.command: {program[:80]} is on no PATH here; expected a whole path")
        return [], notes
    if os.path.isabs(program) and os.path.isfile(program) and os.access(program, os.X_OK):
        return [], notes
    fault = f"{program[:200]}: expected the whole path of a program that we may run"
    return [f"{loaded.path}: $.burn_in.command: {fault}"], notes


def _state(loaded: Loaded) -> list[str]:
    """The folder need not be there yet; it must be possible to make it and to write into it."""
    folder: Path = loaded.state
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not there.is_dir():
        return [f"{loaded.path}: $.state: {there} is no folder; expected one, or a place to make it"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"{loaded.path}: $.state: {there} cannot be written by this user; expected a folder of ours"]
    return []
