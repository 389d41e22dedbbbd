"""Site file: its schema, the expansion of name ranges, and the rejection of a faulty file as a whole.

YAML is read by the shell; this file turns the parsed tree into frozen structs and finds every fault of it
at once. It knows nothing of tables or indices: `twin.site.site` builds those.

Names may hold one range, as Slurm writes them: `r[001-139]` is r001, r002, ... r139.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import reprlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from twin.catalogue import ConfigError, did_you_mean

T = TypeVar("T")
MAX_EXPANSION = 200_000
MAX_PATTERN = 256  # characters
MAX_PROBLEMS = 1_000  # of one file that are reported; the others are counted
# With `fullmatch`, and no \d: digits of other scripts and a line's end are no part of a name.
_RANGE = re.compile(r"(?P<head>[^\[\]]*)\[(?P<first>[0-9]+)-(?P<last>[0-9]+)\](?P<tail>[^\[\]]*)")
_PLAIN = re.compile(r"[A-Za-z0-9_.:+\-]+")
_KIND = re.compile(r"`([^`]+)`")  # as msgspec quotes it
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
          "array": "a list", "object": "a mapping"}  # fmt: skip
_WITH_UNIT = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?[A-Za-z%°]{1,8}")
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 3, 80, 80, 80
_REPR.maxlist = _REPR.maxdict = _REPR.maxtuple = _REPR.maxset = 12


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class RackGroup(_Strict, frozen=True):
    """Racks with one profile. `nodes` (per rack) and `gpus_per_node` override the profile's layout.

    What is kept free to take over from a node that leaves: all of a `spare` rack, or the last `spare_nodes`
    of each rack. `reports` false: the rack has no meters of its own, so none are waited for. `nodes_from`
    says from which end of the rack its nodes are counted, as coolant that leaks runs down.

    In the site file of a fleet a rack with `guaranteed_w` is a hall with a daemon of its own: it has no nodes
    here, reports what it draws, and is granted a budget from `guaranteed_w` to `max_w` (docs/fleet.md).
    """

    name: str  # may hold one range: r[001-139]
    profile: str | None = None  # type of the rack, its limits and layout; without one nothing guards it
    nodes: int | None = None  # per rack; default: the profile's
    gpus_per_node: int | None = None  # default: the profile's
    priority: int = 0  # a larger number matters more: it sheds last
    spare: bool = False  # the whole rack is kept free to take over
    spare_nodes: int = 0  # the last so many nodes of each rack are kept free
    reports: bool = True  # false: it has no meter of its own, and nothing is waited for
    nodes_from: Literal["bottom", "top", "unknown"] = "unknown"  # the end from which its nodes are counted
    guaranteed_w: float | None = None  # it is a hall of a fleet: its budget while no grant runs
    max_w: float | None = None  # of such a hall: the most that it is granted


class CduGroup(_Strict, frozen=True):
    """CDUs and the racks they serve; several CDUs share the racks in contiguous, equal blocks."""

    name: str  # may hold one range
    serves: list[str] = []  # racks
    loop: str | None = None  # of `loops`, the facility water that it is cooled by


class LoopGroup(_Strict, frozen=True):
    """A facility-water loop; `cooling` is how it rejects heat. A simulated site has the plant that is stated
    here; the twin learns what a real one does.

    In the site file of a fleet a loop `serves` halls, and its heat is shared out as a feeder's power is.
    Several share the halls in contiguous, equal blocks. It takes `heat_w` with all its `machines`, of which
    each takes an equal part.
    """

    name: str  # may hold one range
    cooling: Literal["dry_cooler", "tower", "chiller", "unknown"] = "unknown"  # how it rejects heat
    # of its supply over the air at nominal heat and full fans: over a wet bulb of 25.6 C, or the dry bulb
    approach_k: float | None = None
    pumps_w: float | None = None  # of all pumps of the loop, and of a tower's, at nominal flow
    fans_w: float | None = None  # of all its fans at full speed
    serves: list[str] = []  # halls of a fleet: racks with guaranteed_w
    heat_pu: float = 1.0  # of the power of these halls, that it takes as heat
    heat_w: float | None = None  # the most heat that it takes, with all its machines
    machines: int | None = None  # its chillers or pumps, whichever are fewer: a lost one takes its part along
    flow_lpm: float | None = None  # at that heat; with it, a flow that is too low for the heat lowers it too


class FeederGroup(_Strict, frozen=True):
    """Meters, busways, PDUs, UPSs: nodes of the power tree.

    `serves` names feeders or racks; several feeders share them in contiguous, equal blocks. `side` is A or B.
    `budget_w` is what it may carry. An `external` budget is a leased signal; while no lease runs,
    `guaranteed_w` applies. `inferred` marks an edge that was guessed, not declared. `reports` false: it has
    no meter, so none is waited for.
    """

    name: str  # may hold one range
    serves: list[str] = []  # feeders or racks
    side: Literal["A", "B", "none"] = "none"  # of a redundant supply
    budget_w: float | None = None  # what it may carry
    external: bool = False  # the budget is set from outside, by a lease
    guaranteed_w: float | None = None  # budget while no such lease runs
    inferred: bool = False  # the edge was guessed, not declared
    reports: bool = True  # false: it has no meter of its own, and nothing is waited for


class Plane(_Strict, frozen=True):
    """A network plane: links per node of the racks that match."""

    name: str  # of links: rail, ib and eth are known to node_exporter's mapping
    links_per_node: int  # of each node
    racks: list[str] = []  # that have it; default: all of the hall


class LeafGroup(_Strict, frozen=True):
    """Leaf switches and the racks on each: one hop from node to node. Several share the racks as CDUs do.

    In a rail-optimised pod a leaf is the set of rail leaves that its racks have in common (a scalable unit).
    A rack is on one at most; of a rack on none the leaf is not known.
    """

    name: str  # may hold one range
    serves: list[str] = []  # racks


class SwitchGroup(_Strict, frozen=True):
    """Network switches that report themselves; the links of nodes belong to planes.

    All switches of an entry serve the same racks (leaves) or switches (spines) and share their links evenly,
    as the rail leaves of a pod do. Leaves of other racks are another entry.
    """

    name: str  # may hold one range
    serves: list[str] = []  # racks, or switches, of this hall; none: not stated
    planes: list[str] = []  # whose links to these racks they carry; none: all


class StorageGroup(_Strict, frozen=True):
    """File systems that jobs flush their checkpoints to and restore them from."""

    name: str  # may hold one range


class QueueGroup(_Strict, frozen=True):
    """Queues of the scheduler: partitions of Slurm, local queues of Kueue."""

    name: str  # as the scheduler has it; may hold one range


class TenantGroup(_Strict, frozen=True):
    """Tenants: accounts or users of Slurm, namespaces of Kubernetes."""

    name: str  # as the scheduler has it; may hold one range


REST_CLASS = "rest"  # of priorities: all that belong to no other
PRIORITIES = (-(2**31), 2**31 - 1)


class PriorityGroup(_Strict, frozen=True):
    """A class of priority: a QOS of Slurm, a priority class of Kubernetes or Kueue, or a band of numbers.

    A job belongs to the class that its scheduler names, else to that of the highest `least` that its priority
    reaches. All others are counted in the class `rest`, which every site with priorities has.
    """

    name: str  # as the scheduler has it; may hold one range
    least: int | None = None  # of the numbers that belong to it; none: only jobs of its name


class ServiceGroup(_Strict, frozen=True):
    """Inference services: each is the sum of its replicas."""

    name: str  # may hold one range


class Hall(_Strict, frozen=True):
    """A room: racks, the CDUs, feeders and switches that stand in it, its network planes and leaves."""

    name: str  # name of the room
    racks: list[RackGroup] = []  # racks of a kind, one line each
    cdus: list[CduGroup] = []  # that cool racks of this hall
    feeders: list[FeederGroup] = []  # that feed racks of this hall
    planes: list[Plane] = []  # of the network
    leaves: list[LeafGroup] = []  # which racks share their leaf switches
    switches: list[SwitchGroup] = []  # that report for themselves


class ControlLimits(_Strict, frozen=True):
    """Range that the site allows of a control: may only narrow the catalogue and the profile."""

    min: float | None = None  # may only narrow
    max: float | None = None  # may only narrow
    safe: float | None = None  # what a lapsed lease sets
    slew_per_s: float | None = None  # most change
    deadband: float | None = None  # smallest change that is worth a command
    blast_radius: int | None = None  # most entities moved at once


class PolicyEntry(_Strict, frozen=True):
    """A policy of this site: `kind` is a registered name or `module:Class` of a third party."""

    authority: Literal["off", "advise", "approve", "act"] = "advise"  # what it may do by itself
    kind: str | None = None  # registered name, or module:Class; default: the name of the entry
    settings: dict[str, float | str | bool] = {}  # arguments of the policy: docs/policies.md


class ModelEntry(_Strict, frozen=True):
    """A model of this site; `signals` are the catalogue keys that it forecasts."""

    kind: str | None = None  # registered name, or module:Class; default: the name of the entry
    signals: list[str] = []  # of the catalogue, that it forecasts
    horizons_s: list[float] = []  # how far ahead
    settings: dict[str, float | str | bool] = {}  # arguments of the model: docs/forecasts.md


class SiteFile(_Strict, frozen=True):
    """A whole site. Priorities: a larger number matters more; sheds last."""

    site: str  # name, the first part of every full name
    schema: int = 1  # version of this form
    coolant: str = "pg25"  # of the racks' loops
    halls: list[Hall] = []  # rooms
    loops: list[LoopGroup] = []  # of facility water
    feeders: list[FeederGroup] = []  # that feed several halls
    storage: list[StorageGroup] = []  # file systems of checkpoints
    queues: list[QueueGroup] = []  # of the scheduler, whose demand is kept
    tenants: list[TenantGroup] = []  # whose demand is kept
    priorities: list[PriorityGroup] = []  # by which demand is kept
    services: list[ServiceGroup] = []  # of inference, whose requests are counted
    # of a part of a site: what other daemons mirror, as [hall2, "hall1/r[101-139]"]
    elsewhere: list[str] = []
    max_jobs: int = 1024  # places for jobs that run at the same time
    controls: dict[str, ControlLimits] = {}  # limits of this site by control: {gpu.power_cap_w: {min: 400}}
    # how often a signal, or all of a table, is expected: {gpu: 30, rack.power_w: 60}
    periods_s: dict[str, float] = {}
    # of the diagnosis, in an hour of a healthy rack: the thresholds of its tests follow from it
    false_alarms_per_rack_hour: float = 0.0005
    history_s: dict[str, float] = {}  # how much of a signal policies and models may look back at
    policies: dict[str, PolicyEntry] = {}  # by name; those not named are at `advise` with their defaults
    models: dict[str, ModelEntry] = {}  # by name; those not named are not run, but for the default ones


def expand(pattern: str) -> list[str]:
    """Return the names that `pattern` expands to, in order. Raises ValueError with the expectation."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"expected at most {MAX_PATTERN} characters, got {len(pattern)}")
    if _PLAIN.fullmatch(pattern):
        return [pattern]
    match = _RANGE.fullmatch(pattern)
    if match is None or not all(p == "" or _PLAIN.fullmatch(p) for p in (match["head"], match["tail"])):
        raise ValueError(f"expected a name or a name with one range such as r[001-139], got {short(pattern)}")
    first, last = int(match["first"]), int(match["last"])
    if last < first or last - first >= MAX_EXPANSION:
        raise ValueError(
            f"expected an ascending range of at most {MAX_EXPANSION} names, got {short(pattern)}"
        )
    width = len(match["first"])
    return [f"{match['head']}{i:0{width}d}{match['tail']}" for i in range(first, last + 1)]


