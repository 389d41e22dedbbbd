"""Messages to an agent: it reads sound requests and plans, and refuses everything else with a short
reason."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from racktwin_agent.wire import MAX_BYTES, Order, Refused, read_plan, read_request

RACK = "lab/h/r1"
REQUEST: dict[str, Any] = {
    "v": 1,
    "control": "gpu.power_cap_w",
    "policy": "thermal_guard",
    "epoch": 3,
    "issued_ns": 10**18,
    "expires_ns": 10**18 + 30 * 10**9,
    "deadline_ns": 10**18 + 10 * 10**9,
    "renewal": False,
    "final": False,
    "on_expiry": "safe",
    "reason": "flow lost",
    "names": ["node0/gpu0", "node0/gpu1", "node1/gpu0", "node1"],
    "generations": [0, 1, 0, 0],
    "commands": [17, 18, 19, 20],
    "values": [800.0, 700, 600.5, 3000],
    "lapse": [600.0, None, 600, None],
}
PLAN: dict[str, Any] = {
    "v": 1,
    "epoch": 3,
    "issued_ns": 10**18,
    "expires_ns": 2 * 10**18,
    "names": ["node0/gpu0", "node1/gpu0"],
    "caps_w": [450, 500.5],
    "triggers": ["psu_lost", "broker_gone"],
    "hold_s": 300,
}


def test_a_request_is_sorted_by_node() -> None:
    read = read_request("gpu.power_cap_w", RACK, json.dumps(REQUEST).encode())
    assert read.orders["node0"] == [Order("gpu0", 0, 17, 800, 600), Order("gpu1", 1, 18, 700, None)]
    assert read.orders["node1"] == [Order("gpu0", 0, 19, 600.5, 600), Order("", 0, 20, 3000, None)]
    assert (read.epoch, read.span_ns, read.renewal, read.reason) == (3, 30 * 10**9, False, "flow lost")


def test_a_plan_is_sorted_by_node() -> None:
    read = read_plan(RACK, json.dumps(PLAN).encode())
    assert read.caps == {"node0": {"gpu0": 450.0}, "node1": {"gpu0": 500.5}}
    assert (read.triggers, read.hold_s) == (("psu_lost", "broker_gone"), 300.0)


@pytest.mark.parametrize(
    "change,why",
    [
        ({"v": 2}, "v: 1"),
        ({"v": True}, "v: 1"),
        ({"control": "node.power_cap_w"}, "speaks of 'node.power_cap_w'"),
        ({"path": "lab/h/r2"}, "speaks of 'lab/h/r2'"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**53}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": 1.0}, "epoch"),
        ({"issued_ns": None}, "issued_ns"),
        ({"expires_ns": 2**62}, "expires_ns"),
        ({"final": 1}, "final"),
        ({"renewal": "no"}, "renewal"),
        ({"reason": 5}, "reason"),
        ({"names": "node0/gpu0"}, "names"),
        ({"names": [1, 2, 3, 4]}, "names"),
        ({"names": ["node0/gpu0"] * 4}, "one comes twice"),
        ({"names": ["node0/gpu0", "../r2/node0/gpu0", "node1", "node2"]}, "does not lie below"),
        ({"names": ["node0/gpu0", "/lab", "node1", "node2"]}, "does not lie below"),
        ({"names": ["node0/gpu0", "node1//gpu0", "node1", "node2"]}, "does not lie below"),
        ({"names": ["node0/gpu0"]}, "as long as names"),
        ({"values": [1, 2, 3]}, "values"),
        ({"values": [1, 2, 3, "4"]}, "values"),
        ({"values": [1, 2, 3, True]}, "values"),
        ({"values": [1, 2, 3, None]}, "values"),
        ({"values": [1, 2, 3, 1e300]}, "values"),
        ({"lapse": [1, 2, 3, "x"]}, "lapse"),
        ({"commands": [1, 2, 3, -4]}, "commands"),
        ({"generations": [1, 2, 3, 2**31]}, "generations"),
    ],
)
def test_requests_that_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_request("gpu.power_cap_w", RACK, json.dumps(REQUEST | change).encode())


@pytest.mark.parametrize(
    "change,why",
    [
        ({"triggers": []}, "triggers"),
        ({"triggers": ["always"]}, "triggers"),
        ({"triggers": "psu_lost"}, "triggers"),
        ({"triggers": [["psu_lost"]]}, "triggers"),
        ({"hold_s": -1}, "hold_s"),
        ({"hold_s": 1e9}, "hold_s"),
        ({"caps_w": [1]}, "caps_w"),
        ({"caps_w": [1, None]}, "caps_w"),
    ],
)
def test_plans_that_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_plan(RACK, json.dumps(PLAN | change).encode())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"v":1,"epoch":' + b"9" * 5000 + b"}",
        b'{"v":1,"values":[NaN]}',
        b'{"v":1,"hold_s":Infinity}',
        b'{"v": 1}' + b" " * MAX_BYTES,
    ],
)
def test_payloads_that_are_none(payload: bytes) -> None:
    for read in (lambda: read_request("gpu.power_cap_w", RACK, payload), lambda: read_plan(RACK, payload)):
        with pytest.raises(Refused) as caught:
            read()
        assert 0 < len(str(caught.value)) < 300


def test_mutilated_messages_are_read_or_refused() -> None:
    dice, sound, longest = random.Random(5), 0, 0
    odd = [None, True, -1, 0, 2**70, 1e308, "", "x" * 300, [], {}, [None], [[]], "node0"]
    for _ in range(4000):
        body = dict(dice.choice([REQUEST, PLAN]))
        for _ in range(dice.randint(0, 2)):
            key = dice.choice(list(body))
            held = body[key]
            if isinstance(held, list) and held and dice.random() < 0.6:
                body[key] = [*held[:-1], dice.choice(odd)]
            else:
                body[key] = dice.choice(odd)
        text = json.dumps(body).encode()
        if dice.random() < 0.3:
            at = dice.randrange(len(text))
            text = text[:at] + dice.randbytes(2) + text[at + 1 :]
        try:
            if "caps_w" in body:
                read_plan(RACK, text)
            else:
                read_request("gpu.power_cap_w", RACK, text)
            sound += 1
        except Refused as error:
            longest = max(longest, len(str(error)))
    assert 0 < longest < 400
    assert 300 < sound < 3500
