"""The decoder's limits: its table of points and its notes stay bounded, whoever publishes what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from connectors.dsx import BmsDecoder, bms
from twin.telemetry import Ignored, Message


class OneRack:
    """A site with one rack and one CDU."""

    def entity(self, table: str, name: str) -> int | None:
        return 0 if (table, name) in (("rack", "r1"), ("cdu", "c1")) else None


SITE = OneRack()


def meta(kind: str, point: str, tag: str, **fields: Any) -> Message:
    body = {"objectType": kind, "pointType": point, **fields}
    return Message(0, f"BMS/v1/PUB/Metadata/{kind}/{point}/{tag}", json.dumps(body).encode())


def value(topic: str, number: float) -> Message:
    body = {"value": number, "timestamp": 1_767_225_600_000, "quality": 1}
    return Message(0, f"BMS/v1/PUB/Value/{topic}", json.dumps(body).encode())


def test_the_table_of_points_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bms, "MAX_POINTS", 100)
    d = BmsDecoder(SITE)
    made = [meta("Rack", "RackPower", f"t{i}", rackLocationId="r1", engUnit="kW") for i in range(200)]
    answers = [d.decode(m) for m in made]
    assert answers[:100] == [[]] * 100
    assert answers[100] == Ignored("Metadata", "the table of points is full (100)")
    assert "more than 64" in d.decode(value("Rack/RackPower/t80", 1)).why  # type: ignore[union-attr]
    assert d.decode(made[5]) == []  # known ones still count
    assert d.decode(made[5]._replace(payload=b"")) == []
    assert d.decode(made[150]) == []


def test_the_bytes_of_the_table_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bms, "MAX_POINT_BYTES", 1000)
    d = BmsDecoder(SITE)
    made = [meta("Rack", "RackPower", f"t{i}", rackLocationId="r1", engUnit="kW") for i in range(50)]
    full = [isinstance(d.decode(m), Ignored) for m in made]
    assert not full[0]
    assert full[-1]
    for message in made:
        d.decode(message._replace(payload=b""))  # cleared: the room is free again
    assert [isinstance(d.decode(m), Ignored) for m in made] == full


def test_notes_are_bounded() -> None:
    d = BmsDecoder(SITE)
    for i in range(600):
        slip = "Secondary" + chr(97 + i // 26) + chr(97 + i % 26)
        d.decode(meta("CDU", "LiquidFlow", f"t{i}", objectId="c1", engUnit="LPM", processArea=[slip]))
    assert len(d.notes) == bms.MAX_NOTES + 1
    assert d.notes["more notes, not kept"] > 100
