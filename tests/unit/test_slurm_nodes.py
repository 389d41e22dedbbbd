"""Nodes in the output of `sinfo`, as levels; an unknown state stays unknown."""

from __future__ import annotations

import pytest

from connectors.slurm.nodes import parse_nodes


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
    assert parse_nodes(f"gpu1|{state}||||none|\n")["gpu1"].level == level


@pytest.mark.parametrize(
    "line, owner",
    [
        ("idle|none", 0.0),
        ("mixed-|Node unexpectedly rebooted", 0.0),
        ("idle|racktwin:3:XID 79", 0.0),  # resumed by hand: what stays is words
        ("drained|racktwin:3:XID 79", 1.0),
        ("draining|racktwin:2:XID 79", 1.0),
        ("drained*|racktwin:4:XID 79", 1.0),
        ("drained|fan broke", 2.0),
        ("draining|none", 2.0),
        ("drained|fan broke, racktwin:3:XID 79", 2.0),
        ("drained|racktwin:9:XID 79", 2.0),
        ("maint|none", 2.0),
        ("drained*|fan broke", None),
        ("down|racktwin:3:XID 79", None),
        ("idle*|none", None),
        ("unknown|none", None),
    ],
)
def test_who_took_a_node_out(line: str, owner: float | None) -> None:
    (node,) = parse_nodes(f"gpu1|{line.replace('|', '||||', 1)}|\n").values()
    assert node.owner == owner
    assert (node.level is None) == (owner is None)


def test_garbage_is_passed_over() -> None:
    text = (
        "\n|idle|||||\ngpu1||||||\nno bar\ngpu2|idle|||||\ngpu2|drained|||||\n" + "x" * 300 + "|idle|||||\n"
    )
    assert {host: node.level for host, node in parse_nodes(text).items()} == {"gpu2": 3.0}


def test_nodes_that_are_alike_come_in_one_line() -> None:
    text = (
        "gpu[01-03],far7|idle|train|gpu:8|gpu:2|none|\n"
        "gpu[03-04]|drained|debug|gpu:8|gpu:0|racktwin:3:why|\n"
        "gpu[05-|idle|train|||none|\n"
    )
    nodes = parse_nodes(text)
    assert {host: node.level for host, node in nodes.items()} == {
        "gpu01": 0.0, "gpu02": 0.0, "gpu03": 3.0, "far7": 0.0, "gpu04": 3.0
    }  # fmt: skip
    assert nodes["gpu03"].share == (8, 0, ("debug", "train"))
    assert nodes["far7"].share == (8, 2, ("train",))
