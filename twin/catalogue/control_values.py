"""Values of controls for display: the name of a state, an instant, or a number with its unit."""

from __future__ import annotations

from typing import Any

from twin.catalogue.instants import NS
from twin.catalogue.signals import find_control
from twin.catalogue.text import duration, number, quantity, utc

# Controls whose value is an instant, s since 1970 UTC
INSTANTS = frozenset({"job.checkpoint_since_s", "node.burn_in_since_s"})
DIGITS = 4
# By table, or by control where its entities are called otherwise than their table
_NOUNS = {
    "gpu": ("GPU", "GPUs"),
    "cdu": ("CDU", "CDUs"),
    "switch": ("switch", "switches"),
    "psu": ("power supply", "power supplies"),
    "dpu": ("DPU", "DPUs"),
    "nvlink": ("NVLink", "NVLinks"),
    "rack.hall_budget_w": ("hall", "halls"),
}


def control_value(value: Any, control: str) -> str:
    """A value of a control, or a range {min, max}, with its unit, as a state or as an instant."""
    spec = find_control(control)
    if isinstance(value, dict):
        ends = (control_value(value["min"], control), control_value(value["max"], control))
        return " to ".join(dict.fromkeys(ends))
    if not isinstance(value, int | float):
        return "any" if value is None else str(value)
    if spec is not None and spec.states and 0 <= value < len(spec.states):
        return spec.states[int(value)]
    if control in INSTANTS:
        return f"{utc(round(value) * NS)} UTC"
    if spec is None or spec.unit == "state":
        return number(value, DIGITS)
    return duration(value) if spec.unit == "s" else quantity(value, spec.unit, DIGITS)


def counted(control: str, count: int) -> str:
    """Entities of a control or table in words: "1 GPU", "72 GPUs"; the number alone of neither."""
    return f"{count:,} {table_noun(control, count)}" if control else f"{count:,}"


def table_noun(key: str, count: int = 1) -> str:
    """The noun of a table, of a part, or of a control's entities: "GPU", "power supplies", "halls"."""
    table = key.partition(".")[0]
    one, many = _NOUNS.get(key) or _NOUNS.get(table, (table, f"{table}s"))
    return one if count == 1 else many
