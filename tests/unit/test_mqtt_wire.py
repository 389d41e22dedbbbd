"""The stream of an MQTT connection: cut anywhere it gives the same, and what waits is bounded."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from connectors.mqtt.wire import PARCEL_BYTES, MessageBacklog, Parcel, Splitter, WireError


def packet(kind: int, body: bytes) -> bytes:
    out, n = bytearray([kind]), len(body)
    while True:
        n, low = divmod(n, 128)
        out.append(low | (0x80 if n else 0))
        if not n:
            return bytes(out) + body


def publication(topic: bytes, payload: bytes, mid: int = 0, retained: bool = False) -> bytes:
    number = mid.to_bytes(2, "big") if mid else b""
    kind = 0x30 | (0x02 if mid else 0) | retained
    return packet(kind, len(topic).to_bytes(2, "big") + topic + number + payload)


PUBACK, PINGRESP = packet(0x40, b"\0\7"), packet(0xD0, b"")


@given(
    st.lists(
        st.one_of(
            st.just(PUBACK),
            st.just(PINGRESP),
            st.builds(
                publication,
                st.text("ab/ü", max_size=40).map(str.encode),
                st.binary(max_size=300),
                st.integers(0, 65_535),
                st.booleans(),
            ),
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_the_pieces_do_not_matter(packets: list[bytes], chance: random.Random) -> None:
    stream = b"".join(packets)
    whole, cut = Splitter(200), Splitter(200)
    control = whole.feed(stream, 1)
    pieces, at = b"", 0
    while at < len(stream):
        step = chance.randint(1, 50)
        pieces += cut.feed(stream[at : at + step], 1)
        at += step
    assert pieces == control == b"".join(p for p in packets if p[0] & 0xF0 != 0x30)
    assert cut.parcels == whole.parcels
    assert len(whole.parcels) == sum(p[0] & 0xF0 == 0x30 for p in packets)


def test_a_publication_is_read() -> None:
    splitter = Splitter(10**6)
    assert splitter.feed(publication("a/ü".encode(), b"\0x", 513, True), 7) == b""
    assert splitter.parcels == [Parcel(7, "a/ü", b"\0x", 513, True, 2 + 3 + PARCEL_BYTES)]


@pytest.mark.parametrize("mid", [0, 9])
def test_what_is_too_large_is_never_held_but_can_be_acknowledged(mid: int) -> None:
    splitter = Splitter(100_000)
    stream = publication(b"big", bytes(30_000_000), mid) + publication(b"next", b"1")
    tracemalloc.start()
    for at in range(0, len(stream), 65_536):
        splitter.feed(stream[at : at + 65_536], 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    big, following = splitter.parcels
    assert (big.topic, big.payload, big.mid) == ("big", b"", mid)
    assert "30000005 bytes" in big.lost or "30000007 bytes" in big.lost
    assert following.payload == b"1"
    assert peak < 1_000_000


def test_long_but_allowed_messages_are_put_together_in_linear_time() -> None:
    splitter = Splitter(20_000_000)
    stream = publication(b"big", bytes(16_000_000))
    for at in range(0, len(stream), 1000):
        splitter.feed(stream[at : at + 1000], 1)
    assert len(splitter.parcels[0].payload) == 16_000_000


def test_a_topic_that_is_no_text_is_lost_and_said_so() -> None:
    splitter = Splitter(1000)
    splitter.feed(publication(b"a\xff", b"x", 3), 1)
    (parcel,) = splitter.parcels
    assert (parcel.mid, parcel.payload, parcel.lost) == (3, b"", "its topic is not UTF-8")


@pytest.mark.parametrize(
    "stream, said",
    [
        (b"\x30\xff\xff\xff\xff\x01", "more than four bytes"),
        (packet(0x30, b"\0\x09abc"), "shorter than its own topic"),
        (packet(0x30, b"\0"), "shorter than its own topic"),
        (packet(0x32, b"\0\1a"), "shorter than its own topic"),
        (packet(0x32, b"\0\1a\0\0"), "without a packet id"),
        (packet(0x34, b"\0\1a\0\1"), "QoS 2"),
        (packet(0x90, bytes(70_000)), "control packet"),
    ],
)
def test_what_is_no_mqtt_ends_the_link(stream: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        Splitter(1000).feed(stream, 1)


@given(st.binary(max_size=400))
def test_any_bytes_give_parcels_or_a_wire_error(stream: bytes) -> None:
    splitter = Splitter(100)
    with contextlib.suppress(WireError):
        splitter.feed(stream, 1)
    assert all(isinstance(p.topic, str) for p in splitter.parcels)


def parcel(name: str, mid: int = 0, retained: bool = False, size: int = 1) -> Parcel:
    return Parcel(1, name, b"", mid, retained, size)


def test_a_full_queue_loses_its_oldest_of_qos_0() -> None:
    backlog = MessageBacklog(10, 10**6)
    assert backlog.put([parcel("kept", mid=1), parcel("old"), parcel("meta", retained=True)]) == 0
    assert backlog.put([parcel(str(i)) for i in range(8)]) == 2
    assert [backlog.pop().topic for _ in range(len(backlog))] == ["kept", "meta", *"1234567"]
    assert (backlog.dropped, backlog.bytes, backlog.blocked) == (2, 0, False)


def test_a_queue_full_of_what_comes_only_once_wants_no_more_until_half_is_gone() -> None:
    backlog = MessageBacklog(10, 10**6)
    assert backlog.put([parcel(str(i), mid=i) for i in range(1, 13)]) == 0
    assert backlog.blocked
    for _ in range(6):
        backlog.pop()
        assert backlog.blocked
    backlog.pop()
    assert not backlog.blocked


def test_bytes_are_bounded_too() -> None:
    backlog = MessageBacklog(10**6, 1000)
    for i in range(100):
        backlog.put([parcel(str(i), size=100)])
        assert backlog.bytes <= 1000
    assert backlog.dropped + len(backlog) == 100
    assert backlog.pop().topic == str(backlog.dropped)


def test_a_flood_costs_little_for_each_message() -> None:
    backlog = MessageBacklog(20_000, 2**40)
    waiting = [parcel("m", mid=1)] * 5000
    backlog.put(waiting)
    piece = [parcel("x")] * 100
    for _ in range(5000):
        backlog.put(piece)
    assert len(backlog) <= 20_000
    assert backlog.dropped >= 480_000
