"""Storms over a fleet: whatever is lost, late, killed or lied, no shared feeder stays above its budget."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.fleet_storm import NAMES, Storm
from tests.support.fleets import GUARANTEED_W, MOST_W
from twin.catalogue import NS
from twin.site import HALL_BUDGET
from twin.telemetry import OperatorRequest


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2))  # in which raises before decreases overload a feeder for 3 s
def test_no_shared_feeder_is_ever_above_its_budget(seed: int) -> None:
    storm = Storm(seed).run(600)
    assert max(storm.over_s.values()) == 0, storm
    assert storm.lent_w > 1.5 * max(GUARANTEED_W), "it lends, or nothing was tested"
    assert storm.refused, "lies and old epochs are refused"


def test_with_the_hub_away_halls_fall_back_to_their_guaranteed_shares() -> None:
    storm = Storm(7)
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
        self.hold_s += bool(self.hub.engine.intake.requests)
        if second % 13 == 0:
            rng, hall = np.random.default_rng(second), f"fleet/campus/{NAMES[second % 2]}"
            hold = OperatorRequest(
                id=f"hold-{second}", author="ann", control=HALL_BUDGET, names=(hall,),
                lo=-np.inf, hi=float(rng.uniform(0, MOST_W)), want=None, reason="x",
                expires_ns=self.hub.now_ns + round(rng.uniform(1, 60)) * NS,
            )  # fmt: skip
            self.hub.inbox.put_event(hold)


@pytest.mark.slow
def test_people_who_narrow_budgets_overload_no_feeder() -> None:
    storm = HeldStorm(1).run(600)
    assert max(storm.over_s.values()) == 0, storm
    assert storm.hold_s, "nobody held anything, or nothing was tested"
    assert storm.lent_w > 1.5 * max(GUARANTEED_W)
