"""Values of controls as people read them: a name of a state, an instant, or a number with its unit."""

from __future__ import annotations

from typing import Any

from twin.catalogue.instants import NS
from twin.catalogue.signals import find_control
from twin.catalogue.text import utc

INSTANTS = frozenset({"job.checkpoint_since_s"})  # controls whose value is an instant, s since 1970 UTC


def control_value(value: Any, control: str) -> str:
    """A value of a control, or a range {min, max}, with its unit, as a state or as an instant."""
    spec = find_control(control)
    if isinstance(value, dict):
        return f"{control_value(value['min'], control)} to {control_value(value['max'], control)}"
    if not isinstance(value, int | float):
        return "any" if value is None else str(value)
    if spec is not None and spec.states and 0 <= value < len(spec.states):
        return spec.states[int(value)]
    if control in INSTANTS:
        return f"{utc(round(value) * NS)} UTC"
    unit = f" {spec.unit}" if spec is not None and spec.unit not in ("state", "1") else ""
    return f"{value:g}{unit}"
