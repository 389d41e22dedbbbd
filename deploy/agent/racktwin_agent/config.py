"""Configuration of the agent: one TOML file, read strictly. An error lists every problem at once.

Secrets are never in it, only files that hold them. Imports the agent's power and triggers.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from racktwin_agent.power import COMMANDS, LEVELS, STOP
from racktwin_agent.triggers import PsuInput

_PATH = re.compile(r"[A-Za-z0-9_.:\-]{1,64}(/[A-Za-z0-9_.:\-]{1,64}){3,5}")
_LEVEL = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")


class ConfigError(Exception):
    """The file is wrong: one line per fault."""


@dataclass(frozen=True, slots=True)
class Broker:
    """Address of the broker and our name there; `ca_file` turns TLS on."""

    host: str
    port: int
    client_id: str
    username: str | None = None
    password_file: Path | None = None
    keepalive_s: int = 15
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def password(self) -> str | None:
        """Return the password. Raises ConfigError, which never quotes the content of the file."""
        if self.password_file is None:
            return None
        try:
            text = self.password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"{self.password_file}: the password cannot be read") from None
        if not text:
            raise ConfigError(f"{self.password_file}: is empty; expected a password")
        return text


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of an agent."""

    node: str
    broker: Broker
    state_dir: Path
    integration: str = "racktwin"
    interval_s: float = 1.0
    devices: Literal["nvml", "simulated"] = "nvml"
    gpu_bus_ids: tuple[str, ...] = ()
    kernel_log: str = "/dev/kmsg"
    broker_gone_s: float = 60.0
    power_brake_s: float = 2.0
    overheating_c: float = 0.0  # 0: not watched, as nothing acts before people say so
    water_inlet_file: Path | None = None  # temperature of the coolant that comes in, as the kernel reports it
    psu: tuple[PsuInput, ...] = ()
    power: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by level, those that are enabled
    simulated_gpus: int = 4
    simulated_seed: int = 0


