"""Outlooks from files: future values of a series as the body of a request to the daemon."""

from __future__ import annotations

from typing import Any

from connectors.files import instant_text
from twin.catalogue import NS, ConfigError
from twin.tables.panel_file import SeriesRead

MAX_VALUES = 2000  # of one outlook; `twin.engine.outlook` has the same, but takes long to load


def outlook_of(read: SeriesRead, now_ns: int, file: str) -> tuple[dict[str, Any], list[str]]:
    """(start, step and values from the one in force at `now_ns` on, what people should know of the file)."""
    panel, warnings = read.panel, list(read.notes)
    step_ns = round(panel.step_s * NS)
    first = max(0, (now_ns - panel.start_ns) // step_ns)
    if first >= panel.n_time:
        end = instant_text(panel.start_ns + panel.n_time * step_ns)
        raise ConfigError(f"{file}: the last value was over at {end}; expected values to come")
    values = [None if v != v else v for v in panel.values[first:, 0].tolist()]
    if not any(v is not None for v in values):
        raise ConfigError(f"{file}: no value to come is known")
    if len(values) > MAX_VALUES:
        warnings.append(f"{len(values)} values are to come; sent are the first {MAX_VALUES}")
    start_ns = panel.start_ns + first * step_ns
    return {"start_ns": start_ns, "step_s": panel.step_s, "values": values[:MAX_VALUES]}, warnings
