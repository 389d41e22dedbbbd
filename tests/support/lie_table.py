"""The table of lies: `python -m tests.support.lie_table [PATTERN] > tests/sim/lie_table.csv` lives through all cells
whose key has the pattern.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.lie_cells import Cell, time_cells, value_cells
from tests.support.lie_run import Row, learned, moves, row_of

PATH = Path(__file__).parents[1] / "sim" / "lie_table.csv"
HEADS = tuple(f.name for f in dataclasses.fields(Row))
PAIRS, PAIRS_SEED = 40, 5


def cells() -> list[tuple[Cell, ...]]:
    """All cells, and a sample of pairs of single wires that lie."""
    values = value_cells([key for key in learned().measured if moves(key)])
    single = [cell for cell in values if cell.extent == "one" and not cell.signal.endswith("*")]
    rng = np.random.default_rng(PAIRS_SEED)
    pairs = [tuple(single[i] for i in rng.choice(len(single), 2, replace=False)) for _ in range(PAIRS)]
    return [*((cell,) for cell in (*time_cells(), *values)), *pairs]


def committed() -> dict[str, dict[str, str]]:
    """Rows of the committed table by their cells."""
    with PATH.open(newline="") as file:
        return {row["cells"]: row for row in csv.DictReader(file)}


def _rows(pattern: str) -> Iterator[dict[str, Any]]:
    for some in cells():
        if re.search(pattern, " + ".join(cell.key for cell in some)):
            yield dataclasses.asdict(row_of(*some))


def main() -> None:
    """Write the rows as they come."""
    out = csv.DictWriter(sys.stdout, HEADS, lineterminator="\n")
    out.writeheader()
    for row in _rows(sys.argv[1] if len(sys.argv) > 1 else ""):
        out.writerow({k: "" if v is None else v for k, v in row.items()})
        sys.stdout.flush()


if __name__ == "__main__":
    main()
