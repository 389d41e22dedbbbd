"""Contents of the state file, read strictly: a damaged or edited file gives an error here.

Taken over as it is, it would fail at some later moment, with every start anew, and no lease would end.
Imports the agent's clock.
"""

from __future__ import annotations

import math
from typing import Any

from racktwin_agent.clock import Deadline, Instant

_BELOW = 2**63


def whole(value: Any) -> int:
    """A whole number >= 0. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _BELOW:
        raise ValueError(f"{str(value)[:60]!r} is no whole number")
    return value


def number(value: Any) -> float:
    """A number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e15 < value < 1e15:
        raise ValueError(f"{str(value)[:60]!r} is no number")
    return float(value)


def seconds(value: Any) -> float:
    """A duration. Raises ValueError."""
    found = number(value)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{found:g} s is no duration")
    return found


def text(value: Any) -> str:
    """A text. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:60]!r} is no text")
    return value


def table(value: Any) -> dict[str, float]:
    """Numbers by name. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:60]!r} is no table")
    return {text(k): number(v) for k, v in value.items()}


def deadline(value: Any, at: Instant, same_boot: bool, longest_ns: int) -> Deadline:
    """Read a deadline, at most its longest span from now. Raises ValueError or TypeError."""
    boot_ns, wall_ns, span_ns = (whole(x) for x in value)
    found = Deadline(boot_ns, wall_ns, min(span_ns, longest_ns))
    if not same_boot or boot_ns > at.boot_ns + longest_ns:
        return found.rebooted(at)
    return found