def ranges(names: Iterable[str]) -> list[str]:
    """Return the patterns that `expand` to these names, sorted: n01, n02, n03 -> n[01-03]."""
    plain: list[str] = []
    numbered: dict[tuple[str, int], list[int]] = {}
    for name in sorted(set(names)):
        if match := re.fullmatch(r"(.*?)([0-9]{1,9})", name):
            numbered.setdefault((match[1], len(match[2])), []).append(int(match[2]))
        else:
            plain.append(name)
    for (head, width), numbers in sorted(numbered.items()):
        for _, run in itertools.groupby(enumerate(numbers), key=lambda n: n[1] - n[0]):
            digits = [f"{number:0{width}d}" for _, number in run]
            plain.append(head + (digits[0] if len(digits) == 1 else f"[{digits[0]}-{digits[-1]}]"))
    return plain


def within(pattern: str, kept: Collection[str]) -> list[str]:
    """Return patterns of those names of `pattern` that are `kept`, in its order: one for each run."""
    match, out = _RANGE.fullmatch(pattern), []
    for is_kept, run in itertools.groupby(expand(pattern), kept.__contains__):
        first, *more = run
        if is_kept and match is not None and more:
            ends = (name[len(match["head"]) : len(name) - len(match["tail"])] for name in (first, more[-1]))
            out.append(f"{match['head']}[{'-'.join(ends)}]{match['tail']}")
        elif is_kept:
            out.append(first)
    return out


