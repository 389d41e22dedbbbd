"""Levels of nodes, and the patches that bring them about, applied as RFC 7386 says."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from connectors.kubernetes import Hosts
from connectors.kubernetes.nodes import (
    COMMAND,
    CONDITION,
    EPOCH,
    LEVEL,
    LEVELS,
    TAINT,
    NodeCommand,
    condition_patch,
    level_of,
    owner_of,
    plan,
)
from connectors.kubernetes.objects import KubernetesNode
from tests.support.builders import site_of, two_racks
from twin.catalogue import ConfigError

READY = {"type": "Ready", "status": "True"}
OURS = {"key": TAINT, "value": "draining", "effect": "NoSchedule"}
GONE = {**OURS, "value": "replace"}


def node(tree: dict[str, Any]) -> KubernetesNode:
    return msgspec.convert(tree, KubernetesNode)


def tree(
    closed: bool = False, taints: list[Any] | None = None, ready: str = "True", **marks: str
) -> dict[str, Any]:
    spec: dict[str, Any] = {"unschedulable": True} if closed else {}
    if taints:
        spec["taints"] = taints
    annotations = {f"racktwin.io/{k}": v for k, v in marks.items()}
    return {
        "metadata": {"name": "n", "resourceVersion": "7", "annotations": annotations},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def merged(tree: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    out = dict(tree) if isinstance(tree, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


@pytest.mark.parametrize(
    "found, busy, level",
    [
        (tree(), False, 0),
        (tree(), True, 0),
        (tree(ready="False"), False, None),
        (tree(ready="Unknown"), True, None),
        (tree(taints=[{"key": "dedicated", "effect": "NoSchedule"}]), False, 0),
        (tree(closed=True), False, 1),
        (tree(closed=True, ready="Unknown"), False, 1),
        (tree(closed=True, level="cordoned"), True, 1),
        (tree(closed=True, taints=[OURS], level="draining"), True, 2),
        (tree(closed=True, taints=[OURS], level="draining"), False, 2),
        (tree(closed=True, taints=[OURS], level="drained"), True, 2),
        (tree(closed=True, taints=[OURS], level="drained"), False, 3),
        (tree(closed=True, taints=[GONE], level="replace"), True, 2),
        (tree(closed=True, taints=[GONE], level="replace", ready="False"), False, 4),
        (tree(taints=[OURS]), True, 2),
        (tree(taints=[OURS]), False, 3),
        (tree(taints=[GONE]), False, 4),
        (tree(level="drained"), False, 0),  # opened by hand: what counts is what a scheduler sees
        (tree(closed=True, level="drained"), False, 3),  # without the taint nothing new comes either
        (tree(closed=True, level="in_service"), False, 1),
        (tree(closed=True, level="nonsense"), False, None),
        ({"metadata": {"name": "n"}}, False, None),
        ({"metadata": {"name": "n"}, "spec": {"taints": [{}]}}, False, None),
    ],
)
def test_levels(found: dict[str, Any], busy: bool, level: int | None) -> None:
    assert level_of(node(found), busy) == level


@pytest.mark.parametrize(
    "found, owner",
    [
        (tree(), 0),
        (tree(level="drained"), 0),  # opened by hand
        (tree(ready="False"), None),
        (tree(closed=True), 2),
        (tree(closed=True, ready="Unknown", taints=[{"key": "dedicated", "effect": "NoSchedule"}]), 2),
        (tree(closed=True, epoch="9"), 2),  # given back by us, closed by others since
        (tree(closed=True, level="cordoned"), 1),
        (tree(closed=True, taints=[OURS], level="drained", ready="False"), 1),
        (tree(closed=True, level="drained", found="cordoned"), 1),
        (tree(taints=[GONE]), 1),
        (tree(closed=True, level="nonsense"), None),
    ],
)
def test_who_took_a_node_out(found: dict[str, Any], owner: int | None) -> None:
    assert owner_of(node(found), level_of(node(found), False)) == owner


@pytest.mark.parametrize(
    "found, order, refusal",
    [
        (
            tree(epoch="9"),
            NodeCommand(3, 8, 1, ""),
            "a daemon of the newer epoch 9 commands it; this daemon has epoch 8",
        ),
        (tree(closed=True, epoch="9", level="drained"), NodeCommand(0, 8, 1, ""), "epoch 9"),
        (tree(epoch="-1"), NodeCommand(3, 8, 1, ""), "expected a number"),
        (tree(epoch="9" * 40), NodeCommand(3, 8, 1, ""), "expected a number"),
        (tree(closed=True), NodeCommand(0, 8, 1, ""), "cordoned by somebody else"),
        (
            tree(level="drained", epoch="8", command="8-1"),
            NodeCommand(3, 8, 1, ""),
            "made it schedulable after",
        ),
    ],
)
def test_what_is_refused(found: dict[str, Any], order: NodeCommand, refusal: str) -> None:
    wanted = plan(node(found), order)
    assert wanted.patch is None
    assert refusal in wanted.refusal


def test_a_patch_names_the_version_that_it_is_for() -> None:
    wanted = plan(node(tree()), NodeCommand(1, 3, 1, "x" * 1000))
    assert wanted.patch is not None
    assert wanted.patch["metadata"]["resourceVersion"] == "7"
    assert len(wanted.patch["metadata"]["annotations"]["racktwin.io/reason"]) == 250


taints = st.lists(
    st.sampled_from(
        [{"key": "a", "effect": "NoSchedule"}, {"key": "b", "value": "1", "effect": "NoExecute"}]
    ),
    unique_by=lambda t: t["key"],
)
orders = st.lists(st.integers(0, 4), max_size=6)


@given(closed=st.booleans(), taints=taints, levels=orders)
def test_whatever_was_ordered_a_release_gives_back_what_was_found(
    closed: bool, taints: list[Any], levels: list[int]
) -> None:
    start = tree(closed=closed, taints=taints)
    now = copy.deepcopy(start)
    withdrawn = False
    for number, level in enumerate([*levels, 0], 1):
        order = NodeCommand(level, 3, number, "why")
        wanted = plan(node(now), order)
        if wanted.refusal:
            assert level == 0
            assert closed
            assert not withdrawn
            continue
        now = merged(now, wanted.patch or {})
        withdrawn = level > 0
        again = plan(node(now), order)  # the same order changes nothing more
        assert again.patch is None
        assert bool(again.refusal) == (level == 0 and closed)
        if level:
            assert level_of(node(now), False) == level
            assert now["spec"]["unschedulable"] is True
            assert now["metadata"]["annotations"][LEVEL] == LEVELS[level]
            assert [t for t in now["spec"].get("taints", []) if t["key"] != TAINT] == taints
            assert any(t["key"] == TAINT for t in now["spec"].get("taints", [])) == (level >= 2)
    assert now["spec"] == start["spec"]
    assert set(now["metadata"]["annotations"]) <= {EPOCH}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_latest_epoch_always_wins(orders: list[tuple[int, int]]) -> None:
    now, highest, level = tree(), 0, 0
    for number, (epoch, wanted) in enumerate(orders, 1):
        done = plan(node(now), NodeCommand(wanted, epoch, number, "why"))
        if not done.refusal:
            now = merged(now, done.patch or {})
            level = wanted
            if done.patch is not None:
                highest = max(highest, epoch)
        assert bool(done.refusal) == (epoch < highest)
        assert level_of(node(now), False) == level


def test_conditions() -> None:
    fresh = node(tree())
    assert condition_patch(fresh, 0, "", "now") is None
    patch = condition_patch(fresh, 3, "XID 79", "now")
    assert patch is not None
    (said,) = patch["status"]["conditions"]
    assert (said["type"], said["status"], said["reason"]) == (CONDITION, "False", "Drained")
    assert (said["message"], said["lastTransitionTime"]) == ("XID 79", "now")
    known = tree()
    known["status"]["conditions"].append(said)
    assert condition_patch(node(known), 3, "XID 79", "later") is None
    patch = condition_patch(node(known), 4, "XID 79", "later")
    assert patch is not None
    assert "lastTransitionTime" not in patch["status"]["conditions"][0]
    patch = condition_patch(node(known), 0, "", "later")
    assert patch is not None
    assert patch["status"]["conditions"][0]["status"] == "True"


def test_hosts() -> None:
    tree = two_racks()
    tree["halls"][0]["racks"].append({"name": "cn1", "nodes": 1})
    site = site_of(tree)
    with pytest.raises(ConfigError, match=r"\$\.kubernetes\.node_names"):
        Hosts(site, {"n[": "r1/node0"})
    hosts = Hosts(site, {"n[0-1]": "r1/node[0-1]", "twin": "r1/node0"})
    assert not hosts.listed
    hosts.take(["n0", "n1", "cn1", "stranger", "twin", "r1"])
    assert hosts.listed
    assert [hosts.entity_of(h) for h in ("n0", "n1", "stranger", "twin", "r1")] == [0, 1, None, 0, None]
    assert hosts.host_of(0) == "n0"
    single = hosts.entity_of("cn1")
    assert single is not None
    assert hosts.name(single) == "lab/h/cn1/node0"
    assert list(hosts.strangers) == ["stranger", "r1"]
    assert hosts.faults == ["twin and n0 are both lab/h/r1/node0; see kubernetes.node_names"]
    hosts.remove("twin")
    assert hosts.host_of(0) == "n0"
    hosts.remove("n0")
    assert hosts.host_of(0) is None


def test_a_host_that_takes_the_place_of_another_is_found_once_that_is_gone() -> None:
    hosts = Hosts(site_of(two_racks()), {"old": "r1/node0", "new": "r1/node0"})
    hosts.take(["old"])
    hosts.add("new")
    assert hosts.host_of(0) == "old"
    hosts.remove("old")
    assert hosts.host_of(0) == "new"
    hosts.add("old")
    hosts.remove("old")
    hosts.remove("new")
    assert hosts.host_of(0) is None


def test_commands_are_named_as_acknowledged() -> None:
    wanted = plan(node(tree()), NodeCommand(1, 3, 12, ""))
    assert wanted.patch is not None
    assert wanted.patch["metadata"]["annotations"][COMMAND] == "3-12"
