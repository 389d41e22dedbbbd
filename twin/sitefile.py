"""The site file: its schema, how names with ranges expand, and how a faulty file is refused, whole.

YAML is read by the shell; this file turns the parsed tree into frozen structs and finds every fault of it at
once. It knows nothing of tables or indices: `twin.site` builds those. May import `twin.errors` only.

Names may hold one range, as Slurm writes them: `r[001-139]` is r001, r002, ... r139.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from twin.errors import ConfigError

T = TypeVar("T")
MAX_EXPANSION = 2_000_000
_RANGE = re.compile(r"^(?P<head>[^\[\]]*)\[(?P<first>\d+)-(?P<last>\d+)\](?P<tail>[^\[\]]*)$")
_PLAIN = re.compile(r"^[A-Za-z0-9_.:+\-]+$")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class RackGroup(_Strict, frozen=True):
    """Racks with one profile. `nodes` and `gpus_per_node` override the profile's layout (0: from the profile)."""

    name: str
    profile: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    priority: int = 0
    spare: bool = False


class CduGroup(_Strict, frozen=True):
    """CDUs and what they serve: rack names; several CDUs share the racks in contiguous, equal blocks."""

    name: str
    serves: list[str] = []
    loop: str | None = None


class LoopGroup(_Strict, frozen=True):
    """A facility-water loop; `cooling` is how it rejects heat."""

    name: str
    cooling: Literal["dry_cooler", "tower", "chiller", "unknown"] = "unknown"


class FeederGroup(_Strict, frozen=True):
    """Meters, busways, PDUs, UPSs: nodes of the power tree.

    `serves` names feeders or racks; several feeders share them in contiguous, equal blocks. `side` is A or B.
    `budget_w` is what it may carry. An `external` budget is a leased signal; while no lease runs,
    `guaranteed_w` applies. `inferred` marks an edge that was guessed, not declared.
    """

    name: str
    serves: list[str] = []
    side: Literal["A", "B", "none"] = "none"
    budget_w: float | None = None
    external: bool = False
    guaranteed_w: float | None = None
    inferred: bool = False


class Plane(_Strict, frozen=True):
    """A network plane: links per node of the racks that match."""

    name: str
    links_per_node: int
    racks: list[str] = []


class Hall(_Strict, frozen=True):
    """A room: racks, the CDUs and feeders that stand in it, and its network planes."""

    name: str
    racks: list[RackGroup] = []
    cdus: list[CduGroup] = []
    feeders: list[FeederGroup] = []
    planes: list[Plane] = []


class ControlLimits(_Strict, frozen=True):
    """What the site allows of a control: may only narrow the catalogue and the profile."""

    min: float | None = None
    max: float | None = None
    safe: float | None = None
    slew_per_s: float | None = None
    deadband: float | None = None
    blast_radius: int | None = None


class PolicyEntry(_Strict, frozen=True):
    """A policy of this site: `kind` is a registered name or `module:Class` of a third party."""

    authority: Literal["off", "advise", "approve", "act"] = "advise"
    kind: str | None = None
    settings: dict[str, float | str | bool] = {}


class ModelEntry(_Strict, frozen=True):
    """A model of this site; `signals` are the catalogue keys that it forecasts."""

    kind: str | None = None
    signals: list[str] = []
    horizons_s: list[float] = []
    settings: dict[str, float | str | bool] = {}


class SiteFile(_Strict, frozen=True):
    """A whole site. Priorities: a larger number matters more; sheds last."""

    site: str
    schema: int = 1
    coolant: str = "pg25"
    halls: list[Hall] = []
    loops: list[LoopGroup] = []
    feeders: list[FeederGroup] = []
    max_jobs: int = 1024
    controls: dict[str, ControlLimits] = {}
    periods_s: dict[str, float] = {}
    history_s: dict[str, float] = {}
    policies: dict[str, PolicyEntry] = {}
    models: dict[str, ModelEntry] = {}


def expand(pattern: str) -> list[str]:
    """The names that `pattern` stands for, in order. Raises ValueError with the expectation."""
    if _PLAIN.match(pattern):
        return [pattern]
    match = _RANGE.match(pattern)
    if match is None or not all(p == "" or _PLAIN.match(p) for p in (match["head"], match["tail"])):
        raise ValueError(f"expected a name or a name with one range such as r[001-139], got {pattern!r}")
    first, last = int(match["first"]), int(match["last"])
    if last < first or last - first >= MAX_EXPANSION:
        raise ValueError(f"expected an ascending range of at most {MAX_EXPANSION} names, got {pattern!r}")
    width = len(match["first"])
    return [f"{match['head']}{i:0{width}d}{match['tail']}" for i in range(first, last + 1)]


def _convert_all(cls: type[Any], raw: Any, path: str, problems: list[str]) -> None:
    """Find the faults of `raw` against `cls`, descending where msgspec stops at the first."""
    try:
        msgspec.convert(raw, cls)
        return
    except msgspec.ValidationError as error:
        first = str(error)
    if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct) and isinstance(raw, dict)):
        at = re.search(r" - at `\$(.*)`$", first)
        problems.append(f"{path}{at.group(1) if at else ''}: {first.split(' - at ')[0].lower()}, got {_short(raw)}")
        return
    fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    for key in raw:
        if key not in fields:
            problems.append(f"{path}.{key}: unknown key; expected one of {', '.join(sorted(fields))}")
    for name, field in fields.items():
        if field.required and name not in raw:
            problems.append(f"{path}.{name}: missing; expected {_type_name(field.type)}")
        elif name in raw:
            _convert_field(field.type, raw[name], f"{path}.{name}", problems)


def _convert_field(kind: Any, raw: Any, path: str, problems: list[str]) -> None:
    origin = getattr(kind, "__origin__", None)
    args: tuple[Any, ...] = getattr(kind, "__args__", ())
    if origin is list and isinstance(raw, list):
        for i, item in enumerate(raw):
            _convert_field(args[0], item, f"{path}[{i}]", problems)
    elif origin is dict and isinstance(raw, dict):
        for key, item in raw.items():
            _convert_field(args[1], item, f"{path}.{key}", problems)
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        _convert_all(kind, raw, path, problems)
    else:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            problems.append(f"{path}: {str(error).split(' - at ')[0].lower()}, got {_short(raw)}")


def _check_keys(raw: Any, path: str, problems: list[str]) -> None:
    """YAML allows keys that are not text (`on:` is a truth value, `1:` a number); we do not."""
    if isinstance(raw, dict):
        for key, item in raw.items():
            if not isinstance(key, str):
                problems.append(f"{path}: the key {key!r} is read as {type(key).__name__}; expected text, so quote it")
            else:
                _check_keys(item, f"{path}.{key}", problems)
    elif isinstance(raw, list):
        for i, item in enumerate(raw):
            _check_keys(item, f"{path}[{i}]", problems)


def _type_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _short(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(cls: type[T], raw: Any, file: str) -> T:
    """`raw` (a parsed YAML tree) as `cls`; raises ConfigError with every fault, each `file: $.path: ...`."""
    problems: list[str] = []
    _check_keys(raw, "$", problems)
    if not problems:
        _convert_all(cls, raw, "$", problems)
    if problems:
        raise ConfigError([f"{file}: {p}" for p in problems])
    return msgspec.convert(raw, cls)