class _Lost:
    """Placeholder for an unreadable part."""


@dataclass
class Faults:
    """Faults in the form of a tree. `names_lost`: a name, or what has one, could not be read."""

    problems: list[str] = field(default_factory=list)
    names_lost: bool = False


def _mend(kind: Any, raw: Any, path: str, faults: Faults) -> Any:
    """Return `raw` without parts that do not fit `kind`, each fault noted; lists of structs keep their
    places."""
    args: tuple[Any, ...] = getattr(kind, "__args__", ())
    if isinstance(raw, dict) and type(None) in args and len(args) == 2:  # a section that may be left out
        kind = next(part for part in args if part is not type(None))
        args = getattr(kind, "__args__", ())
    origin = getattr(kind, "__origin__", None)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
        return _mend_struct(kind, raw, path, faults)
    if origin is list and isinstance(raw, list):
        items = [_mend(args[0], item, f"{path}[{i}]", faults) for i, item in enumerate(raw)]
        faults.names_lost |= args[0] is str and _Lost in items
        if isinstance(args[0], type) and issubclass(args[0], msgspec.Struct):
            faults.names_lost |= _Lost in items
            items = [
                _mend_struct(args[0], {}, f"{path}[{i}]", Faults()) if x is _Lost else x
                for i, x in enumerate(items)
            ]
        return [x for x in items if x is not _Lost]
    if origin is dict and isinstance(raw, dict):
        mended = {k: _mend(args[1], x, f"{path}.{_cut(k)}", faults) for k, x in _text_keys(raw, path, faults)}
        return {k: x for k, x in mended.items() if x is not _Lost}
    if isinstance(raw, int) and raw.bit_length() > 63:
        faults.problems.append(f"{path}: expected a number of at most 63 bits, got {short(raw)}")
        return _Lost
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        at = re.search(r" - at `\$(.*)`$", str(error))
        why = re.sub(r", got `\w+`$", "", str(error).split(" - at ")[0])
        why = _KIND.sub(lambda m: _in_words(m[1]), why[:1].lower() + why[1:])
        if (words := _choices(kind)) and (why.startswith("invalid enum value") or isinstance(raw, bool)):
            why = f"expected one of {', '.join(words)}"
        faults.problems.append(
            f"{path}{at.group(1) if at else ''}: {why}, got {short(raw)}{_hint(kind, raw)}"
        )
        faults.names_lost |= origin is list
        return _Lost
    return raw


