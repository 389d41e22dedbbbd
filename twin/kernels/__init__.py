"""Kernels: the inner loops of a tick, compiled if a compiler was available, else in NumPy.

Both give the same bytes (`plain` is the definition, `native.c` the compiled form), so a run that was recorded
with one can be replayed with the other. `RACKTWIN_KERNELS=0` selects NumPy.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.kernels.plain import (
    add_deviations,
    beyond,
    compare_linear,
    compare_readbacks,
    count_faults,
    count_up,
    doubt_moves,
    enters,
    expect_clock,
    expect_power,
    falls,
    far_off,
    fill_nan,
    find_places,
    first_arrival,
    fit_sigma,
    follow_heat,
    follow_steps,
    hold_power,
    joint,
    keep_newest,
    latch,
    latch_counts,
    learn_cadence,
    learn_fit,
    learn_noise,
    limit_moves,
    move_lags,
    narrow,
    power_at_level,
    quantise,
    read_answers,
    read_faults,
    stage_block,
    teach_linear,
    unaccounted,
    watch_gauges,
)

__all__ = [
    "COMPILED",
    "add_deviations",
    "beyond",
    "compare_linear",
    "compare_readbacks",
    "count_faults",
    "count_up",
    "doubt_moves",
    "enters",
    "expect_clock",
    "expect_power",
    "falls",
    "far_off",
    "fill_nan",
    "find_places",
    "first_arrival",
    "fit_sigma",
    "follow_heat",
    "follow_steps",
    "hold_power",
    "joint",
    "keep_newest",
    "latch",
    "latch_counts",
    "learn_cadence",
    "learn_fit",
    "learn_noise",
    "limit_moves",
    "move_lags",
    "narrow",
    "power_at_level",
    "quantise",
    "read_answers",
    "read_faults",
    "stage_block",
    "teach_linear",
    "unaccounted",
    "watch_gauges",
]


def native() -> Any:
    """Return the compiled module; None where there is none, or only one of another source."""
    try:
        module = importlib.import_module("twin.kernels._native")
        source = Path(__file__).with_name("native.c").read_bytes()
    except (ImportError, OSError):
        return None
    return module if hashlib.blake2b(source, digest_size=16).hexdigest() == module.SOURCE else None


_asked = os.environ.get("RACKTWIN_KERNELS", "1") != "0"
_native = native() if _asked else None
COMPILED = _native is not None
if not TYPE_CHECKING and _native is not None:
    globals().update({name: getattr(_native, name) for name in __all__ if name != "COMPILED"})
