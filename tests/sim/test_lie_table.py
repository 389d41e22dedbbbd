"""The table of lies: `lie_table.csv` says what each lie did to a simulated site whose policies act. A cell
may get worse only by decision: by writing its row anew.

Better is always fine. Worse is more than these tolerances, which leave room for other processors' rounding.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lie_run import Row, row_of
from tests.support.lie_table import cells, committed

pytestmark = pytest.mark.slow
COMMANDS, LOST_PCT, OWN_LOST_PCT, DISPLACED_S, HOTTER_K, NAMED_S = 72, 0.2, 2.0, 5, 0.3, 4
SAMPLED, SAMPLE_SEED = 2, 2026
# Single wires that nobody contradicts, and what they cost the others; each is a gap, not a goal
MOST_LOST_PCT, MOST_HOTTER_K = 1.0, 1.0
GAPS: tuple[str, ...] = ()


def worse(now: Row, before: Row) -> list[str]:
    """Columns in which a row is worse than it was."""
    out = []
    for name, most in (
        ("commands", COMMANDS),
        ("lost_pct", LOST_PCT),
        ("own_lost_pct", OWN_LOST_PCT),
        ("displaced_s", DISPLACED_S),
        ("own_displaced_s", DISPLACED_S),
        ("hotter_k", HOTTER_K),
        ("tripped", 0),
        ("off", 0),
        ("wrong_alarms", 0),
    ):
        if getattr(now, name) > getattr(before, name) + most:
            out.append(name)
    named_s, was_s = (np.inf if row.named_s is None else row.named_s for row in (now, before))
    return [*out, "named_s"] if named_s > was_s + NAMED_S else out


def test_worse_is_told_from_better() -> None:
    row = Row("rack.power_w x10 one", 0, "", 0.1, 0.1, 0, 0, 0, 0, 0.0, 2, "doubt/rack.power_w", 0)
    assert worse(row, row) == []
    assert worse(row._replace(lost_pct=0.5, named_s=None), row) == ["lost_pct", "named_s"]
    assert worse(row._replace(lost_pct=-0.5, named_s=0), row) == []


def test_no_single_wire_costs_others_more_than_a_hundredth_or_trips_or_heats() -> None:
    single = [row for key, row in committed().items() if key.endswith(" one") and "+" not in key]
    assert len(single) > 100
    off = [
        row.cells
        for row in single
        if row.lost_pct > MOST_LOST_PCT or row.tripped or row.off or row.hotter_k > MOST_HOTTER_K
    ]
    assert off == list(GAPS)


@pytest.mark.long
def test_a_sample_of_cells_is_no_worse_than_its_rows() -> None:
    rows = committed()
    keys = [key for key in cells() if key in rows and not key.startswith("time")]
    for at in np.random.default_rng(SAMPLE_SEED).choice(len(keys), SAMPLED, replace=False):
        now = row_of(*cells()[keys[at]])
        assert worse(now, rows[keys[at]]) == [], now


@pytest.mark.evaluation
@pytest.mark.parametrize("of", range(20))
def test_no_cell_is_worse_than_its_row(of: int) -> None:
    rows = committed()
    found = {key: worse(row_of(*cells()[key]), row) for key, row in list(rows.items())[of::20]}
    assert {key: what for key, what in found.items() if what} == {}