class _Reader:
    """Takes keys from a table, checks their values and collects the problems."""

    def __init__(self, tree: Mapping[str, Any], at: str, folder: Path, problems: list[str]) -> None:
        self.tree, self.at, self.folder, self.problems = dict(tree), at, folder, problems

    def take(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.tree.pop(key, None)
        if value is None:
            if default is None and what.endswith("!"):
                self.problems.append(f"{self.at}{key}: missing; expected {what[:-1]}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.problems.append(f"{self.at}{key}: expected {what.rstrip('!')}, got {str(value)[:60]!r}")
            return default
        return value

    def text(self, key: str, what: str, default: str | None = None) -> str:
        return str(self.take(key, str, what, default) or "")

    def number(self, key: str, low: float, high: float, default: float) -> float:
        what = f"a number from {low:g} to {high:g}"
        value = float(self.take(key, (int, float), what, default))
        if not low <= value <= high:
            self.problems.append(f"{self.at}{key}: expected {what}, got {value:g}")
        return value

    def file(self, key: str) -> Path | None:
        name = self.text(key, "the path of a file")
        if name.startswith("credential:"):
            folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
            if not folder:
                self.problems.append(
                    f"{self.at}{key}: {name}: expected systemd's CREDENTIALS_DIRECTORY to be set"
                )
            return self.path(key, Path(folder), name.partition(":")[2])
        return self.path(key, self.folder, name) if name else None

    def path(self, key: str, folder: Path, name: str) -> Path:
        """Return the path that a text names, relative to this folder; an impossible path is a problem."""
        try:
            path = (folder / Path(name).expanduser()).resolve()
            os.lstat(path)
            return path
        except (FileNotFoundError, PermissionError):
            return path
        except (OSError, RuntimeError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.problems.append(f"{self.at}{key}: {name[:60]!r} is no path of a file: {why}")
            return folder

    def table(self, key: str) -> _Reader:
        return _Reader(self.take(key, dict, "a table", {}), f"{self.at}{key}.", self.folder, self.problems)

    def end(self) -> None:
        self.problems += [f"{self.at}{key}: unknown key" for key in self.tree]


def load_config(path: Path) -> Config:
    """Return the configuration of a file. Raises ConfigError with every problem."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    problems: list[str] = []
    root = _Reader(tree, "", path.resolve().parent, problems)
    config = _config(root)
    root.end()
    if problems:
        raise ConfigError("\n".join(f"{path}: {p}" for p in problems))
    return config


def _config(root: _Reader) -> Config:
    node = root.text("node", "the node's path, such as lab/h1/r1/node0!")
    if node and not _PATH.fullmatch(node):
        root.problems.append(f"node: expected a path of site/hall/rack/node, got {node[:80]!r}")
    integration = root.text("integration", "a name", "racktwin")
    if not _LEVEL.fullmatch(integration):
        root.problems.append(f"integration: expected one level of a topic, got {integration[:60]!r}")
    devices = root.text("devices", "nvml or simulated", "nvml")
    if devices not in ("nvml", "simulated"):
        root.problems.append(f"devices: expected nvml or simulated, got {devices[:60]!r}")
    bus_ids = root.take("gpu_bus_ids", list, "a list of PCI addresses", [])
    if not all(isinstance(b, str) and ":" in b for b in bus_ids):
        root.problems.append('gpu_bus_ids: expected PCI addresses such as "0000:41:00"')
    state = root.text("state_dir", "a folder", os.environ.get("STATE_DIRECTORY", "").split(":")[0] or "state")
    triggers, simulated, power = root.table("triggers"), root.table("simulated"), root.table("power")
    config = Config(
        node=node,
        broker=_broker(root.table("broker"), node),
        state_dir=root.path("state_dir", root.folder, state),
        integration=integration,
        interval_s=root.number("interval_s", 0.1, 60, 1.0),
        devices="simulated" if devices == "simulated" else "nvml",
        gpu_bus_ids=tuple(str(b) for b in bus_ids),
        kernel_log=root.text("kernel_log", "/dev/kmsg, a file, journal, nvml or off", "/dev/kmsg"),
        broker_gone_s=triggers.number("broker_gone_s", 1, 86_400, 60.0),
        power_brake_s=triggers.number("power_brake_s", 0, 3600, 2.0),
        overheating_c=triggers.number("overheating_c", 0, 120, 0.0),
        water_inlet_file=triggers.file("water_inlet_file"),
        psu=_psu(triggers),
        power=_power(power),
        simulated_gpus=int(simulated.number("gpus", 0, 64, 4)),
        simulated_seed=int(simulated.number("seed", 0, 2**31, 0)),
    )
    triggers.end()
    simulated.end()
    power.end()
    return config


def _broker(table: _Reader, node: str) -> Broker:
    tls = table.table("tls")
    ca, cert, key = tls.file("ca_file"), tls.file("cert_file"), tls.file("key_file")
    if (cert is None) != (key is None) or (cert is not None and ca is None):
        table.problems.append("broker.tls: expected ca_file alone, or with cert_file and key_file")
    tls.end()
    username = table.text("username", "a name") or None
    broker = Broker(
        host=table.text("host", "the broker's name or address!"),
        port=int(table.number("port", 1, 65_535, 1883 if ca is None else 8883)),
        client_id=table.text("client_id", "a name", "agent." + node.replace("/", "."))[:200],
        username=username,
        password_file=table.file("password_file"),
        keepalive_s=int(table.number("keepalive_s", 2, 3600, 15)),
        ca_file=ca,
        cert_file=cert,
        key_file=key,
    )
    if (broker.password_file is None) != (username is None):
        table.problems.append("broker: expected username and password_file together")
    for file in (ca, cert, key, broker.password_file):
        if file is not None and not file.is_file():
            table.problems.append(f"broker: {file}: no such file")
    table.end()
    return broker


def _power(table: _Reader) -> dict[int, tuple[str, ...]]:
    enabled = table.take("enable", list, "a list of shutdown and off", [])
    if not all(name in LEVELS[STOP:] for name in enabled):
        table.problems.append(f"power.enable: expected some of shutdown and off, got {str(enabled)[:60]!r}")
    out = {}
    for level, usual in COMMANDS.items():
        command = table.take(f"{LEVELS[level]}_command", list, "a list of words", list(usual))
        if not command or not all(isinstance(word, str) and word for word in command):
            table.problems.append(f"power.{LEVELS[level]}_command: expected a program and its words")
        elif LEVELS[level] in enabled:
            out[level] = tuple(command)
    return out


def _psu(triggers: _Reader) -> tuple[PsuInput, ...]:
    out = []
    entries = triggers.take("psu", list, "a list of tables", [])
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            triggers.problems.append(f"triggers.psu[{i}]: expected a table")
            continue
        one = _Reader(entry, f"triggers.psu[{i}].", triggers.folder, triggers.problems)
        command = one.take("command", list, "a list of words", [])
        lost = one.take("lost", list, "a list of texts", ["0", "lost", "offline"])
        file = one.text("file", "the path of a file")
        psu = PsuInput(
            name=one.text("name", "a name", f"psu{i + 1}"),
            file=file,
            command=tuple(str(c) for c in command),
            lost=tuple(str(x).lower() for x in lost),
            min=None if "min" not in one.tree else one.number("min", -1e9, 1e9, 0.0),
            timeout_s=one.number("timeout_s", 0.1, 60, 5.0),
        )
        if bool(file) == bool(command):
            one.problems.append(f"{one.at[:-1]}: expected either file or command")
        one.end()
        out.append(psu)
    return tuple(out)
