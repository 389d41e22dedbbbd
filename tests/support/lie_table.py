"""The table of lies: `python -m tests.support.lie_table [PATTERN]` lives through all cells whose key has the
pattern, and writes their rows into `tests/sim/lie_table.csv`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from tests.support.lie_cells import Cell, time_cells, value_cells
from tests.support.lie_run import Row, learned, moves, row_of

PATH = Path(__file__).parents[1] / "sim" / "lie_table.csv"
PAIRS, PAIRS_SEED = 40, 5


@cache
def cells() -> dict[str, tuple[Cell, ...]]:
    """All cells, and a sample of pairs of single wires that lie, by their key."""
    values = value_cells([key for key in learned().measured if moves(key)])
    single = [cell for cell in values if cell.extent == "one" and not cell.signal.endswith("*")]
    rng = np.random.default_rng(PAIRS_SEED)
    pairs = [tuple(single[i] for i in rng.choice(len(single), 2, replace=False)) for _ in range(PAIRS)]
    every = [*((cell,) for cell in (*time_cells(), *values)), *pairs]
    return {" + ".join(cell.key for cell in some): some for some in every}


def committed() -> dict[str, Row]:
    """Rows of the committed table by their cells."""
    with PATH.open(newline="") as file:
        return {row["cells"]: _row(row) for row in csv.DictReader(file)}


def _row(cells_of: dict[str, str]) -> Row:
    def value(name: str) -> object:
        text = cells_of[name]
        if name in ("cells", "others", "named_by"):
            return text
        return float(text) if "." in text else int(text) if text else None

    return Row(*(value(name) for name in Row._fields))  # type: ignore[arg-type]


def write(rows: Sequence[Row]) -> None:
    """Write the table."""
    with PATH.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(Row._fields)
        for row in rows:
            out.writerow(row)


def main() -> None:
    """Live through cells, and write the table after each."""
    pattern = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    known = committed() if PATH.exists() else {}
    for key, some in cells().items():
        if pattern.search(key):
            known[key] = row_of(*some)
            write([known[at] for at in cells() if at in known])
            sys.stdout.write(f"{known[key]}\n")


if __name__ == "__main__":
    main()
