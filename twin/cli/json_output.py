"""JSON output: one object on one line of stdout, without NaN and infinity, which JSON does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console


def write_json(value: Any, out: Console) -> None:
    """Flushed, so that a reader who left is noticed while that can be dealt with."""
    out.file.write(msgspec.json.encode(plain(value)).decode() + "\n")
    out.file.flush()


def plain(value: Any) -> Any:
    """The same with null in place of NaN and infinity."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
