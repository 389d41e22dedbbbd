"""Series as files, read back: what tests of the series reader share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from models.load import SeriesPanel
from twin.tables import SeriesOptions, read_series
from twin.tables.panel_file import SeriesRead


def written(folder: Path, text: str | bytes, name: str = "s.csv") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read_of(folder: Path, text: str | bytes, *columns: str, **more: Any) -> SeriesRead:
    return read_series([written(folder, text)], "t", columns or ("v",), SeriesOptions(**more))


def hours_from(n: int, start: str = "2023-11-14 22:00") -> list[str]:
    first = datetime.fromisoformat(start)
    return [f"{first + timedelta(hours=i)}" for i in range(n)]


def table_of(times: Sequence[object], values: Sequence[object], separator: str = ",") -> str:
    rows = [f"{t}{separator}{v}" for t, v in zip(times, values, strict=True)]
    return "\n".join([f"t{separator}v", *rows]) + "\n"


def same_panels(one: SeriesPanel, other: SeriesPanel) -> None:
    assert (one.start_ns, one.step_s, one.names) == (other.start_ns, other.step_s, other.names)
    np.testing.assert_array_equal(one.values, other.values)


def values_of(read: SeriesRead) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in read.panel.values[:, 0]]


def told_of(read: SeriesRead, *words: str) -> None:
    assert any(all(w in n for w in words) for n in read.notes), read.notes
