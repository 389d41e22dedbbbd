"""The shipped supernode profiles, and how a faulty one is refused. May import `twin`, `yaml` and pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from twin.catalogue import ConfigError, find_control, find_signal, unit_of
from twin.site import Profile, parse_profile
from twin.site.profile import ESTIMATE, Sourced

FOLDER = Path(__file__).resolve().parents[2] / "twin" / "profiles"
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = [f.stem for f in FILES]
GPUS = {
    "air-8gpu": 8,
    "cloudmatrix384": 384,
    "dgx-superpod-gb200-su": 576,
    "dgx-superpod-h100-su": 256,
    "edge-5kw": 4,
    "gb200-nvl72": 72,
    "gb300-nvl72": 72,
    "hgx-h100": 8,
    "trainium2-ultraserver": 64,
}
CORE_POWER = ("gpu_min_w", "gpu_max_w", "gpu_idle_w", "cpu_max_w", "cpu_idle_w", "node_idle_w", "node_max_w",
              "rack_overhead_w", "rack_max_w")  # fmt: skip
OVERSUBSCRIPTION = 1.3


def raw_of(name: str) -> dict[str, Any]:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return tree


def profile_of(name: str) -> Profile:
    return parse_profile(raw_of(name), f"{name}.yaml")


def number(profile: Profile, name: str) -> float:
    value = profile.get(name)
    assert value is not None, f"{profile.name} does not state {name}"
    return value


def numbers(node: Any, path: str = "$") -> Iterator[tuple[str, Sourced]]:
    if isinstance(node, Sourced):
        yield path, node
    elif isinstance(node, msgspec.Struct):
        for field in node.__struct_fields__:
            yield from numbers(getattr(node, field), f"{path}.{field}")
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from numbers(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from numbers(value, f"{path}[{i}]")


def problems_of(raw: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_profile(raw, "bad.yaml")
    return caught.value.problems


def test_the_expected_profiles_are_shipped() -> None:
    assert set(NAMES) == set(GPUS)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_every_estimate_a_reason(name: str) -> None:
    profile = profile_of(name)
    assert profile.name == name
    found = list(numbers(profile))
    assert len(found) > 30
    for path, n in found:
        assert n.source.strip(), path
        assert not n.source.startswith("/"), path
        if n.source == ESTIMATE:
            assert n.note, f"{name} {path}: an estimate needs its reasoning"


@pytest.mark.parametrize("name", NAMES)
def test_counts_add_up(name: str) -> None:
    profile = profile_of(name)
    assert profile.gpus == GPUS[name]
    assert profile.nodes_per_rack * profile.layout.compute_racks.value == profile.nodes


@pytest.mark.parametrize("name", NAMES)
def test_envelopes_and_limits_lie_inside_the_catalogue(name: str) -> None:
    profile = profile_of(name)
    for key, envelope in profile.controls.items():
        control = find_control(key)
        assert control is not None
        levels = [control.low, envelope.min.value, envelope.safe.value, envelope.max.value, control.high]
        assert levels == sorted(levels), key
    for key, limit in profile.limits.items():
        signal = find_signal(key)
        assert signal is not None
        assert signal.low <= limit.max.value <= signal.high, key
    assert all(unit_of(n) for n in (*profile.power, *profile.thermal, *profile.perf))


@pytest.mark.parametrize("name", NAMES)
def test_power_of_parts_fits_the_whole(name: str) -> None:
    p = profile_of(name)
    for wanted in CORE_POWER:
        number(p, wanted)
    chips = p.gpus_per_node * number(p, "gpu_max_w") + p.cpus_per_node * number(p, "cpu_max_w")
    assert 0.55 <= chips / number(p, "node_max_w") <= 1.0
    idle = p.gpus_per_node * number(p, "gpu_idle_w") + p.cpus_per_node * number(p, "cpu_idle_w")
    assert idle <= number(p, "node_idle_w") < number(p, "node_max_w")
    rack = p.nodes_per_rack * number(p, "node_max_w") + number(p, "rack_overhead_w")
    assert 0.85 <= rack / number(p, "rack_max_w") <= 1.01
    whole = p.get("supernode_max_w")
    if whole is not None:
        compute = p.layout.compute_racks.value
        switching = (p.layout.racks.value - compute) * (p.get("switch_rack_max_w") or 0.0)
        assert 0.85 <= (compute * number(p, "rack_max_w") + switching) / whole <= 1.01


@pytest.mark.parametrize("name", NAMES)
def test_safe_caps_hold_an_oversubscribed_row(name: str) -> None:
    p = profile_of(name)
    shed = p.gpus_per_node * (number(p, "gpu_max_w") - p.controls["gpu.power_cap_w"].safe.value)
    rack = p.nodes_per_rack * (number(p, "node_max_w") - shed) + number(p, "rack_overhead_w")
    assert rack <= number(p, "rack_max_w") / OVERSUBSCRIPTION + 1e-6
    assert p.controls["gpu.power_cap_w"].safe.value > number(p, "gpu_idle_w")


@pytest.mark.parametrize("name", NAMES)
def test_full_load_at_the_warmest_supply_stays_below_the_guard(name: str) -> None:
    p = profile_of(name)
    warmest = number(p, "supply_temp_max_c" if p.has_liquid else "inlet_temp_max_c")
    assert warmest + number(p, "gpu_rise_k") < p.limits["gpu.temp_c"].guard.value
    if p.has_liquid:
        heat_kw = number(p, "liquid_fraction_pu") * number(p, "rack_max_w") / 1e3
        rise_k = 15.0 * heat_kw / number(p, "rack_flow_nominal_lpm")
        assert warmest + rise_k <= p.limits["rack.return_temp_c"].guard.value
        assert p.limits["rack.flow_lpm"].max.value < number(p, "rack_flow_nominal_lpm") / 2


def edit(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(raw: dict[str, Any]) -> None:
        *way, last = path.split("/")
        for step in way:
            raw = raw[step]
        raw[last] = value

    return apply


def remove(path: str) -> Callable[[dict[str, Any]], None]:
    def apply(raw: dict[str, Any]) -> None:
        *way, last = path.split("/")
        for step in way:
            raw = raw[step]
        del raw[last]

    return apply


SOURCED = {"value": 1.0, "source": ESTIMATE}
LIMIT = {"guard": SOURCED, "max": SOURCED}
ENVELOPE = {"min": SOURCED, "max": SOURCED, "safe": SOURCED}
FAST = {"value": 9, "source": ESTIMATE}
FAULTS = [
    (edit("layout/nodes/value", 17.5), "$.layout.nodes.value: expected an integer"),
    (edit("layout/compute_racks/value", 0), "$.layout.compute_racks.value: expected an integer >= 1"),
    (edit("layout/compute_racks/value", 2), "$.layout.compute_racks.value: expected at most"),
    (edit("layout/gpus_per_node/value", float("nan")), "$.layout.gpus_per_node.value: expected an integer"),
    (edit("power/node_max_w/source", " "), "$.power.node_max_w.source: expected"),
    (remove("power/node_max_w/source"), "$.power.node_max_w.source: missing"),
    (edit("power/gpu_max", SOURCED), "$.power.gpu_max: expected a name with a unit suffix"),
    (edit("power/gpu_min_w/value", 1300), "$.power.gpu_min_w.value: expected <= gpu_max_w"),
    (edit("power/psu_count/value", 1.5), "$.power.psu_count.value: expected an integer"),
    (
        edit("thermal/liquid_fraction_pu/value", 87),
        "$.thermal.liquid_fraction_pu.value: expected a number from",
    ),
    (edit("limits/gpu.heat_c", LIMIT), "$.limits.gpu.heat_c: expected a signal"),
    (edit("limits/gpu.util_pu", LIMIT), "$.limits.gpu.util_pu: expected a signal"),
    (edit("limits/gpu.temp_c/guard/value", 90), "$.limits.gpu.temp_c.guard.value: expected a value below"),
    (edit("limits/rack.flow_lpm/guard/value", 20), "$.limits.rack.flow_lpm.guard.value: expected a value"),
    (edit("limits/gpu.temp_c/slew_per_s", FAST), "$.limits.gpu.temp_c.slew_per_s.value"),
    (remove("limits/gpu.temp_c"), "$.limits.gpu.temp_c: missing"),
    (remove("limits/rack.return_temp_c"), "$.limits.rack.return_temp_c: missing"),
    (remove("controls/gpu.power_cap_w"), "$.controls.gpu.power_cap_w: missing"),
    (edit("controls/gpu.cap_w", ENVELOPE), "$.controls.gpu.cap_w: expected"),
    (
        edit("controls/gpu.power_cap_w/min/value", 1300),
        "$.controls.gpu.power_cap_w.min.value: expected at most",
    ),
    (edit("controls/gpu.power_cap_w/safe/value", 100), "$.controls.gpu.power_cap_w.safe.value: expected"),
    (
        edit("controls/gpu.power_cap_w/max/value", 1201),
        "$.controls.gpu.power_cap_w.max.value: expected at most",
    ),
    (edit("controls/gpu.power_cap_w/max/value", 4000), "$.controls.gpu.power_cap_w.max.value: expected a"),
    (edit("cooling", "oil"), "$.cooling: expected one of"),
    (edit("colour", "green"), "$.colour: unknown key"),
    (edit("name", ""), "$.name: expected"),
    (remove("title"), "$.title: missing"),
]


@pytest.mark.parametrize(("break_it", "expected"), FAULTS, ids=[e for _, e in FAULTS])
def test_a_fault_is_named_where_it_is(break_it: Callable[[dict[str, Any]], None], expected: str) -> None:
    raw = raw_of("gb200-nvl72")
    break_it(raw)
    problems = problems_of(raw)
    assert any(p.startswith(f"bad.yaml: {expected}") for p in problems), problems
    assert len(problems) <= 2  # a cap beyond the catalogue is beyond the GPU's rating too


def test_faults_of_form_and_of_meaning_are_reported_together() -> None:
    raw = raw_of("gb200-nvl72")
    for break_it in (
        edit("layout/nodes/value", 17.5),
        edit("power/node_max_w/source", ""),
        edit("limits/gpu.temp_c/guard/value", 90),
        edit("controls/gpu.power_cap_w/safe/value", 100),
    ):
        break_it(raw)
    problems = problems_of(raw)
    assert len(problems) == 4, problems
    assert all(p.startswith("bad.yaml: $.") for p in problems)


@pytest.mark.parametrize("raw", [None, [], "text", {}, {"limits": {5: {}}}])
def test_what_is_no_profile_is_refused(raw: object) -> None:
    assert all(p.startswith("bad.yaml: $") for p in problems_of(raw))


def test_a_key_that_is_no_text_is_refused_as_configuration() -> None:
    raw = raw_of("hgx-h100")
    raw["power"][5] = SOURCED
    assert problems_of(raw)


def test_an_air_cooled_profile_needs_no_limits_of_liquid() -> None:
    assert "rack.flow_lpm" not in profile_of("hgx-h100").limits
    assert not profile_of("hgx-h100").has_liquid
    assert profile_of("gb200-nvl72").has_liquid
