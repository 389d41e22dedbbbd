"""Profile of a supernode: its schema, and every fault that one can have. Pure: the shell reads the
YAML, one file per supernode in `twin/profiles/`.

Every number stands beside its source; `source: estimate` is honest and allowed, silence is not. Counts and
powers are of one supernode, one rack or one GPU, as their names say; the unit is the suffix of the name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from twin.catalogue import ConfigError, find_control, find_signal, unit_of
from twin.site.file import convert

ESTIMATE = "estimate"
REQUIRED_CONTROLS = ("gpu.power_cap_w",)
REQUIRED_LIMITS = ("gpu.temp_c",)
REQUIRED_LIQUID_LIMITS = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm")

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Sourced(_Strict, frozen=True):
    """A number with its source; `note` gives the reasoning, above all for an estimate."""

    value: float
    source: _Text
    note: str | None = None


class ProfileLayout(_Strict, frozen=True):
    """Contents of one supernode. `compute_racks` hold the nodes, in equal shares; other racks only switch.

    `switches` counts the chips of the scale-up fabric; it is 0 where accelerators are wired directly.
    `scale_up_domains` is how many fabrics of its own kind it has, with equal shares of nodes and chips; one
    where it is not stated.
    """

    racks: Sourced
    compute_racks: Sourced
    nodes: Sourced
    gpus_per_node: Sourced
    cpus_per_node: Sourced
    switches: Sourced
    scale_up_domains: Sourced | None = None


class ProfileLimit(_Strict, frozen=True):
    """Level at which protection starts to act (`guard`) and the hard operating limit (`max`) of a signal.

    `max` lies on the dangerous side: for a signal whose danger is "low" it is the least value, below `guard`.
    `slew_per_s` is how fast an unreported value may drift; it may only be slower than the catalogue's.
    """

    guard: Sourced
    max: Sourced
    slew_per_s: Sourced | None = None


class ControlEnvelope(_Strict, frozen=True):
    """Range that the hardware allows for a control; `safe` is the level that remains without the daemon."""

    min: Sourced
    max: Sourced
    safe: Sourced
    slew_per_s: Sourced | None = None
    deadband: Sourced | None = None


class ProfilePlane(_Strict, frozen=True):
    """A network plane: links per compute node and the rate of one link in one direction."""

    name: str
    kind: Literal["scale_up", "scale_out", "frontend", "storage"]
    links_per_node: Sourced
    rate_bytes_per_s: Sourced


class Profile(_Strict, frozen=True):
    """A kind of supernode. `hybrid` cooling takes most heat in liquid and a share worth counting in air.

    `rack_` powers are of a compute rack, `gpu_rise_k` is over supply or inlet at `gpu_max_w`, `gpu_tau_s`
    is the time constant of that rise, and a `peak_` of `perf` is of the whole supernode.
    """

    name: _Text
    title: _Text
    vendor: _Text
    cooling: Literal["liquid", "air", "hybrid"]
    layout: ProfileLayout
    power: dict[str, Sourced]
    thermal: dict[str, Sourced]
    limits: dict[str, ProfileLimit]
    controls: dict[str, ControlEnvelope]
    planes: list[ProfilePlane] = []
    perf: dict[str, Sourced] = {}

    @property
    def has_liquid(self) -> bool:
        return self.cooling != "air"

    @property
    def nodes(self) -> int:
        return int(self.layout.nodes.value)

    @property
    def nodes_per_rack(self) -> int:
        """Return the number of nodes in each compute rack."""
        return self.nodes // int(self.layout.compute_racks.value)

    @property
    def gpus_per_node(self) -> int:
        return int(self.layout.gpus_per_node.value)

    @property
    def cpus_per_node(self) -> int:
        return int(self.layout.cpus_per_node.value)

    @property
    def gpus(self) -> int:
        """Return the accelerators in the whole supernode."""
        return self.nodes * self.gpus_per_node

    def get(self, name: str) -> float | None:
        """Return the value `name` in `power`, `thermal` or `perf`; None if the profile has none."""
        for section in (self.power, self.thermal, self.perf):
            if name in section:
                return section[name].value
        return None


def _bad_number(
    at: str, number: Sourced, low: float, high: float = math.inf, *, whole: bool = False
) -> str | None:
    """Return the fault of `number` against a range, or None. NaN and infinities are always faults."""
    value = number.value
    if math.isfinite(value) and low <= value <= high and (not whole or value == int(value)):
        return None
    what = "an integer" if whole else "a number"
    span = f"from {low:g} to {high:g}" if math.isfinite(high) else f">= {low:g}"
    return f"{at}: expected {what} {span if math.isfinite(low) else 'that is finite'}, got {value:g}"


def _layout_faults(layout: ProfileLayout) -> Iterator[str]:
    sound = True
    for name in layout.__struct_fields__:
        at, number = f"$.layout.{name}.value", getattr(layout, name)
        if number is None:
            continue
        fault = _bad_number(at, number, 0 if name == "switches" else 1, whole=True)
        if fault:
            sound = False
            yield fault
    if not sound:
        return
    racks, compute, nodes = layout.racks.value, layout.compute_racks.value, layout.nodes.value
    if compute > racks:
        yield f"$.layout.compute_racks.value: expected at most the {racks:g} racks, got {compute:g}"
    elif nodes % compute:
        yield f"$.layout.nodes.value: expected a multiple of the {compute:g} compute_racks, got {nodes:g}"
    domains = layout.scale_up_domains
    if domains is not None and (nodes % domains.value or layout.switches.value % domains.value):
        yield (
            f"$.layout.scale_up_domains.value: expected a divisor of the {nodes:g} nodes and of the "
            f"{layout.switches.value:g} switches, got {domains.value:g}"
        )


def _quantity_faults(section: str, numbers: Mapping[str, Sourced]) -> Iterator[str]:
    for name, number in numbers.items():
        unit = unit_of(name)
        if unit is None:
            yield f"$.{section}.{name}: expected a name with a unit suffix such as _w, _c, _pu or _count"
            continue
        low = -math.inf if unit in ("degC", "K") else 0.0
        high = 1.0 if unit == "1" else math.inf
        fault = _bad_number(f"$.{section}.{name}.value", number, low, high, whole=unit == "count")
        if fault:
            yield fault
            continue
        partner = name.replace("_min_", "_max_")
        top = numbers.get(partner)
        if top is not None and number.value > top.value:
            yield f"$.{section}.{name}.value: expected <= {partner} = {top.value:g}, got {number.value:g}"


def _slew_fault(at: str, slew: Sourced | None, catalogue: float) -> str | None:
    """A profile may only slow what the catalogue declares; a catalogue slew of 0 declares nothing."""
    if slew is None:
        return None
    return _bad_number(f"{at}.slew_per_s.value", slew, 0.0, catalogue or math.inf)


def _limit_faults(limits: Mapping[str, ProfileLimit]) -> Iterator[str]:
    for key, limit in limits.items():
        at = f"$.limits.{key}"
        signal = find_signal(key)
        if signal is None:
            yield f"{at}: expected a signal of the catalogue, as in gpu.temp_c"
            continue
        if signal.danger not in ("high", "low"):
            yield f"{at}: expected a signal with one dangerous side, this one's danger is {signal.danger}"
            continue
        ends = (("guard", limit.guard), ("max", limit.max))
        faults = [_bad_number(f"{at}.{n}.value", s, signal.low, signal.high) for n, s in ends]
        guard, hard = limit.guard.value, limit.max.value
        if not any(faults) and (guard >= hard if signal.danger == "high" else guard <= hard):
            side = "below" if signal.danger == "high" else "above"
            faults.append(f"{at}.guard.value: expected a value {side} max = {hard:g}, got {guard:g}")
        faults.append(_slew_fault(at, limit.slew_per_s, signal.slew_per_s))
        yield from (f for f in faults if f)


def _control_faults(controls: Mapping[str, ControlEnvelope], power: Mapping[str, Sourced]) -> Iterator[str]:
    for key, envelope in controls.items():
        at = f"$.controls.{key}"
        control = find_control(key)
        if control is None:
            yield f"{at}: expected a control of the catalogue, as in gpu.power_cap_w"
            continue
        ends = (("min", envelope.min), ("max", envelope.max))
        faults = [_bad_number(f"{at}.{n}.value", s, control.low, control.high) for n, s in ends]
        low, high = envelope.min.value, envelope.max.value
        if not any(faults):
            if low > high:
                faults.append(f"{at}.min.value: expected at most max = {high:g}, got {low:g}")
            else:
                faults.append(_bad_number(f"{at}.safe.value", envelope.safe, low, high))
        faults.append(_slew_fault(at, envelope.slew_per_s, control.slew_per_s))
        if envelope.deadband is not None:
            faults.append(_bad_number(f"{at}.deadband.value", envelope.deadband, 0.0))
        rating = power.get("gpu_max_w")
        if key == "gpu.power_cap_w" and rating is not None and high > rating.value:
            faults.append(
                f"{at}.max.value: expected at most power.gpu_max_w = {rating.value:g}, got {high:g}"
            )
        yield from (f for f in faults if f)


def _plane_faults(planes: list[ProfilePlane]) -> Iterator[str]:
    seen: set[str] = set()
    for i, plane in enumerate(planes):
        at = f"$.planes[{i}]"
        if plane.name in seen:
            yield f"{at}.name: expected a name used once, got {plane.name!r} again"
        seen.add(plane.name)
        for fault in (
            _bad_number(f"{at}.links_per_node.value", plane.links_per_node, 1, whole=True),
            _bad_number(f"{at}.rate_bytes_per_s.value", plane.rate_bytes_per_s, 1),
        ):
            if fault:
                yield fault


def _absence_faults(raw: Mapping[str, Any]) -> Iterator[str]:
    """Judged on the raw tree, so that an entry that is there but malformed is not called missing as well."""
    limits = REQUIRED_LIMITS + (REQUIRED_LIQUID_LIMITS if raw.get("cooling") in ("liquid", "hybrid") else ())
    for section, keys in (("limits", limits), ("controls", REQUIRED_CONTROLS)):
        present = raw.get(section)
        if isinstance(present, dict):
            yield from (
                f"$.{section}.{k}: missing; expected in every such profile" for k in keys if k not in present
            )


def _as(kind: Any, raw: Any) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError:
        return None


def _salvage(raw: Any) -> dict[str, Any]:
    """Return the well-formed part of a tree, so that one report covers its meaning and its form."""
    raw = raw if isinstance(raw, dict) else {}
    sections: dict[str, Any] = {"layout": _as(ProfileLayout, raw.get("layout"))}
    kinds = {
        "power": Sourced,
        "thermal": Sourced,
        "perf": Sourced,
        "limits": ProfileLimit,
        "controls": ControlEnvelope,
    }
    for name, kind in kinds.items():
        entries = raw.get(name)
        pairs = [(k, _as(kind, v)) for k, v in entries.items()] if isinstance(entries, dict) else []
        sections[name] = {k: v for k, v in pairs if isinstance(k, str) and v is not None}
    sections["planes"] = _as(list[ProfilePlane], raw.get("planes")) or []
    return sections


def _meaning_faults(sections: Mapping[str, Any], raw: Any) -> Iterator[str]:
    if sections["layout"] is not None:
        yield from _layout_faults(sections["layout"])
    for section in ("power", "thermal", "perf"):
        yield from _quantity_faults(section, sections[section])
    yield from _limit_faults(sections["limits"])
    yield from _control_faults(sections["controls"], sections["power"])
    yield from _plane_faults(sections["planes"])
    if isinstance(raw, dict):
        yield from _absence_faults(raw)


def parse_profile(raw: object, file: str) -> Profile:
    """Return `raw` (a parsed YAML tree) as a Profile; ConfigError lists all faults as `file: $.path: ...`."""
    problems: list[str] = []
    profile: Profile | None = None
    try:
        profile = convert(Profile, raw, file)
    except ConfigError as error:
        problems.extend(error.problems)
    except msgspec.ValidationError as error:
        # `convert` does not look at the keys of a mapping, so one that is no text only shows here
        problems.append(f"{file}: $: expected a profile, {str(error).lower()}")
    problems.extend(f"{file}: {fault}" for fault in _meaning_faults(_salvage(raw), raw))
    if problems or profile is None:
        raise ConfigError(problems)
    return profile
