"""What `sinfo` says of nodes, as levels; what is not known stays unknown."""

from __future__ import annotations

import pytest

from connectors.slurm_nodes import parse_levels


@pytest.mark.parametrize(
    "state, level",
    [
        ("idle", 0.0),
        ("allocated", 0.0),
        ("mixed-", 0.0),
        ("idle~", 0.0),
        ("MIXED", 0.0),
        ("maint", 1.0),
        ("draining", 2.0),
        ("draining@", 2.0),
        ("drained", 3.0),
        ("drained*", None),
        ("idle*", None),
        ("down", None),
        ("down*", None),
        ("fail", None),
        ("unknown", None),
        ("something new", None),
    ],
)
def test_states(state: str, level: float | None) -> None:
    assert parse_levels(f"gpu1|{state}\n") == {"gpu1": level}


def test_garbage_is_passed_over() -> None:
    text = "\n|idle\ngpu1|\nno bar\ngpu2|idle\ngpu2|drained\n" + "x" * 300 + "|idle\n"
    assert parse_levels(text) == {"gpu2": 3.0}
