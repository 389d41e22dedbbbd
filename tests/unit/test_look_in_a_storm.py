"""A look in a storm of faults takes two ticks: nothing is lost, and a restart in between changes nothing."""

from __future__ import annotations

import pytest

from tests.support.builders import Twin, eight_nodes
from twin.contracts import FAILED
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.health import health
from twin.telemetry import FaultReported


def faults(many: int, begin: int) -> list[FaultReported]:
    names = [f"r1/node{k % 8}/gpu0" for k in range(many)]
    return [
        FaultReported(id=f"f{begin + k}", table="gpu", name=name, code=79 if k == 0 else 31)
        for k, name in enumerate(names)
    ]


def looked(twin: Twin) -> tuple[bool, bool]:
    """(whether the parts, whether the nodes were judged in this tick)."""
    health = twin.engine.health
    return health.looked_ns == twin.now_ns, health.whole_ns == twin.now_ns


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> Twin:
    monkeypatch.setattr(health, "STORM", 40)
    twin = Twin(eight_nodes())
    twin.tick({"gpu.power_w": 300.0, "node.power_w": 800.0})
    assert looked(twin) == (True, True)
    return twin


def test_a_few_faults_are_judged_at_once(storm: Twin) -> None:
    storm.tick(None, *faults(39, 0))
    assert looked(storm) == (True, True)


def test_a_storm_is_judged_in_two_ticks(storm: Twin) -> None:
    seen = []
    for second in range(6):
        storm.tick(None, *faults(40, 40 * second))
        seen.append(looked(storm))
        assert storm.engine.health.book.counts["heard"] == 40 * (second + 1)
    assert seen == [(True, False), (False, True)] * 3
    assert storm.engine.health.health("node").level[0] == FAILED
    assert any(f.id == "health/lab/h/r1/node0" for f in storm.decision.findings)
    assert len(storm.engine.health.log().node) == 1


def test_the_second_half_comes_when_the_storm_is_over(storm: Twin) -> None:
    storm.tick(None, *faults(40, 0))
    assert looked(storm) == (True, False)
    storm.tick()
    assert looked(storm) == (False, True)
    storm.tick()
    assert looked(storm) == (False, False)


def test_a_restart_between_the_halves_changes_nothing(storm: Twin) -> None:
    storm.tick(None, *faults(40, 0))
    other = Twin(eight_nodes())
    other.engine.restore(decode(encode(storm.engine.dump())))
    other.now_ns, other.number = storm.now_ns, storm.number
    for twin in (storm, other):
        twin.tick()
        assert looked(twin) == (False, True)
    assert other.engine.checksum() == storm.engine.checksum()
    assert other.decision.findings == storm.decision.findings
