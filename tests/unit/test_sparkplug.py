"""Sparkplug B against payloads that are written here byte by byte, by an encoder of the tests' own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from connectors.series_map import load_map, mapping_of
from connectors.sparkplug import SparkplugDecoder, rebirth, source
from connectors.sparkplug.payload import MAX_METRICS, MAX_PAYLOAD, read_payload
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, BadMessage
from twin.site import Site
from twin.telemetry import Block, Ignored, Inbox, Message, Reading

T = 1_700_000_000 * 10**9
INT8, INT16, INT32, INT64, UINT32, UINT64, FLOAT, DOUBLE, BOOL, TEXT = 1, 2, 3, 4, 7, 8, 9, 10, 11, 12


def varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def number(field: int, n: int) -> bytes:
    return varint(field << 3) + varint(n & (2**64 - 1))


def text(field: int, raw: bytes | str) -> bytes:
    body = raw.encode() if isinstance(raw, str) else raw
    return varint(field << 3 | 2) + varint(len(body)) + body


def metric(
    name: str | None = None,
    value: Any = None,
    kind: int = 0,
    alias: int | None = None,
    t_ms: int | None = None,
) -> bytes:
    """A metric on the wire; a value None is a null. Signed numbers as senders write them."""
    out = b""
    if name is not None:
        out += text(1, name)
    if alias is not None:
        out += number(2, alias)
    if t_ms is not None:
        out += number(3, t_ms)
    if kind:
        out += number(4, kind)
    match value, kind:
        case None, _:
            out += number(7, 1)
        case bool(), _:
            out += number(14, int(value))
        case str(), _:
            out += text(15, value)
        case _, k if k in (INT64, UINT64):
            out += number(11, value)
        case int(), _:
            out += number(10, value & 0xFFFF_FFFF)
        case float(), k if k == FLOAT:
            out += varint(12 << 3 | 5) + struct.pack("<f", value)
        case _:
            out += varint(13 << 3 | 1) + struct.pack("<d", value)
    return text(2, out)


def payload(*metrics: bytes, seq: int | None = 0, t_ms: int | None = T // 10**6) -> bytes:
    out = b"" if t_ms is None else number(1, t_ms)
    out += b"".join(metrics)
    return out + (b"" if seq is None else number(3, seq))


SITE = site_of(two_racks())


@pytest.fixture
def site() -> Site:
    return SITE


@pytest.fixture
def decoder(site: Site) -> SparkplugDecoder:
    return SparkplugDecoder(site, *load_map("sparkplug"))


def send(d: SparkplugDecoder, kind: str, body: bytes, device: str = "", t_ns: int = T) -> Any:
    topic = f"spBv1.0/lab/{kind}/edge1" + (f"/{device}" if device else "")
    found = d.decode(Message(t_ns, topic, body))
    return found if isinstance(found, Ignored) else cells(found)


def cells(items: Sequence[Reading | Block]) -> dict[tuple[str, int, str], float | None]:
    out: dict[tuple[str, int, str], float | None] = {}
    for item in items:
        assert isinstance(item, Reading)
        assert (item.table, item.entity, item.signal) not in out
        out[item.table, item.entity, item.signal] = item.value
    return out


FLOW, SUPPLY = ("cdu", 0, "flow_lpm"), ("cdu", 0, "supply_temp_c")
BORN = payload(metric("bdSeq", 3, INT64), seq=0)
CDU_BORN = payload(
    metric("cdu.flow_lpm", 400.0, DOUBLE, alias=1),
    metric("cdu.supply_temp_c", 30.5, FLOAT, alias=2),
    metric("Serial", "X1", TEXT, alias=3),
    seq=1,
)


def born(d: SparkplugDecoder) -> None:
    assert send(d, "NBIRTH", BORN) == {}
    assert send(d, "DBIRTH", CDU_BORN, "cdu1") == {FLOW: 400.0, SUPPLY: 30.5}


def test_a_birth_is_read_and_its_aliases_after_it(decoder: SparkplugDecoder) -> None:
    born(decoder)
    assert send(decoder, "DDATA", payload(metric(alias=1, value=410.5), seq=2), "cdu1") == {FLOW: 410.5}
    assert send(decoder, "DDATA", payload(metric(alias=2, value=31.0, kind=FLOAT), seq=3), "cdu1") == {
        SUPPLY: 31.0
    }
    assert send(decoder, "DDATA", payload(metric(alias=1), metric(alias=9, value=1), seq=4), "cdu1") == {
        FLOW: None
    }
    assert not decoder.wants_rebirth
    assert decoder.counts["births"] == 2


def test_instants_are_the_metric_s_then_the_payload_s_then_the_arrival(decoder: SparkplugDecoder) -> None:
    def at(**more: Any) -> int:
        body = payload(
            metric("cdu.flow_lpm", 1.0, DOUBLE, t_ms=more.get("metric")), t_ms=more.get("payload"), seq=1
        )
        (found,) = decoder.decode(Message(T, "spBv1.0/lab/DDATA/edge1/cdu1", body))
        assert isinstance(found, Reading)
        return found.t_ns

    assert at(metric=1_600_000_000_000, payload=1_650_000_000_000) == 1_600_000_000 * 10**9
    assert at(payload=1_650_000_000_000) == 1_650_000_000 * 10**9
    assert at() == T
    assert at(metric=2**63) == T


@pytest.mark.parametrize(
    "value, kind, expected",
    [
        (-5, INT8, -5),
        (-300, INT16, -300),
        (-7, INT32, -7),
        (-9, INT64, -9),
        (2**31, UINT32, 2**31),
        (2**32 - 1, INT32, -1),
        (255, INT8, -1),
        (2**63, UINT64, 2**63),
        (True, BOOL, True),
        (1.5, DOUBLE, 1.5),
        ("x", TEXT, "x"),
        (5, 16, None),
        (None, INT32, None),
    ],
)
def test_numbers_are_what_their_datatypes_mean(value: Any, kind: int, expected: Any) -> None:
    (found,) = read_payload(payload(metric("a", value, kind))).metrics
    assert found.value(kind) == expected
    assert type(found.value(kind)) is type(expected)


def test_a_null_is_none_whatever_value_comes_with_it() -> None:
    wire = text(2, text(1, "a") + number(4, INT32) + number(7, 1) + number(10, 5))
    assert read_payload(wire).metrics[0].value(INT32) is None


def test_a_gap_makes_aliases_unbelieved_until_the_next_birth(decoder: SparkplugDecoder) -> None:
    born(decoder)
    found = send(decoder, "DDATA", payload(metric(alias=1, value=99.0), seq=5), "cdu1")
    assert isinstance(found, Ignored)
    assert decoder.counts["gaps"] == 1
    assert list(decoder.wants_rebirth) == ["spBv1.0/lab/NCMD/edge1"]
    assert send(decoder, "DDATA", payload(metric("cdu.flow_lpm", 7.0, DOUBLE), seq=6), "cdu1") == {FLOW: 7.0}
    assert send(decoder, "NBIRTH", BORN) == {FLOW: None, SUPPLY: None}  # until the device is born again
    assert not decoder.wants_rebirth
    assert send(decoder, "DBIRTH", CDU_BORN, "cdu1") == {FLOW: 400.0, SUPPLY: 30.5}
    assert send(decoder, "DDATA", payload(metric(alias=1, value=5.0), seq=2), "cdu1") == {FLOW: 5.0}


def test_the_sequence_goes_round(decoder: SparkplugDecoder) -> None:
    born(decoder)
    for seq in [*range(2, 256), 0, 1]:
        assert send(decoder, "DDATA", payload(metric(alias=1, value=5.0), seq=seq), "cdu1") == {FLOW: 5.0}
    assert decoder.counts["gaps"] == 0


def test_a_death_leaves_no_reading(decoder: SparkplugDecoder) -> None:
    born(decoder)
    assert send(decoder, "DDEATH", payload(seq=2), "cdu1") == {FLOW: None, SUPPLY: None}
    assert isinstance(send(decoder, "DDATA", payload(metric(alias=1, value=5.0), seq=3), "cdu1"), Ignored)
    born(decoder)
    old = payload(metric("bdSeq", 2, INT64), seq=None)
    assert isinstance(send(decoder, "NDEATH", old), Ignored)
    now = payload(metric("bdSeq", 3, INT64), seq=None, t_ms=1)
    (one, two) = decoder.decode(Message(T, "spBv1.0/lab/NDEATH/edge1", now))
    assert isinstance(one, Reading)
    assert (one.t_ns, one.value, two.value) == (T, None, None)  # type: ignore[union-attr]
    assert decoder.counts["old_deaths"] == 1
    assert send(decoder, "NDEATH", now) == {}


@pytest.mark.parametrize("first", ["NBIRTH", "NDEATH"])
def test_a_value_that_has_not_changed_since_long_is_back_with_the_next_birth(site: Site, first: str) -> None:
    decoder, inbox = SparkplugDecoder(site, *load_map("sparkplug")), Inbox(site.sizes)
    body = payload(metric("cdu.flow_lpm", 400.0, DOUBLE, alias=1, t_ms=T // 10**6), seq=1)
    for second, kind, birth in ((1, "NBIRTH", BORN), (1, "DBIRTH", body), (60, first, BORN),
                                (61, "NBIRTH", BORN), (61, "DBIRTH", body)):  # fmt: skip
        topic = f"spBv1.0/lab/{kind}/edge1" + ("/cdu1" if kind[0] == "D" else "")
        found = decoder.decode(Message(T + second * NS, topic, birth))
        assert not isinstance(found, Ignored)
        for item in found:
            assert isinstance(item, Reading)
            inbox.put(item, T + second * NS)
    assert inbox.counts["older"] == 0


def test_a_birth_without_a_metric_that_was_there_before_silences_it(decoder: SparkplugDecoder) -> None:
    born(decoder)
    again = payload(metric("cdu.flow_lpm", 1.0, DOUBLE, alias=7), seq=2)
    assert send(decoder, "DBIRTH", again, "cdu1") == {FLOW: 1.0, SUPPLY: None}
    assert send(decoder, "DDATA", payload(metric(alias=1, value=9.0), seq=3), "cdu1") == {}
    assert send(decoder, "DDATA", payload(metric(alias=7, value=9.0), seq=4), "cdu1") == {FLOW: 9.0}


def test_data_before_a_birth_asks_for_one(decoder: SparkplugDecoder) -> None:
    assert isinstance(send(decoder, "DDATA", payload(metric(alias=1, value=1.0), seq=9), "cdu1"), Ignored)
    assert list(decoder.wants_rebirth) == ["spBv1.0/lab/NCMD/edge1"]


def test_a_mapping_of_one_s_own(site: Site) -> None:
    rule = {
        "table": "cdu",
        "entity": ["{device}"],
        "signals": {
            "Primary/Flow": {"signal": "facility_flow_lpm", "unit": "m3/h"},
            "Pump 1/Running": {"signal": "running_state", "states": {"1": 1, "0": 0}},
        },
    }
    d = SparkplugDecoder(site, mapping_of({"rules": [rule]}))
    body = payload(metric("Primary/Flow", 6.0, DOUBLE), metric("Pump 1/Running", True, BOOL), seq=1)
    assert send(d, "DBIRTH", body, "cdu1") == {
        ("cdu", 0, "facility_flow_lpm"): 100.0,
        ("cdu", 0, "running_state"): 1,
    }


@pytest.mark.parametrize(
    "topic",
    [
        "spBv1.0/lab",
        "spBv1.0/lab/DDATA/edge1",
        "spBv1.0/lab/NDATA/e/d",
        "spBv1.0//NDATA/e",
        "spBv1.0/a/DDATA/b/c/d",
        "spBv1.0/lab/NDATA/" + "x" * 2000,
    ],
)
def test_a_topic_of_the_wrong_form_is_bad(decoder: SparkplugDecoder, topic: str) -> None:
    with pytest.raises(BadMessage):
        decoder.decode(Message(T, topic, BORN))


@pytest.mark.parametrize(
    "topic", ["spBv1.0/STATE/host1/x", "spBv1.0/lab/NCMD/edge1", "other/lab/NBIRTH/edge1"]
)
def test_commands_and_states_are_ignored(decoder: SparkplugDecoder, topic: str) -> None:
    assert isinstance(decoder.decode(Message(T, topic, b"junk")), Ignored)


def test_too_much_is_refused(decoder: SparkplugDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for body in (b"\0" * (MAX_PAYLOAD + 1), text(2, b"") * (MAX_METRICS + 1), b"\x0a", b"\xff" * 40):
        with pytest.raises(BadMessage):
            send(decoder, "NBIRTH", body)
    monkeypatch.setattr(source, "MAX_EDGES", 3)
    monkeypatch.setattr(source, "MAX_ALIASES", 1)
    assert send(decoder, "DBIRTH", CDU_BORN, "cdu1")
    assert "more than 1 metrics announced" in decoder.faults.take()[0][0]
    for n in range(2):
        decoder.decode(Message(T, f"spBv1.0/lab/NBIRTH/other{n}", BORN))
    assert isinstance(decoder.decode(Message(T, "spBv1.0/lab/NBIRTH/other9", BORN)), Ignored)


def test_strangers_are_not_remembered(decoder: SparkplugDecoder) -> None:
    for n in range(200):
        send(
            decoder,
            "DBIRTH",
            payload(*(metric(f"m{n}-{k}", 1, INT32, alias=k) for k in range(50)), seq=n),
            f"d{n}",
        )
        send(decoder, "DDATA", payload(metric("cdu.flow_lpm", 1.0, DOUBLE), seq=n), f"x{n}")
    assert decoder._held == 0
    assert all(len(edge.parts) <= 1 for edge in decoder._edges.values())


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(["NBIRTH", "NDATA", "DBIRTH", "DDATA", "NDEATH", "DDEATH"]),
            st.binary(max_size=60) | st.sampled_from([BORN, CDU_BORN]),
        ),
        max_size=12,
    )
)
def test_whatever_arrives_is_answered(messages: list[tuple[str, bytes]]) -> None:
    d = SparkplugDecoder(SITE, *load_map("sparkplug"))
    for kind, body in messages:
        try:
            send(d, kind, body, "cdu1" if kind[0] == "D" else "")
        except BadMessage:
            continue
    assert d._held == sum(len(p.datatype) for e in d._edges.values() for p in e.parts.values())


def test_asking_for_births_is_what_the_standard_says() -> None:
    asked = read_payload(rebirth(1700))
    assert [(m.name, m.value(11)) for m in asked.metrics] == [("Node Control/Rebirth", True)]
    assert asked.t_ms == 1700