def _in_words(kinds: str) -> str:
    """Return `int | null` of msgspec in words."""
    words = [_WORDS.get(kind, f"`{kind}`") for kind in kinds.split(" | ") if kind != "null"]
    return " or ".join(words)


def _choices(kind: Any) -> list[str]:
    """Return the words of a `Literal`, at any place within a kind."""
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    found = (words for part in get_args(kind) if (words := _choices(part)))
    return next(found, [])


def _mend_struct(
    kind: type[msgspec.Struct], raw: dict[Any, Any], path: str, faults: Faults
) -> dict[str, Any]:
    fields = _fields(kind)
    known = ", ".join(sorted(fields))
    out: dict[str, Any] = {}
    for key, item in _text_keys(raw, path, faults):
        if key not in fields:
            hint = _suggestion(key[:60], fields)
            faults.problems.append(f"{path}.{_cut(key)}: unknown key; expected one of {known}{hint}")
        elif (mended := _mend(fields[key].type, item, f"{path}.{key}", faults)) is not _Lost:
            out[key] = mended
    for key, wanted in fields.items():
        if wanted.required and key not in raw:
            words = field_words(kind).get(wanted.name, "")
            meant = f" ({words})" if words else ""
            faults.problems.append(f"{path}.{key}: missing; expected {_type_name(wanted.type)}{meant}")
        if wanted.required and key not in out:
            faults.names_lost = True
            out[key] = "unreadable" + re.sub(r"\W+", "-", path) if wanted.type is str else 1
    return out


def _suggestion(key: str, fields: dict[str, msgspec.structs.FieldInfo]) -> str:
    """Return a hint at the key that a wrong one may mean: here, or in the lists below."""
    if meant := did_you_mean(key, fields):
        return meant
    for name, wanted in fields.items():
        below = get_args(wanted.type)
        is_list = get_origin(wanted.type) is list and isinstance(below[0], type)
        if is_list and issubclass(below[0], msgspec.Struct) and key in _fields(below[0]):
            return f"; it belongs into an item of {name}"
    return ""


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {f.encode_name: f for f in msgspec.structs.fields(kind)}


