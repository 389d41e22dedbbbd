"""The IT side's messages: columns in both encodings, DCGM numbers, and what is refused, with its reason."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors.agents import EVENT, FRAME, ItDecoder, encode_frame, encode_json, frame
from connectors.agents.frame import DCGM
from tests.support.it_frames import T, a_site, blocks, decoder, refused
from twin.catalogue import TABLES, BadMessage
from twin.telemetry import Ignored, Message

__all__ = ["decoder"]


def test_both_encodings_give_the_same_block(decoder: ItDecoder) -> None:
    power, energy = [700.5, None, 650.0, 1.0, 2.0, 3.0], [2**53 + 1, None, 0, 1, 2, 2**63 - 1]
    rows = np.array([np.nan if v is None else v for v in power], np.float32)
    raw = np.array([-1 if v is None else v for v in energy], np.int64)
    (a,) = blocks(decoder, "lab/h/r1", encode_json(T, {"power_w": power, "energy_mj": energy}))
    (b,) = blocks(decoder, "lab/h/r1", encode_frame(T, {"power_w": rows, "energy_mj": raw}))
    for block in (a, b):
        assert (block.table, block.start, block.signals, block.counters, block.t_ns) == (
            "gpu", 0, ("power_w",), ("energy_mj",), T)  # fmt: skip
        assert np.array_equal(block.values[0], rows, equal_nan=True)
        assert block.counts[0].tolist() == raw.tolist()
        assert (block.values.dtype, block.counts.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize(
    "path,kind,start,n",
    [
        ("lab/h/r1", "gpu", 0, 6),
        ("lab/h/r1/node0", "gpu", 0, 2),
        ("lab/h/r1/node2", "gpu", 4, 2),
        ("lab/h/r2", "gpu", 6, 4),
        ("lab/h/r2/node0", "gpu", 6, 4),
        ("lab/h/r1", "node", 0, 3),
        ("lab/h/r1/node1", "node", 1, 1),
        ("lab/h/r2/node0", "node", 3, 1),
        ("lab/h/r3", "node", 4, 1),
        ("r1/node1", "gpu", 2, 2),
    ],
)
def test_columns_go_to_the_entities_of_the_topic(
    decoder: ItDecoder, path: str, kind: str, start: int, n: int
) -> None:
    (block,) = blocks(
        decoder, path, msgspec.json.encode({"t_ns": T, kind: {"power_w": [float(i) for i in range(n)]}})
    )
    assert (block.table, block.start, block.values.tolist()) == (kind, start, [list(range(n))])
    assert block.counts.shape == (0, n)
    for wrong in (n - 1, n + 1, 0):
        assert f"expected {n}" in refused(decoder, {"t_ns": T, kind: {"power_w": [1.0] * wrong}}, path)


def test_gpu_and_node_columns_come_as_two_blocks(decoder: ItDecoder) -> None:
    body = encode_json(T, {"temp_c": [50.0, 51.0]}, {"power_w": [5000.0], "reboot_count": [3]})
    gpu, node = blocks(decoder, "lab/h/r1/node1", body)
    assert (gpu.table, node.table, node.start, node.counts.tolist()) == ("gpu", "node", 1, [[3]])


def test_every_dcgm_number_names_a_signal_and_its_unit(decoder: ItDecoder) -> None:
    for number, (name, factor) in DCGM.items():
        signal = TABLES["gpu"].by_name[name]
        (block,) = blocks(
            decoder, "lab/h/r1/node0", msgspec.json.encode({"t_ns": T, "gpu": {number: [1, 2]}})
        )
        if signal.kind == "counter":
            assert (block.counters, block.counts.tolist()) == ((name,), [[1, 2]])
            assert factor == 1.0
        else:
            assert block.signals == (name,)
            assert block.values.tolist() == [[pytest.approx(factor), pytest.approx(2 * factor)]]
    assert DCGM["203"] == ("util_pu", 0.01)  # percent
    assert DCGM["100"] == ("sm_clock_hz", 1e6)  # MHz


def test_one_signal_under_two_names_counts_once(decoder: ItDecoder) -> None:
    body = {"t_ns": T, "gpu": {"power_w": [1, 2], "155": [3, 4], "156": [5, 6], "energy_mj": [7, 8]}}
    (block,) = blocks(decoder, "lab/h/r1/node0", msgspec.json.encode(body))
    assert (block.signals, block.values.tolist()) == (("power_w",), [[1, 2]])
    assert (block.counters, block.counts.tolist()) == (("energy_mj",), [[5, 6]])


def test_unknown_columns_are_passed_over_unless_they_are_all(decoder: ItDecoder) -> None:
    (block,) = blocks(
        decoder, "lab/h/r1/node0", encode_json(T, {"temp_c": [1, 2], "colour": [1, 2], "9999": ["x"]})
    )
    assert block.signals == ("temp_c",)
    assert "colour" in refused(decoder, {"t_ns": T, "gpu": {"colour": [1, 2]}})
    assert len(refused(decoder, {"t_ns": T, "gpu": {c * 10**6: [1] for c in "abcdef"}})) < 400
    assert blocks(decoder, "lab/h/r1/node0", msgspec.json.encode({"t_ns": T})) == []


@pytest.mark.parametrize(
    "path", ["", "lab/h", "lab/h/r9", "lab/h/r1/node3", "lab/h/r1/node-1", "x" * 10_000, "lab/h/r1/gpu0"]
)
def test_unknown_places_are_ignored(decoder: ItDecoder, path: str) -> None:
    got = decoder.decode(Message(T, FRAME + path, b"garbage"))
    assert isinstance(got, Ignored)
    assert got.why == f"no rack or node {path[:120]!r} in the site file"
    assert "add it to the site file" in got.remedy
    assert isinstance(decoder.decode(Message(T, "IT/v1/NICO/Request/x", b"")), Ignored)


def test_unknown_places_are_not_remembered() -> None:
    decoder = ItDecoder(a_site())
    for i in range(1000):
        decoder.decode(Message(T, f"{FRAME}lab/h/r1/rack{i}", b""))
    assert len(decoder._place) == 0
    blocks(decoder, "lab/h/r1", encode_json(T, {"temp_c": [1] * 6}))
    assert len(decoder._place) == 1


@pytest.mark.parametrize(
    "column",
    [
        5,
        None,
        "ab",
        True,
        {"a": 1, "b": 2},
        [[1], [2]],
        [[1, 2]],
        ["1", "2"],
        [True, False],
        [1, True],
        [{}, {}],
        [1],
        [1, 2, 3],
        [1, [2]],
        ["", None],
        [],
    ],
)
@pytest.mark.parametrize("name", ["power_w", "energy_mj", "155", "156"])
def test_columns_of_another_form(decoder: ItDecoder, column: Any, name: str) -> None:
    for packed in (False, True):
        assert refused(decoder, {"t_ns": T, "gpu": {name: column}}, packed=packed).startswith(
            DCGM.get(name, (name,))[0]
        )


@pytest.mark.parametrize(
    "column", [[1.0, 2.0], [1, 0.5], [2**63, 1], [2**64, 1], [2**63, -1], [10**300, 1], [1e300, 1]]
)
def test_counts_are_whole_numbers_of_63_bits(decoder: ItDecoder, column: list[Any]) -> None:
    assert "whole numbers below 2^63" in refused(decoder, {"t_ns": T, "gpu": {"energy_mj": column}})


def test_gauges_too_large_are_left_to_the_inbox_to_judge(decoder: ItDecoder) -> None:
    for column in ([1e308, -1e308], [10**300, -(10**300)], [3e38, -3e38]):
        for name in ("power_w", "100"):
            (block,) = blocks(
                decoder, "lab/h/r1/node0", msgspec.json.encode({"t_ns": T, "gpu": {name: column}})
            )
            assert abs(block.values[0, 0]) >= 1e37
    odd = np.array([np.inf, np.nan], np.float32)
    (block,) = blocks(decoder, "lab/h/r1/node0", encode_frame(T, {"100": odd}))
    assert np.array_equal(block.values[0], odd, equal_nan=True)
    refused(decoder, {"t_ns": T, "gpu": {"power_w": [10**400, 1]}})


@pytest.mark.parametrize("raw", [b"", b"\0", bytes(7), bytes(9), bytes(12), bytes(24), bytes(1600)])
@pytest.mark.parametrize("name", ["power_w", "energy_mj"])
def test_raw_columns_of_another_length(decoder: ItDecoder, raw: bytes, name: str) -> None:
    refused(decoder, {"t_ns": T, "gpu": {name: raw}}, packed=True)


@pytest.mark.parametrize("t_ns", [0, -1, 2**62, 2**63, 2**64, 10**30, 1.5, "now", None, True, 1e400])
def test_times_that_are_none(decoder: ItDecoder, t_ns: Any) -> None:
    refused(decoder, {"t_ns": t_ns, "gpu": {"temp_c": [1, 2]}})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"\x80",
        b"\xdf\xff\xff\xff\xff",
        b"{" * 10_000,
        b'{"t_ns":' + b"[" * 100_000,
        b'{"t_ns":1,"gpu":' + b'{"a":' * 100_000,
        b'{"t_ns":' + b"9" * 5000 + b"}",
        b'{"t_ns":1,"gpu":{"temp_c":[' + b"9" * 5000,
        b"\x82\xa4t_ns\x01\xa3gpu" + b"\x91" * 100_000,
        b'{"t_ns":1,"gpu":{"\xff":[1,2]}}',
        b"\x81\xa4t_ns\xc0",
    ],
)
def test_payloads_that_are_no_frame(decoder: ItDecoder, payload: bytes) -> None:
    for topic in (FRAME + "lab/h/r1/node0", EVENT + "lab"):
        with pytest.raises(BadMessage):
            decoder.decode(Message(T, topic, payload))


def test_sizes_are_limited(decoder: ItDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "201 columns" in refused(decoder, {"t_ns": T, "gpu": {str(i): [1, 2] for i in range(201)}})
    monkeypatch.setattr(frame, "MAX_PAYLOAD", 100)
    assert "expected at most 100" in refused(decoder, {"t_ns": T, "gpu": {"temp_c": [1.0] * 100}})


def test_the_enforced_limit_wins_over_the_one_that_was_set(decoder: ItDecoder) -> None:
    for body in ({"160": [700, 700], "164": [500, 600]}, {"164": [500, 600], "160": [700, 700]}):
        (block,) = blocks(decoder, "lab/h/r1/node0", msgspec.json.encode({"t_ns": T, "gpu": body}))
        assert (block.signals, block.values.tolist()) == (("power_limit_w",), [[500, 600]])


NAMES = [
    "power_w",
    "temp_c",
    "energy_mj",
    "155",
    "156",
    "100",
    "203",
    "clock_event_bits",
    "xid_code",
    "colour",
    "",
    "\u0000",
    "power_w_max",
    "reboot_count",
    "leak_state",
    "pcie_replay_count",
]
VALUES: list[Any] = [
    None,
    0,
    1,
    -1,
    700.5,
    1e308,
    -1e308,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    True,
    False,
    "1",
    "",
    [],
    {},
    [1],
]


def a_column(rng: random.Random, n: int) -> Any:
    chance = rng.random()
    if chance < 0.3:
        return [rng.choice(VALUES[:8]) for _ in range(n)]
    if chance < 0.5:
        return [rng.choice(VALUES) for _ in range(rng.randint(0, n + 1))]
    if chance < 0.8:
        return rng.randbytes(rng.choice([4 * n, 8 * n, rng.randint(0, 50)]))
    return rng.choice([*VALUES, "text", {"a": [1]}, [[1] * n], b""])


def malformed(rng: random.Random) -> Message:
    """A message of an agent that is broken, hostile, or merely new."""
    path, n = rng.choice(
        [("lab/h/r1", 6), ("lab/h/r1/node1", 2), ("lab/h/r2", 4), ("lab/h/r3", 0), ("lab/h/r9", 1), ("", 1)]
    )
    if rng.random() < 0.1:
        names = rng.choice([[], ["lab/h/r1/node0"], ["x"] * 3, None, "x"])
        body: Any = {
            "type": rng.choice(["FaultReported", "JobStarted", "JobEnded", "Held", 5]),
            "id": rng.choice(["", "a", 7]),
            "table": rng.choice(["gpu", "node", "x", None]),
            "name": rng.choice(["lab/h/r1/node0/gpu0", "lab/h/r1/node0", "x", ""]),
            "code": rng.choice([1, 79, -1, 2**40, 10**30, 1.5, "1"]),
            "job": rng.choice(["j", "k", None]),
            "nodes": names,
            "floor_w": rng.choice([0, -1, 1e308, None]),
            "priority": rng.choice([0, 2**31, -(2**70)]),
        }
        if rng.random() < 0.8:  # where such an event belongs
            path = "lab/h/r1/node0" if body["type"] == "FaultReported" else "jobs/slurm"
        return Message(T, EVENT + path, msgspec.json.encode(body))
    columns = {rng.choice(NAMES): a_column(rng, n) for _ in range(rng.randint(0, 4))}
    t_ns = rng.choice([T, T, T, 1, 0, -1, 2**62 - 1, 2**70, 1.5, None, T + rng.randint(-(10**12), 10**12)])
    body = {
        "t_ns": t_ns,
        rng.choice(["gpu", "gpu", "node", "x"]): columns,
        "node": rng.choice([{}, None, {"power_w": [1.0]}]),
    }
    packed = rng.random() < 0.6 and (t_ns is None or t_ns < 2**64)
    payload = msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)
    chance = rng.random()
    if chance < 0.2:
        at = rng.randint(0, len(payload))
        payload = payload[:at] + rng.randbytes(rng.randint(0, 3)) + payload[at + rng.randint(0, 3) :]
    elif chance < 0.25:
        payload = rng.choice([b"", b"[" * 3000, b"\x91" * 3000, rng.randbytes(30), payload * 2])
    return Message(T, rng.choice([FRAME + path] * 20 + ["IT/v1/x", FRAME, "IT/v1/PUB/Frame"]), payload)
