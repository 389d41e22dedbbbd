"""Catalogue of fault codes: the meaning of each, the action now and next, and the source of both.

XIDs of GPUs, SXIDs of NVSwitches and codes of our own agents, from the YAML files beside this one; severity
is data, not code. Read once, at import.
"""

from __future__ import annotations

import importlib.resources  # tidy: allow importlib because the catalogue is data of the package, read once
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import yaml

from twin.catalogue import I32, I64, U8, Bool, ConfigError
from twin.contracts import ACTIONS, DEGRADED, FAILED, HEALTHY, WATCH, action

FILES = ("xid.yaml", "sxid.yaml", "agent.yaml")
CLASSES = (
    "app", "memory", "nvlink", "pcie", "bus", "thermal", "power", "firmware", "driver", "security", "fabric",
    "other",
)  # fmt: skip
FIRST_SXID, FIRST_AGENT = 10_000, 1_000_000  # source: NVSwitch driver, error numbers; our agent
TABLES = ("gpu", "node", "switch", "rack")  # whose codes these are: others number theirs as they like
MAX_CODE = 2**31 - 1  # stands for all that are no number of 31 bits
_WATCH, _RESET = action("watch"), action("reset_gpu")
# Last words of XID 154, and the action that they ask for. source: NVIDIA XID catalogue, trigger of 154
_RECOVERIES = {
    "(node reboot required)": action("reboot_node"),
    "(gpu reset required)": _RESET,
    "(drain and reset)": _RESET,
    "(drain p2p)": action("drain"),
    "(none)": action("none"),
}
_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
_Action = Literal["none", "watch", "restart_app", "check_facility", "reset_gpu", "reboot_node",
                  "run_diagnostics", "drain", "contact_support", "replace"]  # fmt: skip
