"""A small site, the decoder of what its agents send, and how it answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.agents import FRAME, ItDecoder
from tests.support.builders import site_of
from twin.catalogue import BadMessage
from twin.site import Site
from twin.telemetry import Block, Message

T = 1_767_225_600 * 10**9


def a_site() -> Site:
    """Rack r1 of three nodes with two GPUs each, rack r2 of one node with four, rack r3 with none."""
    return site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": 3, "gpus_per_node": 2},
        {"name": "r2", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 4},
        {"name": "r3", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 0}]}]})  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> ItDecoder:
    return ItDecoder(a_site())


def blocks(decoder: ItDecoder, path: str, payload: bytes) -> list[Block]:
    got = decoder.decode(Message(T, FRAME + path, payload))
    assert isinstance(got, list)
    return [b for b in got if isinstance(b, Block)]


def refused(decoder: ItDecoder, body: Any, path: str = "lab/h/r1/node0", packed: bool = False) -> str:
    payload = msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)
    with pytest.raises(BadMessage) as caught:
        decoder.decode(Message(T, FRAME + path, payload))
    assert 0 < len(str(caught.value)) < 600
    return str(caught.value)
