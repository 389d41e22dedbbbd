"""Storms over a fleet: whatever is lost, late, killed or lied, no shared feeder stays above its budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import fleet_storm
from tests.support.fleet_storm import CURRENT_S, KINDS, NAMES, FaithfulNetwork, Storm
from tests.support.fleets import GUARANTEED_W, MOST_W
from tests.support.recorded_twin import RecordedTwin
from tests.support.sampled_cases import sampled
from twin.catalogue import NS
from twin.contracts import Decision
from twin.run import Recorder
from twin.site import HALL_BUDGET
from twin.telemetry import BudgetGranted, Frame, OperatorRequest

Begun = Callable[..., Storm]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """Storms by seed and number of kills, ended behind the test."""
    storms: list[Storm] = []

    def begin(seed: int, kills: int = 0) -> Storm:
        storms.append(Storm(seed, tmp_path, kills))
        return storms[-1]

    yield begin
    for storm in storms:
        storm.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", sampled((1, 2), 1)
)  # in which raises before decreases overload a feeder for 3 s
def test_no_shared_feeder_is_ever_above_its_budget(seed: int, begun: Begun) -> None:
    unharmed(begun(seed, 6).run(300))


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(3, 8))
def test_fifty_kills_of_each_harm_nothing(seed: int, begun: Begun) -> None:
    unharmed(begun(seed, 50).run(1800))


def unharmed(storm: Storm) -> None:
    assert [storm.faults[kind] for kind in KINDS] == [storm.kills] * len(KINDS), storm.faults
    assert max(storm.over_s.values()) == 0, storm
    assert storm.lent_w > 1.5 * max(GUARANTEED_W), "it lends, or nothing was tested"
    assert storm.refused, "lies and old epochs are refused"
    assert storm.stale_s <= CURRENT_S, "after each fault the hub is current again"
    assert len(storm.authors) > storm.kills / 2, "leaders came and went, or nothing was tested"
    assert not storm.damage()


def told_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are acknowledged before they are on the disk."""
    decide = RecordedTwin._decide

    def decided(twin: RecordedTwin, frame: Frame) -> Decision:
        out = decide(twin, frame)
        twin.acknowledge()
        return out

    monkeypatch.setattr(RecordedTwin, "_decide", decided)


def epoch_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor that goes on in the epoch of the leader before."""
    monkeypatch.setattr(Storm, "won", lambda storm: 1)
    monkeypatch.setattr(fleet_storm, "TAKEOVER_SHARE", 1.0)


def event_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants reach the engine and not the trace."""
    write = Recorder.before

    def before(recorder: Recorder, frame: Frame) -> None:
        kept = tuple(e for e in frame.events if not isinstance(e, BudgetGranted))
        write(recorder, dataclasses.replace(frame, events=kept))

    monkeypatch.setattr(Recorder, "before", before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "told"),
    sampled(
        [
            (told_too_soon, "acknowledged, are gone"),
            (epoch_kept, "granted by"),
            (event_untraced, "replayed: "),
        ],
        (told_too_soon, "acknowledged, are gone"),
    ),
)
def test_what_is_planted_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], told: str, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = begun(1, 4).run(100).damage()
    assert any(told in one for one in found), found


def test_with_the_hub_away_halls_fall_back_to_their_guaranteed_shares(begun: Begun) -> None:
    storm = begun(7)
    for hall in storm.halls:
        hall.demand_w = MOST_W
    storm.run(40)
    storm.hub_away_until_s = 1e9
    for second in range(40, 70):
        storm.network.now_s = float(second)
        for hall in storm.halls:
            hall.dead_since_s = None
            hall.step(float(second), storm.network)
    assert [hall.cap_w for hall in storm.halls] == list(GUARANTEED_W)


class HeldStorm(Storm):
    """A storm in which people narrow budgets for a while; `hold_s`: seconds with a hold in force."""

    hold_s = 0

    def _strike(self, second: int) -> None:
        super()._strike(second)
        self.hold_s += bool(self.hub.twin.engine.intake.requests)
        if second % 13 == 0:
            rng, hall = np.random.default_rng(second), f"fleet/campus/{NAMES[second % 2]}"
            hold = OperatorRequest(
                id=f"hold-{second}", author="ann", control=HALL_BUDGET, names=(hall,),
                lo=-np.inf, hi=float(rng.uniform(0, MOST_W)), want=None, reason="x",
                expires_ns=self.hub.twin.now_ns + round(rng.uniform(1, 60)) * NS,
            )  # fmt: skip
            self.hub.twin.inbox.put_event(hold)


@pytest.mark.long
@pytest.mark.slow
def test_people_who_narrow_budgets_overload_no_feeder(tmp_path: Path) -> None:
    storm = HeldStorm(1, tmp_path, 6).run(300)
    storm.close()
    assert max(storm.over_s.values()) == 0, storm
    assert storm.hold_s, "nobody held anything, or nothing was tested"
    assert storm.lent_w > 1.5 * max(GUARANTEED_W)


def test_a_grant_that_was_overtaken_moves_nothing(begun: Begun) -> None:
    storm = begun(3)
    storm.network = storm.hub.wire.network = network = FaithfulNetwork(storm.rng)
    one, other = storm.halls
    one.demand_w, high = MOST_W, None
    for second in range(60):
        storm.step(second)
        newest = next((parcel for parcel in reversed(network.kept) if parcel.to == one.name), None)
        if high is None and second > 20 and newest is not None and newest.at_s > second:  # just renewed
            high, at_s = newest, second
            assert one.cap_w > 800e3
            one.demand_w, other.demand_w = 200e3, MOST_W
            network.withhold(high)
        elif high is not None and other.cap_w > 700e3:  # raised, as the other one gave way
            one.demand_w = MOST_W
            storm.step(second + 1)  # in which the lower one is sent again
            network.release(high)
            storm.step(second + 2)
            break
    assert high is not None
    assert second < at_s + 8, "it still runs"
    assert one.cap_w == GUARANTEED_W[0]
    assert max(storm.over_s.values()) == 0