@cache
def field_words(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment behind, or right above, each field of a schema; "" for none."""
    out = {f.name: "" for f in msgspec.structs.fields(kind)}
    above = ""
    own = [base for base in kind.__mro__ if issubclass(base, msgspec.Struct) and base.__struct_fields__]
    for line in (
        line for base in own for line in _class_lines(inspect.getmodule(base)).get(base.__name__, [])
    ):
        field_, _, behind = line.strip().partition("  # ")
        name = field_.partition(":")[0]
        if line.startswith("    # "):
            above = f"{above} {line[6:]}".strip()
            continue
        if name in out and ": " in field_ and not out[name]:
            out[name] = behind or above
        above = ""
    return out


@cache
def _class_lines(module: ModuleType | None) -> dict[str, list[str]]:
    """Return the lines of each class of a module; `inspect.getsource` of a class parses it each time."""
    text = inspect.getsource(module) if module is not None else ""
    classes = [part for part in ast.parse(text).body if isinstance(part, ast.ClassDef)]
    return {part.name: text.splitlines()[part.lineno - 1 : part.end_lineno] for part in classes}


def _text_keys(raw: dict[Any, Any], path: str, faults: Faults) -> list[tuple[str, Any]]:
    """YAML allows keys that are not text (`on:` is a truth value, `1:` a number); we do not."""
    for key in raw:
        if not isinstance(key, str):
            kind = type(key).__name__
            faults.problems.append(
                f"{path}: the key {short(key)} is read as {kind}; expected text, so quote it"
            )
    return [(k, x) for k, x in raw.items() if isinstance(k, str)]


def _hint(kind: Any, raw: Any) -> str:
    """Return a hint for values that YAML reads differently from a person."""
    kinds = getattr(kind, "__args__", (kind,))
    is_list = getattr(kind, "__origin__", None) is list
    if isinstance(raw, str) and (float in kinds or int in kinds):
        return _number_hint(raw.strip())
    if is_list and isinstance(raw, dict):
        return "; begin each item with `- `, also a single one"
    if is_list and isinstance(raw, str):
        return f"; write [{short(raw)}], also for a single one"
    if _choices(kind) and isinstance(raw, bool):
        return "; YAML reads off and no as False, on and yes as True: quote the word"
    if str in kinds and isinstance(raw, bool | int | float | date):
        return f"; YAML reads this as {type(raw).__name__}, so quote it"
    if isinstance(raw, bool) and any(isinstance(k, type) and issubclass(k, msgspec.Struct) for k in kinds):
        return "; write null to go without it" if type(None) in kinds and not raw else "; {} has all defaults"
    return ""


def _number_hint(text: str) -> str:
    """Say how to write what stands as text in place of a number."""
    try:
        value = float(text)
    except ValueError:
        if re.fullmatch(r"-?[0-9]+,[0-9]+", text):
            return f"; write {text.replace(',', '.')}"
        number = _WITH_UNIT.fullmatch(text)
        return f"; write the number alone, {number[1]}: the key's name says its unit" if number else ""
    if text.isdigit():
        return f"; YAML reads this as text: write {int(text[:20])}"
    return f"; YAML reads this as text, write {value:.1f} or {value:.6e}"


def _type_name(kind: Any) -> str:
    return _in_words(str(getattr(kind, "__name__", kind)))


def short(raw: Any) -> str:
    """Return a value as a message quotes it: at most 60 characters, with bounded work."""
    try:
        text = _REPR.repr(raw)
    except (ValueError, RecursionError):  # Python writes no integer of more than 4300 digits
        text = f"<{type(raw).__name__}>"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def first_problems(problems: list[str], file: str) -> list[str]:
    """Return the problems of one file for a report: each once, the first `MAX_PROBLEMS`, then a count."""
    unique = list(dict.fromkeys(problems))
    rest = len(unique) - MAX_PROBLEMS
    return unique if rest <= 0 else [*unique[:MAX_PROBLEMS], f"{file}: $: and {rest} more"]


def salvage(cls: type[T], raw: Any) -> tuple[T | None, Faults]:
    """Return (`raw` as `cls` without its faulty parts, the faults), so that one report covers both."""
    faults = Faults()
    mended = _mend(cls, raw, "$", faults)
    if mended is _Lost:
        return None, faults
    return msgspec.convert(mended, cls), faults


def convert(cls: type[T], raw: Any, file: str) -> T:
    """Return `raw` (a parsed YAML tree) as `cls`; raises ConfigError with every fault, each `file: $.path:
    ...`."""
    faults = Faults()
    _mend(cls, raw, "$", faults)
    if faults.problems:
        raise ConfigError(first_problems([f"{file}: {p}" for p in faults.problems], file))
    return msgspec.convert(raw, cls)