_Class = Literal["app", "memory", "nvlink", "pcie", "bus", "thermal", "power", "firmware", "driver",
                 "security", "fabric", "other"]  # fmt: skip


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Codes with the same meaning. `text`: the words of the report give the gravity or the action."""

    codes: Annotated[list[Annotated[int, msgspec.Meta(ge=1, lt=MAX_CODE)]], msgspec.Meta(min_length=1)]
    name: _Text
    kind: _Class = msgspec.field(name="class")
    action: _Action
    next: _Action
    source: _Text
    grave: bool = False
    ignore: bool = False
    hint: Literal["", "application"] = ""
    text: Literal["", "severity", "recovery"] = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: Literal[1]
    sources: dict[str, _Text]
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FaultCodeEntry:
    """Catalogue entry of a code. `action` and `next_action` are places in ACTIONS: at once, and if it stays.

    `grave`: the device cannot be used until the action is done. `ignore`: it means nothing by itself.
    `hint` is "application" where user code is the usual cause. `known` is False for a code that the catalogue
    does not have.
    """

    code: int
    name: str
    kind: str  # one of CLASSES
    action: int
    next_action: int
    grave: bool
    ignore: bool
    hint: str
    source: str
    text: str = ""
    known: bool = True

    @property
    def label(self) -> str:
        """Return the usual name of the code, such as `XID 79`."""
        if self.code >= FIRST_AGENT:
            return f"agent code {self.code}"
        return f"{'SXID' if self.code >= FIRST_SXID else 'XID'} {self.code}"

    @property
    def level(self) -> int:
        """Return the health level of a device that reported it, as long as the action is not done.

        A code that is not in the catalogue has no known meaning: its device is watched, never well.
        """
        if self.grave:
            return FAILED
        if self.ignore:
            return HEALTHY
        return DEGRADED if self.known and self.action >= action("reset_gpu") else WATCH


def parse(name: str, text: str) -> list[FaultCodeEntry]:
    """Return the entries of a file. Raises ConfigError with the file, the code, the key and the expected
    value."""
    try:
        file = msgspec.convert(yaml.load(text, Loader=yaml.CSafeLoader), _File)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name}: {str(error)[:300]}") from error
    out: list[FaultCodeEntry] = []
    for place, raw in enumerate(file.rows):
        codes = raw.get("codes")
        where = f"{name}: row {place + 1}, codes {str(codes)[:40]}"
        try:
            row = msgspec.convert(raw, _Row)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from error
        if row.source not in file.sources:
            raise ConfigError(f"{where}: source {row.source!r}; expected one of {', '.join(file.sources)}")
        if row.grave and (row.ignore or action(row.action) < action("reset_gpu")):
            raise ConfigError(f"{where}: grave, with {row.action}; expected reset_gpu or more, and no ignore")
        if row.ignore and row.action != "none":
            raise ConfigError(f"{where}: ignore, with the action {row.action}; expected none")
        source = file.sources[row.source]
        out += [
            FaultCodeEntry(code, row.name, row.kind, action(row.action), action(row.next), row.grave,
                           row.ignore, row.hint, source, row.text)
            for code in row.codes
        ]  # fmt: skip
    return out


class Catalogue:
    """Entries by code, and as columns for many at once. Row 0 is for every unknown code."""

    def __init__(self, entries: Iterable[FaultCodeEntry]) -> None:
        found = sorted(entries, key=lambda e: e.code)
        for one, other in pairwise(found):
            if one.code == other.code:
                raise ConfigError(f"code {one.code}: stands in two rows of the catalogue; expected one")
        self.entries = (unknown(0), *found)
        self._row = {e.code: i for i, e in enumerate(self.entries) if i}
        self.code: I64 = np.array([e.code for e in self.entries], np.int64)
        self.action: U8 = np.array([e.action for e in self.entries], np.uint8)
        self.kind: U8 = np.array([CLASSES.index(e.kind) for e in self.entries], np.uint8)
        self.grave: Bool = np.array([e.grave for e in self.entries], np.bool_)
        self.ignore: Bool = np.array([e.ignore for e in self.entries], np.bool_)
        self.app: Bool = np.array([e.hint == "application" for e in self.entries], np.bool_)
        self.text: Bool = np.array([e.text != "" for e in self.entries], np.bool_)

    def rows(self, codes: I64, table: str) -> I32:
        """Return the places in `entries` of these codes [k]; 0 for an unknown code."""
        if table not in TABLES:
            return np.zeros(len(codes), np.int32)
        at = np.minimum(np.searchsorted(self.code, codes), len(self.code) - 1)
        return np.where(self.code[at] == codes, at, 0).astype(np.int32)

    def find(self, code: int, table: str, detail: str = "") -> FaultCodeEntry:
        """Return the entry for a code that a device of this table reported, refined by the words of the
        report.
        """
        row = self._row.get(code, 0) if table in TABLES else 0
        if row == 0:
            return unknown(code)
        entry = self.entries[row]
        if not entry.text or not detail:
            return entry
        asked, grave = read_detail(entry, detail)
        return replace(entry, action=asked, grave=grave, ignore=asked == 0)


def unknown(code: int) -> FaultCodeEntry:
    """Return the entry for a code outside the catalogue: never dropped, never treated as harmless."""
    return FaultCodeEntry(code, "not in the catalogue", "other", action("run_diagnostics"),
                          action("contact_support"), False, False, "", "estimate", "", False)  # fmt: skip


def read_detail(entry: FaultCodeEntry, detail: str) -> tuple[int, bool]:
    """Return (action, grave) by the words of the report."""
    words = detail.lower()
    if entry.text == "severity":
        if "non-fatal" in words or "nonfatal" in words:
            return min(entry.action, _WATCH), False
        if "fatal" in words:
            return max(entry.action, _RESET), True
    elif entry.text == "recovery":
        last = words.rpartition(" to ")[2]
        for phrase, asked in _RECOVERIES.items():
            if phrase in last:
                return asked, asked >= _RESET
    return entry.action, entry.grave


def _load(names: Sequence[str]) -> Catalogue:
    entries: list[FaultCodeEntry] = []
    for name in names:
        file = importlib.resources.files("twin.health").joinpath(name)
        text = file.read_text("utf-8")  # tidy: allow read_text because it is read once, at import
        entries += parse(name, text)
    return Catalogue(entries)


assert set(_Action.__args__) == set(ACTIONS)  # type: ignore[attr-defined]
CATALOGUE = _load(FILES)


def find(code: int, table: str, detail: str = "") -> FaultCodeEntry:
    """Return the packaged catalogue's entry for a code; one with `known` False if it has none."""
    return CATALOGUE.find(code, table, detail)
