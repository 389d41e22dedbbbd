"""The agent against what is forged or spoilt: requests, plans and a state file of any content."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from racktwin_agent.__main__ import OneLine
from racktwin_agent.clock import NS, Instant
from racktwin_agent.devices import Key
from racktwin_agent.leases import MAX_SPAN_NS
from racktwin_agent.node import Node
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.store import MemoryStore
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Refused

AT = Instant(1_790_000_000 * NS, 1000 * NS)
T, CAP = AT.wall_ns, "gpu.power_cap_w"
REQUEST = {
    "v": 1, "path": "lab/h/r1", "control": CAP, "policy": "p", "epoch": 5, "issued_ns": T,
    "expires_ns": T + 30 * NS, "renewal": False, "final": False, "reason": "r",
    "names": ["node0/gpu0", "node0/gpu1"], "generations": [0, 0], "commands": [1, 2],
    "values": [700.0, 700.0], "lapse": [600.0, None],
}  # fmt: skip
PLAN = {"v": 1, "path": "lab/h/r1", "epoch": 5, "issued_ns": T, "expires_ns": T + 300 * NS,
        "names": ["node0/gpu0"], "caps_w": [500.0], "triggers": ["psu_lost"], "hold_s": 10}  # fmt: skip
WILD: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -1e308, 2**53 - 1, 2**63, 10**400, "x", "\x00\n\x1b[2J", "\ud800", [], {},
    [[]], [None], [True], [float("nan")], [float("inf")], [1e308], [-5, 1e6], ["node0"], ["node0/gpu0"] * 2,
    ["node0/gpu9", "node0/"], [""], ["/"], ["node0/gpu0/../gpu1"], T, T + 10**18, float("nan"),
)  # fmt: skip


def node(store: MemoryStore | None = None) -> Node:
    watch = Watch(60, 2)
    return Node(
        "lab/h/r1/node0", SimulatedDevices(4, 0), store or MemoryStore(), watch, "b", clock=lambda: AT
    )


def topic(what: str) -> str:
    return f"IT/v1/racktwin/{what}/lab/h/r1"


def told(one: Node, what: str, body: dict[str, Any], at: Instant = AT) -> None:
    one.take(topic(what), json.dumps(body).encode(), at)


def test_whatever_a_request_holds_the_devices_stay_within_their_limits() -> None:
    rng, one = random.Random(7), node()
    forms: list[tuple[str, dict[str, Any]]] = [(f"Request/{CAP}", REQUEST), ("Contingency", PLAN)]
    refused = 0
    for i in range(4000):
        if i % 20 == 0:
            one = node()  # a forged epoch fences all that follows
        what, form = rng.choice(forms)
        body = copy.deepcopy(form)
        for _ in range(rng.choice((1, 1, 2, 3))):
            body[rng.choice(list(body))] = rng.choice(WILD)
        payload = json.dumps(body).encode()
        if rng.random() < 0.05:
            payload = payload[: rng.randrange(len(payload))]
        at = Instant(T + i * NS // 100, AT.boot_ns + i * NS // 100)
        try:
            one.take(topic(what), payload, at)
        except Refused as error:
            refused += len(str(error)) < 700
        one.step(at)
        for gpu in range(4):
            low, high = one.devices.limits(Key(CAP, f"gpu{gpu}")) or (0.0, 0.0)
            assert low <= (one.devices.get(Key(CAP, f"gpu{gpu}")) or 0.0) <= high
    assert 1000 < refused < 4000


OTHERS, OURS = ["node1/gpu0", "node1/gpu1"], REQUEST["names"]


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"names": OTHERS, "epoch": 6}, 6),  # what others are told says who leads as well
        ({"names": OTHERS, "epoch": 4}, 5),
        ({"names": OTHERS, "epoch": 6, "expires_ns": T}, 5),  # late from a queue: nobody knows who leads now
        ({"names": OURS, "epoch": 6}, 6),
        ({"names": OURS, "epoch": 4}, 5),
        ({"names": OURS, "epoch": 6, "expires_ns": T}, 5),
        ({"names": OURS, "epoch": 6, "expires_ns": T + 10**4 * NS}, 5),
    ],
)
def test_the_epoch_of_a_request_counts_where_it_is_in_force(change: dict[str, Any], known: int) -> None:
    one = node()
    told(one, f"Request/{CAP}", REQUEST)
    told(one, f"Request/{CAP}", REQUEST | {"issued_ns": T - NS} | change)
    assert one.book.epoch == known
    assert isinstance(one.store, MemoryStore)
    assert one.store.state is not None
    assert one.store.state["book"]["epoch"] == known, "a restart does not forget it"


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"epoch": 6}, 6),
        ({"epoch": 6, "names": ["node1/gpu0"]}, 6),
        ({"epoch": 4}, 5),
        ({"epoch": 6, "expires_ns": T}, 5),
        ({"epoch": 6, "caps_w": [1.0]}, 5),  # below what the device takes: refused as a whole
    ],
)
def test_the_epoch_of_a_plan_counts_where_it_is_kept(change: dict[str, Any], known: int) -> None:
    one = node()
    told(one, f"Request/{CAP}", REQUEST)
    told(one, "Contingency", PLAN | {"issued_ns": T - NS} | change)
    assert one.book.epoch == known


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*at, key))


def stored() -> dict[str, Any]:
    one = node()
    told(one, f"Request/{CAP}", REQUEST)
    told(one, "Contingency", PLAN)
    assert isinstance(one.store, MemoryStore)
    state: dict[str, Any] = json.loads(json.dumps(one.store.state))
    return state


def test_a_spoilt_state_is_refused_at_the_start_or_does_no_harm_later() -> None:
    state = stored()
    bad: tuple[Any, ...] = (None, True, -1, 1e308, float("inf"), 10**400, "x", [], {}, [1], {"a": 1})
    refused = 0
    for place in places(state):
        for value in bad:
            tree = copy.deepcopy(state)
            inner = tree
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            store = MemoryStore()
            store.state = tree
            one = node(store)
            try:
                one.resume(AT)
            except ValueError as error:  # it is put aside, and the agent begins anew
                refused += "cannot be understood" in str(error)
            for later in (1, 100, 4000):
                one.step(Instant(T + later * NS, AT.boot_ns + later * NS))
            told(one, f"Request/{CAP}", REQUEST | {"issued_ns": T + 1})
    assert refused > 300


def test_a_state_that_was_tampered_with_keeps_no_lease_for_ever() -> None:
    state = stored()
    for lease in state["book"]["leases"]:
        lease[2]["until"] = [2**62, 2**62, 2**62]
    store = MemoryStore()
    store.state = state
    one = node(store)
    one.resume(AT)
    assert one.book.running() == 2
    one.step(Instant(T + MAX_SPAN_NS, AT.boot_ns + MAX_SPAN_NS))
    assert one.book.running() == 0


@pytest.mark.parametrize("text", ["a\nERROR forged", "\x1b]0;title\x07", "\u2028x\u202ey", "\r\t\ud800"])
def test_a_line_of_the_log_is_one_line(text: str) -> None:
    record = logging.LogRecord("agent", logging.INFO, __file__, 1, "refused %s", (text,), None)
    line = OneLine("%(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.startswith("INFO refused ")
    assert (
        OneLine("%(message)s").format(logging.LogRecord("a", 20, "", 1, "zwölf °C", (), None)) == "zwölf °C"
    )
